//! Limits and properties of a controller and its namespace, decoded from Identify pages.
//!
//! In: pages and property values. Out: [`ControllerInfo`], [`BlockInfo`], or the reason why the namespace is unusable.
//! Tested in [`crate::controller_init`].

use crate::error::ConnectionError;
use octokv_wire::device_log::DeviceLog;
use octokv_wire::identify;
use octokv_wire::iterator;
use octokv_wire::queue_entry::event;
use octokv_wire::vendor::{self, VendorCapabilities};
use octokv_wire::{kv, nvm};
use std::sync::Arc;

/// Limits and properties of a controller and its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// Controller identifier (CNTLID).
    pub controller_id: u16,
    /// Maximum entries of a queue (CAP.MQES).
    pub queue_entries_max: u32,
    /// Maximum in-capsule data of an I/O command, in bytes.
    pub capsule_data_bytes: u32,
    /// Maximum data of one command, in bytes (MDTS).
    pub data_bytes_max: u32,
    /// octokv's vendor capabilities; `None` for a controller without them.
    pub vendor_capabilities: Option<VendorCapabilities>,
    /// Maximum commands in flight on a queue (MAXCMD); 0 for no limit.
    pub commands_max: u16,
    /// Number of I/O queues granted.
    pub io_queues: u16,
    /// Maximum key of the standard commands, in bytes (KVKML).
    pub kv_key_bytes_max: u16,
    /// Maximum value of the namespace, in bytes (KVVML); 0 for no limit.
    pub kv_value_bytes_max: u32,
    /// Size of the namespace, in bytes.
    pub size_bytes: u64,
    /// Used part of the namespace at connect time, in bytes.
    pub used_bytes: u64,
    /// Block format of the namespace; `None` for a Key Value namespace.
    pub blocks: Option<BlockInfo>,
    /// Whether the controller supports Dataset Management.
    pub supports_deallocate: bool,
    /// Whether the controller reports namespace changes by asynchronous events.
    pub reports_namespace_changes: bool,
    /// The devices of the namespace and their tokens when the session connected; `None` unless the session asked for tokens.
    pub device_log: Option<Arc<DeviceLog>>,
}

/// Block format and identity of a block namespace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockInfo {
    /// Block size, in bytes: a power of two from 512 to 65536.
    pub block_bytes: u32,
    /// Size of the namespace, in blocks.
    pub block_count: u64,
    /// Globally unique identifier (NGUID); zeros for none.
    pub nguid: [u8; 16],
}

/// Supported block sizes, log2 of bytes.
const BLOCK_BYTES_LOG2: std::ops::RangeInclusive<u8> = 9..=16;

impl BlockInfo {
    /// Maximum data of one command, in bytes: whole blocks within MDTS and the block count of a command.
    pub fn command_bytes_max(&self, data_bytes_max: u32) -> u32 {
        let named = u64::from(nvm::BLOCKS_MAX) * u64::from(self.block_bytes);
        let most = named.min(u64::from(data_bytes_max)).min(1 << 31);
        (most - most % u64::from(self.block_bytes)) as u32
    }

    /// Decodes the page of a namespace; `None` if its block format is not supported.
    fn from_page(page: &identify::IdentifyNamespace, data_bytes_max: u32) -> Option<BlockInfo> {
        let index = page.format & 0xf | (page.format >> 1) & 0x30;
        if index > page.formats {
            return None;
        }
        let [low, high, block_log2, _] = page.block_formats[usize::from(index)];
        if (low, high) != (0, 0) || !BLOCK_BYTES_LOG2.contains(&block_log2) {
            return None;
        }
        let (block_bytes, count) = (1 << block_log2, page.size.get());
        count.checked_mul(u64::from(block_bytes)).filter(|&bytes| bytes > 0)?;
        let blocks = BlockInfo { block_bytes, block_count: count, nguid: page.nguid };
        (blocks.command_bytes_max(data_bytes_max) > 0).then_some(blocks)
    }

    /// Whether this can be the namespace of `before`: same NGUID and block size, not smaller.
    pub fn matches(&self, before: &BlockInfo) -> bool {
        self.nguid == before.nguid
            && self.block_bytes == before.block_bytes
            && self.block_count >= before.block_count
    }
}

impl ControllerInfo {
    pub(crate) fn unknown() -> ControllerInfo {
        ControllerInfo {
            controller_id: 0,
            queue_entries_max: 2,
            capsule_data_bytes: 0,
            data_bytes_max: u32::MAX,
            vendor_capabilities: None,
            commands_max: 0,
            io_queues: 1,
            kv_key_bytes_max: 0,
            kv_value_bytes_max: 0,
            size_bytes: 0,
            used_bytes: 0,
            blocks: None,
            supports_deallocate: false,
            reports_namespace_changes: false,
            device_log: None,
        }
    }

    /// Info of a controller with the usual limits, for tests.
    #[doc(hidden)]
    pub fn for_tests() -> ControllerInfo {
        ControllerInfo {
            queue_entries_max: 1024,
            capsule_data_bytes: 16384,
            data_bytes_max: 2 << 20,
            kv_key_bytes_max: 16,
            kv_value_bytes_max: 2 << 20,
            ..ControllerInfo::unknown()
        }
    }

    pub(crate) fn apply_controller_page(&mut self, page: &identify::IdentifyController) {
        self.capsule_data_bytes = page.capsule_data_bytes();
        self.data_bytes_max = page.data_bytes_max().map_or(u32::MAX, |most| most.min(1 << 31) as u32);
        self.vendor_capabilities = page.vendor_capabilities();
        self.commands_max = page.commands_max.get();
        self.reports_namespace_changes = page.events.get() & event::NAMESPACE_CHANGED_BIT != 0;
        self.supports_deallocate = page.nvm_commands.get() & identify::oncs::DATASET_MANAGEMENT != 0;
    }

    pub(crate) fn apply_namespace_page(
        &mut self,
        page: &identify::IdentifyNamespace,
    ) -> Result<(), ConnectionError> {
        if page.size.get() == 0 {
            // A page of zeros: the namespace was deleted after the previous step (NVMe Base 2.1, 5.1.13.2.1).
            return Err(ConnectionError::NamespaceNotFound);
        }
        let blocks =
            BlockInfo::from_page(page, self.data_bytes_max).ok_or(ConnectionError::UnsupportedBlockFormat)?;
        self.size_bytes = blocks.block_count * u64::from(blocks.block_bytes);
        self.used_bytes = page.used.get().min(blocks.block_count) * u64::from(blocks.block_bytes);
        self.blocks = Some(blocks);
        Ok(())
    }

    pub(crate) fn apply_kv_namespace_page(
        &mut self,
        page: &identify::IdentifyKvNamespace,
    ) -> Result<(), ConnectionError> {
        let format = page.kv_formats[usize::from(page.format & 0xf)];
        if format.key_bytes_max.get() == 0 {
            // A page of zeros, as for a block namespace: deleted after the previous step.
            return Err(ConnectionError::NamespaceNotFound);
        }
        self.blocks = None;
        self.kv_key_bytes_max = format.key_bytes_max.get();
        self.kv_value_bytes_max = format.value_bytes_max.get();
        self.size_bytes = page.size_bytes.get();
        self.used_bytes = page.used_bytes.get();
        Ok(())
    }

    /// Whether the vendor commands with long keys are usable. Their keys are in-capsule data.
    pub fn supports_long_keys(&self) -> bool {
        let has_feature = |it: &VendorCapabilities| it.features & vendor::FEATURE_LONG_KEYS != 0;
        self.vendor_capabilities.as_ref().is_some_and(has_feature) && self.capsule_data_bytes >= 1024
    }

    /// Whether the namespaces of the node may have iterators.
    pub fn supports_iterators(&self) -> bool {
        let has_feature = |it: &VendorCapabilities| it.features & vendor::FEATURE_ITERATORS != 0;
        self.vendor_capabilities.as_ref().is_some_and(has_feature)
    }

    /// Maximum length of the pairs of one command, in bytes: one pair of any key and value has room.
    pub fn pairs_bytes_max(&self) -> u32 {
        let bytes = iterator::buffer_bytes_for(octokv_base::KEY_BYTES_MAX, self.value_bytes_max() as usize);
        u32::try_from(bytes).unwrap_or(u32::MAX)
    }

    /// Maximum key of a standard command, in bytes.
    pub fn standard_key_bytes_max(&self) -> usize {
        usize::from(self.kv_key_bytes_max).min(kv::KEY_BYTES_MAX)
    }

    /// Maximum key, in bytes.
    pub fn key_bytes_max(&self) -> usize {
        let standard = self.standard_key_bytes_max();
        match self.vendor_capabilities {
            Some(a) if self.supports_long_keys() => {
                usize::from(a.key_bytes_max).clamp(standard, octokv_base::KEY_BYTES_MAX)
            }
            _ => standard,
        }
    }

    /// Maximum value of one command, in bytes.
    pub fn value_bytes_max(&self) -> u32 {
        match self.kv_value_bytes_max {
            0 => self.data_bytes_max,
            most => most.min(self.data_bytes_max),
        }
    }

    /// Commands in flight on a queue for a requested depth: at most one less than its entries.
    pub fn queue_depth(&self, wanted: u16) -> u16 {
        let limit = if self.commands_max == 0 { u16::MAX } else { self.commands_max };
        let entries = (self.queue_entries_max - 1).min(u32::from(u16::MAX)) as u16;
        wanted.min(limit).min(entries).max(1)
    }
}

/// Fails if a block namespace is not the one that it was before a reconnect or rescan.
///
/// # Errors
/// [`ConnectionError::NamespaceChanged`].
pub(crate) fn verify_same_namespace(
    before: Option<BlockInfo>,
    now: Option<BlockInfo>,
) -> Result<(), ConnectionError> {
    match (before, now) {
        (Some(before), Some(now)) if now.matches(&before) => Ok(()),
        (None, _) => Ok(()),
        (Some(_), _) => Err(ConnectionError::NamespaceChanged),
    }
}
