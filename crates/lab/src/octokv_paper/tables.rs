//! Tables I, II, IV, V and VI of the OctoKV paper.
//!
//! In: results of simulated runs. Out: data points, each with the number that the paper prints.

use super::run_configs::{OctokvPlacement, OctokvRunConfig, OctokvRunner, RunMode};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::metrics::{CoreRunStats, RunStats};
use crate::simulation::parameters::{
    CORES, CostModel, HEAVY_THREADS, LIGHT_THREADS, MEDIUM_THREADS, Operation, TABLE_IV,
};
use anyhow::Result;
use octokv_sched::Policy;

const CORE_NAMES: [&str; CORES] = ["C(1)", "C(2)", "C(3)", "C(4)", "C(5)", "C(6)"];

/// A row of Table I: name, operation, threads, outstanding commands of each core, their average and standard deviation.
type QueueDepthRow = (&'static str, Operation, usize, [f64; CORES], [f64; 2]);
const TABLE_I: [QueueDepthRow; 4] = [
    ("LW(Put)", Operation::Put, LIGHT_THREADS, [2.00, 2.21, 0.75, 1.58, 0.67, 0.33], [1.26, 0.78]),
    ("HW(Put)", Operation::Put, HEAVY_THREADS, [5.25, 5.48, 2.00, 2.06, 2.13, 2.13], [3.18, 1.70]),
    ("LW(Get)", Operation::Get, LIGHT_THREADS, [3.95, 4.23, 1.27, 1.36, 2.00, 1.82], [2.43, 1.31]),
    ("HW(Get)", Operation::Get, HEAVY_THREADS, [6.06, 6.54, 2.69, 2.62, 2.92, 2.65], [3.91, 1.86]),
];

/// Table I: outstanding commands by core, without the engine.
///
/// # Errors
/// The first run that failed.
pub fn table_1(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Table I");
    for placement in [OctokvPlacement::InOrder, OctokvPlacement::ByShares] {
        let job = |row: &(_, Operation, usize, _, _)| OctokvRunConfig {
            engine: false,
            ..OctokvRunConfig::new(row.1, row.2, placement)
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

/// Rows of Table II: load, threads, and average and standard deviation of the cores' utilisation (0 to 1): of the baseline,
/// with the engine, and the growth of both in percent.
const TABLE_II: [(&str, usize, [[f64; 2]; 3]); 2] = [
    ("light", LIGHT_THREADS, [[0.315, 0.236], [0.339, 0.263], [7.7, 11.4]]),
    ("heavy", HEAVY_THREADS, [[0.436, 0.230], [0.491, 0.213], [12.6, -7.3]]),
];

/// Table II: utilisation of the cores under puts, with and without the engine.
///
/// # Errors
/// The first run that failed.
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
                // The paper's numbers do not apply to the costs of our code.
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

/// Table V: requests received by each core over its connection, and requests executed by each core.
const TABLE_V: [[f64; CORES]; 2] = [
    [26_394.0, 30_502.0, 10_394.0, 11_575.0, 11_583.0, 9_552.0],
    [0.0, 0.0, 25_024.0, 25_323.0, 25_231.0, 24_422.0],
];

/// A stage: name, accessor of its events on a core, and the paper's events by core.
type EventStage = (&'static str, fn(&CoreRunStats) -> u64, [f64; CORES]);

/// Tables IV and V: events of 100,000 puts by core and stage, without balancing and with it.
///
/// # Errors
/// The first run that failed.
pub fn tables_4_5(runs: &mut OctokvRunner) -> Result<Vec<DataPoint>> {
    let mode = RunMode::Requests(runs.durations.requests);
    // A run of fewer requests scales the paper's numbers down.
    let scale = runs.durations.requests as f64 / 1e5;
    let job = |placement, policy| OctokvRunConfig {
        mode,
        ..OctokvRunConfig::new(Operation::Put, HEAVY_THREADS, placement).with_policy(policy)
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
        let results = runs.run_steady(&placements.map(|placement| job(placement, policy)))?;
        for (stats, placement) in results.iter().zip(placements) {
            let stages: [EventStage; 3] = [
                ("NVMe-oF target", |core| core.requests_received, paper[0]),
                ("KV store", |core| core.requests_executed, paper[1]),
                ("NVMe driver", |core| core.requests_executed, paper[1]),
            ];
            for (stage, events, paper) in stages {
                let series = format!("{stage}, {}", placement.name());
                for ((core, paper), name) in stats.cores.iter().zip(paper).zip(CORE_NAMES) {
                    points.add_with_paper(&series, name, Some(paper * scale), events(core) as f64, "events");
                }
                let sum: u64 = stats.cores.iter().map(events).sum();
                points.add_with_paper(&series, "sum", Some(1e5 * scale), sum as f64, "events");
            }
        }
        all.append(&mut points.points);
    }
    Ok(all)
}

/// Table VI: throughput and response time of round robin (RR) and of proportional shares (PS). The paper's text has no
/// numbers of it.
///
/// # Errors
/// The first run that failed.
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
