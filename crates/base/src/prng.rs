//! Seeded randomness: the same seed gives the same numbers on every machine and in every version.
//!
//! The generator is xoshiro256** (Blackman and Vigna, 2018), seeded through SplitMix64. Not for secrets.

/// One stream of numbers.
#[derive(Clone, Debug)]
pub struct Prng([u64; 4]);

impl Prng {
    /// The stream of `seed`.
    pub fn new(seed: u64) -> Prng {
        let mut state = seed;
        Prng(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix64(state)
        }))
    }

    /// The next number, all 64 bits random.
    pub fn next_u64(&mut self) -> u64 {
        let s = &mut self.0;
        let result = s[1].wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number in `0..bound`; 0 where `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    /// A stream of its own, drawn from this one.
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
    fn the_stream_of_a_seed_never_changes() {
        let mut random = Prng::new(1);
        let first: Vec<u64> = (0..3).map(|_| random.next_u64()).collect();
        assert_eq!(first, [12966619160104079557, 9600361134598540522, 10590380919521690900]);
    }

    #[test]
    fn below_stays_below() {
        let mut random = Prng::new(7);
        assert!((0..10_000).all(|_| random.below(10) < 10));
        assert_eq!(random.below(0), 0);
    }
}
