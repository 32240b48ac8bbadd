//! Changes of the ordered engine in a journal batch: any bytes are changes or none, a change keeps its bytes, and the parts of edits
//! are put together or named as damaged.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::crc32c;
use octokv_engine::common::journal::JournalEntry;
use octokv_engine::lsm::edit_parts::EditAssembler;
use octokv_engine::lsm::journal::{ChangeContents, JournalChange};
use octokv_engine::lsm::reclaim::ReclaimQueue;
use octokv_engine::lsm::version_edit::VersionEdit;

fuzz_target!(|input: &[u8]| {
    let (mut assembler, queue) = (EditAssembler::default(), ReclaimQueue::new());
    let mut rest = input;
    while let Some((change, length)) = JournalChange::decode(rest) {
        let mut bytes = vec![0; change.encoded_bytes()];
        change.encode(&mut bytes);
        assert_eq!(bytes, &rest[..length]);
        rest = &rest[length..];
        match change.contents(9) {
            ChangeContents::Entry(entry) => {
                assert_eq!(entry.sequence, 9);
                let again = JournalChange::entry(&entry);
                assert_eq!(again.contents(9), change.contents(9));
            }
            ChangeContents::EditPart(part) => {
                if let Ok(Some(records)) = assembler.offer(&with_checksum(part)) {
                    _ = VersionEdit::decode(&records, &queue);
                }
            }
            ChangeContents::Cancelled => {}
        }
        let cancelled = change.cancelled();
        assert_eq!((cancelled.encoded_bytes(), cancelled.contents(9)), (length, ChangeContents::Cancelled));
    }
});

/// A part with the checksum of its own bytes, which is right if it is the edit's only one.
fn with_checksum(part: &[u8]) -> Vec<u8> {
    let mut part = part.to_vec();
    if let Some((header, bytes)) = part.split_at_mut_checked(24) {
        header[20..].copy_from_slice(&crc32c(bytes).to_le_bytes());
    }
    part
}
