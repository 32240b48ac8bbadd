//! What can go wrong between a caller and a value, and what is known about the outcome then.
//!
//! Three groups: nothing happened (the command was never executed, or only read: it may be repeated);
//! the node said no; and [`Error::OutcomeUnknown`]: a write was sent, no answer came, and it may or may
//! not have been carried out.

use crate::url;
use octokv_wire::{PduError, Status};
use std::fmt;
use std::net::SocketAddr;

/// Why a command or a connection failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The URL is none.
    Url(String, url::InvalidUrl),
    /// A host name without an address.
    UnknownHost(String),
    /// The machine refused what connecting needs (a thread, a socket); the error number.
    Os(i32),
    /// The node could not be reached or did not finish connecting.
    Connect(SocketAddr, ConnectionError),
    /// The connection was lost; the command was not executed, or did not change anything.
    Disconnected(ConnectionError),
    /// A write was sent and its answer never came: it may or may not have been carried out.
    OutcomeUnknown,
    /// No connection within the time that the command had.
    TimedOut,
    /// The session was closed.
    Closed,
    /// The key is empty or longer than the namespace takes.
    KeyLength {
        /// Its length.
        have: usize,
        /// The longest.
        max: usize,
    },
    /// The value is longer than the namespace takes.
    ValueLength {
        /// Its length.
        have: u64,
        /// The longest.
        max: u64,
    },
    /// The command is for keys, and the namespace holds blocks.
    NotKvNamespace,
    /// The command is for blocks, and the namespace holds keys and values.
    NotBlockNamespace,
    /// Blocks that the namespace does not have, or none, or more than a command can name.
    BlockRange {
        /// The first.
        first: u64,
        /// How many.
        count: u64,
        /// How many the namespace has.
        have: u64,
    },
    /// Data that is no whole blocks, or none, or more than a command can carry.
    BlockDataLength {
        /// Its length.
        have: u64,
        /// The length of a block.
        block_bytes: u32,
        /// The most.
        max: u64,
    },
    /// The namespace has no room left.
    CapacityExceeded,
    /// The node is busy or not ready: try again later.
    Busy,
    /// The value cannot be read back from its medium.
    UnrecoveredRead,
    /// The data's digest was wrong: it changed on its way.
    DataDigest,
    /// The node answered with more or less data than it said.
    DataLength {
        /// How much it said, in bytes.
        expected_bytes: u32,
        /// How much came, in bytes.
        received_bytes: u32,
    },
    /// Any other status of the node.
    Status(Status),
}

/// Why a connection is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionError {
    /// The connection was closed or reset, or could not be made.
    Closed,
    /// A command or the setup took too long.
    TimedOut,
    /// The node broke the protocol.
    Protocol(PduError),
    /// The node says that we broke the protocol.
    Terminated {
        /// Fatal error status.
        fatal_status: u16,
        /// Fatal error information.
        information: u32,
    },
    /// The node refused a queue (Fabrics Connect).
    ConnectRejected(Status),
    /// The node failed a step of the setup.
    InitFailed(Status),
    /// The controller reports a fatal error or is gone.
    ControllerFatal,
    /// The node wants authentication, which this client does not have.
    AuthenticationRequired,
    /// The namespace does not exist.
    NamespaceNotFound,
    /// The namespace is neither of the Key Value nor of the NVM command set.
    UnsupportedCommandSet,
    /// The namespace's blocks are none that this client can use: their size is no power of two from 512 B to
    /// 64 KiB or more than a command can carry, they have metadata, or there are none.
    UnsupportedBlockFormat,
    /// The namespace of blocks is another than before the connection was lost.
    NamespaceChanged,
}

impl ConnectionError {
    /// Whether trying again cannot help until someone changes something.
    pub fn is_permanent(&self) -> bool {
        match self {
            ConnectionError::ConnectRejected(status) | ConnectionError::InitFailed(status) => {
                status.is_final()
            }
            ConnectionError::AuthenticationRequired | ConnectionError::NamespaceNotFound => true,
            ConnectionError::UnsupportedCommandSet
            | ConnectionError::UnsupportedBlockFormat
            | ConnectionError::NamespaceChanged => true,
            ConnectionError::Closed
            | ConnectionError::TimedOut
            | ConnectionError::Protocol(_)
            | ConnectionError::Terminated { .. }
            | ConnectionError::ControllerFatal => false,
        }
    }
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectionError::Closed => f.write_str("the connection was closed or could not be made"),
            ConnectionError::TimedOut => f.write_str("no answer in time"),
            ConnectionError::Protocol(fault) => write!(f, "the node broke the protocol: {fault}"),
            ConnectionError::Terminated { fatal_status: fatal, information } => {
                write!(f, "the node ended the connection (error {fatal}, {information:#x})")
            }
            ConnectionError::ConnectRejected(status) => {
                write!(f, "the node refused the connection: {status}")
            }
            ConnectionError::InitFailed(status) => write!(f, "the node failed the setup: {status}"),
            ConnectionError::ControllerFatal => f.write_str("the controller reports a fatal error"),
            ConnectionError::AuthenticationRequired => f.write_str("the node wants authentication"),
            ConnectionError::NamespaceNotFound => f.write_str("the namespace does not exist"),
            ConnectionError::UnsupportedCommandSet => f.write_str(
                "the namespace holds neither keys and values nor blocks: its command set is not known here",
            ),
            ConnectionError::UnsupportedBlockFormat => {
                f.write_str("the namespace's blocks are of a size or format that is not known here")
            }
            ConnectionError::NamespaceChanged => f.write_str("the namespace is another than before"),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Url(url, why) => write!(f, "\"{url}\" is not a URL of a namespace: {why}"),
            Error::UnknownHost(host) => write!(f, "host \"{host}\" has no address"),
            Error::Os(errno) => {
                write!(f, "connecting failed here: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Error::Connect(address, why) => write!(f, "cannot connect to {address}: {why}"),
            Error::Disconnected(why) => write!(f, "connection lost: {why}"),
            Error::OutcomeUnknown => {
                f.write_str("connection lost before the answer: the write may or may not have happened")
            }
            Error::TimedOut => f.write_str("no connection in time"),
            Error::Closed => f.write_str("the session is closed"),
            Error::KeyLength { have, max } => {
                write!(f, "a key of {have} B; the namespace takes keys of 1 to {max} B")
            }
            Error::ValueLength { have, max } => {
                write!(f, "a value of {have} B; the namespace takes values of up to {max} B")
            }
            Error::NotKvNamespace => f.write_str("the namespace holds blocks, not keys and values"),
            Error::NotBlockNamespace => f.write_str("the namespace holds keys and values, not blocks"),
            Error::BlockRange { first, count, have } => {
                write!(f, "{count} blocks from block {first} on; the namespace has {have}")
            }
            Error::BlockDataLength { have, block_bytes, max } => {
                write!(f, "{have} B of data; a command takes whole blocks of {block_bytes} B, up to {max} B")
            }
            Error::CapacityExceeded => f.write_str("capacity exceeded: delete something first"),
            Error::Busy => f.write_str("the node is busy or not ready"),
            Error::UnrecoveredRead => f.write_str("the data cannot be read back from its device"),
            Error::DataDigest => f.write_str("the data changed on its way (digest error)"),
            Error::DataLength { expected_bytes: said, received_bytes: came } => {
                write!(f, "{came} B of data came of {said} B")
            }
            Error::Status(status) => write!(f, "the node answered: {status}"),
        }
    }
}

impl std::error::Error for Error {}
