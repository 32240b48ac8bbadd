//! What drives are modelled, and where each number comes from.
//!
//! A number is *from a sheet*, *derived* (from figures of a sheet, by the arithmetic beside it) or an *estimate*.
//! `tests/nand_drives.rs` runs the modelled drives and compares them with their sheets. Sources:
//! - *EVO*: Samsung, SSD 970 EVO data sheet, 2018, 500 GB unless another capacity is named. IOPS and MB/s were
//!   measured with Iometer on Windows, so its latencies have the host's part in them. The model gives all of it to
//!   the drive, for nothing says how much it is.
//! - *PM983*: Samsung, PM983 data sheet, rev. 1.0, January 2018, 960 GB: the drive that is sold as 983 DCT.
//! - *V-NAND*: Samsung's announcement of 64-layer 256 Gb V-NAND, June 2017: 1 Gb/s a pin, tPROG 500 µs.
//!
//! ```text
//!  970-evo  500 GB = 16 dies of 256 Gb (512 GiB), two on each of 8 channels
//!   page read     random reads, deep: 200 K IOPS with 250 GB, that is with 8 dies: 25 K a die    →  40 µs
//!                 with 16 dies at most 400 K; chance leaves dies idle at depth 128               →  370 K on the sheet
//!   read latency  15 K IOPS at depth 1 = 66.7 µs; less 40 page, 4.1 channel, 1.2 link            →  21.4 µs command
//!   write         50 K IOPS at depth 1 = 20 µs; less 1.8 link                                    →  18.2 µs command
//!   commands      500 K reads (1 TB and more), 450 K writes: whatever the dies could do          →  2.0, 2.22 µs each
//!   turbo page    1,500 MB/s with 8 dies (250 GB): 8 × 32 KiB / 1.5 GB/s                         →  175 µs
//!   page          600 MB/s beyond the buffer: 16 × 32 KiB / 0.6 GB/s                             →  874 µs
//!                 (V-NAND says 500: the rest is what the drive does besides, not modelled apart)
//!   link          3,400 MB/s in, 2,300 MB/s out of the host: the sheet's own, one figure each
//!
//!  leed  960 GB = 16 dies of 512 Gb (1,024 GiB), two on each of 8 channels
//!   page read     400 K IOPS at depth = 25 K a die, as above                                     →  40 µs
//!   read latency  85 µs typical; less 40 page, 4.1 channel, 1.4 link                             →  39.5 µs command
//!   write         50 µs typical; less 1.4 link                                                   →  48.6 µs command
//!   page          1,050 MB/s: 16 × 32 KiB / 1.05 GB/s = 499 µs, which is V-NAND's own tPROG      →  499 µs
//!   flush         there are capacitors: answered at once
//! ```

use octokv_base::Nanos;

/// What a flush waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlushModel {
    /// Nothing: the buffer survives a power cut.
    Immediate,
    /// Every write that is in the buffer is on flash, and so much longer.
    DrainBuffer {
        /// For what the drive keeps besides the data: its mapping.
        mapping_write: Nanos,
    },
}

/// A part of the flash that is written one bit to a cell and emptied when the drive has nothing else to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlcCache {
    /// How much it takes.
    pub bytes: u64,
    /// How long the program of a page takes there.
    pub page_program: Nanos,
    /// Without commands for so long, the drive begins to empty it.
    pub idle_delay: Nanos,
}

/// A drive, as the model knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriveProfile {
    /// What it is asked for by.
    pub name: &'static str,
    /// What it is.
    pub product: &'static str,
    /// What hosts may store.
    pub capacity_bytes: u64,
    /// Buses to the dies.
    pub channels: u32,
    /// Dies on each of them.
    pub dies_per_channel: u32,
    /// Planes of a die: they read, program and erase together.
    pub planes: u32,
    /// Bytes of a page of one plane.
    pub page_bytes: u32,
    /// Pages of a block of one plane.
    pub pages_per_block: u32,
    /// Blocks of a plane.
    pub blocks_per_plane: u32,
    /// How long the cells of a page take to be read.
    pub page_read: Nanos,
    /// How long a page takes to be programmed.
    pub page_program: Nanos,
    /// How long a block takes to be erased.
    pub block_erase: Nanos,
    /// Bits in a cell where it is not written with one.
    pub bits_per_cell: u32,
    /// The part that is written with one.
    pub slc_cache: Option<SlcCache>,
    /// What a channel carries in a second.
    pub channel_bytes_per_s: u64,
    /// What the drive sends to its host in a second.
    pub link_read_bytes_per_s: u64,
    /// What the drive takes from its host in a second.
    pub link_write_bytes_per_s: u64,
    /// What a read takes besides flash, channel and link.
    pub read_overhead: Nanos,
    /// What a write, a flush or a trim takes besides the link.
    pub write_overhead: Nanos,
    /// The controller begins a read so long after the command before.
    pub read_interval: Nanos,
    /// The controller begins another command so long after the command before.
    pub write_interval: Nanos,
    /// What is written and not yet on flash, at most.
    pub buffer_bytes: u64,
    /// What a flush waits for.
    pub flush: FlushModel,
    /// With so few free blocks on a die, what is stale is collected there.
    pub gc_threshold_blocks: u32,
}

const GIB: u64 = 1 << 30;

/// Samsung 970 EVO 500 GB, the drive of the OctoKV, OctoFAS and NetKVS papers.
pub const EVO_970: DriveProfile = DriveProfile {
    name: "970-evo",
    product: "Samsung 970 EVO 500 GB",
    capacity_bytes: 500_107_862_016, // EVO; the usual number of sectors of "500 GB".
    channels: 8,                     // Estimate: what reviews say of its controller.
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
        bytes: 22_000_000_000, // EVO: 4 GB that are always there and 18 GB while there is space.
        page_program: Nanos(175_000), // Derived.
        idle_delay: Nanos::from_secs(1), // Estimate.
    }),
    channel_bytes_per_s: 1_000_000_000,    // V-NAND: eight pins of 1 Gb/s.
    link_read_bytes_per_s: 3_400_000_000,  // EVO.
    link_write_bytes_per_s: 2_300_000_000, // EVO, while the turbo part has room.
    read_overhead: Nanos(21_400),          // Derived.
    write_overhead: Nanos(18_200),         // Derived.
    read_interval: Nanos(2_000),           // Derived.
    write_interval: Nanos(2_220),          // Derived.
    buffer_bytes: 4 << 20,                 // Estimate: its memory (512 MB) is for the mapping.
    // Estimate: what is told of fsync on drives without capacitors is about a millisecond, and the programs alone
    // take 0.2 to 0.9 of it.
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

/// Every drive that can be asked for by name.
pub const DRIVE_PROFILES: [&DriveProfile; 2] = [&EVO_970, &DCT_983];

/// How many blocks a plane has where `dies` dies of two planes and pages of 16 KiB hold `bytes`.
const fn blocks_per_plane(bytes: u64, dies: u64, pages_per_block: u64) -> u32 {
    (bytes / dies / 2 / (16 << 10) / pages_per_block) as u32
}

impl DriveProfile {
    /// The drive of this name.
    pub fn by_name(name: &str) -> Option<&'static DriveProfile> {
        DRIVE_PROFILES.into_iter().find(|drive| drive.name == name)
    }

    /// The same drive in small, for experiments that fill it: with so many blocks of so many pages on a plane, the same
    /// share of them beyond what hosts may store, and the same time for the erasing of as many pages. Turbo and buffer
    /// stay as they are.
    pub fn scaled_down(&self, pages_per_block: u32, blocks_per_plane: u32) -> DriveProfile {
        let pages = |per_block: u32, blocks: u32| u128::from(per_block) * u128::from(blocks);
        let (now, before) =
            (pages(pages_per_block, blocks_per_plane), pages(self.pages_per_block, self.blocks_per_plane));
        let capacity_bytes = (u128::from(self.capacity_bytes) * now / before) as u64 / 4096 * 4096;
        let erase = self.block_erase.0 * u64::from(pages_per_block) / u64::from(self.pages_per_block);
        DriveProfile { capacity_bytes, pages_per_block, blocks_per_plane, block_erase: Nanos(erase), ..*self }
    }

    /// How many dies there are.
    pub fn dies(&self) -> u32 {
        self.channels * self.dies_per_channel
    }

    /// What one program writes: a page of every plane.
    pub fn stripe_bytes(&self) -> u64 {
        u64::from(self.planes) * u64::from(self.page_bytes)
    }
}

/// How long `bytes` take at so many a second.
pub fn transfer_time(bytes: u64, bytes_per_s: u64) -> Nanos {
    Nanos(bytes * 1_000_000_000 / bytes_per_s)
}
