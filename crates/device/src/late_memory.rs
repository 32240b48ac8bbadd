//! Memory whose writes are late, for tests: a write happens when its future is polled for the second time.
//!
//! A write to memory ends at once, so on one thread no other core can be seen between its begin and its end. With this
//! device one can: the writer has its space, and the bytes are still those of before. What is done in place is not late.

use crate::{Device, DeviceFuture, Geometry, MemoryDevice, RamDisk, ReadGuard};
use octokv_base::{Buffer, Lba};
use octokv_runtime::yield_now;
use std::rc::Rc;
use std::sync::Arc;

/// See the module header.
pub struct LateMemory(Rc<MemoryDevice>);

impl LateMemory {
    /// A core's view of `memory`.
    pub fn new(memory: Arc<RamDisk>) -> LateMemory {
        LateMemory(Rc::new(MemoryDevice::new(memory)))
    }
}

impl Device for LateMemory {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn name(&self) -> &str {
        "late memory"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.0.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let memory = Rc::clone(&self.0);
        DeviceFuture::boxed(async move {
            yield_now().await;
            memory.write(at, buffer).await
        })
    }
    fn read_in_place(&self, at: Lba, bytes: usize) -> Option<ReadGuard<'_>> {
        self.0.read_in_place(at, bytes)
    }
    fn write_in_place(&self, at: Lba, bytes: usize, write: &mut dyn FnMut(&mut [u8])) -> bool {
        self.0.write_in_place(at, bytes, write)
    }
    fn flush(&self) -> DeviceFuture {
        self.0.flush()
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.0.trim(at, blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::Pin;
    use std::task::{Context, Poll, Waker};

    #[test]
    fn a_write_happens_at_its_second_poll() {
        let memory = RamDisk::new(1 << 20, 512).unwrap();
        let (late, other) = (LateMemory::new(Arc::clone(&memory)), MemoryDevice::new(memory));
        let read = || other.read_in_place(Lba(3), 512).map(|bytes| bytes[0]);
        let mut buffer = Buffer::zeroed(512);
        buffer[0] = 7;
        let mut write = late.write(Lba(3), buffer);
        let mut poll = || Pin::new(&mut write).poll(&mut Context::from_waker(Waker::noop()));
        assert!(poll().is_pending());
        assert_eq!(read(), Some(0), "begun, and not done");
        let Poll::Ready(done) = poll() else { panic!("a third poll") };
        assert_eq!((done.result, read()), (Ok(()), Some(7)));
    }
}
