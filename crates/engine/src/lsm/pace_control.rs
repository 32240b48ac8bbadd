//! The control of pace: measures what users write and what compaction drains, and keeps puts to what [`super::pacing`] says.
//!
//! ```text
//!   changes ─▶ written a second ─┐
//!   level 0 ─▶ drained a second ─┼─▶ pace ─▶ puts: throttle, refilled each few milliseconds while there is a limit
//!   levels, memtables, space ────┘        └▶ compactions: pauses (`compaction_run.rs`)
//! ```
//! In: totals of the volume, the time of the reactor that maintains it. Out: rates, and the throttle's refills. Holds: the last samples.
//! Invariants: without the task that polls this there is no limit; a volume without puts that wait needs no timer. Tested in `tests/lsm_pace.rs`.

use super::compaction::{TreeCompaction, garbage};
use super::compaction_choice::pending_bytes;
use super::core::LsmCore;
use super::pace_meter::{PaceMeter, PaceTotals, per_second};
use super::pacing::{Pace, PacingInput, pace};
use super::version_edit::LEVELS;
use super::volume::LsmVolume;
use crate::EngineError;
use octokv_base::Nanos;
use octokv_runtime::ReactorHandle;
use std::sync::atomic::Ordering;

/// The time between two looks at a volume that is written to.
const LOOK: Nanos = Nanos::from_millis(20);
/// The time between two refills while there is a limit.
const REFILL: Nanos = Nanos::from_millis(2);
/// What was allowed and not used is kept for so long.
const KEPT_TIME: Nanos = Nanos::from_millis(10);

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
            level0_runs: version.level0_runs(),
            pending_bytes: pending_bytes(&version, &settings.compaction),
            memory_bytes: self.memtables.current().bytes(),
            memory_bytes_max: (settings.memtable_bytes * (settings.memtables_max + 1)) as u64,
            spare_bytes: self.spare_bytes_with_garbage(),
            reclaimed_per_second: self.compaction.rates.reclaimed.load(Ordering::Relaxed),
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
            let totals = PaceTotals {
                written: volume.memtables.written_bytes(),
                drained: volume.compaction.drained_bytes.load(Ordering::Relaxed),
                spare: volume.spare_units() * volume.unit_bytes() as u64,
            };
            let has_work =
                volume.versions.current().level0_runs() >= volume.settings.compaction.level0_trigger;
            meter.sample(now, totals, has_work);
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
