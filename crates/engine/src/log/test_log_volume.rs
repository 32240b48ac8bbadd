//! A small open volume in memory, for tests of what works on it: its device lets others run before each operation, and loses or damages what
//! a test says. Out: also a recount of what lives in its chunks.

use super::chunk_directory::DIRECTORY_ID_BYTES;
use super::chunk_log::ChunkLog;
use super::chunk_pool::ChunkPool;
use super::core::LogCore;
use super::hash_prefix::{HashPrefix, initial_range};
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::sealed_sums::LiveContents;
use super::segment_buckets::{PreviousImage, StoreTotals};
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::segment_image::OldValue;
use super::segment_reads::ReadRepeats;
use super::segment_table::LogSegmentTable;
use super::settings::LogSettings;
use super::space_limits::SpaceLimits;
use super::store::{Store, StoreParts, granules_of};
use super::superblock::{LogCheckpoint, LogSuperblock};
use super::value_record::value_record_bytes;
use super::value_tail::{ValueTail, ValueTailConfig};
use super::volume::LogVolume;
use crate::common::record::LAYOUT;
use crate::common::volume_layout::superblock_units;
use crate::conformance::{record_of, value_of};
use crate::{Durability, EngineError, OpenConfig, PutOptions, PutOutcome, PutValue, ValueRange, WallClock};
use octokv_base::{Buffer, BufferPool, Key, Lba, Prng, UnixTime, Version};
use octokv_device::fault_injection::{FaultDevice, FaultPlan};
use octokv_device::{Device, DeviceFuture, Geometry, MemoryDevice, RamDisk};
use octokv_runtime::{block_on, yield_now};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub const UNIT_BYTES: u32 = 512;
pub const CHUNKS: u32 = 128;
pub const STORES: u16 = 2;

const VALUE_BYTES_MAX: u32 = 64 << 10;
const AREA_UNITS: u64 = 64;

/// Memory whose operations happen after a random number of turns of others.
struct LaterMemory {
    memory: Rc<MemoryDevice>,
    turns: RefCell<Prng>,
    reads: Rc<Cell<u64>>,
}

impl LaterMemory {
    fn later(&self, begin: impl FnOnce(&MemoryDevice) -> DeviceFuture + 'static) -> DeviceFuture {
        let (memory, turns) = (Rc::clone(&self.memory), self.turns.borrow_mut().below(4));
        DeviceFuture::boxed(async move {
            for _ in 0..turns {
                yield_now().await;
            }
            begin(&memory).await
        })
    }
}

impl Device for LaterMemory {
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }
    fn name(&self) -> &str {
        "later memory"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.reads.set(self.reads.get() + 1);
        self.later(move |memory| memory.read(at, buffer))
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.later(move |memory| memory.write(at, buffer))
    }
    fn flush(&self) -> DeviceFuture {
        self.later(|memory| memory.flush())
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.later(move |memory| memory.trim(at, blocks))
    }
}

/// The volume, and what a test does to it.
pub struct OpenTestVolume {
    pub core: LogCore,
    pub disk: MemoryDevice,
    pub faults: FaultPlan,
    /// The reads of the device so far.
    pub reads: Rc<Cell<u64>>,
    /// Milliseconds since 1970.
    pub clock: Arc<AtomicU64>,
}

/// What is counted of a volume.
#[derive(Debug, PartialEq, Eq)]
pub struct Recount {
    live: BTreeMap<ChunkNumber, (u32, u32)>,
    totals: Vec<StoreTotals>,
    used_bytes: u64,
}

impl OpenTestVolume {
    /// A new volume, with a superblock that no device has.
    pub fn new(seed: u64, durability: Durability, adjust: impl FnOnce(&mut LogSettings)) -> OpenTestVolume {
        OpenTestVolume::of_chunks((CHUNKS, 32), seed, durability, adjust)
    }

    /// A new volume of so many chunks, which have so many units.
    pub fn of_chunks(
        (chunks, chunk_units): (u32, u32),
        seed: u64,
        durability: Durability,
        adjust: impl FnOnce(&mut LogSettings),
    ) -> OpenTestVolume {
        let layout = LogLayout {
            unit_bytes: UNIT_BYTES,
            chunk_units,
            area_units: AREA_UNITS,
            chunks_start_unit: superblock_units(UNIT_BYTES) + 4 * AREA_UNITS,
            chunks,
            stores: STORES,
            granule_log2: 3,
        };
        assert!(layout.is_consistent());
        let ram = RamDisk::new(layout.units() * u64::from(UNIT_BYTES), UNIT_BYTES).unwrap();
        let memory = Rc::new(MemoryDevice::new(Arc::clone(&ram)));
        let reads = Rc::default();
        let later = LaterMemory { memory, turns: RefCell::new(Prng::new(seed)), reads: Rc::clone(&reads) };
        let faults = FaultPlan::default();
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(later), faults.clone()));
        let clock = Arc::new(AtomicU64::new(1_000));
        let now = Arc::clone(&clock);
        let config = OpenConfig {
            durability,
            cores: 1,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: 0,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::new(move || UnixTime(now.load(Ordering::Relaxed))),
            tokens: None,
        };
        let mut settings = LogSettings::new(&layout, &config);
        settings.segment_target_bytes = 200;
        adjust(&mut settings);
        let superblock = LogSuperblock {
            volume_id: 77,
            hash_seed: 5,
            layout,
            namespace: 1,
            value_bytes_max: VALUE_BYTES_MAX,
            generation: 1,
            incarnation: 1,
            checkpoint: LogCheckpoint::NONE,
            next_partition: STORES.into(),
            forgotten_below: Version::NONE,
            is_clean_shutdown: false,
        };
        let pool = ChunkPool::new(
            layout.chunks_start_unit,
            layout.chunk_sizes(),
            SpaceLimits::new(chunks, STORES.into(), layout.record_chunks_max(VALUE_BYTES_MAX)),
        );
        let stores = (0..STORES).map(|number| new_store(number, &superblock, &settings, &pool)).collect();
        let volume = LogVolume::new(superblock, pool, stores, 0, UNIT_BYTES, config, settings);
        let core = LogCore::new(volume, device, BufferPool::new(64 << 20));
        OpenTestVolume { core, disk: MemoryDevice::new(ram), faults, reads, clock }
    }

    pub fn stores(&self) -> &[Store] {
        &self.core.volume.stores
    }

    pub fn pool(&self) -> &ChunkPool {
        &self.core.volume.pool
    }

    /// Puts the value of an operation.
    ///
    /// # Errors
    /// The engine's.
    pub async fn put(
        &self,
        key: &Key,
        operation: u64,
        bytes: usize,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        let value = PutValue::new(record_of(LAYOUT, key, &value_of(key, operation, bytes)), bytes);
        self.core.put(key, value, options).await
    }

    /// The whole value of a key.
    ///
    /// # Errors
    /// The engine's.
    pub async fn get(&self, key: &Key) -> Result<Option<Vec<u8>>, EngineError> {
        let value = self.core.get(key, ValueRange::ALL).await?;
        Ok(value.map(|value| value.as_bytes().to_vec()))
    }

    /// Compares what the pool counts with the images, and the chunks of the logs with the pool. REQUIRES: nothing runs.
    pub fn check_counts(&self) {
        let volume = &self.core.volume;
        let (mut live, mut totals, mut used_bytes) = (BTreeMap::new(), Vec::new(), 0);
        for store in self.stores() {
            let counted = self.recount(store, &mut live, &mut used_bytes);
            assert_eq!(store.state.lock().busy.count(), 0, "segments are held");
            assert_eq!(store.state.lock().first_unentered(), None, "a record is under way");
            totals.push(counted);
        }
        let recount = Recount { live, totals, used_bytes };
        let mut chunks_in_logs = 0;
        let mut live = BTreeMap::new();
        for store in self.stores() {
            let state = store.state.lock();
            for chunk in state.keys.chunks().chain(state.values.chunks()) {
                let LiveContents { records, amount } = self.pool().live_of(chunk).expect("all are counted");
                if records > 0 || amount > 0 {
                    live.insert(chunk, (records, amount));
                }
                chunks_in_logs += 1;
            }
            // The reserved ones, and those that are not free yet.
            chunks_in_logs += 2 + state.retired.len() as u32;
        }
        let totals = self.stores().iter().map(|store| store.state.lock().totals).collect();
        let used_bytes = volume.passes.used_bytes();
        assert_eq!(Recount { live, totals, used_bytes }, recount);
        assert_eq!(self.pool().free() + chunks_in_logs, CHUNKS, "chunks are lost");
    }

    fn recount(
        &self,
        store: &Store,
        live: &mut BTreeMap<ChunkNumber, (u32, u32)>,
        used_bytes: &mut u64,
    ) -> StoreTotals {
        let mut totals = StoreTotals::default();
        let mut next = Some(HashPrefix::MIN);
        while let Some(prefix) = next {
            let mut repeats = ReadRepeats::default();
            let lookup =
                block_on(self.core.read_image(store, prefix, &mut repeats), || ()).expect("an image");
            next = lookup.level.next_prefix(prefix);
            let Some(image) = lookup.image else { continue };
            let reference = store.state.lock().table.get(lookup.level.segment_of(prefix).0);
            let (chunk, _) = self.pool().chunk_of(reference.unit()).expect("in a chunk");
            let owner = self.pool().owner_of(reference.unit()).expect("of a log").0;
            assert_eq!((owner.partition, owner.kind), (store.id, LogKind::Keys));
            assert_eq!(store.state.lock().keys.chunk_at(owner.index), Some(chunk));
            add(live, chunk, u32::from(reference.chain()));
            *used_bytes += u64::from(reference.chain()) * u64::from(UNIT_BYTES);
            for entry in image.entries.iter() {
                self.recount_entry(store, &entry, &mut totals, live, used_bytes);
            }
        }
        totals
    }

    fn recount_entry(
        &self,
        store: &Store,
        entry: &SegmentEntry<'_>,
        totals: &mut StoreTotals,
        live: &mut BTreeMap<ChunkNumber, (u32, u32)>,
        used_bytes: &mut u64,
    ) {
        totals.entry_bytes += entry.encoded_bytes() as u64;
        if !entry.contents.is_tombstone() {
            totals.keys += 1;
            *used_bytes += DIRECTORY_ID_BYTES as u64;
        }
        let EntryContents::Value { bytes, at } = &entry.contents else { return };
        if *at == ValuePlace::Nowhere {
            return;
        }
        let record_bytes = value_record_bytes(entry.key.len(), *bytes, &entry.meta);
        totals.live_granules += u64::from(record_bytes.div_ceil(8));
        let value = OldValue { at: at.clone(), record_bytes };
        for (chunk, granules) in granules_of(&value, self.core.volume.layout()) {
            let owner = self.pool().owner_of(self.pool().first_unit_of(chunk)).expect("of a log").0;
            assert_eq!((owner.partition, owner.kind), (store.id, LogKind::Values));
            assert_eq!(store.state.lock().values.chunk_at(owner.index), Some(chunk), "in front of the head");
            add(live, chunk, granules);
            *used_bytes += u64::from(granules) * 8;
        }
    }

    /// Changes bytes of the device, from one within a unit on.
    pub fn damage(&self, unit: u64, at: usize) {
        let (lba, bytes) = (self.core.volume.lba(unit), UNIT_BYTES as usize);
        let read = block_on(self.disk.read(lba, Buffer::zeroed(bytes)), || ()).into_read();
        let mut buffer = read.expect("memory is read");
        buffer[at] ^= 0x40;
        assert_eq!(block_on(self.disk.write(lba, buffer), || ()).result, Ok(()));
    }
}

fn add(live: &mut BTreeMap<ChunkNumber, (u32, u32)>, chunk: ChunkNumber, amount: u32) {
    let (records, amounts) = live.entry(chunk).or_default();
    *records += 1;
    *amounts += amount;
}

fn new_store(number: u16, superblock: &LogSuperblock, settings: &LogSettings, pool: &ChunkPool) -> Store {
    let id = number.into();
    let [keys, values] = [LogKind::Keys, LogKind::Values]
        .map(|kind| ChunkLog::create(id, kind, pool).expect("a new pool has chunks"));
    let config = ValueTailConfig {
        volume_id: superblock.volume_id,
        partition: id,
        incarnation: superblock.incarnation,
        layout: superblock.layout,
        rewrites_tail: settings.rewrites_tail,
    };
    let tail = ValueTail::new(config, values.tail());
    let parts = StoreParts {
        table: LogSegmentTable::default(),
        keys,
        values,
        totals: StoreTotals::default(),
        last_sequence: 0,
        previous: PreviousImage::NONE,
        incarnation: superblock.incarnation,
        stated_value_chunk: ChunkIndex(0),
        retired: Vec::new(),
        pinned: Vec::new(),
        replay_start: ChunkIndex(0),
        is_lost: false,
    };
    Store::new(id, initial_range(number, STORES), parts, tail)
}
