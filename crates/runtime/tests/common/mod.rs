//! What several of these tests need: a file that goes away, and a channel that is polled to an answer.

#![allow(dead_code, reason = "each test uses some of it")]
#![allow(clippy::disallowed_methods, reason = "a test removes its file")]

use octokv_base::Nanos;
use octokv_runtime::{Channel, Completed, DeviceDriver, Doorbell, Media, Ticket, block_on, device_queue};
use octokv_sys::file::open_device;
use octokv_sys::uring;
use std::path::{Path, PathBuf};

/// A file of 4 MiB on a disk, opened with O_DIRECT, gone at the end.
pub struct Scratch {
    pub media: Media,
    path: PathBuf,
}

pub const SCRATCH_BYTES: u64 = 4 << 20;

impl Scratch {
    pub fn new(name: &str) -> Scratch {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        let file = open_device(&path, Some(SCRATCH_BYTES), true).unwrap();
        Scratch { media: Media::file(file), path }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Polls `channel` until `ticket` has its answer. A device that never answers fails the test.
pub fn wait(channel: &Channel, ticket: Ticket) -> Completed {
    let start = octokv_sys::clock::now();
    block_on(ticket, || {
        channel.poll();
        assert!(octokv_sys::clock::now().since(start) < Nanos::from_secs(60), "no answer in a minute");
    })
}

/// The drivers that the kernel lets this process have: both, or worker threads alone where io_uring is forbidden or
/// missing. Then asking for it by name gets that very refusal, which is asserted here.
pub fn drivers() -> Vec<DeviceDriver> {
    let Some(errno) = uring::refusal() else {
        return vec![DeviceDriver::Uring, DeviceDriver::Threads];
    };
    let refused = device_queue(DeviceDriver::Uring, 8, &Doorbell::silent());
    let error = refused.err().expect("io_uring is refused to whoever names it");
    assert_eq!(error.raw_os_error(), Some(errno));
    vec![DeviceDriver::Threads]
}
