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

pub use blocks::scenario::BlocksPlan;
pub use remote::scenario::RemotePlan;
pub use runner::{Figures, play};
pub use scenario::{Plan, Scenario};

use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// What to simulate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which seeds.
    pub seeds: Range<u64>,
    /// The scenario, or `None` for all in turn.
    pub scenario: Option<Scenario>,
    /// Every so many seeds one is played twice, to see that it repeats; 0 for none.
    pub repeat_every: u64,
}

impl Settings {
    /// These seeds, in all scenarios.
    pub fn new(seeds: Range<u64>) -> Settings {
        Settings { seeds, scenario: None, repeat_every: 16 }
    }
}

/// One seed that held every promise.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The scenario.
    pub scenario: Scenario,
    /// Its figures.
    pub figures: Figures,
}

/// One seed that did not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The seed.
    pub seed: u64,
    /// The scenario.
    pub scenario: Scenario,
    /// What does not hold.
    pub what: String,
}

impl Failure {
    /// The command that plays it again.
    pub fn replay(&self) -> String {
        let Failure { seed, scenario, .. } = self;
        format!("octokv sim --seeds {seed}..{} --scenario {}", seed + 1, scenario.name())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Failure { seed, scenario, what } = self;
        writeln!(f, "seed {seed}, scenario {}: {what}", scenario.name())?;
        write!(f, "replay: {}", self.replay())
    }
}

/// What came of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Seeds played.
    pub seeds: u64,
    /// Commands of clients in all of them.
    pub operations: u64,
    /// The first seed that failed; the run ended there.
    pub failure: Option<Failure>,
}

/// The scenario of a seed where none is asked for.
pub fn scenario_of(seed: u64) -> Scenario {
    Scenario::ALL[(seed % Scenario::ALL.len() as u64) as usize]
}

/// Plays seeds one after another until one fails, all are done, or `progress` says false.
pub fn run(settings: &Settings, mut progress: impl FnMut(&Report) -> bool) -> Outcome {
    let mut outcome = Outcome::default();
    for seed in settings.seeds.clone() {
        let scenario = settings.scenario.unwrap_or_else(|| scenario_of(seed));
        outcome.seeds += 1;
        let twice = settings.repeat_every > 0 && outcome.seeds.is_multiple_of(settings.repeat_every);
        match play_seed(seed, scenario, twice) {
            Ok(figures) => {
                outcome.operations += figures.operations;
                if !progress(&Report { seed, scenario, figures }) {
                    break;
                }
            }
            Err(what) => {
                outcome.failure = Some(Failure { seed, scenario, what });
                break;
            }
        }
    }
    outcome
}

/// Plays one seed, a second time too where asked to. The error says what does not hold.
pub fn play_seed(seed: u64, scenario: Scenario, twice: bool) -> Result<Figures, String> {
    let figures = play_caught(seed, scenario)?;
    if twice {
        let again = play_caught(seed, scenario)?;
        if again != figures {
            return Err(format!("the same seed played twice differs: {figures:?} and {again:?}"));
        }
    }
    Ok(figures)
}

fn play_caught(seed: u64, scenario: Scenario) -> Result<Figures, String> {
    let play = || match scenario {
        Scenario::Blocks | Scenario::Namespaces => blocks::play(&BlocksPlan::draw(seed, scenario)),
        Scenario::Remote => remote::play(&RemotePlan::draw(seed)),
        Scenario::Calm | Scenario::Crashes | Scenario::Network | Scenario::Disk | Scenario::Everything => {
            play(&Plan::draw(seed, scenario))
        }
    };
    // An assertion of the code under test is a finding like any other.
    let played = catch_unwind(AssertUnwindSafe(play));
    played.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}
