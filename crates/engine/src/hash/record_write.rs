//! The write of a record, beside which the key of the record that it replaces is compared.

use super::engine::{HashCore, KeyMatch};
use super::index::RecordRef;
use super::journal::WriteOutcome;
use crate::EngineError;
use crate::common::record::{HEADER_AND_KEY_BYTES_MAX, HEADER_BYTES};
use octokv_base::{Buffer, Key};
use octokv_device::{DeviceError, DeviceFuture};
use std::future::{Future, Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};

impl HashCore {
    /// A record's write, beside which the caller polls the comparison of its predecessor's key.
    pub(super) fn compare_beside<'a, W>(
        &'a self,
        write: W,
        unverified: Option<RecordRef>,
        key: &'a Key,
    ) -> RecordWrite<'a, W> {
        let mut outcome = Ok(WriteOutcome::Confirmed);
        let read = unverified.and_then(|record_ref| {
            let bytes = self.prefix_bytes(record_ref, HEADER_BYTES + key.len());
            let Some(read) = self.start_read(record_ref, bytes) else {
                outcome = Err(EngineError::NoMemory);
                return None;
            };
            Some((record_ref, bytes, read))
        });
        RecordWrite { core: self, key, write, read, outcome }
    }

    /// The comparison of a predecessor's key. The commit writes the record.
    pub(super) fn compare_alone<'a>(
        &'a self,
        unverified: Option<RecordRef>,
        key: &'a Key,
    ) -> RecordWrite<'a, Ready<Result<(), DeviceError>>> {
        self.compare_beside(ready(Ok(())), unverified, key)
    }
}

/// The write of a record, and the comparison of its predecessor's key ([`HashCore::compare_beside`]). The device owns the
/// space until the write completes: it ends after both, also if the comparison failed.
pub(super) struct RecordWrite<'a, W> {
    core: &'a HashCore,
    key: &'a Key,
    write: W,
    /// The predecessor, the bytes that are being read of it, and that read.
    read: Option<(RecordRef, usize, DeviceFuture)>,
    /// Of the comparison.
    outcome: Result<WriteOutcome, EngineError>,
}

impl<W> RecordWrite<'_, W> {
    /// The outcome of the comparison, once `bytes` bytes of the predecessor were read; `None` if that has to be longer.
    fn compare(
        &self,
        record_ref: RecordRef,
        bytes: usize,
        read: Result<Buffer, DeviceError>,
    ) -> Option<Result<WriteOutcome, EngineError>> {
        let buffer = match read {
            Ok(buffer) => buffer,
            Err(error) => return Some(Err(error.into())),
        };
        Some(Ok(match self.core.match_key(&buffer, record_ref, self.key) {
            KeyMatch::OtherKey => WriteOutcome::OtherKey,
            // Another key with the same tag may be longer.
            KeyMatch::Damaged if bytes < self.core.prefix_bytes(record_ref, HEADER_AND_KEY_BYTES_MAX) => {
                return None;
            }
            // A damaged record with the key's tag counts as the key's.
            KeyMatch::Match(_) | KeyMatch::Damaged => WriteOutcome::Confirmed,
        }))
    }
}

impl<W: Future<Output = Result<(), DeviceError>> + Unpin> Future for RecordWrite<'_, W> {
    type Output = Result<WriteOutcome, EngineError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        while let Some((record_ref, bytes, read)) = &mut this.read {
            let (record_ref, bytes) = (*record_ref, *bytes);
            let read = std::task::ready!(Pin::new(read).poll(context)).into_read();
            this.read = None;
            match this.compare(record_ref, bytes, read) {
                Some(outcome) => this.outcome = outcome,
                None => {
                    let longest = this.core.prefix_bytes(record_ref, HEADER_AND_KEY_BYTES_MAX);
                    match this.core.start_read(record_ref, longest) {
                        Some(read) => this.read = Some((record_ref, longest, read)),
                        None => this.outcome = Err(EngineError::NoMemory),
                    }
                }
            }
        }
        std::task::ready!(Pin::new(&mut this.write).poll(context))?;
        Poll::Ready(this.outcome)
    }
}
