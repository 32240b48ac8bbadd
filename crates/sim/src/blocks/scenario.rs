//! The plan of one simulation with block namespaces, drawn from one seed.
//!
//! Node, hosts, links and phases are those of [`crate::scenario_draw`]; this file adds the disks, the block commands and
//! the operator.

use crate::draw::{between, pick};
use crate::scenario::{ClientHostPlan, NodePlan, Phase, Scenario};
use crate::scenario_draw::{draw_host, draw_link, draw_node, draw_phase};
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_runtime::simulated::{CrashModel, SimDiskConfig, SimLinkConfig};
use octokv_sched::Policy;

/// Plan of one simulation with block namespaces.
#[derive(Clone, Debug)]
pub struct BlockScenarioPlan {
    /// The seed that the plan was drawn from.
    pub seed: u64,
    /// The faults to inject: one of the key-value scenarios.
    pub fault_profile: Scenario,
    /// The node; [`DiskPlan::disk`] replaces its [`NodePlan::disk`].
    pub node: NodePlan,
    /// Disks, one namespace each.
    pub disks: Vec<DiskPlan>,
    /// Client hosts.
    pub hosts: Vec<ClientHostPlan>,
    /// Commands that clients submit.
    pub load: BlockLoad,
    /// Link properties while no link fault is active.
    pub link: SimLinkConfig,
    /// Simulated time of one reactor iteration at least.
    pub iteration_cost: Nanos,
    /// Phases, run in order until the simulation ends.
    pub phases: Vec<Phase>,
    /// Mean number of completed commands between operator changes; `None` for no operator.
    pub operator_interval: Option<u64>,
}

/// One disk and its namespace.
#[derive(Clone, Copy, Debug)]
pub struct DiskPlan {
    /// The disk.
    pub disk: SimDiskConfig,
    /// Block size of the namespace, in bytes.
    pub block_bytes: u32,
    /// First block that clients use.
    pub first: u64,
    /// Number of blocks that clients use.
    pub count: u64,
    /// Whether the disk is memory of the node, which a stop loses.
    pub is_in_memory: bool,
}

/// Block commands that clients submit.
#[derive(Clone, Copy, Debug)]
pub struct BlockLoad {
    /// Maximum blocks per command.
    pub blocks_max: u64,
    /// Weights of read, write, write zeroes, deallocate, compare, verify, flush.
    pub mix: [u64; 7],
    /// On average one write in this many sets FUA.
    pub durable_one_in: u64,
}

impl BlockScenarioPlan {
    /// Draws the plan of a seed and scenario.
    pub fn draw(seed: u64, scenario: Scenario) -> BlockScenarioPlan {
        let mut random = Prng::new(mix64(seed.wrapping_mul(8) + scenario as u64));
        let random = &mut random;
        let fault_profiles = [
            Scenario::Calm,
            Scenario::Crashes,
            Scenario::Crashes,
            Scenario::Network,
            Scenario::Disk,
            Scenario::Everything,
        ];
        let fault_profile = pick(random, &fault_profiles);
        let changes = scenario == Scenario::Namespaces;
        let node = draw_node(random);
        let count = if changes { between(random, 2, 4) } else { between(random, 1, 2) };
        let disks: Vec<DiskPlan> = (0..count).map(|_| draw_disk(random, &node)).collect();
        let count = between(random, 1, 3);
        let hosts: Vec<ClientHostPlan> =
            (0..count).map(|_| draw_host(random, fault_profile, &node)).collect();
        let count = between(random, 2, 5);
        let phases = (0..count).map(|_| draw_phase(random, fault_profile, hosts.len())).collect();
        let mut plan = BlockScenarioPlan {
            seed,
            fault_profile,
            node,
            disks,
            hosts,
            load: draw_load(random),
            link: draw_link(random),
            iteration_cost: Nanos(between(random, 200, 4_000)),
            phases,
            operator_interval: changes.then(|| between(random, 5, 80)),
        };
        // The last draw: the plans of other seeds do not depend on it.
        if random.one_in(8) {
            plan.contend_for_device_blocks();
        }
        // A generator of its own: the other draws of a seed do not depend on it.
        let mut random = Prng::new(mix64(seed ^ 0x3e30));
        if random.one_in(3) {
            plan.disks.iter_mut().for_each(|disk| disk.is_in_memory = !random.one_in(4));
            plan.make_commands_end_at_once(&mut random);
        }
        plan
    }

    /// Makes every command a read, write or deallocation of one device block, which holds eight namespace blocks, and its
    /// neighbour: partial writes and trims of the same device block overlap often.
    fn contend_for_device_blocks(&mut self) {
        for plan in &mut self.disks {
            let disk = SimDiskConfig { size_bytes: 8192, block_bytes: 4096, ..plan.disk };
            *plan = DiskPlan { disk, block_bytes: 512, first: 0, count: 10, ..*plan };
        }
        let [read, write, ..] = self.load.mix;
        self.load = BlockLoad { blocks_max: 9, mix: [read, write, 0, 30, 0, 0, 0], ..self.load };
    }

    /// Most of the time no policy acts, and connections have no digests: then reads of memory end at once.
    fn make_commands_end_at_once(&mut self, random: &mut Prng) {
        let scheduling = &mut self.node.scheduling;
        (scheduling.policy, scheduling.operations_per_s) = (Policy::None, 0);
        scheduling.policy_intervals = pick(random, &[0, 0, 5]);
        for host in &mut self.hosts {
            (host.header_digest, host.data_digest) = (random.one_in(6), random.one_in(6));
        }
    }

    /// Whether injected faults may make commands time out.
    pub fn may_time_out(&self) -> bool {
        self.fault_profile != Scenario::Calm
    }

    /// The crash model to apply: writes tear at 512 bytes, so namespaces with larger blocks get whole random writes
    /// instead.
    pub fn crash_model(&self, plan: CrashModel) -> CrashModel {
        let torn = self.disks.iter().any(|disk| disk.block_bytes > 512);
        if plan == CrashModel::TornWrites && torn { CrashModel::RandomWrites } else { plan }
    }
}

fn draw_disk(random: &mut Prng, node: &NodePlan) -> DiskPlan {
    let block_bytes = pick(random, &[512, 512, 4096]);
    let count = pick(random, &[4, 10, 24]);
    let first = random.below(12);
    let bytes = (first + count + random.below(9)) * u64::from(block_bytes);
    let disk = SimDiskConfig {
        size_bytes: bytes.next_multiple_of(4096),
        block_bytes: pick(random, &[512, 4096, 4096]),
        ..node.disk
    };
    DiskPlan { disk, block_bytes, first, count, is_in_memory: false }
}

fn draw_load(random: &mut Prng) -> BlockLoad {
    let mut some = |least: u64, most: u64| least + random.below(most + 1);
    let mix = [some(10, 30), some(15, 30), some(0, 12), some(0, 8), some(0, 10), some(0, 3), some(0, 6)];
    BlockLoad { blocks_max: pick(random, &[1, 3, 9]), mix, durable_one_in: pick(random, &[1, 3, 10, 1_000]) }
}
