//! Images of volumes that lie under right checksums: shared by the bounded test and the fuzz target.

use octokv_base::{Key, Pool, Random, crc32c};
use octokv_device::Device;
use octokv_device::power_loss::PowerDisk;
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::hash::{FormatSettings, HashEngine, OpenSettings, check, open};
use octokv_engine::{Durability, Engine, PutMode};
use octokv_runtime::block_on;
use std::rc::Rc;

/// A small volume with everything in it.
pub const IMAGE: &[u8] = include_bytes!("../fixtures/hash-v1.img");

/// Makes the checksum right again of whatever structure begins at `at`, if one does.
pub fn mend_checksum(image: &mut [u8], at: usize) {
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
    let place = if &image[at..at + 4] == b"OCTO" { at + 8 } else { at + 4 };
    image[place..place + 4].copy_from_slice(&crc);
}

/// Where structures begin.
pub fn structures() -> Vec<usize> {
    let magics = [b"OCTO", b"OKVJ", b"OKVC", b"OKVR"];
    (0..IMAGE.len() - 512).filter(|&at| magics.iter().any(|magic| IMAGE[at..at + 4] == magic[..])).collect()
}

/// Checks and opens an image and, where it opens, does everything a node does. Gives whether it opened.
pub fn survive(image: Vec<u8>, random: &mut Random) -> bool {
    let pool = Pool::new(64 << 20);
    let disk = PowerDisk::new(image, 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut settling = random.fork();
    let mut settle = || {
        disk.complete(&mut settling);
    };
    let _ = block_on(check(&*device, &pool, |_, _| ()), &mut settle);
    let settings = OpenSettings { durability: Durability::Flush, cores: 1 };
    let opened = block_on(open(&device, &pool, settings, &FormatSettings::default()), &mut settle);
    let Ok(volume) = opened else { return false };
    use_it(&HashEngine::new(volume, 0, device, pool), &disk, random);
    true
}

fn use_it(engine: &HashEngine, disk: &PowerDisk, random: &mut Random) {
    let mut settling = random.fork();
    let mut settle = || {
        disk.complete(&mut settling);
    };
    for index in 0..20 {
        let key = key_of(index);
        if let Ok(Some(value)) = block_on(engine.get(&key), &mut settle) {
            operation_of(&key, value.as_bytes());
        }
        let _ = block_on(engine.exist(&key), &mut settle);
    }
    let mut listed = 0;
    let mut sink = |_: &[u8]| {
        listed += 1;
        true
    };
    let empty = Key::new(&[]).unwrap();
    let _ = block_on(engine.list(&empty, &mut sink), &mut settle);
    for index in 0..6 {
        let key = key_of(index);
        let value = value_of(&key, 500 + index, 700);
        let _ = block_on(engine.put(&key, PutMode::Upsert, record_of(&key, &value), 700), &mut settle);
        let _ = block_on(engine.delete(&key), &mut settle);
    }
    let _ = block_on(engine.checkpoint(false), &mut settle);
}
