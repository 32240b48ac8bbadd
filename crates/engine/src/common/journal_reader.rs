//! Replay of the journal: the batches since a checkpoint, from whichever copy has them.
//!
//! ```text
//!   checkpoint ─▶ batch ─▶ batch ─▶ … ─▶ batch ─▶ batch ─▶ end       no later batch may show that one is missing
//!                 └─ known durable: applied ─┘    └─ unverified ─┘
//! ```
//! In: a ring, and the position of the first batch. Out: the entries of durable batches, applied in their order; the later
//! ones, whose records the engine verifies; the position of the next batch. Invariants: nothing is written; a batch counts
//! if one copy is intact; a batch that is lost in both copies is found by a later one that relies on it.

use super::commit_queue::LEADERS_MAX;
use super::journal::JournalPosition;
use super::journal::{Batch, JournalEntry, UncheckedBatch, batch_units_max};
use super::superblock::COUNT_MAX;
use super::unit_reader::UnitReader;
use crate::open_error::{IndexMismatch, MetadataStructure, OpenError};
use std::marker::PhantomData;

/// Bytes per read of a copy.
const READ_CHUNK_BYTES: usize = 1 << 20;

/// A journal on the device.
#[derive(Clone, Copy, Debug)]
pub struct JournalRing {
    /// The first unit of each copy.
    pub starts: [u64; 2],
    /// The units of each copy.
    pub units: u32,
    /// The volume's random number.
    pub volume_id: u64,
}

/// The entries of a batch that is not known durable.
pub struct UnverifiedBatch<E> {
    batch: u64,
    /// The number of the first entry.
    pub first_entry: u64,
    /// The entries, in order.
    pub entries: Vec<E>,
}

/// The end of a replay.
pub struct Replay<E> {
    /// The position of the next batch.
    pub end: JournalPosition,
    /// The last batches: a crash may have torn the records that they name.
    pub unverified: Vec<UnverifiedBatch<E>>,
    /// Batches that are known to have been in both copies, and of which the first is damaged.
    pub damaged_copies: u64,
    /// Whether a copy was unreadable where the journal ends: it may hold a batch, which nothing acknowledged. The engine must
    /// write a checkpoint before it is used, since the next replay could read that batch.
    pub is_end_uncertain: bool,
}

/// What a replay asks the engine.
pub trait ReplayTarget<E> {
    /// Whether the fields of an entry can be. A valid checksum does not imply valid fields.
    fn is_plausible(&self, entry: &E) -> bool;
    /// Applies a durable entry with this number.
    ///
    /// # Errors
    /// The entry contradicts an earlier one: it replaces a record that the index does not have.
    fn apply(&mut self, entry: &E, number: u64) -> Result<(), OpenError>;
}

/// Reads a journal from a position on.
pub struct JournalReader<'a, E> {
    reader: UnitReader<'a>,
    ring: JournalRing,
    windows: [RingWindow; 2],
    is_end_uncertain: bool,
    entry: PhantomData<E>,
}

/// The part of a copy that was read last.
#[derive(Default)]
struct RingWindow {
    first: u32,
    bytes: Vec<u8>,
}

impl<'a, E: JournalEntry> JournalReader<'a, E> {
    /// A reader of a ring.
    pub fn new(reader: UnitReader<'a>, ring: JournalRing) -> JournalReader<'a, E> {
        JournalReader {
            reader,
            ring,
            windows: Default::default(),
            is_end_uncertain: false,
            entry: PhantomData,
        }
    }

    /// Replays the journal from the batch at `start`, which an opening of `incarnation` or a later one wrote.
    ///
    /// # Errors
    /// A batch is lost in both copies, or contradicts itself or the others.
    pub async fn replay(
        mut self,
        start: JournalPosition,
        mut incarnation: u32,
        target: &mut impl ReplayTarget<E>,
    ) -> Result<Replay<E>, OpenError> {
        let mut at = start;
        let mut unverified: Vec<UnverifiedBatch<E>> = Vec::new();
        let mut from_second: Vec<u64> = Vec::new();
        let mut damaged_copies = 0;
        loop {
            if at.unit + self.batch_units_max() > self.ring.units {
                at.units_used += u64::from(self.ring.units - at.unit);
                at.unit = 0;
            }
            let Some((batch, copy)) = self.read_batch(at, incarnation, target).await? else { break };
            let Batch { header, units, entries } = batch;
            // A batch that is not known durable may be in one copy alone; the others were written to both.
            if copy == 1 {
                from_second.push(header.batch);
            }
            let known_durable = from_second.partition_point(|&batch| batch <= header.flushed_through);
            damaged_copies += from_second.drain(..known_durable).count() as u64;
            incarnation = header.incarnation;
            at = JournalPosition {
                unit: at.unit + units,
                batch: at.batch + 1,
                entry: header.first_entry + entries.len() as u64,
                units_used: at.units_used + u64::from(units),
            };
            unverified.push(UnverifiedBatch {
                batch: header.batch,
                first_entry: header.first_entry,
                entries,
            });
            // Known durable: apply without verification, which also keeps the list short.
            let durable = unverified.partition_point(|batch| batch.batch <= header.flushed_through);
            for batch in unverified.drain(..durable) {
                for (entry, number) in batch.entries.iter().zip(batch.first_entry..) {
                    target.apply(entry, number)?;
                }
            }
            if at.units_used >= u64::from(self.ring.units) {
                break;
            }
        }
        self.check_gap(at, incarnation).await?;
        Ok(Replay { end: at, unverified, damaged_copies, is_end_uncertain: self.is_end_uncertain })
    }

    fn batch_units_max(&self) -> u32 {
        batch_units_max::<E>(self.reader.unit_bytes() as u32)
    }

    /// The batch expected at a position, from the first copy that has it, and that copy; `None` at the end of the journal.
    async fn read_batch(
        &mut self,
        at: JournalPosition,
        incarnation: u32,
        target: &impl ReplayTarget<E>,
    ) -> Result<Option<(Batch<E>, usize)>, OpenError> {
        let mut unreadable = 0;
        for copy in 0..2 {
            self.fill_window(copy, at.unit).await;
            let window = &self.windows[copy];
            let bytes = &window.bytes[(at.unit - window.first) as usize * self.reader.unit_bytes()..];
            unreadable += u32::from(bytes.is_empty());
            let Some(batch) = UncheckedBatch(bytes).check::<E>(self.reader.unit_bytes() as u32) else {
                continue;
            };
            let header = batch.header;
            let expected = header.volume_id == self.ring.volume_id && header.batch == at.batch;
            if expected && header.incarnation >= incarnation {
                // The crash may have torn the other copy; one intact copy is enough.
                let is_plausible = |entry| target.is_plausible(entry);
                if header.first_entry >= COUNT_MAX || !batch.entries.iter().all(is_plausible) {
                    let lba = self.lbas(at.unit)[copy];
                    let mismatch = IndexMismatch::ImpossibleBatch { batch: at.batch };
                    return Err(OpenError::Inconsistent { lba, mismatch });
                }
                return Ok(Some((batch, copy)));
            }
        }
        if unreadable == 2 {
            // It is unknown whether there was a batch.
            return Err(self.batch_unreadable(at));
        }
        self.is_end_uncertain = unreadable > 0;
        Ok(None)
    }

    /// The first block of each copy of the journal's `unit`.
    fn lbas(&self, unit: u32) -> [u64; 2] {
        self.ring.starts.map(|start| self.reader.lba(start + u64::from(unit)).0)
    }

    fn batch_unreadable(&self, at: JournalPosition) -> OpenError {
        let structure = MetadataStructure::JournalBatch { batch: at.batch };
        OpenError::CopiesUnreadable { structure, lbas: self.lbas(at.unit) }
    }

    /// Reads units of a copy from `unit` on.
    async fn read_copy(&self, copy: usize, unit: u32, units: u32) -> Vec<u8> {
        let first = self.ring.starts[copy] + u64::from(unit);
        self.reader.read_or_empty(first, 0, units as usize * self.reader.unit_bytes()).await
    }

    /// Fills the window of a copy with at least the batch at `unit`. If the device cannot read a whole window, with that
    /// batch alone; if it cannot read that either, with nothing.
    async fn fill_window(&mut self, copy: usize, unit: u32) {
        let (batch_units, unit_bytes) = (self.batch_units_max(), self.reader.unit_bytes());
        let window = &self.windows[copy];
        let units_held = (window.bytes.len() / unit_bytes) as u32;
        if window.first <= unit && unit + batch_units <= window.first + units_held {
            return;
        }
        let units = ((READ_CHUNK_BYTES / unit_bytes) as u32).min(self.ring.units - unit);
        let mut bytes = self.read_copy(copy, unit, units).await;
        if bytes.is_empty() {
            bytes = self.read_copy(copy, unit, batch_units).await;
        }
        self.windows[copy] = RingWindow { first: unit, bytes };
    }

    /// Checks that no batch after the end of the journal was written after its predecessor was durable, or marks it as
    /// durable. If there is one, a batch in between is damaged in both copies and its changes are lost.
    async fn check_gap(&self, end: JournalPosition, incarnation: u32) -> Result<(), OpenError> {
        let unit_bytes = self.reader.unit_bytes();
        for copy in 0..2 {
            for from in [end.unit, 0] {
                // At least one of so many batches waited for the first, however many were in flight together.
                let units = ((LEADERS_MAX as u32 + 1) * self.batch_units_max()).min(self.ring.units - from);
                let bytes = self.read_copy(copy, from, units).await;
                for start in (0..bytes.len()).step_by(unit_bytes) {
                    let batch = UncheckedBatch(&bytes[start..]).check::<E>(unit_bytes as u32);
                    let is_later = batch.is_some_and(|Batch { header, .. }| {
                        header.volume_id == self.ring.volume_id
                            && header.batch > end.batch
                            && header.incarnation >= incarnation
                            && (!header.is_predecessor_unflushed || header.flushed_through >= end.batch)
                    });
                    if is_later {
                        return Err(self.batch_unreadable(end));
                    }
                }
            }
        }
        Ok(())
    }
}
