//! An iterator over the snapshots of several devices: pages of pairs of each, merged in the order of keys.
//!
//! ```text
//!   device 0   page ─┐
//!   device 1   page ─┼─ first of all ─▶ sink       a page without pairs: the next one of its device
//!   device 2   page ─┘                             the call returns: what the sink received leaves the pages
//! ```
//! In: one core's handles, of which any may advance it. Out: pairs in the order of keys. Invariants: calls are served one at a time, in their order; a pair stays in
//! its page until the call that delivers it has returned, so that a dropped call has done nothing. Memory: for each device a page of [`PAGE_BYTES`], or one pair that is longer, and during a call what it delivers; between
//! calls all iterators of a volume together keep [`KEPT_BYTES_MAX`], and those beyond give their pages back.

use super::partition_map::PartitionMap;
use super::places::PlacedMember;
use super::yield_points::{PairCaller, YieldingCaller};
use crate::common::key_locks::KeyLocks;
use crate::{Engine, EngineError, IteratorProgress, PairSink};
use octokv_base::{Key, RingPosition};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The pairs of a page, in bytes, unless it is one alone.
const PAGE_BYTES: usize = 64 << 10;
/// What the pages of all iterators of a volume keep between calls, in bytes.
const KEPT_BYTES_MAX: usize = 64 << 20;

/// The bytes that pages keep between calls.
#[derive(Default)]
pub(super) struct PageBudget(AtomicUsize);

/// See the module header.
pub struct SpannedIterator<I> {
    /// Of each device.
    parts: Vec<IteratorPart<I>>,
    /// The indices of the devices, and how often each had been replaced.
    devices: Vec<(usize, u8)>,
    kept: KeptPartitions,
    reverse: bool,
    /// One call at a time, in their order.
    turns: KeyLocks,
    /// The error of a device that ended a call whose sink had received pairs: the next call's.
    failure: Mutex<Option<EngineError>>,
    /// The key of a seek that has not ended.
    sought: Mutex<Option<Key>>,
    budget: Arc<PageBudget>,
    /// What it has of the budget.
    kept_bytes: AtomicUsize,
}

/// The iterator of one device, and a buffer of its next pairs.
struct IteratorPart<I> {
    iterator: I,
    page: Mutex<PairPage>,
}

/// The devices of keys, with the seed of positions, if a device may have had keys of others.
type KeptPartitions = Option<(PartitionMap, u64)>;

/// A key and its value.
type OwnedPair = (Box<[u8]>, Box<[u8]>);

/// Pairs of one device.
#[derive(Default)]
struct PairPage {
    pairs: VecDeque<OwnedPair>,
    /// Those at the front that the sink of the present call has.
    taken: usize,
    is_at_end: bool,
}

/// The memory of a pair, without what the allocator adds.
fn pair_bytes(key_bytes: usize, value_bytes: usize) -> usize {
    size_of::<OwnedPair>() + key_bytes + value_bytes
}

/// Receives a page of pairs.
struct PageSink<'a> {
    pairs: Vec<OwnedPair>,
    /// The device, and what it may have of others.
    device: usize,
    kept: &'a KeptPartitions,
    bytes: usize,
    caller: &'a mut dyn YieldingCaller,
}

impl PairPage {
    /// The first pair that no sink has.
    fn first(&self) -> Option<&OwnedPair> {
        self.pairs.get(self.taken)
    }

    /// Whether its device has to be asked for the next pair.
    fn is_used_up(&self) -> bool {
        self.first().is_none() && !self.is_at_end
    }

    fn bytes(&self) -> usize {
        self.pairs.iter().map(|(key, value)| pair_bytes(key.len(), value.len())).sum()
    }
}

impl PairSink for PageSink<'_> {
    fn has_space(&mut self, key_bytes: usize, value_bytes: usize) -> bool {
        self.pairs.is_empty() || self.bytes + pair_bytes(key_bytes, value_bytes) <= PAGE_BYTES
    }

    fn push(&mut self, key: &[u8], value: &[u8]) {
        if let Some((map, seed)) = self.kept
            && map.device_of(RingPosition::of_bytes(key, *seed)) != self.device
        {
            return;
        }
        self.bytes += pair_bytes(key.len(), value.len());
        self.pairs.push((key.into(), value.into()));
    }

    async fn yield_point(&mut self) {
        self.caller.yield_point().await;
    }
}

impl<I> SpannedIterator<I> {
    /// An iterator over these, one of each device in the order of their handles, which are at their beginnings.
    pub(super) fn new(
        iterators: Vec<I>,
        (devices, kept): (Vec<(usize, u8)>, KeptPartitions),
        reverse: bool,
        budget: Arc<PageBudget>,
    ) -> SpannedIterator<I> {
        let part = |iterator| IteratorPart { iterator, page: Mutex::default() };
        SpannedIterator {
            parts: iterators.into_iter().map(part).collect(),
            devices,
            kept,
            reverse,
            turns: KeyLocks::default(),
            failure: Mutex::default(),
            sought: Mutex::default(),
            budget,
            kept_bytes: AtomicUsize::new(0),
        }
    }

    /// The devices that it has, and how often each had been replaced when it was created.
    pub(super) fn devices(&self) -> impl Iterator<Item = (usize, u8)> + '_ {
        self.devices.iter().copied()
    }

    /// The part whose next pair comes first; `None` if none has a pair.
    fn first_part(&self) -> Option<&IteratorPart<I>> {
        let first = |part: &IteratorPart<I>| part.page.lock().first().map(|(key, _)| key.clone());
        let keyed = self.parts.iter().filter_map(|part| Some((first(part)?, part)));
        let chosen = match self.reverse {
            false => keyed.min_by(|(a, _), (b, _)| a.cmp(b)),
            true => keyed.max_by(|(a, _), (b, _)| a.cmp(b)),
        };
        chosen.map(|(_, part)| part)
    }

    /// Reads a page of each part that has no pair left.
    ///
    /// # Errors
    /// The first of a device.
    async fn fill<E: Engine<Iterator = I>>(
        &self,
        members: &[PlacedMember<E>],
        caller: &mut dyn YieldingCaller,
    ) -> Result<(), EngineError> {
        for (part, member) in self.parts.iter().zip(members) {
            if part.page.lock().is_used_up() {
                let (device, kept) = (member.index(), &self.kept);
                let mut sink = PageSink { pairs: Vec::new(), device, kept, bytes: 0, caller: &mut *caller };
                let progress = member.engine().next_pairs(&part.iterator, &mut sink).await;
                let progress = progress.map_err(|error| member.engine_error(error))?;
                let mut page = part.page.lock();
                page.pairs.extend(sink.pairs);
                page.is_at_end = progress == IteratorProgress::AtEnd;
            }
        }
        Ok(())
    }

    /// [`Engine::keep_iterator`]: of the parts whose pages are read slowly, too. `members` are the handles of a core.
    pub(super) fn keep<E: Engine<Iterator = I>>(&self, members: &[PlacedMember<E>]) {
        for (part, member) in self.parts.iter().zip(members) {
            member.engine().keep_iterator(&part.iterator);
        }
    }

    /// [`Engine::next_pairs`]. `members` are the handles of a core.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn next_pairs<E: Engine<Iterator = I>>(
        &self,
        members: &[PlacedMember<E>],
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        let _turn = self.turns.lock(0).await;
        self.keep(members);
        self.finish_seek(members).await?;
        // Those of a call that was dropped, whose sink is gone.
        self.parts.iter().for_each(|part| part.page.lock().taken = 0);
        if let Some(error) = self.failure.lock().take() {
            return Err(error);
        }
        let delivered = self.deliver(members, sink).await;
        for part in &self.parts {
            let mut page = part.page.lock();
            let taken = std::mem::take(&mut page.taken);
            page.pairs.drain(..taken);
            let left = page.pairs.len();
            page.pairs.shrink_to(2 * left);
        }
        // REQUIRES of the engine: its seeks end in their first poll, or a call that is dropped here has lost what it delivered.
        let kept = self.keep_pages(members).await;
        let progress = delivered?;
        if let Err(error) = kept {
            *self.failure.lock() = Some(error);
            return Ok(IteratorProgress::HasNext);
        }
        Ok(progress)
    }

    /// Offers pairs until the sink has no space.
    async fn deliver<E: Engine<Iterator = I>>(
        &self,
        members: &[PlacedMember<E>],
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        let mut has_received = false;
        loop {
            sink.yield_point().await;
            match self.fill(members, &mut PairCaller(&mut *sink)).await {
                Ok(()) => {}
                Err(error) if has_received => {
                    // A device that failed is asked again; behind damage it goes on.
                    let is_passed = matches!(error, EngineError::Corrupt { .. });
                    *self.failure.lock() = is_passed.then_some(error);
                    return Ok(IteratorProgress::HasNext);
                }
                Err(error) => return Err(error),
            }
            // Until a page is used up: the next one may have the first pair.
            while !self.parts.iter().any(|part| part.page.lock().is_used_up()) {
                let Some(part) = self.first_part() else { return Ok(IteratorProgress::AtEnd) };
                let mut page = part.page.lock();
                let (key, value) = page.first().expect("it has the first pair");
                if !sink.has_space(key.len(), value.len()) {
                    return Ok(IteratorProgress::HasNext);
                }
                sink.push(key, value);
                has_received = true;
                page.taken += 1;
            }
        }
    }

    /// Counts what the pages keep until the next call. Beyond the budget each part goes back to its first pair, which is then read again.
    ///
    /// # Errors
    /// Of a seek: what has expired.
    async fn keep_pages<E: Engine<Iterator = I>>(
        &self,
        members: &[PlacedMember<E>],
    ) -> Result<(), EngineError> {
        let bytes = self.parts.iter().map(|part| part.page.lock().bytes()).sum();
        if self.count_kept(bytes) <= KEPT_BYTES_MAX {
            return Ok(());
        }
        for (part, member) in self.parts.iter().zip(members) {
            let first = part.page.lock().first().map(|(key, _)| Key::new(key).expect("a key of the volume"));
            if let Some(key) = first {
                let sought = member.engine().seek_iterator(&part.iterator, &key).await;
                sought.map_err(|error| member.engine_error(error))?;
                *part.page.lock() = PairPage::default();
            }
        }
        self.count_kept(0);
        Ok(())
    }

    /// Notes that the pages keep so many bytes; gives those of all iterators.
    fn count_kept(&self, bytes: usize) -> usize {
        let before = self.kept_bytes.swap(bytes, Ordering::Relaxed);
        let of_others =
            self.budget.0.fetch_add(bytes.wrapping_sub(before), Ordering::Relaxed).wrapping_sub(before);
        of_others.wrapping_add(bytes)
    }

    /// [`Engine::seek_iterator`]. `members` are the handles of a core.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn seek<E: Engine<Iterator = I>>(
        &self,
        members: &[PlacedMember<E>],
        key: &Key,
    ) -> Result<(), EngineError> {
        let _turn = self.turns.lock(0).await;
        self.keep(members);
        *self.sought.lock() = Some(key.clone());
        self.finish_seek(members).await
    }

    /// Moves all parts to the key of a seek that has not ended, because it was dropped or a part failed.
    ///
    /// # Errors
    /// As for [`Engine::seek_iterator`].
    async fn finish_seek<E: Engine<Iterator = I>>(
        &self,
        members: &[PlacedMember<E>],
    ) -> Result<(), EngineError> {
        let Some(key) = self.sought.lock().clone() else { return Ok(()) };
        for (part, member) in self.parts.iter().zip(members) {
            let sought = member.engine().seek_iterator(&part.iterator, &key).await;
            sought.map_err(|error| member.engine_error(error))?;
            *part.page.lock() = PairPage::default();
        }
        (*self.failure.lock(), *self.sought.lock()) = (None, None);
        self.count_kept(0);
        Ok(())
    }
}

impl<I> Drop for SpannedIterator<I> {
    fn drop(&mut self) {
        self.count_kept(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iterators_share_what_their_pages_may_keep() {
        let budget = Arc::new(PageBudget::default());
        let iterator =
            || SpannedIterator::<()>::new(Vec::new(), (Vec::new(), None), false, Arc::clone(&budget));
        let (one, other) = (iterator(), iterator());
        assert_eq!((one.count_kept(10), other.count_kept(5), one.count_kept(3)), (10, 15, 8));
        drop(one);
        assert_eq!(other.count_kept(6), 6);
        drop(other);
        assert_eq!(budget.0.load(Ordering::Relaxed), 0);
    }
}
