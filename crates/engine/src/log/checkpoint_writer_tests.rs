//! Tests of the checkpoint writer: loading gives back every page and every store, also if stores change during the write, if the images fill
//! the area, and after power loss.

use super::checkpoint_writer::{
    CheckpointTarget, SnapshotSource, SnapshotStart, segments_max, write_checkpoint,
};
use super::hash_prefix::{HashLevel, SegmentNumber, initial_range};
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::segment_buckets::{PreviousImage, StoreTotals, ValueTailPlace};
use super::segment_ref::{SEGMENT_REF_BYTES, SegmentRef};
use super::segment_table::LogSegmentTable;
use super::store_image::{
    CheckpointId, LoadedStore, PAGE_SEGMENTS, PinnedChunk, ReplayStart, StoreImageFormat, StoreImageLoader,
    StoreStart, ValueChunkUse,
};
use super::superblock::{LogCheckpoint, LogSuperblock};
use crate::EngineError;
use crate::common::image_stream::{ImageLost, ImageReader};
use crate::common::superblock_io::{read_superblock, write_superblock};
use crate::common::unit_reader::UnitReader;
use octokv_base::map::FxHashSet;
use octokv_base::{Prng, Version};
use octokv_device::DeviceError;
use octokv_device::power_loss::{PowerLossDisk, PowerLossMode};
use octokv_runtime::block_on;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};

const VOLUME_ID: u64 = 77;

const LAYOUT: LogLayout = LogLayout {
    unit_bytes: 512,
    chunk_units: 16,
    area_units: 2048,
    chunks_start_unit: 32 + 4 * 2048,
    chunks: 64,
    stores: 2,
    granule_log2: 3,
};

fn level_of(segments: u64) -> HashLevel {
    let level = segments.ilog2();
    HashLevel { level: level as u8, split: (segments - (1 << level)) as u32 }
}

/// A store that changes whenever a page was copied.
struct ChangingStore {
    partition: u32,
    table: RefCell<LogSegmentTable>,
    random: RefCell<Prng>,
    /// How many segments each change adds.
    growth: u64,
    changes: Cell<u32>,
    /// The value chunks in its list.
    value_chunks: u32,
    /// The bytes of each copied page: loading has to give the same.
    copied: RefCell<Vec<Vec<u8>>>,
    finished: RefCell<Option<StoreStart>>,
}

impl ChangingStore {
    fn new(partition: u32, segments: u64, growth: u64) -> ChangingStore {
        let mut table = LogSegmentTable::new(level_of(segments));
        let mut random = Prng::new(u64::from(partition) + segments);
        for segment in (0..segments).step_by(3) {
            let image = SegmentRef::new(random.below(1 << 36), 1 + random.below(63) as u8);
            table.set(SegmentNumber(segment as u32), image);
        }
        assert!(table.lock(SegmentNumber(0)));
        ChangingStore {
            partition,
            table: RefCell::new(table),
            random: RefCell::new(random),
            growth,
            changes: Cell::new(0),
            value_chunks: 5,
            copied: RefCell::default(),
            finished: RefCell::default(),
        }
    }

    fn loaded(&self) -> LoadedStore {
        LoadedStore { start: self.finished.borrow().clone().unwrap(), pages: self.copied.borrow().clone() }
    }
}

impl SnapshotSource for ChangingStore {
    fn begin(&self) -> SnapshotStart {
        let replay = ReplayStart {
            sequence: 9,
            index: ChunkIndex(20),
            unit: 3,
            incarnation: 2,
            previous: PreviousImage { segment: SegmentNumber(1), chain: 2 },
        };
        self.copied.borrow_mut().clear();
        SnapshotStart { partition: self.partition, level: self.table.borrow().level(), replay }
    }

    fn copy_page(&self, page: usize, entries: &mut Vec<u8>) {
        let mut table = self.table.borrow_mut();
        let (first, count) = table.page_segments(page);
        table.copy_page(page, entries);
        self.copied.borrow_mut().push(entries.clone());
        let mut random = self.random.borrow_mut();
        let changed = SegmentNumber(first.0 + random.below(count.into()) as u32);
        table.set(changed, SegmentRef::new(random.below(1 << 36), 1));
        let segments = table.segments() + self.growth;
        table.grow_to(level_of(segments));
        self.changes.set(self.changes.get() + 1);
    }

    fn finish(&self, start: &SnapshotStart) -> StoreStart {
        let chunk = |number: u32| ChunkNumber(32 * self.partition + number);
        let use_of =
            |number| ValueChunkUse { chunk: chunk(10 + number), live_records: 5, live_granules: number };
        // The last page has the segments of the start alone.
        let segments = start.level.segments() as usize;
        if let Some(page) = self.copied.borrow_mut().last_mut() {
            page.truncate((segments - (segments - 1) / PAGE_SEGMENTS * PAGE_SEGMENTS) * SEGMENT_REF_BYTES);
        }
        let state = StoreStart {
            partition: start.partition,
            range: initial_range(self.partition as u16, 2),
            level: start.level,
            is_counted: true,
            replay: start.replay,
            durable_through: 8 + u64::from(self.changes.get()),
            key_head: ChunkIndex(20),
            value_head: ChunkIndex(40),
            value_tail: ValueTailPlace { index: ChunkIndex(40 + self.value_chunks - 1), granule: 7 },
            next_key_chunk: chunk(0),
            next_value_chunk: chunk(1),
            totals: StoreTotals { keys: 11, live_granules: 22, entry_bytes: 33 },
            key_chunks: vec![chunk(2), chunk(3)],
            value_chunks: (0..self.value_chunks).map(use_of).collect(),
            pinned: vec![PinnedChunk { log: LogKind::Keys, index: ChunkIndex(19), chunk: chunk(4) }],
        };
        *self.finished.borrow_mut() = Some(state.clone());
        state
    }
}

fn superblock_of(generation: u64, checkpoint: LogCheckpoint) -> LogSuperblock {
    LogSuperblock {
        volume_id: VOLUME_ID,
        hash_seed: 1,
        layout: LAYOUT,
        namespace: 1,
        value_bytes_max: 1000,
        generation,
        incarnation: 3,
        checkpoint,
        next_partition: 2,
        forgotten_below: Version::from_bits(0),
        is_clean_shutdown: false,
    }
}

fn target_of(layout: LogLayout, last: LogCheckpoint) -> CheckpointTarget {
    let id = CheckpointId { volume_id: VOLUME_ID, checkpoint_id: last.id + 1 };
    CheckpointTarget { layout, id, last, incarnation: 3 }
}

/// A disk without superblocks, and with other bytes everywhere else.
fn disk_of(layout: &LogLayout) -> PowerLossDisk {
    let mut contents = vec![0xaa; (layout.units() * u64::from(layout.unit_bytes)) as usize];
    contents[..16 << 10].fill(0);
    PowerLossDisk::new(contents, 512)
}

fn write(
    disk: &PowerLossDisk,
    target: &CheckpointTarget,
    stores: &[ChangingStore],
) -> Result<LogCheckpoint, EngineError> {
    let mut random = Prng::new(1);
    block_on(write_checkpoint(disk, target, stores), || {
        disk.complete_one(&mut random);
    })
}

/// Loads a checkpoint.
fn load(
    disk: &PowerLossDisk,
    layout: LogLayout,
    checkpoint: LogCheckpoint,
) -> Result<Vec<LoadedStore>, ImageLost> {
    let Some(area) = checkpoint.area else { return Ok(Vec::new()) };
    let id = CheckpointId { volume_id: VOLUME_ID, checkpoint_id: checkpoint.id };
    let mut loader = StoreImageLoader::new(id, layout, checkpoint.stores);
    let mut random = Prng::new(1);
    let starts = [0, 1].map(|copy| layout.area_start_unit(area, copy));
    let mut reader = ImageReader::new(UnitReader::new(disk, layout.unit_bytes), starts, checkpoint.bytes);
    while !loader.is_done() {
        let read = block_on(reader.next::<StoreImageFormat>(|bytes| loader.load(bytes)), || {
            disk.complete_one(&mut random);
        });
        read?;
    }
    Ok(loader.finish().expect("a store that could be written"))
}

fn loaded_of(stores: &[ChangingStore]) -> Vec<LoadedStore> {
    stores.iter().map(ChangingStore::loaded).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn what_was_copied_is_loaded_although_stores_change_meanwhile(
        segments in [1..40_000u64, 1..40_000u64], growth in 0..10_000u64, old_area in proptest::option::of(0..2u8),
    ) {
        let last = match old_area {
            None => LogCheckpoint::NONE,
            area => LogCheckpoint { area, id: 4, incarnation: 1, bytes: 9, stores: 1 },
        };
        let disk = disk_of(&LAYOUT);
        let stores = [0, 1].map(|store| ChangingStore::new(store, segments[store as usize], growth));
        let checkpoint = write(&disk, &target_of(LAYOUT, last), &stores).unwrap();
        prop_assert_eq!((checkpoint.area, checkpoint.id), (Some(last.next_area()), last.id + 1));
        prop_assert_eq!((checkpoint.incarnation, checkpoint.stores), (3, 2));
        let loaded = load(&disk, LAYOUT, checkpoint).unwrap();
        for (store, segments) in loaded.iter().zip(segments) {
            prop_assert_eq!(store.start.level.segments(), segments);
        }
        prop_assert!(loaded == loaded_of(&stores));
        // The other area, and the chunks, are as they were.
        let bytes = disk.contents();
        let range = |area| {
            let start = LAYOUT.area_start_unit(area, 0) as usize * 512;
            start..start + 2 * LAYOUT.area_units as usize * 512
        };
        prop_assert!(bytes[range(1 - last.next_area())].iter().all(|&byte| byte == 0xaa));
        prop_assert!(bytes[LAYOUT.chunks_start_unit as usize * 512..].iter().all(|&byte| byte == 0xaa));
    }
}

#[test]
fn as_many_segments_as_an_area_holds_fit_with_the_longest_lists() {
    // A small area, so that the lists count.
    let layout = LogLayout { area_units: 320, chunks_start_unit: 32 + 1280, ..LAYOUT };
    let most = segments_max(&layout, 2);
    for first in [most / 2, 1, most - 1, PAGE_SEGMENTS as u64] {
        let mut stores =
            [ChangingStore::new(0, first, 100), ChangingStore::new(1, most - first, PAGE_SEGMENTS as u64)];
        stores.iter_mut().for_each(|store| store.value_chunks = 22);
        let disk = disk_of(&layout);
        let checkpoint = write(&disk, &target_of(layout, LogCheckpoint::NONE), &stores).unwrap();
        assert!(checkpoint.bytes <= 320 * 512, "{} bytes", checkpoint.bytes);
        assert!(load(&disk, layout, checkpoint).unwrap() == loaded_of(&stores), "{first} of {most}");
    }
    // The bound is not far from what fits.
    let spare = 64 * 12 + 2 * 48;
    let stores = [ChangingStore::new(0, most + spare, 0)];
    let disk = disk_of(&layout);
    let outcome = write(&disk, &target_of(layout, LogCheckpoint::NONE), &stores);
    assert_eq!(outcome, Err(DeviceError::NoSpace.into()));
    let behind = layout.area_start_unit(0, 1) as usize * 512;
    let bytes = disk.contents();
    let (start, end) = (behind + layout.area_units as usize * 512, bytes.len());
    assert!(bytes[start..end].iter().all(|&byte| byte == 0xaa), "nothing behind the area is written");
}

#[test]
fn either_copy_suffices() {
    let stores = [ChangingStore::new(0, 20_000, 3), ChangingStore::new(1, 9, 0)];
    let disk = disk_of(&LAYOUT);
    let checkpoint = write(&disk, &target_of(LAYOUT, LogCheckpoint::NONE), &stores).unwrap();
    for copy in 0..2 {
        let mut bytes = disk.contents();
        let start = LAYOUT.area_start_unit(0, copy) as usize * 512;
        bytes[start..start + LAYOUT.area_units as usize * 512].fill(0x55);
        let damaged = PowerLossDisk::new(bytes, 512);
        assert!(load(&damaged, LAYOUT, checkpoint).unwrap() == loaded_of(&stores), "copy {copy}");
    }
}

#[test]
fn after_power_loss_there_is_the_old_checkpoint_or_the_new_one() {
    let disk = disk_of(&LAYOUT);
    let mut random = Prng::new(1);
    let mut put_superblock = |superblock: &LogSuperblock| {
        let outcome = block_on(write_superblock(&disk, superblock), || {
            disk.complete_one(&mut random);
        });
        assert_eq!(outcome, Ok(()));
    };
    let mut last = LogCheckpoint::NONE;
    put_superblock(&superblock_of(0, last));
    let formatted = disk.events();
    // What the checkpoint of a number has: several writes, and the third one is shorter than the first in the same area.
    let mut expected = vec![Vec::new()];
    for (generation, segments) in [(1, [50_000, 9_000]), (2, [60_000, 8_192]), (3, [100, 20_000])] {
        let stores = [0, 1].map(|store| ChangingStore::new(store, segments[store as usize], 77));
        last = write(&disk, &target_of(LAYOUT, last), &stores).unwrap();
        assert_eq!(last.id, generation);
        expected.push(loaded_of(&stores));
        put_superblock(&superblock_of(generation, last));
    }
    let mut found = FxHashSet::default();
    for events in formatted..=disk.events() {
        for mode in PowerLossMode::ALL {
            let at = format!("after {events} of {} events, {mode:?}", disk.events());
            let image = disk.image_after_power_loss(events, mode, &mut random);
            let after = PowerLossDisk::new(image, 512);
            let read = block_on(read_superblock::<LogSuperblock>(&after), || {
                after.complete_one(&mut random);
            });
            let (superblock, _) = read.unwrap_or_else(|error| panic!("{error}, {at}"));
            let loaded = load(&after, LAYOUT, superblock.checkpoint);
            let id = superblock.checkpoint.id as usize;
            assert!(loaded.as_ref() == Ok(&expected[id]), "checkpoint {id} {at}");
            found.insert(id);
        }
    }
    assert_eq!(found.len(), 4);
}
