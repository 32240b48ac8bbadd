//! A descriptor that any thread signals and one thread waits for (eventfd).
//!
//! Signals add up to one: after any number of them the descriptor is readable until [`EventFd::drain`].

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// An eventfd, non-blocking and closed on exec.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, not signalled.
    pub fn new() -> io::Result<EventFd> {
        // SAFETY: a system call with plain arguments; the kernel checks them.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `fd` was just made, is open, and nobody else owns it.
        Ok(EventFd(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    /// Makes the descriptor readable. Safe in a signal handler.
    pub fn signal(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: `one` lives through the call and has the 8 bytes that are said. The call fails only
        // when the counter is full, and then the descriptor is readable already.
        let _ = unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    /// Takes all signals so far. True when there was one.
    pub fn drain(&self) -> bool {
        let mut count = [0u8; 8];
        // SAFETY: `count` lives through the call and has the 8 bytes that are said.
        let got = unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
        got == 8
    }

    /// Blocks until signalled; leaves the signal in place.
    pub fn wait(&self) {
        let mut poll = libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        loop {
            // SAFETY: `poll` is one valid pollfd that lives through the call.
            let got = unsafe { libc::poll(&mut poll, 1, -1) };
            if got > 0 {
                return;
            }
        }
    }
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
