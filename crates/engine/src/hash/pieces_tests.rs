//! Values in pieces: free space that can be used after any history, power loss, damage.

use super::piece_list::{Piece, PieceList, Pieces};
use super::salvage::salvage;
use super::{HashEngine, HashVolume, format, open, verify};
use crate::bug_injection::{InjectedBug, inject};
use crate::common::allocator::Extent;
use crate::common::record::{HEADER_BYTES, UncheckedRecord};
use crate::conformance::{key_of, record_of, value_of};
use crate::volume_suite::{KEYS, VolumeSuite, read_all};
use crate::{
    DeleteOutcome, Durability, Engine, EngineError, FormatConfig, OpenConfig, PutMode, PutOptions,
    PutOutcome, PutValue, ValueRange, WallClock,
};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use octokv_base::prng::mix64;
use octokv_base::{BufferPool, Lba, Prng, Version, crc32c};
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::PowerLossDisk;
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

pub(super) const UNIT: u32 = 512;

pub(super) fn format_config(value_bytes_max: u32) -> FormatConfig {
    FormatConfig { unit_bytes: Some(UNIT), value_bytes_max, seed: 42, ..FormatConfig::default() }
}

pub(super) fn open_config(durability: Durability) -> OpenConfig {
    OpenConfig {
        durability,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    }
}

/// An open volume on a disk that completes operations in random order.
pub(super) struct TestVolume {
    pub disk: PowerLossDisk,
    pub engine: HashEngine,
    pub config: FormatConfig,
    pub durability: Durability,
}

impl TestVolume {
    pub fn new(bytes: usize, value_bytes_max: u32, durability: Durability) -> TestVolume {
        let (disk, config) = (PowerLossDisk::new(vec![0; bytes], UNIT), format_config(value_bytes_max));
        let mut random = Prng::new(1);
        block_on(format(&disk, &config), || {
            disk.complete_one(&mut random);
        })
        .expect("formats");
        TestVolume::open(disk.image(), config, durability)
    }

    pub fn open(image: DiskImage, config: FormatConfig, durability: Durability) -> TestVolume {
        let (disk, pool, mut random) =
            (PowerLossDisk::new(image, UNIT), BufferPool::new(64 << 20), Prng::new(2));
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let volume = block_on(open(&device, &pool, open_config(durability), &config), || {
            disk.complete_one(&mut random);
        });
        let engine = HashEngine::new(volume.expect("opens"), 0, device, pool);
        TestVolume { disk, engine, config, durability }
    }

    pub fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut random = Prng::new(3);
        block_on(future, || {
            self.disk.complete_one(&mut random);
        })
    }

    pub fn put(&self, index: u64, operation: u64, bytes: usize) -> PutOutcome {
        let key = key_of(index);
        let record = record_of(self.engine.record_layout(), &key, &value_of(&key, operation, bytes));
        self.run(self.engine.put(&key, PutMode::Upsert, record, bytes)).expect("no fault")
    }

    pub fn delete(&self, index: u64) -> DeleteOutcome {
        self.run(self.engine.delete(&key_of(index))).expect("no fault")
    }

    /// The key has the value of an operation, whole and in parts.
    pub fn assert_value(&self, index: u64, operation: u64, bytes: usize) {
        let (key, want) = (key_of(index), value_of(&key_of(index), operation, bytes));
        let found = self.run(self.engine.get(&key)).expect("no fault").expect("exists");
        assert!(found.as_bytes() == want, "key {index}");
        let bytes = bytes as u32;
        for (offset, bytes_max) in
            [(0, 1), (bytes / 3, bytes / 2), (bytes - 1, 9), (131_071, 2), (131_072, 131_072)]
        {
            let range = ValueRange { offset, bytes_max };
            let found = self.run(self.engine.get_range(&key, range)).expect("no fault").expect("exists");
            let part = range.within(bytes);
            assert!(
                found.as_bytes() == &want[part.start as usize..part.end as usize],
                "key {index}, {range:?}"
            );
            assert_eq!(found.value_bytes, bytes);
        }
        assert_eq!(self.run(self.engine.exist(&key)), Ok(Some(bytes as usize)));
    }

    pub fn free_units(&self) -> u64 {
        let statistics = self.engine.statistics();
        (statistics.capacity_bytes - statistics.used_bytes) / u64::from(UNIT)
    }

    /// The volume after a crash.
    pub fn crash(&self) -> TestVolume {
        self.run(self.engine.flush()).expect("no fault");
        TestVolume::open(self.disk.image(), self.config, self.durability)
    }
}

/// A volume whose free space is every second run of the units that a value of `bytes` takes. Gives the number of keys.
pub(super) fn fragmented(volume: &TestVolume, bytes: usize) -> u64 {
    let count = (0..).find(|&index| volume.put(index, 1, bytes) == PutOutcome::Full).expect("a full volume");
    (0..count).filter(|index| index % 2 == 1).for_each(|index| {
        volume.delete(index);
    });
    count
}

#[test]
fn a_long_value_is_stored_where_only_short_runs_are_free_and_gives_its_space_back() {
    for durability in [Durability::PowerSafe, Durability::Completed] {
        let volume = TestVolume::new(8 << 20, 2 << 20, durability);
        let count = fragmented(&volume, 4_000);
        let free = volume.free_units();
        assert!(count > 1_000 && free > 4_500, "{count} keys, {free} free units");
        assert_eq!(volume.put(9_000, 7, 1 << 20), PutOutcome::Stored);
        volume.assert_value(9_000, 7, 1 << 20);
        let taken = free - volume.free_units();
        assert!((2_048..2_048 + 40).contains(&taken), "1 MiB took {taken} units");
        // A value in pieces replaces a value in pieces; then it is deleted, before and after a crash.
        assert_eq!(volume.put(9_000, 8, 900_000), PutOutcome::Stored);
        volume.assert_value(9_000, 8, 900_000);
        let reopened = volume.crash();
        reopened.assert_value(9_000, 8, 900_000);
        assert_eq!(reopened.free_units(), volume.free_units());
        for volume in [volume, reopened] {
            assert_eq!(volume.delete(9_000), DeleteOutcome::Deleted);
            assert_eq!(volume.free_units(), free);
            (0..count).step_by(2).for_each(|index| volume.assert_value(index, 1, 4_000));
            // All of it can be used again.
            assert_eq!(volume.put(9_001, 9, 1 << 20), PutOutcome::Stored);
            volume.assert_value(9_001, 9, 1 << 20);
        }
    }
}

#[test]
fn a_put_fails_only_if_its_bytes_in_whole_units_and_their_list_do_not_fit() {
    const RESERVED: u64 = 64;
    for seed in 0..12 {
        let (volume, mut random) =
            (TestVolume::new(2 << 20, 512 << 10, Durability::PowerSafe), Prng::new(seed));
        let mut refused = 0;
        let mut bytes_of = std::collections::BTreeMap::new();
        for operation in 1..600 {
            let index = random.below(60);
            if random.one_in(3) {
                volume.delete(index);
                bytes_of.remove(&index);
                continue;
            }
            let bytes = match random.below(4) {
                0 => 8 + random.below(300) as usize,
                1 => 8 + random.below(8_000) as usize,
                2 => 8 + random.below(60_000) as usize,
                _ => 8 + random.below(500_000) as usize,
            };
            let free = volume.free_units();
            match volume.put(index, operation, bytes) {
                PutOutcome::Stored => drop(bytes_of.insert(index, (operation, bytes))),
                PutOutcome::Full => {
                    refused += 1;
                    // At worst each piece is one unit, and a list node names 30 of them.
                    let units = (bytes as u64).div_ceil(UNIT.into());
                    let need = units + units.div_ceil(30) + 1 + RESERVED;
                    assert!(need > free, "{bytes} bytes refused with {free} free units");
                }
                outcome => panic!("{outcome:?}"),
            }
        }
        assert!(refused > 20, "{refused} refused");
        let reopened = volume.crash();
        for (index, (operation, bytes)) in bytes_of {
            volume.assert_value(index, operation, bytes);
            reopened.assert_value(index, operation, bytes);
        }
        assert_eq!(reopened.free_units(), volume.free_units());
    }
}

#[test]
fn a_value_longer_than_an_index_entry_can_name_is_stored_in_pieces() {
    let volume = TestVolume::new(24 << 20, 9 << 20, Durability::PowerSafe);
    for (index, bytes) in [(1, 9 << 20), (2, 4 << 20), (3, (4 << 20) + 77)] {
        assert_eq!(volume.put(index, index, bytes), PutOutcome::Stored);
        volume.assert_value(index, index, bytes);
        volume.crash().assert_value(index, index, bytes);
        volume.delete(index);
    }
    assert_eq!(volume.engine.statistics().used_bytes, 0);
}

/// Runs with every value in pieces of two units.
pub(super) fn scattered<T>(run: impl FnOnce() -> T) -> T {
    inject(Some(InjectedBug::ScatterValues));
    let result = run();
    inject(None);
    result
}

pub(super) fn suite(has_versions: bool) -> VolumeSuite<Arc<HashVolume>> {
    let (format, open) = (format_config(64 << 10), open_config(Durability::PowerSafe));
    let mut suite = VolumeSuite::new(format, open, vec![1 << 20], UNIT);
    suite.background =
        |engine: Rc<HashEngine>| Box::pin(async move { engine.checkpoint(false).await.expect("no fault") });
    suite.settle =
        |engine: Rc<HashEngine>| Box::pin(async move { engine.mark_durable().await.expect("marks") });
    suite.has_versions = has_versions;
    suite
}

#[test]
fn values_in_pieces_survive_power_loss_at_every_write_and_flush() {
    scattered(|| {
        for has_versions in [false, true] {
            let (disks, trace) = suite(has_versions).run_traced(7, 250);
            assert!(disks[0].events() > 1_500, "{} events", disks[0].events());
            suite(has_versions).lose_power_at_events(&disks, &trace, 1);
        }
        let (disks, trace) = suite(false).run_traced(8, 100);
        suite(false).lose_power_twice(&disks, &trace, 7);
    });
}

#[test]
#[should_panic(expected = "power loss at")]
fn power_loss_finds_that_recovery_does_not_verify_pieces() {
    let (disks, trace) = scattered(|| suite(false).run_traced(7, 250));
    inject(Some(InjectedBug::SkipPieceVerification));
    suite(false).lose_power_at_events(&disks, &trace, 1);
}

/// A volume of values in pieces, and what each key has.
fn volume_in_pieces() -> (DiskImage, Vec<Result<Option<u64>, EngineError>>) {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    scattered(|| (0..12).for_each(|index| assert_eq!(volume.put(index, index, 20_000), PutOutcome::Stored)));
    let closed = volume.engine.checkpoint(true);
    volume.run(closed).expect("no fault");
    (volume.disk.image(), read_all(&volume.disk, &volume.engine))
}

#[test]
fn a_flipped_bit_in_any_block_costs_at_most_one_key_and_its_space_can_be_used_again() {
    let (image, good) = volume_in_pieces();
    assert_eq!(good.iter().filter(|found| matches!(found, Ok(Some(_)))).count(), 12);
    let (mut random, mut affected) = (Prng::new(4), 0);
    for block in 0..image.len() / UNIT as usize {
        let mut damaged = image.clone();
        let at = block * UNIT as usize + random.below(UNIT.into()) as usize;
        let mut byte = [0];
        damaged.read(at, &mut byte);
        damaged.write(at, &[byte[0] ^ 1 << random.below(8)]);
        let volume = TestVolume::open(damaged, format_config(64 << 10), Durability::PowerSafe);
        let found = read_all(&volume.disk, &volume.engine);
        let differ: Vec<usize> = (0..KEYS as usize).filter(|&index| found[index] != good[index]).collect();
        assert!(differ.len() <= 1, "block {block} affected {differ:?}");
        for &index in &differ {
            affected += 1;
            assert!(matches!(found[index], Err(EngineError::Corrupt { .. })), "{:?}", found[index]);
            if affected % 16 == 0 {
                // A put or a delete of the key replaces it; all other values remain.
                assert_eq!(volume.put(index as u64, 500, 30_000), PutOutcome::Stored);
                let after = volume.crash();
                let found = read_all(&after.disk, &after.engine);
                assert_eq!(found[index], Ok(Some(500)));
                let is_same = |other: &usize| *other == index || found[*other] == good[*other];
                assert!((0..KEYS as usize).all(|other| is_same(&other)), "block {block}: {found:?}");
                assert_eq!(after.delete(index as u64), DeleteOutcome::Deleted);
            }
        }
    }
    assert!(affected > 300, "{affected} blocks of values");
}

#[test]
fn check_reads_every_piece() {
    let (image, _) = volume_in_pieces();
    let verify_of = |image: DiskImage| {
        let (disk, mut random) = (PowerLossDisk::new(image, UNIT), Prng::new(5));
        let mut observer = |_, _| ();
        let report = block_on(verify(&disk, &BufferPool::new(1 << 20), &mut observer), || {
            disk.complete_one(&mut random);
        });
        report.unwrap_or_else(|failure| panic!("{failure}"))
    };
    let report = verify_of(image.clone());
    assert_eq!((report.keys, report.value_bytes, report.problems.len()), (12, 12 * 20_000, 0));
    let value = value_of(&key_of(5), 5, 20_000);
    let mut whole = vec![0; image.len()];
    image.read(0, &mut whole);
    // The middle of a piece of key 5.
    let at = whole.chunks(UNIT as usize).position(|block| block == &value[1_024..1_536]).expect("a piece");
    let mut damaged = image;
    damaged.write(at * UNIT as usize + 100, &[!value[1_124]]);
    let report = verify_of(damaged);
    assert_eq!(report.problems.len(), 1);
    assert_eq!(report.problems[0].key, Some(key_of(5)));
}

#[test]
fn a_value_that_is_written_again_and_again_takes_no_space_for_long() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    scattered(|| {
        (0..300).for_each(|operation| assert_eq!(volume.put(1, operation, 30_000), PutOutcome::Stored));
    });
    volume.assert_value(1, 299, 30_000);
}

#[test]
fn a_piece_that_was_not_written_is_noticed() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    inject(Some(InjectedBug::ForgetPiece));
    assert_eq!(volume.put(1, 1, 30_000), PutOutcome::Stored);
    inject(None);
    let found = volume.run(volume.engine.get(&key_of(1)));
    assert!(matches!(found, Err(EngineError::Corrupt { .. })), "{:?}", found.map(|_| ()));
}

/// The location of a key's record.
fn location_of(volume: &TestVolume, index: u64) -> u64 {
    let volume = volume.engine.volume();
    volume.candidates(volume.hash(&key_of(index)))[0].location
}

#[test]
fn a_list_that_is_readable_again_does_not_claim_what_others_have_now() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    scattered(|| assert_eq!(volume.put(1, 1, 20_000), PutOutcome::Stored));
    let at = Lba(location_of(&volume, 1));
    volume.run(volume.engine.flush()).expect("no fault");
    // At one opening the record of key 1 cannot be read: the space of its pieces is free.
    let disk = PowerLossDisk::new(volume.disk.image(), UNIT);
    let faults = FaultPlan::default();
    faults.add(FaultRule::within(OpFilter::Read, at, Lba(at.0 + 1), InjectedFault::Error(5)));
    let device: Rc<dyn Device> = Rc::new(FaultDevice::new(Rc::new(disk.clone()), faults));
    let config = format_config(64 << 10);
    let mut random = Prng::new(6);
    let opened = block_on(
        open(&device, &BufferPool::new(8 << 20), open_config(Durability::PowerSafe), &config),
        || {
            disk.complete_one(&mut random);
        },
    );
    let engine = HashEngine::new(opened.expect("opens"), 0, device, BufferPool::new(8 << 20));
    let faulty = TestVolume { disk, engine, config, durability: Durability::PowerSafe };
    let full = |index: &u64| {
        let bytes = 20_000;
        match index % 3 {
            // In pieces, as the one that is lost.
            0 => scattered(|| faulty.put(*index, *index, bytes)) == PutOutcome::Full,
            _ => faulty.put(*index, *index, bytes) == PutOutcome::Full,
        }
    };
    let end = (10..).find(full).expect("a full volume");
    let reopened = faulty.crash();
    for index in 10..end {
        let found = reopened.run(reopened.engine.get(&key_of(index))).expect("no fault").expect("exists");
        assert!(found.as_bytes() == value_of(&key_of(index), index, 20_000), "key {index}");
    }
    let found = reopened.run(reopened.engine.get(&key_of(1)));
    assert!(matches!(found, Err(EngineError::Corrupt { .. })), "{:?}", found.map(|_| ()));
    assert_eq!(reopened.put(1, 2, 100), PutOutcome::Stored);
    (10..end).for_each(|index| assert_eq!(reopened.delete(index), DeleteOutcome::Deleted));
    assert_eq!(reopened.delete(1), DeleteOutcome::Deleted);
    assert_eq!(reopened.engine.statistics().used_bytes, 0);
    assert_eq!(reopened.crash().engine.statistics().used_bytes, 0);
}

#[test]
fn pieces_whose_write_is_in_flight_keep_their_space_if_the_core_is_gone() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    let shared = Arc::clone(volume.engine.volume());
    let before = shared.space.free_units();
    let key = key_of(1);
    let record = record_of(volume.engine.record_layout(), &key, &value_of(&key, 1, 20_000));
    scattered(|| {
        let mut put = Box::pin(volume.engine.put(&key, PutMode::Upsert, record, 20_000));
        let context = &mut std::task::Context::from_waker(std::task::Waker::noop());
        assert!(put.as_mut().poll(context).is_pending());
    });
    drop(volume.engine);
    // Eight writes of two units each may still arrive.
    assert!(shared.space.free_units() <= before - 16, "{} of {before} are free", shared.space.free_units());
}

#[test]
fn a_long_value_is_replaced_again_and_again_without_a_flush_between() {
    for durability in [Durability::PowerSafe, Durability::Completed] {
        let volume = TestVolume::new(24 << 20, 9 << 20, durability);
        for operation in 0..4 {
            assert_eq!(volume.put(1, operation, 9 << 20), PutOutcome::Stored, "{durability:?} {operation}");
        }
        volume.assert_value(1, 3, 9 << 20);
    }
}

#[test]
fn a_value_of_as_many_pieces_as_there_can_be_is_listed_in_a_moment() {
    let units = 1..2_000_000;
    let mut pieces = Pieces::default();
    let (value_bytes, mut at) = (256 << 20, 1);
    let mut next = None;
    while at <= value_bytes as u64 / 512 {
        let one = |location| Piece { extent: Extent { location, units: 1 }, crc: 0 };
        let end = (at + 30).min(value_bytes as u64 / 512 + 1);
        let list = PieceList {
            pieces: (at..end).map(one).collect(),
            next: (end <= value_bytes as u64 / 512).then(|| one(600_000 + at)),
        };
        next = pieces.add(list, value_bytes, 512, &units).expect("possible");
        at = end;
    }
    assert_eq!((next, pieces.pieces.len()), (None, 1 << 19));
}

#[test]
fn deletes_of_absent_keys_leave_space_for_the_tombstones_of_others() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    let put = |index: u64| {
        let key = key_of(index);
        let record = record_of(volume.engine.record_layout(), &key, &value_of(&key, index, 300));
        let options = PutOptions { version: Version::from_bits(5), ..PutOptions::default() };
        volume.run(volume.engine.put_with(&key, PutValue::new(record, 300), options)).expect("no fault")
    };
    let count = (0..).find(|&index| put(index) == PutOutcome::Full).expect("a full volume");
    let delete = |index: u64| volume.run(volume.engine.delete_with(&key_of(index), Version::from_bits(6)));
    let refused = (1_000_000..1_000_100).filter(|&absent| delete(absent).is_err()).count();
    assert!(refused > 0, "a tombstone of an absent key frees nothing");
    // Also if more of them come at once than there is space for.
    let (keys, version) = ((0..count).map(key_of).collect::<Vec<_>>(), Version::from_bits(6));
    let deletes: FuturesUnordered<_> =
        keys.iter().map(|key| volume.engine.delete_with(key, version)).collect();
    let outcomes: Vec<_> = volume.run(deletes.collect());
    assert_eq!(outcomes, vec![Ok(DeleteOutcome::Deleted); count as usize]);
}

#[test]
fn salvage_finds_a_value_in_pieces_before_a_block_that_cannot_be_read() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    scattered(|| (1..3).for_each(|index| assert_eq!(volume.put(index, 1, 2_000), PutOutcome::Stored)));
    volume.run(volume.engine.flush()).expect("no fault");
    let disk = PowerLossDisk::new(volume.disk.image(), UNIT);
    let faults = FaultPlan::default();
    let last = Lba(disk.geometry().blocks - 1);
    faults.add(FaultRule::within(OpFilter::Read, last, Lba(last.0 + 1), InjectedFault::Error(5)));
    let device = FaultDevice::new(Rc::new(disk.clone()), faults);
    let (mut random, mut observer) = (Prng::new(7), |_, _| ());
    let report = block_on(salvage(&device, &mut observer), || {
        disk.complete_one(&mut random);
    });
    assert_eq!((report.records, report.damaged, report.value_bytes), (2, 0, 4_000));
}

/// Replaces the list of the record at `location`, and the length of its value, and makes the checksums valid again.
fn replace_list(image: &mut DiskImage, location: u64, list: &PieceList, value_bytes: u32) {
    let at = location as usize * UNIT as usize;
    let mut record = vec![0; UNIT as usize];
    image.read(at, &mut record);
    let (header, key) = UncheckedRecord { bytes: &record, location }.header().expect("a record");
    let (offset, checked) = (header.value_offset(), 8..HEADER_BYTES + key.len());
    let list_bytes = list.encode(&mut record[offset..]);
    let list_crc = crc32c(&record[offset..offset + list_bytes]);
    record[24..28].copy_from_slice(&value_bytes.to_le_bytes());
    record[28..32].copy_from_slice(&list_crc.to_le_bytes());
    let of_place = mix64(location | u64::from(record[3]) << 56) as u32;
    let header_crc = crc32c(&record[checked]) ^ of_place;
    record[4..8].copy_from_slice(&header_crc.to_le_bytes());
    image.write(at, &record);
}

#[test]
fn an_intact_list_of_anything_costs_its_own_value_only() {
    let volume = TestVolume::new(1 << 20, 64 << 10, Durability::PowerSafe);
    scattered(|| (0..12).for_each(|index| assert_eq!(volume.put(index, index, 20_000), PutOutcome::Stored)));
    volume.run(volume.engine.checkpoint(true)).expect("no fault");
    let (image, good) = (volume.disk.image(), read_all(&volume.disk, &volume.engine));
    let units = volume.engine.volume().record_units();
    let locations: Vec<u64> = (0..12).map(|index| location_of(&volume, index)).collect();
    let (mut random, mut opened_with_less) = (Prng::new(8), 0);
    for round in 0..300 {
        let (mut image, index) = (image.clone(), random.below(12) as usize);
        let mut any_piece = || Piece {
            extent: Extent {
                location: match random.below(8) {
                    0 => random.next_u64(),
                    1 => random.below(units.start),
                    2 => units.end - random.below(3),
                    3 => locations[random.below(12) as usize],
                    _ => units.start + random.below(units.end - units.start),
                },
                units: [1, 1, 2, 3, 256, 257, 0x7fff_ffff][random.below(7) as usize],
            },
            crc: random.next_u64() as u32,
        };
        let pieces: Vec<Piece> = (0..round % 22).map(|_| any_piece()).collect();
        let next = (round % 3 == 0 || pieces.is_empty()).then(any_piece);
        let listed: u64 = pieces.iter().map(|piece| piece.extent.units).sum();
        let value_bytes = match random.below(4) {
            0 => random.next_u64() as u32,
            _ => (listed * u64::from(UNIT)) as u32,
        };
        replace_list(&mut image, locations[index], &PieceList { pieces, next }, value_bytes);
        let disk = PowerLossDisk::new(image.clone(), UNIT);
        let complete = |disk: &PowerLossDisk| {
            disk.complete_one(&mut Prng::new(9));
        };
        let report = block_on(verify(&disk, &BufferPool::new(8 << 20), &mut |_, _| ()), || complete(&disk));
        assert_eq!(report.expect("opens").problems.len(), 1);
        block_on(salvage(&disk, &mut |_, _| ()), || complete(&disk));
        let volume = TestVolume::open(image, format_config(64 << 10), Durability::PowerSafe);
        opened_with_less += u64::from(volume.engine.volume().lost_pieces.lock().is_empty());
        let differ = |volume: &TestVolume| -> Vec<usize> {
            let found = read_all(&volume.disk, &volume.engine);
            (0..KEYS as usize).filter(|&index| found[index] != good[index]).collect()
        };
        assert_eq!(differ(&volume), [index], "round {round}");
        let deleted = volume.run(volume.engine.delete(&key_of(index as u64)));
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted));
        (100..).find(|&index| volume.put(index, 1, 3_000) == PutOutcome::Full).expect("a full volume");
        assert_eq!(differ(&volume.crash()), [index], "round {round}");
    }
    assert!(opened_with_less > 0, "{opened_with_less} lists were plausible");
}
