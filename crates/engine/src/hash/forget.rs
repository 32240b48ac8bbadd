//! The end of tombstones: removes what has no value any more and is older than every write that may still come.
//!
//! In: the version below which no write comes. A page of index entries at a time is looked through, and of those whose records
//! have flags the headers are read. Each removal is a change like a delete's, under the key's lock and after another look.

use super::engine::HashCore;
use super::index::RecordRef;
use crate::EngineError;
use crate::common::record::{HEADER_AND_KEY_BYTES_MAX, RecordFlags, RecordMeta};
use crate::common::write_rules;
use octokv_base::{Key, Version};
use smallvec::SmallVec;

/// Entries of the index that are looked through at once.
const PAGE_ENTRIES: usize = 16;

impl HashCore {
    /// [`Engine::forget_below`](crate::Engine::forget_below).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        let volume = &self.volume;
        let (mut partition, mut tag) = (0, 0);
        let mut page = SmallVec::<[RecordRef; PAGE_ENTRIES]>::new();
        while partition < volume.partitions.len() {
            (partition, tag) = volume.read_page(partition, tag, &mut page, |entry| entry.record_ref());
            for record_ref in page.drain(..) {
                if record_ref.flags(volume.constants().format).contains(RecordFlags::VERSIONED)
                    && let Some(key) = self.forgettable_key(record_ref, version).await?
                {
                    self.forget(&key, version).await?;
                }
            }
        }
        Ok(())
    }

    fn is_forgettable(&self, meta: &RecordMeta, version: Version) -> bool {
        meta.version < version && !write_rules::is_live(meta, || self.volume.clock.now())
    }

    /// The key of a record, if the record is to be forgotten. A damaged one is left to `check` and to the next write of its key.
    async fn forgettable_key(
        &self,
        record_ref: RecordRef,
        version: Version,
    ) -> Result<Option<Key>, EngineError> {
        let _epoch_guard = self.enter_epoch();
        let bytes = self.prefix_bytes(record_ref, HEADER_AND_KEY_BYTES_MAX);
        let buffer = self.start_read(record_ref, bytes).ok_or(EngineError::NoMemory)?.await.into_read()?;
        let Ok((header, key)) = self.volume.record_header(&buffer, record_ref.location) else {
            return Ok(None);
        };
        let is_there = self.volume.is_record(record_ref, &header);
        Ok(Key::new(key).filter(|_| is_there && self.is_forgettable(&header.meta, version)))
    }

    /// Removes a key, if it is still to be forgotten.
    async fn forget(&self, key: &Key, version: Version) -> Result<(), EngineError> {
        let hash = self.volume.hash(key);
        let _key_guard = match self.volume.lock_key(hash) {
            Ok(guard) => guard,
            Err(waiter) => waiter.await,
        };
        let found = {
            let _epoch_guard = self.enter_epoch();
            let candidates = self.volume.candidates(hash);
            self.resolve_candidates(&candidates, key).await?
        };
        match found {
            Some((record_ref, meta)) if self.is_forgettable(&meta, version) => {
                self.remove(hash, record_ref).await
            }
            _ => Ok(()),
        }
    }
}
