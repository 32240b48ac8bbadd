//! Parameters of the iterator simulation, and the source of each.
//!
//! A number is *from the slides* (of the paper's talk), *from the abstract* (of the paper, SYSTOR 2023, pages 60 to 70, DOI
//! 10.1145/3579370.3594775), *derived* (by the arithmetic beside it), *measured* (here) or an *estimate*. None was chosen by its effect
//! on a result; all but [`TABLE_CACHE_BYTES`] were fixed before the first run. The flash is [`COSMOS_PLUS`], with its own sources.
//!
//! ```text
//!  one Next without what is on flash
//!   host       submission and completion of a synchronous passthrough command in Linux: estimate                    8.0 µs
//!   protocol   the instructions of our target for a get, 2,225 (parameters of the OctoKV simulation), at 1 a cycle  2.2 µs
//!   search     those of our engine for a get, 8,002, without its device operations                                  8.0 µs
//!   DMA        two crossings of PCIe, 0.5 µs each: estimate; bytes at the link's rate                               1.0 µs + bytes
//!                                                                                                                  19.2 µs
//!  one flash read
//!   48.0 page, 90.2 channel (16 KiB with check bytes, the controller corrects whole pages), 2.0 scheduling: estimate 140.2 µs
//!                                                                                                        + bytes into memory
//! ```
//! So a Next whose value of 4 KiB is read when it is asked for takes 162 µs, and one whose value is there 20.4 µs: prefetching gains
//! at most 7.9 times. The host's 8 µs are the estimate on which that depends most: with 4 µs it is 9.6 times, with 16 µs 6.0.

use octokv_base::Nanos;
use octokv_device::ssd_model::DriveProfile;
use octokv_device::ssd_model::drive_profiles::{COSMOS_PLUS, transfer_time};

/// Pairs in the store. The slides': 3 M; with values of 128 KiB, 300,000 (our choice, for time and memory: 39 GB).
pub const PAIRS: u32 = 3_000_000;
/// Bytes of all values at most, by which the number of pairs is reduced. Our choice.
pub const VALUE_BYTES_TOTAL_MAX: u64 = 50_000_000_000;
/// Key length. The slides'.
pub const KEY_BYTES: usize = 4;
/// Value lengths. The slides'.
pub const VALUE_BYTES: [u32; 4] = [128, 4 << 10, 16 << 10, 128 << 10];
/// Prefetch degrees D. The slides': 0 to 8.
pub const DEGREES: [u32; 9] = [0, 1, 2, 3, 4, 5, 6, 7, 8];
/// Pairs of a scan. The slides'.
pub const SCAN_LENGTHS: [u32; 5] = [128, 256, 512, 1024, 2048];
/// Pairs of the scan with and without index prefetch. The slides': "enough to trigger synchronous index read".
pub const LONG_SCAN: u32 = 200_000;
/// Value length of that scan. Our choice: the slides have none.
pub const LONG_SCAN_VALUE_BYTES: u32 = 4 << 10;

/// Gain of index prefetch in the 99.9th percentile of Next. The slides'; their conclusion has 2.
pub const PAPER_INDEX_PREFETCH_GAIN: f64 = 3.6;
/// Largest gain of throughput, keys written in order. The slides': 7.2; the abstract's: 7.22.
pub const PAPER_GAIN_IN_ORDER: f64 = 7.22;
/// Largest gain of throughput, keys written in random order. The abstract's; the slides have none.
pub const PAPER_GAIN_AT_RANDOM: f64 = 4.13;

/// Clock rate of the drive's processor cores. From github.com/JonghyeokPark/Flashalloc-Cosmos: two ARM Cortex-A9 of 1 GHz, 1 GB of DDR3,
/// PCIe 2.0 ×8.
const CORE_HZ: f64 = 1e9;
/// Estimate: a Cortex-A9 issues two at most.
const INSTRUCTIONS_PER_CYCLE: f64 = 1.0;
/// Instructions of our target for a get, without the network's. Measured: 12,333 − 10,108.
const PROTOCOL_INSTRUCTIONS: f64 = 2_225.0;
/// Instructions of our engine for a get, without the device's. Measured: 10,108 − 2,106.
const SEARCH_INSTRUCTIONS: f64 = 8_002.0;
/// Estimate: a system call, a doorbell, an interrupt and a wake-up.
const HOST_COMMAND: Nanos = Nanos(8_000);
/// Estimate: the time of a PCIe crossing is of this order.
const PCIE_CROSSING: Nanos = Nanos(500);
/// Memory for indexes and blocks of tables. Our choice: the indexes of 3 M pairs fit, 0.2 MB, and a small part of the blocks, of 60 MB. The
/// slides do not state theirs.
pub const TABLE_CACHE_BYTES: u64 = 1 << 20;
/// Puts in flight while the store is filled. Our choice: that time does not matter.
pub const WRITERS: usize = 64;
/// Bandwidth of the drive's memory. Derived: DDR3 at 1,066 MT/s over 32 bits, the Zynq-7000's (Xilinx DS190, DS191).
const MEMORY_BYTES_PER_S: u64 = 1_066_000_000 * 4;
/// Time in which the firmware starts a flash operation. Estimate.
const FLASH_SCHEDULING: Nanos = Nanos(2_000);

/// The time of a command of the host besides the engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommandCosts {
    /// Before the engine's part: the host's submission, the first crossing, protocol, search.
    pub before: Nanos,
    /// After it: the second crossing; the host's completion is in `before`.
    pub after: Nanos,
    /// Bandwidth to the host.
    pub link_bytes_per_s: u64,
}

impl CommandCosts {
    /// The paper's machine.
    pub fn of_the_paper() -> CommandCosts {
        let instructions =
            |count: f64| Nanos((count / CORE_HZ / INSTRUCTIONS_PER_CYCLE * 1e9).round() as u64);
        CommandCosts {
            before: HOST_COMMAND
                + PCIE_CROSSING
                + instructions(PROTOCOL_INSTRUCTIONS)
                + instructions(SEARCH_INSTRUCTIONS),
            after: PCIE_CROSSING,
            link_bytes_per_s: COSMOS_PLUS.link_read_bytes_per_s,
        }
    }

    /// The time of a command whose result has this length, if the engine needs no time.
    pub fn total(&self, bytes: u64) -> Nanos {
        self.before + self.after + transfer_time(bytes, self.link_bytes_per_s)
    }
}

/// The flash of the paper's drive as its engine sees it: no PCIe before it, but the drive's memory.
pub fn flash_profile() -> DriveProfile {
    DriveProfile {
        link_read_bytes_per_s: MEMORY_BYTES_PER_S,
        link_write_bytes_per_s: MEMORY_BYTES_PER_S,
        read_overhead: FLASH_SCHEDULING,
        write_overhead: FLASH_SCHEDULING,
        read_interval: FLASH_SCHEDULING,
        write_interval: FLASH_SCHEDULING,
        ..COSMOS_PLUS
    }
}

/// The time of one flash read of up to a page, without the transfer into memory, in microseconds.
pub fn flash_read_us() -> f64 {
    let profile = flash_profile();
    let channel = transfer_time(u64::from(profile.read_transfer_bytes_min), profile.channel_bytes_per_s);
    (profile.read_overhead + profile.page_read + channel).0 as f64 / 1e3
}

/// Pairs in the store for values of a length.
pub fn pairs_for(value_bytes: u32, pairs_max: u32) -> u32 {
    let fit = VALUE_BYTES_TOTAL_MAX / u64::from(value_bytes);
    pairs_max.min(u32::try_from(fit / 100_000 * 100_000).unwrap_or(u32::MAX).max(100_000))
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_base::Lba;
    use octokv_device::ssd_model::SsdModel;

    #[test]
    fn times_equal_the_arithmetic_in_the_module_documentation() {
        let costs = CommandCosts::of_the_paper();
        assert_eq!(costs.total(0), Nanos(19_227));
        let mut model = SsdModel::new(flash_profile(), 4096).prefilled();
        let read = model.read(Nanos::ZERO, Lba(0), 1).0;
        assert_eq!(read / 100, 1_412, "140.2 µs, and 4 KiB into memory in 1.0");
        let there = costs.total(4096).0 as f64;
        assert_eq!(((there + read as f64) / there * 10.0).round(), 79.0);
    }

    #[test]
    fn long_values_are_fewer() {
        let pairs = VALUE_BYTES.map(|bytes| pairs_for(bytes, PAIRS));
        assert_eq!(pairs, [3_000_000, 3_000_000, 3_000_000, 300_000]);
        assert_eq!(pairs_for(128 << 10, 50_000), 50_000);
    }
}
