//! Points of figures: a paper's number beside ours, as text, and as lines of a picture.
//!
//! In: points, in order. Out: a table for people, flat rows for programs, SVG.

use super::table::SCHEMA;
use crate::bench::machine;
use crate::outcome::Outcome;
use anyhow::Context;
use octokv_bench::report::Machine;
use serde::Serialize;
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;

/// One number.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// The paper's table or figure.
    pub figure: &'static str,
    /// Which line of it.
    pub series: String,
    /// Which point of that.
    pub x: String,
    /// What the paper has; nothing where its text has no number.
    pub paper: Option<f64>,
    /// What came out here.
    pub measured: f64,
    /// In what.
    pub unit: &'static str,
    /// Whether it is one of very many, which people are shown as a picture.
    #[serde(skip)]
    pub is_dot: bool,
}

/// A figure's points as they are gathered.
pub struct Points {
    figure: &'static str,
    /// So far.
    pub all: Vec<Point>,
}

impl Points {
    /// Of a figure.
    pub fn of(figure: &'static str) -> Points {
        Points { figure, all: Vec::new() }
    }

    /// One more, where the paper has one.
    pub fn beside(&mut self, series: &str, x: &str, paper: Option<f64>, measured: f64, unit: &'static str) {
        let (series, x) = (series.to_owned(), x.to_owned());
        self.all.push(Point { figure: self.figure, series, x, paper, measured, unit, is_dot: false });
    }

    /// One more that the paper's text has no number for.
    pub fn ours(&mut self, series: &str, x: &str, measured: f64, unit: &'static str) {
        self.beside(series, x, None, measured, unit);
    }

    /// One of very many.
    pub fn dot(&mut self, series: &str, x: &str, measured: f64, unit: &'static str) {
        self.ours(series, x, measured, unit);
        if let Some(point) = self.all.last_mut() {
            point.is_dot = true;
        }
    }
}

/// The document.
#[derive(Serialize)]
struct Document<'a, S> {
    schema: &'static str,
    command: String,
    machine: Machine,
    settings: &'a S,
    results: &'a [Point],
}

/// A number as people read it: three digits that say something.
fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 || value == value.round() => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// A line for each series and unit: its points, the paper's number behind ours in brackets.
pub fn text(points: &[Point]) -> String {
    let mut text = String::new();
    let shown: Vec<&Point> = points.iter().filter(|point| !point.is_dot).collect();
    let same = |a: &&Point, b: &&Point| (a.figure, &a.series, a.unit) == (b.figure, &b.series, b.unit);
    for line in shown.chunk_by(same) {
        let cell = |point: &&Point| match point.paper {
            Some(paper) => format!("{} {} ({})", point.x, number(point.measured), number(paper)),
            None => format!("{} {}", point.x, number(point.measured)),
        };
        let cells: Vec<String> = line.iter().map(cell).collect();
        // Writing to a string cannot fail.
        let Point { figure, series, unit, .. } = line[0];
        let _ = writeln!(text, "  {figure}: {series} [{unit}]\n      {}", cells.join("   "));
    }
    if points.len() > shown.len() {
        let _ = writeln!(text, "  and {} points, in --json and --svg", points.len() - shown.len());
    }
    text
}

/// Writes the document to a file; "-" is standard output.
pub fn write<S: Serialize>(file: &Path, settings: &S, results: &[Point]) -> Outcome {
    let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
    let document =
        Document { schema: SCHEMA, command: words.join(" "), machine: machine(), settings, results };
    let mut text = serde_json::to_string_pretty(&document).context("the document")?;
    text.push('\n');
    if file == Path::new("-") {
        return Ok(std::io::stdout().write_all(text.as_bytes())?);
    }
    Ok(std::fs::write(file, text).with_context(|| format!("document {}", file.display()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_see_ours_and_the_papers_and_dots_only_as_a_number() {
        let mut points = Points::of("Table I");
        points.beside("HW", "C(1)", Some(5.25), 3.404, "commands");
        points.ours("HW", "C(2)", 4.0, "commands");
        points.ours("HW", "mean", 0.1234, "1");
        points.dot("HW", "1", 0.5, "1");
        let text = text(&points.all);
        assert!(text.contains("Table I: HW [commands]\n      C(1) 3.40 (5.25)   C(2) 4\n"), "{text}");
        assert!(text.contains("mean 0.123\n") && text.contains("and 1 points"), "{text}");
    }

    #[test]
    fn programs_see_a_flat_object_with_the_names_that_they_look_for() {
        let mut points = Points::of("Table I");
        points.ours("HW", "C(2)", 4.0, "commands");
        let row = serde_json::to_value(&points.all[0]).unwrap();
        for name in ["figure", "series", "x", "paper", "measured", "unit"] {
            assert!(row.get(name).is_some(), "{name}");
        }
        assert_eq!(row.as_object().unwrap().len(), 6);
    }
}
