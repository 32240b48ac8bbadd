//! What can go wrong between a caller and a value, and what is known about the outcome then.
//!
//! Three groups: nothing happened (the command was never executed, or only read: it may be repeated);
//! the node said no; and [`Error::OutcomeUnknown`]: a write was sent, no answer came, and it may or may
//! not have been carried out.

use crate::url;
use octokv_wire::{Fault, Status};
use std::fmt;
use std::net::SocketAddr;

/// Why a command or a connection failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The URL is none.
    Url(String, url::Invalid),
    /// A host name without an address.
    UnknownHost(String),
    /// The machine refused what connecting needs (a thread, a socket); the error number.
    Local(i32),
    /// The node could not be reached or did not finish connecting.
    Connect(SocketAddr, Lost),
    /// The connection was lost; the command was not executed, or did not change anything.
    Disconnected(Lost),
    /// A write was sent and its answer never came: it may or may not have been carried out.
    OutcomeUnknown,
    /// No connection within the time that the command had.
    TimedOut,
    /// The session was closed.
    Closed,
    /// The key is empty or longer than the namespace takes.
    KeyBytes {
        /// Its length.
        have: usize,
        /// The longest.
        max: usize,
    },
    /// The value is longer than the namespace takes.
    ValueBytes {
        /// Its length.
        have: u64,
        /// The longest.
        max: u64,
    },
    /// The command is for keys, and the namespace holds blocks.
    NotKeyValue,
    /// The command is for blocks, and the namespace holds keys and values.
    NotBlocks,
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
    BlockBytes {
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
    Unrecovered,
    /// The data's digest was wrong: it changed on its way.
    DataDigest,
    /// The node answered with more or less data than it said.
    DataLength {
        /// How much it said, in bytes.
        said: u32,
        /// How much came, in bytes.
        came: u32,
    },
    /// Any other status of the node.
    Status(Status),
}

/// Why a connection is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The connection was closed or reset, or could not be made.
    Closed,
    /// A command or the setup took too long.
    TimedOut,
    /// The node broke the protocol.
    Fault(Fault),
    /// The node says that we broke the protocol.
    Terminated {
        /// Fatal error status.
        fatal: u16,
        /// Fatal error information.
        information: u32,
    },
    /// The node refused a queue (Fabrics Connect).
    Refused(Status),
    /// The node failed a step of the setup.
    Setup(Status),
    /// The controller reports a fatal error or is gone.
    Controller,
    /// The node wants authentication, which this client does not have.
    Authentication,
    /// The namespace does not exist.
    NoNamespace,
    /// The namespace is neither of the Key Value nor of the NVM command set.
    CommandSet,
    /// The namespace's blocks are none that this client can use: their size is no power of two from 512 B to
    /// 64 KiB or more than a command can carry, they have metadata, or there are none.
    BlockFormat,
    /// The namespace of blocks is another than before the connection was lost.
    OtherNamespace,
}

impl Lost {
    /// Whether trying again cannot help until someone changes something.
    pub fn is_final(&self) -> bool {
        match self {
            Lost::Refused(status) | Lost::Setup(status) => status.is_final(),
            Lost::Authentication | Lost::NoNamespace => true,
            Lost::CommandSet | Lost::BlockFormat | Lost::OtherNamespace => true,
            Lost::Closed | Lost::TimedOut | Lost::Fault(_) | Lost::Terminated { .. } | Lost::Controller => {
                false
            }
        }
    }
}

impl fmt::Display for Lost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lost::Closed => f.write_str("the connection was closed or could not be made"),
            Lost::TimedOut => f.write_str("no answer in time"),
            Lost::Fault(fault) => write!(f, "the node broke the protocol: {fault}"),
            Lost::Terminated { fatal, information } => {
                write!(f, "the node ended the connection (error {fatal}, {information:#x})")
            }
            Lost::Refused(status) => write!(f, "the node refused the connection: {status}"),
            Lost::Setup(status) => write!(f, "the node failed the setup: {status}"),
            Lost::Controller => f.write_str("the controller reports a fatal error"),
            Lost::Authentication => f.write_str("the node wants authentication"),
            Lost::NoNamespace => f.write_str("the namespace does not exist"),
            Lost::CommandSet => f.write_str(
                "the namespace holds neither keys and values nor blocks: its command set is not known here",
            ),
            Lost::BlockFormat => {
                f.write_str("the namespace's blocks are of a size or format that is not known here")
            }
            Lost::OtherNamespace => f.write_str("the namespace is another than before"),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Url(url, why) => write!(f, "\"{url}\" is not a URL of a namespace: {why}"),
            Error::UnknownHost(host) => write!(f, "host \"{host}\" has no address"),
            Error::Local(errno) => {
                write!(f, "connecting failed here: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Error::Connect(address, why) => write!(f, "cannot connect to {address}: {why}"),
            Error::Disconnected(why) => write!(f, "connection lost: {why}"),
            Error::OutcomeUnknown => {
                f.write_str("connection lost before the answer: the write may or may not have happened")
            }
            Error::TimedOut => f.write_str("no connection in time"),
            Error::Closed => f.write_str("the session is closed"),
            Error::KeyBytes { have, max } => {
                write!(f, "a key of {have} B; the namespace takes keys of 1 to {max} B")
            }
            Error::ValueBytes { have, max } => {
                write!(f, "a value of {have} B; the namespace takes values of up to {max} B")
            }
            Error::NotKeyValue => f.write_str("the namespace holds blocks, not keys and values"),
            Error::NotBlocks => f.write_str("the namespace holds keys and values, not blocks"),
            Error::BlockRange { first, count, have } => {
                write!(f, "{count} blocks from block {first} on; the namespace has {have}")
            }
            Error::BlockBytes { have, block_bytes, max } => {
                write!(f, "{have} B of data; a command takes whole blocks of {block_bytes} B, up to {max} B")
            }
            Error::CapacityExceeded => f.write_str("capacity exceeded: delete something first"),
            Error::Busy => f.write_str("the node is busy or not ready"),
            Error::Unrecovered => f.write_str("the data cannot be read back from its device"),
            Error::DataDigest => f.write_str("the data changed on its way (digest error)"),
            Error::DataLength { said, came } => write!(f, "{came} B of data came of {said} B"),
            Error::Status(status) => write!(f, "the node answered: {status}"),
        }
    }
}

impl std::error::Error for Error {}
