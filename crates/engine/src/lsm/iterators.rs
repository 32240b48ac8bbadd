//! The operations on iterators: create, advance, seek; and listings, which are iterators over keys for one call.
//!
//! In: an iterator, of which any core may serve a call, one at a time and in their order. Out: pairs into a sink. Invariant: the place of an iterator is behind the
//! last pair that a sink received, whatever was read ahead.

use super::core::LsmCore;
use super::iterator_list::IteratorPlace;
use super::tree_iterator::TreeIterator;
use crate::bug_injection::{self, InjectedBug};
use crate::{EngineError, IteratorOptions, IteratorProgress, KeySink, PairSink};
use octokv_base::Key;
use std::future::poll_fn;

impl LsmCore {
    /// [`Engine::create_iterator`](crate::Engine::create_iterator).
    pub(super) fn create_iterator(&self, options: IteratorOptions) -> Option<TreeIterator> {
        self.drop_ended_views();
        TreeIterator::create(&self.volume, options)
    }

    /// [`Engine::keep_iterator`](crate::Engine::keep_iterator).
    pub(super) fn keep_iterator(&self, iterator: &TreeIterator) {
        // The beginning of a use is what counts.
        drop(iterator.state.snapshot.begin_use(self.volume.time()));
    }

    /// [`Engine::next_pairs`](crate::Engine::next_pairs).
    ///
    /// # Errors
    /// As there, and [`EngineError::IteratorExpired`].
    pub(super) async fn next_pairs(
        &self,
        iterator: &TreeIterator,
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        self.drop_ended_views();
        let state = &iterator.state;
        let _turn = state.turn().await;
        let snapshot_use = state.snapshot.begin_use(self.volume.time());
        let (Some(_snapshot_use), Some(sources)) = (snapshot_use, state.sources()) else {
            return Err(EngineError::IteratorExpired);
        };
        let (mut place, number) = state.place.lock().clone();
        let kept = self.views.borrow_mut().take(state.id, number);
        // A view that was opened anew meets what was reported at this place once more.
        let was_reported = place.is_damage_reported() && kept.is_none();
        let mut yield_point = async || sink.yield_point().await;
        let mut view = match kept {
            Some(view) => view,
            None => self.open_view(state, sources, &place, &mut yield_point).await,
        };
        let (mut has_received, mut has_passed, mut is_between_pairs) = (false, false, false);
        // The key of the last pair, if that was not copied.
        let (mut last_key, mut is_behind_last) = (Vec::new(), false);
        let outcome = loop {
            let mut yield_point = async || sink.yield_point().await;
            if view.step_to_inline(&mut yield_point).await
                && let Some((key, value)) = view.inline_pair()
            {
                if !sink.has_space(key.len(), value.len()) {
                    break Ok(IteratorProgress::HasNext);
                }
                sink.push(key, value);
                last_key.clear();
                last_key.extend_from_slice(key);
                view.pass_inline();
                (has_received, has_passed, is_behind_last) = (true, true, true);
                continue;
            }
            let mut yield_point = async || sink.yield_point().await;
            match self.next_pair(&mut view, &mut yield_point).await {
                Ok(Some(pair)) if sink.has_space(pair.key.len(), pair.value_bytes) => {}
                Ok(Some(_)) => break Ok(IteratorProgress::HasNext),
                Ok(None) => {
                    (place, is_behind_last) = (IteratorPlace::End, false);
                    break Ok(IteratorProgress::AtEnd);
                }
                Err(EngineError::Corrupt { .. }) if was_reported && !has_passed => continue,
                Err(error) => {
                    is_between_pairs = true;
                    break Err(error);
                }
            }
            has_passed = true;
            let mut yield_point = async || sink.yield_point().await;
            let (key, taken) = self.take_pair(&mut view, &mut yield_point).await;
            match taken {
                Ok(ref value) => {
                    sink.push(&key, value.bytes());
                    has_received = true;
                }
                // Behind pairs, the next call reports it: another core's view may serve that.
                Err(EngineError::Corrupt { .. }) if !has_received => {}
                // It may succeed later: the pair is still the next.
                Err(error) => break Err(error),
            }
            (place, is_behind_last) = (IteratorPlace::Behind(key.into()), false);
            if let Err(error) = taken {
                break Err(error);
            }
        };
        if is_behind_last {
            place = IteratorPlace::Behind(last_key.into());
        }
        let is_passed = match outcome {
            Ok(_) => true,
            Err(error) => !has_received && matches!(error, EngineError::Corrupt { .. }),
        };
        if is_between_pairs && is_passed {
            place = place.behind_damage();
        }
        *state.place.lock() = (place, number + 1);
        if is_passed {
            state.note_view(self.core);
            self.views.borrow_mut().keep(state.id, number + 1, view);
        }
        match outcome {
            Err(_) if has_received => Ok(IteratorProgress::HasNext),
            outcome => outcome,
        }
    }

    /// [`Engine::seek_iterator`](crate::Engine::seek_iterator).
    ///
    /// # Errors
    /// As for [`LsmCore::next_pairs`].
    pub(super) async fn seek_iterator(&self, iterator: &TreeIterator, key: &Key) -> Result<(), EngineError> {
        let state = &iterator.state;
        let _turn = state.turn().await;
        if state.snapshot.begin_use(self.volume.time()).is_none() {
            return Err(EngineError::IteratorExpired);
        }
        let mut place = state.place.lock();
        let is_kept = bug_injection::is_injected(InjectedBug::KeepViewOverSeek);
        let number = if is_kept { place.1 } else { place.1 + 1 };
        *place = (IteratorPlace::From(key.as_bytes().into()), number);
        Ok(())
    }

    /// [`Engine::list`](crate::Engine::list): in the order of keys.
    ///
    /// # Errors
    /// As there.
    pub(super) async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        let lower = Some(start.clone()).filter(|start| !start.is_empty());
        let options = IteratorOptions { lower, keys_only: true, ..IteratorOptions::default() };
        // Too many iterators: the listing can be repeated.
        let iterator = self.create_iterator(options).ok_or(EngineError::NoMemory)?;
        let mut keys = ListedKeys { sink, has_space: true };
        loop {
            keys.sink.yield_point().await;
            match self.next_pairs(&iterator, &mut keys).await {
                Ok(IteratorProgress::HasNext) if keys.has_space => {}
                // Keys in parts that cannot be read are left out.
                Err(EngineError::Corrupt { .. }) => {}
                other => return other.map(drop),
            }
        }
    }

    /// Drops the views of iterators that have ended.
    pub(super) fn drop_ended_views(&self) {
        let list = &self.volume.iterators;
        self.drop_views(list.take_ended(self.core));
    }

    fn drop_views(&self, ended: Option<Vec<u64>>) {
        let list = &self.volume.iterators;
        match ended {
            Some(ended) if ended.is_empty() => {}
            Some(ended) => self.views.borrow_mut().drop_ended(|id| ended.contains(&id)),
            None => self.views.borrow_mut().drop_ended(|id| !list.has(id)),
        }
    }

    /// Drops views when their iterators end; never ends itself.
    pub(super) async fn run_views(&self) {
        loop {
            let ended = poll_fn(|context| self.volume.iterators.poll_ended(self.core, context)).await;
            self.drop_views(ended);
        }
    }
}

/// The keys of a listing.
struct ListedKeys<'a, S> {
    sink: &'a mut S,
    has_space: bool,
}

impl<S: KeySink> PairSink for ListedKeys<'_, S> {
    fn has_space(&mut self, _key_bytes: usize, _value_bytes: usize) -> bool {
        self.has_space
    }

    fn push(&mut self, key: &[u8], _value: &[u8]) {
        self.has_space = self.sink.offer(key);
    }

    async fn yield_point(&mut self) {
        self.sink.yield_point().await;
    }
}
