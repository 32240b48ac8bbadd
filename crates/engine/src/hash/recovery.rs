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

use super::checkpoint::{self, IMAGE_HEADER_BYTES, PartitionImageHeader};
use super::engine::HashCore;
use super::format::layout;
use super::index::{INDEX_ENTRY_BYTES, IndexEntry, RECORD_UNITS_MAX, RecordRef, is_fingerprint_of};
use super::index_partition::IndexPartition;
use super::journal::IndexChange;
use super::piece_list::{Pieces, find_damage, load_pieces};
use super::superblock::HashSuperblock;
use super::volume::{HashVolume, VolumeState, hash_of, partition_and_tag};
use crate::bug_injection::{self, InjectedBug};
use crate::common::allocator::{Extent, FitPolicy, SpaceAllocator};
use crate::common::image_stream::{ImageLost, ImageReader};
use crate::common::journal::JournalPosition;
use crate::common::journal_reader::{JournalReader, JournalRing, ReplayTarget, UnverifiedBatch};
use crate::common::record::{self, RecordFlags, RecordHeader};
use crate::common::superblock_io::{read_superblock, write_superblock};
use crate::common::unit_reader::UnitReader;
use crate::common::volume_layout::Checkpoint;
use crate::open_error::{IndexMismatch, MetadataStructure, OpenError};
use crate::{FormatConfig, OpenConfig};
use octokv_base::BufferPool;
use octokv_base::map::{FxHashMap, FxHashSet};
use octokv_device::Device;
use octokv_runtime::trim_heap;
use std::cmp::Reverse;
use std::ops::Range;
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
) -> Result<Arc<HashVolume>, OpenError> {
    let geometry = device.geometry();
    if geometry.volatile {
        let superblock = layout(geometry, device.preferred_write_bytes(), format)?;
        let state = empty_state(&superblock, JournalPosition::default(), FitPolicy::First);
        return Ok(HashVolume::new(superblock, state, geometry.block_bytes, true, config));
    }
    let mut loaded = load_volume(&**device).await?;
    loaded.superblock.incarnation += 1;
    loaded.superblock.generation += 1;
    loaded.superblock.is_clean_shutdown = false;
    write_superblock(&**device, &loaded.superblock).await?;
    let state = VolumeState {
        partitions: loaded.partitions,
        space: loaded.space,
        position: loaded.position,
        lost_pieces: loaded.lost_pieces,
        values_in_pieces: loaded.values_in_pieces,
    };
    let (prepare_bytes, cores) = (config.prepare_bytes, config.cores);
    let volume = HashVolume::new(loaded.superblock, state, geometry.block_bytes, false, config);
    if loaded.needs_checkpoint {
        let core = HashCore::new(Arc::clone(&volume), 0, Rc::clone(device), pool.clone());
        core.checkpoint(false).await?;
    }
    volume.find_unwritten(&**device, prepare_bytes, cores);
    // Returns the memory that recovery needed besides the index.
    trim_heap();
    Ok(volume)
}

/// The recovered state of a volume. Recovery up to here writes nothing.
pub(super) struct RecoveredState {
    pub(super) superblock: HashSuperblock,
    pub(super) partitions: Box<[IndexPartition]>,
    pub(super) space: SpaceAllocator,
    /// Locations of records whose pieces are not known.
    pub(super) lost_pieces: FxHashSet<u64>,
    /// Entries of the index whose values are in pieces.
    pub(super) values_in_pieces: u64,
    pub(super) position: JournalPosition,
    /// Journal entries that were dropped because their records are incomplete.
    pub(super) dropped_entries: u64,
    /// Metadata structures of which one copy is damaged.
    pub(super) damaged_copies: u64,
    needs_checkpoint: bool,
}

fn empty_state(superblock: &HashSuperblock, position: JournalPosition, fit: FitPolicy) -> VolumeState {
    let segments =
        (0..1_usize << superblock.index_partitions_log2).map(|_| IndexPartition::default()).collect();
    let bitmap_partitions = 1 << superblock.bitmap_partitions_log2;
    VolumeState {
        partitions: segments,
        space: SpaceAllocator::new(
            superblock.layout.data_start_unit,
            superblock.layout.data_units,
            bitmap_partitions,
            fit,
        ),
        position,
        lost_pieces: FxHashSet::default(),
        values_in_pieces: 0,
    }
}

/// Recovers the state of a volume, without writing.
///
/// # Errors
/// [`OpenError`], if there is no volume, it is damaged, or the device fails.
pub(super) async fn load_volume(device: &dyn Device) -> Result<RecoveredState, OpenError> {
    let (superblock, damaged) = read_superblock::<HashSuperblock>(device).await?;
    superblock.layout.check_device(device.geometry())?;
    let mut loader = Recovery {
        reader: UnitReader::new(device, superblock.layout.unit_bytes),
        superblock,
        partitions: empty_state(&superblock, JournalPosition::default(), FitPolicy::Next).partitions,
        damaged_copies: damaged,
        dropped_entries: 0,
        is_undecided: false,
    };
    loader.read_checkpoint().await?;
    let position = loader.replay().await?;
    let (space, lost_pieces, values_in_pieces) = loader.rebuild_bitmap().await?;
    let Recovery { partitions, damaged_copies, dropped_entries, is_undecided, .. } = loader;
    // Checkpoint now: later batches mark these durable, so a future replay would skip their verification; both copies of the
    // last batches may differ; and what this recovery could not read, the next one could.
    let needs_checkpoint = is_undecided || damaged_copies > 0;
    Ok(RecoveredState {
        superblock,
        partitions,
        space,
        lost_pieces,
        values_in_pieces,
        position,
        dropped_entries,
        damaged_copies,
        needs_checkpoint,
    })
}

struct Recovery<'a> {
    reader: UnitReader<'a>,
    superblock: HashSuperblock,
    partitions: Box<[IndexPartition]>,
    damaged_copies: u64,
    dropped_entries: u64,
    /// Whether there are batches that are not known durable, or could be one that was unreadable.
    is_undecided: bool,
}

/// Attempts to read a record that is not known durable. An unreadable record counts as intact, and the previous value is
/// gone then: an error that passes must not decide.
const RECORD_READ_ATTEMPTS: u32 = 3;

impl Recovery<'_> {
    fn unit_bytes(&self) -> usize {
        self.reader.unit_bytes()
    }

    async fn read_checkpoint(&mut self) -> Result<(), OpenError> {
        let Checkpoint { area: Some(area), bytes, .. } = self.superblock.checkpoint else { return Ok(()) };
        let starts = [0, 1].map(|copy| self.superblock.layout.area_start_unit(area, copy));
        let mut images = ImageReader::new(self.reader, starts, bytes);
        for index in 0..self.partitions.len() {
            let loaded = images.next::<PartitionImageHeader>(|image| self.load_image(index, image)).await;
            loaded.map_err(|ImageLost(lbas)| OpenError::CopiesUnreadable {
                structure: MetadataStructure::CheckpointImage { partition: index as u32 },
                lbas,
            })?;
        }
        self.damaged_copies += images.damaged_copies();
        Ok(())
    }

    fn load_image(&self, index: usize, image: &[u8]) -> Option<usize> {
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
            state.load(self.superblock.format, entry);
        }
        Some(IMAGE_HEADER_BYTES + slots.len())
    }

    /// Replays the journal from the checkpoint on, and gives the position of the next batch.
    async fn replay(&mut self) -> Result<JournalPosition, OpenError> {
        let Checkpoint { journal_unit, batch, entry, incarnation, .. } = self.superblock.checkpoint;
        let start = JournalPosition { unit: journal_unit, batch, entry: entry + 1, units_used: 0 };
        let ring = JournalRing {
            starts: [0, 1].map(|copy| self.superblock.layout.journal_start_unit(copy)),
            units: self.superblock.layout.journal_units,
            volume_id: self.superblock.volume_id,
        };
        let replay = JournalReader::new(self.reader, ring).replay(start, incarnation, self).await?;
        self.damaged_copies += replay.damaged_copies;
        self.is_undecided = !replay.unverified.is_empty() || replay.is_end_uncertain;
        self.verify_and_apply(replay.unverified).await?;
        Ok(replay.end)
    }

    /// Whether the checkpoint image of the entry's partition includes it.
    fn is_applied(&self, entry: &IndexChange, number: u64) -> bool {
        let (partition, _) = partition_and_tag(entry.hash, self.superblock.index_partitions_log2);
        number <= self.partitions[partition].state.lock().applied_through
    }

    /// Applies batches that are not known durable: an entry whose record is incomplete is dropped, and a later entry that
    /// replaces it replaces its predecessor instead.
    async fn verify_and_apply(
        &mut self,
        batches: Vec<UnverifiedBatch<IndexChange>>,
    ) -> Result<(), OpenError> {
        let mut replacements: FxHashMap<(u128, u64), u64> = FxHashMap::default();
        for UnverifiedBatch { first_entry, entries, .. } in batches {
            for (mut entry, number) in entries.into_iter().zip(first_entry..) {
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
                    // As for a put: earlier versions let two keys of one tag take a damaged record at the same time.
                    if entry.new_location == 0 && self.predecessor(&entry).is_none() {
                        entry.old_location = 0;
                    }
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

    /// Reads an entry's record; `None` after [`RECORD_READ_ATTEMPTS`] failures.
    async fn read_record_of(&self, entry: &IndexChange) -> Option<Vec<u8>> {
        let bytes = entry.units as usize * self.unit_bytes();
        for _ in 0..RECORD_READ_ATTEMPTS {
            if let Ok(buffer) = self.reader.read(entry.new_location, 0, bytes).await {
                return Some(buffer);
            }
        }
        None
    }

    /// The key of an entry's record, if the record is intact. An unreadable record counts as intact with an unknown key:
    /// later reads of the key then report the device failure.
    async fn intact_record_key(&self, entry: &IndexChange) -> Option<Option<Vec<u8>>> {
        let Some(buffer) = self.read_record_of(entry).await else { return Some(None) };
        let (header, key) =
            record::UncheckedRecord { bytes: &buffer, location: entry.new_location }.header().ok()?;
        let identity = header.identity;
        let same = identity.volume_id == self.superblock.volume_id
            && identity.location == entry.new_location
            && identity.sequence == entry.sequence
            && header.meta.flags == entry.flags;
        let is_intact = match header.meta.flags.contains(RecordFlags::PIECES) {
            true => self.has_intact_pieces(&header, &buffer).await,
            false => header.value_range(&buffer).is_ok(),
        };
        (same && is_intact).then(|| Some(key.to_vec()))
    }

    /// Whether the pieces of a record are what was written; true if they cannot be read.
    async fn has_intact_pieces(&self, header: &RecordHeader, record: &[u8]) -> bool {
        if bug_injection::is_injected(InjectedBug::SkipPieceVerification) {
            return true;
        }
        for _ in 0..RECORD_READ_ATTEMPTS {
            match load_pieces(self.reader, &self.record_units(), header, record).await {
                Ok(Err(_)) => return false,
                Ok(Ok(pieces)) => {
                    if let Ok(damage) = find_damage(self.reader, &pieces, header.value_bytes).await {
                        return damage.is_none();
                    }
                }
                Err(_) => {}
            }
        }
        true
    }

    fn record_units(&self) -> Range<u64> {
        self.superblock.layout.record_units()
    }

    /// The sequence number of an index entry's record and its pieces; `None` if they cannot be found out.
    async fn pieces_of(&self, record_ref: RecordRef) -> Option<(u64, Pieces)> {
        for _ in 0..RECORD_READ_ATTEMPTS {
            if let Some(found) = self.read_pieces_of(record_ref).await {
                return Some(found);
            }
        }
        None
    }

    async fn read_pieces_of(&self, record_ref: RecordRef) -> Option<(u64, Pieces)> {
        let RecordRef { location, units, .. } = record_ref;
        let record = self.reader.read(location, 0, units as usize * self.unit_bytes()).await.ok()?;
        let (header, _) = record::UncheckedRecord { bytes: &record, location }.header().ok()?;
        if !is_fingerprint_of(self.superblock.format, record_ref, &header) {
            return None;
        }
        let pieces = load_pieces(self.reader, &self.record_units(), &header, &record).await.ok()?.ok()?;
        Some((header.identity.sequence, pieces))
    }

    /// The record that an entry replaces, if the index has it.
    fn predecessor(&self, entry: &IndexChange) -> Option<RecordRef> {
        let (partition, tag) = partition_and_tag(entry.hash, self.superblock.index_partitions_log2);
        let state = self.partitions[partition].state.lock();
        state.table.lookup(tag).find(|record_ref| record_ref.location == entry.old_location)
    }

    /// Whether the predecessor of an entry is its own key's record. A crash can prevent the amendment of an entry that
    /// names another key's record with the same tag: that record is then intact at its location, or the other key has
    /// replaced it. The own key's record may be overwritten, since its space was free.
    async fn verify_predecessor(&self, entry: &IndexChange, key: &Option<Vec<u8>>) -> bool {
        let (partition, tag) = partition_and_tag(entry.hash, self.superblock.index_partitions_log2);
        let record_ref = self.predecessor(entry);
        let (Some(old_record), Some(key)) = (record_ref, key) else { return record_ref.is_some() };
        let bytes = record::HEADER_AND_KEY_BYTES_MAX.next_multiple_of(self.unit_bytes());
        let bytes = bytes.min(old_record.units as usize * self.unit_bytes());
        let Ok(buffer) = self.reader.read(old_record.location, 0, bytes).await else { return true };
        let unchecked = record::UncheckedRecord { bytes: &buffer, location: old_record.location };
        let Ok((header, found_key)) = unchecked.header() else { return true };
        let identity = header.identity;
        let is_there = identity.volume_id == self.superblock.volume_id
            && identity.location == old_record.location
            && is_fingerprint_of(self.superblock.format, old_record, &header);
        // A record that matches by fingerprint alone has another tag.
        let is_of_tag = |key: &[u8]| {
            let hash = hash_of(&self.superblock, key);
            partition_and_tag(hash, self.superblock.index_partitions_log2) == (partition, tag)
        };
        !is_there || found_key == key || !is_of_tag(found_key)
    }

    /// Marks the space of every record as used, and of its pieces. Gives the locations of the records whose pieces are not known: those
    /// values are lost, and their space is free; and the number of values in pieces.
    async fn rebuild_bitmap(&self) -> Result<(SpaceAllocator, FxHashSet<u64>, u64), OpenError> {
        let (space, mut in_pieces) = self.mark_records()?;
        let values_in_pieces = in_pieces.len() as u64;
        if let Some(lost) = self.mark_pieces(&space, &mut in_pieces).await {
            return Ok((space, lost, values_in_pieces));
        }
        // A list that an earlier opening could not read names space that it gave to others. Newer records have that now.
        in_pieces.sort_unstable_by_key(|&(sequence, _)| Reverse(sequence));
        let (space, _) = self.mark_records()?;
        let mut lost = FxHashSet::default();
        for (_, record_ref) in in_pieces {
            match self.pieces_of(record_ref).await {
                Some((_, pieces)) if mark_all_used(&space, &pieces) => {}
                Some(_) | None => drop(lost.insert(record_ref.location)),
            }
        }
        Ok((space, lost, values_in_pieces))
    }

    /// Marks the units of each record. Gives the space, and the records whose values are in pieces.
    fn mark_records(&self) -> Result<(SpaceAllocator, Vec<(u64, RecordRef)>), OpenError> {
        let space = empty_state(&self.superblock, JournalPosition::default(), FitPolicy::Next).space;
        let mut in_pieces = Vec::new();
        for partition in &self.partitions {
            for entry in partition.state.lock().table.iter_from(0) {
                let record_ref = entry.record_ref();
                let RecordRef { location, units, .. } = record_ref;
                if !space.mark_used(Extent { location, units }) {
                    // The checksums are valid, so only a bug of ours wrote this.
                    let is_outside = location < self.superblock.layout.data_start_unit
                        || location + units > self.superblock.layout.units();
                    let mismatch = match is_outside {
                        true => IndexMismatch::OutsideRecordArea { units },
                        false => IndexMismatch::OverlappingRecords { units },
                    };
                    return Err(OpenError::Inconsistent { lba: self.reader.lba(location).0, mismatch });
                }
                if record_ref.flags(self.superblock.format).contains(RecordFlags::PIECES) {
                    in_pieces.push((0, record_ref));
                }
            }
        }
        Ok((space, in_pieces))
    }

    /// Marks the pieces of records, and notes the sequence number of each. Gives the locations of those that are lost; `None` if
    /// a piece is marked already.
    async fn mark_pieces(
        &self,
        space: &SpaceAllocator,
        in_pieces: &mut [(u64, RecordRef)],
    ) -> Option<FxHashSet<u64>> {
        let (mut lost, mut is_overlapping) = (FxHashSet::default(), false);
        for (record_sequence, record_ref) in in_pieces {
            match self.pieces_of(*record_ref).await {
                Some((sequence, pieces)) => {
                    *record_sequence = sequence;
                    is_overlapping |= !mark_all_used(space, &pieces);
                }
                None => drop(lost.insert(record_ref.location)),
            }
        }
        (!is_overlapping).then_some(lost)
    }
}

/// Marks all space of a value as used; marks nothing, and gives false, if a part is marked already.
fn mark_all_used(space: &SpaceAllocator, pieces: &Pieces) -> bool {
    let marked = pieces.extents().take_while(|&extent| space.mark_used(extent)).count();
    let is_all = marked == pieces.extents().count();
    if !is_all {
        pieces.extents().take(marked).for_each(|extent| space.release(extent));
    }
    is_all
}

impl ReplayTarget<IndexChange> for Recovery<'_> {
    /// Whether the record that an entry names, and the one that it replaces, are within the record area.
    fn is_plausible(&self, entry: &IndexChange) -> bool {
        let (first, end) = (self.superblock.layout.data_start_unit, self.superblock.layout.units());
        let units = u64::from(entry.units);
        let is_new_plausible = entry.new_location == 0
            || ((1..=RECORD_UNITS_MAX).contains(&units)
                && (first..end).contains(&entry.new_location)
                && entry.new_location + units <= end);
        is_new_plausible && (entry.old_location == 0 || (first..end).contains(&entry.old_location))
    }

    fn apply(&mut self, entry: &IndexChange, number: u64) -> Result<(), OpenError> {
        if self.is_applied(entry, number) {
            return Ok(());
        }
        let (partition, tag) = partition_and_tag(entry.hash, self.superblock.index_partitions_log2);
        let mut state = self.partitions[partition].state.lock();
        state.applied_through = number;
        let before = state.apply(self.superblock.format, tag, entry);
        if entry.old_location != 0 && before.is_none() {
            // Its predecessor was written by an earlier entry, or is in the image.
            return Err(OpenError::Inconsistent {
                lba: self.reader.lba(entry.old_location).0,
                mismatch: IndexMismatch::MissingPredecessor { entry: number },
            });
        }
        Ok(())
    }
}
