//! Latencies of scans while values are overwritten and collected, beside those on the quiet volume.
//!
//! ```text
//!   fill in order ─▶ overwrite some keys ─▶ settle
//!     ─▶ quiet            scans alone
//!     ─▶ not compacting   scans beside a writer; flushes, but no compaction and so no collection
//!     ─▶ collecting       scans beside a writer at the same rate, from when collection has begun
//! ```
//! Values are long enough for value segments. The statistics of the engine say how many values each phase moved: a collecting phase that moved none is repeated, and
//! the measurement fails if that does not help, or if another phase moved some.

use super::{MeasurementError, MeasurementSetup, mib, tree_of};
use crate::local_engine::LocalEngine;
use crate::{BenchConfig, StopCondition, Workload};
use octokv_base::Nanos;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;

/// Rounds of the writer before the collecting phase, at most.
const WARM_UPS_MAX: usize = 600;
/// The length of such a round.
const WARM_UP: Nanos = Nanos::from_millis(500);
/// Repetitions of a collecting phase in which nothing was collected, at most.
const RETRIES_MAX: usize = 100;
/// The file of the volume.
const FILE: &str = "scan-during-collection";

/// Sizes of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct ScanConfig {
    /// Bytes of all values.
    pub data_bytes: u64,
    /// Bytes of each value: at least those from which on values lie in segments.
    pub value_bytes: usize,
    /// Bytes of the file of the volume.
    pub file_bytes: u64,
    /// Pairs of a scan.
    pub scan_length: u32,
    /// Values stored per second beside the scans.
    pub write_rate: f64,
    /// Length of each phase.
    pub phase: Nanos,
}

/// The scans of one phase.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ScanPhase {
    /// Number of scans.
    pub scans: u64,
    /// Median, in microseconds.
    pub p50_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// 99.9th percentile.
    pub p99_9_us: f64,
    /// The longest.
    pub max_us: f64,
    /// Values stored beside them.
    pub writes_beside: u64,
    /// Values that compactions moved meanwhile.
    pub moved_values: u64,
    /// Their records, in bytes.
    pub moved_bytes: u64,
    /// Tables that compactions wrote meanwhile, in bytes.
    pub compacted_bytes: u64,
    /// Compactions that ended meanwhile.
    pub compactions: u64,
}

/// The result.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct ScanResult {
    /// Scans alone.
    pub quiet: ScanPhase,
    /// Beside a writer, without compaction.
    pub not_compacting: ScanPhase,
    /// Beside a writer, with collection.
    pub collecting: ScanPhase,
    /// The 99.9th percentile while collecting over the quiet one.
    pub over_quiet: f64,
    /// The same over that beside a writer without compaction.
    pub over_not_compacting: f64,
}

/// Runs the measurement.
///
/// # Errors
/// A failure of files or the engine; a phase in which values were moved, or not, against its purpose.
pub fn measure(setup: &MeasurementSetup, config: &ScanConfig) -> Result<ScanResult, MeasurementError> {
    let ScanConfig { data_bytes, value_bytes, file_bytes, .. } = *config;
    let keys = (data_bytes / value_bytes as u64).max(1);
    let engine = setup.open(FILE, file_bytes, true)?;
    setup.run(&engine, &setup.workload(Workload::FillSequential, keys, value_bytes, keys))?;
    // Segments are then of mixed ages, as in use.
    setup.run(&engine, &setup.workload(Workload::FillUniqueRandom, keys, value_bytes, keys * 6 / 10))?;
    setup.settle(&engine)?;
    let quiet = run_phase(setup, &engine, config, Workload::ScanRandom)?;
    engine.close()?;
    drop(engine);

    let engine = setup.open(FILE, file_bytes, false)?;
    let not_compacting = run_phase(setup, &engine, config, Workload::ScanWhileWriting)?;
    engine.close()?;
    drop(engine);

    let engine = setup.open(FILE, file_bytes, true)?;
    let mut warm_ups = 0;
    while tree_of(&engine.statistics()).moved_values == 0 {
        if warm_ups == WARM_UPS_MAX {
            return Err(MeasurementError::Invalid("collection does not begin".to_owned()));
        }
        warm_ups += 1;
        let warm_up = phase_config(setup, config, Workload::ScanWhileWriting, WARM_UP);
        setup.run(&engine, &warm_up)?;
    }
    let mut collecting = run_phase(setup, &engine, config, Workload::ScanWhileWriting)?;
    // Collection has pauses, in which garbage accumulates: a short phase may lie in one.
    for _ in 0..RETRIES_MAX {
        if collecting.moved_values > 0 {
            break;
        }
        collecting = run_phase(setup, &engine, config, Workload::ScanWhileWriting)?;
    }
    engine.close()?;
    if collecting.moved_values == 0 || quiet.moved_values + not_compacting.moved_values > 0 {
        let moved = [quiet, not_compacting, collecting].map(|phase| phase.moved_values);
        let text = format!("values moved while quiet, not compacting, collecting: {moved:?}");
        return Err(MeasurementError::Invalid(text));
    }
    Ok(ScanResult {
        quiet,
        not_compacting,
        collecting,
        over_quiet: collecting.p99_9_us / quiet.p99_9_us,
        over_not_compacting: collecting.p99_9_us / not_compacting.p99_9_us,
    })
}

fn phase_config(
    setup: &MeasurementSetup,
    config: &ScanConfig,
    workload: Workload,
    length: Nanos,
) -> BenchConfig {
    let keys = (config.data_bytes / config.value_bytes as u64).max(1);
    BenchConfig {
        stop: StopCondition::Time(length),
        scan_length: config.scan_length,
        write_rate: Some(config.write_rate),
        ..setup.workload(workload, keys, config.value_bytes, 1)
    }
}

fn run_phase(
    setup: &MeasurementSetup,
    engine: &Arc<LocalEngine>,
    config: &ScanConfig,
    workload: Workload,
) -> Result<ScanPhase, MeasurementError> {
    let before = tree_of(&engine.statistics());
    let result = setup.run(engine, &phase_config(setup, config, workload, config.phase))?;
    let after = tree_of(&engine.statistics());
    if result.not_found > 0 {
        return Err(MeasurementError::Invalid(format!("{} scans did not find their key", result.not_found)));
    }
    Ok(ScanPhase {
        scans: result.operations,
        p50_us: result.latency_us_p50,
        p99_us: result.latency_us_p99,
        p99_9_us: result.latency_us_p99_9,
        max_us: result.latency_us_max,
        writes_beside: result.writes_beside,
        moved_values: after.moved_values - before.moved_values,
        moved_bytes: after.moved_bytes - before.moved_bytes,
        compacted_bytes: after.compacted_bytes - before.compacted_bytes,
        compactions: after.compactions - before.compactions,
    })
}

impl fmt::Display for ScanResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "scans while values are collected")?;
        let head = ["scans", "p50 us", "p99 us", "p99.9 us", "max us", "writes", "moved MiB", "compactions"];
        write!(f, "{:<16}", "")?;
        head.iter().try_for_each(|column| write!(f, "{column:>12}"))?;
        writeln!(f)?;
        for (name, phase) in [
            ("quiet", &self.quiet),
            ("not compacting", &self.not_compacting),
            ("collecting", &self.collecting),
        ] {
            let ScanPhase { scans, p50_us, p99_us, p99_9_us, max_us, writes_beside, compactions, .. } = phase;
            write!(f, "{name:<16}{scans:>12}{p50_us:>12.0}{p99_us:>12.0}{p99_9_us:>12.0}{max_us:>12.0}")?;
            writeln!(f, "{writes_beside:>12}{:>12.0}{compactions:>12}", mib(phase.moved_bytes))?;
        }
        write!(f, "p99.9 while collecting over quiet: {:.2}; ", self.over_quiet)?;
        write!(f, "over not compacting: {:.2}", self.over_not_compacting)
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_setup;
    use super::*;
    use crate::temporary_directory::temporary_directory;

    #[test]
    fn values_are_moved_in_the_collecting_phase_alone() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        let config = ScanConfig {
            data_bytes: 8 << 20,
            value_bytes: 8192,
            file_bytes: 64 << 20,
            scan_length: 5,
            write_rate: 5_000.0,
            phase: Nanos::from_millis(600),
        };
        let result = measure(&test_setup(directory.path()), &config).expect("measures");
        assert!(result.collecting.moved_values > 0 && result.quiet.writes_beside == 0);
        assert!(result.not_compacting.writes_beside > 0 && result.over_quiet > 0.0);
        assert!(result.to_string().contains("collecting"));
    }
}
