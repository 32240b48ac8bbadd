//! Selects a core's device queue and starts reactors on pinned threads.

use crate::core_waker::CoreWaker;
use crate::device_queue::DeviceQueue;
use crate::thread_queue::ThreadQueue;
use crate::uring_queue::UringQueue;
use octokv_sys::thread;
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

pub use octokv_sys::clock::now;
pub use octokv_sys::thread::spawn as spawn_thread;

/// The driver of a core's device queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceDriver {
    /// io_uring if the kernel allows it, else threads.
    #[default]
    Auto,
    /// io_uring; opening the queue fails without it.
    Uring,
    /// Worker threads with blocking system calls.
    Threads,
}

/// Worker threads per core of the driver [`DeviceDriver::Threads`]: enough to keep a fast device busy. An idle
/// worker sleeps.
pub const DEVICE_THREADS_PER_CORE: usize = 4;

/// Opens the device queue of the calling thread's core, sized for `depth` operations in flight, and returns the
/// driver that was selected.
///
/// REQUIRES: only the calling thread uses the queue.
///
/// # Errors
/// [`DeviceDriver::Uring`] fails as [`UringQueue::new`]; the others fail if no worker thread can be started.
pub fn open_device_queue(
    driver: DeviceDriver,
    depth: usize,
    core_waker: &Arc<CoreWaker>,
) -> io::Result<(Box<dyn DeviceQueue>, DeviceDriver)> {
    if driver != DeviceDriver::Threads {
        match UringQueue::new(depth, Arc::clone(core_waker)) {
            Ok(queue) => return Ok((Box::new(queue), DeviceDriver::Uring)),
            Err(error) if driver == DeviceDriver::Uring => return Err(error),
            // Forbidden, missing, or over the limit of locked memory: threads need none of it.
            Err(_) => {}
        }
    }
    let queue = ThreadQueue::new(DEVICE_THREADS_PER_CORE, Arc::clone(core_waker))?;
    Ok((Box::new(queue), DeviceDriver::Threads))
}

/// Starts the thread of one reactor, pinned to processor `core`. `main` creates the reactor's state: it is `!Send` and
/// stays on the thread.
///
/// # Errors
/// Fails if the core is not allowed or the thread cannot be started.
pub fn spawn_reactor<T: Send + 'static>(
    core: usize,
    main: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    thread::spawn_pinned(core, &format!("octokv-{core}"), main)
}
