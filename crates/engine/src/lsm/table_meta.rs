//! Metadata of tables and value segments: once in memory, counted by references, given up with the last of them.
//!
//! ```text
//!   version ─▶ leaf ─▶ Arc<TableMeta> ◀─ leaf ◀─ another version          the last reference goes ─▶ its extent into ReclaimQueue
//! ```
//! The keys of a table, the bytes that it refers to in each segment and its rare fields are in one allocation, as varints but for the keys.
//!
//! Invariants: an extent enters the queue once, when nothing refers to what lies there. What [`TableMeta::new`] takes was checked by
//! [`TableFields::check`].
//! Tested below; memory by `tests/lsm_version_memory.rs`.

use super::entry::{push_varint, take_varint};
use super::reclaim::{ReclaimQueue, is_extent};
use super::shared_tree::{TreeItem, TreeSummary};
use crate::common::allocator::Extent;
use crate::common::superblock::COUNT_MAX;
use octokv_base::key::KEY_BYTES_MAX;
use octokv_base::{UnixTime, Version};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Where in its extent a table has what: for its reader alone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableParts {
    /// The bytes of data before the first copy of the metadata, which begins in the next unit.
    pub front_bytes: u32,
    /// The unit of the extent in which the second copy of the metadata begins.
    pub second_unit: u32,
    /// The length of the descriptor in bytes.
    pub descriptor_bytes: u32,
    /// The length of the filter in bytes.
    pub filter_bytes: u32,
    /// The length of the index in bytes.
    pub index_bytes: u32,
}

/// More bytes than any table has: sums over the tables of a compaction do not overflow.
pub const TABLE_BYTES_LIMIT: u64 = 1 << 40;

/// What a version knows of a table, as the writer of a table gives it and as a journal and an image have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableFields {
    /// The number of the table, from 1: higher than those of all tables that began before it.
    pub id: u64,
    /// Where it lies.
    pub extent: Extent,
    /// What lies where in its extent.
    pub parts: TableParts,
    /// The length of its data in bytes; at most [`TABLE_BYTES_LIMIT`].
    pub bytes: u64,
    /// Its entries, at least 1, of which these are tombstones; at most `u32::MAX`.
    pub entries: u64,
    /// Its tombstones.
    pub tombstones: u64,
    /// The lowest sequence number of its entries.
    pub smallest_sequence: u64,
    /// The highest sequence number of its entries.
    pub largest_sequence: u64,
    /// The highest version of its tombstones, or a higher one; [`Version::NONE`] if none has one.
    pub largest_tombstone_version: Version,
    /// When the first of its entries expires; [`UnixTime::NEVER`] if none does.
    pub earliest_expiry: UnixTime,
    /// Whether it was written when all of its tombstones could have been dropped ([`TableMeta::may_drop_tombstones`]) and nothing lay below: writing it again
    /// drops none.
    pub is_settled: bool,
    /// The key of its first entry.
    pub first_key: Vec<u8>,
    /// The key of its last entry.
    pub last_key: Vec<u8>,
    /// The bytes of the records to which its entries refer, by value segment, in ascending order of segments.
    pub segment_bytes: Vec<(u32, u64)>,
}

/// Why fields are not those of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFieldProblem {
    /// The number is 0 or beyond any real count.
    Id,
    /// The extent is empty or ends beyond any real unit.
    Extent,
    /// No entry, or more than a table has, or more tombstones than entries.
    Counts,
    /// The sequence numbers are 0, reversed or beyond any real count.
    Sequences,
    /// A key is longer than keys are, or the last is before the first.
    Keys,
    /// Segments are not in ascending order, or a segment without bytes.
    Segments,
}

impl fmt::Display for TableFieldProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            TableFieldProblem::Id => "its number is none",
            TableFieldProblem::Extent => "its extent is empty or too long",
            TableFieldProblem::Counts => "its counts of bytes, entries and tombstones are impossible",
            TableFieldProblem::Sequences => "its sequence numbers are impossible",
            TableFieldProblem::Keys => "its keys are too long or reversed",
            TableFieldProblem::Segments => "its segments are not in order, or empty",
        })
    }
}

impl TableFields {
    /// Whether a table may have these fields.
    ///
    /// # Errors
    /// What is impossible about them.
    pub fn check(&self) -> Result<(), TableFieldProblem> {
        let counts = 1..=u64::from(u32::MAX);
        let keys = [&self.first_key, &self.last_key];
        let is_ascending = self.segment_bytes.is_sorted_by(|before, after| before.0 < after.0);
        if !(1..=COUNT_MAX).contains(&self.id) {
            Err(TableFieldProblem::Id)
        } else if !is_extent(self.extent) {
            Err(TableFieldProblem::Extent)
        } else if !counts.contains(&self.entries)
            || self.tombstones > self.entries
            || !(1..=TABLE_BYTES_LIMIT).contains(&self.bytes)
        {
            Err(TableFieldProblem::Counts)
        } else if !(1..=self.largest_sequence).contains(&self.smallest_sequence)
            || self.largest_sequence > COUNT_MAX
        {
            Err(TableFieldProblem::Sequences)
        } else if keys.iter().any(|key| key.len() > KEY_BYTES_MAX) || self.first_key > self.last_key {
            Err(TableFieldProblem::Keys)
        } else if !is_ascending
            || self.segment_bytes.iter().any(|&(_, bytes)| bytes == 0 || bytes > COUNT_MAX)
        {
            Err(TableFieldProblem::Segments)
        } else {
            Ok(())
        }
    }
}

/// The metadata of a table. Its extent is given up with the last reference.
pub struct TableMeta {
    id: u64,
    location: u64,
    bytes: u64,
    largest_sequence: u64,
    units: u32,
    entries: u32,
    tombstones: u32,
    first_key_bytes: u16,
    last_key_bytes: u16,
    is_settled: bool,
    /// First key, last key; then as varints the rare fields, and of each segment the distance from the one before and its bytes.
    packed: Box<[u8]>,
    reclaim: Arc<ReclaimQueue>,
}

impl TableMeta {
    /// The metadata of a table whose extent goes to `reclaim` in the end.
    ///
    /// # Panics
    /// If the fields are not those of a table ([`TableFields::check`]).
    pub fn new(fields: &TableFields, reclaim: &Arc<ReclaimQueue>) -> Arc<TableMeta> {
        if let Err(problem) = fields.check() {
            panic!("table {}: {problem}", fields.id);
        }
        let mut packed = Vec::new();
        packed.extend_from_slice(&fields.first_key);
        packed.extend_from_slice(&fields.last_key);
        let TableParts { front_bytes, second_unit, descriptor_bytes, filter_bytes, index_bytes } =
            fields.parts;
        let parts = [front_bytes, second_unit, descriptor_bytes, filter_bytes, index_bytes];
        parts.iter().for_each(|&part| push_varint(&mut packed, u64::from(part)));
        push_varint(&mut packed, fields.largest_sequence - fields.smallest_sequence);
        push_varint(&mut packed, fields.largest_tombstone_version.to_bits());
        // Never is the highest time, and becomes the shortest varint.
        push_varint(&mut packed, fields.earliest_expiry.0.wrapping_add(1));
        let mut last_segment = 0;
        for &(segment, bytes) in &fields.segment_bytes {
            push_varint(&mut packed, u64::from(segment - last_segment));
            push_varint(&mut packed, bytes);
            last_segment = segment;
        }
        reclaim.enter(fields.extent);
        Arc::new(TableMeta {
            id: fields.id,
            location: fields.extent.location,
            bytes: fields.bytes,
            largest_sequence: fields.largest_sequence,
            units: fields.extent.units as u32,
            entries: fields.entries as u32,
            tombstones: fields.tombstones as u32,
            first_key_bytes: fields.first_key.len() as u16,
            last_key_bytes: fields.last_key.len() as u16,
            is_settled: fields.is_settled,
            packed: packed.into_boxed_slice(),
            reclaim: reclaim.clone(),
        })
    }

    /// What it was made of.
    pub fn fields(&self) -> TableFields {
        TableFields {
            id: self.id,
            extent: self.extent(),
            parts: self.parts(),
            bytes: self.bytes,
            entries: self.entries(),
            tombstones: self.tombstones(),
            smallest_sequence: self.smallest_sequence(),
            largest_sequence: self.largest_sequence,
            largest_tombstone_version: self.largest_tombstone_version(),
            earliest_expiry: self.earliest_expiry(),
            is_settled: self.is_settled,
            first_key: self.first_key().to_vec(),
            last_key: self.last_key().to_vec(),
            segment_bytes: self.segment_bytes().collect(),
        }
    }

    /// The number of the table.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where it lies.
    pub fn extent(&self) -> Extent {
        Extent { location: self.location, units: u64::from(self.units) }
    }

    /// What lies where in its extent.
    pub fn parts(&self) -> TableParts {
        let [front_bytes, second_unit, descriptor_bytes, filter_bytes, index_bytes, ..] =
            self.rare_fields().0.map(|field| field as u32);
        TableParts { front_bytes, second_unit, descriptor_bytes, filter_bytes, index_bytes }
    }

    /// The length of its data in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Its entries.
    pub fn entries(&self) -> u64 {
        u64::from(self.entries)
    }

    /// Its tombstones.
    pub fn tombstones(&self) -> u64 {
        u64::from(self.tombstones)
    }

    /// The lowest sequence number of its entries.
    pub fn smallest_sequence(&self) -> u64 {
        self.largest_sequence - self.rare_fields().0[5]
    }

    /// The highest sequence number of its entries.
    pub fn largest_sequence(&self) -> u64 {
        self.largest_sequence
    }

    /// The highest version of its tombstones, or a higher one; [`Version::NONE`] if none has one.
    pub fn largest_tombstone_version(&self) -> Version {
        Version::from_bits(self.rare_fields().0[6])
    }

    /// When the first of its entries expires; [`UnixTime::NEVER`] if none does.
    pub fn earliest_expiry(&self) -> UnixTime {
        UnixTime(self.rare_fields().0[7].wrapping_sub(1))
    }

    /// Whether writing it again drops no tombstone ([`TableFields::is_settled`]).
    pub fn is_settled(&self) -> bool {
        self.is_settled
    }

    /// The key of its first entry.
    pub fn first_key(&self) -> &[u8] {
        &self.packed[..usize::from(self.first_key_bytes)]
    }

    /// The key of its last entry.
    pub fn last_key(&self) -> &[u8] {
        &self.packed[usize::from(self.first_key_bytes)..][..usize::from(self.last_key_bytes)]
    }

    /// Whether the keys from the first to the last of a range, both included, meet those of the table.
    pub fn overlaps(&self, first: &[u8], last: &[u8]) -> bool {
        self.first_key() <= last && first <= self.last_key()
    }

    /// The bytes of the records to which its entries refer, by segment, in ascending order.
    pub fn segment_bytes(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let (_, mut rest) = self.rare_fields();
        let mut segment = 0;
        std::iter::from_fn(move || {
            // Written by `new`: whole pairs, and segments of 32 bits.
            segment += take_varint(&mut rest)? as u32;
            Some((segment, take_varint(&mut rest)?))
        })
    }

    /// Tombstones in a thousand entries; 0 if writing the table again drops none.
    pub fn tombstone_permille(&self) -> u16 {
        if self.is_settled { 0 } else { (self.tombstones() * 1000 / self.entries()) as u16 }
    }

    /// Whether no snapshot and no late write needs a tombstone of the table: no snapshot is older than `oldest_snapshot`, and no write of
    /// a version below `forget_below` will come. If nothing lies below the table, writing it again drops all of them.
    pub fn may_drop_tombstones(&self, oldest_snapshot: u64, forget_below: Version) -> bool {
        let version = self.largest_tombstone_version();
        self.largest_sequence <= oldest_snapshot && (version == Version::NONE || version < forget_below)
    }

    /// The five lengths of its parts, the range of sequence numbers, the version of tombstones, the first expiry; and the bytes behind them.
    fn rare_fields(&self) -> ([u64; 8], &[u8]) {
        let keys_bytes = usize::from(self.first_key_bytes) + usize::from(self.last_key_bytes);
        let mut rest = &self.packed[keys_bytes..];
        ([(); 8].map(|()| take_varint(&mut rest).expect("written by new")), rest)
    }
}

impl Drop for TableMeta {
    fn drop(&mut self) {
        self.reclaim.give_up(self.extent());
    }
}

impl fmt::Debug for TableMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fields().fmt(f)
    }
}

/// What a subtree of a level knows of its tables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableSummary {
    /// The bytes of its tables.
    pub bytes: u64,
    /// The most tombstones in a thousand entries of one table ([`TableMeta::tombstone_permille`]).
    pub tombstone_permille: u16,
}

impl TreeSummary for TableSummary {
    fn add(&mut self, other: &TableSummary) {
        // Beyond 64 bits only if an image claims what no volume has.
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.tombstone_permille = self.tombstone_permille.max(other.tombstone_permille);
    }
}

impl TreeItem for TableMeta {
    type Key = [u8];
    type Summary = TableSummary;

    fn key(&self) -> &[u8] {
        self.first_key()
    }

    fn summary(&self) -> TableSummary {
        TableSummary { bytes: self.bytes, tombstone_permille: self.tombstone_permille() }
    }
}

/// The metadata of a value segment. Its extent is given up with the last reference; what its records do not take of it, when it is sealed.
#[derive(Debug)]
pub struct SegmentMeta {
    id: u32,
    location: u64,
    units: AtomicU64,
    reclaim: Arc<ReclaimQueue>,
}

impl SegmentMeta {
    /// The metadata of a segment whose extent goes to `reclaim` in the end.
    ///
    /// # Panics
    /// If the extent is not one of a segment ([`is_extent`]).
    pub fn new(id: u32, extent: Extent, reclaim: &Arc<ReclaimQueue>) -> Arc<SegmentMeta> {
        assert!(is_extent(extent), "segment {id} at {extent:?}");
        reclaim.enter(extent);
        let units = AtomicU64::new(extent.units);
        Arc::new(SegmentMeta { id, location: extent.location, units, reclaim: reclaim.clone() })
    }

    /// The number of the segment.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Where it lies.
    pub fn extent(&self) -> Extent {
        Extent { location: self.location, units: self.units.load(Ordering::Relaxed) }
    }

    /// Gives up the space behind the first `units`, where no record is and none will be. Gives how many units that were. REQUIRES: edits are installed one at a time.
    pub fn give_up_behind(&self, units: u64) -> u64 {
        let extent = self.extent();
        let rest = extent.units.saturating_sub(units);
        if rest > 0 {
            self.units.store(units, Ordering::Relaxed);
            self.reclaim.give_up(Extent { location: extent.location + units, units: rest });
        }
        rest
    }
}

impl Drop for SegmentMeta {
    fn drop(&mut self) {
        self.reclaim.give_up(self.extent());
    }
}

/// What a segment has once nothing more is written to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentSeal {
    /// The units that the segment keeps, at least 1. Its records lie within them; the rest of its extent is free.
    pub units: u64,
    /// The bytes of its records.
    pub record_bytes: u64,
    /// The highest sequence number of a record that was written there beside its batch; 0 if a compaction wrote it. Once changes up to it are in
    /// tables, what tables refer to is all that lives.
    pub last_sequence: u64,
}

/// A segment of a version.
#[derive(Clone, Debug)]
pub struct SegmentState {
    /// The segment.
    pub meta: Arc<SegmentMeta>,
    /// `None` while records are written to it.
    pub seal: Option<SegmentSeal>,
}

impl TreeSummary for () {
    fn add(&mut self, (): &()) {}
}

impl TreeItem for SegmentState {
    type Key = u32;
    type Summary = ();

    fn key(&self) -> &u32 {
        &self.meta.id
    }

    fn summary(&self) {}
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A table of a few entries, without segments.
    pub fn table_fields(id: u64, first: &[u8], last: &[u8]) -> TableFields {
        TableFields {
            id,
            extent: Extent { location: id * 10, units: 10 },
            parts: TableParts::default(),
            bytes: 1 << 20,
            entries: 100,
            tombstones: 0,
            smallest_sequence: id,
            largest_sequence: id,
            largest_tombstone_version: Version::NONE,
            earliest_expiry: UnixTime::NEVER,
            is_settled: false,
            first_key: first.to_vec(),
            last_key: last.to_vec(),
            segment_bytes: Vec::new(),
        }
    }

    pub fn any_fields() -> impl Strategy<Value = TableFields> {
        let key = || proptest::collection::vec(any::<u8>(), 0..40);
        let segments = proptest::collection::btree_map(any::<u32>(), 1..1u64 << 40, 0..6);
        let numbers = (1..=COUNT_MAX, 0..=COUNT_MAX, 1..=u32::MAX, 1..=TABLE_BYTES_LIMIT);
        let counts = (1..=u32::MAX, any::<u32>(), 1..=COUNT_MAX, 1..=COUNT_MAX);
        let expiry = prop_oneof![Just(u64::MAX), any::<u64>()];
        (numbers, counts, any::<(u64, bool, [u32; 5])>(), expiry, key(), key(), segments).prop_map(
            |(numbers, counts, (version, is_settled, parts), expiry, one, other, segments)| TableFields {
                id: numbers.0,
                extent: Extent { location: numbers.1, units: u64::from(numbers.2) },
                parts: TableParts {
                    front_bytes: parts[0],
                    second_unit: parts[1],
                    descriptor_bytes: parts[2],
                    filter_bytes: parts[3],
                    index_bytes: parts[4],
                },
                bytes: numbers.3,
                entries: u64::from(counts.0),
                tombstones: u64::from(counts.1.min(counts.0)),
                smallest_sequence: counts.2.min(counts.3),
                largest_sequence: counts.2.max(counts.3),
                largest_tombstone_version: Version::from_bits(version),
                earliest_expiry: UnixTime(expiry),
                is_settled,
                first_key: one.clone().min(other.clone()),
                last_key: one.max(other),
                segment_bytes: segments.into_iter().collect(),
            },
        )
    }

    proptest! {
        #[test]
        fn metadata_gives_back_its_fields(fields in any_fields()) {
            let queue = ReclaimQueue::new();
            prop_assert_eq!(TableMeta::new(&fields, &queue).fields(), fields);
        }
    }

    #[test]
    fn an_extent_is_given_up_once_with_the_last_reference() {
        let queue = ReclaimQueue::new();
        let table = TableMeta::new(&table_fields(3, b"a", b"b"), &queue);
        let segment = SegmentMeta::new(7, Extent { location: 100, units: 5 }, &queue);
        assert_eq!(queue.live_units(), 15);
        let (again, of_segment) = (table.clone(), segment.clone());
        drop((table, segment));
        assert_eq!(queue.take(), []);
        drop(again);
        assert_eq!((queue.take(), queue.live_units()), (vec![Extent { location: 30, units: 10 }], 5));
        drop(of_segment);
        assert_eq!((queue.take(), queue.live_units()), (vec![Extent { location: 100, units: 5 }], 0));
        assert_eq!(queue.take(), []);
    }

    #[test]
    fn impossible_fields_are_named() {
        type Change = fn(&mut TableFields);
        let change = |change: Change| {
            let mut fields = table_fields(1, b"a", b"b");
            change(&mut fields);
            fields.check()
        };
        assert_eq!(change(|_| {}), Ok(()));
        let table: [(Change, TableFieldProblem); 14] = [
            (|fields| fields.id = 0, TableFieldProblem::Id),
            (|fields| fields.id = COUNT_MAX + 1, TableFieldProblem::Id),
            (|fields| fields.extent.units = 0, TableFieldProblem::Extent),
            (|fields| fields.extent.units = 1 << 32, TableFieldProblem::Extent),
            (|fields| fields.extent.location = u64::MAX, TableFieldProblem::Extent),
            (|fields| fields.entries = 0, TableFieldProblem::Counts),
            (|fields| fields.tombstones = 101, TableFieldProblem::Counts),
            (|fields| fields.bytes = 0, TableFieldProblem::Counts),
            (|fields| fields.bytes = TABLE_BYTES_LIMIT + 1, TableFieldProblem::Counts),
            (|fields| fields.smallest_sequence = 2, TableFieldProblem::Sequences),
            (|fields| fields.first_key = vec![b'c'], TableFieldProblem::Keys),
            (|fields| fields.last_key = vec![b'c'; KEY_BYTES_MAX + 1], TableFieldProblem::Keys),
            (|fields| fields.segment_bytes = vec![(2, 1), (2, 1)], TableFieldProblem::Segments),
            (|fields| fields.segment_bytes = vec![(2, 0)], TableFieldProblem::Segments),
        ];
        for (index, (wrong, problem)) in table.into_iter().enumerate() {
            assert_eq!(change(wrong), Err(problem), "row {index}");
        }
    }

    #[test]
    fn tombstones_may_go_if_no_snapshot_and_no_late_write_needs_them() {
        let queue = ReclaimQueue::new();
        let version = |sequence| Version::new(1, sequence).unwrap();
        //  want   largest version        oldest snapshot, forget below
        let table = [
            (true, Version::NONE, 50, Version::NONE),
            (false, Version::NONE, 49, Version::MAX),
            (false, version(7), 50, Version::NONE),
            (false, version(7), 50, version(7)),
            (true, version(7), 50, version(8)),
        ];
        for (want, largest_tombstone_version, oldest_snapshot, forget_below) in table {
            let fields = TableFields { largest_tombstone_version, ..table_fields(50, b"a", b"b") };
            let meta = TableMeta::new(&fields, &queue);
            assert_eq!(meta.may_drop_tombstones(oldest_snapshot, forget_below), want);
        }
    }
}
