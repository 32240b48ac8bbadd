//! One operation of a workload on an engine in this process: made, carried out, its answer checked.

use crate::data;
use crate::plan::Workload;
use crate::run::{Error, Shared};
use octokv_base::{Buffer, Pool, value_offset};
use octokv_engine::hash::FormatSettings;
use octokv_engine::{Delete, Engine, Put, PutMode};

/// Does what the workload does to the key of an index. True when the key was there, or is now.
///
/// # Errors
/// What the engine said, or that the value is a wrong one.
pub(crate) async fn operate(
    shared: &Shared,
    engine: &impl Engine,
    pool: &Pool,
    index: u64,
) -> Result<bool, Error> {
    let (plan, workload) = (&shared.plan, shared.workload);
    let key = data::key(index, plan.key_bytes);
    let failed = |fault| Error::Engine { workload, key: key.clone(), fault };
    let refused = |error| Error::Command { workload, key: key.clone(), error };
    match workload {
        Workload::FillSequential | Workload::FillRandom | Workload::Overwrite => {
            let from = value_offset(key.len());
            let to = from + plan.value_bytes;
            // The pool has room for every stream; where a plan is larger, memory is.
            let mut record = pool.take(to).unwrap_or_else(|| Buffer::zeroed(to));
            shared.values.make(index, &mut record[from..to]);
            let put = engine.put(&key, PutMode::Upsert, record, plan.value_bytes).await;
            match put.map_err(failed)? {
                Put::Stored | Put::Exists | Put::NotFound => Ok(true),
                Put::Full => Err(refused(octokv_client::Error::CapacityExceeded)),
                Put::TooLong => {
                    let (have, max) = (plan.value_bytes as u64, u64::from(value_bytes_max(plan.value_bytes)));
                    Err(refused(octokv_client::Error::ValueBytes { have, max }))
                }
            }
        }
        Workload::ReadRandom => {
            let Some(value) = engine.get(&key).await.map_err(failed)? else { return Ok(false) };
            let value = value.as_bytes();
            let right = value.len() == plan.value_bytes && shared.values.is_right(index, value);
            if plan.verify && !right {
                return Err(Error::Wrong { have_bytes: value.len(), key: key.clone() });
            }
            Ok(true)
        }
        Workload::DeleteRandom => Ok(engine.delete(&key).await.map_err(failed)? == Delete::Deleted),
    }
}

/// How a volume for values of this length is formatted.
pub(crate) fn format_settings(value_bytes: usize, seed: u64) -> FormatSettings {
    FormatSettings { value_bytes_max: value_bytes_max(value_bytes), seed, ..FormatSettings::default() }
}

fn value_bytes_max(value_bytes: usize) -> u32 {
    FormatSettings::default().value_bytes_max.max(u32::try_from(value_bytes).unwrap_or(u32::MAX))
}
