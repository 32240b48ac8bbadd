//! The cursor of a level: its tables, which share no key, one behind the other.
//!
//! ```text
//!   table  │ data blocks …            │ last blocks │   │ next table
//!   cursor ──────────────────────────▶ starts to read the index ──▶ arrives: it is there, or in flight, or missing
//! ```
//! In: the tables of a level of a version, or a list of tables for a compaction. Out: their entries, in both directions. One table is open,
//! and its version or metadata holds its space.
//!
//! Index prefetch (IterKVSSD): a step in the last blocks of a table starts to read the index of the next table in that direction into the cache. Later
//! steps poll the read, and the step into the table awaits it. A point lookup takes no steps, and prefetches nothing. The cursor finds those blocks by
//! the index of its own table in the cache: an index that the cache does not keep is neither used nor read ahead.
//!
//! Damage, as in `cursor.rs`: a part that cannot be read is passed on once, with its keys ([`LevelCursor::unread_part`]), and the next step goes on behind it,
//! in the next table if the index is lost. The damage that a prefetch meets is passed on when the cursor arrives, without a second read; any other
//! failure of a prefetch has no effect.
//!
//! Invariants: a table is entered from its neighbour at the end that is nearer; at most one index is in flight; an operation whose future was
//! dropped leaves the cursor at no entry, until a seek. Tested in `level_cursor_tests.rs`.

use super::cursor::EntryCursor;
use super::entry::{Position, TreeEntry};
use super::table::cache::{PartName, TablePart};
use super::table::cursor::{TableCursor, TableCursorConfig, UnreadPart};
use super::table::index::{BlockRef, TableIndex};
use super::table::info::TablePlace;
use super::table::io::TableIo;
use super::table::key_block::KeyBlockPosition;
use super::table::reader::{CacheFill, TableReader};
use super::table_meta::{TableMeta, TableParts};
use super::tree_version::TreeVersion;
use crate::EngineError;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Where the parts of a table lie, for its reader.
pub fn place_of(table: &TableMeta) -> TablePlace {
    let TableParts { front_bytes, second_unit, descriptor_bytes, filter_bytes, index_bytes } = table.parts();
    TablePlace {
        id: table.id(),
        location: table.extent().location,
        front_bytes,
        second_unit,
        descriptor_bytes,
        filter_bytes,
        index_bytes,
    }
}

/// How a cursor reads the tables of a level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelCursorConfig {
    /// How it reads the data blocks of each table.
    pub table: TableCursorConfig,
    /// Whether it reads the index of the next table ahead. No effect with [`CacheFill::Skip`].
    pub prefetches_index: bool,
    /// The number of data blocks before the end of a table in which it starts to read the next index. At least 1.
    pub prefetch_blocks: u32,
}

impl LevelCursorConfig {
    /// For a user's iterator. Two blocks: the prefetch starts although the last one is damaged.
    pub const ITERATOR: LevelCursorConfig =
        LevelCursorConfig { table: TableCursorConfig::ITERATOR, prefetches_index: true, prefetch_blocks: 2 };
    /// For a compaction, which passes the cache.
    pub const COMPACTION: LevelCursorConfig = LevelCursorConfig {
        table: TableCursorConfig::COMPACTION,
        prefetches_index: false,
        prefetch_blocks: 1,
    };
}

/// How often the index of the next table was where, when a step arrived at the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexArrivals {
    /// In memory: the step did not wait for it.
    pub there: u64,
    /// On its way from the device: the step waited for a part of the read.
    pub in_flight: u64,
    /// On the device: the step waited for the whole read.
    pub missing: u64,
}

/// The keys of a part that could not be read: none but those from the first to the last one, both included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadKeys {
    /// The smallest key that may be lost.
    pub first: Vec<u8>,
    /// The largest key that may be lost.
    pub last: Vec<u8>,
}

/// Tables that share no key, in the order of their keys.
enum LevelTables {
    Level(Arc<TreeVersion>, usize),
    List(Vec<Arc<TableMeta>>),
}

impl LevelTables {
    fn nth(&self, rank: usize) -> Option<&Arc<TableMeta>> {
        match self {
            LevelTables::Level(version, level) => version.level(*level).nth(rank),
            LevelTables::List(tables) => tables.get(rank),
        }
    }

    /// The level whose scans have the length of theirs.
    fn level(&self) -> usize {
        match self {
            LevelTables::Level(_, level) => *level,
            LevelTables::List(_) => 0,
        }
    }

    /// The number of tables whose first key is `key` or below.
    fn begun(&self, key: &[u8]) -> usize {
        match self {
            LevelTables::Level(version, level) => version.level(*level).rank(key, true),
            LevelTables::List(tables) => tables.partition_point(|table| table.first_key() <= key),
        }
    }

    fn count(&self) -> usize {
        match self {
            LevelTables::Level(version, level) => version.level_tables(*level),
            LevelTables::List(tables) => tables.len(),
        }
    }

    /// The table next to another one.
    fn beside(&self, rank: usize, towards: LevelEnd) -> Option<usize> {
        match towards {
            LevelEnd::Last => Some(rank + 1).filter(|&next| next < self.count()),
            LevelEnd::First => rank.checked_sub(1),
        }
    }
}

/// The end of the level to which a cursor moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LevelEnd {
    First,
    Last,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LevelState {
    /// No entry: a seek is needed.
    NoEntry,
    /// The table's cursor is at an entry.
    AtEntry,
    /// A part could not be read: a step goes on behind it.
    AtDamage,
}

/// From where on steps in the open table prefetch the next index.
enum PrefetchStart {
    /// Not known yet.
    Unknown,
    /// From the last entries on, in the direction in which the cursor moves.
    Near(LevelEnd, PrefetchBorder),
    /// It was started in this direction, or there is nothing to prefetch.
    Settled(LevelEnd),
}

/// Where the last blocks of a table begin.
enum PrefetchBorder {
    /// The whole table is that short.
    None,
    /// At the separator of a block: with no entry but those behind it, or, for a cursor that moves back, those up to it.
    Separator { key: Vec<u8>, sequence: u64 },
}

type IndexRead = Pin<Box<dyn Future<Output = Result<(), EngineError>>>>;

/// The read of the index of a table into the cache.
struct IndexPrefetch {
    rank: usize,
    state: IndexReadState,
}

enum IndexReadState {
    InFlight(IndexRead),
    Done(Result<(), EngineError>),
}

impl IndexPrefetch {
    fn new(io: &Rc<TableIo>, rank: usize, table: &TableMeta) -> IndexPrefetch {
        let reader = TableReader::new(Rc::clone(io), place_of(table));
        let last_key = table.last_key().to_vec();
        // A seek behind the last separator, which is the position of the last entry, reads the index and no block.
        let read = Box::pin(async move {
            let mut cursor = TableCursor::new(reader, TableCursorConfig::ITERATOR);
            cursor.seek(Position::behind(&last_key)).await
        });
        IndexPrefetch { rank, state: IndexReadState::InFlight(read) }
    }

    /// The outcome, if the read has ended.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), EngineError>> {
        if let IndexReadState::InFlight(read) = &mut self.state
            && let Poll::Ready(outcome) = read.as_mut().poll(context)
        {
            self.state = IndexReadState::Done(outcome);
        }
        match self.state {
            IndexReadState::InFlight(_) => Poll::Pending,
            IndexReadState::Done(outcome) => Poll::Ready(outcome),
        }
    }
}

/// A cursor over the entries of a level.
pub struct LevelCursor {
    io: Rc<TableIo>,
    tables: LevelTables,
    config: LevelCursorConfig,
    state: LevelState,
    /// The open table: its rank and its cursor.
    open: Option<(usize, TableCursor)>,
    unread: Option<UnreadKeys>,
    /// The table that the device failed to read.
    failed_table: Option<u64>,
    prefetch: Option<IndexPrefetch>,
    prefetch_start: PrefetchStart,
    arrivals: IndexArrivals,
}

impl LevelCursor {
    /// A cursor at no entry, over a level of a version. REQUIRES: `1 <= level < LEVELS`.
    pub fn new(
        io: Rc<TableIo>,
        version: Arc<TreeVersion>,
        level: usize,
        config: LevelCursorConfig,
    ) -> LevelCursor {
        LevelCursor::over(io, LevelTables::Level(version, level), config)
    }

    /// A cursor at no entry, over tables in the order of their keys. One table of level 0 is such a list, too.
    ///
    /// # Panics
    /// If two of the tables share a key, or the order is another.
    pub fn of_tables(io: Rc<TableIo>, tables: Vec<Arc<TableMeta>>, config: LevelCursorConfig) -> LevelCursor {
        let is_disjoint = tables.is_sorted_by(|before, after| before.last_key() < after.first_key());
        assert!(is_disjoint, "the tables share keys, or are not in order");
        LevelCursor::over(io, LevelTables::List(tables), config)
    }

    fn over(io: Rc<TableIo>, tables: LevelTables, config: LevelCursorConfig) -> LevelCursor {
        assert!(config.prefetch_blocks > 0, "{config:?}");
        LevelCursor {
            io,
            tables,
            config,
            state: LevelState::NoEntry,
            open: None,
            unread: None,
            failed_table: None,
            prefetch: None,
            prefetch_start: PrefetchStart::Unknown,
            arrivals: IndexArrivals::default(),
        }
    }

    /// The keys of the part that the last operation could not read, if that failed with [`EngineError::Corrupt`]: those of a data
    /// block, or of the whole table if its index is lost.
    pub fn unread_part(&self) -> Option<&UnreadKeys> {
        self.unread.as_ref()
    }

    /// The number of the table that the last operation met, if that failed with [`EngineError::Device`].
    pub fn failed_table(&self) -> Option<u64> {
        self.failed_table
    }

    /// Where the indexes of tables were when steps arrived there, since the cursor was made.
    pub fn index_arrivals(&self) -> IndexArrivals {
        self.arrivals
    }

    fn leave_entry(&mut self) {
        self.state = LevelState::NoEntry;
        (self.unread, self.failed_table) = (None, None);
    }

    /// Opens a table, unless it is open, and awaits its index if that is in flight. REQUIRES: there is such a table.
    async fn open(&mut self, rank: usize, is_step: bool) -> Result<(), EngineError> {
        let table = self.tables.nth(rank).expect("the caller knows the rank");
        if self.open.as_ref().is_none_or(|(open, _)| *open != rank) {
            let reader = TableReader::new(Rc::clone(&self.io), place_of(table));
            let cursor = TableCursor::new(reader, self.config.table).in_level(self.tables.level());
            self.open = Some((rank, cursor));
        }
        self.prefetch_start = PrefetchStart::Unknown;
        let table_id = table.id();
        let mut was_in_flight = false;
        let mut outcome = Ok(());
        if let Some(prefetch) = self.prefetch.as_mut().filter(|prefetch| prefetch.rank == rank) {
            outcome = poll_fn(|context| {
                let outcome = prefetch.poll(context);
                was_in_flight |= outcome.is_pending();
                outcome
            })
            .await;
            self.prefetch = None;
        }
        let is_damaged = matches!(outcome, Err(EngineError::Corrupt { .. }));
        if is_step {
            let arrivals = &mut self.arrivals;
            let is_there = is_damaged || self.io.cache.has(table_id, PartName::Index);
            *match (was_in_flight, is_there) {
                (true, true) => &mut arrivals.in_flight,
                (false, true) => &mut arrivals.there,
                // A prefetch that failed, or whose index the cache gave up again, is of no use.
                (_, false) => &mut arrivals.missing,
            } += 1;
        }
        if is_damaged { outcome } else { Ok(()) }
    }

    /// The open table and its cursor.
    fn opened(&mut self) -> (usize, &mut TableCursor) {
        let (rank, cursor) = self.open.as_mut().expect("a table is open");
        (*rank, cursor)
    }

    /// Ends an operation of the open table's cursor: goes on in the next tables while there is no entry.
    async fn arrive(
        &mut self,
        mut outcome: Result<(), EngineError>,
        towards: LevelEnd,
        is_step: bool,
    ) -> Result<(), EngineError> {
        loop {
            let (rank, cursor) = self.opened();
            match outcome {
                Ok(()) if cursor.position().is_some() => {
                    self.state = LevelState::AtEntry;
                    return Ok(());
                }
                Ok(()) => {}
                Err(EngineError::Corrupt { .. }) => {
                    self.unread = Some(self.unread_keys());
                    self.state = LevelState::AtDamage;
                    return outcome;
                }
                Err(error) => {
                    if let EngineError::Device { .. } = error {
                        self.failed_table = self.tables.nth(rank).map(|table| table.id());
                    }
                    return outcome;
                }
            }
            let Some(rank) = self.tables.beside(rank, towards) else { return Ok(()) };
            let (_, cursor) = self.opened();
            let entered = if towards == LevelEnd::Last { cursor.hand_over() } else { 0 };
            outcome = self.open(rank, is_step).await;
            if outcome.is_ok() {
                let (_, cursor) = self.opened();
                outcome = match towards {
                    LevelEnd::Last => cursor.go_on(entered).await,
                    LevelEnd::First => cursor.seek_before(None).await,
                };
            }
        }
    }

    /// The keys of what the open table's cursor could not read, or, if it says nothing, of the table whose index is lost.
    fn unread_keys(&self) -> UnreadKeys {
        let (rank, cursor) = self.open.as_ref().expect("a table is open");
        let table = self.tables.nth(*rank).expect("it is open");
        let [mut first, mut last] = [table.first_key(), table.last_key()].map(<[u8]>::to_vec);
        if let Some(UnreadPart::Keys(from, to)) = cursor.unread_part() {
            // The bounds of a block may reach beyond the table. If they say nothing, they came from a damaged index.
            let (from, to) = ((&first).max(from).clone(), (&last).min(to).clone());
            if from <= to {
                (first, last) = (from, to);
            }
        }
        UnreadKeys { first, last }
    }

    async fn step(&mut self, towards: LevelEnd) -> Result<(), EngineError> {
        assert_ne!(self.state, LevelState::NoEntry, "a step from no entry");
        self.leave_entry();
        let (_, cursor) = self.opened();
        let outcome = match towards {
            LevelEnd::Last => cursor.next().await,
            LevelEnd::First => cursor.prev().await,
        };
        self.arrive(outcome, towards, true).await?;
        if self.config.prefetches_index && self.config.table.fill == CacheFill::Keep {
            poll_fn(|context| {
                self.prefetch_index(towards, context);
                Poll::Ready(())
            })
            .await;
        }
        Ok(())
    }

    /// Goes on with the read of an index, and starts one if the cursor is in the last blocks of its table.
    fn prefetch_index(&mut self, towards: LevelEnd, context: &mut Context<'_>) {
        if let Some(prefetch) = &mut self.prefetch {
            // The outcome is kept until the cursor arrives.
            let _ = prefetch.poll(context);
        }
        let is_known = match &self.prefetch_start {
            PrefetchStart::Settled(end) | PrefetchStart::Near(end, _) => *end == towards,
            PrefetchStart::Unknown => false,
        };
        if !is_known {
            self.prefetch_start = self.find_prefetch_start(towards);
        }
        let (Some((rank, cursor)), PrefetchStart::Near(_, border)) = (&self.open, &self.prefetch_start)
        else {
            return;
        };
        let Some(position) = cursor.position() else { return };
        let is_near = match border {
            PrefetchBorder::None => true,
            PrefetchBorder::Separator { key, sequence } => {
                let is_behind = position > Position { key, sequence: *sequence };
                is_behind == (towards == LevelEnd::Last)
            }
        };
        if !is_near {
            return;
        }
        self.prefetch_start = PrefetchStart::Settled(towards);
        let Some(rank) = self.tables.beside(*rank, towards) else { return };
        let table = self.tables.nth(rank).expect("it is beside another one");
        let is_in_flight = self.prefetch.as_ref().is_some_and(|prefetch| prefetch.rank == rank);
        let may_read = self.io.may_read_ahead(u64::from(table.parts().index_bytes));
        if !is_in_flight && may_read && !self.io.cache.has(table.id(), PartName::Index) {
            let mut prefetch = IndexPrefetch::new(&self.io, rank, table);
            let _ = prefetch.poll(context);
            self.prefetch = Some(prefetch);
        }
    }

    /// From where on the open table's neighbour is prefetched, by the index in the cache.
    fn find_prefetch_start(&self, towards: LevelEnd) -> PrefetchStart {
        let settled = PrefetchStart::Settled(towards);
        let Some((rank, _)) = &self.open else { return settled };
        let (Some(table), Some(_)) = (self.tables.nth(*rank), self.tables.beside(*rank, towards)) else {
            return settled;
        };
        match self.io.cache.get(table.id(), PartName::Index) {
            Some(TablePart::Index(index)) => {
                let border = prefetch_border(&index, self.config.prefetch_blocks, towards);
                PrefetchStart::Near(towards, border)
            }
            _ => settled,
        }
    }
}

/// Where the blocks of a table begin that are the nearest ones to an end of it.
fn prefetch_border(index: &TableIndex, blocks: u32, towards: LevelEnd) -> PrefetchBorder {
    let mut at: KeyBlockPosition<BlockRef> = KeyBlockPosition::default();
    // From the last block back to the one before the last blocks; from the first one on to the last of the first blocks.
    let (mut is_block, steps) = match towards {
        LevelEnd::Last => (index.last(&mut at), blocks),
        LevelEnd::First => (index.first(&mut at), blocks - 1),
    };
    for _ in 0..steps {
        is_block = is_block
            && match towards {
                LevelEnd::Last => index.prev(&mut at),
                LevelEnd::First => index.next(&mut at),
            };
    }
    match at.body() {
        Some(block) if is_block => {
            PrefetchBorder::Separator { key: at.key().to_vec(), sequence: block.sequence }
        }
        _ => PrefetchBorder::None,
    }
}

impl EntryCursor for LevelCursor {
    fn entry(&self) -> Option<TreeEntry<'_>> {
        match (&self.open, self.state) {
            (Some((_, cursor)), LevelState::AtEntry) => cursor.entry(),
            (_, LevelState::AtEntry | LevelState::AtDamage | LevelState::NoEntry) => None,
        }
    }

    #[inline]
    fn position(&self) -> Option<Position<'_>> {
        match (&self.open, self.state) {
            (Some((_, cursor)), LevelState::AtEntry) => cursor.position(),
            (_, LevelState::AtEntry | LevelState::AtDamage | LevelState::NoEntry) => None,
        }
    }

    async fn seek(&mut self, position: Position<'_>) -> Result<(), EngineError> {
        self.leave_entry();
        // The last table that begins up to the key, or, if it ends before the key, the next one.
        let begun = self.tables.begun(position.key);
        let reaches =
            |rank: &usize| self.tables.nth(*rank).is_some_and(|table| position.key <= table.last_key());
        let rank = begun.checked_sub(1).filter(reaches).unwrap_or(begun);
        if rank >= self.tables.count() {
            return Ok(());
        }
        let mut outcome = self.open(rank, false).await;
        if outcome.is_ok() {
            outcome = self.opened().1.seek(position).await;
        }
        self.arrive(outcome, LevelEnd::Last, false).await
    }

    async fn seek_before(&mut self, position: Option<Position<'_>>) -> Result<(), EngineError> {
        self.leave_entry();
        let begun = position.map_or_else(|| self.tables.count(), |position| self.tables.begun(position.key));
        let Some(rank) = begun.checked_sub(1) else { return Ok(()) };
        let mut outcome = self.open(rank, false).await;
        if outcome.is_ok() {
            outcome = self.opened().1.seek_before(position).await;
        }
        self.arrive(outcome, LevelEnd::First, false).await
    }

    async fn next(&mut self) -> Result<(), EngineError> {
        self.step(LevelEnd::Last).await
    }

    async fn prev(&mut self) -> Result<(), EngineError> {
        self.step(LevelEnd::First).await
    }
}
