//! The papers' drive as a device of each core: contents, and the times of `octokv_device::ssd_model`.
//!
//! ```text
//!   a core submits ──preceding work is done──▶ model: completion time ──then──▶ completed, the core runs an iteration
//! ```
//! In: operations of any core. Out: their completions. Holds: the model, and each page of 4 KiB, with blocks of a page up to its last byte
//! that is not zero, so that values of zeros take no memory. Blocks are those of the model, and not longer than a page. The SSD model device of
//! `octokv_device` uses the same model; here an operation arrives at the drive when its core has done the work that precedes it, not at
//! the start of the iteration. That work may include a time for each command ([`ModelledDrive::with_command_cost`]).

use octokv_base::map::FxHashMap;
use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::ssd_model::SsdModel;
use octokv_device::{Device, DeviceFuture, Geometry, IoResult};
use octokv_node::OpenDevice;
use octokv_runtime::cpu_accounting::Stage;
use octokv_runtime::simulated::SimEnv;
use octokv_runtime::{InFlightGuard, ReactorHandle};
use std::cell::RefCell;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

const PAGE: usize = 4096;

/// The commands that a drive has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SsdCommands {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Flushes and trims.
    pub others: u64,
    /// Bytes of all reads.
    pub read_bytes: u64,
    /// Bytes of all writes.
    pub written_bytes: u64,
}

/// The drive that all cores share.
#[derive(Clone)]
pub struct SharedSsd {
    model: SsdModel,
    block_bytes: usize,
    pages: FxHashMap<u64, Box<[u8]>>,
    commands: SsdCommands,
}

impl SharedSsd {
    /// An empty drive whose blocks are those of its model, of this length.
    pub fn new(model: SsdModel, block_bytes: usize) -> Rc<RefCell<SharedSsd>> {
        let (pages, commands) = (FxHashMap::default(), SsdCommands::default());
        Rc::new(RefCell::new(SharedSsd { model, block_bytes, pages, commands }))
    }

    /// Another drive with the same contents in the same state.
    pub fn copied(&self) -> Rc<RefCell<SharedSsd>> {
        Rc::new(RefCell::new(self.clone()))
    }

    /// The drive's model.
    pub fn model(&self) -> &SsdModel {
        &self.model
    }

    /// The commands so far.
    pub fn commands(&self) -> SsdCommands {
        self.commands
    }

    /// The first blocks of all pages that were written and are not zeros, ascending.
    pub fn written_pages(&self) -> Vec<Lba> {
        let blocks_in_page = self.blocks(PAGE);
        let mut pages: Vec<Lba> = self.pages.keys().map(|&page| Lba(page * blocks_in_page)).collect();
        pages.sort_unstable();
        pages
    }

    fn blocks(&self, bytes: usize) -> u64 {
        (bytes / self.block_bytes) as u64
    }

    /// The pages that bytes from a block on touch: number, first byte in it, length.
    fn parts(&self, at: Lba, bytes: usize) -> impl Iterator<Item = (u64, usize, usize)> + use<> {
        let start = at.0 * self.block_bytes as u64;
        let (mut page, mut from, mut left) = (start / PAGE as u64, (start % PAGE as u64) as usize, bytes);
        std::iter::from_fn(move || {
            let part = (page, from, left.min(PAGE - from));
            (page, from, left) = (page + 1, 0, left - part.2);
            (part.2 > 0).then_some(part)
        })
    }

    fn write(&mut self, at: Lba, bytes: &[u8]) {
        let mut rest = bytes;
        for (page, from, len) in self.parts(at, bytes.len()) {
            let (part, behind) = rest.split_at(len);
            rest = behind;
            if self.block_bytes < PAGE {
                // Blocks of one page are written one by one: it is kept whole.
                let kept = self.pages.entry(page).or_insert_with(|| vec![0; PAGE].into());
                kept[from..from + len].copy_from_slice(part);
                continue;
            }
            match len_without_trailing_zeros(part) {
                0 => self.pages.remove(&page),
                len => self.pages.insert(page, part[..len].into()),
            };
        }
    }

    fn read(&self, at: Lba, into: &mut [u8]) {
        let mut rest = into;
        for (page, from, len) in self.parts(at, rest.len()) {
            let (part, behind) = rest.split_at_mut(len);
            rest = behind;
            let kept = self.pages.get(&page).and_then(|kept| kept.get(from..)).unwrap_or_default();
            let kept = &kept[..kept.len().min(len)];
            part[..kept.len()].copy_from_slice(kept);
            part[kept.len()..].fill(0);
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
    command_cost: Nanos,
}

impl ModelledDrive {
    /// A drive of `blocks` blocks. On one that reports itself volatile the engine writes no journal.
    pub fn new(ssd: &Rc<RefCell<SharedSsd>>, (blocks, volatile): (u64, bool), sim: &SimEnv) -> ModelledDrive {
        let geometry = Geometry { block_bytes: ssd.borrow().block_bytes as u32, blocks, volatile };
        ModelledDrive { ssd: Rc::clone(ssd), geometry, sim: sim.clone(), command_cost: Nanos::ZERO }
    }

    /// The same, and each command takes this time of its core before it leaves.
    pub fn with_command_cost(self, command_cost: Nanos) -> ModelledDrive {
        ModelledDrive { command_cost, ..self }
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
        self.handle.cpu_time().advance_simulated(Stage::Device, self.drive.command_cost);
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
            flash.commands.reads += 1;
            flash.commands.read_bytes += buffer.len() as u64;
            let blocks = flash.blocks(buffer.len());
            (flash.model.read(now, at, blocks), Some(buffer))
        })
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.drive.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        self.submit(move |flash, now| {
            flash.write(at, &buffer);
            flash.commands.writes += 1;
            flash.commands.written_bytes += buffer.len() as u64;
            let blocks = flash.blocks(buffer.len());
            (flash.model.write(now, at, blocks), Some(buffer))
        })
    }
    fn flush(&self) -> DeviceFuture {
        self.submit(|flash, now| {
            flash.commands.others += 1;
            (flash.model.flush(now), None)
        })
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        let end = at.0.saturating_add(blocks).min(self.drive.geometry.blocks);
        self.submit(move |flash, now| {
            flash.commands.others += 1;
            (flash.model.trim(now, at, end.saturating_sub(at.0)), None)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_shorter_than_a_page_keep_their_neighbours() {
        use octokv_device::ssd_model::drive_profiles::DCT_983;
        let model = SsdModel::new(DCT_983.scaled_down(4, 64), 512);
        let ssd = SharedSsd::new(model, 512);
        let mut ssd = ssd.borrow_mut();
        // From the last two blocks of a page over a whole one into the third, then over a part of it.
        let long: Vec<u8> = (0..11 * 512).map(|at| (at % 251) as u8 + 1).collect();
        ssd.write(Lba(6), &long);
        ssd.write(Lba(9), &[7; 1024]);
        let mut expected = vec![0; 32 * 512];
        expected[6 * 512..17 * 512].copy_from_slice(&long);
        expected[9 * 512..11 * 512].fill(7);
        for (from, blocks) in [(0, 32), (5, 4), (10, 1), (16, 3), (20, 8)] {
            let mut read = vec![1; blocks * 512];
            ssd.read(Lba(from as u64), &mut read);
            assert!(read == expected[from * 512..(from + blocks) * 512], "{from}");
        }
    }

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
