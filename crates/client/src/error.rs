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
    /// The namespace is not one of the Key Value command set.
    NotKeyValue,
}

impl Lost {
    /// Whether trying again cannot help until someone changes something.
    pub fn is_final(&self) -> bool {
        match self {
            Lost::Refused(status) | Lost::Setup(status) => status.is_final(),
            Lost::Authentication | Lost::NoNamespace | Lost::NotKeyValue => true,
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
            Lost::NotKeyValue => f.write_str("the namespace is not a Key Value namespace"),
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
            Error::CapacityExceeded => f.write_str("capacity exceeded: delete something first"),
            Error::Busy => f.write_str("the node is busy or not ready"),
            Error::Unrecovered => f.write_str("the value cannot be read back from its device"),
            Error::DataDigest => f.write_str("the data changed on its way (digest error)"),
            Error::DataLength { said, came } => write!(f, "{came} B of data came of {said} B"),
            Error::Status(status) => write!(f, "the node answered: {status}"),
        }
    }
}

impl std::error::Error for Error {}
