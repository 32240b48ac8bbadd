//! The cursor of a table.
//!
//! It holds a place in the index and one data block, and takes the index from the cache whenever it moves to another block: many
//! cursors that live long cost no more than that. One that reads past the cache, for a compaction, holds the index and what it read ahead.
//!
//! ```text
//!   seek ─▶ index: the first block whose separator is not before the position ─▶ block: the first entry at or behind it
//!                                                                               └─▶ none: the first entry of the next block
//! ```
//! A step may start to read the next block in its direction into the cache, once for each block; the step into that block awaits it, so that
//! nothing is read twice.
//!
//! In: positions, in both directions. Out: entries by reference to the block.
//! Invariants: without an entry there is no block; at a block that cannot be read, the place in the index remains, so that the cursor
//! goes on behind it. Tested in `model_tests.rs` and `damage_tests.rs`.

use super::cache::PartName;
use super::index::{BlockRef, TableIndex, key_range};
use super::io::RunBytes;
use super::key_block::KeyBlockPosition;
use super::reader::{CacheFill, TableReader};
use super::stored_entry::{DataBlock, StoredEntry};
use crate::EngineError;
use crate::lsm::cursor::EntryCursor;
use crate::lsm::entry::{Position, TreeEntry};
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;

/// How a cursor reads data blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableCursorConfig {
    /// Whether index and blocks are kept in the cache. If not, the cursor keeps the index itself.
    pub fill: CacheFill,
    /// What a forward step to a block that is not in the cache reads at once, in bytes: the blocks that follow need no further read. The
    /// cursor holds a buffer of this length. 0: one block at a time.
    pub read_ahead_bytes: u32,
    /// Whether the first step from an entry of a block starts to read the next block in that direction. No effect with [`CacheFill::Skip`].
    pub prefetches_blocks: bool,
}

impl TableCursorConfig {
    /// For a user's iterator: blocks come one by one, one ahead, and are kept.
    pub const ITERATOR: TableCursorConfig =
        TableCursorConfig { fill: CacheFill::Keep, read_ahead_bytes: 0, prefetches_blocks: true };
    /// For a compaction: the table is read once, in order.
    pub const COMPACTION: TableCursorConfig =
        TableCursorConfig { fill: CacheFill::Skip, read_ahead_bytes: 256 << 10, prefetches_blocks: false };
}

/// The part of a table that a cursor could not read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnreadPart {
    /// All of it: the index is damaged in both copies.
    Table,
    /// A data block, which has no keys but those from the first to the last one, both included. The bounds may be smaller than the
    /// table's first key.
    Keys(Vec<u8>, Vec<u8>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Forward,
    Backward,
}

/// The read of the next block into the cache.
enum BlockPrefetch {
    /// Not started since the cursor came to its block.
    None,
    InFlight(Direction, Pin<Box<dyn Future<Output = ()>>>),
    /// In memory, or there is no further block.
    Ended,
}

/// A cursor over the entries of one table. REQUIRES: the table's run is not freed while the cursor lives. If the future of an
/// operation is dropped, the cursor has to seek anew.
pub struct TableCursor {
    reader: TableReader,
    config: TableCursorConfig,
    /// The data block at which the cursor is.
    block_at: KeyBlockPosition<BlockRef>,
    block: Option<Arc<DataBlock>>,
    at: KeyBlockPosition<StoredEntry>,
    read_ahead: Option<RunBytes>,
    prefetch: BlockPrefetch,
    /// The index, if the cache does not keep it.
    own_index: Option<Arc<TableIndex>>,
    unread: Option<UnreadPart>,
}

impl TableCursor {
    /// A cursor at no entry.
    pub fn new(reader: TableReader, config: TableCursorConfig) -> TableCursor {
        TableCursor {
            reader,
            config,
            block_at: KeyBlockPosition::default(),
            block: None,
            at: KeyBlockPosition::default(),
            read_ahead: None,
            prefetch: BlockPrefetch::None,
            own_index: None,
            unread: None,
        }
    }

    /// The part that the last operation could not read, if that failed with [`EngineError::Corrupt`].
    pub fn unread_part(&self) -> Option<&UnreadPart> {
        self.unread.as_ref()
    }

    /// Reads the data block behind the current one into the cache, unless it is there. A hint, without effect on outcomes: the future may
    /// be dropped, and the cursor used meanwhile.
    pub fn prefetch_next(&self) -> impl Future<Output = ()> + use<> {
        self.prefetch(Direction::Forward)
    }

    /// Reads the data block before the current one, as [`TableCursor::prefetch_next`] does.
    pub fn prefetch_prev(&self) -> impl Future<Output = ()> + use<> {
        self.prefetch(Direction::Backward)
    }

    fn prefetch(&self, direction: Direction) -> impl Future<Output = ()> + use<> {
        let (reader, block_at) = (self.reader.clone(), self.block_at.body().map(|_| self.block_at.clone()));
        async move {
            // A failure comes back when the cursor moves there.
            let Some(mut block_at) = block_at else { return };
            let Ok(index) = reader.index(CacheFill::Keep).await else { return };
            step(&index, &mut block_at, direction);
            if let Some(block) = block_at.body()
                && !reader.io.cache.has(reader.place.id, PartName::Data(block.offset))
            {
                let _ = reader.block(block, CacheFill::Keep).await;
            }
        }
    }

    /// Starts to read the next block in a direction. REQUIRES: none was started since the cursor came to its block.
    async fn start_prefetch(&mut self, direction: Direction) {
        self.prefetch = BlockPrefetch::Ended;
        if self.config.prefetches_blocks && self.config.fill == CacheFill::Keep {
            let mut read: Pin<Box<dyn Future<Output = ()>>> = Box::pin(self.prefetch(direction));
            let is_ended = poll_fn(|context| Poll::Ready(read.as_mut().poll(context).is_ready())).await;
            if !is_ended {
                self.prefetch = BlockPrefetch::InFlight(direction, read);
            }
        }
    }

    /// Waits for the block that is being read ahead in a direction, and drops a read in the other one.
    async fn end_prefetch(&mut self, direction: Direction) {
        if let BlockPrefetch::InFlight(started, read) = &mut self.prefetch
            && *started == direction
        {
            read.await;
        }
        self.prefetch = BlockPrefetch::None;
    }

    fn leave_entry(&mut self) {
        self.block = None;
        self.at.clear();
        self.unread = None;
    }

    /// The index. After a failure the cursor is nowhere.
    async fn index(&mut self) -> Result<Arc<TableIndex>, EngineError> {
        if let Some(index) = &self.own_index {
            return Ok(Arc::clone(index));
        }
        let index = self.reader.index(self.config.fill).await;
        match &index {
            Ok(index) if self.config.fill == CacheFill::Skip => self.own_index = Some(Arc::clone(index)),
            Ok(_) => {}
            Err(error) => {
                self.block_at.clear();
                self.unread = matches!(error, EngineError::Corrupt { .. }).then_some(UnreadPart::Table);
            }
        }
        index
    }

    /// Loads the block at which the cursor is, and goes to its entry that `find` chooses. False: there is none. REQUIRES: it is at a block.
    async fn enter_block(
        &mut self,
        index: &TableIndex,
        read_ahead: bool,
        find: impl FnOnce(&DataBlock, &mut KeyBlockPosition<StoredEntry>) -> bool,
    ) -> Result<bool, EngineError> {
        // The caller has just moved to it.
        let block = self.block_at.body().expect("the cursor is at a block");
        let loaded = match read_ahead && self.config.read_ahead_bytes > 0 {
            true => self.block_read_ahead(block).await,
            false => self.reader.block(block, self.config.fill).await,
        };
        match loaded {
            Ok(block) => {
                let is_found = find(&block, &mut self.at);
                self.block = is_found.then_some(block);
                Ok(is_found)
            }
            Err(error @ EngineError::Corrupt { .. }) => {
                self.unread = Some(self.unread_keys(index));
                Err(error)
            }
            Err(error) => {
                self.block_at.clear();
                Err(error)
            }
        }
    }

    fn unread_keys(&self, index: &TableIndex) -> UnreadPart {
        let position = |at: &KeyBlockPosition<BlockRef>| at.body().map(|block| block.sequence);
        let mut before = self.block_at.clone();
        index.prev(&mut before);
        let previous = position(&before).map(|sequence| Position { key: before.key(), sequence });
        let (first, last) = key_range(previous, Position::behind(self.block_at.key()));
        UnreadPart::Keys(first, last)
    }

    /// A block of those that were read ahead. Else it reads more of them; if that fails, the block alone.
    async fn block_read_ahead(&mut self, block: BlockRef) -> Result<Arc<DataBlock>, EngineError> {
        let offset = self.reader.data_offset(block)?;
        let bytes = block.bytes as usize;
        if let Some(found) = self.read_ahead.as_ref().and_then(|run| run.part(offset, bytes)) {
            return self.reader.decode(found, block);
        }
        self.read_ahead = None;
        let is_cached = self.reader.io.cache.has(self.reader.place.id, PartName::Data(block.offset));
        if !is_cached {
            let data_end = self.reader.place.data_end(offset, self.reader.io.unit_bytes);
            let length = u64::from(self.config.read_ahead_bytes).min(data_end - offset) as usize;
            if let Ok(found) = self.reader.io.read(&self.reader.place, offset, length.max(bytes)).await {
                let found = self.read_ahead.insert(found);
                // Whole: the read is as long as the block at least.
                return match found.part(offset, bytes) {
                    Some(found) => self.reader.decode(found, block),
                    None => Err(self.reader.io.corrupt(&self.reader.place, offset)),
                };
            }
        }
        self.reader.block(block, self.config.fill).await
    }

    /// Moves to the entry of the next block that is nearest.
    async fn move_block(&mut self, direction: Direction) -> Result<(), EngineError> {
        self.leave_entry();
        if self.block_at.body().is_none() {
            return Ok(());
        }
        self.end_prefetch(direction).await;
        let index = self.index().await?;
        if step(&index, &mut self.block_at, direction) {
            match direction {
                Direction::Forward => self.enter_block(&index, true, |block, at| block.first(at)).await?,
                Direction::Backward => self.enter_block(&index, false, |block, at| block.last(at)).await?,
            };
        }
        Ok(())
    }
}

fn step(index: &TableIndex, block_at: &mut KeyBlockPosition<BlockRef>, direction: Direction) -> bool {
    match direction {
        Direction::Forward => index.next(block_at),
        Direction::Backward => index.prev(block_at),
    }
}

impl EntryCursor for TableCursor {
    fn entry(&self) -> Option<TreeEntry<'_>> {
        Some(self.at.body()?.entry(self.at.key(), self.block.as_ref()?))
    }

    async fn seek(&mut self, position: Position<'_>) -> Result<(), EngineError> {
        self.leave_entry();
        self.prefetch = BlockPrefetch::None;
        let index = self.index().await?;
        if index.seek(&mut self.block_at, position)
            && !self.enter_block(&index, false, |block, at| block.seek(at, position)).await?
        {
            // The separator is behind the block's last entry.
            self.move_block(Direction::Forward).await?;
        }
        Ok(())
    }

    async fn seek_before(&mut self, position: Option<Position<'_>>) -> Result<(), EngineError> {
        self.leave_entry();
        self.prefetch = BlockPrefetch::None;
        let index = self.index().await?;
        let is_within = position.is_some_and(|position| index.seek(&mut self.block_at, position));
        if !is_within {
            index.last(&mut self.block_at);
        }
        let enter = |block: &DataBlock, at: &mut KeyBlockPosition<StoredEntry>| match position {
            Some(position) if block.seek(at, position) => block.prev(at),
            _ => block.last(at),
        };
        if !self.enter_block(&index, false, enter).await? {
            self.move_block(Direction::Backward).await?;
        }
        Ok(())
    }

    async fn next(&mut self) -> Result<(), EngineError> {
        if let Some(block) = &self.block
            && block.next(&mut self.at)
        {
            if matches!(self.prefetch, BlockPrefetch::None) {
                self.start_prefetch(Direction::Forward).await;
            }
            return Ok(());
        }
        self.move_block(Direction::Forward).await
    }

    async fn prev(&mut self) -> Result<(), EngineError> {
        if let Some(block) = &self.block
            && block.prev(&mut self.at)
        {
            if matches!(self.prefetch, BlockPrefetch::None) {
                self.start_prefetch(Direction::Backward).await;
            }
            return Ok(());
        }
        self.move_block(Direction::Backward).await
    }
}
