//! Chunks that a device error keeps from being compacted, and that the heads of their logs have passed.
//!
//! ```text
//!   head chunk ─▶ three rounds that the device fails ─▶ checkpoint: names it, with a head behind it ─▶ Pinned
//!   Pinned     ─▶ its live contents are moved one by one, again and again, until none is left ─▶ checkpoint without it ─▶ Free
//! ```
//! Without this, one chunk that cannot be read would keep all garbage of its log, and so in the end fill the volume. A medium that has lost a
//! block says so ([`is_media_error`]); after any other error the block may be read later, so nothing is given up.
//!
//! In: heads of logs whose compaction the device fails. Out: logs that go on, chunks that are free once they could be read. Invariants: no
//! image states a head behind a pinned chunk before a checkpoint that names it is durable; a pinned chunk is freed only after a
//! checkpoint that does not name it is durable; the volume's capacity is reduced by the pinned chunks.
//! Tested in `tests/log_device_errors.rs`.

use super::log_place::{ChunkIndex, LogKind};
use super::store_image::PinnedChunk;
use crate::EngineError;
use crate::common::media_errors::is_media_error;
use octokv_device::DeviceError;

/// What device errors have done to the logs of a store.
#[derive(Debug, Default)]
pub(super) struct PinnedChunks {
    /// In front of their heads, with live contents.
    pub pinned: Vec<PinnedChunk>,
    /// Heads that the next checkpoint states as pinned.
    pub wanted: Vec<PinnedChunk>,
    /// Without live contents: the next checkpoint does not name them, and frees them.
    pub emptied: Vec<PinnedChunk>,
    /// Rounds of both logs that the device has failed since the last that ended otherwise.
    failures: [u32; 2],
    /// Whether other logs are compacted before this one: its last round failed a short time ago.
    is_postponed: [bool; 2],
}

/// What a checkpoint has taken of a store's pinned chunks.
#[derive(Debug, Default)]
pub(super) struct PinnedSnapshot {
    /// Those that it pins.
    pub new: Vec<PinnedChunk>,
    /// Those that it does not name any more.
    pub emptied: Vec<PinnedChunk>,
    /// All that it names.
    pub all: Vec<PinnedChunk>,
}

impl PinnedSnapshot {
    /// The head that a checkpoint states of a log whose present head is this.
    pub(super) fn head(&self, log: LogKind, head: ChunkIndex) -> ChunkIndex {
        let is_pinned = self.new.iter().any(|pinned| pinned.log == log && pinned.index == head);
        ChunkIndex(head.0 + u32::from(is_pinned))
    }
}

impl PinnedChunks {
    /// Those that a recovery found.
    pub(super) fn recovered(pinned: Vec<PinnedChunk>) -> PinnedChunks {
        PinnedChunks { pinned, ..PinnedChunks::default() }
    }

    /// Whether the last round of a log was failed by the device a short time ago.
    pub(super) fn is_postponed(&self, log: LogKind) -> bool {
        self.is_postponed[log as usize]
    }

    /// Lets the logs be compacted again in their turn.
    pub(super) fn end_postponement(&mut self) {
        self.is_postponed = [false; 2];
    }

    /// Notes whether the device failed a round of a log, and gives how many in succession.
    pub(super) fn note_round(&mut self, log: LogKind, has_failed: bool) -> u32 {
        let failures = &mut self.failures[log as usize];
        *failures = if has_failed { *failures + 1 } else { 0 };
        self.is_postponed[log as usize] = has_failed;
        *failures
    }

    /// What a checkpoint states whose replay begins at an index of the key log, and whose value tail lies in this chunk of the value log.
    pub(super) fn snapshot(&self, replay: ChunkIndex, value_tail: ChunkIndex) -> PinnedSnapshot {
        let is_passed = |wanted: &&PinnedChunk| match wanted.log {
            LogKind::Keys => wanted.index < replay,
            LogKind::Values => wanted.index < value_tail,
        };
        let new: Vec<PinnedChunk> = self.wanted.iter().filter(is_passed).copied().collect();
        let all = self.pinned.iter().chain(&new).copied().collect();
        PinnedSnapshot { new, emptied: self.emptied.clone(), all }
    }
}

/// Whether the device failed to do something that it may do later.
pub(super) fn is_passing_error(error: &EngineError) -> bool {
    matches!(error, EngineError::Device { error, .. } if *error != DeviceError::NoSpace && !is_media_error(*error))
}
