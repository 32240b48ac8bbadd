//! The plan of one simulation with an engine on a client, drawn from one seed.

use crate::blocks::scenario::{BlockLoad, BlockScenarioPlan, DiskPlan};
use crate::draw::{between, pick};
use crate::scenario::{ClientHostPlan, KvLoad, NodePlan, Phase, Scenario};
use crate::scenario_draw::{
    draw_cache_bytes, draw_compact_bytes_per_second, draw_format_version, draw_host, draw_link, draw_load,
    draw_node, draw_phase,
};
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use octokv_engine::{EngineKind, FormatConfig};
use octokv_runtime::simulated::{SimDiskConfig, SimLinkConfig};

/// Plan of one simulation with a client-side engine.
#[derive(Clone, Debug)]
pub struct RemoteScenarioPlan {
    /// The seed that the plan was drawn from.
    pub seed: u64,
    /// The faults to inject: one of the key-value scenarios.
    pub fault_profile: Scenario,
    /// The node, and the format of the volume on its namespace.
    pub node: NodePlan,
    /// Block size of the namespace, in bytes.
    pub block_bytes: u32,
    /// The client host that runs the engine.
    pub host: ClientHostPlan,
    /// Operations on the engine.
    pub load: KvLoad,
    /// Link properties while no link fault is active.
    pub link: SimLinkConfig,
    /// Simulated time of one reactor iteration at least.
    pub iteration_cost: Nanos,
    /// Phases, run in order until the simulation ends.
    pub phases: Vec<Phase>,
}

impl RemoteScenarioPlan {
    /// Draws the plan of a seed.
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
        let cache_bytes = draw_cache_bytes(seed);
        let format_version = draw_format_version(seed);
        let compact_bytes_per_second = draw_compact_bytes_per_second(seed);
        let node = NodePlan { cache_bytes, format_version, compact_bytes_per_second, ..draw_node(random) };
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

    /// Format of the volume.
    pub fn format_config(&self) -> FormatConfig {
        FormatConfig {
            engine: EngineKind::default(),
            version: self.node.format_version,
            unit_bytes: Some(self.node.unit_bytes),
            hash: self.node.hash,
            bitmap_partitions_log2: self.node.partitions_log2,
            value_bytes_max: self.node.value_bytes_max,
            namespace: 1,
            seed: 7,
            ..FormatConfig::default()
        }
    }

    /// The plan of a node that serves the namespace.
    pub fn block_plan(&self) -> BlockScenarioPlan {
        let disk = DiskPlan {
            disk: SimDiskConfig { block_bytes: 512, ..self.node.disk },
            block_bytes: self.block_bytes,
            first: 0,
            count: 0,
            is_in_memory: false,
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
