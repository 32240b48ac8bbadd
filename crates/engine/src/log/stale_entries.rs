//! Entries that no operation needs any more: they leave when compaction writes their segment again.
//!
//! ```text
//!   value, expired        with a version: a tombstone        without: nothing
//!   forgotten tombstone   nothing                            in an image of which entries were lost it stays: it says that its key is absent
//! ```
//! In: a segment that compaction holds and writes. Out: its image without them. Invariant: what an operation finds for a key does not change.
//! Tested in `compaction_tests.rs`.

use super::busy_segments::ChangeSource;
use super::core::LogCore;
use super::hash_prefix::SegmentNumber;
use super::segment_entry::{EntryContents, SegmentEntry};
use super::segment_image::SegmentImage;
use super::store::{EntryChange, StoreState};
use crate::common::record::{RecordFlags, RecordMeta};
use octokv_base::{UnixTime, Version};

impl LogCore {
    /// Whether an entry is stale, in an image of which entries were lost or not.
    fn is_stale(&self, entry: &SegmentEntry<'_>, is_lost: bool) -> bool {
        match entry.contents.is_tombstone() {
            true => self.is_forgotten(entry) && !is_lost,
            false => !self.is_live(entry),
        }
    }

    /// What remains of a stale entry of a key with this version, if anything does.
    fn remains_of(&self, version: Version, is_lost: bool) -> Option<RecordMeta> {
        let is_needed = version > Version::NONE && version >= self.volume.forgotten_below();
        let flags = RecordFlags::VERSIONED.with(RecordFlags::TOMBSTONE);
        (is_needed || is_lost).then_some(RecordMeta { version, expires_at: UnixTime::NEVER, flags })
    }

    /// Removes stale entries from a segment, which is dirty then. REQUIRES: the caller holds it.
    pub(super) fn drop_stale_entries(&self, state: &mut StoreState, segment: SegmentNumber) {
        let image: &SegmentImage = state.busy.image(segment);
        let is_lost = image.is_lost();
        let stale = image.stale_candidates().filter(|entry| self.is_stale(entry, is_lost));
        let stale: Vec<(Vec<u8>, Version)> =
            stale.map(|entry| (entry.key.to_vec(), entry.meta.version)).collect();
        for (key, version) in stale {
            let image = state.busy.image(segment);
            let difference = match self.remains_of(version, is_lost) {
                Some(meta) => {
                    image.replace(&SegmentEntry { key: &key, meta, contents: EntryContents::Tombstone })
                }
                None => image.remove(&key),
            };
            let change = EntryChange { difference, new: None };
            state.busy.mark_dirty(segment, Some(change), ChangeSource::Compaction, &mut state.batches);
        }
    }
}
