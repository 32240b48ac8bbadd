//! The idle policy of a core: when it spins and when it sleeps. The reactor itself is `octokv_node::reactor`.
//!
//! A reactor is a function `run_iteration(&mut self) -> bool` that does all available work and returns whether there
//! was any. On the kernel a thread runs
//! ```text
//!   loop {
//!       let did_work = reactor.run_iteration();
//!       idle.spin_or_sleep(did_work, now(), has_device_io, handle.next_deadline(), &mut sockets);
//!   }
//! ```
//! and in the simulation [`crate::simulated::SimEnv`] calls the same function. The order of one iteration:
//! `handle.begin_iteration(now)`, sockets, mailbox, `handle.poll_background()` and other tasks, `devices.poll()` (it
//! starts the operations that the tasks submitted), the tasks that it woke, then one gathered send per connection. An
//! event after its stage is handled by the next iteration; a reactor that returns false has polled every source since
//! its last work.
//!
//! Invariants: no event between the last poll and the sleep is lost: sockets cause edges in epoll, messages and
//! wake-ups notify the [`CoreWaker`], device completions signal the queue's eventfd or notify the `CoreWaker`, timers
//! bound the sleep. A core that other processes use sleeps instead of yielding. Tested below and in `tests/reactor.rs`.

use crate::core_waker::CoreWaker;
use crate::kernel_sockets::KernelSockets;
use octokv_base::Nanos;
use octokv_sys::eventfd::EventFd;
use std::io;
use std::sync::Arc;

/// The configured behaviour of an idle core.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Spins for some time after the last work, then sleeps.
    Adaptive {
        /// The time to spin after the last work, in nanoseconds.
        spin: Nanos,
    },
    /// Never sleeps: the lowest latency, 100 % of a core.
    Busy,
    /// Sleeps immediately: the least processor time.
    Sleep,
}

/// The minimum spin time of an adaptive core with device operations in flight. Most operations complete faster than a
/// core wakes from sleep; the core sleeps through those that take longer than this.
const DEVICE_SPIN_MIN: Nanos = Nanos::from_millis(1);

impl Default for Polling {
    /// Adaptive, 100 µs. Waking from sleep costs 10 to 50 µs; spinning somewhat longer than that at most doubles the
    /// cost of a short pause.
    fn default() -> Polling {
        Polling::Adaptive { spin: Nanos::from_micros(100) }
    }
}

/// Action of a core after an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleAction {
    /// Runs the next iteration immediately.
    Continue,
    /// Sleeps at most this long ([`Nanos::NEVER`]: until woken).
    Sleep(Nanos),
}

/// Selects the action after an idle iteration, from the time of the last work, whether device operations are in flight,
/// and the deadline of the next iteration. A pure function.
pub fn choose_idle_action(
    polling: Polling,
    now: Nanos,
    last_work: Nanos,
    has_device_io: bool,
    next_deadline: Nanos,
) -> IdleAction {
    let spin = match polling {
        Polling::Busy => return IdleAction::Continue,
        Polling::Sleep => Nanos::ZERO,
        Polling::Adaptive { spin } if has_device_io && spin > Nanos::ZERO => spin.max(DEVICE_SPIN_MIN),
        Polling::Adaptive { spin } => spin,
    };
    if next_deadline <= now || now.since(last_work) < spin {
        return IdleAction::Continue;
    }
    IdleAction::Sleep(if next_deadline == Nanos::NEVER { Nanos::NEVER } else { next_deadline - now })
}

/// A yield after which the core comes back so late went to another process: the kernel's worker threads need it for much less.
const CONTENDED_YIELD: Nanos = Nanos::from_millis(1);
/// The time for which the core then sleeps when it is idle, before it yields again.
const CONTENDED_TIME: Nanos = Nanos::from_millis(100);

/// Whether other processes want the core. A yield then gives it to them for a slice of the scheduler, a few milliseconds, in which completed operations wait; a
/// thread that sleeps is woken at once.
#[derive(Debug)]
struct CoreContention {
    /// When the core was yielded, if nothing came after that.
    yielded_at: Option<Nanos>,
    until: Nanos,
    /// How often a yield took so long.
    count: u64,
}

impl CoreContention {
    const NONE: CoreContention = CoreContention { yielded_at: None, until: Nanos::ZERO, count: 0 };

    /// Notes that the core has come back to the reactor, after at most one iteration. Whether it is contended.
    fn resumed(&mut self, now: Nanos) -> bool {
        if self.yielded_at.take().is_some_and(|yielded_at| now.since(yielded_at) >= CONTENDED_YIELD) {
            (self.until, self.count) = (now + CONTENDED_TIME, self.count + 1);
        }
        now < self.until
    }
}

/// The idle policy of one core on the kernel.
pub struct IdlePolicy {
    polling: Polling,
    contention: CoreContention,
    core_waker: Arc<CoreWaker>,
    last_work: Nanos,
    sleep_count: u64,
}

impl IdlePolicy {
    /// The policy of the reactor that `core_waker` wakes. Adds the wake-up sources to the sockets' poller: the
    /// `core_waker`, and `device_eventfd` ([`crate::DeviceHandle::completion_eventfd`]).
    ///
    /// # Errors
    /// As [`KernelSockets::add_edge_wake_event`].
    pub fn new(
        polling: Polling,
        core_waker: Arc<CoreWaker>,
        sockets: &mut KernelSockets,
        device_eventfd: Option<Arc<EventFd>>,
    ) -> io::Result<IdlePolicy> {
        if let Some(event) = core_waker.event() {
            sockets.add_wake_event(event)?;
        }
        if let Some(event) = device_eventfd {
            sockets.add_edge_wake_event(&event)?;
        }
        let contention = CoreContention::NONE;
        Ok(IdlePolicy { polling, contention, core_waker, last_work: Nanos::ZERO, sleep_count: 0 })
    }

    /// Spins once or sleeps, after an iteration that did work or not. True if the core slept. `has_device_io` is whether
    /// device operations are in flight; `next_deadline` bounds the sleep.
    pub fn spin_or_sleep(
        &mut self,
        did_work: bool,
        now: Nanos,
        has_device_io: bool,
        next_deadline: Nanos,
        sockets: &mut KernelSockets,
    ) -> bool {
        let is_contended = self.contention.resumed(now);
        if did_work {
            self.last_work = now;
            return false;
        }
        let polling = match self.polling {
            Polling::Adaptive { .. } if is_contended => Polling::Sleep,
            polling => polling,
        };
        let action = choose_idle_action(polling, now, self.last_work, has_device_io, next_deadline);
        let IdleAction::Sleep(span) = action else {
            match has_device_io {
                // The kernel's worker threads execute part of that work, above all flushes, on this core.
                true => {
                    self.contention.yielded_at = Some(now);
                    std::thread::yield_now();
                }
                false => std::hint::spin_loop(),
            }
            return false;
        };
        if !self.core_waker.try_sleep() {
            return false;
        }
        sockets.wait(span);
        self.core_waker.on_wake();
        self.sleep_count += 1;
        true
    }

    /// How often the core has slept.
    pub fn sleep_count(&self) -> u64 {
        self.sleep_count
    }

    /// How often the core came back so late from a yield that another process must have used it; it then sleeps for some time when it is idle.
    pub fn contention_count(&self) -> u64 {
        self.contention.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_comes_back_late_from_a_yield_is_contended_for_some_time() {
        let mut core = CoreContention::NONE;
        let mut yielded_for = |at: Nanos, span: Nanos| {
            core.yielded_at = Some(at);
            core.resumed(at + span)
        };
        let second = Nanos::from_secs(1);
        assert!(!yielded_for(second, Nanos::from_micros(900)));
        assert!(yielded_for(second, CONTENDED_YIELD));
        let ends = second + CONTENDED_YIELD + CONTENDED_TIME;
        assert!(core.resumed(ends - Nanos(1)) && !core.resumed(ends));
        assert_eq!(core.count, 1);
        assert!(!core.resumed(ends + second), "without a yield it was the reactor's own work");
    }

    #[test]
    fn a_core_spins_for_its_span_and_sleeps_to_the_next_deadline() {
        let adaptive = Polling::Adaptive { spin: Nanos(100) };
        // now, last work, device operations in flight, next deadline
        let table = [
            (IdleAction::Continue, adaptive, 50, 0, false, u64::MAX),
            (IdleAction::Continue, adaptive, 99, 0, false, 1_000),
            (IdleAction::Sleep(Nanos(900)), adaptive, 100, 0, false, 1_000),
            (IdleAction::Sleep(Nanos::NEVER), adaptive, 100, 0, false, u64::MAX),
            (IdleAction::Continue, adaptive, 1_000, 0, false, 1_000), // The timer is due.
            (IdleAction::Continue, adaptive, 999_999, 0, true, u64::MAX),
            (IdleAction::Sleep(Nanos::NEVER), adaptive, 1_000_000, 0, true, u64::MAX),
            (IdleAction::Sleep(Nanos::NEVER), Polling::Adaptive { spin: Nanos::ZERO }, 1, 0, true, u64::MAX),
            (IdleAction::Continue, Polling::Busy, 1_000_000, 0, false, u64::MAX),
            (IdleAction::Sleep(Nanos(1)), Polling::Sleep, 10, 10, true, 11),
            (IdleAction::Continue, Polling::Sleep, 11, 0, false, 11),
        ];
        for (want, polling, now, last_work, has_device_io, next) in table {
            assert_eq!(
                choose_idle_action(polling, Nanos(now), Nanos(last_work), has_device_io, Nanos(next)),
                want
            );
        }
    }
}
