//! Time budget of an iteration and byte quantum of each connection.
//!
//! ```text
//!   iteration of a core:  a's share │ b's share │ c's share     share = iteration ÷ active connections
//!   quantum of a connection:  longer than its share ─▶ shrinks in proportion     full and below half ─▶ doubles
//!   iteration:  light and heavy connections are mixed ─▶ short     otherwise ─▶ long
//! ```
//! In: bytes processed and the time they took. Out: bytes to process the next time. The cost of a byte depends on the
//! commands (72 of them may be a Retrieve of 1 MiB, or part of a value), so each connection's quantum adapts. Long
//! iterations save system calls and delay only the heavy connections that fill them; short ones keep the delay of
//! light connections small. Under a simulated clock where work takes no time, quanta grow to their maximum and
//! iterations are long.

use octokv_base::Nanos;

/// Most receive time of an iteration before responses are sent, unless light and heavy connections are mixed. Measured:
/// the throughput of one connection falls below it.
const ITERATION_MAX: Nanos = Nanos::from_micros(100);
/// Most receive time if they are mixed. A request in progress is not cut short, and one heavy connection is always
/// served, so a request waits for others a little longer than this on receive, and once more on send.
const ITERATION_MAX_MIXED: Nanos = Nanos::from_micros(40);
/// Smallest share: the system calls of one connection take about a third of it.
const SHARE_MIN: Nanos = Nanos::from_micros(16);
/// A connection is light if within an interval it never used more than this part of an iteration to receive or to send.
/// Below the smallest share, so that a connection limited by its share is never light.
const LIGHT_MAX: Nanos = Nanos(SHARE_MIN.0 / 2);
/// Interval over which connections are classified.
const USAGE_INTERVAL: Nanos = Nanos::from_millis(10);
/// Quantum of a new connection.
const QUANTUM_FIRST_BYTES: usize = 4096;
/// A quantum shrinks at most by this factor at once.
const SHRINK_FACTOR_MAX: usize = 64;

/// Time that the current iteration has used, and its limit.
#[derive(Debug)]
pub struct IterationBudget {
    /// Receive time of this iteration, requests included.
    pub receive_time: Nanos,
    /// Send time of this iteration.
    pub send_time: Nanos,
    /// Number of the classification interval of this iteration.
    interval: u64,
    /// Connections active in this interval, and the heavy ones among them.
    active_count: usize,
    heavy_count: usize,
    /// Whether the previous interval had both light and heavy connections.
    was_mixed: bool,
}

/// Recent classification of one connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsageHistory {
    /// One more than the interval in which it was last active.
    interval_plus_one: u64,
    /// Whether it was heavy in that interval, and in the one before.
    heavy: bool,
    was_heavy: bool,
}

impl IterationBudget {
    /// The budget before the first iteration.
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

    /// Begins an iteration at `now`.
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

    /// Whether a connection is heavy, by its use in this interval and the previous one.
    pub fn is_heavy(&self, usage: UsageHistory) -> bool {
        match usage.interval_plus_one.checked_sub(self.interval) {
            Some(0) => usage.heavy,
            Some(1) => usage.heavy || usage.was_heavy,
            _ => false,
        }
    }

    /// Most time for receiving, and again for sending.
    pub fn limit(&self) -> Nanos {
        if self.was_mixed || self.is_mixed() { ITERATION_MAX_MIXED } else { ITERATION_MAX }
    }

    /// Time share of each of `active_connections`, at least [`SHARE_MIN`].
    pub fn share(&self, active_connections: usize) -> Nanos {
        Nanos(self.limit().0 / active_connections.max(1) as u64).max(SHARE_MIN)
    }

    /// Whether the receive time is used up.
    pub fn is_receive_exhausted(&self) -> bool {
        self.receive_time >= self.limit()
    }

    /// Whether the send time is used up.
    pub fn is_send_exhausted(&self) -> bool {
        self.send_time >= self.limit()
    }

    /// Accounts time that a connection used.
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

/// Most bytes of a connection to process at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteQuantum {
    bytes: usize,
    min_bytes: usize,
    max_bytes: usize,
}

impl ByteQuantum {
    /// The quantum of a new connection, which stays within `min_bytes` and `max_bytes`.
    pub fn new(min_bytes: usize, max_bytes: usize) -> ByteQuantum {
        ByteQuantum { bytes: QUANTUM_FIRST_BYTES.clamp(min_bytes, max_bytes), min_bytes, max_bytes }
    }

    /// The quantum in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Adapts to `bytes` processed in `spent`, for a target of `share`.
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

    /// The quantum after `iterations` full ones at a cost of `ns_per_byte`.
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
        assert_eq!(converged(costly, 0, 14).bytes(), 1 << 20, "work that takes no time is not limited");
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
            "the core may have been descheduled for a while"
        );
    }

    /// A budget after connections used so many µs, in the previous interval and in this one.
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
        assert!(budget.is_heavy(usage), "in the previous interval");
        budget.account(&mut usage, Nanos::from_micros(1));
        assert!(budget.is_heavy(usage), "in the previous interval, though light since");
        budget.begin(start_of_interval(7));
        budget.account(&mut usage, Nanos::from_micros(1));
        assert!(!budget.is_heavy(usage), "light for two intervals");
        budget.account(&mut usage, Nanos::from_micros(50));
        budget.begin(start_of_interval(900));
        assert!(!budget.is_heavy(usage), "idle for long");
        budget.account(&mut usage, Nanos::from_micros(1));
        assert!(!budget.is_heavy(usage), "active again");
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
        assert_eq!(budget.limit(), ITERATION_MAX, "an interval without activity lies between");
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
        assert!(!budget.is_receive_exhausted(), "the next iteration has its own budget");
    }
}
