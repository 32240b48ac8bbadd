//! Figures 4, 5 and the host's side of 6 of the OctoKV paper: Host KVS against OctoKV, as real runs.
//!
//! ```text
//!   figures ─▶ trials, each once ─▶ in the guest, on this machine ─▶ rounds ─▶ points, each the median of its rounds
//! ```
//! In: which figures, how much. Out: points. Unlike the others these depend on the machine and are never twice the same:
//! every point says the least and the most of its rounds. A ratio or a part is taken within a round.
//! The paper's numbers stand beside the guest's, for that is its set-up: files on ext4 on a disk of the kernel's
//! NVMe-oF. What cannot run is a point that says why.
//!
//! # Layout
//! - [`trials`](mod@trials): what is run and what it comes to. [`environments`]: where, on which nodes.

mod environments;
mod trials;

use super::run_configs::Runs;
use crate::cli::Reproduce;
use crate::reproduce::data_points::{Point, Points};
use crate::reproduce::native_runs::OnCores;
use anyhow::Result;
pub use environments::Amount;
use environments::{Rounds, Work};
use octokv_sim::experiments::parameters::{LIGHT, Operation};
use std::path::PathBuf;
use trials::{LOADS, Part, SIZES_KIB, Sample, System, Trial, USUAL_KIB, trials};

/// All real runs: made when the first figure asks for them.
#[derive(Default)]
pub struct Host {
    trials: Vec<Trial>,
    amount: Amount,
    directory: Option<PathBuf>,
    places: Option<[Place; 2]>,
    /// Those on this machine's cores.
    pub on_cores: OnCores,
}

/// What came out at a place.
#[derive(Clone)]
struct Place {
    name: &'static str,
    /// Whether it is the paper's set-up.
    is_papers: bool,
    trials: Vec<Trial>,
    rounds: Rounds,
    failed: bool,
}

impl Default for Amount {
    fn default() -> Amount {
        Amount { rounds: 2, guest_operations: 40, machine_operations: 200 }
    }
}

impl Host {
    /// Those that these figures want.
    pub fn new(reproduce: &Reproduce, figures: &[&str]) -> Host {
        let by_size = figures.iter().any(|name| ["figure-4", "figure-5"].contains(name));
        let quick = Amount { rounds: 1, guest_operations: 10, machine_operations: 20 };
        Host {
            trials: trials(by_size, figures.contains(&"figure-6-host")),
            amount: if reproduce.quick { quick } else { Amount::default() },
            directory: reproduce.directory.clone(),
            places: None,
            on_cores: OnCores::of(reproduce.quick),
        }
    }

    /// How much is run.
    pub fn amount(&self) -> Amount {
        self.amount
    }

    /// Whether something failed that could run.
    pub fn failed(&self) -> bool {
        self.on_cores.failed() || self.places.iter().flatten().any(|place| place.failed)
    }

    fn places(&mut self) -> &[Place; 2] {
        let (trials, amount, directory) = (&self.trials, self.amount, self.directory.as_deref());
        self.places.get_or_insert_with(|| {
            // Here Host KVS has no wire, so what the engine takes over one says nothing of the rest.
            let not_blocks = trials.iter().filter(|trial| trial.system != System::Blocks);
            let on_machine: Vec<Trial> = not_blocks.copied().collect();
            let work = |trials| Work { trials, amount, directory };
            let place = |name, is_papers, trials: &[Trial], (rounds, failed)| Place {
                name,
                is_papers,
                trials: trials.to_vec(),
                rounds,
                failed,
            };
            [
                place("in the guest", true, trials, work(trials).in_guest()),
                place("on this machine", false, &on_machine, work(&on_machine).on_this_machine()),
            ]
        })
    }
}

/// Of a put or a get.
fn part(sample: &Sample, operation: Operation) -> &Part {
    match operation {
        Operation::Put => &sample.put,
        Operation::Get => &sample.get,
    }
}

impl Place {
    fn paper(&self, number: f64) -> Option<f64> {
        self.is_papers.then_some(number)
    }

    /// Something of the same round of some trials; why not, where one did not run.
    fn rounds(&self, wanted: &[Trial], of: impl Fn(&[Sample]) -> f64) -> Vec<Result<f64, String>> {
        let found: Vec<_> =
            wanted.iter().map(|want| self.trials.iter().position(|trial| trial == want)).collect();
        let count = self.rounds.iter().map(Vec::len).max().unwrap_or(0);
        let one = |round: usize| {
            let sample = |at: &Option<usize>| {
                let measured = at.and_then(|at| self.rounds[at].get(round));
                measured.cloned().unwrap_or_else(|| Err("nobody asked for it".to_owned()))
            };
            Ok(of(&found.iter().map(sample).collect::<Result<Vec<Sample>, String>>()?))
        };
        (0..count).map(one).collect()
    }

    /// Response times of a system, by value length.
    fn by_size(&self, points: &mut Points, operation: Operation, system: System, sizes: &[usize]) {
        let series = format!("{operation:?}, {}, {}", system.name(), self.name);
        for &kib in sizes {
            let trial = Trial { system, threads: LIGHT, kib };
            let rounds = self.rounds(&[trial], |of| part(&of[0], operation).mean_us);
            points.real(&series, &kib.to_string(), None, &rounds, "us");
        }
    }

    /// One system's response times beside another's, by value length, and the least and the most of them.
    fn compared(&self, points: &mut Points, compared: &Compared) {
        let Compared { operation, systems, sizes, ratio, unit, paper } = *compared;
        let series =
            format!("{operation:?}, {} against {}, {}", systems[0].name(), systems[1].name(), self.name);
        let pair = |kib: usize| systems.map(|system| Trial { system, threads: LIGHT, kib });
        let of_pair = |of: &[Sample]| ratio(part(&of[0], operation).mean_us, part(&of[1], operation).mean_us);
        for &kib in sizes {
            points.real(&series, &kib.to_string(), None, &self.rounds(&pair(kib), of_pair), unit);
        }
        let Some([least, most]) = paper else { return };
        let all: Vec<Trial> = sizes.iter().flat_map(|&kib| pair(kib)).collect();
        let least_of = self.rounds(&all, |of| of.chunks_exact(2).map(of_pair).fold(f64::INFINITY, f64::min));
        let most_of =
            self.rounds(&all, |of| of.chunks_exact(2).map(of_pair).fold(f64::NEG_INFINITY, f64::max));
        points.real(&series, "least", self.paper(least), &least_of, unit);
        points.real(&series, "most", self.paper(most), &most_of, unit);
    }

    /// Where the time of Host KVS goes, in percent of the response.
    fn breakdown(&self, points: &mut Points, operation: Operation, threads: usize, paper: Option<f64>) {
        let host = Trial { system: System::HostKvs, threads, kib: USUAL_KIB };
        let series = format!("{operation:?}, Host KVS's time, threads: {threads}, {}", self.name);
        let kinds: [Kind; 6] = [
            ("pread", |part| part.read_us),
            ("pwrite", |part| part.write_us),
            ("fsync", |part| part.sync_us),
            ("another's turn on the file", |part| part.wait_us),
            ("engine and rest", |part| part.mean_us - part.wait_us - part.calls_us()),
            ("in calls", Part::calls_us),
        ];
        for (name, of) in kinds {
            let share = |all: &[Sample]| {
                let part = part(&all[0], operation);
                of(part) / part.mean_us * 100.0
            };
            let paper = paper.filter(|_| name == "in calls");
            points.real(&series, name, paper, &self.rounds(&[host], share), "%");
        }
        if !self.is_papers {
            return;
        }
        let trials = [host, Trial { system: System::Blocks, ..host }];
        let beyond = |all: &[Sample]| {
            (1.0 - part(&all[1], operation).mean_us / part(&all[0], operation).mean_us) * 100.0
        };
        points.real(&series, "beyond the engine here on blocks", paper, &self.rounds(&trials, beyond), "%");
    }
}

/// A part of an operation's time.
type Kind = (&'static str, fn(&Part) -> f64);

/// What is compared, how, and the paper's least and most of it.
#[derive(Clone, Copy)]
struct Compared<'a> {
    operation: Operation,
    systems: [System; 2],
    sizes: &'a [usize],
    ratio: fn(f64, f64) -> f64,
    unit: &'static str,
    paper: Option<[f64; 2]>,
}

/// Fig. 4: puts by value length, and where Host KVS's time goes at 16 KiB.
pub fn figure_4(runs: &mut Runs) -> Result<Vec<Point>> {
    let (mut points, operation) = (Points::of("Figure 4"), Operation::Put);
    for place in runs.real.places() {
        place.by_size(&mut points, operation, System::HostKvs, &SIZES_KIB);
        place.by_size(&mut points, operation, System::OctoKv, &SIZES_KIB);
        place.by_size(&mut points, operation, System::OctoKvNoFlush, &[USUAL_KIB]);
        let compared = Compared {
            operation,
            systems: [System::HostKvs, System::OctoKv],
            sizes: &SIZES_KIB,
            ratio: |host, ours| host / ours,
            unit: "times",
            paper: Some([3.0, 6.4]),
        };
        place.compared(&mut points, &compared);
        let systems = [System::HostKvs, System::OctoKvNoFlush];
        place.compared(&mut points, &Compared { systems, sizes: &[USUAL_KIB], paper: None, ..compared });
        for threads in [1, LIGHT] {
            place.breakdown(&mut points, operation, threads, place.paper(75.0));
        }
    }
    Ok(points.all)
}

/// Fig. 5: gets by value length, and where Host KVS's time goes at 16 KiB.
pub fn figure_5(runs: &mut Runs) -> Result<Vec<Point>> {
    let (mut points, operation) = (Points::of("Figure 5"), Operation::Get);
    for place in runs.real.places() {
        place.by_size(&mut points, operation, System::HostKvs, &SIZES_KIB);
        place.by_size(&mut points, operation, System::OctoKv, &SIZES_KIB);
        let compared = Compared {
            operation,
            systems: [System::OctoKv, System::HostKvs],
            sizes: &SIZES_KIB,
            ratio: |ours, host| (ours / host - 1.0) * 100.0,
            unit: "%",
            paper: Some([1.2, 1.4]),
        };
        place.compared(&mut points, &compared);
        for threads in [1, LIGHT] {
            place.breakdown(&mut points, operation, threads, None);
        }
    }
    Ok(points.all)
}

/// Fig. 6, of both systems as they run here: throughput and response time by load.
pub fn figure_6(runs: &mut Runs) -> Result<Vec<Point>> {
    let mut points = Points::of("Figure 6");
    let systems = [System::HostKvs, System::OctoKv];
    let trial = |system, threads| Trial { system, threads, kib: USUAL_KIB };
    let mb_s: fn(&Part) -> f64 = |part| part.ops_s * (USUAL_KIB << 10) as f64 / 1e6;
    for place in runs.real.places() {
        for operation in [Operation::Put, Operation::Get] {
            for system in systems {
                let series = format!("{operation:?}, {}, {}", system.name(), place.name);
                for (unit, of) in [("MB/s", mb_s), ("us", |part: &Part| part.mean_us)] {
                    for threads in LOADS {
                        let rounds =
                            place.rounds(&[trial(system, threads)], |all| of(part(&all[0], operation)));
                        points.real(&series, &threads.to_string(), None, &rounds, unit);
                    }
                }
            }
            let most =
                |all: &[Sample]| all.iter().map(|sample| mb_s(part(sample, operation))).fold(0.0, f64::max);
            let (half, all) =
                (LOADS.len(), systems.iter().flat_map(|&system| LOADS.map(|threads| trial(system, threads))));
            let less = |all: &[Sample]| most(&all[..half]) - most(&all[half..]);
            let paper = place.paper(-200.0).filter(|_| operation == Operation::Get);
            let series = format!("{operation:?}, Host KVS less OctoKV, {}", place.name);
            let rounds = place.rounds(&all.collect::<Vec<Trial>>(), less);
            points.real(&series, "at its most", paper, &rounds, "MB/s (difference)");
        }
    }
    Ok(points.all)
}

#[cfg(test)]
mod tests {
    use super::trials::Measured;
    use super::*;
    use crate::reproduce::job_runner::Spans;
    use octokv_base::Nanos;

    /// Runs in which everything was measured already.
    fn measured(sample: impl Fn(&Trial, usize) -> Measured) -> Runs {
        let trials = trials(true, true);
        let rounds: Rounds =
            trials.iter().map(|trial| (0..2).map(|round| sample(trial, round)).collect()).collect();
        let place = |name, is_papers| Place {
            name,
            is_papers,
            trials: trials.clone(),
            rounds: rounds.clone(),
            failed: false,
        };
        let spans = Spans { warm_up: Nanos::ZERO, steady: Nanos::ZERO, requests: 1 };
        let mut runs = Runs::new(spans);
        runs.real.places = Some([place("in the guest", true), place("on this machine", false)]);
        runs
    }

    /// Host KVS's puts take 500 us, of which 300 in calls and 100 for another's turn; all else takes 100 us; a second
    /// round half of each.
    fn sample(trial: &Trial, round: usize) -> Sample {
        let scale = 1.0 / (round + 1) as f64;
        let other = Part { mean_us: 100.0 * scale, ops_s: 1e4 / scale, ..Part::default() };
        let host = Part {
            mean_us: 500.0 * scale,
            ops_s: 2e3 / scale,
            wait_us: 100.0 * scale,
            write_us: 50.0 * scale,
            sync_us: 250.0 * scale,
            read_us: 0.0,
        };
        match trial.system {
            System::HostKvs => Sample { put: host, get: other },
            _ => Sample { put: other, get: other },
        }
    }

    fn of<'a>(points: &'a [Point], series: &str, x: &str) -> &'a Point {
        points.iter().find(|point| point.series == series && point.x == x).expect(series)
    }

    #[test]
    fn a_ratio_and_a_share_are_taken_within_a_round() {
        let mut runs = measured(|trial, round| Ok(sample(trial, round)));
        let points = figure_4(&mut runs).unwrap();
        let ratio = "Put, Host KVS against OctoKV, in the guest";
        for (x, paper) in [("4", None), ("least", Some(3.0)), ("most", Some(6.4))] {
            let point = of(&points, ratio, x);
            assert_eq!((point.measured, point.paper), (5.0, paper), "{x}");
            assert_eq!(point.real.as_ref().unwrap().rounds, 2);
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
            let point = of(&points, time, x);
            assert!((point.measured - share).abs() < 1e-9 && point.paper == paper, "{x}: {point:?}");
        }
        // The paper's set-up is the guest's alone.
        let here = "Put, Host KVS's time, threads: 7, on this machine";
        assert_eq!(of(&points, here, "in calls").paper, None);
        assert!(!points.iter().any(|point| point.series == here && point.x.starts_with("beyond")));
        assert_eq!(of(&points, "Put, Host KVS against OctoKV, on this machine", "least").paper, None);
        let gets = figure_5(&mut runs).unwrap();
        assert_eq!(of(&gets, "Get, OctoKV against Host KVS, in the guest", "most").measured, 0.0);
    }

    #[test]
    fn what_did_not_run_leaves_the_rest_as_it_is() {
        let mut runs = measured(|trial, round| match trial.system {
            System::HostKvs if trial.threads == 1 || round == 1 => Err("no kernel".to_owned()),
            _ => Ok(sample(trial, round)),
        });
        let points = figure_6(&mut runs).unwrap();
        let host = "Put, Host KVS, in the guest";
        let (one, light) = (of(&points, host, "1"), of(&points, host, "7"));
        assert!(one.measured.is_nan() && one.real.as_ref().unwrap().note == "not run: no kernel");
        assert_eq!(light.real.as_ref().unwrap().rounds, 1);
        assert!((light.measured - 2e3 * 16384.0 / 1e6).abs() < 1e-9);
        assert!(!of(&points, "Put, OctoKV, in the guest", "1").measured.is_nan());
        assert!(of(&points, "Get, Host KVS less OctoKV, in the guest", "at its most").measured.is_nan());
    }
}
