//! A namespace as an operator sees it: its configuration, and what its engine says.

use crate::config::NamespaceConfig;
use octokv_device::health::DeviceLoad;
use octokv_engine::{CacheStatistics, CompactionStatistics, DeviceReport, TreeStatistics};

/// One of several devices of a namespace.
#[derive(Clone, Debug)]
pub struct DeviceStatus {
    /// Its name in messages.
    pub name: String,
    /// Why it is not available, if it is not.
    pub failure: Option<String>,
    /// What the volume says of it.
    pub report: DeviceReport,
    /// What it did since it was opened.
    pub load: DeviceLoad,
}

/// A namespace as an operator sees it.
#[derive(Clone, Debug)]
pub struct NamespaceStatus {
    /// The configuration it was opened with.
    pub config: NamespaceConfig,
    /// The device's name in messages.
    pub device: String,
    /// The devices, if they are several.
    pub devices: Vec<DeviceStatus>,
    /// Size in bytes; of a Key Value namespace, of its record area.
    pub size_bytes: u64,
    /// Bytes in use: those of records; all of a block namespace.
    pub used_bytes: u64,
    /// Number of keys; `None` for a block namespace.
    pub keys: Option<u64>,
    /// Never-written space that was written ahead of its use since it was opened, in bytes.
    pub prepared_bytes: u64,
    /// Its values in pieces, and what compaction did since it was opened.
    pub compaction: CompactionStatistics,
    /// Its cache of values; `None` if it has none.
    pub cache: Option<CacheStatistics>,
    /// The tree of an ordered engine; `None` if it has none.
    pub tree: Option<TreeStatistics>,
    /// The logs of a log engine; `None` if it has none.
    pub log: Option<octokv_engine::LogStatistics>,
}
