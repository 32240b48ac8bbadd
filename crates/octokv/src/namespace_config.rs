//! `[[namespace]]` tables of the configuration file: namespaces besides namespace 1.

use crate::config::{Invalid, MEMORY};
use crate::drive_arg::Nand;
use crate::size::Size;
use octokv_base::{NamespaceId, crc32c};
use octokv_engine::hash::FormatSettings;
use octokv_node::{ANA_GROUPS_MAX, Content, DeviceSettings, Existing, NAMESPACE_ID_MAX, NamespaceSettings};
use serde::Deserialize;

/// What a namespace is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Keys and values.
    Kv,
    /// Logical blocks.
    Block,
}

/// One table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    /// Its identifier.
    pub nsid: u32,
    /// What it is made of.
    pub kind: Kind,
    /// What holds it.
    pub device: String,
    /// How large a missing file, or memory, is made.
    #[serde(default)]
    pub size: Option<Size>,
    /// The drive whose time its answers take.
    #[serde(default)]
    pub nand: Nand,
    /// Bytes of a block.
    #[serde(default)]
    pub block_size: Option<Size>,
    /// Its group of asymmetric access.
    #[serde(default = "first_group")]
    pub ana_group: u32,
}

fn first_group() -> u32 {
    1
}

const BLOCK_BYTES: u32 = 4096;

impl Table {
    /// As a node takes it. `format` says how volumes of keys are made; `nqn` is the subsystem's.
    pub fn settings(&self, format: FormatSettings, nqn: &str) -> Result<NamespaceSettings, Invalid> {
        let bad = |must: &str| Err(Invalid { key: "namespace", must: must.to_owned() });
        if !(2..=NAMESPACE_ID_MAX).contains(&self.nsid) {
            return bad(&format!(
                "one whose nsid is 2 to {NAMESPACE_ID_MAX} (namespace 1 is that of device), not {}",
                self.nsid
            ));
        }
        if !(1..=ANA_GROUPS_MAX).contains(&self.ana_group) {
            return bad(&format!("one whose ana_group is 1 to {ANA_GROUPS_MAX}"));
        }
        if self.device.is_empty() || (self.device == MEMORY && self.size.is_none()) {
            return bad("one with a device: a path, or \"memory\" and a size");
        }
        let block_bytes = match (self.kind, self.block_size) {
            (Kind::Kv, Some(_)) => return bad("of blocks where it has a block_size"),
            (_, None) => BLOCK_BYTES,
            (Kind::Block, Some(Size(bytes @ (512 | 4096)))) => bytes as u32,
            (Kind::Block, Some(_)) => return bad("one whose block_size is 512 or 4096"),
        };
        let (content, existing) = match self.kind {
            Kind::Kv => {
                let format = FormatSettings { namespace: self.nsid, ..format };
                (Content::KeyValue { format }, Existing::Check)
            }
            // Hosts may have put anything there, in an earlier run too.
            Kind::Block => (Content::Blocks { block_bytes }, Existing::Keep),
        };
        let device = if self.device == MEMORY {
            let bytes = self.size.map_or(0, |size| size.0);
            let block_bytes = if self.kind == Kind::Kv { 512 } else { block_bytes };
            DeviceSettings::Memory { bytes, block_bytes }
        } else {
            let create_bytes = self.size.map(|size| size.0);
            DeviceSettings::File { path: self.device.clone().into(), create_bytes }
        };
        Ok(NamespaceSettings {
            id: NamespaceId(self.nsid),
            device,
            nand: self.nand.0,
            content,
            existing,
            ana_group: self.ana_group,
            required: true,
            identity: self.identity(nqn),
        })
    }

    /// The same for the same table of the same subsystem: hosts find the namespace again.
    fn identity(&self, nqn: &str) -> u64 {
        let of_name = crc32c(format!("{nqn} {}", self.nsid).as_bytes());
        u64::from(of_name) << 32 | u64::from(crc32c(self.device.as_bytes()))
    }
}
