//! The layout of a volume on one device, and the location of its last complete checkpoint: the fields that the superblocks of all
//! engines with a journal share, and the rules for them.
//!
//! ```text
//!   superblocks │ journal copy 1 │ copy 2 │ area A copy 1 │ copy 2 │ area B copy 1 │ copy 2 │ data
//!
//!   layout        0 unit_bytes u32        16 data_start_unit u64     checkpoint    0 id u64                        16 bytes u64
//!                 4 journal_units u32     24 data_units u64                        8 area u32 (0, 1; 2 = none yet)  24 first batch u64
//!                 8 area_units u64                                                12 journal unit u32              32 entry u64
//! ```
//! Where they are in a superblock, and where the checkpoint's incarnation is, each engine says. Integers are little-endian.

use super::journal::{BATCH_HEADER_BYTES, batch_units};
use super::superblock::{COUNT_MAX, SUPERBLOCK_AREA_BYTES, SuperblockError, SuperblockField};
use crate::DeviceLayout;
use crate::open_error::OpenError;
use octokv_device::Geometry;
use std::ops::Range;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The possible units, in bytes.
pub const UNIT_BYTES: [u32; 4] = [512, 1024, 2048, 4096];
/// The least capacity of the journal, in batches of the largest size.
pub const RING_BATCHES_MIN: u32 = 8;
/// The limit of the journal's units: beyond any real ring, and safe from overflow of a position and a batch.
pub const JOURNAL_UNITS_MAX: u32 = 1 << 31;
/// The most units of a volume.
pub const VOLUME_UNITS_MAX: u64 = (1 << 36) - 1;

/// Units before the journal.
pub const fn superblock_units(unit_bytes: u32) -> u64 {
    SUPERBLOCK_AREA_BYTES / unit_bytes as u64
}

/// The least units of a journal's copy, whose batches have at most so many bytes.
pub const fn ring_units_min(batch_bytes_max: usize, unit_bytes: u32) -> u32 {
    RING_BATCHES_MIN * batch_units(batch_bytes_max - BATCH_HEADER_BYTES, unit_bytes)
}

/// The regions of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeLayout {
    /// Bytes per unit, the granularity of allocation: 512, 1024, 2048 or 4096.
    pub unit_bytes: u32,
    /// Units of each of the two journal copies.
    pub journal_units: u32,
    /// Units of each checkpoint area's copy.
    pub area_units: u64,
    /// The first unit of the data area.
    pub data_start_unit: u64,
    /// Units of the data area.
    pub data_units: u64,
}

impl VolumeLayout {
    /// A layout without a data area.
    pub fn without_data(unit_bytes: u32, journal_units: u32, area_units: u64) -> VolumeLayout {
        let mut layout =
            VolumeLayout { unit_bytes, journal_units, area_units, data_start_unit: 0, data_units: 0 };
        layout.data_start_unit = layout.area_start_unit(0, 4);
        layout
    }

    /// The units of the whole volume.
    pub fn units(&self) -> u64 {
        self.data_start_unit + self.data_units
    }

    /// The units of the data area.
    pub fn record_units(&self) -> Range<u64> {
        self.data_start_unit..self.units()
    }

    /// The first unit of a copy (0, 1) of the journal.
    pub fn journal_start_unit(&self, copy: u64) -> u64 {
        superblock_units(self.unit_bytes) + copy * u64::from(self.journal_units)
    }

    /// The first unit of a copy (0, 1) of a checkpoint area (0, 1).
    pub fn area_start_unit(&self, area: u8, copy: u64) -> u64 {
        let areas = self.journal_start_unit(2);
        areas + (u64::from(area) * 2 + copy) * self.area_units
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

    /// Where the volume's device has what, in bytes.
    pub fn device_layout(&self) -> DeviceLayout {
        let unit = u64::from(self.unit_bytes);
        let bytes = |start: u64, units: u64| start * unit..(start + units) * unit;
        let area = |area| bytes(self.area_start_unit(area, 0), self.area_units);
        DeviceLayout {
            unit_bytes: self.unit_bytes,
            records: bytes(self.data_start_unit, self.data_units),
            journal: bytes(self.journal_start_unit(0), self.journal_units.into()),
            images: [0, 1].map(area).into(),
        }
    }

    /// Whether the fields are consistent, for a journal whose batches have at most so many bytes. A valid checksum does not imply
    /// valid fields.
    pub fn is_consistent(&self, batch_bytes_max: usize) -> bool {
        UNIT_BYTES.contains(&self.unit_bytes)
            && self.area_units <= VOLUME_UNITS_MAX
            && self.area_start_unit(0, 4) == self.data_start_unit
            && self.data_start_unit.checked_add(self.data_units).is_some_and(|end| end <= VOLUME_UNITS_MAX)
            && self.journal_units >= ring_units_min(batch_bytes_max, self.unit_bytes)
            && self.journal_units < JOURNAL_UNITS_MAX
    }
}

/// The location of the last checkpoint, and the position at which replay begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checkpoint {
    /// Its area, 0 or 1; `None` before the first checkpoint.
    pub area: Option<u8>,
    /// Its number.
    pub id: u64,
    /// The length of its images in bytes.
    pub bytes: u64,
    /// The unit of the ring at which the first batch to replay begins.
    pub journal_unit: u32,
    /// The number of that batch.
    pub batch: u64,
    /// The last entry number assigned before that batch.
    pub entry: u64,
    /// The opening that wrote it: replay ignores batches of earlier ones.
    pub incarnation: u32,
}

impl Checkpoint {
    /// That of a new volume: none, and batches that count from 1.
    pub const NONE: Checkpoint =
        Checkpoint { area: None, id: 0, bytes: 0, journal_unit: 0, batch: 1, entry: 0, incarnation: 0 };

    /// The area of the next checkpoint.
    pub(crate) fn next_area(&self) -> u8 {
        1 - self.area.unwrap_or(1)
    }

    /// Whether the fields are consistent with a layout that is.
    pub fn is_consistent(&self, layout: &VolumeLayout) -> bool {
        [self.id, self.batch, self.entry].iter().all(|&count| count < COUNT_MAX)
            // Batches count from 1: 0 is "none".
            && self.batch > 0
            && self.journal_unit < layout.journal_units
            && self.bytes.div_ceil(u64::from(layout.unit_bytes)) <= layout.area_units
    }
}

/// The layout in a superblock, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub(crate) struct RegionsLayout {
    unit_bytes: U32,
    journal_units: U32,
    area_units: U64,
    data_start_unit: U64,
    data_units: U64,
}
const _: () = assert!(size_of::<RegionsLayout>() == 32);

impl From<VolumeLayout> for RegionsLayout {
    fn from(layout: VolumeLayout) -> RegionsLayout {
        RegionsLayout {
            unit_bytes: layout.unit_bytes.into(),
            journal_units: layout.journal_units.into(),
            area_units: layout.area_units.into(),
            data_start_unit: layout.data_start_unit.into(),
            data_units: layout.data_units.into(),
        }
    }
}

impl RegionsLayout {
    /// The layout, which may be inconsistent.
    pub(crate) fn decode(&self) -> VolumeLayout {
        VolumeLayout {
            unit_bytes: self.unit_bytes.get(),
            journal_units: self.journal_units.get(),
            area_units: self.area_units.get(),
            data_start_unit: self.data_start_unit.get(),
            data_units: self.data_units.get(),
        }
    }
}

/// The checkpoint in a superblock, without its incarnation, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
pub(crate) struct CheckpointLayout {
    id: U64,
    area: U32,
    journal_unit: U32,
    bytes: U64,
    batch: U64,
    entry: U64,
}
const _: () = assert!(size_of::<CheckpointLayout>() == 40);

/// The checkpoint area of a volume without a checkpoint.
const NO_CHECKPOINT_AREA: u32 = 2;

impl From<Checkpoint> for CheckpointLayout {
    fn from(checkpoint: Checkpoint) -> CheckpointLayout {
        CheckpointLayout {
            id: checkpoint.id.into(),
            area: checkpoint.area.map_or(NO_CHECKPOINT_AREA, u32::from).into(),
            journal_unit: checkpoint.journal_unit.into(),
            bytes: checkpoint.bytes.into(),
            batch: checkpoint.batch.into(),
            entry: checkpoint.entry.into(),
        }
    }
}

impl CheckpointLayout {
    /// The checkpoint, of this incarnation, which may be inconsistent.
    ///
    /// # Errors
    /// [`SuperblockError::UnknownValue`] of its area.
    pub(crate) fn decode(&self, incarnation: u32) -> Result<Checkpoint, SuperblockError> {
        let area = match self.area.get() {
            area @ (0 | 1) => Some(area as u8),
            NO_CHECKPOINT_AREA => None,
            value => {
                return Err(SuperblockError::UnknownValue { field: SuperblockField::CheckpointArea, value });
            }
        };
        Ok(Checkpoint {
            area,
            id: self.id.get(),
            bytes: self.bytes.get(),
            journal_unit: self.journal_unit.get(),
            batch: self.batch.get(),
            entry: self.entry.get(),
            incarnation,
        })
    }
}
