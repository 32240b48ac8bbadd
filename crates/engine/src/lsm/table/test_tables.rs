//! Tables for tests: entries by a seed, a device whose reads are counted and fail on demand, and a plain model.

use super::cache::BlockCache;
use super::cursor::{TableCursor, TableCursorConfig};
use super::info::TableInfo;
use super::io::{TableCounters, TableIo};
use super::key_block::{KeyBlock, KeyBlockBuilder};
use super::reader::{FoundInTable, SearchKey, TableReader};
use super::scan_lengths::ScanLengths;
use super::spare_blocks::SpareBlocks;
use super::stored_entry::DataBlock;
use super::writer::{TableWriter, TableWriterConfig};
use crate::common::allocator::Extent;
use crate::lsm::cursor::EntryCursor;
use crate::lsm::entry::{EntryValue, Position, TreeEntry, ValueAddress};
use crate::lsm::prefetch_degree::PrefetchBudget;
use crate::{EngineError, VolumePlace};
use octokv_base::{Buffer, BufferPool, Lba, Prng, UnixTime, Version};
use octokv_device::fault_injection::{FaultDevice, FaultPlan};
use octokv_device::{Device, DeviceFuture, Geometry, MemoryDevice, RamDisk};
use octokv_runtime::block_on;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;

pub(super) const BLOCK_BYTES: u32 = 512;
pub(super) const VOLUME_ID: u64 = 0x0123_4567_89ab_cdef;
/// The first unit of the run of most tables.
pub(super) const LOCATION: u64 = 40;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum OwnedValue {
    Tombstone,
    Inline(Vec<u8>),
    InSegment(ValueAddress),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnedEntry {
    pub(super) key: Vec<u8>,
    pub(super) sequence: u64,
    pub(super) version: Version,
    pub(super) expires_at: UnixTime,
    pub(super) value: OwnedValue,
}

impl OwnedEntry {
    pub(super) fn as_entry(&self) -> TreeEntry<'_> {
        let value = match &self.value {
            OwnedValue::Tombstone => EntryValue::Tombstone,
            OwnedValue::Inline(value) => EntryValue::Inline(value),
            OwnedValue::InSegment(address) => EntryValue::InSegment(*address),
        };
        let OwnedEntry { key, sequence, version, expires_at, .. } = self;
        TreeEntry { key, sequence: *sequence, version: *version, expires_at: *expires_at, value }
    }

    pub(super) fn of(entry: TreeEntry<'_>) -> OwnedEntry {
        let value = match entry.value {
            EntryValue::Tombstone => OwnedValue::Tombstone,
            EntryValue::Inline(value) => OwnedValue::Inline(value.to_vec()),
            EntryValue::InSegment(address) => OwnedValue::InSegment(address),
        };
        let TreeEntry { key, sequence, version, expires_at, .. } = entry;
        OwnedEntry { key: key.to_vec(), sequence, version, expires_at, value }
    }
}

/// A plain entry with an inline value.
/// A data block with a value of so many bytes, in the memory that `memory` gives for its bytes.
pub(super) fn data_block(value_bytes: usize, memory: impl FnOnce(usize) -> Vec<u8>) -> Arc<DataBlock> {
    let (mut builder, mut bytes) = (KeyBlockBuilder::default(), Vec::new());
    let entry = inline(b"key", 1, &vec![1; value_bytes]);
    builder.push(&entry.key, |bytes| entry.as_entry().encode(bytes));
    builder.finish(&mut bytes);
    let mut memory = memory(bytes.len());
    memory.extend_from_slice(&bytes);
    Arc::new(KeyBlock::decode(memory, |_| true).expect("a block"))
}

pub(super) fn inline(key: &[u8], sequence: u64, value: &[u8]) -> OwnedEntry {
    OwnedEntry {
        key: key.to_vec(),
        sequence,
        version: Version::NONE,
        expires_at: UnixTime::NEVER,
        value: OwnedValue::Inline(value.to_vec()),
    }
}

/// What entries a seed gives.
#[derive(Clone, Copy, Debug)]
pub(super) struct EntryShape {
    pub(super) keys: u64,
    pub(super) key_bytes_max: u64,
    pub(super) value_bytes_max: u64,
    /// The most entries of a key, of which some have many.
    pub(super) versions_max: u64,
}

pub(super) fn random_key(random: &mut Prng, shape: &EntryShape) -> Vec<u8> {
    let bytes = match random.below(8) {
        0 => shape.key_bytes_max,
        1 => 1 + random.below(3),
        _ => 1 + random.below(shape.key_bytes_max),
    };
    // Few different bytes in front: long common prefixes.
    let mut key = vec![b'k'; bytes as usize];
    let random_bytes = (bytes.min(6)) as usize;
    random.fill(&mut key[bytes as usize - random_bytes..]);
    if random.one_in(2) {
        key.iter_mut().for_each(|byte| *byte = [0, 1, b'k', 255][*byte as usize % 4]);
    }
    key
}

fn random_value(random: &mut Prng, value_bytes_max: u64) -> OwnedValue {
    match random.below(8) {
        0 | 1 => OwnedValue::Tombstone,
        2 | 3 => OwnedValue::InSegment(ValueAddress {
            segment: random.below(9) as u32 * 1000,
            unit: random.next_u64() as u32,
            value_bytes: random.below(1 << 20) as u32,
        }),
        kind => {
            let bytes = if kind == 4 { 0 } else { random.below(value_bytes_max + 1) };
            let mut value = vec![b'v'; bytes as usize];
            if random.one_in(2) {
                random.fill(&mut value);
            }
            OwnedValue::Inline(value)
        }
    }
}

/// Entries in the order of a table.
pub(super) fn random_entries(seed: u64, shape: EntryShape) -> Vec<OwnedEntry> {
    let random = &mut Prng::new(seed);
    let mut entries = BTreeMap::new();
    for _ in 0..shape.keys {
        let key = random_key(random, &shape);
        let versions = if random.one_in(3) { 1 + random.below(shape.versions_max) } else { 1 };
        for _ in 0..versions {
            let sequence = 1 + random.below(1 << 20);
            let value = random_value(random, shape.value_bytes_max);
            let has_expiry = value != OwnedValue::Tombstone && random.one_in(4);
            let entry = OwnedEntry {
                key: key.clone(),
                sequence,
                version: if random.one_in(4) { Version::from_bits(random.next_u64()) } else { Version::NONE },
                expires_at: if has_expiry { UnixTime(random.below(1 << 40)) } else { UnixTime::NEVER },
                value,
            };
            entries.insert((key.clone(), u64::MAX - sequence), entry);
        }
    }
    entries.into_values().collect()
}

/// A device that counts its reads and writes.
struct CountingDevice {
    inner: Rc<dyn Device>,
    reads: Rc<Cell<u64>>,
    writes: Rc<Cell<u64>>,
}

impl Device for CountingDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.reads.set(self.reads.get() + 1);
        self.inner.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.writes.set(self.writes.get() + 1);
        self.inner.write(at, buffer)
    }
    fn flush(&self) -> DeviceFuture {
        self.inner.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.inner.trim(at, blocks)
    }
}

/// A volume in memory for tables, and what one core has of it.
pub(super) struct TestVolume {
    pub(super) io: Rc<TableIo>,
    pub(super) faults: FaultPlan,
    /// Reads and writes that reached the device.
    pub(super) reads: Rc<Cell<u64>>,
    pub(super) writes: Rc<Cell<u64>>,
}

impl TestVolume {
    pub(super) fn new(bytes: u64, unit_bytes: u32, cache_bytes: u64) -> TestVolume {
        let disk = RamDisk::new(bytes, BLOCK_BYTES).expect("memory");
        TestVolume::on(Rc::new(MemoryDevice::new(disk)), unit_bytes, cache_bytes, 16 << 20)
    }

    pub(super) fn on(
        device: Rc<dyn Device>,
        unit_bytes: u32,
        cache_bytes: u64,
        pool_bytes: usize,
    ) -> TestVolume {
        let [reads, writes] = [(); 2].map(|()| Rc::new(Cell::new(0)));
        let counting = CountingDevice { inner: device, reads: Rc::clone(&reads), writes: Rc::clone(&writes) };
        let faults = FaultPlan::default();
        let io = TableIo {
            device: Rc::new(FaultDevice::new(Rc::new(counting), faults.clone())),
            pool: BufferPool::new(pool_bytes),
            cache: Arc::new(BlockCache::new(cache_bytes)),
            volume_id: VOLUME_ID,
            unit_bytes,
            place: VolumePlace::new(1, 2),
            counters: TableCounters::default(),
            scan_lengths: ScanLengths::default(),
            spare_blocks: SpareBlocks::default(),
            prefetch_budget: PrefetchBudget::new(1 << 20),
            unreadable: None,
        };
        TestVolume { io: Rc::new(io), faults, reads, writes }
    }

    /// The same device with an empty cache, and statistics of its own.
    pub(super) fn reopened(&self) -> TestVolume {
        let io = TableIo {
            device: Rc::clone(&self.io.device),
            pool: self.io.pool.clone(),
            cache: Arc::new(BlockCache::new(self.io.cache.capacity_bytes())),
            counters: TableCounters::default(),
            scan_lengths: ScanLengths::default(),
            spare_blocks: SpareBlocks::default(),
            prefetch_budget: PrefetchBudget::new(1 << 20),
            unreadable: None,
            ..*self.io
        };
        let [reads, writes] = [&self.reads, &self.writes].map(Rc::clone);
        TestVolume { io: Rc::new(io), faults: self.faults.clone(), reads, writes }
    }

    pub(super) fn run(&self) -> Extent {
        let blocks = self.io.device.geometry().blocks;
        let units = blocks * u64::from(BLOCK_BYTES) / u64::from(self.io.unit_bytes);
        Extent { location: LOCATION, units: units - LOCATION }
    }

    pub(super) fn write(&self, id: u64, config: TableWriterConfig, entries: &[OwnedEntry]) -> TableInfo {
        let mut writer = TableWriter::new(Rc::clone(&self.io), id, self.run(), config);
        block_on(
            async {
                for entry in entries {
                    writer.add(&entry.as_entry()).await.expect("space and no fault");
                }
                writer.finish().await.expect("no fault")
            },
            || (),
        )
    }

    pub(super) fn reader(&self, table: &TableInfo) -> TableReader {
        TableReader::new(Rc::clone(&self.io), table.place)
    }

    pub(super) fn cursor(&self, table: &TableInfo, config: TableCursorConfig) -> TableCursor {
        TableCursor::new(self.reader(table), config)
    }

    pub(super) fn get(
        &self,
        table: &TableInfo,
        key: &[u8],
        snapshot: u64,
    ) -> Result<Option<OwnedEntry>, EngineError> {
        let found = block_on(self.reader(table).get(SearchKey::new(key), snapshot), || ())?;
        Ok(found.map(|found: FoundInTable| OwnedEntry::of(found.entry(key))))
    }

    /// The bytes of a unit of a run.
    pub(super) fn unit(&self, location: u64, unit: u64) -> Vec<u8> {
        let unit_bytes = self.io.unit_bytes;
        let at = Lba((location + unit) * u64::from(unit_bytes / BLOCK_BYTES));
        let read = self.io.device.read(at, Buffer::zeroed(unit_bytes as usize));
        block_on(read, || ()).into_read().expect("no fault").to_vec()
    }

    /// The bytes of the run at `LOCATION` from an offset on.
    pub(super) fn bytes(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let unit_bytes = u64::from(self.io.unit_bytes);
        let units = offset / unit_bytes..(offset + bytes as u64).div_ceil(unit_bytes);
        let run: Vec<u8> = units.flat_map(|unit| self.unit(LOCATION, unit)).collect();
        run[(offset % unit_bytes) as usize..][..bytes].to_vec()
    }

    pub(super) fn set_bytes(&self, offset: u64, bytes: &[u8]) {
        let unit_bytes = u64::from(self.io.unit_bytes);
        let first = offset / unit_bytes;
        let units = first..(offset + bytes.len() as u64).div_ceil(unit_bytes);
        let mut run: Vec<u8> = units.clone().flat_map(|unit| self.unit(LOCATION, unit)).collect();
        run[(offset % unit_bytes) as usize..][..bytes.len()].copy_from_slice(bytes);
        for (unit, bytes) in units.zip(run.chunks(unit_bytes as usize)) {
            self.set_unit(LOCATION, unit, bytes);
        }
    }

    pub(super) fn set_unit(&self, location: u64, unit: u64, bytes: &[u8]) {
        let unit_bytes = self.io.unit_bytes;
        assert_eq!(bytes.len(), unit_bytes as usize);
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        let at = Lba((location + unit) * u64::from(unit_bytes / BLOCK_BYTES));
        block_on(self.io.device.write(at, buffer), || ()).result.expect("no fault");
    }
}

/// The newest entry of a key up to a snapshot.
pub(super) fn model_get<'a>(entries: &'a [OwnedEntry], key: &[u8], snapshot: u64) -> Option<&'a OwnedEntry> {
    let from_key = &entries[entries.partition_point(|entry| entry.key[..] < *key)..];
    from_key.iter().take_while(|entry| entry.key == key).find(|entry| entry.sequence <= snapshot)
}

/// The number of entries before a position.
pub(super) fn model_seek(entries: &[OwnedEntry], position: Position<'_>) -> usize {
    entries.partition_point(|entry| entry.as_entry().position() < position)
}

pub(super) fn at(cursor: &TableCursor) -> Option<OwnedEntry> {
    cursor.entry().map(OwnedEntry::of)
}

pub(super) fn keys_of(entries: &[OwnedEntry]) -> BTreeSet<Vec<u8>> {
    entries.iter().map(|entry| entry.key.clone()).collect()
}
