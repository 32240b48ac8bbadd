//! A seeded pseudo-random number generator: a seed gives the same sequence on every machine and in every version.
//!
//! The generator is xoshiro256** (Blackman and Vigna, 2018) of the crate `rand_xoshiro`, seeded through SplitMix64. The
//! sequence is fixed by a test, since seeds are kept in tests and simulator runs. Not for secrets.

use rand_xoshiro::Xoshiro256StarStar;
use rand_xoshiro::rand_core::{Rng, SeedableRng};

/// A generator of one sequence.
#[derive(Clone, Debug)]
pub struct Prng(Xoshiro256StarStar);

impl Prng {
    /// The generator of a seed's sequence.
    pub fn new(seed: u64) -> Prng {
        Prng(Xoshiro256StarStar::seed_from_u64(seed))
    }

    /// A uniform number of 64 bits.
    #[inline]
    pub fn next_u64(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// A number in `0..bound`, uniform up to a bias of at most `bound / 2^64`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// True with probability `1 / n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Fills `bytes` with random bytes.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    /// A new generator, seeded from this one.
    pub fn fork(&mut self) -> Prng {
        Prng::new(self.next_u64())
    }
}

/// SplitMix64's mixing step: a bijection that spreads every input bit over the output.
pub fn mix64(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_of_a_seed_never_changes() {
        let mut random = Prng::new(1);
        let first: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        assert_eq!(first, [12966619160104079557, 9600361134598540522, 10590380919521690900]);
    }

    #[test]
    fn below_returns_less_than_its_bound() {
        let mut random = Prng::new(7);
        assert!((0..10_000).all(|_| random.below(10) < 10));
        assert_eq!(random.below(0), 0);
    }
}
