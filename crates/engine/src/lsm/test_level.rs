//! For the tests of cursors over levels: a level of tables in memory, whose reads are noted and fail on demand, and the list of its entries.

use super::cursor::EntryCursor;
use super::entry::Position;
use super::level_cursor::{LevelCursor, LevelCursorConfig};
use super::prefetch_degree::PrefetchBudget;
use super::reclaim::ReclaimQueue;
use super::table::cache::BlockCache;
use super::table::info::TablePlace;
use super::table::io::{TableCounters, TableIo};
use super::table::scan_lengths::ScanLengths;
use super::table::spare_blocks::SpareBlocks;
use super::table::writer::{TableWriter, TableWriterConfig};
use super::table_meta::{TableFields, TableMeta, TableParts};
use super::test_cursor::TestEntry;
use super::tree_version::TreeVersion;
use super::version_edit::VersionEdit;
use crate::VolumePlace;
use crate::common::allocator::Extent;
use octokv_base::{Buffer, BufferPool, Lba, UnixTime, Version};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::{Device, DeviceFuture, Geometry, MemoryDevice, RamDisk};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

pub const UNIT_BYTES: u32 = 512;
pub const LEVEL: usize = 3;

/// First block and bytes of reads.
pub type Reads = Rc<RefCell<Vec<(Lba, usize)>>>;

/// A device that notes where it is read.
struct ReadLog {
    inner: MemoryDevice,
    reads: Reads,
}

impl Device for ReadLog {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.reads.borrow_mut().push((at, buffer.len()));
        self.inner.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.inner.write(at, buffer)
    }
    fn flush(&self) -> DeviceFuture {
        self.inner.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.inner.trim(at, blocks)
    }
}

pub struct TestLevel {
    pub io: Rc<TableIo>,
    pub faults: FaultPlan,
    pub reads: Reads,
    pub entries: Vec<TestEntry>,
    /// The entries of each table.
    pub ranges: Vec<Range<usize>>,
    pub places: Vec<TablePlace>,
    pub tables: Vec<Arc<TableMeta>>,
    pub version: Arc<TreeVersion>,
}

impl TestLevel {
    /// The entries in order, in tables that begin where `begins` says; all entries of a key are in one table.
    pub fn new(entries: Vec<TestEntry>, begins: impl Fn(usize) -> bool, cache_bytes: u64) -> TestLevel {
        let inner = MemoryDevice::new(RamDisk::new(2 << 20, UNIT_BYTES).unwrap());
        let (faults, reads) = (FaultPlan::default(), Reads::default());
        let log = ReadLog { inner, reads: Rc::clone(&reads) };
        let io = Rc::new(TableIo {
            device: Rc::new(FaultDevice::new(Rc::new(log), faults.clone())),
            pool: BufferPool::new(1 << 20),
            cache: Arc::new(BlockCache::new(cache_bytes)),
            volume_id: 7,
            unit_bytes: UNIT_BYTES,
            place: VolumePlace::default(),
            counters: TableCounters::default(),
            scan_lengths: ScanLengths::default(),
            spare_blocks: SpareBlocks::default(),
            prefetch_budget: PrefetchBudget::new(1 << 20),
            unreadable: None,
        });
        let mut cuts: Vec<usize> =
            (1..entries.len()).filter(|&at| entries[at - 1].key != entries[at].key && begins(at)).collect();
        cuts.insert(0, 0);
        cuts.push(entries.len());
        let ranges = cuts.windows(2).map(|cut| cut[0]..cut[1]).filter(|range| !range.is_empty());
        let mut level = TestLevel {
            io,
            faults,
            reads,
            ranges: ranges.collect(),
            entries,
            places: Vec::new(),
            tables: Vec::new(),
            version: Arc::default(),
        };
        let (reclaim, mut location) = (ReclaimQueue::new(), 1);
        for range in level.ranges.clone() {
            let table = level.write(range, location, &reclaim);
            location += table.extent().units;
            level.tables.push(table);
        }
        let added_tables = level.tables.iter().map(|table| (LEVEL, Arc::clone(table))).collect();
        let edit = VersionEdit { added_tables, ..VersionEdit::default() };
        level.version = Arc::new(level.version.edited(&edit).unwrap());
        level.reads.borrow_mut().clear();
        level
    }

    fn write(&mut self, range: Range<usize>, location: u64, reclaim: &Arc<ReclaimQueue>) -> Arc<TableMeta> {
        let id = 1 + self.places.len() as u64;
        let run = Extent { location, units: 1000 };
        let config = TableWriterConfig { block_bytes: 256, compresses: false };
        let mut writer = TableWriter::new(Rc::clone(&self.io), id, run, config);
        let write = async {
            for entry in &self.entries[range] {
                writer.add(&entry.get()).await.unwrap();
            }
            writer.finish().await.unwrap()
        };
        let info = block_on(write, || ());
        self.places.push(info.place);
        let TablePlace { front_bytes, second_unit, descriptor_bytes, filter_bytes, index_bytes, .. } =
            info.place;
        let fields = TableFields {
            id,
            extent: info.extent,
            parts: TableParts { front_bytes, second_unit, descriptor_bytes, filter_bytes, index_bytes },
            bytes: info.data_bytes,
            entries: info.entries,
            tombstones: info.tombstones,
            smallest_sequence: info.smallest_sequence,
            largest_sequence: info.largest_sequence,
            largest_tombstone_version: info.largest_version,
            earliest_expiry: info.earliest_expiry,
            is_settled: false,
            first_key: info.first_key.to_vec(),
            last_key: info.last_key.to_vec(),
            segment_bytes: Vec::new(),
        };
        TableMeta::new(&fields, reclaim)
    }

    pub fn cursor(&self, config: LevelCursorConfig) -> LevelCursor {
        LevelCursor::new(Rc::clone(&self.io), Arc::clone(&self.version), LEVEL, config)
    }

    pub fn cursor_of_list(&self, config: LevelCursorConfig) -> LevelCursor {
        LevelCursor::of_tables(Rc::clone(&self.io), self.tables.clone(), config)
    }

    /// The first block of each copy of a table's index.
    pub fn index_blocks(&self, table: usize) -> [Lba; 2] {
        let place = &self.places[table];
        let offset = u64::from(place.descriptor_bytes) + u64::from(place.filter_bytes);
        place.copies(UNIT_BYTES).map(|copy| self.io.lba(place, copy + offset))
    }

    /// How the first copy of a table's index is read. In [`level_of`], no data block is read so.
    pub fn index_read(&self, table: usize) -> (Lba, usize) {
        (self.index_blocks(table)[0], UNIT_BYTES as usize)
    }

    /// How often the first copy of a table's index was read.
    pub fn index_reads(&self, table: usize) -> usize {
        let read = self.index_read(table);
        self.reads.borrow().iter().filter(|&&other| other == read).count()
    }

    pub fn damage(&self, block: Lba) {
        let to = Lba(block.0 + 1);
        self.faults.add(FaultRule::within(OpFilter::Read, block, to, InjectedFault::Error(61)));
    }

    pub fn lose_index(&self, table: usize) {
        self.index_blocks(table).into_iter().for_each(|block| self.damage(block));
    }

    pub fn slow_reads(&self, polls: u32) {
        self.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Slow { polls }));
    }

    pub fn lower_bound(&self, position: Position<'_>) -> usize {
        self.entries.partition_point(|entry| entry.get().position() < position)
    }

    /// Asserts that a cursor is at an entry of the model.
    pub fn assert_at(&self, cursor: &LevelCursor, model: Option<usize>) {
        assert_eq!(cursor.entry(), model.map(|model| self.entries[model].get()));
    }
}

/// A common beginning, which makes descriptors long.
pub fn key(number: u32) -> Vec<u8> {
    [&[b'k'; 60][..], &number.to_be_bytes()].concat()
}

fn entry(number: u32, sequence: u64) -> TestEntry {
    let (key, value) = (key(number), Some(vec![1; 20]));
    TestEntry { key, sequence, version: Version::NONE, expires_at: UnixTime::NEVER, value }
}

/// Tables of 40 keys each: of five to seven blocks.
pub fn level_of(tables: usize, cache_bytes: u64) -> TestLevel {
    let entries = (0..tables as u32 * 40).map(|key| entry(key, 1)).collect();
    let level = TestLevel::new(entries, |at| at % 40 == 0, cache_bytes);
    for place in &level.places {
        // The index lies in one unit. The data behind it does not begin with a block in that unit.
        let [index_end, index_bytes] = [place.metadata_bytes(), u64::from(place.index_bytes)];
        let unit_bytes = u64::from(UNIT_BYTES);
        assert_eq!((index_end - 1) / unit_bytes, (index_end - index_bytes) / unit_bytes, "{place:?}");
        assert!((index_end - 1) % unit_bytes > unit_bytes - 200, "{place:?}");
    }
    level
}
