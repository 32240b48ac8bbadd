//! A regular file or a raw block device, accessed with direct I/O through one core's device queue.
//!
//! In: operations of the core's tasks. Out: their completions, from the queue's driver. Maps blocks to byte offsets;
//! the caller opens, locks and sizes the file.

use crate::{Device, DeviceFuture, Geometry};
use octokv_base::{Buffer, Lba};
use octokv_runtime::device_queue::{DeviceHandle, DeviceSource, FileId, IoOperation};
use std::ops::Range;

/// One core's view of an open file.
pub struct FileDevice {
    channel: DeviceHandle,
    file: FileId,
    geometry: Geometry,
    preferred_write_bytes: u32,
    /// The source that reports never-written blocks.
    source: Option<DeviceSource>,
    name: String,
}

impl FileDevice {
    /// The device of `file`. REQUIRES: `file` is open on `channel`.
    pub fn new(channel: DeviceHandle, file: FileId, geometry: Geometry, name: String) -> FileDevice {
        let preferred_write_bytes = geometry.block_bytes;
        FileDevice { channel, file, geometry, preferred_write_bytes, source: None, name }
    }

    /// The same device, whose writes need no read below from so many bytes on.
    pub fn with_preferred_write(mut self, preferred_write_bytes: u32) -> FileDevice {
        self.preferred_write_bytes = preferred_write_bytes;
        self
    }

    /// The same device, of whose operations at most `depth` are in flight.
    ///
    /// # Panics
    /// If `depth` is 0.
    pub fn with_depth(self, depth: usize) -> FileDevice {
        self.channel.set_depth(self.file, depth);
        self
    }

    /// The same device, which reports the blocks of `source` that were never written. REQUIRES: `source` is the device's.
    pub fn with_unwritten_of(mut self, source: DeviceSource) -> FileDevice {
        self.source = Some(source);
        self
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
    fn preferred_write_bytes(&self) -> u32 {
        self.preferred_write_bytes
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
    fn write_vectored(&self, at: Lba, buffers: Vec<Buffer>) -> DeviceFuture {
        let is_whole = |buffer: &Buffer| self.geometry.is_valid_range(Lba(0), buffer.len());
        let bytes = buffers.iter().map(|buffer| buffer.len()).sum();
        if !self.geometry.is_valid_range(at, bytes) || !buffers.iter().all(is_whole) {
            return DeviceFuture::out_of_range(None);
        }
        let operation = IoOperation::WriteVectored { offset: self.offset(at), buffers };
        DeviceFuture::submitted(self.channel.submit(self.file, operation))
    }
    fn next_unwritten(&self, at: Lba) -> Option<Range<Lba>> {
        let block_bytes = u64::from(self.geometry.block_bytes);
        let bytes = self.source.as_ref()?.next_unwritten(self.offset(at))?;
        // A block that is in part never written counts.
        let end = bytes.end.div_ceil(block_bytes).min(self.geometry.blocks);
        Some(Lba(bytes.start / block_bytes)..Lba(end)).filter(|blocks| blocks.start < blocks.end)
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
