//! Threads by name, and by core where it matters.

use std::io;
use std::thread::{Builder, JoinHandle};

/// The cores that this process may run on, ascending.
pub fn allowed_cores() -> Vec<usize> {
    // SAFETY: all-zero is a valid, empty cpu_set_t.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a live cpu_set_t of the size that is said; 0 is the calling thread.
    let got = unsafe { libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &mut set) };
    if got != 0 {
        return vec![0];
    }
    let in_set = |&core: &usize| {
        // SAFETY: `core` is below CPU_SETSIZE, the number of bits in `set`.
        unsafe { libc::CPU_ISSET(core, &set) }
    };
    (0..libc::CPU_SETSIZE as usize).filter(in_set).collect()
}

/// The core that the calling thread runs on now.
pub fn current_core() -> usize {
    // SAFETY: no preconditions.
    unsafe { libc::sched_getcpu() }.max(0) as usize
}

/// Binds the calling thread to a core. Fails when the process may not run there.
pub fn pin_to_core(core: usize) -> io::Result<()> {
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    // SAFETY: all-zero is a valid, empty cpu_set_t.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `core` is below CPU_SETSIZE, checked above.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: `set` is a live cpu_set_t of the size that is said; 0 is the calling thread.
    let done = unsafe { libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets every other thread of the machine go before the calling one: the lowest priority (nice 19).
pub fn set_lowest_priority() -> io::Result<()> {
    // SAFETY: a system call with plain arguments; 0 is the calling thread.
    let done = unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, 19) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets the calling thread go before every thread of an ordinary priority, as soon as it has something to do
/// (`SCHED_FIFO`, priority 1). Needs the right to (CAP_SYS_NICE, or RLIMIT_RTPRIO).
pub fn set_realtime_priority() -> io::Result<()> {
    let priority = libc::sched_param { sched_priority: 1 };
    // SAFETY: `priority` is live and of the type that is asked for; 0 is the calling thread.
    let done = unsafe { libc::sched_setscheduler(0, libc::SCHED_FIFO, &priority) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Starts a thread with a name (the first 15 bytes show in `top`).
pub fn spawn<T: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    Builder::new().name(name.into()).spawn(body)
}

/// Starts a thread with a name, bound to a core. Fails, starting nothing, when the process may not run
/// there.
pub fn spawn_pinned<T: Send + 'static>(
    core: usize,
    name: &str,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    if !allowed_cores().contains(&core) {
        let what = format!("core {core} is not one that this process may run on");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    spawn(name, move || {
        // The core was allowed a moment ago; where it no longer is, running elsewhere is right.
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
