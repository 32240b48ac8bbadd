//! Disks of the virtual world: contents in memory, a volatile write cache, and what a power cut leaves.
//!
//! ```text
//!   write ──service time──▶ visible and answered, in `unflushed` ──flush answered──▶ durable
//! ```
//! A flush covers the writes that had been answered when it was submitted, no others. A power cut keeps
//! what is durable, and of every other write, answered or in flight, what the [`CrashPlan`] says, in
//! units of 512 bytes: all, nothing, or any part, a later one without an earlier one included.
//!
//! Invariants: `unflushed` is in the order of application, and rolling it back from its end gives the
//! durable contents exactly; pages are shared, so keeping both states costs only what differs.

use super::event_queue::{Agenda, Event};
use super::{HostId, Stop};
use crate::device_queue::{Completed, Operation};
use octokv_base::map::Map;
use octokv_base::{Nanos, Random};
use std::collections::VecDeque;
use std::rc::Rc;

/// One disk of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskId(pub u32);

/// What a disk is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskSettings {
    /// Its size, a multiple of 4096.
    pub size_bytes: u64,
    /// The unit of transfers.
    pub block_bytes: u32,
    /// How long a read takes, besides its bytes.
    pub read: Nanos,
    /// How long a write (or trim) takes, besides its bytes.
    pub write: Nanos,
    /// How long a flush takes.
    pub flush: Nanos,
    /// Up to so much is added to each.
    pub jitter: Nanos,
    /// How fast each unit moves bytes. Zero: at once.
    pub bytes_per_second: u64,
    /// How many operations it works on at a time; later ones wait.
    pub units: usize,
}

impl Default for DiskSettings {
    /// A small data-centre NVMe drive: 64 MiB, 4 KiB blocks.
    fn default() -> DiskSettings {
        DiskSettings {
            size_bytes: 64 << 20,
            block_bytes: 4096,
            read: Nanos::from_micros(70),
            write: Nanos::from_micros(15),
            flush: Nanos::from_micros(20),
            jitter: Nanos::from_micros(10),
            bytes_per_second: 1_000_000_000,
            units: 8,
        }
    }
}

/// What of the writes that were not flushed a power cut leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashPlan {
    /// All of them, those in flight included.
    KeepAll,
    /// None.
    LoseAll,
    /// Each whole write or none of it, by lot.
    Some,
    /// Each 512 bytes of each write, by lot: torn writes.
    Torn,
}

/// What tears: the unit that a disk writes entirely or not at all.
pub const SECTOR_BYTES: usize = 512;
const PAGE: usize = 4096;
type Page = [u8; PAGE];
/// A page of the contents; none reads as zeroes.
type Content = Option<Rc<Page>>;
type Pages = Vec<Content>;

#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskEvent {
    disk: u32,
    operation: u32,
    generation: u32,
}

/// A write (or trim) that has been applied and not flushed.
struct Unflushed {
    sequence: u64,
    offset: u64,
    bytes: u64,
    /// By page, from the first that is touched: what was there, and what is there now.
    pages: Vec<(Content, Content)>,
}

struct Pending {
    queue: u32,
    ticket: u32,
    operation: Operation,
    /// Of a flush: the last write it covers.
    covers: u64,
}

struct Disk {
    host: HostId,
    settings: DiskSettings,
    contents: Map<u64, Rc<Page>>,
    unflushed: VecDeque<Unflushed>,
    sequence: u64,
    pending: Vec<Option<Pending>>,
    generations: Vec<u32>,
    free: Vec<u32>,
    /// When each unit is free.
    units: Vec<Nanos>,
}

/// One core's way to the disks of its host.
pub(crate) struct Queue {
    host: HostId,
    pub(crate) alive: bool,
    pub(crate) in_flight: usize,
    pub(crate) done: Vec<(u32, Completed)>,
}

impl Queue {
    pub(crate) fn new(host: HostId) -> Queue {
        Queue { host, alive: true, in_flight: 0, done: Vec::new() }
    }
}

/// All disks and their queues.
pub(crate) struct Disks {
    random: Random,
    disks: Vec<Disk>,
    pub(crate) queues: Vec<Queue>,
}

impl Disks {
    pub(crate) fn new(random: Random) -> Disks {
        Disks { random, disks: Vec::new(), queues: Vec::new() }
    }

    pub(crate) fn add(&mut self, host: HostId, settings: DiskSettings) -> DiskId {
        assert!(settings.size_bytes.is_multiple_of(PAGE as u64) && settings.units > 0, "{settings:?}");
        self.disks.push(Disk {
            host,
            settings,
            contents: Map::default(),
            unflushed: VecDeque::new(),
            sequence: 0,
            pending: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
            units: vec![Nanos::ZERO; settings.units],
        });
        DiskId((self.disks.len() - 1) as u32)
    }

    pub(crate) fn settings(&self, disk: DiskId) -> DiskSettings {
        self.disks[disk.0 as usize].settings
    }

    pub(crate) fn unflushed(&self, disk: DiskId) -> usize {
        self.disks[disk.0 as usize].unflushed.len()
    }

    pub(crate) fn read_image(&self, disk: DiskId, offset: u64, into: &mut [u8]) {
        self.disks[disk.0 as usize].read(offset, into);
    }

    pub(crate) fn write_image(&mut self, disk: DiskId, offset: u64, bytes: &[u8]) {
        let disk = &mut self.disks[disk.0 as usize];
        let (before, _) = disk.apply(offset, bytes.len() as u64, Some(bytes));
        drop(before);
    }

    pub(crate) fn submit(
        &mut self,
        queue: u32,
        ticket: u32,
        disk: u32,
        operation: Operation,
        now: Nanos,
        agenda: &mut Agenda,
    ) {
        self.queues[queue as usize].in_flight += 1;
        let jitter = self.disks[disk as usize].settings.jitter.0;
        let jitter = Nanos(self.random.below(jitter + 1));
        let target = &mut self.disks[disk as usize];
        let at = match target.refusal(&operation) {
            true => now,
            false => target.finish_time(&operation, jitter, now),
        };
        let covers = target.sequence;
        let pending = Pending { queue, ticket, operation, covers };
        let index = target.free.pop().unwrap_or_else(|| {
            target.pending.push(None);
            target.generations.push(0);
            (target.pending.len() - 1) as u32
        });
        target.pending[index as usize] = Some(pending);
        let generation = target.generations[index as usize];
        agenda.set(at, Event::Disk(DiskEvent { disk, operation: index, generation }));
    }

    /// Carries an event out; gives a fact for the trace.
    pub(crate) fn happen(&mut self, event: DiskEvent) -> u64 {
        let disk = &mut self.disks[event.disk as usize];
        let index = event.operation as usize;
        if disk.generations[index] != event.generation {
            return 20;
        }
        let Some(Pending { queue, ticket, operation, covers }) = disk.retire(index) else { return 21 };
        let completed = disk.carry_out(operation, covers);
        let queue = &mut self.queues[queue as usize];
        if queue.alive {
            queue.done.push((ticket, completed));
        }
        22 ^ u64::from(ticket) << 8
    }

    pub(crate) fn stop_host(&mut self, host: HostId, stop: Stop) {
        for queue in self.queues.iter_mut().filter(|queue| queue.host == host) {
            queue.alive = false;
            queue.done.clear();
        }
        for disk in self.disks.iter_mut().filter(|disk| disk.host == host) {
            for index in 0..disk.pending.len() {
                let Some(pending) = disk.retire(index) else { continue };
                // Whether or not it happens is decided below; what is in flight is like unflushed.
                let changes = matches!(pending.operation, Operation::Write { .. } | Operation::Trim { .. });
                if changes && !disk.refusal(&pending.operation) {
                    disk.carry_out(pending.operation, 0);
                }
            }
            disk.units.fill(Nanos::ZERO);
            if let Stop::PowerCut(plan) = stop {
                disk.crash(plan, &mut self.random);
            }
        }
    }
}

impl Disk {
    fn retire(&mut self, index: usize) -> Option<Pending> {
        let pending = self.pending[index].take()?;
        self.generations[index] += 1;
        self.free.push(index as u32);
        Some(pending)
    }

    /// Whether the operation is outside the disk or not in whole blocks.
    fn refusal(&self, operation: &Operation) -> bool {
        let (offset, bytes) = match operation {
            Operation::Read { offset, buffer } | Operation::Write { offset, buffer } => {
                (*offset, buffer.len() as u64)
            }
            Operation::Trim { offset, bytes } => (*offset, *bytes),
            Operation::Flush => return false,
        };
        let block = u64::from(self.settings.block_bytes);
        let end = offset.checked_add(bytes);
        !offset.is_multiple_of(block)
            || !bytes.is_multiple_of(block)
            || end.is_none_or(|end| end > self.settings.size_bytes)
    }

    fn finish_time(&mut self, operation: &Operation, jitter: Nanos, now: Nanos) -> Nanos {
        let (base, bytes) = match operation {
            Operation::Read { buffer, .. } => (self.settings.read, buffer.len()),
            Operation::Write { buffer, .. } => (self.settings.write, buffer.len()),
            Operation::Trim { .. } => (self.settings.write, 0),
            Operation::Flush => return now + self.settings.flush + jitter,
        };
        let rate = self.settings.bytes_per_second;
        let moving = (bytes as u64).saturating_mul(1_000_000_000).checked_div(rate).unwrap_or(0);
        let first = (0..self.units.len()).min_by_key(|&unit| self.units[unit]).unwrap_or(0);
        let unit = &mut self.units[first];
        *unit = (*unit).max(now) + base + jitter + Nanos(moving);
        *unit
    }

    fn carry_out(&mut self, operation: Operation, covers: u64) -> Completed {
        if self.refusal(&operation) {
            let buffer = match operation {
                Operation::Read { buffer, .. } | Operation::Write { buffer, .. } => Some(buffer),
                Operation::Flush | Operation::Trim { .. } => None,
            };
            return Completed { buffer, result: Err(EINVAL) };
        }
        match operation {
            Operation::Read { offset, mut buffer } => {
                self.read(offset, &mut buffer);
                Completed { buffer: Some(buffer), result: Ok(()) }
            }
            Operation::Write { offset, buffer } => {
                self.write(offset, buffer.len() as u64, Some(&buffer));
                Completed { buffer: Some(buffer), result: Ok(()) }
            }
            Operation::Trim { offset, bytes } => {
                self.write(offset, bytes, None);
                Completed { buffer: None, result: Ok(()) }
            }
            Operation::Flush => {
                while self.unflushed.front().is_some_and(|write| write.sequence <= covers) {
                    self.unflushed.pop_front();
                }
                Completed { buffer: None, result: Ok(()) }
            }
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let within = (at % PAGE as u64) as usize;
            let count = rest.len().min(PAGE - within);
            let (part, tail) = rest.split_at_mut(count);
            match self.contents.get(&(at / PAGE as u64)) {
                Some(page) => part.copy_from_slice(&page[within..within + count]),
                None => part.fill(0),
            }
            at += count as u64;
            rest = tail;
        }
    }

    fn write(&mut self, offset: u64, bytes: u64, data: Option<&[u8]>) {
        let (before, after) = self.apply(offset, bytes, data);
        self.sequence += 1;
        let pages = before.into_iter().zip(after).collect();
        self.unflushed.push_back(Unflushed { sequence: self.sequence, offset, bytes, pages });
    }

    /// Puts data (zeroes without) into the contents; gives the touched pages before and after.
    fn apply(&mut self, offset: u64, bytes: u64, data: Option<&[u8]>) -> (Pages, Pages) {
        let (mut before, mut after) = (Vec::new(), Vec::new());
        let mut done = 0;
        while done < bytes {
            let at = offset + done;
            let (number, within) = (at / PAGE as u64, (at % PAGE as u64) as usize);
            let count = (bytes - done).min((PAGE - within) as u64) as usize;
            before.push(self.contents.get(&number).cloned());
            if data.is_none() && count == PAGE {
                self.contents.remove(&number);
            } else {
                let page = self.contents.entry(number).or_insert_with(|| Rc::new([0; PAGE]));
                let to = &mut Rc::make_mut(page)[within..within + count];
                match data {
                    Some(data) => to.copy_from_slice(&data[done as usize..done as usize + count]),
                    None => to.fill(0),
                }
            }
            after.push(self.contents.get(&number).cloned());
            done += count as u64;
        }
        (before, after)
    }

    /// What a power cut leaves.
    fn crash(&mut self, plan: CrashPlan, random: &mut Random) {
        let unflushed = std::mem::take(&mut self.unflushed);
        if plan == CrashPlan::KeepAll {
            return;
        }
        for write in unflushed.iter().rev() {
            let first = write.offset / PAGE as u64;
            for (number, (before, _)) in (first..).zip(&write.pages) {
                match before {
                    Some(page) => self.contents.insert(number, Rc::clone(page)),
                    None => self.contents.remove(&number),
                };
            }
        }
        if plan == CrashPlan::LoseAll {
            return;
        }
        for write in &unflushed {
            let whole = random.one_in(2);
            let sectors = (write.bytes as usize).div_ceil(SECTOR_BYTES);
            for sector in 0..sectors {
                let keep = if plan == CrashPlan::Torn { random.one_in(2) } else { whole };
                if keep {
                    self.keep_sector(write, (sector * SECTOR_BYTES) as u64);
                }
            }
        }
    }

    fn keep_sector(&mut self, write: &Unflushed, from: u64) {
        let at = write.offset + from;
        let number = at / PAGE as u64;
        let within = (at % PAGE as u64) as usize;
        let index = (number - write.offset / PAGE as u64) as usize;
        let count = SECTOR_BYTES.min((write.bytes - from) as usize);
        let page = self.contents.entry(number).or_insert_with(|| Rc::new([0; PAGE]));
        let to = &mut Rc::make_mut(page)[within..within + count];
        match &write.pages[index].1 {
            Some(after) => to.copy_from_slice(&after[within..within + count]),
            None => to.fill(0),
        }
    }
}

const EINVAL: i32 = 22;
