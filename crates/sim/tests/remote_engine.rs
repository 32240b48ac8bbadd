//! A client-side engine over the network, on a node's block namespace: node and client are the production code in a
//! simulation with resets, partitions, process kills and power losses; every acknowledged write is present whenever
//! the volume is opened again.

use octokv_base::{BufferPool, Key, NamespaceId, Nanos, Prng};
use octokv_client::bug_injection::{self as client_bugs, InjectedBug as ClientBug};
use octokv_client::{ClientConfig, RemoteSession, Session};
use octokv_device::Device;
use octokv_engine::bug_injection::{self as engine_bugs, InjectedBug as EngineBug};
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::{
    AnyEngine, AnyVolume, Durability, Engine, EngineError, FormatConfig, OpenConfig, OpenError, PutMode,
    PutOutcome, Volume, WallClock,
};
use octokv_runtime::simulated::{
    CrashModel, HostFailure, SimDiskConfig, SimEnv, SimEnvConfig, SimHostId, SimSockets,
};
use octokv_runtime::{CoreWaker, CpuTime, ReactorHandle};
use octokv_sim::blocks::node::BlockNodeUnderTest;
use octokv_sim::blocks::scenario::DiskPlan;
use octokv_sim::faulty_disk::DiskFaults;
use octokv_sim::node_under_test::handle_without_devices;
use octokv_sim::scenario::NodePlan;
use octokv_sim::{BlockScenarioPlan, RemoteScenarioPlan};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

const KEYS: u64 = 12;
/// Client tasks; each has its own keys.
const TASKS: u64 = 3;
/// Between two looks at how far the tasks are.
const STEP: Nanos = Nanos::from_millis(1);
/// Writes of other tasks end within it, before its last step.
const PAUSE: Nanos = Nanos::from_millis(4);
/// Simulated time within which each step must complete.
const PROGRESS_TIMEOUT: Nanos = Nanos::from_secs(120);

struct SimSetup {
    sim: SimEnv,
    node: RefCell<BlockNodeUnderTest>,
    node_host: SimHostId,
    client: SimHostId,
    block_bytes: u32,
    durability: Durability,
}

/// Acknowledged writes, and writes attempted since the volume was opened.
#[derive(Default)]
struct AckLog {
    durable: BTreeMap<Key, u64>,
    acknowledged: BTreeMap<Key, u64>,
    attempted: BTreeMap<Key, Vec<u64>>,
    operation: u64,
    completed: u64,
    /// Until then no task writes: a connection that is lost now loses completed writes alone.
    pause_until: Nanos,
    /// Tasks that have completed all operations or found the engine read-only.
    tasks_ended: u64,
    failure: Option<String>,
}

type SharedCell<T> = Rc<RefCell<T>>;

/// A node with one core and one namespace, large enough for every operation.
fn node_plan(seed: u64, block_bytes: u32) -> BlockScenarioPlan {
    let plan = RemoteScenarioPlan::draw(seed).block_plan();
    let disk = SimDiskConfig { size_bytes: 8 << 20, block_bytes: 512, ..SimDiskConfig::default() };
    let node = NodePlan {
        cores: 1,
        value_bytes_max: 2 << 20,
        pool_bytes: 16 << 20,
        receive_bytes_max: 32 << 20,
        device_depth: 16,
        requests_max: 64,
        queue_depth: 1024,
        ..plan.node
    };
    let disk = DiskPlan { disk, block_bytes, first: 0, count: 0, is_in_memory: false };
    BlockScenarioPlan { node, disks: vec![disk], ..plan }
}

impl SimSetup {
    fn new(seed: u64) -> SimSetup {
        let mut random = Prng::new(seed);
        let sim = SimEnv::new(SimEnvConfig::new(seed));
        let block_bytes = [512, 4096][random.below(2) as usize];
        let plan = node_plan(seed, block_bytes);
        let node = BlockNodeUnderTest::new(&sim, &plan, DiskFaults::new(random.fork()));
        let (node_host, client) = (node.sim_node.host, sim.add_host());
        let durability = [Durability::PowerSafe, Durability::Completed][random.below(2) as usize];
        SimSetup { sim, node: RefCell::new(node), node_host, client, block_bytes, durability }
    }

    /// Starts the node.
    fn boot(&self) {
        self.node.borrow_mut().boot(&[NamespaceId(1)]);
    }

    /// Crashes the node and starts it.
    fn crash(&self, failure: HostFailure) {
        self.node.borrow_mut().sim_node.stop(failure);
        self.boot();
    }

    /// Connects a session.
    fn connect(&self) -> Result<Session<SimSockets>, String> {
        let config = ClientConfig {
            namespace: NamespaceId(1),
            io_queues: 2,
            queue_depth: 16,
            command_timeout: Nanos::from_secs(2),
            ..ClientConfig::default()
        };
        let sockets = self.sim.sockets(self.client);
        let session = Session::new(sockets, self.node.borrow().sim_node.address(), config, self.sim.now());
        let session = Rc::new(RefCell::new(Some(session)));
        let (handle, own) = (handle_without_devices(&self.sim, self.client), Rc::clone(&session));
        let waker_handle = handle.clone();
        let id = self.sim.add_reactor(self.client, handle, move |now| {
            let mut own = own.borrow_mut();
            let Some(session) = own.as_mut() else { return false };
            let busy = session.poll(now, |_, _| ());
            waker_handle.request_wakeup_at(session.next_deadline());
            busy
        });
        let is_connected_or_ended = |session: &Session<_>| session.is_live() || session.ended().is_some();
        let done = || session.borrow().as_ref().is_none_or(is_connected_or_ended);
        self.sim.run_until_true(self.sim.now() + PROGRESS_TIMEOUT, done);
        self.sim.remove_reactor(id);
        let session = session.borrow_mut().take().ok_or("the session was taken")?;
        if session.is_live() { Ok(session) } else { Err(format!("no connection: {:?}", session.ended())) }
    }

    /// Runs one engine session: opens the volume, audits every key, writes until the engine is read-only or all
    /// operations are done, and drops the engine. `faults` runs each millisecond with the number of completed puts.
    fn run_engine_session(
        &self,
        ack_log: &SharedCell<AckLog>,
        first: bool,
        mut faults: impl FnMut(u64),
    ) -> Result<(), String> {
        let remote =
            RemoteSession::new(self.connect()?, self.sim.now()).map_err(|error| error.to_string())?;
        let channel = remote.channel();
        let device: Rc<dyn Device> = Rc::new(remote.device(&channel));
        let handle = ReactorHandle::new(CoreWaker::without_eventfd(), channel.clone(), CpuTime::simulated());
        let own = handle.clone();
        let id = self.sim.add_reactor(self.client, handle.clone(), move |now| {
            let mut worked = own.begin_iteration(now) > 0;
            worked |= remote.poll(now);
            worked |= channel.poll() > 0;
            worked |= own.poll_background() > 0;
            worked |= channel.poll() > 0;
            own.request_wakeup_at(remote.next_deadline());
            worked
        });
        let begun = {
            let mut ack_log = ack_log.borrow_mut();
            (ack_log.tasks_ended, ack_log.completed) = (0, 0);
            ack_log.operation
        };
        let config = OpenConfig {
            durability: self.durability,
            cores: 1,
            cache_bytes: 0,
            prepare_bytes: 0,
            compact_bytes_per_second: 0,
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::default(),
            tokens: None,
        };
        let format = FormatConfig { unit_bytes: Some(self.block_bytes), seed: 5, ..FormatConfig::default() };
        let (shared, own) = (Rc::clone(ack_log), handle.clone());
        handle.spawn(async move {
            let pool = BufferPool::new(16 << 20);
            let opened = async {
                let devices = [device];
                if first {
                    AnyVolume::format(&devices, &format).await?;
                }
                let volume = AnyVolume::open(&devices, &pool, config.clone(), &format).await?;
                Ok::<_, OpenError>(volume.engine(0, &devices, pool))
            };
            let engine = match opened.await {
                Ok(engine) => Rc::new(engine),
                Err(error) => return fail(&shared, format!("the volume does not open: {error}")),
            };
            if let Err(what) = audit(&engine, &shared).await {
                return fail(&shared, what);
            }
            let (maintained, clock) = (Rc::clone(&engine), own.clone());
            own.spawn(async move { maintained.maintain(&clock, |_| ()).await });
            for task in 0..TASKS {
                let random = Prng::new(begun ^ task << 32);
                own.spawn(run_task(
                    Rc::clone(&engine),
                    Rc::clone(&shared),
                    own.clone(),
                    config.clone(),
                    task,
                    random,
                ));
            }
        });
        let deadline = self.sim.now() + PROGRESS_TIMEOUT;
        let mut finished = false;
        while !finished && self.sim.now() < deadline {
            self.sim.step(self.sim.now() + STEP);
            let completed = ack_log.borrow().completed;
            faults(completed);
            finished = ack_log.borrow().tasks_ended == TASKS || ack_log.borrow().failure.is_some();
        }
        handle.shutdown();
        self.sim.remove_reactor(id);
        match ack_log.borrow_mut().failure.take() {
            Some(what) => Err(what),
            None if finished => Ok(()),
            None => Err("no progress".to_owned()),
        }
    }
}

fn fail(ack_log: &SharedCell<AckLog>, what: String) {
    ack_log.borrow_mut().failure.get_or_insert(what);
}

/// Checks that every key holds its last durable value or a later attempted one.
async fn audit(engine: &AnyEngine, ack_log: &SharedCell<AckLog>) -> Result<(), String> {
    for index in 0..KEYS {
        let key = key_of(index);
        let found = engine.get(&key).await.map_err(|fault| format!("{key}: {fault}"))?;
        let found = found.map(|value| operation_of(&key, value.as_bytes()));
        let mut ack_log = ack_log.borrow_mut();
        let durable = ack_log.durable.get(&key).copied();
        let attempted = ack_log.attempted.remove(&key).unwrap_or_default();
        if found != durable && !found.is_some_and(|found| attempted.contains(&found) && Some(found) > durable)
        {
            return Err(format!("{key}: durable {durable:?}, found {found:?}, attempted {attempted:?}"));
        }
        ack_log.durable.extend(found.map(|found| (key, found)));
    }
    ack_log.borrow_mut().acknowledged.clear();
    Ok(())
}

/// Puts and flushes until the engine is read-only or all operations are done.
async fn run_task(
    engine: Rc<AnyEngine>,
    ack_log: SharedCell<AckLog>,
    handle: ReactorHandle,
    config: OpenConfig,
    task: u64,
    mut random: Prng,
) {
    for _ in 0..60 {
        let key = key_of(random.below(KEYS / TASKS) * TASKS + task);
        let operation = {
            let mut ack_log = ack_log.borrow_mut();
            ack_log.operation += 1;
            let operation = ack_log.operation;
            ack_log.attempted.entry(key.clone()).or_default().push(operation);
            operation
        };
        let value = value_of(&key, operation, 8 + random.below(6000) as usize);
        match engine
            .put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), value.len())
            .await
        {
            Ok(PutOutcome::Stored) => {
                let mut ack_log = ack_log.borrow_mut();
                ack_log.completed += 1;
                match config.durability {
                    Durability::PowerSafe => drop(ack_log.durable.insert(key, operation)),
                    Durability::Completed => drop(ack_log.acknowledged.insert(key, operation)),
                }
            }
            Ok(other) => return fail(&ack_log, format!("unexpected result of a put: {other:?}")),
            // The connection loss may affect this write alone; the next call finds out.
            Err(EngineError::Device { .. }) => {}
            Err(EngineError::ReadOnly) => break,
            Err(fault) => return fail(&ack_log, format!("a put failed: {fault}")),
        }
        if random.one_in(6) {
            let before = ack_log.borrow().acknowledged.clone();
            if engine.flush().await.is_ok() {
                let mut ack_log = ack_log.borrow_mut();
                for (key, operation) in before {
                    let durable = ack_log.durable.entry(key).or_default();
                    *durable = operation.max(*durable);
                }
            }
        }
        if random.one_in(4) {
            handle.sleep(Nanos::from_micros(random.below(400))).await;
        }
        if random.one_in(20) {
            ack_log.borrow_mut().pause_until = handle.now() + PAUSE;
        }
        let pause_until = ack_log.borrow().pause_until;
        handle.sleep_until(pause_until).await;
    }
    ack_log.borrow_mut().tasks_ended += 1;
}

/// Runs one seed. The error is the first violation.
fn run_seed(seed: u64) -> Result<(), String> {
    let (setup, mut random) = (SimSetup::new(seed), Prng::new(seed ^ 0xabc));
    let ack_log: SharedCell<AckLog> = Rc::default();
    setup.boot();
    for session in 0..5 {
        let (at, kind, is_in_pause) = (random.below(120), random.below(6), random.one_in(2));
        let (mut done, mut heal_at) = (false, None);
        let sim = &setup.sim;
        setup.run_engine_session(&ack_log, session == 0, |completed| {
            if heal_at.is_some_and(|at| at <= sim.now()) {
                heal_at = None;
                sim.set_partitioned(setup.client, setup.node_host, false);
            }
            let pause_until = ack_log.borrow().pause_until;
            let is_end_of_pause = sim.now() < pause_until && pause_until <= sim.now() + STEP;
            if done || completed < at || is_in_pause && !is_end_of_pause {
                return;
            }
            done = true;
            let stop = match kind {
                0 => {
                    sim.reset_streams(setup.client, setup.node_host);
                    return;
                }
                1 => {
                    sim.set_partitioned(setup.client, setup.node_host, true);
                    heal_at = Some(sim.now() + Nanos::from_millis(1 + random.below(4000)));
                    return;
                }
                2 => HostFailure::ProcessKilled,
                3 => HostFailure::PowerLoss(CrashModel::LoseAll),
                4 => HostFailure::PowerLoss(CrashModel::RandomWrites),
                _ => HostFailure::PowerLoss(CrashModel::TornWrites),
            };
            setup.crash(stop);
        })?;
        sim.set_partitioned(setup.client, setup.node_host, false);
        if random.one_in(2) {
            // Durability must not depend on the node's memory.
            setup.crash(HostFailure::PowerLoss(CrashModel::LoseAll));
        }
    }
    setup.run_engine_session(&ack_log, false, |_| ())
}

#[test]
fn acknowledged_writes_of_a_remote_engine_survive_every_loss() {
    for seed in 0..30 {
        run_seed(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
    }
}

fn assert_found(name: &str) {
    let found = (0..30).find_map(|seed| run_seed(seed).err().map(|what| (seed, what)));
    client_bugs::inject(None);
    engine_bugs::inject(None);
    let (seed, what) = found.unwrap_or_else(|| panic!("{name} is not found"));
    println!("{name}, after {} seeds: {what}", seed + 1);
}

#[test]
fn a_flush_that_completes_before_the_nodes_flush_is_found() {
    client_bugs::inject(Some(ClientBug::CompleteFlushEarly));
    assert_found("CompleteFlushEarly");
}

#[test]
fn lost_writes_that_are_forgotten_are_found() {
    client_bugs::inject(Some(ClientBug::ForgetLostWrites));
    assert_found("ForgetLostWrites");
}

#[test]
fn a_flush_that_the_engine_skips_is_found() {
    engine_bugs::inject(Some(EngineBug::SkipFlush));
    assert_found("SkipFlush");
}
