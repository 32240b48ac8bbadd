//! One request on a namespace of blocks, carried out by a device (NVM Command Set 1.1).
//!
//! In: an operation whose range the target has checked. Out: exactly one outcome. The namespace's block may be
//! smaller or larger than the device's; where a write covers a part of a device's block, that block is read,
//! patched and written, alone on it.
//! Invariants: a write that is to be durable is answered after a flush that began when it was on the device; no
//! operation touches a byte outside its range, whatever runs beside it.

use crate::bug_injection::{self, Bug};
use crate::kv_backend::take_buffer;
use crate::range_locks::{Held, RangeLocks};
use octokv_base::{Buffer, Lba, Pool};
use octokv_device::{Device, DeviceError};
use octokv_nvmf::{Operation, Outcome, Range};
use octokv_runtime::Handle;
use std::rc::Rc;
use std::sync::Arc;

/// How much is zeroed, verified or compared at a time, in bytes.
const PIECE_BYTES: usize = 256 << 10;

/// What all cores share of a namespace of blocks.
pub struct BlockVolume {
    /// Bytes of the namespace's block.
    block_bytes: u32,
    /// How many blocks it has.
    blocks: u64,
    /// Blocks of the device that are being written, where its block is larger than the namespace's.
    writing: RangeLocks,
}

impl BlockVolume {
    /// Blocks of `block_bytes` on a device of `device_bytes`; what is left at its end is not used.
    pub fn new(block_bytes: u32, device_bytes: u64) -> Arc<BlockVolume> {
        let blocks = device_bytes / u64::from(block_bytes);
        Arc::new(BlockVolume { block_bytes, blocks, writing: RangeLocks::default() })
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Its size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }
}

/// One core's way to a namespace of blocks.
pub struct Blocks {
    /// What the cores share.
    pub volume: Arc<BlockVolume>,
    /// This core's view of the device.
    pub device: Rc<dyn Device>,
    /// The core's buffers.
    pub pool: Pool,
    /// The core's time.
    pub handle: Handle,
    /// What the device is called in messages.
    pub name: Rc<str>,
}

/// Bytes of the namespace, and the blocks of the device that hold them.
#[derive(Clone, Copy)]
struct Span {
    from: u64,
    bytes: u64,
    unit: u64,
}

impl Span {
    /// The first block of the device.
    fn first(self) -> u64 {
        self.from / self.unit
    }
    /// The block of the device behind the last.
    fn end(self) -> u64 {
        (self.from + self.bytes).div_ceil(self.unit)
    }
    /// Where the bytes begin in the device's blocks.
    fn offset(self) -> usize {
        (self.from % self.unit) as usize
    }
    /// How many bytes the device's blocks have.
    fn device_bytes(self) -> usize {
        ((self.end() - self.first()) * self.unit) as usize
    }
    fn is_whole(self) -> bool {
        self.from.is_multiple_of(self.unit) && self.bytes.is_multiple_of(self.unit)
    }
    /// The pieces of it, of at most so many bytes each, in order.
    fn pieces(self, most: u64) -> impl Iterator<Item = Span> {
        let starts = (self.from..self.from + self.bytes).step_by(most as usize);
        starts.map(move |from| Span { from, bytes: most.min(self.from + self.bytes - from), ..self })
    }
}

impl Blocks {
    /// Carries an operation out.
    pub async fn perform(&self, operation: Operation) -> Outcome {
        let done = match operation {
            Operation::Read { range } => self.read(range).await,
            Operation::Write { lba, data, force_unit_access } => {
                self.write(lba, data, force_unit_access).await
            }
            Operation::Compare { lba, data } => self.compare(lba, &data).await,
            Operation::WriteZeroes { range, force_unit_access, .. } => {
                self.write_zeroes(range, force_unit_access).await
            }
            Operation::Deallocate { ranges } => self.deallocate(&ranges).await,
            Operation::Verify { range } => self.verify(range).await,
            Operation::Flush => self.flush("flush").await.map(|()| Outcome::Flushed),
            Operation::Store { .. }
            | Operation::Retrieve { .. }
            | Operation::Delete { .. }
            | Operation::Exist { .. }
            | Operation::List { .. } => {
                unreachable!("the target dispatches on the namespace's command set")
            }
        };
        done.unwrap_or_else(|outcome| outcome)
    }

    fn span(&self, lba: Lba, bytes: u64) -> Span {
        let unit = u64::from(self.device.geometry().block_bytes);
        Span { from: lba.0 * u64::from(self.volume.block_bytes), bytes, unit }
    }

    fn span_of(&self, range: Range) -> Span {
        self.span(range.lba, u64::from(range.blocks) * u64::from(self.volume.block_bytes))
    }

    async fn read(&self, range: Range) -> Result<Outcome, Outcome> {
        let span = self.span_of(range);
        let mut buffer = self.load(span, "read").await?;
        if !span.is_whole() {
            let (from, bytes) = (span.offset(), span.bytes as usize);
            buffer.copy_within(from..from + bytes, 0);
            buffer.set_len(bytes);
        }
        Ok(Outcome::Blocks { buffer })
    }

    /// The device's blocks that hold a span.
    async fn load(&self, span: Span, command: &'static str) -> Result<Buffer, Outcome> {
        let buffer = self.buffer(span.device_bytes()).await?;
        let done = self.device.read(Lba(span.first()), buffer).await;
        done.into_read().map_err(|error| self.failed(command, span, error, Outcome::Unrecovered))
    }

    async fn write(&self, lba: Lba, data: Buffer, durable: bool) -> Result<Outcome, Outcome> {
        let span = self.span(lba, data.len() as u64);
        self.put(span, data, "write").await?;
        self.written(durable).await
    }

    /// Waits until nobody patches these blocks of the device, where that can be.
    async fn alone_on(&self, blocks: std::ops::Range<u64>) -> Option<Held<'_>> {
        let smaller = self.volume.block_bytes < self.device.geometry().block_bytes;
        if smaller { Some(self.volume.writing.lock(blocks).await) } else { None }
    }

    /// Puts the bytes of a span, at the start of `data`, on the device.
    async fn put(&self, span: Span, data: Buffer, command: &'static str) -> Result<Buffer, Outcome> {
        let unlocked = bug_injection::is(Bug::SkipRangeLock)
            || (bug_injection::is(Bug::ZeroWithoutLock) && command == "write zeroes");
        let mut held = if unlocked { None } else { self.alone_on(span.first()..span.end()).await };
        let data = if span.is_whole() {
            data
        } else {
            let mut patched = self.load(span, command).await?;
            patched[span.offset()..span.offset() + data.len()].copy_from_slice(&data);
            patched
        };
        if bug_injection::is(Bug::UnlockEarly) {
            held = None;
        }
        let done = self.device.write(Lba(span.first()), data).await;
        drop(held);
        match (done.result, done.buffer) {
            (Ok(()), Some(buffer)) => Ok(buffer),
            (Ok(()), None) => unreachable!("a write gives its buffer back"),
            (Err(error), _) => Err(self.failed(command, span, error, Outcome::WriteFault)),
        }
    }

    async fn written(&self, durable: bool) -> Result<Outcome, Outcome> {
        if durable && !bug_injection::is(Bug::AnswerDurableEarly) {
            self.flush("flush behind a write").await?;
        }
        Ok(Outcome::Written)
    }

    async fn flush(&self, command: &'static str) -> Result<(), Outcome> {
        if bug_injection::is(Bug::SkipFlush) && command == "flush" {
            return Ok(());
        }
        let done = self.device.flush().await;
        done.result.map_err(|error| self.failed(command, self.span(Lba(0), 0), error, Outcome::WriteFault))
    }

    async fn compare(&self, lba: Lba, data: &[u8]) -> Result<Outcome, Outcome> {
        let span = self.span(lba, data.len() as u64);
        let there = self.load(span, "compare").await?;
        let same = there[span.offset()..span.offset() + data.len()] == *data;
        Ok(if same { Outcome::Verified } else { Outcome::Different })
    }

    async fn write_zeroes(&self, range: Range, durable: bool) -> Result<Outcome, Outcome> {
        let span = self.span_of(range);
        for piece in span.pieces(PIECE_BYTES as u64) {
            let mut zeros = self.buffer(piece.bytes as usize).await?;
            zeros.fill(0);
            self.put(piece, zeros, "write zeroes").await?;
        }
        self.written(durable).await
    }

    /// Gives back the device's blocks that lie wholly within the ranges. It is advice: what a device does not
    /// do, it does not do.
    async fn deallocate(&self, ranges: &[Range]) -> Result<Outcome, Outcome> {
        for &range in ranges {
            let span = self.span_of(range);
            let (mut first, mut end) = (span.from.div_ceil(span.unit), (span.from + span.bytes) / span.unit);
            if bug_injection::is(Bug::GiveBackTooMuch) {
                (first, end) = (span.first(), span.end());
            }
            if first < end {
                // Somebody who patches one of these blocks would put back what it held.
                let _held = match bug_injection::is(Bug::TrimWithoutLock) {
                    true => None,
                    false => self.alone_on(first..end).await,
                };
                let trim = self.device.trim(Lba(first), end - first);
                if bug_injection::is(Bug::AnswerTrimEarly) {
                    continue;
                }
                let done = trim.await;
                done.result.map_err(|error| self.failed("deallocate", span, error, Outcome::WriteFault))?;
            }
        }
        Ok(Outcome::Written)
    }

    async fn verify(&self, range: Range) -> Result<Outcome, Outcome> {
        for piece in self.span_of(range).pieces(PIECE_BYTES as u64) {
            self.load(piece, "verify").await?;
        }
        Ok(Outcome::Verified)
    }

    async fn buffer(&self, bytes: usize) -> Result<Buffer, Outcome> {
        take_buffer(&self.pool, &self.handle, bytes).await.ok_or(Outcome::Busy)
    }

    fn failed(&self, command: &'static str, span: Span, error: DeviceError, otherwise: Outcome) -> Outcome {
        let (device, first_byte) = (&*self.name, span.from);
        tracing::error!(command, first_byte, bytes = span.bytes, device, %error, "command failed");
        match error {
            DeviceError::NoSpace => Outcome::CapacityExceeded,
            DeviceError::Io(_) | DeviceError::OutOfRange => otherwise,
        }
    }
}
