//! Limits and properties of a controller and its namespace, decoded from Identify pages.
//!
//! In: pages and property values. Out: [`ControllerInfo`], [`BlockInfo`], or the reason why the namespace is unusable.
//! Tested in [`crate::controller_init`].

use crate::error::ConnectionError;
use octokv_wire::identify;
use octokv_wire::queue_entry::event;
use octokv_wire::vendor::{self, VendorCapabilities};
use octokv_wire::{kv, nvm};

/// What is known of a controller and its namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerInfo {
    /// The controller's id.
    pub controller_id: u16,
    /// Entries that a queue may have.
    pub queue_entries_max: u32,
    /// Bytes that an I/O command may carry in its capsule.
    pub capsule_data_bytes: u32,
    /// The most data of one command, in bytes.
    pub data_bytes_max: u32,
    /// octokv's extension, where the controller announces it.
    pub vendor_capabilities: Option<VendorCapabilities>,
    /// The most commands at once on a queue, 0 for no limit.
    pub commands_max: u16,
    /// I/O queues granted.
    pub io_queues: u16,
    /// The longest key of the namespace by the standard commands, in bytes.
    pub kv_key_bytes_max: u16,
    /// The longest value of the namespace, in bytes; 0 for no limit.
    pub kv_value_bytes_max: u32,
    /// Size of the namespace, in bytes.
    pub size_bytes: u64,
    /// Bytes of it that are used, when it was connected.
    pub used_bytes: u64,
    /// What is known of a namespace of blocks; none where it holds keys and values.
    pub blocks: Option<BlockInfo>,
    /// Whether the controller takes Dataset Management.
    pub supports_deallocate: bool,
    /// Whether the controller tells of namespaces that changed.
    pub reports_namespace_changes: bool,
}

/// What is known of a namespace of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockInfo {
    /// Bytes of a block: a power of two from 512 to 65536.
    pub block_bytes: u32,
    /// How many there are.
    pub block_count: u64,
    /// The namespace's globally unique identifier; zeros where it has none.
    pub nguid: [u8; 16],
}

/// The smallest and the largest block that we work with, as powers of two.
const BLOCK_BYTES_LOG2: std::ops::RangeInclusive<u8> = 9..=16;

impl BlockInfo {
    /// The most data of one command: whole blocks, no more than it can name.
    pub fn command_bytes_max(&self, data_bytes_max: u32) -> u32 {
        let named = u64::from(nvm::BLOCKS_MAX) * u64::from(self.block_bytes);
        let most = named.min(u64::from(data_bytes_max)).min(1 << 31);
        (most - most % u64::from(self.block_bytes)) as u32
    }

    /// Of the page of a namespace, where its format is one that we can use.
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

    /// Whether data that was here before is here still, as far as names and sizes tell.
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
        }
    }

    /// Facts of a controller with the usual limits, for tests.
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
            // A page of zeros: it was there a step ago and is no more (NVMe Base 2.1, 5.1.13.2.1).
            return Err(ConnectionError::NamespaceNotFound);
        }
        let blocks =
            BlockInfo::from_page(page, self.data_bytes_max).ok_or(ConnectionError::UnsupportedBlockFormat)?;
        self.size_bytes = blocks.block_count * u64::from(blocks.block_bytes);
        self.used_bytes = page.used.get().min(blocks.block_count) * u64::from(blocks.block_bytes);
        self.blocks = Some(blocks);
        Ok(())
    }

    pub(crate) fn apply_kv_namespace_page(&mut self, page: &identify::IdentifyKvNamespace) {
        self.blocks = None;
        let format = page.kv_formats[usize::from(page.format & 0xf)];
        self.kv_key_bytes_max = format.key_bytes_max.get();
        self.kv_value_bytes_max = format.value_bytes_max.get();
        self.size_bytes = page.size_bytes.get();
        self.used_bytes = page.used_bytes.get();
    }

    /// Whether the extension's commands with long keys can be used. Their keys travel in the capsule.
    pub fn supports_long_keys(&self) -> bool {
        let announced = |a: &VendorCapabilities| a.features & vendor::FEATURE_LONG_KEYS != 0;
        self.vendor_capabilities.as_ref().is_some_and(announced) && self.capsule_data_bytes >= 1024
    }

    /// The longest key of a standard command, in bytes.
    pub fn standard_key_bytes_max(&self) -> usize {
        usize::from(self.kv_key_bytes_max).min(kv::KEY_BYTES_MAX)
    }

    /// The longest key, in bytes.
    pub fn key_bytes_max(&self) -> usize {
        let standard = self.standard_key_bytes_max();
        match self.vendor_capabilities {
            Some(a) if self.supports_long_keys() => {
                usize::from(a.key_bytes_max).clamp(standard, octokv_base::KEY_BYTES_MAX)
            }
            _ => standard,
        }
    }

    /// The longest value that can be stored, in bytes.
    pub fn value_bytes_max(&self) -> u32 {
        match self.kv_value_bytes_max {
            0 => self.data_bytes_max,
            most => most.min(self.data_bytes_max),
        }
    }

    /// The most that one command can read, in bytes.
    pub fn read_bytes_max(&self) -> u32 {
        self.value_bytes_max()
    }

    /// Commands that may be in flight on a queue: one less than its entries.
    pub fn queue_depth(&self, wanted: u16) -> u16 {
        let limit = if self.commands_max == 0 { u16::MAX } else { self.commands_max };
        let entries = (self.queue_entries_max - 1).min(u32::from(u16::MAX)) as u16;
        wanted.min(limit).min(entries).max(1)
    }
}
