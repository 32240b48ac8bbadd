//! The swap region of a device: values of keys of other devices, in a volume of the log engine at the end of the device.
//!
//! ```text
//!   device    ┌ superblocks of the span ┬ volume with the keys of the device ┬ swap region: a volume of the log engine ┐
//!   record    key ─▶ version u64, version at home u64, 16 B of zeros, value          little-endian
//! ```
//! A key in a region has its newest value there. *Version at home* is the one that the key's home device has; it is lower than the
//! version only if a put with a version was swapped. A put without a version of a key with one is not swapped: of two values of one version it would not be known which is newer.
//! LEED has such a region as a part of another device's circular log (§3.6). Here it is a volume of its own, so that opening lists the swapped keys
//! without reading the keys of the device. Tested in `tests/spanned_swap.rs` and `tests/spanned_swap_failures.rs`, which version counts below.

use super::places::MemberPlace;
use crate::common::superblock::SUPERBLOCK_AREA_BYTES;
use crate::log::handle::LogEngine;
use crate::log::volume::LogVolume;
use crate::{
    Engine, EngineError, EngineKind, FormatConfig, OpenConfig, OpenError, PutOptions, PutValue, StoredValue,
    ValueRange, Volume,
};
use futures_util::future::join_all;
use octokv_base::{Buffer, BufferPool, Key, Prng, RecordLayout, Version};
use octokv_device::Device;
use octokv_device::device_window::DeviceWindow;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use zerocopy::byteorder::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The size of a swap region is a multiple of this.
pub const SWAP_UNIT_BYTES: u64 = 64 << 10;
/// The stores of a region: it is written by few keys.
const REGION_STORES: u16 = 4;
/// The keys that are read at once when a region is opened.
pub(super) const READ_AT_ONCE: usize = 64;

/// The volume of a swap region.
pub(super) type SwapVolume = Arc<LogVolume>;

/// A region as it was opened.
pub(super) struct OpenedRegion {
    pub volume: SwapVolume,
    /// A key whose record cannot be read has no versions.
    pub keys: Vec<(Key, Option<SwappedVersions>)>,
    /// Whether damage hides no keys.
    pub is_whole: bool,
}

/// The versions of a swapped key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SwappedVersions {
    /// That of its value.
    pub version: Version,
    /// That which its home has.
    pub at_home: Version,
}

impl SwappedVersions {
    /// How the value of a record is stored at a home that did not take it, since it has version `found`; `None` if what home has is newer.
    /// - Home has an earlier version: an earlier merge stored an older record and could not remove it, or home lost its value.
    /// - The same version: an earlier merge stored this record, or a replacement that was not counted left a tombstone.
    /// - A later version: a write failed, and is on home's device nevertheless. A value without a version would have been put over it.
    pub fn options_over(&self, found: Version) -> Option<PutOptions> {
        match self.version {
            version if version > found => Some(PutOptions { version, ..PutOptions::default() }),
            version if version == found || version == Version::NONE => Some(PutOptions::default()),
            _ => None,
        }
    }
}

/// The front of the value of a record.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct SwapHeader {
    version: U64,
    at_home: U64,
    zero: [u8; 16],
}

const SWAP_HEADER_BYTES: usize = size_of::<SwapHeader>();

/// The bytes of a device before its swap region and behind the superblocks of the span.
pub(super) fn keys_range(device_bytes: u64, swap_bytes: u64) -> Range<u64> {
    let end = device_bytes.saturating_sub(swap_bytes).max(SUPERBLOCK_AREA_BYTES);
    SUPERBLOCK_AREA_BYTES..end
}

/// The bytes of the swap region of a device.
fn swap_range(device_bytes: u64, swap_bytes: u64) -> Range<u64> {
    keys_range(device_bytes, swap_bytes).end..device_bytes
}

/// The swap region of a device.
pub(super) fn swap_device(device: &Rc<dyn Device>, swap_bytes: u64) -> Rc<dyn Device> {
    let range = swap_range(device.geometry().bytes(), swap_bytes);
    Rc::new(DeviceWindow::part(Rc::clone(device), range))
}

/// Where the blocks of a region lie on its device.
pub(super) fn swap_place(device: usize, whole: &dyn Device, swap_bytes: u64) -> MemberPlace {
    MemberPlace::behind(device as u16, whole, swap_range(whole.geometry().bytes(), swap_bytes).start)
}

/// Whether a volume of this configuration can have swap regions, if it is to have any.
///
/// # Errors
/// [`OpenError::SwapEngine`] or [`OpenError::SwapBytes`].
pub fn check_swaps(config: &FormatConfig) -> Result<(), OpenError> {
    let has_versions =
        config.engine == EngineKind::Log || config.engine == EngineKind::Hash && config.version > 1;
    let units = config.swap_bytes / SWAP_UNIT_BYTES;
    match config.swap_bytes {
        0 => Ok(()),
        _ if !has_versions => Err(OpenError::SwapEngine),
        bytes if !bytes.is_multiple_of(SWAP_UNIT_BYTES) || units > u32::MAX.into() => {
            Err(OpenError::SwapBytes { bytes })
        }
        _ => Ok(()),
    }
}

/// The format of the region of a device whose volume has this format.
pub(super) fn swap_format(of_volume: &FormatConfig) -> FormatConfig {
    FormatConfig {
        engine: EngineKind::Log,
        partitions: REGION_STORES,
        chunk_bytes: None,
        value_bytes_max: of_volume.value_bytes_max + SWAP_HEADER_BYTES as u32,
        seed: Prng::new(of_volume.seed).next_u64(),
        ..*of_volume
    }
}

/// How the region of a device is opened.
fn swap_config(of_volume: &OpenConfig) -> OpenConfig {
    OpenConfig { cache_bytes: 0, prepare_bytes: 0, ..of_volume.clone() }
}

/// A record of a region, for a value whose buffer has the layout `of`. REQUIRES: its buffers have all of it.
pub(super) fn swap_value(
    layout: RecordLayout,
    key: &Key,
    versions: SwappedVersions,
    value: &PutValue,
    of: RecordLayout,
) -> PutValue {
    let SwappedVersions { version, at_home } = versions;
    let header =
        SwapHeader { version: version.to_bits().into(), at_home: at_home.to_bits().into(), zero: [0; 16] };
    let at = layout.value_offset(key.len());
    let mut record = Buffer::zeroed(at + SWAP_HEADER_BYTES + value.bytes);
    record[at..][..SWAP_HEADER_BYTES].copy_from_slice(header.as_bytes());
    let mut to = at + SWAP_HEADER_BYTES;
    let first = &value.record[of.value_offset(key.len())..];
    for part in std::iter::once(first).chain(value.more.iter().flatten().map(|buffer| &buffer[..])) {
        let bytes = part.len().min(record.len() - to);
        record[to..][..bytes].copy_from_slice(&part[..bytes]);
        to += bytes;
    }
    PutValue::new(record, SWAP_HEADER_BYTES + value.bytes)
}

/// The versions of a record, and a part of its value; `None` if there is none, or it is too short for versions.
///
/// # Errors
/// Of the engine.
pub(super) async fn read_record(
    region: &LogEngine,
    key: &Key,
    range: ValueRange,
) -> Result<Option<(SwappedVersions, StoredValue)>, EngineError> {
    let end = range.offset.saturating_add(range.bytes_max).saturating_add(SWAP_HEADER_BYTES as u32);
    let record = region.get_range(key, ValueRange { offset: 0, bytes_max: end }).await?;
    Ok(record.and_then(|record| split_record(record, range)))
}

fn split_record(record: StoredValue, range: ValueRange) -> Option<(SwappedVersions, StoredValue)> {
    let (header, _) = SwapHeader::read_from_prefix(record.as_bytes()).ok()?;
    let versions = SwappedVersions {
        version: Version::from_bits(header.version.get()),
        at_home: Version::from_bits(header.at_home.get()),
    };
    let value_bytes = record.value_bytes - SWAP_HEADER_BYTES as u32;
    let wanted = range.within(value_bytes);
    let offset = record.offset + SWAP_HEADER_BYTES as u32 + wanted.start;
    let bytes = wanted.end - wanted.start;
    Some((versions, StoredValue { offset, bytes, value_bytes, version: versions.version, ..record }))
}

/// Opens the region of a device, and lists its keys with their versions.
///
/// # Errors
/// The region cannot be opened or listed.
pub(super) async fn open_region(
    device: &Rc<dyn Device>,
    pool: &BufferPool,
    config: &OpenConfig,
    format: &FormatConfig,
) -> Result<OpenedRegion, OpenError> {
    let devices = [Rc::clone(device)];
    let volume =
        <SwapVolume as Volume>::open(&devices, pool, swap_config(config), &swap_format(format)).await?;
    let engine = volume.engine(0, &devices, pool.clone());
    let mut listed = Vec::new();
    let mut collect = |key: &[u8]| {
        listed.push(Key::new(key).expect("a key of the volume"));
        true
    };
    let is_whole = engine.list_whole(&mut collect).await?;
    let mut keys = Vec::with_capacity(listed.len());
    let versions_of = async |key| {
        let read = read_record(&engine, key, ValueRange { offset: 0, bytes_max: 0 }).await;
        read.map(|record| record.map(|(versions, _)| versions))
    };
    for some in listed.chunks(READ_AT_ONCE) {
        let versions = join_all(some.iter().map(&versions_of)).await;
        for (key, mut read) in some.iter().zip(versions) {
            // A small pool has no buffers for so many reads at once.
            if read == Err(EngineError::NoMemory) {
                read = versions_of(key).await;
            }
            keys.push((key.clone(), read.unwrap_or(None)));
        }
    }
    Ok(OpenedRegion { volume, keys, is_whole })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_stored_over_what_is_not_newer_than_it() {
        let version = Version::from_bits;
        let over = |own: u64, found: u64| {
            let versions = SwappedVersions { version: version(own), at_home: Version::NONE };
            versions.options_over(version(found)).map(|options| options.version)
        };
        assert_eq!(over(3, 2), Some(version(3)), "an earlier record, or nothing");
        assert_eq!(over(3, 3), Some(Version::NONE), "the same record, or a tombstone");
        assert_eq!(over(3, 4), None, "a later write");
        assert_eq!(over(0, 4), Some(Version::NONE), "a put without a version behind a write that failed");
    }
}
