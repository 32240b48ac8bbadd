//! Which key comes next: all alike, a few hot ones, or the newest ones.
//!
//! ```text
//!   uniform  any key that is there
//!   zipf     rank r with probability ~ 1 / r^theta; ranks are strewn over the keys by a permutation
//!   latest   the same ranks, counted back from the newest key
//! ```
//! After YCSB (Cooper et al., SoCC 2010, section 4), which draws ranks as Gray et al. do (SIGMOD 1994, "Quickly
//! generating billion-record synthetic databases"). Here they come from `rand_distr` by rejection-inversion (Hörmann
//! and Derflinger 1996), which is exact and needs no sum over all keys when one is added. YCSB strews ranks by a hash,
//! where two can fall on one key; a permutation gives each a key of its own, so the drawn keys are exactly Zipf's.
//! Invariant: what is drawn depends on the seed and on how many keys there are, on nothing else.

use octokv_base::Random;
use octokv_base::prng::mix;
use rand_distr::Distribution as _;
use std::convert::Infallible;

/// The skew that YCSB has.
pub const THETA: f64 = 0.99;
/// The skews that can be asked for.
pub const THETAS: std::ops::RangeInclusive<f64> = 0.01..=10.0;

/// How keys are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Distribution {
    /// All alike.
    Uniform,
    /// Some often, most seldom.
    Zipf,
    /// The newest most often.
    Latest,
}

impl Distribution {
    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Distribution::Uniform => "uniform",
            Distribution::Zipf => "zipf",
            Distribution::Latest => "latest",
        }
    }

    /// Whether it has a theta.
    pub fn is_skewed(self) -> bool {
        self != Distribution::Uniform
    }
}

/// Draws the indices of one worker.
pub struct Drawer {
    distribution: Distribution,
    theta: f64,
    strewn: Strewn,
    ranks: rand_distr::Zipf<f64>,
    /// How many ranks there are.
    count: u64,
}

impl Drawer {
    /// For `count` keys that are there from the beginning; zipf strews its ranks over these alone, so that a key stays
    /// as hot as it is when others are added.
    pub fn new(distribution: Distribution, theta: f64, count: u64, seed: u64) -> Drawer {
        Drawer { distribution, theta, strewn: Strewn::new(count, seed), ranks: ranks(count, theta), count }
    }

    /// An index below `present`, which is no less than at the beginning.
    #[inline]
    pub fn draw(&mut self, present: u64, random: &mut Random) -> u64 {
        match self.distribution {
            Distribution::Uniform => random.below(present),
            Distribution::Zipf => self.strewn.place(self.rank(random)),
            Distribution::Latest => {
                if present != self.count {
                    (self.count, self.ranks) = (present, ranks(present, self.theta));
                }
                present - 1 - self.rank(random)
            }
        }
    }

    /// A rank, 0 the most frequent.
    fn rank(&self, random: &mut Random) -> u64 {
        (self.ranks.sample(&mut Source(random)) as u64).clamp(1, self.count) - 1
    }
}

fn ranks(count: u64, theta: f64) -> rand_distr::Zipf<f64> {
    rand_distr::Zipf::new(count as f64, theta).expect("a plan has keys and a theta")
}

/// Our random numbers as `rand` takes them.
struct Source<'a>(&'a mut Random);

impl rand::TryRng for Source<'_> {
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

/// A permutation of `0..count`: one of the numbers below the next power of two, repeated until it falls below the
/// count, which takes fewer than two rounds on average.
struct Strewn {
    count: u64,
    bits: u32,
    keys: [u64; 3],
}

impl Strewn {
    fn new(count: u64, seed: u64) -> Strewn {
        let bits = (u64::BITS - (count - 1).leading_zeros()).max(2);
        Strewn { count, bits, keys: std::array::from_fn(|round| mix(mix(seed) ^ round as u64)) }
    }

    fn place(&self, rank: u64) -> u64 {
        let mask = u64::MAX >> (u64::BITS - self.bits);
        let mut at = rank;
        loop {
            for key in self.keys {
                // Each step can be undone: add, multiply by an odd number, fold the upper half onto the lower.
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

    const DRAWN: u64 = 400_000;

    fn frequencies(distribution: Distribution, theta: f64, keys: u64) -> Vec<u64> {
        let (mut drawer, mut random) = (Drawer::new(distribution, theta, keys, 1), Random::new(1));
        let mut counts = vec![0; keys as usize];
        for _ in 0..DRAWN {
            counts[drawer.draw(keys, &mut random) as usize] += 1;
        }
        counts
    }

    /// Pearson's statistic of counts against shares, over its degrees of freedom.
    fn deviation(counts: &[u64], shares: &[f64]) -> f64 {
        let total: f64 = shares.iter().sum();
        let term = |(&count, share): (&u64, &f64)| {
            let expected = DRAWN as f64 * share / total;
            (count as f64 - expected).powi(2) / expected
        };
        counts.iter().zip(shares).map(term).sum::<f64>() / (counts.len() - 1) as f64
    }

    #[test]
    fn uniform_draws_all_alike() {
        let chi = deviation(&frequencies(Distribution::Uniform, THETA, 1000), &[1.0; 1000]);
        // 1 expected, with a deviation of sqrt(2 / 999) = 0.045.
        assert!((0.8..1.2).contains(&chi), "{chi}");
    }

    #[test]
    fn zipf_and_latest_draw_by_rank() {
        for theta in [0.5, THETA, 1.0, 1.5] {
            let shares: Vec<f64> = (1..=500).map(|rank| f64::from(rank).powf(-theta)).collect();
            let latest: Vec<u64> = frequencies(Distribution::Latest, theta, 500).into_iter().rev().collect();
            let zipf = frequencies(Distribution::Zipf, theta, 500);
            let strewn = Strewn::new(500, 1);
            let by_rank: Vec<u64> = (0..500).map(|rank| zipf[strewn.place(rank) as usize]).collect();
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
            let strewn = Strewn::new(count, 9);
            let mut seen = vec![false; count as usize];
            (0..count).for_each(|rank| seen[strewn.place(rank) as usize] = true);
            assert!(seen.iter().all(|&seen| seen), "{count}");
        }
        let strewn = Strewn::new(1_000_000, 1);
        let mut hot: Vec<u64> = (0..100).map(|rank| strewn.place(rank) / 100_000).collect();
        hot.sort_unstable();
        hot.dedup();
        assert_eq!(hot.len(), 10, "each tenth of the keys has some of the hundred hottest");
    }

    #[test]
    fn a_seed_draws_the_same_again_and_latest_follows_what_is_added() {
        let draw = |seed| {
            let (mut drawer, mut random) =
                (Drawer::new(Distribution::Latest, THETA, 10, 1), Random::new(seed));
            (10..500).map(|present| drawer.draw(present, &mut random)).collect::<Vec<_>>()
        };
        assert_eq!(draw(3), draw(3));
        assert_ne!(draw(3), draw(4));
        assert!(draw(3).iter().zip(10..).all(|(&index, present)| index < present));
        assert!(draw(3).iter().any(|&index| index > 400));
    }
}
