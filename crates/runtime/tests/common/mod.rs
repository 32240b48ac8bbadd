//! Shared by these tests: a scratch file, waiting for a completion, and the available drivers.

#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "a test removes its file")]

use octokv_base::Nanos;
use octokv_runtime::{
    CompletionFuture, CoreWaker, DeviceDriver, DeviceHandle, DeviceSource, IoCompletion, block_on,
    open_device_queue,
};
use octokv_sys::file::open_device;
use octokv_sys::uring;
use std::path::{Path, PathBuf};

/// A file of 4 MiB on a disk, opened with O_DIRECT, removed at the end.
pub struct ScratchFile {
    pub source: DeviceSource,
    path: PathBuf,
}

pub const SCRATCH_BYTES: u64 = 4 << 20;

impl ScratchFile {
    pub fn new(name: &str) -> ScratchFile {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let file = open_device(&path, Some(SCRATCH_BYTES), true).unwrap();
        ScratchFile { source: DeviceSource::from_file(file), path }
    }
}

impl Drop for ScratchFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Polls `devices` until `future` completes. Fails the test if that takes a minute.
pub fn wait(devices: &DeviceHandle, future: CompletionFuture) -> IoCompletion {
    let start = octokv_sys::clock::now();
    block_on(future, || {
        devices.poll();
        assert!(octokv_sys::clock::now().since(start) < Nanos::from_secs(60), "no completion in a minute");
    })
}

/// The drivers available to this process: both, or worker threads alone if io_uring is forbidden or missing. Asserts
/// that the io_uring driver then fails with that error number.
pub fn drivers() -> Vec<DeviceDriver> {
    let Some(errno) = uring::unavailable_errno() else {
        return vec![DeviceDriver::Uring, DeviceDriver::Threads];
    };
    let refused = open_device_queue(DeviceDriver::Uring, 8, &CoreWaker::without_eventfd());
    let error = refused.err().expect("the io_uring driver must fail");
    assert_eq!(error.raw_os_error(), Some(errno));
    vec![DeviceDriver::Threads]
}
