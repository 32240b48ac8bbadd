//! The write buffer of a drive: pages that the host has written and that are not yet on flash.
//!
//! ```text
//!   written ──▶ waiting ──a stripe is full, or a flush──▶ programming ──its program ends──▶ free
//!                  └── written again: takes no more space; trimmed: free at once
//! ```
//! In: pages with their arrival times, the ends of their programs. Out: stripes to program; when there is space.
//! Invariant: free pages, waiting pages and pages whose program is unfinished add up to the capacity.

use octokv_base::Nanos;
use octokv_base::map::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// The write buffer.
#[derive(Clone, Debug)]
pub struct WriteBuffer {
    /// Waiting pages and their arrival times, in the order of arrival. At most `capacity_pages`.
    queue: VecDeque<(u32, Nanos)>,
    waiting: FxHashSet<u32>,
    /// The end of each page's program, ended ones included. At most `2 * capacity_pages` after [`WriteBuffer::advance`].
    programming: FxHashMap<u32, Nanos>,
    /// When space becomes free, and for how many pages. At most one entry per page of the buffer.
    releases: BinaryHeap<Reverse<(Nanos, u32)>>,
    free_pages: u32,
    /// The time from which `free_pages` are free.
    free_from: Nanos,
    capacity_pages: u32,
    drained_at: Nanos,
}

impl WriteBuffer {
    /// An empty buffer with a capacity of `pages`.
    pub fn new(pages: u32) -> WriteBuffer {
        WriteBuffer {
            queue: VecDeque::new(),
            waiting: FxHashSet::default(),
            programming: FxHashMap::default(),
            releases: BinaryHeap::new(),
            free_pages: pages,
            free_from: Nanos::ZERO,
            capacity_pages: pages,
            drained_at: Nanos::ZERO,
        }
    }

    /// Advances to `now`: programs that have ended free their pages.
    pub fn advance(&mut self, now: Nanos) {
        while let Some(&Reverse((end, pages))) = self.releases.peek()
            && end <= now
        {
            self.releases.pop();
            self.free_pages += pages;
        }
        if self.programming.len() > 2 * self.capacity_pages as usize {
            self.programming.retain(|_, end| *end > now);
        }
    }

    /// Whether a page is in the buffer at `now`, waiting or being programmed.
    pub fn contains(&self, page: u32, now: Nanos) -> bool {
        self.waiting.contains(&page) || self.programming.get(&page).is_some_and(|&end| end > now)
    }

    /// Reserves space for one page that arrives at `ready` or later, and gives when there is space. `None` if only
    /// programs that have not started can free some.
    pub fn reserve(&mut self, page: u32, ready: Nanos) -> Option<Nanos> {
        if self.waiting.contains(&page) {
            return Some(ready);
        }
        if self.free_pages == 0 {
            let Reverse((end, pages)) = self.releases.pop()?;
            self.free_pages = pages;
            self.free_from = self.free_from.max(end);
        }
        self.free_pages -= 1;
        Some(ready.max(self.free_from))
    }

    /// Adds a page that arrived at `at`. REQUIRES: its space was reserved.
    pub fn insert(&mut self, page: u32, at: Nanos) {
        if self.waiting.insert(page) {
            self.queue.push_back((page, at));
        }
    }

    /// When the first `pages` waiting pages have all arrived; `None` for zero pages.
    pub fn ready_at(&self, pages: u32) -> Option<Nanos> {
        self.queue.iter().take(pages as usize).map(|&(_, at)| at).max()
    }

    /// Moves up to `pages` waiting pages to `into`. REQUIRES: [`WriteBuffer::start_program`] follows.
    pub fn take(&mut self, pages: u32, into: &mut Vec<u32>) {
        into.clear();
        let count = self.queue.len().min(pages as usize);
        into.extend(self.queue.drain(..count).map(|(page, _)| page));
        for page in &*into {
            self.waiting.remove(page);
        }
    }

    /// Notes that the program of these pages ends at `end`.
    pub fn start_program(&mut self, pages: &[u32], end: Nanos) {
        for &page in pages {
            self.programming.insert(page, end);
        }
        self.releases.push(Reverse((end, pages.len() as u32)));
        self.drained_at = self.drained_at.max(end);
    }

    /// Discards the pages `from..to`.
    pub fn discard(&mut self, from: u32, to: u32) {
        let (waiting, queued_before) = (&mut self.waiting, self.queue.len());
        self.queue.retain(|&(page, _)| {
            let is_kept = !(from..to).contains(&page);
            if !is_kept {
                waiting.remove(&page);
            }
            is_kept
        });
        self.free_pages += (queued_before - self.queue.len()) as u32;
        self.programming.retain(|page, _| !(from..to).contains(page));
    }

    /// The number of pages that wait for their program.
    pub fn waiting_pages(&self) -> u32 {
        self.queue.len() as u32
    }

    /// The number of pages in the buffer, those being programmed included.
    pub fn held_pages(&self) -> u32 {
        self.capacity_pages - self.free_pages
    }

    /// When the last started program ends.
    pub fn drained_at(&self) -> Nanos {
        self.drained_at
    }
}
