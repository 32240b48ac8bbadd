//! The time to open a volume with many different keys after the process that stored them was killed.
//!
//! ```text
//!   child     fill in random order, each key once ─▶ prints READY_LINE ─▶ waits
//!   parent    waits for the line ─▶ SIGKILL ─▶ opens (timed) ─▶ reads some keys
//! ```
//! What the journal has and memtables had is replayed: the child writes no final checkpoint.

use super::{MeasurementError, MeasurementSetup, tree_of};
use crate::Workload;
use crate::child_process::ChildProcess;
use serde::Serialize;
use std::fmt;
use std::process::Command;
use std::time::Duration;

/// What the child prints when every key is stored.
pub const READY_LINE: &str = "stored";
/// Keys that are read after the opening, at most.
const READS_MAX: u64 = 100_000;
/// The longest that a child may take.
const FILL_LIMIT: Duration = Duration::from_secs(7200);
/// The file of the volume.
const FILE: &str = "open-after-kill";

/// Sizes of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct OpenAfterKillConfig {
    /// Number of different keys.
    pub keys: u64,
    /// Bytes of each value.
    pub value_bytes: usize,
    /// Bytes of the file of the volume.
    pub file_bytes: u64,
}

/// The result.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct OpenAfterKillResult {
    /// Number of different keys.
    pub keys: u64,
    /// Seconds from the begin of the opening to the end of recovery.
    pub open_s: f64,
    /// Tables of the tree after it.
    pub tables: u64,
    /// Bytes of these tables.
    pub table_bytes: u64,
    /// Bytes of the memtables, whose keys were replayed.
    pub memtable_bytes: u64,
    /// Keys that were read afterwards; all were found, with their values.
    pub read_keys: u64,
}

/// Stores every key once: what the child does before it prints [`READY_LINE`]. Returns puts per second. The volume is not closed.
///
/// # Errors
/// A failure of files or the engine.
pub fn fill(setup: &MeasurementSetup, config: &OpenAfterKillConfig) -> Result<f64, MeasurementError> {
    let OpenAfterKillConfig { keys, value_bytes, file_bytes } = *config;
    let engine = setup.open(FILE, file_bytes, true)?;
    let filled = setup.run(&engine, &setup.workload(Workload::FillUniqueRandom, keys, value_bytes, keys))?;
    Ok(filled.throughput_ops_s)
}

/// Runs the measurement; `child` is a command that runs [`fill`], prints [`READY_LINE`] on a line of its own and then waits.
///
/// # Errors
/// A child that cannot be started or ends; a failure of files or the engine; a key that is missing or has another value.
pub fn measure(
    setup: &MeasurementSetup,
    config: &OpenAfterKillConfig,
    child: &mut Command,
) -> Result<OpenAfterKillResult, MeasurementError> {
    let invalid = |text: String| MeasurementError::Invalid(text);
    let started = ChildProcess::spawn_with_stdout(child);
    let (mut process, output) = started.map_err(|error| invalid(format!("the child: {error}")))?;
    let ready = output.wait_line(FILL_LIMIT, |line| (line == READY_LINE).then_some(()));
    ready.map_err(|reason| invalid(format!("the child did not store the keys: {reason:?}")))?;
    process.kill().map_err(|error| invalid(format!("the child cannot be killed: {error}")))?;
    time_open(setup, config)
}

/// Opens the volume, and reads keys of it.
///
/// # Errors
/// As for [`measure`].
pub fn time_open(
    setup: &MeasurementSetup,
    config: &OpenAfterKillConfig,
) -> Result<OpenAfterKillResult, MeasurementError> {
    let OpenAfterKillConfig { keys, value_bytes, file_bytes } = *config;
    let now = setup.platform.now;
    let start = now();
    let engine = setup.open(FILE, file_bytes, true)?;
    let open_s = now().since(start).as_secs_f64();
    let tree = tree_of(&engine.statistics());
    let read_keys = keys.min(READS_MAX);
    let reads = setup.workload(Workload::ReadRandom, keys, value_bytes, read_keys);
    let read = setup.run(&engine, &reads)?;
    engine.close()?;
    if read.not_found > 0 {
        return Err(MeasurementError::Invalid(format!("{} of {read_keys} keys are lost", read.not_found)));
    }
    Ok(OpenAfterKillResult {
        keys,
        open_s,
        tables: tree.levels.iter().map(|level| level.tables).sum(),
        table_bytes: tree.levels.iter().map(|level| level.bytes).sum(),
        memtable_bytes: tree.memtable_bytes,
        read_keys,
    })
}

impl fmt::Display for OpenAfterKillResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OpenAfterKillResult { keys, open_s, tables, table_bytes, memtable_bytes, read_keys } = self;
        writeln!(f, "open after a kill: {open_s:.3} s with {keys} different keys")?;
        write!(f, "{tables} tables of {table_bytes} B, memtables {memtable_bytes} B; ")?;
        write!(f, "{read_keys} keys read and verified")
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_setup;
    use super::*;
    use crate::temporary_directory::temporary_directory;

    const CONFIG: OpenAfterKillConfig =
        OpenAfterKillConfig { keys: 3_000, value_bytes: 64, file_bytes: 32 << 20 };

    #[test]
    fn a_volume_that_was_not_closed_opens_with_every_key() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        let setup = test_setup(directory.path());
        assert!(fill(&setup, &CONFIG).expect("fills") > 0.0);
        // The child here only says that it has filled.
        let mut child = Command::new("sh");
        child.args(["-c", &format!("echo {READY_LINE}; exec sleep 1000")]);
        let result = measure(&setup, &CONFIG, &mut child).expect("measures");
        assert_eq!((result.keys, result.read_keys), (3_000, 3_000));
        assert!(result.open_s > 0.0 && result.to_string().contains("3000 different keys"));
    }

    #[test]
    fn a_child_that_ends_and_keys_that_are_missing_are_errors() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        let setup = test_setup(directory.path());
        let ended = measure(&setup, &CONFIG, &mut Command::new("true")).expect_err("nothing is stored");
        assert!(ended.to_string().contains("did not store"), "{ended}");
        let missing = time_open(&setup, &CONFIG).expect_err("the volume is empty");
        assert!(missing.to_string().contains("are lost"), "{missing}");
    }
}
