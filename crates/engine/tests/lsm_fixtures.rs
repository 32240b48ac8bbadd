//! Volumes of every released format version of the ordered engine remain readable and writable.
//!
//! The kept volume is the image of a disk, compressed. `OCTOKV_WRITE_FIXTURE=FILE cargo test -p octokv-engine --test suite
//! lsm_fixtures` writes one in today's format: for a new version, never over an old one.

#![allow(clippy::disallowed_methods, reason = "the fixture is a file")]

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::pool;
use crate::lsm_faults::AllPairs;
use octokv_base::{Prng, RingRange, UnixTime, Version};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{EngineFixture, key_of, operation_of, record_of, value_of};
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::{LsmEngine, LsmVolume, open_with};
use octokv_engine::{
    DeleteOutcome, Engine, IteratorOptions, IteratorProgress, PutMode, PutOptions, PutOutcome, PutValue,
    ScanEntry, VerifyReport, Volume, WallClock,
};
use octokv_runtime::block_on;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;

const LSM_V1: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/lsm-v1.img.lz4");
const DISK_BYTES: usize = 8 << 20;

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

fn plain(operation: u64, bytes: usize) -> Stored {
    (operation, bytes, Version::NONE, UnixTime::NEVER)
}

fn versioned(operation: u64, bytes: usize, version: u64) -> Stored {
    (operation, bytes, Version::from_bits(version), UnixTime::NEVER)
}

fn expiring(operation: u64, bytes: usize, at: UnixTime) -> Stored {
    (operation, bytes, Version::NONE, at)
}

fn several_in_a_memtable(settings: &mut TreeSettings) {
    make_small(settings);
    settings.memtable_bytes = 48 << 10;
    settings.compaction.level1_bytes = 3 << 10;
}

fn fixture(now: UnixTime) -> LsmFixture {
    let mut fixture = LsmFixture { cores: 1, clock: WallClock::new(move || now), ..LsmFixture::default() };
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
    run(&disk, <Arc<LsmVolume>>::verify(&devices, &pool, &mut |_, _| ())).expect("loads")
}

struct OpenVolume {
    disk: PowerLossDisk,
    engine: LsmEngine,
}

impl OpenVolume {
    fn open(disk: PowerLossDisk, now: UnixTime) -> OpenVolume {
        let (fixture, device): (_, Rc<dyn Device>) = (fixture(now), Rc::new(disk.clone()));
        let pool = pool();
        let opened = open_with(&device, &pool, fixture.open_config(), &fixture.format, several_in_a_memtable);
        let volume = run(&disk, opened).expect("opens");
        let engine = LsmEngine::new(volume, 0, device, pool);
        OpenVolume { disk, engine }
    }

    fn of(image: &[u8], now: UnixTime) -> OpenVolume {
        OpenVolume::open(PowerLossDisk::new(image.to_vec(), 512), now)
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        run(&self.disk, future)
    }

    fn get(&self, index: u64) -> Option<Stored> {
        let key = key_of(index);
        let value = self.run(self.engine.get(&key)).expect("no fault")?;
        Some((operation_of(&key, value.as_bytes()), value.bytes as usize, value.version, value.expires_at))
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

    /// These keys and none of the others below 200, by gets and by iterators in both directions.
    fn assert_has(&self, contents: &Contents) {
        for index in 0..200 {
            assert_eq!(self.get(index).as_ref(), contents.get(&index), "key {index}");
        }
        let expected: BTreeMap<_, _> =
            contents.iter().map(|(index, (operation, ..))| (key_of(*index), *operation)).collect();
        for reverse in [false, true] {
            let options = IteratorOptions { reverse, ..IteratorOptions::default() };
            let iterator = self.run(self.engine.create_iterator(options)).unwrap().unwrap();
            let mut sink = AllPairs::default();
            while self.run(self.engine.next_pairs(&iterator, &mut sink)) == Ok(IteratorProgress::HasNext) {}
            assert_eq!(sink.pairs, expected);
        }
    }

    /// The versions of the tombstones, and of the keys that have expired.
    fn tombstones(&self) -> Vec<u64> {
        let mut versions = Vec::new();
        let mut sink = |entry: &ScanEntry<'_>| {
            versions.extend(entry.is_tombstone.then(|| entry.version.to_bits()));
            true
        };
        self.run(self.engine.scan(RingRange::FULL, Version::NONE, &mut sink)).expect("no fault");
        versions.sort_unstable();
        versions
    }

    /// The levels with tables, and the number of segments.
    fn shape(&self) -> (Vec<usize>, usize) {
        let version = self.engine.volume().version();
        let mut levels: Vec<usize> = (1..7).filter(|&level| !version.level(level).is_empty()).collect();
        levels.extend((!version.level0().is_empty()).then_some(0));
        levels.sort_unstable();
        (levels, version.segments().len())
    }
}

/// Tables of three levels, each of which has newer entries than the one below, value segments with live and dead values, tombstones,
/// versions and expiry times in tables and in the journal, a checkpoint, edits behind it, and a memtable's rest. No clean shutdown.
fn write_volume() -> Vec<u8> {
    let disk = PowerLossDisk::new(vec![0; DISK_BYTES], 512);
    run(&disk, fixture(NOW).format(Rc::new(disk.clone())));
    let volume = OpenVolume::open(disk, NOW);
    let flush = || volume.run(volume.engine.flush_memtables()).expect("no fault");
    let compact = || _ = volume.run(volume.engine.compact_once(false)).expect("no fault");
    // Of a tombstone that a later call forgets.
    volume.delete(150, 10);
    for (index, stored) in (0..48).zip([290, 400, 1_300].into_iter().cycle()) {
        volume.put(index, plain(index, stored));
    }
    for index in 60..64 {
        volume.put(index, versioned(index, 90 + 310 * (index as usize % 2), 31));
    }
    flush();
    volume.run(volume.engine.forget_below(Version::from_bits(20))).expect("no fault");
    volume.run(volume.engine.compact_all()).expect("no fault");
    for index in 0..12 {
        volume.put(index, plain(100 + index, 80));
    }
    flush();
    volume.put(64, expiring(64, 110, SOON));
    volume.put(65, expiring(65, 500, FAR));
    volume.put(66, (66, 120, Version::from_bits(40), FAR));
    flush();
    compact();
    volume.delete(63, 61);
    volume.delete(70, 50);
    for index in [20, 21, 22] {
        volume.delete(index, 0);
    }
    volume.put(12, plain(112, 600));
    flush();
    volume.run(volume.engine.checkpoint()).expect("no fault");
    for index in 80..84 {
        volume.put(index, plain(index, 130 + 300 * (index as usize % 2)));
    }
    flush();
    // What only the journal has.
    volume.put(90, plain(90, 70));
    volume.put(91, plain(91, 900));
    volume.put(92, versioned(92, 75, 90));
    volume.put(93, expiring(93, 76, SOON));
    volume.put(13, plain(113, 77));
    volume.delete(23, 0);
    volume.delete(71, 80);
    volume.run(volume.engine.mark_durable()).expect("no fault");
    // These are not known durable.
    volume.put(94, (94, 1_000, Version::from_bits(95), FAR));
    volume.delete(24, 0);
    while volume.disk.complete_one(&mut Prng::new(2)) {}
    volume.disk.contents()
}

/// What [`write_volume`] leaves.
fn contents_of_version_1() -> Contents {
    let first = (0..48_u64).zip([290, 400, 1_300].into_iter().cycle());
    let mut contents: Contents = first.map(|(index, bytes)| (index, plain(index, bytes))).collect();
    contents.extend((60..63).map(|index| (index, versioned(index, 90 + 310 * (index as usize % 2), 31))));
    contents.extend((0..12).map(|index| (index, plain(100 + index, 80))));
    contents.extend((80..84).map(|index| (index, plain(index, 130 + 300 * (index as usize % 2)))));
    contents.retain(|index, _| !(20..25).contains(index));
    contents.extend([
        (64, expiring(64, 110, SOON)),
        (65, expiring(65, 500, FAR)),
        (66, (66, 120, Version::from_bits(40), FAR)),
        (12, plain(112, 600)),
        (90, plain(90, 70)),
        (91, plain(91, 900)),
        (92, versioned(92, 75, 90)),
        (93, expiring(93, 76, SOON)),
        (13, plain(113, 77)),
        (94, (94, 1_000, Version::from_bits(95), FAR)),
    ]);
    contents
}

/// The structures of an image by their magic: superblocks, journal batches, images of the tree, descriptors of tables, records.
fn structures(image: &[u8]) -> [usize; 5] {
    [b"OCTO", b"OKVJ", b"OKVV", b"OKVT", b"KR\x02\x00"].map(|magic| {
        let magic = if magic[0] == b'K' { &magic[..3] } else { &magic[..] };
        image.chunks(512).filter(|unit| unit.starts_with(magic)).count()
    })
}

fn assert_is_volume_of_version_1(image: &[u8]) {
    assert_eq!((image[12], image[14]), (1, 2), "format and engine");
    let [superblocks, batches, images, tables, records] = structures(image);
    assert!(superblocks == 4 && images >= 2, "{superblocks} superblocks, {images} images");
    assert!(
        batches > 20 && tables > 8 && records > 10,
        "{batches} batches, {tables} tables, {records} records"
    );
    let report = verified(image);
    assert!(report.problems.is_empty() && !report.is_clean_shutdown, "{report:?}");
    assert_eq!((report.dropped_entries, report.damaged_copies), (0, 0));

    let mut contents = contents_of_version_1();
    let volume = OpenVolume::of(image, NOW);
    let (levels, segments) = volume.shape();
    assert!(levels.len() >= 3 && levels[0] == 0 && segments > 1, "levels {levels:?}, {segments} segments");
    volume.assert_has(&contents);
    assert_eq!(volume.tombstones(), [50, 61, 80], "below 20 they are forgotten");
    let later = OpenVolume::of(image, SOON);
    assert_eq!([64, 93].map(|index| later.get(index)), [None; 2]);
    assert_eq!(later.get(65), contents.get(&65).copied());
    assert_eq!([65, 66, 94].map(|index| OpenVolume::of(image, FAR).get(index)), [None; 3]);

    volume.run(volume.engine.compact_all()).expect("no fault");
    volume.assert_has(&contents);
    // No put of an older version replaces a key or a tombstone, in whatever part of the volume it was.
    for (index, newest) in [(60, 31), (63, 61), (66, 40), (70, 50), (71, 80), (92, 90), (94, 95)] {
        let refused = volume.put(index, versioned(200, 50, newest));
        assert_eq!(refused, PutOutcome::NotNewer(Version::from_bits(newest)), "key {index}");
    }
    for (index, stored) in [(0, plain(200, 2_000)), (63, versioned(201, 60, 62)), (100, plain(202, 70))] {
        assert_eq!(volume.put(index, stored), PutOutcome::Stored, "key {index}");
        contents.insert(index, stored);
    }
    assert_eq!(volume.delete(1, 0), DeleteOutcome::Deleted);
    assert_eq!(volume.delete(94, 96), DeleteOutcome::Deleted);
    contents.retain(|index, _| ![1, 94].contains(index));
    volume.assert_has(&contents);
    volume.run(volume.engine.close()).expect("no fault");
    let image = volume.disk.contents();
    assert_eq!((image[12], image[14]), (1, 2), "it stays what it is");
    let report = verified(&image);
    assert!(report.problems.is_empty() && report.is_clean_shutdown, "{report:?}");
    let volume = OpenVolume::of(&image, NOW);
    volume.assert_has(&contents);
    assert_eq!(volume.tombstones(), [50, 80, 96]);
}

#[test]
fn version_1_of_the_ordered_engine() {
    let compressed = std::fs::read(LSM_V1).expect("the fixture");
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
