//! Deterministic simulation: whole worlds of node, clients, links and disk in one thread, from one seed.
//!
//! A seed picks machine, load, faults and crash points; the production code of target, engine, node and
//! client runs in a virtual world; checkers compare what clients saw with every promise. A seed that fails
//! prints the command that plays it again.
//!
//! # Layout
//! - this file: [`run`]: many seeds.
//! - [`scenario`]: one seed's world, as data.
//! - [`runner`]: one world, played from its plan.
//! - [`node_under_test`]: the node under test. [`client_host`]: its clients. [`faulty_disk`]: a device that fails.
//! - [`scheduling_scenario`]: who is served where and when on it.
//! - [`blocks`]: worlds of namespaces of blocks, and of an operator who changes them.
//! - [`remote`]: worlds with the engine on a client, over a namespace of blocks.
//! - [`experiments`]: the papers' experiments, where time is all that matters.
//! - [`history`]: what clients asked and heard. [`linearizability`]: whether that can be explained.

pub mod blocks;
pub mod client_host;
pub mod experiments;
pub mod faulty_disk;
pub mod history;
pub mod linearizability;
pub mod node_under_test;
pub mod remote;
pub mod runner;
pub mod scenario;
pub mod scheduling_scenario;

pub use blocks::scenario::BlockScenarioPlan;
pub use remote::scenario::RemoteScenarioPlan;
pub use runner::{ScenarioStats, run_scenario};
pub use scenario::{KvScenarioPlan, Scenario};

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What to simulate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SweepConfig {
    /// Which seeds.
    pub seeds: Range<u64>,
    /// The scenario, or `None` for all in turn.
    pub scenario: Option<Scenario>,
    /// Every so many seeds one is played twice, to see that it repeats; 0 for none.
    pub repeat_every: u64,
}

impl SweepConfig {
    /// These seeds, in all scenarios.
    pub fn new(seeds: Range<u64>) -> SweepConfig {
        SweepConfig { seeds, scenario: None, repeat_every: 16 }
    }
}

/// One seed that held every promise.
#[derive(Clone, Copy, Debug)]
pub struct SeedReport {
    /// The seed.
    pub seed: u64,
    /// The scenario.
    pub scenario: Scenario,
    /// Its figures.
    pub stats: ScenarioStats,
}

/// One seed that did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeedFailure {
    /// The seed.
    pub seed: u64,
    /// The scenario.
    pub scenario: Scenario,
    /// What does not hold.
    pub message: String,
}

impl SeedFailure {
    /// The command that plays it again.
    pub fn replay_command(&self) -> String {
        let SeedFailure { seed, scenario, .. } = self;
        format!("octokv sim --seeds {seed}..{} --scenario {}", seed + 1, scenario.name())
    }
}

impl fmt::Display for SeedFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SeedFailure { seed, scenario, message: what } = self;
        writeln!(f, "seed {seed}, scenario {}: {what}", scenario.name())?;
        write!(f, "replay: {}", self.replay_command())
    }
}

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SweepResult {
    /// Seeds played.
    pub seeds: u64,
    /// Commands of clients in all of them.
    pub operations: u64,
    /// The first seed that failed; the run ended there.
    pub failure: Option<SeedFailure>,
}

/// The scenario of a seed where none is asked for.
pub fn default_scenario(seed: u64) -> Scenario {
    Scenario::ALL[(seed % Scenario::ALL.len() as u64) as usize]
}

/// Plays seeds one after another until one fails, all are done, or `progress` says false.
pub fn run_sweep(settings: &SweepConfig, mut progress: impl FnMut(&SeedReport) -> bool) -> SweepResult {
    let mut result = SweepResult::default();
    for seed in settings.seeds.clone() {
        let scenario = settings.scenario.unwrap_or_else(|| default_scenario(seed));
        result.seeds += 1;
        let twice = settings.repeat_every > 0 && result.seeds.is_multiple_of(settings.repeat_every);
        match run_seed(seed, scenario, twice) {
            Ok(figures) => {
                result.operations += figures.operations;
                if !progress(&SeedReport { seed, scenario, stats: figures }) {
                    break;
                }
            }
            Err(what) => {
                result.failure = Some(SeedFailure { seed, scenario, message: what });
                break;
            }
        }
    }
    result
}

/// Plays one seed, a second time too where asked to. The error says what does not hold.
pub fn run_seed(seed: u64, scenario: Scenario, twice: bool) -> Result<ScenarioStats, String> {
    let stats = run_seed_catching_panics(seed, scenario)?;
    if twice {
        let again = run_seed_catching_panics(seed, scenario)?;
        if again != stats {
            return Err(format!("the same seed played twice differs: {stats:?} and {again:?}"));
        }
    }
    Ok(stats)
}

fn run_seed_catching_panics(seed: u64, scenario: Scenario) -> Result<ScenarioStats, String> {
    let run = || match scenario {
        Scenario::Blocks | Scenario::Namespaces => {
            blocks::run_scenario(&BlockScenarioPlan::draw(seed, scenario))
        }
        Scenario::Remote => remote::run_scenario(&RemoteScenarioPlan::draw(seed)),
        Scenario::Calm | Scenario::Crashes | Scenario::Network | Scenario::Disk | Scenario::Everything => {
            run_scenario(&KvScenarioPlan::draw(seed, scenario))
        }
    };
    // An assertion of the code under test is a finding like any other.
    let result = catch_unwind(AssertUnwindSafe(run));
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}
