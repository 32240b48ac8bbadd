//! Threads by name, their cores and their priorities.
//!
//! Unsafe code: `sched_setscheduler`, for which rustix has no function. Tested below.

use rustix::thread::CpuSet;
use std::io;
use std::thread::{Builder, JoinHandle};

/// The cores that the calling thread may run on, ascending.
pub fn allowed_cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return vec![0] };
    (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).collect()
}

/// The core that the calling thread runs on now.
pub fn current_core() -> usize {
    rustix::thread::sched_getcpu()
}

/// Pins the calling thread to a core.
///
/// # Errors
/// Fails with EINVAL if the process may not run on the core.
pub fn pin_to_core(core: usize) -> io::Result<()> {
    if core >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut set = CpuSet::new();
    set.set(core);
    Ok(rustix::thread::sched_setaffinity(None, &set)?)
}

/// Gives the calling thread the lowest priority (nice 19).
///
/// # Errors
/// None in practice: a thread may always lower its priority.
pub fn set_lowest_priority() -> io::Result<()> {
    Ok(rustix::process::setpriority_process(None, 19)?)
}

/// Gives the calling thread real-time priority (`SCHED_FIFO`, priority 1): it preempts every thread of an ordinary
/// priority.
///
/// # Errors
/// Fails with EPERM without CAP_SYS_NICE or RLIMIT_RTPRIO.
pub fn set_realtime_priority() -> io::Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: `priority` is a valid sched_param that lives through the call; 0 is the calling thread.
    let result = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &priority) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Starts a named thread (the first 15 bytes of the name show in `top`).
///
/// # Errors
/// Fails with EAGAIN at the limit of threads, or if memory for the stack is exhausted.
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(body)
}

/// Starts a named thread pinned to a core.
///
/// # Errors
/// Fails with `InvalidInput`, starting nothing, if the process may not run on the core; else as [`spawn`].
pub fn spawn_pinned<T: Send + 'static>(
    core: usize,
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    if !allowed_cores().contains(&core) {
        let message = format!("core {core} is not in this process's CPU affinity mask");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    spawn(name, move || {
        // The core was allowed above. If it was removed since, the thread runs on the remaining cores.
        let _ = pin_to_core(core);
        body()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pinned_thread_runs_on_its_core() {
        for core in allowed_cores() {
            let on = spawn_pinned(core, "pinned", current_core).unwrap().join().unwrap();
            assert_eq!(on, core);
        }
        assert!(spawn_pinned(100_000, "nowhere", || ()).is_err());
    }
}
