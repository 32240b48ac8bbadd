//! The arrival schedule of an open loop: operations start at a fixed rate instead of with a fixed number in flight.
//!
//! ```text
//!   worker 0   0     3     6       rate 1000/s over 3 workers: operation n is due at n ms,
//!   worker 1     1     4     7     whether or not earlier operations have completed
//!   worker 2       2     5     8
//! ```
//! Latency counts from the due time, so it includes the wait for a free stream. Measured from the submission, a stall
//! would count for one operation and not for all that it delayed ("coordinated omission").

use octokv_base::Nanos;

/// The due times of one worker's operations.
#[derive(Clone, Copy, Debug)]
pub struct ArrivalSchedule {
    start: Nanos,
    /// Operations per second over all workers.
    rate: f64,
    /// Number of the next operation.
    next_number: u64,
    workers: u64,
    /// How late the last operation started.
    last_lag: Nanos,
}

impl ArrivalSchedule {
    /// Creates the schedule of worker `number` of `workers`, at `rate` operations per second over all workers.
    pub fn new(rate: f64, number: usize, workers: usize, start: Nanos) -> ArrivalSchedule {
        ArrivalSchedule {
            start,
            rate,
            next_number: number as u64,
            workers: workers as u64,
            last_lag: Nanos::ZERO,
        }
    }

    /// The due time of the next operation.
    #[inline]
    pub fn next_arrival(&self) -> Nanos {
        self.start + Nanos((self.next_number as f64 * 1e9 / self.rate) as u64)
    }

    /// Starts the next operation at `now`.
    #[inline]
    pub fn start_next(&mut self, now: Nanos) {
        self.last_lag = now.since(self.next_arrival());
        self.next_number += self.workers;
    }

    /// The backlog of a workload that ends at `until`: operations that were due and did not start. A workload that ends by
    /// a number of operations (`until` is [`Nanos::NEVER`]) starts all; its backlog is the lag of the last operation.
    pub fn backlog(&self, until: Nanos) -> Backlog {
        if until == Nanos::NEVER {
            return Backlog { operations: 0, lag: self.last_lag };
        }
        let due = (until.since(self.start).as_secs_f64() * self.rate).ceil() as u64;
        let operations = due.saturating_sub(self.next_number).div_ceil(self.workers);
        Backlog { operations, lag: until.since(self.next_arrival()) }
    }
}

/// How far an open loop lags behind its schedule at the end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Backlog {
    /// Operations that were due and did not start.
    pub operations: u64,
    /// How late the next operation would have started.
    pub lag: Nanos,
}

impl Backlog {
    /// Adds the backlog of another worker.
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
            // However late it starts.
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
