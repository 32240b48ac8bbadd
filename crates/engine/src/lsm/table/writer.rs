//! The table writer: entries in order become a table.
//!
//! ```text
//!   entries ─▶ data block ─▶ bytes that wait ─▶ run
//!                  └─▶ index, filter hashes, counts ─▶ both copies of the metadata, at the end
//! ```
//! The last 256 to 512 KiB of the data wait until the end, so that the first copy of the metadata is written before them and the
//! second one behind: no failure of adjacent blocks costs both. A shorter table has the first copy at the start of its run.
//!
//! Memory: up to five buffers of 256 KiB and one data block; for each data block its separator; for each key eight bytes for the filter.
//! Invariants: entries are added in order; a table never exceeds its run, and an entry that would make it do so is not part of it.
//! Nothing is flushed. Tested in `model_tests.rs` and `write_tests.rs`.

use super::filter::{FilterHash, TableFilter};
use super::frame::{BlockKind, TRAILER_BYTES, seal, seal_compressed};
use super::index::{INDEX_BODY_BYTES_MAX, push_block, separator};
use super::info::{
    DESCRIPTOR_FIXED_BYTES_MAX, SEGMENT_USE_BYTES_MAX, SegmentUse, TABLE_BYTES_MAX, TableDescriptor,
    TableInfo, TablePlace,
};
use super::io::TableIo;
use super::key_block::{BLOCK_OVERHEAD_MAX, KEY_OVERHEAD_MAX, KeyBlockBuilder};
use super::run_writer::{RunWriter, WRITE_BYTES};
use crate::EngineError;
use crate::common::allocator::Extent;
use crate::lsm::entry::{ENTRY_OVERHEAD_MAX, EntryValue, Position, TreeEntry};
use octokv_base::map::FxHashMap;
use octokv_base::{KEY_BYTES_MAX, UnixTime, Version};
use octokv_device::DeviceFuture;
use std::collections::VecDeque;
use std::rc::Rc;

/// The most bytes of an inline value.
pub const INLINE_VALUE_BYTES_MAX: usize = 64 << 10;
/// The range of [`TableWriterConfig::block_bytes`].
pub const BLOCK_BYTES_MIN: usize = 256;
/// The range of [`TableWriterConfig::block_bytes`].
pub const BLOCK_BYTES_MAX: usize = 64 << 10;
/// The most bytes of a data block without its trailer, decompressed.
pub const DATA_BYTES_MAX: usize =
    INLINE_VALUE_BYTES_MAX + KEY_BYTES_MAX + ENTRY_OVERHEAD_MAX + KEY_OVERHEAD_MAX + BLOCK_OVERHEAD_MAX;

/// How a table is written.
#[derive(Clone, Copy, Debug)]
pub struct TableWriterConfig {
    /// The length of a data block in bytes, before compression. A block with one entry may be longer.
    pub block_bytes: usize,
    /// Whether data blocks are compressed where that saves an eighth.
    pub compresses: bool,
}

impl Default for TableWriterConfig {
    fn default() -> TableWriterConfig {
        TableWriterConfig { block_bytes: 4 << 10, compresses: false }
    }
}

/// Why an entry was not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableWriteError {
    /// The run has no space for it. The table can be finished without it.
    #[error("the run of the table is full")]
    RunFull,
    /// The device failed, or there are no buffers. The table cannot be finished.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// Writes one table.
///
/// The writer of a table that is not finished has to be settled before its run is used for anything else. If the future of an
/// operation is dropped, only [`TableWriter::abandon`] may follow.
pub struct TableWriter {
    io: Rc<TableIo>,
    config: TableWriterConfig,
    run: RunWriter,
    run_bytes: u64,
    info: TableInfo,
    block: KeyBlockBuilder,
    index: KeyBlockBuilder,
    hashes: Vec<FilterHash>,
    segments: FxHashMap<u32, SegmentUse>,
    last_key: Vec<u8>,
    last_sequence: u64,
    /// Data that is not given to the run yet; the data before it is.
    waiting: Vec<u8>,
    /// Where data blocks end that are not given to the run as a whole.
    block_ends: VecDeque<u32>,
    scratch: Vec<u8>,
}

/// The most bytes of an entry: in a block of its own, with its place in both copies of the metadata.
fn most_bytes_of(entry: &TreeEntry<'_>) -> u64 {
    let block_bytes =
        KEY_OVERHEAD_MAX + entry.key.len() + entry.encoded_bytes() + BLOCK_OVERHEAD_MAX + TRAILER_BYTES;
    let metadata_bytes = entry.key.len() + KEY_OVERHEAD_MAX + INDEX_BODY_BYTES_MAX + SEGMENT_USE_BYTES_MAX;
    (block_bytes + 2 * metadata_bytes) as u64
}

impl TableWriter {
    /// Begins a table at the start of a run, of which it uses at most [`TABLE_BYTES_MAX`]. REQUIRES: no table had the identifier before.
    pub fn new(io: Rc<TableIo>, id: u64, run: Extent, config: TableWriterConfig) -> TableWriter {
        assert!((BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX).contains(&config.block_bytes), "{config:?}");
        let place = TablePlace {
            id,
            location: run.location,
            front_bytes: 0,
            second_unit: 0,
            descriptor_bytes: 0,
            filter_bytes: 0,
            index_bytes: 0,
        };
        let info = TableInfo {
            place,
            extent: run,
            data_bytes: 0,
            entries: 0,
            keys: 0,
            tombstones: 0,
            first_key: Box::default(),
            last_key: Box::default(),
            smallest_sequence: u64::MAX,
            largest_sequence: 0,
            largest_version: Version::NONE,
            earliest_expiry: UnixTime::NEVER,
            segments: Box::default(),
        };
        TableWriter {
            run_bytes: (run.units * u64::from(io.unit_bytes)).min(TABLE_BYTES_MAX),
            run: RunWriter::new(Rc::clone(&io), run),
            io,
            config,
            info,
            block: KeyBlockBuilder::default(),
            index: KeyBlockBuilder::default(),
            hashes: Vec::new(),
            segments: FxHashMap::default(),
            last_key: Vec::new(),
            last_sequence: 0,
            waiting: Vec::new(),
            block_ends: VecDeque::new(),
            scratch: Vec::new(),
        }
    }

    /// The number of entries so far.
    pub fn entries(&self) -> u64 {
        self.info.entries
    }

    /// The bytes of data so far: of the blocks that are complete, and of the one that is not.
    pub fn data_bytes(&self) -> u64 {
        self.info.data_bytes + self.block.bytes() as u64
    }

    /// Adds an entry. REQUIRES: it is behind all others.
    ///
    /// # Errors
    /// [`TableWriteError::RunFull`], and the failures after which the table can only be abandoned.
    ///
    /// # Panics
    /// If entries come out of order, or their key or inline value is too long.
    pub async fn add(&mut self, entry: &TreeEntry<'_>) -> Result<(), TableWriteError> {
        if let Some(error) = self.run.failure() {
            return Err(error.into());
        }
        let last = Position { key: &self.last_key, sequence: self.last_sequence };
        assert!(self.info.entries == 0 || last < entry.position(), "entries out of order");
        if let EntryValue::Inline(value) = entry.value {
            assert!(value.len() <= INLINE_VALUE_BYTES_MAX, "an inline value of {} bytes", value.len());
        }
        let entry_bytes = KEY_OVERHEAD_MAX + entry.key.len() + entry.encoded_bytes();
        if self.bytes_with(entry, entry_bytes) > self.run_bytes {
            return Err(TableWriteError::RunFull);
        }
        if self.block.bytes() > 0 && self.block.bytes() + entry_bytes > self.config.block_bytes {
            self.close_block(Some(entry.key));
            self.write_waiting().await?;
        }
        self.count(entry);
        self.block.push(entry.key, |bytes| entry.encode(bytes));
        self.last_key.clear();
        self.last_key.extend_from_slice(entry.key);
        self.last_sequence = entry.sequence;
        Ok(())
    }

    /// Whether the run has room for all of these entries, however they come to lie in blocks. REQUIRES: as for [`TableWriter::add`].
    pub fn has_room_for(&self, entries: &[TreeEntry<'_>]) -> bool {
        let Some((first, others)) = entries.split_first() else { return true };
        let with_first = self.bytes_with(first, KEY_OVERHEAD_MAX + first.key.len() + first.encoded_bytes());
        with_first + others.iter().map(most_bytes_of).sum::<u64>() <= self.run_bytes
    }

    /// The length of a run that has room for these entries, in bytes.
    pub fn bytes_for(entries: &[TreeEntry<'_>], unit_bytes: usize) -> u64 {
        let key_bytes = entries.first().map_or(0, |entry| entry.key.len());
        let (block_bytes, index_bytes) =
            (BLOCK_OVERHEAD_MAX + TRAILER_BYTES, KEY_OVERHEAD_MAX + INDEX_BODY_BYTES_MAX);
        let filter_bytes = TableFilter::bytes_for(1) as usize;
        let metadata_bytes =
            DESCRIPTOR_FIXED_BYTES_MAX + 2 * key_bytes + filter_bytes + index_bytes + 2 * block_bytes;
        let fixed_bytes = block_bytes + 2 * metadata_bytes + 3 * unit_bytes;
        entries.iter().map(most_bytes_of).sum::<u64>() + fixed_bytes as u64
    }

    /// The most bytes that the table would have with one more entry as its last.
    fn bytes_with(&self, entry: &TreeEntry<'_>, entry_bytes: usize) -> u64 {
        let key_bytes = self.last_key.len() + entry.key.len();
        let blocks_bytes = self.block.bytes() + entry_bytes + 2 * (BLOCK_OVERHEAD_MAX + TRAILER_BYTES);
        let index_bytes = self.index.bytes() + key_bytes + 2 * (KEY_OVERHEAD_MAX + INDEX_BODY_BYTES_MAX);
        let descriptor_bytes = DESCRIPTOR_FIXED_BYTES_MAX
            + self.info.first_key.len().max(entry.key.len())
            + entry.key.len()
            + (self.segments.len() + 1) * SEGMENT_USE_BYTES_MAX;
        let filter_bytes = TableFilter::bytes_for(self.hashes.len() as u64 + 1);
        let blocks_of_metadata = BLOCK_OVERHEAD_MAX + 2 * TRAILER_BYTES;
        let metadata_bytes = filter_bytes + (index_bytes + descriptor_bytes + blocks_of_metadata) as u64;
        // Each copy begins in a unit of its own, and the last unit is a whole one.
        let units_bytes = 3 * u64::from(self.io.unit_bytes);
        self.info.data_bytes + blocks_bytes as u64 + 2 * metadata_bytes + units_bytes
    }

    fn count(&mut self, entry: &TreeEntry<'_>) {
        let info = &mut self.info;
        if info.entries == 0 {
            info.first_key = entry.key.into();
        }
        if info.entries == 0 || self.last_key != entry.key {
            info.keys += 1;
            self.hashes.push(FilterHash::of(entry.key));
        }
        info.entries += 1;
        info.smallest_sequence = info.smallest_sequence.min(entry.sequence);
        info.largest_sequence = info.largest_sequence.max(entry.sequence);
        info.largest_version = info.largest_version.max(entry.version);
        match entry.value {
            EntryValue::Tombstone => info.tombstones += 1,
            EntryValue::Inline(_) => info.earliest_expiry = info.earliest_expiry.min(entry.expires_at),
            EntryValue::InSegment(address) => {
                info.earliest_expiry = info.earliest_expiry.min(entry.expires_at);
                let unused = SegmentUse { segment: address.segment, values: 0, bytes: 0 };
                let segment = self.segments.entry(address.segment).or_insert(unused);
                segment.values += 1;
                segment.bytes += u64::from(address.value_bytes) + entry.key.len() as u64;
            }
        }
    }

    /// Ends the data block. `next_key` is the key of the entry behind it.
    fn close_block(&mut self, next_key: Option<&[u8]>) {
        let (start, offset) = (self.waiting.len(), self.info.data_bytes as u32);
        self.block.finish(&mut self.waiting);
        let owner = self.io.owner(self.info.place.id);
        match self.config.compresses {
            true => {
                seal_compressed(&mut self.waiting, start, BlockKind::Data, owner, offset, &mut self.scratch)
            }
            false => seal(&mut self.waiting, start, BlockKind::Data, owner, offset),
        }
        let bytes = (self.waiting.len() - start) as u32;
        self.info.data_bytes += u64::from(bytes);
        self.block_ends.push_back(offset + bytes);
        let position = match next_key.filter(|&next| next != self.last_key) {
            Some(next) => Position::behind(separator(&self.last_key, next, &mut self.scratch)),
            None => Position { key: &self.last_key, sequence: self.last_sequence },
        };
        push_block(&mut self.index, position, offset, bytes);
    }

    /// Gives waiting data to the run, all but the last 256 KiB.
    async fn write_waiting(&mut self) -> Result<(), EngineError> {
        while self.waiting.len() >= 2 * WRITE_BYTES {
            self.run.append(&self.waiting[..WRITE_BYTES]).await?;
            self.waiting.drain(..WRITE_BYTES);
            let written = self.run.appended();
            while self.block_ends.front().is_some_and(|&end| u64::from(end) < written) {
                self.block_ends.pop_front();
            }
        }
        Ok(())
    }

    /// Writes the rest of the table, and waits until all of it is written. It is durable after a flush. REQUIRES: it has an entry; the writer is not used afterwards.
    ///
    /// # Errors
    /// Device failures, no memory. The run can then be used for anything else.
    pub async fn finish(&mut self) -> Result<TableInfo, EngineError> {
        if let Some(error) = self.run.failure() {
            self.run.settle().await;
            return Err(error);
        }
        assert!(self.info.entries > 0, "a table without entries");
        self.close_block(None);
        let (filter, index) = self.filter_and_index();
        let written = self.run.appended();
        // Blocks are shorter than what waits: one ends behind what was written.
        let front_bytes = if written == 0 { 0 } else { *self.block_ends.front().expect("data that waits") };
        let mut segments: Vec<SegmentUse> = self.segments.values().copied().collect();
        segments.sort_unstable_by_key(|segment| segment.segment);
        let mut info = self.info.clone();
        (info.last_key, info.segments) = (self.last_key.as_slice().into(), segments.into());
        info.place.front_bytes = front_bytes;
        info.place.filter_bytes = filter.len() as u32;
        info.place.index_bytes = index.len() as u32;
        let unit_bytes = self.io.unit_bytes;
        let mut descriptor = TableDescriptor { volume_id: self.io.volume_id, unit_bytes, info };
        // Its length does not depend on the numbers that follow from it.
        descriptor.encode();
        let TableInfo { place, data_bytes, .. } = &mut descriptor.info;
        let data_end = place.tail_offset(unit_bytes) + *data_bytes - u64::from(front_bytes);
        place.second_unit = data_end.div_ceil(u64::from(unit_bytes)) as u32;
        let metadata = [descriptor.encode(), filter, index].concat();
        let (front, tail) = self.waiting.split_at((u64::from(front_bytes) - written) as usize);
        let run = &mut self.run;
        for data in [front, tail] {
            run.append(data).await?;
            run.fill_unit().await?;
            run.append(&metadata).await?;
        }
        run.fill_unit().await?;
        run.finish().await?;
        Ok(descriptor.info)
    }

    /// The filter and the index, as blocks.
    fn filter_and_index(&mut self) -> (Vec<u8>, Vec<u8>) {
        let owner = self.io.owner(self.info.place.id);
        let mut filter = TableFilter::new(&self.hashes).bytes().to_vec();
        seal(&mut filter, 0, BlockKind::Filter, owner, 0);
        let mut index = Vec::new();
        self.index.finish(&mut index);
        seal(&mut index, 0, BlockKind::Index, owner, 0);
        (filter, index)
    }

    /// Gives up the table, and waits until no write is in flight. The run can then be used for anything else.
    pub async fn abandon(&mut self) {
        self.run.settle().await;
    }

    /// Gives up the table. The run can be used for anything else when these writes have ended.
    pub fn into_writes(self) -> Vec<DeviceFuture> {
        self.run.into_writes()
    }
}
