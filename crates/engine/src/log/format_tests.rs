//! Tests of the format of the log engine: layouts of known devices and of all sizes, power loss, and formats over older volumes.

use super::format::{choose_layout, device_layout, format};
use super::hash_prefix::SegmentNumber;
use super::log_layout::{CHUNKS_MAX, CHUNKS_MIN, LogLayout, STORE_CHUNKS_MIN};
use super::log_place::{ChunkIndex, ChunkNumber};
use super::segment_buckets::{
    ImagePlace, ImageRole, ImageState, PreviousImage, StoreTotals, UncheckedBuckets, ValueTailPlace,
    encode_image,
};
use super::segment_image::SegmentImage;
use super::superblock::{LogCheckpoint, LogSuperblock};
use crate::FormatConfig;
use crate::common::superblock_io::read_superblock;
use crate::common::volume_layout::UNIT_BYTES;
use crate::open_error::OpenError::{self, BlockTooLarge, TooSmall, ValuesTooLong};
use octokv_base::Prng;
use octokv_base::map::FxHashSet;
use octokv_device::power_loss::{PowerLossDisk, PowerLossMode};
use octokv_device::{Geometry, MemoryDevice, RamDisk};
use octokv_runtime::block_on;
use proptest::prelude::*;

fn small_values() -> FormatConfig {
    FormatConfig { value_bytes_max: 100_000, namespace: 3, seed: 8, ..FormatConfig::default() }
}

fn layout_of(device_bytes: u64, unit_bytes: u32, config: &FormatConfig) -> Result<LogLayout, OpenError> {
    let geometry = Geometry { block_bytes: 512, blocks: device_bytes / 512, volatile: false };
    choose_layout(geometry, 512, &FormatConfig { unit_bytes: Some(unit_bytes), ..*config })
}

/// The size of the smallest device, by the error of a smaller one.
fn need_bytes_of(unit_bytes: u32, config: &FormatConfig) -> u64 {
    match layout_of(0, unit_bytes, config) {
        Err(TooSmall { have_bytes: 0, need_bytes }) => need_bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_layouts_of_known_devices() {
    // Bytes of the device and of a unit; bytes of a chunk, chunks, stores, log2 of a granule, bytes of an area's copy.
    type Row = (u64, u32, u32, u32, u16, u8, u64);
    let table: [Row; 8] = [
        (8 << 20, 512, 64 << 10, 123, 4, 3, 64 << 10),
        (24 << 20, 512, 64 << 10, 377, 16, 3, 94 << 10),
        (24 << 20, 4096, 256 << 10, 94, 4, 3, 64 << 10),
        (40_000_000_000, 512, 512 << 10, 75_985, 32, 3, 40_414_720),
        (960_000_000_000, 512, 8 << 20, 113_992, 32, 3, 939_462_144),
        (960_000_000_000, 4096, 8 << 20, 114_328, 32, 3, 236_339_200),
        (10 << 40, 4096, 16 << 20, 654_717, 32, 4, 2_694_971_392),
        (40 << 40, 4096, 16 << 20, 2_095_095, 32, 5, 8_623_620_096),
    ];
    for (bytes, unit_bytes, chunk_bytes, chunks, stores, granule_log2, area_bytes) in table {
        let layout = layout_of(bytes, unit_bytes, &small_values()).unwrap();
        assert!(layout.is_consistent(), "{layout:?}");
        assert_eq!(
            (layout.chunk_bytes(), layout.chunks, layout.stores, layout.granule_log2),
            (chunk_bytes, chunks, stores, granule_log2),
            "{bytes} B, units of {unit_bytes}"
        );
        assert_eq!(layout.area_units * u64::from(unit_bytes), area_bytes, "{bytes} B, units of {unit_bytes}");
    }
}

#[test]
fn the_unit_is_the_smallest_that_the_device_writes_well_and_has_numbers_for() {
    let unit_of = |preferred_write_bytes, bytes: u64| {
        let geometry = Geometry { block_bytes: 512, blocks: bytes / 512, volatile: false };
        choose_layout(geometry, preferred_write_bytes, &small_values()).map(|layout| layout.unit_bytes)
    };
    for (preferred, bytes, unit_bytes) in [(512, 1 << 30, 512), (4096, 1 << 30, 4096), (512, 40 << 40, 1024)]
    {
        assert_eq!(unit_of(preferred, bytes), Ok(unit_bytes), "{preferred}, {bytes}");
    }
    let geometry = Geometry { block_bytes: 8192, blocks: 1 << 20, volatile: false };
    let refused = choose_layout(geometry, 8192, &small_values());
    assert_eq!(refused, Err(BlockTooLarge { block_bytes: 8192, unit_bytes: 4096 }));
}

/// Checks a layout against its device and configuration.
fn assert_suits(layout: &LogLayout, device_bytes: u64, config: &FormatConfig) {
    let at = || format!("{device_bytes} B: {layout:?}");
    assert!(layout.is_consistent(), "{}", at());
    assert!(layout.units() * u64::from(layout.unit_bytes) <= device_bytes, "{}", at());
    assert!(u64::from(config.value_bytes_max) <= layout.value_bytes_limit(), "{}", at());
    // Nothing is left over that a chunk fits into, unless no more can be numbered.
    let used_bytes = device_bytes.min(32 << 40);
    let left = used_bytes - (layout.units() * u64::from(layout.unit_bytes)).min(used_bytes);
    let is_filled = left <= u64::from(layout.chunk_bytes()) || layout.chunks == CHUNKS_MAX;
    assert!(is_filled, "{left} B left, {}", at());
    // Each copy of an area has room for the lists of all stores, and for pages.
    let lists = 12 * u64::from(layout.chunks) + 1024 * u64::from(layout.stores);
    assert!(layout.area_units * u64::from(layout.unit_bytes) > lists, "{}", at());
    let stores = u32::from(layout.stores);
    let is_halved = stores == u32::from(config.partitions)
        || 2 * stores * STORE_CHUNKS_MIN > layout.chunks
        || (2 * stores + 1) * STORE_CHUNKS_MIN > layout.chunks;
    assert!(is_halved, "{}", at());
}

#[test]
fn every_device_from_the_smallest_up_has_a_consistent_layout() {
    let config = small_values();
    for unit_bytes in UNIT_BYTES {
        let need_bytes = need_bytes_of(unit_bytes, &config);
        let chunk_bytes = (64 << 10).max(64 * u64::from(unit_bytes));
        assert_eq!(need_bytes, (16 << 10) + 4 * (64 << 10) + 64 * chunk_bytes, "{unit_bytes}");
        for have_bytes in [0, 512, need_bytes / 2, need_bytes - 512] {
            let refused = layout_of(have_bytes, unit_bytes, &config);
            assert_eq!(refused, Err(TooSmall { have_bytes, need_bytes }), "{unit_bytes}");
        }
        assert_eq!(layout_of(need_bytes, unit_bytes, &config).unwrap().chunks, CHUNKS_MIN);
        let mut bytes = need_bytes;
        while bytes < 64 << 40 {
            let layout = layout_of(bytes, unit_bytes, &config).unwrap();
            assert_suits(&layout, bytes / 512 * 512, &config);
            // Each block at first, then about one size of 1,000 in geometric order.
            bytes += if bytes < need_bytes + (1 << 20) { 512 } else { bytes / 1000 };
        }
    }
}

proptest! {
    #[test]
    fn every_configuration_gives_a_consistent_layout_or_says_what_would_suit(
        bytes in prop_oneof![1u64..64 << 20, 1 << 20..1u64 << 46],
        unit in 0..4usize,
        partitions in prop_oneof![Just(32), 1..=u16::MAX],
        chunk_log2 in proptest::option::of(9..=24u32),
        value_bytes_max in 1..1u32 << 29,
    ) {
        let chunk_bytes = chunk_log2.map(|log2| 1 << log2);
        let config = FormatConfig { partitions, chunk_bytes, value_bytes_max, ..small_values() };
        let of = |bytes: u64, config: &FormatConfig| layout_of(bytes, UNIT_BYTES[unit], config);
        match of(bytes, &config) {
            Ok(layout) => {
                assert_suits(&layout, bytes / 512 * 512, &config);
                if let Some(chunk_bytes) = chunk_bytes {
                    prop_assert_eq!(layout.chunk_bytes(), chunk_bytes.max(16 * UNIT_BYTES[unit]));
                }
            }
            Err(TooSmall { have_bytes, need_bytes }) => {
                prop_assert!(have_bytes < need_bytes);
                let with_one = FormatConfig { value_bytes_max: 1, ..config };
                let layout = of(need_bytes.next_multiple_of(512), &with_one);
                prop_assert_eq!(layout.map(|layout| layout.chunks), Ok(CHUNKS_MIN));
                prop_assert!(of(need_bytes - 512, &with_one).is_err());
            }
            Err(ValuesTooLong { value_bytes_max: longest }) => {
                prop_assert!(u64::from(value_bytes_max) > longest);
                let with = |longest: u64| FormatConfig { value_bytes_max: longest as u32, ..config };
                prop_assert!(of(bytes, &with(longest)).is_ok());
                prop_assert!(of(bytes, &with(longest + 1)).is_err());
            }
            Err(other) => prop_assert!(false, "{:?}", other),
        }
    }
}

#[test]
fn chunks_grow_with_the_longest_value() {
    let chunk_bytes_of = |bytes, value_bytes_max| {
        let config = FormatConfig { value_bytes_max, ..small_values() };
        layout_of(bytes, 512, &config).map(|layout| layout.chunk_bytes())
    };
    for (value_bytes_max, chunk_bytes) in [
        (4 << 20, 64 << 10),
        ((4 << 20) + 1, 128 << 10),
        (64 << 20, 1 << 20),
        ((64 << 20) + 1, 2 << 20),
        (256 << 20, 4 << 20),
    ] {
        assert_eq!(chunk_bytes_of(4 << 30, value_bytes_max), Ok(chunk_bytes), "{value_bytes_max}");
    }
    assert_eq!(chunk_bytes_of(4 << 30, (256 << 20) + 1), Err(ValuesTooLong { value_bytes_max: 256 << 20 }));
    // An eighth of the chunks, of the size that leaves the most.
    let value_bytes_max = 123 * (64 << 10) / 8;
    assert_eq!(chunk_bytes_of(8 << 20, value_bytes_max), Ok(64 << 10));
    let refused = Err(ValuesTooLong { value_bytes_max: value_bytes_max.into() });
    assert_eq!(chunk_bytes_of(8 << 20, value_bytes_max + 1), refused);
}

#[test]
#[should_panic(expected = "a chunk of 98304 bytes")]
fn chunks_of_other_sizes_than_powers_of_two_are_no_configuration() {
    let _ = layout_of(1 << 30, 512, &FormatConfig { chunk_bytes: Some(96 << 10), ..small_values() });
}

/// Small, as in tests of the engine.
fn small_config(seed: u64) -> FormatConfig {
    FormatConfig {
        unit_bytes: Some(512),
        partitions: 2,
        chunk_bytes: Some(8 << 10),
        value_bytes_max: 1000,
        seed,
        ..FormatConfig::default()
    }
}

const DISK_BYTES: usize = 1 << 20;

/// Formats a disk that had these contents.
fn formatted(contents: Vec<u8>, config: &FormatConfig) -> PowerLossDisk {
    let (disk, mut random) = (PowerLossDisk::new(contents, 512), Prng::new(1));
    let outcome = block_on(format(&disk, config), || {
        disk.complete_one(&mut random);
    });
    assert_eq!(outcome, Ok(()));
    disk
}

fn superblock_on(disk: &PowerLossDisk) -> Result<LogSuperblock, OpenError> {
    let mut random = Prng::new(2);
    let read = block_on(read_superblock::<LogSuperblock>(disk), || {
        disk.complete_one(&mut random);
    });
    read.map(|(superblock, _)| superblock)
}

#[test]
fn a_format_writes_superblocks_the_volume_number_and_zeros_over_the_first_units_of_key_logs() {
    for unit_bytes in UNIT_BYTES {
        let config =
            FormatConfig { unit_bytes: Some(unit_bytes), chunk_bytes: Some(64 << 10), ..small_values() };
        let disk = formatted(vec![0xaa; 8 << 20], &config);
        let superblock = superblock_on(&disk).unwrap();
        let layout = layout_of(8 << 20, unit_bytes, &config).unwrap();
        let mut random = Prng::new(config.seed);
        let first = random.next_u64();
        assert_ne!(superblock.volume_id, first, "the disk may have had a volume of this number");
        let expected = LogSuperblock {
            volume_id: superblock.volume_id,
            hash_seed: random.next_u64(),
            layout,
            namespace: 3,
            value_bytes_max: 100_000,
            generation: 0,
            incarnation: 0,
            checkpoint: LogCheckpoint::NONE,
            next_partition: 4,
            forgotten_below: octokv_base::Version::from_bits(0),
            is_clean_shutdown: true,
        };
        assert_eq!(superblock, expected);
        let bytes = disk.contents();
        assert_eq!(device_layout(&bytes[..16 << 10]), Some(layout.device_layout()));
        let unit = unit_bytes as usize;
        let mut rest = vec![0xaa; 8 << 20];
        let number_at = layout.area_start_unit(0, 0) as usize * unit;
        rest[..number_at + unit].fill(0);
        rest[number_at..number_at + 8].copy_from_slice(&superblock.volume_id.to_le_bytes());
        for store in 0..4 {
            let at = layout.unit_of(ChunkNumber(2 * store), 0) as usize * unit;
            rest[at..at + unit].fill(0);
        }
        assert!(bytes[16 << 10..] == rest[16 << 10..], "units of {unit_bytes}");
    }
}

#[test]
fn the_first_volume_of_a_device_has_the_first_number_of_the_seed_also_on_a_volatile_one() {
    let device = MemoryDevice::new(RamDisk::new(32 << 20, 4096).unwrap());
    block_on(format(&device, &small_values()), || ()).unwrap();
    let (superblock, damaged) = block_on(read_superblock::<LogSuperblock>(&device), || ()).unwrap();
    assert_eq!((superblock.volume_id, damaged), (Prng::new(8).next_u64(), 0));
    assert_eq!(superblock.layout, layout_of(32 << 20, 4096, &small_values()).unwrap());
}

#[test]
fn bytes_without_a_superblock_have_no_layout() {
    assert_eq!(device_layout(&[]), None);
    assert_eq!(device_layout(&[0; 16 << 10]), None);
}

fn place_of(superblock: &LogSuperblock, partition: u32, unit: u32) -> ImagePlace {
    let (volume_id, unit_bytes) = (superblock.volume_id, superblock.layout.unit_bytes);
    ImagePlace { volume_id, partition, index: ChunkIndex(0), unit, unit_bytes }
}

/// The units of the first key chunk of each store.
fn first_chunks(layout: &LogLayout) -> impl Iterator<Item = (u32, u32, usize)> + use<> {
    let layout = *layout;
    (0..u32::from(layout.stores)).flat_map(move |store| {
        (0..layout.chunk_units).map(move |unit| {
            let at = layout.unit_of(ChunkNumber(2 * store), unit) as usize * layout.unit_bytes as usize;
            (store, unit, at)
        })
    })
}

/// Fills the first key chunk of each store with images of one bucket, in the order of their numbers.
fn fill_with_images(bytes: &mut [u8], superblock: &LogSuperblock) {
    for (partition, unit, at) in first_chunks(&superblock.layout) {
        let state = ImageState {
            role: ImageRole::Segment,
            segment: SegmentNumber(0),
            depth: 0,
            sequence: u64::from(unit) + 1,
            incarnation: 1,
            durable_lag: 0,
            key_head: ChunkIndex(0),
            value_head: ChunkIndex(0),
            next_key_chunk: ChunkNumber(8),
            next_value_chunk: ChunkNumber(9),
            value_tail: ValueTailPlace { index: ChunkIndex(0), granule: 0 },
            totals: StoreTotals::default(),
            previous: PreviousImage::NONE,
        };
        let place = place_of(superblock, partition, unit);
        encode_image(&mut bytes[at..at + 512], &state, &SegmentImage::new(), place);
    }
}

/// The images that a volume of this superblock would find in the first key chunk of each store.
fn images_found(bytes: &[u8], superblock: &LogSuperblock) -> usize {
    let heads = first_chunks(&superblock.layout).map(|(partition, unit, at)| {
        let place = place_of(superblock, partition, unit);
        UncheckedBuckets { bytes: &bytes[at..at + 512], place }.head()
    });
    heads.flatten().count()
}

#[test]
fn formats_with_one_seed_never_bring_back_an_image_of_an_earlier_one() {
    let mut numbers = FxHashSet::default();
    let mut contents = vec![0; DISK_BYTES];
    let mut first = None;
    for round in 0..10 {
        let disk = formatted(contents, &small_config(7));
        let superblock = superblock_on(&disk).unwrap();
        assert!(numbers.insert(superblock.volume_id), "round {round}");
        contents = disk.contents();
        assert_eq!(images_found(&contents, &superblock), 0, "round {round}");
        fill_with_images(&mut contents, &superblock);
        let units = superblock.layout.chunk_units as usize * usize::from(superblock.layout.stores);
        assert_eq!(images_found(&contents, &superblock), units);
        // A volume of the first number would find images, if the later ones had not replaced them: the test could fail.
        let first = *first.get_or_insert(superblock);
        assert_eq!(images_found(&contents, &first), if round == 0 { units } else { 0 });
    }
}

#[test]
fn an_old_volume_without_its_superblocks_leaves_images_that_the_next_one_does_not_take_for_its_own() {
    // A format with the same seed that was interrupted at any event, and was then repeated.
    let config = small_config(7);
    let old_disk = formatted(vec![0; DISK_BYTES], &config);
    let old = superblock_on(&old_disk).unwrap();
    let mut used = old_disk.contents();
    fill_with_images(&mut used, &old);
    let interrupted = formatted(used, &config);
    let mut random = Prng::new(4);
    let mut left = FxHashSet::default();
    for events in 0..=interrupted.events() {
        for mode in PowerLossMode::ALL {
            let image = interrupted.image_after_power_loss(events, mode, &mut random);
            let before = PowerLossDisk::new(image.clone(), 512).contents();
            let disk = PowerLossDisk::new(image, 512);
            let outcome = block_on(format(&disk, &config), || {
                disk.complete_one(&mut random);
            });
            assert_eq!(outcome, Ok(()));
            let new = superblock_on(&disk).unwrap();
            let bytes = disk.contents();
            assert_ne!(new.volume_id, old.volume_id, "after {events} events, {mode:?}");
            assert_eq!(images_found(&bytes, &new), 0, "after {events} events, {mode:?}");
            left.insert(images_found(&bytes, &old));
            // The second format had to find out without a superblock, too.
            left.insert(usize::from(before[..16 << 10].iter().all(|&byte| byte == 0)));
        }
    }
    // All images but the first of each store are still there.
    assert!(left.contains(&30) && left.contains(&1) && left.contains(&0), "{left:?}");
}

#[test]
fn after_power_loss_in_a_format_there_is_the_old_volume_or_none_or_the_new_one() {
    let old_disk = formatted(vec![0xaa; DISK_BYTES], &small_config(1));
    let old = superblock_on(&old_disk).unwrap();
    let mut used = old_disk.contents();
    fill_with_images(&mut used, &old);
    let disk = formatted(used, &small_config(2));
    let new = superblock_on(&disk).unwrap();
    let mut random = Prng::new(3);
    let mut found = Vec::new();
    for events in 0..=disk.events() {
        for mode in PowerLossMode::ALL {
            let at = format!("after {events} events, {mode:?}");
            let image = disk.image_after_power_loss(events, mode, &mut random);
            let disk = PowerLossDisk::new(image, 512);
            found.push(match superblock_on(&disk) {
                Ok(superblock) if superblock == old => {
                    assert_eq!(images_found(&disk.contents(), &old), 32, "{at}");
                    0
                }
                Ok(superblock) if superblock == new => {
                    let bytes = disk.contents();
                    assert_eq!(images_found(&bytes, &new), 0, "{at}");
                    for (_, _, start) in first_chunks(&new.layout).filter(|&(_, unit, _)| unit == 0) {
                        assert!(bytes[start..start + 512].iter().all(|&byte| byte == 0), "{at}");
                    }
                    2
                }
                Ok(superblock) => panic!("{superblock:?}"),
                Err(_) => 1,
            });
        }
    }
    assert_eq!([0, 1, 2].map(|kind| found.contains(&kind)), [true; 3]);
    assert_eq!(found.last(), Some(&2));
}
