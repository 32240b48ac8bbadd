//! JSON documents of the admin API.
//!
//! ```text
//!   GET    /v1/namespaces               [NamespaceSummary]
//!   POST   /v1/namespaces               AddNamespace → NamespaceSummary
//!   DELETE /v1/namespaces/NSID
//!   POST   /v1/namespaces/NSID/replace  ReplaceDevice → NamespaceSummary
//!   POST   /v1/namespaces/NSID/extend   AddDevice → NamespaceSummary
//!   GET    /v1/hosts                    [NQN], "any" for every host
//!   PUT    /v1/hosts/NQN, DELETE the same
//!   GET    /v1/ana                      [AnaGroupStatus]
//!   PUT    /v1/ana/GROUP                SetAnaState
//!   GET    /v1/statistics               NodeStatus
//! ```
//! An error has an [`ErrorBody`] and status 400 (invalid), 404 (not found), 409 (already exists), 410 (the path of a
//! former version), or 500 (failed).

use crate::device_names::DeviceNames;
use octokv_node::CoreRole;
use serde::{Deserialize, Serialize};

/// The command set of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NamespaceType {
    /// Key-value commands.
    Kv,
    /// Block commands.
    Block,
}

/// What to do with data already on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExistingDataMode {
    /// Use a volume that belongs there, fail on anything else.
    #[default]
    Check,
    /// Discard the data.
    GiveUp,
    /// Block namespaces only: expose the data as it is, even a key-value volume.
    Keep,
}

/// A namespace to add.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddNamespace {
    /// Namespace ID; default: the lowest free one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// Its command set.
    pub kind: NamespaceType,
    /// Files, block devices, or "memory". The keys of a key-value namespace may lie on several.
    pub device: DeviceNames,
    /// Size in bytes of a missing file, or of memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Storage engine of a key-value namespace; default: the node's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<String>,
    /// Memory of a cache of values of a key-value namespace, in bytes; default: 0, no cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache_bytes: Option<u64>,
    /// Never-written space of a key-value namespace's file that is written ahead of its use, in bytes; default: 1 GiB; 0 for
    /// none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prepare_bytes: Option<u64>,
    /// Space of each of several devices of a key-value namespace for values of overloaded others, in bytes; default: 0, none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub swap_bytes: Option<u64>,
    /// Block size in bytes of a block namespace: 512 or 4096 (default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_bytes: Option<u32>,
    /// ANA group: 1 (default) to 32.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana_group: Option<u32>,
    /// What to do with data already on the device.
    #[serde(default)]
    pub existing: ExistingDataMode,
}

/// A device of several to replace: what it holds is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplaceDevice {
    /// The device that is lost, by its name in [`DeviceSummary::device`].
    pub lost: String,
    /// The file or block device in its place, which begins without keys.
    pub device: String,
    /// Size in bytes of a missing file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Whether to discard data on the new device; otherwise it has to be new.
    #[serde(default)]
    pub discard: bool,
}

/// A device to add behind the several of a namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddDevice {
    /// The file or block device.
    pub device: String,
    /// Size in bytes of a missing file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Whether to discard data on the device; otherwise it has to be new.
    #[serde(default)]
    pub discard: bool,
}

/// A namespace of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceSummary {
    /// Namespace ID.
    pub nsid: u32,
    /// Its command set.
    pub kind: NamespaceType,
    /// Paths of the devices, or "memory".
    pub device: DeviceNames,
    /// Each device, if they are several.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<DeviceSummary>,
    /// Capacity in bytes.
    pub size_bytes: u64,
    /// Bytes of `size_bytes` in use.
    pub used_bytes: u64,
    /// Number of keys; `None` for a block namespace.
    pub keys: Option<u64>,
    /// Storage engine; `None` for a block namespace.
    pub engine: Option<String>,
    /// Block size in bytes; `None` for a key-value namespace.
    pub block_bytes: Option<u32>,
    /// Memory of its cache of values, in bytes; 0 for none.
    pub cache_bytes: u64,
    /// Never-written space of a file that is written ahead of its use, in bytes at most; 0 for none.
    pub prepare_bytes: u64,
    /// ANA group, 1 to 32.
    pub ana_group: u32,
    /// Whether it was added at run time; otherwise it is in the configuration.
    pub added: bool,
    /// Reason for not being served; `None` if it is served.
    pub offline: Option<String>,
}

/// One device of a namespace on several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceSummary {
    /// Its path, or "memory".
    pub device: String,
    /// Its index in the volume.
    pub index: u16,
    /// Capacity in bytes; 0 if it is not available.
    pub size_bytes: u64,
    /// Bytes of `size_bytes` in use.
    pub used_bytes: u64,
    /// Number of keys.
    pub keys: u64,
    /// Whether a write to it failed, so that its keys are only read.
    pub read_only: bool,
    /// Why it is not available; `None` if it is.
    pub failure: Option<String>,
}

/// State of an ANA group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnaGroupStatus {
    /// Group number, 1 to 32.
    pub group: u32,
    /// One of the names of [`SetAnaState`].
    pub state: String,
}

/// A change of an ANA group's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetAnaState {
    /// optimized, non-optimized, inaccessible, persistent-loss or change.
    pub state: String,
}

/// Resource usage of one core.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCoreStatus {
    /// The number of the processor on which it runs.
    pub processor: u64,
    /// What the core is for.
    pub role: CoreRoleName,
    /// Connections served by this core.
    pub connections: u64,
    /// Requests in progress.
    pub requests: u64,
    /// Buffer bytes in use.
    pub buffer_bytes: u64,
    /// Resident bytes of the buffer pool, cached free buffers included.
    pub buffer_memory_bytes: u64,
    /// Device operations in flight.
    pub device_operations: u64,
    /// Running background tasks.
    pub background_tasks: u64,
    /// Namespaces that drain before their removal.
    #[serde(rename = "leaving")]
    pub draining_namespaces: u64,
}

/// What a core is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CoreRoleName {
    /// Connections and requests.
    Shared,
    /// Requests for drives.
    Drives,
    /// Connections.
    Network,
}

impl From<CoreRole> for CoreRoleName {
    fn from(role: CoreRole) -> CoreRoleName {
        match role {
            CoreRole::Shared => CoreRoleName::Shared,
            CoreRole::Drives => CoreRoleName::Drives,
            CoreRole::Network => CoreRoleName::Network,
        }
    }
}

/// Status of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// Open TCP connections.
    pub connections: u64,
    /// Controllers in existence.
    pub controllers: u64,
    /// Served namespaces.
    pub namespaces: u64,
    /// Keys in all namespaces.
    pub keys: u64,
    /// Commands completed with an error since the start.
    pub errors: u64,
    /// Status by core.
    pub cores: Vec<NodeCoreStatus>,
}

/// Body of an error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Why the request failed, in one sentence for people.
    pub error: String,
}
