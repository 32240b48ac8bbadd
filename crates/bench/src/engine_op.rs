//! One operation of a workload on an engine in this process: built, executed, its result checked.

use crate::error::BenchError;
use crate::op_generator::Operation;
use crate::scan_progress::ScanProgress;
use crate::workload::WorkloadOp;
use crate::workload_state::WorkloadState;
use octokv_base::{Buffer, BufferPool, Key};
use octokv_engine::FormatConfig;
use octokv_engine::{
    DeleteOutcome, Engine, IteratorOptions, IteratorProgress, PairSink, PutMode, PutOutcome,
};

/// Result of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineOpResult {
    /// Whether the key existed, or exists now.
    pub found: bool,
    /// Value bytes read and written.
    pub value_bytes: u64,
    /// Pairs that a scan read; 0 for other operations.
    pub pairs_read: u64,
}

/// Executes one operation.
///
/// # Errors
/// A failure of the engine, a full volume, or a wrong value.
pub(crate) async fn run_engine_op(
    shared: &WorkloadState,
    engine: &impl Engine,
    pool: &BufferPool,
    op: Operation,
) -> Result<EngineOpResult, BenchError> {
    let Operation { kind, index, .. } = op;
    let (config, workload) = (&shared.config, shared.workload);
    match kind {
        WorkloadOp::Store | WorkloadOp::Insert => {
            let value_bytes = put(shared, engine, pool, index).await?;
            if kind == WorkloadOp::Insert {
                shared.keys.insert_completed(index);
            }
            Ok(EngineOpResult { found: true, value_bytes, pairs_read: 0 })
        }
        WorkloadOp::Read => get(shared, engine, config.key(index), Some(index)).await,
        WorkloadOp::ReadMissing => get(shared, engine, config.absent_key(index), None).await,
        WorkloadOp::ReadModifyWrite => {
            let read = get(shared, engine, config.key(index), Some(index)).await?;
            let written = put(shared, engine, pool, index).await?;
            Ok(EngineOpResult { value_bytes: read.value_bytes + written, ..read })
        }
        WorkloadOp::Delete => {
            let key = config.key(index);
            let deleted = engine.delete(&key).await;
            let deleted = deleted.map_err(|error| BenchError::Engine { workload, key, error })?;
            Ok(EngineOpResult { found: deleted == DeleteOutcome::Deleted, value_bytes: 0, pairs_read: 0 })
        }
        WorkloadOp::Scan => scan(shared, engine, op).await,
        WorkloadOp::List => unreachable!("a run with an engine in this process lists no keys"),
    }
}

/// Reads pairs in order from the key of an operation on.
async fn scan(
    shared: &WorkloadState,
    engine: &impl Engine,
    op: Operation,
) -> Result<EngineOpResult, BenchError> {
    let (key, workload) = (shared.config.key(op.index), shared.workload);
    let failed = |error| BenchError::Engine { workload, key: key.clone(), error };
    let options = IteratorOptions { lower: Some(key.clone()), ..IteratorOptions::default() };
    let Some(iterator) = engine.create_iterator(options).await.map_err(failed)? else {
        let error = octokv_client::Error::TooManyIterators;
        return Err(BenchError::Command { workload, key, error });
    };
    let mut sink = ScanSink { shared, scan: ScanProgress::default(), failure: None };
    sink.scan.begin(key.as_bytes(), op.range_keys);
    while sink.scan.pairs_left() > 0 {
        let progress = engine.next_pairs(&iterator, &mut sink).await.map_err(failed)?;
        if let Some(error) = sink.failure {
            return Err(error);
        }
        if progress == IteratorProgress::AtEnd {
            break;
        }
    }
    let ScanProgress { found, value_bytes, pairs, .. } = sink.scan;
    Ok(EngineOpResult { found, value_bytes, pairs_read: u64::from(pairs) })
}

/// Receives and checks the pairs of a scan, as many as it needs.
struct ScanSink<'a> {
    shared: &'a WorkloadState,
    scan: ScanProgress,
    failure: Option<BenchError>,
}

impl PairSink for ScanSink<'_> {
    fn has_space(&mut self, _: usize, _: usize) -> bool {
        self.scan.pairs_left() > 0 && self.failure.is_none()
    }

    fn push(&mut self, key: &[u8], value: &[u8]) {
        self.failure = self.scan.receive(self.shared, key, value).err();
    }
}

/// Stores the value of an index and returns its length.
pub(crate) async fn put(
    shared: &WorkloadState,
    engine: &impl Engine,
    pool: &BufferPool,
    index: u64,
) -> Result<u64, BenchError> {
    let (config, workload) = (&shared.config, shared.workload);
    let (key, value_bytes) = (config.key(index), config.value_bytes(index));
    let from = engine.record_layout().value_offset(key.len());
    let to = from + value_bytes;
    // The pool has a buffer for every stream of usual configurations; larger ones allocate.
    let mut record = pool.take(to).unwrap_or_else(|| Buffer::zeroed(to));
    shared.values.fill(index, &mut record[from..to]);
    let put = engine.put(&key, PutMode::Upsert, record, value_bytes).await;
    let refused = |error| Err(BenchError::Command { workload, key: key.clone(), error });
    match put.map_err(|error| BenchError::Engine { workload, key: key.clone(), error })? {
        PutOutcome::Stored | PutOutcome::Exists | PutOutcome::NotFound => Ok(value_bytes as u64),
        PutOutcome::OtherVersion(_) | PutOutcome::NotNewer(_) => unreachable!("the put has no version"),
        PutOutcome::Full => refused(octokv_client::Error::CapacityExceeded),
        PutOutcome::TooLong => {
            let max = u64::from(value_bytes_max(config.value_sizes.max_bytes()));
            refused(octokv_client::Error::ValueLength { have: value_bytes as u64, max })
        }
    }
}

/// Reads a key and verifies its value: the value of `index`, or no value.
async fn get(
    shared: &WorkloadState,
    engine: &impl Engine,
    key: Key,
    index: Option<u64>,
) -> Result<EngineOpResult, BenchError> {
    let (config, workload) = (&shared.config, shared.workload);
    let got = engine.get(&key).await;
    let got = got.map_err(|error| BenchError::Engine { workload, key: key.clone(), error })?;
    let Some(value) = got else { return Ok(EngineOpResult { found: false, value_bytes: 0, pairs_read: 0 }) };
    let value = value.as_bytes();
    let matches = |index| value.len() == config.value_bytes(index) && shared.values.matches(index, value);
    if config.verify && !index.is_some_and(matches) {
        return Err(BenchError::WrongValue { have_bytes: value.len(), key });
    }
    Ok(EngineOpResult { found: true, value_bytes: value.len() as u64, pairs_read: 0 })
}

/// Format configuration of a volume for values of up to this length. The unit is the same on every device, so that results
/// are comparable.
pub(crate) fn format_config(value_bytes: usize, seed: u64) -> FormatConfig {
    let value_bytes_max = value_bytes_max(value_bytes);
    FormatConfig { unit_bytes: Some(4096), value_bytes_max, seed, ..FormatConfig::default() }
}

fn value_bytes_max(value_bytes: usize) -> u32 {
    FormatConfig::default().value_bytes_max.max(u32::try_from(value_bytes).unwrap_or(u32::MAX))
}
