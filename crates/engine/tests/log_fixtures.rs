//! Volumes of every drawn format version of the log engine remain readable and writable.
//!
//! The kept volume is the image of a disk, compressed. `OCTOKV_WRITE_FIXTURE=FILE cargo test -p octokv-engine --test suite
//! log_fixtures` writes one in today's format: for a new version, never over an old one that was released.

#![allow(clippy::disallowed_methods, reason = "the fixture is a file")]

use crate::common::log_fixture::{LogFixture, make_small};
use crate::common::pool;
use octokv_base::{Prng, RingRange, UnixTime, Version};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{EngineFixture, key_of, operation_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::log::open::open_with;
use octokv_engine::log::volume::LogVolume;
use octokv_engine::{
    DeleteOutcome, Engine, LogStatistics, PutMode, PutOptions, PutOutcome, PutValue, ScanEntry, VerifyReport,
    Volume, WallClock,
};
use octokv_runtime::block_on;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

const LOG_V1: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/log-v1.img.lz4");
const DISK_BYTES: usize = 4 << 20;
const CHUNK_BYTES: usize = 16 << 10;

/// What a volume has of a key: the operation that wrote its value and the value's length, version, and expiry.
type Stored = (u64, usize, Version, UnixTime);
/// The contents of a volume by the number of the key ([`key_of`]).
type Contents = BTreeMap<u64, Stored>;

/// When the fixture was written.
const NOW: UnixTime = UnixTime(1_700_000_000_000);
/// When two of its keys expire.
const SOON: UnixTime = UnixTime(NOW.0 + 1_000);
/// When the others expire, in 2500.
const FAR: UnixTime = UnixTime(16_725_225_600_000);
/// The keys that are overwritten most.
const OFTEN: Range<u64> = 110..114;
/// In one place, and in extents of two chunks and of three.
const LENGTHS: [usize; 10] = [290, 1_300, 90, 3_000, 600, 290, 20_000, 1_300, 90, 40_000];

fn plain(operation: u64, bytes: usize) -> Stored {
    (operation, bytes, Version::NONE, UnixTime::NEVER)
}

fn versioned(operation: u64, bytes: usize, version: u64) -> Stored {
    (operation, bytes, Version::from_bits(version), UnixTime::NEVER)
}

fn expiring(operation: u64, bytes: usize, at: UnixTime) -> Stored {
    (operation, bytes, Version::NONE, at)
}

fn fixture(now: UnixTime) -> LogFixture {
    let clock = WallClock::new(move || now);
    let mut fixture = LogFixture { cores: 1, clock, disk_bytes: DISK_BYTES, ..LogFixture::default() };
    fixture.format.value_bytes_max = 64 << 10;
    fixture
}

fn run<T>(disk: &PowerLossDisk, future: impl Future<Output = T>) -> T {
    let mut random = Prng::new(1);
    block_on(future, || {
        disk.complete_one(&mut random);
    })
}

fn verified(image: &[u8]) -> VerifyReport {
    let disk = PowerLossDisk::new(image.to_vec(), 512);
    let devices: [Rc<dyn Device>; 1] = [Rc::new(disk.clone())];
    let pool = pool();
    run(&disk, <Arc<LogVolume>>::verify(&devices, &pool, &mut |_, _| ())).expect("loads")
}

struct OpenVolume {
    disk: PowerLossDisk,
    engine: LogEngine,
}

impl OpenVolume {
    fn open(disk: PowerLossDisk, now: UnixTime) -> OpenVolume {
        let (fixture, device): (_, Rc<dyn Device>) = (fixture(now), Rc::new(disk.clone()));
        let pool = pool();
        let opened = open_with(&device, &pool, fixture.open_config(), &fixture.format, make_small);
        let volume = run(&disk, opened).expect("opens");
        let engine = LogEngine::new(volume, device, pool);
        OpenVolume { disk, engine }
    }

    fn of(image: &[u8], now: UnixTime) -> OpenVolume {
        OpenVolume::open(PowerLossDisk::new(image.to_vec(), 512), now)
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        run(&self.disk, future)
    }

    /// The operation of an empty value is 0.
    fn get(&self, index: u64) -> Option<Stored> {
        let key = key_of(index);
        let value = self.run(self.engine.get(&key)).expect("no fault")?;
        let operation = match value.bytes {
            0 => 0,
            _ => operation_of(&key, value.as_bytes()),
        };
        Some((operation, value.bytes as usize, value.version, value.expires_at))
    }

    fn put(&self, index: u64, (operation, bytes, version, expires_at): Stored) -> PutOutcome {
        let key = key_of(index);
        let record = record_of(self.engine.record_layout(), &key, &value_of(&key, operation, bytes));
        let options = PutOptions { mode: PutMode::Upsert, version, expires_at };
        self.run(self.engine.put_with(&key, PutValue::new(record, bytes), options)).expect("no fault")
    }

    fn delete(&self, index: u64, version: u64) -> DeleteOutcome {
        self.run(self.engine.delete_with(&key_of(index), Version::from_bits(version))).expect("no fault")
    }

    /// Compacts both logs of each store until live images and values have moved.
    fn compact(&self) {
        let before = self.log();
        let has_moved = || {
            let now = self.log();
            now.moved_images > before.moved_images && now.moved_values > before.moved_values
        };
        for _ in 0..40 {
            if has_moved() {
                return;
            }
            for log in [LogKind::Keys, LogKind::Values] {
                self.run(self.engine.compact_once(log)).expect("no fault");
            }
        }
        panic!("nothing has moved: {:?}", self.log());
    }

    /// Overwrites a few keys so often that the images of the others come to lie in the oldest chunks of the key logs.
    fn overwrite_often(&self, operation: u64) {
        for round in 0..40 {
            for index in OFTEN {
                self.put(index, plain(operation + round, 60));
            }
        }
    }

    fn split_all(&self) {
        while self.run(self.engine.split_once()).expect("no fault") {}
    }

    fn log(&self) -> LogStatistics {
        self.engine.statistics().log.expect("it has logs")
    }

    /// These keys and none of the others below 200, by gets and by a scan.
    fn assert_has(&self, contents: &Contents) {
        for index in 0..200 {
            assert_eq!(self.get(index).as_ref(), contents.get(&index), "key {index}");
        }
        let expected: BTreeSet<_> = contents.keys().map(|&index| key_of(index).as_bytes().to_vec()).collect();
        assert_eq!(self.scanned(false).into_keys().collect::<BTreeSet<_>>(), expected);
    }

    /// The keys, or the tombstones, with their versions.
    fn scanned(&self, tombstones: bool) -> BTreeMap<Vec<u8>, u64> {
        let mut found = BTreeMap::new();
        let mut sink = |entry: &ScanEntry<'_>| {
            if entry.is_tombstone == tombstones {
                found.insert(entry.key.to_vec(), entry.version.to_bits());
            }
            true
        };
        self.run(self.engine.scan(RingRange::FULL, Version::NONE, &mut sink)).expect("no fault");
        found
    }

    /// The versions of the tombstones.
    fn tombstones(&self) -> Vec<u64> {
        let mut versions: Vec<u64> = self.scanned(true).into_values().collect();
        versions.sort_unstable();
        versions
    }
}

/// Segments that were split, values in one place, in extents and empty, tombstones, versions and expiry times, records and images that compaction
/// has moved, freed chunks; a checkpoint; behind it more of all that, up to images that no other states as durable. No clean shutdown.
fn write_volume() -> Vec<u8> {
    let disk = PowerLossDisk::new(vec![0; DISK_BYTES], 512);
    run(&disk, fixture(NOW).format(Rc::new(disk.clone())));
    let volume = OpenVolume::open(disk, NOW);
    // Of a tombstone that a later call forgets.
    volume.delete(150, 10);
    for (index, bytes) in (0..40).zip(LENGTHS.into_iter().cycle()) {
        volume.put(index, plain(index, bytes));
    }
    for index in 40..48 {
        volume.put(index, plain(0, 0));
    }
    for index in 60..64 {
        volume.put(index, versioned(index, 90 + 310 * (index as usize % 2), 31));
    }
    volume.run(volume.engine.forget_below(Version::from_bits(20))).expect("no fault");
    volume.split_all();
    for index in 0..12 {
        volume.put(index, plain(100 + index, 80));
    }
    volume.overwrite_often(300);
    volume.compact();
    volume.put(64, expiring(64, 110, SOON));
    volume.put(65, expiring(65, 500, FAR));
    volume.put(66, (66, 120, Version::from_bits(40), FAR));
    volume.delete(63, 61);
    volume.delete(70, 50);
    for index in [20, 21, 22] {
        volume.delete(index, 0);
    }
    volume.run(volume.engine.checkpoint()).expect("no fault");
    for index in 80..100 {
        volume.put(index, plain(index, 130 + 300 * (index as usize % 2)));
    }
    volume.split_all();
    volume.put(12, plain(112, 25_000));
    volume.overwrite_often(400);
    volume.compact();
    volume.put(101, versioned(101, 75, 90));
    volume.put(102, expiring(102, 76, SOON));
    volume.put(13, plain(0, 0));
    volume.delete(23, 0);
    volume.delete(71, 80);
    volume.run(volume.engine.mark_durable()).expect("no fault");
    // These are not known durable.
    volume.put(103, (103, 1_000, Version::from_bits(95), FAR));
    volume.delete(24, 0);
    while volume.disk.complete_one(&mut Prng::new(2)) {}
    volume.disk.contents()
}

/// What [`write_volume`] leaves.
fn contents_of_version_1() -> Contents {
    let first = (0..40_u64).zip(LENGTHS.into_iter().cycle());
    let mut contents: Contents = first.map(|(index, bytes)| (index, plain(index, bytes))).collect();
    contents.extend((40..48).map(|index| (index, plain(0, 0))));
    contents.extend((60..63).map(|index| (index, versioned(index, 90 + 310 * (index as usize % 2), 31))));
    contents.extend((0..12).map(|index| (index, plain(100 + index, 80))));
    contents.extend((80..100).map(|index| (index, plain(index, 130 + 300 * (index as usize % 2)))));
    contents.retain(|index, _| !(20..25).contains(index));
    contents.extend(OFTEN.map(|index| (index, plain(400 + 39, 60))));
    contents.extend([
        (64, expiring(64, 110, SOON)),
        (65, expiring(65, 500, FAR)),
        (66, (66, 120, Version::from_bits(40), FAR)),
        (12, plain(112, 25_000)),
        (101, versioned(101, 75, 90)),
        (102, expiring(102, 76, SOON)),
        (13, plain(0, 0)),
        (103, (103, 1_000, Version::from_bits(95), FAR)),
    ]);
    contents
}

/// The structures of an image by their magic: superblocks, first buckets of segment images, those that were split, markers, images of the
/// checkpoint, directories of value chunks.
fn structures(image: &[u8]) -> [usize; 6] {
    let units = || image.chunks(512);
    let count = |is_wanted: &dyn Fn(&[u8]) -> bool| units().filter(|unit| is_wanted(unit)).count();
    let is_bucket = |unit: &[u8]| unit.starts_with(b"KB\x01");
    [
        count(&|unit| unit.starts_with(b"OCTO")),
        count(&is_bucket),
        count(&|unit| is_bucket(unit) && unit[3] & 6 != 0),
        count(&|unit| is_bucket(unit) && unit[3] & 1 != 0),
        count(&|unit| unit.starts_with(b"OKVS")),
        count(&|unit| unit[512 - 32..].starts_with(b"OKVD")),
    ]
}

fn assert_is_volume_of_version_1(image: &[u8]) {
    assert_eq!((image[12], image[14]), (1, 3), "format and engine");
    let found = structures(image);
    let [superblocks, images, splits, markers, checkpoint, directories] = found;
    assert!(superblocks == 4 && images > 150 && splits > 20 && markers > 0, "{found:?}");
    assert!(checkpoint >= 2 && directories > 8, "{found:?}");
    let report = verified(image);
    assert!(report.problems.is_empty() && !report.is_clean_shutdown, "{report:?}");
    assert_eq!((report.dropped_entries, report.damaged_copies), (0, 0));

    let mut contents = contents_of_version_1();
    let volume = OpenVolume::of(image, NOW);
    let log = volume.log();
    assert_eq!((log.stores, log.chunk_bytes, log.lost_stores), (2, CHUNK_BYTES as u64, 0));
    assert!(log.segments > 12 && log.values.chunks > 10, "{log:?}");
    volume.assert_has(&contents);
    assert_eq!(volume.tombstones(), [50, 61, 80], "below 20 they are forgotten");
    let later = OpenVolume::of(image, SOON);
    assert_eq!([64, 102].map(|index| later.get(index)), [None; 2]);
    assert_eq!(later.get(65), contents.get(&65).copied());
    assert_eq!([65, 66, 103].map(|index| OpenVolume::of(image, FAR).get(index)), [None; 3]);

    volume.run(volume.engine.compact_all()).expect("no fault");
    assert!(volume.log().compaction_rounds > 0);
    volume.assert_has(&contents);
    // No put of an older version replaces a key or a tombstone, in whatever part of the volume it was.
    for (index, newest) in [(60, 31), (63, 61), (66, 40), (70, 50), (71, 80), (101, 90), (103, 95)] {
        let refused = volume.put(index, versioned(200, 50, newest));
        assert_eq!(refused, PutOutcome::NotNewer(Version::from_bits(newest)), "key {index}");
    }
    for (index, stored) in [(0, plain(200, 35_000)), (63, versioned(201, 60, 62)), (104, plain(202, 70))] {
        assert_eq!(volume.put(index, stored), PutOutcome::Stored, "key {index}");
        contents.insert(index, stored);
    }
    assert_eq!(volume.delete(1, 0), DeleteOutcome::Deleted);
    assert_eq!(volume.delete(103, 96), DeleteOutcome::Deleted);
    contents.retain(|index, _| ![1, 103].contains(index));
    volume.assert_has(&contents);
    volume.run(volume.engine.close()).expect("no fault");
    let image = volume.disk.contents();
    assert_eq!((image[12], image[14]), (1, 3), "it stays what it is");
    let report = verified(&image);
    assert!(report.problems.is_empty() && report.is_clean_shutdown, "{report:?}");
    let volume = OpenVolume::of(&image, NOW);
    volume.assert_has(&contents);
    assert_eq!(volume.tombstones(), [50, 80, 96]);
}

#[test]
fn version_1_of_the_log_engine() {
    let compressed = std::fs::read(LOG_V1).expect("the fixture");
    let image = lz4_flex::block::decompress(&compressed, DISK_BYTES).expect("an image of a disk");
    assert_is_volume_of_version_1(&image);
}

/// The fixture's checks hold for what today's code writes. A change of the format that today's code still reads in its old form passes both tests: the unit tests of each
/// structure fix their bytes.
#[test]
fn todays_volumes_are_of_version_1() {
    let image = write_volume();
    assert_is_volume_of_version_1(&image);
    if let Ok(path) = std::env::var("OCTOKV_WRITE_FIXTURE") {
        std::fs::write(path, lz4_flex::block::compress(&image)).expect("a place for the fixture");
    }
}
