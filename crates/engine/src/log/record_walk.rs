//! The records of a value chunk that has no directory, found by their headers.
//!
//! ```text
//!   │ record │ record │ zeros │ record │ damage │ record │ zeros …
//!     Record   Record   Gap     Record   Gap      Record   Gap
//! ```
//! In: the bytes of a chunk that was open when its volume was. Out: its records and the gaps between them, from the front to the end.
//! A gap is granules at which no record begins: padding, a damaged header, or the rest of a record that began in the chunk before.
//!
//! A crash may leave the header of a record that no image names in the last unit in front of the next opening's records, which then lie
//! where its value was to be. So a value is passed over only if it is intact, and lies in the chunk: within any other one, records and gaps are looked for as well.
//!
//! Invariants: steps follow one another, each of at least one granule, and cover the bytes; a record's header is intact. What a value
//! contains is no record, since a header's checksum depends on the volume's secret number and the place.
//! Tested below.

use super::value_record::{UncheckedValueRecord, VALUE_RECORD_MAGIC, ValueRecordHead, ValueRecordPlace};

/// A step of the walk: so many granules from one on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WalkStep<'a> {
    /// A record, or the first granule of one whose value is not intact.
    Record {
        /// The granule of the chunk at which it begins.
        granule: u32,
        /// Its head.
        head: ValueRecordHead<'a>,
    },
    /// Granules without a record.
    Gap {
        /// The first granule.
        granule: u32,
        /// How many.
        granules: u32,
        /// Whether all of their bytes are zero.
        is_zero: bool,
    },
}

/// Walks over the records of a chunk.
pub struct RecordWalk<'a> {
    bytes: &'a [u8],
    /// The place of granule 0 of the bytes.
    first: ValueRecordPlace,
    granule_log2: u8,
    granule: u32,
}

impl<'a> RecordWalk<'a> {
    /// Begins at the front of `bytes`, which were read from a place on.
    pub fn new(bytes: &'a [u8], first: ValueRecordPlace, granule_log2: u8) -> RecordWalk<'a> {
        RecordWalk { bytes, first, granule_log2, granule: 0 }
    }

    /// The granules of the bytes.
    fn granules(&self) -> u32 {
        (self.bytes.len() >> self.granule_log2) as u32
    }

    fn bytes_from(&self, granule: u32) -> &'a [u8] {
        &self.bytes[(granule as usize) << self.granule_log2..]
    }

    /// The record at a granule.
    fn record_at(&self, granule: u32) -> Option<ValueRecordHead<'a>> {
        let bytes = self.bytes_from(granule);
        if bytes.first() != Some(&VALUE_RECORD_MAGIC) {
            return None;
        }
        let place = ValueRecordPlace { granule: self.first.granule.checked_add(granule)?, ..self.first };
        UncheckedValueRecord { bytes, place }.head().ok()
    }
}

impl<'a> Iterator for RecordWalk<'a> {
    type Item = WalkStep<'a>;

    fn next(&mut self) -> Option<WalkStep<'a>> {
        let (start, end) = (self.granule, self.granules());
        if start >= end {
            return None;
        }
        let granule = self.first.granule.wrapping_add(start);
        if let Some(head) = self.record_at(start) {
            let value = self.bytes_from(start).get(head.head_bytes()..).unwrap_or_default();
            let value = value.get(..head.value_bytes as usize);
            let is_whole = value.is_some_and(|value| head.is_value_intact(value));
            self.granule = if is_whole { start + head.granules(self.granule_log2) } else { start + 1 };
            return Some(WalkStep::Record { granule, head });
        }
        let next = (start + 1..end).find(|&granule| self.record_at(granule).is_some()).unwrap_or(end);
        self.granule = next;
        let gap_bytes = ((next - start) as usize) << self.granule_log2;
        let is_zero = self.bytes_from(start)[..gap_bytes].iter().all(|&byte| byte == 0);
        Some(WalkStep::Gap { granule, granules: next - start, is_zero })
    }
}

#[cfg(test)]
mod tests {
    use super::super::log_place::ChunkIndex;
    use super::super::value_record::{NewValueRecord, encode_value_record, record_granules};
    use super::*;
    use crate::common::record::RecordMeta;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const FIRST: ValueRecordPlace =
        ValueRecordPlace { volume_id: 7, partition: 1, index: ChunkIndex(2), granule: 100 };

    /// Appends the record of a value, at the place of the bytes so far.
    fn push_record(bytes: &mut Vec<u8>, key: &[u8], value: &[u8]) {
        let record = NewValueRecord { key, meta: RecordMeta::PLAIN, value_bytes: value.len() as u32 };
        let granules = record_granules(key.len(), record.value_bytes, &record.meta, 3);
        let start = bytes.len();
        let place = ValueRecordPlace { granule: FIRST.granule + (start / 8) as u32, ..FIRST };
        bytes.resize(start + granules as usize * 8, 0);
        encode_value_record(&mut bytes[start..], &record, std::iter::once(value), place);
    }

    /// The keys of records, and the gaps in bytes.
    fn walked(bytes: &[u8]) -> Vec<Result<Vec<u8>, (u32, bool)>> {
        let mut at = FIRST.granule;
        let steps = RecordWalk::new(bytes, FIRST, 3).map(|step| match step {
            WalkStep::Record { granule, head } => {
                assert_eq!(granule, at);
                // The next step begins behind it.
                let is_whole = bytes[((at - FIRST.granule) as usize) << 3..]
                    .get(head.head_bytes()..head.head_bytes() + head.value_bytes as usize)
                    .is_some_and(|value| head.is_value_intact(value));
                at += if is_whole { head.granules(3) } else { 1 };
                Ok(head.key.to_vec())
            }
            WalkStep::Gap { granule, granules, is_zero } => {
                assert_eq!(granule, at);
                at += granules;
                Err((granules, is_zero))
            }
        });
        steps.collect()
    }

    proptest! {
        #[test]
        fn a_walk_finds_every_record_and_every_gap(
            parts in vec((0u32..3, vec(any::<u8>(), 1..50)), 0..30),
        ) {
            let (mut bytes, mut expected) = (Vec::new(), Vec::<Result<Vec<u8>, (u32, bool)>>::new());
            for (padding, value) in parts {
                if padding > 0 {
                    bytes.resize(bytes.len() + padding as usize * 8, 0);
                    expected.push(Err((padding, true)));
                }
                let key = value[..value.len() / 2].to_vec();
                push_record(&mut bytes, &key, &value);
                expected.push(Ok(key));
            }
            prop_assert_eq!(walked(&bytes), expected);
        }

        #[test]
        fn no_bytes_panic(mut bytes in vec(any::<u8>(), 0..400), granule: u32) {
            bytes.iter_mut().step_by(8).for_each(|byte| *byte = VALUE_RECORD_MAGIC);
            let first = ValueRecordPlace { granule, ..FIRST };
            let steps: Vec<_> = RecordWalk::new(&bytes, first, 3).collect();
            prop_assert_eq!(steps.len(), usize::from(bytes.len() >= 8), "no record by chance: {:?}", steps);
        }
    }

    #[test]
    fn a_damaged_header_is_a_gap_that_is_not_zero() {
        let mut bytes = Vec::new();
        [b"a", b"b", b"c"].iter().for_each(|key| push_record(&mut bytes, *key, &[1; 20]));
        // Each has 40 bytes.
        bytes[45] ^= 1;
        assert_eq!(walked(&bytes), [Ok(b"a".to_vec()), Err((5, false)), Ok(b"c".to_vec())]);
    }

    #[test]
    fn a_record_in_a_value_is_none() {
        let mut inner = Vec::new();
        push_record(&mut inner, b"inner", &[1; 20]);
        let mut bytes = Vec::new();
        push_record(&mut bytes, b"12345678", &inner);
        // The outer header is damaged, and the inner record begins at a granule.
        bytes[9] ^= 1;
        assert_eq!(walked(&bytes), [Err((bytes.len() as u32 / 8, false))]);
    }

    #[test]
    fn a_record_that_goes_on_in_the_next_chunk_may_hide_others() {
        let mut bytes = Vec::new();
        push_record(&mut bytes, b"k", &[1; 100]);
        assert_eq!(walked(&bytes[..64]), [Ok(b"k".to_vec()), Err((7, false))]);
    }

    #[test]
    fn records_that_were_written_over_the_value_of_another_one_are_found() {
        let mut bytes = Vec::new();
        push_record(&mut bytes, b"a", &[1; 20]);
        push_record(&mut bytes, b"cut", &[2; 200]);
        let end = bytes.len();
        // The header of the second record stays in the unit in which the log ended.
        bytes.truncate(64);
        push_record(&mut bytes, b"b", &[3; 20]);
        push_record(&mut bytes, b"c", &[4; 20]);
        bytes.resize(end, 0);
        let padding = (end as u32 - 144) / 8;
        let found = ["a", "cut"].map(|key| Ok(key.as_bytes().to_vec()));
        let behind = [Err((2, false)), Ok(b"b".to_vec()), Ok(b"c".to_vec()), Err((padding, true))];
        assert_eq!(walked(&bytes), [&found[..], &behind].concat());
    }
}
