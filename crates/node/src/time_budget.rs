//! What one connection may have of a turn: so many bytes as are dealt with in about its share of the turn's time.
//!
//! ```text
//!   turn of a core:  a's share │ b's share │ c's share      share = turn ÷ connections that talk
//!   quantum of a connection:  longer than its share ─▶ smaller in proportion     full and shorter than half ─▶ twice
//!   turn:  somebody asks for little while somebody asks for much ─▶ short     otherwise ─▶ long
//! ```
//! In: how many bytes were dealt with, and how long that took. Out: how many to take the next time. What a byte costs
//! depends on what a host asks for (a Retrieve of 1 MiB in 72 of them, or a part of a value), so it is learned, for
//! each connection. Long turns spare system calls, and those who fill them wait for themselves; short ones spare
//! those who ask for little a wait for others. Where time is virtual and work takes none, a quantum grows to its
//! most, and turns are long.

use octokv_base::Nanos;

/// How long all connections of a core may be dealt with before replies go out, where nobody asks for little beside
/// somebody who asks for much. Measured: the throughput of one connection falls below it.
const ITERATION_MAX: Nanos = Nanos::from_micros(100);
/// How long where somebody does. What is begun when it is over is not cut, and somebody who asks for much has a part in
/// any case, so a request waits for others a little longer than this on the way in, and once more on the way out.
const ITERATION_MAX_MIXED: Nanos = Nanos::from_micros(40);
/// A share is not shorter than this: the system calls for one connection take about a third of it.
const SHARE_MIN: Nanos = Nanos::from_micros(16);
/// A connection asks for little that within a window never took more than this of a turn to receive, or to send: less
/// than a quantum comes to that is cut to a share.
const LIGHT_MAX: Nanos = Nanos(SHARE_MIN.0 / 2);
/// Over so long it is seen who asks for how much.
const USAGE_INTERVAL: Nanos = Nanos::from_millis(10);
/// What a connection begins with.
const QUANTUM_FIRST_BYTES: usize = 4096;
/// How much smaller a quantum gets at once.
const SHRINK_FACTOR_MAX: usize = 64;

/// What a turn of a core has dealt with, and how long it may be.
#[derive(Debug)]
pub struct IterationBudget {
    /// How long this turn has dealt with what hosts sent.
    pub receive_time: Nanos,
    /// And with sending.
    pub send_time: Nanos,
    /// The number of the window of time that this turn is in.
    interval: u64,
    /// Connections that talked in this window, and those of them that asked for much.
    active_count: usize,
    heavy_count: usize,
    /// Whether some of both did in the window before.
    was_mixed: bool,
}

/// What a turn remembers of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsageHistory {
    /// One more than the window it last talked in.
    interval_plus_one: u64,
    /// Whether it asked for much then, and in the window before that.
    heavy: bool,
    was_heavy: bool,
}

impl IterationBudget {
    /// Before the first one.
    pub fn new() -> IterationBudget {
        IterationBudget {
            receive_time: Nanos::ZERO,
            send_time: Nanos::ZERO,
            interval: 0,
            active_count: 0,
            heavy_count: 0,
            was_mixed: false,
        }
    }

    /// The next turn begins.
    pub fn begin(&mut self, now: Nanos) {
        self.receive_time = Nanos::ZERO;
        self.send_time = Nanos::ZERO;
        let interval = now.0 / USAGE_INTERVAL.0;
        if interval != self.interval {
            self.was_mixed = interval == self.interval + 1 && self.is_mixed();
            self.interval = interval;
            self.active_count = 0;
            self.heavy_count = 0;
        }
    }

    fn is_mixed(&self) -> bool {
        self.heavy_count > 0 && self.active_count > self.heavy_count
    }

    /// Whether a connection asks for much, by what it took in this window and the one before.
    pub fn is_heavy(&self, usage: UsageHistory) -> bool {
        match usage.interval_plus_one.checked_sub(self.interval) {
            Some(0) => usage.heavy,
            Some(1) => usage.heavy || usage.was_heavy,
            _ => false,
        }
    }

    /// How long it may be.
    pub fn limit(&self) -> Nanos {
        if self.was_mixed || self.is_mixed() { ITERATION_MAX_MIXED } else { ITERATION_MAX }
    }

    /// The share of each of so many connections.
    pub fn share(&self, active_connections: usize) -> Nanos {
        Nanos(self.limit().0 / active_connections.max(1) as u64).max(SHARE_MIN)
    }

    /// Whether it has had its time for what hosts sent.
    pub fn is_receive_exhausted(&self) -> bool {
        self.receive_time >= self.limit()
    }

    /// Whether it has had its time for sending.
    pub fn is_send_exhausted(&self) -> bool {
        self.send_time >= self.limit()
    }

    /// A connection took so much of it.
    pub fn account(&mut self, usage: &mut UsageHistory, spent: Nanos) {
        let first = usage.interval_plus_one != self.interval + 1;
        if first {
            let was_heavy = usage.heavy && usage.interval_plus_one == self.interval;
            *usage = UsageHistory { interval_plus_one: self.interval + 1, heavy: false, was_heavy };
            self.active_count += 1;
        }
        if !usage.heavy && spent > LIGHT_MAX {
            usage.heavy = true;
            self.heavy_count += 1;
        }
    }
}

/// How many bytes of a connection are taken at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteQuantum {
    bytes: usize,
    min_bytes: usize,
    max_bytes: usize,
}

impl ByteQuantum {
    /// One of a fresh connection, that stays within `least` and `most` bytes.
    pub fn new(min_bytes: usize, max_bytes: usize) -> ByteQuantum {
        ByteQuantum { bytes: QUANTUM_FIRST_BYTES.clamp(min_bytes, max_bytes), min_bytes, max_bytes }
    }

    /// Bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// `bytes` were dealt with in `spent`, where `share` was right.
    pub fn adjust(&mut self, bytes: usize, spent: Nanos, share: Nanos) {
        if spent > share {
            let fits = (bytes as u64).saturating_mul(share.0) / spent.0;
            self.bytes =
                (fits as usize).max(self.bytes / SHRINK_FACTOR_MAX).clamp(self.min_bytes, self.bytes);
        } else if bytes >= self.bytes && spent.0 < share.0 / 2 {
            self.bytes = (self.bytes * 2).min(self.max_bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: Nanos = Nanos::from_micros(100);
    const FRESH: ByteQuantum = ByteQuantum { bytes: QUANTUM_FIRST_BYTES, min_bytes: 72, max_bytes: 1 << 20 };

    /// The quantum after `turns` full ones at so many nanoseconds a byte.
    fn converged(mut quantum: ByteQuantum, ns_per_byte: u64, iterations: usize) -> ByteQuantum {
        for _ in 0..iterations {
            let bytes = quantum.bytes();
            quantum.adjust(bytes, Nanos(bytes as u64 * ns_per_byte), SHARE);
        }
        quantum
    }

    #[test]
    fn a_quantum_converges_to_what_fits_into_a_share() {
        for ns_per_byte in [1, 3, 14, 100] {
            let bytes = converged(FRESH, ns_per_byte, 20).bytes() as u64;
            let spent = bytes * ns_per_byte;
            assert!((SHARE.0 / 2..=SHARE.0).contains(&spent), "{ns_per_byte} ns a byte: {spent} ns");
        }
    }

    #[test]
    fn costly_commands_shrink_the_quantum_and_cheap_ones_grow_it() {
        let costly = converged(FRESH, 10_000, 3);
        assert_eq!(costly.bytes(), 72);
        assert_eq!(converged(ByteQuantum::new(32768, 1 << 20), 10_000, 3).bytes(), 32768);
        assert_eq!(converged(costly, 0, 14).bytes(), 1 << 20, "work that takes no time is not held back");
        assert_eq!(converged(costly, 0, 13).bytes(), 72 << 13);
    }

    #[test]
    fn a_partial_quantum_changes_nothing_and_one_slow_iteration_is_bounded() {
        let mut quantum = FRESH;
        quantum.adjust(100, Nanos(10), SHARE);
        assert_eq!(quantum.bytes(), QUANTUM_FIRST_BYTES);
        let mut quantum = converged(FRESH, 0, 20);
        quantum.adjust(1 << 20, Nanos::from_secs(1), SHARE);
        assert_eq!(
            quantum.bytes(),
            (1 << 20) / SHRINK_FACTOR_MAX,
            "the core may have been taken away for a while"
        );
    }

    /// A turn in which connections took so much, in the window before and in this one.
    fn budget_after(before: &[u64], within: &[u64]) -> IterationBudget {
        let mut budget = IterationBudget::new();
        let mut histories = [UsageHistory::default(); 8];
        for (interval, spans) in [before, within].into_iter().enumerate() {
            budget.begin(Nanos(USAGE_INTERVAL.0 * (interval as u64 + 5)));
            for (usage, &micros) in histories.iter_mut().zip(spans) {
                budget.account(usage, Nanos::from_micros(micros));
                budget.account(usage, Nanos::from_micros(1));
            }
        }
        budget
    }

    #[test]
    fn an_iteration_is_short_while_light_and_heavy_connections_are_mixed() {
        for (before, within, length) in [
            (&[][..], &[][..], ITERATION_MAX),
            (&[], &[90], ITERATION_MAX),
            (&[], &[3], ITERATION_MAX),
            (&[], &[3, 4, 8], ITERATION_MAX),
            (&[], &[90, 30, 9], ITERATION_MAX),
            (&[], &[90, 3], ITERATION_MAX_MIXED),
            (&[], &[3, 90], ITERATION_MAX_MIXED),
            (&[90, 3], &[90], ITERATION_MAX_MIXED),
            (&[90, 3], &[], ITERATION_MAX_MIXED),
            (&[90], &[3], ITERATION_MAX),
        ] {
            assert_eq!(budget_after(before, within).limit(), length, "{before:?} and then {within:?}");
        }
    }

    #[test]
    fn a_connection_that_was_heavy_long_ago_is_light_again() {
        let (mut budget, mut usage) = (IterationBudget::new(), UsageHistory::default());
        let start_of_interval = |number: u64| Nanos(USAGE_INTERVAL.0 * number);
        budget.begin(start_of_interval(5));
        assert!(!budget.is_heavy(usage));
        budget.account(&mut usage, Nanos::from_micros(50));
        assert!(budget.is_heavy(usage));
        budget.begin(start_of_interval(6));
        assert!(budget.is_heavy(usage), "in the window before");
        budget.account(&mut usage, Nanos::from_micros(1));
        assert!(budget.is_heavy(usage), "in the window before, though little since");
        budget.begin(start_of_interval(7));
        budget.account(&mut usage, Nanos::from_micros(1));
        assert!(!budget.is_heavy(usage), "two windows of little");
        budget.account(&mut usage, Nanos::from_micros(50));
        budget.begin(start_of_interval(900));
        assert!(!budget.is_heavy(usage), "silent for long");
        budget.account(&mut usage, Nanos::from_micros(1));
        assert!(!budget.is_heavy(usage), "and back");
    }

    #[test]
    fn usage_of_two_intervals_ago_is_forgotten() {
        let mut budget = budget_after(&[], &[90, 3]);
        budget.begin(Nanos(USAGE_INTERVAL.0 * 7));
        assert_eq!(budget.limit(), ITERATION_MAX_MIXED);
        budget.begin(Nanos(USAGE_INTERVAL.0 * 8));
        assert_eq!(budget.limit(), ITERATION_MAX);
        let mut budget = budget_after(&[], &[90, 3]);
        budget.begin(Nanos(USAGE_INTERVAL.0 * 9));
        assert_eq!(budget.limit(), ITERATION_MAX, "a window in which nobody talked lies between");
    }

    #[test]
    fn shares_add_up_to_an_iteration_down_to_the_minimum_share() {
        let mut budget = budget_after(&[], &[90]);
        assert_eq!(budget.share(0), ITERATION_MAX);
        assert_eq!(budget.share(1), ITERATION_MAX);
        assert_eq!(budget.share(4).0 * 4, ITERATION_MAX.0);
        assert_eq!(budget.share(1000), SHARE_MIN);
        assert_eq!(budget_after(&[], &[90, 3]).share(2).0 * 2, ITERATION_MAX_MIXED.0);
        budget.receive_time = Nanos(ITERATION_MAX.0 - 1);
        assert!(!budget.is_receive_exhausted() && !budget.is_send_exhausted());
        budget.receive_time = ITERATION_MAX;
        assert!(budget.is_receive_exhausted() && !budget.is_send_exhausted());
        budget.begin(Nanos(USAGE_INTERVAL.0 * 6 + 1));
        assert!(!budget.is_receive_exhausted(), "the next turn has its own time");
    }
}
