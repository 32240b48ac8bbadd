//! The OctoKV paper's runs: what is asked, over which connections, under which policy.

use super::host_kvs::Host;
use crate::reproduce::job_runner::{self, Spans};
use anyhow::Result;
use octokv_sched::{Policy, Settings};
use octokv_sim::experiments::experiment::{Bench, Trial};
use octokv_sim::experiments::metrics::Figures;
use octokv_sim::experiments::parameters::{CostSetting, Operation, TABLE_IV, THRESHOLD, WINDOW, costs};
use octokv_sim::experiments::workload::Placement;

const SEED: u64 = 1;
/// Of Fig. 8, in windows; the paper's seconds.
pub const SERIES_WINDOWS: usize = 30;
/// When balancing is switched on there.
pub const SWITCHED_AT: usize = 15;

/// Which connection requests go over, of the two ways that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// In order, up to the threshold (OctoFAS §3.3).
    InOrder,
    /// By the shares of Table IV.
    ByShares,
}

impl Filled {
    /// As figures call it.
    pub fn name(self) -> &'static str {
        match self {
            Filled::InOrder => "in order",
            Filled::ByShares => "by Table IV's shares",
        }
    }
}

/// How it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// For a while, after a while.
    Steady,
    /// So many requests, after a while: each stage counts each of them.
    Requests(u64),
    /// Window by window; the policy from [`SWITCHED_AT`] on.
    Switched,
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// What a request costs.
    pub costs: CostSetting,
    /// Whether the engine's part is among it.
    pub engine: bool,
    /// Put or get.
    pub operation: Operation,
    /// Threads.
    pub threads: usize,
    /// Over which connections.
    pub filled: Filled,
    /// Who runs what where.
    pub policy: Policy,
    /// T_OL and T_LB.
    pub thresholds: (f64, f64),
    /// Whether the engine keeps its journal.
    pub journal: bool,
    /// How it runs.
    pub course: Course,
}

impl Job {
    /// The usual one: the paper's costs and thresholds, the engine, no balancing.
    pub fn new(operation: Operation, threads: usize, filled: Filled) -> Job {
        Job {
            costs: CostSetting::Paper,
            engine: true,
            operation,
            threads,
            filled,
            policy: Policy::None,
            thresholds: (0.4, 0.1),
            journal: true,
            course: Course::Steady,
        }
    }

    /// The same with a policy.
    pub fn with(self, policy: Policy) -> Job {
        Job { policy, ..self }
    }

    fn settings(&self, policy: Policy) -> Settings {
        let (overload, imbalance_difference) = self.thresholds;
        Settings { policy, window: WINDOW, overload, imbalance_difference, ..Settings::default() }
    }
}

impl job_runner::Job for Job {
    type Real = Host;
    type Outcome = Vec<Figures>;

    fn run(&self, spans: &Spans) -> Result<Vec<Figures>, String> {
        let placement = match self.filled {
            Filled::InOrder => Placement::InOrder(THRESHOLD),
            Filled::ByShares => Placement::Shares(TABLE_IV.to_vec()),
        };
        let first = if self.course == Course::Switched { Policy::None } else { self.policy };
        let bench = Bench::new(&Trial {
            seed: SEED,
            costs: costs(self.costs, self.operation, self.engine),
            operation: self.operation,
            threads: self.threads,
            placement,
            scheduling: self.settings(first),
            journal: self.journal,
        })?;
        bench.run_for(spans.warm_up)?;
        match self.course {
            Course::Steady => Ok(vec![bench.run_for(spans.steady)?]),
            Course::Requests(requests) => Ok(vec![bench.run_requests(requests)?]),
            Course::Switched => {
                let window = |number: usize| {
                    if number == SWITCHED_AT {
                        bench.set_policy(self.settings(self.policy))?;
                    }
                    bench.run_for(WINDOW)
                };
                (0..SERIES_WINDOWS).map(window).collect()
            }
        }
    }
}

/// All runs so far.
pub type Runs = job_runner::Runs<Job>;

impl Runs {
    /// What one steady job comes to.
    pub fn steady(&mut self, jobs: &[Job]) -> Result<Vec<Figures>> {
        let all = self.all(jobs)?;
        Ok(all.into_iter().filter_map(|mut figures| figures.pop()).collect())
    }
}
