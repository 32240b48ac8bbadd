//! Simulated disks: contents in memory, a volatile write cache, and the contents after a power loss.
//!
//! ```text
//!   write ──service time──▶ visible and completed, in `unflushed` ──flush completed──▶ durable
//! ```
//! A flush covers the writes that completed before its submission, no others. A power loss keeps the durable contents.
//! Of every other write, completed or in flight, the [`CrashModel`] selects the part to keep, in units of 512 bytes:
//! all, nothing, or any part, and possibly a later write without an earlier one.
//!
//! Invariants: `unflushed` is in the order of application, and undoing it from its end restores the durable contents
//! exactly; pages are shared, so both states cost only the pages that differ. Tested in `tests/simulated.rs`.

use super::event::{DiskEvent, SimEvent};
use super::event_queue::EventQueue;
use super::failure::{CrashModel, HostFailure};
use super::ids::{DriverId, SimDiskId, SimHostId};
use crate::device_queue::{IoCompletion, IoOperation};
use octokv_base::map::FxHashMap;
use octokv_base::{Nanos, Prng};
use slab::Slab;
use std::collections::VecDeque;
use std::rc::Rc;

/// The size and timing of a simulated disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimDiskConfig {
    /// The size in bytes, a multiple of 4096.
    pub size_bytes: u64,
    /// The unit of transfers, in bytes.
    pub block_bytes: u32,
    /// The latency of a read, without its transfer time.
    pub read_latency: Nanos,
    /// The latency of a write or trim, without its transfer time.
    pub write_latency: Nanos,
    /// The latency of a flush.
    pub flush_latency: Nanos,
    /// The maximum of the uniform random addition to each latency.
    pub jitter: Nanos,
    /// The transfer rate of each parallel unit. 0: transfers take no time.
    pub bytes_per_second: u64,
    /// The number of operations executed at a time, at least 1; later ones wait.
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

/// The atomic write unit, in bytes: a power loss keeps a sector of a write whole or not at all.
pub const SECTOR_BYTES: usize = 512;
const PAGE_BYTES: usize = 4096;
type DiskPage = [u8; PAGE_BYTES];
/// A page of the contents; `None` reads as zeroes.
type PageContent = Option<Rc<DiskPage>>;
type PageContents = Vec<PageContent>;

/// A write (or trim) that is applied and not flushed.
struct UnflushedWrite {
    sequence: u64,
    offset: u64,
    bytes: u64,
    /// For each touched page, from the first: its contents before and after.
    pages: Vec<(PageContent, PageContent)>,
}

struct PendingOp {
    /// Unique on its disk: an event of an earlier operation in the same slot does not match.
    sequence: u64,
    queue: u32,
    token: u32,
    operation: IoOperation,
    /// For a flush: the sequence number of the last write that it covers.
    flush_through: u64,
}

struct SimDisk {
    host: SimHostId,
    config: SimDiskConfig,
    /// Whether every operation fails.
    is_lost: bool,
    contents: FxHashMap<u64, Rc<DiskPage>>,
    unflushed: VecDeque<UnflushedWrite>,
    /// The number of writes and trims applied.
    sequence: u64,
    pending: Slab<PendingOp>,
    /// The number of operations submitted.
    operation_sequence: u64,
    /// For each parallel unit, when it becomes free.
    unit_free_at: Vec<Nanos>,
}

/// One core's queue to the disks of its host.
pub(crate) struct SimQueueState {
    host: SimHostId,
    driver: DriverId,
    pub(crate) is_open: bool,
    pub(crate) in_flight: usize,
    pub(crate) completions: Vec<(u32, IoCompletion)>,
}

impl SimQueueState {
    pub(crate) fn new(host: SimHostId, driver: DriverId) -> SimQueueState {
        SimQueueState { host, driver, is_open: true, in_flight: 0, completions: Vec::new() }
    }
}

/// All disks and their queues.
pub(crate) struct SimDisks {
    random: Prng,
    disks: Vec<SimDisk>,
    pub(crate) queues: Vec<SimQueueState>,
    /// The drivers of queues with new completions, until their reactors are woken.
    pub(crate) ready_drivers: Vec<DriverId>,
}

impl SimDisks {
    pub(crate) fn new(random: Prng) -> SimDisks {
        SimDisks { random, disks: Vec::new(), queues: Vec::new(), ready_drivers: Vec::new() }
    }

    pub(crate) fn add(&mut self, host: SimHostId, config: SimDiskConfig) -> SimDiskId {
        assert!(config.size_bytes.is_multiple_of(PAGE_BYTES as u64) && config.parallelism > 0, "{config:?}");
        self.disks.push(SimDisk {
            host,
            config,
            is_lost: false,
            contents: FxHashMap::default(),
            unflushed: VecDeque::new(),
            sequence: 0,
            pending: Slab::new(),
            operation_sequence: 0,
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

    pub(crate) fn lose(&mut self, disk: SimDiskId) {
        self.disks[disk.0 as usize].is_lost = true;
    }

    pub(crate) fn replace(&mut self, disk: SimDiskId) {
        let disk = &mut self.disks[disk.0 as usize];
        disk.is_lost = false;
        disk.contents.clear();
        disk.unflushed.clear();
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
        let operation = operation.into_single_buffer();
        let jitter = self.disks[disk as usize].config.jitter.0;
        let jitter = Nanos(self.random.below(jitter + 1));
        let sim_disk = &mut self.disks[disk as usize];
        let at = match sim_disk.is_invalid(&operation) {
            true => now,
            false => sim_disk.completion_time(&operation, jitter, now),
        };
        let flush_through = sim_disk.sequence;
        sim_disk.operation_sequence += 1;
        let sequence = sim_disk.operation_sequence;
        let slot = sim_disk.pending.insert(PendingOp { sequence, queue, token, operation, flush_through });
        events.schedule(at, SimEvent::Disk(DiskEvent { disk, slot, sequence }));
    }

    /// Applies an event; returns a value for the trace hash.
    pub(crate) fn apply_event(&mut self, event: DiskEvent) -> u64 {
        let disk = &mut self.disks[event.disk as usize];
        if disk.pending.get(event.slot).is_none_or(|pending| pending.sequence != event.sequence) {
            return 20;
        }
        let PendingOp { queue, token, operation, flush_through, .. } = disk.pending.remove(event.slot);
        let completed = disk.execute(operation, flush_through);
        let queue = &mut self.queues[queue as usize];
        if queue.is_open {
            queue.completions.push((token, completed));
            self.ready_drivers.push(queue.driver);
        }
        22 ^ u64::from(token) << 8
    }

    pub(crate) fn stop_host(&mut self, host: SimHostId, failure: HostFailure) {
        for queue in self.queues.iter_mut().filter(|queue| queue.host == host) {
            queue.is_open = false;
            queue.completions.clear();
        }
        for disk in self.disks.iter_mut().filter(|disk| disk.host == host) {
            for pending in disk.take_all_pending() {
                // An operation in flight counts as unflushed: the crash model below decides about it.
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
    /// Takes all operations in flight, in slot order.
    fn take_all_pending(&mut self) -> Vec<PendingOp> {
        // Removed one by one, not drained: the order in which slots are reused is part of a run's trace.
        let slots: Vec<usize> = self.pending.iter().map(|(slot, _)| slot).collect();
        slots.into_iter().map(|slot| self.pending.remove(slot)).collect()
    }

    /// Whether the operation exceeds the disk or is not in whole blocks.
    fn is_invalid(&self, operation: &IoOperation) -> bool {
        let (offset, bytes) = match operation {
            IoOperation::Read { offset, buffer } | IoOperation::Write { offset, buffer } => {
                (*offset, buffer.len() as u64)
            }
            IoOperation::Trim { offset, bytes } => (*offset, *bytes),
            IoOperation::WriteVectored { .. } => return true, // Every one became a write at its submission.
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
            IoOperation::WriteVectored { .. } | IoOperation::Trim { .. } => (self.config.write_latency, 0),
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
        if self.is_lost || self.is_invalid(&operation) {
            let buffer = match operation {
                IoOperation::Read { buffer, .. } | IoOperation::Write { buffer, .. } => Some(buffer),
                IoOperation::WriteVectored { .. } | IoOperation::Flush | IoOperation::Trim { .. } => None,
            };
            return IoCompletion { buffer, result: Err(if self.is_lost { EIO } else { EINVAL }) };
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
            IoOperation::WriteVectored { .. } => IoCompletion { buffer: None, result: Err(EINVAL) },
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

    /// Writes `data` (zeroes if `None`) to the contents; returns the touched pages before and after.
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

    /// Undoes the unflushed writes and reapplies those that the model keeps.
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

const EIO: i32 = 5;
const EINVAL: i32 = 22;
