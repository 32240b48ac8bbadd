//! This process: what it costs, what it may use, and the system's randomness.

use octokv_base::Nanos;
use std::io;
use std::process::Child;

/// Memory of this process that is in RAM, in bytes; zero where the kernel does not say.
pub fn resident_bytes() -> u64 {
    // SAFETY: sysconf has no preconditions.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(1).and_then(|field| field.parse::<u64>().ok());
    pages.unwrap_or(0) * page
}

/// Memory that this machine can give without taking it from anybody, in bytes; `None` where the kernel does not say.
pub fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Whether this process runs as the superuser.
pub fn is_root() -> bool {
    // SAFETY: geteuid has no preconditions and cannot fail.
    unsafe { libc::geteuid() == 0 }
}

/// A number of the system's own randomness.
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    // SAFETY: getrandom writes at most the given length into `bytes`, which lives through the call.
    let done = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    match done {
        8 => Ok(u64::from_ne_bytes(bytes)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Has a process that this one has started stand still, or go on. One that has ended is left alone, and is an error.
pub fn set_process_suspended(child: &mut Child, suspended: bool) -> io::Result<()> {
    if child.try_wait()?.is_some() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let signal = if suspended { libc::SIGSTOP } else { libc::SIGCONT };
    // SAFETY: a system call with plain arguments; a child that nobody has waited for keeps its number.
    let done = unsafe { libc::kill(child.id() as libc::pid_t, signal) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Lets this process open as many files and sockets as the system allows it at most. Where that is refused,
/// it stays as it was.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit that lives through the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0 {
        limit.rlim_cur = limit.rlim_max;
        // SAFETY: the call only reads `limit`.
        let _ = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) };
    }
}

/// Processor time that the calling thread has used.
pub fn thread_cpu_time() -> Nanos {
    cpu_time(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Processor time that this process has used, all threads together.
pub fn process_cpu_time() -> Nanos {
    cpu_time(libc::CLOCK_PROCESS_CPUTIME_ID)
}

fn cpu_time(clock: libc::clockid_t) -> Nanos {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid timespec that lives through the call; both clocks exist on Linux.
    unsafe { libc::clock_gettime(clock, &mut time) };
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_random_numbers_differ() {
        assert_ne!(random_u64().unwrap(), random_u64().unwrap());
    }

    #[test]
    fn a_child_is_suspended_and_resumed() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stat = format!("/proc/{}/stat", child.id());
        let comes_to = |wanted: fn(char) -> bool| {
            (0..1_000_000).any(|_| {
                let text = std::fs::read_to_string(&stat).unwrap();
                wanted(text.rsplit(") ").next().unwrap().chars().next().unwrap())
            })
        };
        set_process_suspended(&mut child, true).unwrap();
        assert!(comes_to(|state| state == 'T'));
        set_process_suspended(&mut child, false).unwrap();
        assert!(comes_to(|state| state != 'T'));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(set_process_suspended(&mut child, true).is_err(), "it is there no more");
    }

    #[test]
    fn a_process_has_memory_and_uses_time() {
        assert!(resident_bytes() > 100_000);
        assert!(available_memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
        let before = thread_cpu_time();
        while thread_cpu_time() == before {}
        assert!(process_cpu_time() >= before);
    }
}
