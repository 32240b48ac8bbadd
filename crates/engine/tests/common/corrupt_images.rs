//! Corrupt volume images with valid checksums: shared by the bounded test and the fuzz target.

use octokv_base::{BufferPool, Key, Prng, crc32c};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, open, verify};
use octokv_engine::{Durability, Engine, PutMode};
use octokv_engine::{FormatConfig, OpenConfig, WallClock};
use octokv_runtime::block_on;
use std::rc::Rc;

/// A small volume with every structure.
pub const IMAGE: &[u8] = include_bytes!("../fixtures/hash-v1.img");

/// Recomputes the checksum of the structure that begins at `at`, if there is one.
pub fn fix_checksum(image: &mut [u8], at: usize) {
    let u32_at = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let (from, end) = match &image[at..at + 4] {
        b"OCTO" => (at + 12, at + 512),
        b"OKVJ" => (at + 8, at + 64 + u32_at(at + 48).min(660) * 48),
        b"OKVC" => (at + 8, at + 48 + u32_at(at + 28).min(4096) * 16),
        b"OKVR" => (at + 8, at + 48 + (u32_at(at + 40) & 0xffff).min(1024)),
        _ => return,
    };
    let Some(bytes) = image.get(from..end.max(from)) else { return };
    let crc = crc32c(bytes).to_le_bytes();
    let checksum_at = if &image[at..at + 4] == b"OCTO" { at + 8 } else { at + 4 };
    image[checksum_at..checksum_at + 4].copy_from_slice(&crc);
}

/// The offsets of all structures.
pub fn structure_offsets() -> Vec<usize> {
    let magics = [b"OCTO", b"OKVJ", b"OKVC", b"OKVR"];
    (0..IMAGE.len() - 512).filter(|&at| magics.iter().any(|magic| IMAGE[at..at + 4] == magic[..])).collect()
}

/// Verifies and opens an image and, if it opens, runs every operation. Gives whether it opened.
pub fn verify_open_and_use(image: Vec<u8>, random: &mut Prng) -> bool {
    let pool = BufferPool::new(64 << 20);
    let disk = PowerLossDisk::new(image, 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut disk_random = random.fork();
    let mut complete_io = || {
        disk.complete_one(&mut disk_random);
    };
    let _ = block_on(verify(&*device, &pool, &mut |_, _| ()), &mut complete_io);
    let config = OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    let opened = block_on(open(&device, &pool, config, &FormatConfig::default()), &mut complete_io);
    let Ok(volume) = opened else { return false };
    exercise_engine(&HashEngine::new(volume, 0, device, pool), &disk, random);
    true
}

fn exercise_engine(engine: &HashEngine, disk: &PowerLossDisk, random: &mut Prng) {
    let mut disk_random = random.fork();
    let mut complete_io = || {
        disk.complete_one(&mut disk_random);
    };
    for index in 0..20 {
        let key = key_of(index);
        if let Ok(Some(value)) = block_on(engine.get(&key), &mut complete_io) {
            operation_of(&key, value.as_bytes());
        }
        let _ = block_on(engine.exist(&key), &mut complete_io);
    }
    let mut listed = 0;
    let mut sink = |_: &[u8]| {
        listed += 1;
        true
    };
    let empty = Key::new(&[]).unwrap();
    let _ = block_on(engine.list(&empty, &mut sink), &mut complete_io);
    for index in 0..6 {
        let key = key_of(index);
        let value = value_of(&key, 500 + index, 700);
        let _ = block_on(
            engine.put(&key, PutMode::Upsert, record_of(engine.record_layout(), &key, &value), 700),
            &mut complete_io,
        );
        let _ = block_on(engine.delete(&key), &mut complete_io);
    }
    let _ = block_on(engine.checkpoint(false), &mut complete_io);
}
