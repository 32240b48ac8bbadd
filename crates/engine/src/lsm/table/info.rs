//! What is known of a table without reading it, and its descriptor: the same on media.
//!
//! ```text
//!    0 magic "OKVT" u32   8 volume u64   24 first unit of the run u64   40 bytes of data before the first copy u32   52 index bytes u32
//!    4 CRC-32C u32       16 table u64    32 units of the run u32        44 unit of the second copy u32              56 unit in bytes u32
//!                                        36 descriptor bytes u32        48 filter bytes u32                         60 format u32: 1
//!   64 varints: data bytes, entries, keys, tombstones, smallest and largest sequence, largest version, earliest expiry + 1 (0: none),
//!      then of first and last key length and bytes, then segments, and of each: identifier, values, bytes
//! ```
//! The checksum covers bytes 8 to the end. A descriptor begins each copy of a table's metadata, at the start of a unit, so that a scan of
//! the device finds it.
//! Invariant: [`TableDescriptor::decode`] takes any bytes; what it gives is consistent: all parts lie within the run, in their order.
//! Tested below, by the tests of whole tables, and by the fuzz target `table_block`.

use crate::common::allocator::Extent;
use crate::common::superblock::COUNT_MAX;
use crate::lsm::entry::{push_varint, take_varint};
use octokv_base::{KEY_BYTES_MAX, UnixTime, Version, crc32c};
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"OKVT";
const FORMAT: u32 = 1;
/// The most bytes of a table, so that offsets have 32 bits.
pub const TABLE_BYTES_MAX: u64 = 1 << 30;
/// The most bytes of a descriptor besides its two keys and its segments.
pub const DESCRIPTOR_FIXED_BYTES_MAX: usize = HEADER_BYTES + 12 * 10;
/// The most bytes of a segment in a descriptor.
pub const SEGMENT_USE_BYTES_MAX: usize = 5 + 10 + 10;

/// Where a table and its parts lie: all that reading it takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TablePlace {
    /// The identifier of the table, unique in the volume for all time.
    pub id: u64,
    /// The first unit of its run.
    pub location: u64,
    /// The bytes of data before the first copy of the metadata, which begins in the next unit.
    pub front_bytes: u32,
    /// The unit of the run in which the second copy of the metadata begins.
    pub second_unit: u32,
    /// The length of the descriptor in bytes.
    pub descriptor_bytes: u32,
    /// The length of the filter, trailer included, in bytes.
    pub filter_bytes: u32,
    /// The length of the index, trailer included, in bytes.
    pub index_bytes: u32,
}

impl TablePlace {
    /// The length of a copy of the metadata, in bytes.
    pub fn metadata_bytes(&self) -> u64 {
        u64::from(self.descriptor_bytes) + u64::from(self.filter_bytes) + u64::from(self.index_bytes)
    }

    /// Where the copies of the metadata begin, in bytes from the start of the run.
    pub fn copies(&self, unit_bytes: u32) -> [u64; 2] {
        let unit_bytes = u64::from(unit_bytes);
        [u64::from(self.front_bytes).next_multiple_of(unit_bytes), u64::from(self.second_unit) * unit_bytes]
    }

    /// The units of the run that the table uses.
    pub fn units(&self, unit_bytes: u32) -> u64 {
        (self.copies(unit_bytes)[1] + self.metadata_bytes()).div_ceil(u64::from(unit_bytes))
    }

    /// Where a data block begins, in bytes from the start of the run; `None` if there is no such block.
    pub fn data_offset(&self, offset: u32, bytes: u32, unit_bytes: u32) -> Option<u64> {
        let end = u64::from(offset) + u64::from(bytes);
        if offset < self.front_bytes {
            return (end <= u64::from(self.front_bytes)).then_some(u64::from(offset));
        }
        let gap_bytes = self.tail_offset(unit_bytes) - u64::from(self.front_bytes);
        (end + gap_bytes <= self.copies(unit_bytes)[1]).then_some(u64::from(offset) + gap_bytes)
    }

    /// Where the data behind the first copy of the metadata begins, in bytes from the start of the run.
    pub fn tail_offset(&self, unit_bytes: u32) -> u64 {
        self.copies(unit_bytes)[0] + self.metadata_bytes()
    }

    /// Where the data blocks around an offset of the run end, which lie side by side from there.
    pub fn data_end(&self, offset: u64, unit_bytes: u32) -> u64 {
        let front_bytes = u64::from(self.front_bytes);
        if offset < front_bytes { front_bytes } else { self.copies(unit_bytes)[1] }
    }

    /// Whether the parts lie in their order, in a table that is not too long.
    pub fn is_consistent(&self, unit_bytes: u32) -> bool {
        self.descriptor_bytes as usize >= HEADER_BYTES
            && self.tail_offset(unit_bytes) <= self.copies(unit_bytes)[1]
            && self.copies(unit_bytes)[1] + self.metadata_bytes() <= TABLE_BYTES_MAX
    }
}

/// What a table refers to in a value segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentUse {
    /// The identifier of the segment.
    pub segment: u32,
    /// The number of entries with a value there.
    pub values: u64,
    /// The bytes of these values and of their keys: without the headers and the unused ends of their records.
    pub bytes: u64,
}

/// What is known of a table without reading it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableInfo {
    /// Where it lies.
    pub place: TablePlace,
    /// The run of units that it uses.
    pub extent: Extent,
    /// The bytes of its data blocks.
    pub data_bytes: u64,
    /// The number of its entries, at least 1.
    pub entries: u64,
    /// The number of their keys.
    pub keys: u64,
    /// The number of its tombstones.
    pub tombstones: u64,
    /// The smallest key.
    pub first_key: Box<[u8]>,
    /// The largest key.
    pub last_key: Box<[u8]>,
    /// The smallest sequence number of an entry.
    pub smallest_sequence: u64,
    /// The largest sequence number of an entry.
    pub largest_sequence: u64,
    /// The largest version of an entry; [`Version::NONE`] if none has one.
    pub largest_version: Version,
    /// The time at which the first entry expires; [`UnixTime::NEVER`] if none does.
    pub earliest_expiry: UnixTime,
    /// What it refers to in value segments, by rising identifiers.
    pub segments: Box<[SegmentUse]>,
}

/// A table as its descriptor describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableDescriptor {
    /// The volume.
    pub volume_id: u64,
    /// The length of a unit in bytes.
    pub unit_bytes: u32,
    /// The table.
    pub info: TableInfo,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct DescriptorHeader {
    magic: [u8; 4],
    crc: U32,
    volume_id: U64,
    table_id: U64,
    location: U64,
    units: U32,
    descriptor_bytes: U32,
    front_bytes: U32,
    second_unit: U32,
    filter_bytes: U32,
    index_bytes: U32,
    unit_bytes: U32,
    format: U32,
}

const HEADER_BYTES: usize = size_of::<DescriptorHeader>();
const _: () = assert!(HEADER_BYTES == 64 && offset_of!(DescriptorHeader, volume_id) == 8);
const _: () = assert!(offset_of!(DescriptorHeader, front_bytes) == 40);

impl TableDescriptor {
    /// Its bytes, whose length replaces the one that the place claims.
    pub fn encode(&mut self) -> Vec<u8> {
        let mut bytes = vec![0; HEADER_BYTES];
        let info = &mut self.info;
        let expiry = if info.earliest_expiry == UnixTime::NEVER { 0 } else { info.earliest_expiry.0 + 1 };
        for count in [info.data_bytes, info.entries, info.keys, info.tombstones] {
            push_varint(&mut bytes, count);
        }
        for number in [info.smallest_sequence, info.largest_sequence, info.largest_version.to_bits(), expiry]
        {
            push_varint(&mut bytes, number);
        }
        for key in [&info.first_key, &info.last_key] {
            push_varint(&mut bytes, key.len() as u64);
            bytes.extend_from_slice(key);
        }
        push_varint(&mut bytes, info.segments.len() as u64);
        for SegmentUse { segment, values, bytes: value_bytes } in &info.segments {
            for field in [u64::from(*segment), *values, *value_bytes] {
                push_varint(&mut bytes, field);
            }
        }
        info.place.descriptor_bytes = bytes.len() as u32;
        info.extent.units = info.place.units(self.unit_bytes);
        let TablePlace {
            id,
            location,
            front_bytes,
            second_unit,
            descriptor_bytes,
            filter_bytes,
            index_bytes,
        } = info.place;
        let mut header = DescriptorHeader {
            magic: MAGIC,
            crc: U32::ZERO,
            volume_id: self.volume_id.into(),
            table_id: id.into(),
            location: location.into(),
            units: (info.extent.units as u32).into(),
            descriptor_bytes: descriptor_bytes.into(),
            front_bytes: front_bytes.into(),
            second_unit: second_unit.into(),
            filter_bytes: filter_bytes.into(),
            index_bytes: index_bytes.into(),
            unit_bytes: self.unit_bytes.into(),
            format: FORMAT.into(),
        };
        bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        header.crc = crc32c(&bytes[8..]).into();
        bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        bytes
    }

    /// The descriptor at the front of `bytes`, which may be longer; `None` if there is none, or a damaged one.
    pub fn decode(bytes: &[u8]) -> Option<TableDescriptor> {
        let (header, _) = DescriptorHeader::read_from_prefix(bytes).ok()?;
        let claimed = usize::try_from(header.descriptor_bytes.get()).ok()?;
        if header.magic != MAGIC || claimed < HEADER_BYTES {
            return None;
        }
        let bytes = bytes.get(..claimed)?;
        if header.crc.get() != crc32c(&bytes[8..]) || header.format.get() != FORMAT {
            return None;
        }
        let unit_bytes = header.unit_bytes.get();
        let place = TablePlace {
            id: header.table_id.get(),
            location: header.location.get(),
            front_bytes: header.front_bytes.get(),
            second_unit: header.second_unit.get(),
            descriptor_bytes: header.descriptor_bytes.get(),
            filter_bytes: header.filter_bytes.get(),
            index_bytes: header.index_bytes.get(),
        };
        let is_consistent = unit_bytes.is_power_of_two()
            && place.is_consistent(unit_bytes)
            && place.units(unit_bytes) == u64::from(header.units.get())
            && place.location <= COUNT_MAX;
        if !is_consistent {
            return None;
        }
        let info = decode_info(place, unit_bytes, &bytes[HEADER_BYTES..])?;
        Some(TableDescriptor { volume_id: header.volume_id.get(), unit_bytes, info })
    }
}

fn decode_info(place: TablePlace, unit_bytes: u32, mut rest: &[u8]) -> Option<TableInfo> {
    let rest = &mut rest;
    let [data_bytes, entries, keys, tombstones] = take_varints(rest)?;
    let [smallest_sequence, largest_sequence, largest_version, expiry] = take_varints(rest)?;
    let (first_key, last_key) = (take_key(rest)?, take_key(rest)?);
    let count = usize::try_from(take_varint(rest)?).ok()?;
    // Three bytes at least for each.
    if count > rest.len() / 3 {
        return None;
    }
    let mut segments = Vec::with_capacity(count);
    for _ in 0..count {
        let [segment, values, bytes] = take_varints(rest)?;
        segments.push(SegmentUse { segment: u32::try_from(segment).ok()?, values, bytes });
    }
    let is_consistent = rest.is_empty()
        && data_bytes <= place.copies(unit_bytes)[1]
        && (1..=COUNT_MAX).contains(&entries)
        && (1..=entries).contains(&keys)
        && tombstones <= entries
        && first_key <= last_key
        && 1 <= smallest_sequence
        && smallest_sequence <= largest_sequence
        && largest_sequence <= COUNT_MAX
        && segments.is_sorted_by(|first, second| first.segment < second.segment);
    is_consistent.then(|| TableInfo {
        place,
        extent: Extent { location: place.location, units: place.units(unit_bytes) },
        data_bytes,
        entries,
        keys,
        tombstones,
        first_key,
        last_key,
        smallest_sequence,
        largest_sequence,
        largest_version: Version::from_bits(largest_version),
        earliest_expiry: expiry.checked_sub(1).map_or(UnixTime::NEVER, UnixTime),
        segments: segments.into(),
    })
}

fn take_varints<const COUNT: usize>(rest: &mut &[u8]) -> Option<[u64; COUNT]> {
    let mut numbers = [0; COUNT];
    for number in &mut numbers {
        *number = take_varint(rest)?;
    }
    Some(numbers)
}

fn take_key(rest: &mut &[u8]) -> Option<Box<[u8]>> {
    let length = usize::try_from(take_varint(rest)?).ok().filter(|&length| length <= KEY_BYTES_MAX)?;
    let (key, behind) = rest.split_at_checked(length)?;
    *rest = behind;
    Some(key.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn descriptor() -> TableDescriptor {
        let place = TablePlace {
            id: 9,
            location: 100,
            front_bytes: 1000,
            second_unit: 5,
            descriptor_bytes: 0,
            filter_bytes: 69,
            index_bytes: 40,
        };
        let segment = |segment| SegmentUse { segment, values: 3, bytes: 5000 };
        let info = TableInfo {
            place,
            extent: Extent { location: 100, units: 0 },
            data_bytes: 1200,
            entries: 12,
            keys: 9,
            tombstones: 4,
            first_key: b"a".as_slice().into(),
            last_key: b"zz".as_slice().into(),
            smallest_sequence: 7,
            largest_sequence: 1 << 40,
            largest_version: Version::from_bits(5),
            earliest_expiry: UnixTime(0),
            segments: [segment(2), segment(77)].into(),
        };
        TableDescriptor { volume_id: 42, unit_bytes: 512, info }
    }

    #[test]
    fn a_descriptor_round_trips_and_every_flipped_bit_is_found() {
        let mut descriptor = descriptor();
        let mut bytes = descriptor.encode();
        assert_eq!(descriptor.info.extent.units, 6);
        let length = bytes.len();
        bytes.extend_from_slice(b"filter");
        assert_eq!(TableDescriptor::decode(&bytes), Some(descriptor));
        for bit in 0..8 * length {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(TableDescriptor::decode(&bytes), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        for end in 0..length {
            assert_eq!(TableDescriptor::decode(&bytes[..end]), None, "{end} bytes");
        }
    }

    #[test]
    fn a_descriptor_that_contradicts_itself_is_refused() {
        let refused = |what: &str, change: &dyn Fn(&mut TableDescriptor)| {
            let mut descriptor = descriptor();
            change(&mut descriptor);
            assert_eq!(TableDescriptor::decode(&descriptor.encode()), None, "{what}");
        };
        refused("no entries", &|table| table.info.entries = 0);
        refused("no keys", &|table| table.info.keys = 0);
        refused("more keys than entries", &|table| table.info.keys = 13);
        refused("more tombstones than entries", &|table| table.info.tombstones = 13);
        refused("keys out of order", &|table| table.info.last_key = b"A".as_slice().into());
        refused("a long key", &|table| table.info.last_key = vec![b'z'; KEY_BYTES_MAX + 1].into());
        refused("no sequence", &|table| table.info.smallest_sequence = 0);
        refused("sequences out of order", &|table| table.info.smallest_sequence = (1 << 40) + 1);
        refused("a sequence beyond counting", &|table| table.info.largest_sequence = COUNT_MAX + 1);
        refused("a segment twice", &|table| table.info.segments[1].segment = 2);
        refused("more data than space", &|table| table.info.data_bytes = 5 * 512 + 1);
        refused("copies that overlap", &|table| table.info.place.second_unit = 2);
        refused("a table that is too long", &|table| table.info.place.second_unit = 1 << 21);
        refused("units of no power of two", &|table| table.unit_bytes = 500);
        refused("units that are too long", &|table| table.unit_bytes = 1 << 31);
        refused("a run beyond every device", &|table| table.info.place.location = COUNT_MAX + 1);
    }

    #[test]
    fn data_blocks_lie_on_both_sides_of_the_first_copy() {
        let mut descriptor = descriptor();
        descriptor.encode();
        let place = descriptor.info.place;
        let tail_offset = 1024 + place.metadata_bytes();
        assert_eq!(place.copies(512), [1024, 2560]);
        assert_eq!(place.data_offset(0, 1000, 512), Some(0));
        assert_eq!(place.data_offset(1, 1000, 512), None, "on both sides");
        assert_eq!(place.data_offset(1000, 6, 512), Some(tail_offset));
        let space = (2560 - tail_offset) as u32;
        assert_eq!(place.data_offset(1000, space, 512), Some(tail_offset));
        assert_eq!(place.data_offset(1000, space + 1, 512), None, "beyond the data");
        assert_eq!(place.data_offset(u32::MAX, u32::MAX, 512), None, "beyond all");
    }

    proptest! {
        #[test]
        fn any_bytes_under_a_valid_checksum_never_panic(
            changes in proptest::collection::vec((8..200usize, any::<u8>()), 1..6),
        ) {
            let mut bytes = descriptor().encode();
            let length = bytes.len();
            changes.iter().for_each(|(at, byte)| bytes[at % length] = *byte);
            bytes[..4].copy_from_slice(&MAGIC);
            let crc = crc32c(&bytes[8..]);
            bytes[4..8].copy_from_slice(&crc.to_le_bytes());
            if let Some(found) = TableDescriptor::decode(&bytes) {
                let TableInfo { place, extent, .. } = found.info;
                prop_assert!(extent.units * u64::from(found.unit_bytes) <= TABLE_BYTES_MAX + u64::from(found.unit_bytes));
                prop_assert!(place.copies(found.unit_bytes)[1] >= place.tail_offset(found.unit_bytes));
            }
        }
    }
}
