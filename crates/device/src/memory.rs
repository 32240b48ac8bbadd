//! A RAM disk: as fast as a memory copy; its contents end with the process.
//!
//! In: reads and writes from any core. Out: their completions, at once unless another core reads or writes the same page of
//! memory, a response is sent from it, or a writer waits for it. Holds: the blocks, in one mapping of huge pages, whose pages have a latch each, so that cores contend
//! only for the same page.
//! Invariants: all memory is touched at creation, so that no write page-faults; a read or write is atomic as a whole.

use crate::{Device, DeviceFuture, Geometry, IoResult, ReadGuard};
use octokv_base::{Buffer, Lba};
use octokv_runtime::{HugePageBuffer, LatchedMemory, MemoryView, yield_now};
use std::io;
use std::ops::Range;
use std::sync::Arc;

/// Prefetching stops after this many bytes: the processor's stream prefetcher fetches the rest of a long record. Reads are sent
/// from their first byte on, which that prefetcher follows sooner.
const WRITE_PREFETCH_BYTES_MAX: usize = 8192;
const READ_PREFETCH_BYTES_MAX: usize = 512;

/// The memory, shared by the devices of all cores.
#[derive(Debug)]
pub struct RamDisk {
    memory: Arc<LatchedMemory>,
    geometry: Geometry,
}

impl RamDisk {
    /// Allocates `bytes` of zeroed blocks, rounded down to whole blocks.
    ///
    /// # Errors
    /// Fails if the system lacks the memory.
    pub fn new(bytes: u64, block_bytes: u32) -> io::Result<Arc<RamDisk>> {
        let blocks = bytes / u64::from(block_bytes);
        let bytes = (blocks * u64::from(block_bytes)) as usize;
        // A mapping has at least one byte; a disk without blocks never accesses it.
        let mut memory = HugePageBuffer::new(bytes.max(1))?;
        memory.iter_mut().step_by(4096).for_each(|byte| *byte = std::hint::black_box(0));
        let geometry = Geometry { block_bytes, blocks, volatile: true };
        Ok(Arc::new(RamDisk { memory: Arc::new(LatchedMemory::new(memory)), geometry }))
    }

    /// The shape of the disk; always volatile.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }
}

/// One core's view of a [`RamDisk`].
pub struct MemoryDevice {
    memory: MemoryView,
    geometry: Geometry,
}

impl MemoryDevice {
    /// A core's view of `disk`.
    pub fn new(disk: Arc<RamDisk>) -> MemoryDevice {
        MemoryDevice { memory: MemoryView::new(Arc::clone(&disk.memory)), geometry: disk.geometry }
    }

    /// The bytes of blocks; `None` unless they exist.
    #[inline]
    fn range(&self, at: Lba, bytes: usize) -> Option<Range<usize>> {
        // As `Geometry::is_valid_range`, in bytes: the memory compares them with its size, too.
        let block_bytes = self.geometry.block_bytes as usize;
        let start = (at.0 as usize).checked_mul(block_bytes)?;
        let end = start.checked_add(bytes)?;
        (bytes & (block_bytes - 1) == 0 && end <= self.memory.bytes()).then_some(start..end)
    }

    /// Offset and length of the front of blocks that a prefetch loads. Not checked: a prefetch may have any address.
    #[inline]
    fn prefetched_bytes(&self, at: Lba, blocks: u64, bytes_max: usize) -> (usize, usize) {
        let block_log2 = self.geometry.block_bytes.trailing_zeros();
        ((at.0 << block_log2) as usize, ((blocks << block_log2) as usize).min(bytes_max))
    }
}

/// A write that waits for readers of its pages. It keeps new ones out, until it ends or is dropped.
struct WaitingWrite {
    memory: MemoryView,
    range: Range<usize>,
    has_ended: bool,
}

impl Drop for WaitingWrite {
    fn drop(&mut self) {
        if !self.has_ended {
            self.memory.stop_waiting(self.range.clone());
        }
    }
}

/// Reads as soon as no writer has the pages or waits for them.
async fn read_later(memory: MemoryView, range: Range<usize>, mut buffer: Buffer) -> IoResult {
    loop {
        yield_now().await;
        if let Some(bytes) = memory.try_read(range.clone()) {
            buffer.copy_from_slice(&bytes);
            return IoResult { buffer: Some(buffer), result: Ok(()) };
        }
    }
}

/// Writes as soon as nothing else has the pages.
async fn write_later(mut waiting: WaitingWrite, buffer: Buffer) -> IoResult {
    loop {
        yield_now().await;
        if let Some(mut bytes) = waiting.memory.wait_to_write(waiting.range.clone()) {
            bytes.copy_from_slice(&buffer);
            break;
        }
    }
    waiting.has_ended = true;
    IoResult { buffer: Some(buffer), result: Ok(()) }
}

impl Device for MemoryDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn name(&self) -> &str {
        "memory"
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> DeviceFuture {
        let Some(range) = self.range(at, buffer.len()) else {
            return DeviceFuture::out_of_range(Some(buffer));
        };
        match self.memory.try_read(range.clone()) {
            Some(bytes) => buffer.copy_from_slice(&bytes),
            None => return DeviceFuture::boxed(read_later(self.memory.clone(), range, buffer)),
        }
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let Some(range) = self.range(at, buffer.len()) else {
            return DeviceFuture::out_of_range(Some(buffer));
        };
        match self.memory.try_write(range.clone()) {
            Some(mut bytes) => bytes.copy_from_slice(&buffer),
            None => {
                let waiting = WaitingWrite { memory: self.memory.clone(), range, has_ended: false };
                return DeviceFuture::boxed(write_later(waiting, buffer));
            }
        }
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    #[inline]
    fn read_in_place(&self, at: Lba, bytes: usize) -> Option<ReadGuard<'_>> {
        self.memory.try_read(self.range(at, bytes)?)
    }
    fn write_in_place(&self, at: Lba, bytes: usize, write: &mut dyn FnMut(&mut [u8])) -> bool {
        let guard = self.range(at, bytes).and_then(|range| self.memory.try_write(range));
        guard.map(|mut bytes| write(&mut bytes)).is_some()
    }
    fn prefetch_write(&self, at: Lba, blocks: u64) {
        let (offset, len) = self.prefetched_bytes(at, blocks, WRITE_PREFETCH_BYTES_MAX);
        self.memory.prefetch_write(offset, len);
    }
    fn prefetch_read(&self, at: Lba, blocks: u64) {
        let (offset, len) = self.prefetched_bytes(at, blocks, READ_PREFETCH_BYTES_MAX);
        self.memory.prefetch_read(offset, len);
    }
    fn flush(&self) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_runtime::block_on;
    use std::future::Future;
    use std::task::{Context, Poll, Waker};

    fn poll(future: &mut DeviceFuture) -> Poll<IoResult> {
        std::pin::Pin::new(future).poll(&mut Context::from_waker(Waker::noop()))
    }

    fn hold(device: &MemoryDevice, at: Lba, held: Range<usize>) -> octokv_runtime::HeldBytes {
        device.read_in_place(at, 512).expect("nothing writes the block").hold(held)
    }

    #[test]
    fn writes_of_one_core_are_read_on_another() {
        let disk = RamDisk::new(8 << 20, 512).unwrap();
        let (one, other) = (MemoryDevice::new(Arc::clone(&disk)), MemoryDevice::new(disk));
        let mut buffer = Buffer::zeroed(8192);
        buffer.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
        block_on(one.write(Lba(4097), buffer), || ()).result.unwrap();
        let read = block_on(other.read(Lba(4097), Buffer::zeroed(8192)), || ()).into_read().unwrap();
        assert!(read.iter().enumerate().all(|(i, &byte)| byte == i as u8));
    }

    #[test]
    fn blocks_are_accessed_in_place() {
        let device = MemoryDevice::new(RamDisk::new(4 << 20, 512).unwrap());
        assert!(device.write_in_place(Lba(8), 1024, &mut |bytes| bytes.fill(7)));
        let read = block_on(device.read(Lba(7), Buffer::zeroed(2048)), || ()).into_read().unwrap();
        assert!(read[..512].iter().chain(&read[1536..]).all(|&byte| byte == 0));
        let found = device.read_in_place(Lba(8), 1024).unwrap().to_vec();
        assert_eq!((&read[512..1536], &found[..]), (&[7; 1024][..], &[7; 1024][..]));
        for (at, bytes) in [(8191, 1024), (8, 100), (u64::MAX, 512)] {
            assert!(device.read_in_place(Lba(at), bytes).is_none(), "{bytes} from {at}");
            device.prefetch_read(Lba(at), bytes as u64);
            device.prefetch_write(Lba(at), bytes as u64);
            assert!(!device.write_in_place(Lba(at), bytes, &mut |_| panic!("{at}")), "{bytes} from {at}");
        }
    }

    #[test]
    fn a_write_waits_until_held_bytes_are_dropped_and_readers_behind_it_until_it_ends() {
        let device = MemoryDevice::new(RamDisk::new(1 << 20, 512).unwrap());
        let held = hold(&device, Lba(1), 10..20);
        let mut buffer = Buffer::zeroed(512);
        buffer.fill(5);
        let mut write = device.write(Lba(1), buffer);
        assert!(poll(&mut write).is_pending() && poll(&mut write).is_pending());
        assert!(!device.write_in_place(Lba(1), 512, &mut |_| panic!("held")));
        let mut read = device.read(Lba(0), Buffer::zeroed(1024));
        assert!(poll(&mut read).is_pending(), "of the same page of memory");
        assert_eq!(held[..], [0; 10]);
        drop(held);
        assert!(poll(&mut read).is_pending());
        let Poll::Ready(written) = poll(&mut write) else { panic!("nothing holds the block") };
        written.result.unwrap();
        let Poll::Ready(read) = poll(&mut read) else { panic!("nothing writes the blocks") };
        assert_eq!(read.into_read().unwrap()[511..514], [0, 5, 5]);
    }

    #[test]
    fn a_write_that_is_dropped_keeps_no_reader_out() {
        let device = MemoryDevice::new(RamDisk::new(1 << 20, 512).unwrap());
        let held = hold(&device, Lba(0), 0..1);
        let mut write = device.write(Lba(0), Buffer::zeroed(512));
        assert!(poll(&mut write).is_pending() && poll(&mut write).is_pending());
        assert!(device.read_in_place(Lba(0), 512).is_none(), "a writer waits");
        drop(write);
        drop(hold(&device, Lba(0), 0..1));
        drop(held);
        assert!(device.write_in_place(Lba(0), 512, &mut |_| ()));
    }

    #[test]
    fn a_device_of_no_bytes_has_no_blocks() {
        assert_eq!(MemoryDevice::new(RamDisk::new(1, 512).unwrap()).geometry().blocks, 0);
    }

    #[test]
    fn blocks_beyond_the_end_are_refused() {
        let device = MemoryDevice::new(RamDisk::new(1 << 20, 4096).unwrap());
        let done = block_on(device.read(Lba(256), Buffer::zeroed(4096)), || ());
        assert_eq!(done.result, Err(crate::DeviceError::OutOfRange));
        assert!(done.buffer.is_some());
    }
}
