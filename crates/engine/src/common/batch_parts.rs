//! What a batch is made of: changes with their records, and the memory in which they are collected.
//!
//! In and out: fields, for [`super::commit_queue`] and [`super::group_commit`]. Invariant: a record is with its change until a batch
//! has the change, and with the batch from then on.

use super::allocator::Extent;
use super::journal::JournalEntry;
use crate::EngineError;
use octokv_base::{Buffer, Lba};
use std::task::Waker;

/// A change in the queue.
pub(super) struct QueuedChange<E: JournalEntry> {
    pub entry: E,
    /// Its record, until a batch has the change.
    pub record: Option<UnwrittenRecord>,
    pub state: ChangeState<E::Outcome>,
    pub waker: Option<Waker>,
}

/// A record that is to be written with its batch.
#[derive(Debug)]
pub struct UnwrittenRecord {
    /// Its first block.
    pub at: Lba,
    /// Its bytes, whole blocks.
    pub buffer: Buffer,
}

/// What is known of a change beside its entry.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum ChangeState<O> {
    /// Its writer does not know yet what it replaces.
    Undecided,
    /// It does.
    Decided(O),
    /// Its writer, or the write of its record, has failed: the change is cancelled.
    Failed,
}

impl<O: Copy> ChangeState<O> {
    /// The state after the writer has found out what the change replaces.
    pub fn from_result(outcome: &Result<O, EngineError>) -> ChangeState<O> {
        outcome.map_or(ChangeState::Failed, ChangeState::Decided)
    }

    /// `entry`, amended or cancelled.
    pub fn amended<E: JournalEntry<Outcome = O>>(self, entry: E) -> E {
        match self {
            ChangeState::Undecided => entry,
            ChangeState::Decided(outcome) => entry.amended(outcome),
            ChangeState::Failed => entry.cancelled(),
        }
    }
}

/// The memory of a batch, used again for another.
pub struct BatchBuffers<E> {
    /// Its entries.
    pub entries: Vec<E>,
    /// The records to be written with it, each with the index of its entry.
    pub records: Vec<(usize, UnwrittenRecord)>,
    /// The space that they free.
    pub freed: Vec<Extent>,
    /// Its writers, when it is complete.
    pub(super) wakers: Vec<Waker>,
    /// Its bytes, for each copy.
    pub copies: [Buffer; 2],
}

impl<E: JournalEntry> BatchBuffers<E> {
    /// Buffers with room for the largest batch.
    pub(super) fn new() -> BatchBuffers<E> {
        let copy = || Buffer::zeroed(E::BATCH_BYTES_MAX.next_multiple_of(4096));
        BatchBuffers {
            entries: Vec::with_capacity(E::BATCH_ENTRIES_MAX),
            records: Vec::with_capacity(E::BATCH_ENTRIES_MAX),
            freed: Vec::with_capacity(E::BATCH_ENTRIES_MAX),
            wakers: Vec::with_capacity(E::BATCH_ENTRIES_MAX + 2),
            copies: [copy(), copy()],
        }
    }
}
