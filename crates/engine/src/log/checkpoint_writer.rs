//! The writing half of a checkpoint: the segment tables and the states of all stores, streamed into both copies of a checkpoint area.
//!
//! ```text
//!   store 0                                                  store 1 …
//!   begin ─▶ page 0 ─▶ page 1 ─▶ … ─▶ finish: its state ─▶ begin ─▶ …      ─▶ flush ─▶ LogCheckpoint, for the superblock
//!   start of replay, level       lists, totals, durable through
//! ```
//! In: a [`SnapshotSource`] of each store, each of whose functions takes the lock of the store and holds it for one page at most. Out: images
//! ([`super::store_image`]) in the area that the last checkpoint does not have, and what the superblock says of them. Operations go on
//! meanwhile: a page may be newer than the start of replay, and replay sets the same entries again.
//!
//! Invariants: nothing is written outside of the area; the pages of a store have exactly the segments of its level at the start; the last
//! checkpoint stays valid until a superblock names the new one. Memory is that of one write, one page and the state of one store.
//! Tested in `checkpoint_writer_tests.rs`, under power loss at every event.

use super::hash_prefix::{HashLevel, SegmentNumber};
use super::log_layout::LogLayout;
use super::segment_ref::{SEGMENT_REF_BYTES, SegmentRef};
use super::store_image::{
    CheckpointId, PAGE_SEGMENTS, ReplayStart, STORE_IMAGE_HEADER_BYTES, StoreStart, append_page,
    append_store, store_image_bytes,
};
use super::superblock::LogCheckpoint;
use crate::EngineError;
use crate::common::image_stream::ImageWriter;
use crate::common::work_slice::WorkSlice;
use octokv_base::Lba;
use octokv_device::{Device, DeviceError};

/// What a checkpoint takes of a store before its first page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SnapshotStart {
    /// The partition.
    pub partition: u32,
    /// The state of linear hashing: the pages have its segments.
    pub level: HashLevel,
    /// The first image that is not published: the pages may lack it.
    pub replay: ReplayStart,
}

/// A store of which a checkpoint is written. Each function takes the lock of the store, and does not wait.
pub trait SnapshotSource {
    /// The state before the first page. From here on the store keeps the key chunks from the start of replay on.
    fn begin(&self) -> SnapshotStart;
    /// Appends the present entries of a page of the segment table ([`super::segment_table::LogSegmentTable::copy_page`]). The page has at
    /// least the segments that it had at the start.
    fn copy_page(&self, page: usize, entries: &mut Vec<u8>);
    /// The state behind the last page: lists and totals of this moment; partition, level and replay as `start` has them.
    fn finish(&self, start: &SnapshotStart) -> StoreStart;
}

impl<S: SnapshotSource + ?Sized> SnapshotSource for &S {
    fn begin(&self) -> SnapshotStart {
        (**self).begin()
    }

    fn copy_page(&self, page: usize, entries: &mut Vec<u8>) {
        (**self).copy_page(page, entries);
    }

    fn finish(&self, start: &SnapshotStart) -> StoreStart {
        (**self).finish(start)
    }
}

/// Where a checkpoint is written, and what it is called.
#[derive(Clone, Copy, Debug)]
pub struct CheckpointTarget {
    /// The regions of the volume.
    pub layout: LogLayout,
    /// Volume and number of the checkpoint, which is above that of the last one and of all that failed since the opening.
    pub id: CheckpointId,
    /// The checkpoint of the durable superblock.
    pub last: LogCheckpoint,
    /// The present opening.
    pub incarnation: u32,
}

/// The most segments of all stores together whose checkpoint fits an area, whatever lists these stores have: with as many, no segment is
/// split.
pub fn segments_max(layout: &LogLayout, stores: u32) -> u64 {
    let area_bytes = layout.area_units * u64::from(layout.unit_bytes);
    // The last page of a store has a header as the others, however few segments.
    let of_store = store_image_bytes(0, 0, 0) + STORE_IMAGE_HEADER_BYTES as u64;
    // A chunk is in one list; those of value chunks have the longest elements.
    let of_chunks = store_image_bytes(0, layout.chunks as usize, 0) - store_image_bytes(0, 0, 0);
    let pages_bytes = area_bytes.saturating_sub(u64::from(stores) * of_store + of_chunks);
    let page_bytes = (STORE_IMAGE_HEADER_BYTES + PAGE_SEGMENTS * SEGMENT_REF_BYTES) as u64;
    // Whole pages and, in their proportion, the segments of one more.
    (u128::from(pages_bytes) * PAGE_SEGMENTS as u128 / u128::from(page_bytes)) as u64
}

/// Writes a checkpoint of all stores of a volume, and gives what its superblock says of it, once the images are durable. REQUIRES: no other
/// checkpoint of the volume is being written. If this is dropped, its writes may still reach the area, so that no other checkpoint may be
/// written until the volume is opened again.
///
/// # Errors
/// The device's; [`DeviceError::NoSpace`] if the images exceed the area. The last checkpoint is valid.
///
/// # Panics
/// If a store gives fewer segments than at its start, or a state that could not be loaded again.
pub async fn write_checkpoint<S: SnapshotSource>(
    device: &dyn Device,
    target: &CheckpointTarget,
    stores: impl IntoIterator<Item = S>,
) -> Result<LogCheckpoint, EngineError> {
    let layout = &target.layout;
    let area = target.last.next_area();
    let unit_blocks = u64::from(layout.unit_bytes / device.geometry().block_bytes);
    let starts = [0, 1].map(|copy| Lba(layout.area_start_unit(area, copy) * unit_blocks));
    let mut stream = AreaStream {
        writer: ImageWriter::new(device, starts, layout.unit_bytes as usize),
        bytes: 0,
        bytes_max: layout.area_units * u64::from(layout.unit_bytes),
        slice: WorkSlice::default(),
    };
    let mut count = 0;
    for store in stores {
        write_store(&mut stream, target, &store).await?;
        count += 1;
    }
    let bytes = stream.writer.finish().await?;
    device.flush().await.result?;
    let id = target.id.checkpoint_id;
    Ok(LogCheckpoint { area: Some(area), id, incarnation: target.incarnation, bytes, stores: count })
}

/// Writes the pages of a store and its state.
async fn write_store(
    stream: &mut AreaStream<'_>,
    target: &CheckpointTarget,
    store: &impl SnapshotSource,
) -> Result<(), EngineError> {
    let start = store.begin();
    let mut entries = Vec::with_capacity(PAGE_SEGMENTS * SEGMENT_REF_BYTES);
    let mut first = 0;
    while first < start.level.segments() {
        entries.clear();
        store.copy_page((first / PAGE_SEGMENTS as u64) as usize, &mut entries);
        // Splits since the start have added segments to the last page.
        let count = (start.level.segments() - first).min(PAGE_SEGMENTS as u64);
        let (segments, _) = entries.as_chunks::<SEGMENT_REF_BYTES>();
        let segments = segments[..count as usize].iter().map(|&bytes| SegmentRef::from_bytes(bytes));
        // Segments have 32 bits.
        let first_segment = SegmentNumber(first as u32);
        let append =
            |bytes: &mut Vec<u8>| append_page(bytes, target.id, start.partition, first_segment, segments);
        stream.append(append).await?;
        first += count;
    }
    let state = store.finish(&start);
    let of_start = SnapshotStart { partition: state.partition, level: state.level, replay: state.replay };
    assert_eq!(of_start, start, "the state behind the pages");
    assert_eq!(state.check(&target.layout), Ok(()), "{state:?}");
    stream.append(|bytes| append_store(bytes, target.id, &state)).await
}

/// The images so far, which must not exceed the area.
struct AreaStream<'a> {
    writer: ImageWriter<'a>,
    bytes: u64,
    bytes_max: u64,
    slice: WorkSlice,
}

impl AreaStream<'_> {
    async fn append(&mut self, append: impl FnOnce(&mut Vec<u8>)) -> Result<(), EngineError> {
        let before = self.writer.pending().len();
        append(self.writer.pending());
        let bytes = (self.writer.pending().len() - before) as u64;
        self.bytes += bytes;
        if self.bytes > self.bytes_max {
            return Err(DeviceError::NoSpace.into());
        }
        self.writer.write_chunks().await?;
        self.slice.count_bytes(bytes).await;
        Ok(())
    }
}
