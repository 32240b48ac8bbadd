//! Runs a command to which io_uring is refused, as in many containers:
//! `without_io_uring [--missing] COMMAND [ARGUMENT...]`. With `--missing` the kernel seems not to have it.

#![allow(clippy::disallowed_types, reason = "a program that becomes another")]

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
        eprintln!("without_io_uring: the filter was refused: {error}");
        return ExitCode::FAILURE;
    }
    // Comes back only when it failed.
    let error = Command::new(&command).args(arguments).exec();
    eprintln!("without_io_uring: {}: {error}", command.display());
    ExitCode::from(127)
}
