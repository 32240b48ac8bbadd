//! What a drive has taken from its host and not yet on flash.
//!
//! ```text
//!   written ──▶ waiting ──a stripe is full, or a flush──▶ landing ──its program ends──▶ gone, its room is free
//!                  └── written again: takes no more room; trimmed: gone at once
//! ```
//! In: pages with the time of their arrival, the ends of their programs. Out: stripes to program, when there is room.
//! Invariant: room, waiting pages and pages whose program has not given its room back are the buffer's size together.

use octokv_base::Nanos;
use octokv_base::map::{FxHashMap, FxHashSet};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// The write buffer.
#[derive(Debug)]
pub struct WriteBuffer {
    /// In the order of their arrival.
    queue: VecDeque<(u32, Nanos)>,
    waiting: FxHashSet<u32>,
    /// When the program of a page ends; some have ended.
    programming: FxHashMap<u32, Nanos>,
    /// When room becomes free, and for how many pages.
    releases: BinaryHeap<Reverse<(Nanos, u32)>>,
    free_pages: u32,
    /// Before this the room that there is was not free.
    free_from: Nanos,
    capacity_pages: u32,
    drained_at: Nanos,
}

impl WriteBuffer {
    /// An empty buffer for so many pages.
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

    /// Lets time pass: programs that have ended give their room back.
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

    /// Whether a page is here, on its way or not.
    pub fn contains(&self, page: u32, now: Nanos) -> bool {
        self.waiting.contains(&page) || self.programming.get(&page).is_some_and(|&end| end > now)
    }

    /// Takes room for one page that arrives at `ready` or later. Gives when there is room; `None` when only programs
    /// that are not begun yet can make some.
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

    /// A page that was admitted has arrived.
    pub fn insert(&mut self, page: u32, at: Nanos) {
        if self.waiting.insert(page) {
            self.queue.push_back((page, at));
        }
    }

    /// When the first `pages` of those that wait have all arrived; `None` for no pages.
    pub fn ready_at(&self, pages: u32) -> Option<Nanos> {
        self.queue.iter().take(pages as usize).map(|&(_, at)| at).max()
    }

    /// Takes up to `pages` to be programmed; their program must be told with [`WriteBuffer::land`].
    pub fn take(&mut self, pages: u32, into: &mut Vec<u32>) {
        into.clear();
        let count = self.queue.len().min(pages as usize);
        into.extend(self.queue.drain(..count).map(|(page, _)| page));
        for page in &*into {
            self.waiting.remove(page);
        }
    }

    /// The program of these pages ends then.
    pub fn start_program(&mut self, pages: &[u32], end: Nanos) {
        for &page in pages {
            self.programming.insert(page, end);
        }
        self.releases.push(Reverse((end, pages.len() as u32)));
        self.drained_at = self.drained_at.max(end);
    }

    /// Forgets pages `from` up to `to`.
    pub fn discard(&mut self, from: u32, to: u32) {
        let (waiting, queued_before) = (&mut self.waiting, self.queue.len());
        self.queue.retain(|&(page, _)| {
            let stays = !(from..to).contains(&page);
            if !stays {
                waiting.remove(&page);
            }
            stays
        });
        self.free_pages += (queued_before - self.queue.len()) as u32;
        self.programming.retain(|page, _| !(from..to).contains(page));
    }

    /// How many pages wait for their program.
    pub fn waiting_pages(&self) -> u32 {
        self.queue.len() as u32
    }

    /// How many pages it holds, those whose program has begun included.
    pub fn held_pages(&self) -> u32 {
        self.capacity_pages - self.free_pages
    }

    /// When the last program that was begun ends.
    pub fn drained_at(&self) -> Nanos {
        self.drained_at
    }
}
