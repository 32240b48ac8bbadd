//! Recovery: opens a volume and rebuilds its index after any crash.
//!
//! ```text
//!   superblock (highest generation) ─▶ checkpoint images ─▶ journal batches from the checkpoint on
//!        ─▶ records of the last batches verified ─▶ bitmap from the index ─▶ new incarnation ─▶ open
//! ```
//! No step reads the whole device. All metadata has two copies; if one is damaged, the other is used.
//! Invariants: nothing is written before everything is read; an entry whose record is incomplete is dropped only if its
//! batch is not known durable, and its key then keeps the previous value.
//! Tested in `tests/hash_power_loss.rs`, `tests/hash_open_errors.rs` and `tests/hash_corrupt_images.rs`, and structure
//! by structure in `tests/hash_recovery_checkpoint.rs` and `tests/hash_recovery_journal.rs`.

use super::allocator::{Extent, FitPolicy, SpaceAllocator};
use super::checkpoint::{self, IMAGE_HEADER_BYTES, PartitionImageHeader};
use super::commit_queue::{JournalPosition, LEADERS_MAX};
use super::engine::HashEngine;
use super::error::{IndexMismatch, MetadataStructure, OpenError};
use super::format::{FormatConfig, layout};
use super::index::{INDEX_ENTRY_BYTES, IndexEntry, RECORD_UNITS_MAX, RecordRef, fingerprint};
use super::journal::{self, JournalEntry, batch_units_max};
use super::record;
use super::superblock::{COUNT_MAX, Superblock};
use super::superblock_io::{read_superblock, write_superblock};
use super::volume::{
    IndexPartition, OpenConfig, Volume, VolumeState, apply_to_table, hash_of, partition_and_tag,
};
use crate::bug_injection::{self, InjectedBug};
use octokv_base::map::FxHashMap;
use octokv_base::{Buffer, BufferPool, Key, Lba};
use octokv_device::Device;
use octokv_runtime::trim_heap;
use std::rc::Rc;
use std::sync::Arc;

/// Opens the volume on a device for `config.cores` cores, and rebuilds its index. A volatile device is formatted with
/// `format` first.
///
/// # Errors
/// [`OpenError`], if there is no volume, it is damaged, or the device fails.
pub async fn open(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    config: OpenConfig,
    format: &FormatConfig,
) -> Result<Arc<Volume>, OpenError> {
    let geometry = device.geometry();
    if geometry.volatile {
        let superblock = layout(geometry, format)?;
        let state = empty_state(&superblock, JournalPosition::default(), FitPolicy::First);
        return Ok(Volume::new(superblock, state, geometry.block_bytes, true, config));
    }
    let mut loaded = load_volume(&**device).await?;
    loaded.superblock.incarnation += 1;
    loaded.superblock.generation += 1;
    loaded.superblock.is_clean_shutdown = false;
    write_superblock(&**device, &loaded.superblock).await?;
    let state = VolumeState { partitions: loaded.partitions, space: loaded.space, position: loaded.position };
    let volume = Volume::new(loaded.superblock, state, geometry.block_bytes, false, config);
    if loaded.needs_checkpoint {
        let engine = HashEngine::new(Arc::clone(&volume), 0, Rc::clone(device), pool.clone());
        engine.checkpoint(false).await?;
    }
    // Returns the memory that recovery needed besides the index.
    trim_heap();
    Ok(volume)
}

/// The recovered state of a volume. Recovery up to here writes nothing.
pub(super) struct RecoveredState {
    pub(super) superblock: Superblock,
    pub(super) partitions: Box<[IndexPartition]>,
    pub(super) space: SpaceAllocator,
    pub(super) position: JournalPosition,
    /// Journal entries that were dropped because their records are incomplete.
    pub(super) dropped_entries: u64,
    /// Metadata structures of which one copy is damaged.
    pub(super) damaged_copies: u64,
    needs_checkpoint: bool,
}

fn empty_state(superblock: &Superblock, position: JournalPosition, fit: FitPolicy) -> VolumeState {
    let segments =
        (0..1_usize << superblock.index_partitions_log2).map(|_| IndexPartition::default()).collect();
    let bitmap_partitions = 1 << superblock.bitmap_partitions_log2;
    VolumeState {
        partitions: segments,
        space: SpaceAllocator::new(superblock.data_start_unit, superblock.data_units, bitmap_partitions, fit),
        position,
    }
}

/// Recovers the state of a volume, without writing.
///
/// # Errors
/// [`OpenError`], if there is no volume, it is damaged, or the device fails.
pub(super) async fn load_volume(device: &dyn Device) -> Result<RecoveredState, OpenError> {
    let (superblock, damaged) = read_superblock(device).await?;
    let geometry = device.geometry();
    let need_bytes = superblock.units() * u64::from(superblock.unit_bytes);
    if geometry.bytes() < need_bytes {
        return Err(OpenError::TooSmall { have_bytes: geometry.bytes(), need_bytes });
    }
    if geometry.block_bytes > superblock.unit_bytes {
        let (block_bytes, unit_bytes) = (geometry.block_bytes, superblock.unit_bytes);
        return Err(OpenError::BlockTooLarge { block_bytes, unit_bytes });
    }
    let mut loader = Recovery {
        device,
        superblock,
        unit_blocks: u64::from(superblock.unit_bytes / geometry.block_bytes),
        partitions: empty_state(&superblock, JournalPosition::default(), FitPolicy::Next).partitions,
        damaged_copies: damaged,
        dropped_entries: 0,
        has_unverified: false,
        is_from_second_copy: false,
    };
    loader.read_checkpoint().await?;
    let position = loader.replay().await?;
    let space = loader.rebuild_bitmap()?;
    let Recovery {
        partitions: segments,
        damaged_copies,
        dropped_entries: dropped,
        has_unverified: has_doubtful,
        ..
    } = loader;
    // Checkpoint now: later batches mark these durable, so a future replay would skip their verification; and both copies
    // of the last batches may differ.
    let must_checkpoint = has_doubtful || damaged_copies > 0;
    Ok(RecoveredState {
        superblock,
        partitions: segments,
        space,
        position,
        dropped_entries: dropped,
        damaged_copies,
        needs_checkpoint: must_checkpoint,
    })
}

struct Recovery<'a> {
    device: &'a dyn Device,
    superblock: Superblock,
    unit_blocks: u64,
    partitions: Box<[IndexPartition]>,
    damaged_copies: u64,
    dropped_entries: u64,
    /// Whether there are batches that are not known durable.
    has_unverified: bool,
    /// Whether the last batch was read from the second copy.
    is_from_second_copy: bool,
}

/// Bytes per read of a checkpoint or journal.
const READ_CHUNK_BYTES: usize = 1 << 20;
/// The longest read of a checkpoint image, in bytes: a device takes less than 2 GiB at once, and a header may claim more.
const READ_BYTES_MAX: usize = 64 << 20;

impl Recovery<'_> {
    fn unit_bytes(&self) -> usize {
        self.superblock.unit_bytes as usize
    }

    /// Reads `bytes` from the byte `offset` after `unit`, at any alignment, in parts of at most [`READ_BYTES_MAX`]. Memory
    /// grows with what the device has returned, not with what a header claims.
    async fn read(&self, unit: u64, offset: u64, bytes: usize) -> Result<Vec<u8>, OpenError> {
        let unit_bytes = self.unit_bytes() as u64;
        let mut first = unit + offset / unit_bytes;
        let mut within = (offset % unit_bytes) as usize;
        let mut found = Vec::new();
        while found.len() < bytes {
            let rest = (within + bytes - found.len()).next_multiple_of(self.unit_bytes());
            let buffer = Buffer::zeroed(rest.min(READ_BYTES_MAX));
            let buffer = self.device.read(Lba(first * self.unit_blocks), buffer).await.into_read()?;
            found.extend_from_slice(&buffer[within..]);
            first += buffer.len() as u64 / unit_bytes;
            within = 0;
        }
        found.truncate(bytes);
        Ok(found)
    }

    /// Reads a part of one of two copies; empty if the device fails, since the other copy may be readable.
    async fn read_copy_or_empty(&self, unit: u64, offset: u64, bytes: usize) -> Vec<u8> {
        self.read(unit, offset, bytes).await.unwrap_or_default()
    }

    async fn read_checkpoint(&mut self) -> Result<(), OpenError> {
        let Some(area) = self.superblock.checkpoint.area else { return Ok(()) };
        let total = self.superblock.checkpoint.bytes;
        let (mut window, mut window_at, mut offset) = (Vec::new(), 0_u64, 0_u64);
        for index in 0..self.partitions.len() {
            let rest = total - offset;
            let first = self.superblock.area_start_unit(area, 0);
            // After an image from the other copy, the next may begin beyond this window.
            let mut image = window.get((offset - window_at) as usize..).unwrap_or(&[]);
            let need = checkpoint::UncheckedImage(image).claimed_bytes().unwrap_or(IMAGE_HEADER_BYTES);
            if image.len() < need {
                window_at = offset;
                let bytes = (READ_CHUNK_BYTES as u64).min(rest) as usize;
                window = self.read_copy_or_empty(first, offset, bytes).await;
                image = &window;
                let need = checkpoint::UncheckedImage(image).claimed_bytes().unwrap_or(0);
                if need > window.len() && need as u64 <= rest {
                    window = self.read_copy_or_empty(first, offset, need).await;
                    image = &window;
                }
            }
            offset += match self.load_image(index, image) {
                Some(image_bytes) => image_bytes,
                None => self.load_second_copy(index, area, offset, rest).await?,
            } as u64;
        }
        Ok(())
    }

    /// Loads a partition's image from the second copy.
    async fn load_second_copy(
        &mut self,
        index: usize,
        area: u8,
        offset: u64,
        rest: u64,
    ) -> Result<usize, OpenError> {
        let first = self.superblock.area_start_unit(area, 1);
        self.damaged_copies += 1;
        let lbas = [0, 1].map(|copy| {
            let start = self.superblock.area_start_unit(area, copy);
            (start + offset / self.unit_bytes() as u64) * self.unit_blocks
        });
        let structure = MetadataStructure::CheckpointImage { partition: index as u32 };
        let damaged = OpenError::CopiesUnreadable { structure, lbas };
        let header = self.read_copy_or_empty(first, offset, IMAGE_HEADER_BYTES).await;
        let need = checkpoint::UncheckedImage(&header).claimed_bytes().ok_or(damaged)?;
        if need as u64 > rest {
            return Err(damaged);
        }
        let image = self.read_copy_or_empty(first, offset, need).await;
        self.load_image(index, &image).ok_or(damaged)
    }

    fn load_image(&mut self, index: usize, image: &[u8]) -> Option<usize> {
        let (header, slots) = checkpoint::UncheckedImage(image).check()?;
        let PartitionImageHeader {
            volume_id: volume,
            checkpoint_id: checkpoint,
            partition: segment,
            applied_through: applied,
        } = header;
        let expected = (self.superblock.volume_id, self.superblock.checkpoint.id, index as u32);
        if (volume, checkpoint, segment) != expected {
            return None;
        }
        let decode_entry = |bytes: &[u8]| IndexEntry::from_bytes(bytes.try_into().expect("sixteen bytes"));
        if slots.chunks_exact(INDEX_ENTRY_BYTES).any(|bytes| decode_entry(bytes).is_none()) {
            return None;
        }
        let mut state = self.partitions[index].state.lock();
        state.applied_through = applied;
        state.table.reserve(slots.len() / INDEX_ENTRY_BYTES);
        for entry in slots.chunks_exact(INDEX_ENTRY_BYTES).filter_map(decode_entry) {
            state.table.insert(entry.tag(), entry.record_ref());
        }
        Some(IMAGE_HEADER_BYTES + slots.len())
    }

    /// Replays the journal from the checkpoint on, and gives the position of the next batch.
    async fn replay(&mut self) -> Result<JournalPosition, OpenError> {
        let ring = self.superblock.journal_units;
        let most = batch_units_max(self.superblock.unit_bytes);
        let start = self.superblock.checkpoint;
        let mut at = JournalPosition {
            unit: start.journal_unit,
            batch: start.batch,
            entry: start.entry + 1,
            units_used: 0,
        };
        let mut incarnation = start.incarnation;
        let mut unverified: Vec<(u64, u64, Vec<JournalEntry>)> = Vec::new();
        let mut from_second: Vec<u64> = Vec::new();
        let mut windows = [RingWindow::default(), RingWindow::default()];
        loop {
            if at.unit + most > ring {
                at.units_used += u64::from(ring - at.unit);
                at.unit = 0;
            }
            let Some((header, units, entries)) = self.read_batch(&mut windows, at, incarnation).await? else {
                break;
            };
            // A batch that is not known durable may be in one copy alone; the others were written to both.
            if self.is_from_second_copy {
                from_second.push(header.batch);
            }
            let known_durable = from_second.partition_point(|&batch| batch <= header.flushed_through);
            self.damaged_copies += from_second.drain(..known_durable).count() as u64;
            incarnation = header.incarnation;
            at.entry = header.first_entry + entries.len() as u64;
            unverified.push((header.batch, header.first_entry, entries));
            at = JournalPosition {
                unit: at.unit + units,
                batch: at.batch + 1,
                units_used: at.units_used + u64::from(units),
                ..at
            };
            // Known durable: apply without verification, which also keeps the list short.
            let durable = unverified.partition_point(|(batch, ..)| *batch <= header.flushed_through);
            for (_, first, entries) in unverified.drain(..durable) {
                for (entry, number) in entries.iter().zip(first..) {
                    self.apply(entry, number)?;
                }
            }
            if at.units_used >= u64::from(ring) {
                break;
            }
        }
        self.check_journal_gap(at, incarnation).await?;
        self.has_unverified = !unverified.is_empty();
        self.verify_and_apply(unverified).await?;
        Ok(at)
    }

    /// Whether the checkpoint image of the entry's partition includes it.
    fn is_applied(&self, entry: &JournalEntry, number: u64) -> bool {
        let (partition, _) = partition_and_tag(entry.hash, self.superblock.index_partitions_log2);
        number <= self.partitions[partition].state.lock().applied_through
    }

    fn apply(&mut self, entry: &JournalEntry, number: u64) -> Result<(), OpenError> {
        if self.is_applied(entry, number) {
            return Ok(());
        }
        let (partition, tag) = partition_and_tag(entry.hash, self.superblock.index_partitions_log2);
        let mut state = self.partitions[partition].state.lock();
        state.applied_through = number;
        let before = apply_to_table(&mut state.table, tag, entry);
        if entry.old_location != 0 && before.is_none() {
            // Its predecessor was written by an earlier entry, or is in the image.
            return Err(OpenError::Inconsistent {
                lba: entry.old_location * self.unit_blocks,
                mismatch: IndexMismatch::MissingPredecessor { entry: number },
            });
        }
        Ok(())
    }

    /// Applies batches that are not known durable: an entry whose record is incomplete is dropped, and a later entry that
    /// replaces it replaces its predecessor instead.
    async fn verify_and_apply(
        &mut self,
        batches: Vec<(u64, u64, Vec<JournalEntry>)>,
    ) -> Result<(), OpenError> {
        let mut replacements: FxHashMap<(u128, u64), u64> = FxHashMap::default();
        for (_, first, entries) in batches {
            for (mut entry, number) in entries.into_iter().zip(first..) {
                // An entry in an image is durable, and its old space may be in use by another record.
                if self.is_applied(&entry, number) {
                    continue;
                }
                if let Some(&old) = replacements.get(&(entry.hash, entry.old_location)) {
                    entry.old_location = old;
                }
                let is_trusted = entry.new_location == 0
                    || bug_injection::is_injected(InjectedBug::SkipRecordVerification);
                if is_trusted {
                    self.apply(&entry, number)?;
                } else if let Some(key) = self.intact_record_key(&entry).await {
                    let skips_check = bug_injection::is_injected(InjectedBug::SkipPredecessorCheck);
                    if entry.old_location != 0 && !skips_check && !self.verify_predecessor(&entry, &key).await
                    {
                        entry.old_location = 0;
                    }
                    self.apply(&entry, number)?;
                } else {
                    self.dropped_entries += 1;
                    replacements.insert((entry.hash, entry.new_location), entry.old_location);
                }
            }
        }
        Ok(())
    }

    /// Whether the record that an entry names, and the one that it replaces, are within the record area. A valid checksum
    /// does not imply valid fields.
    fn is_plausible(&self, entry: &JournalEntry) -> bool {
        let (first, end) = (self.superblock.data_start_unit, self.superblock.units());
        let units = u64::from(entry.units);
        let is_new_plausible = entry.new_location == 0
            || ((1..=RECORD_UNITS_MAX).contains(&units)
                && (first..end).contains(&entry.new_location)
                && entry.new_location + units <= end);
        is_new_plausible && (entry.old_location == 0 || (first..end).contains(&entry.old_location))
    }

    /// The key of an entry's record, if the record is intact. An unreadable record counts as intact with an unknown key:
    /// later reads of the key then report the device failure.
    async fn intact_record_key(&self, entry: &JournalEntry) -> Option<Option<Vec<u8>>> {
        let bytes = entry.units as usize * self.unit_bytes();
        let Ok(buffer) = self.read(entry.new_location, 0, bytes).await else { return Some(None) };
        let (header, key) = record::UncheckedRecord(&buffer).header().ok()?;
        let identity = header.identity;
        let same = identity.volume_id == self.superblock.volume_id
            && identity.location == entry.new_location
            && identity.sequence == entry.sequence;
        (same && header.value_range(&buffer).is_ok()).then(|| Some(key.to_vec()))
    }

    /// Whether the predecessor of an entry is its own key's record. A crash can prevent the amendment of an entry that
    /// names another key's record with the same tag: that record is then intact at its location, or the other key has
    /// replaced it. The own key's record may be overwritten, since its space was free.
    async fn verify_predecessor(&self, entry: &JournalEntry, key: &Option<Vec<u8>>) -> bool {
        let (partition, tag) = partition_and_tag(entry.hash, self.superblock.index_partitions_log2);
        let record_ref = {
            let state = self.partitions[partition].state.lock();
            state.table.lookup(tag).find(|record_ref| record_ref.location == entry.old_location)
        };
        let (Some(old_record), Some(key)) = (record_ref, key) else { return record_ref.is_some() };
        let bytes = record::HEADER_AND_KEY_BYTES_MAX.next_multiple_of(self.unit_bytes());
        let bytes = bytes.min(old_record.units as usize * self.unit_bytes());
        let Ok(buffer) = self.read(old_record.location, 0, bytes).await else { return true };
        let Ok((header, found_key)) = record::UncheckedRecord(&buffer).header() else { return true };
        let identity = header.identity;
        let is_there = identity.volume_id == self.superblock.volume_id
            && identity.location == old_record.location
            && fingerprint(identity.sequence) == old_record.fingerprint;
        // A record that matches by fingerprint alone has another tag.
        let is_of_tag = |key: &[u8]| {
            let hash = Key::new(key).map(|key| hash_of(&self.superblock, &key));
            hash.is_some_and(|hash| {
                partition_and_tag(hash, self.superblock.index_partitions_log2) == (partition, tag)
            })
        };
        !is_there || found_key == key || !is_of_tag(found_key)
    }

    /// The batch expected at a position, from the first copy that has it; `None` at the end of the journal.
    async fn read_batch(
        &mut self,
        windows: &mut [RingWindow; 2],
        at: JournalPosition,
        incarnation: u32,
    ) -> Result<Option<(journal::BatchHeader, u32, Vec<JournalEntry>)>, OpenError> {
        let mut unreadable = 0;
        for (copy, window) in windows.iter_mut().enumerate() {
            self.fill_window(window, copy as u64, at.unit).await;
            let bytes = &window.bytes[(at.unit - window.first) as usize * self.unit_bytes()..];
            unreadable += u32::from(bytes.is_empty());
            let Some(batch) = journal::UncheckedBatch(bytes).check(self.superblock.unit_bytes) else {
                continue;
            };
            let header = batch.header;
            let expected = header.volume_id == self.superblock.volume_id && header.batch == at.batch;
            if expected && header.incarnation >= incarnation {
                // The crash may have torn the other copy; one intact copy is enough.
                let entries: Vec<JournalEntry> = batch.entries().collect();
                if header.first_entry >= COUNT_MAX || !entries.iter().all(|entry| self.is_plausible(entry)) {
                    let lba = self.journal_lbas(at.unit)[copy];
                    let mismatch = IndexMismatch::ImpossibleBatch { batch: at.batch };
                    return Err(OpenError::Inconsistent { lba, mismatch });
                }
                self.is_from_second_copy = copy == 1;
                return Ok(Some((header, batch.units, entries)));
            }
        }
        if unreadable == 2 {
            // It is unknown whether there was a batch.
            return Err(self.batch_unreadable(at));
        }
        Ok(None)
    }

    /// The first block of each copy of the journal's `unit`.
    fn journal_lbas(&self, unit: u32) -> [u64; 2] {
        [0, 1].map(|copy| (self.superblock.journal_start_unit(copy) + u64::from(unit)) * self.unit_blocks)
    }

    fn batch_unreadable(&self, at: JournalPosition) -> OpenError {
        let structure = MetadataStructure::JournalBatch { batch: at.batch };
        OpenError::CopiesUnreadable { structure, lbas: self.journal_lbas(at.unit) }
    }

    /// Fills the window with at least the batch at `unit`. If the device cannot read a whole window, with that batch alone;
    /// if it cannot read that either, with nothing.
    async fn fill_window(&self, window: &mut RingWindow, copy: u64, unit: u32) {
        let batch_units = batch_units_max(self.superblock.unit_bytes);
        let units_held = (window.bytes.len() / self.unit_bytes()) as u32;
        if window.first <= unit && unit + batch_units <= window.first + units_held {
            return;
        }
        let units = ((READ_CHUNK_BYTES / self.unit_bytes()) as u32).min(self.superblock.journal_units - unit);
        let first = self.superblock.journal_start_unit(copy) + u64::from(unit);
        window.first = unit;
        window.bytes = self.read_copy_or_empty(first, 0, units as usize * self.unit_bytes()).await;
        if window.bytes.is_empty() {
            window.bytes = self.read_copy_or_empty(first, 0, batch_units as usize * self.unit_bytes()).await;
        }
    }

    /// Checks that no batch after the end of the journal was written after its predecessor was durable, or marks it as
    /// durable. If there is one, a batch in between is damaged in both copies and its changes are lost.
    async fn check_journal_gap(&mut self, end: JournalPosition, incarnation: u32) -> Result<(), OpenError> {
        let most = batch_units_max(self.superblock.unit_bytes);
        let ring = self.superblock.journal_units;
        for copy in 0..2 {
            for from in [end.unit, 0] {
                // At least one of so many batches waited for the first, however many were in flight together.
                let units = ((LEADERS_MAX as u32 + 1) * most).min(ring - from);
                let first = self.superblock.journal_start_unit(copy) + u64::from(from);
                let bytes = self.read_copy_or_empty(first, 0, units as usize * self.unit_bytes()).await;
                for start in (0..bytes.len()).step_by(self.unit_bytes()) {
                    let batch = journal::UncheckedBatch(&bytes[start..]).check(self.superblock.unit_bytes);
                    let later = batch.is_some_and(|batch| {
                        batch.header.volume_id == self.superblock.volume_id
                            && batch.header.batch > end.batch
                            && batch.header.incarnation >= incarnation
                            && (!batch.header.is_predecessor_unflushed
                                || batch.header.flushed_through >= end.batch)
                    });
                    if later {
                        return Err(self.batch_unreadable(end));
                    }
                }
            }
        }
        Ok(())
    }

    /// Marks the space of every record as used.
    fn rebuild_bitmap(&self) -> Result<SpaceAllocator, OpenError> {
        let space = empty_state(&self.superblock, JournalPosition::default(), FitPolicy::Next).space;
        for partition in &self.partitions {
            for entry in partition.state.lock().table.iter_from(0) {
                let RecordRef { location, units, .. } = entry.record_ref();
                if !space.mark_used(Extent { location, units }) {
                    // The checksums are valid, so only a bug of ours wrote this.
                    let is_outside = location < self.superblock.data_start_unit
                        || location + units > self.superblock.units();
                    let mismatch = match is_outside {
                        true => IndexMismatch::OutsideRecordArea { units },
                        false => IndexMismatch::OverlappingRecords { units },
                    };
                    return Err(OpenError::Inconsistent { lba: location * self.unit_blocks, mismatch });
                }
            }
        }
        Ok(space)
    }
}

/// The part of the ring that was read last.
#[derive(Default)]
struct RingWindow {
    first: u32,
    bytes: Vec<u8>,
}
