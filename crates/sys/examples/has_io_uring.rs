//! Exits with 0 if io_uring is available to this process, with 1 if it is forbidden or missing.

use std::process::ExitCode;

fn main() -> ExitCode {
    match octokv_sys::uring::unavailable_errno() {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    }
}
