//! A workload over time: for each interval, how many operations were answered, and how long they took.
//!
//! ```text
//!   rows: intervals from the first counted moment;  columns: latencies, 16 to each doubling from 1 us on
//! ```
//! Memory is bounded: when the rows are used up, each two become one and the interval doubles.
//! Invariants: no operation allocates; no operation is lost; latencies are told to within 6 %.

use octokv_base::Nanos;
use serde::Serialize;

/// The first interval.
const INTERVAL: Nanos = Nanos::from_millis(125);
const ROWS: usize = 1024;
/// More points than this are joined as long as none is longer than a second.
const POINTS: usize = 256;
const SECOND: Nanos = Nanos::from_secs(1);

/// Latencies below so many bits of nanoseconds share a column.
const BITS_MIN: u32 = 10;
const BITS_MAX: u32 = 40;
const STEPS: usize = 16;
const COLUMNS: usize = (BITS_MAX - BITS_MIN) as usize * STEPS + 1;

/// Counts of one worker, or of all.
pub struct Series {
    from: Nanos,
    interval: Nanos,
    rows: usize,
    counts: Vec<u32>,
}

/// What one interval came to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Its beginning, after the first counted moment.
    pub start_s: f64,
    /// Operations answered within it.
    pub operations: u64,
    /// The same per second; the last interval ends with the workload.
    pub throughput_ops_s: f64,
    /// The median of their latencies, 0 where there is none.
    pub latency_us_p50: f64,
    /// 99 in 100 are no longer.
    pub latency_us_p99: f64,
}

impl Series {
    /// Of operations that are answered from then on.
    pub fn new(from: Nanos) -> Series {
        // Untouched zeros cost no memory.
        Series { from, interval: INTERVAL, rows: 0, counts: vec![0; ROWS * COLUMNS] }
    }

    /// An operation was answered after so long.
    #[inline]
    pub fn record(&mut self, now: Nanos, latency: Nanos) {
        let mut row = self.row(now);
        while row >= ROWS {
            self.join();
            row = self.row(now);
        }
        self.rows = self.rows.max(row + 1);
        let count = &mut self.counts[row * COLUMNS + column(latency.0)];
        *count = count.saturating_add(1);
    }

    fn row(&self, now: Nanos) -> usize {
        (now.since(self.from).0 / self.interval.0) as usize
    }

    /// Each two rows become one.
    fn join(&mut self) {
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

    /// Adds what another worker counted at the same time. Workers begin together; what lies between their first
    /// moments is nothing beside an interval.
    pub fn add(&mut self, mut other: Series) {
        while self.interval < other.interval {
            self.join();
        }
        while other.interval < self.interval {
            other.join();
        }
        self.from = self.from.min(other.from);
        self.rows = self.rows.max(other.rows);
        let used = other.rows * COLUMNS;
        for (mine, theirs) in self.counts[..used].iter_mut().zip(&other.counts) {
            *mine = mine.saturating_add(*theirs);
        }
    }

    /// The interval and its points, the last of which ends with the workload.
    pub fn points(mut self, last: Nanos) -> (Nanos, Vec<Point>) {
        while self.rows > POINTS && self.interval < SECOND {
            self.join();
        }
        let interval_s = self.interval.as_secs_f64();
        let elapsed_s = last.since(self.from).as_secs_f64();
        let point = |row: usize| {
            let counts = &self.counts[row * COLUMNS..(row + 1) * COLUMNS];
            let operations = counts.iter().map(|&count| u64::from(count)).sum();
            let start_s = row as f64 * interval_s;
            let span_s = (elapsed_s - start_s).min(interval_s);
            Point {
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
    let step = (latency_ns >> (bits - 5)) as usize & (STEPS - 1);
    (1 + (bits - BITS_MIN - 1) as usize * STEPS + step).min(COLUMNS - 1)
}

/// The middle of a column.
fn middle_ns(column: usize) -> f64 {
    let Some(column) = column.checked_sub(1) else { return f64::from(1 << (BITS_MIN - 1)) };
    let first = (1u64 << (BITS_MIN + (column / STEPS) as u32)) as f64;
    first * (1.0 + ((column % STEPS) as f64 + 0.5) / STEPS as f64)
}

fn quantile_us(counts: &[u32], operations: u64, part: f64) -> f64 {
    let rank = (operations as f64 * part).ceil() as u64;
    let mut seen = 0;
    let found = counts.iter().position(|&count| {
        seen += u64::from(count);
        count > 0 && seen >= rank
    });
    found.map_or(0.0, |column| middle_ns(column) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_are_told_to_within_their_column() {
        for latency in [1_024u64, 1_100, 5_000, 77_777, 1_000_000, 123_456_789, 59_000_000_000] {
            let told = middle_ns(column(latency));
            assert!((told / latency as f64 - 1.0).abs() < 0.06, "{latency} {told}");
        }
        assert_eq!((column(0), column(1023), column(u64::MAX)), (0, 0, COLUMNS - 1));
        assert!((1..100_000).all(|ns| column(ns) <= column(ns + 1) && column(ns + 1) <= column(ns) + 1));
    }

    #[test]
    fn every_interval_has_its_own_figures() {
        let from = Nanos::from_secs(5);
        let mut series = Series::new(from);
        for n in 0..100 {
            series.record(from + Nanos(n * 1_000_000), Nanos(if n < 98 { 10_000 } else { 5_000_000 }));
        }
        series.record(from + Nanos(300_000_000), Nanos(20_000));
        let (interval, points) = series.points(from + Nanos(312_500_000));
        assert_eq!((interval, points.len()), (INTERVAL, 3));
        let operations: Vec<u64> = points.iter().map(|point| point.operations).collect();
        assert_eq!(operations, [100, 0, 1]);
        assert_eq!((points[0].throughput_ops_s, points[2].throughput_ops_s), (800.0, 16.0));
        assert!((9.0..11.0).contains(&points[0].latency_us_p50), "{points:?}");
        assert!((4_700.0..5_300.0).contains(&points[0].latency_us_p99), "{points:?}");
        assert_eq!((points[1].start_s, points[1].latency_us_p99), (0.125, 0.0));
    }

    #[test]
    fn a_long_workload_has_longer_intervals_and_loses_nothing() {
        let (mut long, mut short) = (Series::new(Nanos::ZERO), Series::new(Nanos::ZERO));
        for n in 0..5_000 {
            long.record(Nanos::from_secs(n), Nanos(50_000));
            short.record(Nanos::from_millis(n), Nanos(50_000));
        }
        let total = |points: &[Point]| points.iter().map(|point| point.operations).sum::<u64>();
        short.add(long);
        let (interval, points) = short.points(Nanos::from_secs(5_000));
        assert_eq!((interval, total(&points)), (Nanos::from_secs(8), 10_000));
        assert_eq!((points[0].operations, points[1].operations), (5_008, 8));
        let mut minute = Series::new(Nanos::ZERO);
        (0..600).for_each(|n| minute.record(Nanos::from_millis(n * 100), Nanos(50_000)));
        let (interval, points) = minute.points(Nanos::from_secs(60));
        assert_eq!((interval, points.len()), (Nanos::from_millis(250), 240));
    }
}
