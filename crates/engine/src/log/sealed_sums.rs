//! Sums over the sealed chunks of each log, kept up to date by each change of a chunk: the policy of compaction asks for them before each
//! round, and a volume of 960 GB has 114,000 chunks.
//!
//! ```text
//!   live contents of a chunk, and what compaction moved out of it ─▶ its part: chunks 1, records, amount, garbage bytes
//!   sum of a log = parts of its sealed chunks        a change: + the new part - the former one
//! ```
//! In: a part before and after a change. Out: the sum; what ends of key chunks take. Invariants: changes of the chunks of a store have its lock, so a reader with that lock sees exact sums.
//! Tested in `chunk_pool_tests.rs`, against a model, and below.

use super::chunk_directory::{DIRECTORY_ID_BYTES, DIRECTORY_TRAILER_BYTES};
use super::log_layout::ChunkSizes;
use super::log_place::LogKind;
use super::space_limits::CHUNK_END_DIVISOR;
use std::sync::atomic::{AtomicU64, Ordering};

/// Markers of a key chunk that are allowed for beside that of its round, as a margin: a log whose garbage is not more would be compacted for ever.
const MARKER_MARGIN: u64 = 1;

/// The live contents of a chunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveContents {
    /// Records of a value log, images of a key log.
    pub records: u32,
    /// The granules of those records, the units of those images.
    pub amount: u32,
}

/// The live contents of several chunks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveSums {
    /// Records of value logs, images of key logs.
    pub records: u64,
    /// The granules of those records, the units of those images.
    pub amount: u64,
}

impl ChunkSizes {
    /// Chunks of so many units of 512 bytes, and granules of 8.
    #[cfg(test)]
    pub fn of_units(units: u32) -> ChunkSizes {
        ChunkSizes { units, unit_bytes: 512, granule_log2: 3 }
    }

    /// The bytes of live contents: of images, or of records with their directory.
    pub fn live_bytes(&self, kind: LogKind, live: LiveContents) -> u64 {
        match kind {
            LogKind::Keys => u64::from(live.amount) * u64::from(self.unit_bytes),
            LogKind::Values => {
                let records_bytes = u64::from(live.amount) << self.granule_log2;
                records_bytes
                    + u64::from(live.records) * DIRECTORY_ID_BYTES as u64
                    + DIRECTORY_TRAILER_BYTES as u64
            }
        }
    }

    /// The bytes of a full chunk that compacting it frees. Its end, of which a part in [`CHUNK_END_DIVISOR`] is allowed for, is no garbage.
    pub fn garbage_bytes(&self, kind: LogKind, live: LiveContents) -> u64 {
        let full_bytes = u64::from(self.units) * u64::from(self.unit_bytes) - self.end_bytes();
        full_bytes.saturating_sub(self.live_bytes(kind, live))
    }

    /// The bytes of a full chunk that are allowed for its end.
    pub fn end_bytes(&self) -> u64 {
        u64::from(self.units) * u64::from(self.unit_bytes) / u64::from(CHUNK_END_DIVISOR)
    }

    /// The bytes of a full key chunk that compaction leaves without images, by the images of its log: [`ChunkSizes::end_bytes`], or if that is more, an end
    /// that the next image did not fit, and a marker. Both are there again behind a further round.
    pub fn key_end_bytes(&self, images: &SealedSums) -> u64 {
        let unit_bytes = u64::from(self.unit_bytes);
        let image_bytes = images.amount * unit_bytes / images.records.max(1);
        self.end_bytes().max(MARKER_MARGIN * unit_bytes + image_bytes)
    }

    /// The bytes that the ends of key chunks with these images take beyond [`ChunkSizes::end_bytes`] of each, once compaction has freed what it can.
    pub fn key_end_excess_bytes(&self, images: &SealedSums) -> u64 {
        let (unit_bytes, end_bytes) = (u64::from(self.unit_bytes), self.key_end_bytes(images));
        let image_bytes = (u64::from(self.units) * unit_bytes).saturating_sub(end_bytes).max(unit_bytes);
        let chunks = (images.amount * unit_bytes).div_ceil(image_bytes);
        chunks * (end_bytes - self.end_bytes())
    }
}

/// What sealed chunks have together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SealedSums {
    /// Chunks whose live contents are counted.
    pub counted: u64,
    /// Chunks whose live contents are not, since a recovery.
    pub uncounted: u64,
    /// Live records or images of the counted ones.
    pub records: u64,
    /// Their granules or units.
    pub amount: u64,
    /// Garbage of the counted ones, without what compaction has moved out of them.
    pub garbage_bytes: u64,
    /// The bytes that compaction has moved out of the uncounted ones.
    pub uncounted_vacated_bytes: u64,
}

impl SealedSums {
    /// The part of one sealed chunk out of which compaction has moved so many granules.
    pub(super) fn of_chunk(
        sizes: &ChunkSizes,
        kind: LogKind,
        live: Option<LiveContents>,
        vacated_granules: u32,
    ) -> SealedSums {
        let vacated_bytes = u64::from(vacated_granules) << sizes.granule_log2;
        match live {
            Some(live) => SealedSums {
                counted: 1,
                records: live.records.into(),
                amount: live.amount.into(),
                garbage_bytes: sizes.garbage_bytes(kind, live).saturating_sub(vacated_bytes),
                ..SealedSums::default()
            },
            None => {
                SealedSums { uncounted: 1, uncounted_vacated_bytes: vacated_bytes, ..SealedSums::default() }
            }
        }
    }

    fn fields(self) -> [u64; FIELDS] {
        [
            self.counted,
            self.uncounted,
            self.records,
            self.amount,
            self.garbage_bytes,
            self.uncounted_vacated_bytes,
        ]
    }

    fn from_fields(fields: [u64; FIELDS]) -> SealedSums {
        let [counted, uncounted, records, amount, garbage_bytes, uncounted_vacated_bytes] = fields;
        SealedSums { counted, uncounted, records, amount, garbage_bytes, uncounted_vacated_bytes }
    }

    /// The estimated live contents of one of the uncounted chunks: an equal share of those of all sealed chunks, `live`, less those of the counted chunks; at most
    /// `amount_max`. The mean of the counted chunks would be too high: after a recovery they are few, and new, so nearly all of what they hold is live.
    pub(super) fn uncounted_mean(&self, live: LiveSums, amount_max: u32) -> LiveContents {
        let share = |all: u64, counted: u64| {
            let each = all.saturating_sub(counted) / self.uncounted.max(1);
            u32::try_from(each).unwrap_or(u32::MAX)
        };
        let amount = share(live.amount, self.amount).min(amount_max);
        // A record has a granule at least.
        LiveContents { records: share(live.records, self.records).clamp(1, amount.max(1)), amount }
    }

    /// The sums without a part of them.
    pub(super) fn without(self, part: SealedSums) -> SealedSums {
        let (mut fields, part) = (self.fields(), part.fields());
        fields.iter_mut().zip(part).for_each(|(sum, part)| *sum = sum.saturating_sub(part));
        SealedSums::from_fields(fields)
    }
}

const FIELDS: usize = 6;

/// The sums of one log.
#[derive(Default)]
pub(super) struct SealedCounters([AtomicU64; FIELDS]);

impl SealedCounters {
    pub(super) fn load(&self) -> SealedSums {
        // Below zero only if an entry names a chunk of another store, whose lock the change does not have.
        let load = |sum: &AtomicU64| sum.load(Ordering::Relaxed).cast_signed().max(0).cast_unsigned();
        SealedSums::from_fields(self.0.each_ref().map(load))
    }

    /// Replaces the part of a chunk.
    pub(super) fn change(&self, former: SealedSums, next: SealedSums) {
        for (sum, (former, next)) in self.0.iter().zip(former.fields().into_iter().zip(next.fields())) {
            if former != next {
                sum.fetch_add(next.wrapping_sub(former), Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_uncounted_chunk_is_estimated_by_its_share_of_what_is_not_in_counted_chunks() {
        let sums = SealedSums { counted: 2, uncounted: 4, records: 30, amount: 900, ..SealedSums::default() };
        let mean = |records, amount| sums.uncounted_mean(LiveSums { records, amount }, 1_000);
        let live = |records, amount| LiveContents { records, amount };
        assert_eq!(mean(70, 2_900), live(10, 500));
        assert_eq!(mean(70, 9_000), live(10, 1_000), "not more than a chunk has");
        assert_eq!(mean(9_000, 2_900), live(500, 500), "a record has a granule");
        // If the counted chunks have all of it, no granule is left; a record is always allowed for.
        assert_eq!(mean(20, 800), live(1, 0));
        assert_eq!(SealedSums::default().uncounted_mean(LiveSums::default(), 1_000), live(1, 0));
    }
}
