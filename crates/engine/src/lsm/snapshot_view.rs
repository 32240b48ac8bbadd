//! The view of a snapshot: of each key the newest entry up to the snapshot, in the order of keys, in both directions.
//!
//! ```text
//!   merged entries   a@9  a@4  b@7×  b@2  c@8  c@3        × a tombstone
//!   view at 7             a@4                  c@3
//! ```
//! In: a merge of all sources, a snapshot, bounds. Out: entries with a value that has not expired at the snapshot's time. Forward, an
//! entry is that of the merge; backward, where the newest entry of a key comes last, it is a copy.
//!
//! A step passes what it leaves out, and awaits the caller's `yield_point` after each [`ENTRIES_PER_YIELD`] entries. Of a key with many
//! entries it passes a few, and seeks behind the others.
//!
//! Damage: [`EngineError::Corrupt`] is passed on once for each part that cannot be read, and the next step in the same direction goes on
//! behind it. The newest entry of a key that is shown afterwards may have been in the part: then [`SnapshotView::may_be_outdated`], and
//! the caller gets the key by a lookup before it answers. Every other key that is shown is right.
//!
//! An operation whose future was dropped leaves the view at no entry.
//! Invariant: nothing outside the bounds is shown. Tested in `snapshot_view_tests.rs`.

use super::cursor::EntryCursor;
use super::entry::{EntryValue, Position, TreeEntry, ValueAddress};
use super::merge::MergingCursor;
use super::snapshots::SnapshotPoint;
use crate::EngineError;
use octokv_base::{UnixTime, Version};

/// After so many entries a step yields.
pub const ENTRIES_PER_YIELD: u32 = 256;
/// After so many entries of one key, or newer than the snapshot, a step seeks instead.
const SKIPS_BEFORE_SEEK: u32 = 16;

/// The keys that a view shows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyBounds {
    /// The first key that may be shown; empty for all.
    pub lower: Box<[u8]>,
    /// The first key behind those that may be shown.
    pub upper: Option<Box<[u8]>>,
}

/// What a view left out, in entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ViewStatistics {
    /// Newer than the snapshot, or older than another entry of the key; those behind which it sought are not counted.
    pub skipped_versions: u64,
    /// Tombstones.
    pub skipped_tombstones: u64,
    /// Values that had expired.
    pub skipped_expired: u64,
    /// Seeks behind many entries of a key.
    pub seeks: u64,
}

/// A cursor over the keys that exist in a snapshot.
pub struct SnapshotView<C> {
    merge: MergingCursor<C>,
    snapshot: SnapshotPoint,
    bounds: KeyBounds,
    state: ViewState,
    /// Forward: the key whose further entries are older than one that was shown or hides them.
    passed_key: Option<Vec<u8>>,
    /// Backward: the newest entry of the key so far.
    held: HeldEntry,
    /// Entries since the step began, or yielded.
    unyielded: u32,
    /// Entries that were skipped since the last seek or the last key.
    skipped: u32,
    statistics: ViewStatistics,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ViewState {
    NoEntry,
    /// The merge is at it.
    ShownForward,
    /// It is held; the merge is before its key.
    ShownBackward,
    Damaged(ViewResumption),
}

/// How the step goes on that met damage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ViewResumption {
    Next,
    Prev,
    /// It sought the newest entry of the held key, forward.
    NewestOfHeldKey,
}

/// A copy of an entry, whose memory is used again.
#[derive(Default)]
struct HeldEntry {
    is_held: bool,
    key: Vec<u8>,
    inline: Vec<u8>,
    address: Option<ValueAddress>,
    sequence: u64,
    version: Version,
    expires_at: Option<UnixTime>,
    is_hidden: bool,
    may_be_outdated: bool,
}

impl HeldEntry {
    fn hold(&mut self, entry: &TreeEntry<'_>, is_hidden: bool, may_be_outdated: bool) {
        self.key.clear();
        self.key.extend_from_slice(entry.key);
        self.inline.clear();
        self.address = None;
        match entry.value {
            EntryValue::Inline(inline) if !is_hidden => self.inline.extend_from_slice(inline),
            EntryValue::InSegment(address) => self.address = Some(address),
            EntryValue::Inline(_) | EntryValue::Tombstone => {}
        }
        (self.sequence, self.version) = (entry.sequence, entry.version);
        self.expires_at = Some(entry.expires_at);
        (self.is_held, self.is_hidden, self.may_be_outdated) = (true, is_hidden, may_be_outdated);
    }

    fn entry(&self) -> TreeEntry<'_> {
        TreeEntry {
            key: &self.key,
            sequence: self.sequence,
            version: self.version,
            expires_at: self.expires_at.unwrap_or(UnixTime::NEVER),
            value: self.address.map_or(EntryValue::Inline(&self.inline), EntryValue::InSegment),
        }
    }
}

/// What becomes of the merge's current entry in a forward step.
enum ForwardChoice {
    Show,
    Skip,
    SeekBehindKey,
    SeekSnapshot,
}

impl<C: EntryCursor> SnapshotView<C> {
    /// A view at no entry. REQUIRES: the merge has every source whose entries are visible in the snapshot.
    pub fn new(merge: MergingCursor<C>, snapshot: SnapshotPoint, bounds: KeyBounds) -> SnapshotView<C> {
        SnapshotView {
            merge,
            snapshot,
            bounds,
            state: ViewState::NoEntry,
            passed_key: None,
            held: HeldEntry::default(),
            unyielded: 0,
            skipped: 0,
            statistics: ViewStatistics::default(),
        }
    }

    /// The entry at which the view is: one with a value.
    pub fn entry(&self) -> Option<TreeEntry<'_>> {
        match self.state {
            ViewState::NoEntry | ViewState::Damaged(_) => None,
            ViewState::ShownForward => self.merge.entry(),
            ViewState::ShownBackward => Some(self.held.entry()),
        }
    }

    /// Whether a part that could not be read may have a newer entry of the key at which the view is.
    pub fn may_be_outdated(&self) -> bool {
        match self.state {
            ViewState::NoEntry | ViewState::Damaged(_) => false,
            ViewState::ShownForward => self.merge.may_be_outdated(),
            ViewState::ShownBackward => self.held.may_be_outdated,
        }
    }

    /// What it left out since it was made.
    pub fn statistics(&self) -> ViewStatistics {
        self.statistics
    }

    /// The keys that it may show.
    pub fn bounds(&self) -> &KeyBounds {
        &self.bounds
    }

    /// The merge below it.
    pub fn merge(&self) -> &MergingCursor<C> {
        &self.merge
    }

    /// Moves to the first key at or behind `key` within the bounds, if there is one.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    pub async fn seek(&mut self, key: &[u8], yield_point: &mut impl AsyncFnMut()) -> Result<(), EngineError> {
        self.begin();
        let from = key.max(&self.bounds.lower);
        let outcome = self.merge.seek(Position::before(from)).await;
        self.forward_from(outcome, yield_point).await
    }

    /// Moves to the last key before `key` within the bounds, if there is one; without `key`, to the last of all.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    pub async fn seek_before(
        &mut self,
        key: Option<&[u8]>,
        yield_point: &mut impl AsyncFnMut(),
    ) -> Result<(), EngineError> {
        self.seek_back(key.map(Position::before), yield_point).await
    }

    /// Moves to the last key at or before `key` within the bounds, if there is one.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    pub async fn seek_at_or_before(
        &mut self,
        key: &[u8],
        yield_point: &mut impl AsyncFnMut(),
    ) -> Result<(), EngineError> {
        self.seek_back(Some(Position::behind(key)), yield_point).await
    }

    async fn seek_back(
        &mut self,
        position: Option<Position<'_>>,
        yield_point: &mut impl AsyncFnMut(),
    ) -> Result<(), EngineError> {
        self.begin();
        let upper = self.bounds.upper.as_deref().map(Position::before);
        let end = [position, upper].into_iter().flatten().min();
        let outcome = self.merge.seek_before(end).await;
        self.backward_from(outcome, yield_point).await
    }

    /// Moves to the next key, if there is one. At no entry it stays there. REQUIRES: if the last operation met damage, it moved forward.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    pub async fn next(&mut self, yield_point: &mut impl AsyncFnMut()) -> Result<(), EngineError> {
        let outcome = match self.resume() {
            ViewState::NoEntry => return Ok(()),
            ViewState::ShownForward | ViewState::Damaged(ViewResumption::Next) => self.merge.next().await,
            ViewState::ShownBackward => {
                self.held.is_held = false;
                self.merge.seek(Position::behind(&self.held.key)).await
            }
            ViewState::Damaged(ViewResumption::Prev | ViewResumption::NewestOfHeldKey) => {
                panic!("the view met damage while it moved back")
            }
        };
        self.forward_from(outcome, yield_point).await
    }

    /// Moves to the preceding key, if there is one. At no entry it stays there. REQUIRES: if the last operation met damage, it moved
    /// back.
    ///
    /// # Errors
    /// As for [`EntryCursor::seek`].
    pub async fn prev(&mut self, yield_point: &mut impl AsyncFnMut()) -> Result<(), EngineError> {
        let outcome = match self.resume() {
            ViewState::NoEntry => return Ok(()),
            ViewState::ShownForward => {
                let key = self.passed_key.take().expect("the key that is shown");
                self.held.is_held = false;
                self.merge.seek_before(Some(Position::before(&key))).await
            }
            ViewState::ShownBackward => {
                self.held.is_held = false;
                Ok(())
            }
            ViewState::Damaged(ViewResumption::Prev) => self.merge.prev().await,
            ViewState::Damaged(ViewResumption::NewestOfHeldKey) => {
                let sought = self.merge.next().await;
                self.hold_newest(sought).await?
            }
            ViewState::Damaged(ViewResumption::Next) => panic!("the view met damage while it moved forward"),
        };
        self.backward_from(outcome, yield_point).await
    }

    /// Begins an operation that depends on no other.
    fn begin(&mut self) {
        self.passed_key = None;
        self.held.is_held = false;
        self.resume();
    }

    /// Begins an operation. Gives the state before.
    fn resume(&mut self) -> ViewState {
        (self.unyielded, self.skipped) = (0, 0);
        std::mem::replace(&mut self.state, ViewState::NoEntry)
    }

    /// The outcome of an operation of the merge, from which the step would go on in this way.
    fn passed_on(
        &mut self,
        outcome: Result<(), EngineError>,
        resumption: ViewResumption,
    ) -> Result<(), EngineError> {
        if let Err(EngineError::Corrupt { .. }) = outcome {
            self.state = ViewState::Damaged(resumption);
            // The newer entries of the key may have been in that part.
            self.held.may_be_outdated = true;
        }
        outcome
    }

    /// An entry was examined: yields if the step has examined many.
    async fn pace(&mut self, yield_point: &mut impl AsyncFnMut()) {
        self.unyielded += 1;
        if self.unyielded >= ENTRIES_PER_YIELD {
            self.unyielded = 0;
            yield_point().await;
        }
    }

    /// Whether the entry hides the key; counted if so.
    fn hides(statistics: &mut ViewStatistics, entry: &TreeEntry<'_>, time: UnixTime) -> bool {
        let (is_tombstone, is_expired) = (entry.value == EntryValue::Tombstone, entry.expires_at <= time);
        statistics.skipped_tombstones += u64::from(is_tombstone);
        statistics.skipped_expired += u64::from(is_expired && !is_tombstone);
        is_tombstone || is_expired
    }

    fn choose_forward(&mut self) -> Option<ForwardChoice> {
        let entry = self.merge.entry()?;
        let entry_is_passed = self.passed_key.as_deref() == Some(entry.key);
        if self.bounds.upper.as_deref().is_some_and(|upper| entry.key >= upper) {
            return None;
        }
        let is_newer = entry.sequence > self.snapshot.sequence;
        if entry_is_passed || is_newer {
            self.statistics.skipped_versions += 1;
            self.skipped += 1;
            if self.skipped < SKIPS_BEFORE_SEEK {
                return Some(ForwardChoice::Skip);
            }
            self.skipped = 0;
            self.statistics.seeks += 1;
            return Some(match entry_is_passed {
                true => ForwardChoice::SeekBehindKey,
                false => ForwardChoice::SeekSnapshot,
            });
        }
        self.skipped = 0;
        let passed_key = self.passed_key.get_or_insert_default();
        passed_key.clear();
        passed_key.extend_from_slice(entry.key);
        Some(match Self::hides(&mut self.statistics, &entry, self.snapshot.time) {
            true => ForwardChoice::Skip,
            false => ForwardChoice::Show,
        })
    }

    /// Goes on forward after an operation of the merge, to the next entry to be shown.
    async fn forward_from(
        &mut self,
        mut outcome: Result<(), EngineError>,
        yield_point: &mut impl AsyncFnMut(),
    ) -> Result<(), EngineError> {
        loop {
            self.passed_on(outcome, ViewResumption::Next)?;
            outcome = match self.choose_forward() {
                None => return Ok(()),
                Some(ForwardChoice::Show) => {
                    self.state = ViewState::ShownForward;
                    return Ok(());
                }
                Some(ForwardChoice::Skip) => self.merge.next().await,
                Some(ForwardChoice::SeekBehindKey) => {
                    let key = self.passed_key.as_deref().unwrap_or_default();
                    self.merge.seek(Position::behind(key)).await
                }
                Some(ForwardChoice::SeekSnapshot) => {
                    let key = self.merge.entry().map(|entry| entry.key.to_vec()).unwrap_or_default();
                    self.merge.seek(Position { key: &key, sequence: self.snapshot.sequence }).await
                }
            };
            self.pace(yield_point).await;
        }
    }

    /// Holds the merge's current entry as the newest of its key so far.
    fn hold_current(&mut self) {
        let Some(entry) = self.merge.entry() else { return };
        let is_hidden = Self::hides(&mut self.statistics, &entry, self.snapshot.time);
        self.held.hold(&entry, is_hidden, self.merge.may_be_outdated());
    }

    /// Holds the newest entry of the held key, which the merge has sought forward. Gives the outcome of the way back.
    async fn hold_newest(
        &mut self,
        sought: Result<(), EngineError>,
    ) -> Result<Result<(), EngineError>, EngineError> {
        self.passed_on(sought, ViewResumption::NewestOfHeldKey)?;
        if self.merge.entry().is_some_and(|newest| newest.key == self.held.key) {
            self.hold_current();
        }
        Ok(self.merge.seek_before(Some(Position::before(&self.held.key))).await)
    }

    /// Goes on backward after an operation of the merge, to the preceding entry to be shown.
    async fn backward_from(
        &mut self,
        mut outcome: Result<(), EngineError>,
        yield_point: &mut impl AsyncFnMut(),
    ) -> Result<(), EngineError> {
        loop {
            self.passed_on(outcome, ViewResumption::Prev)?;
            let lower = &*self.bounds.lower;
            let entry = self.merge.entry().filter(|entry| entry.key >= lower);
            let is_of_held_key = entry.is_some_and(|entry| self.held.is_held && entry.key == self.held.key);
            if !is_of_held_key && self.held.is_held {
                if !self.held.is_hidden {
                    self.state = ViewState::ShownBackward;
                    return Ok(());
                }
                self.held.is_held = false;
            }
            let Some(entry) = entry else { return Ok(()) };
            let is_newer = entry.sequence > self.snapshot.sequence;
            let skips_one = is_newer || is_of_held_key;
            self.statistics.skipped_versions += u64::from(skips_one);
            self.skipped = if skips_one { self.skipped + 1 } else { 0 };
            let seeks = self.skipped >= SKIPS_BEFORE_SEEK;
            outcome = match (is_newer, seeks) {
                (true, false) => self.merge.prev().await,
                (true, true) => {
                    let key = entry.key.to_vec();
                    self.skipped = 0;
                    self.statistics.seeks += 1;
                    self.merge.seek_before(Some(Position::before(&key))).await
                }
                (false, false) => {
                    self.hold_current();
                    self.merge.prev().await
                }
                (false, true) => {
                    self.skipped = 0;
                    self.statistics.seeks += 1;
                    let newest = Position { key: &self.held.key, sequence: self.snapshot.sequence };
                    let sought = self.merge.seek(newest).await;
                    self.hold_newest(sought).await?
                }
            };
            self.pace(yield_point).await;
        }
    }
}
