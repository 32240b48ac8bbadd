//! Lengths of keys and values: fixed, uniform, or a few lengths by weight.
//! In: an index and the seed of the run. Out: a length. Invariant: a pure function of the two, so that a reader of a
//! value knows its length.

use octokv_base::prng::mix64;
use std::fmt;

/// Largest number of lengths of a [`SizeDistribution::Weighted`].
pub const WEIGHTS_MAX: usize = 64;

/// A distribution of lengths, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SizeDistribution {
    /// One length.
    Fixed(usize),
    /// All lengths from `min` to `max`, both included, equally often.
    Uniform {
        /// The shortest length.
        min: usize,
        /// The longest length.
        max: usize,
    },
    /// Lengths with their weights, of which at least one is not zero.
    Weighted(Vec<(usize, u32)>),
}

impl SizeDistribution {
    /// The length of the key or value of an index.
    #[inline]
    pub fn sample(&self, index: u64, seed: u64) -> usize {
        let drawn = |span: u64| ((u128::from(mix64(index ^ mix64(!seed))) * u128::from(span)) >> 64) as u64;
        match self {
            SizeDistribution::Fixed(bytes) => *bytes,
            SizeDistribution::Uniform { min, max: most } => min + drawn((most - min) as u64 + 1) as usize,
            SizeDistribution::Weighted(weights) => {
                let mut at = drawn(weights.iter().map(|(_, share)| u64::from(*share)).sum());
                for (bytes, share) in weights {
                    match at.checked_sub(u64::from(*share)) {
                        None => return *bytes,
                        Some(rest) => at = rest,
                    }
                }
                unreachable!("the sample is below the sum of the weights")
            }
        }
    }

    /// The shortest length that occurs.
    pub fn min_bytes(&self) -> usize {
        match self {
            SizeDistribution::Fixed(bytes) => *bytes,
            SizeDistribution::Uniform { min, .. } => *min,
            SizeDistribution::Weighted(weights) => weights.iter().map(|(bytes, _)| *bytes).min().unwrap_or(0),
        }
    }

    /// The longest length that occurs.
    pub fn max_bytes(&self) -> usize {
        match self {
            SizeDistribution::Fixed(bytes) => *bytes,
            SizeDistribution::Uniform { max, .. } => *max,
            SizeDistribution::Weighted(weights) => weights.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0),
        }
    }

    /// The only length, if there is one.
    pub fn fixed_bytes(&self) -> Option<usize> {
        (self.min_bytes() == self.max_bytes()).then(|| self.max_bytes())
    }

    /// Whether it can be sampled.
    pub fn is_valid(&self) -> bool {
        match self {
            SizeDistribution::Fixed(_) => true,
            SizeDistribution::Uniform { min, max: most } => min <= most,
            SizeDistribution::Weighted(weights) => {
                weights.len() <= WEIGHTS_MAX && weights.iter().any(|(_, share)| *share > 0)
            }
        }
    }
}

/// The form of the command line: `4096`, `100..2000`, `4096:9,65536:1`.
impl fmt::Display for SizeDistribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SizeDistribution::Fixed(bytes) => write!(f, "{bytes}"),
            SizeDistribution::Uniform { min, max: most } => write!(f, "{min}..{most}"),
            SizeDistribution::Weighted(weights) => {
                for (number, (bytes, share)) in weights.iter().enumerate() {
                    write!(f, "{}{bytes}:{share}", if number > 0 { "," } else { "" })?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uniform_lengths_are_equally_frequent_and_fixed_per_index() {
        let sizes = SizeDistribution::Uniform { min: 3, max: 12 };
        let mut counts = [0u32; 13];
        for index in 0..100_000 {
            let bytes = sizes.sample(index, 7);
            assert_eq!(bytes, sizes.sample(index, 7));
            counts[bytes] += 1;
        }
        // 10,000 expected of each, with a deviation of 95.
        assert!(counts[3..].iter().all(|&count| count.abs_diff(10_000) < 500), "{counts:?}");
        assert!((0..100).any(|index| sizes.sample(index, 7) != sizes.sample(index, 8)), "the seed counts");
    }

    #[test]
    fn weights_are_relative_frequencies() {
        let sizes = SizeDistribution::Weighted(vec![(4096, 9), (77, 0), (65536, 1)]);
        let large = (0..100_000).filter(|&index| sizes.sample(index, 1) == 65536).count();
        assert!((9_500..10_500).contains(&large), "{large}");
        assert!((0..1000).all(|index| sizes.sample(index, 1) != 77));
        assert_eq!((sizes.min_bytes(), sizes.max_bytes(), sizes.fixed_bytes()), (77, 65536, None));
        assert_eq!(sizes.to_string(), "4096:9,77:0,65536:1");
    }

    #[test]
    fn size_distributions_that_cannot_be_sampled_are_invalid() {
        let table = [
            (SizeDistribution::Fixed(0), true),
            (SizeDistribution::Uniform { min: 5, max: 5 }, true),
            (SizeDistribution::Uniform { min: 6, max: 5 }, false),
            (SizeDistribution::Weighted(vec![]), false),
            (SizeDistribution::Weighted(vec![(1, 0)]), false),
            (SizeDistribution::Weighted(vec![(1, 1); 64]), true),
            (SizeDistribution::Weighted(vec![(1, 1); 65]), false),
        ];
        for (sizes, want) in table {
            assert_eq!(sizes.is_valid(), want, "{sizes}");
        }
        assert_eq!(SizeDistribution::Uniform { min: 5, max: 5 }.fixed_bytes(), Some(5));
    }
}
