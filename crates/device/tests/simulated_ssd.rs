//! The simulated SSD in the simulation and on a real reactor.

use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::ssd_model::drive_profiles::EVO_970;
use octokv_device::ssd_model::timing::SsdModel;
use octokv_device::ssd_model::{SharedSsdModel, SimulatedSsd};
use octokv_device::{Device, DeviceError, FileDevice, Geometry, MemoryDevice, RamDisk};
use octokv_runtime::simulated::{SimDiskConfig, SimEnv, SimEnvConfig, SimHostId};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceDriver, DeviceHandle, IdlePolicy, KernelSockets, Polling, ReactorHandle,
    block_on, kernel, open_device_queue,
};
use parking_lot::Mutex;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// The read time of a page on flash: command, cells, channel, link.
const READ_LATENCY: Nanos = Nanos(21_400 + 40_000 + 4_096 + 1_204);
/// The time to write a page into the write buffer.
const WRITE_LATENCY: Nanos = Nanos(18_200 + 1_780);
/// Three iterations of a simulated reactor: the longest delay until a task runs after its deadline.
const ITERATION_SLACK: Nanos = Nanos(1_500);

fn ssd_model() -> SharedSsdModel {
    Arc::new(Mutex::new(SsdModel::new(EVO_970, 4096)))
}

fn ram_disk() -> Rc<dyn Device> {
    Rc::new(MemoryDevice::new(RamDisk::new(1 << 20, 4096).unwrap()))
}

fn filled_buffer(byte: u8) -> Buffer {
    let mut buffer = Buffer::zeroed(4096);
    buffer.fill(byte);
    buffer
}

/// A core of a simulated host, with its reactor in the simulation.
fn simulated_core(sim: &SimEnv, host: SimHostId) -> ReactorHandle {
    let channel = DeviceHandle::new(Box::new(sim.device_queue(host)), 32);
    let handle = ReactorHandle::new(CoreWaker::without_eventfd(), channel, CpuTime::simulated());
    let (own, channel) = (handle.clone(), handle.devices());
    sim.add_reactor(host, handle.clone(), move |now| {
        let fired = own.begin_iteration(now);
        let polled = own.poll_background();
        let completions = channel.poll();
        fired + polled + completions + own.poll_background() > 0
    });
    handle
}

/// Runs a task on a core to completion and gives its output.
fn run_to_completion<T: 'static>(
    sim: &SimEnv,
    core: &ReactorHandle,
    task: impl Future<Output = T> + 'static,
) -> T {
    let result: Rc<RefCell<Option<T>>> = Rc::default();
    let output = Rc::clone(&result);
    core.spawn(async move {
        let value = task.await;
        *output.borrow_mut() = Some(value);
    });
    let deadline = sim.now() + Nanos::from_secs(60);
    assert!(sim.run_until_true(deadline, || result.borrow().is_some()), "the task did not end");
    result.take().unwrap()
}

fn assert_about(measured: Nanos, want: Nanos) {
    assert!(measured >= want && measured <= want + ITERATION_SLACK, "{measured:?} is not about {want:?}");
}

#[test]
fn operations_take_the_models_time_and_find_what_was_written() {
    let sim = SimEnv::new(SimEnvConfig::new(1));
    let host = sim.add_host();
    let handle = simulated_core(&sim, host);
    // Faster than the modelled drive.
    let (read, write, jitter) = (Nanos::from_micros(5), Nanos::from_micros(5), Nanos::ZERO);
    let settings = SimDiskConfig {
        size_bytes: 1 << 20,
        read_latency: read,
        write_latency: write,
        jitter,
        ..SimDiskConfig::default()
    };
    let disk = sim.add_disk(host, settings);
    let media = sim.device_source(disk);
    let geometry = Geometry { block_bytes: 4096, blocks: (1 << 20) / 4096, volatile: false };
    let file = handle.devices().open(&media).unwrap();
    let over_disk = FileDevice::new(handle.devices(), file, geometry, "simulated disk".to_owned());
    for inner in [ram_disk(), Rc::new(over_disk)] {
        let model = ssd_model();
        let device = SimulatedSsd::new(inner, Arc::clone(&model), handle.clone());
        assert!(!device.geometry().volatile, "an engine keeps a journal on it");
        let clock = handle.clone();
        let times = run_to_completion(&sim, &handle, async move {
            let mut times = Vec::new();
            let mut since = clock.now();
            let mut end_stage = |clock: &ReactorHandle| {
                times.push(clock.now() - since);
                since = clock.now();
            };
            device.write(Lba(3), filled_buffer(7)).await.result.unwrap();
            end_stage(&clock);
            device.flush().await.result.unwrap();
            end_stage(&clock);
            let read = device.read(Lba(3), Buffer::zeroed(4096)).await.into_read().unwrap();
            end_stage(&clock);
            assert!(read.iter().all(|&byte| byte == 7));
            let unwritten = device.read(Lba(4), Buffer::zeroed(4096)).await.into_read().unwrap();
            end_stage(&clock);
            assert!(unwritten.iter().all(|&byte| byte == 0));
            device.trim(Lba(3), 1).await.result.unwrap();
            end_stage(&clock);
            times
        });
        assert_about(times[0], WRITE_LATENCY);
        // The channel with a whole stripe, an SLC program, the mapping.
        assert_about(times[1], Nanos(32_768 + 175_000 + 500_000));
        assert_about(times[2], READ_LATENCY);
        assert_about(times[3], Nanos(21_400 + 1_204));
        assert_about(times[4], Nanos(18_200));
        assert_eq!(model.lock().mapped_pages(), 0, "trimmed");
        assert_eq!(handle.device_operations_in_flight(), 0);
    }
}

#[test]
fn a_slower_inner_device_determines_the_completion_time() {
    let sim = SimEnv::new(SimEnvConfig::new(2));
    let host = sim.add_host();
    let handle = simulated_core(&sim, host);
    let slow = SimDiskConfig { size_bytes: 1 << 20, ..SimDiskConfig::default() };
    let disk = sim.add_disk(host, SimDiskConfig { write_latency: Nanos::from_millis(3), ..slow });
    let geometry = Geometry { block_bytes: 4096, blocks: (1 << 20) / 4096, volatile: false };
    let file = handle.devices().open(&sim.device_source(disk)).unwrap();
    let inner = FileDevice::new(handle.devices(), file, geometry, "slow disk".to_owned());
    let device = SimulatedSsd::new(Rc::new(inner), ssd_model(), handle.clone());
    let clock = handle.clone();
    let span = run_to_completion(&sim, &handle, async move {
        let since = clock.now();
        device.write(Lba(0), filled_buffer(1)).await.result.unwrap();
        clock.now() - since
    });
    assert!(span >= Nanos::from_millis(3), "{span:?}");
}

#[test]
fn cores_share_the_dies() {
    let sim = SimEnv::new(SimEnvConfig::new(3));
    let host = sim.add_host();
    let (one, other) = (simulated_core(&sim, host), simulated_core(&sim, host));
    let (model, memory) = (ssd_model(), ram_disk());
    let device =
        |core: &ReactorHandle| SimulatedSsd::new(Rc::clone(&memory), Arc::clone(&model), core.clone());
    let (first, second, writer) = (device(&one), device(&other), device(&one));
    run_to_completion(&sim, &one, async move {
        writer.write(Lba(0), filled_buffer(1)).await.result.unwrap();
        writer.write(Lba(1), filled_buffer(2)).await.result.unwrap();
        writer.flush().await.result.unwrap();
    });
    // Both pages are in one stripe.
    let begin = sim.now() + Nanos::from_millis(1);
    let spans: Rc<RefCell<Vec<Nanos>>> = Rc::default();
    for (clock, device, at) in [(one, first, 0), (other, second, 1)] {
        let spans = Rc::clone(&spans);
        let handle = clock.clone();
        handle.spawn(async move {
            clock.sleep_until(begin).await;
            let read = device.read(Lba(at), Buffer::zeroed(4096)).await.into_read().unwrap();
            assert_eq!(read[0], at as u8 + 1);
            spans.borrow_mut().push(clock.now() - begin);
        });
    }
    sim.run_until(begin + Nanos::from_secs(1));
    assert_about(spans.borrow()[0], READ_LATENCY);
    assert_about(spans.borrow()[1], READ_LATENCY + EVO_970.page_read);
}

#[test]
fn a_dropped_operation_still_occupies_the_model() {
    let sim = SimEnv::new(SimEnvConfig::new(4));
    let host = sim.add_host();
    let handle = simulated_core(&sim, host);
    let model = ssd_model();
    let device = Rc::new(SimulatedSsd::new(ram_disk(), Arc::clone(&model), handle.clone()));
    let under = (Rc::clone(&device), handle.clone());
    run_to_completion(&sim, &handle, async move {
        let (device, handle) = under;
        let dropped = device.write(Lba(0), filled_buffer(9));
        assert_eq!(handle.device_operations_in_flight(), 1);
        drop(dropped);
        assert_eq!(handle.device_operations_in_flight(), 0);
        // Polled once, so that there is a timer, and then dropped.
        let mut polled = device.write(Lba(1), filled_buffer(9));
        std::future::poll_fn(|context| {
            assert!(std::pin::Pin::new(&mut polled).poll(context).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
        drop(polled);
        let read = device.read(Lba(0), Buffer::zeroed(4096)).await.into_read().unwrap();
        assert_eq!(read[0], 9);
    });
    assert_eq!(model.lock().statistics().host_pages_written, 2);
    assert_eq!(handle.next_deadline(), Nanos::NEVER);
}

#[test]
fn out_of_range_operations_fail_at_once_and_skip_the_model() {
    let sim = SimEnv::new(SimEnvConfig::new(5));
    let host = sim.add_host();
    let handle = simulated_core(&sim, host);
    let model = ssd_model();
    let device = SimulatedSsd::new(ram_disk(), Arc::clone(&model), handle.clone());
    let clock = handle.clone();
    run_to_completion(&sim, &handle, async move {
        let since = clock.now();
        let write = device.write(Lba(255), Buffer::zeroed(8192)).await;
        assert_eq!((write.result, write.buffer.is_some()), (Err(DeviceError::OutOfRange), true));
        let read = device.read(Lba(256), Buffer::zeroed(4096)).await;
        assert_eq!((read.result, read.buffer.is_some()), (Err(DeviceError::OutOfRange), true));
        assert_eq!(clock.now(), since);
        // A trim is a hint: the part within the device counts.
        device.trim(Lba(0), u64::MAX).await.result.unwrap();
    });
    assert_eq!(model.lock().statistics().host_pages_written, 0);
}

#[test]
#[should_panic(expected = "are more than a Samsung 970 EVO 500 GB has")]
fn a_device_larger_than_the_drive_panics() {
    struct Large(Rc<dyn Device>);
    impl Device for Large {
        fn geometry(&self) -> Geometry {
            Geometry { blocks: 1 << 30, ..self.0.geometry() }
        }
        fn name(&self) -> &str {
            "large"
        }
        fn read(&self, at: Lba, buffer: Buffer) -> octokv_device::DeviceFuture {
            self.0.read(at, buffer)
        }
        fn write(&self, at: Lba, buffer: Buffer) -> octokv_device::DeviceFuture {
            self.0.write(at, buffer)
        }
        fn flush(&self) -> octokv_device::DeviceFuture {
            self.0.flush()
        }
        fn trim(&self, at: Lba, blocks: u64) -> octokv_device::DeviceFuture {
            self.0.trim(at, blocks)
        }
    }
    let sim = SimEnv::new(SimEnvConfig::new(6));
    let host = sim.add_host();
    SimulatedSsd::new(Rc::new(Large(ram_disk())), ssd_model(), simulated_core(&sim, host));
}

#[test]
fn on_a_real_reactor_no_operation_completes_early_and_the_core_stays_awake() {
    let waker = CoreWaker::new().unwrap();
    let (queue, _) = open_device_queue(DeviceDriver::Threads, 16, &waker).unwrap();
    let mut sockets = KernelSockets::new().unwrap();
    // Spins for less than an operation takes, and would then sleep.
    let polling = Polling::Adaptive { spin: Nanos::from_micros(5) };
    let mut idle = IdlePolicy::new(polling, Arc::clone(&waker), &mut sockets, None).unwrap();
    let handle = ReactorHandle::new(waker, DeviceHandle::new(queue, 16), CpuTime::measured());
    let device = SimulatedSsd::new(ram_disk(), ssd_model(), handle.clone());
    let mut iterate = || {
        let fired = handle.begin_iteration(kernel::now());
        let works = handle.device_operations_in_flight() > 0;
        idle.spin_or_sleep(fired > 0, kernel::now(), works, handle.next_deadline(), &mut sockets);
    };
    block_on(device.write(Lba(0), filled_buffer(5)), &mut iterate).result.unwrap();
    block_on(device.flush(), &mut iterate).result.unwrap();
    for _ in 0..100 {
        let since = handle.now();
        let read = block_on(device.read(Lba(0), Buffer::zeroed(4096)), &mut iterate).into_read().unwrap();
        assert_eq!(read[0], 5);
        assert!(handle.now() - since >= READ_LATENCY, "{:?} is early", handle.now() - since);
        let since = handle.now();
        block_on(device.write(Lba(1), filled_buffer(6)), &mut iterate).result.unwrap();
        assert!(handle.now() - since >= WRITE_LATENCY, "{:?} is early", handle.now() - since);
    }
    // A core that other processes use at the time may sleep.
    assert!(idle.sleep_count() == 0 || idle.contention_count() > 0, "{} sleeps", idle.sleep_count());
}
