//! The changes that one core makes: put and delete.
//!
//! ```text
//!   put   [its turn] ─▶ room in the journal ─▶ lock key ─▶ what is known of it ─▶ [space in the open segment] ─▶ journal batch, record beside it ─▶ memtable ─▶ reply
//! ```
//! A put without a condition, on a volume where no write had a version, looks nothing up. Writes have shared their journal batch with others, so [`super::handle`]
//! lets them run to their ends.

use super::core::LsmCore;
use super::entry::{EntryValue, TreeEntry, ValueAddress};
use super::journal::JournalChange;
use super::journal_room::JournalPass;
use super::maintenance::is_no_space;
use super::reads::{FoundInTree, FoundValue, LookupFor};
use super::value_segments::RecordSpace;
use crate::common::batch_parts::UnwrittenRecord;
use crate::common::group_commit::{commit, flush_deferred, flush_device};
use crate::common::joined_value::join_value;
use crate::common::journal::JournalEntry;
use crate::common::record::{self, NewRecord, RecordFlags, RecordFormat, RecordMeta, record_bytes};
use crate::common::write_rules::{self, KnownKey, Remains};
use crate::{DeleteOutcome, EngineError, PutMode, PutOptions, PutOutcome, PutValue};
use octokv_base::{Buffer, Key, UnixTime, Version};
use std::future::ready;

/// What is known of a key before a write.
struct KnownEntry {
    /// What a record would say; `None` if the key has nothing that counts.
    meta: Option<RecordMeta>,
    exists: bool,
}

impl LsmCore {
    /// What the newest entry of a key says. A key whose entries cannot be read counts as one with a value and without a version: a write is how a user gets rid of
    /// it.
    async fn known_key(&self, key: &Key) -> Result<KnownEntry, EngineError> {
        let found = match self.lookup(key.as_bytes(), u64::MAX, LookupFor::Status).await {
            Ok(found) => found,
            Err(EngineError::Corrupt { .. }) => {
                return Ok(KnownEntry { meta: Some(RecordMeta::PLAIN), exists: true });
            }
            Err(error) => return Err(error),
        };
        let Some((_, found)) = found else { return Ok(KnownEntry { meta: None, exists: false }) };
        let exists = self.is_live(&found);
        if !exists && self.volume.forgotten.lock().has_no_version(&entry_of(key, &found)) {
            return Ok(KnownEntry { meta: None, exists });
        }
        let is_plain = found.version == Version::NONE && found.expires_at == UnixTime::NEVER;
        let flags = match found.value {
            FoundValue::Tombstone => RecordFlags::VERSIONED.with(RecordFlags::TOMBSTONE),
            _ if is_plain => RecordFlags::NONE,
            _ => RecordFlags::VERSIONED,
        };
        let meta = RecordMeta { version: found.version, expires_at: found.expires_at, flags };
        Ok(KnownEntry { meta: Some(meta), exists })
    }

    /// A pass for a change of so many bytes, after room was made for it.
    async fn enter_journal(&self, change_bytes: usize) -> Result<JournalPass<'_>, EngineError> {
        let volume = &self.volume;
        loop {
            if volume.commits.has_failed() {
                return Err(EngineError::ReadOnly);
            }
            if volume.memtables.current().full.len() < volume.settings.memtables_max
                && let Some(pass) =
                    volume.journal_room.try_enter(change_bytes, || volume.commits.used_units())
            {
                return Ok(pass);
            }
            // Boxed because it is rare: it would enlarge every put's future.
            Box::pin(self.counted_wait(self.make_journal_room(change_bytes))).await?;
        }
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
        let volume = &self.volume;
        write_rules::check_options(RecordFormat::V2, &options)?;
        let value_bytes = value.bytes;
        if value_bytes > volume.value_bytes_max() {
            return Ok(PutOutcome::TooLong);
        }
        if volume.throttle.is_limited() {
            // Boxed because it is rare: it would enlarge every put's future.
            Box::pin(self.wait_for_turn((key.len() + value_bytes) as u64)).await?;
        }
        let Some(record) = join_value(&self.pool, volume.unit_bytes(), key, value)? else {
            return Ok(PutOutcome::TooLong);
        };
        let is_inline = value_bytes < volume.fixed().inline_bytes_max as usize;
        let value_at =
            LsmCore::value_offset(key.as_bytes())..LsmCore::value_offset(key.as_bytes()) + value_bytes;
        let entry = |version, value| TreeEntry {
            key: key.as_bytes(),
            sequence: 1,
            version,
            expires_at: options.expires_at,
            value,
        };
        // With any version: its length does not depend on which.
        let address = ValueAddress { segment: u32::MAX, unit: u32::MAX, value_bytes: value_bytes as u32 };
        let longest = match is_inline {
            true => EntryValue::Inline(&record[value_at.clone()]),
            false => EntryValue::InSegment(address),
        };
        let longest_bytes =
            JournalChange::entry(&entry(Version::from_bits(u64::MAX), longest)).encoded_bytes();
        let pass = match self.enter_journal(longest_bytes).await {
            // Nothing can be flushed.
            Err(error) if is_no_space(&error) => return Ok(PutOutcome::Full),
            entered => entered?,
        };
        let _key_guard = match volume.lock_key(key) {
            Ok(guard) => guard,
            Err(waiter) => waiter.await,
        };
        if options.version > Version::NONE {
            volume.note_version();
        }
        let known = match options.mode {
            PutMode::Upsert if !volume.has_versions() => KnownEntry { meta: None, exists: false },
            _ => self.known_key(key).await?,
        };
        let known =
            KnownKey { version: known.meta.map_or(Version::NONE, |meta| meta.version), exists: known.exists };
        let meta = match write_rules::decide_put(known, &options) {
            Ok(meta) => meta,
            Err(outcome) => return Ok(outcome),
        };
        let stored = if is_inline {
            if !self.has_space().await? {
                return Ok(PutOutcome::Full);
            }
            let change = JournalChange::entry(&entry(meta.version, EntryValue::Inline(&record[value_at])));
            drop(record);
            commit(self, change, None, &mut ready(Ok(()))).await?
        } else {
            let units = record_bytes(key.len(), value_bytes).div_ceil(volume.unit_bytes()) as u64;
            let Some(space) = self.record_space(units, value_bytes as u32).await? else {
                return Ok(PutOutcome::Full);
            };
            let change = JournalChange::entry(&entry(meta.version, EntryValue::InSegment(space.address)));
            let record = self.encode_record(record, key, &space, meta);
            let stored = commit(self, change, Some(record), &mut ready(Ok(()))).await?;
            if stored.is_ok() {
                space.committed(key.len(), volume.memtables.last_number());
            }
            stored
        };
        drop(pass);
        stored.map(|()| PutOutcome::Stored)
    }

    /// Encodes the record of a value in its buffer.
    fn encode_record(
        &self,
        mut buffer: Buffer,
        key: &Key,
        space: &RecordSpace<'_>,
        meta: RecordMeta,
    ) -> UnwrittenRecord {
        buffer.set_len(space.extent.units as usize * self.volume.unit_bytes());
        let value_bytes = space.address.value_bytes as usize;
        let new = NewRecord {
            format: RecordFormat::V2,
            identity: self.record_id(space.address, space.extent.location),
            namespace: self.volume.fixed().namespace,
            key: key.as_bytes(),
            value_bytes,
            stored_bytes: value_bytes,
            meta,
        };
        record::encode(&mut buffer, &new);
        UnwrittenRecord { at: self.volume.lba(space.extent.location), buffer }
    }

    /// [`Engine::delete_with`](crate::Engine::delete_with).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn delete(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        let volume = &self.volume;
        let tombstone = |version| {
            JournalChange::entry(&TreeEntry {
                key: key.as_bytes(),
                sequence: 1,
                version,
                expires_at: UnixTime::NEVER,
                value: EntryValue::Tombstone,
            })
        };
        let pass = self.enter_journal(tombstone(Version::from_bits(u64::MAX)).encoded_bytes()).await?;
        let _key_guard = match volume.lock_key(key) {
            Ok(guard) => guard,
            Err(waiter) => waiter.await,
        };
        if version > Version::NONE {
            volume.note_version();
        }
        let known = self.known_key(key).await?;
        let key_state =
            KnownKey { version: known.meta.map_or(Version::NONE, |meta| meta.version), exists: known.exists };
        let (remains, outcome) = match write_rules::decide_delete(key_state, known.meta.as_ref(), version) {
            Ok(decided) => decided,
            Err(outcome) => return Ok(outcome),
        };
        let left = match remains {
            Remains::Unchanged => return Ok(outcome),
            Remains::Nothing => Version::NONE,
            Remains::Tombstone(meta) => meta.version,
        };
        commit(self, tombstone(left), None, &mut ready(Ok(()))).await??;
        drop(pass);
        Ok(outcome)
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

/// A found entry without its value, for rules on versions.
fn entry_of<'a>(key: &'a Key, found: &FoundInTree) -> TreeEntry<'a> {
    let value = match found.value {
        FoundValue::Tombstone => EntryValue::Tombstone,
        FoundValue::Inline(..) | FoundValue::InSegment(_) => EntryValue::Inline(&[]),
    };
    TreeEntry {
        key: key.as_bytes(),
        sequence: found.sequence,
        version: found.version,
        expires_at: found.expires_at,
        value,
    }
}
