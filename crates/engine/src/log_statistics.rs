//! Statistics of circular logs in chunks, as operators see them.
//!
//! In: what the log engine counts. Out: numbers of one moment, of one volume whatever the number of its cores. An engine without such logs has none.

/// The state of a volume's stores, and counters of the work on their logs. Counters begin at 0 when the process opens the volume ("the opening").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogStatistics {
    /// The bytes of a chunk.
    pub chunk_bytes: u64,
    /// The chunks of the device.
    pub chunks: u64,
    /// Those that are free.
    pub free_chunks: u64,
    /// The most chunks whose space live data may take; the others are a reserve of compaction.
    pub capacity_chunks: u64,
    /// The chunks in front of the head of a log that recovery may still read.
    pub retired_chunks: u64,
    /// The chunks in front of the head of a log that device errors keep from being compacted.
    pub pinned_chunks: u64,
    /// The key logs of all stores.
    pub keys: ChunkLogStatistics,
    /// The value logs of all stores.
    pub values: ChunkLogStatistics,
    /// The stores: each has the keys of a part of the ring.
    pub stores: u64,
    /// Those of which a segment is lost to damage: they serve nothing.
    pub lost_stores: u64,
    /// The segments of all stores.
    pub segments: u64,
    /// The bytes of the entries in them, one for each key and each tombstone.
    pub entry_bytes: u64,
    /// The memory of the segment tables, in bytes.
    pub segment_table_bytes: u64,
    /// The memory of the chunk table, in bytes.
    pub chunk_table_bytes: u64,
    /// Batches of images that were written since the opening.
    pub batches: u64,
    /// The segment images in them.
    pub images: u64,
    /// The markers in them, which state the heads of logs and what is durable.
    pub markers: u64,
    /// Segments that were split since the opening.
    pub splits: u64,
    /// Splits since the opening that device failures or a lack of memory ended. A further one is tried when the store has grown.
    pub failed_splits: u64,
    /// Reads since the opening that met a chunk which was opened meanwhile, and were repeated.
    pub repeated_reads: u64,
    /// Segment images since the opening that an operation found in memory.
    pub image_cache_hits: u64,
    /// Writes since the opening that waited for space.
    pub waited_writes: u64,
    /// Rounds of compaction since the opening that advanced the head of a log.
    pub compaction_rounds: u64,
    /// Images of which compaction of a key log made new ones, since the opening.
    pub moved_images: u64,
    /// Segments that compaction of a value log visited, since the opening.
    pub visited_segments: u64,
    /// Values that it moved, since the opening.
    pub moved_values: u64,
    /// The records of these values, in bytes.
    pub moved_bytes: u64,
    /// Those of these values whose records it read together with others.
    pub values_read_together: u64,
    /// Values whose records it found damaged, since the opening.
    pub lost_values: u64,
    /// Changes of live contents that were not possible, since the opening: metadata with a valid checksum was wrong, or the engine is.
    pub miscounts: u64,
    /// The scrub.
    pub scrub: ScrubStatistics,
}

/// What the scrub, which verifies a volume in the background, did and found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScrubStatistics {
    /// Passes over the whole volume that ended since the opening.
    pub passes: u64,
    /// The bytes of images and values that it read since the opening.
    pub read_bytes: u64,
    /// Segments since the opening that it could not verify, since the device failed to read them or there was no memory.
    pub skipped_segments: u64,
    /// Damaged buckets of images: those that the last pass found, or the one under way if these are more.
    pub damaged_buckets: u64,
    /// Values that cannot be read, likewise.
    pub damaged_values: u64,
}

/// The logs of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkLogStatistics {
    /// Their chunks, from the heads on.
    pub chunks: u64,
    /// The bytes of the images, or of the records with their ids, that are live.
    pub live_bytes: u64,
}
