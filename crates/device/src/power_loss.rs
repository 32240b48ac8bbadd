//! Power loss: disks for tests that give the images that a power loss at any write or flush can leave.
//!
//! In: operations. Out: their completions, when [`PowerLossDisk::complete_one`] picks one, and for each past event the
//! images that a power loss there can leave. Holds: the contents, and the history of all writes and flushes. Disks of a
//! group have one history: power is lost on all of them between the same two events.
//!
//! ```text
//!   write ──▶ submitted ──complete──▶ cached ──flush completes──▶ durable
//!                 │                      │
//!                 └── power loss: whole, torn at 512 B, or lost ─┘
//! ```
//! Invariants: a write that completed before the start of a completed flush of its disk is in every later image; of any other
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
    /// A flush made all writes of a disk durable that had completed before event `since`.
    Flushed {
        disk: usize,
        since: usize,
    },
}

struct LoggedWrite {
    disk: usize,
    offset: usize,
    bytes: Rc<[u8]>,
}

enum DiskOp {
    Read { offset: usize },
    Write { write: usize },
    Flush { since: usize },
}

struct QueuedOp {
    disk: usize,
    op: DiskOp,
    completion: Rc<RefCell<CompletionSlot>>,
}

struct CompletionSlot {
    result: Option<IoResult>,
    buffer: Option<Buffer>,
    waker: Option<Waker>,
}

/// The disks of a group.
struct GroupState {
    contents: Vec<DiskImage>,
    initial_contents: Vec<DiskImage>,
    writes: Vec<LoggedWrite>,
    events: Vec<HistoryEvent>,
    queue: VecDeque<QueuedOp>,
}

/// One disk of a group. Clones share its contents, and all disks of a group their history.
#[derive(Clone)]
pub struct PowerLossDisk {
    group: Rc<RefCell<GroupState>>,
    /// Its index in the group.
    index: usize,
    geometry: Geometry,
}

impl PowerLossDisk {
    /// A disk with the contents of `image`, in a group of its own.
    pub fn new(image: impl Into<DiskImage>, block_bytes: u32) -> PowerLossDisk {
        PowerLossDisk::group(vec![image.into()], block_bytes).remove(0)
    }

    /// A group of disks with these contents.
    pub fn group(images: Vec<DiskImage>, block_bytes: u32) -> Vec<PowerLossDisk> {
        let group = Rc::new(RefCell::new(GroupState {
            initial_contents: images.clone(),
            contents: images.clone(),
            writes: Vec::new(),
            events: Vec::new(),
            queue: VecDeque::new(),
        }));
        let geometry = |image: &DiskImage| Geometry {
            block_bytes,
            blocks: image.len() as u64 / u64::from(block_bytes),
            volatile: false,
        };
        let disk =
            |(index, image)| PowerLossDisk { group: Rc::clone(&group), index, geometry: geometry(image) };
        images.iter().enumerate().map(disk).collect()
    }

    /// Completes one operation in flight on any disk of the group, selected by `random`. False if there is none.
    pub fn complete_one(&self, random: &mut Prng) -> bool {
        let mut group = self.group.borrow_mut();
        let queued = group.queue.len();
        if queued == 0 {
            return false;
        }
        let queued = group.queue.remove(random.below(queued as u64) as usize).expect("within the queue");
        let mut buffer = queued.completion.borrow_mut().buffer.take();
        match queued.op {
            DiskOp::Read { offset } => {
                let into = buffer.as_mut().expect("a read has a buffer");
                group.contents[queued.disk].read(offset, into);
            }
            DiskOp::Write { write } => {
                let LoggedWrite { offset, bytes, .. } = &group.writes[write];
                let (offset, bytes) = (*offset, Rc::clone(bytes));
                group.contents[queued.disk].write(offset, &bytes);
                group.events.push(HistoryEvent::Completed { write });
            }
            DiskOp::Flush { since } => {
                group.events.push(HistoryEvent::Flushed { disk: queued.disk, since });
            }
        }
        drop(group);
        let mut completion = queued.completion.borrow_mut();
        completion.result = Some(IoResult { buffer, result: Ok(()) });
        if let Some(waker) = completion.waker.take() {
            waker.wake();
        }
        true
    }

    /// Its index in its group.
    pub fn index_in_group(&self) -> usize {
        self.index
    }

    /// The number of events of the group so far: power can be lost after any of `0..=events()` of them.
    pub fn events(&self) -> usize {
        self.group.borrow().events.len()
    }

    /// The current contents, with all completed writes.
    pub fn contents(&self) -> Vec<u8> {
        self.group.borrow().contents[self.index].to_vec()
    }

    /// The current contents as an image: cheaper than [`PowerLossDisk::contents`].
    pub fn image(&self) -> DiskImage {
        self.group.borrow().contents[self.index].clone()
    }

    /// An image that a power loss after the first `events` events can leave.
    pub fn image_after_power_loss(&self, events: usize, mode: PowerLossMode, random: &mut Prng) -> DiskImage {
        let mut history = DiskHistory::of(self);
        history.advance(events);
        history.image(mode, random)
    }

    fn submit(&self, op: DiskOp, buffer: Option<Buffer>) -> DeviceFuture {
        let completion = Rc::new(RefCell::new(CompletionSlot { result: None, buffer, waker: None }));
        let queued = QueuedOp { disk: self.index, op, completion: Rc::clone(&completion) };
        self.group.borrow_mut().queue.push_back(queued);
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
            let mut group = self.group.borrow_mut();
            let write = group.writes.len();
            group.writes.push(LoggedWrite { disk: self.index, offset, bytes: Rc::from(&buffer[..]) });
            group.events.push(HistoryEvent::Submitted { write });
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

/// A cursor over the history of a group of disks: makes the images of successive events cheap.
pub struct DiskHistory {
    disk: PowerLossDisk,
    /// The contents of each disk that are durable in every mode.
    durable: Vec<DiskImage>,
    /// Writes without a later flush in the order of submission, with the event of their completion.
    unflushed: Vec<(usize, Option<usize>)>,
    events_applied: usize,
}

impl DiskHistory {
    /// The history of the group of `disk`, before its first event.
    pub fn of(disk: &PowerLossDisk) -> DiskHistory {
        let durable = disk.group.borrow().initial_contents.clone();
        DiskHistory { disk: disk.clone(), durable, unflushed: Vec::new(), events_applied: 0 }
    }

    /// Advances to the state after `events` events.
    pub fn advance(&mut self, events: usize) {
        let group = self.disk.group.borrow();
        for (at, event) in group.events.iter().enumerate().take(events).skip(self.events_applied) {
            match *event {
                HistoryEvent::Submitted { write } => self.unflushed.push((write, None)),
                HistoryEvent::Completed { write } => {
                    let unflushed = self.unflushed.iter_mut().find(|unflushed| unflushed.0 == write);
                    unflushed.expect("submitted before completed").1 = Some(at);
                }
                HistoryEvent::Flushed { disk, since } => {
                    let covered = |&(write, completed): &(usize, Option<usize>)| {
                        group.writes[write].disk == disk && completed.is_some_and(|at| at < since)
                    };
                    // The cache applies writes in the order of completion.
                    let mut flushed: Vec<_> = self.unflushed.iter().copied().filter(covered).collect();
                    flushed.sort_by_key(|flushed| flushed.1);
                    for (write, _) in flushed {
                        let LoggedWrite { offset, bytes, .. } = &group.writes[write];
                        self.durable[disk].write(*offset, bytes);
                    }
                    self.unflushed.retain(|unflushed| !covered(unflushed));
                }
            }
        }
        self.events_applied = self.events_applied.max(events);
    }

    /// An image of the disk that a power loss at this event can leave.
    pub fn image(&self, mode: PowerLossMode, random: &mut Prng) -> DiskImage {
        self.images(mode, random).swap_remove(self.disk.index)
    }

    /// The images of the group's disks that a power loss at this event can leave.
    pub fn images(&self, mode: PowerLossMode, random: &mut Prng) -> Vec<DiskImage> {
        let mut images = self.durable.clone();
        let group = self.disk.group.borrow();
        for &(write, completed) in &self.unflushed {
            let LoggedWrite { disk, offset, bytes } = &group.writes[write];
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
                    images[*disk].write(offset + index * SECTOR_BYTES, sector);
                }
            }
        }
        images
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
    fn a_flush_of_one_disk_leaves_the_writes_of_another_unflushed() {
        let disks = PowerLossDisk::group(vec![vec![0; 8192].into(), vec![0; 4096].into()], 4096);
        assert_eq!([0, 1].map(|disk: usize| disks[disk].geometry().blocks), [2, 1]);
        let mut random = Prng::new(5);
        let mut complete_all = || while disks[0].complete_one(&mut random) {};
        block_on(disks[1].write(Lba(0), block(2)), &mut complete_all);
        block_on(disks[0].write(Lba(1), block(1)), &mut complete_all);
        block_on(disks[0].flush(), &mut complete_all);
        let mut history = DiskHistory::of(&disks[1]);
        history.advance(disks[0].events());
        let mut random = Prng::new(6);
        let lost = history.images(PowerLossMode::Lost, &mut random);
        assert_eq!((lost[0].to_vec()[4096], lost[1].to_vec()[0]), (1, 0));
        let kept = history.images(PowerLossMode::Kept, &mut random);
        assert_eq!((kept[0].to_vec()[4096], kept[1].to_vec()[0]), (1, 2));
        assert_eq!(disks[1].contents()[0], 2);
        assert!(history.image(PowerLossMode::Kept, &mut random) == kept[1]);
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
