//! Superblocks of the ordered engine with any byte changed under a valid checksum: consistent fields or an error, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::{UnixTime, Version, crc32c};
use octokv_engine::common::superblock::{SUPERBLOCK_BYTES, Superblock, UncheckedSuperblock};
use octokv_engine::common::volume_layout::{Checkpoint, VolumeLayout};
use octokv_engine::lsm::retention::ForgottenTombstones;
use octokv_engine::lsm::superblock::LsmSuperblock;

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

/// What is taken has an encoding that gives it back.
fn check(bytes: &[u8; SUPERBLOCK_BYTES]) {
    if let Ok(superblock) = UncheckedSuperblock(bytes).check::<LsmSuperblock>() {
        assert_eq!(UncheckedSuperblock(&superblock.encode()).check(), Ok(superblock));
    }
}

fn example() -> LsmSuperblock {
    LsmSuperblock {
        volume_id: 7,
        hash_seed: 9,
        layout: VolumeLayout {
            unit_bytes: 4096,
            journal_units: 256,
            area_units: 64,
            data_start_unit: 4 + 512 + 256,
            data_units: 2_048,
        },
        namespace: 2,
        value_bytes_max: 1 << 20,
        inline_bytes_max: 768,
        generation: 5,
        incarnation: 6,
        checkpoint: Checkpoint {
            area: Some(1),
            id: 11,
            bytes: 40_000,
            journal_unit: 7,
            batch: 8,
            entry: 99,
            incarnation: 4,
        },
        image_entry: 120,
        forgotten: ForgottenTombstones {
            below: Version::from_bits(3),
            sequence: 77,
            time: UnixTime(1_700_000_000_000),
        },
        has_versions: true,
        is_clean_shutdown: false,
    }
}
