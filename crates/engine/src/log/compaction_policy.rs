//! Which log is compacted next. Pure: the head chunks of a core's logs, free space and the compactions that run go in; a choice comes out.
//!
//! With f the live part of a head chunk, compacting it writes f of a chunk again and frees 1 - f:
//!
//! ```text
//!   key log     cost of a freed byte   f / (1 - f)
//!   value log                          (f + images · image bytes / chunk bytes) / (1 - f)     each visited segment is appended, too
//! ```
//! Choosing the cheapest over both logs of all stores equalizes their marginal costs, which is the least writing for the garbage that the
//! pool has room for.
//!
//! Progress: a log is a queue, so a head without garbage has to be moved to reach what lies behind it. A log that has no garbage is never
//! chosen, one whose head has none is chosen last. A record in extents moves as a whole and leaves space in chunks behind the head; this is no
//! garbage here, or the last record of a log would be moved again and again for what its former move has left. Without writes of users each choice reduces the garbage of value logs, or leaves that
//! and reduces the garbage of key logs or the number of chunks before it, so choices come to an end, and then no garbage is left.
//! Tested below by a table, and in `space_progress_tests.rs` in a model of a full device.

use super::log_place::LogKind;
use super::space_limits::SpaceLimits;
use std::cmp::Ordering;

/// A log that has a sealed head chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompactionCandidate {
    /// The partition of its store.
    pub store: u32,
    /// Which of its logs.
    pub log: LogKind,
    /// The live bytes of the head chunk, directory included.
    pub live_bytes: u64,
    /// The bytes of a chunk.
    pub chunk_bytes: u64,
    /// The mean length of the store's segment images, in bytes.
    pub image_bytes: u64,
    /// The images that compacting the head chunk of a value log will append, as expected; 0 for a key log.
    pub images: f64,
    /// The bytes of images or records in all sealed chunks of the log that are not live, and that compaction has not vacated itself by moving
    /// a record. The ends of chunks, in which nothing lies, are no garbage: compaction does not free them.
    pub garbage_bytes: u64,
    /// Whether records of the head chunk, or of its window, were moved, and others were not yet.
    pub is_begun: bool,
    /// The least free chunks that compacting the head chunk of a value log takes before that is free: 0 if the tail of the log has room for its
    /// live records, and the tail of the key log for an image. 0 for a key log, whose rounds have F_key.
    pub needed_chunks: u32,
}

impl CompactionCandidate {
    /// The bytes written for each byte freed; infinite if nothing is.
    pub fn cost(&self) -> f64 {
        let chunk = self.chunk_bytes as f64;
        let live = (self.live_bytes as f64).min(chunk);
        let images = match self.log {
            LogKind::Keys => 0.0,
            LogKind::Values => self.images * self.image_bytes as f64,
        };
        // A quotient of 0 and 0 does not happen: a chunk has bytes, so one of both is above 0.
        (live + images) / (chunk - live)
    }
}

/// Whether no compaction is needed: at least `wanted` chunks are free, and at least F_start of them cannot be taken by writes and compactions
/// in progress. If compaction stopped at F_start free chunks, a burst of writes would wait at once.
pub fn is_space_enough(free: u32, wanted: u32, spare: u32, limits: &SpaceLimits) -> bool {
    free >= wanted && spare.saturating_add(limits.key) >= limits.start
}

/// Chooses the log whose head chunk is compacted next: the cheapest freed byte; with equal costs more garbage, then the lower place in the
/// list. While space is short, those that take fewer chunks go before cheaper ones. `None` if space is enough ([`is_space_enough`]; a waiting write needs `wanted` free chunks, 0 without one), or nothing that may run frees
/// any. `spare` are the free chunks without F_key and without those that work in progress may take. `running` are the compactions that run, on all cores.
pub fn choose_compacted_log(
    candidates: &[CompactionCandidate],
    free: u32,
    wanted: u32,
    spare: u32,
    limits: &SpaceLimits,
    running: &[(u32, LogKind)],
) -> Option<usize> {
    if is_space_enough(free, wanted, spare, limits) {
        return None;
    }
    // Moving the longest record would not be possible.
    let is_short = spare < limits.value - limits.key;
    let runs = |kind| running.iter().any(|&(_, log)| log == kind);
    let (keys_run, values_run) = (runs(LogKind::Keys), runs(LogKind::Values));
    let may_run = |candidate: &CompactionCandidate| match candidate.log {
        // Two that each take a chunk might both find no further one.
        LogKind::Values if candidate.needed_chunks > 0 => {
            candidate.needed_chunks <= spare && !(is_short && values_run)
        }
        LogKind::Values => true,
        // There are only two of those.
        LogKind::Keys => !(is_short && keys_run),
    };
    let is_candidate = |candidate: &CompactionCandidate| {
        let is_empty = candidate.log == LogKind::Values && candidate.images == 0.0;
        (candidate.garbage_bytes > 0 || candidate.is_begun || is_empty)
            && may_run(candidate)
            && !running.contains(&(candidate.store, candidate.log))
    };
    let indexed = candidates.iter().enumerate().filter(|(_, candidate)| is_candidate(candidate));
    let best = indexed.min_by(|(_, a), (_, b)| {
        // While space is short, a chunk that one value log has taken is filled before another log takes one.
        let by_need = if is_short { a.needed_chunks.cmp(&b.needed_chunks) } else { Ordering::Equal };
        let by_cost = a.cost().total_cmp(&b.cost());
        by_need.then(by_cost).then(b.garbage_bytes.cmp(&a.garbage_bytes))
    });
    best.map(|(index, _)| index)
}

/// The images that compacting a value chunk appends, as expected: of its live records, all in different segments, each is the first of its
/// segment in the window that is visited as a whole, with the probability that none of the segment's other live records in the window is.
///
/// `live_records` of the chunk; `window_records` live in the window, in `segments` segments.
pub fn expected_images(live_records: u32, window_records: u64, segments: u64) -> f64 {
    if window_records == 0 || live_records == 0 {
        return 0.0;
    }
    // With m records over s segments, s · (1 - e^(-m/s)) segments have one. The chunk has its share of their visits.
    let (records, segments) = (window_records as f64, segments.max(1) as f64);
    let visited = segments * -(-records / segments).exp_m1();
    let share = (f64::from(live_records) / records).min(1.0);
    visited * share
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const CHUNK: u64 = 1_000;

    /// A candidate with a live part in percent, and garbage in bytes.
    fn keys(store: u32, live: u64, garbage: u64) -> CompactionCandidate {
        CompactionCandidate {
            store,
            log: LogKind::Keys,
            live_bytes: live * CHUNK / 100,
            chunk_bytes: CHUNK,
            image_bytes: 100,
            images: 0.0,
            garbage_bytes: garbage,
            is_begun: false,
            needed_chunks: 0,
        }
    }

    fn values(store: u32, live: u64, images: f64, garbage: u64) -> CompactionCandidate {
        let needed_chunks = if images == 0.0 { 0 } else { 2 };
        CompactionCandidate { log: LogKind::Values, images, needed_chunks, ..keys(store, live, garbage) }
    }

    /// A value log whose head chunk takes one chunk.
    fn values_in_one(store: u32) -> CompactionCandidate {
        CompactionCandidate { needed_chunks: 1, ..values(store, 1, 1.0, 500) }
    }

    /// A value log without garbage whose head chunk was left in part.
    fn begun(store: u32, live: u64) -> CompactionCandidate {
        CompactionCandidate { is_begun: true, ..values(store, live, 1.0, 0) }
    }

    #[test]
    fn costs_are_those_of_the_formula() {
        assert_eq!(keys(0, 50, 1).cost(), 1.0);
        assert_eq!(keys(0, 80, 1).cost(), 4.0);
        assert_eq!(values(0, 50, 0.0, 1).cost(), 1.0);
        assert_eq!(values(0, 50, 2.5, 1).cost(), 1.5);
        assert_eq!(values(0, 0, 0.0, 1).cost(), 0.0);
        assert_eq!(keys(0, 100, 1).cost(), f64::INFINITY);
        assert_eq!(values(0, 120, 1.0, 1).cost(), f64::INFINITY, "an estimate above a chunk");
    }

    #[test]
    fn the_cheapest_freed_byte_is_chosen() {
        use LogKind::{Keys, Values};
        let limits = SpaceLimits::new(640, 4, 1);
        assert_eq!((limits.start, limits.value), (12, 4));
        let (some, none) = (500, 0);
        let cases = [
            // want, free, running, candidates
            (Some(1), 11, vec![], vec![keys(0, 80, some), keys(1, 50, some), keys(2, 60, some)]),
            (None, 12, vec![], vec![keys(0, 0, some)]),
            (None, 11, vec![], vec![]),
            // Images make a value chunk dearer than a key chunk with the same live part.
            (Some(1), 11, vec![], vec![values(0, 50, 3.0, some), keys(0, 60, some)]),
            (Some(0), 11, vec![], vec![values(0, 50, 0.5, some), keys(0, 60, some)]),
            // The other log of the store may run; the same one may not.
            (Some(1), 11, vec![(0, Keys)], vec![keys(0, 10, some), values(0, 50, 0.0, some)]),
            (Some(0), 11, vec![(1, Keys)], vec![keys(0, 10, some), keys(1, 5, some)]),
            // Below the floor of value compaction: one key compaction alone.
            (Some(1), 3, vec![], vec![values(0, 1, 1.0, some), keys(1, 90, some)]),
            (None, 3, vec![(5, Keys)], vec![values(0, 1, 1.0, some), keys(1, 90, some)]),
            (Some(1), 3, vec![(5, Values)], vec![values(0, 1, 1.0, some), keys(1, 90, some)]),
            // Too few for two value compactions that each take a chunk: one alone, beside one of a key log, or of a chunk without live records.
            (Some(0), 3, vec![(5, Keys)], vec![values_in_one(0)]),
            (None, 3, vec![(5, Values)], vec![values_in_one(0)]),
            (Some(1), 3, vec![(5, Values)], vec![values_in_one(0), values(1, 1, 0.0, none)]),
            (Some(0), 4, vec![(5, Values)], vec![values_in_one(0)]),
            // A chunk that whole records have left is freed at any time, and what has begun goes on.
            (Some(0), 3, vec![(5, Keys)], vec![values(0, 1, 0.0, none), keys(1, 90, some)]),
            (Some(0), 11, vec![], vec![begun(0, 50), keys(1, 90, some)]),
            (None, 3, vec![], vec![begun(0, 50)]),
            // Without garbage nothing is freed; a full head hides garbage behind it, and is the last choice.
            (None, 11, vec![], vec![keys(0, 50, none), values(0, 100, 1.0, none)]),
            (Some(1), 11, vec![], vec![keys(0, 100, some), keys(1, 99, some)]),
            (Some(0), 11, vec![], vec![keys(0, 100, some), keys(1, 10, none)]),
            (Some(1), 11, vec![], vec![keys(0, 100, some), values(0, 100, 1.0, some + 1)]),
            // A tie: lower place, so runs repeat.
            (Some(0), 11, vec![], vec![keys(3, 50, some), keys(1, 50, some)]),
        ];
        for (number, (want, free, running, candidates)) in cases.into_iter().enumerate() {
            assert_eq!(
                choose_compacted_log(
                    &candidates,
                    free,
                    0,
                    free.saturating_sub(limits.key),
                    &limits,
                    &running
                ),
                want,
                "case {number}"
            );
        }
    }

    #[test]
    fn a_write_that_needs_more_than_the_start_has_it_compacted() {
        let limits = SpaceLimits::new(640, 4, 1);
        let candidates = [keys(0, 50, 500)];
        for (free, wanted, want) in
            [(12, 0, None), (12, 40, Some(0)), (39, 40, Some(0)), (40, 40, None), (11, 5, Some(0))]
        {
            assert_eq!(
                choose_compacted_log(&candidates, free, wanted, free - limits.key, &limits, &[]),
                want,
                "{free} free, {wanted} wanted"
            );
        }
    }

    #[test]
    fn a_window_shares_the_images_of_a_segment() {
        // One record a segment: each has an image of its own.
        assert!((expected_images(100, 100, 1_000_000) - 100.0).abs() < 0.1);
        // Ten of every segment in the window: a tenth of the records is the first of its segment.
        let images = expected_images(100, 10_000, 1_000);
        assert!((9.9..10.1).contains(&images), "{images}");
        assert_eq!((expected_images(0, 10, 10), expected_images(0, 0, 0)), (0.0, 0.0));
        assert!(expected_images(10, 0, 10) == 0.0 && expected_images(10, 10, 0).is_finite());
    }

    proptest! {
        #[test]
        fn a_choice_is_the_cheapest_that_may_run(
            parts in vec((0..4u32, any::<bool>(), 0..=110u64, 0..9u64, 0..3u64, any::<bool>()), 0..9),
            free in 0..14u32,
            running in vec((0..4u32, any::<bool>()), 0..3),
        ) {
            let limits = SpaceLimits::new(640, 4, 1);
            let kind = |is_keys: bool| if is_keys { LogKind::Keys } else { LogKind::Values };
            let candidates: Vec<CompactionCandidate> = parts.iter().map(|&(store, is_keys, live, images, garbage, is_begun)| {
                let values = values(store, live, images as f64, garbage * 300);
                let needed_chunks = if is_keys { 0 } else { values.needed_chunks };
                CompactionCandidate { log: kind(is_keys), is_begun, needed_chunks, ..values }
            }).collect();
            let running: Vec<(u32, LogKind)> = running.into_iter().map(|(store, is_keys)| (store, kind(is_keys))).collect();
            let spare = free.saturating_sub(limits.key);
            let chosen = choose_compacted_log(&candidates, free, 0, spare, &limits, &running);
            let may_run = |candidate: &&CompactionCandidate| {
                let is_short = spare < limits.value - limits.key;
                let is_empty = candidate.log == LogKind::Values && candidate.images == 0.0;
                free < limits.start
                    && (candidate.garbage_bytes > 0 || candidate.is_begun || is_empty)
                    && !running.contains(&(candidate.store, candidate.log))
                    && candidate.needed_chunks <= spare
                    && !(is_short
                        && (candidate.log == LogKind::Keys || candidate.needed_chunks > 0)
                        && running.iter().any(|&(_, log)| log == candidate.log))
            };
            let needed = |candidate: &CompactionCandidate| {
                if spare < limits.value - limits.key { candidate.needed_chunks } else { 0 }
            };
            let least_needed = candidates.iter().filter(may_run).map(needed).min();
            let costs = candidates.iter().filter(may_run).filter(|candidate| Some(needed(candidate)) == least_needed);
            let least = costs.map(CompactionCandidate::cost).reduce(f64::min);
            prop_assert_eq!(chosen.map(|index| candidates[index].cost()), least);
            prop_assert!(chosen.is_none_or(|index| may_run(&&candidates[index])));
        }
    }
}
