//! OctoKV's hash engine (OKSENG, OctoKV §IV.C), made durable.
//!
//! In: operations on keys, from any core. Out: reads, writes and flushes of one device. Holds in memory:
//! an index entry of 16 bytes a key, a bit a unit of space, and the journal batch being gathered.
//!
//! ```text
//!   put   lock key ─▶ allocate ─┬─▶ write record ──────┬─▶ flush ─▶ index ─▶ answer, old space free
//!                               ├─▶ read old's header ─┤  (one batch and one flush for all who wait)
//!                               └─▶ journal batch ─────┘
//!   get   enter ─▶ index ─▶ read record ─▶ checksums, identity, key ─▶ answer
//! ```
//! The device: superblocks │ journal ×2 │ checkpoint areas A, B ×2 │ records. See docs/FORMATS.md.
//!
//! Invariants: the index names only durable records (as the chosen durability means it); a record is never
//! changed in place; its space is used again only after its replacement is durable and no reader is on
//! it; what is read is compared with the full key before it is answered.
//!
//! # Layout
//! - [`superblock`], [`journal`], [`checkpoint`], [`record`]: what lies on the device.
//! - [`index`], [`allocator`], `readers`, `keylock`: what lies in memory.
//! - `commit`, `batches`: group commit, and what it remembers.
//! - [`format`](mod@format), [`recovery`](mod@open), `open_error`: a new volume, recovery, why there is none.
//! - [`verify`](mod@check): reads and verifies everything.
//! - `volume`: what all cores share. This file: the operations.

pub mod allocator;
pub mod checkpoint;
mod commit_queue;
mod epoch;
mod error;
pub mod format;
mod group_commit;
pub mod index;
pub mod journal;
mod key_locks;
pub mod record;
pub mod recovery;
pub mod superblock;
pub mod verify;
mod volume;

pub use format::{FormatSettings, format};
pub use recovery::{OpenError, open};
pub use superblock::HashKind;
pub use verify::{Problem, Report, check};
pub use volume::{OpenSettings, Volume};

use crate::bug_injection::{self, Bug};
use crate::{Delete, Engine, Fault, Hint, KeySink, Put, PutMode, Statistics, Value};
use allocator::Extent;
use commit_queue::Landed;
use epoch::Readers;
use index::Place;
use journal::Entry;
use octokv_base::{Buffer, Key, Lba, Pool};
use octokv_device::{Device, Pending};
use record::{HEADER_BYTES, Header, Identity, record_bytes};
use smallvec::SmallVec;
use std::cell::Cell;
use std::future::ready;
use std::rc::Rc;
use std::sync::Arc;

/// Places that a key may be at: one, unless tags collide.
type Places = SmallVec<[Place; 2]>;

/// Keys of a listing that are read at once, between two of its turns.
const LIST_PAGE_KEYS: usize = 16;

/// One core's handle on a volume.
pub struct HashEngine {
    volume: Arc<Volume>,
    device: Rc<dyn Device>,
    pool: Pool,
    readers: Readers,
    /// Where this core takes space.
    partition: Cell<usize>,
}

/// As much of a record as holds any key.
const FRONT_BYTES: usize = HEADER_BYTES + octokv_base::KEY_BYTES_MAX;

/// What a record on the device has to do with a key.
enum Found {
    /// It is the key's record.
    Same(Header, Buffer),
    /// It is another key's.
    Other,
    /// It cannot be told: it is damaged.
    Damaged,
}

/// The record that a put replaces.
enum Before {
    /// It was read.
    Known(Option<Place>),
    /// The only one of the key's tag.
    Likely(Place),
}

impl HashEngine {
    /// Core `core`'s handle. `device` is that core's view of the volume's device.
    pub fn new(volume: Arc<Volume>, core: usize, device: Rc<dyn Device>, pool: Pool) -> HashEngine {
        let partition = Cell::new(volume.first_partition(core));
        HashEngine { volume, device, pool, readers: Readers::new(core), partition }
    }

    /// What all cores share.
    pub fn volume(&self) -> &Arc<Volume> {
        &self.volume
    }

    fn lba(&self, location: u64) -> Lba {
        self.volume.lba(location)
    }

    /// Flushes the device. After a failure nothing more is written: the system tells of writes that it could
    /// not keep once, and which they were cannot be known.
    async fn flush_device(&self) -> Result<(), Fault> {
        let flushed = self.device.flush().await.result;
        if flushed.is_err() {
            self.volume.commits.fail();
        }
        Ok(flushed?)
    }

    /// Reads a record, or as much of its front as `front_bytes`, and compares it with `key`.
    async fn read(&self, place: Place, key: &Key, front_bytes: usize) -> Result<Found, Fault> {
        let unit = self.volume.unit_bytes();
        let bytes = front_bytes.next_multiple_of(unit).min(place.units as usize * unit);
        let buffer = self.pool.take(bytes).ok_or(Fault::NoMemory)?;
        let mut buffer = self.device.read(self.lba(place.location), buffer).await.into_read()?;
        let most = FRONT_BYTES.next_multiple_of(unit).min(place.units as usize * unit);
        if bytes < most && record::Unchecked(&buffer).header().is_err() {
            // Another key of the same tag may be longer than the one looked for.
            let larger = self.pool.take(most).ok_or(Fault::NoMemory)?;
            buffer = self.device.read(self.lba(place.location), larger).await.into_read()?;
        }
        let Ok((header, found)) = record::Unchecked(&buffer).header() else { return Ok(Found::Damaged) };
        if !self.volume.is_the_record(place, header.identity) {
            return Ok(Found::Damaged);
        }
        if found != key.as_bytes() && !bug_injection::is(Bug::SkipKeyCompare) {
            return Ok(Found::Other);
        }
        Ok(Found::Same(header, buffer))
    }

    /// Which of `places` is the key's. A damaged record counts as the key's when no other is: its tag
    /// says so, and writing or deleting the key is how a user gets rid of it.
    async fn resolve(&self, places: &Places, key: &Key) -> Result<Option<Place>, Fault> {
        let mut damaged = None;
        for &place in places {
            match self.read(place, key, HEADER_BYTES + key.len()).await? {
                Found::Same(..) => return Ok(Some(place)),
                Found::Other => {}
                Found::Damaged => damaged = Some(place),
            }
        }
        Ok(damaged)
    }

    /// What a put of a key replaces. One that does not depend on it learns what the index says, which nearly
    /// always is right, and does not wait.
    async fn before(&self, mode: PutMode, hash: u128, key: &Key) -> Result<Before, Fault> {
        let places = self.volume.places(hash);
        if mode == PutMode::Upsert {
            match places[..] {
                [] => return Ok(Before::Known(None)),
                [place] => return Ok(Before::Likely(place)),
                _ => {}
            }
        }
        Ok(Before::Known(self.resolve(&places, key).await?))
    }

    /// Finds the key's record and reads `front_bytes` of it, or all where that is less.
    async fn find(&self, key: &Key, front_bytes: usize) -> Result<Option<(Header, Buffer, Place)>, Fault> {
        let _reading = self.readers.enter(&self.volume.epochs);
        let places = self.volume.places(self.volume.hash(key));
        let mut damaged = None;
        for &place in &places {
            match self.read(place, key, front_bytes).await? {
                Found::Same(header, buffer) => return Ok(Some((header, buffer, place))),
                Found::Other => {}
                Found::Damaged => damaged = Some(place),
            }
        }
        match damaged {
            Some(place) => Err(Fault::Corrupt { lba: self.lba(place.location).0 }),
            None => Ok(None),
        }
    }

    /// Completes the record in its buffer and begins to write it; gives its stamp.
    fn begin_record(
        &self,
        extent: Extent,
        key: &Key,
        mut record: Buffer,
        value_bytes: usize,
    ) -> (u64, Pending) {
        let identity = Identity {
            volume: self.volume.id(),
            stamp: self.volume.next_stamp(),
            location: extent.location,
            namespace: self.volume.namespace(),
        };
        record.set_len(extent.units as usize * self.volume.unit_bytes());
        record::encode(&mut record, identity, key, value_bytes);
        (identity.stamp, self.device.write(self.lba(extent.location), record))
    }

    /// Waits for a record's write, and meanwhile makes sure that the record that it replaces is the key's.
    async fn land(&self, write: Pending, likely: Option<Place>, key: &Key) -> Result<Landed, Fault> {
        let found = match likely {
            Some(place) => Some(self.read(place, key, HEADER_BYTES + key.len()).await),
            None => None,
        };
        // The space is the device's until the write is over, whatever became of the read.
        write.await.result?;
        Ok(match found.transpose()? {
            Some(Found::Other) => Landed::Beside,
            // Its tag says that a damaged one is the key's.
            Some(Found::Same(..) | Found::Damaged) | None => Landed::AsSaid,
        })
    }

    /// Stores the record of a key whose lock is held.
    async fn store(
        &self,
        hash: u128,
        key: &Key,
        record: Buffer,
        value_bytes: usize,
        extent: Extent,
        before: Before,
    ) -> Result<Put, Fault> {
        let (old, likely) = match before {
            Before::Known(old) => (old, None),
            Before::Likely(place) => (Some(place), Some(place)),
        };
        if bug_injection::is(Bug::ReuseSpaceEarly)
            && let Some(Place { location, units, .. }) = old
        {
            self.volume.space.release(Extent { location, units });
        }
        let (stamp, write) = self.begin_record(extent, key, record, value_bytes);
        let entry = Entry {
            hash,
            new: extent.location,
            old: old.map_or(0, |place| place.location),
            stamp,
            units: extent.units as u32,
        };
        let landing = self.land(write, likely, key);
        let done = match self.volume.volatile {
            true => landing.await.map(|landed| self.change_at_once(entry, landed)),
            false => self.commit(entry, landing).await?,
        };
        match done {
            Ok(()) => Ok(Put::Stored),
            Err(fault) => {
                self.volume.space.release(extent);
                Err(fault)
            }
        }
    }
}

impl Engine for HashEngine {
    async fn put(&self, key: &Key, mode: PutMode, record: Buffer, value_bytes: usize) -> Result<Put, Fault> {
        let volume = &self.volume;
        let fits = record_bytes(key.len(), value_bytes);
        if value_bytes > volume.value_bytes_max() || fits > record.capacity() {
            return Ok(Put::TooLong);
        }
        if volume.commits.has_failed() {
            return Err(Fault::ReadOnly);
        }
        let hash = volume.hash(key);
        let _held = volume.lock(hash).await;
        let mut reading = self.readers.enter(&volume.epochs);
        let mut before = self.before(mode, hash, key).await?;
        match (mode, &before) {
            (PutMode::AddOnly, Before::Known(Some(_))) => return Ok(Put::Exists),
            (PutMode::UpdateOnly, Before::Known(None)) => return Ok(Put::NotFound),
            _ => {}
        }
        let units = record_bytes(key.len(), value_bytes).div_ceil(volume.unit_bytes()) as u64;
        let extent = match volume.allocate(hash, &self.partition, units) {
            Some(extent) => extent,
            None => {
                // What waits for a flush only may become free, and not while this one counts as a reader.
                drop(reading);
                // In memory of its own: every task has room for the largest of its futures, and this one is rare.
                Box::pin(self.settle()).await?;
                reading = self.readers.enter(&volume.epochs);
                before = self.before(mode, hash, key).await?;
                let Some(extent) = volume.allocate(hash, &self.partition, units) else {
                    return Ok(Put::Full);
                };
                extent
            }
        };
        let at = self.lba(extent.location);
        self.device.expect_write(at, self.lba(extent.location + units).0 - at.0);
        let stored = self.store(hash, key, record, value_bytes, extent, before).await;
        drop(reading);
        stored
    }

    async fn get(&self, key: &Key) -> Result<Option<Value>, Fault> {
        let Some((header, buffer, place)) = self.find(key, usize::MAX / 2).await? else { return Ok(None) };
        let Ok(range) = header.value(&buffer) else {
            return Err(Fault::Corrupt { lba: self.lba(place.location).0 });
        };
        Ok(Some(Value { buffer, offset: range.start, bytes: range.len() }))
    }

    async fn delete(&self, key: &Key) -> Result<Delete, Fault> {
        let volume = &self.volume;
        if volume.commits.has_failed() {
            return Err(Fault::ReadOnly);
        }
        let hash = volume.hash(key);
        let _held = volume.lock(hash).await;
        let old = {
            let _reading = self.readers.enter(&volume.epochs);
            let places = volume.places(hash);
            self.resolve(&places, key).await?
        };
        let Some(old) = old else { return Ok(Delete::NotFound) };
        let entry = Entry { hash, new: 0, old: old.location, stamp: 0, units: 0 };
        if volume.volatile {
            self.change_at_once(entry, Landed::AsSaid);
        } else {
            self.commit(entry, ready(Ok(Landed::AsSaid))).await??;
        }
        Ok(Delete::Deleted)
    }

    async fn exist(&self, key: &Key) -> Result<Option<usize>, Fault> {
        let found = self.find(key, HEADER_BYTES + key.len()).await?;
        Ok(found.map(|(header, ..)| header.value_bytes))
    }

    async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), Fault> {
        let (mut segment, mut tag) = match start.is_empty() {
            true => (0, 0),
            false => self.volume.split(self.volume.hash(start)),
        };
        let mut reads = SmallVec::<[_; LIST_PAGE_KEYS]>::new();
        while segment < self.volume.segments.len() {
            sink.turn().await;
            let _reading = self.readers.enter(&self.volume.epochs);
            let next = self.volume.page_of(segment, tag, &mut reads, |slot| {
                let bytes =
                    record_bytes(octokv_base::KEY_BYTES_MAX, 0).next_multiple_of(self.volume.unit_bytes());
                let place = slot.place();
                let buffer = self.pool.take(bytes.min(place.units as usize * self.volume.unit_bytes()));
                buffer.map(|buffer| (place, self.device.read(self.lba(place.location), buffer)))
            });
            let mut room = true;
            for read in reads.drain(..) {
                let (place, pending) = read.ok_or(Fault::NoMemory)?;
                let buffer = pending.await.into_read()?;
                // A damaged record has no key to list; `check` names it, and a read of its key says so.
                let Ok((header, key)) = record::Unchecked(&buffer).header() else { continue };
                if room && self.volume.is_the_record(place, header.identity) {
                    room = sink.offer(key);
                }
            }
            if !room {
                return Ok(());
            }
            (segment, tag) = next;
        }
        Ok(())
    }

    async fn flush(&self) -> Result<(), Fault> {
        self.settle().await?;
        self.flush_device().await
    }

    fn expect(&self, key: &Key, hint: Hint) {
        let hash = self.volume.hash(key);
        match hint {
            Hint::Index => self.volume.expect_segment(hash),
            Hint::Entry => self.volume.expect_entry(hash),
            // Other devices have no use for it.
            Hint::Record if !self.volume.volatile => {}
            // Without entering as a reader: what is there meanwhile is not looked at.
            Hint::Record => {
                if let Some(place) = self.volume.likely_place(hash) {
                    self.device.expect_read(self.lba(place.location), 1);
                }
            }
        }
    }

    fn statistics(&self) -> Statistics {
        self.volume.statistics()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::{record_of, value_of};
    use octokv_device::{Memory, MemoryDevice};
    use octokv_runtime::block_on;

    fn in_memory() -> HashEngine {
        let pool = Pool::new(1 << 20);
        let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(Memory::new(1 << 20, 512).unwrap()));
        let settings = OpenSettings { durability: crate::Durability::Flush, cores: 1 };
        let format = FormatSettings { unit_bytes: 512, ..FormatSettings::default() };
        let volume = block_on(open(&device, &pool, settings, &format), || ()).unwrap();
        HashEngine::new(volume, 0, device, pool)
    }

    #[test]
    fn hints_change_no_answer_and_may_come_for_anything_at_any_time() {
        let engine = in_memory();
        let keys: Vec<Key> = (0..50_u32).map(|i| Key::new(&i.to_le_bytes()).unwrap()).collect();
        let hint = |key: &Key| {
            for hint in [Hint::Record, Hint::Index, Hint::Entry, Hint::Record] {
                engine.expect(key, hint);
            }
        };
        // Where nothing is stored, where something is, and where it is no more.
        keys.iter().for_each(hint);
        for key in &keys {
            let value = value_of(key, 1, 50);
            let put = engine.put(key, PutMode::Upsert, record_of(key, &value), 50);
            assert_eq!(block_on(put, || ()), Ok(Put::Stored));
            hint(key);
            let got = block_on(engine.get(key), || ()).unwrap().unwrap();
            assert_eq!(got.as_bytes(), value);
        }
        for key in &keys {
            assert_eq!(block_on(engine.delete(key), || ()), Ok(Delete::Deleted));
            hint(key);
            assert!(block_on(engine.get(key), || ()).unwrap().is_none());
        }
        // While another has the index or the memory.
        let held: Vec<_> = engine.volume.segments.iter().map(|segment| segment.entries.lock()).collect();
        keys.iter().for_each(hint);
        drop(held);
    }

    #[test]
    fn keys_whose_tags_collide_are_kept_apart() {
        let engine = in_memory();
        let (one, other) = (Key::new(b"one").unwrap(), Key::new(b"other").unwrap());
        let put = |key: &Key, operation| {
            let value = value_of(key, operation, 50);
            let put = engine.put(key, PutMode::Upsert, record_of(key, &value), 50);
            assert_eq!(block_on(put, || ()), Ok(Put::Stored));
        };
        put(&one, 1);
        // The index says of the other key's tag, too, that its record is the first one's.
        let (hash, first) = (engine.volume.hash(&other), engine.volume.places(engine.volume.hash(&one))[0]);
        let (new, units) = (first.location, first.units as u32);
        engine.volume.apply(&Entry { hash, new, old: 0, stamp: 0, units }, 0);
        let get = |key: &Key| block_on(engine.get(key), || ()).unwrap();
        assert!(get(&other).is_none());
        assert_eq!(block_on(engine.delete(&other), || ()), Ok(Delete::NotFound));
        put(&other, 2);
        assert_eq!(engine.volume.places(hash).len(), 2, "beside it, not in its place");
        // A key that is longer than a block holds is no damage to the short one that shares its tag.
        let long = Key::new(&[b'l'; 1_000]).unwrap();
        let short = Key::new(b"short").unwrap();
        put(&long, 3);
        let place = engine.volume.places(engine.volume.hash(&long))[0];
        let stamp = 2;
        assert_eq!(index::check_of(stamp), place.check);
        let (hash, new, units) = (engine.volume.hash(&short), place.location, place.units as u32);
        engine.volume.apply(&Entry { hash, new, old: 0, stamp, units }, 0);
        assert!(get(&short).is_none());
        assert_eq!(block_on(engine.exist(&short), || ()), Ok(None));
        put(&short, 4);
        assert_eq!(get(&long).unwrap().as_bytes(), value_of(&long, 3, 50));
        assert_eq!(get(&one).unwrap().as_bytes(), value_of(&one, 1, 50));
        assert_eq!(get(&other).unwrap().as_bytes(), value_of(&other, 2, 50));
    }
}
