//! Which driver a node's cores reach their devices by, decided once, at the start; and what is said of it.
//!
//! In: the driver that was asked for. Out: the one to ask each core's queue for, or an error that says what to do.
//! Where io_uring is forbidden or missing, one line says so for the whole node. A core that fails to get a ring
//! although the node may have one (memory, descriptors) says so for itself.

use crate::error::{StartError, UringUnavailable};
use octokv_runtime::{CoreWaker, DeviceDriver, DeviceQueue, open_device_queue};
use std::sync::Arc;

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
