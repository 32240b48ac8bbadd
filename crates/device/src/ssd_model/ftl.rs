//! Where on the dies each page of the host lies, and how stale space becomes free. No times.
//!
//! In: pages to program on a die, pages that are wanted no more. Out: where they are; what must be moved first.
//! Holds: the map, and of each block what its pages hold. A *page* here is one of 4 KiB, the unit of the map; a
//! *stripe* is what one program writes.
//!
//! ```text
//!   block:  free ──opened (erased, if it was used)──▶ open ──full──▶ closed ──nothing in it is wanted──▶ free
//!                                                                        └── collected: what is wanted moves ──┘
//! ```
//! Invariants: a page of the host is in at most one place; a block's `valid` counts the pages in it that the map
//! points to; a die has room for one stripe more than it is asked to hold ([`Ftl::has_room`]), so collecting always
//! gets on. Memory: 8 bytes for each page that is mapped, 4 for each stale one in a block that still holds others,
//! and nothing that grows with the size of the drive but the tables of blocks and of chunks.

use crate::ssd_model::drive_profiles::DriveProfile;
use std::collections::VecDeque;

/// The unit of the map, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Pages of the host that share a piece of the map.
const CHUNK_PAGES: usize = 4096;
/// No page, no place.
const UNMAPPED: u32 = u32::MAX;

/// Where a page lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashAddress {
    /// The die.
    pub die: u32,
    /// The stripe, over all dies: pages of one stripe are read together.
    pub stripe: u32,
}

/// How a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellMode {
    /// One bit a cell.
    Slc,
    /// As many as a cell has.
    MultiLevel,
}

/// What opening a block cost, and how its pages are programmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramResult {
    /// A block was erased first.
    pub erased: bool,
    /// How the stripe is programmed.
    pub cell_mode: CellMode,
}

/// What was collected: one stripe of pages that move, or fewer where there are no more.
#[derive(Debug, Default)]
pub struct GcBatch {
    /// The pages of the host.
    pub pages: Vec<u32>,
    /// How many stripes must be read for them.
    pub stripes_read: u32,
}

/// Whose open block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteStream {
    /// What the host wrote.
    Host,
    /// What was collected.
    Gc,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockState {
    Free,
    Open,
    Closed,
}

#[derive(Debug)]
struct FlashBlock {
    state: BlockState,
    cell_mode: CellMode,
    was_used: bool,
    valid_pages: u32,
    /// The pages of the host that were programmed here, in order; some may have moved on.
    host_pages: Vec<u32>,
}

#[derive(Debug)]
struct Die {
    blocks: Vec<FlashBlock>,
    free: VecDeque<u32>,
    open: [Option<u32>; 2],
    valid_pages: u64,
    /// The block that is collected, and how far.
    victim: Option<(u32, u32)>,
    /// Pages to move, in 1/1024, before the host goes on.
    gc_debt: u64,
}

/// The dies' space.
#[derive(Debug)]
pub struct Ftl {
    dies: Vec<Die>,
    chunks: Vec<Option<Box<[u32]>>>,
    blocks_per_die: u32,
    block_pages: u32,
    slc_block_pages: u32,
    stripe_pages: u32,
    gc_threshold_blocks: usize,
    slc_blocks_left: u64,
    /// What a die may be asked to hold.
    die_pages_max: u64,
}

impl Ftl {
    /// The empty dies of a drive.
    ///
    /// # Panics
    /// When its numbers do not fit together, which only a bug of ours can cause.
    pub fn new(drive: &DriveProfile) -> Ftl {
        let stripe_pages = (drive.stripe_bytes() / PAGE_BYTES) as u32;
        let block_pages = stripe_pages * drive.pages_per_block;
        let turbo_pages = block_pages / drive.bits_per_cell / stripe_pages * stripe_pages;
        let reserved = drive.gc_threshold_blocks + 2;
        assert!(drive.blocks_per_plane > reserved, "{}: {reserved} blocks of a plane are spare", drive.name);
        assert!(
            drive.gc_threshold_blocks >= 3,
            "{}: a die needs three spare blocks to collect into",
            drive.name
        );
        let die_pages_max =
            u64::from(drive.blocks_per_plane - reserved) * u64::from(block_pages) - u64::from(stripe_pages);
        let pages = drive.capacity_bytes / PAGE_BYTES;
        let stripes = u64::from(drive.dies()) * u64::from(stripe_pages);
        assert!(
            pages + stripes <= u64::from(drive.dies()) * die_pages_max,
            "{} holds less than it says",
            drive.name
        );
        let physical_pages =
            u64::from(drive.dies()) * u64::from(drive.blocks_per_plane) * u64::from(block_pages);
        assert!(physical_pages < u64::from(UNMAPPED), "{} has more places than the map can name", drive.name);
        let block = || FlashBlock {
            state: BlockState::Free,
            cell_mode: CellMode::MultiLevel,
            was_used: false,
            valid_pages: 0,
            host_pages: Vec::new(),
        };
        let die = |_| Die {
            blocks: (0..drive.blocks_per_plane).map(|_| block()).collect(),
            free: (0..drive.blocks_per_plane).collect(),
            open: [None; 2],
            valid_pages: 0,
            victim: None,
            gc_debt: 0,
        };
        let slc_block_bytes = u64::from(turbo_pages) * PAGE_BYTES;
        Ftl {
            dies: (0..drive.dies()).map(die).collect(),
            chunks: (0..pages.div_ceil(CHUNK_PAGES as u64)).map(|_| None).collect(),
            blocks_per_die: drive.blocks_per_plane,
            block_pages,
            slc_block_pages: turbo_pages,
            stripe_pages,
            gc_threshold_blocks: drive.gc_threshold_blocks as usize,
            slc_blocks_left: drive.slc_cache.map_or(0, |turbo| turbo.bytes / slc_block_bytes),
            die_pages_max,
        }
    }

    /// Where a page lies, if anywhere.
    pub fn lookup(&self, page: u32) -> Option<FlashAddress> {
        let at = self.physical_page(page)?;
        let die = at / (self.blocks_per_die * self.block_pages);
        Some(FlashAddress { die, stripe: at / self.stripe_pages })
    }

    fn physical_page(&self, page: u32) -> Option<u32> {
        let chunk = self.chunks[page as usize / CHUNK_PAGES].as_ref()?;
        Some(chunk[page as usize % CHUNK_PAGES]).filter(|&at| at != UNMAPPED)
    }

    fn remap(&mut self, page: u32, at: u32) -> u32 {
        let chunk = &mut self.chunks[page as usize / CHUNK_PAGES];
        let chunk = chunk.get_or_insert_with(|| vec![UNMAPPED; CHUNK_PAGES].into());
        std::mem::replace(&mut chunk[page as usize % CHUNK_PAGES], at)
    }

    /// Whether a die can be given one more stripe.
    pub fn has_room(&self, die: u32) -> bool {
        self.dies[die as usize].valid_pages <= self.die_pages_max
    }

    /// Whether blocks are scarce on a die, so that the host's programs there pay for collecting.
    pub fn needs_gc(&self, die: u32) -> bool {
        self.dies[die as usize].free.len() <= self.gc_threshold_blocks
    }

    /// Programs up to a stripe of pages on a die; fewer leave the rest of the stripe unused.
    ///
    /// # Panics
    /// When the die has no block left, which only a bug of ours can cause: see [`Ftl::owed_stripes`].
    pub fn program(&mut self, die: u32, pages: &[u32], stream: WriteStream) -> ProgramResult {
        assert!(pages.len() <= self.stripe_pages as usize, "{} pages are no stripe", pages.len());
        let (index, erased) = match self.dies[die as usize].open[stream as usize] {
            Some(index) => (index, false),
            None => self.open_block(die, stream),
        };
        let block_at = (die * self.blocks_per_die + index) * self.block_pages;
        for &page in pages {
            let block = &mut self.dies[die as usize].blocks[index as usize];
            let at = block_at + block.host_pages.len() as u32;
            block.host_pages.push(page);
            block.valid_pages += 1;
            self.dies[die as usize].valid_pages += 1;
            let before = self.remap(page, at);
            if before != UNMAPPED {
                self.invalidate(before);
            }
        }
        let capacity = |cells| if cells == CellMode::Slc { self.slc_block_pages } else { self.block_pages };
        let die = &mut self.dies[die as usize];
        let block = &mut die.blocks[index as usize];
        let full = capacity(block.cell_mode) as usize;
        block
            .host_pages
            .resize(block.host_pages.len().next_multiple_of(self.stripe_pages as usize), UNMAPPED);
        let programmed = ProgramResult { erased, cell_mode: block.cell_mode };
        if block.host_pages.len() == full {
            block.state = BlockState::Closed;
            die.open[stream as usize] = None;
            if block.valid_pages == 0 {
                self.free_block(block_at / self.block_pages);
            }
        }
        programmed
    }

    fn open_block(&mut self, die: u32, stream: WriteStream) -> (u32, bool) {
        let needs_gc = self.needs_gc(die);
        let die = &mut self.dies[die as usize];
        let index = die.free.pop_front().expect("collecting keeps a block free");
        let block = &mut die.blocks[index as usize];
        let is_slc = stream == WriteStream::Host && self.slc_blocks_left > 0 && !needs_gc;
        self.slc_blocks_left -= u64::from(is_slc);
        block.cell_mode = if is_slc { CellMode::Slc } else { CellMode::MultiLevel };
        block.state = BlockState::Open;
        block.host_pages =
            Vec::with_capacity(if is_slc { self.slc_block_pages } else { self.block_pages } as usize);
        die.open[stream as usize] = Some(index);
        (index, std::mem::replace(&mut block.was_used, true))
    }

    /// What was at a place is wanted no more.
    fn invalidate(&mut self, at: u32) {
        let index = at / self.block_pages;
        let (die, block) = self.block_mut(index);
        *die -= 1;
        block.valid_pages -= 1;
        if block.valid_pages == 0 && block.state == BlockState::Closed {
            self.free_block(index);
        }
    }

    /// A die's count of pages, and a block by its number over all dies.
    fn block_mut(&mut self, index: u32) -> (&mut u64, &mut FlashBlock) {
        let die = &mut self.dies[(index / self.blocks_per_die) as usize];
        (&mut die.valid_pages, &mut die.blocks[(index % self.blocks_per_die) as usize])
    }

    fn free_block(&mut self, index: u32) {
        let die = &mut self.dies[(index / self.blocks_per_die) as usize];
        let index = index % self.blocks_per_die;
        let block = &mut die.blocks[index as usize];
        (block.state, block.host_pages) = (BlockState::Free, Vec::new());
        self.slc_blocks_left += u64::from(block.cell_mode == CellMode::Slc);
        die.free.push_back(index);
        if die.victim.is_some_and(|(victim, _)| victim == index) {
            die.victim = None;
        }
    }

    /// Forgets pages `from` up to `to`, which the host has trimmed.
    pub fn trim(&mut self, from: u32, to: u32) {
        let mut page = from;
        while page < to {
            if self.chunks[page as usize / CHUNK_PAGES].is_none() {
                page = (page / CHUNK_PAGES as u32 + 1).saturating_mul(CHUNK_PAGES as u32);
                continue;
            }
            let before = self.remap(page, UNMAPPED);
            if before != UNMAPPED {
                self.invalidate(before);
            }
            page += 1;
        }
    }

    /// How many stripes of moved pages must be programmed on a die before a stripe of the host. Where blocks are
    /// scarce, as many as keep what becomes free equal to what the host takes: `v` pages that are wanted in a block
    /// of `t` are moved for `t − v` that it may write. The scarcer blocks are, the more.
    pub fn gc_debt_stripes(&mut self, die: u32) -> u64 {
        let threshold = self.gc_threshold_blocks;
        let free = self.dies[die as usize].free.len();
        if free > threshold {
            self.dies[die as usize].gc_debt = 0;
            return 0;
        }
        let Some(victim) = self.select_victim(die, false) else { return 0 };
        let (total, stripe) = (u64::from(self.block_pages), u64::from(self.stripe_pages));
        let wanted = u64::from(self.dies[die as usize].blocks[victim as usize].valid_pages);
        if free <= 2 {
            // No more than this block is left to collect into: all of it now.
            return wanted.div_ceil(stripe);
        }
        let die = &mut self.dies[die as usize];
        die.gc_debt += 1024 * stripe * wanted / (total - wanted) * (1 + threshold - free) as u64;
        let stripes = die.gc_debt / (1024 * stripe);
        die.gc_debt -= stripes * 1024 * stripe;
        stripes
    }

    /// The block that is collected next: the closed one with the fewest pages that are wanted, if any of them holds
    /// less than a block can. One that was begun comes first.
    fn select_victim(&mut self, die: u32, only_slc: bool) -> Option<u32> {
        let die = &mut self.dies[die as usize];
        let started = die.victim.filter(|&(block, _)| !only_slc || is_slc(&die.blocks[block as usize]));
        if let Some((block, _)) = started {
            return Some(block);
        }
        let blocks = die.blocks.iter().enumerate();
        let candidates = blocks.filter(|(_, block)| {
            block.state == BlockState::Closed
                && (is_slc(block) || (!only_slc && block.valid_pages < self.block_pages))
        });
        let (index, _) = candidates.min_by_key(|&(index, block)| (block.valid_pages, index))?;
        die.victim = Some((index as u32, 0));
        Some(index as u32)
    }

    /// Takes up to a stripe of pages that are to be moved on a die, out of turbo blocks alone where asked. They are
    /// to be programmed at once. Nothing when nothing can be gained.
    pub fn collect_stripe(&mut self, die: u32, only_slc: bool) -> GcBatch {
        let mut batch = GcBatch::default();
        while batch.pages.len() < self.stripe_pages as usize {
            let Some(victim) = self.select_victim(die, only_slc) else { break };
            let block_at = (die * self.blocks_per_die + victim) * self.block_pages;
            let from = self.dies[die as usize].victim.map_or(0, |(_, from)| from);
            let pages = &self.dies[die as usize].blocks[victim as usize].host_pages;
            let mut read = UNMAPPED;
            let mut at = from;
            while at < pages.len() as u32 && batch.pages.len() < self.stripe_pages as usize {
                let page = pages[at as usize];
                if page != UNMAPPED && self.physical_page(page) == Some(block_at + at) {
                    batch.pages.push(page);
                    if read != at / self.stripe_pages {
                        read = at / self.stripe_pages;
                        batch.stripes_read += 1;
                    }
                }
                at += 1;
            }
            if at < pages.len() as u32 {
                self.dies[die as usize].victim = Some((victim, at));
            } else {
                // All that was wanted is in hand: the last program from here frees the block.
                self.dies[die as usize].victim = None;
                break;
            }
        }
        batch
    }

    /// How many pages the drive holds.
    pub fn valid_pages(&self) -> u64 {
        self.dies.iter().map(|die| die.valid_pages).sum()
    }

    /// The memory that the map takes.
    pub fn memory_bytes(&self) -> usize {
        let chunks = self.chunks.iter().flatten().count() * CHUNK_PAGES * 4;
        let blocks = self.dies.iter().flat_map(|die| &die.blocks);
        let pages: usize =
            blocks.map(|block| block.host_pages.capacity() * 4 + size_of::<FlashBlock>()).sum();
        chunks + pages + size_of_val(&*self.chunks)
    }
}

fn is_slc(block: &FlashBlock) -> bool {
    block.cell_mode == CellMode::Slc
}
