//! One TCP connection to a node that says what it likes, right or wrong, and reports what the node said.
//!
//! In: PDUs made right by `octokv_wire`, and any other bytes. Out: [`ReceivedPdu`], one PDU of the node at a time.
//! Invariant: the node's own PDUs are held to the specification; one that is not well formed is an error here, so
//! that no attack passes on a node that answers nonsense.

use octokv_base::crc32c;
use octokv_wire::fabrics::{
    self, Connect, ConnectData, ConnectResponse, ControllerConfiguration, NEW_CONTROLLER, property,
};
use octokv_wire::pdu::{
    self, COMMON_HEADER_BYTES, DataHeader, IcRequest, NegotiatedParams, PduHeader, Role,
    UncheckedCommonHeader, flags,
};
use octokv_wire::{Cqe, Sqe, Status, nqn};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long a peer waits for one word of the node.
pub const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// The host that attackers say they are.
pub const ATTACKER_NQN: &str = "nqn.2026-11.io.octokv:attacker";
/// Its identifier.
pub const ATTACKER_HOST_ID: [u8; 16] = *b"hostile host  id";

/// Where a node is, and what its subsystem is called.
#[derive(Clone, Debug)]
pub struct TargetAddr {
    /// Its address.
    pub address: SocketAddr,
    /// Its subsystem's NQN.
    pub nqn: String,
}

/// What the node said.
#[derive(Debug)]
pub enum ReceivedPdu {
    /// ICResp.
    IcResp,
    /// A completion.
    Response(Cqe),
    /// An R2T.
    R2t(DataHeader),
    /// C2HData and its bytes.
    C2hData(DataHeader, Vec<u8>),
    /// C2HTermReq: fatal error status and information.
    TermReq {
        /// FES.
        fatal_error_status: u16,
        /// FEI.
        fatal_error_information: u32,
    },
    /// The connection is closed or reset.
    Closed,
    /// Nothing within the peer's patience.
    Timeout,
}

/// One connection.
#[derive(Debug)]
pub struct RawConnection {
    stream: TcpStream,
    /// What was agreed on.
    pub params: NegotiatedParams,
    receive_buffer: Vec<u8>,
}

/// How a queue is connected. [`ConnectParams::admin`] and [`ConnectParams::io`] give what a decent host says.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// Fields of the command.
    pub connect: Connect,
    /// CNTLID of the data.
    pub controller_id: u16,
    /// Host NQN.
    pub host_nqn: String,
    /// Host identifier.
    pub host_id: [u8; 16],
    /// Subsystem NQN.
    pub subsystem_nqn: String,
}

impl ConnectParams {
    /// A new controller without keep alive.
    pub fn admin(target: &TargetAddr) -> ConnectParams {
        ConnectParams {
            connect: Connect { format: 0, queue_id: 0, entries: 32, attributes: 0, keep_alive_ms: 0 },
            controller_id: NEW_CONTROLLER,
            host_nqn: ATTACKER_NQN.to_owned(),
            host_id: ATTACKER_HOST_ID,
            subsystem_nqn: target.nqn.clone(),
        }
    }

    /// A discovery controller.
    pub fn discovery() -> ConnectParams {
        ConnectParams {
            subsystem_nqn: nqn::DISCOVERY.to_owned(),
            ..ConnectParams::admin(&TargetAddr {
                address: SocketAddr::from(([127, 0, 0, 1], 0)),
                nqn: String::new(),
            })
        }
    }

    /// An I/O queue of a controller.
    pub fn io(target: &TargetAddr, controller_id: u16, queue_id: u16, entries: u32) -> ConnectParams {
        let admin = ConnectParams::admin(target);
        ConnectParams { connect: Connect { queue_id, entries, ..admin.connect }, controller_id, ..admin }
    }
}

impl RawConnection {
    /// A TCP connection and nothing more.
    ///
    /// # Errors
    /// When there is none to be had.
    pub fn connect_tcp(target: &TargetAddr) -> io::Result<RawConnection> {
        let stream = TcpStream::connect_timeout(&target.address, RECEIVE_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(RECEIVE_TIMEOUT))?;
        stream.set_write_timeout(Some(RECEIVE_TIMEOUT))?;
        Ok(RawConnection { stream, params: NegotiatedParams::initial(), receive_buffer: Vec::new() })
    }

    /// A connection initialised as asked.
    ///
    /// # Errors
    /// When the node does not answer with ICResp.
    pub fn connect_initialised(
        target: &TargetAddr,
        header_digest: bool,
        data_digest: bool,
    ) -> io::Result<RawConnection> {
        let mut peer = RawConnection::connect_tcp(target)?;
        let request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        peer.send(&request.encode())?;
        match peer.receive_pdu()? {
            ReceivedPdu::IcResp => Ok(peer),
            other => Err(unexpected_pdu(&other)),
        }
    }

    /// The admin queue of a new, enabled controller, and the controller's identifier.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn connect_admin(target: &TargetAddr) -> io::Result<(RawConnection, u16)> {
        RawConnection::connect_admin_as(target, &ConnectParams::admin(target), false, false)
    }

    /// The same, of any host, and with digests.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn connect_admin_as(
        target: &TargetAddr,
        params: &ConnectParams,
        hd: bool,
        dd: bool,
    ) -> io::Result<(RawConnection, u16)> {
        let mut peer = RawConnection::connect_initialised(target, hd, dd)?;
        let id = expect_success(&peer.fabrics_connect(params)?)?;
        peer.write_cc(ControllerConfiguration::ENABLED)?;
        Ok((peer, id))
    }

    /// An I/O queue of a controller.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn connect_io(
        target: &TargetAddr,
        controller: u16,
        queue: u16,
        entries: u32,
    ) -> io::Result<RawConnection> {
        let mut peer = RawConnection::connect_initialised(target, false, false)?;
        expect_success(&peer.fabrics_connect(&ConnectParams::io(target, controller, queue, entries))?)?;
        Ok(peer)
    }

    /// A controller with one I/O queue: admin connection, I/O connection.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn connect_pair(target: &TargetAddr, entries: u32) -> io::Result<(RawConnection, RawConnection)> {
        let (admin, id) = RawConnection::connect_admin(target)?;
        let io = RawConnection::connect_io(target, id, 1, entries)?;
        Ok((admin, io))
    }

    /// Connects this connection's queue; gives the completion, whatever it says.
    ///
    /// # Errors
    /// When no completion comes.
    pub fn fabrics_connect(&mut self, params: &ConnectParams) -> io::Result<Cqe> {
        let ConnectParams { connect, controller_id, host_nqn: host, host_id, subsystem_nqn: subsystem } =
            params;
        let data = ConnectData { host_id: *host_id, controller_id: *controller_id, subsystem, host };
        let sqe = fabrics::FabricsCommand::Connect(*connect).encode(0x4343);
        self.execute(&sqe, &data.encode())
    }

    /// Writes CC.
    ///
    /// # Errors
    /// When the node refuses.
    pub fn write_cc(&mut self, configuration: ControllerConfiguration) -> io::Result<()> {
        let value = u64::from(configuration.0);
        let set = fabrics::FabricsCommand::PropertySet { offset: property::CC, is_64_bit: false, value };
        expect_success(&self.execute(&set.encode(0x4344), &[])?).map(drop)
    }

    /// The bytes of a command's capsule, digests as agreed on.
    pub fn capsule(&self, sqe: &Sqe, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256 + data.len());
        pdu::encode_command(sqe, data.len(), &self.params, &mut bytes);
        self.append_data(data, &mut bytes);
        bytes
    }

    /// The bytes of an H2CData.
    pub fn h2c_data(&self, range: DataHeader, data: &[u8], bits: u8) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256 + data.len());
        range.encode(Role::Host, bits, &self.params, &mut bytes);
        self.append_data(data, &mut bytes);
        bytes
    }

    fn append_data(&self, data: &[u8], bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(data);
        if self.params.trailer_bytes(data.len()) > 0 {
            bytes.extend_from_slice(&crc32c(data).to_le_bytes());
        }
    }

    /// Sends bytes as they are. That the node has closed is no error: [`RawConnection::hear`] will tell.
    ///
    /// # Errors
    /// When the node takes nothing for longer than [`PATIENCE`].
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.stream.write_all(bytes) {
            Err(error) if is_disconnect(&error) => Ok(()),
            other => other,
        }
    }

    /// Sends what fits into the socket now; gives how many bytes that were, `None` when the node has closed.
    ///
    /// # Errors
    /// What the socket says.
    pub fn send_nonblocking(&mut self, bytes: &[u8]) -> io::Result<Option<usize>> {
        self.stream.set_nonblocking(true)?;
        let written = self.stream.write(bytes);
        self.stream.set_nonblocking(false)?;
        match written {
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Some(0)),
            Err(error) if is_disconnect(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends a command and waits for its completion; data that comes before it is let go.
    ///
    /// # Errors
    /// When something else comes.
    pub fn execute(&mut self, sqe: &Sqe, data: &[u8]) -> io::Result<Cqe> {
        self.send(&self.capsule(sqe, data))?;
        self.receive_completion()
    }

    /// The next completion; data before it is let go.
    ///
    /// # Errors
    /// When something else comes.
    pub fn receive_completion(&mut self) -> io::Result<Cqe> {
        loop {
            match self.receive_pdu()? {
                ReceivedPdu::Response(cqe) => return Ok(cqe),
                ReceivedPdu::C2hData(..) => {}
                other => return Err(unexpected_pdu(&other)),
            }
        }
    }

    /// A Store whose data the node asks for: the command, the R2T, the data, the completion.
    ///
    /// # Errors
    /// When something else comes.
    pub fn store_by_r2t(&mut self, sqe: &Sqe, data: &[u8]) -> io::Result<Cqe> {
        let range = self.submit_and_await_r2t(sqe)?;
        self.send(&self.h2c_data(range, data, flags::LAST))?;
        self.receive_completion()
    }

    /// Sends a command whose data goes separately, and waits for the R2T.
    ///
    /// # Errors
    /// When something else comes.
    pub fn submit_and_await_r2t(&mut self, sqe: &Sqe) -> io::Result<DataHeader> {
        self.send(&self.capsule(sqe, &[]))?;
        match self.receive_pdu()? {
            ReceivedPdu::R2t(range) => Ok(range),
            other => Err(unexpected_pdu(&other)),
        }
    }

    /// The next word of the node.
    ///
    /// # Errors
    /// When what it said is no PDU that a host may receive.
    pub fn receive_pdu(&mut self) -> io::Result<ReceivedPdu> {
        let malformed = |fault| io::Error::new(ErrorKind::InvalidData, format!("the node sent {fault}"));
        if let Some(end) = self.fill_receive_buffer(COMMON_HEADER_BYTES)? {
            return Ok(end);
        }
        let unchecked = UncheckedCommonHeader::new(&self.receive_buffer).expect("eight bytes are there");
        let frame = unchecked.check(Role::Host, &self.params).map_err(malformed)?;
        if let Some(end) = self.fill_receive_buffer(frame.pdu_bytes())? {
            return Ok(end);
        }
        let (from, to) =
            (frame.prefix_bytes as usize, frame.prefix_bytes as usize + frame.data_bytes as usize);
        let data = &self.receive_buffer[from..to];
        if frame.trailer_bytes > 0 && crc32c(data).to_le_bytes() != self.receive_buffer[to..to + 4] {
            return Err(io::Error::new(ErrorKind::InvalidData, "the node sent a wrong data digest"));
        }
        let received = match frame.decode_header(&self.receive_buffer).map_err(malformed)? {
            PduHeader::IcResponse(response) => {
                let response = response.check_response().map_err(malformed)?;
                self.params = NegotiatedParams {
                    header_digest: response.header_digest,
                    data_digest: response.data_digest,
                    send_alignment: response.controller_alignment,
                    ..self.params
                };
                ReceivedPdu::IcResp
            }
            PduHeader::TermReq(end) => ReceivedPdu::TermReq {
                fatal_error_status: end.fatal_status,
                fatal_error_information: end.information,
            },
            PduHeader::Response(cqe) => ReceivedPdu::Response(*cqe),
            PduHeader::Data(range) => ReceivedPdu::C2hData(range, data.to_vec()),
            PduHeader::ReadyToTransfer(range) => ReceivedPdu::R2t(range),
            PduHeader::IcRequest(_) | PduHeader::Command(_) => {
                unreachable!("`check` lets no host's PDU through")
            }
        };
        self.receive_buffer.drain(..frame.pdu_bytes());
        Ok(received)
    }

    /// Takes what is there without waiting; gives how many bytes, `None` when the node has closed.
    ///
    /// # Errors
    /// What the socket says.
    pub fn receive_nonblocking(&mut self) -> io::Result<Option<usize>> {
        self.stream.set_nonblocking(true)?;
        let mut buffer = [0; 64 << 10];
        let got = self.stream.read(&mut buffer);
        self.stream.set_nonblocking(false)?;
        match got {
            Ok(0) => Ok(None),
            Ok(count) => Ok(Some(count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Some(0)),
            Err(error) if is_disconnect(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Waits for the end, letting go whatever comes before it. True when a termination request came first.
    ///
    /// # Errors
    /// When it does not come.
    pub fn wait_closed(&mut self) -> io::Result<bool> {
        let mut terminated = false;
        loop {
            match self.receive_pdu()? {
                ReceivedPdu::Closed => return Ok(terminated),
                ReceivedPdu::TermReq { .. } => terminated = true,
                ReceivedPdu::Timeout => return Err(unexpected_pdu(&ReceivedPdu::Timeout)),
                _ => {}
            }
        }
    }

    /// Reads until `bytes` are there, or gives what came instead.
    fn fill_receive_buffer(&mut self, bytes: usize) -> io::Result<Option<ReceivedPdu>> {
        let mut chunk = [0; 16 << 10];
        while self.receive_buffer.len() < bytes {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Ok(Some(ReceivedPdu::Closed)),
                Ok(count) => self.receive_buffer.extend_from_slice(&chunk[..count]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(Some(ReceivedPdu::Timeout));
                }
                Err(error) if is_disconnect(&error) => return Ok(Some(ReceivedPdu::Closed)),
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Changes how long one word is waited for.
    ///
    /// # Errors
    /// What the socket says.
    pub fn set_receive_timeout(&mut self, patience: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(patience))
    }
}

fn is_disconnect(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted)
}

/// The controller that a successful Connect grants.
///
/// # Errors
/// When it was refused.
pub fn expect_success(cqe: &Cqe) -> io::Result<u16> {
    match cqe.status() {
        status if status.is_success() => Ok(ConnectResponse::decode(cqe.dw0.get()).controller_id),
        status => Err(status_error(status)),
    }
}

fn status_error(status: Status) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, format!("the node said {status:?}"))
}

fn unexpected_pdu(received: &ReceivedPdu) -> io::Error {
    io::Error::new(ErrorKind::UnexpectedEof, format!("instead of an answer came {received:?}"))
}
