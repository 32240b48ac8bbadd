//! The index journal: batches of index changes in a ring, each batch one write, in two copies.
//!
//! ```text
//!   batch   0 magic "OKVJ"        24 first entry u64       40 flushed through u64 (batch)
//!           4 CRC-32C u32         32 incarnation u32       48 entries u32    52 units u32
//!           8 volume u64          36 unflushed u32            56 zero u64
//!          16 batch u64           64 entries, then zeros to the end of the last unit
//!   entry   0 hash u128           24 old location u64 (0 = the key is new)   40 units u32
//!          16 new location u64 (0 = deleted)        32 sequence u64          44 zero u32
//! ```
//! The checksum covers bytes 8 to the end of the entries. Batches are numbered without gaps. A batch never wraps:
//! if fewer than [`batch_units_max`] units are left before the end of the ring, the next begins at its start. A batch is
//! written beside the records that it names, and several batches are in flight (`group_commit.rs`).
//!
//! "Unflushed" is 1 if the writer did not wait until the preceding batch was durable: a power loss may leave such a batch
//! without its predecessor. "Flushed through" is the last batch that is known durable, with the records of all batches up
//! to it: replay does not verify those.

use octokv_base::crc32c;
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"OKVJ";
/// The fixed part of a batch, in bytes.
pub const BATCH_HEADER_BYTES: usize = 64;
/// One entry, in bytes.
pub const JOURNAL_ENTRY_BYTES: usize = 48;
/// The maximum entries of one batch.
pub const BATCH_ENTRIES_MAX: usize = 660;
/// The maximum bytes of one batch, before rounding to units.
pub const BATCH_BYTES_MAX: usize = batch_bytes(BATCH_ENTRIES_MAX);
const _: () = assert!(BATCH_BYTES_MAX <= 32 * 1024);

/// The header of a batch on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct BatchHeaderLayout {
    magic: [u8; 4],
    crc: U32,
    volume_id: U64,
    batch: U64,
    first_entry: U64,
    incarnation: U32,
    unflushed: U32,
    flushed_through: U64,
    entries: U32,
    units: U32,
    zero: U64,
}
const _: () = assert!(size_of::<BatchHeaderLayout>() == BATCH_HEADER_BYTES);
/// The first byte that the checksum covers.
const CHECKED_FROM: usize = offset_of!(BatchHeaderLayout, volume_id);

/// A journal entry on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct JournalEntryLayout {
    hash: U128,
    new_location: U64,
    old_location: U64,
    sequence: U64,
    units: U32,
    zero: U32,
}
const _: () = assert!(size_of::<JournalEntryLayout>() == JOURNAL_ENTRY_BYTES);

/// The maximum units of one batch.
pub const fn batch_units_max(unit_bytes: u32) -> u32 {
    (BATCH_BYTES_MAX as u32).div_ceil(unit_bytes)
}

/// The bytes of a batch with `entries` entries, before rounding to units.
const fn batch_bytes(entries: usize) -> usize {
    BATCH_HEADER_BYTES + entries * JOURNAL_ENTRY_BYTES
}

/// The units of a batch with `entries` entries.
pub const fn batch_units(entries: usize, unit_bytes: u32) -> u32 {
    (batch_bytes(entries) as u32).div_ceil(unit_bytes)
}

/// One change of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// The hash of the key.
    pub hash: u128,
    /// The first unit of the new record; 0 if the key is deleted.
    pub new_location: u64,
    /// The first unit of the record that it replaces; 0 if the key is new.
    pub old_location: u64,
    /// The sequence number of the new record.
    pub sequence: u64,
    /// The units of the new record.
    pub units: u32,
}

impl JournalEntry {
    /// This entry without its change, so that later entries keep their numbers. Its sequence number names no record.
    pub fn cancelled(self) -> JournalEntry {
        JournalEntry { new_location: 0, old_location: 0, units: 0, ..self }
    }
}

/// The header of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    /// The volume's random number.
    pub volume_id: u64,
    /// The number of the batch.
    pub batch: u64,
    /// The number of its first entry; the others are consecutive.
    pub first_entry: u64,
    /// The opening that wrote it.
    pub incarnation: u32,
    /// Whether it was written before the preceding batch was durable.
    pub is_predecessor_unflushed: bool,
    /// The last batch that is known durable, with the records of all batches up to it.
    pub flushed_through: u64,
}

/// Encodes a batch at the front of `bytes`, padded with zeros to whole units, and gives its length in units.
///
/// # Panics
/// If there are more than [`BATCH_ENTRIES_MAX`] entries.
pub fn encode(bytes: &mut [u8], header: &BatchHeader, entries: &[JournalEntry], unit_bytes: u32) -> u32 {
    assert!(entries.len() <= BATCH_ENTRIES_MAX, "{} entries in one batch", entries.len());
    let end = batch_bytes(entries.len());
    let units = batch_units(entries.len(), unit_bytes);
    let (layout, rest) = BatchHeaderLayout::mut_from_prefix(bytes).expect("longer than a header");
    *layout = BatchHeaderLayout {
        magic: MAGIC,
        crc: U32::ZERO,
        volume_id: header.volume_id.into(),
        batch: header.batch.into(),
        first_entry: header.first_entry.into(),
        incarnation: header.incarnation.into(),
        unflushed: u32::from(header.is_predecessor_unflushed).into(),
        flushed_through: header.flushed_through.into(),
        entries: (entries.len() as u32).into(),
        units: units.into(),
        zero: U64::ZERO,
    };
    let (layouts, _) =
        <[JournalEntryLayout]>::mut_from_prefix_with_elems(rest, entries.len()).expect("longer than a batch");
    for (entry, layout) in entries.iter().zip(layouts) {
        *layout = JournalEntryLayout {
            hash: entry.hash.into(),
            new_location: entry.new_location.into(),
            old_location: entry.old_location.into(),
            sequence: entry.sequence.into(),
            units: entry.units.into(),
            zero: U32::ZERO,
        };
    }
    bytes[end..(units * unit_bytes) as usize].fill(0);
    let crc = crc32c(&bytes[CHECKED_FROM..end]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    units
}

/// Bytes read from the ring, not validated.
pub struct UncheckedBatch<'a>(pub &'a [u8]);

/// A validated batch.
pub struct Batch<'a> {
    /// The header.
    pub header: BatchHeader,
    /// Its length in units.
    pub units: u32,
    entries: &'a [JournalEntryLayout],
}

impl<'a> UncheckedBatch<'a> {
    /// The batch at the front of the bytes, if its checksum and lengths are valid.
    pub fn check(self, unit_bytes: u32) -> Option<Batch<'a>> {
        let (layout, rest) = BatchHeaderLayout::ref_from_prefix(self.0).ok()?;
        let (count, units) = (layout.entries.get() as usize, layout.units.get());
        if layout.magic != MAGIC || count > BATCH_ENTRIES_MAX {
            return None;
        }
        let end = batch_bytes(count);
        let (entries, _) = <[JournalEntryLayout]>::ref_from_prefix_with_elems(rest, count).ok()?;
        if units != batch_units(count, unit_bytes) || crc32c(&self.0[CHECKED_FROM..end]) != layout.crc.get() {
            return None;
        }
        let header = BatchHeader {
            volume_id: layout.volume_id.get(),
            batch: layout.batch.get(),
            first_entry: layout.first_entry.get(),
            incarnation: layout.incarnation.get(),
            is_predecessor_unflushed: layout.unflushed != 0,
            flushed_through: layout.flushed_through.get(),
        };
        Some(Batch { header, units, entries })
    }
}

impl Batch<'_> {
    /// The entries, in order.
    pub fn entries(&self) -> impl ExactSizeIterator<Item = JournalEntry> + '_ {
        self.entries.iter().map(|layout| JournalEntry {
            hash: layout.hash.get(),
            new_location: layout.new_location.get(),
            old_location: layout.old_location.get(),
            sequence: layout.sequence.get(),
            units: layout.units.get(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    fn example(count: usize, unit_bytes: u32) -> (Vec<u8>, BatchHeader, Vec<JournalEntry>, u32) {
        let header = BatchHeader {
            volume_id: 1,
            batch: 2,
            first_entry: 3,
            incarnation: 4,
            is_predecessor_unflushed: true,
            flushed_through: 1,
        };
        let entry = |i: usize| JournalEntry {
            hash: i as u128,
            new_location: i as u64 + 1,
            old_location: 0,
            sequence: 9,
            units: 5,
        };
        let entries: Vec<JournalEntry> = (0..count).map(entry).collect();
        let mut bytes = vec![0xff; 36 * 1024];
        let units = encode(&mut bytes, &header, &entries, unit_bytes);
        (bytes, header, entries, units)
    }

    #[test]
    fn a_batch_of_any_size_gives_back_its_entries() {
        for (count, unit_bytes) in [(0, 512), (1, 512), (9, 512), (10, 512), (84, 4096), (660, 512)] {
            let (bytes, header, entries, units) = example(count, unit_bytes);
            let batch = UncheckedBatch(&bytes).check(unit_bytes).unwrap();
            assert_eq!((batch.header, batch.units), (header, units));
            assert_eq!(batch.entries().collect::<Vec<_>>(), entries);
            assert!(units <= batch_units_max(unit_bytes));
        }
    }

    #[test]
    fn a_torn_or_corrupted_batch_is_rejected_and_no_bytes_panic() {
        let (good, ..) = example(20, 512);
        let mut random = Prng::new(1);
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            let at = random.below(64 + 20 * 48) as usize;
            bytes[at] ^= 1 << random.below(8);
            assert!(UncheckedBatch(&bytes).check(512).is_none(), "byte {at}");
            bytes.truncate(random.below(2_000) as usize);
            assert!(UncheckedBatch(&bytes).check(512).is_none());
        }
    }
}
