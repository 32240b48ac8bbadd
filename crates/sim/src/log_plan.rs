//! The sizes of a simulated volume of the log engine.
//!
//! In: random numbers. Out: sizes so small that a few hundred writes fill the chunks of a device, split segments, and reuse space.

use crate::draw::{between, pick};
use octokv_base::{Nanos, Prng};
use octokv_engine::common::superblock::SUPERBLOCK_AREA_BYTES;
use octokv_engine::log::log_layout::{CHUNK_UNITS_MIN, STORE_CHUNKS_MIN, VALUES_IN_CHUNKS_MIN};
use octokv_engine::log::settings::LogSettings;

/// The checkpoint areas of a device of a few MiB.
const AREAS_BYTES: u64 = 4 * (64 << 10);

/// The parts of a volume of the log engine. Lengths are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct LogPlan {
    /// Stores.
    pub partitions: u16,
    /// Of a chunk.
    pub chunk_bytes: u32,
    /// Chunks, about.
    pub chunks: u32,
    /// Entries of a segment, on average, above which one is split.
    pub segment_target_bytes: u32,
    /// Percents above that from which on puts split.
    pub split_lag_percent: u32,
    /// Whether the last unit of a value log is written again.
    pub rewrites_tail: bool,
    /// The part of a value log that is compacted together; 0 for none.
    pub window_divisor: u32,
    /// Segments that a compaction handles at the same time.
    pub sub_compactions: usize,
    /// Compactions that maintenance runs at the same time.
    pub compactions: usize,
    /// Between two rounds of maintenance.
    pub round_interval: Nanos,
    /// Mean number of completed commands between compactions, splits and checkpoints that no one needs.
    pub work_interval: u64,
    /// Bytes of segment images that a core keeps in memory.
    pub recent_image_bytes: usize,
    /// Bytes that value compaction keeps in memory to read records together.
    pub prepared_bytes: u64,
}

impl LogPlan {
    /// Draws the sizes of a volume with these units and values.
    pub(crate) fn draw(random: &mut Prng, unit_bytes: u32, value_bytes_max: u32) -> LogPlan {
        let partitions = pick(random, &[1, 2, 2, 4]);
        let chunk_bytes = unit_bytes * CHUNK_UNITS_MIN * pick(random, &[1, 1, 2]);
        let of_values = (u64::from(value_bytes_max) * VALUES_IN_CHUNKS_MIN).div_ceil(chunk_bytes.into());
        let of_stores = u64::from(partitions) * u64::from(STORE_CHUNKS_MIN);
        // Not more than some hundred.
        let chunks = between(random, 64, 100).max(of_values).max(of_stores) as u32;
        LogPlan {
            partitions,
            chunk_bytes,
            chunks,
            segment_target_bytes: pick(random, &[60, 120, 300]),
            split_lag_percent: pick(random, &[0, 25, 200]),
            rewrites_tail: !random.one_in(5),
            window_divisor: pick(random, &[0, 1, 4, 8]),
            sub_compactions: pick(random, &[1, 2, 8, 16]),
            compactions: pick(random, &[1, 2, 4, 8]),
            round_interval: Nanos::from_millis(pick(random, &[2, 20])),
            work_interval: between(random, 4, 60),
            recent_image_bytes: pick(random, &[0, 2 << 10, 64 << 10]),
            prepared_bytes: pick(random, &[0, 4 << 10, 64 << 10]),
        }
    }

    /// The size of a disk for the volume.
    pub fn disk_bytes(&self) -> u64 {
        let chunks_bytes = u64::from(self.chunks) * u64::from(self.chunk_bytes);
        (SUPERBLOCK_AREA_BYTES + AREAS_BYTES + chunks_bytes).next_multiple_of(4096)
    }

    /// Applies the plan to the settings of a volume.
    pub fn adjust(&self, settings: &mut LogSettings) {
        settings.segment_target_bytes = self.segment_target_bytes;
        settings.split_lag_percent = self.split_lag_percent;
        settings.rewrites_tail = self.rewrites_tail;
        settings.window_divisor = self.window_divisor;
        settings.sub_compactions = self.sub_compactions;
        settings.compactions = self.compactions;
        settings.round_interval = self.round_interval;
        settings.recent_image_bytes = self.recent_image_bytes;
        settings.prepared_bytes = self.prepared_bytes;
    }
}
