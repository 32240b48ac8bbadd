//! One log of a store: a sequence of chunks with ascending indices (the circular log of LEED §3.2, whose region grows and shrinks).
//!
//! ```text
//!                 head                                  tail            reserved
//!   index         3        4        5        6          7               (8, at the next hop)
//!   chunk         #17      #80      #2       #41        #9              #5
//!                 sealed   sealed   sealed   sealed     open ▓▓▓▓░░░    not written
//!   ◀ retired                                                  ▲ next unit
//! ```
//! In: appends, and heads that compaction advanced. Out: places, and chunks to release.
//! Invariants: an append lies in one chunk; places ascend; the chunk behind the tail is always reserved, so that what is written before a
//! hop can name it; a chunk of the log is open if it is the tail, sealed or pinned otherwise.
//! Tested in `chunk_log_tests.rs` against a model.

use super::chunk_pool::{ChunkOwner, ChunkPool, ChunkState};
use super::log_layout::MARKER_UNITS;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind, LogPlace};
use super::space_limits::ChunkPurpose;
use std::collections::VecDeque;

/// The chunks of one log.
#[derive(Debug)]
pub struct ChunkLog {
    partition: u32,
    kind: LogKind,
    head: ChunkIndex,
    /// From the head to the tail: at least one.
    chunks: VecDeque<ChunkNumber>,
    /// The first free unit of the tail; at most the units of a chunk.
    tail_unit: u32,
    next: ChunkNumber,
}

impl ChunkLog {
    /// A log that begins with index 0. `None`, and no chunk is taken, unless the pool has two for users.
    pub fn create(partition: u32, kind: LogKind, pool: &ChunkPool) -> Option<ChunkLog> {
        let first = pool.reserve(ChunkPurpose::User)?;
        let Some(next) = pool.reserve(ChunkPurpose::User) else {
            pool.return_reserved(first);
            return None;
        };
        let head = ChunkIndex(0);
        pool.open(first, ChunkOwner { partition, kind, index: head });
        Some(ChunkLog { partition, kind, head, chunks: VecDeque::from([first]), tail_unit: 0, next })
    }

    /// A log that a recovery has found: its chunks from the head on, the last of which is the tail. REQUIRES: the pool has adopted all, as
    /// what they are here.
    ///
    /// # Panics
    /// If there is no chunk, or an index would be above 32 bits.
    pub fn recovered(
        partition: u32,
        kind: LogKind,
        head: ChunkIndex,
        chunks: Vec<ChunkNumber>,
        tail_unit: u32,
        next: ChunkNumber,
    ) -> ChunkLog {
        let has_indices =
            u32::try_from(chunks.len()).is_ok_and(|count| count > 0 && head.0.checked_add(count).is_some());
        assert!(has_indices, "{} chunks from {head:?} on", chunks.len());
        ChunkLog { partition, kind, head, chunks: chunks.into(), tail_unit, next }
    }

    /// The lowest index in use.
    pub fn head(&self) -> ChunkIndex {
        self.head
    }

    /// The place behind the last append: the next one lies there if it fits.
    pub fn tail(&self) -> LogPlace {
        let chunk = *self.chunks.back().expect("a log has a tail");
        LogPlace { index: self.tail_index(), chunk, unit: self.tail_unit }
    }

    /// The chunk that will follow the tail.
    pub fn next_reserved(&self) -> ChunkNumber {
        self.next
    }

    /// The number of chunks, without the reserved one.
    pub fn chunk_count(&self) -> usize {
        self.chunks.len()
    }

    /// The chunk of an index; `None` if the log does not have it (any more).
    pub fn chunk_at(&self, index: ChunkIndex) -> Option<ChunkNumber> {
        self.chunks.get(index.0.checked_sub(self.head.0)? as usize).copied()
    }

    /// All chunks from the head to the tail.
    pub fn chunks(&self) -> impl ExactSizeIterator<Item = ChunkNumber> + '_ {
        self.chunks.iter().copied()
    }

    /// The partition of the store.
    pub fn partition(&self) -> u32 {
        self.partition
    }

    /// Which log of the store it is.
    pub fn kind(&self) -> LogKind {
        self.kind
    }

    /// The chunks before the tail, from the head on.
    pub fn sealed(&self) -> impl Iterator<Item = (ChunkIndex, ChunkNumber)> + '_ {
        let sealed = self.chunks.len() - 1;
        (self.head.0..).zip(self.chunks.iter().take(sealed)).map(|(index, &chunk)| (ChunkIndex(index), chunk))
    }

    /// Takes the space of one append of so many units, in the tail or, if that has no room for it, in the next chunk. `None`, and nothing
    /// has changed, if the pool has no chunk for this purpose to reserve instead of that one.
    ///
    /// # Panics
    /// If a chunk has not so many units, or there are none.
    pub fn append(&mut self, units: u32, pool: &ChunkPool, purpose: ChunkPurpose) -> Option<LogPlace> {
        self.append_leaving(0, units, pool, purpose)
    }

    /// Like [`ChunkLog::append`], for the image of a segment: leaves [`MARKER_UNITS`] of the chunk to a marker.
    ///
    /// # Panics
    /// If a chunk has not so many units beside those of a marker, or there are none.
    pub fn append_image(&mut self, units: u32, pool: &ChunkPool, purpose: ChunkPurpose) -> Option<LogPlace> {
        self.append_leaving(MARKER_UNITS, units, pool, purpose)
    }

    fn append_leaving(
        &mut self,
        left: u32,
        units: u32,
        pool: &ChunkPool,
        purpose: ChunkPurpose,
    ) -> Option<LogPlace> {
        let chunk_units = pool.chunk_units();
        assert!((1..=chunk_units - left).contains(&units), "an append of {units} units");
        if units + left > chunk_units - self.tail_unit {
            self.hop(pool, purpose)?;
        }
        let place = self.tail();
        self.tail_unit += units;
        Some(place)
    }

    /// Seals the tail and opens the next chunk, whose place is the new tail. `None`, and nothing has changed, if the pool has no chunk for
    /// this purpose to reserve behind it.
    pub fn hop(&mut self, pool: &ChunkPool, purpose: ChunkPurpose) -> Option<LogPlace> {
        if !self.has_indices(1) {
            return None;
        }
        let next = pool.reserve(purpose)?;
        Some(self.hop_reserved(next, pool))
    }

    /// Whether the log has indices for so many more chunks.
    pub fn has_indices(&self, chunks: u32) -> bool {
        // The last index stays unused, so that one behind the tail has 32 bits.
        self.tail_index().0.checked_add(chunks).is_some_and(|index| index < u32::MAX)
    }

    /// Like [`ChunkLog::hop`], with a chunk that the caller has reserved to follow the new tail.
    ///
    /// # Panics
    /// If no index is left ([`ChunkLog::has_indices`]).
    pub fn hop_reserved(&mut self, next: ChunkNumber, pool: &ChunkPool) -> LogPlace {
        assert!(self.has_indices(1), "no index behind {:?}", self.tail_index());
        let index = ChunkIndex(self.tail_index().0 + 1);
        pool.seal(self.tail().chunk);
        pool.open(self.next, ChunkOwner { partition: self.partition, kind: self.kind, index });
        self.chunks.push_back(self.next);
        (self.next, self.tail_unit) = (next, 0);
        self.tail()
    }

    /// Gives up the chunks before an index and gives them, retired: the caller releases them once that head is durable. Pinned ones are not
    /// among them: they stay as they are, outside of the log. REQUIRES: nothing in the others is live.
    ///
    /// # Panics
    /// If the index is behind the tail, or before the head.
    pub fn advance_head(&mut self, to: ChunkIndex, pool: &ChunkPool) -> Vec<(ChunkIndex, ChunkNumber)> {
        assert!(
            (self.head..=self.tail_index()).contains(&to),
            "{:?} to {to:?} of {:?}",
            self.head,
            self.tail_index()
        );
        let indices = (self.head.0..).map(ChunkIndex);
        let passed = indices.zip(self.chunks.drain(..(to.0 - self.head.0) as usize));
        let retired: Vec<_> =
            passed.filter(|&(_, chunk)| pool.state_of(chunk) != ChunkState::Pinned).collect();
        retired.iter().for_each(|&(_, chunk)| pool.retire(chunk));
        self.head = to;
        retired
    }

    fn tail_index(&self) -> ChunkIndex {
        // Both constructors and `hop` bound the number of chunks.
        ChunkIndex(self.head.0 + (self.chunks.len() - 1) as u32)
    }
}
