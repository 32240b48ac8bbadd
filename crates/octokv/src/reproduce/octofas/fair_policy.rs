//! Beyond the paper: our own policy `fair`, held to three figures that nobody measured for it before.
//!
//! ```text
//!   a victim of 1 thread beside 64     its p99 by that alone             at most 1.2
//!   tenants that always want more      Jain's index of work by weight    at least 0.99
//!   all of these                       throughput against none           −2 % at the least
//! ```
//! In: runs. Out: points. All tenants' requests come to one core, each over a wire of its own, so that the core is what is
//! short; then over all six, where the wires are.

use super::run_configs::{Filled, Job, Runs};
use crate::reproduce::data_points::{Point, Points};
use anyhow::Result;
use octokv_sched::Policy;
use octokv_sim::experiments::parameters::CostSetting;
use octokv_sim::experiments::tenant_metrics::jain;

const AGGRESSOR: usize = 64;
/// Threads of each tenant that always wants more.
const BACKLOG: usize = 32;
const POLICIES: [(Policy, &str); 2] = [(Policy::None, "none"), (Policy::Fair, "fair")];

/// The three figures.
pub fn beyond(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("fair");
    for (costs, name) in [(CostSetting::Paper, "one core"), (CostSetting::Measured, "one core, our costs")] {
        let of = |threads: &[usize], weights: &[u32]| Job {
            costs,
            one_machine: false,
            weights: weights.to_vec(),
            ..Job::new(threads, Filled::OneCore)
        };
        let loads = [
            ("1 and 64 threads", of(&[1, AGGRESSOR], &[1, 1])),
            ("weights 1 : 1", of(&[BACKLOG; 2], &[1, 1])),
            ("weights 1 : 2 : 4", of(&[BACKLOG; 3], &[1, 2, 4])),
        ];
        let jobs: Vec<Job> =
            loads.iter().flat_map(|(_, job)| POLICIES.map(|(policy, _)| job.with(policy))).collect();
        runs.all(&[&jobs[..], &[loads[0].1.alone(0)]].concat())?;
        victim(runs, &mut points, name, &loads[0].1)?;
        for (load, job) in &loads[1..] {
            for (policy, policy_name) in POLICIES {
                let together = runs.one(&job.with(policy))?;
                let flows = together.flows.iter().zip(&job.weights);
                let parts: Vec<f64> =
                    flows.map(|(flow, &weight)| flow.throughput_ops_s / f64::from(weight)).collect();
                let series = format!("Jain's index (asked: 0.99), {load}, {name}");
                points.ours(&series, policy_name, jain(&parts), "1");
            }
        }
        for (load, job) in &loads[1..] {
            let [off, on] =
                [runs.one(job)?, runs.one(&job.with(Policy::Fair))?].map(|run| run.whole.throughput_ops_s);
            let series = format!("throughput, {load}, {name}");
            points.ours(&series, "none", off, "op/s");
            points.ours(&series, "fair", on, "op/s");
            let series = format!("throughput against none (asked: -2 at the least), {load}, {name}");
            points.ours(&series, "fair", (on / off - 1.0) * 100.0, "%");
        }
    }
    for (one_machine, name) in [(false, "six cores"), (true, "six cores, one wire")] {
        let job = Job { one_machine, ..Job::new(&[1, AGGRESSOR], Filled::InOrder) };
        runs.all(&[job.with(Policy::None), job.with(Policy::Fair), job.alone(0)])?;
        victim(runs, &mut points, name, &job)?;
    }
    Ok(points.all)
}

/// What the aggressor does to the victim, and what keeping it small costs.
fn victim(runs: &mut Runs, points: &mut Points, name: &str, job: &Job) -> Result<()> {
    let alone = runs.one(&job.alone(0))?.flows[0].response_us_p99;
    let series = format!("p99 of 1 thread beside 64, {name}");
    points.ours(&series, "alone", alone, "us");
    let fair = job.with(Policy::Fair);
    let ways = [
        ("none", job.clone()),
        ("fair", fair.clone()),
        ("fair, in_flight 1", Job { in_flight: Some(1), ..fair }),
    ];
    let mut all = Vec::new();
    for (way, job) in &ways {
        let together = runs.one(job)?;
        let (p99, throughput) = (together.flows[0].response_us_p99, together.whole.throughput_ops_s);
        points.ours(&series, way, p99, "us");
        all.push((*way, p99 / alone, throughput));
    }
    for (way, ratio, _) in &all {
        points.ours(&format!("{series}, by that alone (asked: 1.2)"), way, *ratio, "times");
    }
    for (way, _, throughput) in &all {
        points.ours(&format!("throughput, 1 and 64 threads, {name}"), way, *throughput, "op/s");
    }
    let none = all[0].2;
    for (way, _, throughput) in &all[1..] {
        let series = format!("throughput against none (asked: -2 at the least), 1 and 64 threads, {name}");
        points.ours(&series, way, (throughput / none - 1.0) * 100.0, "%");
    }
    Ok(())
}
