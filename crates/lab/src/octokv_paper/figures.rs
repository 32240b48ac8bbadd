//! Figures 2, 6, 7, 8 and 9 of the OctoKV paper.
//!
//! In: results of simulated runs. Out: data points, each with the paper's number if the text states it. Values are not
//! read off the paper's plots.

use super::run_configs::{
    OctokvPlacement, OctokvRunConfig, OctokvRunner, RunMode, SERIES_INTERVALS, SWITCH_INTERVAL,
};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::metrics::RunStats;
use crate::simulation::parameters::{
    CostModel, HEAVY_THREADS, LIGHT_THREADS, MEDIUM_THREADS, Operation, VALUE_BYTES,
};
use anyhow::Result;
use octokv_sched::Policy;

/// Fig. 2: by core, its utilisation and the time of its requests in the node, without the engine.
///
/// # Errors
/// The first run that failed.
pub fn figure_2(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 2");
    let loads = [("LW", LIGHT_THREADS), ("HW", HEAVY_THREADS)];
    for placement in [OctokvPlacement::ByShares, OctokvPlacement::InOrder] {
        for operation in [Operation::Put, Operation::Get] {
            let jobs = loads.map(|(_, threads)| OctokvRunConfig {
                engine: false,
                ..OctokvRunConfig::new(operation, threads, placement)
            });
            for ((load, _), stats) in loads.iter().zip(runs.run_steady(&jobs)?) {
                let series = format!("{load}({operation:?}), {}", placement.name());
                for (at, core) in stats.cores.iter().enumerate() {
                    points.add(&series, &format!("C({})", at + 1), core.utilisation, "1");
                }
                // The text states only the heavy Put load: the latency of the busiest and of the idlest core, a factor of 2.
                let is_in_text = (*load, operation) == ("HW", Operation::Put);
                for (at, core) in stats.cores.iter().enumerate() {
                    let paper = [Some(38.0), None, None, None, None, Some(19.0)][at];
                    let paper = paper.filter(|_| is_in_text);
                    points.add_with_paper(&series, &format!("C({})", at + 1), paper, core.latency_us, "us");
                }
                let serving = stats.cores.iter().filter(|core| core.latency_us > 0.0);
                let latencies: Vec<f64> = serving.map(|core| core.latency_us).collect();
                let most = latencies.iter().copied().fold(0.0, f64::max);
                let least = latencies.iter().copied().fold(f64::INFINITY, f64::min);
                points.add_with_paper(
                    &series,
                    "slowest by fastest core",
                    is_in_text.then_some(2.0),
                    most / least,
                    "times",
                );
            }
        }
    }
    Ok(points.points)
}

/// Loads of Fig. 6, in threads.
const FIGURE_6_THREADS: [usize; 8] = [1, 2, 4, 7, 10, 12, 16, 24];

/// Fig. 6: throughput and response time of OctoKV without balancing, by the number of client threads.
///
/// # Errors
/// The first run that failed.
pub fn figure_6(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 6");
    for operation in [Operation::Put, Operation::Get] {
        let jobs = FIGURE_6_THREADS
            .map(|threads| OctokvRunConfig::new(operation, threads, OctokvPlacement::ByShares));
        let all = runs.run_steady(&jobs)?;
        let series = format!("{operation:?}");
        for (threads, stats) in FIGURE_6_THREADS.iter().zip(&all) {
            let mb_s = stats.throughput_ops_s * VALUE_BYTES as f64 / 1e6;
            points.add(&series, &threads.to_string(), mb_s, "MB/s");
        }
        for (threads, stats) in FIGURE_6_THREADS.iter().zip(&all) {
            points.add(&series, &threads.to_string(), stats.response_us_mean, "us");
        }
    }
    Ok(points.points)
}

/// Effect of balancing in the paper's text: operation, load, its threads, and the change of throughput and of latency in
/// percent.
const PAPER_GAINS: [(Operation, &str, usize, [f64; 2]); 4] = [
    (Operation::Put, "medium", MEDIUM_THREADS, [18.0, -12.0]),
    (Operation::Put, "heavy", HEAVY_THREADS, [15.0, -10.0]),
    (Operation::Get, "medium", MEDIUM_THREADS, [1.0, -1.0]),
    (Operation::Get, "heavy", HEAVY_THREADS, [1.0, -1.0]),
];

/// A metric of a run: name, accessor, unit, and its change in the paper's text, in percent.
type RunMetric = (&'static str, fn(&RunStats) -> f64, &'static str, Option<f64>);

/// Fig. 7: throughput, latency in the node and response time with balancing off and on.
///
/// # Errors
/// The first run that failed.
pub fn figure_7(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 7");
    let variants = [
        (CostModel::Paper, OctokvPlacement::ByShares, true, ""),
        (CostModel::Paper, OctokvPlacement::ByShares, false, ", no journal"),
        (CostModel::Paper, OctokvPlacement::InOrder, true, ""),
        (CostModel::Measured, OctokvPlacement::ByShares, true, ", our costs"),
    ];
    for (costs, placement, journal, of_costs) in variants {
        // Gets do not use the journal.
        let gains: Vec<_> = PAPER_GAINS.iter().filter(|gain| journal || gain.0 == Operation::Put).collect();
        let jobs = gains.iter().flat_map(|(operation, _, threads, _)| {
            let job =
                OctokvRunConfig { costs, journal, ..OctokvRunConfig::new(*operation, *threads, placement) };
            [job.clone(), job.with_policy(Policy::Proportional)]
        });
        let all = runs.run_steady(&jobs.collect::<Vec<OctokvRunConfig>>())?;
        for (pair, (operation, load, _, [throughput, latency])) in all.chunks_exact(2).zip(gains) {
            let series = format!("{operation:?} {load}, {}{of_costs}", placement.name());
            let (off, on) = (&pair[0], &pair[1]);
            let kinds: [RunMetric; 3] = [
                ("throughput", |stats| stats.throughput_ops_s, "op/s", Some(*throughput)),
                ("latency in the node", |stats| stats.latency_us_mean, "us", Some(*latency)),
                ("response", |stats| stats.response_us_mean, "us", None),
            ];
            for (kind, of, unit, _) in &kinds {
                points.add(&series, &format!("{kind}, off"), of(off), unit);
                points.add(&series, &format!("{kind}, on"), of(on), unit);
            }
            for (kind, of, _, paper) in &kinds {
                points.add_with_paper(&series, kind, *paper, (of(on) / of(off) - 1.0) * 100.0, "%");
            }
        }
    }
    Ok(points.points)
}

/// Fig. 8: utilisation of each core over time; balancing is switched on half-way.
///
/// # Errors
/// The first run that failed.
pub fn figure_8(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 8");
    let loads = [("medium", MEDIUM_THREADS), ("heavy", HEAVY_THREADS)];
    let job = |(_, threads): (_, usize)| OctokvRunConfig {
        mode: RunMode::Switched,
        ..OctokvRunConfig::new(Operation::Put, threads, OctokvPlacement::ByShares)
            .with_policy(Policy::Proportional)
    };
    for (intervals, (load, _)) in runs.run_all(&loads.map(job))?.iter().zip(loads) {
        let mean = |core: usize, intervals: &[RunStats]| {
            let sum: f64 = intervals.iter().map(|stats| stats.cores[core].utilisation).sum();
            sum / intervals.len().max(1) as f64
        };
        // The first decision takes effect at most one interval after the switch, so the next interval is the first whole one
        // under it.
        let (before, after) =
            (&intervals[..SWITCH_INTERVAL], &intervals[(SWITCH_INTERVAL + 2).min(SERIES_INTERVALS)..]);
        let cores = intervals.first().map_or(0, |stats| stats.cores.len());
        let means: Vec<(f64, f64)> = (0..cores).map(|core| (mean(core, before), mean(core, after))).collect();
        for (core, (before, _)) in means.iter().enumerate() {
            points.add(&format!("{load}, before"), &format!("C({})", core + 1), *before, "1");
        }
        for (core, (_, after)) in means.iter().enumerate() {
            points.add(&format!("{load}, after"), &format!("C({})", core + 1), *after, "1");
        }
        let changes = means.iter().map(|(before, after)| (after / before - 1.0) * 100.0);
        let paper = (load == "medium").then_some(-20.0);
        points.add_with_paper(load, "greatest decrease", paper, changes.fold(0.0, f64::min), "%");
        for (second, stats) in intervals.iter().enumerate() {
            for (core, stats) in stats.cores.iter().enumerate() {
                let series = format!("{load}, C({})", core + 1);
                points.add_plot_only(&series, &(second + 1).to_string(), stats.utilisation, "1");
            }
        }
    }
    Ok(points.points)
}

/// Fig. 9: throughput of heavy puts by the thresholds T_OL and T_LB.
///
/// # Errors
/// The first run that failed.
pub fn figure_9(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 9");
    const THRESHOLDS: [(f64, f64); 4] = [(0.4, 0.1), (0.7, 0.4), (0.9, 0.1), (0.4, 0.6)];
    let off = OctokvRunConfig::new(Operation::Put, HEAVY_THREADS, OctokvPlacement::ByShares);
    let mut jobs = vec![off.clone()];
    jobs.extend(
        THRESHOLDS.map(|thresholds| OctokvRunConfig {
            thresholds,
            ..off.clone().with_policy(Policy::Proportional)
        }),
    );
    let all = runs.run_steady(&jobs)?;
    let name = |(overload, imbalance)| format!("({overload}, {imbalance})");
    points.add("Put, heavy", "off", all[0].throughput_ops_s, "op/s");
    for (thresholds, stats) in THRESHOLDS.iter().zip(&all[1..]) {
        points.add("Put, heavy", &name(*thresholds), stats.throughput_ops_s, "op/s");
    }
    for (thresholds, stats) in THRESHOLDS.iter().zip(&all[1..]).skip(1) {
        // The text quantifies one pair only: "no change in throughput".
        let paper = (*thresholds == THRESHOLDS[1]).then_some(0.0);
        let change = (stats.throughput_ops_s / all[1].throughput_ops_s - 1.0) * 100.0;
        points.add_with_paper("Put, heavy, against (0.4, 0.1)", &name(*thresholds), paper, change, "%");
    }
    Ok(points.points)
}
