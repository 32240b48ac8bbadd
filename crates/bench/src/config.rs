//! The configuration of a run: workloads over one key space, their rate, and when each ends.

use crate::key_distribution::{KeyDistribution, ZIPF_THETA_DEFAULT, ZIPF_THETA_RANGE};
use crate::shard::Shard;
use crate::size_distribution::{SizeDistribution, WEIGHTS_MAX};
use crate::values;
use crate::workload::{Workload, WorkloadOp};
use octokv_base::{KEY_BYTES_MAX, Key, Nanos};

/// When a workload ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopCondition {
    /// After this number of operations, over all threads.
    Operations(u64),
    /// After this time; operations in flight at that moment still count.
    Time(Nanos),
}

/// The configuration of a run: workloads, and the parameters that they share.
#[derive(Clone, Debug)]
pub struct BenchConfig {
    /// Workloads, which run one after the other.
    pub workloads: Vec<Workload>,
    /// Lengths of keys.
    pub key_sizes: SizeDistribution,
    /// Lengths of values.
    pub value_sizes: SizeDistribution,
    /// Number of different keys before any insert.
    pub keys: u64,
    /// Key distribution; `None` for the default of each workload.
    pub distribution: Option<KeyDistribution>,
    /// Skew (theta) of zipf and latest.
    pub zipf_theta: f64,
    /// Open loop: operations started per second, over all threads. `None` for a closed loop.
    pub rate: Option<f64>,
    /// Independent clients, each with a connection of its own.
    pub threads: usize,
    /// Operations in flight on each connection.
    pub depth: usize,
    /// When each workload ends.
    pub stop: StopCondition,
    /// Time from the start in which operations run and are not counted.
    pub warm_up: Nanos,
    /// Seed of key choice, lengths and values.
    pub seed: u64,
    /// Whether every value read is compared with the value that was stored.
    pub verify: bool,
    /// Pairs that one scan of scanrandom or scanwhilewriting reads.
    pub scan_length: u32,
    /// Stores per second of the writer beside readwhilewriting or scanwhilewriting; `None` for one after the other.
    pub write_rate: Option<f64>,
    /// Whether operations that a node answers with an error status are counted as failed, and do not end the run.
    pub tolerates_errors: bool,
}

/// Pairs of a scan without another configuration, as in RocksDB's own benchmarks (`tools/benchmark.sh`).
pub const SCAN_LENGTH_DEFAULT: u32 = 10;

impl Default for BenchConfig {
    fn default() -> BenchConfig {
        BenchConfig {
            workloads: vec![Workload::FillRandom, Workload::ReadRandom],
            key_sizes: SizeDistribution::Fixed(16),
            value_sizes: SizeDistribution::Fixed(16384),
            keys: 100_000,
            distribution: None,
            zipf_theta: ZIPF_THETA_DEFAULT,
            rate: None,
            threads: 12,
            depth: 1,
            stop: StopCondition::Operations(100_000),
            warm_up: Nanos::ZERO,
            seed: 1,
            verify: true,
            scan_length: SCAN_LENGTH_DEFAULT,
            write_rate: None,
            tolerates_errors: false,
        }
    }
}

/// Why a configuration is invalid.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum BenchConfigError {
    /// A count is zero; its name.
    #[error("the number of {0} must not be zero")]
    Zero(&'static str),
    /// Keys of this length cannot represent this number of keys.
    #[error("keys of {have} bytes: so many different keys need {min} to {KEY_BYTES_MAX} bytes")]
    KeyBytes {
        /// The shortest configured length, in bytes.
        have: usize,
        /// The shortest length that can, in bytes.
        min: usize,
    },
    /// The depth exceeds the entries of a queue.
    #[error("a depth of {have}: the maximum on a connection is {max}")]
    Depth {
        /// The configured depth.
        have: usize,
        /// The largest depth.
        max: usize,
    },
    /// A size distribution without a possible length; its name.
    #[error("{0}: a range ends no lower than it begins; of 1 to {WEIGHTS_MAX} weights one is not zero")]
    Sizes(&'static str),
    /// The skew is out of range.
    #[error("--zipf {}: must be from {} to {}", .0, ZIPF_THETA_RANGE.start(), ZIPF_THETA_RANGE.end())]
    Theta(f64),
    /// The rate is out of range, in operations per second.
    #[error("a rate of {}: must be from {} to {}", .0, RATE_RANGE.start(), RATE_RANGE.end())]
    Rate(f64),
    /// A resource has fewer items than there are targets, and each target needs one.
    #[error("{targets} targets (--url) need at least as many {resource}; there are {have}")]
    Targets {
        /// Name of the resource.
        resource: &'static str,
        /// Its number of items.
        have: u64,
        /// Number of targets.
        targets: usize,
    },
}

/// Largest number of commands in flight on one connection.
pub const DEPTH_MAX: usize = 65_534;
/// Range of rates, in operations per second.
pub const RATE_RANGE: std::ops::RangeInclusive<f64> = 0.1..=1e8;
/// Upper bound of operations per second on any machine; bounds the keys that a timed workload can insert.
const OPERATIONS_PER_SECOND_MAX: u64 = 10_000_000;

impl BenchConfig {
    /// Validates the configuration.
    ///
    /// # Errors
    /// The first invalid parameter.
    pub fn validate(&self) -> Result<(), BenchConfigError> {
        let counts = [
            (self.workloads.len() as u64, "workloads"),
            (self.keys, "keys"),
            (self.threads as u64, "threads"),
            (self.depth as u64, "operations in flight (depth)"),
            (u64::from(self.scan_length), "pairs of a scan"),
            (if self.stop == StopCondition::Operations(0) { 0 } else { 1 }, "operations"),
            (if self.stop == StopCondition::Time(Nanos::ZERO) { 0 } else { 1 }, "seconds"),
        ];
        if let Some((_, name)) = counts.into_iter().find(|(count, _)| *count == 0) {
            return Err(BenchConfigError::Zero(name));
        }
        let all = [(&self.key_sizes, "key sizes"), (&self.value_sizes, "value sizes")];
        if let Some((_, name)) = all.into_iter().find(|(sizes, _)| !sizes.is_valid()) {
            return Err(BenchConfigError::Sizes(name));
        }
        let last = (self.keys - 1).saturating_add(self.inserts_max()).max(1);
        let min = last.ilog10() as usize + 1;
        if self.key_sizes.min_bytes() < min || self.key_sizes.max_bytes() > KEY_BYTES_MAX {
            let wrong = if self.key_sizes.min_bytes() < min {
                SizeDistribution::min_bytes
            } else {
                SizeDistribution::max_bytes
            };
            return Err(BenchConfigError::KeyBytes { have: wrong(&self.key_sizes), min });
        }
        if self.depth > DEPTH_MAX {
            return Err(BenchConfigError::Depth { have: self.depth, max: DEPTH_MAX });
        }
        if !ZIPF_THETA_RANGE.contains(&self.zipf_theta) {
            return Err(BenchConfigError::Theta(self.zipf_theta));
        }
        match [self.rate, self.write_rate].into_iter().flatten().find(|rate| !RATE_RANGE.contains(rate)) {
            Some(rate) => Err(BenchConfigError::Rate(rate)),
            None => Ok(()),
        }
    }

    /// Validates that each of `targets` targets gets threads, keys and operations.
    ///
    /// # Errors
    /// [`BenchConfigError::Targets`] with the first resource that is short.
    pub fn validate_targets(&self, targets: usize) -> Result<(), BenchConfigError> {
        let operations = match self.stop {
            StopCondition::Operations(count) => count,
            StopCondition::Time(_) => u64::MAX,
        };
        let counts = [(self.threads as u64, "threads"), (self.keys, "keys"), (operations, "operations")];
        match counts.into_iter().find(|(have, _)| *have < targets as u64) {
            Some((have, resource)) => Err(BenchConfigError::Targets { resource, have, targets }),
            None => Ok(()),
        }
    }

    /// The configuration of one of several targets.
    pub fn for_shard(&self, share: Shard) -> BenchConfig {
        BenchConfig {
            keys: share.count(self.keys),
            threads: share.count(self.threads as u64) as usize,
            rate: self.rate.map(|rate| rate / share.shard_count as f64),
            write_rate: self.write_rate.map(|rate| rate / share.shard_count as f64),
            stop: match self.stop {
                StopCondition::Operations(count) => StopCondition::Operations(share.count(count)),
                StopCondition::Time(span) => StopCondition::Time(span),
            },
            ..self.clone()
        }
    }

    /// Upper bound of the keys that one of the workloads can insert.
    fn inserts_max(&self) -> u64 {
        let inserts = self.workloads.iter().any(|workload| workload.includes(WorkloadOp::Insert));
        match self.stop {
            _ if !inserts => 0,
            StopCondition::Operations(count) => count,
            StopCondition::Time(span) => {
                ((self.warm_up + span).0 / 1_000_000_000 + 1) * OPERATIONS_PER_SECOND_MAX
            }
        }
    }

    /// The key distribution of a workload; `None` if it takes keys in order, or in a random order each once.
    pub fn distribution_of(&self, workload: Workload) -> Option<KeyDistribution> {
        workload.distribution().map(|own| self.distribution.unwrap_or(own))
    }

    /// Length of the key of an index, in bytes.
    #[inline]
    pub fn key_bytes(&self, index: u64) -> usize {
        // A different seed than for values, so that long keys do not coincide with long values.
        self.key_sizes.sample(index, self.seed ^ 1 << 63)
    }

    /// The key of an index.
    #[inline]
    pub fn key(&self, index: u64) -> Key {
        values::key(index, self.key_bytes(index))
    }

    /// A key that no workload stores, adjacent to the key of an index.
    pub fn absent_key(&self, index: u64) -> Key {
        values::absent_key(index, self.key_bytes(index))
    }

    /// Length of the value of an index, in bytes.
    #[inline]
    pub fn value_bytes(&self, index: u64) -> usize {
        self.value_sizes.sample(index, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_configs_are_rejected() {
        let config = BenchConfig::default;
        let short = || BenchConfig { key_sizes: SizeDistribution::Fixed(1), ..config() };
        let inserts = || BenchConfig { workloads: vec![Workload::YcsbD], ..config() };
        let key_bytes = |have, min| Err(BenchConfigError::KeyBytes { have, min });
        let second = StopCondition::Time(Nanos::from_secs(1));
        let table = [
            (config(), Ok(())),
            (BenchConfig { workloads: vec![], ..config() }, Err(BenchConfigError::Zero("workloads"))),
            (BenchConfig { threads: 0, ..config() }, Err(BenchConfigError::Zero("threads"))),
            (
                BenchConfig { stop: StopCondition::Operations(0), ..config() },
                Err(BenchConfigError::Zero("operations")),
            ),
            (BenchConfig { keys: 1, ..short() }, Ok(())),
            (BenchConfig { keys: 10, ..short() }, Ok(())),
            (BenchConfig { keys: 11, ..short() }, key_bytes(1, 2)),
            (BenchConfig { key_sizes: SizeDistribution::Fixed(1025), ..config() }, key_bytes(1025, 5)),
            (
                BenchConfig { key_sizes: SizeDistribution::Uniform { min: 4, max: 9 }, ..config() },
                key_bytes(4, 5),
            ),
            (
                BenchConfig { key_sizes: SizeDistribution::Uniform { min: 5, max: 1025 }, ..config() },
                key_bytes(1025, 5),
            ),
            (BenchConfig { key_sizes: SizeDistribution::Fixed(5), ..inserts() }, key_bytes(5, 6)),
            (BenchConfig { key_sizes: SizeDistribution::Fixed(6), ..inserts() }, Ok(())),
            (
                BenchConfig { key_sizes: SizeDistribution::Fixed(6), stop: second, ..inserts() },
                key_bytes(6, 8),
            ),
            (BenchConfig { key_sizes: SizeDistribution::Fixed(6), stop: second, ..config() }, Ok(())),
            (
                BenchConfig { depth: 70_000, ..config() },
                Err(BenchConfigError::Depth { have: 70_000, max: DEPTH_MAX }),
            ),
            (
                BenchConfig { value_sizes: SizeDistribution::Uniform { min: 2, max: 1 }, ..config() },
                Err(BenchConfigError::Sizes("value sizes")),
            ),
            (BenchConfig { zipf_theta: 0.0, ..config() }, Err(BenchConfigError::Theta(0.0))),
            (BenchConfig { zipf_theta: 10.0, ..config() }, Ok(())),
            (BenchConfig { rate: Some(0.0), ..config() }, Err(BenchConfigError::Rate(0.0))),
            (
                BenchConfig { rate: Some(f64::INFINITY), ..config() },
                Err(BenchConfigError::Rate(f64::INFINITY)),
            ),
            (BenchConfig { rate: Some(1e6), ..config() }, Ok(())),
            (BenchConfig { write_rate: Some(0.0), ..config() }, Err(BenchConfigError::Rate(0.0))),
            (BenchConfig { scan_length: 0, ..config() }, Err(BenchConfigError::Zero("pairs of a scan"))),
        ];
        for (config, want) in table {
            assert_eq!(config.validate(), want, "{config:?}");
        }
    }

    #[test]
    fn a_config_is_split_over_targets_when_each_gets_a_part() {
        let config = || BenchConfig {
            threads: 5,
            keys: 7,
            stop: StopCondition::Operations(4),
            rate: Some(10.0),
            ..BenchConfig::default()
        };
        let shards: Vec<BenchConfig> = Shard::all(2).map(|shard| config().for_shard(shard)).collect();
        let of = |config: &BenchConfig| (config.threads, config.keys, config.stop, config.rate);
        assert_eq!(of(&shards[0]), (3, 4, StopCondition::Operations(2), Some(5.0)));
        assert_eq!(of(&shards[1]), (2, 3, StopCondition::Operations(2), Some(5.0)));
        let too_few = |resource, have, targets| Err(BenchConfigError::Targets { resource, have, targets });
        assert_eq!(config().validate_targets(4), Ok(()));
        assert_eq!(config().validate_targets(5), too_few("operations", 4, 5));
        assert_eq!(config().validate_targets(6), too_few("threads", 5, 6));
        let timed = BenchConfig { threads: 9, stop: StopCondition::Time(Nanos::from_secs(1)), ..config() };
        assert_eq!(timed.validate_targets(8), too_few("keys", 7, 8));
    }
}
