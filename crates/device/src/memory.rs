//! A RAM disk: as fast as a memory copy; its contents end with the process.
//!
//! In: reads and writes from any core. Out: their completions, at once. Holds: the blocks, in stripes of whole huge
//! pages with one lock each, so that cores contend only for the same stripe.
//! Invariants: all memory is touched at creation, so that no write page-faults; a write within one stripe is atomic, a
//! longer one is atomic per stripe, as on a disk.

use crate::{Device, DeviceFuture, Geometry, IoResult};
use octokv_base::{Buffer, Lba};
use octokv_runtime::{HugePageBuffer, prefetch_read, prefetch_write};
use parking_lot::Mutex;
use std::io;
use std::sync::Arc;

/// The size of a stripe in bytes, unless that gives more than [`STRIPES_MAX`] stripes.
const STRIPE_BYTES_MIN: usize = 2 << 20;
/// Prefetching stops after this many bytes: the processor's stream prefetcher fetches the rest of a long record.
const PREFETCH_BYTES_MAX: usize = 8192;
const STRIPES_MAX: u64 = 4096;

/// The memory, shared by the devices of all cores.
pub struct RamDisk {
    stripes: Box<[Mutex<HugePageBuffer>]>,
    /// Binary logarithm of the size of a stripe in bytes: a request divides by it.
    stripe_log2: u32,
    geometry: Geometry,
}

impl RamDisk {
    /// Allocates `bytes` of zeroed blocks, rounded down to whole blocks.
    ///
    /// # Errors
    /// Fails if the system lacks the memory.
    pub fn new(bytes: u64, block_bytes: u32) -> io::Result<Arc<RamDisk>> {
        let blocks = bytes / u64::from(block_bytes);
        let bytes = blocks * u64::from(block_bytes);
        let stripe_bytes_min = bytes.div_ceil(STRIPES_MAX).max(1);
        let stripe_bytes = stripe_bytes_min.next_power_of_two().max(STRIPE_BYTES_MIN as u64) as usize;
        let new_stripe = |_| {
            let mut stripe = HugePageBuffer::new(stripe_bytes)?;
            stripe.iter_mut().step_by(4096).for_each(|byte| *byte = std::hint::black_box(0));
            Ok(Mutex::new(stripe))
        };
        let stripes: io::Result<Box<[_]>> =
            (0..bytes.div_ceil(stripe_bytes as u64)).map(new_stripe).collect();
        let geometry = Geometry { block_bytes, blocks, volatile: true };
        Ok(Arc::new(RamDisk { stripes: stripes?, stripe_log2: stripe_bytes.ilog2(), geometry }))
    }

    /// The shape of the disk; always volatile.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn stripe_bytes(&self) -> usize {
        1 << self.stripe_log2
    }

    /// The stripe of a byte, and the byte's offset in it.
    #[inline]
    fn locate(&self, offset: u64) -> (usize, usize) {
        ((offset >> self.stripe_log2) as usize, offset as usize & (self.stripe_bytes() - 1))
    }

    /// Calls `each` with each stripe's part of the `len` bytes from byte `offset`, in order, under the stripe's lock.
    fn for_each_stripe(
        &self,
        offset: u64,
        len: usize,
        mut each: impl FnMut(&mut [u8], std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < len {
            let at = offset + done as u64;
            let (stripe, within) = self.locate(at);
            let part = (self.stripe_bytes() - within).min(len - done);
            let mut stripe = self.stripes[stripe].lock();
            each(&mut stripe[within..within + part], done..done + part);
            done += part;
        }
    }
}

/// One core's view of a [`RamDisk`].
pub struct MemoryDevice {
    memory: Arc<RamDisk>,
}

impl MemoryDevice {
    /// A core's view of `memory`.
    pub fn new(memory: Arc<RamDisk>) -> MemoryDevice {
        MemoryDevice { memory }
    }

    fn offset(&self, at: Lba) -> u64 {
        at.0 << self.memory.geometry.block_bytes.trailing_zeros()
    }

    /// Calls `access` with bytes within one stripe, under its lock. False without a call for others.
    fn access_in_place(&self, at: Lba, bytes: usize, access: impl FnOnce(&mut [u8])) -> bool {
        if !self.memory.geometry.is_valid_range(at, bytes) {
            return false;
        }
        let (stripe, within) = self.memory.locate(self.offset(at));
        if within + bytes > self.memory.stripe_bytes() {
            return false;
        }
        let mut stripe = self.memory.stripes[stripe].lock();
        access(&mut stripe[within..within + bytes]);
        true
    }

    /// Prefetches the first [`PREFETCH_BYTES_MAX`] bytes at `at`. Skips a locked stripe and the part in the next stripe: a
    /// hint does not wait.
    fn prefetch_front(&self, at: Lba, blocks: u64, prefetch: impl FnOnce(&mut [u8])) {
        let geometry = &self.memory.geometry;
        let bytes = (blocks as usize * geometry.block_bytes as usize).min(PREFETCH_BYTES_MAX);
        if !geometry.is_valid_range(at, bytes) {
            return;
        }
        let (stripe, within) = self.memory.locate(self.offset(at));
        let stripe = self.memory.stripes.get(stripe).and_then(Mutex::try_lock);
        if let Some(mut stripe) = stripe {
            let end = (within + bytes).min(stripe.len());
            prefetch(&mut stripe[within..end]);
        }
    }
}

impl Device for MemoryDevice {
    fn geometry(&self) -> Geometry {
        self.memory.geometry
    }
    fn name(&self) -> &str {
        "memory"
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> DeviceFuture {
        if !self.memory.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let (offset, len) = (self.offset(at), buffer.len());
        self.memory.for_each_stripe(offset, len, |stripe, range| buffer[range].copy_from_slice(stripe));
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.memory.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let (offset, len) = (self.offset(at), buffer.len());
        self.memory.for_each_stripe(offset, len, |stripe, range| stripe.copy_from_slice(&buffer[range]));
        DeviceFuture::ready(IoResult { buffer: Some(buffer), result: Ok(()) })
    }
    fn read_in_place(&self, at: Lba, bytes: usize, read: &mut dyn FnMut(&[u8])) -> bool {
        self.access_in_place(at, bytes, |memory| read(memory))
    }
    fn write_in_place(&self, at: Lba, bytes: usize, write: &mut dyn FnMut(&mut [u8])) -> bool {
        self.access_in_place(at, bytes, |memory| write(memory))
    }
    fn prefetch_write(&self, at: Lba, blocks: u64) {
        self.prefetch_front(at, blocks, prefetch_write);
    }
    fn prefetch_read(&self, at: Lba, blocks: u64) {
        self.prefetch_front(at, blocks, |front| prefetch_read(front));
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

    #[test]
    fn writes_across_stripes_are_read_back() {
        let memory = RamDisk::new(8 << 20, 512).unwrap();
        let (one, other) = (MemoryDevice::new(Arc::clone(&memory)), MemoryDevice::new(memory));
        let mut buffer = Buffer::zeroed(8192);
        buffer.iter_mut().enumerate().for_each(|(i, byte)| *byte = i as u8);
        let at = Lba((STRIPE_BYTES_MIN as u64 - 4096) / 512);
        block_on(one.write(at, buffer), || ()).result.unwrap();
        let read = block_on(other.read(at, Buffer::zeroed(8192)), || ()).into_read().unwrap();
        assert!(read.iter().enumerate().all(|(i, &byte)| byte == i as u8));
    }

    #[test]
    fn bytes_in_one_stripe_are_accessed_in_place_and_others_are_not() {
        let device = MemoryDevice::new(RamDisk::new(4 << 20, 512).unwrap());
        assert!(device.write_in_place(Lba(8), 1024, &mut |bytes| bytes.fill(7)));
        let read = block_on(device.read(Lba(7), Buffer::zeroed(2048)), || ()).into_read().unwrap();
        assert!(read[..512].iter().chain(&read[1536..]).all(|&byte| byte == 0));
        let mut found = Vec::new();
        assert!(device.read_in_place(Lba(8), 1024, &mut |bytes| found.extend_from_slice(bytes)));
        assert_eq!((&read[512..1536], &found[..]), (&[7; 1024][..], &[7; 1024][..]));
        let stripe_blocks = STRIPE_BYTES_MIN as u64 / 512;
        for (at, bytes) in
            [(stripe_blocks - 1, 1024), (2 * stripe_blocks - 1, 1024), (8, 100), (u64::MAX, 512)]
        {
            assert!(!device.read_in_place(Lba(at), bytes, &mut |_| panic!("{at}")), "{bytes} from {at}");
        }
        assert!(device.read_in_place(Lba(stripe_blocks - 2), 1024, &mut |_| ()));
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
