//! What happens in one world with an engine on a client, as data drawn from one seed.

use crate::blocks::scenario::{BlocksLoad, BlocksPlan, DiskPlan};
use crate::scenario::{
    HostPlan, Load, NodePlan, Round, Scenario, between, draw_host, draw_link, draw_load, draw_node,
    draw_round, pick,
};
use octokv_base::prng::mix;
use octokv_base::{Nanos, Random};
use octokv_engine::hash::FormatSettings;
use octokv_runtime::simulated::{DiskSettings, LinkSettings};

/// One world from beginning to end.
#[derive(Clone, Debug)]
pub struct RemotePlan {
    /// What it was drawn from.
    pub seed: u64,
    /// Which kinds of faults there are.
    pub weather: Scenario,
    /// The node, and how the volume on its namespace is made.
    pub node: NodePlan,
    /// Bytes of the namespace's block.
    pub block_bytes: u32,
    /// The host with the engine.
    pub host: HostPlan,
    /// What is asked of the engine.
    pub load: Load,
    /// The link, while nothing is wrong with it.
    pub link: LinkSettings,
    /// What a turn of a reactor costs.
    pub turn_cost: Nanos,
    /// One after another, until the world ends.
    pub rounds: Vec<Round>,
}

impl RemotePlan {
    /// The plan of a seed.
    pub fn draw(seed: u64) -> RemotePlan {
        let mut random = Random::new(mix(seed.wrapping_mul(8) + Scenario::Remote as u64));
        let random = &mut random;
        let weathers = [
            Scenario::Calm,
            Scenario::Crashes,
            Scenario::Crashes,
            Scenario::Network,
            Scenario::Network,
            Scenario::Disk,
            Scenario::Everything,
        ];
        let weather = pick(random, &weathers);
        let node = draw_node(random);
        let block_bytes = if node.unit_bytes == 4096 { pick(random, &[512, 4096]) } else { 512 };
        let host = HostPlan { sessions: 1, ..draw_host(random, weather, &node) };
        let count = between(random, 2, 5);
        let rounds = (0..count).map(|_| draw_round(random, weather, 1)).collect();
        let load = Load { keys: pick(random, &[3, 8, 20]), ..draw_load(random, &node) };
        let link = draw_link(random);
        let turn_cost = Nanos(between(random, 200, 4_000));
        RemotePlan { seed, weather, node, block_bytes, host, load, link, turn_cost, rounds }
    }

    /// How the volume is made.
    pub fn format(&self) -> FormatSettings {
        FormatSettings {
            unit_bytes: self.node.unit_bytes,
            hash: self.node.hash,
            partitions_log2: self.node.partitions_log2,
            value_bytes_max: self.node.value_bytes_max,
            namespace: 1,
            seed: 7,
        }
    }

    /// The node as one that serves blocks.
    pub fn blocks(&self) -> BlocksPlan {
        let disk = DiskPlan {
            disk: DiskSettings { block_bytes: 512, ..self.node.disk },
            block_bytes: self.block_bytes,
            first: 0,
            count: 0,
        };
        BlocksPlan {
            seed: self.seed,
            weather: self.weather,
            node: self.node,
            disks: vec![disk],
            hosts: vec![self.host],
            load: BlocksLoad { blocks_max: 1, mix: [1; 7], durable_one_in: 1 },
            link: self.link,
            turn_cost: self.turn_cost,
            rounds: self.rounds.clone(),
            operator: None,
        }
    }
}
