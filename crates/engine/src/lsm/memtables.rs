//! The memtables of a tree: the one that takes changes, and the full ones that wait for their flush.
//!
//! ```text
//!   apply ─▶ active ──full, or on request──▶ full … (newest first) ──flush──▶ tables, released
//! ```
//! In: durable changes in the order of the journal. Out: for readers, all memtables of one moment, by one reference; for the flush, the oldest
//! full one. Each knows where the journal has its first change, so that the journal is released up to the oldest that was not flushed.
//!
//! Invariants: nothing is inserted into a full memtable; a memtable has every change after those of the one before and up to its last number. A reader takes
//! the memtables before the version: what a flush takes away from the ones, it has added to the other before.

use super::entry::TreeEntry;
use super::memtable::Memtable;
use super::memtable_slot::MemtableSlot;
use super::table_meta::TableMeta;
use crate::common::journal::JournalPosition;
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;

/// The tables that a memtable became, disjoint and by key.
pub struct FlushedTables(pub Vec<Arc<TableMeta>>);

/// The slot of a memtable of a volume.
pub type TreeSlot = MemtableSlot<FlushedTables>;

/// A memtable in its place among the others. A clone refers to the same.
#[derive(Clone)]
pub struct PlacedMemtable {
    /// For readers that keep it longer than one operation.
    pub slot: Arc<TreeSlot>,
    /// Its entries.
    pub memtable: Arc<Memtable>,
    /// Where the journal has its first change.
    pub start: JournalPosition,
}

/// The memtables of one moment.
#[derive(Clone)]
pub struct MemtableStack {
    /// The one that takes changes.
    pub active: PlacedMemtable,
    /// The full ones, the newest first, each with the number of the last change before the next one's.
    pub full: SmallVec<[(PlacedMemtable, u64); 4]>,
}

impl MemtableStack {
    /// All memtables, the newest first.
    pub fn newest_first(&self) -> impl Iterator<Item = &PlacedMemtable> {
        std::iter::once(&self.active).chain(self.full.iter().map(|(memtable, _)| memtable))
    }

    /// Where replay would begin: at the oldest memtable.
    pub fn start(&self) -> JournalPosition {
        self.full.last().map_or(self.active.start, |(oldest, _)| oldest.start)
    }

    /// Whether one has an entry.
    pub fn has_entries(&self) -> bool {
        self.newest_first().any(|placed| placed.memtable.sequences().is_some())
    }

    /// The memory of all memtables, in bytes.
    pub fn bytes(&self) -> u64 {
        self.newest_first().map(|placed| placed.memtable.bytes() as u64).sum()
    }
}

/// The changes that were applied.
#[derive(Default)]
struct AppliedChanges {
    last_number: u64,
    /// The bytes of their keys and values.
    written_bytes: u64,
    /// The `written_bytes` at which the active memtable began.
    active_from: u64,
}

/// When a memtable is full.
#[derive(Clone, Copy, Debug)]
pub struct MemtableBounds {
    /// From so many bytes of memory on.
    pub memory_bytes: usize,
    /// From so many bytes of keys and values on, wherever the values lie: until they are flushed and compacted, no one knows what they replaced, and the space of
    /// that is not free.
    pub written_bytes: u64,
}

/// The memtables of a volume.
pub struct Memtables {
    /// Held while a change is inserted, and while the active memtable becomes a full one.
    applied: Mutex<AppliedChanges>,
    stack: Mutex<Arc<MemtableStack>>,
    bounds: MemtableBounds,
}

fn placed(start: JournalPosition) -> PlacedMemtable {
    let memtable = Arc::new(Memtable::default());
    PlacedMemtable { slot: Arc::new(MemtableSlot::new(Arc::clone(&memtable))), memtable, start }
}

impl Memtables {
    /// An empty memtable, whose changes follow `last_number` and begin at a position.
    pub fn new(start: JournalPosition, last_number: u64, bounds: MemtableBounds) -> Memtables {
        let stack = MemtableStack { active: placed(start), full: SmallVec::new() };
        let applied = Mutex::new(AppliedChanges { last_number, ..AppliedChanges::default() });
        Memtables { applied, stack: Mutex::new(Arc::new(stack)), bounds }
    }

    /// The memtables of this moment.
    pub fn current(&self) -> Arc<MemtableStack> {
        Arc::clone(&self.stack.lock())
    }

    /// The number of the last change that a reader finds.
    pub fn last_number(&self) -> u64 {
        self.applied.lock().last_number
    }

    /// The bytes of all keys and values that were applied, wherever the values lie.
    pub fn written_bytes(&self) -> u64 {
        self.applied.lock().written_bytes
    }

    /// Applies the change with this number, of which `entry` is the entry if it has one. `position` gives where the journal has it, if the change is the first
    /// of a memtable. False, and nothing is inserted, if there is an entry at its place. REQUIRES: changes come in the order of their numbers.
    #[must_use]
    pub fn apply(
        &self,
        number: u64,
        entry: Option<&TreeEntry<'_>>,
        position: impl FnOnce() -> JournalPosition,
    ) -> bool {
        let mut applied = self.applied.lock();
        assert!(number > applied.last_number, "change {number} after {}", applied.last_number);
        let mut is_inserted = true;
        if let Some(entry) = entry {
            let mut active = Arc::clone(&self.stack.lock().active.memtable);
            let is_full = active.bytes() >= self.bounds.memory_bytes
                || applied.written_bytes - applied.active_from >= self.bounds.written_bytes;
            if is_full && active.sequences().is_some() {
                active = self.rotate_after(&mut applied, position());
            }
            applied.written_bytes += (entry.key.len() + entry.value_bytes()) as u64;
            is_inserted = active.insert(entry);
        }
        applied.last_number = number;
        is_inserted
    }

    /// Makes the active memtable a full one, unless it is empty. `position` gives where the journal has the changes that follow, and is called while none is
    /// applied. False if it is empty.
    pub fn rotate(&self, position: impl FnOnce() -> JournalPosition) -> bool {
        let mut applied = self.applied.lock();
        let is_empty = self.current().active.memtable.sequences().is_none();
        if !is_empty {
            self.rotate_after(&mut applied, position());
        }
        !is_empty
    }

    /// Moves the start of an empty active memtable, without full ones before it, to `position`, called while no change is applied.
    pub fn advance_start(&self, position: impl FnOnce() -> JournalPosition) {
        let _applied = self.applied.lock();
        let mut stack = self.stack.lock();
        if stack.full.is_empty() && stack.active.memtable.sequences().is_none() {
            let active = PlacedMemtable { start: position(), ..stack.active.clone() };
            *stack = Arc::new(MemtableStack { active, full: SmallVec::new() });
        }
    }

    fn rotate_after(&self, applied: &mut AppliedChanges, start: JournalPosition) -> Arc<Memtable> {
        applied.active_from = applied.written_bytes;
        let next = placed(start);
        let memtable = Arc::clone(&next.memtable);
        let mut stack = self.stack.lock();
        let mut full = stack.full.clone();
        full.insert(0, (stack.active.clone(), applied.last_number));
        *stack = Arc::new(MemtableStack { active: next, full });
        memtable
    }

    /// The oldest full memtable, and the number of the last change before the next one's.
    pub fn oldest_full(&self) -> Option<(PlacedMemtable, u64)> {
        self.stack.lock().full.last().cloned()
    }

    /// Releases the oldest full memtable, which became these tables. REQUIRES: the current version has them.
    ///
    /// # Panics
    /// If there is none.
    pub fn release_oldest(&self, tables: Vec<Arc<TableMeta>>) {
        let mut stack = self.stack.lock();
        let mut full = stack.full.clone();
        let (oldest, _) = full.pop().expect("the caller flushed it");
        *stack = Arc::new(MemtableStack { active: stack.active.clone(), full });
        drop(stack);
        drop(oldest.slot.replace(FlushedTables(tables)));
    }

    /// Drops the entries up to a number, which tables have. For replay: nothing reads beside it.
    pub fn drop_through(&self, number: u64) {
        let mut stack = self.stack.lock();
        let mut full = stack.full.clone();
        full.retain(|(_, last)| *last > number);
        let mut active = stack.active.clone();
        if let Some((oldest, _)) = full.last_mut() {
            *oldest = without_through(oldest, number);
        } else {
            active = without_through(&active, number);
        }
        *stack = Arc::new(MemtableStack { active, full });
    }
}

/// A memtable without its entries up to a number.
fn without_through(old: &PlacedMemtable, number: u64) -> PlacedMemtable {
    if old.memtable.sequences().is_none_or(|sequences| *sequences.start() > number) {
        return old.clone();
    }
    let new = placed(old.start);
    let mut at = old.memtable.first_from(super::entry::Position::START);
    while let Some(index) = at {
        let entry = old.memtable.entry(index);
        if entry.sequence > number {
            assert!(new.memtable.insert(&entry), "its entries have places of their own");
        }
        at = old.memtable.following(index);
    }
    new
}

#[cfg(test)]
mod tests {
    use super::super::entry::EntryValue;
    use super::*;
    use octokv_base::{UnixTime, Version};

    fn entry(sequence: u64) -> TreeEntry<'static> {
        let value = EntryValue::Inline(b"value");
        TreeEntry { key: b"key", sequence, version: Version::NONE, expires_at: UnixTime::NEVER, value }
    }

    fn at(unit: u32) -> JournalPosition {
        JournalPosition { unit, ..JournalPosition::default() }
    }

    fn sequences(memtables: &Memtables) -> Vec<Vec<u64>> {
        let of = |placed: &PlacedMemtable| {
            let mut found = Vec::new();
            let mut next = placed.memtable.first_from(super::super::entry::Position::START);
            while let Some(index) = next {
                found.push(placed.memtable.entry(index).sequence);
                next = placed.memtable.following(index);
            }
            found
        };
        memtables.current().newest_first().map(of).collect()
    }

    fn bounds(memory_bytes: usize, written_bytes: u64) -> MemtableBounds {
        MemtableBounds { memory_bytes, written_bytes }
    }

    #[test]
    fn a_full_memtable_gives_way_to_another_and_the_journal_is_needed_from_the_oldest_on() {
        let memtables = Memtables::new(at(1), 10, bounds(1, u64::MAX));
        for number in 11..14 {
            assert!(memtables.apply(number, Some(&entry(number)), || at(number as u32)));
        }
        assert_eq!(sequences(&memtables)[0], [13]);
        assert_eq!(memtables.last_number(), 13);
        let through: Vec<u64> = memtables.current().full.iter().map(|(_, through)| *through).collect();
        assert!(through.is_sorted_by(|newer, older| newer > older), "{through:?}");
        assert_eq!(memtables.current().start(), at(1));
        while memtables.oldest_full().is_some() {
            memtables.release_oldest(Vec::new());
        }
        assert_eq!(memtables.current().start(), at(13));
    }

    #[test]
    fn a_memtable_is_full_of_values_that_lie_elsewhere() {
        let bytes = (entry(1).key.len() + entry(1).value_bytes()) as u64;
        let memtables = Memtables::new(at(1), 0, bounds(usize::MAX, 2 * bytes));
        for number in 1..=7 {
            assert!(memtables.apply(number, Some(&entry(number)), || at(number as u32)));
        }
        assert_eq!(sequences(&memtables), [vec![7], vec![6, 5], vec![4, 3], vec![2, 1]]);
        assert!(memtables.rotate(|| at(8)) && memtables.apply(8, Some(&entry(8)), || at(8)));
        assert!(memtables.apply(9, Some(&entry(9)), || at(9)));
        assert_eq!(sequences(&memtables)[..2], [vec![9, 8], vec![7]], "it counts from the rotation on");
    }

    #[test]
    fn an_empty_memtable_is_not_rotated_and_its_start_moves() {
        let memtables = Memtables::new(at(1), 10, bounds(usize::MAX, u64::MAX));
        assert!(!memtables.rotate(|| at(2)));
        assert!(memtables.apply(11, None, || at(3)));
        memtables.advance_start(|| at(4));
        assert_eq!((memtables.current().start(), memtables.last_number()), (at(4), 11));
        assert!(memtables.apply(12, Some(&entry(12)), || at(5)));
        memtables.advance_start(|| at(6));
        assert_eq!(memtables.current().start(), at(4), "it has an entry");
        assert!(memtables.rotate(|| at(7)));
        memtables.advance_start(|| at(8));
        assert_eq!(memtables.current().start(), at(4), "it has a full one before it");
    }

    #[test]
    fn replay_drops_what_tables_have() {
        let memtables = Memtables::new(at(1), 0, bounds(usize::MAX, u64::MAX));
        for number in 1..=9 {
            assert!(memtables.apply(number, Some(&entry(number)), || at(0)));
            if number == 3 || number == 6 {
                memtables.rotate(|| at(number as u32));
            }
        }
        memtables.drop_through(4);
        assert_eq!(sequences(&memtables), [vec![9, 8, 7], vec![6, 5]]);
        memtables.drop_through(8);
        assert_eq!(sequences(&memtables), [vec![9]]);
    }
}
