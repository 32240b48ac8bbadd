//! The bytes of a value tail that are not written yet: pieces of the device, each in one buffer.
//!
//! ```text
//!   a write took ▓, padded         kept ▒: the bytes of its last unit        next piece: the kept bytes, then new ones
//!   │▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓│▓▓▓▓0000│            │▒▒▒▒                              │▒▒▒▒▓▓▓▓│▓▓
//! ```
//! In: spans of bytes of the device, in the order in which they were given out. Out: writes of whole units, in the same order.
//! A piece that no writer waits for any more is written with the next record, if one comes.
//! Invariants: a piece begins at a unit and has at most [`TAIL_WRITE_BYTES_MAX`]; no two pending pieces share a unit; taking pieces needs no
//! memory of the buffer pool, and spans that it has no memory for change nothing.
//! Tested in `value_tail_tests.rs`.

use super::segment_buckets::ValueTailPlace;
use crate::bug_injection::{self, InjectedBug};
use octokv_base::{Buffer, BufferPool};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ops::Range;

/// The most bytes of a write of a tail.
pub const TAIL_WRITE_BYTES_MAX: usize = 1 << 20;

/// The writes of a leader, of which no two meet in a unit. One, unless a chunk ends in them.
pub type TailWrites = SmallVec<[TailWrite; 1]>;

/// A write of a tail.
#[derive(Debug)]
pub struct TailWrite {
    /// The unit of the device at which it begins.
    pub unit: u64,
    /// Whole units.
    pub bytes: Buffer,
}

/// Bytes of the device that are due to be written.
#[derive(Clone, Debug)]
pub(super) struct TailSpan {
    /// In bytes from the start of the device.
    pub at: Range<u64>,
    /// Where it begins in the log, in granules; of what lies behind the records of a chunk, where these end.
    pub from: ValueTailPlace,
}

/// Adjacent bytes that are not written.
#[derive(Debug)]
struct TailPiece {
    /// Pieces are numbered in order.
    number: u64,
    /// The byte of the device at which it begins, which begins a unit.
    start: u64,
    bytes: Buffer,
    /// The first granule that is not written.
    unwritten_from: ValueTailPlace,
}

impl TailPiece {
    fn end(&self) -> u64 {
        self.start + self.bytes.len() as u64
    }
}

/// The bytes of the last, partly filled unit, which were written.
#[derive(Debug, Default)]
struct KeptUnit {
    start: u64,
    /// Fewer than a unit; none if the next record begins elsewhere.
    bytes: Vec<u8>,
}

/// A piece as it will be, with the memory for it.
struct PlannedPiece {
    origin: PieceOrigin,
    start: u64,
    end: u64,
    unwritten_from: ValueTailPlace,
    /// What no span covers.
    gaps: SmallVec<[Range<u64>; 1]>,
    /// `None` if the buffer of the open piece has room.
    bytes: Option<Buffer>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum PieceOrigin {
    /// The last pending piece.
    Open,
    /// The kept unit.
    Kept,
    New,
}

/// Memory for spans.
pub(super) struct PreparedPieces(SmallVec<[PlannedPiece; 2]>);

/// Pieces that left to be written.
pub(super) struct TakenPieces {
    pub writes: TailWrites,
    /// Their numbers.
    pub numbers: Range<u64>,
    /// The byte at which a unit begins that they leave partly filled, if the next record may be written into it.
    pub partial_unit: Option<u64>,
}

/// The pieces of a tail.
#[derive(Debug)]
pub(super) struct TailPieces {
    unit_bytes: u64,
    pending: VecDeque<TailPiece>,
    next_number: u64,
    kept: KeptUnit,
}

impl TailPieces {
    /// Nothing is pending.
    pub fn new(unit_bytes: u32) -> TailPieces {
        let kept = KeptUnit::default();
        TailPieces { unit_bytes: unit_bytes.into(), pending: VecDeque::new(), next_number: 0, kept }
    }

    /// The number of the first pending piece, or the next one.
    pub fn first_number(&self) -> u64 {
        self.pending.front().map_or(self.next_number, |piece| piece.number)
    }

    /// The first granule that no write has taken; `None` if nothing is pending.
    pub fn unwritten_from(&self) -> Option<ValueTailPlace> {
        self.pending.front().map(|piece| piece.unwritten_from)
    }

    /// The pending piece of a byte of the device.
    ///
    /// # Panics
    /// If it is not pending.
    pub fn number_of(&self, at: u64) -> u64 {
        self.pending[self.index_of(at)].number
    }

    fn index_of(&self, at: u64) -> usize {
        let has = |piece: &TailPiece| (piece.start..piece.end()).contains(&at);
        self.pending.iter().rposition(has).expect("it is in a pending piece")
    }

    fn unit_floor(&self, at: u64) -> u64 {
        at & !(self.unit_bytes - 1)
    }

    fn unit_ceil(&self, at: u64) -> u64 {
        at.next_multiple_of(self.unit_bytes)
    }

    /// Memory for spans behind what is pending; `None`, and nothing has changed, if the pool has not enough.
    pub fn prepare(&self, spans: &[TailSpan], buffers: &BufferPool) -> Option<PreparedPieces> {
        let mut planned = self.plan(spans);
        for piece in &mut planned {
            let need = (self.unit_ceil(piece.end) - piece.start) as usize;
            let has = match piece.origin {
                PieceOrigin::Open => self.pending.back().map_or(0, |open| open.bytes.capacity()),
                PieceOrigin::Kept | PieceOrigin::New => 0,
            };
            if need > has {
                // Doubled, so that a piece of many records is copied once on average.
                piece.bytes = Some(buffers.take(need.max((2 * has).min(TAIL_WRITE_BYTES_MAX)))?);
            }
        }
        Some(PreparedPieces(planned))
    }

    /// The pieces that spans change or need.
    fn plan(&self, spans: &[TailSpan]) -> SmallVec<[PlannedPiece; 2]> {
        let piece = |origin, start, end, unwritten_from| PlannedPiece {
            origin,
            start,
            end,
            unwritten_from,
            gaps: SmallVec::new(),
            bytes: None,
        };
        let mut planned: SmallVec<[PlannedPiece; 2]> = SmallVec::new();
        let Some(first) = spans.first() else { return planned };
        if let Some(open) = self.pending.back() {
            planned.push(piece(PieceOrigin::Open, open.start, open.end(), open.unwritten_from));
        } else if !self.kept.bytes.is_empty() {
            let end = self.kept.start + self.kept.bytes.len() as u64;
            planned.push(piece(PieceOrigin::Kept, self.kept.start, end, first.from));
        }
        let old_ends = planned.first().map(|piece| piece.end);
        for span in spans {
            let mut at = span.at.start;
            while at < span.at.end {
                let limit = |piece: &PlannedPiece| piece.start + TAIL_WRITE_BYTES_MAX as u64;
                let joins = |piece: &PlannedPiece| {
                    (piece.end..=self.unit_ceil(piece.end)).contains(&at) && at < limit(piece)
                };
                if !planned.last().is_some_and(joins) {
                    let start = self.unit_floor(at);
                    planned.push(piece(PieceOrigin::New, start, start, span.from));
                }
                let last = planned.last_mut().expect("one was added");
                if at > last.end {
                    last.gaps.push(last.end..at);
                }
                last.end = span.at.end.min(limit(last));
                at = last.end;
            }
        }
        // The kept unit, or the open piece, may end where it is.
        if planned.first().map(|piece| piece.end) == old_ends
            && planned.first().is_some_and(|piece| piece.origin != PieceOrigin::New)
        {
            planned.remove(0);
        }
        planned
    }

    /// Takes the memory for spans over. Their bytes have to be written to it; what is between them is zero.
    pub fn commit(&mut self, prepared: PreparedPieces) {
        let mut kept = std::mem::take(&mut self.kept);
        for planned in prepared.0 {
            let length = (planned.end - planned.start) as usize;
            if planned.origin != PieceOrigin::Open {
                let mut bytes = planned.bytes.expect("a new piece has a new buffer");
                bytes.set_len(length);
                if planned.origin == PieceOrigin::Kept {
                    if bug_injection::is_injected(InjectedBug::LogTailForgetsPrefix) {
                        kept.bytes.fill(0);
                    }
                    bytes[..kept.bytes.len()].copy_from_slice(&kept.bytes);
                }
                let number = self.next_number;
                self.next_number += 1;
                let (start, unwritten_from) = (planned.start, planned.unwritten_from);
                self.pending.push_back(TailPiece { number, start, bytes, unwritten_from });
            } else {
                let open = self.pending.back_mut().expect("it was open");
                if let Some(mut bytes) = planned.bytes {
                    bytes.set_len(length);
                    bytes[..open.bytes.len()].copy_from_slice(&open.bytes);
                    open.bytes = bytes;
                }
                open.bytes.set_len(length);
            }
            let open = self.pending.back_mut().expect("one was added");
            for gap in planned.gaps {
                open.bytes[(gap.start - open.start) as usize..(gap.end - open.start) as usize].fill(0);
            }
        }
        // Its memory is used again.
        kept.bytes.clear();
        self.kept = kept;
    }

    /// The bytes of a committed span, if one piece has them all.
    pub fn slice_mut(&mut self, at: &Range<u64>) -> Option<&mut [u8]> {
        let index = self.index_of(at.start);
        let piece = &mut self.pending[index];
        let start = piece.start;
        piece.bytes.get_mut((at.start - start) as usize..(at.end - start) as usize)
    }

    /// Writes to a committed span.
    pub fn write_at(&mut self, mut at: u64, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let index = self.index_of(at);
            let piece = &mut self.pending[index];
            let count = bytes.len().min((piece.end() - at) as usize);
            let within = (at - piece.start) as usize;
            piece.bytes[within..within + count].copy_from_slice(&bytes[..count]);
            (at, bytes) = (at + count as u64, &bytes[count..]);
        }
    }

    /// Writes bytes of a record to the committed spans that it lies in, from an offset in it on.
    pub fn write_to_spans(&mut self, spans: &[TailSpan], mut offset: usize, mut bytes: &[u8]) {
        for span in spans {
            let span_bytes = (span.at.end - span.at.start) as usize;
            if offset >= span_bytes {
                offset -= span_bytes;
                continue;
            }
            let count = bytes.len().min(span_bytes - offset);
            self.write_at(span.at.start + offset as u64, &bytes[..count]);
            (offset, bytes) = (0, &bytes[count..]);
            if bytes.is_empty() {
                return;
            }
        }
        assert!(bytes.is_empty(), "a record longer than its space");
    }

    /// Fills a committed span with zeros.
    pub fn clear(&mut self, at: &Range<u64>) {
        const ZEROS: [u8; 4096] = [0; 4096];
        let mut from = at.start;
        while from < at.end {
            let count = (at.end - from).min(ZEROS.len() as u64);
            self.write_at(from, &ZEROS[..count as usize]);
            from += count;
        }
    }

    /// Takes the first pieces, together at most [`TAIL_WRITE_BYTES_MAX`] unless it is one. With `keeps_unit` the bytes of the last unit stay,
    /// to be written again with what follows them.
    pub fn take(&mut self, keeps_unit: bool) -> TakenPieces {
        let (mut writes, mut bytes_max) = (TailWrites::new(), TAIL_WRITE_BYTES_MAX);
        let (first, mut end) = (self.first_number(), self.first_number());
        let mut partial_unit = None;
        while let Some(piece) = self.pending.front()
            && (writes.is_empty() || piece.bytes.len() <= bytes_max)
        {
            let mut piece = self.pending.pop_front().expect("it is the first");
            bytes_max = bytes_max.saturating_sub(piece.bytes.len());
            let (filled, whole) = (piece.bytes.len(), self.unit_ceil(piece.end()) - piece.start);
            if self.pending.is_empty() && whole > filled as u64 {
                let unit = self.unit_floor(piece.end());
                partial_unit = Some(unit);
                if keeps_unit {
                    self.kept.start = unit;
                    self.kept.bytes.clear();
                    self.kept.bytes.extend_from_slice(&piece.bytes[(unit - piece.start) as usize..]);
                }
            }
            piece.bytes.set_len(whole as usize);
            piece.bytes[filled..].fill(0);
            end = piece.number + 1;
            writes.push(TailWrite { unit: piece.start / self.unit_bytes, bytes: piece.bytes });
        }
        TakenPieces { writes, numbers: first..end, partial_unit }
    }

    /// Gives up a unit whose write failed: what was to follow in it is not written either. Gives the piece that had something there.
    pub fn give_up_unit(&mut self, unit: u64, unit_granules: u32) -> Option<u64> {
        if self.kept.start == unit {
            self.kept.bytes.clear();
        }
        let unit_bytes = self.unit_bytes as usize;
        let front = self.pending.front_mut().filter(|front| front.start == unit)?;
        let number = front.number;
        if front.bytes.len() <= unit_bytes {
            self.pending.pop_front();
        } else {
            front.bytes.copy_within(unit_bytes.., 0);
            front.bytes.set_len(front.bytes.len() - unit_bytes);
            front.start += self.unit_bytes;
            let granule = &mut front.unwritten_from.granule;
            *granule = granule.next_multiple_of(unit_granules);
        }
        Some(number)
    }

    /// Whether no bytes are due.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Copies all pending pieces to memory of their own, which frees their buffers of the pool.
    pub fn leave_pool(&mut self) {
        for piece in &mut self.pending {
            let mut bytes = Buffer::zeroed(piece.bytes.len());
            bytes.copy_from_slice(&piece.bytes);
            piece.bytes = bytes;
        }
    }
}
