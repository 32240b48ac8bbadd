//! Writes that wait for space, and the compaction that makes it.
//!
//! ```text
//!   write ─▶ pass? yes ─▶ goes on
//!             └ no: a task compacts ─▶ woken when chunks are free
//!                   none does       ─▶ the first of the puts, or that of the deletes, compacts, a round at a time; if that does not help,
//!                                      again once a write or a compaction has ended
//! ```
//! In: needs. Out: passes. Invariant: while a write waits for its pass, some task or the first waiting write compacts, as long as that frees
//! anything; a round runs to its end.
//! Tested in `tests/log_full.rs`.

use super::core::LogCore;
use super::space_limits::SpaceLimits;
use super::space_pass::{SpaceFull, SpaceNeed, SpacePass, WaiterTurn};
use crate::EngineError;
use octokv_base::Nanos;
use octokv_runtime::{ReactorHandle, yield_now};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::atomic::Ordering;
use std::task::Poll;

/// What a write that asked for a pass does next.
enum PassTurn<'a> {
    Begin(Result<SpacePass<'a>, SpaceFull>),
    Compact(WaiterTurn<'a>),
    ReadOnly,
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
                Poll::Pending if volume.is_read_only() => Poll::Ready(PassTurn::ReadOnly),
                Poll::Pending => match request.compaction_turn(compacted_at) {
                    Some(turn) => Poll::Ready(PassTurn::Compact(turn)),
                    None => Poll::Pending,
                },
            });
            match turn.await {
                PassTurn::Begin(pass) => return Ok(pass),
                PassTurn::ReadOnly => return Err(EngineError::ReadOnly),
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
        self.compact_round(self.volume.passes.wanted_chunks(&self.volume.pool)).await
    }

    /// Compacts whenever the free chunks that work in progress cannot take are fewer than [`SpaceLimits::start`], or a waiting write needs more
    /// free chunks, until the volume is closed or read-only.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    pub(super) async fn run_compactions(&self, handle: &ReactorHandle, mut report: impl FnMut(EngineError)) {
        let volume = &self.volume;
        if volume.settings.compaction_max_per_second == 0 {
            return;
        }
        let _task = volume.passes.begin_task(&volume.pool);
        while !volume.is_read_only() && !volume.is_closing.load(Ordering::Acquire) {
            let pause = match self.compact_for_waiters().await {
                Ok(true) => Nanos(0),
                Ok(false) => self.compaction_pause(volume.pool.limits()),
                Err(EngineError::ReadOnly) => return,
                Err(error) => {
                    report(error);
                    super::maintenance::RETRY_DELAY
                }
            };
            match pause {
                Nanos(0) => yield_now().await,
                pause => handle.sleep(pause).await,
            }
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
        while left > 0 && is_wanted() && self.compact_round(u32::MAX).await? {
            left -= 1;
        }
        // The last round kept space from writes that compact while they wait.
        self.volume.passes.chunks_freed(&self.volume.pool);
        Ok(())
    }
}
