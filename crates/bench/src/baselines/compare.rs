//! Comparison with a baseline: ratios of results of the same round, and medians over the rounds.
//! In: the results of all rounds. Out: one comparison per workload and baseline. Invariant: a ratio is ours over the
//! baseline's of the same round, because the disk varies between rounds more than within one.

use crate::statistics;
use crate::workload_result::WorkloadResult;
use serde::Serialize;
use std::fmt::Write;

/// One metric of both systems.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MetricPair {
    /// Ours, the median over the rounds.
    pub ours: f64,
    /// The baseline's, the median over the rounds.
    pub baseline: f64,
    /// Ours over the baseline's: the median of the ratios of the rounds.
    pub ratio: f64,
    /// The ratio of each round.
    pub ratios: Vec<f64>,
}

/// The fraction of operations that found their key, of both systems: medians over the rounds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HitRatePair {
    /// Ours.
    pub ours: f64,
    /// The baseline's.
    pub baseline: f64,
}

/// A workload on ours and on a baseline.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BaselineComparison {
    /// Its name.
    pub workload: &'static str,
    /// The baseline's.
    pub baseline: &'static str,
    /// Operations per second: a ratio above 1 is in our favour.
    pub throughput_ops_s: MetricPair,
    /// Mean latency: a ratio below 1 is in our favour.
    pub latency_us_mean: MetricPair,
    /// 99th percentile of the latency: a ratio below 1 is in our favour.
    pub latency_us_p99: MetricPair,
    /// The fraction of operations whose key existed, 0 to 1. If it differs, so does the work: a missing key costs less than
    /// a value.
    pub found: HitRatePair,
}

/// Compares results round by round: `ours[i]` and `baselines[i]` are of one workload and one round.
///
/// # Panics
/// If the lists are empty or differ in length.
pub fn compare(ours: &[&WorkloadResult], baselines: &[&WorkloadResult]) -> BaselineComparison {
    assert!(!ours.is_empty() && ours.len() == baselines.len(), "every round has a result of both");
    let pair_of = |of: fn(&WorkloadResult) -> f64| {
        let values =
            |results: &[&WorkloadResult]| results.iter().map(|result| of(result)).collect::<Vec<f64>>();
        let (ours, baselines) = (values(ours), values(baselines));
        let ratios: Vec<f64> = ours.iter().zip(&baselines).map(|(ours, baseline)| ours / baseline).collect();
        MetricPair { ours: median(&ours), baseline: median(&baselines), ratio: median(&ratios), ratios }
    };
    let hit_rate = |results: &[&WorkloadResult]| {
        let part = |result: &&WorkloadResult| 1.0 - result.not_found as f64 / result.operations.max(1) as f64;
        median(&results.iter().map(part).collect::<Vec<f64>>())
    };
    BaselineComparison {
        workload: ours[0].workload,
        baseline: baselines[0].system,
        throughput_ops_s: pair_of(|result| result.throughput_ops_s),
        latency_us_mean: pair_of(|result| result.latency_us_mean),
        latency_us_p99: pair_of(|result| result.latency_us_p99),
        found: HitRatePair { ours: hit_rate(ours), baseline: hit_rate(baselines) },
    }
}

/// The median of one value per round; there is at least one round.
fn median(values: &[f64]) -> f64 {
    statistics::median(values).expect("every round has a result of both")
}

/// Formats comparisons as a table.
pub fn comparison_table(comparisons: &[BaselineComparison], rounds: usize) -> String {
    let medians = if rounds == 1 { "1 round".to_owned() } else { format!("medians of {rounds} rounds") };
    let mut text = format!(
        "{:<16} {:>13} {:>10} {:>10} {:>8} {:>9} {:>9} {:>8} {:>9} {:>9} {:>8}   ({medians})\n",
        "workload",
        "baseline",
        "ops/s",
        "baseline",
        "ratio",
        "mean us",
        "baseline",
        "ratio",
        "p99 us",
        "baseline",
        "ratio"
    );
    for c in comparisons {
        let (ops, mean, p99) = (&c.throughput_ops_s, &c.latency_us_mean, &c.latency_us_p99);
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "{:<16} {:>13} {:>10.0} {:>10.0} {:>8.2} {:>9.1} {:>9.1} {:>8.2} {:>9.1} {:>9.1} {:>8.2}",
            c.workload,
            c.baseline,
            ops.ours,
            ops.baseline,
            ops.ratio,
            mean.ours,
            mean.baseline,
            mean.ratio,
            p99.ours,
            p99.baseline,
            p99.ratio
        );
        let hit_rates = [c.found.ours, c.found.baseline];
        if hit_rates.iter().any(|part| *part < 1.0) {
            let [ours, baseline] = hit_rates.map(|part| part * 100.0);
            let _ = write!(text, "   (keys found: {ours:.1} %, baseline {baseline:.1} %)");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::BenchConfig;
    use crate::recorder::Recorder;
    use crate::workload::Workload;
    use octokv_base::Nanos;

    fn sample_result(system: &'static str, throughput_ops_s: f64, latency_us_mean: f64) -> WorkloadResult {
        let result = WorkloadResult::new(
            Workload::Overwrite,
            system,
            &BenchConfig::default(),
            Recorder::new(Nanos::ZERO),
        );
        WorkloadResult { throughput_ops_s, latency_us_mean, latency_us_p99: 10.0, ..result }
    }

    #[test]
    fn ratios_are_within_a_round_and_the_median_is_of_ratios() {
        let ours =
            [sample_result("kv", 100.0, 4.0), sample_result("kv", 10.0, 1.0), sample_result("kv", 50.0, 3.0)];
        let baseline = [
            sample_result("redis", 50.0, 1.0),
            sample_result("redis", 20.0, 2.0),
            sample_result("redis", 40.0, 1.0),
        ];
        let list = |results: &'static [WorkloadResult]| results.iter().collect::<Vec<_>>();
        let (ours, baseline) = (Vec::leak(ours.to_vec()), Vec::leak(baseline.to_vec()));
        let compared = compare(&list(ours), &list(baseline));
        assert_eq!((compared.workload, compared.baseline), ("overwrite", "redis"));
        let throughput = MetricPair { ours: 50.0, baseline: 40.0, ratio: 1.25, ratios: vec![2.0, 0.5, 1.25] };
        assert_eq!(compared.throughput_ops_s, throughput);
        assert_eq!((compared.latency_us_mean.ratio, compared.latency_us_p99.ratio), (3.0, 1.0));
        let table = comparison_table(&[compared], 3);
        assert!(table.contains("medians of 3 rounds") && table.contains(" 1.25 "), "{table}");
        assert!(!table.contains("keys found"), "{table}");
    }

    #[test]
    fn keys_that_were_not_found_are_reported() {
        let half = WorkloadResult { operations: 10, not_found: 5, ..sample_result("kv", 1.0, 1.0) };
        let all = WorkloadResult { operations: 10, ..sample_result("redis", 1.0, 1.0) };
        let table = comparison_table(&[compare(&[&half], &[&all])], 1);
        assert!(
            table.contains("(keys found: 50.0 %, baseline 100.0 %)") && table.contains("(1 round)"),
            "{table}"
        );
    }
}
