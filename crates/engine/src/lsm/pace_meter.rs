//! The meter of the pace: rates of what users write and of what compaction drains, from their totals. Pure.
//!
//! In: totals at times. Out: bytes a second.
//! Invariants: a rest of compaction counts for nothing. Tested below.

use octokv_base::Nanos;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is written counts for about so long.
const WRITTEN_TIME: Nanos = Nanos::from_secs(1);

/// The rates of a volume, as the control has last measured them, in bytes a second.
#[derive(Debug, Default)]
pub(super) struct PaceRates {
    pub written: AtomicU64,
    /// 0 if unknown.
    pub drained: AtomicU64,
}

/// Measures two rates from totals. Pure.
#[derive(Debug, Default)]
pub(super) struct PaceMeter {
    last: Option<(Nanos, u64)>,
    written_per_second: f64,
    drained: u64,
    /// Since when there is work, or what was drained last.
    draining_since: Option<Nanos>,
    drained_per_second: f64,
}

pub(super) fn per_second(bytes: u64, time: Nanos) -> f64 {
    bytes as f64 * 1e9 / time.0.max(1) as f64
}

impl PaceMeter {
    /// Takes the totals of bytes at a time. `has_work`: whether compaction has something to drain; only such time counts.
    pub(super) fn sample(&mut self, now: Nanos, written: u64, drained: u64, has_work: bool) {
        match self.last {
            None => self.drained = drained,
            Some((at, before)) if now > at => {
                let time = now.since(at);
                let share = (time.0 as f64 / WRITTEN_TIME.0 as f64).min(1.0);
                let rate = per_second(written.saturating_sub(before), time);
                self.written_per_second += (rate - self.written_per_second) * share;
            }
            Some(_) => return,
        }
        self.last = Some((now, written));
        let new = drained.saturating_sub(std::mem::replace(&mut self.drained, drained));
        if new > 0
            && let Some(since) = self.draining_since.replace(now)
        {
            let rate = per_second(new, now.since(since));
            self.drained_per_second = match self.drained_per_second {
                0.0 => rate,
                before => (before + rate) / 2.0,
            };
        }
        self.draining_since = if has_work { self.draining_since.or(Some(now)) } else { None };
    }

    pub(super) fn publish(&self, rates: &PaceRates) {
        rates.written.store(self.written_per_second as u64, Ordering::Relaxed);
        rates.drained.store(self.drained_per_second as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn what_is_written_counts_for_a_second() {
        let mut meter = PaceMeter::default();
        let mut at = |ms: u64, written| {
            meter.sample(Nanos::from_millis(ms), written, 0, false);
            meter.written_per_second as u64
        };
        assert_eq!(at(0, 1000), 0, "what was written before is not known");
        for look in 1..=100 {
            at(20 * look, 1000 + 20 * look);
        }
        let rate = at(2_020, 1000 + 2_020);
        assert!((800..=1000).contains(&rate), "{rate}");
        for look in 1..=100 {
            at(2_020 + 20 * look, 3_020);
        }
        let rate = at(4_040, 3_020);
        assert!(rate < 150, "{rate}");
    }

    #[test]
    fn what_is_drained_is_measured_from_the_time_at_which_there_was_work() {
        let mut meter = PaceMeter::default();
        let mut at = |seconds: u64, drained, has_work| {
            meter.sample(Nanos(seconds * SECOND), 0, drained, has_work);
            meter.drained_per_second as u64
        };
        assert_eq!(at(0, 500, false), 0, "it was drained before the first look");
        assert_eq!(at(100, 500, true), 0, "work arrives");
        assert_eq!(at(102, 700, true), 100, "200 bytes in two seconds");
        assert_eq!(at(110, 700, true), 100, "one that has not ended says nothing");
        assert_eq!(at(112, 1_700, false), 100, "a thousand in ten");
        assert_eq!(at(200, 1_700, false), 100, "rest does not count");
        assert_eq!(at(300, 1_700, true), 100);
        assert_eq!(at(301, 1_800, true), 100);
        assert_eq!(at(302, 1_900, true), 100);
        assert_eq!(at(303, 2_200, true), 200, "half of what was, half of what is");
    }
}
