//! Flash translation layer: page mapping and garbage collection. No times.
//!
//! In: pages to program on a die, trimmed pages. Out: their flash addresses; the pages to relocate first.
//! Holds: the mapping table, and the logical pages in each block. A *page* here has 4 KiB, the unit of the mapping; a
//! *stripe* is the unit of a program.
//!
//! ```text
//!   block:  free ──opened (erased, if it was used)──▶ open ──full──▶ closed ──no valid page is left──▶ free
//!                                                                        └── collected: valid pages move ──┘
//! ```
//! Invariants: a logical page has at most one flash address; a block's `valid_pages` counts the pages in it that the
//! mapping points to; a die has space for one stripe beyond its limit ([`Ftl::has_space`]), so garbage collection
//! always makes progress. Memory: 8 bytes per mapped page, 4 per stale page in a block with valid pages; only the tables
//! of blocks and of chunks grow with the size of the drive.

use crate::ssd_model::drive_profiles::DriveProfile;
use std::collections::VecDeque;

/// The unit of the mapping, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Logical pages per chunk of the mapping table.
const CHUNK_PAGES: usize = 4096;
/// The entry of a page that is not mapped, or of an unused physical page.
const UNMAPPED: u32 = u32::MAX;

/// The flash address of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlashAddress {
    /// The die.
    pub die: u32,
    /// The number of the stripe over all dies: pages of one stripe are read together.
    pub stripe: u32,
}

/// How many bits per cell a block is written with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CellMode {
    /// One bit per cell.
    Slc,
    /// All bits of the cell.
    MultiLevel,
}

/// How a stripe is programmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProgramResult {
    /// Whether a block was erased first.
    pub erased: bool,
    /// The cell mode of its block.
    pub cell_mode: CellMode,
}

/// Valid pages to relocate: one stripe, or fewer at the end of a block.
#[derive(Clone, Debug, Default)]
pub struct GcBatch {
    /// The logical pages.
    pub pages: Vec<u32>,
    /// The number of stripes to read for them.
    pub stripes_read: u32,
}

/// The source of a program: each has an open block of its own per die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteStream {
    /// Pages that the host wrote.
    Host,
    /// Pages that garbage collection relocates.
    Gc,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockState {
    Free,
    Open,
    Closed,
}

#[derive(Clone, Debug)]
struct FlashBlock {
    state: BlockState,
    cell_mode: CellMode,
    was_used: bool,
    valid_pages: u32,
    /// The logical pages that were programmed here, in order; stale ones included.
    host_pages: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Die {
    blocks: Vec<FlashBlock>,
    free: VecDeque<u32>,
    open: [Option<u32>; 2],
    valid_pages: u64,
    /// The block that is being collected, and the next page of it.
    victim: Option<(u32, u32)>,
    /// Pages to relocate before the next program of the host, in units of 1/1024.
    gc_debt: u64,
}

/// The mapping and the blocks of all dies.
#[derive(Clone, Debug)]
pub struct Ftl {
    dies: Vec<Die>,
    chunks: Vec<Option<Box<[u32]>>>,
    blocks_per_die: u32,
    block_pages: u32,
    slc_block_pages: u32,
    stripe_pages: u32,
    gc_threshold_blocks: usize,
    slc_blocks_left: u64,
    /// Valid pages that a die may hold.
    die_pages_max: u64,
}

impl Ftl {
    /// The empty dies of a drive.
    ///
    /// # Panics
    /// If the numbers of the profile contradict each other.
    pub fn new(drive: &DriveProfile) -> Ftl {
        let stripe_pages = (drive.stripe_bytes() / PAGE_BYTES) as u32;
        let block_pages = stripe_pages * drive.pages_per_block;
        let slc_block_pages = block_pages / drive.bits_per_cell / stripe_pages * stripe_pages;
        let reserved = drive.gc_threshold_blocks + 2;
        assert!(
            drive.blocks_per_plane > reserved,
            "{}: a plane needs more than {reserved} blocks",
            drive.name
        );
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
            "{} has fewer pages than its capacity",
            drive.name
        );
        let physical_pages =
            u64::from(drive.dies()) * u64::from(drive.blocks_per_plane) * u64::from(block_pages);
        assert!(
            physical_pages < u64::from(UNMAPPED),
            "{} has more pages than a mapping entry can number",
            drive.name
        );
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
        let slc_block_bytes = u64::from(slc_block_pages) * PAGE_BYTES;
        Ftl {
            dies: (0..drive.dies()).map(die).collect(),
            chunks: (0..pages.div_ceil(CHUNK_PAGES as u64)).map(|_| None).collect(),
            blocks_per_die: drive.blocks_per_plane,
            block_pages,
            slc_block_pages,
            stripe_pages,
            gc_threshold_blocks: drive.gc_threshold_blocks as usize,
            slc_blocks_left: drive.slc_cache.map_or(0, |cache| cache.bytes / slc_block_bytes),
            die_pages_max,
        }
    }

    /// The flash address of a page, if it is mapped.
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

    /// Whether a die has space for one more stripe.
    pub fn has_space(&self, die: u32) -> bool {
        self.dies[die as usize].valid_pages <= self.die_pages_max
    }

    /// Whether free blocks are scarce on a die, so that the host's programs there wait for garbage collection.
    pub fn needs_gc(&self, die: u32) -> bool {
        self.dies[die as usize].free.len() <= self.gc_threshold_blocks
    }

    /// Programs up to a stripe of pages on a die; the rest of the stripe stays unused. REQUIRES: the stripes of
    /// [`Ftl::gc_debt_stripes`] were relocated first.
    ///
    /// # Panics
    /// If the die has no free block.
    pub fn program(&mut self, die: u32, pages: &[u32], stream: WriteStream) -> ProgramResult {
        assert!(pages.len() <= self.stripe_pages as usize, "{} pages are more than a stripe", pages.len());
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
        let index = die.free.pop_front().expect("garbage collection keeps a block free");
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

    /// Marks a physical page as stale.
    fn invalidate(&mut self, at: u32) {
        let index = at / self.block_pages;
        let (die, block) = self.block_mut(index);
        *die -= 1;
        block.valid_pages -= 1;
        if block.valid_pages == 0 && block.state == BlockState::Closed {
            self.free_block(index);
        }
    }

    /// A block by its number over all dies, and its die's count of valid pages.
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

    /// Unmaps the logical pages `from..to`.
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

    /// The number of stripes to relocate on a die before the next stripe of the host. If free blocks are scarce, as many
    /// as keep the space that becomes free equal to the space that the host takes: relocating `v` valid pages of a block of
    /// `t` pages pays for `t − v` pages of the host. The fewer free blocks, the more.
    pub fn gc_debt_stripes(&mut self, die: u32) -> u64 {
        let threshold = self.gc_threshold_blocks;
        let free = self.dies[die as usize].free.len();
        if free > threshold {
            self.dies[die as usize].gc_debt = 0;
            return 0;
        }
        let Some(victim) = self.select_victim(die, false) else { return 0 };
        let (total, stripe) = (u64::from(self.block_pages), u64::from(self.stripe_pages));
        let valid = u64::from(self.dies[die as usize].blocks[victim as usize].valid_pages);
        if free <= 2 {
            // The last spare block: collect the whole victim now.
            return valid.div_ceil(stripe);
        }
        let die = &mut self.dies[die as usize];
        die.gc_debt += 1024 * stripe * valid / (total - valid) * (1 + threshold - free) as u64;
        let stripes = die.gc_debt / (1024 * stripe);
        die.gc_debt -= stripes * 1024 * stripe;
        stripes
    }

    /// The next block to collect: the closed one with the fewest valid pages, if it has a stale page. A block that is
    /// partly collected comes first.
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

    /// Collects up to a stripe of valid pages on a die, from SLC blocks only if `only_slc`. Empty if no block has stale
    /// pages. REQUIRES: the caller programs the pages before any other call.
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
                // The program of these pages invalidates the last valid ones and frees the block.
                self.dies[die as usize].victim = None;
                break;
            }
        }
        batch
    }

    /// The number of mapped pages.
    pub fn valid_pages(&self) -> u64 {
        self.dies.iter().map(|die| die.valid_pages).sum()
    }

    /// The memory of the mapping in bytes.
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
