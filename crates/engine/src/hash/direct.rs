//! Operations that end at once ([`crate::direct`]), on volatile volumes in memory.
//!
//! A reader needs no epoch: it reads a record in place, while nothing writes those bytes, and compares identity and
//! key in the header, so that space which was given to another record is noticed. Its units may be given to several records,
//! and the first be written last, so of a longer record than one unit the reader also finds, while it holds those bytes, that the
//! index still names it. A record is written in one access, without checksums. A writer takes no key lock: it changes the
//! index under the lock of the key's partition, if no writer of the key is under way and the entry is the one that it
//! verified. A writer with a key lock reads the index after it has the lock; it either sees this change, or is seen here.

use super::engine::HashCore;
use super::index::{IndexEntry, RecordRef, fingerprint};
use super::journal::IndexChange;
use super::volume::SpaceFor;
use crate::bug_injection::{self, InjectedBug};
use crate::common::allocator::Extent;
use crate::common::record::{
    self, HEADER_BYTES, PlainRecord, RecordFlags, RecordFormat, RecordMeta, record_bytes,
};
use crate::direct::{FoundEntry, FoundNow, KeyLookup, LookupStage};
use crate::{DeleteOutcome, PutMode, PutOutcome};
use octokv_base::{DataRef, Received};

/// A key's record as an operation without waiting finds it.
enum OwnRecord {
    /// There is none.
    Missing,
    /// This one, whose header was verified, and the length of its value in bytes.
    Verified(RecordRef, usize),
}

impl HashCore {
    /// Whether operations on this volume need not wait for a device or another core.
    #[inline]
    pub(super) fn may_end_at_once(&self) -> bool {
        self.volume.volatile && !self.volume.has_owner_cores()
    }

    /// Begins the lookup of a key; `None` if operations on this volume wait for a device.
    #[inline]
    pub(super) fn begin_lookup(&self, key: &[u8]) -> Option<KeyLookup> {
        if !self.may_end_at_once() {
            return None;
        }
        let hash = self.volume.hash_bytes(key);
        let (partition, tag) = self.volume.partition_and_tag(hash);
        self.volume.prefetch_partition(partition);
        Some(KeyLookup { hash, partition: partition as u32, tag, found: FoundEntry::Unknown })
    }

    #[inline]
    pub(super) fn advance_lookup(&self, lookup: &mut KeyLookup, stage: LookupStage) {
        match stage {
            LookupStage::Entry => self.volume.prefetch_entry(lookup.partition as usize, lookup.tag),
            LookupStage::Record => {
                lookup.found = self.volume.find_entry(lookup.partition as usize, lookup.tag);
                if let FoundEntry::One(words) = lookup.found {
                    let location = IndexEntry::from_words(words).record_ref().location;
                    self.device.prefetch_read(self.volume.lba(location), 1);
                }
            }
        }
    }

    /// The index's entry for a key. Of a record with a version or an expiry time nothing is known here.
    #[inline]
    fn found(&self, lookup: &KeyLookup) -> FoundEntry {
        let found = match lookup.found {
            FoundEntry::Unknown => self.volume.find_entry(lookup.partition as usize, lookup.tag),
            found => found,
        };
        match found {
            FoundEntry::One(words) if self.volume.has_flags(words) => FoundEntry::Unknown,
            found => found,
        }
    }

    /// The record in `bytes`, if that is the one the index names and the key's.
    #[inline]
    fn own_plain<'a>(&self, bytes: &'a [u8], record_ref: RecordRef, key: &[u8]) -> Option<PlainRecord<'a>> {
        let record = record::plain_in_memory(bytes)?;
        let fingerprint = fingerprint(RecordFormat::V2, record.sequence, RecordFlags::NONE);
        let is_own = record.volume_id == self.volume.constants().volume_id
            && fingerprint == record_ref.fingerprint
            && record.key == key;
        (is_own || bug_injection::is_injected(InjectedBug::SkipIdentityInPlace)).then_some(record)
    }

    /// The key's record; `None` if that is not certain.
    fn own_record(&self, key: &[u8], lookup: &KeyLookup) -> Option<OwnRecord> {
        let record_ref = match self.found(lookup) {
            FoundEntry::Missing => return Some(OwnRecord::Missing),
            FoundEntry::One(words) => IndexEntry::from_words(words).record_ref(),
            FoundEntry::Unknown | FoundEntry::Several => return None,
        };
        let unit = self.volume.unit_bytes();
        let bytes = (HEADER_BYTES + key.len()).next_multiple_of(unit).min(record_ref.units as usize * unit);
        let record = self.device.read_in_place(self.volume.lba(record_ref.location), bytes)?;
        let own = self.own_plain(&record, record_ref, key)?;
        Some(OwnRecord::Verified(record_ref, own.value_bytes))
    }

    /// [`Engine::get_now`](crate::Engine::get_now).
    #[inline]
    pub(super) fn get_now(
        &self,
        key: &[u8],
        lookup: &KeyLookup,
        mut receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<FoundNow> {
        let record_ref = match self.found(lookup) {
            FoundEntry::Missing => return Some(FoundNow::Missing),
            FoundEntry::One(words) => IndexEntry::from_words(words).record_ref(),
            FoundEntry::Unknown | FoundEntry::Several => return None,
        };
        let bytes = record_ref.units as usize * self.volume.unit_bytes();
        let record = self.device.read_in_place(self.volume.lba(record_ref.location), bytes)?;
        let own = self.own_plain(&record, record_ref, key)?;
        if record_ref.units > 1 && !self.volume.is_current(lookup.partition as usize, lookup.tag, record_ref)
        {
            return None;
        }
        let value = own.value_range(record.len())?;
        match receive(DataRef::Borrowed(&record[value.clone()])) {
            Received::Refused => None,
            Received::Taken => Some(FoundNow::Taken),
            Received::Lent(bytes) => Some(FoundNow::Lent(record.hold(value.start..value.start + bytes))),
        }
    }

    /// [`Engine::exist_now`](crate::Engine::exist_now).
    pub(super) fn exist_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<Option<usize>> {
        Some(match self.own_record(key, lookup)? {
            OwnRecord::Missing => None,
            OwnRecord::Verified(_, value_bytes) => Some(value_bytes),
        })
    }

    /// [`Engine::put_now`](crate::Engine::put_now).
    #[inline]
    pub(super) fn put_now(
        &self,
        key: &[u8],
        lookup: &KeyLookup,
        mode: PutMode,
        value: &[u8],
    ) -> Option<PutOutcome> {
        let volume = &self.volume;
        if value.len() > volume.value_bytes_max() {
            return None;
        }
        let old = match (self.own_record(key, lookup)?, mode) {
            (OwnRecord::Missing, PutMode::Upsert | PutMode::AddOnly) => None,
            (OwnRecord::Missing, PutMode::UpdateOnly) => return Some(PutOutcome::NotFound),
            (OwnRecord::Verified(..), PutMode::AddOnly) => return Some(PutOutcome::Exists),
            (OwnRecord::Verified(old, _), PutMode::Upsert | PutMode::UpdateOnly) => Some(old),
            (_, PutMode::IfVersion(_)) => return None,
        };
        let units = record_bytes(key.len(), value.len()).div_ceil(volume.unit_bytes()) as u64;
        let extent = self.allocate(lookup.hash, units, SpaceFor::Value)?;
        let sequence = self.next_sequence();
        let new =
            volume.new_record(sequence, extent.location, key, (value.len(), value.len()), RecordMeta::PLAIN);
        let bytes = units as usize * volume.unit_bytes();
        let is_written = self.device.write_in_place(volume.lba(extent.location), bytes, &mut |record| {
            let offset = record::LAYOUT.value_offset(key.len());
            record[offset..offset + value.len()].copy_from_slice(value);
            record::encode_in_memory(record, &new);
        });
        let change = IndexChange {
            hash: lookup.hash,
            new_location: extent.location,
            old_location: old.map_or(0, |old| old.location),
            sequence,
            units: extent.units as u32,
            flags: RecordFlags::NONE,
        };
        self.apply_now(is_written, change, old, Some(extent)).then_some(PutOutcome::Stored)
    }

    /// [`Engine::delete_now`](crate::Engine::delete_now).
    pub(super) fn delete_now(&self, key: &[u8], lookup: &KeyLookup) -> Option<DeleteOutcome> {
        let OwnRecord::Verified(old, _) = self.own_record(key, lookup)? else {
            return Some(DeleteOutcome::NotFound);
        };
        let change = IndexChange {
            hash: lookup.hash,
            new_location: 0,
            old_location: old.location,
            sequence: 0,
            units: 0,
            flags: RecordFlags::NONE,
        };
        self.apply_now(true, change, Some(old), None).then_some(DeleteOutcome::Deleted)
    }

    /// Applies a change whose record is written, if it still may; otherwise gives the record's space back.
    fn apply_now(
        &self,
        is_written: bool,
        change: IndexChange,
        old: Option<RecordRef>,
        new: Option<Extent>,
    ) -> bool {
        let applied = if is_written { self.volume.apply_if_current(&change, old) } else { None };
        match applied {
            Some(Some(freed)) if bug_injection::is_injected(InjectedBug::FreeUnderReaders) => {
                self.volume.space.release(freed);
                true
            }
            Some(freed) => {
                self.retire(freed.as_slice());
                true
            }
            None => {
                if let Some(extent) = new {
                    self.volume.space.release(extent);
                }
                false
            }
        }
    }
}
