//! Figures of a run: counted by the workers, added up, shown as a table and as a document.
//!
//! The document is one object: `schema`, `command`, `machine`, `settings`, `results`; each result is flat and
//! its names carry their units.

use crate::plan::{End, Plan, Workload};
use crate::system::System;
use hdrhistogram::Histogram;
use octokv_base::Nanos;
use serde::Serialize;
use std::fmt::Write;

/// The longest latency that is told apart from longer ones, in nanoseconds.
const LATENCY_NS_MAX: u64 = 600_000_000_000;

/// What one worker, or all together, counted.
pub struct Tally {
    counted_from: Nanos,
    last: Nanos,
    found: u64,
    missing: u64,
    latency_ns: Histogram<u64>,
}

impl Tally {
    /// Counts operations that are answered from then on.
    pub fn new(counted_from: Nanos) -> Tally {
        let latency_ns = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("bounds that make sense");
        Tally { counted_from, last: counted_from, found: 0, missing: 0, latency_ns }
    }

    /// An operation was answered.
    #[inline]
    pub fn answered(&mut self, started: Nanos, now: Nanos, found: bool) {
        if now < self.counted_from {
            return;
        }
        self.last = self.last.max(now);
        self.latency_ns.saturating_record(now.since(started).0);
        if found {
            self.found += 1;
        } else {
            self.missing += 1;
        }
    }

    /// Adds what another worker counted at the same time.
    pub fn add(&mut self, other: &Tally) {
        self.counted_from = self.counted_from.min(other.counted_from);
        self.last = self.last.max(other.last);
        self.found += other.found;
        self.missing += other.missing;
        self.latency_ns.add(&other.latency_ns).expect("both have the same bounds");
    }
}

/// What one workload came to.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Its name.
    pub workload: &'static str,
    /// The system that it ran on.
    pub system: &'static str,
    /// Connections, or streams of operations.
    pub threads: usize,
    /// Operations in flight on each.
    pub depth: usize,
    /// Key length.
    pub key_bytes: usize,
    /// Value length.
    pub value_bytes: usize,
    /// Operations counted.
    pub operations: u64,
    /// Of them, on keys that were not there.
    pub not_found: u64,
    /// Whether every value read was compared.
    pub verified: bool,
    /// From the first counted moment to the last answer.
    pub elapsed_s: f64,
    /// Operations per second.
    pub throughput_ops_s: f64,
    /// Value bytes per second, in MiB.
    pub throughput_mib_s: f64,
    /// Latency of an operation: the mean.
    pub latency_us_mean: f64,
    /// The median.
    pub latency_us_p50: f64,
    /// 99 in 100 are no longer.
    pub latency_us_p99: f64,
    /// 999 in 1000 are no longer.
    pub latency_us_p99_9: f64,
    /// The longest.
    pub latency_us_max: f64,
}

impl Figures {
    /// Of a tally.
    pub fn new(workload: Workload, system: &'static str, plan: &Plan, tally: &Tally) -> Figures {
        let operations = tally.found + tally.missing;
        let elapsed_s = tally.last.since(tally.counted_from).as_secs_f64();
        let per_second = |amount: f64| if elapsed_s > 0.0 { amount / elapsed_s } else { 0.0 };
        let moved = match workload {
            Workload::FillSequential | Workload::FillRandom | Workload::Overwrite | Workload::ReadRandom => {
                tally.found as f64 * plan.value_bytes as f64
            }
            Workload::DeleteRandom => 0.0,
        };
        let quantile = |q: f64| tally.latency_ns.value_at_quantile(q) as f64 / 1e3;
        Figures {
            workload: workload.name(),
            system,
            threads: plan.threads,
            depth: plan.depth,
            key_bytes: plan.key_bytes,
            value_bytes: plan.value_bytes,
            operations,
            not_found: tally.missing,
            verified: plan.verify && workload == Workload::ReadRandom,
            elapsed_s,
            throughput_ops_s: per_second(operations as f64),
            throughput_mib_s: per_second(moved) / f64::from(1 << 20),
            latency_us_mean: tally.latency_ns.mean() / 1e3,
            latency_us_p50: quantile(0.5),
            latency_us_p99: quantile(0.99),
            latency_us_p99_9: quantile(0.999),
            latency_us_max: tally.latency_ns.max() as f64 / 1e3,
        }
    }
}

/// The machine that measured.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Processor model.
    pub processor: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Memory.
    pub memory_bytes: u64,
    /// Kernel release.
    pub kernel: String,
    /// Processor architecture.
    pub architecture: String,
}

/// What was asked for.
#[derive(Clone, Debug, Serialize)]
pub struct Settings {
    /// The system.
    pub system: &'static str,
    /// The namespace, or the directory of the files.
    pub url: String,
    /// Files, where the system works on files.
    pub files: Option<usize>,
    /// When the engine in this process acknowledges a write, where there is one.
    pub durability: Option<&'static str>,
    /// Connections.
    pub threads: usize,
    /// Operations in flight on each.
    pub depth: usize,
    /// Key length.
    pub key_bytes: usize,
    /// Value length.
    pub value_bytes: usize,
    /// Different keys.
    pub keys: u64,
    /// Operations of each workload, where they end it.
    pub operations: Option<u64>,
    /// Time of each workload, where it ends it.
    pub seconds: Option<f64>,
    /// Uncounted time before each.
    pub warm_up_s: f64,
    /// The seed.
    pub seed: u64,
    /// Whether values read are compared.
    pub verify: bool,
}

impl Settings {
    /// Of a plan on a system; `place` is where its data is.
    pub fn new(system: &System, place: &str, plan: &Plan) -> Settings {
        let (operations, seconds) = match plan.end {
            End::Operations(count) => (Some(count), None),
            End::Time(span) => (None, Some(span.as_secs_f64())),
        };
        Settings {
            system: system.name(),
            url: place.to_owned(),
            files: system.files(),
            durability: system.durability(),
            threads: plan.threads,
            depth: plan.depth,
            key_bytes: plan.key_bytes,
            value_bytes: plan.value_bytes,
            keys: plan.keys,
            operations,
            seconds,
            warm_up_s: plan.warm_up.as_secs_f64(),
            seed: plan.seed,
            verify: plan.verify,
        }
    }
}

/// The document of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Document {
    /// Which document this is, and its version.
    pub schema: &'static str,
    /// The command line that made it.
    pub command: String,
    /// On which machine.
    pub machine: Machine,
    /// With which settings.
    pub settings: Settings,
    /// One per workload.
    pub results: Vec<Figures>,
}

/// The [`Document::schema`] that this code writes.
pub const SCHEMA: &str = "octokv-bench/1";

const COLUMNS: [(&str, usize); 11] = [
    ("workload", 12),
    ("system", 13),
    ("operations", 11),
    ("seconds", 8),
    ("ops/s", 10),
    ("MiB/s", 8),
    ("mean us", 9),
    ("p50 us", 9),
    ("p99 us", 9),
    ("p99.9 us", 10),
    ("max us", 10),
];

/// The first line of a table.
pub fn table_head() -> String {
    let mut line = format!("{:<12}", COLUMNS[0].0);
    for (name, width) in &COLUMNS[1..] {
        // Writing to a string cannot fail.
        let _ = write!(line, " {name:>width$}");
    }
    line
}

/// One workload's line of a table.
pub fn table_line(figures: &Figures) -> String {
    let f = figures;
    let mut line = format!(
        "{:<12} {:>13} {:>11} {:>8.2} {:>10.0} {:>8.1} {:>9.1} {:>9.1} {:>9.1} {:>10.1} {:>10.1}",
        f.workload,
        f.system,
        f.operations,
        f.elapsed_s,
        f.throughput_ops_s,
        f.throughput_mib_s,
        f.latency_us_mean,
        f.latency_us_p50,
        f.latency_us_p99,
        f.latency_us_p99_9,
        f.latency_us_max
    );
    if f.not_found > 0 {
        let _ = write!(line, "  ({} not found)", f.not_found);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures() -> Figures {
        let (mut one, mut other) = (Tally::new(Nanos(1_000)), Tally::new(Nanos(2_000)));
        one.answered(Nanos(0), Nanos(999), true); // In the warm-up: not counted.
        for i in 1..=99u64 {
            one.answered(Nanos(0), Nanos(i * 1_000), true);
        }
        other.answered(Nanos(1_000_000), Nanos(2_001_000), false);
        one.add(&other);
        let plan = Plan { value_bytes: 1 << 20, ..Plan::default() };
        Figures::new(Workload::ReadRandom, "kv", &plan, &one)
    }

    #[test]
    fn figures_come_from_everything_that_was_counted() {
        let f = figures();
        assert_eq!((f.operations, f.not_found), (100, 1));
        assert!((f.elapsed_s - 0.002).abs() < 1e-9);
        assert!((f.throughput_ops_s - 50_000.0).abs() < 1e-3);
        assert!((f.throughput_mib_s - 49_500.0).abs() < 1e-3);
        assert!((f.latency_us_p50 - 50.0).abs() < 0.1);
        assert!((f.latency_us_p99 - 99.0).abs() < 0.1);
        assert!((f.latency_us_max / 1_001.0 - 1.0).abs() < 0.001);
    }

    #[test]
    fn a_table_has_its_columns_under_their_names() {
        let (head, line) = (table_head(), table_line(&figures()));
        let end = |text: &str, of: &str| text.find(of).unwrap() + of.len();
        assert_eq!(end(&head, "operations"), end(&line, " 100"));
        assert_eq!(end(&head, "system"), end(&line, " kv"));
        assert!(line.ends_with("(1 not found)"));
    }
}
