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

const AWAKE: u8 = 0;
const NOTIFIED: u8 = 1;
const SLEEPING: u8 = 2;

/// The doorbell of one reactor, shared with everyone who may wake it.
#[derive(Debug)]
pub struct CoreWaker {
    state: AtomicU8,
    /// None in the virtual world, where nobody sleeps.
    event: Option<EventFd>,
}

impl CoreWaker {
    /// A doorbell that wakes a sleeping thread.
    pub fn new() -> io::Result<Arc<CoreWaker>> {
        Ok(Arc::new(CoreWaker { state: AtomicU8::new(AWAKE), event: Some(EventFd::new()?) }))
    }

    /// A doorbell for a reactor that never sleeps: virtual worlds, tests.
    pub fn without_eventfd() -> Arc<CoreWaker> {
        Arc::new(CoreWaker { state: AtomicU8::new(AWAKE), event: None })
    }

    /// Tells the core that something was published for it. Any thread.
    pub fn notify(&self) {
        // Pairs with the fence in `begin_turn` and the exchange in `try_sleep`: what was published
        // before is seen by whoever makes the state leave RUNG after.
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) == NOTIFIED {
            return;
        }
        if self.state.swap(NOTIFIED, Ordering::SeqCst) == SLEEPING
            && let Some(event) = &self.event
        {
            event.signal();
        }
    }

    /// The core looks at everything published from here on. True when someone rang.
    pub fn begin_iteration(&self) -> bool {
        if self.state.load(Ordering::Relaxed) != NOTIFIED {
            return false;
        }
        self.state.store(AWAKE, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        true
    }

    /// Steps towards sleep. False when someone rang since `begin_turn`: then there is work.
    pub fn try_sleep(&self) -> bool {
        let exchanged = self.state.compare_exchange(AWAKE, SLEEPING, Ordering::SeqCst, Ordering::SeqCst);
        exchanged.is_ok()
    }

    /// The core is awake again, for whatever reason.
    pub fn on_wake(&self) {
        // Fails when someone rang, and that stays for `begin_turn`.
        let _ = self.state.compare_exchange(SLEEPING, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
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
    fn a_notified_core_does_not_sleep_before_its_next_iteration() {
        let core_waker = CoreWaker::new().unwrap();
        core_waker.notify();
        assert!(!core_waker.try_sleep());
        assert!(core_waker.begin_iteration());
        assert!(!core_waker.begin_iteration());
        assert!(core_waker.try_sleep());
        core_waker.on_wake();
    }

    #[test]
    fn only_a_sleeping_core_is_signalled() {
        let core_waker = CoreWaker::new().unwrap();
        core_waker.notify();
        assert!(!core_waker.event().unwrap().drain());
        core_waker.begin_iteration();
        assert!(core_waker.try_sleep());
        core_waker.notify();
        core_waker.notify();
        assert!(core_waker.event().unwrap().drain());
        core_waker.on_wake();
        assert!(core_waker.begin_iteration());
    }

    #[test]
    fn a_signal_that_comes_late_does_not_keep_the_core_awake_for_ever() {
        let core_waker = CoreWaker::new().unwrap();
        // The ringer has changed the state but not yet signalled when the core wakes by itself.
        assert!(core_waker.try_sleep());
        core_waker.state.store(NOTIFIED, Ordering::SeqCst);
        core_waker.on_wake();
        core_waker.event().unwrap().signal();
        assert!(core_waker.begin_iteration());
        assert!(core_waker.try_sleep());
        core_waker.on_wake();
        assert!(!core_waker.event().unwrap().drain());
    }
}
