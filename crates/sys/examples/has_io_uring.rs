//! Says by its exit code whether this process may have io_uring: 0 when it may, 1 when it is refused.

use std::process::ExitCode;

fn main() -> ExitCode {
    match octokv_sys::uring::unavailable_errno() {
        None => ExitCode::SUCCESS,
        Some(_) => ExitCode::FAILURE,
    }
}
