//! Memtable slots: an iterator keeps a slot, not a memtable, so that a flush releases the memory of one that iterators are in.
//!
//! ```text
//!             replace
//!   Memtable ─────────▶ Replacement         once; cursors at an entry of the memtable go on behind its position
//! ```
//! In: a memtable, later what it became (tables). Out: one of both, for the length of one operation. Between operations a
//! [`SlotCursor`] holds the bytes of one entry and no memtable.
//!
//! REQUIRES of a flush that replaces: the replacement has every entry that is the newest of its key for a live snapshot, tombstones
//! included ([`super::retention::RetentionRule::retain_in_flush`]): a cursor that moves backward may be at an older entry of the
//! key. Other entries may be missing, that of the cursor included.
//! Invariant: a slot never holds both. Tested in `memtable_slot_tests.rs`.

use super::cursor::EntryCursor;
use super::entry::{Position, TreeEntry};
use super::memtable::{Memtable, MemtableEntry, MemtableIndex};
use crate::EngineError;
use parking_lot::Mutex;
use std::sync::{Arc, OnceLock};

/// What a memtable may become.
pub trait CursorSource {
    /// Its cursors.
    type Cursor: EntryCursor;
    /// What a core's cursors need besides it.
    type Context;
    /// A cursor at no entry.
    fn cursor(&self, context: &Self::Context) -> Self::Cursor;
}

/// A memtable, or what it became.
pub struct MemtableSlot<R> {
    /// `None` once replaced.
    memtable: Mutex<Option<Arc<Memtable>>>,
    /// Set before `memtable` becomes `None`.
    replacement: OnceLock<R>,
}

/// What a slot has at the moment.
pub enum SlotContents<'a, R> {
    /// The memtable. REQUIRES: kept for the length of one operation.
    Memtable(Arc<Memtable>),
    /// What it became.
    Replacement(&'a R),
}

impl<R> MemtableSlot<R> {
    /// The slot of a memtable.
    pub fn new(memtable: Arc<Memtable>) -> MemtableSlot<R> {
        MemtableSlot { memtable: Mutex::new(Some(memtable)), replacement: OnceLock::new() }
    }

    /// What it has at the moment. Takes a lock only until the slot is replaced.
    pub fn contents(&self) -> SlotContents<'_, R> {
        if let Some(replacement) = self.replacement.get() {
            return SlotContents::Replacement(replacement);
        }
        match &*self.memtable.lock() {
            Some(memtable) => SlotContents::Memtable(Arc::clone(memtable)),
            None => SlotContents::Replacement(self.replacement.get().expect("set before the memtable left")),
        }
    }

    /// Replaces the memtable. Gives it, so that the caller decides where it is dropped: operations that still use it are short.
    /// REQUIRES: nothing is inserted into it any more.
    ///
    /// # Panics
    /// If it was replaced before.
    pub fn replace(&self, replacement: R) -> Arc<Memtable> {
        let mut memtable = self.memtable.lock();
        assert!(self.replacement.set(replacement).is_ok(), "a memtable is replaced once");
        memtable.take().expect("not replaced before")
    }
}

/// A cursor over a slot. It goes from the memtable to its replacement by itself.
pub struct SlotCursor<R: CursorSource> {
    slot: Arc<MemtableSlot<R>>,
    context: R::Context,
    place: SlotPlace<R::Cursor>,
}

enum SlotPlace<C> {
    NoEntry,
    InMemtable { index: MemtableIndex, entry: MemtableEntry },
    InReplacement(C),
}

impl<C: EntryCursor> SlotPlace<C> {
    fn in_memtable(memtable: &Memtable, index: Option<MemtableIndex>) -> SlotPlace<C> {
        index.map_or(SlotPlace::NoEntry, |index| SlotPlace::InMemtable {
            index,
            entry: memtable.owned_entry(index),
        })
    }

    /// The cursor over the replacement.
    fn replacement_cursor<R: CursorSource<Cursor = C>>(
        &mut self,
        replacement: &R,
        context: &R::Context,
    ) -> &mut C {
        if !matches!(self, SlotPlace::InReplacement(_)) {
            *self = SlotPlace::InReplacement(replacement.cursor(context));
        }
        match self {
            SlotPlace::InReplacement(cursor) => cursor,
            SlotPlace::NoEntry | SlotPlace::InMemtable { .. } => unreachable!("set above"),
        }
    }
}

impl<R: CursorSource> SlotCursor<R> {
    /// A cursor at no entry.
    pub fn new(slot: Arc<MemtableSlot<R>>, context: R::Context) -> SlotCursor<R> {
        SlotCursor { slot, context, place: SlotPlace::NoEntry }
    }
}

impl<R: CursorSource> EntryCursor for SlotCursor<R> {
    fn entry(&self) -> Option<TreeEntry<'_>> {
        match &self.place {
            SlotPlace::NoEntry => None,
            SlotPlace::InMemtable { entry, .. } => Some(entry.get()),
            SlotPlace::InReplacement(cursor) => cursor.entry(),
        }
    }

    fn position(&self) -> Option<Position<'_>> {
        match &self.place {
            SlotPlace::NoEntry => None,
            SlotPlace::InMemtable { entry, .. } => Some(entry.position()),
            SlotPlace::InReplacement(cursor) => cursor.position(),
        }
    }

    async fn seek(&mut self, position: Position<'_>) -> Result<(), EngineError> {
        match self.slot.contents() {
            SlotContents::Memtable(memtable) => {
                self.place = SlotPlace::in_memtable(&memtable, memtable.first_from(position));
                Ok(())
            }
            SlotContents::Replacement(source) => {
                self.place.replacement_cursor(source, &self.context).seek(position).await
            }
        }
    }

    async fn seek_before(&mut self, position: Option<Position<'_>>) -> Result<(), EngineError> {
        match self.slot.contents() {
            SlotContents::Memtable(memtable) => {
                self.place = SlotPlace::in_memtable(&memtable, memtable.last_before(position));
                Ok(())
            }
            SlotContents::Replacement(source) => {
                self.place.replacement_cursor(source, &self.context).seek_before(position).await
            }
        }
    }

    async fn next(&mut self) -> Result<(), EngineError> {
        let (index, entry) = match &mut self.place {
            SlotPlace::NoEntry => panic!("the cursor is at no entry"),
            SlotPlace::InReplacement(cursor) => return cursor.next().await,
            SlotPlace::InMemtable { index, entry } => (*index, entry),
        };
        match self.slot.contents() {
            SlotContents::Memtable(memtable) => {
                self.place = SlotPlace::in_memtable(&memtable, memtable.following(index));
                Ok(())
            }
            SlotContents::Replacement(source) => {
                let entry = entry.clone();
                let Position { key, sequence } = entry.get().position();
                // The next older number: sequence numbers are from 1, and the same position may have the same entry.
                let behind = Position { key, sequence: sequence - 1 };
                self.place.replacement_cursor(source, &self.context).seek(behind).await
            }
        }
    }

    async fn prev(&mut self) -> Result<(), EngineError> {
        let (index, entry) = match &mut self.place {
            SlotPlace::NoEntry => panic!("the cursor is at no entry"),
            SlotPlace::InReplacement(cursor) => return cursor.prev().await,
            SlotPlace::InMemtable { index, entry } => (*index, entry),
        };
        match self.slot.contents() {
            SlotContents::Memtable(memtable) => {
                self.place = SlotPlace::in_memtable(&memtable, memtable.preceding(index));
                Ok(())
            }
            SlotContents::Replacement(source) => {
                let entry = entry.clone();
                let position = Some(entry.get().position());
                self.place.replacement_cursor(source, &self.context).seek_before(position).await
            }
        }
    }
}
