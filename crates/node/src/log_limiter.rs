//! Rate limit for log lines that hosts can trigger, so that connecting in a loop does not fill the log.
//!
//! In: the time of each event. Out: whether to log it, and how many events were suppressed since the last logged one.

use octokv_base::Nanos;

/// Most events logged per [`PERIOD`].
const LOGGED_MAX: u32 = 20;
const PERIOD: Nanos = Nanos::from_secs(1);

/// The limiter of one core.
#[derive(Debug, Default)]
pub(crate) struct LogRateLimiter {
    period_start: Nanos,
    logged: u32,
    suppressed: u64,
}

impl LogRateLimiter {
    /// Whether to log an event: `Some(n)` if so, with the number suppressed before it.
    pub fn allow(&mut self, now: Nanos) -> Option<u64> {
        if now.since(self.period_start) >= PERIOD {
            (self.period_start, self.logged) = (now, 0);
        }
        if self.logged == LOGGED_MAX {
            self.suppressed += 1;
            return None;
        }
        self.logged += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_logged_in_few_lines_and_counted() {
        let mut limiter = LogRateLimiter::default();
        let logged = (0..5000).filter(|&n| limiter.allow(Nanos(10 + n)).is_some()).count();
        assert_eq!(logged, LOGGED_MAX as usize);
        assert_eq!(limiter.allow(PERIOD + Nanos(10)), Some(5000 - u64::from(LOGGED_MAX)));
        assert_eq!(limiter.allow(PERIOD + Nanos(11)), Some(0));
    }
}
