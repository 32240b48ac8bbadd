//! What one core needs to read and write tables: device, buffers, the shared cache, statistics.
//!
//! In: places in a run. Out: bytes, or why there are none. Invariant: a medium that lost blocks is distinguished from a device that fails, since only the former costs
//! entries ([`is_media_error`]).
//! Tested by the tests of whole tables.

use super::cache::BlockCache;
use super::frame::BlockOwner;
use super::info::TablePlace;
use super::scan_lengths::ScanLengths;
use super::spare_blocks::SpareBlocks;
use crate::bug_injection::{self, InjectedBug};
pub use crate::common::media_errors::is_media_error;
use crate::lsm::entry::ValueAddress;
use crate::lsm::prefetch_degree::PrefetchBudget;
use crate::{EngineError, VolumePlace};
use octokv_base::map::FxHashSet;
use octokv_base::{Buffer, BufferPool, Lba, SharedBuffer};
use octokv_device::{Device, DeviceError};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// A core's access to the tables of a volume.
pub struct TableIo {
    /// The device of the volume.
    pub device: Rc<dyn Device>,
    /// The buffers of the core.
    pub pool: BufferPool,
    /// The parts in memory, shared by all cores.
    pub cache: Arc<BlockCache>,
    /// The volume.
    pub volume_id: u64,
    /// The length of a unit in bytes: one block of the device or several.
    pub unit_bytes: u32,
    /// Device and partition for errors.
    pub place: VolumePlace,
    /// The statistics of this core.
    pub counters: TableCounters,
    /// The lengths of its scans.
    pub scan_lengths: ScanLengths,
    /// Memory for its data blocks.
    pub spare_blocks: SpareBlocks,
    /// What iterators may hold ahead, on all cores.
    pub prefetch_budget: Arc<PrefetchBudget>,
    /// Only for a verification, which goes on behind all that it cannot read and changes nothing.
    pub unreadable: Option<UnreadableBlocks>,
}

/// The first blocks of reads that a device failed, though the medium has not lost them. Each then counts as lost, so that cursors go on behind it.
#[derive(Debug, Default)]
pub struct UnreadableBlocks(RefCell<FxHashSet<u64>>);

impl UnreadableBlocks {
    /// Whether the last read from this block on failed with an error of the device.
    pub fn has(&self, lba: u64) -> bool {
        self.0.borrow().contains(&lba)
    }
}

/// Counts what a core reads of tables and value segments.
#[derive(Debug, Default)]
pub struct TableCounters {
    pub(super) filter_uses: Cell<u64>,
    pub(super) filter_exclusions: Cell<u64>,
    pub(super) filter_errors: Cell<u64>,
    pub(super) cache_hits: Cell<u64>,
    pub(super) cache_misses: Cell<u64>,
    pub(super) damaged_copies: Cell<u64>,
    pub(super) damaged_blocks: Cell<u64>,
}

/// The statistics of one core, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStatistics {
    /// Gets for which a filter was there.
    pub filter_uses: u64,
    /// Those of them that ended there: the table has no such key.
    pub filter_exclusions: u64,
    /// Those of them that went on, though the table has no such key.
    pub filter_errors: u64,
    /// Parts of tables, and records of values that gets wanted, that were in memory.
    pub cache_hits: u64,
    /// Those that had to be read.
    pub cache_misses: u64,
    /// Copies of indexes and filters that were found damaged, each time.
    pub damaged_copies: u64,
    /// Data blocks that were found damaged, each time.
    pub damaged_blocks: u64,
}

pub(super) fn count(counter: &Cell<u64>) {
    counter.set(counter.get() + 1);
}

impl TableCounters {
    /// The current statistics.
    pub fn statistics(&self) -> TableStatistics {
        TableStatistics {
            filter_uses: self.filter_uses.get(),
            filter_exclusions: self.filter_exclusions.get(),
            filter_errors: self.filter_errors.get(),
            cache_hits: self.cache_hits.get(),
            cache_misses: self.cache_misses.get(),
            damaged_copies: self.damaged_copies.get(),
            damaged_blocks: self.damaged_blocks.get(),
        }
    }
}

/// Why bytes of a run cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RunReadError {
    /// The medium lost them.
    Media,
    /// The device failed, or there is no buffer.
    Engine(EngineError),
}

/// Bytes of a run, in a buffer of whole blocks.
#[derive(Debug)]
pub(super) struct RunBytes {
    buffer: Buffer,
    range: Range<usize>,
    /// Where they begin, in bytes from the start of the run.
    offset: u64,
}

impl RunBytes {
    /// The bytes.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }

    /// The bytes at an offset of the run, if all are here.
    pub(super) fn part(&self, offset: u64, bytes: usize) -> Option<&[u8]> {
        let start = usize::try_from(offset.checked_sub(self.offset)?).ok()?;
        self.bytes().get(start..start.checked_add(bytes)?)
    }
}

impl TableIo {
    /// Whose blocks those of a table are.
    pub fn owner(&self, table_id: u64) -> BlockOwner {
        BlockOwner { volume_id: self.volume_id, table_id }
    }

    /// The block of the device with a byte of a table's run.
    pub fn lba(&self, place: &TablePlace, offset: u64) -> Lba {
        let block_bytes = u64::from(self.device.geometry().block_bytes);
        let unit_blocks = u64::from(self.unit_bytes) / block_bytes;
        // A location beyond every device stays one: the device refuses it.
        Lba(place.location.saturating_mul(unit_blocks).saturating_add(offset / block_bytes))
    }

    /// The error of a damaged part of a table.
    pub fn corrupt(&self, place: &TablePlace, offset: u64) -> EngineError {
        EngineError::Corrupt { lba: self.lba(place, offset).0, place: self.place }
    }

    /// The error of a failed device.
    pub fn failed(&self, error: DeviceError) -> EngineError {
        EngineError::Device { error, place: self.place }
    }

    /// Whether a read of so many bytes may start before it is wanted: half of the core's buffers stay for requests, since an iterator that is not advanced keeps the
    /// buffers of its reads.
    pub fn may_read_ahead(&self, bytes: u64) -> bool {
        self.pool.free_bytes() as u64 >= (self.pool.budget_bytes() / 2) as u64 + bytes
    }

    /// Whether the blocks of a read that failed, from `lba` on, count as lost: if the medium says so, and for a verification, which notes others.
    pub fn is_lost(&self, lba: Lba, error: DeviceError) -> bool {
        if let Some(unreadable) = &self.unreadable
            && !is_media_error(error)
        {
            unreadable.0.borrow_mut().insert(lba.0);
        }
        self.unreadable.is_some() || is_media_error(error)
    }

    /// The record of a value, if it is in the cache. Counted.
    pub fn cached_record(&self, address: ValueAddress) -> Option<SharedBuffer> {
        let found = self.cache.record(address);
        count(if found.is_some() { &self.counters.cache_hits } else { &self.counters.cache_misses });
        found
    }

    /// Reads bytes of a table's run in one read.
    pub(super) async fn read(
        &self,
        place: &TablePlace,
        offset: u64,
        bytes: usize,
    ) -> Result<RunBytes, RunReadError> {
        let block_bytes = self.device.geometry().block_bytes as usize;
        let start = (offset % block_bytes as u64) as usize;
        let length = (start + bytes).next_multiple_of(block_bytes);
        let buffer = self.pool.take(length).ok_or(RunReadError::Engine(EngineError::NoMemory))?;
        let lba = self.lba(place, offset);
        let result = self.device.read(lba, buffer).await.into_read();
        let is_lost =
            |error| self.is_lost(lba, error) || bug_injection::is_injected(InjectedBug::DeviceErrorIsDamage);
        let buffer = result.map_err(|error| match error {
            error if is_lost(error) => RunReadError::Media,
            error => RunReadError::Engine(self.failed(error)),
        })?;
        if let Some(unreadable) = &self.unreadable {
            unreadable.0.borrow_mut().remove(&lba.0);
        }
        Ok(RunBytes { buffer, range: start..start + bytes, offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_codes_of_a_medium_that_lost_its_blocks_cost_entries() {
        let lost = [61, 84];
        // EIO, ENXIO, EAGAIN, ENOMEM, EBUSY, ENODEV, EINVAL, ETIME, ENOLINK, EREMCHG, EBADE, EOPNOTSUPP, ETIMEDOUT, EREMOTEIO.
        let others = [5, 6, 11, 12, 16, 19, 22, 62, 67, 78, 52, 95, 110, 121];
        assert!(lost.iter().all(|&code| is_media_error(DeviceError::Io(code))));
        assert!(others.iter().all(|&code| !is_media_error(DeviceError::Io(code))));
        assert!(!is_media_error(DeviceError::OutOfRange) && !is_media_error(DeviceError::NoSpace));
    }
}
