//! A volume with arbitrarily changed metadata under valid checksums: it opens or fails with an error, never a panic.
#![no_main]

#[path = "../../crates/engine/tests/common/corrupt_images.rs"]
mod corrupt_images;

use corrupt_images::{IMAGE, fix_checksum, structure_offsets, verify_open_and_use};
use libfuzzer_sys::fuzz_target;
use octokv_base::Prng;

fuzz_target!(|input: &[u8]| {
    let (structures, mut image) = (structure_offsets(), IMAGE.to_vec());
    for patch in input.chunks_exact(4) {
        // Structure, byte after its checksum, new value.
        let at = structures[usize::from(patch[0]) % structures.len()];
        let byte = at + 8 + usize::from(u16::from_le_bytes([patch[1], patch[2]]) % 504);
        image[byte] = patch[3];
        fix_checksum(&mut image, at);
    }
    verify_open_and_use(image, &mut Prng::new(input.len() as u64));
});
