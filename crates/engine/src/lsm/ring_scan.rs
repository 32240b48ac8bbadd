//! A scan of a ring range: every key with the digest of its value, in ring order.
//!
//! The tree is in the order of keys, so a page of a scan is a pass over all keys: it keeps those with the lowest ring positions behind the page before, up to
//! [`PAGE_BYTES`] of them. A scan of a tree of many gigabytes takes a pass for each few hundred thousand keys.
//!
//! In: the range. Out: entries for the sink. Tombstones are shown, unlike by an iterator. What cannot be read is left out.

use super::copied_entry::{CopiedEntry, CopiedValue};
use super::core::LsmCore;
use super::cursor::EntryCursor;
use super::entry::{Position, TreeEntry};
use super::iterator_list::IteratorState;
use super::merge::MergingCursor;
use super::tree_iterator::TreeIterator;
use crate::{EngineError, IteratorOptions, ScanEntry, ScanSink, value_digest};
use octokv_base::{RingPosition, RingRange, UnixTime, Version};
use octokv_runtime::yield_now;
use std::collections::BTreeMap;

/// The memory of a page, in bytes.
const PAGE_BYTES: usize = 32 << 20;
/// The memory of an entry of a page besides key and value.
const ENTRY_BYTES: usize = 128;
/// Entries between two yields.
const ENTRIES_PER_YIELD: u32 = 256;

/// The entries of a page, by ring position and key.
type ScanPage = BTreeMap<(RingPosition, Box<[u8]>), CopiedEntry>;

impl LsmCore {
    /// [`Engine::scan`](crate::Engine::scan).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn scan_range(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        let iterator = TreeIterator::create(&self.volume, IteratorOptions::default());
        let iterator = iterator.ok_or(EngineError::NoMemory)?;
        let mut behind: Option<(RingPosition, Box<[u8]>)> = None;
        loop {
            let (page, is_last) = self.scan_page(&iterator.state, range, since, behind.as_ref()).await?;
            for ((position, key), entry) in &page {
                let Some(digest) = self.digest(&iterator.state, key, entry).await? else { continue };
                let offered = ScanEntry {
                    position: *position,
                    key,
                    version: entry.version,
                    is_tombstone: entry.value == CopiedValue::Tombstone,
                    digest,
                };
                if !sink.offer(&offered) {
                    return Ok(());
                }
            }
            match page.last_key_value() {
                Some((last, _)) if !is_last => behind = Some(last.clone()),
                _ => return Ok(()),
            }
        }
    }

    /// The next page, and whether it is the last.
    async fn scan_page(
        &self,
        iterator: &IteratorState,
        range: RingRange,
        since: Version,
        behind: Option<&(RingPosition, Box<[u8]>)>,
    ) -> Result<(ScanPage, bool), EngineError> {
        let point = iterator.snapshot.point();
        let sources = iterator.sources().ok_or(EngineError::IteratorExpired)?;
        let mut merge = MergingCursor::new(self.tree_sources(sources));
        let (mut page, mut page_bytes, mut is_last) = (ScanPage::new(), 0, true);
        let (mut key, mut entries): (Option<Vec<u8>>, u32) = (None, 0);
        let mut outcome = merge.seek(Position::START).await;
        loop {
            match outcome {
                Ok(()) => {
                    let Some(entry) = merge.entry() else { break };
                    if entry.sequence <= point.sequence && key.as_deref() != Some(entry.key) {
                        key = Some(entry.key.to_vec());
                        let position = RingPosition::of_bytes(entry.key, self.volume.fixed().hash_seed);
                        let place = (position, Box::from(entry.key));
                        let is_behind = behind.is_none_or(|behind| *behind < place);
                        if range.contains(position)
                            && is_behind
                            && let Some(shown) = self.shown_in_scan(&entry, since, point.time)
                        {
                            page_bytes += ENTRY_BYTES + place.1.len() + inline_bytes(&shown);
                            page.insert(place, shown);
                        }
                    }
                }
                Err(EngineError::Corrupt { .. }) => {}
                Err(error) => return Err(error),
            }
            while page_bytes > PAGE_BYTES
                && let Some(((_, key), entry)) = page.pop_last()
            {
                page_bytes -= ENTRY_BYTES + key.len() + inline_bytes(&entry);
                is_last = false;
            }
            entries += 1;
            if entries.is_multiple_of(ENTRIES_PER_YIELD) {
                yield_now().await;
            }
            outcome = merge.next().await;
        }
        Ok((page, is_last))
    }

    /// What a scan shows of the newest entry of a key.
    fn shown_in_scan(&self, entry: &TreeEntry<'_>, since: Version, now: UnixTime) -> Option<CopiedEntry> {
        let mut shown = CopiedEntry::of(entry);
        let is_live = shown.value != CopiedValue::Tombstone && now < entry.expires_at;
        if !is_live {
            if self.volume.forgotten.lock().has_no_version(entry) {
                return None;
            }
            shown.value = CopiedValue::Tombstone;
        }
        (entry.version >= since).then_some(shown)
    }

    /// The digest of an entry's value, 0 of a tombstone; `None` if it cannot be read.
    async fn digest(
        &self,
        iterator: &IteratorState,
        key: &[u8],
        entry: &CopiedEntry,
    ) -> Result<Option<u64>, EngineError> {
        Ok(Some(match &entry.value {
            CopiedValue::Tombstone => 0,
            CopiedValue::Inline(value) => value_digest(value, entry.expires_at),
            CopiedValue::InSegment(address) => {
                let sources = iterator.sources().ok_or(EngineError::IteratorExpired)?;
                match self.read_value(&sources.version, key, *address).await {
                    Ok(Some((buffer, value))) => value_digest(&buffer[value], entry.expires_at),
                    Ok(None) | Err(EngineError::Corrupt { .. }) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
        }))
    }
}

fn inline_bytes(entry: &CopiedEntry) -> usize {
    match &entry.value {
        CopiedValue::Inline(value) => value.len(),
        CopiedValue::Tombstone | CopiedValue::InSegment(_) => 0,
    }
}
