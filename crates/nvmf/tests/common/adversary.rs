//! An adversarial host and an operator, driven by a script of bytes: valid, corrupted and random PDUs in
//! every state of a connection, while namespaces, access control and ANA states change.
//!
//! Shared by the bounded random test of this crate, the replay of the corpus, and the fuzz target. A run
//! must be cheap, since there are hundreds of millions of them: all limits are as small as possible, start
//! states come from bytes that are encoded once, the pools outlive a run, and data is cut from one pattern.
//! Each step reads one byte of the script for the action and a few for its parameters.
//!
//! Some connections complete commands at once ([`DirectMemory`]), and their host sends several commands together.
//!
//! Checked after every step: no panic; no pool exceeds its budget; no connection holds more than its
//! limits, received or unsent; every sent PDU is valid; no command is completed twice. At the end every
//! buffer, connection and controller is released.

use super::script::{self, Script};
use super::*;
use octokv_nvmf::{
    AnaState, ControllerReport, ControllerState, ControllerType, CounterSet, HealthStatus, HostAcl,
};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::sync::LazyLock;

/// The longest value and transfer.
pub const VALUE_BYTES_MAX: u32 = 16 << 10;
/// The most in-capsule data.
pub const CAPSULE_BYTES_MAX: u32 = 2 << 10;
const SEND_BUFFER_BYTES_MAX: usize = 24 << 10;
/// May be unsent beyond the limit: the response of the last accepted command, and completions without data.
const RESPONSE_BYTES_MAX: usize = VALUE_BYTES_MAX as usize + 4096;
const ENTRIES: u16 = 16;
const STEPS_MAX: usize = 256;
/// Start states from this on are I/O queues whose commands may be completed at once.
const DIRECT_STATE_MIN: u8 = 18;
/// The bytes of a script that let a host send the next command together with this one.
const GROUPED_CHOICE_MIN: u8 = 64;
/// The most bytes that a host sends together.
const GROUP_BYTES_MAX: usize = 4096;
/// The longest PDU that is consumed whole: headers, padding, a capsule of an admin queue, digests.
const PDU_BYTES_MAX: usize = 255 + 8192 + 8;

/// Values that all runs share.
struct SharedFixtures {
    config: SubsystemConfig,
    namespaces: [NamespaceInfo; 3],
    /// The bytes that bring a connection into this state, for each choice of digests.
    admin: [Vec<u8>; 4],
    discovery: [Vec<u8>; 4],
    io: [Vec<u8>; 4],
    initial: [Vec<u8>; 4],
    address: SocketAddr,
}

static FIXTURES: LazyLock<SharedFixtures> = LazyLock::new(|| {
    let mut config = SubsystemConfig::new(NQN);
    config.queue_depth = ENTRIES;
    config.receive_bytes_max = 32 << 10;
    config.send_buffer_bytes_max = SEND_BUFFER_BYTES_MAX;
    config.value_bytes_max = VALUE_BYTES_MAX;
    config.in_capsule_bytes = CAPSULE_BYTES_MAX;
    config.h2c_data_bytes_max = 4096;
    let digests = [0, 1, 2, 3].map(|bits| (bits & 1 != 0, bits & 2 != 0));
    SharedFixtures {
        config,
        namespaces: [namespace_of(0, 1), namespace_of(1, 2), namespace_of(2, 3)],
        admin: digests.map(|digests| script::connect_sequence(digests, Some((0, NQN)), 0)),
        discovery: digests.map(|digests| script::connect_sequence(digests, Some((0, nqn::DISCOVERY)), 0)),
        io: digests.map(|digests| script::connect_sequence(digests, Some((1, NQN)), 1)),
        initial: digests.map(|digests| script::connect_sequence(digests, None, 0)),
        address: "10.0.0.1:4420".parse().unwrap(),
    }
});

thread_local! {
    // One is ample for the largest transfer, the other barely holds two.
    static POOLS: [BufferPool; 2] = [BufferPool::new(256 << 10), BufferPool::new(40 << 10)];
    static SPARE_BUFFERS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// A namespace of one of three kinds, small enough that commands often reach its end.
fn namespace_of(kind: u8, id: u32) -> NamespaceInfo {
    let kind = match kind % 3 {
        0 => NamespaceKind::KeyValue {
            value_bytes_max: VALUE_BYTES_MAX,
            key_bytes_max: 64,
            has_iterators: true,
            record_layout: RECORD_LAYOUT,
        },
        1 => NamespaceKind::Block { block_bytes: 512 },
        _ => NamespaceKind::Block { block_bytes: 4096 },
    };
    NamespaceInfo { size_bytes: 64 << 10, kind, ana_group: 1 + id % 2, ..namespace(id) }
}

/// One connection with the state of its host and its node.
pub struct FuzzConnection {
    pub connection: Connection,
    pub params: NegotiatedParams,
    /// Transfers that were requested and not completely sent.
    pub open_r2ts: Vec<DataHeader>,
    /// Requests in flight, each with its namespace as of its submission.
    requests: Vec<(IoRequest, Option<NamespaceInfo>)>,
    /// Sent by the host and not consumed by the connection.
    unsent: Vec<u8>,
    received: Vec<u8>,
    /// Data of responses that was lent, all so far.
    loans: Vec<Vec<u8>>,
    /// It started as an I/O queue.
    pub is_io: bool,
    /// Whether commands may be completed at once.
    is_direct: bool,
    /// Whether the host reads responses.
    is_reading: bool,
    /// Commands sent and completions received, exact unless `is_corrupted`.
    commands: u64,
    completions: u64,
    pub is_corrupted: bool,
}

/// The state of one run.
struct Simulation {
    target: Arc<Target>,
    pool: BufferPool,
    now: Nanos,
    engine: MemoryEngine,
    direct_operations: u64,
    completed_at_once: u64,
    connections: Vec<FuzzConnection>,
    new_requests: Vec<IoRequest>,
}

impl Simulation {
    /// Creates the state that the script selects.
    fn new(script: &mut Script<'_>) -> Simulation {
        let fixtures = &*FIXTURES;
        let target = Target::new(fixtures.config.clone(), fixtures.namespaces.to_vec());
        let choice = script.byte();
        let pool = POOLS.with(|pools| pools[usize::from(choice & 1)].clone());
        let now = Nanos::from_secs(100);
        let mut simulation = Simulation {
            target,
            pool,
            now,
            engine: MemoryEngine::default(),
            direct_operations: 0,
            completed_at_once: 0,
            connections: Vec::new(),
            new_requests: Vec::new(),
        };
        let digests = usize::from(choice >> 1 & 3);
        if choice >> 3 > 8 {
            let admin = simulation.open(&fixtures.admin[0], 0);
            simulation.connections.push(admin);
        }
        let main = simulation.open_as(choice >> 3, digests);
        simulation.connections.insert(0, main);
        simulation
    }

    /// Opens a connection in one of the states.
    fn open_as(&mut self, state: u8, digests: usize) -> FuzzConnection {
        let fixtures = &*FIXTURES;
        // With digests, no command is completed at once.
        let digests = if state > DIRECT_STATE_MIN { 0 } else { digests };
        let controllers = self.target.controllers();
        let serves = |one: &&ControllerReport| {
            one.controller_type == ControllerType::Io && one.state == ControllerState::Ready
        };
        let io = controllers.iter().filter(serves).map(|one| one.id).max();
        match (state, io) {
            (0, _) => self.open(&[], 0),
            (1, _) => self.open(&fixtures.initial[digests], digests),
            (2..=5, _) | (_, None) => self.open(&fixtures.admin[digests], digests),
            (6..=8, _) => self.open(&fixtures.discovery[digests], digests),
            (_, Some(1)) => {
                let conn = self.open(&fixtures.io[digests], digests);
                FuzzConnection { is_io: true, is_direct: state >= DIRECT_STATE_MIN, ..conn }
            }
            (_, Some(id)) => {
                let digest = (digests & 1 != 0, digests & 2 != 0);
                let connect_bytes = script::connect_sequence(digest, Some((1, NQN)), id);
                let conn = self.open(&connect_bytes, digests);
                FuzzConnection { is_io: true, is_direct: state >= DIRECT_STATE_MIN, ..conn }
            }
        }
    }

    /// Opens a connection that has consumed these bytes.
    fn open(&mut self, connect_bytes: &[u8], digests: usize) -> FuzzConnection {
        let address = FIXTURES.address;
        let mut connection = Connection::new(Arc::clone(&self.target), address, address, self.now);
        let consumed = connection.receive(self.now, connect_bytes, &self.pool, &mut self.new_requests);
        assert_eq!(consumed.consumed_bytes, connect_bytes.len());
        let send_buffer = connection.send_buffer();
        send_buffer.advance(send_buffer.unsent_bytes());
        let mut params = NegotiatedParams::initial();
        (params.header_digest, params.data_digest) = (digests & 1 != 0, digests & 2 != 0);
        let spare = || SPARE_BUFFERS.with(|spare| spare.borrow_mut().pop().unwrap_or_default());
        FuzzConnection {
            connection,
            params,
            open_r2ts: Vec::new(),
            requests: Vec::new(),
            unsent: spare(),
            received: spare(),
            loans: Vec::new(),
            is_io: false,
            is_direct: false,
            is_reading: true,
            commands: 0,
            completions: 0,
            is_corrupted: false,
        }
    }

    /// Passes the host's bytes to a connection, and reads the response.
    fn pump(&mut self, at: usize) {
        let Simulation { target, pool, now, engine, connections, new_requests, .. } = self;
        let conn = &mut connections[at];
        let mut direct = DirectMemory {
            engine,
            target,
            is_open: conn.is_direct,
            operations: &mut self.direct_operations,
            namespace: NSID,
            loans: &mut conn.loans,
            at_once: &mut self.completed_at_once,
        };
        let consumed = conn.connection.receive_direct(*now, &conn.unsent, pool, new_requests, &mut direct);
        conn.unsent.drain(..consumed.consumed_bytes);
        if consumed.stalled.is_none() {
            assert!(conn.unsent.len() <= PDU_BYTES_MAX, "{} B were not consumed", conn.unsent.len());
        }
        self.take_requests(at);
    }

    fn take_requests(&mut self, at: usize) {
        let conn = &mut self.connections[at];
        if !self.new_requests.is_empty() {
            let namespaces = self.target.namespaces();
            let tagged = self.new_requests.drain(..).map(|request| {
                let info = namespaces.get(request.namespace).cloned();
                assert!(info.is_some(), "a request for an unknown namespace: {request:?}");
                (request, info)
            });
            conn.requests.extend(tagged);
        }
        if conn.is_reading {
            conn.read();
        }
    }

    /// Completes some of a connection's requests, newest or oldest first, successfully or not.
    fn complete(&mut self, at: usize, count: usize, how: u8) {
        for _ in 0..count {
            let conn = &mut self.connections[at];
            if conn.requests.is_empty() {
                break;
            }
            let newest = how & 1 != 0;
            let (request, info) = if newest { conn.requests.pop().unwrap() } else { conn.requests.remove(0) };
            let IoRequest { slot, namespace, operation } = request;
            let outcome = match how >> 1 & 15 {
                0 => RequestOutcome::Busy,
                1 => RequestOutcome::NotReady,
                2 => RequestOutcome::Unrecovered,
                3 => RequestOutcome::CapacityExceeded,
                _ => self.engine.execute_on(info.as_ref(), namespace, operation),
            };
            conn.connection.complete(slot, outcome);
        }
        self.pump(at);
    }

    /// One action of the operator.
    fn reconfigure_target(&mut self, script: &mut Script<'_>) {
        let (what, how) = (script.byte(), script.byte());
        let id = NamespaceId(1 + u32::from(how % 4));
        match what % 8 {
            0 => drop(self.target.add_namespace(namespace_of(how >> 2, id.0))),
            1 => drop(self.target.remove_namespace(id)),
            2 => self.target.notify_namespace_changed(id),
            3 => {
                let states = [
                    AnaState::Optimized,
                    AnaState::NonOptimized,
                    AnaState::Inaccessible,
                    AnaState::PersistentLoss,
                    AnaState::Change,
                ];
                self.target.set_ana_state(1 + u32::from(how & 1), states[usize::from(how >> 1) % 5]);
            }
            4 => self.target.set_host_acl(match how % 8 {
                0 => HostAcl::Listed(Default::default()),
                1..=3 => HostAcl::Listed([HOST_NQN.to_owned()].into()),
                _ => HostAcl::Any,
            }),
            5 => self.target.set_listeners(vec![FIXTURES.address; usize::from(how % 4)]),
            6 => self.target.set_referrals(vec![FIXTURES.address; usize::from(how % 3)]),
            _ => self.target.set_health(HealthStatus {
                available_spare_percent: how,
                read_only: how & 1 != 0,
                ..HealthStatus::default()
            }),
        }
    }

    /// Advances the time of all connections.
    fn advance_time(&mut self, span: Nanos) {
        self.now = self.now + span;
        for conn in &mut self.connections {
            if conn.connection.next_deadline() <= self.now {
                conn.connection.tick(self.now);
            }
            if conn.is_reading {
                conn.read();
            }
        }
    }

    fn check_invariants(&mut self) {
        assert!(self.pool.in_use_bytes() <= self.pool.budget_bytes());
        for conn in &mut self.connections {
            assert!(conn.connection.in_flight() <= usize::from(ENTRIES.max(128)));
            // A shutdown is one command with several requests.
            assert!(conn.connection.in_flight() <= conn.requests.len());
            assert_eq!(conn.connection.in_flight() == 0, conn.requests.is_empty());
            let unsent = conn.connection.send_buffer().unsent_bytes();
            assert!(unsent <= SEND_BUFFER_BYTES_MAX + RESPONSE_BYTES_MAX, "{unsent} B are unsent");
        }
    }

    /// Replaces a closed connection by a new one.
    fn reopen(&mut self, script: &mut Script<'_>, at: usize) {
        while !self.connections[at].requests.is_empty() {
            self.complete(at, usize::MAX, 0b11110);
        }
        let choice = script.byte();
        let state = if at == 0 { choice >> 3 } else { 2 };
        let conn = self.open_as(state, usize::from(choice >> 1 & 3));
        std::mem::replace(&mut self.connections[at], conn).recycle();
    }

    /// Executes one step of the script for connection `at`.
    fn step(&mut self, script: &mut Script<'_>, at: usize) {
        if self.connections[at].connection.is_closed() {
            return self.reopen(script, at);
        }
        match script.byte() {
            0..=39 => {
                let how = script.byte();
                self.complete(at, usize::from(how >> 5) + 1, how);
            }
            40..=55 => self.reconfigure_target(script),
            56..=63 => self.advance_time(Nanos::from_millis(u64::from(script.byte()) * 4)),
            64..=65 => self.advance_time(Nanos::from_secs(u64::from(script.byte()))),
            66..=69 => self.connections[at].is_reading ^= true,
            70..=75 => self.receive_in_place(at, script),
            76 => self.connections[at].connection.peer_closed(),
            choice => {
                let Simulation { connections, .. } = self;
                let conn = &mut connections[at];
                let from = conn.unsent.len();
                let commands = script::next_bytes(script, conn, choice);
                conn.commands += commands;
                // Rarely flips a bit or delays the rest.
                let sent = conn.unsent.len() - from;
                let corruption_choice = script.byte();
                if corruption_choice < 3 && sent > 0 {
                    let bit = usize::from(script.byte()) | usize::from(script.byte()) << 8;
                    conn.unsent[from + bit / 8 % sent] ^= 1 << (bit % 8);
                    conn.is_corrupted = true;
                } else if corruption_choice < 24 && sent > 0 {
                    let cut = from + usize::from(script.byte()) % sent;
                    let rest = conn.unsent.split_off(cut);
                    self.pump(at);
                    self.connections[at].unsent.extend(rest);
                }
                // Without a pump, the next command is in the same group.
                let is_grouped = self.connections[at].is_direct && corruption_choice >= GROUPED_CHOICE_MIN;
                if !is_grouped || self.connections[at].unsent.len() > GROUP_BYTES_MAX {
                    self.pump(at);
                }
            }
        }
    }

    /// Receives data directly into its payload buffer.
    fn receive_in_place(&mut self, at: usize, script: &mut Script<'_>) {
        let Simulation { connections, pool, new_requests, now, .. } = self;
        let conn = &mut connections[at];
        if !conn.unsent.is_empty() {
            return;
        }
        let Some(buffer) = conn.connection.payload_buffer() else { return };
        let count = buffer.len().min(usize::from(script.byte()) * 16);
        buffer[..count].copy_from_slice(script::pattern(count));
        conn.connection.payload_received(*now, count, pool, new_requests);
        // The host's own data of this transfer becomes invalid.
        conn.is_corrupted = true;
        self.take_requests(at);
    }
}

impl FuzzConnection {
    /// Takes the unsent bytes, for the script to append to.
    pub fn take_unsent(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.unsent)
    }

    /// Returns them.
    pub fn give_unsent(&mut self, unsent: Vec<u8>) {
        self.unsent = unsent;
    }

    /// Ends the connection and keeps its buffers for another one.
    fn recycle(self) {
        let FuzzConnection { mut unsent, mut received, .. } = self;
        unsent.clear();
        received.clear();
        SPARE_BUFFERS.with(|spare| spare.borrow_mut().extend([unsent, received]));
    }

    /// Reads all unsent bytes and checks every PDU.
    fn read(&mut self) {
        let send_buffer = self.connection.send_buffer();
        if send_buffer.is_empty() {
            return;
        }
        while !send_buffer.is_empty() {
            let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(8);
            send_buffer.slices_with(|data| direct::resolve(&self.loans, data), &mut slices, usize::MAX);
            let mut bytes = 0;
            for slice in &slices {
                self.received.extend_from_slice(slice);
                bytes += slice.len();
            }
            drop(slices);
            send_buffer.advance(bytes);
        }
        let mut at = 0;
        while let Some(unchecked) = UncheckedCommonHeader::new(&self.received[at..]) {
            let layout = unchecked.check(Role::Host, &self.params).expect("a valid PDU from the target");
            let pdu = &self.received[at..at + layout.pdu_bytes()];
            at += layout.pdu_bytes();
            let (from, bytes) = (layout.prefix_bytes as usize, layout.data_bytes as usize);
            let data = &pdu[from..from + bytes];
            if layout.trailer_bytes > 0 {
                assert_eq!(pdu[from + bytes..], crc32c(data).to_le_bytes(), "data digest");
            }
            match layout.decode_header(pdu).expect("a matching header digest") {
                PduHeader::IcResponse(ic) => {
                    let ic = ic.check_response().unwrap();
                    (self.params.header_digest, self.params.data_digest) = (ic.header_digest, ic.data_digest);
                }
                PduHeader::Response(_) => self.completions += 1,
                PduHeader::Data(range) => {
                    assert_eq!(range.bytes as usize, data.len());
                    assert!(layout.is_last() && !layout.is_success() && !data.is_empty());
                }
                PduHeader::ReadyToTransfer(range) => {
                    assert!(range.bytes > 0);
                    self.open_r2ts.push(range);
                }
                PduHeader::TermReq(_) => {}
                PduHeader::IcRequest(_) | PduHeader::Command(_) => panic!("{:?} to a host", layout.pdu_type),
            }
        }
        assert_eq!(at, self.received.len(), "the target sent an incomplete PDU");
        self.received.clear();
        assert!(self.is_corrupted || self.completions <= self.commands, "more completions than commands");
    }
}

/// Runs a script to its end; returns the target's counters and the number of commands completed at once. Panics only on a
/// defect of the target.
pub fn run_script(bytes: &[u8]) -> (CounterSet, u64) {
    let script = &mut Script(bytes);
    let mut simulation = Simulation::new(script);
    for _ in 0..STEPS_MAX {
        if script.is_over() {
            break;
        }
        let at = usize::from(simulation.connections.len() > 1 && script.one_in(6));
        simulation.step(script, at);
        simulation.check_invariants();
    }
    for at in 0..simulation.connections.len() {
        while !simulation.connections[at].requests.is_empty() {
            simulation.connections[at].is_reading = true;
            simulation.complete(at, usize::MAX, 0b11110);
        }
    }
    simulation.connections.into_iter().for_each(FuzzConnection::recycle);
    assert_eq!(simulation.pool.in_use_bytes(), 0, "a buffer leaked");
    assert_eq!(simulation.target.connection_count(), 0, "a connection leaked");
    assert!(simulation.target.controllers().is_empty(), "a controller leaked");
    (simulation.target.counters(), simulation.completed_at_once)
}
