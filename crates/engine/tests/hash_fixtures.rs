//! Volumes of every released format version remain readable and writable.

use crate::common::{HashFixture, pool};
use octokv_base::{Prng, RingRange, UnixTime, Version};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{EngineFixture, key_of, operation_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, HashVolume, verify};
use octokv_engine::{
    Capability, DeleteOutcome, Engine, EngineError, FormatVersions, PutMode, PutOptions, PutOutcome,
    PutValue, ScanEntry, VerifyReport, Volume, WallClock,
};
use octokv_runtime::block_on;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

const HASH_V1: &[u8] = include_bytes!("fixtures/hash-v1.img");
const HASH_V2: &[u8] = include_bytes!("fixtures/hash-v2.img");

/// What a fixture has of a key: the operation that wrote its value and the value's length, version, and expiry.
type Stored = (u64, usize, Version, UnixTime);

/// The contents of a volume by the number of the key ([`key_of`]).
type Contents = BTreeMap<u64, Stored>;

/// Of the fixture of version 2, between its two expiry times.
const NOW: UnixTime = UnixTime(1_700_000_000_000);
/// When the first key expires that does: one second after the fixture was written.
const SOON: UnixTime = UnixTime(1_600_000_001_000);
/// When the others expire, in 2500.
const FAR: UnixTime = UnixTime(16_725_225_600_000);

fn plain(operation: u64, bytes: usize) -> Stored {
    (operation, bytes, Version::NONE, UnixTime::NEVER)
}

/// An open volume on a disk that completes operations in random order.
struct OpenVolume {
    disk: PowerLossDisk,
    engine: HashEngine,
}

impl OpenVolume {
    fn open(disk: PowerLossDisk, now: UnixTime) -> OpenVolume {
        let fixture = HashFixture { clock: WallClock::new(move || now), ..HashFixture::default() };
        let engine = run(&disk, fixture.open(Rc::new(disk.clone()))).expect("opens");
        OpenVolume { disk, engine }
    }

    fn of(image: &[u8], now: UnixTime) -> OpenVolume {
        OpenVolume::open(PowerLossDisk::new(image.to_vec(), 512), now)
    }

    /// After a clean shutdown.
    fn reopen(self, now: UnixTime) -> OpenVolume {
        run(&self.disk, self.engine.close()).expect("no fault");
        drop(self.engine);
        OpenVolume::open(PowerLossDisk::new(self.disk.image(), 512), now)
    }

    fn get(&self, index: u64) -> Option<Stored> {
        let key = key_of(index);
        let value = run(&self.disk, self.engine.get(&key)).expect("no fault")?;
        Some((operation_of(&key, value.as_bytes()), value.bytes as usize, value.version, value.expires_at))
    }

    /// These keys, and none of the others below 1,000.
    fn assert_has(&self, contents: &Contents) {
        for index in 0..1_000 {
            assert_eq!(self.get(index).as_ref(), contents.get(&index), "key {index}");
        }
    }

    fn put(&self, index: u64, stored: Stored, mode: PutMode) -> Result<PutOutcome, EngineError> {
        let ((operation, bytes, version, expires_at), key) = (stored, key_of(index));
        let record = record_of(self.engine.record_layout(), &key, &value_of(&key, operation, bytes));
        let options = PutOptions { mode, version, expires_at };
        run(&self.disk, self.engine.put_with(&key, PutValue::new(record, bytes), options))
    }

    fn delete(&self, index: u64, version: Version) -> Result<DeleteOutcome, EngineError> {
        run(&self.disk, self.engine.delete_with(&key_of(index), version))
    }

    /// The versions of the tombstones, and of the keys that have expired.
    fn tombstones(&self) -> Vec<u64> {
        let mut versions = Vec::new();
        let mut sink = |entry: &ScanEntry<'_>| {
            versions.extend(entry.is_tombstone.then(|| entry.version.to_bits()));
            true
        };
        run(&self.disk, self.engine.scan(RingRange::FULL, Version::NONE, &mut sink)).expect("no fault");
        versions.sort_unstable();
        versions
    }

    fn used_units(&self) -> u64 {
        self.engine.statistics().used_bytes / 512
    }
}

fn run<T>(disk: &PowerLossDisk, future: impl Future<Output = T>) -> T {
    let mut random = Prng::new(1);
    block_on(future, || {
        disk.complete_one(&mut random);
    })
}

fn verified(image: &[u8]) -> VerifyReport {
    let disk = PowerLossDisk::new(image.to_vec(), 512);
    run(&disk, verify(&disk, &pool(), &mut |_, _| ())).expect("loads")
}

/// The version of the format in the superblock.
fn format_version(disk: &PowerLossDisk) -> u8 {
    disk.contents()[12]
}

/// Twenty keys, ten before and ten after a checkpoint, the fourth deleted; without a clean shutdown.
fn contents_of_version_1() -> Contents {
    (0..20).filter(|&index| index != 3).map(|index| (index, plain(index, 100 + index as usize))).collect()
}

/// A full volume of which every second filler was deleted, then each kind of key before a checkpoint and again after it, without
/// a clean shutdown.
fn contents_of_version_2() -> Contents {
    let version = Version::from_bits;
    let fillers = (100..404).step_by(2).map(|index| (index, plain(index, 100)));
    let keys = [
        (0, plain(0, 100)),
        (2, plain(2, 102)),
        (3, (3, 203, version(31), UnixTime::NEVER)),
        (4, (4, 104, Version::NONE, FAR)),
        (7, plain(7, 6_000)),
        // No checkpoint has the changes that made these, deleted key 1, and replaced key 3.
        (10, plain(10, 110)),
        (11, plain(11, 111)),
        (12, plain(12, 112)),
        (13, (13, 103, version(30), UnixTime::NEVER)),
        (14, (14, 104, Version::NONE, FAR)),
        (17, plain(17, 6_000)),
        // These are not known durable.
        (18, (18, 118, version(180), FAR)),
        (19, (19, 6_000, version(190), UnixTime::NEVER)),
    ];
    fillers.chain(keys).collect()
}

/// The numbers of records of version 2 in an image by their flags: 1 = has a version or an expiry time, 2 = tombstone, 4 = in
/// pieces. Obsolete records count too.
fn records_by_flags(image: &[u8]) -> BTreeMap<u8, usize> {
    let mut counts = BTreeMap::new();
    for unit in image.chunks(512).filter(|unit| unit.starts_with(b"KR\x02")) {
        *counts.entry(unit[3]).or_default() += 1;
    }
    counts
}

#[test]
fn version_1_of_the_hash_engine() {
    let volume = OpenVolume::of(HASH_V1, NOW);
    let mut contents = contents_of_version_1();
    assert_eq!(volume.engine.statistics().keys, 19);
    volume.assert_has(&contents);
    // It stays what it is, and takes no more than it took.
    let versioned = (50, 100, Version::from_bits(7), UnixTime::NEVER);
    let refused = volume.put(0, versioned, PutMode::Upsert);
    assert_eq!(refused, Err(EngineError::Unsupported(Capability::Versions)));
    assert_eq!(volume.put(0, plain(51, 300), PutMode::Upsert), Ok(PutOutcome::Stored));
    assert_eq!(volume.delete(1, Version::NONE), Ok(DeleteOutcome::Deleted));
    contents.insert(0, plain(51, 300));
    contents.remove(&1);
    let volume = volume.reopen(NOW);
    assert_eq!(format_version(&volume.disk), 1);
    assert!(records_by_flags(&volume.disk.contents()).is_empty());
    volume.assert_has(&contents);
}

#[test]
fn version_1_of_the_hash_engine_is_upgraded_when_asked() {
    let disk = PowerLossDisk::new(HASH_V1.to_vec(), 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let versions = run(&disk, <Arc<HashVolume>>::upgrade(&[device], &pool()));
    assert_eq!(versions, Ok(FormatVersions { before: 1, after: 2 }));
    assert_eq!(format_version(&disk), 2);
    let volume = OpenVolume::open(disk, NOW);
    let mut contents = contents_of_version_1();
    volume.assert_has(&contents);
    let versioned = (50, 100, Version::from_bits(7), FAR);
    assert_eq!(volume.put(0, versioned, PutMode::Upsert), Ok(PutOutcome::Stored));
    contents.insert(0, versioned);
    let volume = volume.reopen(NOW);
    volume.assert_has(&contents);
    assert!(verified(&volume.disk.contents()).problems.is_empty());
}

#[test]
fn the_fixture_of_version_2_has_every_kind_of_record() {
    assert_eq!(HASH_V2[12], 2);
    let counts = records_by_flags(HASH_V2);
    let of_flags = |flags: u8| counts.get(&flags).copied().unwrap_or_default();
    assert_eq!((of_flags(3), of_flags(4), of_flags(5)), (2, 2, 1), "{counts:?}");
    assert!(of_flags(0) > 200 && of_flags(1) > 8, "{counts:?}");
    let report = verified(HASH_V2);
    assert!(report.problems.is_empty() && !report.is_clean_shutdown, "{report:?}");
    assert_eq!((report.dropped_entries, report.damaged_copies), (0, 0));
}

#[test]
fn version_2_of_the_hash_engine() {
    let mut contents = contents_of_version_2();
    let volume = OpenVolume::of(HASH_V2, NOW);
    // Two more have expired and not been written since.
    assert_eq!(volume.engine.statistics().keys, contents.len() as u64 + 2);
    volume.assert_has(&contents);
    assert_eq!(volume.tombstones(), [50, 50, 61, 61]);
    // Each time is that of the key: one millisecond before it, the key is there.
    let before = OpenVolume::of(HASH_V2, UnixTime(SOON.0 - 1));
    for index in [5, 15] {
        assert_eq!(before.get(index), Some((index, 105, Version::from_bits(50), SOON)));
    }
    let after = OpenVolume::of(HASH_V2, FAR);
    assert_eq!([4, 14, 18].map(|index| after.get(index)), [None; 3]);

    // No put of an older version replaces a key, a tombstone or what has expired.
    for (index, newest) in [(3, 31), (6, 61), (15, 50), (16, 61), (19, 190)] {
        let refused = volume.put(index, (50, 100, Version::from_bits(newest), FAR), PutMode::Upsert);
        assert_eq!(refused, Ok(PutOutcome::NotNewer(Version::from_bits(newest))), "key {index}");
    }
    let changes = [
        (2, plain(51, 90), PutMode::UpdateOnly),
        (5, (52, 91, Version::from_bits(51), FAR), PutMode::AddOnly),
        (6, (53, 92, Version::from_bits(62), UnixTime::NEVER), PutMode::Upsert),
        (20, plain(54, 93), PutMode::AddOnly),
        (19, (55, 7_000, Version::from_bits(191), FAR), PutMode::Upsert),
    ];
    for (index, stored, mode) in changes {
        assert_eq!(volume.put(index, stored, mode), Ok(PutOutcome::Stored), "key {index}");
        contents.insert(index, stored);
    }
    // Deleted: a plain key, a key with a version, and a value in pieces, with its 12 units and more.
    assert_eq!(volume.delete(0, Version::NONE), Ok(DeleteOutcome::Deleted));
    assert_eq!(volume.delete(13, Version::from_bits(70)), Ok(DeleteOutcome::Deleted));
    let used = volume.used_units();
    assert_eq!(volume.delete(7, Version::NONE), Ok(DeleteOutcome::Deleted));
    assert!((13..16).contains(&(used - volume.used_units())), "{used}, {}", volume.used_units());
    contents.retain(|index, _| ![0, 13, 7].contains(index));
    volume.assert_has(&contents);

    let (used, volume) = (volume.used_units(), volume.reopen(NOW));
    assert_eq!((volume.used_units(), format_version(&volume.disk)), (used, 2));
    volume.assert_has(&contents);
    assert_eq!(volume.tombstones(), [50, 61, 70]);
    // One has expired.
    assert_eq!(volume.engine.statistics().keys, contents.len() as u64 + 1);
    run(&volume.disk, volume.engine.close()).expect("no fault");
    let report = verified(&volume.disk.contents());
    assert!(report.problems.is_empty() && report.is_clean_shutdown, "{report:?}");
    assert_eq!((report.keys, report.damaged_copies), (contents.len() as u64 + 1, 0));
}
