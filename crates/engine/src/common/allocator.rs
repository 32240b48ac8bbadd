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
//! Tested in `allocator_tests.rs` against a model.

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

    /// Allocates the lowest run of `longest` units or, if there is none, the lowest of the longest that are free, at least `shortest`.
    pub fn allocate_longest(&self, longest: u64, shortest: u64) -> Option<Extent> {
        let mut best: Option<(usize, u64)> = None;
        for (index, partition) in self.partitions.iter().enumerate() {
            let units = partition.lock().longest_run(longest).map_or(0, |(_, units)| units);
            if units >= shortest && best.is_none_or(|(_, most)| units > most) {
                best = Some((index, units));
            }
            if units == longest {
                break;
            }
        }
        let (index, _) = best?;
        // Others may have taken a part of it meanwhile.
        let (at, units) = self.partitions[index].lock().allocate_longest(longest, shortest)?;
        self.free_units.fetch_sub(units, Ordering::Relaxed);
        Some(Extent { location: self.first_unit + index as u64 * self.partition_units + at, units })
    }

    /// Whether so many units in a row are free in a partition.
    pub fn has_run(&self, units: u64) -> bool {
        let is_long = |(_, longest): (u64, u64)| longest == units;
        self.partitions.iter().any(|partition| partition.lock().longest_run(units).is_some_and(is_long))
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

    fn allocate_longest(&mut self, longest: u64, shortest: u64) -> Option<(u64, u64)> {
        let (at, units) = self.longest_run(longest).filter(|&(_, units)| units >= shortest)?;
        self.write_bits(at, units, false);
        self.next_unit = at + units;
        Some((at, units))
    }

    /// The lowest run of `enough` units, else the lowest of the longest: its start and its length.
    fn longest_run(&self, enough: u64) -> Option<(u64, u64)> {
        let (mut at, mut best) = (self.floor(1), None);
        while let Some(found) = self.next_free(at) {
            let units = self.run_length(found, enough).min(enough);
            if best.is_none_or(|(_, most)| units > most) {
                best = Some((found, units));
            }
            if units == enough {
                break;
            }
            at = found + units;
        }
        best
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
#[path = "allocator_tests.rs"]
mod tests;
