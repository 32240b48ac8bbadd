//! Group commit: whoever waits for durability waits together.
//!
//! In: one index change per put or delete, whose record may still be on its way to the device. Out: journal
//! batches, flushes, changes of the index, freed space. What is remembered between them is [`super::batches`].
//!
//! ```text
//!   changes wait ──▶ one of them leads: takes up to a batch of them, writes both copies, meanwhile its records
//!        ▲           land; flushes; in the order of the batches applies them to the index and answers them ──┐
//!        └────────── the next to wait leads the next batch ◀──────────────────────────────────────────────┘
//! ```
//! Invariants: a few batches are under way at a time, and no entry is in two of them; batches are numbered
//! without gaps; a batch is flushed after its copies and every record that it names were written; changes reach
//! the index, and those who wait their answer, in the order of the journal and only once their batch and all
//! before it are durable; after a failed journal write no change is ever acknowledged again (whether that
//! batch is on the device cannot be known).
//!
//! A crash may thus leave a batch without its records, or without the batch before it; neither was acknowledged.
//! Replay verifies the records of every batch that no later one calls durable ([`super::open`]). Before the
//! flush a change whose record could not be written is struck from its batch, and one that would have replaced
//! another key's record is mended: what a put replaces is looked up in the index, and read to be sure, beside
//! all this.

use super::HashEngine;
use super::commit_queue::{Commits, JournalPosition, Landed, Record, Scratch, Taken, Turn};
use super::journal::{self, BatchHeader, Entry};
use crate::bug_injection::{self, Bug};
use crate::{Durability, Fault};
use octokv_base::Buffer;
use octokv_device::DeviceError;
use std::cell::Cell;
use std::future::{Future, Ready, poll_fn};
use std::pin::{Pin, pin};

/// How often a checkpoint is tried for which a batch waits.
const CHECKPOINT_TRIES: u32 = 3;
/// The longest record, in bytes, that is still on its way when a batch takes its change: longer ones would keep
/// the others of the batch waiting.
const RECORD_BESIDE_MAX: usize = 128 << 10;

/// Work that must come to its end: where it is dropped or fails half-way, what the device holds is not
/// known, and nothing more is written until the volume is opened again.
pub(super) struct Unfinished<'a>(pub(super) &'a Commits);

impl Unfinished<'_> {
    /// It has come to its end.
    pub(super) fn finished(self) {
        std::mem::forget(self);
    }
}

impl Drop for Unfinished<'_> {
    fn drop(&mut self) {
        self.0.fail();
    }
}

impl HashEngine {
    /// Makes a change visible whose record landed on a device that keeps nothing.
    pub(super) fn change_at_once(&self, entry: Entry, landed: Landed) {
        let volume = &self.volume;
        volume.epochs.free(volume.apply(&landed.amended(entry), 0).as_slice());
    }

    /// Makes one change durable and visible, with the record that it names and that `record` is writing. The
    /// key's lock is held. Where the record did not land the answer says why, nothing has changed, and its
    /// space is nobody's.
    pub(super) async fn commit(
        &self,
        mut entry: Entry,
        record: impl Future<Output = Result<Landed, Fault>>,
    ) -> Result<Result<(), Fault>, Fault> {
        let commits = &self.volume.commits;
        let mut record = pin!(record);
        let is_long = entry.units as usize * self.volume.unit_bytes() > RECORD_BESIDE_MAX;
        let mut state = Record::UnderWay;
        if is_long {
            match record.as_mut().await {
                Ok(landed) => entry = landed.amended(entry),
                Err(fault) => return Ok(Err(fault)),
            }
            state = Record::Landed(Landed::AsSaid);
        }
        let ticket = commits.join(entry, state);
        let joined = Unfinished(commits);
        let result = Cell::new(Ok(()));
        let mut landing = pin!((!is_long).then_some(async {
            let landed = record.await;
            commits.record_is(ticket, Record::of(&landed));
            result.set(landed.map(drop));
        }));
        loop {
            let turn = poll_fn(|context| {
                if let Some(pending) = landing.as_mut().as_pin_mut()
                    && pending.poll(context).is_ready()
                {
                    landing.set(None);
                }
                commits.turn(ticket, context)
            })
            .await;
            match turn {
                Turn::Lead => {
                    let lead = Unfinished(commits);
                    self.write_batch(Some(ticket), landing.as_mut()).await?;
                    lead.finished();
                    commits.step_down();
                }
                Turn::Done(Err(fault)) => return Err(fault),
                Turn::Done(Ok(())) => break,
            }
        }
        joined.finished();
        Ok(result.get())
    }

    /// Makes durable what was acknowledged without a flush, and lets the space that it freed be used.
    pub(super) async fn settle(&self) -> Result<(), Fault> {
        let (volume, commits) = (&self.volume, &self.volume.commits);
        // Whoever comes second waits for the space that the first has taken out of limbo.
        let _held = volume.checkpointing.lock(1).await;
        let Some((batch, freed)) = commits.take_limbo() else { return Ok(()) };
        self.flush_device().await?;
        commits.is_flushed_through(batch);
        volume.epochs.free(&freed);
        Ok(())
    }

    /// Says in the journal that the last changes are durable, so that replay need not verify their records
    /// and takes damage to them for damage, not for a write that a crash cut short. For when there is
    /// nothing else to do; [`HashEngine::maintain`] does it.
    pub async fn mark(&self) -> Result<(), Fault> {
        let commits = &self.volume.commits;
        if !commits.has_failed() && commits.take_lead_to_mark() {
            let lead = Unfinished(commits);
            self.write_batch(None, pin!(None::<Ready<()>>)).await?;
            lead.finished();
            commits.step_down();
        }
        Ok(())
    }

    /// Makes the changes of a batch in the index and notes the space that they free.
    fn publish(&self, scratch: &mut Scratch, at: JournalPosition) {
        let numbered = scratch.entries.iter().zip(at.entry..);
        scratch.freed.extend(numbered.filter_map(|(entry, number)| self.volume.apply(entry, number)));
    }

    /// Waits for a checkpoint, or writes it, until a batch fits the ring. One that fails leaves the one before
    /// in force, so it is tried again; only a device that fails every time ends the writing.
    async fn make_room(&self) -> Result<(), Fault> {
        let commits = &self.volume.commits;
        let mut tries = CHECKPOINT_TRIES;
        while !commits.has_room() {
            if let Err(fault) = self.checkpoint_when(|| !commits.has_room()).await {
                tries -= 1;
                if tries == 0 || commits.has_failed() {
                    return Err(fault);
                }
            }
        }
        Ok(())
    }

    /// Writes both copies of a batch.
    async fn write_copies(
        &self,
        scratch: &mut Scratch,
        unit: u32,
        header: &BatchHeader,
    ) -> Result<(), Fault> {
        let volume = &self.volume;
        let empty = [Buffer::zeroed(0), Buffer::zeroed(0)];
        let [mut first, mut second] = std::mem::replace(&mut scratch.copies, empty);
        first.set_len(first.capacity());
        let units = journal::encode(&mut first, header, &scratch.entries, volume.fixed().unit_bytes);
        let bytes = units as usize * volume.unit_bytes();
        first.set_len(bytes);
        second.set_len(bytes);
        second.copy_from_slice(&first);
        let write = |copy, buffer| {
            let unit = volume.fixed().journal_first(copy) + u64::from(unit);
            self.device.write(volume.lba(unit), buffer)
        };
        let (first, second) = (write(0, first), write(1, second));
        let (first, second) = (first.await, second.await);
        first.result.and(second.result)?;
        let lost = Fault::Device(DeviceError::Io(0));
        scratch.copies = [first.buffer.ok_or(lost)?, second.buffer.ok_or(lost)?];
        Ok(())
    }

    /// Writes one batch of what waits, applies it and answers it. The caller leads; `own` is its change and
    /// `landing` ends when that change's record has landed. Nothing is written where another has taken that change.
    async fn write_batch(
        &self,
        own: Option<u64>,
        mut landing: Pin<&mut Option<impl Future<Output = ()>>>,
    ) -> Result<(), Fault> {
        let (volume, commits) = (&self.volume, &self.volume.commits);
        let (mut scratch, at, header) = loop {
            match commits.take_batch(own, volume) {
                Taken::Batch(scratch, at, header) => break (scratch, at, header),
                Taken::Gone => return Ok(()),
                // In memory of its own: every task has room for the largest of its futures, and this one is rare.
                Taken::NoRoom => Box::pin(self.make_room()).await?,
            }
        };
        if bug_injection::is(Bug::PublishBeforeDurable) {
            self.publish(&mut scratch, at);
        }
        self.write_copies(&mut scratch, at.unit, &header).await?;
        if let Some(pending) = landing.as_mut().as_pin_mut() {
            pending.await;
            landing.set(None);
        }
        if !bug_injection::is(Bug::ForgetRecords) {
            commits.records_of(at.batch).await?;
        }
        let is_amended = commits.amend(at.batch, &mut scratch.entries);
        if is_amended {
            self.write_copies(&mut scratch, at.unit, &header).await?;
        }
        let durable = volume.durability == Durability::Flush;
        // Whoever is told that a put failed must not find its value after a power cut: what the batch said first
        // may be on the device already.
        if (durable || is_amended) && !bug_injection::is(Bug::SkipFlush) {
            self.device.flush().await.result?;
        }
        commits.turn_of(at.batch).await?;
        if !bug_injection::is(Bug::PublishBeforeDurable) {
            self.publish(&mut scratch, at);
        }
        // Only now: a reader may find a record until its entry is out of the index.
        if bug_injection::is(Bug::ReuseSpaceEarly) {
            // It is free already.
        } else if durable || bug_injection::is(Bug::FreeUnflushed) {
            volume.epochs.free(&scratch.freed);
        } else {
            commits.keep_in_limbo(&scratch.freed);
        }
        commits.batch_is_done(header.flushed_through, durable, scratch);
        Ok(())
    }
}
