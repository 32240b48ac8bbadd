//! Writes zeros into never-written space ahead of its use, so that the flush of a put need not commit the file system's
//! journal.
//!
//! ```text
//!   records   allocate a free run ─▶ write zeros ─▶ release it      as a put whose change is never committed
//!   journal   reserve free units ─▶ write zeros ─▶ end reservation  batches stay out of them
//!   images    lock checkpoints ─▶ write zeros ─▶ unlock             into the area that no superblock names
//! ```
//! In: chunks from [`crate::common::prepare`], the time. Out: writes of zeros.
//!
//! Invariant: while zeros are written, nothing else may be written to their units, and nothing that a recovery needs is there:
//! the allocator, the commit queue and the checkpoint lock keep it so, not the device's report of what was never written. A
//! crash therefore leaves no more than a crash in the middle of a put or of a checkpoint does. No flush: a chunk that a power
//! loss reverts is never written again, and is found so at the next opening.
//! Tested in `tests/hash_prepare.rs`, under power loss in `tests/hash_power_loss.rs`, and by the simulator.

use super::checkpoint::{IMAGE_HEADER_BYTES, RETRY_DELAY};
use super::engine::HashCore;
use super::index::INDEX_ENTRY_BYTES;
use super::volume::HashVolume;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use crate::common::allocator::Extent;
use crate::common::commit_queue::PoisonGuard;
use crate::common::group_commit::{lock_checkpoint, lock_preparation};
use crate::common::key_locks::KeyGuard;
use crate::common::prepare::{NextUse, PrepareArea, PrepareChunk, PrepareConfig, Preparer, pause_after};
use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceError};
use octokv_runtime::ReactorHandle;
use std::cell::Cell;
use std::future::poll_fn;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::task::Poll;

impl HashVolume {
    /// Finds the never-written space of the device that is to be prepared.
    pub(super) fn find_unwritten(&self, device: &dyn Device, prepare_bytes: u64, cores: usize) {
        if prepare_bytes == 0 || self.volatile {
            return;
        }
        let layout = self.layout();
        let mut areas = Vec::new();
        for copy in 0..2 {
            let start = layout.journal_start_unit(copy.into());
            areas.push((PrepareArea::Journal { copy }, start..start + u64::from(layout.journal_units)));
            for area in 0..2 {
                let start = layout.area_start_unit(area, copy.into());
                areas.push((PrepareArea::Images { area, copy }, start..start + layout.area_units));
            }
        }
        let prepare_config =
            PrepareConfig { ahead_bytes: prepare_bytes, unit_bytes: layout.unit_bytes, cores, areas };
        let unit_blocks = self.lba(1).0;
        let mut at = Lba(0);
        let unwritten = std::iter::from_fn(|| {
            // A device that reports a range twice would be asked forever.
            let range = device.next_unwritten(at).filter(|range| range.start >= at && range.end > at)?;
            at = range.end;
            Some(range.start.0 / unit_blocks..range.end.0.div_ceil(unit_blocks))
        });
        *self.preparer.lock() = Preparer::new(prepare_config, &self.space, unwritten);
    }

    /// The next chunk to prepare.
    fn next_chunk(&self) -> Option<PrepareChunk> {
        let mut preparer = self.preparer.lock();
        let preparer = preparer.as_mut()?;
        let used_units = self.used_bytes().load(Ordering::Relaxed) / u64::from(self.layout().unit_bytes);
        // A record has at least a unit, so this is enough for the index, and for an eighth more of it.
        let images_bytes = self.partitions.len() as u64 * IMAGE_HEADER_BYTES as u64
            + (used_units + used_units / 8) * INDEX_ENTRY_BYTES as u64;
        let next_area = self.superblock.lock().checkpoint.next_area();
        let is_in_use = bug_injection::is_injected(InjectedBug::PrepareImagesInUse);
        let next_use = NextUse {
            journal_unit: self.commits.reservable_from(),
            images_area: if is_in_use { 1 - next_area } else { next_area },
            images_units: images_bytes.div_ceil(u64::from(self.layout().unit_bytes)),
        };
        preparer.next_chunk(&self.space, next_use)
    }

    /// Whether space may be prepared now or later.
    pub(super) fn is_preparing(&self) -> bool {
        self.preparer.lock().is_some()
    }
}

impl HashCore {
    /// Prepares never-written space, with pauses, until none is left, the volume is read-only, or the device has no space
    /// under a chunk. When enough is prepared it waits for `rounds`, the count of maintenance rounds. `report` receives each
    /// error. REQUIRES: the task that polls this polls the maintenance as well.
    pub(super) async fn run_preparation(
        &self,
        handle: &ReactorHandle,
        rounds: &Cell<u64>,
        report: impl Fn(EngineError),
    ) {
        let commits = &self.volume.commits;
        let mut zeros = Buffer::zeroed(0);
        while self.volume.is_preparing() && !commits.has_failed() {
            let Some(chunk) = self.volume.next_chunk() else {
                if self.volume.preparer.lock().as_ref().is_some_and(Preparer::is_done) {
                    break;
                }
                let before = rounds.get();
                let has_new_round = || rounds.get() != before || commits.has_failed();
                poll_fn(|_| if has_new_round() { Poll::Ready(()) } else { Poll::Pending }).await;
                continue;
            };
            let start = handle.now();
            match self.prepare(&chunk, &mut zeros).await {
                Ok(()) => {
                    let took = handle.now().since(start);
                    handle.sleep(pause_after(took, chunk.is_urgent)).await;
                }
                Err(error) => {
                    report(error);
                    if matches!(error, EngineError::Device { error: DeviceError::NoSpace, .. }) {
                        break;
                    }
                    handle.sleep(RETRY_DELAY).await;
                }
            }
        }
        *self.volume.preparer.lock() = None;
    }

    /// Waits until no space is being prepared, which is free as well, and keeps it so until the guard is dropped. `None` if
    /// nothing is prepared on this volume. REQUIRES: the caller does not wait for readers while it has the guard: a batch for
    /// which a reader waits may wait for this lock.
    pub(super) async fn pause_preparation(&self) -> Option<KeyGuard<'_>> {
        match self.volume.is_preparing() {
            true => Some(lock_preparation(self).await),
            false => None,
        }
    }

    /// [`HashEngine::prepare_next`](super::HashEngine::prepare_next).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn prepare_next(&self) -> Result<bool, EngineError> {
        let Some(chunk) = self.volume.next_chunk() else { return Ok(false) };
        self.prepare(&chunk, &mut Buffer::zeroed(0)).await?;
        Ok(true)
    }

    /// Writes zeros to what of a chunk is not in use. `zeros` is a buffer of zeros of any length.
    async fn prepare(&self, chunk: &PrepareChunk, zeros: &mut Buffer) -> Result<(), EngineError> {
        match chunk.area {
            PrepareArea::Records => self.prepare_records(chunk.units.clone(), zeros).await,
            PrepareArea::Journal { copy } => self.prepare_journal(copy, chunk.units.clone(), zeros).await,
            PrepareArea::Images { area, .. } => self.prepare_images(area, chunk.units.clone(), zeros).await,
        }
    }

    /// Each free run is allocated while it is written. A put that finds no space waits for the lock, so that the run is free
    /// when it looks again.
    async fn prepare_records(&self, units: Range<u64>, zeros: &mut Buffer) -> Result<(), EngineError> {
        let space = &self.volume.space;
        let _guard = lock_preparation(self).await;
        if bug_injection::is_injected(InjectedBug::PrepareAllocated) {
            return self.write_zeros(units, zeros).await;
        }
        let mut at = units.start;
        while let Some(extent) = space.allocate_within(at..units.end) {
            let Extent { location, units } = extent;
            at = location + units;
            // If this is dropped half-way, the run stays allocated: its write may still reach the device.
            if bug_injection::is_injected(InjectedBug::ReleaseBeforePrepared) {
                space.release(extent);
                self.write_zeros(location..at, zeros).await?;
                continue;
            }
            let written = self.write_zeros(location..at, zeros).await;
            space.release(extent);
            written?;
        }
        Ok(())
    }

    /// The units are reserved while they are written, unless batches may be in them or come too near.
    async fn prepare_journal(
        &self,
        copy: u8,
        units: Range<u64>,
        zeros: &mut Buffer,
    ) -> Result<(), EngineError> {
        let commits = &self.volume.commits;
        let start = self.volume.layout().journal_start_unit(copy.into());
        let _guard = lock_preparation(self).await;
        if bug_injection::is_injected(InjectedBug::PrepareJournalInUse) {
            return self.write_zeros(units, zeros).await;
        }
        let ring_units = (units.start - start) as u32..(units.end - start) as u32;
        if commits.has_failed() || !commits.reserve_journal(ring_units) {
            return Ok(());
        }
        // If this is dropped half-way, its write may still reach the journal when a batch is there.
        let poison_guard = PoisonGuard(commits);
        let written = self.write_zeros(units, zeros).await;
        poison_guard.disarm();
        commits.end_reservation();
        written
    }

    /// Checkpoints wait meanwhile, and the last one is in the other area.
    async fn prepare_images(
        &self,
        area: u8,
        units: Range<u64>,
        zeros: &mut Buffer,
    ) -> Result<(), EngineError> {
        let commits = &self.volume.commits;
        let _guard = lock_checkpoint(self).await;
        let next_area = self.volume.superblock.lock().checkpoint.next_area();
        let is_free = area == next_area || bug_injection::is_injected(InjectedBug::PrepareImagesInUse);
        if commits.has_failed() || !is_free {
            return Ok(());
        }
        // If this is dropped half-way, its write may still reach the area during the next checkpoint.
        let poison_guard = PoisonGuard(commits);
        let written = self.write_zeros(units, zeros).await;
        poison_guard.disarm();
        written
    }

    /// Writes zeros to the units.
    async fn write_zeros(&self, units: Range<u64>, zeros: &mut Buffer) -> Result<(), EngineError> {
        let bytes = (units.end - units.start) as usize * self.volume.unit_bytes();
        if bytes > zeros.capacity() {
            *zeros = Buffer::zeroed(bytes);
        }
        let kept_bytes = zeros.len().min(bytes);
        zeros.set_len(bytes);
        zeros[kept_bytes..].fill(0);
        let buffer = std::mem::replace(zeros, Buffer::zeroed(0));
        let written = self.device.write(self.lba(units.start), buffer).await;
        // A remote device that lost its connection loses the buffer as well.
        *zeros = written.buffer.unwrap_or(Buffer::zeroed(0));
        written.result?;
        self.volume.prepared_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Ok(())
    }
}
