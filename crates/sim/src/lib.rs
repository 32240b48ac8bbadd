//! Deterministic simulation tests: node, clients, network and disk run in one thread, driven by one seed.
//!
//! A seed selects configuration, load, faults and crash points. The production code of target, engine, node and
//! client runs in a simulated environment, and checkers compare the responses that clients receive with the
//! documented guarantees. A failing seed prints the command that replays it.
//!
//! # Layout
//! - this file: [`run_sweep`]: a range of seeds.
//! - [`scenario`]: the plan of one simulation, as data. [`scenario_draw`]: draws it from a seed.
//! - `runner`: the life of a simulation, which all kinds share. [`kv_runner`]: a simulation with key-value clients.
//! - [`sim_node`]: a node on a simulated host. [`node_under_test`]: one with the engine on a disk.
//! - [`clients`]: its clients. [`kv_workload`]: their commands. [`progress`]: its counters.
//! - [`fault_injector`]: faults of a phase. [`faulty_disk`]: a device with injected faults. [`sim_device`]: disk or memory.
//! - `draw`: random choices that plans and clients share. [`stats`]: counters that every runner returns.
//! - [`scheduling_scenario`]: the scheduling configuration of the node and the CPU cost of requests.
//! - [`blocks`]: simulations of block namespaces. [`operator`]: reconfigures a node while it runs.
//! - [`remote`]: simulations with the engine on a client, over a block namespace.
//! - [`etcd`]: a double of etcd, with faults of its own.
//! - [`nodes_scenario`]: the plan of a simulation with many nodes. [`memory_scenario`]: with keys in memory.
//!   [`ordered_scenario`]: with the ordered engine; [`tree_plan`]: its sizes. [`log_scenario`]: with the log engine; [`log_plan`]: its sizes.
//!   [`devices_scenario`]: with a volume on several devices. `disk_replacement`: another disk for one that has failed. `disk_addition`: one more. `disk_changes`: both, by the runner.
//! - [`engine_plan`]: the engine of a node. [`engine_work`]: its background work; [`engine_worker`]: begins that at random times.
//! - [`scans`]: scans of clients, and the checks of their pairs.
//! - [`parallel_core`]: a core that acts in the middle of an iteration of another.
//! - [`history`]: calls and responses of clients, input of the linearizability checker of `octokv_engine`.
//! - [`power_loss`]: states that a power loss may leave.

pub mod blocks;
pub mod clients;
pub mod devices_scenario;
mod disk_addition;
mod disk_changes;
mod disk_replacement;
mod draw;
pub mod engine_plan;
pub mod engine_work;
pub mod engine_worker;
pub mod etcd;
pub mod fault_injector;
pub mod faulty_disk;
pub mod history;
pub mod kv_runner;
pub mod kv_workload;
pub mod log_plan;
pub mod log_scenario;
pub mod memory_scenario;
pub mod node_under_test;
pub mod nodes_scenario;
pub mod operator;
pub mod ordered_scenario;
pub mod parallel_core;
pub mod power_loss;
pub mod progress;
pub mod remote;
mod runner;
pub mod scans;
pub mod scenario;
pub mod scenario_draw;
pub mod scheduling_scenario;
pub mod sim_device;
pub mod sim_node;
pub mod stats;
pub mod tree_plan;

pub use blocks::scenario::BlockScenarioPlan;
pub use kv_runner::run_scenario;
pub use remote::scenario::RemoteScenarioPlan;
pub use scenario::{KvScenarioPlan, Scenario};
pub use stats::ScenarioStats;

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Configuration of a sweep over seeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SweepConfig {
    /// Seeds to run, in ascending order.
    pub seeds: Range<u64>,
    /// The scenario of every seed; `None` selects [`default_scenario`] for each.
    pub scenario: Option<Scenario>,
    /// Runs every n-th seed a second time to check determinism; 0 for never.
    pub repeat_every: u64,
}

impl SweepConfig {
    /// These seeds, over all scenarios, with every 16th seed run twice.
    pub fn new(seeds: Range<u64>) -> SweepConfig {
        SweepConfig { seeds, scenario: None, repeat_every: 16 }
    }
}

/// Result of a seed without violations.
#[derive(Clone, Copy, Debug)]
pub struct SeedReport {
    /// The seed.
    pub seed: u64,
    /// The scenario it ran in.
    pub scenario: Scenario,
    /// Counters of the simulation.
    pub stats: ScenarioStats,
}

/// Result of a seed with a violation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedFailure {
    /// The seed.
    pub seed: u64,
    /// The scenario it ran in.
    pub scenario: Scenario,
    /// The violated guarantee, for humans.
    pub message: String,
}

impl SeedFailure {
    /// The command line that replays this seed alone.
    pub fn replay_command(&self) -> String {
        let SeedFailure { seed, scenario, .. } = self;
        format!("octokv sim --seeds {seed}..{} --scenario {}", seed + 1, scenario.name())
    }
}

impl fmt::Display for SeedFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SeedFailure { seed, scenario, message } = self;
        writeln!(f, "seed {seed}, scenario {}: {message}", scenario.name())?;
        write!(f, "replay: {}", self.replay_command())
    }
}

/// Result of a sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepResult {
    /// Seeds run, the failing one included.
    pub seeds: u64,
    /// Client commands completed or lost, over all seeds that passed.
    pub operations: u64,
    /// Keys, over all seeds that passed, whose linearizability is undecided: tests require 0.
    pub undecided_keys: u64,
    /// The first failing seed; the sweep ends there.
    pub failure: Option<SeedFailure>,
}

/// The scenario of `seed` if [`SweepConfig::scenario`] is `None`: scenarios rotate with the seed number.
pub fn default_scenario(seed: u64) -> Scenario {
    Scenario::ALL[(seed % Scenario::ALL.len() as u64) as usize]
}

/// Runs seeds in order until one fails, all have passed, or `progress` returns false.
pub fn run_sweep(config: &SweepConfig, mut progress: impl FnMut(&SeedReport) -> bool) -> SweepResult {
    let mut result = SweepResult::default();
    for seed in config.seeds.clone() {
        let scenario = config.scenario.unwrap_or_else(|| default_scenario(seed));
        result.seeds += 1;
        let twice = config.repeat_every > 0 && result.seeds.is_multiple_of(config.repeat_every);
        match run_seed(seed, scenario, twice) {
            Ok(stats) => {
                result.operations += stats.operations;
                result.undecided_keys += stats.undecided_keys;
                if !progress(&SeedReport { seed, scenario, stats }) {
                    break;
                }
            }
            Err(message) => {
                result.failure = Some(SeedFailure { seed, scenario, message });
                break;
            }
        }
    }
    result
}

/// Runs one seed, and a second time if `twice`, to check that the simulation is deterministic.
///
/// # Errors
/// The first violated guarantee, a panic of the code under test, or a difference between the two runs.
pub fn run_seed(seed: u64, scenario: Scenario, twice: bool) -> Result<ScenarioStats, String> {
    let stats = run_seed_catching_panics(seed, scenario)?;
    if twice {
        let again = run_seed_catching_panics(seed, scenario)?;
        if again != stats {
            return Err(format!("not deterministic: two runs of the same seed: {stats:?} and {again:?}"));
        }
    }
    Ok(stats)
}

fn run_seed_catching_panics(seed: u64, scenario: Scenario) -> Result<ScenarioStats, String> {
    let run = || match scenario {
        Scenario::Blocks | Scenario::Namespaces => {
            blocks::run_scenario(&BlockScenarioPlan::draw(seed, scenario))
        }
        Scenario::Nodes => run_scenario(&nodes_scenario::draw_nodes_plan(seed)),
        Scenario::Memory => run_scenario(&memory_scenario::draw_memory_plan(seed)),
        Scenario::Ordered => run_scenario(&ordered_scenario::draw_ordered_plan(seed)),
        Scenario::Log => run_scenario(&log_scenario::draw_log_plan(seed)),
        Scenario::Devices => run_scenario(&devices_scenario::draw_devices_plan(seed)),
        Scenario::Remote => remote::run_scenario(&RemoteScenarioPlan::draw(seed)),
        Scenario::Calm | Scenario::Crashes | Scenario::Network | Scenario::Disk | Scenario::Everything => {
            run_scenario(&KvScenarioPlan::draw(seed, scenario))
        }
    };
    // A panic of the code under test is a finding like any other.
    let result = catch_unwind(AssertUnwindSafe(run));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}
