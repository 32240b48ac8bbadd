//! Figures 3, 4, 7, 8 and 9 of OctoFAS.
//!
//! In: results of simulated runs. Out: data points, each with the paper's number if the text states it. Values are not
//! read off the paper's plots.

use super::run_configs::{OctofasPlacement, OctofasRunConfig, OctofasRunner};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::parameters::{Operation, TENANT_2_THREADS, TENANT_THREADS};
use crate::simulation::tenant_metrics::{MultiTenantRunStats, fairness, slowdowns};
use anyhow::Result;
use octokv_sched::{MigrateTenants, Policy};

const PLACEMENTS: [OctofasPlacement; 2] = [OctofasPlacement::InOrder, OctofasPlacement::ByShares];

/// Runs configurations and computes the slowdown S of each of their tenants, relative to a run with that tenant alone.
fn run_with_slowdowns(
    runs: &mut OctofasRunner,
    jobs: &[OctofasRunConfig],
) -> Result<Vec<(MultiTenantRunStats, Vec<f64>)>> {
    let alone: Vec<OctofasRunConfig> =
        jobs.iter().flat_map(|job| (0..job.threads.len()).map(|tenant| job.only_tenant(tenant))).collect();
    // One batch, so that all processors are busy.
    runs.run_all(&[jobs, &alone].concat())?;
    let mut found = Vec::new();
    for job in jobs {
        let mut alone_us = Vec::new();
        for tenant in 0..job.threads.len() {
            alone_us.push(runs.run_one(&job.only_tenant(tenant))?.tenants[tenant].response_us_mean);
        }
        let together = runs.run_one(job)?;
        let slowdowns = slowdowns(&together, &alone_us);
        found.push((together, slowdowns));
    }
    Ok(found)
}

/// Fig. 3: slowdown, throughput and fairness of two tenants by the number of threads of the second.
///
/// # Errors
/// The first run that failed.
pub fn figure_3(runs: &mut OctofasRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 3");
    for placement in PLACEMENTS {
        let jobs =
            TENANT_2_THREADS.map(|threads| OctofasRunConfig::new(&[TENANT_THREADS[0], threads], placement));
        let all = run_with_slowdowns(runs, &jobs)?;
        let alone = runs.run_one(&jobs[0].only_tenant(0))?.tenants[0].throughput_ops_s;
        let mut line = |name: &str,
                        unit,
                        paper: fn(usize) -> Option<f64>,
                        of: &dyn Fn(&MultiTenantRunStats, &[f64]) -> f64| {
            for (threads, (together, slowdowns)) in TENANT_2_THREADS.iter().zip(&all) {
                let series = format!("{name}, {}", placement.name());
                points.add_with_paper(
                    &series,
                    &threads.to_string(),
                    paper(*threads),
                    of(together, slowdowns),
                    unit,
                );
            }
        };
        let not_in_text: fn(usize) -> Option<f64> = |_| None;
        let of_tenant_1 = |threads| match threads {
            2 => Some(1.0),
            14 => Some(2.0),
            _ => None,
        };
        line("slowdown of flow 1", "times", of_tenant_1, &|_, slowdowns| slowdowns[0]);
        line("slowdown of flow 2", "times", not_in_text, &|_, slowdowns| slowdowns[1]);
        let normalised = |threads| (threads == 14).then_some(0.55);
        line("throughput of flow 1 by that alone", "1", normalised, &|together, _| {
            together.tenants[0].throughput_ops_s / alone
        });
        line("throughput of flow 2", "op/s", not_in_text, &|together, _| {
            together.tenants[1].throughput_ops_s
        });
        // The paper's text: 1 at 2 threads, "below 0.8" at 10.
        let of_text = |threads| match threads {
            2 => Some(1.0),
            10 => Some(0.8),
            _ => None,
        };
        line("F", "1", of_text, &|_, slowdowns| fairness(slowdowns));
        line("F as the node's monitor tells it", "1", not_in_text, &|together, _| {
            together.fairness_online.unwrap_or(1.0)
        });
        line("slowdown of flow 1 as the monitor tells it", "times", not_in_text, &|together, _| {
            together.tenants[0].slowdown_online.unwrap_or(1.0)
        });
    }
    Ok(points.points)
}

/// Fig. 4: by core, its utilisation and the time of requests in the node, for each tenant alone and for both together.
///
/// # Errors
/// The first run that failed.
pub fn figure_4(runs: &mut OctofasRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 4");
    for placement in PLACEMENTS {
        let both = OctofasRunConfig::new(&[TENANT_THREADS[0], 10], placement);
        let all = runs.run_all(&[both.only_tenant(0), both.only_tenant(1), both])?;
        let [one, two, together] = &all[..] else { anyhow::bail!("three runs, not {}", all.len()) };
        let placement_name = placement.name();
        for (name, run, tenant) in [("flow 1 alone", one, 0), ("flow 2 alone", two, 1)] {
            let used = run.tenants[tenant].cores.iter().filter(|core| core.completed > 0).count();
            let paper = [2.0, 6.0][tenant];
            points.add_with_paper(
                &format!("cores that are used, {placement_name}"),
                name,
                Some(paper),
                used as f64,
                "cores",
            );
        }
        let mut cores = |series: String, of: &dyn Fn(usize) -> Option<f64>, unit| {
            for core in 0..together.total.cores.len() {
                if let Some(value) = of(core) {
                    points.add(&series, &format!("C({})", core + 1), value, unit);
                }
            }
        };
        for (name, run) in [("flow 1 alone", one), ("flow 2 alone", two), ("both", together)] {
            cores(
                format!("utilisation, {name}, {placement_name}"),
                &|core| Some(run.total.cores[core].utilisation),
                "1",
            );
        }
        for (name, run, tenant) in [
            ("flow 1 alone", one, 0),
            ("flow 1 beside flow 2", together, 0),
            ("flow 2 alone", two, 1),
            ("flow 2 beside flow 1", together, 1),
        ] {
            let latency = |core: usize| {
                let core = run.tenants[tenant].cores[core];
                (core.completed > 0).then_some(core.latency_us)
            };
            cores(format!("time in the node, {name}, {placement_name}"), &latency, "us");
        }
    }
    Ok(points.points)
}

/// The change from `base` to `value`, in percent of `base`.
fn percent_gain(value: f64, base: f64) -> f64 {
    (value / base - 1.0) * 100.0
}

/// Adds throughput, fairness F, the monitor's estimate of F, and load balance LB of each named run.
fn add_absolute(
    points: &mut DataPoints,
    placement_name: &str,
    names: &[&str],
    all: &[(MultiTenantRunStats, Vec<f64>)],
) {
    type TenantRunMetric = (&'static str, &'static str, fn(&(MultiTenantRunStats, Vec<f64>)) -> f64);
    let kinds: [TenantRunMetric; 4] = [
        ("throughput", "op/s", |run| run.0.total.throughput_ops_s),
        ("F", "1", |run| fairness(&run.1)),
        ("F as the node's monitor tells it", "1", |run| run.0.fairness_online.unwrap_or(1.0)),
        ("LB", "1", |run| run.0.load_balance()),
    ];
    for (kind, unit, of) in kinds {
        for (name, run) in names.iter().zip(all) {
            points.add(&format!("{kind}, {placement_name}"), name, of(run), unit);
        }
    }
}

/// The change of throughput and of F from run `base` to run `of`, in percent.
fn percent_gains(all: &[(MultiTenantRunStats, Vec<f64>)], of: usize, base: usize) -> [f64; 2] {
    let throughput = |at: usize| all[at].0.total.throughput_ops_s;
    let fair = |at: usize| fairness(&all[at].1);
    [percent_gain(throughput(of), throughput(base)), percent_gain(fair(of), fair(base))]
}

/// Fig. 7: throughput and F of inter-core scheduling, by the tenants whose requests migrate: all, dense or sparse.
///
/// # Errors
/// The first run that failed.
pub fn figure_7(runs: &mut OctofasRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 7");
    for placement in PLACEMENTS {
        let off = OctofasRunConfig::new(&TENANT_THREADS, placement);
        let mut jobs = vec![off.clone()];
        jobs.extend(
            MigrateTenants::ALL
                .map(|moves| OctofasRunConfig { migrate: moves, ..off.with_policy(Policy::Inter) }),
        );
        let all = run_with_slowdowns(runs, &jobs)?;
        let names = ["none", "all", "dense", "sparse"];
        add_absolute(&mut points, placement.name(), &names, &all);
        for (kind, paper) in [(0, Some(4.0)), (1, None)] {
            for (at, name) in names.iter().enumerate().skip(1) {
                let series = format!("{} against none, {}", ["throughput", "F"][kind], placement.name());
                points.add_with_paper(
                    &series,
                    name,
                    paper.filter(|_| *name == "all"),
                    percent_gains(&all, at, 0)[kind],
                    "%",
                );
            }
        }
    }
    Ok(points.points)
}

/// Fig. 8: throughput and F of intra-core scheduling, by the number of requeues of dense tenants.
///
/// # Errors
/// The first run that failed.
pub fn figure_8(runs: &mut OctofasRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 8");
    let names = ["0", "5", "10", "15", "20"];
    for placement in PLACEMENTS {
        let off = OctofasRunConfig::new(&TENANT_THREADS, placement);
        let mut jobs = vec![off.clone()];
        jobs.extend([5, 10, 15, 20].map(|requeues| off.with_policy(Policy::Intra).with_requeues(requeues)));
        let all = run_with_slowdowns(runs, &jobs)?;
        add_absolute(&mut points, placement.name(), &names, &all);
        for (kind, paper) in [(0, -19.0), (1, 12.0)] {
            for (at, name) in names.iter().enumerate().skip(1) {
                let series = format!("{} against 0, {}", ["throughput", "F"][kind], placement.name());
                let paper = (*name == "20").then_some(paper);
                points.add_with_paper(&series, name, paper, percent_gains(&all, at, 0)[kind], "%");
            }
        }
    }
    Ok(points.points)
}

/// Fig. 9: throughput and F of the paper's policies, of their automatic choice `auto`, and of our own policy `fair`.
///
/// # Errors
/// The first run that failed.
pub fn figure_9(runs: &mut OctofasRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 9");
    let names = ["baseline", "inter", "intra", "hybrid", "auto", "fair"];
    for (operation, placement) in
        [(Operation::Put, PLACEMENTS[0]), (Operation::Put, PLACEMENTS[1]), (Operation::Get, PLACEMENTS[0])]
    {
        let off = OctofasRunConfig { operation, ..OctofasRunConfig::new(&TENANT_THREADS, placement) };
        let inter = OctofasRunConfig { migrate: MigrateTenants::Dense, ..off.with_policy(Policy::Inter) };
        let intra = off.with_policy(Policy::Intra).with_requeues(20);
        let jobs = [
            off.clone(),
            inter,
            intra,
            off.with_dense_policy(Policy::Hybrid),
            off.with_dense_policy(Policy::Auto),
            off.with_policy(Policy::Fair),
        ];
        let all = run_with_slowdowns(runs, &jobs)?;
        let variant = format!("{operation:?}, {}", placement.name());
        add_absolute(&mut points, &variant, &names, &all);
        // The paper does not state the operation.
        let (hybrid_baseline, hybrid_inter, hybrid_intra) =
            (percent_gains(&all, 3, 0), percent_gains(&all, 3, 1), percent_gains(&all, 3, 2));
        let series = format!("hybrid, {variant}");
        points.add_with_paper(&series, "throughput against baseline", None, hybrid_baseline[0], "%");
        points.add_with_paper(&series, "F against baseline", Some(10.0), hybrid_baseline[1], "%");
        points.add_with_paper(&series, "throughput against intra", Some(25.0), hybrid_intra[0], "%");
        points.add_with_paper(&series, "F against inter", Some(8.0), hybrid_inter[1], "%");
    }
    Ok(points.points)
}
