//! How often something that hosts can cause is told: so that nobody fills the log by connecting.
//!
//! In: the time of each event. Out: whether it is told, and how many were not since the last that was.

use octokv_base::Nanos;

/// Events that are told within a span, at the most.
const LOGGED_MAX: u32 = 20;
const PERIOD: Nanos = Nanos::from_secs(1);

/// What one core tells of its hosts.
#[derive(Debug, Default)]
pub(crate) struct LogRateLimiter {
    period_start: Nanos,
    logged: u32,
    suppressed: u64,
}

impl LogRateLimiter {
    /// Whether an event is told: then how many were not before it.
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
