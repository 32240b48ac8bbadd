//! Replacement of a lost device of a volume on several: contents afterwards, the old device at a later open, and power loss during the
//! replacement.

use crate::common::faulty_volume::run;
use crate::common::opened_span::{Devices, KEYS, Opened, blank, contents_of, filled};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use octokv_base::{Buffer, Lba, Prng};
use octokv_device::Device;
use octokv_device::disk_image::DiskImage;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::power_loss::{PowerLossDisk, PowerLossMode};
use octokv_device::unavailable::UnavailableDevice;
use octokv_engine::conformance::key_of;
use octokv_engine::{
    AnyEngine, AnyIterator, AnyVolume, DeviceReport, Engine, EngineError, EngineKind, HashKind,
    IteratorOptions, OpenError, PairSink, PutOutcome, Volume,
};
use octokv_runtime::block_on;
use std::rc::Rc;

/// The blocks of a megabyte.
const BLOCKS: usize = (1 << 20) / 512;

fn gone() -> Rc<dyn Device> {
    Rc::new(UnavailableDevice::new("gone".to_owned()))
}

/// The devices with another one in a place.
fn with(devices: &[Rc<dyn Device>], at: usize, device: Rc<dyn Device>) -> Devices {
    let mut devices = devices.to_vec();
    devices[at] = device;
    devices
}

/// Replaces the device `at` of an open volume, as a node does.
fn replace(
    fixture: &SpannedFixture,
    opened: &Opened,
    devices: &[Rc<dyn Device>],
    at: usize,
) -> Result<(), OpenError> {
    let configs = (&fixture.open_config(), &fixture.format);
    run(opened.volume.replace((devices, at, true), &pool(), configs, |_| {}))?;
    opened.volume.renew_engine(&opened.engine, at, (0, &devices[at], &pool()));
    Ok(())
}

/// The place in the list of a device that was replaced.
fn replaced_at(opened: &Opened) -> Option<usize> {
    let is_replaced =
        |report: &DeviceReport| matches!(report.failure, Some(OpenError::DeviceReplaced { .. }));
    opened.volume.device_reports().iter().position(is_replaced)
}

/// The keys that are found, each with the operation that stored it, which is its number plus a multiple of [`KEYS`].
fn found(opened: &Opened) -> Vec<u64> {
    let is_found = |&number: &u64| match opened.found(number) {
        Ok(Some(operation)) => {
            assert_eq!(operation % KEYS, number);
            true
        }
        Ok(None) => false,
        Err(error) => panic!("{error}"),
    };
    (0..KEYS).filter(is_found).collect()
}

#[test]
fn a_replaced_device_begins_without_keys_and_the_others_keep_theirs() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        for lost in 0..3 {
            let devices = filled(&fixture, 3);
            let opened = Opened::new(&fixture, &with(&devices, lost, gone())).expect("the others open");
            let served: Vec<u64> = (0..KEYS).filter(|&number| opened.found(number).is_ok()).collect();
            assert!(served.len() > 30 && served.len() < 75, "{engine}: {} are served", served.len());
            let new = with(&devices, lost, blank(1).remove(0));
            replace(&fixture, &opened, &new, lost).expect("replaces");
            assert_eq!(found(&opened), served, "{engine}: what the others have");
            assert_eq!(opened.listed(), Ok(served.len()), "{engine}");
            let reports = opened.volume.device_reports();
            assert!(reports.iter().all(|report| report.failure.is_none()), "{engine}");
            for number in 0..KEYS {
                assert_eq!(opened.put(number, number + KEYS), Ok(PutOutcome::Stored), "{engine}");
            }
            if engine != EngineKind::Lsm {
                // It estimates them.
                assert_eq!(opened.volume.statistics().keys, KEYS, "{engine}");
            }
            run(opened.engine.close()).expect("closes");
            // The volume is one with the new device, and not with the old one, whatever the order.
            let mut shuffled = new.clone();
            shuffled.rotate_left(1);
            let opened = Opened::new(&fixture, &shuffled).expect("opens");
            assert!((0..KEYS).all(|number| opened.found(number) == Ok(Some(number + KEYS))), "{engine}");
            run(opened.engine.close()).expect("closes");
            let opened = Opened::new(&fixture, &devices).expect("the others open");
            assert_eq!(replaced_at(&opened), Some(lost), "{engine}");
            // That the volume has a newer one is known, whatever the list says: it is not formatted again.
            replace(&fixture, &opened, &new, lost).expect("adopts");
            assert!((0..KEYS).all(|number| opened.found(number) == Ok(Some(number + KEYS))), "{engine}");
        }
    }
}

#[derive(Default)]
struct Pairs(Vec<Vec<u8>>);

impl PairSink for Pairs {
    fn has_space(&mut self, _: usize, _: usize) -> bool {
        self.0.len() < 3
    }
    fn push(&mut self, key: &[u8], _: &[u8]) {
        self.0.push(key.to_vec());
    }
}

#[test]
fn an_iterator_fails_when_a_device_of_its_snapshot_is_replaced() {
    let fixture = SpannedFixture::new(EngineKind::Lsm);
    let devices = filled(&fixture, 3);
    let opened = Opened::new(&fixture, &devices).expect("opens");
    let create = || -> AnyIterator {
        run(opened.engine.create_iterator(IteratorOptions::default())).expect("creates").expect("it has some")
    };
    let before = create();
    assert!(run(opened.engine.next_pairs(&before, &mut Pairs::default())).is_ok());
    let new = with(&devices, 1, blank(1).remove(0));
    replace(&fixture, &opened, &new, 1).expect("replaces");
    for _ in 0..2 {
        let error = run(opened.engine.next_pairs(&before, &mut Pairs::default())).expect_err("it is lost");
        assert!(matches!(error, EngineError::Device { place, .. } if place.device() == 1), "{error}");
    }
    assert!(run(opened.engine.seek_iterator(&before, &key_of(1))).is_err());
    let after = create();
    let mut pairs = Pairs::default();
    run(opened.engine.next_pairs(&after, &mut pairs)).expect("iterates");
    assert_eq!(pairs.0.len(), 3);
}

#[test]
fn a_device_is_known_as_replaced_whichever_of_the_others_is_left() {
    let fixture = SpannedFixture::new(EngineKind::Log);
    let devices = filled(&fixture, 3);
    // Device 2 is away while device 1 is replaced.
    let first = [Rc::clone(&devices[0]), blank(1).remove(0), gone()];
    let opened = Opened::new(&fixture, &with(&first, 1, gone())).expect("the others open");
    replace(&fixture, &opened, &first, 1).expect("replaces");
    run(opened.engine.close()).expect("closes");
    // It comes back, and gets the count.
    let whole = with(&first, 2, Rc::clone(&devices[2]));
    run(Opened::new(&fixture, &whole).expect("opens").engine.close()).expect("closes");
    let refused = |given: Devices, at: usize| {
        assert_eq!(replaced_at(&Opened::new(&fixture, &given).expect("the others open")), Some(at));
    };
    refused(vec![gone(), Rc::clone(&devices[1]), Rc::clone(&devices[2])], 1);
    refused(vec![Rc::clone(&devices[2]), Rc::clone(&devices[0]), Rc::clone(&devices[1])], 2);
    // A second replacement: neither of the two before is one of the volume.
    let opened = Opened::new(&fixture, &with(&whole, 1, gone())).expect("the others open");
    let second = with(&whole, 1, blank(1).remove(0));
    replace(&fixture, &opened, &second, 1).expect("replaces");
    refused(with(&second, 1, Rc::clone(&devices[1])), 1);
    refused(with(&second, 1, Rc::clone(&whole[1])), 1);
    assert!(Opened::new(&fixture, &second).is_ok());
}

#[test]
fn a_volume_on_one_device_and_a_format_that_differs_are_refused() {
    let mut fixture = SpannedFixture::new(EngineKind::Hash);
    let devices = filled(&fixture, 3);
    let opened = Opened::new(&fixture, &with(&devices, 0, gone())).expect("the others open");
    fixture.format.value_bytes_max = 50_000;
    let new = with(&devices, 0, blank(1).remove(0));
    assert_eq!(replace(&fixture, &opened, &new, 0), Err(OpenError::OtherFormat));
    // Nothing was counted: the lost device may come back.
    fixture.format.value_bytes_max = 100_000;
    fixture.format.hash = HashKind::Sha1;
    assert_eq!(replace(&fixture, &opened, &new, 0), Err(OpenError::SpanHash));
    fixture.format.hash = HashKind::Xxh3;
    let opened = Opened::new(&fixture, &devices).expect("opens");
    assert_eq!(found(&opened).len() as u64, KEYS);
    // Without any other that serves, it would be forgotten.
    let plan = FaultPlan::default();
    let others_fail =
        |at: usize| -> Rc<dyn Device> { Rc::new(FaultDevice::new(Rc::clone(&devices[at]), plan.clone())) };
    let failing = [gone(), others_fail(1), others_fail(2)];
    let opened = Opened::new(&fixture, &failing).expect("the others open");
    plan.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(5)));
    let new = with(&failing, 0, blank(1).remove(0));
    assert_eq!(replace(&fixture, &opened, &new, 0), Err(OpenError::NotCounted));
    let alone = blank(1);
    run(AnyVolume::format(&alone, &fixture.format)).expect("formats");
    let opened = Opened::new(&fixture, &alone).expect("opens");
    assert_eq!(replace(&fixture, &opened, &alone, 0), Err(OpenError::NotSpanned));
}

fn device_of(contents: &[u8]) -> Rc<dyn Device> {
    let device = blank(1).remove(0);
    for (bytes, at) in contents.chunks(1 << 20).zip((0..).step_by(BLOCKS)) {
        let mut buffer = Buffer::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        run(device.write(Lba(at), buffer)).result.expect("memory");
    }
    device
}

#[test]
fn a_loss_of_power_leaves_the_old_device_or_the_new_one_and_never_both() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let filled: Vec<Vec<u8>> = filled(&fixture, 3).iter().map(contents_of).collect();
        let images = [0, 1, 2].map(|at| if at == 1 { vec![0; filled[1].len()] } else { filled[at].clone() });
        let disks = PowerLossDisk::group(images.map(DiskImage::from).into(), 512);
        let devices: Devices = disks.iter().map(|disk| Rc::new(disk.clone()) as Rc<dyn Device>).collect();
        let mut random = Prng::new(7);
        let mut complete = || {
            disks[0].complete_one(&mut random);
        };
        let opened = block_on(fixture.open_volume(&with(&devices, 1, gone())), &mut complete).expect("opens");
        let (begun, pool) = (disks[0].events(), pool());
        let configs = (&fixture.open_config(), &fixture.format);
        block_on(opened.replace((&devices, 1, true), &pool, configs, |_| {}), &mut complete)
            .expect("replaces");
        // Power is lost at few events of the format, and at each of the writes of superblocks behind it.
        let last = disks[0].events();
        let format_events = (begun..last - 16).step_by(17);
        let (mut as_before, mut between, mut replaced) = (0, 0, 0);
        for (events, mode) in
            format_events.chain(last - 16..=last).flat_map(|at| PowerLossMode::ALL.map(|mode| (at, mode)))
        {
            let left = disks
                .iter()
                .map(|disk| {
                    let image = disk.image_after_power_loss(events, mode, &mut Prng::new(events as u64));
                    device_of(&image.to_vec())
                })
                .collect::<Devices>();
            let open = |of_one: Rc<dyn Device>| {
                let devices = vec![Rc::clone(&left[0]), of_one, Rc::clone(&left[2])];
                Opened::new(&fixture, &devices).map(|opened| (opened, devices))
            };
            let (new, old) = (open(Rc::clone(&left[1])), open(device_of(&filled[1])));
            let (old, devices) = old.expect("the others open");
            match (new, replaced_at(&old)) {
                (Ok((opened, _)), Some(1)) => {
                    replaced += 1;
                    assert!((30..75).contains(&found(&opened).len()), "{engine}: at {events}");
                }
                (Err(_), None) => {
                    as_before += 1;
                    assert_eq!(found(&old).len() as u64, KEYS, "{engine}: at {events}");
                }
                (Err(_), Some(1)) => {
                    between += 1;
                    replace(&fixture, &old, &with(&devices, 1, blank(1).remove(0)), 1).expect("again");
                    assert!((30..75).contains(&found(&old).len()), "{engine}: at {events}");
                }
                (_, at) => panic!("{engine}: at {events} both are of the volume: {at:?}"),
            }
        }
        assert!(
            as_before > 5 && between > 3 && replaced > 1,
            "{engine}: {as_before} as before, {between} between, {replaced} replaced"
        );
    }
}

#[test]
fn a_core_without_the_new_handle_serves_the_lost_device_no_more() {
    for engine in EngineKind::ALL {
        let fixture = SpannedFixture::new(engine);
        let devices = filled(&fixture, 3);
        let opened = Opened::new(&fixture, &devices).expect("opens");
        let other_core = opened.volume.engine(1, &devices, pool());
        let owners = |engine: &AnyEngine| -> Vec<_> {
            (0..KEYS).map(|number| engine.owner_core(&key_of(number))).collect()
        };
        let before = owners(&other_core);
        // A device that only refuses writes is replaced while it could be read.
        let larger =
            octokv_device::MemoryDevice::new(octokv_device::RamDisk::new(40 << 20, 512).expect("memory"));
        let new = with(&devices, 1, Rc::new(larger));
        replace(&fixture, &opened, &new, 1).expect("replaces");
        let mut lost = 0;
        for number in 0..KEYS {
            match (opened.found(number), run(other_core.get(&key_of(number)))) {
                (Ok(Some(_)), Ok(Some(_))) => {}
                (Ok(None), Err(EngineError::Device { place, .. })) => {
                    assert_eq!(place.device(), 1, "{engine}");
                    lost += 1;
                }
                (one, other) => {
                    panic!("{engine}: key {number} has {one:?}, on the other core {:?}", other.map(|_| ()))
                }
            }
        }
        assert!(lost > 15, "{engine}: {lost} keys");
        assert_eq!((owners(&other_core), owners(&opened.engine)), (before.clone(), before), "{engine}");
        opened.volume.renew_engine(&other_core, 1, (1, &new[1], &pool()));
        assert!((0..KEYS).all(|number| run(other_core.get(&key_of(number))).is_ok()), "{engine}");
    }
}
