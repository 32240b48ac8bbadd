//! SIGTERM and SIGINT as a flag and a descriptor: the request to end.

use crate::eventfd::EventFd;
use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

static SHUTDOWN_SIGNAL: OnceLock<ShutdownSignal> = OnceLock::new();

/// Whether this process was asked to end.
#[derive(Debug)]
pub struct ShutdownSignal {
    requested: AtomicBool,
    event: EventFd,
}

impl ShutdownSignal {
    /// Whether the request has come.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    /// Blocks until the request comes.
    pub fn wait(&self) {
        self.event.wait();
    }

    /// Makes the request from within the process.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Release);
        self.event.signal();
    }

    /// Readable once the request has come, and from then on.
    pub fn event(&self) -> &EventFd {
        &self.event
    }
}

extern "C" fn on_signal(_signal: libc::c_int) {
    // Only what is allowed in a handler: an atomic load, a store, and one write(2).
    if let Some(shutdown) = SHUTDOWN_SIGNAL.get() {
        shutdown.request();
    }
}

/// Has SIGTERM, SIGINT and SIGHUP request the end instead of causing it. Once per process; later calls give
/// the same flag.
pub fn install_handlers() -> io::Result<&'static ShutdownSignal> {
    if SHUTDOWN_SIGNAL.get().is_none() {
        let shutdown = ShutdownSignal { requested: AtomicBool::new(false), event: EventFd::new()? };
        // Lost only to a concurrent call that has just put in the same thing.
        let _ = SHUTDOWN_SIGNAL.set(shutdown);
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        // SAFETY: all-zero is a valid sigaction: no flags, an empty mask.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        action.sa_sigaction = on_signal as *const () as libc::sighandler_t;
        action.sa_flags = libc::SA_RESTART;
        // SAFETY: `action` is valid and its handler does only what a signal handler may.
        let done = unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    SHUTDOWN_SIGNAL.get().ok_or_else(|| io::ErrorKind::Other.into())
}

/// The flag, where [`install`] was called.
pub fn shutdown_signal() -> Option<&'static ShutdownSignal> {
    SHUTDOWN_SIGNAL.get()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigterm_requests_shutdown() {
        let shutdown = install_handlers().unwrap();
        assert!(!shutdown.is_requested());
        // SAFETY: raises a signal that is handled.
        unsafe { libc::raise(libc::SIGTERM) };
        shutdown.wait();
        assert!(shutdown.is_requested());
    }
}
