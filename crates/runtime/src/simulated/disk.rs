//! Disks of the virtual world: contents in memory, a volatile write cache, and what a power cut leaves.
//!
//! ```text
//!   write ──service time──▶ visible and answered, in `unflushed` ──flush answered──▶ durable
//! ```
//! A flush covers the writes that had been answered when it was submitted, no others. A power cut keeps
//! what is durable, and of every other write, answered or in flight, what the [`CrashModel`] says, in
//! units of 512 bytes: all, nothing, or any part, a later one without an earlier one included.
//!
//! Invariants: `unflushed` is in the order of application, and rolling it back from its end gives the
//! durable contents exactly; pages are shared, so keeping both states costs only what differs.

use super::event_queue::{EventQueue, SimEvent};
use super::{HostFailure, SimHostId};
use crate::device_queue::{IoCompletion, IoOperation};
use octokv_base::map::FxHashMap;
use octokv_base::{Nanos, Prng};
use std::collections::VecDeque;
use std::rc::Rc;

/// One disk of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimDiskId(pub u32);

/// What a disk is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimDiskConfig {
    /// Its size, a multiple of 4096.
    pub size_bytes: u64,
    /// The unit of transfers.
    pub block_bytes: u32,
    /// How long a read takes, besides its bytes.
    pub read_latency: Nanos,
    /// How long a write (or trim) takes, besides its bytes.
    pub write_latency: Nanos,
    /// How long a flush takes.
    pub flush_latency: Nanos,
    /// Up to so much is added to each.
    pub jitter: Nanos,
    /// How fast each unit moves bytes. Zero: at once.
    pub bytes_per_second: u64,
    /// How many operations it works on at a time; later ones wait.
    pub parallelism: usize,
}

impl Default for SimDiskConfig {
    /// A small data-centre NVMe drive: 64 MiB, 4 KiB blocks.
    fn default() -> SimDiskConfig {
        SimDiskConfig {
            size_bytes: 64 << 20,
            block_bytes: 4096,
            read_latency: Nanos::from_micros(70),
            write_latency: Nanos::from_micros(15),
            flush_latency: Nanos::from_micros(20),
            jitter: Nanos::from_micros(10),
            bytes_per_second: 1_000_000_000,
            parallelism: 8,
        }
    }
}

/// What of the writes that were not flushed a power cut leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CrashModel {
    /// All of them, those in flight included.
    KeepAll,
    /// None.
    LoseAll,
    /// Each whole write or none of it, by lot.
    RandomWrites,
    /// Each 512 bytes of each write, by lot: torn writes.
    TornWrites,
}

/// What tears: the unit that a disk writes entirely or not at all.
pub const SECTOR_BYTES: usize = 512;
const PAGE_BYTES: usize = 4096;
type DiskPage = [u8; PAGE_BYTES];
/// A page of the contents; none reads as zeroes.
type PageContent = Option<Rc<DiskPage>>;
type PageContents = Vec<PageContent>;

#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskEvent {
    disk: u32,
    operation: u32,
    generation: u32,
}

/// A write (or trim) that has been applied and not flushed.
struct UnflushedWrite {
    sequence: u64,
    offset: u64,
    bytes: u64,
    /// By page, from the first that is touched: what was there, and what is there now.
    pages: Vec<(PageContent, PageContent)>,
}

struct PendingOp {
    queue: u32,
    token: u32,
    operation: IoOperation,
    /// Of a flush: the last write it covers.
    flush_through: u64,
}

struct SimDisk {
    host: SimHostId,
    config: SimDiskConfig,
    contents: FxHashMap<u64, Rc<DiskPage>>,
    unflushed: VecDeque<UnflushedWrite>,
    sequence: u64,
    pending: Vec<Option<PendingOp>>,
    generations: Vec<u32>,
    free: Vec<u32>,
    /// When each unit is free.
    unit_free_at: Vec<Nanos>,
}

/// One core's way to the disks of its host.
pub(crate) struct SimQueueState {
    host: SimHostId,
    pub(crate) is_open: bool,
    pub(crate) in_flight: usize,
    pub(crate) completions: Vec<(u32, IoCompletion)>,
}

impl SimQueueState {
    pub(crate) fn new(host: SimHostId) -> SimQueueState {
        SimQueueState { host, is_open: true, in_flight: 0, completions: Vec::new() }
    }
}

/// All disks and their queues.
pub(crate) struct SimDisks {
    random: Prng,
    disks: Vec<SimDisk>,
    pub(crate) queues: Vec<SimQueueState>,
}

impl SimDisks {
    pub(crate) fn new(random: Prng) -> SimDisks {
        SimDisks { random, disks: Vec::new(), queues: Vec::new() }
    }

    pub(crate) fn add(&mut self, host: SimHostId, config: SimDiskConfig) -> SimDiskId {
        assert!(config.size_bytes.is_multiple_of(PAGE_BYTES as u64) && config.parallelism > 0, "{config:?}");
        self.disks.push(SimDisk {
            host,
            config,
            contents: FxHashMap::default(),
            unflushed: VecDeque::new(),
            sequence: 0,
            pending: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
            unit_free_at: vec![Nanos::ZERO; config.parallelism],
        });
        SimDiskId((self.disks.len() - 1) as u32)
    }

    pub(crate) fn config(&self, disk: SimDiskId) -> SimDiskConfig {
        self.disks[disk.0 as usize].config
    }

    pub(crate) fn unflushed_write_count(&self, disk: SimDiskId) -> usize {
        self.disks[disk.0 as usize].unflushed.len()
    }

    pub(crate) fn read_image(&self, disk: SimDiskId, offset: u64, into: &mut [u8]) {
        self.disks[disk.0 as usize].read(offset, into);
    }

    pub(crate) fn write_image(&mut self, disk: SimDiskId, offset: u64, bytes: &[u8]) {
        let disk = &mut self.disks[disk.0 as usize];
        let (before, _) = disk.apply(offset, bytes.len() as u64, Some(bytes));
        drop(before);
    }

    pub(crate) fn submit(
        &mut self,
        queue: u32,
        token: u32,
        disk: u32,
        operation: IoOperation,
        now: Nanos,
        events: &mut EventQueue,
    ) {
        self.queues[queue as usize].in_flight += 1;
        let jitter = self.disks[disk as usize].config.jitter.0;
        let jitter = Nanos(self.random.below(jitter + 1));
        let sim_disk = &mut self.disks[disk as usize];
        let at = match sim_disk.is_invalid(&operation) {
            true => now,
            false => sim_disk.completion_time(&operation, jitter, now),
        };
        let flush_through = sim_disk.sequence;
        let pending = PendingOp { queue, token, operation, flush_through };
        let index = sim_disk.free.pop().unwrap_or_else(|| {
            sim_disk.pending.push(None);
            sim_disk.generations.push(0);
            (sim_disk.pending.len() - 1) as u32
        });
        sim_disk.pending[index as usize] = Some(pending);
        let generation = sim_disk.generations[index as usize];
        events.schedule(at, SimEvent::Disk(DiskEvent { disk, operation: index, generation }));
    }

    /// Carries an event out; gives a fact for the trace.
    pub(crate) fn apply_event(&mut self, event: DiskEvent) -> u64 {
        let disk = &mut self.disks[event.disk as usize];
        let index = event.operation as usize;
        if disk.generations[index] != event.generation {
            return 20;
        }
        let Some(PendingOp { queue, token, operation, flush_through }) = disk.take_pending(index) else {
            return 21;
        };
        let completed = disk.execute(operation, flush_through);
        let queue = &mut self.queues[queue as usize];
        if queue.is_open {
            queue.completions.push((token, completed));
        }
        22 ^ u64::from(token) << 8
    }

    pub(crate) fn stop_host(&mut self, host: SimHostId, failure: HostFailure) {
        for queue in self.queues.iter_mut().filter(|queue| queue.host == host) {
            queue.is_open = false;
            queue.completions.clear();
        }
        for disk in self.disks.iter_mut().filter(|disk| disk.host == host) {
            for index in 0..disk.pending.len() {
                let Some(pending) = disk.take_pending(index) else { continue };
                // Whether or not it happens is decided below; what is in flight is like unflushed.
                let changes =
                    matches!(pending.operation, IoOperation::Write { .. } | IoOperation::Trim { .. });
                if changes && !disk.is_invalid(&pending.operation) {
                    disk.execute(pending.operation, 0);
                }
            }
            disk.unit_free_at.fill(Nanos::ZERO);
            if let HostFailure::PowerLoss(model) = failure {
                disk.apply_power_loss(model, &mut self.random);
            }
        }
    }
}

impl SimDisk {
    fn take_pending(&mut self, index: usize) -> Option<PendingOp> {
        let pending = self.pending[index].take()?;
        self.generations[index] += 1;
        self.free.push(index as u32);
        Some(pending)
    }

    /// Whether the operation is outside the disk or not in whole blocks.
    fn is_invalid(&self, operation: &IoOperation) -> bool {
        let (offset, bytes) = match operation {
            IoOperation::Read { offset, buffer } | IoOperation::Write { offset, buffer } => {
                (*offset, buffer.len() as u64)
            }
            IoOperation::Trim { offset, bytes } => (*offset, *bytes),
            IoOperation::Flush => return false,
        };
        let block = u64::from(self.config.block_bytes);
        let end = offset.checked_add(bytes);
        !offset.is_multiple_of(block)
            || !bytes.is_multiple_of(block)
            || end.is_none_or(|end| end > self.config.size_bytes)
    }

    fn completion_time(&mut self, operation: &IoOperation, jitter: Nanos, now: Nanos) -> Nanos {
        let (base, bytes) = match operation {
            IoOperation::Read { buffer, .. } => (self.config.read_latency, buffer.len()),
            IoOperation::Write { buffer, .. } => (self.config.write_latency, buffer.len()),
            IoOperation::Trim { .. } => (self.config.write_latency, 0),
            IoOperation::Flush => return now + self.config.flush_latency + jitter,
        };
        let rate = self.config.bytes_per_second;
        let transfer_time = (bytes as u64).saturating_mul(1_000_000_000).checked_div(rate).unwrap_or(0);
        let first = (0..self.unit_free_at.len()).min_by_key(|&unit| self.unit_free_at[unit]).unwrap_or(0);
        let unit = &mut self.unit_free_at[first];
        *unit = (*unit).max(now) + base + jitter + Nanos(transfer_time);
        *unit
    }

    fn execute(&mut self, operation: IoOperation, flush_through: u64) -> IoCompletion {
        if self.is_invalid(&operation) {
            let buffer = match operation {
                IoOperation::Read { buffer, .. } | IoOperation::Write { buffer, .. } => Some(buffer),
                IoOperation::Flush | IoOperation::Trim { .. } => None,
            };
            return IoCompletion { buffer, result: Err(EINVAL) };
        }
        match operation {
            IoOperation::Read { offset, mut buffer } => {
                self.read(offset, &mut buffer);
                IoCompletion { buffer: Some(buffer), result: Ok(()) }
            }
            IoOperation::Write { offset, buffer } => {
                self.write(offset, buffer.len() as u64, Some(&buffer));
                IoCompletion { buffer: Some(buffer), result: Ok(()) }
            }
            IoOperation::Trim { offset, bytes } => {
                self.write(offset, bytes, None);
                IoCompletion { buffer: None, result: Ok(()) }
            }
            IoOperation::Flush => {
                while self.unflushed.front().is_some_and(|write| write.sequence <= flush_through) {
                    self.unflushed.pop_front();
                }
                IoCompletion { buffer: None, result: Ok(()) }
            }
        }
    }

    fn read(&self, offset: u64, into: &mut [u8]) {
        let mut at = offset;
        let mut rest = into;
        while !rest.is_empty() {
            let within = (at % PAGE_BYTES as u64) as usize;
            let count = rest.len().min(PAGE_BYTES - within);
            let (part, tail) = rest.split_at_mut(count);
            match self.contents.get(&(at / PAGE_BYTES as u64)) {
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
        self.unflushed.push_back(UnflushedWrite { sequence: self.sequence, offset, bytes, pages });
    }

    /// Puts data (zeroes without) into the contents; gives the touched pages before and after.
    fn apply(&mut self, offset: u64, bytes: u64, data: Option<&[u8]>) -> (PageContents, PageContents) {
        let (mut before, mut after) = (Vec::new(), Vec::new());
        let mut done = 0;
        while done < bytes {
            let at = offset + done;
            let (number, within) = (at / PAGE_BYTES as u64, (at % PAGE_BYTES as u64) as usize);
            let count = (bytes - done).min((PAGE_BYTES - within) as u64) as usize;
            before.push(self.contents.get(&number).cloned());
            if data.is_none() && count == PAGE_BYTES {
                self.contents.remove(&number);
            } else {
                let page = self.contents.entry(number).or_insert_with(|| Rc::new([0; PAGE_BYTES]));
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
    fn apply_power_loss(&mut self, model: CrashModel, random: &mut Prng) {
        let unflushed = std::mem::take(&mut self.unflushed);
        if model == CrashModel::KeepAll {
            return;
        }
        for write in unflushed.iter().rev() {
            let first = write.offset / PAGE_BYTES as u64;
            for (number, (before, _)) in (first..).zip(&write.pages) {
                match before {
                    Some(page) => self.contents.insert(number, Rc::clone(page)),
                    None => self.contents.remove(&number),
                };
            }
        }
        if model == CrashModel::LoseAll {
            return;
        }
        for write in &unflushed {
            let whole = random.one_in(2);
            let sectors = (write.bytes as usize).div_ceil(SECTOR_BYTES);
            for sector in 0..sectors {
                let keep = if model == CrashModel::TornWrites { random.one_in(2) } else { whole };
                if keep {
                    self.reapply_sector(write, (sector * SECTOR_BYTES) as u64);
                }
            }
        }
    }

    fn reapply_sector(&mut self, write: &UnflushedWrite, from: u64) {
        let at = write.offset + from;
        let number = at / PAGE_BYTES as u64;
        let within = (at % PAGE_BYTES as u64) as usize;
        let index = (number - write.offset / PAGE_BYTES as u64) as usize;
        let count = SECTOR_BYTES.min((write.bytes - from) as usize);
        let page = self.contents.entry(number).or_insert_with(|| Rc::new([0; PAGE_BYTES]));
        let to = &mut Rc::make_mut(page)[within..within + count];
        match &write.pages[index].1 {
            Some(after) => to.copy_from_slice(&after[within..within + count]),
            None => to.fill(0),
        }
    }
}

const EINVAL: i32 = 22;
