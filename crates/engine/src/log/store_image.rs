//! Images of a checkpoint: of each store, the pages of its segment table and then its state, as a stream in two copies
//! ([`crate::common::image_stream`]).
//!
//! ```text
//!   header     0 magic "OKVS"         24 partition u32            32 first segment u32
//!              4 CRC-32C u32          28 kind u8: 0 page, 1 store 36 count u32: entries of a page, bytes of a store's body
//!              8 volume u64           29 zeros                    40 zero u64
//!             16 checkpoint u64
//!   page      48 segments, 6 bytes each as crate::log::segment_ref draws them; 8,192 but for the last page
//!   store     48 first position u128  80 device u16 (0)           88 segments u32
//!             64 last position u128   82 level u8, 83 counted u8  92 state, as StoreBodyLayout has it
//!                                     84 split u32              188 key chunks, value chunks, pinned chunks
//! ```
//! The checksum covers bytes 8 to the end of the image. Level, split and the start of replay are those of the moment before the first page
//! was copied, lists and totals those of the moment behind the last: pages may be newer than the start, and replay sets the same entries
//! again. Integers are little-endian.
//!
//! Invariants: loading takes any bytes; what it gives agrees with itself and with the layout. Whether two stores claim a chunk is for
//! recovery to find. Tested in `store_image_tests.rs`.

use super::hash_prefix::{HashLevel, SegmentNumber};
use super::log_layout::{CHUNKS_MAX, LogLayout};
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::segment_buckets::{PreviousImage, SEQUENCE_LIMIT, StoreTotals, TOTAL_LIMIT, ValueTailPlace};
use super::segment_ref::{CHAIN_MAX, SEGMENT_REF_BYTES, SegmentRef};
use crate::common::image_stream::ImageFormat;
use octokv_base::map::FxHashSet;
use octokv_base::{RingPosition, RingRange, crc32c};
use std::mem::offset_of;
use zerocopy::byteorder::little_endian::{U16, U32, U64, U128};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The segments of a page but for the last.
pub const PAGE_SEGMENTS: usize = 8192;
/// The fixed part of an image, in bytes.
pub const STORE_IMAGE_HEADER_BYTES: usize = 48;

const MAGIC: [u8; 4] = *b"OKVS";
const KIND_PAGE: u8 = 0;
const KIND_STORE: u8 = 1;
/// Longer than the body of any store: each chunk is in at most one list.
const BODY_BYTES_MAX: usize =
    size_of::<StoreBodyLayout>() + CHUNKS_MAX as usize * size_of::<ValueChunkLayout>();
/// The first byte that the checksum covers.
const CHECKED_FROM: usize = offset_of!(StoreImageLayout, volume_id);

/// The header of an image on the device, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct StoreImageLayout {
    magic: [u8; 4],
    crc: U32,
    volume_id: U64,
    checkpoint_id: U64,
    partition: U32,
    kind: u8,
    zeros: [u8; 3],
    first_segment: U32,
    count: U32,
    zero: U64,
}
const _: () = assert!(size_of::<StoreImageLayout>() == STORE_IMAGE_HEADER_BYTES);
const _: () = assert!(CHECKED_FROM == 8);

/// The body of a store's image without its lists, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct StoreBodyLayout {
    first_position: U128,
    last_position: U128,
    device: U16,
    level: u8,
    is_counted: u8,
    split: U32,
    segments: U32,
    replay_sequence: U64,
    replay_index: U32,
    replay_unit: U32,
    replay_incarnation: U32,
    previous_segment: U32,
    previous_chain: u8,
    zeros: [u8; 3],
    durable_through: U64,
    key_head: U32,
    value_head: U32,
    value_tail_index: U32,
    value_tail_granule: U32,
    next_key_chunk: U32,
    next_value_chunk: U32,
    keys: U64,
    live_granules: U64,
    entry_bytes: U64,
    key_chunks: U32,
    value_chunks: U32,
    pinned_chunks: U32,
}
const _: () = assert!(size_of::<StoreBodyLayout>() == 140);
const _: () = assert!(offset_of!(StoreBodyLayout, replay_sequence) == 44);
const _: () = assert!(offset_of!(StoreBodyLayout, durable_through) == 72);
const _: () = assert!(offset_of!(StoreBodyLayout, keys) == 104);

/// A value chunk in a store's image, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct ValueChunkLayout {
    chunk: U32,
    live_records: U32,
    live_granules: U32,
}

/// A pinned chunk in a store's image, little-endian.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, Clone, Copy)]
#[repr(C)]
struct PinnedChunkLayout {
    index: U32,
    chunk: U32,
    /// 0 key log, 1 value log.
    log: U32,
}

/// The checkpoint that an image belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointId {
    /// The volume.
    pub volume_id: u64,
    /// The number of the checkpoint in it.
    pub checkpoint_id: u64,
}

/// Where the replay of a key log begins: at the first image that the checkpoint's pages may lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplayStart {
    /// The number of that image, below [`SEQUENCE_LIMIT`].
    pub sequence: u64,
    /// The chunk in which it is expected.
    pub index: ChunkIndex,
    /// The unit of the chunk at which it is expected; the end of the chunk if nothing fits behind the image before.
    pub unit: u32,
    /// The incarnation of the image before: later ones are not older.
    pub incarnation: u32,
    /// The image before.
    pub previous: PreviousImage,
}

/// A chunk of a value log, and what of it is referred to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueChunkUse {
    /// The chunk.
    pub chunk: ChunkNumber,
    /// The records that entries refer to.
    pub live_records: u32,
    /// Their granules in the chunk.
    pub live_granules: u32,
}

/// A chunk in front of the head of its log that is still in use, since a device error prevents that it is emptied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PinnedChunk {
    /// Its log.
    pub log: LogKind,
    /// The chunk in its log, below the head.
    pub index: ChunkIndex,
    /// The chunk on the device.
    pub chunk: ChunkNumber,
}

/// The state of a store in a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreStart {
    /// The partition.
    pub partition: u32,
    /// The part of the ring whose keys it has.
    pub range: RingRange,
    /// The state of linear hashing at the start of replay: the segments that the pages have.
    pub level: HashLevel,
    /// Whether the counts of the value chunks are exact.
    pub is_counted: bool,
    /// Where replay begins.
    pub replay: ReplayStart,
    /// The last image that is durable with the checkpoint; at least the one before the start of replay.
    pub durable_through: u64,
    /// The lowest chunk in use of the key log.
    pub key_head: ChunkIndex,
    /// The lowest chunk in use of the value log.
    pub value_head: ChunkIndex,
    /// Where the values end.
    pub value_tail: ValueTailPlace,
    /// The chunk that will follow the last of the key log.
    pub next_key_chunk: ChunkNumber,
    /// The chunk that will follow the last of the value log.
    pub next_value_chunk: ChunkNumber,
    /// The totals of the store.
    pub totals: StoreTotals,
    /// The chunks of the key log, from the head on.
    pub key_chunks: Vec<ChunkNumber>,
    /// The chunks of the value log, from the head on to that of the tail.
    pub value_chunks: Vec<ValueChunkUse>,
    /// The pinned chunks of both logs.
    pub pinned: Vec<PinnedChunk>,
}

/// Why the state of a store cannot be, although its checksum is right: a bug wrote it, or an attacker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreImageProblem {
    /// A field has a value that this version does not define.
    #[error("an image of a store has unknown values")]
    Unknown,
    /// The range of the ring is reversed.
    #[error("an image of a store has a reversed range")]
    Range,
    /// No state of linear hashing, or other segments than the pages have.
    #[error("an image of a store contradicts the pages of its segments")]
    Segments,
    /// A segment is locked, on another device or half empty.
    #[error("a page of segments has one that is nowhere")]
    SegmentPlace,
    /// Sequence numbers, totals or the image before are impossible.
    #[error("an image of a store has impossible counts")]
    Counts,
    /// A head, a tail or the start of replay is not in its log.
    #[error("an image of a store has places outside of its logs")]
    Places,
    /// A chunk is not one of the volume, or is listed twice.
    #[error("an image of a store lists a chunk that is none, or one twice")]
    Chunks,
    /// The lists are longer or shorter than the image.
    #[error("an image of a store has lists of another length")]
    Length,
    /// A partition from the number of stores on.
    #[error("a store has a partition that the volume does not have")]
    Partition,
    /// Two stores of one partition.
    #[error("two stores have the same partition")]
    SamePartition,
    /// Stores are missing.
    #[error("the images end before the last store")]
    Incomplete,
}

impl StoreStart {
    /// Whether a store of this volume may have this state.
    ///
    /// # Errors
    /// What is impossible about it.
    pub fn check(&self, layout: &LogLayout) -> Result<(), StoreImageProblem> {
        if !self.level.is_valid() {
            return Err(StoreImageProblem::Segments);
        }
        let StoreTotals { keys, live_granules, entry_bytes } = self.totals;
        let has_totals = [keys, live_granules, entry_bytes].iter().all(|&total| total < TOTAL_LIMIT);
        let has_sequences = self.replay.sequence < SEQUENCE_LIMIT
            && self.durable_through < SEQUENCE_LIMIT
            && self.durable_through.saturating_add(1) >= self.replay.sequence;
        if !has_totals || !has_sequences || self.replay.previous.chain > CHAIN_MAX {
            return Err(StoreImageProblem::Counts);
        }
        self.check_places(layout)?;
        self.check_chunks(layout)
    }

    fn check_places(&self, layout: &LogLayout) -> Result<(), StoreImageProblem> {
        // The index behind the last chunk, which is still an index.
        let end = |head: ChunkIndex, chunks: usize| u32::try_from(chunks).ok()?.checked_add(head.0);
        let key_end = end(self.key_head, self.key_chunks.len()).ok_or(StoreImageProblem::Places)?;
        let value_end = end(self.value_head, self.value_chunks.len()).ok_or(StoreImageProblem::Places)?;
        let is_inside = (self.key_head.0..key_end).contains(&self.replay.index.0)
            && self.replay.unit <= layout.chunk_units
            && !self.value_chunks.is_empty()
            && self.value_tail.index.0 == value_end - 1
            && self.value_tail.granule <= layout.chunk_granules();
        let is_pinned_below = self.pinned.iter().all(|pinned| match pinned.log {
            LogKind::Keys => pinned.index < self.key_head,
            LogKind::Values => pinned.index < self.value_head,
        });
        (is_inside && is_pinned_below).then_some(()).ok_or(StoreImageProblem::Places)
    }

    fn check_chunks(&self, layout: &LogLayout) -> Result<(), StoreImageProblem> {
        let mut seen = FxHashSet::default();
        let are_distinct = self.chunks().all(|chunk| chunk.0 < layout.chunks && seen.insert(chunk));
        let has_uses = self.value_chunks.iter().all(|of| {
            let granules = layout.chunk_granules();
            of.live_granules <= granules && of.live_records <= granules
        });
        (are_distinct && has_uses).then_some(()).ok_or(StoreImageProblem::Chunks)
    }

    /// Every chunk of the store: of both logs, pinned and reserved.
    pub fn chunks(&self) -> impl Iterator<Item = ChunkNumber> {
        let values = self.value_chunks.iter().map(|of| of.chunk);
        let pinned = self.pinned.iter().map(|pinned| pinned.chunk);
        let reserved = [self.next_key_chunk, self.next_value_chunk];
        self.key_chunks.iter().copied().chain(values).chain(pinned).chain(reserved)
    }
}

/// Appends an image of a page: the segments from `first` on.
///
/// # Panics
/// If there are more than [`PAGE_SEGMENTS`].
pub fn append_page(
    bytes: &mut Vec<u8>,
    checkpoint: CheckpointId,
    partition: u32,
    first: SegmentNumber,
    segments: impl Iterator<Item = SegmentRef>,
) {
    let start = bytes.len();
    bytes.resize(start + STORE_IMAGE_HEADER_BYTES, 0);
    // Who holds a segment while it is written to a checkpoint does not after the next opening.
    segments.for_each(|segment| bytes.extend_from_slice(&segment.with_lock(false).to_bytes()));
    let count = (bytes.len() - start - STORE_IMAGE_HEADER_BYTES) / SEGMENT_REF_BYTES;
    assert!(count <= PAGE_SEGMENTS, "a page of {count} segments");
    seal_image(&mut bytes[start..], checkpoint, partition, KIND_PAGE, first.0, count);
}

/// The bytes of the image of a store with so many chunks in its lists, without its pages.
pub fn store_image_bytes(key_chunks: usize, value_chunks: usize, pinned_chunks: usize) -> u64 {
    let lists = key_chunks * size_of::<U32>()
        + value_chunks * size_of::<ValueChunkLayout>()
        + pinned_chunks * size_of::<PinnedChunkLayout>();
    (STORE_IMAGE_HEADER_BYTES + size_of::<StoreBodyLayout>() + lists) as u64
}

/// Appends the image of a store. Its pages come before it.
pub fn append_store(bytes: &mut Vec<u8>, checkpoint: CheckpointId, store: &StoreStart) {
    let start = bytes.len();
    bytes.resize(start + STORE_IMAGE_HEADER_BYTES, 0);
    let body = StoreBodyLayout {
        first_position: store.range.first().0.into(),
        last_position: store.range.last().0.into(),
        device: U16::ZERO,
        level: store.level.level,
        is_counted: store.is_counted.into(),
        split: store.level.split.into(),
        segments: (store.level.segments() as u32).into(),
        replay_sequence: store.replay.sequence.into(),
        replay_index: store.replay.index.0.into(),
        replay_unit: store.replay.unit.into(),
        replay_incarnation: store.replay.incarnation.into(),
        previous_segment: store.replay.previous.segment.0.into(),
        previous_chain: store.replay.previous.chain,
        zeros: [0; 3],
        durable_through: store.durable_through.into(),
        key_head: store.key_head.0.into(),
        value_head: store.value_head.0.into(),
        value_tail_index: store.value_tail.index.0.into(),
        value_tail_granule: store.value_tail.granule.into(),
        next_key_chunk: store.next_key_chunk.0.into(),
        next_value_chunk: store.next_value_chunk.0.into(),
        keys: store.totals.keys.into(),
        live_granules: store.totals.live_granules.into(),
        entry_bytes: store.totals.entry_bytes.into(),
        key_chunks: (store.key_chunks.len() as u32).into(),
        value_chunks: (store.value_chunks.len() as u32).into(),
        pinned_chunks: (store.pinned.len() as u32).into(),
    };
    bytes.extend_from_slice(body.as_bytes());
    store.key_chunks.iter().for_each(|chunk| bytes.extend_from_slice(&chunk.0.to_le_bytes()));
    for of in &store.value_chunks {
        let layout = ValueChunkLayout {
            chunk: of.chunk.0.into(),
            live_records: of.live_records.into(),
            live_granules: of.live_granules.into(),
        };
        bytes.extend_from_slice(layout.as_bytes());
    }
    for pinned in &store.pinned {
        let log = match pinned.log {
            LogKind::Keys => U32::ZERO,
            LogKind::Values => U32::new(1),
        };
        let layout = PinnedChunkLayout { index: pinned.index.0.into(), chunk: pinned.chunk.0.into(), log };
        bytes.extend_from_slice(layout.as_bytes());
    }
    let count = bytes.len() - start - STORE_IMAGE_HEADER_BYTES;
    seal_image(&mut bytes[start..], checkpoint, store.partition, KIND_STORE, 0, count);
}

fn seal_image(
    image: &mut [u8],
    checkpoint: CheckpointId,
    partition: u32,
    kind: u8,
    first_segment: u32,
    count: usize,
) {
    let header = StoreImageLayout {
        magic: MAGIC,
        crc: U32::ZERO,
        volume_id: checkpoint.volume_id.into(),
        checkpoint_id: checkpoint.checkpoint_id.into(),
        partition: partition.into(),
        kind,
        zeros: [0; 3],
        first_segment: first_segment.into(),
        count: (count as u32).into(),
        zero: U64::ZERO,
    };
    image[..STORE_IMAGE_HEADER_BYTES].copy_from_slice(header.as_bytes());
    let crc = crc32c(&image[CHECKED_FROM..]);
    image[4..CHECKED_FROM].copy_from_slice(&crc.to_le_bytes());
}

/// An image of a checkpoint, of unknown content.
pub struct StoreImageFormat;

impl ImageFormat for StoreImageFormat {
    const HEADER_BYTES: usize = STORE_IMAGE_HEADER_BYTES;

    fn claimed_bytes(bytes: &[u8]) -> Option<usize> {
        let (header, _) = StoreImageLayout::ref_from_prefix(bytes).ok()?;
        let count = header.count.get() as usize;
        let body_bytes = match header.kind {
            KIND_PAGE => Some(count * SEGMENT_REF_BYTES).filter(|_| count <= PAGE_SEGMENTS),
            KIND_STORE => Some(count).filter(|&bytes| bytes <= BODY_BYTES_MAX),
            _ => None,
        };
        (header.magic == MAGIC).then_some(STORE_IMAGE_HEADER_BYTES + body_bytes?)
    }
}

/// A store of a checkpoint, loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedStore {
    /// Its state.
    pub start: StoreStart,
    /// The pages of its segment table, [`PAGE_SEGMENTS`] segments in each but the last, 6 bytes each and all valid.
    pub pages: Vec<Vec<u8>>,
}

/// Puts the stores of a checkpoint together from its images.
pub struct StoreImageLoader {
    checkpoint: CheckpointId,
    layout: LogLayout,
    stores: u32,
    loaded: Vec<LoadedStore>,
    /// The pages since the last store, of the partition of the next.
    pages: Vec<Vec<u8>>,
    pages_partition: u32,
    problem: Option<StoreImageProblem>,
}

impl StoreImageLoader {
    /// Expects the first image of a checkpoint with so many stores.
    pub fn new(checkpoint: CheckpointId, layout: LogLayout, stores: u32) -> StoreImageLoader {
        let (loaded, pages) = (Vec::new(), Vec::new());
        StoreImageLoader { checkpoint, layout, stores, loaded, pages, pages_partition: 0, problem: None }
    }

    /// Whether the last image was loaded, or a problem found: no more images are wanted.
    pub fn is_done(&self) -> bool {
        self.loaded.len() as u64 >= u64::from(self.stores) || self.problem.is_some()
    }

    /// Loads the image at the front of `bytes`, and gives its length; `None` if it is not the next image, intact. REQUIRES: not done.
    pub fn load(&mut self, bytes: &[u8]) -> Option<usize> {
        assert!(!self.is_done(), "more images than there are");
        let image = bytes.get(..StoreImageFormat::claimed_bytes(bytes)?)?;
        let (header, body) = StoreImageLayout::ref_from_prefix(image).ok()?;
        let partition = header.partition.get();
        let segments = self.pages.len() * PAGE_SEGMENTS;
        let is_next = self.pages.is_empty() || self.pages_partition == partition;
        if crc32c(&image[CHECKED_FROM..]) != header.crc.get()
            || header.volume_id.get() != self.checkpoint.volume_id
            || header.checkpoint_id.get() != self.checkpoint.checkpoint_id
            || !is_next
            || header.kind == KIND_PAGE && header.first_segment.get() as usize != segments
        {
            return None;
        }
        let loaded = match header.kind {
            KIND_PAGE => self.load_page(partition, body),
            _ => self.load_store(partition, body),
        };
        self.problem = loaded.err();
        Some(image.len())
    }

    fn load_page(&mut self, partition: u32, body: &[u8]) -> Result<(), StoreImageProblem> {
        // Only the last page may have fewer segments.
        let is_behind_full =
            self.pages.last().is_none_or(|page| page.len() == PAGE_SEGMENTS * SEGMENT_REF_BYTES);
        if !is_behind_full || body.is_empty() {
            return Err(StoreImageProblem::Segments);
        }
        let (segments, _) = body.as_chunks::<SEGMENT_REF_BYTES>();
        if !segments.iter().all(|&segment| SegmentRef::from_bytes(segment).is_valid()) {
            return Err(StoreImageProblem::SegmentPlace);
        }
        self.pages.push(body.to_vec());
        self.pages_partition = partition;
        Ok(())
    }

    fn load_store(&mut self, partition: u32, body: &[u8]) -> Result<(), StoreImageProblem> {
        let start = decode_store(partition, body)?;
        start.check(&self.layout)?;
        let pages = std::mem::take(&mut self.pages);
        let segments = pages.iter().map(|page| page.len() / SEGMENT_REF_BYTES).sum::<usize>();
        if segments as u64 != start.level.segments() {
            return Err(StoreImageProblem::Segments);
        }
        if partition >= self.stores {
            return Err(StoreImageProblem::Partition);
        }
        if self.loaded.iter().any(|store| store.start.partition == partition) {
            return Err(StoreImageProblem::SamePartition);
        }
        self.loaded.push(LoadedStore { start, pages });
        Ok(())
    }

    /// The stores, in the order of the images.
    ///
    /// # Errors
    /// What is wrong with the images.
    pub fn finish(self) -> Result<Vec<LoadedStore>, StoreImageProblem> {
        match self.problem {
            Some(problem) => Err(problem),
            None if !self.is_done() || !self.pages.is_empty() => Err(StoreImageProblem::Incomplete),
            None => Ok(self.loaded),
        }
    }
}

/// The state of a store, not yet checked against a layout.
fn decode_store(partition: u32, body: &[u8]) -> Result<StoreStart, StoreImageProblem> {
    let length = StoreImageProblem::Length;
    let (layout, lists) = StoreBodyLayout::ref_from_prefix(body).map_err(|_| length)?;
    let count = |count: U32| count.get() as usize;
    let (keys, lists) =
        <[U32]>::ref_from_prefix_with_elems(lists, count(layout.key_chunks)).map_err(|_| length)?;
    let (values, lists) = <[ValueChunkLayout]>::ref_from_prefix_with_elems(lists, count(layout.value_chunks))
        .map_err(|_| length)?;
    let pinned = <[PinnedChunkLayout]>::ref_from_bytes_with_elems(lists, count(layout.pinned_chunks))
        .map_err(|_| length)?;
    if layout.device.get() != 0 || layout.is_counted > 1 || pinned.iter().any(|pinned| pinned.log.get() > 1) {
        return Err(StoreImageProblem::Unknown);
    }
    let level = HashLevel { level: layout.level, split: layout.split.get() };
    if !level.is_valid() || level.segments() != u64::from(layout.segments.get()) {
        return Err(StoreImageProblem::Segments);
    }
    let positions =
        [layout.first_position, layout.last_position].map(|position| RingPosition(position.get()));
    Ok(StoreStart {
        partition,
        range: RingRange::new(positions[0], positions[1]).ok_or(StoreImageProblem::Range)?,
        level,
        is_counted: layout.is_counted == 1,
        replay: ReplayStart {
            sequence: layout.replay_sequence.get(),
            index: ChunkIndex(layout.replay_index.get()),
            unit: layout.replay_unit.get(),
            incarnation: layout.replay_incarnation.get(),
            previous: PreviousImage {
                segment: SegmentNumber(layout.previous_segment.get()),
                chain: layout.previous_chain,
            },
        },
        durable_through: layout.durable_through.get(),
        key_head: ChunkIndex(layout.key_head.get()),
        value_head: ChunkIndex(layout.value_head.get()),
        value_tail: ValueTailPlace {
            index: ChunkIndex(layout.value_tail_index.get()),
            granule: layout.value_tail_granule.get(),
        },
        next_key_chunk: ChunkNumber(layout.next_key_chunk.get()),
        next_value_chunk: ChunkNumber(layout.next_value_chunk.get()),
        totals: StoreTotals {
            keys: layout.keys.get(),
            live_granules: layout.live_granules.get(),
            entry_bytes: layout.entry_bytes.get(),
        },
        key_chunks: keys.iter().map(|chunk| ChunkNumber(chunk.get())).collect(),
        value_chunks: values.iter().map(ValueChunkLayout::decode).collect(),
        pinned: pinned.iter().map(PinnedChunkLayout::decode).collect(),
    })
}

impl ValueChunkLayout {
    fn decode(&self) -> ValueChunkUse {
        ValueChunkUse {
            chunk: ChunkNumber(self.chunk.get()),
            live_records: self.live_records.get(),
            live_granules: self.live_granules.get(),
        }
    }
}

impl PinnedChunkLayout {
    fn decode(&self) -> PinnedChunk {
        let log = if self.log.get() == 0 { LogKind::Keys } else { LogKind::Values };
        PinnedChunk { log, index: ChunkIndex(self.index.get()), chunk: ChunkNumber(self.chunk.get()) }
    }
}
