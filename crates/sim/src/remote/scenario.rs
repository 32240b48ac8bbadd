//! What happens in one world with an engine on a client, as data drawn from one seed.

use crate::blocks::scenario::{BlockLoad, BlockScenarioPlan, DiskPlan};
use crate::scenario::{
    ClientHostPlan, KvLoad, NodePlan, Phase, Scenario, between, draw_host, draw_link, draw_load, draw_node,
    draw_phase, pick,
};
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_engine::hash::FormatConfig;
use octokv_runtime::simulated::{SimDiskConfig, SimLinkConfig};

/// One world from beginning to end.
#[derive(Clone, Debug)]
pub struct RemoteScenarioPlan {
    /// What it was drawn from.
    pub seed: u64,
    /// Which kinds of faults there are.
    pub fault_profile: Scenario,
    /// The node, and how the volume on its namespace is made.
    pub node: NodePlan,
    /// Bytes of the namespace's block.
    pub block_bytes: u32,
    /// The host with the engine.
    pub host: ClientHostPlan,
    /// What is asked of the engine.
    pub load: KvLoad,
    /// The link, while nothing is wrong with it.
    pub link: SimLinkConfig,
    /// What a turn of a reactor costs.
    pub iteration_cost: Nanos,
    /// One after another, until the world ends.
    pub phases: Vec<Phase>,
}

impl RemoteScenarioPlan {
    /// The plan of a seed.
    pub fn draw(seed: u64) -> RemoteScenarioPlan {
        let mut random = Prng::new(mix64(seed.wrapping_mul(8) + Scenario::Remote as u64));
        let random = &mut random;
        let fault_profiles = [
            Scenario::Calm,
            Scenario::Crashes,
            Scenario::Crashes,
            Scenario::Network,
            Scenario::Network,
            Scenario::Disk,
            Scenario::Everything,
        ];
        let fault_profile = pick(random, &fault_profiles);
        let node = draw_node(random);
        let block_bytes = if node.unit_bytes == 4096 { pick(random, &[512, 4096]) } else { 512 };
        let host = ClientHostPlan { sessions: 1, ..draw_host(random, fault_profile, &node) };
        let count = between(random, 2, 5);
        let phases = (0..count).map(|_| draw_phase(random, fault_profile, 1)).collect();
        let load = KvLoad { keys: pick(random, &[3, 8, 20]), ..draw_load(random, &node) };
        let link = draw_link(random);
        let iteration_cost = Nanos(between(random, 200, 4_000));
        RemoteScenarioPlan {
            seed,
            fault_profile,
            node,
            block_bytes,
            host,
            load,
            link,
            iteration_cost,
            phases,
        }
    }

    /// How the volume is made.
    pub fn format_config(&self) -> FormatConfig {
        FormatConfig {
            unit_bytes: self.node.unit_bytes,
            hash: self.node.hash,
            bitmap_partitions_log2: self.node.partitions_log2,
            value_bytes_max: self.node.value_bytes_max,
            namespace: 1,
            seed: 7,
        }
    }

    /// The node as one that serves blocks.
    pub fn block_plan(&self) -> BlockScenarioPlan {
        let disk = DiskPlan {
            disk: SimDiskConfig { block_bytes: 512, ..self.node.disk },
            block_bytes: self.block_bytes,
            first: 0,
            count: 0,
        };
        BlockScenarioPlan {
            seed: self.seed,
            fault_profile: self.fault_profile,
            node: self.node,
            disks: vec![disk],
            hosts: vec![self.host],
            load: BlockLoad { blocks_max: 1, mix: [1; 7], durable_one_in: 1 },
            link: self.link,
            iteration_cost: self.iteration_cost,
            phases: self.phases.clone(),
            operator_interval: None,
        }
    }
}
