//! The OctoKV paper's experiments: the production node and client in a simulation of the paper's machines.
//!
//! In: names of figures. Out: their points, identical on every machine. `crate::simulation::parameters` has the costs of
//! a request and the connection policies. Figure 3 is a drawing. Figures 4, 5 and the host's side of 6 compare with a
//! store on files of the host: they are native runs and depend on the machine.
//!
//! # Layout
//! - `run_configs`: configurations of the simulated runs. `tables`, `figures`: the paper's tables and figures.
//!   `host_kvs`: the native runs.

mod figures;
mod host_kvs;
mod run_configs;
mod tables;

use crate::paper_experiment::{FigureSpec, PaperExperiment};
use crate::simulation::parameters::{self, CostModel, Operation};
use host_kvs::HostKvsRuns;
use octokv_base::Nanos;
use run_configs::{OctokvRunConfig, OctokvRunner};
use serde::Serialize;

/// The paper's experiments.
pub const EXPERIMENT: PaperExperiment<OctokvRunConfig, HostKvsRuns, OctokvReportConfig> = PaperExperiment {
    name: "octokv",
    paper: "OctoKV",
    figures: &FIGURES,
    report_header,
    report_config,
    prepare_native: HostKvsRuns::new,
    native_failed,
    x_axis_label,
};

const FIGURES: [FigureSpec<OctokvRunConfig, HostKvsRuns>; 13] = [
    FigureSpec::simulated(
        "table-1",
        "Table I: commands outstanding by core, without the engine",
        tables::table_1,
    ),
    FigureSpec::simulated(
        "table-2",
        "Table II: utilisation of cores, puts, with and without the engine",
        tables::table_2,
    ),
    FigureSpec::simulated(
        "figure-2",
        "Figure 2: utilisation and time in the node by core, without the engine",
        figures::figure_2,
    ),
    FigureSpec::native(
        "figure-4",
        "Figure 4: puts of Host KVS and OctoKV by KiB of the value, real runs, 7 threads",
        host_kvs::figure_4,
    ),
    FigureSpec::native(
        "figure-5",
        "Figure 5: gets of Host KVS and OctoKV by KiB of the value, real runs, 7 threads",
        host_kvs::figure_5,
    ),
    FigureSpec::simulated(
        "figure-6",
        "Figure 6: throughput and response by threads, by Table IV's shares",
        figures::figure_6,
    ),
    FigureSpec::native(
        "figure-6-host",
        "Figure 6, Host KVS and OctoKV by threads, real runs",
        host_kvs::figure_6,
    ),
    FigureSpec::simulated(
        "figure-7",
        "Figure 7: balancing off and on (T_OL 0.4, T_LB 0.1, PS)",
        figures::figure_7,
    ),
    FigureSpec::native(
        "figure-7-cores",
        "Figure 7 on this machine: balancing alternating off and on, native runs on two processors",
        |runs| runs.core_runs.balancing(),
    ),
    FigureSpec::simulated(
        "tables-4-5",
        "Tables IV and V: events by core, heavy puts, before and after balancing",
        tables::tables_4_5,
    ),
    FigureSpec::simulated(
        "table-6",
        "Table VI: round robin (RR) and proportional shares (PS)",
        tables::table_6,
    ),
    FigureSpec::simulated(
        "figure-8",
        "Figure 8: utilisation over time, balancing switched on at 15 s",
        figures::figure_8,
    ),
    FigureSpec::simulated("figure-9", "Figure 9: thresholds (T_OL, T_LB), heavy puts, PS", figures::figure_9),
];

/// The settings in the JSON report.
#[derive(Serialize)]
pub struct OctokvReportConfig {
    interval_ms: f64,
    warm_up_ms: f64,
    measured_ms: f64,
    requests: u64,
    paper_put_us: [f64; 3],
    our_put_us: [f64; 3],
    our_get_us: [f64; 3],
    /// Rounds of the native runs.
    rounds: usize,
    guest_operations_per_thread: usize,
    machine_operations_per_thread: usize,
}

fn native_failed(native: &HostKvsRuns) -> bool {
    native.failed()
}

fn report_config(runs: &OctokvRunner, native: &HostKvsRuns) -> OctokvReportConfig {
    let (durations, amount) = (&runs.durations, native.counts());
    let ms = |span: Nanos| span.0 as f64 / 1e6;
    let us = |setting, operation| {
        let costs = parameters::request_costs(setting, operation, true);
        [costs.target, costs.kv, costs.device].map(|span| span.0 as f64 / 1e3)
    };
    OctokvReportConfig {
        interval_ms: ms(parameters::SAMPLING_INTERVAL),
        warm_up_ms: ms(durations.warm_up),
        measured_ms: ms(durations.measured),
        requests: durations.requests,
        paper_put_us: us(CostModel::Paper, Operation::Put),
        our_put_us: us(CostModel::Measured, Operation::Put),
        our_get_us: us(CostModel::Measured, Operation::Get),
        rounds: amount.rounds,
        guest_operations_per_thread: amount.guest_operations,
        machine_operations_per_thread: amount.machine_operations,
    }
}

fn report_header(runs: &OctokvRunner, native: &HostKvsRuns) -> String {
    let OctokvReportConfig { interval_ms, warm_up_ms, measured_ms, paper_put_us, our_put_us, rounds, .. } =
        report_config(runs, native);
    let [a, b, c] = paper_put_us;
    let [d, e, f] = our_put_us;
    format!(
        "OctoKV in virtual time: ours, and the paper's number in brackets where its text has one.\n\
         Six cores, 10 GbE, a modelled 970 EVO, values of 16 KiB. A put costs {a:.1} + {b:.1} + {c:.1} us of a core\n\
         (target, engine, device), derived from the paper's figures; \"our costs\" are {d:.1} + {e:.1} + {f:.1} us.\n\
         Runs of {measured_ms:.0} ms after {warm_up_ms:.0} ms; the monitor's sampling interval is {interval_ms:.0} ms, the paper's is 1 s.\n\
         Figures 4 and 5, 6-host and 7-cores are real runs, the first three medians of {rounds}: they depend on this machine.\n"
    )
}

fn x_axis_label(name: &str) -> &'static str {
    match name {
        "figure-4" | "figure-5" => "KiB of the value, or the part in the order of the table",
        "figure-6" | "figure-6-host" => "threads",
        "figure-8" => "time (s of the paper's)",
        _ => "point, in the order of the table",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::LabError;
    use crate::job_runner::Durations;

    #[test]
    fn an_unknown_figure_is_rejected_with_the_known_ones() {
        let Err(LabError::Usage(message)) = EXPERIMENT.select_figures(Some("figure-77")) else {
            panic!("an unknown figure was accepted")
        };
        assert!(message.contains("did you mean \"figure-7\"?"), "{message}");
        FIGURES.iter().for_each(|figure| assert!(message.contains(figure.name), "{message}"));
        assert_eq!(EXPERIMENT.select_figures(None).unwrap_or_default().len(), FIGURES.len());
        assert_eq!(EXPERIMENT.select_figures(Some("table-6")).unwrap_or_default().len(), 1);
        assert_eq!(
            EXPERIMENT.select_figures(Some("figure-6")).unwrap_or_default().len(),
            2,
            "the real runs come with it"
        );
        assert_eq!(EXPERIMENT.select_figures(Some("figure-6-host")).unwrap_or_default().len(), 1);
    }

    #[test]
    fn a_figure_has_its_points_its_plot_and_its_sums() {
        let mut runs = OctokvRunner::new(Durations { requests: 2_000, ..Durations::for_mode(true) });
        let points = tables::tables_4_5(&mut runs).unwrap();
        assert_eq!((runs.len(), points.len()), (4, 2 * 2 * 3 * 7));
        for sum in points.iter().filter(|point| point.x == "sum") {
            assert_eq!((sum.measured, sum.paper), (2_000.0, Some(2_000.0)), "{sum:?}");
        }
        let again = tables::tables_4_5(&mut runs).unwrap();
        assert_eq!((runs.len(), again), (4, points.clone()), "what ran once does not run again");
        let directory = tempfile::tempdir().unwrap();
        EXPERIMENT.draw_svg(directory.path(), "tables-4-5", "Tables IV & V", &points).unwrap();
        let text = std::fs::read_to_string(directory.path().join("octokv-tables-4-5-1.svg")).unwrap();
        assert!(text.contains("KV store, in order") && text.contains("Tables IV &amp; V"));
    }
}
