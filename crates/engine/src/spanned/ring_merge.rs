//! Listings and scans of several devices as one: pages of each, merged in their common order.
//!
//! ```text
//!   device 0   page ─┐
//!   device 1   page ─┼─ least first ─▶ sink           an empty page: the next one of that device, from its last key on
//!   device 2   page ─┘
//! ```
//! In: one core's handles. Out: keys in the order of the engine, each once. A key belongs to one device, so no two pages have the same: what a move has left on another is skipped. Memory: a page of each
//! device.

use super::partition_map::PartitionMap;
use super::places::PlacedMember;
use super::shared_map::MapState;
use super::yield_points::{ListCaller, YieldingCaller};
use crate::bug_injection::{self, InjectedBug};
use crate::{Engine, EngineError, KeySink, ScanEntry, ScanSink};
use octokv_base::{Key, RingPosition, RingRange, Version};
use std::cmp::Ordering;
use std::collections::VecDeque;

/// The keys of a page of a listing, at most.
const PAGE_KEYS: usize = 128;
/// The bytes of a page of a scan, about: the other engines read a value for each entry.
const SCAN_PAGE_BYTES: usize = 16 << 10;
/// The same with the ordered engine, which makes a pass over its whole tree for each page.
const TREE_SCAN_PAGE_BYTES: usize = 4 << 20;

/// The order of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListOrder {
    /// That of positions on the ring of this seed.
    Ring(u64),
    /// That of the keys.
    Keys,
}

impl ListOrder {
    fn compare(self, a: &[u8], b: &[u8]) -> Ordering {
        match self {
            ListOrder::Ring(seed) => {
                RingPosition::of_bytes(a, seed).cmp(&RingPosition::of_bytes(b, seed)).then_with(|| a.cmp(b))
            }
            ListOrder::Keys => a.cmp(b),
        }
    }
}

/// Which keys of a device count: those of its partitions, by the map of one operation.
#[derive(Clone, Copy)]
pub(super) struct KeysOfDevice<'a> {
    /// `None` if devices have no others.
    map: Option<&'a PartitionMap>,
    hash_seed: u64,
}

impl<'a> KeysOfDevice<'a> {
    /// Those of a map, on a volume with positions of this seed.
    pub fn new(state: &'a MapState, hash_seed: u64) -> KeysOfDevice<'a> {
        KeysOfDevice { map: state.has_left_over().then_some(&state.map), hash_seed }
    }

    fn has(&self, device: usize, key: &[u8]) -> bool {
        let map = self.map.filter(|_| !bug_injection::is_injected(InjectedBug::MoveListLeftOver));
        map.is_none_or(|map| map.device_of(RingPosition::of_bytes(key, self.hash_seed)) == device)
    }
}

/// The place of a device's listing.
struct ListCursor<'a, E> {
    member: &'a PlacedMember<E>,
    kept: KeysOfDevice<'a>,
    /// Where the next page begins.
    next: Key,
    /// Whether `next` was in the last page.
    is_behind_next: bool,
    page: VecDeque<Box<[u8]>>,
    is_at_end: bool,
}

/// Receives a page of keys, without one that the page before had.
struct KeyPage<'a> {
    keys: &'a mut VecDeque<Box<[u8]>>,
    without: Option<&'a [u8]>,
    kept: (KeysOfDevice<'a>, usize),
    caller: &'a mut dyn YieldingCaller,
}

impl KeySink for KeyPage<'_> {
    fn offer(&mut self, key: &[u8]) -> bool {
        if self.keys.len() >= PAGE_KEYS {
            return false;
        }
        let (kept, device) = self.kept;
        if self.without != Some(key) && kept.has(device, key) {
            self.keys.push_back(key.into());
        }
        true
    }

    async fn yield_point(&mut self) {
        self.caller.yield_point().await;
    }
}

impl<E: Engine> ListCursor<'_, E> {
    /// Reads the next page if there is none.
    async fn fill(&mut self, caller: &mut dyn YieldingCaller) -> Result<(), EngineError> {
        if !self.page.is_empty() || self.is_at_end {
            return Ok(());
        }
        let without = self.is_behind_next.then_some(self.next.as_bytes());
        let kept = (self.kept, self.member.index());
        let mut page = KeyPage { keys: &mut self.page, without, kept, caller };
        let listed = self.member.engine().list(&self.next, &mut page).await;
        listed.map_err(|error| self.member.engine_error(error))?;
        self.is_at_end = self.page.len() < PAGE_KEYS;
        if let Some(last) = self.page.back() {
            self.next = Key::new(last).expect("a listed key");
            self.is_behind_next = true;
        }
        Ok(())
    }
}

/// [`Engine::list`] over several devices.
///
/// # Errors
/// The first of a device.
pub(super) async fn list_merged<E: Engine>(
    (members, kept): (&[PlacedMember<E>], KeysOfDevice<'_>),
    order: ListOrder,
    start: &Key,
    sink: &mut impl KeySink,
) -> Result<(), EngineError> {
    let cursor = |member| ListCursor {
        member,
        kept,
        next: start.clone(),
        is_behind_next: false,
        page: VecDeque::new(),
        is_at_end: false,
    };
    let mut cursors: Vec<_> = members.iter().map(cursor).collect();
    loop {
        sink.yield_point().await;
        for cursor in &mut cursors {
            cursor.fill(&mut ListCaller(&mut *sink)).await?;
        }
        // Until a page is empty, of which the next may have the least key.
        while cursors.iter().all(|cursor| !cursor.page.is_empty() || cursor.is_at_end) {
            let has_ended = |cursor: &ListCursor<'_, E>| cursor.page.is_empty();
            if bug_injection::is_injected(InjectedBug::SpanListEndsEarly) && cursors.iter().any(has_ended) {
                return Ok(());
            }
            let with_keys = cursors.iter_mut().filter(|cursor| !cursor.page.is_empty());
            let Some(least) = with_keys.min_by(|a, b| order.compare(&a.page[0], &b.page[0])) else {
                return Ok(());
            };
            if !sink.offer(&least.page[0]) {
                return Ok(());
            }
            least.page.pop_front();
        }
    }
}

/// An entry of a scan that a page keeps.
struct PageEntry {
    position: RingPosition,
    key: Box<[u8]>,
    version: Version,
    is_tombstone: bool,
    digest: u64,
}

impl PageEntry {
    fn place(&self) -> (RingPosition, &[u8]) {
        (self.position, &self.key)
    }

    fn entry(&self) -> ScanEntry<'_> {
        let PageEntry { position, ref key, version, is_tombstone, digest } = *self;
        ScanEntry { position, key, version, is_tombstone, digest }
    }
}

/// The place of a device's scan.
struct ScanCursor<'a, E> {
    member: &'a PlacedMember<E>,
    kept: KeysOfDevice<'a>,
    /// The range from the last scanned position on.
    range: RingRange,
    /// The last entry of the last page: its position is in the range.
    behind: Option<(RingPosition, Box<[u8]>)>,
    page: VecDeque<PageEntry>,
    is_at_end: bool,
}

/// Receives a page of entries behind that of the page before.
struct EntryPage<'a> {
    entries: &'a mut VecDeque<PageEntry>,
    behind: Option<(RingPosition, &'a [u8])>,
    kept: (KeysOfDevice<'a>, usize),
    bytes: usize,
    bytes_max: usize,
}

impl EntryPage<'_> {
    fn is_full(&self) -> bool {
        self.bytes >= self.bytes_max
    }
}

impl ScanSink for EntryPage<'_> {
    fn offer(&mut self, entry: &ScanEntry<'_>) -> bool {
        if self.is_full() {
            return false;
        }
        let &ScanEntry { position, key, version, is_tombstone, digest } = entry;
        let (kept, device) = self.kept;
        if self.behind.is_none_or(|behind| behind < (position, key)) && kept.has(device, key) {
            self.bytes += size_of::<PageEntry>() + key.len();
            self.entries.push_back(PageEntry { position, key: key.into(), version, is_tombstone, digest });
        }
        true
    }
}

impl<E: Engine> ScanCursor<'_, E> {
    /// Reads the next page if there is none.
    async fn fill(&mut self, since: Version, bytes_max: usize) -> Result<(), EngineError> {
        if !self.page.is_empty() || self.is_at_end {
            return Ok(());
        }
        let kept = (self.kept, self.member.index());
        let behind = self.behind.as_ref().map(|(position, key)| (*position, &**key));
        let mut page = EntryPage { entries: &mut self.page, behind, kept, bytes: 0, bytes_max };
        let scanned = self.member.engine().scan(self.range, since, &mut page).await;
        let is_full = page.is_full();
        scanned.map_err(|error| self.member.engine_error(error))?;
        self.is_at_end = !is_full;
        if let Some(last) = self.page.back() {
            self.range = RingRange::new(last.position, self.range.last()).expect("it is in the range");
            self.behind = Some((last.position, last.key.clone()));
        }
        Ok(())
    }
}

/// [`Engine::scan`] over several devices.
///
/// # Errors
/// The first of a device.
pub(super) async fn scan_merged<E: Engine>(
    (members, kept): (&[PlacedMember<E>], KeysOfDevice<'_>),
    order: ListOrder,
    (range, since): (RingRange, Version),
    sink: &mut impl ScanSink,
) -> Result<(), EngineError> {
    let bytes_max = match order {
        ListOrder::Ring(_) => SCAN_PAGE_BYTES,
        ListOrder::Keys => TREE_SCAN_PAGE_BYTES,
    };
    let cursor =
        |member| ScanCursor { member, kept, range, behind: None, page: VecDeque::new(), is_at_end: false };
    let mut cursors: Vec<_> = members.iter().map(cursor).collect();
    loop {
        for cursor in &mut cursors {
            cursor.fill(since, bytes_max).await?;
        }
        while cursors.iter().all(|cursor| !cursor.page.is_empty() || cursor.is_at_end) {
            let with_entries = cursors.iter_mut().filter(|cursor| !cursor.page.is_empty());
            let Some(least) = with_entries.min_by(|a, b| a.page[0].place().cmp(&b.page[0].place())) else {
                return Ok(());
            };
            if !sink.offer(&least.page[0].entry()) {
                return Ok(());
            }
            least.page.pop_front();
        }
    }
}
