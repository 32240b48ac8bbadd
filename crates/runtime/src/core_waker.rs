//! Waking a core that may be asleep, without a lost wake-up and without a system call when it is not.
//!
//! ```text
//!            ring                    ring: signals the eventfd
//!   QUIET ─────────▶ RUNG ◀────────────────────── SLEEPING
//!     ▲ ◀──────────────┘ begin_turn                  │ ▲
//!     │                                              │ │
//!     └──────────────── woken ───────────────────────┘ │
//!     └───────────────────── try_sleep ────────────────┘
//! ```
//! A sender publishes first and rings after; a sleeper goes to `SLEEPING` only from `QUIET`. Whoever
//! publishes before the sleeper's step makes it fail; whoever publishes after it sees `SLEEPING` and
//! signals. `begin_turn` clears `RUNG` before the turn looks at what was published.

use octokv_sys::eventfd::EventFd;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering, fence};

const QUIET: u8 = 0;
const RUNG: u8 = 1;
const SLEEPING: u8 = 2;

/// The doorbell of one reactor, shared with everyone who may wake it.
#[derive(Debug)]
pub struct Doorbell {
    state: AtomicU8,
    /// None in the virtual world, where nobody sleeps.
    event: Option<EventFd>,
}

impl Doorbell {
    /// A doorbell that wakes a sleeping thread.
    pub fn new() -> io::Result<Arc<Doorbell>> {
        Ok(Arc::new(Doorbell { state: AtomicU8::new(QUIET), event: Some(EventFd::new()?) }))
    }

    /// A doorbell for a reactor that never sleeps: virtual worlds, tests.
    pub fn silent() -> Arc<Doorbell> {
        Arc::new(Doorbell { state: AtomicU8::new(QUIET), event: None })
    }

    /// Tells the core that something was published for it. Any thread.
    pub fn ring(&self) {
        // Pairs with the fence in `begin_turn` and the exchange in `try_sleep`: what was published
        // before is seen by whoever makes the state leave RUNG after.
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) == RUNG {
            return;
        }
        if self.state.swap(RUNG, Ordering::SeqCst) == SLEEPING
            && let Some(event) = &self.event
        {
            event.signal();
        }
    }

    /// The core looks at everything published from here on. True when someone rang.
    pub fn begin_turn(&self) -> bool {
        if self.state.load(Ordering::Relaxed) != RUNG {
            return false;
        }
        self.state.store(QUIET, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        true
    }

    /// Steps towards sleep. False when someone rang since `begin_turn`: then there is work.
    pub fn try_sleep(&self) -> bool {
        let step = self.state.compare_exchange(QUIET, SLEEPING, Ordering::SeqCst, Ordering::SeqCst);
        step.is_ok()
    }

    /// The core is awake again, for whatever reason.
    pub fn woken(&self) {
        // Fails when someone rang, and that stays for `begin_turn`.
        let _ = self.state.compare_exchange(SLEEPING, QUIET, Ordering::SeqCst, Ordering::SeqCst);
        // Always: a signal may come a moment after the state that it belongs to, and one left behind
        // would keep the core from ever sleeping again.
        if let Some(event) = &self.event {
            event.drain();
        }
    }

    /// What to wait on while asleep; none for a silent doorbell.
    pub fn event(&self) -> Option<&EventFd> {
        self.event.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rung_core_does_not_sleep_until_it_has_taken_a_turn() {
        let doorbell = Doorbell::new().unwrap();
        doorbell.ring();
        assert!(!doorbell.try_sleep());
        assert!(doorbell.begin_turn());
        assert!(!doorbell.begin_turn());
        assert!(doorbell.try_sleep());
        doorbell.woken();
    }

    #[test]
    fn only_a_sleeping_core_costs_a_signal() {
        let doorbell = Doorbell::new().unwrap();
        doorbell.ring();
        assert!(!doorbell.event().unwrap().drain());
        doorbell.begin_turn();
        assert!(doorbell.try_sleep());
        doorbell.ring();
        doorbell.ring();
        assert!(doorbell.event().unwrap().drain());
        doorbell.woken();
        assert!(doorbell.begin_turn());
    }

    #[test]
    fn a_signal_that_comes_late_does_not_keep_the_core_awake_for_ever() {
        let doorbell = Doorbell::new().unwrap();
        // The ringer has changed the state but not yet signalled when the core wakes by itself.
        assert!(doorbell.try_sleep());
        doorbell.state.store(RUNG, Ordering::SeqCst);
        doorbell.woken();
        doorbell.event().unwrap().signal();
        assert!(doorbell.begin_turn());
        assert!(doorbell.try_sleep());
        doorbell.woken();
        assert!(!doorbell.event().unwrap().drain());
    }
}
