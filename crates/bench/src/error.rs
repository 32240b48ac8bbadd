//! Why a run failed.

use crate::baselines::resp::ServerError;
use crate::workload::Workload;
use octokv_base::Key;
use octokv_engine::EngineError;
use octokv_engine::hash::OpenError;
use std::fmt;

/// Why a run failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BenchError {
    /// The connection failed or was lost.
    Connect(octokv_client::Error),
    /// The node grants fewer I/O queues than requested.
    Threads {
        /// The requested number.
        wanted: usize,
        /// The granted number.
        granted: usize,
    },
    /// The node grants fewer commands per queue than requested.
    Depth {
        /// The requested number.
        wanted: usize,
        /// The granted number.
        granted: usize,
    },
    /// A thread or its sockets could not be created; the error number, 0 if a thread panicked.
    Thread(i32),
    /// An operation failed.
    Command {
        /// The workload.
        workload: Workload,
        /// The key of the operation.
        key: Key,
        /// The failure.
        error: octokv_client::Error,
    },
    /// The device of the engine holds no volume that can be opened.
    Open {
        /// The device's name.
        name: String,
        /// The failure.
        error: OpenError,
    },
    /// An operation of the engine failed.
    Engine {
        /// The workload.
        workload: Workload,
        /// The key of the operation.
        key: Key,
        /// The failure.
        error: EngineError,
    },
    /// The server of a baseline failed.
    Server {
        /// The baseline.
        name: &'static str,
        /// The workload.
        workload: Workload,
        /// The key, if an operation failed.
        key: Option<Key>,
        /// The failure.
        error: ServerError,
    },
    /// The engine could not write its final checkpoint.
    Close(EngineError),
    /// A value read differs from the value that a workload with these sizes and this seed stores.
    WrongValue {
        /// The key.
        key: Key,
        /// Length of the value, in bytes.
        have_bytes: usize,
    },
    /// The list of keys that the node returned is malformed.
    MalformedList {
        /// The first key of the request.
        from: Key,
    },
}

impl fmt::Display for BenchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BenchError::Connect(error) => error.fmt(f),
            BenchError::Threads { wanted, granted } => {
                write!(f, "{wanted} threads on one core: the node grants {granted} connections to a client")
            }
            BenchError::Depth { wanted, granted } => {
                write!(f, "a depth of {wanted}: the node grants {granted} commands in flight on a connection")
            }
            BenchError::Thread(errno) => {
                write!(f, "cannot start a load thread: {}", std::io::Error::from_raw_os_error(*errno))
            }
            BenchError::Command { workload, key, error } => {
                write!(f, "{}, key {key}: {error}", workload.name())
            }
            BenchError::Open { name, error } => {
                write!(f, "device {name}: {error}")?;
                match error {
                    OpenError::Superblock(_) => {
                        f.write_str("; the device is unchanged (--format discards its data)")
                    }
                    _ => Ok(()),
                }
            }
            BenchError::Engine { workload, key, error } => {
                write!(f, "{}, key {key}: {error}", workload.name())
            }
            BenchError::Server { name, workload, key, error } => {
                write!(f, "{}, ", workload.name())?;
                if let Some(key) = key {
                    write!(f, "key {key}, ")?;
                }
                write!(f, "server {name}: {error}")
            }
            BenchError::Close(error) => write!(f, "the last checkpoint failed: {error}"),
            BenchError::WrongValue { key, have_bytes } => write!(
                f,
                "key {key} has a value of {have_bytes} bytes that a workload with this value size and seed \
                 never stored"
            ),
            BenchError::MalformedList { from } => write!(f, "the list of keys from {from} on is malformed"),
        }
    }
}

impl std::error::Error for BenchError {}

/// A failure and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetFailure {
    /// Index of the target in the list of nodes.
    pub target: usize,
    /// The failure.
    pub error: BenchError,
}
