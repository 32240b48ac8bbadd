//! IterKVSSD's experiments: the production engine on a model of the paper's drive, scanned by one synchronous host.
//!
//! In: names of figures. Out: their points, identical on every machine. `crate::simulation::iterators::parameters` has every
//! number of machine and workload.
//!
//! # Layout
//! - `run_configs`: configurations of the simulated runs. `figures`: the evaluation of the slides.

mod figures;
mod run_configs;

use crate::cli::ReproduceArgs;
use crate::paper_experiment::{FigureSpec, PaperExperiment};
use crate::simulation::iterators::parameters::{self, CommandCosts};
use run_configs::{IterkvssdRunConfig, IterkvssdRunner};
use serde::Serialize;

/// There are no runs on this machine.
pub struct NoNativeRuns;

/// The paper's experiments.
pub const EXPERIMENT: PaperExperiment<IterkvssdRunConfig, NoNativeRuns, IterkvssdReportConfig> =
    PaperExperiment {
        name: "iterkvssd",
        paper: "IterKVSSD",
        figures: &FIGURES,
        report_header,
        report_config,
        prepare_native,
        native_failed,
        x_axis_label,
    };

const FIGURES: [FigureSpec<IterkvssdRunConfig, NoNativeRuns>; 6] = [
    FigureSpec::simulated(
        "index-prefetch",
        "Index prefetch: a scan of 200,000 pairs, D = 0",
        figures::index_prefetch,
    ),
    FigureSpec::simulated(
        "value-prefetch-a",
        "Value prefetch (a): values of 128 B, by D",
        figures::value_prefetch_a,
    ),
    FigureSpec::simulated(
        "value-prefetch-b",
        "Value prefetch (b): values of 4 KiB, by D",
        figures::value_prefetch_b,
    ),
    FigureSpec::simulated(
        "value-prefetch-c",
        "Value prefetch (c): values of 16 KiB, by D",
        figures::value_prefetch_c,
    ),
    FigureSpec::simulated(
        "value-prefetch-d",
        "Value prefetch (d): values of 128 KiB, by D",
        figures::value_prefetch_d,
    ),
    FigureSpec::simulated(
        "gains",
        "Largest gains of value prefetch; and the engine's own D against the best fixed one",
        figures::gains,
    ),
];

/// The settings in the JSON report.
#[derive(Serialize)]
pub struct IterkvssdReportConfig {
    pairs: Vec<u32>,
    value_bytes: [u32; 4],
    command_us: f64,
    flash_read_us: f64,
}

fn prepare_native(_: &ReproduceArgs, _: &[&str]) -> NoNativeRuns {
    NoNativeRuns
}

fn native_failed(_: &NoNativeRuns) -> bool {
    false
}

fn report_config(runs: &IterkvssdRunner, _: &NoNativeRuns) -> IterkvssdReportConfig {
    let pairs_max = runs.durations.stored_pairs;
    IterkvssdReportConfig {
        pairs: parameters::VALUE_BYTES.map(|bytes| parameters::pairs_for(bytes, pairs_max)).to_vec(),
        value_bytes: parameters::VALUE_BYTES,
        command_us: CommandCosts::of_the_paper().total(0).0 as f64 / 1e3,
        flash_read_us: parameters::flash_read_us(),
    }
}

fn report_header(runs: &IterkvssdRunner, native: &NoNativeRuns) -> String {
    let IterkvssdReportConfig { pairs, command_us, flash_read_us, .. } = report_config(runs, native);
    format!(
        "IterKVSSD in virtual time: ours, and the paper's number in brackets where its slides or abstract have one.\n\
         {} pairs ({} of 128 KiB); a command takes {command_us:.1} us without the engine's reads, a read of a flash page\n\
         {flash_read_us:.1} us. One host thread, one command at a time, one pair a command.\n",
        pairs[0], pairs[3]
    )
}

fn x_axis_label(name: &str) -> &'static str {
    if name.starts_with("value-prefetch") { "prefetch degree D" } else { "point, in the order of the table" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_selected_by_its_name() {
        for figure in &FIGURES {
            assert_eq!(EXPERIMENT.select_figures(Some(figure.name)).unwrap().len(), 1, "{}", figure.name);
        }
        assert!(EXPERIMENT.select_figures(Some("figure-1")).is_err());
    }
}
