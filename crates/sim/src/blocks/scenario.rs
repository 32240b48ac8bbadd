//! What happens in one world of blocks, as data drawn from one seed.
//!
//! The node, its hosts, the links and the rounds are those of [`crate::plan`]; what is here besides are the
//! disks, what is asked of them, and what the operator does.

use crate::scenario::{
    ClientHostPlan, NodePlan, Phase, Scenario, between, draw_host, draw_link, draw_node, draw_phase, pick,
};
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_runtime::simulated::{CrashModel, SimDiskConfig, SimLinkConfig};

/// One world of blocks from beginning to end.
#[derive(Clone, Debug)]
pub struct BlockScenarioPlan {
    /// What it was drawn from.
    pub seed: u64,
    /// Which kinds of faults there are.
    pub fault_profile: Scenario,
    /// The node; it has none of [`NodePlan::disk`]'s size.
    pub node: NodePlan,
    /// Its disks, a namespace each.
    pub disks: Vec<DiskPlan>,
    /// The hosts of clients.
    pub hosts: Vec<ClientHostPlan>,
    /// What they do.
    pub load: BlockLoad,
    /// The links, while nothing is wrong with them.
    pub link: SimLinkConfig,
    /// What a turn of a reactor costs.
    pub iteration_cost: Nanos,
    /// One after another, until the world ends.
    pub phases: Vec<Phase>,
    /// After so many answers the operator changes something; `None` for nobody at work.
    pub operator_interval: Option<u64>,
}

/// One disk and the namespace on it.
#[derive(Clone, Copy, Debug)]
pub struct DiskPlan {
    /// The disk.
    pub disk: SimDiskConfig,
    /// Bytes of the namespace's block.
    pub block_bytes: u32,
    /// The first block that clients use.
    pub first: u64,
    /// How many they use.
    pub count: u64,
}

/// What clients ask for.
#[derive(Clone, Copy, Debug)]
pub struct BlockLoad {
    /// The most blocks of a command.
    pub blocks_max: u64,
    /// Shares of read, write, write zeroes, deallocate, compare, verify, flush.
    pub mix: [u64; 7],
    /// One in so many writes is to be durable at once.
    pub durable_one_in: u64,
}

impl BlockScenarioPlan {
    /// The plan of a seed in a scenario of blocks.
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
        BlockScenarioPlan {
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
        }
    }

    /// Whether a command may go without an answer for as long as hosts wait.
    pub fn may_time_out(&self) -> bool {
        self.fault_profile != Scenario::Calm
    }

    /// A power cut that tears what a disk writes, or one that a namespace's block survives whole: it may be larger
    /// than what tears here.
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
    DiskPlan { disk, block_bytes, first, count }
}

fn draw_load(random: &mut Prng) -> BlockLoad {
    let mut some = |least: u64, most: u64| least + random.below(most + 1);
    let mix = [some(10, 30), some(15, 30), some(0, 12), some(0, 8), some(0, 10), some(0, 3), some(0, 6)];
    BlockLoad { blocks_max: pick(random, &[1, 3, 9]), mix, durable_one_in: pick(random, &[1, 3, 10, 1_000]) }
}
