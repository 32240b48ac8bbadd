//! What a run came to: of the client, and of each core in the order of the connections.
//!
//! In: the cores' boards before and after, what the client counted. Out: [`Figures`].

use octokv_base::Nanos;
use octokv_node::core_metrics::Seen;

/// What the client saw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counted {
    /// Operations that were answered.
    pub answered: u64,
    /// How long each took, in the order of the answers.
    pub response_ns: Vec<u32>,
    /// By connection: commands outstanding, summed over time.
    pub outstanding_ns: Vec<u128>,
}

/// One core, and the connection that is its own.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CoreFigures {
    /// The busy part of the time, 0 to 1.
    pub utilisation: f64,
    /// Requests that came over its connection.
    pub target_events: u64,
    /// Requests that it carried out, its own and others': so often it ran the engine, and so often the device's part.
    pub events: u64,
    /// The mean time of its connection's requests in the node.
    pub latency_us: f64,
    /// Commands outstanding on its connection, on average, as the client counts them.
    pub queue_depth: f64,
    /// Those of them that the node had begun.
    pub begun_depth: f64,
}

/// A run.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    /// How long.
    pub span: Nanos,
    /// Operations that were answered within.
    pub answered: u64,
    /// Operations a second.
    pub throughput_ops_s: f64,
    /// From asking to the answer.
    pub response_us_mean: f64,
    /// The 99th percentile of that.
    pub response_us_p99: f64,
    /// The mean time in the node, over all cores.
    pub latency_us_mean: f64,
    /// Requests that ran on another core than their connection's.
    pub moved: u64,
    /// In the order of the connections.
    pub cores: Vec<CoreFigures>,
}

impl Figures {
    /// Of a span, from what cores had done at its begin and at its end.
    pub fn new(span: Nanos, before: &[Seen], after: &[Seen], mut counted: Counted) -> Figures {
        let span_ns = span.0.max(1) as f64;
        let core = |(at, (before, after)): (usize, (&Seen, &Seen))| {
            let answered = flows(after, |flow| flow.answered) - flows(before, |flow| flow.answered);
            let latency = flows(after, |flow| flow.latency.0) - flows(before, |flow| flow.latency.0);
            let ran = |seen: &Seen| seen.own_here + seen.ran_for.iter().sum::<u64>();
            CoreFigures {
                utilisation: (busy_ns(after) - busy_ns(before)) as f64 / span_ns,
                target_events: flows(after, |flow| flow.begun) - flows(before, |flow| flow.begun),
                events: ran(after) - ran(before),
                latency_us: latency as f64 / answered.max(1) as f64 / 1e3,
                queue_depth: counted.outstanding_ns.get(at).map_or(0.0, |sum| *sum as f64 / span_ns),
                begun_depth: latency as f64 / span_ns,
            }
        };
        let cores: Vec<CoreFigures> = before.iter().zip(after).enumerate().map(core).collect();
        let sums = |seen: &[Seen], figure: fn(&Seen) -> u64| seen.iter().map(figure).sum::<u64>();
        let of = |figure: fn(&Seen) -> u64| sums(after, figure) - sums(before, figure);
        let latency_ns = of(|seen| flows(seen, |flow| flow.latency.0));
        let in_node = of(|seen| flows(seen, |flow| flow.answered));
        counted.response_ns.sort_unstable();
        let sum: u128 = counted.response_ns.iter().map(|&ns| u128::from(ns)).sum();
        let p99 = counted.response_ns.get(counted.response_ns.len() * 99 / 100).copied().unwrap_or(0);
        Figures {
            span,
            answered: counted.answered,
            throughput_ops_s: counted.answered as f64 / span_ns * 1e9,
            response_us_mean: sum as f64 / counted.response_ns.len().max(1) as f64 / 1e3,
            response_us_p99: f64::from(p99) / 1e3,
            latency_us_mean: latency_ns as f64 / in_node.max(1) as f64 / 1e3,
            moved: of(|seen| seen.moved_to.iter().sum()),
            cores,
        }
    }

    /// Mean and standard deviation (of a population) of a figure over the cores.
    pub fn over_cores(&self, figure: impl Fn(&CoreFigures) -> f64) -> (f64, f64) {
        let count = self.cores.len().max(1) as f64;
        let mean = self.cores.iter().map(&figure).sum::<f64>() / count;
        let variance = self.cores.iter().map(|core| (figure(core) - mean).powi(2)).sum::<f64>() / count;
        (mean, variance.sqrt())
    }
}

fn flows(seen: &Seen, figure: impl Fn(&octokv_node::core_metrics::FlowSeen) -> u64) -> u64 {
    seen.flows.iter().map(figure).sum()
}

fn busy_ns(seen: &Seen) -> u64 {
    seen.busy.target.0 + seen.busy.kv.0 + seen.busy.device.0
}
