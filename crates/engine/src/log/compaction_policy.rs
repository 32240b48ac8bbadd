//! Which log is compacted next. Pure: the head chunks of a core's logs, free space and the compactions that run go in; a choice comes out.
//!
//! The space beside live data is shared by all logs, and it is worth most where it keeps most from being moved. Of a log with L live bytes, to
//! which a put appends q bytes, and of whose head chunk the part f lives, under overwrites at random:
//!
//! ```text
//!   its length                                  X = L · (-ln f) / (1 - f)
//!   compaction moves, for each put              q · f / (1 - f)              each byte at the cost m
//!   a byte more of X saves, of that cost        (q · m / L) / ((1 - f) / f + ln f)            the worth of its space
//!
//!   key log     q   an image, and those of value compaction      m   the image, and reading it
//!   value log   q   a record                                     m   the record, reading it, and its share of the images of visited segments
//! ```
//! The log whose space is worth least gives up a chunk. So the worth becomes equal, and the cost of a put the least that the space allows. The
//! cheapest freed byte would be the wrong choice, as it makes both logs about as full: an object has 36 B in the key log, and a put appends 1.2 KB
//! there, so a little more space in the key log saves many moves.
//!
//! Progress: a log is a queue, so a head without garbage has to be moved to reach what lies behind it. A log that has no garbage is never
//! chosen, one whose head has none is chosen last. A record in extents moves as a whole and leaves space in chunks behind the head; this is no
//! garbage here, or the last record of a log would be moved again and again for what its former move has left. Without writes of users each choice reduces the garbage of value logs, or leaves that
//! and reduces the garbage of key logs or the number of chunks before it, so choices come to an end, and then no garbage is left.
//! Tested below by a table, and in `space_progress_tests.rs` in a model of a full device.

use super::log_place::LogKind;
use super::space_limits::SpaceLimits;
use std::cmp::Ordering;

/// A read of up to [`READ_BYTES`] at random takes a device about as long as writing so many bytes: of the paper's drive a die takes 40 µs, and 499 µs
/// to write 32 KiB.
pub const READ_COST_BYTES: f64 = 2_560.0;
/// What a device reads at once.
pub const READ_BYTES: f64 = 4_096.0;
/// The most images that value compaction is taken to append for each put: a head chunk that is almost full says nothing of the others.
const IMAGES_OF_COMPACTION_MAX: f64 = 8.0;
/// The least garbage of a key log's head chunk that images are taken to be written into.
const KEY_GARBAGE_MIN: f64 = 0.1;
/// The greatest worth of a key log that is compacted while a value log waits for its turn, in multiples of that of the value log. The garbage of a head
/// falls with the square root of its worth: here to half of what the least cost needs.
const DEAR_KEYS: f64 = 4.0;
/// [`DEAR_KEYS`] while the next round of an open window would find no room for its images.
const DEAREST_KEYS: f64 = 16.0;

/// A log that has a sealed head chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompactionCandidate {
    /// The partition of its store.
    pub store: u32,
    /// Which of its logs.
    pub log: LogKind,
    /// What a byte of its space saves ([`LogCosts::space_worth`]).
    pub space_worth: f64,
    /// Whether nothing lives in the head chunk of a value log; false for a key log.
    pub is_head_empty: bool,
    /// The bytes of images or records in all sealed chunks of the log that are not live, and that compaction has not vacated itself by moving
    /// a record. The ends of chunks, in which nothing lies, are no garbage: compaction does not free them.
    pub garbage_bytes: u64,
    /// Whether records of the head chunk, or of its window, were moved, and others were not yet.
    pub is_begun: bool,
    /// The least free chunks that compacting the head chunk of a value log takes before that is free: 0 if the tail of the log has room for its
    /// live records, and the tail of the key log for an image. 0 for a key log, whose rounds have F_key.
    pub needed_chunks: u32,
}

/// What writing to a log and compacting it cost. Bytes of reads count as [`READ_COST_BYTES`] says.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogCosts {
    /// The bytes that a put appends, without those that compaction of this log moves.
    pub put_bytes: f64,
    /// The bytes that live in the log.
    pub live_bytes: f64,
    /// What moving one of them costs, in written bytes.
    pub move_cost: f64,
    /// The part of the head chunk that lives, from 0 to 1; an estimate above 1 counts as 1.
    pub head_live: f64,
}

impl LogCosts {
    /// By how much the cost of a put would fall if the log were a byte longer, in written bytes. 0 if nothing lives in the head chunk, infinite
    /// if all of it does.
    pub fn space_worth(&self) -> f64 {
        let live = self.head_live;
        if live <= 0.0 {
            return 0.0;
        }
        let growth = (1.0 - live) / live + live.ln();
        // With small differences from 1, rounding may make it negative.
        match live < 1.0 && growth > 0.0 {
            true => self.put_bytes * self.move_cost / self.live_bytes.max(1.0) / growth,
            false => f64::INFINITY,
        }
    }
}

/// What a store has in its logs, of which the costs of both follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StoreContents {
    /// The bytes of a chunk.
    pub chunk_bytes: f64,
    /// The mean length of a segment image, in bytes.
    pub image_bytes: f64,
    /// The mean length of a record with its id in the directory, in bytes.
    pub record_bytes: f64,
    /// The live bytes of the key log, and those of its head chunk.
    pub keys: [f64; 2],
    /// The live bytes of the value log, and those of its head chunk, directory included.
    pub values: [f64; 2],
    /// The live records of that head chunk.
    pub head_records: f64,
    /// The images that compacting it will append, as expected.
    pub head_images: f64,
}

impl StoreContents {
    fn key_head_live(&self) -> f64 {
        self.keys[1] / self.chunk_bytes
    }

    /// The costs of the key log.
    pub fn key_costs(&self) -> LogCosts {
        // A chunk of the value log is compacted for the records that fit what it frees.
        let puts = (self.chunk_bytes - self.values[1]).max(1.0) / self.record_bytes.max(1.0);
        let images_per_put = 1.0 + (self.head_images / puts).min(IMAGES_OF_COMPACTION_MAX);
        LogCosts {
            put_bytes: self.image_bytes * images_per_put,
            live_bytes: self.keys[0],
            // A chunk is read as a whole, whatever lives in it.
            move_cost: 1.0 + READ_COST_BYTES / READ_BYTES,
            head_live: self.key_head_live(),
        }
    }

    /// The costs of the value log.
    pub fn value_costs(&self) -> LogCosts {
        // An image is written, and those that it makes compaction of the key log move.
        let writes = 1.0 / (1.0 - self.key_head_live()).max(KEY_GARBAGE_MIN);
        let of_image = READ_COST_BYTES + self.image_bytes * writes;
        let of_head = self.head_records * (READ_COST_BYTES + self.record_bytes) + self.head_images * of_image;
        LogCosts {
            put_bytes: self.record_bytes,
            live_bytes: self.values[0],
            move_cost: of_head / self.values[1].max(1.0),
            head_live: self.values[1] / self.chunk_bytes,
        }
    }
}

/// The greatest worth of the space of a key log that is compacted while value logs wait for their turn to open a window; infinite if none waits.
/// `is_room_short` says that the next round of an open window would find no room for its images.
pub fn key_worth_max(waiting: &[CompactionCandidate], is_room_short: bool) -> f64 {
    let multiple = if is_room_short { DEAREST_KEYS } else { DEAR_KEYS };
    waiting.iter().map(|candidate| multiple * candidate.space_worth).fold(f64::INFINITY, f64::min)
}

/// Whether no compaction is needed: at least `wanted` chunks are free, and at least F_start of them cannot be taken by writes and compactions
/// in progress. If compaction stopped at F_start free chunks, a burst of writes would wait at once.
pub fn is_space_enough(free: u32, wanted: u32, spare: u32, limits: &SpaceLimits) -> bool {
    free >= wanted && spare.saturating_add(limits.key) >= limits.start
}

/// Chooses the log whose head chunk is compacted next: that whose space is worth least; with equal worth the one with more garbage, then the lower
/// place in the list. While space is short, those that take fewer chunks go first. `None` if space is enough ([`is_space_enough`]; a waiting write needs `wanted` free chunks, 0 without one), or nothing that may run frees
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
        (candidate.garbage_bytes > 0 || candidate.is_begun || candidate.is_head_empty)
            && may_run(candidate)
            && !running.contains(&(candidate.store, candidate.log))
    };
    let indexed = candidates.iter().enumerate().filter(|(_, candidate)| is_candidate(candidate));
    let best = indexed.min_by(|(_, a), (_, b)| {
        // While space is short, a chunk that one value log has taken is filled before another log takes one.
        let by_need = if is_short { a.needed_chunks.cmp(&b.needed_chunks) } else { Ordering::Equal };
        let by_worth = a.space_worth.total_cmp(&b.space_worth);
        by_need.then(by_worth).then(b.garbage_bytes.cmp(&a.garbage_bytes))
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

    /// The costs of a log that puts write as often as they can overwrite it.
    fn costs(live: u64, move_cost: f64) -> LogCosts {
        LogCosts { put_bytes: 1.0, live_bytes: 1.0, move_cost, head_live: live as f64 / 100.0 }
    }

    /// A candidate with a live part in percent, and garbage in bytes.
    fn keys(store: u32, live: u64, garbage: u64) -> CompactionCandidate {
        CompactionCandidate {
            store,
            log: LogKind::Keys,
            space_worth: costs(live, 1.0).space_worth(),
            is_head_empty: false,
            garbage_bytes: garbage,
            is_begun: false,
            needed_chunks: 0,
        }
    }

    /// The same of a value log: its images cost as much as a tenth of a chunk each.
    fn values(store: u32, live: u64, images: f64, garbage: u64) -> CompactionCandidate {
        let (is_head_empty, move_cost) = (images == 0.0, 1.0 + 10.0 * images / live.max(1) as f64);
        CompactionCandidate {
            log: LogKind::Values,
            space_worth: if is_head_empty { 0.0 } else { costs(live, move_cost).space_worth() },
            is_head_empty,
            needed_chunks: if is_head_empty { 0 } else { 2 },
            ..keys(store, live, garbage)
        }
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
    fn the_worth_of_space_is_what_a_longer_log_saves() {
        // The same by two lengths: X = L · (-ln f) / (1 - f), and q · m · f / (1 - f) moved a put.
        let log = |head_live| LogCosts { put_bytes: 292.0, live_bytes: 1e6, move_cost: 1.7, head_live };
        let length = |live: f64| 1e6 * -live.ln() / (1.0 - live);
        let moved = |live: f64| 292.0 * 1.7 * live / (1.0 - live);
        for live in [0.01, 0.2, 0.5, 0.75, 0.9, 0.99] {
            let (less, more) = (live - 1e-5, live + 1e-5);
            let saved = (moved(more) - moved(less)) / (length(less) - length(more));
            let worth = log(live).space_worth();
            assert!((worth / saved - 1.0).abs() < 1e-3, "{live}: {worth}, {saved}");
        }
        assert_eq!([log(0.0), log(-0.1)].map(|costs| costs.space_worth()), [0.0; 2]);
        assert_eq!([log(1.0), log(1.2)].map(|costs| costs.space_worth()), [f64::INFINITY; 2]);
        assert!(log(1.0 - 1e-12).space_worth() > 1e9);
    }

    #[test]
    fn a_store_without_anything_has_costs() {
        let nothing = StoreContents {
            chunk_bytes: 65_536.0,
            image_bytes: 512.0,
            record_bytes: 0.0,
            keys: [0.0; 2],
            values: [0.0; 2],
            head_records: 0.0,
            head_images: 0.0,
        };
        assert_eq!([nothing.key_costs(), nothing.value_costs()].map(|costs| costs.space_worth()), [0.0; 2]);
        let full =
            StoreContents { values: [65_536.0; 2], head_records: 200.0, head_images: 200.0, ..nothing };
        assert_eq!(full.value_costs().space_worth(), f64::INFINITY);
        assert!(full.key_costs().put_bytes.is_finite());
    }

    #[test]
    fn a_key_log_keeps_more_garbage_than_the_value_log() {
        // 100,000 objects of 256 B with units of 512 B (decision 0028), both heads half alive, a window of an eighth.
        let chunk_bytes = 1_048_576.0;
        let store = |key_live: f64, value_live: f64| StoreContents {
            chunk_bytes,
            image_bytes: 1_234.0,
            record_bytes: 292.0,
            keys: [3.58e6, key_live * chunk_bytes],
            values: [29.2e6, value_live * chunk_bytes],
            head_records: value_live * chunk_bytes / 292.0,
            head_images: value_live * chunk_bytes / 292.0 / 4.0,
        };
        let worths =
            |store: StoreContents| (store.key_costs().space_worth(), store.value_costs().space_worth());
        let (of_keys, of_values) = worths(store(0.5, 0.5));
        assert!(of_keys > of_values, "{of_keys}, {of_values}");
        // Value compaction goes on until its heads are so full.
        let (of_keys, of_values) = worths(store(0.5, 0.9));
        assert!(of_keys < of_values, "{of_keys}, {of_values}");
    }

    #[test]
    fn the_log_whose_space_is_worth_least_is_chosen() {
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
            (Some(1), 11, vec![], vec![values(0, 50, 3.0, some), keys(0, 55, some)]),
            (Some(0), 11, vec![], vec![values(0, 50, 0.5, some), keys(0, 55, some)]),
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
    fn key_logs_are_compacted_up_to_a_multiple_of_the_worth_that_waits() {
        let worth = |space_worth| CompactionCandidate { space_worth, ..values(0, 50, 1.0, 500) };
        assert_eq!(key_worth_max(&[], false), f64::INFINITY);
        assert_eq!(key_worth_max(&[worth(3.0), worth(2.0), worth(5.0)], false), 8.0);
        // The round of an open window would write an image for each record: more garbage of key logs is worth it.
        assert_eq!(key_worth_max(&[worth(3.0), worth(2.0)], true), 32.0);
        assert_eq!(key_worth_max(&[worth(0.0)], true), 0.0);
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
        fn a_choice_is_worth_least_of_those_that_may_run(
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
                free < limits.start
                    && (candidate.garbage_bytes > 0 || candidate.is_begun || candidate.is_head_empty)
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
            let best = candidates.iter().filter(may_run).filter(|candidate| Some(needed(candidate)) == least_needed);
            let least = best.map(|candidate| candidate.space_worth).reduce(f64::min);
            prop_assert_eq!(chosen.map(|index| candidates[index].space_worth), least);
            prop_assert!(chosen.is_none_or(|index| may_run(&&candidates[index])));
        }
    }
}
