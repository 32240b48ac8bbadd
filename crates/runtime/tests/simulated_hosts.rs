//! What the simulation does to one host: its clock, a pause of its processes, links cut one way, the loss of a disk.

use octokv_base::{Buffer, Nanos};
use octokv_runtime::simulated::{
    CrashModel, HostFailure, SimClock, SimDiskConfig, SimEnv, SimEnvConfig, SimHostId, SimLinkConfig,
    SimSockets,
};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceHandle, IoOperation, ReactorHandle, ReceiveStatus, SendStatus, SocketId,
    Sockets, block_on,
};
use std::cell::RefCell;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;

const LINK: SimLinkConfig = SimLinkConfig {
    latency: Nanos(10_000),
    jitter: Nanos::ZERO,
    bytes_per_second: 0,
    window_bytes: 1_000,
    fragments: false,
};
const SECOND: Nanos = Nanos::from_secs(1);

fn seconds(count: u64) -> Nanos {
    Nanos::from_secs(count)
}

fn new_env() -> SimEnv {
    SimEnv::new(SimEnvConfig { link: LINK, ..SimEnvConfig::new(1) })
}

/// Adds a reactor that calls `body` with the time of its host's clock.
fn add_reactor(
    env: &SimEnv,
    host: SimHostId,
    mut body: impl FnMut(&ReactorHandle, Nanos) -> bool + 'static,
) -> ReactorHandle {
    let devices = DeviceHandle::new(Box::new(env.device_queue(host)), 8);
    let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
    let own = handle.clone();
    env.add_reactor(host, handle.clone(), move |now| {
        let fired = own.begin_iteration(now) > 0;
        fired | body(&own, now)
    });
    handle
}

/// Adds a reactor that wakes once, at `deadline` of its clock. Notes the clock's and the simulation's time then.
fn add_alarm(env: &SimEnv, host: SimHostId, deadline: Nanos) -> Rc<RefCell<Vec<(Nanos, Nanos)>>> {
    let rang: Rc<RefCell<Vec<_>>> = Rc::default();
    let (times, sim) = (Rc::clone(&rang), env.clone());
    add_reactor(env, host, move |handle, now| {
        let is_over = now >= deadline;
        if is_over && times.borrow().is_empty() {
            times.borrow_mut().push((now, sim.now()));
        }
        handle.request_wakeup_at(if is_over { Nanos::NEVER } else { deadline });
        false
    });
    rang
}

#[test]
fn a_hosts_reactors_have_its_clocks_time_and_wake_by_it() {
    let env = new_env();
    let clocks = [
        (SimClock::default(), seconds(3)),
        (SimClock::new(SECOND, 0), seconds(2)),
        (SimClock::new(Nanos::ZERO, 500_000), seconds(2)),
        (SimClock::new(Nanos::ZERO, -500_000), seconds(6)),
    ];
    let alarms = clocks.map(|(clock, rings_at)| {
        let host = env.add_host();
        env.set_clock(host, clock);
        (add_alarm(&env, host, seconds(3)), rings_at)
    });
    env.run_until(seconds(10));
    for (rang, rings_at) in alarms {
        assert_eq!(*rang.borrow(), [(seconds(3), rings_at)]);
    }
}

#[test]
fn a_change_of_drift_moves_the_deadline_of_a_sleeping_reactor() {
    // Of 3 s, 1.5 s are left.
    for (drift_ppm, rings_at) in [(-500_000, Nanos::from_millis(4_500)), (500_000, Nanos::from_millis(2_500))]
    {
        let env = new_env();
        let host = env.add_host();
        let rang = add_alarm(&env, host, seconds(3));
        env.run_until(Nanos::from_millis(1_500));
        env.set_clock_drift(host, drift_ppm);
        env.run_until(seconds(10));
        assert_eq!(*rang.borrow(), [(seconds(3), rings_at)]);
    }
}

#[test]
fn a_paused_host_runs_no_reactor_and_then_sees_that_time_has_passed() {
    let env = new_env();
    let [paused, other] = [env.add_host(), env.add_host()];
    let [rang, unaffected] = [paused, other].map(|host| add_alarm(&env, host, seconds(3)));
    env.run_until(seconds(2));
    env.set_paused(paused, true);
    env.run_until(seconds(5));
    assert!(env.is_paused(paused) && rang.borrow().is_empty());
    env.set_paused(paused, false);
    env.run_until(seconds(10));
    assert_eq!(*rang.borrow(), [(seconds(5), seconds(5))]);
    assert_eq!(*unaffected.borrow(), [(seconds(3), seconds(3))]);
}

#[test]
fn a_busy_reactor_that_is_paused_and_resumed_stays_busy_for_its_time() {
    let env = new_env();
    let host = env.add_host();
    let runs: Rc<RefCell<Vec<Nanos>>> = Rc::default();
    let times = Rc::clone(&runs);
    add_reactor(&env, host, move |handle, now| {
        times.borrow_mut().push(now);
        handle.cpu_time().advance_simulated(octokv_runtime::Stage::Kv, SECOND);
        now < SECOND
    });
    env.run_until(Nanos(1_000));
    env.set_paused(host, true);
    env.run_until(Nanos(2_000));
    env.set_paused(host, false);
    env.run_until(seconds(5));
    assert_eq!(*runs.borrow(), [Nanos::ZERO, SECOND]);
}

/// Two hosts with a stream between them.
struct Pair {
    env: SimEnv,
    hosts: [SimHostId; 2],
    ends: [(SimSockets, SocketId); 2],
}

impl Pair {
    fn new() -> Pair {
        let env = new_env();
        let hosts = [env.add_host(), env.add_host()];
        let [mut client, mut server] = hosts.map(|host| env.sockets(host));
        let (listener, address) = server.listen(SocketAddr::new(env.address(hosts[1]), 4420)).unwrap();
        let socket = client.connect(address).unwrap();
        env.run_until(Nanos(50_000));
        let (accepted, _) = server.accept(listener).unwrap();
        Pair { env, hosts, ends: [(client, socket), (server, accepted)] }
    }

    fn send(&mut self, from: usize) -> SendStatus {
        let (sockets, socket) = &mut self.ends[from];
        sockets.send(*socket, &[IoSlice::new(b"bytes")])
    }

    fn receive(&mut self, at: usize) -> ReceiveStatus {
        let (sockets, socket) = &mut self.ends[at];
        sockets.receive(*socket, &mut [0; 100])
    }

    fn advance(&self, span: Nanos) {
        self.env.run_until(self.env.now() + span);
    }
}

#[test]
fn a_link_cut_one_way_delays_that_direction_alone() {
    let mut pair = Pair::new();
    let [client, server] = pair.hosts;
    pair.env.set_cut(client, server, true);
    assert_eq!((pair.send(0), pair.send(1)), (SendStatus::Bytes(5), SendStatus::Bytes(5)));
    pair.advance(SECOND);
    assert_eq!((pair.receive(1), pair.receive(0)), (ReceiveStatus::WouldBlock, ReceiveStatus::Bytes(5)));
    // A handshake needs both directions.
    for host in [client, server] {
        let mut sockets = pair.env.sockets(host);
        let to = SocketAddr::new(pair.env.address(if host == client { server } else { client }), 4420);
        let socket = sockets.connect(to).unwrap();
        pair.advance(seconds(3));
        assert_eq!(sockets.receive(socket, &mut [0; 1]), ReceiveStatus::Closed, "{host:?}");
    }
    pair.env.set_cut(client, server, false);
    pair.advance(SECOND);
    assert_eq!(pair.receive(1), ReceiveStatus::Bytes(5));
}

#[test]
fn a_paused_host_receives_what_arrived_meanwhile() {
    let mut pair = Pair::new();
    pair.env.set_paused(pair.hosts[1], true);
    let [_, server] = pair.hosts;
    assert_eq!(pair.send(0), SendStatus::Bytes(5));
    let (mut sockets, socket) = std::mem::replace(&mut pair.ends[1], (pair.env.sockets(server), SocketId(0)));
    let received: Rc<RefCell<Vec<(Nanos, ReceiveStatus)>>> = Rc::default();
    let seen = Rc::clone(&received);
    add_reactor(&pair.env, server, move |_, now| {
        let status = sockets.receive(socket, &mut [0; 100]);
        seen.borrow_mut().push((now, status));
        matches!(status, ReceiveStatus::Bytes(_))
    });
    pair.advance(SECOND);
    assert!(received.borrow().is_empty());
    let resumed_at = pair.env.now();
    pair.env.set_paused(server, false);
    pair.advance(SECOND);
    assert_eq!(received.borrow()[0], (resumed_at, ReceiveStatus::Bytes(5)));
}

#[test]
fn a_stopped_host_is_not_paused_when_it_starts() {
    let env = new_env();
    let host = env.add_host();
    env.set_paused(host, true);
    env.stop_host(host, HostFailure::ProcessKilled);
    env.start_host(host);
    let rang = add_alarm(&env, host, SECOND);
    env.run_until(seconds(2));
    assert_eq!(rang.borrow().len(), 1);
}

#[test]
fn a_lost_disk_fails_everything_and_its_replacement_is_empty() {
    let env = new_env();
    let host = env.add_host();
    let disk = env.add_disk(host, SimDiskConfig { size_bytes: 1 << 20, ..SimDiskConfig::default() });
    let run = |operation: fn(Buffer) -> IoOperation, lose: bool| {
        let devices = DeviceHandle::new(Box::new(env.device_queue(host)), 8);
        let file = devices.open(&env.device_source(disk)).unwrap();
        let mut buffer = Buffer::zeroed(4096);
        buffer.fill(7);
        let future = devices.submit(file, operation(buffer));
        if lose {
            env.lose_disk(disk);
        }
        let done = block_on(future, || {
            if devices.poll() == 0 {
                assert!(env.step(Nanos::NEVER));
            }
        });
        (done.result, done.buffer.map(|buffer| buffer[0]))
    };
    let write = |buffer| IoOperation::Write { offset: 0, buffer };
    let read = |buffer| IoOperation::Read { offset: 0, buffer };
    assert_eq!(run(write, false), (Ok(()), Some(7)));
    assert_eq!(run(|_| IoOperation::Flush, false).0, Ok(()));
    assert_eq!(run(read, true).0, Err(5), "an operation in flight fails too");
    for operation in [write, read, |_| IoOperation::Flush, |_| IoOperation::Trim { offset: 0, bytes: 4096 }] {
        assert_eq!(run(operation, false).0, Err(5));
    }
    env.stop_host(host, HostFailure::PowerLoss(CrashModel::KeepAll));
    env.start_host(host);
    assert_eq!(run(read, false).0, Err(5), "lost for good");
    env.stop_host(host, HostFailure::ProcessKilled);
    env.replace_disk(disk);
    env.start_host(host);
    assert_eq!(run(read, false), (Ok(()), Some(0)));
}
