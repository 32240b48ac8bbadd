//! The run of a compaction: its tables are read in the order of keys, and what readers need is written again.
//!
//! ```text
//!   tables ─▶ merge ─▶ entries of a key ─▶ retention ─▶ values of dying segments: read ahead, written into new ones ─▶ tables ─▶ edit
//! ```
//! In: a compaction. Out: an edit. Holds: the entries of the keys whose values are being read, at most [`HURRIED_AHEAD_BYTES_MAX`] of values.
//!
//! Invariants: nothing changes before the edit; a run that fails or is dropped leaves the tree as it was. A part of a table that cannot be read becomes a lost range of the
//! edit. A value whose record is damaged, or finds no free run, keeps its address, and so its segment. A device that fails costs nothing: the run fails.

use super::compaction::TreeCompaction;
use super::copied_entry::{CopiedEntry, CopiedValue};
use super::core::LsmCore;
use super::cursor::EntryCursor;
use super::entry::{Position, TreeEntry};
use super::kept_keys::KeptKeys;
use super::level_cursor::{LevelCursor, LevelCursorConfig};
use super::lost_ranges::{LostRange, LostRanges};
use super::merge::MergingCursor;
use super::pace_control::drained_bytes;
use super::postponed_reads::CompactedPart;
use super::retention::RetentionRule;
use super::table::io::is_media_error;
use super::table_output::{TableOutput, settled_by};
use super::tree_version::{TreeVersion, disjoint_lists};
use super::value_mover::ValueMover;
use super::version_edit::{LEVELS, VersionEdit};
use super::volume::LsmVolume;
use crate::EngineError;
use crate::bug_injection::{self, InjectedBug};
use crate::common::record::{RecordFlags, RecordMeta};
use crate::common::work_slice::WorkSlice;
use octokv_base::{Nanos, UnixTime, Version};
use octokv_device::DeviceFuture;
use octokv_runtime::{ReactorHandle, yield_now};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes of values that are read ahead: reads of users wait behind them.
const AHEAD_BYTES_MAX: u64 = 512 << 10;
/// The same if writes wait for the compaction, or will soon.
const HURRIED_AHEAD_BYTES_MAX: u64 = 4 << 20;
/// Attempts to read a table before a damaged part of it is lost.
const READ_ATTEMPTS: u32 = 3;
/// Values that are read ahead.
const AHEAD_READS_MAX: usize = 32;
/// Bytes between two pauses.
const BYTES_PER_PAUSE: u64 = 256 << 10;
/// A pause is as long as this, or made of such parts.
const PAUSE_STEP: Nanos = Nanos::from_millis(20);

/// How fast a run goes: the reactor that sleeps, if any.
pub(super) struct RunPace<'a> {
    /// The reactor; `None` runs without pauses.
    pub handle: Option<&'a ReactorHandle>,
}

/// What a run has written, in bytes.
#[derive(Clone, Copy)]
struct Written {
    tables: u64,
    /// Values that were moved.
    values: u64,
}

/// How fast a run goes at least, unless an operator has bounded it, in bytes a second.
#[derive(Clone, Copy)]
struct LeastPace {
    tables: u64,
    /// Of values that are moved.
    values: u64,
}

/// A run without pauses, which ends the pauses of another that it waits for.
pub(super) struct Hurry<'a>(&'a AtomicUsize);

impl LsmVolume {
    fn least_pace(&self, compaction: &TreeCompaction) -> LeastPace {
        let permille = self.settings.compaction.tombstone_permille.max(1);
        let is_dense = compaction.inputs.iter().any(|table| table.tombstone_permille() >= permille);
        let tables = if is_dense { self.settings.pacing.tombstones_min } else { 0 };
        LeastPace { tables, values: self.moved_per_second() }
    }
}

impl RunPace<'_> {
    /// Of a run without pauses, until it has ended.
    pub fn hurry<'a>(&self, volume: &'a LsmVolume) -> Option<Hurry<'a>> {
        self.handle.is_none().then(|| {
            volume.compaction.hurried.fetch_add(1, Ordering::Relaxed);
            Hurry(&volume.compaction.hurried)
        })
    }
}

impl Drop for Hurry<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A value that is being read for its move.
struct MovedRead {
    /// Of the key's entries.
    index: usize,
    units: Range<u64>,
    read: DeviceFuture,
}

/// The entries of a key on their way to the output.
struct KeyOnItsWay {
    key: Vec<u8>,
    entries: Vec<CopiedEntry>,
    reads: Vec<MovedRead>,
    read_bytes: u64,
}

/// What a run writes.
struct RunOutput<'a> {
    tables: TableOutput<'a>,
    values: ValueMover<'a>,
    ahead: VecDeque<KeyOnItsWay>,
    ahead_bytes: u64,
    ahead_bytes_max: u64,
    ahead_reads: usize,
    /// Whether a value found no free run.
    has_crowded: bool,
    /// The records whose move has begun, in bytes.
    moved_bytes: u64,
    slice: WorkSlice,
    /// The keys that stay in level 0, and the section of those that were written last.
    kept_keys: &'a KeptKeys,
    section: usize,
    lost: Vec<LostRange>,
    /// What the device failed to read.
    failed: Vec<CompactedPart>,
}

/// Why a run failed. Nothing has changed.
#[derive(Clone, Copy, Debug)]
pub(super) enum RunFailure {
    /// The device failed to read what the run needs, which is postponed.
    Postponed(EngineError),
    /// Anything else.
    Failed(EngineError),
}

impl RunFailure {
    /// The error.
    pub(super) fn error(self) -> EngineError {
        match self {
            RunFailure::Postponed(error) | RunFailure::Failed(error) => error,
        }
    }
}

impl LsmCore {
    /// Runs a compaction to its end. A damaged part is lost only if several attempts meet it: damage that passes, as of a transfer, must not cost a key. An error of the
    /// device is no damage.
    ///
    /// # Errors
    /// Device failures, no memory, no space: nothing has changed. What the device failed to read is postponed.
    pub(super) async fn run_compaction(
        &self,
        compaction: &TreeCompaction,
        pace: &RunPace<'_>,
    ) -> Result<(), RunFailure> {
        let mut failed = Vec::new();
        let outcome = match self.check_failed_tables(compaction, &mut failed).await {
            Ok(()) => self.run_attempts(compaction, pace, &mut failed).await,
            Err(error) => Err(error),
        };
        let mut postponed = self.volume.compaction.postponed.lock();
        if let Some(handle) = pace.handle {
            // A pause begins at the end of the run, which may have waited for the device for long.
            postponed.advance(handle.now());
        }
        match outcome {
            Ok(()) => {
                // Of a segment it may not have read the value that failed.
                let read = compaction.tables().filter(|_| !compaction.is_move);
                read.for_each(|table| postponed.forget(CompactedPart::Table(table.id())));
                Ok(())
            }
            Err(error) if failed.is_empty() => Err(RunFailure::Failed(error)),
            Err(error) => {
                self.volume.compaction.postponed_compactions.fetch_add(1, Ordering::Relaxed);
                failed.into_iter().for_each(|part| postponed.postpone(part, error));
                Err(RunFailure::Postponed(error))
            }
        }
    }

    async fn run_attempts(
        &self,
        compaction: &TreeCompaction,
        pace: &RunPace<'_>,
        failed: &mut Vec<CompactedPart>,
    ) -> Result<(), EngineError> {
        for _ in 1..READ_ATTEMPTS {
            match self.try_compaction(compaction, pace, false, failed).await {
                Err(EngineError::Corrupt { .. }) => yield_now().await,
                outcome => return outcome,
            }
        }
        self.try_compaction(compaction, pace, true, failed).await
    }

    /// Reads the tables that the device failed to read before: a run that met the same error again would have written for nothing.
    async fn check_failed_tables(
        &self,
        compaction: &TreeCompaction,
        failed: &mut Vec<CompactedPart>,
    ) -> Result<(), EngineError> {
        if compaction.is_move || self.volume.compaction.postponed.lock().is_empty() {
            return Ok(());
        }
        for table in compaction.tables() {
            let part = CompactedPart::Table(table.id());
            if !self.volume.compaction.postponed.lock().has_failed(part) {
                continue;
            }
            let config = LevelCursorConfig::COMPACTION;
            let mut cursor = LevelCursor::of_tables(self.io.clone(), vec![Arc::clone(table)], config);
            let (mut outcome, mut slice) = (cursor.seek(Position::START).await, WorkSlice::default());
            loop {
                match outcome {
                    Ok(()) if cursor.entry().is_none() => break,
                    Ok(()) | Err(EngineError::Corrupt { .. }) => {}
                    Err(error) => {
                        failed.extend(cursor.failed_table().map(CompactedPart::Table));
                        return Err(error);
                    }
                }
                slice.count_entry(cursor.entry().map_or(0, |entry| entry.encoded_bytes())).await;
                outcome = cursor.next().await;
            }
        }
        Ok(())
    }

    /// Runs a compaction. Fails if a part is damaged, unless it `may_lose` that, and if the device fails.
    async fn try_compaction(
        &self,
        compaction: &TreeCompaction,
        pace: &RunPace<'_>,
        may_lose: bool,
        failed: &mut Vec<CompactedPart>,
    ) -> Result<(), EngineError> {
        let volume = &self.volume;
        if compaction.is_move {
            self.commit_compaction(compaction.edit(Vec::new())).await?;
            volume.compaction.drained_bytes.fetch_add(drained_bytes(compaction), Ordering::Relaxed);
            return Ok(());
        }
        let version = volume.versions.current();
        let oldest_snapshot = volume.oldest_snapshot();
        let mut output = RunOutput {
            tables: TableOutput::new(
                self,
                compaction.table_bytes.unwrap_or(volume.settings.table_bytes),
                false,
            ),
            values: ValueMover::new(self),
            ahead: VecDeque::new(),
            ahead_bytes: 0,
            ahead_bytes_max: if pace.handle.is_some() { AHEAD_BYTES_MAX } else { HURRIED_AHEAD_BYTES_MAX },
            ahead_reads: 0,
            has_crowded: false,
            moved_bytes: 0,
            slice: WorkSlice::default(),
            kept_keys: &compaction.kept_keys,
            section: 0,
            lost: Vec::new(),
            failed: Vec::new(),
        };
        if let Err(error) = self.write_compacted(compaction, &version, &mut output, pace, may_lose).await {
            failed.append(&mut output.failed);
            // Reads in flight have buffers of their own.
            output.tables.give_up().await;
            output.values.give_up().await;
            return Err(error);
        }
        let RunOutput { tables, values, lost, has_crowded, .. } = output;
        let settled = settled_by(compaction, oldest_snapshot, volume.forget_below());
        let tables = match tables.finish(settled).await {
            Ok(tables) => tables,
            Err(error) => {
                values.give_up().await;
                return Err(error);
            }
        };
        let written_bytes = tables.iter().map(|table| table.bytes()).sum();
        let segments = values.finish().await?;
        let edit = VersionEdit {
            added_segments: segments.iter().map(|(meta, _)| meta.clone()).collect(),
            sealed_segments: segments.iter().map(|(meta, seal)| (meta.id(), *seal)).collect(),
            added_lost: lost,
            ..compaction.edit(tables)
        };
        if !segments.is_empty() && !has_crowded {
            volume.compaction.crowded.lock().clear();
        }
        drop(segments);
        self.commit_compaction(edit).await?;
        volume.compaction.drained_bytes.fetch_add(drained_bytes(compaction), Ordering::Relaxed);
        volume.compaction.compactions.fetch_add(1, Ordering::Relaxed);
        volume.compaction.written_bytes.fetch_add(written_bytes, Ordering::Relaxed);
        self.remove_unused_segments().await
    }

    async fn write_compacted(
        &self,
        compaction: &TreeCompaction,
        version: &TreeVersion,
        output: &mut RunOutput<'_>,
        pace: &RunPace<'_>,
        may_lose: bool,
    ) -> Result<(), EngineError> {
        let volume = &self.volume;
        let snapshots = volume.snapshots.points();
        let forgotten = *volume.forgotten.lock();
        let rule = RetentionRule { snapshots: &snapshots, now: volume.clock.now(), forgotten };
        let mut merge = MergingCursor::new(self.sources(compaction));
        let newest_sequence = compaction.tables().map(|table| table.largest_sequence()).max().unwrap_or(0);
        let (mut key, mut entries): (Vec<u8>, Vec<CopiedEntry>) = (Vec::new(), Vec::new());
        let mut paused_at = Written { tables: 0, values: 0 };
        let least = volume.least_pace(compaction);
        let mut outcome = merge.seek(Position::START).await;
        loop {
            match outcome {
                Err(EngineError::Corrupt { .. }) if may_lose => {
                    let unread = merge.sources().filter_map(LevelCursor::unread_part);
                    output.lost.extend(unread.map(|part| LostRange {
                        first_key: part.first.clone(),
                        last_key: part.last.clone(),
                        newest_sequence,
                    }));
                    outcome = merge.next().await;
                    continue;
                }
                Err(error) => {
                    let tables = merge.sources().filter_map(LevelCursor::failed_table);
                    output.failed.extend(tables.map(CompactedPart::Table));
                    return Err(error);
                }
                Ok(()) => {}
            }
            let next = merge.entry();
            if next.as_ref().is_none_or(|next| next.key != key) && !entries.is_empty() {
                let below = may_be_below(compaction, version, &output.lost, &key);
                let kept = retained(&rule, &key, std::mem::take(&mut entries), below);
                if !kept.is_empty() {
                    self.push_key(compaction, version, std::mem::take(&mut key), kept, output).await?;
                }
                paused_at = self.pause(output, paused_at, pace, least, false).await;
            }
            let Some(next) = merge.entry() else { break };
            if entries.is_empty() {
                key.clear();
                key.extend_from_slice(next.key);
            }
            let bytes = next.encoded_bytes();
            entries.push(CopiedEntry::of(&next));
            output.slice.count_entry(bytes).await;
            outcome = merge.next().await;
        }
        while !output.ahead.is_empty() {
            self.write_first(output).await?;
        }
        self.pause(output, paused_at, pace, least, true).await;
        Ok(())
    }

    /// The tables of a compaction, the newest entries first.
    fn sources(&self, compaction: &TreeCompaction) -> Vec<LevelCursor> {
        let cursor = |tables| LevelCursor::of_tables(self.io.clone(), tables, LevelCursorConfig::COMPACTION);
        let mut sources: Vec<LevelCursor> = match compaction.input_level {
            0 => disjoint_lists(&compaction.inputs).into_iter().map(cursor).collect(),
            _ => vec![cursor(compaction.inputs.clone())],
        };
        if !compaction.overlapped.is_empty() {
            sources.push(cursor(compaction.overlapped.clone()));
        }
        sources
    }

    /// Takes the entries of a key: starts to read the values that are to be moved, and writes those that were read.
    async fn push_key(
        &self,
        compaction: &TreeCompaction,
        version: &TreeVersion,
        key: Vec<u8>,
        entries: Vec<CopiedEntry>,
        output: &mut RunOutput<'_>,
    ) -> Result<(), EngineError> {
        let mut on_its_way = KeyOnItsWay { key, entries, reads: Vec::new(), read_bytes: 0 };
        for index in 0..on_its_way.entries.len() {
            let CopiedValue::InSegment(address) = on_its_way.entries[index].value else { continue };
            let is_moved = compaction.moved_segments.binary_search(&address.segment).is_ok();
            if !is_moved || output.moved_bytes >= compaction.moved_bytes_max {
                continue;
            }
            let Some(units) = self.record_units(version, &on_its_way.key, address).ok().flatten() else {
                self.volume.compaction.unmovable.lock().insert(address.segment);
                continue;
            };
            let bytes = (units.end - units.start) * self.volume.unit_bytes() as u64;
            while !output.ahead.is_empty()
                && (output.ahead_bytes + bytes > output.ahead_bytes_max
                    || output.ahead_reads >= AHEAD_READS_MAX)
            {
                self.write_first(output).await?;
            }
            let read = self.start_read(&units)?;
            output.ahead_bytes += bytes;
            output.ahead_reads += 1;
            output.moved_bytes += bytes;
            on_its_way.read_bytes += bytes;
            on_its_way.reads.push(MovedRead { index, units, read });
        }
        output.ahead.push_back(on_its_way);
        // Keys without reads need not wait.
        while output.ahead.front().is_some_and(|first| first.reads.is_empty()) {
            self.write_first(output).await?;
        }
        Ok(())
    }

    /// Writes the first key that is on its way.
    async fn write_first(&self, output: &mut RunOutput<'_>) -> Result<(), EngineError> {
        let Some(mut first) = output.ahead.pop_front() else { return Ok(()) };
        output.ahead_bytes -= first.read_bytes;
        output.ahead_reads -= first.reads.len();
        for MovedRead { index, units, read } in first.reads {
            let entry = &mut first.entries[index];
            let CopiedValue::InSegment(address) = entry.value else { continue };
            let read = match read.await.into_read() {
                Ok(buffer) => Some(buffer),
                Err(error) if is_media_error(error) => None,
                Err(error) => {
                    output.failed.push(CompactedPart::Segment(address.segment));
                    return Err(self.io.failed(error));
                }
            };
            let checked = read.and_then(|buffer| {
                let value = self.check_record(&buffer, units.start, &first.key, address).ok()?;
                Some((buffer, value))
            });
            let Some((buffer, value)) = checked else {
                // Its segment stays as long as the entry: no other compaction is to try the same.
                self.volume.compaction.unmovable.lock().insert(address.segment);
                continue;
            };
            let meta = record_meta(entry.version, entry.expires_at);
            let Some(moved) = output.values.push(&first.key, &buffer[value], meta).await? else {
                // The others of its segment move, and leave less to be moved when there is a run for this one.
                output.has_crowded = true;
                self.volume.compaction.crowded.lock().insert(address.segment);
                continue;
            };
            entry.value = CopiedValue::InSegment(moved);
            // Checked and copied twice.
            output.slice.count_bytes(2 * (units.end - units.start) * self.volume.unit_bytes() as u64).await;
        }
        let section = output.kept_keys.section(&first.key);
        if section != std::mem::replace(&mut output.section, section) {
            output.tables.finish_table().await?;
        }
        let entries: Vec<TreeEntry<'_>> = first.entries.iter().map(|entry| entry.entry(&first.key)).collect();
        output.tables.push_key(&entries).await
    }

    /// Sleeps so that the compaction keeps to its pace: once enough was written since the last pause; if an operator has set a rate, also at the end. Returns the bytes that are
    /// accounted for. Tables and values have a pace each; the operator's rate is that of both together.
    async fn pause(
        &self,
        output: &mut RunOutput<'_>,
        paused_at: Written,
        pace: &RunPace<'_>,
        least: LeastPace,
        is_end: bool,
    ) -> Written {
        let Some(handle) = pace.handle else { return paused_at };
        let written = Written { tables: output.tables.data_bytes, values: output.values.written_bytes };
        let volume = &self.volume;
        let settings = &volume.settings.pacing;
        let (tables, values) = (written.tables - paused_at.tables, written.values - paused_at.values);
        let bound = settings.compaction_max;
        if tables + values < BYTES_PER_PAUSE && (!is_end || bound == u64::MAX) {
            return paused_at;
        }
        let time = |bytes: u64, per_second: u64| bytes.saturating_mul(1_000_000_000) / per_second.max(1);
        // Before puts wait for space only the bound counts.
        let is_hurried = volume.is_space_short() || volume.compaction.hurried.load(Ordering::Relaxed) > 0;
        output.ahead_bytes_max = if is_hurried { HURRIED_AHEAD_BYTES_MAX } else { AHEAD_BYTES_MAX };
        let of_pace = match is_hurried {
            true => 0,
            false => {
                let pace = volume.pace();
                let of_values = time(values, pace.hastened(least.values, settings.device_max));
                time(tables, pace.compaction_per_second.max(least.tables)).saturating_add(of_values)
            }
        };
        let mut rest_ns = of_pace.max(time(tables + values, bound));
        // In steps: a run that somebody waits for, for space, pauses no longer.
        while rest_ns > 0 && volume.compaction.hurried.load(Ordering::Relaxed) == 0 {
            let step_ns = rest_ns.min(PAUSE_STEP.0);
            handle.sleep(Nanos(step_ns)).await;
            rest_ns -= step_ns;
        }
        written
    }
}

/// What the record of a value keeps.
fn record_meta(version: Version, expires_at: UnixTime) -> RecordMeta {
    let is_plain = version == Version::NONE && expires_at == UnixTime::NEVER;
    RecordMeta {
        version,
        expires_at,
        flags: if is_plain { RecordFlags::NONE } else { RecordFlags::VERSIONED },
    }
}

/// Applies the retention rule to the entries of a key.
fn retained(
    rule: &RetentionRule<'_>,
    key: &[u8],
    entries: Vec<CopiedEntry>,
    below: bool,
) -> Vec<CopiedEntry> {
    let list: Vec<TreeEntry<'_>> = entries.iter().map(|entry| entry.entry(key)).collect();
    let retentions = rule.retain_in_compaction(&list, below);
    let kept = list.into_iter().zip(retentions);
    kept.filter_map(|(entry, retention)| retention.apply(entry).map(|entry| CopiedEntry::of(&entry)))
        .collect()
}

/// Whether a level below the output may have the key, or entries of it were lost.
fn may_be_below(compaction: &TreeCompaction, version: &TreeVersion, lost: &[LostRange], key: &[u8]) -> bool {
    if bug_injection::is_injected(InjectedBug::DropTombstonesEarly) {
        return false;
    }
    let is_in = |range: &LostRange| (&range.first_key[..]..=&range.last_key[..]).contains(&key);
    let ranges: &LostRanges = version.lost();
    compaction.kept_keys.has(key)
        || (compaction.output_level + 1..LEVELS).any(|level| version.table_of(level, key).is_some())
        || ranges.newest_lost(key).is_some()
        || lost.iter().any(is_in)
}
