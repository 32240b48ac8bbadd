//! Figures 3, 4, 7, 8 and 9 of OctoFAS.
//!
//! In: runs. Out: points; the paper's numbers where its text has them (its pictures are not read off).

use super::run_configs::{Filled, Job, Runs};
use crate::reproduce::data_points::{Point, Points};
use anyhow::Result;
use octokv_sched::{MoveFlows, Policy};
use octokv_sim::experiments::parameters::{FLOW_2_THREADS, FLOWS, Operation};
use octokv_sim::experiments::tenant_metrics::{Together, fairness, slowdowns};

const WAYS: [Filled; 2] = [Filled::InOrder, Filled::ByShares];

/// Runs, each with the slowdowns of its flows.
fn beside_alone(runs: &mut Runs, jobs: &[Job]) -> Result<Vec<(Together, Vec<f64>)>> {
    let alone: Vec<Job> =
        jobs.iter().flat_map(|job| (0..job.threads.len()).map(|flow| job.alone(flow))).collect();
    // All at once, so that no processor waits.
    runs.all(&[jobs, &alone].concat())?;
    let mut found = Vec::new();
    for job in jobs {
        let mut alone_us = Vec::new();
        for flow in 0..job.threads.len() {
            alone_us.push(runs.one(&job.alone(flow))?.flows[flow].response_us_mean);
        }
        let together = runs.one(job)?;
        let slowdowns = slowdowns(&together, &alone_us);
        found.push((together, slowdowns));
    }
    Ok(found)
}

/// Fig. 3: what happens to both flows as the second asks for more.
pub fn figure_3(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 3");
    for filled in WAYS {
        let jobs = FLOW_2_THREADS.map(|threads| Job::new(&[FLOWS[0], threads], filled));
        let all = beside_alone(runs, &jobs)?;
        let alone = runs.one(&jobs[0].alone(0))?.flows[0].throughput_ops_s;
        let mut line = |name: &str,
                        unit,
                        paper: fn(usize) -> Option<f64>,
                        of: &dyn Fn(&Together, &[f64]) -> f64| {
            for (threads, (together, slowdowns)) in FLOW_2_THREADS.iter().zip(&all) {
                let series = format!("{name}, {}", filled.name());
                points.beside(&series, &threads.to_string(), paper(*threads), of(together, slowdowns), unit);
            }
        };
        let nothing: fn(usize) -> Option<f64> = |_| None;
        let of_flow_1 = |threads| match threads {
            2 => Some(1.0),
            14 => Some(2.0),
            _ => None,
        };
        line("slowdown of flow 1", "times", of_flow_1, &|_, slowdowns| slowdowns[0]);
        line("slowdown of flow 2", "times", nothing, &|_, slowdowns| slowdowns[1]);
        let normalised = |threads| (threads == 14).then_some(0.55);
        line("throughput of flow 1 by that alone", "1", normalised, &|together, _| {
            together.flows[0].throughput_ops_s / alone
        });
        line("throughput of flow 2", "op/s", nothing, &|together, _| together.flows[1].throughput_ops_s);
        // Its text says 1 at 2 threads, and "below 0.8" at 10.
        let of_text = |threads| match threads {
            2 => Some(1.0),
            10 => Some(0.8),
            _ => None,
        };
        line("F", "1", of_text, &|_, slowdowns| fairness(slowdowns));
        line("F as the node's monitor tells it", "1", nothing, &|together, _| {
            together.fairness_online.unwrap_or(1.0)
        });
        line("slowdown of flow 1 as the monitor tells it", "times", nothing, &|together, _| {
            together.flows[0].slowdown_online.unwrap_or(1.0)
        });
    }
    Ok(points.all)
}

/// Fig. 4: the time of requests in the node and the cores' utilisation, of each flow alone and of both.
pub fn figure_4(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 4");
    for filled in WAYS {
        let both = Job::new(&[FLOWS[0], 10], filled);
        let all = runs.all(&[both.alone(0), both.alone(1), both])?;
        let [one, two, together] = &all[..] else { anyhow::bail!("three runs, not {}", all.len()) };
        let way = filled.name();
        for (name, run, flow) in [("flow 1 alone", one, 0), ("flow 2 alone", two, 1)] {
            let used = run.flows[flow].cores.iter().filter(|core| core.answered > 0).count();
            let paper = [2.0, 6.0][flow];
            points.beside(&format!("cores that are used, {way}"), name, Some(paper), used as f64, "cores");
        }
        let mut cores = |series: String, of: &dyn Fn(usize) -> Option<f64>, unit| {
            for core in 0..together.whole.cores.len() {
                if let Some(figure) = of(core) {
                    points.ours(&series, &format!("C({})", core + 1), figure, unit);
                }
            }
        };
        for (name, run) in [("flow 1 alone", one), ("flow 2 alone", two), ("both", together)] {
            cores(
                format!("utilisation, {name}, {way}"),
                &|core| Some(run.whole.cores[core].utilisation),
                "1",
            );
        }
        for (name, run, flow) in [
            ("flow 1 alone", one, 0),
            ("flow 1 beside flow 2", together, 0),
            ("flow 2 alone", two, 1),
            ("flow 2 beside flow 1", together, 1),
        ] {
            let latency = |core: usize| {
                let core = run.flows[flow].cores[core];
                (core.answered > 0).then_some(core.latency_us)
            };
            cores(format!("time in the node, {name}, {way}"), &latency, "us");
        }
    }
    Ok(points.all)
}

/// How much more, in percent.
fn gain(ours: f64, than: f64) -> f64 {
    (ours / than - 1.0) * 100.0
}

/// Throughput, F, F online and LB of runs that have names.
fn absolute(points: &mut Points, way: &str, names: &[&str], all: &[(Together, Vec<f64>)]) {
    type Kind = (&'static str, &'static str, fn(&(Together, Vec<f64>)) -> f64);
    let kinds: [Kind; 4] = [
        ("throughput", "op/s", |run| run.0.whole.throughput_ops_s),
        ("F", "1", |run| fairness(&run.1)),
        ("F as the node's monitor tells it", "1", |run| run.0.fairness_online.unwrap_or(1.0)),
        ("LB", "1", |run| run.0.balance()),
    ];
    for (kind, unit, of) in kinds {
        for (name, run) in names.iter().zip(all) {
            points.ours(&format!("{kind}, {way}"), name, of(run), unit);
        }
    }
}

fn gains(all: &[(Together, Vec<f64>)], of: usize, than: usize) -> [f64; 2] {
    let throughput = |at: usize| all[at].0.whole.throughput_ops_s;
    let fair = |at: usize| fairness(&all[at].1);
    [gain(throughput(of), throughput(than)), gain(fair(of), fair(than))]
}

/// Fig. 7: whose requests move between cores.
pub fn figure_7(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 7");
    for filled in WAYS {
        let off = Job::new(&FLOWS, filled);
        let mut jobs = vec![off.clone()];
        jobs.extend(MoveFlows::ALL.map(|moves| Job { moves, ..off.with(Policy::Inter) }));
        let all = beside_alone(runs, &jobs)?;
        let names = ["none", "all", "dense", "sparse"];
        absolute(&mut points, filled.name(), &names, &all);
        for (kind, paper) in [(0, Some(4.0)), (1, None)] {
            for (at, name) in names.iter().enumerate().skip(1) {
                let series = format!("{} against none, {}", ["throughput", "F"][kind], filled.name());
                points.beside(&series, name, paper.filter(|_| *name == "all"), gains(&all, at, 0)[kind], "%");
            }
        }
    }
    Ok(points.all)
}

/// Fig. 8: how often requests of dense flows go back.
pub fn figure_8(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 8");
    let names = ["0", "5", "10", "15", "20"];
    for filled in WAYS {
        let off = Job::new(&FLOWS, filled);
        let mut jobs = vec![off.clone()];
        jobs.extend([5, 10, 15, 20].map(|backwardings| off.with(Policy::Intra).going_back(backwardings)));
        let all = beside_alone(runs, &jobs)?;
        absolute(&mut points, filled.name(), &names, &all);
        for (kind, paper) in [(0, -19.0), (1, 12.0)] {
            for (at, name) in names.iter().enumerate().skip(1) {
                let series = format!("{} against 0, {}", ["throughput", "F"][kind], filled.name());
                let paper = (*name == "20").then_some(paper);
                points.beside(&series, name, paper, gains(&all, at, 0)[kind], "%");
            }
        }
    }
    Ok(points.all)
}

/// Fig. 9: the policies side by side, and beside them what the flags choose, and our own.
pub fn figure_9(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 9");
    let names = ["baseline", "inter", "intra", "hybrid", "auto", "fair"];
    for (operation, filled) in
        [(Operation::Put, WAYS[0]), (Operation::Put, WAYS[1]), (Operation::Get, WAYS[0])]
    {
        let off = Job { operation, ..Job::new(&FLOWS, filled) };
        let inter = Job { moves: MoveFlows::Dense, ..off.with(Policy::Inter) };
        let intra = off.with(Policy::Intra).going_back(20);
        let jobs = [
            off.clone(),
            inter,
            intra,
            off.with_dense(Policy::Hybrid),
            off.with_dense(Policy::Auto),
            off.with(Policy::Fair),
        ];
        let all = beside_alone(runs, &jobs)?;
        let way = format!("{operation:?}, {}", filled.name());
        absolute(&mut points, &way, &names, &all);
        // Which operation they are of is not said.
        let (hybrid_baseline, hybrid_inter, hybrid_intra) =
            (gains(&all, 3, 0), gains(&all, 3, 1), gains(&all, 3, 2));
        let series = format!("hybrid, {way}");
        points.beside(&series, "throughput against baseline", None, hybrid_baseline[0], "%");
        points.beside(&series, "F against baseline", Some(10.0), hybrid_baseline[1], "%");
        points.beside(&series, "throughput against intra", Some(25.0), hybrid_intra[0], "%");
        points.beside(&series, "F against inter", Some(8.0), hybrid_inter[1], "%");
    }
    Ok(points.all)
}
