//! Compaction: values that become one record, runs that are made for them, power loss, faults, races, and its pace.

use super::pieces_tests::{TestVolume, UNIT, fragmented, open_config, scattered, suite};
use super::{HashEngine, open};
use crate::bug_injection::{InjectedBug, inject};
use crate::conformance::{key_of, record_of, value_of};
use crate::{
    CompactionStatistics, DeleteOutcome, Durability, Engine, EngineError, EngineStatistics, PutMode,
    PutOptions, PutOutcome, PutValue,
};
use futures_util::future::{join, poll_fn};
use octokv_base::{BufferPool, Prng, UnixTime, Version};
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::{DiskHistory, PowerLossDisk, PowerLossMode};
use octokv_runtime::block_on;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

impl TestVolume {
    pub fn compact(&self) -> bool {
        self.run(self.engine.compact()).expect("no fault")
    }

    pub fn statistics(&self) -> EngineStatistics {
        self.engine.statistics()
    }

    fn put_with(&self, index: u64, operation: u64, bytes: usize, options: PutOptions) -> PutOutcome {
        let key = key_of(index);
        let record = record_of(self.engine.record_layout(), &key, &value_of(&key, operation, bytes));
        self.run(self.engine.put_with(&key, PutValue::new(record, bytes), options)).expect("no fault")
    }
}

/// A volume on which every second run of the units of a value of 4,000 bytes is free, and `long` values of `bytes` in pieces, from
/// key 9,000 on; with the number of the short ones, of which those with even numbers are there.
fn with_values_in_pieces(durability: Durability, long: u64, bytes: usize) -> (TestVolume, u64) {
    let volume = TestVolume::new(8 << 20, 4 << 20, durability);
    let count = fragmented(&volume, 4_000);
    (9_000..9_000 + long).for_each(|index| assert_eq!(volume.put(index, 7, bytes), PutOutcome::Stored));
    assert_eq!(volume.statistics().compaction.values_in_pieces, long);
    (volume, count)
}

fn assert_short_values(volume: &TestVolume, count: u64) {
    (0..count).step_by(2).for_each(|index| volume.assert_value(index, 1, 4_000));
}

/// Runs compaction, and beside it what `write` gives after so many steps of compaction, or after its end.
fn run_beside<T>(
    volume: &TestVolume,
    steps: u64,
    write: impl Future<Output = T>,
) -> (Result<bool, EngineError>, T) {
    let (is_over, left) = (Cell::new(false), Cell::new(steps));
    let compaction = async {
        let compacted = volume.engine.compact().await;
        is_over.set(true);
        compacted
    };
    // It needs no waker: it is polled whenever compaction is.
    let begin = poll_fn(|_| {
        left.set(left.get().saturating_sub(1));
        if left.get() == 0 || is_over.get() { Poll::Ready(()) } else { Poll::Pending }
    });
    volume.run(join(compaction, async {
        begin.await;
        write.await
    }))
}

#[test]
fn a_value_in_pieces_becomes_one_record_once_a_run_is_free() {
    for durability in [Durability::PowerSafe, Durability::Completed] {
        let (volume, count) = with_values_in_pieces(durability, 1, 1 << 20);
        (0..count).step_by(2).for_each(|index| {
            volume.delete(index);
        });
        assert!(volume.compact());
        let statistics = volume.statistics();
        assert_eq!(statistics.compaction.values_in_pieces, 0);
        let moved_bytes = (1 << 20) + u64::from(UNIT);
        let want = CompactionStatistics { joined_values: 1, moved_bytes, ..CompactionStatistics::default() };
        assert_eq!(statistics.compaction, want);
        assert_eq!(statistics.used_bytes, moved_bytes, "the pieces are free");
        volume.assert_value(9_000, 7, 1 << 20);
        assert!(!volume.compact(), "nothing is left to do");
        let reopened = volume.crash();
        assert_eq!(reopened.statistics().compaction.values_in_pieces, 0);
        for volume in [volume, reopened] {
            volume.assert_value(9_000, 7, 1 << 20);
            assert_eq!(volume.delete(9_000), DeleteOutcome::Deleted);
            assert_eq!(volume.statistics().used_bytes, 0);
            let space = volume.engine.volume().space.free_units();
            volume.run(volume.engine.flush()).expect("no fault");
            volume.engine.volume().epochs.reclaim_all(|extent| volume.engine.volume().space.release(extent));
            let free = volume.engine.volume().space.free_units();
            assert_eq!(free, volume.engine.volume().space.units(), "{space} before the flush");
        }
    }
}

#[test]
fn a_joined_value_keeps_its_version_and_its_expiry() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    let (version, expires_at) = (Version::from_bits(5), UnixTime(77));
    let options = PutOptions { version, expires_at, ..PutOptions::default() };
    scattered(|| assert_eq!(volume.put_with(1, 1, 20_000, options), PutOutcome::Stored));
    let status = volume.run(volume.engine.status(&key_of(1)));
    assert!(volume.compact());
    volume.assert_value(1, 1, 20_000);
    assert_eq!(volume.run(volume.engine.status(&key_of(1))), status);
    let reopened = volume.crash();
    assert_eq!(reopened.run(reopened.engine.status(&key_of(1))), status);
    assert_eq!(volume.put_with(1, 2, 100, options), PutOutcome::NotNewer(version));
}

#[test]
fn a_run_is_made_where_none_is_free_and_nothing_is_lost() {
    for durability in [Durability::PowerSafe, Durability::Completed] {
        let (volume, count) = with_values_in_pieces(durability, 3, 200_000);
        let used = volume.statistics().used_bytes;
        while volume.compact() {}
        let CompactionStatistics { joined_values, moved_records, moved_bytes, .. } =
            volume.statistics().compaction;
        assert_eq!((joined_values, volume.statistics().compaction.values_in_pieces), (3, 0));
        assert!((60..600).contains(&moved_records), "{moved_records} records moved");
        assert!(moved_bytes < 3 << 20, "{moved_bytes} bytes moved");
        assert!(volume.statistics().used_bytes <= used);
        let reopened = volume.crash();
        assert_eq!(reopened.free_units(), volume.free_units());
        for volume in [volume, reopened] {
            assert_short_values(&volume, count);
            (9_000..9_003).for_each(|index| volume.assert_value(index, 7, 200_000));
            (0..count).step_by(2).chain(9_000..9_003).for_each(|index| {
                assert_eq!(volume.delete(index), DeleteOutcome::Deleted);
            });
            volume.run(volume.engine.flush()).expect("no fault");
            let shared = volume.engine.volume();
            shared.epochs.reclaim_all(|extent| shared.space.release(extent));
            assert_eq!(shared.space.free_units(), shared.space.units(), "all space comes back");
        }
    }
}

#[test]
fn a_value_too_long_for_one_record_and_a_full_volume_are_left_alone() {
    let volume = TestVolume::new(24 << 20, 9 << 20, Durability::PowerSafe);
    assert_eq!(volume.put(1, 1, 9 << 20), PutOutcome::Stored);
    assert!(!volume.compact());
    volume.assert_value(1, 1, 9 << 20);
    // All space but that for tombstones is in use.
    let volume = TestVolume::new(2 << 20, 512 << 10, Durability::PowerSafe);
    let count = fragmented(&volume, 4_000);
    let stored =
        (9_000..).take_while(|&index| volume.put(index, 1, 60_000) == PutOutcome::Stored).count() as u64;
    (20_000..).take_while(|&index| volume.put(index, 1, 300) == PutOutcome::Stored).count();
    let before = volume.statistics();
    assert!(before.compaction.values_in_pieces > 3 && !volume.compact());
    assert_eq!(
        volume.statistics(),
        EngineStatistics { journal_batches: volume.statistics().journal_batches, ..before }
    );
    assert_short_values(&volume, count);
    (9_000..9_000 + stored).for_each(|index| volume.assert_value(index, 1, 60_000));
}

#[test]
fn a_damaged_value_is_left_as_it_is() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    inject(Some(InjectedBug::ForgetPiece));
    assert_eq!(volume.put(1, 1, 30_000), PutOutcome::Stored);
    inject(Some(InjectedBug::ScatterValues));
    assert_eq!(volume.put(2, 2, 30_000), PutOutcome::Stored);
    inject(None);
    let free = volume.engine.volume().space.free_units();
    assert!(volume.compact(), "the other value");
    assert!(!volume.compact());
    volume.assert_value(2, 2, 30_000);
    let found = volume.run(volume.engine.get(&key_of(1)));
    assert!(matches!(found, Err(EngineError::Corrupt { .. })), "{:?}", found.map(|_| ()));
    assert_eq!(volume.statistics().compaction.values_in_pieces, 1);
    volume.engine.volume().epochs.reclaim_all(|extent| volume.engine.volume().space.release(extent));
    assert!(volume.engine.volume().space.free_units() >= free);
}

/// Loses power at every event since the disk's first, in every mode, and at every event of the recovery of some: each key has
/// its value.
fn lose_power_at_every_event(volume: &TestVolume, check: impl Fn(&TestVolume)) {
    let (mut history, mut random) = (DiskHistory::of(&volume.disk), Prng::new(3));
    let total = volume.disk.events();
    let mut known: Vec<DiskImage> = Vec::new();
    for events in 0..=total {
        history.advance(events);
        for mode in PowerLossMode::ALL {
            let image = history.image(mode, &mut random);
            if known.contains(&image) {
                continue;
            }
            check(&TestVolume::open(image.clone(), volume.config, volume.durability));
            known.insert(0, image);
            known.truncate(8);
        }
    }
}

#[test]
fn joins_survive_power_loss_at_every_write_and_flush() {
    for durability in [Durability::PowerSafe, Durability::Completed] {
        let volume = TestVolume::new(1 << 20, 64 << 10, durability);
        scattered(|| {
            (0..4).for_each(|index| assert_eq!(volume.put(index, index, 20_000), PutOutcome::Stored))
        });
        let volume = volume.crash();
        assert!(volume.compact());
        assert_eq!(volume.statistics().compaction.joined_values, 4);
        // Into the space that the pieces had.
        let others = (10..).take_while(|&index| volume.put(index, index, 20_000) == PutOutcome::Stored);
        assert!(others.count() > 10);
        assert!(volume.disk.events() > 40, "{} events", volume.disk.events());
        lose_power_at_every_event(&volume, |after| {
            (0..4).for_each(|index| after.assert_value(index, index, 20_000));
        });
    }
}

#[test]
fn moves_survive_power_loss_at_every_write_and_flush() {
    for durability in [Durability::PowerSafe, Durability::Completed] {
        let volume = TestVolume::new(1 << 20, 64 << 10, durability);
        let count = fragmented(&volume, 1_000);
        assert_eq!(volume.put(9_000, 7, 20_000), PutOutcome::Stored);
        let volume = volume.crash();
        assert!(volume.compact());
        let statistics = volume.statistics().compaction;
        assert!(statistics.joined_values == 1 && statistics.moved_records > 5, "{statistics:?}");
        (10_000..10_003).for_each(|index| assert_eq!(volume.put(index, 1, 10_000), PutOutcome::Stored));
        lose_power_at_every_event(&volume, |after| {
            let value = after.run(after.engine.get(&key_of(9_000))).expect("no fault").expect("exists");
            assert!(value.as_bytes() == value_of(&key_of(9_000), 7, 20_000));
            for index in (0..count).step_by(2) {
                let value = after.run(after.engine.get(&key_of(index))).expect("no fault").expect("exists");
                assert!(value.as_bytes() == value_of(&key_of(index), 1, 1_000), "key {index}");
            }
        });
    }
}

/// The suite of values in pieces, with compaction beside the operations.
fn compacting_suite(
    has_versions: bool,
) -> crate::volume_suite::VolumeSuite<std::sync::Arc<super::HashVolume>> {
    let mut suite = suite(has_versions);
    suite.background = |engine: Rc<HashEngine>| {
        Box::pin(async move {
            for _ in 0..3 {
                engine.compact().await.expect("no fault");
            }
            engine.checkpoint(false).await.expect("no fault");
            engine.compact().await.expect("no fault");
        })
    };
    suite
}

#[test]
fn operations_beside_compaction_survive_power_loss_at_every_write_and_flush() {
    scattered(|| {
        for has_versions in [false, true] {
            let (disks, trace) = compacting_suite(has_versions).run_traced(7, 250);
            assert!(disks[0].events() > 1_500, "{} events", disks[0].events());
            compacting_suite(has_versions).lose_power_at_events(&disks, &trace, 1);
        }
    });
}

/// A put beside the join of a value, on a volume whose free space is the run that the join takes: the put gets the pieces' space.
/// Power is lost at every event.
fn lose_power_while_pieces_are_reused(bug: InjectedBug) {
    for delay in 2..24 {
        let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
        scattered(|| assert_eq!(volume.put(1, 1, 20_000), PutOutcome::Stored));
        let fill =
            (10..).take_while(|&index| volume.put(index, 1, 1_000) == PutOutcome::Stored).count() as u64;
        (10..32).for_each(|index| {
            volume.delete(index);
        });
        let volume = volume.crash();
        let key = key_of(2);
        let record = record_of(volume.engine.record_layout(), &key, &value_of(&key, 2, 18_000));
        let put = volume.engine.put(&key, PutMode::Upsert, record, 18_000);
        inject(Some(bug));
        let (compacted, stored) = run_beside(&volume, delay, put);
        inject(None);
        assert!(compacted.is_ok() && matches!(stored, Ok(PutOutcome::Stored | PutOutcome::Full)), "{fill}");
        lose_power_at_every_event(&volume, |after| {
            let found = after.run(after.engine.get(&key_of(1)));
            let is_there = found.is_ok_and(|found| {
                found.is_some_and(|found| found.as_bytes() == value_of(&key_of(1), 1, 20_000))
            });
            assert!(is_there, "power loss took a value that compaction was joining");
        });
    }
}

#[test]
fn space_of_pieces_is_reused_after_the_join_is_durable() {
    lose_power_while_pieces_are_reused(InjectedBug::ScatterValues);
}

#[test]
#[should_panic(expected = "power loss took a value")]
fn power_loss_finds_that_compaction_frees_pieces_too_early() {
    lose_power_while_pieces_are_reused(InjectedBug::CompactionFreesEarly);
}

/// Opens the volume in an image on a disk with faults.
fn open_with_faults(image: DiskImage, like: &TestVolume, faults: &FaultPlan) -> TestVolume {
    let disk = PowerLossDisk::new(image, UNIT);
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), faults.clone()));
    let (pool, mut random) = (BufferPool::new(64 << 20), Prng::new(6));
    let opened = block_on(open(&device, &pool, open_config(like.durability), &like.config), || {
        disk.complete_one(&mut random);
    });
    let engine = HashEngine::new(opened.expect("opens"), 0, device, pool);
    TestVolume { disk, engine, config: like.config, durability: like.durability }
}

#[test]
fn a_failed_read_write_or_flush_of_compaction_changes_nothing() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    let count = fragmented(&volume, 1_000);
    assert_eq!(volume.put(9_000, 7, 20_000), PutOutcome::Stored);
    volume.run(volume.engine.checkpoint(true)).expect("no fault");
    let image = volume.disk.image();
    let check = |volume: &TestVolume, context: &str| {
        for index in (0..count).step_by(2).chain([9_000]) {
            let (operation, bytes) = if index == 9_000 { (7, 20_000) } else { (1, 1_000) };
            let found = volume.run(volume.engine.get(&key_of(index))).expect("no fault").expect("exists");
            assert!(found.as_bytes() == value_of(&key_of(index), operation, bytes), "{context}: key {index}");
        }
    };
    for filter in [OpFilter::Read, OpFilter::Write, OpFilter::Flush] {
        let (mut failed, mut succeeded) = (0, 0);
        for skip in 0..400 {
            let faults = FaultPlan::default();
            let volume = open_with_faults(image.clone(), &volume, &faults);
            faults.add(FaultRule::always(filter, InjectedFault::Error(5)).once(skip));
            let context = format!("{filter:?} {skip}");
            let result = volume.run(volume.engine.compact());
            let is_failed = result != Ok(true);
            faults.clear();
            check(&volume, &context);
            if !volume.engine.volume().is_read_only() {
                assert!(filter != OpFilter::Flush || !is_failed, "{context}");
                (0..4).for_each(|_| {
                    volume.compact();
                });
                assert_eq!(volume.statistics().compaction.values_in_pieces, 0, "{context}");
                check(&volume, &context);
                let shared = volume.engine.volume();
                shared.epochs.reclaim_all(|extent| shared.space.release(extent));
                let used = (shared.space.units() - shared.space.free_units()) * u64::from(UNIT);
                assert_eq!(used, volume.statistics().used_bytes, "{context}: no space is lost");
            }
            let reopened = TestVolume::open(volume.disk.image(), volume.config, volume.durability);
            check(&reopened, &context);
            (failed, succeeded) = (failed + u64::from(is_failed), succeeded + u64::from(!is_failed));
            // The fault came after the end.
            if succeeded > 3 {
                break;
            }
        }
        assert!(failed > 5, "{failed} failed {filter:?}");
    }
}

#[test]
fn writes_and_compaction_of_one_key_have_an_order() {
    #[derive(Clone, Copy, Debug)]
    enum Race {
        Put,
        PutInPieces,
        Delete,
        DeleteWithVersion,
        Forget,
    }
    let (mut joined, mut total) = (0, 0);
    for race in [Race::Put, Race::PutInPieces, Race::Delete, Race::DeleteWithVersion, Race::Forget] {
        for durability in [Durability::PowerSafe, Durability::Completed] {
            for delay in 0..60 {
                let volume = TestVolume::new(1 << 20, 64 << 10, durability);
                let (key, version) = (key_of(1), Version::from_bits(5));
                let options = PutOptions { version, ..PutOptions::default() };
                let first = match race {
                    Race::DeleteWithVersion => options,
                    _ => PutOptions::default(),
                };
                scattered(|| {
                    assert_eq!(volume.put_with(1, 1, 6_000, first), PutOutcome::Stored);
                    assert_eq!(volume.put(2, 1, 6_000), PutOutcome::Stored);
                });
                if matches!(race, Race::Forget) {
                    let delete = volume.engine.delete_with(&key, version);
                    assert_eq!(volume.run(delete), Ok(DeleteOutcome::Deleted));
                }
                let record = record_of(volume.engine.record_layout(), &key, &value_of(&key, 2, 9_000));
                let write = async {
                    match race {
                        Race::Put | Race::PutInPieces => {
                            let put = volume.engine.put(&key, PutMode::Upsert, record, 9_000).await;
                            assert_eq!(put, Ok(PutOutcome::Stored));
                        }
                        Race::Delete => {
                            assert_eq!(volume.engine.delete(&key).await, Ok(DeleteOutcome::Deleted));
                        }
                        Race::DeleteWithVersion => {
                            let deleted = volume.engine.delete_with(&key, Version::from_bits(6)).await;
                            assert_eq!(deleted, Ok(DeleteOutcome::Deleted));
                        }
                        Race::Forget => {
                            assert_eq!(volume.engine.forget_below(Version::from_bits(9)).await, Ok(()));
                        }
                    }
                };
                let scatters = matches!(race, Race::PutInPieces);
                inject(scatters.then_some(InjectedBug::ScatterValues));
                let (compacted, ()) = run_beside(&volume, delay, write);
                inject(None);
                assert!(compacted.is_ok(), "{race:?} {delay}: {compacted:?}");
                let statistics = volume.statistics();
                joined += statistics.compaction.joined_values;
                total += 2;
                let reopened = volume.crash();
                for volume in [&volume, &reopened] {
                    volume.assert_value(2, 1, 6_000);
                    let found = volume.run(volume.engine.get(&key)).expect("no fault");
                    match race {
                        Race::Put | Race::PutInPieces => {
                            let found = found.expect("exists");
                            assert!(found.as_bytes() == value_of(&key, 2, 9_000), "{race:?} {delay}");
                        }
                        _ => assert!(found.is_none(), "{race:?} {delay}"),
                    }
                }
                assert_eq!(reopened.statistics().used_bytes, statistics.used_bytes, "{race:?} {delay}");
                assert_eq!(
                    reopened.statistics().compaction.values_in_pieces,
                    statistics.compaction.values_in_pieces
                );
            }
        }
    }
    assert!(joined > total / 4 && joined < total, "{joined} of {total} values were joined");
}

#[test]
fn a_put_that_needs_the_space_that_compaction_holds_is_stored() {
    let (volume, _) = with_values_in_pieces(Durability::PowerSafe, 2, 200_000);
    let volume = volume.crash();
    let image = volume.disk.image();
    let free = volume.engine.volume().space.free_units();
    let mut held = 0;
    for durability in [Durability::PowerSafe, Durability::Completed] {
        for delay in (0..900).step_by(13) {
            let volume = TestVolume::open(image.clone(), volume.config, durability);
            // All that is free but for the list, its nodes and what tombstones need.
            let bytes = (free - free / 29 - 40) as usize * UNIT as usize;
            let key = key_of(20_000);
            let record = record_of(volume.engine.record_layout(), &key, &value_of(&key, 3, bytes));
            let write = async {
                held += u64::from(volume.engine.volume().space.free_units() < free - 100);
                volume.engine.put(&key, PutMode::Upsert, record, bytes).await
            };
            let (compacted, stored) = run_beside(&volume, delay, write);
            assert_eq!(stored, Ok(PutOutcome::Stored), "{durability:?} {delay}, compaction {compacted:?}");
            let found = volume.run(volume.engine.get(&key)).expect("no fault").expect("exists");
            assert!(found.as_bytes() == value_of(&key, 3, bytes));
            (9_000..9_002).for_each(|index| volume.assert_value(index, 7, 200_000));
        }
    }
    assert!(held > 20, "{held} puts came while compaction held much");
}

#[test]
fn a_history_with_compaction_is_one_without() {
    let mut joined = 0;
    for seed in 0..6 {
        let mut random = Prng::new(seed);
        let new = || TestVolume::new(2 << 20, 256 << 10, Durability::PowerSafe);
        let (plain, mut compacted) = (new(), new());
        let mut known = BTreeMap::new();
        for operation in 1..300 {
            let index = random.below(50);
            let version = if random.one_in(3) { Version::from_bits(operation) } else { Version::NONE };
            let bytes_max = [300, 8_000, 60_000][random.below(3) as usize];
            let bytes = 8 + random.below(bytes_max) as usize;
            let options = PutOptions { version, ..PutOptions::default() };
            let outcomes = match random.below(6) {
                0 | 1 => {
                    let [one, other] = [&plain, &compacted]
                        .map(|volume| volume.run(volume.engine.delete_with(&key_of(index), version)));
                    known.remove(&index);
                    assert_eq!(one, other);
                    None
                }
                2 => Some(scattered(|| {
                    [&plain, &compacted].map(|volume| volume.put_with(index, operation, bytes, options))
                })),
                _ => {
                    Some([&plain, &compacted].map(|volume| volume.put_with(index, operation, bytes, options)))
                }
            };
            match outcomes {
                None => {}
                Some([PutOutcome::Full, other]) => {
                    // Lists need units: with fewer of them more fits.
                    assert!(matches!(other, PutOutcome::Full | PutOutcome::Stored));
                    let _ = [&plain, &compacted].map(|volume| volume.delete(index));
                    known.remove(&index);
                }
                Some([one, other]) => {
                    assert_eq!(one, other, "operation {operation} of seed {seed}");
                    known.insert(index, (operation, bytes));
                }
            }
            compacted.compact();
            if random.one_in(40) {
                joined += compacted.statistics().compaction.joined_values;
                compacted = compacted.crash();
            }
            let [one, other] =
                [&plain, &compacted].map(|volume| volume.run(volume.engine.status(&key_of(index))));
            assert_eq!(one, other);
            assert_eq!(plain.statistics().keys, compacted.statistics().keys);
        }
        for index in 0..50 {
            let [one, other] = [&plain, &compacted].map(|volume| {
                let found = volume.run(volume.engine.get(&key_of(index))).expect("no fault");
                found.map(|found| (found.as_bytes().to_vec(), found.version, found.expires_at))
            });
            assert!(one == other, "key {index} of seed {seed}");
            assert_eq!(one.is_some(), known.contains_key(&index));
        }
        assert_eq!(compacted.statistics().compaction.values_in_pieces, 0);
    }
    assert!(joined > 100, "{joined} values were joined");
}

#[test]
fn a_pass_that_is_dropped_half_done_ends_its_step_and_holds_nothing() {
    let (volume, count) = with_values_in_pieces(Durability::PowerSafe, 1, 200_000);
    let mut random = Prng::new(9);
    for steps in [1, 7, 40, 150, 400] {
        let mut compaction = Box::pin(volume.engine.compact());
        let context = &mut Context::from_waker(Waker::noop());
        for _ in 0..steps {
            if compaction.as_mut().poll(context).is_ready() {
                break;
            }
            volume.disk.complete_one(&mut random);
        }
        drop(compaction);
        let mut abandoned = pin!(volume.engine.run_abandoned());
        while abandoned.as_mut().poll(context).is_pending() && !volume.engine.volume().is_idle() {
            volume.disk.complete_one(&mut random);
        }
        let shared = volume.engine.volume();
        shared.epochs.reclaim_all(|extent| shared.space.release(extent));
        let used = (shared.space.units() - shared.space.free_units()) * u64::from(UNIT);
        assert_eq!(used, volume.statistics().used_bytes, "after {steps} steps");
    }
    while volume.compact() {}
    volume.assert_value(9_000, 7, 200_000);
    assert_short_values(&volume, count);
}
