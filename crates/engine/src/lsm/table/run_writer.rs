//! Writes the bytes of a table to its run, from the first unit on: long writes, a few of them in flight.
//!
//! In: bytes of any length. Out: writes of whole units. Holds: one buffer that is being filled, and those in flight.
//! Invariants: at most [`WRITES_MAX`] writes are in flight; when an error is returned or [`RunWriter::settle`] ends, none is. After a
//! failure nothing more is written. Tested by the tests of the table writer.

use super::io::TableIo;
use crate::EngineError;
use crate::common::allocator::Extent;
use octokv_base::{Buffer, Lba};
use octokv_device::{DeviceFuture, IoResult};
use std::collections::VecDeque;
use std::rc::Rc;

/// Bytes per write.
pub const WRITE_BYTES: usize = 256 << 10;
/// Writes in flight at a time.
pub const WRITES_MAX: usize = 3;

/// Writes one run of units.
pub struct RunWriter {
    io: Rc<TableIo>,
    run: Extent,
    /// The bytes that were submitted.
    submitted: u64,
    filling: Option<Buffer>,
    filled: usize,
    in_flight: VecDeque<DeviceFuture>,
    failed: Option<EngineError>,
}

impl RunWriter {
    /// Begins at the start of a run. REQUIRES: nothing refers to its contents.
    pub fn new(io: Rc<TableIo>, run: Extent) -> RunWriter {
        let in_flight = VecDeque::with_capacity(WRITES_MAX);
        RunWriter { io, run, submitted: 0, filling: None, filled: 0, in_flight, failed: None }
    }

    /// The error after which nothing more is written.
    pub fn failure(&self) -> Option<EngineError> {
        self.failed
    }

    /// The bytes that were appended.
    pub fn appended(&self) -> u64 {
        self.submitted + self.filled as u64
    }

    /// Appends bytes, and waits if too many are in flight. REQUIRES: the run has space for them. If the future is dropped, the writer can
    /// only be settled.
    ///
    /// # Errors
    /// The device's, and [`EngineError::NoMemory`]. The same error then ends all later calls.
    pub async fn append(&mut self, mut bytes: &[u8]) -> Result<(), EngineError> {
        while !bytes.is_empty() {
            let mut buffer = match self.filling.take() {
                Some(buffer) => buffer,
                None => self.next_buffer().await?,
            };
            let (now, later) = bytes.split_at(bytes.len().min(WRITE_BYTES - self.filled));
            buffer[self.filled..][..now.len()].copy_from_slice(now);
            self.filled += now.len();
            self.filling = Some(buffer);
            bytes = later;
            if self.filled == WRITE_BYTES {
                self.submit();
            }
        }
        Ok(())
    }

    /// Appends zeros up to the next unit, and gives the bytes appended so far.
    ///
    /// # Errors
    /// As for [`RunWriter::append`].
    pub async fn fill_unit(&mut self) -> Result<u64, EngineError> {
        let unit_bytes = u64::from(self.io.unit_bytes);
        let missing = self.appended().next_multiple_of(unit_bytes) - self.appended();
        self.append(&vec![0; missing as usize]).await?;
        Ok(self.appended())
    }

    /// Writes what is left, and waits until all writes have ended. REQUIRES: the bytes appended are whole units.
    ///
    /// # Errors
    /// As for [`RunWriter::append`].
    pub async fn finish(&mut self) -> Result<(), EngineError> {
        if self.filled > 0 && self.failed.is_none() {
            self.submit();
        }
        self.settle().await;
        self.failed.map_or(Ok(()), Err)
    }

    /// Waits until no write is in flight: before that, the run must not be used for anything else.
    pub async fn settle(&mut self) {
        while let Some(write) = self.in_flight.front_mut() {
            let result = write.await;
            self.in_flight.pop_front();
            self.ended(result);
        }
    }

    /// The writes that have not ended: before they have, the run must not be used for anything else.
    pub fn into_writes(self) -> Vec<DeviceFuture> {
        self.in_flight.into()
    }

    /// A buffer to fill: a new one, or that of the oldest write.
    async fn next_buffer(&mut self) -> Result<Buffer, EngineError> {
        let mut buffer = None;
        if self.failed.is_none() && self.in_flight.len() < WRITES_MAX {
            buffer = self.io.pool.take(WRITE_BYTES);
        }
        if self.failed.is_none()
            && buffer.is_none()
            && let Some(write) = self.in_flight.front_mut()
        {
            let result = write.await;
            self.in_flight.pop_front();
            buffer = self.ended(result);
        }
        if self.failed.is_none() && buffer.is_none() {
            self.failed = Some(EngineError::NoMemory);
        }
        if let Some(error) = self.failed {
            self.settle().await;
            return Err(error);
        }
        Ok(buffer.expect("without one, the writer failed"))
    }

    fn ended(&mut self, IoResult { buffer, result }: IoResult) -> Option<Buffer> {
        if let Err(error) = result {
            self.failed.get_or_insert(self.io.failed(error));
        }
        buffer.filter(|buffer| buffer.len() == WRITE_BYTES)
    }

    fn submit(&mut self) {
        // Only a bug of ours submits before it fills a buffer.
        let mut buffer = self.filling.take().expect("a buffer with bytes");
        let (unit_bytes, bytes) = (u64::from(self.io.unit_bytes), self.filled as u64);
        assert!(bytes.is_multiple_of(unit_bytes), "{bytes} bytes are no whole units");
        assert!(self.submitted + bytes <= self.run.units * unit_bytes, "a table beyond its run");
        assert!(self.in_flight.len() <= WRITES_MAX, "{} writes in flight", self.in_flight.len());
        buffer.set_len(self.filled);
        let block_bytes = u64::from(self.io.device.geometry().block_bytes);
        let lba = Lba(self.run.location * (unit_bytes / block_bytes) + self.submitted / block_bytes);
        self.in_flight.push_back(self.io.device.write(lba, buffer));
        self.submitted += bytes;
        self.filled = 0;
    }
}
