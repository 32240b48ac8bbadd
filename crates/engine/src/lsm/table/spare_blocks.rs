//! Memory of data blocks that have left the cache, which the blocks that a core reads next take.
//!
//! Of a cache that is full, each block that is read displaces another one, which any core has read. If the allocator had to give and take this memory, the
//! cores would wait for each other there: a block is larger than what an allocator keeps for each thread.
//!
//! In: blocks that were displaced. Out: empty memory of a capacity that is little more than wanted. Invariant: at most `SPARES_MAX` of at most `SPARE_BYTES_MAX` bytes are kept. Tested below.

use super::stored_entry::DataBlock;
use std::cell::RefCell;
use std::sync::Arc;

/// The most that are kept.
const SPARES_MAX: usize = 32;
/// Longer ones are not kept.
const SPARE_BYTES_MAX: usize = 16 << 10;
/// Capacities are multiples of this, so that blocks of nearly one length take each other's memory.
const STEP_BYTES: usize = 64;

/// The spare memory of a core.
#[derive(Debug, Default)]
pub struct SpareBlocks(RefCell<Vec<Vec<u8>>>);

impl SpareBlocks {
    /// Empty memory for so many bytes.
    pub(super) fn take(&self, bytes: usize) -> Vec<u8> {
        let capacity = bytes.next_multiple_of(STEP_BYTES);
        let mut spares = self.0.borrow_mut();
        let fits = |spare: &Vec<u8>| (bytes..=capacity + capacity / 16).contains(&spare.capacity());
        match spares.iter().rposition(fits) {
            Some(at) => spares.swap_remove(at),
            None => Vec::with_capacity(capacity),
        }
    }

    /// Keeps the memory of those blocks to which there is no other reference.
    pub(super) fn add(&self, displaced: impl IntoIterator<Item = Arc<DataBlock>>) {
        let mut spares = self.0.borrow_mut();
        for block in displaced {
            let Some(mut memory) = Arc::into_inner(block).map(DataBlock::into_memory) else { continue };
            if memory.capacity() > SPARE_BYTES_MAX {
                continue;
            }
            if spares.len() == SPARES_MAX {
                spares.remove(0);
            }
            memory.clear();
            spares.push(memory);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_tables::data_block;
    use super::*;

    #[test]
    fn a_block_takes_the_memory_of_one_of_nearly_its_length_that_nothing_else_has() {
        let spares = SpareBlocks::default();
        let first = data_block(3_000, |bytes| spares.take(bytes));
        let at = first.bytes().as_ptr();
        let other = Arc::clone(&first);
        spares.add([first]);
        assert!(spares.0.borrow().is_empty(), "another has it");
        spares.add([other]);
        assert!(spares.take(100).capacity() < 200, "too long for that");
        assert!(spares.take(3_300).capacity() >= 3_300, "too short for that");
        let [second, third] = [0; 2].map(|_| data_block(2_990, |bytes| spares.take(bytes)));
        assert_eq!(second.bytes().as_ptr(), at);
        assert_ne!(third.bytes().as_ptr(), at, "taken once");
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let spares = SpareBlocks::default();
        spares.add([data_block(SPARE_BYTES_MAX, Vec::with_capacity)]);
        assert!(spares.0.borrow().is_empty(), "too long");
        spares.add((0..2 * SPARES_MAX).map(|_| data_block(100, Vec::with_capacity)));
        assert_eq!(spares.0.borrow().len(), SPARES_MAX);
    }
}
