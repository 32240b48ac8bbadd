//! Writes that wait for space, and the compaction that makes it.
//!
//! ```text
//!   write ─▶ pass? yes ─▶ goes on
//!             └ no: a task compacts ─▶ woken when chunks are free
//!                   none does       ─▶ compacts itself, a round at a time
//! ```
//! In: needs. Out: passes. Invariant: while a write waits for its pass, some task or the write itself compacts, as long as that frees anything;
//! a round runs to its end.
//! Tested in `tests/log_full.rs`.

use super::core::LogCore;
use super::space_limits::SpaceLimits;
use super::space_pass::{SpaceFull, SpaceNeed, SpacePass};
use crate::EngineError;
use futures_util::FutureExt;
use octokv_base::Nanos;
use octokv_runtime::{ReactorHandle, yield_now};
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts a task that compacts, until it is dropped.
struct CompactionTask<'a>(&'a AtomicUsize);

impl<'a> CompactionTask<'a> {
    fn new(count: &'a AtomicUsize) -> CompactionTask<'a> {
        count.fetch_add(1, Ordering::AcqRel);
        CompactionTask(count)
    }
}

impl Drop for CompactionTask<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl LogCore {
    /// The pass of a write, once space allows it.
    ///
    /// # Errors
    /// Of the compaction that the write has to make itself.
    pub(super) async fn take_pass(
        &self,
        need: SpaceNeed,
    ) -> Result<Result<SpacePass<'_>, SpaceFull>, EngineError> {
        let volume = &self.volume;
        let mut request = pin!(volume.passes.take(&volume.pool, need));
        loop {
            if let Some(pass) = request.as_mut().now_or_never() {
                return Ok(pass);
            }
            if volume.compaction_tasks.load(Ordering::Acquire) > 0 {
                return Ok(request.await);
            }
            if volume.is_read_only() {
                return Err(EngineError::ReadOnly);
            }
            // Boxed because it is rare: it would enlarge every write's future.
            let has_helped = Box::pin(self.compact_for_waiters()).await?;
            if !has_helped {
                yield_now().await;
            }
        }
    }

    /// One round of compaction, for what the first waiting write needs. Whether it helped.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    async fn compact_for_waiters(&self) -> Result<bool, EngineError> {
        let wanted = self.volume.passes.first_need(&self.volume.pool).map_or(0, |(_, wanted)| wanted);
        self.compact_round(wanted).await
    }

    /// Compacts while less space is free than [`SpaceLimits::start`], or than waiting writes need, until the volume is closed or read-only.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    pub(super) async fn run_compactions(&self, handle: &ReactorHandle, mut report: impl FnMut(EngineError)) {
        let volume = &self.volume;
        if volume.settings.compaction_max_per_second == 0 {
            return;
        }
        let _task = CompactionTask::new(&volume.compaction_tasks);
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
        match self.volume.pool.free() < limits.start {
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
        Ok(())
    }
}
