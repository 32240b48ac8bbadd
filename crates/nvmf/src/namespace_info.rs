//! One namespace as hosts see it: identifiers, command set, limits and size.

use crate::config::SubsystemConfig;
use crate::token_share::TokenShares;
use octokv_base::{NamespaceId, RecordLayout, SharedSum};
use octokv_wire::queue_entry::csi;
use std::sync::Arc;

/// The highest ANA group identifier, and the most ANA groups.
pub const ANA_GROUPS_MAX: u32 = 32;

/// The command set of a namespace and its limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceKind {
    /// Key Value command set.
    KeyValue {
        /// The longest value in bytes.
        value_bytes_max: u32,
        /// The longest key of the vendor commands in bytes; at most 16 means that only standard keys are
        /// supported.
        key_bytes_max: u16,
        /// Where the engine wants key and value in the buffer of a Store.
        record_layout: RecordLayout,
        /// Whether the engine has iterators.
        has_iterators: bool,
    },
    /// NVM command set.
    Block {
        /// Bytes of a logical block: 512 or 4096.
        block_bytes: u32,
    },
}

/// The limits of a Key Value namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLimits {
    /// The longest value in bytes.
    pub value_bytes_max: u32,
    /// The longest key of the vendor commands in bytes.
    pub key_bytes_max: u16,
    /// Where the engine wants key and value in the buffer of a Store.
    pub record_layout: RecordLayout,
    /// Whether the engine has iterators.
    pub has_iterators: bool,
}

/// The identity, limits and size of a namespace. Clones share `used_bytes`.
#[derive(Clone, Debug)]
pub struct NamespaceInfo {
    /// Namespace identifier (NSID): 1 to FFFFFFFDh, unique within the target.
    pub id: NamespaceId,
    /// Namespace globally unique identifier: constant for the lifetime of the namespace.
    pub nguid: [u8; 16],
    /// Capacity in bytes.
    pub size_bytes: u64,
    /// Bytes in use; the namespace's engine updates it.
    pub used_bytes: SharedSum,
    /// The command set and its limits.
    pub kind: NamespaceKind,
    /// ANA group identifier (ANAGRPID): 1 to [`ANA_GROUPS_MAX`].
    pub ana_group: u32,
    /// The tokens of its devices, if their load is bounded by tokens.
    pub tokens: Option<Arc<TokenShares>>,
}

impl NamespaceInfo {
    /// The limits of a Key Value namespace; both 0 for a block namespace.
    pub fn key_value_limits(&self) -> KvLimits {
        match self.kind {
            NamespaceKind::KeyValue { value_bytes_max, key_bytes_max, record_layout, has_iterators } => {
                KvLimits { value_bytes_max, key_bytes_max, record_layout, has_iterators }
            }
            NamespaceKind::Block { .. } => {
                let record_layout = RecordLayout::new(0);
                KvLimits { value_bytes_max: 0, key_bytes_max: 0, record_layout, has_iterators: false }
            }
        }
    }

    /// Command set identifier (CSI).
    pub fn command_set(&self) -> u8 {
        match self.kind {
            NamespaceKind::KeyValue { .. } => csi::KEY_VALUE,
            NamespaceKind::Block { .. } => csi::NVM,
        }
    }

    /// Checks the fields against the specification and the target's configuration.
    ///
    /// # Panics
    /// If a field is outside of its documented range or exceeds the configuration.
    pub(crate) fn assert_valid(&self, config: &SubsystemConfig) {
        assert!(self.id.0 > 0 && self.id.0 < u32::MAX - 1, "NSID {} is not in 1 to FFFFFFFDh", self.id.0);
        assert!(
            (1..=ANA_GROUPS_MAX).contains(&self.ana_group),
            "ANA group {} is not in 1 to {ANA_GROUPS_MAX}",
            self.ana_group
        );
        match self.kind {
            NamespaceKind::KeyValue { value_bytes_max, .. } => {
                assert!(value_bytes_max <= config.value_bytes_max, "value_bytes_max exceeds the target's");
            }
            NamespaceKind::Block { block_bytes } => {
                assert!(
                    matches!(block_bytes, 512 | 4096),
                    "block size {block_bytes} is neither 512 nor 4096"
                );
                assert!(self.size_bytes >= u64::from(block_bytes), "a namespace has at least one block");
            }
        }
    }

    /// Bytes in use now.
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.get()
    }
}
