//! Images of the ordered tree with any headers and records under valid checksums: a consistent version or a problem, never a panic. What
//! is taken is written and loaded again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::crc32c;
use octokv_engine::lsm::reclaim::ReclaimQueue;
use octokv_engine::lsm::tree_version::TreeVersion;
use octokv_engine::lsm::version_image::{
    VERSION_IMAGE_HEADER_BYTES, VersionImageLoader, VersionImageProblem, VersionImageWriter,
};
use std::sync::Arc;

fuzz_target!(|input: &[u8]| {
    _ = load(std::iter::once([b"OKVV", input].concat()));
    let Some((&numbers, mut rest)) = input.split_first_chunk::<20>() else { return };
    // Images of one version: each takes its length, and bytes 48 to 64 of its header, as differences from what they should be.
    let mut images = Vec::new();
    while let Some((&[low, high, is_last, change], behind)) = rest.split_first_chunk::<4>() {
        let (records, behind) =
            behind.split_at(behind.len().min(usize::from(u16::from_le_bytes([low, high]))));
        let mut image = vec![0; VERSION_IMAGE_HEADER_BYTES];
        image[..4].copy_from_slice(b"OKVV");
        image[24..44].copy_from_slice(&numbers);
        image[44..48].copy_from_slice(&(images.len() as u32).to_le_bytes());
        image[48..52].copy_from_slice(&(records.len() as u32).to_le_bytes());
        image[52..56].copy_from_slice(&u32::from(is_last).to_le_bytes());
        image[56] = change;
        image.extend_from_slice(records);
        images.push(image);
        rest = behind;
    }
    let Ok(version) = load(images.into_iter()) else { return };
    let mut writer = VersionImageWriter::new(Arc::new(version.clone()), 0, 0);
    let again = load(std::iter::from_fn(|| {
        let mut image = Vec::new();
        writer.append_image(&mut image).then_some(image)
    }));
    assert_eq!(text(&again.expect("what was loaded")), text(&version));
});

/// The version of these images, whose checksums are made valid.
fn load(images: impl Iterator<Item = Vec<u8>>) -> Result<TreeVersion, VersionImageProblem> {
    let mut loader = VersionImageLoader::new(0, 0, ReclaimQueue::new());
    for mut image in images {
        if image.len() > 8 {
            let crc = crc32c(&image[8..]);
            image[4..8].copy_from_slice(&crc.to_le_bytes());
        }
        if loader.is_done() || loader.load(&image).is_none() {
            break;
        }
    }
    loader.finish(0..1 << 41)
}

fn text(version: &TreeVersion) -> String {
    let segments: Vec<_> =
        version.segments().iter().map(|it| (it.meta.id(), it.meta.extent(), it.seal)).collect();
    let tables: Vec<_> = version.tables().collect();
    let lost = version.lost().as_slice();
    format!("{tables:?} {segments:?} {lost:?} {:?}", (version.last_table_id(), version.last_segment_id()))
}
