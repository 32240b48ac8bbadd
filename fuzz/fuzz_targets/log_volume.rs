//! A volume of the log engine with arbitrarily changed structures under valid checksums, or with changed bytes: it opens or fails with an error,
//! never a panic; and with changed bytes no value is found that was not stored.
#![no_main]

#[path = "../../crates/engine/tests/common/corrupt_log_images.rs"]
mod corrupt_log_images;

use corrupt_log_images::{LogStructure, WrittenImage, structures, verify_open_and_use, written_image};
use libfuzzer_sys::fuzz_target;
use octokv_base::Prng;
use std::sync::OnceLock;

static BASES: OnceLock<Vec<(WrittenImage, Vec<LogStructure>)>> = OnceLock::new();

fn bases() -> Vec<(WrittenImage, Vec<LogStructure>)> {
    let images = (0..4).map(|seed| written_image(seed, seed < 2));
    images.map(|image| (image.clone(), structures(&image.bytes))).collect()
}

fuzz_target!(|input: &[u8]| {
    let Some((&select, patches)) = input.split_first() else { return };
    let bases = BASES.get_or_init(bases);
    let (image, structures) = &bases[usize::from(select) % bases.len()];
    let has_valid_checksums = select & 128 != 0;
    let mut bytes = image.bytes.clone();
    for patch in patches.chunks_exact(5) {
        // Structure, byte of it, new value.
        let at = usize::from(u16::from_le_bytes([patch[0], patch[1]]));
        let structure = structures[at % structures.len()];
        let offset = usize::from(u16::from_le_bytes([patch[2], patch[3]]) % 512);
        match has_valid_checksums {
            true => structure.set_byte(&mut bytes, offset, patch[4]),
            false => {
                let end = bytes.len() - 1;
                bytes[(structure.at + offset).min(end)] = patch[4];
            }
        }
    }
    let outcome = verify_open_and_use(bytes, &mut Prng::new(input.len() as u64), !has_valid_checksums);
    let Some(outcome) = outcome.filter(|_| !has_valid_checksums) else { return };
    for (found, stored) in outcome.found.iter().zip(&image.stored) {
        if let Ok(Some(operation)) = found {
            assert!(stored.contains(operation), "{operation} of {stored:?}");
        }
    }
});
