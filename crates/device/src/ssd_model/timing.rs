//! A solid-state drive as times: how long each operation of the host takes, and what the drive does besides.
//!
//! ```text
//!             controller        link in                    channel       die
//!   write ──▶ one at a time ──▶ ─────────▶ buffer ─ answered    ─▶ ─ in ─▶ program
//!                                            └── stripes, in the background ─┘
//!   read  ──▶ one at a time ──▶ buffer, or die: read ─▶ channel ─ out ─▶ link out ─ answered
//!   flush ──▶ one at a time ──▶ the end of every program, and the mapping ─ answered (or at once: capacitors)
//! ```
//! In: operations and the time at which they come. Out: the time at which each is done. Holds: when each die, channel
//! and direction of the link is free, the buffer, and where every page lies. It does nothing by itself: what it would
//! have done in the background it does first when it is next asked. Deterministic: no randomness, no clock.
//!
//! What it keeps to:
//! - A program or a move is begun when its die is free and not before, so reads that come meanwhile go first; a full
//!   buffer or a flush begins them ahead of time, and then reads wait behind them. No program is suspended for a read.
//! - A stripe goes to the die that is free first. Pages that are collected stay on their die.
//! - A die is taken while its cells work; its page register is free for the channel while the next piece of work goes
//!   on (cache read and cache program).
//! - Reads ahead of a sequential host are not modelled, nor wear, nor errors.
//!
//! Invariants: no operation is done before it comes; times that go backwards, from cores whose clocks were read at
//! different moments, count as the latest time seen. Tested in `tests/nand_model.rs`, and against the data sheets in
//! `tests/nand_drives.rs`.

use crate::ssd_model::drive_profiles::{DriveProfile, FlushModel, transfer_time};
use crate::ssd_model::ftl::{CellMode, FlashAddress, Ftl, PAGE_BYTES, WriteStream};
use crate::ssd_model::timeline::Timeline;
use crate::ssd_model::write_buffer::WriteBuffer;
use octokv_base::{Lba, Nanos};

/// What has been done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SsdStatistics {
    /// Pages of 4 KiB that the host wrote, in whole or in part.
    pub host_pages_written: u64,
    /// Pages of 4 KiB that were programmed, those that stayed unused included.
    pub flash_pages_written: u64,
    /// Pages of 4 KiB that were collected.
    pub pages_moved: u64,
    /// Page reads by dies.
    pub reads: u64,
    /// Programs by dies, with all bits of a cell.
    pub programs: u64,
    /// Programs by dies, one bit a cell.
    pub slc_programs: u64,
    /// Erased blocks.
    pub erases: u64,
    /// The most pages that the buffer ever held.
    pub buffer_pages_max: u32,
    /// How long each die was at work.
    pub die_busy: Vec<Nanos>,
}

impl SsdStatistics {
    /// How many pages were programmed for one that the host wrote.
    pub fn write_amplification(&self) -> f64 {
        self.flash_pages_written as f64 / self.host_pages_written.max(1) as f64
    }
}

/// A drive at work.
#[derive(Debug)]
pub struct SsdModel {
    profile: DriveProfile,
    block_bytes: u64,
    /// Pages that nothing wrote are read from dies all the same.
    prefilled: bool,
    ftl: Ftl,
    buffer: WriteBuffer,
    stripe_pages: u32,
    /// When each die is free.
    dies: Vec<Nanos>,
    channels: Vec<Timeline>,
    link_in: Timeline,
    link_out: Timeline,
    controller: Nanos,
    now: Nanos,
    /// When the last command came.
    last_command: Nanos,
    /// Where the search for a free die begins.
    next_die: u32,
    /// Something was written since the last flush.
    has_unflushed: bool,
    /// When the last flush is done.
    flushed_at: Nanos,
    statistics: SsdStatistics,
    scratch_pages: Vec<u32>,
}

impl SsdModel {
    /// A new drive, with logical blocks of `block_bytes` bytes.
    ///
    /// # Panics
    /// When blocks are longer than 4 KiB, or when the drive's numbers do not fit together.
    pub fn new(drive: DriveProfile, block_bytes: u32) -> SsdModel {
        assert!(PAGE_BYTES.is_multiple_of(u64::from(block_bytes)), "blocks of {block_bytes} bytes");
        let stripe_pages = (drive.stripe_bytes() / PAGE_BYTES) as u32;
        let buffer_pages = (drive.buffer_bytes / PAGE_BYTES) as u32;
        assert!(buffer_pages >= stripe_pages, "{}: the buffer holds no stripe", drive.name);
        let dies = drive.dies() as usize;
        SsdModel {
            block_bytes: u64::from(block_bytes),
            prefilled: false,
            ftl: Ftl::new(&drive),
            buffer: WriteBuffer::new(buffer_pages),
            stripe_pages,
            dies: vec![Nanos::ZERO; dies],
            channels: (0..drive.channels).map(|_| Timeline::default()).collect(),
            link_in: Timeline::default(),
            link_out: Timeline::default(),
            controller: Nanos::ZERO,
            now: Nanos::ZERO,
            last_command: Nanos::ZERO,
            next_die: 0,
            has_unflushed: false,
            flushed_at: Nanos::ZERO,
            statistics: SsdStatistics { die_busy: vec![Nanos::ZERO; dies], ..SsdStatistics::default() },
            scratch_pages: Vec::new(),
            profile: drive,
        }
    }

    /// The same drive where the contents are older than the model: what it did not see written lies on the dies in the
    /// order of its addresses. (A page that was trimmed counts as never written, too.) Such pages are read like any
    /// other and take no space.
    pub fn prefilled(self) -> SsdModel {
        SsdModel { prefilled: true, ..self }
    }

    /// The drive that is modelled.
    pub fn profile(&self) -> &DriveProfile {
        &self.profile
    }

    /// What has been done until the last operation came.
    pub fn statistics(&self) -> &SsdStatistics {
        &self.statistics
    }

    /// Pages of 4 KiB in the buffer now, those that are being programmed included.
    pub fn buffered_pages(&self) -> u32 {
        self.buffer.held_pages()
    }

    /// Pages of 4 KiB that the drive keeps on its dies.
    pub fn mapped_pages(&self) -> u64 {
        self.ftl.valid_pages()
    }

    /// The memory that the map takes.
    pub fn memory_bytes(&self) -> usize {
        self.ftl.memory_bytes()
    }

    /// Reads blocks. Gives when that is done.
    pub fn read(&mut self, now: Nanos, at: Lba, blocks: u64) -> Nanos {
        let ready = self.start_command(now, self.profile.read_interval) + self.profile.read_overhead;
        let (mut done, mut group) = (ready, None);
        let (mut pages, mut bytes) = (0, 0);
        for (page, part) in self.pages(at, blocks) {
            let address = self.flash_address(page);
            if address != group && pages > 0 {
                done = done.max(self.transfer_to_host(group, ready, pages, bytes));
                (pages, bytes) = (0, 0);
            }
            group = address;
            (pages, bytes) = (pages + 1, bytes + part);
        }
        if pages > 0 {
            done = done.max(self.transfer_to_host(group, ready, pages, bytes));
        }
        done
    }

    /// Writes blocks. Gives when they are in the buffer.
    pub fn write(&mut self, now: Nanos, at: Lba, blocks: u64) -> Nanos {
        let ready = self.start_command(now, self.profile.write_interval) + self.profile.write_overhead;
        let mut done = ready;
        for (page, bytes) in self.pages(at, blocks) {
            self.statistics.host_pages_written += 1;
            // The rest of a page that is written in part comes from flash; the host does not wait for that.
            let rest = match self.flash_address(page) {
                Some(address) if bytes < PAGE_BYTES => self.read_pages(address, ready, 1),
                _ => ready,
            };
            let free = loop {
                if let Some(free) = self.buffer.reserve(page, ready) {
                    break free;
                }
                self.program_buffered(Nanos::NEVER);
            };
            let arrived =
                self.link_in.reserve(free, transfer_time(bytes, self.profile.link_write_bytes_per_s));
            self.buffer.insert(page, arrived.max(rest));
            done = done.max(arrived);
        }
        self.has_unflushed = true;
        let buffer_pages_max = &mut self.statistics.buffer_pages_max;
        *buffer_pages_max = (*buffer_pages_max).max(self.buffer.held_pages());
        done
    }

    /// Makes what was written durable. Gives when it is.
    pub fn flush(&mut self, now: Nanos) -> Nanos {
        let ready = self.start_command(now, self.profile.write_interval) + self.profile.write_overhead;
        let FlushModel::DrainBuffer { mapping_write: then } = self.profile.flush else { return ready };
        if std::mem::replace(&mut self.has_unflushed, false) {
            while self.buffer.waiting_pages() > 0 {
                self.program_buffered(Nanos::NEVER);
            }
            self.flushed_at = ready.max(self.buffer.drained_at()) + then;
        }
        ready.max(self.flushed_at)
    }

    /// Gives blocks up. Gives when that is done.
    pub fn trim(&mut self, now: Nanos, at: Lba, blocks: u64) -> Nanos {
        let ready = self.start_command(now, self.profile.write_interval) + self.profile.write_overhead;
        let (from, to) = (at.0 * self.block_bytes, (at.0 + blocks) * self.block_bytes);
        let (from, to) = (from.div_ceil(PAGE_BYTES) as u32, (to / PAGE_BYTES) as u32);
        if from < to {
            self.buffer.discard(from, to);
            self.ftl.trim(from, to);
        }
        ready
    }

    /// The pages that blocks touch, and how many of their bytes.
    fn pages(&self, at: Lba, blocks: u64) -> impl Iterator<Item = (u32, u64)> + use<> {
        let (from, to) = (at.0 * self.block_bytes, (at.0 + blocks) * self.block_bytes);
        assert!(to <= self.profile.capacity_bytes, "{at:?} and {blocks} more are beyond the drive");
        (from / PAGE_BYTES..to.div_ceil(PAGE_BYTES)).map(move |page| {
            let start = page * PAGE_BYTES;
            (page as u32, to.min(start + PAGE_BYTES) - from.max(start))
        })
    }

    /// The die that has a page, if one must be asked for it.
    fn flash_address(&self, page: u32) -> Option<FlashAddress> {
        if self.buffer.contains(page, self.now) {
            return None;
        }
        self.ftl.lookup(page).or_else(|| {
            let stripe = page / self.stripe_pages;
            self.prefilled
                .then(|| FlashAddress { die: stripe % self.profile.dies(), stripe: u32::MAX - stripe })
        })
    }

    /// Brings pages to the host, from one stripe, from the buffer, or made up where nothing was written.
    fn transfer_to_host(
        &mut self,
        address: Option<FlashAddress>,
        ready: Nanos,
        pages: u64,
        bytes: u64,
    ) -> Nanos {
        let read_done = address.map_or(ready, |place| self.read_pages(place, ready, pages));
        self.link_out.reserve(read_done, transfer_time(bytes, self.profile.link_read_bytes_per_s))
    }

    /// Brings pages of one stripe to the controller.
    fn read_pages(&mut self, address: FlashAddress, ready: Nanos, pages: u64) -> Nanos {
        self.statistics.reads += 1;
        let read = self.occupy_die(address.die, ready, self.profile.page_read);
        self.transfer_on_channel(address.die, read, pages)
    }

    /// A die works. Gives when it is done.
    fn occupy_die(&mut self, die: u32, ready: Nanos, span: Nanos) -> Nanos {
        let free = &mut self.dies[die as usize];
        *free = ready.max(*free) + span;
        let busy = &mut self.statistics.die_busy[die as usize];
        *busy = *busy + span;
        *free
    }

    /// Pages go to or from a die.
    fn transfer_on_channel(&mut self, die: u32, ready: Nanos, pages: u64) -> Nanos {
        let span = transfer_time(pages * PAGE_BYTES, self.profile.channel_bytes_per_s);
        self.channels[(die % self.profile.channels) as usize].reserve(ready, span)
    }

    /// A command comes. Gives when the controller begins it.
    fn start_command(&mut self, now: Nanos, interval: Nanos) -> Nanos {
        self.run_background(now);
        self.last_command = self.now;
        let started = self.now.max(self.controller);
        self.controller = started + interval;
        started
    }

    /// Does what the drive did by itself until `now`.
    fn run_background(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        let now = self.now;
        for timeline in self.channels.iter_mut().chain([&mut self.link_in, &mut self.link_out]) {
            timeline.forget_before(now);
        }
        while self.buffer.waiting_pages() >= self.stripe_pages && self.program_buffered(now) {}
        self.buffer.advance(now);
        if let Some(slc_cache) = self.profile.slc_cache
            && now > self.last_command + slc_cache.idle_delay
        {
            (0..self.profile.dies())
                .for_each(|die| self.drain_slc_cache(die, self.last_command + slc_cache.idle_delay));
        }
    }

    /// Programs the next stripe of what the host wrote, or what there is of it, unless it would begin after `until`.
    fn program_buffered(&mut self, until: Nanos) -> bool {
        let pages = self.buffer.waiting_pages().min(self.stripe_pages);
        let Some(mut ready) = self.buffer.ready_at(pages) else { return false };
        if pages < self.stripe_pages {
            // Only a flush asks for less than a stripe, now.
            ready = ready.max(self.now);
        }
        let die = self.earliest_free_die(ready);
        // The page register fills while the cells are still at the program before.
        let transfer = transfer_time(self.profile.stripe_bytes(), self.profile.channel_bytes_per_s);
        let start = ready.max(self.dies[die as usize] - transfer);
        if start > until {
            return false;
        }
        for _ in 0..self.ftl.gc_debt_stripes(die) {
            self.relocate_stripe(die, start, false);
        }
        let mut stripe = std::mem::take(&mut self.scratch_pages);
        self.buffer.take(pages, &mut stripe);
        let end = self.program(die, start, &stripe, WriteStream::Host);
        self.buffer.start_program(&stripe, end);
        self.scratch_pages = stripe;
        true
    }

    /// Of the dies that have room the one that can begin first, each in turn where several can.
    fn earliest_free_die(&mut self, ready: Nanos) -> u32 {
        let count = self.profile.dies();
        let candidate = |step: u32| (self.next_die + step) % count;
        let die = (0..count)
            .map(candidate)
            .filter(|&die| self.ftl.has_room(die))
            .min_by_key(|&die| self.dies[die as usize].max(ready))
            .expect("the dies hold more than the drive");
        self.next_die = die + 1;
        die
    }

    /// Brings pages to a die and programs them.
    fn program(&mut self, die: u32, start: Nanos, pages: &[u32], origin: WriteStream) -> Nanos {
        let programmed = self.ftl.program(die, pages, origin);
        if programmed.erased {
            self.statistics.erases += 1;
            self.occupy_die(die, start, self.profile.block_erase);
        }
        let (count, span) = match (programmed.cell_mode, self.profile.slc_cache) {
            (CellMode::Slc, Some(slc_cache)) => (&mut self.statistics.slc_programs, slc_cache.page_program),
            _ => (&mut self.statistics.programs, self.profile.page_program),
        };
        *count += 1;
        self.statistics.flash_pages_written += u64::from(self.stripe_pages);
        let arrived = self.transfer_on_channel(die, start, u64::from(self.stripe_pages));
        self.occupy_die(die, arrived, span)
    }

    /// Moves what is still wanted of a block, a stripe of it. False when there is nothing to gain.
    fn relocate_stripe(&mut self, die: u32, start: Nanos, only_slc: bool) -> bool {
        let batch = self.ftl.collect_stripe(die, only_slc);
        if batch.pages.is_empty() {
            return false;
        }
        let mut read = start;
        for _ in 0..batch.stripes_read {
            self.statistics.reads += 1;
            read = self.occupy_die(die, read, self.profile.page_read);
        }
        let arrived = self.transfer_on_channel(die, read, batch.pages.len() as u64);
        self.statistics.pages_moved += batch.pages.len() as u64;
        self.program(die, arrived, &batch.pages, WriteStream::Gc);
        true
    }

    /// A die moves what was written one bit a cell, as long as nothing else is to do.
    fn drain_slc_cache(&mut self, die: u32, from: Nanos) {
        loop {
            let start = from.max(self.dies[die as usize]);
            if start >= self.now || self.ftl.needs_gc(die) || !self.relocate_stripe(die, start, true) {
                return;
            }
        }
    }
}
