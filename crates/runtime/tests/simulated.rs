//! The simulation: it is reproducible, its links and disks behave as configured, and a crash leaves disk contents that
//! the crash model allows.

use octokv_base::{Buffer, Nanos, Prng};
use octokv_runtime::simulated::{
    CrashModel, HostFailure, SECTOR_BYTES, SimDiskConfig, SimDiskId, SimEnv, SimEnvConfig, SimHostId,
    SimLinkConfig, SimSockets,
};
use octokv_runtime::{
    CoreWaker, CpuTime, DeviceHandle, IoOperation, ListenerId, ReactorHandle, ReceiveStatus, SendStatus,
    SocketId, Sockets, Stage, mesh,
};
use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;

const QUIET: SimLinkConfig = SimLinkConfig {
    latency: Nanos(10_000),
    jitter: Nanos::ZERO,
    bytes_per_second: 0,
    window_bytes: 65_536,
    fragments: false,
};

fn quiet_env() -> (SimEnv, SimHostId, SimHostId) {
    let env = SimEnv::new(SimEnvConfig { link: QUIET, ..SimEnvConfig::new(1) });
    let (a, b) = (env.add_host(), env.add_host());
    (env, a, b)
}

/// The sockets of two hosts with a stream between them.
struct Pair {
    env: SimEnv,
    client_host: SimHostId,
    server_host: SimHostId,
    client: (SimSockets, SocketId),
    server: (SimSockets, SocketId),
    listener: ListenerId,
    address: SocketAddr,
}

impl Pair {
    fn new() -> Pair {
        let (env, client_host, server_host) = quiet_env();
        let (mut client, mut server) = (env.sockets(client_host), env.sockets(server_host));
        let (listener, address) = server.listen(SocketAddr::new(env.address(server_host), 4420)).unwrap();
        let socket = client.connect(address).unwrap();
        assert_eq!(client.send(socket, &[IoSlice::new(b"early")]), SendStatus::WouldBlock);
        env.run_until(Nanos(20_000));
        let (accepted, peer) = server.accept(listener).unwrap();
        assert_eq!(peer.ip(), env.address(client_host));
        let (client, server) = ((client, socket), (server, accepted));
        Pair { env, client_host, server_host, client, server, listener, address }
    }

    fn send(&mut self, bytes: &[u8]) -> SendStatus {
        self.client.0.send(self.client.1, &[IoSlice::new(bytes)])
    }

    fn received(&mut self) -> Vec<u8> {
        let mut got = Vec::new();
        let mut chunk = [0; 1000];
        while let ReceiveStatus::Bytes(count) = self.server.0.receive(self.server.1, &mut chunk) {
            got.extend_from_slice(&chunk[..count]);
        }
        got
    }

    fn receive_at_server(&mut self) -> ReceiveStatus {
        self.server.0.receive(self.server.1, &mut [0; 1])
    }

    fn receive_at_client(&mut self) -> ReceiveStatus {
        self.client.0.receive(self.client.1, &mut [0; 1])
    }

    fn advance(&self, span: u64) {
        self.env.run_until(self.env.now() + Nanos(span));
    }
}

#[test]
fn scheduled_calls_run_at_their_time_in_the_order_they_were_scheduled() {
    let (env, ..) = quiet_env();
    let seen: Rc<RefCell<Vec<(u32, Nanos)>>> = Rc::default();
    let note = |number: u32| {
        let (seen, env) = (Rc::clone(&seen), env.clone());
        move || seen.borrow_mut().push((number, env.now()))
    };
    env.schedule_at(Nanos(50), note(1));
    env.schedule_at(Nanos(20), note(2));
    let (again, later) = (env.clone(), note(4));
    env.schedule_at(Nanos(50), note(3));
    env.schedule_at(Nanos(60), move || again.schedule_at(Nanos(5), later));
    env.run_until(Nanos(100));
    let want = [(2, 20), (1, 50), (3, 50), (4, 60)].map(|(number, at)| (number, Nanos(at)));
    assert_eq!(*seen.borrow(), want, "a call at a past time runs now");
}

#[test]
fn bytes_take_the_latency_of_the_link_and_no_longer() {
    let mut pair = Pair::new();
    assert_eq!(pair.send(b"hello"), SendStatus::Bytes(5));
    pair.advance(9_999);
    assert_eq!(pair.received(), b"");
    pair.advance(1);
    assert_eq!(pair.received(), b"hello");
}

#[test]
fn a_link_of_limited_bandwidth_delays_by_the_bytes_before() {
    let mut pair = Pair::new();
    let link = SimLinkConfig { bytes_per_second: 1_000_000, ..QUIET }; // One byte in a microsecond.
    pair.env.set_link(pair.client_host, pair.server_host, link);
    assert_eq!(pair.send(&[1; 100]), SendStatus::Bytes(100));
    assert_eq!(pair.send(&[2; 50]), SendStatus::Bytes(50));
    pair.advance(100_000 + 9_999);
    assert_eq!(pair.received().len(), 0);
    pair.advance(1);
    assert_eq!(pair.received(), [1; 100]);
    pair.advance(50_000);
    assert_eq!(pair.received(), [2; 50]);
}

#[test]
fn a_full_window_is_back_pressure_until_the_peer_reads() {
    let mut pair = Pair::new();
    assert_eq!(pair.send(&[7; 100_000]), SendStatus::Bytes(65_536));
    assert_eq!(pair.send(&[7; 1]), SendStatus::WouldBlock);
    pair.advance(10_000);
    assert_eq!(pair.send(&[7; 1]), SendStatus::WouldBlock, "arrived, not read");
    assert_eq!(pair.received().len(), 65_536);
    assert_eq!(pair.send(&[7; 1]), SendStatus::Bytes(1));
}

#[test]
fn fragments_arrive_separately_and_in_order() {
    let mut pair = Pair::new();
    let link = SimLinkConfig { fragments: true, jitter: Nanos(5_000), ..QUIET };
    pair.env.set_link(pair.client_host, pair.server_host, link);
    let mut sent = vec![0; 60_000];
    Prng::new(4).fill(&mut sent);
    for chunk in sent.chunks(1000) {
        assert_eq!(pair.send(chunk), SendStatus::Bytes(1000));
    }
    let (mut got, mut short) = (Vec::new(), 0);
    while got.len() < sent.len() {
        pair.advance(500);
        let mut chunk = [0; 1000];
        if let ReceiveStatus::Bytes(count) = pair.server.0.receive(pair.server.1, &mut chunk) {
            got.extend_from_slice(&chunk[..count]);
            short += usize::from(count < 1000);
        }
    }
    assert!(got == sent && short > 10, "{short} short receives");
}

#[test]
fn a_partition_delays_and_loses_nothing() {
    let mut pair = Pair::new();
    pair.send(b"one ");
    pair.env.set_partitioned(pair.client_host, pair.server_host, true);
    pair.send(b"two");
    let second = pair.client.0.connect(pair.address).unwrap();
    pair.advance(300_000_000);
    assert_eq!(pair.received(), b"");
    assert_eq!(pair.server.0.accept(pair.listener), None);
    pair.env.set_partitioned(pair.client_host, pair.server_host, false);
    pair.advance(10_000);
    assert_eq!(pair.received(), b"one two");
    pair.advance(300_000_000);
    assert!(pair.server.0.accept(pair.listener).is_some());
    assert_eq!(pair.client.0.send(second, &[IoSlice::new(b"up")]), SendStatus::Bytes(2));
}

#[test]
fn a_close_arrives_after_the_bytes_and_a_reset_discards_them() {
    let mut pair = Pair::new();
    pair.send(b"last");
    let socket = pair.client.1;
    pair.client.0.close(socket);
    pair.advance(10_000);
    assert_eq!(pair.received(), b"last");
    assert_eq!(pair.receive_at_server(), ReceiveStatus::Closed);

    let mut pair = Pair::new();
    pair.send(b"lost");
    assert_eq!(pair.env.reset_streams(pair.client_host, pair.server_host), 1);
    pair.advance(10_000);
    assert_eq!(
        (pair.receive_at_server(), pair.receive_at_client()),
        (ReceiveStatus::Closed, ReceiveStatus::Closed)
    );
    assert_eq!(pair.send(b"x"), SendStatus::Closed);
}

#[test]
fn a_connection_to_a_closed_port_is_refused_and_to_a_host_without_power_times_out() {
    let (env, a, b) = quiet_env();
    let mut sockets = env.sockets(a);
    let socket = sockets.connect(SocketAddr::new(env.address(b), 1)).unwrap();
    assert_eq!(sockets.receive(socket, &mut [0; 1]), ReceiveStatus::WouldBlock);
    env.run_until(Nanos(20_000));
    assert_eq!(sockets.receive(socket, &mut [0; 1]), ReceiveStatus::Closed);
    env.stop_host(b, HostFailure::PowerLoss(CrashModel::LoseAll));
    let socket = sockets.connect(SocketAddr::new(env.address(b), 1)).unwrap();
    env.run_until(Nanos::from_millis(1_000));
    assert_eq!(sockets.receive(socket, &mut [0; 1]), ReceiveStatus::WouldBlock);
    env.run_until(Nanos::from_millis(1_500));
    assert_eq!(sockets.receive(socket, &mut [0; 1]), ReceiveStatus::Closed);
}

#[test]
fn a_killed_process_resets_its_streams_immediately_and_a_host_without_power_after_its_restart() {
    let mut pair = Pair::new();
    pair.env.stop_host(pair.server_host, HostFailure::ProcessKilled);
    assert_eq!(pair.receive_at_client(), ReceiveStatus::WouldBlock);
    pair.advance(10_000);
    assert_eq!(pair.receive_at_client(), ReceiveStatus::Closed);

    let mut pair = Pair::new();
    pair.env.stop_host(pair.server_host, HostFailure::PowerLoss(CrashModel::LoseAll));
    pair.advance(5_000_000_000);
    assert_eq!(pair.receive_at_client(), ReceiveStatus::WouldBlock);
    assert_eq!(pair.send(&[0; 70_000]), SendStatus::Bytes(65_536), "the peer has no power");
    assert_eq!(pair.send(&[0; 1]), SendStatus::WouldBlock);
    pair.env.start_host(pair.server_host);
    pair.advance(10_000);
    assert_eq!(pair.receive_at_client(), ReceiveStatus::Closed);
}

#[test]
fn a_socket_moves_between_cores_of_a_host() {
    let mut pair = Pair::new();
    pair.send(b"bytes");
    let moving = pair.server.0.detach(pair.server.1).unwrap();
    let mut second_core = pair.env.sockets(pair.server_host);
    let socket = second_core.attach(moving);
    pair.advance(10_000);
    let mut ready = Vec::new();
    second_core.ready(&mut ready);
    assert_eq!(ready, [socket]);
    assert_eq!(second_core.receive(socket, &mut [0; 9]), ReceiveStatus::Bytes(5));
}

/// A simulated disk and a device handle to it.
struct DiskFixture {
    env: SimEnv,
    host: SimHostId,
    disk: SimDiskId,
    devices: DeviceHandle,
    file: octokv_runtime::FileId,
}

const BLOCK: usize = 4096;

impl DiskFixture {
    fn new(seed: u64) -> DiskFixture {
        let env = SimEnv::new(SimEnvConfig::new(seed));
        let host = env.add_host();
        let disk = env.add_disk(host, SimDiskConfig { size_bytes: 1 << 20, ..Default::default() });
        let devices = DeviceHandle::new(Box::new(env.device_queue(host)), 64);
        let file = devices.open(&env.device_source(disk)).unwrap();
        DiskFixture { env, host, disk, devices, file }
    }

    /// Submits a write of blocks filled with `fill`.
    fn write(&self, block: u64, blocks: usize, fill: u8) -> octokv_runtime::CompletionFuture {
        let mut buffer = Buffer::zeroed(blocks * BLOCK);
        buffer.fill(fill);
        self.devices.submit(self.file, IoOperation::Write { offset: block * BLOCK as u64, buffer })
    }

    fn wait(&self, future: octokv_runtime::CompletionFuture) {
        let done = octokv_runtime::block_on(future, || {
            if self.devices.poll() == 0 {
                assert!(self.env.step(Nanos::NEVER));
            }
        });
        assert_eq!(done.result, Ok(()));
    }

    fn flush(&self) {
        self.wait(self.devices.submit(self.file, IoOperation::Flush));
    }

    fn block(&self, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        self.env.read_disk(self.disk, block * BLOCK as u64, &mut bytes);
        bytes
    }

    fn power_loss(&self, model: CrashModel) {
        self.env.stop_host(self.host, HostFailure::PowerLoss(model));
    }
}

#[test]
fn flushed_writes_survive_every_power_loss() {
    for seed in 0..20 {
        for model in
            [CrashModel::KeepAll, CrashModel::LoseAll, CrashModel::RandomWrites, CrashModel::TornWrites]
        {
            let fixture = DiskFixture::new(seed);
            for block in 0..8 {
                fixture.wait(fixture.write(block, 1, 1));
            }
            fixture.flush();
            assert_eq!(fixture.env.unflushed_write_count(fixture.disk), 0);
            for block in 8..16 {
                fixture.wait(fixture.write(block, 1, 2));
            }
            fixture.power_loss(model);
            assert!((0..8).all(|block| fixture.block(block) == vec![1; BLOCK]), "{model:?}");
        }
    }
}

#[test]
fn a_power_loss_keeps_the_unflushed_writes_that_its_model_selects() {
    let blocks_after = |model, seed| {
        let fixture = DiskFixture::new(seed);
        fixture.wait(fixture.write(0, 16, 1));
        fixture.flush();
        for block in 0..8 {
            fixture.wait(fixture.write(block, 1, 2)); // Completed, not flushed.
        }
        let _in_flight: Vec<_> = (8..16).map(|block| fixture.write(block, 1, 2)).collect();
        fixture.power_loss(model);
        (0..16).map(|block| fixture.block(block)).collect::<Vec<_>>()
    };
    assert!(blocks_after(CrashModel::LoseAll, 1).iter().all(|block| *block == vec![1; BLOCK]));
    assert!(blocks_after(CrashModel::KeepAll, 1).iter().all(|block| *block == vec![2; BLOCK]));
    let (mut gaps, mut torn, mut kinds) = (0, 0, octokv_base::map::FxHashSet::default());
    for seed in 0..50 {
        let some = blocks_after(CrashModel::RandomWrites, seed);
        assert!(some.iter().all(|block| *block == vec![1; BLOCK] || *block == vec![2; BLOCK]));
        // A later write survived and an earlier one did not: reordered.
        gaps += some.windows(2).filter(|pair| pair[0][0] == 1 && pair[1][0] == 2).count();
        kinds.insert(some.iter().map(|block| block[0]).collect::<Vec<_>>());
        for block in blocks_after(CrashModel::TornWrites, seed) {
            let sectors: Vec<&[u8]> = block.chunks(SECTOR_BYTES).collect();
            assert!(sectors.iter().all(|sector| sector.iter().all(|&byte| byte == sector[0])));
            torn += usize::from(sectors.iter().any(|sector| sector[0] != sectors[0][0]));
        }
        assert_eq!(
            blocks_after(CrashModel::TornWrites, seed),
            blocks_after(CrashModel::TornWrites, seed),
            "a seed is reproducible"
        );
    }
    assert!(gaps > 50 && torn > 500 && kinds.len() > 40, "{gaps} gaps, {torn} torn, {} kinds", kinds.len());
}

#[test]
fn a_flush_covers_writes_completed_before_it_and_no_others() {
    let fixture = DiskFixture::new(3);
    fixture.wait(fixture.write(0, 1, 1));
    let flush = fixture.devices.submit(fixture.file, IoOperation::Flush);
    let write = fixture.write(1, 1, 1); // Submitted after the flush; may complete before it.
    fixture.wait(flush);
    fixture.wait(write);
    fixture.power_loss(CrashModel::LoseAll);
    assert_eq!((fixture.block(0)[0], fixture.block(1)[0]), (1, 0));
}

#[test]
fn a_killed_process_loses_no_submitted_write() {
    let fixture = DiskFixture::new(3);
    fixture.wait(fixture.write(0, 1, 1));
    let _in_flight = fixture.write(1, 1, 2);
    fixture.env.stop_host(fixture.host, HostFailure::ProcessKilled);
    assert_eq!((fixture.block(0)[0], fixture.block(1)[0]), (1, 2));
    assert_eq!(fixture.devices.poll(), 0, "a killed process receives no completion");
    fixture.env.start_host(fixture.host);
    // The disk keeps its contents, but the writes are still not flushed.
    assert_eq!(fixture.env.unflushed_write_count(fixture.disk), 2);
    let devices = DeviceHandle::new(Box::new(fixture.env.device_queue(fixture.host)), 4);
    devices.open(&fixture.env.device_source(fixture.disk)).unwrap();
    fixture.power_loss(CrashModel::LoseAll);
    assert_eq!((fixture.block(0)[0], fixture.block(1)[0]), (0, 0));
}

#[test]
fn disks_have_latency_and_limited_parallelism() {
    let env = SimEnv::new(SimEnvConfig::new(1));
    let host = env.add_host();
    let config = SimDiskConfig {
        write_latency: Nanos(10_000),
        jitter: Nanos::ZERO,
        bytes_per_second: 0,
        parallelism: 2,
        ..Default::default()
    };
    let disk = env.add_disk(host, config);
    let devices = DeviceHandle::new(Box::new(env.device_queue(host)), 64);
    let file = devices.open(&env.device_source(disk)).unwrap();
    let _futures: Vec<_> = (0..6)
        .map(|_| devices.submit(file, IoOperation::Write { offset: 0, buffer: Buffer::zeroed(BLOCK) }))
        .collect();
    for (at, done) in [(9_999, 0), (10_000, 2), (19_999, 0), (20_000, 2), (30_000, 2)] {
        env.run_until(Nanos(at));
        assert_eq!(devices.poll(), done, "at {at}");
    }
}

/// A server of two reactors that pass requests to each other by mailbox, write each to disk, and reply; a client that
/// sends requests and counts replies. A small model of a node.
fn run_small_node(seed: u64, until: Nanos) -> (u64, u64, Nanos) {
    let link = SimLinkConfig { fragments: true, ..SimLinkConfig::default() };
    let env = SimEnv::new(SimEnvConfig { link, ..SimEnvConfig::new(seed) });
    let (server, client) = (env.add_host(), env.add_host());
    let disk = env.add_disk(server, SimDiskConfig::default());
    let core_wakers: Vec<_> = (0..2).map(|_| CoreWaker::without_eventfd()).collect();
    let address = SocketAddr::new(env.address(server), 4420);
    for (index, mut mailbox) in mesh::<u8>(&core_wakers, 64).into_iter().enumerate() {
        let devices = DeviceHandle::new(Box::new(env.device_queue(server)), 8);
        let file = devices.open(&env.device_source(disk)).unwrap();
        let handle = ReactorHandle::new(core_wakers[index].clone(), devices.clone(), CpuTime::simulated());
        let mut sockets = env.sockets(server);
        let listener = (index == 0).then(|| sockets.listen(address).unwrap().0);
        let (own, written) = (handle.clone(), Rc::new(RefCell::new(Vec::new())));
        let (mut ready, mut open) = (Vec::new(), Vec::new());
        env.add_reactor(server, handle, move |now| {
            let mut busy = own.begin_iteration(now) > 0;
            while let Some((socket, _)) = listener.and_then(|listener| sockets.accept(listener)) {
                open.push(socket);
            }
            ready.clear();
            sockets.ready(&mut ready);
            for &socket in &ready {
                let mut bytes = [0; 64];
                if let ReceiveStatus::Bytes(count) = sockets.receive(socket, &mut bytes) {
                    busy = true;
                    own.cpu_time().advance_simulated(Stage::Target, Nanos(200 * count as u64));
                    bytes[..count].iter().for_each(|&byte| mailbox.send(1, byte).unwrap());
                }
            }
            while let Some(byte) = mailbox.receive() {
                busy = true;
                if index == 0 {
                    let sent = open.iter().map(|&s| sockets.send(s, &[IoSlice::new(&[byte])])).next();
                    assert_eq!(sent, Some(SendStatus::Bytes(1)));
                    continue;
                }
                let (devices, handle, written) = (devices.clone(), own.clone(), Rc::clone(&written));
                own.spawn(async move {
                    let buffer = Buffer::zeroed(BLOCK);
                    let offset = u64::from(byte) * BLOCK as u64;
                    let done = devices.submit(file, IoOperation::Write { offset, buffer }).await;
                    assert_eq!(done.result, Ok(()));
                    handle.sleep(Nanos(u64::from(byte) * 10)).await;
                    written.borrow_mut().push(byte);
                });
            }
            busy |= own.poll_background() > 0;
            busy |= devices.poll() > 0;
            busy |= own.poll_background() > 0;
            for byte in written.borrow_mut().drain(..) {
                mailbox.send(0, byte).unwrap();
            }
            busy
        });
    }
    let replies = Rc::new(Cell::new(0u64));
    run_client(&env, client, address, Rc::clone(&replies));
    env.run_until(until);
    (env.trace_hash(), replies.get(), env.now())
}

fn run_client(env: &SimEnv, host: SimHostId, address: SocketAddr, replies: Rc<Cell<u64>>) {
    let devices = DeviceHandle::new(Box::new(env.device_queue(host)), 1);
    let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
    let own = handle.clone();
    let mut sockets = env.sockets(host);
    let socket = sockets.connect(address).unwrap();
    let mut in_flight = 0;
    env.add_reactor(host, handle, move |now| {
        own.begin_iteration(now);
        let mut bytes = [0; 64];
        let mut busy = false;
        if let ReceiveStatus::Bytes(count) = sockets.receive(socket, &mut bytes) {
            replies.set(replies.get() + count as u64);
            in_flight -= count;
            busy = true;
        }
        while in_flight < 16
            && sockets.send(socket, &[IoSlice::new(&[in_flight as u8])]) == SendStatus::Bytes(1)
        {
            in_flight += 1;
            busy = true;
        }
        busy
    });
}

#[test]
fn equal_seeds_give_equal_simulations_and_different_seeds_different_ones() {
    let until = Nanos::from_millis(20);
    let (trace, replies, end) = run_small_node(42, until);
    assert!(replies > 1_000, "{replies} replies in {end:?}");
    assert_eq!(end, until);
    assert_eq!(run_small_node(42, until), (trace, replies, end));
    let others: octokv_base::map::FxHashSet<u64> = (0..5).map(|seed| run_small_node(seed, until).0).collect();
    assert!(others.len() == 5 && !others.contains(&trace));
}

#[test]
fn stopping_a_host_drops_its_reactors() {
    let env = SimEnv::new(SimEnvConfig::new(1));
    let (host, other) = (env.add_host(), env.add_host());
    let ticks = Rc::new(Cell::new(0));
    for owner in [host, other] {
        let devices = DeviceHandle::new(Box::new(env.device_queue(owner)), 1);
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), devices, CpuTime::simulated());
        let (own, count) = (handle.clone(), Rc::clone(&ticks));
        handle.spawn({
            let (handle, count) = (handle.clone(), Rc::clone(&ticks));
            async move {
                loop {
                    handle.sleep(Nanos::from_millis(1)).await;
                    count.set(count.get() + 1);
                }
            }
        });
        env.add_reactor(owner, handle, move |now| {
            let _hold = &count;
            own.begin_iteration(now);
            own.poll_background() > 0
        });
    }
    env.run_until(Nanos(10_500_000));
    assert_eq!((ticks.get(), Rc::strong_count(&ticks)), (20, 5));
    env.stop_host(host, HostFailure::ProcessKilled);
    assert_eq!(Rc::strong_count(&ticks), 3);
    env.run_until(Nanos(20_500_000));
    assert_eq!(ticks.get(), 30);
    drop(env);
    assert_eq!(Rc::strong_count(&ticks), 1, "no reference cycle");
}
