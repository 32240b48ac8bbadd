//! Failed writes of keys that are swapped, most of them with versions: merges, deletes, repetitions and openings behind them lose no acknowledged value.

use crate::common::faulty_volume::run;
use crate::common::opened_span::{Devices, KEYS, Opened, SUPERBLOCKS_END, blank, filled};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use crate::common::swapped_volume::{ENGINES, keys_at, swaps};
use crate::common::traced_memory::poll_once;
use octokv_base::{Key, Lba, Version};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{key_of, record_of, value_of};
use octokv_engine::{
    AnyVolume, DeleteOutcome, Engine, EngineError, EngineKind, PutMode, PutOptions, PutOutcome, PutValue,
};
use std::pin::Pin;
use std::rc::Rc;

const HOME: usize = 1;
const EIO: InjectedFault = InjectedFault::Error(5);

/// A volume on three devices with regions, whose devices fail by plans.
struct Failing {
    fixture: SpannedFixture,
    devices: Devices,
    opened: Opened,
    /// Of the home of `key`.
    home: FaultPlan,
    /// Of the other devices, one of which gets the swapped puts of `key`.
    others: FaultPlan,
    key: u64,
}

impl Failing {
    fn new(engine: EngineKind) -> Failing {
        let fixture = SpannedFixture::swapping(engine);
        let intact = filled(&fixture, 3);
        let (home, others) = (FaultPlan::default(), FaultPlan::default());
        let plan = |at: usize| if at == HOME { home.clone() } else { others.clone() };
        let device = |at: usize| Rc::new(FaultDevice::new(Rc::clone(&intact[at]), plan(at))) as Rc<_>;
        let devices: Devices = (0..3).map(device).collect();
        let opened = Opened::new(&fixture, &devices).expect("opens");
        let key = keys_at(engine, HOME)[0];
        Failing { fixture, devices, opened, home, others, key }
    }

    /// Stores operation number `operation` of the key.
    fn put(&self, operation: u64, mode: PutMode, version: u64) -> Result<PutOutcome, EngineError> {
        let key = key_of(self.key);
        let value = value_of(&key, operation * KEYS + self.key, 100);
        let record = record_of(self.opened.engine.record_layout(), &key, &value);
        let options = PutOptions { mode, version: Version::from_bits(version), ..PutOptions::default() };
        run(self.opened.engine.put_with(&key, PutValue::new(record, value.len()), options))
    }

    /// The operation that stored the value of the key.
    fn found(&self) -> Result<Option<u64>, EngineError> {
        Ok(self.opened.found(self.key)?.map(|operation| operation / KEYS))
    }

    fn reopen(&mut self) {
        self.home.clear();
        self.others.clear();
        self.opened = Opened::new(&self.fixture, &self.devices).expect("opens");
    }

    /// Something in flight at home, so that the key stays swapped while it is not dropped.
    fn keep_busy(&self) -> Pin<Box<dyn Future<Output = ()> + '_>> {
        let other = key_of(keys_at(self.fixture.format.engine, HOME)[1]);
        let mut reading: Pin<Box<dyn Future<Output = ()>>> = Box::pin(async move {
            let _ = self.opened.engine.get(&other).await;
        });
        self.home.add(FaultRule::always(OpFilter::Read, InjectedFault::Hang).once(0));
        assert!(poll_once(&mut reading.as_mut()).is_none(), "it reads the device");
        reading
    }

    /// Merges the key, whose value stays.
    fn merge(&self, operation: u64) {
        assert_eq!(self.put(0, PutMode::AddOnly, 0), Ok(PutOutcome::Exists));
        assert_eq!(swaps(&self.opened.volume).keys, 0);
        assert_eq!(self.found(), Ok(Some(operation)), "behind the merge");
    }

    /// The key has version 1 at home and a swapped value of version 2, which its home also has: its removal from the region failed. Returns the device of the region.
    fn merged_in_part(&mut self) -> usize {
        assert_eq!(self.put(1, PutMode::UpdateOnly, 1), Ok(PutOutcome::Stored));
        assert_eq!(self.put(2, PutMode::Upsert, 2), Ok(PutOutcome::Stored));
        assert_eq!(swaps(&self.opened.volume).keys, 1);
        let AnyVolume::Spanned(volume) = &self.opened.volume else { panic!("it spans devices") };
        let guest = volume.place_of_newest(&key_of(self.key));
        assert_ne!(guest, HOME);
        self.others.add(FaultRule::always(OpFilter::Write, EIO));
        assert!(self.put(0, PutMode::AddOnly, 0).is_err());
        self.others.clear();
        guest
    }

    fn replace(&self, lost: usize) -> bool {
        let mut devices = self.devices.clone();
        devices[lost] = blank(1).remove(0);
        let configs = (&self.fixture.open_config(), &self.fixture.format);
        let replaced = run(self.opened.volume.replace((&devices, lost, true), &pool(), configs, |_| {}));
        if replaced.is_ok() {
            self.opened.volume.renew_engine(&self.opened.engine, lost, (0, &devices[lost], &pool()));
        }
        replaced.is_ok()
    }
}

#[test]
fn a_swapped_put_behind_one_that_failed_at_home_stays_the_newest() {
    for engine in ENGINES {
        let mut failing = Failing::new(engine);
        assert_eq!(failing.put(1, PutMode::UpdateOnly, 1), Ok(PutOutcome::Stored));
        // It is on the device, which takes no more puts.
        failing.home.add(FaultRule::always(OpFilter::Flush, EIO).once(0));
        assert!(failing.put(2, PutMode::UpdateOnly, 2).is_err());
        assert_eq!(failing.put(3, PutMode::Upsert, 3), Ok(PutOutcome::Stored));
        failing.reopen();
        assert_eq!(failing.found(), Ok(Some(3)), "{engine}");
        failing.merge(3);
    }
}

#[test]
fn a_swapped_put_without_a_version_stays_the_newest_too() {
    for engine in ENGINES {
        let mut failing = Failing::new(engine);
        failing.home.add(FaultRule::always(OpFilter::Flush, EIO).once(0));
        assert!(failing.put(1, PutMode::UpdateOnly, 2).is_err());
        assert_eq!(failing.put(2, PutMode::Upsert, 0), Ok(PutOutcome::Stored));
        failing.reopen();
        assert_eq!(failing.found(), Ok(Some(2)), "{engine}");
        failing.merge(2);
    }
}

#[test]
fn a_swapped_put_behind_a_merge_that_ended_in_part_stays_the_newest() {
    for engine in ENGINES {
        let mut failing = Failing::new(engine);
        failing.merged_in_part();
        failing.reopen();
        assert_eq!(failing.found(), Ok(Some(2)), "{engine}");
        let busy = failing.keep_busy();
        assert_eq!(failing.put(3, PutMode::Upsert, 3), Ok(PutOutcome::Stored));
        drop(busy);
        assert_eq!(swaps(&failing.opened.volume).keys, 1, "{engine}");
        failing.merge(3);
    }
}

#[test]
fn a_merge_that_ended_in_part_can_be_repeated() {
    for engine in ENGINES {
        let mut failing = Failing::new(engine);
        failing.merged_in_part();
        failing.reopen();
        failing.merge(2);
    }
}

#[test]
fn a_put_without_a_version_of_a_key_with_one_is_stored_at_home() {
    for engine in ENGINES {
        let failing = Failing::new(engine);
        assert_eq!(failing.put(1, PutMode::UpdateOnly, 5), Ok(PutOutcome::Stored));
        assert_eq!(failing.put(2, PutMode::Upsert, 0), Ok(PutOutcome::Stored));
        assert_eq!((swaps(&failing.opened.volume).keys, failing.found()), (0, Ok(Some(2))), "{engine}");
        assert_eq!(failing.put(3, PutMode::Upsert, 6), Ok(PutOutcome::Stored));
        assert_eq!((swaps(&failing.opened.volume).keys, failing.found()), (1, Ok(Some(3))), "{engine}");
        assert_eq!(failing.put(4, PutMode::Upsert, 0), Ok(PutOutcome::Stored));
        assert_eq!((swaps(&failing.opened.volume).keys, failing.found()), (0, Ok(Some(4))), "{engine}");
        assert_eq!(failing.put(5, PutMode::Upsert, 6), Ok(PutOutcome::NotNewer(Version::from_bits(6))));
    }
}

#[test]
fn a_key_that_a_replacement_without_a_record_has_deleted_at_home_is_back_with_its_region() {
    for engine in ENGINES {
        let mut failing = Failing::new(engine);
        let guest = failing.merged_in_part();
        failing.reopen();
        // Nothing notes the replacement, which has deleted the key at its home.
        let writes = FaultRule::within(OpFilter::Write, Lba(0), SUPERBLOCKS_END, EIO);
        failing.home.add(writes);
        failing.others.add(writes);
        assert!(!failing.replace(guest), "{engine}");
        failing.reopen();
        assert_eq!(failing.found(), Ok(Some(2)), "{engine}");
    }
}

#[test]
fn a_merged_value_is_not_lost_with_the_region_that_it_could_not_be_removed_from() {
    for engine in ENGINES {
        let mut failing = Failing::new(engine);
        let guest = failing.merged_in_part();
        assert!(failing.replace(guest), "{engine}");
        assert_eq!(failing.found(), Ok(Some(2)), "{engine}");
    }
}

#[test]
fn a_swapped_put_that_failed_can_be_repeated_with_its_version() {
    for engine in ENGINES {
        let failing = Failing::new(engine);
        assert_eq!(failing.put(1, PutMode::UpdateOnly, 1), Ok(PutOutcome::Stored));
        assert_eq!(failing.put(2, PutMode::Upsert, 2), Ok(PutOutcome::Stored));
        let _busy = failing.keep_busy();
        failing.others.add(FaultRule::always(OpFilter::Write, EIO).once(0));
        assert!(failing.put(3, PutMode::Upsert, 3).is_err(), "{engine}");
        assert_eq!(failing.found(), Ok(Some(2)), "{engine}");
        assert_eq!(failing.put(4, PutMode::Upsert, 3), Ok(PutOutcome::Stored), "{engine}");
        assert_eq!((swaps(&failing.opened.volume).keys, failing.found()), (1, Ok(Some(4))), "{engine}");
    }
}

#[test]
fn a_full_home_deletes_a_key_that_it_has_of_an_earlier_merge() {
    for (engine, version) in ENGINES.into_iter().flat_map(|engine| [(engine, 0), (engine, 2), (engine, 7)]) {
        let mut failing = Failing::new(engine);
        failing.merged_in_part();
        failing.reopen();
        for bytes in [20_000, 1_000, 100] {
            let mut refused = 0;
            for number in 0.. {
                let key = Key::new(format!("{bytes} {number}").as_bytes()).expect("it is short enough");
                let record = record_of(failing.opened.engine.record_layout(), &key, &vec![0; bytes]);
                let put = run(failing.opened.engine.put(&key, PutMode::AddOnly, record, bytes));
                refused += u32::from(put.expect("no fault") == PutOutcome::Full);
                if refused == 60 {
                    break;
                }
            }
        }
        let delete =
            || run(failing.opened.engine.delete_with(&key_of(failing.key), Version::from_bits(version)));
        let newer = version != 2;
        let wanted = match newer {
            true => DeleteOutcome::Deleted,
            false => DeleteOutcome::NotNewer(Version::from_bits(2)),
        };
        assert_eq!(delete(), Ok(wanted), "{engine}: version {version}");
        assert_eq!(failing.found(), Ok((!newer).then_some(2)), "{engine}: version {version}");
        let again = DeleteOutcome::NotNewer(Version::from_bits(version));
        assert!(version != 7 || delete() == Ok(again), "{engine}: the tombstone has its version");
    }
}
