//! Key distributions: uniform, zipfian (a few hot keys), or latest (the newest keys).
//!
//! ```text
//!   uniform  any existing key
//!   zipf     rank r with probability ~ 1 / r^theta; a permutation scatters ranks over the keys
//!   latest   the same ranks, counted back from the newest key
//! ```
//! After YCSB (Cooper et al., SoCC 2010, section 4), which draws ranks as Gray et al. do (SIGMOD 1994, "Quickly
//! generating billion-record synthetic databases"). Here they come from `rand_distr` by rejection-inversion (Hörmann
//! and Derflinger 1996), which is exact and needs no sum over all keys when one is added. YCSB scatters ranks by a hash,
//! which can map two ranks to one key; a permutation maps each to a key of its own, so the keys follow Zipf's law exactly.
//! Invariant: samples depend on the seed and the number of keys only.

use octokv_base::Prng;
use octokv_base::prng::mix64;
use rand_distr::Distribution as _;
use std::convert::Infallible;

/// The skew of YCSB.
pub const ZIPF_THETA_DEFAULT: f64 = 0.99;
/// Range of the skew.
pub const ZIPF_THETA_RANGE: std::ops::RangeInclusive<f64> = 0.01..=10.0;

/// A distribution of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyDistribution {
    /// All keys equally often.
    Uniform,
    /// A few hot keys, scattered over the key space.
    Zipf,
    /// The newest most often.
    Latest,
}

impl KeyDistribution {
    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            KeyDistribution::Uniform => "uniform",
            KeyDistribution::Zipf => "zipf",
            KeyDistribution::Latest => "latest",
        }
    }

    /// Whether it has a skew (theta).
    pub fn is_skewed(self) -> bool {
        self != KeyDistribution::Uniform
    }
}

/// Samples the key indices of one worker.
pub struct KeySampler {
    distribution: KeyDistribution,
    theta: f64,
    permutation: RankPermutation,
    zipf: rand_distr::Zipf<f64>,
    /// Number of ranks of `zipf`.
    rank_count: u64,
}

impl KeySampler {
    /// Creates a sampler over `count` initial keys. Zipf scatters its ranks over these alone, so that inserts do not change
    /// how hot a key is.
    pub fn new(distribution: KeyDistribution, theta: f64, count: u64, seed: u64) -> KeySampler {
        KeySampler {
            distribution,
            theta,
            permutation: RankPermutation::new(count, seed),
            zipf: zipf(count, theta),
            rank_count: count,
        }
    }

    /// Samples an index below `present`, the current number of keys.
    ///
    /// REQUIRES: `present` is at least the initial number of keys.
    #[inline]
    pub fn sample(&mut self, present: u64, random: &mut Prng) -> u64 {
        match self.distribution {
            KeyDistribution::Uniform => random.below(present),
            KeyDistribution::Zipf => self.permutation.key_of_rank(self.rank(random)),
            KeyDistribution::Latest => {
                if present != self.rank_count {
                    (self.rank_count, self.zipf) = (present, zipf(present, self.theta));
                }
                present - 1 - self.rank(random)
            }
        }
    }

    /// Samples a rank; 0 is the most frequent.
    fn rank(&self, random: &mut Prng) -> u64 {
        (self.zipf.sample(&mut RandAdapter(random)) as u64).clamp(1, self.rank_count) - 1
    }
}

fn zipf(count: u64, theta: f64) -> rand_distr::Zipf<f64> {
    rand_distr::Zipf::new(count as f64, theta).expect("a validated configuration has keys and a valid theta")
}

/// Adapts [`Prng`] to the trait of `rand`.
struct RandAdapter<'a>(&'a mut Prng);

impl rand::TryRng for RandAdapter<'_> {
    type Error = Infallible;
    fn try_next_u32(&mut self) -> Result<u32, Infallible> {
        Ok((self.0.next_u64() >> 32) as u32)
    }
    fn try_next_u64(&mut self) -> Result<u64, Infallible> {
        Ok(self.0.next_u64())
    }
    fn try_fill_bytes(&mut self, bytes: &mut [u8]) -> Result<(), Infallible> {
        self.0.fill(bytes);
        Ok(())
    }
}

/// A permutation of `0..count` by cycle walking: a permutation of the numbers below the next power of two is repeated
/// until the result is below the count, which takes fewer than two rounds on average.
pub(crate) struct RankPermutation {
    count: u64,
    bits: u32,
    round_keys: [u64; 3],
}

impl RankPermutation {
    /// A permutation of the numbers below `count`.
    pub fn new(count: u64, seed: u64) -> RankPermutation {
        let bits = (u64::BITS - (count - 1).leading_zeros()).max(2);
        RankPermutation {
            count,
            bits,
            round_keys: std::array::from_fn(|round| mix64(mix64(seed) ^ round as u64)),
        }
    }

    /// Where `rank` goes. REQUIRES: it is below the count.
    pub fn key_of_rank(&self, rank: u64) -> u64 {
        let mask = u64::MAX >> (u64::BITS - self.bits);
        let mut at = rank;
        loop {
            for key in self.round_keys {
                // Each step is invertible: add, multiply by an odd number, fold the upper half onto the lower.
                at = at.wrapping_add(key >> 1).wrapping_mul(key | 1) & mask;
                at ^= at >> (self.bits / 2).max(1);
            }
            if at < self.count {
                return at;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLES: u64 = 400_000;

    fn frequencies(distribution: KeyDistribution, theta: f64, keys: u64) -> Vec<u64> {
        let (mut sampler, mut random) = (KeySampler::new(distribution, theta, keys, 1), Prng::new(1));
        let mut counts = vec![0; keys as usize];
        for _ in 0..SAMPLES {
            counts[sampler.sample(keys, &mut random) as usize] += 1;
        }
        counts
    }

    /// Pearson's statistic of counts against shares, over its degrees of freedom.
    fn deviation(counts: &[u64], shares: &[f64]) -> f64 {
        let total: f64 = shares.iter().sum();
        let term = |(&count, share): (&u64, &f64)| {
            let expected = SAMPLES as f64 * share / total;
            (count as f64 - expected).powi(2) / expected
        };
        counts.iter().zip(shares).map(term).sum::<f64>() / (counts.len() - 1) as f64
    }

    #[test]
    fn uniform_samples_all_keys_equally() {
        let chi = deviation(&frequencies(KeyDistribution::Uniform, ZIPF_THETA_DEFAULT, 1000), &[1.0; 1000]);
        // 1 expected, with a deviation of sqrt(2 / 999) = 0.045.
        assert!((0.8..1.2).contains(&chi), "{chi}");
    }

    #[test]
    fn zipf_and_latest_sample_by_rank() {
        for theta in [0.5, ZIPF_THETA_DEFAULT, 1.0, 1.5] {
            let shares: Vec<f64> = (1..=500).map(|rank| f64::from(rank).powf(-theta)).collect();
            let latest: Vec<u64> =
                frequencies(KeyDistribution::Latest, theta, 500).into_iter().rev().collect();
            let zipf = frequencies(KeyDistribution::Zipf, theta, 500);
            let permutation = RankPermutation::new(500, 1);
            let by_rank: Vec<u64> =
                (0..500).map(|rank| zipf[permutation.key_of_rank(rank) as usize]).collect();
            for counts in [latest, by_rank] {
                let chi = deviation(&counts, &shares);
                // 1 expected, with a deviation of sqrt(2 / 499) = 0.063.
                assert!((0.75..1.25).contains(&chi), "theta {theta}: {chi}");
            }
        }
    }

    #[test]
    fn every_rank_has_a_key_of_its_own_and_hot_ones_are_spread() {
        for count in [1, 2, 3, 10, 255, 256, 257, 5000] {
            let permutation = RankPermutation::new(count, 9);
            let mut seen = vec![false; count as usize];
            (0..count).for_each(|rank| seen[permutation.key_of_rank(rank) as usize] = true);
            assert!(seen.iter().all(|&seen| seen), "{count}");
        }
        let permutation = RankPermutation::new(1_000_000, 1);
        let mut hot: Vec<u64> = (0..100).map(|rank| permutation.key_of_rank(rank) / 100_000).collect();
        hot.sort_unstable();
        hot.dedup();
        assert_eq!(hot.len(), 10, "each tenth of the keys has some of the hundred hottest");
    }

    #[test]
    fn a_seed_repeats_its_samples_and_latest_follows_inserts() {
        let sample = |seed| {
            let (mut sampler, mut random) =
                (KeySampler::new(KeyDistribution::Latest, ZIPF_THETA_DEFAULT, 10, 1), Prng::new(seed));
            (10..500).map(|present| sampler.sample(present, &mut random)).collect::<Vec<_>>()
        };
        assert_eq!(sample(3), sample(3));
        assert_ne!(sample(3), sample(4));
        assert!(sample(3).iter().zip(10..).all(|(&index, present)| index < present));
        assert!(sample(3).iter().any(|&index| index > 400));
    }
}
