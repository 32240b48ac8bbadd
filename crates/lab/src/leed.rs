//! LEED's experiments with one drive, and with the four drives of a node: the production log engine on a model of the paper's drive, with a core for each and
//! no network.
//!
//! In: names of tables and figures. Out: their points, identical on every machine. `crate::simulation::log_store::parameters` and
//! `crate::simulation::log_node::parameters` have every number of machine and workload.
//!
//! # Layout
//! - `platforms`: Table 1 and Figure 1, by arithmetic. `limits`: what format and drive allow, by arithmetic. `fill_model`: what a put costs by
//!   the part of a volume that lives, by arithmetic.
//! - `run_configs`: configurations of the simulated runs. `figures`: Table 3 and Figures 11 to 13. `fill_figure`: puts by the part that lives.
//! - `node_runs`: the simulated runs of a node. `node_figures`: Table 3 of the node, Figures 6, 8, 10 and 14.

mod figures;
mod fill_figure;
mod fill_model;
mod limits;
mod node_figures;
mod node_runs;
mod platforms;
mod run_configs;

use crate::cli::ReproduceArgs;
use crate::paper_experiment::{FigureSpec, PaperExperiment};
use crate::simulation::log_store::parameters::{
    self, FILL, PAPER_FAWN, PAPER_KVELL, PAPER_LEED, PublishedRow, UNITS, VALUE_BYTES,
};
use run_configs::{LeedRunConfig, LeedRunner};
use serde::Serialize;
use std::fmt::Write as _;

/// There are no runs on this machine.
pub struct NoMachineRuns;

/// The paper's experiments.
pub const EXPERIMENT: PaperExperiment<LeedRunConfig, NoMachineRuns, LeedReportConfig> = PaperExperiment {
    name: "leed",
    paper: "LEED",
    figures: &FIGURES,
    report_header,
    report_config,
    prepare_native,
    native_failed,
    x_axis_label,
};

const FIGURES: [FigureSpec<LeedRunConfig, NoMachineRuns>; 14] = [
    FigureSpec::simulated("table-1", "Table 1: three kinds of nodes, by arithmetic", platforms::table_1),
    FigureSpec::simulated(
        "figure-1",
        "Figure 1: energy efficiency of 16 TB, by arithmetic",
        platforms::figure_1,
    ),
    FigureSpec::simulated("table-3", "Table 3: one drive, random gets and puts", figures::table_3),
    FigureSpec::simulated("limits", "Table 3's throughputs: what format and drive allow", figures::limits),
    FigureSpec::simulated(
        "figure-11",
        "Figure 11: latency of one request alone, and its parts",
        figures::figure_11,
    ),
    FigureSpec::simulated("figure-12", "Figure 12: throughput by the part of puts", figures::figure_12),
    FigureSpec::simulated(
        "figure-13a",
        "Figure 13a: throughput with compaction, by sub-compactions",
        figures::figure_13a,
    ),
    FigureSpec::simulated(
        "figure-13b",
        "Figure 13b: throughput with compaction, by compactions at once",
        figures::figure_13b,
    ),
    FigureSpec::simulated(
        "table-3-node",
        "Table 3: four drives, random gets and puts",
        node_figures::table_3,
    ),
    FigureSpec::simulated("figure-6", "Figure 6: one node, latency by rate, 1 KiB", node_figures::figure_6),
    FigureSpec::simulated(
        "figure-8",
        "Figure 8: YCSB-B and C by skew, with and without tokens and flow control",
        node_figures::figure_8,
    ),
    FigureSpec::simulated(
        "figure-10",
        "Figure 10: puts by skew, with and without swapping",
        node_figures::figure_10,
    ),
    FigureSpec::simulated(
        "figure-14",
        "Figure 14: one node, latency by rate, 256 B",
        node_figures::figure_14,
    ),
    FigureSpec::simulated("fill", "Puts by the part of a volume that lives", fill_figure::fill),
];

/// The settings in the JSON report.
#[derive(Serialize)]
pub struct LeedReportConfig {
    value_bytes: [u32; 2],
    unit_bytes: [u32; 2],
    objects: [u32; 2],
    command_us: f64,
    /// The part of the drive that is live in runs with compaction.
    fill: f64,
    published: Vec<PublishedRowReport>,
}

/// A row of Table 3 as the paper has it, of one node with four drives.
#[derive(Serialize)]
struct PublishedRowReport {
    system: &'static str,
    value_bytes: u32,
    capacity_percent: f64,
    read_us: f64,
    write_us: f64,
    read_kqps: f64,
    write_kqps: f64,
}

fn prepare_native(_: &ReproduceArgs, _: &[&str]) -> NoMachineRuns {
    NoMachineRuns
}

fn native_failed(_: &NoMachineRuns) -> bool {
    false
}

fn published_rows() -> Vec<PublishedRowReport> {
    let systems = [("FAWN-JBOF", PAPER_FAWN), ("KVell-JBOF", PAPER_KVELL), ("LEED", PAPER_LEED)];
    let row = |(system, (value_bytes, row)): (&'static str, (u32, PublishedRow))| {
        let PublishedRow { capacity_percent, read_us, write_us, read_kqps, write_kqps } = row;
        PublishedRowReport { system, value_bytes, capacity_percent, read_us, write_us, read_kqps, write_kqps }
    };
    let rows = systems
        .into_iter()
        .flat_map(|(system, rows)| VALUE_BYTES.into_iter().zip(rows).map(move |of_size| (system, of_size)));
    rows.map(row).collect()
}

fn report_config(runs: &LeedRunner, _: &NoMachineRuns) -> LeedReportConfig {
    LeedReportConfig {
        value_bytes: VALUE_BYTES,
        unit_bytes: UNITS,
        objects: parameters::OBJECTS.map(|count| parameters::objects_of_run(count, runs.durations.is_quick)),
        command_us: parameters::command_cost().0 as f64 / 1e3,
        fill: FILL,
        published: published_rows(),
    }
}

fn report_header(runs: &LeedRunner, native: &NoMachineRuns) -> String {
    let LeedReportConfig { objects, command_us, published, .. } = report_config(runs, native);
    let mut text = format!(
        "LEED in virtual time: ours, and the paper's number in brackets where its text has one. Its throughputs are those of\n\
         four drives; figures of one drive have a quarter. There {} objects with units of {} B, {} with {} B; a command\n\
         takes the core {command_us} us. Table 3 as published, of the whole node:\n",
        objects[0], UNITS[0], objects[1], UNITS[1],
    );
    for row in published {
        let PublishedRowReport { system, value_bytes, capacity_percent, .. } = row;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "  {system:10} {value_bytes:4} B  capacity {capacity_percent:4.1} %  read {:5.1} us  write {:5.1} us  read {:5.1} K/s  \
             write {:5.1} K/s",
            row.read_us, row.write_us, row.read_kqps, row.write_kqps
        );
    }
    text
}

fn x_axis_label(name: &str) -> &'static str {
    match name {
        "figure-12" => "puts, percent",
        "figure-13a" => "sub-compactions",
        "figure-13b" => "compactions at once",
        "figure-6" | "figure-14" => "rate, percent of the most",
        "figure-8" | "figure-10" => "skew",
        "fill" => "live, percent of the volume",
        "limits" => "requests in flight",
        _ => "point, in the order of the table",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_figure_is_selected_by_its_name() {
        for figure in &FIGURES {
            assert_eq!(EXPERIMENT.select_figures(Some(figure.name)).unwrap().len(), 1, "{}", figure.name);
        }
        assert!(EXPERIMENT.select_figures(Some("figure-2")).is_err());
    }

    #[test]
    fn the_header_has_every_published_row() {
        let runs = LeedRunner::new(crate::job_runner::Durations::for_mode(true));
        let text = report_header(&runs, &NoMachineRuns);
        assert_eq!(text.lines().filter(|line| line.contains("K/s")).count(), 6, "{text}");
        assert!(text.contains("FAWN-JBOF   256 B  capacity  7.7 %  read  65.4 us"), "{text}");
    }
}
