//! io_uring taken away from a thread and from everything that it starts, as a container does: for tests of
//! what is left without it.
//!
//! A filter on system calls (seccomp) answers `io_uring_setup`, `io_uring_enter` and `io_uring_register` with an
//! error number and lets everything else through. It stays over `exec` and cannot be taken off again.
//! `cargo run -p octokv-sys --example without_io_uring -- COMMAND` runs a command under it.

use std::io;

/// `io_uring_setup`, the first of three that follow each other. From 424 on, system calls have one number on
/// every architecture that we know (x86-64 and aarch64 among them), so the filter need not ask which it is.
const IO_URING_SETUP: u32 = 425;
const IO_URING_REGISTER: u32 = 427;
/// Set in the numbers of x86-64's second calling convention (x32), whose calls are the same.
const X32_SYSCALL_BIT: u32 = 0x4000_0000;

/// How io_uring is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SeccompErrno {
    /// EPERM: what containers and `kernel.io_uring_disabled` answer.
    Eperm,
    /// ENOSYS: what a kernel without it answers.
    Enosys,
}

impl SeccompErrno {
    /// The error number that callers get.
    pub fn raw(self) -> i32 {
        match self {
            SeccompErrno::Eperm => libc::EPERM,
            SeccompErrno::Enosys => libc::ENOSYS,
        }
    }
}

/// From now on the calling thread, and every thread and process that it starts, is refused io_uring. Other
/// threads of this process keep it. Gives up, for all of them, to gain privileges by `exec` (sudo).
pub fn deny_io_uring(errno: SeccompErrno) -> io::Result<()> {
    let statement = |code, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let action = libc::SECCOMP_RET_ERRNO | errno.raw() as u32;
    // The number of the call is the first word of what the filter is shown.
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, !X32_SYSCALL_BIT),
        statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 2, IO_URING_SETUP),
        statement(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, IO_URING_REGISTER),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, action),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let none: libc::c_ulong = 0;
    // SAFETY: a system call with plain arguments.
    let given_up = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1 as libc::c_ulong, none, none, none) };
    if given_up != 0 {
        return Err(io::Error::last_os_error());
    }
    let mode = libc::SECCOMP_MODE_FILTER as libc::c_ulong;
    // SAFETY: `program` and the statements that it names live through the call, which copies them.
    let done = unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &program, none, none) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::thread::spawn;
    use crate::uring::{UringDriver, unavailable_errno};

    /// What a ring costs a thread under a refusal: the error number, if it is refused.
    fn ring_error_under(errno: Option<SeccompErrno>) -> Option<i32> {
        let ring = spawn("refused", move || {
            if let Some(errno) = errno {
                deny_io_uring(errno).unwrap();
            }
            // A thread that it starts is bound as well.
            spawn("child", || UringDriver::new(4).err()).unwrap().join().unwrap()
        });
        ring.unwrap().join().unwrap().map(|error| error.raw_os_error().expect("of the kernel"))
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
        // Where a filter forbids it already, two refuse, and the one that was put on last is heard.
        assert_eq!(ring_error_under(Some(SeccompErrno::Enosys)), Some(libc::ENOSYS));
    }

    /// What the system calls next to io_uring's three say when they are asked for nothing sensible.
    fn neighbour_syscall_errnos() -> [Option<i32>; 2] {
        [IO_URING_SETUP - 1, IO_URING_REGISTER + 1].map(|call| {
            // SAFETY: pidfd_send_signal and open_tree of descriptors that are not open do nothing.
            let done = unsafe { libc::syscall(libc::c_long::from(call), -1, 0, 0, 0) };
            assert_eq!(done, -1);
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
