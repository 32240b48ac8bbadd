//! What to run: a list of workloads over one key space, how fast, and when each ends.

use crate::key_distribution::{Distribution, THETA, THETAS};
use crate::shard::Share;
use crate::size_distribution::{Sizes, WEIGHTS_MAX};
use crate::values;
use crate::workload::{Action, Workload};
use octokv_base::{KEY_BYTES_MAX, Key, Nanos};
use std::fmt;

/// When a workload ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// After so many operations, over all threads.
    Operations(u64),
    /// When so much time has passed; what is in flight then still counts.
    Time(Nanos),
}

/// A list of workloads and everything they share.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Run one after the other.
    pub workloads: Vec<Workload>,
    /// Lengths of keys.
    pub key_sizes: Sizes,
    /// Lengths of values.
    pub value_sizes: Sizes,
    /// How many different keys there are before any is inserted.
    pub keys: u64,
    /// How keys are drawn; none for what each workload has by itself.
    pub distribution: Option<Distribution>,
    /// The skew of the distributions that have one.
    pub theta: f64,
    /// Operations begun per second, over all threads; none to begin one whenever one has ended.
    pub rate: Option<f64>,
    /// Independent clients: each a connection of its own.
    pub threads: usize,
    /// Operations in flight on each.
    pub depth: usize,
    /// When each workload ends.
    pub end: End,
    /// Operations within this time from the start are done and not counted.
    pub warm_up: Nanos,
    /// Draws keys and makes values.
    pub seed: u64,
    /// Compare every value read with what was stored.
    pub verify: bool,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            workloads: vec![Workload::FillRandom, Workload::ReadRandom],
            key_sizes: Sizes::Fixed(16),
            value_sizes: Sizes::Fixed(16384),
            keys: 100_000,
            distribution: None,
            theta: THETA,
            rate: None,
            threads: 12,
            depth: 1,
            end: End::Operations(100_000),
            warm_up: Nanos::ZERO,
            seed: 1,
            verify: true,
        }
    }
}

/// What makes no sense in a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Invalid {
    /// Nothing to run, or nothing to run it with: a count is zero.
    Zero(&'static str),
    /// Keys of this length cannot have so many values.
    KeyBytes {
        /// The shortest length asked for.
        have: usize,
        /// The shortest that does.
        least: usize,
    },
    /// More commands on one connection than a queue has entries.
    Depth {
        /// The depth asked for.
        have: usize,
        /// The most.
        most: usize,
    },
    /// Lengths that cannot be drawn.
    Sizes(&'static str),
    /// A skew that cannot be drawn with.
    Theta(f64),
    /// So many operations per second cannot be begun.
    Rate(f64),
    /// Fewer of something than targets, each of which needs one.
    Targets {
        /// Of what.
        what: &'static str,
        /// How many there are.
        have: u64,
        /// How many targets.
        targets: usize,
    },
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Invalid::Zero(what) => write!(f, "the number of {what} must not be zero"),
            Invalid::KeyBytes { have, least } => {
                write!(
                    f,
                    "keys of {have} bytes: so many different keys need {least} to {KEY_BYTES_MAX} bytes"
                )
            }
            Invalid::Depth { have, most } => write!(f, "a depth of {have}: a connection takes {most}"),
            Invalid::Sizes(what) => write!(
                f,
                "{what}: a range ends no lower than it begins; of 1 to {WEIGHTS_MAX} weights one is not zero"
            ),
            Invalid::Theta(have) => {
                write!(f, "--zipf {have}: must be from {} to {}", THETAS.start(), THETAS.end())
            }
            Invalid::Rate(have) => {
                write!(f, "a rate of {have}: must be from {} to {}", RATES.start(), RATES.end())
            }
            Invalid::Targets { what, have, targets } => {
                write!(f, "{targets} targets (--url) need at least as many {what}; there are {have}")
            }
        }
    }
}

impl std::error::Error for Invalid {}

/// The most commands in flight on one connection.
pub const DEPTH_MAX: usize = 65_534;
/// The rates that can be asked for, in operations per second.
pub const RATES: std::ops::RangeInclusive<f64> = 0.1..=1e8;
/// More operations per second than any machine does; bounds the keys that a span of time can insert.
const OPERATIONS_PER_SECOND_MAX: u64 = 10_000_000;

impl Plan {
    /// What is wrong with it.
    ///
    /// # Errors
    /// The first thing that is.
    pub fn check(&self) -> Result<(), Invalid> {
        let counts = [
            (self.workloads.len() as u64, "workloads"),
            (self.keys, "keys"),
            (self.threads as u64, "threads"),
            (self.depth as u64, "operations in flight (depth)"),
            (if self.end == End::Operations(0) { 0 } else { 1 }, "operations"),
            (if self.end == End::Time(Nanos::ZERO) { 0 } else { 1 }, "seconds"),
        ];
        if let Some((_, what)) = counts.into_iter().find(|(count, _)| *count == 0) {
            return Err(Invalid::Zero(what));
        }
        let all = [(&self.key_sizes, "key sizes"), (&self.value_sizes, "value sizes")];
        if let Some((_, what)) = all.into_iter().find(|(sizes, _)| !sizes.makes_sense()) {
            return Err(Invalid::Sizes(what));
        }
        let last = (self.keys - 1).saturating_add(self.inserted_max()).max(1);
        let least = last.ilog10() as usize + 1;
        if self.key_sizes.least() < least || self.key_sizes.most() > KEY_BYTES_MAX {
            let wrong = if self.key_sizes.least() < least { Sizes::least } else { Sizes::most };
            return Err(Invalid::KeyBytes { have: wrong(&self.key_sizes), least });
        }
        if self.depth > DEPTH_MAX {
            return Err(Invalid::Depth { have: self.depth, most: DEPTH_MAX });
        }
        if !THETAS.contains(&self.theta) {
            return Err(Invalid::Theta(self.theta));
        }
        match self.rate {
            Some(rate) if !RATES.contains(&rate) => Err(Invalid::Rate(rate)),
            _ => Ok(()),
        }
    }

    /// Whether there is enough of it for so many targets.
    ///
    /// # Errors
    /// The first thing that there is too little of.
    pub fn check_targets(&self, targets: usize) -> Result<(), Invalid> {
        let operations = match self.end {
            End::Operations(count) => count,
            End::Time(_) => u64::MAX,
        };
        let counts = [(self.threads as u64, "threads"), (self.keys, "keys"), (operations, "operations")];
        match counts.into_iter().find(|(have, _)| *have < targets as u64) {
            Some((have, what)) => Err(Invalid::Targets { what, have, targets }),
            None => Ok(()),
        }
    }

    /// What one of several targets has of it.
    pub fn share(&self, share: Share) -> Plan {
        Plan {
            keys: share.count(self.keys),
            threads: share.count(self.threads as u64) as usize,
            rate: self.rate.map(|rate| rate / share.of as f64),
            end: match self.end {
                End::Operations(count) => End::Operations(share.count(count)),
                End::Time(span) => End::Time(span),
            },
            ..self.clone()
        }
    }

    /// The most keys that one of its workloads can insert.
    fn inserted_max(&self) -> u64 {
        let inserts = self.workloads.iter().any(|workload| workload.does(Action::Insert));
        match self.end {
            _ if !inserts => 0,
            End::Operations(count) => count,
            End::Time(span) => ((self.warm_up + span).0 / 1_000_000_000 + 1) * OPERATIONS_PER_SECOND_MAX,
        }
    }

    /// How a workload draws keys; none where it takes them in order.
    pub fn distribution_of(&self, workload: Workload) -> Option<Distribution> {
        workload.distribution().map(|own| self.distribution.unwrap_or(own))
    }

    /// The length of an index's key.
    #[inline]
    pub fn key_bytes(&self, index: u64) -> usize {
        // Another seed than for values: long keys are not those of long values.
        self.key_sizes.of(index, self.seed ^ 1 << 63)
    }

    /// The key of an index.
    #[inline]
    pub fn key(&self, index: u64) -> Key {
        values::key(index, self.key_bytes(index))
    }

    /// A key that nothing stores, beside that of an index.
    pub fn missing_key(&self, index: u64) -> Key {
        values::missing_key(index, self.key_bytes(index))
    }

    /// The length of an index's value.
    #[inline]
    pub fn value_bytes(&self, index: u64) -> usize {
        self.value_sizes.of(index, self.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plans_that_make_no_sense_are_refused() {
        let plan = Plan::default;
        let short = || Plan { key_sizes: Sizes::Fixed(1), ..plan() };
        let inserts = || Plan { workloads: vec![Workload::YcsbD], ..plan() };
        let key_bytes = |have, least| Err(Invalid::KeyBytes { have, least });
        let second = End::Time(Nanos::from_secs(1));
        let table = [
            (plan(), Ok(())),
            (Plan { workloads: vec![], ..plan() }, Err(Invalid::Zero("workloads"))),
            (Plan { threads: 0, ..plan() }, Err(Invalid::Zero("threads"))),
            (Plan { end: End::Operations(0), ..plan() }, Err(Invalid::Zero("operations"))),
            (Plan { keys: 1, ..short() }, Ok(())),
            (Plan { keys: 10, ..short() }, Ok(())),
            (Plan { keys: 11, ..short() }, key_bytes(1, 2)),
            (Plan { key_sizes: Sizes::Fixed(1025), ..plan() }, key_bytes(1025, 5)),
            (Plan { key_sizes: Sizes::Uniform { least: 4, most: 9 }, ..plan() }, key_bytes(4, 5)),
            (Plan { key_sizes: Sizes::Uniform { least: 5, most: 1025 }, ..plan() }, key_bytes(1025, 5)),
            (Plan { key_sizes: Sizes::Fixed(5), ..inserts() }, key_bytes(5, 6)),
            (Plan { key_sizes: Sizes::Fixed(6), ..inserts() }, Ok(())),
            (Plan { key_sizes: Sizes::Fixed(6), end: second, ..inserts() }, key_bytes(6, 8)),
            (Plan { key_sizes: Sizes::Fixed(6), end: second, ..plan() }, Ok(())),
            (Plan { depth: 70_000, ..plan() }, Err(Invalid::Depth { have: 70_000, most: DEPTH_MAX })),
            (
                Plan { value_sizes: Sizes::Uniform { least: 2, most: 1 }, ..plan() },
                Err(Invalid::Sizes("value sizes")),
            ),
            (Plan { theta: 0.0, ..plan() }, Err(Invalid::Theta(0.0))),
            (Plan { theta: 10.0, ..plan() }, Ok(())),
            (Plan { rate: Some(0.0), ..plan() }, Err(Invalid::Rate(0.0))),
            (Plan { rate: Some(f64::INFINITY), ..plan() }, Err(Invalid::Rate(f64::INFINITY))),
            (Plan { rate: Some(1e6), ..plan() }, Ok(())),
        ];
        for (plan, want) in table {
            assert_eq!(plan.check(), want, "{plan:?}");
        }
    }

    #[test]
    fn targets_share_a_plan_when_each_gets_some_of_it() {
        let plan =
            || Plan { threads: 5, keys: 7, end: End::Operations(4), rate: Some(10.0), ..Plan::default() };
        let shares: Vec<Plan> = Share::all(2).map(|share| plan().share(share)).collect();
        let of = |plan: &Plan| (plan.threads, plan.keys, plan.end, plan.rate);
        assert_eq!(of(&shares[0]), (3, 4, End::Operations(2), Some(5.0)));
        assert_eq!(of(&shares[1]), (2, 3, End::Operations(2), Some(5.0)));
        let too_few = |what, have, targets| Err(Invalid::Targets { what, have, targets });
        assert_eq!(plan().check_targets(4), Ok(()));
        assert_eq!(plan().check_targets(5), too_few("operations", 4, 5));
        assert_eq!(plan().check_targets(6), too_few("threads", 5, 6));
        let timed = Plan { threads: 9, end: End::Time(Nanos::from_secs(1)), ..plan() };
        assert_eq!(timed.check_targets(8), too_few("keys", 7, 8));
    }
}
