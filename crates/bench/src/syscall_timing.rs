//! Where an engine over files spends an operation's time: in the kernel's calls, by kind, and until a file is its own.
//!
//! In: how long each call took. Out: sums of one operation, which a worker adds up; two clock readings a call.
//! What is left of an operation's latency is the engine's and the generator's own.

use crate::platform::Clock;
use octokv_base::Nanos;
use std::cell::Cell;

/// Sums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyscallTimes {
    /// Until the file was nobody else's: no system call of ours, but the wait for somebody's.
    pub wait: Nanos,
    /// In pread.
    pub read: Nanos,
    /// In pwrite.
    pub write: Nanos,
    /// In fsync.
    pub sync: Nanos,
}

impl SyscallTimes {
    /// Adds others.
    pub fn add(&mut self, other: SyscallTimes) {
        self.wait = self.wait + other.wait;
        self.read = self.read + other.read;
        self.write = self.write + other.write;
        self.sync = self.sync + other.sync;
    }
}

/// Which sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SyscallKind {
    /// [`SyscallTimes::wait`].
    Wait,
    /// [`SyscallTimes::read`].
    Read,
    /// [`SyscallTimes::write`].
    Write,
    /// [`SyscallTimes::sync`].
    Sync,
}

/// The sums of one thread's operation under way.
pub struct SyscallTimer {
    now: Clock,
    spent: Cell<SyscallTimes>,
}

impl SyscallTimer {
    /// With nothing spent.
    pub fn new(now: Clock) -> SyscallTimer {
        SyscallTimer { now, spent: Cell::default() }
    }

    /// Makes a call and counts how long it takes.
    pub fn time<T>(&self, call: SyscallKind, make: impl FnOnce() -> T) -> T {
        let begun = (self.now)();
        let made = make();
        let span = (self.now)().since(begun);
        let mut spent = self.spent.get();
        let sum = match call {
            SyscallKind::Wait => &mut spent.wait,
            SyscallKind::Read => &mut spent.read,
            SyscallKind::Write => &mut spent.write,
            SyscallKind::Sync => &mut spent.sync,
        };
        *sum = *sum + span;
        self.spent.set(spent);
        made
    }

    /// What was spent since this was last asked.
    pub fn take(&self) -> SyscallTimes {
        self.spent.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that is 10 ns later whenever it is read.
    fn ticking_clock() -> Nanos {
        static TIME: AtomicU64 = AtomicU64::new(0);
        Nanos(TIME.fetch_add(10, Ordering::Relaxed))
    }

    #[test]
    fn each_call_is_counted_under_its_kind_and_once() {
        let meter = SyscallTimer::new(ticking_clock);
        assert_eq!(meter.time(SyscallKind::Write, || 7), 7);
        meter.time(SyscallKind::Write, || ());
        meter.time(SyscallKind::Sync, || ());
        meter.time(SyscallKind::Wait, || ());
        let want = SyscallTimes { wait: Nanos(10), read: Nanos(0), write: Nanos(20), sync: Nanos(10) };
        let mut sum = meter.take();
        assert_eq!(sum, want);
        meter.time(SyscallKind::Read, || ());
        sum.add(meter.take());
        assert_eq!(sum, SyscallTimes { read: Nanos(10), ..want });
        assert_eq!(meter.take(), SyscallTimes::default());
    }
}
