//! The sizes and rates with which the log engine works, by the unit of its volume and the configuration of its opening.
//!
//! In: the layout, an [`OpenConfig`]. Out: [`LogSettings`], which tests change before they open a volume. Nothing of it is part of the
//! format: each opening may have other settings.
//! Tested below.

use super::log_layout::LogLayout;
use crate::{Durability, OpenConfig};
use octokv_base::Nanos;

/// Compactions of different logs that a core runs at the same time, unless it is set otherwise: decision 0028 has measurements.
pub const COMPACTIONS_PER_CORE: usize = 8;
/// Segments that one compaction handles at the same time, unless it is set otherwise: as few windows are open at a time, each has to use the device.
pub const SUB_COMPACTIONS: usize = 16;
/// The bytes of segment images that a core keeps in memory, unless it is set otherwise: of the hottest segments, and of those that are read to be written.
pub const RECENT_IMAGE_BYTES: usize = 256 << 10;
/// Value compaction keeps so small a part of the bytes of the chunks in memory, ...
const PREPARED_DIVISOR: u64 = 1024;
/// ... at least so many bytes, ...
const PREPARED_BYTES_MIN: u64 = 2 << 20;
/// ... and at most so many.
const PREPARED_BYTES_MAX: u64 = 64 << 20;
/// The mean bytes of entries of a segment with the shortest unit and with the longest.
const SEGMENT_TARGETS: [(u32, u32); 2] = [(512, 800), (4096, 2_800)];
/// A checkpoint is due after so many times its bytes of key log.
const CHECKPOINT_FACTOR: u64 = 64;
/// The fewest bytes of key log between two checkpoints.
const CHECKPOINT_BYTES_MIN: u64 = 4 << 20;
/// The most, ...
const CHECKPOINT_BYTES_MAX: u64 = 8 << 30;
/// ... and the most as a part of the chunks.
const CHECKPOINT_DIVISOR: u64 = 16;

/// The sizes and rates of an open volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogSettings {
    /// When writes are acknowledged.
    pub durability: Durability,
    /// The mean bytes of entries of a segment above which the next segment is split
    /// ([`super::segment_table::LogSegmentTable::is_split_due`]).
    pub segment_target_bytes: u32,
    /// A put splits by itself when entries exceed the target by so many percent, since splits lag behind.
    pub split_lag_percent: u32,
    /// Whether the last, partly filled unit of a value log is written again with more records behind the same bytes. False pads each
    /// write to a unit, for devices whose interrupted write may leave neither the old block nor the new one.
    pub rewrites_tail: bool,
    /// Value compaction visits the segments of so small a part of a value log at once: the oldest eighth, with 8. With 0 there are no
    /// windows: each record is moved alone.
    pub window_divisor: u32,
    /// Segments that one compaction handles at the same time (the sub-compactions of LEED), at least 1.
    pub sub_compactions: usize,
    /// Whether compaction prefetches the next round: its first accesses overlap the last ones of the current round (LEED §3.3).
    pub overlaps_rounds: bool,
    /// Compactions of different logs that a core's maintenance runs at the same time (the co-scheduling of LEED), at least 1.
    pub compactions: usize,
    /// The time between two rounds of maintenance: with [`Durability::Completed`], the longest until a published batch is flushed; in both
    /// settings, that without writes after which a marker states that the last images of a store are durable.
    pub round_interval: Nanos,
    /// The time until free space is looked at again while it is short.
    pub pressure_interval: Nanos,
    /// What compaction writes at most in a second, in bytes, while no write waits for space; 0 for none beside what waiting writes need,
    /// [`u64::MAX`] for no limit.
    pub compaction_max_per_second: u64,
    /// The bytes of segment images that each core keeps in memory, of those that users' operations read or wrote last; 0 for none.
    pub recent_image_bytes: usize,
    /// The bytes of images and records that value compaction keeps in memory in order to read records of many segments together; 0 for none.
    pub prepared_bytes: u64,
    /// The least time from the begin of one pass of the scrub to that of the next one.
    pub scrub_interval: Nanos,
}

impl LogSettings {
    /// The settings of a volume of this layout.
    pub fn new(layout: &LogLayout, config: &OpenConfig) -> LogSettings {
        LogSettings {
            durability: config.durability,
            segment_target_bytes: segment_target_bytes(layout.unit_bytes),
            split_lag_percent: 25,
            rewrites_tail: true,
            window_divisor: 8,
            sub_compactions: SUB_COMPACTIONS,
            overlaps_rounds: true,
            compactions: COMPACTIONS_PER_CORE,
            round_interval: Nanos::from_millis(20),
            pressure_interval: Nanos::from_millis(2),
            compaction_max_per_second: config.compact_bytes_per_second,
            recent_image_bytes: RECENT_IMAGE_BYTES,
            prepared_bytes: prepared_bytes(layout),
            scrub_interval: Nanos::from_secs(3_600),
        }
    }
}

/// What value compaction keeps in memory, by the bytes of the chunks.
fn prepared_bytes(layout: &LogLayout) -> u64 {
    let pool_bytes = u64::from(layout.chunks) * u64::from(layout.chunk_bytes());
    (pool_bytes / PREPARED_DIVISOR).clamp(PREPARED_BYTES_MIN, PREPARED_BYTES_MAX)
}

/// The mean bytes of entries of a segment: few of them cost memory, many make longer images.
fn segment_target_bytes(unit_bytes: u32) -> u32 {
    let [(shortest, least), (longest, most)] = SEGMENT_TARGETS;
    least + (most - least) * (unit_bytes.clamp(shortest, longest) - shortest) / (longest - shortest)
}

/// The bytes of appends to key logs after which a checkpoint of so many bytes is due again: replay then reads at most about so much.
pub fn checkpoint_interval_bytes(layout: &LogLayout, checkpoint_bytes: u64) -> u64 {
    let pool_bytes = u64::from(layout.chunks) * u64::from(layout.chunk_bytes());
    let most = CHECKPOINT_BYTES_MAX.min(pool_bytes / CHECKPOINT_DIVISOR);
    // Of the smallest volumes a sixteenth is less than the least: they have checkpoints more often.
    checkpoint_bytes.saturating_mul(CHECKPOINT_FACTOR).max(CHECKPOINT_BYTES_MIN).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_of_a_segment_rises_with_the_unit() {
        for (unit_bytes, target) in [(512, 800), (1024, 1_085), (2048, 1_657), (4096, 2_800)] {
            assert_eq!(segment_target_bytes(unit_bytes), target, "{unit_bytes}");
        }
    }

    #[test]
    fn a_checkpoint_is_due_after_64_times_its_bytes_between_the_bounds() {
        let layout = |chunks| LogLayout {
            unit_bytes: 512,
            chunk_units: 1024,
            area_units: 128,
            chunks_start_unit: 32 + 512,
            chunks,
            stores: 1,
            granule_log2: 3,
        };
        let large = layout(1 << 20);
        for (bytes, due) in [(0, 4 << 20), (1 << 20, 64 << 20), (1 << 30, 8 << 30), (u64::MAX, 8 << 30)] {
            assert_eq!(checkpoint_interval_bytes(&large, bytes), due, "{bytes}");
        }
        // 512 MiB of chunks, and 32 MiB.
        assert_eq!(checkpoint_interval_bytes(&layout(1024), 1 << 20), 32 << 20);
        assert_eq!(checkpoint_interval_bytes(&layout(64), 1 << 20), 2 << 20);
    }
}
