//! The synchronization types of the lock-free modules: std's, or loom's with the feature `loom`.
//!
//! A module whose interleavings are model checked takes its atomics and its blocking event from here and nowhere
//! else. `std::sync::Arc` stays: loom checks the atomics inside it. Under loom, [`EventFd`] has the semantics of an
//! eventfd (signals add up to one until drained) without a descriptor. Tested by `make loom`.

#[cfg(feature = "loom")]
pub(crate) use loom::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};
#[cfg(feature = "loom")]
pub use modelled::EventFd;

#[cfg(not(feature = "loom"))]
pub use octokv_sys::eventfd::EventFd;
#[cfg(not(feature = "loom"))]
pub(crate) use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

#[cfg(feature = "loom")]
mod modelled {
    use loom::sync::{Condvar, Mutex};
    use std::io;
    use std::os::fd::{AsFd, BorrowedFd};

    /// The model of an eventfd: a flag that [`EventFd::wait`] blocks on.
    #[derive(Debug)]
    pub struct EventFd {
        is_signalled: Mutex<bool>,
        signalled: Condvar,
    }

    impl EventFd {
        /// A new event, not signalled.
        ///
        /// # Errors
        /// None: the signature is that of the modelled type.
        pub fn new() -> io::Result<EventFd> {
            Ok(EventFd { is_signalled: Mutex::new(false), signalled: Condvar::new() })
        }

        /// Signals the event.
        pub fn signal(&self) {
            *self.is_signalled.lock().expect("no thread panics with the lock held") = true;
            self.signalled.notify_all();
        }

        /// Clears the signal. True if there was one.
        pub fn drain(&self) -> bool {
            std::mem::take(&mut *self.is_signalled.lock().expect("no thread panics with the lock held"))
        }

        /// Blocks until the event is signalled; leaves the signal set. A wait that nothing ends is a deadlock, which
        /// loom reports.
        pub fn wait(&self) {
            let mut is_signalled = self.is_signalled.lock().expect("no thread panics with the lock held");
            while !*is_signalled {
                is_signalled =
                    self.signalled.wait(is_signalled).expect("no thread panics with the lock held");
            }
        }
    }

    impl AsFd for EventFd {
        fn as_fd(&self) -> BorrowedFd<'_> {
            unreachable!("a modelled event has no descriptor")
        }
    }
}
