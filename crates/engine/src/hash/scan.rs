//! A scan of a ring range: every key with the digest of its value, in ring order.
//!
//! In: the range. Out: entries for the sink. The index is in the order of the top bits of key hashes; a page holds all
//! entries that share those bits, and is sorted by the whole position before it is offered. Records are read one after the
//! other, whole, since the digest covers the value. Tested by `tests/hash_contract.rs`.

use super::engine::HashCore;
use super::index::RecordRef;
use crate::HashKind;
use crate::common::record::{RecordFormat, RecordMeta};
use crate::common::write_rules;
use crate::{Capability, EngineError, ScanEntry, ScanSink, ValueRange, value_digest};
use octokv_base::{Key, RingPosition, RingRange, Version};
use smallvec::SmallVec;

/// Entries of the index that are taken at once.
const SCAN_PAGE_KEYS: usize = 16;

impl HashCore {
    /// Scans a range.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::Unsupported`] for a volume whose keys are hashed by SHA-1.
    pub(super) async fn scan_range(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        let volume = &self.volume;
        if volume.constants().hash != HashKind::Xxh3 {
            return Err(EngineError::Unsupported(Capability::RingOrder));
        }
        if since > Version::NONE && volume.constants().format == RecordFormat::V1 {
            return Ok(());
        }
        let mut at = volume.partition_and_tag(range.first().0);
        let end = volume.partition_and_tag(range.last().0);
        let mut page = SmallVec::<[RecordRef; SCAN_PAGE_KEYS]>::new();
        while at.0 < volume.partitions.len() && at <= end {
            let _epoch_guard = self.enter_epoch();
            let next = volume.read_page(at.0, at.1, &mut page, |entry| entry.record_ref());
            let mut entries: Vec<(RingPosition, Key, RecordMeta, Option<u64>)> = Vec::new();
            for record_ref in page.drain(..) {
                let buffer = self.read_whole(record_ref).await?;
                let Ok((header, key)) = volume.record_header(&buffer, record_ref.location) else { continue };
                let Some(key) = Key::new(key) else { continue };
                let position = RingPosition::of(&key, volume.constants().hash_seed);
                if !volume.is_record(record_ref, &header) || !range.contains(position) {
                    continue;
                }
                let meta = header.meta;
                let is_live = write_rules::is_live(&meta, || volume.clock.now());
                if meta.version < since || (!is_live && meta.version == Version::NONE) {
                    continue;
                }
                let digest = match is_live {
                    true if self.is_in_pieces(&record_ref) => {
                        let value = self.read_pieces(&header, &buffer, ValueRange::ALL).await;
                        match value {
                            Ok(value) => Some(value_digest(&value, meta.expires_at)),
                            Err(EngineError::Corrupt { .. }) => continue,
                            Err(error) => return Err(error),
                        }
                    }
                    true => match volume.value_range(&header, &buffer) {
                        Ok(value) => Some(value_digest(&buffer[value], meta.expires_at)),
                        Err(_) => continue,
                    },
                    false => None,
                };
                entries.push((position, key, meta, digest));
            }
            entries.sort_by_key(|(position, ..)| *position);
            for (position, key, meta, digest) in &entries {
                let entry = ScanEntry {
                    position: *position,
                    key: key.as_bytes(),
                    version: meta.version,
                    is_tombstone: digest.is_none(),
                    digest: digest.unwrap_or(0),
                };
                if !sink.offer(&entry) {
                    return Ok(());
                }
            }
            at = next;
        }
        Ok(())
    }
}
