//! The queues of a volume on several devices: commands that wait for a device's tokens, and devices that hang, fail or are replaced meanwhile.

use crate::common::faulty_volume::run;
use crate::common::opened_span::{Devices, KEYS, Opened, blank, filled};
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use futures_util::FutureExt;
use futures_util::future::LocalBoxFuture;
use octokv_base::{Key, Nanos};
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_device::supervised::DeviceSupervision;
use octokv_device::{Device, DeviceError};
use octokv_engine::conformance::key_of;
use octokv_engine::{AnyVolume, DeviceQueue, Engine, EngineError, EngineKind, SpannedVolume, StoredValue};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle};
use octokv_sched::StartingCosts;
use std::rc::Rc;
use std::sync::Arc;

/// The Gets that a device first has tokens for.
const GETS: usize = 32;

type GetFuture<'a> = LocalBoxFuture<'a, Result<Option<StoredValue>, EngineError>>;

fn fixture() -> SpannedFixture {
    SpannedFixture { tokens: Some(StartingCosts::default()), ..SpannedFixture::new(EngineKind::Hash) }
}

/// A volume, its devices and the keys of the device 1, whose reads hang.
struct HangingDevice {
    opened: Opened,
    devices: Devices,
    keys: Vec<Key>,
}

impl HangingDevice {
    fn new(
        fixture: &SpannedFixture,
        supervise: impl FnOnce(Rc<dyn Device>) -> Rc<dyn Device>,
    ) -> HangingDevice {
        let (plan, mut devices) = (FaultPlan::default(), filled(fixture, 3));
        devices[1] = supervise(Rc::new(FaultDevice::new(Rc::clone(&devices[1]), plan.clone())));
        let opened = Opened::new(fixture, &devices).expect("opens");
        plan.add(FaultRule::always(OpFilter::Read, InjectedFault::Hang));
        let is_of_device = |key: &Key| spanned(&opened).place_of(key) == 1;
        let keys: Vec<Key> = (0..KEYS).map(key_of).filter(is_of_device).collect();
        HangingDevice { opened, devices, keys }
    }

    fn queue(&self) -> Arc<DeviceQueue> {
        Arc::clone(&spanned(&self.opened).device_queues()[1])
    }

    /// So many Gets of keys of the device, which do not end.
    fn begin(&self, count: usize) -> Vec<GetFuture<'_>> {
        let keys = self.keys.iter().cycle().take(count);
        let mut gets: Vec<_> = keys.map(|key| self.opened.engine.get(key).boxed_local()).collect();
        assert!(gets.iter_mut().all(|get| get.now_or_never().is_none()), "the device hangs");
        gets
    }
}

fn spanned(opened: &Opened) -> &SpannedVolume<AnyVolume> {
    let AnyVolume::Spanned(volume) = &opened.volume else { panic!("it spans devices") };
    volume
}

fn is_unavailable(outcome: Option<Result<Option<StoredValue>, EngineError>>) -> bool {
    matches!(outcome, Some(Err(EngineError::Device { error: DeviceError::Unavailable, place })) if place.device() == 1)
}

#[test]
fn a_device_that_hangs_bounds_what_it_gets_and_holds_up_no_other() {
    let fixture = fixture();
    let hanging = HangingDevice::new(&fixture, |device| device);
    let gets = hanging.begin(GETS + 8);
    assert_eq!((hanging.queue().free_tokens(), hanging.queue().occupancy()), (0, 1.25));
    for key in (0..KEYS).map(key_of).filter(|key| !hanging.keys.contains(key)) {
        assert!(matches!(run(hanging.opened.engine.get(&key)), Ok(Some(_))));
    }
    drop(gets);
    assert_eq!((hanging.queue().free_tokens(), hanging.queue().occupancy()), (512, 0.0));
}

#[test]
fn commands_that_wait_for_a_device_that_is_replaced_fail_at_once() {
    let fixture = fixture();
    let hanging = HangingDevice::new(&fixture, |device| device);
    let mut gets = hanging.begin(GETS + 8);
    let mut devices = hanging.devices.clone();
    devices[1] = blank(1).remove(0);
    let (open, pool) = (fixture.open_config(), pool());
    let configs = (&open, &fixture.format);
    let replaced = hanging.opened.volume.replace((&devices, 1, true), &pool, configs, |_| {});
    run(replaced).expect("is replaced");
    for get in &mut gets[GETS..] {
        assert!(is_unavailable(get.now_or_never()));
    }
    assert_eq!(hanging.queue().free_tokens(), 512, "that of the new device");
}

#[test]
fn commands_that_wait_for_a_device_that_fails_fail_at_its_first_error() {
    let fixture = fixture();
    let (sim, waker) = (SimEnv::new(SimEnvConfig::new(1)), CoreWaker::without_eventfd());
    let queue = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
    let handle = ReactorHandle::new(waker, queue, CpuTime::simulated());
    let supervision = DeviceSupervision::new(Nanos::from_secs(1), 3);
    let hanging = HangingDevice::new(&fixture, |device| {
        Rc::new(supervision.supervise(device, &handle)) as Rc<dyn Device>
    });
    let mut gets = hanging.begin(GETS + 8);
    // The timeout and its grace.
    for ms in [1001, 1200] {
        assert!(!is_unavailable((&mut gets[GETS]).now_or_never()), "it waits");
        handle.begin_iteration(Nanos::from_millis(ms));
        (&mut gets[0]).now_or_never().inspect(|outcome| assert!(outcome.is_err()));
    }
    for get in &mut gets[GETS..] {
        assert!(is_unavailable(get.now_or_never()), "though most of those before it have not ended");
    }
    assert_eq!(hanging.queue().free_tokens(), 0);
}

#[test]
fn a_volume_without_tokens_has_no_queues() {
    let fixture = SpannedFixture::new(EngineKind::Hash);
    let opened = Opened::new(&fixture, &filled(&fixture, 3)).expect("opens");
    assert!(spanned(&opened).device_queues().is_empty());
}
