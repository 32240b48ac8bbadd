//! The records that visits of value compaction move: those of a segment in some chunks of the value log.
//!
//! In: a segment image, chunks. Out: records with their places. Tested in `compaction_tests.rs`.

use super::core::LogCore;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::segment_image::{OldValue, SegmentImage};
use super::store::granules_of;
use super::value_record::value_record_bytes;
use crate::common::record::RecordMeta;
use std::ops::Range;

/// Which records visits move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VisitTarget {
    /// Those in the window of the store's value log.
    Window,
    /// Those in a pinned chunk.
    Pinned(ChunkNumber),
}

/// A record in the window.
pub(super) struct RecordToMove {
    pub key: Vec<u8>,
    pub meta: RecordMeta,
    /// The length of the value in bytes.
    pub value_bytes: u32,
    pub at: ValuePlace,
}

/// The chunks whose records are moved.
pub(super) enum VisitedChunks {
    /// Those of these indices of the value log.
    Indices(Range<ChunkIndex>),
    One(ChunkNumber),
}

impl RecordToMove {
    pub(super) fn entry(&self) -> SegmentEntry<'_> {
        let contents = EntryContents::Value { bytes: self.value_bytes, at: self.at.clone() };
        SegmentEntry { key: &self.key, meta: self.meta, contents }
    }

    /// The place and length of its record before the move.
    pub(super) fn old_value(&self) -> OldValue {
        OldValue { at: self.at.clone(), record_bytes: self.record_bytes() }
    }

    pub(super) fn record_bytes(&self) -> u32 {
        value_record_bytes(self.key.len(), self.value_bytes, &self.meta)
    }
}

impl LogCore {
    /// The records of an image that lie in these chunks.
    pub(super) fn records_in<'s>(
        &'s self,
        image: &'s SegmentImage,
        chunks: &'s VisitedChunks,
    ) -> impl Iterator<Item = RecordToMove> + 's {
        image.iter().filter_map(|entry| {
            let EntryContents::Value { bytes: value_bytes, at } = entry.contents else { return None };
            let record_bytes = value_record_bytes(entry.key.len(), value_bytes, &entry.meta);
            let value = OldValue { at, record_bytes };
            // Most entries are not: their keys are not copied.
            self.is_in(&value, chunks).then(|| RecordToMove {
                key: entry.key.to_vec(),
                meta: entry.meta,
                value_bytes,
                at: value.at,
            })
        })
    }

    /// Whether any part of a value's record lies in these chunks of the value log.
    pub(super) fn is_in(&self, value: &OldValue, chunks: &VisitedChunks) -> bool {
        let pool = &self.volume.pool;
        let mut chunks_of_record = granules_of(value, self.volume.layout());
        chunks_of_record.any(|(chunk, _)| match chunks {
            VisitedChunks::One(visited) => chunk == *visited,
            VisitedChunks::Indices(indices) => {
                let is_chunk = chunk.0 < pool.chunks();
                let owner = is_chunk.then(|| pool.owner_of(pool.first_unit_of(chunk))).flatten();
                owner.is_some_and(|(of, _)| of.kind == LogKind::Values && indices.contains(&of.index))
            }
        })
    }
}
