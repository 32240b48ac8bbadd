//! System call times of an engine on files: the time of an operation in each kind of call, and waiting for a file.
//!
//! In: the duration of each call, by two clock readings. Out: sums per operation, which a worker accumulates.
//! The rest of an operation's latency is spent in the engine and the generator.

use crate::platform::Clock;
use octokv_base::Nanos;
use std::cell::Cell;

/// Time spent by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SyscallTimes {
    /// Waiting for the lock of the file, which another put holds.
    pub wait: Nanos,
    /// In pread.
    pub read: Nanos,
    /// In pwrite.
    pub write: Nanos,
    /// In fsync.
    pub sync: Nanos,
}

impl SyscallTimes {
    /// Adds other times.
    pub fn add(&mut self, other: SyscallTimes) {
        self.wait = self.wait + other.wait;
        self.read = self.read + other.read;
        self.write = self.write + other.write;
        self.sync = self.sync + other.sync;
    }
}

/// A kind of time.
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

/// Measures the current operation of one thread.
pub struct SyscallTimer {
    now: Clock,
    spent: Cell<SyscallTimes>,
}

impl SyscallTimer {
    /// Creates a timer without recorded time.
    pub fn new(now: Clock) -> SyscallTimer {
        SyscallTimer { now, spent: Cell::default() }
    }

    /// Runs `make` and adds its duration to the sum of `call`.
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

    /// Returns the sums and resets them.
    pub fn take(&self) -> SyscallTimes {
        self.spent.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A clock that advances by 10 ns with each reading.
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
