//! The real driver put together: which device queue, and reactors on pinned threads.

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

/// How a core reaches its devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceDriver {
    /// io_uring where the kernel allows it, else threads.
    #[default]
    Auto,
    /// io_uring or an error.
    Uring,
    /// Worker threads.
    Threads,
}

/// Worker threads per core, where threads are the driver. Enough to keep a fast disk at work; each is
/// asleep when it has none.
pub const DEVICE_THREADS_PER_CORE: usize = 4;

/// The device queue of the calling thread's core, for `depth` operations at a time, and which driver it
/// is. To be used by the calling thread alone.
pub fn open_device_queue(
    driver: DeviceDriver,
    depth: usize,
    core_waker: &Arc<CoreWaker>,
) -> io::Result<(Box<dyn DeviceQueue>, DeviceDriver)> {
    if driver != DeviceDriver::Threads {
        match UringQueue::new(depth, Arc::clone(core_waker)) {
            Ok(queue) => return Ok((Box::new(queue), DeviceDriver::Uring)),
            Err(error) if driver == DeviceDriver::Uring => return Err(error),
            // Forbidden, missing, or no memory to lock: threads need none of it.
            Err(_) => {}
        }
    }
    let queue = ThreadQueue::new(DEVICE_THREADS_PER_CORE, Arc::clone(core_waker))?;
    Ok((Box::new(queue), DeviceDriver::Threads))
}

/// Runs `body(index)` on a thread of its own for each core of `cores`, pinned to it. What belongs to a
/// reactor is made inside: it never leaves its thread. On an error the threads already started run on;
/// the caller tells them to end.
pub fn spawn_reactors<T: Send + 'static>(
    cores: &[usize],
    body: impl Fn(usize) -> T + Send + Clone + 'static,
) -> io::Result<Vec<JoinHandle<T>>> {
    let start = |(index, &core): (usize, &usize)| {
        let body = body.clone();
        thread::spawn_pinned(core, &format!("octokv-{core}"), move || body(index))
    };
    cores.iter().enumerate().map(start).collect()
}
