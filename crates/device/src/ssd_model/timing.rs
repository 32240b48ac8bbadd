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

use crate::ssd_model::drive_profiles::{Drive, Flush, span_of};
use crate::ssd_model::ftl::{Cells, Origin, PAGE_BYTES, Place, Space};
use crate::ssd_model::timeline::Line;
use crate::ssd_model::write_buffer::Buffer;
use octokv_base::{Lba, Nanos};

/// What has been done.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
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
    pub turbo_programs: u64,
    /// Erased blocks.
    pub erases: u64,
    /// The most pages that the buffer ever held.
    pub buffer_pages_most: u32,
    /// How long each die was at work.
    pub die_busy: Vec<Nanos>,
}

impl Statistics {
    /// How many pages were programmed for one that the host wrote.
    pub fn write_amplification(&self) -> f64 {
        self.flash_pages_written as f64 / self.host_pages_written.max(1) as f64
    }
}

/// A drive at work.
#[derive(Debug)]
pub struct Model {
    drive: Drive,
    block_bytes: u64,
    /// Pages that nothing wrote are read from dies all the same.
    holds_old: bool,
    space: Space,
    buffer: Buffer,
    stripe_pages: u32,
    /// When each die is free.
    dies: Vec<Nanos>,
    channels: Vec<Line>,
    link_in: Line,
    link_out: Line,
    controller: Nanos,
    now: Nanos,
    /// When the last command came.
    last_command: Nanos,
    /// Where the search for a free die begins.
    next_die: u32,
    /// Something was written since the last flush.
    unflushed: bool,
    /// When the last flush is done.
    flushed_at: Nanos,
    statistics: Statistics,
    taken: Vec<u32>,
}

impl Model {
    /// A new drive, with logical blocks of `block_bytes` bytes.
    ///
    /// # Panics
    /// When blocks are longer than 4 KiB, or when the drive's numbers do not fit together.
    pub fn new(drive: Drive, block_bytes: u32) -> Model {
        assert!(PAGE_BYTES.is_multiple_of(u64::from(block_bytes)), "blocks of {block_bytes} bytes");
        let stripe_pages = (drive.stripe_bytes() / PAGE_BYTES) as u32;
        let buffer_pages = (drive.buffer_bytes / PAGE_BYTES) as u32;
        assert!(buffer_pages >= stripe_pages, "{}: the buffer holds no stripe", drive.name);
        let dies = drive.dies() as usize;
        Model {
            block_bytes: u64::from(block_bytes),
            holds_old: false,
            space: Space::new(&drive),
            buffer: Buffer::new(buffer_pages),
            stripe_pages,
            dies: vec![Nanos::ZERO; dies],
            channels: (0..drive.channels).map(|_| Line::default()).collect(),
            link_in: Line::default(),
            link_out: Line::default(),
            controller: Nanos::ZERO,
            now: Nanos::ZERO,
            last_command: Nanos::ZERO,
            next_die: 0,
            unflushed: false,
            flushed_at: Nanos::ZERO,
            statistics: Statistics { die_busy: vec![Nanos::ZERO; dies], ..Statistics::default() },
            taken: Vec::new(),
            drive,
        }
    }

    /// The same drive where the contents are older than the model: what it did not see written lies on the dies in the
    /// order of its addresses. (A page that was trimmed counts as never written, too.) Such pages are read like any
    /// other and take no space.
    pub fn holding_old(self) -> Model {
        Model { holds_old: true, ..self }
    }

    /// The drive that is modelled.
    pub fn drive(&self) -> &Drive {
        &self.drive
    }

    /// What has been done until the last operation came.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Pages of 4 KiB in the buffer now, those that are being programmed included.
    pub fn buffered_pages(&self) -> u32 {
        self.buffer.held()
    }

    /// Pages of 4 KiB that the drive keeps on its dies.
    pub fn mapped_pages(&self) -> u64 {
        self.space.valid_pages()
    }

    /// The memory that the map takes.
    pub fn memory_bytes(&self) -> usize {
        self.space.memory_bytes()
    }

    /// Reads blocks. Gives when that is done.
    pub fn read(&mut self, now: Nanos, at: Lba, blocks: u64) -> Nanos {
        let ready = self.begin(now, self.drive.read_interval) + self.drive.read_command;
        let (mut done, mut group) = (ready, None);
        let (mut pages, mut bytes) = (0, 0);
        for (page, part) in self.pages(at, blocks) {
            let place = self.place(page);
            if place != group && pages > 0 {
                done = done.max(self.fetch(group, ready, pages, bytes));
                (pages, bytes) = (0, 0);
            }
            group = place;
            (pages, bytes) = (pages + 1, bytes + part);
        }
        if pages > 0 {
            done = done.max(self.fetch(group, ready, pages, bytes));
        }
        done
    }

    /// Writes blocks. Gives when they are in the buffer.
    pub fn write(&mut self, now: Nanos, at: Lba, blocks: u64) -> Nanos {
        let ready = self.begin(now, self.drive.write_interval) + self.drive.write_command;
        let mut done = ready;
        for (page, bytes) in self.pages(at, blocks) {
            self.statistics.host_pages_written += 1;
            // The rest of a page that is written in part comes from flash; the host does not wait for that.
            let rest = match self.place(page) {
                Some(place) if bytes < PAGE_BYTES => self.fetch_pages(place, ready, 1),
                _ => ready,
            };
            let free = loop {
                if let Some(free) = self.buffer.admit(page, ready) {
                    break free;
                }
                self.program_host(Nanos::NEVER);
            };
            let arrived = self.link_in.take(free, span_of(bytes, self.drive.link_write_bytes_per_s));
            self.buffer.arrive(page, arrived.max(rest));
            done = done.max(arrived);
        }
        self.unflushed = true;
        let most = &mut self.statistics.buffer_pages_most;
        *most = (*most).max(self.buffer.held());
        done
    }

    /// Makes what was written durable. Gives when it is.
    pub fn flush(&mut self, now: Nanos) -> Nanos {
        let ready = self.begin(now, self.drive.write_interval) + self.drive.write_command;
        let Flush::Drained { then } = self.drive.flush else { return ready };
        if std::mem::replace(&mut self.unflushed, false) {
            while self.buffer.waiting() > 0 {
                self.program_host(Nanos::NEVER);
            }
            self.flushed_at = ready.max(self.buffer.drained_at()) + then;
        }
        ready.max(self.flushed_at)
    }

    /// Gives blocks up. Gives when that is done.
    pub fn trim(&mut self, now: Nanos, at: Lba, blocks: u64) -> Nanos {
        let ready = self.begin(now, self.drive.write_interval) + self.drive.write_command;
        let (from, to) = (at.0 * self.block_bytes, (at.0 + blocks) * self.block_bytes);
        let (from, to) = (from.div_ceil(PAGE_BYTES) as u32, (to / PAGE_BYTES) as u32);
        if from < to {
            self.buffer.forget(from, to);
            self.space.forget(from, to);
        }
        ready
    }

    /// The pages that blocks touch, and how many of their bytes.
    fn pages(&self, at: Lba, blocks: u64) -> impl Iterator<Item = (u32, u64)> + use<> {
        let (from, to) = (at.0 * self.block_bytes, (at.0 + blocks) * self.block_bytes);
        assert!(to <= self.drive.capacity_bytes, "{at:?} and {blocks} more are beyond the drive");
        (from / PAGE_BYTES..to.div_ceil(PAGE_BYTES)).map(move |page| {
            let start = page * PAGE_BYTES;
            (page as u32, to.min(start + PAGE_BYTES) - from.max(start))
        })
    }

    /// The die that has a page, if one must be asked for it.
    fn place(&self, page: u32) -> Option<Place> {
        if self.buffer.holds(page, self.now) {
            return None;
        }
        self.space.place(page).or_else(|| {
            let stripe = page / self.stripe_pages;
            self.holds_old.then(|| Place { die: stripe % self.drive.dies(), stripe: u32::MAX - stripe })
        })
    }

    /// Brings pages to the host, from one stripe, from the buffer, or made up where nothing was written.
    fn fetch(&mut self, place: Option<Place>, ready: Nanos, pages: u64, bytes: u64) -> Nanos {
        let here = place.map_or(ready, |place| self.fetch_pages(place, ready, pages));
        self.link_out.take(here, span_of(bytes, self.drive.link_read_bytes_per_s))
    }

    /// Brings pages of one stripe to the controller.
    fn fetch_pages(&mut self, place: Place, ready: Nanos, pages: u64) -> Nanos {
        self.statistics.reads += 1;
        let read = self.work(place.die, ready, self.drive.page_read);
        self.carry(place.die, read, pages)
    }

    /// A die works. Gives when it is done.
    fn work(&mut self, die: u32, ready: Nanos, span: Nanos) -> Nanos {
        let free = &mut self.dies[die as usize];
        *free = ready.max(*free) + span;
        let busy = &mut self.statistics.die_busy[die as usize];
        *busy = *busy + span;
        *free
    }

    /// Pages go to or from a die.
    fn carry(&mut self, die: u32, ready: Nanos, pages: u64) -> Nanos {
        let span = span_of(pages * PAGE_BYTES, self.drive.channel_bytes_per_s);
        self.channels[(die % self.drive.channels) as usize].take(ready, span)
    }

    /// A command comes. Gives when the controller begins it.
    fn begin(&mut self, now: Nanos, interval: Nanos) -> Nanos {
        self.advance(now);
        self.last_command = self.now;
        let begun = self.now.max(self.controller);
        self.controller = begun + interval;
        begun
    }

    /// Does what the drive did by itself until `now`.
    fn advance(&mut self, now: Nanos) {
        self.now = self.now.max(now);
        let now = self.now;
        for line in self.channels.iter_mut().chain([&mut self.link_in, &mut self.link_out]) {
            line.forget_before(now);
        }
        while self.buffer.waiting() >= self.stripe_pages && self.program_host(now) {}
        self.buffer.advance(now);
        if let Some(turbo) = self.drive.turbo
            && now > self.last_command + turbo.rest
        {
            (0..self.drive.dies()).for_each(|die| self.empty_turbo(die, self.last_command + turbo.rest));
        }
    }

    /// Programs the next stripe of what the host wrote, or what there is of it, unless it would begin after `until`.
    fn program_host(&mut self, until: Nanos) -> bool {
        let pages = self.buffer.waiting().min(self.stripe_pages);
        let Some(mut ready) = self.buffer.ready(pages) else { return false };
        if pages < self.stripe_pages {
            // Only a flush asks for less than a stripe, now.
            ready = ready.max(self.now);
        }
        let die = self.freest_die(ready);
        // The page register fills while the cells are still at the program before.
        let carried = span_of(self.drive.stripe_bytes(), self.drive.channel_bytes_per_s);
        let start = ready.max(self.dies[die as usize] - carried);
        if start > until {
            return false;
        }
        for _ in 0..self.space.owed_stripes(die) {
            self.move_stripe(die, start, false);
        }
        let mut taken = std::mem::take(&mut self.taken);
        self.buffer.take(pages, &mut taken);
        let end = self.program(die, start, &taken, Origin::Host);
        self.buffer.land(&taken, end);
        self.taken = taken;
        true
    }

    /// Of the dies that have room the one that can begin first, each in turn where several can.
    fn freest_die(&mut self, ready: Nanos) -> u32 {
        let count = self.drive.dies();
        let turn = |step: u32| (self.next_die + step) % count;
        let die = (0..count)
            .map(turn)
            .filter(|&die| self.space.has_room(die))
            .min_by_key(|&die| self.dies[die as usize].max(ready))
            .expect("the dies hold more than the drive");
        self.next_die = die + 1;
        die
    }

    /// Brings pages to a die and programs them.
    fn program(&mut self, die: u32, start: Nanos, pages: &[u32], origin: Origin) -> Nanos {
        let programmed = self.space.program(die, pages, origin);
        if programmed.erased {
            self.statistics.erases += 1;
            self.work(die, start, self.drive.block_erase);
        }
        let (count, span) = match (programmed.cells, self.drive.turbo) {
            (Cells::Turbo, Some(turbo)) => (&mut self.statistics.turbo_programs, turbo.program),
            _ => (&mut self.statistics.programs, self.drive.page_program),
        };
        *count += 1;
        self.statistics.flash_pages_written += u64::from(self.stripe_pages);
        let there = self.carry(die, start, u64::from(self.stripe_pages));
        self.work(die, there, span)
    }

    /// Moves what is still wanted of a block, a stripe of it. False when there is nothing to gain.
    fn move_stripe(&mut self, die: u32, start: Nanos, only_turbo: bool) -> bool {
        let collected = self.space.collect(die, only_turbo);
        if collected.pages.is_empty() {
            return false;
        }
        let mut read = start;
        for _ in 0..collected.stripes_read {
            self.statistics.reads += 1;
            read = self.work(die, read, self.drive.page_read);
        }
        let here = self.carry(die, read, collected.pages.len() as u64);
        self.statistics.pages_moved += collected.pages.len() as u64;
        self.program(die, here, &collected.pages, Origin::Moved);
        true
    }

    /// A die moves what was written one bit a cell, as long as nothing else is to do.
    fn empty_turbo(&mut self, die: u32, from: Nanos) {
        loop {
            let start = from.max(self.dies[die as usize]);
            if start >= self.now || self.space.is_scarce(die) || !self.move_stripe(die, start, true) {
                return;
            }
        }
    }
}
