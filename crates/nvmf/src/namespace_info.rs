//! One namespace as hosts see it: identifiers, size, command set.

use crate::config::SubsystemConfig;
use octokv_base::NamespaceId;
use octokv_wire::queue_entry::csi;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The highest identifier of a group of asymmetric access, and how many there may be.
pub const ANA_GROUPS_MAX: u32 = 32;

/// What a namespace is made of: its command set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceKind {
    /// Keys and values.
    KeyValue {
        /// The longest value it keeps.
        value_bytes_max: u32,
        /// The longest key it keeps through the extension's commands; at most 16 means standard keys only.
        key_bytes_max: u16,
    },
    /// Logical blocks.
    Block {
        /// Bytes of one: 512 or 4096.
        block_bytes: u32,
    },
}

/// One namespace, as hosts see it. Clones share the use.
#[derive(Clone, Debug)]
pub struct NamespaceInfo {
    /// Its identifier: 1 and up, unique within the target.
    pub id: NamespaceId,
    /// Its globally unique identifier: never changes as long as the namespace lives.
    pub nguid: [u8; 16],
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// How many bytes of it are in use; its engine keeps this current.
    pub used_bytes: Arc<AtomicU64>,
    /// Its command set, and that set's bounds.
    pub kind: NamespaceKind,
    /// The group of asymmetric access (ANAGRPID) that it belongs to, 1 to 32.
    pub ana_group: u32,
}

impl NamespaceInfo {
    /// The longest value and the longest key; zero for a namespace of blocks.
    pub fn key_value_limits(&self) -> (u32, u16) {
        match self.kind {
            NamespaceKind::KeyValue { value_bytes_max, key_bytes_max } => (value_bytes_max, key_bytes_max),
            NamespaceKind::Block { .. } => (0, 0),
        }
    }

    /// Its command set's identifier (CSI).
    pub fn command_set(&self) -> u8 {
        match self.kind {
            NamespaceKind::KeyValue { .. } => csi::KEY_VALUE,
            NamespaceKind::Block { .. } => csi::NVM,
        }
    }

    /// Panics where it could not be announced: a mistake of whoever made it.
    pub(crate) fn assert_valid(&self, config: &SubsystemConfig) {
        assert!(self.id.0 > 0 && self.id.0 < u32::MAX - 1, "a namespace's identifier is 1 to FFFFFFFDh");
        assert!((1..=ANA_GROUPS_MAX).contains(&self.ana_group), "ANA group {}", self.ana_group);
        match self.kind {
            NamespaceKind::KeyValue { value_bytes_max, .. } => {
                assert!(value_bytes_max <= config.value_bytes_max, "values beyond the settings' bound");
            }
            NamespaceKind::Block { block_bytes } => {
                assert!(matches!(block_bytes, 512 | 4096), "blocks of {block_bytes} B");
                assert!(self.size_bytes >= u64::from(block_bytes), "a namespace has a block");
            }
        }
    }

    /// How many bytes are in use now.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }
}
