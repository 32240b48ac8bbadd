//! Errors of commands and connections, and whether each leaves the outcome unknown.
//!
//! Three groups: the command had no effect (not executed, or only read: a retry is safe); the node failed the command;
//! and [`Error::OutcomeUnknown`]: a write was sent without a response, so it may have been executed.

use crate::url;
use octokv_wire::{PduError, Status};
use std::net::SocketAddr;

/// Cause of a failed command or connection attempt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The URL is invalid.
    #[error("\"{0}\" is not a URL of a namespace: {1}")]
    Url(String, url::InvalidUrl),
    /// The host name has no address.
    #[error("host \"{0}\" has no address")]
    UnknownHost(String),
    /// The operating system refused a thread or a socket; its error number.
    #[error("the operating system refused a socket or thread: {}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// Connecting to the node failed.
    #[error("cannot connect to {0}: {1}")]
    Connect(SocketAddr, ConnectionError),
    /// The connection was lost; the command was not executed, or changed nothing.
    #[error("connection lost: {0}")]
    Disconnected(ConnectionError),
    /// A write was sent and its response never arrived: it may have been executed.
    #[error("connection lost before the response: the write may have been executed")]
    OutcomeUnknown,
    /// The first connection is not established yet; the command was not sent.
    #[error("not connected yet")]
    NotConnected,
    /// No connection within the command timeout.
    #[error("no connection within the command timeout")]
    TimedOut,
    /// The session is closed.
    #[error("the session is closed")]
    Closed,
    /// The key is empty or longer than the namespace allows.
    #[error("a key of {have} B; the namespace allows keys of 1 to {max} B")]
    KeyLength {
        /// Length of the key, in bytes.
        have: usize,
        /// Maximum length, in bytes.
        max: usize,
    },
    /// The value is longer than the namespace allows.
    #[error("a value of {have} B; the namespace allows values of up to {max} B")]
    ValueLength {
        /// Length of the value, in bytes.
        have: u64,
        /// Maximum length, in bytes.
        max: u64,
    },
    /// A Key Value command for a block namespace.
    #[error("the namespace holds blocks, not keys and values")]
    NotKvNamespace,
    /// A block command for a Key Value namespace.
    #[error("the namespace holds keys and values, not blocks")]
    NotBlockNamespace,
    /// The block range is empty, beyond the end of the namespace, or longer than a command allows.
    #[error("{count} blocks from block {first}; the namespace has {have}")]
    BlockRange {
        /// First block.
        first: u64,
        /// Number of blocks.
        count: u64,
        /// Size of the namespace, in blocks.
        have: u64,
    },
    /// The data is empty, not a multiple of the block size, or longer than a command allows.
    #[error("{have} B of data; a command takes whole blocks of {block_bytes} B, up to {max} B")]
    BlockDataLength {
        /// Length of the data, in bytes.
        have: u64,
        /// Block size, in bytes.
        block_bytes: u32,
        /// Maximum length, in bytes.
        max: u64,
    },
    /// The namespace is full.
    #[error("capacity exceeded: delete keys first")]
    CapacityExceeded,
    /// The node is busy or not ready: a retry may succeed.
    #[error("the node is busy or not ready")]
    Busy,
    /// The data cannot be read, or a write failed on its device: the two have one status of the Key Value command set.
    #[error("unrecovered error: the device failed, or the data cannot be read back from it")]
    UnrecoveredRead,
    /// The device of the key, one of several, is not available, which says nothing of whether the key exists.
    #[error("the key's device is not available")]
    DeviceUnavailable,
    /// The namespace has no iterators.
    #[error("the namespace has no iterators: its engine has no order of keys")]
    NoIterators,
    /// The iterator does not exist any more: it expired, or the connection on which it was created was lost.
    #[error("the iterator does not exist any more")]
    UnknownIterator,
    /// The node has as many iterators of this host as it allows.
    #[error("too many iterators")]
    TooManyIterators,
    /// The next pair is longer than the limit of the command.
    #[error("the next pair takes {buffer_bytes} B, more than the command allows")]
    PairTooLarge {
        /// Limit with room for it, in bytes.
        buffer_bytes: u32,
    },
    /// The data digest does not match the received data.
    #[error("data digest mismatch")]
    DataDigest,
    /// The node sent another amount of data than its completion reports.
    #[error("received {received_bytes} B of data, expected {expected_bytes} B")]
    DataLength {
        /// Length by the completion or the command, in bytes.
        expected_bytes: u32,
        /// Length of the received data, in bytes.
        received_bytes: u32,
    },
    /// Any other status of the node.
    #[error("the node failed the command: {0}")]
    Status(Status),
}

/// Reason why a command was not accepted.
#[derive(Debug, PartialEq, Eq)]
pub enum SubmitError {
    /// All slots of all queues are in use: poll, then retry.
    QueueFull,
    /// The session is disconnected: poll, then retry.
    NotConnected,
    /// The session has ended.
    Ended,
    /// The command itself is invalid.
    Invalid(Error),
}

/// Cause of a lost connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectionError {
    /// The connection was closed, reset, or could not be opened.
    #[error("the connection was closed or could not be opened")]
    Closed,
    /// A command or the initialization exceeded its timeout.
    #[error("no response within the timeout")]
    TimedOut,
    /// The node violated the protocol.
    #[error("the node violated the protocol: {0}")]
    Protocol(PduError),
    /// The node sent a termination request: it reports a protocol error of this client.
    #[error("the node terminated the connection (error {fatal_status}, {information:#x})")]
    Terminated {
        /// Fatal error status (FES).
        fatal_status: u16,
        /// Fatal error information (FEI).
        information: u32,
    },
    /// The node rejected a Fabrics Connect.
    #[error("the node refused the connection: {0}")]
    ConnectRejected(Status),
    /// The node failed a step of the initialization.
    #[error("the node failed the initialization: {0}")]
    InitFailed(Status),
    /// The controller reports a fatal error (CSTS.CFS).
    #[error("the controller reports a fatal error")]
    ControllerFatal,
    /// The node requires authentication, which this client does not support.
    #[error("the node requires authentication")]
    AuthenticationRequired,
    /// The namespace does not exist.
    #[error("the namespace does not exist")]
    NamespaceNotFound,
    /// The namespace has neither the Key Value nor the NVM command set.
    #[error("the namespace has neither the Key Value nor the NVM command set")]
    UnsupportedCommandSet,
    /// The block format is not supported: the block size is not a power of two from 512 B to 64 KiB or
    /// exceeds the data of a command, blocks have metadata, or there are none.
    #[error("the block format of the namespace is not supported by this client")]
    UnsupportedBlockFormat,
    /// The block namespace was replaced by another one while the connection was lost.
    #[error("the namespace was replaced")]
    NamespaceChanged,
}

impl ConnectionError {
    /// Whether a retry is useless without administrative action.
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
