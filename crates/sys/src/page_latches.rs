//! Latches of the pages of a memory that cores share: several readers or one writer of a page. No call waits.
//!
//! ```text
//!   bit 31: a writer has the page │ bit 30: a writer waits for it │ bits 0..30: its readers
//! ```
//! A range is latched page by page, in ascending order, and given back if one page refuses. Readers may keep a page for longer,
//! until they have sent it; a writer that has waited once keeps new readers out, so that it gets its turn.
//!
//! Invariants: a page that has a writer has no reader whose `try_read` succeeded. Model checked by `make loom`; the memory
//! behind the latches is `crate::latched_memory`.

use crate::bug_injection::{InjectedBug, is_injected};
use std::ops::Range;

#[cfg(feature = "loom")]
use loom::sync::atomic::{AtomicU32, Ordering};
#[cfg(not(feature = "loom"))]
use std::sync::atomic::{AtomicU32, Ordering};

/// A writer has the page.
const WRITER: u32 = 1 << 31;
/// A writer waits for the page.
const WRITER_WAITS: u32 = 1 << 30;
/// More readers of a page are refused. Each refused one counts itself for a moment, far fewer than the distance to the next bit.
const READERS_MAX: u32 = 1 << 29;

/// The latches of pages 0 to `count`.
#[derive(Debug)]
pub struct PageLatches(Box<[AtomicU32]>);

impl PageLatches {
    /// Latches of `count` pages, all free.
    pub fn new(count: usize) -> PageLatches {
        PageLatches((0..count).map(|_| AtomicU32::new(0)).collect())
    }

    /// Latches pages for reading. False, and none is latched, if a writer has one of them or waits for it.
    ///
    /// # Panics
    /// If a page does not exist.
    #[inline]
    pub fn try_read(&self, pages: Range<usize>) -> bool {
        match &self.0[pages] {
            // Nearly every range is within a page: no loop.
            [latch] => try_enter(latch),
            latches => try_enter_all(latches),
        }
    }

    /// Gives pages back. REQUIRES: `try_read` latched them for this caller.
    #[inline]
    pub fn end_read(&self, pages: Range<usize>) {
        match &self.0[pages] {
            [latch] => leave(latch),
            latches => leave_all(latches),
        }
    }

    /// Latches pages for writing. False, and none is latched, if another reader or writer has one of them, or waits for it.
    ///
    /// # Panics
    /// If a page does not exist.
    #[inline]
    pub fn try_write(&self, pages: Range<usize>) -> bool {
        let latches = &self.0[pages];
        for (index, latch) in latches.iter().enumerate() {
            if !begin_write(latch, 0) {
                finish(&latches[..index]);
                return false;
            }
        }
        true
    }

    /// As [`PageLatches::try_write`] for a caller that tries until it succeeds or calls [`PageLatches::stop_waiting`]: until then, a
    /// page that it latched or that refused takes no new readers.
    #[inline]
    pub fn wait_to_write(&self, pages: Range<usize>) -> bool {
        let latches = &self.0[pages];
        for (index, latch) in latches.iter().enumerate() {
            let state = latch.fetch_or(WRITER_WAITS, Ordering::Relaxed) | WRITER_WAITS;
            if state != WRITER_WAITS || !begin_write(latch, state) {
                // Kept from new readers, or the next try would find one here.
                for latch in &latches[..index] {
                    latch.fetch_or(WRITER_WAITS, Ordering::Relaxed);
                }
                finish(&latches[..index]);
                return false;
            }
        }
        true
    }

    /// Lets readers in again. Another writer that waits for one of the pages may have to wait for them.
    pub fn stop_waiting(&self, pages: Range<usize>) {
        for latch in &self.0[pages] {
            latch.fetch_and(!WRITER_WAITS, Ordering::Relaxed);
        }
    }

    /// Gives pages back. REQUIRES: `try_write` or `wait_to_write` latched them for this caller.
    #[inline]
    pub fn end_write(&self, pages: Range<usize>) {
        finish(&self.0[pages]);
    }
}

/// Takes a page for writing, if its state is this one, without readers.
#[inline]
fn begin_write(latch: &AtomicU32, state: u32) -> bool {
    if is_injected(InjectedBug::WriteUnderReaders) {
        return latch.fetch_add(WRITER, Ordering::Acquire) < WRITER;
    }
    // Acquire: the bytes are written after all readers have read them.
    latch.compare_exchange(state, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

#[inline]
fn try_enter(latch: &AtomicU32) -> bool {
    // Acquire: the bytes are read after its last writer has written them.
    let is_entered = latch.fetch_add(1, Ordering::Acquire) < READERS_MAX;
    if !is_entered {
        leave(latch);
    }
    is_entered
}

#[inline(never)]
fn try_enter_all(latches: &[AtomicU32]) -> bool {
    for (index, latch) in latches.iter().enumerate() {
        if !try_enter(latch) {
            latches[..index].iter().for_each(leave);
            return false;
        }
    }
    true
}

#[inline]
fn leave(latch: &AtomicU32) {
    // Release: the next writer writes after the bytes were read.
    latch.fetch_sub(1, Ordering::Release);
}

#[inline(never)]
fn leave_all(latches: &[AtomicU32]) {
    latches.iter().for_each(leave);
}

#[inline]
fn finish(latches: &[AtomicU32]) {
    for latch in latches {
        // Release: the next reader reads what was written. Not a store: readers that are refused count themselves meanwhile.
        latch.fetch_sub(WRITER, Ordering::Release);
    }
}

#[cfg(all(test, not(feature = "loom")))]
mod tests {
    use super::*;

    #[test]
    fn readers_share_a_page_and_writers_do_not() {
        let latches = PageLatches::new(4);
        assert!(latches.try_read(0..2) && latches.try_read(1..3));
        assert!(!latches.try_write(2..4), "page 2 has a reader");
        assert!(latches.try_write(3..4), "the refused writer gave page 3 back, or never had it");
        assert!(!latches.try_read(2..4) && !latches.try_write(3..4), "page 3 has a writer");
        latches.end_read(1..3);
        assert!(latches.try_write(2..3), "the refused reader gave page 2 back");
        latches.end_write(2..4);
        latches.end_read(0..2);
        assert!(latches.try_write(0..4));
    }

    #[test]
    fn a_writer_that_waits_keeps_new_readers_out() {
        let latches = PageLatches::new(2);
        assert!(latches.try_read(1..2));
        assert!(!latches.wait_to_write(0..2));
        assert!(!latches.try_read(1..2) && !latches.try_write(1..2));
        assert!(!latches.try_read(0..1), "nor on the page that was free");
        latches.end_read(1..2);
        assert!(latches.wait_to_write(0..2));
        assert!(!latches.wait_to_write(1..2), "a second writer waits for the first");
        latches.end_write(0..2);
        assert!(!latches.try_read(1..2), "the second still waits");
        latches.stop_waiting(1..2);
        assert!(latches.try_read(0..2));
    }
}
