//! What to run: a list of workloads over one key space, and when each ends.

use octokv_base::{KEY_BYTES_MAX, Nanos};
use std::fmt;

/// What every operation of a workload does, and to which keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Stores the keys in order, from the first.
    FillSequential,
    /// Stores keys drawn at random.
    FillRandom,
    /// The same; the name says that the keys are there already.
    Overwrite,
    /// Reads keys drawn at random.
    ReadRandom,
    /// Deletes keys drawn at random.
    DeleteRandom,
}

impl Workload {
    /// All of them.
    pub const ALL: [Workload; 5] = [
        Workload::FillSequential,
        Workload::FillRandom,
        Workload::Overwrite,
        Workload::ReadRandom,
        Workload::DeleteRandom,
    ];

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Workload::FillSequential => "fillseq",
            Workload::FillRandom => "fillrandom",
            Workload::Overwrite => "overwrite",
            Workload::ReadRandom => "readrandom",
            Workload::DeleteRandom => "deleterandom",
        }
    }
}

/// A workload's name that is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownWorkload(pub String);

impl fmt::Display for UnknownWorkload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Workload::ALL.map(Workload::name).join(", ");
        write!(f, "there is no workload \"{}\"; there are {names}", self.0)
    }
}

impl std::error::Error for UnknownWorkload {}

impl std::str::FromStr for Workload {
    type Err = UnknownWorkload;
    fn from_str(text: &str) -> Result<Workload, UnknownWorkload> {
        let found = Workload::ALL.into_iter().find(|workload| workload.name() == text);
        found.ok_or_else(|| UnknownWorkload(text.to_owned()))
    }
}

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
    /// Length of every key, in bytes.
    pub key_bytes: usize,
    /// Length of every value, in bytes.
    pub value_bytes: usize,
    /// How many different keys there are.
    pub keys: u64,
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
            key_bytes: 16,
            value_bytes: 16384,
            keys: 100_000,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// Nothing to run, or nothing to run it with: a count is zero.
    Zero(&'static str),
    /// Keys of this length cannot have so many values.
    KeyBytes {
        /// The length asked for.
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
        }
    }
}

impl std::error::Error for Invalid {}

/// The most commands in flight on one connection.
pub const DEPTH_MAX: usize = 65_534;

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
        let least = (self.keys - 1).max(1).ilog10() as usize + 1;
        if !(least..=KEY_BYTES_MAX).contains(&self.key_bytes) {
            return Err(Invalid::KeyBytes { have: self.key_bytes, least });
        }
        if self.depth > DEPTH_MAX {
            return Err(Invalid::Depth { have: self.depth, most: DEPTH_MAX });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_workloads_and_back() {
        for workload in Workload::ALL {
            assert_eq!(workload.name().parse(), Ok(workload));
        }
        let error = "fillsec".parse::<Workload>().unwrap_err().to_string();
        assert!(error.contains("fillsec") && error.contains("fillseq"), "{error}");
    }

    #[test]
    fn plans_that_make_no_sense_are_refused() {
        let plan = Plan::default;
        let table = [
            (plan(), Ok(())),
            (Plan { workloads: vec![], ..plan() }, Err(Invalid::Zero("workloads"))),
            (Plan { threads: 0, ..plan() }, Err(Invalid::Zero("threads"))),
            (Plan { end: End::Operations(0), ..plan() }, Err(Invalid::Zero("operations"))),
            (Plan { keys: 1, key_bytes: 1, ..plan() }, Ok(())),
            (Plan { keys: 10, key_bytes: 1, ..plan() }, Ok(())),
            (Plan { keys: 11, key_bytes: 1, ..plan() }, Err(Invalid::KeyBytes { have: 1, least: 2 })),
            (Plan { key_bytes: 1025, ..plan() }, Err(Invalid::KeyBytes { have: 1025, least: 5 })),
            (Plan { depth: 70_000, ..plan() }, Err(Invalid::Depth { have: 70_000, most: DEPTH_MAX })),
        ];
        for (plan, want) in table {
            assert_eq!(plan.check(), want, "{plan:?}");
        }
    }
}
