//! Write and space amplification after every key of a volume has been overwritten several times, in another random order each time.
//!
//! ```text
//!   fill in order ─▶ settle ─▶ overwrite every key, `passes` times ─▶ at the end ─▶ settle ─▶ settled
//!   write amplification   bytes that the process sent to the device while it overwrote (and settled) ÷ bytes of keys and values that were overwritten
//!   space amplification   bytes of the space that are taken ÷ bytes of the keys and values that exist
//! ```
//! The kernel counts the bytes that the process writes to devices ([`octokv_sys::process::device_bytes_written`]), so the process must write only to the volume. The engine's own counts say which part are flushes, compactions and moved values; the rest are records of values, the journal and checkpoints.

use super::{KEY_BYTES, MeasurementError, MeasurementSetup, mib, tree_of};
use crate::Workload;
use crate::local_engine::LocalEngine;
use octokv_sys::process::device_bytes_written;
use serde::Serialize;
use std::fmt;

/// Sizes of the measurement.
#[derive(Clone, Copy, Debug)]
pub struct AmplificationConfig {
    /// Bytes of all keys and values.
    pub data_bytes: u64,
    /// Bytes of each value.
    pub value_bytes: usize,
    /// Bytes of the file of the volume.
    pub file_bytes: u64,
    /// How often every key is overwritten.
    pub passes: u64,
}

/// Amplifications of one moment, and the bytes that they follow from.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Amplification {
    /// Bytes written per byte of users; `None` if the kernel does not count them.
    pub write: Option<f64>,
    /// Bytes of the data area that are taken, per byte of users.
    pub space: f64,
    /// The same, with the areas of fixed size: superblock, journal and checkpoints.
    pub space_with_fixed: f64,
    /// Bytes that the process wrote since the first overwrite.
    pub device_bytes: Option<u64>,
    /// Tables that flushes wrote since then, in bytes.
    pub flushed_bytes: u64,
    /// Tables that compactions wrote since then, in bytes.
    pub compacted_bytes: u64,
    /// Records of values that compactions moved since then, in bytes.
    pub moved_bytes: u64,
    /// Bytes of the data area that are taken.
    pub used_bytes: u64,
}

/// The result for values of one length.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct AmplificationResult {
    /// Bytes of each value.
    pub value_bytes: usize,
    /// Number of keys.
    pub keys: u64,
    /// Bytes of keys and values that were overwritten.
    pub overwritten_bytes: u64,
    /// Overwrites per second.
    pub overwrite_ops_s: f64,
    /// Bytes written per byte of users by the fill and its background work.
    pub fill_write: Option<f64>,
    /// Directly after the last overwrite.
    pub at_end: Amplification,
    /// When the background work had ended.
    pub settled: Amplification,
    /// Seconds that this took after the last overwrite.
    pub settle_s: f64,
}

/// Counters of written bytes and of allocated space at one moment.
struct Snapshot {
    device_bytes: Option<u64>,
    flushed_bytes: u64,
    compacted_bytes: u64,
    moved_bytes: u64,
    used_bytes: u64,
    capacity_bytes: u64,
}

impl Snapshot {
    fn of(engine: &LocalEngine) -> Snapshot {
        let statistics = engine.statistics();
        let tree = tree_of(&statistics);
        Snapshot {
            device_bytes: device_bytes_written(),
            flushed_bytes: tree.flushed_bytes,
            compacted_bytes: tree.compacted_bytes,
            moved_bytes: tree.moved_bytes,
            used_bytes: statistics.used_bytes,
            capacity_bytes: statistics.capacity_bytes,
        }
    }

    fn device_bytes_since(&self, before: &Snapshot) -> Option<u64> {
        Some(self.device_bytes?.saturating_sub(before.device_bytes?))
    }

    fn since(&self, before: &Snapshot, written: u64, live: u64, file: u64) -> Amplification {
        let ratio = |bytes: u64, of: u64| bytes as f64 / of as f64;
        let device_bytes = self.device_bytes_since(before);
        let fixed_bytes = file - self.capacity_bytes;
        Amplification {
            write: device_bytes.map(|bytes| ratio(bytes, written)),
            space: ratio(self.used_bytes, live),
            space_with_fixed: ratio(self.used_bytes + fixed_bytes, live),
            device_bytes,
            flushed_bytes: self.flushed_bytes - before.flushed_bytes,
            compacted_bytes: self.compacted_bytes - before.compacted_bytes,
            moved_bytes: self.moved_bytes - before.moved_bytes,
            used_bytes: self.used_bytes,
        }
    }
}

/// Runs the measurement.
///
/// # Errors
/// A failure of files or the engine; a volume that is too small.
pub fn measure(
    setup: &MeasurementSetup,
    config: &AmplificationConfig,
) -> Result<AmplificationResult, MeasurementError> {
    let AmplificationConfig { data_bytes, value_bytes, file_bytes, passes } = *config;
    let pair_bytes = (KEY_BYTES + value_bytes) as u64;
    let keys = (data_bytes / pair_bytes).max(1);
    let live_bytes = keys * pair_bytes;
    let engine = setup.open(&format!("amplification-{value_bytes}"), file_bytes, true)?;
    let empty = Snapshot::of(&engine);
    setup.run(&engine, &setup.workload(Workload::FillSequential, keys, value_bytes, keys))?;
    setup.settle(&engine)?;
    let filled = Snapshot::of(&engine);
    let overwrites = setup.workload(Workload::FillUniqueRandom, keys, value_bytes, passes * keys);
    let overwritten = setup.run(&engine, &overwrites)?;
    let at_end = Snapshot::of(&engine);
    let settle_s = setup.settle(&engine)?.as_secs_f64();
    let settled = Snapshot::of(&engine);
    engine.close()?;
    let overwritten_bytes = passes * live_bytes;
    let since = |snapshot: &Snapshot| snapshot.since(&filled, overwritten_bytes, live_bytes, file_bytes);
    Ok(AmplificationResult {
        value_bytes,
        keys,
        overwritten_bytes,
        overwrite_ops_s: overwritten.throughput_ops_s,
        fill_write: filled.device_bytes_since(&empty).map(|bytes| bytes as f64 / live_bytes as f64),
        at_end: since(&at_end),
        settled: since(&settled),
        settle_s,
    })
}

impl fmt::Display for AmplificationResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AmplificationResult { value_bytes, keys, overwrite_ops_s, settle_s, .. } = self;
        writeln!(f, "amplification: {keys} keys of {value_bytes} B, {overwrite_ops_s:.0} overwrites/s")?;
        let optional = |number: Option<f64>| number.map_or("?".to_owned(), |number| format!("{number:.2}"));
        writeln!(f, "fill                  write {}", optional(self.fill_write))?;
        for (name, it) in [("at the end", &self.at_end), ("settled", &self.settled)] {
            write!(f, "{name:<22}write {}, space {:.2}", optional(it.write), it.space)?;
            write!(f, " ({:.2} with fixed areas)", it.space_with_fixed)?;
            let parts = [it.device_bytes.unwrap_or(0), it.flushed_bytes, it.compacted_bytes, it.moved_bytes];
            let [device, flushed, compacted, moved] = parts.map(mib);
            writeln!(
                f,
                "; MiB: written {device:.0}, of it flushed {flushed:.0}, compacted {compacted:.0}, moved {moved:.0}"
            )?;
        }
        write!(f, "settled after {settle_s:.1} s")
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_setup;
    use super::*;
    use crate::temporary_directory::temporary_directory;

    #[test]
    fn amplifications_are_at_least_one_and_their_parts_add_up() {
        let directory = temporary_directory("octokv-bench-").expect("a directory");
        for value_bytes in [100, 8192] {
            let config =
                AmplificationConfig { data_bytes: 2 << 20, value_bytes, file_bytes: 64 << 20, passes: 2 };
            let result = measure(&test_setup(directory.path()), &config).expect("measures");
            assert_eq!(result.overwritten_bytes, 2 * result.keys * (KEY_BYTES + value_bytes) as u64);
            for it in [result.at_end, result.settled] {
                assert!(it.space_with_fixed > it.space, "{result:?}");
                // Of a file in memory the kernel counts nothing.
                if let Some(device_bytes) = it.device_bytes.filter(|bytes| *bytes > 0) {
                    let parts = it.flushed_bytes + it.compacted_bytes + it.moved_bytes;
                    assert!(device_bytes >= parts.max(result.overwritten_bytes), "{result:?}");
                }
            }
            assert!(result.to_string().contains("settled"));
        }
    }
}
