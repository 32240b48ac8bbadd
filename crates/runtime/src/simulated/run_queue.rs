//! When each reactor runs next, and whose drivers it uses.
//!
//! ```text
//!            it did work: at the end of its busy time
//!       ┌──────────────────────────────────────────────┐
//!       ▼                                              │
//!    Queued ── due ──▶ runs one iteration ─────────────┤
//!       ▲                                              │ it did none, and `CoreWaker::try_sleep` succeeds
//!       └─ edge, completion, notification: now ─── Asleep: queued for its deadline
//! ```
//! In: reactors with the times at which they run, the drivers (sockets, device queues) that they use. Out: the reactors
//! that are due. Invariants: a reactor has one place in the queue or none; a driver belongs to the reactor that used it
//! last. Tested in `tests/run_queue.rs`.

use super::ids::DriverId;
use octokv_base::Nanos;
use std::collections::BTreeSet;

/// The reactors that are to run, by time.
#[derive(Debug, Default)]
pub(crate) struct RunQueue {
    queue: BTreeSet<(Nanos, u32)>,
    /// By reactor: its time in `queue`; [`Nanos::NEVER`] if it is not there.
    due_at: Vec<Nanos>,
}

impl RunQueue {
    /// Sets when `reactor` runs, in place of an earlier setting; [`Nanos::NEVER`] takes it out.
    pub(crate) fn set(&mut self, reactor: u32, at: Nanos) {
        let index = reactor as usize;
        if index >= self.due_at.len() {
            self.due_at.resize(index + 1, Nanos::NEVER);
        }
        let before = std::mem::replace(&mut self.due_at[index], at);
        if before != Nanos::NEVER {
            self.queue.remove(&(before, reactor));
        }
        if at != Nanos::NEVER {
            self.queue.insert((at, reactor));
        }
    }

    /// The time at which the next reactor runs; [`Nanos::NEVER`] if none does.
    pub(crate) fn next_due(&self) -> Nanos {
        self.queue.first().map_or(Nanos::NEVER, |&(at, _)| at)
    }

    /// Moves the reactors that are due at `now` to the end of `out`, the earliest first.
    pub(crate) fn take_due(&mut self, now: Nanos, out: &mut Vec<u32>) {
        while let Some((_, reactor)) = self.queue.first().copied().filter(|&(at, _)| at <= now) {
            self.set(reactor, Nanos::NEVER);
            out.push(reactor);
        }
    }
}

/// The reactors that own the drivers.
#[derive(Debug, Default)]
pub(crate) struct DriverOwners {
    /// By driver: the reactor that used it last; `None` if no reactor has.
    owners: Vec<Option<u32>>,
    /// The reactor whose iteration runs now.
    running: Option<u32>,
}

impl DriverOwners {
    /// A new driver, without an owner.
    pub(crate) fn add(&mut self) -> DriverId {
        self.owners.push(None);
        DriverId((self.owners.len() - 1) as u32)
    }

    /// Notes that a driver is used: by the reactor that runs now, if one does.
    pub(crate) fn note_use(&mut self, driver: DriverId) {
        if self.running.is_some() {
            self.owners[driver.0 as usize] = self.running;
        }
    }

    /// Sets the reactor whose iteration runs.
    pub(crate) fn set_running(&mut self, reactor: Option<u32>) {
        self.running = reactor;
    }

    /// The reactor that owns a driver.
    pub(crate) fn owner(&self, driver: DriverId) -> Option<u32> {
        self.owners[driver.0 as usize]
    }
}
