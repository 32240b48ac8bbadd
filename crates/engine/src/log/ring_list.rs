//! Listings and scans in ring order: one segment after another, each a range of the ring.
//!
//! In: where to begin. Out: keys, or entries with digests, for a sink. The place of a listing is a prefix, so splits do not matter to it: each
//! page is a segment as it was when it was looked up. What is damaged is left out.
//! Tested by the conformance suite.

use super::core::LogCore;
use super::hash_prefix::HashPrefix;
use super::segment_entry::SegmentEntry;
use super::segment_reads::{FoundImage, ReadRepeats};
use super::store::Store;
use crate::{EngineError, KeySink, ScanEntry, ScanSink, ValueRange, value_digest};
use octokv_base::{Key, RingPosition, RingRange, Version};

/// A page of a listing.
struct ListPage {
    /// `None` if the segment has no image, or a damaged one.
    image: Option<FoundImage>,
    /// Where the next page begins; `None` behind the last of the store.
    next: Option<HashPrefix>,
}

/// What a scan shows of a key: its version, and the digest of its value; `None` of a tombstone.
struct ShownEntry {
    version: Version,
    digest: Option<u64>,
}

impl ListPage {
    /// The entries in ring order, with their positions.
    fn entries(&self, core: &LogCore) -> Vec<(RingPosition, SegmentEntry<'_>)> {
        let of_image = self.image.iter().flat_map(|image| image.entries.iter());
        let mut entries: Vec<_> = of_image.map(|entry| (core.volume.position_of(entry.key), entry)).collect();
        entries.sort_by(|(a, first), (b, second)| a.cmp(b).then_with(|| first.key.cmp(second.key)));
        entries
    }
}

impl LogCore {
    /// The page of a prefix.
    async fn list_page(&self, store: &Store, prefix: HashPrefix) -> Result<ListPage, EngineError> {
        match self.read_image(store, prefix, &mut ReadRepeats::default()).await {
            Ok(lookup) => Ok(ListPage { image: lookup.image, next: lookup.level.next_prefix(prefix) }),
            Err(EngineError::Corrupt { .. }) => {
                let state = store.state.lock();
                let next = state.table.level().next_prefix(prefix).filter(|_| !state.is_lost);
                Ok(ListPage { image: None, next })
            }
            Err(error) => Err(error),
        }
    }

    /// The stores from that of a position on.
    fn stores_from(&self, position: RingPosition) -> impl Iterator<Item = &Store> {
        let behind = move |store: &&Store| store.range.last() >= position;
        self.volume.stores.iter().filter(behind)
    }

    /// [`Engine::list`](crate::Engine::list).
    ///
    /// # Errors
    /// As there.
    pub(super) async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        let is_from_front = start.is_empty();
        let first = if is_from_front { RingPosition(0) } else { self.volume.position_of(start.as_bytes()) };
        for store in self.stores_from(first) {
            let from = first.max(store.range.first());
            let mut next = Some(store.prefix_of(from));
            while let Some(prefix) = next {
                sink.yield_point().await;
                let page = self.list_page(store, prefix).await?;
                for (position, entry) in page.entries(self) {
                    let is_before = !is_from_front && (position, entry.key) < (first, start.as_bytes());
                    if !is_before && self.is_live(&entry) && !sink.offer(entry.key) {
                        return Ok(());
                    }
                }
                next = page.next;
            }
        }
        Ok(())
    }

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
        for store in self.stores_from(range.first()) {
            if store.range.first() > range.last() {
                break;
            }
            let last = store.prefix_of(range.last().min(store.range.last()));
            let mut next = Some(store.prefix_of(range.first().max(store.range.first())));
            while let Some(prefix) = next.filter(|&prefix| prefix <= last) {
                let page = self.list_page(store, prefix).await?;
                for (position, entry) in page.entries(self) {
                    if !range.contains(position) || entry.meta.version < since {
                        continue;
                    }
                    let Some(shown) = self.shown_in_scan(store, &entry, &page).await? else { continue };
                    let offered = ScanEntry {
                        position,
                        key: entry.key,
                        version: shown.version,
                        is_tombstone: shown.digest.is_none(),
                        digest: shown.digest.unwrap_or(0),
                    };
                    if !sink.offer(&offered) {
                        return Ok(());
                    }
                }
                next = page.next;
            }
        }
        Ok(())
    }

    /// What a scan shows of an entry; `None` if it is left out.
    async fn shown_in_scan(
        &self,
        store: &Store,
        entry: &SegmentEntry<'_>,
        page: &ListPage,
    ) -> Result<Option<ShownEntry>, EngineError> {
        let version = entry.meta.version;
        if !self.is_live(entry) {
            let is_forgotten = version == Version::NONE || version < self.volume.forgotten_below();
            return Ok((!is_forgotten).then_some(ShownEntry { version, digest: None }));
        }
        let Some(image) = &page.image else { return Ok(None) };
        match self.read_value(store, entry, image, ValueRange::ALL, &mut ReadRepeats::default()).await {
            Ok(Some((buffer, value))) => {
                let digest = Some(value_digest(&buffer[value], entry.meta.expires_at));
                Ok(Some(ShownEntry { version, digest }))
            }
            // The record was moved or replaced since the page was read: the key is looked up again.
            Ok(None) => self.shown_now(entry.key).await,
            Err(EngineError::Corrupt { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What a scan shows of the value that a key has now; `None` if it has none any more.
    async fn shown_now(&self, key: &[u8]) -> Result<Option<ShownEntry>, EngineError> {
        let Some(key) = Key::new(key) else { return Ok(None) };
        match self.get(&key, ValueRange::ALL).await {
            Ok(Some(value)) => {
                let digest = Some(value_digest(value.as_bytes(), value.expires_at));
                Ok(Some(ShownEntry { version: value.version, digest }))
            }
            Ok(None) | Err(EngineError::Corrupt { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}
