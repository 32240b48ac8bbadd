//! An iterator over the snapshots of several devices: pages of pairs of each, merged in the order of keys.
//!
//! In: one core's handles, of which any may advance it. Out: pairs in the order of keys. Invariants: calls are served one at a time, in their order; a pair stays in
//! its page until a sink has received it. Memory: for each device a page of [`PAGE_BYTES`], or one pair that is longer.

use crate::common::key_locks::KeyLocks;
use crate::{Engine, EngineError, IteratorProgress, PairSink};
use octokv_base::Key;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// The pairs of a page, in bytes of keys and values, unless it is one alone.
const PAGE_BYTES: usize = 64 << 10;

/// See the module header.
pub struct SpannedIterator<I> {
    /// Of each device.
    parts: Vec<IteratorPart<I>>,
    reverse: bool,
    /// One call at a time, in their order.
    turns: KeyLocks,
    /// The error of a device that ended a call whose sink had received pairs: the next call's.
    failure: Mutex<Option<EngineError>>,
}

/// The iterator of one device, and what was read of it.
struct IteratorPart<I> {
    iterator: I,
    page: Mutex<PairPage>,
}

/// A key and its value.
type OwnedPair = (Box<[u8]>, Box<[u8]>);

/// Pairs of one device that no sink has received.
#[derive(Default)]
struct PairPage {
    pairs: VecDeque<OwnedPair>,
    bytes: usize,
    is_at_end: bool,
}

impl PairPage {
    /// Whether its device has to be asked for the next pair.
    fn is_used_up(&self) -> bool {
        self.pairs.is_empty() && !self.is_at_end
    }

    /// Removes the first pair.
    fn pop(&mut self) {
        if let Some((key, value)) = self.pairs.pop_front() {
            self.bytes -= key.len() + value.len();
        }
    }
}

impl PairSink for PairPage {
    fn has_space(&mut self, key_bytes: usize, value_bytes: usize) -> bool {
        self.pairs.is_empty() || self.bytes + key_bytes + value_bytes <= PAGE_BYTES
    }

    fn push(&mut self, key: &[u8], value: &[u8]) {
        self.bytes += key.len() + value.len();
        self.pairs.push_back((key.into(), value.into()));
    }
}

impl<I> SpannedIterator<I> {
    /// An iterator over these, one of each device in the order of their handles, which are at their beginnings.
    pub(super) fn new(iterators: Vec<I>, reverse: bool) -> SpannedIterator<I> {
        let part = |iterator| IteratorPart { iterator, page: Mutex::default() };
        SpannedIterator {
            parts: iterators.into_iter().map(part).collect(),
            reverse,
            turns: KeyLocks::default(),
            failure: Mutex::default(),
        }
    }

    /// The part whose next pair comes first; `None` if none has a pair.
    fn first_part(&self) -> Option<&IteratorPart<I>> {
        let first = |part: &IteratorPart<I>| part.page.lock().pairs.front().map(|(key, _)| key.clone());
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
    async fn fill<E: Engine<Iterator = I>>(&self, engines: &[&E]) -> Result<(), EngineError> {
        for (part, engine) in self.parts.iter().zip(engines) {
            if part.page.lock().is_used_up() {
                let mut page = PairPage::default();
                let progress = engine.next_pairs(&part.iterator, &mut page).await?;
                page.is_at_end = progress == IteratorProgress::AtEnd;
                *part.page.lock() = page;
            }
        }
        Ok(())
    }

    /// [`Engine::next_pairs`]. `engines` are the handles of a core.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn next_pairs<E: Engine<Iterator = I>>(
        &self,
        engines: &[&E],
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        let _turn = self.turns.lock(0).await;
        if let Some(error) = self.failure.lock().take() {
            return Err(error);
        }
        let mut has_received = false;
        loop {
            sink.yield_point().await;
            match self.fill(engines).await {
                Ok(()) => {}
                Err(error) if has_received => {
                    *self.failure.lock() = Some(error);
                    return Ok(IteratorProgress::HasNext);
                }
                Err(error) => return Err(error),
            }
            // Until a page is used up: the next one may have the first pair.
            while !self.parts.iter().any(|part| part.page.lock().is_used_up()) {
                let Some(part) = self.first_part() else { return Ok(IteratorProgress::AtEnd) };
                let mut page = part.page.lock();
                let (key, value) = &page.pairs[0];
                if !sink.has_space(key.len(), value.len()) {
                    return Ok(IteratorProgress::HasNext);
                }
                sink.push(key, value);
                has_received = true;
                page.pop();
            }
        }
    }

    /// [`Engine::seek_iterator`]. `engines` are the handles of a core.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn seek<E: Engine<Iterator = I>>(
        &self,
        engines: &[&E],
        key: &Key,
    ) -> Result<(), EngineError> {
        let _turn = self.turns.lock(0).await;
        *self.failure.lock() = None;
        for (part, engine) in self.parts.iter().zip(engines) {
            *part.page.lock() = PairPage::default();
            engine.seek_iterator(&part.iterator, key).await?;
        }
        Ok(())
    }
}
