//! Selects the device driver of a node once, at start: io_uring or worker threads.
//!
//! In: the configured driver. Out: the driver for each core's queue, or an error that names the remedy. If io_uring
//! is forbidden or missing, one log line says so for the whole node; a core that fails to create a ring although the
//! node may use one (memory, descriptors) logs its own line.

use crate::error::{StartError, UringUnavailable};
use octokv_runtime::{CoreWaker, DeviceDriver, DeviceQueue, open_device_queue};
use std::sync::Arc;

/// Selects the driver for all cores. Touches io_uring only if the configuration allows it.
///
/// # Errors
/// [`StartError::Driver`] if io_uring is configured and unavailable.
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

/// Opens one core's device queue with the selected driver. With `Auto`, falls back to worker threads.
///
/// # Errors
/// [`StartError::Driver`] if io_uring is configured and fails; [`StartError::System`] if worker threads cannot start.
pub fn open_core_queue(
    selected: DeviceDriver,
    depth: usize,
    core_waker: &Arc<CoreWaker>,
    core: usize,
) -> Result<Box<dyn DeviceQueue>, StartError> {
    if selected == DeviceDriver::Auto {
        match open_device_queue(DeviceDriver::Uring, depth, core_waker) {
            Ok((queue, _)) => return Ok(queue),
            Err(error) => {
                tracing::warn!(core, %error, "io_uring failed on this core: its devices run on worker threads")
            }
        }
    }
    let driver = if selected == DeviceDriver::Uring { selected } else { DeviceDriver::Threads };
    match open_device_queue(driver, depth, core_waker) {
        Ok((queue, _)) => Ok(queue),
        Err(error) if driver == DeviceDriver::Uring => Err(StartError::Driver(UringUnavailable(error))),
        Err(error) => Err(StartError::System(error)),
    }
}
