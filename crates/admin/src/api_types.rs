//! The JSON documents of the administration socket.
//!
//! ```text
//!   GET    /v1/namespaces               [Namespace]
//!   POST   /v1/namespaces               AddNamespace → Namespace
//!   DELETE /v1/namespaces/NSID
//!   GET    /v1/hosts                    [name], "any" for every host
//!   PUT    /v1/hosts/NQN, DELETE the same
//!   GET    /v1/ana                      [AnaGroup]
//!   PUT    /v1/ana/GROUP                AnaChange
//!   GET    /v1/statistics               Figures
//! ```
//! A refusal is [`ErrorBody`] with status 400 (cannot be), 404 (is not there), 409 (is there), or 500.

use serde::{Deserialize, Serialize};

/// What a namespace is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NamespaceType {
    /// Keys and values.
    Kv,
    /// Logical blocks.
    Block,
}

/// What is done about what a device holds already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExistingDataMode {
    /// What belongs there is used, anything else is refused.
    #[default]
    Check,
    /// It is given up.
    GiveUp,
    /// For blocks: hosts get it as it is, even where it is a volume of keys.
    Keep,
}

/// A namespace to add.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AddNamespace {
    /// Its identifier; the lowest free one where none is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
    /// What it is made of.
    pub kind: NamespaceType,
    /// A file, a block device, or "memory".
    pub device: String,
    /// How large a missing file, or memory, is made, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// Bytes of a block, for blocks: 512 or 4096 (the default).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_bytes: Option<u32>,
    /// Its group of asymmetric access: 1 to 32, 1 where none is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana_group: Option<u32>,
    /// What is done about what the device holds already.
    #[serde(default)]
    pub existing: ExistingDataMode,
}

/// A namespace that is there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceSummary {
    /// Its identifier.
    pub nsid: u32,
    /// What it is made of.
    pub kind: NamespaceType,
    /// What holds it.
    pub device: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// How many of them are in use.
    pub used_bytes: u64,
    /// How many keys it has, for keys.
    pub keys: Option<u64>,
    /// Bytes of a block, for blocks.
    pub block_bytes: Option<u32>,
    /// Its group of asymmetric access.
    pub ana_group: u32,
    /// Whether it was added while a node ran; else it is of the configuration.
    pub added: bool,
    /// Why it is not served, where it is not.
    pub offline: Option<String>,
}

/// A group of asymmetric access.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnaGroupStatus {
    /// Its number.
    pub group: u32,
    /// Its state: one of the names of [`SetAnaState`].
    pub state: String,
}

/// A change of a group's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SetAnaState {
    /// optimized, non-optimized, inaccessible, persistent-loss or change.
    pub state: String,
}

/// How a core is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeCoreStatus {
    /// Connections that it serves.
    pub connections: u64,
    /// Requests that it has begun and not ended.
    pub requests: u64,
    /// Bytes of buffers that are out.
    pub buffer_bytes: u64,
    /// Bytes of memory that the buffers take, those that are kept for later included.
    pub buffer_memory_bytes: u64,
    /// Device operations in flight.
    pub device_operations: u64,
    /// Background tasks.
    pub background_tasks: u64,
    /// Namespaces that are on their way out.
    pub leaving: u64,
}

/// How a node is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeStatus {
    /// TCP connections, accepted and not yet forgotten.
    pub connections: u64,
    /// Controllers that live.
    pub controllers: u64,
    /// Namespaces that are served.
    pub namespaces: u64,
    /// Keys, over all namespaces.
    pub keys: u64,
    /// Commands that hosts sent and that were answered with an error.
    pub errors: u64,
    /// Its cores, in order.
    pub cores: Vec<NodeCoreStatus>,
}

/// Why something was not done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// One sentence.
    pub error: String,
}
