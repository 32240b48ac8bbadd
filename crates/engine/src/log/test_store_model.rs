//! A store of a volume for tests of recovery: what it is behind each of its images, and what a checkpoint of it says.
//!
//! In: images that [`super::test_log_writer`] appends. Out: heads that a compaction would have advanced, states of checkpoints, earlier
//! states.

use super::hash_prefix::{HashLevel, initial_range};
use super::log_layout::LogLayout;
use super::log_place::{ChunkIndex, ChunkNumber, LogPlace};
use super::replay::LOST_STORE_DURABLE_THROUGH;
use super::segment_buckets::{ImageRole, ImageState, PreviousImage, StoreTotals, ValueTailPlace};
use super::segment_entry::{EntryContents, SegmentEntry, ValuePlace};
use super::segment_image::SegmentImage;
use super::segment_ref::SegmentRef;
use super::store_image::{PinnedChunk, ReplayStart, StoreStart, ValueChunkUse};
use super::value_record::record_granules;
use std::collections::BTreeMap;

/// What a store is behind an image.
#[derive(Clone, Debug)]
pub(super) struct StoreModel {
    pub level: HashLevel,
    pub segments: BTreeMap<u32, (SegmentRef, SegmentImage)>,
    pub totals: StoreTotals,
    pub last_sequence: u64,
    pub previous: PreviousImage,
    /// By index, the last of which is the next one.
    pub keys: Vec<ChunkNumber>,
    pub values: Vec<ChunkNumber>,
    /// The chunk of the last image, and the unit behind it.
    pub key_tail: (u32, u32),
    pub value_tail: ValueTailPlace,
    pub key_head: u32,
    pub value_head: u32,
}

/// An image on the disk.
#[derive(Clone, Debug)]
pub(super) struct WrittenImage {
    pub at: LogPlace,
    pub bytes: Vec<u8>,
    pub state: ImageState,
    pub entries: SegmentImage,
    /// The store behind it.
    pub after: StoreModel,
}

/// A store and its images since the volume was made, by number. A crash takes the last ones away.
#[derive(Clone)]
pub(super) struct TestStore {
    pub partition: u32,
    pub model: StoreModel,
    pub written: BTreeMap<u64, WrittenImage>,
    /// The last image behind which the disk was flushed.
    pub flushed: u64,
    /// The start of replay of the last checkpoint, and what it says.
    pub start: StoreStart,
    pub pinned: Vec<PinnedChunk>,
    /// Whether a checkpoint states that the store is lost.
    pub is_lost: bool,
    /// Chunks that nothing is in, to be freed when a head behind them is flushed: index, chunk, of the key log.
    pub emptied: Vec<(u32, ChunkNumber, bool)>,
}

impl TestStore {
    pub fn new(partition: u32, stores: u16, keys: Vec<ChunkNumber>, values: Vec<ChunkNumber>) -> TestStore {
        let tail = ValueTailPlace { index: ChunkIndex(0), granule: 0 };
        let model = StoreModel {
            level: HashLevel::FIRST,
            segments: BTreeMap::new(),
            totals: StoreTotals::default(),
            last_sequence: 0,
            previous: PreviousImage::NONE,
            keys,
            values,
            key_tail: (0, 0),
            value_tail: tail,
            key_head: 0,
            value_head: 0,
        };
        let first = ChunkIndex(0);
        let start = StoreStart {
            partition,
            range: initial_range(partition as u16, stores),
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
            value_tail: tail,
            next_key_chunk: ChunkNumber(u32::MAX),
            next_value_chunk: ChunkNumber(u32::MAX),
            totals: StoreTotals::default(),
            key_chunks: vec![model.keys[0]],
            value_chunks: vec![ValueChunkUse { chunk: model.values[0], live_records: 0, live_granules: 0 }],
            pinned: Vec::new(),
        };
        let (written, pinned, emptied) = (BTreeMap::new(), Vec::new(), Vec::new());
        TestStore { partition, model, written, flushed: 0, start, pinned, is_lost: false, emptied }
    }

    pub fn image_of(&self, segment: u32) -> SegmentImage {
        self.model.segments.get(&segment).map_or(SegmentImage::new(), |of| of.1.clone())
    }

    /// The chunk of the value log that the last image or the checkpoint states.
    pub fn stated_value_index(&self) -> u32 {
        let last = self.written.get(&self.model.last_sequence);
        let stated = last.map_or(0, |image| image.state.value_tail.index.0);
        stated.max(self.start.value_tail.index.0)
    }

    /// The chunks that the store has.
    pub fn chunks(&self) -> Vec<ChunkNumber> {
        let model = &self.model;
        let from = model.key_head.min(self.start.replay.index.0) as usize;
        let keys = model.keys[from..].iter().copied();
        keys.chain(model.values[model.value_head as usize..].iter().copied()).collect()
    }

    /// Where the record of an entry begins in the value log.
    pub fn first_place(&self, entry: &SegmentEntry<'_>, layout: &LogLayout) -> Option<ValueTailPlace> {
        let (chunk, granule) = match &entry.contents {
            EntryContents::Value { at: ValuePlace::Record(granule), .. } => {
                layout.place_of_granule(*granule)?
            }
            EntryContents::Value { at: ValuePlace::Extents(of), .. } => {
                (of.extents[0].chunk, of.first_granule)
            }
            EntryContents::Value { at: ValuePlace::Nowhere, .. }
            | EntryContents::Tombstone
            | EntryContents::LostValue { .. } => return None,
        };
        let index = self.model.values.iter().rposition(|&of| of == chunk)?;
        Some(ValueTailPlace { index: ChunkIndex(index as u32), granule })
    }

    pub fn count(&mut self, layout: &LogLayout) {
        let entries = self.model.segments.values().flat_map(|of| of.1.iter());
        let mut totals = StoreTotals::default();
        for entry in entries {
            let value_bytes = entry.contents.value_bytes();
            totals.keys += u64::from(!entry.contents.is_tombstone());
            totals.entry_bytes += entry.encoded_bytes() as u64;
            totals.live_granules +=
                u64::from(record_granules(entry.key.len(), value_bytes, &entry.meta, layout.granule_log2));
        }
        self.model.totals = totals;
    }

    /// Advances the heads over what nothing published refers to.
    pub fn advance_heads(&mut self, layout: &LogLayout) {
        // Only what is flushed counts as moved: the last flushed image's chunks stay.
        let flushed = self.written.get(&self.flushed).map(|image| image.after.clone());
        let models = [Some(&self.model), flushed.as_ref()];
        let mut key_head = self.model.key_tail.0;
        let mut value_head = self.stated_value_index();
        for model in models.into_iter().flatten() {
            for (image, entries) in model.segments.values() {
                let (chunk, _) = layout.place_of_unit(image.unit()).unwrap();
                let index = self.model.keys.iter().rposition(|&of| of == chunk).unwrap();
                key_head = key_head.min(index as u32);
                let places = entries.iter().filter_map(|entry| self.first_place(&entry, layout));
                value_head = places.fold(value_head, |head, place| head.min(place.index.0));
            }
        }
        // Nothing is moved before the first flush.
        if flushed.is_none() {
            return;
        }
        let model = &mut self.model;
        for index in model.key_head..key_head.max(model.key_head) {
            self.emptied.push((index, model.keys[index as usize], true));
        }
        for index in model.value_head..value_head.max(model.value_head) {
            self.emptied.push((index, model.values[index as usize], false));
        }
        model.key_head = model.key_head.max(key_head);
        model.value_head = model.value_head.max(value_head);
    }

    pub fn checkpoint_start(&self, images: u64, incarnation: u32, layout: &LogLayout) -> StoreStart {
        let model = &self.model;
        let is_own = |sequence: u64| {
            self.written.get(&sequence).is_some_and(|image| image.state.incarnation == incarnation)
        };
        // Of a store's images only those of this incarnation were appended since the volume was opened. A split is published as one.
        let mut last = model.last_sequence;
        for _ in 0..images {
            let is_behind_start = last >= self.start.replay.sequence;
            last -= u64::from(is_behind_start && is_own(last) && self.written.contains_key(&(last - 1)));
        }
        let is_first = |image: &WrittenImage| image.state.role == ImageRole::SplitFirst;
        last += u64::from(self.written.get(&last).is_some_and(is_first));
        let before = self.written.get(&last).map_or(model, |image| &image.after);
        let before = if last == model.last_sequence { model } else { before };
        let key_head = model.key_head.min(before.key_tail.0);
        let uses = |index: usize| {
            let chunk = model.values[index];
            ValueChunkUse { chunk, live_records: 1, live_granules: 2 + index as u32 % 8 }
        };
        assert!(before.key_tail.1 <= layout.chunk_units);
        StoreStart {
            level: before.level,
            is_counted: true,
            replay: ReplayStart {
                sequence: last + 1,
                index: ChunkIndex(before.key_tail.0),
                unit: before.key_tail.1,
                incarnation,
                previous: before.previous,
            },
            durable_through: if self.is_lost { LOST_STORE_DURABLE_THROUGH } else { model.last_sequence },
            key_head: ChunkIndex(key_head),
            value_head: ChunkIndex(model.value_head),
            value_tail: model.value_tail,
            next_key_chunk: model.keys[model.key_tail.0 as usize + 1],
            next_value_chunk: model.values[model.value_tail.index.0 as usize + 1],
            totals: model.totals,
            key_chunks: model.keys[key_head as usize..=model.key_tail.0 as usize].to_vec(),
            value_chunks: (model.value_head as usize..=model.value_tail.index.0 as usize).map(uses).collect(),
            pinned: self.pinned.clone(),
            ..self.start.clone()
        }
    }

    /// Takes the images behind one away.
    pub fn go_back(&mut self, last: u64, layout: &LogLayout) {
        let start_tail = self.start.value_tail;
        if last < self.model.last_sequence {
            match self.written.get(&last) {
                Some(image) => self.model = image.after.clone(),
                None => {
                    let fresh = TestStore::new(
                        self.partition,
                        self.partition as u16 + 1,
                        vec![self.start.key_chunks[0]],
                        vec![self.start.value_chunks[0].chunk],
                    );
                    assert_eq!(last, 0, "an image before the first");
                    self.model = fresh.model;
                }
            }
        }
        let model = &mut self.model;
        model.value_tail = model.value_tail.max(start_tail);
        // The checkpoint may know more of the value log than the last image.
        let chunks = self.start.value_chunks.iter().map(|of| of.chunk).chain([self.start.next_value_chunk]);
        for (chunk, index) in chunks.zip(self.start.value_head.0 as usize..) {
            if index == model.values.len() && chunk.0 < layout.chunks {
                model.values.push(chunk);
            }
        }
        if model.keys.len() == 1 && self.start.next_key_chunk.0 < layout.chunks {
            model.keys.push(self.start.next_key_chunk);
        }
        model.value_head = model.value_head.max(self.start.value_head.0);
        model.value_tail.granule = model.value_tail.granule.next_multiple_of(layout.unit_granules());
        model.values.truncate(model.value_tail.index.0 as usize + 2);
        self.written.retain(|&sequence, _| sequence <= last);
        self.flushed = last;
        // The others are free.
        let retired = self.start.replay.index.0..model.key_head;
        self.emptied.retain(|(index, _, is_key)| *is_key && retired.contains(index));
    }
}
