//! Commands on one iterator from queues on several cores, under policies that move, delay and reorder requests: they are executed
//! in the order in which they arrived, in simulated time.

use super::*;
use crate::fair_yield::FairYield;
use crate::kv_backend::KvBackend;
use octokv_base::{Key, RecordLayout, SharedSum};
use octokv_client::{ClientConfig, Command, RemoteIterator, Response, Session};
use octokv_engine::memory::{MemoryConfig, MemoryEngine};
use octokv_engine::{Engine, PutMode, WallClock};
use octokv_nvmf::{NamespaceInfo, NamespaceKind};
use octokv_runtime::block_on;
use octokv_runtime::simulated::{SimEnv, SimEnvConfig, SimSockets};
use octokv_sched::{Policy, SchedConfig};
use octokv_wire::iterator::PairList;

const KEYS: NamespaceId = NamespaceId(1);
const KEY_COUNT: u32 = 3_000;
const CORES: usize = 2;
const LIMIT_BYTES: u32 = 4096;
/// Commands of the iterating host at a time.
const IN_FLIGHT_MAX: usize = 16;
/// The time between two commands.
const SUBMIT_INTERVAL: Nanos = Nanos::from_micros(3);
/// The time of a request on its core: longer, so that commands queue.
const EXECUTION_COST: Nanos = Nanos::from_micros(5);

fn key_of(index: u32) -> Key {
    Key::new(&index.to_be_bytes()).expect("four bytes")
}

fn engine() -> MemoryEngine {
    let config =
        MemoryConfig { ring_seed: 1, devices: 1, partition_bytes: 1 << 20, value_bytes_max: 1 << 10 };
    let engine = MemoryEngine::new(config, WallClock::default());
    for index in 0..KEY_COUNT {
        let record = octokv_base::Buffer::zeroed(200);
        let stored = block_on(engine.put(&key_of(index), PutMode::Upsert, record, 8), || ());
        assert_eq!(stored, Ok(octokv_engine::PutOutcome::Stored));
    }
    engine
}

/// A node of two cores, whose engine is the contract's model, and hosts.
struct SimNode {
    sim: SimEnv,
    address: SocketAddr,
    monitor: Arc<Monitor>,
}

impl SimNode {
    fn new(seed: u64, policy: Policy) -> SimNode {
        let sim = SimEnv::new(SimEnvConfig::new(seed));
        let node = sim.add_host();
        let address = SocketAddr::new(sim.address(node), 4420);
        let config = SchedConfig { policy, interval: Nanos::from_millis(10), ..SchedConfig::default() };
        let monitor = Arc::new(Monitor::new(CORES, config, || Nanos::ZERO).expect("within its range"));
        let info = NamespaceInfo {
            id: KEYS,
            nguid: [1; 16],
            size_bytes: 1 << 20,
            used_bytes: SharedSum::default(),
            kind: NamespaceKind::KeyValue {
                value_bytes_max: 1 << 10,
                key_bytes_max: 1024,
                has_iterators: true,
                record_layout: RecordLayout::new(0),
            },
            ana_group: 1,
            tokens: None,
        };
        let target = Target::new(SubsystemConfig::new(&ClientConfig::default().subsystem_nqn), vec![info]);
        let core_wakers: Vec<_> = (0..CORES).map(|_| CoreWaker::without_eventfd()).collect();
        let engine = engine();
        for (core, mailbox) in mesh(&core_wakers, RING_CAPACITY).into_iter().enumerate() {
            let mut sockets = sim.sockets(node);
            let listeners = match core {
                0 => vec![sockets.listen(address).expect("the port is free")],
                _ => Vec::new(),
            };
            let devices = DeviceHandle::new(Box::new(sim.device_queue(node)), 1);
            let handle = ReactorHandle::new(Arc::clone(&core_wakers[core]), devices, CpuTime::simulated());
            let pool = BufferPool::new(8 << 20);
            let namespaces = Rc::new(NamespaceTable::<MemoryEngine>::new(CoreRoles::SHARED));
            let (device_names, list_yield) = (RefCell::default(), FairYield::default());
            let (engine, pool_of) = (engine.clone(), pool.clone());
            let backend =
                KvBackend { engine, pool: pool_of, handle: handle.clone(), device_names, list_yield };
            namespaces.insert(KEYS, NamespaceBackend::Kv(Rc::new(backend)));
            let mut reactor = new_reactor(ReactorParts {
                sockets,
                listeners,
                roles: CoreRoles::SHARED,
                mailbox,
                core,
                handle: handle.clone(),
                target: Arc::clone(&target),
                namespaces,
                pool,
                peers: PollGroup::new(Arc::clone(&core_wakers[core])),
                requests_max: 64,
                monitor: Arc::clone(&monitor),
                costs: SimulatedCosts { kv: EXECUTION_COST, ..SimulatedCosts::default() },
            });
            sim.add_reactor(node, handle, move |now| reactor.run_iteration(now));
        }
        SimNode { sim, address, monitor }
    }

    fn run_for(&self, time: Nanos) {
        self.sim.run_until(self.sim.now() + time);
    }

    fn connect(&self, host_nqn: &str, io_queues: u16) -> Session<SimSockets> {
        let host = self.sim.add_host();
        let config = ClientConfig {
            host_nqn: format!("nqn.2014-08.org.nvmexpress:{host_nqn}"),
            namespace: KEYS,
            io_queues,
            queue_depth: 32,
            ..ClientConfig::default()
        };
        let mut session = Session::new(self.sim.sockets(host), self.address, config, self.sim.now());
        while !session.is_live() {
            session.poll(self.sim.now(), |_, _| ());
            assert!(session.ended().is_none(), "{:?}", session.ended());
            self.run_for(Nanos::from_micros(10));
        }
        session
    }
}

fn create(node: &SimNode, session: &mut Session<SimSockets>) -> RemoteIterator {
    let bound = || Key::new(&[]).expect("empty");
    let (lower, upper) = (bound(), bound());
    session
        .submit(Command::CreateIterator { lower, upper, reverse: false, keys_only: true }, 0)
        .expect("a free slot");
    let mut created = None;
    while created.is_none() {
        session.poll(node.sim.now(), |_, response| match response {
            Ok(Response::IteratorCreated(iterator)) => created = Some(iterator),
            other => panic!("{other:?}"),
        });
        node.run_for(Nanos::from_micros(10));
    }
    created.expect("set above")
}

/// One host reads an iterator on all of its queues, many commands at a time, beside another host. Every pair comes once, and on each
/// queue in the order in which its commands were sent. Gives the numbers of requests that were offloaded and that were queued.
fn read_in_order(seed: u64, policy: Policy, io_queues: u16) -> (u64, u64) {
    let node = SimNode::new(seed, policy);
    let (mut session, mut other) = (node.connect("iterating", io_queues), node.connect("other", 1));
    let iterator = create(&node, &mut session);
    let (mut submitted, mut other_count, mut random) = (0, 0, octokv_base::Prng::new(seed));
    // By token: the key, and the queue of the command.
    let mut read: Vec<Option<Vec<u8>>> = vec![None; KEY_COUNT as usize];
    let mut queues = Vec::new();
    while read.contains(&None) {
        if submitted < KEY_COUNT && session.in_flight() < IN_FLIGHT_MAX {
            let queue = random.below(u64::from(io_queues)) as usize;
            let next = Command::NextPairs { iterator, limit_bytes: LIMIT_BYTES, pairs_max: 1 };
            session.submit_on(queue, next, u64::from(submitted)).expect("a free slot");
            queues.push(queue);
            submitted += 1;
        }
        if other.in_flight() < 2 {
            other_count += 1;
            let key = key_of(other_count % KEY_COUNT);
            other.submit(Command::Retrieve { key, limit_bytes: 8 }, 0).expect("a free slot");
        }
        other.poll(node.sim.now(), |_, response| assert!(matches!(response, Ok(Response::Value { .. }))));
        session.poll(node.sim.now(), |token, response| {
            let Ok(Response::Pairs { pairs }) = response else { panic!("{response:?}") };
            let list = PairList::check(&pairs).expect("whole pairs");
            let (key, _) = list.pairs().next().expect("one pair");
            assert!(read[token as usize].replace(key.to_vec()).is_none() && list.count() == 1);
        });
        node.run_for(SUBMIT_INTERVAL);
    }
    let read: Vec<_> = read.into_iter().flatten().collect();
    for queue in 0..usize::from(io_queues) {
        let of_queue = read.iter().zip(&queues).filter(|(_, of)| **of == queue);
        let keys: Vec<_> = of_queue.map(|(key, _)| key).collect();
        assert!(
            keys.is_sorted(),
            "{policy:?}, {io_queues} queues, seed {seed}: queue {queue} is out of order"
        );
    }
    let mut once = read;
    once.sort_unstable();
    assert!(once.iter().enumerate().all(|(index, key)| key[..] == *key_of(index as u32).as_bytes()));
    node.monitor.offloaded_and_queued()
}

#[test]
fn commands_on_one_iterator_are_executed_in_the_order_of_their_arrival() {
    use Policy::{Auto, Fair, Hybrid, Inter, Intra, None, Proportional, RoundRobin};
    let (mut offloaded, mut queued) = (0, 0);
    for policy in [None, RoundRobin, Proportional, Inter, Intra, Hybrid, Auto, Fair] {
        for io_queues in 1..=2 {
            let (of_run, queued_of_run) = read_in_order(1, policy, io_queues);
            offloaded += of_run;
            queued += queued_of_run;
        }
    }
    assert!(offloaded > 100 && queued > 100, "the policies moved {offloaded} requests and delayed {queued}");
}
