//! Writes that wait for space, and the compaction that makes it.
//!
//! ```text
//!   write ─▶ pass? yes ─▶ goes on
//!             └ no: a task compacts ─▶ woken when chunks are free
//!                   none does       ─▶ the first of the puts, or that of the deletes, compacts, a round at a time; if that does not help,
//!                                      again once a write or a compaction has ended
//! ```
//! In: needs. Out: passes; that the volume is full, if compaction frees nothing and nothing is in progress; the device's error, if that keeps compaction from helping for seconds. Invariant: while a write waits for its pass, some task or the first waiting write compacts, as long as that frees
//! anything; a round runs to its end.
//! Tested in `tests/log_full.rs`.

use super::compaction_rounds::RoundPace;
use super::core::LogCore;
use super::pinned_compaction::PinnedAttempts;
use super::space_limits::SpaceLimits;
use super::space_pass::{SpaceFull, SpaceNeed, SpacePass, WaiterTurn};
use super::store::Store;
use crate::EngineError;
use crate::common::background_task::ErrorReports;
use futures_util::future::join_all;
use octokv_base::Nanos;
use octokv_runtime::{ReactorHandle, yield_now};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::Poll;

/// After so many attempts to compact that failed, [`super::maintenance::RETRY_DELAY`] apart, writes that wait for space fail with the error.
const FAILURES_OF_WRITES: u32 = 5;

/// What a write that asked for a pass does next.
enum PassTurn<'a> {
    Begin(Result<SpacePass<'a>, SpaceFull>),
    Compact(WaiterTurn<'a>),
    Fail(EngineError),
}

impl LogCore {
    /// The pass of a write, once space allows it.
    ///
    /// # Errors
    /// Of the compaction that the write has to make itself; the volume is read-only.
    pub(super) async fn take_pass(
        &self,
        need: SpaceNeed,
    ) -> Result<Result<SpacePass<'_>, SpaceFull>, EngineError> {
        let volume = &self.volume;
        let mut request = pin!(volume.passes.take(&volume.pool, need));
        // The changes before the last round that did not help.
        let mut compacted_at = None;
        loop {
            let turn = poll_fn(|context| match request.as_mut().poll(context) {
                Poll::Ready(pass) => Poll::Ready(PassTurn::Begin(pass)),
                Poll::Pending if volume.is_read_only() => Poll::Ready(PassTurn::Fail(EngineError::ReadOnly)),
                Poll::Pending => match (request.compaction_turn(compacted_at), volume.passes.failure()) {
                    (Some(turn), _) => Poll::Ready(PassTurn::Compact(turn)),
                    (None, Some(error)) => Poll::Ready(PassTurn::Fail(error)),
                    (None, None) => Poll::Pending,
                },
            });
            match turn.await {
                PassTurn::Begin(pass) => return Ok(pass),
                PassTurn::Fail(error) => return Err(error),
                PassTurn::Compact(turn) => {
                    // Boxed because it is rare: it would enlarge every write's future.
                    let has_helped = Box::pin(self.compact_for_waiters()).await?;
                    compacted_at = (!has_helped).then_some(turn.changes);
                }
            }
        }
    }

    /// One round of compaction, for what the first waiting writes need. Whether it helped.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    async fn compact_for_waiters(&self) -> Result<bool, EngineError> {
        let volume = &self.volume;
        let (wanted, changes) = (volume.passes.wanted_chunks(&volume.pool), volume.passes.changes());
        let has_helped = self.compact_round(wanted, RoundPace::InTurn).await?;
        if wanted > 0 && !has_helped && self.is_compaction_over() {
            volume.passes.set_exhausted(&volume.pool, changes);
        }
        Ok(has_helped)
    }

    /// Whether no compaction runs, none is put off because of the device, and no chunk is about to become free.
    fn is_compaction_over(&self) -> bool {
        let has_retired = |store: &Store| {
            let state = store.state.lock();
            !state.is_lost && !state.retired.is_empty()
        };
        self.volume.compactions.len() == 0
            && self.candidates().1.is_empty()
            && !self.volume.stores.iter().any(has_retired)
    }

    /// Compacts whenever the free chunks that work in progress cannot take are fewer than [`SpaceLimits::start`], or a waiting write needs more
    /// free chunks, until the volume is closed or read-only.
    pub(super) async fn run_compactions(&self, handle: &ReactorHandle, report: impl Fn(EngineError)) {
        let volume = &self.volume;
        if volume.settings.compaction_max_per_second == 0 {
            return;
        }
        let _task = volume.passes.begin_task(&volume.pool);
        // Each compacts a log that none of the others does.
        join_all((0..volume.settings.compactions.max(1)).map(|_| self.compact_while_open(handle, &report)))
            .await;
    }

    /// One compaction after another, as far as they are needed.
    async fn compact_while_open(&self, handle: &ReactorHandle, report: &impl Fn(EngineError)) {
        let volume = &self.volume;
        let (mut attempts, mut failures) = (PinnedAttempts::new(handle.now()), 0);
        let (mut reports, mut pinned_reports) = (ErrorReports::new(report), ErrorReports::new(report));
        while !volume.is_read_only() && !volume.is_closing.load(Ordering::Acquire) {
            match self.attempt_pinned(&mut attempts, handle.now()).await {
                Some(Ok(())) => pinned_reports.succeeded(),
                Some(Err(error)) => pinned_reports.failed(error),
                None => {}
            }
            let compacted_before = volume.compacted_bytes();
            let compacted = match self.compact_for_waiters().await {
                Ok(false) => self.finish_window().await,
                compacted => compacted,
            };
            failures = if compacted.is_ok() { 0 } else { failures + 1 };
            // A device that fails for a short time holds writes up, and fails none.
            let failure = compacted.as_ref().err().filter(|_| failures > FAILURES_OF_WRITES).copied();
            volume.passes.set_failure(&volume.pool, failure);
            let pause = match compacted {
                Ok(has_helped) => {
                    reports.succeeded();
                    if has_helped {
                        self.keep_limit(handle, volume.compacted_bytes() - compacted_before).await;
                        Nanos(0)
                    } else {
                        self.compaction_pause(volume.pool.limits())
                    }
                }
                Err(EngineError::ReadOnly) => return,
                Err(error) => {
                    reports.failed(error);
                    super::maintenance::RETRY_DELAY
                }
            };
            match pause {
                Nanos(0) => yield_now().await,
                pause => handle.sleep(pause).await,
            }
        }
    }

    /// Waits behind a round in which compaction has written so many bytes, so that it keeps to its limit, until a write waits for space.
    async fn keep_limit(&self, handle: &ReactorHandle, bytes: u64) {
        let volume = &self.volume;
        let per_second = volume.settings.compaction_max_per_second;
        if per_second == u64::MAX {
            return;
        }
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(per_second);
        let until = handle.now() + Nanos(u64::try_from(nanos).unwrap_or(u64::MAX >> 1));
        let is_open = || !volume.is_read_only() && !volume.is_closing.load(Ordering::Acquire);
        while handle.now() < until && is_open() && volume.passes.wanted_chunks(&volume.pool) == 0 {
            handle.sleep_until(until.min(handle.now() + volume.settings.round_interval)).await;
        }
    }

    /// Until free space is looked at again.
    fn compaction_pause(&self, limits: &SpaceLimits) -> Nanos {
        let settings = &self.volume.settings;
        let spare = self.volume.passes.spare_chunks(&self.volume.pool);
        match spare.saturating_add(limits.key) < limits.start {
            true => settings.pressure_interval,
            false => settings.round_interval,
        }
    }

    /// [`Engine::compact_all`](crate::Engine::compact_all): compacts both logs of each store once, as far as they have garbage.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    pub(super) async fn compact_all(&self, is_wanted: &dyn Fn() -> bool) -> Result<(), EngineError> {
        let mut left = u64::from(self.volume.pool.chunks());
        while left > 0 && is_wanted() && self.compact_round(u32::MAX, RoundPace::Any).await? {
            left -= 1;
        }
        if self.volume.pool.pinned() > 0 {
            self.empty_pinned_chunks().await?;
        }
        // The last round kept space from writes that compact while they wait.
        self.volume.passes.chunks_freed(&self.volume.pool);
        Ok(())
    }
}
