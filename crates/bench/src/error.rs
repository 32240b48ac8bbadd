//! Why a run failed.

use crate::baselines::resp::ServerError;
use crate::workload::Workload;
use octokv_base::Key;
use octokv_engine::EngineError;
use octokv_engine::hash::OpenError;
use std::fmt;

/// Why a run did not end well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BenchError {
    /// No connection, or it was lost.
    Connect(octokv_client::Error),
    /// The node does not take so many connections.
    Threads {
        /// How many were asked for.
        wanted: usize,
        /// How many it takes.
        granted: usize,
    },
    /// The node does not take so many commands on a connection.
    Depth {
        /// How many were asked for.
        wanted: usize,
        /// How many it takes.
        granted: usize,
    },
    /// A thread could not be started, or not waited for; the error number.
    Thread(i32),
    /// An operation failed.
    Command {
        /// Of which workload.
        workload: Workload,
        /// On which key.
        key: Key,
        /// How.
        error: octokv_client::Error,
    },
    /// The device under the engine holds no volume that can be used.
    Open {
        /// The device's name.
        name: String,
        /// Why.
        error: OpenError,
    },
    /// The engine failed.
    Engine {
        /// In which workload.
        workload: Workload,
        /// On which key.
        key: Key,
        /// How.
        error: EngineError,
    },
    /// A peer's server failed.
    Server {
        /// The peer.
        name: &'static str,
        /// In which workload.
        workload: Workload,
        /// On which key, where it was one.
        key: Option<Key>,
        /// How.
        error: ServerError,
    },
    /// The engine could not write its last checkpoint.
    Close(EngineError),
    /// A value that was read is not what a workload with these sizes and this seed stores.
    WrongValue {
        /// Whose.
        key: Key,
        /// How long it is, in bytes.
        have_bytes: usize,
    },
    /// The node's list of keys says more than it holds.
    MalformedList {
        /// Where it was to begin.
        from: Key,
    },
}

impl fmt::Display for BenchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            BenchError::Connect(error) => error.fmt(f),
            BenchError::Threads { wanted, granted } => {
                write!(f, "{wanted} threads on one core: the node takes {granted} connections of one client")
            }
            BenchError::Depth { wanted, granted } => {
                write!(f, "a depth of {wanted}: the node takes {granted} commands at a time on a connection")
            }
            BenchError::Thread(errno) => {
                write!(f, "the load cannot be started: {}", std::io::Error::from_raw_os_error(*errno))
            }
            BenchError::Command { workload, key, error } => {
                write!(f, "{}, key {key}: {error}", workload.name())
            }
            BenchError::Open { name, error } => {
                write!(f, "device {name}: {error}")?;
                match error {
                    OpenError::Superblock(_) => {
                        f.write_str("; it was left as it is (--format gives up what it holds)")
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

/// A failure, and on which target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetFailure {
    /// Its place in the list of nodes.
    pub target: usize,
    /// What failed.
    pub error: BenchError,
}
