//! One operation of a workload on an engine in this process: made, carried out, its answer checked.

use crate::op_generator::Operation;
use crate::runner::{Error, Shared};
use crate::workload::Action;
use octokv_base::{Buffer, Key, Pool, value_offset};
use octokv_engine::hash::FormatSettings;
use octokv_engine::{Delete, Engine, Put, PutMode};

/// What an operation came to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operated {
    /// Whether the key was there, or is now.
    pub found: bool,
    /// Value bytes that were moved.
    pub value_bytes: u64,
}

/// Carries out one operation.
///
/// # Errors
/// What the engine said, or that the value is a wrong one.
pub(crate) async fn operate(
    shared: &Shared,
    engine: &impl Engine,
    pool: &Pool,
    operation: Operation,
) -> Result<Operated, Error> {
    let Operation { action, index, .. } = operation;
    let (plan, workload) = (&shared.plan, shared.workload);
    match action {
        Action::Store | Action::Insert => {
            let value_bytes = put(shared, engine, pool, index).await?;
            if action == Action::Insert {
                shared.keys.added(index);
            }
            Ok(Operated { found: true, value_bytes })
        }
        Action::Read => get(shared, engine, plan.key(index), Some(index)).await,
        Action::ReadMissing => get(shared, engine, plan.missing_key(index), None).await,
        Action::ReadModifyWrite => {
            let read = get(shared, engine, plan.key(index), Some(index)).await?;
            let written = put(shared, engine, pool, index).await?;
            Ok(Operated { value_bytes: read.value_bytes + written, ..read })
        }
        Action::Delete => {
            let key = plan.key(index);
            let deleted = engine.delete(&key).await;
            let deleted = deleted.map_err(|fault| Error::Engine { workload, key, fault })?;
            Ok(Operated { found: deleted == Delete::Deleted, value_bytes: 0 })
        }
        Action::List => unreachable!("a run with an engine in this process lists no keys"),
    }
}

/// Stores the value of an index; gives its length.
async fn put(shared: &Shared, engine: &impl Engine, pool: &Pool, index: u64) -> Result<u64, Error> {
    let (plan, workload) = (&shared.plan, shared.workload);
    let (key, value_bytes) = (plan.key(index), plan.value_bytes(index));
    let from = value_offset(key.len());
    let to = from + value_bytes;
    // The pool has room for every stream; where a plan is larger, memory is.
    let mut record = pool.take(to).unwrap_or_else(|| Buffer::zeroed(to));
    shared.values.make(index, &mut record[from..to]);
    let put = engine.put(&key, PutMode::Upsert, record, value_bytes).await;
    let refused = |error| Err(Error::Command { workload, key: key.clone(), error });
    match put.map_err(|fault| Error::Engine { workload, key: key.clone(), fault })? {
        Put::Stored | Put::Exists | Put::NotFound => Ok(value_bytes as u64),
        Put::Full => refused(octokv_client::Error::CapacityExceeded),
        Put::TooLong => {
            let max = u64::from(value_bytes_max(plan.value_sizes.most()));
            refused(octokv_client::Error::ValueBytes { have: value_bytes as u64, max })
        }
    }
}

/// Reads a key; what it holds must be the value of `index`, or nothing at all.
async fn get(shared: &Shared, engine: &impl Engine, key: Key, index: Option<u64>) -> Result<Operated, Error> {
    let (plan, workload) = (&shared.plan, shared.workload);
    let got = engine.get(&key).await;
    let got = got.map_err(|fault| Error::Engine { workload, key: key.clone(), fault })?;
    let Some(value) = got else { return Ok(Operated { found: false, value_bytes: 0 }) };
    let value = value.as_bytes();
    let is_right = |index| value.len() == plan.value_bytes(index) && shared.values.is_right(index, value);
    if plan.verify && !index.is_some_and(is_right) {
        return Err(Error::Wrong { have_bytes: value.len(), key });
    }
    Ok(Operated { found: true, value_bytes: value.len() as u64 })
}

/// How a volume for values of this length is formatted.
pub(crate) fn format_settings(value_bytes: usize, seed: u64) -> FormatSettings {
    FormatSettings { value_bytes_max: value_bytes_max(value_bytes), seed, ..FormatSettings::default() }
}

fn value_bytes_max(value_bytes: usize) -> u32 {
    FormatSettings::default().value_bytes_max.max(u32::try_from(value_bytes).unwrap_or(u32::MAX))
}
