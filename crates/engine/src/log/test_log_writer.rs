//! A writer of volumes for tests of recovery: it appends images and values as the engine does, and knows after each image what a recovery
//! that ends there has to find.
//!
//! ```text
//!   put, delete, rewrite, split, marker ─▶ bytes of a disk, of which those since the last flush may be lost ─▶ crash ─▶ a disk to recover
//!                                    └──▶ a `StoreModel` for each image
//! ```
//! In: operations on stores. Out: a disk, the models. Invariants: as the engine, it states an image as durable only after a flush, frees a
//! chunk only when a head behind it was flushed, and names the chunk of a value log in the image before its first use.

use super::hash_prefix::SegmentNumber;
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogPlace};
use super::segment_buckets::{
    ImagePlace, ImageRole, ImageState, PreviousImage, ValueTailPlace, encode_image, image_units,
};
use super::segment_entry::{EntryContents, SegmentEntry, ValueExtent, ValueExtents, ValuePlace};
use super::segment_image::SegmentImage;
use super::segment_ref::SegmentRef;
use super::store_image::{CheckpointId, PAGE_SEGMENTS, append_page, append_store};
use super::superblock::{LogCheckpoint, LogSuperblock};
use super::test_store_model::{TestStore, WrittenImage};
use super::value_record::{
    NewValueRecord, ValueRecordPlace, encode_value_record, record_granules, value_record_bytes,
};
use crate::common::record::RecordMeta;
use crate::common::superblock::SUPERBLOCK_STRIDE_BYTES;
use crate::common::superblock::Superblock;
use octokv_base::{Buffer, Lba, Version};
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_runtime::block_on;
use std::collections::{BTreeMap, VecDeque};

pub(super) const VOLUME: u64 = 0x7007;
/// The granules at the end of a value chunk that no record takes.
const DIRECTORY_GRANULES: u32 = 64;

/// A volume of 64 chunks of 8 KiB.
pub(super) fn test_layout(stores: u16) -> LogLayout {
    LogLayout {
        unit_bytes: 512,
        chunk_units: 16,
        area_units: 64,
        chunks_start_unit: 32 + 4 * 64,
        chunks: 64,
        stores,
        granule_log2: 3,
    }
}

/// A disk, and what is on it.
pub(super) struct TestLogVolume {
    pub layout: LogLayout,
    pub superblock: LogSuperblock,
    pub disk: Vec<u8>,
    /// Units written since the last flush, with their former bytes.
    pub unflushed: BTreeMap<u64, Vec<u8>>,
    pub stores: Vec<TestStore>,
    /// The bytes of each value record, by its first granule, in its parts.
    pub records: BTreeMap<u64, Vec<(usize, Vec<u8>)>>,
    free: VecDeque<ChunkNumber>,
    values_written: u64,
}

impl TestLogVolume {
    /// A volume as a format leaves it.
    pub fn new(layout: LogLayout) -> TestLogVolume {
        assert!(layout.is_consistent());
        let stores = u32::from(layout.stores);
        let mut free: VecDeque<_> = (2 * stores..layout.chunks).map(ChunkNumber).collect();
        let mut take = || free.pop_front().unwrap();
        let stores = (0..stores).map(|partition| {
            let (keys, values) =
                (vec![ChunkNumber(2 * partition), take()], vec![ChunkNumber(2 * partition + 1), take()]);
            TestStore::new(partition, layout.stores, keys, values)
        });
        let stores = stores.collect();
        let superblock = LogSuperblock {
            volume_id: VOLUME,
            hash_seed: 9,
            layout,
            namespace: 1,
            value_bytes_max: 1000,
            generation: 1,
            incarnation: 1,
            checkpoint: LogCheckpoint::NONE,
            next_partition: layout.stores.into(),
            forgotten_below: Version::NONE,
            is_clean_shutdown: false,
        };
        let disk = vec![0; (layout.units() * 512) as usize];
        let (unflushed, records) = (BTreeMap::new(), BTreeMap::new());
        let mut volume =
            TestLogVolume { layout, superblock, disk, unflushed, stores, records, free, values_written: 0 };
        volume.write_superblock();
        volume
    }

    /// A device with the bytes of the disk.
    pub fn device(&self) -> MemoryDevice {
        device_with(&self.disk)
    }

    pub fn free_chunks(&self) -> usize {
        self.free.len()
    }

    fn take_chunk(&mut self) -> ChunkNumber {
        self.free.pop_front().expect("tests leave chunks free")
    }

    fn write(&mut self, at: usize, bytes: &[u8]) {
        for unit in at / 512..(at + bytes.len()).div_ceil(512) {
            let former = self.disk[unit * 512..(unit + 1) * 512].to_vec();
            self.unflushed.entry(unit as u64).or_insert(former);
        }
        self.disk[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn granule_bytes_at(&self, chunk: ChunkNumber, granule: u32) -> usize {
        (self.layout.granule_of(chunk, granule) << self.layout.granule_log2) as usize
    }

    /// Where an image lies on the disk.
    pub fn image_at(&self, at: LogPlace) -> usize {
        self.layout.unit_of(at.chunk, at.unit) as usize * 512
    }

    /// Makes everything durable, and frees what heads have passed.
    pub fn flush(&mut self) {
        self.unflushed.clear();
        for store in &mut self.stores {
            store.flushed = store.model.last_sequence;
            let head = store
                .written
                .get(&store.flushed)
                .map_or((0, 0), |image| (image.state.key_head.0, image.state.value_head.0));
            let replay_index = store.start.replay.index.0;
            let is_free = |&(index, _, is_key): &(u32, ChunkNumber, bool)| match is_key {
                true => index < head.0 && index < replay_index,
                false => index < head.1,
            };
            let (freed, kept) = store.emptied.drain(..).partition(is_free);
            store.emptied = kept;
            let freed: Vec<(u32, ChunkNumber, bool)> = freed;
            self.free.extend(freed.into_iter().map(|(_, chunk, _)| chunk));
        }
    }

    /// Writes a value record into the value log of a store. A hop to more than the next chunk is stated by markers.
    fn write_value(&mut self, store: usize, key: &[u8], value_bytes: u32) -> EntryContents {
        self.values_written += 1;
        let meta = RecordMeta::PLAIN;
        let value: Vec<u8> = (0..value_bytes).map(|at| (at as u64 * 7 + self.values_written) as u8).collect();
        let granules = record_granules(key.len(), value_bytes, &meta, self.layout.granule_log2);
        let record_bytes = value_record_bytes(key.len(), value_bytes, &meta);
        let usable = self.layout.chunk_granules() - DIRECTORY_GRANULES;
        if self.stores[store].model.value_tail.granule + granules > usable {
            self.hop_values(store);
        }
        let tail = self.stores[store].model.value_tail;
        let record = NewValueRecord { key, meta, value_bytes };
        let place = ValueRecordPlace {
            volume_id: VOLUME,
            partition: self.stores[store].partition,
            index: tail.index,
            granule: tail.granule,
        };
        let mut bytes = vec![0; (granules << self.layout.granule_log2) as usize];
        encode_value_record(&mut bytes, &record, std::iter::once(&value[..]), place);
        let (mut extents, mut parts, mut written) = (Vec::new(), Vec::new(), 0);
        while written < granules {
            if !extents.is_empty() {
                self.hop_values(store);
            }
            let model = &mut self.stores[store].model;
            let (index, granule) = (model.value_tail.index, model.value_tail.granule);
            let chunk = model.values[index.0 as usize];
            let count = (granules - written).min(usable - granule);
            model.value_tail.granule += count;
            let at = self.granule_bytes_at(chunk, granule);
            let part = bytes[written as usize * 8..(written + count) as usize * 8].to_vec();
            self.write(at, &part);
            // The padding behind the record is no part of it: a unit that was lost may differ there alone.
            let of_record = record_bytes.saturating_sub(written << self.layout.granule_log2) as usize;
            parts.push((at, part[..of_record.min(part.len())].to_vec()));
            extents.push(ValueExtent { chunk, granules: count });
            written += count;
        }
        let first = self.layout.granule_of(extents[0].chunk, tail.granule);
        self.records.insert(first, parts);
        let at = match extents.len() {
            1 => ValuePlace::Record(first),
            _ => ValuePlace::Extents(ValueExtents { first_granule: tail.granule, extents: extents.into() }),
        };
        EntryContents::Value { bytes: value_bytes, at }
    }

    /// Opens the next chunk of a value log. A marker comes first if nothing has stated the hop before.
    fn hop_values(&mut self, store: usize) {
        let stated = self.stores[store].stated_value_index();
        if stated < self.stores[store].model.value_tail.index.0 {
            self.marker(store);
        }
        let next = self.take_chunk();
        let model = &mut self.stores[store].model;
        model.values.push(next);
        model.value_tail = ValueTailPlace { index: ChunkIndex(model.value_tail.index.0 + 1), granule: 0 };
    }

    /// Puts a key of a segment.
    pub fn put(&mut self, store: usize, segment: u32, key: &[u8], value_bytes: u32) {
        let contents = match value_bytes {
            0 => EntryContents::Value { bytes: 0, at: ValuePlace::Nowhere },
            _ => self.write_value(store, key, value_bytes),
        };
        let mut image = self.stores[store].image_of(segment);
        image.replace(&SegmentEntry { key, meta: RecordMeta::PLAIN, contents });
        self.append_segment(store, segment, image, ImageRole::Segment);
    }

    /// Removes a key of a segment.
    pub fn delete(&mut self, store: usize, segment: u32, key: &[u8]) {
        let mut image = self.stores[store].image_of(segment);
        image.remove(key);
        self.append_segment(store, segment, image, ImageRole::Segment);
    }

    /// Appends the image of a segment again, as compaction does, its values included.
    pub fn rewrite(&mut self, store: usize, segment: u32) {
        let mut image = self.stores[store].image_of(segment);
        let keys: Vec<(Vec<u8>, u32)> =
            image.iter().map(|entry| (entry.key.to_vec(), entry.contents.value_bytes())).collect();
        for (key, value_bytes) in keys.into_iter().filter(|(_, value_bytes)| *value_bytes > 0) {
            let contents = self.write_value(store, &key, value_bytes);
            image.replace(&SegmentEntry { key: &key, meta: RecordMeta::PLAIN, contents });
        }
        self.append_segment(store, segment, image, ImageRole::Segment);
    }

    /// Splits the next segment, in two images.
    pub fn split(&mut self, store: usize) {
        let level = self.stores[store].model.level;
        let (low, high) = (level.split, level.next_segment().0);
        let (low_image, high_image) = self.stores[store]
            .image_of(low)
            .split(|key| key.iter().map(|&byte| u32::from(byte)).sum::<u32>() & 1 == 1);
        self.stores[store].model.level = level.advanced();
        self.append_segment(store, low, low_image, ImageRole::SplitFirst);
        self.append_segment(store, high, high_image, ImageRole::SplitSecond);
    }

    pub fn marker(&mut self, store: usize) {
        self.append(store, SegmentNumber::MARKER, SegmentImage::new(), ImageRole::Marker);
    }

    fn append_segment(&mut self, store: usize, segment: u32, image: SegmentImage, role: ImageRole) {
        self.append(store, SegmentNumber(segment), image, role);
    }

    fn append(&mut self, store: usize, segment: SegmentNumber, entries: SegmentImage, role: ImageRole) {
        let chain = image_units(entries.entry_bytes(), 512).unwrap();
        assert!(chain <= self.layout.chain_max(), "tests keep images short");
        if self.stores[store].model.key_tail.1 + u32::from(chain) > self.layout.chunk_units {
            let next = self.take_chunk();
            let model = &mut self.stores[store].model;
            model.keys.push(next);
            model.key_tail = (model.key_tail.0 + 1, 0);
        }
        let layout = self.layout;
        let of = &mut self.stores[store];
        let (index, unit) = of.model.key_tail;
        let chunk = of.model.keys[index as usize];
        let depth = if role == ImageRole::Marker { 0 } else { of.model.level.depth_of(segment) };
        if role != ImageRole::Marker {
            let image = SegmentRef::new(layout.unit_of(chunk, unit), chain);
            of.model.segments.insert(segment.0, (image, entries.clone()));
            of.count(&layout);
        }
        of.advance_heads(&layout);
        let sequence = of.model.last_sequence + 1;
        let state = ImageState {
            role,
            segment,
            depth,
            sequence,
            incarnation: self.superblock.incarnation,
            durable_lag: (sequence - of.flushed) as u32,
            key_head: ChunkIndex(of.model.key_head),
            value_head: ChunkIndex(of.model.value_head),
            next_key_chunk: of.model.keys[index as usize + 1],
            next_value_chunk: of.model.values[of.model.value_tail.index.0 as usize + 1],
            value_tail: of.model.value_tail,
            totals: of.model.totals,
            previous: of.model.previous,
        };
        let at = LogPlace { index: ChunkIndex(index), chunk, unit };
        let mut bytes = vec![0; usize::from(chain) * 512];
        encode_image(&mut bytes, &state, &entries, image_place(of.partition, at));
        of.model.key_tail.1 += u32::from(chain);
        of.model.last_sequence = sequence;
        of.model.previous = PreviousImage { segment, chain };
        let after = of.model.clone();
        of.written.insert(sequence, WrittenImage { at, bytes: bytes.clone(), state, entries, after });
        let offset = self.image_at(at);
        self.write(offset, &bytes);
    }

    fn write_superblock(&mut self) {
        let bytes = self.superblock.encode();
        for copy in 0..2 {
            let at = (self.superblock.generation % 2 + copy * 2) * SUPERBLOCK_STRIDE_BYTES;
            self.disk[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// Writes a checkpoint, durably. The replay of each store begins so many images before its end, if they are of this incarnation.
    pub fn checkpoint(&mut self, images: u64) {
        self.flush();
        let id = self.superblock.checkpoint.id + 1;
        let of_checkpoint = CheckpointId { volume_id: VOLUME, checkpoint_id: id };
        let (incarnation, layout) = (self.superblock.incarnation, self.layout);
        let mut bytes = Vec::new();
        for store in &mut self.stores {
            let start = store.checkpoint_start(images, incarnation, &layout);
            for first in (0..start.level.segments()).step_by(PAGE_SEGMENTS) {
                let end = start.level.segments().min(first + PAGE_SEGMENTS as u64);
                let image = |segment| {
                    store.model.segments.get(&(segment as u32)).map_or(SegmentRef::EMPTY, |of| of.0)
                };
                let partition = store.partition;
                append_page(
                    &mut bytes,
                    of_checkpoint,
                    partition,
                    SegmentNumber(first as u32),
                    (first..end).map(image),
                );
            }
            append_store(&mut bytes, of_checkpoint, &start);
            store.start = start;
        }
        let area = self.superblock.checkpoint.next_area();
        for copy in 0..2 {
            let at = self.layout.area_start_unit(area, copy) as usize * 512;
            assert!(bytes.len() <= self.layout.area_units as usize * 512);
            self.disk[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        self.superblock.checkpoint = LogCheckpoint {
            area: Some(area),
            id,
            incarnation,
            bytes: bytes.len() as u64,
            stores: self.stores.len() as u32,
        };
        self.superblock.generation += 1;
        self.write_superblock();
        self.flush();
    }

    /// Loses those units written since the last flush that `is_lost` names.
    pub fn lose_units(&mut self, mut is_lost: impl FnMut(u64) -> bool) {
        for (unit, former) in std::mem::take(&mut self.unflushed) {
            if is_lost(unit) {
                self.disk[unit as usize * 512..][..512].copy_from_slice(&former);
            }
        }
    }

    /// Opens the volume with what a recovery has found: each store ends behind an image. Then a checkpoint, if there has to be one.
    pub fn reopen(&mut self, last: &[u64], needs_checkpoint: bool) {
        self.superblock.incarnation += 1;
        self.superblock.generation += 1;
        self.write_superblock();
        let mut used = Vec::new();
        for (store, &last) in self.stores.iter_mut().zip(last) {
            store.go_back(last, &self.layout);
            used.extend(store.chunks());
        }
        self.free.retain(|chunk| !used.contains(chunk));
        let missing = (0..self.layout.chunks).map(ChunkNumber);
        let missing: Vec<_> =
            missing.filter(|chunk| !used.contains(chunk) && !self.free.contains(chunk)).collect();
        self.free.extend(missing);
        for store in 0..self.stores.len() {
            while self.stores[store].model.keys.len() < self.stores[store].model.key_tail.0 as usize + 2 {
                let next = self.take_chunk();
                self.stores[store].model.keys.push(next);
            }
            while self.stores[store].model.values.len()
                < self.stores[store].model.value_tail.index.0 as usize + 2
            {
                let next = self.take_chunk();
                self.stores[store].model.values.push(next);
            }
        }
        if needs_checkpoint {
            self.checkpoint(0);
        }
    }

    /// Whether the bytes of an image are on the disk.
    pub fn has_image(&self, image: &WrittenImage) -> bool {
        let at = self.image_at(image.at);
        self.disk[at..at + image.bytes.len()] == image.bytes[..]
    }

    /// Whether the record of an entry is on the disk.
    pub fn has_value(&self, entry: &SegmentEntry<'_>) -> bool {
        let first = match &entry.contents {
            EntryContents::Value { at: ValuePlace::Record(granule), .. } => *granule,
            EntryContents::Value { at: ValuePlace::Extents(of), .. } => {
                self.layout.granule_of(of.extents[0].chunk, of.first_granule)
            }
            EntryContents::Value { at: ValuePlace::Nowhere, .. }
            | EntryContents::Tombstone
            | EntryContents::LostValue { .. } => return true,
        };
        self.records[&first].iter().all(|(at, bytes)| self.disk[*at..at + bytes.len()] == bytes[..])
    }

    /// What a recovery has to find: the last image of a store, and the last of these that is known to be durable.
    pub fn expected_end(&self, store: usize) -> (u64, u64) {
        let store = &self.stores[store];
        let start = &store.start;
        let first = start.replay.sequence;
        let mut end = first - 1;
        while let Some(image) = store.written.get(&(end + 1)).filter(|image| self.has_image(image)) {
            end = image.state.sequence;
        }
        let mut durable = start.durable_through;
        for (_, image) in store.written.range(first..end + 1) {
            durable = durable.max(image.state.sequence - u64::from(image.state.durable_lag));
        }
        let stated = store.written.get(&durable).filter(|_| durable >= first);
        let proven = stated.map_or(start.value_tail, |image| image.state.value_tail.max(start.value_tail));
        let torn = store.written.range(first..end + 1).find(|(sequence, image)| {
            **sequence > durable
                && image.entries.iter().any(|entry| {
                    store.first_place(&entry, &self.layout).is_some_and(|place| place >= proven)
                        && !self.has_value(&entry)
                })
        });
        end = torn.map_or(end, |(sequence, _)| sequence - 1);
        if store.written.get(&end).is_some_and(|image| image.state.role == ImageRole::SplitFirst) {
            end -= 1;
        }
        (end, durable.min(end))
    }
}

pub(super) fn image_place(partition: u32, at: LogPlace) -> ImagePlace {
    ImagePlace { volume_id: VOLUME, partition, index: at.index, unit: at.unit, unit_bytes: 512 }
}

/// A device with these bytes.
pub(super) fn device_with(bytes: &[u8]) -> MemoryDevice {
    let device = MemoryDevice::new(RamDisk::new(bytes.len() as u64, 512).unwrap());
    let mut buffer = Buffer::zeroed(bytes.len());
    buffer.copy_from_slice(bytes);
    block_on(device.write(Lba(0), buffer), || {}).result.unwrap();
    device
}
