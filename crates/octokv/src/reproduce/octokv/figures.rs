//! Figures 2, 6, 7, 8 and 9 of the OctoKV paper.
//!
//! In: runs. Out: points; the paper's numbers where its text has them (its pictures are not read off).

use super::run_configs::{Course, Filled, Job, Runs, SERIES_WINDOWS, SWITCHED_AT};
use crate::reproduce::data_points::{Point, Points};
use anyhow::Result;
use octokv_sched::Policy;
use octokv_sim::experiments::metrics::Figures;
use octokv_sim::experiments::parameters::{CostSetting, HEAVY, LIGHT, MEDIUM, Operation, VALUE_BYTES};

/// Fig. 2: each core's utilisation and the time of its requests in the node, without the engine.
pub fn figure_2(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 2");
    let loads = [("LW", LIGHT), ("HW", HEAVY)];
    for filled in [Filled::ByShares, Filled::InOrder] {
        for operation in [Operation::Put, Operation::Get] {
            let jobs =
                loads.map(|(_, threads)| Job { engine: false, ..Job::new(operation, threads, filled) });
            for ((load, _), figures) in loads.iter().zip(runs.steady(&jobs)?) {
                let series = format!("{load}({operation:?}), {}", filled.name());
                for (at, core) in figures.cores.iter().enumerate() {
                    points.ours(&series, &format!("C({})", at + 1), core.utilisation, "1");
                }
                // The text gives the busiest and the idlest core's of the heavy Put load, and that one is twice the other.
                let is_given = (*load, operation) == ("HW", Operation::Put);
                for (at, core) in figures.cores.iter().enumerate() {
                    let paper = [Some(38.0), None, None, None, None, Some(19.0)][at];
                    let paper = paper.filter(|_| is_given);
                    points.beside(&series, &format!("C({})", at + 1), paper, core.latency_us, "us");
                }
                let answered = figures.cores.iter().filter(|core| core.latency_us > 0.0);
                let latencies: Vec<f64> = answered.map(|core| core.latency_us).collect();
                let most = latencies.iter().copied().fold(0.0, f64::max);
                let least = latencies.iter().copied().fold(f64::INFINITY, f64::min);
                points.beside(
                    &series,
                    "slowest by fastest core",
                    is_given.then_some(2.0),
                    most / least,
                    "times",
                );
            }
        }
    }
    Ok(points.all)
}

/// Loads of Fig. 6, in threads.
const LOADS: [usize; 8] = [1, 2, 4, 7, 10, 12, 16, 24];

/// Fig. 6: throughput and response time by load, OctoKV without balancing.
pub fn figure_6(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 6");
    for operation in [Operation::Put, Operation::Get] {
        let jobs = LOADS.map(|threads| Job::new(operation, threads, Filled::ByShares));
        let all = runs.steady(&jobs)?;
        let series = format!("{operation:?}");
        for (threads, figures) in LOADS.iter().zip(&all) {
            let mb_s = figures.throughput_ops_s * VALUE_BYTES as f64 / 1e6;
            points.ours(&series, &threads.to_string(), mb_s, "MB/s");
        }
        for (threads, figures) in LOADS.iter().zip(&all) {
            points.ours(&series, &threads.to_string(), figures.response_us_mean, "us");
        }
    }
    Ok(points.all)
}

/// What balancing gains in the paper's text, in percent: throughput and latency.
const GAINS: [(Operation, &str, usize, [f64; 2]); 4] = [
    (Operation::Put, "medium", MEDIUM, [18.0, -12.0]),
    (Operation::Put, "heavy", HEAVY, [15.0, -10.0]),
    (Operation::Get, "medium", MEDIUM, [1.0, -1.0]),
    (Operation::Get, "heavy", HEAVY, [1.0, -1.0]),
];

/// One kind of number of a run.
type Kind = (&'static str, fn(&Figures) -> f64, &'static str, Option<f64>);

/// Fig. 7: balancing off and on.
pub fn figure_7(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 7");
    let ways = [
        (CostSetting::Paper, Filled::ByShares, true, ""),
        (CostSetting::Paper, Filled::ByShares, false, ", no journal"),
        (CostSetting::Paper, Filled::InOrder, true, ""),
        (CostSetting::Measured, Filled::ByShares, true, ", our costs"),
    ];
    for (costs, filled, journal, of_costs) in ways {
        // Gets have nothing to do with a journal.
        let gains: Vec<_> = GAINS.iter().filter(|gain| journal || gain.0 == Operation::Put).collect();
        let jobs = gains.iter().flat_map(|(operation, _, threads, _)| {
            let job = Job { costs, journal, ..Job::new(*operation, *threads, filled) };
            [job.clone(), job.with(Policy::Proportional)]
        });
        let all = runs.steady(&jobs.collect::<Vec<Job>>())?;
        for (pair, (operation, load, _, [throughput, latency])) in all.chunks_exact(2).zip(gains) {
            let series = format!("{operation:?} {load}, {}{of_costs}", filled.name());
            let (off, on) = (&pair[0], &pair[1]);
            let kinds: [Kind; 3] = [
                ("throughput", |figures| figures.throughput_ops_s, "op/s", Some(*throughput)),
                ("latency in the node", |figures| figures.latency_us_mean, "us", Some(*latency)),
                ("response", |figures| figures.response_us_mean, "us", None),
            ];
            for (kind, of, unit, _) in &kinds {
                points.ours(&series, &format!("{kind}, off"), of(off), unit);
                points.ours(&series, &format!("{kind}, on"), of(on), unit);
            }
            for (kind, of, _, paper) in &kinds {
                points.beside(&series, kind, *paper, (of(on) / of(off) - 1.0) * 100.0, "%");
            }
        }
    }
    Ok(points.all)
}

/// Fig. 8: utilisation over time; balancing is switched on half-way.
pub fn figure_8(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 8");
    let loads = [("medium", MEDIUM), ("heavy", HEAVY)];
    let job = |(_, threads): (_, usize)| Job {
        course: Course::Switched,
        ..Job::new(Operation::Put, threads, Filled::ByShares).with(Policy::Proportional)
    };
    for (windows, (load, _)) in runs.all(&loads.map(job))?.iter().zip(loads) {
        let mean = |core: usize, windows: &[Figures]| {
            let sum: f64 = windows.iter().map(|figures| figures.cores[core].utilisation).sum();
            sum / windows.len().max(1) as f64
        };
        // A choice comes at the end of the window after the switch at the latest, and takes one to show whole.
        let (before, after) = (&windows[..SWITCHED_AT], &windows[(SWITCHED_AT + 2).min(SERIES_WINDOWS)..]);
        let cores = windows.first().map_or(0, |figures| figures.cores.len());
        let means: Vec<(f64, f64)> = (0..cores).map(|core| (mean(core, before), mean(core, after))).collect();
        for (core, (before, _)) in means.iter().enumerate() {
            points.ours(&format!("{load}, before"), &format!("C({})", core + 1), *before, "1");
        }
        for (core, (_, after)) in means.iter().enumerate() {
            points.ours(&format!("{load}, after"), &format!("C({})", core + 1), *after, "1");
        }
        let changes = means.iter().map(|(before, after)| (after / before - 1.0) * 100.0);
        let paper = (load == "medium").then_some(-20.0);
        points.beside(load, "greatest decrease", paper, changes.fold(0.0, f64::min), "%");
        for (second, figures) in windows.iter().enumerate() {
            for (core, figures) in figures.cores.iter().enumerate() {
                let series = format!("{load}, C({})", core + 1);
                points.dot(&series, &(second + 1).to_string(), figures.utilisation, "1");
            }
        }
    }
    Ok(points.all)
}

/// Fig. 9: what the thresholds do to heavy puts.
pub fn figure_9(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 9");
    const THRESHOLDS: [(f64, f64); 4] = [(0.4, 0.1), (0.7, 0.4), (0.9, 0.1), (0.4, 0.6)];
    let off = Job::new(Operation::Put, HEAVY, Filled::ByShares);
    let mut jobs = vec![off.clone()];
    jobs.extend(THRESHOLDS.map(|thresholds| Job { thresholds, ..off.clone().with(Policy::Proportional) }));
    let all = runs.steady(&jobs)?;
    let name = |(overload, imbalance)| format!("({overload}, {imbalance})");
    points.ours("Put, heavy", "off", all[0].throughput_ops_s, "op/s");
    for (thresholds, figures) in THRESHOLDS.iter().zip(&all[1..]) {
        points.ours("Put, heavy", &name(*thresholds), figures.throughput_ops_s, "op/s");
    }
    for (thresholds, figures) in THRESHOLDS.iter().zip(&all[1..]).skip(1) {
        // "No change in throughput" is the only one of which the text has a number.
        let paper = (*thresholds == THRESHOLDS[1]).then_some(0.0);
        let change = (figures.throughput_ops_s / all[1].throughput_ops_s - 1.0) * 100.0;
        points.beside("Put, heavy, against (0.4, 0.1)", &name(*thresholds), paper, change, "%");
    }
    Ok(points.all)
}
