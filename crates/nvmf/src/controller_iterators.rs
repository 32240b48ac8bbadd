//! The iterators of one controller: which there are, by the identifiers that its host knows.
//!
//! In: iterators that an engine created, and the commands that name them. Out: the iterator of an identifier. Invariants: an
//! identifier belongs to one iterator of one namespace, and is not given again before all others were; an iterator ends when its
//! entry here is gone and no command uses it. At most `iterators_max` at a time.

use crate::io_request::IteratorHandle;
use crate::iterator_turns::IteratorTurns;
use octokv_base::{NamespaceId, Nanos};
use std::collections::BTreeMap;
use std::sync::Arc;

#[derive(Debug)]
struct ControllerIterator {
    handle: IteratorHandle,
    turns: Arc<IteratorTurns>,
    namespace: NamespaceId,
    used_at: Nanos,
}

/// The iterators of one controller.
#[derive(Debug, Default)]
pub(crate) struct ControllerIterators {
    iterators: BTreeMap<u32, ControllerIterator>,
    last_id: u32,
}

impl ControllerIterators {
    /// The number of iterators.
    pub fn len(&self) -> usize {
        self.iterators.len()
    }

    /// Keeps an iterator, and gives its identifier, never 0.
    pub fn add(&mut self, handle: IteratorHandle, namespace: NamespaceId, now: Nanos) -> u32 {
        loop {
            self.last_id = self.last_id.wrapping_add(1).max(1);
            if !self.iterators.contains_key(&self.last_id) {
                break;
            }
        }
        let added = ControllerIterator { handle, turns: Arc::default(), namespace, used_at: now };
        self.iterators.insert(self.last_id, added);
        self.last_id
    }

    /// The iterator of an identifier on a namespace, which is used now, with its turns.
    pub fn find(
        &mut self,
        id: u32,
        namespace: NamespaceId,
        now: Nanos,
    ) -> Option<(IteratorHandle, Arc<IteratorTurns>)> {
        let found = self.iterators.get_mut(&id).filter(|iterator| iterator.namespace == namespace)?;
        found.used_at = found.used_at.max(now);
        Some((found.handle.clone(), Arc::clone(&found.turns)))
    }

    /// Removes an iterator. The caller drops it, not under the lock of these: its end may take a while.
    #[must_use]
    pub fn remove(&mut self, id: u32, namespace: NamespaceId) -> Option<IteratorHandle> {
        self.find(id, namespace, Nanos::ZERO)?;
        self.iterators.remove(&id).map(|iterator| iterator.handle)
    }

    /// Removes those of a namespace.
    #[must_use]
    pub fn remove_of(&mut self, namespace: NamespaceId) -> Vec<IteratorHandle> {
        self.remove_if(|iterator| iterator.namespace == namespace)
    }

    /// Removes those that were last used before `before`.
    #[must_use]
    pub fn remove_idle(&mut self, before: Nanos) -> Vec<IteratorHandle> {
        self.remove_if(|iterator| iterator.used_at < before)
    }

    fn remove_if(&mut self, is_removed: impl Fn(&ControllerIterator) -> bool) -> Vec<IteratorHandle> {
        let mut removed = Vec::new();
        self.iterators.retain(|_, iterator| {
            let is_kept = !is_removed(iterator);
            if !is_kept {
                removed.push(iterator.handle.clone());
            }
            is_kept
        });
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: NamespaceId = NamespaceId(1);
    const TWO: NamespaceId = NamespaceId(2);

    fn handle() -> IteratorHandle {
        IteratorHandle(Arc::new(()))
    }

    #[test]
    fn an_identifier_is_given_again_after_all_others_and_never_while_in_use() {
        let mut iterators = ControllerIterators::default();
        assert_eq!([(); 3].map(|()| iterators.add(handle(), ONE, Nanos::ZERO)), [1, 2, 3]);
        assert!(iterators.remove(2, ONE).is_some());
        assert_eq!(iterators.add(handle(), ONE, Nanos::ZERO), 4);
        iterators.last_id = u32::MAX - 1;
        assert_eq!([(); 3].map(|()| iterators.add(handle(), ONE, Nanos::ZERO)), [u32::MAX, 2, 5]);
        assert_eq!(iterators.len(), 6);
    }

    #[test]
    fn an_iterator_is_found_on_its_namespace_until_it_is_removed() {
        let mut iterators = ControllerIterators::default();
        let (kept, ended) = (handle(), handle());
        let kept_id = iterators.add(kept.clone(), ONE, Nanos::ZERO);
        let ended_id = iterators.add(ended.clone(), TWO, Nanos::ZERO);
        assert!(iterators.find(kept_id, TWO, Nanos::ZERO).is_none());
        assert!(iterators.remove(kept_id, TWO).is_none());
        assert_eq!(iterators.remove_of(TWO).len(), 1);
        assert_eq!((Arc::strong_count(&kept.0), Arc::strong_count(&ended.0)), (2, 1));
        assert!(iterators.find(ended_id, TWO, Nanos::ZERO).is_none());
        assert!(iterators.find(kept_id, ONE, Nanos::ZERO).is_some());
    }

    #[test]
    fn those_that_were_not_used_for_long_are_removed() {
        let mut iterators = ControllerIterators::default();
        let [used, idle] = [(); 2].map(|()| iterators.add(handle(), ONE, Nanos(10)));
        assert!(iterators.find(used, ONE, Nanos(20)).is_some());
        assert!(iterators.remove_idle(Nanos(10)).is_empty());
        assert_eq!(iterators.remove_idle(Nanos(11)).len(), 1);
        assert!(iterators.find(idle, ONE, Nanos(21)).is_none());
        assert!(iterators.find(used, ONE, Nanos(5)).is_some(), "time that goes back makes none older");
        assert!(iterators.remove_idle(Nanos(20)).is_empty());
    }
}
