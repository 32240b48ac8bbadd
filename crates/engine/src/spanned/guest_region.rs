//! The swap region of a device that serves: records of keys of other devices, by the tokens of its device.
//!
//! In: operations on keys that are, or were, swapped to the device. Out: their records, and errors that name the device. Invariant: an error of a device that has failed
//! says so, whatever the engine noticed. Tested in `tests/spanned_swap.rs`.

use super::core::admitted;
use super::places::{OpenRegion, PlacedMember, absent};
use super::swap_region::{SwappedVersions, read_record, swap_value};
use crate::log::handle::LogEngine;
use crate::{Engine, EngineError, PutOptions, PutOutcome, PutValue, StoredValue, ValueRange, Volume};
use octokv_base::{Key, RecordLayout, Version};
use octokv_sched::CostKind;
use std::future::Future;

/// The region of a device that serves.
pub(super) struct GuestRegion<E> {
    pub placed: PlacedMember<E>,
    /// The index of the device.
    pub guest: usize,
}

impl<E: Engine> GuestRegion<E> {
    fn open(&self) -> &OpenRegion {
        self.placed.open().swap.as_ref().expect("it has a region")
    }

    fn log(&self) -> &LogEngine {
        &self.open().engine
    }

    /// Whether it takes puts.
    pub fn is_writable(&self) -> bool {
        !Volume::is_read_only(self.log().volume())
    }

    /// The error of an operation on the region: that its device has failed, whatever it was that the engine noticed.
    fn error(&self, error: EngineError) -> EngineError {
        if self.placed.serves() { self.open().place.engine_error(error) } else { absent(self.guest) }
    }

    /// # Errors
    /// The device fails.
    pub async fn flush(&self) -> Result<(), EngineError> {
        self.log().flush().await.map_err(|error| self.error(error))
    }

    /// Runs an operation on the region by the tokens of its device.
    async fn admitted<T>(
        &self,
        command: (CostKind, usize),
        operation: impl Future<Output = Result<T, EngineError>>,
        bytes_of: impl FnOnce(&T) -> usize,
    ) -> Result<T, EngineError> {
        let outcome = admitted((&self.placed, self.guest), command, operation, bytes_of).await;
        outcome.map_err(|error| self.error(error))
    }

    /// Stores a record.
    ///
    /// # Errors
    /// The device fails.
    pub async fn put(
        &self,
        key: &Key,
        versions: SwappedVersions,
        (value, layout): (&PutValue, RecordLayout),
    ) -> Result<PutOutcome, EngineError> {
        let log = self.log();
        let record = swap_value(log.record_layout(), key, versions, value, layout);
        let command = (CostKind::Put, record.bytes);
        self.admitted(command, log.put_with(key, record, PutOptions::default()), |_| command.1).await
    }

    /// The versions and the part of the value of a record.
    ///
    /// # Errors
    /// The device fails.
    pub async fn get(
        &self,
        key: &Key,
        range: ValueRange,
    ) -> Result<Option<(SwappedVersions, StoredValue)>, EngineError> {
        let bytes_of = |read: &Option<(SwappedVersions, StoredValue)>| {
            read.as_ref().map_or(0, |(_, value)| value.as_bytes().len())
        };
        self.admitted((CostKind::Get, 0), read_record(self.log(), key, range), bytes_of).await
    }

    /// Removes a record.
    ///
    /// # Errors
    /// The device fails.
    pub async fn remove(&self, key: &Key) -> Result<(), EngineError> {
        let remove = self.log().delete_with(key, Version::NONE);
        self.admitted((CostKind::Delete, 0), remove, |_| 0).await.map(drop)
    }
}
