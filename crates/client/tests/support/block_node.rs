//! A block node in memory for tests: it responds late and out of order, has a volatile cache that a power cut empties, and
//! returns wrong responses on request.

#![allow(dead_code)] // Each test file uses its part.

use octokv_base::map::FxHashMap;
use octokv_base::{NamespaceId, Nanos, Prng};
use octokv_client::{ClientConfig, Command, Error, Response, Session};
use octokv_runtime::{DetachedSocket, ListenerId, ReceiveStatus, SendStatus, SocketId, Sockets};
use octokv_wire::fabrics::{self, ConnectResponse, ControllerCapabilities, property};
use octokv_wire::identify::{self, NamespaceDescriptor, cns};
use octokv_wire::nvm;
use octokv_wire::pdu::{
    self, DataHeader, IcResponse, NegotiatedParams, PduHeader, Role, UncheckedCommonHeader, flags,
};
use octokv_wire::queue_entry::{FABRICS_OPCODE, Sqe, admin, csi, event};
use octokv_wire::{Cqe, Status};
use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::Rc;
use zerocopy::IntoBytes;

/// Blocks of the namespace, cached and durable.
pub struct BlockMedia {
    pub block_bytes: usize,
    /// Content that reads return.
    pub cached: Vec<u8>,
    /// Content after a power cut.
    pub durable: Vec<u8>,
}

/// Changes a page before it is sent: CNS of Identify, and the page.
pub type PageMutation = Box<dyn Fn(u8, &mut Vec<u8>)>;

#[derive(Default)]
struct HostConnection {
    open: bool,
    is_dead: bool,
    /// Whether its Connect was for an I/O queue.
    is_io_queue: bool,
    from_host: Vec<u8>,
    to_host: Vec<u8>,
    /// Commands that wait for their data, by identifier.
    transfers: FxHashMap<u16, (Sqe, Vec<u8>)>,
    /// Commands that wait for execution.
    waiting: Vec<(Sqe, Vec<u8>)>,
    event_request: Option<u16>,
}

pub struct BlockNode {
    pub media: BlockMedia,
    pub nguid: [u8; 16],
    pub is_namespace_gone: bool,
    pub random: Prng,
    pub now: Nanos,
    /// Each waiting I/O command is executed with probability 1 / this per iteration.
    pub delay_one_in: u64,
    /// Number of I/O commands to fail as busy.
    pub busy_responses: u32,
    /// Reads return one block less than requested.
    pub short_reads: bool,
    /// Writes complete before their data was requested.
    pub complete_writes_early: bool,
    /// Status of the next I/O command.
    pub next_status: Option<Status>,
    pub data_pages_log2: u8,
    pub page_mutation: Option<PageMutation>,
    pub refuse: bool,
    /// Maximum number of blocks of one command, and number of commands by opcode.
    pub blocks_max: u32,
    pub command_counts: FxHashMap<u8, u32>,
    connections: Vec<HostConnection>,
}

/// Sockets of the client. Clones share the node.
#[derive(Clone)]
pub struct BlockNodeSockets(pub Rc<RefCell<BlockNode>>);

const CAPSULE_BYTES: u32 = 4096;

impl BlockNodeSockets {
    pub fn new(block_bytes: usize, image: Vec<u8>) -> BlockNodeSockets {
        BlockNodeSockets(Rc::new(RefCell::new(BlockNode {
            media: BlockMedia { block_bytes, cached: image.clone(), durable: image },
            nguid: [9; 16],
            is_namespace_gone: false,
            random: Prng::new(1),
            now: Nanos::ZERO,
            delay_one_in: 1,
            busy_responses: 0,
            short_reads: false,
            complete_writes_early: false,
            next_status: None,
            data_pages_log2: 5,
            page_mutation: None,
            refuse: false,
            blocks_max: 0,
            command_counts: FxHashMap::default(),
            connections: Vec::new(),
        })))
    }

    /// Closes every connection. Waiting commands are executed or not, at random.
    pub fn cut_connections(&self) {
        let node = &mut *self.0.borrow_mut();
        for connection_index in 0..node.connections.len() {
            for (sqe, data) in std::mem::take(&mut node.connections[connection_index].waiting) {
                if node.random.one_in(2) {
                    node.execute_command(connection_index, &sqe, &data);
                }
            }
            node.connections[connection_index].is_dead = true;
            node.connections[connection_index].to_host.clear();
        }
    }

    /// Cuts the power: connections are lost, and each unflushed block at random.
    pub fn power_cut(&self) {
        self.cut_connections();
        let BlockNode { media, random, .. } = &mut *self.0.borrow_mut();
        let BlockMedia { block_bytes, cached, durable } = media;
        for (was, is) in durable.chunks_mut(*block_bytes).zip(cached.chunks_mut(*block_bytes)) {
            match random.one_in(4) {
                true => was.copy_from_slice(is),
                false => is.copy_from_slice(was),
            }
        }
    }

    /// Completes every pending event request with a namespace change.
    pub fn notify_namespace_change(&self) {
        let node = &mut *self.0.borrow_mut();
        for connection in &mut node.connections {
            if let Some(id) = connection.event_request.take() {
                connection.respond(id, Status::SUCCESS, event::NAMESPACE_CHANGED, 0);
            }
        }
    }

    /// Whether a host has an event request pending.
    pub fn has_event_request(&self) -> bool {
        self.0.borrow().connections.iter().any(|connection| connection.event_request.is_some())
    }

    /// Runs one iteration of the node.
    pub fn pump(&self) {
        let node = &mut *self.0.borrow_mut();
        for connection_index in 0..node.connections.len() {
            while !node.connections[connection_index].is_dead && node.receive_pdu(connection_index) {}
            for at in (0..node.connections[connection_index].waiting.len()).rev() {
                if node.random.one_in(node.delay_one_in) {
                    let (sqe, data) = node.connections[connection_index].waiting.swap_remove(at);
                    node.execute_command(connection_index, &sqe, &data);
                }
            }
        }
    }
}

impl HostConnection {
    fn respond(&mut self, id: u16, status: Status, dw0: u32, dw1: u32) {
        let cqe = Cqe::new(id, 0, status, dw0, dw1);
        pdu::encode_response(&cqe, &NegotiatedParams::initial(), &mut self.to_host);
    }

    fn send_data(&mut self, id: u16, data: &[u8]) {
        // In two PDUs, so that offsets are exercised.
        let half = data.len() / 8 * 4;
        for (from, to) in [(0, half), (half, data.len())] {
            if from < to {
                let header =
                    DataHeader { command_id: id, tag: 0, offset: from as u32, bytes: (to - from) as u32 };
                let last = if to == data.len() { flags::LAST } else { 0 };
                header.encode(Role::Controller, last, &NegotiatedParams::initial(), &mut self.to_host);
                self.to_host.extend_from_slice(&data[from..to]);
            }
        }
    }
}

impl BlockNode {
    /// Processes one PDU. False if there is none.
    fn receive_pdu(&mut self, at: usize) -> bool {
        let connection = &mut self.connections[at];
        let Some(common_header) = UncheckedCommonHeader::new(&connection.from_host) else { return false };
        let layout = common_header
            .check(Role::Controller, &NegotiatedParams::initial())
            .expect("the client sends valid PDUs");
        if connection.from_host.len() < layout.pdu_bytes() {
            return false;
        }
        let bytes: Vec<u8> = connection.from_host.drain(..layout.pdu_bytes()).collect();
        let data = bytes[layout.prefix_bytes as usize..].to_vec();
        match layout.decode_header(&bytes).expect("no digests") {
            PduHeader::IcRequest(_) => {
                let granted = IcResponse {
                    controller_alignment: 4,
                    header_digest: false,
                    data_digest: false,
                    h2c_data_bytes_max: 16384,
                };
                connection.to_host.extend_from_slice(&granted.encode());
                connection.open = true;
            }
            PduHeader::Command(sqe) => self.command(at, *sqe, data),
            PduHeader::Data(header) => {
                let (sqe, all) = connection.transfers.get_mut(&header.command_id).expect("requested by R2T");
                all.extend_from_slice(&data);
                if all.len() as u32 == sqe.sgl.raw().1 {
                    let whole = connection.transfers.remove(&header.command_id).expect("it was there");
                    connection.waiting.push(whole);
                }
            }
            PduHeader::TermReq(_) => connection.is_dead = true,
            _ => panic!("the client does not send {:?}", layout.pdu_type),
        }
        true
    }

    fn command(&mut self, at: usize, sqe: Sqe, data: Vec<u8>) {
        let connection = &mut self.connections[at];
        let id = sqe.command_id();
        if sqe.opcode == FABRICS_OPCODE {
            return self.fabrics(at, &sqe);
        }
        if !connection.is_io_queue {
            return self.admin(at, &sqe);
        }
        let (_, bytes) = sqe.sgl.raw();
        let from_host = sqe.opcode & 3 == 1;
        if from_host && data.is_empty() && bytes > 0 {
            if self.complete_writes_early {
                return connection.respond(id, Status::SUCCESS, 0, 0);
            }
            connection.transfers.insert(id, (sqe, Vec::new()));
            DataHeader { command_id: id, tag: 1, offset: 0, bytes }
                .encode_ready_to_transfer(&NegotiatedParams::initial(), &mut connection.to_host);
        } else {
            connection.waiting.push((sqe, data));
        }
    }

    fn fabrics(&mut self, at: usize, sqe: &Sqe) {
        let (connection, id) = (&mut self.connections[at], sqe.command_id());
        match fabrics::FabricsCommand::check(sqe).expect("the client sends valid commands") {
            fabrics::FabricsCommand::Connect(connect) => {
                connection.is_io_queue = connect.queue_id > 0;
                let connected = ConnectResponse { controller_id: 1, authentication_required: false };
                connection.respond(id, Status::SUCCESS, connected.encode(), 0);
            }
            fabrics::FabricsCommand::PropertyGet { offset: property::CAP, .. } => {
                let capabilities = ControllerCapabilities {
                    queue_entries_max: 64,
                    ready_timeout_half_seconds: 1,
                    nvm: true,
                    command_sets: true,
                };
                let cap = capabilities.encode();
                connection.respond(id, Status::SUCCESS, cap as u32, (cap >> 32) as u32);
            }
            // CSTS: ready.
            _ => connection.respond(id, Status::SUCCESS, 1, 0),
        }
    }

    fn admin(&mut self, at: usize, sqe: &Sqe) {
        let id = sqe.command_id();
        match sqe.opcode {
            admin::IDENTIFY => {
                let mut page = self.identify_page(identify::IdentifyRequest::from_sqe(sqe).cns);
                if let Some(mutation) = &self.page_mutation {
                    mutation(sqe.cdw10.get() as u8, &mut page);
                }
                self.connections[at].send_data(id, &page);
                self.connections[at].respond(id, Status::SUCCESS, 0, 0);
            }
            admin::ASYNC_EVENT_REQUEST => self.connections[at].event_request = Some(id),
            admin::GET_LOG_PAGE => {
                self.connections[at].send_data(id, &[0; 4096]);
                self.connections[at].respond(id, Status::SUCCESS, 0, 0);
            }
            _ => self.connections[at].respond(id, Status::SUCCESS, 0, 0),
        }
    }

    fn identify_page(&self, page: u8) -> Vec<u8> {
        match page {
            cns::CONTROLLER => {
                let mut page = identify::IdentifyController::zeroed();
                page.command_capsule_units.set((CAPSULE_BYTES + 64) / 16);
                page.data_pages_log2 = self.data_pages_log2;
                page.nvm_commands.set(1 << 2 | 1 << 3);
                page.events.set(event::NAMESPACE_CHANGED_BIT);
                page.as_bytes().to_vec()
            }
            cns::NAMESPACE_LIST => {
                let active = (!self.is_namespace_gone).then_some(NamespaceId(1));
                identify::NamespaceIdList::above(0, active.into_iter()).as_bytes().to_vec()
            }
            cns::DESCRIPTORS => {
                identify::encode_descriptors(&[NamespaceDescriptor::CommandSet(csi::NVM)]).to_vec()
            }
            cns::NAMESPACE => {
                let mut page = identify::IdentifyNamespace::zeroed();
                page.size.set((self.media.cached.len() / self.media.block_bytes) as u64);
                page.capacity = page.size;
                page.nguid = self.nguid;
                page.block_formats[0][2] = self.media.block_bytes.ilog2() as u8;
                page.as_bytes().to_vec()
            }
            other => panic!("the client does not request page {other}"),
        }
    }

    fn execute_command(&mut self, at: usize, sqe: &Sqe, data: &[u8]) {
        let id = sqe.command_id();
        if self.busy_responses > 0 {
            self.busy_responses -= 1;
            return self.connections[at].respond(id, Status::COMMAND_INTERRUPTED, 0, 0);
        }
        if let Some(status) = self.next_status.take() {
            return self.connections[at].respond(id, status, 0, 0);
        }
        *self.command_counts.entry(sqe.opcode).or_default() += 1;
        let block = self.media.block_bytes;
        let command = nvm::NvmCommand::check(sqe).expect("the client sends valid commands");
        let bytes_of = |range: nvm::LbaRange| {
            let from = range.lba.0 as usize * block;
            from..from + range.blocks as usize * block
        };
        let mut status = Status::SUCCESS;
        match command {
            nvm::NvmCommand::Flush => self.media.durable.clone_from(&self.media.cached),
            nvm::NvmCommand::Write { range, .. } => {
                self.blocks_max = self.blocks_max.max(range.blocks);
                self.media.cached[bytes_of(range)].copy_from_slice(data);
            }
            nvm::NvmCommand::Read { range } => {
                self.blocks_max = self.blocks_max.max(range.blocks);
                let mut bytes = &self.media.cached[bytes_of(range)];
                if self.short_reads {
                    bytes = &bytes[..bytes.len() - block];
                }
                self.connections[at].send_data(id, bytes);
            }
            nvm::NvmCommand::Compare { range } => {
                if self.media.cached[bytes_of(range)] != *data {
                    status = Status::MEDIA_COMPARE_FAILURE;
                }
            }
            nvm::NvmCommand::WriteZeroes { range, .. } => self.media.cached[bytes_of(range)].fill(0),
            nvm::NvmCommand::DatasetManagement { .. } => {
                for range in nvm::decode_ranges(data) {
                    self.media.cached[bytes_of(range)].fill(0);
                }
            }
            nvm::NvmCommand::Verify { .. } => {}
        }
        self.connections[at].respond(id, status, 0, 0);
    }
}

impl Sockets for BlockNodeSockets {
    fn listen(&mut self, _at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn accept(&mut self, _listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        None
    }
    fn connect(&mut self, _to: SocketAddr) -> io::Result<SocketId> {
        let node = &mut *self.0.borrow_mut();
        node.connections.push(HostConnection { is_dead: node.refuse, ..HostConnection::default() });
        Ok(SocketId(node.connections.len() as u32 - 1))
    }
    fn detach(&mut self, _socket: SocketId) -> Option<DetachedSocket> {
        None
    }
    fn attach(&mut self, _socket: DetachedSocket) -> SocketId {
        unreachable!("no test detaches sockets")
    }
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus {
        let node = &mut *self.0.borrow_mut();
        let connection = &mut node.connections[socket.0 as usize];
        let count = into.len().min(connection.to_host.len());
        if count == 0 {
            return if connection.is_dead { ReceiveStatus::Closed } else { ReceiveStatus::WouldBlock };
        }
        into[..count].copy_from_slice(&connection.to_host[..count]);
        connection.to_host.drain(..count);
        ReceiveStatus::Bytes(count)
    }
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus {
        let node = &mut *self.0.borrow_mut();
        let connection = &mut node.connections[socket.0 as usize];
        if connection.is_dead {
            return SendStatus::Closed;
        }
        slices.iter().for_each(|slice| connection.from_host.extend_from_slice(slice));
        SendStatus::Bytes(slices.iter().map(|slice| slice.len()).sum())
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        out.extend((0..self.0.borrow().connections.len() as u32).map(SocketId));
    }
    fn close(&mut self, socket: SocketId) {
        self.0.borrow_mut().connections[socket.0 as usize].is_dead = true;
    }
}

/// Duration of one iteration.
const STEP_TIME: Nanos = Nanos::from_micros(10);

impl BlockNodeSockets {
    /// Time of the next iteration.
    pub fn advance_time(&self) -> Nanos {
        let mut node = self.0.borrow_mut();
        node.now = node.now + STEP_TIME;
        node.now
    }

    /// A session with this node, run until it is live or has ended.
    pub fn connect_session(&self, config: ClientConfig) -> Session<BlockNodeSockets> {
        let mut session = Session::new(self.clone(), super::address(), config, self.0.borrow().now);
        self.drive(&mut session, |session, _| session.is_live() || session.ended().is_some());
        session
    }

    /// Runs session and node until `done`; returns the responses.
    pub fn drive(
        &self,
        session: &mut Session<BlockNodeSockets>,
        mut done: impl FnMut(&Session<BlockNodeSockets>, &[Result<Response, Error>]) -> bool,
    ) -> Vec<Result<Response, Error>> {
        let mut responses = Vec::new();
        for _ in 0..2_000_000 {
            if done(session, &responses) {
                return responses;
            }
            session.poll(self.advance_time(), |_, response| responses.push(response));
            self.pump();
        }
        panic!("no progress: {:?}, {:?}", session.ended(), session.last_error());
    }

    /// The response of one command.
    pub fn execute(
        &self,
        session: &mut Session<BlockNodeSockets>,
        command: Command<'_>,
    ) -> Result<Response, Error> {
        if let Err(octokv_client::SubmitError::Invalid(error)) = session.submit(command, 7) {
            return Err(error);
        }
        self.drive(session, |_, responses| !responses.is_empty()).remove(0)
    }
}
