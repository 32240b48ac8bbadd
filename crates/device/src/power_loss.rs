//! A disk whose power can be cut at any write or flush, to see what its user finds afterwards.
//!
//! In: operations. Out: their completion, when [`PowerDisk::complete`] picks one; and for every point
//! of the past the images that a power cut there can leave. Holds: the contents, and the history of
//! every write and flush since the start.
//!
//! ```text
//!   write ──▶ submitted ──complete──▶ cached ──flush completes──▶ durable
//!                 │                      │
//!                 └── power cut: whole, torn at 512 B, or lost ──┘
//! ```
//! Invariants: a write whose completion came before a completed flush began is in every later image;
//! any other write is in none, some or all of its sectors, by the chosen [`Cut`].
//! Tested by the power-cut tests of the engines.

use crate::{Device, Done, Geometry, Pending};
use octokv_base::{Buffer, Lba, Random};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// The unit that a power cut leaves whole, in bytes.
pub const SECTOR_BYTES: usize = 512;

/// What becomes of the writes that no flush has made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// None of them survives.
    Lost,
    /// All that completed survive; those under way are torn, each sector old or new.
    Torn,
    /// Each survives or not on its own, whatever their order was.
    Reordered,
    /// All of them survive, those under way included.
    Kept,
}

impl Cut {
    /// Every variant.
    pub const ALL: [Cut; 4] = [Cut::Lost, Cut::Torn, Cut::Reordered, Cut::Kept];
}

/// One thing that happened at the disk.
enum Event {
    Submitted {
        write: usize,
    },
    Completed {
        write: usize,
    },
    /// The flush made durable all writes completed before event `since`.
    Flushed {
        since: usize,
    },
}

struct Write {
    offset: usize,
    bytes: Rc<[u8]>,
}

enum Work {
    Read { offset: usize },
    Write { write: usize },
    Flush { since: usize },
}

struct Queued {
    work: Work,
    answer: Rc<RefCell<Answer>>,
}

struct Answer {
    done: Option<Done>,
    buffer: Option<Buffer>,
    waker: Option<Waker>,
}

struct Disk {
    contents: Vec<u8>,
    at_start: Vec<u8>,
    writes: Vec<Write>,
    events: Vec<Event>,
    queue: VecDeque<Queued>,
}

/// The disk, shared by cloning.
#[derive(Clone)]
pub struct PowerDisk {
    disk: Rc<RefCell<Disk>>,
    geometry: Geometry,
}

impl PowerDisk {
    /// A disk that holds `image`.
    pub fn new(image: Vec<u8>, block_bytes: u32) -> PowerDisk {
        let blocks = image.len() as u64 / u64::from(block_bytes);
        let disk = Disk {
            at_start: image.clone(),
            contents: image,
            writes: Vec::new(),
            events: Vec::new(),
            queue: VecDeque::new(),
        };
        PowerDisk {
            disk: Rc::new(RefCell::new(disk)),
            geometry: Geometry { block_bytes, blocks, volatile: false },
        }
    }

    /// Completes one operation under way, any of them, as `random` chooses. False when there is none.
    pub fn complete(&self, random: &mut Random) -> bool {
        let mut disk = self.disk.borrow_mut();
        let waiting = disk.queue.len();
        if waiting == 0 {
            return false;
        }
        let queued = disk.queue.remove(random.below(waiting as u64) as usize).expect("within the queue");
        let mut buffer = queued.answer.borrow_mut().buffer.take();
        match queued.work {
            Work::Read { offset } => {
                let into = buffer.as_mut().expect("a read has a buffer");
                let len = into.len();
                into.copy_from_slice(&disk.contents[offset..offset + len]);
            }
            Work::Write { write } => {
                let Write { offset, bytes } = &disk.writes[write];
                let (offset, bytes) = (*offset, Rc::clone(bytes));
                disk.contents[offset..offset + bytes.len()].copy_from_slice(&bytes);
                disk.events.push(Event::Completed { write });
            }
            Work::Flush { since } => disk.events.push(Event::Flushed { since }),
        }
        drop(disk);
        let mut answer = queued.answer.borrow_mut();
        answer.done = Some(Done { buffer, result: Ok(()) });
        if let Some(waker) = answer.waker.take() {
            waker.wake();
        }
        true
    }

    /// How many things have happened: the points at which the power may be cut are `0..=events()`.
    pub fn events(&self) -> usize {
        self.disk.borrow().events.len()
    }

    /// What the disk holds now, all writes that completed included.
    pub fn contents(&self) -> Vec<u8> {
        self.disk.borrow().contents.clone()
    }

    /// The image that a power cut after the first `events` events leaves.
    pub fn cut(&self, events: usize, cut: Cut, random: &mut Random) -> Vec<u8> {
        let mut history = History::of(self);
        history.advance(events);
        history.image(cut, random)
    }

    fn submit(&self, work: Work, buffer: Option<Buffer>) -> Pending {
        let answer = Rc::new(RefCell::new(Answer { done: None, buffer, waker: None }));
        self.disk.borrow_mut().queue.push_back(Queued { work, answer: Rc::clone(&answer) });
        Pending::later(poll_fn(move |context| {
            let mut answer = answer.borrow_mut();
            match answer.done.take() {
                Some(done) => Poll::Ready(done),
                None => {
                    answer.waker = Some(context.waker().clone());
                    Poll::Pending
                }
            }
        }))
    }
}

impl Device for PowerDisk {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn name(&self) -> &str {
        "power-disk"
    }
    fn read(&self, at: Lba, buffer: Buffer) -> Pending {
        if !self.geometry.holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        let offset = at.0 as usize * self.geometry.block_bytes as usize;
        self.submit(Work::Read { offset }, Some(buffer))
    }
    fn write(&self, at: Lba, buffer: Buffer) -> Pending {
        if !self.geometry.holds(at, buffer.len()) {
            return Pending::out_of_range(Some(buffer));
        }
        let offset = at.0 as usize * self.geometry.block_bytes as usize;
        let write = {
            let mut disk = self.disk.borrow_mut();
            let write = disk.writes.len();
            disk.writes.push(Write { offset, bytes: Rc::from(&buffer[..]) });
            disk.events.push(Event::Submitted { write });
            write
        };
        self.submit(Work::Write { write }, Some(buffer))
    }
    fn flush(&self) -> Pending {
        let since = self.events();
        self.submit(Work::Flush { since }, None)
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> Pending {
        Pending::ready(Done { buffer: None, result: Ok(()) })
    }
}

/// The past of a disk, walked forward event by event: cheap when every point is cut in turn.
pub struct History {
    disk: PowerDisk,
    /// What is durable for sure.
    durable: Vec<u8>,
    /// Writes that no flush covers, in the order of their submission, and the event that completed them.
    loose: Vec<(usize, Option<usize>)>,
    at: usize,
}

impl History {
    /// The past of `disk`, from its start.
    pub fn of(disk: &PowerDisk) -> History {
        let durable = disk.disk.borrow().at_start.clone();
        History { disk: disk.clone(), durable, loose: Vec::new(), at: 0 }
    }

    /// Goes forward until `events` events have happened.
    pub fn advance(&mut self, events: usize) {
        let disk = self.disk.disk.borrow();
        for (at, event) in disk.events.iter().enumerate().take(events).skip(self.at) {
            match *event {
                Event::Submitted { write } => self.loose.push((write, None)),
                Event::Completed { write } => {
                    let loose = self.loose.iter_mut().find(|loose| loose.0 == write);
                    loose.expect("submitted before completed").1 = Some(at);
                }
                Event::Flushed { since } => {
                    let covered = |completed: Option<usize>| completed.is_some_and(|at| at < since);
                    // In the order of completion, which is the order the cache holds them in.
                    let mut settled: Vec<_> =
                        self.loose.iter().copied().filter(|loose| covered(loose.1)).collect();
                    settled.sort_by_key(|loose| loose.1);
                    for (write, _) in settled {
                        let Write { offset, bytes } = &disk.writes[write];
                        self.durable[*offset..offset + bytes.len()].copy_from_slice(bytes);
                    }
                    self.loose.retain(|loose| !covered(loose.1));
                }
            }
        }
        self.at = self.at.max(events);
    }

    /// The image that a power cut leaves at this point.
    pub fn image(&self, cut: Cut, random: &mut Random) -> Vec<u8> {
        let mut image = self.durable.clone();
        let disk = self.disk.disk.borrow();
        for &(write, completed) in &self.loose {
            let Write { offset, bytes } = &disk.writes[write];
            for (index, sector) in bytes.chunks(SECTOR_BYTES).enumerate() {
                let kept = match cut {
                    Cut::Lost => false,
                    Cut::Kept => true,
                    Cut::Torn => completed.is_some() || random.one_in(2),
                    Cut::Reordered => {
                        if index == 0 && random.one_in(2) {
                            break;
                        }
                        true
                    }
                };
                if kept {
                    let at = offset + index * SECTOR_BYTES;
                    image[at..at + sector.len()].copy_from_slice(sector);
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
    fn a_flushed_write_survives_every_cut_and_a_loose_one_only_some() {
        let (disk, mut random) = (PowerDisk::new(vec![0; 16384], 4096), Random::new(1));
        let mut settle = || while disk.complete(&mut random) {};
        block_on(disk.write(Lba(0), block(1)), &mut settle);
        block_on(disk.flush(), &mut settle);
        block_on(disk.write(Lba(1), block(2)), &mut settle);
        let mut random = Random::new(2);
        for cut in Cut::ALL {
            let image = disk.cut(disk.events(), cut, &mut random);
            assert_eq!(image[0], 1, "{cut:?}");
            assert!(image[4096] == 2 || (image[4096] == 0 && cut != Cut::Kept), "{cut:?}");
        }
        assert_eq!(disk.cut(disk.events(), Cut::Lost, &mut random)[4096], 0);
        assert_eq!(disk.cut(0, Cut::Kept, &mut random)[0], 0);
    }

    #[test]
    fn a_write_under_way_is_torn_between_sectors() {
        let disk = PowerDisk::new(vec![0; 4096], 4096);
        let _under_way = disk.write(Lba(0), block(7));
        let mut random = Random::new(3);
        let image = disk.cut(disk.events(), Cut::Torn, &mut random);
        let sectors: Vec<u8> = image.chunks(SECTOR_BYTES).map(|sector| sector[0]).collect();
        assert!(sectors.contains(&0) && sectors.contains(&7), "{sectors:?}");
    }

    #[test]
    fn a_flush_covers_only_what_had_completed_before_it() {
        let (disk, mut random) = (PowerDisk::new(vec![0; 4096], 4096), Random::new(4));
        let _flush = disk.flush();
        let _write = disk.write(Lba(0), block(9));
        while disk.complete(&mut random) {}
        assert_eq!(disk.cut(disk.events(), Cut::Lost, &mut random)[0], 0);
    }
}
