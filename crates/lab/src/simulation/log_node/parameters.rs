//! Parameters of the simulated node of LEED, and the source of each. Drive, core time and objects' lengths are those of
//! [`crate::simulation::log_store::parameters`].
//!
//! A number is *the paper's* (by section or figure) or *our choice*, where its text states none. All were committed before the first run of a
//! figure, but those of Fig. 8, which were chosen before its first run and committed after it; the requests of a load were reduced afterwards (docs/REPRODUCTION.md).

use octokv_base::Nanos;
use octokv_device::ssd_model::DriveProfile;
use octokv_engine::spanned::SWAP_UNIT_BYTES;

/// Drives of the node. The paper's, §4.1 and §4.8.
pub const NODE_DRIVES: usize = 4;
/// Cores that execute requests. The paper's, §3.4: cores 0 to 3 of eight.
pub const STORAGE_CORES: usize = 4;
/// Objects of the whole node. Our choice, for memory: as many as one drive has in the runs with one.
pub const NODE_OBJECTS: u32 = 800_000;
/// Inserts in flight while the volume is filled. Our choice: 16 a drive, as with one.
pub const FILL_REQUESTS: usize = 64;
/// The part of a drive that is a swap region: one in this many. Our choice: none is full in a run.
pub const SWAP_PART: u64 = 8;
/// Requests in flight for throughputs. Our choice: 1,024 a drive, as with one.
pub const NODE_DEPTH_MAX: usize = 4_096;
/// Requests in flight of Fig. 10. Our choice: 256 a drive, one of the numbers that runs with one drive have.
pub const SWAP_DEPTH: usize = 1_024;
/// Requests in flight besides, with the largest skew. Our choice.
pub const SWAP_DEPTHS: [usize; 4] = [64, 256, SWAP_DEPTH, NODE_DEPTH_MAX];
/// Gaps of commands in flight besides that of a node, each with all skews; not in a quick run. Our choice.
pub const SWAP_GAPS: [u32; 2] = [16, 256];
/// Issuing rates of Fig. 6 and 14, in percent of the throughput in a closed loop. Our choice of points.
pub const RATE_PERCENTS: [u32; 5] = [20, 40, 60, 80, 95];

/// Skews of Fig. 8 and 10. Our choice of points: its text has 0.99 only, that of Fig. 7 has 0.9 and 0.95 besides.
pub fn zipf_skews(is_quick: bool) -> &'static [f64] {
    if is_quick { &[0.1, 0.99] } else { &[0.1, 0.3, 0.5, 0.7, 0.9, 0.95, 0.99] }
}

/// Gain in throughput by swapping with a skew of 0.99, in percent, for objects of 256 B and of 1 KB. The paper's, §4.6.
pub const PAPER_SWAP_GAIN_PERCENT: [f64; 2] = [15.4, 17.2];
/// Change of the mean latency and of the 99.9th percentile by swapping, mean of all skews, in percent. The paper's, §4.6.
pub const PAPER_SWAP_LATENCY_PERCENT: [f64; 2] = [-28.6, -32.1];
/// Clients of Fig. 8. Our choice.
pub const FLOW_CLIENTS: usize = 4;
/// Requests in flight of Fig. 8, and besides with the largest skew. Our choice: as Fig. 10.
pub const FLOW_DEPTHS: [usize; 3] = [64, 256, FLOW_DEPTH];
/// See [`FLOW_DEPTHS`].
pub const FLOW_DEPTH: usize = 1_024;
/// One way between a client and the node, in Fig. 8. Our choice: a round trip of 10 us by RDMA.
pub const FLOW_ONE_WAY: Nanos = Nanos::from_micros(5);
/// Gain in throughput by tokens and flow control with YCSB-B, in percent. The paper's, §4.5: of three nodes with three replicas.
pub const PAPER_FLOW_GAIN_PERCENT: f64 = 52.2;
/// Change of the mean latency and of the 99.9th percentile by them, in percent. The paper's, §4.5.
pub const PAPER_FLOW_LATENCY_PERCENT: [f64; 2] = [-34.4, -33.7];
/// Active power of a node. The paper's, §2.1.
pub const PAPER_NODE_WATTS: f64 = 52.5;
/// Requests per joule of YCSB-C with 1 KB, in thousands. The paper's, §4.3: of three nodes, each of which serves a third of the reads.
pub const PAPER_YCSB_C_PER_JOULE: f64 = 5.0;

/// The bytes of the swap region of a drive.
pub fn swap_bytes(drive: &DriveProfile) -> u64 {
    drive.capacity_bytes / SWAP_PART / SWAP_UNIT_BYTES * SWAP_UNIT_BYTES
}
