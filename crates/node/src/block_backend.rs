//! Executes one request of a block namespace on a device (NVM Command Set 1.1).
//!
//! In: an operation whose range the target has checked. Out: exactly one outcome. The namespace's block may be
//! smaller or larger than the device's. A write that covers part of a device block reads, patches and writes the
//! whole device block under a range lock.
//!
//! Invariants: a write with Force Unit Access completes after a flush that began after the write completed on the
//! device; no operation changes a byte outside its range, whatever runs concurrently.

use crate::buffer_wait::wait_for_buffer;
use crate::bug_injection::{self, InjectedBug};
use crate::range_locks::{RangeGuard, RangeLocks};
use octokv_base::{Buffer, BufferPool, DataRef, Lba, Received};
use octokv_device::{Device, DeviceError, HeldBytes};
use octokv_nvmf::{LbaRange, RequestOperation, RequestOutcome};
use octokv_runtime::ReactorHandle;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes zeroed or verified per device operation.
const CHUNK_BYTES: usize = 256 << 10;

/// The part of a block namespace that its cores share.
pub struct BlockVolume {
    /// Block size of the namespace, in bytes.
    block_bytes: u32,
    /// Size of the namespace, in blocks of its own.
    blocks: u64,
    /// Device blocks under a partial write; used if the device's block is larger than the namespace's.
    write_locks: RangeLocks,
}

impl BlockVolume {
    /// A volume of `block_bytes`-byte blocks on a device of `device_bytes` bytes. A rest smaller than a block at the
    /// end is unused.
    pub fn new(block_bytes: u32, device_bytes: u64) -> Arc<BlockVolume> {
        let blocks = device_bytes / u64::from(block_bytes);
        Arc::new(BlockVolume { block_bytes, blocks, write_locks: RangeLocks::default() })
    }

    /// Block size in bytes.
    pub fn block_bytes(&self) -> u32 {
        self.block_bytes
    }

    /// Namespace size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }
}

/// One core's backend of a block namespace.
pub struct BlockBackend {
    /// The part that the cores share.
    pub volume: Arc<BlockVolume>,
    /// This core's view of the device.
    pub device: Rc<dyn Device>,
    /// The core's buffers.
    pub pool: BufferPool,
    /// The core's clock and timers.
    pub handle: ReactorHandle,
    /// The device's name in messages.
    pub device_name: Rc<str>,
    /// Binary logarithm of the size of a device block, and whether the device is memory: known here, since each read needs them.
    block_log2: u32,
    is_in_memory: bool,
}

/// A byte range of the namespace and the device blocks that hold it.
#[derive(Clone, Copy)]
struct ByteSpan {
    first_byte: u64,
    bytes: u64,
    /// Binary logarithm of the size of a device block in bytes: each read divides by it.
    block_log2: u32,
}

impl ByteSpan {
    /// First device block.
    fn first_block(self) -> u64 {
        self.first_byte >> self.block_log2
    }
    /// One past the last device block.
    fn end_block(self) -> u64 {
        (self.first_byte + self.bytes + self.block_mask()) >> self.block_log2
    }
    /// The bits of an offset within a device block.
    fn block_mask(self) -> u64 {
        (1 << self.block_log2) - 1
    }
    /// Offset of the range in its first device block, in bytes.
    fn offset_in_block(self) -> usize {
        (self.first_byte & self.block_mask()) as usize
    }
    /// Size of all its device blocks, in bytes.
    fn aligned_bytes(self) -> usize {
        let bytes = (self.first_byte & self.block_mask()) + self.bytes + self.block_mask();
        (bytes & !self.block_mask()) as usize
    }
    fn is_aligned(self) -> bool {
        (self.first_byte | self.bytes) & self.block_mask() == 0
    }
    /// Splits the range into chunks of at most `bytes_max` bytes, in ascending order.
    fn chunks(self, bytes_max: u64) -> impl Iterator<Item = ByteSpan> {
        let starts = (self.first_byte..self.first_byte + self.bytes).step_by(bytes_max as usize);
        starts.map(move |first_byte| ByteSpan {
            first_byte,
            bytes: bytes_max.min(self.first_byte + self.bytes - first_byte),
            ..self
        })
    }
}

impl BlockBackend {
    /// A backend of `volume` on this core's view of its device; messages name the device `device_name`.
    pub fn new(
        volume: Arc<BlockVolume>,
        device: Rc<dyn Device>,
        pool: BufferPool,
        handle: ReactorHandle,
        device_name: Rc<str>,
    ) -> BlockBackend {
        let geometry = device.geometry();
        let (block_log2, is_in_memory) = (geometry.block_bytes.trailing_zeros(), geometry.volatile);
        BlockBackend { volume, device, pool, handle, device_name, block_log2, is_in_memory }
    }

    /// Whether reads can be executed in the device's memory ([`BlockBackend::read_in_place`]).
    #[inline]
    pub fn is_in_memory(&self) -> bool {
        self.is_in_memory
    }

    /// Executes one operation.
    pub async fn execute(&self, operation: RequestOperation) -> RequestOutcome {
        let result = match operation {
            RequestOperation::Read { range } => self.read(range).await,
            RequestOperation::Write { lba, data, force_unit_access } => {
                self.write(lba, data, force_unit_access).await
            }
            RequestOperation::Compare { lba, data } => self.compare(lba, &data).await,
            RequestOperation::WriteZeroes { range, force_unit_access, .. } => {
                self.write_zeroes(range, force_unit_access).await
            }
            RequestOperation::Deallocate { ranges } => self.deallocate(&ranges).await,
            RequestOperation::Verify { range } => self.verify(range).await,
            RequestOperation::Flush => self.flush("flush").await.map(|()| RequestOutcome::Flushed),
            RequestOperation::Store { .. }
            | RequestOperation::Retrieve { .. }
            | RequestOperation::Delete { .. }
            | RequestOperation::Exist { .. }
            | RequestOperation::List { .. }
            | RequestOperation::CreateIterator(_)
            | RequestOperation::NextPairs { .. }
            | RequestOperation::SeekIterator { .. } => {
                unreachable!("the target dispatches on the namespace's command set")
            }
        };
        result.unwrap_or_else(|outcome| outcome)
    }

    fn span(&self, lba: Lba, bytes: u64) -> ByteSpan {
        let first_byte = lba.0 * u64::from(self.volume.block_bytes);
        ByteSpan { first_byte, bytes, block_log2: self.block_log2 }
    }

    fn span_of(&self, range: LbaRange) -> ByteSpan {
        self.span(range.lba, u64::from(range.blocks) * u64::from(self.volume.block_bytes))
    }

    async fn read(&self, range: LbaRange) -> Result<RequestOutcome, RequestOutcome> {
        let span = self.span_of(range);
        let mut buffer = self.read_aligned(span, "read").await?;
        if !span.is_aligned() {
            let (start, bytes) = (span.offset_in_block(), span.bytes as usize);
            buffer.copy_within(start..start + bytes, 0);
            buffer.set_len(bytes);
        }
        Ok(RequestOutcome::Blocks { buffer })
    }

    /// Prefetches the first of the blocks that [`BlockBackend::read_in_place`] will probably read; the processor prefetches the others
    /// when they are sent. False if they are not in memory.
    #[inline]
    pub fn prefetch_in_place(&self, range: LbaRange) -> bool {
        if self.is_in_memory {
            self.device.prefetch_read(Lba(self.span_of(range).first_block()), 1);
        }
        self.is_in_memory
    }

    /// Calls `receive` with blocks in the device's memory, and gives what it asked for. `None` if they are not in memory now, or
    /// `receive` refused.
    #[inline]
    pub fn read_in_place(
        &self,
        range: LbaRange,
        mut receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<Option<HeldBytes>> {
        let span = self.span_of(range);
        let (start, bytes) = (span.offset_in_block(), span.bytes as usize);
        let blocks = self.device.read_in_place(Lba(span.first_block()), span.aligned_bytes())?;
        match receive(DataRef::Borrowed(&blocks[start..start + bytes])) {
            Received::Refused => None,
            Received::Taken => Some(None),
            Received::Lent(bytes) => Some(Some(blocks.hold(start..start + bytes))),
        }
    }

    /// Reads the device blocks that hold a span.
    async fn read_aligned(&self, span: ByteSpan, command: &'static str) -> Result<Buffer, RequestOutcome> {
        let buffer = self.buffer(span.aligned_bytes()).await?;
        self.read_into(buffer, span, command).await
    }

    /// Reads the device blocks that hold a span into a buffer of their size.
    async fn read_into(
        &self,
        buffer: Buffer,
        span: ByteSpan,
        command: &'static str,
    ) -> Result<Buffer, RequestOutcome> {
        let completion = self.device.read(Lba(span.first_block()), buffer).await;
        completion
            .into_read()
            .map_err(|error| self.log_failure(command, span, error, RequestOutcome::Unrecovered))
    }

    async fn write(&self, lba: Lba, data: Buffer, durable: bool) -> Result<RequestOutcome, RequestOutcome> {
        let span = self.span(lba, data.len() as u64);
        self.write_span(span, data, "write").await?;
        self.finish_write(durable).await
    }

    /// Locks device blocks against concurrent partial writes. No lock is needed if the device's block is not larger
    /// than the namespace's.
    async fn lock_blocks(&self, blocks: std::ops::Range<u64>) -> Option<RangeGuard<'_>> {
        let smaller = self.volume.block_bytes < self.device.geometry().block_bytes;
        if smaller { Some(self.volume.write_locks.lock(blocks).await) } else { None }
    }

    /// Writes the bytes of a span, at the start of `data`, to the device; a partial device block is read and patched
    /// first. Holds the range lock only during device operations: the wait for a buffer precedes it.
    async fn write_span(
        &self,
        span: ByteSpan,
        data: Buffer,
        command: &'static str,
    ) -> Result<Buffer, RequestOutcome> {
        let patch_buffer = match span.is_aligned() {
            true => None,
            false => Some(self.buffer(span.aligned_bytes()).await?),
        };
        let unlocked = bug_injection::is_injected(InjectedBug::SkipRangeLock)
            || (bug_injection::is_injected(InjectedBug::ZeroWithoutLock) && command == "write zeroes");
        let mut guard =
            if unlocked { None } else { self.lock_blocks(span.first_block()..span.end_block()).await };
        let data = match patch_buffer {
            None => data,
            Some(buffer) => {
                let mut patched = self.read_into(buffer, span, command).await?;
                patched[span.offset_in_block()..span.offset_in_block() + data.len()].copy_from_slice(&data);
                patched
            }
        };
        if bug_injection::is_injected(InjectedBug::UnlockEarly) {
            guard = None;
        }
        let completion = self.device.write(Lba(span.first_block()), data).await;
        drop(guard);
        match (completion.result, completion.buffer) {
            (Ok(()), Some(buffer)) => Ok(buffer),
            (Ok(()), None) => unreachable!("a completed write returns its buffer"),
            (Err(error), _) => Err(self.log_failure(command, span, error, RequestOutcome::WriteFault)),
        }
    }

    async fn finish_write(&self, durable: bool) -> Result<RequestOutcome, RequestOutcome> {
        if durable && !bug_injection::is_injected(InjectedBug::CompleteDurableEarly) {
            self.flush("flush after a write").await?;
        }
        Ok(RequestOutcome::Written)
    }

    async fn flush(&self, command: &'static str) -> Result<(), RequestOutcome> {
        if bug_injection::is_injected(InjectedBug::SkipFlush) && command == "flush" {
            return Ok(());
        }
        let completion = self.device.flush().await;
        completion.result.map_err(|error| {
            self.log_failure(command, self.span(Lba(0), 0), error, RequestOutcome::WriteFault)
        })
    }

    async fn compare(&self, lba: Lba, data: &[u8]) -> Result<RequestOutcome, RequestOutcome> {
        let span = self.span(lba, data.len() as u64);
        let stored = self.read_aligned(span, "compare").await?;
        let same = stored[span.offset_in_block()..span.offset_in_block() + data.len()] == *data;
        Ok(if same { RequestOutcome::Verified } else { RequestOutcome::Mismatch })
    }

    async fn write_zeroes(&self, range: LbaRange, durable: bool) -> Result<RequestOutcome, RequestOutcome> {
        let span = self.span_of(range);
        for chunk in span.chunks(CHUNK_BYTES as u64) {
            let mut zeros = self.buffer(chunk.bytes as usize).await?;
            zeros.fill(0);
            self.write_span(chunk, zeros, "write zeroes").await?;
        }
        self.finish_write(durable).await
    }

    /// Trims the device blocks that lie wholly within the ranges. Deallocation is advisory: a device without trim
    /// ignores it.
    async fn deallocate(&self, ranges: &[LbaRange]) -> Result<RequestOutcome, RequestOutcome> {
        for &range in ranges {
            let span = self.span_of(range);
            let (mut first, mut end) = (
                (span.first_byte + span.block_mask()) >> span.block_log2,
                (span.first_byte + span.bytes) >> span.block_log2,
            );
            if bug_injection::is_injected(InjectedBug::TrimTooMuch) {
                (first, end) = (span.first_block(), span.end_block());
            }
            if first < end {
                // A concurrent partial write would restore the old contents of a trimmed block.
                let _guard = match bug_injection::is_injected(InjectedBug::TrimWithoutLock) {
                    true => None,
                    false => self.lock_blocks(first..end).await,
                };
                let trim = self.device.trim(Lba(first), end - first);
                if bug_injection::is_injected(InjectedBug::CompleteTrimEarly) {
                    continue;
                }
                let completion = trim.await;
                completion.result.map_err(|error| {
                    self.log_failure("deallocate", span, error, RequestOutcome::WriteFault)
                })?;
            }
        }
        Ok(RequestOutcome::Written)
    }

    async fn verify(&self, range: LbaRange) -> Result<RequestOutcome, RequestOutcome> {
        for chunk in self.span_of(range).chunks(CHUNK_BYTES as u64) {
            self.read_aligned(chunk, "verify").await?;
        }
        Ok(RequestOutcome::Verified)
    }

    async fn buffer(&self, bytes: usize) -> Result<Buffer, RequestOutcome> {
        wait_for_buffer(&self.pool, &self.handle, bytes).await.ok_or(RequestOutcome::Busy)
    }

    fn log_failure(
        &self,
        command: &'static str,
        span: ByteSpan,
        error: DeviceError,
        otherwise: RequestOutcome,
    ) -> RequestOutcome {
        let (device, first_byte) = (&*self.device_name, span.first_byte);
        tracing::error!(command, first_byte, bytes = span.bytes, device, %error, "command failed");
        match error {
            DeviceError::NoSpace => RequestOutcome::CapacityExceeded,
            DeviceError::Io(_) | DeviceError::OutOfRange | DeviceError::Unavailable => otherwise,
        }
    }
}
