//! Tables I, II, IV, V and VI of the OctoKV paper.
//!
//! In: runs. Out: points, with the paper's numbers as they are printed there.

use super::run_configs::{Course, Filled, Job, Runs};
use crate::reproduce::data_points::{Point, Points};
use anyhow::Result;
use octokv_sched::Policy;
use octokv_sim::experiments::metrics::{CoreFigures, Figures};
use octokv_sim::experiments::parameters::{CORES, CostSetting, HEAVY, LIGHT, MEDIUM, Operation, TABLE_IV};

const CORE_NAMES: [&str; CORES] = ["C(1)", "C(2)", "C(3)", "C(4)", "C(5)", "C(6)"];

/// A line: its name, operation, threads, its cores, average and deviation.
type Depths = (&'static str, Operation, usize, [f64; CORES], [f64; 2]);
const TABLE_I: [Depths; 4] = [
    ("LW(Put)", Operation::Put, LIGHT, [2.00, 2.21, 0.75, 1.58, 0.67, 0.33], [1.26, 0.78]),
    ("HW(Put)", Operation::Put, HEAVY, [5.25, 5.48, 2.00, 2.06, 2.13, 2.13], [3.18, 1.70]),
    ("LW(Get)", Operation::Get, LIGHT, [3.95, 4.23, 1.27, 1.36, 2.00, 1.82], [2.43, 1.31]),
    ("HW(Get)", Operation::Get, HEAVY, [6.06, 6.54, 2.69, 2.62, 2.92, 2.65], [3.91, 1.86]),
];

/// Table I: commands outstanding by core, without the engine.
pub fn table_1(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Table I");
    for filled in [Filled::InOrder, Filled::ByShares] {
        let job =
            |line: &(_, Operation, usize, _, _)| Job { engine: false, ..Job::new(line.1, line.2, filled) };
        let jobs: Vec<Job> = TABLE_I.iter().map(job).collect();
        for (figures, (name, .., cores, [average, deviation])) in runs.steady(&jobs)?.iter().zip(&TABLE_I) {
            let series = format!("{name}, {}", filled.name());
            for ((core, paper), name) in figures.cores.iter().zip(cores).zip(CORE_NAMES) {
                points.beside(&series, name, Some(*paper), core.queue_depth, "commands");
            }
            let (mean, spread) = figures.over_cores(|core| core.queue_depth);
            points.beside(&series, "average", Some(*average), mean, "commands");
            points.beside(&series, "stdev", Some(*deviation), spread, "commands");
        }
    }
    Ok(points.all)
}

/// By load: average and deviation of the baseline, the same with the engine, and the growth of both in percent.
const TABLE_II: [(&str, usize, [[f64; 2]; 3]); 2] = [
    ("light", LIGHT, [[0.315, 0.236], [0.339, 0.263], [7.7, 11.4]]),
    ("heavy", HEAVY, [[0.436, 0.230], [0.491, 0.213], [12.6, -7.3]]),
];

/// Table II: utilisation with and without the engine, for puts.
pub fn table_2(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Table II");
    let ways = [
        (CostSetting::Paper, Filled::ByShares, ""),
        (CostSetting::Paper, Filled::InOrder, ""),
        (CostSetting::Measured, Filled::ByShares, ", our costs"),
    ];
    for (costs, filled, of_costs) in ways {
        let jobs = TABLE_II.iter().flat_map(|(_, threads, _)| {
            let job = Job { costs, ..Job::new(Operation::Put, *threads, filled) };
            [Job { engine: false, ..job.clone() }, job]
        });
        let all = runs.steady(&jobs.collect::<Vec<Job>>())?;
        for (pair, (load, _, paper)) in all.chunks_exact(2).zip(&TABLE_II) {
            let [without, with] = [&pair[0], &pair[1]].map(utilisation);
            let growth = [0, 1].map(|at| (with[at] / without[at] - 1.0) * 100.0);
            let rows = [("baseline", without, "1"), ("with the engine", with, "1"), ("growth", growth, "%")];
            for ((name, ours, unit), paper) in rows.into_iter().zip(paper) {
                let series = format!("{load}, {name}, {}{of_costs}", filled.name());
                // The paper's costs are not ours.
                let paper = |at: usize| (costs == CostSetting::Paper).then_some(paper[at]);
                points.beside(&series, "average", paper(0), ours[0], unit);
                points.beside(&series, "stdev", paper(1), ours[1], unit);
            }
        }
    }
    Ok(points.all)
}

fn utilisation(figures: &Figures) -> [f64; 2] {
    let (mean, spread) = figures.over_cores(|core| core.utilisation);
    [mean, spread]
}

/// The requests that each core received in Table V, and those that ran there.
const TABLE_V: [[f64; CORES]; 2] = [
    [26_394.0, 30_502.0, 10_394.0, 11_575.0, 11_583.0, 9_552.0],
    [0.0, 0.0, 25_024.0, 25_323.0, 25_231.0, 24_422.0],
];

/// A stage, and how often a core ran it.
type Stage = (&'static str, fn(&CoreFigures) -> u64, [f64; CORES]);

/// Tables IV and V: events by core and stage of 100,000 puts, before and after balancing.
pub fn tables_4_5(runs: &mut Runs) -> Result<Vec<Point>> {
    let course = Course::Requests(runs.spans.requests);
    // Where fewer are run the paper's numbers are brought down with them.
    let part = runs.spans.requests as f64 / 1e5;
    let job = |filled, policy| Job { course, ..Job::new(Operation::Put, HEAVY, filled).with(policy) };
    let before_paper = TABLE_IV.map(|events| events as f64);
    let tables = [
        ("Table IV", Policy::None, [before_paper, before_paper]),
        ("Table V", Policy::Proportional, TABLE_V),
    ];
    let mut all = Vec::new();
    for (table, policy, paper) in tables {
        let mut points = Points::of(table);
        let ways = [Filled::ByShares, Filled::InOrder];
        let results = runs.steady(&ways.map(|filled| job(filled, policy)))?;
        for (figures, filled) in results.iter().zip(ways) {
            let stages: [Stage; 3] = [
                ("NVMe-oF target", |core| core.target_events, paper[0]),
                ("KV store", |core| core.events, paper[1]),
                ("NVMe driver", |core| core.events, paper[1]),
            ];
            for (stage, events, paper) in stages {
                let series = format!("{stage}, {}", filled.name());
                for ((core, paper), name) in figures.cores.iter().zip(paper).zip(CORE_NAMES) {
                    points.beside(&series, name, Some(paper * part), events(core) as f64, "events");
                }
                let sum: u64 = figures.cores.iter().map(events).sum();
                points.beside(&series, "sum", Some(1e5 * part), sum as f64, "events");
            }
        }
        all.append(&mut points.all);
    }
    Ok(all)
}

/// Table VI: round robin against proportional shares. The text has no numbers of it.
pub fn table_6(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Table VI");
    for operation in [Operation::Put, Operation::Get] {
        for (load, threads) in [("medium", MEDIUM), ("heavy", HEAVY)] {
            let job = Job::new(operation, threads, Filled::ByShares);
            let jobs = [Policy::RoundRobin, Policy::Proportional].map(|policy| job.clone().with(policy));
            let both = runs.steady(&jobs)?;
            let series = format!("{operation:?}, {load}");
            for (name, figures) in [("RR", &both[0]), ("PS", &both[1])] {
                points.ours(&series, name, figures.throughput_ops_s, "op/s");
            }
            for (name, figures) in [("RR", &both[0]), ("PS", &both[1])] {
                points.ours(&series, name, figures.response_us_mean, "us");
            }
        }
    }
    Ok(points.all)
}
