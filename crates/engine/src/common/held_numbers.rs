//! The numbers of held locks: a set whose operations take a few steps, however many it has.
//!
//! Open addressing with linear probing, at most half full; a removal moves the numbers behind it up, so that nothing marks
//! where one was. The table keeps its capacity, at most four times the most numbers that it ever had. Numbers are bits of a hash: a host
//! that knows the hash function and crafts keys of one home makes a list of them, of the length of its own operations.
//!
//! Invariants: a power of two of slots, or none; no empty slot is between a number and its home. Tested below against a model.

/// Marks a slot without a number.
const EMPTY: u64 = u64::MAX;
/// Slots of the smallest table.
const SLOTS_MIN: usize = 16;
/// The low bits of a number, which may have selected the shard that the set is of: they select no slot.
pub const SHARD_BITS: u32 = 6;

/// A set of at most `MAX` numbers.
pub struct HeldNumbers<const MAX: usize> {
    /// A number that was added while the set was empty: usually all that there is. [`EMPTY`] if that was removed.
    alone: u64,
    /// The table of the others.
    slots: Vec<u64>,
    /// The numbers in the set.
    count: usize,
}

impl<const MAX: usize> Default for HeldNumbers<MAX> {
    fn default() -> HeldNumbers<MAX> {
        HeldNumbers { alone: EMPTY, slots: Vec::new(), count: 0 }
    }
}

impl<const MAX: usize> HeldNumbers<MAX> {
    /// The numbers in the set.
    #[inline]
    pub fn count(&self) -> usize {
        self.count
    }

    /// Whether the set has `number`.
    pub fn contains(&self, number: u64) -> bool {
        self.alone == number || (!self.slots.is_empty() && self.slots[self.find(number)] == number)
    }

    /// Adds `number`. False if the set has it. REQUIRES: it is not [`u64::MAX`].
    ///
    /// # Panics
    /// If the set has `MAX` numbers.
    #[inline]
    pub fn insert(&mut self, number: u64) -> bool {
        debug_assert_ne!(number, EMPTY);
        if self.count == 0 {
            (self.alone, self.count) = (number, 1);
            return true;
        }
        self.alone != number && self.insert_in_table(number)
    }

    /// Removes `number`. False if the set does not have it.
    #[inline]
    pub fn remove(&mut self, number: u64) -> bool {
        if self.alone == number {
            self.alone = EMPTY;
            self.count -= 1;
            return true;
        }
        self.remove_from_table(number)
    }

    /// The slot of `number`, or the empty one to which it would be added. REQUIRES: there is a table.
    fn find(&self, number: u64) -> usize {
        let mask = self.slots.len() - 1;
        let mut at = (number >> SHARD_BITS) as usize & mask;
        while self.slots[at] != number && self.slots[at] != EMPTY {
            at = (at + 1) & mask;
        }
        at
    }

    #[inline(never)]
    fn insert_in_table(&mut self, number: u64) -> bool {
        assert!(self.count < MAX, "more than {MAX} locks are held");
        if self.count * 2 >= self.slots.len() {
            self.grow();
        }
        let at = self.find(number);
        if self.slots[at] == number {
            return false;
        }
        self.slots[at] = number;
        self.count += 1;
        true
    }

    #[inline(never)]
    fn remove_from_table(&mut self, number: u64) -> bool {
        if self.slots.is_empty() {
            return false;
        }
        let (mask, mut hole) = (self.slots.len() - 1, self.find(number));
        if self.slots[hole] == EMPTY {
            return false;
        }
        let mut at = (hole + 1) & mask;
        while self.slots[at] != EMPTY {
            let home = (self.slots[at] >> SHARD_BITS) as usize & mask;
            // It may move to the hole, unless that is before its home.
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.slots[hole] = self.slots[at];
                hole = at;
            }
            at = (at + 1) & mask;
        }
        self.slots[hole] = EMPTY;
        self.count -= 1;
        true
    }

    /// Doubles the table.
    #[cold]
    fn grow(&mut self) {
        let slots = (self.slots.len() * 2).max(SLOTS_MIN);
        let before = std::mem::replace(&mut self.slots, vec![EMPTY; slots]);
        for number in before.into_iter().filter(|&number| number != EMPTY) {
            let at = self.find(number);
            self.slots[at] = number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;
    use octokv_base::prng::mix64;
    use std::collections::BTreeSet;

    /// The number of slots between each number and its home, together and at most.
    fn probes<const MAX: usize>(set: &HeldNumbers<MAX>) -> (usize, usize) {
        let mask = set.slots.len().wrapping_sub(1);
        let numbers = set.slots.iter().enumerate().filter(|(_, number)| **number != EMPTY);
        let distances = numbers.map(|(at, number)| at.wrapping_sub((number >> SHARD_BITS) as usize) & mask);
        distances.fold((0, 0), |(sum, most), distance| (sum + distance, most.max(distance)))
    }

    #[test]
    fn the_set_agrees_with_a_model() {
        // Many numbers of few homes, and of many.
        for (seed, range) in [(1, 40), (2, 500), (3, 10_000), (4, u64::MAX - 1)] {
            let (mut random, mut set) = (Prng::new(seed), HeldNumbers::<{ 1 << 20 }>::default());
            let mut model = BTreeSet::new();
            for step in 0..40_000_u64 {
                // Grows first, and later shrinks to nothing.
                let number = random.below(range);
                match random.below(40_000) > step {
                    true => assert_eq!(set.insert(number), model.insert(number)),
                    false => {
                        let number = model.range(number..).next().copied().unwrap_or(number);
                        assert_eq!(set.remove(number), model.remove(&number));
                    }
                }
                let other = random.below(range);
                assert_eq!((set.contains(other), set.count()), (model.contains(&other), model.len()));
            }
            model.iter().for_each(|&number| assert!(set.contains(number) && set.remove(number)));
            assert_eq!((set.count(), probes(&set)), (0, (0, 0)));
        }
    }

    #[test]
    fn the_steps_to_a_number_do_not_grow_with_the_set() {
        let mut set = HeldNumbers::<{ 1 << 20 }>::default();
        // Numbers of one shard.
        let number = |index: u64| mix64(index) >> 9 << SHARD_BITS | 5;
        for index in 0..20_000 {
            assert!(set.insert(number(index)));
            if index.is_power_of_two() || index % 1_000 == 0 {
                let (sum, most) = probes(&set);
                assert!(sum as u64 <= index + 1 && most < 60, "{sum} and {most} steps with {index} numbers");
            }
        }
        (0..20_000).for_each(|index| assert!(set.remove(number(index))));
        assert_eq!(set.slots.len(), 65_536, "it keeps its capacity");
    }

    #[test]
    #[should_panic(expected = "more than 64 locks are held")]
    fn more_numbers_than_the_bound_are_a_bug() {
        let mut set = HeldNumbers::<64>::default();
        (0..64).for_each(|number| assert!(set.insert(number)));
        set.insert(64);
    }
}
