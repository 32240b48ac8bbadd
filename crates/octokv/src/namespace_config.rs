//! `[[namespace]]` tables of the configuration file: namespaces besides namespace 1.

use crate::config_error::InvalidSetting;
use crate::drive_arg::DriveArg;
use crate::engine_arg::EngineArg;
use crate::size::Size;
use octokv_admin::DeviceNames;
use octokv_base::{NamespaceId, crc32c};
use octokv_engine::FormatConfig;
use octokv_node::{
    ANA_GROUPS_MAX, CommandSetConfig, ExistingDataPolicy, NAMESPACE_ID_MAX, NamespaceConfig,
    PREPARE_BYTES_MAX,
};
use serde::Deserialize;

/// Command set of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NamespaceKindKey {
    /// Keys and values.
    Kv,
    /// Logical blocks.
    Block,
}

/// One `[[namespace]]` table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NamespaceSection {
    /// Namespace ID, from 2.
    pub nsid: u32,
    /// Its command set.
    pub kind: NamespaceKindKey,
    /// A path, or "memory"; or several.
    pub device: DeviceNames,
    /// Size of each missing file or memory.
    #[serde(default)]
    pub size: Option<Size>,
    /// Drive whose service times are simulated.
    #[serde(default)]
    pub nand: DriveArg,
    /// Block namespaces: block size, 512 or 4096.
    #[serde(default)]
    pub block_size: Option<Size>,
    /// Key-value namespaces: storage engine; that of the node if none is named.
    #[serde(default)]
    pub engine: Option<EngineArg>,
    /// Key-value namespaces: memory of a cache of values; 0 for none.
    #[serde(default)]
    pub cache_bytes: Size,
    /// Key-value namespaces on a file: never-written space that is written ahead of its use; 0 for none.
    #[serde(default)]
    pub prepare_bytes: Option<Size>,
    /// Key-value namespaces on several devices: space of each for values of overloaded others; 0 for none.
    #[serde(default)]
    pub swap_bytes: Size,
    /// ANA group, 1 to 32.
    #[serde(default = "default_ana_group")]
    pub ana_group: u32,
}

fn default_ana_group() -> u32 {
    1
}

const DEFAULT_BLOCK_BYTES: u32 = 4096;

impl NamespaceSection {
    /// Converts to the node's configuration. `format` applies to key-value volumes; `nqn` is the subsystem's.
    ///
    /// # Errors
    /// The first invalid field.
    pub fn to_config(&self, format: FormatConfig, nqn: &str) -> Result<NamespaceConfig, InvalidSetting> {
        let bad =
            |requirement: &str| Err(InvalidSetting { key: "namespace", requirement: requirement.to_owned() });
        if !(2..=NAMESPACE_ID_MAX).contains(&self.nsid) {
            return bad(&format!(
                "one whose nsid is 2 to {NAMESPACE_ID_MAX} (namespace 1 is on device), not {}",
                self.nsid
            ));
        }
        if !(1..=ANA_GROUPS_MAX).contains(&self.ana_group) {
            return bad(&format!("one whose ana_group is 1 to {ANA_GROUPS_MAX}"));
        }
        if self.device.is_incomplete() || (self.device.has_memory() && self.size.is_none()) {
            return bad("one with a device: a path, or \"memory\" and a size");
        }
        let block_bytes = match (self.kind, self.block_size) {
            (NamespaceKindKey::Kv, Some(_)) => return bad("one without block_size, or of kind \"block\""),
            (_, None) => DEFAULT_BLOCK_BYTES,
            (NamespaceKindKey::Block, Some(Size(bytes @ (512 | 4096)))) => bytes as u32,
            (NamespaceKindKey::Block, Some(_)) => return bad("one whose block_size is 512 or 4096"),
        };
        if self.kind == NamespaceKindKey::Block && self.engine.is_some() {
            return bad("one without engine, or of kind \"kv\"");
        }
        if self.kind == NamespaceKindKey::Block && self.swap_bytes.0 > 0 {
            return bad("one without swap_bytes, or of kind \"kv\"");
        }
        let (command_set, existing_data) = match self.kind {
            NamespaceKindKey::Kv => {
                let engine = self.engine.map_or(format.engine, |named| named.0);
                let format =
                    FormatConfig { engine, namespace: self.nsid, swap_bytes: self.swap_bytes.0, ..format };
                (CommandSetConfig::KeyValue { format }, ExistingDataPolicy::Check)
            }
            // Hosts may have written anything in an earlier run.
            NamespaceKindKey::Block => (CommandSetConfig::Blocks { block_bytes }, ExistingDataPolicy::Keep),
        };
        let memory_block_bytes = if self.kind == NamespaceKindKey::Kv { 512 } else { block_bytes };
        Ok(NamespaceConfig {
            id: NamespaceId(self.nsid),
            devices: self.device.to_configs(self.size.map(|size| size.0), memory_block_bytes),
            drive_profile: self.nand.0,
            cache_bytes: self.cache_bytes.0,
            prepare_bytes: self
                .prepare_bytes
                .map_or(if self.kind == NamespaceKindKey::Kv { PREPARE_BYTES_MAX } else { 0 }, |size| size.0),
            command_set,
            existing_data,
            ana_group: self.ana_group,
            required: true,
            nguid_suffix: self.identity(nqn),
        })
    }

    /// NGUID suffix, the same for the same table of the same subsystem: hosts recognize the namespace.
    fn identity(&self, nqn: &str) -> u64 {
        let of_name = crc32c(format!("{nqn} {}", self.nsid).as_bytes());
        u64::from(of_name) << 32 | u64::from(crc32c(self.device.to_string().as_bytes()))
    }
}
