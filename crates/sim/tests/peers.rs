//! Outgoing sessions of a node's reactors: the cores of one node store, retrieve and delete keys on another node while
//! they serve a host. Connections are reset, the link is partitioned or slow, the other node is killed or loses power and
//! returns. Every command ends, with a response that a register per key explains or with an error that says whether it
//! was executed; the same seed repeats the same simulation.

use octokv_base::prng::mix64;
use octokv_base::{Key, Nanos, Prng};
use octokv_client::bug_injection::{InjectedBug, inject};
use octokv_client::{
    ClientConfig, Command, ConnectionError, Error, PeerConfig, PeerSession, Reconnect, Response, StoreMode,
    Value,
};
use octokv_engine::Durability;
use octokv_engine::conformance::{key_of, value_of};
use octokv_runtime::ReactorHandle;
use octokv_runtime::simulated::{CrashModel, HostFailure, SimEnv, SimEnvConfig, SimHostId, SimLinkConfig};
use octokv_sim::clients::{ClientHost, Clients};
use octokv_sim::faulty_disk::DiskFaults;
use octokv_sim::history::History;
use octokv_sim::kv_workload::KvWorkload;
use octokv_sim::node_under_test::{AuditResult, KvNodeUnderTest, handle_without_devices};
use octokv_sim::{KvScenarioPlan, Scenario};
use std::cell::RefCell;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

/// Tasks per core; each has its own keys.
const TASKS_PER_CORE: u64 = 3;
const KEYS_PER_TASK: u64 = 3;
/// Commands of a task in one run.
const COMMANDS: u64 = 150;
/// Commands of the host.
const HOST_COMMANDS: u64 = 200;
/// Simulated time within which each step must complete while there is no fault.
const PROGRESS_TIMEOUT: Nanos = Nanos::from_secs(60);

/// The `index`-th key of the tasks: without in-capsule data a controller takes no longer ones.
fn task_key(index: u64) -> Key {
    Key::new(format!("task key {index}").as_bytes()).expect("within the limit")
}

/// A key as a register: what a read may return.
#[derive(Default)]
struct Register {
    /// The last write that was acknowledged or observed: its operation, `None` for a delete or before the first store.
    current: Option<u64>,
    /// Writes with unknown outcome: each may take effect once, at any later time.
    unknown: Vec<Option<u64>>,
}

impl Register {
    fn acknowledge(&mut self, write: Option<u64>) {
        self.current = write;
    }

    /// Explains an observed state.
    fn observe(&mut self, found: Option<u64>) -> Result<(), String> {
        if found != self.current {
            let Some(at) = self.unknown.iter().position(|write| *write == found) else {
                let Register { current, unknown } = self;
                return Err(format!("found {found:?}, written {current:?}, unknown {unknown:?}"));
            };
            self.unknown.swap_remove(at);
            self.current = found;
        }
        Ok(())
    }
}

/// State that all tasks share.
#[derive(Default)]
struct Run {
    registers: Vec<Register>,
    operation: u64,
    /// Commands that got a response.
    responses: u64,
    /// Commands that failed because the connection was lost.
    lost: u64,
    /// Commands whose future was dropped.
    dropped: u64,
    tasks_ended: u64,
    digest: u64,
    violation: Option<String>,
}

type SharedRun = Rc<RefCell<Run>>;

impl Run {
    fn fail(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    fn note(&mut self, fact: u64) {
        self.digest = mix64(self.digest ^ fact);
    }
}

struct Setup {
    sim: SimEnv,
    plan: KvScenarioPlan,
    /// The node whose cores have outgoing sessions, and its peer.
    node: KvNodeUnderTest,
    peer: KvNodeUnderTest,
    host: ClientHost,
    workload: Rc<RefCell<KvWorkload>>,
    random: Prng,
}

fn peer_config(random: &mut Prng, own_nqn: &str) -> PeerConfig {
    let ms = Nanos::from_millis;
    let client = ClientConfig {
        host_nqn: own_nqn.to_owned(),
        io_queues: 1 + random.below(3) as u16,
        queue_depth: [1, 2, 8, 32][random.below(4) as usize],
        header_digest: random.one_in(2),
        data_digest: random.one_in(2),
        command_timeout: ms(700 + random.below(1_500)),
        connect_timeout: ms(2_000),
        keep_alive: ms(2_000 + random.below(3_000)),
        reconnect: Reconnect::BackOff { first_delay: ms(1), delay_max: ms(50), give_up_after: Nanos::NEVER },
        retry_first_connection: true,
        jitter_seed: Some(random.next_u64()),
        receive_buffer_bytes: 64 << 10,
        pool_bytes: 16 << 20,
        ..ClientConfig::default()
    };
    PeerConfig { client, buffer_bytes_max: [1_000, 60_000, 8 << 20][random.below(3) as usize] }
}

impl Setup {
    fn new(seed: u64) -> Setup {
        let mut random = Prng::new(mix64(seed ^ 0x9ee5));
        let mut plan = KvScenarioPlan::draw(seed, Scenario::Network);
        plan.nodes[0].durability = Durability::PowerSafe;
        plan.nodes[0].disk.size_bytes += 32 << 20;
        plan.load.keys = 4;
        let config = SimEnvConfig { link: plan.link, ..SimEnvConfig::new(random.next_u64()) };
        let sim = SimEnv::new(SimEnvConfig { iteration_cost_min: plan.iteration_cost, ..config });
        let mut make_node = || {
            let faults = DiskFaults::new(random.fork());
            (KvNodeUnderTest::new(&sim, plan.nodes[0], faults.clone()), faults)
        };
        let ((node, faults), (peer, _)) = (make_node(), make_node());
        let host = ClientHost::new(&sim, plan.hosts[0]);
        let keys = (0..plan.load.keys).map(key_of).filter(|key| key.len() <= 16);
        let workload = KvWorkload::new(vec![History::new(keys.collect())], plan.load, vec![faults]);
        Setup { sim, plan, node, peer, host, workload: Rc::new(RefCell::new(workload)), random }
    }

    fn peer_address(&self) -> SocketAddr {
        self.peer.sim_node.address()
    }

    fn task_count(&self) -> u64 {
        self.plan.nodes[0].cores as u64 * TASKS_PER_CORE
    }

    fn keys(&self) -> Vec<Key> {
        (0..self.task_count() * KEYS_PER_TASK).map(task_key).collect()
    }

    /// Starts the clients of the host, which use the first node.
    fn start_host(&mut self) {
        let Setup { sim, node, host, workload, random, .. } = self;
        workload.borrow_mut().progress.submit_limit = HOST_COMMANDS;
        let handle = handle_without_devices(sim, host.id);
        let address = node.sim_node.address();
        workload.borrow_mut().progress.add_client(handle.core_waker());
        let mut clients = Clients::new(sim, host, vec![address], random.fork(), handle.clone(), workload);
        sim.add_reactor(host.id, handle, move |now| clients.run_iteration(now));
    }

    /// Starts the tasks of every core of the first node, with one session per core.
    fn start_tasks(&mut self, run: &SharedRun) {
        let address = self.peer_address();
        let value_bytes_max = self.plan.nodes[0].value_bytes_max;
        let running = self.node.sim_node.running().expect("the node runs");
        for (core, index) in running.cores.iter().zip(0..) {
            let core = core.core.borrow();
            let config = peer_config(&mut self.random, &format!("nqn.2026-11.io.octokv:core-{index}"));
            let (handle, peers, run) = (core.handle().clone(), core.peers().clone(), Rc::clone(run));
            let seeds: Vec<u64> = (0..TASKS_PER_CORE).map(|_| self.random.next_u64()).collect();
            core.handle().spawn(async move {
                let peer = peers.connect(address, config, handle.now()).expect("within the bound");
                for (task, seed) in (index * TASKS_PER_CORE..).zip(seeds) {
                    let (peer, own, run) = (peer.clone(), handle.clone(), Rc::clone(&run));
                    handle.spawn(run_task(peer, own, run, task, value_bytes_max, Prng::new(seed)));
                }
            });
            // The core may be asleep.
            core.handle().core_waker().notify();
        }
    }

    fn wait_for(&self, run: &SharedRun, what: &str, mut done: impl FnMut() -> bool) -> Result<(), String> {
        let deadline = self.sim.now() + PROGRESS_TIMEOUT;
        let finished = self.sim.run_until_true(deadline, || run.borrow().violation.is_some() || done());
        if let Some(violation) = run.borrow_mut().violation.take() {
            return Err(violation);
        }
        if finished { Ok(()) } else { Err(format!("no progress: {what} does not end")) }
    }

    /// Sessions of the first node's cores.
    fn session_count(&self) -> usize {
        let running = self.node.sim_node.running().expect("the node runs");
        running.cores.iter().map(|core| core.core.borrow().peers().len()).sum()
    }

    fn set_partitioned(&self, partitioned: bool) {
        self.sim.set_partitioned(self.node.sim_node.host, self.peer.sim_node.host, partitioned);
    }

    /// Recovers the peer's volume, checks every key, and serves.
    fn boot_peer(&mut self, run: &SharedRun, first: bool) -> Result<(), String> {
        let keys = self.keys();
        let recovered = boot(&self.sim, &mut self.peer, keys.clone(), first)?;
        let mut run = run.borrow_mut();
        for (index, (key, audited)) in keys.iter().zip(recovered).enumerate() {
            let found = match audited {
                AuditResult::Missing => None,
                AuditResult::Value(bytes) => Some(identify(key, &bytes)?),
                AuditResult::Corrupt(lba) => return Err(format!("{key}: corrupted at block {lba}")),
                AuditResult::Failed(error) => return Err(format!("{key}: {error}")),
            };
            run.registers[index].observe(found).map_err(|what| format!("after a crash, {key}: {what}"))?;
        }
        Ok(())
    }

    /// Injects one fault and heals it after a while.
    fn inject_fault(&mut self, run: &SharedRun) -> Result<(), String> {
        let (own, peer) = (self.node.sim_node.host, self.peer.sim_node.host);
        let pause = Nanos::from_micros(self.random.below(3_000_000));
        match self.random.below(7) {
            0 => drop(self.sim.reset_streams(own, peer)),
            1 | 2 => {
                self.set_partitioned(true);
                self.sim.run_until(self.sim.now() + pause);
                self.set_partitioned(false);
            }
            // Responses arrive in pieces, so connections are lost in the middle of them.
            3 => {
                let slow = SimLinkConfig {
                    latency: Nanos::from_micros(self.random.below(2_000)),
                    jitter: Nanos::from_millis(8),
                    window_bytes: 4_096,
                    fragments: true,
                    ..self.plan.link
                };
                self.sim.set_link(own, peer, slow);
                for _ in 0..8 {
                    self.sim.run_until(self.sim.now() + Nanos::from_micros(self.random.below(500_000)));
                    self.sim.reset_streams(own, peer);
                }
                self.sim.set_link(own, peer, self.plan.link);
            }
            kind => {
                let failure = match kind {
                    4 => HostFailure::ProcessKilled,
                    5 => HostFailure::PowerLoss(CrashModel::LoseAll),
                    _ => HostFailure::PowerLoss(CrashModel::RandomWrites),
                };
                self.peer.stop(failure);
                self.sim.run_until(self.sim.now() + pause);
                self.boot_peer(run, false)?;
            }
        }
        Ok(())
    }
}

/// Recovers a node's volume and serves. Returns what the audit found.
fn boot(
    sim: &SimEnv,
    node: &mut KvNodeUnderTest,
    keys: Vec<Key>,
    first: bool,
) -> Result<Vec<AuditResult>, String> {
    let recovery = node.start_recovery(keys, first);
    let recovered = sim.run_until_true(sim.now() + PROGRESS_TIMEOUT, || recovery.borrow().is_some());
    let result = recovery.borrow_mut().take().filter(|_| recovered).ok_or("recovery does not end")?;
    let (volume, audited) = result.map_err(|error| format!("the volume does not open: {error}"))?;
    node.start_serving(volume);
    Ok(audited)
}

/// The operation that stored this value under `key`.
fn identify(key: &Key, value: &[u8]) -> Result<u64, String> {
    let front = value.first_chunk().ok_or_else(|| format!("{key}: a value of {} bytes", value.len()))?;
    let operation = u64::from_le_bytes(*front);
    let is_whole = value == value_of(key, operation, value.len());
    if is_whole { Ok(operation) } else { Err(format!("{key}: a value that was never stored")) }
}

/// The output of `future`, or `None` if `limit` completes first.
async fn until<T>(future: impl Future<Output = T>, limit: impl Future<Output = ()>) -> Option<T> {
    let (mut future, mut limit) = (pin!(future), pin!(limit));
    poll_fn(|context| match future.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => limit.as_mut().poll(context).map(|()| None),
    })
    .await
}

/// Executes random commands on the keys of one task.
async fn run_task(
    peer: PeerSession,
    handle: ReactorHandle,
    run: SharedRun,
    task: u64,
    value_bytes_max: u32,
    mut random: Prng,
) {
    for _ in 0..COMMANDS {
        let index = task * KEYS_PER_TASK + random.below(KEYS_PER_TASK);
        run_command(&peer, &handle, &run, index, value_bytes_max, &mut random).await;
        if run.borrow().violation.is_some() {
            return;
        }
        if !peer.is_live() && random.one_in(2) {
            // The task may also try while there is no connection.
            if let Err(error) = peer.until_live().await {
                run.borrow_mut().fail(format!("the session has ended: {error}"));
            }
        } else {
            handle.sleep(Nanos::from_micros(1 + random.below(50_000))).await;
        }
    }
    run.borrow_mut().tasks_ended += 1;
}

async fn run_command(
    peer: &PeerSession,
    handle: &ReactorHandle,
    run: &SharedRun,
    index: u64,
    value_bytes_max: u32,
    random: &mut Prng,
) {
    let key = task_key(index);
    let operation = {
        let mut run = run.borrow_mut();
        run.operation += 1;
        run.operation
    };
    let bytes_max = [100, 5_000, 60_000][random.below(3) as usize].min(u64::from(value_bytes_max));
    let bytes = 8 + random.below(bytes_max - 8);
    let value = value_of(&key, operation, bytes as usize);
    // What the command writes, if it writes.
    let (command, write) = match random.below(5) {
        0 | 1 => {
            let value = Value::Slice(&value);
            (Command::Store { key: key.clone(), value, mode: StoreMode::Upsert }, Some(Some(operation)))
        }
        2 => (Command::Delete { key: key.clone() }, Some(None)),
        _ => (Command::Retrieve { key: key.clone(), limit_bytes: u32::MAX }, None),
    };
    let is_dropped = random.one_in(6);
    let limit = if is_dropped { Nanos::from_micros(random.below(2_000)) } else { Nanos::from_secs(3_600) };
    let epoch = peer.connection_epoch();
    let result = until(peer.execute(command), handle.sleep(limit)).await;
    let mut run = run.borrow_mut();
    run.note(operation ^ (epoch << 40) ^ result.as_ref().map_or(7, |result| u64::from(result.is_ok())));
    run.note(handle.now().0);
    let checked = match result {
        None => {
            run.dropped += 1;
            run.registers[index as usize].unknown.extend(write);
            Ok(())
        }
        Some(result) => check_result(&mut run, index as usize, &key, write, result),
    };
    if let Some(cause @ (ConnectionError::Protocol(_) | ConnectionError::Terminated { .. })) =
        peer.last_error()
    {
        run.fail(format!("a violation of the protocol: {cause}"));
    }
    if let Err(what) = checked {
        run.fail(format!("operation {operation} on {key}: {what}"));
    }
}

fn check_result(
    run: &mut Run,
    index: usize,
    key: &Key,
    write: Option<Option<u64>>,
    result: Result<Response, Error>,
) -> Result<(), String> {
    let register = &mut run.registers[index];
    match (result, write) {
        (Ok(Response::Stored | Response::Deleted), Some(write)) => register.acknowledge(write),
        // A delete of a missing key.
        (Ok(Response::NotFound), Some(None)) => register.observe(None)?,
        (Ok(Response::NotFound), None) => register.observe(None)?,
        (Ok(Response::Value { data, .. }), None) => register.observe(Some(identify(key, &data)?))?,
        (Ok(other), _) => return Err(format!("an unexpected response: {other:?}")),
        (Err(Error::OutcomeUnknown), Some(write)) => {
            register.unknown.push(write);
            run.lost += 1;
            return Ok(());
        }
        (Err(Error::Disconnected(ConnectionError::Closed | ConnectionError::TimedOut)), _)
        | (Err(Error::NotConnected), _) => {
            run.lost += 1;
            return Ok(());
        }
        // Not executed.
        (Err(Error::Busy | Error::CapacityExceeded), _) => {}
        (Err(error), _) => return Err(format!("an unexpected error: {error}")),
    }
    run.responses += 1;
    Ok(())
}

/// Counters of a run without violation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Counters {
    responses: u64,
    lost: u64,
    dropped: u64,
    served: u64,
    trace_hash: u64,
    digest: u64,
}

/// Runs one seed. The error is the first violation.
fn run_seed(seed: u64) -> Result<Counters, String> {
    let mut setup = Setup::new(seed);
    let run = SharedRun::default();
    run.borrow_mut().registers.resize_with(setup.keys().len(), Register::default);
    boot(&setup.sim, &mut setup.node, Vec::new(), true)?;
    setup.workload.borrow_mut().histories[0].node_is_up = true;
    // The sessions begin to connect before or after the peer serves.
    let is_early = setup.random.one_in(2);
    if is_early {
        setup.start_tasks(&run);
    }
    setup.boot_peer(&run, true)?;
    if !is_early {
        setup.start_tasks(&run);
    }
    setup.start_host();
    let result = run_faults(&mut setup, &run).and_then(|()| finish(&mut setup, &run));
    let counters = {
        let run = run.borrow();
        Counters {
            responses: run.responses,
            lost: run.lost,
            dropped: run.dropped,
            served: setup.workload.borrow().progress.succeeded,
            trace_hash: setup.sim.trace_hash(),
            digest: run.digest,
        }
    };
    // The reactors of a host hold the simulation.
    let hosts: [SimHostId; 3] = [setup.node.sim_node.host, setup.peer.sim_node.host, setup.host.id];
    hosts.iter().for_each(|&host| setup.sim.stop_host(host, HostFailure::ProcessKilled));
    result.map(|()| counters)
}

fn run_faults(setup: &mut Setup, run: &SharedRun) -> Result<(), String> {
    for _ in 0..4 {
        let pause = Nanos::from_micros(setup.random.below(1_500_000));
        setup.sim.run_until(setup.sim.now() + pause);
        setup.inject_fault(run)?;
    }
    let tasks = setup.task_count();
    setup.wait_for(run, "a command", || run.borrow().tasks_ended == tasks)
}

/// Disconnects the host, waits for the end of the sessions, whose handles the tasks have dropped, and checks that nothing
/// is left on either node.
fn finish(setup: &mut Setup, run: &SharedRun) -> Result<(), String> {
    setup.workload.borrow_mut().progress.begin_quiescing();
    let sessions = Rc::clone(&setup.host.session_count);
    setup.wait_for(run, "the disconnect of the host", || sessions.get() == 0)?;
    setup.wait_for(run, "the close of the sessions", || setup.session_count() == 0)?;
    for node in [&setup.node, &setup.peer] {
        let is_quiescent = || node.sim_node.is_quiescent() && node.sim_node.find_leak().is_none();
        setup.wait_for(run, "the node's work", is_quiescent)?;
    }
    let mut workload = setup.workload.borrow_mut();
    workload.progress.take_violation()?;
    let history = &workload.histories[0];
    (0..history.keys().len()).try_for_each(|key| history.check(key, history.events(key)).map(drop))
}

fn run_seed_catching_panics(seed: u64) -> Result<Counters, String> {
    catch_unwind(AssertUnwindSafe(|| run_seed(seed))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

#[test]
fn every_command_to_a_peer_ends_whatever_happens_to_it() {
    let mut sum = Counters::default();
    for seed in 0..16 {
        let counters = run_seed(seed).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        sum.responses += counters.responses;
        sum.lost += counters.lost;
        sum.dropped += counters.dropped;
        sum.served += counters.served;
    }
    println!("{sum:?}");
    assert!(sum.responses > 8_000 && sum.lost > 500 && sum.dropped > 400 && sum.served > 2_000, "{sum:?}");
}

#[test]
fn a_seed_repeats_the_same_simulation() {
    for seed in [3, 11] {
        assert_eq!(run_seed(seed), run_seed(seed));
    }
    assert_ne!(run_seed(3), run_seed(11));
}

fn assert_found(bug: InjectedBug, seeds: u64) {
    inject(Some(bug));
    let found = (0..seeds).find_map(|seed| run_seed_catching_panics(seed).err().map(|what| (seed, what)));
    inject(None);
    let (seed, what) = found.unwrap_or_else(|| panic!("{bug:?} is not found in {seeds} seeds"));
    println!("{bug:?}, after {} seeds: {what}", seed + 1);
}

#[test]
fn bytes_of_a_lost_connection_that_reach_the_next_one_are_found() {
    assert_found(InjectedBug::KeepReceivedBytes, 40);
}

#[test]
fn commands_that_are_forgotten_with_their_connection_are_found() {
    assert_found(InjectedBug::ForgetAbortedCommands, 10);
}

#[test]
fn a_late_response_that_completes_another_command_is_found() {
    assert_found(InjectedBug::ReuseAbandonedTokens, 10);
}

#[test]
fn an_idle_session_stays_alive_and_notices_a_peer_without_power() {
    let mut setup = Setup::new(1);
    let run = SharedRun::default();
    run.borrow_mut().registers.resize_with(setup.keys().len(), Register::default);
    boot(&setup.sim, &mut setup.node, Vec::new(), true).expect("boots");
    setup.boot_peer(&run, true).expect("boots");
    let mut config = peer_config(&mut setup.random, "nqn.2026-11.io.octokv:idle");
    config.client.command_timeout = Nanos::from_millis(20);
    let limit =
        Nanos(config.client.keep_alive.0 / 2) + config.client.command_timeout + Nanos::from_millis(200);
    let (session, address) = (Rc::new(RefCell::new(None::<PeerSession>)), setup.peer_address());
    {
        let core = setup.node.sim_node.running().expect("the node runs").cores[0].core.borrow();
        let (handle, peers, session) = (core.handle().clone(), core.peers().clone(), Rc::clone(&session));
        core.handle().spawn(async move {
            *session.borrow_mut() = peers.connect(address, config, handle.now()).ok();
        });
        core.handle().core_waker().notify();
    }
    let state = || session.borrow().as_ref().map(|peer| (peer.is_live(), peer.connection_epoch()));
    setup.wait_for(&run, "the connection", || state() == Some((true, 1))).expect("connects");
    setup.sim.run_until(setup.sim.now() + Nanos::from_secs(60));
    assert_eq!(state(), Some((true, 1)), "the node keeps the controller of an idle session");
    // A command after a long idle time is answered on the same connection.
    let answered = Rc::new(RefCell::new(None));
    {
        let core = setup.node.sim_node.running().expect("the node runs").cores[0].core.borrow();
        let (peer, result) = (session.borrow().clone().expect("it is live"), Rc::clone(&answered));
        core.handle().spawn(async move {
            *result.borrow_mut() = Some(peer.execute(Command::Exist { key: task_key(0) }).await);
        });
        core.handle().core_waker().notify();
    }
    setup.wait_for(&run, "the command", || answered.borrow().is_some()).expect("it ends");
    assert!(matches!(*answered.borrow(), Some(Ok(Response::NotFound))), "{:?}", answered.borrow());
    assert_eq!(state(), Some((true, 1)), "the connection is the same");
    setup.peer.stop(HostFailure::PowerLoss(CrashModel::LoseAll));
    let stopped_at = setup.sim.now();
    setup.wait_for(&run, "the notice", || state() == Some((false, 1))).expect("the session is lost");
    assert!(setup.sim.now() - stopped_at <= limit, "after {:?}", setup.sim.now() - stopped_at);
    setup.boot_peer(&run, false).expect("boots");
    setup.wait_for(&run, "the connection", || state() == Some((true, 2))).expect("reconnects");
    drop(session.borrow_mut().take());
    let hosts = [setup.node.sim_node.host, setup.peer.sim_node.host];
    hosts.iter().for_each(|&host| setup.sim.stop_host(host, HostFailure::ProcessKilled));
}
