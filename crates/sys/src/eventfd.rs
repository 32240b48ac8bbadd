//! An event that any thread signals and one thread waits for (eventfd).
//!
//! Signals add up to one: after any number of them the descriptor is readable until [`EventFd::drain`]. Tested below.

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// An eventfd, non-blocking and closed on exec.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new event, not signalled.
    ///
    /// # Errors
    /// Fails if the process is out of descriptors.
    pub fn new() -> io::Result<EventFd> {
        Ok(EventFd(rustix::event::eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?))
    }

    /// Makes the descriptor readable.
    pub fn signal(&self) {
        // Fails only if the counter is full, and then the descriptor is readable already.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Clears all signals so far. True if there was one.
    pub fn drain(&self) -> bool {
        let mut count = [0u8; 8];
        rustix::io::read(&self.0, &mut count) == Ok(count.len())
    }

    /// Blocks until the event is signalled; leaves the signal set.
    pub fn wait(&self) {
        wait_readable(&self.0);
    }
}

/// Blocks until a descriptor is readable or has ended.
pub(crate) fn wait_readable(descriptor: impl AsFd) {
    let mut events = [PollFd::new(&descriptor, PollFlags::IN)];
    // Fails only if interrupted by a signal.
    while !matches!(rustix::event::poll(&mut events, None), Ok(1..)) {}
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_add_up_to_one_until_drained() {
        let event = EventFd::new().unwrap();
        assert!(!event.drain());
        event.signal();
        event.signal();
        event.wait();
        assert!(event.drain());
        assert!(!event.drain());
    }
}
