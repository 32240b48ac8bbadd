//! Data points of figures: our number with the paper's.
//!
//! In: points, in order. Out: text for readers, flat rows for programs.

use octokv_bench::statistics::median;
use serde::Serialize;
use std::fmt::Write as _;

/// One data point.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DataPoint {
    /// Table or figure of the paper.
    pub figure: &'static str,
    /// Line or curve of it.
    pub series: String,
    /// Position on the line: a number or a name.
    pub x: String,
    /// The paper's number; `None` if its text has none.
    pub paper: Option<f64>,
    /// Our number; NaN (null in the JSON report) if it did not run.
    pub measured: f64,
    /// Unit of both numbers.
    pub unit: &'static str,
    /// Whether it is left out of the text and drawn in plots only.
    #[serde(skip)]
    pub is_plot_only: bool,
    /// Only for a native run.
    #[serde(flatten)]
    pub measured_runs: Option<MeasuredRuns>,
}

/// Spread of a native run, which varies between rounds; [`DataPoint::measured`] is the median.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MeasuredRuns {
    /// Minimum over the rounds.
    pub measured_least: Option<f64>,
    /// Maximum over the rounds.
    pub measured_most: Option<f64>,
    /// Number of rounds with a result.
    pub rounds: usize,
    /// "not run: ..." if no round has a result.
    pub note: String,
}

/// Collects the points of a figure.
pub struct DataPoints {
    figure: &'static str,
    /// The points, in order.
    pub points: Vec<DataPoint>,
}

impl DataPoints {
    /// Creates an empty collection for a figure.
    pub fn for_figure(figure: &'static str) -> DataPoints {
        DataPoints { figure, points: Vec::new() }
    }

    /// Adds a point with the paper's number, if any.
    pub fn add_with_paper(
        &mut self,
        series: &str,
        x: &str,
        paper: Option<f64>,
        measured: f64,
        unit: &'static str,
    ) {
        let (series, x) = (series.to_owned(), x.to_owned());
        self.points.push(DataPoint {
            figure: self.figure,
            series,
            x,
            paper,
            measured,
            unit,
            is_plot_only: false,
            measured_runs: None,
        });
    }

    /// Adds a point of a native run: the median of the rounds with a result.
    pub fn add_measured(
        &mut self,
        series: &str,
        x: &str,
        paper: Option<f64>,
        rounds: &[Result<f64, String>],
        unit: &'static str,
    ) {
        let values: Vec<f64> = rounds.iter().flatten().copied().collect();
        let reason = rounds.iter().find_map(|round| round.as_ref().err());
        let note = match median(&values) {
            Some(_) => String::new(),
            None => format!("not run: {}", reason.map_or("no round ran", String::as_str)),
        };
        self.add_with_paper(series, x, paper, median(&values).unwrap_or(f64::NAN), unit);
        if let Some(point) = self.points.last_mut() {
            point.measured_runs = Some(MeasuredRuns {
                measured_least: values.iter().copied().reduce(f64::min),
                measured_most: values.iter().copied().reduce(f64::max),
                rounds: values.len(),
                note,
            });
        }
    }

    /// Adds a point without a number of the paper.
    pub fn add(&mut self, series: &str, x: &str, measured: f64, unit: &'static str) {
        self.add_with_paper(series, x, None, measured, unit);
    }

    /// Adds a point that is drawn in plots only.
    pub fn add_plot_only(&mut self, series: &str, x: &str, measured: f64, unit: &'static str) {
        self.add(series, x, measured, unit);
        if let Some(point) = self.points.last_mut() {
            point.is_plot_only = true;
        }
    }
}

/// Formats a number with three significant digits; "-" for NaN.
fn format_number(value: f64) -> String {
    match value.abs() {
        size if size.is_nan() => "-".to_owned(),
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 || value == value.round() => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

/// Formats a line for each series and unit: its points, each with the paper's number in brackets.
pub fn format_text(points: &[DataPoint]) -> String {
    let mut text = String::new();
    let shown: Vec<&DataPoint> = points.iter().filter(|point| !point.is_plot_only).collect();
    let same =
        |a: &&DataPoint, b: &&DataPoint| (a.figure, &a.series, a.unit) == (b.figure, &b.series, b.unit);
    for line in shown.chunk_by(same) {
        let cell = |point: &&DataPoint| match point.paper {
            Some(paper) => {
                format!("{} {} ({})", point.x, format_number(point.measured), format_number(paper))
            }
            None => format!("{} {}", point.x, format_number(point.measured)),
        };
        let mut cells: Vec<String> = line.iter().map(cell).collect();
        if let Some(MeasuredRuns { note, .. }) = line.iter().find_map(|point| point.measured_runs.as_ref())
            && line.iter().all(|point| point.measured.is_nan())
        {
            cells.push(note.clone());
        }
        // Writing to a string cannot fail.
        let DataPoint { figure, series, unit, .. } = line[0];
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
    fn text_shows_both_numbers_and_counts_plot_only_points() {
        let mut points = DataPoints::for_figure("Table I");
        points.add_with_paper("HW", "C(1)", Some(5.25), 3.404, "commands");
        points.add("HW", "C(2)", 4.0, "commands");
        points.add("HW", "mean", 0.1234, "1");
        points.add_plot_only("HW", "1", 0.5, "1");
        let text = format_text(&points.points);
        assert!(text.contains("Table I: HW [commands]\n      C(1) 3.40 (5.25)   C(2) 4\n"), "{text}");
        assert!(text.contains("mean 0.123\n") && text.contains("and 1 points"), "{text}");
    }

    #[test]
    fn a_measured_run_has_its_rounds_and_a_missing_one_its_reason() {
        let mut points = DataPoints::for_figure("Figure 4");
        let broken = || Err("no kernel".to_owned());
        points.add_measured("Put", "4", Some(3.0), &[Ok(9.0), broken(), Ok(2.0), Ok(4.0)], "times");
        points.add_measured("Get", "4", Some(1.2), &[broken(), broken()], "%");
        let row = serde_json::to_value(&points.points[0]).unwrap();
        for (name, value) in
            [("measured", 4.0), ("measured_least", 2.0), ("measured_most", 9.0), ("rounds", 3.0)]
        {
            assert_eq!(row[name].as_f64(), Some(value), "{name}");
        }
        let row = serde_json::to_value(&points.points[1]).unwrap();
        assert!(row["measured"].is_null() && row["measured_least"].is_null());
        assert_eq!(row["note"], "not run: no kernel");
        let text = format_text(&points.points);
        assert!(text.contains("[times]\n      4 4 (3)\n"), "{text}");
        assert!(text.contains("[%]\n      4 - (1.20)   not run: no kernel\n"), "{text}");
    }

    #[test]
    fn a_point_serializes_flat_with_its_contracted_keys() {
        let mut points = DataPoints::for_figure("Table I");
        points.add("HW", "C(2)", 4.0, "commands");
        let row = serde_json::to_value(&points.points[0]).unwrap();
        for name in ["figure", "series", "x", "paper", "measured", "unit"] {
            assert!(row.get(name).is_some(), "{name}");
        }
        assert_eq!(row.as_object().unwrap().len(), 6);
    }
}
