//! A device with a drive's times, in a virtual world and on a real reactor.

use octokv_base::{Buffer, Lba, Nanos};
use octokv_device::ssd_model::drive_profiles::EVO_970;
use octokv_device::ssd_model::timing::Model;
use octokv_device::ssd_model::{NandDevice, SharedModel};
use octokv_device::{Device, DeviceError, FileDevice, Geometry, Memory, MemoryDevice};
use octokv_runtime::simulated::{DiskSettings, HostId, VirtualWorld, WorldSettings};
use octokv_runtime::{
    Busy, Channel, DeviceDriver, Doorbell, Handle, Idle, Polling, RealSockets, block_on, device_queue, kernel,
};
use parking_lot::Mutex;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// What a page that is on flash takes to be read: command, cells, channel, link.
const READ: Nanos = Nanos(21_400 + 40_000 + 4_096 + 1_204);
/// What a page takes to be written into the buffer.
const WRITE: Nanos = Nanos(18_200 + 1_780);
/// A turn of a virtual reactor takes this, and a task may need three to see that its time has come.
const TURNS: Nanos = Nanos(1_500);

fn model() -> SharedModel {
    Arc::new(Mutex::new(Model::new(EVO_970, 4096)))
}

fn memory() -> Rc<dyn Device> {
    Rc::new(MemoryDevice::new(Memory::new(1 << 20, 4096).unwrap()))
}

fn filled(byte: u8) -> Buffer {
    let mut buffer = Buffer::zeroed(4096);
    buffer.fill(byte);
    buffer
}

/// A core of a virtual host, with its reactor in the world.
fn core(world: &VirtualWorld, host: HostId) -> Handle {
    let channel = Channel::new(Box::new(world.queue(host)), 32);
    let handle = Handle::new(Doorbell::silent(), channel, Busy::virtual_time());
    let (own, channel) = (handle.clone(), handle.channel());
    world.add_reactor(host, handle.clone(), move |now| {
        let fired = own.begin_turn(now);
        let before = own.run_background();
        let answers = channel.poll();
        fired + before + answers + own.run_background() > 0
    });
    handle
}

/// Runs a task on a core to its end. Gives what it gave.
fn finish<T: 'static>(world: &VirtualWorld, core: &Handle, task: impl Future<Output = T> + 'static) -> T {
    let result: Rc<RefCell<Option<T>>> = Rc::default();
    let there = Rc::clone(&result);
    core.spawn(async move {
        let value = task.await;
        *there.borrow_mut() = Some(value);
    });
    let deadline = world.now() + Nanos::from_secs(60);
    assert!(world.run_while_not(deadline, || result.borrow().is_some()), "the task did not end");
    result.take().unwrap()
}

fn about(measured: Nanos, want: Nanos) {
    assert!(measured >= want && measured <= want + TURNS, "{measured:?} is not about {want:?}");
}

#[test]
fn operations_take_the_models_time_and_find_what_was_written() {
    let world = VirtualWorld::new(WorldSettings::new(1));
    let host = world.add_host();
    let handle = core(&world, host);
    // Faster than the drive that it plays.
    let (read, write, jitter) = (Nanos::from_micros(5), Nanos::from_micros(5), Nanos::ZERO);
    let settings = DiskSettings { size_bytes: 1 << 20, read, write, jitter, ..DiskSettings::default() };
    let disk = world.add_disk(host, settings);
    let media = world.media(disk);
    let geometry = Geometry { block_bytes: 4096, blocks: (1 << 20) / 4096, volatile: false };
    let file = handle.channel().open(&media).unwrap();
    let over_disk = FileDevice::new(handle.channel(), file, geometry, "virtual disk".to_owned());
    for beneath in [memory(), Rc::new(over_disk)] {
        let model = model();
        let device = NandDevice::new(beneath, Arc::clone(&model), handle.clone());
        assert!(!device.geometry().volatile, "an engine keeps a journal on it");
        let clock = handle.clone();
        let times = finish(&world, &handle, async move {
            let mut times = Vec::new();
            let mut since = clock.now();
            let mut lap = |clock: &Handle| {
                times.push(clock.now() - since);
                since = clock.now();
            };
            device.write(Lba(3), filled(7)).await.result.unwrap();
            lap(&clock);
            device.flush().await.result.unwrap();
            lap(&clock);
            let read = device.read(Lba(3), Buffer::zeroed(4096)).await.into_read().unwrap();
            lap(&clock);
            assert!(read.iter().all(|&byte| byte == 7));
            let unwritten = device.read(Lba(4), Buffer::zeroed(4096)).await.into_read().unwrap();
            lap(&clock);
            assert!(unwritten.iter().all(|&byte| byte == 0));
            device.trim(Lba(3), 1).await.result.unwrap();
            lap(&clock);
            times
        });
        about(times[0], WRITE);
        // Command, the channel with a whole stripe, a turbo program, the mapping.
        about(times[1], Nanos(32_768 + 175_000 + 500_000));
        about(times[2], READ);
        about(times[3], Nanos(21_400 + 1_204));
        about(times[4], Nanos(18_200));
        assert_eq!(model.lock().mapped_pages(), 0, "trimmed");
        assert_eq!(handle.device_operations(), 0);
    }
}

#[test]
fn a_device_beneath_that_is_slower_is_waited_for() {
    let world = VirtualWorld::new(WorldSettings::new(2));
    let host = world.add_host();
    let handle = core(&world, host);
    let slow = DiskSettings { size_bytes: 1 << 20, ..DiskSettings::default() };
    let disk = world.add_disk(host, DiskSettings { write: Nanos::from_millis(3), ..slow });
    let geometry = Geometry { block_bytes: 4096, blocks: (1 << 20) / 4096, volatile: false };
    let file = handle.channel().open(&world.media(disk)).unwrap();
    let beneath = FileDevice::new(handle.channel(), file, geometry, "slow disk".to_owned());
    let device = NandDevice::new(Rc::new(beneath), model(), handle.clone());
    let clock = handle.clone();
    let span = finish(&world, &handle, async move {
        let since = clock.now();
        device.write(Lba(0), filled(1)).await.result.unwrap();
        clock.now() - since
    });
    assert!(span >= Nanos::from_millis(3), "{span:?}");
}

#[test]
fn cores_share_the_dies() {
    let world = VirtualWorld::new(WorldSettings::new(3));
    let host = world.add_host();
    let (one, other) = (core(&world, host), core(&world, host));
    let (model, memory) = (model(), memory());
    let device = |core: &Handle| NandDevice::new(Rc::clone(&memory), Arc::clone(&model), core.clone());
    let (first, second, writer) = (device(&one), device(&other), device(&one));
    finish(&world, &one, async move {
        writer.write(Lba(0), filled(1)).await.result.unwrap();
        writer.write(Lba(1), filled(2)).await.result.unwrap();
        writer.flush().await.result.unwrap();
    });
    // Both pages are of one stripe.
    let begin = world.now() + Nanos::from_millis(1);
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
    world.run_until(begin + Nanos::from_secs(1));
    about(spans.borrow()[0], READ);
    about(spans.borrow()[1], READ + EVO_970.page_read);
}

#[test]
fn an_operation_that_nobody_awaits_any_more_takes_its_time_all_the_same() {
    let world = VirtualWorld::new(WorldSettings::new(4));
    let host = world.add_host();
    let handle = core(&world, host);
    let model = model();
    let device = Rc::new(NandDevice::new(memory(), Arc::clone(&model), handle.clone()));
    let under = (Rc::clone(&device), handle.clone());
    finish(&world, &handle, async move {
        let (device, handle) = under;
        let dropped = device.write(Lba(0), filled(9));
        assert_eq!(handle.device_operations(), 1);
        drop(dropped);
        assert_eq!(handle.device_operations(), 0);
        // Polled once, so that there is a timer, and dropped then.
        let mut polled = device.write(Lba(1), filled(9));
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
fn what_is_not_on_the_device_is_refused_at_once_and_not_in_the_model() {
    let world = VirtualWorld::new(WorldSettings::new(5));
    let host = world.add_host();
    let handle = core(&world, host);
    let model = model();
    let device = NandDevice::new(memory(), Arc::clone(&model), handle.clone());
    let clock = handle.clone();
    finish(&world, &handle, async move {
        let since = clock.now();
        let write = device.write(Lba(255), Buffer::zeroed(8192)).await;
        assert_eq!((write.result, write.buffer.is_some()), (Err(DeviceError::OutOfRange), true));
        let read = device.read(Lba(256), Buffer::zeroed(4096)).await;
        assert_eq!((read.result, read.buffer.is_some()), (Err(DeviceError::OutOfRange), true));
        assert_eq!(clock.now(), since);
        // A trim is a hint: the part that is there counts.
        device.trim(Lba(0), u64::MAX).await.result.unwrap();
    });
    assert_eq!(model.lock().statistics().host_pages_written, 0);
}

#[test]
#[should_panic(expected = "are more than a Samsung 970 EVO 500 GB has")]
fn a_device_that_is_larger_than_the_drive_is_a_mistake() {
    struct Large(Rc<dyn Device>);
    impl Device for Large {
        fn geometry(&self) -> Geometry {
            Geometry { blocks: 1 << 30, ..self.0.geometry() }
        }
        fn name(&self) -> &str {
            "large"
        }
        fn read(&self, at: Lba, buffer: Buffer) -> octokv_device::Pending {
            self.0.read(at, buffer)
        }
        fn write(&self, at: Lba, buffer: Buffer) -> octokv_device::Pending {
            self.0.write(at, buffer)
        }
        fn flush(&self) -> octokv_device::Pending {
            self.0.flush()
        }
        fn trim(&self, at: Lba, blocks: u64) -> octokv_device::Pending {
            self.0.trim(at, blocks)
        }
    }
    let world = VirtualWorld::new(WorldSettings::new(6));
    let host = world.add_host();
    NandDevice::new(Rc::new(Large(memory())), model(), core(&world, host));
}

#[test]
fn on_a_real_reactor_no_operation_is_early_and_the_core_does_not_sleep_meanwhile() {
    let doorbell = Doorbell::new().unwrap();
    let (queue, _) = device_queue(DeviceDriver::Threads, 16, &doorbell).unwrap();
    let mut sockets = RealSockets::new().unwrap();
    // It spins for less than an operation takes, and would then sleep.
    let polling = Polling::Adaptive { spin: Nanos::from_micros(5) };
    let mut idle = Idle::new(polling, Arc::clone(&doorbell), &mut sockets, None).unwrap();
    let handle = Handle::new(doorbell, Channel::new(queue, 16), Busy::real());
    let device = NandDevice::new(memory(), model(), handle.clone());
    let mut turn = || {
        let fired = handle.begin_turn(kernel::now());
        let works = handle.device_operations() > 0;
        idle.rest(fired > 0, kernel::now(), works, handle.next_deadline(), &mut sockets);
    };
    block_on(device.write(Lba(0), filled(5)), &mut turn).result.unwrap();
    block_on(device.flush(), &mut turn).result.unwrap();
    for _ in 0..100 {
        let since = handle.now();
        let read = block_on(device.read(Lba(0), Buffer::zeroed(4096)), &mut turn).into_read().unwrap();
        assert_eq!(read[0], 5);
        assert!(handle.now() - since >= READ, "{:?} is early", handle.now() - since);
        let since = handle.now();
        block_on(device.write(Lba(1), filled(6)), &mut turn).result.unwrap();
        assert!(handle.now() - since >= WRITE, "{:?} is early", handle.now() - since);
    }
    assert_eq!(idle.sleeps(), 0);
}
