//! Edits in the journal: an edit in parts, each as long as an entry of the journal may be.
//!
//! An edit is longer than one journal entry may be, if it has many tables: [`encode_parts`] cuts it, and [`EditAssembler`] puts it together. Its
//! parts are in one order in the journal, possibly with other entries in between. An edit whose last part is missing did not happen.
//!
//! ```text
//!   part     edit u64 │ part u32 │ parts u32 │ length of the edit u32 │ CRC-32C of the edit u32 │ bytes
//! ```
//! Integers are little-endian.
//!
//! Invariant: putting together takes any bytes, and holds at most [`EDIT_BYTES_MAX`]. Tested below.

use super::version_edit::{EDIT_BYTES_MAX, VersionEdit};
use octokv_base::crc32c;
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The most bytes of a part of an edit, with its header.
pub const EDIT_PART_BYTES_MAX: usize = 16 << 10;
const PART_HEADER_BYTES: usize = 24;

/// An edit as parts of at most [`EDIT_PART_BYTES_MAX`] bytes, each for one entry of the journal, in this order. `number` is higher than that of every edit before.
///
/// # Panics
/// If the edit has more than [`EDIT_BYTES_MAX`]: the inputs of a compaction are bounded.
pub fn encode_parts(edit: &VersionEdit, number: u64) -> Vec<Vec<u8>> {
    let mut bytes = Vec::new();
    edit.encode(&mut bytes);
    assert!(bytes.len() <= EDIT_BYTES_MAX, "an edit of {} bytes", bytes.len());
    let crc = crc32c(&bytes);
    let part_bytes = EDIT_PART_BYTES_MAX - PART_HEADER_BYTES;
    let parts = bytes.len().div_ceil(part_bytes).max(1);
    let part = |index: usize| {
        let header = EditPartLayout {
            edit: number.into(),
            part: (index as u32).into(),
            parts: (parts as u32).into(),
            edit_bytes: (bytes.len() as u32).into(),
            crc: crc.into(),
        };
        let from = index * part_bytes;
        [header.as_bytes(), &bytes[from..bytes.len().min(from + part_bytes)]].concat()
    };
    (0..parts).map(part).collect()
}

/// The header of a part.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy, PartialEq)]
#[repr(C)]
struct EditPartLayout {
    edit: U64,
    part: U32,
    parts: U32,
    edit_bytes: U32,
    crc: U32,
}
const _: () = assert!(size_of::<EditPartLayout>() == PART_HEADER_BYTES);

/// Puts edits together from their parts, in the order of the journal.
///
/// Parts that do not follow each other are those of an edit that a crash cut off, and are dropped.
#[derive(Default)]
pub struct EditAssembler {
    /// The first part's header, and the parts that are there.
    pending: Option<(EditPartLayout, u32)>,
    /// The bytes of these parts; at most [`EDIT_BYTES_MAX`].
    bytes: Vec<u8>,
}

/// A part of an edit is damaged, or does not follow the ones before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DamagedPart;

impl EditAssembler {
    /// Takes the next part. Gives the records of its edit if it is the last one.
    ///
    /// # Errors
    /// [`DamagedPart`], which the journal's checksums exclude. The edit is dropped.
    pub fn offer(&mut self, part: &[u8]) -> Result<Option<Vec<u8>>, DamagedPart> {
        let pending = self.pending.take();
        let (header, bytes) = EditPartLayout::read_from_prefix(part).map_err(|_| DamagedPart)?;
        let parts = match pending {
            _ if header.part.get() == 0 => 0,
            Some((first, parts)) if EditPartLayout { part: parts.into(), ..first } == header => parts,
            _ => return Err(DamagedPart),
        };
        if parts == 0 {
            self.bytes.clear();
        }
        let edit_bytes = header.edit_bytes.get() as usize;
        let is_last = parts + 1 == header.parts.get();
        let total_bytes = self.bytes.len() + bytes.len();
        if part.len() > EDIT_PART_BYTES_MAX
            || edit_bytes > EDIT_BYTES_MAX
            || total_bytes > edit_bytes
            || is_last != (total_bytes == edit_bytes)
            || parts >= header.parts.get()
        {
            return Err(DamagedPart);
        }
        self.bytes.extend_from_slice(bytes);
        if !is_last {
            self.pending = Some((header, parts + 1));
            return Ok(None);
        }
        let bytes = std::mem::take(&mut self.bytes);
        if crc32c(&bytes) == header.crc.get() { Ok(Some(bytes)) } else { Err(DamagedPart) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::reclaim::ReclaimQueue;
    use super::super::table_meta::TableMeta;
    use super::super::table_meta::tests::table_fields;
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn assembled(parts: &[Vec<u8>]) -> Option<Vec<u8>> {
        let mut assembler = EditAssembler::default();
        let mut records = None;
        for part in parts {
            assert!(records.is_none(), "only the last part completes the edit");
            records = assembler.offer(part).unwrap();
        }
        records
    }

    fn long_edit(tables: u64) -> VersionEdit {
        let queue = ReclaimQueue::new();
        let table = |id: u64| {
            let key = [&[7; 1000][..], &id.to_be_bytes()].concat();
            (1, TableMeta::new(&table_fields(id, &key, &key), &queue))
        };
        VersionEdit { added_tables: (1..=tables).map(table).collect(), ..VersionEdit::default() }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in vec(any::<u8>(), 0..200)) {
            let mut assembler = EditAssembler::default();
            _ = assembler.offer(&bytes);
            _ = assembler.offer(&encode_parts(&long_edit(100), 1)[0]);
            _ = assembler.offer(&bytes);
        }
    }

    #[test]
    fn an_edit_of_many_tables_is_cut_and_put_together() {
        let parts = encode_parts(&long_edit(100), 3);
        assert!(parts.len() > 10 && parts.iter().all(|part| part.len() <= EDIT_PART_BYTES_MAX));
        let edit = VersionEdit::decode(&assembled(&parts).unwrap(), &ReclaimQueue::new()).unwrap();
        assert_eq!(edit.added_tables.len(), 100);
        assert_eq!(encode_parts(&VersionEdit::default(), 1).len(), 1, "an empty one has a part, too");
        assert_eq!(assembled(&encode_parts(&VersionEdit::default(), 1)), Some(Vec::new()));
    }

    #[test]
    fn an_edit_that_a_crash_cut_off_is_dropped_and_damage_is_found() {
        let (one, other) = (encode_parts(&long_edit(100), 3), encode_parts(&long_edit(90), 4));
        let mut assembler = EditAssembler::default();
        one[..one.len() - 1].iter().for_each(|part| assert_eq!(assembler.offer(part), Ok(None)));
        let results: Vec<_> = other.iter().map(|part| assembler.offer(part)).collect();
        assert!(matches!(&results[..], [first @ .., Ok(Some(_))] if first.iter().all(|it| *it == Ok(None))));
        // A part of another edit, a part twice, a part left out, a flipped bit.
        for wrong in [&other[1], &one[0][..20].to_vec(), &one[1], &one[3]] {
            let mut assembler = EditAssembler::default();
            one[..2].iter().for_each(|part| assert_eq!(assembler.offer(part), Ok(None)));
            assert_eq!(assembler.offer(wrong), Err(DamagedPart));
            assert_eq!(assembler.offer(&one[2]), Err(DamagedPart), "the edit is gone");
        }
        for bit in 0..PART_HEADER_BYTES * 8 {
            let mut part = encode_parts(&VersionEdit::default(), 5).remove(0);
            part[bit / 8] ^= 1 << (bit % 8);
            // The number alone is free; the journal's checksum covers it.
            assert_eq!(EditAssembler::default().offer(&part).is_ok(), bit < 64, "bit {bit}");
        }
    }
}
