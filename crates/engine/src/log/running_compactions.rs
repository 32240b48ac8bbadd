//! The compactions that run, so that a log has one at a time.
//!
//! In: logs whose compaction begins. Out: turns, which end when they are dropped. Tested in `compaction_tests.rs`.

use super::log_place::LogKind;
use crate::sync::Mutex;

/// The compactions that run, on all cores.
pub(super) struct RunningCompactions(Mutex<Vec<(u32, LogKind)>>);

/// The right to compact a log. Dropping it ends it.
pub(super) struct CompactionTurn<'a> {
    running: &'a RunningCompactions,
    log: (u32, LogKind),
}

impl Default for RunningCompactions {
    fn default() -> RunningCompactions {
        RunningCompactions(Mutex::new(Vec::new()))
    }
}

impl RunningCompactions {
    /// Begins a compaction; `None` if the log is compacted already.
    pub(super) fn begin(&self, store: u32, log: LogKind) -> Option<CompactionTurn<'_>> {
        let mut running = self.0.lock();
        let log = (store, log);
        if running.contains(&log) {
            return None;
        }
        running.push(log);
        Some(CompactionTurn { running: self, log })
    }

    /// Whether none runs.
    pub(super) fn is_idle(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// The logs that are compacted.
    pub(super) fn list(&self) -> Vec<(u32, LogKind)> {
        self.0.lock().clone()
    }
}

impl Drop for CompactionTurn<'_> {
    fn drop(&mut self) {
        self.running.0.lock().retain(|&log| log != self.log);
    }
}
