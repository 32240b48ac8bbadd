//! Tables I, II, IV, V and VI of the OctoKV paper.
//!
//! In: runs. Out: points, with the paper's numbers as they are printed there.

use super::run_configs::{OctokvPlacement, OctokvRunConfig, OctokvRunner, RunMode};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::metrics::{CoreRunStats, RunStats};
use crate::simulation::parameters::{
    CORES, CostModel, HEAVY_THREADS, LIGHT_THREADS, MEDIUM_THREADS, Operation, TABLE_IV,
};
use anyhow::Result;
use octokv_sched::Policy;

const CORE_NAMES: [&str; CORES] = ["C(1)", "C(2)", "C(3)", "C(4)", "C(5)", "C(6)"];

/// A line: its name, operation, threads, its cores, average and deviation.
type QueueDepthRow = (&'static str, Operation, usize, [f64; CORES], [f64; 2]);
const TABLE_I: [QueueDepthRow; 4] = [
    ("LW(Put)", Operation::Put, LIGHT_THREADS, [2.00, 2.21, 0.75, 1.58, 0.67, 0.33], [1.26, 0.78]),
    ("HW(Put)", Operation::Put, HEAVY_THREADS, [5.25, 5.48, 2.00, 2.06, 2.13, 2.13], [3.18, 1.70]),
    ("LW(Get)", Operation::Get, LIGHT_THREADS, [3.95, 4.23, 1.27, 1.36, 2.00, 1.82], [2.43, 1.31]),
    ("HW(Get)", Operation::Get, HEAVY_THREADS, [6.06, 6.54, 2.69, 2.62, 2.92, 2.65], [3.91, 1.86]),
];

/// Table I: commands outstanding by core, without the engine.
pub fn table_1(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Table I");
    for placement in [OctokvPlacement::InOrder, OctokvPlacement::ByShares] {
        let job = |line: &(_, Operation, usize, _, _)| OctokvRunConfig {
            engine: false,
            ..OctokvRunConfig::new(line.1, line.2, placement)
        };
        let jobs: Vec<OctokvRunConfig> = TABLE_I.iter().map(job).collect();
        for (stats, (name, .., cores, [average, deviation])) in runs.run_steady(&jobs)?.iter().zip(&TABLE_I) {
            let series = format!("{name}, {}", placement.name());
            for ((core, paper), name) in stats.cores.iter().zip(cores).zip(CORE_NAMES) {
                points.add_with_paper(&series, name, Some(*paper), core.queue_depth, "commands");
            }
            let (mean, spread) = stats.mean_and_deviation(|core| core.queue_depth);
            points.add_with_paper(&series, "average", Some(*average), mean, "commands");
            points.add_with_paper(&series, "stdev", Some(*deviation), spread, "commands");
        }
    }
    Ok(points.points)
}

/// By load: average and deviation of the baseline, the same with the engine, and the growth of both in percent.
const TABLE_II: [(&str, usize, [[f64; 2]; 3]); 2] = [
    ("light", LIGHT_THREADS, [[0.315, 0.236], [0.339, 0.263], [7.7, 11.4]]),
    ("heavy", HEAVY_THREADS, [[0.436, 0.230], [0.491, 0.213], [12.6, -7.3]]),
];

/// Table II: utilisation with and without the engine, for puts.
pub fn table_2(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Table II");
    let variants = [
        (CostModel::Paper, OctokvPlacement::ByShares, ""),
        (CostModel::Paper, OctokvPlacement::InOrder, ""),
        (CostModel::Measured, OctokvPlacement::ByShares, ", our costs"),
    ];
    for (costs, placement, of_costs) in variants {
        let jobs = TABLE_II.iter().flat_map(|(_, threads, _)| {
            let job = OctokvRunConfig { costs, ..OctokvRunConfig::new(Operation::Put, *threads, placement) };
            [OctokvRunConfig { engine: false, ..job.clone() }, job]
        });
        let all = runs.run_steady(&jobs.collect::<Vec<OctokvRunConfig>>())?;
        for (pair, (load, _, paper)) in all.chunks_exact(2).zip(&TABLE_II) {
            let [without, with] = [&pair[0], &pair[1]].map(utilisation_mean_stdev);
            let growth = [0, 1].map(|at| (with[at] / without[at] - 1.0) * 100.0);
            let rows = [("baseline", without, "1"), ("with the engine", with, "1"), ("growth", growth, "%")];
            for ((name, ours, unit), paper) in rows.into_iter().zip(paper) {
                let series = format!("{load}, {name}, {}{of_costs}", placement.name());
                // The paper's costs are not ours.
                let paper = |at: usize| (costs == CostModel::Paper).then_some(paper[at]);
                points.add_with_paper(&series, "average", paper(0), ours[0], unit);
                points.add_with_paper(&series, "stdev", paper(1), ours[1], unit);
            }
        }
    }
    Ok(points.points)
}

fn utilisation_mean_stdev(stats: &RunStats) -> [f64; 2] {
    let (mean, spread) = stats.mean_and_deviation(|core| core.utilisation);
    [mean, spread]
}

/// The requests that each core received in Table V, and those that ran there.
const TABLE_V: [[f64; CORES]; 2] = [
    [26_394.0, 30_502.0, 10_394.0, 11_575.0, 11_583.0, 9_552.0],
    [0.0, 0.0, 25_024.0, 25_323.0, 25_231.0, 24_422.0],
];

/// A stage, and how often a core ran it.
type EventStage = (&'static str, fn(&CoreRunStats) -> u64, [f64; CORES]);

/// Tables IV and V: events by core and stage of 100,000 puts, before and after balancing.
pub fn tables_4_5(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mode = RunMode::Requests(runs.durations.requests);
    // Where fewer are run the paper's numbers are brought down with them.
    let part = runs.durations.requests as f64 / 1e5;
    let job = |filled, policy| OctokvRunConfig {
        mode,
        ..OctokvRunConfig::new(Operation::Put, HEAVY_THREADS, filled).with_policy(policy)
    };
    let before_paper = TABLE_IV.map(|events| events as f64);
    let tables = [
        ("Table IV", Policy::None, [before_paper, before_paper]),
        ("Table V", Policy::Proportional, TABLE_V),
    ];
    let mut all = Vec::new();
    for (table, policy, paper) in tables {
        let mut points = DataPoints::for_figure(table);
        let placements = [OctokvPlacement::ByShares, OctokvPlacement::InOrder];
        let results = runs.run_steady(&placements.map(|filled| job(filled, policy)))?;
        for (stats, filled) in results.iter().zip(placements) {
            let stages: [EventStage; 3] = [
                ("NVMe-oF target", |core| core.requests_received, paper[0]),
                ("KV store", |core| core.requests_executed, paper[1]),
                ("NVMe driver", |core| core.requests_executed, paper[1]),
            ];
            for (stage, events, paper) in stages {
                let series = format!("{stage}, {}", filled.name());
                for ((core, paper), name) in stats.cores.iter().zip(paper).zip(CORE_NAMES) {
                    points.add_with_paper(&series, name, Some(paper * part), events(core) as f64, "events");
                }
                let sum: u64 = stats.cores.iter().map(events).sum();
                points.add_with_paper(&series, "sum", Some(1e5 * part), sum as f64, "events");
            }
        }
        all.append(&mut points.points);
    }
    Ok(all)
}

/// Table VI: round robin against proportional shares. The text has no numbers of it.
pub fn table_6(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Table VI");
    for operation in [Operation::Put, Operation::Get] {
        for (load, threads) in [("medium", MEDIUM_THREADS), ("heavy", HEAVY_THREADS)] {
            let job = OctokvRunConfig::new(operation, threads, OctokvPlacement::ByShares);
            let jobs =
                [Policy::RoundRobin, Policy::Proportional].map(|policy| job.clone().with_policy(policy));
            let both = runs.run_steady(&jobs)?;
            let series = format!("{operation:?}, {load}");
            for (name, stats) in [("RR", &both[0]), ("PS", &both[1])] {
                points.add(&series, name, stats.throughput_ops_s, "op/s");
            }
            for (name, stats) in [("RR", &both[0]), ("PS", &both[1])] {
                points.add(&series, name, stats.response_us_mean, "us");
            }
        }
    }
    Ok(points.points)
}
