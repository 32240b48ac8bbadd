//! The compactions that run, so that a log has one at a time, and the chunks of one window are not those of another.
//!
//! In: logs whose compaction begins, the chunks that their rounds may take. Out: turns, which end when they are dropped; what the others
//! may take. Tested below and in `compaction_tests.rs`.

use super::log_place::LogKind;
use crate::sync::Mutex;

/// The compactions that run, on all cores.
pub(super) struct RunningCompactions(Mutex<Vec<ActiveCompaction>>);

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ActiveCompaction {
    log: (u32, LogKind),
    /// The chunks that its round may take before it frees one.
    round_chunks: u64,
}

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
        if running.iter().any(|other| other.log == log) {
            return None;
        }
        running.push(ActiveCompaction { log, round_chunks: 0 });
        Some(CompactionTurn { running: self, log })
    }

    /// Whether none runs.
    pub(super) fn is_idle(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// The logs that are compacted.
    pub(super) fn list(&self) -> Vec<(u32, LogKind)> {
        self.0.lock().iter().map(|running| running.log).collect()
    }

    /// The number of logs that are compacted.
    pub(super) fn len(&self) -> u32 {
        // One for each log of a volume at most.
        self.0.lock().len() as u32
    }

    /// The logs of a kind that are compacted.
    pub(super) fn count(&self, log: LogKind) -> u32 {
        self.0.lock().iter().map(|running| u32::from(running.log.1 == log)).sum()
    }

    /// Whether a further round of a value log like those that run would not have its chunks among `spare`: it would move the records of its head
    /// chunk alone.
    pub(super) fn is_crowded(&self, spare: u64) -> bool {
        let running = self.0.lock();
        let taken: u64 = running.iter().map(|other| other.round_chunks).sum();
        let longest = running.iter().map(|other| other.round_chunks).max().unwrap_or(0);
        longest > 0 && taken.saturating_add(longest) > spare
    }

    /// Notes how many chunks the round of a log takes, if those and what the rounds of the other logs may take are at most `spare`. Whether
    /// they are.
    pub(super) fn take_round(&self, store: u32, log: LogKind, chunks: u64, spare: u64) -> bool {
        let mut running = self.0.lock();
        let others = running.iter().filter(|other| other.log != (store, log));
        let of_others: u64 = others.map(|other| other.round_chunks).sum();
        let has_space = of_others.saturating_add(chunks) <= spare;
        if let Some(own) = running.iter_mut().find(|own| own.log == (store, log)) {
            own.round_chunks = if has_space { chunks } else { 0 };
        }
        has_space
    }
}

impl Drop for CompactionTurn<'_> {
    fn drop(&mut self) {
        self.running.0.lock().retain(|running| running.log != self.log);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_do_not_take_the_chunks_of_one_another() {
        let running = RunningCompactions::default();
        let first = running.begin(0, LogKind::Values).unwrap();
        let _second = running.begin(1, LogKind::Values).unwrap();
        let _keys = running.begin(1, LogKind::Keys).unwrap();
        assert!(running.begin(0, LogKind::Values).is_none());
        assert_eq!((running.count(LogKind::Values), running.count(LogKind::Keys)), (2, 1));
        // Rounds without a window take no chunks of others.
        assert!(!running.is_crowded(0));
        assert!(running.take_round(0, LogKind::Values, 6, 10));
        assert!(running.is_crowded(11) && !running.is_crowded(12));
        assert!(!running.take_round(1, LogKind::Values, 5, 10));
        assert!(running.take_round(1, LogKind::Values, 4, 10));
        // A further round of a log replaces its former one.
        assert!(running.take_round(0, LogKind::Values, 5, 10));
        assert!(!running.take_round(0, LogKind::Values, 7, 10));
        // What is refused takes nothing, and neither does what has ended.
        assert!(running.take_round(1, LogKind::Values, 10, 10));
        assert!(!running.take_round(0, LogKind::Values, 1, 10));
        drop(first);
        assert!(running.take_round(1, LogKind::Values, 10, 10));
    }
}
