//! The tail of a store's value log: records that were appended and not written yet, and the turns of their writers. No I/O.
//!
//! ```text
//!                       completed           in flight: one write         due: the next write
//!   │ record │ record │ record │ record │▓▓▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│▒▒▒▒▒▒▒│▒▒▒▒▒│ end            │ directory │
//!   ticket ─poll_turn─▶ Lead(writes) ─device─▶ finished ─▶ Written, Failed; the next waiter leads
//! ```
//! In: records, ends of writes. Out: places, writes, turns of waiters, wake-ups.
//!
//! A record goes where its chunk has room beside the directory. If it does not fit, it fills the chunk and goes on in the next one as extents; if less
//! than a chunk / [`CHUNK_END_DIVISOR`] is left, it begins in the next chunk. The directory of a chunk that was filled from its front follows its last
//! record. A chunk without one (it was open at a recovery, or a failed write left no room) gets zeros to its end, so that no directory of an earlier
//! opening is left there.
//!
//! Invariants:
//! - At most one write is in flight, and writes leave in the order of the records. The last, partly filled unit is written again behind the
//!   same bytes ([`ValueTailConfig::rewrites_tail`]), so whatever part of a write reaches the device, acknowledged records are as they were.
//! - After a failed write the tail goes on at the next unit. The records in that write fail, and those that were to follow in its last unit;
//!   their space is garbage.
//! - Memory of the buffer pool is held only while a write is in flight or a waiter may lead one.
//! - An append that fails changes nothing. A waiter that is dropped, or a leader, passes the lead on.
//!
//! Tested in `value_tail_tests.rs`, also against a model of the device's bytes.

use super::chunk_directory::{ChunkDirectory, DirectoryPlace, directory_bytes, encode_directory};
use super::chunk_log::ChunkLog;
use super::chunk_pool::ChunkPool;
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogPlace};
use super::segment_buckets::ValueTailPlace;
use super::segment_entry::{EXTENTS_MAX, ValueExtent, ValueExtents, ValuePlace};
use super::space_limits::{CHUNK_END_DIVISOR, ChunkPurpose};
pub use super::tail_pieces::{TAIL_WRITE_BYTES_MAX, TailWrite, TailWrites};
use super::tail_pieces::{TailPieces, TailSpan};
pub use super::tail_tickets::ValueTicket;
use super::tail_tickets::{GivenUpUnit, TailFailure, TailTickets, TicketTurn};
use super::value_record::{
    NewValueRecord, VALUE_PIECE_BYTES, ValueRecordPlace, encode_value_head, encode_value_record,
    record_granules, value_head_bytes,
};
use crate::common::waker_batch::WakerBatch;
use octokv_base::{BufferPool, Crc32c};
use octokv_device::DeviceError;
use smallvec::SmallVec;
use std::ops::Range;
use std::task::{Context, Poll};

/// What the tail of a store depends on.
#[derive(Clone, Copy, Debug)]
pub struct ValueTailConfig {
    /// The volume.
    pub volume_id: u64,
    /// The partition of the store.
    pub partition: u32,
    /// This opening of the volume.
    pub incarnation: u32,
    /// The layout of the volume.
    pub layout: LogLayout,
    /// Whether a unit is written again with more records behind the same bytes; otherwise each write is padded.
    pub rewrites_tail: bool,
}

/// Where an append takes chunks and memory from.
pub struct TailSpace<'a> {
    /// The value log of the tail's store.
    pub log: &'a mut ChunkLog,
    /// The chunks of the device.
    pub pool: &'a ChunkPool,
    /// The work that the record belongs to.
    pub purpose: ChunkPurpose,
    /// The memory of the caller's core.
    pub buffers: &'a BufferPool,
}

/// A record in the tail.
#[derive(Debug)]
pub struct TailRecord {
    /// Where it lies.
    pub place: ValuePlace,
    /// What its writer waits with.
    pub ticket: ValueTicket,
}

/// Why a record was not appended. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueAppendError {
    /// The pool has no chunks for this purpose for the whole record.
    NoChunks,
    /// The buffer pool has no memory for it.
    NoMemory,
}

/// The turn of a waiter.
#[derive(Debug)]
pub enum TailTurn {
    /// It leads: it begins these writes, together, and calls [`ValueTail::finished`] when all have ended, or
    /// [`ValueTail::lead_dropped`] if it is dropped before that. Then it polls again.
    Lead(TailWrites),
    /// Its record is written.
    Written,
    /// A write with a part of its record failed.
    Failed(DeviceError),
    /// A leader was dropped whose write has a part of its record. It may append the record again.
    Interrupted,
}

/// The write in flight.
#[derive(Debug)]
struct TailFlight {
    /// The numbers of its pieces.
    pieces: Range<u64>,
    /// The unit of its end, in bytes, if later records are written there, too.
    shared_unit: Option<u64>,
}

/// The chunk at the end of the log.
#[derive(Debug)]
struct TailChunk {
    index: ChunkIndex,
    number: ChunkNumber,
    /// The first granule behind its records.
    granule: u32,
    /// The ids of its records, for the directory; `None` if it gets none.
    ids: Option<Vec<u32>>,
    /// Whether its directory is written or due: nothing follows.
    is_closed: bool,
}

/// A part of a record, and in which chunk it lies: 0 the last one of the log, 1 the next.
struct PlannedExtent {
    chunk: u32,
    granule: u32,
    granules: u32,
}

/// What lies behind the records of a chunk.
struct ChunkEnd {
    span: TailSpan,
    /// `None`: zeros.
    directory: Option<(DirectoryPlace, ChunkDirectory)>,
}

/// Ends of chunks, each with the number of its chunk as extents have it.
type ChunkEnds = SmallVec<[(u32, ChunkEnd); 1]>;

/// The tail of a store's value log.
#[derive(Debug)]
pub struct ValueTail {
    config: ValueTailConfig,
    chunk: TailChunk,
    pieces: TailPieces,
    flight: Option<TailFlight>,
    completed: ValueTailPlace,
    tickets: TailTickets,
}

impl ValueTail {
    /// The tail of a log that goes on at a place: the tail of its [`ChunkLog`]. Behind the front of a chunk it is that of a recovered log: the
    /// chunk gets no directory, as the ids of its earlier records are unknown.
    pub fn new(config: ValueTailConfig, start: LogPlace) -> ValueTail {
        let granule = start.unit * config.layout.unit_granules();
        let ids = (start.unit == 0).then(Vec::new);
        ValueTail {
            chunk: TailChunk { index: start.index, number: start.chunk, granule, ids, is_closed: false },
            pieces: TailPieces::new(config.layout.unit_bytes),
            flight: None,
            completed: ValueTailPlace { index: start.index, granule },
            tickets: TailTickets::default(),
            config,
        }
    }

    /// Takes the space of a record and encodes it there: its write is due. `id` is that of its segment
    /// ([`super::hash_prefix::HashPrefix::id`]). REQUIRES: the caller holds the lock of the store's state and then that of the tail.
    ///
    /// # Errors
    /// [`ValueAppendError`].
    ///
    /// # Panics
    /// If the value is empty, longer than a volume of this layout takes, or has not so many bytes as the record says.
    pub fn append<'v>(
        &mut self,
        record: &NewValueRecord<'_>,
        value: impl Iterator<Item = &'v [u8]>,
        id: u32,
        space: TailSpace<'_>,
    ) -> Result<TailRecord, ValueAppendError> {
        let TailSpace { log, pool, purpose, buffers } = space;
        let granules =
            record_granules(record.key.len(), record.value_bytes, &record.meta, self.granule_log2());
        assert!(granules > 0, "an empty value has no record");
        let extents = self.plan(granules);
        let hops = extents.last().map_or(0, |extent| extent.chunk);
        if !log.has_indices(hops) {
            return Err(ValueAppendError::NoChunks);
        }
        let reserved = reserve_chunks(hops, pool, purpose).ok_or(ValueAppendError::NoChunks)?;
        // The chunk behind the tail is reserved already.
        let chunks: SmallVec<[ChunkNumber; 2]> =
            [self.chunk.number, log.next_reserved()].into_iter().chain(reserved.iter().copied()).collect();
        let (spans, ends) = self.spans(&extents, &chunks, id);
        let all: SmallVec<[TailSpan; 4]> = in_order(&extents, &spans, &ends);
        let Some(prepared) = self.pieces.prepare(&all, buffers) else {
            reserved.into_iter().for_each(|chunk| pool.return_reserved(chunk));
            return Err(ValueAppendError::NoMemory);
        };
        self.pieces.commit(prepared);
        ends.iter().for_each(|(_, end)| self.encode_end(end));
        self.encode_record(record, value, &spans);
        self.advance(&extents, id, reserved, log, pool);
        self.chunk.is_closed = ends.iter().any(|&(chunk, _)| chunk == hops);
        let ticket = self.add_ticket(&spans);
        Ok(TailRecord { place: self.place_of(&extents, &chunks), ticket })
    }

    /// The turn of a record's writer. After any result but [`TailTurn::Lead`] the ticket has ended.
    ///
    /// # Panics
    /// If the ticket has ended.
    pub fn poll_turn(&mut self, ticket: &ValueTicket, context: &Context<'_>) -> Poll<TailTurn> {
        let (unwritten, may_lead) = (self.unwritten_piece(), self.flight.is_none());
        Poll::Ready(match self.tickets.poll(ticket, unwritten, may_lead, context) {
            TicketTurn::Lead => TailTurn::Lead(self.lead()),
            TicketTurn::Wait => return Poll::Pending,
            TicketTurn::Written => TailTurn::Written,
            TicketTurn::Failed(TailFailure::Device(error)) => TailTurn::Failed(error),
            TicketTurn::Failed(TailFailure::Interrupted) => TailTurn::Interrupted,
        })
    }

    /// Ends the wait of a writer that is dropped, and passes its turn on. Its record is written nevertheless, if a later one is. REQUIRES: it
    /// does not lead. A ticket that has ended may be forgotten.
    pub fn forget(&mut self, ticket: ValueTicket) -> WakerBatch {
        self.tickets.end(&ticket);
        self.leave_pool_unless_awaited();
        let mut wakers = WakerBatch::default();
        self.wake_next_leader(&mut wakers);
        wakers
    }

    /// Notes that all writes of the leader have ended, and how.
    ///
    /// # Panics
    /// If none are in flight.
    pub fn finished(&mut self, result: Result<(), DeviceError>) -> WakerBatch {
        self.end_flight(result.err().map(TailFailure::Device))
    }

    /// Notes that the leader was dropped before its writes had ended. REQUIRES: they end before their chunks are freed. No later record shares
    /// a unit with them.
    ///
    /// # Panics
    /// If none are in flight.
    pub fn lead_dropped(&mut self) -> WakerBatch {
        self.end_flight(Some(TailFailure::Interrupted))
    }

    /// Where records end whose writes are complete: every record that is [`TailTurn::Written`] lies in front of it. What an image states.
    pub fn completed(&self) -> ValueTailPlace {
        self.completed
    }

    /// Where the next record begins, if it fits there.
    pub fn end(&self) -> ValueTailPlace {
        ValueTailPlace { index: self.chunk.index, granule: self.chunk.granule }
    }

    /// The chunks that a record of so many granules takes behind the one in which the log ends.
    pub fn chunks_of(&self, granules: u32) -> u32 {
        self.plan(granules).last().map_or(0, |extent| extent.chunk)
    }

    /// Whether no write is in flight.
    pub fn is_idle(&self) -> bool {
        self.flight.is_none()
    }

    fn granule_log2(&self) -> u8 {
        self.config.layout.granule_log2
    }

    fn directory_place(&self, index: ChunkIndex) -> DirectoryPlace {
        let ValueTailConfig { volume_id, partition, layout, .. } = self.config;
        let chunk_bytes = layout.chunk_bytes();
        DirectoryPlace { volume_id, partition, index, chunk_bytes, granule_log2: layout.granule_log2 }
    }

    /// The granules of the last chunk that a record may take.
    fn room(&self) -> u32 {
        match &self.chunk.ids {
            _ if self.chunk.is_closed => 0,
            Some(ids) => self.directory_place(self.chunk.index).free_granules(self.chunk.granule, ids.len()),
            None => self.config.layout.chunk_granules() - self.chunk.granule,
        }
    }

    /// Where a record of so many granules goes.
    fn plan(&self, granules: u32) -> SmallVec<[PlannedExtent; 2]> {
        let (mut extents, mut left) = (SmallVec::new(), granules);
        let (mut chunk, mut granule, mut room) = (0, self.chunk.granule, self.room());
        let fresh_room = self.directory_place(self.chunk.index).free_granules(0, 0);
        while left > 0 {
            let begins = left <= room || room >= self.config.layout.chunk_granules() / CHUNK_END_DIVISOR;
            if begins {
                let granules = left.min(room);
                extents.push(PlannedExtent { chunk, granule, granules });
                left -= granules;
            }
            (chunk, granule, room) = (chunk + 1, 0, fresh_room);
        }
        assert!(extents.len() <= EXTENTS_MAX, "a record of {granules} granules in {} extents", extents.len());
        extents
    }

    /// The bytes of the device that the extents take, and the ends of the chunks that they fill or leave, each with the number of its chunk as
    /// in the extents.
    fn spans(
        &self,
        extents: &[PlannedExtent],
        chunks: &[ChunkNumber],
        id: u32,
    ) -> (SmallVec<[TailSpan; 2]>, ChunkEnds) {
        let of_extent = |extent: &PlannedExtent| TailSpan {
            at: self.bytes_of(chunks[extent.chunk as usize], extent.granule, extent.granules),
            from: ValueTailPlace { index: self.index_of(extent.chunk), granule: extent.granule },
        };
        let last = extents.last().expect("a record has an extent");
        let end_of = |chunk: u32| -> Option<ChunkEnd> {
            let extent = extents.iter().find(|extent| extent.chunk == chunk);
            let (number, index) = (chunks[chunk as usize], self.index_of(chunk));
            let (mut granule, mut ids) = match chunk {
                0 if self.chunk.is_closed => return None,
                0 => (self.chunk.granule, self.chunk.ids.clone()),
                _ => (0, Some(Vec::new())),
            };
            if let Some(extent) = extent {
                granule = extent.granule + extent.granules;
                ids.iter_mut().for_each(|ids| ids.push(id));
            }
            Some(self.chunk_end(index, number, granule, ids))
        };
        let mut ends: ChunkEnds = (0..last.chunk).filter_map(|chunk| Some((chunk, end_of(chunk)?))).collect();
        if self.closes(last) {
            ends.extend(end_of(last.chunk).map(|end| (last.chunk, end)));
        }
        (extents.iter().map(of_extent).collect(), ends)
    }

    /// Whether padding behind the last extent of a record would meet the directory, which then has to be in the same write.
    fn closes(&self, last: &PlannedExtent) -> bool {
        let ids = match (last.chunk, &self.chunk.ids) {
            (0, None) => return false,
            (0, Some(ids)) => ids.len() + 1,
            _ => 1,
        };
        let layout = &self.config.layout;
        let padded = (last.granule + last.granules).next_multiple_of(layout.unit_granules());
        let data_bytes = (padded as usize) << layout.granule_log2;
        !self.config.rewrites_tail && data_bytes + directory_bytes(ids) > layout.chunk_bytes() as usize
    }

    /// The end of a chunk whose records end at a granule.
    fn chunk_end(
        &self,
        index: ChunkIndex,
        number: ChunkNumber,
        data_granules: u32,
        ids: Option<Vec<u32>>,
    ) -> ChunkEnd {
        let (place, layout) = (self.directory_place(index), &self.config.layout);
        let from = ValueTailPlace { index, granule: data_granules };
        let mut at = self.bytes_of(number, data_granules, layout.chunk_granules() - data_granules);
        let directory = ids.map(|ids| {
            at.start = at.end - directory_bytes(ids.len()) as u64;
            (place, ChunkDirectory { ids, data_granules, incarnation: self.config.incarnation })
        });
        ChunkEnd { span: TailSpan { at, from }, directory }
    }

    fn index_of(&self, chunk: u32) -> ChunkIndex {
        // The log has an index for each chunk of a record.
        ChunkIndex(self.chunk.index.0 + chunk)
    }

    /// The bytes of the device of granules of a chunk.
    fn bytes_of(&self, chunk: ChunkNumber, granule: u32, granules: u32) -> Range<u64> {
        let start = self.config.layout.granule_of(chunk, granule) << self.granule_log2();
        start..start + (u64::from(granules) << self.granule_log2())
    }

    fn encode_end(&mut self, end: &ChunkEnd) {
        let at = &end.span.at;
        match &end.directory {
            None => self.pieces.clear(at),
            Some((place, directory)) => match self.pieces.slice_mut(at) {
                Some(out) => encode_directory(out, directory, *place),
                None => {
                    let mut out = vec![0; directory_bytes(directory.ids.len())];
                    encode_directory(&mut out, directory, *place);
                    self.pieces.write_at(at.start, &out);
                }
            },
        }
    }

    fn encode_record<'v>(
        &mut self,
        record: &NewValueRecord<'_>,
        value: impl Iterator<Item = &'v [u8]>,
        spans: &[TailSpan],
    ) {
        let ValueTailConfig { volume_id, partition, .. } = self.config;
        let ValueTailPlace { index, granule } = spans[0].from;
        let place = ValueRecordPlace { volume_id, partition, index, granule };
        if spans.len() == 1
            && let Some(out) = self.pieces.slice_mut(&spans[0].at)
        {
            encode_value_record(out, record, value, place);
            return;
        }
        let head_bytes = value_head_bytes(record.key.len(), record.value_bytes, &record.meta);
        let value_bytes = record.value_bytes as usize;
        let (mut piece_crcs, mut crc, mut stored) = (Vec::new(), Crc32c::new(), 0);
        for mut part in value {
            assert!(part.len() <= value_bytes - stored, "a value of more than {value_bytes} bytes");
            while !part.is_empty() {
                let count = part.len().min(VALUE_PIECE_BYTES - stored % VALUE_PIECE_BYTES);
                crc.update(&part[..count]);
                self.pieces.write_to_spans(spans, head_bytes + stored, &part[..count]);
                stored += count;
                part = &part[count..];
                if stored % VALUE_PIECE_BYTES == 0 || stored == value_bytes {
                    piece_crcs.push(std::mem::replace(&mut crc, Crc32c::new()).finish());
                }
            }
        }
        assert_eq!(stored, value_bytes, "bytes of a value");
        let padding = [0; 1 << 5];
        let length = spans.iter().map(|span| (span.at.end - span.at.start) as usize).sum::<usize>();
        let end = head_bytes + value_bytes;
        self.pieces.write_to_spans(spans, end, &padding[..length - end]);
        let mut head = vec![0; head_bytes];
        encode_value_head(&mut head, record, &piece_crcs, place);
        self.pieces.write_to_spans(spans, 0, &head);
    }

    /// Moves the end of the log behind a record.
    fn advance(
        &mut self,
        extents: &[PlannedExtent],
        id: u32,
        reserved: SmallVec<[ChunkNumber; 2]>,
        log: &mut ChunkLog,
        pool: &ChunkPool,
    ) {
        for next in reserved {
            let place = log.hop_reserved(next, pool);
            let (index, number) = (place.index, place.chunk);
            self.chunk = TailChunk { index, number, granule: 0, ids: Some(Vec::new()), is_closed: false };
        }
        let last = extents.last().expect("a record has an extent");
        self.chunk.granule = last.granule + last.granules;
        self.chunk.ids.iter_mut().for_each(|ids| ids.push(id));
        let place = log.tail();
        assert_eq!((place.index, place.chunk), (self.chunk.index, self.chunk.number), "another log's tail");
        let units = self.chunk.granule.div_ceil(self.config.layout.unit_granules());
        if units > place.unit {
            log.append(units - place.unit, pool, ChunkPurpose::KeyCompaction)
                .expect("the chunk has room for it");
        }
    }

    fn place_of(&self, extents: &[PlannedExtent], chunks: &[ChunkNumber]) -> ValuePlace {
        let chunk_of = |extent: &PlannedExtent| chunks[extent.chunk as usize];
        let first = &extents[0];
        if extents.len() == 1 {
            return ValuePlace::Record(self.config.layout.granule_of(chunk_of(first), first.granule));
        }
        let extent =
            |extent: &PlannedExtent| ValueExtent { chunk: chunk_of(extent), granules: extent.granules };
        let first_granule = first.granule;
        ValuePlace::Extents(ValueExtents { first_granule, extents: extents.iter().map(extent).collect() })
    }

    fn add_ticket(&mut self, spans: &[TailSpan]) -> ValueTicket {
        let start = spans[0].at.start;
        let last_byte = spans.last().expect("a record has an extent").at.end - 1;
        let pieces = self.pieces.number_of(start)..self.pieces.number_of(last_byte) + 1;
        self.tickets.add(start, pieces)
    }

    /// The first piece whose write has not ended.
    fn unwritten_piece(&self) -> u64 {
        self.flight.as_ref().map_or(self.pieces.first_number(), |flight| flight.pieces.start)
    }

    /// Begins a write.
    fn lead(&mut self) -> TailWrites {
        let taken = self.pieces.take(self.config.rewrites_tail);
        assert!(!taken.writes.is_empty(), "a record that is not written is pending");
        if !self.config.rewrites_tail && taken.partial_unit.is_some() {
            self.go_on_at_next_unit();
        }
        let shared_unit = taken.partial_unit.filter(|_| self.config.rewrites_tail);
        self.flight = Some(TailFlight { pieces: taken.numbers, shared_unit });
        taken.writes
    }

    /// Leaves the rest of the last unit empty.
    fn go_on_at_next_unit(&mut self) {
        let layout = &self.config.layout;
        let granule = self.chunk.granule.next_multiple_of(layout.unit_granules());
        let (data_bytes, chunk_bytes) =
            ((granule as usize) << layout.granule_log2, layout.chunk_bytes() as usize);
        let chunk = &mut self.chunk;
        if chunk.is_closed {
            return;
        }
        chunk.granule = granule;
        // Where the directory had to begin is no place for it any more.
        chunk.ids = chunk.ids.take().filter(|ids| data_bytes + directory_bytes(ids.len()) <= chunk_bytes);
    }

    fn end_flight(&mut self, failure: Option<TailFailure>) -> WakerBatch {
        let flight = self.flight.take().expect("a write is in flight");
        let mut wakers = WakerBatch::default();
        if let Some(failure) = failure {
            self.fail(&flight, failure, &mut wakers);
        }
        self.leave_pool_unless_awaited();
        self.completed = self.pieces.unwritten_from().unwrap_or(self.end());
        self.tickets.wake_written(self.unwritten_piece(), &mut wakers);
        self.wake_next_leader(&mut wakers);
        wakers
    }

    /// Fails the records of a write, and those that were to follow in its last unit.
    fn fail(&mut self, flight: &TailFlight, failure: TailFailure, wakers: &mut WakerBatch) {
        let unit_bytes = u64::from(self.config.layout.unit_bytes);
        let mut given_up = None;
        if let Some(unit) = flight.shared_unit {
            let piece = self.pieces.give_up_unit(unit, self.config.layout.unit_granules());
            given_up = piece.map(|piece| GivenUpUnit { piece, end: unit + unit_bytes });
            let end = self.bytes_of(self.chunk.number, self.chunk.granule, 0).start;
            if (unit + 1..unit + unit_bytes).contains(&end) {
                self.go_on_at_next_unit();
            }
        }
        self.tickets.fail(&flight.pieces, given_up, failure, wakers);
    }

    /// Frees the buffers of pending pieces that no writer waits for. They are written with the next record, which may never come.
    fn leave_pool_unless_awaited(&mut self) {
        let is_awaited = self.flight.is_some() || self.tickets.has_unwritten(self.unwritten_piece());
        if !self.pieces.is_empty() && !is_awaited {
            self.pieces.leave_pool();
        }
    }

    /// The waker of the first waiter that could lead, if no write is in flight.
    fn wake_next_leader(&mut self, wakers: &mut WakerBatch) {
        if self.flight.is_none() {
            self.tickets.wake_leader(self.unwritten_piece(), wakers);
        }
    }
}

/// Chunks for so many hops; `None`, and none is taken, if the pool has not enough for the purpose.
fn reserve_chunks(hops: u32, pool: &ChunkPool, purpose: ChunkPurpose) -> Option<SmallVec<[ChunkNumber; 2]>> {
    let mut reserved = SmallVec::new();
    for _ in 0..hops {
        let Some(chunk) = pool.reserve(purpose) else {
            reserved.into_iter().for_each(|chunk| pool.return_reserved(chunk));
            return None;
        };
        reserved.push(chunk);
    }
    Some(reserved)
}

/// The spans of a record and of the ends of chunks, as they follow one another in the log.
fn in_order(
    extents: &[PlannedExtent],
    spans: &[TailSpan],
    ends: &[(u32, ChunkEnd)],
) -> SmallVec<[TailSpan; 4]> {
    let mut ends = ends.iter().peekable();
    let mut all = SmallVec::new();
    for (extent, span) in extents.iter().zip(spans) {
        while let Some((_, end)) = ends.next_if(|(chunk, _)| *chunk < extent.chunk) {
            all.push(end.span.clone());
        }
        all.push(span.clone());
    }
    all.extend(ends.map(|(_, end)| end.span.clone()));
    all
}
