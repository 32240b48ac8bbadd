//! What one connection may have of a turn: so many bytes as are dealt with in about its share of the turn's time.
//!
//! ```text
//!   turn of a core ≈ TURN:   a's share │ b's share │ c's share      share = TURN ÷ connections that talk
//!   quantum of a connection:  longer than its share ─▶ smaller in proportion     full and shorter than half ─▶ twice
//! ```
//! In: how many bytes were dealt with, and how long that took. Out: how many to take the next time. What a byte costs
//! depends on what a host asks for (a Retrieve of 1 MiB in 72 of them, or a part of a value), so it is learned, for
//! each connection. Where time is virtual and work takes none, a quantum grows to its most.

use octokv_base::Nanos;

/// How long all connections of a core may be dealt with before replies go out: what a request of another connection
/// waits for at the most, beside its own. Measured: the throughput of one connection falls below 100 µs.
const TURN: Nanos = Nanos::from_micros(100);
/// A share is not shorter than this: the system calls for one connection take about a third of it.
const SHARE_MIN: Nanos = Nanos::from_micros(16);
/// What a connection begins with.
const BYTES_FIRST: usize = 4096;
/// How much smaller a quantum gets at once.
const FALL_MAX: usize = 64;

/// The share of each of so many connections.
pub fn share(talkers: usize) -> Nanos {
    Nanos(TURN.0 / talkers.max(1) as u64).max(SHARE_MIN)
}

/// Whether a turn has had its time.
pub fn is_over(spent: Nanos) -> bool {
    spent >= TURN
}

/// How many bytes of a connection are taken at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantum {
    bytes: usize,
    least: usize,
    most: usize,
}

impl Quantum {
    /// One of a fresh connection, that stays within `least` and `most` bytes.
    pub fn new(least: usize, most: usize) -> Quantum {
        Quantum { bytes: BYTES_FIRST.clamp(least, most), least, most }
    }

    /// Bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// `bytes` were dealt with in `spent`, where `share` was right.
    pub fn learn(&mut self, bytes: usize, spent: Nanos, share: Nanos) {
        if spent > share {
            let fits = (bytes as u64).saturating_mul(share.0) / spent.0;
            self.bytes = (fits as usize).max(self.bytes / FALL_MAX).clamp(self.least, self.bytes);
        } else if bytes >= self.bytes && spent.0 < share.0 / 2 {
            self.bytes = (self.bytes * 2).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: Nanos = Nanos::from_micros(100);
    const FRESH: Quantum = Quantum { bytes: BYTES_FIRST, least: 72, most: 1 << 20 };

    /// The quantum after `turns` full ones at so many nanoseconds a byte.
    fn settled(mut quantum: Quantum, ns_per_byte: u64, turns: usize) -> Quantum {
        for _ in 0..turns {
            let bytes = quantum.bytes();
            quantum.learn(bytes, Nanos(bytes as u64 * ns_per_byte), SHARE);
        }
        quantum
    }

    #[test]
    fn a_quantum_comes_to_what_fits_into_a_share() {
        for ns_per_byte in [1, 3, 14, 100] {
            let bytes = settled(FRESH, ns_per_byte, 20).bytes() as u64;
            let spent = bytes * ns_per_byte;
            assert!((SHARE.0 / 2..=SHARE.0).contains(&spent), "{ns_per_byte} ns a byte: {spent} ns");
        }
    }

    #[test]
    fn costly_commands_come_one_at_a_time_and_cheap_ones_many() {
        let costly = settled(FRESH, 10_000, 3);
        assert_eq!(costly.bytes(), 72);
        assert_eq!(settled(Quantum::new(32768, 1 << 20), 10_000, 3).bytes(), 32768);
        assert_eq!(settled(costly, 0, 14).bytes(), 1 << 20, "work that takes no time is not held back");
        assert_eq!(settled(costly, 0, 13).bytes(), 72 << 13);
    }

    #[test]
    fn little_that_took_little_says_nothing_and_one_slow_turn_not_much() {
        let mut quantum = FRESH;
        quantum.learn(100, Nanos(10), SHARE);
        assert_eq!(quantum.bytes(), BYTES_FIRST);
        let mut quantum = settled(FRESH, 0, 20);
        quantum.learn(1 << 20, Nanos::from_secs(1), SHARE);
        assert_eq!(quantum.bytes(), (1 << 20) / FALL_MAX, "the core may have been taken away for a while");
    }

    #[test]
    fn shares_add_up_to_a_turn_while_they_are_worth_their_system_calls() {
        assert_eq!(share(0), TURN);
        assert_eq!(share(1), TURN);
        assert_eq!(share(4).0 * 4, TURN.0);
        assert_eq!(share(1000), SHARE_MIN);
        assert!(is_over(TURN) && !is_over(Nanos(TURN.0 - 1)));
    }
}
