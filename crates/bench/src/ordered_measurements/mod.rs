//! Measurements of the ordered engine that take more than one workload: the goals that no single throughput shows.
//!
//! ```text
//!   seek_after_deletes        fill ─▶ delete a range ─▶ seek ─▶ wait ─▶ seek      beside a volume that never had the range
//!   scan_during_collection    fill, overwrite a part ─▶ scan, quiet ─▶ scan beside a writer: collecting, and without compaction
//!   amplification             fill ─▶ every key three more times ─▶ settle         bytes written and occupied, over those of users
//!   open_after_kill           another process fills and is killed ─▶ open          seconds to the first operation
//! ```
//! In: a [`MeasurementSetup`] and sizes. Out: a result that is printed as a table and serialized. Each makes volumes of its own in files of the setup's directory. These
//! are benchmarks, run by `cargo run --release -p octokv-bench --example ordered_measurements`; the tests run them with tiny sizes and check no time.

pub mod amplification;
pub mod open_after_kill;
pub mod scan_during_collection;
pub mod seek_after_deletes;

use crate::config::BenchConfig;
use crate::error::BenchError;
use crate::local_engine::{LocalEngine, LocalVolumeConfig};
use crate::platform::GeneratorPlatform;
use crate::runner::run_local_engine;
use crate::size_distribution::SizeDistribution;
use crate::workload_result::WorkloadResult;
use crate::{StopCondition, Workload};
use octokv_base::Nanos;
use octokv_engine::{
    Durability, EngineKind, EngineStatistics, FormatConfig, OpenConfig, TreeStatistics, WallClock,
};
use octokv_runtime::{DeviceDriver, Polling};
use octokv_sys::clock;
use octokv_sys::file::{self, DeviceOpenError};
use std::path::PathBuf;
use std::sync::Arc;

/// Device operations in flight per core, as in a node.
const DEVICE_DEPTH: usize = 256;
/// Buffer memory of each core in bytes, as in a node.
const POOL_BYTES: usize = 256 << 20;
/// Interval in which the background work is looked at.
const SETTLE_POLL_INTERVAL: Nanos = Nanos::from_millis(50);
/// Background work that changes nothing for so long has ended.
const SETTLED_AFTER: Nanos = Nanos::from_secs(5);
/// Background work that has not ended after so long never will.
const SETTLE_LIMIT: Nanos = Nanos::from_secs(1800);
/// Bytes of every key.
const KEY_BYTES: usize = 16;

/// What all measurements have in common.
#[derive(Clone)]
pub struct MeasurementSetup {
    /// Where the files of the volumes go: a directory on a file system with direct I/O.
    pub directory: PathBuf,
    /// Seed of key choice and values.
    pub seed: u64,
    /// Reactors of the engine, each with a thread.
    pub cores: usize,
    /// Operations in flight, over all cores.
    pub streams: usize,
    /// Memory for blocks of tables, in bytes.
    pub cache_bytes: u64,
    /// How idle reactors wait.
    pub polling: Polling,
    /// Clock and threads.
    pub platform: GeneratorPlatform,
}

/// Why a measurement failed.
#[derive(Debug, thiserror::Error)]
pub enum MeasurementError {
    /// The file of a volume cannot be opened.
    #[error("{0}: {1}")]
    File(PathBuf, DeviceOpenError),
    /// The engine or a workload failed.
    #[error(transparent)]
    Bench(#[from] BenchError),
    /// The measurement did not measure what it is for.
    #[error("{0}")]
    Invalid(String),
}

impl MeasurementSetup {
    /// The configuration of a workload over `keys` keys with values of one length, which ends after `operations`.
    fn workload(&self, workload: Workload, keys: u64, value_bytes: usize, operations: u64) -> BenchConfig {
        BenchConfig {
            workloads: vec![workload],
            key_sizes: SizeDistribution::Fixed(KEY_BYTES),
            value_sizes: SizeDistribution::Fixed(value_bytes),
            keys,
            threads: self.streams,
            stop: StopCondition::Operations(operations),
            seed: self.seed,
            ..BenchConfig::default()
        }
    }

    fn run(&self, engine: &Arc<LocalEngine>, config: &BenchConfig) -> Result<WorkloadResult, BenchError> {
        let cores = vec![None; self.cores];
        let mut results = run_local_engine(config, engine, &cores, self.polling, self.platform)?;
        Ok(results.remove(0))
    }

    /// Opens the volume in a file of so many bytes, which is formatted if it is new. Without `compacts` nothing is compacted or collected in the background.
    fn open(
        &self,
        name: &str,
        file_bytes: u64,
        compacts: bool,
    ) -> Result<Arc<LocalEngine>, MeasurementError> {
        let path = self.directory.join(name);
        let file = file::open_device(&path, Some(file_bytes), true);
        let file = file.map_err(|error| MeasurementError::File(path, error))?;
        let open = OpenConfig {
            durability: Durability::PowerSafe,
            cores: self.cores,
            cache_bytes: self.cache_bytes,
            prepare_bytes: 0,
            compact_bytes_per_second: if compacts { u64::MAX } else { 0 },
            tree: OpenConfig::TREE,
            swap_gap: OpenConfig::SWAP_GAP,
            clock: WallClock::new(clock::wall).with_monotonic(clock::now),
            tokens: None,
        };
        let config = LocalVolumeConfig {
            format: FormatConfig { engine: EngineKind::Lsm, seed: self.seed, ..FormatConfig::default() },
            open,
            driver: DeviceDriver::Auto,
            device_depth: DEVICE_DEPTH,
            drive: None,
            pool_bytes: POOL_BYTES,
            now: self.platform.now,
        };
        Ok(Arc::new(LocalEngine::open(file, config, false)?))
    }

    /// Waits until the background work of a volume has ended. Returns how long that took, without the time in which nothing changed any more.
    fn settle(&self, engine: &LocalEngine) -> Result<Nanos, MeasurementError> {
        let settled = engine.run_task(self.polling, async |_, handle| {
            let start = handle.now();
            let (mut changed_at, mut last) = (start, activity_of(&engine.statistics()));
            while handle.now().since(changed_at) < SETTLED_AFTER {
                handle.sleep(SETTLE_POLL_INTERVAL).await;
                let current = activity_of(&engine.statistics());
                if current != last {
                    (changed_at, last) = (handle.now(), current);
                }
                if handle.now().since(start) > SETTLE_LIMIT {
                    return None;
                }
            }
            Some(changed_at.since(start))
        })?;
        settled.ok_or_else(|| MeasurementError::Invalid("the background work does not end".to_owned()))
    }
}

/// What changes while a volume flushes, compacts or collects.
fn activity_of(statistics: &EngineStatistics) -> [u64; 6] {
    let tree = tree_of(statistics);
    let TreeStatistics { flushes, compactions, compacted_bytes, moved_bytes, pinned_bytes, .. } = tree;
    [statistics.used_bytes, flushes, compactions, compacted_bytes, moved_bytes, pinned_bytes]
}

fn tree_of(statistics: &EngineStatistics) -> TreeStatistics {
    statistics.tree.expect("the ordered engine has a tree")
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
fn test_setup(directory: &std::path::Path) -> MeasurementSetup {
    MeasurementSetup {
        directory: directory.to_owned(),
        seed: 7,
        cores: 1,
        streams: 16,
        cache_bytes: 1 << 20,
        polling: Polling::Sleep,
        platform: GeneratorPlatform {
            now: clock::now,
            spawn: |_, body| octokv_sys::thread::spawn("octokv-load", body).map(drop),
        },
    }
}
