//! The virtual world: it repeats, its links and disks do what they say, and what a crash leaves is one
//! of the things that a crash may leave.

use octokv_base::{Buffer, Nanos, Random};
use octokv_runtime::simulated::{
    CrashPlan, DiskId, DiskSettings, HostId, LinkSettings, SECTOR_BYTES, Stop, VirtualSockets, VirtualWorld,
    WorldSettings,
};
use octokv_runtime::{
    Busy, Channel, Doorbell, Handle, ListenerId, Operation, Received, Sent, SocketId, Sockets, Stage, mesh,
};
use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;

const QUIET: LinkSettings = LinkSettings {
    latency: Nanos(10_000),
    jitter: Nanos::ZERO,
    bytes_per_second: 0,
    window_bytes: 65_536,
    fragments: false,
};

fn quiet_world() -> (VirtualWorld, HostId, HostId) {
    let world = VirtualWorld::new(WorldSettings { link: QUIET, ..WorldSettings::new(1) });
    let (a, b) = (world.add_host(), world.add_host());
    (world, a, b)
}

/// Two hosts' sockets with a stream between them.
struct Pair {
    world: VirtualWorld,
    client_host: HostId,
    server_host: HostId,
    client: (VirtualSockets, SocketId),
    server: (VirtualSockets, SocketId),
    listener: ListenerId,
    address: SocketAddr,
}

impl Pair {
    fn new() -> Pair {
        let (world, client_host, server_host) = quiet_world();
        let (mut client, mut server) = (world.sockets(client_host), world.sockets(server_host));
        let (listener, address) = server.listen(SocketAddr::new(world.address(server_host), 4420)).unwrap();
        let socket = client.connect(address).unwrap();
        assert_eq!(client.send(socket, &[IoSlice::new(b"early")]), Sent::Full);
        world.run_until(Nanos(20_000));
        let (accepted, peer) = server.accept(listener).unwrap();
        assert_eq!(peer.ip(), world.address(client_host));
        let (client, server) = ((client, socket), (server, accepted));
        Pair { world, client_host, server_host, client, server, listener, address }
    }

    fn send(&mut self, bytes: &[u8]) -> Sent {
        self.client.0.send(self.client.1, &[IoSlice::new(bytes)])
    }

    fn received(&mut self) -> Vec<u8> {
        let mut got = Vec::new();
        let mut chunk = [0; 1000];
        while let Received::Bytes(count) = self.server.0.receive(self.server.1, &mut chunk) {
            got.extend_from_slice(&chunk[..count]);
        }
        got
    }

    fn end_at_server(&mut self) -> Received {
        self.server.0.receive(self.server.1, &mut [0; 1])
    }

    fn end_at_client(&mut self) -> Received {
        self.client.0.receive(self.client.1, &mut [0; 1])
    }

    fn pass(&self, span: u64) {
        self.world.run_until(self.world.now() + Nanos(span));
    }
}

#[test]
fn what_is_wanted_at_a_time_is_done_then_in_the_order_in_which_it_was_wanted() {
    let (world, ..) = quiet_world();
    let seen: Rc<RefCell<Vec<(u32, Nanos)>>> = Rc::default();
    let note = |number: u32| {
        let (seen, world) = (Rc::clone(&seen), world.clone());
        move || seen.borrow_mut().push((number, world.now()))
    };
    world.at(Nanos(50), note(1));
    world.at(Nanos(20), note(2));
    let (again, later) = (world.clone(), note(4));
    world.at(Nanos(50), note(3));
    world.at(Nanos(60), move || again.at(Nanos(5), later));
    world.run_until(Nanos(100));
    let want = [(2, 20), (1, 50), (3, 50), (4, 60)].map(|(number, at)| (number, Nanos(at)));
    assert_eq!(*seen.borrow(), want, "what is already past is done now");
}

#[test]
fn bytes_take_the_latency_of_the_link_and_no_longer() {
    let mut pair = Pair::new();
    assert_eq!(pair.send(b"hello"), Sent::Bytes(5));
    pair.pass(9_999);
    assert_eq!(pair.received(), b"");
    pair.pass(1);
    assert_eq!(pair.received(), b"hello");
}

#[test]
fn a_link_of_limited_bandwidth_delays_by_the_bytes_before() {
    let mut pair = Pair::new();
    let link = LinkSettings { bytes_per_second: 1_000_000, ..QUIET }; // One byte in a microsecond.
    pair.world.set_link(pair.client_host, pair.server_host, link);
    assert_eq!(pair.send(&[1; 100]), Sent::Bytes(100));
    assert_eq!(pair.send(&[2; 50]), Sent::Bytes(50));
    pair.pass(100_000 + 9_999);
    assert_eq!(pair.received().len(), 0);
    pair.pass(1);
    assert_eq!(pair.received(), [1; 100]);
    pair.pass(50_000);
    assert_eq!(pair.received(), [2; 50]);
}

#[test]
fn a_full_window_is_back_pressure_until_the_peer_reads() {
    let mut pair = Pair::new();
    assert_eq!(pair.send(&[7; 100_000]), Sent::Bytes(65_536));
    assert_eq!(pair.send(&[7; 1]), Sent::Full);
    pair.pass(10_000);
    assert_eq!(pair.send(&[7; 1]), Sent::Full, "arrived, not read");
    assert_eq!(pair.received().len(), 65_536);
    assert_eq!(pair.send(&[7; 1]), Sent::Bytes(1));
}

#[test]
fn fragments_come_in_pieces_and_in_order() {
    let mut pair = Pair::new();
    let link = LinkSettings { fragments: true, jitter: Nanos(5_000), ..QUIET };
    pair.world.set_link(pair.client_host, pair.server_host, link);
    let mut sent = vec![0; 60_000];
    Random::new(4).fill(&mut sent);
    for chunk in sent.chunks(1000) {
        assert_eq!(pair.send(chunk), Sent::Bytes(1000));
    }
    let (mut got, mut short) = (Vec::new(), 0);
    while got.len() < sent.len() {
        pair.pass(500);
        let mut chunk = [0; 1000];
        if let Received::Bytes(count) = pair.server.0.receive(pair.server.1, &mut chunk) {
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
    pair.world.set_partitioned(pair.client_host, pair.server_host, true);
    pair.send(b"two");
    let second = pair.client.0.connect(pair.address).unwrap();
    pair.pass(300_000_000);
    assert_eq!(pair.received(), b"");
    assert_eq!(pair.server.0.accept(pair.listener), None);
    pair.world.set_partitioned(pair.client_host, pair.server_host, false);
    pair.pass(10_000);
    assert_eq!(pair.received(), b"one two");
    pair.pass(300_000_000);
    assert!(pair.server.0.accept(pair.listener).is_some());
    assert_eq!(pair.client.0.send(second, &[IoSlice::new(b"up")]), Sent::Bytes(2));
}

#[test]
fn a_close_comes_after_the_bytes_and_a_reset_instead_of_them() {
    let mut pair = Pair::new();
    pair.send(b"last");
    let socket = pair.client.1;
    pair.client.0.close(socket);
    pair.pass(10_000);
    assert_eq!(pair.received(), b"last");
    assert_eq!(pair.end_at_server(), Received::Closed);

    let mut pair = Pair::new();
    pair.send(b"lost");
    assert_eq!(pair.world.reset_streams(pair.client_host, pair.server_host), 1);
    pair.pass(10_000);
    assert_eq!((pair.end_at_server(), pair.end_at_client()), (Received::Closed, Received::Closed));
    assert_eq!(pair.send(b"x"), Sent::Broken);
}

#[test]
fn nobody_listening_refuses_and_nobody_there_times_out() {
    let (world, a, b) = quiet_world();
    let mut sockets = world.sockets(a);
    let socket = sockets.connect(SocketAddr::new(world.address(b), 1)).unwrap();
    assert_eq!(sockets.receive(socket, &mut [0; 1]), Received::Nothing);
    world.run_until(Nanos(20_000));
    assert_eq!(sockets.receive(socket, &mut [0; 1]), Received::Closed);
    world.stop_host(b, Stop::PowerCut(CrashPlan::LoseAll));
    let socket = sockets.connect(SocketAddr::new(world.address(b), 1)).unwrap();
    world.run_until(Nanos::from_millis(1_000));
    assert_eq!(sockets.receive(socket, &mut [0; 1]), Received::Nothing);
    world.run_until(Nanos::from_millis(1_500));
    assert_eq!(sockets.receive(socket, &mut [0; 1]), Received::Closed);
}

#[test]
fn a_killed_process_is_heard_of_and_a_host_without_power_only_when_it_is_back() {
    let mut pair = Pair::new();
    pair.world.stop_host(pair.server_host, Stop::Killed);
    assert_eq!(pair.end_at_client(), Received::Nothing);
    pair.pass(10_000);
    assert_eq!(pair.end_at_client(), Received::Closed);

    let mut pair = Pair::new();
    pair.world.stop_host(pair.server_host, Stop::PowerCut(CrashPlan::LoseAll));
    pair.pass(5_000_000_000);
    assert_eq!(pair.end_at_client(), Received::Nothing);
    assert_eq!(pair.send(&[0; 70_000]), Sent::Bytes(65_536), "into the void");
    assert_eq!(pair.send(&[0; 1]), Sent::Full);
    pair.world.start_host(pair.server_host);
    pair.pass(10_000);
    assert_eq!(pair.end_at_client(), Received::Closed);
}

#[test]
fn a_socket_moves_between_cores_of_a_host() {
    let mut pair = Pair::new();
    pair.send(b"bytes");
    let moving = pair.server.0.detach(pair.server.1).unwrap();
    let mut second_core = pair.world.sockets(pair.server_host);
    let socket = second_core.attach(moving);
    pair.pass(10_000);
    let mut ready = Vec::new();
    second_core.ready(&mut ready);
    assert_eq!(ready, [socket]);
    assert_eq!(second_core.receive(socket, &mut [0; 9]), Received::Bytes(5));
}

/// A disk, and a channel to it on which operations are run one after the other or left in flight.
struct DiskBench {
    world: VirtualWorld,
    host: HostId,
    disk: DiskId,
    channel: Channel,
    file: octokv_runtime::FileId,
}

const BLOCK: usize = 4096;

impl DiskBench {
    fn new(seed: u64) -> DiskBench {
        let world = VirtualWorld::new(WorldSettings::new(seed));
        let host = world.add_host();
        let disk = world.add_disk(host, DiskSettings { size_bytes: 1 << 20, ..Default::default() });
        let channel = Channel::new(Box::new(world.queue(host)), 64);
        let file = channel.open(&world.media(disk)).unwrap();
        DiskBench { world, host, disk, channel, file }
    }

    /// Writes blocks full of `fill`, and gives the ticket.
    fn write(&self, block: u64, blocks: usize, fill: u8) -> octokv_runtime::Ticket {
        let mut buffer = Buffer::zeroed(blocks * BLOCK);
        buffer.fill(fill);
        self.channel.submit(self.file, Operation::Write { offset: block * BLOCK as u64, buffer })
    }

    fn wait(&self, ticket: octokv_runtime::Ticket) {
        let done = octokv_runtime::block_on(ticket, || {
            if self.channel.poll() == 0 {
                assert!(self.world.step(Nanos::NEVER));
            }
        });
        assert_eq!(done.result, Ok(()));
    }

    fn flush(&self) {
        self.wait(self.channel.submit(self.file, Operation::Flush));
    }

    fn block(&self, block: u64) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK];
        self.world.read_disk(self.disk, block * BLOCK as u64, &mut bytes);
        bytes
    }

    fn cut(&self, plan: CrashPlan) {
        self.world.stop_host(self.host, Stop::PowerCut(plan));
    }
}

#[test]
fn flushed_writes_survive_every_power_cut() {
    for seed in 0..20 {
        for plan in [CrashPlan::KeepAll, CrashPlan::LoseAll, CrashPlan::Some, CrashPlan::Torn] {
            let bench = DiskBench::new(seed);
            for block in 0..8 {
                bench.wait(bench.write(block, 1, 1));
            }
            bench.flush();
            assert_eq!(bench.world.unflushed_writes(bench.disk), 0);
            for block in 8..16 {
                bench.wait(bench.write(block, 1, 2));
            }
            bench.cut(plan);
            assert!((0..8).all(|block| bench.block(block) == vec![1; BLOCK]), "{plan:?}");
        }
    }
}

#[test]
fn a_power_cut_leaves_of_unflushed_writes_what_its_plan_says() {
    let outcome = |plan, seed| {
        let bench = DiskBench::new(seed);
        bench.wait(bench.write(0, 16, 1));
        bench.flush();
        for block in 0..8 {
            bench.wait(bench.write(block, 1, 2)); // Answered, not flushed.
        }
        let _in_flight: Vec<_> = (8..16).map(|block| bench.write(block, 1, 2)).collect();
        bench.cut(plan);
        (0..16).map(|block| bench.block(block)).collect::<Vec<_>>()
    };
    assert!(outcome(CrashPlan::LoseAll, 1).iter().all(|block| *block == vec![1; BLOCK]));
    assert!(outcome(CrashPlan::KeepAll, 1).iter().all(|block| *block == vec![2; BLOCK]));
    let (mut gaps, mut torn, mut kinds) = (0, 0, octokv_base::map::Set::default());
    for seed in 0..50 {
        let some = outcome(CrashPlan::Some, seed);
        assert!(some.iter().all(|block| *block == vec![1; BLOCK] || *block == vec![2; BLOCK]));
        // A later write survived and an earlier one did not: reordered.
        gaps += some.windows(2).filter(|pair| pair[0][0] == 1 && pair[1][0] == 2).count();
        kinds.insert(some.iter().map(|block| block[0]).collect::<Vec<_>>());
        for block in outcome(CrashPlan::Torn, seed) {
            let sectors: Vec<&[u8]> = block.chunks(SECTOR_BYTES).collect();
            assert!(sectors.iter().all(|sector| sector.iter().all(|&byte| byte == sector[0])));
            torn += usize::from(sectors.iter().any(|sector| sector[0] != sectors[0][0]));
        }
        assert_eq!(outcome(CrashPlan::Torn, seed), outcome(CrashPlan::Torn, seed), "a seed repeats");
    }
    assert!(gaps > 50 && torn > 500 && kinds.len() > 40, "{gaps} gaps, {torn} torn, {} kinds", kinds.len());
}

#[test]
fn a_flush_covers_what_was_answered_before_it_and_no_more() {
    let bench = DiskBench::new(3);
    bench.wait(bench.write(0, 1, 1));
    let flush = bench.channel.submit(bench.file, Operation::Flush);
    let write = bench.write(1, 1, 1); // Submitted after the flush; answered before it or not.
    bench.wait(flush);
    bench.wait(write);
    bench.cut(CrashPlan::LoseAll);
    assert_eq!((bench.block(0)[0], bench.block(1)[0]), (1, 0));
}

#[test]
fn a_killed_process_loses_no_write_that_the_kernel_had() {
    let bench = DiskBench::new(3);
    bench.wait(bench.write(0, 1, 1));
    let _in_flight = bench.write(1, 1, 2);
    bench.world.stop_host(bench.host, Stop::Killed);
    assert_eq!((bench.block(0)[0], bench.block(1)[0]), (1, 2));
    assert_eq!(bench.channel.poll(), 0, "a dead process hears nothing");
    bench.world.start_host(bench.host);
    // The same disk goes on, and the kernel's cache is still not the medium.
    assert_eq!(bench.world.unflushed_writes(bench.disk), 2);
    let channel = Channel::new(Box::new(bench.world.queue(bench.host)), 4);
    channel.open(&bench.world.media(bench.disk)).unwrap();
    bench.cut(CrashPlan::LoseAll);
    assert_eq!((bench.block(0)[0], bench.block(1)[0]), (0, 0));
}

#[test]
fn disks_take_their_time_and_work_on_as_many_operations_as_they_have_units() {
    let world = VirtualWorld::new(WorldSettings::new(1));
    let host = world.add_host();
    let settings = DiskSettings {
        write: Nanos(10_000),
        jitter: Nanos::ZERO,
        bytes_per_second: 0,
        units: 2,
        ..Default::default()
    };
    let disk = world.add_disk(host, settings);
    let channel = Channel::new(Box::new(world.queue(host)), 64);
    let file = channel.open(&world.media(disk)).unwrap();
    let _tickets: Vec<_> = (0..6)
        .map(|_| channel.submit(file, Operation::Write { offset: 0, buffer: Buffer::zeroed(BLOCK) }))
        .collect();
    for (at, done) in [(9_999, 0), (10_000, 2), (19_999, 0), (20_000, 2), (30_000, 2)] {
        world.run_until(Nanos(at));
        assert_eq!(channel.poll(), done, "at {at}");
    }
}

/// A server of two reactors that pass requests to each other by mailbox, write each to disk, and answer;
/// a client that sends and counts. Everything a node does, in little.
fn little_node(seed: u64, until: Nanos) -> (u64, u64, Nanos) {
    let link = LinkSettings { fragments: true, ..LinkSettings::default() };
    let world = VirtualWorld::new(WorldSettings { link, ..WorldSettings::new(seed) });
    let (server, client) = (world.add_host(), world.add_host());
    let disk = world.add_disk(server, DiskSettings::default());
    let doorbells: Vec<_> = (0..2).map(|_| Doorbell::silent()).collect();
    let address = SocketAddr::new(world.address(server), 4420);
    for (index, mut mailbox) in mesh::<u8>(&doorbells, 64).into_iter().enumerate() {
        let channel = Channel::new(Box::new(world.queue(server)), 8);
        let file = channel.open(&world.media(disk)).unwrap();
        let handle = Handle::new(doorbells[index].clone(), channel.clone(), Busy::virtual_time());
        let mut sockets = world.sockets(server);
        let listener = (index == 0).then(|| sockets.listen(address).unwrap().0);
        let (own, written) = (handle.clone(), Rc::new(RefCell::new(Vec::new())));
        let (mut ready, mut open) = (Vec::new(), Vec::new());
        world.add_reactor(server, handle, move |now| {
            let mut busy = own.begin_turn(now) > 0;
            while let Some((socket, _)) = listener.and_then(|listener| sockets.accept(listener)) {
                open.push(socket);
            }
            ready.clear();
            sockets.ready(&mut ready);
            for &socket in &ready {
                let mut bytes = [0; 64];
                if let Received::Bytes(count) = sockets.receive(socket, &mut bytes) {
                    busy = true;
                    own.busy().charge(Stage::Target, Nanos(200 * count as u64));
                    bytes[..count].iter().for_each(|&byte| mailbox.send(1, byte).unwrap());
                }
            }
            while let Some(byte) = mailbox.receive() {
                busy = true;
                if index == 0 {
                    let sent = open.iter().map(|&s| sockets.send(s, &[IoSlice::new(&[byte])])).next();
                    assert_eq!(sent, Some(Sent::Bytes(1)));
                    continue;
                }
                let (channel, handle, written) = (channel.clone(), own.clone(), Rc::clone(&written));
                own.spawn(async move {
                    let buffer = Buffer::zeroed(BLOCK);
                    let offset = u64::from(byte) * BLOCK as u64;
                    let done = channel.submit(file, Operation::Write { offset, buffer }).await;
                    assert_eq!(done.result, Ok(()));
                    handle.sleep(Nanos(u64::from(byte) * 10)).await;
                    written.borrow_mut().push(byte);
                });
            }
            busy |= own.run_background() > 0;
            busy |= channel.poll() > 0;
            busy |= own.run_background() > 0;
            for byte in written.borrow_mut().drain(..) {
                mailbox.send(0, byte).unwrap();
            }
            busy
        });
    }
    let answers = Rc::new(Cell::new(0u64));
    run_client(&world, client, address, Rc::clone(&answers));
    world.run_until(until);
    (world.trace(), answers.get(), world.now())
}

fn run_client(world: &VirtualWorld, host: HostId, address: SocketAddr, answers: Rc<Cell<u64>>) {
    let channel = Channel::new(Box::new(world.queue(host)), 1);
    let handle = Handle::new(Doorbell::silent(), channel, Busy::virtual_time());
    let own = handle.clone();
    let mut sockets = world.sockets(host);
    let socket = sockets.connect(address).unwrap();
    let mut in_flight = 0;
    world.add_reactor(host, handle, move |now| {
        own.begin_turn(now);
        let mut bytes = [0; 64];
        let mut busy = false;
        if let Received::Bytes(count) = sockets.receive(socket, &mut bytes) {
            answers.set(answers.get() + count as u64);
            in_flight -= count;
            busy = true;
        }
        while in_flight < 16 && sockets.send(socket, &[IoSlice::new(&[in_flight as u8])]) == Sent::Bytes(1) {
            in_flight += 1;
            busy = true;
        }
        busy
    });
}

#[test]
fn one_seed_gives_one_run_and_another_seed_another() {
    let until = Nanos::from_millis(20);
    let (trace, answers, end) = little_node(42, until);
    assert!(answers > 1_000, "{answers} answers in {end:?}");
    assert_eq!(end, until);
    assert_eq!(little_node(42, until), (trace, answers, end));
    let others: octokv_base::map::Set<u64> = (0..5).map(|seed| little_node(seed, until).0).collect();
    assert!(others.len() == 5 && !others.contains(&trace));
}

#[test]
fn a_stopped_host_takes_its_reactors_with_it() {
    let world = VirtualWorld::new(WorldSettings::new(1));
    let (host, other) = (world.add_host(), world.add_host());
    let held = Rc::new(Cell::new(0));
    for place in [host, other] {
        let channel = Channel::new(Box::new(world.queue(place)), 1);
        let handle = Handle::new(Doorbell::silent(), channel, Busy::virtual_time());
        let (own, count) = (handle.clone(), Rc::clone(&held));
        handle.spawn({
            let (handle, count) = (handle.clone(), Rc::clone(&held));
            async move {
                loop {
                    handle.sleep(Nanos::from_millis(1)).await;
                    count.set(count.get() + 1);
                }
            }
        });
        world.add_reactor(place, handle, move |now| {
            let _hold = &count;
            own.begin_turn(now);
            own.run_background() > 0
        });
    }
    world.run_until(Nanos(10_500_000));
    assert_eq!((held.get(), Rc::strong_count(&held)), (20, 5));
    world.stop_host(host, Stop::Killed);
    assert_eq!(Rc::strong_count(&held), 3);
    world.run_until(Nanos(20_500_000));
    assert_eq!(held.get(), 30);
    drop(world);
    assert_eq!(Rc::strong_count(&held), 1, "nothing holds itself");
}
