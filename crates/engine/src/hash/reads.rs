//! Operations that change nothing: get, status, list and prefetch.
//!
//! In: keys. Out: what the index and the records say. Invariant: a reader is in an epoch from its look at the index until it has
//! read the record, so that the record's space is not given away meanwhile.

use super::engine::{HashCore, KeyMatch};
use super::index::{IndexEntry, RecordRef};
use crate::common::record::{HEADER_BYTES, RecordHeader, RecordMeta, record_bytes};
use crate::common::write_rules;
use crate::direct::FoundEntry;
use crate::{EngineError, KeySink, KeyStatus, PrefetchStage, StoredValue, ValueRange};
use octokv_base::{Buffer, Key};
use smallvec::SmallVec;

/// Keys of a listing that are read at once, between two yield points.
const LIST_PAGE_KEYS: usize = 16;

impl HashCore {
    /// [`Engine::get_range`](crate::Engine::get_range).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn get(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        let epoch_guard = self.enter_epoch();
        let (partition, tag) = self.volume.partition_and_tag(self.volume.hash(key));
        let record_ref = match self.volume.find_entry(partition, tag) {
            FoundEntry::Missing => return Ok(None),
            FoundEntry::One(words) => IndexEntry::from_words(words).record_ref(),
            FoundEntry::Several | FoundEntry::Unknown => {
                // Boxed because it is rare: it would enlarge every get's future.
                return match Box::pin(self.find_record(key, usize::MAX / 2)).await? {
                    Some((header, buffer, record_ref)) if self.is_in_pieces(&record_ref) => {
                        Box::pin(self.value_in_pieces(header, buffer, range)).await
                    }
                    Some((header, buffer, record_ref)) => {
                        self.stored_value(header, buffer, record_ref, range)
                    }
                    None => Ok(None),
                };
            }
        };
        let bytes = record_ref.units as usize * self.volume.unit_bytes();
        let buffer = self.start_read(record_ref, bytes).ok_or(EngineError::NoMemory)?.await.into_read()?;
        let key_match = self.match_key(&buffer, record_ref, key);
        if self.is_in_pieces(&record_ref)
            && let KeyMatch::Match(header) = key_match
        {
            return match self.is_live(&header) {
                true => Box::pin(self.value_in_pieces(header, buffer, range)).await,
                false => Ok(None),
            };
        }
        drop(epoch_guard);
        match key_match {
            KeyMatch::Match(header) if self.is_live(&header) => {
                self.stored_value(header, buffer, record_ref, range)
            }
            KeyMatch::Match(_) | KeyMatch::OtherKey => Ok(None),
            KeyMatch::Damaged => Err(self.corrupt(record_ref)),
        }
    }

    /// The value of a record, if it is intact.
    fn stored_value(
        &self,
        header: RecordHeader,
        buffer: Buffer,
        record_ref: RecordRef,
        range: ValueRange,
    ) -> Result<Option<StoredValue>, EngineError> {
        let Ok(value) = self.volume.value_range(&header, &buffer) else {
            return Err(self.corrupt(record_ref));
        };
        let value_bytes = value.len() as u32;
        let requested = range.within(value_bytes);
        let RecordMeta { version, expires_at, .. } = header.meta;
        Ok(Some(StoredValue {
            buffer: buffer.into(),
            offset: value.start as u32 + requested.start,
            bytes: requested.end - requested.start,
            value_bytes,
            version,
            expires_at,
        }))
    }

    /// The requested part of a value in pieces. REQUIRES: the caller is in an epoch since it took the reference from the index.
    async fn value_in_pieces(
        &self,
        header: RecordHeader,
        record: Buffer,
        range: ValueRange,
    ) -> Result<Option<StoredValue>, EngineError> {
        let value = self.read_pieces(&header, &record, range).await?;
        let RecordMeta { version, expires_at, .. } = header.meta;
        Ok(Some(StoredValue {
            bytes: value.len() as u32,
            buffer: value.into(),
            offset: 0,
            value_bytes: header.value_bytes as u32,
            version,
            expires_at,
        }))
    }

    /// Whether a record has a value that has not expired.
    fn is_live(&self, header: &RecordHeader) -> bool {
        write_rules::is_live(&header.meta, || self.volume.clock.now())
    }

    /// Finds the key's record and reads `prefix_bytes` of it, or all of a shorter one; `None` also of one without a value.
    async fn find_record(
        &self,
        key: &Key,
        prefix_bytes: usize,
    ) -> Result<Option<(RecordHeader, Buffer, RecordRef)>, EngineError> {
        let _epoch_guard = self.enter_epoch();
        let candidates = self.volume.candidates(self.volume.hash(key));
        let mut damaged = None;
        for &record_ref in &candidates {
            match self.read_record(record_ref, key, prefix_bytes).await? {
                (KeyMatch::Match(header), buffer) => {
                    return Ok(self.is_live(&header).then_some((header, buffer, record_ref)));
                }
                (KeyMatch::OtherKey, _) => {}
                (KeyMatch::Damaged, _) => damaged = Some(record_ref),
            }
        }
        match damaged {
            Some(record_ref) => Err(self.corrupt(record_ref)),
            None => Ok(None),
        }
    }

    /// [`Engine::status`](crate::Engine::status).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        let found = self.find_record(key, HEADER_BYTES + key.len()).await?;
        Ok(found.map(|(header, ..)| KeyStatus {
            value_bytes: header.value_bytes,
            version: header.meta.version,
            expires_at: header.meta.expires_at,
        }))
    }

    /// [`Engine::list`](crate::Engine::list).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        let (mut partition, mut tag) = match start.is_empty() {
            true => (0, 0),
            false => self.volume.partition_and_tag(self.volume.hash(start)),
        };
        let mut reads = SmallVec::<[_; LIST_PAGE_KEYS]>::new();
        while partition < self.volume.partitions.len() {
            sink.yield_point().await;
            let _epoch_guard = self.enter_epoch();
            let next = self.volume.read_page(partition, tag, &mut reads, |entry| {
                let bytes =
                    record_bytes(octokv_base::KEY_BYTES_MAX, 0).next_multiple_of(self.volume.unit_bytes());
                let record_ref = entry.record_ref();
                let buffer = self.pool.take(bytes.min(record_ref.units as usize * self.volume.unit_bytes()));
                buffer.map(|buffer| (record_ref, self.device.read(self.lba(record_ref.location), buffer)))
            });
            let mut has_space = true;
            for read in reads.drain(..) {
                let (record_ref, pending) = read.ok_or(EngineError::NoMemory)?;
                let buffer = pending.await.into_read()?;
                // A damaged record has no key to list; `check` reports it, and so does a read of its key.
                let Ok((header, key)) = self.volume.record_header(&buffer, record_ref.location) else {
                    continue;
                };
                if key.len() > octokv_base::KEY_BYTES_MAX {
                    continue;
                }
                let is_key = self.volume.is_record(record_ref, &header) && self.is_live(&header);
                if has_space && is_key {
                    has_space = sink.offer(key);
                }
            }
            if !has_space {
                return Ok(());
            }
            (partition, tag) = next;
        }
        Ok(())
    }

    /// [`Engine::prefetch`](crate::Engine::prefetch).
    pub(super) fn prefetch(&self, key: &Key, stage: PrefetchStage) {
        // Only memory benefits from a prefetch of the record.
        if stage == PrefetchStage::Record && !self.volume.volatile {
            return;
        }
        let hash = self.volume.hash(key);
        let (partition, tag) = self.volume.partition_and_tag(hash);
        match stage {
            PrefetchStage::Partition => self.volume.prefetch_partition(partition),
            PrefetchStage::Entry => self.volume.prefetch_entry(partition, tag),
            // Needs no epoch: a prefetch does not read the bytes.
            PrefetchStage::Record => {
                if let Some(record_ref) = self.volume.likely_record(partition, tag) {
                    self.device.prefetch_read(self.lba(record_ref.location), 1);
                }
            }
        }
    }
}
