//! The time series of a workload: completed operations and their latencies by interval.
//!
//! ```text
//!   rows: intervals from the start;  columns: latencies, 16 to each doubling from 1 us on
//! ```
//! Memory is bounded: if all rows are used, pairs of rows merge and the interval doubles.
//! Invariants: recording does not allocate; no operation is lost; latencies are accurate to 6 %.

use octokv_base::Nanos;
use serde::Serialize;

/// The shortest interval.
const INTERVAL_MIN: Nanos = Nanos::from_millis(125);
const ROWS_MAX: usize = 1024;
/// More points than this are merged while the interval is shorter than a second.
const POINTS_MAX: usize = 256;
const SECOND: Nanos = Nanos::from_secs(1);

/// Latencies of up to this number of bits, in nanoseconds, share the first column.
const BITS_MIN: u32 = 10;
const BITS_MAX: u32 = 40;
const COLUMNS_PER_OCTAVE: usize = 16;
const COLUMNS: usize = (BITS_MAX - BITS_MIN) as usize * COLUMNS_PER_OCTAVE + 1;

/// The time series of one worker, or of several.
pub struct TimeSeries {
    start: Nanos,
    interval: Nanos,
    rows: usize,
    counts: Vec<u32>,
}

/// One interval of a time series.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TimeSeriesPoint {
    /// Start of the interval, in seconds after the start of the measurement.
    pub start_s: f64,
    /// Operations completed within it.
    pub operations: u64,
    /// The same per second; the last interval ends with the workload.
    pub throughput_ops_s: f64,
    /// Median latency in microseconds; 0 without an operation.
    pub latency_us_p50: f64,
    /// 99th percentile of the latency, in microseconds.
    pub latency_us_p99: f64,
}

impl TimeSeries {
    /// Creates a series of operations that complete at `start` or later.
    pub fn new(start: Nanos) -> TimeSeries {
        // Untouched zeros cost no memory.
        TimeSeries { start, interval: INTERVAL_MIN, rows: 0, counts: vec![0; ROWS_MAX * COLUMNS] }
    }

    /// Records an operation that completed at `now`.
    #[inline]
    pub fn record(&mut self, now: Nanos, latency: Nanos) {
        let mut row = self.row(now);
        while row >= ROWS_MAX {
            self.merge_row_pairs();
            row = self.row(now);
        }
        self.rows = self.rows.max(row + 1);
        let count = &mut self.counts[row * COLUMNS + column(latency.0)];
        *count = count.saturating_add(1);
    }

    fn row(&self, now: Nanos) -> usize {
        (now.since(self.start).0 / self.interval.0) as usize
    }

    /// Merges pairs of rows and doubles the interval.
    fn merge_row_pairs(&mut self) {
        let rows = self.rows.div_ceil(2);
        for row in 0..rows {
            for column in 0..COLUMNS {
                let both = [2 * row, 2 * row + 1].map(|from| match from < self.rows {
                    true => self.counts[from * COLUMNS + column],
                    false => 0,
                });
                self.counts[row * COLUMNS + column] = both[0].saturating_add(both[1]);
            }
        }
        self.counts[rows * COLUMNS..self.rows.max(rows) * COLUMNS].fill(0);
        self.rows = rows;
        self.interval = Nanos(2 * self.interval.0);
    }

    /// Adds the series of another worker. Workers start together; the difference of their start times is negligible
    /// relative to an interval.
    pub fn add(&mut self, mut other: TimeSeries) {
        while self.interval < other.interval {
            self.merge_row_pairs();
        }
        while other.interval < self.interval {
            other.merge_row_pairs();
        }
        self.start = self.start.min(other.start);
        self.rows = self.rows.max(other.rows);
        let used = other.rows * COLUMNS;
        for (mine, theirs) in self.counts[..used].iter_mut().zip(&other.counts) {
            *mine = mine.saturating_add(*theirs);
        }
    }

    /// Returns the interval and the points, the last of which ends at `last`.
    pub fn points(mut self, last: Nanos) -> (Nanos, Vec<TimeSeriesPoint>) {
        while self.rows > POINTS_MAX && self.interval < SECOND {
            self.merge_row_pairs();
        }
        let interval_s = self.interval.as_secs_f64();
        let elapsed_s = last.since(self.start).as_secs_f64();
        let point = |row: usize| {
            let counts = &self.counts[row * COLUMNS..(row + 1) * COLUMNS];
            let operations = counts.iter().map(|&count| u64::from(count)).sum();
            let start_s = row as f64 * interval_s;
            let span_s = (elapsed_s - start_s).min(interval_s);
            TimeSeriesPoint {
                start_s,
                operations,
                throughput_ops_s: if span_s > 0.0 { operations as f64 / span_s } else { 0.0 },
                latency_us_p50: quantile_us(counts, operations, 0.5),
                latency_us_p99: quantile_us(counts, operations, 0.99),
            }
        };
        (self.interval, (0..self.rows).map(point).collect())
    }
}

/// The column of a latency.
#[inline]
fn column(latency_ns: u64) -> usize {
    let bits = u64::BITS - latency_ns.leading_zeros();
    if bits <= BITS_MIN {
        return 0;
    }
    let step = (latency_ns >> (bits - 5)) as usize & (COLUMNS_PER_OCTAVE - 1);
    (1 + (bits - BITS_MIN - 1) as usize * COLUMNS_PER_OCTAVE + step).min(COLUMNS - 1)
}

/// The middle of a column, in nanoseconds.
fn column_midpoint_ns(column: usize) -> f64 {
    let Some(column) = column.checked_sub(1) else { return f64::from(1 << (BITS_MIN - 1)) };
    let first = (1u64 << (BITS_MIN + (column / COLUMNS_PER_OCTAVE) as u32)) as f64;
    first * (1.0 + ((column % COLUMNS_PER_OCTAVE) as f64 + 0.5) / COLUMNS_PER_OCTAVE as f64)
}

fn quantile_us(counts: &[u32], operations: u64, fraction: f64) -> f64 {
    let rank = (operations as f64 * fraction).ceil() as u64;
    let mut seen = 0;
    let found = counts.iter().position(|&count| {
        seen += u64::from(count);
        count > 0 && seen >= rank
    });
    found.map_or(0.0, |column| column_midpoint_ns(column) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_accurate_to_their_column() {
        for latency in [1_024u64, 1_100, 5_000, 77_777, 1_000_000, 123_456_789, 59_000_000_000] {
            let midpoint = column_midpoint_ns(column(latency));
            assert!((midpoint / latency as f64 - 1.0).abs() < 0.06, "{latency} {midpoint}");
        }
        assert_eq!((column(0), column(1023), column(u64::MAX)), (0, 0, COLUMNS - 1));
        assert!((1..100_000).all(|ns| column(ns) <= column(ns + 1) && column(ns + 1) <= column(ns) + 1));
    }

    #[test]
    fn every_interval_has_its_own_metrics() {
        let start = Nanos::from_secs(5);
        let mut series = TimeSeries::new(start);
        for n in 0..100 {
            series.record(start + Nanos(n * 1_000_000), Nanos(if n < 98 { 10_000 } else { 5_000_000 }));
        }
        series.record(start + Nanos(300_000_000), Nanos(20_000));
        let (interval, points) = series.points(start + Nanos(312_500_000));
        assert_eq!((interval, points.len()), (INTERVAL_MIN, 3));
        let operations: Vec<u64> = points.iter().map(|point| point.operations).collect();
        assert_eq!(operations, [100, 0, 1]);
        assert_eq!((points[0].throughput_ops_s, points[2].throughput_ops_s), (800.0, 16.0));
        assert!((9.0..11.0).contains(&points[0].latency_us_p50), "{points:?}");
        assert!((4_700.0..5_300.0).contains(&points[0].latency_us_p99), "{points:?}");
        assert_eq!((points[1].start_s, points[1].latency_us_p99), (0.125, 0.0));
    }

    #[test]
    fn a_long_workload_has_longer_intervals_and_loses_nothing() {
        let (mut long, mut short) = (TimeSeries::new(Nanos::ZERO), TimeSeries::new(Nanos::ZERO));
        for n in 0..5_000 {
            long.record(Nanos::from_secs(n), Nanos(50_000));
            short.record(Nanos::from_millis(n), Nanos(50_000));
        }
        let total = |points: &[TimeSeriesPoint]| points.iter().map(|point| point.operations).sum::<u64>();
        short.add(long);
        let (interval, points) = short.points(Nanos::from_secs(5_000));
        assert_eq!((interval, total(&points)), (Nanos::from_secs(8), 10_000));
        assert_eq!((points[0].operations, points[1].operations), (5_008, 8));
        let mut minute = TimeSeries::new(Nanos::ZERO);
        (0..600).for_each(|n| minute.record(Nanos::from_millis(n * 100), Nanos(50_000)));
        let (interval, points) = minute.points(Nanos::from_secs(60));
        assert_eq!((interval, points.len()), (Nanos::from_millis(250), 240));
    }
}
