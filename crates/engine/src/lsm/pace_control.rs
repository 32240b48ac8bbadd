//! The control of pace: measures what users write and what compaction drains, and keeps puts to what [`super::pacing`] says.
//!
//! ```text
//!   changes ─▶ written a second ─┐
//!   level 0 ─▶ drained a second ─┼─▶ pace ─▶ puts: throttle, refilled each few milliseconds while there is a limit
//!   levels, memtables, space ────┘        └▶ compactions: pauses (`compaction_run.rs`)
//! ```
//! In: totals of the volume, the time of the reactor that maintains it. Out: rates, and the throttle's refills. Holds: the last samples.
//! Invariants: without the task that polls this there is no limit; a volume without puts that wait needs no timer. The rates are tested below, the whole in
//! `tests/lsm_pace.rs`.

use super::compaction::{TreeCompaction, garbage};
use super::compaction_choice::pending_bytes;
use super::core::LsmCore;
use super::pacing::{Pace, PacingInput, pace};
use super::version_edit::LEVELS;
use super::volume::LsmVolume;
use crate::EngineError;
use octokv_base::Nanos;
use octokv_runtime::ReactorHandle;
use std::sync::atomic::{AtomicU64, Ordering};

/// The time between two looks at a volume that is written to.
const LOOK: Nanos = Nanos::from_millis(20);
/// The time between two refills while there is a limit.
const REFILL: Nanos = Nanos::from_millis(2);
/// What is written counts for about so long.
const WRITTEN_TIME: Nanos = Nanos::from_secs(1);
/// What was allowed and not used is kept for so long.
const KEPT_TIME: Nanos = Nanos::from_millis(10);

/// The rates of a volume, as the control has last measured them, in bytes a second.
#[derive(Debug, Default)]
pub(super) struct PaceRates {
    pub written: AtomicU64,
    /// 0 if unknown.
    pub drained: AtomicU64,
}

/// Measures two rates from totals. Pure.
#[derive(Debug, Default)]
struct PaceMeter {
    last: Option<(Nanos, u64)>,
    written_per_second: f64,
    drained: u64,
    /// Since when there is work, or what was drained last.
    draining_since: Option<Nanos>,
    drained_per_second: f64,
}

fn per_second(bytes: u64, time: Nanos) -> f64 {
    bytes as f64 * 1e9 / time.0.max(1) as f64
}

impl PaceMeter {
    /// Takes the totals of bytes at a time. `has_work`: whether compaction has something to drain; only such time counts.
    fn sample(&mut self, now: Nanos, written: u64, drained: u64, has_work: bool) {
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

    fn publish(&self, rates: &PaceRates) {
        rates.written.store(self.written_per_second as u64, Ordering::Relaxed);
        rates.drained.store(self.drained_per_second as u64, Ordering::Relaxed);
    }
}

/// Bytes of users that leave level 0 by a compaction: those of its tables, and of the values to which these refer.
pub(super) fn drained_bytes(compaction: &TreeCompaction) -> u64 {
    if compaction.input_level > 0 {
        return 0;
    }
    let values = |segments: Vec<(u32, u64)>| segments.iter().map(|(_, bytes)| bytes).sum::<u64>();
    compaction.inputs.iter().map(|table| table.bytes() + values(table.segment_bytes().collect())).sum()
}

impl LsmVolume {
    /// How fast compaction and users may write.
    pub(super) fn pace(&self) -> Pace {
        let version = self.versions.current();
        let settings = &self.settings;
        let input = PacingInput {
            level0_tables: version.level0().len(),
            pending_bytes: pending_bytes(&version, &settings.compaction),
            memory_bytes: self.memtables.current().bytes(),
            memory_bytes_max: (settings.memtable_bytes * (settings.memtables_max + 1)) as u64,
            spare_bytes: self.spare_bytes_with_garbage(),
            written_per_second: self.compaction.rates.written.load(Ordering::Relaxed),
            drained_per_second: self.compaction.rates.drained.load(Ordering::Relaxed),
        };
        pace(&input, &settings.pacing)
    }

    /// What compactions should move of values, in bytes a second, so that there is no more garbage than they leave in some seconds, and twice what users write is kept up with.
    pub(super) fn moved_per_second(&self) -> u64 {
        let (all_bytes, dead_bytes) = self.versions.with_usage(garbage);
        let settings = &self.settings;
        let left_bytes = all_bytes / 1000 * u64::from(settings.compaction.garbage_permille);
        let catch_up = per_second(dead_bytes.saturating_sub(left_bytes), settings.pacing.catch_up);
        let written = self.compaction.rates.written.load(Ordering::Relaxed);
        settings.pacing.compaction_min.max(catch_up as u64 + 2 * written)
    }

    /// The bytes that puts may use before they wait for space; [`u64::MAX`] if there is so much that it does not matter, or so little to collect that delays would not help.
    fn spare_bytes_with_garbage(&self) -> u64 {
        let (unit_bytes, soft_bytes) = (self.unit_bytes() as u64, self.settings.pacing.space_soft_bytes);
        let spare_bytes = self.spare_units() * unit_bytes;
        if spare_bytes >= soft_bytes {
            return u64::MAX;
        }
        let (_, dead_bytes) = self.versions.with_usage(garbage);
        let version = self.versions.current();
        let lowest = (0..LEVELS).rev().find(|&level| version.level_tables(level) > 0).unwrap_or(0);
        let above_bytes: u64 = (0..lowest).map(|level| version.level_bytes(level)).sum();
        if dead_bytes + above_bytes >= soft_bytes { spare_bytes } else { u64::MAX }
    }
}

/// Lifts the limit when the task that controls it ends, or is dropped.
struct LiftedAtEnd<'a>(&'a LsmVolume);

impl Drop for LiftedAtEnd<'_> {
    fn drop(&mut self) {
        self.0.throttle.lift();
    }
}

impl LsmCore {
    /// Keeps puts to the pace, until the volume is closed or read-only. REQUIRES: the task that polls this polls the maintenance as well.
    pub(super) async fn run_pace_control(&self, handle: &ReactorHandle) {
        let volume = &self.volume;
        let _lifted = LiftedAtEnd(volume);
        let (mut meter, mut refilled_at) = (PaceMeter::default(), handle.now());
        while !self.is_over() {
            if !volume.throttle.has_waiters() {
                if !volume.commits.has_unmarked_changes() {
                    // The puts that come then enter, and wake this.
                    volume.throttle.lift();
                }
                volume.commits.wait_unmarked_changes().await;
            }
            handle.sleep(if volume.throttle.is_limited() { REFILL } else { LOOK }).await;
            let now = handle.now();
            let drained = volume.compaction.drained_bytes.load(Ordering::Relaxed);
            let has_work =
                volume.versions.current().level0().len() >= volume.settings.compaction.level0_trigger;
            meter.sample(now, volume.memtables.written_bytes(), drained, has_work);
            meter.publish(&volume.compaction.rates);
            let time = now.since(std::mem::replace(&mut refilled_at, now));
            match volume.pace().users_per_second {
                u64::MAX => volume.throttle.lift(),
                rate => {
                    let bytes = |time: Nanos| {
                        (u128::from(rate) * u128::from(time.0) / 1_000_000_000).min(u128::from(u64::MAX))
                            as u64
                    };
                    // A look that came late allows no burst.
                    volume.throttle.refill(bytes(time.min(LOOK)), bytes(KEPT_TIME));
                }
            }
        }
    }

    /// Waits until a put of so many bytes may enter.
    ///
    /// # Errors
    /// [`EngineError::ReadOnly`].
    pub(super) async fn wait_for_turn(&self, bytes: u64) -> Result<(), EngineError> {
        let volume = &self.volume;
        let start = self.clock();
        volume.throttle.enter(bytes).await;
        let state = &volume.compaction;
        state.delayed_writes.fetch_add(1, Ordering::Relaxed);
        if let (Some(start), Some(end)) = (start, self.clock()) {
            state.delayed_ns.fetch_add(end.since(start).0, Ordering::Relaxed);
        }
        match volume.commits.has_failed() {
            true => Err(EngineError::ReadOnly),
            false => Ok(()),
        }
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
