//! A host and an engine in memory, for tests of a single connection.
#![allow(dead_code)] // Each test binary uses a part.

pub mod adversary;
pub mod direct;
pub mod engine;
pub mod script;

pub use direct::DirectMemory;
pub use engine::MemoryEngine;

use octokv_base::{Buffer, BufferPool, Key, NamespaceId, Nanos, RecordLayout, SharedSum, ShortKey, crc32c};
use octokv_nvmf::{
    Connection, IoRequest, NamespaceInfo, NamespaceKind, ReceiveResult, RequestOperation, RequestOutcome,
    StoreMode, SubsystemConfig, Target,
};
use octokv_wire::fabrics::{self, Connect, ConnectData, ControllerConfiguration, NEW_CONTROLLER, property};
use octokv_wire::pdu::{
    self, DataHeader, IcRequest, IcResponse, NegotiatedParams, PduHeader, PduType, Role, TermReq,
    UncheckedCommonHeader,
};
use octokv_wire::queue_entry::admin;
use octokv_wire::{Cqe, Sgl, Sqe, Status, identify, kv, log_page, nqn, nvm};
use std::collections::{BTreeMap, VecDeque};
use std::io::IoSlice;
use std::sync::Arc;
use zerocopy::IntoBytes;

pub const NQN: &str = "nqn.2026-11.io.octokv:node";
pub const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:36ebf5a9-1df9-47b3-a6d0-e9ba32e428a2";
pub const NSID: NamespaceId = NamespaceId(1);
pub const POOL_BYTES: usize = 64 << 20;
/// Of an engine with another record header than the hash engine's.
pub const RECORD_LAYOUT: RecordLayout = RecordLayout::new(112);

pub fn namespace(id: u32) -> NamespaceInfo {
    NamespaceInfo {
        id: NamespaceId(id),
        nguid: [id as u8; 16],
        size_bytes: 1 << 30,
        used_bytes: SharedSum::constant(1 << 20),
        kind: NamespaceKind::KeyValue {
            value_bytes_max: 2 << 20,
            key_bytes_max: 1024,
            has_iterators: true,
            record_layout: RECORD_LAYOUT,
        },
        ana_group: 1,
        tokens: None,
    }
}

/// A namespace of 64 MiB with blocks of this size.
pub fn block_namespace(id: u32, block_bytes: u32) -> NamespaceInfo {
    let kind = NamespaceKind::Block { block_bytes };
    NamespaceInfo { size_bytes: 64 << 20, kind, ..namespace(id) }
}

/// A target with a Key Value namespace, one of 512 B blocks and one of 4096 B blocks.
pub fn mixed_target() -> Arc<Target> {
    let namespaces = vec![namespace(1), block_namespace(2, 512), block_namespace(3, 4096)];
    Target::new(SubsystemConfig::new(NQN), namespaces)
}

pub fn target_with(config: SubsystemConfig) -> Arc<Target> {
    Target::new(config, vec![namespace(1), namespace(2)])
}

pub fn target() -> Arc<Target> {
    target_with(SubsystemConfig::new(NQN))
}

/// A PDU that the target sent.
#[derive(Clone, Debug, PartialEq)]
pub enum ReceivedPdu {
    Ic(IcResponse),
    Completion(Cqe),
    Data(DataHeader, Vec<u8>),
    ReadyToTransfer(DataHeader),
    Terminate(TermReq),
}

/// The data and the completion of one command.
#[derive(Clone, Debug)]
pub struct CommandResponse {
    pub cqe: Cqe,
    pub data: Vec<u8>,
}

impl CommandResponse {
    pub fn status(&self) -> Status {
        self.cqe.status()
    }
    pub fn dw0(&self) -> u32 {
        self.cqe.dw0.get()
    }
}

pub struct TestHost {
    pub connection: Connection,
    pub target: Arc<Target>,
    pub pool: BufferPool,
    pub now: Nanos,
    pub params: NegotiatedParams,
    pub requests: Vec<IoRequest>,
    pub engine: MemoryEngine,
    pub received_pdus: VecDeque<ReceivedPdu>,
    /// Sent by the host and not consumed by the connection.
    pub unsent: Vec<u8>,
    pub last: Option<ReceiveResult>,
    /// Data of responses that the direct backend has lent, all so far.
    pub loans: Vec<Vec<u8>>,
    received: Vec<u8>,
    next_id: u16,
}

impl TestHost {
    pub fn new(target: &Arc<Target>) -> TestHost {
        TestHost::at(target, Nanos::from_secs(100))
    }

    pub fn at(target: &Arc<Target>, now: Nanos) -> TestHost {
        let local = "10.0.0.1:4420".parse().unwrap();
        let peer = "10.0.0.2:50000".parse().unwrap();
        TestHost {
            connection: Connection::new(Arc::clone(target), local, peer, now),
            target: Arc::clone(target),
            pool: BufferPool::new(POOL_BYTES),
            now,
            params: NegotiatedParams::initial(),
            requests: Vec::new(),
            engine: MemoryEngine::default(),
            received_pdus: VecDeque::new(),
            unsent: Vec::new(),
            last: None,
            loans: Vec::new(),
            received: Vec::new(),
            next_id: 0,
        }
    }

    /// After the exchange of ICReq and ICResp, with these digests.
    pub fn initialized(target: &Arc<Target>, header_digest: bool, data_digest: bool) -> TestHost {
        let mut host = TestHost::new(target);
        host.initialize(header_digest, data_digest);
        host
    }

    pub fn initialize(&mut self, header_digest: bool, data_digest: bool) {
        let request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        self.send(&request.encode());
        let Some(ReceivedPdu::Ic(response)) = self.received_pdus.pop_front() else {
            panic!("no ICResp: {:?}", self.connection.close_reason());
        };
        assert_eq!((response.header_digest, response.data_digest), (header_digest, data_digest));
        self.params.header_digest = header_digest;
        self.params.data_digest = data_digest;
    }

    /// Connected and enabled on an admin queue of the I/O subsystem.
    pub fn admin(target: &Arc<Target>) -> TestHost {
        TestHost::admin_with(target, false, false)
    }

    pub fn admin_with(target: &Arc<Target>, header_digest: bool, data_digest: bool) -> TestHost {
        let mut host = TestHost::initialized(target, header_digest, data_digest);
        host.connect(0, NEW_CONTROLLER).unwrap();
        host.enable();
        host
    }

    /// Connected and enabled on the discovery subsystem.
    pub fn discovery(target: &Arc<Target>) -> TestHost {
        let mut host = TestHost::initialized(target, false, false);
        let response = host.connect_as(0, NEW_CONTROLLER, nqn::DISCOVERY, HOST_NQN, |_| {});
        assert!(response.status().is_success());
        host.set_property(property::CC, u64::from(ControllerConfiguration::ENABLED_NVM.0));
        host
    }

    /// An I/O queue of the controller of `admin`.
    pub fn io(admin: &TestHost, queue_id: u16) -> TestHost {
        TestHost::io_with(admin, queue_id, false, false)
    }

    pub fn io_with(admin: &TestHost, queue_id: u16, header_digest: bool, data_digest: bool) -> TestHost {
        let mut host = TestHost::at(&admin.target, admin.now);
        host.initialize(header_digest, data_digest);
        host.connect(queue_id, admin.target.controllers().last().unwrap().id).unwrap();
        host
    }

    /// Passes bytes to the connection, after those not consumed before, and reads the response.
    pub fn send(&mut self, bytes: &[u8]) {
        self.unsent.extend_from_slice(bytes);
        self.pump();
    }

    pub fn pump(&mut self) {
        let consumed = self.connection.receive(self.now, &self.unsent, &self.pool, &mut self.requests);
        self.unsent.drain(..consumed.consumed_bytes);
        self.last = Some(consumed);
        self.drain();
    }

    /// Reads and decodes all bytes of the send buffer.
    pub fn drain(&mut self) {
        let send_buffer = self.connection.send_buffer();
        while !send_buffer.is_empty() {
            let mut slices: Vec<IoSlice<'_>> = Vec::new();
            send_buffer.slices_with(|data| direct::resolve(&self.loans, data), &mut slices, usize::MAX);
            let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
            send_buffer.advance(bytes.len());
            self.received.extend(bytes);
        }
        while let Some(unchecked) = UncheckedCommonHeader::new(&self.received) {
            let layout = unchecked.check(Role::Host, &self.params).expect("a valid PDU from the target");
            assert!(self.received.len() >= layout.pdu_bytes(), "the target sent an incomplete PDU");
            let pdu: Vec<u8> = self.received.drain(..layout.pdu_bytes()).collect();
            let (from, bytes) = (layout.prefix_bytes as usize, layout.data_bytes as usize);
            let data = pdu[from..from + bytes].to_vec();
            if layout.trailer_bytes > 0 {
                assert_eq!(pdu[from + bytes..], crc32c(&data).to_le_bytes(), "data digest");
            }
            self.received_pdus.push_back(
                match layout.decode_header(&pdu).expect("a matching header digest") {
                    PduHeader::IcResponse(ic) => ReceivedPdu::Ic(ic.check_response().unwrap()),
                    PduHeader::Response(cqe) => ReceivedPdu::Completion(*cqe),
                    PduHeader::Data(range) => {
                        assert_eq!(range.bytes as usize, data.len());
                        assert!(layout.is_last() && !layout.is_success() && !data.is_empty());
                        ReceivedPdu::Data(range, data)
                    }
                    PduHeader::ReadyToTransfer(range) => ReceivedPdu::ReadyToTransfer(range),
                    PduHeader::TermReq(terminate) => ReceivedPdu::Terminate(terminate),
                    PduHeader::IcRequest(_) | PduHeader::Command(_) => {
                        panic!("{:?} to a host", layout.pdu_type)
                    }
                },
            );
        }
    }

    pub fn id(&mut self) -> u16 {
        self.next_id = self.next_id.wrapping_add(1);
        self.next_id
    }

    /// The bytes of a command's capsule.
    pub fn capsule(&self, sqe: &Sqe, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        pdu::encode_command(sqe, data.len(), &self.params, &mut bytes);
        bytes.extend_from_slice(data);
        if self.params.trailer_bytes(data.len()) > 0 {
            bytes.extend_from_slice(&crc32c(data).to_le_bytes());
        }
        bytes
    }

    /// The bytes of an H2CData.
    pub fn data_pdu(&self, range: DataHeader, data: &[u8], flags: u8) -> Vec<u8> {
        let mut bytes = Vec::new();
        range.encode(Role::Host, flags, &self.params, &mut bytes);
        bytes.extend_from_slice(data);
        if self.params.trailer_bytes(data.len()) > 0 {
            bytes.extend_from_slice(&crc32c(data).to_le_bytes());
        }
        bytes
    }

    pub fn send_command(&mut self, sqe: &Sqe, data: &[u8]) {
        let capsule = self.capsule(sqe, data);
        self.send(&capsule);
    }

    /// Sends a command, executes its request and returns its response.
    pub fn run(&mut self, sqe: Sqe, data: &[u8]) -> CommandResponse {
        self.send_command(&sqe, data);
        self.execute_requests();
        self.next_response()
    }

    /// The next data PDUs and completion.
    pub fn next_response(&mut self) -> CommandResponse {
        let mut data = Vec::new();
        loop {
            match self.received_pdus.pop_front() {
                Some(ReceivedPdu::Data(range, bytes)) => {
                    assert_eq!(range.offset as usize, data.len());
                    data.extend(bytes);
                }
                Some(ReceivedPdu::Completion(cqe)) => return CommandResponse { cqe, data },
                other => panic!("{other:?}; {:?}", self.connection.close_reason()),
            }
        }
    }

    pub fn connect(&mut self, queue_id: u16, controller_id: u16) -> Result<u16, CommandResponse> {
        let response = self.connect_as(queue_id, controller_id, NQN, HOST_NQN, |_| {});
        if response.status().is_success() { Ok(response.dw0() as u16) } else { Err(response) }
    }

    pub fn connect_as(
        &mut self,
        queue_id: u16,
        controller_id: u16,
        subsystem: &str,
        host: &str,
        change: impl FnOnce(&mut Connect),
    ) -> CommandResponse {
        let mut connect = Connect { format: 0, queue_id, entries: 32, attributes: 0, keep_alive_ms: 0 };
        change(&mut connect);
        let id = self.id();
        let sqe = fabrics::FabricsCommand::Connect(connect).encode(id);
        let data = ConnectData { host_id: [9; 16], controller_id, subsystem, host };
        self.run(sqe, &data.encode())
    }

    pub fn enable(&mut self) {
        self.set_property(property::CC, u64::from(ControllerConfiguration::ENABLED.0));
        assert_eq!(self.get_property(property::CSTS, false), 1);
    }

    pub fn set_property(&mut self, offset: u32, value: u64) {
        let id = self.id();
        let response = self
            .run(fabrics::FabricsCommand::PropertySet { offset, is_64_bit: false, value }.encode(id), &[]);
        assert!(response.status().is_success(), "{:?}", response.status());
    }

    pub fn get_property(&mut self, offset: u32, wide: bool) -> u64 {
        let id = self.id();
        let response =
            self.run(fabrics::FabricsCommand::PropertyGet { offset, is_64_bit: wide }.encode(id), &[]);
        assert!(response.status().is_success(), "{:?}", response.status());
        u64::from(response.cqe.dw0.get()) | u64::from(response.cqe.dw1.get()) << 32
    }

    pub fn admin_command(&mut self, opcode: u8, nsid: u32, cdw10: u32, cdw11: u32) -> CommandResponse {
        let id = self.id();
        let mut sqe = Sqe::new(opcode, id);
        sqe.nsid = nsid.into();
        sqe.cdw10 = cdw10.into();
        sqe.cdw11 = cdw11.into();
        sqe.sgl = Sgl::transport(4096);
        self.run(sqe, &[])
    }

    pub fn get_feature(&mut self, feature: u8, nsid: u32) -> CommandResponse {
        self.admin_command(admin::GET_FEATURES, nsid, u32::from(feature), 0)
    }

    pub fn set_feature(&mut self, feature: u8, nsid: u32, value: u32) -> CommandResponse {
        self.admin_command(admin::SET_FEATURES, nsid, u32::from(feature), value)
    }

    pub fn identify(&mut self, cns: u8, csi: u8, nsid: u32) -> CommandResponse {
        let id = self.id();
        let request = identify::IdentifyRequest { cns, csi, controller_id: 0, namespace: NamespaceId(nsid) };
        let mut sqe = request.encode(id);
        sqe.sgl = Sgl::transport(4096);
        self.run(sqe, &[])
    }

    pub fn log(&mut self, page: u8, csi: u8, offset: u64, bytes: u64) -> CommandResponse {
        self.log_with(page, 0, csi, offset, bytes)
    }

    pub fn log_with(&mut self, page: u8, specific: u8, csi: u8, offset: u64, bytes: u64) -> CommandResponse {
        let id = self.id();
        let mut sqe = log_page::LogPageRequest {
            id: page,
            log_specific: specific,
            retain_event: false,
            bytes,
            offset,
            csi,
            namespace: NamespaceId(u32::MAX),
        }
        .encode(id);
        sqe.sgl = Sgl::transport(bytes as u32);
        self.run(sqe, &[])
    }

    /// A Store with its value in the capsule.
    pub fn store(&mut self, key: &[u8], value: &[u8], options: u8) -> CommandResponse {
        let id = self.id();
        let sqe = store_sqe(id, key, value.len(), Sgl::in_capsule(value.len() as u32), options);
        self.run(sqe, value)
    }

    /// A Store with its value sent by R2T, in pieces.
    pub fn store_by_transfer(&mut self, key: &[u8], value: &[u8], piece: usize) -> CommandResponse {
        let id = self.id();
        let sqe = store_sqe(id, key, value.len(), Sgl::transport(value.len() as u32), 0);
        self.send_command(&sqe, &[]);
        self.send_requested_data(value, piece);
        self.execute_requests();
        self.next_response()
    }

    /// Sends the data that the next R2T requests, in PDUs of `piece` bytes.
    pub fn send_requested_data(&mut self, value: &[u8], piece: usize) {
        let Some(ReceivedPdu::ReadyToTransfer(range)) = self.received_pdus.pop_front() else {
            panic!("no R2T")
        };
        assert_eq!(range.offset, 0);
        let wanted = &value[..range.bytes as usize];
        for (index, part) in wanted.chunks(piece).enumerate() {
            let offset = (index * piece) as u32;
            let is_last = offset as usize + part.len() == wanted.len();
            let data = DataHeader { offset, bytes: part.len() as u32, ..range };
            let bytes = self.data_pdu(data, part, if is_last { pdu::flags::LAST } else { 0 });
            self.send(&bytes);
        }
    }

    pub fn retrieve(&mut self, key: &[u8], limit: u32) -> CommandResponse {
        let id = self.id();
        let mut sqe =
            kv::KvCommand::Retrieve { key: ShortKey::new(key).unwrap(), limit_bytes: limit }.encode(id, NSID);
        sqe.sgl = Sgl::transport(limit);
        self.run(sqe, &[])
    }

    pub fn key_command(&mut self, opcode: u8, key: &[u8]) -> CommandResponse {
        let id = self.id();
        let mut sqe = Sqe::new(opcode, id);
        sqe.nsid = NSID.0.into();
        kv::set_key(&mut sqe, &ShortKey::new(key).unwrap(), 0);
        self.run(sqe, &[])
    }

    /// A command on blocks, with its data in the capsule if it fits and by R2T otherwise.
    pub fn block_command(
        &mut self,
        namespace: u32,
        command: nvm::NvmCommand,
        data: &[u8],
    ) -> CommandResponse {
        let id = self.id();
        let mut sqe = command.encode(id, NamespaceId(namespace));
        let length = match command {
            nvm::NvmCommand::Read { .. } => 4 << 20,
            _ => data.len() as u32,
        };
        if data.is_empty() || data.len() > 16 * 1024 {
            sqe.sgl = Sgl::transport(length);
            self.send_command(&sqe, &[]);
            if matches!(self.received_pdus.front(), Some(ReceivedPdu::ReadyToTransfer(_))) {
                self.send_requested_data(data, 100_000);
            }
            self.execute_requests();
            return self.next_response();
        }
        sqe.sgl = Sgl::in_capsule(length);
        self.run(sqe, data)
    }

    /// Executes all requests and completes them.
    pub fn execute_requests(&mut self) {
        while !self.requests.is_empty() {
            for request in std::mem::take(&mut self.requests) {
                let outcome = self.engine.execute(&self.target, request.namespace, request.operation);
                self.connection.complete(request.slot, outcome);
            }
            self.pump();
        }
    }

    /// Advances time, ticking at every deadline.
    pub fn advance_time(&mut self, span: Nanos) {
        let end = self.now + span;
        while self.now < end {
            self.now = self.connection.next_deadline().max(self.now + Nanos(1)).min(end);
            self.connection.tick(self.now);
        }
        self.drain();
    }

    /// The next PDU, which must be a termination request.
    pub fn terminated(&mut self) -> TermReq {
        match self.received_pdus.pop_front() {
            Some(ReceivedPdu::Terminate(terminate)) => terminate,
            other => panic!("{other:?}"),
        }
    }
}

pub fn store_sqe(id: u16, key: &[u8], value_bytes: usize, sgl: Sgl, options: u8) -> Sqe {
    let mut sqe = Sqe::new(kv::opcode::STORE, id);
    sqe.nsid = NSID.0.into();
    kv::set_key(&mut sqe, &ShortKey::new(key).unwrap(), options);
    sqe.cdw10 = (value_bytes as u32).into();
    sqe.sgl = sgl;
    sqe
}

/// The bytes of an SQE, for tests that corrupt them.
pub fn sqe_bytes(sqe: &Sqe) -> Vec<u8> {
    sqe.as_bytes().to_vec()
}

/// A value whose bytes depend on their position.
pub fn value(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index * 7 + index / 251) as u8).collect()
}

/// Offset of a PDU's data without digests.
pub fn header_bytes(kind: PduType) -> usize {
    kind.header_bytes()
}
