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
//! points to; a die has room for one stripe more than it is asked to hold ([`Space::has_room`]), so collecting always
//! gets on. Memory: 8 bytes for each page that is mapped, 4 for each stale one in a block that still holds others,
//! and nothing that grows with the size of the drive but the tables of blocks and of chunks.

use crate::ssd_model::drive_profiles::Drive;
use std::collections::VecDeque;

/// The unit of the map, in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Pages of the host that share a piece of the map.
const CHUNK_PAGES: usize = 4096;
/// No page, no place.
const NONE: u32 = u32::MAX;

/// Where a page lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The die.
    pub die: u32,
    /// The stripe, over all dies: pages of one stripe are read together.
    pub stripe: u32,
}

/// How a block is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cells {
    /// One bit a cell.
    Turbo,
    /// As many as a cell has.
    Dense,
}

/// What opening a block cost, and how its pages are programmed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Programmed {
    /// A block was erased first.
    pub erased: bool,
    /// How the stripe is programmed.
    pub cells: Cells,
}

/// What was collected: one stripe of pages that move, or fewer where there are no more.
#[derive(Debug, Default)]
pub struct Collected {
    /// The pages of the host.
    pub pages: Vec<u32>,
    /// How many stripes must be read for them.
    pub stripes_read: u32,
}

/// Whose open block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// What the host wrote.
    Host,
    /// What was collected.
    Moved,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Open,
    Closed,
}

#[derive(Debug)]
struct Block {
    state: State,
    cells: Cells,
    used: bool,
    valid: u32,
    /// The pages of the host that were programmed here, in order; some may have moved on.
    pages: Vec<u32>,
}

#[derive(Debug)]
struct Die {
    blocks: Vec<Block>,
    free: VecDeque<u32>,
    open: [Option<u32>; 2],
    valid: u64,
    /// The block that is collected, and how far.
    victim: Option<(u32, u32)>,
    /// Pages to move, in 1/1024, before the host goes on.
    owed: u64,
}

/// The dies' space.
#[derive(Debug)]
pub struct Space {
    dies: Vec<Die>,
    chunks: Vec<Option<Box<[u32]>>>,
    blocks_per_die: u32,
    block_pages: u32,
    turbo_pages: u32,
    stripe_pages: u32,
    spare_blocks: usize,
    turbo_blocks_left: u64,
    /// What a die may be asked to hold.
    die_pages_max: u64,
}

impl Space {
    /// The empty dies of a drive.
    ///
    /// # Panics
    /// When its numbers do not fit together, which only a bug of ours can cause.
    pub fn new(drive: &Drive) -> Space {
        let stripe_pages = (drive.stripe_bytes() / PAGE_BYTES) as u32;
        let block_pages = stripe_pages * drive.pages_per_block;
        let turbo_pages = block_pages / drive.cell_bits / stripe_pages * stripe_pages;
        let spare = drive.spare_blocks + 2;
        assert!(drive.blocks_per_plane > spare, "{}: {spare} blocks of a plane are spare", drive.name);
        assert!(drive.spare_blocks >= 3, "{}: a die needs three spare blocks to collect into", drive.name);
        let die_pages_max =
            u64::from(drive.blocks_per_plane - spare) * u64::from(block_pages) - u64::from(stripe_pages);
        let pages = drive.capacity_bytes / PAGE_BYTES;
        let stripes = u64::from(drive.dies()) * u64::from(stripe_pages);
        assert!(
            pages + stripes <= u64::from(drive.dies()) * die_pages_max,
            "{} holds less than it says",
            drive.name
        );
        let places = u64::from(drive.dies()) * u64::from(drive.blocks_per_plane) * u64::from(block_pages);
        assert!(places < u64::from(NONE), "{} has more places than the map can name", drive.name);
        let block =
            || Block { state: State::Free, cells: Cells::Dense, used: false, valid: 0, pages: Vec::new() };
        let die = |_| Die {
            blocks: (0..drive.blocks_per_plane).map(|_| block()).collect(),
            free: (0..drive.blocks_per_plane).collect(),
            open: [None; 2],
            valid: 0,
            victim: None,
            owed: 0,
        };
        let turbo_block_bytes = u64::from(turbo_pages) * PAGE_BYTES;
        Space {
            dies: (0..drive.dies()).map(die).collect(),
            chunks: (0..pages.div_ceil(CHUNK_PAGES as u64)).map(|_| None).collect(),
            blocks_per_die: drive.blocks_per_plane,
            block_pages,
            turbo_pages,
            stripe_pages,
            spare_blocks: drive.spare_blocks as usize,
            turbo_blocks_left: drive.turbo.map_or(0, |turbo| turbo.bytes / turbo_block_bytes),
            die_pages_max,
        }
    }

    /// Where a page lies, if anywhere.
    pub fn place(&self, page: u32) -> Option<Place> {
        let at = self.at(page)?;
        let die = at / (self.blocks_per_die * self.block_pages);
        Some(Place { die, stripe: at / self.stripe_pages })
    }

    fn at(&self, page: u32) -> Option<u32> {
        let chunk = self.chunks[page as usize / CHUNK_PAGES].as_ref()?;
        Some(chunk[page as usize % CHUNK_PAGES]).filter(|&at| at != NONE)
    }

    fn map(&mut self, page: u32, at: u32) -> u32 {
        let chunk = &mut self.chunks[page as usize / CHUNK_PAGES];
        let chunk = chunk.get_or_insert_with(|| vec![NONE; CHUNK_PAGES].into());
        std::mem::replace(&mut chunk[page as usize % CHUNK_PAGES], at)
    }

    /// Whether a die can be given one more stripe.
    pub fn has_room(&self, die: u32) -> bool {
        self.dies[die as usize].valid <= self.die_pages_max
    }

    /// Whether blocks are scarce on a die, so that the host's programs there pay for collecting.
    pub fn is_scarce(&self, die: u32) -> bool {
        self.dies[die as usize].free.len() <= self.spare_blocks
    }

    /// Programs up to a stripe of pages on a die; fewer leave the rest of the stripe unused.
    ///
    /// # Panics
    /// When the die has no block left, which only a bug of ours can cause: see [`Space::owed_stripes`].
    pub fn program(&mut self, die: u32, pages: &[u32], origin: Origin) -> Programmed {
        assert!(pages.len() <= self.stripe_pages as usize, "{} pages are no stripe", pages.len());
        let (index, erased) = match self.dies[die as usize].open[origin as usize] {
            Some(index) => (index, false),
            None => self.open(die, origin),
        };
        let block_at = (die * self.blocks_per_die + index) * self.block_pages;
        for &page in pages {
            let block = &mut self.dies[die as usize].blocks[index as usize];
            let at = block_at + block.pages.len() as u32;
            block.pages.push(page);
            block.valid += 1;
            self.dies[die as usize].valid += 1;
            let before = self.map(page, at);
            if before != NONE {
                self.leave(before);
            }
        }
        let capacity = |cells| if cells == Cells::Turbo { self.turbo_pages } else { self.block_pages };
        let die = &mut self.dies[die as usize];
        let block = &mut die.blocks[index as usize];
        let full = capacity(block.cells) as usize;
        block.pages.resize(block.pages.len().next_multiple_of(self.stripe_pages as usize), NONE);
        let programmed = Programmed { erased, cells: block.cells };
        if block.pages.len() == full {
            block.state = State::Closed;
            die.open[origin as usize] = None;
            if block.valid == 0 {
                self.free(block_at / self.block_pages);
            }
        }
        programmed
    }

    fn open(&mut self, die: u32, origin: Origin) -> (u32, bool) {
        let scarce = self.is_scarce(die);
        let die = &mut self.dies[die as usize];
        let index = die.free.pop_front().expect("collecting keeps a block free");
        let block = &mut die.blocks[index as usize];
        let turbo = origin == Origin::Host && self.turbo_blocks_left > 0 && !scarce;
        self.turbo_blocks_left -= u64::from(turbo);
        block.cells = if turbo { Cells::Turbo } else { Cells::Dense };
        block.state = State::Open;
        block.pages = Vec::with_capacity(if turbo { self.turbo_pages } else { self.block_pages } as usize);
        die.open[origin as usize] = Some(index);
        (index, std::mem::replace(&mut block.used, true))
    }

    /// What was at a place is wanted no more.
    fn leave(&mut self, at: u32) {
        let index = at / self.block_pages;
        let (die, block) = self.block_mut(index);
        *die -= 1;
        block.valid -= 1;
        if block.valid == 0 && block.state == State::Closed {
            self.free(index);
        }
    }

    /// A die's count of pages, and a block by its number over all dies.
    fn block_mut(&mut self, index: u32) -> (&mut u64, &mut Block) {
        let die = &mut self.dies[(index / self.blocks_per_die) as usize];
        (&mut die.valid, &mut die.blocks[(index % self.blocks_per_die) as usize])
    }

    fn free(&mut self, index: u32) {
        let die = &mut self.dies[(index / self.blocks_per_die) as usize];
        let index = index % self.blocks_per_die;
        let block = &mut die.blocks[index as usize];
        (block.state, block.pages) = (State::Free, Vec::new());
        self.turbo_blocks_left += u64::from(block.cells == Cells::Turbo);
        die.free.push_back(index);
        if die.victim.is_some_and(|(victim, _)| victim == index) {
            die.victim = None;
        }
    }

    /// Forgets pages `from` up to `to`, which the host has trimmed.
    pub fn forget(&mut self, from: u32, to: u32) {
        let mut page = from;
        while page < to {
            if self.chunks[page as usize / CHUNK_PAGES].is_none() {
                page = (page / CHUNK_PAGES as u32 + 1).saturating_mul(CHUNK_PAGES as u32);
                continue;
            }
            let before = self.map(page, NONE);
            if before != NONE {
                self.leave(before);
            }
            page += 1;
        }
    }

    /// How many stripes of moved pages must be programmed on a die before a stripe of the host. Where blocks are
    /// scarce, as many as keep what becomes free equal to what the host takes: `v` pages that are wanted in a block
    /// of `t` are moved for `t − v` that it may write. The scarcer blocks are, the more.
    pub fn owed_stripes(&mut self, die: u32) -> u64 {
        let spare = self.spare_blocks;
        let free = self.dies[die as usize].free.len();
        if free > spare {
            self.dies[die as usize].owed = 0;
            return 0;
        }
        let Some(victim) = self.victim(die, false) else { return 0 };
        let (total, stripe) = (u64::from(self.block_pages), u64::from(self.stripe_pages));
        let wanted = u64::from(self.dies[die as usize].blocks[victim as usize].valid);
        if free <= 2 {
            // No more than this block is left to collect into: all of it now.
            return wanted.div_ceil(stripe);
        }
        let die = &mut self.dies[die as usize];
        die.owed += 1024 * stripe * wanted / (total - wanted) * (1 + spare - free) as u64;
        let stripes = die.owed / (1024 * stripe);
        die.owed -= stripes * 1024 * stripe;
        stripes
    }

    /// The block that is collected next: the closed one with the fewest pages that are wanted, if any of them holds
    /// less than a block can. One that was begun comes first.
    fn victim(&mut self, die: u32, only_turbo: bool) -> Option<u32> {
        let die = &mut self.dies[die as usize];
        let begun = die.victim.filter(|&(block, _)| !only_turbo || is_turbo(&die.blocks[block as usize]));
        if let Some((block, _)) = begun {
            return Some(block);
        }
        let blocks = die.blocks.iter().enumerate();
        let candidates = blocks.filter(|(_, block)| {
            block.state == State::Closed
                && (is_turbo(block) || (!only_turbo && block.valid < self.block_pages))
        });
        let (index, _) = candidates.min_by_key(|&(index, block)| (block.valid, index))?;
        die.victim = Some((index as u32, 0));
        Some(index as u32)
    }

    /// Takes up to a stripe of pages that are to be moved on a die, out of turbo blocks alone where asked. They are
    /// to be programmed at once. Nothing when nothing can be gained.
    pub fn collect(&mut self, die: u32, only_turbo: bool) -> Collected {
        let mut collected = Collected::default();
        while collected.pages.len() < self.stripe_pages as usize {
            let Some(victim) = self.victim(die, only_turbo) else { break };
            let block_at = (die * self.blocks_per_die + victim) * self.block_pages;
            let from = self.dies[die as usize].victim.map_or(0, |(_, from)| from);
            let pages = &self.dies[die as usize].blocks[victim as usize].pages;
            let mut read = NONE;
            let mut at = from;
            while at < pages.len() as u32 && collected.pages.len() < self.stripe_pages as usize {
                let page = pages[at as usize];
                if page != NONE && self.at(page) == Some(block_at + at) {
                    collected.pages.push(page);
                    if read != at / self.stripe_pages {
                        read = at / self.stripe_pages;
                        collected.stripes_read += 1;
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
        collected
    }

    /// How many pages the drive holds.
    pub fn valid_pages(&self) -> u64 {
        self.dies.iter().map(|die| die.valid).sum()
    }

    /// The memory that the map takes.
    pub fn memory_bytes(&self) -> usize {
        let chunks = self.chunks.iter().flatten().count() * CHUNK_PAGES * 4;
        let blocks = self.dies.iter().flat_map(|die| &die.blocks);
        let pages: usize = blocks.map(|block| block.pages.capacity() * 4 + size_of::<Block>()).sum();
        chunks + pages + size_of_val(&*self.chunks)
    }
}

fn is_turbo(block: &Block) -> bool {
    block.cells == Cells::Turbo
}
