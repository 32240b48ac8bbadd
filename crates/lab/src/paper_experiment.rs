//! A paper's experiments: selects figures, runs each simulation once, and writes text, JSON and SVG.
//!
//! ```text
//!   --figure ─▶ figures ─▶ simulations (job_runner), each once; native runs ─▶ points with the paper's ─▶ text, JSON, SVG
//! ```
//! In: a [`PaperExperiment`] and the arguments. Out: text, documents, plots.

use crate::cli::ReproduceArgs;
use crate::data_points::{self, DataPoint};
use crate::error::{LabError, LabResult};
use crate::figure_plot::plot_figure;
use crate::job_runner::{Durations, ExperimentJob, JobRunner};
use crate::json_report;
use crate::progress::{LabProgress, ProgressSink};
use anyhow::{Context, Result, anyhow};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// The source of a figure's points.
pub enum FigureSource<J: ExperimentJob, N> {
    /// Simulated runs.
    Simulated(fn(&mut JobRunner<J>) -> Result<Vec<DataPoint>>),
    /// Runs on this machine.
    Native(fn(&mut N) -> Result<Vec<DataPoint>>),
}

/// A table or figure that can be reproduced.
pub struct FigureSpec<J: ExperimentJob, N> {
    /// Its name on the command line (`--figure`).
    pub name: &'static str,
    /// Its title in text and plots.
    pub title: &'static str,
    source: FigureSource<J, N>,
}

impl<J: ExperimentJob, N> FigureSpec<J, N> {
    /// Describes a figure of simulated runs.
    pub const fn simulated(
        name: &'static str,
        title: &'static str,
        make: fn(&mut JobRunner<J>) -> Result<Vec<DataPoint>>,
    ) -> FigureSpec<J, N> {
        FigureSpec { name, title, source: FigureSource::Simulated(make) }
    }

    /// Describes a figure of runs on this machine.
    pub const fn native(
        name: &'static str,
        title: &'static str,
        make: fn(&mut N) -> Result<Vec<DataPoint>>,
    ) -> FigureSpec<J, N> {
        FigureSpec { name, title, source: FigureSource::Native(make) }
    }
}

/// A paper's experiments. `J` is a simulated run, `N` the state of the native runs, `S` the settings in the JSON report.
pub struct PaperExperiment<J: ExperimentJob + 'static, N: 'static, S: Serialize> {
    /// Name of the paper on the command line and in file names.
    pub name: &'static str,
    /// Title of the paper in messages.
    pub paper: &'static str,
    /// Tables and figures, in the order of the paper.
    pub figures: &'static [FigureSpec<J, N>],
    /// Formats the text before the figures.
    pub report_header: fn(&JobRunner<J>, &N) -> String,
    /// Describes the runs for the JSON report.
    pub report_config: fn(&JobRunner<J>, &N) -> S,
    /// Prepares the native runs that the figures with these names need; runs nothing.
    pub prepare_native: fn(&ReproduceArgs, &[&str]) -> N,
    /// Whether a native run failed that could have run on this machine.
    pub native_failed: fn(&N) -> bool,
    /// Label of the x axis of a figure's plot, by the figure's name.
    pub x_axis_label: fn(&str) -> &'static str,
}

impl<J: ExperimentJob, N, S: Serialize> PaperExperiment<J, N, S> {
    /// Runs the selected figures and writes their results.
    ///
    /// # Errors
    /// [`LabError::Usage`] for an unknown figure or a missing directory; [`LabError::Failed`] if a run failed or a file
    /// cannot be written.
    pub fn run(&self, reproduce: &ReproduceArgs, progress: ProgressSink<'_>) -> LabResult {
        let figures = self.select_figures(reproduce.figure.as_deref())?;
        if let Some(directory) = &reproduce.svg
            && !directory.is_dir()
        {
            return Err(LabError::Usage(format!("--svg: there is no directory {}", directory.display())));
        }
        let mut runs = JobRunner::new(Durations::for_mode(reproduce.quick));
        let names: Vec<&str> = figures.iter().map(|figure| figure.name).collect();
        let mut native = (self.prepare_native)(reproduce, &names);
        let (mut all, mut text) = (Vec::new(), (self.report_header)(&runs, &native));
        for (done, figure) in figures.iter().enumerate() {
            let fraction = done as f64 / figures.len() as f64;
            progress(LabProgress::Figure { name: figure.name, fraction });
            let mut points = match figure.source {
                FigureSource::Simulated(make) => make(&mut runs)?,
                FigureSource::Native(make) => make(&mut native)?,
            };
            let _ = writeln!(text, "\n{}\n{}", figure.title, data_points::format_text(&points));
            if let Some(directory) = &reproduce.svg {
                self.draw_svg(directory, figure.name, figure.title, &points)?;
            }
            all.append(&mut points);
        }
        progress(LabProgress::Finished);
        let _ = writeln!(text, "{} runs. Why results differ: docs/REPRODUCTION.md", runs.len());
        if reproduce.json.as_deref() != Some(Path::new("-")) {
            std::io::stdout().write_all(text.as_bytes())?;
        }
        if let Some(file) = &reproduce.json {
            json_report::write_report(file, &(self.report_config)(&runs, &native), &all)?;
        }
        match (self.native_failed)(&native) {
            true => {
                Err(anyhow!("a run failed that this machine supports; its points have the reason").into())
            }
            false => Ok(()),
        }
    }

    /// Selects the figures with a name, or all figures without one. The native runs of a figure (`-host`, `-cores`)
    /// are selected with it.
    ///
    /// # Errors
    /// [`LabError::Usage`] with the known names if there is no such figure.
    pub fn select_figures(&self, name: Option<&str>) -> Result<Vec<&'static FigureSpec<J, N>>, LabError> {
        let Some(name) = name else { return Ok(self.figures.iter().collect()) };
        let is_selected = |figure: &&FigureSpec<J, N>| {
            let rest = figure.name.strip_prefix(name);
            rest.is_some_and(|rest| ["", "-host", "-cores"].contains(&rest))
        };
        let found: Vec<&FigureSpec<J, N>> = self.figures.iter().filter(is_selected).collect();
        if found.is_empty() {
            let names: Vec<&str> = self.figures.iter().map(|figure| figure.name).collect();
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

    /// Writes one plot per unit of a figure into a directory: `PAPER-FIGURE-N.svg`.
    ///
    /// # Errors
    /// If a file cannot be written.
    pub fn draw_svg(&self, directory: &Path, name: &str, title: &str, points: &[DataPoint]) -> Result<()> {
        for (number, svg) in plot_figure(title, (self.x_axis_label)(name), points) {
            let file = directory.join(format!("{}-{name}-{number}.svg", self.name));
            std::fs::write(&file, svg).with_context(|| format!("plot {}", file.display()))?;
        }
        Ok(())
    }
}
