//! How many data blocks of a table the scans of a core enter, by level: so many the next scan reads at once.
//!
//! A seek does not say how far its scan goes. If each block is read when the scan comes to it, a scan of n blocks waits n times for the device; if the blocks
//! of the length that earlier scans had are one read, it waits once. So the arithmetic is: the smoothed mean of the lengths and half of
//! their smoothed deviation (means as those of round trips in RFC 6298), rounded: one more read costs more than one block too many. Scans of one block read one block.
//!
//! In: the lengths of scans that ended. Out: the expected length of the next. Invariant: between 1 and [`SCAN_BLOCKS_MAX`]. Tested below.

use crate::lsm::version_edit::LEVELS;
use std::cell::Cell;

/// The highest expected length, in blocks. A longer scan finds its length as it goes.
pub const SCAN_BLOCKS_MAX: u32 = 64;
/// Mean and deviation are in these parts of a block, and follow a sample by an eighth of the difference.
const PARTS: u32 = 256;

#[derive(Clone, Copy, Debug, Default)]
struct LengthEstimate {
    /// Zero: no scan has ended.
    mean: u32,
    deviation: u32,
}

/// The lengths of the scans of one core, by the level of the tables.
#[derive(Debug, Default)]
pub struct ScanLengths([Cell<LengthEstimate>; LEVELS]);

impl ScanLengths {
    /// The number of blocks that a scan from a seek on probably enters.
    pub fn expected(&self, level: usize) -> u32 {
        let LengthEstimate { mean, deviation } = self.0[level].get();
        ((mean + deviation / 2 + PARTS / 2) / PARTS).clamp(1, SCAN_BLOCKS_MAX)
    }

    /// Notes a scan that ended after so many blocks, at least one.
    pub fn add(&self, level: usize, blocks: u32) {
        let sample = blocks.clamp(1, SCAN_BLOCKS_MAX) * PARTS;
        let LengthEstimate { mean, deviation } = self.0[level].get();
        let mean = if mean == 0 { sample } else { mean };
        let next = LengthEstimate {
            mean: mean - mean / 8 + sample / 8,
            deviation: deviation - deviation / 8 + mean.abs_diff(sample) / 8,
        };
        self.0[level].set(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_are_expected_to_be_as_long_as_those_before() {
        // The lengths of scans, again and again, and the expected one after them.
        let table: [(&[u32], u32); 6] = [
            (&[], 1),
            (&[1], 1),
            (&[3, 4], 4),
            (&[7], 7),
            (&[250], SCAN_BLOCKS_MAX),
            // A long one in eight: most read some blocks in vain, far fewer than the long one would.
            (&[64, 1, 1, 1, 1, 1, 1, 1], 12),
        ];
        for (lengths, expected) in table {
            let scans = ScanLengths::default();
            for length in lengths.iter().cycle().take(lengths.len() * 100) {
                scans.add(2, *length);
            }
            assert_eq!((scans.expected(2), scans.expected(1)), (expected, 1), "{lengths:?}");
        }
    }

    #[test]
    fn the_expected_length_follows_a_change_of_the_workload() {
        let scans = ScanLengths::default();
        (0..50).for_each(|_| scans.add(0, u32::MAX));
        assert_eq!(scans.expected(0), SCAN_BLOCKS_MAX);
        let falls = (1..).find(|_| {
            scans.add(0, 1);
            scans.expected(0) == 1
        });
        assert!(falls.is_some_and(|scans| scans <= 64), "{falls:?}");
    }
}
