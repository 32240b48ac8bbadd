//! Parameters of the log-store simulation, and the source of each.
//!
//! A number is *the paper's* (LEED, SIGCOMM 2023, by section or table), *derived* (by the arithmetic beside it) or *our choice*, where the
//! paper states none. None was chosen by its effect on a result; those of the drive and of the core were fixed before the first run, the numbers of objects, points and compactions since (REPRODUCTION has them). The drive is [`DCT_983`], with its own
//! sources.
//!
//! ```text
//!  time of the core for one command of the drive
//!   the paper has "SSD accesses dominate, 97.4 % and 97.6 % for 256 B and 1 KB on average across three commands" (§A.1.1),
//!   so the core and memory take 2.6 % and 2.4 % of the mean latency of GET, PUT and DEL, which make 2 + 3 + 2 accesses
//!   DEL             a PUT less 10.5 µs (§A.1.1; Table 3 has a GET above a PUT, so only a DEL can be meant)
//!   256 B           (116.5 + 83.9 + 73.4) / 3 · 2.6 % / (7 / 3)                               1.02 µs
//!   1 KB            (133.1 + 84.0 + 73.5) / 3 · 2.4 % / (7 / 3)                               1.00 µs      mean 1.01 µs
//! ```
//! So a core has time for 990,000 commands a second, and the drive for 540,000: the core is no limit. Where several requests share a command
//! (a batch of images, a write of several values) they share its time here, too.

use octokv_base::Nanos;
use octokv_device::ssd_model::DriveProfile;
use octokv_device::ssd_model::drive_profiles::DCT_983;
use octokv_engine::common::record::RecordMeta;
use octokv_engine::log::chunk_directory::DIRECTORY_ID_BYTES;
use octokv_engine::log::value_record::value_record_bytes;

/// Value lengths: the paper's objects of 256 B and 1 KB (§4.1). Whether these include the key is not stated.
pub const VALUE_BYTES: [u32; 2] = [256, 1024];
/// Key length. Our choice: the paper states none.
pub const KEY_BYTES: usize = 16;
/// Units of the volume, the paper's buckets: "512B/4KB" (§3.2.2); which of them its results have is not stated.
pub const UNITS: [u32; 2] = [512, 4096];
/// Stores of the drive: "each SSD could hold 32 virtual partitions" (§4.1).
pub const STORES: u16 = 32;
/// Skew of the Zipf workload of Fig. 13. The paper's (§A.1.3).
pub const ZIPF_SKEW: f64 = 0.99;
/// Requests in flight. Our choice: 1 for Table 3's latencies; the last for its throughputs, so that the dies always have work.
pub const DEPTHS: [usize; 5] = [1, 16, 64, 256, 1024];
/// Percentages of puts of Fig. 12. Our choice of points: its text has 0 and 10.
pub const PUT_PERCENTS: [u8; 6] = [0, 10, 25, 50, 75, 100];

/// Objects of the runs before compaction, by unit. Our choice, for time and memory; the paper has "around 1.6 billion" in each data store. What
/// depends on them: puts in flight that meet in one segment, and segments that the drive still has in its write buffer.
pub const OBJECTS: [u32; 2] = [800_000, 500_000];
/// The part of the drive that is live in runs with compaction. Our choice: the paper states none, and the cost of compaction depends on it.
pub const FILL: f64 = 0.8;
/// Requests in flight in these runs. Our choice: each may take 33 KB for the longest image, which short pools feel, so a quick run has fewer.
pub fn compaction_depth(is_quick: bool) -> usize {
    if is_quick { 32 } else { 128 }
}
/// Stores in these runs: so that a store has as many chunks as possible on a small drive.
pub const COMPACTION_STORES: u16 = 8;
/// Sub-compactions of Fig. 13a. The paper's has up to 8.
pub const SUB_COMPACTIONS: [usize; 4] = [1, 2, 4, 8];
/// Compactions at once of Fig. 13b. Our choice: its text has no numbers of them.
pub const COMPACTIONS: [usize; 4] = [1, 2, 4, 8];
/// The parts that live in the runs by fill, in percent of all chunks, ascending. Our choice: puts are admitted up to 93.75 %, so 95 % of all chunks never live; 92 %
/// are 94 % of the chunks that logs can have, since others are free while compaction runs, or tails.
pub fn fills(is_quick: bool) -> &'static [u8] {
    if is_quick { &[50, 80] } else { &[50, 70, 80, 90, 92] }
}
/// The fill that is compared with the first one at a rate, in percent.
pub fn rated_fill(is_quick: bool) -> u8 {
    if is_quick { 80 } else { 90 }
}
/// How often puts have written as many objects as there are before a run by fill is measured. Our choice.
pub const FILL_OVERWRITES: u32 = 2;
/// The bytes of a chunk before compaction: those of a drive of 4 GiB ([`octokv_engine::log::format`]).
pub const CHUNK_BYTES: u32 = 64 << 10;
/// The bytes of a chunk with compaction; a quick run has [`CHUNK_BYTES`]. Our choice: compacting a chunk takes four accesses or five one after
/// the other besides those of its records, which the chunks of a whole drive, 8 MiB, do not feel. A trial with 64 KiB did.
pub const COMPACTED_CHUNK_BYTES: u32 = 128 << 10;
/// The longest value of a volume. Our choice: with the usual 2 MiB a short chunk would keep more free than that of a whole drive does.
pub const VALUE_BYTES_MAX: u32 = 4096;
/// Buffers of the engine, in bytes.
pub const POOL_BYTES: usize = 512 << 20;

/// Published numbers of LEED's Table 3, on one SmartNIC JBOF, for one object length.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PublishedRow {
    /// The part of the drives that objects can have, in percent.
    pub capacity_percent: f64,
    /// Mean latency of random reads, in microseconds.
    pub read_us: f64,
    /// Mean latency of random writes, in microseconds.
    pub write_us: f64,
    /// Random reads per second of the whole node, in thousands.
    pub read_kqps: f64,
    /// Random writes per second of the whole node, in thousands.
    pub write_kqps: f64,
}

/// Table 3's rows for one system: objects of 256 B, then of 1 KB.
pub type PublishedRows = [PublishedRow; 2];

const fn row(capacity_percent: f64, latencies: [f64; 2], kqps: [f64; 2]) -> PublishedRow {
    let ([read_us, write_us], [read_kqps, write_kqps]) = (latencies, kqps);
    PublishedRow { capacity_percent, read_us, write_us, read_kqps, write_kqps }
}

/// LEED. The paper's, Table 3.
pub const PAPER_LEED: PublishedRows =
    [row(95.4, [116.5, 83.9], [860.0, 576.7]), row(97.3, [133.1, 84.0], [855.9, 608.6])];
/// FAWN on the same machine. The paper's, Table 3.
pub const PAPER_FAWN: PublishedRows =
    [row(7.7, [65.4, 61.4], [61.2, 64.8]), row(24.1, [54.0, 44.8], [74.0, 88.4])];
/// KVell on the same machine. The paper's, Table 3.
pub const PAPER_KVELL: PublishedRows =
    [row(0.9, [416.0, 764.0], [299.9, 160.7]), row(2.6, [445.0, 810.0], [289.1, 156.1])];
/// Drives of the node in Table 3. The paper's, §2.1 and §4.8: the throughputs are theirs together.
pub const PAPER_DRIVES: f64 = 4.0;
/// Part of SSD accesses in the latency, in percent. The paper's, §A.1.1.
pub const PAPER_SSD_PERCENT: [f64; 2] = [97.4, 97.6];
/// What a PUT takes longer than a DEL, in microseconds. The paper's, §A.1.1.
pub const PAPER_PUT_OVER_DELETE_US: f64 = 10.5;
/// Change of the throughput with 10 % of puts, in percent. The paper's, §A.1.2.
pub const PAPER_TEN_PERCENT_PUTS: [f64; 2] = [-3.3, -2.9];
/// Gain of 8 sub-compactions over 1, mean of three workloads. The paper's, §4.2.
pub const PAPER_SUB_COMPACTIONS_GAIN: f64 = 1.9;
/// Gain of co-scheduled compactions, in percent. The paper's, §4.2.
pub const PAPER_CO_SCHEDULING_PERCENT: f64 = 17.9;
/// Memory for an object at most, in bytes. The paper's, §2.3.
pub const PAPER_MEMORY_BYTES: f64 = 0.5;

/// Device accesses of a GET, a PUT and a DEL. The paper's, §3.3.
pub const ACCESSES: [f64; 3] = [2.0, 3.0, 2.0];

/// The time of the core for one command: the arithmetic of the module documentation.
pub fn command_cost() -> Nanos {
    let of_size = |size: usize| {
        let PublishedRow { read_us, write_us, .. } = PAPER_LEED[size];
        let mean_us = (read_us + write_us + write_us - PAPER_PUT_OVER_DELETE_US) / 3.0;
        let accesses = ACCESSES.iter().sum::<f64>() / 3.0;
        mean_us * (1.0 - PAPER_SSD_PERCENT[size] / 100.0) / accesses
    };
    // To 10 ns: the percentages have two digits.
    Nanos(((of_size(0) + of_size(1)) / 2.0 * 100.0).round() as u64 * 10)
}

/// The paper's drive: the same dies, each with fewer blocks, 4.2 GB.
pub fn modelled_drive() -> DriveProfile {
    DCT_983.scaled_down(96, 96)
}

/// Bytes of the volume in runs with compaction, so that loads write it often: a twelfth of the drive, in a quick run a 96th. So the drive's
/// own garbage collection adds hardly anything, as in decision 0028's arithmetic; on a drive that is full it would. (A drive of this size was
/// tried first, with blocks of 2 stripes: the model of its translation layer ran out of free blocks.)
pub fn compaction_volume_bytes(is_quick: bool) -> u64 {
    let parts = if is_quick { 96 } else { 12 };
    (modelled_drive().capacity_bytes / parts).next_multiple_of(COMPACTED_CHUNK_BYTES.into())
}

/// Objects of the runs with compaction, which take [`FILL`] of the volume: decision 0028 has 35.8 B of key log for each object with units of
/// 512 B, and an id of 4 B beside the record.
pub fn compaction_objects(value_bytes: u32, is_quick: bool) -> u32 {
    objects_of_volume(compaction_volume_bytes(is_quick), value_bytes, FILL)
}

/// Objects that take this part of a volume.
pub fn objects_of_volume(volume_bytes: u64, value_bytes: u32, live: f64) -> u32 {
    (volume_bytes as f64 * live / (record_bytes(value_bytes) + 35.8)) as u32
}

/// The bytes of an object in the value log: its record, with granules of 8 B, and its id in the directory of the chunk.
pub fn record_bytes(value_bytes: u32) -> f64 {
    let record = value_record_bytes(KEY_BYTES, value_bytes, &RecordMeta::PLAIN).next_multiple_of(8);
    f64::from(record) + DIRECTORY_ID_BYTES as f64
}

/// The bytes of a chunk in runs by fill.
pub const FILL_CHUNK_BYTES: u32 = 32 << 10;

/// Bytes of the volume in runs by fill: 5,367 chunks, so that several windows have room in those that stay free, as on a whole drive, which has ten
/// times as many chunks; in a quick run 1,342. Our choice, for time.
pub fn fill_volume_bytes(is_quick: bool) -> u64 {
    let parts = if is_quick { 96 } else { 24 };
    (modelled_drive().capacity_bytes / parts).next_multiple_of(FILL_CHUNK_BYTES.into())
}

/// The part of the objects with which a quick run is done.
pub fn objects_of_run(objects: u32, is_quick: bool) -> u32 {
    if is_quick { objects / 20 } else { objects }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_of_a_command_follows_from_the_papers_shares() {
        assert_eq!(command_cost(), Nanos(1_010));
    }

    #[test]
    fn sizes_are_those_that_the_documentation_says() {
        assert_eq!(modelled_drive().capacity_bytes / u64::from(CHUNK_BYTES), 64_401);
        assert_eq!(compaction_volume_bytes(false) / u64::from(COMPACTED_CHUNK_BYTES), 2_684);
        assert_eq!(compaction_volume_bytes(true) / u64::from(CHUNK_BYTES), 672);
        let fill_chunks =
            [false, true].map(|is_quick| fill_volume_bytes(is_quick) / u64::from(FILL_CHUNK_BYTES));
        assert_eq!(fill_chunks, [5_367, 1_342]);
        // Decision 0028: 327.8 B and 1,095.8 B an object.
        let object_bytes = |value_bytes| {
            compaction_volume_bytes(false) as f64 * FILL / f64::from(compaction_objects(value_bytes, false))
        };
        assert_eq!([256, 1024].map(|bytes| object_bytes(bytes).round()), [328.0, 1_096.0]);
    }
}
