//! Figures 4, 5 and the host's side of 6 of the OctoKV paper: native runs of Host KVS and OctoKV.
//!
//! ```text
//!   figures ─▶ trials, each once ─▶ in the guest, on this machine ─▶ rounds ─▶ points, each the median of its rounds
//! ```
//! In: figures, number of rounds and operations. Out: points. They depend on the machine and vary between runs, so every
//! point has the minimum and maximum of its rounds. A ratio or a fraction is computed within a round. The paper's
//! numbers are compared with the guest, which has the paper's set-up: files on ext4 on an NVMe-oF disk of the kernel. A
//! trial that cannot run is a point with the reason.
//!
//! # Layout
//! - [`trials`](mod@trials): trials and their results. [`environments`]: the guest and this machine, with their nodes.

mod environments;
mod trials;

use crate::cli::ReproduceArgs;
use crate::data_points::{DataPoint, DataPoints};
use crate::native_runs::NativeRuns;
use crate::simulation::parameters::{LIGHT_THREADS, Operation};
use anyhow::Result;
pub use environments::RunCounts;
use environments::{TrialEnvironment, TrialRounds};
use std::path::PathBuf;
use trials::{
    ComparedSystem, HostKvsTrial, OpBreakdown, PAPER_VALUE_KIB, PutGetSample, SIZES_KIB, TRIAL_THREADS,
    trials_for,
};

/// Native runs of Host KVS and OctoKV: all trials of the selected figures. They run once, when the first figure reads their
/// results.
#[derive(Default)]
pub struct HostKvsRuns {
    trials: Vec<HostKvsTrial>,
    counts: RunCounts,
    directory: Option<PathBuf>,
    environments: Option<[EnvironmentResults; 2]>,
    /// Native runs of balancing on two processors of this machine (figure-7-cores).
    pub core_runs: NativeRuns,
}

/// Results of all rounds of an environment: the guest or this machine.
#[derive(Clone)]
struct EnvironmentResults {
    name: &'static str,
    /// Whether it has the paper's set-up.
    is_paper_setup: bool,
    trials: Vec<HostKvsTrial>,
    rounds: TrialRounds,
    failed: bool,
}

impl Default for RunCounts {
    fn default() -> RunCounts {
        RunCounts { rounds: 2, guest_operations: 40, machine_operations: 200 }
    }
}

impl HostKvsRuns {
    /// Prepares the trials of the figures with these names; runs nothing.
    pub fn new(reproduce: &ReproduceArgs, figures: &[&str]) -> HostKvsRuns {
        let by_size = figures.iter().any(|name| ["figure-4", "figure-5"].contains(name));
        let quick = RunCounts { rounds: 1, guest_operations: 10, machine_operations: 20 };
        HostKvsRuns {
            trials: trials_for(by_size, figures.contains(&"figure-6-host")),
            counts: if reproduce.quick { quick } else { RunCounts::default() },
            directory: reproduce.directory.clone(),
            environments: None,
            core_runs: NativeRuns::for_mode(reproduce.quick),
        }
    }

    /// Number of rounds and operations.
    pub fn counts(&self) -> RunCounts {
        self.counts
    }

    /// Whether a run failed that this machine supports.
    pub fn failed(&self) -> bool {
        self.core_runs.failed() || self.environments.iter().flatten().any(|env| env.failed)
    }

    fn environments(&mut self) -> &[EnvironmentResults; 2] {
        let (trials, counts, directory) = (&self.trials, self.counts, self.directory.as_deref());
        self.environments.get_or_insert_with(|| {
            // On this machine Host KVS uses no network, so the engine on a remote block namespace is not comparable.
            let not_blocks = trials.iter().filter(|trial| trial.system != ComparedSystem::Blocks);
            let on_machine: Vec<HostKvsTrial> = not_blocks.copied().collect();
            let environment = |trials| TrialEnvironment { trials, counts, directory };
            let env = |name, is_paper_setup, trials: &[HostKvsTrial], (rounds, failed)| EnvironmentResults {
                name,
                is_paper_setup,
                trials: trials.to_vec(),
                rounds,
                failed,
            };
            [
                env("in the guest", true, trials, environment(trials).run_in_guest()),
                env("on this machine", false, &on_machine, environment(&on_machine).run_native()),
            ]
        })
    }
}

/// The breakdown of the mean put, or of the mean get.
fn op_breakdown(sample: &PutGetSample, operation: Operation) -> &OpBreakdown {
    match operation {
        Operation::Put => &sample.put,
        Operation::Get => &sample.get,
    }
}

impl EnvironmentResults {
    /// The paper's number, in the environment with the paper's set-up only.
    fn paper_number(&self, number: f64) -> Option<f64> {
        self.is_paper_setup.then_some(number)
    }

    /// Computes a value from the results of the `wanted` trials, round by round. A round in which one of them has no result
    /// yields the reason.
    fn per_round(
        &self,
        wanted: &[HostKvsTrial],
        of: impl Fn(&[PutGetSample]) -> f64,
    ) -> Vec<Result<f64, String>> {
        let found: Vec<_> =
            wanted.iter().map(|want| self.trials.iter().position(|trial| trial == want)).collect();
        let count = self.rounds.iter().map(Vec::len).max().unwrap_or(0);
        let one = |round: usize| {
            let sample = |at: &Option<usize>| {
                let measured = at.and_then(|at| self.rounds[at].get(round));
                measured.cloned().unwrap_or_else(|| Err("not selected".to_owned()))
            };
            Ok(of(&found.iter().map(sample).collect::<Result<Vec<PutGetSample>, String>>()?))
        };
        (0..count).map(one).collect()
    }

    /// Adds the mean response time of a system in microseconds, by value length.
    fn add_by_size(
        &self,
        points: &mut DataPoints,
        operation: Operation,
        system: ComparedSystem,
        sizes: &[usize],
    ) {
        let series = format!("{operation:?}, {}, {}", system.name(), self.name);
        for &kib in sizes {
            let trial = HostKvsTrial { system, threads: LIGHT_THREADS, kib };
            let rounds = self.per_round(&[trial], |of| op_breakdown(&of[0], operation).mean_us);
            points.add_measured(&series, &kib.to_string(), None, &rounds, "us");
        }
    }

    /// Adds the mean response time of one system relative to another, by value length, and the minimum and maximum of these
    /// ratios if the paper states them.
    fn add_comparison(&self, points: &mut DataPoints, compared: &ComparisonSpec) {
        let ComparisonSpec { operation, systems, sizes, ratio, unit, paper } = *compared;
        let series =
            format!("{operation:?}, {} against {}, {}", systems[0].name(), systems[1].name(), self.name);
        let pair = |kib: usize| systems.map(|system| HostKvsTrial { system, threads: LIGHT_THREADS, kib });
        let of_pair = |of: &[PutGetSample]| {
            ratio(op_breakdown(&of[0], operation).mean_us, op_breakdown(&of[1], operation).mean_us)
        };
        for &kib in sizes {
            points.add_measured(&series, &kib.to_string(), None, &self.per_round(&pair(kib), of_pair), unit);
        }
        let Some([least, most]) = paper else { return };
        let all: Vec<HostKvsTrial> = sizes.iter().flat_map(|&kib| pair(kib)).collect();
        let least_of =
            self.per_round(&all, |of| of.chunks_exact(2).map(of_pair).fold(f64::INFINITY, f64::min));
        let most_of =
            self.per_round(&all, |of| of.chunks_exact(2).map(of_pair).fold(f64::NEG_INFINITY, f64::max));
        points.add_measured(&series, "least", self.paper_number(least), &least_of, unit);
        points.add_measured(&series, "most", self.paper_number(most), &most_of, unit);
    }

    /// Adds the breakdown of Host KVS's mean response time by system call, in percent. In the paper's set-up it also adds the
    /// part that the same engine saves on a block namespace, without a file system.
    fn add_breakdown(
        &self,
        points: &mut DataPoints,
        operation: Operation,
        threads: usize,
        paper: Option<f64>,
    ) {
        let host = HostKvsTrial { system: ComparedSystem::HostKvs, threads, kib: PAPER_VALUE_KIB };
        let series = format!("{operation:?}, Host KVS's time, threads: {threads}, {}", self.name);
        let kinds: [BreakdownMetric; 6] = [
            ("pread", |part| part.read_us),
            ("pwrite", |part| part.write_us),
            ("fsync", |part| part.sync_us),
            ("another's turn on the file", |part| part.wait_us),
            ("engine and rest", |part| part.mean_us - part.wait_us - part.syscalls_us()),
            ("in calls", OpBreakdown::syscalls_us),
        ];
        for (name, of) in kinds {
            let share = |all: &[PutGetSample]| {
                let part = op_breakdown(&all[0], operation);
                of(part) / part.mean_us * 100.0
            };
            let paper = paper.filter(|_| name == "in calls");
            points.add_measured(&series, name, paper, &self.per_round(&[host], share), "%");
        }
        if !self.is_paper_setup {
            return;
        }
        let trials = [host, HostKvsTrial { system: ComparedSystem::Blocks, ..host }];
        let beyond = |all: &[PutGetSample]| {
            (1.0 - op_breakdown(&all[1], operation).mean_us / op_breakdown(&all[0], operation).mean_us)
                * 100.0
        };
        points.add_measured(
            &series,
            "beyond the engine here on blocks",
            paper,
            &self.per_round(&trials, beyond),
            "%",
        );
    }
}

/// A part of an operation's time: name, and accessor in microseconds.
type BreakdownMetric = (&'static str, fn(&OpBreakdown) -> f64);

/// A comparison of two systems: operation, value lengths in KiB, how two response times compare and its unit, and the
/// paper's minimum and maximum.
#[derive(Clone, Copy)]
struct ComparisonSpec<'a> {
    operation: Operation,
    systems: [ComparedSystem; 2],
    sizes: &'a [usize],
    ratio: fn(f64, f64) -> f64,
    unit: &'static str,
    paper: Option<[f64; 2]>,
}

/// Fig. 4: puts by value length, and the breakdown of Host KVS's time at 16 KiB.
///
/// # Errors
/// None: the point of a failed trial has the reason.
pub fn figure_4(runs: &mut HostKvsRuns) -> Result<Vec<DataPoint>> {
    let (mut points, operation) = (DataPoints::for_figure("Figure 4"), Operation::Put);
    for env in runs.environments() {
        env.add_by_size(&mut points, operation, ComparedSystem::HostKvs, &SIZES_KIB);
        env.add_by_size(&mut points, operation, ComparedSystem::OctoKv, &SIZES_KIB);
        env.add_by_size(&mut points, operation, ComparedSystem::OctoKvNoFlush, &[PAPER_VALUE_KIB]);
        let spec = ComparisonSpec {
            operation,
            systems: [ComparedSystem::HostKvs, ComparedSystem::OctoKv],
            sizes: &SIZES_KIB,
            ratio: |host, ours| host / ours,
            unit: "times",
            paper: Some([3.0, 6.4]),
        };
        env.add_comparison(&mut points, &spec);
        let systems = [ComparedSystem::HostKvs, ComparedSystem::OctoKvNoFlush];
        env.add_comparison(
            &mut points,
            &ComparisonSpec { systems, sizes: &[PAPER_VALUE_KIB], paper: None, ..spec },
        );
        for threads in [1, LIGHT_THREADS] {
            env.add_breakdown(&mut points, operation, threads, env.paper_number(75.0));
        }
    }
    Ok(points.points)
}

/// Fig. 5: gets by value length, and the breakdown of Host KVS's time at 16 KiB.
///
/// # Errors
/// None: the point of a failed trial has the reason.
pub fn figure_5(runs: &mut HostKvsRuns) -> Result<Vec<DataPoint>> {
    let (mut points, operation) = (DataPoints::for_figure("Figure 5"), Operation::Get);
    for env in runs.environments() {
        env.add_by_size(&mut points, operation, ComparedSystem::HostKvs, &SIZES_KIB);
        env.add_by_size(&mut points, operation, ComparedSystem::OctoKv, &SIZES_KIB);
        let spec = ComparisonSpec {
            operation,
            systems: [ComparedSystem::OctoKv, ComparedSystem::HostKvs],
            sizes: &SIZES_KIB,
            ratio: |ours, host| (ours / host - 1.0) * 100.0,
            unit: "%",
            paper: Some([1.2, 1.4]),
        };
        env.add_comparison(&mut points, &spec);
        for threads in [1, LIGHT_THREADS] {
            env.add_breakdown(&mut points, operation, threads, None);
        }
    }
    Ok(points.points)
}

/// Fig. 6 of both systems as native runs: throughput and response time by load.
///
/// # Errors
/// None: the point of a failed trial has the reason.
pub fn figure_6(runs: &mut HostKvsRuns) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 6");
    let systems = [ComparedSystem::HostKvs, ComparedSystem::OctoKv];
    let trial = |system, threads| HostKvsTrial { system, threads, kib: PAPER_VALUE_KIB };
    let mb_s: fn(&OpBreakdown) -> f64 = |part| part.ops_s * (PAPER_VALUE_KIB << 10) as f64 / 1e6;
    for env in runs.environments() {
        for operation in [Operation::Put, Operation::Get] {
            for system in systems {
                let series = format!("{operation:?}, {}, {}", system.name(), env.name);
                for (unit, of) in [("MB/s", mb_s), ("us", |part: &OpBreakdown| part.mean_us)] {
                    for threads in TRIAL_THREADS {
                        let rounds = env
                            .per_round(&[trial(system, threads)], |all| of(op_breakdown(&all[0], operation)));
                        points.add_measured(&series, &threads.to_string(), None, &rounds, unit);
                    }
                }
            }
            let most = |all: &[PutGetSample]| {
                all.iter().map(|sample| mb_s(op_breakdown(sample, operation))).fold(0.0, f64::max)
            };
            let (half, all) = (
                TRIAL_THREADS.len(),
                systems.iter().flat_map(|&system| TRIAL_THREADS.map(|threads| trial(system, threads))),
            );
            let less = |all: &[PutGetSample]| most(&all[..half]) - most(&all[half..]);
            let paper = env.paper_number(-200.0).filter(|_| operation == Operation::Get);
            let series = format!("{operation:?}, Host KVS less OctoKV, {}", env.name);
            let rounds = env.per_round(&all.collect::<Vec<HostKvsTrial>>(), less);
            points.add_measured(&series, "at its most", paper, &rounds, "MB/s (difference)");
        }
    }
    Ok(points.points)
}

#[cfg(test)]
mod tests {
    use super::trials::TrialResult;
    use super::*;

    /// Native runs with the results of `sample`, two rounds each.
    fn runs_with(sample: impl Fn(&HostKvsTrial, usize) -> TrialResult) -> HostKvsRuns {
        let trials = trials_for(true, true);
        let rounds: TrialRounds =
            trials.iter().map(|trial| (0..2).map(|round| sample(trial, round)).collect()).collect();
        let env = |name, is_paper_setup| EnvironmentResults {
            name,
            is_paper_setup,
            trials: trials.clone(),
            rounds: rounds.clone(),
            failed: false,
        };
        let environments = Some([env("in the guest", true), env("on this machine", false)]);
        HostKvsRuns { environments, ..HostKvsRuns::default() }
    }

    /// Host KVS's puts take 500 us: 300 in system calls and 100 waiting for the lock of the file. All other operations take
    /// 100 us. The second round takes half of each.
    fn fixed_sample(trial: &HostKvsTrial, round: usize) -> PutGetSample {
        let scale = 1.0 / (round + 1) as f64;
        let other = OpBreakdown { mean_us: 100.0 * scale, ops_s: 1e4 / scale, ..OpBreakdown::default() };
        let host = OpBreakdown {
            mean_us: 500.0 * scale,
            ops_s: 2e3 / scale,
            wait_us: 100.0 * scale,
            write_us: 50.0 * scale,
            sync_us: 250.0 * scale,
            read_us: 0.0,
        };
        match trial.system {
            ComparedSystem::HostKvs => PutGetSample { put: host, get: other },
            _ => PutGetSample { put: other, get: other },
        }
    }

    fn find_point<'a>(points: &'a [DataPoint], series: &str, x: &str) -> &'a DataPoint {
        points.iter().find(|point| point.series == series && point.x == x).expect(series)
    }

    #[test]
    fn ratios_and_shares_are_computed_within_a_round() {
        let mut runs = runs_with(|trial, round| Ok(fixed_sample(trial, round)));
        let points = figure_4(&mut runs).unwrap();
        let ratio = "Put, Host KVS against OctoKV, in the guest";
        for (x, paper) in [("4", None), ("least", Some(3.0)), ("most", Some(6.4))] {
            let point = find_point(&points, ratio, x);
            assert_eq!((point.measured, point.paper), (5.0, paper), "{x}");
            assert_eq!(point.measured_runs.as_ref().unwrap().rounds, 2);
        }
        let time = "Put, Host KVS's time, threads: 7, in the guest";
        let shares = [
            ("fsync", 50.0, None),
            ("pwrite", 10.0, None),
            ("pread", 0.0, None),
            ("another's turn on the file", 20.0, None),
            ("engine and rest", 20.0, None),
            ("in calls", 60.0, Some(75.0)),
            ("beyond the engine here on blocks", 80.0, Some(75.0)),
        ];
        for (x, share, paper) in shares {
            let point = find_point(&points, time, x);
            assert!((point.measured - share).abs() < 1e-9 && point.paper == paper, "{x}: {point:?}");
        }
        // Only the guest has the paper's set-up.
        let here = "Put, Host KVS's time, threads: 7, on this machine";
        assert_eq!(find_point(&points, here, "in calls").paper, None);
        assert!(!points.iter().any(|point| point.series == here && point.x.starts_with("beyond")));
        assert_eq!(find_point(&points, "Put, Host KVS against OctoKV, on this machine", "least").paper, None);
        let gets = figure_5(&mut runs).unwrap();
        assert_eq!(find_point(&gets, "Get, OctoKV against Host KVS, in the guest", "most").measured, 0.0);
    }

    #[test]
    fn a_failed_trial_leaves_the_other_points() {
        let mut runs = runs_with(|trial, round| match trial.system {
            ComparedSystem::HostKvs if trial.threads == 1 || round == 1 => Err("no kernel".to_owned()),
            _ => Ok(fixed_sample(trial, round)),
        });
        let points = figure_6(&mut runs).unwrap();
        let host = "Put, Host KVS, in the guest";
        let (one, light) = (find_point(&points, host, "1"), find_point(&points, host, "7"));
        assert!(one.measured.is_nan() && one.measured_runs.as_ref().unwrap().note == "not run: no kernel");
        assert_eq!(light.measured_runs.as_ref().unwrap().rounds, 1);
        assert!((light.measured - 2e3 * 16384.0 / 1e6).abs() < 1e-9);
        assert!(!find_point(&points, "Put, OctoKV, in the guest", "1").measured.is_nan());
        assert!(
            find_point(&points, "Get, Host KVS less OctoKV, in the guest", "at its most").measured.is_nan()
        );
    }
}
