//! Checkpoint images of the log engine with any bytes under valid checksums: stores that agree with the layout, or a problem, never a panic.
//! What is taken is written and loaded again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::crc32c;
use octokv_engine::log::hash_prefix::SegmentNumber;
use octokv_engine::log::log_layout::LogLayout;
use octokv_engine::log::segment_ref::{SEGMENT_REF_BYTES, SegmentRef};
use octokv_engine::log::store_image::{
    CheckpointId, LoadedStore, PAGE_SEGMENTS, STORE_IMAGE_HEADER_BYTES, StoreImageLoader, StoreImageProblem,
    append_page, append_store,
};

const CHECKPOINT: CheckpointId = CheckpointId { volume_id: 7, checkpoint_id: 11 };
const LAYOUT: LogLayout = LogLayout {
    unit_bytes: 512,
    chunk_units: 128,
    area_units: 160,
    chunks_start_unit: 32 + 640,
    chunks: 300,
    stores: 4,
    granule_log2: 3,
};

fuzz_target!(|input: &[u8]| {
    _ = load(std::iter::once(input.to_vec()), 1);
    let Some((&stores, mut rest)) = input.split_first() else { return };
    let stores = u32::from(stores % 4) + 1;
    // Each takes its partition, its kind and its length, and then its body.
    let (mut images, mut first) = (Vec::new(), 0);
    while let Some((&[partition, kind, low, high], behind)) = rest.split_first_chunk::<4>() {
        let bytes = usize::from(u16::from_le_bytes([low, high])).min(behind.len());
        let (body, behind) = behind.split_at(bytes);
        let count = if kind == 0 { bytes / SEGMENT_REF_BYTES } else { bytes };
        let mut image = vec![0; STORE_IMAGE_HEADER_BYTES];
        image[..4].copy_from_slice(b"OKVS");
        image[8..16].copy_from_slice(&CHECKPOINT.volume_id.to_le_bytes());
        image[16..24].copy_from_slice(&CHECKPOINT.checkpoint_id.to_le_bytes());
        image[24] = partition;
        image[28] = kind;
        image[32..36].copy_from_slice(&u32::to_le_bytes(if kind == 0 { first } else { 0 }));
        image[36..40].copy_from_slice(&(count as u32).to_le_bytes());
        image.extend_from_slice(&body[..if kind == 0 { count * SEGMENT_REF_BYTES } else { count }]);
        first = if kind == 0 { first + count as u32 } else { 0 };
        images.push(image);
        rest = behind;
    }
    let Ok(loaded) = load(images.into_iter(), stores) else { return };
    let mut again = Vec::new();
    for store in &loaded {
        for (number, page) in store.pages.iter().enumerate() {
            let (segments, _) = page.as_chunks::<SEGMENT_REF_BYTES>();
            let segments = segments.iter().map(|&segment| SegmentRef::from_bytes(segment));
            let (first, mut image) = (SegmentNumber((number * PAGE_SEGMENTS) as u32), Vec::new());
            append_page(&mut image, CHECKPOINT, store.start.partition, first, segments);
            again.push(image);
        }
        let mut image = Vec::new();
        append_store(&mut image, CHECKPOINT, &store.start);
        again.push(image);
    }
    assert_eq!(load(again.into_iter(), stores), Ok(loaded));
});

/// The stores of these images, whose checksums are made valid.
fn load(images: impl Iterator<Item = Vec<u8>>, stores: u32) -> Result<Vec<LoadedStore>, StoreImageProblem> {
    let mut loader = StoreImageLoader::new(CHECKPOINT, LAYOUT, stores);
    for mut image in images {
        if image.len() > 8 {
            let crc = crc32c(&image[8..]);
            image[4..8].copy_from_slice(&crc.to_le_bytes());
        }
        if loader.is_done() || loader.load(&image).is_none() {
            break;
        }
    }
    loader.finish()
}
