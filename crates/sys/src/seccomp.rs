//! Denies io_uring to a thread and its descendants by seccomp, as containers do, to test the fallback.
//!
//! The filter makes `io_uring_setup`, `io_uring_enter` and `io_uring_register` fail with an error number and allows
//! every other system call. It survives `exec` and cannot be removed.
//! `cargo run -p octokv-sys --example without_io_uring -- COMMAND` runs a command under it.
//!
//! Unsafe code: `prctl(PR_SET_SECCOMP)`, for which rustix has no function. Tested below.

use std::io;

/// `io_uring_setup`, the first of three consecutive numbers. From 424 on, system calls have the same number on every
/// architecture (x86-64 and aarch64 among them), so the filter does not check the architecture.
const IO_URING_SETUP: u32 = 425;
const IO_URING_REGISTER: u32 = 427;
/// Set in the system call numbers of the x32 ABI of x86-64.
const X32_SYSCALL_BIT: u32 = 0x4000_0000;

/// The error number that io_uring fails with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeccompErrno {
    /// EPERM: as in containers and under `kernel.io_uring_disabled`.
    Eperm,
    /// ENOSYS: as on a kernel without io_uring.
    Enosys,
}

impl SeccompErrno {
    /// The error number.
    pub fn raw(self) -> i32 {
        match self {
            SeccompErrno::Eperm => libc::EPERM,
            SeccompErrno::Enosys => libc::ENOSYS,
        }
    }
}

/// Denies io_uring to the calling thread and to every thread and process that it starts. Other threads of this process
/// are not affected. Sets no_new_privs: none of them can gain privileges by `exec` (sudo).
///
/// # Errors
/// Fails with EINVAL if the kernel lacks seccomp filters, or with EPERM or ENOSYS if a filter forbids `prctl`.
pub fn deny_io_uring(errno: SeccompErrno) -> io::Result<()> {
    let statement = |code, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let action = libc::SECCOMP_RET_ERRNO | errno.raw() as u32;
    // The system call number is the first word of the filter's input.
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, !X32_SYSCALL_BIT),
        statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 2, IO_URING_SETUP),
        statement(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, IO_URING_REGISTER),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, action),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    rustix::thread::set_no_new_privs(true)?;
    let none: libc::c_ulong = 0;
    let mode = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
    // SAFETY: `program` and its statements live through the call, which copies them.
    let result = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &program, none, none) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thread::spawn;
    use crate::uring::{UringDriver, unavailable_errno};

    /// The error number of creating a ring under a filter; `None` if it succeeds.
    fn ring_error_under(errno: Option<SeccompErrno>) -> Option<i32> {
        let ring = spawn("refused", move || {
            if let Some(errno) = errno {
                deny_io_uring(errno).unwrap();
            }
            // A child thread inherits the filter.
            spawn("child", || UringDriver::new(4).err()).unwrap().join().unwrap()
        });
        ring.unwrap().join().unwrap().map(|error| error.raw_os_error().expect("an error of the kernel"))
    }

    #[test]
    fn io_uring_is_denied_to_a_thread_and_its_children_and_to_no_other() {
        let before = ring_error_under(None);
        assert_eq!(before, unavailable_errno());
        assert_eq!(ring_error_under(Some(SeccompErrno::Eperm)), Some(libc::EPERM));
        assert_eq!(ring_error_under(None), before);
    }

    #[test]
    fn a_kernel_without_io_uring_can_be_imitated() {
        // If a filter forbids io_uring already, the error number of the filter installed last applies.
        assert_eq!(ring_error_under(Some(SeccompErrno::Enosys)), Some(libc::ENOSYS));
    }

    /// The error numbers of the system calls adjacent to io_uring's three, with invalid arguments.
    fn neighbour_syscall_errnos() -> [Option<i32>; 2] {
        [IO_URING_SETUP - 1, IO_URING_REGISTER + 1].map(|call| {
            // SAFETY: pidfd_send_signal and open_tree with a closed descriptor have no effect.
            let result = unsafe { libc::syscall(libc::c_long::from(call), -1, 0, 0, 0) };
            assert_eq!(result, -1);
            io::Error::last_os_error().raw_os_error()
        })
    }

    #[test]
    fn the_system_calls_next_to_io_uring_are_allowed() {
        let under_it = spawn("refused", || {
            deny_io_uring(SeccompErrno::Enosys).unwrap();
            neighbour_syscall_errnos()
        });
        assert_eq!(under_it.unwrap().join().unwrap(), neighbour_syscall_errnos());
    }
}
