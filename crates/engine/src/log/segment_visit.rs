//! A visit of value compaction: the records of one segment that lie in the window move to the tail of the value log.
//!
//! ```text
//!   segment held ─▶ entries in the window, a group of some 256 KiB ─▶ records read, unless they were before, appended, written
//!      ▲                                                               │
//!      └── again, until none is left: visited ◀── replaced under the lock ── unless an operation has replaced the entry meanwhile
//! ```
//! In: a segment, the window of its store. Out: its image without places in the window, dirty. Invariants: an entry is changed only if it
//! has the place from which its record was read; version, expiry and length stay; a record in extents moves as a whole.
//! Tested in `compaction_tests.rs`.

use super::busy_segments::ChangeSource;
use super::core::{LogCore, device_error};
use super::hash_prefix::{HashPrefix, SegmentNumber};
use super::key_compaction::DAMAGE_READS;
use super::log_place::{ChunkIndex, LogKind};
use super::pinned_chunks::is_passing_error;
use super::prepared_visits::{PreparedVisit, ReadRecords};
use super::record_reads::RecordRead;
use super::records_to_move::{RecordToMove, VisitTarget, VisitedChunks};
use super::segment_buckets::image_units;
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::segment_image::OldValue;
use super::segment_reads::{FoundImage, HeldSegment};
use super::space_limits::ChunkPurpose;
use super::space_pass::{CompactionPass, CompactionSpace};
use super::store::{EntryChange, Store, StoreState, note_vacated};
use super::value_record::{NewValueRecord, ValueRecordPlace, check_value_record, record_granules};
use super::value_writes::AppendedValue;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use crate::common::media_errors::is_media_error;
use futures_util::future::join_all;
use octokv_base::Buffer;
use octokv_base::map::FxHashSet;
use octokv_device::DeviceError;
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The records that a visit moves at once have so many bytes, or one of them more.
const GROUP_BYTES: usize = 256 << 10;

/// The value of a record that was read.
enum MovedValue {
    /// From a read of this record: the buffer, and the range of the value in it.
    Alone(Buffer, Range<usize>),
    /// From a shared read: the bytes of the record, and the range of the value in them.
    WithOthers(Box<[u8]>, Range<usize>),
}

impl MovedValue {
    fn bytes(&self) -> &[u8] {
        match self {
            MovedValue::Alone(buffer, value) => &buffer[value.clone()],
            MovedValue::WithOthers(record, value) => &record[value.clone()],
        }
    }
}

/// What was read of a record.
enum MovedRecord {
    /// Its value.
    Intact(MovedValue),
    /// It is damaged.
    Damaged,
    /// Its chunk was given up meanwhile, so its entry was replaced.
    Replaced,
}

/// What became of an entry whose record was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EntryMove {
    /// It has the new place.
    Changed,
    /// An operation has replaced it.
    Replaced,
    /// The segment has no room for a longer place.
    NoRoom,
}

/// How a visit ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct VisitEnd {
    /// The entries that it changed.
    pub moved: u32,
    /// Whether no record in the window is left. Otherwise there was no space for some, on the device or in the segment.
    pub is_complete: bool,
    /// Whether there was none on the device.
    pub is_short: bool,
}

/// A visit in progress.
struct SegmentVisit<'a> {
    target: VisitTarget,
    /// Records that were read with those of other segments.
    read: ReadRecords,
    moved: u32,
    /// The keys whose records are left to a later visit.
    left: FxHashSet<Vec<u8>>,
    /// Whether one was left because the device has no space.
    is_short: bool,
    /// A record that the device failed to read, and that is left, too.
    failure: Option<EngineError>,
    /// The right to append the image of the segment, once a record has moved.
    image: Option<CompactionPass<'a>>,
}

impl LogCore {
    /// Moves the records of a segment that a visit is for. The pass is for the image of a segment that was changed: until
    /// that is published.
    ///
    /// # Errors
    /// Device failures, behind which the other records were moved; no memory. The segment is not visited.
    pub(super) async fn visit_segment<'a>(
        &'a self,
        store: &Store,
        PreparedVisit { prefix, image, records, .. }: PreparedVisit,
        target: VisitTarget,
    ) -> (Result<VisitEnd, EngineError>, Option<CompactionPass<'a>>) {
        let mut visit = SegmentVisit {
            target,
            read: records,
            moved: 0,
            left: FxHashSet::default(),
            is_short: false,
            failure: None,
            image: None,
        };
        let end = self.run_visit(store, (prefix, image), &mut visit).await;
        (end, visit.image)
    }

    async fn run_visit<'a>(
        &'a self,
        store: &Store,
        (prefix, image): (HashPrefix, Option<FoundImage>),
        visit: &mut SegmentVisit<'a>,
    ) -> Result<VisitEnd, EngineError> {
        let held = self.acquire_with(store, prefix, image).await?;
        let opens = self.volume.pool.opens_now();
        self.volume.counters.visits.fetch_add(1, Ordering::Relaxed);
        loop {
            let group = held.with(|state, segment| {
                self.drop_stale_entries(state, segment);
                let group = self.next_group(state, segment, visit);
                if group.is_empty() && visit.left.is_empty() && visit.target == VisitTarget::Window {
                    state.set_visited(segment);
                }
                group
            });
            if group.is_empty() {
                if let Some(failure) = visit.failure {
                    return Err(failure);
                }
                let is_complete = visit.left.is_empty();
                return Ok(VisitEnd { moved: visit.moved, is_complete, is_short: visit.is_short });
            }
            self.move_group(store, &held, &group, opens, visit).await?;
        }
    }

    /// The right to append the image of a segment; `None` if space is short.
    fn image_pass(&self, store: &Store, held: &HeldSegment<'_>) -> Option<CompactionPass<'_>> {
        let layout = self.volume.layout();
        let entry_bytes = held.with(|state, segment| state.busy.image(segment).entry_bytes());
        // Places may become longer.
        let chain = image_units(entry_bytes, layout.unit_bytes).unwrap_or(layout.chain_max());
        let units = u32::from(chain.saturating_add(1).min(layout.chain_max()));
        let space = CompactionSpace::Image { store: store.id, units };
        let pass = self.volume.passes.begin_compaction(&self.volume.pool, space)?;
        self.volume.counters.compaction_image_units.fetch_add(units.into(), Ordering::Relaxed);
        Some(pass)
    }

    /// Entries of a segment with records in the window: all, or as many as are moved at once.
    fn next_group(
        &self,
        state: &mut StoreState,
        segment: SegmentNumber,
        visit: &SegmentVisit<'_>,
    ) -> Vec<RecordToMove> {
        let chunks = match visit.target {
            VisitTarget::Window => match &state.window {
                Some(window) => VisitedChunks::Indices(state.values.head()..window.reach()),
                None => return Vec::new(),
            },
            VisitTarget::Pinned(chunk) => VisitedChunks::One(chunk),
        };
        let mut bytes = 0;
        let records = self.records_in(state.busy.image(segment), &chunks);
        let to_move = records.filter(|record| !visit.left.contains(&record.key));
        let fits = |record: &RecordToMove| {
            let has_room = bytes == 0 || bytes + record.record_bytes() as usize <= GROUP_BYTES;
            bytes += record.record_bytes() as usize;
            has_room
        };
        to_move.take_while(fits).collect()
    }

    /// Moves records to the tail. Those that find no space, or no room in the segment, are left.
    async fn move_group<'a>(
        &'a self,
        store: &Store,
        held: &HeldSegment<'_>,
        group: &[RecordToMove],
        opens: u64,
        visit: &mut SegmentVisit<'a>,
    ) -> Result<(), EngineError> {
        let read = group.iter().map(|record| visit.read.take(&record.at)).collect::<Vec<_>>();
        let reads =
            group.iter().zip(read).map(|(record, read)| self.read_to_move(store, record, read, opens));
        let (mut appended, mut failure) = (Vec::with_capacity(group.len()), None);
        for (record, read) in group.iter().zip(join_all(reads).await) {
            let new = match read {
                Ok(MovedRecord::Intact(_)) if !self.may_move(store, held, record, visit.target) => {
                    // The window does not reach to it any more; a pinned chunk keeps it.
                    if visit.target != VisitTarget::Window {
                        visit.is_short = true;
                        visit.left.insert(record.key.clone());
                    }
                    continue;
                }
                Ok(MovedRecord::Intact(value)) => {
                    self.append_moved(store, held, record, value.bytes(), &mut visit.image).map(Some)
                }
                Ok(MovedRecord::Damaged) => Ok(None),
                // A later visit finds its new place: space is not short.
                Ok(MovedRecord::Replaced) => {
                    visit.left.insert(record.key.clone());
                    continue;
                }
                // It may be read later.
                Err(error) if is_passing_error(&error) => {
                    visit.failure = Some(error);
                    visit.left.insert(record.key.clone());
                    continue;
                }
                Err(error) => Err(error),
            };
            match new {
                Ok(new) => appended.push((record, new)),
                Err(EngineError::Device { error: DeviceError::NoSpace, .. }) => {
                    visit.is_short = true;
                    visit.left.insert(record.key.clone());
                }
                Err(error) => {
                    failure = Some(error);
                    break;
                }
            }
        }
        let writes = appended.iter_mut().map(|(_, new)| async move {
            match new {
                Some(new) => new.written(self).await,
                None => Ok(()),
            }
        });
        let written = join_all(writes).await;
        held.with(|state, segment| {
            for ((record, new), _) in appended.iter().zip(&written).filter(|(_, written)| written.is_ok()) {
                let at = new.as_ref().map(|new| new.place().clone());
                match self.replace_moved(state, segment, record, at) {
                    EntryMove::Changed => visit.moved += 1,
                    EntryMove::Replaced => {}
                    EntryMove::NoRoom => {
                        visit.left.insert(record.key.clone());
                    }
                }
            }
        });
        // Their entries are in the image, or will be in none.
        drop(appended);
        match failure.or(written.into_iter().find_map(Result::err)) {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Whether a record is moved now. One that has no part in the head chunk is left to a later round if that would take the chunks in
    /// which the records of the head chunk go: this visit and the others move those alone then. How much a round moves is only expected
    /// before it begins, and segments may have much more than the others.
    fn may_move(
        &self,
        store: &Store,
        held: &HeldSegment<'_>,
        record: &RecordToMove,
        target: VisitTarget,
    ) -> bool {
        let head = held.with(|state, _| state.values.head());
        let head_end = ChunkIndex(head.0 + 1);
        if self.is_in(&record.old_value(), &VisitedChunks::Indices(head..head_end)) {
            return true;
        }
        let (layout, limits) = (self.volume.layout(), self.volume.pool.limits());
        // For each round that moves records of its head: the chunks of the longest record and of its image, and one for the rest of each log.
        let rounds = self.volume.compactions.count(LogKind::Values).max(1);
        let of_head = rounds * (2 + limits.value - limits.key);
        let of_record = store.tail.lock().chunks_of(record.record_bytes().div_ceil(1 << layout.granule_log2));
        let has_space = self.volume.passes.spare_chunks(&self.volume.pool) >= of_record + of_head;
        if !has_space && target == VisitTarget::Window {
            held.with(|state, _| {
                if let Some(window) = &mut state.window {
                    window.set_reach(head_end);
                }
            });
        }
        has_space
    }

    /// Returns the value of a record: from `read`, the bytes that a shared read has given, if they are intact, or else from the device in at most [`DAMAGE_READS`] reads.
    async fn read_to_move(
        &self,
        store: &Store,
        record: &RecordToMove,
        read: Option<Box<[u8]>>,
        opens: u64,
    ) -> Result<MovedRecord, EngineError> {
        if let Some(read) = read
            && let Some(value) = self.value_in(store, &read, record)
        {
            self.volume.counters.values_read_together.fetch_add(1, Ordering::Relaxed);
            return Ok(MovedRecord::Intact(MovedValue::WithOthers(read, value)));
        }
        for _ in 0..DAMAGE_READS {
            match self.read_record(store, &record.entry(), opens).await {
                Ok(RecordRead::Value(buffer, value)) => {
                    return Ok(MovedRecord::Intact(MovedValue::Alone(buffer, value)));
                }
                // The window is this compaction's: its chunks are freed only after a later round.
                Ok(RecordRead::Reused | RecordRead::Unowned(_)) => return Ok(MovedRecord::Replaced),
                Ok(RecordRead::Damaged(_)) => {}
                Err(EngineError::Device { error, .. }) if is_media_error(error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(MovedRecord::Damaged)
    }

    /// Where the value lies in the bytes of a record, if they are those of this one.
    fn value_in(&self, store: &Store, bytes: &[u8], record: &RecordToMove) -> Option<Range<usize>> {
        let ValuePlace::Record(granule) = &record.at else { return None };
        let (chunk, granule) = self.volume.layout().place_of_granule(*granule)?;
        let pool = &self.volume.pool;
        let (owner, _) = pool.owner_of(pool.first_unit_of(chunk))?;
        let volume_id = self.volume.fixed().volume_id;
        let place = ValueRecordPlace { volume_id, partition: store.id, index: owner.index, granule };
        check_value_record(bytes, &record.entry(), place).ok()
    }

    /// Appends a record again, unless that would take the chunks of key compaction and of writes in progress, or those of the image of its
    /// segment, for which the first record takes the pass.
    fn append_moved<'a, 's>(
        &'a self,
        store: &'s Store,
        held: &HeldSegment<'_>,
        record: &RecordToMove,
        value: &[u8],
        image: &mut Option<CompactionPass<'a>>,
    ) -> Result<AppendedValue<'s>, EngineError> {
        let no_space = || device_error(DeviceError::NoSpace, store.id);
        let new_image = match image {
            Some(_) => None,
            None => Some(self.image_pass(store, held).ok_or_else(no_space)?),
        };
        let granules = record_granules(
            record.key.len(),
            record.value_bytes,
            &record.meta,
            self.volume.layout().granule_log2,
        );
        let space = CompactionSpace::Record(store.tail.lock().chunks_of(granules));
        let appended = self.volume.passes.begin_compaction(&self.volume.pool, space);
        let _appended = appended.ok_or_else(no_space)?;
        if new_image.is_some() {
            *image = new_image;
        }
        let new = NewValueRecord { key: &record.key, meta: record.meta, value_bytes: record.value_bytes };
        let prefix = self.prefix_in(store, &record.key);
        self.append_value(store, prefix, &new, std::iter::once(value), ChunkPurpose::Compaction)
    }

    /// Gives an entry its new place, or states that its value is lost, if it still has the old place.
    fn replace_moved(
        &self,
        state: &mut StoreState,
        segment: SegmentNumber,
        record: &RecordToMove,
        at: Option<ValuePlace>,
    ) -> EntryMove {
        let image = state.busy.image(segment);
        let is_same = image.find(&record.key) == Some(record.entry());
        if !is_same && !bug_injection::is_injected(InjectedBug::LogStaleMove) {
            return EntryMove::Replaced;
        }
        let bytes = record.value_bytes;
        let contents = match at.clone() {
            Some(at) => EntryContents::Value { bytes, at },
            None => EntryContents::LostValue { bytes },
        };
        let entry = SegmentEntry { key: &record.key, meta: record.meta, contents };
        if !self.has_room(image, &entry) {
            return EntryMove::NoRoom;
        }
        let difference = image.replace(&entry);
        if let Some(old) = &difference.old {
            note_vacated(old, self.volume.layout(), &self.volume.pool);
        }
        let record_bytes = record.record_bytes();
        let counters = &self.volume.counters;
        match &at {
            Some(_) => {
                counters.moved_values.fetch_add(1, Ordering::Relaxed);
                counters.moved_bytes.fetch_add(record_bytes.into(), Ordering::Relaxed);
            }
            None => {
                counters.lost_values.fetch_add(1, Ordering::Relaxed);
            }
        }
        let new = at.map(|at| OldValue { at, record_bytes });
        let change = EntryChange { difference, new };
        state.busy.mark_dirty(segment, Some(change), ChangeSource::Compaction, &mut state.batches);
        EntryMove::Changed
    }
}
