//! The changes that one core makes: put and delete.
//!
//! ```text
//!   put   key lock ─▶ pass ─▶ turn queued, value record into the tail ─▶ its write                   ┐
//!                             lock released                              segment acquired: its image │ at the same time ─▶ decided, entry replaced ─▶ batch ─▶ reply
//!                                                                        turn of the key             ┘
//! ```
//! Puts of one key get their space one after another, and decide so, in the order of their locks; between both their records are written together, and their entries
//! leave with the same batch.
//!
//! In: keys, values, conditions. Out: outcomes, once what they depend on is published. Invariants: an entry enters an image only after the write
//! of its record has ended; decisions on a segment are made one after another, on its newest image; what a segment's image refers to is
//! counted when it is published. A put has read its segment once and written record and image: three accesses; puts that meet share them.
//! Tested in `same_key_tests.rs`, `tests/log_conformance.rs` and `tests/log_power_loss.rs`, and below. Writes have shared their batch with others, so
//! [`super::handle`] lets them run to their ends.

use super::batch_state::BatchWait;
use super::busy_segments::ChangeSource;
use super::chunk_directory::DIRECTORY_ID_BYTES;
use super::core::{LogCore, device_error};
use super::hash_prefix::{HashPrefix, SegmentNumber};
use super::segment_buckets::image_units;
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::segment_image::{OldValue, SegmentImage};
use super::space_limits::ChunkPurpose;
use super::space_pass::{PassKind, SpaceFull, SpaceNeed};
use super::store::{EntryChange, KeyTurn, Store, StoreState};
use super::value_record::{NewValueRecord, record_granules, value_record_bytes};
use super::value_writes::AppendedValue;
use crate::common::key_locks::KeyGuard;
use crate::common::record::{LAYOUT, RecordFlags, RecordFormat, RecordMeta};
use crate::common::write_rules::{self, KnownKey, Remains};
use crate::{DeleteOutcome, EngineError, PutMode, PutOptions, PutOutcome, PutValue};
use futures_util::future::{join, join_all, join3};
use octokv_base::{Key, UnixTime, Version};
use octokv_device::DeviceError;

/// The longest entry without its key, of a value in one place or two, in bytes.
const ENTRY_BYTES_WITHOUT_KEY: u64 = 64;

/// What a put does with the newest image of its segment.
enum PutStep {
    /// The entry is in the image: it waits for its batch.
    Changed(BatchWait),
    /// Nothing changes, with this outcome, which depends on what is not published before this.
    Refused(PutOutcome, Option<BatchWait>),
    /// The record has to say this of the key.
    Encode(RecordMeta),
}

/// One put, on its way.
struct Put<'a> {
    key: &'a Key,
    value: &'a PutValue,
    options: &'a PutOptions,
}

impl Put<'_> {
    /// The parts of the value.
    fn parts(&self) -> impl Iterator<Item = &[u8]> {
        let front = self.value.record.get(LAYOUT.value_offset(self.key.len())..).unwrap_or_default();
        let more = self.value.more.iter().flat_map(|more| more.iter().map(|buffer| &buffer[..]));
        let mut rest = self.value.bytes;
        std::iter::once(front).chain(more).map(move |part| {
            let part = &part[..part.len().min(rest)];
            rest -= part.len();
            part
        })
    }

    /// Whether the buffers have the whole value.
    fn is_whole(&self) -> bool {
        self.parts().map(<[u8]>::len).sum::<usize>() == self.value.bytes
    }

    /// What the record says of the key if that had no version before.
    fn plain_meta(&self) -> RecordMeta {
        let PutOptions { version, expires_at, .. } = *self.options;
        let is_plain = version == Version::NONE && expires_at == UnixTime::NEVER;
        let flags = if is_plain { RecordFlags::NONE } else { RecordFlags::VERSIONED };
        RecordMeta { version, expires_at, flags }
    }
}

impl LogCore {
    /// What an image knows of a key. In an image of which entries were lost, a key without one may have had one.
    fn known_key(&self, image: &SegmentImage, key: &[u8]) -> (KnownKey, Option<RecordMeta>) {
        match image.find(key) {
            Some(entry) if self.is_forgotten(&entry) => (KnownKey::ABSENT, None),
            Some(entry) => (KnownKey::of(&entry.meta, || self.volume.clock.now()), Some(entry.meta)),
            None if image.is_lost() => {
                (KnownKey { version: Version::NONE, exists: true }, Some(RecordMeta::PLAIN))
            }
            None => (KnownKey::ABSENT, None),
        }
    }

    /// Whether an entry is a tombstone that counts no more.
    pub(super) fn is_forgotten(&self, entry: &SegmentEntry<'_>) -> bool {
        entry.contents.is_tombstone() && entry.meta.version < self.volume.forgotten_below()
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
        let put = Put { key, value: &value, options: &options };
        if value.bytes > volume.fixed().value_bytes_max as usize || !put.is_whole() {
            return Ok(PutOutcome::TooLong);
        }
        if volume.is_read_only() {
            return Err(EngineError::ReadOnly);
        }
        let (store, prefix) = volume.place_of_key(key);
        // Behind the earlier writes of the key, of which one may have lost its caller. A waiter for the lock has no pass, since the holder may wait for space.
        let lock = store.lock_key(prefix).await;
        let need = self.put_need(&put);
        let Ok(pass) = self.take_pass(need).await? else { return Ok(PutOutcome::Full) };
        let turn = store.queue_turn(prefix);
        let (outcome, wait) = match self.change_by_put(store, prefix, &put, (turn, lock)).await {
            // A value that the device has no space for.
            Err(EngineError::Device { error: DeviceError::NoSpace, .. }) => return Ok(PutOutcome::Full),
            changed => changed?,
        };
        if let Some(wait) = wait {
            // With an error the change may be committed later.
            self.commit(store, wait).await?;
        }
        if outcome == PutOutcome::Stored {
            // Whatever becomes of the split that the store may need: the next put tries it again.
            let _ = self.note_growth(store).await;
        }
        drop(pass);
        Ok(outcome)
    }

    /// Writes the record of a put, and changes the entry of its key. Returns the outcome of the put behind a commit.
    async fn change_by_put(
        &self,
        store: &Store,
        prefix: HashPrefix,
        put: &Put<'_>,
        (turn, lock): (KeyTurn<'_>, KeyGuard<'_>),
    ) -> Result<(PutOutcome, Option<BatchWait>), EngineError> {
        let mut record = None;
        if put.options.mode == PutMode::Upsert && put.value.bytes > 0 {
            record = Some(self.append_put(store, prefix, put, put.plain_meta())?);
        }
        // Later writes of the key append their records meanwhile: they decide behind this one, and a write that waits for its turn has space.
        drop(lock);
        let written = async {
            match &mut record {
                Some(record) => record.written(self).await,
                None => Ok(()),
            }
        };
        let (held, written, turn) = join3(self.acquire(store, prefix), written, turn).await;
        written?;
        let held = held?;
        loop {
            let step = held.with(|state, segment| self.put_step(state, segment, put, record.as_ref()));
            match step {
                PutStep::Changed(wait) => {
                    drop((held, record, turn));
                    return Ok((PutOutcome::Stored, Some(wait)));
                }
                PutStep::Refused(outcome, wait) => {
                    drop((held, record, turn));
                    return Ok((outcome, wait));
                }
                PutStep::Encode(meta) => {
                    let mut appended = self.append_put(store, prefix, put, meta)?;
                    appended.written(self).await?;
                    // The segment is held meanwhile: it stays in memory, so that it is not read again.
                    record = Some(appended);
                }
            }
        }
    }

    fn append_put<'a>(
        &self,
        store: &'a Store,
        prefix: HashPrefix,
        put: &Put<'_>,
        meta: RecordMeta,
    ) -> Result<AppendedValue<'a>, EngineError> {
        let key = put.key.as_bytes();
        let record = NewValueRecord { key, meta, value_bytes: put.value.bytes as u32 };
        // Since the pass was given, compaction may have taken all but F_key and what the pass says.
        let mut appended = self.append_value(store, prefix, &record, put.parts(), ChunkPurpose::User);
        for purpose in [ChunkPurpose::Delete, ChunkPurpose::Compaction] {
            if !matches!(appended, Err(EngineError::Device { error: DeviceError::NoSpace, .. })) {
                break;
            }
            appended = self.append_value(store, prefix, &record, put.parts(), purpose);
        }
        appended
    }

    /// What a put takes of the space at most: its record, with an id in a directory, and an image that is a bucket longer for its entry.
    fn put_need(&self, put: &Put<'_>) -> SpaceNeed {
        let layout = self.volume.layout();
        let (key_bytes, value_bytes) = (put.key.len(), put.value.bytes as u32);
        let meta = RecordMeta { version: Version::from_bits(u64::MAX), ..put.plain_meta() };
        let granules = record_granules(key_bytes, value_bytes, &meta, layout.granule_log2);
        let record_bytes = u64::from(granules) << layout.granule_log2;
        let units = record_bytes.div_ceil(layout.unit_bytes.into()) + 1 + u64::from(layout.chain_max());
        let live_bytes = record_bytes + DIRECTORY_ID_BYTES as u64 + self.image_growth_bytes(key_bytes);
        SpaceNeed { kind: PassKind::Put, units, live_bytes }
    }

    /// What a delete takes of the space at most.
    fn delete_need(&self, key: &Key, version: Version) -> SpaceNeed {
        let units = self.volume.layout().chain_max().into();
        // One without a version leaves nothing, or a tombstone instead of an entry with a version.
        let kind = if version > Version::NONE { PassKind::Tombstone } else { PassKind::Delete };
        SpaceNeed { kind, units, live_bytes: self.image_growth_bytes(key.len()) }
    }

    /// By how many bytes an entry makes an image longer at most.
    fn image_growth_bytes(&self, key_bytes: usize) -> u64 {
        let unit_bytes = u64::from(self.volume.layout().unit_bytes);
        (ENTRY_BYTES_WITHOUT_KEY + key_bytes as u64).div_ceil(unit_bytes) * unit_bytes
    }

    /// Decides on a put with the newest image of its segment and, if its record is written, changes the entry.
    fn put_step(
        &self,
        state: &mut StoreState,
        segment: SegmentNumber,
        put: &Put<'_>,
        record: Option<&AppendedValue<'_>>,
    ) -> PutStep {
        let key = put.key.as_bytes();
        let before = state.busy.last_change(segment).map(BatchWait::Change);
        let image = state.busy.image(segment);
        let (known, _) = self.known_key(image, key);
        let meta = match write_rules::decide_put(known, put.options) {
            Ok(meta) => meta,
            Err(outcome) => return PutStep::Refused(outcome, before),
        };
        let bytes = put.value.bytes as u32;
        let at = match record {
            _ if bytes == 0 => ValuePlace::Nowhere,
            Some(record) if record.is_of(&meta) => record.place().clone(),
            Some(_) | None => return PutStep::Encode(meta),
        };
        let entry = SegmentEntry { key, meta, contents: EntryContents::Value { bytes, at: at.clone() } };
        if !self.has_room(image, &entry) {
            return PutStep::Refused(PutOutcome::Full, before);
        }
        let difference = image.replace(&entry);
        let record_bytes = value_record_bytes(key.len(), bytes, &meta);
        let new = (bytes > 0).then_some(OldValue { at, record_bytes });
        let change = EntryChange { difference, new };
        let ticket = state.busy.mark_dirty(segment, Some(change), ChangeSource::User, &mut state.batches);
        PutStep::Changed(BatchWait::Change(ticket))
    }

    /// Whether an image has room for an entry instead of the one that its key has.
    pub(super) fn has_room(&self, image: &SegmentImage, entry: &SegmentEntry<'_>) -> bool {
        let layout = self.volume.layout();
        let old = image.find(entry.key).map_or(0, |old| old.encoded_bytes());
        let entry_bytes = image.entry_bytes() - old + entry.encoded_bytes();
        // An image of an earlier version may be longer than a new one would become.
        let chain_now = image_units(image.entry_bytes(), layout.unit_bytes).unwrap_or(0);
        image_units(entry_bytes, layout.unit_bytes)
            .is_some_and(|chain| chain <= layout.chain_max().max(chain_now))
    }

    /// [`Engine::delete_with`](crate::Engine::delete_with).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn delete(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        let volume = &self.volume;
        if volume.is_read_only() {
            return Err(EngineError::ReadOnly);
        }
        let (store, prefix) = volume.place_of_key(key);
        if version == Version::NONE && store.is_absent(prefix) {
            return Ok(DeleteOutcome::NotFound);
        }
        let lock = store.lock_key(prefix).await;
        let need = self.delete_need(key, version);
        let no_space = || device_error(DeviceError::NoSpace, store.id);
        let pass = self.take_pass(need).await?.map_err(|SpaceFull| no_space())?;
        let turn = store.queue_turn(prefix);
        drop(lock);
        let (held, turn) = join(self.acquire(store, prefix), turn).await;
        let held = held?;
        let (outcome, wait) = held.with(|state, segment| self.delete_step(state, segment, key, version))?;
        drop((held, turn));
        if let Some(wait) = wait {
            self.commit(store, wait).await?;
        }
        drop(pass);
        Ok(outcome)
    }

    /// Decides on a delete with the newest image of its segment, and changes the entry.
    ///
    /// # Errors
    /// No space in the segment for a tombstone.
    fn delete_step(
        &self,
        state: &mut StoreState,
        segment: SegmentNumber,
        key: &Key,
        version: Version,
    ) -> Result<(DeleteOutcome, Option<BatchWait>), EngineError> {
        let key = key.as_bytes();
        let before = state.busy.last_change(segment).map(BatchWait::Change);
        let image = state.busy.image(segment);
        let is_lost = image.is_lost();
        let (known, meta) = self.known_key(image, key);
        let (remains, outcome) = match write_rules::decide_delete(known, meta.as_ref(), version) {
            Ok(decided) => decided,
            Err(outcome) => return Ok((outcome, before)),
        };
        let tombstone = |meta| SegmentEntry { key, meta, contents: EntryContents::Tombstone };
        let difference = match remains {
            Remains::Unchanged => return Ok((outcome, before)),
            // A key that may have had an entry is absent from now on: the tombstone says so.
            Remains::Nothing if is_lost => {
                let flags = RecordFlags::VERSIONED.with(RecordFlags::TOMBSTONE);
                image.replace(&tombstone(RecordMeta {
                    version: Version::NONE,
                    expires_at: UnixTime::NEVER,
                    flags,
                }))
            }
            Remains::Nothing => image.remove(key),
            Remains::Tombstone(meta) => {
                let entry = tombstone(meta);
                if !self.has_room(image, &entry) {
                    return Err(EngineError::from(DeviceError::NoSpace));
                }
                image.replace(&entry)
            }
        };
        let change = EntryChange { difference, new: None };
        let ticket = state.busy.mark_dirty(segment, Some(change), ChangeSource::User, &mut state.batches);
        Ok((outcome, Some(BatchWait::Change(ticket))))
    }

    /// [`Engine::flush`](crate::Engine::flush).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn flush(&self) -> Result<(), EngineError> {
        // At once: a batch of each store, one after another, takes as many times as long as there are stores.
        let published_of = async |store: &Store| {
            let next = store.state.lock().batches.next_ticket();
            self.commit(store, BatchWait::AllBefore(next)).await?;
            Ok(store.state.lock().batches.published_sequence())
        };
        let published: Result<Vec<u64>, EngineError> =
            join_all(self.volume.stores.iter().map(published_of)).await.into_iter().collect();
        self.flush_device(&published?).await
    }

    /// Flushes the device, after which the images of each store up to these sequence numbers are durable.
    ///
    /// # Errors
    /// [`EngineError::ReadOnly`]: the volume is, after a failure.
    pub(super) async fn flush_device(&self, published: &[u64]) -> Result<(), EngineError> {
        if self.volume.flushes.flush(&*self.device).await.is_err() {
            self.volume.fail();
            return Err(EngineError::ReadOnly);
        }
        let (stores, pool) = (&self.volume.stores, &self.volume.pool);
        let freed: usize =
            stores.iter().zip(published).map(|(store, &sequence)| store.note_durable(sequence, pool)).sum();
        if freed > 0 {
            self.volume.passes.chunks_freed(pool);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_log_volume::OpenTestVolume;
    use super::*;
    use crate::Durability;
    use crate::conformance::{key_of, value_of};
    use octokv_runtime::block_on;
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::sync::atomic::Ordering;
    use std::task::{Context, Waker};

    /// Polls as often as the device lets others run before it ends an operation, and oftener.
    fn poll_for_long<T>(mut operation: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        let poll = |_| match operation.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            std::task::Poll::Ready(outcome) => Some(outcome),
            std::task::Poll::Pending => None,
        };
        (0..200).find_map(poll)
    }

    #[test]
    fn puts_of_a_key_are_written_together_and_the_last_one_stays() {
        let test = OpenTestVolume::new(5, Durability::Completed, |_| ());
        let (key, plain) = (key_of(1), PutOptions::default());
        let batches = || test.core.volume.counters.batches.load(Ordering::Relaxed);
        assert_eq!(block_on(test.put(&key, 0, 100, plain), || ()), Ok(PutOutcome::Stored));
        let before = batches();
        let puts = join_all((1..=16).map(|value| test.put(&key, value, 100, plain)));
        assert!(block_on(puts, || ()).into_iter().all(|stored| stored == Ok(PutOutcome::Stored)));
        // The first record is written alone, those of the others meanwhile.
        assert!((1..=3).contains(&(batches() - before)), "{} batches", batches() - before);
        assert_eq!(block_on(test.get(&key), || ()), Ok(Some(value_of(&key, 16, 100))));
    }

    #[test]
    fn a_delete_is_behind_an_earlier_put_of_its_key_that_waits_for_space() {
        let test = OpenTestVolume::new(5, Durability::Completed, |_| ());
        let (key, other, plain) = (key_of(1), key_of(2), PutOptions::default());
        for key in [&key, &other] {
            let stored = block_on(test.put(key, 1, 100, plain), || ());
            assert_eq!(stored, Ok(PutOutcome::Stored));
        }
        // A write that may take all that puts may have, and what its hops to new chunks take.
        let (pool, layout) = (test.pool(), test.core.volume.layout());
        let chunks = pool.free() - pool.limits().pass_floor(ChunkPurpose::User) - 2;
        let units = u64::from(chunks) * u64::from(layout.image_units());
        let need = SpaceNeed { kind: PassKind::Put, units, live_bytes: 0 };
        let all = block_on(test.core.volume.passes.take(pool, need), || ()).expect("a pass");
        let mut put = pin!(test.put(&key, 2, 100, plain));
        assert!(poll_for_long(put.as_mut()).is_none(), "a put has no space");
        let mut delete = pin!(test.core.delete(&key, Version::NONE));
        assert!(poll_for_long(delete.as_mut()).is_none(), "a delete overtakes a put of its key");
        // For deletes there is space.
        let deleted = poll_for_long(pin!(test.core.delete(&other, Version::NONE)));
        assert_eq!(deleted, Some(Ok(DeleteOutcome::Deleted)));
        drop(all);
        assert_eq!(poll_for_long(put), Some(Ok(PutOutcome::Stored)));
        assert_eq!(poll_for_long(delete), Some(Ok(DeleteOutcome::Deleted)));
        assert_eq!(block_on(test.get(&key), || ()), Ok(None));
    }
}
