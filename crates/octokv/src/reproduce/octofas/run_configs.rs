//! The runs of OctoFAS: which tenants ask how much, over which connections, under which policy.

use crate::reproduce::job_runner::{self, Spans};
use crate::reproduce::native_runs::OnCores;
use anyhow::Result;
use octokv_base::Nanos;
use octokv_sched::{FlowSettings, MoveFlows, Policy, Settings};
use octokv_sim::experiments::experiment::Bench;
use octokv_sim::experiments::parameters::{CostSetting, FLOW_THRESHOLD, Operation, TABLE_IV, WINDOW, costs};
use octokv_sim::experiments::tenant_metrics::{FlowTrial, FlowsTrial, Together, name_of};
use octokv_sim::experiments::workload::Placement;

const SEED: u64 = 1;
/// The paper holds a request back for its backwardings, however long they take.
const HELD_MAX: Nanos = Nanos::from_secs(1);

/// Which connections requests go over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// In order, up to the threshold (§3.3).
    InOrder,
    /// The first flow so, the others by the shares of OctoKV's Table IV.
    ByShares,
    /// All over the first.
    OneCore,
}

impl Filled {
    /// As figures call it.
    pub fn name(self) -> &'static str {
        match self {
            Filled::InOrder => "in order",
            Filled::ByShares => "flow 2 by Table IV's shares",
            Filled::OneCore => "one core",
        }
    }

    fn placement(self, flow: usize) -> Placement {
        match (self, flow) {
            (Filled::InOrder, _) | (Filled::ByShares, 0) => Placement::InOrder(FLOW_THRESHOLD),
            (Filled::ByShares, _) => Placement::Shares(TABLE_IV.to_vec()),
            (Filled::OneCore, _) => Placement::One(0),
        }
    }
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// What a request costs.
    pub costs: CostSetting,
    /// Put or get.
    pub operation: Operation,
    /// By flow: its threads.
    pub threads: Vec<usize>,
    /// Over which connections.
    pub filled: Filled,
    /// Who is served where and when.
    pub policy: Policy,
    /// Whose requests `inter` moves.
    pub moves: MoveFlows,
    /// How often requests of dense flows go back; as intensities say where nothing is said.
    pub backwardings: Option<u32>,
    /// The most requests of a core that a fair queue lets run at a time; the setting's default where nothing is said.
    pub in_flight: Option<u32>,
    /// By flow: its weight.
    pub weights: Vec<u32>,
    /// Whether all flows are on one machine, behind one wire.
    pub one_machine: bool,
}

impl Job {
    /// The usual one: puts at the paper's costs from one machine, and no policy.
    pub fn new(threads: &[usize], filled: Filled) -> Job {
        Job {
            costs: CostSetting::Paper,
            operation: Operation::Put,
            threads: threads.to_vec(),
            filled,
            policy: Policy::None,
            moves: MoveFlows::All,
            backwardings: None,
            in_flight: None,
            weights: vec![1; threads.len()],
            one_machine: true,
        }
    }

    /// The same with a policy.
    pub fn with(&self, policy: Policy) -> Job {
        Job { policy, ..self.clone() }
    }

    /// The same with OctoFAS's best: dense flows move, and go back 20 times.
    pub fn with_dense(&self, policy: Policy) -> Job {
        Job { moves: MoveFlows::Dense, ..self.with(policy) }.going_back(20)
    }

    /// The same where requests of dense flows go back so often.
    pub fn going_back(self, backwardings: u32) -> Job {
        Job { backwardings: Some(backwardings), ..self }
    }

    /// The same with one flow only, in the same world: the others are connected and silent.
    pub fn alone(&self, flow: usize) -> Job {
        let threads =
            self.threads.iter().enumerate().map(|(at, &threads)| if at == flow { threads } else { 0 });
        Job {
            threads: threads.collect(),
            weights: vec![1; self.threads.len()],
            backwardings: None,
            in_flight: None,
            moves: MoveFlows::All,
            ..self.with(Policy::None)
        }
    }

    fn settings(&self) -> Settings {
        let (policy, move_flows) = (self.policy, self.moves);
        let mut settings = Settings { policy, window: WINDOW, move_flows, ..Settings::default() };
        if let Some(backwardings) = self.backwardings {
            // Whatever the intensities are.
            settings =
                Settings { alpha: 100.0, backwardings_max: backwardings, held_max: HELD_MAX, ..settings };
        }
        settings.in_flight = self.in_flight.unwrap_or(settings.in_flight);
        for (flow, &weight) in self.weights.iter().enumerate().filter(|(_, weight)| **weight != 1) {
            settings.tenants.insert(name_of(flow), FlowSettings { weight, ..FlowSettings::default() });
        }
        settings
    }
}

impl job_runner::Job for Job {
    type Real = OnCores;
    type Outcome = Together;

    fn run(&self, spans: &Spans) -> Result<Together, String> {
        let flow =
            |(flow, &threads): (usize, &usize)| FlowTrial { threads, placement: self.filled.placement(flow) };
        let bench = Bench::with_flows(&FlowsTrial {
            seed: SEED,
            costs: costs(self.costs, self.operation, true),
            operation: self.operation,
            flows: self.threads.iter().enumerate().map(flow).collect(),
            one_machine: self.one_machine,
            scheduling: self.settings(),
            journal: true,
        })?;
        bench.run_for(spans.warm_up)?;
        bench.run_flows_for(spans.steady)
    }
}

/// All runs so far.
pub type Runs = job_runner::Runs<Job>;

impl Runs {
    /// What one job comes to.
    pub fn one(&mut self, job: &Job) -> Result<Together> {
        Ok(self.all(std::slice::from_ref(job))?.remove(0))
    }
}
