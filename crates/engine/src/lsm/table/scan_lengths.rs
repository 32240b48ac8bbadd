//! How many data blocks of a table the scans of a core enter, by level: so many the next scan reads at once.
//!
//! A seek does not say how far its scan goes. If each block is read when the scan comes to it, a scan of n blocks waits n times for the device; if the blocks
//! of the length that earlier scans had are one read, it waits once.
//!
//! In: the lengths of scans that ended. Out: the expected length of the next. Invariant: between 1 and [`SCAN_BLOCKS_MAX`]. Tested below.

use crate::lsm::length_estimate::LengthEstimate;
use crate::lsm::version_edit::LEVELS;
use std::cell::Cell;

/// The highest expected length, in blocks. A longer scan finds its length as it goes.
pub const SCAN_BLOCKS_MAX: u32 = 512;

/// The lengths of the scans of one core, by the level of the tables.
#[derive(Debug, Default)]
pub struct ScanLengths([Cell<LengthEstimate>; LEVELS]);

impl ScanLengths {
    /// The number of blocks that a scan from a seek on probably enters.
    pub fn expected(&self, level: usize) -> u32 {
        self.0[level].get().expected().unwrap_or(1).min(SCAN_BLOCKS_MAX)
    }

    /// Notes a scan that ended after so many blocks, at least one.
    pub fn add(&self, level: usize, blocks: u32) {
        let mut estimate = self.0[level].get();
        estimate.add(blocks.min(SCAN_BLOCKS_MAX));
        self.0[level].set(estimate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_have_their_own_lengths_within_the_bounds() {
        let scans = ScanLengths::default();
        for _ in 0..50 {
            scans.add(0, u32::MAX);
            scans.add(2, 3);
        }
        assert_eq!([0, 1, 2].map(|level| scans.expected(level)), [SCAN_BLOCKS_MAX, 1, 3]);
        // The length of a long scan is cut before it is added: short ones are noticed soon.
        let falls = (1..).find(|_| {
            scans.add(0, 1);
            scans.expected(0) == 1
        });
        assert!(falls.is_some_and(|scans| scans <= 96), "{falls:?}");
    }
}
