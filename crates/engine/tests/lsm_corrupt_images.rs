//! Corrupt devices of the ordered engine: metadata with valid checksums and invalid contents is refused or tolerated, without a panic, and no search of it goes on
//! for ever. Of what opens, every operation is run.

use crate::common::lsm_fixture::{LsmFixture, make_small};
use crate::common::pool;
use octokv_base::{Prng, crc32c};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{key_of, random_length, record_of, value_of};
use octokv_engine::lsm::{LsmEngine, LsmVolume, open_with};
use octokv_engine::{Engine, IteratorOptions, IteratorProgress, PairSink, PutMode, PutOutcome, Volume};
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

/// Puts, flushes, compactions and checkpoints, and then some that only the journal has.
fn image(seed: u64) -> Vec<u8> {
    let mut fixture = LsmFixture { cores: 1, ..LsmFixture::default() };
    fixture.format.value_bytes_max = 64 << 10;
    let disk = PowerLossDisk::new(vec![0; 8 << 20], 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let (mut random, mut order) = (Prng::new(seed), Prng::new(seed));
    let mut complete = || {
        disk.complete_one(&mut order);
    };
    block_on(<Arc<LsmVolume>>::format(&[Rc::clone(&device)], &fixture.format), &mut complete).unwrap();
    let volume = block_on(fixture.open_volume(&device), &mut complete).unwrap();
    let engine = LsmEngine::new(volume, 0, device, pool());
    for operation in 1..=160_u64 {
        let key = key_of(random.below(24));
        let bytes = random_length(&mut random, 3_000);
        let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
        let stored = block_on(engine.put(&key, PutMode::Upsert, record, bytes), &mut complete);
        assert_eq!(stored, Ok(PutOutcome::Stored));
        if operation % 7 == 0 {
            block_on(engine.delete(&key_of(random.below(24))), &mut complete).unwrap();
        }
        if operation % 20 == 0 {
            block_on(engine.flush_memtables(), &mut complete).unwrap();
            block_on(engine.compact_once(operation % 40 == 0), &mut complete).unwrap();
        }
        if operation == 80 || operation == 120 {
            block_on(engine.checkpoint(), &mut complete).unwrap();
        }
    }
    if seed.is_multiple_of(2) {
        block_on(engine.mark_durable(), &mut complete).unwrap();
    }
    while disk.complete_one(&mut random) {}
    disk.contents()
}

/// Recomputes the checksum of the structure that begins at `at`.
fn fix_checksum(image: &mut [u8], at: usize) {
    let u32_at = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let (checksum_at, from, end) = match &image[at..at + 4] {
        b"OCTO" => (at + 8, at + 12, at + 512),
        b"OKVJ" => (at + 4, at + 8, at + 64 + u32_at(at + 56).min(1 << 20)),
        b"OKVV" => (at + 4, at + 8, at + 64 + u32_at(at + 48).min(1 << 20)),
        _ => return,
    };
    let Some(bytes) = image.get(from..end.max(from)) else { return };
    let crc = crc32c(bytes).to_le_bytes();
    image[checksum_at..checksum_at + 4].copy_from_slice(&crc);
}

/// The offsets of all structures with a checksum of their own, and their lengths.
fn structures(image: &[u8]) -> Vec<(usize, usize)> {
    let u32_at = |at: usize| u32::from_le_bytes(image[at..at + 4].try_into().unwrap()) as usize;
    let length = |at: usize| match &image[at..at + 4] {
        b"OCTO" => Some(200),
        b"OKVJ" => Some(64 + u32_at(at + 56).min(4_000)),
        b"OKVV" => Some(64 + u32_at(at + 48).min(4_000)),
        _ => None,
    };
    (0..image.len() - 8_192).step_by(512).filter_map(|at| Some((at, length(at)?))).collect()
}

/// Takes as many pairs as there may be in one of these volumes.
struct AnyPairs(usize);

impl PairSink for AnyPairs {
    fn has_space(&mut self, _key_bytes: usize, _value_bytes: usize) -> bool {
        self.0 < 10_000
    }
    fn push(&mut self, _key: &[u8], _value: &[u8]) {
        self.0 += 1;
    }
}

/// Verifies and opens an image and, if it opens, runs every operation. Gives whether it opened.
fn open_and_use(image: Vec<u8>, random: &mut Prng) -> bool {
    let (fixture, pool) = (LsmFixture { cores: 1, ..LsmFixture::default() }, pool());
    let disk = PowerLossDisk::new(image, 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut order = random.fork();
    let mut complete = || {
        disk.complete_one(&mut order);
    };
    let _ = block_on(<Arc<LsmVolume>>::verify(&[Rc::clone(&device)], &pool, &mut |_, _| ()), &mut complete);
    let opened = open_with(&device, &pool, fixture.open_config(), &fixture.format, make_small);
    let Ok(volume) = block_on(opened, &mut complete) else { return false };
    let engine = LsmEngine::new(volume, 0, device, pool);
    for index in 0..24 {
        let _ = block_on(engine.get(&key_of(index)), &mut complete);
        let _ = block_on(engine.status(&key_of(index)), &mut complete);
    }
    for reverse in [false, true] {
        let options = IteratorOptions { reverse, ..IteratorOptions::default() };
        let Ok(Some(iterator)) = block_on(engine.create_iterator(options), &mut complete) else { continue };
        let mut sink = AnyPairs(0);
        for _ in 0..100 {
            if block_on(engine.next_pairs(&iterator, &mut sink), &mut complete) == Ok(IteratorProgress::AtEnd)
            {
                break;
            }
        }
    }
    for index in 0..6 {
        let key = key_of(index);
        let bytes = 100 + 400 * index as usize;
        let record = record_of(engine.record_layout(), &key, &value_of(&key, 500 + index, bytes));
        let _ = block_on(engine.put(&key, PutMode::Upsert, record, bytes), &mut complete);
        let _ = block_on(engine.delete(&key_of(index + 6)), &mut complete);
    }
    let _ = block_on(engine.flush_memtables(), &mut complete);
    for step in 0..20 {
        let _ = block_on(engine.compact_once(step % 2 == 0), &mut complete);
    }
    let _ = block_on(engine.checkpoint(), &mut complete);
    let _ = block_on(engine.close(), &mut complete);
    true
}

fn mutate(image: &mut [u8], (at, length): (usize, usize), random: &mut Prng) {
    for _ in 0..1 + random.below(3) {
        // Headers more often than what follows them.
        let within = if random.one_in(2) { length.min(200) } else { length };
        let byte = at + 8 + random.below(within as u64 - 8) as usize;
        match random.below(5) {
            0 => image[byte] = 0,
            1 => image[byte] = 0xff,
            2 => image[byte] = image[byte].wrapping_add(1),
            3 => image[byte] = image[byte].wrapping_sub(1),
            _ => image[byte] = random.next_u64() as u8,
        }
    }
    fix_checksum(image, at);
}

#[test]
fn inconsistent_metadata_with_a_valid_checksum_never_panics() {
    let (mut opened, mut refused) = (0, 0);
    for base in 0..6 {
        let original = image(base);
        let structures = structures(&original);
        assert!(structures.len() > 30, "{} structures", structures.len());
        for seed in 0..400 {
            let mut random = Prng::new(seed * 8 + base);
            let mut image = original.clone();
            for _ in 0..1 + random.below(3) {
                let structure = structures[random.below(structures.len() as u64) as usize];
                let before = image.clone();
                mutate(&mut image, structure, &mut random);
                // Often in the other copy, too, or the intact one is used.
                if random.one_in(2) {
                    let (at, length) = structure;
                    let is_copy = |&(other, _): &(usize, usize)| {
                        other != at && before[other..other + length] == before[at..at + length]
                    };
                    let bytes = image[at..at + length.max(512)].to_vec();
                    for (other, _) in structures.iter().copied().filter(is_copy) {
                        image[other..other + bytes.len()].copy_from_slice(&bytes);
                    }
                }
            }
            match open_and_use(image, &mut random) {
                true => opened += 1,
                false => refused += 1,
            }
        }
    }
    assert!(opened > 200 && refused > 200, "{opened} opened, {refused} refused");
}

#[test]
fn random_bytes_in_any_block_never_panic() {
    let original = image(1);
    let used: Vec<usize> = (0..original.len())
        .step_by(512)
        .filter(|&at| original[at..at + 512].iter().any(|byte| *byte != 0))
        .collect();
    for seed in 0..500 {
        let mut random = Prng::new(seed);
        let mut image = original.clone();
        for _ in 0..1 + random.below(8) {
            let at = used[random.below(used.len() as u64) as usize];
            random.fill(&mut image[at..at + 512]);
        }
        open_and_use(image, &mut random);
    }
}
