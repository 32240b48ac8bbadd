//! Workloads: their operations, the mix of these, and the default key distribution.
//!
//! ```text
//!   fillseq fillrandom overwrite     store                ycsb-a   50 % read   50 % update              zipf
//!   readseq readrandom readmissing   read                 ycsb-b   95 % read    5 % update              zipf
//!   seekrandom                       list                 ycsb-c  100 % read                            zipf
//!   scanrandom                       scan                 ycsb-d   95 % read    5 % insert              latest
//!   deleteseq deleterandom           delete               ycsb-e   95 % scan    5 % insert              zipf
//!   readwhilewriting  read, beside one writer             ycsb-f   50 % read   50 % read-modify-write   zipf
//!   scanwhilewriting  scan, beside one writer             ycsb-w  100 % update                          zipf
//!   filluniquerandom                 store
//!   deleteuniquerandom               delete
//! ```
//! A scan reads pairs by an iterator. A target without iterators lists keys in place of the scans of ycsb-e.
//! The mixes are those of YCSB's core workloads (Cooper et al., SoCC 2010, table 2, and the workload files). Their load
//! phase is `fillseq`. Inserted keys follow `num` in order; each workload of a run begins there again.

use crate::key_distribution::KeyDistribution;
use crate::name_lookup::{self, UnknownName};

/// Largest number of keys that one List requests, and of pairs that a scan of ycsb-e does.
pub const LIST_KEYS_MAX: u32 = 100;

/// The kind of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkloadOp {
    /// Stores the value of a key that may exist.
    Store,
    /// Stores the value of the next new key.
    Insert,
    /// Reads a value.
    Read,
    /// Reads a key that no workload stores.
    ReadMissing,
    /// Reads a value, then stores it; one operation.
    ReadModifyWrite,
    /// Deletes a key.
    Delete,
    /// Lists 1 to 100 keys from a key on; reads no values.
    List,
    /// Reads pairs in order from a key on, by an iterator of its own.
    Scan,
}

/// A workload: a mix of operations, and the keys they access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Workload {
    /// Stores the keys in order, from the first.
    FillSequential,
    /// Stores keys drawn at random.
    FillRandom,
    /// Stores each key once in random order, and then each again in another order.
    FillUniqueRandom,
    /// The same, on keys that exist.
    Overwrite,
    /// Reads keys drawn at random.
    ReadRandom,
    /// Deletes the keys in order, from the first.
    DeleteSequential,
    /// Deletes keys drawn at random.
    DeleteRandom,
    /// Deletes each key once in random order, that of [`Workload::FillUniqueRandom`].
    DeleteUniqueRandom,
    /// Reads the keys in order, from the first.
    ReadSequential,
    /// Reads keys that no workload stores, each adjacent to a key drawn at random.
    ReadMissing,
    /// Lists 100 keys from one drawn at random.
    SeekRandom,
    /// Reads pairs in order from a key drawn at random ([`crate::BenchConfig::scan_length`]).
    ScanRandom,
    /// Reads keys drawn at random, while one more stream stores keys drawn at random.
    ReadWhileWriting,
    /// Scans as [`Workload::ScanRandom`] does, while one more stream stores keys drawn at random.
    ScanWhileWriting,
    /// Update heavy.
    YcsbA,
    /// Read mostly.
    YcsbB,
    /// Read only.
    YcsbC,
    /// Read latest.
    YcsbD,
    /// Short ranges.
    YcsbE,
    /// Read-modify-write.
    YcsbF,
    /// Write only.
    YcsbW,
}

impl Workload {
    /// All of them.
    pub const ALL: [Workload; 21] = [
        Workload::FillSequential,
        Workload::FillRandom,
        Workload::FillUniqueRandom,
        Workload::Overwrite,
        Workload::ReadSequential,
        Workload::ReadRandom,
        Workload::ReadMissing,
        Workload::SeekRandom,
        Workload::ScanRandom,
        Workload::ReadWhileWriting,
        Workload::ScanWhileWriting,
        Workload::DeleteSequential,
        Workload::DeleteRandom,
        Workload::DeleteUniqueRandom,
        Workload::YcsbA,
        Workload::YcsbB,
        Workload::YcsbC,
        Workload::YcsbD,
        Workload::YcsbE,
        Workload::YcsbF,
        Workload::YcsbW,
    ];

    /// Its name on the command line and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Workload::FillSequential => "fillseq",
            Workload::FillRandom => "fillrandom",
            Workload::FillUniqueRandom => "filluniquerandom",
            Workload::Overwrite => "overwrite",
            Workload::ReadSequential => "readseq",
            Workload::ReadRandom => "readrandom",
            Workload::ReadMissing => "readmissing",
            Workload::SeekRandom => "seekrandom",
            Workload::ScanRandom => "scanrandom",
            Workload::ReadWhileWriting => "readwhilewriting",
            Workload::ScanWhileWriting => "scanwhilewriting",
            Workload::DeleteSequential => "deleteseq",
            Workload::DeleteRandom => "deleterandom",
            Workload::DeleteUniqueRandom => "deleteuniquerandom",
            Workload::YcsbA => "ycsb-a",
            Workload::YcsbB => "ycsb-b",
            Workload::YcsbC => "ycsb-c",
            Workload::YcsbD => "ycsb-d",
            Workload::YcsbE => "ycsb-e",
            Workload::YcsbF => "ycsb-f",
            Workload::YcsbW => "ycsb-w",
        }
    }

    /// Its operations, each with its share in percent; the shares sum to 100. A List of ycsb-e is a Scan if the target has
    /// iterators.
    pub fn mix(self) -> &'static [(WorkloadOp, u64)] {
        match self {
            Workload::FillSequential
            | Workload::FillRandom
            | Workload::FillUniqueRandom
            | Workload::Overwrite
            | Workload::YcsbW => &[(WorkloadOp::Store, 100)],
            Workload::ReadSequential
            | Workload::ReadRandom
            | Workload::ReadWhileWriting
            | Workload::YcsbC => &[(WorkloadOp::Read, 100)],
            Workload::ScanRandom | Workload::ScanWhileWriting => &[(WorkloadOp::Scan, 100)],
            Workload::ReadMissing => &[(WorkloadOp::ReadMissing, 100)],
            Workload::SeekRandom => &[(WorkloadOp::List, 100)],
            Workload::DeleteSequential | Workload::DeleteRandom | Workload::DeleteUniqueRandom => {
                &[(WorkloadOp::Delete, 100)]
            }
            Workload::YcsbA => &[(WorkloadOp::Read, 50), (WorkloadOp::Store, 50)],
            Workload::YcsbB => &[(WorkloadOp::Read, 95), (WorkloadOp::Store, 5)],
            Workload::YcsbD => &[(WorkloadOp::Read, 95), (WorkloadOp::Insert, 5)],
            Workload::YcsbE => &[(WorkloadOp::List, 95), (WorkloadOp::Insert, 5)],
            Workload::YcsbF => &[(WorkloadOp::Read, 50), (WorkloadOp::ReadModifyWrite, 50)],
        }
    }

    /// Its default key distribution; `None` if it takes keys in order, or in a random order each once.
    pub fn distribution(self) -> Option<KeyDistribution> {
        match self {
            Workload::FillSequential
            | Workload::FillUniqueRandom
            | Workload::ReadSequential
            | Workload::DeleteSequential
            | Workload::DeleteUniqueRandom => None,
            Workload::FillRandom
            | Workload::Overwrite
            | Workload::ReadRandom
            | Workload::ReadMissing
            | Workload::SeekRandom
            | Workload::ScanRandom
            | Workload::ReadWhileWriting
            | Workload::ScanWhileWriting
            | Workload::DeleteRandom => Some(KeyDistribution::Uniform),
            Workload::YcsbD => Some(KeyDistribution::Latest),
            Workload::YcsbA
            | Workload::YcsbB
            | Workload::YcsbC
            | Workload::YcsbE
            | Workload::YcsbF
            | Workload::YcsbW => Some(KeyDistribution::Zipf),
        }
    }

    /// Whether its mix includes an operation.
    pub fn includes(self, action: WorkloadOp) -> bool {
        self.mix().iter().any(|(kind, _)| *kind == action)
    }

    /// Whether it stores keys that need not exist before.
    pub fn is_fill(self) -> bool {
        matches!(self, Workload::FillSequential | Workload::FillRandom | Workload::FillUniqueRandom)
    }

    /// Whether one stream beside the others stores values.
    pub fn has_writer(self) -> bool {
        matches!(self, Workload::ReadWhileWriting | Workload::ScanWhileWriting)
    }

    /// Whether it reads values from any target.
    pub fn reads_values(self) -> bool {
        [WorkloadOp::Read, WorkloadOp::ReadMissing, WorkloadOp::ReadModifyWrite, WorkloadOp::Scan]
            .into_iter()
            .any(|action| self.includes(action))
    }
}

impl std::str::FromStr for Workload {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<Workload, UnknownName> {
        name_lookup::find_by_name("workload", text, &Workload::ALL, Workload::name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_to_workloads() {
        for workload in Workload::ALL {
            assert_eq!(workload.name().parse(), Ok(workload));
        }
        let error = "fillsec".parse::<Workload>().unwrap_err().to_string();
        assert!(error.contains("fillsec") && error.contains("fillseq"), "{error}");
    }

    #[test]
    fn every_mix_adds_up_to_100_percent() {
        for workload in Workload::ALL {
            assert_eq!(workload.mix().iter().map(|(_, percent)| percent).sum::<u64>(), 100, "{workload:?}");
        }
    }
}
