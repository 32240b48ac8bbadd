//! The index journal: batches of changes in a ring, each batch one write, in two copies.
//!
//! ```text
//!   batch   0 magic "OKVJ"        24 first entry u64       40 flushed through u64 (batch)
//!           4 CRC-32C u32         32 incarnation u32       48 entries u32    52 units u32
//!           8 volume u64          36 unflushed u32            56 zero u64
//!          16 batch u64           64 entries, then zeros to the end of the last unit
//!   entry   0 hash u128           24 old location u64 (0 = the key is new)   40 units u32
//!          16 new location u64 (0 = the key goes)   32 stamp u64             44 zero u32
//! ```
//! The checksum covers bytes 8 to the end of the entries. Batches are numbered without gaps. A batch never wraps:
//! where fewer than [`batch_units_max`] units are left before the end of the ring, the next begins at its start. A
//! batch is written beside the records that it names, and more than one is under way (`commit.rs`).
//!
//! "Unflushed" is 1 where the writer did not wait for the batch before to be durable: after a power cut such a
//! batch may be there without the one before. "Flushed through" says which earlier batches, with the records they
//! name, are durable for sure: what replay need not verify record by record.

use octokv_base::crc32c;

const MAGIC: [u8; 4] = *b"OKVJ";
/// The fixed part of a batch, in bytes.
pub const BATCH_HEADER_BYTES: usize = 64;
/// One entry, in bytes.
pub const JOURNAL_ENTRY_BYTES: usize = 48;
/// The most entries in one batch.
pub const BATCH_ENTRIES_MAX: usize = 660;
/// The most bytes of one batch, before rounding to units.
pub const BATCH_BYTES_MAX: usize = BATCH_HEADER_BYTES + BATCH_ENTRIES_MAX * JOURNAL_ENTRY_BYTES;
const _: () = assert!(BATCH_BYTES_MAX <= 32 * 1024);

/// The most units of one batch.
pub const fn batch_units_max(unit_bytes: u32) -> u32 {
    (BATCH_BYTES_MAX as u32).div_ceil(unit_bytes)
}

/// The units of a batch of so many entries.
pub const fn batch_units(entries: usize, unit_bytes: u32) -> u32 {
    ((BATCH_HEADER_BYTES + entries * JOURNAL_ENTRY_BYTES) as u32).div_ceil(unit_bytes)
}

/// One change of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JournalEntry {
    /// The key's hash.
    pub hash: u128,
    /// Where its record is from now on; 0 when the key goes.
    pub new_location: u64,
    /// Where its record was; 0 when the key is new.
    pub old_location: u64,
    /// The new record's stamp.
    pub sequence: u64,
    /// How many units the new record spans.
    pub units: u32,
}

impl JournalEntry {
    /// This entry without its change: what numbers the entries that follow stays.
    pub fn cancelled(self) -> JournalEntry {
        JournalEntry { new_location: 0, old_location: 0, sequence: 0, units: 0, ..self }
    }
}

/// What stands in front of a batch's entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchHeader {
    /// The volume.
    pub volume_id: u64,
    /// Its number.
    pub batch: u64,
    /// The number of its first entry; the others follow.
    pub first_entry: u64,
    /// The opening that wrote it.
    pub incarnation: u32,
    /// Whether it was written without waiting for the batch before to be durable.
    pub is_predecessor_unflushed: bool,
    /// This batch and those before it are durable, with their records.
    pub flushed_through: u64,
}

/// Writes a batch to the front of `bytes` and gives its length in units. Zeros follow to the unit's end.
pub fn encode(bytes: &mut [u8], header: &BatchHeader, entries: &[JournalEntry], unit_bytes: u32) -> u32 {
    assert!(entries.len() <= BATCH_ENTRIES_MAX, "{} entries in one batch", entries.len());
    let end = BATCH_HEADER_BYTES + entries.len() * JOURNAL_ENTRY_BYTES;
    let units = (end as u32).div_ceil(unit_bytes);
    bytes[..BATCH_HEADER_BYTES].fill(0);
    bytes[0..4].copy_from_slice(&MAGIC);
    bytes[8..16].copy_from_slice(&header.volume_id.to_le_bytes());
    bytes[16..24].copy_from_slice(&header.batch.to_le_bytes());
    bytes[24..32].copy_from_slice(&header.first_entry.to_le_bytes());
    bytes[32..36].copy_from_slice(&header.incarnation.to_le_bytes());
    bytes[36..40].copy_from_slice(&u32::from(header.is_predecessor_unflushed).to_le_bytes());
    bytes[40..48].copy_from_slice(&header.flushed_through.to_le_bytes());
    bytes[48..52].copy_from_slice(&(entries.len() as u32).to_le_bytes());
    bytes[52..56].copy_from_slice(&units.to_le_bytes());
    for (entry, b) in entries.iter().zip(bytes[BATCH_HEADER_BYTES..end].chunks_exact_mut(JOURNAL_ENTRY_BYTES))
    {
        b[0..16].copy_from_slice(&entry.hash.to_le_bytes());
        b[16..24].copy_from_slice(&entry.new_location.to_le_bytes());
        b[24..32].copy_from_slice(&entry.old_location.to_le_bytes());
        b[32..40].copy_from_slice(&entry.sequence.to_le_bytes());
        b[40..44].copy_from_slice(&entry.units.to_le_bytes());
        b[44..48].fill(0);
    }
    bytes[end..(units * unit_bytes) as usize].fill(0);
    let crc = crc32c(&bytes[8..end]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    units
}

/// Bytes read from the ring, which may be anything.
pub struct UncheckedBatch<'a>(pub &'a [u8]);

/// A batch that was checked.
#[derive(Debug)]
pub struct Batch<'a> {
    /// Its header.
    pub header: BatchHeader,
    /// How many units it takes.
    pub units: u32,
    entries: &'a [u8],
}

impl<'a> UncheckedBatch<'a> {
    /// The batch at the front of the bytes, once its checksum holds.
    pub fn check(self, unit_bytes: u32) -> Option<Batch<'a>> {
        let bytes = self.0;
        if bytes.len() < BATCH_HEADER_BYTES || bytes[0..4] != MAGIC {
            return None;
        }
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        let (count, units) = (u32_at(48) as usize, u32_at(52));
        if count > BATCH_ENTRIES_MAX {
            return None;
        }
        let end = BATCH_HEADER_BYTES + count * JOURNAL_ENTRY_BYTES;
        if units != (end as u32).div_ceil(unit_bytes) || end > bytes.len() {
            return None;
        }
        if crc32c(&bytes[8..end]) != u32_at(4) {
            return None;
        }
        let header = BatchHeader {
            volume_id: u64_at(8),
            batch: u64_at(16),
            first_entry: u64_at(24),
            incarnation: u32_at(32),
            is_predecessor_unflushed: u32_at(36) != 0,
            flushed_through: u64_at(40),
        };
        Some(Batch { header, units, entries: &bytes[BATCH_HEADER_BYTES..end] })
    }
}

impl Batch<'_> {
    /// Its entries, in order.
    pub fn entries(&self) -> impl Iterator<Item = JournalEntry> + '_ {
        self.entries.chunks_exact(JOURNAL_ENTRY_BYTES).map(|b| {
            let u64_at = |at: usize| u64::from_le_bytes(b[at..at + 8].try_into().expect("eight bytes"));
            JournalEntry {
                hash: u128::from_le_bytes(b[0..16].try_into().expect("sixteen bytes")),
                new_location: u64_at(16),
                old_location: u64_at(24),
                sequence: u64_at(32),
                units: u32::from_le_bytes(b[40..44].try_into().expect("four bytes")),
            }
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
