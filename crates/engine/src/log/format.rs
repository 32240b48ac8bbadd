//! Format of the log engine: creates an empty volume on a device.
//!
//! ```text
//!   superblocks: zeros │ area A: volume number, zeros │ area B │ chunk 0: zeros … │ chunk 1 │ chunk 2: zeros … │ chunk 3 │ …
//!                        first unit only                         first unit: the key log of store 0, of store 1, …
//! ```
//! In: a device's geometry and contents, and the configuration of the volume. Out: a layout; zeros over the superblocks and over the first
//! unit of each store's key log, the volume number behind the superblocks, then one superblock in both copies. Nothing else is written.
//! Without a checkpoint store p begins with key chunk 2p and value chunk 2p + 1, both of index 0.
//!
//! Invariants: the old contents stay on the device, and none of them has a valid checksum of the new volume. Every checksum is seeded by the
//! volume number, and that is the first random number of the seed on a device whose first bytes are zeros. On any other it depends on these
//! bytes as well, so that formats with the same seed give one number after another. Since the number of each format is written behind the
//! superblocks, where a checkpoint replaces it by an image that has the number, an interrupted format does not lead back to an earlier one.
//! Tested in `format_tests.rs`.

use super::log_layout::{
    CHUNK_BYTES_MAX, CHUNK_UNITS_MIN, CHUNKS_MAX, CHUNKS_MIN, GRANULE_LOG2, LogLayout, STORE_CHUNKS_MIN,
};
use super::log_place::ChunkNumber;
use super::segment_entry::GRANULES_LIMIT;
use super::superblock::{LogCheckpoint, LogSuperblock};
use crate::common::superblock::SUPERBLOCK_AREA_BYTES;
use crate::common::superblock_io::{check_slots, erase_superblocks, newest, write_superblock};
use crate::common::volume_format::choose_unit_bytes;
use crate::common::volume_layout::{VOLUME_UNITS_MAX, superblock_units};
use crate::open_error::OpenError;
use crate::{DeviceLayout, FormatConfig};
use octokv_base::prng::mix64;
use octokv_base::{Buffer, Lba, Prng, Version};
use octokv_device::{Device, Geometry};

/// A chunk has about this part of the device.
const CHUNKS_IN_DEVICE: u64 = 65_536;
/// The fewest bytes of a chunk, unless a configuration says otherwise.
const CHUNK_BYTES_LEAST: u32 = 64 << 10;
/// The fewest units of a chunk, unless a configuration says otherwise: an image has half of them at most.
const CHUNK_UNITS_LEAST: u32 = 64;
/// A checkpoint area's copy has one of so many bytes of the device for the pages of the segment tables: 6 B a segment.
const AREAS_IN_DEVICE: u64 = 1024;
/// The same with units of [`LARGE_UNIT_BYTES`], whose segments have several times as many entries.
const AREAS_IN_DEVICE_LARGE_UNITS: u64 = 4096;
const LARGE_UNIT_BYTES: u32 = 4096;
/// What a checkpoint has of each chunk at most, with a reserve: a value chunk has 12 bytes in the list of its store.
const AREA_BYTES_PER_CHUNK: u64 = 16;
/// What a checkpoint has of each store besides.
const AREA_BYTES_PER_STORE: u64 = 4 << 10;
/// The fewest bytes of a checkpoint area's copy.
const AREA_BYTES_MIN: u64 = 64 << 10;
/// The bytes behind the superblocks that tell one format from the next. Blocks are not longer.
const PROBE_BYTES: u64 = 4096;

/// The layout of a volume on a device; on a volatile one as on others.
///
/// # Errors
/// [`OpenError::BlockTooLarge`], [`OpenError::TooSmall`] or [`OpenError::ValuesTooLong`].
///
/// # Panics
/// If the configuration is invalid for every device.
pub fn choose_layout(
    geometry: Geometry,
    preferred_write_bytes: u32,
    config: &FormatConfig,
) -> Result<LogLayout, OpenError> {
    assert!(config.partitions > 0, "a volume without stores");
    let suits = |unit_bytes| geometry.bytes() / u64::from(unit_bytes) <= VOLUME_UNITS_MAX;
    let unit_bytes = choose_unit_bytes(geometry, preferred_write_bytes, config.unit_bytes, suits)?;
    let device = LayoutInput { bytes: geometry.bytes(), unit_bytes, partitions: config.partitions };
    choose_chunks(device, config)
}

/// The bytes of a chunk for a configured number, which is raised to 64 units: those of `unit_bytes`, or the longest, if the format chooses them. With fewer, the
/// ends of key chunks and their markers are more than the reserve allows for, and a volume that is nearly full may stand still (decision 0028).
pub fn configured_chunk_bytes(chunk_bytes: u32, unit_bytes: Option<u32>) -> u32 {
    chunk_bytes.max(CHUNK_UNITS_LEAST * unit_bytes.unwrap_or(LARGE_UNIT_BYTES))
}

/// What a layout depends on besides the bytes of a chunk.
#[derive(Clone, Copy)]
struct LayoutInput {
    /// The size of the device.
    bytes: u64,
    unit_bytes: u32,
    /// The stores that are wanted.
    partitions: u16,
}

/// The layout with the shortest chunks that suit the device and admit the longest value ([`LogLayout::value_bytes_limit`]), or with the
/// configured ones.
///
/// # Errors
/// [`OpenError::TooSmall`], or [`OpenError::ValuesTooLong`] if longer chunks would not help either.
fn choose_chunks(device: LayoutInput, config: &FormatConfig) -> Result<LogLayout, OpenError> {
    let chunks_from = match config.chunk_bytes {
        Some(chunk_bytes) => {
            let is_valid = chunk_bytes.is_power_of_two() && chunk_bytes <= CHUNK_BYTES_MAX;
            assert!(is_valid, "a chunk of {chunk_bytes} bytes");
            let chunk_bytes = chunk_bytes.max(CHUNK_UNITS_MIN * device.unit_bytes);
            chunk_bytes..=chunk_bytes
        }
        None => device.chunk_bytes_least()..=CHUNK_BYTES_MAX,
    };
    let mut longest = 0;
    let mut chunk_bytes = *chunks_from.start();
    while chunk_bytes <= *chunks_from.end()
        && let Some(layout) = device.layout(chunk_bytes)
    {
        if u64::from(config.value_bytes_max) <= layout.value_bytes_limit() {
            return Ok(layout);
        }
        longest = longest.max(layout.value_bytes_limit());
        chunk_bytes *= 2;
    }
    match longest {
        0 => Err(OpenError::TooSmall {
            have_bytes: device.bytes,
            need_bytes: device.bytes_least(*chunks_from.start()),
        }),
        value_bytes_max => Err(OpenError::ValuesTooLong { value_bytes_max }),
    }
}

impl LayoutInput {
    /// The units of the device that a volume can use: their numbers and those of their granules are bounded.
    fn units(self) -> u64 {
        let unit_bytes = u64::from(self.unit_bytes);
        let addressable = (GRANULES_LIMIT << GRANULE_LOG2.end()) / unit_bytes;
        (self.bytes / unit_bytes).min(VOLUME_UNITS_MAX).min(addressable)
    }

    /// Log2 of the shortest granule with which all bytes of the volume have a number.
    fn granule_log2(self) -> u8 {
        let bytes = self.units() * u64::from(self.unit_bytes);
        GRANULE_LOG2.into_iter().find(|&log2| bytes <= GRANULES_LIMIT << log2).unwrap_or(*GRANULE_LOG2.end())
    }

    /// The bytes of a chunk by the size of the device.
    fn chunk_bytes_least(self) -> u32 {
        let least = CHUNK_BYTES_LEAST.max(CHUNK_UNITS_LEAST * self.unit_bytes);
        let most = u64::from(CHUNK_BYTES_MAX);
        let part = (self.units() * u64::from(self.unit_bytes) / CHUNKS_IN_DEVICE).clamp(1, most) as u32;
        (1 << part.ilog2()).max(least)
    }

    /// The stores of a volume with so many chunks.
    fn stores(self, chunks: u64) -> u16 {
        let mut stores = self.partitions;
        while stores > 1 && u64::from(stores) * u64::from(STORE_CHUNKS_MIN) > chunks {
            stores /= 2;
        }
        stores
    }

    /// The units of each copy of a checkpoint area. Counts the chunks as if they had all of the device.
    fn area_units(self, chunk_bytes: u32) -> u64 {
        let bytes = self.units() * u64::from(self.unit_bytes);
        let chunks = (bytes / u64::from(chunk_bytes)).min(CHUNKS_MAX.into());
        let divisor = match self.unit_bytes {
            LARGE_UNIT_BYTES => AREAS_IN_DEVICE_LARGE_UNITS,
            _ => AREAS_IN_DEVICE,
        };
        let area_bytes = bytes / divisor
            + chunks * AREA_BYTES_PER_CHUNK
            + u64::from(self.stores(chunks)) * AREA_BYTES_PER_STORE;
        area_bytes.max(AREA_BYTES_MIN).div_ceil(self.unit_bytes.into())
    }

    /// The layout with chunks of so many bytes; `None` if there would be too few of them.
    fn layout(self, chunk_bytes: u32) -> Option<LogLayout> {
        let (unit_bytes, area_units) = (self.unit_bytes, self.area_units(chunk_bytes));
        let chunk_units = chunk_bytes / unit_bytes;
        let mut layout = LogLayout {
            unit_bytes,
            chunk_units,
            area_units,
            chunks_start_unit: 0,
            chunks: 0,
            stores: 1,
            granule_log2: self.granule_log2(),
        };
        layout.chunks_start_unit = layout.areas_end_unit();
        let chunks = self.units().saturating_sub(layout.chunks_start_unit) / u64::from(chunk_units);
        let chunks = chunks.min(CHUNKS_MAX.into());
        (chunks >= CHUNKS_MIN.into()).then(|| LogLayout {
            // At most `CHUNKS_MAX`.
            chunks: chunks as u32,
            stores: self.stores(chunks),
            ..layout
        })
    }

    /// The size of the smallest device for chunks of so many bytes.
    fn bytes_least(self, chunk_bytes: u32) -> u64 {
        let unit_bytes = u64::from(self.unit_bytes);
        let of_chunks = u64::from(CHUNKS_MIN) * u64::from(chunk_bytes);
        let mut bytes = of_chunks;
        // The areas grow by less than the device does.
        loop {
            let areas = 4 * LayoutInput { bytes, ..self }.area_units(chunk_bytes);
            let need = of_chunks + (superblock_units(self.unit_bytes) + areas) * unit_bytes;
            if need == bytes {
                return bytes;
            }
            bytes = need;
        }
    }
}

/// The superblock of a new volume on a device whose first bytes have this digest ([`digest_of`]).
fn new_superblock(layout: LogLayout, config: &FormatConfig, digest: u64) -> LogSuperblock {
    let mut random = Prng::new(config.seed);
    let first = random.next_u64();
    LogSuperblock {
        volume_id: if digest == 0 { first } else { mix64(first ^ digest) },
        hash_seed: config.hash_seed.unwrap_or_else(|| random.next_u64()),
        layout,
        namespace: config.namespace,
        value_bytes_max: config.value_bytes_max,
        generation: 0,
        incarnation: 0,
        checkpoint: LogCheckpoint::NONE,
        next_partition: layout.stores.into(),
        forgotten_below: Version::from_bits(0),
        is_clean_shutdown: true,
    }
}

/// A digest of bytes; 0 exactly if all are zero.
fn digest_of(bytes: &[u8]) -> u64 {
    if bytes.iter().all(|&byte| byte == 0) {
        return 0;
    }
    let (words, rest) = bytes.as_chunks();
    let digest = words.iter().fold(1, |digest, &word| mix64(digest ^ u64::from_le_bytes(word)));
    rest.iter().fold(digest, |digest, &byte| mix64(digest ^ u64::from(byte))).max(1)
}

/// The digest of what an earlier volume has left at the front of a device: superblocks, and the first bytes behind them.
async fn read_digest(device: &dyn Device) -> u64 {
    let area = Buffer::zeroed((SUPERBLOCK_AREA_BYTES + PROBE_BYTES) as usize);
    // What cannot be read is not zeros. A format may repair it, by writing.
    device.read(Lba(0), area).await.into_read().map_or(1, |bytes| digest_of(&bytes))
}

/// Creates an empty volume on the device, whose contents are lost; on a volatile device, too.
///
/// # Errors
/// [`OpenError`], if the configuration does not fit the device, or the device fails: there may be no volume then, or the new one.
///
/// # Panics
/// If the configuration is invalid for every device.
pub async fn format(device: &dyn Device, config: &FormatConfig) -> Result<(), OpenError> {
    let layout = choose_layout(device.geometry(), device.preferred_write_bytes(), config)?;
    let superblock = new_superblock(layout, config, read_digest(device).await);
    assert!(superblock.is_consistent(), "invalid configuration: {config:?}");
    erase_superblocks(device).await?;
    let unit_bytes = layout.unit_bytes as usize;
    let unit_blocks = u64::from(layout.unit_bytes / device.geometry().block_bytes);
    let mut number = Buffer::zeroed(unit_bytes);
    number[..8].copy_from_slice(&superblock.volume_id.to_le_bytes());
    device.write(Lba(layout.area_start_unit(0, 0) * unit_blocks), number).await.result?;
    for store in 0..u32::from(layout.stores) {
        let first = layout.unit_of(ChunkNumber(2 * store), 0);
        device.write(Lba(first * unit_blocks), Buffer::zeroed(unit_bytes)).await.result?;
    }
    device.flush().await.result?;
    write_superblock(device, &superblock).await?;
    Ok(())
}

/// Where a device has what, by the bytes of its superblocks; `None` without an intact superblock of this engine.
pub fn device_layout(format_region: &[u8]) -> Option<DeviceLayout> {
    let superblock: LogSuperblock = newest(&check_slots(format_region).collect::<Vec<_>>())?;
    Some(superblock.layout.device_layout())
}
