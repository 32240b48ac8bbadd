//! Values on their way: appended to the tail of a value log, written, and not entered in an image yet.
//!
//! In: values. Out: their places, once they are written. Invariants: one write of a store's tail is in flight, which has the records of all that
//! came before it; a record that is under way keeps its chunk behind the head of the log.
//! Tested in `tests/log_conformance.rs` and `tests/log_power_loss.rs`.

use super::core::{LogCore, device_error};
use super::hash_prefix::HashPrefix;
use super::log_place::ChunkIndex;
use super::segment_entry::ValuePlace;
use super::segment_image::OldValue;
use super::space_limits::ChunkPurpose;
use super::store::{Store, granules_of};
use super::value_record::{NewValueRecord, value_record_bytes};
use super::value_tail::{TailRecord, TailSpace, TailTurn, TailWrites, ValueAppendError, ValueTicket};
use crate::EngineError;
use crate::common::record::RecordMeta;
use octokv_device::DeviceError;
use smallvec::SmallVec;
use std::future::poll_fn;

/// A record that was appended to a value log. Dropping it says that an image has its entry, or that none will have it.
pub(super) struct AppendedValue<'a> {
    store: &'a Store,
    place: ValuePlace,
    meta: RecordMeta,
    /// The chunks of the value log that have it.
    chunks: SmallVec<[ChunkIndex; 2]>,
    /// `None` once it is written.
    ticket: Option<ValueTicket>,
}

impl AppendedValue<'_> {
    /// Where it lies.
    pub(super) fn place(&self) -> &ValuePlace {
        &self.place
    }

    /// Whether it says this of its key.
    pub(super) fn is_of(&self, meta: &RecordMeta) -> bool {
        (self.meta.version, self.meta.expires_at) == (meta.version, meta.expires_at)
    }
}

impl Drop for AppendedValue<'_> {
    fn drop(&mut self) {
        let wakers = {
            let mut state = self.store.state.lock();
            state.note_entered(self.chunks.iter().copied());
            self.ticket.take().map(|ticket| self.store.tail.lock().forget(ticket))
        };
        if let Some(wakers) = wakers {
            wakers.wake();
        }
    }
}

/// A leader of a tail's writes. Dropping it before they have ended says so.
struct TailLead<'a> {
    store: &'a Store,
    has_ended: bool,
}

impl Drop for TailLead<'_> {
    fn drop(&mut self) {
        if !self.has_ended {
            let wakers = self.store.tail.lock().lead_dropped();
            wakers.wake();
        }
    }
}

impl AppendedValue<'_> {
    /// Returns when the record is written. Leads the writes of the tail when it is this record's turn.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn written(&mut self, core: &LogCore) -> Result<(), EngineError> {
        while let Some(ticket) = &self.ticket {
            let turn = poll_fn(|context| self.store.tail.lock().poll_turn(ticket, context)).await;
            match turn {
                TailTurn::Lead(writes) => core.lead_tail(self.store, writes).await,
                TailTurn::Written => self.ticket = None,
                TailTurn::Failed(error) => {
                    self.ticket = None;
                    return Err(device_error(error, self.store.id));
                }
                TailTurn::Interrupted => {
                    self.ticket = None;
                    return Err(EngineError::NoMemory);
                }
            }
        }
        Ok(())
    }
}

impl LogCore {
    /// Appends the record of a value to the tail of its store's value log. Its write begins with the first poll of
    /// [`AppendedValue::written`].
    ///
    /// # Errors
    /// No memory, no chunks for this purpose.
    pub(super) fn append_value<'a, 'v>(
        &self,
        store: &'a Store,
        prefix: HashPrefix,
        record: &NewValueRecord<'_>,
        parts: impl Iterator<Item = &'v [u8]>,
        purpose: ChunkPurpose,
    ) -> Result<AppendedValue<'a>, EngineError> {
        let mut guard = store.state.lock();
        let state = &mut *guard;
        let space =
            TailSpace { log: &mut state.values, pool: &self.volume.pool, purpose, buffers: &self.pool };
        let appended = store.tail.lock().append(record, parts, prefix.id(), space);
        let TailRecord { place, ticket } = appended.map_err(|error| match error {
            ValueAppendError::NoChunks => device_error(DeviceError::NoSpace, store.id),
            ValueAppendError::NoMemory => EngineError::NoMemory,
        })?;
        let record_bytes = value_record_bytes(record.key.len(), record.value_bytes, &record.meta);
        let value = OldValue { at: place, record_bytes };
        let index_of = |(chunk, _)| {
            let owner = self.volume.pool.owner_of(self.volume.pool.first_unit_of(chunk));
            owner.expect("a record was appended to a log's chunk").0.index
        };
        let chunks: SmallVec<[ChunkIndex; 2]> =
            granules_of(&value, self.volume.layout()).map(index_of).collect();
        state.note_unentered(chunks.iter().copied());
        Ok(AppendedValue { store, place: value.at, meta: record.meta, chunks, ticket: Some(ticket) })
    }

    /// Makes the writes of a tail, together.
    async fn lead_tail(&self, store: &Store, writes: TailWrites) {
        let mut lead = TailLead { store, has_ended: false };
        let begun: SmallVec<[_; 2]> = writes
            .into_iter()
            .map(|write| self.device.write(self.volume.lba(write.unit), write.bytes))
            .collect();
        let mut result = Ok(());
        for write in begun {
            result = result.and(write.await.result);
        }
        let wakers = store.tail.lock().finished(result);
        lead.has_ended = true;
        wakers.wake();
    }
}
