//! A pool that is nearly full, in a model of writes and compaction: whatever is written and overwritten, a write that the capacity admits
//! ends, no append of begun work finds the pool empty, and compaction comes to an end.
//!
//! The model has the real pool, logs, limits and policy; images and records are numbers of units. Its writes follow one another.

use super::chunk_log::ChunkLog;
use super::chunk_pool::{ChunkPool, ChunkState};
use super::compaction_policy::{CompactionCandidate, LogCosts, choose_compacted_log};
use super::log_layout::ChunkSizes;
use super::log_layout::MARKER_UNITS;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::space_limits::{CHUNK_END_DIVISOR, ChunkPurpose, SpaceLimits};
use octokv_base::Prng;
use std::collections::BTreeMap;

/// What the chunks and images of a model have.
#[derive(Clone, Copy)]
struct ModelSizes {
    /// Units of a chunk.
    chunk: u32,
    /// The most units of an image.
    image: u32,
    /// Segments of a store.
    segments: usize,
}

const SIZES: ModelSizes = ModelSizes { chunk: 128, image: 3, segments: 16 };
/// The longest value: an eighth of the smallest pool.
const VALUE_UNITS_MAX: u64 = 8 * SIZES.chunk as u64;
/// A compaction that goes on for more rounds than the pool has chunks, several times over, does not end.
const ROUNDS_PER_CHUNK_MAX: u32 = 20;

/// Units of a value in one chunk.
#[derive(Clone, Copy)]
struct ModelPiece {
    index: ChunkIndex,
    units: u32,
}

struct ModelStore {
    keys: ChunkLog,
    values: ChunkLog,
    /// The image of each segment.
    images: Vec<Option<ModelPiece>>,
    /// The values, by number; the segment of a value is its number modulo the segments.
    placed: BTreeMap<usize, Vec<ModelPiece>>,
    /// The units that compaction has moved out of chunks of the value log.
    vacated: BTreeMap<u32, u64>,
    /// Whether some values of the head chunk were moved, and others found no space.
    is_paused: bool,
}

struct Model {
    sizes: ModelSizes,
    pool: ChunkPool,
    stores: Vec<ModelStore>,
    random: Prng,
    /// Live units.
    used: u64,
    rounds: u64,
}

/// The chunks that a value of so many units may open.
fn record_chunks(units: u64, chunk_units: u32) -> u32 {
    units.div_ceil(chunk_units.into()) as u32
}

impl Model {
    /// A pool without values, which will have at most `longest` units.
    fn new((chunks, sizes): (u32, ModelSizes), stores: u32, longest: u64, seed: u64) -> Model {
        let limits = SpaceLimits::new(chunks, stores, record_chunks(longest, sizes.chunk));
        let pool = ChunkPool::new(0, ChunkSizes::of_units(sizes.chunk), limits);
        let make = |partition| ModelStore {
            keys: ChunkLog::create(partition, LogKind::Keys, &pool).expect("an empty pool has chunks"),
            values: ChunkLog::create(partition, LogKind::Values, &pool).expect("an empty pool has chunks"),
            images: vec![None; sizes.segments],
            placed: BTreeMap::new(),
            vacated: BTreeMap::new(),
            is_paused: false,
        };
        let stores = (0..stores).map(make).collect();
        Model { sizes, pool, stores, random: Prng::new(seed), used: 0, rounds: 0 }
    }

    fn add_live(&mut self, kind: LogKind, store: usize, piece: ModelPiece, sign: i32) {
        let log = match kind {
            LogKind::Keys => &self.stores[store].keys,
            LogKind::Values => &self.stores[store].values,
        };
        let chunk = log.chunk_at(piece.index).expect("a live piece is in its log");
        self.pool.add_live(chunk, sign, i64::from(sign) * i64::from(piece.units));
        self.used =
            self.used.checked_add_signed(i64::from(sign) * i64::from(piece.units)).expect("not below zero");
    }

    /// Appends the image of a segment, and publishes it.
    fn append_image(&mut self, store: usize, segment: usize, purpose: ChunkPurpose) {
        let units = 1 + self.random.below(self.sizes.image.into()) as u32;
        let place = self.stores[store].keys.append_image(units, &self.pool, purpose);
        let place =
            place.unwrap_or_else(|| panic!("no chunk for an image: {purpose:?}, {} free", self.pool.free()));
        let new = ModelPiece { index: place.index, units };
        self.add_live(LogKind::Keys, store, new, 1);
        if let Some(old) = self.stores[store].images[segment].replace(new) {
            self.add_live(LogKind::Keys, store, old, -1);
        }
    }

    /// Appends units to a value log: as many as fit the tail, unless those are too few, and the rest in the following chunks.
    fn append_pieces(&mut self, store: usize, units: u64, purpose: ChunkPurpose) -> Vec<ModelPiece> {
        let (mut left, mut pieces) = (units, Vec::new());
        while left > 0 {
            let log = &mut self.stores[store].values;
            let rest = self.sizes.chunk - log.tail().unit;
            let fits = left <= u64::from(rest) || rest >= self.sizes.chunk / CHUNK_END_DIVISOR;
            let units = left.min(u64::from(if fits { rest } else { self.sizes.chunk })) as u32;
            let place = log.append(units, &self.pool, purpose);
            let place = place
                .unwrap_or_else(|| panic!("no chunk for a value: {purpose:?}, {} free", self.pool.free()));
            let piece = ModelPiece { index: place.index, units };
            self.add_live(LogKind::Values, store, piece, 1);
            pieces.push(piece);
            left -= u64::from(units);
        }
        pieces
    }

    fn append_value(&mut self, store: usize, value: usize, units: u64) {
        let pieces = self.append_pieces(store, units, ChunkPurpose::User);
        self.remove_value(store, value);
        self.stores[store].placed.insert(value, pieces);
    }

    fn remove_value(&mut self, store: usize, value: usize) -> bool {
        let old = self.stores[store].placed.remove(&value);
        let existed = old.is_some();
        old.into_iter().flatten().for_each(|piece| self.add_live(LogKind::Values, store, piece, -1));
        existed
    }

    /// Waits until a write may begin, and compacts until then.
    fn begin(&mut self, purpose: ChunkPurpose, units: u64) {
        let mut left = ROUNDS_PER_CHUNK_MAX * self.pool.chunks();
        let limits = *self.pool.limits();
        let taken = limits.chunks_taken_max(1, units, self.sizes.chunk - MARKER_UNITS);
        let wanted = limits.pass_floor(purpose) + taken as u32;
        while !limits.may_begin(purpose, self.pool.free(), taken) {
            assert!(
                self.compact(wanted),
                "{purpose:?} waits for ever: {} free, {} used",
                self.pool.free(),
                self.used
            );
            left = left.checked_sub(1).expect("compaction frees nothing");
        }
    }

    fn capacity_units(&self) -> u64 {
        u64::from(self.pool.limits().capacity_chunks()) * u64::from(self.sizes.chunk)
    }

    /// A put; false if the capacity does not admit it.
    fn put(&mut self, store: usize, value: usize, units: u64) -> bool {
        let taken = units + u64::from(self.sizes.image);
        let ends =
            self.pool.key_end_excess_bytes(ChunkPurpose::User).div_ceil(self.pool.sizes().unit_bytes.into());
        if self.used + taken + ends > self.capacity_units() {
            return false;
        }
        self.begin(ChunkPurpose::User, taken);
        self.append_value(store, value, units);
        self.append_image(store, value % self.sizes.segments, ChunkPurpose::User);
        true
    }

    fn delete(&mut self, store: usize, value: usize) {
        if !self.stores[store].placed.contains_key(&value) {
            return;
        }
        self.begin(ChunkPurpose::Delete, self.sizes.image.into());
        self.append_image(store, value % self.sizes.segments, ChunkPurpose::Delete);
        self.remove_value(store, value);
    }

    fn candidate(&self, store: usize, kind: LogKind) -> Option<CompactionCandidate> {
        let of_store = &self.stores[store];
        let log = if kind == LogKind::Keys { &of_store.keys } else { &of_store.values };
        let live = |chunk| self.pool.live_of(chunk).expect("counted");
        let (_, head) = log.sealed().next()?;
        // Ends that nothing fits in, up to what compaction leaves again: the model does not know them.
        let sizes = self.pool.sizes();
        let waste = match kind {
            LogKind::Keys => {
                let images = self.pool.sealed_sums(store as u32, kind);
                (sizes.key_end_bytes(&images) / u64::from(sizes.unit_bytes)) as u32
            }
            LogKind::Values => self.sizes.chunk / CHUNK_END_DIVISOR,
        };
        let vacated = |index: ChunkIndex| match kind {
            LogKind::Keys => 0,
            LogKind::Values => of_store.vacated.get(&index.0).copied().unwrap_or(0),
        };
        let garbage = |(index, chunk)| {
            let unused = u64::from((self.sizes.chunk - live(chunk).amount).saturating_sub(waste));
            unused.saturating_sub(vacated(index))
        };
        // The order of the choices is no part of the argument: costs of both logs as if their turnover were the same.
        let costs = LogCosts {
            put_bytes: 1.0,
            live_bytes: 1.0,
            move_cost: 1.0,
            head_live: f64::from(live(head).amount) / f64::from(self.sizes.chunk),
        };
        Some(CompactionCandidate {
            store: store as u32,
            log: kind,
            space_worth: costs.space_worth(),
            is_head_empty: kind == LogKind::Values && live(head).records == 0,
            garbage_bytes: log.sealed().map(garbage).sum(),
            is_begun: kind == LogKind::Values && of_store.is_paused,
            needed_chunks: match (kind, live(head).records) {
                (LogKind::Keys, _) | (LogKind::Values, 0) => 0,
                // As for the longest record.
                (LogKind::Values, _) => self.pool.limits().value - self.pool.limits().key,
            },
        })
    }

    /// One round of compaction; false if none is chosen.
    fn compact(&mut self, wanted: u32) -> bool {
        let kinds = [LogKind::Keys, LogKind::Values];
        let pairs = (0..self.stores.len()).flat_map(|store| kinds.map(|kind| (store, kind)));
        let candidates: Vec<_> = pairs.filter_map(|(store, kind)| self.candidate(store, kind)).collect();
        let free = self.pool.free();
        let Some(chosen) = choose_compacted_log(
            &candidates,
            free,
            wanted,
            free - self.pool.limits().key,
            self.pool.limits(),
            &[],
        ) else {
            return false;
        };
        self.rounds += 1;
        let CompactionCandidate { store, log, .. } = candidates[chosen];
        match log {
            LogKind::Keys => self.compact_keys(store as usize),
            LogKind::Values => self.compact_values(store as usize),
        }
        true
    }

    fn compact_keys(&mut self, store: usize) {
        let head = self.stores[store].keys.head();
        for segment in 0..self.sizes.segments {
            if self.stores[store].images[segment].is_some_and(|image| image.index == head) {
                // A moved image keeps its length.
                let old = self.stores[store].images[segment].expect("it is there");
                let place =
                    self.stores[store].keys.append_image(old.units, &self.pool, ChunkPurpose::KeyCompaction);
                let index = place.expect("key compaction has two chunks of its own").index;
                let new = ModelPiece { index, units: old.units };
                self.add_live(LogKind::Keys, store, new, 1);
                self.stores[store].images[segment] = Some(new);
                self.add_live(LogKind::Keys, store, old, -1);
            }
        }
        let passed = self.stores[store].keys.advance_head(ChunkIndex(head.0 + 1), &self.pool);
        self.release(store, passed);
    }

    /// Frees chunks that are retired, behind a marker that states the head.
    fn release(&mut self, store: usize, retired: Vec<(ChunkIndex, ChunkNumber)>) {
        let marker = self.stores[store].keys.append(MARKER_UNITS, &self.pool, ChunkPurpose::KeyCompaction);
        marker.unwrap_or_else(|| panic!("no unit for a marker: {} free", self.pool.free()));
        retired.into_iter().for_each(|(_, chunk)| self.pool.release(chunk));
    }

    /// Moves the values of the head chunk as a whole, one after another, and pauses when free space is too short for one.
    fn compact_values(&mut self, store: usize) {
        let head = self.stores[store].values.head();
        let is_here = |pieces: &Vec<ModelPiece>| pieces.iter().any(|piece| piece.index == head);
        let placed = &self.stores[store].placed;
        let here: Vec<usize> =
            placed.iter().filter(|(_, pieces)| is_here(pieces)).map(|(&value, _)| value).collect();
        let mut is_paused = false;
        for value in here {
            let old = self.stores[store].placed[&value].clone();
            let units = old.iter().map(|piece| u64::from(piece.units)).sum();
            if self.pool.free() < self.pool.limits().move_floor(record_chunks(units, self.sizes.chunk)) {
                // A shorter one may have room.
                is_paused = true;
                continue;
            }
            let pieces = self.append_pieces(store, units, ChunkPurpose::Compaction);
            for piece in old {
                self.add_live(LogKind::Values, store, piece, -1);
                *self.stores[store].vacated.entry(piece.index.0).or_default() += u64::from(piece.units);
            }
            self.stores[store].placed.insert(value, pieces);
            self.append_image(store, value % self.sizes.segments, ChunkPurpose::Compaction);
        }
        self.stores[store].is_paused = is_paused;
        if !is_paused {
            self.stores[store].vacated.remove(&head.0);
            let passed = self.stores[store].values.advance_head(ChunkIndex(head.0 + 1), &self.pool);
            self.release(store, passed);
        }
    }

    fn check(&self) {
        let limits = self.pool.limits();
        let logs = self.stores.iter().flat_map(|store| [&store.keys, &store.values]);
        let in_logs: usize = logs.map(|log| log.chunk_count() + 1).sum();
        assert_eq!(self.pool.free() as usize + in_logs, limits.pool as usize, "a chunk is lost");
        assert!(self.pool.free() >= limits.key, "{} free", self.pool.free());
        for log in self.stores.iter().flat_map(|store| [&store.keys, &store.values]) {
            assert!(log.sealed().all(|(_, chunk)| self.pool.state_of(chunk) == ChunkState::Sealed));
        }
    }
}

/// Fills a pool, and overwrites and deletes at its capacity.
fn write_at_capacity(chunks: u32, stores: u32, longest: u64, seed: u64) {
    let mut model = Model::new((chunks, SIZES), stores, longest, seed);
    let (mut full, mut written) = (0, 0u64);
    let target = (4 * model.capacity_units()).max(200 * longest);
    while written < target {
        let store = model.random.below(stores.into()) as usize;
        // Skewed: most writes are of few values.
        let values = if model.random.below(2) == 0 { 10 } else { 4_000 };
        let value = model.random.below(values) as usize;
        match model.random.below(40) {
            0 => model.delete(store, value),
            _ => {
                let units = 1 + model.random.below(longest);
                written += units;
                if !model.put(store, value, units) {
                    full += 1;
                    // The capacity is full: what is there is overwritten or deleted.
                    let placed = &model.stores[store].placed;
                    if let Some((&value, _)) = placed.range(value..).next().or_else(|| placed.iter().next()) {
                        model.delete(store, value);
                    }
                }
            }
        }
        if model.random.below(16) == 0 {
            model.check();
        }
    }
    assert!(full > 0 && model.rounds > 0, "the pool was never full");
}

#[test]
fn writes_at_capacity_go_on_in_small_pools() {
    for (chunks, stores) in [(64, 1), (64, 4), (100, 3), (123, 4), (256, 16), (512, 32)] {
        for longest in [4, 40, 300] {
            write_at_capacity(chunks, stores, longest, u64::from(chunks * stores));
        }
    }
}

#[test]
fn writes_of_the_longest_values_go_on() {
    for (chunks, stores) in [(64, 1), (64, 4), (123, 4)] {
        write_at_capacity(chunks, stores, VALUE_UNITS_MAX, 7);
    }
}

#[test]
fn compaction_of_a_pool_at_capacity_ends() {
    let mut model = Model::new((128, SIZES), 4, 20, 3);
    let mut value = 0;
    while model.put(value % 4, value, 20) {
        value += 1;
    }
    // Every third value is garbage, so all chunks have some.
    for value in (0..value).step_by(3) {
        model.delete(value % 4, value);
    }
    let mut rounds = 0u32;
    // More than the pool has: until nothing is left.
    while model.compact(u32::MAX) {
        rounds += 1;
        assert!(rounds < ROUNDS_PER_CHUNK_MAX * model.pool.chunks(), "compaction goes on for ever");
    }
    model.check();
    let held = 2 * 4 * 2;
    let live = (model.used / u64::from(SIZES.chunk)) as u32;
    assert!(
        model.pool.free() + live * 32 / 31 + held + 2 >= model.pool.chunks(),
        "{} free, {live} live",
        model.pool.free()
    );
}

#[test]
fn rounds_of_key_chunks_full_of_live_images_take_no_more_than_they_free() {
    // The shortest chunks, each of them full of images of one unit: a round writes its marker beside them.
    let sizes = ModelSizes { chunk: 16, image: 1, segments: 15 * 400 };
    let mut model = Model::new((1_024, sizes), 1, 1, 5);
    for segment in 0..sizes.segments {
        model.append_image(0, segment, ChunkPurpose::User);
    }
    // Only key compaction may take what is free.
    while model.pool.reserve(ChunkPurpose::Compaction).is_some() {}
    let free = model.pool.free();
    assert_eq!(free, model.pool.limits().key);
    for round in 0..3 * 400 {
        model.compact_keys(0);
        assert!(model.pool.free() + 1 >= free, "{} of {free} free behind round {round}", model.pool.free());
    }
}
