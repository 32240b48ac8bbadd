//! Wakes a core that may be asleep: no lost wake-up, and no system call if the core is awake.
//!
//! ```text
//!            notify                  notify: signals the eventfd, or lists the core
//!    AWAKE ────────▶ NOTIFIED ◀───────────────────── SLEEPING
//!     ▲ ◀──────────────┘ begin_iteration             │ ▲
//!     │                                              │ │
//!     └──────────────── on_wake ─────────────────────┘ │
//!     └───────────────── try_sleep ────────────────────┘
//! ```
//! A sender publishes (a message, a wake-up bit) and then calls `notify`. The core enters `SLEEPING` only from
//! `AWAKE`: a `notify` before that step makes the step fail, and a `notify` after it reads `SLEEPING` and signals.
//! `begin_iteration` clears `NOTIFIED` before the iteration reads published state.
//!
//! Model checked in `tests/loom.rs`; with a real eventfd in `tests/reactor.rs`.

use crate::sync::{AtomicU8, EventFd, Ordering, fence};
use crate::wake_list::WakeListEntry;
use std::io;
use std::sync::{Arc, OnceLock};

const AWAKE: u8 = 0;
const NOTIFIED: u8 = 1;
const SLEEPING: u8 = 2;

/// The waker of one core, shared with every thread that may wake it.
#[derive(Debug)]
pub struct CoreWaker {
    state: AtomicU8,
    /// `None` for a core that never blocks: in the simulation and in tests.
    event: Option<EventFd>,
    /// Set for a core whose sleep is simulated.
    wake_list_entry: OnceLock<WakeListEntry>,
}

impl CoreWaker {
    /// A waker for a core that blocks on an eventfd while asleep.
    ///
    /// # Errors
    /// Fails if the process is out of file descriptors.
    pub fn new() -> io::Result<Arc<CoreWaker>> {
        Ok(CoreWaker::with_event(Some(EventFd::new()?)))
    }

    /// A waker for a core that never blocks: in the simulation and in tests.
    pub fn without_eventfd() -> Arc<CoreWaker> {
        CoreWaker::with_event(None)
    }

    fn with_event(event: Option<EventFd>) -> Arc<CoreWaker> {
        Arc::new(CoreWaker { state: AtomicU8::new(AWAKE), event, wake_list_entry: OnceLock::new() })
    }

    /// From now on lists the core by `entry` when a `notify` ends its sleep.
    ///
    /// # Panics
    /// If the core is listed already.
    pub(crate) fn list_wakeups(&self, entry: WakeListEntry) {
        assert!(self.wake_list_entry.set(entry).is_ok(), "a CoreWaker wakes one core");
    }

    /// Notifies the core that something was published for it. Callable from any thread.
    ///
    /// REQUIRES: the publishing store is before this call in program order.
    pub fn notify(&self) {
        // Pairs with the fence in `begin_iteration`: either this load reads a state later than the core's AWAKE, or
        // the core's reads after `begin_iteration` see the published state.
        fence(Ordering::SeqCst);
        if self.state.load(Ordering::Relaxed) == NOTIFIED {
            return;
        }
        if self.state.swap(NOTIFIED, Ordering::SeqCst) == SLEEPING {
            self.signal();
        }
    }

    /// Ends the sleep of the core.
    #[cold]
    fn signal(&self) {
        if let Some(event) = &self.event {
            event.signal();
        }
        if let Some(entry) = self.wake_list_entry.get() {
            entry.list();
        }
    }

    /// Begins a reactor iteration: everything published before a `notify` that this call clears is visible to the
    /// reads after it. True if there was a `notify` since the last iteration.
    ///
    /// REQUIRES: called on the core itself, before it reads mailboxes, wake-up bits and completions.
    pub fn begin_iteration(&self) -> bool {
        if self.state.load(Ordering::Relaxed) != NOTIFIED {
            return false;
        }
        self.state.store(AWAKE, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        true
    }

    /// Marks the core as asleep. False if there was a `notify` since `begin_iteration`: then there is work.
    ///
    /// REQUIRES: after success the core waits on [`CoreWaker::event`] and then calls [`CoreWaker::on_wake`].
    pub fn try_sleep(&self) -> bool {
        let exchanged = self.state.compare_exchange(AWAKE, SLEEPING, Ordering::SeqCst, Ordering::SeqCst);
        exchanged.is_ok()
    }

    /// Marks the core as awake, whatever ended its wait.
    pub fn on_wake(&self) {
        // Fails if the core was notified; `begin_iteration` clears that state.
        let _ = self.state.compare_exchange(SLEEPING, AWAKE, Ordering::SeqCst, Ordering::SeqCst);
        // Always drained: a sender signals after it changes the state, so a signal may arrive late, and a signal
        // that stays would end every later wait at once.
        if let Some(event) = &self.event {
            event.drain();
        }
    }

    /// The event that the core waits on while asleep; `None` for a core that never blocks.
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
    fn a_late_signal_does_not_keep_the_core_awake() {
        let core_waker = CoreWaker::new().unwrap();
        // The notifier has changed the state but not yet signalled when the core wakes for another reason.
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
