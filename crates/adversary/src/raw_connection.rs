//! One TCP connection to a node that sends arbitrary bytes and decodes the node's PDUs.
//!
//! In: PDUs encoded by `octokv_wire`, and any other bytes. Out: [`ReceivedPdu`], one PDU of the node at a time.
//! Invariant: a PDU of the node that violates the specification is an error, so an attack never passes on a node that
//! sends malformed PDUs.

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

/// Default time to wait for a PDU, and for a send.
pub const RECEIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// Host NQN of attackers.
pub const ATTACKER_NQN: &str = "nqn.2026-11.io.octokv:attacker";
/// Host identifier of attackers.
pub const ATTACKER_HOST_ID: [u8; 16] = *b"hostile host  id";

/// Address of a node and NQN of its subsystem.
#[derive(Clone, Debug)]
pub struct TargetAddr {
    /// Address of its listener.
    pub address: SocketAddr,
    /// NQN of its subsystem.
    pub nqn: String,
}

/// A PDU of the node, or the reason that there is none.
#[derive(Debug)]
pub enum ReceivedPdu {
    /// ICResp: the connection is initialized.
    IcResp,
    /// Response capsule.
    Response(Cqe),
    /// R2T: the node asks for the data of a command.
    R2t(DataHeader),
    /// C2HData and its data.
    C2hData(DataHeader, Vec<u8>),
    /// C2HTermReq: the node ends the connection for a protocol error.
    TermReq {
        /// Fatal error status (FES): the kind of error.
        fatal_error_status: u16,
        /// Fatal error information (FEI): the byte offset of the invalid header field, or the received header digest.
        fatal_error_information: u32,
    },
    /// The node closed or reset the connection.
    Closed,
    /// No PDU within the receive timeout.
    Timeout,
}

/// One connection.
#[derive(Debug)]
pub struct RawConnection {
    stream: TcpStream,
    /// Parameters negotiated by ICReq and ICResp.
    pub params: NegotiatedParams,
    receive_buffer: Vec<u8>,
}

/// Parameters of a Connect command. [`ConnectParams::admin`] and [`ConnectParams::io`] return valid ones.
#[derive(Clone, Debug)]
pub struct ConnectParams {
    /// Fields of the submission queue entry.
    pub connect: Connect,
    /// CNTLID of the Connect data.
    pub controller_id: u16,
    /// HOSTNQN of the Connect data.
    pub host_nqn: String,
    /// HOSTID of the Connect data.
    pub host_id: [u8; 16],
    /// SUBNQN of the Connect data.
    pub subsystem_nqn: String,
}

impl ConnectParams {
    /// Admin queue of a new controller, without keep-alive.
    pub fn admin(target: &TargetAddr) -> ConnectParams {
        ConnectParams {
            connect: Connect { format: 0, queue_id: 0, entries: 32, attributes: 0, keep_alive_ms: 0 },
            controller_id: NEW_CONTROLLER,
            host_nqn: ATTACKER_NQN.to_owned(),
            host_id: ATTACKER_HOST_ID,
            subsystem_nqn: target.nqn.clone(),
        }
    }

    /// Admin queue of a discovery controller.
    pub fn discovery() -> ConnectParams {
        ConnectParams {
            subsystem_nqn: nqn::DISCOVERY.to_owned(),
            ..ConnectParams::admin(&TargetAddr {
                address: SocketAddr::from(([127, 0, 0, 1], 0)),
                nqn: String::new(),
            })
        }
    }

    /// I/O queue of a controller.
    pub fn io(target: &TargetAddr, controller_id: u16, queue_id: u16, entries: u32) -> ConnectParams {
        let admin = ConnectParams::admin(target);
        ConnectParams { connect: Connect { queue_id, entries, ..admin.connect }, controller_id, ..admin }
    }
}

impl RawConnection {
    /// Opens a TCP connection and sends nothing.
    ///
    /// # Errors
    /// If the connection is refused.
    pub fn connect_tcp(target: &TargetAddr) -> io::Result<RawConnection> {
        let stream = TcpStream::connect_timeout(&target.address, RECEIVE_TIMEOUT)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(RECEIVE_TIMEOUT))?;
        stream.set_write_timeout(Some(RECEIVE_TIMEOUT))?;
        Ok(RawConnection { stream, params: NegotiatedParams::initial(), receive_buffer: Vec::new() })
    }

    /// Opens a connection and exchanges ICReq and ICResp.
    ///
    /// # Errors
    /// If the connection fails or the node's first PDU is not an ICResp.
    pub fn connect_initialised(
        target: &TargetAddr,
        header_digest: bool,
        data_digest: bool,
    ) -> io::Result<RawConnection> {
        let mut connection = RawConnection::connect_tcp(target)?;
        let request = IcRequest { host_alignment: 4, header_digest, data_digest, open_transfers_max: 1 };
        connection.send(&request.encode())?;
        match connection.receive_pdu()? {
            ReceivedPdu::IcResp => Ok(connection),
            other => Err(unexpected_pdu(&other)),
        }
    }

    /// Connects the admin queue of a new controller and enables it. Returns the controller identifier, too.
    ///
    /// # Errors
    /// If the node rejects a command or closes the connection.
    pub fn connect_admin(target: &TargetAddr) -> io::Result<(RawConnection, u16)> {
        RawConnection::connect_admin_as(target, &ConnectParams::admin(target), false, false)
    }

    /// Like [`RawConnection::connect_admin`], with these Connect parameters and digests.
    ///
    /// # Errors
    /// Those of [`RawConnection::connect_admin`].
    pub fn connect_admin_as(
        target: &TargetAddr,
        params: &ConnectParams,
        hd: bool,
        dd: bool,
    ) -> io::Result<(RawConnection, u16)> {
        let mut connection = RawConnection::connect_initialised(target, hd, dd)?;
        let id = expect_success(&connection.fabrics_connect(params)?)?;
        connection.write_cc(ControllerConfiguration::ENABLED)?;
        Ok((connection, id))
    }

    /// Connects an I/O queue of a controller.
    ///
    /// # Errors
    /// If the node rejects the command or closes the connection.
    pub fn connect_io(
        target: &TargetAddr,
        controller: u16,
        queue: u16,
        entries: u32,
    ) -> io::Result<RawConnection> {
        let mut connection = RawConnection::connect_initialised(target, false, false)?;
        expect_success(&connection.fabrics_connect(&ConnectParams::io(target, controller, queue, entries))?)?;
        Ok(connection)
    }

    /// Connects a new controller with one I/O queue. Returns the admin and the I/O connection.
    ///
    /// # Errors
    /// Those of [`RawConnection::connect_admin`] and [`RawConnection::connect_io`].
    pub fn connect_pair(target: &TargetAddr, entries: u32) -> io::Result<(RawConnection, RawConnection)> {
        let (admin, id) = RawConnection::connect_admin(target)?;
        let io = RawConnection::connect_io(target, id, 1, entries)?;
        Ok((admin, io))
    }

    /// Sends a Connect command and returns its completion, with any status.
    ///
    /// # Errors
    /// Those of [`RawConnection::execute`].
    pub fn fabrics_connect(&mut self, params: &ConnectParams) -> io::Result<Cqe> {
        let ConnectParams { connect, controller_id, host_nqn: host, host_id, subsystem_nqn: subsystem } =
            params;
        let data = ConnectData { host_id: *host_id, controller_id: *controller_id, subsystem, host };
        let sqe = fabrics::FabricsCommand::Connect(*connect).encode(0x4343);
        self.execute(&sqe, &data.encode())
    }

    /// Sets the CC property.
    ///
    /// # Errors
    /// If the node rejects the command or closes the connection.
    pub fn write_cc(&mut self, configuration: ControllerConfiguration) -> io::Result<()> {
        let value = u64::from(configuration.0);
        let set = fabrics::FabricsCommand::PropertySet { offset: property::CC, is_64_bit: false, value };
        expect_success(&self.execute(&set.encode(0x4344), &[])?).map(drop)
    }

    /// Encodes a command capsule, with the negotiated digests.
    pub fn capsule(&self, sqe: &Sqe, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(256 + data.len());
        pdu::encode_command(sqe, data.len(), &self.params, &mut bytes);
        self.append_data(data, &mut bytes);
        bytes
    }

    /// Encodes an H2CData PDU.
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

    /// Sends bytes unchanged. A connection closed by the node is no error: [`RawConnection::receive_pdu`] reports it.
    ///
    /// # Errors
    /// If the socket accepts nothing for longer than [`RECEIVE_TIMEOUT`].
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.stream.write_all(bytes) {
            Err(error) if is_disconnect(&error) => Ok(()),
            other => other,
        }
    }

    /// Sends the bytes that fit into the socket buffer. Returns their number, or `None` if the node has closed.
    ///
    /// # Errors
    /// Any other socket error.
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

    /// Sends a command and waits for its completion; discards data received before it.
    ///
    /// # Errors
    /// If another PDU arrives, the connection closes, or the receive timeout expires.
    pub fn execute(&mut self, sqe: &Sqe, data: &[u8]) -> io::Result<Cqe> {
        self.send(&self.capsule(sqe, data))?;
        self.receive_completion()
    }

    /// Receives the next completion; discards data received before it.
    ///
    /// # Errors
    /// If another PDU arrives, the connection closes, or the receive timeout expires.
    pub fn receive_completion(&mut self) -> io::Result<Cqe> {
        loop {
            match self.receive_pdu()? {
                ReceivedPdu::Response(cqe) => return Ok(cqe),
                ReceivedPdu::C2hData(..) => {}
                other => return Err(unexpected_pdu(&other)),
            }
        }
    }

    /// Executes a Store by R2T: command, one R2T, data, completion.
    ///
    /// # Errors
    /// If another PDU arrives, the connection closes, or the receive timeout expires.
    pub fn store_by_r2t(&mut self, sqe: &Sqe, data: &[u8]) -> io::Result<Cqe> {
        let range = self.submit_and_await_r2t(sqe)?;
        self.send(&self.h2c_data(range, data, flags::LAST))?;
        self.receive_completion()
    }

    /// Sends a command without data and waits for its R2T.
    ///
    /// # Errors
    /// If another PDU arrives, the connection closes, or the receive timeout expires.
    pub fn submit_and_await_r2t(&mut self, sqe: &Sqe) -> io::Result<DataHeader> {
        self.send(&self.capsule(sqe, &[]))?;
        match self.receive_pdu()? {
            ReceivedPdu::R2t(range) => Ok(range),
            other => Err(unexpected_pdu(&other)),
        }
    }

    /// Receives the next PDU.
    ///
    /// # Errors
    /// If the bytes are not a valid PDU from a controller.
    pub fn receive_pdu(&mut self) -> io::Result<ReceivedPdu> {
        let malformed = |fault| io::Error::new(ErrorKind::InvalidData, format!("the node sent {fault}"));
        if let Some(end) = self.fill_receive_buffer(COMMON_HEADER_BYTES)? {
            return Ok(end);
        }
        let unchecked =
            UncheckedCommonHeader::new(&self.receive_buffer).expect("the buffer holds eight bytes");
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
                unreachable!("`check` rejects PDUs that only hosts send")
            }
        };
        self.receive_buffer.drain(..frame.pdu_bytes());
        Ok(received)
    }

    /// Discards received bytes without waiting. Returns their number, or `None` if the node has closed.
    ///
    /// # Errors
    /// Any other socket error.
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

    /// Discards PDUs until the node closes the connection. Returns whether a C2HTermReq was among them.
    ///
    /// # Errors
    /// If the receive timeout expires first, or a PDU is malformed.
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

    /// Reads until the buffer holds `bytes`; otherwise returns the event that prevents it.
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

    /// Sets the receive timeout.
    ///
    /// # Errors
    /// If the socket rejects it.
    pub fn set_receive_timeout(&mut self, timeout: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(timeout))
    }
}

fn is_disconnect(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe | ErrorKind::ConnectionAborted)
}

/// Checks that a completion is successful. For a Connect, returns the controller identifier.
///
/// # Errors
/// If its status is not success.
pub fn expect_success(cqe: &Cqe) -> io::Result<u16> {
    match cqe.status() {
        status if status.is_success() => Ok(ConnectResponse::decode(cqe.dw0.get()).controller_id),
        status => Err(status_error(status)),
    }
}

fn status_error(status: Status) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, format!("the node returned status {status:?}"))
}

fn unexpected_pdu(received: &ReceivedPdu) -> io::Error {
    io::Error::new(ErrorKind::UnexpectedEof, format!("unexpected PDU: {received:?}"))
}
