//! Pinning of head chunks that the device fails to read, and the attempts to empty pinned chunks ([`super::pinned_chunks`]).
//!
//! In: the ends of compaction rounds, a timer. Out: heads that advance, free chunks. Invariants: at most a part in [`PINNED_DIVISOR`] of the
//! pool is pinned; a pinned chunk counts as emptied only when no image, published or not, names anything in it.
//! Tested in `tests/log_device_errors.rs`.

use super::core::LogCore;
use super::log_place::LogKind;
use super::pinned_chunks::is_passing_error;
use super::store::Store;
use super::store_image::PinnedChunk;
use crate::EngineError;
use octokv_base::Nanos;
use std::sync::atomic::{AtomicU32, Ordering};

/// A round of a log fails so often in succession before its head chunk is pinned: shorter troubles of a device cost no checkpoint.
const FAILURES_BEFORE_PIN: u32 = 3;
/// The part of the pool that is pinned at most.
const PINNED_DIVISOR: u32 = 32;
/// From one attempt to empty pinned chunks to the next: twice as long after each that failed.
const ATTEMPT_DELAYS: (Nanos, Nanos) = (Nanos::from_secs(1), Nanos::from_secs(60));

/// A chunk that is about to be pinned, until this is dropped.
struct WantedPin<'a>(&'a AtomicU32);

impl Drop for WantedPin<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// When pinned chunks are read again.
pub(super) struct PinnedAttempts {
    next: Nanos,
    delay: Nanos,
}

impl PinnedAttempts {
    /// The first attempt is due a second from now.
    pub(super) fn new(now: Nanos) -> PinnedAttempts {
        PinnedAttempts { next: now + ATTEMPT_DELAYS.0, delay: ATTEMPT_DELAYS.0 }
    }
}

impl LogCore {
    /// Notes that a round of a log has ended, and pins its head chunk if that keeps it from going on.
    ///
    /// # Errors
    /// Those of a checkpoint.
    pub(super) async fn note_round<T>(
        &self,
        store: &Store,
        log: LogKind,
        end: &Result<T, EngineError>,
    ) -> Result<(), EngineError> {
        let has_failed = end.as_ref().is_err_and(is_passing_error);
        let wanted = {
            let state = &mut *store.state.lock();
            let failures = state.pinned.note_round(log, has_failed);
            let head = match log {
                LogKind::Keys => state.keys.sealed().next(),
                LogKind::Values => state.values.sealed().next(),
            };
            let may_pin = failures >= FAILURES_BEFORE_PIN && head.is_some();
            let pin = may_pin.then(|| self.begin_pin()).flatten();
            if pin.is_some() {
                // What lies behind is another chunk.
                state.pinned.note_round(log, false);
            }
            let wanted = head.zip(pin).map(|((index, chunk), pin)| (PinnedChunk { log, index, chunk }, pin));
            state.pinned.wanted.extend(wanted.iter().map(|(wanted, _)| *wanted));
            wanted
        };
        let Some((wanted, _pin)) = wanted else { return Ok(()) };
        let pinned = self.pin(store, wanted).await;
        // Whatever the checkpoint says: a later round asks again.
        store.state.lock().pinned.wanted.retain(|other| *other != wanted);
        pinned
    }

    async fn pin(&self, store: &Store, wanted: PinnedChunk) -> Result<(), EngineError> {
        // The replay of the checkpoint, and its value tail, have to lie behind the chunk.
        self.commit_all(store).await?;
        while wanted.log == LogKind::Values && store.state.lock().stated_value_chunk <= wanted.index {
            self.append_marker_now(store).await?;
        }
        Box::pin(self.checkpoint(false)).await
    }

    /// Notes that one more chunk is to be pinned, if that may be: with those that other compactions are about to pin.
    fn begin_pin(&self) -> Option<WantedPin<'_>> {
        let (pool, wanted) = (&self.volume.pool, &self.volume.wanted_pins);
        let most = (pool.chunks() / PINNED_DIVISOR).max(1);
        let add = |wanted: u32| (pool.pinned() + wanted < most).then_some(wanted + 1);
        let is_added = wanted.fetch_update(Ordering::AcqRel, Ordering::Acquire, add).is_ok();
        is_added.then(|| WantedPin(wanted))
    }

    /// Empties pinned chunks if that is due, and lets logs be compacted in their turn again that the device failed to read. `None` if it is
    /// not due.
    pub(super) async fn attempt_pinned(
        &self,
        attempts: &mut PinnedAttempts,
        now: Nanos,
    ) -> Option<Result<(), EngineError>> {
        if now < attempts.next {
            return None;
        }
        let stores = &self.volume.stores;
        stores.iter().for_each(|store| store.state.lock().pinned.end_postponement());
        let pool = &self.volume.pool;
        let outcome = match pool.pinned() {
            0 => Ok(()),
            _ => Box::pin(self.empty_pinned_chunks()).await,
        };
        if pool.pinned() == 0 {
            *attempts = PinnedAttempts::new(now);
        } else {
            attempts.next = now + attempts.delay;
            attempts.delay = (attempts.delay + attempts.delay).min(ATTEMPT_DELAYS.1);
        }
        Some(outcome)
    }

    /// Moves the live contents of pinned chunks, as far as the device reads them now and there is space, and frees those that have none left.
    ///
    /// # Errors
    /// The device's, if it failed to read any; those of a checkpoint; no memory.
    pub(super) async fn empty_pinned_chunks(&self) -> Result<(), EngineError> {
        let (mut failure, mut has_emptied) = (None, false);
        for store in &self.volume.stores {
            let pinned = {
                let state = store.state.lock();
                if state.is_lost { Vec::new() } else { state.pinned.pinned.clone() }
            };
            for pinned in pinned {
                // Not beside a round of the log, or another attempt.
                let Some(_turn) = self.volume.compactions.begin(store.id, pinned.log) else { continue };
                if !store.state.lock().pinned.pinned.contains(&pinned) {
                    continue;
                }
                match self.empty_chunk(store, pinned).await {
                    Ok(true) => {
                        let state = &mut store.state.lock().pinned;
                        state.pinned.retain(|other| *other != pinned);
                        state.emptied.push(pinned);
                        has_emptied = true;
                    }
                    Ok(false) => {}
                    Err(error) if is_passing_error(&error) => failure = Some(error),
                    Err(error) => return Err(error),
                }
            }
        }
        if has_emptied {
            Box::pin(self.checkpoint(false)).await?;
        }
        failure.map_or(Ok(()), Err)
    }

    /// Moves the live contents of a pinned chunk. Whether none is left.
    async fn empty_chunk(&self, store: &Store, pinned: PinnedChunk) -> Result<bool, EngineError> {
        let PinnedChunk { log, index, chunk } = pinned;
        match log {
            LogKind::Keys => {
                self.sweep_images(store, index, chunk).await?;
                self.commit_all(store).await?;
                Ok(self.is_chunk_empty(chunk))
            }
            // Its records are not counted since a recovery: visits of all segments see that none is left.
            LogKind::Values => {
                let is_empty = self.visit_pinned(store, chunk).await?;
                self.commit_all(store).await?;
                Ok(is_empty)
            }
        }
    }
}
