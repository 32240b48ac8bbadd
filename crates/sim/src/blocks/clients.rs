//! One client host of block namespaces: sessions of the production client that read, write, write zeroes, deallocate,
//! compare, verify and flush at random.
//!
//! In: the node's address, a random number generator, and the state shared by all hosts. Out: calls and their
//! results in the history of the disk, by block, and the first violation.
//!
//! Invariants: each submitted command completes exactly once while its session exists; a command of a dropped
//! session has an unknown outcome; while quiescing, sessions submit nothing and end, by a disconnect or by a drop.
//! A command on several blocks is one call on each: it is not atomic across blocks.

use super::scenario::{BlockLoad, DiskPlan};
use crate::client_host::{ClientHost, client_config};
use crate::draw::draw_weighted;
use crate::faulty_disk::DiskFaults;
use crate::history::{CallId, History};
use crate::scenario::ClientHostPlan;
use octokv_base::map::FxHashMap;
use octokv_base::{Lba, NamespaceId, Nanos, Prng};
use octokv_client::{ClientConfig, Command, ConnectionError, Error, Response, Session, SubmitError, Value};
use octokv_engine::PutMode;
use octokv_engine::conformance::value_of;
use octokv_engine::linearizability::{Call, CallResult, Observed};
use octokv_runtime::ReactorHandle;
use octokv_runtime::simulated::{SimEnv, SimHostId, SimSockets};
use octokv_wire::Status;
use octokv_wire::nvm::LbaRange;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

/// State shared by all client hosts of a simulation.
pub struct BlockRunState {
    /// Calls and results of all clients, by disk; the keys are blocks.
    pub histories: Vec<History>,
    /// Configuration of the disks.
    pub disks: Vec<DiskPlan>,
    /// Current namespace of each disk; `None` while it has none.
    pub served_as: Vec<Option<NamespaceId>>,
    /// Distribution of commands.
    pub load: BlockLoad,
    /// Maximum transfer size of a command, in bytes.
    pub bytes_max: u64,
    /// Commands submitted so far.
    pub submitted: u64,
    /// Maximum of `submitted` in this phase.
    pub submit_limit: u64,
    /// Commands completed, or lost with their session.
    pub completed: u64,
    /// Commands completed without error.
    pub succeeded: u64,
    /// Commands rejected because of a change by the operator.
    pub rejected_commands: u64,
    /// The first violated guarantee.
    pub violation: Option<String>,
    /// Active faults of the node's disks.
    pub faults: DiskFaults,
    /// Whether clients submit nothing and disconnect.
    pub quiescing: bool,
    /// Whether an operator changes the node during the simulation.
    pub has_operator: bool,
    /// Whether a command timeout is a violation.
    pub must_not_time_out: bool,
}

const RETRY_DELAY: Nanos = Nanos::from_millis(3);
/// Time that a disconnect may take before the session is dropped.
const CLOSE_TIMEOUT: Nanos = Nanos::from_secs(3);

/// A command without a response yet: one call per block.
struct OutstandingBlockCommand {
    disk: usize,
    kind: BlockCommandKind,
    ids: Vec<CallId>,
    reads_failed: u64,
}

enum BlockCommandKind {
    Read {
        cell: usize,
    },
    /// A Write or Write Zeroes.
    Write {
        durable: bool,
    },
    Deallocate,
    Compare {
        operations: Vec<u64>,
    },
    Verify,
    Flush,
}

struct BlockSessionSlot {
    session: Option<Session<SimSockets>>,
    disk: usize,
    pending: FxHashMap<u64, OutstandingBlockCommand>,
    /// Time of the next connection attempt or command.
    not_before: Nanos,
    /// Start of the disconnect, if one is in progress.
    closing_since: Option<Nanos>,
}

/// The sessions of one host; a reactor drives them.
pub struct BlockClients {
    sim: SimEnv,
    host: SimHostId,
    node: SocketAddr,
    plan: ClientHostPlan,
    random: Prng,
    handle: ReactorHandle,
    shared: Rc<RefCell<BlockRunState>>,
    slots: Vec<BlockSessionSlot>,
    next_token: u64,
    session_count: Rc<Cell<usize>>,
}

impl BlockClients {
    /// Clients on `host` for the node at address `node`.
    pub fn new(
        sim: &SimEnv,
        host: &ClientHost,
        node: SocketAddr,
        random: Prng,
        handle: ReactorHandle,
        shared: &Rc<RefCell<BlockRunState>>,
    ) -> BlockClients {
        let ClientHost { id: host, plan, session_count } = host;
        let slot = |_| BlockSessionSlot {
            session: None,
            disk: 0,
            pending: FxHashMap::default(),
            not_before: Nanos::ZERO,
            closing_since: None,
        };
        session_count.set(0);
        BlockClients {
            sim: sim.clone(),
            host: *host,
            node,
            plan: *plan,
            random,
            handle,
            shared: Rc::clone(shared),
            slots: (0..plan.sessions).map(slot).collect(),
            next_token: 0,
            session_count: Rc::clone(session_count),
        }
    }

    /// Runs one reactor iteration. Returns whether any work was done.
    pub fn run_iteration(&mut self, now: Nanos) -> bool {
        self.handle.begin_iteration(now);
        let (mut busy, mut wake) = (false, Nanos::NEVER);
        for index in 0..self.slots.len() {
            busy |= self.run_slot(index, now);
            let quiescing = self.shared.borrow().quiescing;
            let slot = &self.slots[index];
            wake = wake.min(match &slot.session {
                Some(session) => {
                    let submit_at = if slot.not_before > now { slot.not_before } else { Nanos::NEVER };
                    let closed_at = slot.closing_since.map_or(Nanos::NEVER, |since| since + CLOSE_TIMEOUT);
                    session.next_deadline().min(submit_at).min(closed_at)
                }
                None if quiescing => Nanos::NEVER,
                None => slot.not_before.max(now + Nanos(1)),
            });
        }
        self.session_count.set(self.slots.iter().filter(|slot| slot.session.is_some()).count());
        self.handle.request_wakeup_at(wake);
        busy
    }

    fn run_slot(&mut self, index: usize, now: Nanos) -> bool {
        let quiescing = self.shared.borrow().quiescing;
        if self.slots[index].session.is_none() {
            if quiescing || now < self.slots[index].not_before {
                return false;
            }
            return self.connect(index, now);
        }
        let mut busy = self.poll(index, now);
        let slot = &mut self.slots[index];
        let Some(session) = &slot.session else { return busy };
        let is_removed = self.shared.borrow().served_as[slot.disk] != Some(session.config().namespace);
        if session.ended().is_some()
            || (quiescing && self.should_drop_session(index, now))
            || (is_removed && self.random.one_in(20))
        {
            self.drop_session(index, now);
            return true;
        }
        if quiescing {
            return busy;
        }
        while self.can_submit(index, now) {
            self.submit(index, now);
            busy = true;
        }
        busy
    }

    /// Connects to a random namespace. Returns false if the node has none.
    fn connect(&mut self, index: usize, now: Nanos) -> bool {
        let served: Vec<(usize, NamespaceId)> = {
            let shared = self.shared.borrow();
            let served = shared.served_as.iter().enumerate();
            served.filter_map(|(disk, id)| id.map(|id| (disk, id))).collect()
        };
        let slot = &mut self.slots[index];
        if served.is_empty() {
            slot.not_before = now + RETRY_DELAY;
            return false;
        }
        let (disk, namespace) = served[self.random.below(served.len() as u64) as usize];
        let config = ClientConfig { namespace, ..client_config(self.host, &self.plan) };
        slot.disk = disk;
        slot.session = Some(Session::new(self.sim.sockets(self.host), self.node, config, now));
        true
    }

    fn poll(&mut self, index: usize, now: Nanos) -> bool {
        let slot = &mut self.slots[index];
        let Some(session) = &mut slot.session else { return false };
        let (shared, pending) = (&self.shared, &mut slot.pending);
        let busy = session.poll(now, |token, response| {
            let mut shared = shared.borrow_mut();
            match pending.remove(&token) {
                Some(command) => shared.complete(command, response),
                None => shared.fail(format!("token {token} completed twice")),
            }
        });
        let mut shared = self.shared.borrow_mut();
        if shared.must_not_time_out && session.last_error() == Some(ConnectionError::TimedOut) {
            shared.fail("a command timed out without an injected fault".to_owned());
        }
        busy
    }

    /// While quiescing: whether to drop this session now; otherwise starts its disconnect once no command is pending.
    fn should_drop_session(&mut self, index: usize, now: Nanos) -> bool {
        let slot = &mut self.slots[index];
        if let Some(since) = slot.closing_since {
            return now >= since + CLOSE_TIMEOUT;
        }
        let Some(session) = &mut slot.session else { return false };
        if !session.is_live() {
            return true;
        }
        if !slot.pending.is_empty() && !self.random.one_in(2_000) {
            return false;
        }
        if self.random.one_in(2) {
            return true;
        }
        let (shared, pending) = (&self.shared, &mut slot.pending);
        session.close(now, |token, response| {
            if let Some(command) = pending.remove(&token) {
                shared.borrow_mut().complete(command, response);
            }
        });
        slot.closing_since = Some(now);
        false
    }

    fn drop_session(&mut self, index: usize, now: Nanos) {
        let slot = &mut self.slots[index];
        let Some(session) = slot.session.take() else { return };
        let mut shared = self.shared.borrow_mut();
        if let Some(Error::Connect(_, lost)) = session.ended()
            && shared.is_protocol_violation(&lost)
        {
            shared.fail(format!("protocol violation: a session ended: {lost}"));
        }
        shared.completed += slot.pending.len() as u64;
        drop((shared, session));
        slot.pending.clear();
        (slot.not_before, slot.closing_since) = (now + RETRY_DELAY, None);
    }

    fn can_submit(&self, index: usize, now: Nanos) -> bool {
        let slot = &self.slots[index];
        let shared = self.shared.borrow();
        let has_free_slot = slot.session.as_ref().is_some_and(|session| session.free_slots() > 0);
        has_free_slot
            && now >= slot.not_before
            && slot.pending.len() < self.plan.commands_max
            && shared.submitted < shared.submit_limit
            && shared.violation.is_none()
    }

    fn submit(&mut self, index: usize, now: Nanos) {
        let slot = &mut self.slots[index];
        let Some(session) = &mut slot.session else { return };
        let mut shared = self.shared.borrow_mut();
        let token = self.next_token;
        self.next_token += 1;
        let submit = |command: Command<'_>| session.submit(command, token);
        match shared.submit_random(&mut self.random, slot.disk, submit) {
            Ok(command) => drop(slot.pending.insert(token, command)),
            Err(why) => shared.fail(why),
        }
        if self.plan.think_time_max > Nanos::ZERO {
            slot.not_before = now + Nanos(self.random.below(self.plan.think_time_max.0));
        }
    }
}

impl Drop for BlockClients {
    /// The host crashed: its outstanding commands never complete.
    fn drop(&mut self) {
        let lost: usize = self.slots.iter().map(|slot| slot.pending.len()).sum();
        self.shared.borrow_mut().completed += lost as u64;
    }
}

/// Status codes of commands rejected, without effect, because of a change by the operator.
const REJECTED_STATUSES: [Status; 4] = [
    Status::INVALID_NAMESPACE,
    Status::ANA_INACCESSIBLE,
    Status::ANA_PERSISTENT_LOSS,
    Status::ANA_TRANSITION,
];

impl BlockRunState {
    /// Records the first violation; ignores later ones.
    pub fn fail(&mut self, message: String) {
        self.violation.get_or_insert(message);
    }

    /// Whether this error violates the protocol: no fault of hosts, links or disks and no change by an operator, if
    /// there is one, may cause it.
    fn is_protocol_violation(&self, lost: &ConnectionError) -> bool {
        match lost {
            ConnectionError::Closed
            | ConnectionError::TimedOut
            | ConnectionError::ControllerFatal
            | ConnectionError::ConnectRejected(_)
            | ConnectionError::InitFailed(_) => false,
            ConnectionError::NamespaceNotFound => !self.has_operator,
            ConnectionError::Protocol(_)
            | ConnectionError::Terminated { .. }
            | ConnectionError::AuthenticationRequired => true,
            ConnectionError::UnsupportedCommandSet
            | ConnectionError::UnsupportedBlockFormat
            | ConnectionError::NamespaceChanged => true,
        }
    }

    /// Draws a command and passes it to `submit`.
    fn submit_random(
        &mut self,
        random: &mut Prng,
        disk: usize,
        submit: impl FnOnce(Command<'_>) -> Result<(), SubmitError>,
    ) -> Result<OutstandingBlockCommand, String> {
        self.submitted += 1;
        let DiskPlan { block_bytes, first, count, .. } = self.disks[disk];
        let BlockLoad { blocks_max, mix, durable_one_in } = self.load;
        let most = blocks_max.min(count).min(self.bytes_max / u64::from(block_bytes)).max(1);
        let blocks = 1 + random.below(most);
        let cell = random.below(count - blocks + 1);
        let (lba, cells) = (Lba(first + cell), cell as usize..(cell + blocks) as usize);
        let range = LbaRange { lba, blocks: blocks as u32 };
        let force_unit_access = random.one_in(durable_one_in);
        let history = &mut self.histories[disk];
        let mut begin = |call: Call| cells.clone().map(|cell| history.begin(cell, call)).collect();
        let (kind, ids, submitted) = match draw_weighted(random, &mix) {
            0 => {
                let (kind, ids) = (BlockCommandKind::Read { cell: cells.start }, begin(Call::Get));
                (kind, ids, submit(Command::Read { range, buffer: None }))
            }
            1 => {
                let (data, ids) = begin_write(history, cells, block_bytes);
                let data = Value::Slice(&data);
                let kind = BlockCommandKind::Write { durable: force_unit_access };
                (kind, ids, submit(Command::Write { lba, data, force_unit_access }))
            }
            2 => {
                let (kind, ids) =
                    (BlockCommandKind::Write { durable: force_unit_access }, begin(Call::Delete));
                let deallocate = random.one_in(2);
                (kind, ids, submit(Command::WriteZeroes { range, force_unit_access, deallocate }))
            }
            3 => (
                BlockCommandKind::Deallocate,
                begin(Call::Deallocate),
                submit(Command::Deallocate { ranges: &[range] }),
            ),
            4 => {
                let ids = begin(Call::Get);
                let operations: Vec<u64> = cells.clone().map(|cell| history.last_write(cell)).collect();
                let data = expected_contents(history, cells, &operations, block_bytes);
                let data = Value::Slice(&data);
                (BlockCommandKind::Compare { operations }, ids, submit(Command::Compare { lba, data }))
            }
            5 => (BlockCommandKind::Verify, Vec::new(), submit(Command::Verify { range })),
            _ => (BlockCommandKind::Flush, vec![history.begin_keyless()], submit(Command::Flush)),
        };
        submitted.map_err(|why| format!("the client rejected a command: {why:?}"))?;
        Ok(OutstandingBlockCommand { disk, kind, ids, reads_failed: self.faults.reads_failed() })
    }

    /// Records the response of a command and checks it.
    fn complete(&mut self, pending: OutstandingBlockCommand, response: Result<Response, Error>) {
        self.completed += 1;
        self.succeeded += u64::from(response.is_ok());
        let checked = match response {
            Ok(response) => self.check_response(&pending, response),
            Err(error) => self.check_error(&pending, &error),
        };
        if let Err(message) = checked {
            self.fail(message);
        }
    }

    fn check_response(
        &mut self,
        pending: &OutstandingBlockCommand,
        response: Response,
    ) -> Result<(), String> {
        let history = &mut self.histories[pending.disk];
        let ids = pending.ids.iter();
        match (&pending.kind, response) {
            (BlockCommandKind::Read { cell }, Response::Blocks { data }) => {
                let block_bytes = self.disks[pending.disk].block_bytes as usize;
                if data.len() != pending.ids.len() * block_bytes {
                    return Err(format!("a read of {} blocks returned {} B", pending.ids.len(), data.len()));
                }
                for (at, (&id, block)) in ids.zip(data.chunks(block_bytes)).enumerate() {
                    let seen = observe_block(history, cell + at, block)?;
                    history.end(id, CallResult::Observed(seen))?;
                }
                Ok(())
            }
            (BlockCommandKind::Write { durable: true }, Response::Written { .. }) => {
                ids.copied().try_for_each(|id| history.end_durable(id))
            }
            (BlockCommandKind::Write { .. } | BlockCommandKind::Deallocate, Response::Written { .. }) => {
                ids.copied().try_for_each(|id| history.end(id, CallResult::Acknowledged))
            }
            (BlockCommandKind::Compare { operations }, Response::Verified) => {
                ids.zip(operations).try_for_each(|(&id, &operation)| {
                    let is_zero = operation == 0;
                    let seen = if is_zero { Observed::Absent } else { Observed::Value(operation) };
                    history.end(id, CallResult::Observed(seen))
                })
            }
            (BlockCommandKind::Compare { operations }, Response::CompareFailed) if pending.ids.len() == 1 => {
                let is_zero = operations[0] == 0;
                let seen = if is_zero { Observed::Present } else { Observed::NotValue(operations[0]) };
                history.end(pending.ids[0], CallResult::Observed(seen))
            }
            // The response does not identify the block that differs.
            (BlockCommandKind::Compare { .. }, Response::CompareFailed) => {
                ids.for_each(|&id| history.mark_not_executed(id));
                Ok(())
            }
            (BlockCommandKind::Verify, Response::Verified) => Ok(()),
            (BlockCommandKind::Flush, Response::Flushed) => {
                history.record_flush(pending.ids[0]);
                Ok(())
            }
            (_, Response::Retry { .. }) => {
                self.mark_not_executed(pending);
                Ok(())
            }
            (_, response) => Err(format!("unexpected response: {response:?}")),
        }
    }

    /// Records that a command had no effect and returned no data.
    fn mark_not_executed(&mut self, pending: &OutstandingBlockCommand) {
        if !matches!(pending.kind, BlockCommandKind::Flush) {
            pending.ids.iter().for_each(|&id| self.histories[pending.disk].mark_not_executed(id));
        }
    }

    fn check_error(&mut self, pending: &OutstandingBlockCommand, error: &Error) -> Result<(), String> {
        let read_failed = self.faults.reads_failed() > pending.reads_failed;
        let reads = matches!(
            pending.kind,
            BlockCommandKind::Read { .. } | BlockCommandKind::Compare { .. } | BlockCommandKind::Verify
        );
        match error {
            Error::Disconnected(lost) if self.is_protocol_violation(lost) => return Err(format!("{error}")),
            Error::Status(status)
                if REJECTED_STATUSES.iter().any(|one| status.is(*one)) && self.has_operator =>
            {
                self.rejected_commands += 1;
                self.mark_not_executed(pending);
            }
            Error::Busy | Error::Disconnected(_) | Error::TimedOut | Error::Closed => {
                self.mark_not_executed(pending)
            }
            Error::OutcomeUnknown => {}
            Error::UnrecoveredRead if reads && read_failed => self.mark_not_executed(pending),
            // Read-modify-write of a partial device block failed at its read.
            Error::UnrecoveredRead if !reads && read_failed => {}
            Error::Status(status)
                if status.is(Status::MEDIA_WRITE_FAULT) && !reads && self.faults.operations_failed() > 0 => {}
            other => return Err(format!("unexpected error: {other}")),
        }
        Ok(())
    }
}

/// Begins a write of new contents, one operation per block.
fn begin_write(
    history: &mut History,
    cells: std::ops::Range<usize>,
    block_bytes: u32,
) -> (Vec<u8>, Vec<CallId>) {
    let (mut data, mut ids) = (Vec::new(), Vec::new());
    for cell in cells {
        let operation = history.next_operation(block_bytes);
        data.extend(value_of(&history.keys()[cell], operation, block_bytes as usize));
        let call = Call::Put { operation, bytes: block_bytes, mode: PutMode::Upsert };
        ids.push(history.begin(cell, call));
    }
    (data, ids)
}

/// Contents that these operations wrote to these blocks; zeroes for operation 0.
fn expected_contents(
    history: &History,
    cells: std::ops::Range<usize>,
    operations: &[u64],
    block_bytes: u32,
) -> Vec<u8> {
    let block = |(cell, &operation): (usize, &u64)| match operation {
        0 => vec![0; block_bytes as usize],
        _ => value_of(&history.keys()[cell], operation, block_bytes as usize),
    };
    cells.zip(operations).flat_map(block).collect()
}

/// The operation that wrote a block; a block of zeroes is [`Observed::Absent`].
///
/// # Errors
/// The mismatch, if no operation wrote these contents to this block.
pub fn observe_block(history: &History, cell: usize, block: &[u8]) -> Result<Observed, String> {
    if block.iter().all(|&byte| byte == 0) {
        return Ok(Observed::Absent);
    }
    history.identify_value(cell, block, block.len() as u32)
}
