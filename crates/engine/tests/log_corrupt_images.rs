//! Corrupt devices of the log engine. Damage of any blocks: no value that was not stored is found, verification names the damage, and writes go on. Structures
//! with valid checksums and invalid contents are refused or tolerated, without a panic.

use crate::corrupt_log_images::{
    BLOCK, KEYS, StructureKind, WrittenImage, layout_of, structures, verify_open_and_use, written_image,
};
use octokv_base::Prng;
use octokv_engine::EngineError;

/// Damages a block in one of the ways of media: flipped bits, zeros, noise, another block of the device, a part of it.
fn damage_block(bytes: &mut [u8], block: usize, used: &[usize], random: &mut Prng) {
    let other = used[random.below(used.len() as u64) as usize] * BLOCK;
    let other = bytes[other..other + BLOCK].to_vec();
    let block = &mut bytes[block * BLOCK..(block + 1) * BLOCK];
    match random.below(5) {
        0 => block[random.below(BLOCK as u64) as usize] ^= 1 << random.below(8),
        1 => block.fill(0),
        2 => random.fill(block),
        3 => block.copy_from_slice(&other),
        _ => block[random.below(BLOCK as u64) as usize..].fill(0),
    }
}

/// The blocks with something in them.
fn used_blocks(image: &WrittenImage) -> Vec<usize> {
    let blocks = image.bytes.chunks(BLOCK).enumerate();
    blocks.filter(|(_, block)| block.iter().any(|&byte| byte != 0)).map(|(block, _)| block).collect()
}

#[test]
fn damage_of_the_logs_costs_keys_that_fail_and_verification_reports_it() {
    let (mut damaged_keys, mut intact) = (0, 0);
    for base in 0..4 {
        let image = written_image(base, true);
        let first = layout_of(&image.bytes).records.start as usize / BLOCK;
        let used: Vec<usize> = used_blocks(&image).into_iter().filter(|&block| block >= first).collect();
        for seed in 0..60 {
            let mut random = Prng::new(base * 1_000 + seed);
            let mut bytes = image.bytes.clone();
            for _ in 0..1 + random.below(12) {
                damage_block(&mut bytes, used[random.below(used.len() as u64) as usize], &used, &mut random);
            }
            let context = format!("image {base}, seed {seed}");
            let outcome =
                verify_open_and_use(bytes, &mut random, true).expect("the logs are not read by an opening");
            let report = outcome.report.expect("the same");
            let mut damaged = 0;
            for (key, (found, &last)) in outcome.found.iter().zip(&image.last).enumerate() {
                match found {
                    Ok(found) => assert_eq!(found.unwrap_or(0), last, "{context}: key {key}"),
                    Err(EngineError::Corrupt { .. }) => damaged += 1,
                    Err(error) => panic!("{context}: key {key}: {error}"),
                }
            }
            assert!(damaged == 0 || !report.problems.is_empty(), "{context}: {damaged} keys");
            damaged_keys += damaged;
            intact += u64::from(report.problems.is_empty());
        }
    }
    assert!(damaged_keys > 150 && intact > 50, "{damaged_keys} keys, {intact} images");
}

#[test]
fn damage_anywhere_after_a_crash_shows_no_value_that_was_not_stored() {
    let (mut opened, mut refused, mut damaged_keys) = (0, 0, 0);
    for base in 10..14 {
        let image = written_image(base, false);
        let used = used_blocks(&image);
        for seed in 0..60 {
            let mut random = Prng::new(base * 1_000 + seed);
            let mut bytes = image.bytes.clone();
            for _ in 0..1 + random.below(24) {
                // Half of them in front of the logs, where there are few blocks.
                let block = match random.one_in(2) {
                    true => used[random.below(used.len().min(80) as u64) as usize],
                    false => used[random.below(used.len() as u64) as usize],
                };
                damage_block(&mut bytes, block, &used, &mut random);
            }
            let Some(outcome) = verify_open_and_use(bytes, &mut random, true) else {
                refused += 1;
                continue;
            };
            opened += 1;
            for (key, (found, stored)) in outcome.found.iter().zip(&image.stored).enumerate() {
                match found {
                    Ok(Some(operation)) => {
                        assert!(
                            stored.contains(operation),
                            "image {base}, seed {seed}: key {key} has {operation}"
                        );
                    }
                    Ok(None) => {}
                    Err(_) => damaged_keys += 1,
                }
            }
        }
    }
    assert!(opened > 50 && damaged_keys > 100, "{opened} opened, {refused} refused, {damaged_keys} keys");
}

#[test]
fn inconsistent_structures_with_valid_checksums_never_panic() {
    use StructureKind::{Bucket, Directory, RecordHead, StoreImage, Superblock};
    let (mut opened, mut refused) = (0, 0);
    for base in 20..24_u64 {
        let image = written_image(base, base.is_multiple_of(2));
        let structures = structures(&image.bytes);
        for kind in [Superblock, StoreImage, Bucket, RecordHead, Directory] {
            let of_kind: Vec<_> = structures.iter().filter(|structure| structure.kind == kind).collect();
            assert!(of_kind.len() >= 2, "{} of {kind:?}", of_kind.len());
            for seed in 0..120 {
                let mut random = Prng::new(seed * 64 + base);
                let mut bytes = image.bytes.clone();
                for _ in 0..1 + random.below(4) {
                    let structure = of_kind[random.below(of_kind.len() as u64) as usize];
                    let offset = random.below(structure.bytes(&bytes) as u64) as usize;
                    let before = bytes[(structure.at + offset).min(bytes.len() - 1)];
                    let byte = match random.below(5) {
                        0 => 0,
                        1 => 0xff,
                        2 => before.wrapping_add(1),
                        3 => before ^ 1 << random.below(8),
                        _ => random.next_u64() as u8,
                    };
                    // In each copy of it, or the intact one is used.
                    let front = |at: usize| &image.bytes[at..image.bytes.len().min(at + 64)];
                    let copies = of_kind.iter().filter(|copy| front(copy.at) == front(structure.at));
                    copies.for_each(|copy| copy.set_byte(&mut bytes, offset, byte));
                }
                match verify_open_and_use(bytes, &mut random, false) {
                    Some(outcome) => {
                        assert_eq!(outcome.found.len(), KEYS as usize);
                        opened += 1;
                    }
                    None => refused += 1,
                }
            }
        }
    }
    assert!(opened > 300 && refused > 30, "{opened} opened, {refused} refused");
}
