//! Tests of passes: limits, order of arrival, and a model of writes that come, wait, end and are dropped.

use super::chunk_log::ChunkLog;
use super::chunk_pool::ChunkPool;
use super::log_layout::{ChunkSizes, MARKER_UNITS};
use super::log_place::{ChunkNumber, LogKind};
use super::space_limits::{ChunkPurpose, SpaceLimits};
use super::space_pass::{
    CompactionSpace, PassKind, PassRequest, SpaceFull, SpaceNeed, SpacePass, SpacePasses,
};
use proptest::prelude::*;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

const UNIT_BYTES: u32 = 512;
const CHUNK_UNITS: u32 = 16;
const IMAGE_UNITS: u64 = (CHUNK_UNITS - MARKER_UNITS) as u64;
const CHUNK_BYTES: u64 = (UNIT_BYTES * CHUNK_UNITS) as u64;

fn pool() -> ChunkPool {
    ChunkPool::new(0, ChunkSizes::of_units(CHUNK_UNITS), SpaceLimits::new(64, 1, 1))
}

/// Takes chunks until so many are free.
fn reserve_down_to(pool: &ChunkPool, free: u32) -> Vec<ChunkNumber> {
    (free..pool.free()).map(|_| pool.reserve(ChunkPurpose::KeyCompaction).unwrap()).collect()
}

#[derive(Default)]
struct TestWaker(AtomicBool);

impl Wake for TestWaker {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn need(kind: PassKind, units: u64, live_bytes: u64) -> SpaceNeed {
    SpaceNeed { kind, units, live_bytes }
}

fn poll<'a>(request: &mut PassRequest<'a>) -> Poll<Result<SpacePass<'a>, SpaceFull>> {
    Pin::new(request).poll(&mut Context::from_waker(Waker::noop()))
}

fn taken<'a>(passes: &'a SpacePasses, pool: &'a ChunkPool, need: SpaceNeed) -> Option<SpacePass<'a>> {
    match poll(&mut passes.take(pool, need)) {
        Poll::Ready(result) => result.ok(),
        Poll::Pending => panic!("{need:?} waits"),
    }
}

#[test]
fn live_data_is_admitted_up_to_the_limit_of_its_kind() {
    let pool = pool();
    let (capacity, tombstones) = (pool.limits().capacity_chunks(), pool.limits().tombstone_chunks());
    assert!(capacity < tombstones);
    let passes = SpacePasses::new(u64::from(capacity) * CHUNK_BYTES - 100, UNIT_BYTES, 2);
    let first = taken(&passes, &pool, need(PassKind::Put, 1, 60)).expect("100 bytes are left");
    assert!(taken(&passes, &pool, need(PassKind::Put, 1, 41)).is_none(), "60 of them are granted");
    assert!(taken(&passes, &pool, need(PassKind::Put, 1, 40)).is_some());
    // An overwriting put frees its old record.
    assert!(passes.add_used(60 - 50));
    drop(first);
    assert!(taken(&passes, &pool, need(PassKind::Put, 1, 91)).is_none());
    assert!(taken(&passes, &pool, need(PassKind::Put, 1, 90)).is_some());
    let beyond = u64::from(tombstones) * CHUNK_BYTES - passes.used_bytes();
    assert!(passes.admits(&pool, PassKind::Tombstone, beyond));
    assert!(!passes.admits(&pool, PassKind::Tombstone, beyond + 1));
    assert!(taken(&passes, &pool, need(PassKind::Tombstone, 1, beyond + 1)).is_none());
    assert!(taken(&passes, &pool, need(PassKind::Delete, 1, beyond + 1)).is_some());
}

#[test]
fn a_write_waits_until_its_floor_is_free_and_deletes_do_not_wait_for_puts() {
    let pool = pool();
    let passes = SpacePasses::new(0, UNIT_BYTES, 2);
    let limits = *pool.limits();
    // One chunk, and a hop of each log.
    let mut reserved = reserve_down_to(&pool, limits.pass + 2);
    let _task = passes.begin_task(&pool);
    let mut put = passes.take(&pool, need(PassKind::Put, IMAGE_UNITS, 100));
    assert!(poll(&mut put).is_pending());
    assert_eq!(passes.wanted_chunks(&pool), limits.pass + 3);
    assert!(taken(&passes, &pool, need(PassKind::Delete, 1, 0)).is_some(), "puts wait, deletes do not");
    let waker = Arc::new(TestWaker::default());
    let as_waker = Waker::from(Arc::clone(&waker));
    assert!(Pin::new(&mut put).poll(&mut Context::from_waker(&as_waker)).is_pending());
    passes.chunks_freed(&pool);
    assert!(!waker.0.load(Ordering::Relaxed), "none became free");
    pool.return_reserved(reserved.pop().unwrap());
    passes.chunks_freed(&pool);
    assert!(waker.0.load(Ordering::Relaxed));
    assert!(matches!(poll(&mut put), Poll::Ready(Ok(_))));
    assert_eq!(passes.wanted_chunks(&pool), 0);
    assert_eq!(passes.waited_writes(), 1, "a put that asked several times, and not the delete");
}

#[test]
fn a_put_does_not_overtake_a_longer_one_that_came_earlier() {
    let pool = pool();
    let passes = SpacePasses::new(0, UNIT_BYTES, 2);
    reserve_down_to(&pool, pool.limits().pass + 4);
    let mut long = passes.take(&pool, need(PassKind::Put, 160, 100));
    let mut short = passes.take(&pool, need(PassKind::Put, 1, 1));
    assert!(poll(&mut long).is_pending() && poll(&mut short).is_pending());
    let waker = Arc::new(TestWaker::default());
    let as_waker = Waker::from(Arc::clone(&waker));
    assert!(Pin::new(&mut short).poll(&mut Context::from_waker(&as_waker)).is_pending());
    drop(long);
    assert!(waker.0.load(Ordering::Relaxed), "the first one gave up its place");
    assert!(matches!(poll(&mut short), Poll::Ready(Ok(_))));
}

#[test]
fn without_a_task_the_first_of_a_queue_compacts_once_for_each_change() {
    let pool = pool();
    let passes = SpacePasses::new(0, UNIT_BYTES, 2);
    let running = taken(&passes, &pool, need(PassKind::Put, 1, 1)).expect("space is free");
    reserve_down_to(&pool, pool.limits().pass);
    let mut requests = [PassKind::Put, PassKind::Put, PassKind::Delete]
        .map(|kind| (passes.take(&pool, need(kind, 400, 0)), Arc::new(TestWaker::default())));
    for (request, waker) in &mut requests {
        assert!(request.compaction_turn(None).is_none(), "it has no place yet");
        let waker = Waker::from(Arc::clone(waker));
        assert!(Pin::new(request).poll(&mut Context::from_waker(&waker)).is_pending());
    }
    let [(first, first_waker), (second, second_waker), (delete, delete_waker)] = &requests;
    let woken =
        || [first_waker, second_waker, delete_waker].map(|waker| waker.0.swap(false, Ordering::Relaxed));
    assert!(second.compaction_turn(None).is_none(), "another put came earlier");
    let turn = first.compaction_turn(None).expect("nobody compacts");
    assert!(delete.compaction_turn(None).is_none(), "one at a time");
    let before = turn.changes;
    drop(turn);
    assert_eq!(woken(), [true, false, true], "the next one may compact");
    assert!(first.compaction_turn(Some(before)).is_none(), "nothing has changed");
    drop(delete.compaction_turn(None).expect("its first turn"));
    for (request, waker) in [(first, first_waker), (delete, delete_waker)] {
        assert!(request.compaction_turn(Some(before)).is_none(), "nothing has changed");
        waker.0.store(false, Ordering::Relaxed);
    }
    drop(running);
    assert!(first.compaction_turn(Some(before)).is_some(), "a write has ended");
    let task = passes.begin_task(&pool);
    assert!(first.compaction_turn(None).is_none(), "the task compacts");
    drop(task);
    assert!(first.compaction_turn(None).is_some());
}

#[test]
fn what_waits_is_refused_when_nothing_can_free_space_until_something_changes() {
    let pool = pool();
    let passes = SpacePasses::new(0, UNIT_BYTES, 2);
    let in_progress = taken(&passes, &pool, need(PassKind::Put, 1, 60)).expect("all is free");
    let reserved = reserve_down_to(&pool, pool.limits().delete);
    let _task = passes.begin_task(&pool);
    let waker = Arc::new(TestWaker::default());
    let mut first = passes.take(&pool, need(PassKind::Put, 1, 60));
    let mut second = passes.take(&pool, need(PassKind::Put, 1, 60));
    assert!(Pin::new(&mut first).poll(&mut Context::from_waker(&waker.clone().into())).is_pending());
    assert!(poll(&mut second).is_pending());
    // A write in progress may leave garbage.
    passes.set_exhausted(&pool, passes.changes());
    assert!(!waker.0.load(Ordering::Relaxed));
    let before = passes.changes();
    drop(in_progress);
    passes.set_exhausted(&pool, before);
    assert!(poll(&mut first).is_pending(), "it has ended since");
    let image = CompactionSpace::Image { store: 0, units: 1 };
    let image = passes.begin_compaction(&pool, image).expect("chunks are free");
    passes.set_exhausted(&pool, passes.changes());
    assert!(poll(&mut first).is_pending(), "an image is about to replace another");
    drop(image);
    assert!(Pin::new(&mut first).poll(&mut Context::from_waker(&waker.clone().into())).is_pending());
    waker.0.store(false, Ordering::Relaxed);
    passes.set_exhausted(&pool, passes.changes());
    assert!(waker.0.load(Ordering::Relaxed));
    assert!(poll(&mut second).is_pending(), "its turn comes behind the first");
    assert!(matches!(poll(&mut first), Poll::Ready(Err(SpaceFull))));
    assert!(matches!(poll(&mut second), Poll::Ready(Err(SpaceFull))));
    assert!(taken(&passes, &pool, need(PassKind::Put, 1, 60)).is_none(), "one that comes later");
    // A delete has space, and leaves garbage.
    let delete = need(PassKind::Delete, 0, 0);
    reserved.into_iter().take(2).for_each(|chunk| pool.return_reserved(chunk));
    drop(taken(&passes, &pool, delete).expect("there is space for deletes"));
    let mut waits = passes.take(&pool, need(PassKind::Put, 1, 60));
    assert!(poll(&mut waits).is_pending());
}

#[test]
fn compaction_leaves_what_writes_in_progress_and_key_compaction_may_take() {
    let pool = pool();
    let passes = SpacePasses::new(0, UNIT_BYTES, 2);
    let limits = *pool.limits();
    let begin = |space| passes.begin_compaction(&pool, space);
    // A put that may take a chunk, and two hops.
    let put = taken(&passes, &pool, need(PassKind::Put, IMAGE_UNITS, 0)).expect("space is free");
    reserve_down_to(&pool, limits.key + 3 + 2);
    assert_eq!(passes.spare_chunks(&pool), 2);
    let image = begin(CompactionSpace::Image { store: 0, units: 4 }).expect("one chunk");
    let record = begin(CompactionSpace::Record(1)).expect("another one");
    assert!(begin(CompactionSpace::Record(1)).is_none());
    // A second short image shares the chunk of the first; one that may be too long, and one of another store do not.
    drop(begin(CompactionSpace::Image { store: 0, units: 4 }).expect("in the same chunk"));
    assert!(begin(CompactionSpace::Image { store: 0, units: 8 }).is_none());
    assert!(begin(CompactionSpace::Image { store: 1, units: 1 }).is_none());
    passes.set_key_tail(1, pool.image_units() - 1, &pool);
    assert!(begin(CompactionSpace::Image { store: 1, units: 2 }).is_none());
    drop(begin(CompactionSpace::Image { store: 1, units: 1 }).expect("in the tail"));
    let round = begin(CompactionSpace::KeyRound).expect("F_key is for one round");
    assert!(begin(CompactionSpace::KeyRound).is_none());
    drop(record);
    drop(put);
    assert_eq!(passes.spare_chunks(&pool), 4);
    let second = begin(CompactionSpace::KeyRound).expect("two more chunks");
    assert_eq!(passes.spare_chunks(&pool), 2);
    drop((image, round, second));
    assert_eq!(passes.spare_chunks(&pool), 5);
}

#[test]
fn a_put_begins_only_if_the_part_of_compaction_is_left_as_well() {
    let pool = pool();
    let passes = SpacePasses::new(0, UNIT_BYTES, 2);
    reserve_down_to(&pool, pool.limits().pass + 3);
    let image = passes.begin_compaction(&pool, CompactionSpace::Image { store: 0, units: 4 });
    assert!(image.is_some());
    assert!(poll(&mut passes.take(&pool, need(PassKind::Put, IMAGE_UNITS, 0))).is_pending());
    drop(image);
    assert!(taken(&passes, &pool, need(PassKind::Put, IMAGE_UNITS, 0)).is_some());
}

#[derive(Clone, Debug)]
enum PassEvent {
    Come(PassKind, u64, u64),
    Leave(u8),
    /// A write ends, and has made so much of its need live.
    End(u8, u8),
    Reserve(u8),
    Free(u8),
}

fn pass_events() -> impl Strategy<Value = Vec<PassEvent>> {
    let kind =
        prop_oneof![4 => Just(PassKind::Put), 1 => Just(PassKind::Tombstone), 1 => Just(PassKind::Delete)];
    let event = prop_oneof![
        5 => (kind, 1..100u64, 0..6 * CHUNK_BYTES).prop_map(|(kind, units, live)| PassEvent::Come(kind, units, live)),
        1 => any::<u8>().prop_map(PassEvent::Leave),
        3 => any::<(u8, u8)>().prop_map(|(which, part)| PassEvent::End(which, part)),
        3 => (0..20u8).prop_map(PassEvent::Reserve),
        2 => (0..20u8).prop_map(PassEvent::Free),
    ];
    proptest::collection::vec(event, 1..80)
}

/// A request that waits.
struct WaitingWrite<'a> {
    request: PassRequest<'a>,
    need: SpaceNeed,
    waker: Arc<TestWaker>,
}

proptest! {
    #[test]
    fn writes_begin_in_order_as_soon_as_they_may_and_never_beyond_the_limits(events in pass_events()) {
        let pool = pool();
        let limits = *pool.limits();
        let passes = SpacePasses::new(0, UNIT_BYTES, 2);
        let mut reserved = Vec::new();
        let mut waiting: Vec<WaitingWrite<'_>> = Vec::new();
        let mut running: Vec<(SpaceNeed, SpacePass<'_>)> = Vec::new();
        let (mut used, mut number) = (0u64, 0);
        for event in events {
            match event {
                PassEvent::Come(kind, units, live) => {
                    let need = need(kind, units, live);
                    let request = passes.take(&pool, need);
                    let waker = Arc::new(TestWaker(AtomicBool::new(true)));
                    waiting.push(WaitingWrite { request, need, waker });
                }
                PassEvent::Leave(which) if !waiting.is_empty() => {
                    waiting.remove(which as usize % waiting.len());
                }
                PassEvent::End(which, part) if !running.is_empty() => {
                    let (need, pass) = running.remove(which as usize % running.len());
                    let live = need.live_bytes * u64::from(part) / 255;
                    assert!(passes.add_used(live as i64));
                    used += live;
                    drop(pass);
                }
                PassEvent::Reserve(count) => {
                    reserved.extend((0..count).filter_map(|_| pool.reserve(ChunkPurpose::User)));
                }
                PassEvent::Free(count) => {
                    let from = reserved.len().saturating_sub(count as usize);
                    reserved.drain(from..).for_each(|chunk| pool.return_reserved(chunk));
                    passes.chunks_freed(&pool);
                }
                _ => {}
            }
            prop_assert_eq!(passes.used_bytes(), used);
            // Only those that were woken are polled, until none is.
            while let Some(index) = waiting.iter().position(|write| write.waker.0.swap(false, Ordering::Relaxed)) {
                let WaitingWrite { need, waker, .. } = &waiting[index];
                let (need, waker) = (*need, Waker::from(Arc::clone(waker)));
                let polled = Pin::new(&mut waiting[index].request).poll(&mut Context::from_waker(&waker));
                let is_put = need.kind == PassKind::Put;
                let is_first =
                    waiting[..index].iter().all(|earlier| (earlier.need.kind == PassKind::Put) != is_put);
                let granted: u64 = running.iter().map(|(need, _)| need.live_bytes).sum();
                let limit = match need.kind {
                    PassKind::Put => limits.capacity_chunks(),
                    PassKind::Tombstone => limits.tombstone_chunks(),
                    PassKind::Delete => u32::MAX,
                };
                let is_full = used + granted + need.live_bytes > u64::from(limit) * CHUNK_BYTES;
                let units: u64 = running.iter().map(|(need, _)| need.units).sum::<u64>() + need.units;
                let taken = limits.chunks_taken_max(running.len() as u32 + 1, units, IMAGE_UNITS as u32);
                let may_begin = limits.may_begin(need.kind.purpose(), pool.free(), taken);
                match polled {
                    Poll::Ready(Err(SpaceFull)) => {
                        prop_assert!(is_full);
                        waiting.remove(index);
                    }
                    Poll::Ready(Ok(pass)) => {
                        prop_assert!(!is_full && is_first && may_begin, "write {}", number);
                        running.push((need, pass));
                        waiting.remove(index);
                    }
                    Poll::Pending => prop_assert!(!(is_full || is_first && may_begin), "write {}", number),
                }
                number += 1;
            }
            // No first waiter that may begin sleeps.
            let units: u64 = running.iter().map(|(need, _)| need.units).sum();
            let firsts = [true, false].map(|is_put| {
                waiting.iter().find(|write| (write.need.kind == PassKind::Put) == is_put)
            });
            for write in firsts.into_iter().flatten() {
                let taken =
                    limits.chunks_taken_max(running.len() as u32 + 1, units + write.need.units, IMAGE_UNITS as u32);
                prop_assert!(!limits.may_begin(write.need.kind.purpose(), pool.free(), taken), "it sleeps");
            }
        }
    }
}

#[test]
fn a_pass_suffices_for_the_appends_that_it_was_taken_for() {
    let pool = pool();
    let passes = SpacePasses::new(0, UNIT_BYTES, 2);
    let mut keys = ChunkLog::create(0, LogKind::Keys, &pool).unwrap();
    let mut values = ChunkLog::create(0, LogKind::Values, &pool).unwrap();
    // Both tails are full.
    keys.append(16, &pool, ChunkPurpose::User).unwrap();
    values.append(16, &pool, ChunkPurpose::User).unwrap();
    reserve_down_to(&pool, pool.limits().pass + 6);
    let pass = taken(&passes, &pool, need(PassKind::Put, 47, 0)).expect("four chunks, and two hops");
    assert_eq!(pass.need().units, 47);
    for _ in 0..2 {
        values.append(16, &pool, ChunkPurpose::User).expect("a value in two chunks");
    }
    keys.append_image(15, &pool, ChunkPurpose::User).expect("an image");
    assert!(pool.free() >= pool.limits().pass);
}
