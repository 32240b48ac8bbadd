//! The work of a volume beside its operations: room in the journal, flushes, compactions, checkpoints.
//!
//! In: what the volume uses. Out: flushes and compactions, by the task that maintains the volume, or by a put that finds no room.
//! Invariants: one compaction at a time; a put waits for work only if there is some that can make room for it.

use super::compaction::{CompactionInput, CompactionSettings, TreeCompaction};
use super::compaction_choice::{CompactionChoice, choose_compaction};
use super::compaction_run::{RunFailure, RunPace};
use super::core::LsmCore;
use super::entry::Position;
use super::memtable::Memtable;
use super::postponed_reads::{PAUSE_MIN, next_pause};
use super::space_reserve::SpaceDemand;
use super::version_edit::LEVELS;
use super::volume::LsmVolume;
use crate::EngineError;
use crate::common::background_task::{ErrorReports, wait_at_most};
use crate::common::group_commit::{checkpoint_if, flush_deferred, write_durability_marker};
use octokv_base::Nanos;
use octokv_device::DeviceError;
use octokv_runtime::{ReactorHandle, yield_now};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// The lock of compactions, among the volume's work locks.
pub(super) const COMPACTION_LOCK: u64 = 1;
/// The lock of puts that make room in the journal.
const ROOM_LOCK: u64 = 2;
/// The lock of the next segment.
pub(super) const SEGMENT_LOCK: u64 = 3;
/// The pause between two rounds of maintenance.
const ROUND: Nanos = Nanos::from_millis(20);
/// How often in their idle time iterators are looked at.
const EXPIRY_LOOKS: u64 = 8;
/// The time without a change after which a volume is idle: tombstones, over which every scan steps, are then removed although they are few.
const IDLE_TIME: Nanos = Nanos::from_secs(3);
/// Of an idle volume the active memtable is flushed if it has so many tombstones, and they are half of its entries or more.
const IDLE_TOMBSTONES: usize = 256;
/// Then a table with so many tombstones in a thousand entries is compacted.
const IDLE_TOMBSTONE_PERMILLE: u16 = 10;
/// A memtable is cheap to compact if what it overlaps has at most the bytes of so many tables and of so many memtables like it.
const CHEAP_TABLES: u64 = 2;
const CHEAP_MEMTABLES: u64 = 4;
/// The pause after failed maintenance.
const RETRY_DELAY: Nanos = PAUSE_MIN;
/// How often a caller that needs a compaction passes over what the device fails to read.
const PASSED_MAX: u32 = 8;
/// Of segments that have to be collected since space is scarce, so many of a thousand bytes may live.
const SCARCE_LIVE_PERMILLE: u16 = 900;
/// Then so many of a thousand dead bytes in all segments are worth compactions.
const SCARCE_GARBAGE_PERMILLE: u16 = 20;
/// The same before a put is refused.
const LAST_LIVE_PERMILLE: u16 = 990;
const LAST_GARBAGE_PERMILLE: u16 = 1;

/// A compaction that runs, until this is dropped.
pub(super) struct RunningCompaction<'a> {
    volume: &'a LsmVolume,
    compaction: Arc<TreeCompaction>,
}

impl Drop for RunningCompaction<'_> {
    fn drop(&mut self) {
        self.volume.compaction.running.lock().retain(|other| !Arc::ptr_eq(other, &self.compaction));
    }
}

impl<'a> RunningCompaction<'a> {
    /// Of a compaction that the list of those that run does not have yet.
    pub(super) fn begin(volume: &'a LsmVolume, compaction: TreeCompaction) -> RunningCompaction<'a> {
        let compaction = Arc::new(compaction);
        volume.compaction.running.lock().push(Arc::clone(&compaction));
        RunningCompaction { volume, compaction }
    }

    pub(super) fn compaction(&self) -> &TreeCompaction {
        &self.compaction
    }
}

/// What a step of compaction did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CompactionStep {
    /// It compacted.
    Compacted,
    /// The search for something to compact has not ended.
    LookAgain,
    /// There is nothing to compact.
    Nothing,
    /// A compaction failed because the device failed to read a table or a value. The next choice skips that table or segment.
    Postponed(EngineError),
}

impl LsmVolume {
    /// The sequence number of the oldest snapshot, or that of the last change.
    pub(super) fn oldest_snapshot(&self) -> u64 {
        let last = self.memtables.last_number();
        self.snapshots.oldest().map_or(last, |oldest| oldest.point.sequence)
    }

    fn choose(&self, need: SpaceDemand) -> CompactionChoice {
        self.release_reclaimed();
        let wants_space = need != SpaceDemand::None;
        let mut running = self.compaction.running.lock();
        let mut settings: CompactionSettings = self.settings.compaction.clone();
        (settings.segment_live_permille, settings.garbage_permille) = match need {
            SpaceDemand::All => (LAST_LIVE_PERMILLE, LAST_GARBAGE_PERMILLE),
            SpaceDemand::Garbage => (SCARCE_LIVE_PERMILLE, SCARCE_GARBAGE_PERMILLE),
            _ if (wants_space || self.is_space_scarce()) && self.has_excess_garbage() => {
                (SCARCE_LIVE_PERMILLE, SCARCE_GARBAGE_PERMILLE)
            }
            _ => (settings.segment_live_permille, settings.garbage_permille),
        };
        if self.compaction.is_idle.load(Ordering::Relaxed) {
            settings.tombstone_permille = settings.tombstone_permille.min(IDLE_TOMBSTONE_PERMILLE);
        }
        let mut unmovable = self.compaction.unmovable.lock().clone();
        unmovable.extend(self.compaction.crowded.lock().iter());
        let postponed = {
            let postponed = self.compaction.postponed.lock();
            unmovable.extend(postponed.segments());
            postponed.tables()
        };
        settings.wants_space = wants_space;
        // The rest is for the memtables, and for runs of which a part is given back.
        let free_bytes = self.space.free_units() * self.unit_bytes() as u64;
        settings.output_bytes_max = (free_bytes / 4 * 3) >> self.compaction.space_failures();
        settings.input_bytes_max = settings.input_bytes_max.min(settings.output_bytes_max / 2);
        if wants_space || self.is_space_scarce() {
            settings.moved_bytes_max = settings.moved_bytes_max.min(self.collected_bytes());
        }
        settings.moved_bytes_max = settings.moved_bytes_max.min(settings.input_bytes_max);
        let choice = self.versions.with_usage(|version, usage| {
            let input = CompactionInput {
                version,
                usage,
                running: &running,
                oldest_snapshot: self.oldest_snapshot(),
                forget_below: self.forget_below(),
                settings: &settings,
                unmovable: &unmovable,
                postponed: &postponed,
            };
            choose_compaction(&input, &mut self.compaction.choice.lock())
        });
        if let CompactionChoice::Compact(compaction) = &choice {
            running.push(Arc::new(compaction.clone()));
        }
        choice
    }

    /// Whether the tables below level 0 that share keys with a memtable are so few that a flush before it is full costs little: its keys are close to each other, as those of a
    /// deleted range are.
    fn is_cheap_to_compact(&self, memtable: &Memtable) -> bool {
        let ends = memtable.first_from(Position::START).zip(memtable.last_before(None));
        let Some((first, last)) = ends else { return false };
        let (first, last) = (memtable.entry(first).key, memtable.entry(last).key);
        let version = self.versions.current();
        let bytes_max = CHEAP_TABLES * self.settings.table_bytes + CHEAP_MEMTABLES * memtable.bytes() as u64;
        let mut bytes = 0;
        for level in 1..LEVELS {
            for table in version.level(level).range(version.overlapping(level, first, last)) {
                bytes += table.bytes();
                if bytes > bytes_max {
                    return false;
                }
            }
        }
        true
    }
}

impl LsmCore {
    /// Compacts once, if there is something to compact: the more space is needed, the less has to be gained.
    ///
    /// # Errors
    /// Those of the compaction, after which the tree is as it was.
    pub(super) async fn compact_step(
        &self,
        pace: &RunPace<'_>,
        need: SpaceDemand,
    ) -> Result<CompactionStep, EngineError> {
        let volume = &self.volume;
        let _hurry = pace.hurry(volume);
        let _guard = volume.work_locks.lock(COMPACTION_LOCK).await;
        if volume.commits.has_failed() {
            return Err(EngineError::ReadOnly);
        }
        match volume.choose(need) {
            CompactionChoice::Nothing => {
                // Nothing fits the bound that earlier failures left: the next choice has all of the free space again.
                volume.compaction.note_outcome(false);
                Ok(CompactionStep::Nothing)
            }
            CompactionChoice::LookAgain => Ok(CompactionStep::LookAgain),
            CompactionChoice::Compact(_) => {
                let compaction = volume.compaction.running.lock().last().cloned().expect("chosen above");
                let running = RunningCompaction { volume, compaction };
                let outcome = self.run_compaction(&running.compaction, pace).await;
                // It held the tables that it has replaced.
                drop(running);
                volume.release_reclaimed();
                let error = outcome.as_ref().err().map(|failure| failure.error());
                volume.compaction.note_outcome(error.as_ref().is_some_and(is_no_space));
                match outcome {
                    Ok(()) => Ok(CompactionStep::Compacted),
                    Err(RunFailure::Postponed(error)) => Ok(CompactionStep::Postponed(error)),
                    Err(RunFailure::Failed(error)) => Err(error),
                }
            }
        }
    }

    /// Makes room in the journal for a change of so many bytes, and in memory: flushes memtables and writes a checkpoint.
    pub(super) async fn make_journal_room(&self, change_bytes: usize) -> Result<(), EngineError> {
        let volume = &self.volume;
        let _guard = volume.work_locks.lock(ROOM_LOCK).await;
        let has_room = || {
            let used = || volume.commits.used_units();
            volume.journal_room.try_enter(change_bytes, used).is_some()
        };
        let has_memory = || volume.memtables.current().full.len() < volume.settings.memtables_max;
        if has_memory() && has_room() {
            return Ok(());
        }
        while !has_memory() {
            self.make_flush_room().await?;
            self.flush_oldest().await?;
        }
        if !has_room() && volume.commits.is_checkpoint_due() {
            self.make_flush_room().await?;
            self.flush_memtables().await?;
            checkpoint_if(self, || !has_room()).await?;
        }
        // The others that have passes are about to use their room.
        yield_now().await;
        Ok(())
    }

    /// Before a flush, keeps what flushes and compactions need: the reserve, which deletes use up since they are never refused; and few runs in level 0, since
    /// readers look at each.
    async fn make_flush_room(&self) -> Result<(), EngineError> {
        let volume = &self.volume;
        let is_short = || {
            volume.release_reclaimed();
            volume.space.free_units() < volume.kept_units() / 4 * 3
        };
        while is_short() {
            match self.compact_at_once(SpaceDemand::ForPuts).await? {
                // The flush needs none of what the device cannot read now.
                CompactionStep::Nothing | CompactionStep::Postponed(_) => break,
                CompactionStep::Compacted | CompactionStep::LookAgain => yield_now().await,
            }
        }
        while volume.versions.current().level0_runs() >= volume.settings.pacing.level0_hard
            && self.compact_at_once(SpaceDemand::None).await? == CompactionStep::Compacted
        {
            yield_now().await;
        }
        Ok(())
    }

    /// Compacts at once, for space or since level 0 has as many tables as it may have, if there is something to compact and space to do it. What the device fails
    /// to read is passed over, a few times.
    pub(super) async fn compact_at_once(&self, need: SpaceDemand) -> Result<CompactionStep, EngineError> {
        let mut passed = 0;
        loop {
            match self.compact_step(&RunPace { handle: None }, need).await {
                // Nothing has changed, and the next choice is a smaller one.
                Err(error) if is_no_space(&error) => match self.volume.compaction.is_out_of_space() {
                    true => return Ok(CompactionStep::Nothing),
                    false => yield_now().await,
                },
                Ok(CompactionStep::Postponed(_)) if passed < PASSED_MAX => {
                    passed += 1;
                    yield_now().await;
                }
                other => return other,
            }
        }
    }

    /// Maintains the volume until it is read-only: after changes it flushes memtables, writes checkpoints and durability markers. `report` receives each error, one that
    /// stays once. Counts its rounds in `rounds`.
    pub(super) async fn run_maintenance(
        &self,
        handle: &ReactorHandle,
        rounds: &Cell<u64>,
        report: impl Fn(EngineError),
    ) {
        let commits = &self.volume.commits;
        let (mut pause, mut reports) = (ROUND, ErrorReports::new(report));
        while !commits.has_failed() {
            commits.wait_unmarked_changes().await;
            handle.sleep(pause).await;
            rounds.set(rounds.get() + 1);
            if commits.has_failed() {
                break;
            }
            // Compactions that writes wait for go by this time, too.
            self.volume.compaction.postponed.lock().advance(handle.now());
            let outcome = self.maintenance_round().await;
            // What it has flushed may be worth a compaction, and after the last change no round follows.
            rounds.set(rounds.get() + 1);
            pause = match outcome {
                Ok(()) => {
                    reports.succeeded();
                    ROUND
                }
                Err(error) => {
                    reports.failed(error);
                    RETRY_DELAY
                }
            };
        }
    }

    async fn maintenance_round(&self) -> Result<(), EngineError> {
        let volume = &self.volume;
        volume.release_reclaimed();
        while volume.memtables.oldest_full().is_some() {
            self.make_flush_room().await?;
            self.flush_oldest().await?;
        }
        if self.has_tombstones(volume.settings.tombstones_max)
            && volume.is_cheap_to_compact(&volume.memtables.current().active.memtable)
        {
            self.flush_tombstones().await?;
        }
        if volume.commits.is_checkpoint_due() {
            checkpoint_if(self, || volume.commits.is_checkpoint_due()).await?;
        }
        if volume.commits.is_checkpoint_due() {
            // The journal has little but changes that are not in tables.
            self.flush_memtables().await?;
            checkpoint_if(self, || volume.commits.is_checkpoint_due()).await?;
        }
        flush_deferred(self).await?;
        write_durability_marker(self).await
    }

    /// Compacts, with pauses, until the volume is closed or read-only; not at all if the bound of compaction is 0. While there is nothing to compact it waits for `rounds`, the count of maintenance rounds.
    /// After an error it pauses, for longer each time until a compaction succeeds; if the device failed to read something, only that waits ([`super::postponed_reads`]).
    /// `report` receives each error, one that stays once. REQUIRES: the task that polls this polls the maintenance as well.
    pub(super) async fn run_compactions(
        &self,
        handle: &ReactorHandle,
        rounds: &Cell<u64>,
        report: impl Fn(EngineError),
    ) {
        let is_off = self.volume.settings.pacing.compaction_max == 0;
        let (mut pause, mut reports) = (RETRY_DELAY, ErrorReports::new(report));
        let postponed = &self.volume.compaction.postponed;
        let is_over = || self.is_over();
        let is_idle = &self.volume.compaction.is_idle;
        // The last change, and since when it is the last.
        let mut last_change = (self.volume.memtables.last_number(), handle.now());
        while !is_off && !self.is_over() {
            let before = rounds.get();
            postponed.lock().advance(handle.now());
            let change = self.volume.memtables.last_number();
            if change != last_change.0 {
                last_change = (change, handle.now());
            }
            let idle_at = last_change.1 + IDLE_TIME;
            is_idle.store(handle.now() >= idle_at, Ordering::Relaxed);
            if is_idle.load(Ordering::Relaxed)
                && self.has_many_tombstones()
                && let Err(error) = self.flush_tombstones().await
                && error != EngineError::NoMemory
                && !is_no_space(&error)
            {
                reports.failed(error);
            }
            let need = if self.volume.is_space_short() { SpaceDemand::ForPuts } else { SpaceDemand::None };
            match self.compact_step(&RunPace { handle: Some(handle) }, need).await {
                Ok(CompactionStep::Compacted) => {
                    pause = RETRY_DELAY;
                    if postponed.lock().is_empty() {
                        reports.succeeded();
                    }
                }
                Ok(CompactionStep::LookAgain) => handle.sleep(ROUND).await,
                Ok(CompactionStep::Nothing) => {
                    let until = postponed.lock().next_due().unwrap_or(Nanos::NEVER);
                    // Snapshots that end, and a flush that fails, cause no wake-up.
                    let has_tombstones = self.volume.snapshots.count() > 0 || self.has_many_tombstones();
                    let until = match handle.now() < idle_at {
                        true => until.min(idle_at),
                        false if has_tombstones => until.min(handle.now() + IDLE_TIME),
                        false => until,
                    };
                    wait_at_most(handle, until, || rounds.get() != before || self.is_over()).await;
                }
                Ok(CompactionStep::Postponed(error)) => {
                    reports.failed(error);
                    wait_at_most(handle, handle.now() + RETRY_DELAY, is_over).await;
                }
                // Buffers are for requests first.
                Err(error) if error == EngineError::NoMemory || is_no_space(&error) => {
                    handle.sleep(RETRY_DELAY).await;
                }
                Err(error) => {
                    reports.failed(error);
                    wait_at_most(handle, handle.now() + pause, is_over).await;
                    pause = next_pause(pause);
                }
            }
        }
    }

    /// Whether the active memtable has so many tombstones that scans of an idle volume notice them.
    fn has_many_tombstones(&self) -> bool {
        self.has_tombstones(IDLE_TOMBSTONES)
    }

    /// Whether the active memtable has so many tombstones, and they are half of its entries or more.
    fn has_tombstones(&self, least: usize) -> bool {
        let stack = self.volume.memtables.current();
        let memtable = &stack.active.memtable;
        let tombstones = memtable.tombstones();
        tombstones >= least && tombstones >= memtable.entries() / 2
    }

    /// Flushes the memtables, so that a compaction can drop the tombstones of the active one together with what they replaced.
    async fn flush_tombstones(&self) -> Result<(), EngineError> {
        self.make_flush_room().await?;
        self.flush_memtables().await
    }

    /// Ends iterators that were not used for long, until the volume is closed or read-only.
    pub(super) async fn run_expiry(&self, handle: &ReactorHandle) {
        let volume = &self.volume;
        let idle_time = volume.settings.iterator_idle;
        while !self.is_over() {
            volume.iterators.wait_for_iterators(|| volume.snapshots.count() > 0 || self.is_over()).await;
            // The time stood still while there were none.
            volume.time.store(handle.now().0, Ordering::Relaxed);
            volume.snapshots.touch(handle.now());
            while volume.snapshots.count() > 0 && !self.is_over() {
                handle.sleep(Nanos(idle_time.0 / EXPIRY_LOOKS)).await;
                volume.time.store(handle.now().0, Ordering::Relaxed);
                if volume.snapshots.expire(handle.now(), idle_time) > 0 {
                    volume.iterators.release_expired();
                }
            }
        }
    }

    /// Whether background work ends.
    pub(super) fn is_over(&self) -> bool {
        self.volume.commits.has_failed() || self.volume.compaction.is_over.load(Ordering::Relaxed)
    }
}

/// Whether an error says that no free run was long enough.
pub(super) fn is_no_space(error: &EngineError) -> bool {
    matches!(error, EngineError::Device { error: DeviceError::NoSpace, .. })
}
