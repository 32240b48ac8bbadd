//! Simulated runs of a whole node of LEED: four drives that are filled once, and loads on them one after another.
//!
//! ```text
//!   Uniform         gets, puts: one at a time, then many in flight                                             Table 3
//!   Skewed          puts by skew, then by requests in flight; one run for each of the engine's settings        Figure 10
//!   FlowControlled  YCSB's B and C by skew, then by requests in flight; with and without tokens                Figure 8
//!   Ycsb            each workload in a closed loop, then at parts of that throughput                           Figures 6 and 14
//! ```
//! In: the configuration of a run. Out: its loads with their results. What a figure compares is a field of [`LogNodeSettings`].
//!
//! Invariant: no space is compacted during a load, as in the runs with one drive before compaction.

use crate::job_runner::Durations;
use crate::simulation::log_node::clients::{NodeArrivals, NodeLoad};
use crate::simulation::log_node::experiment::{LogNodeConfig, LogNodeExperiment, LogNodeSettings};
use crate::simulation::log_node::node_stats::NodeStats;
use crate::simulation::log_node::parameters::{
    FLOW_DEPTH, FLOW_DEPTHS, NODE_DEPTH_MAX, NODE_OBJECTS, RATE_PERCENTS, SWAP_DEPTH, SWAP_DEPTHS, zipf_skews,
};
use crate::simulation::log_node::workload::NodeWorkload;
use crate::simulation::log_store::load_client::StoredObjects;
use crate::simulation::log_store::parameters::{
    CHUNK_BYTES, STORES, UNITS, VALUE_BYTES, modelled_drive, objects_of_run,
};
use octokv_base::Nanos;
use octokv_bench::key_distribution::KeyDistribution;

const SEED: u64 = 1;

/// Configuration of one run, with units of 512 B; sizes are indices of the value's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeRunConfig {
    /// Gets and puts of random objects.
    Uniform(usize),
    /// Writes only, with Zipf's distribution, with the engine's settings.
    Skewed(usize, LogNodeSettings),
    /// YCSB's B and C, with tokens and flow control or with neither.
    FlowControlled(usize, LogNodeSettings),
    /// YCSB's workloads and writes only.
    Ycsb(usize),
}

/// A load with its result.
#[derive(Clone, Debug)]
pub struct RanNodeLoad {
    /// The load.
    pub load: NodeLoad,
    /// What it did.
    pub stats: NodeStats,
}

/// The loads of a run, in order.
#[derive(Clone, Debug, Default)]
pub struct NodeRun(pub Vec<RanNodeLoad>);

impl NodeRun {
    /// The load of a workload that arrives so.
    ///
    /// # Panics
    /// If the run has none.
    pub fn of(&self, workload: NodeWorkload, arrivals: NodeArrivals) -> &NodeStats {
        let is_wanted = |ran: &&RanNodeLoad| ran.load.workload == workload && ran.load.arrivals == arrivals;
        &self.0.iter().find(is_wanted).expect("the run has this load").stats
    }

    /// The loads of a workload at rates, in the order of [`RATE_PERCENTS`].
    pub fn at_rates(&self, workload: NodeWorkload) -> impl Iterator<Item = &NodeStats> {
        let is_wanted = move |ran: &&RanNodeLoad| {
            ran.load.workload == workload && matches!(ran.load.arrivals, NodeArrivals::OneIn(_))
        };
        self.0.iter().filter(is_wanted).map(|ran| &ran.stats)
    }
}

/// Writes only with this skew.
pub fn skewed_writes(skew: f64) -> NodeWorkload {
    NodeWorkload { distribution: KeyDistribution::Zipf, skew, ..NodeWorkload::RANDOM_WRITES }
}

/// The workloads of Figure 8, with this skew.
pub fn flow_workloads(skew: f64) -> [(&'static str, NodeWorkload); 2] {
    [1, 2].map(|at| (NodeWorkload::YCSB[at].0, NodeWorkload { skew, ..NodeWorkload::YCSB[at].1 }))
}

fn load(workload: NodeWorkload, arrivals: NodeArrivals, measured: u64) -> NodeLoad {
    let measured = measured as u32;
    NodeLoad { workload, arrivals, warm_up: measured / 5, measured, seed: SEED }
}

fn closed_loop(workload: NodeWorkload, depth: usize, durations: &Durations) -> NodeLoad {
    // As with one drive: few in flight need fewer requests for a mean.
    let measured = if depth == 1 { durations.requests / 20 } else { durations.requests };
    load(workload, NodeArrivals::InFlight(depth), measured)
}

fn run_load(node: &LogNodeExperiment, load: NodeLoad) -> Result<RanNodeLoad, String> {
    let stats = node.run(load)?;
    let rounds: f64 = stats.drives.iter().map(|drive| drive.counted(|logs| logs.compaction_rounds)).sum();
    match rounds > 0.0 {
        true => Err(format!("{load:?} is not before compaction")),
        false => Ok(RanNodeLoad { load, stats }),
    }
}

fn uniform_loads(durations: &Durations) -> Vec<NodeLoad> {
    let workloads = [NodeWorkload::RANDOM_READS, NodeWorkload::RANDOM_WRITES];
    let of = |workload| [1, NODE_DEPTH_MAX].map(|depth| closed_loop(workload, depth, durations));
    workloads.into_iter().flat_map(of).collect()
}

fn skewed_loads(durations: &Durations) -> Vec<NodeLoad> {
    let skews = zipf_skews(durations.is_quick);
    let most = skews[skews.len() - 1];
    let by_skew = skews.iter().map(|&skew| closed_loop(skewed_writes(skew), SWAP_DEPTH, durations));
    let depths = SWAP_DEPTHS.into_iter().filter(|&depth| depth != SWAP_DEPTH && !durations.is_quick);
    by_skew.chain(depths.map(|depth| closed_loop(skewed_writes(most), depth, durations))).collect()
}

fn flow_loads(durations: &Durations) -> Vec<NodeLoad> {
    let skews = zipf_skews(durations.is_quick);
    let most = skews[skews.len() - 1];
    let of = |skew, depth| flow_workloads(skew).map(|(_, workload)| closed_loop(workload, depth, durations));
    let by_skew = skews.iter().flat_map(|&skew| of(skew, FLOW_DEPTH));
    let depths = FLOW_DEPTHS.into_iter().filter(|&depth| depth != FLOW_DEPTH && !durations.is_quick);
    by_skew.chain(depths.flat_map(|depth| of(most, depth))).collect()
}

fn run_ycsb(node: &LogNodeExperiment, durations: &Durations) -> Result<Vec<RanNodeLoad>, String> {
    let mut all = Vec::new();
    for (_, workload) in NodeWorkload::YCSB {
        let closed = run_load(node, closed_loop(workload, NODE_DEPTH_MAX, durations))?;
        let most_per_s = closed.stats.per_second();
        all.push(closed);
        for percent in RATE_PERCENTS {
            let one_in = Nanos((1e9 / (most_per_s * f64::from(percent) / 100.0)) as u64);
            all.push(run_load(node, load(workload, NodeArrivals::OneIn(one_in), durations.requests))?);
        }
    }
    Ok(all)
}

/// Fills a node, and runs its loads.
///
/// # Errors
/// A message if a request failed, or space was compacted.
pub fn run_node(config: NodeRunConfig, durations: &Durations) -> Result<NodeRun, String> {
    let (size, settings) = match config {
        NodeRunConfig::Uniform(size) | NodeRunConfig::Ycsb(size) => (size, LogNodeSettings::default()),
        NodeRunConfig::Skewed(size, settings) | NodeRunConfig::FlowControlled(size, settings) => {
            (size, settings)
        }
    };
    let node = LogNodeExperiment::new(LogNodeConfig {
        drive: modelled_drive(),
        unit_bytes: UNITS[0],
        chunk_bytes: CHUNK_BYTES,
        stores: STORES,
        objects: StoredObjects {
            count: objects_of_run(NODE_OBJECTS, durations.is_quick),
            value_bytes: VALUE_BYTES[size],
        },
        settings,
        seed: SEED,
    })?;
    let run_loads =
        |loads: Vec<NodeLoad>| loads.into_iter().map(|load| run_load(&node, load)).collect::<Result<_, _>>();
    match config {
        NodeRunConfig::Uniform(_) => run_loads(uniform_loads(durations)),
        NodeRunConfig::Skewed(..) => run_loads(skewed_loads(durations)),
        NodeRunConfig::FlowControlled(..) => run_loads(flow_loads(durations)),
        NodeRunConfig::Ycsb(_) => run_ycsb(&node, durations),
    }
    .map(NodeRun)
}
