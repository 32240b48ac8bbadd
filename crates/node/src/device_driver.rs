//! Which driver a node's cores reach their devices by, decided once, at the start; and what is said of it.
//!
//! In: the driver that was asked for. Out: the one to ask each core's queue for, or an error that says what to do.
//! Where io_uring is forbidden or missing, one line says so for the whole node. A core that fails to get a ring
//! although the node may have one (memory, descriptors) says so for itself.

use crate::node::StartError;
use octokv_runtime::{CoreWaker, DeviceDriver, DeviceQueue, open_device_queue};
use std::fmt;
use std::io;
use std::sync::Arc;

/// Why io_uring, which was asked for, cannot be had.
#[derive(Debug)]
pub struct UringUnavailable(io::Error);

impl fmt::Display for UringUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let UringUnavailable(error) = self;
        match error.kind() {
            io::ErrorKind::PermissionDenied => write!(
                f,
                "io_uring is forbidden here ({error}): use driver \"threads\", or allow the system calls \
                 io_uring_setup, io_uring_enter and io_uring_register (the container's seccomp profile, \
                 kernel.io_uring_disabled)"
            ),
            io::ErrorKind::Unsupported => {
                write!(f, "this kernel has no io_uring ({error}): use driver \"threads\"")
            }
            _ => write!(f, "io_uring failed ({error}): driver \"threads\" does without it"),
        }
    }
}

/// What the cores are to ask for. Touches io_uring only where it may be used.
pub fn select_driver(requested: DeviceDriver) -> Result<DeviceDriver, StartError> {
    if requested == DeviceDriver::Threads {
        return Ok(requested);
    }
    match open_device_queue(DeviceDriver::Uring, 1, &CoreWaker::without_eventfd()) {
        Ok(_) => Ok(requested),
        Err(error) if requested == DeviceDriver::Uring => Err(StartError::Driver(UringUnavailable(error))),
        Err(error) => {
            tracing::warn!("io_uring is not available here ({error}): devices run on worker threads");
            Ok(DeviceDriver::Threads)
        }
    }
}

/// A core's queue by what was decided.
pub fn open_core_queue(
    selected: DeviceDriver,
    depth: usize,
    core_waker: &Arc<CoreWaker>,
    core: usize,
) -> Result<Box<dyn DeviceQueue>, StartError> {
    if selected == DeviceDriver::Auto {
        match open_device_queue(DeviceDriver::Uring, depth, core_waker) {
            Ok((queue, _)) => return Ok(queue),
            Err(error) => tracing::warn!(core, %error, "no io_uring for this core: worker threads instead"),
        }
    }
    let driver = if selected == DeviceDriver::Uring { selected } else { DeviceDriver::Threads };
    match open_device_queue(driver, depth, core_waker) {
        Ok((queue, _)) => Ok(queue),
        Err(error) if driver == DeviceDriver::Uring => Err(StartError::Driver(UringUnavailable(error))),
        Err(error) => Err(StartError::System(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uring_error_names_the_reason_and_the_workaround() {
        let message = |errno| UringUnavailable(io::Error::from_raw_os_error(errno)).to_string();
        let table: [(i32, &[&str]); 3] = [
            (1, &["forbidden", "os error 1", "seccomp", "kernel.io_uring_disabled", "driver \"threads\""]),
            (38, &["no io_uring", "os error 38", "driver \"threads\""]),
            (12, &["failed", "os error 12", "driver \"threads\""]),
        ];
        for (errno, parts) in table {
            for part in parts {
                assert!(message(errno).contains(part), "no {part} in {}", message(errno));
            }
        }
    }
}
