//! Superblocks of the log engine with any byte changed under a valid checksum: consistent fields or an error, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::{Version, crc32c};
use octokv_engine::common::superblock::{SUPERBLOCK_BYTES, Superblock, UncheckedSuperblock};
use octokv_engine::log::log_layout::LogLayout;
use octokv_engine::log::space_limits::SpaceLimits;
use octokv_engine::log::superblock::{LogCheckpoint, LogSuperblock};

fuzz_target!(|input: &[u8]| {
    let mut bytes = [0; SUPERBLOCK_BYTES];
    let front = input.len().min(SUPERBLOCK_BYTES);
    bytes[..front].copy_from_slice(&input[..front]);
    check(&bytes);
    // The same bytes as differences from a superblock with every field, from its version on.
    let mut changed = example().encode();
    changed[12..].iter_mut().zip(input).for_each(|(byte, change)| *byte ^= change);
    let crc = crc32c(&changed[12..]);
    changed[8..12].copy_from_slice(&crc.to_le_bytes());
    check(&changed);
});

/// What is taken has an encoding that gives it back, and a layout that has limits of space.
fn check(bytes: &[u8; SUPERBLOCK_BYTES]) {
    if let Ok(superblock) = UncheckedSuperblock(bytes).check::<LogSuperblock>() {
        assert_eq!(UncheckedSuperblock(&superblock.encode()).check(), Ok(superblock));
        let layout = &superblock.layout;
        let record_chunks = layout.record_chunks_max(superblock.value_bytes_max);
        let limits = SpaceLimits::new(layout.chunks, layout.stores.into(), record_chunks);
        assert!(limits.capacity_chunks() < layout.chunks);
    }
}

fn example() -> LogSuperblock {
    LogSuperblock {
        volume_id: 7,
        hash_seed: 9,
        layout: LogLayout {
            unit_bytes: 512,
            chunk_units: 128,
            area_units: 160,
            chunks_start_unit: 32 + 640,
            chunks: 300,
            stores: 4,
            granule_log2: 3,
        },
        namespace: 2,
        value_bytes_max: 1 << 20,
        generation: 5,
        incarnation: 6,
        checkpoint: LogCheckpoint { area: Some(1), id: 11, incarnation: 3, bytes: 40_000, stores: 4 },
        next_partition: 8,
        forgotten_below: Version::from_bits(3),
        is_clean_shutdown: false,
    }
}
