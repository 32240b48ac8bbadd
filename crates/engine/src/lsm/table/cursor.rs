//! The cursor of a table.
//!
//! It holds a place in the index and one data block, and takes the index from the cache whenever it moves to another block: many
//! cursors that live long cost no more than that. One that reads past the cache, for a compaction, holds the index and what it read ahead.
//!
//! ```text
//!   seek ─▶ index: the first block whose separator is not before the position ─▶ block: the first entry at or behind it
//!                                                                               └─▶ none: the first entry of the next block
//! ```
//! Forward, a block that is not in the cache is read together with those behind it that the scan will probably enter: as many as scans of the
//! level had before it ([`super::scan_lengths`]), or, once it is longer, as many as it had itself. A step may start a read-ahead: forward
//! while the blocks ahead are fewer than those of one and a half reads, backward of the preceding block. A step into a block that is being read awaits that read, so that no block is read twice.
//!
//! In: positions, in both directions. Out: entries by reference to the block.
//! Invariants: without an entry there is no block; at a block that cannot be read, the place in the index remains, so that the cursor
//! goes on behind it. Tested in `model_tests.rs` and `damage_tests.rs`.

use super::block_scan::BlockScan;
use super::blocks_ahead::{BlocksAhead, Direction, PlacedBlock};
use super::cache::{PartName, TablePart};
use super::index::{BlockRef, TableIndex, key_range};
use super::io::RunBytes;
use super::key_block::KeyBlockPosition;
use super::reader::{CacheFill, TableReader};
use super::stored_entry::{DataBlock, StoredEntry};
use super::writer::DATA_BYTES_MAX;
use crate::EngineError;
use crate::lsm::cursor::EntryCursor;
use crate::lsm::entry::{Position, TreeEntry};
use crate::lsm::prefetch_degree::PrefetchGrant;
use smallvec::SmallVec;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

/// The most bytes of one read of an iterator.
const RUN_BYTES_MAX: u64 = 256 << 10;
/// Such a read is at most this part of the cache: what many scans read ahead stays there until they come to it.
const RUNS_PER_CACHE: u64 = 256;

/// The most reads ahead of a scan forward at a time. With one, the device waits for the scan whenever a read ends.
const READS_AHEAD_MAX: usize = 2;
/// Cached blocks that a step passes at most in the search for the next read.
const CACHED_PER_STEP: u32 = 64;

/// Blocks in the cache between others that are not are read again if they have at most so many bytes: that takes less time than another read.
const GAP_BYTES_MAX: u64 = 32 << 10;

/// How a cursor reads data blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableCursorConfig {
    /// Whether index and blocks are kept in the cache. If not, the cursor keeps the index itself.
    pub fill: CacheFill,
    /// What a forward step to a block that is not in the cache reads at once, in bytes: the blocks that follow need no further read. The
    /// cursor holds a buffer of this length. 0: one block at a time.
    pub read_ahead_bytes: u32,
    /// Whether it reads blocks ahead of a scan that are expected to be needed. No effect with [`CacheFill::Skip`].
    pub prefetches_blocks: bool,
}

impl TableCursorConfig {
    /// For a user's iterator: as many blocks at a time as it probably needs, which are kept.
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

/// What one read has.
struct BlockRun {
    /// The blocks that are not in the cache.
    blocks: SmallVec<[BlockRef; 4]>,
    /// Those between them that are.
    cached: Vec<PlacedBlock>,
    /// The number of both.
    passed: u32,
}

impl BlockRun {
    /// From the first block to the end of the last.
    fn bytes(&self) -> u32 {
        match &self.blocks[..] {
            [first, .., last] => (last.offset - first.offset).saturating_add(last.bytes),
            [block] => block.bytes,
            [] => 0,
        }
    }
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
    ahead: BlocksAhead,
    /// Whether it has looked for blocks to read ahead since it came to its block.
    has_looked_ahead: bool,
    scan: BlockScan,
    /// The level of the table, for the lengths of scans.
    level: usize,
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
            ahead: BlocksAhead::default(),
            has_looked_ahead: false,
            scan: BlockScan::default(),
            level: 0,
            own_index: None,
            unread: None,
        }
    }

    /// The same over a table of a level, whose scans have lengths of their own.
    pub fn in_level(mut self, level: usize) -> TableCursor {
        self.level = level;
        self
    }

    /// The part that the last operation could not read, if that failed with [`EngineError::Corrupt`].
    pub fn unread_part(&self) -> Option<&UnreadPart> {
        self.unread.as_ref()
    }

    /// Reads the data block behind the current one into the cache, unless it is there. A hint, without effect on outcomes: the future may
    /// be dropped, and the cursor used meanwhile.
    pub fn prefetch_next(&self) -> impl Future<Output = ()> + use<> {
        self.prefetch_without_hold(Direction::Forward)
    }

    /// Reads the data block before the current one, as [`TableCursor::prefetch_next`] does.
    pub fn prefetch_prev(&self) -> impl Future<Output = ()> + use<> {
        self.prefetch_without_hold(Direction::Backward)
    }

    fn prefetch_without_hold(&self, direction: Direction) -> impl Future<Output = ()> + use<> {
        let read = self.prefetch(direction);
        async move { drop(read.await) }
    }

    /// The read of a neighbour of the current block, which it gives, unless that is in the cache.
    fn prefetch(&self, direction: Direction) -> impl Future<Output = Vec<PlacedBlock>> + use<> {
        let (reader, block_at) = (self.reader.clone(), self.block_at.body().map(|_| self.block_at.clone()));
        async move {
            // A failure comes back when the cursor moves there.
            let Some(mut block_at) = block_at else { return Vec::new() };
            let Ok(index) = reader.index(CacheFill::Keep).await else { return Vec::new() };
            step(&index, &mut block_at, direction);
            if let Some(block) = block_at.body()
                && reader.io.may_read_ahead(u64::from(block.bytes))
                && !reader.io.cache.has(reader.place.id, PartName::Data(block.offset))
                && let Ok(found) = reader.block(block, CacheFill::Keep).await
            {
                return vec![PlacedBlock { offset: block.offset, block: found }];
            }
            Vec::new()
        }
    }

    /// Whether it reads blocks before it comes to them.
    fn reads_ahead(&self) -> bool {
        self.config.prefetches_blocks && self.config.fill == CacheFill::Keep
    }

    /// Starts to read blocks in a direction, if they will probably be needed and few are on their way. Once for each block.
    async fn look_ahead(&mut self, direction: Direction) {
        self.has_looked_ahead = true;
        if !self.reads_ahead() {
            return;
        }
        match direction {
            Direction::Forward => self.start_next_run(),
            Direction::Backward if self.ahead.reads() == 0 => {
                let grant = self.grant(DATA_BYTES_MAX as u64);
                self.ahead.add_read(direction, 0, grant, self.prefetch(direction));
            }
            Direction::Backward => {}
        }
        self.ahead.poll_reads().await;
    }

    /// The right to hold so many bytes ahead.
    fn grant(&self, bytes: u64) -> Option<Rc<PrefetchGrant>> {
        self.reader.io.prefetch_budget.take(bytes).map(Rc::new)
    }

    /// Holds blocks of the cache that are ahead.
    fn hold(&mut self, blocks: Vec<PlacedBlock>) {
        let bytes: usize = blocks.iter().map(|placed| placed.block.bytes().len()).sum();
        if bytes > 0
            && let Some(grant) = self.grant(bytes as u64)
        {
            self.ahead.hold(blocks, &grant);
        }
    }

    /// Adds the reads of the blocks behind those that were read, if it is time for them and there are buffers enough.
    fn start_next_run(&mut self) {
        let Some(TablePart::Index(index)) = self.reader.io.cache.get(self.reader.place.id, PartName::Index)
        else {
            return;
        };
        while self.ahead.reads() < READS_AHEAD_MAX {
            self.scan.expect_more();
            let BlockScan { ahead, run, .. } = self.scan;
            if ahead > run + run / 2 {
                return;
            }
            let mut behind = index.bodies_behind(&self.block_at).skip(ahead as usize);
            let passed_max = self.scan.ahead + CACHED_PER_STEP;
            let mut cached = Vec::new();
            let first = loop {
                if self.scan.wanted() == 0 || self.scan.ahead >= passed_max {
                    break None;
                }
                let Some(block) = behind.next() else { break None };
                let Some(found) = self.cached(block) else { break Some(block) };
                cached.push(found);
                self.scan.ahead += 1;
            };
            self.hold(cached);
            let Some(first) = first else { return };
            let run = self.run_from(first, behind, self.scan.wanted());
            if !self.reader.io.may_read_ahead(u64::from(run.bytes())) {
                return;
            }
            self.scan.run = run.passed;
            self.scan.ahead += run.passed;
            let grant = self.grant(u64::from(run.bytes()));
            if let Some(grant) = &grant {
                self.ahead.hold(run.cached, grant);
            }
            let (reader, blocks) = (self.reader.clone(), run.blocks);
            let read = async move {
                let mut others = Vec::new();
                // A failure comes back when the cursor moves there.
                if let Ok(block) = reader.read_blocks(&blocks, &mut others).await {
                    others.insert(0, PlacedBlock { offset: first.offset, block });
                }
                others
            };
            self.ahead.add_read(Direction::Forward, first.offset, grant, read);
        }
    }

    /// A block, if it is in the cache, of which the scan is then a user: it comes to it as to those that it has read itself.
    fn cached(&self, block: BlockRef) -> Option<PlacedBlock> {
        let BlockRef { offset, .. } = block;
        match self.reader.io.cache.get(self.reader.place.id, PartName::Data(offset))? {
            TablePart::Data(block) => Some(PlacedBlock { offset, block }),
            TablePart::Index(_) | TablePart::Filter(_) => None,
        }
    }

    /// A block with those of `behind` that one read has and the cache has not, as far as `count` blocks with it.
    fn run_from(&self, first: BlockRef, behind: impl Iterator<Item = BlockRef>, count: u32) -> BlockRun {
        let (io, place) = (&self.reader.io, &self.reader.place);
        let mut run = BlockRun { blocks: SmallVec::from_iter([first]), cached: Vec::new(), passed: 1 };
        let Ok(offset) = self.reader.data_offset(first) else { return run };
        let bytes_max = RUN_BYTES_MAX
            .min(io.cache.capacity_bytes() / RUNS_PER_CACHE)
            .min(place.data_end(offset, io.unit_bytes).saturating_sub(offset));
        let mut end = first.offset.saturating_add(first.bytes);
        for (block, number) in behind.take(count.saturating_sub(1) as usize).zip(2..) {
            let bytes = u64::from(block.offset - first.offset) + u64::from(block.bytes);
            if bytes > bytes_max || u64::from(block.offset.saturating_sub(end)) > GAP_BYTES_MAX {
                break;
            }
            match self.cached(block) {
                Some(found) => run.cached.push(found),
                None => {
                    run.blocks.push(block);
                    (end, run.passed) = (block.offset.saturating_add(block.bytes), number);
                }
            }
        }
        run.cached.truncate(run.passed as usize - run.blocks.len());
        run
    }

    /// Waits for a read ahead that has the block to which the cursor moves in a direction, and drops those in the other direction.
    async fn end_prefetch(&mut self, direction: Direction) {
        self.has_looked_ahead = false;
        let offset = self.block_at.body().map_or(u32::MAX, |block| block.offset);
        self.ahead.await_block(direction, offset).await;
    }

    /// Ends the scan from the last seek on.
    fn end_scan(&mut self) {
        if self.scan.entered > 0 && self.reads_ahead() {
            self.reader.io.scan_lengths.add(self.level, self.scan.entered);
        }
        (self.scan, self.has_looked_ahead) = (BlockScan::default(), false);
        self.ahead.clear();
    }

    /// Ends the scan in this table: it goes on in the next one of the level, for which its blocks up to here are given.
    pub fn hand_over(&mut self) -> u32 {
        std::mem::take(&mut self.scan).entered
    }

    /// Goes to the first entry, for a scan that has entered so many blocks in the tables before.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    pub async fn go_on(&mut self, entered: u32) -> Result<(), EngineError> {
        self.leave_entry();
        self.end_scan();
        self.scan.entered = entered;
        self.seek_in_scan(Position::START).await
    }

    async fn seek_in_scan(&mut self, position: Position<'_>) -> Result<(), EngineError> {
        let index = self.index().await?;
        if !index.seek(&mut self.block_at, position) {
            return Ok(());
        }
        self.scan.usual = self.reader.io.scan_lengths.expected(self.level);
        self.scan.expected = self.scan.usual;
        self.scan.enter();
        if !self.enter_block(&index, false, |block, at| block.seek(at, position)).await? {
            // The separator is behind the block's last entry.
            self.move_block(Direction::Forward).await?;
        }
        Ok(())
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
            false => self.load(index, block).await,
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

    /// The block at which the cursor is; with it, a scan forward reads those that it probably enters.
    async fn load(&mut self, index: &TableIndex, block: BlockRef) -> Result<Arc<DataBlock>, EngineError> {
        let cached = || match self.scan.was_ahead {
            true => self.reader.block_ahead(block),
            false => self.reader.cached_block(block),
        };
        if let Some(block) = self.ahead.take(block.offset).or_else(cached) {
            return Ok(block);
        }
        if !self.reads_ahead() {
            return self.reader.read_block(block, self.config.fill).await;
        }
        // What was read of it is not there any more, nor, probably, what is behind it.
        self.scan.ahead = 0;
        let count = self.scan.wanted().saturating_add(1);
        let run = self.run_from(block, index.bodies_behind(&self.block_at), count);
        self.scan.run = run.passed;
        self.scan.ahead = run.passed - 1;
        self.ahead.clear();
        let grant = if run.passed > 1 { self.grant(u64::from(run.bytes())) } else { None };
        if let Some(grant) = &grant {
            self.ahead.hold(run.cached, grant);
        }
        let (reader, mut others) = (self.reader.clone(), Vec::new());
        let outcome = {
            let mut read = pin!(reader.read_blocks(&run.blocks, &mut others));
            let outcome = poll_fn(|context| Poll::Ready(read.as_mut().poll(context))).await;
            // Those behind them are wanted soon: both reads are then in flight.
            self.start_next_run();
            self.ahead.poll_reads().await;
            match outcome {
                Poll::Ready(outcome) => outcome,
                Poll::Pending => read.await,
            }
        };
        if let Some(grant) = &grant {
            self.ahead.hold(others, grant);
        }
        outcome
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
        let index = self.index().await?;
        let is_block = step(&index, &mut self.block_at, direction);
        self.end_prefetch(direction).await;
        if is_block {
            match direction {
                Direction::Forward => {
                    self.scan.enter();
                    self.enter_block(&index, true, |block, at| block.first(at)).await?
                }
                Direction::Backward => {
                    self.scan = BlockScan::default();
                    self.enter_block(&index, false, |block, at| block.last(at)).await?
                }
            };
        }
        Ok(())
    }
}

impl Drop for TableCursor {
    fn drop(&mut self) {
        self.end_scan();
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

    #[inline]
    fn position(&self) -> Option<Position<'_>> {
        self.block.as_ref()?;
        self.at.position()
    }

    async fn seek(&mut self, position: Position<'_>) -> Result<(), EngineError> {
        self.leave_entry();
        self.end_scan();
        self.seek_in_scan(position).await
    }

    async fn seek_before(&mut self, position: Option<Position<'_>>) -> Result<(), EngineError> {
        self.leave_entry();
        self.end_scan();
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
            if !self.has_looked_ahead {
                self.look_ahead(Direction::Forward).await;
            }
            return Ok(());
        }
        self.move_block(Direction::Forward).await
    }

    async fn prev(&mut self) -> Result<(), EngineError> {
        if let Some(block) = &self.block
            && block.prev(&mut self.at)
        {
            if !self.has_looked_ahead {
                self.look_ahead(Direction::Backward).await;
            }
            return Ok(());
        }
        self.move_block(Direction::Backward).await
    }
}
