//! Format: creates an empty volume on a device.
//!
//! In: a device's geometry and the configuration of the volume. Out: what every format writes (`common/volume_format.rs`).

use super::checkpoint::IMAGE_HEADER_BYTES;
use super::index::{INDEX_ENTRY_BYTES, LOCATION_MAX, RECORD_UNITS_MAX};
use super::journal::IndexChange;
use super::superblock::{HashSuperblock, VALUE_BYTES_MAX};
use crate::FormatConfig;
use crate::common::journal::JournalEntry;
use crate::common::record::{RecordFormat, record_bytes};
use crate::common::volume_format::{choose_unit_bytes, fill_with_data, write_volume};
use crate::common::volume_layout::{Checkpoint, VolumeLayout, ring_units_min};
use crate::open_error::OpenError;
use octokv_base::{KEY_BYTES_MAX, Prng};
use octokv_device::{Device, Geometry};

/// Bytes of the longest record.
fn record_bytes_max(config: &FormatConfig) -> u64 {
    record_bytes(KEY_BYTES_MAX, config.value_bytes_max as usize) as u64
}

/// Whether an index entry can name every unit of the device and the length of the longest record.
fn suits(unit_bytes: u32, geometry: Geometry, config: &FormatConfig) -> bool {
    geometry.bytes() / u64::from(unit_bytes) <= LOCATION_MAX
        && record_bytes_max(config).div_ceil(u64::from(unit_bytes)) <= RECORD_UNITS_MAX
}

/// Lays out a volume on a device. Volatile devices have neither journal nor checkpoints.
///
/// # Errors
/// [`OpenError::BlockTooLarge`], [`OpenError::TooSmall`] or [`OpenError::ValuesTooLong`].
pub(super) fn layout(
    geometry: Geometry,
    preferred_write_bytes: u32,
    config: &FormatConfig,
) -> Result<HashSuperblock, OpenError> {
    let suits = |unit_bytes| suits(unit_bytes, geometry, config);
    let unit_bytes = choose_unit_bytes(geometry, preferred_write_bytes, config.unit_bytes, suits)?;
    // Units beyond the last location that an index entry can name stay unused.
    let units = (geometry.bytes() / u64::from(unit_bytes)).min(LOCATION_MAX);
    let ring_units_max = (512 << 20) / unit_bytes;
    let ring_units_min = ring_units_min(IndexChange::BATCH_BYTES_MAX, unit_bytes);
    let index_partitions_log2 = (units / 4096).max(16).ilog2().min(14) as u8;
    let (journal_units, area_units) = match geometry.volatile {
        true => (1, 0),
        false => {
            let ring = (units / 128).clamp(u64::from(ring_units_min), u64::from(ring_units_max));
            let images = (IMAGE_HEADER_BYTES as u64) << index_partitions_log2;
            (ring as u32, (images + INDEX_ENTRY_BYTES as u64 * units).div_ceil(u64::from(unit_bytes)))
        }
    };
    let regions = VolumeLayout::without_data(unit_bytes, journal_units, area_units);
    let layout = fill_with_data(geometry, regions, units, 64)?;
    // What ends with the process has the newest format.
    let is_format_1 = config.version == 1 && !geometry.volatile;
    let format = if is_format_1 { RecordFormat::V1 } else { RecordFormat::V2 };
    let record_units_max = record_bytes_max(config).div_ceil(u64::from(unit_bytes));
    // Format 2 stores longer values in pieces.
    let value_bytes_max = match format == RecordFormat::V2 && !geometry.volatile {
        true => VALUE_BYTES_MAX,
        false => RECORD_UNITS_MAX * u64::from(unit_bytes) - record_bytes(KEY_BYTES_MAX, 0) as u64,
    };
    if u64::from(config.value_bytes_max) > value_bytes_max {
        return Err(OpenError::ValuesTooLong { value_bytes_max });
    }
    // A partition with space for few of the longest records would waste much of its end.
    let partitions_log2_max =
        (layout.data_units / (16 * record_units_max.min(RECORD_UNITS_MAX))).max(1).ilog2() as u8;
    let mut random = Prng::new(config.seed);
    Ok(HashSuperblock {
        format,
        volume_id: random.next_u64(),
        hash_seed: config.hash_seed.unwrap_or_else(|| random.next_u64()),
        hash: config.hash,
        layout,
        index_partitions_log2,
        bitmap_partitions_log2: config.bitmap_partitions_log2.min(partitions_log2_max),
        namespace: config.namespace,
        value_bytes_max: config.value_bytes_max,
        generation: 0,
        incarnation: 0,
        checkpoint: Checkpoint::NONE,
        is_clean_shutdown: true,
    })
}

/// Creates an empty volume on the device, whose contents are lost. Does nothing to a volatile device.
///
/// # Errors
/// [`OpenError`], if the configuration does not fit the device, or the device fails.
///
/// # Panics
/// If the configuration is invalid for every device.
pub async fn format(device: &dyn Device, config: &FormatConfig) -> Result<(), OpenError> {
    let superblock = layout(device.geometry(), device.preferred_write_bytes(), config)?;
    assert!(device.geometry().volatile || superblock.is_consistent(), "invalid configuration: {config:?}");
    if device.geometry().volatile {
        return Ok(());
    }
    write_volume(device, &superblock, &superblock.layout, IndexChange::BATCH_BYTES_MAX).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::volume_layout::UNIT_BYTES;
    use crate::conformance::{key_of, record_of, value_of};
    use crate::hash::{HashEngine, open};
    use crate::{Durability, Engine, OpenConfig, PutMode, PutOutcome, WallClock};
    use octokv_base::BufferPool;
    use octokv_device::{MemoryDevice, RamDisk};
    use octokv_runtime::block_on;
    use std::rc::Rc;

    fn unit_bytes_of(block_bytes: u32, device_bytes: u64, config: &FormatConfig) -> Result<u32, OpenError> {
        let blocks = device_bytes / u64::from(block_bytes);
        layout(Geometry { block_bytes, blocks, volatile: false }, block_bytes, config)
            .map(|superblock| superblock.layout.unit_bytes)
    }

    #[test]
    fn without_a_configured_unit_it_is_the_devices_block() {
        let config = FormatConfig::default();
        for block_bytes in [512, 1024, 2048, 4096] {
            assert_eq!(unit_bytes_of(block_bytes, 1 << 30, &config), Ok(block_bytes));
        }
        let error = OpenError::BlockTooLarge { block_bytes: 8192, unit_bytes: 4096 };
        assert_eq!(unit_bytes_of(8192, 1 << 30, &config), Err(error));
    }

    #[test]
    fn without_a_configured_unit_no_write_needs_a_read_below() {
        let geometry = Geometry { block_bytes: 512, blocks: 1 << 21, volatile: false };
        let unit_bytes = |preferred, unit_bytes| {
            let config = FormatConfig { unit_bytes, ..FormatConfig::default() };
            layout(geometry, preferred, &config).map(|superblock| superblock.layout.unit_bytes)
        };
        assert_eq!([512, 1024, 4096].map(|preferred| unit_bytes(preferred, None)), [512, 1024, 4096].map(Ok));
        assert_eq!(unit_bytes(4096, Some(512)), Ok(512), "a configured one is used");
    }

    #[test]
    fn a_configured_unit_is_used_and_refused_if_it_is_smaller_than_the_devices_block() {
        for unit_bytes in UNIT_BYTES {
            let config = FormatConfig { unit_bytes: Some(unit_bytes), ..FormatConfig::default() };
            assert_eq!(unit_bytes_of(512, 1 << 30, &config), Ok(unit_bytes));
            let on_large_blocks = match unit_bytes {
                4096 => Ok(4096),
                _ => Err(OpenError::BlockTooLarge { block_bytes: 4096, unit_bytes }),
            };
            assert_eq!(unit_bytes_of(4096, 1 << 30, &config), on_large_blocks);
        }
    }

    #[test]
    fn the_unit_is_larger_if_an_index_entry_could_not_name_the_longest_value_or_the_devices_end() {
        let of_values = |value_bytes_max| {
            unit_bytes_of(512, 4 << 30, &FormatConfig { value_bytes_max, ..FormatConfig::default() })
        };
        let longest = (RECORD_UNITS_MAX * 512) as u32 - record_bytes(KEY_BYTES_MAX, 0) as u32;
        assert_eq!(
            [longest, longest + 1, 10 << 20, 20 << 20].map(of_values),
            [512, 1024, 2048, 4096].map(Ok)
        );
        let value_bytes_max = RECORD_UNITS_MAX * 4096 - record_bytes(KEY_BYTES_MAX, 0) as u64;
        let of_format_1 = |value_bytes_max| {
            let config = FormatConfig { version: 1, value_bytes_max, ..FormatConfig::default() };
            unit_bytes_of(512, 4 << 30, &config)
        };
        assert_eq!(of_format_1(64 << 20), Err(OpenError::ValuesTooLong { value_bytes_max }));
        assert_eq!([64 << 20, VALUE_BYTES_MAX as u32].map(of_values), [4096; 2].map(Ok), "in pieces");
        let value_bytes_max = VALUE_BYTES_MAX;
        assert_eq!(of_values(VALUE_BYTES_MAX as u32 + 1), Err(OpenError::ValuesTooLong { value_bytes_max }));
        let of_device = |bytes| unit_bytes_of(512, bytes, &FormatConfig::default());
        let largest = LOCATION_MAX * 512;
        assert_eq!(
            [largest, largest + 512, 2 * largest + 1024, 9 * largest].map(of_device),
            [512, 1024, 2048, 4096].map(Ok)
        );
    }

    #[test]
    fn a_value_of_4_kib_takes_nine_units_of_512_bytes_or_two_of_4_kib() {
        for (block_bytes, used_bytes) in [(512, 4_608), (4096, 8_192)] {
            let device: Rc<dyn Device> =
                Rc::new(MemoryDevice::new(RamDisk::new(64 << 20, block_bytes).unwrap()));
            let pool = BufferPool::new(1 << 20);
            let config = OpenConfig {
                durability: Durability::PowerSafe,
                cores: 1,
                cache_bytes: 0,
                prepare_bytes: 0,
                compact_bytes_per_second: 0,
                tree: OpenConfig::TREE,
                swap_gap: OpenConfig::SWAP_GAP,
                clock: WallClock::default(),
                tokens: None,
            };
            let volume = block_on(open(&device, &pool, config, &FormatConfig::default()), || ()).unwrap();
            let engine = HashEngine::new(volume, 0, device, pool);
            let key = key_of(1);
            let put = engine.put(
                &key,
                PutMode::Upsert,
                record_of(engine.record_layout(), &key, &value_of(&key, 1, 4096)),
                4096,
            );
            assert_eq!(block_on(put, || ()), Ok(PutOutcome::Stored));
            assert_eq!(engine.statistics().used_bytes, used_bytes);
        }
    }
}
