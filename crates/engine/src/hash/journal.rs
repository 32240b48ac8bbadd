//! The changes of the index, as the journal has them.
//!
//! ```text
//!   entry   0 hash u128           24 old location u64 (0 = the key is new)   40 units u32
//!          16 new location u64 (0 = deleted)        32 sequence u64          44 flags u32 (0 in format 1)
//! ```
//! The batches that they are in are [`crate::common::journal`]'s.

use crate::common::journal::{BATCH_HEADER_BYTES, JournalEntry};
use crate::common::record::RecordFlags;
use zerocopy::byteorder::little_endian::{U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A change on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct IndexChangeLayout {
    hash: U128,
    new_location: U64,
    old_location: U64,
    sequence: U64,
    units: U32,
    flags: U32,
}

/// One change of the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexChange {
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
    /// The flags of the new record.
    pub flags: RecordFlags,
}

/// Whether a change's predecessor was confirmed beside the write of its record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteOutcome {
    /// The predecessor, if any, is the key's.
    Confirmed,
    /// The predecessor is another key's with the same tag: the change replaces nothing.
    OtherKey,
}

impl JournalEntry for IndexChange {
    type Outcome = WriteOutcome;

    const FIXED_BYTES: Option<usize> = Some(size_of::<IndexChangeLayout>());
    const BATCH_ENTRIES_MAX: usize = 660;
    const BATCH_BYTES_MAX: usize = BATCH_HEADER_BYTES + 660 * size_of::<IndexChangeLayout>();

    fn encoded_bytes(&self) -> usize {
        size_of::<IndexChangeLayout>()
    }

    fn encode(&self, bytes: &mut [u8]) {
        *IndexChangeLayout::mut_from_bytes(bytes).expect("as many bytes as an entry has") =
            IndexChangeLayout {
                hash: self.hash.into(),
                new_location: self.new_location.into(),
                old_location: self.old_location.into(),
                sequence: self.sequence.into(),
                units: self.units.into(),
                flags: u32::from(self.flags.bits()).into(),
            };
    }

    fn decode(bytes: &[u8]) -> Option<(IndexChange, usize)> {
        let (layout, _) = IndexChangeLayout::ref_from_prefix(bytes).ok()?;
        let change = IndexChange {
            hash: layout.hash.get(),
            new_location: layout.new_location.get(),
            old_location: layout.old_location.get(),
            sequence: layout.sequence.get(),
            units: layout.units.get(),
            flags: RecordFlags::from_bits(u8::try_from(layout.flags.get()).ok()?)?,
        };
        Some((change, size_of::<IndexChangeLayout>()))
    }

    fn amended(self, outcome: WriteOutcome) -> IndexChange {
        match outcome {
            WriteOutcome::Confirmed => self,
            WriteOutcome::OtherKey => IndexChange { old_location: 0, ..self },
        }
    }

    /// Its sequence number names no record.
    fn cancelled(self) -> IndexChange {
        IndexChange { new_location: 0, old_location: 0, units: 0, flags: RecordFlags::NONE, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::common::journal::{BatchHeader, UncheckedBatch, batch_units_max, encode};

    #[test]
    fn a_batch_of_any_size_has_the_bytes_of_format_version_1() {
        let header = BatchHeader {
            volume_id: 1,
            batch: 2,
            first_entry: 3,
            incarnation: 4,
            is_predecessor_unflushed: true,
            flushed_through: 1,
        };
        let change = |i: usize| IndexChange {
            hash: i as u128 + 77,
            new_location: i as u64 + 1,
            old_location: 5,
            sequence: 9,
            units: 6,
            flags: RecordFlags::NONE,
        };
        for (count, unit_bytes) in [(0, 512), (1, 512), (9, 512), (10, 512), (84, 4096), (660, 512)] {
            let entries: Vec<IndexChange> = (0..count).map(change).collect();
            let mut bytes = vec![0xff; 36 * 1024];
            let units = encode(&mut bytes, &header, &entries, unit_bytes);
            let batch = UncheckedBatch(&bytes).check::<IndexChange>(unit_bytes).unwrap();
            assert_eq!((batch.header, batch.units), (header, units));
            assert_eq!(batch.entries, entries);
            assert!(units <= batch_units_max::<IndexChange>(unit_bytes));
            assert_eq!(bytes[56..64], [0; 8], "entries of one length");
            if count > 1 {
                let second = &bytes[112..160];
                assert_eq!((second[0], second[16], second[24], second[32], second[40]), (78, 2, 5, 9, 6));
            }
        }
        assert_eq!((batch_units_max::<IndexChange>(512), batch_units_max::<IndexChange>(4096)), (62, 8));
    }
}
