//! Shutdown signals: SIGTERM, SIGINT and SIGHUP set a flag and end a wait, instead of ending the process.
//!
//! Each signal stores the flag first and then writes a byte to a pipe, so a thread that returns from
//! [`ShutdownSignal::wait`] sees the flag. The handlers are `signal-hook`'s. Tested below.

use crate::eventfd::wait_readable;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{self, PipeReader, PipeWriter, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

static SHUTDOWN_SIGNAL: OnceLock<ShutdownSignal> = OnceLock::new();

/// The process's request to shut down.
#[derive(Debug)]
pub struct ShutdownSignal {
    requested: Arc<AtomicBool>,
    /// Readable once shutdown is requested; never read.
    pipe_reader: PipeReader,
    pipe_writer: PipeWriter,
}

impl ShutdownSignal {
    fn new() -> io::Result<ShutdownSignal> {
        let (pipe_reader, pipe_writer) = io::pipe()?;
        let requested = Arc::new(AtomicBool::new(false));
        Ok(ShutdownSignal { requested, pipe_reader, pipe_writer })
    }

    fn install_handlers(&self) -> io::Result<()> {
        for signal in [SIGTERM, SIGINT, SIGHUP] {
            // Handlers of one signal run in the order of registration.
            signal_hook::flag::register(signal, Arc::clone(&self.requested))?;
            signal_hook::low_level::pipe::register(signal, self.pipe_writer.try_clone()?)?;
        }
        Ok(())
    }

    /// Whether shutdown is requested.
    pub fn is_requested(&self) -> bool {
        self.requested.load(Ordering::Acquire)
    }

    /// Blocks until shutdown is requested.
    pub fn wait(&self) {
        wait_readable(&self.pipe_reader);
    }

    /// Requests shutdown from within the process.
    pub fn request(&self) {
        self.requested.store(true, Ordering::Release);
        // Fails only if the pipe is full, and then it is readable already.
        let _ = (&self.pipe_writer).write(&[0]);
    }
}

/// Installs the handlers of SIGTERM, SIGINT and SIGHUP, once per process; later calls return the same signal.
///
/// # Errors
/// Fails if the process is out of descriptors.
pub fn install_handlers() -> io::Result<&'static ShutdownSignal> {
    static INSTALLING: Mutex<()> = Mutex::new(());
    let _installing = INSTALLING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(installed) = SHUTDOWN_SIGNAL.get() {
        return Ok(installed);
    }
    let shutdown = ShutdownSignal::new()?;
    shutdown.install_handlers()?;
    Ok(SHUTDOWN_SIGNAL.get_or_init(|| shutdown))
}

/// The shutdown signal; `None` before [`install_handlers`].
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
        signal_hook::low_level::raise(SIGTERM).unwrap();
        shutdown.wait();
        assert!(shutdown.is_requested());
    }
}
