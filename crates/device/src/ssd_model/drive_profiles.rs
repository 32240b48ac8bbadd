//! The profiles of the modelled drives, and the source of each number.
//!
//! A number is *from a data sheet*, *derived* (from data sheet numbers, by the arithmetic beside it) or an *estimate*.
//! `tests/drive_profiles.rs` compares the modelled drives with their data sheets. Sources:
//! - *EVO*: Samsung, SSD 970 EVO data sheet, 2018, 500 GB unless another capacity is named. IOPS and MB/s were
//!   measured with Iometer on Windows, so its latencies include the host's part. The sheet does not state that part, so
//!   the model attributes the whole latency to the drive.
//! - *PM983*: Samsung, PM983 data sheet, rev. 1.0, January 2018, 960 GB: sold as 983 DCT.
//! - *V-NAND*: Samsung's announcement of 64-layer 256 Gb V-NAND, June 2017: 1 Gb/s a pin, tPROG 500 µs.
//! - *GreedyFTL*: the firmware of the Cosmos+ OpenSSD, GreedyFTL 3.0.0 (github.com/Cosmos-OpenSSD/Cosmos-plus-OpenSSD):
//!   `ftl_config.h` and `data_buffer.h`, and the configuration of 8 channels and 8 ways beside it.
//! - *CRZ*: its manufacturer, in github.com/CRZ-Technology/OpenSSD-OpenChannelSSD. Issue 34: a NAND bus of 8 bits at 100 MHz,
//!   both edges, 200 MT/s. Issue 2: a user measured 1.4 GB/s.
//! - *L95B*: the MLC flash of the board's Micron module, as FEMU measured it (github.com/MoatLab/FEMU, `hw/femu/nand/nand.h`):
//!   lower pages, which are those that the firmware uses: read 48 µs, program 850 µs; erase 3 ms. The module of the paper is
//!   not stated.
//!
//! ```text
//!  970-evo  500 GB = 16 dies of 256 Gb (512 GiB), two on each of 8 channels
//!   page read     random reads, deep: 200 K IOPS with 250 GB, that is with 8 dies: 25 K a die    →  40 µs
//!                 with 16 dies at most 400 K; random choice leaves dies idle at depth 128               →  370 K on the sheet
//!   read latency  15 K IOPS at depth 1 = 66.7 µs; less 40 page, 4.1 channel, 1.2 link            →  21.4 µs command
//!   write         50 K IOPS at depth 1 = 20 µs; less 1.8 link                                    →  18.2 µs command
//!   commands      500 K reads (1 TB and more), 450 K writes, however fast the dies are          →  2.0, 2.22 µs each
//!   SLC page      1,500 MB/s with 8 dies (250 GB): 8 × 32 KiB / 1.5 GB/s                         →  175 µs
//!   page          600 MB/s beyond the buffer: 16 × 32 KiB / 0.6 GB/s                             →  874 µs
//!                 (V-NAND: 500; the rest is other work of the drive, which is not modelled separately)
//!   link          3,400 MB/s to the host, 2,300 MB/s from the host: from the sheet
//!
//!  leed  960 GB = 16 dies of 512 Gb (1,024 GiB), two on each of 8 channels
//!   page read     400 K IOPS at depth = 25 K a die, as above                                     →  40 µs
//!   read latency  85 µs typical; less 40 page, 4.1 channel, 1.4 link                             →  39.5 µs command
//!   write         50 µs typical; less 1.4 link                                                   →  48.6 µs command
//!   page          1,050 MB/s: 16 × 32 KiB / 1.05 GB/s = 499 µs, which is V-NAND's tPROG      →  499 µs
//!   flush         power loss protection: completes at once
//!
//!  cosmos-plus  8 channels × 8 ways × 8,192 blocks × 128 pages × 16 KiB = 1 TiB, of which 10 % are over-provisioned (GreedyFTL)
//!   channel       200 MB/s; a page of 16,384 B has 18,048 B with its check bytes (GreedyFTL)       →  181.6 MB/s
//!                 the controller corrects pages as a whole: each read transfers 16 KiB, 90 µs
//!   sequential    8 channels                                                                       →  1,452 MB/s; CRZ: 1,400
//!   link          PCIe 2.0 ×8: 4 GB/s after 8b/10b; 128 B of each 152 B are payload                  →  3,370 MB/s
//! ```

use octokv_base::Nanos;

/// The work of a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushModel {
    /// None: the write buffer survives a power loss.
    Immediate,
    /// Programs the whole write buffer, then writes the mapping.
    DrainBuffer {
        /// The time to write the mapping.
        mapping_write: Nanos,
    },
}

/// An SLC write cache: flash that is written with one bit per cell and drained when the drive is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlcCache {
    /// Its capacity.
    pub bytes: u64,
    /// The program time of an SLC page.
    pub page_program: Nanos,
    /// The time without commands after which draining begins.
    pub idle_delay: Nanos,
}

/// The geometry, times and limits of a modelled drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveProfile {
    /// The name in configurations and on the command line.
    pub name: &'static str,
    /// The manufacturer's product name.
    pub product: &'static str,
    /// The capacity for hosts.
    pub capacity_bytes: u64,
    /// Flash channels: buses to the dies.
    pub channels: u32,
    /// Dies per channel.
    pub dies_per_channel: u32,
    /// Planes per die, which read, program and erase together.
    pub planes: u32,
    /// Bytes per page of one plane.
    pub page_bytes: u32,
    /// Pages per block of one plane.
    pub pages_per_block: u32,
    /// Blocks per plane.
    pub blocks_per_plane: u32,
    /// The read time of a page, tR, without the transfer.
    pub page_read: Nanos,
    /// The program time of a page, tPROG, without the transfer.
    pub page_program: Nanos,
    /// The erase time of a block, tBERS.
    pub block_erase: Nanos,
    /// Bits per cell outside the SLC cache.
    pub bits_per_cell: u32,
    /// The SLC write cache, if the drive has one.
    pub slc_cache: Option<SlcCache>,
    /// The bandwidth of a flash channel.
    pub channel_bytes_per_s: u64,
    /// The fewest bytes that a read transfers on the channel: a whole page if the controller corrects errors of whole pages.
    pub read_transfer_bytes_min: u32,
    /// The bandwidth of the link from the drive to the host.
    pub link_read_bytes_per_s: u64,
    /// The bandwidth of the link from the host to the drive.
    pub link_write_bytes_per_s: u64,
    /// The controller's latency of a read, besides flash, channel and link.
    pub read_overhead: Nanos,
    /// The controller's latency of a write, flush or trim, besides the link.
    pub write_overhead: Nanos,
    /// The shortest time between the start of a read and of the next command: the controller's IOPS limit for reads.
    pub read_interval: Nanos,
    /// The same for writes, flushes and trims.
    pub write_interval: Nanos,
    /// The capacity of the write buffer in bytes.
    pub buffer_bytes: u64,
    /// The work of a flush.
    pub flush: FlushModel,
    /// Garbage collection on a die runs while it has at most this many free blocks per plane.
    pub gc_threshold_blocks: u32,
}

const GIB: u64 = 1 << 30;

/// Samsung 970 EVO 500 GB, the drive of the OctoKV, OctoFAS and NetKVS papers.
pub const EVO_970: DriveProfile = DriveProfile {
    name: "970-evo",
    product: "Samsung 970 EVO 500 GB",
    capacity_bytes: 500_107_862_016, // EVO; the usual number of sectors of "500 GB".
    channels: 8,                     // Estimate: from reviews of its controller.
    dies_per_channel: 2,             // Derived: 512 GiB of dies of 256 Gb.
    planes: 2,                       // Estimate: usual for the generation.
    page_bytes: 16 << 10,            // Estimate: the same.
    pages_per_block: 768,            // Estimate: 64 layers × 4 strings × 3 bits.
    blocks_per_plane: blocks_per_plane(512 * GIB, 16, 768),
    page_read: Nanos::from_micros(40),     // Derived.
    page_program: Nanos(874_000),          // Derived.
    block_erase: Nanos::from_micros(5000), // Estimate: 3 to 10 ms are usual.
    bits_per_cell: 3,                      // EVO.
    slc_cache: Some(SlcCache {
        bytes: 22_000_000_000,           // EVO: 4 GB always and 18 GB while there is space.
        page_program: Nanos(175_000),    // Derived.
        idle_delay: Nanos::from_secs(1), // Estimate.
    }),
    channel_bytes_per_s: 1_000_000_000,    // V-NAND: eight pins of 1 Gb/s.
    read_transfer_bytes_min: 4096,         // Estimate: usual for its controllers.
    link_read_bytes_per_s: 3_400_000_000,  // EVO.
    link_write_bytes_per_s: 2_300_000_000, // EVO, while the SLC cache has space.
    read_overhead: Nanos(21_400),          // Derived.
    write_overhead: Nanos(18_200),         // Derived.
    read_interval: Nanos(2_000),           // Derived.
    write_interval: Nanos(2_220),          // Derived.
    buffer_bytes: 4 << 20,                 // Estimate: its 512 MB of DRAM hold the mapping.
    // Estimate: fsync on drives without capacitors is reported to take about a millisecond, of which the programs
    // take 0.2 to 0.9.
    flush: FlushModel::DrainBuffer { mapping_write: Nanos(500_000) },
    gc_threshold_blocks: 4, // Estimate.
};

/// Samsung 983 DCT 960 GB, the drive of the LEED paper ("up to 400 K 4 KB IOPS", its §5).
pub const DCT_983: DriveProfile = DriveProfile {
    name: "leed",
    product: "Samsung 983 DCT 960 GB",
    capacity_bytes: 960_197_124_096, // PM983; the usual number of sectors of "960 GB".
    channels: 8,                     // Estimate, as above.
    dies_per_channel: 2,             // Derived: 400 K reads of 40 µs, and 1,024 GiB of dies of 512 Gb.
    planes: 2,                       // Estimate, as above.
    page_bytes: 16 << 10,            // Estimate, as above.
    pages_per_block: 768,            // Estimate, as above.
    blocks_per_plane: blocks_per_plane(1024 * GIB, 16, 768),
    page_read: Nanos::from_micros(40),     // Derived.
    page_program: Nanos(499_000),          // Derived, and V-NAND.
    block_erase: Nanos::from_micros(5000), // Estimate, as above.
    bits_per_cell: 3,                      // PM983.
    slc_cache: None,
    channel_bytes_per_s: 1_000_000_000,    // V-NAND.
    read_transfer_bytes_min: 4096,         // Estimate, as above.
    link_read_bytes_per_s: 3_000_000_000,  // The 983 DCT's product page.
    link_write_bytes_per_s: 3_000_000_000, // Estimate: the dies are slower.
    read_overhead: Nanos(39_500),          // Derived.
    write_overhead: Nanos(48_600),         // Derived.
    read_interval: Nanos(1_850),           // Derived: 540 K reads of the larger drives of the sheet.
    write_interval: Nanos(1_850),          // Estimate: the same.
    buffer_bytes: 4 << 20,                 // Estimate.
    flush: FlushModel::Immediate,          // PM983: power loss protection.
    gc_threshold_blocks: 4,                // Estimate.
};

/// Cosmos+ OpenSSD, the drive of the IterKVSSD paper, with its own firmware.
pub const COSMOS_PLUS: DriveProfile = DriveProfile {
    name: "cosmos-plus",
    product: "Cosmos+ OpenSSD, 8 channels and 8 ways",
    capacity_bytes: (1 << 40) / 10 * 9 / 4096 * 4096, // GreedyFTL.
    channels: 8,                                      // GreedyFTL.
    dies_per_channel: 8,                              // GreedyFTL: ways.
    planes: 1,                             // GreedyFTL: it programs the planes of a die one by one.
    page_bytes: 16 << 10,                  // GreedyFTL.
    pages_per_block: 128,                  // GreedyFTL: of 256, the lower ones.
    blocks_per_plane: 2 * 4096,            // GreedyFTL: two planes.
    page_read: Nanos::from_micros(48),     // L95B.
    page_program: Nanos::from_micros(850), // L95B.
    block_erase: Nanos::from_micros(3000), // L95B.
    bits_per_cell: 1,                      // GreedyFTL.
    slc_cache: None,
    channel_bytes_per_s: 200_000_000 * 16_384 / 18_048, // CRZ and GreedyFTL.
    read_transfer_bytes_min: 16 << 10,                  // GreedyFTL.
    link_read_bytes_per_s: 4_000_000_000 * 128 / 152,   // Derived: PCIe 2.0 ×8, as its manufacturer states.
    link_write_bytes_per_s: 4_000_000_000 * 128 / 152,  // Derived, as above.
    read_overhead: Nanos::from_micros(10),              // Estimate: its firmware on a core of 1 GHz.
    write_overhead: Nanos::from_micros(10),             // Estimate, as above.
    read_interval: Nanos::from_micros(5),               // Estimate: the same core.
    write_interval: Nanos::from_micros(5),              // Estimate, as above.
    buffer_bytes: 16 * 64 * (16 << 10),                 // GreedyFTL.
    flush: FlushModel::Immediate,                       // GreedyFTL: a flush command writes nothing.
    gc_threshold_blocks: 4,                             // Estimate.
};

/// All drives, for selection by name.
pub const DRIVE_PROFILES: [&DriveProfile; 3] = [&EVO_970, &DCT_983, &COSMOS_PLUS];

/// Blocks per plane of `dies` dies with two planes and pages of 16 KiB, which hold `bytes` in all.
const fn blocks_per_plane(bytes: u64, dies: u64, pages_per_block: u64) -> u32 {
    (bytes / dies / 2 / (16 << 10) / pages_per_block) as u32
}

impl DriveProfile {
    /// The drive with this name.
    pub fn by_name(name: &str) -> Option<&'static DriveProfile> {
        DRIVE_PROFILES.into_iter().find(|drive| drive.name == name)
    }

    /// A smaller drive of the same kind, for experiments that fill it: this many pages per block and blocks per plane, the
    /// same share of over-provisioning, and the same erase time per page. SLC cache and write buffer keep their size.
    pub fn scaled_down(&self, pages_per_block: u32, blocks_per_plane: u32) -> DriveProfile {
        let pages = |per_block: u32, blocks: u32| u128::from(per_block) * u128::from(blocks);
        let (now, before) =
            (pages(pages_per_block, blocks_per_plane), pages(self.pages_per_block, self.blocks_per_plane));
        let capacity_bytes = (u128::from(self.capacity_bytes) * now / before) as u64 / 4096 * 4096;
        let erase = self.block_erase.0 * u64::from(pages_per_block) / u64::from(self.pages_per_block);
        DriveProfile { capacity_bytes, pages_per_block, blocks_per_plane, block_erase: Nanos(erase), ..*self }
    }

    /// The number of dies.
    pub fn dies(&self) -> u32 {
        self.channels * self.dies_per_channel
    }

    /// Bytes of a stripe, the unit of a program: one page of each plane.
    pub fn stripe_bytes(&self) -> u64 {
        u64::from(self.planes) * u64::from(self.page_bytes)
    }
}

/// The time to transfer `bytes` at a bandwidth.
pub fn transfer_time(bytes: u64, bytes_per_s: u64) -> Nanos {
    Nanos(bytes * 1_000_000_000 / bytes_per_s)
}
