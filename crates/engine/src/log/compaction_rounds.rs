//! Rounds of compaction: which log, one round of it, and the chunks that become free.
//!
//! ```text
//!   candidates of all stores ─choose_compacted_log─▶ (store, log) ─round─▶ head advanced ─marker, flush─▶ chunk free
//!                                   ▲                       └ paused: the next choice without it
//!                                   └── running compactions, free chunks
//! ```
//! Further rounds of the same log follow while the policy would choose it again, and are prefetched.
//!
//! In: how many chunks should be free. Out: whether anything helped. Invariants: one compaction of a log at a time; a round whose caller is
//! dropped leaves what it moved so far, so callers let rounds run to their ends.
//! Tested in `compaction_tests.rs`.

use super::chunk_directory::DIRECTORY_ID_BYTES;
use super::chunk_log::ChunkLog;
use super::compaction_policy::{
    CompactionCandidate, StoreContents, choose_compacted_log, expected_images, is_space_enough, key_worth_max,
};
use super::core::LogCore;
use super::log_place::LogKind;
use super::pinned_chunks::is_passing_error;
use super::sealed_sums::{LiveContents, LiveSums, SealedSums};
use super::store::{Store, StoreState};
use crate::{Durability, EngineError};
use octokv_device::DeviceError;
use octokv_runtime::yield_now;
use std::cell::Cell;
use std::sync::atomic::Ordering;

/// How often a marker is tried while other batches of its store begin: one of them says the same.
const MARKER_ATTEMPTS_MAX: u32 = 64;

/// The number of compactions that run at once however few chunks are spare.
const UNCROWDED: u32 = 4;
/// The spare chunks that each running compaction needs before one more begins, from [`UNCROWDED`] on. With fewer they contend for the last free chunks.
const CHUNKS_PER_COMPACTION: u32 = 2;

/// How a round of compaction ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundEnd {
    /// The head of the log has advanced.
    Advanced,
    /// Space was short, or a write in the head chunk is under way: a later round goes on.
    Paused {
        /// Whether anything was moved.
        has_moved: bool,
    },
    /// The round waits: its window would take more free chunks than the windows or rounds of other stores leave.
    OutOfTurn,
    /// The log has no sealed chunk.
    NoChunk,
}

/// Which rounds begin while other compactions run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RoundPace {
    /// All, one at a time, as fast as the device is.
    Any,
    /// At the pace that free space asks for, all but those that open a window for which the open ones of other stores leave too few free chunks ([`SpaceLimits::window_chunks`]), those of
    /// key logs whose space is worth far more, and none beside many compactions that leave few spare chunks.
    ///
    /// [`SpaceLimits::window_chunks`]: super::space_limits::SpaceLimits::window_chunks
    InTurn,
}

/// What lives in the sealed chunks of a log.
#[derive(Clone, Copy, Debug, Default)]
struct LogContents {
    chunks: u64,
    head: LiveContents,
    /// Images or records of all sealed chunks.
    records: u64,
    /// Their units or granules.
    amount: u64,
    garbage_bytes: u64,
}

impl LogContents {
    /// What lives in the head chunk, or in a chunk on average if that is less. A head that is fuller than the others is cold: what compacting it costs is
    /// spent on the garbage behind it.
    fn head_or_mean(&self) -> LiveContents {
        let mean = |sum: u64| sum.checked_div(self.chunks).map_or(0, |mean| mean as u32);
        let mean = LiveContents { records: mean(self.records).max(1), amount: mean(self.amount).max(1) };
        if self.head.amount > mean.amount { mean } else { self.head }
    }
}

impl LogCore {
    /// Compacts the log whose space is worth least, for so many chunks that a write needs. False if enough are free, or nothing helps
    /// now. With [`RoundPace::InTurn`] windows of several stores are opened one after another: a window first takes chunks, and with too many of them
    /// the rounds would find none, and write an image for each record.
    ///
    /// # Errors
    /// No memory; device failures, if nothing else helped. The round may be repeated.
    pub(super) async fn compact_round(&self, wanted: u32, pace: RoundPace) -> Result<bool, EngineError> {
        let (volume, pool) = (&self.volume, &self.volume.pool);
        if is_space_enough(pool.free(), wanted, volume.passes.spare_chunks(pool), pool.limits()) {
            return Ok(false);
        }
        let others = volume.compactions.len();
        let is_crowded =
            others >= UNCROWDED && volume.passes.spare_chunks(pool) < CHUNKS_PER_COMPACTION * others;
        if pace == RoundPace::InTurn && (is_crowded || others as usize >= self.compactions_at_once(wanted)) {
            return Ok(false);
        }
        let ((mut candidates, mut postponed), mut out_of_turn) = (self.candidates(), Vec::new());
        let (mut failure, mut pace) = (None, pace);
        loop {
            let running = volume.compactions.list();
            let chosen = choose_compacted_log(
                &candidates,
                pool.free(),
                wanted,
                volume.passes.spare_chunks(pool),
                pool.limits(),
                &running,
            );
            let Some(chosen) = chosen else {
                if !postponed.is_empty() {
                    candidates = std::mem::take(&mut postponed);
                } else if !out_of_turn.is_empty() && running.is_empty() {
                    // The open windows are in the way, and do not go on.
                    (candidates, pace) = (std::mem::take(&mut out_of_turn), RoundPace::Any);
                } else {
                    return failure.map_or(Ok(false), Err);
                }
                continue;
            };
            let candidate = candidates.remove(chosen);
            let is_room_short = volume.compactions.is_crowded(volume.passes.spare_chunks(pool).into());
            let worth_max = key_worth_max(&out_of_turn, is_room_short);
            let CompactionCandidate { store, log, .. } = candidate;
            if log == LogKind::Keys && candidate.space_worth > worth_max {
                continue;
            }
            let store = volume.stores.iter().find(|other| other.id == store);
            let store = store.expect("candidates are of stores");
            let room = (pace == RoundPace::InTurn).then(|| self.window_room(store)).flatten();
            let goes_on = || {
                pace == RoundPace::InTurn
                    && self.may_go_on()
                    && volume.compactions.len() as usize
                        <= self.compactions_at_once(volume.passes.wanted_chunks(pool))
                    && self.is_next_choice(store, log, (&out_of_turn, worth_max))
            };
            match self.compact_within(store, log, (pace, room), &goes_on).await {
                Ok(RoundEnd::OutOfTurn) => out_of_turn.push(candidate),
                Ok(RoundEnd::Advanced | RoundEnd::Paused { has_moved: true }) => return Ok(true),
                Ok(RoundEnd::Paused { has_moved: false } | RoundEnd::NoChunk) => {}
                // The other logs are on other blocks of the device.
                Err(error) if is_passing_error(&error) => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
    }

    /// Compacts the first `rounds` chunks of one of the logs of each store, which overlap unless compaction has a limit: then it is the head chunk alone.
    /// Whether a head has advanced.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    pub(super) async fn compact_stores(&self, log: LogKind, rounds: u32) -> Result<bool, EngineError> {
        let mut has_advanced = false;
        for store in &self.volume.stores {
            let left = Cell::new(rounds.saturating_sub(1));
            let goes_on = || self.may_go_on() && left.replace(left.get().saturating_sub(1)) > 0;
            has_advanced |= self.compact_within(store, log, (RoundPace::Any, None), &goes_on).await?
                == RoundEnd::Advanced;
        }
        Ok(has_advanced)
    }

    /// One round of value compaction in a window that has taken more free chunks than it gave back, though space is enough. The first rounds of a window
    /// move most of its records, so the later ones free a chunk each for few moves. False if no window is such, or the round moved nothing.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    pub(super) async fn finish_window(&self) -> Result<bool, EngineError> {
        let running = self.volume.compactions.list();
        let has_debt = |store: &Store| {
            let state = store.state.lock();
            let has_debt = state.window.as_ref().is_some_and(|window| window.has_debt(state.values.head()));
            has_debt && !state.is_lost && !state.pinned.is_postponed(LogKind::Values)
        };
        let is_idle = |store: &&Store| !running.contains(&(store.id, LogKind::Values));
        let mut idle = self.volume.stores.iter().filter(is_idle);
        let Some(store) = idle.find(|store| has_debt(store)) else { return Ok(false) };
        let goes_on = || self.may_go_on() && has_debt(store);
        let end = self.compact_within(store, LogKind::Values, (RoundPace::InTurn, None), &goes_on).await?;
        Ok(matches!(end, RoundEnd::Advanced | RoundEnd::Paused { has_moved: true }))
    }

    /// The free chunks that a new window of a store may take, [`SpaceLimits::window_chunks`](super::space_limits::SpaceLimits::window_chunks) less
    /// those that the open windows of other stores still take. `None` is no limit: those take none.
    fn window_room(&self, store: &Store) -> Option<u64> {
        let others = self.volume.stores.iter().filter(|other| other.id != store.id);
        let takes_more = |other: &Store| {
            let state = other.state.lock();
            // A window whose rounds the device fails for the moment takes none.
            let is_served = !state.is_lost && !state.pinned.is_postponed(LogKind::Values);
            let window = state.window.as_ref().filter(|_| is_served);
            window.map_or(0, |window| window.takes_more(state.values.head()))
        };
        let taken: u64 = others.map(takes_more).sum();
        (taken > 0).then(|| self.volume.pool.limits().window_chunks().saturating_sub(taken))
    }

    /// One round of a log.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    #[cfg(test)]
    pub(super) async fn compact_once(&self, store: &Store, log: LogKind) -> Result<RoundEnd, EngineError> {
        self.compact_within(store, log, (RoundPace::Any, None), &|| false).await
    }

    /// One round of a log, and what makes the chunk free that it gave up; and further rounds while `goes_on` returns true: each round calls that when its last
    /// accesses are in progress, and prefetches the next one. Does nothing if the log is being compacted, or its store is lost. `window_room` limits the free
    /// chunks that a new window of a value log may take; `None` is no limit.
    ///
    /// # Errors
    /// As for [`LogCore::compact_round`].
    async fn compact_within(
        &self,
        store: &Store,
        log: LogKind,
        (pace, window_room): (RoundPace, Option<u64>),
        goes_on: &dyn Fn() -> bool,
    ) -> Result<RoundEnd, EngineError> {
        let paused = RoundEnd::Paused { has_moved: false };
        if self.volume.is_read_only() {
            return Err(EngineError::ReadOnly);
        }
        let Some(turn) = self.volume.compactions.begin(store.id, log) else { return Ok(paused) };
        if store.state.lock().is_lost {
            return Ok(paused);
        }
        // Boxed because they are long, and rare beside the operations that may run them.
        let end = match log {
            LogKind::Keys => Box::pin(self.compact_keys(store, goes_on)).await,
            LogKind::Values => Box::pin(self.compact_values(store, (pace, window_room), goes_on)).await,
        }?;
        drop(turn);
        if !matches!(end, RoundEnd::OutOfTurn | RoundEnd::Paused { has_moved: false }) {
            // Writes that compact while they wait may go on with this log.
            self.volume.passes.chunks_freed(&self.volume.pool);
        }
        Ok(end)
    }

    /// Completes a round: pins the head chunk behind repeated device errors, and frees the chunk in front of an advanced head.
    ///
    /// # Errors
    /// That of the round, unless space was short; of a checkpoint; as for [`LogCore::free_retired`].
    pub(super) async fn end_round(
        &self,
        store: &Store,
        log: LogKind,
        end: Result<RoundEnd, EngineError>,
    ) -> Result<RoundEnd, EngineError> {
        self.note_round(store, log, &end).await?;
        let end = match end {
            Err(EngineError::Device { error: DeviceError::NoSpace, .. }) => {
                return Ok(RoundEnd::Paused { has_moved: false });
            }
            end => end?,
        };
        if end == RoundEnd::Advanced {
            self.volume.counters.compaction_rounds.fetch_add(1, Ordering::Relaxed);
            self.free_retired(store).await?;
        }
        Ok(end)
    }

    /// How many of at most `most` steps of compaction run at once: all while a write waits for `wanted` chunks.
    fn steps_at_once(&self, wanted: u32, most: usize) -> usize {
        let pool = &self.volume.pool;
        match wanted {
            0 => pool.limits().steps_at(self.volume.passes.spare_chunks(pool), most),
            _ => most,
        }
    }

    /// How many compactions run at once, on all cores.
    fn compactions_at_once(&self, wanted: u32) -> usize {
        self.steps_at_once(wanted, self.volume.compactions_max())
    }

    /// How many segments one compaction handles at once.
    pub(super) fn visits_at_once(&self, pace: RoundPace) -> usize {
        let most = self.volume.settings.sub_compactions.max(1);
        match pace {
            RoundPace::Any => most,
            RoundPace::InTurn => {
                self.steps_at_once(self.volume.passes.wanted_chunks(&self.volume.pool), most)
            }
        }
    }

    /// Whether rounds may follow each other without a pause: the volume is open, and what compaction writes has no limit.
    fn may_go_on(&self) -> bool {
        let (volume, settings) = (&self.volume, &self.volume.settings);
        let is_open = !volume.is_read_only() && !volume.is_closing.load(Ordering::Acquire);
        is_open && settings.overlaps_rounds && settings.compaction_max_per_second == u64::MAX
    }

    /// Whether the policy would choose a log again if its head chunk were compacted. Value logs of other stores are no rivals of an open window, and the logs
    /// in `waits`, which found no room for a window, are no rivals of a key log.
    fn is_next_choice(
        &self,
        store: &Store,
        log: LogKind,
        (waits, key_worth_max): (&[CompactionCandidate], f64),
    ) -> bool {
        let (volume, pool) = (&self.volume, &self.volume.pool);
        let is_own = |other: &CompactionCandidate| (other.store, other.log) == (store.id, log);
        let next = {
            let state = store.state.lock();
            self.candidates_of(store, &state, 1).into_iter().flatten().find(is_own)
        };
        let Some(next) = next else { return false };
        if log == LogKind::Keys && next.space_worth > key_worth_max {
            return false;
        }
        let is_rival = |other: &CompactionCandidate| {
            let waits = waits.iter().any(|waiting| (waiting.store, waiting.log) == (other.store, other.log));
            !is_own(other)
                && !waits
                && (log == LogKind::Keys || other.log == LogKind::Keys || other.is_head_empty)
        };
        let mut candidates = self.candidates().0;
        candidates.retain(is_rival);
        candidates.push(next);
        let mut running = volume.compactions.list();
        running.retain(|other| *other != (store.id, log));
        let chosen = choose_compacted_log(
            &candidates,
            pool.free(),
            volume.passes.wanted_chunks(pool),
            volume.passes.spare_chunks(pool),
            pool.limits(),
            &running,
        );
        chosen.is_some_and(|chosen| is_own(&candidates[chosen]))
    }

    /// States the heads of a store in its key log and makes that durable, which frees the chunks in front of them. Key chunks that a replay
    /// needs wait for a checkpoint, which is written.
    ///
    /// # Errors
    /// A failed write, which makes the volume read-only; device failures of the checkpoint.
    async fn free_retired(&self, store: &Store) -> Result<(), EngineError> {
        let is_unstated = |store: &Store| {
            let state = store.state.lock();
            state.retired.iter().any(|retired| retired.stated_by.is_none())
        };
        for _ in 0..MARKER_ATTEMPTS_MAX {
            if !is_unstated(store) {
                break;
            }
            match self.append_marker_now(store).await {
                // The next image states them.
                Err(EngineError::Device { error: DeviceError::NoSpace, .. }) => break,
                stated => stated?,
            }
        }
        if self.volume.settings.durability == Durability::Completed {
            let stores = self.volume.stores.iter();
            let published: Vec<u64> =
                stores.map(|store| store.state.lock().batches.published_sequence()).collect();
            self.flush_device(&published).await?;
        }
        let is_replayed = {
            let state = store.state.lock();
            let is_replayed = |index| index >= state.replay_start;
            state.retired.iter().any(|retired| retired.log == LogKind::Keys && is_replayed(retired.index))
        };
        if is_replayed {
            Box::pin(self.checkpoint(false)).await?;
        }
        Ok(())
    }

    /// Appends a marker, or lets others run whose batch is about to begin.
    ///
    /// # Errors
    /// As for [`LogCore::append_marker`].
    pub(super) async fn append_marker_now(&self, store: &Store) -> Result<(), EngineError> {
        if self.volume.is_read_only() {
            return Err(EngineError::ReadOnly);
        }
        let before = store.state.lock().batches.claimed_sequence();
        self.append_marker(store).await?;
        if store.state.lock().batches.claimed_sequence() == before {
            yield_now().await;
        }
        Ok(())
    }

    /// The logs with a sealed chunk, of all stores that serve; and those of them that the device failed to read a short time ago.
    pub(super) fn candidates(&self) -> (Vec<CompactionCandidate>, Vec<CompactionCandidate>) {
        let (mut candidates, mut postponed) = (Vec::with_capacity(2 * self.volume.stores.len()), Vec::new());
        for store in &self.volume.stores {
            let state = store.state.lock();
            if state.is_lost {
                continue;
            }
            for candidate in self.candidates_of(store, &state, 0).into_iter().flatten() {
                match state.pinned.is_postponed(candidate.log) {
                    true => postponed.push(candidate),
                    false => candidates.push(candidate),
                }
            }
        }
        (candidates, postponed)
    }

    /// The logs of a store with more than `passed` sealed chunks, as they are when so many of them are compacted.
    fn candidates_of(
        &self,
        store: &Store,
        state: &StoreState,
        passed: usize,
    ) -> [Option<CompactionCandidate>; 2] {
        let (layout, pool) = (self.volume.layout(), &self.volume.pool);
        let unit_bytes = u64::from(layout.unit_bytes);
        // The images of a key log are counted.
        let keys = self.contents_of(&state.keys, passed, LiveSums::default());
        // A pass over the whole log leaves these ends again. What chunks of any log are allowed for is part of them.
        let images = SealedSums { records: keys.records, amount: keys.amount, ..SealedSums::default() };
        let left_bytes = keys.chunks * (pool.sizes().key_end_bytes(&images) - pool.sizes().end_bytes());
        let keys = LogContents { garbage_bytes: keys.garbage_bytes.saturating_sub(left_bytes), ..keys };
        let values = self.contents_of(&state.values, passed, self.sealed_values(state));
        // A window has the same part of the records as of the chunks.
        let window = (values.chunks / u64::from(self.volume.settings.window_divisor.max(1))).max(1);
        let window_records = (values.records * window).checked_div(values.chunks).unwrap_or(0);
        let value_head = values.head_or_mean();
        let window_records = window_records.max(value_head.records.into());
        let images = expected_images(value_head.records, window_records, state.table.segments());
        let records_bytes =
            (values.amount << layout.granule_log2) + values.records * DIRECTORY_ID_BYTES as u64;
        let key_tail = self.volume.pool.live_of(state.keys.tail().chunk).map_or(0, |live| live.amount);
        let key_bytes = |units: u64| (units * unit_bytes) as f64;
        let contents = StoreContents {
            chunk_bytes: layout.chunk_bytes().into(),
            image_bytes: key_bytes(keys.amount.checked_div(keys.records).unwrap_or(1)),
            record_bytes: records_bytes.checked_div(values.records).unwrap_or(0) as f64,
            keys: [
                key_bytes(keys.amount + u64::from(key_tail)),
                key_bytes(keys.head_or_mean().amount.into()),
            ],
            values: [
                (state.totals_published.live_granules << layout.granule_log2) as f64,
                pool.sizes().live_bytes(LogKind::Values, value_head) as f64,
            ],
            head_records: value_head.records.into(),
            head_images: images,
        };
        let of_keys = CompactionCandidate {
            store: store.id,
            log: LogKind::Keys,
            space_worth: contents.key_costs().space_worth(),
            is_head_empty: false,
            garbage_bytes: keys.garbage_bytes,
            is_begun: false,
            needed_chunks: 0,
        };
        let head = state.values.head();
        let is_head_empty = values.head.records == 0;
        let of_values = CompactionCandidate {
            log: LogKind::Values,
            space_worth: if is_head_empty { 0.0 } else { contents.value_costs().space_worth() },
            is_head_empty,
            garbage_bytes: values.garbage_bytes,
            is_begun: state.window.as_ref().is_some_and(|window| window.end() > head && window.is_begun()),
            needed_chunks: self.needed_chunks(store, values.head),
            ..of_keys
        };
        [(keys.chunks > 0).then_some(of_keys), (values.chunks > 0).then_some(of_values)]
    }

    /// The chunks that compacting a value chunk takes at least before that is free.
    fn needed_chunks(&self, store: &Store, live: LiveContents) -> u32 {
        match live.amount {
            0 => 0,
            // Records in extents take as many as they have chunks: visits find that out.
            granules => store.tail.lock().chunks_of(granules).min(1) + self.image_chunks_min(store),
        }
    }

    /// The live contents of all sealed chunks of a value log.
    fn sealed_values(&self, state: &StoreState) -> LiveSums {
        let in_tail = self.volume.pool.live_of(state.values.tail().chunk).unwrap_or_default();
        let totals = &state.totals_published;
        LiveSums {
            // A key with an empty value has no record; such keys are taken to be few.
            records: totals.keys.saturating_sub(in_tail.records.into()),
            amount: totals.live_granules.saturating_sub(in_tail.amount.into()),
        }
    }

    /// The estimated live contents of a sealed chunk of a value log whose live contents are not counted since a recovery.
    pub(super) fn uncounted_values(&self, state: &StoreState) -> LiveContents {
        let (pool, live) = (&self.volume.pool, self.sealed_values(state));
        let sums = pool.sealed_sums(state.values.partition(), LogKind::Values);
        sums.uncounted_mean(live, self.volume.layout().chunk_granules())
    }

    /// Live contents and garbage of the sealed chunks of a log, without the first `passed`. `live` are the live contents of all sealed chunks, from which those of chunks
    /// that are not counted since a recovery are estimated ([`SealedSums::uncounted_mean`]).
    fn contents_of(&self, log: &ChunkLog, passed: usize, live: LiveSums) -> LogContents {
        let (pool, kind) = (&self.volume.pool, log.kind());
        let mut sealed = log.sealed().map(|(_, chunk)| chunk);
        let sums =
            sealed.by_ref().take(passed).fold(pool.sealed_sums(log.partition(), kind), |sums, chunk| {
                sums.without(pool.sealed_part(chunk))
            });
        let mean = sums.uncounted_mean(live, self.volume.layout().chunk_granules());
        let unused_bytes = sums.uncounted * pool.sizes().garbage_bytes(kind, mean);
        LogContents {
            chunks: sums.counted + sums.uncounted,
            head: sealed.next().map_or(LiveContents::default(), |head| pool.live_of(head).unwrap_or(mean)),
            records: sums.records + sums.uncounted * u64::from(mean.records),
            amount: sums.amount + sums.uncounted * u64::from(mean.amount),
            garbage_bytes: sums.garbage_bytes + unused_bytes.saturating_sub(sums.uncounted_vacated_bytes),
        }
    }
}
