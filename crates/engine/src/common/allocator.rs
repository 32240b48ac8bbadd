//! The space allocator: OctoKV's block bitmap, in partitions (OctoKV §IV.C).
//!
//! Each partition has a bit per unit (1 = free) and a summary bit per 64 units (1 = some are free), so that a search skips
//! full regions 4,096 units at a time. For each short length it keeps a floor below which no run of that length begins,
//! and a search starts at the floor.
//!
//! In memory the allocator is first fit ([`FitPolicy::First`], as in the paper), which reuses cached space. On a device
//! it is next fit ([`FitPolicy::Next`]), and a core stays with a partition until that is full: records written together
//! are adjacent, and the kernel merges adjacent writes.
//!
//! Invariants: a unit is free in the bitmap exactly if no record, reader or write uses it; no floor is above the start of
//! a run that fits.
//! Tested below against a model.

use crate::bug_injection::{self, InjectedBug};
use parking_lot::Mutex;
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

/// A run of consecutive units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first unit.
    pub location: u64,
    /// The number of units.
    pub units: u64,
}

/// Which free run is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FitPolicy {
    /// The lowest of the partition.
    First,
    /// The lowest after the last allocation; if there is none, the lowest of the partition.
    Next,
}

/// If less than one unit in this many is free, allocation is first fit.
const SCARCE_DIVISOR: u64 = 4;

/// The free space of a volume.
pub struct SpaceAllocator {
    partitions: Box<[Mutex<BitmapPartition>]>,
    fit: FitPolicy,
    first_unit: u64,
    partition_units: u64,
    units: u64,
    free_units: AtomicU64,
}

impl SpaceAllocator {
    /// `units` free units from unit `first` on, in `partitions` partitions.
    pub fn new(first: u64, units: u64, partitions: usize, fit: FitPolicy) -> SpaceAllocator {
        // Whole words, so that a partition begins at bit 0.
        let partition_units = units.div_ceil(partitions as u64).next_multiple_of(64);
        let part = |index: u64| {
            let before = (index * partition_units).min(units);
            Mutex::new(BitmapPartition::new(((index + 1) * partition_units).min(units) - before))
        };
        SpaceAllocator {
            partitions: (0..partitions as u64).map(part).collect(),
            fit,
            first_unit: first,
            partition_units,
            units,
            free_units: AtomicU64::new(units),
        }
    }

    /// The number of units, free or in use.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// The number of free units.
    pub fn free_units(&self) -> u64 {
        self.free_units.load(Ordering::Relaxed)
    }

    /// Allocates a run of `units` from the partition that `hash` selects or, with [`FitPolicy::Next`], from
    /// `preferred_partition`; otherwise from the next partition that has one, which becomes the preferred one.
    pub fn allocate(&self, hash: u64, preferred_partition: &Cell<usize>, units: u64) -> Option<Extent> {
        if self.free_units() < units {
            return None;
        }
        let count = self.partitions.len();
        // Next fit splits long runs that first fit leaves whole.
        let is_scarce = self.free_units() < self.units / SCARCE_DIVISOR
            || bug_injection::is_injected(InjectedBug::IgnoreEpochs);
        let fit = if is_scarce { FitPolicy::First } else { self.fit };
        let home = match fit {
            FitPolicy::First => ((u128::from(hash) * count as u128) >> 64) as usize,
            FitPolicy::Next => preferred_partition.get(),
        };
        for step in 0..count {
            let index = (home + step) % count;
            let found = self.partitions[index].lock().allocate(units, fit);
            if let Some(at) = found {
                self.free_units.fetch_sub(units, Ordering::Relaxed);
                preferred_partition.set(index);
                return Some(Extent {
                    location: self.first_unit + index as u64 * self.partition_units + at,
                    units,
                });
            }
        }
        None
    }

    /// The first preferred partition of core `core` of `cores`. REQUIRES: `core < cores`.
    pub fn initial_partition(&self, core: usize, cores: usize) -> usize {
        core * self.partitions.len() / cores
    }

    /// Frees a run. REQUIRES: the run was allocated, and no reader or write uses it.
    pub fn release(&self, extent: Extent) {
        let (index, at) = self.extent_offset(extent);
        self.partitions[index].lock().set_free(at, extent.units);
        self.free_units.fetch_add(extent.units, Ordering::Relaxed);
    }

    /// Marks a run as used during recovery. False if a part of it is in use already or outside the record area.
    pub fn mark_used(&self, extent: Extent) -> bool {
        let end = extent.location.checked_add(extent.units);
        if extent.location < self.first_unit || end.is_none_or(|end| end > self.first_unit + self.units) {
            return false;
        }
        let (index, at) = self.extent_offset(extent);
        if !self.partitions[index].lock().mark_used(at, extent.units) {
            return false;
        }
        self.free_units.fetch_sub(extent.units, Ordering::Relaxed);
        true
    }

    /// The number of partitions.
    pub fn partition_count(&self) -> usize {
        self.partitions.len()
    }

    /// The units of a partition; none of one behind the end of a small record area. REQUIRES: `index` is below
    /// [`SpaceAllocator::partition_count`].
    pub fn partition_range(&self, index: usize) -> Range<u64> {
        let start = |index: u64| self.first_unit + (index * self.partition_units).min(self.units);
        start(index as u64)..start(index as u64 + 1)
    }

    /// The unit after the last allocation in a partition, its first unit before the first one. Next fit searches from here.
    /// REQUIRES: as for [`SpaceAllocator::partition_range`].
    pub fn next_unit(&self, index: usize) -> u64 {
        self.partition_range(index).start + self.partitions[index].lock().next_unit
    }

    /// The first free unit of `range`. REQUIRES: `range` is within one partition.
    pub fn first_free(&self, range: Range<u64>) -> Option<u64> {
        let (index, at) = self.partition_offset(range.start)?;
        let free = self.partitions[index].lock().next_free(at)?;
        Some(range.start + (free - at)).filter(|&free| free < range.end)
    }

    /// The number of free units in `range`. REQUIRES: as for [`SpaceAllocator::first_free`].
    pub fn count_free(&self, range: Range<u64>) -> u64 {
        let Some((index, at)) = self.partition_offset(range.start) else { return 0 };
        self.partitions[index].lock().count_free(at, range.end.saturating_sub(range.start))
    }

    /// Allocates the first free run of `range`, as far as it lies in it, without moving the place of the next allocation.
    /// REQUIRES: as for [`SpaceAllocator::first_free`].
    pub fn allocate_within(&self, range: Range<u64>) -> Option<Extent> {
        let (index, at) = self.partition_offset(range.start)?;
        let units_max = range.end.saturating_sub(range.start);
        let (found, units) = self.partitions[index].lock().allocate_within(at, units_max)?;
        self.free_units.fetch_sub(units, Ordering::Relaxed);
        Some(Extent { location: range.start + (found - at), units })
    }

    /// The partition of a unit and the unit's index there; `None` for a unit outside of the record area.
    fn partition_offset(&self, unit: u64) -> Option<(usize, u64)> {
        let at = unit.checked_sub(self.first_unit).filter(|&at| at < self.units)?;
        Some(((at / self.partition_units) as usize, at % self.partition_units))
    }

    fn extent_offset(&self, extent: Extent) -> (usize, u64) {
        let at = extent.location - self.first_unit;
        ((at / self.partition_units) as usize, at % self.partition_units)
    }
}

const FLOOR_LENGTHS: usize = 64;

struct BitmapPartition {
    words: Vec<u64>,
    summary: Vec<u64>,
    /// `floors[i]`: no free run of at least `i + 1` units begins below it.
    floors: [u64; FLOOR_LENGTHS],
    /// The floors above 0, as a bit mask: few, since the records of a store have few lengths.
    raised_floors: u64,
    /// The unit after the last allocation.
    next_unit: u64,
}

/// The indexes of the set bits.
fn set_bit_indexes(mut set: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let bit = (set != 0).then(|| set.trailing_zeros() as usize)?;
        set &= set - 1;
        Some(bit)
    })
}

/// A mask of the lowest `count` bits, at most [`FLOOR_LENGTHS`].
fn low_bits_mask(count: u64) -> u64 {
    u64::MAX >> (64 - count.clamp(1, FLOOR_LENGTHS as u64))
}

impl BitmapPartition {
    fn new(units: u64) -> BitmapPartition {
        let words = units.div_ceil(64) as usize;
        let summary = vec![0; words.div_ceil(64)];
        let mut partition = BitmapPartition {
            words: vec![0; words],
            summary,
            floors: [0; FLOOR_LENGTHS],
            raised_floors: 0,
            next_unit: 0,
        };
        partition.set_free(0, units);
        partition
    }

    /// The start of a search for `units`: a run of that length is also a run of every shorter length.
    fn floor(&self, units: u64) -> u64 {
        set_bit_indexes(self.raised_floors & low_bits_mask(units))
            .map(|length| self.floors[length])
            .max()
            .unwrap_or(0)
    }

    fn allocate(&mut self, units: u64, fit: FitPolicy) -> Option<u64> {
        let floor = self.floor(units);
        let after_last = match fit {
            FitPolicy::Next if self.next_unit > floor => self.find_run(self.next_unit, units),
            _ => None,
        };
        let at = match after_last {
            Some(at) => at,
            None => self.lowest_run(floor, units)?,
        };
        self.write_bits(at, units, false);
        self.next_unit = at + units;
        Some(at)
    }

    /// The lowest run that fits, and raises the floor to its end.
    fn lowest_run(&mut self, floor: u64, units: u64) -> Option<u64> {
        let found = self.find_run(floor, units);
        let next = found.map_or(self.words.len() as u64 * 64, |at| at + units);
        if let Some(floor) = self.floors.get_mut(units as usize - 1) {
            *floor = next;
            self.raised_floors |= 1 << (units - 1);
        }
        found
    }

    fn find_run(&self, from: u64, units: u64) -> Option<u64> {
        let mut at = from;
        loop {
            at = self.next_free(at)?;
            let run = self.run_length(at, units);
            if run >= units {
                return Some(at);
            }
            at += run;
        }
    }

    /// The first free unit from `at` on.
    fn next_free(&self, at: u64) -> Option<u64> {
        let word = (at / 64) as usize;
        if word >= self.words.len() {
            return None;
        }
        let rest = self.words[word] & (u64::MAX << (at % 64));
        if rest != 0 {
            return Some(word as u64 * 64 + u64::from(rest.trailing_zeros()));
        }
        let mut group = (word + 1) / 64;
        let mut mask = u64::MAX << ((word + 1) % 64);
        while group < self.summary.len() {
            let words = self.summary[group] & mask;
            if words != 0 {
                let word = group * 64 + words.trailing_zeros() as usize;
                return Some(word as u64 * 64 + u64::from(self.words[word].trailing_zeros()));
            }
            (group, mask) = (group + 1, u64::MAX);
        }
        None
    }

    /// The number of free units from `at` on, counted up to `enough`.
    fn run_length(&self, at: u64, enough: u64) -> u64 {
        let mut run = 0;
        while run < enough {
            let unit = at + run;
            let Some(word) = self.words.get((unit / 64) as usize) else { break };
            let ones = u64::from((!(word >> (unit % 64))).trailing_zeros());
            run += ones;
            if ones < 64 - unit % 64 {
                break;
            }
        }
        run
    }

    /// Allocates the first free run among `units` from `at` on, as far as it lies there: its start and its length.
    fn allocate_within(&mut self, at: u64, units: u64) -> Option<(u64, u64)> {
        let found = self.next_free(at).filter(|&found| found < at + units)?;
        let rest = at + units - found;
        let length = self.run_length(found, rest).min(rest);
        self.write_bits(found, length, false);
        Some((found, length))
    }

    /// The number of free units among `units` from `at` on.
    fn count_free(&self, at: u64, units: u64) -> u64 {
        let (mut unit, end, mut count) = (at, at + units, 0);
        while unit < end {
            let Some(word) = self.words.get((unit / 64) as usize) else { break };
            let within = (64 - unit % 64).min(end - unit);
            let mask = (u64::MAX >> (64 - within)) << (unit % 64);
            count += u64::from((word & mask).count_ones());
            unit += within;
        }
        count
    }

    fn set_free(&mut self, at: u64, units: u64) {
        if units == 0 {
            return;
        }
        assert!(
            self.write_bits(at, units, true),
            "units {at}..{} are freed and partly free already",
            at + units
        );
        // The run may join free units before it: floors drop to the start of the joined run. If that part is as long as
        // any length with a floor, every floor is at or below its start already.
        let start = at - self.free_before(at);
        if at - start < FLOOR_LENGTHS as u64 {
            // The floors of longer runs remain: none begins here.
            for length in set_bit_indexes(
                self.raised_floors & low_bits_mask(self.run_length(start, FLOOR_LENGTHS as u64)),
            ) {
                self.floors[length] = self.floors[length].min(start);
            }
        }
    }

    /// The number of free units directly before `at`, at least [`FLOOR_LENGTHS`] if there are more.
    fn free_before(&self, at: u64) -> u64 {
        let (word, shift) = ((at / 64) as usize, at % 64);
        let within = match shift {
            0 => 0,
            _ => u64::from((self.words[word] << (64 - shift)).leading_ones()),
        };
        // The shift fills with zeros: no more than `shift` units count here.
        match word.checked_sub(1) {
            Some(before) if within == shift => within + u64::from(self.words[before].leading_ones()),
            _ => within,
        }
    }

    fn mark_used(&mut self, at: u64, units: u64) -> bool {
        self.run_length(at, units) >= units && self.write_bits(at, units, false)
    }

    /// Sets the bits of a run. False if one had that value already.
    fn write_bits(&mut self, at: u64, units: u64, free: bool) -> bool {
        let (mut unit, end, mut all_changed) = (at, at + units, true);
        while unit < end {
            let (word, shift) = ((unit / 64) as usize, unit % 64);
            let count = (64 - shift).min(end - unit);
            let mask = (u64::MAX >> (64 - count)) << shift;
            let before = self.words[word];
            all_changed &= before & mask == if free { 0 } else { mask };
            self.words[word] = if free { before | mask } else { before & !mask };
            let bit = 1_u64 << (word % 64);
            if self.words[word] == 0 {
                self.summary[word / 64] &= !bit;
            } else {
                self.summary[word / 64] |= bit;
            }
            unit += count;
        }
        all_changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;
    use std::fmt;

    #[derive(Clone, Copy)]
    enum Operation {
        /// Of a number of units.
        Allocate(u64),
        /// Of what is free first among so many units from a unit on, in thirds of the partition.
        AllocateWithin(u64, u64),
        /// Of one of the runs that are held, if any; the number counts round.
        Free(usize),
    }

    /// One line, also in a failing list.
    impl fmt::Debug for Operation {
        fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
            match self {
                Operation::Allocate(units) => write!(f, "allocate {units}"),
                Operation::AllocateWithin(third, units) => write!(f, "within {units} from third {third}"),
                Operation::Free(number) => write!(f, "free held run {number}"),
            }
        }
    }

    /// In parts, so that a failing list loses whole parts first.
    fn operations() -> impl Strategy<Value = Vec<Operation>> {
        let operation = (0..16, 1..=12_u64, 1..=200_u64).prop_map(|(kind, small, large)| match kind {
            0..7 => Operation::Allocate(small),
            7 => Operation::Allocate(large),
            8 => Operation::AllocateWithin(small % 3, large),
            _ => Operation::Free(large as usize),
        });
        vec(vec(operation, 0..=110), 0..=110).prop_map(|parts| parts.concat())
    }

    fn assert_agrees_with_a_model(fit: FitPolicy, units: u64, operations: &[Operation]) {
        let mut partition = BitmapPartition::new(units);
        let mut model = vec![true; units as usize];
        let mut held: Vec<Extent> = Vec::new();
        let mut last_end = 0;
        for operation in operations {
            let length = match *operation {
                Operation::Allocate(length) => length,
                Operation::AllocateWithin(third, length) => {
                    let start = third * units / 3;
                    let range = start as usize..(start + length).min(units) as usize;
                    let free = range.clone().filter(|&at| model[at]).count() as u64;
                    assert_eq!(partition.count_free(start, length), free);
                    let first = range.clone().find(|&at| model[at]);
                    let run = first.map(|at| (at, (at..range.end).take_while(|&at| model[at]).count()));
                    let got = partition.allocate_within(start, length);
                    assert_eq!(
                        got,
                        run.map(|(at, length)| (at as u64, length as u64)),
                        "the run in {range:?}"
                    );
                    if let Some((at, length)) = run {
                        model[at..at + length].fill(false);
                        held.push(Extent { location: at as u64, units: length as u64 });
                    }
                    continue;
                }
                Operation::Free(_) if held.is_empty() => continue,
                Operation::Free(number) => {
                    let freed = held.swap_remove(number % held.len());
                    partition.set_free(freed.location, freed.units);
                    model[freed.location as usize..(freed.location + freed.units) as usize].fill(true);
                    continue;
                }
            };
            let fitting = model.windows(length as usize).enumerate();
            let mut fitting = fitting.filter(|(_, run)| run.iter().all(|&free| free)).map(|(at, _)| at);
            let expected = match fit {
                FitPolicy::First => fitting.next(),
                FitPolicy::Next => {
                    let lowest = fitting.next();
                    let mut all = lowest.into_iter().chain(fitting);
                    all.find(|&at| at >= last_end).or(lowest)
                }
            };
            let got = partition.allocate(length, fit);
            assert_eq!(got, expected.map(|at| at as u64), "the location of {length} units");
            if let Some(at) = got {
                last_end = (at + length) as usize;
                model[at as usize..(at + length) as usize].fill(false);
                held.push(Extent { location: at, units: length });
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 40, rng_seed: RngSeed::Fixed(1), failure_persistence: None, max_shrink_iters: 4_000,
            ..ProptestConfig::default()
        })]

        #[test]
        fn both_fit_policies_agree_with_a_model(
            fit in prop_oneof![Just(FitPolicy::First), Just(FitPolicy::Next)],
            units in 500..4_500_u64,
            operations in operations(),
        ) {
            assert_agrees_with_a_model(fit, units, &operations);
        }
    }

    #[test]
    fn a_full_partition_takes_from_the_next_and_all_comes_back() {
        for fit in [FitPolicy::First, FitPolicy::Next] {
            let space = SpaceAllocator::new(10, 1_000, 4, fit);
            let preferred_partition = Cell::new(space.initial_partition(1, 2));
            let mut held: Vec<Extent> =
                std::iter::from_fn(|| space.allocate(0, &preferred_partition, 3)).collect();
            assert!(held.len() * 3 + 4 * 2 >= 1_000, "{} runs", held.len());
            assert!(held.iter().all(|e| e.location >= 10 && e.location + 3 <= 1_010));
            held.drain(..).for_each(|extent| space.release(extent));
            assert_eq!(space.free_units(), 1_000);
        }
    }

    #[test]
    fn one_core_allocates_contiguous_space_on_a_device() {
        let space = SpaceAllocator::new(0, 4_096, 8, FitPolicy::Next);
        let (one, other) =
            (Cell::new(space.initial_partition(0, 2)), Cell::new(space.initial_partition(1, 2)));
        for i in 0..50_u64 {
            let hash = i.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            assert_eq!(space.allocate(hash, &one, 5).unwrap().location, i * 5);
            assert_eq!(space.allocate(hash, &other, 3).unwrap().location, 2_048 + i * 3);
        }
        // Freed space before the last allocation is not reused while there is space after it.
        space.release(Extent { location: 0, units: 5 });
        assert_eq!(space.allocate(0, &one, 5).unwrap().location, 250);
    }

    #[test]
    fn recovery_marks_each_existing_unit_used_once() {
        let space = SpaceAllocator::new(10, 1_000, 4, FitPolicy::First);
        let claim = |location, units| space.mark_used(Extent { location, units });
        assert!(claim(10, 5) && claim(1_009, 1));
        assert!(!claim(14, 2) && !claim(9, 1) && !claim(1_008, 2) && !claim(u64::MAX, 2));
        assert!(!claim(1_010, 1) && !claim(5_000, 1), "behind the last unit");
        // A partition has 256 units; a run is in one of them.
        assert!(!claim(10 + 512 - 1, 2) && claim(10 + 256, 256) && !claim(10 + 256, 1));
        assert_eq!(space.free_units(), 1_000 - 5 - 1 - 256);
    }

    #[test]
    fn first_fit_spreads_records_over_the_partitions_by_hash() {
        let space = SpaceAllocator::new(0, 4_096, 8, FitPolicy::First);
        for partition in 0..8 {
            for hash in [partition << 61, (partition << 61) + (1 << 60)] {
                let extent = space.allocate(hash, &Cell::new(0), 1).unwrap();
                assert_eq!(extent.location / 512, partition, "hash {hash:x}");
            }
        }
    }

    #[test]
    fn a_search_starts_behind_the_space_that_earlier_searches_found_full() {
        let mut partition = BitmapPartition::new(1_000);
        for i in 0..100 {
            assert_eq!(partition.allocate(3, FitPolicy::First), Some(i * 3));
        }
        // No run of 3 units begins before 300, so none of 4 does; a shorter one might.
        let floors = |partition: &BitmapPartition| [1, 2, 3, 4, 64, 200].map(|units| partition.floor(units));
        assert_eq!(floors(&partition), [0, 0, 300, 300, 300, 300]);
        partition.set_free(30, 3);
        partition.set_free(33, 2);
        assert_eq!(floors(&partition), [0, 0, 30, 30, 30, 30]);
        // Joined with the free units before it.
        assert_eq!(partition.allocate(5, FitPolicy::First), Some(30));
        assert_eq!(floors(&partition), [0, 0, 30, 30, 35, 35]);
        assert_eq!(partition.allocate(900, FitPolicy::First), None);
        assert_eq!(partition.allocate(64, FitPolicy::First), Some(300));
        assert_eq!(partition.allocate(2, FitPolicy::First), Some(364));
        assert_eq!(floors(&partition), [0, 366, 366, 366, 366, 366]);
        while partition.allocate(2, FitPolicy::First).is_some() {}
        assert_eq!(partition.floor(2), 1_024, "there is none up to the end of the last word");
    }

    #[test]
    #[should_panic(expected = "units 4..7 are freed and partly free already")]
    fn freeing_a_free_unit_is_a_bug() {
        let mut partition = BitmapPartition::new(100);
        partition.allocate(6, FitPolicy::First);
        partition.set_free(4, 3);
    }
}
