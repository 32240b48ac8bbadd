//! Reactors on the kernel: they sleep without cost, wake in time, and lose no wake-up.

use crate::common::{ScratchFile, drivers};
use octokv_base::{Buffer, Nanos, Prng};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceDriver, DeviceHandle, IdlePolicy, IoOperation, KernelSockets, ListenerId,
    Mailbox, Polling, ReactorHandle, ReceiveStatus, SendStatus, SocketId, Sockets, Stage, TaskSlab, mesh,
    open_device_queue,
};
use octokv_sys::{clock, process, thread};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

/// A reactor that echoes the bytes it receives.
struct EchoReactor {
    handle: ReactorHandle,
    sockets: KernelSockets,
    idle: IdlePolicy,
    listener: ListenerId,
    ready: Vec<SocketId>,
}

impl EchoReactor {
    fn new(polling: Polling, driver: DeviceDriver) -> (EchoReactor, SocketAddr) {
        let core_waker = CoreWaker::new().unwrap();
        let (queue, _) = open_device_queue(driver, 16, &core_waker).unwrap();
        let devices = DeviceHandle::new(queue, 16);
        let mut sockets = KernelSockets::new().unwrap();
        let (listener, address) = sockets.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let idle =
            IdlePolicy::new(polling, Arc::clone(&core_waker), &mut sockets, devices.completion_eventfd())
                .unwrap();
        let handle = ReactorHandle::new(core_waker, devices, CpuTime::measured());
        (EchoReactor { handle, sockets, idle, listener, ready: Vec::new() }, address)
    }

    fn run_iteration(&mut self) -> bool {
        let mut did_work = self.handle.begin_iteration(clock::now()) > 0;
        while self.sockets.accept(self.listener).is_some() {
            did_work = true;
        }
        self.ready.clear();
        self.sockets.ready(&mut self.ready);
        let mut bytes = [0; 4096];
        for &socket in &self.ready {
            match self.sockets.receive(socket, &mut bytes) {
                ReceiveStatus::Bytes(count) => {
                    did_work = true;
                    let sent = self.sockets.send(socket, &[IoSlice::new(&bytes[..count])]);
                    assert_eq!(sent, SendStatus::Bytes(count), "a few bytes fit");
                }
                ReceiveStatus::WouldBlock => {}
                ReceiveStatus::Closed => self.sockets.close(socket),
            }
        }
        self.handle.cpu_time().end_stage(Stage::Target, did_work);
        did_work |= self.handle.poll_background() > 0;
        did_work |= self.handle.devices().poll() > 0;
        self.handle.cpu_time().end_stage(Stage::Device, did_work);
        did_work
    }

    fn spin_or_sleep(&mut self, did_work: bool) -> bool {
        let (now, next) = (self.handle.now(), self.handle.next_deadline());
        self.idle.spin_or_sleep(did_work, now, false, next, &mut self.sockets)
    }
}

/// Starts an echo reactor on a thread, which returns its run time, processor time and number of sleeps.
fn start_echo(polling: Polling, stop: &Arc<AtomicBool>) -> RunningReactor {
    let (address_sender, address_receiver) = mpsc::channel();
    let stop = Arc::clone(stop);
    let thread = thread::spawn("echo", move || {
        let (mut echo, address) = EchoReactor::new(polling, DeviceDriver::Auto);
        address_sender.send((address, Arc::clone(echo.handle.core_waker()))).unwrap();
        let (start, cpu) = (clock::now(), process::thread_cpu_time());
        while !stop.load(Ordering::Acquire) {
            let busy = echo.run_iteration();
            echo.spin_or_sleep(busy);
        }
        (clock::now().since(start), process::thread_cpu_time().since(cpu), echo.idle.sleep_count())
    })
    .unwrap();
    let (address, core_waker) = address_receiver.recv().unwrap();
    RunningReactor { address, core_waker, thread }
}

struct RunningReactor {
    address: SocketAddr,
    core_waker: Arc<CoreWaker>,
    thread: std::thread::JoinHandle<(Nanos, Nanos, u64)>,
}

/// The round-trip time of one byte.
fn ping(sockets: &mut KernelSockets, socket: SocketId) -> Nanos {
    let start = clock::now();
    while sockets.send(socket, &[IoSlice::new(b"?")]) == SendStatus::WouldBlock {
        sockets.wait(Nanos::from_millis(5));
    }
    while sockets.receive(socket, &mut [0; 1]) != ReceiveStatus::Bytes(1) {
        sockets.wait(Nanos::from_millis(5));
        assert!(clock::now().since(start) < Nanos::from_secs(20), "no echo");
    }
    clock::now().since(start)
}

#[test]
fn an_idle_reactor_leaves_its_core_and_wakes_for_the_first_byte() {
    let stop = Arc::new(AtomicBool::new(false));
    let running = start_echo(Polling::default(), &stop);
    let mut sockets = KernelSockets::new().unwrap();
    let socket = sockets.connect(running.address).unwrap();
    ping(&mut sockets, socket);
    let mut first = Vec::new();
    for _ in 0..10 {
        // The pause is much longer than the spin time: the reactor sleeps.
        let until = clock::now() + Nanos::from_millis(50);
        while clock::now() < until {
            sockets.wait(until.since(clock::now()));
        }
        first.push(ping(&mut sockets, socket));
    }
    first.sort();
    stop.store(true, Ordering::Release);
    running.core_waker.notify();
    let (elapsed, cpu, sleeps) = running.thread.join().unwrap();
    println!("first byte after a pause: {first:?}; {cpu:?} of {elapsed:?}; {sleeps} sleeps");
    assert!(sleeps >= 10);
    assert!(first[5] < Nanos::from_millis(5), "half of the first bytes took longer than {:?}", first[5]);
    // It spins 100 µs for each byte, 0.2 % of the pauses between them. A loaded machine's time of a processor includes
    // what others took of it.
    assert!(cpu.0 * 20 < elapsed.0, "idle, it used {cpu:?} of {elapsed:?}");
}

#[test]
fn a_sleeping_reactor_wakes_for_timers_and_for_its_device() {
    for driver in drivers() {
        let scratch = ScratchFile::new(&format!("wakes-{driver:?}"));
        let (mut echo, _) = EchoReactor::new(Polling::Sleep, driver);
        let devices = echo.handle.devices();
        let file = devices.open(&scratch.source).unwrap();
        let rounds = std::rc::Rc::new(std::cell::Cell::new(0));
        let (handle, counted) = (echo.handle.clone(), std::rc::Rc::clone(&rounds));
        echo.run_iteration();
        let source_bytes = scratch.source.size_bytes;
        echo.handle.spawn(async move {
            let mut buffer = Buffer::zeroed(1 << 20);
            for round in 0..100 {
                let read = IoOperation::Read { offset: (round << 20) % source_bytes, buffer };
                buffer = devices.submit(file, read).await.buffer.unwrap();
                assert_eq!(devices.submit(file, IoOperation::Flush).await.result, Ok(()));
                handle.sleep(Nanos::from_micros(200)).await;
                counted.set(round + 1);
            }
        });
        while rounds.get() < 100 {
            if !echo.run_iteration() {
                let soon = echo.handle.now() + Nanos::from_secs(5);
                let next = echo.handle.next_deadline().min(soon);
                echo.idle.spin_or_sleep(false, echo.handle.now(), false, next, &mut echo.sockets);
                assert!(clock::now() < soon, "after round {}, no wake-up", rounds.get());
            }
        }
        assert!(echo.idle.sleep_count() >= 100, "{driver:?} slept {} times", echo.idle.sleep_count());
    }
}

#[test]
fn no_wake_up_by_a_device_is_lost() {
    const ROUNDS: u64 = 20_000;
    for driver in drivers() {
        let scratch = ScratchFile::new(&format!("lost-{driver:?}"));
        let (mut echo, _) = EchoReactor::new(Polling::Sleep, driver);
        let devices = echo.handle.devices();
        let file = devices.open(&scratch.source).unwrap();
        let blocks = scratch.source.size_bytes / 4096;
        let completed = std::rc::Rc::new(std::cell::Cell::new(0));
        // Several at a time, so that completions arrive at every moment: while the core polls, while it falls asleep.
        for task in 0..3 {
            let (devices, completed) = (devices.clone(), std::rc::Rc::clone(&completed));
            echo.handle.spawn(async move {
                let mut buffer = Buffer::zeroed(4096);
                for round in 0..ROUNDS / 3 {
                    let read = IoOperation::Read { offset: (round * 7 + task) % blocks * 4096, buffer };
                    buffer = devices.submit(file, read).await.buffer.unwrap();
                    if round % 8 == 0 {
                        // A read of a never written block may complete immediately; a flush does not.
                        assert_eq!(devices.submit(file, IoOperation::Flush).await.result, Ok(()));
                    }
                    completed.set(completed.get() + 1);
                }
            });
        }
        let mut random = Prng::new(9);
        for iteration in 0.. {
            if completed.get() == ROUNDS / 3 * 3 {
                break;
            }
            let busy = echo.run_iteration();
            // Half of the time completions arrive while the core is busy, half of the time while it sleeps.
            if iteration / 64 % 2 == 0 {
                busy_wait(&mut random);
            }
            if !busy {
                sleep(&mut echo.idle, &mut echo.sockets);
            }
        }
        assert!(echo.idle.sleep_count() > 0, "{driver:?} never slept");
    }
}

/// Sleeps until woken. A sleep that its deadline ends is a lost wake-up.
fn sleep(idle: &mut IdlePolicy, sockets: &mut KernelSockets) {
    let before = clock::now();
    idle.spin_or_sleep(false, before, false, before + Nanos::from_secs(5), sockets);
    let slept = clock::now().since(before);
    assert!(slept < Nanos::from_secs(4), "a sleep of {slept:?}: a wake-up was lost");
}

/// Spins for a random time, so that the other core's steps fall between any two of this core's.
fn busy_wait(random: &mut Prng) {
    let span = Nanos(random.below(20_000));
    let start = clock::now();
    while clock::now().since(start) < span {}
}

const MESSAGES: u64 = 20_000;

/// One side of a ping-pong between two cores by mailbox: messages alternate, and each side sleeps while it waits.
fn exchange(mut mailbox: Mailbox<u64>, me: usize, core_waker: Arc<CoreWaker>) {
    let mut sockets = KernelSockets::new().unwrap();
    let mut idle = IdlePolicy::new(Polling::Sleep, Arc::clone(&core_waker), &mut sockets, None).unwrap();
    let mut random = Prng::new(me as u64);
    let mut expected = 1 - me as u64;
    if me == 0 {
        mailbox.send(1, 0).unwrap();
    }
    while expected < MESSAGES {
        core_waker.begin_iteration();
        let received = mailbox.receive();
        busy_wait(&mut random);
        match received {
            Some(number) => {
                assert_eq!(number, expected);
                mailbox.send(1 - me, number + 1).unwrap();
                expected += 2;
            }
            None => sleep(&mut idle, &mut sockets),
        }
    }
}

#[test]
fn no_wake_up_between_cores_is_lost() {
    let core_wakers: Vec<_> = (0..2).map(|_| CoreWaker::new().unwrap()).collect();
    let mut boxes = mesh::<u64>(&core_wakers, 16);
    let (other_box, own_box) = (boxes.pop().unwrap(), boxes.pop().unwrap());
    let other_waker = Arc::clone(&core_wakers[1]);
    let other = thread::spawn("pong", move || exchange(other_box, 1, other_waker)).unwrap();
    exchange(own_box, 0, Arc::clone(&core_wakers[0]));
    other.join().unwrap();
}

#[test]
fn no_wake_up_of_a_task_by_another_core_is_lost() {
    const ROUNDS: u64 = 20_000;
    let core_waker = CoreWaker::new().unwrap();
    let (give, wakers) = mpsc::channel::<std::task::Waker>();
    let published = Arc::new(AtomicU64::new(0));
    let publisher = Arc::clone(&published);
    let other = thread::spawn("waker", move || {
        let mut random = Prng::new(7);
        for (round, waker) in (1..).zip(wakers) {
            busy_wait(&mut random);
            publisher.store(round, Ordering::Release);
            waker.wake();
        }
    })
    .unwrap();
    let mut sockets = KernelSockets::new().unwrap();
    let mut idle = IdlePolicy::new(Polling::Sleep, Arc::clone(&core_waker), &mut sockets, None).unwrap();
    let mut tasks = TaskSlab::new(100, Arc::clone(&core_waker));
    let mut random = Prng::new(8);
    let seen = Arc::clone(&published);
    let task = async move {
        for round in 1..=ROUNDS {
            let mut given = false;
            std::future::poll_fn(|context| {
                if !std::mem::replace(&mut given, true) {
                    give.send(context.waker().clone()).unwrap();
                }
                let ready = seen.load(Ordering::Acquire) >= round;
                if ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
            })
            .await;
        }
    };
    assert!(tasks.spawn(task).is_ok());
    while tasks.running() > 0 {
        core_waker.begin_iteration();
        let busy = tasks.poll_ready() > 0;
        busy_wait(&mut random);
        if !busy {
            sleep(&mut idle, &mut sockets);
        }
    }
    other.join().unwrap();
    assert_eq!(published.load(Ordering::Acquire), ROUNDS);
}

#[test]
fn reactors_run_on_their_cores_and_time_is_accounted_by_stage() {
    let cores = thread::allowed_cores();
    let body = |index: usize| {
        let cpu_time = CpuTime::measured();
        let reader = cpu_time.reader();
        let work = || {
            let start = clock::now();
            while clock::now().since(start) < Nanos::from_millis(5) {}
        };
        work();
        cpu_time.end_stage(Stage::Kv, true);
        work();
        cpu_time.end_stage(Stage::Target, false);
        (index, thread::current_core(), reader.stage_times())
    };
    let spawn = |(index, &core): (usize, &usize)| {
        octokv_runtime::kernel::spawn_reactor(core, move || body(index)).unwrap()
    };
    let started: Vec<_> = cores.iter().enumerate().map(spawn).collect();
    for (index, reactor) in started.into_iter().enumerate() {
        let (number, core, spent) = reactor.join().unwrap();
        assert_eq!((number, core), (index, cores[index]));
        let (kv, idle) = (spent[Stage::Kv as usize], spent[Stage::Idle as usize]);
        assert!(kv >= Nanos::from_micros(4_500) && idle >= Nanos::from_micros(4_500), "{spent:?}");
        assert_eq!(spent[Stage::Target as usize], Nanos::ZERO);
    }
}
