//! Baselines: other stores under the same workloads, on a disk of this machine, alternating with ours.
//!
//! ```text
//!   round 1   ours fillseq, baseline fillseq, ours readrandom, baseline readrandom     a ratio is of one round,
//!   round 2   ours fillseq, ...                                                        the median over all rounds
//! ```
//! A fill starts with an empty store; other workloads run on the keys of the last fill or, without one, on all keys,
//! which are loaded before and not measured. A baseline runs, and has its files, in a directory of its own that the
//! caller creates and removes. Every relevant option is set explicitly and reported ([`Baseline::info`]).
//!
//! # Layout
//! - [`baseline`]: the trait, its environment, its report and its errors.
//! - [`rocksdb`]: RocksDB by its own `db_bench`: embedded.
//! - [`redis`]: Redis and Valkey: servers under our load generator.
//! - [`resp`]: their protocol; `resp_worker`: the load generator for it.
//! - [`child_processes`]: processes that end with the run.
//! - [`compare`]: ratios and medians.

pub mod baseline;
pub mod child_processes;
pub mod compare;
pub mod redis;
pub mod resp;
pub(crate) mod resp_worker;
pub mod rocksdb;

pub use baseline::{Baseline, BaselineEnv, BaselineError, BaselineInfo, BaselineKind, EmbeddedOptions};

/// Creates the baseline of this kind. It starts no process before its first workload.
pub fn create(kind: BaselineKind, env: BaselineEnv) -> Box<dyn Baseline> {
    match kind {
        BaselineKind::RocksDb => Box::new(rocksdb::RocksDbBaseline::new(env)),
        BaselineKind::Redis | BaselineKind::Valkey => Box::new(redis::RedisBaseline::new(kind, env)),
    }
}
