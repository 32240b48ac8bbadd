//! The table reader: gets of keys, and the parts of a table from the cache or from the device.
//!
//! ```text
//!   get ─▶ filter ─▶ index ─▶ data block ─▶ entry
//!            └──────────┴─────────┴── each from the cache, else one read
//! ```
//! In: keys and snapshots. Out: entries by reference to their block.
//! Of filter and index, the second copy is read if the first is damaged.
//! Invariants: a part is used only if it is intact and the table's own; a table whose filter is lost, or cannot be read now, is read without it; concurrent
//! misses of one part may read it twice. Tested in `model_tests.rs` and `damage_tests.rs`.

use super::blocks_ahead::PlacedBlock;
use super::cache::{PartName, TablePart};
use super::filter::{FilterHash, TableFilter};
use super::frame::{BlockKind, TRAILER_BYTES, open, open_in};
use super::index::{BlockRef, TableIndex};
use super::info::TablePlace;
use super::io::{RunReadError, TableIo, count};
use super::key_block::KeyBlock;
use super::stored_entry::{DataBlock, StoredEntry};
use super::writer::DATA_BYTES_MAX;
use crate::EngineError;
use crate::lsm::entry::{Position, TreeEntry};
use std::rc::Rc;
use std::sync::Arc;

/// A key that several tables are searched for.
#[derive(Clone, Copy, Debug)]
pub struct SearchKey<'a> {
    /// The key.
    pub key: &'a [u8],
    /// Its hash in all filters.
    pub hash: FilterHash,
}

impl<'a> SearchKey<'a> {
    /// A key, with its hash.
    pub fn new(key: &'a [u8]) -> SearchKey<'a> {
        SearchKey { key, hash: FilterHash::of(key) }
    }
}

/// An entry that a get found, with the block that has its value.
#[derive(Clone, Debug)]
pub struct FoundInTable {
    block: Arc<DataBlock>,
    stored: StoredEntry,
}

impl FoundInTable {
    /// The entry. REQUIRES: `key` is the one of the get.
    pub fn entry<'a>(&'a self, key: &'a [u8]) -> TreeEntry<'a> {
        self.stored.entry(key, &self.block)
    }
}

/// Whether parts that were read from the device are kept in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheFill {
    /// They are: others will probably need them.
    Keep,
    /// They are not: a compaction, or a check, reads them once.
    Skip,
}

/// Reads one table on one core. REQUIRES: the table's run is not freed while it is in use.
#[derive(Clone)]
pub struct TableReader {
    pub(super) io: Rc<TableIo>,
    pub(super) place: TablePlace,
}

impl TableReader {
    /// A reader of a table. It reads nothing yet.
    pub fn new(io: Rc<TableIo>, place: TablePlace) -> TableReader {
        TableReader { io, place }
    }

    /// The newest entry of a key with a sequence number up to `snapshot`; `None` if the table has none.
    ///
    /// # Errors
    /// [`EngineError::Corrupt`] if the block in which the entry would be cannot be read, or the index in both copies: also for keys that the
    /// table does not have, unless its filter excludes them. Device failures, no memory.
    pub async fn get(&self, key: SearchKey<'_>, snapshot: u64) -> Result<Option<FoundInTable>, EngineError> {
        let counters = &self.io.counters;
        // A filter only saves reads: if it cannot be read, index and block have the answer.
        let filter = self.filter().await.unwrap_or_default();
        if let Some(filter) = &filter {
            count(&counters.filter_uses);
            if !filter.may_have(key.hash) {
                count(&counters.filter_exclusions);
                return Ok(None);
            }
        }
        let target = Position { key: key.key, sequence: snapshot };
        let mut is_present = false;
        let mut found = None;
        // Behind the last separator, nothing is read.
        if let Some(block_ref) = self.index(CacheFill::Keep).await?.seek_body(target) {
            let block = self.block(block_ref, CacheFill::Keep).await?;
            match block.find(target) {
                Some(stored) => found = Some(FoundInTable { block, stored }),
                None => is_present = block.find(Position::before(key.key)).is_some(),
            }
        }
        // A key whose entries are all newer than the snapshot, and all in blocks before, counts as an error, too.
        if filter.is_some() && found.is_none() && !is_present {
            count(&counters.filter_errors);
        }
        Ok(found)
    }

    /// Reads index and filter into the cache, unless they are there. A hint, without effect on outcomes: the future may be dropped.
    pub fn prefetch_index(&self) -> impl Future<Output = ()> + use<> {
        let reader = self.clone();
        async move {
            // A failure comes back when the part is used.
            let _ = reader.index(CacheFill::Keep).await;
            let _ = reader.filter().await;
        }
    }

    /// The index.
    pub(super) async fn index(&self, fill: CacheFill) -> Result<Arc<TableIndex>, EngineError> {
        if let Some(TablePart::Index(index)) = self.cached(PartName::Index) {
            return Ok(index);
        }
        let offset = u64::from(self.place.descriptor_bytes) + u64::from(self.place.filter_bytes);
        let unit_bytes = self.io.unit_bytes;
        let decode = |payload: Box<[u8]>| {
            // Blocks follow each other in both orders: that of keys and that on the device.
            let mut data_end = 0;
            let is_next = |block: &BlockRef| {
                let begins = std::mem::replace(&mut data_end, block.offset.saturating_add(block.bytes));
                begins == block.offset
                    && block.bytes as usize <= DATA_BYTES_MAX + TRAILER_BYTES
                    && self.place.data_offset(block.offset, block.bytes, unit_bytes).is_some()
            };
            KeyBlock::decode(payload.into_vec(), is_next).map(Arc::new)
        };
        let index = self.metadata(BlockKind::Index, offset, self.place.index_bytes, decode).await?;
        let index =
            index.ok_or_else(|| self.io.corrupt(&self.place, self.place.copies(unit_bytes)[0] + offset))?;
        if fill == CacheFill::Keep {
            self.io.cache.insert(self.place.id, PartName::Index, TablePart::Index(Arc::clone(&index)));
        }
        Ok(index)
    }

    /// The filter; `None` if both copies are damaged.
    async fn filter(&self) -> Result<Option<Arc<TableFilter>>, EngineError> {
        if let Some(TablePart::Filter(filter)) = self.cached(PartName::Filter) {
            return Ok(filter);
        }
        let offset = u64::from(self.place.descriptor_bytes);
        let decode = |payload: Box<[u8]>| TableFilter::decode(&payload).map(Arc::new);
        let filter = self.metadata(BlockKind::Filter, offset, self.place.filter_bytes, decode).await?;
        self.io.cache.insert(self.place.id, PartName::Filter, TablePart::Filter(filter.clone()));
        Ok(filter)
    }

    fn cached(&self, part: PartName) -> Option<TablePart> {
        let found = self.io.cache.get(self.place.id, part);
        let counters = &self.io.counters;
        count(if found.is_some() { &counters.cache_hits } else { &counters.cache_misses });
        found
    }

    /// A part of the metadata from the first copy that has it; `None` if it is damaged in both. Fails if it is in none, and the device failed to read one.
    async fn metadata<T>(
        &self,
        kind: BlockKind,
        offset: u64,
        bytes: u32,
        mut decode: impl FnMut(Box<[u8]>) -> Option<T>,
    ) -> Result<Option<T>, EngineError> {
        let mut failure = None;
        for copy in self.place.copies(self.io.unit_bytes) {
            match self.io.read(&self.place, copy + offset, bytes as usize).await {
                Ok(found) => {
                    let owner = self.io.owner(self.place.id);
                    let payload = open(found.bytes(), kind, owner, 0, bytes as usize);
                    if let Some(part) = payload.and_then(&mut decode) {
                        return Ok(Some(part));
                    }
                    count(&self.io.counters.damaged_copies);
                }
                Err(RunReadError::Media) => count(&self.io.counters.damaged_copies),
                // It may be intact.
                Err(RunReadError::Engine(error)) => failure = Some(error),
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// A data block.
    pub(super) async fn block(
        &self,
        block: BlockRef,
        fill: CacheFill,
    ) -> Result<Arc<DataBlock>, EngineError> {
        match self.cached_block(block) {
            Some(block) => Ok(block),
            None => self.read_block(block, fill).await,
        }
    }

    /// A data block, if it is in the cache.
    pub(super) fn cached_block(&self, block: BlockRef) -> Option<Arc<DataBlock>> {
        match self.cached(PartName::Data(block.offset)) {
            Some(TablePart::Data(block)) => Some(block),
            _ => None,
        }
    }

    /// A data block that the caller has read ahead, if it is still in the cache.
    pub(super) fn block_ahead(&self, block: BlockRef) -> Option<Arc<DataBlock>> {
        match self.io.cache.peek(self.place.id, PartName::Data(block.offset)) {
            Some(TablePart::Data(block)) => Some(block),
            _ => None,
        }
    }

    /// Reads data blocks into the cache, by one read from the first to the last, and gives the first; the others it adds to `others_read`, but for those that are damaged.
    /// REQUIRES: there is one at least, and the index has them in this order.
    pub(super) async fn read_blocks(
        &self,
        blocks: &[BlockRef],
        others_read: &mut Vec<PlacedBlock>,
    ) -> Result<Arc<DataBlock>, EngineError> {
        let (first, others) = blocks.split_first().expect("the caller wants a block");
        let Some(last) = others.last() else { return self.read_block(*first, CacheFill::Keep).await };
        let offset = self.data_offset(*first)?;
        let bytes = (last.offset - first.offset + last.bytes) as usize;
        let Ok(run) = self.io.read(&self.place, offset, bytes).await else {
            // What failed may be in the others' part.
            return self.read_block(*first, CacheFill::Keep).await;
        };
        let decoded = |block: &BlockRef| {
            let part = &run.bytes()[(block.offset - first.offset) as usize..][..block.bytes as usize];
            let decoded = self.open_block(part, *block).map(Arc::new)?;
            self.keep(*block, &decoded);
            Some(decoded)
        };
        let first = decoded(first);
        let placed = |block: &BlockRef| Some(PlacedBlock { offset: block.offset, block: decoded(block)? });
        others_read.extend(others.iter().filter_map(placed));
        first.ok_or_else(|| self.block_error(RunReadError::Media, offset))
    }

    /// Reads a data block.
    pub(super) async fn read_block(
        &self,
        block: BlockRef,
        fill: CacheFill,
    ) -> Result<Arc<DataBlock>, EngineError> {
        let offset = self.data_offset(block)?;
        let found = self.io.read(&self.place, offset, block.bytes as usize).await;
        let found = found.map_err(|error| self.block_error(error, offset))?;
        let decoded = self.decode(found.bytes(), block)?;
        if fill == CacheFill::Keep {
            self.keep(block, &decoded);
        }
        Ok(decoded)
    }

    /// Keeps a data block in the cache.
    fn keep(&self, block: BlockRef, decoded: &Arc<DataBlock>) {
        let (io, part) = (&self.io, TablePart::Data(Arc::clone(decoded)));
        let displaced = io.cache.insert_displacing(self.place.id, PartName::Data(block.offset), part);
        io.spare_blocks.add(displaced.into_blocks());
    }

    /// Where a data block begins, in bytes from the start of the run.
    pub(super) fn data_offset(&self, block: BlockRef) -> Result<u64, EngineError> {
        let offset = self.place.data_offset(block.offset, block.bytes, self.io.unit_bytes);
        // The index was checked when it was read.
        offset.ok_or_else(|| self.io.corrupt(&self.place, 0))
    }

    /// The data block of these bytes.
    pub(super) fn decode(&self, bytes: &[u8], block: BlockRef) -> Result<Arc<DataBlock>, EngineError> {
        match self.open_block(bytes, block) {
            Some(decoded) => Ok(Arc::new(decoded)),
            None => Err(self.block_error(RunReadError::Media, self.data_offset(block)?)),
        }
    }

    fn open_block(&self, bytes: &[u8], block: BlockRef) -> Option<DataBlock> {
        let owner = self.io.owner(self.place.id);
        let memory = |bytes| self.io.spare_blocks.take(bytes);
        let payload = open_in(bytes, BlockKind::Data, owner, block.offset, DATA_BYTES_MAX, memory)?;
        KeyBlock::decode(payload, |_| true)
    }

    fn block_error(&self, error: RunReadError, offset: u64) -> EngineError {
        match error {
            RunReadError::Media => {
                count(&self.io.counters.damaged_blocks);
                self.io.corrupt(&self.place, offset)
            }
            RunReadError::Engine(error) => error,
        }
    }
}
