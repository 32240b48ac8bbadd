//! The statistics of a volume.
//!
//! In: stores, the pool of chunks, what operations count. Out: [`EngineStatistics`] with [`LogStatistics`]. Nothing is held up: each store is
//! read under its own lock, one after the other, so that parts may be of moments that lie close together.
//! Tested in `tests/log_statistics.rs`.

use super::chunk_directory::DIRECTORY_ID_BYTES;
use super::volume::LogVolume;
use crate::EngineStatistics;
use crate::log_statistics::LogStatistics;
use std::sync::atomic::{AtomicU64, Ordering};

impl LogVolume {
    /// The current statistics.
    pub(super) fn statistics(&self) -> EngineStatistics {
        let (keys, log) = self.log_statistics();
        EngineStatistics {
            keys,
            capacity_bytes: self.capacity_bytes(),
            used_bytes: self.used_of_capacity(),
            index_bytes: log.segment_table_bytes + log.chunk_table_bytes,
            journal_batches: log.batches,
            checkpoints: self.counters.checkpoints.load(Ordering::Relaxed),
            log: Some(log),
            ..EngineStatistics::default()
        }
    }

    /// The keys, and the statistics of stores and logs.
    fn log_statistics(&self) -> (u64, LogStatistics) {
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let (layout, counters) = (self.layout(), &self.counters);
        let mut log = LogStatistics {
            chunk_bytes: layout.chunk_bytes().into(),
            chunks: self.pool.chunks().into(),
            free_chunks: self.pool.free().into(),
            capacity_chunks: self.pool.limits().capacity_chunks().into(),
            pinned_chunks: self.pool.pinned().into(),
            stores: self.stores.len() as u64,
            chunk_table_bytes: self.pool.memory_bytes() as u64,
            batches: load(&counters.batches),
            images: load(&counters.images),
            markers: load(&counters.markers),
            splits: load(&counters.splits),
            failed_splits: load(&counters.failed_splits),
            repeated_reads: load(&counters.repeated_reads),
            image_cache_hits: load(&counters.image_cache_hits),
            waited_writes: self.passes.waited_writes(),
            compaction_rounds: load(&counters.compaction_rounds),
            moved_images: load(&counters.moved_images),
            visited_segments: load(&counters.visits),
            moved_values: load(&counters.moved_values),
            moved_bytes: load(&counters.moved_bytes),
            values_read_together: load(&counters.values_read_together),
            lost_values: load(&counters.lost_values),
            miscounts: self.pool.miscounts(),
            scrub: self.scrub.statistics(),
            ..LogStatistics::default()
        };
        let mut keys = 0;
        for store in &self.stores {
            let state = store.state.lock();
            keys += state.totals.keys;
            log.segments += state.table.segments();
            log.entry_bytes += state.totals.entry_bytes;
            log.segment_table_bytes += state.table.memory_bytes() as u64;
            log.keys.chunks += state.keys.chunk_count() as u64;
            log.values.chunks += state.values.chunk_count() as u64;
            log.retired_chunks += state.retired.len() as u64;
            log.lost_stores += u64::from(state.is_lost);
            let published = state.totals_published;
            log.values.live_bytes += published.live_granules << layout.granule_log2;
            log.values.live_bytes += published.keys * DIRECTORY_ID_BYTES as u64;
        }
        // Images are what is left of the live bytes; a batch that was published meanwhile may have made these fewer.
        log.keys.live_bytes = self.passes.used_bytes().saturating_sub(log.values.live_bytes);
        (keys, log)
    }
}
