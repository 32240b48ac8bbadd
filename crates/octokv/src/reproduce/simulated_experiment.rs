//! What the papers' experiments in virtual time, and the real runs beside them, have in common: which figures are asked for, and where they go.
//!
//! ```text
//!   figures that are asked for ─▶ runs (crate::reproduce::runs), each once ─▶ points beside the paper's ─▶ text, JSON, SVG
//! ```
//! In: an [`Experiment`], the arguments. Out: text, documents, pictures.

use super::data_points::{self, Point};
use super::job_runner::{Job, Runs, Spans};
use super::json_report;
use crate::cli::Reproduce;
use crate::exit_status::{Failure, Outcome};
use crate::progress::Meter;
use anyhow::{Context, Result, anyhow};
use octokv_bench::plot::{Curve, curves as picture};
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// What it is asked for by, what it shows, and how.
pub type Figure<J> = (&'static str, &'static str, fn(&mut Runs<J>) -> Result<Vec<Point>>);

/// A paper's experiments.
pub struct Experiment<J: Job + 'static, S: Serialize> {
    /// What it is asked for by.
    pub name: &'static str,
    /// What people call it.
    pub paper: &'static str,
    /// Its tables and figures.
    pub figures: &'static [Figure<J>],
    /// What is said before them.
    pub head: fn(&Runs<J>) -> String,
    /// What the document says of the runs.
    pub settings: fn(&Runs<J>) -> S,
    /// Prepares the real runs of the figures of these names.
    pub real: fn(&Reproduce, &[&str]) -> J::Real,
    /// Whether a real run went wrong that need not have.
    pub failed: fn(&J::Real) -> bool,
    /// What is across in the picture of a figure.
    pub across: fn(&str) -> &'static str,
}

impl<J: Job, S: Serialize> Experiment<J, S> {
    /// Runs what is asked for.
    pub fn run(&self, reproduce: &Reproduce) -> Outcome {
        let figures = self.chosen(reproduce.figure.as_deref())?;
        if let Some(directory) = &reproduce.svg
            && !directory.is_dir()
        {
            return Err(Failure::Usage(format!("--svg: there is no directory {}", directory.display())));
        }
        let mut runs = Runs::new(Spans::of(reproduce.quick));
        runs.real = (self.real)(reproduce, &figures.iter().map(|figure| figure.0).collect::<Vec<_>>());
        let (mut meter, mut all, mut text) = (Meter::new(self.name), Vec::new(), (self.head)(&runs));
        for (done, (name, title, make)) in figures.iter().enumerate() {
            meter.show(done as f64 / figures.len() as f64, name);
            let mut made = make(&mut runs)?;
            let _ = writeln!(text, "\n{title}\n{}", data_points::text(&made));
            if let Some(directory) = &reproduce.svg {
                self.draw(directory, name, title, &made)?;
            }
            all.append(&mut made);
        }
        drop(meter);
        let _ = writeln!(text, "{} runs. Why figures differ: docs/REPRODUCTION.md", runs.len());
        if reproduce.json.as_deref() != Some(Path::new("-")) {
            std::io::stdout().write_all(text.as_bytes())?;
        }
        if let Some(file) = &reproduce.json {
            json_report::write(file, &(self.settings)(&runs), &all)?;
        }
        match (self.failed)(&runs.real) {
            true => Err(anyhow!("not everything that could run did; its points say what went wrong").into()),
            false => Ok(()),
        }
    }

    /// The figures of a name, all of them without one.
    pub fn chosen(&self, name: Option<&str>) -> Result<Vec<Figure<J>>, Failure> {
        let Some(name) = name else { return Ok(self.figures.to_vec()) };
        // A figure's real runs are asked for with it, or alone.
        let is_of = |figure: &&Figure<J>| {
            let rest = figure.0.strip_prefix(name);
            rest.is_some_and(|rest| ["", "-host", "-cores"].contains(&rest))
        };
        let found: Vec<Figure<J>> = self.figures.iter().filter(is_of).copied().collect();
        if found.is_empty() {
            let names: Vec<&str> = self.figures.iter().map(|figure| figure.0).collect();
            let alike = |name_of: &&&str| strsim::normalized_damerau_levenshtein(name, name_of);
            let nearest = names.iter().max_by(|a, b| alike(a).total_cmp(&alike(b))).unwrap_or(&"");
            return Err(Failure::Usage(format!(
                "--figure: the {} paper has no \"{name}\" here; did you mean \"{nearest}\"? It is one of {}",
                self.paper,
                names.join(", ")
            )));
        }
        Ok(found)
    }

    /// A picture for each unit in which a figure has lines.
    pub fn draw(&self, directory: &Path, name: &str, title: &str, made: &[Point]) -> Result<()> {
        let dots: Vec<&Point> = made.iter().filter(|point| point.is_dot).collect();
        let drawn = if dots.is_empty() { made.iter().collect() } else { dots };
        let mut units: Vec<&str> = drawn.iter().map(|point| point.unit).collect();
        units.sort_unstable();
        units.dedup();
        for (number, unit) in units.iter().enumerate() {
            let mut lines: Vec<Curve> = Vec::new();
            for point in drawn.iter().filter(|point| point.unit == *unit && !point.measured.is_nan()) {
                let known = lines.iter().position(|line| line.name == point.series);
                let at = known.unwrap_or(lines.len());
                if known.is_none() {
                    lines.push(Curve { name: point.series.clone(), points: Vec::new() });
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
            std::fs::write(&file, picture(title, (self.across)(name), unit, &lines))
                .with_context(|| format!("picture {}", file.display()))?;
        }
        Ok(())
    }
}
