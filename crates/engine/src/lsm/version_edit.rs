//! Edits: what one flush or compaction changes of the tree, as a value and as bytes.
//!
//! ```text
//!   record   kind u8 │ fields as varints, keys with their length in front
//!     1 table added     level, id, location, units, parts (front bytes, second unit, bytes of descriptor, filter, index), bytes, entries,
//!                       tombstones, largest sequence, largest - smallest, version of tombstones, first expiry + 1 (0: never), settled (0 or 1),
//!                       first key, last key, number of segments, of each: distance from the one before, bytes
//!     2 table removed   level, id, first key            3 table moved      level from, level to, id, first key
//!     4 segment added   id, location, units             5 segment sealed   id, units, bytes of records, last sequence
//!     6 segment removed id                              7 lost range added, 8 removed   first key, last key, newest sequence
//!     9 flushed through sequence: changes up to it are in tables
//! ```
//! An edit may be longer than a journal entry: [`super::edit_parts`]. Integers are little-endian, varints as in [`super::entry`].
//!
//! Invariants: decoding takes any bytes, allocates no more than a fixed multiple of them, and gives back what was encoded. An edit has at most [`EDIT_BYTES_MAX`].
//! Tested below.

use super::entry::{push_varint, take_varint};
use super::lost_ranges::{LOST_RANGES_MAX, LostRange};
use super::reclaim::{ReclaimQueue, is_extent};
use super::table_meta::{SegmentMeta, SegmentSeal, TableFieldProblem, TableFields, TableMeta, TableParts};
use crate::common::allocator::Extent;
use crate::common::superblock::COUNT_MAX;
use octokv_base::key::KEY_BYTES_MAX;
use octokv_base::{UnixTime, Version};
use std::fmt;
use std::sync::Arc;

/// The levels of a tree: level 0, whose tables overlap, and six whose tables do not.
pub const LEVELS: usize = 7;
/// The most bytes of an edit. A compaction of a few hundred tables, each of which refers to a few thousand segments, has less.
pub const EDIT_BYTES_MAX: usize = 16 << 20;

/// A table that leaves a level.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableRemoval {
    /// The level that it leaves.
    pub level: usize,
    /// Its number.
    pub id: u64,
    /// Its first key, by which it is found.
    pub first_key: Vec<u8>,
}

/// A table that goes to another level as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableMove {
    /// The level that it leaves.
    pub from: TableRemoval,
    /// The level to which it goes.
    pub to_level: usize,
}

/// What changes from one version to the next.
#[derive(Clone, Debug, Default)]
pub struct VersionEdit {
    /// New tables, with their levels.
    pub added_tables: Vec<(usize, Arc<TableMeta>)>,
    /// Tables that go.
    pub removed_tables: Vec<TableRemoval>,
    /// Tables that change their level.
    pub moved_tables: Vec<TableMove>,
    /// New segments.
    pub added_segments: Vec<Arc<SegmentMeta>>,
    /// Segments to which nothing more will be written.
    pub sealed_segments: Vec<(u32, SegmentSeal)>,
    /// Segments that go.
    pub removed_segments: Vec<u32>,
    /// New lost ranges.
    pub added_lost: Vec<LostRange>,
    /// Lost ranges that go.
    pub removed_lost: Vec<LostRange>,
    /// Changes up to this sequence number are in tables from now on.
    pub flushed_through: Option<u64>,
}

/// Why bytes are no edit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EditProblem {
    /// Longer than [`EDIT_BYTES_MAX`].
    TooLong,
    /// More lost ranges than a version has ([`LOST_RANGES_MAX`]).
    TooManyLost,
    /// A record with this kind does not exist.
    Kind(u8),
    /// A record of this kind is cut off, or a number in it is none.
    Record(u8),
    /// A table with impossible fields.
    Table {
        /// Its number.
        id: u64,
        /// What is impossible.
        problem: TableFieldProblem,
    },
}

impl fmt::Display for EditProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            EditProblem::TooLong => write!(f, "an edit of more than {EDIT_BYTES_MAX} bytes"),
            EditProblem::TooManyLost => write!(f, "an edit of more than {LOST_RANGES_MAX} lost ranges"),
            EditProblem::Kind(kind) => write!(f, "an edit with a record of the unknown kind {kind}"),
            EditProblem::Record(kind) => write!(f, "an edit with a damaged record of kind {kind}"),
            EditProblem::Table { id, problem } => write!(f, "an edit with a table {id}: {problem}"),
        }
    }
}

const TABLE_ADDED: u8 = 1;
const TABLE_REMOVED: u8 = 2;
const TABLE_MOVED: u8 = 3;
const SEGMENT_ADDED: u8 = 4;
const SEGMENT_SEALED: u8 = 5;
const SEGMENT_REMOVED: u8 = 6;
const LOST_ADDED: u8 = 7;
const LOST_REMOVED: u8 = 8;
const FLUSHED_THROUGH: u8 = 9;

/// Appends the record of a new table.
pub fn push_table(bytes: &mut Vec<u8>, level: usize, table: &TableMeta) {
    let table = table.fields();
    let parts = table.parts;
    bytes.push(TABLE_ADDED);
    for field in [
        level as u64,
        table.id,
        table.extent.location,
        table.extent.units,
        u64::from(parts.front_bytes),
        u64::from(parts.second_unit),
        u64::from(parts.descriptor_bytes),
        u64::from(parts.filter_bytes),
        u64::from(parts.index_bytes),
        table.bytes,
        table.entries,
        table.tombstones,
        table.largest_sequence,
        table.largest_sequence - table.smallest_sequence,
        table.largest_tombstone_version.to_bits(),
        table.earliest_expiry.0.wrapping_add(1),
        u64::from(table.is_settled),
    ] {
        push_varint(bytes, field);
    }
    push_key(bytes, &table.first_key);
    push_key(bytes, &table.last_key);
    push_varint(bytes, table.segment_bytes.len() as u64);
    let mut last_segment = 0;
    for (segment, segment_bytes) in table.segment_bytes {
        push_varint(bytes, u64::from(segment - last_segment));
        push_varint(bytes, segment_bytes);
        last_segment = segment;
    }
}

/// Appends the record of a new segment.
pub fn push_segment(bytes: &mut Vec<u8>, segment: &SegmentMeta) {
    bytes.push(SEGMENT_ADDED);
    push_varint(bytes, u64::from(segment.id()));
    push_varint(bytes, segment.extent().location);
    push_varint(bytes, segment.extent().units);
}

/// Appends the record of a segment that is complete.
pub fn push_seal(bytes: &mut Vec<u8>, segment: u32, seal: &SegmentSeal) {
    bytes.push(SEGMENT_SEALED);
    push_varint(bytes, u64::from(segment));
    push_varint(bytes, seal.units);
    push_varint(bytes, seal.record_bytes);
    push_varint(bytes, seal.last_sequence);
}

/// Appends the record of a new lost range.
pub fn push_lost(bytes: &mut Vec<u8>, range: &LostRange) {
    bytes.push(LOST_ADDED);
    push_lost_fields(bytes, range);
}

/// Appends the record of what is flushed.
pub fn push_flushed(bytes: &mut Vec<u8>, through: u64) {
    bytes.push(FLUSHED_THROUGH);
    push_varint(bytes, through);
}

fn push_lost_fields(bytes: &mut Vec<u8>, range: &LostRange) {
    push_key(bytes, &range.first_key);
    push_key(bytes, &range.last_key);
    push_varint(bytes, range.newest_sequence);
}

fn push_key(bytes: &mut Vec<u8>, key: &[u8]) {
    push_varint(bytes, key.len() as u64);
    bytes.extend_from_slice(key);
}

fn push_removal(bytes: &mut Vec<u8>, removal: &TableRemoval, to_level: Option<usize>) {
    push_varint(bytes, removal.level as u64);
    to_level.iter().for_each(|&level| push_varint(bytes, level as u64));
    push_varint(bytes, removal.id);
    push_key(bytes, &removal.first_key);
}

impl VersionEdit {
    /// Appends its records.
    pub fn encode(&self, bytes: &mut Vec<u8>) {
        // By name, so that none is forgotten.
        let VersionEdit {
            added_tables,
            removed_tables,
            moved_tables,
            added_segments,
            sealed_segments,
            removed_segments,
            added_lost,
            removed_lost,
            flushed_through,
        } = self;
        added_segments.iter().for_each(|segment| push_segment(bytes, segment));
        sealed_segments.iter().for_each(|(segment, seal)| push_seal(bytes, *segment, seal));
        added_tables.iter().for_each(|(level, table)| push_table(bytes, *level, table));
        for removal in removed_tables {
            bytes.push(TABLE_REMOVED);
            push_removal(bytes, removal, None);
        }
        for table in moved_tables {
            bytes.push(TABLE_MOVED);
            push_removal(bytes, &table.from, Some(table.to_level));
        }
        for &segment in removed_segments {
            bytes.push(SEGMENT_REMOVED);
            push_varint(bytes, u64::from(segment));
        }
        added_lost.iter().for_each(|range| push_lost(bytes, range));
        for range in removed_lost {
            bytes.push(LOST_REMOVED);
            push_lost_fields(bytes, range);
        }
        flushed_through.iter().for_each(|&through| push_flushed(bytes, through));
    }

    /// The edit with these records. Tables and segments give their extents to `reclaim`, also if this fails: a caller that decodes bytes of a device
    /// empties the queue afterwards ([`ReclaimQueue::take`]).
    ///
    /// # Errors
    /// The first thing about the bytes that is wrong.
    pub fn decode(bytes: &[u8], reclaim: &Arc<ReclaimQueue>) -> Result<VersionEdit, EditProblem> {
        if bytes.len() > EDIT_BYTES_MAX {
            return Err(EditProblem::TooLong);
        }
        let mut edit = VersionEdit::default();
        edit.decode_records(bytes, reclaim)?;
        Ok(edit)
    }

    /// Adds the records in `bytes`, as [`VersionEdit::decode`], of any number.
    ///
    /// # Errors
    /// The first thing about the bytes that is wrong. What came before it was added.
    pub fn decode_records(&mut self, bytes: &[u8], reclaim: &Arc<ReclaimQueue>) -> Result<(), EditProblem> {
        let mut rest = bytes;
        while let Some((&kind, behind)) = rest.split_first() {
            rest = behind;
            if !(TABLE_ADDED..=FLUSHED_THROUGH).contains(&kind) {
                return Err(EditProblem::Kind(kind));
            }
            if kind == TABLE_ADDED {
                let (level, fields) = take_table(&mut rest).ok_or(EditProblem::Record(kind))?;
                fields.check().map_err(|problem| EditProblem::Table { id: fields.id, problem })?;
                self.added_tables.push((level, TableMeta::new(&fields, reclaim)));
            } else {
                self.decode_short(kind, &mut rest, reclaim).ok_or(EditProblem::Record(kind))?;
            }
            // Each is compared with all others.
            if self.added_lost.len().max(self.removed_lost.len()) > LOST_RANGES_MAX {
                return Err(EditProblem::TooManyLost);
            }
        }
        Ok(())
    }

    fn decode_short(&mut self, kind: u8, rest: &mut &[u8], reclaim: &Arc<ReclaimQueue>) -> Option<()> {
        match kind {
            TABLE_REMOVED => {
                let level = take_level(rest)?;
                self.removed_tables.push(take_removal(level, rest)?);
            }
            TABLE_MOVED => {
                let (level, to_level) = (take_level(rest)?, take_level(rest)?);
                self.moved_tables.push(TableMove { from: take_removal(level, rest)?, to_level });
            }
            SEGMENT_ADDED => {
                let id = take_segment(rest)?;
                let extent = Extent { location: take_varint(rest)?, units: take_varint(rest)? };
                is_extent(extent).then(|| self.added_segments.push(SegmentMeta::new(id, extent, reclaim)))?;
            }
            SEGMENT_SEALED => {
                let id = take_segment(rest)?;
                let seal = SegmentSeal {
                    units: take_count(rest)?,
                    record_bytes: take_count(rest)?,
                    last_sequence: take_count(rest)?,
                };
                self.sealed_segments.push((id, seal));
            }
            SEGMENT_REMOVED => self.removed_segments.push(take_segment(rest)?),
            LOST_ADDED => self.added_lost.push(take_lost(rest)?),
            LOST_REMOVED => self.removed_lost.push(take_lost(rest)?),
            FLUSHED_THROUGH => self.flushed_through = Some(take_count(rest)?),
            _ => return None,
        }
        Some(())
    }
}

fn take_table(rest: &mut &[u8]) -> Option<(usize, TableFields)> {
    let level = take_level(rest)?;
    let mut field = || take_varint(rest);
    let (id, location, units) = (field()?, field()?, field()?);
    let mut part = || u32::try_from(field()?).ok();
    let parts = TableParts {
        front_bytes: part()?,
        second_unit: part()?,
        descriptor_bytes: part()?,
        filter_bytes: part()?,
        index_bytes: part()?,
    };
    let (bytes, entries, tombstones) = (field()?, field()?, field()?);
    let (largest_sequence, distance, version) = (field()?, field()?, field()?);
    let (expiry, is_settled) = (field()?, field()?);
    if is_settled > 1 {
        return None;
    }
    let (first_key, last_key) = (take_key(rest)?, take_key(rest)?);
    let count = take_varint(rest)?;
    let mut segment_bytes = Vec::new();
    let mut segment = 0u32;
    for _ in 0..count {
        // Ends with the bytes, whatever the count claims.
        segment = segment.checked_add(take_segment(rest)?)?;
        segment_bytes.push((segment, take_varint(rest)?));
    }
    let fields = TableFields {
        id,
        extent: Extent { location, units },
        parts,
        bytes,
        entries,
        tombstones,
        smallest_sequence: largest_sequence.checked_sub(distance)?,
        largest_sequence,
        largest_tombstone_version: Version::from_bits(version),
        earliest_expiry: UnixTime(expiry.wrapping_sub(1)),
        is_settled: is_settled == 1,
        first_key,
        last_key,
        segment_bytes,
    };
    Some((level, fields))
}

fn take_removal(level: usize, rest: &mut &[u8]) -> Option<TableRemoval> {
    Some(TableRemoval { level, id: take_count(rest)?, first_key: take_key(rest)? })
}

fn take_lost(rest: &mut &[u8]) -> Option<LostRange> {
    let (first_key, last_key) = (take_key(rest)?, take_key(rest)?);
    let newest_sequence = take_count(rest)?;
    (first_key <= last_key).then_some(LostRange { first_key, last_key, newest_sequence })
}

fn take_level(rest: &mut &[u8]) -> Option<usize> {
    take_varint(rest).filter(|&level| level < LEVELS as u64).map(|level| level as usize)
}

fn take_count(rest: &mut &[u8]) -> Option<u64> {
    take_varint(rest).filter(|&count| count <= COUNT_MAX)
}

fn take_segment(rest: &mut &[u8]) -> Option<u32> {
    u32::try_from(take_varint(rest)?).ok()
}

fn take_key(rest: &mut &[u8]) -> Option<Vec<u8>> {
    let key_bytes = take_varint(rest).filter(|&bytes| bytes <= KEY_BYTES_MAX as u64)?;
    let (key, behind) = rest.split_at_checked(key_bytes as usize)?;
    *rest = behind;
    Some(key.to_vec())
}

#[cfg(test)]
mod tests {
    use super::super::table_meta::tests::any_fields;
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    fn any_key() -> impl Strategy<Value = Vec<u8>> {
        vec(any::<u8>(), 0..20)
    }

    fn any_removal() -> impl Strategy<Value = TableRemoval> {
        (0..LEVELS, 0..=COUNT_MAX, any_key()).prop_map(|(level, id, first_key)| TableRemoval {
            level,
            id,
            first_key,
        })
    }

    fn any_lost() -> impl Strategy<Value = LostRange> {
        (any_key(), any_key(), 0..=COUNT_MAX).prop_map(|(one, other, newest_sequence)| LostRange {
            first_key: one.clone().min(other.clone()),
            last_key: one.max(other),
            newest_sequence,
        })
    }

    fn any_edit() -> impl Strategy<Value = VersionEdit> {
        let tables = vec((0..LEVELS, any_fields()), 0..4);
        let moved = vec((any_removal(), 0..LEVELS), 0..3);
        let segments = vec((any::<u32>(), 0..=COUNT_MAX, 1..=u32::MAX), 0..4);
        let seals = vec((any::<u32>(), 0..=COUNT_MAX, 0..=COUNT_MAX, 0..=COUNT_MAX), 0..3);
        let ids = vec(any::<u32>(), 0..3);
        let lost = (vec(any_lost(), 0..3), vec(any_lost(), 0..3));
        let flushed = proptest::option::of(0..=COUNT_MAX);
        (tables, vec(any_removal(), 0..3), moved, segments, seals, ids, lost, flushed).prop_map(
            |(tables, removed_tables, moved, segments, seals, removed_segments, lost, flushed_through)| {
                let queue = ReclaimQueue::new();
                let table = |(level, fields)| (level, TableMeta::new(&fields, &queue));
                let segment = |(id, location, units)| {
                    SegmentMeta::new(id, Extent { location, units: u64::from(units) }, &queue)
                };
                let seal = |(id, units, record_bytes, last_sequence)| {
                    (id, SegmentSeal { units, record_bytes, last_sequence })
                };
                VersionEdit {
                    added_tables: tables.into_iter().map(table).collect(),
                    removed_tables,
                    moved_tables: moved
                        .into_iter()
                        .map(|(from, to_level)| TableMove { from, to_level })
                        .collect(),
                    added_segments: segments.into_iter().map(segment).collect(),
                    sealed_segments: seals.into_iter().map(seal).collect(),
                    removed_segments,
                    added_lost: lost.0,
                    removed_lost: lost.1,
                    flushed_through,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn an_edit_round_trips(edit in any_edit()) {
            let queue = ReclaimQueue::new();
            let mut records = Vec::new();
            edit.encode(&mut records);
            let decoded = VersionEdit::decode(&records, &queue).unwrap();
            // Metadata has no equality of its own; its debug form has every field.
            let text = |edit: &VersionEdit| {
                let segments: Vec<_> = edit.added_segments.iter().map(|it| (it.id(), it.extent())).collect();
                format!("{segments:?} {:?}", VersionEdit { added_segments: Vec::new(), ..edit.clone() })
            };
            prop_assert_eq!(text(&decoded), text(&edit));
        }

        #[test]
        fn no_bytes_panic(bytes in vec(any::<u8>(), 0..200), edit in any_edit(), flips in vec(any::<(u16, u8)>(), 1..4)) {
            let queue = ReclaimQueue::new();
            _ = VersionEdit::decode(&bytes, &queue);
            let mut records = Vec::new();
            edit.encode(&mut records);
            for (at, flip) in flips {
                if let Some(byte) = records.get_mut(usize::from(at)) {
                    *byte ^= flip;
                }
            }
            _ = VersionEdit::decode(&records, &queue);
            for kind in TABLE_ADDED..=FLUSHED_THROUGH {
                _ = VersionEdit::decode(&[&[kind], &bytes[..]].concat(), &queue);
            }
        }
    }

    #[test]
    fn what_is_wrong_with_an_edit_is_named() {
        let queue = ReclaimQueue::new();
        let decode = |bytes: &[u8]| VersionEdit::decode(bytes, &queue).map(|_| ()).unwrap_err();
        assert_eq!(decode(&[0]), EditProblem::Kind(0));
        assert_eq!(decode(&[10, 1, 1]), EditProblem::Kind(10));
        assert_eq!(decode(&[TABLE_REMOVED, 7, 1, 0]), EditProblem::Record(TABLE_REMOVED), "level 7");
        assert_eq!(decode(&[SEGMENT_ADDED, 1, 1, 0]), EditProblem::Record(SEGMENT_ADDED), "no units");
        assert_eq!(decode(&[LOST_ADDED, 1, 9, 1, 8, 1]), EditProblem::Record(LOST_ADDED), "reversed");
        assert_eq!(decode(&vec![0; EDIT_BYTES_MAX + 1]), EditProblem::TooLong);
        let claim = [
            TABLE_ADDED,
            1,
            1,
            1,
            1,
            0,
            0,
            0,
            0,
            0,
            1,
            1,
            0,
            1,
            0,
            0,
            0,
            0,
            0,
            0,
            0xff,
            0xff,
            0xff,
            0xff,
            0x7f,
        ];
        assert_eq!(decode(&claim), EditProblem::Record(TABLE_ADDED), "more segments than bytes");
        let reversed = [TABLE_ADDED, 1, 5, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0, 0, 0, 1, 9, 1, 8, 0];
        let problem = TableFieldProblem::Keys;
        assert_eq!(decode(&reversed), EditProblem::Table { id: 5, problem });
    }
}
