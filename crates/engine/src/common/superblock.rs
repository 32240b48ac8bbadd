//! The superblock protocol: what every engine's superblock has, and what keeps it safe.
//!
//! ```text
//!   byte 0  generation even    4096  generation odd    8192  copy of the first    12288  copy of the second
//!
//!    0 magic "OCTOKV\0\0"    12 version u16 (of the engine's format)    64 generation u64
//!    8 CRC-32C u32           14 engine u16                             136 device u16 (its index in the volume)
//!                            16 volume u64                             138 devices u16 (in the volume; 0: one)
//!   the rest of the 512 bytes is the engine's
//! ```
//! The checksum covers bytes 12 to 512. Generations alternate between two slots, and each is written twice, the second
//! copy after the first is durable: a torn write leaves the other generation, a corrupt block leaves the copy. A volume of
//! several devices has a superblock on each, with the same volume number; `superblock_io` reads and writes them.

use octokv_base::crc32c;
use std::fmt;
use std::mem::offset_of;
use std::ops::RangeInclusive;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The size of a superblock in bytes; the rest of its 4096 bytes is zero.
pub const SUPERBLOCK_BYTES: usize = 512;
/// The distance between superblocks, in bytes.
pub const SUPERBLOCK_STRIDE_BYTES: u64 = 4096;
/// The number of superblocks: two generations, two copies each.
pub const SUPERBLOCKS: u64 = 4;
/// The bytes at the start of a device that hold its superblocks.
pub const SUPERBLOCK_AREA_BYTES: u64 = SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES;
/// The limit of generation, checkpoint, batch and entry numbers: beyond any real count, and safe from overflow.
pub const COUNT_MAX: u64 = 1 << 62;
const MAGIC: [u8; 8] = *b"OCTOKV\0\0";

/// The number of an engine in a superblock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EngineNumber(pub u16);

impl EngineNumber {
    /// The hash engine.
    pub const HASH: EngineNumber = EngineNumber(1);
    /// The ordered engine.
    pub const LSM: EngineNumber = EngineNumber(2);
    /// The log engine.
    pub const LOG: EngineNumber = EngineNumber(3);
    /// No engine: a device of a volume that spans several.
    pub const SPAN: EngineNumber = EngineNumber(4);
}

impl fmt::Display for EngineNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            EngineNumber::HASH => f.write_str("the hash engine"),
            EngineNumber::LSM => f.write_str("the lsm engine"),
            EngineNumber::LOG => f.write_str("the log engine"),
            EngineNumber::SPAN => f.write_str("several devices"),
            EngineNumber(number) => write!(f, "an unknown engine (number {number})"),
        }
    }
}

/// The place of a device in its volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOfVolume {
    /// Its index, from 0.
    pub index: u16,
    /// The number of devices of the volume, at least 1.
    pub count: u16,
}

impl DeviceOfVolume {
    /// The only device of its volume.
    pub const ONLY: DeviceOfVolume = DeviceOfVolume { index: 0, count: 1 };
}

/// The fields that the superblocks of all engines share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SuperblockHeader {
    /// The version of the engine's format.
    pub version: u16,
    /// The engine.
    pub engine: EngineNumber,
    /// A random number, chosen at format: the same on every device of the volume, and in everything written to it.
    pub volume_id: u64,
    /// The number of superblocks written to the device since the format.
    pub generation: u64,
    /// The place of the device in the volume.
    pub device: DeviceOfVolume,
}

/// Why bytes are not a superblock that this code can use. The texts complete "device NAME: …".
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SuperblockError {
    /// All zeros: never formatted.
    #[error("it is not formatted")]
    Blank,
    /// No superblock magic: another format.
    #[error("it holds something else, not an octokv volume")]
    Foreign,
    /// A volume of octokv in another version of the format.
    #[error("it is a volume of format version {found}, and this octokv knows versions up to {known}")]
    Version {
        /// The version on the device.
        found: u16,
        /// The highest version that this code reads and writes.
        known: u16,
    },
    /// A volume of another engine.
    #[error("it is a volume of {found}, not of {wanted}")]
    Engine {
        /// The engine on the device.
        found: EngineNumber,
        /// The engine that was to open it.
        wanted: EngineNumber,
    },
    /// A device of a volume of several, which this engine does not serve.
    #[error("it is device {index} of a volume of {count} devices, which this octokv does not serve", index = .0.index, count = .0.count)]
    SeveralDevices(DeviceOfVolume),
    /// A field with a valid checksum holds a value that this version does not define.
    #[error(
        "its superblock has the {field} {value}, which this octokv does not know: use the version that wrote it"
    )]
    UnknownValue {
        /// The field.
        field: SuperblockField,
        /// The value on the device.
        value: u32,
    },
    /// The checksum is wrong.
    #[error("no copy of its superblock is intact")]
    Damaged,
    /// The checksum is valid and the fields contradict each other.
    #[error("the fields of its superblock contradict each other under a valid checksum")]
    Inconsistent,
}

impl SuperblockError {
    /// Whether other software, or another engine of this one, wrote the superblock, intact.
    pub fn is_unsupported(&self) -> bool {
        matches!(
            self,
            SuperblockError::Version { .. }
                | SuperblockError::Engine { .. }
                | SuperblockError::SeveralDevices(_)
                | SuperblockError::UnknownValue { .. }
        )
    }
}

/// A superblock field with a closed set of values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SuperblockField {
    /// The hash function of keys.
    HashKind,
    /// The checkpoint area.
    CheckpointArea,
    /// The clean shutdown flag.
    CleanShutdown,
    /// The flag of versions.
    HasVersions,
    /// The engine of the volumes on the devices of a span.
    EngineOfDevices,
}

impl fmt::Display for SuperblockField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SuperblockField::HashKind => "hash kind",
            SuperblockField::CheckpointArea => "checkpoint area",
            SuperblockField::CleanShutdown => "clean shutdown flag",
            SuperblockField::HasVersions => "versions flag",
            SuperblockField::EngineOfDevices => "engine",
        })
    }
}

/// A flag in a superblock.
///
/// # Errors
/// [`SuperblockError::UnknownValue`] if it is neither 0 nor 1.
pub(crate) fn decode_flag(field: SuperblockField, value: u32) -> Result<bool, SuperblockError> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        value => Err(SuperblockError::UnknownValue { field, value }),
    }
}

/// The bytes that all superblocks share, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct HeaderLayout {
    magic: [u8; 8],
    crc: U32,
    version: U16,
    engine: U16,
    volume_id: U64,
    of_engine: [u8; 40],
    generation: U64,
    of_engine_too: [u8; 64],
    device: U16,
    devices: U16,
}
const _: () = assert!(offset_of!(HeaderLayout, generation) == 64);
const _: () = assert!(offset_of!(HeaderLayout, device) == 136);

/// The first byte that the checksum covers.
const CHECKED_FROM: usize = offset_of!(HeaderLayout, version);

/// An engine's superblock.
pub trait Superblock: Copy {
    /// The engine.
    const ENGINE: EngineNumber;
    /// The format versions that this code reads and writes.
    const VERSIONS: RangeInclusive<u16>;

    /// The fields that all engines share.
    fn header(&self) -> SuperblockHeader;
    /// Writes the engine's own fields: bytes 24 to 64, 72 to 136 and 140 to 512. The others are overwritten.
    fn encode_fields(&self, bytes: &mut [u8; SUPERBLOCK_BYTES]);
    /// The superblock with these fields.
    ///
    /// # Errors
    /// [`SuperblockError::UnknownValue`] and [`SuperblockError::Inconsistent`].
    fn decode_fields(
        header: SuperblockHeader,
        bytes: &[u8; SUPERBLOCK_BYTES],
    ) -> Result<Self, SuperblockError>;

    /// The bytes of the superblock, checksum included.
    fn encode(&self) -> [u8; SUPERBLOCK_BYTES] {
        let mut bytes = [0; SUPERBLOCK_BYTES];
        self.encode_fields(&mut bytes);
        let header = self.header();
        let (layout, _) = HeaderLayout::mut_from_prefix(&mut bytes).expect("shorter than a superblock");
        layout.magic = MAGIC;
        layout.version = header.version.into();
        layout.engine = header.engine.0.into();
        layout.volume_id = header.volume_id.into();
        layout.generation = header.generation.into();
        layout.device = header.device.index.into();
        // As volumes of one device were written before there were others.
        layout.devices = if header.device.count == 1 { 0 } else { header.device.count }.into();
        let crc = crc32c(&bytes[CHECKED_FROM..]);
        bytes[offset_of!(HeaderLayout, crc)..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

/// Bytes read from a device, not validated.
pub struct UncheckedSuperblock<'a>(pub &'a [u8; SUPERBLOCK_BYTES]);

impl<'a> UncheckedSuperblock<'a> {
    /// The fields that all engines share, if magic and checksum are valid.
    ///
    /// # Errors
    /// [`SuperblockError::Blank`], [`SuperblockError::Foreign`], [`SuperblockError::Damaged`] and, if the device has no
    /// place in its volume, [`SuperblockError::Inconsistent`].
    pub fn header(&self) -> Result<SuperblockHeader, SuperblockError> {
        if self.0.iter().all(|&byte| byte == 0) {
            return Err(SuperblockError::Blank);
        }
        let (layout, _) = HeaderLayout::ref_from_prefix(self.0).expect("shorter than a superblock");
        if layout.magic != MAGIC {
            return Err(SuperblockError::Foreign);
        }
        if crc32c(&self.0[CHECKED_FROM..]) != layout.crc.get() {
            return Err(SuperblockError::Damaged);
        }
        let device = DeviceOfVolume { index: layout.device.get(), count: layout.devices.get().max(1) };
        if device.index >= device.count {
            return Err(SuperblockError::Inconsistent);
        }
        Ok(SuperblockHeader {
            version: layout.version.get(),
            engine: EngineNumber(layout.engine.get()),
            volume_id: layout.volume_id.get(),
            generation: layout.generation.get(),
            device,
        })
    }

    /// The superblock of an engine, if magic, checksum, engine, version and field values are valid and consistent.
    ///
    /// # Errors
    /// The first check that fails: those of [`UncheckedSuperblock::header`], engine, version, fields.
    pub fn check<S: Superblock>(self) -> Result<S, SuperblockError> {
        let header = self.header()?;
        if header.engine != S::ENGINE {
            return Err(SuperblockError::Engine { found: header.engine, wanted: S::ENGINE });
        }
        if !S::VERSIONS.contains(&header.version) {
            return Err(SuperblockError::Version { found: header.version, known: *S::VERSIONS.end() });
        }
        S::decode_fields(header, self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A superblock of an engine that keeps one byte of its own.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    struct OneByte {
        header: SuperblockHeader,
        own: u8,
    }

    impl Superblock for OneByte {
        const ENGINE: EngineNumber = EngineNumber(77);
        const VERSIONS: RangeInclusive<u16> = 5..=5;

        fn header(&self) -> SuperblockHeader {
            self.header
        }
        fn encode_fields(&self, bytes: &mut [u8; SUPERBLOCK_BYTES]) {
            bytes[511] = self.own;
        }
        fn decode_fields(
            header: SuperblockHeader,
            bytes: &[u8; SUPERBLOCK_BYTES],
        ) -> Result<OneByte, SuperblockError> {
            Ok(OneByte { header, own: bytes[511] })
        }
    }

    fn example(index: u16, count: u16) -> OneByte {
        let device = DeviceOfVolume { index, count };
        let header =
            SuperblockHeader { version: 5, engine: EngineNumber(77), volume_id: 3, generation: 9, device };
        OneByte { header, own: 200 }
    }

    #[test]
    fn a_superblock_names_its_place_among_the_devices_of_its_volume() {
        for (index, count) in [(0, 1), (0, 4), (3, 4), (u16::MAX - 1, u16::MAX)] {
            let written = example(index, count);
            assert_eq!(UncheckedSuperblock(&written.encode()).check(), Ok(written));
        }
        assert_eq!(example(0, 1).encode()[136..140], [0; 4], "as before there were volumes of several");
        for (index, count) in [(1, 1), (4, 4)] {
            let found = UncheckedSuperblock(&example(index, count).encode()).header();
            assert_eq!(found, Err(SuperblockError::Inconsistent), "device {index} of {count}");
        }
    }

    #[test]
    fn another_engines_superblock_is_refused_by_name() {
        let refused = |engine| {
            let mut other = example(0, 1);
            other.header.engine = EngineNumber(engine);
            let error = UncheckedSuperblock(&other.encode()).check::<OneByte>().unwrap_err();
            assert!(error.is_unsupported(), "{error}");
            error.to_string()
        };
        assert_eq!(refused(1), "it is a volume of the hash engine, not of an unknown engine (number 77)");
        assert!(refused(2).contains("volume of the lsm engine"));
        assert!(refused(3).contains("volume of the log engine"));
        assert!(refused(9).contains("an unknown engine (number 9)"));
    }
}
