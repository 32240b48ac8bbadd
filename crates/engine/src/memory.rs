//! The contract's model: an engine in memory that does everything of [`Engine`] and [`Partitions`], and keeps nothing
//! when the process ends.
//!
//! In: operations, and the wall clock as a function. Out: their outcomes, at once. Holds: every key in ring order, by
//! partition. Written for clarity: one ordered map, searched and changed under one lock. It is what the other engines'
//! tests compare with, and what tests of layers above run on when a device has no part in them.
//!
//! Invariants: partitions do not overlap; every entry lies in a partition; a partition's used bytes are those of its
//! entries and never exceed its size; the version of a key never decreases but by `forget_below`.
//! Tested by `tests/memory_contract.rs`, with [`crate::contract_clauses`].

use crate::WallClock;
use crate::{
    DeleteOutcome, Engine, EngineError, EngineStatistics, IteratorOptions, IteratorProgress, KeySink,
    KeyStatus, PairSink, PartitionError, PartitionInfo, Partitions, PutMode, PutOptions, PutOutcome,
    PutValue, ScanEntry, ScanSink, StoredValue, ValueRange, value_digest,
};
use octokv_base::{Buffer, Key, RecordLayout, RingPosition, RingRange, UnixTime, Version};
use octokv_runtime::ReactorHandle;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

/// A value needs no header in memory: the buffer of a put has the key at its front.
const RECORD_LAYOUT: RecordLayout = RecordLayout::new(0);

/// The settings of a new volume.
#[derive(Clone, Copy, Debug)]
pub struct MemoryConfig {
    /// The seed of the ring hash.
    pub ring_seed: u64,
    /// The number of devices that partitions can be on.
    pub devices: u16,
    /// The size of each partition: the bytes of its keys and values are at most this.
    pub partition_bytes: u64,
    /// The longest value, in bytes.
    pub value_bytes_max: usize,
}

/// The last write of a key.
struct Entry {
    /// `None` for a tombstone.
    value: Option<Vec<u8>>,
    version: Version,
    expires_at: UnixTime,
    /// The number of the write, by which space is given up.
    written: u64,
}

impl Entry {
    fn is_live(&self, now: UnixTime) -> bool {
        self.value.is_some() && now < self.expires_at
    }
}

#[derive(Default)]
struct MemoryState {
    entries: BTreeMap<(RingPosition, Key), Entry>,
    partitions: Vec<PartitionInfo>,
    next_partition: u32,
    writes: u64,
    /// Entries with a value.
    keys: u64,
    iterators: usize,
}

/// An iterator: a copy of what it yields.
pub struct MemoryIterator {
    /// In its direction.
    pairs: Vec<(Key, Vec<u8>)>,
    reverse: bool,
    /// The index of the next pair.
    next: Mutex<usize>,
    state: Arc<Mutex<MemoryState>>,
}

impl Drop for MemoryIterator {
    fn drop(&mut self) {
        self.state.lock().iterators -= 1;
    }
}

/// The most iterators of a volume at once.
const ITERATORS_MAX: usize = 100;

/// A volume in memory. Clones are handles of the same volume.
#[derive(Clone)]
pub struct MemoryEngine {
    config: MemoryConfig,
    clock: WallClock,
    state: Arc<Mutex<MemoryState>>,
}

/// The space that an entry uses, in bytes. A tombstone counts as none, so that a delete always finds space.
fn entry_bytes(key: &Key, entry: &Entry) -> u64 {
    entry.value.as_ref().map_or(0, |value| (key.len() + value.len()) as u64)
}

impl MemoryEngine {
    /// An empty volume of one partition that has the whole ring.
    pub fn new(config: MemoryConfig, clock: WallClock) -> MemoryEngine {
        let first = PartitionInfo {
            id: 0,
            range: RingRange::FULL,
            device: 0,
            size_bytes: config.partition_bytes,
            used_bytes: 0,
        };
        let state = MemoryState { partitions: vec![first], next_partition: 1, ..MemoryState::default() };
        MemoryEngine { config, clock, state: Arc::new(Mutex::new(state)) }
    }

    fn place(&self, key: &Key) -> (RingPosition, Key) {
        (RingPosition::of(key, self.config.ring_seed), key.clone())
    }
}

impl MemoryState {
    fn partition_of(&mut self, position: RingPosition) -> Result<&mut PartitionInfo, EngineError> {
        let found = self.partitions.iter_mut().find(|partition| partition.range.contains(position));
        found.ok_or(EngineError::NoPartition)
    }

    /// Replaces the entry at a place; `None` removes it. False, and nothing changed, if the partition has no space.
    fn replace(&mut self, place: &(RingPosition, Key), new: Option<Entry>) -> Result<bool, EngineError> {
        let bytes_of = |entry: Option<&Entry>| entry.map_or(0, |entry| entry_bytes(&place.1, entry));
        let (before, after) = (bytes_of(self.entries.get(place)), bytes_of(new.as_ref()));
        let partition = self.partition_of(place.0)?;
        let used_bytes = partition.used_bytes - before + after;
        if used_bytes > partition.size_bytes && after > before {
            return Ok(false);
        }
        partition.used_bytes = used_bytes;
        let has_value = |entry: &Entry| entry.value.is_some();
        self.keys += u64::from(new.as_ref().is_some_and(has_value));
        let before = match new {
            Some(entry) => self.entries.insert(place.clone(), entry),
            None => self.entries.remove(place),
        };
        self.keys -= u64::from(before.as_ref().is_some_and(has_value));
        Ok(true)
    }

    fn put(
        &mut self,
        place: &(RingPosition, Key),
        value: Vec<u8>,
        options: PutOptions,
        now: UnixTime,
    ) -> Result<PutOutcome, EngineError> {
        self.partition_of(place.0)?;
        let before = self.entries.get(place);
        let version = before.map_or(Version::NONE, |entry| entry.version);
        if options.version > Version::NONE && options.version <= version {
            return Ok(PutOutcome::NotNewer(version));
        }
        let exists = before.is_some_and(|entry| entry.is_live(now));
        match options.mode {
            PutMode::AddOnly if exists => return Ok(PutOutcome::Exists),
            PutMode::UpdateOnly if !exists => return Ok(PutOutcome::NotFound),
            PutMode::IfVersion(expected) if expected != version => {
                return Ok(PutOutcome::OtherVersion(version));
            }
            _ => {}
        }
        self.writes += 1;
        let entry = Entry {
            value: Some(value),
            version: options.version.max(version),
            expires_at: options.expires_at,
            written: self.writes,
        };
        Ok(if self.replace(place, Some(entry))? { PutOutcome::Stored } else { PutOutcome::Full })
    }

    fn delete(
        &mut self,
        place: &(RingPosition, Key),
        version: Version,
        now: UnixTime,
    ) -> Result<DeleteOutcome, EngineError> {
        self.partition_of(place.0)?;
        let before = self.entries.get(place);
        let (known, exists) =
            before.map_or((Version::NONE, false), |entry| (entry.version, entry.is_live(now)));
        if version > Version::NONE && version <= known {
            return Ok(DeleteOutcome::NotNewer(known));
        }
        self.writes += 1;
        let version = version.max(known);
        let tombstone = Entry { value: None, version, expires_at: UnixTime::NEVER, written: self.writes };
        let left = (version > Version::NONE).then_some(tombstone);
        self.replace(place, left)?;
        Ok(if exists { DeleteOutcome::Deleted } else { DeleteOutcome::NotFound })
    }

    /// Removes the entries for which `is_removed` holds. Gives the bytes that they used.
    fn remove_if(&mut self, mut is_removed: impl FnMut(&(RingPosition, Key), &Entry) -> bool) -> u64 {
        let mut freed = 0;
        let (partitions, keys) = (&mut self.partitions, &mut self.keys);
        self.entries.retain(|place, entry| {
            if !is_removed(place, entry) {
                return true;
            }
            let bytes = entry_bytes(&place.1, entry);
            freed += bytes;
            *keys -= u64::from(entry.value.is_some());
            if let Some(partition) = partitions.iter_mut().find(|found| found.range.contains(place.0)) {
                partition.used_bytes -= bytes;
            }
            false
        });
        freed
    }
}

impl Engine for MemoryEngine {
    type Iterator = MemoryIterator;

    async fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        let front = value.record.get(RECORD_LAYOUT.value_offset(key.len())..).unwrap_or_default();
        let buffers = std::iter::once(front).chain(value.more.iter().flatten().map(|buffer| &buffer[..]));
        let bytes: Vec<u8> = buffers.flatten().copied().take(value.bytes).collect();
        if value.bytes > self.config.value_bytes_max || bytes.len() < value.bytes {
            return Ok(PutOutcome::TooLong);
        }
        self.state.lock().put(&self.place(key), bytes, options, self.clock.now())
    }

    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        let (place, now) = (self.place(key), self.clock.now());
        let state = self.state.lock();
        let Some(entry) = state.entries.get(&place).filter(|entry| entry.is_live(now)) else {
            return Ok(None);
        };
        let value = entry.value.as_deref().unwrap_or_default();
        let requested = range.within(value.len() as u32);
        let requested = &value[requested.start as usize..requested.end as usize];
        let mut buffer = Buffer::zeroed(requested.len());
        buffer.copy_from_slice(requested);
        Ok(Some(StoredValue {
            buffer: buffer.into(),
            offset: 0,
            bytes: requested.len() as u32,
            value_bytes: value.len() as u32,
            version: entry.version,
            expires_at: entry.expires_at,
        }))
    }

    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        self.state.lock().delete(&self.place(key), version, self.clock.now())
    }

    async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        let (place, now) = (self.place(key), self.clock.now());
        let state = self.state.lock();
        let live = state.entries.get(&place).filter(|entry| entry.is_live(now));
        Ok(live.map(|entry| KeyStatus {
            value_bytes: entry.value.as_ref().map_or(0, Vec::len),
            version: entry.version,
            expires_at: entry.expires_at,
        }))
    }

    async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        let mut from = match start.is_empty() {
            true => Bound::Unbounded,
            false => Bound::Included(self.place(start)),
        };
        loop {
            sink.yield_point().await;
            let now = self.clock.now();
            let state = self.state.lock();
            let mut following = state.entries.range((from, Bound::Unbounded));
            let Some((place, _)) = following.find(|(_, entry)| entry.is_live(now)) else { return Ok(()) };
            let place = place.clone();
            drop(state);
            if !sink.offer(place.1.as_bytes()) {
                return Ok(());
            }
            from = Bound::Excluded(place);
        }
    }

    async fn scan(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        let now = self.clock.now();
        let state = self.state.lock();
        let empty = Key::new(&[]).expect("an empty key is within bounds");
        for ((position, key), entry) in state.entries.range((range.first(), empty)..) {
            if *position > range.last() {
                break;
            }
            let live_value = entry.value.as_deref().filter(|_| entry.is_live(now));
            if entry.version < since || (live_value.is_none() && entry.version == Version::NONE) {
                continue;
            }
            let scanned = ScanEntry {
                position: *position,
                key: key.as_bytes(),
                version: entry.version,
                is_tombstone: live_value.is_none(),
                digest: live_value.map_or(0, |value| value_digest(value, entry.expires_at)),
            };
            if !sink.offer(&scanned) {
                break;
            }
        }
        Ok(())
    }

    async fn create_iterator(&self, options: IteratorOptions) -> Result<Option<MemoryIterator>, EngineError> {
        let (mut state, now) = (self.state.lock(), self.clock.now());
        if state.iterators == ITERATORS_MAX {
            return Ok(None);
        }
        let IteratorOptions { lower, upper, reverse, keys_only } = options;
        let is_within = |key: &Key| {
            lower.as_ref().is_none_or(|lower| key >= lower) && upper.as_ref().is_none_or(|upper| key < upper)
        };
        let live = state.entries.iter().filter(|((_, key), entry)| entry.is_live(now) && is_within(key));
        let mut pairs: Vec<_> = live
            .map(|((_, key), entry)| {
                (key.clone(), entry.value.clone().filter(|_| !keys_only).unwrap_or_default())
            })
            .collect();
        pairs.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        if reverse {
            pairs.reverse();
        }
        state.iterators += 1;
        Ok(Some(MemoryIterator { pairs, reverse, next: Mutex::new(0), state: self.state.clone() }))
    }

    async fn next_pairs(
        &self,
        iterator: &MemoryIterator,
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        let mut next = iterator.next.lock();
        while let Some((key, value)) = iterator.pairs.get(*next) {
            if !sink.has_space(key.len(), value.len()) {
                return Ok(IteratorProgress::HasNext);
            }
            sink.push(key.as_bytes(), value);
            *next += 1;
        }
        Ok(IteratorProgress::AtEnd)
    }

    async fn seek_iterator(&self, iterator: &MemoryIterator, key: &Key) -> Result<(), EngineError> {
        let is_passed = |other: &Key| if iterator.reverse { other > key } else { other < key };
        *iterator.next.lock() = iterator.pairs.partition_point(|(other, _)| is_passed(other));
        Ok(())
    }

    async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        let now = self.clock.now();
        self.state.lock().remove_if(|_, entry| entry.version < version && !entry.is_live(now));
        Ok(())
    }

    async fn give_up_space(&self, bytes: u64) -> Result<u64, EngineError> {
        let mut state = self.state.lock();
        let mut oldest: Vec<(u64, u64)> = state
            .entries
            .iter()
            .filter(|(_, entry)| entry.version == Version::NONE)
            .map(|((_, key), entry)| (entry.written, entry_bytes(key, entry)))
            .collect();
        oldest.sort_unstable();
        let (mut wanted, mut last) = (bytes, None);
        for (written, freed) in oldest {
            if wanted == 0 {
                break;
            }
            wanted = wanted.saturating_sub(freed);
            last = Some(written);
        }
        let is_given_up = |entry: &Entry| last.is_some_and(|last| entry.written <= last);
        Ok(state.remove_if(|_, entry| entry.version == Version::NONE && is_given_up(entry)))
    }

    async fn flush(&self) -> Result<(), EngineError> {
        Ok(())
    }

    async fn maintain(&self, _handle: &ReactorHandle, _report: impl FnMut(EngineError)) {}

    async fn close(&self) -> Result<(), EngineError> {
        Ok(())
    }

    fn record_layout(&self) -> RecordLayout {
        RECORD_LAYOUT
    }

    fn has_abandoned(&self) -> bool {
        false
    }

    fn statistics(&self) -> EngineStatistics {
        let state = self.state.lock();
        EngineStatistics {
            keys: state.keys,
            capacity_bytes: state.partitions.iter().map(|partition| partition.size_bytes).sum(),
            used_bytes: state.partitions.iter().map(|partition| partition.used_bytes).sum(),
            ..EngineStatistics::default()
        }
    }
}

impl Partitions for MemoryEngine {
    fn partitions(&self) -> Vec<PartitionInfo> {
        let mut partitions = self.state.lock().partitions.clone();
        partitions.sort_by_key(|partition| partition.range.first());
        partitions
    }

    async fn create_partition(&self, range: RingRange, device: u16) -> Result<u32, PartitionError> {
        let mut state = self.state.lock();
        if device >= self.config.devices {
            return Err(PartitionError::UnknownDevice(device));
        }
        if let Some(other) = state.partitions.iter().find(|partition| partition.range.overlaps(&range)) {
            return Err(PartitionError::Overlap(other.id));
        }
        let (id, size_bytes) = (state.next_partition, self.config.partition_bytes);
        state.partitions.push(PartitionInfo { id, range, device, size_bytes, used_bytes: 0 });
        state.next_partition += 1;
        Ok(id)
    }

    async fn split_partition(&self, id: u32, at: RingPosition) -> Result<u32, PartitionError> {
        let mut state = self.state.lock();
        let found = state.partitions.iter().position(|partition| partition.id == id);
        let index = found.ok_or(PartitionError::Unknown(id))?;
        let whole = state.partitions[index];
        let (below, above) = whole.range.split(at).ok_or(PartitionError::NotWithin(at))?;
        let moved = state.entries.iter().filter(|((position, _), _)| above.contains(*position));
        let moved_bytes: u64 = moved.map(|((_, key), entry)| entry_bytes(key, entry)).sum();
        let new = state.next_partition;
        state.next_partition += 1;
        state.partitions[index].range = below;
        state.partitions[index].used_bytes -= moved_bytes;
        state.partitions.push(PartitionInfo { id: new, range: above, used_bytes: moved_bytes, ..whole });
        Ok(new)
    }

    async fn free_partition(&self, id: u32) -> Result<(), PartitionError> {
        let mut state = self.state.lock();
        let found = state.partitions.iter().find(|partition| partition.id == id);
        let range = found.ok_or(PartitionError::Unknown(id))?.range;
        state.remove_if(|(position, _), _| range.contains(*position));
        state.partitions.retain(|partition| partition.id != id);
        Ok(())
    }
}
