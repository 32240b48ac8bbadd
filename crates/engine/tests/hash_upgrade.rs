//! Upgrades of volumes of format 1, also with a power loss at every write and flush.

use crate::common::{HashFixture, pool};
use octokv_base::{Prng, Version};
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::power_loss::{DiskHistory, PowerLossDisk, PowerLossMode};
use octokv_engine::conformance::{EngineFixture, key_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, HashVolume};
use octokv_engine::volume_suite::{FoundValues, VolumeSuite, read_all};
use octokv_engine::{
    Capability, DeleteOutcome, Engine, EngineError, FormatVersions, OpenError, PutOptions, PutOutcome,
    PutValue, Volume,
};
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

fn fixture() -> HashFixture {
    let mut fixture = HashFixture::default();
    (fixture.format.version, fixture.format.unit_bytes) = (1, Some(512));
    fixture.format.value_bytes_max = 64 << 10;
    fixture
}

/// A volume of format 1 with keys, a checkpoint, and changes after it.
fn volume_of_format_1() -> DiskImage {
    let fixture = fixture();
    let mut suite: VolumeSuite<Arc<HashVolume>> =
        VolumeSuite::new(fixture.format, fixture.open_config(), vec![1 << 20], 512);
    suite.background =
        |engine: Rc<HashEngine>| Box::pin(async move { engine.checkpoint(false).await.expect("no fault") });
    let (disks, _) = suite.run_traced(3, 300);
    disks[0].image()
}

fn open(image: DiskImage) -> (PowerLossDisk, HashEngine) {
    let (disk, mut random) = (PowerLossDisk::new(image, 512), Prng::new(1));
    let engine = block_on(fixture().open(Rc::new(disk.clone())), || {
        disk.complete_one(&mut random);
    });
    (disk, engine.expect("opens"))
}

fn values(image: DiskImage) -> FoundValues {
    let (disk, engine) = open(image);
    read_all(&disk, &engine)
}

fn upgrade(disk: &PowerLossDisk) -> Result<FormatVersions, OpenError> {
    let (device, mut random): (Rc<dyn Device>, _) = (Rc::new(disk.clone()), Prng::new(2));
    block_on(<Arc<HashVolume>>::upgrade(&[device], &pool()), || {
        disk.complete_one(&mut random);
    })
}

/// A put with a version, of a value of 100 bytes.
fn versioned_put(disk: &PowerLossDisk, engine: &HashEngine, number: u64) -> Result<PutOutcome, EngineError> {
    let (key, mut random) = (key_of(1), Prng::new(3));
    let record = record_of(engine.record_layout(), &key, &value_of(&key, number, 100));
    let options = PutOptions { version: Version::from_bits(number), ..PutOptions::default() };
    block_on(engine.put_with(&key, PutValue::new(record, 100), options), || {
        disk.complete_one(&mut random);
    })
}

#[test]
fn an_upgraded_volume_has_its_values_and_takes_versions() {
    let before = volume_of_format_1();
    let want = values(before.clone());
    assert!(want.iter().filter(|found| matches!(found, Ok(Some(_)))).count() > 8, "{want:?}");
    let disk = PowerLossDisk::new(before.clone(), 512);
    assert_eq!(upgrade(&disk), Ok(FormatVersions { before: 1, after: 2 }));
    assert_eq!(upgrade(&disk), Ok(FormatVersions { before: 2, after: 2 }), "once is enough");
    assert_eq!(values(disk.image()), want);

    let (old_disk, old) = open(before);
    let lacking = EngineError::Unsupported(Capability::Versions);
    assert_eq!(versioned_put(&old_disk, &old, 900), Err(lacking), "format 1 is used as it is");
    let (disk, engine) = open(disk.image());
    assert_eq!(versioned_put(&disk, &engine, 900), Ok(PutOutcome::Stored));
    assert_eq!(versioned_put(&disk, &engine, 900), Ok(PutOutcome::NotNewer(Version::from_bits(900))));
    let mut random = Prng::new(4);
    let mut complete = || {
        disk.complete_one(&mut random);
    };
    let deleted = block_on(engine.delete_with(&key_of(2), Version::from_bits(901)), &mut complete);
    assert!(matches!(deleted, Ok(DeleteOutcome::Deleted | DeleteOutcome::NotFound)), "{deleted:?}");
    block_on(engine.mark_durable(), &mut complete).expect("no fault");
    drop(engine);
    let (disk, engine) = open(disk.image());
    let found = read_all(&disk, &engine);
    assert_eq!((found[1], found[2]), (Ok(Some(900)), Ok(None)));
    assert_eq!(found[3..], want[3..]);
    assert_eq!(versioned_put(&disk, &engine, 899), Ok(PutOutcome::NotNewer(Version::from_bits(900))));
}

#[test]
fn a_power_loss_at_any_write_or_flush_of_an_upgrade_loses_nothing() {
    let before = volume_of_format_1();
    let want = values(before.clone());
    let disk = PowerLossDisk::new(before, 512);
    upgrade(&disk).expect("no fault");
    let (mut history, mut random) = (DiskHistory::of(&disk), Prng::new(5));
    let mut of_format = [0; 2];
    assert!(disk.events() > 12, "{} events", disk.events());
    for events in 0..=disk.events() {
        history.advance(events);
        for mode in PowerLossMode::ALL {
            let image = history.images(mode, &mut random).remove(0);
            assert_eq!(values(image.clone()), want, "{events}, {mode:?}");
            // And then again.
            let again = PowerLossDisk::new(image, 512);
            let versions = upgrade(&again).expect("no fault");
            of_format[usize::from(versions.before) - 1] += 1;
            assert_eq!((versions.after, values(again.image())), (2, want.clone()), "{events}, {mode:?}");
        }
    }
    assert!(of_format.iter().all(|&count| count > 4), "{of_format:?}");
}

#[test]
fn a_damaged_volume_is_not_upgraded_and_left_as_it_is() {
    let mut image = volume_of_format_1();
    for at in 0..1 << 14 {
        image.write(at, &[0x55]);
    }
    let disk = PowerLossDisk::new(image.clone(), 512);
    assert!(matches!(upgrade(&disk), Err(OpenError::Superblock(_))));
    assert_eq!(disk.events(), 0);
}
