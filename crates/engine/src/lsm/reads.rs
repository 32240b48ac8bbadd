//! Operations that change nothing: lookups, get and status; and the records of values.
//!
//! ```text
//!   key ─▶ memtables, newest first ─▶ level 0, newest first ─▶ one table of each level below ─▶ entry ─▶ value: inline, or a record of a segment
//! ```
//! In: keys. Out: what the newest entry of each says. Invariant: a reader takes the memtables before the version, and holds the version until it has read the
//! record, so that its segment is not given away meanwhile.

use super::core::LsmCore;
use super::entry::{EntryValue, TreeEntry, ValueAddress};
use super::level_cursor::place_of;
use super::table::reader::{SearchKey, TableReader};
use super::tree_version::TreeVersion;
use super::version_edit::LEVELS;
use crate::bug_injection::{self, InjectedBug};
use crate::common::record::{LAYOUT, RecordId, UncheckedRecord, record_bytes};
use crate::{EngineError, KeyStatus, StoredValue, ValueRange};
use octokv_base::{Buffer, DataBuffer, Key, SharedBuffer, UnixTime, Version};
use octokv_device::{DeviceError, DeviceFuture};
use std::ops::Range;
use std::sync::Arc;

/// The value of a key that was found.
#[derive(Debug)]
pub(super) enum FoundValue {
    /// The key was deleted.
    Tombstone,
    /// These bytes of a buffer.
    Inline(Buffer, usize),
    /// That of a record.
    InSegment(ValueAddress),
}

/// The newest entry of a key.
#[derive(Debug)]
pub(super) struct FoundInTree {
    pub sequence: u64,
    pub version: Version,
    pub expires_at: UnixTime,
    pub value: FoundValue,
    pub value_bytes: u32,
}

/// What a lookup copies of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LookupFor {
    /// Nothing: its length.
    Status,
    /// The value, if it is inline.
    Value,
}

impl LsmCore {
    /// The newest entry of a key with a sequence number up to `snapshot`, in `version` or in the memtables before it; `None` if there is none.
    ///
    /// # Errors
    /// [`EngineError::Corrupt`] if a newer one may be in a part that cannot be read, or was lost. Device failures, no memory.
    pub(super) async fn lookup(
        &self,
        key: &[u8],
        snapshot: u64,
        purpose: LookupFor,
    ) -> Result<Option<(Arc<TreeVersion>, FoundInTree)>, EngineError> {
        let memtables = self.volume.memtables.current();
        let version = self.volume.versions.current();
        let mut found = None;
        for placed in memtables.newest_first() {
            if let Some(entry) = placed.memtable.get(key, snapshot) {
                found = Some(self.copy_entry(&entry, purpose)?);
                break;
            }
        }
        drop(memtables);
        if found.is_none() {
            found = self.lookup_in_tables(&version, key, snapshot, purpose).await?;
        }
        let lost = version.lost().newest_lost(key);
        if lost.is_some_and(|lost| found.as_ref().is_none_or(|found| found.sequence <= lost)) {
            return Err(self.corrupt(self.volume.fixed().layout.data_start_unit));
        }
        Ok(found.map(|found| (version, found)))
    }

    async fn lookup_in_tables(
        &self,
        version: &TreeVersion,
        key: &[u8],
        snapshot: u64,
        purpose: LookupFor,
    ) -> Result<Option<FoundInTree>, EngineError> {
        let search = SearchKey::new(key);
        let level0 = version.level0().iter().filter(|table| table.overlaps(key, key));
        let below = (1..LEVELS).filter_map(|level| version.table_of(level, key));
        for table in level0.chain(below) {
            let reader = TableReader::new(self.io.clone(), place_of(table));
            if let Some(found) = reader.get(search, snapshot).await? {
                return self.copy_entry(&found.entry(key), purpose).map(Some);
            }
        }
        Ok(None)
    }

    fn copy_entry(&self, entry: &TreeEntry<'_>, purpose: LookupFor) -> Result<FoundInTree, EngineError> {
        let (value, value_bytes) = match entry.value {
            EntryValue::Tombstone => (FoundValue::Tombstone, 0),
            EntryValue::InSegment(address) => (FoundValue::InSegment(address), address.value_bytes),
            EntryValue::Inline(value) => {
                let copied = if purpose == LookupFor::Value { value } else { &[] };
                let mut buffer = self.pool.take(copied.len()).ok_or(EngineError::NoMemory)?;
                buffer[..copied.len()].copy_from_slice(copied);
                (FoundValue::Inline(buffer, copied.len()), value.len() as u32)
            }
        };
        Ok(FoundInTree {
            sequence: entry.sequence,
            version: entry.version,
            expires_at: entry.expires_at,
            value,
            value_bytes,
        })
    }

    /// Whether a found entry has a value that has not expired.
    pub(super) fn is_live(&self, found: &FoundInTree) -> bool {
        !matches!(found.value, FoundValue::Tombstone)
            && (found.expires_at == UnixTime::NEVER || self.volume.clock.now() < found.expires_at)
    }

    /// [`Engine::get_range`](crate::Engine::get_range).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn get(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        let mut missed = None;
        loop {
            let found = self.lookup(key.as_bytes(), u64::MAX, LookupFor::Value).await?;
            let Some((version, found)) = found.filter(|(_, found)| self.is_live(found)) else {
                return Ok(None);
            };
            let (buffer, value) = match found.value {
                FoundValue::Tombstone => return Ok(None),
                FoundValue::Inline(buffer, bytes) => (DataBuffer::Owned(buffer), 0..bytes),
                FoundValue::InSegment(address) => {
                    match self.value_of(&version, key.as_bytes(), address).await? {
                        Some(read) => read,
                        // The memtable that had the entry was flushed, and the entry replaced, before the version was taken.
                        None if missed.replace(found.sequence) != Some(found.sequence) => continue,
                        // No such segment was ever there.
                        None => return Err(self.corrupt(self.volume.fixed().layout.data_start_unit)),
                    }
                }
            };
            let requested = range.within(value.len() as u32);
            return Ok(Some(StoredValue {
                buffer,
                offset: value.start as u32 + requested.start,
                bytes: requested.end - requested.start,
                value_bytes: value.len() as u32,
                version: found.version,
                expires_at: found.expires_at,
            }));
        }
    }

    /// [`Engine::status`](crate::Engine::status).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        let found = self.lookup(key.as_bytes(), u64::MAX, LookupFor::Status).await?;
        Ok(found.filter(|(_, found)| self.is_live(found)).map(|(_, found)| KeyStatus {
            value_bytes: found.value_bytes as usize,
            version: found.version,
            expires_at: found.expires_at,
        }))
    }

    /// The units of a value's record within its segment of a version; `None` if the version has no such segment.
    ///
    /// # Errors
    /// [`EngineError::Corrupt`] if the record would not lie in it.
    pub(super) fn record_units(
        &self,
        version: &TreeVersion,
        key: &[u8],
        address: ValueAddress,
    ) -> Result<Option<Range<u64>>, EngineError> {
        let Some(segment) = version.segment(address.segment) else { return Ok(None) };
        let extent = segment.extent();
        let units = record_bytes(key.len(), address.value_bytes as usize).div_ceil(self.volume.unit_bytes());
        let (start, units) = (u64::from(address.unit), units as u64);
        if start + units > extent.units {
            return Err(self.corrupt(extent.location));
        }
        Ok(Some(extent.location + start..extent.location + start + units))
    }

    /// Starts to read these units.
    ///
    /// # Errors
    /// [`EngineError::NoMemory`].
    pub(super) fn start_read(&self, units: &Range<u64>) -> Result<DeviceFuture, EngineError> {
        self.start_read_at(units.start, (units.end - units.start) as usize * self.volume.unit_bytes())
    }

    /// Starts to read so many bytes, whole blocks, from a unit on.
    fn start_read_at(&self, unit: u64, bytes: usize) -> Result<DeviceFuture, EngineError> {
        let buffer = self.pool.take(bytes).ok_or(EngineError::NoMemory)?;
        Ok(self.device.read(self.volume.lba(unit), buffer))
    }

    /// The range of the value in the bytes of its record, if that is the one.
    ///
    /// # Errors
    /// [`EngineError::Corrupt`].
    pub(super) fn check_record(
        &self,
        bytes: &[u8],
        location: u64,
        key: &[u8],
        address: ValueAddress,
    ) -> Result<Range<usize>, EngineError> {
        let checked = || {
            let (header, found_key) = UncheckedRecord { bytes, location }.header().ok()?;
            let is_it = header.identity == self.record_id(address, location) && found_key == key;
            let is_skipped = bug_injection::is_injected(InjectedBug::SkipKeyCompare);
            let value = header.value_range(bytes).ok()?;
            ((is_it || is_skipped) && value.len() == address.value_bytes as usize).then_some(value)
        };
        checked().ok_or_else(|| self.corrupt(location))
    }

    /// The value of a record, from the cache or the device; `None` if the version has no such segment.
    ///
    /// # Errors
    /// As for [`Engine::get_range`](crate::Engine::get_range).
    async fn value_of(
        &self,
        version: &TreeVersion,
        key: &[u8],
        address: ValueAddress,
    ) -> Result<Option<(DataBuffer, Range<usize>)>, EngineError> {
        let Some(units) = self.record_units(version, key, address)? else { return Ok(None) };
        if let Some((record, value)) = self.cached_value(units.start, key, address) {
            return Ok(Some((record.into(), value)));
        }
        let (buffer, value) = self.read_record_value(units, key, address).await?;
        self.io.cache.insert_record(address, &buffer[..value.end]);
        Ok(Some((buffer.into(), value)))
    }

    /// The record of a value in the cache, and the range of the value in it. `location`: its first unit.
    pub(super) fn cached_value(
        &self,
        location: u64,
        key: &[u8],
        address: ValueAddress,
    ) -> Option<(SharedBuffer, Range<usize>)> {
        let record = self.io.cached_record(address)?;
        let value = self.value_in_verified(&record, location, key, address)?;
        Some((record, value))
    }

    /// The range of the value in the bytes of its record, if that is the one. REQUIRES: the checksum of the value was verified.
    fn value_in_verified(
        &self,
        bytes: &[u8],
        location: u64,
        key: &[u8],
        address: ValueAddress,
    ) -> Option<Range<usize>> {
        let (header, found_key) = UncheckedRecord { bytes, location }.header().ok()?;
        let value = header.value_offset()..header.value_offset() + address.value_bytes as usize;
        let is_it = header.identity == self.record_id(address, location) && found_key == key;
        (is_it && value.end == bytes.len()).then_some(value)
    }

    /// Reads the value of a record; `None` if the version has no such segment.
    ///
    /// # Errors
    /// As for [`Engine::get_range`](crate::Engine::get_range).
    pub(super) async fn read_value(
        &self,
        version: &TreeVersion,
        key: &[u8],
        address: ValueAddress,
    ) -> Result<Option<(Buffer, Range<usize>)>, EngineError> {
        let Some(units) = self.record_units(version, key, address)? else { return Ok(None) };
        self.read_record_value(units, key, address).await.map(Some)
    }

    async fn read_record_value(
        &self,
        units: Range<u64>,
        key: &[u8],
        address: ValueAddress,
    ) -> Result<(Buffer, Range<usize>), EngineError> {
        // The rest of its last unit is nothing: of a value of 16 KiB in units of 4 KiB a fifth less is read.
        let block_bytes = self.device.geometry().block_bytes as usize;
        let bytes = record_bytes(key.len(), address.value_bytes as usize).next_multiple_of(block_bytes);
        let buffer = self.start_read_at(units.start, bytes)?.await.into_read();
        let is_verified = self.io.unreadable.is_some();
        let buffer = buffer.map_err(|error: DeviceError| match error {
            error if is_verified && self.io.is_lost(self.volume.lba(units.start), error) => {
                self.corrupt(units.start)
            }
            error => self.io.failed(error),
        })?;
        let value = self.check_record(&buffer, units.start, key, address)?;
        Ok((buffer, value))
    }

    /// The identity of the record of a value: no other record of the volume has or had it, since numbers of segments are not used again.
    pub(super) fn record_id(&self, address: ValueAddress, location: u64) -> RecordId {
        let sequence = u64::from(address.segment) << 32 | u64::from(address.unit);
        RecordId { volume_id: self.volume.fixed().volume_id, sequence, location }
    }

    /// Where the buffer of a record of a key has the value.
    pub(super) fn value_offset(key: &[u8]) -> usize {
        LAYOUT.value_offset(key.len())
    }
}
