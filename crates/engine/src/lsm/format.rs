//! Format of the ordered engine: creates an empty volume on a device.
//!
//! In: a device's geometry and the configuration of the volume. Out: what every format writes (`common/volume_format.rs`).
//!
//! ```text
//!   superblocks │ journal ×2 │ checkpoint areas A, B ×2 │ data: tables and value segments
//! ```
//! The journal has the entries of all memtables, with the values that lie in the tree, so it grows with the device. An image has a
//! record for each table and segment, so the areas grow with the data.

use super::retention::ForgottenTombstones;
use super::superblock::{BATCH_BYTES_MAX, DATA_AREA_BYTES_MIN, LsmSuperblock, value_bytes_limit};
use crate::FormatConfig;
use crate::common::volume_format::{choose_unit_bytes, fill_with_data, write_volume};
use crate::common::volume_layout::{Checkpoint, VOLUME_UNITS_MAX, VolumeLayout, ring_units_min};
use crate::open_error::OpenError;
use octokv_base::Prng;
use octokv_device::{Device, Geometry};

/// A journal copy's part of the device.
const RINGS_IN_DEVICE: u64 = 16;
/// The most bytes of a journal copy.
const RING_BYTES_MAX: u64 = 1 << 30;
/// What an image takes for each MiB of data: an estimate of the records of its tables and segments.
const IMAGE_BYTES_PER_MIB: u64 = 400;
/// What an image takes besides.
const IMAGE_BYTES_FIXED: u64 = 64 << 10;
/// The fewest bytes of a checkpoint area's copy.
const AREA_BYTES_MIN: u64 = 448 << 10;
/// On a small volume an area's copy has this part of the space, for tables with the longest keys at their ends.
const AREA_IN_SPACE: u64 = 16;
/// Up to so many bytes.
const AREA_BYTES_SMALL: u64 = 1 << 20;

/// Lays out a volume on a device; on a volatile one as on others.
///
/// # Errors
/// [`OpenError::BlockTooLarge`], [`OpenError::TooSmall`] or [`OpenError::ValuesTooLong`].
pub(super) fn layout(
    geometry: Geometry,
    preferred_write_bytes: u32,
    config: &FormatConfig,
) -> Result<LsmSuperblock, OpenError> {
    let suits = |unit_bytes| geometry.bytes() / u64::from(unit_bytes) <= VOLUME_UNITS_MAX;
    let unit_bytes = choose_unit_bytes(geometry, preferred_write_bytes, config.unit_bytes, suits)?;
    let of_bytes = |bytes: u64| bytes.div_ceil(u64::from(unit_bytes));
    let units = (geometry.bytes() / u64::from(unit_bytes)).min(VOLUME_UNITS_MAX);
    let ring_units_min = ring_units_min(BATCH_BYTES_MAX, unit_bytes);
    let journal_units =
        (units / RINGS_IN_DEVICE).clamp(ring_units_min.into(), of_bytes(RING_BYTES_MAX)) as u32;
    let area_start = VolumeLayout::without_data(unit_bytes, journal_units, 0).data_start_unit;
    // More than the data that there will be, by the areas.
    let data_mib = (units.saturating_sub(area_start) * u64::from(unit_bytes)) >> 20;
    let area_bytes_small = ((data_mib << 20) / AREA_IN_SPACE).clamp(AREA_BYTES_MIN, AREA_BYTES_SMALL);
    let area_units = of_bytes((data_mib * IMAGE_BYTES_PER_MIB + IMAGE_BYTES_FIXED).max(area_bytes_small));
    let regions = VolumeLayout::without_data(unit_bytes, journal_units, area_units);
    let layout = fill_with_data(geometry, regions, units, of_bytes(DATA_AREA_BYTES_MIN))?;
    let value_bytes_max = value_bytes_limit(&layout);
    if u64::from(config.value_bytes_max) > value_bytes_max {
        return Err(OpenError::ValuesTooLong { value_bytes_max });
    }
    let mut random = Prng::new(config.seed);
    Ok(LsmSuperblock {
        volume_id: random.next_u64(),
        hash_seed: config.hash_seed.unwrap_or_else(|| random.next_u64()),
        layout,
        namespace: config.namespace,
        value_bytes_max: config.value_bytes_max,
        inline_bytes_max: config.inline_bytes_max,
        generation: 0,
        incarnation: 0,
        checkpoint: Checkpoint::NONE,
        image_entry: 0,
        forgotten: ForgottenTombstones::NONE,
        has_versions: false,
        is_clean_shutdown: true,
    })
}

/// Creates an empty volume on the device, whose contents are lost; on a volatile device, too.
///
/// # Errors
/// [`OpenError`], if the configuration does not fit the device, or the device fails.
///
/// # Panics
/// If the configuration is invalid for every device.
pub async fn format(device: &dyn Device, config: &FormatConfig) -> Result<(), OpenError> {
    let superblock = layout(device.geometry(), device.preferred_write_bytes(), config)?;
    assert!(superblock.is_consistent(), "invalid configuration: {config:?}");
    write_volume(device, &superblock, &superblock.layout, BATCH_BYTES_MAX).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::superblock_io::read_superblock;
    use crate::common::volume_layout::UNIT_BYTES;
    use crate::open_error::OpenError::{BlockTooLarge, TooSmall, ValuesTooLong};
    use octokv_base::{Buffer, Lba};
    use octokv_device::power_loss::{PowerLossDisk, PowerLossMode};
    use octokv_device::{MemoryDevice, RamDisk};
    use octokv_runtime::block_on;

    const SMALL_VALUES: FormatConfig = FormatConfig {
        engine: crate::EngineKind::Hash,
        version: 1,
        unit_bytes: None,
        hash: crate::HashKind::Xxh3,
        bitmap_partitions_log2: 0,
        value_bytes_max: 100_000,
        inline_bytes_max: 4096,
        partitions: 32,
        chunk_bytes: None,
        namespace: 3,
        seed: 8,
        hash_seed: None,
        swap_bytes: 0,
    };

    fn layout_of(
        block_bytes: u32,
        device_bytes: u64,
        config: &FormatConfig,
    ) -> Result<LsmSuperblock, OpenError> {
        let blocks = device_bytes / u64::from(block_bytes);
        layout(Geometry { block_bytes, blocks, volatile: false }, block_bytes, config)
    }

    #[test]
    fn every_layout_is_consistent_and_covers_the_device() {
        for unit_bytes in UNIT_BYTES {
            for device_bytes in [8 << 20, 100 << 20, 3 << 30, 64 << 30, 8 << 40, 40 << 40] {
                let config = FormatConfig { unit_bytes: Some(unit_bytes), ..SMALL_VALUES };
                let superblock = layout_of(512, device_bytes, &config).unwrap();
                assert!(superblock.is_consistent(), "{unit_bytes} B, {device_bytes} B: {superblock:?}");
                let units = (device_bytes / u64::from(unit_bytes)).min(VOLUME_UNITS_MAX);
                assert_eq!(superblock.layout.units(), units);
            }
        }
    }

    #[test]
    fn journal_and_areas_grow_with_the_device_between_their_limits() {
        // Bytes of the device, of a journal copy, of an area's copy.
        let table: [(u64, u64, u64); 4] = [
            (8 << 20, 1 << 20, 448 << 10),
            (64 << 20, 4 << 20, 1 << 20),
            (2 << 30, 128 << 20, 1 << 20),
            // 62 GiB less the superblocks.
            (64 << 30, 1 << 30, ((62 * 1024 - 1) * 400 + (64 << 10)) / 4096 * 4096 + 4096),
        ];
        for (device_bytes, ring_bytes, area_bytes) in table {
            let layout = layout_of(4096, device_bytes, &SMALL_VALUES).unwrap().layout;
            assert_eq!(u64::from(layout.journal_units) * 4096, ring_bytes, "{device_bytes}");
            assert_eq!(layout.area_units * 4096, area_bytes, "{device_bytes}");
            assert_eq!(layout.data_start_unit * 4096, 16_384 + 2 * ring_bytes + 4 * area_bytes);
        }
    }

    #[test]
    fn a_volume_needs_space_for_its_regions_and_4_mib_of_data() {
        for unit_bytes in UNIT_BYTES {
            let config = FormatConfig { unit_bytes: Some(unit_bytes), ..SMALL_VALUES };
            let need_bytes = 16_384 + 2 * (1 << 20) + 4 * (448 << 10) + (4 << 20);
            for have_bytes in [0, 16_384, need_bytes - u64::from(unit_bytes)] {
                let refused = layout_of(512, have_bytes, &config);
                assert_eq!(refused, Err(TooSmall { have_bytes, need_bytes }));
            }
            let superblock = layout_of(512, need_bytes, &config).unwrap();
            assert!(superblock.is_consistent());
            assert_eq!(superblock.layout.data_units * u64::from(unit_bytes), 4 << 20);
        }
        assert_eq!(
            layout_of(8192, 1 << 30, &SMALL_VALUES),
            Err(BlockTooLarge { block_bytes: 8192, unit_bytes: 4096 })
        );
    }

    #[test]
    fn the_record_of_the_longest_value_fits_a_quarter_of_the_data() {
        let with = |device_bytes, value_bytes_max: u64| {
            let value_bytes_max = value_bytes_max as u32;
            let config = FormatConfig { value_bytes_max, ..SMALL_VALUES };
            layout_of(4096, device_bytes, &config).map(|superblock| superblock.is_consistent())
        };
        let data_units = layout_of(4096, 64 << 20, &SMALL_VALUES).unwrap().layout.data_units;
        // The longest key and its header take 1,088 bytes.
        let value_bytes_max = data_units / 4 * 4096 - 1_088;
        assert_eq!(with(64 << 20, value_bytes_max), Ok(true));
        assert_eq!(with(64 << 20, value_bytes_max + 1), Err(ValuesTooLong { value_bytes_max }));
        assert_eq!(with(64 << 30, 256 << 20), Ok(true));
        assert_eq!(with(64 << 30, (256 << 20) + 1), Err(ValuesTooLong { value_bytes_max: 256 << 20 }));
    }

    #[test]
    #[should_panic(expected = "invalid configuration")]
    fn an_inline_value_that_no_journal_entry_has_space_for_is_no_configuration() {
        let device = MemoryDevice::new(RamDisk::new(16 << 20, 4096).unwrap());
        let config = FormatConfig { inline_bytes_max: (16 << 10) + 1, ..SMALL_VALUES };
        let _ = block_on(format(&device, &config), || ());
    }

    /// Formats a disk that had `image`.
    fn formatted(image: Vec<u8>, config: &FormatConfig) -> PowerLossDisk {
        let (disk, mut random) = (PowerLossDisk::new(image, 512), Prng::new(1));
        let outcome = block_on(format(&disk, config), || {
            disk.complete_one(&mut random);
        });
        assert_eq!(outcome, Ok(()));
        disk
    }

    /// The superblock on a disk.
    fn superblock_on(disk: &PowerLossDisk) -> Result<LsmSuperblock, OpenError> {
        let mut random = Prng::new(2);
        let read = block_on(read_superblock::<LsmSuperblock>(disk), || {
            disk.complete_one(&mut random);
        });
        read.map(|(superblock, _)| superblock)
    }

    #[test]
    fn a_format_writes_superblocks_and_zeros_over_the_first_batches_and_nothing_else() {
        for unit_bytes in UNIT_BYTES {
            let config = FormatConfig { unit_bytes: Some(unit_bytes), ..SMALL_VALUES };
            let disk = formatted(vec![0xaa; 8 << 20], &config);
            let want = layout_of(512, 8 << 20, &config).unwrap();
            assert_eq!(superblock_on(&disk), Ok(want));
            assert_eq!((want.namespace, want.value_bytes_max, want.inline_bytes_max), (3, 100_000, 4096));
            let bytes = disk.contents();
            let start = |copy| (want.layout.journal_start_unit(copy) * u64::from(unit_bytes)) as usize;
            for copy in 0..2 {
                let ring = &bytes[start(copy)..start(copy + 1)];
                let (batch, rest) = ring.split_at(BATCH_BYTES_MAX);
                assert!(batch.iter().all(|&byte| byte == 0), "copy {copy}");
                assert!(rest.iter().all(|&byte| byte == 0xaa), "copy {copy}");
            }
            assert!(bytes[start(2)..].iter().all(|&byte| byte == 0xaa));
            assert!(bytes[4096..8192].iter().all(|&byte| byte == 0), "the slot of odd generations");
        }
    }

    #[test]
    fn after_power_loss_in_a_format_there_is_the_old_volume_or_none_or_the_new_one() {
        let configs = [1, 2].map(|seed| FormatConfig { seed, ..SMALL_VALUES });
        let [old, new] = configs.map(|config| layout_of(512, 8 << 20, &config).unwrap());
        let old_disk = formatted(vec![0xaa; 8 << 20], &configs[0]);
        let journals =
            [0, 1].map(|copy| new.layout.journal_start_unit(copy) as usize * new.layout.unit_bytes as usize);
        let mut used = old_disk.contents();
        journals.into_iter().for_each(|start| used[start..start + BATCH_BYTES_MAX].fill(0xaa));
        let disk = formatted(used, &configs[1]);
        let mut random = Prng::new(3);
        let mut found = Vec::new();
        for events in 0..=disk.events() {
            for mode in PowerLossMode::ALL {
                let image = disk.image_after_power_loss(events, mode, &mut random);
                let disk = PowerLossDisk::new(image, 512);
                found.push(match superblock_on(&disk) {
                    Ok(superblock) if superblock == old => 0,
                    Ok(superblock) if superblock == new => {
                        let bytes = disk.contents();
                        for start in journals {
                            let mut batch = bytes[start..start + BATCH_BYTES_MAX].iter();
                            assert!(batch.all(|&byte| byte == 0), "after {events} events, {mode:?}");
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

    #[test]
    fn a_volatile_device_is_formatted_as_others_are() {
        let device = MemoryDevice::new(RamDisk::new(16 << 20, 4096).unwrap());
        block_on(format(&device, &SMALL_VALUES), || ()).unwrap();
        let (superblock, damaged) = block_on(read_superblock::<LsmSuperblock>(&device), || ()).unwrap();
        assert_eq!((superblock, damaged), (layout_of(4096, 16 << 20, &SMALL_VALUES).unwrap(), 0));
        assert!(superblock.layout.journal_units > 1);
        let batch = Lba(superblock.layout.journal_start_unit(1));
        let read = block_on(device.read(batch, Buffer::zeroed(4096)), || ()).into_read().unwrap();
        assert!(read.iter().all(|&byte| byte == 0));
    }
}
