//! Block devices: arrays of logical blocks that are read, written and flushed with owned, aligned buffers.
//!
//! # Layout
//! - this file: the [`Device`] trait, its results and its errors.
//! - [`memory`]: a RAM disk; its contents end with the process.
//! - [`file`](mod@file): a regular file or a raw block device, through a core's device queue.
//! - [`ssd_model`]: a simulated SSD over any device: operations take as long as on a real drive.
//! - [`fault_injection`]: a wrapper that injects bit flips, misdirected and lost writes, errors, delays and hangs.
//! - [`late_memory`]: memory whose writes another core can see before they are done.
//! - [`device_window`]: a device behind the first blocks of another one.
//! - [`supervised`]: a device with a timeout and a depth. [`health`]: whether it has failed, and what it did.
//! - [`unavailable`]: in place of a device that could not be opened.
//! - [`power_loss`]: a disk for tests that can lose power at any write or flush. (The simulator's disks are those of
//!   `octokv_runtime::simulated`.) [`disk_image`]: its contents, of which a copy is cheap.

pub mod device_window;
pub mod disk_image;
pub mod fault_injection;
pub mod file;
pub mod health;
pub mod late_memory;
pub mod memory;
pub mod power_loss;
pub mod ssd_model;
pub mod supervised;
pub mod unavailable;

pub use file::FileDevice;
pub use memory::{MemoryDevice, RamDisk};
pub use ssd_model::SimulatedSsd;

pub use octokv_runtime::{HeldBytes, ReadGuard};

use octokv_base::{Buffer, Lba, Nanos};
pub use octokv_runtime::device_queue::VECTOR_BUFFERS_MAX;
use octokv_runtime::device_queue::{CompletionFuture, IoCompletion};
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// The shape of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The size of a logical block, the smallest unit of a write, in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// The number of logical blocks.
    pub blocks: u64,
    /// Whether the contents end with the process, so that a journal is useless.
    pub volatile: bool,
}

impl Geometry {
    /// The size of the device in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }

    /// Whether `len` bytes from `at` are whole blocks within the device.
    #[inline]
    pub fn is_valid_range(&self, at: Lba, len: usize) -> bool {
        // Block sizes are powers of two: no division in the path of each request.
        let blocks = len >> self.block_bytes.trailing_zeros();
        len & (self.block_bytes as usize - 1) == 0
            && at.0.checked_add(blocks as u64).is_some_and(|end| end <= self.blocks)
    }
}

/// "No space left on device" on Linux.
const ENOSPC: i32 = 28;

/// A device failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The operation failed with this system error code.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Io(i32),
    /// The blocks are beyond the end of the device.
    #[error("blocks beyond the end of the device")]
    OutOfRange,
    /// The medium has no space for the write although the block exists (a sparse file): `ENOSPC`.
    #[error("no space left under the device")]
    NoSpace,
    /// The device was not opened, or was given up.
    #[error("the device is not available")]
    Unavailable,
}

/// The result of an operation, with the caller's buffer.
#[derive(Debug)]
pub struct IoResult {
    /// The buffer of a read or a write. After a failed read its contents are undefined.
    pub buffer: Option<Buffer>,
    /// Whether the whole operation succeeded.
    pub result: Result<(), DeviceError>,
}

impl IoResult {
    /// That of an operation on a device that is not available.
    pub fn unavailable(buffer: Option<Buffer>) -> IoResult {
        IoResult { buffer, result: Err(DeviceError::Unavailable) }
    }

    /// The buffer of a successful read.
    ///
    /// # Errors
    /// The device failure of the read.
    ///
    /// # Panics
    /// If the operation was not a read.
    pub fn into_read(self) -> Result<Buffer, DeviceError> {
        self.result?;
        // Only a bug of ours loses the buffer of a read.
        Ok(self.buffer.expect("a read returns its buffer"))
    }
}

/// One core's view of an array of logical blocks.
///
/// An operation starts when its method is called, not when its future is first polled. Operations in flight together
/// may be executed in any order. A write is durable once a flush that started after its completion has completed.
pub trait Device {
    /// The shape of the device.
    fn geometry(&self) -> Geometry;
    /// The size in bytes from which a write replaces whole blocks of the medium, so that it needs no read below: a power of
    /// two, at least a block (NVMe: preferred write granularity).
    fn preferred_write_bytes(&self) -> u32 {
        self.geometry().block_bytes
    }
    /// The name for logs and errors: a path, or the name of a test device.
    fn name(&self) -> &str;
    /// The time of its core, if it has a clock: what latencies of operations are measured by.
    fn now(&self) -> Option<Nanos> {
        None
    }
    /// Whether its operations are tried: false once the device has failed.
    fn is_available(&self) -> bool {
        true
    }
    /// Fills `buffer` from the blocks at `at`. REQUIRES: the buffer's length is whole blocks.
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture;
    /// Writes all of `buffer` to the blocks at `at`. REQUIRES: the buffer's length is whole blocks.
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture;
    /// Writes all of `buffers` side by side to the blocks from `at` on; the result has no buffer. A device may make several writes of
    /// it, of which some may succeed if it fails. REQUIRES: each buffer's length is whole blocks; 1 to
    /// [`VECTOR_BUFFERS_MAX`] buffers.
    fn write_vectored(&self, at: Lba, buffers: Vec<Buffer>) -> DeviceFuture {
        let (block_bytes, mut at) = (u64::from(self.geometry().block_bytes), at);
        let started: Vec<DeviceFuture> = buffers
            .into_iter()
            .map(|buffer| {
                let blocks = buffer.len() as u64 / block_bytes;
                let write = self.write(at, buffer);
                at.0 += blocks;
                write
            })
            .collect();
        DeviceFuture::boxed(async move {
            let mut result = Ok(());
            for write in started {
                result = result.and(write.await.result);
            }
            IoResult { buffer: None, result }
        })
    }
    /// Prefetches for a write of the blocks. A hint, which most devices ignore.
    fn prefetch_write(&self, _at: Lba, _blocks: u64) {}
    /// Prefetches for a read of the blocks. A hint, which most devices ignore.
    fn prefetch_read(&self, _at: Lba, _blocks: u64) {}
    /// The `bytes` bytes from `at` on, which nothing writes while the guard lives. `None` if they are not in memory, not in one piece,
    /// or a writer has them or waits for them. A write of them waits, so guard and held bytes live for a short time only.
    /// REQUIRES: `bytes` is whole blocks; the caller uses no device while the guard lives.
    fn read_in_place(&self, _at: Lba, _bytes: usize) -> Option<ReadGuard<'_>> {
        None
    }
    /// Calls `write` with the `bytes` bytes from `at` on, which nothing else reads or writes meanwhile. False without a call unless
    /// they are in memory, in one piece, and nothing reads, writes or holds them. REQUIRES: `bytes` is whole blocks; `write` uses no
    /// device.
    fn write_in_place(&self, _at: Lba, _bytes: usize, _write: &mut dyn FnMut(&mut [u8])) -> bool {
        false
    }
    /// The first blocks from `at` on that were never written, if the first write of a block costs more than later ones: those
    /// of a file that are only allocated. `None` if there are none or the device does not know. A hint: the answer may be of
    /// a moment before.
    fn next_unwritten(&self, _at: Lba) -> Option<Range<Lba>> {
        None
    }
    /// Makes every completed write durable.
    fn flush(&self) -> DeviceFuture;
    /// Deallocates the blocks. Their contents are undefined until they are written again.
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture;
}

/// An operation in flight. Await it for its [`IoResult`].
pub struct DeviceFuture(FutureState);

enum FutureState {
    Ready(Option<IoResult>),
    Submitted(CompletionFuture),
    Boxed(Pin<Box<dyn Future<Output = IoResult>>>),
}

impl DeviceFuture {
    /// An operation that has completed already.
    pub fn ready(result: IoResult) -> DeviceFuture {
        DeviceFuture(FutureState::Ready(Some(result)))
    }
    /// An operation in flight on a core's device queue.
    pub fn submitted(ticket: CompletionFuture) -> DeviceFuture {
        DeviceFuture(FutureState::Submitted(ticket))
    }
    /// An operation that `future` completes. Allocates, so only for tests, fault injection, simulated devices and what is rare.
    pub fn boxed(future: impl Future<Output = IoResult> + 'static) -> DeviceFuture {
        DeviceFuture(FutureState::Boxed(Box::pin(future)))
    }
    /// Whether the operation has reached its device: false while it waits in the queue of its core.
    pub fn has_begun(&self) -> bool {
        match &self.0 {
            FutureState::Submitted(ticket) => ticket.has_begun(),
            FutureState::Ready(_) | FutureState::Boxed(_) => true,
        }
    }
    /// An operation that fails with [`DeviceError::OutOfRange`].
    pub fn out_of_range(buffer: Option<Buffer>) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer, result: Err(DeviceError::OutOfRange) })
    }
}

impl Future for DeviceFuture {
    type Output = IoResult;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        match &mut self.0 {
            FutureState::Ready(result) => {
                Poll::Ready(result.take().expect("a device future is awaited once"))
            }
            FutureState::Submitted(ticket) => {
                let IoCompletion { buffer, result } = ready!(Pin::new(ticket).poll(context));
                let result = result.map_err(|code| match code {
                    ENOSPC => DeviceError::NoSpace,
                    code => DeviceError::Io(code),
                });
                Poll::Ready(IoResult { buffer, result })
            }
            FutureState::Boxed(future) => future.as_mut().poll(context),
        }
    }
}
