//! Beyond the paper: our own policy `fair`, compared with three goals.
//!
//! ```text
//!   a victim of 1 thread against 64    its p99 relative to running alone   at most 1.2
//!   backlogged tenants                 Jain's index of work by weight      at least 0.99
//!   all of these                       throughput relative to no policy    at least −2 %
//! ```
//! In: results of simulated runs. Out: data points. First all tenants use one core, each over a link of its own, so that
//! the core is the bottleneck; then they use all six cores, so that the links are.

use super::run_configs::{OctofasPlacement, OctofasRunConfig, OctofasRunner};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::parameters::CostModel;
use crate::simulation::tenant_metrics::jain_index;
use anyhow::Result;
use octokv_sched::Policy;

const AGGRESSOR_THREADS: usize = 64;
/// Threads of each backlogged tenant.
const BACKLOGGED_THREADS: usize = 32;
const POLICIES: [(Policy, &str); 2] = [(Policy::None, "none"), (Policy::Fair, "fair")];

/// The metrics of the three goals.
///
/// # Errors
/// The first run that failed.
pub fn fair_policy_figures(runs: &mut OctofasRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("fair");
    for (costs, name) in [(CostModel::Paper, "one core"), (CostModel::Measured, "one core, our costs")] {
        let of = |threads: &[usize], weights: &[u32]| OctofasRunConfig {
            costs,
            one_machine: false,
            weights: weights.to_vec(),
            ..OctofasRunConfig::new(threads, OctofasPlacement::OneCore)
        };
        let cases = [
            ("1 and 64 threads", of(&[1, AGGRESSOR_THREADS], &[1, 1])),
            ("weights 1 : 1", of(&[BACKLOGGED_THREADS; 2], &[1, 1])),
            ("weights 1 : 2 : 4", of(&[BACKLOGGED_THREADS; 3], &[1, 2, 4])),
        ];
        let jobs: Vec<OctofasRunConfig> =
            cases.iter().flat_map(|(_, job)| POLICIES.map(|(policy, _)| job.with_policy(policy))).collect();
        runs.run_all(&[&jobs[..], &[cases[0].1.only_tenant(0)]].concat())?;
        add_victim_points(runs, &mut points, name, &cases[0].1)?;
        for (case, job) in &cases[1..] {
            for (policy, policy_name) in POLICIES {
                let together = runs.run_one(&job.with_policy(policy))?;
                let tenants = together.tenants.iter().zip(&job.weights);
                let parts: Vec<f64> =
                    tenants.map(|(tenant, &weight)| tenant.throughput_ops_s / f64::from(weight)).collect();
                let series = format!("Jain's index (asked: 0.99), {case}, {name}");
                points.add(&series, policy_name, jain_index(&parts), "1");
            }
        }
        for (case, job) in &cases[1..] {
            let [off, on] = [runs.run_one(job)?, runs.run_one(&job.with_policy(Policy::Fair))?]
                .map(|run| run.total.throughput_ops_s);
            let series = format!("throughput, {case}, {name}");
            points.add(&series, "none", off, "op/s");
            points.add(&series, "fair", on, "op/s");
            let series = format!("throughput against none (asked: -2 at the least), {case}, {name}");
            points.add(&series, "fair", (on / off - 1.0) * 100.0, "%");
        }
    }
    for (one_machine, name) in [(false, "six cores"), (true, "six cores, one wire")] {
        let job = OctofasRunConfig {
            one_machine,
            ..OctofasRunConfig::new(&[1, AGGRESSOR_THREADS], OctofasPlacement::InOrder)
        };
        runs.run_all(&[job.with_policy(Policy::None), job.with_policy(Policy::Fair), job.only_tenant(0)])?;
        add_victim_points(runs, &mut points, name, &job)?;
    }
    Ok(points.points)
}

/// Adds the latency of the victim while the aggressor runs, and the throughput that protecting it costs.
fn add_victim_points(
    runs: &mut OctofasRunner,
    points: &mut DataPoints,
    name: &str,
    job: &OctofasRunConfig,
) -> Result<()> {
    let alone = runs.run_one(&job.only_tenant(0))?.tenants[0].response_us_p99;
    let series = format!("p99 of 1 thread beside 64, {name}");
    points.add(&series, "alone", alone, "us");
    let fair = job.with_policy(Policy::Fair);
    let variants = [
        ("none", job.clone()),
        ("fair", fair.clone()),
        ("fair, in_flight 1", OctofasRunConfig { in_flight: Some(1), ..fair }),
    ];
    let mut all = Vec::new();
    for (variant, job) in &variants {
        let together = runs.run_one(job)?;
        let (p99, throughput) = (together.tenants[0].response_us_p99, together.total.throughput_ops_s);
        points.add(&series, variant, p99, "us");
        all.push((*variant, p99 / alone, throughput));
    }
    for (variant, ratio, _) in &all {
        points.add(&format!("{series}, by that alone (asked: 1.2)"), variant, *ratio, "times");
    }
    for (variant, _, throughput) in &all {
        points.add(&format!("throughput, 1 and 64 threads, {name}"), variant, *throughput, "op/s");
    }
    let none = all[0].2;
    for (variant, _, throughput) in &all[1..] {
        let series = format!("throughput against none (asked: -2 at the least), 1 and 64 threads, {name}");
        points.add(&series, variant, (throughput / none - 1.0) * 100.0, "%");
    }
    Ok(())
}
