//! Preparation of never-written space: what is written ahead of whom, and that nothing in use ever is.

#![allow(clippy::disallowed_methods, reason = "one test is about threads")]

use crate::common::traced_memory::{BLOCK_BYTES, TracedVolume, poll_once};
use crate::common::unwritten::{AllUnwritten, TrackedDevice};
use crate::common::{HashFixture, pool};
use octokv_base::{Key, Prng};
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_device::{Device, DeviceError, MemoryDevice, RamDisk};
use octokv_engine::conformance::{EngineFixture, key_of, operation_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, HashVolume, open};
use octokv_engine::{DeviceLayout, Engine, EngineError, PutMode, PutOutcome, Volume};
use octokv_runtime::block_on;
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn put(engine: &HashEngine, key: &Key, operation: u64, bytes: usize) -> Result<PutOutcome, EngineError> {
    block_on(put_future(engine, key, operation, bytes), || ())
}

fn put_future<'a>(
    engine: &'a HashEngine,
    key: &'a Key,
    operation: u64,
    bytes: usize,
) -> impl Future<Output = Result<PutOutcome, EngineError>> + 'a {
    let record = record_of(engine.record_layout(), key, &value_of(key, operation, bytes));
    engine.put(key, PutMode::Upsert, record, bytes)
}

fn stored_operation(engine: &HashEngine, key: &Key) -> Option<u64> {
    let found = block_on(engine.get(key), || ()).expect("no damage");
    found.map(|value| operation_of(key, value.as_bytes()))
}

/// The bytes in use of a full volume of 2 MiB on which nothing is prepared, less a record: the rest is for tombstones.
fn nearly_full_bytes() -> u64 {
    let volume = TracedVolume::preparing(2 << 20, 0, 0);
    let stored = (0..).map(|index| put(&volume.engine, &key_of(index), index, 3_000));
    stored.take_while(|stored| *stored == Ok(PutOutcome::Stored)).count();
    volume.engine.statistics().used_bytes - 7 * BLOCK_BYTES
}

/// Prepares until there is nothing to prepare.
fn prepare_all(engine: &HashEngine) -> usize {
    std::iter::from_fn(|| block_on(engine.prepare_next(), || ()).expect("no fault").then_some(())).count()
}

/// The blocks of the record area and of each copy of the journal, by the front of the volume.
struct Areas {
    records: Range<u64>,
    journal: [Range<u64>; 2],
}

fn areas(device: &dyn Device) -> Areas {
    let bytes = octokv_engine::volume::FORMAT_REGION_BYTES as usize;
    let front = block_on(device.read(octokv_base::Lba(0), octokv_base::Buffer::zeroed(bytes)), || ());
    let layout: DeviceLayout =
        Arc::<HashVolume>::device_layout(&front.into_read().unwrap()).expect("a volume");
    let blocks = |bytes: Range<u64>| bytes.start / BLOCK_BYTES..bytes.end / BLOCK_BYTES;
    let first = blocks(layout.journal);
    let second = first.end..first.end + (first.end - first.start);
    Areas { records: blocks(layout.records), journal: [first, second] }
}

fn blocks_written(trace: &[(u64, usize)], area: &Range<u64>) -> u64 {
    let within = trace.iter().filter(|(lba, _)| area.contains(lba));
    within.map(|(_, bytes)| *bytes as u64 / BLOCK_BYTES).sum()
}

#[test]
fn a_new_volume_is_prepared_up_to_the_configured_bytes_and_further_as_it_is_used() {
    const PREPARED: u64 = 256 << 10;
    let volume = TracedVolume::preparing(8 << 20, PREPARED, 3);
    let Areas { records, journal } = areas(volume.device());
    let engine = &volume.engine;
    assert!(prepare_all(engine) > 16);
    let writes = volume.trace.writes.take();
    // The fixture opens for four cores: each has a quarter.
    let by_core: Vec<u64> = (0..4)
        .map(|core| {
            let quarter = (records.end - records.start) / 4;
            let start = records.start + core * quarter;
            blocks_written(&writes, &(start..start + quarter))
        })
        .collect();
    let share = PREPARED / BLOCK_BYTES / 4;
    assert!(by_core.iter().all(|&blocks| (share..share + 32).contains(&blocks)), "{by_core:?} of {share}");
    for copy in &journal {
        let blocks = blocks_written(&writes, copy);
        assert!((1..=PREPARED / BLOCK_BYTES / 16 + 32).contains(&blocks), "{blocks} of {copy:?}");
    }
    let total: u64 = writes.iter().map(|(_, bytes)| *bytes as u64).sum();
    assert_eq!(engine.statistics().prepared_bytes, total);
    // Core 0 allocates: so much more is prepared in front of it.
    let (mut more, mut more_journal) = (0, 0);
    for index in 0..100 {
        assert_eq!(put(engine, &key_of(index), index, 4_000), Ok(PutOutcome::Stored));
        volume.trace.writes.take();
        prepare_all(engine);
        let writes = volume.trace.writes.take();
        more += blocks_written(&writes, &records);
        more_journal += blocks_written(&writes, &journal[0]);
    }
    let used = engine.statistics().used_bytes / BLOCK_BYTES;
    assert!((used - 64..=used + 64).contains(&more), "{more} blocks for {used}");
    assert!(more_journal > 60, "{more_journal} blocks for 100 batches");
    assert_eq!(prepare_all(engine), 0);
}

#[test]
fn nothing_in_use_is_prepared_and_everything_free_is_once() {
    let volume = TracedVolume::preparing(4 << 20, 1 << 30, 2);
    let (engine, records) = (&volume.engine, areas(volume.device()).records);
    let mut random = Prng::new(3);
    (0..200).for_each(|index| {
        let bytes = random.below(9_000) as usize;
        assert_eq!(put(engine, &key_of(index), index, bytes), Ok(PutOutcome::Stored));
        if random.one_in(3) {
            assert!(block_on(engine.delete(&key_of(random.below(index + 1))), || ()).is_ok());
        }
    });
    let kept: Vec<Option<u64>> = (0..200).map(|index| stored_operation(engine, &key_of(index))).collect();
    let used = engine.statistics().used_bytes / BLOCK_BYTES;
    volume.trace.writes.take();
    prepare_all(engine);
    let mut blocks = vec![0; (records.end - records.start) as usize];
    for (lba, bytes) in volume.trace.writes.take().into_iter().filter(|(lba, _)| records.contains(lba)) {
        let start = (lba - records.start) as usize;
        blocks[start..start + bytes / BLOCK_BYTES as usize].iter_mut().for_each(|count| *count += 1);
    }
    assert!(blocks.iter().all(|&count| count <= 1));
    let prepared = blocks.iter().sum::<u64>();
    // What a core has passed counts as written, and retired space is not free yet.
    assert!(prepared + used <= blocks.len() as u64 && prepared > blocks.len() as u64 / 3, "{prepared}");
    let after: Vec<Option<u64>> = (0..200).map(|index| stored_operation(engine, &key_of(index))).collect();
    assert!(kept == after);
}

#[test]
fn what_was_prepared_is_not_prepared_again_after_a_reopening() {
    let memory: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(8 << 20, 512).unwrap()));
    let device: Rc<dyn Device> = Rc::new(TrackedDevice::new(memory));
    let mut fixture = HashFixture { prepare_bytes: 512 << 10, ..HashFixture::default() };
    fixture.format.unit_bytes = Some(512);
    block_on(fixture.format(Rc::clone(&device)), || ());
    let open = || block_on(fixture.open(Rc::clone(&device)), || ()).expect("opens");
    let engine = open();
    assert!(prepare_all(&engine) > 0);
    drop(engine);
    let engine = open();
    assert_eq!(prepare_all(&engine), 0, "as much is there");
    // Core 0 has an eighth of the configured bytes: it uses half of that.
    (0..14).for_each(|index| assert_eq!(put(&engine, &key_of(index), index, 4_000), Ok(PutOutcome::Stored)));
    drop(engine);
    let engine = open();
    assert!(prepare_all(&engine) > 0);
    let prepared_bytes = engine.statistics().prepared_bytes;
    assert!(prepared_bytes <= 256 << 10, "{prepared_bytes} bytes are what was used, and some metadata");
    (0..14).for_each(|index| assert_eq!(stored_operation(&engine, &key_of(index)), Some(index)));
}

#[test]
fn nothing_is_prepared_if_it_is_off_or_the_device_reports_nothing() {
    for (prepare_bytes, reports) in [(0, true), (1 << 20, false)] {
        let memory: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(4 << 20, 512).unwrap()));
        let device: Rc<dyn Device> = match reports {
            true => Rc::new(AllUnwritten(memory)),
            false => memory,
        };
        let fixture = HashFixture { prepare_bytes, ..HashFixture::default() };
        block_on(fixture.format(Rc::clone(&device)), || ());
        let engine = block_on(fixture.open(device), || ()).expect("opens");
        assert_eq!(prepare_all(&engine), 0);
    }
}

#[test]
fn a_put_that_needs_space_being_prepared_waits_and_is_stored_and_a_full_volume_is_full() {
    let volume = TracedVolume::preparing(2 << 20, 1 << 30, 0);
    let engine = &volume.engine;
    // All free space of a chunk is being prepared: the first chunk in the record area.
    volume.trace.held_from_bytes.set(64 << 10);
    let mut preparing = Box::pin(engine.prepare_next());
    assert!(poll_once(&mut preparing.as_mut()).is_none(), "the zeros are held");
    let capacity = engine.statistics().capacity_bytes;
    let (mut index, mut waiting) = (0, None);
    while waiting.is_none() {
        let key: &'static Key = Box::leak(Box::new(key_of(index)));
        let mut future = Box::pin(put_future(engine, key, index, 3_000));
        match poll_once(&mut future.as_mut()) {
            Some(stored) => assert_eq!(stored, Ok(PutOutcome::Stored), "key {index}"),
            None => waiting = Some(future),
        }
        index += 1;
    }
    let used = engine.statistics().used_bytes;
    assert!(used < capacity - (60 << 10), "{used} of {capacity}: the rest is reserved");
    volume.trace.release();
    assert_eq!(block_on(preparing, || ()), Ok(true));
    assert_eq!(block_on(waiting.expect("one waits"), || ()), Ok(PutOutcome::Stored));
    let full = (index..).map(|index| put(engine, &key_of(index), index, 3_000));
    let stored = full.take_while(|stored| *stored == Ok(PutOutcome::Stored)).count() as u64;
    assert!(engine.statistics().used_bytes > nearly_full_bytes());
    assert_eq!(put(engine, &key_of(9_999), 1, 3_000), Ok(PutOutcome::Full));
    (0..index + stored).for_each(|index| assert_eq!(stored_operation(engine, &key_of(index)), Some(index)));
    prepare_all(engine);
    (0..index + stored).for_each(|index| assert_eq!(stored_operation(engine, &key_of(index)), Some(index)));
}

#[test]
fn batches_wait_for_units_of_the_journal_that_are_being_prepared_and_write_no_checkpoint() {
    let volume = TracedVolume::preparing(8 << 20, 4 << 20, 0);
    let (engine, journal) = (&volume.engine, areas(volume.device()).journal);
    let key = key_of(1);
    // Until a chunk of the journal is the next.
    let preparing = loop {
        volume.trace.held_from_bytes.set(1 << 10);
        volume.trace.writes.take();
        let mut preparing = Box::pin(engine.prepare_next());
        assert!(poll_once(&mut preparing.as_mut()).is_none());
        volume.trace.held_from_bytes.set(0);
        if blocks_written(&volume.trace.writes.borrow(), &journal[0]) > 0 {
            break preparing;
        }
        volume.trace.release();
        assert_eq!(block_on(preparing, || ()), Ok(true));
    };
    let (start, bytes) = volume.trace.writes.borrow()[0];
    let reserved = start..start + bytes as u64 / BLOCK_BYTES;
    volume.trace.writes.take();
    let mut operation = 0;
    let mut waiting = loop {
        operation += 1;
        let mut future = Box::pin(put_future(engine, &key, operation, 100));
        match poll_once(&mut future.as_mut()) {
            Some(stored) => assert_eq!(stored, Ok(PutOutcome::Stored)),
            None => break future,
        }
    };
    assert!(operation > 60, "{operation}: some batches fit before");
    let overlaps = |(lba, bytes): &(u64, usize)| {
        *lba < reserved.end && lba + *bytes as u64 / BLOCK_BYTES > reserved.start
    };
    assert!(!volume.trace.writes.borrow().iter().any(overlaps), "into {reserved:?}");
    assert!(poll_once(&mut waiting.as_mut()).is_none());
    volume.trace.release();
    assert_eq!(block_on(preparing, || ()), Ok(true));
    assert_eq!(block_on(waiting, || ()), Ok(PutOutcome::Stored));
    (1..=200).for_each(|more| assert_eq!(put(engine, &key, operation + more, 100), Ok(PutOutcome::Stored)));
    assert!(volume.trace.writes.borrow().iter().any(overlaps), "they go there afterwards");
    assert_eq!(engine.statistics().checkpoints, 0);
}

#[test]
fn a_checkpoint_and_the_preparation_of_its_area_wait_for_each_other() {
    let volume = TracedVolume::preparing(2 << 20, 1 << 30, 0);
    let engine = &volume.engine;
    (0..50).for_each(|index| assert_eq!(put(engine, &key_of(index), index, 100), Ok(PutOutcome::Stored)));
    for round in 0..6 {
        volume.trace.held_from_bytes.set(1);
        let mut checkpoint = Box::pin(engine.checkpoint(false));
        assert!(poll_once(&mut checkpoint.as_mut()).is_none());
        volume.trace.release();
        let mut preparing = pin!(engine.prepare_next());
        let early = poll_once(&mut preparing);
        assert_eq!(block_on(checkpoint, || ()), Ok(()));
        if early.is_none() {
            assert!(block_on(preparing, || ()).is_ok(), "round {round}");
        }
    }
    prepare_all(engine);
    let mut volume = volume;
    volume.reopen();
    let engine = &volume.engine;
    (0..50).for_each(|index| assert_eq!(stored_operation(engine, &key_of(index)), Some(index)));
}

#[test]
fn a_failed_preparation_is_reported_and_its_space_is_used_nevertheless() {
    let volume = TracedVolume::preparing(2 << 20, 1 << 30, 0);
    let engine = &volume.engine;
    volume.plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(5)).once(0));
    assert_eq!(block_on(engine.prepare_next(), || ()), Err(EngineError::from(DeviceError::Io(5))));
    assert_eq!(engine.statistics().prepared_bytes, 0);
    let stored = (0..).map(|index| put(engine, &key_of(index), index, 3_000));
    let stored = stored.take_while(|stored| *stored == Ok(PutOutcome::Stored)).count() as u64;
    assert!(engine.statistics().used_bytes > nearly_full_bytes(), "{stored} are stored");
}

#[test]
fn space_whose_preparation_is_dropped_half_done_is_prepared_to_its_end() {
    let volume = TracedVolume::preparing(2 << 20, 1 << 30, 0);
    let engine = &volume.engine;
    volume.trace.held_from_bytes.set(1 << 10);
    let mut preparing = Box::pin(engine.prepare_next());
    assert!(poll_once(&mut preparing.as_mut()).is_none());
    drop(preparing);
    assert!(!engine.volume().is_idle());
    volume.trace.release();
    let mut abandoned = pin!(engine.run_abandoned());
    assert!(poll_once(&mut abandoned).is_none());
    assert!(engine.volume().is_idle());
    let stored = (0..).map(|index| put(engine, &key_of(index), index, 3_000));
    stored.take_while(|stored| *stored == Ok(PutOutcome::Stored)).count();
    assert!(engine.statistics().used_bytes > nearly_full_bytes());
}

/// Threads store, replace and delete values of their own keys while the first prepares, on a disk that says that nothing was
/// ever written.
#[test]
fn threads_lose_nothing_to_preparation() {
    const WRITERS: u64 = 3;
    const KEYS: u64 = 40;
    let mut fixture = HashFixture { prepare_bytes: 256 << 10, ..HashFixture::default() };
    fixture.format.value_bytes_max = 16 << 10;
    let disk = RamDisk::new(4 << 20, 512).unwrap();
    let view = |disk| -> Rc<dyn Device> { Rc::new(AllUnwritten(Rc::new(MemoryDevice::new(disk)))) };
    let device = view(Arc::clone(&disk));
    block_on(fixture.format(Rc::clone(&device)), || ());
    for round in 0..3_u64 {
        let device = view(Arc::clone(&disk));
        let volume = block_on(open(&device, &pool(), fixture.open_config(), &fixture.format), || ()).unwrap();
        let (is_over, prepared) = (AtomicBool::new(false), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let (is_over, prepared) = (&is_over, &prepared);
            let writers: Vec<_> = (1..=WRITERS)
                .map(|writer| {
                    let (volume, disk) = (Arc::clone(&volume), Arc::clone(&disk));
                    scope.spawn(move || {
                        let engine = HashEngine::new(volume, writer as usize, view(disk), pool());
                        let mut random = Prng::new(writer + 16 * round);
                        let mut last = vec![None; KEYS as usize];
                        for operation in 1..=600_u64 {
                            let index = random.below(KEYS);
                            let key = key_of(writer * KEYS + index);
                            let stored = &mut last[index as usize];
                            if random.one_in(4) {
                                block_on(engine.delete(&key), std::thread::yield_now).unwrap();
                                *stored = None;
                            } else {
                                let put = put_future(&engine, &key, operation, random.below(9_000) as usize);
                                match block_on(put, std::thread::yield_now).unwrap() {
                                    PutOutcome::Stored => *stored = Some(operation),
                                    other => panic!("{other:?}: there is space for all"),
                                }
                            }
                            let index = random.below(KEYS);
                            let key = key_of(writer * KEYS + index);
                            let found =
                                block_on(engine.get(&key), std::thread::yield_now).expect("no damage");
                            let found = found.map(|value| operation_of(&key, value.as_bytes()));
                            assert_eq!(found, last[index as usize], "{key} of writer {writer}");
                        }
                    })
                })
                .collect();
            let (volume, disk) = (Arc::clone(&volume), Arc::clone(&disk));
            scope.spawn(move || {
                let engine = HashEngine::new(volume, 0, view(disk), pool());
                loop {
                    let did = block_on(engine.prepare_next(), std::thread::yield_now).expect("no fault");
                    prepared.fetch_or(did, Ordering::Relaxed);
                    if is_over.load(Ordering::Relaxed) {
                        break;
                    }
                    std::thread::yield_now();
                }
            });
            writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
            is_over.store(true, Ordering::Relaxed);
        });
        let engine = HashEngine::new(volume, 0, device, pool());
        prepared.fetch_or(prepare_all(&engine) > 0, Ordering::Relaxed);
        assert!(prepared.load(Ordering::Relaxed));
        block_on(engine.close(), || ()).expect("closes");
        // The next round begins with other keys in place: its writers expect none.
        for key in (KEYS..KEYS * (WRITERS + 1)).map(key_of) {
            block_on(engine.delete(&key), || ()).expect("no fault");
        }
    }
}
