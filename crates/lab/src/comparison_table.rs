//! Comparison rows of NetKVS: medians over rounds, ratios, table, and a sentence per difference.
//!
//! In: the result of each system in each round. Out: a table and sentences for readers, flat rows for programs, each
//! with the paper's number if it has one, and with ours or the reason for its absence.

use crate::output_parser::{BenchSample, SampleResult};
use octokv_bench::statistics::median;
use serde::Serialize;
use std::fmt::Write;

/// One metric of one series.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricRow {
    /// Table or figure of the paper, or our variant of it.
    pub figure: &'static str,
    /// System, or pair of systems.
    pub series: &'static str,
    /// Name of the metric.
    pub x: &'static str,
    /// The paper's number.
    pub paper: Option<f64>,
    /// Ours: the median over the rounds; `None` if nothing ran.
    pub measured: Option<f64>,
    /// Unit of both numbers.
    pub unit: &'static str,
    /// Minimum over the rounds.
    pub measured_least: Option<f64>,
    /// Maximum over the rounds.
    pub measured_most: Option<f64>,
    /// Number of rounds with a result.
    pub rounds: usize,
    /// "not run: ..." if `measured` is missing; otherwise the difference of its set-up from the paper's.
    pub note: String,
}

/// The settings of a NetKVS reproduction.
#[derive(Clone, Debug, Serialize)]
pub struct NetkvsReportConfig {
    /// Rounds, each on namespaces of its own.
    pub rounds: usize,
    /// Puts in flight, one per thread.
    pub threads: usize,
    /// Puts of each thread in the guest.
    pub guest_operations_per_thread: usize,
    /// Puts of each thread without a guest.
    pub native_operations_per_thread: usize,
    /// Key length in bytes.
    pub key_bytes: usize,
    /// Value length in bytes.
    pub value_bytes: usize,
}

/// The metrics of a system, as the paper reports them.
pub const METRICS: [MetricSpec; 3] = [
    MetricSpec { name: "average latency", header: "average", unit: "us", value_of: |sample| sample.mean_us },
    MetricSpec {
        name: "99th percentile latency",
        header: "99th percentile",
        unit: "us",
        value_of: |sample| sample.p99_us,
    },
    MetricSpec { name: "throughput", header: "throughput", unit: "MB/s", value_of: |sample| sample.mb_s },
];

/// One kind of metric.
#[derive(Clone, Copy)]
pub struct MetricSpec {
    /// Name in rows.
    pub name: &'static str,
    header: &'static str,
    /// Unit of both numbers.
    pub unit: &'static str,
    value_of: fn(&BenchSample) -> f64,
}

/// The results of one system in one environment.
pub struct SystemSeries {
    /// Table that it belongs to.
    pub figure: &'static str,
    /// Name in rows.
    pub name: &'static str,
    /// The paper's average, 99th percentile and throughput.
    pub paper: [Option<f64>; 3],
    /// The result of each round.
    pub rounds: Vec<SampleResult>,
    /// The difference of each metric's set-up from the paper's.
    pub notes: [&'static str; 3],
}

impl SystemSeries {
    fn not_run_note(&self) -> String {
        let reason = self.rounds.iter().find_map(|round| round.as_ref().err());
        format!("not run: {}", reason.map_or("no round ran", String::as_str))
    }

    /// One row for each metric.
    pub fn rows(&self) -> Vec<MetricRow> {
        let row = |(metric, (paper, note)): (&MetricSpec, (&Option<f64>, &&'static str))| {
            let values: Vec<f64> = self.rounds.iter().flatten().map(metric.value_of).collect();
            MetricRow {
                figure: self.figure,
                series: self.name,
                x: metric.name,
                paper: *paper,
                measured: median(&values),
                unit: metric.unit,
                measured_least: values.iter().copied().reduce(f64::min),
                measured_most: values.iter().copied().reduce(f64::max),
                rounds: values.len(),
                note: if values.is_empty() { self.not_run_note() } else { (*note).to_owned() },
            }
        };
        METRICS.iter().zip(self.paper.iter().zip(&self.notes)).map(row).collect()
    }

    /// One row for each metric: the change relative to another system, in percent. Results are compared within a round,
    /// because the speed of the machine varies between rounds.
    pub fn compare_to(
        &self,
        other: &SystemSeries,
        name: &'static str,
        paper: [Option<f64>; 3],
        notes: [&'static str; 3],
    ) -> Vec<MetricRow> {
        let pairs = self.rounds.iter().zip(&other.rounds);
        let both: Vec<(&BenchSample, &BenchSample)> =
            pairs.filter_map(|(ours, theirs)| Some((ours.as_ref().ok()?, theirs.as_ref().ok()?))).collect();
        let row = |index: usize| {
            let metric = METRICS[index];
            let change = |(ours, theirs): &(&BenchSample, &BenchSample)| {
                ((metric.value_of)(ours) / (metric.value_of)(theirs) - 1.0) * 100.0
            };
            let values: Vec<f64> = both.iter().map(change).filter(|value| value.is_finite()).collect();
            let why_not = if self.rounds.iter().any(Result::is_ok) {
                other.not_run_note()
            } else {
                self.not_run_note()
            };
            MetricRow {
                figure: self.figure,
                series: name,
                x: metric.name,
                paper: paper[index],
                measured: median(&values),
                unit: "%",
                measured_least: values.iter().copied().reduce(f64::min),
                measured_most: values.iter().copied().reduce(f64::max),
                rounds: values.len(),
                note: if values.is_empty() { why_not } else { notes[index].to_owned() },
            }
        };
        (0..METRICS.len()).map(row).collect()
    }
}

fn format_value(value: Option<f64>, unit: &str) -> String {
    match (value, unit) {
        (None, _) => "-".to_owned(),
        (Some(value), "%") => format!("{value:+.0} %"),
        (Some(value), _) if value < 100.0 => format!("{value:.1}"),
        (Some(value), _) => format!("{value:.0}"),
    }
}

/// Formats rows as a table: a line per series, the paper's and our number for each metric.
pub fn format_table(rows: &[MetricRow]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(text, "{:<46}", "");
    for metric in METRICS {
        let _ = write!(text, "{:>27}", format!("{} [{}]", metric.header, metric.unit));
    }
    let _ = write!(text, "\n{:<46}", "");
    for _ in METRICS {
        let _ = write!(text, "{:>13}{:>14}", "paper", "here");
    }
    text.push('\n');
    for system in rows.chunk_by(|one, next| one.series == next.series) {
        let _ = write!(text, "{:<46}", system[0].series);
        if system.iter().all(|row| row.measured.is_none()) {
            let paper: Vec<String> = system.iter().map(|row| format_value(row.paper, row.unit)).collect();
            let _ = writeln!(text, " {} (paper: {})", system[0].note, paper.join(", "));
            continue;
        }
        for row in system {
            let _ = write!(
                text,
                "{:>13}{:>14}",
                format_value(row.paper, row.unit),
                format_value(row.measured, row.unit)
            );
        }
        text.push('\n');
    }
    text
}

/// Formats a sentence for each row with a number of the paper: the distance of ours, and its reason.
pub fn format_differences(rows: &[MetricRow]) -> String {
    let mut text = String::new();
    for row in rows {
        let (Some(paper), Some(measured)) = (row.paper, row.measured) else { continue };
        let distance = match row.unit {
            "%" => format!("{:+.0} points away", measured - paper),
            _ if measured >= paper => format!("{:.1} times as much", measured / paper),
            _ => format!("1/{:.1} of it", paper / measured),
        };
        let (ours, theirs) = (format_value(Some(measured), row.unit), format_value(Some(paper), row.unit));
        let unit = if row.unit == "%" { String::new() } else { format!(" {}", row.unit) };
        let _ = writeln!(
            text,
            "- {}, {}: {ours}{unit} here, {theirs}{unit} there, {distance}. {}",
            row.series, row.x, row.note
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &'static str, rounds: Vec<SampleResult>) -> SystemSeries {
        let paper = [Some(1_835.0), Some(21_224.0), Some(255.0)];
        SystemSeries { figure: "Table 1", name, paper, rounds, notes: ["One.", "Two.", "Three."] }
    }

    fn sample(mean_us: f64, mb_s: f64) -> SampleResult {
        Ok(BenchSample { mean_us, p99_us: 10.0 * mean_us, mb_s })
    }

    #[test]
    fn rows_have_the_median_minimum_and_maximum_of_the_rounds() {
        let a = series("(a)", vec![sample(300.0, 3.0), sample(100.0, 9.0), sample(200.0, 5.0)]);
        let rows = a.rows();
        assert_eq!(
            (rows[0].measured_least, rows[0].measured, rows[0].measured_most),
            (Some(100.0), Some(200.0), Some(300.0))
        );
        assert_eq!((rows[1].measured, rows[2].measured), (Some(2_000.0), Some(5.0)));
        assert_eq!((rows[2].unit, rows[2].paper, rows[2].note.as_str()), ("MB/s", Some(255.0), "Three."));
    }

    #[test]
    fn a_comparison_is_within_each_round() {
        let a = series("(a)", vec![sample(400.0, 10.0), sample(100.0, 10.0), Err("broken".to_owned())]);
        let d = series("(d)", vec![sample(200.0, 30.0), sample(50.0, 30.0), sample(1.0, 1.0)]);
        let rows = d.compare_to(&a, "(d) against (a)", [Some(-60.0), None, Some(183.0)], [""; 3]);
        assert_eq!((rows[0].measured, rows[0].rounds, rows[0].unit), (Some(-50.0), 2, "%"));
        assert_eq!(rows[2].measured.map(f64::round), Some(200.0));
    }

    #[test]
    fn series_that_did_not_run_say_why_everywhere() {
        let missing = || Err("db_bench (package rocksdb-tools) is missing".to_owned());
        let (a, d) = (series("(a)", vec![missing()]), series("(d)", vec![sample(1.0, 1.0)]));
        let mut rows = a.rows();
        rows.extend(d.compare_to(&a, "(d) against (a)", [Some(-60.0), None, None], [""; 3]));
        for row in &rows {
            assert_eq!(row.measured, None);
            assert_eq!(row.note, "not run: db_bench (package rocksdb-tools) is missing");
        }
        let text = format_table(&rows);
        assert_eq!(text.matches("not run: db_bench").count(), 2);
        assert!(text.contains("1835, 21224, 255"));
        assert_eq!(format_differences(&rows), "");
        assert!(series("(a)", vec![]).rows()[0].note.starts_with("not run: "));
    }

    #[test]
    fn each_difference_is_described() {
        let a = series("(a)", vec![sample(18_350.0, 25.5)]);
        let text = format_differences(&a.rows());
        assert_eq!(text.lines().count(), 3);
        assert!(
            text.contains("(a), average latency: 18350 us here, 1835 us there, 10.0 times as much. One.")
        );
        assert!(text.contains("throughput: 25.5 MB/s here, 255 MB/s there, 1/10.0 of it. Three."));
    }

    #[test]
    fn a_row_serializes_flat_with_its_contracted_keys() {
        let row = serde_json::to_value(&series("(a)", vec![sample(1.0, 1.0)]).rows()[0]).unwrap();
        for name in ["figure", "series", "x", "paper", "measured", "unit"] {
            assert!(row.get(name).is_some(), "{name}");
        }
        assert!(row.as_object().unwrap().values().all(|value| !value.is_object() && !value.is_array()));
    }
}
