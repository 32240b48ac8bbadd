//! A part of a device as a device: the blocks around it belong to somebody else.
//!
//! In: block numbers from 0. Out: operations of the inner device, that many blocks further on. Invariant: nothing outside of the window is read,
//! written or trimmed.

use crate::{Device, DeviceError, DeviceFuture, Geometry, IoResult, ReadGuard};
use octokv_base::{Buffer, Lba, Nanos};
use std::ops::Range;
use std::rc::Rc;

/// One core's view of a part of a device.
pub struct DeviceWindow {
    inner: Rc<dyn Device>,
    first: u64,
    blocks: u64,
}

impl DeviceWindow {
    /// The blocks of a device behind the first `bytes` bytes, none if it has no more.
    ///
    /// # Panics
    /// If that is not a number of whole blocks.
    pub fn behind(inner: Rc<dyn Device>, bytes: u64) -> DeviceWindow {
        let end = inner.geometry().bytes().max(bytes);
        DeviceWindow::part(inner, bytes..end)
    }

    /// These bytes of a device.
    ///
    /// # Panics
    /// If they are not a number of whole blocks.
    pub fn part(inner: Rc<dyn Device>, bytes: Range<u64>) -> DeviceWindow {
        let block_bytes = u64::from(inner.geometry().block_bytes);
        let is_whole = bytes.start.is_multiple_of(block_bytes) && bytes.end.is_multiple_of(block_bytes);
        assert!(is_whole && bytes.start <= bytes.end, "{bytes:?} in blocks of {block_bytes}");
        let (first, blocks) = (bytes.start / block_bytes, (bytes.end - bytes.start) / block_bytes);
        DeviceWindow { inner, first, blocks }
    }

    /// The block of the inner device; `None` unless all `bytes` bytes are in the window.
    fn inner_lba(&self, at: Lba, bytes: usize) -> Option<Lba> {
        self.geometry().is_valid_range(at, bytes).then(|| Lba(at.0 + self.first))
    }
}

impl Device for DeviceWindow {
    fn geometry(&self) -> Geometry {
        let geometry = self.inner.geometry();
        Geometry { blocks: self.blocks, ..geometry }
    }
    fn preferred_write_bytes(&self) -> u32 {
        self.inner.preferred_write_bytes()
    }
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn now(&self) -> Option<Nanos> {
        self.inner.now()
    }
    fn is_available(&self) -> bool {
        self.inner.is_available()
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        match self.inner_lba(at, buffer.len()) {
            Some(at) => self.inner.read(at, buffer),
            None => DeviceFuture::out_of_range(Some(buffer)),
        }
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        match self.inner_lba(at, buffer.len()) {
            Some(at) => self.inner.write(at, buffer),
            None => DeviceFuture::out_of_range(Some(buffer)),
        }
    }
    fn write_vectored(&self, at: Lba, buffers: Vec<Buffer>) -> DeviceFuture {
        match self.inner_lba(at, buffers.iter().map(|buffer| buffer.len()).sum()) {
            Some(at) => self.inner.write_vectored(at, buffers),
            None => DeviceFuture::out_of_range(None),
        }
    }
    fn prefetch_write(&self, at: Lba, blocks: u64) {
        self.inner.prefetch_write(Lba(at.0 + self.first), blocks);
    }
    fn prefetch_read(&self, at: Lba, blocks: u64) {
        self.inner.prefetch_read(Lba(at.0 + self.first), blocks);
    }
    fn read_in_place(&self, at: Lba, bytes: usize) -> Option<ReadGuard<'_>> {
        self.inner.read_in_place(self.inner_lba(at, bytes)?, bytes)
    }
    fn write_in_place(&self, at: Lba, bytes: usize, write: &mut dyn FnMut(&mut [u8])) -> bool {
        self.inner_lba(at, bytes).is_some_and(|at| self.inner.write_in_place(at, bytes, write))
    }
    fn next_unwritten(&self, at: Lba) -> Option<Range<Lba>> {
        let found = self.inner.next_unwritten(self.inner_lba(at, 0)?)?;
        // The answer begins at `at` or behind it.
        let end = (found.end.0 - self.first).min(self.blocks);
        let start = found.start.0 - self.first;
        (start < end).then_some(Lba(start)..Lba(end))
    }
    fn flush(&self) -> DeviceFuture {
        self.inner.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        match at.0.checked_add(blocks).is_some_and(|end| end <= self.blocks) {
            true => self.inner.trim(Lba(at.0 + self.first), blocks),
            false => DeviceFuture::ready(IoResult { buffer: None, result: Err(DeviceError::OutOfRange) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryDevice, RamDisk};
    use octokv_runtime::block_on;

    fn filled(byte: u8) -> Buffer {
        let mut buffer = Buffer::zeroed(4096);
        buffer.fill(byte);
        buffer
    }

    #[test]
    fn blocks_lie_behind_those_of_somebody_else() {
        let inner = Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 4096).unwrap()));
        let window = DeviceWindow::behind(Rc::clone(&inner) as Rc<dyn Device>, 16 << 10);
        assert_eq!(window.geometry().blocks, inner.geometry().blocks - 4);
        block_on(inner.write(Lba(3), filled(3)), || ()).result.unwrap();
        block_on(window.write(Lba(0), filled(9)), || ()).result.unwrap();
        block_on(window.write_vectored(Lba(1), vec![filled(10), filled(11)]), || ()).result.unwrap();
        for (block, byte) in [(3, 3), (4, 9), (5, 10), (6, 11)] {
            let read = block_on(inner.read(Lba(block), filled(0)), || ()).into_read().unwrap();
            assert_eq!(read[0], byte, "block {block}");
        }
        let read = block_on(window.read(Lba(2), filled(0)), || ()).into_read().unwrap();
        assert_eq!(read[4095], 11);
        assert_eq!(window.read_in_place(Lba(1), 4096).map(|guard| guard[7]), Some(10));
        assert!(window.write_in_place(Lba(0), 4096, &mut |bytes| bytes[0] = 77));
        assert_eq!(block_on(inner.read(Lba(4), filled(0)), || ()).into_read().unwrap()[0], 77);
        let end = Lba(window.geometry().blocks);
        for at in [end, Lba(u64::MAX)] {
            assert_eq!(block_on(window.write(at, filled(1)), || ()).result, Err(DeviceError::OutOfRange));
        }
    }

    #[test]
    fn blocks_behind_a_part_belong_to_somebody_else() {
        let inner: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 4096).unwrap()));
        let window = DeviceWindow::part(Rc::clone(&inner), 8 << 10..16 << 10);
        assert_eq!(window.geometry().blocks, 2);
        let out_of_range = Err(DeviceError::OutOfRange);
        assert_eq!(block_on(window.write(Lba(2), filled(1)), || ()).result, out_of_range);
        assert_eq!(
            block_on(window.write_vectored(Lba(1), vec![filled(1), filled(1)]), || ()).result,
            out_of_range
        );
        assert_eq!(block_on(window.read(Lba(2), filled(1)), || ()).result, out_of_range);
        assert_eq!(block_on(window.trim(Lba(1), 2), || ()).result, out_of_range);
        assert!(window.read_in_place(Lba(1), 8192).is_none());
        assert!(!window.write_in_place(Lba(2), 4096, &mut |_| ()));
        let read = block_on(inner.read(Lba(3), filled(0)), || ()).into_read().unwrap();
        assert!(read.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_device_without_more_blocks_leaves_none() {
        let inner = Rc::new(MemoryDevice::new(RamDisk::new(8 << 10, 4096).unwrap()));
        assert_eq!(DeviceWindow::behind(inner, 16 << 10).geometry().blocks, 0);
    }
}
