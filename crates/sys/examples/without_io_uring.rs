//! Runs a command without io_uring, as in many containers: `without_io_uring [--missing] COMMAND [ARGUMENT...]`.
//! io_uring's system calls fail with EPERM, with `--missing` with ENOSYS as on a kernel without it.

#![allow(clippy::disallowed_types, reason = "a program that executes another")]

use octokv_sys::seccomp::{SeccompErrno, deny_io_uring};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1).peekable();
    let errno = match arguments.next_if(|argument| argument == "--missing") {
        Some(_) => SeccompErrno::Enosys,
        None => SeccompErrno::Eperm,
    };
    let Some(command) = arguments.next() else {
        eprintln!("without_io_uring [--missing] COMMAND [ARGUMENT...]");
        return ExitCode::from(2);
    };
    if let Err(error) = deny_io_uring(errno) {
        eprintln!("without_io_uring: cannot install the filter: {error}");
        return ExitCode::FAILURE;
    }
    // Returns only on failure.
    let error = Command::new(&command).args(arguments).exec();
    eprintln!("without_io_uring: {}: {error}", command.display());
    ExitCode::from(127)
}
