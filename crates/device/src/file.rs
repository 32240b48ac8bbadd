//! A regular file or a raw block device, read and written past the page cache by one core's channel.
//!
//! In: operations of this core's tasks. Out: their completion, from the channel's driver. Opening,
//! locking and sizing the file is the caller's (the driver knows how); this maps blocks to bytes.

use crate::{Device, DeviceFuture, Geometry};
use octokv_base::{Buffer, Lba};
use octokv_runtime::device_queue::{DeviceHandle, FileId, IoOperation};

/// One core's view of an open file.
pub struct FileDevice {
    channel: DeviceHandle,
    file: FileId,
    geometry: Geometry,
    name: String,
}

impl FileDevice {
    /// The device of `file`, which is open on `channel`.
    pub fn new(channel: DeviceHandle, file: FileId, geometry: Geometry, name: String) -> FileDevice {
        FileDevice { channel, file, geometry, name }
    }

    fn offset(&self, at: Lba) -> u64 {
        at.0 * u64::from(self.geometry.block_bytes)
    }
}

impl Drop for FileDevice {
    fn drop(&mut self) {
        self.channel.close(self.file);
    }
}

impl Device for FileDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }
    fn name(&self) -> &str {
        &self.name
    }
    fn read(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let operation = IoOperation::Read { offset: self.offset(at), buffer };
        DeviceFuture::submitted(self.channel.submit(self.file, operation))
    }
    fn write(&self, at: Lba, buffer: Buffer) -> DeviceFuture {
        if !self.geometry.is_valid_range(at, buffer.len()) {
            return DeviceFuture::out_of_range(Some(buffer));
        }
        let operation = IoOperation::Write { offset: self.offset(at), buffer };
        DeviceFuture::submitted(self.channel.submit(self.file, operation))
    }
    fn flush(&self) -> DeviceFuture {
        DeviceFuture::submitted(self.channel.submit(self.file, IoOperation::Flush))
    }
    fn trim(&self, at: Lba, blocks: u64) -> DeviceFuture {
        let bytes = blocks * u64::from(self.geometry.block_bytes);
        DeviceFuture::submitted(
            self.channel.submit(self.file, IoOperation::Trim { offset: self.offset(at), bytes }),
        )
    }
}
