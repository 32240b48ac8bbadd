//! Real reactors: sleep without cost, wake in time, lose no wake-up.

mod common;

use common::{Scratch, drivers};
use octokv_base::{Buffer, Nanos, Random};
use octokv_runtime::{
    Busy, Channel, DeviceDriver, Doorbell, Handle, Idle, ListenerId, Mailbox, Operation, Polling,
    RealSockets, Received, Sent, SocketId, Sockets, Stage, Tasks, device_queue, mesh,
};
use octokv_sys::{clock, process, thread};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;

/// A reactor that echoes what comes in by its sockets.
struct Echo {
    handle: Handle,
    sockets: RealSockets,
    idle: Idle,
    listener: ListenerId,
    ready: Vec<SocketId>,
}

impl Echo {
    fn new(polling: Polling, driver: DeviceDriver) -> (Echo, SocketAddr) {
        let doorbell = Doorbell::new().unwrap();
        let (queue, _) = device_queue(driver, 16, &doorbell).unwrap();
        let channel = Channel::new(queue, 16);
        let mut sockets = RealSockets::new().unwrap();
        let (listener, address) = sockets.listen("127.0.0.1:0".parse().unwrap()).unwrap();
        let idle =
            Idle::new(polling, Arc::clone(&doorbell), &mut sockets, channel.wait_descriptor()).unwrap();
        let handle = Handle::new(doorbell, channel, Busy::real());
        (Echo { handle, sockets, idle, listener, ready: Vec::new() }, address)
    }

    fn turn(&mut self) -> bool {
        let mut busy = self.handle.begin_turn(clock::now()) > 0;
        while self.sockets.accept(self.listener).is_some() {
            busy = true;
        }
        self.ready.clear();
        self.sockets.ready(&mut self.ready);
        let mut bytes = [0; 4096];
        for &socket in &self.ready {
            match self.sockets.receive(socket, &mut bytes) {
                Received::Bytes(count) => {
                    busy = true;
                    let sent = self.sockets.send(socket, &[IoSlice::new(&bytes[..count])]);
                    assert_eq!(sent, Sent::Bytes(count), "a few bytes fit");
                }
                Received::Nothing => {}
                Received::Closed => self.sockets.close(socket),
            }
        }
        self.handle.busy().lap(Stage::Target, busy);
        busy |= self.handle.run_background() > 0;
        busy |= self.handle.channel().poll() > 0;
        self.handle.busy().lap(Stage::Device, busy);
        busy
    }

    fn rest(&mut self, busy: bool) -> bool {
        let (now, next) = (self.handle.now(), self.handle.next_deadline());
        self.idle.rest(busy, now, false, next, &mut self.sockets)
    }
}

/// An echoing reactor on a thread; at the end, how long it lived and what processor time that took.
fn start_echo(polling: Polling, stop: &Arc<AtomicBool>) -> Running {
    let (tell, told) = mpsc::channel();
    let stop = Arc::clone(stop);
    let thread = thread::spawn("echo", move || {
        let (mut echo, address) = Echo::new(polling, DeviceDriver::Auto);
        tell.send((address, Arc::clone(echo.handle.doorbell()))).unwrap();
        let (start, cpu) = (clock::now(), process::thread_cpu());
        while !stop.load(Ordering::Acquire) {
            let busy = echo.turn();
            echo.rest(busy);
        }
        (clock::now().since(start), process::thread_cpu().since(cpu), echo.idle.sleeps())
    })
    .unwrap();
    let (address, doorbell) = told.recv().unwrap();
    Running { address, doorbell, thread }
}

struct Running {
    address: SocketAddr,
    doorbell: Arc<Doorbell>,
    thread: std::thread::JoinHandle<(Nanos, Nanos, u64)>,
}

/// One byte there and back; how long it took.
fn ping(sockets: &mut RealSockets, socket: SocketId) -> Nanos {
    let start = clock::now();
    while sockets.send(socket, &[IoSlice::new(b"?")]) == Sent::Full {
        sockets.wait(Nanos::from_millis(5));
    }
    while sockets.receive(socket, &mut [0; 1]) != Received::Bytes(1) {
        sockets.wait(Nanos::from_millis(5));
        assert!(clock::now().since(start) < Nanos::from_secs(20), "no echo");
    }
    clock::now().since(start)
}

#[test]
fn an_idle_reactor_uses_no_core_and_wakes_for_the_first_byte() {
    let stop = Arc::new(AtomicBool::new(false));
    let running = start_echo(Polling::default(), &stop);
    let mut sockets = RealSockets::new().unwrap();
    let socket = sockets.connect(running.address).unwrap();
    ping(&mut sockets, socket);
    let mut first = Vec::new();
    for _ in 0..10 {
        // A pause much longer than the reactor spins: it sleeps.
        let until = clock::now() + Nanos::from_millis(50);
        while clock::now() < until {
            sockets.wait(until.since(clock::now()));
        }
        first.push(ping(&mut sockets, socket));
    }
    first.sort();
    stop.store(true, Ordering::Release);
    running.doorbell.ring();
    let (lived, cpu, sleeps) = running.thread.join().unwrap();
    println!("first byte after a pause: {first:?}; {cpu:?} of {lived:?}; {sleeps} sleeps");
    assert!(sleeps >= 10);
    assert!(first[5] < Nanos::from_millis(5), "half of the first bytes took longer than {:?}", first[5]);
    assert!(cpu.0 * 100 < lived.0, "idle, it used {cpu:?} of {lived:?}");
}

#[test]
fn a_sleeping_reactor_wakes_for_timers_and_for_its_device() {
    for driver in drivers() {
        let scratch = Scratch::new(&format!("wakes-{driver:?}"));
        let (mut echo, _) = Echo::new(Polling::Sleep, driver);
        let channel = echo.handle.channel();
        let file = channel.open(&scratch.media).unwrap();
        let rounds = std::rc::Rc::new(std::cell::Cell::new(0));
        let (handle, counted) = (echo.handle.clone(), std::rc::Rc::clone(&rounds));
        echo.turn();
        let media_bytes = scratch.media.size_bytes;
        echo.handle.spawn(async move {
            let mut buffer = Buffer::zeroed(1 << 20);
            for round in 0..100 {
                let read = Operation::Read { offset: (round << 20) % media_bytes, buffer };
                buffer = channel.submit(file, read).await.buffer.unwrap();
                assert_eq!(channel.submit(file, Operation::Flush).await.result, Ok(()));
                handle.sleep(Nanos::from_micros(200)).await;
                counted.set(round + 1);
            }
        });
        while rounds.get() < 100 {
            if !echo.turn() {
                let soon = echo.handle.now() + Nanos::from_secs(5);
                let next = echo.handle.next_deadline().min(soon);
                echo.idle.rest(false, echo.handle.now(), false, next, &mut echo.sockets);
                assert!(clock::now() < soon, "after round {}, nothing woke it", rounds.get());
            }
        }
        assert!(echo.idle.sleeps() >= 100, "{driver:?} slept {} times", echo.idle.sleeps());
    }
}

#[test]
fn no_wake_up_by_a_device_is_lost() {
    const ROUNDS: u64 = 20_000;
    for driver in drivers() {
        let scratch = Scratch::new(&format!("lost-{driver:?}"));
        let (mut echo, _) = Echo::new(Polling::Sleep, driver);
        let channel = echo.handle.channel();
        let file = channel.open(&scratch.media).unwrap();
        let blocks = scratch.media.size_bytes / 4096;
        let answered = std::rc::Rc::new(std::cell::Cell::new(0));
        // Several at a time, so that answers meet in every window: while the core looks, while it goes to sleep.
        for task in 0..3 {
            let (channel, answered) = (channel.clone(), std::rc::Rc::clone(&answered));
            echo.handle.spawn(async move {
                let mut buffer = Buffer::zeroed(4096);
                for round in 0..ROUNDS / 3 {
                    let read = Operation::Read { offset: (round * 7 + task) % blocks * 4096, buffer };
                    buffer = channel.submit(file, read).await.buffer.unwrap();
                    if round % 8 == 0 {
                        // Reads of blocks that were never written may be over at once; a flush is waited for.
                        assert_eq!(channel.submit(file, Operation::Flush).await.result, Ok(()));
                    }
                    answered.set(answered.get() + 1);
                }
            });
        }
        let mut random = Random::new(9);
        for turn in 0.. {
            if answered.get() == ROUNDS / 3 * 3 {
                break;
            }
            let busy = echo.turn();
            // Half of the time answers come while the core looks elsewhere, half of the time while it sleeps.
            if turn / 64 % 2 == 0 {
                dawdle(&mut random);
            }
            if !busy {
                sleep(&mut echo.idle, &mut echo.sockets);
            }
        }
        assert!(echo.idle.sleeps() > 0, "{driver:?} never slept");
    }
}

/// Sleeps until rung. A sleep that only its timer ended is a lost wake-up.
fn sleep(idle: &mut Idle, sockets: &mut RealSockets) {
    let before = clock::now();
    idle.rest(false, before, false, before + Nanos::from_secs(5), sockets);
    let slept = clock::now().since(before);
    assert!(slept < Nanos::from_secs(4), "a sleep of {slept:?}: a wake-up was lost");
}

/// Lets a random moment pass, so that whatever the other core does falls into every window of ours.
fn dawdle(random: &mut Random) {
    let span = Nanos(random.below(20_000));
    let start = clock::now();
    while clock::now().since(start) < span {}
}

const STROKES: u64 = 20_000;

/// One side of a game of ping-pong between two cores by mailbox; strokes alternate, and each side
/// sleeps while the other plays.
fn play(mut mailbox: Mailbox<u64>, me: usize, doorbell: Arc<Doorbell>) {
    let mut sockets = RealSockets::new().unwrap();
    let mut idle = Idle::new(Polling::Sleep, Arc::clone(&doorbell), &mut sockets, None).unwrap();
    let mut random = Random::new(me as u64);
    let mut expected = 1 - me as u64;
    if me == 0 {
        mailbox.send(1, 0).unwrap();
    }
    while expected < STROKES {
        doorbell.begin_turn();
        let received = mailbox.receive();
        dawdle(&mut random);
        match received {
            Some(stroke) => {
                assert_eq!(stroke, expected);
                mailbox.send(1 - me, stroke + 1).unwrap();
                expected += 2;
            }
            None => sleep(&mut idle, &mut sockets),
        }
    }
}

#[test]
fn no_wake_up_between_cores_is_lost() {
    let doorbells: Vec<_> = (0..2).map(|_| Doorbell::new().unwrap()).collect();
    let mut boxes = mesh::<u64>(&doorbells, 16);
    let (other_box, own_box) = (boxes.pop().unwrap(), boxes.pop().unwrap());
    let other_bell = Arc::clone(&doorbells[1]);
    let other = thread::spawn("pong", move || play(other_box, 1, other_bell)).unwrap();
    play(own_box, 0, Arc::clone(&doorbells[0]));
    other.join().unwrap();
}

#[test]
fn no_wake_up_of_a_task_by_another_core_is_lost() {
    const ROUNDS: u64 = 20_000;
    let doorbell = Doorbell::new().unwrap();
    let (give, wakers) = mpsc::channel::<std::task::Waker>();
    let published = Arc::new(AtomicU64::new(0));
    let publisher = Arc::clone(&published);
    let other = thread::spawn("waker", move || {
        let mut random = Random::new(7);
        for (round, waker) in (1..).zip(wakers) {
            dawdle(&mut random);
            publisher.store(round, Ordering::Release);
            waker.wake();
        }
    })
    .unwrap();
    let mut sockets = RealSockets::new().unwrap();
    let mut idle = Idle::new(Polling::Sleep, Arc::clone(&doorbell), &mut sockets, None).unwrap();
    let mut tasks = Tasks::new(100, Arc::clone(&doorbell));
    let mut random = Random::new(8);
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
        doorbell.begin_turn();
        let busy = tasks.poll_ready() > 0;
        dawdle(&mut random);
        if !busy {
            sleep(&mut idle, &mut sockets);
        }
    }
    other.join().unwrap();
    assert_eq!(published.load(Ordering::Acquire), ROUNDS);
}

#[test]
fn reactors_run_on_their_cores_and_time_is_accounted_by_stage() {
    let cores = thread::cores();
    let body = |index: usize| {
        let busy = Busy::real();
        let reader = busy.reader();
        let work = || {
            let start = clock::now();
            while clock::now().since(start) < Nanos::from_millis(5) {}
        };
        work();
        busy.lap(Stage::Kv, true);
        work();
        busy.lap(Stage::Target, false);
        (index, thread::current_core(), reader.spent())
    };
    let started = octokv_runtime::kernel::spawn_reactors(&cores, body).unwrap();
    for (index, reactor) in started.into_iter().enumerate() {
        let (number, core, spent) = reactor.join().unwrap();
        assert_eq!((number, core), (index, cores[index]));
        let (kv, idle) = (spent[Stage::Kv as usize], spent[Stage::Idle as usize]);
        assert!(kv >= Nanos::from_micros(4_500) && idle >= Nanos::from_micros(4_500), "{spent:?}");
        assert_eq!(spent[Stage::Target as usize], Nanos::ZERO);
    }
}
