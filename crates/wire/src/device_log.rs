//! Log C1h, vendor specific: which device has which keys of a Key Value namespace on several devices, and the tokens of each.
//!
//! ```text
//!   0 "OKVD"  4 version u16 = 1  6 bytes of an entry u16 = 32  8 hash seed u64  16 devices u16  18 partitions u16 = 256  20 zeros
//!  32 device of each partition [u8; 256]
//! 288 + 32 n:  0 capacity u32   4 window of the host u32   tokens of up to 4 KiB and of each further 4 KiB, u16 each:
//!              8 Get   12 Put   16 Delete   20 zeros
//! ```
//! A key's partition is the last byte of its XXH3-128 with the seed. A reader takes the entries' size from the page, so that
//! later versions may append fields. `docs/PROTOCOL.md` has the whole specification. Tested below.

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of the page.
pub const DEVICE_LOG_VERSION: u16 = 1;
/// The partitions of a namespace.
pub const DEVICE_PARTITIONS: usize = 256;
/// The most devices of a page.
pub const LOGGED_DEVICES_MAX: usize = 256;
/// The longest page of this version, in bytes.
pub const DEVICE_LOG_BYTES_MAX: usize = 288 + LOGGED_DEVICES_MAX * size_of::<DeviceEntryLayout>();
const MAGIC: [u8; 4] = *b"OKVD";

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct DeviceLogHeaderLayout {
    magic: [u8; 4],
    version: U16,
    entry_bytes: U16,
    hash_seed: U64,
    devices: U16,
    partitions: U16,
    reserved: [u8; 12],
    map: [u8; DEVICE_PARTITIONS],
}
const _: () = assert!(size_of::<DeviceLogHeaderLayout>() == 288);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct DeviceEntryLayout {
    capacity: U32,
    free: U32,
    costs: [U16; 6],
    reserved: [u8; 12],
}
const _: () = assert!(size_of::<DeviceEntryLayout>() == 32);

/// The tokens of commands of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedCost {
    /// Of a command of up to 4 KiB.
    pub tokens: u16,
    /// Of each further 4 KiB.
    pub tokens_per_4k: u16,
}

impl LoggedCost {
    /// The cost of a command with a value of so many bytes.
    pub fn of(self, bytes: usize) -> u32 {
        let further = bytes.div_ceil(4096).saturating_sub(1).min(1 << 15) as u32;
        u32::from(self.tokens) + u32::from(self.tokens_per_4k) * further
    }
}

/// One device in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceEntry {
    /// The tokens that may be in flight on it.
    pub capacity: u32,
    /// Those that are free for the host that reads the page.
    pub free: u32,
    /// Of Retrieve and Exist.
    pub get: LoggedCost,
    /// Of Store.
    pub put: LoggedCost,
    /// Of Delete.
    pub delete: LoggedCost,
}

/// The page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceLog {
    /// The seed of the hash of keys.
    pub hash_seed: u64,
    /// The device of each partition.
    pub map: [u8; DEVICE_PARTITIONS],
    /// The devices, by their indices; at most [`LOGGED_DEVICES_MAX`].
    pub devices: Vec<DeviceEntry>,
}

impl DeviceLog {
    /// The device of the keys at a position of the ring.
    pub fn device_of(&self, position: octokv_base::RingPosition) -> u8 {
        self.map[position.0 as usize % DEVICE_PARTITIONS]
    }

    /// Encodes the page.
    pub fn encode(&self) -> Vec<u8> {
        let header = DeviceLogHeaderLayout {
            magic: MAGIC,
            version: U16::new(DEVICE_LOG_VERSION),
            entry_bytes: U16::new(size_of::<DeviceEntryLayout>() as u16),
            hash_seed: U64::new(self.hash_seed),
            devices: U16::new(self.devices.len() as u16),
            partitions: U16::new(DEVICE_PARTITIONS as u16),
            reserved: [0; 12],
            map: self.map,
        };
        let mut page = header.as_bytes().to_vec();
        for DeviceEntry { capacity, free, get, put, delete } in &self.devices {
            let of = |cost: &LoggedCost| [cost.tokens, cost.tokens_per_4k].map(U16::new);
            let ([a, b], [c, d], [e, f]) = (of(get), of(put), of(delete));
            let (capacity, free) = (U32::new(*capacity), U32::new(*free));
            let layout = DeviceEntryLayout { capacity, free, costs: [a, b, c, d, e, f], reserved: [0; 12] };
            page.extend_from_slice(layout.as_bytes());
        }
        page
    }

    /// Decodes a page; bytes after its last entry are padding.
    ///
    /// # Errors
    /// [`InvalidDeviceLog`].
    pub fn check(page: &[u8]) -> Result<DeviceLog, InvalidDeviceLog> {
        use InvalidDeviceLog::{Devices, EntrySize, Foreign, Short};
        let (header, rest) = DeviceLogHeaderLayout::read_from_prefix(page).map_err(|_| Short)?;
        let (entry_bytes, count) = (usize::from(header.entry_bytes.get()), usize::from(header.devices.get()));
        if header.magic != MAGIC
            || header.version.get() == 0
            || usize::from(header.partitions.get()) != DEVICE_PARTITIONS
        {
            return Err(Foreign);
        }
        if entry_bytes < size_of::<DeviceEntryLayout>() {
            return Err(EntrySize);
        }
        if count > LOGGED_DEVICES_MAX || header.map.iter().any(|&device| usize::from(device) >= count) {
            return Err(Devices);
        }
        let entries = rest.get(..entry_bytes * count).ok_or(Short)?;
        let mut devices = Vec::with_capacity(count);
        for bytes in entries.chunks(entry_bytes) {
            let (layout, _) = DeviceEntryLayout::read_from_prefix(bytes).map_err(|_| Short)?;
            let of = |at: usize| {
                let [tokens, tokens_per_4k] = [layout.costs[at], layout.costs[at + 1]].map(U16::get);
                LoggedCost { tokens, tokens_per_4k }
            };
            let (capacity, free) = (layout.capacity.get(), layout.free.get());
            devices.push(DeviceEntry { capacity, free, get: of(0), put: of(2), delete: of(4) });
        }
        Ok(DeviceLog { hash_seed: header.hash_seed.get(), map: header.map, devices })
    }
}

/// Why bytes are not a device log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDeviceLog {
    /// Another page, of another vendor, or with another number of partitions.
    #[error("not a device log of octokv")]
    Foreign,
    /// Fewer bytes than the header says.
    #[error("the device log ends within its entries")]
    Short,
    /// Entries shorter than those of version 1.
    #[error("the entries of the device log are too short")]
    EntrySize,
    /// Too many devices, or a partition on one that is not in the page.
    #[error("the device log has too many devices, or a partition on none of them")]
    Devices,
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::{Prng, RingPosition};

    fn log() -> DeviceLog {
        let cost = |tokens| LoggedCost { tokens, tokens_per_4k: tokens + 1 };
        let entry =
            |capacity| DeviceEntry { capacity, free: 3, get: cost(16), put: cost(64), delete: cost(32) };
        let map = std::array::from_fn(|partition| (partition % 2) as u8);
        DeviceLog { hash_seed: 9, map, devices: vec![entry(512), entry(70_000)] }
    }

    #[test]
    fn the_page_has_the_specified_bytes() {
        let page = log().encode();
        assert_eq!(page.len(), 288 + 2 * 32);
        assert_eq!(page[..8], *b"OKVD\x01\0\x20\0");
        assert_eq!((page[8], page[16], page[18..20].to_vec()), (9, 2, vec![0, 1]));
        assert_eq!((page[32], page[33], page[287]), (0, 1, 1));
        assert_eq!((page[289], page[292], page[296], page[298]), (2, 3, 16, 17));
        assert_eq!((page[300], page[304], page[306]), (64, 32, 33));
        assert_eq!(DeviceLog::check(&page), Ok(log()));
        assert_eq!((log().device_of(RingPosition(0x3_01)), log().device_of(RingPosition(0x3_fe))), (1, 0));
        assert_eq!((log().devices[0].put.of(4096), log().devices[0].put.of(4097)), (64, 129));
    }

    #[test]
    fn padding_and_longer_entries_are_accepted() {
        let mut page = log().encode();
        page.extend([0; 100]);
        assert_eq!(DeviceLog::check(&page), Ok(log()));
        let short = log().encode();
        let mut longer = short[..288].to_vec();
        longer[6] = 40;
        for entry in short[288..].chunks(32) {
            longer.extend_from_slice(entry);
            longer.extend([9; 8]);
        }
        assert_eq!(DeviceLog::check(&longer), Ok(log()));
    }

    #[test]
    fn invalid_pages_fail_by_name() {
        let with = |at: usize, value: u8| {
            let mut page = log().encode();
            page[at] = value;
            DeviceLog::check(&page).expect_err("invalid")
        };
        assert_eq!(with(0, 0), InvalidDeviceLog::Foreign);
        assert_eq!(with(4, 0), InvalidDeviceLog::Foreign);
        assert_eq!(with(19, 2), InvalidDeviceLog::Foreign);
        assert_eq!(with(6, 31), InvalidDeviceLog::EntrySize);
        assert_eq!(with(16, 3), InvalidDeviceLog::Short);
        assert_eq!(with(17, 2), InvalidDeviceLog::Devices);
        assert_eq!(with(32, 2), InvalidDeviceLog::Devices);
        assert_eq!(DeviceLog::check(&log().encode()[..287]), Err(InvalidDeviceLog::Short));
    }

    #[test]
    fn random_pages_never_panic() {
        let mut random = Prng::new(2);
        for _ in 0..20_000 {
            let mut page = log().encode();
            for _ in 0..random.below(8) {
                let at = random.below(page.len() as u64) as usize;
                page[at] = random.next_u64() as u8;
            }
            page.truncate(random.below(page.len() as u64 + 1) as usize);
            if let Ok(log) = DeviceLog::check(&page) {
                assert_eq!(DeviceLog::check(&log.encode()), Ok(log));
            }
        }
    }
}
