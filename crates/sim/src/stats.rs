//! Results that all runners return, and the time limit that they share.

use octokv_base::Nanos;

/// Simulated time within which each step must complete while no fault is active.
pub const PROGRESS_TIMEOUT: Nanos = Nanos::from_secs(60);

/// What the log engine did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogWorkStats {
    /// Segments split.
    pub splits: u64,
    /// Rounds of compaction that advanced the head of a log.
    pub rounds: u64,
    /// Images of segments that compaction of a key log moved.
    pub moved_images: u64,
    /// Values that compaction of a value log moved.
    pub moved_values: u64,
    /// Markers.
    pub markers: u64,
    /// Lookups repeated because a chunk was reused meanwhile.
    pub repeated_reads: u64,
    /// Segment images that operations found in memory.
    pub image_cache_hits: u64,
    /// Writes that waited for space.
    pub waited_writes: u64,
    /// Values of which compaction found the record damaged.
    pub lost_values: u64,
    /// Openings that replayed images behind the checkpoint.
    pub replays: u64,
}

/// Counters of a simulation without violations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScenarioStats {
    /// Commands completed, or lost with their session.
    pub operations: u64,
    /// Commands completed without error.
    pub succeeded: u64,
    /// Simulated time from the start of the scenario to its end.
    pub elapsed: Nanos,
    /// Disks of nodes lost and replaced.
    pub disks_lost: u64,
    /// Crashes of the node, those during recovery included.
    pub crashes: u64,
    /// Requests executed on another core than their connection's.
    pub offloaded: u64,
    /// Requests queued behind other tenants.
    pub queued: u64,
    /// Checkpoints written.
    pub checkpoints: u64,
    /// Reads that a cache of values served, of volumes that were open at a crash or at the end.
    pub cache_hits: u64,
    /// Values in pieces that compaction joined, and records that it moved, of the same volumes.
    pub compacted: u64,
    /// Pairs that scans received.
    pub scanned_pairs: u64,
    /// Memtables flushed to tables, of the same volumes.
    pub flushes: u64,
    /// Compactions of tables, of the same volumes.
    pub compactions: u64,
    /// Puts that waited for their turn since compaction could not follow, of the same volumes.
    pub delayed_writes: u64,
    /// Work of the log engine, of the same volumes.
    pub log: LogWorkStats,
    /// Device operations failed by injected errors.
    pub device_errors: u64,
    /// Device operations of disks that hung, which did not complete, or of disks that were pulled.
    pub hung_operations: u64,
    /// Disks of several that were replaced while their node served.
    pub disks_replaced: u64,
    /// Crashes while a disk was replaced, before every core had the new one.
    pub replacements_cut: u64,
    /// Those of which the other disks have a record.
    pub replacements_recorded: u64,
    /// Disks that were added to several while their node served, and to which partitions have moved.
    pub disks_added: u64,
    /// Crashes while a disk was added, before every core had it.
    pub additions_cut: u64,
    /// Crashes while partitions moved: while keys were copied, while the map was changed, and while keys were deleted where they had been.
    pub moves_cut: [u64; 3],
    /// Commands that failed since the device of their key was not available.
    pub unavailable_commands: u64,
    /// Accesses to memory in place: by commands that end at once.
    pub in_place: u64,
    /// Bits flipped on the disk.
    pub corrupted_bits: u64,
    /// Sessions of a client-side engine fenced because writes may have been lost with the connection.
    pub fenced_sessions: u64,
    /// Changes made by the operator.
    pub admin_changes: u64,
    /// Commands rejected because of these changes.
    pub rejected_commands: u64,
    /// Keys whose linearizability search exceeded its bound.
    pub undecided_keys: u64,
    /// Hash of all simulated events: equal for equal plans.
    pub trace_hash: u64,
}
