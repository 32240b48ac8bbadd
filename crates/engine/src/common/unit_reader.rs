//! Reads of whole units that give any range of bytes.

use octokv_base::{Buffer, Lba};
use octokv_device::{Device, DeviceError};

/// The longest read, in bytes: a device takes less than 2 GiB at once, and a header may claim more.
const READ_BYTES_MAX: usize = 64 << 20;

/// A device seen in units of a volume.
#[derive(Clone, Copy)]
pub struct UnitReader<'a> {
    device: &'a dyn Device,
    unit_bytes: u32,
    unit_blocks: u64,
}

impl<'a> UnitReader<'a> {
    /// REQUIRES: a unit is one block of the device, or several.
    pub fn new(device: &'a dyn Device, unit_bytes: u32) -> UnitReader<'a> {
        let unit_blocks = u64::from(unit_bytes / device.geometry().block_bytes);
        UnitReader { device, unit_bytes, unit_blocks }
    }

    /// Bytes per unit.
    pub fn unit_bytes(&self) -> usize {
        self.unit_bytes as usize
    }

    /// The first block of a unit.
    pub fn lba(&self, unit: u64) -> Lba {
        Lba(unit * self.unit_blocks)
    }

    /// Reads `bytes` from the byte `offset` after `unit`, at any alignment, in parts of at most 64 MiB. Memory
    /// grows with what the device has returned, not with what a header claims.
    ///
    /// # Errors
    /// The device's.
    pub async fn read(&self, unit: u64, offset: u64, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        let unit_bytes = self.unit_bytes() as u64;
        let mut first = unit + offset / unit_bytes;
        let mut within = (offset % unit_bytes) as usize;
        let mut found = Vec::new();
        while found.len() < bytes {
            let rest = (within + bytes - found.len()).next_multiple_of(self.unit_bytes());
            let buffer = Buffer::zeroed(rest.min(READ_BYTES_MAX));
            let buffer = self.device.read(self.lba(first), buffer).await.into_read()?;
            found.extend_from_slice(&buffer[within..]);
            first += buffer.len() as u64 / unit_bytes;
            within = 0;
        }
        found.truncate(bytes);
        Ok(found)
    }

    /// Reads a part of one of two copies; empty if the device fails, since the other copy may be readable.
    pub async fn read_or_empty(&self, unit: u64, offset: u64, bytes: usize) -> Vec<u8> {
        self.read(unit, offset, bytes).await.unwrap_or_default()
    }
}
