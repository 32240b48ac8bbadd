//! Dual writes while a partition migrates: the source decides each write, what it then has goes to the destination, and reads stay at the source.
//!
//! ```text
//!   put, delete     key locked ─▶ at the source ─▶ what it has now, at the destination ─▶ acknowledged
//!   copy            key locked ─▶ what the source has, at the destination
//!   map frozen      writes wait for the next map
//! ```
//! In: operations on keys. Out: what the contract says of them. Invariant: unless the move has failed, the destination has each key that was copied or written since it
//! began as the source has it. Conditions, versions and expiry are decided by the source alone.
//! Tested in `tests/spanned_growth.rs`.

use super::core::{KeyPlace, SpannedCore};
use super::places::absent;
use super::shared_map::{MovingWrites, PartitionMove};
use super::swapping::home_value;
use crate::bug_injection::{self, InjectedBug};
use crate::{DeleteOutcome, Engine, EngineError, PutMode, PutOptions, PutOutcome, PutValue, StoredValue};
use octokv_base::{Key, Version};
use octokv_runtime::yield_now;
use octokv_sched::CostKind;
use std::sync::Arc;

/// How often a copy that finds no memory is tried.
const MEMORY_TRIES: usize = 1_000;

/// What became of the copy of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyOutcome {
    /// The destination has it as the source; so many bytes of the value.
    Copied(usize),
    /// The destination has no space, or a newer version.
    Refused,
}

impl KeyPlace {
    /// Whether the key's partition moves to another device.
    #[inline]
    pub fn is_moving(&self) -> bool {
        self.map.move_of(self.position).is_some()
    }
}

/// Ends a move after a write at the source that failed, unless it certainly changed nothing.
fn note_error(of: &PartitionMove, error: EngineError) {
    if !matches!(error, EngineError::NoMemory | EngineError::Unsupported(_) | EngineError::NoPartition) {
        of.fail();
    }
}

/// Stores a value with its version and expiry.
///
/// # Errors
/// Of the engine.
async fn store_copy<E: Engine>(
    engine: &E,
    key: &Key,
    value: &StoredValue,
) -> Result<CopyOutcome, EngineError> {
    let (version, expires_at) = (value.version, value.expires_at);
    let put = async |version| {
        let record = home_value(engine.record_layout(), key, value);
        engine.put_with(key, record, PutOptions { mode: PutMode::Upsert, version, expires_at }).await
    };
    let outcome = match put(version).await? {
        // A value that was replaced without a version keeps that of its key.
        PutOutcome::NotNewer(same) if same == version => put(Version::NONE).await?,
        outcome => outcome,
    };
    match outcome {
        PutOutcome::Stored => Ok(CopyOutcome::Copied(value.as_bytes().len())),
        _ => Ok(CopyOutcome::Refused),
    }
}

impl<E: Engine> SpannedCore<E> {
    /// Makes the destination of a move have a key as the source. REQUIRES: the key's lock of the move. `tombstone`: the version of a delete that the
    /// source may have of it.
    ///
    /// # Errors
    /// Of either device.
    pub(super) async fn copy_key(
        &self,
        of: &PartitionMove,
        key: &Key,
        tombstone: Version,
    ) -> Result<CopyOutcome, EngineError> {
        let (from, to) = (self.member(of.planned.from)?, self.member(of.planned.to)?);
        let read = from.engine().get(key).await;
        let read = read.map_err(|error| from.engine_error(error))?;
        let stored = match &read {
            Some(value) => store_copy(to.engine(), key, value).await,
            None => to.engine().delete_with(key, tombstone).await.map(|_| CopyOutcome::Copied(0)),
        };
        stored.map_err(|error| to.engine_error(error))
    }

    /// After a write at the source, the same at the destination; if that is not possible the move fails, and the source keeps the partition.
    async fn copy_to_destination(&self, of: &PartitionMove, key: &Key, tombstone: Version) {
        if of.has_failed() {
            return;
        }
        for _ in 0..MEMORY_TRIES {
            match self.copy_key(of, key, tombstone).await {
                Ok(CopyOutcome::Copied(_)) => return,
                Err(EngineError::NoMemory) => yield_now().await,
                Ok(CopyOutcome::Refused) | Err(_) => break,
            }
        }
        of.fail();
    }

    /// The place of a key that does not wait for another map, with the move of its partition.
    ///
    /// # Errors
    /// Writes of the partition fail.
    async fn unfrozen_place(&self, key: &Key) -> Result<(KeyPlace, Option<Arc<PartitionMove>>), EngineError> {
        loop {
            let place = self.place_of(key);
            let of_key = place.map.move_of(place.position).cloned();
            match place.map.writes {
                _ if of_key.is_none() => return Ok((place, of_key)),
                MovingWrites::Both => return Ok((place, of_key)),
                MovingWrites::Wait => {}
                MovingWrites::Fail => return Err(absent(place.device)),
            }
            let change = place.map.change();
            drop(place);
            self.shared.map.changed(change).await;
        }
    }

    /// [`Engine::put_with`] of a key whose partition may move.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn put_moving(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        let (place, of_key) = self.unfrozen_place(key).await?;
        if of_key.is_none() && self.swaps().is_some() {
            return self.put_swapping((place, key), value, options).await;
        }
        let _command = self.swaps().map(|swaps| swaps.begin(place.device));
        let (position, bytes) = (place.position, value.bytes);
        let put = async |engine: &E| {
            let Some(of) = &of_key else { return engine.put_with(key, value, options).await };
            let _exclusive = of.exclude(position).await;
            let outcome = engine.put_with(key, value, options).await;
            match &outcome {
                Ok(PutOutcome::Stored) if bug_injection::is_injected(InjectedBug::MoveSkipDualPut) => {}
                Ok(PutOutcome::Stored) => self.copy_to_destination(of, key, options.version).await,
                Ok(_) => {}
                Err(error) => note_error(of, *error),
            }
            outcome
        };
        let key_bytes = key.len();
        self.on_key_counted((place, CostKind::Put, bytes), put, |traffic, outcome| {
            if *outcome == PutOutcome::Stored {
                traffic.note_put(key_bytes + bytes);
            }
            bytes
        })
        .await
    }

    /// [`Engine::delete_with`] of a key whose partition may move.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn delete_moving(
        &self,
        key: &Key,
        version: Version,
    ) -> Result<DeleteOutcome, EngineError> {
        let (place, of_key) = self.unfrozen_place(key).await?;
        if of_key.is_none() && self.swaps().is_some() {
            return self.delete_swapping((place, key), version).await;
        }
        let _command = self.swaps().map(|swaps| swaps.begin(place.device));
        let position = place.position;
        let delete = async |engine: &E| {
            let Some(of) = &of_key else { return engine.delete_with(key, version).await };
            let _exclusive = of.exclude(position).await;
            let outcome = engine.delete_with(key, version).await;
            match &outcome {
                Ok(_) if bug_injection::is_injected(InjectedBug::MoveSkipDualDelete) => {}
                Ok(DeleteOutcome::Deleted | DeleteOutcome::NotFound) => {
                    self.copy_to_destination(of, key, version).await;
                }
                Ok(DeleteOutcome::NotNewer(_)) => {}
                Err(error) => note_error(of, *error),
            }
            outcome
        };
        self.on_key((place, CostKind::Delete), delete).await
    }
}
