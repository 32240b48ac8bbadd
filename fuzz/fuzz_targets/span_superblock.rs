//! Superblocks of volumes on several devices with any byte changed under a valid checksum: consistent fields or an error, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::crc32c;
use octokv_engine::EngineKind;
use octokv_engine::common::superblock::{DeviceOfVolume, SUPERBLOCK_BYTES, Superblock, UncheckedSuperblock};
use octokv_engine::spanned::{PartitionMap, PartitionSet, SpanSuperblock, SwapNotes};

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

/// Asserts that a superblock that passes the checks is the same after encoding and decoding.
fn check(bytes: &[u8; SUPERBLOCK_BYTES]) {
    if let Ok(superblock) = UncheckedSuperblock(bytes).check::<SpanSuperblock>() {
        assert_eq!(UncheckedSuperblock(&superblock.encode()).check(), Ok(superblock));
    }
}

fn example() -> SpanSuperblock {
    SpanSuperblock {
        volume_id: 7,
        device: DeviceOfVolume { index: 2, count: 5 },
        generation: 3,
        engine: EngineKind::Log,
        hash_seed: 9,
        map: PartitionMap::spread(&[1 << 30, 1 << 30, 2 << 30, 3 << 30, 5 << 30]),
        replacements: std::array::from_fn(|index| u8::from(index == 3)),
        swap_bytes: 20 << 20,
        swaps: SwapNotes { partitions: [0x5a; 32], guests: 0b11010 },
        map_number: 3,
        left_over: PartitionSet::from_bytes([0xa5; 32]),
    }
}
