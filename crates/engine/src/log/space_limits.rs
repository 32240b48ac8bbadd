//! How many free chunks each kind of work leaves to the others, and how much of a pool may be live data. Pure arithmetic.
//!
//! ```text
//!   free chunks    P ··· start ─────── pass ─────── delete ─────── value ── key ── 0
//!                  users │  compaction  │ puts wait   │ deletes wait  │ value    │ only key
//!                  alone │  runs beside │             │               │ compaction pauses compaction
//!
//!   pool of P      │◀──────────── capacity: live data ────────────▶│◀──────── reserve R ────────▶│
//! ```
//! Free space lowers no write amplification, garbage in the logs does. So two reserves: few free chunks, by purpose, and R chunks that
//! never hold live data.
//!
//! Progress: with the live data at its capacity and not more than `pass` chunks free, garbage is at least [`GARBAGE_CHUNKS_MIN`] chunks,
//! whatever the tails of the logs (2 per store), their reserved next chunks (2 per store), a record that moved as a whole (1 per store: the
//! rest of it in the head chunk) and the ends of chunks waste. Compacting all logs once frees it, with two chunks to work in.
//!
//! Key compaction takes no more chunks than it frees. A round appends the live images of a chunk, in their order, and a marker. Images leave
//! [`MARKER_UNITS`](super::log_layout::MARKER_UNITS) of each chunk, so those of one chunk and a marker always fit one chunk; and as an image goes on in the next chunk only if it does
//! not fit, i rounds open at most i chunks, whatever the room of the tail was. While images filled chunks, a round of 16 images of a unit in chunks of 16
//! took 17 units, and a volume that was full stood still for ever.
//!
//! A record of a value log moves as a whole, into chunks that stay free for that
//! ([`SpaceLimits::move_floor`]); the chunks that it leaves are freed without any. So a put that waits ends. The same holds for deletes, whose tombstones may exceed the capacity up to [`SpaceLimits::tombstone_chunks`].
//!
//! Invariants: key < value ≤ delete ≤ pass < start; what the progress needs ([`SpaceLimits::garbage_chunks_min`]). Tested below for
//! every size of pool.

use super::log_layout::{CHUNKS_MIN, STORE_CHUNKS_MIN, VALUES_IN_CHUNKS_MIN};

/// The fewest chunks of garbage when writes wait.
pub const GARBAGE_CHUNKS_MIN: u32 = 8;
/// The ends of sealed chunks that nothing fits in are on average at most this part of them. REQUIRES of a value log: a record that
/// does not fit the rest of a chunk fills it and goes on in the next one, unless the rest is a smaller part. (Images are a few units: of the 64 that a
/// chunk has at least, unless a test configures fewer, the unit of a marker and an end of one are this part.)
pub const CHUNK_END_DIVISOR: u32 = 32;
/// The chunks of a store that are neither full nor free: the tails of its logs, the chunks reserved behind them, and less than one that a
/// record in extents leaves at the head of the value log when it moves.
const CHUNKS_HELD_PER_STORE: u32 = 5;
/// The key log and the value log.
const LOGS_PER_STORE: u64 = 2;
/// Chunks that value compaction leaves to key compaction.
const KEY_COMPACTION_CHUNKS: u32 = 2;
/// Chunks that the images of moved records may open before key compaction runs.
const MOVED_IMAGE_CHUNKS: u32 = 1;
/// Chunks of begun deletes, and between the entrances of deletes and puts.
const BEGUN_WRITE_CHUNKS: u32 = 4;

/// The work that chunks are taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkPurpose {
    /// Puts.
    User,
    /// Deletes, and tombstones of absent keys.
    Delete,
    /// Compaction of a value log.
    Compaction,
    /// Compaction of a key log.
    KeyCompaction,
}

/// The limits of one pool. All are numbers of chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceLimits {
    /// All chunks of the pool.
    pub pool: u32,
    /// The stores that share it; not a number of chunks.
    pub stores: u32,
    /// With fewer free chunks compaction runs (F_start).
    pub start: u32,
    /// With fewer free chunks puts wait (F_pass).
    pub pass: u32,
    /// With fewer free chunks deletes wait (F_delete).
    pub delete: u32,
    /// With fewer free chunks value compaction pauses (F_value): it can move a record of the longest value as a whole.
    pub value: u32,
    /// The free chunks that only key compaction takes (F_key).
    pub key: u32,
    /// The chunks that never hold live data of keys with values (R).
    pub reserve: u32,
    /// The chunks that never hold live data, tombstones included.
    pub tombstone_reserve: u32,
}

impl SpaceLimits {
    /// The limits of a pool of `pool` chunks that `stores` stores share. A record of the longest value takes `record_chunks_max` chunks
    /// ([`super::log_layout::LogLayout::record_chunks_max`]).
    ///
    /// # Panics
    /// Below [`CHUNKS_MIN`] chunks, [`STORE_CHUNKS_MIN`] per store, one store, or one chunk of a record; if a record takes more than the part
    /// of the pool that [`VALUES_IN_CHUNKS_MIN`] says, and one more.
    pub fn new(pool: u32, stores: u32, record_chunks_max: u32) -> SpaceLimits {
        assert!(pool >= CHUNKS_MIN, "a pool of {pool} chunks");
        let is_record = (1..=pool.div_ceil(VALUES_IN_CHUNKS_MIN as u32) + 1).contains(&record_chunks_max);
        assert!(is_record, "a record of {record_chunks_max} of {pool} chunks");
        assert!((1..=pool / STORE_CHUNKS_MIN).contains(&stores), "{stores} stores on {pool} chunks");
        let value = KEY_COMPACTION_CHUNKS + MOVED_IMAGE_CHUNKS + record_chunks_max;
        let pass_least = value + BEGUN_WRITE_CHUNKS;
        let start = (pool / 64).max(stores + pass_least);
        let pass = (pool / 128).max(pass_least);
        let delete = (pass / 2).max(value);
        let held = CHUNKS_HELD_PER_STORE * stores;
        let wasted = pool.div_ceil(CHUNK_END_DIVISOR);
        let reserve = (pool / 16).max(held + start + GARBAGE_CHUNKS_MIN + wasted);
        let tombstone_reserve = (reserve / 2).max(held + delete + GARBAGE_CHUNKS_MIN + wasted);
        SpaceLimits {
            pool,
            stores,
            start,
            pass,
            delete,
            value,
            key: KEY_COMPACTION_CHUNKS,
            reserve,
            tombstone_reserve,
        }
    }

    /// The chunks of live data up to which puts are admitted.
    pub fn capacity_chunks(&self) -> u32 {
        self.pool - self.reserve
    }

    /// The chunks of live data up to which tombstones of absent keys are admitted.
    pub fn tombstone_chunks(&self) -> u32 {
        self.pool - self.tombstone_reserve
    }

    /// The chunks of the reserve that the progress of writes of this purpose does not need: in large pools, in which the reserve is a sixteenth.
    pub fn reserve_room(&self, purpose: ChunkPurpose) -> u32 {
        let (reserve, floor) = match purpose {
            ChunkPurpose::User => (self.reserve, self.start),
            _ => (self.tombstone_reserve, self.delete),
        };
        let held = CHUNKS_HELD_PER_STORE * self.stores;
        reserve - held - floor - GARBAGE_CHUNKS_MIN - self.pool.div_ceil(CHUNK_END_DIVISOR)
    }

    /// The free chunks that work of this purpose leaves when it begins: with fewer it waits.
    pub fn pass_floor(&self, purpose: ChunkPurpose) -> u32 {
        match purpose {
            ChunkPurpose::User => self.pass,
            ChunkPurpose::Delete => self.delete,
            ChunkPurpose::Compaction => self.value,
            ChunkPurpose::KeyCompaction => 0,
        }
    }

    /// The free chunks that stay when a log takes one for work that has begun: those of the next purpose. Work that needs more space
    /// than was known when it began takes it from its own floor, so it never waits while it holds segments.
    pub fn reservation_floor(&self, purpose: ChunkPurpose) -> u32 {
        match purpose {
            ChunkPurpose::User => self.delete,
            ChunkPurpose::Delete => self.value,
            ChunkPurpose::Compaction => self.key,
            ChunkPurpose::KeyCompaction => 0,
        }
    }

    /// With fewer free chunks value compaction does not move a record that takes so many chunks, and its image: F_value for the longest.
    pub fn move_floor(&self, record_chunks: u32) -> u32 {
        self.key + MOVED_IMAGE_CHUNKS + record_chunks
    }

    /// The chunks that the open windows of value compaction together may take, if there are several: a quarter of those between the start of
    /// compaction and puts that wait. More are for the images of their visits, and for puts meanwhile (decision 0028 has measurements).
    pub fn window_chunks(&self) -> u64 {
        u64::from(self.start - self.pass) / 4
    }

    /// How many of at most `most` steps of compaction, which is 1 at least, run at once with so many spare chunks: one when compaction starts, all halfway from there to
    /// puts that wait. So compaction takes no more of the device than it needs to keep up with the writes; the other half is for what they take until its first
    /// chunks are free (decision 0028 has measurements).
    pub fn steps_at(&self, spare: u32, most: usize) -> usize {
        let shortage = self.start.saturating_sub(spare.saturating_add(self.key)) as usize;
        (2 * shortage * most).div_ceil((self.start - self.pass) as usize).clamp(1, most)
    }

    /// The chunks that writes in progress may take: for so many units, in chunks with room for `image_units` of them, and because the tail of each log that they append to may be full.
    pub fn chunks_taken_max(&self, writes: u32, units: u64, image_units: u32) -> u64 {
        let hops = u64::from(writes.min(self.stores)) * LOGS_PER_STORE;
        units.div_ceil(image_units.into()) + hops
    }

    /// The chunks that images of one store may take, with so many units, of which `room` fit into the tail of its key log. An image is at most
    /// half of a chunk, so more than half of each further chunk is used.
    pub fn image_chunks_max(units: u64, room: u32, chunk_units: u32) -> u64 {
        match units <= u64::from(room) {
            true => 0,
            false => 1 + (units - 1) / u64::from(chunk_units / 2 + 1),
        }
    }

    /// Whether a write of this purpose may begin: with it, writes in progress may take so many chunks ([`SpaceLimits::chunks_taken_max`]).
    pub fn may_begin(&self, purpose: ChunkPurpose, free: u32, taken_max: u64) -> bool {
        u64::from(free) >= u64::from(self.pass_floor(purpose)) + taken_max
    }

    /// The least garbage, in chunks, with so many chunks of live data and so many free ones. Negative if there need be none.
    pub fn garbage_chunks_min(&self, live: u32, free: u32) -> i64 {
        let live = i64::from(live);
        let held = i64::from(CHUNKS_HELD_PER_STORE * self.stores);
        // Full chunks hold live data, garbage, and ends that nothing fits in.
        let full = i64::from(self.pool) - held - i64::from(free);
        let wasted = full.max(0) / i64::from(CHUNK_END_DIVISOR);
        full - wasted - live
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What the progress of writes and compactions stands on.
    fn assert_progress(pool: u32, stores: u32, record_chunks: u32) {
        let limits = SpaceLimits::new(pool, stores, record_chunks);
        let at = || format!("{limits:?}");
        assert!(0 < limits.key && limits.key < limits.value && limits.value <= limits.delete, "{}", at());
        assert!(limits.delete <= limits.pass && limits.pass < limits.start, "{}", at());
        assert!(limits.tombstone_reserve <= limits.reserve && limits.reserve < pool, "{}", at());
        assert!(limits.capacity_chunks() > 0, "{}", at());
        // Puts wait: there is garbage whose collection ends that. Tombstones wait: the same.
        let least = i64::from(GARBAGE_CHUNKS_MIN);
        assert!(limits.garbage_chunks_min(limits.capacity_chunks(), limits.pass) >= least, "{}", at());
        assert!(limits.garbage_chunks_min(limits.tombstone_chunks(), limits.delete) >= least, "{}", at());
        // Compaction reaches its end: garbage is left where it stops.
        assert!(limits.garbage_chunks_min(limits.capacity_chunks(), limits.start) >= least, "{}", at());
        // The same if ends of chunks take the room of the reserves beside their 32nd.
        let puts = limits.capacity_chunks() + limits.reserve_room(ChunkPurpose::User);
        assert!(limits.garbage_chunks_min(puts, limits.start) >= least, "{}", at());
        let tombstones = limits.tombstone_chunks() + limits.reserve_room(ChunkPurpose::Delete);
        assert!(limits.garbage_chunks_min(tombstones, limits.delete) >= least, "{}", at());
        // When all garbage is collected, a write can begin, alone, whatever its length: it takes from the capacity that it was granted.
        let free_at_end = limits.garbage_chunks_min(limits.capacity_chunks(), 0);
        assert!(free_at_end >= i64::from(limits.pass) + limits.chunks_taken_max(1, 1, 1) as i64, "{}", at());
        let free_at_end = limits.garbage_chunks_min(limits.tombstone_chunks(), 0);
        assert!(
            free_at_end >= i64::from(limits.delete) + limits.chunks_taken_max(1, 1, 1) as i64,
            "{}",
            at()
        );
        // A floor of begun work is the entrance of the next purpose, or below it: no purpose starves the one behind it.
        let purposes =
            [ChunkPurpose::User, ChunkPurpose::Delete, ChunkPurpose::Compaction, ChunkPurpose::KeyCompaction];
        for pair in purposes.windows(2) {
            assert!(limits.reservation_floor(pair[0]) <= limits.pass_floor(pair[0]), "{}", at());
            assert!(limits.reservation_floor(pair[0]) >= limits.reservation_floor(pair[1]), "{}", at());
            assert!(limits.pass_floor(pair[0]) >= limits.pass_floor(pair[1]), "{}", at());
        }
        assert!(
            limits.reservation_floor(ChunkPurpose::User) >= limits.pass_floor(ChunkPurpose::Delete),
            "{}",
            at()
        );
        assert!(
            limits.reservation_floor(ChunkPurpose::Delete) >= limits.pass_floor(ChunkPurpose::Compaction),
            "{}",
            at()
        );
        // Value compaction moves the longest record as a whole, appends its image, and leaves key compaction its chunks.
        assert!(
            limits.value > limits.reservation_floor(ChunkPurpose::Compaction) + record_chunks,
            "{}",
            at()
        );
        assert_eq!(limits.value, limits.move_floor(record_chunks), "{}", at());
        // A fifth of the pool is capacity, and the longest value fits.
        assert!(limits.capacity_chunks() >= (pool / 5).max(record_chunks), "{}", at());
        // Key compaction works in two chunks that nothing else takes.
        assert!(limits.reservation_floor(ChunkPurpose::Compaction) >= 2, "{}", at());
    }

    #[test]
    fn the_fewer_chunks_are_spare_the_more_steps_run_at_once() {
        let limits = SpaceLimits::new(6_400, 32, 1);
        assert_eq!((limits.start, limits.pass, limits.key), (100, 50, 2));
        for (spare, steps) in
            [(u32::MAX, 1), (98, 1), (97, 1), (96, 2), (86, 8), (75, 15), (74, 16), (73, 16), (0, 16)]
        {
            assert_eq!(limits.steps_at(spare, 16), steps, "{spare} spare chunks");
            assert_eq!(limits.steps_at(spare, 1), 1);
        }
    }

    /// The most chunks of a record: an eighth of the pool, rounded up, or 64, and one for its head and the directories.
    fn longest_of(pool: u32) -> u32 {
        pool.div_ceil(VALUES_IN_CHUNKS_MIN as u32).min(64) + 1
    }

    #[test]
    fn writes_go_on_in_every_pool() {
        // The numbers of stores that a format chooses, and the extremes.
        for pool in (CHUNKS_MIN..20_000).chain((20_000..200_000).step_by(13)) {
            let most = pool / STORE_CHUNKS_MIN;
            let formatted = (0..6).map(|halvings| 32 >> halvings).find(|&stores| stores <= most);
            for stores in [1, 2, most / 2, most, formatted.unwrap_or(1)] {
                if stores > 0 && stores <= most {
                    for record_chunks in [1, 2, longest_of(pool)] {
                        assert_progress(pool, stores, record_chunks);
                    }
                }
            }
        }
    }

    #[test]
    fn writes_go_on_with_any_number_of_stores_of_a_small_pool() {
        for pool in CHUNKS_MIN..2_048 {
            for stores in 1..=pool / STORE_CHUNKS_MIN {
                for record_chunks in [1, longest_of(pool)] {
                    assert_progress(pool, stores, record_chunks);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn writes_go_on_in_pools_of_any_size(
            pool in CHUNKS_MIN..=1 << 26,
            stores in 1..=65_535u32,
            record_chunks in 1..=65u32,
        ) {
            assert_progress(pool, stores.min(pool / STORE_CHUNKS_MIN), record_chunks.min(longest_of(pool)));
        }
    }

    #[test]
    fn the_limits_of_known_pools() {
        // A disk of 960 GB with 32 stores, and the smallest pool.
        let large = SpaceLimits::new(114_000, 32, 1);
        assert_eq!((large.start, large.pass, large.delete), (1_781, 890, 445));
        assert_eq!((large.value, large.key, large.reserve, large.tombstone_reserve), (4, 2, 7_125, 4_176));
        let small = SpaceLimits::new(64, 4, 1);
        assert_eq!((small.start, small.pass, small.delete, small.value, small.key), (12, 8, 4, 4, 2));
        assert_eq!((small.capacity_chunks(), small.tombstone_chunks()), (22, 30));
        // The same with values of an eighth of the pool.
        let long = SpaceLimits::new(64, 4, 9);
        assert_eq!((long.start, long.pass, long.delete, long.value, long.key), (20, 16, 12, 12, 2));
        assert_eq!((long.capacity_chunks(), long.tombstone_chunks()), (14, 22));
    }

    #[test]
    fn writes_begin_while_each_of_their_logs_can_open_a_chunk() {
        let limits = SpaceLimits::new(6_400, 4, 1);
        // Writes, units, what they may take of chunks of 100 units.
        for (writes, units, taken) in
            [(0, 0, 0), (1, 1, 3), (1, 100, 3), (1, 101, 4), (3, 300, 9), (4, 300, 11), (90, 900, 17)]
        {
            assert_eq!(limits.chunks_taken_max(writes, units, 100), taken, "{writes} of {units}");
        }
        assert!(limits.may_begin(ChunkPurpose::User, 53, 3) && !limits.may_begin(ChunkPurpose::User, 52, 3));
        assert!(
            limits.may_begin(ChunkPurpose::Delete, 28, 3) && !limits.may_begin(ChunkPurpose::Delete, 27, 3)
        );
    }

    #[test]
    fn images_fit_the_tail_or_take_a_chunk_and_more_than_half_of_each_further_one() {
        for (units, room, taken) in [
            (0, 0, 0),
            (1, 0, 1),
            (1, 1, 0),
            (2, 1, 1),
            (50, 0, 1),
            (51, 9, 1),
            (52, 51, 2),
            (52, 52, 0),
            (103, 0, 3),
        ] {
            assert_eq!(SpaceLimits::image_chunks_max(units, room, 100), taken, "{units} with {room}");
        }
        // What one moved record needs beside itself.
        assert_eq!(SpaceLimits::image_chunks_max(50, 0, 100), u64::from(MOVED_IMAGE_CHUNKS));
    }

    #[test]
    #[should_panic(expected = "5 stores on 64 chunks")]
    fn more_stores_than_chunks_serve_are_a_bug() {
        SpaceLimits::new(64, 5, 1);
    }
}
