//! Devices: arrays of logical blocks that are read, written and flushed with owned, aligned buffers.
//!
//! # Layout
//! - this file: the [`Device`] contract, its answers and its faults.
//! - [`memory`]: blocks in this process's memory; nothing survives it.
//! - [`file`](mod@file): a regular file or a raw block device, through a core's device channel.
//! - [`ssd_model`]: simulated flash over any device: its answers take the time of a real drive's.
//! - [`fault_injection`]: a wrapper that makes any device fail: rot, misdirection, staleness, errors, slowness.
//! - [`power_loss`]: a disk whose power can be cut at any write or flush, for tests. (The simulator's disks are those of
//!   `octokv_runtime::virtual_world`.)

pub mod fault_injection;
pub mod file;
pub mod memory;
pub mod power_loss;
pub mod ssd_model;

pub use file::FileDevice;
pub use memory::{MemoryDevice, RamDisk};
pub use ssd_model::SimulatedSsd;

use octokv_base::{Buffer, Lba};
use octokv_runtime::device_queue::{CompletionFuture, IoCompletion};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// What a device looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The size of a logical block, the smallest thing written at once, in bytes: 512 or 4096.
    pub block_bytes: u32,
    /// How many logical blocks there are.
    pub blocks: u64,
    /// Whether all is lost when the process ends, so that keeping a journal is of no use.
    pub volatile: bool,
}

impl Geometry {
    /// The size of the device in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks * u64::from(self.block_bytes)
    }

    /// Whether `len` bytes from `at` are whole blocks within the device.
    pub fn is_valid_range(&self, at: Lba, len: usize) -> bool {
        let block = self.block_bytes as usize;
        len.is_multiple_of(block)
            && at.0.checked_add((len / block) as u64).is_some_and(|end| end <= self.blocks)
    }
}

/// What a device can do wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceError {
    /// The operation failed; the number is the system's error code.
    Io(i32),
    /// The blocks are not on the device.
    OutOfRange,
    /// The medium has no space for the write, though the block exists (a sparse file).
    NoSpace,
}

impl std::fmt::Display for DeviceError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceError::Io(code) => write!(f, "{}", std::io::Error::from_raw_os_error(*code)),
            DeviceError::OutOfRange => f.write_str("blocks beyond the end of the device"),
            DeviceError::NoSpace => f.write_str("no space left under the device"),
        }
    }
}

impl std::error::Error for DeviceError {}

/// A finished operation: the buffer comes back with it.
#[derive(Debug)]
pub struct IoResult {
    /// The buffer of a read or a write. After a failed read it holds anything.
    pub buffer: Option<Buffer>,
    /// Whether all of it was done.
    pub result: Result<(), DeviceError>,
}

impl IoResult {
    /// The buffer of a read that succeeded.
    pub fn into_read(self) -> Result<Buffer, DeviceError> {
        self.result?;
        // Only a bug of ours loses the buffer of a read.
        Ok(self.buffer.expect("a read gives its buffer back"))
    }
}

/// An array of logical blocks as one core sees it.
///
/// An operation starts when its method is called, not when the answer is first awaited. Operations
/// that are under way together may be carried out in any order; a write is durable once a flush that
/// started after its completion has completed.
pub trait Device {
    /// Its shape.
    fn geometry(&self) -> Geometry;
    /// What a person calls it: a path, or a made-up name.
    fn name(&self) -> &str;
    /// Fills `buffer` from the blocks at `at`; its length is whole blocks.
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture;
    /// Writes all of `buffer` to the blocks at `at`; its length is whole blocks.
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture;
    /// Says that the blocks will be written soon. A hint: most devices have no use for it.
    fn prefetch_write(&self, _at: Lba, _blocks: u64) {}
    /// Says that the blocks will be read soon. A hint, too.
    fn prefetch_read(&self, _at: Lba, _blocks: u64) {}
    /// Makes every write that has completed durable.
    fn flush(&self) -> DeviceFuture;
    /// Says that what the blocks hold is no longer wanted. They then read as anything.
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture;
}

/// An operation under way. Await it for its [`IoResult`].
pub struct DeviceFuture(FutureState);

enum FutureState {
    Ready(Option<IoResult>),
    Submitted(CompletionFuture),
    Boxed(Pin<Box<dyn Future<Output = IoResult>>>),
}

impl DeviceFuture {
    /// Already finished.
    pub fn ready(result: IoResult) -> DeviceFuture {
        DeviceFuture(FutureState::Ready(Some(result)))
    }
    /// Under way on a core's device channel.
    pub fn submitted(ticket: CompletionFuture) -> DeviceFuture {
        DeviceFuture(FutureState::Submitted(ticket))
    }
    /// Whatever `future` says; costs an allocation, so for tests, faults and simulated devices.
    pub fn boxed(future: impl Future<Output = IoResult> + 'static) -> DeviceFuture {
        DeviceFuture(FutureState::Boxed(Box::pin(future)))
    }
    /// Refused, because the blocks are not on the device.
    pub fn out_of_range(buffer: Option<Buffer>) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer, result: Err(DeviceError::OutOfRange) })
    }
}

impl Future for DeviceFuture {
    type Output = IoResult;
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        match &mut self.0 {
            FutureState::Ready(result) => Poll::Ready(result.take().expect("awaited once")),
            FutureState::Submitted(ticket) => {
                let IoCompletion { buffer, result } = ready!(Pin::new(ticket).poll(context));
                let result = result.map_err(|code| match code {
                    28 => DeviceError::NoSpace, // ENOSPC
                    code => DeviceError::Io(code),
                });
                Poll::Ready(IoResult { buffer, result })
            }
            FutureState::Boxed(future) => future.as_mut().poll(context),
        }
    }
}
