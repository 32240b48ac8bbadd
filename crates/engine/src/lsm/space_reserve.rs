//! The space that puts leave: what the memtables will take, and the reserve, of which garbage may take a part.
//!
//! ```text
//!   space   │ values that live, tables │ garbage │ free: for puts │ kept of the reserve, memtables │
//!   with all garbage collected         │         free: for puts  │ the whole reserve,   memtables │
//! ```
//! Puts end where, with all garbage collected, only the reserve would be free. Before that, garbage counts as free, up to the part of the reserve that no step of a collection needs: the
//! more garbage there may be, the deader is what is collected. With 91 % of 128 MiB alive, in values of 16 KiB, 3.5 bytes are moved for each that is written, instead of 5.5.
//!
//! In: what a volume uses. Out: what puts may use, and how much compaction has to do for it.
//! Invariants: a step of a collection fits in what is kept: all tables, written again, and the values that it moves. Tested below and in `tests/lsm_full.rs`.

use super::volume::{LsmVolume, rest_units_least};
use std::sync::atomic::Ordering;

/// While space is scarce, a compaction moves at most one of so many parts of the reserve.
const STEPS_OF_RESERVE: u64 = 8;
/// Space is short when puts can use less than this fraction of the reserve: one half.
const SHORT_DIVISOR: u64 = 2;
/// So many records of the longest kind have room in what is kept of the reserve: then one of them finds a free run although the free space is in many pieces.
const KEPT_RECORDS: u64 = 256;

/// How much compaction does for space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpaceDemand {
    /// Nothing more than what is worth it.
    None,
    /// What puts can use: entries that were replaced leave the levels, and garbage above what the reserve lends is collected.
    ForPuts,
    /// The same and all garbage that is worth it.
    Garbage,
    /// Everything, before a put is refused.
    All,
}

/// What the reserve is for, in units.
#[derive(Clone, Copy, Debug)]
struct ReserveUse {
    /// All of it.
    reserve: u64,
    /// All tables.
    tables: u64,
    /// The values that one step of a collection moves at most.
    step: u64,
    /// The longest record.
    longest_record: u64,
}

/// The most units of the reserve that garbage may take. The rest has room for two steps of a collection, one that runs, whose old tables and segments are still there, and the next; each writes
/// all tables at most and moves values of one step. Where tables have most of the space, because values are short, or where records are long beside the reserve, it lends nothing.
fn lendable_units(of: &ReserveUse) -> u64 {
    // A compaction is chosen if it writes three quarters of the free space at most.
    let steps = (2 * (of.tables + of.step)).div_ceil(3) * 4;
    of.reserve.saturating_sub(steps.max(KEPT_RECORDS * of.longest_record))
}

impl LsmVolume {
    /// Whether puts may still allocate `units`, which leaves the reserve and the space that the memtables will take.
    pub(super) fn has_spare_units(&self, units: u64) -> bool {
        self.release_reclaimed();
        self.space.free_units() >= self.spared_units() + units && !self.is_image_long()
    }

    /// Whether puts may allocate `units`, and a contiguous run of that length is free.
    pub(super) fn has_spare_run(&self, units: u64) -> bool {
        self.has_spare_units(units) && self.space.has_run(units)
    }

    /// The units that puts may still allocate.
    pub(super) fn spare_units(&self) -> u64 {
        self.space.free_units().saturating_sub(self.spared_units())
    }

    /// The units that puts leave: what the reserve does not lend, and what the memtables will take.
    pub(super) fn spared_units(&self) -> u64 {
        self.kept_units() + self.memtables.current().bytes() / self.unit_bytes() as u64
    }

    /// The units that only flushes and compactions take, once all garbage is collected.
    pub(super) fn reserve_units(&self) -> u64 {
        self.settings.reserve_bytes / self.unit_bytes() as u64
    }

    /// The units of the reserve that have to be free now: garbage may take the place of the others ([`LsmVolume::lendable_units`]).
    pub(super) fn kept_units(&self) -> u64 {
        self.reserve_units() - self.lendable_units().min(self.versions.overhead().dead)
    }

    /// The most units of the reserve that garbage may take the place of ([`lendable_units`]).
    fn lendable_units(&self) -> u64 {
        lendable_units(&ReserveUse {
            reserve: self.reserve_units(),
            tables: self.versions.overhead().tables,
            step: self.collected_bytes() / self.unit_bytes() as u64,
            longest_record: self.compaction.longest_record.load(Ordering::Relaxed),
        })
    }

    /// The most bytes of values that one compaction moves while space is scarce: what is freed at once is what puts wait for.
    pub(super) fn collected_bytes(&self) -> u64 {
        (self.settings.reserve_bytes / STEPS_OF_RESERVE).max(2 * self.settings.segment_bytes)
    }

    /// The units of a value segment that is as long as segments are.
    pub(super) fn segment_units(&self) -> u64 {
        self.settings.segment_bytes / self.unit_bytes() as u64
    }

    /// The units of a segment that begins with a record of so many. If the rest behind records of this length would be given back, it is a multiple of it: free space in many short rests is
    /// space that no value fits in.
    pub(super) fn segment_units_for(&self, units: u64) -> u64 {
        let segment_units = self.segment_units().max(units);
        let rest = segment_units % units.max(1);
        if rest < rest_units_least(self.unit_bytes() as u32) { segment_units } else { segment_units - rest }
    }

    /// Whether so much is dead that its collection makes space for puts: less than that they already have, out of the reserve.
    pub(super) fn has_excess_garbage(&self) -> bool {
        self.versions.overhead().dead > self.lendable_units()
    }

    /// Space for a record of so many units is wanted.
    pub(super) fn note_record(&self, units: u64) {
        let longest = &self.compaction.longest_record;
        if longest.load(Ordering::Relaxed) < units {
            longest.fetch_max(units, Ordering::Relaxed);
        }
    }

    /// Whether space is scarce, so that also segments that are mostly alive are collected.
    pub(super) fn is_space_scarce(&self) -> bool {
        self.space.free_units() < self.kept_units() + self.reserve_units()
    }

    /// Whether puts will soon find no space: compaction then makes some before they wait for it.
    pub(super) fn is_space_short(&self) -> bool {
        !self.has_spare_units(self.reserve_units() / SHORT_DIVISOR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_reserve_lends_what_no_step_of_a_collection_needs() {
        let lent = |tables, step, longest_record| {
            lendable_units(&ReserveUse { reserve: 10_000, tables, step, longest_record })
        };
        assert_eq!(lent(10, 125, 1), 10_000 - 360);
        assert_eq!(lent(0, 0, 1), 10_000 - 256);
        assert_eq!(lent(10, 125, 20), 10_000 - 5_120, "long records need runs");
        assert_eq!(lent(4_000, 125, 1), 0, "tables are written again");
        assert_eq!(lent(1, 1, 40), 0);
    }

    proptest! {
        #[test]
        fn a_step_beside_one_that_runs_fits_in_what_is_kept(
            reserve in 0..1u64 << 40, tables in 0..1u64 << 40, step in 0..1u64 << 40, longest_record in 0..1u64 << 30,
        ) {
            let lent = lendable_units(&ReserveUse { reserve, tables, step, longest_record });
            prop_assert!(lent <= reserve);
            if lent > 0 {
                let kept = reserve - lent;
                prop_assert!(kept / 4 * 3 + 3 >= 2 * (tables + step) && kept >= KEPT_RECORDS * longest_record);
            }
        }
    }
}
