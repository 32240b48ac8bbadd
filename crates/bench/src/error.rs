//! Why a run failed.

use crate::baselines::resp::ServerError;
use crate::workload::Workload;
use octokv_base::Key;
use octokv_engine::EngineError;
use octokv_engine::OpenError;
use octokv_sys::rocksdb_library::RocksDbError;

/// Why a run failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BenchError {
    /// The connection failed or was lost.
    #[error(transparent)]
    Connect(octokv_client::Error),
    /// The node grants fewer I/O queues than requested.
    #[error("{wanted} threads on one core: the node grants {granted} connections to a client")]
    Threads {
        /// The requested number.
        wanted: usize,
        /// The granted number.
        granted: usize,
    },
    /// The node grants fewer commands per queue than requested.
    #[error("a depth of {wanted}: the node grants {granted} commands in flight on a connection")]
    Depth {
        /// The requested number.
        wanted: usize,
        /// The granted number.
        granted: usize,
    },
    /// A thread or its sockets could not be created; the error number, 0 if a thread panicked.
    #[error("cannot start a load thread: {}", std::io::Error::from_raw_os_error(*.0))]
    Thread(i32),
    /// An operation failed.
    #[error("{}, key {key}: {error}", .workload.name())]
    Command {
        /// The workload.
        workload: Workload,
        /// The key of the operation.
        key: Key,
        /// The failure.
        error: octokv_client::Error,
    },
    /// The device of the engine holds no volume that can be opened.
    #[error("device {name}: {error}{}", open_hint(error))]
    Open {
        /// The device's name.
        name: String,
        /// The failure.
        error: OpenError,
    },
    /// An operation of the engine failed.
    #[error("{}, key {key}: {error}", .workload.name())]
    Engine {
        /// The workload.
        workload: Workload,
        /// The key of the operation.
        key: Key,
        /// The failure.
        error: EngineError,
    },
    /// The server of a baseline failed.
    #[error("{}, {}server {name}: {error}", .workload.name(), key_prefix(key.as_ref()))]
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
    /// An operation of RocksDB in this process failed.
    #[error("{}, key {key}: RocksDB: {error}", .workload.name())]
    RocksDb {
        /// The workload.
        workload: Workload,
        /// The key of the operation.
        key: Key,
        /// The failure.
        error: RocksDbError,
    },
    /// The engine could not write its final checkpoint.
    #[error("the last checkpoint failed: {0}")]
    Close(EngineError),
    /// A value read differs from the value that a workload with these sizes and this seed stores.
    #[error(
        "key {key} has a value of {have_bytes} bytes that a workload with this value size and seed never stored"
    )]
    WrongValue {
        /// The key.
        key: Key,
        /// Length of the value, in bytes.
        have_bytes: usize,
    },
    /// Pairs of a scan are not in order, or do not begin at its first key.
    #[error("a scan from {from} on has a pair out of order, after {pairs} pairs")]
    WrongOrder {
        /// The first key of the scan.
        from: Key,
        /// Pairs before it.
        pairs: u32,
    },
    /// The pairs that the node returned are malformed.
    #[error("the pairs of a scan from {from} on are malformed")]
    MalformedPairs {
        /// The first key of the scan.
        from: Key,
    },
    /// The list of keys that the node returned is malformed.
    #[error("the list of keys from {from} on is malformed")]
    MalformedList {
        /// The first key of the request.
        from: Key,
    },
}

impl BenchError {
    /// Whether a node answered an operation with an error status.
    pub(crate) fn is_status(&self) -> bool {
        use octokv_client::Error::{Busy, CapacityExceeded, DeviceUnavailable, Status, UnrecoveredRead};
        let BenchError::Command { error, .. } = self else { return false };
        matches!(error, CapacityExceeded | Busy | UnrecoveredRead | DeviceUnavailable | Status(_))
    }
}

fn open_hint(error: &OpenError) -> &'static str {
    match error {
        OpenError::Superblock(_) => "; the device is unchanged (--format discards its data)",
        _ => "",
    }
}

fn key_prefix(key: Option<&Key>) -> String {
    key.map_or(String::new(), |key| format!("key {key}, "))
}

/// A failure and its target.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetFailure {
    /// Index of the target in the list of nodes.
    pub target: usize,
    /// The failure.
    pub error: BenchError,
}
