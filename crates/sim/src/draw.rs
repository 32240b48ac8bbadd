//! Random choices that plans and clients share.
//!
//! In: a random number generator. Out: one choice.

use octokv_base::Prng;

/// A random element.
pub(crate) fn pick<T: Copy>(random: &mut Prng, of: &[T]) -> T {
    of[random.below(of.len() as u64) as usize]
}

/// A random number from `low` to `high`, both inclusive.
pub(crate) fn between(random: &mut Prng, low: u64, high: u64) -> u64 {
    low + random.below(high - low + 1)
}

/// A random index, distributed by these weights.
pub(crate) fn draw_weighted(random: &mut Prng, shares: &[u64]) -> usize {
    let mut left = random.below(shares.iter().sum());
    for (index, &share) in shares.iter().enumerate() {
        if left < share {
            return index;
        }
        left -= share;
    }
    0
}

/// A random value length of at most `most` bytes; 0 in one of 25 draws.
pub(crate) fn draw_value_bytes(random: &mut Prng, most: u64) -> usize {
    if random.one_in(25) {
        return 0;
    }
    octokv_engine::conformance::random_length(random, most)
}
