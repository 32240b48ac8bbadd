//! OctoFAS's experiments in virtual time: the production node and client in a world of the paper's machines, with several
//! tenants; and beyond them our own policy `fair` under the same.
//!
//! In: which figures. Out: their points. The same on every machine; what a request costs and how clients fill their
//! connections is `octokv_sim::papers::parameters`.
//!
//! # Layout
//! - `jobs`: what is run, each once. `figures`: the paper's. `fair`: beyond them.

mod fair_policy;
mod figures;
mod run_configs;

use super::native_runs::OnCores;
use super::simulated_experiment::{Experiment, Figure};
use crate::cli::Reproduce;
use octokv_base::Nanos;
use octokv_sim::experiments::parameters::{self, CostSetting, Operation};
use run_configs::{Job, Runs};
use serde::Serialize;

/// The paper's experiments, and one of our own.
pub const EXPERIMENT: Experiment<Job, Settings> =
    Experiment { name: "octofas", paper: "OctoFAS", figures: &FIGURES, head, settings, real, failed, across };

const FIGURES: [Figure<Job>; 7] = [
    ("figure-3", "Figure 3: flow 1 of 2 threads beside flow 2 of 2 to 14", figures::figure_3),
    ("figure-4", "Figure 4: 2 and 10 threads, alone and together, by core", figures::figure_4),
    (
        "figure-7",
        "Figure 7: inter-core scheduling by whose requests move, 2 and 8 threads",
        figures::figure_7,
    ),
    ("figure-8", "Figure 8: intra-core scheduling by backwardings, 2 and 8 threads", figures::figure_8),
    (
        "figure-9",
        "Figure 9: policies, 2 and 8 threads (inter, hybrid and auto move dense flows; 20 backwardings)",
        figures::figure_9,
    ),
    ("figure-9-cores", "Figure 9 on this machine: policies in turn, real runs on two processors", |runs| {
        runs.real.fairness()
    }),
    ("fair", "Beyond the paper: the policy fair, and what was asked of it", fair_policy::beyond),
];

/// What the document says of the runs.
#[derive(Serialize)]
pub struct Settings {
    window_ms: f64,
    warm_up_ms: f64,
    measured_ms: f64,
    put_us: [f64; 3],
    our_put_us: [f64; 3],
    threads: [usize; 2],
    threshold: usize,
}

fn real(reproduce: &Reproduce, _: &[&str]) -> OnCores {
    OnCores::of(reproduce.quick)
}

fn failed(real: &OnCores) -> bool {
    real.failed()
}

fn settings(runs: &Runs) -> Settings {
    let spans = &runs.spans;
    let ms = |span: Nanos| span.0 as f64 / 1e6;
    let us = |setting| {
        let costs = parameters::costs(setting, Operation::Put, true);
        [costs.target, costs.kv, costs.device].map(|span| span.0 as f64 / 1e3)
    };
    Settings {
        window_ms: ms(parameters::WINDOW),
        warm_up_ms: ms(spans.warm_up),
        measured_ms: ms(spans.steady),
        put_us: us(CostSetting::Paper),
        our_put_us: us(CostSetting::Measured),
        threads: parameters::FLOWS,
        threshold: parameters::FLOW_THRESHOLD,
    }
}

fn head(runs: &Runs) -> String {
    let Settings { window_ms, warm_up_ms, measured_ms, put_us: [a, b, c], our_put_us: [d, e, f], .. } =
        settings(runs);
    format!(
        "OctoFAS in virtual time: ours, and the paper's number in brackets where its text has one.\n\
         The machines of `octokv reproduce octokv`: a put costs {a:.1} + {b:.1} + {c:.1} us of a core; \"our costs\" are\n\
         {d:.1} + {e:.1} + {f:.1} us. A slowdown is the mean response time by that of the flow alone in the same world.\n\
         Runs of {measured_ms:.0} ms after {warm_up_ms:.0} ms; the monitor's window is {window_ms:.0} ms.\n\
         Figure 9-cores is of real runs: it depends on this machine.\n"
    )
}

fn across(name: &str) -> &'static str {
    match name {
        "figure-3" => "threads of flow 2",
        "figure-4" => "core",
        "figure-8" => "backwardings",
        _ => "point, in the order of the table",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit_status::Failure;
    use crate::reproduce::job_runner::Spans;
    use run_configs::Filled;

    #[test]
    fn a_wrong_figure_is_refused_with_the_right_ones() {
        let Err(Failure::Usage(message)) = EXPERIMENT.chosen(Some("fare")) else { panic!("it was taken") };
        assert!(
            message.contains("the OctoFAS paper") && message.contains("did you mean \"fair\"?"),
            "{message}"
        );
        FIGURES.iter().for_each(|figure| assert!(message.contains(figure.0), "{message}"));
    }

    #[test]
    fn a_figure_has_its_points_and_its_picture() {
        let mut runs = Runs::new(Spans { warm_up: Nanos::from_millis(20), ..Spans::of(true) });
        let made = figures::figure_4(&mut runs).unwrap();
        let used: Vec<_> = made.iter().filter(|point| point.unit == "cores").collect();
        assert_eq!((runs.len(), used.len()), (6, 4));
        assert!(used.iter().all(|point| point.paper == Some(point.measured)), "{used:?}");
        let again = figures::figure_4(&mut runs).unwrap();
        assert_eq!((runs.len(), &again), (6, &made), "what ran once does not run again");
        let directory = tempfile::tempdir().unwrap();
        EXPERIMENT.draw(directory.path(), "figure-4", "Figure 4", &made).unwrap();
        let text = std::fs::read_to_string(directory.path().join("octofas-figure-4-1.svg")).unwrap();
        assert!(text.contains("utilisation, both, in order"), "{text}");
    }

    #[test]
    fn a_flow_alone_is_the_same_run_whatever_the_policy_of_the_others() {
        let job = Job { weights: vec![1, 7], ..Job::new(&[2, 8], Filled::InOrder) };
        for flow in [0, 1] {
            let alone = Job::new(&[2, 8], Filled::InOrder).alone(flow);
            assert_eq!(job.with_dense(octokv_sched::Policy::Hybrid).alone(flow), alone);
            assert_eq!(alone.threads[1 - flow], 0);
        }
    }
}
