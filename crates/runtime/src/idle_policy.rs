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

use crate::core_waker::Doorbell;
use crate::kernel_sockets::RealSockets;
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
const DEVICE_SPIN: Nanos = Nanos::from_millis(1);

impl Default for Polling {
    /// Adaptive. Waking from sleep costs some 10–50 µs, so spinning about that long and a little more
    /// at most doubles the cost of a short pause.
    fn default() -> Polling {
        Polling::Adaptive { spin: Nanos::from_micros(100) }
    }
}

/// What to do after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// Another turn at once.
    Turn,
    /// Sleep, at most so long ([`Nanos::NEVER`]: until woken).
    Sleep(Nanos),
}

/// Chooses, given when work was last seen, whether devices are working, and when the next turn is due. Pure.
pub fn choose(
    polling: Polling,
    now: Nanos,
    last_work: Nanos,
    device_works: bool,
    next_deadline: Nanos,
) -> Choice {
    let spin = match polling {
        Polling::Busy => return Choice::Turn,
        Polling::Sleep => Nanos::ZERO,
        Polling::Adaptive { spin } if device_works && spin > Nanos::ZERO => spin.max(DEVICE_SPIN),
        Polling::Adaptive { spin } => spin,
    };
    if next_deadline <= now || now.since(last_work) < spin {
        return Choice::Turn;
    }
    Choice::Sleep(if next_deadline == Nanos::NEVER { Nanos::NEVER } else { next_deadline - now })
}

/// The idle policy of one real core.
pub struct Idle {
    polling: Polling,
    doorbell: Arc<Doorbell>,
    last_work: Nanos,
    sleeps: u64,
}

impl Idle {
    /// The policy of the reactor that `doorbell` wakes. What the reactor must wake for is added to its
    /// sockets' poller: the doorbell, and the device channel's [`crate::Channel::wait_descriptor`].
    pub fn new(
        polling: Polling,
        doorbell: Arc<Doorbell>,
        sockets: &mut RealSockets,
        devices: Option<RawFd>,
    ) -> io::Result<Idle> {
        if let Some(event) = doorbell.event() {
            sockets.also_wake_for(event)?;
        }
        if let Some(descriptor) = devices {
            sockets.also_wake_for_raw(descriptor)?;
        }
        Ok(Idle { polling, doorbell, last_work: Nanos::ZERO, sleeps: 0 })
    }

    /// After a turn that was busy or not: comes back at once, or after a sleep. True when it slept.
    /// `device_works` says that answers of devices are awaited.
    pub fn rest(
        &mut self,
        busy: bool,
        now: Nanos,
        device_works: bool,
        next_deadline: Nanos,
        sockets: &mut RealSockets,
    ) -> bool {
        if busy {
            self.last_work = now;
            return false;
        }
        let choice = choose(self.polling, now, self.last_work, device_works, next_deadline);
        let Choice::Sleep(span) = choice else {
            match device_works {
                // The kernel's own threads do a part of that work, flushes above all, and on this core.
                true => std::thread::yield_now(),
                false => std::hint::spin_loop(),
            }
            return false;
        };
        if !self.doorbell.try_sleep() {
            return false;
        }
        sockets.wait(span);
        self.doorbell.woken();
        self.sleeps += 1;
        true
    }

    /// How often the core slept.
    pub fn sleeps(&self) -> u64 {
        self.sleeps
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
            (Choice::Turn, adaptive, 50, 0, false, u64::MAX),
            (Choice::Turn, adaptive, 99, 0, false, 1_000),
            (Choice::Sleep(Nanos(900)), adaptive, 100, 0, false, 1_000),
            (Choice::Sleep(Nanos::NEVER), adaptive, 100, 0, false, u64::MAX),
            (Choice::Turn, adaptive, 1_000, 0, false, 1_000), // The timer is due.
            (Choice::Turn, adaptive, 999_999, 0, true, u64::MAX),
            (Choice::Sleep(Nanos::NEVER), adaptive, 1_000_000, 0, true, u64::MAX),
            (Choice::Sleep(Nanos::NEVER), Polling::Adaptive { spin: Nanos::ZERO }, 1, 0, true, u64::MAX),
            (Choice::Turn, Polling::Busy, 1_000_000, 0, false, u64::MAX),
            (Choice::Sleep(Nanos(1)), Polling::Sleep, 10, 10, true, 11),
            (Choice::Turn, Polling::Sleep, 11, 0, false, 11),
        ];
        for (want, polling, now, last_work, works, next) in table {
            assert_eq!(choose(polling, Nanos(now), Nanos(last_work), works, Nanos(next)), want);
        }
    }
}
