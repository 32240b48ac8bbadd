//! Peers: other stores under the same workloads, on a disk of this machine, in turns with ours.
//!
//! ```text
//!   round 1   ours fillseq, peer fillseq, ours readrandom, peer readrandom     a ratio is of two turns that are
//!   round 2   ours fillseq, ...                                                neighbours; its median is over rounds
//! ```
//! A peer's fill begins with an empty store; other workloads find what the last fill left, or, where there was none,
//! every key, stored beforehand without being measured. A peer runs, and has files, in a directory of its own that the
//! caller makes and removes. Every option that matters is given to it and told as it was ([`Baseline::account`]).
//!
//! # Layout
//! - [`baseline`]: what all of them have in common.
//! - [`rocksdb`]: RocksDB by its own `db_bench`: embedded.
//! - [`redis`]: Redis and Valkey: servers, by our own generator.
//! - [`resp`]: their protocol; `resp_worker`: the generator that speaks it.
//! - [`child_processes`]: processes that end with the run.
//! - [`compare`]: ratios and medians.

pub mod baseline;
pub mod child_processes;
pub mod compare;
pub mod redis;
pub mod resp;
pub(crate) mod resp_worker;
pub mod rocksdb;

pub use baseline::{Baseline, BaselineEnv, BaselineError, BaselineInfo, BaselineKind};

/// Creates the baseline of this kind. It starts no process before its first workload.
pub fn create(kind: BaselineKind, env: BaselineEnv) -> Box<dyn Baseline> {
    match kind {
        BaselineKind::RocksDb => Box::new(rocksdb::RocksDbBaseline::new(env)),
        BaselineKind::Redis | BaselineKind::Valkey => Box::new(redis::RedisBaseline::new(kind, env)),
    }
}
