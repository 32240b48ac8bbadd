//! The layout of a volume of the log engine: superblocks, checkpoint areas, and chunks that both logs of all stores share.
//!
//! ```text
//!   superblocks │ area A copy 1 │ copy 2 │ area B copy 1 │ copy 2 │ chunk 0 │ chunk 1 │ … │ chunk n - 1
//!
//!   chunk of a key log     image │ image │ …                          addressed by units
//!   chunk of a value log   record │ record │ … │ directory             addressed by granules of 8, 16 or 32 bytes
//! ```
//! In: the sizes in a superblock. Out: where a chunk, a unit or a granule lies, and what lies at a unit or granule.
//!
//! Invariants, of a consistent layout: units have 36 bits and granules 40; a place in a chunk and its place on the device determine
//! each other.
//! Tested below.

use super::chunk_directory::DirectoryPlace;
use super::log_place::{ChunkIndex, ChunkNumber};
use super::segment_entry::{GRANULES_LIMIT, LOG_VALUE_BYTES_MAX};
use super::segment_ref::CHAIN_MAX;
use super::value_record::record_granules;
use crate::DeviceLayout;
use crate::common::record::{RecordFlags, RecordMeta};
use crate::common::volume_layout::{UNIT_BYTES, VOLUME_UNITS_MAX, superblock_units};
use crate::open_error::OpenError;
use octokv_base::{KEY_BYTES_MAX, UnixTime, Version};
use octokv_device::Geometry;

/// The fewest units of a chunk.
pub const CHUNK_UNITS_MIN: u32 = 16;
/// The units of each key chunk that images leave to a marker. So a round of key compaction, which writes the live images of a chunk and a
/// marker, takes no more than the chunk that it frees ([`super::space_limits`]).
pub const MARKER_UNITS: u32 = 1;
/// The longest chunk, in bytes.
pub const CHUNK_BYTES_MAX: u32 = 16 << 20;
/// The fewest chunks of a volume.
pub const CHUNKS_MIN: u32 = 64;
/// The most chunks of a volume.
pub const CHUNKS_MAX: u32 = 1 << 26;
/// The fewest chunks for each initial store.
pub const STORE_CHUNKS_MIN: u32 = 16;
/// A chunk has at least this part of the longest value, which bounds the extents of a value.
pub const CHUNKS_IN_VALUE_MAX: u32 = 64;
/// The longest value has at most this part of all chunks: compaction moves it as a whole, into chunks that stay free for that. Then at least
/// a fifth of any pool is capacity ([`super::space_limits`]).
pub const VALUES_IN_CHUNKS_MIN: u64 = 8;
/// The possible granules: powers of two from 8 to 32 bytes.
pub const GRANULE_LOG2: std::ops::RangeInclusive<u8> = 3..=5;

/// The sizes by which chunks of a pool are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkSizes {
    /// Units of a chunk.
    pub units: u32,
    /// Bytes of a unit.
    pub unit_bytes: u32,
    /// Log2 of the bytes of a granule.
    pub granule_log2: u8,
}

impl ChunkSizes {
    /// The units of a key chunk in which images lie.
    pub fn image_units(&self) -> u32 {
        self.units - MARKER_UNITS
    }
}

/// The regions of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogLayout {
    /// Bytes per unit, the granularity of the key log and of writes: 512, 1024, 2048 or 4096.
    pub unit_bytes: u32,
    /// Units of a chunk, a power of two of at least [`CHUNK_UNITS_MIN`].
    pub chunk_units: u32,
    /// Units of each checkpoint area's copy.
    pub area_units: u64,
    /// The first unit of chunk 0.
    pub chunks_start_unit: u64,
    /// Chunks, [`CHUNKS_MIN`] to [`CHUNKS_MAX`].
    pub chunks: u32,
    /// Stores at format, each with [`STORE_CHUNKS_MIN`] chunks at least.
    pub stores: u16,
    /// Log2 of the bytes of a granule, the granularity of the value log.
    pub granule_log2: u8,
}

impl LogLayout {
    /// The first unit of a copy (0, 1) of a checkpoint area (0, 1).
    pub fn area_start_unit(&self, area: u8, copy: u64) -> u64 {
        superblock_units(self.unit_bytes) + (u64::from(area) * 2 + copy) * self.area_units
    }

    /// The first unit behind the checkpoint areas, where the chunks have to begin.
    pub fn areas_end_unit(&self) -> u64 {
        self.area_start_unit(0, 4)
    }

    /// The units of the whole volume.
    pub fn units(&self) -> u64 {
        self.chunks_start_unit + u64::from(self.chunks) * u64::from(self.chunk_units)
    }

    /// The bytes of a chunk.
    pub fn chunk_bytes(&self) -> u32 {
        self.chunk_units * self.unit_bytes
    }

    /// The granules of a chunk.
    pub fn chunk_granules(&self) -> u32 {
        self.chunk_bytes() >> self.granule_log2
    }

    /// The granules of a unit.
    pub fn unit_granules(&self) -> u32 {
        self.unit_bytes >> self.granule_log2
    }

    /// The sizes by which chunks are measured.
    pub fn chunk_sizes(&self) -> ChunkSizes {
        ChunkSizes { units: self.chunk_units, unit_bytes: self.unit_bytes, granule_log2: self.granule_log2 }
    }

    /// The units of a key chunk in which images lie.
    pub fn image_units(&self) -> u32 {
        self.chunk_sizes().image_units()
    }

    /// The most buckets of a segment image: two of the longest images fit into a chunk, and a marker.
    pub fn chain_max(&self) -> u8 {
        (self.image_units() / 2).min(CHAIN_MAX.into()) as u8
    }

    /// The unit of the device at which a unit of a chunk lies.
    pub fn unit_of(&self, chunk: ChunkNumber, unit: u32) -> u64 {
        self.chunks_start_unit + u64::from(chunk.0) * u64::from(self.chunk_units) + u64::from(unit)
    }

    /// The chunk in which a unit of the device lies, and the unit in it; `None` if it is in none.
    pub fn place_of_unit(&self, unit: u64) -> Option<(ChunkNumber, u32)> {
        let within = unit.checked_sub(self.chunks_start_unit)?;
        self.place_within(within, self.chunk_units)
    }

    /// The granule of the device at which a granule of a chunk lies.
    pub fn granule_of(&self, chunk: ChunkNumber, granule: u32) -> u64 {
        self.chunks_start_unit * u64::from(self.unit_granules())
            + u64::from(chunk.0) * u64::from(self.chunk_granules())
            + u64::from(granule)
    }

    /// The chunk in which a granule of the device lies, and the granule in it; `None` if it is in none.
    pub fn place_of_granule(&self, granule: u64) -> Option<(ChunkNumber, u32)> {
        let within = granule.checked_sub(self.chunks_start_unit * u64::from(self.unit_granules()))?;
        self.place_within(within, self.chunk_granules())
    }

    fn place_within(&self, within: u64, per_chunk: u32) -> Option<(ChunkNumber, u32)> {
        let chunk = within / u64::from(per_chunk);
        let is_chunk = chunk < u64::from(self.chunks);
        is_chunk.then_some((ChunkNumber(chunk as u32), (within % u64::from(per_chunk)) as u32))
    }

    /// The longest value of a volume with these chunks, in bytes.
    pub fn value_bytes_limit(&self) -> u64 {
        let chunk_bytes = u64::from(self.chunk_bytes());
        (u64::from(self.chunks) * chunk_bytes / VALUES_IN_CHUNKS_MIN)
            .min(chunk_bytes * u64::from(CHUNKS_IN_VALUE_MAX))
            .min(LOG_VALUE_BYTES_MAX.into())
    }

    /// The chunks that a record takes whose value has at most so many bytes, with the directory of each: those that it may open.
    pub fn record_chunks_max(&self, value_bytes_max: u32) -> u32 {
        // Any place has the same lengths.
        let (chunk_bytes, granule_log2) = (self.chunk_bytes(), self.granule_log2);
        let place =
            DirectoryPlace { volume_id: 0, partition: 0, index: ChunkIndex(0), chunk_bytes, granule_log2 };
        let meta = RecordMeta {
            version: Version::from_bits(1),
            expires_at: UnixTime(0),
            flags: RecordFlags::VERSIONED,
        };
        let granules = record_granules(KEY_BYTES_MAX, value_bytes_max, &meta, granule_log2);
        granules.div_ceil(place.free_granules(0, 0)).max(1)
    }

    /// Checks that a device has room for the volume, and blocks that are no longer than its units.
    ///
    /// # Errors
    /// [`OpenError::TooSmall`] or [`OpenError::BlockTooLarge`].
    pub fn check_device(&self, geometry: Geometry) -> Result<(), OpenError> {
        let need_bytes = self.units() * u64::from(self.unit_bytes);
        if geometry.bytes() < need_bytes {
            return Err(OpenError::TooSmall { have_bytes: geometry.bytes(), need_bytes });
        }
        if geometry.block_bytes > self.unit_bytes {
            let (block_bytes, unit_bytes) = (geometry.block_bytes, self.unit_bytes);
            return Err(OpenError::BlockTooLarge { block_bytes, unit_bytes });
        }
        Ok(())
    }

    /// Where the volume's device has what, in bytes. There is no journal.
    pub fn device_layout(&self) -> DeviceLayout {
        let unit = u64::from(self.unit_bytes);
        let area = |area| {
            let start = self.area_start_unit(area, 0);
            start * unit..(start + self.area_units) * unit
        };
        let chunks_start = self.chunks_start_unit * unit;
        DeviceLayout {
            unit_bytes: self.unit_bytes,
            records: chunks_start..self.units() * unit,
            journal: chunks_start..chunks_start,
            images: [0, 1].map(area).into(),
        }
    }

    /// Whether the fields are consistent. A valid checksum does not imply valid fields.
    pub fn is_consistent(&self) -> bool {
        UNIT_BYTES.contains(&self.unit_bytes)
            && self.chunk_units.is_power_of_two()
            && self.chunk_units >= CHUNK_UNITS_MIN
            && self.chunk_units <= CHUNK_BYTES_MAX / self.unit_bytes
            && GRANULE_LOG2.contains(&self.granule_log2)
            && (CHUNKS_MIN..=CHUNKS_MAX).contains(&self.chunks)
            && self.stores > 0
            && u32::from(self.stores) * STORE_CHUNKS_MIN <= self.chunks
            && self.area_units <= VOLUME_UNITS_MAX
            && self.areas_end_unit() == self.chunks_start_unit
            && self.units() <= VOLUME_UNITS_MAX
            && self.granule_of(ChunkNumber(self.chunks), 0) <= GRANULES_LIMIT
    }
}

#[cfg(test)]
mod tests {
    use super::super::segment_entry::EXTENTS_MAX;
    use super::super::space_limits::SpaceLimits;
    use super::*;
    use proptest::prelude::*;

    const LAYOUT: LogLayout = LogLayout {
        unit_bytes: 512,
        chunk_units: 128,
        area_units: 128,
        chunks_start_unit: 32 + 512,
        chunks: 123,
        stores: 4,
        granule_log2: 3,
    };

    proptest! {
        #[test]
        fn a_place_in_a_chunk_and_on_the_device_determine_each_other(
            chunk in 0..123u32,
            unit in 0..128u32,
            granule in 0..8192u32,
            granule_log2 in GRANULE_LOG2,
        ) {
            let layout = LogLayout { granule_log2, ..LAYOUT };
            prop_assert!(layout.is_consistent());
            let granule = granule % layout.chunk_granules();
            let chunk = ChunkNumber(chunk);
            prop_assert_eq!(layout.place_of_unit(layout.unit_of(chunk, unit)), Some((chunk, unit)));
            let granule_of = layout.granule_of(chunk, granule);
            prop_assert_eq!(layout.place_of_granule(granule_of), Some((chunk, granule)));
            // Both count the same bytes.
            let first = layout.unit_of(chunk, 0) * 512;
            prop_assert_eq!(layout.granule_of(chunk, 0) << granule_log2, first);
        }
    }

    #[test]
    fn what_is_outside_of_the_chunks_is_in_none() {
        assert_eq!(LAYOUT.units(), 544 + 123 * 128);
        for unit in [0, 543, LAYOUT.units(), u64::MAX] {
            assert_eq!(LAYOUT.place_of_unit(unit), None, "unit {unit}");
        }
        for granule in [0, 544 * 64 - 1, LAYOUT.units() * 64, u64::MAX] {
            assert_eq!(LAYOUT.place_of_granule(granule), None, "granule {granule}");
        }
    }

    #[test]
    fn regions_follow_one_another() {
        let regions = LAYOUT.device_layout();
        let starts = [(0, 0), (0, 1), (1, 0), (1, 1)].map(|(area, copy)| LAYOUT.area_start_unit(area, copy));
        assert_eq!(starts, [32, 160, 288, 416]);
        assert_eq!(regions.images[1], 288 * 512..416 * 512);
        assert_eq!(regions.records, 544 * 512..LAYOUT.units() * 512);
        assert!(regions.journal.is_empty());
        assert_eq!((LAYOUT.chunk_bytes(), LAYOUT.chunk_granules(), LAYOUT.chain_max()), (64 << 10, 8192, 63));
        // Two images of 7 units, and a marker.
        assert_eq!(LogLayout { chunk_units: 16, ..LAYOUT }.chain_max(), 7);
        assert_eq!(LAYOUT.image_units(), 127);
    }

    #[test]
    fn the_longest_value_is_a_part_of_the_chunks() {
        assert_eq!(LAYOUT.value_bytes_limit(), (123 << 16) / 8);
        assert_eq!(LogLayout { chunks: 1 << 20, ..LAYOUT }.value_bytes_limit(), 4 << 20);
        assert_eq!(
            LogLayout { chunks: 1 << 20, chunk_units: 1 << 15, ..LAYOUT }.value_bytes_limit(),
            256 << 20
        );
    }

    #[test]
    fn a_record_of_the_longest_value_takes_one_chunk_more_than_its_value_at_most() {
        for (unit_bytes, chunk_units) in [(512, 16), (512, 128), (4096, 16), (4096, 4096)] {
            for chunks in [64, 65, 123, 511, 512, 4096] {
                for granule_log2 in GRANULE_LOG2 {
                    let layout = LogLayout { unit_bytes, chunk_units, chunks, granule_log2, ..LAYOUT };
                    let longest = layout.value_bytes_limit();
                    let record_chunks = layout.record_chunks_max(longest as u32);
                    let of_value = longest.div_ceil(layout.chunk_bytes().into()) as u32;
                    assert!(
                        (of_value..=of_value + 1).contains(&record_chunks),
                        "{layout:?}: {record_chunks}"
                    );
                    // One extent more, if the first one begins in the rest of a chunk.
                    assert!(record_chunks < EXTENTS_MAX as u32, "{layout:?}");
                    SpaceLimits::new(chunks, 1, record_chunks);
                }
            }
        }
        assert_eq!(
            [1, 60 << 10, 64 << 10, 1 << 20].map(|bytes| LAYOUT.record_chunks_max(bytes)),
            [1, 1, 2, 17]
        );
    }

    #[test]
    fn the_last_value_of_each_field_is_consistent_and_the_next_is_not() {
        type Change = fn(&mut LogLayout, u64);
        fn set_area(layout: &mut LogLayout, units: u64) {
            layout.area_units = units;
            layout.chunks_start_unit = 32 + 4 * units;
        }
        fn set_chunks(layout: &mut LogLayout, chunks: u64) {
            (layout.chunks, layout.stores) = (chunks as u32, 1);
        }
        let granules: Change = |layout, area_units| {
            // 2^36 - 1 units of 4,096 bytes are 256 TiB, far more than 2^40 granules of 32 bytes.
            layout.unit_bytes = 4096;
            layout.chunk_units = 4096;
            layout.granule_log2 = 5;
            layout.area_units = area_units;
            layout.chunks_start_unit = 4 + 4 * area_units;
            layout.chunks = 1 << 20;
        };
        let areas_max = ((1u64 << 40) / 128 - (1 << 32) - 4) / 4;
        let limits: [(&str, u64, u64, Change); 13] = [
            ("unit", 512, 511, |layout, bytes| layout.unit_bytes = bytes as u32),
            ("shortest chunk", 16, 8, |layout, units| layout.chunk_units = units as u32),
            ("longest chunk", 1 << 15, 1 << 16, |layout, units| layout.chunk_units = units as u32),
            ("power of two", 256, 255, |layout, units| layout.chunk_units = units as u32),
            ("fewest chunks", 64, 63, set_chunks),
            ("most chunks", 1 << 26, (1 << 26) + 1, set_chunks),
            ("stores", 7, 8, |layout, stores| layout.stores = stores as u16),
            ("a store", 1, 0, |layout, stores| layout.stores = stores as u16),
            ("shortest granule", 3, 2, |layout, log2| layout.granule_log2 = log2 as u8),
            ("longest granule", 5, 6, |layout, log2| layout.granule_log2 = log2 as u8),
            ("start of chunks", 544, 545, |layout, unit| layout.chunks_start_unit = unit),
            ("area", 1 << 20, u64::MAX / 8, set_area),
            ("granules", areas_max, areas_max + 1, granules),
        ];
        for (field, last, next, change) in limits {
            let [last, next] = [last, next].map(|value| {
                let mut layout = LAYOUT;
                change(&mut layout, value);
                layout.is_consistent()
            });
            assert!(last, "{field}: the last");
            assert!(!next, "{field}: the next");
        }
    }
}
