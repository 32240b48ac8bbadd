//! Power loss: a disk for tests that gives the image that a power loss at any write or flush can leave.
//!
//! In: operations. Out: their completions, when [`PowerLossDisk::complete_one`] picks one, and for each past event the
//! images that a power loss there can leave. Holds: the contents, and the history of all writes and flushes.
//!
//! ```text
//!   write ──▶ submitted ──complete──▶ cached ──flush completes──▶ durable
//!                 │                      │
//!                 └── power loss: whole, torn at 512 B, or lost ─┘
//! ```
//! Invariants: a write that completed before the start of a completed flush is in every later image; of any other
//! write, an image holds none, some or all sectors, by the [`PowerLossMode`].
//! Tested below and by the engine's `tests/hash_power_loss.rs`.

use crate::disk_image::DiskImage;
use crate::{Device, DeviceFuture, Geometry, IoResult};
use octokv_base::{Buffer, Lba, Prng};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// The unit of an atomic write, in bytes.
pub const SECTOR_BYTES: usize = 512;

/// Which writes without a later flush survive a power loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PowerLossMode {
    /// None.
    Lost,
    /// All completed ones; each sector of a write in flight is old or new.
    Torn,
    /// Each one independently, whole or not at all. Overlapping writes keep their order of submission.
    Reordered,
    /// All, writes in flight included.
    Kept,
}

impl PowerLossMode {
    /// All modes, for tests that iterate over them.
    pub const ALL: [PowerLossMode; 4] =
        [PowerLossMode::Lost, PowerLossMode::Torn, PowerLossMode::Reordered, PowerLossMode::Kept];
}

/// An event in the history of the disk.
enum HistoryEvent {
    Submitted {
        write: usize,
    },
    Completed {
        write: usize,
    },
    /// A flush made all writes durable that had completed before event `since`.
    Flushed {
        since: usize,
    },
}

struct LoggedWrite {
    offset: usize,
    bytes: Rc<[u8]>,
}

enum DiskOp {
    Read { offset: usize },
    Write { write: usize },
    Flush { since: usize },
}

struct QueuedOp {
    op: DiskOp,
    completion: Rc<RefCell<CompletionSlot>>,
}

struct CompletionSlot {
    result: Option<IoResult>,
    buffer: Option<Buffer>,
    waker: Option<Waker>,
}

struct DiskState {
    contents: DiskImage,
    initial_contents: DiskImage,
    writes: Vec<LoggedWrite>,
    events: Vec<HistoryEvent>,
    queue: VecDeque<QueuedOp>,
}

/// The disk. Clones share its contents and history.
#[derive(Clone)]
pub struct PowerLossDisk {
    disk: Rc<RefCell<DiskState>>,
    geometry: Geometry,
}

impl PowerLossDisk {
    /// A disk with the contents of `image`.
    pub fn new(image: impl Into<DiskImage>, block_bytes: u32) -> PowerLossDisk {
        let image = image.into();
        let blocks = image.len() as u64 / u64::from(block_bytes);
        let disk = DiskState {
            initial_contents: image.clone(),
            contents: image,
            writes: Vec::new(),
            events: Vec::new(),
            queue: VecDeque::new(),
        };
        PowerLossDisk {
            disk: Rc::new(RefCell::new(disk)),
            geometry: Geometry { block_bytes, blocks, volatile: false },
        }
    }

    /// Completes one operation in flight, selected by `random`. False if there is none.
    pub fn complete_one(&self, random: &mut Prng) -> bool {
        let mut disk = self.disk.borrow_mut();
        let queued = disk.queue.len();
        if queued == 0 {
            return false;
        }
        let queued = disk.queue.remove(random.below(queued as u64) as usize).expect("within the queue");
        let mut buffer = queued.completion.borrow_mut().buffer.take();
        match queued.op {
            DiskOp::Read { offset } => {
                let into = buffer.as_mut().expect("a read has a buffer");
                disk.contents.read(offset, into);
            }
            DiskOp::Write { write } => {
                let LoggedWrite { offset, bytes } = &disk.writes[write];
                let (offset, bytes) = (*offset, Rc::clone(bytes));
                disk.contents.write(offset, &bytes);
                disk.events.push(HistoryEvent::Completed { write });
            }
            DiskOp::Flush { since } => disk.events.push(HistoryEvent::Flushed { since }),
        }
        drop(disk);
        let mut completion = queued.completion.borrow_mut();
        completion.result = Some(IoResult { buffer, result: Ok(()) });
        if let Some(waker) = completion.waker.take() {
            waker.wake();
        }
        true
    }

    /// The number of events so far: power can be lost after any of `0..=events()` of them.
    pub fn events(&self) -> usize {
        self.disk.borrow().events.len()
    }

    /// The current contents, with all completed writes.
    pub fn contents(&self) -> Vec<u8> {
        self.disk.borrow().contents.to_vec()
    }

    /// The current contents as an image: cheaper than [`PowerLossDisk::contents`].
    pub fn image(&self) -> DiskImage {
        self.disk.borrow().contents.clone()
    }

    /// An image that a power loss after the first `events` events can leave.
    pub fn image_after_power_loss(&self, events: usize, mode: PowerLossMode, random: &mut Prng) -> DiskImage {
        let mut history = DiskHistory::of(self);
        history.advance(events);
        history.image(mode, random)
    }

    fn submit(&self, op: DiskOp, buffer: Option<Buffer>) -> DeviceFuture {
        let completion = Rc::new(RefCell::new(CompletionSlot { result: None, buffer, waker: None }));
        self.disk.borrow_mut().queue.push_back(QueuedOp { op, completion: Rc::clone(&completion) });
        DeviceFuture::boxed(poll_fn(move |context| {
            let mut completion = completion.borrow_mut();
            match completion.result.take() {
                Some(result) => Poll::Ready(result),
                None => {
                    completion.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

impl Device for PowerLossDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn name(&self) -> &str {
        "power-disk"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let offset = at.0 as usize * self.geometry.block_bytes as usize;
        self.submit(DiskOp::Read { offset }, Some(buffer))
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let offset = at.0 as usize * self.geometry.block_bytes as usize;
        let write = {
            let mut disk = self.disk.borrow_mut();
            let write = disk.writes.len();
            disk.writes.push(LoggedWrite { offset, bytes: Rc::from(&buffer[..]) });
            disk.events.push(HistoryEvent::Submitted { write });
            write
        };
        self.submit(DiskOp::Write { write }, Some(buffer))
    }
    fn flush(&self) -> DeviceFuture {
        let since = self.events();
        self.submit(DiskOp::Flush { since }, None)
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> DeviceFuture {
        DeviceFuture::ready(IoResult { buffer: None, result: Ok(()) })
    }
}

/// A cursor over the history of a disk: makes the images of successive events cheap.
pub struct DiskHistory {
    disk: PowerLossDisk,
    /// The contents that are durable in every mode.
    durable: DiskImage,
    /// Writes without a later flush in the order of submission, with the event of their completion.
    unflushed: Vec<(usize, Option<usize>)>,
    events_applied: usize,
}

impl DiskHistory {
    /// The history of `disk`, before its first event.
    pub fn of(disk: &PowerLossDisk) -> DiskHistory {
        let durable = disk.disk.borrow().initial_contents.clone();
        DiskHistory { disk: disk.clone(), durable, unflushed: Vec::new(), events_applied: 0 }
    }

    /// Advances to the state after `events` events.
    pub fn advance(&mut self, events: usize) {
        let disk = self.disk.disk.borrow();
        for (at, event) in disk.events.iter().enumerate().take(events).skip(self.events_applied) {
            match *event {
                HistoryEvent::Submitted { write } => self.unflushed.push((write, None)),
                HistoryEvent::Completed { write } => {
                    let unflushed = self.unflushed.iter_mut().find(|unflushed| unflushed.0 == write);
                    unflushed.expect("submitted before completed").1 = Some(at);
                }
                HistoryEvent::Flushed { since } => {
                    let covered = |completed: Option<usize>| completed.is_some_and(|at| at < since);
                    // The cache applies writes in the order of completion.
                    let mut flushed: Vec<_> =
                        self.unflushed.iter().copied().filter(|unflushed| covered(unflushed.1)).collect();
                    flushed.sort_by_key(|flushed| flushed.1);
                    for (write, _) in flushed {
                        let LoggedWrite { offset, bytes } = &disk.writes[write];
                        self.durable.write(*offset, bytes);
                    }
                    self.unflushed.retain(|unflushed| !covered(unflushed.1));
                }
            }
        }
        self.events_applied = self.events_applied.max(events);
    }

    /// An image that a power loss at this event can leave.
    pub fn image(&self, mode: PowerLossMode, random: &mut Prng) -> DiskImage {
        let mut image = self.durable.clone();
        let disk = self.disk.disk.borrow();
        for &(write, completed) in &self.unflushed {
            let LoggedWrite { offset, bytes } = &disk.writes[write];
            for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                let kept = match mode {
                    PowerLossMode::Lost => false,
                    PowerLossMode::Kept => true,
                    PowerLossMode::Torn => completed.is_some() || random.one_in(2),
                    PowerLossMode::Reordered => {
                        if index == 0 && random.one_in(2) {
                            break;
                        }
                        true
                    }
                };
                if kept {
                    image.write(offset + index * SECTOR_BYTES, sector);
                }
            }
        }
        image
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_runtime::block_on;

    fn block(byte: u8) -> Buffer {
        let mut buffer = Buffer::zeroed(4096);
        buffer.fill(byte);
        buffer
    }

    #[test]
    fn a_flushed_write_survives_every_power_loss_and_an_unflushed_one_only_some() {
        let (disk, mut random) = (PowerLossDisk::new(vec![0; 16384], 4096), Prng::new(1));
        let mut complete_all = || while disk.complete_one(&mut random) {};
        block_on(disk.write(Lba(0), block(1)), &mut complete_all);
        block_on(disk.flush(), &mut complete_all);
        block_on(disk.write(Lba(1), block(2)), &mut complete_all);
        let mut random = Prng::new(2);
        for mode in PowerLossMode::ALL {
            let image = disk.image_after_power_loss(disk.events(), mode, &mut random).to_vec();
            assert_eq!(image[0], 1, "{mode:?}");
            assert!(image[4096] == 2 || (image[4096] == 0 && mode != PowerLossMode::Kept), "{mode:?}");
        }
        assert_eq!(
            disk.image_after_power_loss(disk.events(), PowerLossMode::Lost, &mut random).to_vec()[4096],
            0
        );
        assert_eq!(disk.image_after_power_loss(0, PowerLossMode::Kept, &mut random).to_vec()[0], 0);
    }

    #[test]
    fn a_write_in_flight_is_torn_between_sectors() {
        let disk = PowerLossDisk::new(vec![0; 4096], 4096);
        let _in_flight = disk.write(Lba(0), block(7));
        let mut random = Prng::new(3);
        let image = disk.image_after_power_loss(disk.events(), PowerLossMode::Torn, &mut random).to_vec();
        let sectors: Vec<u8> = image.chunks(SECTOR_BYTES).map(|sector| sector[0]).collect();
        assert!(sectors.contains(&0) && sectors.contains(&7), "{sectors:?}");
    }

    #[test]
    fn a_flush_covers_only_what_had_completed_before_it() {
        let (disk, mut random) = (PowerLossDisk::new(vec![0; 4096], 4096), Prng::new(4));
        let _flush = disk.flush();
        let _write = disk.write(Lba(0), block(9));
        while disk.complete_one(&mut random) {}
        assert_eq!(
            disk.image_after_power_loss(disk.events(), PowerLossMode::Lost, &mut random).to_vec()[0],
            0
        );
    }
}
