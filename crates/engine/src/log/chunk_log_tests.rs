//! A chunk log against a list of appends: where they lie, in which order, and which chunks are given back.

use super::chunk_log::ChunkLog;
use super::chunk_pool::{ChunkOwner, ChunkPool, ChunkState};
use super::log_layout::ChunkSizes;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind, LogPlace};
use super::space_limits::{ChunkPurpose, SpaceLimits};
use proptest::collection::vec;
use proptest::prelude::*;

const CHUNK_UNITS: u32 = 16;
const CHUNKS: u32 = 64;

fn pool() -> ChunkPool {
    ChunkPool::new(100, ChunkSizes::of_units(CHUNK_UNITS), SpaceLimits::new(CHUNKS, 2, 1))
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Append(u32, bool),
    Hop,
    /// The head passes so many sealed chunks, the first of which may be pinned before.
    Advance(usize, bool),
    /// The oldest retired chunk is released.
    Release,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        12 => (1..=CHUNK_UNITS, any::<bool>()).prop_map(|(units, compacts)| Step::Append(units, compacts)),
        1 => Just(Step::Hop),
        3 => (0..6usize, prop::bool::weighted(0.2)).prop_map(|(chunks, pins)| Step::Advance(chunks, pins)),
        4 => Just(Step::Release),
    ];
    vec(step, 0..300)
}

/// The log and what it must be.
struct Model {
    pool: ChunkPool,
    log: ChunkLog,
    /// The chunks from index `head` on.
    chunks: Vec<ChunkNumber>,
    head: u32,
    tail_unit: u32,
    retired: Vec<ChunkNumber>,
    pinned: usize,
}

impl Model {
    fn hop(&mut self, next: ChunkNumber) {
        self.chunks.push(next);
        self.tail_unit = 0;
    }

    fn append(&mut self, units: u32, purpose: ChunkPurpose) {
        let (free, next) = (self.pool.free(), self.log.next_reserved());
        let place = self.log.append(units, &self.pool, purpose);
        if self.tail_unit + units > CHUNK_UNITS {
            if free <= self.pool.limits().reservation_floor(purpose) {
                assert_eq!((place, self.pool.free()), (None, free));
                return;
            }
            self.hop(next);
        }
        let index = ChunkIndex(self.head + self.chunks.len() as u32 - 1);
        let chunk = *self.chunks.last().unwrap();
        assert_eq!(place, Some(LogPlace { index, chunk, unit: self.tail_unit }));
        self.tail_unit += units;
    }

    fn advance(&mut self, chunks: usize, pins: bool) {
        let passed = chunks.min(self.chunks.len() - 1);
        if pins && passed > 0 {
            self.pool.pin(self.chunks[0]);
            self.pinned += 1;
        }
        let is_pinned = |chunk: &ChunkNumber| self.pool.state_of(*chunk) == ChunkState::Pinned;
        let given: Vec<ChunkNumber> = self.chunks.drain(..passed).filter(|chunk| !is_pinned(chunk)).collect();
        self.head += passed as u32;
        let retired = self.log.advance_head(ChunkIndex(self.head), &self.pool);
        assert_eq!(retired.into_iter().map(|(_, chunk)| chunk).collect::<Vec<_>>(), given);
        self.retired.extend(given);
    }

    fn check(&self) {
        assert_eq!(self.log.head(), ChunkIndex(self.head));
        assert!(self.log.chunks().eq(self.chunks.iter().copied()));
        let (tail, sealed) = self.chunks.split_last().unwrap();
        assert_eq!((self.log.tail().chunk, self.log.tail().unit), (*tail, self.tail_unit));
        let indexed = sealed.iter().zip(self.head..).map(|(&chunk, index)| (ChunkIndex(index), chunk));
        assert!(self.log.sealed().eq(indexed));
        let state = |chunk: &ChunkNumber| self.pool.state_of(*chunk);
        assert!(sealed.iter().all(|chunk| state(chunk) == ChunkState::Sealed));
        assert_eq!((state(tail), state(&self.log.next_reserved())), (ChunkState::Open, ChunkState::Reserved));
        let in_use = self.chunks.len() + 1 + self.retired.len() + self.pinned;
        assert_eq!(self.pool.free() as usize + in_use, CHUNKS as usize);
        assert_eq!(self.log.chunk_at(ChunkIndex(self.head)), self.chunks.first().copied());
        assert_eq!(self.head.checked_sub(1).and_then(|before| self.log.chunk_at(ChunkIndex(before))), None);
        assert_eq!(self.log.chunk_at(ChunkIndex(self.head + self.chunks.len() as u32)), None);
        for (&chunk, index) in self.chunks.iter().zip(self.head..) {
            let owner = ChunkOwner { partition: 3, kind: LogKind::Keys, index: ChunkIndex(index) };
            assert_eq!(self.pool.owner_of(self.pool.first_unit_of(chunk) + 2), Some((owner, 2)));
        }
    }
}

proptest! {
    #[test]
    fn the_log_agrees_with_a_list_of_chunks(steps in steps()) {
        let pool = pool();
        let log = ChunkLog::create(3, LogKind::Keys, &pool).unwrap();
        let chunks = log.chunks().collect();
        let mut model = Model { pool, log, chunks, head: 0, tail_unit: 0, retired: Vec::new(), pinned: 0 };
        for step in steps {
            match step {
                Step::Append(units, false) => model.append(units, ChunkPurpose::User),
                Step::Append(units, true) => model.append(units, ChunkPurpose::KeyCompaction),
                Step::Hop => {
                    let next = model.log.next_reserved();
                    if let Some(place) = model.log.hop(&model.pool, ChunkPurpose::Compaction) {
                        prop_assert_eq!((place.chunk, place.unit), (next, 0));
                        model.hop(next);
                    }
                }
                Step::Advance(chunks, pins) => model.advance(chunks, pins),
                Step::Release if !model.retired.is_empty() => model.pool.release(model.retired.remove(0)),
                Step::Release => {}
            }
            model.check();
        }
    }
}

#[test]
fn a_log_goes_around_its_chunks_for_ever() {
    let pool = pool();
    let mut log = ChunkLog::create(0, LogKind::Values, &pool).unwrap();
    for round in 0..1_000 {
        let place = log.append(CHUNK_UNITS, &pool, ChunkPurpose::User).unwrap();
        assert_eq!(place.index, ChunkIndex(round));
        log.advance_head(place.index, &pool).into_iter().for_each(|(_, chunk)| pool.release(chunk));
    }
    assert_eq!(pool.free(), CHUNKS - 2);
}

#[test]
fn a_recovered_log_goes_on_behind_its_tail() {
    let pool = pool();
    let chunks = [5, 9, 2].map(ChunkNumber);
    let owner = |index| ChunkOwner { partition: 1, kind: LogKind::Keys, index: ChunkIndex(index) };
    assert!(pool.adopt(chunks[0], ChunkState::Sealed, owner(40), None));
    assert!(pool.adopt(chunks[1], ChunkState::Sealed, owner(41), None));
    assert!(pool.adopt(chunks[2], ChunkState::Open, owner(42), None));
    assert!(pool.adopt(ChunkNumber(30), ChunkState::Reserved, owner(43), None));
    let mut log = ChunkLog::recovered(1, LogKind::Keys, ChunkIndex(40), chunks.to_vec(), 14, ChunkNumber(30));
    let place = |index, chunk, unit| Some(LogPlace { index: ChunkIndex(index), chunk, unit });
    assert_eq!(log.append(2, &pool, ChunkPurpose::User), place(42, chunks[2], 14));
    assert_eq!(log.append(3, &pool, ChunkPurpose::User), place(43, ChunkNumber(30), 0));
    let retired = [(ChunkIndex(40), chunks[0]), (ChunkIndex(41), chunks[1])];
    assert_eq!(log.advance_head(ChunkIndex(42), &pool), retired);
}

#[test]
fn a_log_that_gets_no_second_chunk_takes_none() {
    let pool = pool();
    let floor = pool.limits().reservation_floor(ChunkPurpose::User);
    while pool.free() > floor + 1 {
        pool.reserve(ChunkPurpose::User).unwrap();
    }
    assert!(ChunkLog::create(0, LogKind::Keys, &pool).is_none());
    assert_eq!(pool.free(), floor + 1);
}

#[test]
fn an_index_is_never_used_twice() {
    let pool = pool();
    let index = u32::MAX - 1;
    let owner = ChunkOwner { partition: 0, kind: LogKind::Keys, index: ChunkIndex(index) };
    assert!(pool.adopt(ChunkNumber(0), ChunkState::Open, owner, None));
    assert!(pool.adopt(ChunkNumber(1), ChunkState::Reserved, owner, None));
    let mut log =
        ChunkLog::recovered(0, LogKind::Keys, ChunkIndex(index), vec![ChunkNumber(0)], 0, ChunkNumber(1));
    assert!(log.append(CHUNK_UNITS, &pool, ChunkPurpose::User).is_some());
    assert_eq!(log.append(1, &pool, ChunkPurpose::User), None);
}

#[test]
#[should_panic(expected = "an append of 17 units")]
fn an_append_longer_than_a_chunk_is_a_bug() {
    let pool = pool();
    ChunkLog::create(0, LogKind::Keys, &pool).unwrap().append(17, &pool, ChunkPurpose::User);
}
