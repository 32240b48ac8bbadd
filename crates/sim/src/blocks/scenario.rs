//! What happens in one world of blocks, as data drawn from one seed.
//!
//! The node, its hosts, the links and the rounds are those of [`crate::plan`]; what is here besides are the
//! disks, what is asked of them, and what the operator does.

use crate::scenario::{
    HostPlan, NodePlan, Round, Scenario, between, draw_host, draw_link, draw_node, draw_round, pick,
};
use octokv_base::prng::mix;
use octokv_base::{Nanos, Random};
use octokv_runtime::simulated::{CrashPlan, DiskSettings, LinkSettings};

/// One world of blocks from beginning to end.
#[derive(Clone, Debug)]
pub struct BlocksPlan {
    /// What it was drawn from.
    pub seed: u64,
    /// Which kinds of faults there are.
    pub weather: Scenario,
    /// The node; it has none of [`NodePlan::disk`]'s size.
    pub node: NodePlan,
    /// Its disks, a namespace each.
    pub disks: Vec<DiskPlan>,
    /// The hosts of clients.
    pub hosts: Vec<HostPlan>,
    /// What they do.
    pub load: BlocksLoad,
    /// The links, while nothing is wrong with them.
    pub link: LinkSettings,
    /// What a turn of a reactor costs.
    pub turn_cost: Nanos,
    /// One after another, until the world ends.
    pub rounds: Vec<Round>,
    /// After so many answers the operator changes something; `None` for nobody at work.
    pub operator: Option<u64>,
}

/// One disk and the namespace on it.
#[derive(Clone, Copy, Debug)]
pub struct DiskPlan {
    /// The disk.
    pub disk: DiskSettings,
    /// Bytes of the namespace's block.
    pub block_bytes: u32,
    /// The first block that clients use.
    pub first: u64,
    /// How many they use.
    pub count: u64,
}

/// What clients ask for.
#[derive(Clone, Copy, Debug)]
pub struct BlocksLoad {
    /// The most blocks of a command.
    pub blocks_max: u64,
    /// Shares of read, write, write zeroes, deallocate, compare, verify, flush.
    pub mix: [u64; 7],
    /// One in so many writes is to be durable at once.
    pub durable_one_in: u64,
}

impl BlocksPlan {
    /// The plan of a seed in a scenario of blocks.
    pub fn draw(seed: u64, scenario: Scenario) -> BlocksPlan {
        let mut random = Random::new(mix(seed.wrapping_mul(8) + scenario as u64));
        let random = &mut random;
        let weathers = [
            Scenario::Calm,
            Scenario::Crashes,
            Scenario::Crashes,
            Scenario::Network,
            Scenario::Disk,
            Scenario::Everything,
        ];
        let weather = pick(random, &weathers);
        let changes = scenario == Scenario::Namespaces;
        let node = draw_node(random);
        let count = if changes { between(random, 2, 4) } else { between(random, 1, 2) };
        let disks: Vec<DiskPlan> = (0..count).map(|_| draw_disk(random, &node)).collect();
        let count = between(random, 1, 3);
        let hosts: Vec<HostPlan> = (0..count).map(|_| draw_host(random, weather, &node)).collect();
        let count = between(random, 2, 5);
        let rounds = (0..count).map(|_| draw_round(random, weather, hosts.len())).collect();
        BlocksPlan {
            seed,
            weather,
            node,
            disks,
            hosts,
            load: draw_load(random),
            link: draw_link(random),
            turn_cost: Nanos(between(random, 200, 4_000)),
            rounds,
            operator: changes.then(|| between(random, 5, 80)),
        }
    }

    /// Whether a command may go without an answer for as long as hosts wait.
    pub fn may_time_out(&self) -> bool {
        self.weather != Scenario::Calm
    }

    /// A power cut that tears what a disk writes, or one that a namespace's block survives whole: it may be larger
    /// than what tears here.
    pub fn cut(&self, plan: CrashPlan) -> CrashPlan {
        let torn = self.disks.iter().any(|disk| disk.block_bytes > 512);
        if plan == CrashPlan::Torn && torn { CrashPlan::Some } else { plan }
    }
}

fn draw_disk(random: &mut Random, node: &NodePlan) -> DiskPlan {
    let block_bytes = pick(random, &[512, 512, 4096]);
    let count = pick(random, &[4, 10, 24]);
    let first = random.below(12);
    let bytes = (first + count + random.below(9)) * u64::from(block_bytes);
    let disk = DiskSettings {
        size_bytes: bytes.next_multiple_of(4096),
        block_bytes: pick(random, &[512, 4096, 4096]),
        ..node.disk
    };
    DiskPlan { disk, block_bytes, first, count }
}

fn draw_load(random: &mut Random) -> BlocksLoad {
    let mut some = |least: u64, most: u64| least + random.below(most + 1);
    let mix = [some(10, 30), some(15, 30), some(0, 12), some(0, 8), some(0, 10), some(0, 3), some(0, 6)];
    BlocksLoad { blocks_max: pick(random, &[1, 3, 9]), mix, durable_one_in: pick(random, &[1, 3, 10, 1_000]) }
}
