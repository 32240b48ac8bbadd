//! Operations on keys whose partition moves to another device: written on both, read from the first.
//!
//! ```text
//!   put, delete     key locked ─▶ at the first device ─▶ what it has now, at the second ─▶ acknowledged
//!   copy            key locked ─▶ what the first device has, at the second
//!   map frozen      writes wait for the next map
//! ```
//! In: operations on keys. Out: what the contract says of them. Invariant: unless the move has failed, the second device has each key that was copied or written since it
//! began as the first one has it. Conditions, versions and expiry are decided by the first device alone.
//! Tested in `tests/spanned_growth.rs`.

use super::core::{KeyPlace, SpannedCore, absent};
use super::shared_map::{MovingWrites, PartitionMove};
use super::swapping::home_value;
use crate::{DeleteOutcome, Engine, EngineError, PutMode, PutOptions, PutOutcome, PutValue, StoredValue};
use octokv_base::{Key, Version};
use octokv_sched::CostKind;
use std::sync::Arc;

/// What became of the copy of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyOutcome {
    /// The second device has it as the first; so many bytes of the value.
    Copied(usize),
    /// The second device has no space, or a newer version.
    Refused,
}

impl KeyPlace {
    /// Whether the key's partition moves to another device.
    #[inline]
    pub fn is_moving(&self) -> bool {
        self.map.move_of(self.position).is_some()
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
    /// Makes the second device of a move have a key as the first. REQUIRES: the key's lock of the move. `tombstone`: the version of a delete that the
    /// first device may have of it.
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
        let read = read.map_err(|error| self.error_of(&from, of.planned.from, error))?;
        let stored = match &read {
            Some(value) => store_copy(to.engine(), key, value).await,
            None => to.engine().delete_with(key, tombstone).await.map(|_| CopyOutcome::Copied(0)),
        };
        stored.map_err(|error| self.error_of(&to, of.planned.to, error))
    }

    /// After a write on the first device, the same on the second one; if that is not possible the move fails, and the first one keeps the partition.
    async fn write_second(&self, of: &PartitionMove, key: &Key, tombstone: Version) {
        if of.has_failed() {
            return;
        }
        if !matches!(self.copy_key(of, key, tombstone).await, Ok(CopyOutcome::Copied(_))) {
            of.fail();
        }
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
        let (position, bytes) = (place.position, value.bytes);
        let put = async |engine: &E| {
            let Some(of) = &of_key else { return engine.put_with(key, value, options).await };
            let _exclusive = of.exclude(position).await;
            let outcome = engine.put_with(key, value, options).await;
            match &outcome {
                Ok(PutOutcome::Stored) => self.write_second(of, key, Version::NONE).await,
                Ok(_) => {}
                // It may have been stored.
                Err(_) => of.fail(),
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
        let position = place.position;
        let delete = async |engine: &E| {
            let Some(of) = &of_key else { return engine.delete_with(key, version).await };
            let _exclusive = of.exclude(position).await;
            let outcome = engine.delete_with(key, version).await;
            match &outcome {
                Ok(DeleteOutcome::Deleted | DeleteOutcome::NotFound) => {
                    self.write_second(of, key, version).await;
                }
                Ok(DeleteOutcome::NotNewer(_)) => {}
                Err(_) => of.fail(),
            }
            outcome
        };
        self.on_key((place, CostKind::Delete), delete).await
    }
}
