//! Recovery: reads a volume of the log engine after any crash.
//!
//! ```text
//!   newest superblock ─▶ checkpoint images ─▶ key logs from the checkpoint on, with the values that are not proven ─▶ chunk pool
//!        (then, by the opener: superblock of a new incarnation ─▶ [checkpoint] ─▶ open)
//! ```
//! In: a device. Out: a [`RecoveredVolume`]. No step reads the whole device, or a value log.
//!
//! Invariants: nothing is written; each chunk in use has one owner, except for those of lost stores, which yield to the others; the counts of
//! live images are those of the segment tables. What the opener has to keep: it writes a superblock with the next incarnation before anything
//! else; a checkpoint states its own incarnation, which images that the recovery rejected do not have; it writes lost stores with
//! [`LOST_STORE_DURABLE_THROUGH`](super::replay::LOST_STORE_DURABLE_THROUGH); a pinned chunk is released only when a checkpoint without it is
//! durable.
//! Tested in `recovery_tests.rs`; the replay of a store in `replay_tests.rs`.

use super::chunk_log::ChunkLog;
use super::chunk_pool::{ChunkOwner, ChunkPool, ChunkState};
use super::hash_prefix::{HashLevel, initial_range};
use super::log_layout::{LogLayout, STORE_CHUNKS_MIN};
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::replay::{RecoveredLog, ReplayedStore, RetiredChunk, replay};
use super::sealed_sums::LiveContents;
use super::segment_buckets::{PreviousImage, StoreTotals, ValueTailPlace};
use super::segment_ref::SEGMENT_REF_BYTES;
use super::segment_table::LogSegmentTable;
use super::space_limits::{ChunkPurpose, SpaceLimits};
use super::store_image::{
    CheckpointId, LoadedStore, PinnedChunk, ReplayStart, StoreImageFormat, StoreImageLoader, StoreStart,
    ValueChunkUse,
};
use super::superblock::LogSuperblock;
use crate::common::image_stream::{ImageLost, ImageReader};
use crate::common::superblock_io::read_superblock;
use crate::common::unit_reader::UnitReader;
use crate::open_error::{IndexMismatch, MetadataStructure, OpenError};
use futures_util::stream::{self, StreamExt};
use octokv_base::RingRange;
use octokv_base::map::FxHashMap;
use octokv_device::{Device, DeviceError};

/// Stores that are replayed at the same time.
const STORES_AT_ONCE: usize = 32;
/// The chunk behind the first of a new store: no image names one yet.
const NO_CHUNK: ChunkNumber = ChunkNumber(u32::MAX);

/// A store of a volume that recovery has read.
pub struct RecoveredStore {
    /// The partition.
    pub partition: u32,
    /// The part of the ring whose keys it has.
    pub range: RingRange,
    /// The segments and their newest images.
    pub table: LogSegmentTable,
    /// The key log. Its tail is directly behind the last accepted image.
    pub keys: ChunkLog,
    /// The value log. Its tail begins at the next unit behind the last value.
    pub values: ChunkLog,
    /// Where the next value lies: the same place as the tail of the value log, in granules.
    pub value_tail: ValueTailPlace,
    /// Retired key chunks, ascending: the pool may release them when the next checkpoint is durable.
    pub retired: Vec<RetiredChunk>,
    /// The pinned chunks of both logs.
    pub pinned: Vec<PinnedChunk>,
    /// Keys and bytes of the store.
    pub totals: StoreTotals,
    /// The number of the last accepted image; 0 without one.
    pub last_sequence: u64,
    /// The last accepted image, as the next one has to name it.
    pub previous: PreviousImage,
    /// The last image that is known to be durable, at most `last_sequence`. If `needs_checkpoint` of the volume, all are with that checkpoint.
    pub durable_through: u64,
    /// Images that were replayed.
    pub images: u64,
    /// Images at the end of the log that were rejected, as a value or a half of a split was not there.
    pub rejected: u64,
    /// Images of which buckets are damaged or could not be read.
    pub damaged: u64,
    /// Whether any segment may be older than what was acknowledged: the store fails every operation with `Corrupt`, nothing is written to its
    /// logs, and checkpoints write it with [`super::replay::LOST_STORE_DURABLE_THROUGH`].
    pub is_lost: bool,
}

/// A volume as recovery has read it. Nothing has been written.
pub struct RecoveredVolume {
    /// The newest superblock, with the incarnation of the last opening.
    pub superblock: LogSuperblock,
    /// The chunks of the device, those in use adopted. It has the limits of space, too.
    pub pool: ChunkPool,
    /// The stores, in the order of the checkpoint, or of their numbers in a volume without one.
    pub stores: Vec<RecoveredStore>,
    /// Metadata structures of which one copy is damaged.
    pub damaged_copies: u64,
    /// Whether a checkpoint has to be written, of the new incarnation, before anything else is and before the volume serves.
    pub needs_checkpoint: bool,
}

/// Reads a volume: superblock, checkpoint, key logs from the checkpoint on, and the values that are not proven. Writes nothing.
///
/// # Errors
/// [`OpenError`], if there is no volume, it is damaged beyond what costs single keys or stores, or the device fails.
pub async fn recover_volume(device: &dyn Device) -> Result<RecoveredVolume, OpenError> {
    let (superblock, damaged_superblocks) = read_superblock::<LogSuperblock>(device).await?;
    superblock.layout.check_device(device.geometry())?;
    let reader = UnitReader::new(device, superblock.layout.unit_bytes);
    let (loaded, damaged_images) = load_stores(reader, &superblock).await?;
    let replays =
        loaded.into_iter().map(|store| replay(reader, &superblock.layout, superblock.volume_id, store));
    let replayed: Vec<_> = stream::iter(replays).buffered(STORES_AT_ONCE).collect().await;
    let mut replayed = replayed.into_iter().collect::<Result<Vec<_>, _>>()?;
    let pool = adopt_chunks(reader, &superblock, &replayed)?;
    let damaged_copies = damaged_superblocks + damaged_images;
    let mut needs_checkpoint = damaged_copies > 0;
    for store in &mut replayed {
        // Nothing on the device names the chunks that it takes.
        needs_checkpoint |= take_next_chunks(&pool, store)? || store.needs_checkpoint;
    }
    let stores = replayed.into_iter().map(RecoveredStore::of).collect();
    Ok(RecoveredVolume { superblock, pool, stores, damaged_copies, needs_checkpoint })
}

/// The stores of the checkpoint, or the new ones of a volume without one, and the damaged copies of images.
pub(super) async fn load_stores(
    reader: UnitReader<'_>,
    superblock: &LogSuperblock,
) -> Result<(Vec<LoadedStore>, u64), OpenError> {
    let (layout, checkpoint) = (superblock.layout, superblock.checkpoint);
    let Some(area) = checkpoint.area else {
        return Ok(((0..layout.stores).map(|store| new_store(store, &layout)).collect(), 0));
    };
    let starts = [0, 1].map(|copy| layout.area_start_unit(area, copy));
    let mut images = ImageReader::new(reader, starts, checkpoint.bytes);
    let id = CheckpointId { volume_id: superblock.volume_id, checkpoint_id: checkpoint.id };
    let mut loader = StoreImageLoader::new(id, layout, checkpoint.stores);
    let mut image = 0;
    while !loader.is_done() {
        let loaded = images.next::<StoreImageFormat>(|bytes| loader.load(bytes)).await;
        loaded.map_err(|ImageLost(lbas)| OpenError::CopiesUnreadable {
            structure: MetadataStructure::CheckpointImage { partition: image },
            lbas,
        })?;
        image += 1;
    }
    let lba = reader.lba(starts[0]).0;
    let mismatch = IndexMismatch::StoreImages;
    let mut stores = loader.finish().map_err(|_| OpenError::Inconsistent { lba, mismatch })?;
    // The logs have no images of earlier openings behind a checkpoint: those were rejected before it was written.
    for store in &mut stores {
        let replay = &mut store.start.replay;
        replay.incarnation = replay.incarnation.max(checkpoint.incarnation);
    }
    Ok((stores, images.damaged_copies()))
}

/// The state of an initial store in a volume without a checkpoint: without images, in the two chunks of its number.
fn new_store(store: u16, layout: &LogLayout) -> LoadedStore {
    let partition = u32::from(store);
    let value_chunk =
        ValueChunkUse { chunk: ChunkNumber(2 * partition + 1), live_records: 0, live_granules: 0 };
    let first = ChunkIndex(0);
    let start = StoreStart {
        partition,
        range: initial_range(store, layout.stores),
        level: HashLevel::FIRST,
        is_counted: true,
        replay: ReplayStart {
            sequence: 1,
            index: first,
            unit: 0,
            incarnation: 0,
            previous: PreviousImage::NONE,
        },
        durable_through: 0,
        key_head: first,
        value_head: first,
        value_tail: ValueTailPlace { index: first, granule: 0 },
        next_key_chunk: NO_CHUNK,
        next_value_chunk: NO_CHUNK,
        totals: StoreTotals::default(),
        key_chunks: vec![ChunkNumber(2 * partition)],
        value_chunks: vec![value_chunk],
        pinned: Vec::new(),
    };
    LoadedStore { start, pages: vec![vec![0; SEGMENT_REF_BYTES]] }
}

/// The limits of space of a volume.
fn space_limits(layout: &LogLayout, value_bytes_max: u32, stores: usize) -> SpaceLimits {
    let stores_max = layout.chunks / STORE_CHUNKS_MIN;
    let stores = u32::try_from(stores).unwrap_or(stores_max).clamp(1, stores_max);
    SpaceLimits::new(layout.chunks, stores, layout.record_chunks_max(value_bytes_max))
}

/// A pool with the chunks of all stores.
fn adopt_chunks(
    reader: UnitReader<'_>,
    superblock: &LogSuperblock,
    stores: &[ReplayedStore],
) -> Result<ChunkPool, OpenError> {
    let layout = &superblock.layout;
    let limits = space_limits(layout, superblock.value_bytes_max, stores.len());
    let pool = ChunkPool::new(layout.chunks_start_unit, layout.chunk_sizes(), limits);
    for store in stores.iter().filter(|store| !store.is_lost) {
        let live = live_images(reader, layout, store)?;
        for (chunk, state, owner, contents) in chunks_of(store, Some(&live)) {
            if !pool.adopt(chunk, state, owner, contents) {
                let lba = reader.lba(layout.unit_of(chunk, 0)).0;
                let mismatch = IndexMismatch::ChunkClaimedTwice { chunk: chunk.0 };
                return Err(OpenError::Inconsistent { lba, mismatch });
            }
        }
    }
    // A lost store may have freed chunks in images that are lost: others may have them.
    for store in stores.iter().filter(|store| store.is_lost) {
        for (chunk, state, owner, contents) in chunks_of(store, None) {
            let _ = pool.adopt(chunk, state, owner, contents);
        }
    }
    Ok(pool)
}

/// The live images of each chunk of a key log, pinned ones included.
fn live_images(
    reader: UnitReader<'_>,
    layout: &LogLayout,
    store: &ReplayedStore,
) -> Result<FxHashMap<ChunkNumber, LiveContents>, OpenError> {
    let pinned = store.pinned.iter().filter(|pinned| pinned.log == LogKind::Keys).map(|pinned| pinned.chunk);
    let chunks = store.keys.chunks.iter().copied().chain(pinned);
    let mut live: FxHashMap<_, _> = chunks.map(|chunk| (chunk, LiveContents::default())).collect();
    let tail = store.keys.chunks.last().copied();
    for (segment, image) in store.table.images() {
        let place = layout.place_of_unit(image.unit());
        let end_of = |chunk| if Some(chunk) == tail { store.keys.tail_unit } else { layout.chunk_units };
        let place = place.filter(|&(chunk, unit)| unit + u32::from(image.chain()) <= end_of(chunk));
        let Some(contents) = place.and_then(|(chunk, _)| live.get_mut(&chunk)) else {
            let mismatch = IndexMismatch::SegmentOutsideLog { segment: segment.0 };
            return Err(OpenError::Inconsistent { lba: reader.lba(image.unit()).0, mismatch });
        };
        contents.records += 1;
        contents.amount += u32::from(image.chain());
    }
    Ok(live)
}

type AdoptedChunk = (ChunkNumber, ChunkState, ChunkOwner, Option<LiveContents>);

/// Every chunk that a store has, with the live images of its key chunks if they are counted.
fn chunks_of(
    store: &ReplayedStore,
    live_images: Option<&FxHashMap<ChunkNumber, LiveContents>>,
) -> Vec<AdoptedChunk> {
    let owner = |kind, index| ChunkOwner { partition: store.partition, kind, index };
    let images = |chunk| live_images.and_then(|live| live.get(&chunk).copied());
    let mut all = Vec::new();
    for (kind, log) in [(LogKind::Keys, &store.keys), (LogKind::Values, &store.values)] {
        let last = log.chunks.len() - 1;
        for (at, (&chunk, index)) in log.chunks.iter().zip(log.head.0..).enumerate() {
            let state = if at == last { ChunkState::Open } else { ChunkState::Sealed };
            let uses = store.value_uses.as_ref().and_then(|uses| uses.get(at));
            let contents = match kind {
                LogKind::Keys => images(chunk),
                LogKind::Values => {
                    uses.map(|of| LiveContents { records: of.live_records, amount: of.live_granules })
                }
            };
            all.push((chunk, state, owner(kind, ChunkIndex(index)), contents));
        }
        // An index behind a tail has 32 bits: the last one stays unused.
        let next_index = ChunkIndex(log.head.0.saturating_add(log.chunks.len() as u32));
        all.extend(log.next.map(|next| (next, ChunkState::Reserved, owner(kind, next_index), None)));
    }
    for &PinnedChunk { log, index, chunk } in &store.pinned {
        let contents = if log == LogKind::Keys { images(chunk) } else { None };
        all.push((chunk, ChunkState::Pinned, owner(log, index), contents));
    }
    for &RetiredChunk { index, chunk } in &store.retired {
        let contents = Some(LiveContents::default());
        all.push((chunk, ChunkState::Retired, owner(LogKind::Keys, index), contents));
    }
    all
}

/// Takes a chunk behind the tail of each log that has none, and says whether there was one.
///
/// # Errors
/// [`DeviceError::NoSpace`]: other stores have filled the volume before any checkpoint.
fn take_next_chunks(pool: &ChunkPool, store: &mut ReplayedStore) -> Result<bool, OpenError> {
    let mut has_taken = false;
    for log in [&mut store.keys, &mut store.values] {
        if log.next.is_none() {
            let next = pool.reserve(ChunkPurpose::KeyCompaction);
            log.next = Some(next.ok_or(OpenError::Device(DeviceError::NoSpace))?);
            has_taken = true;
        }
    }
    Ok(has_taken)
}

impl RecoveredStore {
    /// REQUIRES: the pool has adopted the chunks, and both logs have a next one.
    fn of(store: ReplayedStore) -> RecoveredStore {
        let log = |kind, RecoveredLog { head, chunks, tail_unit, next }| {
            let next = next.expect("a log has a chunk behind its tail");
            ChunkLog::recovered(store.partition, kind, head, chunks, tail_unit, next)
        };
        RecoveredStore {
            partition: store.partition,
            range: store.range,
            table: store.table,
            keys: log(LogKind::Keys, store.keys),
            values: log(LogKind::Values, store.values),
            value_tail: store.value_tail,
            retired: store.retired,
            pinned: store.pinned,
            totals: store.totals,
            last_sequence: store.last_sequence,
            previous: store.previous,
            durable_through: store.durable_through,
            images: store.images,
            rejected: store.rejected,
            damaged: store.damaged,
            is_lost: store.is_lost,
        }
    }
}
