//! This process: memory, processor time, limits, children, and the system's randomness.
//!
//! Unsafe code: `malloc_trim`. Tested below.

use octokv_base::Nanos;
use rustix::process::{Pid, Resource, Rlimit, Signal};
use rustix::time::ClockId;
use std::io;
use std::process::Child;

/// The resident set size of this process, in bytes; 0 if the kernel does not report it.
pub fn resident_bytes() -> u64 {
    let page = rustix::param::page_size() as u64;
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm.split_ascii_whitespace().nth(1).and_then(|field| field.parse::<u64>().ok());
    pages.unwrap_or(0) * page
}

/// The largest resident set size that this process has had (`VmHWM`), in bytes; `None` if the kernel does not report it.
pub fn peak_resident_bytes() -> Option<u64> {
    kibibytes_of(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// The memory available without swapping (`MemAvailable`), in bytes; `None` if the kernel does not report it.
pub fn available_memory_bytes() -> Option<u64> {
    kibibytes_of(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// The field of a text of lines such as `VmHWM:  20 kB`, in bytes.
fn kibibytes_of(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The bytes that this process has sent to block devices since its start (`write_bytes` of `/proc/self/io`): writes with direct I/O, and pages of files that it made
/// dirty, which may not be written yet. `None` if the kernel does not report it.
pub fn device_bytes_written() -> Option<u64> {
    write_bytes_of(&std::fs::read_to_string("/proc/self/io").ok()?)
}

fn write_bytes_of(text: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix("write_bytes:"))?.trim().parse().ok()
}

/// Returns free heap memory to the kernel, as far as whole pages of it are free. Takes milliseconds.
pub fn trim_heap() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim may be called at any time, on any thread.
    let _ = unsafe { libc::malloc_trim(0) };
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// A random number from the kernel (`getrandom`).
///
/// # Errors
/// Fails if the call is interrupted before the kernel's generator is seeded, at boot.
pub fn random_u64() -> io::Result<u64> {
    let mut bytes = [0_u8; 8];
    // The kernel returns up to 256 bytes whole.
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())? {
        8 => Ok(u64::from_ne_bytes(bytes)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// Suspends (SIGSTOP) or resumes (SIGCONT) a child process.
///
/// # Errors
/// Fails with `NotFound` if the child has ended.
pub fn set_process_suspended(child: &mut Child, suspended: bool) -> io::Result<()> {
    if child.try_wait()?.is_some() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let signal = if suspended { Signal::STOP } else { Signal::CONT };
    // The child was not reaped, so its process ID is not reused.
    Ok(rustix::process::kill_process(Pid::from_child(child), signal)?)
}

/// Raises this process's limit of open descriptors to its hard limit. On failure the limit is unchanged.
pub fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    let _ = rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// The processor time of the calling thread.
pub fn thread_cpu_time() -> Nanos {
    cpu_time(ClockId::ThreadCPUTime)
}

/// The processor time of this process, all threads together.
pub fn process_cpu_time() -> Nanos {
    cpu_time(ClockId::ProcessCPUTime)
}

fn cpu_time(clock: ClockId) -> Nanos {
    let time = rustix::time::clock_gettime(clock);
    Nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_of_the_resident_set_is_at_least_its_size() {
        // The size first: tests beside this one make it larger. Linux adds up the pages that each core has counted only now and then.
        let (size, uncounted) = (resident_bytes(), 1 << 20);
        let peak = peak_resident_bytes().expect("Linux reports it");
        assert!(peak + uncounted >= size, "{peak} and {size} bytes");
        assert_eq!(kibibytes_of("VmPeak:\t 9 kB\nVmHWM:\t  20 kB\n", "VmHWM:"), Some(20 << 10));
        assert_eq!(kibibytes_of("VmHWM: 20\n", "VmHWM:"), None);
    }

    #[test]
    fn system_random_numbers_differ() {
        assert_ne!(random_u64().unwrap(), random_u64().unwrap());
    }

    #[test]
    fn a_child_is_suspended_and_resumed() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let stat = format!("/proc/{}/stat", child.id());
        let reaches_state = |is_wanted: fn(char) -> bool| {
            (0..1_000_000).any(|_| {
                let text = std::fs::read_to_string(&stat).unwrap();
                is_wanted(text.rsplit(") ").next().unwrap().chars().next().unwrap())
            })
        };
        set_process_suspended(&mut child, true).unwrap();
        assert!(reaches_state(|state| state == 'T'));
        set_process_suspended(&mut child, false).unwrap();
        assert!(reaches_state(|state| state != 'T'));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(set_process_suspended(&mut child, true).is_err(), "the process has ended");
    }

    #[test]
    fn the_bytes_written_are_those_that_reach_a_device() {
        let text = "rchar: 1\nwchar: 2\nread_bytes: 3\nwrite_bytes: 4\ncancelled_write_bytes: 5\n";
        assert_eq!((write_bytes_of(text), write_bytes_of("wchar: 2\n")), (Some(4), None));
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
