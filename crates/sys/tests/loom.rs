//! Model checking of the page latches: loom runs every interleaving of readers and writers.
//!
//! Run by `make loom`, with the feature `loom`. The bytes of a page are a cell whose accesses loom tracks: a write that is concurrent
//! with another access, or not ordered after it, fails.

use loom::cell::UnsafeCell;
use loom::thread;
use octokv_sys::page_latches::PageLatches;
use std::ops::Range;
use std::sync::Arc;

const PAGES: usize = 2;

/// A page's bytes. The outer lock makes the cell `Sync`; it is held only to begin an access, so that it orders no accesses in the
/// model.
struct Page(std::sync::Mutex<UnsafeCell<u32>>);

struct Memory {
    latches: PageLatches,
    pages: [Page; PAGES],
}

impl Memory {
    fn new() -> Arc<Memory> {
        let pages = std::array::from_fn(|_| Page(std::sync::Mutex::new(UnsafeCell::new(0))));
        Arc::new(Memory { latches: PageLatches::new(PAGES), pages })
    }

    /// Reads pages, while other threads may run.
    fn read(&self, pages: Range<usize>) -> bool {
        if !self.latches.try_read(pages.clone()) {
            return false;
        }
        for page in &self.pages[pages.clone()] {
            let bytes = page.0.lock().unwrap().get();
            thread::yield_now();
            drop(bytes);
        }
        self.latches.end_read(pages);
        true
    }

    fn write_latched(&self, pages: Range<usize>) {
        for page in &self.pages[pages.clone()] {
            let bytes = page.0.lock().unwrap().get_mut();
            thread::yield_now();
            drop(bytes);
        }
        self.latches.end_write(pages);
    }

    fn write(&self, pages: Range<usize>) -> bool {
        let latched = self.latches.try_write(pages.clone());
        if latched {
            self.write_latched(pages);
        }
        latched
    }

    /// A writer that waits for two tries, and then gives up.
    fn wait_and_write(&self, pages: Range<usize>) {
        for _ in 0..2 {
            if self.latches.wait_to_write(pages.clone()) {
                return self.write_latched(pages);
            }
        }
        self.latches.stop_waiting(pages);
    }
}

/// Checks a body of three threads, bounded to two preemptions, to end within seconds.
fn check(body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(body);
}

#[test]
fn readers_and_writers_exclude_each_other() {
    check(|| {
        let memory = Memory::new();
        let others: Vec<_> = [0..1, 0..2]
            .into_iter()
            .map(|pages| {
                let memory = Arc::clone(&memory);
                thread::spawn(move || drop(memory.write(pages)))
            })
            .collect();
        memory.read(0..2);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(memory.write(0..2), "all was given back");
    });
}

#[test]
fn writers_that_wait_exclude_others_and_leave_nothing_behind() {
    check(|| {
        let memory = Memory::new();
        let others: Vec<_> = [0..2, 1..2]
            .into_iter()
            .map(|pages| {
                let memory = Arc::clone(&memory);
                thread::spawn(move || memory.wait_and_write(pages))
            })
            .collect();
        memory.read(1..2);
        others.into_iter().for_each(|other| other.join().unwrap());
        assert!(memory.write(0..2), "no page says that a writer waits");
    });
}
