//! Blocks of the ordered engine's tables with any bytes, as they are and under valid checksums: entries in order or none, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::crc32c;
use octokv_engine::lsm::table::filter::{FilterHash, TableFilter};
use octokv_engine::lsm::table::frame::{BlockKind, BlockOwner, open, seal, seal_compressed};
use octokv_engine::lsm::table::index::BlockRef;
use octokv_engine::lsm::table::info::TableDescriptor;
use octokv_engine::lsm::table::key_block::{BlockBody, KeyBlock, KeyBlockPosition};
use octokv_engine::lsm::table::stored_entry::StoredEntry;
use octokv_engine::lsm::table::writer::DATA_BYTES_MAX;

const OWNER: BlockOwner = BlockOwner { volume_id: 1, table_id: 2 };

fuzz_target!(|input: &[u8]| {
    decode_descriptor(input);
    assert!(open(input, BlockKind::Data, OWNER, 0, 1 << 20).is_none_or(|payload| payload.len() <= 1 << 20));
    if let Some(filter) = TableFilter::decode(input) {
        filter.may_have(FilterHash::of(input));
    }
    for kind in [BlockKind::Data, BlockKind::Index] {
        let mut bytes = input.to_vec();
        match kind {
            BlockKind::Data => seal_compressed(&mut bytes, 0, kind, OWNER, 9, &mut Vec::new()),
            _ => seal(&mut bytes, 0, kind, OWNER, 9),
        }
        assert_eq!(open(&bytes, kind, OWNER, 9, input.len()).as_deref(), Some(input));
    }
    if let Some(block) = open_block::<StoredEntry>(input) {
        walk(&block, |stored, key| {
            let entry = stored.entry(key, &block);
            assert!(entry.encoded_bytes() <= DATA_BYTES_MAX);
        });
    }
    if let Some(index) = open_block::<BlockRef>(input) {
        walk(&index, |_, _| ());
    }
});

/// Descriptors as they are, and under a valid checksum: what is taken is encoded to the same again.
fn decode_descriptor(input: &[u8]) {
    let _ = TableDescriptor::decode(input);
    let mut bytes = [b"OKVT", &[0; 4][..], input].concat();
    // Its own length, so that the checksum covers all of it.
    if bytes.len() < 64 {
        return;
    }
    let length = bytes.len() as u32;
    bytes[36..40].copy_from_slice(&length.to_le_bytes());
    let crc = crc32c(&bytes[8..]);
    bytes[4..8].copy_from_slice(&crc.to_le_bytes());
    if let Some(mut descriptor) = TableDescriptor::decode(&bytes) {
        let taken = descriptor.clone();
        let encoded = descriptor.encode();
        // A number may have been written in more bytes than it needs: then the parts of the table do not lie where they lay.
        if encoded.len() == bytes.len() {
            assert_eq!(TableDescriptor::decode(&encoded), Some(taken));
        }
    }
}

fn open_block<B: BlockBody>(input: &[u8]) -> Option<KeyBlock<B>> {
    (input.len() <= DATA_BYTES_MAX).then(|| KeyBlock::decode(input.into(), |_| true)).flatten()
}

/// Both directions have the same entries, and each is found.
fn walk<B: BlockBody>(block: &KeyBlock<B>, mut visit: impl FnMut(B, &[u8])) {
    let (mut place, mut searched) = (KeyBlockPosition::default(), KeyBlockPosition::default());
    let mut forward = Vec::new();
    assert!(block.first(&mut place));
    while let Some(body) = place.body() {
        visit(body, place.key());
        forward.push((place.key().to_vec(), body.sequence()));
        block.next(&mut place);
    }
    assert!(block.last(&mut place));
    for (key, sequence) in forward.iter().rev() {
        let body = place.body().expect("as many entries backward");
        assert_eq!((place.key(), body.sequence()), (&key[..], *sequence));
        block.prev(&mut place);
        let target = octokv_engine::lsm::entry::Position { key, sequence: *sequence };
        assert!(block.seek(&mut searched, target) && searched.key() == &key[..]);
        assert_eq!(block.find(target).map(|body| body.sequence()), Some(*sequence));
    }
    assert!(place.body().is_none());
}
