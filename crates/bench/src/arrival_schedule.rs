//! When operations are meant to begin, where their rate is given and not their number in flight.
//!
//! ```text
//!   worker 0   0     3     6       rate 1000/s over 3 workers: operation n begins at n ms,
//!   worker 1     1     4     7     whether or not those before it have ended
//!   worker 2       2     5     8
//! ```
//! Latency counts from the moment that was meant: an operation that waits for a free stream has waited. Measured from
//! the moment it was sent, a stall would count once and not for all that it held up ("coordinated omission").

use octokv_base::Nanos;

/// The beginnings of one worker's operations.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    begin: Nanos,
    /// Operations per second over all workers.
    rate: f64,
    /// The number of the next operation.
    next: u64,
    workers: u64,
    /// How late the last one began.
    late: Nanos,
}

impl Pace {
    /// Of worker `number` of so many.
    pub fn new(rate: f64, number: usize, workers: usize, begin: Nanos) -> Pace {
        Pace { begin, rate, next: number as u64, workers: workers as u64, late: Nanos::ZERO }
    }

    /// When the next operation is meant to begin.
    #[inline]
    pub fn next(&self) -> Nanos {
        self.begin + Nanos((self.next as f64 * 1e9 / self.rate) as u64)
    }

    /// The next operation begins now.
    #[inline]
    pub fn take(&mut self, now: Nanos) {
        self.late = now.since(self.next());
        self.next += self.workers;
    }

    /// What was meant to begin before `until`, when the workload ends by time, and has not. Without such an end all
    /// have begun; then only the last one's delay counts.
    pub fn backlog(&self, until: Nanos) -> Backlog {
        if until == Nanos::NEVER {
            return Backlog { operations: 0, behind: self.late };
        }
        let meant = (until.since(self.begin).as_secs_f64() * self.rate).ceil() as u64;
        let operations = meant.saturating_sub(self.next).div_ceil(self.workers);
        Backlog { operations, behind: until.since(self.next()) }
    }
}

/// How far an open loop is behind at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Operations that were meant to begin and never did.
    pub operations: u64,
    /// How late the next operation would have been.
    pub behind: Nanos,
}

impl Backlog {
    /// Of two workers together.
    pub fn add(&mut self, other: Backlog) {
        self.operations += other.operations;
        self.behind = self.behind.max(other.behind);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_share_a_fixed_interval_that_nothing_shifts() {
        let mut paces = [0, 1, 2].map(|number| Pace::new(1000.0, number, 3, Nanos(500)));
        for operation in 0..3_000u64 {
            let pace = &mut paces[operation as usize % 3];
            assert_eq!(pace.next(), Nanos(500 + operation * 1_000_000));
            // However late it begins.
            pace.take(Nanos(7_000_000_000));
        }
    }

    #[test]
    fn a_backlog_is_what_was_meant_and_did_not_begin() {
        let second = Nanos::from_secs(1);
        let mut pace = Pace::new(10.0, 0, 1, Nanos::ZERO);
        (0..10).for_each(|n| pace.take(Nanos(n * 100_000_000)));
        assert_eq!(pace.backlog(second), Backlog::default());
        assert_eq!(pace.backlog(second + second), Backlog { operations: 10, behind: second });
        assert_eq!(pace.backlog(Nanos::NEVER), Backlog::default());
        pace.take(Nanos(1_250_000_000));
        assert_eq!(pace.backlog(Nanos::NEVER).behind, Nanos(250_000_000));
        let mut two = Backlog { operations: 1, behind: Nanos(5) };
        two.add(Backlog { operations: 2, behind: Nanos(3) });
        assert_eq!(two, Backlog { operations: 3, behind: Nanos(5) });
    }
}
