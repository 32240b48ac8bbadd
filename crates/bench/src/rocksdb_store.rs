//! RocksDB in this process, by its shared library: the same load generator, keys, distributions and checks as an engine of ours, where
//! [`crate::baselines::rocksdb`] runs its own `db_bench`, which has neither Zipf's distribution nor YCSB's mixes.
//!
//! ```text
//!  one OS thread per operation in flight ─▶ rocksdb_put (synced), rocksdb_get_pinned ─▶ files in a directory
//! ```
//! Memory: half of the budget is the block cache, with the blocks of indexes and filters; the rest are four memtables, of which two may
//! be full before writers wait, and what flushes and compactions buffer. Indexes and filters are in partitions: whole
//! ones of a table file would each take a tenth of a small cache. Reads, flushes and compactions use direct I/O.

use crate::blocking_streams::run_blocking_stream;
use crate::engine_op::EngineOpResult;
use crate::error::BenchError;
use crate::op_generator::Operation;
use crate::recorder::Recorder;
use crate::workload::WorkloadOp;
use crate::workload_state::WorkloadState;
use octokv_base::Key;
use octokv_sys::rocksdb_library::{RocksDb, RocksDbError};
use std::path::{Path, PathBuf};

/// Bits per key of the filters, as in RocksDB's own benchmarks.
const FILTER_BITS: u32 = 10;
/// The smallest memtable: less, and tables of a few blocks would be written.
const MEMTABLE_BYTES_MIN: u64 = 256 << 10;

/// An open database, and how it is used.
pub struct RocksDbStore {
    database: RocksDb,
    directory: PathBuf,
    options: String,
    /// Whether a write is synced before it counts.
    sync: bool,
}

/// RocksDB's options for a budget of memory.
pub fn options_for_memory(memory_bytes: u64) -> String {
    let memtable = (memory_bytes / 16).max(MEMTABLE_BYTES_MIN);
    let table_file = (memory_bytes / 4).clamp(2 << 20, 64 << 20);
    let options = [
        "compression=kNoCompression".to_owned(),
        "use_direct_reads=true".to_owned(),
        "use_direct_io_for_flush_and_compaction=true".to_owned(),
        "max_background_jobs=2".to_owned(),
        "max_open_files=1000".to_owned(),
        "level_compaction_dynamic_level_bytes=true".to_owned(),
        "optimize_filters_for_hits=true".to_owned(),
        "stats_dump_period_sec=0".to_owned(),
        "keep_log_file_num=1".to_owned(),
        "compaction_readahead_size=262144".to_owned(),
        "max_write_buffer_number=4".to_owned(),
        format!("writable_file_max_buffer_size={}", (memory_bytes / 32).clamp(64 << 10, 1 << 20)),
        format!("write_buffer_size={memtable}"),
        format!("target_file_size_base={table_file}"),
        format!("max_bytes_for_level_base={}", 4 * table_file),
        format!(
            "block_based_table_factory={{block_size=4096;block_cache={{capacity={};num_shard_bits=2}};\
             cache_index_and_filter_blocks=true;pin_top_level_index_and_filter=false;partition_filters=true;\
             index_type=kTwoLevelIndexSearch;filter_policy=bloomfilter:{FILTER_BITS}:false}}",
            memory_bytes / 2
        ),
    ];
    options.join(";")
}

impl RocksDbStore {
    /// Opens the database in a directory, or creates it.
    ///
    /// # Errors
    /// As for [`RocksDb::open`].
    pub fn open(directory: &Path, options: String, sync: bool) -> Result<RocksDbStore, RocksDbError> {
        let database = RocksDb::open(directory, &options)?;
        Ok(RocksDbStore { database, directory: directory.to_owned(), options, sync })
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// The options that it was opened with.
    pub fn options(&self) -> &str {
        &self.options
    }

    /// Whether writes are synced.
    pub fn is_synced(&self) -> bool {
        self.sync
    }

    /// Bytes of the indexes and filters of all tables, of which the block cache holds a part.
    pub fn index_bytes(&self) -> Option<u64> {
        index_bytes_of(&self.database.property(c"rocksdb.aggregated-table-properties")?)
    }

    fn run_op(
        &self,
        shared: &WorkloadState,
        buffer: &mut [u8],
        op: Operation,
    ) -> Result<EngineOpResult, BenchError> {
        let (config, index) = (&shared.config, op.index);
        match op.kind {
            WorkloadOp::Store | WorkloadOp::Insert => {
                let value_bytes = self.put(shared, buffer, index)?;
                if op.kind == WorkloadOp::Insert {
                    shared.keys.insert_completed(index);
                }
                Ok(EngineOpResult { found: true, value_bytes, pairs_read: 0 })
            }
            WorkloadOp::Read => self.get(shared, &config.key(index), Some(index)),
            WorkloadOp::ReadMissing => self.get(shared, &config.absent_key(index), None),
            WorkloadOp::ReadModifyWrite => {
                let read = self.get(shared, &config.key(index), Some(index))?;
                let written = self.put(shared, buffer, index)?;
                Ok(EngineOpResult { value_bytes: read.value_bytes + written, ..read })
            }
            WorkloadOp::Delete => {
                let key = config.key(index);
                let deleted = self.database.delete(key.as_bytes(), self.sync);
                deleted.map_err(|error| failed(shared, &key, error))?;
                Ok(EngineOpResult { found: true, value_bytes: 0, pairs_read: 0 })
            }
            WorkloadOp::Scan | WorkloadOp::List => {
                unreachable!("a run with RocksDB in this process has no lists or scans")
            }
        }
    }

    fn put(&self, shared: &WorkloadState, buffer: &mut [u8], index: u64) -> Result<u64, BenchError> {
        let (key, value_bytes) = (shared.config.key(index), shared.config.value_bytes(index));
        let value = &mut buffer[..value_bytes];
        shared.values.fill(index, value);
        let stored = self.database.put(key.as_bytes(), value, self.sync);
        stored.map_err(|error| failed(shared, &key, error))?;
        Ok(value_bytes as u64)
    }

    fn get(
        &self,
        shared: &WorkloadState,
        key: &Key,
        index: Option<u64>,
    ) -> Result<EngineOpResult, BenchError> {
        let (config, values) = (&shared.config, &shared.values);
        let matches =
            |index, value: &[u8]| value.len() == config.value_bytes(index) && values.matches(index, value);
        let got = self.database.get(key.as_bytes(), |value| {
            (value.len(), !config.verify || index.is_some_and(|index| matches(index, value)))
        });
        match got.map_err(|error| failed(shared, key, error))? {
            None => Ok(EngineOpResult { found: false, value_bytes: 0, pairs_read: 0 }),
            Some((have, true)) => Ok(EngineOpResult { found: true, value_bytes: have as u64, pairs_read: 0 }),
            Some((have_bytes, false)) => Err(BenchError::WrongValue { have_bytes, key: key.clone() }),
        }
    }
}

fn failed(shared: &WorkloadState, key: &Key, error: RocksDbError) -> BenchError {
    BenchError::RocksDb { workload: shared.workload, key: key.clone(), error }
}

/// The sizes of indexes and filters in RocksDB's text of table properties.
fn index_bytes_of(text: &str) -> Option<u64> {
    let size = |name: &str| -> Option<u64> {
        let field = text.split(';').map(str::trim).find(|field| field.starts_with(name))?;
        field.rsplit_once('=')?.1.parse().ok()
    };
    Some(size("index block size")? + size("filter block size")?)
}

/// Runs one stream of a workload on this thread.
pub(crate) fn run_worker(
    shared: &WorkloadState,
    store: &RocksDbStore,
    number: usize,
) -> Result<Recorder, BenchError> {
    let mut buffer = vec![0; shared.config.value_sizes.max_bytes()];
    run_blocking_stream(shared, number, |op| store.run_op(shared, &mut buffer, op), |_, _| ())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{BenchConfig, StopCondition};
    use crate::platform::GeneratorPlatform;
    use crate::runner::run;
    use crate::system_under_test::SystemUnderTest;
    use crate::temporary_directory::temporary_directory;
    use crate::workload::Workload;
    use crate::workload_state::TargetNode;
    use octokv_client::ClientConfig;
    use octokv_runtime::Polling;
    use octokv_sys::{clock, thread};
    use std::net::SocketAddr;
    use std::sync::Arc;

    const PLATFORM: GeneratorPlatform =
        GeneratorPlatform { now: clock::now, spawn: |_, body| thread::spawn("octokv-load", body).map(drop) };
    const KEYS: u64 = 2000;

    #[test]
    fn workloads_run_and_values_are_checked() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        let open = || {
            let store =
                RocksDbStore::open(directory.path(), options_for_memory(4 << 20), true).expect("opens");
            SystemUnderTest::RocksDb(Arc::new(store))
        };
        let all = [Workload::FillSequential, Workload::YcsbA, Workload::YcsbD, Workload::YcsbF];
        let config = BenchConfig {
            workloads: all.to_vec(),
            value_sizes: crate::SizeDistribution::Uniform { min: 100, max: 600 },
            keys: KEYS,
            threads: 4,
            stop: StopCondition::Operations(KEYS),
            ..BenchConfig::default()
        };
        let node = TargetNode {
            name: String::new(),
            address: SocketAddr::from(([0, 0, 0, 0], 0)),
            client: ClientConfig::default(),
        };
        let run_on = |system: &SystemUnderTest, config: &BenchConfig| {
            run(config, system, std::slice::from_ref(&node), &[None], Polling::Sleep, PLATFORM, |_| ())
        };
        let system = open();
        for result in run_on(&system, &config).expect("runs") {
            assert_eq!((result.operations, result.not_found), (KEYS, 0), "{}", result.workload);
            assert!(result.cpu_us_per_operation.is_some_and(|us| us > 0.1), "{result:?}");
        }
        drop(system);
        let system = open();
        let reads = BenchConfig { workloads: vec![Workload::ReadRandom], ..config };
        let read = run_on(&system, &reads).expect("runs").remove(0);
        assert_eq!((read.not_found, read.verified), (0, true));
        assert!(read.index_bytes.is_some_and(|bytes| bytes > KEYS), "{:?}", read.index_bytes);
        let missing = BenchConfig { workloads: vec![Workload::ReadMissing], ..reads.clone() };
        assert_eq!(run_on(&system, &missing).expect("runs")[0].not_found, KEYS);
        let error =
            run_on(&system, &BenchConfig { seed: 2, ..reads }).expect_err("other values are stored").error;
        assert!(matches!(error, BenchError::WrongValue { .. }), "{error}");
    }
}
