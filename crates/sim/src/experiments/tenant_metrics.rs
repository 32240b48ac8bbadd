//! What a run came to for each of several tenants (OctoFAS §3.1, §4.2).
//!
//! In: the cores' boards before and after, what each client counted, what the node's monitor found meanwhile. Out:
//! [`Together`]; slowdowns S, fairness F, load balance LB, and Jain's index, from figures of such runs.
//!
//! Two slowdowns: [`slowdowns`] are by OctoFAS's definition, with the response time of a run in which the flow was alone;
//! [`FlowFigures::slowdown_online`] is what the node says while it is not, which has to do without that run.

use super::experiment::Trial;
use super::metrics::{Counted, Figures};
use super::parameters::Operation;
use super::workload::Placement;
use octokv_base::Nanos;
use octokv_client::Settings as ClientSettings;
use octokv_node::Costs;
use octokv_node::core_metrics::{FlowSeen, Seen};
use octokv_node::monitor::Window;
use octokv_sched::{Chosen, FlowId, Settings};
use std::sync::Arc;

/// One tenant's threads.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowTrial {
    /// How many; none where it is connected and silent.
    pub threads: usize,
    /// Which connection a request goes over.
    pub placement: Placement,
}

/// What is tried with several tenants.
#[derive(Clone, Debug)]
pub struct FlowsTrial {
    /// Everything that is drawn is drawn from it.
    pub seed: u64,
    /// What a request costs a core.
    pub costs: Costs,
    /// Put or get, all of them.
    pub operation: Operation,
    /// The tenants.
    pub flows: Vec<FlowTrial>,
    /// Whether all are on one machine, behind one wire, as OctoFAS's are; else each has a machine and a wire.
    pub one_machine: bool,
    /// Who runs what where.
    pub scheduling: Settings,
    /// Whether the engine keeps its journal.
    pub journal: bool,
}

impl FlowsTrial {
    /// One flow, of which a trial says everything.
    pub fn alone(trial: &Trial) -> FlowsTrial {
        FlowsTrial {
            seed: trial.seed,
            costs: trial.costs,
            operation: trial.operation,
            flows: vec![FlowTrial { threads: trial.threads, placement: trial.placement.clone() }],
            one_machine: true,
            scheduling: trial.scheduling.clone(),
            journal: trial.journal,
        }
    }
}

/// The name of a tenant's host.
pub fn name_of(flow: usize) -> String {
    let first = ClientSettings::default().host;
    if flow == 0 { first } else { format!("{first}-{}", flow + 1) }
}

/// One flow on one core.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct FlowOnCore {
    /// Requests that were answered over its connection there.
    pub answered: u64,
    /// Their mean time in the node.
    pub latency_us: f64,
}

/// One flow.
#[derive(Clone, Debug, PartialEq)]
pub struct FlowFigures {
    /// Operations that were answered.
    pub answered: u64,
    /// Operations a second.
    pub throughput_ops_s: f64,
    /// From asking to the answer.
    pub response_us_mean: f64,
    /// The 99th percentile of that.
    pub response_us_p99: f64,
    /// The mean time in the node.
    pub latency_us_mean: f64,
    /// The slowdown that the node's monitor tells, the mean of its windows; `None` where it told none.
    pub slowdown_online: Option<f64>,
    /// In the order of the connections.
    pub cores: Vec<FlowOnCore>,
}

/// A run of several flows.
#[derive(Clone, Debug, PartialEq)]
pub struct Together {
    /// Of all of them.
    pub whole: Figures,
    /// Of each.
    pub flows: Vec<FlowFigures>,
    /// F as the node's monitor tells it, the mean of its windows; `None` where none ended.
    pub fairness_online: Option<f64>,
    /// What was chosen at the end of each window.
    pub chosen: Vec<Chosen>,
}

impl Together {
    /// Of a span, from what cores had done at its begin and at its end, what each client counted, which flow of the node's each
    /// is, and the windows that ended within.
    pub fn new(
        span: Nanos,
        before: &[Seen],
        after: &[Seen],
        counted: Vec<Counted>,
        ids: &[Option<FlowId>],
        windows: &[Arc<Window>],
    ) -> Together {
        let flow = |(counted, id): (&Counted, &Option<FlowId>)| {
            flow_figures(span, before, after, counted, *id, windows)
        };
        let flows = counted.iter().zip(ids).map(flow).collect();
        let whole = Figures::new(span, before, after, together(counted));
        let fairness_online = mean(windows.iter().map(|window| window.figures.fairness));
        let chosen = windows.iter().map(|window| window.decision.chosen).collect();
        Together { whole, flows, fairness_online, chosen }
    }

    /// LB: the least busy core's utilisation by the busiest one's.
    pub fn balance(&self) -> f64 {
        least_by_most(self.whole.cores.iter().map(|core| core.utilisation))
    }
}

/// S of each flow: its response time beside the others by that alone.
pub fn slowdowns(together: &Together, alone_us: &[f64]) -> Vec<f64> {
    together.flows.iter().zip(alone_us).map(|(flow, alone)| flow.response_us_mean / alone).collect()
}

/// F: the least slowdown by the greatest.
pub fn fairness(slowdowns: &[f64]) -> f64 {
    least_by_most(slowdowns.iter().copied())
}

/// Jain's index of parts: 1 where all are equal, one by their number where one has everything.
pub fn jain(parts: &[f64]) -> f64 {
    let sum: f64 = parts.iter().sum();
    let squares: f64 = parts.iter().map(|part| part * part).sum();
    sum * sum / (parts.len() as f64 * squares)
}

fn least_by_most(numbers: impl Iterator<Item = f64> + Clone) -> f64 {
    let (least, most) = (numbers.clone().fold(f64::INFINITY, f64::min), numbers.fold(0.0, f64::max));
    least / most
}

fn mean(numbers: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, count) = numbers.fold((0.0, 0), |(sum, count), number| (sum + number, count + 1));
    (count > 0).then(|| sum / f64::from(count))
}

/// Of all clients together.
fn together(counted: Vec<Counted>) -> Counted {
    let add = |mut all: Counted, one: Counted| {
        all.answered += one.answered;
        all.response_ns.extend(one.response_ns);
        for (all, one) in all.outstanding_ns.iter_mut().zip(one.outstanding_ns) {
            *all += one;
        }
        all
    };
    counted.into_iter().reduce(add).unwrap_or_default()
}

fn flow_figures(
    span: Nanos,
    before: &[Seen],
    after: &[Seen],
    counted: &Counted,
    id: Option<FlowId>,
    windows: &[Arc<Window>],
) -> FlowFigures {
    let seen = |seen: &Seen| id.map(|id| seen.flows[id.0 as usize]).unwrap_or_default();
    let less = |after: &Seen, before: &Seen, of: fn(&FlowSeen) -> u64| of(&seen(after)) - of(&seen(before));
    let core = |(before, after): (&Seen, &Seen)| {
        let answered = less(after, before, |flow| flow.answered);
        let latency_ns = less(after, before, |flow| flow.latency.0);
        (answered, latency_ns)
    };
    let cores: Vec<(u64, u64)> = before.iter().zip(after).map(core).collect();
    let us = |(answered, latency_ns): (u64, u64)| latency_ns as f64 / answered.max(1) as f64 / 1e3;
    let mut response_ns = counted.response_ns.clone();
    response_ns.sort_unstable();
    let sum: u128 = response_ns.iter().map(|&ns| u128::from(ns)).sum();
    let p99 = response_ns.get(response_ns.len() * 99 / 100).copied().unwrap_or(0);
    let told = windows.iter().filter_map(|window| {
        window.figures.flows.iter().find(|flow| Some(flow.flow) == id).and_then(|flow| flow.slowdown)
    });
    FlowFigures {
        answered: counted.answered,
        throughput_ops_s: counted.answered as f64 / span.0.max(1) as f64 * 1e9,
        response_us_mean: sum as f64 / response_ns.len().max(1) as f64 / 1e3,
        response_us_p99: f64::from(p99) / 1e3,
        latency_us_mean: us(cores.iter().fold((0, 0), |sum, core| (sum.0 + core.0, sum.1 + core.1))),
        slowdown_online: mean(told),
        cores: cores.iter().map(|&core| FlowOnCore { answered: core.0, latency_us: us(core) }).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_of_parts_are_as_their_papers_have_them() {
        for (want, parts) in
            [(1.0, &[3.0, 3.0][..]), (0.5, &[4.0, 0.0]), (0.9, &[1.0, 2.0]), (0.25, &[0.0, 0.0, 7.0, 0.0])]
        {
            assert!((jain(parts) - want).abs() < 1e-12, "{parts:?}");
        }
        assert_eq!((fairness(&[1.0, 2.0]), fairness(&[1.5, 1.5, 1.5])), (0.5, 1.0));
    }
}
