//! Listings and scans in ring order: one segment after another, each a range of the ring.
//!
//! In: where to begin. Out: keys, or entries with digests, for a sink. The place of a listing is a prefix, so splits do not matter to it: each
//! page is a segment as it was when it was looked up. What is damaged is left out.
//!
//! Images are read ahead: the first alone, then two at once, three and so on, so that a short listing reads little that it does not show. If a segment was
//! split since the reads behind it began, they do not begin where it ends now, and are made again. A scan also reads values of a page ahead.
//! Tested below, and by the conformance suite.

use super::core::LogCore;
use super::hash_prefix::HashPrefix;
use super::segment_entry::{EntryContents, SegmentEntry};
use super::segment_reads::{FoundImage, ReadRepeats};
use super::store::Store;
use crate::{EngineError, KeySink, ScanEntry, ScanSink, ValueRange, value_digest};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::{self, FuturesOrdered, StreamExt};
use octokv_base::{Key, RingPosition, RingRange, Version};

/// The most images, and the most values, that are read at once.
const READS_MAX: usize = 8;

/// The most bytes of values that a scan reads at once, unless one alone is longer.
const VALUE_BYTES_READ_MAX: u32 = 1 << 20;

/// How many values of a page a scan reads at once.
fn value_reads_max(entries: &[(RingPosition, SegmentEntry<'_>)]) -> usize {
    let value_bytes = |(_, entry): &(_, SegmentEntry<'_>)| match entry.contents {
        EntryContents::Value { bytes, .. } => bytes,
        _ => 0,
    };
    let longest = entries.iter().map(value_bytes).max().unwrap_or(0).max(1);
    READS_MAX.min((VALUE_BYTES_READ_MAX / longest) as usize).max(1)
}

/// A page of a listing.
struct ListPage {
    /// `None` if the segment has no image, or a damaged one.
    image: Option<FoundImage>,
    /// Whether no entry of it was lost.
    is_whole: bool,
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

/// The pages of a store in ring order, some of which are read ahead.
struct ListPages<'a> {
    core: &'a LogCore,
    store: &'a Store,
    /// With the prefix of each, in ring order.
    reads: FuturesOrdered<LocalBoxFuture<'a, (HashPrefix, Result<ListPage, EngineError>)>>,
    reads_max: usize,
    /// Where the next page begins.
    next: Option<HashPrefix>,
    /// Where the first page begins that is not being read.
    unread: Option<HashPrefix>,
}

impl<'a> ListPages<'a> {
    /// Those from a prefix on.
    fn new(core: &'a LogCore, store: &'a Store, first: HashPrefix) -> ListPages<'a> {
        let (reads, next) = (FuturesOrdered::new(), Some(first));
        ListPages { core, store, reads, reads_max: 1, next, unread: next }
    }

    /// Begins reads up to the page of `last`.
    fn read_ahead(&mut self, last: HashPrefix) {
        let (core, store) = (self.core, self.store);
        while self.reads.len() < self.reads_max
            && let Some(prefix) = self.unread.filter(|&prefix| prefix <= last)
        {
            self.reads.push_back(Box::pin(async move { (prefix, core.list_page(store, prefix).await) }));
            self.unread = store.state.lock().table.level().next_prefix(prefix);
        }
    }

    /// The next page, unless it begins behind `last`.
    ///
    /// # Errors
    /// Device failures.
    async fn next(&mut self, last: HashPrefix) -> Result<Option<ListPage>, EngineError> {
        while let Some(prefix) = self.next.filter(|&prefix| prefix <= last) {
            self.read_ahead(last);
            let Some((read, page)) = self.reads.next().await else {
                // The page before was to be the last, and its segment was split before it was looked up.
                self.unread = Some(prefix);
                continue;
            };
            if read == prefix {
                let page = page?;
                self.next = page.next;
                self.reads_max = READS_MAX.min(self.reads_max + 1);
                return Ok(Some(page));
            }
            self.reads.clear();
            self.unread = Some(prefix);
        }
        Ok(None)
    }
}

impl LogCore {
    /// The page of a prefix.
    async fn list_page(&self, store: &Store, prefix: HashPrefix) -> Result<ListPage, EngineError> {
        match self.read_image(store, prefix, &mut ReadRepeats::default()).await {
            Ok(lookup) => Ok(ListPage {
                is_whole: lookup.image.as_ref().is_none_or(|image| !image.entries.is_lost()),
                image: lookup.image,
                next: lookup.level.next_prefix(prefix),
            }),
            Err(EngineError::Corrupt { .. }) => {
                let state = store.state.lock();
                let next = state.table.level().next_prefix(prefix).filter(|_| !state.is_lost);
                Ok(ListPage { image: None, is_whole: false, next })
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
        self.list_whole(start, sink).await.map(drop)
    }

    /// [`Engine::list`](crate::Engine::list). Returns whether no key was left out of what it read because of damage.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn list_whole(&self, start: &Key, sink: &mut impl KeySink) -> Result<bool, EngineError> {
        let mut is_whole = true;
        let is_from_front = start.is_empty();
        let first = if is_from_front { RingPosition(0) } else { self.volume.position_of(start.as_bytes()) };
        for store in self.stores_from(first) {
            let from = first.max(store.range.first());
            let last = store.prefix_of(store.range.last());
            let mut pages = ListPages::new(self, store, store.prefix_of(from));
            sink.yield_point().await;
            while let Some(page) = pages.next(last).await? {
                is_whole &= page.is_whole;
                for (position, entry) in page.entries(self) {
                    let is_before = !is_from_front && (position, entry.key) < (first, start.as_bytes());
                    if !is_before && self.is_live(&entry) && !sink.offer(entry.key) {
                        return Ok(is_whole);
                    }
                }
                sink.yield_point().await;
            }
        }
        Ok(is_whole)
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
            let first = store.prefix_of(range.first().max(store.range.first()));
            let mut pages = ListPages::new(self, store, first);
            while let Some(page) = pages.next(last).await? {
                let mut entries = page.entries(self);
                entries.retain(|(position, entry)| range.contains(*position) && entry.meta.version >= since);
                let reads_max = value_reads_max(&entries);
                let (core, page) = (self, &page);
                let shown = entries.iter().map(|(position, entry)| async move {
                    (*position, entry.key, core.shown_in_scan(store, entry, page).await)
                });
                let mut shown = stream::iter(shown).buffered(reads_max);
                while let Some((position, key, shown)) = shown.next().await {
                    let Some(shown) = shown? else { continue };
                    let offered = ScanEntry {
                        position,
                        key,
                        version: shown.version,
                        is_tombstone: shown.digest.is_none(),
                        digest: shown.digest.unwrap_or(0),
                    };
                    if !sink.offer(&offered) {
                        return Ok(());
                    }
                }
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

#[cfg(test)]
mod tests {
    use super::super::segment_entry::ValuePlace;
    use super::super::test_log_volume::OpenTestVolume;
    use super::*;
    use crate::common::record::RecordMeta;
    use crate::conformance::key_of;
    use crate::{Durability, PutOptions};
    use octokv_runtime::block_on;
    use std::collections::BTreeSet;
    use std::future::poll_fn;
    use std::pin::pin;

    fn stored(volume: &OpenTestVolume, number: u64) {
        block_on(volume.put(&key_of(number), number, 100, PutOptions::default()), || ()).expect("space");
    }

    #[test]
    fn segments_that_split_beside_a_listing_are_listed_whole() {
        let volume = OpenTestVolume::new(3, Durability::PowerSafe, |_| ());
        (0..500).for_each(|number| stored(&volume, number));
        let (store, mut listed, mut more) = (&volume.stores()[0], BTreeSet::new(), 500..3_000);
        let last = store.prefix_of(store.range.last());
        let segments = || store.state.lock().table.segments();
        let (before, mut pages_read) = (segments(), 0);
        let mut pages = ListPages::new(&volume.core, store, store.prefix_of(store.range.first()));
        while let Some(page) = block_on(pages.next(last), || ()).expect("no fault") {
            pages_read += 1;
            for (_, entry) in page.entries(&volume.core) {
                assert!(listed.insert(entry.key.to_vec()), "{:?} twice", entry.key);
            }
            let now = segments();
            more.by_ref().take_while(|_| segments() < now + 2).for_each(|number| stored(&volume, number));
        }
        assert!(segments() > before + 20 && pages_read > before, "{before} to {} segments", segments());
        let of_store = (0..500)
            .map(key_of)
            .filter(|key| store.range.contains(volume.core.volume.position_of(key.as_bytes())));
        for key in of_store {
            assert!(listed.contains(key.as_bytes()), "{key:?} is missing");
        }
    }

    #[test]
    fn the_last_segment_is_listed_whole_if_it_is_split_before_it_is_looked_up() {
        let volume = OpenTestVolume::new(6, Durability::PowerSafe, |_| ());
        (0..500).for_each(|number| stored(&volume, number));
        let store = &volume.stores()[0];
        let last = store.prefix_of(store.range.last());
        let start_of_last = || {
            let level = store.state.lock().table.level();
            level.range_of(level.segment_of(last).0).first
        };
        let start = start_of_last();
        let mut pages = ListPages::new(&volume.core, store, start);
        pages.read_ahead(last);
        assert_eq!((pages.reads.len(), pages.unread), (1, None));
        (500..3_000).take_while(|_| start_of_last() == start).for_each(|number| stored(&volume, number));
        assert!(start_of_last() > start, "it was not split");
        let mut listed = BTreeSet::new();
        while let Some(page) = block_on(pages.next(last), || ()).expect("no fault") {
            listed.extend(page.entries(&volume.core).iter().map(|(_, entry)| entry.key.to_vec()));
        }
        for key in (0..500).map(key_of) {
            let position = volume.core.volume.position_of(key.as_bytes());
            let is_behind = store.range.contains(position) && store.prefix_of(position) >= start;
            assert!(!is_behind || listed.contains(key.as_bytes()), "{key:?} is missing");
        }
    }

    #[test]
    fn a_short_listing_reads_little_ahead() {
        let volume = OpenTestVolume::new(4, Durability::PowerSafe, |_| ());
        (0..500).for_each(|number| stored(&volume, number));
        let store = &volume.stores()[0];
        let last = store.prefix_of(store.range.last());
        let mut pages = ListPages::new(&volume.core, store, store.prefix_of(store.range.first()));
        let mut under_way = Vec::new();
        for _ in 0..10 {
            block_on(pages.next(last), || ()).expect("no fault").expect("a page");
            under_way.push(pages.reads.len());
        }
        assert_eq!(under_way, [0, 1, 2, 3, 4, 5, 6, 7, 7, 7]);
        // None begins behind the range.
        let first = store.prefix_of(store.range.first());
        let mut pages = ListPages::new(&volume.core, store, first);
        assert!(block_on(pages.next(first), || ()).expect("no fault").is_some());
        assert!(block_on(pages.next(first), || ()).expect("no fault").is_none() && pages.reads.is_empty());
    }

    #[test]
    fn a_scan_reads_values_ahead_and_offers_them_in_order() {
        let volume = OpenTestVolume::new(5, Durability::PowerSafe, |_| ());
        (0..500).for_each(|number| stored(&volume, number));
        let (mut offered, mut polls, mut last) = (0, 0, None);
        let mut sink = |entry: &ScanEntry<'_>| {
            assert!(last < Some(entry.position), "{:?} behind {last:?}", entry.position);
            (last, offered) = (Some(entry.position), offered + 1);
            true
        };
        {
            let mut scan = pin!(volume.core.scan_range(RingRange::FULL, Version::NONE, &mut sink));
            let counted = poll_fn(|context| {
                polls += 1;
                scan.as_mut().poll(context)
            });
            assert_eq!(block_on(counted, || ()), Ok(()));
        }
        // A read takes 1.5 turns of others on average, and each of them polls the scan.
        assert!(offered == 500 && polls < offered, "{polls} polls for {offered} values");
    }

    #[test]
    fn longer_values_are_read_fewer_at_once() {
        let entries = |value_bytes: &[u32]| -> Vec<_> {
            let entry = |&bytes| {
                let contents = EntryContents::Value { bytes, at: ValuePlace::Nowhere };
                (RingPosition(0), SegmentEntry { key: b"key", meta: RecordMeta::PLAIN, contents })
            };
            value_bytes.iter().map(entry).collect()
        };
        for (value_bytes, reads) in [
            (&[][..], 8),
            (&[0], 8),
            (&[100, 128 << 10], 8),
            (&[300_000, 5], 3),
            (&[1 << 20], 1),
            (&[5 << 20], 1),
        ] {
            assert_eq!(value_reads_max(&entries(value_bytes)), reads, "{value_bytes:?}");
        }
    }
}
