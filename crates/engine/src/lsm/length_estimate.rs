//! How long the next scan probably is, by those that ended.
//!
//! The arithmetic is the smoothed mean of the lengths and half of their smoothed deviation (means as those of round trips in RFC 6298), rounded: one more read
//! costs more than one block or value too many. Scans of one length are expected to have that length.
//!
//! In: the lengths of scans that ended. Out: the expected length of the next. Invariant: the estimate is within the shortest and the longest possible mean and deviation of its samples. Tested below.

/// Mean and deviation are in these parts of a unit, and follow a sample by an eighth of the difference.
const PARTS: u32 = 256;
/// Longer scans count as this long.
const LENGTH_MAX: u32 = 1 << 16;

/// The smoothed mean of lengths and their deviation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LengthEstimate {
    /// Zero: no scan has ended.
    mean: u32,
    deviation: u32,
}

impl LengthEstimate {
    /// The length of the next scan; `None` before one has ended.
    pub fn expected(self) -> Option<u32> {
        (self.mean > 0).then(|| ((self.mean + self.deviation / 2 + PARTS / 2) / PARTS).max(1))
    }

    /// Notes a scan of this length, at least 1.
    pub fn add(&mut self, length: u32) {
        let sample = length.clamp(1, LENGTH_MAX) * PARTS;
        let mean = if self.mean == 0 { sample } else { self.mean };
        self.mean = mean - mean / 8 + sample / 8;
        self.deviation = self.deviation - self.deviation / 8 + mean.abs_diff(sample) / 8;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scans_are_expected_to_be_as_long_as_those_before() {
        // The lengths of scans, again and again, and the expected one after them.
        let table: [(&[u32], Option<u32>); 7] = [
            (&[], None),
            (&[1], Some(1)),
            (&[3, 4], Some(4)),
            (&[7], Some(7)),
            (&[250], Some(250)),
            (&[u32::MAX], Some(LENGTH_MAX)),
            // A long one in eight: most read some blocks in vain, far fewer than the long one would.
            (&[64, 1, 1, 1, 1, 1, 1, 1], Some(12)),
        ];
        for (lengths, expected) in table {
            let mut estimate = LengthEstimate::default();
            lengths.iter().cycle().take(lengths.len() * 100).for_each(|length| estimate.add(*length));
            assert_eq!(estimate.expected(), expected, "{lengths:?}");
        }
    }

    #[test]
    fn the_expected_length_follows_a_change_of_the_workload() {
        let mut estimate = LengthEstimate::default();
        (0..50).for_each(|_| estimate.add(64));
        let falls = (1..).find(|_| {
            estimate.add(1);
            estimate.expected() == Some(1)
        });
        assert!(falls.is_some_and(|scans| scans <= 64), "{falls:?}");
    }
}
