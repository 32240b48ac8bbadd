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
const X32: u32 = 0x4000_0000;

/// How io_uring is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// EPERM: what containers and `kernel.io_uring_disabled` answer.
    Forbidden,
    /// ENOSYS: what a kernel without it answers.
    Missing,
}

impl Refusal {
    /// The error number that callers get.
    pub fn errno(self) -> i32 {
        match self {
            Refusal::Forbidden => libc::EPERM,
            Refusal::Missing => libc::ENOSYS,
        }
    }
}

/// From now on the calling thread, and every thread and process that it starts, is refused io_uring. Other
/// threads of this process keep it. Gives up, for all of them, to gain privileges by `exec` (sudo).
pub fn refuse_io_uring(refusal: Refusal) -> io::Result<()> {
    let statement = |code, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let answer = libc::SECCOMP_RET_ERRNO | refusal.errno() as u32;
    // The number of the call is the first word of what the filter is shown.
    let mut filter = [
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, !X32),
        statement(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 2, IO_URING_SETUP),
        statement(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 1, 0, IO_URING_REGISTER),
        statement(libc::BPF_RET | libc::BPF_K, 0, 0, answer),
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
    use crate::uring::{Ring, refusal};

    /// What a ring costs a thread under a refusal: the error number, if it is refused.
    fn under(refusal: Option<Refusal>) -> Option<i32> {
        let ring = spawn("refused", move || {
            if let Some(refusal) = refusal {
                refuse_io_uring(refusal).unwrap();
            }
            // A thread that it starts is bound as well.
            spawn("child", || Ring::new(4).err()).unwrap().join().unwrap()
        });
        ring.unwrap().join().unwrap().map(|error| error.raw_os_error().expect("of the kernel"))
    }

    #[test]
    fn a_thread_and_what_it_starts_is_refused_io_uring_and_others_are_not() {
        let before = under(None);
        assert_eq!(before, refusal());
        assert_eq!(under(Some(Refusal::Forbidden)), Some(libc::EPERM));
        assert_eq!(under(None), before);
    }

    #[test]
    fn a_kernel_without_io_uring_can_be_had_too() {
        // Where a filter forbids it already, two refuse, and the one that was put on last is heard.
        assert_eq!(under(Some(Refusal::Missing)), Some(libc::ENOSYS));
    }

    /// What the system calls next to io_uring's three say when they are asked for nothing sensible.
    fn neighbours() -> [Option<i32>; 2] {
        [IO_URING_SETUP - 1, IO_URING_REGISTER + 1].map(|call| {
            // SAFETY: pidfd_send_signal and open_tree of descriptors that are not open do nothing.
            let done = unsafe { libc::syscall(libc::c_long::from(call), -1, 0, 0, 0) };
            assert_eq!(done, -1);
            io::Error::last_os_error().raw_os_error()
        })
    }

    #[test]
    fn the_calls_next_to_io_uring_are_let_through() {
        let under_it = spawn("refused", || {
            refuse_io_uring(Refusal::Missing).unwrap();
            neighbours()
        });
        assert_eq!(under_it.unwrap().join().unwrap(), neighbours());
    }
}
