//! Operations that change nothing: get and status.
//!
//! ```text
//!   key ─▶ store, prefix ─▶ image of its segment (one access) ─▶ entry by whole key ─▶ record of its value (one more)
//! ```
//! In: keys. Out: what the entry of each says. Invariants: the outcome is that of the moment in which the segment's image was looked up; a
//! key that is not in an image of which entries were lost fails, since it may have had one of those.
//! Tested in `tests/log_conformance.rs` and `tests/log_power_loss.rs`.

use super::core::LogCore;
use super::hash_prefix::HashPrefix;
use super::record_reads::RecordRead;
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::segment_reads::{FoundImage, ReadRepeats};
use super::store::Store;
use crate::common::write_rules::is_live;
use crate::{EngineError, KeyStatus, StoredValue, ValueRange};
use octokv_base::{Buffer, DataBuffer, Key};
use std::ops::Range;

/// A damaged record is read so many times before it counts as damaged.
const RECORD_READS_MAX: u32 = 2;

/// A value that was read: the buffer, and its bytes in it.
pub(super) type ReadValue = (Buffer, Range<usize>);

impl LogCore {
    /// Whether an entry has a value that has not expired.
    pub(super) fn is_live(&self, entry: &SegmentEntry<'_>) -> bool {
        is_live(&entry.meta, || self.volume.clock.now())
    }

    /// The entry of a key in an image; `None` if it has none, or one without a value that counts.
    ///
    /// # Errors
    /// [`EngineError::Corrupt`] if entries of the segment were lost.
    fn live_entry<'i>(
        &self,
        store: &Store,
        image: &'i FoundImage,
        key: &[u8],
    ) -> Result<Option<SegmentEntry<'i>>, EngineError> {
        match image.entries.find(key) {
            Some(entry) => Ok(Some(entry).filter(|entry| self.is_live(entry))),
            None if image.entries.is_lost() => Err(self.corrupt(image.unit, store.id)),
            None => Ok(None),
        }
    }

    /// The value of an entry of an image, or a part of it; `None` if the lookup has to be repeated.
    ///
    /// # Errors
    /// Device failures, no memory, and [`EngineError::Corrupt`].
    pub(super) async fn read_value(
        &self,
        store: &Store,
        entry: &SegmentEntry<'_>,
        image: &FoundImage,
        range: ValueRange,
        repeats: &mut ReadRepeats,
    ) -> Result<Option<ReadValue>, EngineError> {
        match &entry.contents {
            EntryContents::Value { at: ValuePlace::Nowhere, .. } => {
                let buffer = self.pool.take(0).ok_or(EngineError::NoMemory)?;
                return Ok(Some((buffer, 0..0)));
            }
            EntryContents::Value { .. } => {}
            EntryContents::Tombstone | EntryContents::LostValue { .. } => {
                return Err(self.corrupt(image.unit, store.id));
            }
        }
        let (mut reads, wanted) = (0, range.within(entry.contents.value_bytes()));
        loop {
            match self.read_record_part(store, entry, wanted.clone(), image.opens).await? {
                RecordRead::Value(buffer, value) => return Ok(Some((buffer, value))),
                RecordRead::Reused => return Ok(None),
                RecordRead::Unowned(unit) if !repeats.is_unowned_again(unit) => return Ok(None),
                RecordRead::Unowned(unit) => return Err(self.corrupt(unit, store.id)),
                RecordRead::Damaged(unit) => {
                    reads += 1;
                    if reads >= RECORD_READS_MAX {
                        return Err(self.corrupt(unit, store.id));
                    }
                }
            }
        }
    }

    /// [`Engine::get_range`](crate::Engine::get_range).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn get(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        let (store, prefix) = self.volume.place_of_key(key);
        let mut repeats = ReadRepeats::default();
        loop {
            let Some(image) = self.find_image(store, prefix, &mut repeats).await?.image else {
                return Ok(None);
            };
            let Some(entry) = self.live_entry(store, &image, key.as_bytes())? else { return Ok(None) };
            let read = self.read_value(store, &entry, &image, range, &mut repeats).await?;
            let Some((buffer, value)) = read else {
                repeats.repeat(self).await;
                continue;
            };
            return Ok(Some(StoredValue {
                buffer: DataBuffer::Owned(buffer),
                offset: value.start as u32,
                bytes: value.len() as u32,
                value_bytes: entry.contents.value_bytes(),
                version: entry.meta.version,
                expires_at: entry.meta.expires_at,
            }));
        }
    }

    /// [`Engine::status`](crate::Engine::status).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        let (store, prefix) = self.volume.place_of_key(key);
        let lookup = self.find_image(store, prefix, &mut ReadRepeats::default()).await?;
        let Some(image) = lookup.image else { return Ok(None) };
        let entry = self.live_entry(store, &image, key.as_bytes())?;
        Ok(entry.map(|entry| KeyStatus {
            value_bytes: entry.contents.value_bytes() as usize,
            version: entry.meta.version,
            expires_at: entry.meta.expires_at,
        }))
    }

    /// The prefix of a key that an image or a record of a store has. Only damage under a valid checksum leaves a key of another store there: it
    /// gets the nearest prefix, under which no lookup finds it.
    pub(super) fn prefix_in(&self, store: &Store, key: &[u8]) -> HashPrefix {
        let position = self.volume.position_of(key);
        store.prefix_of(position.clamp(store.range.first(), store.range.last()))
    }
}
