//! Format: creates an empty volume on a device.
//!
//! In: a device's geometry and the configuration of the volume. Out: zeros over all superblocks and over the first batch
//! of each journal copy, then one superblock in both copies. Nothing else is written: recovery reads nothing else of a
//! volume without a checkpoint and without a first batch.

use super::checkpoint::IMAGE_HEADER_BYTES;
use super::error::OpenError;
use super::index::{INDEX_ENTRY_BYTES, LOCATION_MAX, RECORD_UNITS_MAX};
use super::journal::batch_units_max;
use super::record::record_bytes;
use super::superblock::{
    Checkpoint, HashKind, RING_BATCHES_MIN, SUPERBLOCK_STRIDE_BYTES, SUPERBLOCKS, Superblock,
    superblock_units,
};
use super::superblock_io::write_superblock;
use octokv_base::{Buffer, KEY_BYTES_MAX, Lba, Prng};
use octokv_device::{Device, Geometry};

/// The configuration of a new volume.
#[derive(Clone, Copy, Debug)]
pub struct FormatConfig {
    /// The unit in bytes: 512, 1024, 2048 or 4096, and at least the device's block. A record takes whole units.
    pub unit_bytes: u32,
    /// The hash function of keys.
    pub hash: HashKind,
    /// log2 of the bitmap's partitions (OctoKV's n); fewer on a small device.
    pub bitmap_partitions_log2: u8,
    /// The longest value, in bytes.
    pub value_bytes_max: u32,
    /// The identifier of the namespace that the volume holds.
    pub namespace: u32,
    /// The seed of the volume's random numbers: its id and its hash seed.
    pub seed: u64,
}

impl Default for FormatConfig {
    fn default() -> FormatConfig {
        FormatConfig {
            unit_bytes: 4096,
            hash: HashKind::Xxh3,
            bitmap_partitions_log2: 4,
            value_bytes_max: 2 << 20,
            namespace: 1,
            seed: 0,
        }
    }
}

/// Lays out a volume on a device. Volatile devices have neither journal nor checkpoints.
///
/// # Errors
/// [`OpenError::BlockTooLarge`], [`OpenError::TooSmall`] or [`OpenError::ValuesTooLong`].
pub(super) fn layout(geometry: Geometry, config: &FormatConfig) -> Result<Superblock, OpenError> {
    let unit_bytes = config.unit_bytes;
    if geometry.block_bytes > unit_bytes {
        return Err(OpenError::BlockTooLarge { block_bytes: geometry.block_bytes, unit_bytes });
    }
    // Units beyond the last location that an index entry can name stay unused.
    let units = (geometry.bytes() / u64::from(unit_bytes)).min(LOCATION_MAX);
    let ring_units_max = (512 << 20) / unit_bytes;
    let ring_units_min = RING_BATCHES_MIN * batch_units_max(unit_bytes);
    let index_partitions_log2 = (units / 4096).max(16).ilog2().min(14) as u8;
    let (journal_units, area_units) = match geometry.volatile {
        true => (1, 0),
        false => {
            let ring = (units / 128).clamp(u64::from(ring_units_min), u64::from(ring_units_max));
            let images = (IMAGE_HEADER_BYTES as u64) << index_partitions_log2;
            (ring as u32, (images + INDEX_ENTRY_BYTES as u64 * units).div_ceil(u64::from(unit_bytes)))
        }
    };
    let data_first = superblock_units(unit_bytes) + 2 * u64::from(journal_units) + 4 * area_units;
    let units_min = data_first + 64;
    if units < units_min {
        let need_bytes = units_min * u64::from(unit_bytes);
        return Err(OpenError::TooSmall { have_bytes: geometry.bytes(), need_bytes });
    }
    let record_bytes_max = record_bytes(KEY_BYTES_MAX, config.value_bytes_max as usize) as u64;
    let record_units_max = record_bytes_max.div_ceil(u64::from(unit_bytes));
    if record_units_max > RECORD_UNITS_MAX {
        let value_bytes_max =
            RECORD_UNITS_MAX * u64::from(unit_bytes) - record_bytes(KEY_BYTES_MAX, 0) as u64;
        return Err(OpenError::ValuesTooLong { value_bytes_max });
    }
    // A partition with space for few of the longest records would waste much of its end.
    let data_units = units - data_first;
    let partitions_log2_max = (data_units / (16 * record_units_max)).max(1).ilog2() as u8;
    let mut random = Prng::new(config.seed);
    Ok(Superblock {
        volume_id: random.next_u64(),
        hash_seed: random.next_u64(),
        hash: config.hash,
        unit_bytes,
        journal_units,
        area_units,
        data_start_unit: data_first,
        data_units,
        index_partitions_log2,
        bitmap_partitions_log2: config.bitmap_partitions_log2.min(partitions_log2_max),
        namespace: config.namespace,
        value_bytes_max: config.value_bytes_max,
        generation: 0,
        incarnation: 0,
        checkpoint: Checkpoint { batch: 1, ..Checkpoint::default() },
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
    let superblock = layout(device.geometry(), config)?;
    assert!(device.geometry().volatile || superblock.is_consistent(), "invalid configuration: {config:?}");
    if device.geometry().volatile {
        return Ok(());
    }
    // The other slots may hold superblocks of an older volume: erase them first.
    let zeros = Buffer::zeroed((SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES) as usize);
    device.write(Lba(0), zeros).await.result?;
    device.flush().await.result?;
    // With the same seed, an older volume has the same id: its journal must not continue this one's.
    for copy in 0..2 {
        let unit_blocks = u64::from(superblock.unit_bytes / device.geometry().block_bytes);
        let first = Buffer::zeroed((batch_units_max(superblock.unit_bytes) * superblock.unit_bytes) as usize);
        device.write(Lba(superblock.journal_start_unit(copy) * unit_blocks), first).await.result?;
    }
    device.flush().await.result?;
    write_superblock(device, &superblock).await?;
    Ok(())
}
