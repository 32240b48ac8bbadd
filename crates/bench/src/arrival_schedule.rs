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
pub struct ArrivalSchedule {
    start: Nanos,
    /// Operations per second over all workers.
    rate: f64,
    /// The number of the next operation.
    next_number: u64,
    workers: u64,
    /// How late the last one began.
    last_lag: Nanos,
}

impl ArrivalSchedule {
    /// Of worker `number` of so many.
    pub fn new(rate: f64, number: usize, workers: usize, start: Nanos) -> ArrivalSchedule {
        ArrivalSchedule {
            start,
            rate,
            next_number: number as u64,
            workers: workers as u64,
            last_lag: Nanos::ZERO,
        }
    }

    /// When the next operation is meant to begin.
    #[inline]
    pub fn next_arrival(&self) -> Nanos {
        self.start + Nanos((self.next_number as f64 * 1e9 / self.rate) as u64)
    }

    /// The next operation begins now.
    #[inline]
    pub fn start_next(&mut self, now: Nanos) {
        self.last_lag = now.since(self.next_arrival());
        self.next_number += self.workers;
    }

    /// What was meant to begin before `until`, when the workload ends by time, and has not. Without such an end all
    /// have begun; then only the last one's delay counts.
    pub fn backlog(&self, until: Nanos) -> Backlog {
        if until == Nanos::NEVER {
            return Backlog { operations: 0, lag: self.last_lag };
        }
        let due = (until.since(self.start).as_secs_f64() * self.rate).ceil() as u64;
        let operations = due.saturating_sub(self.next_number).div_ceil(self.workers);
        Backlog { operations, lag: until.since(self.next_arrival()) }
    }
}

/// How far an open loop is behind at its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Operations that were meant to begin and never did.
    pub operations: u64,
    /// How late the next operation would have been.
    pub lag: Nanos,
}

impl Backlog {
    /// Of two workers together.
    pub fn add(&mut self, other: Backlog) {
        self.operations += other.operations;
        self.lag = self.lag.max(other.lag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_keep_a_fixed_arrival_schedule() {
        let mut schedules = [0, 1, 2].map(|number| ArrivalSchedule::new(1000.0, number, 3, Nanos(500)));
        for operation in 0..3_000u64 {
            let arrivals = &mut schedules[operation as usize % 3];
            assert_eq!(arrivals.next_arrival(), Nanos(500 + operation * 1_000_000));
            // However late it begins.
            arrivals.start_next(Nanos(7_000_000_000));
        }
    }

    #[test]
    fn a_backlog_counts_operations_that_were_due_and_did_not_start() {
        let second = Nanos::from_secs(1);
        let mut arrivals = ArrivalSchedule::new(10.0, 0, 1, Nanos::ZERO);
        (0..10).for_each(|n| arrivals.start_next(Nanos(n * 100_000_000)));
        assert_eq!(arrivals.backlog(second), Backlog::default());
        assert_eq!(arrivals.backlog(second + second), Backlog { operations: 10, lag: second });
        assert_eq!(arrivals.backlog(Nanos::NEVER), Backlog::default());
        arrivals.start_next(Nanos(1_250_000_000));
        assert_eq!(arrivals.backlog(Nanos::NEVER).lag, Nanos(250_000_000));
        let mut two = Backlog { operations: 1, lag: Nanos(5) };
        two.add(Backlog { operations: 2, lag: Nanos(3) });
        assert_eq!(two, Backlog { operations: 3, lag: Nanos(5) });
    }
}
