//! Reads that several records share: of records that lie close together, one that has the bytes between them costs less than one for each.
//!
//! ```text
//!   records   ▓▓ ▓   ▓▓▓          ▓▓           ▓▓▓▓▓▓▓▓▓▓▓▓▓▓
//!   reads     └────────┘          └┘           └────────────┘        gaps up to a bound, and lengths up to another
//! ```
//! In: the units of records. Out: reads, and which records each has. Tested below.

use std::ops::Range;

/// A read, and the records that lie in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct SharedRead {
    /// The units of the device that the read covers.
    pub units: Range<u64>,
    /// The records in it, as indices into the list that was given.
    pub records: Range<usize>,
}

/// The reads that have all records, of whose units the first ones ascend. Records share a read if at most `gap_units` lie between them, and it has at most `units_max`;
/// a longer record has one of its own.
pub(super) fn share_reads(records: &[Range<u64>], gap_units: u64, units_max: u64) -> Vec<SharedRead> {
    let mut reads: Vec<SharedRead> = Vec::new();
    for (number, units) in records.iter().enumerate() {
        if let Some(last) = reads.last_mut() {
            let end = last.units.end.max(units.end);
            if units.start <= last.units.end + gap_units && end - last.units.start <= units_max {
                last.units.end = end;
                last.records.end = number + 1;
                continue;
            }
        }
        reads.push(SharedRead { units: units.clone(), records: number..number + 1 });
    }
    reads
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    #[test]
    fn close_records_share_a_read_up_to_its_bound() {
        let read = |units, records| SharedRead { units, records };
        let records = [0..1, 0..2, 4..5, 8..9, 20..30, 31..32];
        assert_eq!(
            share_reads(&records, 2, 6),
            [read(0..5, 0..3), read(8..9, 3..4), read(20..30, 4..5), read(31..32, 5..6)],
            "three are between the third and the fourth, and the fifth is longer than a read"
        );
        assert_eq!(share_reads(&records, 11, 32), [read(0..32, 0..6)]);
        assert_eq!(share_reads(&records, 10, 32), [read(0..9, 0..4), read(20..32, 4..6)]);
        assert_eq!(share_reads(&[], 2, 6), []);
    }

    proptest! {
        #[test]
        fn each_record_lies_in_the_one_read_that_has_its_number(
            mut records in vec((0..2_000_u64, 1..12_u64), 0..100), gap_units in 0..20_u64, units_max in 1..64_u64
        ) {
            records.sort_unstable();
            let records: Vec<Range<u64>> = records.iter().map(|&(first, units)| first..first + units).collect();
            let reads = share_reads(&records, gap_units, units_max);
            let numbers: Vec<usize> = reads.iter().flat_map(|read| read.records.clone()).collect();
            prop_assert_eq!(numbers, (0..records.len()).collect::<Vec<_>>());
            for read in &reads {
                let own = &records[read.records.clone()];
                prop_assert_eq!(read.units.start, own[0].start);
                prop_assert_eq!(Some(read.units.end), own.iter().map(|units| units.end).max());
                prop_assert!(own.len() == 1 || read.units.end - read.units.start <= units_max);
                let mut end = own[0].end;
                for units in own {
                    prop_assert!(units.start <= end + gap_units);
                    end = end.max(units.end);
                }
            }
        }
    }
}
