//! When a core spins and when it sleeps. The reactor itself, what a core does in a turn, is `octokv_node::reactor`.
//!
//! A reactor is a function `turn(&mut self) -> bool` that does whatever there is to do and says whether
//! there was anything. On real cores a thread runs
//! ```text
//!   loop { let busy = reactor.turn(); idle.rest(busy, now(), device_works, handle.next_deadline(), &mut sockets) }
//! ```
//! and in a virtual world the world calls the same function. One turn, in this order:
//! `handle.begin_turn(now)`, sockets, mailbox, `handle.run_background()` and other tasks,
//! `channel.poll()` (it sends on what the tasks submitted), tasks again (those that it woke), then one
//! gathered send per connection. What arrives after its stage is found by the next turn; a reactor
//! that says it was idle has looked at everything since its last work.
//!
//! Invariants: nothing is lost between the last look and the sleep: sockets by the poller's edges,
//! messages and wake-ups by the doorbell, device answers by the queue's descriptor or the doorbell,
//! timers by the deadline. Tested in `tests/reactor.rs`.

use crate::core_waker::CoreWaker;
use crate::kernel_sockets::KernelSockets;
use octokv_base::Nanos;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

/// Whether an idle core spins or sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polling {
    /// Spins for a while after the last work, then sleeps.
    Adaptive {
        /// How long it spins.
        spin: Nanos,
    },
    /// Never sleeps: the lowest latency, a whole core always.
    Busy,
    /// Sleeps at once: the least processor time.
    Sleep,
}

/// How long a core that spins at all goes on while its devices work. To wake a core takes longer than most of them
/// need; one that takes longer than this is waited for asleep.
const DEVICE_SPIN_MIN: Nanos = Nanos::from_millis(1);

impl Default for Polling {
    /// Adaptive. Waking from sleep costs some 10–50 µs, so spinning about that long and a little more
    /// at most doubles the cost of a short pause.
    fn default() -> Polling {
        Polling::Adaptive { spin: Nanos::from_micros(100) }
    }
}

/// What to do after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleAction {
    /// Another turn at once.
    Continue,
    /// Sleep, at most so long ([`Nanos::NEVER`]: until woken).
    Sleep(Nanos),
}

/// Chooses, given when work was last seen, whether devices are working, and when the next turn is due. Pure.
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

/// The idle policy of one real core.
pub struct IdlePolicy {
    polling: Polling,
    core_waker: Arc<CoreWaker>,
    last_work: Nanos,
    sleep_count: u64,
}

impl IdlePolicy {
    /// The policy of the reactor that `doorbell` wakes. What the reactor must wake for is added to its
    /// sockets' poller: the doorbell, and the device channel's [`crate::DeviceHandle::wait_descriptor`].
    pub fn new(
        polling: Polling,
        core_waker: Arc<CoreWaker>,
        sockets: &mut KernelSockets,
        device_eventfd: Option<RawFd>,
    ) -> io::Result<IdlePolicy> {
        if let Some(event) = core_waker.event() {
            sockets.add_wake_event(event)?;
        }
        if let Some(descriptor) = device_eventfd {
            sockets.add_wake_descriptor(descriptor)?;
        }
        Ok(IdlePolicy { polling, core_waker, last_work: Nanos::ZERO, sleep_count: 0 })
    }

    /// After a turn that was busy or not: comes back at once, or after a sleep. True when it slept.
    /// `device_works` says that answers of devices are awaited.
    pub fn spin_or_sleep(
        &mut self,
        did_work: bool,
        now: Nanos,
        has_device_io: bool,
        next_deadline: Nanos,
        sockets: &mut KernelSockets,
    ) -> bool {
        if did_work {
            self.last_work = now;
            return false;
        }
        let action = choose_idle_action(self.polling, now, self.last_work, has_device_io, next_deadline);
        let IdleAction::Sleep(span) = action else {
            match has_device_io {
                // The kernel's own threads do a part of that work, flushes above all, and on this core.
                true => std::thread::yield_now(),
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

    /// How often the core slept.
    pub fn sleep_count(&self) -> u64 {
        self.sleep_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_spins_for_its_span_and_sleeps_to_the_next_deadline() {
        let adaptive = Polling::Adaptive { spin: Nanos(100) };
        // now, last work, whether a device works, next deadline
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
