//! A device that there is not: in place of one of several that could not be opened.

use crate::{Device, DeviceFuture, Geometry, IoResult};
use octokv_base::{Buffer, Lba};

/// Every operation fails with [`crate::DeviceError::Unavailable`].
pub struct UnavailableDevice {
    name: String,
}

impl UnavailableDevice {
    /// In place of the device of this name.
    pub fn new(name: String) -> UnavailableDevice {
        UnavailableDevice { name }
    }
}

fn unavailable(buffer: Option<Buffer>) -> DeviceFuture {
    DeviceFuture::ready(IoResult::unavailable(buffer))
}

impl Device for UnavailableDevice {
    /// Some blocks, so that operations are tried.
    fn geometry(&self) -> Geometry {
        Geometry { block_bytes: 4096, blocks: 1 << 20, volatile: false }
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn is_available(&self) -> bool {
        false
    }
    fn read(&self, _at: Lba, buffer: Buffer) -> DeviceFuture {
        unavailable(Some(buffer))
    }
    fn write(&self, _at: Lba, buffer: Buffer) -> DeviceFuture {
        unavailable(Some(buffer))
    }
    fn flush(&self) -> DeviceFuture {
        unavailable(None)
    }
    fn trim(&self, _at: Lba, _blocks: u64) -> DeviceFuture {
        unavailable(None)
    }
}
