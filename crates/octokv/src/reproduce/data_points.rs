//! Points of figures: a paper's number beside ours, as text, and as lines of a picture.
//!
//! In: points, in order. Out: a table for people, flat rows for programs, SVG.

use super::comparison_table::median;
use serde::Serialize;
use std::fmt::Write as _;

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
    /// What came out here; not a number (null in the document) where it did not run.
    pub measured: f64,
    /// In what.
    pub unit: &'static str,
    /// Whether it is one of very many, which people are shown as a picture.
    #[serde(skip)]
    pub is_dot: bool,
    /// Of a real run on this machine.
    #[serde(flatten)]
    pub real: Option<Real>,
}

/// What a real run says besides, for it is never twice the same: [`Point::measured`] is the median of its rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Real {
    /// The least of the rounds.
    pub measured_least: Option<f64>,
    /// The most of the rounds.
    pub measured_most: Option<f64>,
    /// Rounds that gave a number.
    pub rounds: usize,
    /// "not run: ..." where none did.
    pub note: String,
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
        self.all.push(Point {
            figure: self.figure,
            series,
            x,
            paper,
            measured,
            unit,
            is_dot: false,
            real: None,
        });
    }

    /// One more of a real run: what each round came to, or why it did not.
    pub fn real(
        &mut self,
        series: &str,
        x: &str,
        paper: Option<f64>,
        rounds: &[Result<f64, String>],
        unit: &'static str,
    ) {
        let values: Vec<f64> = rounds.iter().flatten().copied().collect();
        let reason = rounds.iter().find_map(|round| round.as_ref().err());
        let note = match median(values.clone()) {
            Some(_) => String::new(),
            None => format!("not run: {}", reason.map_or("there was no round", String::as_str)),
        };
        self.beside(series, x, paper, median(values.clone()).unwrap_or(f64::NAN), unit);
        if let Some(point) = self.all.last_mut() {
            point.real = Some(Real {
                measured_least: values.iter().copied().reduce(f64::min),
                measured_most: values.iter().copied().reduce(f64::max),
                rounds: values.len(),
                note,
            });
        }
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

/// A number as people read it: three digits that say something; "-" for what is none.
fn number(value: f64) -> String {
    match value.abs() {
        size if size.is_nan() => "-".to_owned(),
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
        let mut cells: Vec<String> = line.iter().map(cell).collect();
        if let Some(Real { note, .. }) = line.iter().find_map(|point| point.real.as_ref())
            && line.iter().all(|point| point.measured.is_nan())
        {
            cells.push(note.clone());
        }
        // Writing to a string cannot fail.
        let Point { figure, series, unit, .. } = line[0];
        let _ = writeln!(text, "  {figure}: {series} [{unit}]\n      {}", cells.join("   "));
    }
    if points.len() > shown.len() {
        let _ = writeln!(text, "  and {} points, in --json and --svg", points.len() - shown.len());
    }
    text
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
    fn a_real_run_has_its_rounds_and_one_that_did_not_run_says_why() {
        let mut points = Points::of("Figure 4");
        let broken = || Err("no kernel".to_owned());
        points.real("Put", "4", Some(3.0), &[Ok(9.0), broken(), Ok(2.0), Ok(4.0)], "times");
        points.real("Get", "4", Some(1.2), &[broken(), broken()], "%");
        let row = serde_json::to_value(&points.all[0]).unwrap();
        for (name, value) in
            [("measured", 4.0), ("measured_least", 2.0), ("measured_most", 9.0), ("rounds", 3.0)]
        {
            assert_eq!(row[name].as_f64(), Some(value), "{name}");
        }
        let row = serde_json::to_value(&points.all[1]).unwrap();
        assert!(row["measured"].is_null() && row["measured_least"].is_null());
        assert_eq!(row["note"], "not run: no kernel");
        let text = text(&points.all);
        assert!(text.contains("[times]\n      4 4 (3)\n"), "{text}");
        assert!(text.contains("[%]\n      4 - (1.20)   not run: no kernel\n"), "{text}");
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
