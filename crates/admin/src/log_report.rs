//! The JSON document of a namespace's circular logs: stores, chunks, live bytes, and counters of batches, splits and compaction.

use octokv_engine::LogStatistics;
use octokv_node::{DeviceStatus, NamespaceStatus};
use serde::{Deserialize, Serialize};

/// The logs of a namespace with a log engine. Its counts are since the namespace was opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogReport {
    /// Namespace ID.
    pub nsid: u32,
    /// The index of its device, in a volume on several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u16>,
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
    /// The chunks of the device.
    pub chunks: u64,
    /// Those that are free.
    pub free_chunks: u64,
    /// The most chunks whose space live data may take.
    pub capacity_chunks: u64,
    /// Chunks that no log has any more, and that a recovery may still read.
    pub retired_chunks: u64,
    /// Chunks that device errors keep from being compacted.
    pub pinned_chunks: u64,
    /// Chunks of key logs.
    pub key_chunks: u64,
    /// The live segment images in them, in bytes.
    pub key_live_bytes: u64,
    /// Chunks of value logs.
    pub value_chunks: u64,
    /// The live records in them with their ids, in bytes.
    pub value_live_bytes: u64,
    /// Stores: each has the keys of a part of the ring.
    pub stores: u64,
    /// Stores that damage has lost a segment of: they serve nothing.
    pub lost_stores: u64,
    /// Segments of keys.
    pub segments: u64,
    /// The entries of keys and tombstones in them, in bytes.
    pub entry_bytes: u64,
    /// Memory of the segment tables in bytes.
    pub segment_table_bytes: u64,
    /// Memory of the chunk table in bytes.
    pub chunk_table_bytes: u64,
    /// Batches of segment images.
    pub batches: u64,
    /// The images in them.
    pub images: u64,
    /// The markers in them.
    pub markers: u64,
    /// Segments that were split.
    pub splits: u64,
    /// Splits that failed. They are repeated.
    pub failed_splits: u64,
    /// Reads that were repeated, since a chunk was used again meanwhile.
    pub repeated_reads: u64,
    /// Segment images that operations found in memory.
    pub image_cache_hits: u64,
    /// Writes that waited for space.
    pub waited_writes: u64,
    /// Rounds of compaction.
    pub compaction_rounds: u64,
    /// Segment images that compaction moved.
    pub moved_images: u64,
    /// Segments that compaction of values visited.
    pub visited_segments: u64,
    /// Values that it moved.
    pub moved_values: u64,
    /// Their records in bytes.
    pub moved_bytes: u64,
    /// Those of these values whose records compaction read together with others.
    pub values_read_together: u64,
    /// Values whose records it found damaged.
    pub lost_values: u64,
    /// Changes of live contents that were not possible, since the namespace was opened.
    pub miscounts: u64,
    /// Passes of the scrub over the whole volume.
    pub scrub_passes: u64,
    /// What it read, in bytes.
    pub scrub_read_bytes: u64,
    /// Segments that it could not verify, since the device failed to read them or there was no memory.
    pub scrub_skipped_segments: u64,
    /// Damaged buckets of segment images: those that its last pass found, or the one under way if these are more.
    pub scrub_damaged_buckets: u64,
    /// Values that cannot be read, likewise.
    pub scrub_damaged_values: u64,
}

impl LogReport {
    /// Those of a namespace, if it has logs: one, or one of each of several devices.
    pub fn all_of(namespace: &NamespaceStatus) -> Vec<LogReport> {
        let report = |device, log| LogReport::new((namespace.config.id.0, device), log);
        let own = namespace.log.iter().map(|log| report(None, log));
        let of_devices = namespace.devices.iter().filter_map(|DeviceStatus { report: of_device, .. }| {
            Some(report(Some(of_device.index), of_device.statistics.log.as_ref()?))
        });
        own.chain(of_devices).collect()
    }

    fn new((nsid, device): (u32, Option<u16>), log: &LogStatistics) -> LogReport {
        LogReport {
            nsid,
            device,
            chunk_bytes: log.chunk_bytes,
            chunks: log.chunks,
            free_chunks: log.free_chunks,
            capacity_chunks: log.capacity_chunks,
            retired_chunks: log.retired_chunks,
            pinned_chunks: log.pinned_chunks,
            key_chunks: log.keys.chunks,
            key_live_bytes: log.keys.live_bytes,
            value_chunks: log.values.chunks,
            value_live_bytes: log.values.live_bytes,
            stores: log.stores,
            lost_stores: log.lost_stores,
            segments: log.segments,
            entry_bytes: log.entry_bytes,
            segment_table_bytes: log.segment_table_bytes,
            chunk_table_bytes: log.chunk_table_bytes,
            batches: log.batches,
            images: log.images,
            markers: log.markers,
            splits: log.splits,
            failed_splits: log.failed_splits,
            repeated_reads: log.repeated_reads,
            image_cache_hits: log.image_cache_hits,
            waited_writes: log.waited_writes,
            compaction_rounds: log.compaction_rounds,
            moved_images: log.moved_images,
            visited_segments: log.visited_segments,
            moved_values: log.moved_values,
            moved_bytes: log.moved_bytes,
            values_read_together: log.values_read_together,
            lost_values: log.lost_values,
            miscounts: log.miscounts,
            scrub_passes: log.scrub.passes,
            scrub_read_bytes: log.scrub.read_bytes,
            scrub_skipped_segments: log.scrub.skipped_segments,
            scrub_damaged_buckets: log.scrub.damaged_buckets,
            scrub_damaged_values: log.scrub.damaged_values,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_engine::{ChunkLogStatistics, ScrubStatistics};
    use serde_json::json;

    /// Each number is another one, so that two that are exchanged show.
    #[test]
    fn every_number_has_its_name() {
        let statistics = LogStatistics {
            chunk_bytes: 1,
            chunks: 2,
            free_chunks: 3,
            capacity_chunks: 4,
            retired_chunks: 5,
            keys: ChunkLogStatistics { chunks: 6, live_bytes: 7 },
            values: ChunkLogStatistics { chunks: 8, live_bytes: 9 },
            stores: 10,
            lost_stores: 11,
            segments: 12,
            entry_bytes: 13,
            segment_table_bytes: 14,
            chunk_table_bytes: 15,
            batches: 16,
            images: 17,
            markers: 18,
            splits: 19,
            failed_splits: 39,
            repeated_reads: 20,
            image_cache_hits: 37,
            waited_writes: 21,
            compaction_rounds: 22,
            moved_images: 23,
            visited_segments: 24,
            moved_values: 25,
            moved_bytes: 26,
            values_read_together: 38,
            lost_values: 27,
            miscounts: 36,
            pinned_chunks: 29,
            scrub: ScrubStatistics {
                passes: 30,
                read_bytes: 31,
                skipped_segments: 32,
                damaged_buckets: 33,
                damaged_values: 34,
            },
        };
        let report = LogReport::new((28, None), &statistics);
        let document = json!({
            "nsid": 28, "chunk_bytes": 1, "chunks": 2, "free_chunks": 3, "capacity_chunks": 4, "retired_chunks": 5,
            "key_chunks": 6, "key_live_bytes": 7, "value_chunks": 8, "value_live_bytes": 9, "stores": 10,
            "lost_stores": 11, "segments": 12, "entry_bytes": 13, "segment_table_bytes": 14, "chunk_table_bytes": 15,
            "batches": 16, "images": 17, "markers": 18, "splits": 19, "failed_splits": 39, "repeated_reads": 20, "image_cache_hits": 37, "waited_writes": 21,
            "compaction_rounds": 22, "moved_images": 23, "visited_segments": 24, "moved_values": 25,
            "moved_bytes": 26, "values_read_together": 38, "lost_values": 27, "miscounts": 36, "pinned_chunks": 29, "scrub_passes": 30,
            "scrub_read_bytes": 31, "scrub_skipped_segments": 32, "scrub_damaged_buckets": 33,
            "scrub_damaged_values": 34,
        });
        assert_eq!(serde_json::to_value(report).unwrap(), document);
        assert_eq!(serde_json::from_value::<LogReport>(document).unwrap(), report);
    }
}
