//! Edits of the ordered tree: any bytes are an edit or fail, an edit has one encoding, and a tree takes it or names what is wrong.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_engine::lsm::edit_parts::EditAssembler;
use octokv_engine::lsm::reclaim::ReclaimQueue;
use octokv_engine::lsm::tree_version::TreeVersion;
use octokv_engine::lsm::version_edit::VersionEdit;
use octokv_engine::lsm::version_image::VersionImageLoader;

fuzz_target!(|input: &[u8]| {
    let queue = ReclaimQueue::new();
    _ = EditAssembler::default().offer(input);
    _ = VersionImageLoader::new(0, 0, queue.clone()).load(input);
    let Ok(edit) = VersionEdit::decode(input, &queue) else { return };
    let (mut once, mut twice) = (Vec::new(), Vec::new());
    edit.encode(&mut once);
    let again = VersionEdit::decode(&once, &queue).expect("what was encoded");
    again.encode(&mut twice);
    assert_eq!(once, twice);
    if let Ok(version) = TreeVersion::default().edited(&edit) {
        _ = version.check_extents(0..u64::MAX);
        _ = version.edited(&again);
    }
});
