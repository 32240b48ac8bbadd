//! Log C0h, vendor specific: how the keys of a Key Value namespace are placed. A client that knows the seed computes a
//! key's ring position itself and sends the command to the node that serves it.
//!
//! ```text
//!  0 "OKVP"  4 version u16 = 1  6 bytes of an entry u16 = 64  8 epoch u64  16 ring seed u64  24 entries u32  28 zero u32
//!  32 + 64 n:  0 partition u32   4 device u32   8 flags u32   12 zero u32   16 first position u128   32 last position u128
//!             48 size in bytes u64   56 used bytes u64
//! ```
//! Flag 0: the partition serves commands. Entries are in the order of their ring ranges. A reader takes the entries' size
//! from the page, so that later versions may append fields. `docs/PROTOCOL.md` has the whole specification. Tested below.

use octokv_base::{RingPosition, RingRange};
use zerocopy::byteorder::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Version of the page.
pub const PARTITION_LOG_VERSION: u16 = 1;
/// The most entries of a page that a reader accepts.
pub const PARTITIONS_MAX: u32 = 1 << 16;
const MAGIC: [u8; 4] = *b"OKVP";
const FLAG_SERVING: u32 = 1 << 0;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct PartitionLogHeaderLayout {
    magic: [u8; 4],
    version: U16,
    entry_bytes: U16,
    epoch: U64,
    ring_seed: U64,
    entries: U32,
    reserved: U32,
}
const _: () = assert!(size_of::<PartitionLogHeaderLayout>() == 32);

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct PartitionEntryLayout {
    partition: U32,
    device: U32,
    flags: U32,
    reserved: U32,
    first: U128,
    last: U128,
    size_bytes: U64,
    used_bytes: U64,
}
const _: () = assert!(size_of::<PartitionEntryLayout>() == 64);

/// One partition in the page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionEntry {
    /// The partition's identifier within its volume.
    pub partition: u32,
    /// The index of its device within the volume.
    pub device: u32,
    /// Whether it serves commands.
    pub is_serving: bool,
    /// The positions of its keys.
    pub range: RingRange,
    /// Its size, in bytes.
    pub size_bytes: u64,
    /// The part of it that is in use, in bytes.
    pub used_bytes: u64,
}

/// The page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionLog {
    /// The revision of the membership; 0 for a node on its own.
    pub epoch: u64,
    /// The seed of the ring hash.
    pub ring_seed: u64,
    /// The partitions, in the order of their ranges.
    pub partitions: Vec<PartitionEntry>,
}

impl PartitionLog {
    /// Encodes the page.
    pub fn encode(&self) -> Vec<u8> {
        let header = PartitionLogHeaderLayout {
            magic: MAGIC,
            version: U16::new(PARTITION_LOG_VERSION),
            entry_bytes: U16::new(size_of::<PartitionEntryLayout>() as u16),
            epoch: U64::new(self.epoch),
            ring_seed: U64::new(self.ring_seed),
            entries: U32::new(self.partitions.len() as u32),
            reserved: U32::new(0),
        };
        let mut page = header.as_bytes().to_vec();
        for entry in &self.partitions {
            let layout = PartitionEntryLayout {
                partition: U32::new(entry.partition),
                device: U32::new(entry.device),
                flags: U32::new(if entry.is_serving { FLAG_SERVING } else { 0 }),
                reserved: U32::new(0),
                first: U128::new(entry.range.first().0),
                last: U128::new(entry.range.last().0),
                size_bytes: U64::new(entry.size_bytes),
                used_bytes: U64::new(entry.used_bytes),
            };
            page.extend_from_slice(layout.as_bytes());
        }
        page
    }

    /// Decodes a page; bytes after its last entry are padding.
    ///
    /// # Errors
    /// [`InvalidPartitionLog`].
    pub fn check(page: &[u8]) -> Result<PartitionLog, InvalidPartitionLog> {
        use InvalidPartitionLog::{EntrySize, Foreign, Order, Short, TooMany};
        let (header, rest) = PartitionLogHeaderLayout::read_from_prefix(page).map_err(|_| Short)?;
        let (entry_bytes, count) = (usize::from(header.entry_bytes.get()), header.entries.get());
        if header.magic != MAGIC || header.version.get() == 0 {
            return Err(Foreign);
        }
        if entry_bytes < size_of::<PartitionEntryLayout>() {
            return Err(EntrySize);
        }
        if count > PARTITIONS_MAX {
            return Err(TooMany);
        }
        let entries = rest.get(..entry_bytes * count as usize).ok_or(Short)?;
        let mut partitions: Vec<PartitionEntry> = Vec::with_capacity(count as usize);
        for bytes in entries.chunks(entry_bytes) {
            let (layout, _) = PartitionEntryLayout::read_from_prefix(bytes).map_err(|_| Short)?;
            let (first, last) = (RingPosition(layout.first.get()), RingPosition(layout.last.get()));
            let range = RingRange::new(first, last).ok_or(Order)?;
            if partitions.last().is_some_and(|before| before.range.last() >= range.first()) {
                return Err(Order);
            }
            partitions.push(PartitionEntry {
                partition: layout.partition.get(),
                device: layout.device.get(),
                is_serving: layout.flags.get() & FLAG_SERVING != 0,
                range,
                size_bytes: layout.size_bytes.get(),
                used_bytes: layout.used_bytes.get(),
            });
        }
        Ok(PartitionLog { epoch: header.epoch.get(), ring_seed: header.ring_seed.get(), partitions })
    }
}

/// Why bytes are not a partition log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPartitionLog {
    /// Another page, of another vendor.
    #[error("not a partition log of octokv")]
    Foreign,
    /// Fewer bytes than the header says.
    #[error("the partition log ends within its entries")]
    Short,
    /// Entries shorter than those of version 1.
    #[error("the entries of the partition log are too short")]
    EntrySize,
    /// More than [`PARTITIONS_MAX`] entries.
    #[error("the partition log has more than {PARTITIONS_MAX} entries")]
    TooMany,
    /// A range ends before it begins, or two overlap or are out of order.
    #[error("the ranges of the partition log overlap or are out of order")]
    Order,
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    fn log() -> PartitionLog {
        let (low, high) = RingRange::FULL.split(RingPosition(1 << 127)).expect("two halves");
        let entry = |partition, range| PartitionEntry {
            partition,
            device: 1,
            is_serving: partition == 7,
            range,
            size_bytes: 1 << 40,
            used_bytes: 3,
        };
        PartitionLog { epoch: 5, ring_seed: 6, partitions: vec![entry(7, low), entry(2, high)] }
    }

    #[test]
    fn the_page_has_the_specified_bytes() {
        let page = log().encode();
        assert_eq!(page.len(), 32 + 2 * 64);
        assert_eq!(page[..8], *b"OKVP\x01\0\x40\0");
        assert_eq!((page[8], page[16], page[24]), (5, 6, 2));
        assert_eq!((page[32], page[36], page[40]), (7, 1, 1));
        assert_eq!(page[32 + 32..32 + 48], ((1_u128 << 127) - 1).to_le_bytes());
        assert_eq!((page[32 + 53], page[32 + 56]), (1, 3));
        assert_eq!(PartitionLog::check(&page), Ok(log()));
    }

    #[test]
    fn padding_and_longer_entries_are_accepted() {
        let mut page = log().encode();
        page.extend([0; 100]);
        assert_eq!(PartitionLog::check(&page), Ok(log()));
        let short = log().encode();
        let mut longer = short[..32].to_vec();
        longer[6] = 72;
        for entry in short[32..].chunks(64) {
            longer.extend_from_slice(entry);
            longer.extend([9; 8]);
        }
        assert_eq!(PartitionLog::check(&longer), Ok(log()));
    }

    #[test]
    fn invalid_pages_fail_by_name() {
        let with = |at: usize, value: u8| {
            let mut page = log().encode();
            page[at] = value;
            PartitionLog::check(&page).expect_err("invalid")
        };
        assert_eq!(with(0, 0), InvalidPartitionLog::Foreign);
        assert_eq!(with(4, 0), InvalidPartitionLog::Foreign);
        assert_eq!(with(6, 63), InvalidPartitionLog::EntrySize);
        assert_eq!(with(24, 3), InvalidPartitionLog::Short);
        assert_eq!(with(27, 1), InvalidPartitionLog::TooMany);
        // The first partition now reaches into the second.
        assert_eq!(with(32 + 47, 0x80), InvalidPartitionLog::Order);
        assert_eq!(PartitionLog::check(&log().encode()[..31]), Err(InvalidPartitionLog::Short));
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
            if let Ok(log) = PartitionLog::check(&page) {
                assert_eq!(PartitionLog::check(&log.encode()), Ok(log));
            }
        }
    }
}
