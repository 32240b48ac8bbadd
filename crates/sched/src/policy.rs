//! The choice for the next window (OctoFAS Algorithms 1 and 4; OctoKV §IV-D).
//!
//! ```text
//!   policy            when                                    requests of whom move      requests of whom go back
//!   none, fair        never                                   -                          -
//!   round-robin,      a core above T_OL, and                  all                        -
//!     proportional      most − least above T_LB
//!   inter             always                                  move_flows                 -
//!   intra             always                                  -                          dense, B times
//!   hybrid            always                                  dense                      dense that stay, B times
//!   auto              LB < T_LB, fair      ─▶ as inter
//!                     in balance, F ≤ 0.9  ─▶ as intra
//!                     LB < T_LB, F ≤ 0.9   ─▶ as hybrid
//!                     neither              ─▶ as none
//! ```
//! In: the figures of a window and the settings. Out: a [`Decision`], which says for each core and each flow what it needs
//! until the next one. Pure: the same figures always give the same decision.
//!
//! "Always" still moves nothing where nothing is to be gained: from a node that is [idle](crate::measure::IDLE), or between
//! cores that are alike; and no flow is dense where all are alike.
//!
//! In a hybrid sparse flows stay where they are and go straight through, whatever `move_flows` says (Algorithm 4). A request
//! of a dense flow that the core's router does not move is one that goes back.

use crate::config::{MoveFlows, Policy, Settings};
use crate::ids::FlowId;
use crate::metrics::{Figures, IDLE};
use crate::migration_plan::{CorePlan, Order, Plan, candidates};
use crate::{load_balance, octofas_inter, octofas_intra};

/// What is done until the next window's choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// Nothing.
    Nothing,
    /// OctoKV's load balance, in this order.
    Balance(Order),
    /// Requests move between cores.
    Inter,
    /// Requests of dense flows go back.
    Intra,
    /// Requests of dense flows move, and those that do not go back.
    Hybrid,
    /// Each core's fair queue says who is next.
    Fair,
}

/// What holds for the requests of one flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowRule {
    /// Which one.
    pub flow: FlowId,
    /// Whether it is dense.
    pub dense: bool,
    /// Whether its core's router is asked where its requests run; where not, they run here.
    pub moves: bool,
    /// B: how often those that run here go back. 0: not at all, and they need no queue.
    pub backwardings: u32,
}

/// A choice.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What is done.
    pub chosen: Chosen,
    /// Whether a core was above T_OL.
    pub overloaded: bool,
    /// Whether loads were out of balance, by the condition of the policy's paper.
    pub imbalanced: bool,
    /// Whether flows were treated unfairly.
    pub unfair: bool,
    /// By core: what its router is given.
    pub plan: Plan,
    /// The flows that were measured, in the order of the figures.
    pub flows: Vec<FlowRule>,
    /// Whether requests of flows that come later move.
    newcomers_move: bool,
}

impl Decision {
    /// The choice of a node that has not measured anything yet: nothing is done.
    pub fn at_start(cores: usize) -> Decision {
        Decision {
            chosen: Chosen::Nothing,
            overloaded: false,
            imbalanced: false,
            unfair: false,
            plan: Plan::nothing(cores),
            flows: Vec::new(),
            newcomers_move: false,
        }
    }

    /// What holds for a flow. One that was not measured is taken for sparse. Looks through all flows: once a window, not
    /// for each request.
    pub fn rule(&self, flow: FlowId) -> FlowRule {
        let newcomer = FlowRule { flow, dense: false, moves: self.newcomers_move, backwardings: 0 };
        self.flows.iter().find(|rule| rule.flow == flow).copied().unwrap_or(newcomer)
    }

    /// What a core's router is given; nothing for a core that was not measured.
    pub fn of_core(&self, core: crate::CoreId) -> Option<&CorePlan> {
        self.plan.cores.get(core.index())
    }
}

/// Chooses.
pub fn choose(figures: &Figures, settings: &Settings) -> Decision {
    let overloaded = load_balance::is_overloaded(figures, settings);
    let by_difference = load_balance::is_imbalanced(figures, settings);
    let by_ratio = octofas_inter::is_imbalanced(figures, settings);
    let unfair = octofas_intra::is_unfair(figures, settings);
    let balanced = |order| {
        if overloaded && by_difference { Chosen::Balance(order) } else { Chosen::Nothing }
    };
    let (chosen, imbalanced) = match settings.policy {
        Policy::None => (Chosen::Nothing, by_ratio),
        Policy::RoundRobin => (balanced(Order::RoundRobin), by_difference),
        Policy::Proportional => (balanced(Order::Proportional), by_difference),
        Policy::Inter => (Chosen::Inter, by_ratio),
        Policy::Intra => (Chosen::Intra, by_ratio),
        Policy::Hybrid => (Chosen::Hybrid, by_ratio),
        Policy::Auto => (by_flags(unfair, by_ratio), by_ratio),
        Policy::Fair => (Chosen::Fair, by_ratio),
    };
    let move_flows = match chosen {
        Chosen::Balance(_) => Some(MoveFlows::All),
        Chosen::Inter => Some(settings.move_flows),
        Chosen::Hybrid => Some(MoveFlows::Dense),
        Chosen::Nothing | Chosen::Intra | Chosen::Fair => None,
    };
    let dense = octofas_intra::dense(&figures.flows);
    let plan = match move_flows {
        Some(flows) if figures.busiest > IDLE => {
            let cores = candidates(figures, |index| flows.moves(dense[index]));
            match chosen {
                Chosen::Balance(order) => load_balance::plan(&cores, order),
                _ => octofas_inter::plan(&cores),
            }
        }
        _ => Plan::nothing(figures.cores.len()),
    };
    let moving = !plan.is_nothing();
    let backwardings = match chosen {
        Chosen::Intra | Chosen::Hybrid => octofas_intra::backwardings(&figures.flows, &dense, settings),
        _ => vec![0; dense.len()],
    };
    let moves = |dense: bool| moving && move_flows.is_some_and(|flows| flows.moves(dense));
    let rule = |((flow, &dense), backwardings)| {
        let flow: &crate::metrics::FlowFigures = flow;
        FlowRule { flow: flow.flow, dense, moves: moves(dense), backwardings }
    };
    let flows = figures.flows.iter().zip(&dense).zip(backwardings).map(rule).collect();
    // A flow that nobody measured is taken for sparse.
    Decision { chosen, overloaded, imbalanced, unfair, plan, flows, newcomers_move: moves(false) }
}

/// OctoFAS Algorithm 1.
fn by_flags(unfair: bool, imbalanced: bool) -> Chosen {
    match (unfair, imbalanced) {
        (false, false) => Chosen::Nothing,
        (false, true) => Chosen::Inter,
        (true, false) => Chosen::Intra,
        (true, true) => Chosen::Hybrid,
    }
}

#[cfg(test)]
mod tests;
