//! A node of blocks in memory, written for tests: it answers late and out of order, has a volatile cache that a
//! power cut empties, and lies where a test tells it to.

#![allow(dead_code)] // Each test file uses its part.

use octokv_base::map::Map;
use octokv_base::{NamespaceId, Nanos, Random};
use octokv_client::{Answer, Command, Error, Session, Settings};
use octokv_runtime::{DetachedSocket, ListenerId, Received, Sent, SocketId, Sockets};
use octokv_wire::fabrics::{self, Capabilities, Connected, property};
use octokv_wire::identify::{self, Descriptor, cns};
use octokv_wire::nvm;
use octokv_wire::pdu::{self, Data as Piece, End, Header, IcResponse, Link, Unchecked, flags};
use octokv_wire::queue_entry::{FABRICS, Sqe, admin, csi, event};
use octokv_wire::{Cqe, Status};
use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::Rc;
use zerocopy::IntoBytes;

/// What a data block of the namespace is, and what a power cut leaves of it.
pub struct Media {
    pub block_bytes: usize,
    /// What a reader sees.
    pub cached: Vec<u8>,
    /// What survives a power cut.
    pub durable: Vec<u8>,
}

/// Changes a page before it is sent: Identify's CNS, and the page.
pub type Tamper = Box<dyn Fn(u8, &mut Vec<u8>)>;

#[derive(Default)]
struct Wire {
    open: bool,
    dead: bool,
    /// Whether its Connect was for an I/O queue.
    io: bool,
    from_host: Vec<u8>,
    to_host: Vec<u8>,
    /// Commands that wait for their data, by their identifier.
    transfers: Map<u16, (Sqe, Vec<u8>)>,
    /// Commands that wait to be carried out.
    waiting: Vec<(Sqe, Vec<u8>)>,
    event_request: Option<u16>,
}

pub struct Node {
    pub media: Media,
    pub nguid: [u8; 16],
    pub gone: bool,
    pub random: Random,
    pub now: Nanos,
    /// I/O commands are carried out at random, one in so many at each turn.
    pub lag: u64,
    /// Answers "busy" to so many I/O commands.
    pub busy: u32,
    /// Reads bring one block less than asked for.
    pub short_reads: bool,
    /// Writes are said to be done before their data was asked for.
    pub hasty: bool,
    /// The next I/O command gets this status.
    pub fails: Option<Status>,
    pub data_pages_log2: u8,
    pub tamper: Option<Tamper>,
    pub refuse: bool,
    /// The most blocks that one command named, and how many commands there were, by opcode.
    pub most_blocks: u32,
    pub commands: Map<u8, u32>,
    wires: Vec<Wire>,
}

/// The client's sockets. Clones are the same.
#[derive(Clone)]
pub struct Puppet(pub Rc<RefCell<Node>>);

const CAPSULE_BYTES: u32 = 4096;

impl Puppet {
    pub fn new(block_bytes: usize, image: Vec<u8>) -> Puppet {
        Puppet(Rc::new(RefCell::new(Node {
            media: Media { block_bytes, cached: image.clone(), durable: image },
            nguid: [9; 16],
            gone: false,
            random: Random::new(1),
            now: Nanos::ZERO,
            lag: 1,
            busy: 0,
            short_reads: false,
            hasty: false,
            fails: None,
            data_pages_log2: 5,
            tamper: None,
            refuse: false,
            most_blocks: 0,
            commands: Map::default(),
            wires: Vec::new(),
        })))
    }

    /// Cuts every connection. Commands that wait are carried out or not, as it comes.
    pub fn cut(&self) {
        let node = &mut *self.0.borrow_mut();
        for wire in 0..node.wires.len() {
            for (sqe, data) in std::mem::take(&mut node.wires[wire].waiting) {
                if node.random.one_in(2) {
                    node.carry_out(wire, &sqe, &data);
                }
            }
            node.wires[wire].dead = true;
            node.wires[wire].to_host.clear();
        }
    }

    /// Cuts the power: connections are lost, and what was not flushed, each block or not.
    pub fn power_cut(&self) {
        self.cut();
        let Node { media, random, .. } = &mut *self.0.borrow_mut();
        let Media { block_bytes, cached, durable } = media;
        for (was, is) in durable.chunks_mut(*block_bytes).zip(cached.chunks_mut(*block_bytes)) {
            match random.one_in(4) {
                true => was.copy_from_slice(is),
                false => is.copy_from_slice(was),
            }
        }
    }

    /// Tells every host that namespaces changed.
    pub fn tell_of_changes(&self) {
        let node = &mut *self.0.borrow_mut();
        for wire in &mut node.wires {
            if let Some(id) = wire.event_request.take() {
                wire.respond(id, Status::SUCCESS, event::NAMESPACE_CHANGED, 0);
            }
        }
    }

    /// Whether a host has an event request out.
    pub fn is_listened_to(&self) -> bool {
        self.0.borrow().wires.iter().any(|wire| wire.event_request.is_some())
    }

    /// Lets the node work.
    pub fn pump(&self) {
        let node = &mut *self.0.borrow_mut();
        for wire in 0..node.wires.len() {
            while !node.wires[wire].dead && node.step(wire) {}
            for at in (0..node.wires[wire].waiting.len()).rev() {
                if node.random.one_in(node.lag) {
                    let (sqe, data) = node.wires[wire].waiting.swap_remove(at);
                    node.carry_out(wire, &sqe, &data);
                }
            }
        }
    }
}

impl Wire {
    fn respond(&mut self, id: u16, status: Status, dw0: u32, dw1: u32) {
        let cqe = Cqe::new(id, 0, status, dw0, dw1);
        pdu::encode_response(&cqe, &Link::plain(), &mut self.to_host);
    }

    fn send_data(&mut self, id: u16, data: &[u8]) {
        // In two pieces, so that offsets count.
        let half = data.len() / 8 * 4;
        for (from, to) in [(0, half), (half, data.len())] {
            if from < to {
                let piece = Piece { command_id: id, tag: 0, offset: from as u32, bytes: (to - from) as u32 };
                let last = if to == data.len() { flags::LAST } else { 0 };
                piece.encode(End::Controller, last, &Link::plain(), &mut self.to_host);
                self.to_host.extend_from_slice(&data[from..to]);
            }
        }
    }
}

impl Node {
    /// Takes one PDU. False when there is none.
    fn step(&mut self, at: usize) -> bool {
        let wire = &mut self.wires[at];
        let Some(unchecked) = Unchecked::new(&wire.from_host) else { return false };
        let frame = unchecked.check(End::Controller, &Link::plain()).expect("our client keeps the rules");
        if wire.from_host.len() < frame.pdu_bytes() {
            return false;
        }
        let bytes: Vec<u8> = wire.from_host.drain(..frame.pdu_bytes()).collect();
        let data = bytes[frame.prefix_bytes as usize..].to_vec();
        match frame.header(&bytes).expect("no digests") {
            Header::IcRequest(_) => {
                let granted = IcResponse {
                    controller_alignment: 4,
                    header_digest: false,
                    data_digest: false,
                    host_data_bytes_max: 16384,
                };
                wire.to_host.extend_from_slice(&granted.encode());
                wire.open = true;
            }
            Header::Command(sqe) => self.command(at, *sqe, data),
            Header::Data(piece) => {
                let (sqe, all) = wire.transfers.get_mut(&piece.command_id).expect("asked for");
                all.extend_from_slice(&data);
                if all.len() as u32 == sqe.sgl.raw().1 {
                    let whole = wire.transfers.remove(&piece.command_id).expect("it was there");
                    wire.waiting.push(whole);
                }
            }
            Header::Terminate(_) => wire.dead = true,
            _ => panic!("our client does not send {:?}", frame.kind),
        }
        true
    }

    fn command(&mut self, at: usize, sqe: Sqe, data: Vec<u8>) {
        let wire = &mut self.wires[at];
        let id = sqe.command_id();
        if sqe.opcode == FABRICS {
            return self.fabrics(at, &sqe);
        }
        if !wire.io {
            return self.admin(at, &sqe);
        }
        let (_, bytes) = sqe.sgl.raw();
        let from_host = sqe.opcode & 3 == 1;
        if from_host && data.is_empty() && bytes > 0 {
            if self.hasty {
                return wire.respond(id, Status::SUCCESS, 0, 0);
            }
            wire.transfers.insert(id, (sqe, Vec::new()));
            Piece { command_id: id, tag: 1, offset: 0, bytes }
                .encode_ready_to_transfer(&Link::plain(), &mut wire.to_host);
        } else {
            wire.waiting.push((sqe, data));
        }
    }

    fn fabrics(&mut self, at: usize, sqe: &Sqe) {
        let (wire, id) = (&mut self.wires[at], sqe.command_id());
        match fabrics::Command::check(sqe).expect("our client's own") {
            fabrics::Command::Connect(connect) => {
                wire.io = connect.queue_id > 0;
                let connected = Connected { controller_id: 1, authentication_required: false };
                wire.respond(id, Status::SUCCESS, connected.encode(), 0);
            }
            fabrics::Command::PropertyGet { offset: property::CAP, .. } => {
                let capabilities =
                    Capabilities { queue_entries_max: 64, timeout_halves: 1, nvm: true, command_sets: true };
                let cap = capabilities.encode();
                wire.respond(id, Status::SUCCESS, cap as u32, (cap >> 32) as u32);
            }
            // CSTS: ready.
            _ => wire.respond(id, Status::SUCCESS, 1, 0),
        }
    }

    fn admin(&mut self, at: usize, sqe: &Sqe) {
        let id = sqe.command_id();
        match sqe.opcode {
            admin::IDENTIFY => {
                let mut page = self.page(identify::Request::of(sqe).cns);
                if let Some(tamper) = &self.tamper {
                    tamper(sqe.cdw10.get() as u8, &mut page);
                }
                self.wires[at].send_data(id, &page);
                self.wires[at].respond(id, Status::SUCCESS, 0, 0);
            }
            admin::ASYNC_EVENT_REQUEST => self.wires[at].event_request = Some(id),
            admin::GET_LOG_PAGE => {
                self.wires[at].send_data(id, &[0; 4096]);
                self.wires[at].respond(id, Status::SUCCESS, 0, 0);
            }
            _ => self.wires[at].respond(id, Status::SUCCESS, 0, 0),
        }
    }

    fn page(&self, page: u8) -> Vec<u8> {
        match page {
            cns::CONTROLLER => {
                let mut page = identify::Controller::zeroed();
                page.command_capsule_units.set((CAPSULE_BYTES + 64) / 16);
                page.data_pages_log2 = self.data_pages_log2;
                page.nvm_commands.set(1 << 2 | 1 << 3);
                page.events.set(event::NAMESPACE_CHANGED_BIT);
                page.as_bytes().to_vec()
            }
            cns::NAMESPACE_LIST => {
                let there = (!self.gone).then_some(NamespaceId(1));
                identify::NamespaceList::above(0, there.into_iter()).as_bytes().to_vec()
            }
            cns::DESCRIPTORS => identify::encode_descriptors(&[Descriptor::CommandSet(csi::NVM)]).to_vec(),
            cns::NAMESPACE => {
                let mut page = identify::Namespace::zeroed();
                page.size.set((self.media.cached.len() / self.media.block_bytes) as u64);
                page.capacity = page.size;
                page.nguid = self.nguid;
                page.block_formats[0][2] = self.media.block_bytes.ilog2() as u8;
                page.as_bytes().to_vec()
            }
            other => panic!("our client does not ask for page {other}"),
        }
    }

    fn carry_out(&mut self, at: usize, sqe: &Sqe, data: &[u8]) {
        let id = sqe.command_id();
        if self.busy > 0 {
            self.busy -= 1;
            return self.wires[at].respond(id, Status::COMMAND_INTERRUPTED, 0, 0);
        }
        if let Some(status) = self.fails.take() {
            return self.wires[at].respond(id, status, 0, 0);
        }
        *self.commands.entry(sqe.opcode).or_default() += 1;
        let block = self.media.block_bytes;
        let command = nvm::Command::check(sqe).expect("our client's own");
        let bytes_of = |range: nvm::Range| {
            let from = range.lba.0 as usize * block;
            from..from + range.blocks as usize * block
        };
        let mut status = Status::SUCCESS;
        match command {
            nvm::Command::Flush => self.media.durable.clone_from(&self.media.cached),
            nvm::Command::Write { range, .. } => {
                self.most_blocks = self.most_blocks.max(range.blocks);
                self.media.cached[bytes_of(range)].copy_from_slice(data);
            }
            nvm::Command::Read { range } => {
                self.most_blocks = self.most_blocks.max(range.blocks);
                let mut bytes = &self.media.cached[bytes_of(range)];
                if self.short_reads {
                    bytes = &bytes[..bytes.len() - block];
                }
                self.wires[at].send_data(id, bytes);
            }
            nvm::Command::Compare { range } => {
                if self.media.cached[bytes_of(range)] != *data {
                    status = Status::new(2, 0x85);
                }
            }
            nvm::Command::WriteZeroes { range, .. } => self.media.cached[bytes_of(range)].fill(0),
            nvm::Command::DatasetManagement { .. } => {
                for range in nvm::decode_ranges(data) {
                    self.media.cached[bytes_of(range)].fill(0);
                }
            }
            nvm::Command::Verify { .. } => {}
        }
        self.wires[at].respond(id, status, 0, 0);
    }
}

impl Sockets for Puppet {
    fn listen(&mut self, _at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn accept(&mut self, _listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        None
    }
    fn connect(&mut self, _to: SocketAddr) -> io::Result<SocketId> {
        let node = &mut *self.0.borrow_mut();
        node.wires.push(Wire { dead: node.refuse, ..Wire::default() });
        Ok(SocketId(node.wires.len() as u32 - 1))
    }
    fn detach(&mut self, _socket: SocketId) -> Option<DetachedSocket> {
        None
    }
    fn attach(&mut self, _socket: DetachedSocket) -> SocketId {
        unreachable!("no test hands sockets over")
    }
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> Received {
        let node = &mut *self.0.borrow_mut();
        let wire = &mut node.wires[socket.0 as usize];
        let count = into.len().min(wire.to_host.len());
        if count == 0 {
            return if wire.dead { Received::Closed } else { Received::Nothing };
        }
        into[..count].copy_from_slice(&wire.to_host[..count]);
        wire.to_host.drain(..count);
        Received::Bytes(count)
    }
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> Sent {
        let node = &mut *self.0.borrow_mut();
        let wire = &mut node.wires[socket.0 as usize];
        if wire.dead {
            return Sent::Broken;
        }
        slices.iter().for_each(|slice| wire.from_host.extend_from_slice(slice));
        Sent::Bytes(slices.iter().map(|slice| slice.len()).sum())
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        out.extend((0..self.0.borrow().wires.len() as u32).map(SocketId));
    }
    fn close(&mut self, socket: SocketId) {
        self.0.borrow_mut().wires[socket.0 as usize].dead = true;
    }
}

/// How long a turn takes.
const TURN: Nanos = Nanos::from_micros(10);

impl Puppet {
    /// The next turn's time.
    pub fn tick(&self) -> Nanos {
        let mut node = self.0.borrow_mut();
        node.now = node.now + TURN;
        node.now
    }

    /// A session with this node, driven until it is live or has ended.
    pub fn connect_session(&self, settings: Settings) -> Session<Puppet> {
        let mut session = Session::new(self.clone(), super::address(), settings, self.0.borrow().now);
        self.drive(&mut session, |session, _| session.is_live() || session.ended().is_some());
        session
    }

    /// Turns session and node until `done`; gives the answers that came.
    pub fn drive(
        &self,
        session: &mut Session<Puppet>,
        mut done: impl FnMut(&Session<Puppet>, &[Result<Answer, Error>]) -> bool,
    ) -> Vec<Result<Answer, Error>> {
        let mut answers = Vec::new();
        for _ in 0..2_000_000 {
            if done(session, &answers) {
                return answers;
            }
            session.poll(self.tick(), |_, answer| answers.push(answer));
            self.pump();
        }
        panic!("it does not come: {:?}, {:?}", session.ended(), session.last_loss());
    }

    /// The answer to one command.
    pub fn ask(&self, session: &mut Session<Puppet>, command: Command<'_>) -> Result<Answer, Error> {
        if let Err(octokv_client::Rejected::Invalid(error)) = session.submit(command, 7) {
            return Err(error);
        }
        self.drive(session, |_, answers| !answers.is_empty()).remove(0)
    }
}
