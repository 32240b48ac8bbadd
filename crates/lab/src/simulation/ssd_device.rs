//! The papers' drive as a device of each core: contents, and the times of `octokv_device::ssd_model`.
//!
//! ```text
//!   a core submits ──preceding work is done──▶ model: completion time ──then──▶ completed, the core runs an iteration
//! ```
//! In: operations of any core. Out: their completions. Holds: the model, and each page up to its last byte that is not
//! zero, so that values of zeros take no memory. The SSD model device of `octokv_device` uses the same model; here an
//! operation arrives at the drive when its core has done the work that precedes it, not at the start of the iteration.

use octokv_base::map::FxHashMap;
use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::ssd_model::SsdModel;
use octokv_device::{Device, DeviceFuture, Geometry, IoResult};
use octokv_node::OpenDevice;
use octokv_runtime::simulated::SimEnv;
use octokv_runtime::{InFlightGuard, ReactorHandle};
use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

const PAGE: usize = 4096;

/// The drive that all cores share.
pub struct SharedSsd {
    model: SsdModel,
    pages: FxHashMap<u64, Box<[u8]>>,
}

impl SharedSsd {
    /// An empty drive.
    pub fn new(model: SsdModel) -> Rc<RefCell<SharedSsd>> {
        Rc::new(RefCell::new(SharedSsd { model, pages: FxHashMap::default() }))
    }

    fn write(&mut self, at: Lba, bytes: &[u8]) {
        for (page, bytes) in (at.0..).zip(bytes.chunks(PAGE)) {
            match len_without_trailing_zeros(bytes) {
                0 => self.pages.remove(&page),
                len => self.pages.insert(page, bytes[..len].into()),
            };
        }
    }

    fn read(&self, at: Lba, into: &mut [u8]) {
        for (page, into) in (at.0..).zip(into.chunks_mut(PAGE)) {
            let kept = self.pages.get(&page).map_or(&[][..], |kept| kept);
            into[..kept.len()].copy_from_slice(kept);
            into[kept.len()..].fill(0);
        }
    }
}

/// The length up to the last byte that is not zero. Values are mostly zeros: they are compared in chunks.
fn len_without_trailing_zeros(bytes: &[u8]) -> usize {
    const ZEROS: [u8; 256] = [0; 256];
    let zeros = bytes.rchunks(ZEROS.len()).take_while(|chunk| **chunk == ZEROS[..chunk.len()]);
    let rest = &bytes[..bytes.len() - zeros.map(<[u8]>::len).sum::<usize>()];
    rest.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1)
}

/// The drive as the cores of a node open it.
#[derive(Clone)]
pub struct ModelledDrive {
    ssd: Rc<RefCell<SharedSsd>>,
    geometry: Geometry,
    sim: SimEnv,
}

impl ModelledDrive {
    /// A drive of `pages` pages. On one that reports itself volatile the engine writes no journal.
    pub fn new(ssd: &Rc<RefCell<SharedSsd>>, (pages, volatile): (u64, bool), sim: &SimEnv) -> ModelledDrive {
        let geometry = Geometry { block_bytes: PAGE as u32, blocks: pages, volatile };
        ModelledDrive { ssd: Rc::clone(ssd), geometry, sim: sim.clone() }
    }
}

impl OpenDevice for ModelledDrive {
    fn open_for_core(&self, handle: &ReactorHandle) -> io::Result<Rc<dyn Device>> {
        Ok(Rc::new(SsdDevice { drive: self.clone(), handle: handle.clone() }))
    }
}

/// The device of one core.
struct SsdDevice {
    drive: ModelledDrive,
    handle: ReactorHandle,
}

#[derive(Default)]
struct SsdCompletion {
    result: Option<IoResult>,
    waker: Option<Waker>,
}

struct SsdWait {
    completion: Rc<RefCell<SsdCompletion>>,
    _underway: InFlightGuard,
}

impl Future for SsdWait {
    type Output = IoResult;
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        let mut completion_state = self.completion.borrow_mut();
        match completion_state.result.take() {
            Some(done) => Poll::Ready(done),
            None => {
                completion_state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl SsdDevice {
    /// Submits an operation: `act` runs when it arrives at the drive and returns its completion time and its buffer.
    fn submit(
        &self,
        act: impl FnOnce(&mut SharedSsd, Nanos) -> (Nanos, Option<Buffer>) + 'static,
    ) -> DeviceFuture {
        let completion: Rc<RefCell<SsdCompletion>> = Rc::default();
        let (ssd, sim, later) = (Rc::clone(&self.drive.ssd), self.drive.sim.clone(), Rc::clone(&completion));
        let arrival = self.handle.now() + self.handle.cpu_time().iteration_elapsed();
        self.drive.sim.schedule_at(arrival, move || {
            let (until, buffer) = act(&mut ssd.borrow_mut(), arrival);
            sim.schedule_at(until, move || {
                let mut completion_state = later.borrow_mut();
                completion_state.result = Some(IoResult { buffer, result: Ok(()) });
                if let Some(waker) = completion_state.waker.take() {
                    waker.wake();
                }
            });
        });
        DeviceFuture::boxed(SsdWait { completion, _underway: self.handle.track_operation() })
    }
}

impl Device for SsdDevice {
    fn geometry(&self) -> Geometry {
        self.drive.geometry
    }
    fn name(&self) -> &str {
        "modelled drive"
    }
    fn now(&self) -> Option<Nanos> {
        Some(self.handle.now())
    }
    fn read(&self, at: Lba, mut buffer: Buffer) -> DeviceFuture {
        if !self.drive.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        self.submit(move |flash, now| {
            flash.read(at, &mut buffer);
            (flash.model.read(now, at, (buffer.len() / PAGE) as u64), Some(buffer))
        })
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.drive.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        self.submit(move |flash, now| {
            flash.write(at, &buffer);
            (flash.model.write(now, at, (buffer.len() / PAGE) as u64), Some(buffer))
        })
    }
    fn flush(&self) -> DeviceFuture {
        self.submit(|flash, now| (flash.model.flush(now), None))
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        let end = at.0.saturating_add(blocks).min(self.drive.geometry.blocks);
        self.submit(move |flash, now| (flash.model.trim(now, at, end.saturating_sub(at.0)), None))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailing_zeros_end_at_the_last_byte_that_is_not_zero() {
        for len in [0, 1, 255, 256, 257, 700, PAGE] {
            assert_eq!(len_without_trailing_zeros(&vec![0; len]), 0);
            for last in 0..len {
                let mut bytes = vec![0; len];
                bytes[last] = 1;
                assert_eq!(len_without_trailing_zeros(&bytes), last + 1, "of {len}");
            }
        }
    }
}
