//! Open: a volume's index is found again after any crash.
//!
//! ```text
//!   superblock (highest generation) ─▶ checkpoint images ─▶ journal batches from the checkpoint on
//!        ─▶ records of the last batches verified ─▶ bitmap from the index ─▶ new incarnation ─▶ open
//! ```
//! No step reads the whole device. Every block of metadata has two copies; where one is damaged the other
//! is used. Invariants: nothing is written before everything was read; an entry whose record is not whole
//! is passed over only where no flush vouches for it, and then its key keeps the value before.

use super::HashEngine;
use super::allocator::{Extent, Fit, Space};
use super::checkpoint::{self, IMAGE_HEADER_BYTES, ImageHeader, write_superblock};
use super::commit_queue::{JournalPosition, LEADERS_MAX};
pub use super::error::OpenError;
use super::format::{FormatSettings, plan};
use super::index::{SLOT_BYTES, Slot, UNITS_MAX, check_of};
use super::journal::{self, Entry, batch_units_max};
use super::record;
use super::superblock::{
    COUNT_MAX, NotOurs, SUPERBLOCK_BYTES, SUPERBLOCK_STRIDE_BYTES, SUPERBLOCKS, Superblock, Unchecked,
};
use super::volume::{Contents, OpenSettings, Segment, Volume, apply, hash_of, split};
use crate::bug_injection::{self, Bug};
use octokv_base::map::Map;
use octokv_base::{Buffer, Key, Lba, Pool};
use octokv_device::Device;
use octokv_runtime::give_back;
use std::rc::Rc;
use std::sync::Arc;

/// Opens the volume on a device for use by `settings.cores` cores, and finds its index again. A volatile
/// device is formatted with `format` first.
pub async fn open(
    device: &Rc<dyn Device>,
    pool: &Pool,
    settings: OpenSettings,
    format: &FormatSettings,
) -> Result<Arc<Volume>, OpenError> {
    let geometry = device.geometry();
    if geometry.volatile {
        let superblock = plan(geometry, format)?;
        let contents = empty_contents(&superblock, JournalPosition::default(), Fit::First);
        return Ok(Volume::new(superblock, contents, geometry.block_bytes, true, settings));
    }
    let mut loaded = load(&**device).await?;
    loaded.superblock.incarnation += 1;
    loaded.superblock.generation += 1;
    loaded.superblock.clean = false;
    write_superblock(&**device, &loaded.superblock).await?;
    let contents = Contents { segments: loaded.segments, space: loaded.space, position: loaded.position };
    let volume = Volume::new(loaded.superblock, contents, geometry.block_bytes, false, settings);
    volume.commits.release_before(JournalPosition { used: 0, ..loaded.position });
    if loaded.must_checkpoint {
        let engine = HashEngine::new(Arc::clone(&volume), 0, Rc::clone(device), pool.clone());
        engine.checkpoint(false).await?;
    }
    // What recovery needed besides the index.
    give_back();
    Ok(volume)
}

/// What a volume holds, read without writing anything.
pub(super) struct Loaded {
    pub(super) superblock: Superblock,
    pub(super) segments: Box<[Segment]>,
    pub(super) space: Space,
    pub(super) position: JournalPosition,
    /// Journal entries passed over because their records are not whole.
    pub(super) dropped: u64,
    /// Blocks of metadata whose other copy was used.
    pub(super) damaged_copies: u64,
    must_checkpoint: bool,
}

fn empty_contents(superblock: &Superblock, position: JournalPosition, fit: Fit) -> Contents {
    let segments = (0..1_usize << superblock.segments_log2).map(|_| Segment::default()).collect();
    let partitions = 1 << superblock.partitions_log2;
    Contents {
        segments,
        space: Space::new(superblock.data_first, superblock.data_units, partitions, fit),
        position,
    }
}

/// Reads what a volume holds.
pub(super) async fn load(device: &dyn Device) -> Result<Loaded, OpenError> {
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
    let mut loader = Loader {
        device,
        superblock,
        unit_blocks: u64::from(superblock.unit_bytes / geometry.block_bytes),
        segments: empty_contents(&superblock, JournalPosition::default(), Fit::Next).segments,
        damaged_copies: damaged,
        dropped: 0,
        has_doubtful: false,
        from_second_copy: false,
    };
    loader.read_checkpoint().await?;
    let position = loader.replay().await?;
    let space = loader.claim_space()?;
    let Loader { segments, damaged_copies, dropped, has_doubtful, .. } = loader;
    // Batches to come call those durable that were read, and what they say would then be taken as it stands; nor is it
    // known whether both copies of the last ones are whole, or say the same.
    let must_checkpoint = has_doubtful || damaged_copies > 0;
    Ok(Loaded { superblock, segments, space, position, dropped, damaged_copies, must_checkpoint })
}

/// The newest superblock, and how many damaged copies were met.
async fn read_superblock(device: &dyn Device) -> Result<(Superblock, u64), OpenError> {
    let geometry = device.geometry();
    let area_bytes = SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES;
    if geometry.bytes() < area_bytes {
        return Err(OpenError::TooSmall { have_bytes: geometry.bytes(), need_bytes: area_bytes });
    }
    let (mut found, mut failed) = (Vec::new(), None);
    for place in 0..SUPERBLOCKS {
        let at = Lba(place * SUPERBLOCK_STRIDE_BYTES / u64::from(geometry.block_bytes));
        let buffer = Buffer::zeroed(SUPERBLOCK_STRIDE_BYTES as usize);
        found.push(match device.read(at, buffer).await.into_read() {
            Ok(bytes) => Unchecked(bytes[..SUPERBLOCK_BYTES].try_into().expect("512 bytes")).check(),
            Err(error) => {
                failed = Some(error);
                Err(NotOurs::Damaged)
            }
        });
    }
    let newest = found.iter().filter_map(|found| found.ok()).max_by_key(|superblock| superblock.generation);
    let Some(newest) = newest else {
        if let Some(error) = failed {
            return Err(error.into());
        }
        let errors: Vec<NotOurs> = found.iter().filter_map(|found| found.err()).collect();
        let telling = |error: &&NotOurs| matches!(error, NotOurs::Version(_) | NotOurs::Engine(_));
        let damaged = errors.contains(&NotOurs::Damaged).then_some(&NotOurs::Damaged);
        let error = errors.iter().find(telling).or(damaged).unwrap_or(&errors[0]);
        return Err(OpenError::NotOurs(*error));
    };
    let is_damaged = |at: usize| matches!(found[at], Err(NotOurs::Damaged | NotOurs::Foreign));
    // A crash tears at most one copy of a generation: with both gone, the newest may be among them.
    if (is_damaged(0) && is_damaged(2)) || (is_damaged(1) && is_damaged(3)) {
        return Err(OpenError::Damaged { what: "superblock", lba: 0 });
    }
    let damaged = (0..4).filter(|&at| is_damaged(at)).count() as u64;
    Ok((newest, damaged))
}

struct Loader<'a> {
    device: &'a dyn Device,
    superblock: Superblock,
    unit_blocks: u64,
    segments: Box<[Segment]>,
    damaged_copies: u64,
    dropped: u64,
    /// Whether there are batches that no flush vouches for.
    has_doubtful: bool,
    /// Whether the batch that was read last came from the second copy.
    from_second_copy: bool,
}

/// Bytes per read of a checkpoint or journal.
const WINDOW_BYTES: usize = 1 << 20;

impl Loader<'_> {
    fn unit_bytes(&self) -> usize {
        self.superblock.unit_bytes as usize
    }

    /// Reads `bytes` from the byte `offset` after `unit`, whatever their alignment.
    async fn read(&self, unit: u64, offset: u64, bytes: usize) -> Result<Vec<u8>, OpenError> {
        let unit_bytes = self.unit_bytes() as u64;
        let first = unit + offset / unit_bytes;
        let within = (offset % unit_bytes) as usize;
        let buffer = Buffer::zeroed((within + bytes).next_multiple_of(self.unit_bytes()));
        let buffer = self.device.read(Lba(first * self.unit_blocks), buffer).await.into_read()?;
        Ok(buffer[within..within + bytes].to_vec())
    }

    /// Reads a part of one of two copies; nothing where the device cannot, for the other copy may do.
    async fn read_copy(&self, unit: u64, offset: u64, bytes: usize) -> Vec<u8> {
        self.read(unit, offset, bytes).await.unwrap_or_default()
    }

    async fn read_checkpoint(&mut self) -> Result<(), OpenError> {
        let Some(area) = self.superblock.checkpoint.area else { return Ok(()) };
        let total = self.superblock.checkpoint.bytes;
        let (mut window, mut window_at, mut offset) = (Vec::new(), 0_u64, 0_u64);
        for index in 0..self.segments.len() {
            let rest = total - offset;
            let first = self.superblock.area_first(area, 0);
            // Where an image was taken from the other copy, the next may begin behind this window.
            let mut image = window.get((offset - window_at) as usize..).unwrap_or(&[]);
            let need = checkpoint::Unchecked(image).claimed_bytes().unwrap_or(IMAGE_HEADER_BYTES);
            if image.len() < need || image.is_empty() {
                window_at = offset;
                let bytes = (WINDOW_BYTES as u64).min(rest) as usize;
                window = self.read_copy(first, offset, bytes).await;
                image = &window;
                let need = checkpoint::Unchecked(image).claimed_bytes().unwrap_or(0);
                if need > window.len() && need as u64 <= rest {
                    window = self.read_copy(first, offset, need).await;
                    image = &window;
                }
            }
            offset += match self.take_image(index, image) {
                Some(taken) => taken,
                None => self.take_other_copy(index, area, offset, rest).await?,
            } as u64;
        }
        Ok(())
    }

    /// Takes a partition's image over from the second copy.
    async fn take_other_copy(
        &mut self,
        index: usize,
        area: u8,
        offset: u64,
        rest: u64,
    ) -> Result<usize, OpenError> {
        let first = self.superblock.area_first(area, 1);
        self.damaged_copies += 1;
        let lba = (first + offset / self.unit_bytes() as u64) * self.unit_blocks;
        let damaged = OpenError::Damaged { what: "checkpoint", lba };
        if rest < IMAGE_HEADER_BYTES as u64 {
            return Err(damaged);
        }
        let header = self.read_copy(first, offset, IMAGE_HEADER_BYTES).await;
        let need = checkpoint::Unchecked(&header).claimed_bytes().ok_or(damaged)?;
        if need as u64 > rest {
            return Err(damaged);
        }
        let image = self.read_copy(first, offset, need).await;
        self.take_image(index, &image).ok_or(damaged)
    }

    fn take_image(&mut self, index: usize, image: &[u8]) -> Option<usize> {
        let (header, slots) = checkpoint::Unchecked(image).check()?;
        let ImageHeader { volume, checkpoint, segment, applied } = header;
        let expected = (self.superblock.volume, self.superblock.checkpoint.id, index as u32);
        if (volume, checkpoint, segment) != expected {
            return None;
        }
        let slot = |bytes: &[u8]| Slot::from_bytes(bytes.try_into().expect("sixteen bytes"));
        if slots.chunks_exact(SLOT_BYTES).any(|bytes| slot(bytes).is_none()) {
            return None;
        }
        let mut entries = self.segments[index].entries.lock();
        entries.applied = applied;
        entries.table.reserve(slots.len() / SLOT_BYTES);
        for slot in slots.chunks_exact(SLOT_BYTES).filter_map(slot) {
            entries.table.insert(slot.tag(), slot.place());
        }
        Some(IMAGE_HEADER_BYTES + slots.len())
    }

    /// Applies the journal from the checkpoint on, and gives where it goes on.
    async fn replay(&mut self) -> Result<JournalPosition, OpenError> {
        let ring = self.superblock.journal_units;
        let most = batch_units_max(self.superblock.unit_bytes);
        let start = self.superblock.checkpoint;
        let mut at =
            JournalPosition { unit: start.journal_unit, batch: start.batch, entry: start.entry + 1, used: 0 };
        let mut incarnation = start.incarnation;
        let mut kept: Vec<(u64, u64, Vec<Entry>)> = Vec::new();
        let mut from_second: Vec<u64> = Vec::new();
        let mut windows = [Window::default(), Window::default()];
        loop {
            if at.unit + most > ring {
                at.used += u64::from(ring - at.unit);
                at.unit = 0;
            }
            let Some((header, units, entries)) = self.batch_at(&mut windows, at, incarnation).await? else {
                break;
            };
            // A batch that nobody calls durable may have reached one copy alone; others were written to both.
            if self.from_second_copy {
                from_second.push(header.batch);
            }
            let vouched = from_second.partition_point(|&batch| batch <= header.flushed_through);
            self.damaged_copies += from_second.drain(..vouched).count() as u64;
            incarnation = header.incarnation;
            at.entry = header.first_entry + entries.len() as u64;
            kept.push((header.batch, header.first_entry, entries));
            at = JournalPosition {
                unit: at.unit + units,
                batch: at.batch + 1,
                used: at.used + u64::from(units),
                ..at
            };
            // Durable, so nothing of it needs to be verified: apply it, and keep the list short.
            let durable = kept.partition_point(|(batch, ..)| *batch <= header.flushed_through);
            for (_, first, entries) in kept.drain(..durable) {
                for (entry, number) in entries.iter().zip(first..) {
                    self.apply(entry, number)?;
                }
            }
            if at.used >= u64::from(ring) {
                break;
            }
        }
        self.refuse_a_gap(at, incarnation).await?;
        self.has_doubtful = !kept.is_empty();
        self.apply_verified(kept).await?;
        Ok(at)
    }

    /// Whether the checkpoint's image of the entry's partition has it already.
    fn is_applied(&self, entry: &Entry, number: u64) -> bool {
        let (segment, _) = split(entry.hash, self.superblock.segments_log2);
        number <= self.segments[segment].entries.lock().applied
    }

    fn apply(&mut self, entry: &Entry, number: u64) -> Result<(), OpenError> {
        if self.is_applied(entry, number) {
            return Ok(());
        }
        let (segment, tag) = split(entry.hash, self.superblock.segments_log2);
        let mut entries = self.segments[segment].entries.lock();
        entries.applied = number;
        let before = apply(&mut entries.table, tag, entry);
        if entry.old != 0 && before.is_none() {
            // What it replaces was written by an entry before it, or is in the image.
            return Err(OpenError::Damaged { what: "index entry", lba: entry.old * self.unit_blocks });
        }
        Ok(())
    }

    /// Applies batches that no flush vouches for: an entry whose record is not whole is passed over, and a
    /// later entry of the key that would replace it replaces what it would have replaced.
    async fn apply_verified(&mut self, batches: Vec<(u64, u64, Vec<Entry>)>) -> Result<(), OpenError> {
        let mut instead: Map<(u128, u64), u64> = Map::default();
        for (_, first, entries) in batches {
            for (mut entry, number) in entries.into_iter().zip(first..) {
                // What an image has is durable, and its old space may be somebody else's by now.
                if self.is_applied(&entry, number) {
                    continue;
                }
                if let Some(&old) = instead.get(&(entry.hash, entry.old)) {
                    entry.old = old;
                }
                let trusted = entry.new == 0 || bug_injection::is(Bug::TrustTornRecords);
                if trusted {
                    self.apply(&entry, number)?;
                } else if let Some(key) = self.whole_record(&entry).await {
                    let unread = bug_injection::is(Bug::ReplaceUnread);
                    if entry.old != 0 && !unread && !self.may_replace(&entry, &key).await {
                        entry.old = 0;
                    }
                    self.apply(&entry, number)?;
                } else {
                    self.dropped += 1;
                    instead.insert((entry.hash, entry.new), entry.old);
                }
            }
        }
        Ok(())
    }

    /// Whether an entry names a record that the volume can hold: a checksum vouches for bytes, not for sense.
    fn is_possible(&self, entry: &Entry) -> bool {
        let (first, end) = (self.superblock.data_first, self.superblock.units());
        let units = u64::from(entry.units);
        entry.new == 0
            || ((1..=UNITS_MAX).contains(&units)
                && (first..end).contains(&entry.new)
                && entry.new + units <= end)
    }

    /// The key of an entry's record, if that was written whole. One that the device cannot read counts as
    /// written, with a key that nobody knows: whoever asks for it is told of the device's failure.
    async fn whole_record(&self, entry: &Entry) -> Option<Option<Vec<u8>>> {
        let bytes = entry.units as usize * self.unit_bytes();
        let Ok(buffer) = self.read(entry.new, 0, bytes).await else { return Some(None) };
        let (header, key) = record::Unchecked(&buffer).header().ok()?;
        let identity = header.identity;
        let same = identity.volume == self.superblock.volume
            && identity.location == entry.new
            && identity.stamp == entry.stamp;
        (same && header.value(&buffer).is_ok()).then(|| Some(key.to_vec()))
    }

    /// Whether what an entry would replace is its own key's. A crash can have come before an entry was mended
    /// that named another key's record of the same tag: then that record is where the index has it, or the
    /// other key has given it up. Its own key's may be there no more, for its space was free.
    async fn may_replace(&self, entry: &Entry, key: &Option<Vec<u8>>) -> bool {
        let (segment, tag) = split(entry.hash, self.superblock.segments_log2);
        let place = {
            let entries = self.segments[segment].entries.lock();
            entries.table.lookup(tag).find(|place| place.location == entry.old)
        };
        let (Some(place), Some(key)) = (place, key) else { return place.is_some() };
        let bytes = super::FRONT_BYTES.next_multiple_of(self.unit_bytes());
        let bytes = bytes.min(place.units as usize * self.unit_bytes());
        let Ok(buffer) = self.read(place.location, 0, bytes).await else { return true };
        let Ok((header, found)) = record::Unchecked(&buffer).header() else { return true };
        let identity = header.identity;
        let is_there = identity.volume == self.superblock.volume
            && identity.location == place.location
            && check_of(identity.stamp) == place.check;
        // What merely looks like it by its check is of some other tag.
        let is_of_tag = |key: &[u8]| {
            let hash = Key::new(key).map(|key| hash_of(&self.superblock, &key));
            hash.is_some_and(|hash| split(hash, self.superblock.segments_log2) == (segment, tag))
        };
        !is_there || found == key || !is_of_tag(found)
    }

    /// The batch expected at a position, from whichever copy has it.
    async fn batch_at(
        &mut self,
        windows: &mut [Window; 2],
        at: JournalPosition,
        incarnation: u32,
    ) -> Result<Option<(journal::BatchHeader, u32, Vec<Entry>)>, OpenError> {
        let mut unreadable = 0;
        for (copy, window) in windows.iter_mut().enumerate() {
            self.fill(window, copy as u64, at.unit).await;
            let bytes = &window.bytes[(at.unit - window.first) as usize * self.unit_bytes()..];
            unreadable += u32::from(bytes.is_empty());
            let Some(batch) = journal::Unchecked(bytes).check(self.superblock.unit_bytes) else { continue };
            let header = batch.header;
            let expected = header.volume == self.superblock.volume && header.batch == at.batch;
            if expected && header.incarnation >= incarnation {
                // A copy that is only older was torn by the crash; a second one that is right is enough.
                let entries: Vec<Entry> = batch.entries().collect();
                let lba = (self.superblock.journal_first(0) + u64::from(at.unit)) * self.unit_blocks;
                if header.first_entry >= COUNT_MAX || !entries.iter().all(|entry| self.is_possible(entry)) {
                    return Err(OpenError::Damaged { what: "journal batch", lba });
                }
                self.from_second_copy = copy == 1;
                return Ok(Some((header, batch.units, entries)));
            }
        }
        if unreadable == 2 {
            // Whether there was a batch cannot be known.
            let lba = (self.superblock.journal_first(0) + u64::from(at.unit)) * self.unit_blocks;
            return Err(OpenError::Damaged { what: "journal batch", lba });
        }
        Ok(None)
    }

    /// Has the window hold a batch at `unit`; where the device cannot read so much at once, that batch alone,
    /// and where it cannot even that, nothing.
    async fn fill(&self, window: &mut Window, copy: u64, unit: u32) {
        let most = batch_units_max(self.superblock.unit_bytes);
        let units_held = (window.bytes.len() / self.unit_bytes()) as u32;
        if window.first <= unit && unit + most <= window.first + units_held {
            return;
        }
        let units = ((WINDOW_BYTES / self.unit_bytes()) as u32).min(self.superblock.journal_units - unit);
        let first = self.superblock.journal_first(copy) + u64::from(unit);
        window.first = unit;
        window.bytes = self.read_copy(first, 0, units as usize * self.unit_bytes()).await;
        if window.bytes.is_empty() {
            window.bytes = self.read_copy(first, 0, most as usize * self.unit_bytes()).await;
        }
    }

    /// After the end of the journal no later batch can be that waited for the one before, or knows it to be
    /// durable: if there is one, a batch in between is damaged in both copies, and what it changed is not
    /// known.
    async fn refuse_a_gap(&mut self, end: JournalPosition, incarnation: u32) -> Result<(), OpenError> {
        let most = batch_units_max(self.superblock.unit_bytes);
        let ring = self.superblock.journal_units;
        for copy in 0..2 {
            for from in [end.unit, 0] {
                // Of that many one has waited for the first, whichever were under way together.
                let units = ((LEADERS_MAX as u32 + 1) * most).min(ring - from);
                let first = self.superblock.journal_first(copy) + u64::from(from);
                let bytes = self.read_copy(first, 0, units as usize * self.unit_bytes()).await;
                for start in (0..bytes.len()).step_by(self.unit_bytes()) {
                    let batch = journal::Unchecked(&bytes[start..]).check(self.superblock.unit_bytes);
                    let later = batch.is_some_and(|batch| {
                        batch.header.volume == self.superblock.volume
                            && batch.header.batch > end.batch
                            && batch.header.incarnation >= incarnation
                            && (!batch.header.unflushed || batch.header.flushed_through >= end.batch)
                    });
                    if later {
                        let lba = (self.superblock.journal_first(0) + u64::from(end.unit)) * self.unit_blocks;
                        return Err(OpenError::Damaged { what: "journal batch", lba });
                    }
                }
            }
        }
        Ok(())
    }

    /// Marks the space of every record as used.
    fn claim_space(&self) -> Result<Space, OpenError> {
        let space = empty_contents(&self.superblock, JournalPosition::default(), Fit::Next).space;
        for segment in &self.segments {
            for slot in segment.entries.lock().table.from(0) {
                let place = slot.place();
                if !space.claim(Extent { location: place.location, units: place.units }) {
                    // Two keys on one place: the checksums held, so only a bug of ours wrote this.
                    let lba = place.location * self.unit_blocks;
                    return Err(OpenError::Damaged { what: "index", lba });
                }
            }
        }
        Ok(space)
    }
}

/// A part of the ring that was read.
#[derive(Default)]
struct Window {
    first: u32,
    bytes: Vec<u8>,
}
