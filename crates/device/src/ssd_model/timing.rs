//! The timing model of a solid-state drive: when each host operation completes, background work included.
//!
//! ```text
//!             controller        link in                    channel       die
//!   write ──▶ one at a time ──▶ ─────────▶ buffer ─ completed   ─▶ ─ in ─▶ program
//!                                            └── stripes, in the background ─┘
//!   read  ──▶ one at a time ──▶ buffer, or die: read ─▶ channel ─ out ─▶ link out ─ completed
//!   flush ──▶ one at a time ──▶ the end of all programs, and the mapping ─ completed (or at once: capacitors)
//! ```
//! In: operations and their submission times. Out: their completion times. Holds: when each die, channel and direction of
//! the link is free, the write buffer, and the page mapping. Passive: each operation first applies the background work
//! that was due before it. Deterministic: no randomness, no clock.
//!
//! Rules of the model:
//! - A program or relocation starts when its die is free, so reads that arrive before that go first; a full buffer or a
//!   flush reserves the dies in advance, and later reads wait. No program is suspended for a read.
//! - A stripe goes to the die that is free first. Relocated pages stay on their die.
//! - A die is busy while its cells work; its page register serves the channel during the next cell operation (cache read
//!   and cache program).
//! - Read-ahead, wear and errors are not modelled.
//!
//! Invariants: no operation completes before its submission; a time earlier than one seen before, from a core whose clock
//! was read at another moment, counts as the latest time seen. Tested in `tests/ssd_model.rs`, and against the data
//! sheets in `tests/drive_profiles.rs`.

use crate::ssd_model::drive_profiles::{DriveProfile, FlushModel, transfer_time};
use crate::ssd_model::ftl::{CellMode, FlashAddress, Ftl, PAGE_BYTES, WriteStream};
use crate::ssd_model::timeline::Timeline;
use crate::ssd_model::write_buffer::WriteBuffer;
use octokv_base::{Lba, Nanos};

/// Counters of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SsdStatistics {
    /// Pages of 4 KiB that the host wrote, wholly or partly.
    pub host_pages_written: u64,
    /// Pages of 4 KiB that were programmed, unused parts of stripes included.
    pub flash_pages_written: u64,
    /// Pages of 4 KiB that garbage collection relocated.
    pub pages_moved: u64,
    /// Page reads by dies.
    pub reads: u64,
    /// Programs by dies with all bits per cell.
    pub programs: u64,
    /// Programs by dies with one bit per cell.
    pub slc_programs: u64,
    /// Erased blocks.
    pub erases: u64,
    /// The highest number of pages in the write buffer.
    pub buffer_pages_max: u32,
    /// The busy time of each die.
    pub die_busy: Vec<Nanos>,
}

impl SsdStatistics {
    /// Write amplification: pages programmed per page that the host wrote.
    pub fn write_amplification(&self) -> f64 {
        self.flash_pages_written as f64 / self.host_pages_written.max(1) as f64
    }
}

/// The state of a modelled drive.
#[derive(Clone, Debug)]
pub struct SsdModel {
    profile: DriveProfile,
    block_bytes: u64,
    /// Whether reads of pages that were never written occupy a die.
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
    /// The submission time of the last command.
    last_command: Nanos,
    /// The first die of the next search for a free one.
    next_die: u32,
    /// Whether there were writes since the last flush.
    has_unflushed: bool,
    /// When the last flush completes.
    flushed_at: Nanos,
    statistics: SsdStatistics,
    scratch_pages: Vec<u32>,
}

impl SsdModel {
    /// A new drive, with logical blocks of `block_bytes` bytes.
    ///
    /// # Panics
    /// If blocks are longer than 4 KiB, or if the numbers of the profile contradict each other.
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

    /// The same drive with contents older than the model: a page that was never written (or was trimmed) is on the die
    /// that its address selects, is read like any other, and takes no space.
    pub fn prefilled(self) -> SsdModel {
        SsdModel { prefilled: true, ..self }
    }

    /// The drive that is modelled.
    pub fn profile(&self) -> &DriveProfile {
        &self.profile
    }

    /// The counters up to the submission of the last operation.
    pub fn statistics(&self) -> &SsdStatistics {
        &self.statistics
    }

    /// Pages of 4 KiB in the write buffer, those being programmed included.
    pub fn buffered_pages(&self) -> u32 {
        self.buffer.held_pages()
    }

    /// Mapped pages of 4 KiB.
    pub fn mapped_pages(&self) -> u64 {
        self.ftl.valid_pages()
    }

    /// The memory of the mapping in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.ftl.memory_bytes()
    }

    /// Reads blocks, and gives the completion time.
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

    /// Writes blocks, and gives when they are in the write buffer.
    pub fn write(&mut self, now: Nanos, at: Lba, blocks: u64) -> Nanos {
        let ready = self.start_command(now, self.profile.write_interval) + self.profile.write_overhead;
        let mut done = ready;
        for (page, bytes) in self.pages(at, blocks) {
            self.statistics.host_pages_written += 1;
            // The rest of a partly written page is read from flash; the host does not wait for that.
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

    /// Makes completed writes durable, and gives the completion time.
    pub fn flush(&mut self, now: Nanos) -> Nanos {
        let ready = self.start_command(now, self.profile.write_interval) + self.profile.write_overhead;
        let FlushModel::DrainBuffer { mapping_write } = self.profile.flush else { return ready };
        if std::mem::replace(&mut self.has_unflushed, false) {
            while self.buffer.waiting_pages() > 0 {
                self.program_buffered(Nanos::NEVER);
            }
            self.flushed_at = ready.max(self.buffer.drained_at()) + mapping_write;
        }
        ready.max(self.flushed_at)
    }

    /// Deallocates blocks, and gives the completion time.
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

    /// The pages that blocks touch, with the number of bytes in each.
    fn pages(&self, at: Lba, blocks: u64) -> impl Iterator<Item = (u32, u64)> + use<> {
        let (from, to) = (at.0 * self.block_bytes, (at.0 + blocks) * self.block_bytes);
        assert!(
            to <= self.profile.capacity_bytes,
            "{blocks} blocks at {at:?} are beyond the end of the drive"
        );
        (from / PAGE_BYTES..to.div_ceil(PAGE_BYTES)).map(move |page| {
            let start = page * PAGE_BYTES;
            (page as u32, to.min(start + PAGE_BYTES) - from.max(start))
        })
    }

    /// The flash address of a page, if a die must read it.
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

    /// Transfers pages to the host: from one stripe, from the buffer, or zeros if they were never written.
    fn transfer_to_host(
        &mut self,
        address: Option<FlashAddress>,
        ready: Nanos,
        pages: u64,
        bytes: u64,
    ) -> Nanos {
        let read_done = address.map_or(ready, |address| self.read_pages(address, ready, pages));
        self.link_out.reserve(read_done, transfer_time(bytes, self.profile.link_read_bytes_per_s))
    }

    /// Reads pages of one stripe to the controller.
    fn read_pages(&mut self, address: FlashAddress, ready: Nanos, pages: u64) -> Nanos {
        self.statistics.reads += 1;
        let read = self.occupy_die(address.die, ready, self.profile.page_read);
        let pages_min = u64::from(self.profile.read_transfer_bytes_min) / PAGE_BYTES;
        self.transfer_on_channel(address.die, read, pages.max(pages_min))
    }

    /// Occupies a die for `span` from `ready` on, and gives the end.
    fn occupy_die(&mut self, die: u32, ready: Nanos, span: Nanos) -> Nanos {
        let free = &mut self.dies[die as usize];
        *free = ready.max(*free) + span;
        let busy = &mut self.statistics.die_busy[die as usize];
        *busy = *busy + span;
        *free
    }

    /// Transfers pages to or from a die.
    fn transfer_on_channel(&mut self, die: u32, ready: Nanos, pages: u64) -> Nanos {
        let span = transfer_time(pages * PAGE_BYTES, self.profile.channel_bytes_per_s);
        self.channels[(die % self.profile.channels) as usize].reserve(ready, span)
    }

    /// Applies background work, and gives when the controller starts a command.
    fn start_command(&mut self, now: Nanos, interval: Nanos) -> Nanos {
        self.run_background(now);
        self.last_command = self.now;
        let started = self.now.max(self.controller);
        self.controller = started + interval;
        started
    }

    /// Applies the background work up to `now`.
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

    /// Programs the next stripe of the write buffer, or a part of one, unless it would start after `until`.
    fn program_buffered(&mut self, until: Nanos) -> bool {
        let pages = self.buffer.waiting_pages().min(self.stripe_pages);
        let Some(mut ready) = self.buffer.ready_at(pages) else { return false };
        if pages < self.stripe_pages {
            // Only a flush programs less than a stripe, and it does so now.
            ready = ready.max(self.now);
        }
        let die = self.earliest_free_die(ready);
        // The page register fills during the preceding program.
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

    /// The die with space that is free first; round robin among equals.
    fn earliest_free_die(&mut self, ready: Nanos) -> u32 {
        let count = self.profile.dies();
        let candidate = |step: u32| (self.next_die + step) % count;
        let die = (0..count)
            .map(candidate)
            .filter(|&die| self.ftl.has_space(die))
            .min_by_key(|&die| self.dies[die as usize].max(ready))
            .expect("the dies have more pages than the capacity");
        self.next_die = die + 1;
        die
    }

    /// Transfers pages to a die and programs them.
    fn program(&mut self, die: u32, start: Nanos, pages: &[u32], stream: WriteStream) -> Nanos {
        let programmed = self.ftl.program(die, pages, stream);
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

    /// Relocates a stripe of valid pages. False if no block has stale pages.
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

    /// Drains SLC blocks of an idle die up to the present.
    fn drain_slc_cache(&mut self, die: u32, from: Nanos) {
        loop {
            let start = from.max(self.dies[die as usize]);
            if start >= self.now || self.ftl.needs_gc(die) || !self.relocate_stripe(die, start, true) {
                return;
            }
        }
    }
}
