//! The processor time of a simulated second: of nodes that are busy, and of nodes whose hosts are connected and idle.
//!
//! Usage: `sim_cost [BUSY_NODES IDLE_NODES]`, by default 3 and 100. Prints for each the processor time per simulated
//! second and the operations per second of processor time.

#![allow(clippy::disallowed_methods, reason = "processor time is read from the system")]

use octokv_base::{Nanos, Prng};
use octokv_engine::Durability;
use octokv_engine::HashKind;
use octokv_engine::conformance::key_of;
use octokv_node::SimulatedCosts;
use octokv_runtime::simulated::{HostFailure, SimDiskConfig, SimEnv, SimEnvConfig};
use octokv_sched::{MigrateTenants, Policy};
use octokv_sim::clients::{ClientHost, Clients};
use octokv_sim::engine_plan::EnginePlan;
use octokv_sim::faulty_disk::DiskFaults;
use octokv_sim::history::History;
use octokv_sim::kv_workload::KvWorkload;
use octokv_sim::node_under_test::{KvNodeUnderTest, handle_without_devices};
use octokv_sim::progress::LoadProgress;
use octokv_sim::scenario::{ClientHostPlan, KvLoad, NodePlan};
use octokv_sim::scheduling_scenario::SchedulingPlan;
use std::cell::RefCell;
use std::rc::Rc;

/// Time to format, connect and reach a steady load.
const WARM_UP: Nanos = Nanos::from_millis(100);
const BUSY_SPAN: Nanos = Nanos::from_millis(300);
const IDLE_SPAN: Nanos = Nanos::from_secs(10);
const CLIENT_HOSTS: usize = 2;

const NODE: NodePlan = NodePlan {
    cores: 2,
    engine: EnginePlan::Hash,
    devices: 1,
    unit_bytes: 4096,
    hash: HashKind::Xxh3,
    format_version: 1,
    partitions_log2: 2,
    value_bytes_max: 8 << 10,
    durability: Durability::PowerSafe,
    pool_bytes: 8 << 20,
    device_depth: 128,
    requests_max: 256,
    drive_cores: 0,
    has_owner_cores: false,
    is_in_memory: false,
    has_parallel_core: false,
    replaces_disks: false,
    additions: [u64::MAX; 2],
    swap_bytes: 0,
    swap_gap: 0,
    put_tokens: 0,
    cache_bytes: 0,
    prepare_bytes: 0,
    compact_bytes_per_second: 0,
    queue_depth: 256,
    in_capsule_bytes: 4096,
    max_h2c_data: 512 << 10,
    receive_bytes_max: 1 << 20,
    send_buffer_bytes_max: 16 << 20,
    disk: SimDiskConfig {
        size_bytes: 16 << 20,
        block_bytes: 4096,
        read_latency: Nanos::from_micros(70),
        write_latency: Nanos::from_micros(15),
        flush_latency: Nanos::from_micros(20),
        jitter: Nanos::from_micros(10),
        bytes_per_second: 1_000_000_000,
        parallelism: 8,
    },
    scheduling: SchedulingPlan {
        policy: Policy::None,
        interval: Nanos::from_millis(100),
        migrate_tenants: MigrateTenants::All,
        requeues_max: 0,
        in_flight: 32,
        operations_per_s: 0,
        policy_intervals: 0,
        costs: SimulatedCosts { target: Nanos::ZERO, kv: Nanos::ZERO, device: Nanos::ZERO },
    },
};

const HOST: ClientHostPlan = ClientHostPlan {
    sessions: 1,
    queues: 2,
    queue_depth: 16,
    commands_max: 16,
    header_digest: false,
    data_digest: false,
    command_timeout: Nanos::from_secs(5),
    keep_alive: Nanos::from_secs(2),
    think_time_max: Nanos::ZERO,
};

/// Puts of 2,000 bytes at most, gets, deletes.
const LOAD: KvLoad = KvLoad {
    keys: 64,
    long_keys: false,
    value_bytes_max: 2_000,
    mix: [40, 0, 0, 50, 0, 10, 0, 0, 0],
    scans: None,
};

/// A node that serves its hosts.
struct ServedNode {
    node: KvNodeUnderTest,
    hosts: Vec<ClientHost>,
    workload: Rc<RefCell<KvWorkload>>,
}

impl ServedNode {
    /// Formats a node and connects its hosts, which submit at most `submit_limit` commands.
    fn start(sim: &SimEnv, submit_limit: u64) -> ServedNode {
        let faults = DiskFaults::new(Prng::new(1));
        let mut node = KvNodeUnderTest::new(sim, NODE, faults.clone());
        let opened = node.start_recovery(Vec::new(), true);
        sim.run_until_true(Nanos::NEVER, || opened.borrow().is_some());
        let opened = opened.take().expect("the disk answers").map(|(volume, _)| volume);
        node.start_serving(opened.unwrap_or_else(|error| panic!("an empty disk opens: {error}")));
        let mut progress = LoadProgress::default();
        progress.submit_limit = submit_limit;
        let mut history = History::new((0..LOAD.keys).map(key_of).filter(|key| key.len() <= 16).collect());
        history.node_is_up = true;
        let load = KvLoad { keys: history.keys().len() as u64, ..LOAD };
        let workload = KvWorkload { progress, ..KvWorkload::new(vec![history], load, vec![faults]) };
        let workload = Rc::new(RefCell::new(workload));
        let hosts: Vec<ClientHost> = (0..CLIENT_HOSTS).map(|_| ClientHost::new(sim, HOST)).collect();
        for host in &hosts {
            let handle = handle_without_devices(sim, host.id);
            let (address, random) = (node.sim_node.address(), Prng::new(u64::from(host.id.0)));
            let mut clients = Clients::new(sim, host, vec![address], random, handle.clone(), &workload);
            sim.add_reactor(host.id, handle, move |now| clients.run_iteration(now));
        }
        ServedNode { node, hosts, workload }
    }

    fn completed(&self) -> u64 {
        let workload = self.workload.borrow();
        assert_eq!(workload.progress.violation, None);
        assert!(
            self.hosts.iter().all(|host| host.session_count.get() == HOST.sessions),
            "a host is not connected"
        );
        workload.progress.completed
    }
}

/// The processor time of this thread.
fn processor_time() -> Nanos {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux");
    Nanos(text.split(' ').next().and_then(|number| number.parse().ok()).expect("a number of nanoseconds"))
}

fn measure(what: &str, count: usize, submit_limit: u64, span: Nanos) {
    let sim = SimEnv::new(SimEnvConfig::new(1));
    let nodes: Vec<ServedNode> = (0..count).map(|_| ServedNode::start(&sim, submit_limit)).collect();
    sim.run_until(sim.now() + WARM_UP);
    let completed = || nodes.iter().map(ServedNode::completed).sum::<u64>();
    let (before, began) = (completed(), processor_time());
    sim.run_until(sim.now() + span);
    let (operations, spent) = (completed() - before, processor_time().since(began));
    println!(
        "{count} {what} nodes: {:.3} s of processor time per simulated second, {:.0} operations/s of a core",
        spent.as_secs_f64() / span.as_secs_f64(),
        operations as f64 / spent.as_secs_f64(),
    );
    for ServedNode { node, hosts, .. } in &nodes {
        let hosts = hosts.iter().map(|host| host.id).chain([node.sim_node.host]);
        hosts.for_each(|host| sim.stop_host(host, HostFailure::ProcessKilled));
    }
}

fn main() {
    let mut counts = std::env::args().skip(1).map(|text| text.parse::<usize>().expect("a number of nodes"));
    measure("busy", counts.next().unwrap_or(3), u64::MAX, BUSY_SPAN);
    measure("idle", counts.next().unwrap_or(100), 0, IDLE_SPAN);
}
