//! The journal: batches of an engine's changes in a ring, each batch one write, in two copies.
//!
//! ```text
//!   batch   0 magic "OKVJ"        24 first entry u64       40 flushed through u64 (batch)
//!           4 CRC-32C u32         32 incarnation u32       48 entries u32    52 units u32
//!           8 volume u64          36 unflushed u32         56 bytes of entries u64 (0 if all have one length)
//!          16 batch u64           64 entries, then zeros to the end of the last unit
//! ```
//! An entry's bytes are the engine's ([`JournalEntry`]).
//! The checksum covers bytes 8 to the end of the entries. Batches are numbered without gaps. A batch never wraps:
//! if fewer than [`batch_units_max`] units are left before the end of the ring, the next begins at its start. A batch is
//! written beside the records that it names, and several batches are in flight (`group_commit.rs`).
//!
//! "Unflushed" is 1 if the writer did not wait until the preceding batch was durable: a power loss may leave such a batch
//! without its predecessor. "Flushed through" is the last batch that is known durable, with the records of all batches up
//! to it: replay does not verify those.

use octokv_base::crc32c;
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const MAGIC: [u8; 4] = *b"OKVJ";
/// The fixed part of a batch, in bytes.
pub const BATCH_HEADER_BYTES: usize = 64;

/// A position in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalPosition {
    /// The unit of the ring at which the batch begins.
    pub unit: u32,
    /// The number of the batch.
    pub batch: u64,
    /// The number of the batch's first entry.
    pub entry: u64,
    /// Units used since the opening, unused units at the ring's end included.
    pub units_used: u64,
}

/// One change in the journal of an engine.
pub trait JournalEntry: Clone + PartialEq {
    /// What the write of a change's record tells about the change.
    type Outcome: Copy + PartialEq;

    /// The length of every entry in bytes; `None` if they differ.
    const FIXED_BYTES: Option<usize>;
    /// The most entries of one batch.
    const BATCH_ENTRIES_MAX: usize;
    /// The most bytes of one batch with its header, before rounding to units.
    const BATCH_BYTES_MAX: usize;

    /// The length of this entry in bytes; at most that of a batch without its header.
    fn encoded_bytes(&self) -> usize;
    /// Writes the entry to as many bytes.
    fn encode(&self, bytes: &mut [u8]);
    /// The entry at the front of the bytes, and its length; `None` if they are no entry.
    fn decode(bytes: &[u8]) -> Option<(Self, usize)>;
    /// The entry as the write of its record has turned out, of the same length.
    fn amended(self, outcome: Self::Outcome) -> Self;
    /// This entry without its change, of the same length, so that later entries keep their numbers.
    fn cancelled(self) -> Self;
}

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
    entries_bytes: U64,
}
const _: () = assert!(size_of::<BatchHeaderLayout>() == BATCH_HEADER_BYTES);
/// The first byte that the checksum covers.
const CHECKED_FROM: usize = offset_of!(BatchHeaderLayout, volume_id);

/// The most units of one batch.
pub const fn batch_units_max<E: JournalEntry>(unit_bytes: u32) -> u32 {
    (E::BATCH_BYTES_MAX as u32).div_ceil(unit_bytes)
}

/// The units of a batch whose entries have so many bytes.
pub const fn batch_units(entries_bytes: usize, unit_bytes: u32) -> u32 {
    ((BATCH_HEADER_BYTES + entries_bytes) as u32).div_ceil(unit_bytes)
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
/// If the entries are more or longer than a batch has.
pub fn encode<E: JournalEntry>(
    bytes: &mut [u8],
    header: &BatchHeader,
    entries: &[E],
    unit_bytes: u32,
) -> u32 {
    let mut end = BATCH_HEADER_BYTES;
    for entry in entries {
        let from = end;
        end += entry.encoded_bytes();
        entry.encode(&mut bytes[from..end]);
    }
    let is_batch = entries.len() <= E::BATCH_ENTRIES_MAX && end <= E::BATCH_BYTES_MAX;
    assert!(is_batch, "{} entries of {end} bytes in one batch", entries.len());
    let units = (end as u32).div_ceil(unit_bytes);
    let (layout, _) = BatchHeaderLayout::mut_from_prefix(bytes).expect("longer than a header");
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
        entries_bytes: match E::FIXED_BYTES {
            Some(_) => U64::ZERO,
            None => U64::new((end - BATCH_HEADER_BYTES) as u64),
        },
    };
    bytes[end..(units * unit_bytes) as usize].fill(0);
    let crc = crc32c(&bytes[CHECKED_FROM..end]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    units
}

/// Bytes read from the ring, not validated.
pub struct UncheckedBatch<'a>(pub &'a [u8]);

/// A validated batch.
pub struct Batch<E> {
    /// The header.
    pub header: BatchHeader,
    /// Its length in units.
    pub units: u32,
    /// The entries, in order.
    pub entries: Vec<E>,
}

impl UncheckedBatch<'_> {
    /// The batch at the front of the bytes, if its checksum and lengths are valid.
    pub fn check<E: JournalEntry>(self, unit_bytes: u32) -> Option<Batch<E>> {
        let (layout, _) = BatchHeaderLayout::ref_from_prefix(self.0).ok()?;
        let (count, units) = (layout.entries.get() as usize, layout.units.get());
        if layout.magic != MAGIC || count > E::BATCH_ENTRIES_MAX {
            return None;
        }
        let entries_bytes = match E::FIXED_BYTES {
            Some(bytes) => count * bytes,
            None => usize::try_from(layout.entries_bytes.get()).ok()?,
        };
        if entries_bytes > E::BATCH_BYTES_MAX - BATCH_HEADER_BYTES {
            return None;
        }
        let mut rest = self.0.get(BATCH_HEADER_BYTES..BATCH_HEADER_BYTES + entries_bytes)?;
        let checked = &self.0[CHECKED_FROM..BATCH_HEADER_BYTES + entries_bytes];
        if units != batch_units(entries_bytes, unit_bytes) || crc32c(checked) != layout.crc.get() {
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
        let mut entries = Vec::with_capacity(count);
        for _ in 0..count {
            let (entry, bytes) = E::decode(rest)?;
            entries.push(entry);
            rest = rest.get(bytes..)?;
        }
        rest.is_empty().then_some(Batch { header, units, entries })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Prng;

    /// A change that is a string.
    #[derive(Clone, Debug, PartialEq)]
    struct Text(Vec<u8>);

    impl JournalEntry for Text {
        type Outcome = ();
        const FIXED_BYTES: Option<usize> = None;
        const BATCH_ENTRIES_MAX: usize = 200;
        const BATCH_BYTES_MAX: usize = 32 << 10;

        fn encoded_bytes(&self) -> usize {
            2 + self.0.len()
        }
        fn encode(&self, bytes: &mut [u8]) {
            let (length, text) = bytes.split_at_mut(2);
            length.copy_from_slice(&(self.0.len() as u16).to_le_bytes());
            text.copy_from_slice(&self.0);
        }
        fn decode(bytes: &[u8]) -> Option<(Text, usize)> {
            let (length, rest) = bytes.split_first_chunk()?;
            let text = rest.get(..usize::from(u16::from_le_bytes(*length)))?;
            Some((Text(text.to_vec()), 2 + text.len()))
        }
        fn amended(self, _outcome: ()) -> Text {
            self
        }
        fn cancelled(self) -> Text {
            Text(vec![0; self.0.len()])
        }
    }

    fn example(lengths: &[usize], unit_bytes: u32) -> (Vec<u8>, BatchHeader, Vec<Text>, u32) {
        let header = BatchHeader {
            volume_id: 1,
            batch: 2,
            first_entry: 3,
            incarnation: 4,
            is_predecessor_unflushed: true,
            flushed_through: 1,
        };
        let text = |(at, &bytes): (usize, &usize)| Text(vec![at as u8; bytes]);
        let entries: Vec<Text> = lengths.iter().enumerate().map(text).collect();
        let mut bytes = vec![0xff; 36 * 1024];
        let units = encode(&mut bytes, &header, &entries, unit_bytes);
        (bytes, header, entries, units)
    }

    #[test]
    fn a_batch_of_entries_of_any_length_gives_them_back() {
        let longest = (32 << 10) - BATCH_HEADER_BYTES - 2;
        let table: [(&[usize], u32); 6] = [
            (&[], 512),
            (&[0], 512),
            (&[7, 0, 1_000], 512),
            (&[446], 512),
            (&[447, 1], 4_096),
            (&[longest], 512),
        ];
        for (lengths, unit_bytes) in table {
            let (bytes, header, entries, units) = example(lengths, unit_bytes);
            let batch = UncheckedBatch(&bytes).check::<Text>(unit_bytes).unwrap();
            assert_eq!((batch.header, batch.units), (header, units), "{lengths:?}");
            assert_eq!(batch.entries, entries);
            assert!(units <= batch_units_max::<Text>(unit_bytes));
            assert!(bytes[..(units * unit_bytes) as usize].ends_with(&[0]) || units * unit_bytes == 32 << 10);
        }
    }

    #[test]
    #[should_panic(expected = "in one batch")]
    fn more_than_a_batch_holds_is_a_bug() {
        example(&[20_000, 14_000], 512);
    }

    #[test]
    fn a_torn_or_corrupted_batch_is_rejected_and_no_bytes_panic() {
        let (good, ..) = example(&[30; 30], 512);
        let end = BATCH_HEADER_BYTES + 30 * 32;
        let mut random = Prng::new(1);
        for _ in 0..20_000 {
            let mut bytes = good.clone();
            let at = random.below(end as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
            assert!(UncheckedBatch(&bytes).check::<Text>(512).is_none(), "byte {at}");
            bytes.truncate(random.below(2_000) as usize);
            assert!(UncheckedBatch(&bytes).check::<Text>(512).is_none());
        }
    }

    #[test]
    fn lengths_that_contradict_each_other_under_a_valid_checksum_are_rejected() {
        let mut random = Prng::new(2);
        for _ in 0..20_000 {
            let (mut bytes, ..) = example(&[30; 30], 512);
            // The number of entries, their bytes, or the length of one of them.
            let at = [48, 56, BATCH_HEADER_BYTES + 32 * random.below(30) as usize][random.below(3) as usize];
            bytes[at] = bytes[at].wrapping_add(1 + random.below(255) as u8);
            let claimed = u64::from_le_bytes(bytes[56..64].try_into().unwrap()) as usize;
            let Some(checked) = bytes.get(CHECKED_FROM..BATCH_HEADER_BYTES + claimed) else { continue };
            let crc = crc32c(checked);
            bytes[4..8].copy_from_slice(&crc.to_le_bytes());
            assert!(UncheckedBatch(&bytes).check::<Text>(512).is_none(), "byte {at}");
        }
    }
}
