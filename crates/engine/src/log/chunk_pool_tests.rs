//! The chunk pool: its states, floors and counts against a model, and readers that detect reuse.

use super::chunk_directory::{DIRECTORY_ID_BYTES, DIRECTORY_TRAILER_BYTES};
use super::chunk_pool::{CHUNK_AMOUNT_MAX, CHUNK_RECORDS_MAX, ChunkOwner, ChunkPool, ChunkState};
use super::log_layout::ChunkSizes;
use super::log_place::{ChunkIndex, ChunkNumber, LogKind};
use super::sealed_sums::{LiveContents, SealedSums};
use super::space_limits::{ChunkPurpose, SpaceLimits};
use proptest::collection::vec;
use proptest::prelude::*;

const CHUNKS: u32 = 64;
const CHUNK_UNITS: u32 = 128;
const STORES: u32 = 2;
const FIRST_UNIT: u64 = 1_000;

fn pool() -> ChunkPool {
    ChunkPool::new(FIRST_UNIT, ChunkSizes::of_units(CHUNK_UNITS), SpaceLimits::new(CHUNKS, STORES, 1))
}

fn owner(partition: u32, index: u32) -> ChunkOwner {
    let kind = if partition.is_multiple_of(2) { LogKind::Keys } else { LogKind::Values };
    ChunkOwner { partition, kind, index: ChunkIndex(index) }
}

fn purpose(number: u8) -> ChunkPurpose {
    [ChunkPurpose::User, ChunkPurpose::Delete, ChunkPurpose::Compaction, ChunkPurpose::KeyCompaction]
        [usize::from(number) % 4]
}

/// A chunk of the model.
#[derive(Clone, Copy, Debug)]
struct ModelChunk {
    state: ChunkState,
    owner: Option<ChunkOwner>,
    live: LiveContents,
    /// The granules that compaction has moved out of it.
    vacated: u32,
    opened: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Reserve(u8),
    /// The chunk with this number, counted round among those in the state, goes on to the next one, or to the other.
    Advance(ChunkState, usize, bool),
    AddLive(usize, i32, i64),
    AddVacated(usize, u32),
    /// A reader takes the number of openings.
    Read,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let state = prop_oneof![
        3 => Just(ChunkState::Reserved),
        2 => Just(ChunkState::Open),
        2 => Just(ChunkState::Sealed),
        1 => Just(ChunkState::Pinned),
        2 => Just(ChunkState::Retired)
    ];
    let step = prop_oneof![
        4 => any::<u8>().prop_map(Step::Reserve),
        8 => (state, any::<usize>(), prop::bool::weighted(0.2)).prop_map(|(s, n, other)| Step::Advance(s, n, other)),
        3 => (any::<usize>(), -9..10i32, -90..91i64).prop_map(|(n, records, amount)| Step::AddLive(n, records, amount)),
        2 => (any::<usize>(), 0..2_000u32).prop_map(|(n, granules)| Step::AddVacated(n, granules)),
        2 => Just(Step::Read),
    ];
    vec(step, 0..400)
}

/// Moves a chunk on, in the pool and in the model.
fn advance(pool: &ChunkPool, model: &mut [ModelChunk], chunk: ChunkNumber, other: bool, opens: &mut u64) {
    let of_model = &mut model[chunk.0 as usize];
    of_model.state = match (of_model.state, other) {
        (ChunkState::Reserved, true) => {
            pool.return_reserved(chunk);
            ChunkState::Free
        }
        (ChunkState::Reserved, false) => {
            *opens += 1;
            let owner = ChunkOwner { partition: chunk.0 % STORES, ..owner(chunk.0 / 2, *opens as u32) };
            of_model.vacated = 0;
            pool.open(chunk, owner);
            (of_model.owner, of_model.live, of_model.opened) = (Some(owner), LiveContents::default(), *opens);
            ChunkState::Open
        }
        (ChunkState::Open, _) => {
            pool.seal(chunk);
            ChunkState::Sealed
        }
        (ChunkState::Sealed, true) => {
            pool.pin(chunk);
            ChunkState::Pinned
        }
        (ChunkState::Sealed, false) | (ChunkState::Pinned, _) => {
            pool.retire(chunk);
            ChunkState::Retired
        }
        (ChunkState::Retired, _) => {
            pool.release(chunk);
            ChunkState::Free
        }
        (ChunkState::Free, _) => unreachable!("a free chunk is reserved"),
    };
    if of_model.state == ChunkState::Free {
        of_model.owner = None;
    }
}

fn assert_agrees(pool: &ChunkPool, model: &[ModelChunk], readers: &[u64]) {
    let free = model.iter().filter(|chunk| chunk.state == ChunkState::Free).count();
    assert_eq!(pool.free() as usize, free);
    for (number, chunk) in (0..).map(ChunkNumber).zip(model) {
        assert_eq!(pool.state_of(number), chunk.state, "{number:?}");
        let unit = pool.first_unit_of(number) + u64::from(number.0 % CHUNK_UNITS);
        assert_eq!(
            pool.owner_of(unit),
            chunk.owner.map(|owner| (owner, number.0 % CHUNK_UNITS)),
            "{number:?}"
        );
        if chunk.owner.is_some() {
            assert_eq!(pool.live_of(number), Some(chunk.live), "{number:?}");
        }
        for &opens in readers {
            assert_eq!(pool.unopened_since(unit, opens), chunk.opened <= opens, "{number:?} since {opens}");
        }
    }
    for partition in 0..STORES {
        for kind in [LogKind::Keys, LogKind::Values] {
            let is_of = |owner: ChunkOwner| (owner.partition, owner.kind) == (partition, kind);
            let sealed = model
                .iter()
                .filter(|chunk| chunk.state == ChunkState::Sealed && chunk.owner.is_some_and(is_of));
            assert_eq!(pool.sealed_sums(partition, kind), recounted(kind, sealed), "{partition} {kind:?}");
        }
    }
}

/// The sums of sealed chunks, by the sizes of [`ChunkSizes::of_units`].
fn recounted<'a>(kind: LogKind, chunks: impl Iterator<Item = &'a ModelChunk>) -> SealedSums {
    let mut sums = SealedSums::default();
    for chunk in chunks {
        let LiveContents { records, amount } = chunk.live;
        let (records, amount) = (u64::from(records), u64::from(amount));
        let live_bytes = match kind {
            LogKind::Keys => amount * 512,
            LogKind::Values => {
                amount * 8 + records * DIRECTORY_ID_BYTES as u64 + DIRECTORY_TRAILER_BYTES as u64
            }
        };
        // All but a 32nd of 64 KiB.
        let garbage_bytes =
            (63_488u64).saturating_sub(live_bytes).saturating_sub(u64::from(chunk.vacated) * 8);
        sums.counted += 1;
        sums.records += records;
        sums.amount += amount;
        sums.garbage_bytes += garbage_bytes;
    }
    sums
}

proptest! {
    #[test]
    fn the_pool_agrees_with_a_model(steps in steps()) {
        let pool = pool();
        let chunk = ModelChunk { state: ChunkState::Free, owner: None, live: LiveContents::default(), vacated: 0, opened: 0 };
        let mut model = vec![chunk; CHUNKS as usize];
        let (mut opens, mut readers) = (0, vec![0]);
        for step in steps {
            match step {
                Step::Reserve(number) => {
                    let free = pool.free();
                    let reserved = pool.reserve(purpose(number));
                    prop_assert_eq!(reserved.is_some(), free > pool.limits().reservation_floor(purpose(number)));
                    if let Some(chunk) = reserved {
                        prop_assert_eq!(model[chunk.0 as usize].state, ChunkState::Free);
                        model[chunk.0 as usize].state = ChunkState::Reserved;
                    }
                }
                Step::Advance(state, number, other) => {
                    let found: Vec<u32> =
                        (0..CHUNKS).filter(|&chunk| model[chunk as usize].state == state).collect();
                    if !found.is_empty() {
                        advance(&pool, &mut model, ChunkNumber(found[number % found.len()]), other, &mut opens);
                    }
                }
                Step::AddLive(number, records, amount) => {
                    let chunk = number % CHUNKS as usize;
                    let of_model = &mut model[chunk];
                    let counted = (of_model.live.records.checked_add_signed(records), u64::from(of_model.live.amount).checked_add_signed(amount));
                    if let (Some(_), (Some(records_after), Some(amount_after))) = (of_model.owner, counted) {
                        pool.add_live(ChunkNumber(chunk as u32), records, amount);
                        of_model.live = LiveContents { records: records_after, amount: amount_after as u32 };
                    }
                }
                Step::AddVacated(number, granules) => {
                    let chunk = number % CHUNKS as usize;
                    pool.add_vacated(ChunkNumber(chunk as u32), granules);
                    model[chunk].vacated += granules;
                }
                Step::Read => {
                    prop_assert_eq!(pool.opens_now(), opens);
                    readers.push(opens);
                }
            }
            assert_agrees(&pool, &model, &readers[readers.len().saturating_sub(3)..]);
        }
    }
}

#[test]
fn each_purpose_leaves_the_chunks_of_the_others() {
    let (pool, limits) = (pool(), SpaceLimits::new(CHUNKS, 2, 1));
    let mut taken = 0;
    for purpose in
        [ChunkPurpose::User, ChunkPurpose::Delete, ChunkPurpose::Compaction, ChunkPurpose::KeyCompaction]
    {
        while pool.reserve(purpose).is_some() {
            taken += 1;
        }
        assert_eq!(pool.free(), limits.reservation_floor(purpose), "{purpose:?}");
    }
    assert_eq!((taken, pool.free()), (CHUNKS, 0));
}

#[test]
fn every_value_of_a_count_is_kept() {
    let pool = pool();
    let chunk = pool.reserve(ChunkPurpose::User).unwrap();
    pool.open(chunk, owner(u32::MAX, u32::MAX));
    pool.add_live(chunk, CHUNK_RECORDS_MAX as i32, CHUNK_AMOUNT_MAX.into());
    assert_eq!(
        pool.live_of(chunk),
        Some(LiveContents { records: CHUNK_RECORDS_MAX, amount: CHUNK_AMOUNT_MAX })
    );
    assert_eq!(pool.owner_of(pool.first_unit_of(chunk)), Some((owner(u32::MAX, u32::MAX), 0)));
    pool.add_live(chunk, -(CHUNK_RECORDS_MAX as i32), -i64::from(CHUNK_AMOUNT_MAX));
    assert_eq!(
        (pool.live_of(chunk), pool.state_of(chunk)),
        (Some(LiveContents::default()), ChunkState::Open)
    );
}

#[test]
fn a_recovered_chunk_is_claimed_once_and_may_be_uncounted() {
    let pool = pool();
    let live = Some(LiveContents { records: 3, amount: 40 });
    assert!(pool.adopt(ChunkNumber(7), ChunkState::Sealed, owner(1, 9), live));
    assert!(!pool.adopt(ChunkNumber(7), ChunkState::Open, owner(0, 2), None), "it has an owner");
    assert!(!pool.adopt(ChunkNumber(CHUNKS), ChunkState::Open, owner(0, 2), None), "there is no such chunk");
    assert!(pool.adopt(ChunkNumber(8), ChunkState::Open, owner(0, 2), None));
    assert_eq!(
        (pool.free(), pool.live_of(ChunkNumber(7)), pool.live_of(ChunkNumber(8))),
        (CHUNKS - 2, live, None)
    );
    pool.add_live(ChunkNumber(8), -5, -5);
    assert_eq!(pool.live_of(ChunkNumber(8)), None, "a count that is unknown stays so");
    let all: Vec<ChunkNumber> = std::iter::from_fn(|| pool.reserve(ChunkPurpose::KeyCompaction)).collect();
    assert_eq!(all.len() as u32, CHUNKS - 2);
    assert!(!all.contains(&ChunkNumber(7)) && !all.contains(&ChunkNumber(8)));
}

#[test]
fn units_outside_of_the_pool_have_no_owner() {
    let pool = pool();
    let end = FIRST_UNIT + u64::from(CHUNKS * CHUNK_UNITS);
    for unit in [0, FIRST_UNIT - 1, end, u64::MAX] {
        assert_eq!(
            (pool.chunk_of(unit), pool.owner_of(unit), pool.unopened_since(unit, u64::MAX)),
            (None, None, false)
        );
    }
    assert_eq!(pool.chunk_of(end - 1), Some((ChunkNumber(CHUNKS - 1), CHUNK_UNITS - 1)));
    assert_eq!(pool.chunk_of(FIRST_UNIT), Some((ChunkNumber(0), 0)));
}

#[test]
fn a_reader_finds_out_that_its_chunk_was_opened_meanwhile() {
    let pool = pool();
    let chunk = pool.reserve(ChunkPurpose::User).unwrap();
    pool.open(chunk, owner(1, 0));
    let (unit, before) = (pool.first_unit_of(chunk) + 5, pool.opens_now());
    pool.seal(chunk);
    pool.retire(chunk);
    pool.release(chunk);
    assert!(pool.unopened_since(unit, before), "a free chunk has its bytes");
    // Another chunk is opened: that does not concern the reader.
    let other = pool.reserve(ChunkPurpose::User).unwrap();
    assert_ne!(other, chunk);
    pool.open(other, owner(1, 1));
    assert!(pool.unopened_since(unit, before));
    let again = std::iter::from_fn(|| pool.reserve(ChunkPurpose::KeyCompaction))
        .find(|&found| found == chunk)
        .unwrap();
    assert!(pool.unopened_since(unit, before), "it is reserved, and not written");
    pool.open(again, owner(1, 2));
    assert!(!pool.unopened_since(unit, before) && pool.unopened_since(unit, pool.opens_now()));
}

#[test]
fn a_chunk_has_twenty_eight_bytes_of_memory() {
    assert_eq!(pool().memory_bytes(), 28 * CHUNKS as usize);
}

#[test]
#[should_panic(expected = "ChunkNumber(0): Open to Retired")]
fn an_open_chunk_that_is_retired_is_a_bug() {
    let pool = pool();
    let chunk = pool.reserve(ChunkPurpose::User).unwrap();
    pool.open(chunk, owner(1, 0));
    pool.retire(chunk);
}

#[test]
fn a_change_that_is_not_possible_makes_a_chunk_uncounted_and_is_counted() {
    let pool = pool();
    let chunk = pool.reserve(ChunkPurpose::User).unwrap();
    pool.open(chunk, owner(1, 0));
    pool.add_live(chunk, 2, 30);
    assert_eq!(pool.miscounts(), 0);
    pool.add_live(chunk, -1, -31);
    assert_eq!((pool.live_of(chunk), pool.miscounts()), (None, 1));
    // What is not counted stays so, and is no miscount.
    pool.add_live(chunk, -1, -30);
    assert_eq!((pool.live_of(chunk), pool.miscounts()), (None, 1));
    // A chunk that no log has, and one that the device does not have.
    let free = ChunkNumber((0..).find(|&other| other != chunk.0).unwrap());
    pool.add_live(free, 1, 1);
    pool.add_live(ChunkNumber(u32::MAX), 1, 1);
    assert_eq!(pool.miscounts(), 3);
}
