//! The segments with records in a value chunk: the ids of its directory, or of the headers of its records.
//!
//! ```text
//!   chunk    │ record │ record │ … │ directory: id id … trailer │     the end is read first, and a longer directory again
//!            without one: every record by its header; a gap that is not zero may hide some
//! ```
//! In: a sealed chunk of a value log. Out: the ids of its records, live or not, or that only visits of all segments find them.
//! Tested in `compaction_tests.rs`.

use super::chunk_directory::{ChunkDirectory, DirectoryError, DirectoryPlace, UncheckedDirectory};
use super::core::LogCore;
use super::key_compaction::CHUNK_READ_BYTES;
use super::log_place::{ChunkIndex, ChunkNumber};
use super::record_walk::{RecordWalk, WalkStep};
use super::store::Store;
use super::value_record::ValueRecordPlace;
use crate::EngineError;
use std::collections::VecDeque;

/// The first read covers this part of a chunk, at its end. The directory of records of 256 B, 4 B for each, is shorter.
const DIRECTORY_READ_DIVISOR: u32 = 64;
/// The least and the most bytes of that read.
const DIRECTORY_READ_BYTES: (u32, u32) = (4 << 10, 128 << 10);

/// A sealed chunk of a value log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ValueChunk {
    pub index: ChunkIndex,
    pub chunk: ChunkNumber,
}

impl LogCore {
    fn directory_place(&self, store: &Store, index: ChunkIndex) -> DirectoryPlace {
        let layout = self.volume.layout();
        DirectoryPlace {
            volume_id: self.volume.fixed().volume_id,
            partition: store.id,
            index,
            chunk_bytes: layout.chunk_bytes(),
            granule_log2: layout.granule_log2,
        }
    }

    /// The ids of all records of a chunk, ascending, each once; `None` if only visits of all segments find them.
    pub(super) async fn ids_of_chunk(
        &self,
        store: &Store,
        of: ValueChunk,
    ) -> Result<Option<VecDeque<u32>>, EngineError> {
        let ids = match self.read_directory(store, of).await? {
            Some(directory) => Some(directory.ids),
            None => self.walk_chunk(store, of).await?,
        };
        Ok(ids.map(|mut ids| {
            ids.sort_unstable();
            ids.dedup();
            ids.into()
        }))
    }

    /// The directory of a chunk; `None` if it has none.
    async fn read_directory(
        &self,
        store: &Store,
        of: ValueChunk,
    ) -> Result<Option<ChunkDirectory>, EngineError> {
        let layout = self.volume.layout();
        let (least, most) = DIRECTORY_READ_BYTES;
        let mut need_bytes = (layout.chunk_bytes() / DIRECTORY_READ_DIVISOR).clamp(least, most);
        loop {
            let units = need_bytes.div_ceil(layout.unit_bytes).min(layout.chunk_units);
            let first = layout.unit_of(of.chunk, layout.chunk_units - units);
            let bytes = match self.read_units(first, units, store.id).await {
                Ok(bytes) => bytes,
                // Visits of all segments find its records.
                Err(EngineError::Device { .. }) => return Ok(None),
                Err(error) => return Err(error),
            };
            let place = self.directory_place(store, of.index);
            match (UncheckedDirectory { bytes: &bytes, place }).check() {
                Ok(directory) => return Ok(Some(directory)),
                // At most the chunk: a longer one would be malformed.
                Err(DirectoryError::Longer { need_bytes: longer }) if units < layout.chunk_units => {
                    need_bytes = longer as u32;
                }
                Err(_) => return Ok(None),
            }
        }
    }

    /// The ids of the records of a chunk, by their headers; `None` if some may be hidden: in a gap that is not zero.
    async fn walk_chunk(&self, store: &Store, of: ValueChunk) -> Result<Option<Vec<u32>>, EngineError> {
        let layout = self.volume.layout();
        let mut bytes = Vec::with_capacity(layout.chunk_bytes() as usize);
        let mut unit = 0;
        while unit < layout.chunk_units {
            let units = (layout.chunk_units - unit).min(CHUNK_READ_BYTES / layout.unit_bytes);
            match self.read_units(layout.unit_of(of.chunk, unit), units, store.id).await {
                Ok(read) => bytes.extend_from_slice(&read),
                Err(EngineError::Device { .. }) => return Ok(None),
                Err(error) => return Err(error),
            }
            unit += units;
        }
        let first = ValueRecordPlace {
            volume_id: self.volume.fixed().volume_id,
            partition: store.id,
            index: of.index,
            granule: 0,
        };
        let steps = RecordWalk::new(&bytes, first, layout.granule_log2);
        let ids = steps.filter_map(|step| match step {
            WalkStep::Record { head, .. } => Some(Some(self.prefix_in(store, head.key).id())),
            WalkStep::Gap { is_zero: true, .. } => None,
            WalkStep::Gap { is_zero: false, .. } => Some(None),
        });
        Ok(ids.collect())
    }
}
