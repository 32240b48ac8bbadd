//! Room in the journal: which puts may enter it, so that edits always can.
//!
//! A flush of a memtable makes room in the journal, and needs some for its edit. So a put enters only while the ring keeps room for edits behind all puts that have
//! entered; one that finds none makes room first, or waits for who does.
//!
//! In: the units that the journal uses, lengths of changes. Out: passes. Invariant: the units used, and those that all puts with a pass may come to use, are at most those
//! of the ring but for its last quarter, which edits have. Of the ring counts what the journal uses before it waits for a checkpoint: not the longest batch, and
//! as much that may be unused at its end. Tested below.

use super::journal::JournalChange;
use crate::common::journal::{batch_units, batch_units_max};
use std::sync::atomic::{AtomicU64, Ordering};

/// The part of the ring that only edits use is one of so many.
const EDITS_DIVISOR: u64 = 4;
/// The part of the ring that only the edits of flushes use is one of so many: a flush is what makes room.
const FLUSHES_DIVISOR: u64 = 8;

/// The room that puts have in the journal.
pub struct JournalRoom {
    ring_units: u64,
    unit_bytes: u32,
    /// The units that puts with a pass may come to use.
    entered_units: AtomicU64,
}

/// A put's pass, until its change is committed.
pub struct JournalPass<'a> {
    room: &'a JournalRoom,
    units: u64,
}

impl JournalRoom {
    /// The room of a ring of so many units.
    pub fn new(ring_units: u32, unit_bytes: u32) -> JournalRoom {
        let ring_units = ring_units.saturating_sub(2 * batch_units_max::<JournalChange>(unit_bytes));
        JournalRoom { ring_units: ring_units.into(), unit_bytes, entered_units: AtomicU64::new(0) }
    }

    /// A pass for a change of so many bytes, beside the units that the journal uses now; `None` if there is no room.
    pub fn try_enter(
        &self,
        change_bytes: usize,
        used_units: impl FnOnce() -> u64,
    ) -> Option<JournalPass<'_>> {
        // In a batch of its own, at worst.
        let units = u64::from(batch_units(change_bytes, self.unit_bytes));
        let entered_units = self.entered_units.fetch_add(units, Ordering::Relaxed) + units;
        let pass = JournalPass { room: self, units };
        // The units used are looked at after the pass is counted: a put between entering and committing is counted twice, not never.
        let end = used_units() + entered_units;
        (end <= self.ring_units - self.ring_units / EDITS_DIVISOR).then_some(pass)
    }

    /// Whether a compaction's edit of so many bytes in each of its parts leaves room for the edits of flushes, beside the units that the journal uses now.
    pub fn has_room_for_edit(&self, parts: impl Iterator<Item = usize>, used_units: u64) -> bool {
        // In batches of their own, at worst.
        let units: u64 = parts.map(|bytes| u64::from(batch_units(bytes, self.unit_bytes))).sum();
        let entered_units = self.entered_units.load(Ordering::Relaxed);
        used_units + entered_units + units <= self.ring_units - self.ring_units / FLUSHES_DIVISOR
    }
}

impl Drop for JournalPass<'_> {
    fn drop(&mut self) {
        self.room.entered_units.fetch_sub(self.units, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn puts_enter_up_to_three_quarters_of_the_ring() {
        let room = JournalRoom::new(100 + 2 * 256, 512);
        let enter = |bytes, used| room.try_enter(bytes, || used);
        assert!(enter(100, 74).is_some(), "one unit beside 74");
        assert!(enter(100, 75).is_none());
        let passes: Vec<_> = (0..25).map(|_| enter(1_000, 0).unwrap()).collect();
        assert!(enter(100, 0).is_none(), "25 puts of three units each have entered");
        assert!(!room.has_room_for_edit([600, 600].into_iter(), 10), "75 and 10 units are used");
        drop(passes);
        assert!(enter(100, 74).is_some());
        let has_room = |parts: &[usize], used| room.has_room_for_edit(parts.iter().copied(), used);
        assert!(has_room(&[100, 100], 86) && !has_room(&[100, 100], 87), "88 units but for those of flushes");
    }
}
