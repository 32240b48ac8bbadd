//! Seeks to the first of a range of keys that were all deleted: at once, after some seconds of background work, and on a volume that never had the range.
//!
//! ```text
//!   with deletes    seek ─▶ │ deleted keys, from the first │ other keys        finds the first of the others
//!   without                                       seek ─▶ │ other keys        finds the first
//! ```
//! Each seek creates an iterator, from a key below all others, and reads one pair, whose key is checked.

use super::{KEY_BYTES, MeasurementError, MeasurementSetup, tree_of};
use crate::error::BenchError;
use crate::local_engine::LocalEngine;
use crate::statistics::median;
use crate::{Workload, values};
use octokv_base::{Key, Nanos};
use octokv_engine::{AnyEngine, Engine, IteratorOptions, IteratorProgress, PairSink};
use octokv_sys::clock;
use serde::Serialize;
use std::fmt;

/// Sizes of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct SeekConfig {
    /// Keys that are stored and deleted, from the first on.
    pub deleted_keys: u64,
    /// Keys behind them, which stay.
    pub other_keys: u64,
    /// Bytes of each value.
    pub value_bytes: usize,
    /// Bytes of the file of each volume.
    pub file_bytes: u64,
    /// Time of background work between the seeks.
    pub wait: Nanos,
    /// Seeks at each time.
    pub seeks: usize,
}

/// Seeks at one time, and the tree that they met.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SeekTimes {
    /// The first of them, in ms.
    pub first_ms: f64,
    /// The median of all, in ms.
    pub median_ms: f64,
    /// The longest, in ms.
    pub max_ms: f64,
    /// Bytes of memtables.
    pub memtable_bytes: u64,
    /// Tables of all levels.
    pub tables: u64,
    /// Bytes of tables.
    pub table_bytes: u64,
}

/// The result.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct SeekResult {
    /// Seconds that the deletes took.
    pub delete_s: f64,
    /// Seeks directly after the last delete.
    pub at_once: SeekTimes,
    /// Seeks after the wait.
    pub after_wait: SeekTimes,
    /// The wait, in seconds.
    pub wait_s: f64,
    /// Seeks on the volume that never had the keys.
    pub never_stored: SeekTimes,
    /// The median after the wait over that without the keys.
    pub after_wait_ratio: f64,
}

/// Runs the measurement.
///
/// # Errors
/// A failure of files or the engine, or a seek that finds another key.
pub fn measure(setup: &MeasurementSetup, config: &SeekConfig) -> Result<SeekResult, MeasurementError> {
    let SeekConfig { deleted_keys, other_keys, value_bytes, file_bytes, wait, .. } = *config;
    let keys = deleted_keys + other_keys;
    let engine = setup.open("seek-with-deletes", file_bytes, true)?;
    setup.run(&engine, &setup.workload(Workload::FillSequential, keys, value_bytes, keys))?;
    setup.settle(&engine)?;
    let deletes = setup.workload(Workload::DeleteSequential, keys, value_bytes, deleted_keys);
    let deleted = setup.run(&engine, &deletes)?;
    if deleted.not_found > 0 {
        return Err(MeasurementError::Invalid(format!("{} keys were not stored", deleted.not_found)));
    }
    let first_left = values::key(deleted_keys, KEY_BYTES);
    let at_once = run_seeks(setup, &engine, Nanos::ZERO, config.seeks, &first_left)?;
    let after_wait = run_seeks(setup, &engine, wait, config.seeks, &first_left)?;
    engine.close()?;
    drop(engine);

    let engine = setup.open("seek-without-deletes", file_bytes, true)?;
    setup.run(&engine, &setup.workload(Workload::FillSequential, other_keys, value_bytes, other_keys))?;
    setup.settle(&engine)?;
    let never_stored = run_seeks(setup, &engine, Nanos::ZERO, config.seeks, &values::key(0, KEY_BYTES))?;
    engine.close()?;
    Ok(SeekResult {
        delete_s: deleted.elapsed_s,
        at_once,
        after_wait,
        wait_s: wait.as_secs_f64(),
        never_stored,
        after_wait_ratio: after_wait.median_ms / never_stored.median_ms,
    })
}

/// Lets the background work run for some time, and seeks beside it.
fn run_seeks(
    setup: &MeasurementSetup,
    engine: &LocalEngine,
    wait: Nanos,
    seeks: usize,
    expected: &Key,
) -> Result<SeekTimes, MeasurementError> {
    let times = engine.run_task(setup.polling, async |engine, handle| {
        handle.sleep(wait).await;
        let mut times = Vec::new();
        for _ in 0..seeks {
            let start = clock::now();
            let found = first_key(engine).await?;
            times.push(clock::now().since(start).as_secs_f64() * 1e3);
            if found.as_deref() != Some(expected.as_bytes()) {
                let found = found.map(|key| String::from_utf8_lossy(&key).into_owned());
                let text = format!("a seek found {found:?} and not {expected}");
                return Err(MeasurementError::Invalid(text));
            }
        }
        Ok(times)
    })??;
    let tree = tree_of(&engine.statistics());
    Ok(SeekTimes {
        first_ms: times[0],
        median_ms: median(&times).expect("there is a seek"),
        max_ms: times.iter().copied().fold(0.0, f64::max),
        memtable_bytes: tree.memtable_bytes,
        tables: tree.levels.iter().map(|level| level.tables).sum(),
        table_bytes: tree.levels.iter().map(|level| level.bytes).sum(),
    })
}

/// The first key that a new iterator yields, from a key on that is below all others.
async fn first_key(engine: &AnyEngine) -> Result<Option<Vec<u8>>, BenchError> {
    let lower = Key::new(b"0").expect("one byte");
    let failed = |error| BenchError::Engine { workload: Workload::ScanRandom, key: lower.clone(), error };
    let options = IteratorOptions { lower: Some(lower.clone()), ..IteratorOptions::default() };
    let iterator = engine.create_iterator(options).await.map_err(failed)?;
    let iterator = iterator.expect("there is one iterator at a time");
    let mut first = FirstKey(None);
    while first.0.is_none() {
        if engine.next_pairs(&iterator, &mut first).await.map_err(failed)? == IteratorProgress::AtEnd {
            break;
        }
    }
    Ok(first.0)
}

/// Receives one pair, of which it keeps the key.
struct FirstKey(Option<Vec<u8>>);

impl PairSink for FirstKey {
    fn has_space(&mut self, _: usize, _: usize) -> bool {
        self.0.is_none()
    }

    fn push(&mut self, key: &[u8], _: &[u8]) {
        self.0 = Some(key.to_vec());
    }
}

impl fmt::Display for SeekResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "seek after deletes ({:.1} s of deletes)", self.delete_s)?;
        let head = ["first ms", "median ms", "max ms", "memtables B", "tables", "tables B"];
        write!(f, "{:<22}", "")?;
        head.iter().try_for_each(|column| write!(f, "{column:>14}"))?;
        writeln!(f)?;
        let after = format!("after {} s", self.wait_s);
        for (name, times) in
            [("at once", &self.at_once), (&after, &self.after_wait), ("never stored", &self.never_stored)]
        {
            let SeekTimes { first_ms, median_ms, max_ms, memtable_bytes, tables, table_bytes } = times;
            write!(f, "{name:<22}{first_ms:>14.3}{median_ms:>14.3}{max_ms:>14.3}")?;
            writeln!(f, "{memtable_bytes:>14}{tables:>14}{table_bytes:>14}")?;
        }
        write!(f, "after the wait over never stored: {:.2}", self.after_wait_ratio)
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_setup;
    use super::*;
    use crate::temporary_directory::temporary_directory;

    #[test]
    fn a_seek_finds_the_first_key_behind_the_deleted_ones() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        let config = SeekConfig {
            deleted_keys: 3_000,
            other_keys: 200,
            value_bytes: 64,
            file_bytes: 32 << 20,
            wait: Nanos::from_millis(10),
            seeks: 3,
        };
        let result = measure(&test_setup(directory.path()), &config).expect("measures");
        for times in [result.at_once, result.after_wait, result.never_stored] {
            assert!(times.median_ms > 0.0 && times.median_ms <= times.max_ms, "{times:?}");
        }
        assert!(result.to_string().contains("never stored"));
    }
}
