//! Tests of the images of a checkpoint: round trips, damage, streams in the wrong order, and fields that contradict each other.

use super::hash_prefix::{HashLevel, SegmentNumber};
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::segment_buckets::{PreviousImage, SEQUENCE_LIMIT, StoreTotals, TOTAL_LIMIT, ValueTailPlace};
use super::segment_ref::SegmentRef;
use super::store_image::{
    CheckpointId, LoadedStore, PAGE_SEGMENTS, PinnedChunk, ReplayStart, STORE_IMAGE_HEADER_BYTES,
    StoreImageFormat, StoreImageLoader, StoreImageProblem, StoreStart, ValueChunkUse, append_page,
    append_store,
};
use crate::common::image_stream::{ImageFormat, ImageReader, ImageWriter};
use crate::common::unit_reader::UnitReader;
use octokv_base::{Lba, Prng, RingPosition, RingRange, crc32c};
use octokv_device::{MemoryDevice, RamDisk};
use octokv_runtime::block_on;
use proptest::collection::vec;
use proptest::prelude::*;

const CHECKPOINT: CheckpointId = CheckpointId { volume_id: 7, checkpoint_id: 11 };

const LAYOUT: LogLayout = LogLayout {
    unit_bytes: 512,
    chunk_units: 128,
    area_units: 1024,
    chunks_start_unit: 32 + 4096,
    chunks: 300,
    stores: 4,
    granule_log2: 3,
};

/// The state of a store with so many segments, and a distinct value in each field. Its chunks begin at `100 · (partition mod 3)`.
fn example(partition: u32, segments: u64) -> StoreStart {
    let mut level = HashLevel::FIRST;
    while level.segments() < segments {
        level = level.advanced();
    }
    let chunk = |number: u32| ChunkNumber(100 * (partition % 3) + number);
    let value_chunk =
        |number| ValueChunkUse { chunk: chunk(number), live_records: 5, live_granules: 6 + number };
    StoreStart {
        partition,
        range: RingRange::new(RingPosition(u128::from(partition) << 64), RingPosition(u128::MAX - 3))
            .unwrap(),
        level,
        is_counted: true,
        replay: ReplayStart {
            sequence: 0x1122_3344_5566,
            index: ChunkIndex(21),
            unit: 128,
            incarnation: 0x31,
            previous: PreviousImage { segment: SegmentNumber(0x32), chain: 0x33 },
        },
        durable_through: 0x1122_3344_5570,
        key_head: ChunkIndex(20),
        value_head: ChunkIndex(40),
        value_tail: ValueTailPlace { index: ChunkIndex(42), granule: 8192 },
        next_key_chunk: chunk(0),
        next_value_chunk: chunk(1),
        totals: StoreTotals { keys: 0x41, live_granules: 0x42, entry_bytes: 0x43 },
        key_chunks: vec![chunk(9), chunk(2)],
        value_chunks: vec![value_chunk(3), value_chunk(4), value_chunk(5)],
        pinned: vec![
            PinnedChunk { log: LogKind::Keys, index: ChunkIndex(19), chunk: chunk(6) },
            PinnedChunk { log: LogKind::Values, index: ChunkIndex(39), chunk: chunk(7) },
        ],
    }
}

/// A store with a place for each of its segments, some of which are empty.
fn loaded(start: StoreStart) -> LoadedStore {
    let mut random = Prng::new(start.partition.into());
    let mut segment = || match random.below(3) {
        0 => SegmentRef::EMPTY,
        _ => SegmentRef::new(random.below(1 << 36), 1 + random.below(63) as u8),
    };
    let segments = start.level.segments() as usize;
    let bytes: Vec<u8> = (0..segments).flat_map(|_| segment().to_bytes()).collect();
    LoadedStore { start, pages: bytes.chunks(6 * PAGE_SEGMENTS).map(<[u8]>::to_vec).collect() }
}

/// The images of a store, each by itself.
fn images(store: &LoadedStore) -> Vec<Vec<u8>> {
    let mut images = Vec::new();
    for (page, bytes) in store.pages.iter().enumerate() {
        let (segments, _) = bytes.as_chunks();
        // A segment that is held is one that is not, after the next opening.
        let segments = segments.iter().map(|&segment| SegmentRef::from_bytes(segment).with_lock(true));
        let first = SegmentNumber((page * PAGE_SEGMENTS) as u32);
        let mut image = Vec::new();
        append_page(&mut image, CHECKPOINT, store.start.partition, first, segments);
        images.push(image);
    }
    let mut image = Vec::new();
    append_store(&mut image, CHECKPOINT, &store.start);
    images.push(image);
    images
}

fn load(images: &[Vec<u8>], stores: u32) -> Result<Vec<LoadedStore>, StoreImageProblem> {
    let mut loader = StoreImageLoader::new(CHECKPOINT, LAYOUT, stores);
    for image in images {
        if loader.is_done() {
            break;
        }
        if let Some(bytes) = loader.load(image) {
            assert_eq!(bytes, image.len());
        }
    }
    loader.finish()
}

/// What loading a store says whose state `change` changed.
fn problem_of(change: impl FnOnce(&mut StoreStart)) -> Result<(), StoreImageProblem> {
    let mut store = loaded(example(0, 5));
    change(&mut store.start);
    load(&images(&store), 1).map(|found| assert_eq!(found, [store]))
}

#[test]
fn stores_come_back_from_a_stream_in_two_copies() {
    let table = [(3, 1), (1, 8191), (0, 8192), (2, 8193), (4, 20_000)];
    let stores = table.map(|(partition, segments)| loaded(example(partition, segments)));
    let device = MemoryDevice::new(RamDisk::new(8 << 20, 512).unwrap());
    let starts = [0, 1].map(|copy| LAYOUT.area_start_unit(0, copy));
    let bytes = block_on(
        async {
            let mut writer = ImageWriter::new(&device, starts.map(Lba), 512);
            for image in stores.iter().flat_map(images) {
                writer.pending().extend_from_slice(&image);
                writer.write_chunks().await.unwrap();
            }
            writer.finish().await.unwrap()
        },
        || (),
    );
    let mut reader = ImageReader::new(UnitReader::new(&device, 512), starts, bytes);
    let mut loader = StoreImageLoader::new(CHECKPOINT, LAYOUT, stores.len() as u32);
    while !loader.is_done() {
        block_on(reader.next::<StoreImageFormat>(|bytes| loader.load(bytes)), || ()).unwrap();
    }
    assert_eq!(reader.damaged_copies(), 0);
    assert_eq!(loader.finish(), Ok(stores.to_vec()));
}

#[test]
fn any_flipped_bit_is_found() {
    for image in images(&loaded(example(0, 5))) {
        for bit in 0..8 * image.len() {
            let mut image = image.clone();
            image[bit / 8] ^= 1 << (bit % 8);
            let mut loader = StoreImageLoader::new(CHECKPOINT, LAYOUT, 1);
            assert_eq!(loader.load(&image), None, "bit {bit}");
        }
    }
}

#[test]
fn images_of_another_checkpoint_or_volume_are_none() {
    let [page, _] = &images(&loaded(example(0, 5)))[..] else { panic!("one page") };
    for checkpoint in
        [CheckpointId { volume_id: 8, ..CHECKPOINT }, CheckpointId { checkpoint_id: 10, ..CHECKPOINT }]
    {
        assert_eq!(StoreImageLoader::new(checkpoint, LAYOUT, 1).load(page), None, "{checkpoint:?}");
    }
}

#[test]
fn images_in_another_order_are_none_or_a_problem() {
    let [one, two] =
        [(0, 20_000), (1, 5)].map(|(partition, segments)| images(&loaded(example(partition, segments))));
    let take = |images: &[&Vec<u8>]| images.iter().map(|&image| image.clone()).collect::<Vec<_>>();
    // A page is missing, pages are swapped, another store's page is between.
    let orders = [
        vec![&one[0], &one[2], &one[3]],
        vec![&one[1], &one[0], &one[2], &one[3]],
        vec![&one[0], &two[0], &one[2], &one[3]],
    ];
    for order in orders {
        assert_eq!(load(&take(&order), 1), Err(StoreImageProblem::Segments));
    }
    assert_eq!(StoreImageLoader::new(CHECKPOINT, LAYOUT, 1).load(&one[1]), None, "the second page first");
    assert_eq!(load(&one[..3], 1), Err(StoreImageProblem::Incomplete));
    assert_eq!(load(&one[3..], 1), Err(StoreImageProblem::Segments), "a store without pages");
    let twice = [&two[..], &two[..]].concat();
    assert_eq!(load(&twice, 2), Err(StoreImageProblem::SamePartition));
    assert_eq!(load(&two, 2), Err(StoreImageProblem::Incomplete), "one store of two");
    assert_eq!(load(&two, 1), Err(StoreImageProblem::Partition), "the second store of one");
}

#[test]
fn the_last_value_of_each_field_is_loaded_and_the_next_is_a_problem() {
    type Change = fn(&mut StoreStart, u64);
    use StoreImageProblem::{Chunks, Counts, Places, Segments};
    let limits: [(&str, StoreImageProblem, u64, u64, Change); 15] = [
        ("sequence", Counts, SEQUENCE_LIMIT - 1, SEQUENCE_LIMIT, |store, sequence| {
            (store.replay.sequence, store.durable_through) = (sequence, SEQUENCE_LIMIT - 1);
        }),
        ("durable", Counts, 0x1122_3344_5565, 0x1122_3344_5564, |store, through| {
            store.durable_through = through
        }),
        ("keys", Counts, TOTAL_LIMIT - 1, TOTAL_LIMIT, |store, keys| store.totals.keys = keys),
        ("image before", Counts, 63, 64, |store, chain| store.replay.previous.chain = chain as u8),
        ("replay in chunks", Places, 21, 22, |store, index| store.replay.index = ChunkIndex(index as u32)),
        ("replay from the head on", Places, 20, 19, |store, index| {
            store.replay.index = ChunkIndex(index as u32)
        }),
        ("replay in a chunk", Places, 128, 129, |store, unit| store.replay.unit = unit as u32),
        ("value tail", Places, 42, 41, |store, index| store.value_tail.index = ChunkIndex(index as u32)),
        ("end of a value chunk", Places, 8192, 8193, |store, granule| {
            store.value_tail.granule = granule as u32
        }),
        ("pinned below the head", Places, 39, 40, |store, index| {
            store.pinned[1].index = ChunkIndex(index as u32)
        }),
        ("last index", Places, u32::MAX as u64 - 2, u32::MAX as u64 - 1, |store, index| {
            (store.key_head, store.replay.index) = (ChunkIndex(index as u32), ChunkIndex(index as u32));
        }),
        ("chunk", Chunks, 299, 300, |store, chunk| store.next_key_chunk = ChunkNumber(chunk as u32)),
        ("a chunk of both logs", Chunks, 10, 9, |store, chunk| {
            store.value_chunks[0].chunk = ChunkNumber(chunk as u32)
        }),
        ("granules", Chunks, 8192, 8193, |store, granules| {
            store.value_chunks[0].live_granules = granules as u32
        }),
        ("segments", Segments, 1, 2, |store, split| store.level.split = split as u32),
    ];
    for (field, problem, last, next, change) in limits {
        assert_eq!(problem_of(|store| change(store, last)), Ok(()), "{field}");
        assert_eq!(problem_of(|store| change(store, next)), Err(problem), "{field}");
    }
    assert_eq!(problem_of(|store| store.value_chunks.clear()), Err(Places), "no chunk for the tail");
}

/// The last image of a store, with bytes changed under a valid checksum.
fn with_bytes(image: &[u8], at: usize, bytes: &[u8]) -> Vec<u8> {
    let mut image = image.to_vec();
    image[at..at + bytes.len()].copy_from_slice(bytes);
    let crc = crc32c(&image[8..]);
    image[4..8].copy_from_slice(&crc.to_le_bytes());
    image
}

#[test]
fn unknown_values_are_problems() {
    let images = images(&loaded(example(0, 5)));
    let lists = STORE_IMAGE_HEADER_BYTES + 140;
    let pinned = lists + 2 * 4 + 3 * 12;
    let table: [(usize, &[u8], StoreImageProblem); 8] = [
        (80, &[1], StoreImageProblem::Unknown),
        (83, &[2], StoreImageProblem::Unknown),
        (pinned + 8, &[2], StoreImageProblem::Unknown),
        (48, &[255; 16], StoreImageProblem::Range),
        (82, &[32], StoreImageProblem::Segments),
        (88, &[6], StoreImageProblem::Segments),
        (lists - 4, &[3], StoreImageProblem::Length),
        (lists - 12, &[255; 4], StoreImageProblem::Length),
    ];
    for (at, bytes, problem) in table {
        let changed = [images[0].clone(), with_bytes(&images[1], at, bytes)];
        assert_eq!(load(&changed, 1), Err(problem), "byte {at}");
    }
    // A locked segment, and one on another device.
    for (at, byte) in [(53, 0x80), (53, 0x40)] {
        let changed = [with_bytes(&images[0], at, &[byte]), images[1].clone()];
        assert_eq!(load(&changed, 1), Err(StoreImageProblem::SegmentPlace));
    }
    let short =
        [with_bytes(&images[0][..54], 36, &[1]), with_bytes(&images[0], 32, &0x2000u32.to_le_bytes())];
    assert_eq!(load(&short, 1), Err(StoreImageProblem::Segments), "a page behind one that is not full");
}

#[test]
fn a_header_claims_no_more_than_an_image_has() {
    let [page, store] = &images(&loaded(example(1, 8192)))[..] else { panic!("one page") };
    assert_eq!(StoreImageFormat::claimed_bytes(page), Some(48 + 6 * 8192));
    assert_eq!(StoreImageFormat::claimed_bytes(store), Some(48 + 140 + 2 * 4 + 3 * 12 + 2 * 12));
    assert_eq!(StoreImageFormat::claimed_bytes(&page[..47]), None);
    for (at, bytes) in [(0, &[0; 4][..]), (28, &[2]), (36, &8193u32.to_le_bytes())] {
        assert_eq!(StoreImageFormat::claimed_bytes(&with_bytes(page, at, bytes)), None, "byte {at}");
    }
    assert_eq!(StoreImageFormat::claimed_bytes(&with_bytes(store, 36, &[255; 4])), None);
}

#[test]
fn the_layout_of_images_is_fixed() {
    let images = images(&loaded(example(1, 5)));
    let [page, store] = &images[..] else { panic!("one page") };
    assert_eq!(page[..4], *b"OKVS");
    let header = [7, 0, 0, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    assert_eq!(page[8..48], [&header[..], &[0; 8], &[5, 0, 0, 0], &[0; 8]].concat());
    assert_eq!(store[8..48], [&header[..], &[1], &[0; 7], &[208, 0, 0, 0], &[0; 8]].concat());
    let u32_at = |at: usize| u32::from_le_bytes(store[at..at + 4].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(store[at..at + 8].try_into().unwrap());
    let u128_at = |at: usize| u128::from_le_bytes(store[at..at + 16].try_into().unwrap());
    assert_eq!([48, 64].map(u128_at), [1 << 64, u128::MAX - 3]);
    assert_eq!(store[80..84], [0, 0, 2, 1]);
    assert_eq!([84, 88].map(u32_at), [1, 5]);
    assert_eq!([92, 120].map(u64_at), [0x1122_3344_5566, 0x1122_3344_5570]);
    assert_eq!([100, 104, 108, 112, 116].map(u32_at), [21, 128, 0x31, 0x32, 0x33]);
    assert_eq!([128, 132, 136, 140].map(u32_at), [20, 40, 42, 8192]);
    assert_eq!([144, 148].map(u32_at), [100, 101]);
    assert_eq!([152, 160, 168].map(u64_at), [0x41, 0x42, 0x43]);
    assert_eq!([176, 180, 184].map(u32_at), [2, 3, 2]);
    assert_eq!([188, 192].map(u32_at), [109, 102]);
    assert_eq!([196, 200, 204].map(u32_at), [103, 5, 9]);
    assert_eq!([232, 236, 240].map(u32_at), [19, 106, 0]);
    assert_eq!([244, 248, 252].map(u32_at), [39, 107, 1]);
    assert_eq!(store.len(), 256);
}

proptest! {
    #[test]
    fn no_bytes_under_valid_checksums_panic(changes in vec((8usize..256, any::<u8>()), 1..8), page: bool) {
        let images = images(&loaded(example(1, 5)));
        let mut changed = images.clone();
        let image = &mut changed[usize::from(!page)];
        for (at, byte) in changes {
            let at = 8 + (at - 8) % (image.len() - 8);
            *image = with_bytes(image, at, &[byte]);
        }
        if let Ok(stores) = load(&changed, 1) {
            prop_assert!(stores[0].start.check(&LAYOUT).is_ok());
        }
    }

    #[test]
    fn no_bytes_panic(mut bytes in vec(any::<u8>(), 0..300), kind in 0u8..3) {
        for (at, fixed) in [(0, b'O'), (1, b'K'), (2, b'V'), (3, b'S'), (28, kind), (37, 0), (38, 0), (39, 0)] {
            bytes.get_mut(at).into_iter().for_each(|byte| *byte = fixed);
        }
        prop_assert_eq!(StoreImageLoader::new(CHECKPOINT, LAYOUT, 1).load(&bytes), None);
    }
}
