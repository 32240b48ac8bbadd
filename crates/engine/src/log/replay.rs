//! The replay of a store: from its state in a checkpoint, or that of a new store, to the state behind the last image of its key log.
//!
//! ```text
//!   images:    known to be durable ────────▶ settled   │ not known to be: queued ──▶ read again, values verified ──▶ settled, or rejected
//!                                           durable_through                                                              the end
//! ```
//! In: the state and the pages of the checkpoint; the key log from the start of replay on. Out: the segment table, the chunks of both logs,
//! their tails, the totals.
//!
//! Invariants: an image is settled, which changes the table, when it is known to be durable or its values are verified, in the order of the
//! log; so nothing is ever taken back. The images of a split are settled together. At most [`QUEUE_MAX`] images are queued: a longer tail that
//! nothing states to be durable is read twice as a whole.
//! Tested in `replay_tests.rs`.

use super::hash_prefix::{HashLevel, SegmentNumber};
use super::known_chunks::KnownChunks;
use super::log_cursor::{CursorPosition, CursorStep, LogCursor, LogStep};
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogPlace};
use super::log_window::LogWindow;
use super::segment_buckets::{ImageRole, PreviousImage, SEQUENCE_LIMIT, StoreTotals, ValueTailPlace};
use super::segment_ref::{SEGMENT_REF_BYTES, SegmentRef};
use super::segment_table::LogSegmentTable;
use super::store_image::{LoadedStore, PinnedChunk, StoreStart, ValueChunkUse};
use super::tail_check::ExpectedImage;
use super::value_check::ValueChecker;
use crate::bug_injection::{self, InjectedBug};
use crate::common::unit_reader::UnitReader;
use crate::open_error::{IndexMismatch, OpenError};
use octokv_base::RingRange;
use std::collections::VecDeque;

/// The most images that are queued.
pub const QUEUE_MAX: usize = 1 << 16;

/// The [`StoreStart::durable_through`] of a lost store: a checkpoint states with it that the store stays lost, and replay reads nothing of it.
pub const LOST_STORE_DURABLE_THROUGH: u64 = SEQUENCE_LIMIT - 1;

/// A log that a replay has found. [`super::chunk_log::ChunkLog::recovered`] takes it once the pool has adopted its chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecoveredLog {
    /// The lowest index in use.
    pub head: ChunkIndex,
    /// The chunks from the head to the tail.
    pub chunks: Vec<ChunkNumber>,
    /// The first free unit of the tail; the units of a chunk if it is full.
    pub tail_unit: u32,
    /// The chunk that was reserved behind the tail; `None` if none is named: a new store has to take one from the pool.
    pub next: Option<ChunkNumber>,
}

/// A key chunk before the head of its log that the replay of the present checkpoint reads: it is free when the next checkpoint is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetiredChunk {
    /// The chunk in the key log.
    pub index: ChunkIndex,
    /// The chunk on the device.
    pub chunk: ChunkNumber,
}

/// A store after the replay of its key log.
pub struct ReplayedStore {
    /// The partition.
    pub partition: u32,
    /// The part of the ring whose keys it has.
    pub range: RingRange,
    /// The segments and their newest images.
    pub table: LogSegmentTable,
    /// The key log. Its tail is directly behind the last accepted image.
    pub keys: RecoveredLog,
    /// The value log. Its tail begins at the next unit behind the last value.
    pub values: RecoveredLog,
    /// The key chunks from the start of replay to the head of the key log.
    pub retired: Vec<RetiredChunk>,
    /// The pinned chunks of the checkpoint.
    pub pinned: Vec<PinnedChunk>,
    /// The contents of the value chunks, in the order of `values.chunks`, if they are counted.
    pub value_uses: Option<Vec<ValueChunkUse>>,
    /// Where the next value lies: the same place as the tail of the value log.
    pub value_tail: ValueTailPlace,
    /// The totals behind the last accepted image.
    pub totals: StoreTotals,
    /// The number of the last accepted image; that of the first image of a store is 1.
    pub last_sequence: u64,
    /// The last accepted image, as the next one has to name it.
    pub previous: PreviousImage,
    /// The last image that is known to be durable: at most `last_sequence`.
    pub durable_through: u64,
    /// Images that were accepted.
    pub images: u64,
    /// Images at the end of the log that were rejected, as a value or a half of a split was not there.
    pub rejected: u64,
    /// Images of which buckets are damaged or could not be read.
    pub damaged: u64,
    /// Whether any segment may be older than what was acknowledged: nothing may be read from the store or written to it, and a checkpoint
    /// has to write it with [`LOST_STORE_DURABLE_THROUGH`].
    pub is_lost: bool,
    /// Whether a checkpoint has to be written before the volume serves.
    pub needs_checkpoint: bool,
}

/// Replays the key log of a store. Images below `store.start.replay.incarnation` are not of its log any more.
///
/// # Errors
/// [`OpenError::Inconsistent`] for images and pages that contradict each other; an error of the device that says nothing of the medium, if it
/// hides whether an image is there.
pub async fn replay(
    reader: UnitReader<'_>,
    layout: &LogLayout,
    volume_id: u64,
    store: LoadedStore,
) -> Result<ReplayedStore, OpenError> {
    replay_with(reader, layout, volume_id, store, QUEUE_MAX).await
}

/// The same with another bound of the queue.
pub(super) async fn replay_with(
    reader: UnitReader<'_>,
    layout: &LogLayout,
    volume_id: u64,
    LoadedStore { start, pages }: LoadedStore,
    queue_max: usize,
) -> Result<ReplayedStore, OpenError> {
    let mut table = LogSegmentTable::new(start.level);
    for (page, bytes) in pages.iter().enumerate() {
        let is_loaded = table.load_page(page, bytes);
        assert!(is_loaded, "the loader of a checkpoint checks its pages");
    }
    drop(pages);
    let settled = Settled::at_start(&start);
    let keys = start.key_chunks.iter().copied().chain([start.next_key_chunk]);
    let values = start.value_chunks.iter().map(|of| of.chunk).chain([start.next_value_chunk]);
    let chunks = (
        KnownChunks::new(start.key_head, keys, layout.chunks),
        KnownChunks::new(start.value_head, values, layout.chunks),
    );
    let is_lost = start.durable_through == LOST_STORE_DURABLE_THROUGH;
    let window = LogWindow::new(reader, *layout);
    let names = (volume_id, start.partition);
    let cursor = LogCursor::new(window, names, settled.position, chunks, start.durable_through);
    let mut replay = StoreReplay {
        layout: *layout,
        volume_id,
        cursor,
        start,
        table,
        settled,
        held: None,
        images: 0,
        damaged: 0,
        rejected: 0,
        is_lost,
        is_end_certain: true,
    };
    if !is_lost {
        replay.run(queue_max).await?;
    }
    Ok(replay.finish())
}

/// The state behind the last settled image.
#[derive(Clone, Copy)]
struct Settled {
    /// Behind it.
    position: CursorPosition,
    last_sequence: u64,
    previous: PreviousImage,
    totals: StoreTotals,
    key_head: ChunkIndex,
    value_head: ChunkIndex,
    /// Where values end: behind those of the checkpoint, too.
    value_tail: ValueTailPlace,
    /// Values before it are known to be durable.
    proven: ValueTailPlace,
    /// The segment of the last image, if that has no header.
    headless: Option<SegmentNumber>,
}

impl Settled {
    fn at_start(start: &StoreStart) -> Settled {
        let replay = &start.replay;
        // A store has the chunk in which its replay begins.
        let chunk = start.key_chunks[(replay.index.0 - start.key_head.0) as usize];
        let at = LogPlace { index: replay.index, chunk, unit: replay.unit };
        let (sequence, incarnation) = (replay.sequence, replay.incarnation);
        let first = ValueTailPlace { index: ChunkIndex(0), granule: 0 };
        Settled {
            position: CursorPosition {
                expected: ExpectedImage { sequence, incarnation, at },
                value_tail: first,
            },
            last_sequence: sequence.saturating_sub(1),
            previous: replay.previous,
            totals: start.totals,
            key_head: start.key_head,
            value_head: start.value_head,
            value_tail: start.value_tail,
            proven: start.value_tail,
            headless: None,
        }
    }

    /// Goes behind an image, behind which the cursor was at `position`.
    fn pass(&mut self, step: &LogStep, position: CursorPosition, is_durable: bool) {
        let state = &step.state;
        self.position = position;
        (self.last_sequence, self.previous) = (state.sequence, step.as_previous());
        self.totals = state.totals;
        self.key_head = self.key_head.max(state.key_head);
        self.value_head = self.value_head.max(state.value_head);
        self.value_tail = self.value_tail.max(state.value_tail);
        // Without a header, the value tail is that of the image behind, which need not be durable.
        if is_durable && step.has_head {
            self.proven = self.proven.max(state.value_tail);
        }
        self.headless = (!step.has_head).then_some(state.segment);
    }
}

/// An image that is not settled, and where the cursor was behind it.
type QueuedStep = (LogStep, CursorPosition);

struct StoreReplay<'a> {
    layout: LogLayout,
    volume_id: u64,
    cursor: LogCursor<'a>,
    start: StoreStart,
    table: LogSegmentTable,
    settled: Settled,
    /// The first image of a split, until the second one comes.
    held: Option<QueuedStep>,
    images: u64,
    damaged: u64,
    rejected: u64,
    is_lost: bool,
    is_end_certain: bool,
}

impl StoreReplay<'_> {
    /// Walks to the end of the log and settles what is known to be durable on the way, then the rest.
    async fn run(&mut self, queue_max: usize) -> Result<(), OpenError> {
        let mut queue: VecDeque<QueuedStep> = VecDeque::new();
        // Whether the queue was too long: its images are read again.
        let mut is_overfull = false;
        loop {
            match self.cursor.next().await? {
                CursorStep::Image(step, _) if !is_overfull => queue.push_back((step, self.cursor.position())),
                CursorStep::Image(..) => {}
                CursorStep::Gap => {
                    // What is before a gap is proven to be durable, and what is behind it changes nothing for the worse.
                    self.is_lost = true;
                    queue.drain(..).try_for_each(|step| self.settle(step))?;
                }
                CursorStep::End { is_certain } => {
                    self.is_end_certain = is_certain;
                    break;
                }
            }
            let durable = if self.is_lost { u64::MAX } else { self.cursor.durable_through() };
            while queue.front().is_some_and(|(step, _)| step.state.sequence <= durable) {
                let step = queue.pop_front().expect("a front");
                self.settle(step)?;
            }
            if queue.len() > queue_max {
                is_overfull = true;
                queue.clear();
            }
        }
        let end = self.cursor.position().expected.sequence;
        if !self.is_lost {
            self.settle_rest(end).await?;
        }
        Ok(())
    }

    /// Reads the images from the first that is not settled to before `end` again, and settles them as long as their values are there.
    async fn settle_rest(&mut self, end: u64) -> Result<(), OpenError> {
        self.held = None;
        self.cursor.go_back(self.settled.position);
        let durable = self.cursor.durable_through();
        while self.cursor.position().expected.sequence < end {
            let CursorStep::Image(step, entries) = self.cursor.next().await? else {
                // What was read before is not there any more.
                self.is_lost = self.settled.last_sequence < durable;
                break;
            };
            let is_trusted = bug_injection::is_injected(InjectedBug::LogTrustTail);
            if step.state.sequence > durable && !is_trusted {
                let checker = ValueChecker {
                    reader: self.cursor.window().reader(),
                    layout: &self.layout,
                    volume_id: self.volume_id,
                    partition: self.start.partition,
                    values: self.cursor.values(),
                    proven: self.settled.proven,
                };
                if !checker.has_values(&entries).await {
                    break;
                }
            }
            self.settle((step, self.cursor.position()))?;
        }
        self.rejected = end - self.settled.position.expected.sequence;
        Ok(())
    }

    /// Takes over an image. The first one of a split waits for the second.
    fn settle(&mut self, (step, position): QueuedStep) -> Result<(), OpenError> {
        let state = &step.state;
        match self.held.take() {
            None if state.role == ImageRole::SplitFirst => {
                self.held = Some((step, position));
                Ok(())
            }
            None => {
                let is_behind_first = || {
                    // The first image may be the damaged one before.
                    let sibling =
                        state.depth.checked_sub(1).map(|bit| SegmentNumber(state.segment.0 ^ 1 << bit));
                    self.settled.headless.is_some_and(|headless| Some(headless) == sibling)
                };
                if state.role == ImageRole::SplitSecond && !is_behind_first() {
                    return self.contradiction(&step);
                }
                self.take_over(&step, state.depth, position)
            }
            Some((first, first_position)) => {
                let depth = first.state.depth;
                let sibling = SegmentNumber(first.state.segment.0 | 1 << (depth - 1));
                let is_second =
                    !step.has_head || state.role == ImageRole::SplitSecond && state.depth == depth;
                if !is_second || state.segment != sibling {
                    return self.contradiction(&step);
                }
                self.take_over(&first, depth, first_position)?;
                self.take_over(&step, depth, position)
            }
        }
    }

    fn take_over(&mut self, step: &LogStep, depth: u8, position: CursorPosition) -> Result<(), OpenError> {
        let state = &step.state;
        if state.role != ImageRole::Marker && !self.set_segment(step, depth) {
            return self.contradiction(step);
        }
        self.images += 1;
        self.damaged += u64::from(step.is_damaged);
        let is_durable = state.sequence <= self.cursor.durable_through();
        self.settled.pass(step, position, is_durable);
        Ok(())
    }

    /// Sets the place of a segment, which a depth of 0 need not be that of: an image without a header has none. False if there is no such
    /// segment, or the table would be longer than a checkpoint.
    fn set_segment(&mut self, step: &LogStep, depth: u8) -> bool {
        let segment = step.state.segment;
        if step.has_head || depth > 0 {
            let Some(level) = HashLevel::with_segment(segment, depth) else { return false };
            let table_bytes_max = self.layout.area_units.saturating_mul(self.layout.unit_bytes.into());
            if level.segments() > self.table.segments() {
                if level.segments() * SEGMENT_REF_BYTES as u64 > table_bytes_max {
                    return false;
                }
                self.table.grow_to(level);
            }
            if self.table.level().depth_of(segment) != depth {
                return false;
            }
        } else if u64::from(segment.0) >= self.table.segments() {
            return false;
        }
        let unit = self.layout.unit_of(step.at.chunk, step.at.unit);
        self.table.set(segment, SegmentRef::new(unit, step.chain));
        true
    }

    /// An image that contradicts those before: in a lost store it is left out.
    fn contradiction(&mut self, step: &LogStep) -> Result<(), OpenError> {
        if self.is_lost {
            return Ok(());
        }
        let unit = self.layout.unit_of(step.at.chunk, step.at.unit);
        let lba = self.cursor.window().reader().lba(unit).0;
        let mismatch = IndexMismatch::LogImage { sequence: step.state.sequence };
        Err(OpenError::Inconsistent { lba, mismatch })
    }

    fn finish(self) -> ReplayedStore {
        let StoreReplay { layout, cursor, start, table, settled, images, damaged, rejected, is_lost, .. } =
            self;
        let tail = settled.position.expected.at;
        let known = |chunks: &KnownChunks, from: ChunkIndex, through: ChunkIndex| -> Vec<ChunkNumber> {
            let end = ChunkIndex(through.0.saturating_add(1));
            chunks.between(from, end).map(|(_, chunk)| chunk).collect()
        };
        let keys = RecoveredLog {
            head: settled.key_head,
            chunks: known(cursor.keys(), settled.key_head, tail.index),
            tail_unit: tail.unit,
            next: cursor.keys().behind(tail.index).map(|(_, chunk)| chunk),
        };
        let value_index = settled.value_tail.index;
        // The last unit may have been cut short, and is not in memory: the tail goes on in the next one.
        let value_unit = settled.value_tail.granule.div_ceil(layout.unit_granules());
        let values = RecoveredLog {
            head: settled.value_head,
            chunks: known(cursor.values(), settled.value_head, value_index),
            tail_unit: value_unit,
            next: cursor.values().behind(value_index).map(|(_, chunk)| chunk),
        };
        let retired = cursor.keys().between(start.replay.index, settled.key_head);
        let durable_through = cursor.durable_through().min(settled.last_sequence);
        let is_proven = durable_through == settled.last_sequence && self.is_end_certain;
        let was_lost = start.durable_through == LOST_STORE_DURABLE_THROUGH;
        ReplayedStore {
            partition: start.partition,
            range: start.range,
            table,
            retired: retired.map(|(index, chunk)| RetiredChunk { index, chunk }).collect(),
            keys,
            values,
            pinned: start.pinned,
            value_uses: (start.is_counted && images == 0).then_some(start.value_chunks),
            value_tail: ValueTailPlace { index: value_index, granule: value_unit * layout.unit_granules() },
            totals: settled.totals,
            last_sequence: settled.last_sequence,
            previous: settled.previous,
            durable_through,
            images,
            rejected,
            damaged,
            needs_checkpoint: !is_proven || damaged > 0 || rejected > 0 || is_lost && !was_lost,
            is_lost,
        }
    }
}
