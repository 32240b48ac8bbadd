//! A volume in memory whose writes a test sees, and whose completions it holds back.

#![allow(dead_code)]

use super::HashFixture;
use super::unwritten::AllUnwritten;
use octokv_base::{Buffer, Lba};
use octokv_device::fault_injection::{FaultDevice, FaultPlan};
use octokv_device::{Device, DeviceError, DeviceFuture, Geometry, IoResult, MemoryDevice, RamDisk};
use octokv_engine::Durability;
use octokv_engine::conformance::EngineFixture;
use octokv_engine::hash::HashEngine;
use octokv_runtime::block_on;
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// The block and the unit of the volume, in bytes.
pub const BLOCK_BYTES: u64 = 512;

/// Non-volatile memory that logs writes, counts flushes, and completes long writes and flushes only when they are
/// released.
pub struct TracingMemory {
    pub memory: MemoryDevice,
    pub is_volatile: bool,
    pub trace: Rc<DeviceTrace>,
}

#[derive(Default)]
pub struct DeviceTrace {
    /// First block and length in bytes of each write.
    pub writes: RefCell<Vec<(u64, usize)>>,
    pub flushes: Cell<u64>,
    /// Writes of at least so many bytes do not complete; 0 holds none.
    pub held_from_bytes: Cell<usize>,
    /// Whether writes that were held report an error; their bytes are written nevertheless.
    pub held_writes_fail: Cell<bool>,
    /// Whether flushes do not complete.
    pub holds_flushes: Cell<bool>,
    /// Whether flushes that were held report an error.
    pub held_flushes_fail: Cell<bool>,
    held: RefCell<Vec<Waker>>,
}

impl DeviceTrace {
    /// Completes everything that is held, and holds nothing more.
    pub fn release(&self) {
        self.held_from_bytes.set(0);
        self.holds_flushes.set(false);
        self.held.take().into_iter().for_each(Waker::wake);
    }

    fn hold<T>(&self, context: &Context<'_>) -> Poll<T> {
        self.held.borrow_mut().push(context.waker().clone());
        Poll::Pending
    }
}

impl Device for TracingMemory {
    fn geometry(&self) -> Geometry {
        Geometry { volatile: self.is_volatile, ..self.memory.geometry() }
    }
    fn name(&self) -> &str {
        "traced"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        self.memory.read(at, buffer)
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        let (trace, bytes) = (Rc::clone(&self.trace), buffer.len());
        trace.writes.borrow_mut().push((at.0, bytes));
        let mut written = Box::pin(self.memory.write(at, buffer));
        let is_long = move |trace: &DeviceTrace| (1..=bytes).contains(&trace.held_from_bytes.get());
        let was_held = is_long(&trace);
        DeviceFuture::boxed(poll_fn(move |context| {
            if is_long(&trace) {
                trace.hold(context)
            } else if was_held && trace.held_writes_fail.get() {
                Poll::Ready(IoResult { buffer: None, result: Err(DeviceError::Io(5)) })
            } else {
                written.as_mut().poll(context)
            }
        }))
    }
    fn flush(&self) -> DeviceFuture {
        self.trace.flushes.set(self.trace.flushes.get() + 1);
        let trace = Rc::clone(&self.trace);
        let was_held = trace.holds_flushes.get();
        DeviceFuture::boxed(poll_fn(move |context| {
            if trace.holds_flushes.get() {
                return trace.hold(context);
            }
            let fails = was_held && trace.held_flushes_fail.get();
            let result = if fails { Err(DeviceError::Io(5)) } else { Ok(()) };
            Poll::Ready(IoResult { buffer: None, result })
        }))
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        self.memory.trim(at, blocks)
    }
}

/// A fresh volume in such memory.
pub struct TracedVolume {
    pub engine: Rc<HashEngine>,
    pub trace: Rc<DeviceTrace>,
    pub plan: FaultPlan,
    device: Rc<dyn Device>,
    fixture: HashFixture,
}

impl TracedVolume {
    pub fn new(durability: Durability, bytes: u64) -> TracedVolume {
        let mut fixture = HashFixture { durability, ..HashFixture::default() };
        fixture.format.unit_bytes = Some(BLOCK_BYTES as u32);
        TracedVolume::of(fixture, bytes, |device| device)
    }

    fn of(
        fixture: HashFixture,
        bytes: u64,
        view: impl FnOnce(Rc<dyn Device>) -> Rc<dyn Device>,
    ) -> TracedVolume {
        let (trace, plan) = (Rc::<DeviceTrace>::default(), FaultPlan::default());
        let memory = MemoryDevice::new(RamDisk::new(bytes, BLOCK_BYTES as u32).unwrap());
        let traced = Rc::new(TracingMemory { memory, is_volatile: false, trace: Rc::clone(&trace) });
        let device = view(Rc::new(FaultDevice::new(traced, plan.clone())));
        block_on(fixture.format(Rc::clone(&device)), || ());
        let engine = Rc::new(block_on(fixture.open(Rc::clone(&device)), || ()).unwrap());
        trace.writes.borrow_mut().clear();
        trace.flushes.set(0);
        TracedVolume { engine, trace, plan, device, fixture }
    }

    /// A fresh volume that prepares so many bytes, in memory that reports every block as never written.
    pub fn preparing(bytes: u64, prepare_bytes: u64, partitions_log2: u8) -> TracedVolume {
        let mut fixture = HashFixture { prepare_bytes, ..HashFixture::default() };
        fixture.format.unit_bytes = Some(BLOCK_BYTES as u32);
        (fixture.format.bitmap_partitions_log2, fixture.format.value_bytes_max) = (partitions_log2, 16 << 10);
        TracedVolume::of(fixture, bytes, |device| Rc::new(AllUnwritten(device)))
    }

    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// Opens the volume again, without a shutdown.
    pub fn reopen(&mut self) {
        self.engine = Rc::new(block_on(self.fixture.open(Rc::clone(&self.device)), || ()).unwrap());
    }
}

/// Polls a future without a waker.
pub fn poll_once<T>(future: &mut Pin<&mut (impl Future<Output = T> + ?Sized)>) -> Option<T> {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}
