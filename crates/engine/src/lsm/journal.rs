//! The ordered engine's changes, as the journal has them: entries of keys, and parts of edits.
//!
//! ```text
//!   change    kind u8 (0 cancelled, 1 entry, 2 part of an edit) │ length u32 │ bytes
//!   entry     key length u16 │ key │ the entry's bytes, as crate::lsm::entry draws them, with the sequence number 1: its number is that of the change
//! ```
//! Integers are little-endian. The batches that they are in are [`crate::common::journal`]'s, the parts are [`super::edit_parts`]'.
//! Invariant: decoding takes any bytes; a change that it gives has contents. Tested below.

use super::edit_parts::EDIT_PART_BYTES_MAX;
use super::entry::{ENTRY_OVERHEAD_MAX, TreeEntry};
use crate::common::journal::{BATCH_HEADER_BYTES, JournalEntry};
use octokv_base::KEY_BYTES_MAX;
use std::sync::Arc;

const KIND_CANCELLED: u8 = 0;
const KIND_ENTRY: u8 = 1;
const KIND_EDIT_PART: u8 = 2;
const CHANGE_HEADER_BYTES: usize = 5;
/// The sequence number of an entry in the journal, where it has none.
const NO_SEQUENCE: u64 = 1;

/// The most bytes of a value in the journal, and so in the tree.
pub const JOURNAL_VALUE_BYTES_MAX: usize = 16 << 10;
/// The most bytes of a change.
pub const CHANGE_BYTES_MAX: usize =
    CHANGE_HEADER_BYTES + 2 + KEY_BYTES_MAX + ENTRY_OVERHEAD_MAX + JOURNAL_VALUE_BYTES_MAX;
const _: () = assert!(CHANGE_HEADER_BYTES + EDIT_PART_BYTES_MAX <= CHANGE_BYTES_MAX);

/// A change of the tree. Clones share its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalChange {
    kind: u8,
    bytes: Arc<[u8]>,
}

/// What a change says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeContents<'a> {
    /// An entry of a key.
    Entry(TreeEntry<'a>),
    /// A part of an edit.
    EditPart(&'a [u8]),
    /// Nothing: the write of its record failed.
    Cancelled,
}

impl JournalChange {
    /// The change of a key. The entry's sequence number is left out.
    ///
    /// # Panics
    /// If its inline value is longer than [`JOURNAL_VALUE_BYTES_MAX`].
    pub fn entry(entry: &TreeEntry<'_>) -> JournalChange {
        let mut bytes = Vec::with_capacity(2 + entry.key.len() + entry.encoded_bytes());
        bytes.extend_from_slice(&(entry.key.len() as u16).to_le_bytes());
        bytes.extend_from_slice(entry.key);
        TreeEntry { sequence: NO_SEQUENCE, ..*entry }.encode(&mut bytes);
        assert!(CHANGE_HEADER_BYTES + bytes.len() <= CHANGE_BYTES_MAX, "an entry of {} bytes", bytes.len());
        JournalChange { kind: KIND_ENTRY, bytes: bytes.into() }
    }

    /// A part of an edit.
    ///
    /// # Panics
    /// If it is longer than [`EDIT_PART_BYTES_MAX`].
    pub fn edit_part(part: &[u8]) -> JournalChange {
        assert!(part.len() <= EDIT_PART_BYTES_MAX, "a part of {} bytes", part.len());
        JournalChange { kind: KIND_EDIT_PART, bytes: part.into() }
    }

    /// What it says, as the change with this number.
    pub fn contents(&self, number: u64) -> ChangeContents<'_> {
        match self.kind {
            KIND_ENTRY => {
                let entry = decode_entry(&self.bytes).expect("checked when it was made");
                ChangeContents::Entry(TreeEntry { sequence: number, ..entry })
            }
            KIND_EDIT_PART => ChangeContents::EditPart(&self.bytes),
            _ => ChangeContents::Cancelled,
        }
    }
}

/// The entry that is all of `bytes`.
fn decode_entry(bytes: &[u8]) -> Option<TreeEntry<'_>> {
    let (key_bytes, rest) = bytes.split_first_chunk::<2>()?;
    let key_bytes = usize::from(u16::from_le_bytes(*key_bytes));
    let (key, mut rest) = rest.split_at_checked(key_bytes).filter(|_| key_bytes <= KEY_BYTES_MAX)?;
    let entry = TreeEntry::decode(key, &mut rest)?;
    rest.is_empty().then_some(entry)
}

impl JournalEntry for JournalChange {
    type Outcome = ();

    const FIXED_BYTES: Option<usize> = None;
    const BATCH_ENTRIES_MAX: usize = 660;
    const BATCH_BYTES_MAX: usize = 128 << 10;

    fn encoded_bytes(&self) -> usize {
        CHANGE_HEADER_BYTES + self.bytes.len()
    }

    fn encode(&self, bytes: &mut [u8]) {
        let (header, rest) = bytes.split_at_mut(CHANGE_HEADER_BYTES);
        header[0] = self.kind;
        header[1..].copy_from_slice(&(self.bytes.len() as u32).to_le_bytes());
        rest.copy_from_slice(&self.bytes);
    }

    fn decode(bytes: &[u8]) -> Option<(JournalChange, usize)> {
        let (&[kind, length @ ..], rest) = bytes.split_first_chunk::<CHANGE_HEADER_BYTES>()?;
        let length = u32::from_le_bytes(length) as usize;
        let bytes = rest.get(..length).filter(|_| CHANGE_HEADER_BYTES + length <= CHANGE_BYTES_MAX)?;
        let is_change = match kind {
            KIND_CANCELLED => true,
            KIND_ENTRY => decode_entry(bytes).is_some(),
            KIND_EDIT_PART => length <= EDIT_PART_BYTES_MAX,
            _ => false,
        };
        is_change.then(|| (JournalChange { kind, bytes: bytes.into() }, CHANGE_HEADER_BYTES + length))
    }

    fn amended(self, (): ()) -> JournalChange {
        self
    }

    fn cancelled(self) -> JournalChange {
        JournalChange { kind: KIND_CANCELLED, ..self }
    }
}

const _: () = assert!(BATCH_HEADER_BYTES + CHANGE_BYTES_MAX <= JournalChange::BATCH_BYTES_MAX);

#[cfg(test)]
mod tests {
    use super::super::entry::{EntryValue, ValueAddress};
    use super::*;
    use octokv_base::{UnixTime, Version};
    use proptest::prelude::*;

    fn entry<'a>(key: &'a [u8], value: EntryValue<'a>) -> TreeEntry<'a> {
        TreeEntry { key, sequence: 77, version: Version::from_bits(5), expires_at: UnixTime(9), value }
    }

    #[test]
    fn a_change_gives_back_its_contents_with_its_number() {
        let address = ValueAddress { segment: 1, unit: 2, value_bytes: 3 };
        let long = vec![7; JOURNAL_VALUE_BYTES_MAX];
        let values = [
            EntryValue::Tombstone,
            EntryValue::Inline(b"value"),
            EntryValue::InSegment(address),
            EntryValue::Inline(&long),
        ];
        for (value, key) in
            values.into_iter().flat_map(|value| [(value, &b""[..]), (value, &[3; KEY_BYTES_MAX])])
        {
            let change = JournalChange::entry(&entry(key, value));
            let mut bytes = vec![0; change.encoded_bytes()];
            change.encode(&mut bytes);
            let (decoded, length) = JournalChange::decode(&[&bytes[..], &[1]].concat()).unwrap();
            assert_eq!((&decoded, length), (&change, bytes.len()));
            let want = ChangeContents::Entry(TreeEntry { sequence: 12, ..entry(key, value) });
            assert_eq!(decoded.contents(12), want);
            let cancelled = change.clone().cancelled();
            assert_eq!(
                (cancelled.encoded_bytes(), cancelled.contents(12)),
                (bytes.len(), ChangeContents::Cancelled)
            );
            for end in 0..bytes.len().min(200) {
                assert_eq!(JournalChange::decode(&bytes[..end]), None);
            }
        }
        let part = JournalChange::edit_part(b"part");
        assert_eq!(part.contents(1), ChangeContents::EditPart(b"part"));
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(kind in 0..4u8, length in 0..80u32, bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            let change = [&[kind][..], &length.to_le_bytes(), &bytes].concat();
            if let Some((change, length)) = JournalChange::decode(&change) {
                prop_assert!(length <= CHANGE_HEADER_BYTES + bytes.len());
                change.contents(3);
            }
        }
    }
}
