//! What the papers' experiments in virtual time, and the real runs beside them, have in common: which figures are asked for, and where they go.
//!
//! ```text
//!   figures that are asked for ─▶ runs (crate::runs), each once ─▶ points beside the paper's ─▶ text, JSON, SVG
//! ```
//! In: an [`PaperExperiment`], the arguments. Out: text, documents, pictures.

use crate::cli::ReproduceArgs;
use crate::data_points::{self, DataPoint};
use crate::error::{LabError, LabResult};
use crate::job_runner::{Durations, ExperimentJob, JobRunner};
use crate::json_report;
use crate::progress::{LabProgress, ProgressSink};
use anyhow::{Context, Result, anyhow};
use octokv_bench::plot::{PlotLine, line_plot as picture};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// What it is asked for by, what it shows, and how.
pub type FigureSpec<J> = (&'static str, &'static str, fn(&mut JobRunner<J>) -> Result<Vec<DataPoint>>);

/// A paper's experiments.
pub struct PaperExperiment<J: ExperimentJob + 'static, S: Serialize> {
    /// What it is asked for by.
    pub name: &'static str,
    /// What people call it.
    pub paper: &'static str,
    /// Its tables and figures.
    pub figures: &'static [FigureSpec<J>],
    /// What is said before them.
    pub report_header: fn(&JobRunner<J>) -> String,
    /// What the document says of the runs.
    pub report_config: fn(&JobRunner<J>) -> S,
    /// Prepares the real runs of the figures of these names.
    pub prepare_native: fn(&ReproduceArgs, &[&str]) -> J::NativeState,
    /// Whether a real run went wrong that need not have.
    pub native_failed: fn(&J::NativeState) -> bool,
    /// What is across in the picture of a figure.
    pub x_axis_label: fn(&str) -> &'static str,
}

impl<J: ExperimentJob, S: Serialize> PaperExperiment<J, S> {
    /// Runs what is asked for.
    pub fn run(&self, reproduce: &ReproduceArgs, progress: ProgressSink<'_>) -> LabResult {
        let figures = self.select_figures(reproduce.figure.as_deref())?;
        if let Some(directory) = &reproduce.svg
            && !directory.is_dir()
        {
            return Err(LabError::Usage(format!("--svg: there is no directory {}", directory.display())));
        }
        let mut runs = JobRunner::new(Durations::for_mode(reproduce.quick));
        runs.native =
            (self.prepare_native)(reproduce, &figures.iter().map(|figure| figure.0).collect::<Vec<_>>());
        let (mut all, mut text) = (Vec::new(), (self.report_header)(&runs));
        for (done, (name, title, make)) in figures.iter().enumerate() {
            let fraction = done as f64 / figures.len() as f64;
            progress(LabProgress::Figure { name, fraction });
            let mut points = make(&mut runs)?;
            let _ = writeln!(text, "\n{title}\n{}", data_points::format_text(&points));
            if let Some(directory) = &reproduce.svg {
                self.draw_svg(directory, name, title, &points)?;
            }
            all.append(&mut points);
        }
        progress(LabProgress::Finished);
        let _ = writeln!(text, "{} runs. Why figures differ: docs/REPRODUCTION.md", runs.len());
        if reproduce.json.as_deref() != Some(Path::new("-")) {
            std::io::stdout().write_all(text.as_bytes())?;
        }
        if let Some(file) = &reproduce.json {
            json_report::write_report(file, &(self.report_config)(&runs), &all)?;
        }
        match (self.native_failed)(&runs.native) {
            true => Err(anyhow!("not everything that could run did; its points say what went wrong").into()),
            false => Ok(()),
        }
    }

    /// The figures of a name, all of them without one.
    pub fn select_figures(&self, name: Option<&str>) -> Result<Vec<FigureSpec<J>>, LabError> {
        let Some(name) = name else { return Ok(self.figures.to_vec()) };
        // A figure's real runs are asked for with it, or alone.
        let is_of = |figure: &&FigureSpec<J>| {
            let rest = figure.0.strip_prefix(name);
            rest.is_some_and(|rest| ["", "-host", "-cores"].contains(&rest))
        };
        let found: Vec<FigureSpec<J>> = self.figures.iter().filter(is_of).copied().collect();
        if found.is_empty() {
            let names: Vec<&str> = self.figures.iter().map(|figure| figure.0).collect();
            let similarity = |name_of: &&&str| strsim::normalized_damerau_levenshtein(name, name_of);
            let nearest = names.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b))).unwrap_or(&"");
            return Err(LabError::Usage(format!(
                "--figure: the {} paper has no \"{name}\" here; did you mean \"{nearest}\"? It is one of {}",
                self.paper,
                names.join(", ")
            )));
        }
        Ok(found)
    }

    /// A picture for each unit in which a figure has lines.
    pub fn draw_svg(&self, directory: &Path, name: &str, title: &str, points: &[DataPoint]) -> Result<()> {
        let dots: Vec<&DataPoint> = points.iter().filter(|point| point.is_plot_only).collect();
        let drawn = if dots.is_empty() { points.iter().collect() } else { dots };
        let mut units: Vec<&str> = drawn.iter().map(|point| point.unit).collect();
        units.sort_unstable();
        units.dedup();
        for (number, unit) in units.iter().enumerate() {
            let mut lines: Vec<PlotLine> = Vec::new();
            for point in drawn.iter().filter(|point| point.unit == *unit && !point.measured.is_nan()) {
                let existing = lines.iter().position(|line| line.name == point.series);
                let at = existing.unwrap_or(lines.len());
                if existing.is_none() {
                    lines.push(PlotLine { name: point.series.clone(), points: Vec::new() });
                }
                let line = &mut lines[at];
                // Where x is a name it is drawn by its place.
                let x = point.x.parse().unwrap_or(line.points.len() as f64 + 1.0);
                line.points.push((x, point.measured));
            }
            if lines.is_empty() {
                continue; // Nothing of it ran.
            }
            let file = directory.join(format!("{}-{name}-{}.svg", self.name, number + 1));
            std::fs::write(&file, picture(title, (self.x_axis_label)(name), unit, &lines))
                .with_context(|| format!("picture {}", file.display()))?;
        }
        Ok(())
    }
}
