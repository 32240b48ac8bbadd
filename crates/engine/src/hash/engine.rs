//! The changes that one core makes: put, delete and flush; and what reads and changes share.
//!
//! A put on a volatile device may be dropped at any await: what it holds are guards. On a durable volume a write has shared
//! its journal batch with others, so [`super::handle`] lets it run to its end.

use super::index::{Candidates, IndexEntry, RecordRef};
use super::journal::{IndexChange, WriteOutcome};
use super::unindexed_record::UnindexedRecord;
use super::volume::{HashVolume, SpaceFor};
use crate::bug_injection::{self, InjectedBug};
use crate::common::abandoned::AbandonedOperations;
use crate::common::allocator::Extent;
use crate::common::batch_parts::UnwrittenRecord;
use crate::common::epoch::{EpochGuard, EpochReaders};
use crate::common::group_commit::{commit, flush_deferred, flush_device, lock_last_space};
use crate::common::joined_value::join_value;
use crate::common::journal::JournalEntry;
use crate::common::record::{
    self, HEADER_AND_KEY_BYTES_MAX, HEADER_BYTES, RecordFlags, RecordHeader, RecordMeta, record_bytes,
};
use crate::common::write_rules::{self, KnownKey, Remains};
use crate::direct::FoundEntry;
use crate::{DeleteOutcome, EngineError, PutMode, PutOptions, PutOutcome, PutValue, VolumePlace};
use octokv_base::{Buffer, BufferPool, Key, Lba, Version};
use octokv_device::{Device, DeviceError, DeviceFuture};
use std::cell::Cell;
use std::future::ready;
use std::rc::Rc;
use std::sync::Arc;

/// Sequence numbers that a core reserves at once, on a volatile volume.
const SEQUENCES_RESERVED: u64 = 1024;

/// How often a put waits for the readers of one moment to leave: others may take the space that it then frees.
pub(super) const SPACE_WAITS_MAX: usize = 16;

/// One core's part of an open volume.
pub struct HashCore {
    pub(super) volume: Arc<HashVolume>,
    pub(super) device: Rc<dyn Device>,
    pub(super) pool: BufferPool,
    readers: EpochReaders,
    /// The bitmap partition from which this core allocates.
    pub(super) preferred_partition: Cell<usize>,
    /// Reserved sequence numbers: the next, and the end.
    sequences: Cell<(u64, u64)>,
    /// Operations whose callers dropped them.
    pub(super) abandoned: AbandonedOperations,
}

/// Whether a record on the device is a key's.
pub(super) enum KeyMatch {
    /// The key's record.
    Match(RecordHeader),
    /// Another key's record.
    OtherKey,
    /// Unknown: the record is damaged.
    Damaged,
}

/// A key's record, and what it says.
pub(super) type FoundRecord = (RecordRef, RecordMeta);

/// The record that a put replaces.
pub(super) enum Predecessor {
    /// The record was read, and its key matches.
    Verified(Option<FoundRecord>),
    /// The only record with the key's tag; its key was not compared yet. It has neither version nor expiry.
    Unverified(RecordRef),
}

/// A record to be written.
pub(super) struct RecordToWrite {
    /// Has the value, or the list of its pieces, from the value offset on.
    pub buffer: Buffer,
    pub value_bytes: usize,
    /// The bytes from the value offset on that count.
    pub stored_bytes: usize,
    pub meta: RecordMeta,
}

impl HashCore {
    /// The part of core `core`. REQUIRES: `device` is that core's view of the volume's device, and no other part of
    /// the volume has the same core.
    pub(super) fn new(
        volume: Arc<HashVolume>,
        core: usize,
        device: Rc<dyn Device>,
        pool: BufferPool,
    ) -> HashCore {
        let preferred_partition = Cell::new(volume.initial_space_partition(core));
        let abandoned = AbandonedOperations::new(volume.abandoned.clone());
        let (readers, sequences) = (EpochReaders::new(core), Cell::new((0, 0)));
        HashCore { volume, device, pool, readers, preferred_partition, sequences, abandoned }
    }

    /// A sequence number for a record. On a volatile volume, whose records need no order among cores, the core reserves many
    /// at once.
    pub(super) fn next_sequence(&self) -> u64 {
        if !self.volume.volatile {
            return self.volume.take_sequences(1);
        }
        let (mut next, mut end) = self.sequences.get();
        if next == end {
            next = self.volume.take_sequences(SEQUENCES_RESERVED);
            end = next + SEQUENCES_RESERVED;
        }
        self.sequences.set((next + 1, end));
        next
    }

    pub(super) fn lba(&self, location: u64) -> Lba {
        self.volume.lba(location)
    }

    pub(super) fn corrupt(&self, record_ref: RecordRef) -> EngineError {
        EngineError::Corrupt { lba: self.lba(record_ref.location).0, place: VolumePlace::default() }
    }

    /// Keeps the records that the index names from being replaced on the device, until the guard is dropped.
    pub(super) fn enter_epoch(&self) -> EpochGuard<'_> {
        self.readers.enter(&self.volume.epochs)
    }

    /// Retires space that this core's changes freed.
    pub(super) fn retire(&self, freed: &[Extent]) {
        self.volume.epochs.retire(self.readers.core(), freed);
    }

    /// Allocates space for the record of a key; `None` if the volume has none now.
    pub(super) fn allocate(&self, hash: u128, units: u64, purpose: SpaceFor) -> Option<Extent> {
        self.allocate_from(&self.preferred_partition, hash, units, purpose)
    }

    /// The same, with another preferred partition of the bitmap.
    #[inline]
    pub(super) fn allocate_from(
        &self,
        preferred_partition: &Cell<usize>,
        hash: u128,
        units: u64,
        purpose: SpaceFor,
    ) -> Option<Extent> {
        self.volume.allocate(self.readers.core(), hash, preferred_partition, units, purpose)
    }

    /// Reads a whole record. REQUIRES: the caller is in an epoch since it took the reference from the index.
    pub(super) async fn read_whole(&self, record_ref: RecordRef) -> Result<Buffer, EngineError> {
        let bytes = record_ref.units as usize * self.volume.unit_bytes();
        let buffer = self.pool.take(bytes).ok_or(EngineError::NoMemory)?;
        Ok(self.device.read(self.lba(record_ref.location), buffer).await.into_read()?)
    }

    /// Whether the record in `bytes`, or its prefix, is the one that the index names and the key's.
    #[inline]
    pub(super) fn match_key(&self, bytes: &[u8], record_ref: RecordRef, key: &Key) -> KeyMatch {
        let Ok((header, found_key)) = self.volume.record_header(bytes, record_ref.location) else {
            return KeyMatch::Damaged;
        };
        if !self.volume.is_record(record_ref, &header) {
            return KeyMatch::Damaged;
        }
        if found_key != key.as_bytes() && !bug_injection::is_injected(InjectedBug::SkipKeyCompare) {
            return KeyMatch::OtherKey;
        }
        KeyMatch::Match(header)
    }

    /// Bytes of the units that hold `prefix_bytes` of a record, or of all its units if they are fewer.
    #[inline]
    pub(super) fn prefix_bytes(&self, record_ref: RecordRef, prefix_bytes: usize) -> usize {
        let unit = self.volume.unit_bytes();
        prefix_bytes.next_multiple_of(unit).min(record_ref.units as usize * unit)
    }

    /// Starts to read so many bytes of a record. `None` if there is no buffer. REQUIRES: the caller is in an epoch since it
    /// took the reference from the index.
    pub(super) fn start_read(&self, record_ref: RecordRef, bytes: usize) -> Option<DeviceFuture> {
        let buffer = self.pool.take(bytes)?;
        Some(self.device.read(self.lba(record_ref.location), buffer))
    }

    /// Reads `prefix_bytes` of a record, or all of a shorter one, and compares its key.
    pub(super) async fn read_record(
        &self,
        record_ref: RecordRef,
        key: &Key,
        prefix_bytes: usize,
    ) -> Result<(KeyMatch, Buffer), EngineError> {
        let mut bytes = self.prefix_bytes(record_ref, prefix_bytes);
        loop {
            let read = self.start_read(record_ref, bytes).ok_or(EngineError::NoMemory)?;
            let buffer = read.await.into_read()?;
            let key_match = self.match_key(&buffer, record_ref, key);
            // Another key with the same tag may be longer than `key`.
            let longest = self.prefix_bytes(record_ref, HEADER_AND_KEY_BYTES_MAX);
            if !matches!(key_match, KeyMatch::Damaged) || bytes >= longest {
                return Ok((key_match, buffer));
            }
            bytes = longest;
        }
    }

    /// Finds the key's record among the candidates. A damaged record counts as the key's if no other matches: its tag
    /// matches, and a put or delete of the key is how a user removes it. What version it had is lost.
    pub(super) async fn resolve_candidates(
        &self,
        candidates: &Candidates,
        key: &Key,
    ) -> Result<Option<FoundRecord>, EngineError> {
        let mut damaged = None;
        for &record_ref in candidates {
            match self.read_record(record_ref, key, HEADER_BYTES + key.len()).await?.0 {
                KeyMatch::Match(header) => return Ok(Some((record_ref, header.meta))),
                KeyMatch::OtherKey => {}
                KeyMatch::Damaged => damaged = Some((record_ref, RecordMeta::PLAIN)),
            }
        }
        Ok(damaged)
    }

    /// Finds the record that a put replaces. An upsert takes the index's only candidate without reading it, since a tag
    /// collision is rare and is verified beside the write: but for a record that may have a version, which the put needs.
    pub(super) async fn find_predecessor(
        &self,
        mode: PutMode,
        hash: u128,
        key: &Key,
    ) -> Result<Predecessor, EngineError> {
        let (partition, tag) = self.volume.partition_and_tag(hash);
        match self.volume.find_entry(partition, tag) {
            FoundEntry::Missing => return Ok(Predecessor::Verified(None)),
            FoundEntry::One(words) if matches!(mode, PutMode::Upsert | PutMode::IfVersion(_)) => {
                let record_ref = IndexEntry::from_words(words).record_ref();
                if record_ref.flags(self.volume.constants().format) == RecordFlags::NONE {
                    return Ok(Predecessor::Unverified(record_ref));
                }
            }
            FoundEntry::One(_) | FoundEntry::Several | FoundEntry::Unknown => {}
        }
        let candidates = self.volume.candidates(hash);
        Ok(Predecessor::Verified(self.resolve_candidates(&candidates, key).await?))
    }

    /// Encodes the record in its buffer. Gives its sequence number.
    fn encode_record(&self, extent: Extent, key: &Key, record: RecordToWrite) -> (u64, UnwrittenRecord) {
        let RecordToWrite { mut buffer, value_bytes, stored_bytes, meta } = record;
        let sequence = self.next_sequence();
        let new = self.volume.new_record(
            sequence,
            extent.location,
            key.as_bytes(),
            (value_bytes, stored_bytes),
            meta,
        );
        buffer.set_len(extent.units as usize * self.volume.unit_bytes());
        match self.volume.volatile {
            true => record::encode_in_memory(&mut buffer, &new),
            false => record::encode(&mut buffer, &new),
        }
        (sequence, UnwrittenRecord { at: self.lba(extent.location), buffer })
    }

    /// Applies a change whose record is on a volatile device, which has no journal.
    fn apply_volatile(&self, entry: IndexChange, outcome: WriteOutcome) {
        let volume = &self.volume;
        self.retire(volume.apply(&entry.amended(outcome), 0).as_slice());
    }

    /// Writes a record and commits its index change. REQUIRES: the caller holds the key's lock.
    pub(super) async fn write_and_commit(
        &self,
        hash: u128,
        key: &Key,
        record: RecordToWrite,
        extent: Extent,
        predecessor: Predecessor,
    ) -> Result<(), EngineError> {
        let (old, unverified) = match predecessor {
            Predecessor::Verified(old) => (old.map(|(record_ref, _)| record_ref), None),
            Predecessor::Unverified(record_ref) => (Some(record_ref), Some(record_ref)),
        };
        if bug_injection::is_injected(InjectedBug::ReuseSpaceEarly)
            && let Some(RecordRef { location, units, .. }) = old
        {
            self.volume.space.release(Extent { location, units });
        }
        let flags = record.meta.flags;
        let (sequence, record) = self.encode_record(extent, key, record);
        let entry = IndexChange {
            hash,
            new_location: extent.location,
            old_location: old.map_or(0, |record_ref| record_ref.location),
            sequence,
            units: extent.units as u32,
            flags,
        };
        if self.volume.volatile {
            let write = self.device.write(record.at, record.buffer);
            let mut record = UnindexedRecord::new(&self.volume, &self.abandoned, extent, write);
            let outcome = self.compare_beside(&mut record, unverified, key).await?;
            self.apply_volatile(entry, outcome);
            record.keep();
            return Ok(());
        }
        let old_in_pieces = old.filter(|old| self.is_in_pieces(old));
        let old_pieces = match old_in_pieces {
            // Boxed because it is rare: it would enlarge every put's future.
            Some(old) => Box::pin(self.extents_of_pieces(old)).await,
            None => Vec::new(),
        };
        let mut comparison = self.compare_alone(unverified, key);
        match commit(self, entry, Some(record), &mut comparison).await? {
            Ok(()) => {
                self.free_pieces(old_in_pieces, &old_pieces);
                Ok(())
            }
            Err(error) => {
                self.volume.space.release(extent);
                Err(error)
            }
        }
    }

    /// Allocates units for a record after it failed once: a flush frees the space of records whose successors it makes
    /// durable, and readers that leave free what they might have read. With it come what a put has found before: its
    /// epoch, and the record that it replaces. `None` if the volume is full. REQUIRES: the caller has the key's lock and is
    /// in no epoch, which would hold that space back.
    async fn wait_for_space(
        &self,
        mode: PutMode,
        hash: u128,
        key: &Key,
        units: u64,
        purpose: SpaceFor,
    ) -> Result<Option<(EpochGuard<'_>, Predecessor, Extent)>, EngineError> {
        let steps = self.volume.compaction.steps();
        let mut compaction_guard = None;
        loop {
            flush_deferred(self).await?;
            for waits_left in (0..=SPACE_WAITS_MAX).rev() {
                let epoch_guard = self.enter_epoch();
                let predecessor = self.find_predecessor(mode, hash, key).await?;
                if let Some(extent) = self.allocate(hash, units, purpose) {
                    return Ok(Some((epoch_guard, predecessor, extent)));
                }
                drop(epoch_guard);
                if waits_left == 0 || !self.volume.epochs.has_retired() {
                    break;
                }
                self.volume.epochs.readers_left().await;
            }
            // A value may be stored in pieces instead, which takes less time than compaction may.
            if compaction_guard.is_some() || purpose == SpaceFor::Value {
                break;
            }
            match self.pause_compaction(steps).await {
                Some(guard) => compaction_guard = Some(guard),
                None => break,
            }
        }
        let Some(_preparation_guard) = self.pause_preparation().await else { return Ok(None) };
        let epoch_guard = self.enter_epoch();
        let predecessor = self.find_predecessor(mode, hash, key).await?;
        Ok(self.allocate(hash, units, purpose).map(|extent| (epoch_guard, predecessor, extent)))
    }

    /// [`Engine::put_with`](crate::Engine::put_with).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn put(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        let (mode, volume) = (options.mode, &self.volume);
        write_rules::check_options(volume.constants().format, &options)?;
        let value_bytes = value.bytes;
        if value_bytes > volume.value_bytes_max() {
            return Ok(PutOutcome::TooLong);
        }
        let Some(record) = join_value(&self.pool, volume.unit_bytes(), key, value)? else {
            return Ok(PutOutcome::TooLong);
        };
        if volume.commits.has_failed() {
            return Err(EngineError::ReadOnly);
        }
        let hash = volume.hash(key);
        let _key_guard = match volume.lock_key(hash) {
            Ok(guard) => guard,
            Err(waiter) => waiter.await,
        };
        let mut epoch_guard = self.enter_epoch();
        let mut predecessor = self.find_predecessor(mode, hash, key).await?;
        let known = match &predecessor {
            Predecessor::Verified(Some((_, meta))) => KnownKey::of(meta, || volume.clock.now()),
            // Whichever key has that record: this one has no version, and none of these modes asks whether it exists.
            Predecessor::Verified(None) | Predecessor::Unverified(_) => KnownKey::ABSENT,
        };
        let meta = match write_rules::decide_put(known, &options) {
            Ok(meta) => meta,
            Err(outcome) => return Ok(outcome),
        };
        let units = record_bytes(key.len(), value_bytes).div_ceil(volume.unit_bytes()) as u64;
        let needs_pieces = self.needs_pieces(units);
        let contiguous = match needs_pieces {
            true => None,
            false => self.allocate(hash, units, SpaceFor::Value),
        };
        let extent = match contiguous {
            Some(extent) => extent,
            None => {
                drop(epoch_guard);
                // Boxed because it is rare: it would enlarge every put's future.
                let waited = match needs_pieces {
                    true => None,
                    false => Box::pin(self.wait_for_space(mode, hash, key, units, SpaceFor::Value)).await?,
                };
                let Some((guard, found, extent)) = waited else {
                    if !self.stores_pieces() {
                        return Ok(PutOutcome::Full);
                    }
                    let offset = record::LAYOUT.value_offset(key.len());
                    let value = &record[offset..offset + value_bytes];
                    return Box::pin(self.put_in_pieces(hash, key, value, meta)).await;
                };
                (epoch_guard, predecessor) = (guard, found);
                extent
            }
        };
        let at = self.lba(extent.location);
        self.device.prefetch_write(at, self.lba(extent.location + units).0 - at.0);
        let record = RecordToWrite { buffer: record, value_bytes, stored_bytes: value_bytes, meta };
        let stored = self.write_and_commit(hash, key, record, extent, predecessor).await;
        drop(epoch_guard);
        stored.map(|()| PutOutcome::Stored)
    }

    /// [`Engine::delete_with`](crate::Engine::delete_with). On a volatile volume it has no await behind its lock but reads.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn delete(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        let volume = &self.volume;
        let options = PutOptions { version, ..PutOptions::default() };
        write_rules::check_options(volume.constants().format, &options)?;
        if volume.commits.has_failed() {
            return Err(EngineError::ReadOnly);
        }
        let hash = volume.hash(key);
        let _key_guard = match volume.lock_key(hash) {
            Ok(guard) => guard,
            Err(waiter) => waiter.await,
        };
        let found = {
            let _epoch_guard = self.readers.enter(&volume.epochs);
            let candidates = volume.candidates(hash);
            self.resolve_candidates(&candidates, key).await?
        };
        let known = found.map_or(KnownKey::ABSENT, |(_, meta)| KnownKey::of(&meta, || volume.clock.now()));
        let (remains, outcome) =
            match write_rules::decide_delete(known, found.as_ref().map(|(_, meta)| meta), version) {
                Ok(decided) => decided,
                Err(outcome) => return Ok(outcome),
            };
        match (remains, found) {
            (Remains::Unchanged, _) | (Remains::Nothing, None) => {}
            (Remains::Nothing, Some((old, _))) => self.remove(hash, old).await?,
            // Boxed because few deletes leave one.
            (Remains::Tombstone(meta), _) => Box::pin(self.put_tombstone(hash, key, meta, found)).await?,
        }
        Ok(outcome)
    }

    /// Removes a key's record from the index. REQUIRES: the caller holds the key's lock.
    pub(super) async fn remove(&self, hash: u128, old: RecordRef) -> Result<(), EngineError> {
        let entry = IndexChange {
            hash,
            new_location: 0,
            old_location: old.location,
            sequence: 0,
            units: 0,
            flags: RecordFlags::NONE,
        };
        if self.volume.volatile {
            self.apply_volatile(entry, WriteOutcome::Confirmed);
            return Ok(());
        }
        let old_in_pieces = Some(old).filter(|old| self.is_in_pieces(old));
        let old_pieces = match old_in_pieces {
            Some(old) => {
                let _epoch_guard = self.enter_epoch();
                Box::pin(self.extents_of_pieces(old)).await
            }
            None => Vec::new(),
        };
        commit(self, entry, None, &mut ready(Ok(WriteOutcome::Confirmed))).await??;
        self.free_pieces(old_in_pieces, &old_pieces);
        Ok(())
    }

    /// Writes a tombstone in place of a key's record. REQUIRES: the caller holds the key's lock.
    async fn put_tombstone(
        &self,
        hash: u128,
        key: &Key,
        meta: RecordMeta,
        found: Option<FoundRecord>,
    ) -> Result<(), EngineError> {
        let bytes = record_bytes(key.len(), 0);
        let units = bytes.div_ceil(self.volume.unit_bytes()) as u64;
        let buffer = self.pool.take(bytes).ok_or(EngineError::NoMemory)?;
        let record = RecordToWrite { buffer, value_bytes: 0, stored_bytes: 0, meta };
        // That of a key without a record frees no space: it must not take what the others need.
        let purpose = if found.is_some() { SpaceFor::Tombstone } else { SpaceFor::NewTombstone };
        let epoch_guard = self.enter_epoch();
        let mut last_space_guard = None;
        let (epoch_guard, predecessor, extent) = match self.allocate(hash, units, purpose) {
            Some(extent) => (epoch_guard, Predecessor::Verified(found), extent),
            None => {
                drop(epoch_guard);
                let purpose = match found {
                    Some(_) => {
                        last_space_guard = Some(lock_last_space(self).await);
                        SpaceFor::LastTombstone
                    }
                    None => SpaceFor::NewTombstone,
                };
                // A mode that makes sure that the predecessor is verified.
                let waited = self.wait_for_space(PutMode::UpdateOnly, hash, key, units, purpose).await?;
                waited.ok_or(EngineError::from(DeviceError::NoSpace))?
            }
        };
        let written = self.write_and_commit(hash, key, record, extent, predecessor).await;
        drop(epoch_guard);
        drop(last_space_guard);
        written
    }

    /// [`Engine::flush`](crate::Engine::flush).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn flush(&self) -> Result<(), EngineError> {
        flush_deferred(self).await?;
        flush_device(self).await
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
