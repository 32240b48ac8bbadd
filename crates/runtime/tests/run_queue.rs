//! The run queue of the simulation: a reactor runs when it is due or woken, and at no other time.

use octokv_base::{Buffer, Nanos};
use octokv_runtime::simulated::{
    HostFailure, IterationCounts, SimDiskConfig, SimEnv, SimEnvConfig, SimHostId, SimLinkConfig,
    SimReactorId, SimSockets,
};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceHandle, IoOperation, ListenerId, ReactorHandle, ReceiveStatus, SendStatus,
    SocketId, Sockets, Stage, delayed_mesh, mesh,
};
use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes take 10 µs.
const LINK: SimLinkConfig = SimLinkConfig {
    latency: Nanos(10_000),
    jitter: Nanos::ZERO,
    bytes_per_second: 0,
    window_bytes: 1_000,
    fragments: false,
};
/// The shortest busy time.
const ITERATION: Nanos = Nanos(500);
/// Later than everything in these tests.
const END: Nanos = Nanos::from_secs(10);

fn new_env() -> (SimEnv, SimHostId) {
    let env = SimEnv::new(SimEnvConfig { link: LINK, iteration_cost_min: ITERATION, ..SimEnvConfig::new(1) });
    let host = env.add_host();
    (env, host)
}

fn handle_of(env: &SimEnv, host: SimHostId, core_waker: &Arc<CoreWaker>) -> ReactorHandle {
    let devices = DeviceHandle::new(Box::new(env.device_queue(host)), 8);
    ReactorHandle::new(Arc::clone(core_waker), devices, CpuTime::simulated())
}

/// A reactor that notes when it runs.
struct TestReactor {
    id: SimReactorId,
    handle: ReactorHandle,
    runs: Rc<RefCell<Vec<Nanos>>>,
}

impl TestReactor {
    /// Adds a reactor whose iterations call `body`, after `begin_iteration`.
    fn add(
        env: &SimEnv,
        host: SimHostId,
        body: impl FnMut(&ReactorHandle, Nanos) -> bool + 'static,
    ) -> TestReactor {
        TestReactor::add_core(env, host, &CoreWaker::without_eventfd(), body)
    }

    fn add_core(
        env: &SimEnv,
        host: SimHostId,
        core_waker: &Arc<CoreWaker>,
        mut body: impl FnMut(&ReactorHandle, Nanos) -> bool + 'static,
    ) -> TestReactor {
        let handle = handle_of(env, host, core_waker);
        let runs: Rc<RefCell<Vec<Nanos>>> = Rc::default();
        let (own, times) = (handle.clone(), Rc::clone(&runs));
        let id = env.add_reactor(host, handle.clone(), move |now| {
            times.borrow_mut().push(now);
            let fired = own.begin_iteration(now) > 0;
            fired | body(&own, now)
        });
        TestReactor { id, handle, runs }
    }

    fn runs(&self) -> Vec<u64> {
        self.runs.borrow().iter().map(|at| at.0).collect()
    }
}

/// A listener of one host and a connection to it from another, both established.
struct Connected {
    env: SimEnv,
    hosts: [SimHostId; 2],
    client: (SimSockets, SocketId),
    server: (SimSockets, SocketId),
}

fn connected() -> Connected {
    let (env, server_host) = new_env();
    let client_host = env.add_host();
    let (mut client, mut server) = (env.sockets(client_host), env.sockets(server_host));
    let (listener, address) = server.listen(SocketAddr::new(env.address(server_host), 4420)).unwrap();
    let socket = client.connect(address).unwrap();
    env.run_until(Nanos(50_000));
    let (accepted, _) = server.accept(listener).unwrap();
    Connected { env, hosts: [client_host, server_host], client: (client, socket), server: (server, accepted) }
}

/// A reactor that receives everything on a socket.
fn add_receiver(env: &SimEnv, host: SimHostId, (mut sockets, socket): (SimSockets, SocketId)) -> TestReactor {
    TestReactor::add(env, host, move |_, _| {
        matches!(sockets.receive(socket, &mut [0; 2_000]), ReceiveStatus::Bytes(_))
    })
}

#[test]
fn an_idle_reactor_is_run_once_whatever_others_do() {
    let (env, host) = new_env();
    let idle: Vec<TestReactor> = (0..100).map(|_| TestReactor::add(&env, host, |_, _| false)).collect();
    let busy = TestReactor::add(&env, host, |_, now| now < Nanos::from_millis(1));
    env.run_until(END);
    assert_eq!(env.iteration_counts(busy.id), IterationCounts { busy: 2_000, idle: 1 });
    for reactor in idle {
        assert_eq!(env.iteration_counts(reactor.id), IterationCounts { busy: 0, idle: 1 });
    }
}

#[test]
fn a_reactor_that_did_work_runs_again_at_the_end_of_its_busy_time() {
    let (env, host) = new_env();
    let reactor = TestReactor::add(&env, host, |handle, now| {
        // The second iteration costs less than an iteration does at least.
        handle.cpu_time().advance_simulated(Stage::Kv, if now.0 == 0 { Nanos(3_000) } else { Nanos(1) });
        now < Nanos(3_500)
    });
    env.run_until(END);
    assert_eq!(reactor.runs(), [0, 3_000, 3_500]);
}

#[test]
fn a_notification_during_the_busy_time_is_seen_at_its_end() {
    let (env, host) = new_env();
    let reactor = TestReactor::add(&env, host, |handle, now| {
        handle.cpu_time().advance_simulated(Stage::Kv, Nanos(3_000));
        now == Nanos::ZERO
    });
    let core_waker = Arc::clone(reactor.handle.core_waker());
    env.schedule_at(Nanos(1_000), move || core_waker.notify());
    env.run_until(END);
    assert_eq!(reactor.runs(), [0, 3_000], "once, and then it sleeps");
}

#[test]
fn bytes_that_arrive_during_the_busy_time_are_seen_at_its_end() {
    let Connected { env, hosts, client: (mut client, socket), server: (mut server, accepted) } = connected();
    let reactor = TestReactor::add(&env, hosts[1], move |handle, now| {
        handle.cpu_time().advance_simulated(Stage::Target, Nanos(30_000));
        matches!(server.receive(accepted, &mut [0; 9]), ReceiveStatus::Bytes(_)) || now == Nanos(50_000)
    });
    assert_eq!(client.send(socket, &[IoSlice::new(b"bytes")]), SendStatus::Bytes(5));
    env.run_until(END);
    assert_eq!(reactor.runs(), [50_000, 80_000, 110_000]);
}

#[test]
fn a_deadline_ends_the_sleep_and_one_that_has_passed_is_tried_again_a_little_later() {
    let (env, host) = new_env();
    let reactor = TestReactor::add(&env, host, |handle, now| {
        let next = if now < Nanos(7_000) { Nanos(5_000) } else { Nanos::NEVER };
        handle.request_wakeup_at(next);
        false
    });
    env.run_until(END);
    assert_eq!(reactor.runs(), [0, 5_000, 6_000, 7_000]);
}

#[test]
fn a_timer_of_a_task_ends_the_sleep() {
    let (env, host) = new_env();
    let reactor = TestReactor::add(&env, host, |handle, _| handle.poll_background() > 0);
    let (handle, ended_at) = (reactor.handle.clone(), Rc::new(Cell::new(Nanos::ZERO)));
    let ended = Rc::clone(&ended_at);
    env.run_until(Nanos(100));
    // From outside of an iteration: `spawn` notifies.
    reactor.handle.spawn(async move {
        handle.sleep(Nanos(40_000)).await;
        ended.set(handle.now());
    });
    env.run_until(END);
    assert_eq!(ended_at.get(), Nanos(40_100));
    assert_eq!(reactor.runs(), [0, 100, 600, 40_100, 40_600]);
}

#[test]
fn a_message_wakes_its_receiver_at_once_and_no_other_core() {
    let (env, host) = new_env();
    let core_wakers: Vec<_> = (0..3).map(|_| CoreWaker::without_eventfd()).collect();
    let cores: Vec<TestReactor> = mesh::<u8>(&core_wakers, 4)
        .into_iter()
        .enumerate()
        .map(|(core, mut mailbox)| {
            TestReactor::add_core(&env, host, &core_wakers[core], move |handle, now| {
                if core == 0 && now == Nanos::ZERO {
                    handle.request_wakeup_at(Nanos(9_000));
                } else if core == 0 && now == Nanos(9_000) {
                    handle.request_wakeup_at(Nanos::NEVER);
                    assert_eq!(mailbox.send(2, 7), Ok(()));
                }
                mailbox.receive().is_some()
            })
        })
        .collect();
    env.run_until(END);
    let runs: Vec<_> = cores.iter().map(TestReactor::runs).collect();
    assert_eq!(runs, [vec![0, 9_000], vec![0], vec![0, 9_000, 9_500]]);
}

#[test]
fn a_delayed_message_wakes_its_receiver_when_it_is_delivered() {
    let (env, host) = new_env();
    let core_wakers: Vec<_> = (0..2).map(|_| CoreWaker::without_eventfd()).collect();
    let (mut mailboxes, mut delayed) = delayed_mesh::<u8>(&core_wakers, 4);
    let mut receiving = mailboxes.remove(1);
    let received_at = Rc::new(Cell::new(Nanos::ZERO));
    let received = Rc::clone(&received_at);
    TestReactor::add_core(&env, host, &core_wakers[1], move |_, now| {
        let message = receiving.receive();
        if message.is_some() {
            received.set(now);
        }
        message.is_some()
    });
    assert_eq!(mailboxes[0].send(1, 7), Ok(()));
    env.schedule_at(Nanos(9_000), move || {
        let (to, message) = delayed.take_sent(0).unwrap();
        assert_eq!(delayed.deliver(0, to, message), Ok(()));
    });
    env.run_until(END);
    assert_eq!(received_at.get(), Nanos(9_000));
}

#[test]
fn a_core_that_was_notified_in_its_last_iteration_does_not_sleep() {
    let (env, host) = new_env();
    let spawned = Rc::new(Cell::new(0));
    let ran = Rc::clone(&spawned);
    let reactor = TestReactor::add(&env, host, move |handle, _| {
        let polled = handle.poll_background() > 0;
        if ran.get() == 0 {
            let ran = Rc::clone(&ran);
            ran.set(1);
            handle.spawn(async move { ran.set(2) });
        }
        polled
    });
    env.run_until(END);
    assert_eq!((spawned.get(), reactor.runs()), (2, vec![0, 0, 500]));
}

#[test]
fn a_forgotten_notification_is_a_hang() {
    let (env, host) = new_env();
    let published = Rc::new(Cell::new(false));
    let seen = Rc::new(Cell::new(false));
    let (flag, note) = (Rc::clone(&published), Rc::clone(&seen));
    let reactor = TestReactor::add(&env, host, move |_, _| flag.get() && !note.replace(true));
    env.schedule_at(Nanos(1_000), move || published.set(true));
    env.run_until(END);
    assert!(!seen.get(), "nothing wakes the reactor");
    reactor.handle.core_waker().notify();
    env.run_until(END);
    assert!(seen.get());
}

#[test]
fn bytes_wake_the_reactor_of_their_socket_when_they_arrive() {
    let Connected { env, hosts, client: (mut client, socket), server } = connected();
    let receiver = add_receiver(&env, hosts[1], server);
    let other = TestReactor::add(&env, hosts[1], |_, _| false);
    env.run_until(Nanos(60_000));
    assert_eq!(client.send(socket, &[IoSlice::new(b"bytes")]), SendStatus::Bytes(5));
    env.run_until(END);
    assert_eq!(receiver.runs(), [50_000, 70_000, 70_500]);
    assert_eq!(other.runs(), [50_000]);
}

#[test]
fn bytes_that_are_left_in_a_socket_cause_no_second_edge() {
    let Connected { env, hosts, client: (mut client, socket), server: (mut server, accepted) } = connected();
    let reactor = TestReactor::add(&env, hosts[1], move |_, _| {
        // Receives a part and forgets to return that it worked.
        server.receive(accepted, &mut [0; 2]);
        false
    });
    env.run_until(Nanos(60_000));
    assert_eq!(client.send(socket, &[IoSlice::new(b"bytes")]), SendStatus::Bytes(5));
    env.run_until(END);
    assert_eq!(reactor.runs(), [50_000, 70_000]);
}

#[test]
fn the_end_of_a_stream_wakes_the_reactor_of_the_other_end() {
    for reset in [false, true] {
        let Connected { env, hosts, client: (mut client, socket), server: (mut server, accepted) } =
            connected();
        let ended_at = Rc::new(Cell::new(Nanos::ZERO));
        let ended = Rc::clone(&ended_at);
        TestReactor::add(&env, hosts[1], move |_, now| {
            if server.receive(accepted, &mut [0; 2]) == ReceiveStatus::Closed {
                ended.set(now);
            }
            false
        });
        env.run_until(Nanos(60_000));
        if reset {
            env.reset_streams(hosts[0], hosts[1]);
        } else {
            client.close(socket);
        }
        env.run_until(END);
        assert_eq!(ended_at.get(), Nanos(if reset { 60_000 } else { 70_000 }));
    }
}

#[test]
fn space_in_the_window_wakes_a_blocked_sender() {
    let Connected { env, hosts, client: (mut client, socket), server: (mut server, accepted) } = connected();
    let sent = Rc::new(Cell::new(0));
    let count = Rc::clone(&sent);
    let sender = TestReactor::add(&env, hosts[0], move |_, _| {
        let SendStatus::Bytes(bytes) = client.send(socket, &[IoSlice::new(&[7; 600])]) else { return false };
        count.set(count.get() + bytes);
        true
    });
    env.run_until(Nanos(100_000));
    assert_eq!((sent.get(), sender.runs()), (1_000, vec![50_000, 50_500, 51_000]));
    assert_eq!(server.receive(accepted, &mut [0; 400]), ReceiveStatus::Bytes(400));
    env.run_until(Nanos(200_000));
    assert_eq!((sent.get(), sender.runs()[3..].to_vec()), (1_400, vec![100_000, 100_500]));
    // A wider window is space, too.
    env.set_link(hosts[0], hosts[1], SimLinkConfig { window_bytes: 1_100, ..LINK });
    env.run_until(END);
    assert_eq!((sent.get(), sender.runs()[5..].to_vec()), (1_500, vec![200_000, 200_500]));
}

#[test]
fn a_connection_wakes_the_listening_reactor_and_its_answer_the_connecting_one() {
    let (env, server_host) = new_env();
    let client_host = env.add_host();
    let mut server = env.sockets(server_host);
    let address = SocketAddr::new(env.address(server_host), 4420);
    let (listener, _): (ListenerId, _) = server.listen(address).unwrap();
    let listening = TestReactor::add(&env, server_host, move |_, _| server.accept(listener).is_some());
    for (port, answer) in [(4420, ReceiveStatus::WouldBlock), (4421, ReceiveStatus::Closed)] {
        let began = env.now();
        let mut client = env.sockets(client_host);
        let socket = client.connect(SocketAddr::new(address.ip(), port)).unwrap();
        let seen = Rc::new(RefCell::new(Vec::new()));
        let answers = Rc::clone(&seen);
        let connecting = TestReactor::add(&env, client_host, move |_, _| {
            answers.borrow_mut().push(client.receive(socket, &mut [0; 1]));
            false
        });
        env.run_until(began + Nanos::from_secs(1));
        let want = [began, began + Nanos(20_000)].map(|at| at.0);
        assert_eq!(connecting.runs(), want);
        assert_eq!(*seen.borrow(), [ReceiveStatus::WouldBlock, answer]);
    }
    assert_eq!(listening.runs(), [0, 10_000, 10_500], "a refused connection is none of its business");
}

#[test]
fn a_socket_wakes_the_core_that_it_was_moved_to() {
    let Connected { env, hosts, client: (mut client, socket), server: (mut server, accepted) } = connected();
    let moving = Rc::new(RefCell::new(None));
    let hand = Rc::clone(&moving);
    let first = TestReactor::add(&env, hosts[1], move |_, _| {
        if let Some(detached) = server.detach(accepted) {
            *hand.borrow_mut() = Some(detached);
        }
        false
    });
    let (mut sockets, hand) = (env.sockets(hosts[1]), Rc::clone(&moving));
    let mut own = None;
    let second = TestReactor::add(&env, hosts[1], move |_, now| {
        if now >= Nanos(80_000) && own.is_none() {
            own = hand.borrow_mut().take().map(|detached| sockets.attach(detached));
            // What has arrived meanwhile is an edge of its own.
            return false;
        }
        own.is_some_and(|own| matches!(sockets.receive(own, &mut [0; 9]), ReceiveStatus::Bytes(_)))
    });
    env.run_until(Nanos(60_000));
    for at in [60_000, 100_000] {
        env.run_until(Nanos(at));
        assert_eq!(client.send(socket, &[IoSlice::new(b"bytes")]), SendStatus::Bytes(5));
    }
    let core_waker = Arc::clone(second.handle.core_waker());
    env.schedule_at(Nanos(105_000), move || core_waker.notify());
    env.run_until(END);
    assert_eq!(first.runs(), [50_000], "it has no socket any more");
    assert_eq!(second.runs(), [50_000, 105_000, 105_000, 105_500, 110_000, 110_500]);
}

#[test]
fn a_completion_wakes_the_reactor_of_its_device_queue() {
    let (env, host) = new_env();
    let config = SimDiskConfig {
        write_latency: Nanos(30_000),
        jitter: Nanos::ZERO,
        bytes_per_second: 0,
        ..SimDiskConfig::default()
    };
    let disk = env.add_disk(host, config);
    let cores: [TestReactor; 2] = std::array::from_fn(|_| {
        TestReactor::add(&env, host, |handle, _| {
            let polled = handle.poll_background() + handle.devices().poll();
            polled + handle.poll_background() > 0
        })
    });
    let devices = cores[0].handle.devices();
    let file = devices.open(&env.device_source(disk)).unwrap();
    cores[0].handle.spawn(async move {
        let write = IoOperation::Write { offset: 0, buffer: Buffer::zeroed(4096) };
        assert_eq!(devices.submit(file, write).await.result, Ok(()));
    });
    env.run_until(END);
    assert_eq!(cores[0].runs(), [0, 500, 30_000, 30_500]);
    assert_eq!(cores[1].runs(), [0]);
}

#[test]
fn reactors_that_are_gone_are_not_woken() {
    let (env, host) = new_env();
    let other_host = env.add_host();
    let add = |host| {
        TestReactor::add(&env, host, |handle, _| {
            handle.request_wakeup_at(Nanos(5_000));
            false
        })
    };
    let (removed, stopped, kept) = (add(host), add(other_host), add(host));
    env.run_until(Nanos(1_000));
    for reactor in [&removed, &stopped] {
        reactor.handle.core_waker().notify();
    }
    env.remove_reactor(removed.id);
    env.stop_host(other_host, HostFailure::ProcessKilled);
    env.run_until(Nanos(5_000));
    assert_eq!([&removed, &stopped, &kept].map(TestReactor::runs), [vec![0], vec![0], vec![0, 5_000]]);
    assert_eq!(env.iteration_counts(removed.id), IterationCounts::default());
    env.remove_reactor(kept.id);
    assert!(!env.step(Nanos::NEVER), "its next deadline is gone with it");
}

#[test]
#[should_panic(expected = "a CoreWaker wakes one core")]
fn a_core_waker_of_two_reactors_is_refused() {
    let (env, host) = new_env();
    let core_waker = CoreWaker::without_eventfd();
    for _ in 0..2 {
        TestReactor::add_core(&env, host, &core_waker, |_, _| false);
    }
}
