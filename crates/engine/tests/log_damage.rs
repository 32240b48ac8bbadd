//! Damaged blocks of the log engine: a volume opens, no key has a wrong value, and verification names what is damaged.

use crate::common::log_fixture::{LogFixture, SmallLogVolume, log_volume};
use crate::common::pool;
use octokv_base::Prng;
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{EngineFixture, key_of, record_of, value_of};
use octokv_engine::volume::FORMAT_REGION_BYTES;
use octokv_engine::{Engine, EngineError, PutMode, PutOutcome, RecordProblem, VerifyReport, Volume};
use octokv_runtime::block_on;
use std::rc::Rc;

const KEYS: u64 = 150;
/// Of buckets of 512 bytes, whose entries have 24 bytes at least, and of the segment, whose other keys are unknown then.
const KEYS_PER_BLOCK_MAX: usize = 40;

/// Of a value in one place, with its head.
const BLOCKS_OF_A_RECORD: u64 = 4;
const CHUNK_BLOCKS: u64 = 32;

fn fixture() -> LogFixture {
    let mut fixture = LogFixture { cores: 1, disk_bytes: 4 << 20, ..LogFixture::default() };
    fixture.format.value_bytes_max = 40_000;
    fixture
}

fn value(key: u64) -> Vec<u8> {
    let bytes = if key.is_multiple_of(10) { 20_000 } else { 40 + 7 * key as usize };
    value_of(&key_of(key), key, bytes)
}

/// A volume with values in one place and in extents, closed.
fn closed_volume() -> DiskImage {
    let (disk, engines, mut random) = log_volume(&fixture(), 3);
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    for key in 0..KEYS {
        let (name, value) = (key_of(key), value(key));
        let record = record_of(engines[0].record_layout(), &name, &value);
        let put = block_on(engines[0].put(&name, PutMode::Upsert, record, value.len()), &mut complete);
        assert_eq!(put, Ok(PutOutcome::Stored));
    }
    block_on(engines[0].close(), &mut complete).expect("closes");
    disk.image()
}

fn device_of(image: DiskImage) -> (PowerLossDisk, Rc<dyn Device>) {
    let disk = PowerLossDisk::group(vec![image], 512).remove(0);
    (disk.clone(), Rc::new(disk))
}

fn verify(image: DiskImage) -> VerifyReport {
    let (disk, device) = device_of(image);
    let mut random = Prng::new(1);
    let mut ignore = |_: u64, _: u64| ();
    let verified = block_on(SmallLogVolume::verify(&[device], &pool(), &mut ignore), || {
        disk.complete_one(&mut random);
    });
    verified.expect("recovers")
}

/// The keys that cannot be read. Each other key has its value.
fn damaged_keys(image: DiskImage, context: &str) -> usize {
    let (disk, device) = device_of(image);
    let mut random = Prng::new(1);
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    let engine = block_on(fixture().open(device), &mut complete);
    let engine = engine.unwrap_or_else(|error| panic!("{context}: {error}"));
    let mut damaged = 0;
    for key in 0..KEYS {
        match block_on(engine.get(&key_of(key)), &mut complete) {
            Ok(Some(found)) => assert_eq!(found.as_bytes(), value(key), "{context}: key {key}"),
            Ok(None) => panic!("{context}: key {key} is missing"),
            Err(EngineError::Corrupt { .. }) => damaged += 1,
            Err(error) => panic!("{context}: key {key}: {error}"),
        }
    }
    damaged
}

#[test]
fn an_intact_volume_has_no_problems() {
    let image = closed_volume();
    let report = verify(image.clone());
    assert_eq!((report.keys, report.problems.len(), report.damaged_copies), (KEYS, 0, 0));
    assert_eq!(report.value_bytes, (0..KEYS).map(|key| value(key).len() as u64).sum::<u64>());
    assert!(report.is_clean_shutdown);
    assert_eq!(damaged_keys(image, "intact"), 0);
}

#[test]
fn a_flipped_bit_costs_the_keys_of_its_block_and_verification_finds_it() {
    let image = closed_volume();
    let mut region = vec![0; FORMAT_REGION_BYTES as usize];
    image.read(0, &mut region);
    let first_block = SmallLogVolume::device_layout(&region).expect("a superblock").records.start / 512;
    let (mut random, mut of_buckets, mut of_values) = (Prng::new(9), 0, 0);
    for block in 0..image.len() / 512 {
        let mut bytes = [0; 512];
        image.read(block * 512, &mut bytes);
        if bytes == [0; 512] {
            continue;
        }
        let at = random.below(512) as usize;
        bytes[at] ^= 1 << random.below(8);
        let mut damaged_image = image.clone();
        damaged_image.write(block * 512, &bytes);
        let context = format!("block {block}");
        let damaged = damaged_keys(damaged_image.clone(), &context);
        assert!(damaged <= KEYS_PER_BLOCK_MAX, "{context} costs {damaged} keys");
        match damaged {
            0 => continue,
            1 => of_values += 1,
            _ => of_buckets += 1,
        }
        let report = verify(damaged_image);
        assert!(!report.problems.is_empty(), "{context}: {damaged} keys are damaged");
        let has_block = |problem: &RecordProblem| {
            let (lba, block) = (problem.lba, block as u64);
            // A record that reaches the end of its chunk goes on in another one.
            let is_in_extents = (lba - first_block) % CHUNK_BLOCKS + BLOCKS_OF_A_RECORD > CHUNK_BLOCKS;
            let is_long = (0..KEYS).step_by(10).any(|long| problem.key.as_ref() == Some(&key_of(long)));
            (lba..lba + BLOCKS_OF_A_RECORD).contains(&block) || is_in_extents || is_long
        };
        assert!(report.problems.iter().any(has_block), "{context}: {:?}", report.problems);
    }
    assert!(of_buckets > 20 && of_values > 300, "{of_buckets} buckets and {of_values} values were damaged");
}
