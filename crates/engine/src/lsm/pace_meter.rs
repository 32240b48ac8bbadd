//! The meter of the pace: rates of what users write and of what compaction drains, from their totals. Pure.
//!
//! In: totals at times. Out: bytes a second.
//! Invariants: a rest of compaction counts for nothing. Tested below.

use octokv_base::Nanos;
use std::sync::atomic::{AtomicU64, Ordering};

/// What is written counts for about so long.
const WRITTEN_TIME: Nanos = Nanos::from_secs(1);
/// What is reclaimed counts for about so long: compactions free space when they end.
const RECLAIMED_TIME: Nanos = Nanos::from_secs(3);

/// The rates of a volume, as the control has last measured them, in bytes a second.
#[derive(Debug, Default)]
pub(super) struct PaceRates {
    pub written: AtomicU64,
    /// 0 if unknown.
    pub drained: AtomicU64,
    pub reclaimed: AtomicU64,
}

/// The totals of a volume, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PaceTotals {
    /// What users wrote.
    pub written: u64,
    /// What left level 0.
    pub drained: u64,
    /// The space that puts may use now.
    pub spare: u64,
}

/// Measures three rates from totals. Pure.
#[derive(Debug, Default)]
pub(super) struct PaceMeter {
    last: Option<(Nanos, PaceTotals)>,
    written_per_second: f64,
    /// Below 0 while compactions write more than they have freed.
    reclaimed_per_second: f64,
    /// Since when there is work, or what was drained last.
    draining_since: Option<Nanos>,
    drained_per_second: f64,
}

pub(super) fn per_second(bytes: u64, time: Nanos) -> f64 {
    bytes as f64 * 1e9 / time.0.max(1) as f64
}

impl PaceMeter {
    /// Takes the totals at a time. `has_work`: whether compaction has something to drain; only such time counts.
    pub(super) fn sample(&mut self, now: Nanos, totals: PaceTotals, has_work: bool) {
        let mut new = 0;
        match self.last {
            Some((at, last)) if now > at => {
                let time = now.since(at);
                let share = |window: Nanos| (time.0 as f64 / window.0 as f64).min(1.0);
                let written = totals.written.saturating_sub(last.written);
                let rate = per_second(written, time);
                self.written_per_second += (rate - self.written_per_second) * share(WRITTEN_TIME);
                let freed = (totals.spare + written) as f64 - last.spare as f64;
                let rate = freed * 1e9 / time.0 as f64;
                self.reclaimed_per_second += (rate - self.reclaimed_per_second) * share(RECLAIMED_TIME);
                new = totals.drained.saturating_sub(last.drained);
            }
            Some(_) => return,
            None => {}
        }
        self.last = Some((now, totals));
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
        rates.reclaimed.store(self.reclaimed_per_second as u64, Ordering::Relaxed);
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
            let totals = PaceTotals { written, ..PaceTotals::default() };
            meter.sample(Nanos::from_millis(ms), totals, false);
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
            let totals = PaceTotals { drained, ..PaceTotals::default() };
            meter.sample(Nanos(seconds * SECOND), totals, has_work);
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

    #[test]
    fn what_is_reclaimed_is_what_users_wrote_and_is_free_again() {
        let mut meter = PaceMeter::default();
        let mut at = |ms: u64, written, spare| {
            meter.sample(Nanos::from_millis(ms), PaceTotals { written, spare, drained: 0 }, false);
            meter.reclaimed_per_second as u64
        };
        assert_eq!(at(0, 500, 10_000), 0);
        assert_eq!(at(3_000, 3_500, 7_000), 0, "nothing was freed");
        assert_eq!(at(6_000, 6_500, 7_000), 1_000, "as much as was written");
        assert_eq!(at(7_500, 6_500, 4_000), 0, "a compaction writes");
        assert_eq!(at(10_500, 6_500, 10_000), 2_000, "and frees");
    }
}
