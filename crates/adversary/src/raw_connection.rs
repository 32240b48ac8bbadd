//! One TCP connection to a node that says what it likes, right or wrong, and reports what the node said.
//!
//! In: PDUs made right by `octokv_wire`, and any other bytes. Out: [`Heard`], one PDU of the node at a time.
//! Invariant: the node's own PDUs are held to the specification; one that is not well formed is an error here, so
//! that no attack passes on a node that answers nonsense.

use octokv_base::crc32c;
use octokv_wire::fabrics::{self, Configuration, Connect, ConnectData, Connected, NEW_CONTROLLER, property};
use octokv_wire::pdu::{self, COMMON_BYTES, Data, End, Header, IcRequest, Link, Unchecked, flags};
use octokv_wire::{Cqe, Sqe, Status, nqn};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long a peer waits for one word of the node.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// The host that attackers say they are.
pub const HOST: &str = "nqn.2026-11.io.octokv:attacker";
/// Its identifier.
pub const HOST_ID: [u8; 16] = *b"hostile host  id";

/// Where a node is, and what its subsystem is called.
#[derive(Clone, Debug)]
pub struct Victim {
    /// Its address.
    pub address: SocketAddr,
    /// Its subsystem's NQN.
    pub nqn: String,
}

/// What the node said.
#[derive(Debug)]
pub enum Heard {
    /// ICResp.
    Opened,
    /// A completion.
    Response(Cqe),
    /// An R2T.
    Ask(Data),
    /// C2HData and its bytes.
    Data(Data, Vec<u8>),
    /// C2HTermReq: fatal error status and information.
    Terminated {
        /// FES.
        fatal: u16,
        /// FEI.
        information: u32,
    },
    /// The connection is closed or reset.
    Closed,
    /// Nothing within the peer's patience.
    Silence,
}

/// One connection.
#[derive(Debug)]
pub struct Peer {
    stream: TcpStream,
    /// What was agreed on.
    pub link: Link,
    inbox: Vec<u8>,
}

/// How a queue is connected. [`Joining::admin`] and [`Joining::io`] give what a decent host says.
#[derive(Clone, Debug)]
pub struct Joining {
    /// Fields of the command.
    pub connect: Connect,
    /// CNTLID of the data.
    pub controller_id: u16,
    /// Host NQN.
    pub host: String,
    /// Host identifier.
    pub host_id: [u8; 16],
    /// Subsystem NQN.
    pub subsystem: String,
}

impl Joining {
    /// A new controller without keep alive.
    pub fn admin(victim: &Victim) -> Joining {
        Joining {
            connect: Connect { format: 0, queue_id: 0, entries: 32, attributes: 0, keep_alive_ms: 0 },
            controller_id: NEW_CONTROLLER,
            host: HOST.to_owned(),
            host_id: HOST_ID,
            subsystem: victim.nqn.clone(),
        }
    }

    /// A discovery controller.
    pub fn discovery() -> Joining {
        Joining {
            subsystem: nqn::DISCOVERY.to_owned(),
            ..Joining::admin(&Victim { address: SocketAddr::from(([127, 0, 0, 1], 0)), nqn: String::new() })
        }
    }

    /// An I/O queue of a controller.
    pub fn io(victim: &Victim, controller_id: u16, queue_id: u16, entries: u32) -> Joining {
        let admin = Joining::admin(victim);
        Joining { connect: Connect { queue_id, entries, ..admin.connect }, controller_id, ..admin }
    }
}

impl Peer {
    /// A TCP connection and nothing more.
    ///
    /// # Errors
    /// When there is none to be had.
    pub fn reach(victim: &Victim) -> io::Result<Peer> {
        let stream = TcpStream::connect_timeout(&victim.address, PATIENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(Peer { stream, link: Link::plain(), inbox: Vec::new() })
    }

    /// A connection initialised as asked.
    ///
    /// # Errors
    /// When the node does not answer with ICResp.
    pub fn open(victim: &Victim, header_digest: bool, data_digest: bool) -> io::Result<Peer> {
        let mut peer = Peer::reach(victim)?;
        let request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        peer.send(&request.encode())?;
        match peer.hear()? {
            Heard::Opened => Ok(peer),
            other => Err(unexpected(&other)),
        }
    }

    /// The admin queue of a new, enabled controller, and the controller's identifier.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn admin(victim: &Victim) -> io::Result<(Peer, u16)> {
        Peer::admin_as(victim, &Joining::admin(victim), false, false)
    }

    /// The same, of any host, and with digests.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn admin_as(victim: &Victim, joining: &Joining, hd: bool, dd: bool) -> io::Result<(Peer, u16)> {
        let mut peer = Peer::open(victim, hd, dd)?;
        let id = granted(&peer.join(joining)?)?;
        peer.configure(Configuration::ENABLED)?;
        Ok((peer, id))
    }

    /// An I/O queue of a controller.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn io(victim: &Victim, controller: u16, queue: u16, entries: u32) -> io::Result<Peer> {
        let mut peer = Peer::open(victim, false, false)?;
        granted(&peer.join(&Joining::io(victim, controller, queue, entries))?)?;
        Ok(peer)
    }

    /// A controller with one I/O queue: admin connection, I/O connection.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn pair(victim: &Victim, entries: u32) -> io::Result<(Peer, Peer)> {
        let (admin, id) = Peer::admin(victim)?;
        let io = Peer::io(victim, id, 1, entries)?;
        Ok((admin, io))
    }

    /// Connects this connection's queue; gives the completion, whatever it says.
    ///
    /// # Errors
    /// When no completion comes.
    pub fn join(&mut self, joining: &Joining) -> io::Result<Cqe> {
        let Joining { connect, controller_id, host, host_id, subsystem } = joining;
        let data = ConnectData { host_id: *host_id, controller_id: *controller_id, subsystem, host };
        let sqe = fabrics::Command::Connect(*connect).encode(0x4343);
        self.ask(&sqe, &data.encode())
    }

    /// Writes CC.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn configure(&mut self, configuration: Configuration) -> io::Result<()> {
        let value = u64::from(configuration.0);
        let set = fabrics::Command::PropertySet { offset: property::CC, wide: false, value };
        granted(&self.ask(&set.encode(0x4344), &[])?).map(drop)
    }

    /// The bytes of a command's capsule, digests as agreed on.
    pub fn capsule(&self, sqe: &Sqe, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256 + data.len());
        pdu::encode_command(sqe, data.len(), &self.link, &mut bytes);
        self.append_data(data, &mut bytes);
        bytes
    }

    /// The bytes of an H2CData.
    pub fn host_data(&self, range: Data, data: &[u8], bits: u8) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256 + data.len());
        range.encode(End::Host, bits, &self.link, &mut bytes);
        self.append_data(data, &mut bytes);
        bytes
    }

    fn append_data(&self, data: &[u8], bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(data);
        if self.link.trailer_bytes(data.len()) > 0 {
            bytes.extend_from_slice(&crc32c(data).to_le_bytes());
        }
    }

    /// Sends bytes as they are. That the node has closed is no error: [`Peer::hear`] will tell.
    ///
    /// # Errors
    /// When the node takes nothing for longer than [`PATIENCE`].
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.stream.write_all(bytes) {
            Err(error) if is_end(&error) => Ok(()),
            other => other,
        }
    }

    /// Sends what fits into the socket now; gives how many bytes that were, `None` when the node has closed.
    ///
    /// # Errors
    /// What the socket says.
    pub fn push(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        self.stream.set_nonblocking(true)?;
        let written = self.stream.write(bytes);
        self.stream.set_nonblocking(false)?;
        match written {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Some(0)),
            Err(error) if is_end(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a command and waits for its completion; data that comes before it is let go.
    ///
    /// # Errors
    /// When something else comes.
    pub fn ask(&mut self, sqe: &Sqe, data: &[u8]) -> io::Result<Cqe> {
        self.send(&self.capsule(sqe, data))?;
        self.completion()
    }

    /// The next completion; data before it is let go.
    ///
    /// # Errors
    /// When something else comes.
    pub fn completion(&mut self) -> io::Result<Cqe> {
        loop {
            match self.hear()? {
                Heard::Response(cqe) => return Ok(cqe),
                Heard::Data(..) => {}
                other => return Err(unexpected(&other)),
            }
        }
    }

    /// A Store whose data the node asks for: the command, the R2T, the data, the completion.
    ///
    /// # Errors
    /// When something else comes.
    pub fn transfer(&mut self, sqe: &Sqe, data: &[u8]) -> io::Result<Cqe> {
        let range = self.ask_to_send(sqe)?;
        self.send(&self.host_data(range, data, flags::LAST))?;
        self.completion()
    }

    /// Sends a command whose data goes separately, and waits for the R2T.
    ///
    /// # Errors
    /// When something else comes.
    pub fn ask_to_send(&mut self, sqe: &Sqe) -> io::Result<Data> {
        self.send(&self.capsule(sqe, &[]))?;
        match self.hear()? {
            Heard::Ask(range) => Ok(range),
            other => Err(unexpected(&other)),
        }
    }

    /// The next word of the node.
    ///
    /// # Errors
    /// When what it said is no PDU that a host may receive.
    pub fn hear(&mut self) -> io::Result<Heard> {
        let malformed = |fault| io::Error::new(ErrorKind::InvalidData, format!("the node sent {fault}"));
        if let Some(end) = self.fill(COMMON_BYTES)? {
            return Ok(end);
        }
        let unchecked = Unchecked::new(&self.inbox).expect("eight bytes are there");
        let frame = unchecked.check(End::Host, &self.link).map_err(malformed)?;
        if let Some(end) = self.fill(frame.pdu_bytes())? {
            return Ok(end);
        }
        let (from, to) =
            (frame.prefix_bytes as usize, frame.prefix_bytes as usize + frame.data_bytes as usize);
        let data = &self.inbox[from..to];
        if frame.trailer_bytes > 0 && crc32c(data).to_le_bytes() != self.inbox[to..to + 4] {
            return Err(io::Error::new(ErrorKind::InvalidData, "the node sent a wrong data digest"));
        }
        let heard = match frame.header(&self.inbox).map_err(malformed)? {
            Header::IcResponse(response) => {
                let response = response.check_response().map_err(malformed)?;
                self.link = Link {
                    header_digest: response.header_digest,
                    data_digest: response.data_digest,
                    send_alignment: response.controller_alignment,
                    ..self.link
                };
                Heard::Opened
            }
            Header::Terminate(end) => Heard::Terminated { fatal: end.fatal, information: end.information },
            Header::Response(cqe) => Heard::Response(*cqe),
            Header::Data(range) => Heard::Data(range, data.to_vec()),
            Header::ReadyToTransfer(range) => Heard::Ask(range),
            Header::IcRequest(_) | Header::Command(_) => unreachable!("`check` lets no host's PDU through"),
        };
        self.inbox.drain(..frame.pdu_bytes());
        Ok(heard)
    }

    /// Takes what is there without waiting; gives how many bytes, `None` when the node has closed.
    ///
    /// # Errors
    /// What the socket says.
    pub fn drain(&mut self) -> io::Result<Option<usize>> {
        self.stream.set_nonblocking(true)?;
        let mut buffer = [0; 64 << 10];
        let got = self.stream.read(&mut buffer);
        self.stream.set_nonblocking(false)?;
        match got {
            Ok(0) => Ok(None),
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Some(0)),
            Err(error) if is_end(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits for the end, letting go whatever comes before it. True when a termination request came first.
    ///
    /// # Errors
    /// When it does not come.
    pub fn until_closed(&mut self) -> io::Result<bool> {
        let mut terminated = false;
        loop {
            match self.hear()? {
                Heard::Closed => return Ok(terminated),
                Heard::Terminated { .. } => terminated = true,
                Heard::Silence => return Err(unexpected(&Heard::Silence)),
                _ => {}
            }
        }
    }

    /// Reads until `bytes` are there, or gives what came instead.
    fn fill(&mut self, bytes: usize) -> io::Result<Option<Heard>> {
        let mut chunk = [0; 16 << 10];
        while self.inbox.len() < bytes {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(Some(Heard::Closed)),
                Ok(count) => self.inbox.extend_from_slice(&chunk[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(Some(Heard::Silence));
                }
                Err(error) if is_end(&error) => return Ok(Some(Heard::Closed)),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Changes how long one word is waited for.
    ///
    /// # Errors
    /// What the socket says.
    pub fn set_patience(&mut self, patience: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(patience))
    }
}

fn is_end(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted)
}

/// The controller that a successful Connect grants.
///
/// # Errors
/// When it was refused.
pub fn granted(cqe: &Cqe) -> io::Result<u16> {
    match cqe.status() {
        status if status.is_success() => Ok(Connected::decode(cqe.dw0.get()).controller_id),
        status => Err(refused(status)),
    }
}

fn refused(status: Status) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, format!("the node said {status:?}"))
}

fn unexpected(heard: &Heard) -> io::Error {
    io::Error::new(ErrorKind::UnexpectedEof, format!("instead of an answer came {heard:?}"))
}
