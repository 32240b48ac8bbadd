//! How long keys and values are: always the same, uniformly spread, or a few lengths by weight.
//! In: an index and the run's seed. Out: a length. Invariant: a pure function of the two, so that whoever reads a
//! value knows how long it must be.

use octokv_base::prng::mix;
use std::fmt;

/// The most lengths of a [`Sizes::Weighted`].
pub const WEIGHTS_MAX: usize = 64;

/// Lengths, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// One for all.
    Fixed(usize),
    /// Each between the two as often as any other, both included.
    Uniform {
        /// The shortest.
        least: usize,
        /// The longest.
        most: usize,
    },
    /// Lengths, each with its share; at least one share is not zero.
    Weighted(Vec<(usize, u32)>),
}

impl Sizes {
    /// The length of an index's key or value.
    #[inline]
    pub fn of(&self, index: u64, seed: u64) -> usize {
        let drawn = |span: u64| ((u128::from(mix(index ^ mix(!seed))) * u128::from(span)) >> 64) as u64;
        match self {
            Sizes::Fixed(bytes) => *bytes,
            Sizes::Uniform { least, most } => least + drawn((most - least) as u64 + 1) as usize,
            Sizes::Weighted(shares) => {
                let mut at = drawn(shares.iter().map(|(_, share)| u64::from(*share)).sum());
                for (bytes, share) in shares {
                    match at.checked_sub(u64::from(*share)) {
                        None => return *bytes,
                        Some(rest) => at = rest,
                    }
                }
                unreachable!("what is drawn is less than all shares together")
            }
        }
    }

    /// The shortest that occurs.
    pub fn least(&self) -> usize {
        match self {
            Sizes::Fixed(bytes) => *bytes,
            Sizes::Uniform { least, .. } => *least,
            Sizes::Weighted(shares) => shares.iter().map(|(bytes, _)| *bytes).min().unwrap_or(0),
        }
    }

    /// The longest that occurs.
    pub fn most(&self) -> usize {
        match self {
            Sizes::Fixed(bytes) => *bytes,
            Sizes::Uniform { most, .. } => *most,
            Sizes::Weighted(shares) => shares.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0),
        }
    }

    /// The only one, where there is one.
    pub fn fixed(&self) -> Option<usize> {
        (self.least() == self.most()).then(|| self.most())
    }

    /// Whether lengths can be drawn from it.
    pub fn makes_sense(&self) -> bool {
        match self {
            Sizes::Fixed(_) => true,
            Sizes::Uniform { least, most } => least <= most,
            Sizes::Weighted(shares) => {
                shares.len() <= WEIGHTS_MAX && shares.iter().any(|(_, share)| *share > 0)
            }
        }
    }
}

/// As it is typed: `4096`, `100..2000`, `4096:9,65536:1`.
impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sizes::Fixed(bytes) => write!(f, "{bytes}"),
            Sizes::Uniform { least, most } => write!(f, "{least}..{most}"),
            Sizes::Weighted(shares) => {
                for (number, (bytes, share)) in shares.iter().enumerate() {
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
    fn every_length_of_a_range_occurs_as_often_as_any_other_and_is_the_indexs_own() {
        let sizes = Sizes::Uniform { least: 3, most: 12 };
        let mut counts = [0u32; 13];
        for index in 0..100_000 {
            let bytes = sizes.of(index, 7);
            assert_eq!(bytes, sizes.of(index, 7));
            counts[bytes] += 1;
        }
        // 10,000 expected of each, with a deviation of 95.
        assert!(counts[3..].iter().all(|&count| count.abs_diff(10_000) < 500), "{counts:?}");
        assert!((0..100).any(|index| sizes.of(index, 7) != sizes.of(index, 8)), "the seed counts");
    }

    #[test]
    fn weights_are_shares() {
        let sizes = Sizes::Weighted(vec![(4096, 9), (77, 0), (65536, 1)]);
        let large = (0..100_000).filter(|&index| sizes.of(index, 1) == 65536).count();
        assert!((9_500..10_500).contains(&large), "{large}");
        assert!((0..1000).all(|index| sizes.of(index, 1) != 77));
        assert_eq!((sizes.least(), sizes.most(), sizes.fixed()), (77, 65536, None));
        assert_eq!(sizes.to_string(), "4096:9,77:0,65536:1");
    }

    #[test]
    fn lengths_that_cannot_be_drawn_make_no_sense() {
        let table = [
            (Sizes::Fixed(0), true),
            (Sizes::Uniform { least: 5, most: 5 }, true),
            (Sizes::Uniform { least: 6, most: 5 }, false),
            (Sizes::Weighted(vec![]), false),
            (Sizes::Weighted(vec![(1, 0)]), false),
            (Sizes::Weighted(vec![(1, 1); 64]), true),
            (Sizes::Weighted(vec![(1, 1); 65]), false),
        ];
        for (sizes, want) in table {
            assert_eq!(sizes.makes_sense(), want, "{sizes}");
        }
        assert_eq!(Sizes::Uniform { least: 5, most: 5 }.fixed(), Some(5));
    }
}
