//! Image streams: structures in memory, written one after another as a stream of bytes to an area of the device, in two
//! copies, and read back from whichever copy is intact.
//!
//! ```text
//!   image │ image │ image … ─▶ chunks of 256 KiB ─▶ copy 1 │ copy 2       each image has its length and checksum
//! ```
//! In: images of any length. Out: the bytes written, or the images in their order. Invariants: an area is written only
//! while nothing refers to it; a copy that cannot be read or does not check costs nothing as long as the other does. The
//! length of an image is known only once its checksum is verified. A damaged header may claim any, so if the copies differ
//! the shorter claim is tried first: at most twice the image is read as long as one copy is intact.

use super::unit_reader::UnitReader;
use crate::EngineError;
use octokv_base::{Buffer, Lba};
use octokv_device::Device;

/// Bytes per write.
const WRITE_CHUNK_BYTES: usize = 256 * 1024;
/// Bytes per read of images.
const READ_CHUNK_BYTES: u64 = 1 << 20;

/// Streams images into both copies of an area.
pub struct ImageWriter<'a> {
    device: &'a dyn Device,
    /// The first block of each copy.
    starts: [Lba; 2],
    unit_bytes: usize,
    pending: Vec<u8>,
    written: u64,
}

impl<'a> ImageWriter<'a> {
    /// Begins at the start of an area whose copies begin at these blocks. REQUIRES: a unit is one block or several.
    pub fn new(device: &'a dyn Device, starts: [Lba; 2], unit_bytes: usize) -> ImageWriter<'a> {
        ImageWriter { device, starts, unit_bytes, pending: Vec::new(), written: 0 }
    }

    /// The bytes that are not written yet, to append an image to.
    pub fn pending(&mut self) -> &mut Vec<u8> {
        &mut self.pending
    }

    /// Writes the pending bytes in whole chunks, and leaves the rest pending.
    ///
    /// # Errors
    /// The device's.
    pub async fn write_chunks(&mut self) -> Result<(), EngineError> {
        while self.pending.len() >= WRITE_CHUNK_BYTES {
            self.write(WRITE_CHUNK_BYTES).await?;
        }
        Ok(())
    }

    /// Writes everything, and gives the length of the stream in bytes.
    ///
    /// # Errors
    /// The device's.
    pub async fn finish(mut self) -> Result<u64, EngineError> {
        self.write_chunks().await?;
        if !self.pending.is_empty() {
            self.write(self.pending.len()).await?;
        }
        Ok(self.written)
    }

    async fn write(&mut self, bytes: usize) -> Result<(), EngineError> {
        let mut copies = [(); 2].map(|()| Buffer::zeroed(bytes.next_multiple_of(self.unit_bytes)));
        copies.iter_mut().for_each(|copy| copy[..bytes].copy_from_slice(&self.pending[..bytes]));
        self.pending.drain(..bytes);
        let blocks = self.written / u64::from(self.device.geometry().block_bytes);
        let [first, second] = copies;
        let first = self.device.write(Lba(self.starts[0].0 + blocks), first);
        let second = self.device.write(Lba(self.starts[1].0 + blocks), second);
        let (first, second) = (first.await, second.await);
        first.result.and(second.result)?;
        self.written += bytes as u64;
        Ok(())
    }
}

/// How long an image is.
pub trait ImageFormat {
    /// The length of its header in bytes.
    const HEADER_BYTES: usize;
    /// The length of the image at the front, in bytes, by its unverified header; `None` without one.
    fn claimed_bytes(bytes: &[u8]) -> Option<usize>;
}

/// Both copies of an image are damaged: the first block of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageLost(pub [u64; 2]);

/// Reads the images of a stream one after another.
pub struct ImageReader<'a> {
    reader: UnitReader<'a>,
    /// The first unit of each copy.
    starts: [u64; 2],
    total_bytes: u64,
    /// The part of the first copy that was read last, and where it begins.
    window: Vec<u8>,
    window_at: u64,
    offset: u64,
    damaged_copies: u64,
}

impl<'a> ImageReader<'a> {
    /// Begins at the start of a stream of `total_bytes`, whose copies begin at these units.
    pub fn new(reader: UnitReader<'a>, starts: [u64; 2], total_bytes: u64) -> ImageReader<'a> {
        ImageReader {
            reader,
            starts,
            total_bytes,
            window: Vec::new(),
            window_at: 0,
            offset: 0,
            damaged_copies: 0,
        }
    }

    /// Images of which a copy was found damaged, so far. The second copy is not read if the first loads in one read.
    pub fn damaged_copies(&self) -> u64 {
        self.damaged_copies
    }

    /// Passes the next image to `load`, which gives its length, or `None` if the bytes are not the image. Then the other
    /// copy is tried.
    ///
    /// # Errors
    /// [`ImageLost`] if neither copy loads.
    pub async fn next<F: ImageFormat>(
        &mut self,
        mut load: impl FnMut(&[u8]) -> Option<usize>,
    ) -> Result<(), ImageLost> {
        let rest = self.total_bytes - self.offset;
        // After an image from the other copy, the next may begin beyond this window.
        let mut image = self.window.get((self.offset - self.window_at) as usize..).unwrap_or(&[]);
        if image.len() < F::claimed_bytes(image).unwrap_or(F::HEADER_BYTES) {
            self.window_at = self.offset;
            let bytes = READ_CHUNK_BYTES.min(rest) as usize;
            self.window = self.reader.read_or_empty(self.starts[0], self.offset, bytes).await;
            image = &self.window;
        }
        let claimed = F::claimed_bytes(image).filter(|&claimed| claimed as u64 <= rest);
        let is_whole = claimed.is_none_or(|claimed| claimed <= image.len());
        let loaded = if is_whole { load(image) } else { None };
        let bytes = match loaded {
            Some(bytes) => bytes,
            None => self.load_either::<F>(load, claimed.filter(|_| !is_whole), rest).await?,
        };
        self.offset += bytes as u64;
        Ok(())
    }

    /// Loads an image that is longer than a window, or whose first copy does not load. `first_claim` is the length by the
    /// first copy's header, unless that copy was tried.
    async fn load_either<F: ImageFormat>(
        &mut self,
        mut load: impl FnMut(&[u8]) -> Option<usize>,
        first_claim: Option<usize>,
        rest: u64,
    ) -> Result<usize, ImageLost> {
        let header = self.reader.read_or_empty(self.starts[1], self.offset, F::HEADER_BYTES).await;
        let second_claim = F::claimed_bytes(&header).filter(|&claimed| claimed as u64 <= rest);
        self.damaged_copies += u64::from(first_claim != second_claim);
        let mut copies = [(0, first_claim), (1, second_claim)];
        copies.sort_by_key(|(_, claimed)| *claimed);
        for (copy, claimed) in copies {
            let Some(claimed) = claimed else { continue };
            let image = self.reader.read_or_empty(self.starts[copy], self.offset, claimed).await;
            if let Some(bytes) = load(&image) {
                return Ok(bytes);
            }
            self.damaged_copies += u64::from(first_claim == second_claim);
        }
        let unit = self.offset / self.reader.unit_bytes() as u64;
        Err(ImageLost(self.starts.map(|start| self.reader.lba(start + unit).0)))
    }
}
