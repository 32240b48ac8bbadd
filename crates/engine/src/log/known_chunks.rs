//! The chunks of a log that a recovery knows: those that a checkpoint lists, and those that images name.
//!
//! ```text
//!   index     3      4      5      6      7
//!   chunk     #17    #80    #2     #41    #9
//!             └ first                     └ last known: the one that will follow the tail
//! ```
//! In: a chunk and its index, from images whose checksums are right. Out: the chunk of an index. Invariant: no index is missing between the
//! first and the last, and each chunk is one of the volume.
//! Tested below.

use super::log_place::{ChunkIndex, ChunkNumber};

/// The chunks of one log, from an index on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownChunks {
    first: ChunkIndex,
    chunks: Vec<ChunkNumber>,
    /// The number of chunks of the volume.
    limit: u32,
}

impl KnownChunks {
    /// Chunks in the order of their indices, of a volume with `limit` chunks. Knows none behind the first that is not one of the volume.
    pub fn new(first: ChunkIndex, chunks: impl Iterator<Item = ChunkNumber>, limit: u32) -> KnownChunks {
        KnownChunks { first, chunks: chunks.take_while(|chunk| chunk.0 < limit).collect(), limit }
    }

    /// The chunk of an index, if it is known.
    pub fn get(&self, index: ChunkIndex) -> Option<ChunkNumber> {
        self.chunks.get(index.0.checked_sub(self.first.0)? as usize).copied()
    }

    /// The chunk behind that of an index, if it is known.
    pub fn behind(&self, index: ChunkIndex) -> Option<(ChunkIndex, ChunkNumber)> {
        let next = ChunkIndex(index.0.checked_add(1)?);
        Some((next, self.get(next)?))
    }

    /// Whether an index is before the first known one: its chunk is not looked for any more.
    pub fn is_before(&self, index: ChunkIndex) -> bool {
        index < self.first
    }

    /// Notes that a chunk follows that of an index. False, and nothing has changed, if another one does, there is no such chunk, or the one
    /// between is not known. What follows an index before all known ones is not checked.
    #[must_use]
    pub fn note_behind(&mut self, index: ChunkIndex, chunk: ChunkNumber) -> bool {
        let Some(next) = index.0.checked_add(1) else { return false };
        let Some(at) = next.checked_sub(self.first.0) else { return true };
        match self.chunks.get(at as usize) {
            Some(&known) => known == chunk,
            None if at as usize == self.chunks.len() && chunk.0 < self.limit => {
                self.chunks.push(chunk);
                true
            }
            None => false,
        }
    }

    /// The highest index from `from` on that a chunk has. A chunk that was freed and taken again has two.
    pub fn index_of(&self, chunk: ChunkNumber, from: ChunkIndex) -> Option<ChunkIndex> {
        let skipped = from.0.saturating_sub(self.first.0) as usize;
        let at = self.chunks.get(skipped..)?.iter().rposition(|&known| known == chunk)?;
        Some(ChunkIndex(self.first.0 + (skipped + at) as u32))
    }

    /// The known chunks of the indices from `from` to before `end`, with these.
    pub fn between(
        &self,
        from: ChunkIndex,
        end: ChunkIndex,
    ) -> impl Iterator<Item = (ChunkIndex, ChunkNumber)> + '_ {
        let indexed = (self.first.0..).map(ChunkIndex).zip(self.chunks.iter().copied());
        indexed.filter(move |(index, _)| (from..end).contains(index))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(chunks: &[u32]) -> KnownChunks {
        KnownChunks::new(ChunkIndex(3), chunks.iter().copied().map(ChunkNumber), 100)
    }

    #[test]
    fn the_chunk_of_an_index_is_the_one_that_was_noted() {
        let mut chunks = known(&[17, 80]);
        assert!(chunks.note_behind(ChunkIndex(4), ChunkNumber(2)));
        assert_eq!(chunks, known(&[17, 80, 2]));
        for (index, chunk) in [(2, None), (3, Some(17)), (4, Some(80)), (5, Some(2)), (6, None)] {
            assert_eq!(chunks.get(ChunkIndex(index)), chunk.map(ChunkNumber), "index {index}");
        }
        assert_eq!(chunks.behind(ChunkIndex(4)), Some((ChunkIndex(5), ChunkNumber(2))));
        assert_eq!(chunks.behind(ChunkIndex(u32::MAX)), None);
        let all: Vec<_> = chunks.between(ChunkIndex(4), ChunkIndex(9)).collect();
        assert_eq!(all, [(ChunkIndex(4), ChunkNumber(80)), (ChunkIndex(5), ChunkNumber(2))]);
    }

    #[test]
    fn a_contradiction_changes_nothing() {
        let mut chunks = known(&[17, 80]);
        // Another chunk, one behind a gap, one outside of the volume, one without an index.
        for (index, chunk) in [(3, 81), (5, 1), (4, 100), (u32::MAX, 1)] {
            assert!(!chunks.note_behind(ChunkIndex(index), ChunkNumber(chunk)), "{chunk} behind {index}");
        }
        assert!(chunks.note_behind(ChunkIndex(3), ChunkNumber(80)), "the same again");
        assert!(chunks.note_behind(ChunkIndex(1), ChunkNumber(5)), "before the first");
        assert_eq!(chunks, known(&[17, 80]));
    }

    #[test]
    fn a_chunk_that_was_used_twice_has_its_later_index() {
        let chunks = known(&[17, 80, 17, 4]);
        assert_eq!(chunks.index_of(ChunkNumber(17), ChunkIndex(0)), Some(ChunkIndex(5)));
        assert_eq!(chunks.index_of(ChunkNumber(80), ChunkIndex(4)), Some(ChunkIndex(4)));
        assert_eq!(chunks.index_of(ChunkNumber(80), ChunkIndex(5)), None);
        assert_eq!(chunks.index_of(ChunkNumber(4), ChunkIndex(70)), None);
    }

    #[test]
    fn chunks_behind_an_unknown_one_are_unknown() {
        assert_eq!(known(&[17, u32::MAX, 80]), known(&[17]));
    }
}
