//! The steps of an iterator on one core: its view is opened at a place, its pairs are read ahead and taken.
//!
//! Value prefetch (IterKVSSD): when the N-th pair is taken, the reads of the values up to the (N + D)-th are started; which D, [`super::prefetch_degree`] finds, by the
//! device's clock. With D = 0 a value is read when its pair is taken.
//!
//! In: an iterator with its place. Out: its next pair, or what could not be read. The views are those of [`super::iterator_views`].

use super::core::LsmCore;
use super::entry::EntryValue;
use super::iterator_list::{IteratorPlace, IteratorSources, IteratorState};
use super::iterator_views::{NextPair, TakenValue, TreeSource, TreeView};
use super::level_cursor::LevelCursor;
use super::memtable_slot::SlotCursor;
use super::merge::MergingCursor;
use super::prefetch_degree::{ConsumedValue, PrefetchDegree, PrefetchGrant, PrefetchMode};
use super::reads::{FoundValue, LookupFor};
use super::snapshot_view::{KeyBounds, SnapshotView};
use super::table::io::is_media_error;
use super::table_meta::TableMeta;
use super::tree_version::disjoint_lists;
use super::value_reads::{AheadPair, AheadValue, ValueRead, next_run};
use super::version_edit::LEVELS;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use octokv_base::Buffer;
use octokv_device::DeviceError;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// The degree of value prefetch on a device without a clock.
const DEGREE_WITHOUT_CLOCK: u32 = 4;

impl LsmCore {
    /// Cursors over all that an iterator keeps, the newest entries first.
    pub(super) fn tree_sources(&self, sources: IteratorSources) -> Vec<TreeSource> {
        let IteratorSources { slots, version } = sources;
        let config = self.volume.settings.iterator_cursors;
        let slot = |slot| TreeSource::Slot(Box::new(SlotCursor::new(slot, Rc::clone(&self.io))));
        let of_list = |tables: Vec<Arc<TableMeta>>| {
            TreeSource::Tables(Box::new(LevelCursor::of_tables(Rc::clone(&self.io), tables, config)))
        };
        let of_level = |level| {
            let cursor = LevelCursor::new(Rc::clone(&self.io), Arc::clone(&version), level, config);
            TreeSource::Tables(Box::new(cursor))
        };
        let level0 = disjoint_lists(version.level0()).into_iter().map(of_list);
        let below = (1..LEVELS).filter(|level| version.level_tables(*level) > 0).map(of_level);
        slots.into_iter().map(slot).chain(level0).chain(below).collect()
    }

    /// A view at the place of an iterator: its next step gives the first pair.
    pub(super) async fn open_view(
        &self,
        iterator: &IteratorState,
        sources: IteratorSources,
        place: &IteratorPlace,
        yield_point: &mut impl AsyncFnMut(),
    ) -> TreeView {
        let version = Arc::clone(&sources.version);
        let merge = MergingCursor::new(self.tree_sources(sources));
        let options = &iterator.options;
        let bounds = KeyBounds {
            lower: options.lower.as_ref().map_or_else(Box::default, |key| key.as_bytes().into()),
            upper: options.upper.as_ref().map(|key| key.as_bytes().into()),
        };
        let mut point = iterator.snapshot.point();
        if bug_injection::is_injected(InjectedBug::LateSnapshot) {
            point.sequence = self.volume.memtables.last_number();
        }
        let reported_lost = vec![false; version.lost().as_slice().len()];
        let settings = &self.volume.settings;
        let mode = match (self.clock(), options.keys_only) {
            (_, true) => PrefetchMode::Fixed(0),
            (None, _) if settings.prefetch == PrefetchMode::Adaptive => {
                PrefetchMode::Fixed(DEGREE_WITHOUT_CLOCK)
            }
            _ => settings.prefetch,
        };
        let degree = PrefetchDegree::new(mode, &self.views.borrow().history);
        let mut view = TreeView {
            view: SnapshotView::new(merge, point, bounds),
            version,
            time: point.time,
            sequence: point.sequence,
            reverse: options.reverse,
            keys_only: options.keys_only,
            ahead: VecDeque::new(),
            failed: None,
            is_at_end: iterator.is_empty() || *place == IteratorPlace::End,
            behind: match place.place() {
                IteratorPlace::Behind(key) => Some(key.clone()),
                _ => None,
            },
            has_to_step: false,
            reported_lost,
            degree,
            taken_at: None,
        };
        if !view.is_at_end {
            view.seek(place, yield_point).await;
        }
        view
    }

    /// Gives the next pair; `None` at the end. Starts to read no value.
    ///
    /// # Errors
    /// What the next step met; the one after it goes on behind that.
    pub(super) async fn next_pair<'v>(
        &self,
        view: &'v mut TreeView,
        yield_point: &mut impl AsyncFnMut(),
    ) -> Result<Option<NextPair<'v>>, EngineError> {
        self.look_ahead_to(view, 1, yield_point).await;
        if view.ahead.is_empty()
            && let Some(error) = view.failed.take()
        {
            return Err(error);
        }
        Ok(view.ahead.front().map(|pair| NextPair { key: &pair.key, value_bytes: pair.value_bytes }))
    }

    /// Starts to read the values ahead, waits for that of the next pair, and gives its key and value. REQUIRES: there is a next pair.
    ///
    /// # Errors
    /// The value cannot be read; the pair is passed.
    pub(super) async fn take_pair(
        &self,
        view: &mut TreeView,
        yield_point: &mut impl AsyncFnMut(),
    ) -> (Vec<u8>, Result<TakenValue, EngineError>) {
        let wanted_at = self.clock();
        if wanted_at.is_some() {
            view.note_ended_reads(wanted_at).await;
        }
        let AheadPair { key, value, value_bytes } = view.ahead.pop_front().expect("there is a next pair");
        let value = match value {
            AheadValue::InSegment(address, units) => match self.cached_value(units.start, &key, address) {
                Some((record, bytes)) => Ok(AheadValue::Cached { units, record, bytes, _grant: None }),
                None => self
                    .begin_read(units.clone(), Vec::new())
                    .map(|read| AheadValue::Reading(address, units, read)),
            },
            value => Ok(value),
        };
        let degree = view.degree.degree() as usize;
        self.look_ahead_to(view, degree, yield_point).await;
        self.begin_values_ahead(view, degree);
        let mut latency = None;
        let value = match value {
            Ok(AheadValue::Reading(address, units, read)) => {
                poll_fn(|context| read.poll(context, self.clock())).await;
                latency = read.latency();
                match self.read_record(&read, &units).await {
                    Ok((buffer, at)) => {
                        self.check_record(&buffer[at.clone()], units.start, &key, address).map(|value| {
                            self.io.cache.insert_record(address, &buffer[at.start..at.start + value.end]);
                            AheadValue::Read(buffer, at.start + value.start..at.start + value.end)
                        })
                    }
                    // The medium lost it: the same read would fail again.
                    Err(error) if self.io.is_lost(self.volume.lba(units.start), error) => {
                        Err(self.corrupt(units.start))
                    }
                    Err(error) => Err(self.io.failed(error)),
                }
            }
            value => value,
        };
        if let (Some(wanted_at), Some(had_at)) = (wanted_at, self.clock()) {
            let interval = view.taken_at.replace(had_at).map(|taken_at| had_at.since(taken_at));
            let bytes = value_bytes as u64;
            view.degree.consume(&ConsumedValue { waited: had_at.since(wanted_at), interval, latency, bytes });
        }
        let taken = value.map(|value| match value {
            AheadValue::Inline(value) => TakenValue::Inline(value),
            AheadValue::Read(buffer, range) => TakenValue::Read(buffer, range),
            AheadValue::Cached { record, bytes, .. } => TakenValue::Cached(record, bytes),
            AheadValue::InSegment(..) | AheadValue::Reading(..) => unreachable!("read above"),
        });
        (key, taken)
    }

    /// Steps the view until so many pairs are ahead. What it meets comes behind them.
    async fn look_ahead_to(&self, view: &mut TreeView, pairs: usize, yield_point: &mut impl AsyncFnMut()) {
        while view.ahead.len() < pairs && view.failed.is_none() && !view.is_at_end {
            if let Err(error) = self.look_ahead(view, yield_point).await {
                view.failed = Some(error);
            }
        }
    }

    /// The buffer and the bytes in it of a record whose read has ended, or that is read again if that read failed, unless the medium has lost this record.
    async fn read_record(
        &self,
        read: &ValueRead,
        units: &Range<u64>,
    ) -> Result<(Rc<Buffer>, Range<usize>), DeviceError> {
        let unit_bytes = self.volume.unit_bytes();
        let outcome = match read.record(units).expect("it has ended") {
            // What failed may be another record, or may have passed since the value was read ahead.
            Err(error) if read.is_gathered(units) || !is_media_error(error) => match self.start_read(units) {
                Ok(again) => {
                    again.await.into_read().map(|buffer| (Rc::new(buffer), 0..units.end - units.start))
                }
                Err(_) => Err(error),
            },
            outcome => outcome,
        };
        outcome.map(|(buffer, at)| (buffer, at.start as usize * unit_bytes..at.end as usize * unit_bytes))
    }

    /// Starts the reads of the first pairs ahead, while there is memory and half of the core's buffers are free.
    fn begin_values_ahead(&self, view: &mut TreeView, pairs: usize) {
        let unit_bytes = self.volume.unit_bytes() as u64;
        // With a degree that an operator has fixed, each value is a read, as in the paper.
        let can_gather = self.volume.settings.prefetch == PrefetchMode::Adaptive;
        let goes_on = |view: &TreeView| !view.is_at_end && view.failed.is_none();
        while let Some((mut run, mut units)) =
            next_run(&view.ahead, pairs, unit_bytes, can_gather, goes_on(view))
        {
            if self.take_cached(&mut view.ahead[run.start]) {
                continue;
            }
            let grant = |pair: &AheadPair| self.volume.prefetch_budget.take(pair.value_bytes as u64);
            let grants: Vec<_> = view.ahead.range(run.clone()).map_while(grant).collect();
            run.end = run.start + grants.len();
            let Some(last) = view.ahead.range(run.clone()).last() else { return };
            units.end = last.value.units().map_or(units.end, |units| units.end);
            // One that has no buffer now is read when it is wanted.
            if !self.io.may_read_ahead((units.end - units.start) * unit_bytes) {
                return;
            }
            let Ok(read) = self.begin_read(units, grants) else { return };
            for pair in view.ahead.range_mut(run) {
                let AheadValue::InSegment(address, ref units) = pair.value else {
                    unreachable!("not read yet")
                };
                pair.value = AheadValue::Reading(address, units.clone(), read.clone());
            }
        }
    }

    /// Takes the value of a pair ahead from the cache; false if it is not there. Those behind the first of a run are not asked for: a read that gathers them is one read with or without them.
    fn take_cached(&self, pair: &mut AheadPair) -> bool {
        let AheadValue::InSegment(address, ref units) = pair.value else { unreachable!("not read yet") };
        let Some((record, bytes)) = self.cached_value(units.start, &pair.key, address) else { return false };
        let Some(grant) = self.volume.prefetch_budget.take(pair.value_bytes as u64) else { return false };
        pair.value = AheadValue::Cached { units: units.clone(), record, bytes, _grant: Some(grant) };
        true
    }

    /// Steps the view, and adds the pair at which it is then.
    async fn look_ahead(
        &self,
        view: &mut TreeView,
        yield_point: &mut impl AsyncFnMut(),
    ) -> Result<(), EngineError> {
        if std::mem::replace(&mut view.has_to_step, true) {
            view.step(yield_point).await?;
        }
        let Some(entry) = view.view.entry() else {
            view.is_at_end = true;
            return self.report_lost(view, None);
        };
        let key = entry.key.to_vec();
        if view.behind.as_deref() == Some(&key[..]) {
            // The seek to the place met an error before it was behind its key.
            return Ok(());
        }
        if !view.reported_lost.is_empty() {
            if let Err(error) = self.report_lost(view, Some(&key)) {
                // The same entry again.
                view.has_to_step = false;
                return Err(error);
            }
            let entry_sequence = view.view.entry().map_or(0, |entry| entry.sequence);
            if view.version.lost().newest_lost(&key).is_some_and(|lost| entry_sequence <= lost) {
                return Ok(());
            }
        }
        if view.view.may_be_outdated() {
            return self.look_up_ahead(view, key).await;
        }
        let Some(entry) = view.view.entry() else { return Ok(()) };
        let value = match entry.value {
            _ if view.keys_only => AheadValue::Inline(Box::default()),
            EntryValue::Tombstone => return Ok(()),
            EntryValue::Inline(value) => AheadValue::Inline(value.into()),
            EntryValue::InSegment(address) => {
                let units = self.record_units(&view.version, &key, address)?;
                let corrupt = || self.corrupt(self.volume.fixed().layout.data_start_unit);
                AheadValue::InSegment(address, units.ok_or_else(corrupt)?)
            }
        };
        let value_bytes = match &value {
            AheadValue::Inline(value) => value.len(),
            AheadValue::InSegment(address, ..) | AheadValue::Reading(address, ..) => {
                address.value_bytes as usize
            }
            AheadValue::Read(_, bytes) | AheadValue::Cached { bytes, .. } => bytes.len(),
        };
        view.ahead.push_back(AheadPair { key, value_bytes, value });
        Ok(())
    }

    /// Starts to read the records in these units, which have these grants.
    ///
    /// # Errors
    /// [`EngineError::NoMemory`].
    fn begin_read(&self, units: Range<u64>, grants: Vec<PrefetchGrant>) -> Result<ValueRead, EngineError> {
        let read = self.start_read(&units)?;
        Ok(ValueRead::begin(read, units, self.clock(), grants))
    }

    /// Looks a key up at whose entry damage leaves a doubt.
    async fn look_up_ahead(&self, view: &mut TreeView, key: Vec<u8>) -> Result<(), EngineError> {
        let found = self.lookup(&key, view.sequence, LookupFor::Value).await?;
        let Some((version, found)) = found.filter(|(_, found)| found.expires_at > view.time) else {
            return Ok(());
        };
        let value = match found.value {
            FoundValue::Tombstone => return Ok(()),
            _ if view.keys_only => AheadValue::Inline(Box::default()),
            FoundValue::Inline(buffer, bytes) => AheadValue::Read(Rc::new(buffer), 0..bytes),
            FoundValue::InSegment(address) => {
                let read = self.read_value(&version, &key, address).await?;
                let corrupt = || self.corrupt(self.volume.fixed().layout.data_start_unit);
                let (buffer, range) = read.ok_or_else(corrupt)?;
                AheadValue::Read(Rc::new(buffer), range)
            }
        };
        let value_bytes = if view.keys_only { 0 } else { found.value_bytes as usize };
        view.ahead.push_back(AheadPair { key, value_bytes, value });
        Ok(())
    }

    /// Fails once for each lost range that the view has come to, at `key` or at its end.
    fn report_lost(&self, view: &mut TreeView, key: Option<&[u8]>) -> Result<(), EngineError> {
        let (reverse, bounds) = (view.reverse, view.view.bounds().clone());
        for (range, is_reported) in view.version.lost().as_slice().iter().zip(&mut view.reported_lost) {
            let is_come_to = key.is_none_or(|key| match reverse {
                false => &range.first_key[..] <= key,
                true => &range.last_key[..] >= key,
            });
            let is_within = range.last_key[..] >= bounds.lower[..]
                && bounds.upper.as_ref().is_none_or(|upper| range.first_key[..] < upper[..]);
            if is_come_to && is_within && !std::mem::replace(is_reported, true) {
                return Err(self.corrupt(self.volume.fixed().layout.data_start_unit));
            }
        }
        Ok(())
    }
}
