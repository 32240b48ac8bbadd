//! OctoFAS's experiments: the production node and client in a simulation of the paper's machines, with several tenants;
//! and beyond the paper our own policy `fair` in the same simulation.
//!
//! In: names of figures. Out: their points, identical on every machine. `crate::simulation::parameters` has the costs of
//! a request and the connection policies.
//!
//! # Layout
//! - `run_configs`: configurations of the simulated runs. `figures`: the paper's figures. `fair_policy`: our policy.

mod fair_policy;
mod figures;
mod run_configs;

use crate::cli::ReproduceArgs;
use crate::native_runs::NativeRuns;
use crate::paper_experiment::{FigureSpec, PaperExperiment};
use crate::simulation::parameters::{self, CostModel, Operation};
use octokv_base::Nanos;
use run_configs::{OctofasRunConfig, OctofasRunner};
use serde::Serialize;

/// The paper's experiments, and one of our own.
pub const EXPERIMENT: PaperExperiment<OctofasRunConfig, NativeRuns, OctofasReportConfig> = PaperExperiment {
    name: "octofas",
    paper: "OctoFAS",
    figures: &FIGURES,
    report_header,
    report_config,
    prepare_native,
    native_failed,
    x_axis_label,
};

const FIGURES: [FigureSpec<OctofasRunConfig, NativeRuns>; 7] = [
    FigureSpec::simulated(
        "figure-3",
        "Figure 3: flow 1 of 2 threads beside flow 2 of 2 to 14",
        figures::figure_3,
    ),
    FigureSpec::simulated(
        "figure-4",
        "Figure 4: 2 and 10 threads, alone and together, by core",
        figures::figure_4,
    ),
    FigureSpec::simulated(
        "figure-7",
        "Figure 7: inter-core scheduling by whose requests move, 2 and 8 threads",
        figures::figure_7,
    ),
    FigureSpec::simulated(
        "figure-8",
        "Figure 8: intra-core scheduling by backwardings, 2 and 8 threads",
        figures::figure_8,
    ),
    FigureSpec::simulated(
        "figure-9",
        "Figure 9: policies, 2 and 8 threads (inter, hybrid and auto move dense flows; 20 backwardings)",
        figures::figure_9,
    ),
    FigureSpec::native(
        "figure-9-cores",
        "Figure 9 on this machine: alternating policies, native runs on two processors",
        NativeRuns::fairness,
    ),
    FigureSpec::simulated(
        "fair",
        "Beyond the paper: the policy fair, and its goals",
        fair_policy::fair_policy_figures,
    ),
];

/// The settings in the JSON report.
#[derive(Serialize)]
pub struct OctofasReportConfig {
    interval_ms: f64,
    warm_up_ms: f64,
    measured_ms: f64,
    put_us: [f64; 3],
    our_put_us: [f64; 3],
    threads: [usize; 2],
    threshold: usize,
}

fn prepare_native(reproduce: &ReproduceArgs, _: &[&str]) -> NativeRuns {
    NativeRuns::for_mode(reproduce.quick)
}

fn native_failed(native: &NativeRuns) -> bool {
    native.failed()
}

fn report_config(runs: &OctofasRunner, _: &NativeRuns) -> OctofasReportConfig {
    let durations = &runs.durations;
    let ms = |span: Nanos| span.0 as f64 / 1e6;
    let us = |setting| {
        let costs = parameters::request_costs(setting, Operation::Put, true);
        [costs.target, costs.kv, costs.device].map(|span| span.0 as f64 / 1e3)
    };
    OctofasReportConfig {
        interval_ms: ms(parameters::SAMPLING_INTERVAL),
        warm_up_ms: ms(durations.warm_up),
        measured_ms: ms(durations.measured),
        put_us: us(CostModel::Paper),
        our_put_us: us(CostModel::Measured),
        threads: parameters::TENANT_THREADS,
        threshold: parameters::OCTOFAS_CONNECTION_THRESHOLD,
    }
}

fn report_header(runs: &OctofasRunner, native: &NativeRuns) -> String {
    let OctofasReportConfig {
        interval_ms,
        warm_up_ms,
        measured_ms,
        put_us: [a, b, c],
        our_put_us: [d, e, f],
        ..
    } = report_config(runs, native);
    format!(
        "OctoFAS in virtual time: ours, and the paper's number in brackets where its text has one.\n\
         The machines of `octokv reproduce octokv`: a put costs {a:.1} + {b:.1} + {c:.1} us of a core; \"our costs\" are\n\
         {d:.1} + {e:.1} + {f:.1} us. A slowdown is the mean response time divided by that of the flow alone in the same simulation.\n\
         Runs of {measured_ms:.0} ms after {warm_up_ms:.0} ms; the monitor's sampling interval is {interval_ms:.0} ms.\n\
         Figure 9-cores is of real runs: it depends on this machine.\n"
    )
}

fn x_axis_label(name: &str) -> &'static str {
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
    use crate::error::LabError;
    use crate::job_runner::Durations;
    use run_configs::OctofasPlacement;

    #[test]
    fn an_unknown_figure_is_rejected_with_the_known_ones() {
        let Err(LabError::Usage(message)) = EXPERIMENT.select_figures(Some("fare")) else {
            panic!("an unknown figure was accepted")
        };
        assert!(
            message.contains("the OctoFAS paper") && message.contains("did you mean \"fair\"?"),
            "{message}"
        );
        FIGURES.iter().for_each(|figure| assert!(message.contains(figure.name), "{message}"));
    }

    #[test]
    fn a_figure_has_its_points_and_its_plot() {
        let mut runs =
            OctofasRunner::new(Durations { warm_up: Nanos::from_millis(20), ..Durations::for_mode(true) });
        let points = figures::figure_4(&mut runs).unwrap();
        let used: Vec<_> = points.iter().filter(|point| point.unit == "cores").collect();
        assert_eq!((runs.len(), used.len()), (6, 4));
        assert!(used.iter().all(|point| point.paper == Some(point.measured)), "{used:?}");
        let again = figures::figure_4(&mut runs).unwrap();
        assert_eq!((runs.len(), &again), (6, &points), "completed runs do not run again");
        let directory = tempfile::tempdir().unwrap();
        EXPERIMENT.draw_svg(directory.path(), "figure-4", "Figure 4", &points).unwrap();
        let text = std::fs::read_to_string(directory.path().join("octofas-figure-4-1.svg")).unwrap();
        assert!(text.contains("utilisation, both, in order"), "{text}");
    }

    #[test]
    fn a_tenant_alone_is_the_same_run_under_every_policy() {
        let job = OctofasRunConfig {
            weights: vec![1, 7],
            ..OctofasRunConfig::new(&[2, 8], OctofasPlacement::InOrder)
        };
        for tenant in [0, 1] {
            let alone = OctofasRunConfig::new(&[2, 8], OctofasPlacement::InOrder).only_tenant(tenant);
            assert_eq!(job.with_dense_policy(octokv_sched::Policy::Hybrid).only_tenant(tenant), alone);
            assert_eq!(alone.threads[1 - tenant], 0);
        }
    }
}
