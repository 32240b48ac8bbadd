//! Recovery: opens a volume of the ordered engine and rebuilds memtables and version after any crash.
//!
//! ```text
//!   superblock (highest generation) ─▶ image of the version ─▶ journal from the oldest memtable on: entries that no table has, edits that the image lacks
//!        ─▶ records of the last batches verified ─▶ free space from the version ─▶ new incarnation ─▶ open, segments sealed
//! ```
//! No step reads the whole device, or any table. All metadata has two copies; if one is damaged, the other is used.
//! Invariants: nothing is written before everything is read; an entry whose record is incomplete is dropped only if its batch is not known durable, and its key then
//! keeps the previous value; what was dropped does not come back: the entries before it are flushed and the journal is released before the volume is used.

use super::core::LsmCore;
use super::edit_parts::EditAssembler;
use super::entry::{EntryValue, TreeEntry};
use super::format;
use super::journal::{ChangeContents, JournalChange};
use super::memtables::{MemtableBounds, Memtables};
use super::reclaim::ReclaimQueue;
use super::settings::TreeSettings;
use super::superblock::LsmSuperblock;
use super::version_edit::VersionEdit;
use super::version_image::{VersionImageFormat, VersionImageLoader};
use super::version_set::VersionSet;
use super::volume::{LsmVolume, TreeState, space_beside};
use crate::bug_injection::{self, InjectedBug};
use crate::common::image_stream::{ImageLost, ImageReader};
use crate::common::journal::JournalPosition;
use crate::common::journal_reader::{JournalReader, JournalRing, ReplayTarget, UnverifiedBatch};
use crate::common::record::{UncheckedRecord, record_bytes};
use crate::common::superblock_io::{read_superblock, write_superblock};
use crate::common::unit_reader::UnitReader;
use crate::common::volume_layout::Checkpoint;
use crate::open_error::{IndexMismatch, MetadataStructure, OpenError};
use crate::{FormatConfig, OpenConfig, TreeOptions};
use octokv_base::{BufferPool, Version};
use octokv_device::Device;
use octokv_runtime::trim_heap;
use std::rc::Rc;
use std::sync::Arc;

/// Attempts to read a record that is not known durable. An unreadable record counts as intact, and the previous value is gone then: an error that passes must not
/// decide.
const RECORD_READ_ATTEMPTS: u32 = 3;

/// The highest number of a segment that a volume is opened with: far beyond what a volume writes in its life, and below what would overflow.
const SEGMENT_ID_MAX: u32 = u32::MAX - (1 << 28);

/// Opens the volume on a device for `config.cores` cores. A volatile device is formatted with `format` first.
///
/// # Errors
/// [`OpenError`], if there is no volume, it is damaged, or the device fails.
pub async fn open(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    config: OpenConfig,
    format: &FormatConfig,
) -> Result<Arc<LsmVolume>, OpenError> {
    open_with(device, pool, config, format, |_| {}).await
}

/// The same, with other sizes.
///
/// # Errors
/// As for [`open`].
pub async fn open_with(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    config: OpenConfig,
    format: &FormatConfig,
    adjust: impl FnOnce(&mut TreeSettings),
) -> Result<Arc<LsmVolume>, OpenError> {
    let geometry = device.geometry();
    if geometry.volatile {
        format::format(&**device, format).await?;
    }
    let (mut superblock, damaged) = read_tree_superblock(&**device).await?;
    let mut settings = TreeSettings::for_layout(&superblock.layout, config.cache_bytes);
    let TreeOptions { iterator_idle, prefetch, compresses } = config.tree;
    (settings.iterator_idle, settings.prefetch, settings.compresses) = (iterator_idle, prefetch, compresses);
    settings.pacing.compaction_max = config.compact_bytes_per_second;
    adjust(&mut settings);
    let loaded = load(&**device, superblock, damaged, settings.memtable_bounds()).await?;
    superblock.incarnation += 1;
    superblock.generation += 1;
    superblock.is_clean_shutdown = false;
    write_superblock(&**device, &superblock).await?;
    let volume = LsmVolume::new(superblock, loaded.state, geometry.block_bytes, config, settings);
    let core = LsmCore::new(Arc::clone(&volume), 0, Rc::clone(device), pool.clone());
    match loaded.needs_checkpoint {
        true => core.checkpoint_recovered().await?,
        false => core.seal_recovered().await?,
    }
    // Returns the memory that recovery needed besides the memtables.
    trim_heap();
    Ok(volume)
}

/// The newest superblock of a device that is large enough for its volume, and how many are damaged.
///
/// # Errors
/// [`OpenError`].
pub(super) async fn read_tree_superblock(device: &dyn Device) -> Result<(LsmSuperblock, u64), OpenError> {
    let (superblock, damaged) = read_superblock::<LsmSuperblock>(device).await?;
    superblock.layout.check_device(device.geometry())?;
    Ok((superblock, damaged))
}

/// The recovered state of a volume. Recovery up to here writes nothing.
pub(super) struct RecoveredTree {
    pub state: TreeState,
    /// Journal entries that were dropped because their records are incomplete.
    pub dropped_entries: u64,
    /// Metadata structures of which one copy is damaged.
    pub damaged_copies: u64,
    needs_checkpoint: bool,
}

/// Recovers the state of a volume, without writing.
///
/// # Errors
/// [`OpenError`], if it is damaged, or the device fails.
pub(super) async fn load(
    device: &dyn Device,
    superblock: LsmSuperblock,
    damaged_superblocks: u64,
    bounds: MemtableBounds,
) -> Result<RecoveredTree, OpenError> {
    let reader = UnitReader::new(device, superblock.layout.unit_bytes);
    let reclaim = ReclaimQueue::new();
    let (versions, damaged_images) = load_versions(reader, &superblock, &reclaim).await?;
    let Checkpoint { journal_unit, batch, entry, incarnation, .. } = superblock.checkpoint;
    let start = JournalPosition { unit: journal_unit, batch, entry: entry + 1, units_used: 0 };
    let mut replay = TreeReplay {
        reader,
        superblock,
        memtables: Memtables::new(start, entry, bounds),
        start,
        has_versions: superblock.has_versions,
        installed: superblock.image_entry,
        assembler: EditAssembler::default(),
        versions,
        reclaim: Arc::clone(&reclaim),
        dropped_entries: 0,
    };
    let ring = JournalRing {
        starts: [0, 1].map(|copy| superblock.layout.journal_start_unit(copy)),
        units: superblock.layout.journal_units,
        volume_id: superblock.volume_id,
    };
    let replayed = JournalReader::new(reader, ring).replay(start, incarnation, &mut replay).await?;
    let is_undecided = !replayed.unverified.is_empty() || replayed.is_end_uncertain;
    replay.verify_and_apply(replayed.unverified).await?;
    let TreeReplay { memtables, versions, has_versions, installed, dropped_entries, .. } = replay;
    // What came and went during replay is free space like any other.
    drop(reclaim.take());
    let version = versions.current();
    let layout = &superblock.layout;
    let lba = reader.lba(layout.data_start_unit).0;
    let inconsistent = OpenError::Inconsistent { lba, mismatch: IndexMismatch::TreeSpace };
    version.check_extents(layout.record_units()).map_err(|_| inconsistent)?;
    if version.last_segment_id() > SEGMENT_ID_MAX {
        let mismatch = IndexMismatch::TreeImage;
        return Err(OpenError::Inconsistent { lba, mismatch });
    }
    let space = space_beside(&superblock, version.extents()).ok_or(inconsistent)?;
    let damaged_copies = damaged_superblocks + damaged_images + replayed.damaged_copies;
    let state = TreeState { memtables, versions, space, position: replayed.end, has_versions, installed };
    Ok(RecoveredTree {
        state,
        dropped_entries,
        damaged_copies,
        // Later batches would mark these durable, so that a future replay would skip their verification; and what this recovery could not read, the next one could.
        needs_checkpoint: is_undecided || damaged_copies > 0,
    })
}

/// The version of the checkpoint, or an empty one, and the damaged copies of its images.
async fn load_versions(
    reader: UnitReader<'_>,
    superblock: &LsmSuperblock,
    reclaim: &Arc<ReclaimQueue>,
) -> Result<(VersionSet, u64), OpenError> {
    let inconsistent = |mismatch| OpenError::Inconsistent { lba: 0, mismatch };
    let Checkpoint { area: Some(area), bytes, id, .. } = superblock.checkpoint else {
        let empty = VersionSet::new(super::tree_version::TreeVersion::default(), Arc::clone(reclaim));
        return Ok((empty.map_err(|_| inconsistent(IndexMismatch::TreeImage))?, 0));
    };
    let starts = [0, 1].map(|copy| superblock.layout.area_start_unit(area, copy));
    let mut images = ImageReader::new(reader, starts, bytes);
    let mut loader = VersionImageLoader::new(superblock.volume_id, id, Arc::clone(reclaim));
    let mut image = 0;
    while !loader.is_done() {
        let loaded = images.next::<VersionImageFormat>(|bytes| loader.load(bytes)).await;
        loaded.map_err(|ImageLost(lbas)| OpenError::CopiesUnreadable {
            structure: MetadataStructure::CheckpointImage { partition: image },
            lbas,
        })?;
        image += 1;
    }
    let lba = reader.lba(starts[0]).0;
    let mismatch = IndexMismatch::TreeImage;
    let version = loader
        .finish(superblock.layout.record_units())
        .map_err(|_| OpenError::Inconsistent { lba, mismatch })?;
    let versions = VersionSet::new(version, Arc::clone(reclaim));
    Ok((versions.map_err(|_| OpenError::Inconsistent { lba, mismatch })?, images.damaged_copies()))
}

/// The replay of a journal.
struct TreeReplay<'a> {
    reader: UnitReader<'a>,
    superblock: LsmSuperblock,
    memtables: Memtables,
    start: JournalPosition,
    has_versions: bool,
    /// The number of the last change whose edit is in the version.
    installed: u64,
    assembler: EditAssembler,
    versions: VersionSet,
    reclaim: Arc<ReclaimQueue>,
    dropped_entries: u64,
}

impl TreeReplay<'_> {
    /// Applies batches that are not known durable: an entry whose record is incomplete is dropped.
    async fn verify_and_apply(
        &mut self,
        batches: Vec<UnverifiedBatch<JournalChange>>,
    ) -> Result<(), OpenError> {
        for UnverifiedBatch { first_entry, entries, .. } in batches {
            for (change, number) in entries.into_iter().zip(first_entry..) {
                let is_intact = match change.contents(number) {
                    ChangeContents::Entry(entry) => self.has_intact_record(&entry).await,
                    ChangeContents::EditPart(_) | ChangeContents::Cancelled => true,
                };
                if is_intact || bug_injection::is_injected(InjectedBug::SkipRecordVerification) {
                    self.apply(&change, number)?;
                } else {
                    self.dropped_entries += 1;
                    self.apply_nothing(number)?;
                }
            }
        }
        Ok(())
    }

    /// Whether the record of an entry that needs one is what was written; true if it cannot be read: later reads of the key then report it.
    async fn has_intact_record(&self, entry: &TreeEntry<'_>) -> bool {
        let EntryValue::InSegment(address) = entry.value else { return true };
        let version = self.versions.current();
        if entry.sequence <= version.flushed_through() {
            return true;
        }
        let Some(segment) = version.segment(address.segment) else { return false };
        let location = segment.extent().location + u64::from(address.unit);
        let bytes = record_bytes(entry.key.len(), address.value_bytes as usize);
        let units = bytes.div_ceil(self.reader.unit_bytes()) as u64;
        if u64::from(address.unit) + units > segment.extent().units {
            return false;
        }
        for _ in 0..RECORD_READ_ATTEMPTS {
            let read = self.reader.read(location, 0, units as usize * self.reader.unit_bytes()).await;
            let Ok(bytes) = read else { continue };
            let Ok((header, key)) = (UncheckedRecord { bytes: &bytes, location }).header() else {
                return false;
            };
            return header.identity.volume_id == self.superblock.volume_id
                && header.identity.location == location
                && header.identity.sequence == (u64::from(address.segment) << 32 | u64::from(address.unit))
                && key == entry.key
                && header.value_range(&bytes).is_ok_and(|value| value.len() == address.value_bytes as usize);
        }
        true
    }

    fn apply_nothing(&self, number: u64) -> Result<(), OpenError> {
        self.apply_entry(number, None)
    }

    /// Applies a change to the memtables.
    ///
    /// # Errors
    /// Its number is not above those before, which a batch with a valid checksum may say.
    fn apply_entry(&self, number: u64, entry: Option<&TreeEntry<'_>>) -> Result<(), OpenError> {
        let follows = number > self.memtables.last_number();
        if follows && self.memtables.apply(number, entry, || self.start) {
            return Ok(());
        }
        let lba = self.reader.lba(self.superblock.layout.journal_start_unit(0)).0;
        Err(OpenError::Inconsistent { lba, mismatch: IndexMismatch::TreeEdit { entry: number } })
    }

    fn install(&mut self, bytes: &[u8], number: u64) -> Result<(), OpenError> {
        let error = OpenError::Inconsistent {
            lba: self.reader.lba(self.superblock.layout.journal_start_unit(0)).0,
            mismatch: IndexMismatch::TreeEdit { entry: number },
        };
        let edit = VersionEdit::decode(bytes, &self.reclaim).map_err(|_| error)?;
        let version = self.versions.install(&edit).map_err(|_| error)?;
        self.installed = number;
        if edit.flushed_through.is_some() && !bug_injection::is_injected(InjectedBug::ReplayFlushed) {
            self.memtables.drop_through(version.flushed_through());
        }
        Ok(())
    }
}

impl ReplayTarget<JournalChange> for TreeReplay<'_> {
    /// Decoding has checked all that one change alone can show.
    fn is_plausible(&self, _change: &JournalChange) -> bool {
        true
    }

    fn apply(&mut self, change: &JournalChange, number: u64) -> Result<(), OpenError> {
        match change.contents(number) {
            ChangeContents::Entry(entry) => {
                self.has_versions |= entry.version > Version::NONE;
                let is_in_table = number <= self.versions.current().flushed_through()
                    && !bug_injection::is_injected(InjectedBug::ReplayFlushed);
                let entry = Some(&entry).filter(|_| !is_in_table);
                self.apply_entry(number, entry)?;
            }
            ChangeContents::EditPart(part) => {
                self.apply_nothing(number)?;
                if number > self.superblock.image_entry {
                    // Parts that do not follow each other are of an edit that a crash cut off.
                    if let Ok(Some(bytes)) = self.assembler.offer(part) {
                        self.install(&bytes, number)?;
                    }
                }
            }
            ChangeContents::Cancelled => self.apply_nothing(number)?,
        }
        Ok(())
    }
}
