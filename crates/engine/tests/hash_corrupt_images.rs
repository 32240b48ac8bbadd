//! Corrupt devices: metadata with valid checksums and invalid contents is refused or tolerated, without a panic and
//! without a value that was not stored. `fuzz/fuzz_targets/volume.rs` continues from here.

use crate::corrupt_images::{IMAGE, fix_checksum, structure_offsets, verify_open_and_use};
use octokv_base::Prng;

#[test]
fn inconsistent_metadata_with_a_valid_checksum_never_panics() {
    let structures = structure_offsets();
    assert!(structures.len() > 30, "{} structures", structures.len());
    let (mut opened, mut refused) = (0, 0);
    for seed in 0..3_000 {
        let mut random = Prng::new(seed);
        let mut image = IMAGE.to_vec();
        for _ in 0..1 + random.below(4) {
            let at = structures[random.below(structures.len() as u64) as usize];
            for _ in 0..1 + random.below(3) {
                let byte = at + 8 + random.below(130) as usize;
                image[byte] = match random.below(3) {
                    0 => 0,
                    1 => 0xff,
                    _ => random.next_u64() as u8,
                };
            }
            fix_checksum(&mut image, at);
        }
        match verify_open_and_use(image, &mut random) {
            true => opened += 1,
            false => refused += 1,
        }
    }
    assert!(opened > 100 && refused > 100, "{opened} opened, {refused} refused");
}
