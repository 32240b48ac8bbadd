//! Views of iterators on one core: cursors over the sources of an iterator, kept between its calls, and the pairs that were read ahead of them.
//!
//! Value prefetch (IterKVSSD): when the N-th pair is taken, the reads of the values up to the (N + D)-th are started; which D, [`super::prefetch_degree`] finds, by the
//! device's clock. With D = 0 a value is read when its pair is taken.
//!
//! In: an iterator with its place. Out: its next pair. A core keeps the views of the iterators that it advanced last; an iterator that comes from another core, or
//! whose view was given up, seeks from its place.
//!
//! Invariants: a view is used only if nothing has moved its iterator since ([`IteratorState::place`]); the views of ended iterators are dropped, since
//! cursors hold tables.

use super::core::LsmCore;
use super::cursor::EntryCursor;
use super::entry::{EntryValue, Position, TreeEntry, ValueAddress};
use super::iterator_list::{IteratorPlace, IteratorSources, IteratorState};
use super::level_cursor::{LevelCursor, LevelCursorConfig};
use super::memtable_slot::{CursorSource, SlotCursor};
use super::memtables::FlushedTables;
use super::merge::MergingCursor;
use super::prefetch_degree::{ConsumedValue, PrefetchDegree, PrefetchGrant, PrefetchMode, ScanHistory};
use super::reads::{FoundValue, LookupFor};
use super::snapshot_view::{KeyBounds, SnapshotView};
use super::table::io::TableIo;
use super::table_meta::TableMeta;
use super::tree_version::TreeVersion;
use super::version_edit::LEVELS;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use octokv_base::{Buffer, Nanos, UnixTime};
use octokv_device::{DeviceFuture, IoResult};
use std::collections::VecDeque;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

/// The degree of value prefetch on a device without a clock.
const DEGREE_WITHOUT_CLOCK: u32 = 4;

/// A cursor over one source of an iterator.
pub(super) enum TreeSource {
    /// A memtable, or the tables that it became.
    Slot(Box<SlotCursor<FlushedTables>>),
    /// Tables.
    Tables(Box<LevelCursor>),
}

impl CursorSource for FlushedTables {
    type Cursor = LevelCursor;
    type Context = Rc<TableIo>;
    fn cursor(&self, io: &Rc<TableIo>) -> LevelCursor {
        LevelCursor::of_tables(Rc::clone(io), self.0.clone(), LevelCursorConfig::ITERATOR)
    }
}

impl EntryCursor for TreeSource {
    fn entry(&self) -> Option<TreeEntry<'_>> {
        match self {
            TreeSource::Slot(cursor) => cursor.entry(),
            TreeSource::Tables(cursor) => cursor.entry(),
        }
    }

    async fn seek(&mut self, position: Position<'_>) -> Result<(), EngineError> {
        match self {
            TreeSource::Slot(cursor) => cursor.seek(position).await,
            TreeSource::Tables(cursor) => cursor.seek(position).await,
        }
    }

    async fn seek_before(&mut self, position: Option<Position<'_>>) -> Result<(), EngineError> {
        match self {
            TreeSource::Slot(cursor) => cursor.seek_before(position).await,
            TreeSource::Tables(cursor) => cursor.seek_before(position).await,
        }
    }

    async fn next(&mut self) -> Result<(), EngineError> {
        match self {
            TreeSource::Slot(cursor) => cursor.next().await,
            TreeSource::Tables(cursor) => cursor.next().await,
        }
    }

    async fn prev(&mut self) -> Result<(), EngineError> {
        match self {
            TreeSource::Slot(cursor) => cursor.prev().await,
            TreeSource::Tables(cursor) => cursor.prev().await,
        }
    }
}

/// The value of a pair that was read ahead.
enum AheadValue {
    /// These bytes, or none if only keys are wanted.
    Inline(Box<[u8]>),
    /// That of a record in these units, which is not being read yet.
    InSegment(ValueAddress, Range<u64>),
    /// That of a record which is being read.
    Reading(ValueAddress, Range<u64>, ValueRead),
    /// Those bytes of a buffer.
    Read(Buffer, Range<usize>),
}

/// The read of a record.
struct ValueRead {
    read: DeviceFuture,
    /// Its outcome, if it was seen before the value was wanted.
    result: Option<IoResult>,
    began: Option<Nanos>,
    /// How long it took, up to the moment in which its end was seen.
    latency: Option<Nanos>,
    /// For a read before the value was wanted.
    _grant: Option<PrefetchGrant>,
}

impl ValueRead {
    /// Notes the end of the read, if it has come.
    fn poll(&mut self, context: &mut Context<'_>, now: Option<Nanos>) -> Poll<()> {
        if self.result.is_none() {
            let Poll::Ready(result) = Pin::new(&mut self.read).poll(context) else { return Poll::Pending };
            self.latency = now.zip(self.began).map(|(now, began)| now.since(began));
            self.result = Some(result);
        }
        Poll::Ready(())
    }
}

/// A pair that the view has passed and the iterator has not.
struct AheadPair {
    key: Vec<u8>,
    value_bytes: usize,
    value: AheadValue,
}

/// The value of a pair that an iterator passes.
pub(super) enum TakenValue {
    Inline(Box<[u8]>),
    Read(Buffer, Range<usize>),
}

impl TakenValue {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            TakenValue::Inline(value) => value,
            TakenValue::Read(buffer, range) => &buffer[range.clone()],
        }
    }
}

/// The next pair of an iterator.
pub(super) struct NextPair<'a> {
    pub key: &'a [u8],
    pub value_bytes: usize,
}

/// A view with the pairs ahead.
pub(super) struct TreeView {
    view: SnapshotView<TreeSource>,
    version: Arc<TreeVersion>,
    time: UnixTime,
    sequence: u64,
    reverse: bool,
    keys_only: bool,
    ahead: VecDeque<AheadPair>,
    /// What the view met behind the pairs ahead.
    failed: Option<EngineError>,
    is_at_end: bool,
    /// The key behind which it was opened.
    behind: Option<Box<[u8]>>,
    /// Whether the view is behind a key, and is to step from it.
    has_to_step: bool,
    /// Of the lost ranges of the version, those that were reported.
    reported_lost: Vec<bool>,
    /// How many values are read ahead of the next one.
    degree: PrefetchDegree,
    /// When the last value was taken, by the device's clock.
    taken_at: Option<Nanos>,
}

/// The open views of a core.
pub(super) struct IteratorViews {
    /// With the iterator's number and that of its place; the one that was used last at the back.
    views: VecDeque<(u64, u64, TreeView)>,
    views_max: usize,
    /// What the scans of this core say about the next one.
    history: ScanHistory,
}

impl IteratorViews {
    /// None; at most `views_max`.
    pub(super) fn new(views_max: usize) -> IteratorViews {
        IteratorViews { views: VecDeque::new(), views_max, history: ScanHistory::default() }
    }

    /// Takes the view of an iterator, if it is at the iterator's place.
    pub(super) fn take(&mut self, id: u64, place_number: u64) -> Option<TreeView> {
        let index = self.views.iter().position(|(other, ..)| *other == id)?;
        let (_, number, view) = self.views.remove(index)?;
        if number != place_number && !bug_injection::is_injected(InjectedBug::UseViewOfOtherPlace) {
            self.history.end_scan(&view.degree);
            return None;
        }
        Some(view)
    }

    /// Keeps the view of an iterator, which is at the place with this number.
    pub(super) fn keep(&mut self, id: u64, place_number: u64, view: TreeView) {
        if self.views.len() >= self.views_max
            && let Some((.., given_up)) = self.views.pop_front()
        {
            self.history.end_scan(&given_up.degree);
        }
        self.views.push_back((id, place_number, view));
    }

    /// Drops the views of which `has_ended` says so.
    pub(super) fn drop_ended(&mut self, has_ended: impl Fn(u64) -> bool) {
        let history = &mut self.history;
        self.views.retain(|(id, _, view)| {
            let has_ended = has_ended(*id);
            if has_ended {
                history.end_scan(&view.degree);
            }
            !has_ended
        });
    }
}

impl LsmCore {
    /// Cursors over all that an iterator keeps, the newest entries first.
    pub(super) fn tree_sources(&self, sources: IteratorSources) -> Vec<TreeSource> {
        let IteratorSources { slots, version } = sources;
        let config = self.volume.settings.iterator_cursors;
        let slot = |slot| TreeSource::Slot(Box::new(SlotCursor::new(slot, Rc::clone(&self.io))));
        let of_table = |table: &Arc<TableMeta>| {
            let tables = vec![Arc::clone(table)];
            TreeSource::Tables(Box::new(LevelCursor::of_tables(Rc::clone(&self.io), tables, config)))
        };
        let of_level = |level| {
            let cursor = LevelCursor::new(Rc::clone(&self.io), Arc::clone(&version), level, config);
            TreeSource::Tables(Box::new(cursor))
        };
        let level0 = version.level0().iter().map(of_table);
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
            behind: match place {
                IteratorPlace::Behind(key) => Some(key.clone()),
                IteratorPlace::Start | IteratorPlace::From(_) | IteratorPlace::End => None,
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
            AheadValue::InSegment(address, units) => self.begin_value(address, units, None),
            value => Ok(value),
        };
        let degree = view.degree.degree() as usize;
        self.look_ahead_to(view, degree, yield_point).await;
        self.begin_values_ahead(view, degree);
        let mut latency = None;
        let value = match value {
            Ok(AheadValue::Reading(address, units, mut read)) => {
                poll_fn(|context| read.poll(context, self.clock())).await;
                latency = read.latency;
                match read.result.expect("it has ended").into_read() {
                    Ok(buffer) => self
                        .check_record(&buffer, units.start, &key, address)
                        .map(|range| AheadValue::Read(buffer, range)),
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

    /// Starts the reads of the first pairs ahead, as far as there is memory.
    fn begin_values_ahead(&self, view: &mut TreeView, pairs: usize) {
        for pair in view.ahead.iter_mut().take(pairs) {
            let AheadValue::InSegment(address, units) = &pair.value else { continue };
            let Some(grant) = self.volume.prefetch_budget.take(pair.value_bytes as u64) else { return };
            // One that has no buffer now is read when it is wanted.
            let Ok(value) = self.begin_value(*address, units.clone(), Some(grant)) else { return };
            pair.value = value;
        }
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
            AheadValue::Read(_, range) => range.len(),
        };
        view.ahead.push_back(AheadPair { key, value_bytes, value });
        Ok(())
    }

    /// Starts to read a value.
    ///
    /// # Errors
    /// [`EngineError::NoMemory`].
    fn begin_value(
        &self,
        address: ValueAddress,
        units: Range<u64>,
        grant: Option<PrefetchGrant>,
    ) -> Result<AheadValue, EngineError> {
        let read = self.start_read(&units)?;
        let began = self.clock();
        let read = ValueRead { read, result: None, began, latency: None, _grant: grant };
        Ok(AheadValue::Reading(address, units, read))
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
            FoundValue::Inline(buffer, bytes) => AheadValue::Read(buffer, 0..bytes),
            FoundValue::InSegment(address) => {
                let read = self.read_value(&version, &key, address).await?;
                let corrupt = || self.corrupt(self.volume.fixed().layout.data_start_unit);
                let (buffer, range) = read.ok_or_else(corrupt)?;
                AheadValue::Read(buffer, range)
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

impl TreeView {
    /// Moves to a place. What it meets comes with the first step.
    async fn seek(&mut self, place: &IteratorPlace, yield_point: &mut impl AsyncFnMut()) {
        let view = &mut self.view;
        let sought = match (place, self.reverse) {
            (IteratorPlace::Start | IteratorPlace::End, false) => view.seek(&[], yield_point).await,
            (IteratorPlace::Start | IteratorPlace::End, true) => view.seek_before(None, yield_point).await,
            (IteratorPlace::From(key), false) => view.seek(key, yield_point).await,
            (IteratorPlace::From(key), true) => view.seek_at_or_before(key, yield_point).await,
            (IteratorPlace::Behind(key), true) => view.seek_before(Some(key), yield_point).await,
            (IteratorPlace::Behind(key), false) => {
                let sought = view.seek(key, yield_point).await;
                self.has_to_step = view.entry().is_some_and(|entry| entry.key == &key[..]);
                sought
            }
        };
        if let Err(error) = sought {
            self.failed = Some(error);
            self.has_to_step = true;
        }
        // Ranges before the place are behind it.
        let passed = match place {
            IteratorPlace::From(key) | IteratorPlace::Behind(key) => Some(key),
            IteratorPlace::Start | IteratorPlace::End => None,
        };
        for (range, is_reported) in self.version.lost().as_slice().iter().zip(&mut self.reported_lost) {
            *is_reported = passed.is_some_and(|key| match self.reverse {
                false => range.last_key[..] < key[..],
                true => range.first_key[..] > key[..],
            });
        }
    }

    /// Notes which of the reads ahead have ended.
    async fn note_ended_reads(&mut self, now: Option<Nanos>) {
        poll_fn(|context| {
            for pair in &mut self.ahead {
                if let AheadValue::Reading(.., read) = &mut pair.value {
                    let _ = read.poll(context, now);
                }
            }
            Poll::Ready(())
        })
        .await;
    }

    async fn step(&mut self, yield_point: &mut impl AsyncFnMut()) -> Result<(), EngineError> {
        match self.reverse {
            false => self.view.next(yield_point).await,
            true => self.view.prev(yield_point).await,
        }
    }
}
