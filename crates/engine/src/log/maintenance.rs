//! The background work of an open volume: deferred flushes, markers, checkpoints.
//!
//! In: a reactor's timer. Out: flushes, markers and checkpoints. A published batch is flushed one round later at most; a quiet store
//! has a marker that states its last image as durable; a replay reads no more than the interval between checkpoints.
//! Invariant: it ends when the volume is read-only; an error that stays is reported once.

use super::core::LogCore;
use crate::common::background_task::ErrorReports;
use crate::{Durability, EngineError};
use futures_util::future::join3;
use octokv_base::Nanos;
use octokv_runtime::ReactorHandle;
use std::cell::RefCell;

/// The pause after a round that failed.
pub(super) const RETRY_DELAY: Nanos = Nanos::from_secs(1);

impl LogCore {
    /// [`Engine::maintain`](crate::Engine::maintain).
    pub(super) async fn run_maintenance(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) {
        let report = RefCell::new(report);
        let report = |error| report.borrow_mut()(error);
        let compactions = self.run_compactions(handle, report);
        join3(self.run_rounds(handle, report), compactions, self.run_scrub(handle, &report)).await;
    }

    /// Flushes, marks and writes checkpoints, until the volume is read-only.
    async fn run_rounds(&self, handle: &ReactorHandle, report: impl Fn(EngineError)) {
        let mut reports = ErrorReports::new(report);
        let (mut pause, mut appended_before) = (self.volume.settings.round_interval, u64::MAX);
        loop {
            handle.sleep(pause).await;
            if self.volume.is_read_only() {
                return;
            }
            let appended = self.volume.key_units_appended();
            let is_quiet = appended == appended_before;
            appended_before = appended;
            pause = match self.maintenance_round(is_quiet).await {
                Ok(()) => {
                    reports.succeeded();
                    self.volume.settings.round_interval
                }
                Err(error) => {
                    reports.failed(error);
                    RETRY_DELAY
                }
            };
        }
    }

    /// One round; `is_quiet` if nothing was appended since the last.
    async fn maintenance_round(&self, is_quiet: bool) -> Result<(), EngineError> {
        let volume = &self.volume;
        if volume.settings.durability == Durability::Completed {
            self.flush_published().await?;
        }
        if is_quiet {
            self.mark_durable().await?;
        }
        if volume.is_checkpoint_due() {
            self.checkpoint(false).await?;
        }
        Ok(())
    }

    /// Flushes what is published and not durable, if there is any.
    async fn flush_published(&self) -> Result<(), EngineError> {
        let mut published = Vec::with_capacity(self.volume.stores.len());
        let mut is_behind = false;
        for store in &self.volume.stores {
            let state = store.state.lock();
            is_behind |= state.batches.durable_sequence() < state.batches.published_sequence();
            published.push(state.batches.published_sequence());
        }
        match is_behind {
            true => self.flush_device(&published).await,
            false => Ok(()),
        }
    }
}
