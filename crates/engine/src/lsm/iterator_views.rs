//! Views of iterators on one core: cursors over the sources of an iterator, kept between its calls, and the pairs that were read ahead of them.
//!
//! In: an iterator with its place. Out: its next pair. A core keeps the views of the iterators that it advanced last; an iterator that comes from another core, or
//! whose view was given up, seeks from its place.
//!
//! Invariants: a view is used only if nothing has moved its iterator since (`IteratorState::place`); the views of ended iterators are dropped, since
//! cursors hold tables.

use super::cursor::EntryCursor;
use super::entry::{EntryValue, Position, TreeEntry};
use super::iterator_list::IteratorPlace;
use super::level_cursor::{LevelCursor, LevelCursorConfig};
use super::memtable_slot::{CursorSource, SlotCursor};
use super::memtables::FlushedTables;
use super::prefetch_degree::{PrefetchDegree, ScanHistory};
use super::snapshot_view::SnapshotView;
use super::table::io::TableIo;
use super::tree_version::TreeVersion;
use super::value_reads::{AheadPair, AheadValue};
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use octokv_base::{Buffer, Nanos, SharedBuffer, UnixTime};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

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

    fn position(&self) -> Option<Position<'_>> {
        match self {
            TreeSource::Slot(cursor) => cursor.position(),
            TreeSource::Tables(cursor) => cursor.position(),
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

/// The value of a pair that an iterator passes.
pub(super) enum TakenValue {
    Inline(Box<[u8]>),
    Read(Rc<Buffer>, Range<usize>),
    Cached(SharedBuffer, Range<usize>),
}

impl TakenValue {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            TakenValue::Inline(value) => value,
            TakenValue::Read(buffer, range) => &buffer[range.clone()],
            TakenValue::Cached(record, range) => &record[range.clone()],
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
    pub(super) view: SnapshotView<TreeSource>,
    pub(super) version: Arc<TreeVersion>,
    pub(super) time: UnixTime,
    pub(super) sequence: u64,
    pub(super) reverse: bool,
    pub(super) keys_only: bool,
    pub(super) ahead: VecDeque<AheadPair>,
    /// What the view met behind the pairs ahead.
    pub(super) failed: Option<EngineError>,
    pub(super) is_at_end: bool,
    /// The key behind which it was opened.
    pub(super) behind: Option<Box<[u8]>>,
    /// Whether the view is behind a key, and is to step from it.
    pub(super) has_to_step: bool,
    /// Of the lost ranges of the version, those that were reported.
    pub(super) reported_lost: Vec<bool>,
    /// How many values are read ahead of the next one.
    pub(super) degree: PrefetchDegree,
    /// When the last value was taken, by the device's clock.
    pub(super) taken_at: Option<Nanos>,
}

/// The open views of a core.
pub(super) struct IteratorViews {
    /// With the iterator's number and that of its place; the one that was used last at the back.
    pub(super) views: VecDeque<(u64, u64, TreeView)>,
    pub(super) views_max: usize,
    /// What the scans of this core say about the next one.
    pub(super) history: ScanHistory,
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

impl TreeView {
    /// Moves to a place. What it meets comes with the first step.
    pub(super) async fn seek(&mut self, place: &IteratorPlace, yield_point: &mut impl AsyncFnMut()) {
        let place = place.place();
        let view = &mut self.view;
        let sought = match (place, self.reverse) {
            (IteratorPlace::BehindDamage(_), _) => unreachable!("a place is behind damage once"),
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
            IteratorPlace::Start | IteratorPlace::End | IteratorPlace::BehindDamage(_) => None,
        };
        for (range, is_reported) in self.version.lost().as_slice().iter().zip(&mut self.reported_lost) {
            *is_reported = passed.is_some_and(|key| match self.reverse {
                false => range.last_key[..] < key[..],
                true => range.first_key[..] > key[..],
            });
        }
    }

    /// Steps to the next pair, unless it is there, if nothing was read ahead of it. False if the caller has to copy the pair
    /// (`LsmCore::next_pair`): its value is a record, it is not sure that the pair is to be shown, or there is none.
    pub(super) async fn step_to_inline(&mut self, yield_point: &mut impl AsyncFnMut()) -> bool {
        let is_next = self.ahead.is_empty() && self.failed.is_none() && !self.is_at_end;
        if !is_next || !self.reported_lost.is_empty() {
            return false;
        }
        if std::mem::replace(&mut self.has_to_step, false)
            && let Err(error) = self.step(yield_point).await
        {
            (self.failed, self.has_to_step) = (Some(error), true);
            return false;
        }
        !self.view.may_be_outdated()
            && self.inline_pair().is_some_and(|(key, _)| self.behind.as_deref() != Some(key))
    }

    /// The pair at which the view is, if its value is not a record.
    pub(super) fn inline_pair(&self) -> Option<(&[u8], &[u8])> {
        let entry = self.view.entry()?;
        match entry.value {
            _ if self.keys_only => Some((entry.key, &[])),
            EntryValue::Inline(value) => Some((entry.key, value)),
            EntryValue::Tombstone | EntryValue::InSegment(_) => None,
        }
    }

    /// Passes the pair at which the view is. REQUIRES: the iterator's caller has it.
    pub(super) fn pass_inline(&mut self) {
        self.has_to_step = true;
    }

    /// Notes which of the reads ahead have ended.
    pub(super) async fn note_ended_reads(&mut self, now: Option<Nanos>) {
        poll_fn(|context| {
            for pair in &self.ahead {
                if let AheadValue::Reading(.., read) = &pair.value {
                    let _ = read.poll(context, now);
                }
            }
            Poll::Ready(())
        })
        .await;
    }

    pub(super) async fn step(&mut self, yield_point: &mut impl AsyncFnMut()) -> Result<(), EngineError> {
        match self.reverse {
            false => self.view.next(yield_point).await,
            true => self.view.prev(yield_point).await,
        }
    }
}
