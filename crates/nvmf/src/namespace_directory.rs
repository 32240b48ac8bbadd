//! The namespaces of a target and the ANA states of their groups, as immutable snapshots.
//!
//! In: added and removed namespaces, and ANA states. Out: a [`NamespaceSnapshot`]; each change makes a new
//! one with a higher generation. A connection keeps its snapshot and compares generations at each command,
//! so no command takes a lock.
//!
//! Invariants: within a snapshot identifiers ascend, and identifiers and NGUIDs are unique; a namespace
//! that reuses an identifier has another serial number; every namespace's ANA group is in the snapshot.

use crate::namespace_info::{ANA_GROUPS_MAX, NamespaceInfo};
use octokv_base::{NamespaceId, SharedSum};
use octokv_wire::Status;
use octokv_wire::log_page::AnaState;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A namespace could not be added: its identifier or NGUID is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("namespace {id} exists with this identifier or NGUID")]
pub struct NamespaceExists {
    /// The identifier of the namespace that uses it.
    pub id: NamespaceId,
}

/// A namespace of a snapshot.
#[derive(Clone, Debug)]
pub(crate) struct NamespaceEntry {
    pub info: NamespaceInfo,
    /// Distinguishes namespaces that have the same identifier one after another.
    pub serial: u64,
    /// The status of the namespace's I/O commands while its ANA group is not accessible.
    pub ana_error: Option<Status>,
}

/// The ANA state of a group of namespaces.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnaGroupState {
    pub state: AnaState,
    /// Changes of the group's state or members; 1 for a new group.
    pub change_count: u64,
}

/// An immutable view of the namespaces, by ascending identifier, and of their ANA groups.
#[derive(Clone, Debug, Default)]
pub struct NamespaceSnapshot {
    generation: u64,
    entries: Vec<NamespaceEntry>,
    groups: BTreeMap<u32, AnaGroupState>,
    /// Changes of all groups since the target was created, from 0.
    ana_change_count: u64,
}

/// The status of I/O commands to a group in this state; `None` if they are executed.
fn ana_error_status(state: AnaState) -> Option<Status> {
    match state {
        AnaState::Optimized | AnaState::NonOptimized => None,
        AnaState::Inaccessible => Some(Status::ANA_INACCESSIBLE),
        AnaState::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
        AnaState::Change => Some(Status::ANA_TRANSITION),
    }
}

impl NamespaceSnapshot {
    /// All namespaces, by ascending identifier.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &NamespaceInfo> {
        self.entries.iter().map(|entry| &entry.info)
    }

    /// The number of namespaces.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no namespaces.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The namespace with this identifier.
    pub fn get(&self, id: NamespaceId) -> Option<&NamespaceInfo> {
        self.entry(id).map(|entry| &entry.info)
    }

    #[inline]
    pub(crate) fn entry(&self, id: NamespaceId) -> Option<&NamespaceEntry> {
        // Usually the identifiers are 1, 2, 3, …
        if let Some(entry) = self.entries.get((id.0 as usize).wrapping_sub(1))
            && entry.info.id == id
        {
            return Some(entry);
        }
        let index = self.entries.binary_search_by_key(&id, |entry| entry.info.id).ok()?;
        Some(&self.entries[index])
    }

    /// The groups that have had a namespace or were given a state, by ascending identifier.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (u32, AnaGroupState)> {
        self.groups.iter().map(|(&id, &group)| (id, group))
    }

    /// Changes of all groups since the target was created, from 1.
    pub(crate) fn ana_change_count(&self) -> u64 {
        self.ana_change_count + 1
    }

    fn add(&mut self, info: NamespaceInfo) -> Result<(), NamespaceExists> {
        if let Some(existing) = self.iter().find(|other| other.id == info.id || other.nguid == info.nguid) {
            return Err(NamespaceExists { id: existing.id });
        }
        let state = self.record_group_change(info.ana_group).state;
        let at = self.entries.partition_point(|entry| entry.info.id < info.id);
        let entry = NamespaceEntry { info, serial: self.generation, ana_error: ana_error_status(state) };
        self.entries.insert(at, entry);
        Ok(())
    }

    /// Returns whether there is the namespace.
    fn resize(&mut self, id: NamespaceId, size_bytes: u64, used_bytes: SharedSum) -> bool {
        let found = self.entries.iter_mut().find(|entry| entry.info.id == id);
        found.map(|entry| (entry.info.size_bytes, entry.info.used_bytes) = (size_bytes, used_bytes)).is_some()
    }

    fn remove(&mut self, id: NamespaceId) -> Option<NamespaceInfo> {
        let index = self.entries.binary_search_by_key(&id, |entry| entry.info.id).ok()?;
        let entry = self.entries.remove(index);
        self.record_group_change(entry.info.ana_group);
        Some(entry.info)
    }

    /// Returns whether the state has changed.
    fn set_ana_state(&mut self, id: u32, state: AnaState) -> bool {
        assert!((1..=ANA_GROUPS_MAX).contains(&id), "ANA group {id} is not in 1 to {ANA_GROUPS_MAX}");
        let before = self.groups.get(&id).map_or(AnaState::Optimized, |group| group.state);
        if before == state {
            return false;
        }
        self.record_group_change(id).state = state;
        let members = self.entries.iter_mut().filter(|entry| entry.info.ana_group == id);
        members.for_each(|entry| entry.ana_error = ana_error_status(state));
        true
    }

    fn record_group_change(&mut self, id: u32) -> &mut AnaGroupState {
        self.ana_change_count += 1;
        let group =
            self.groups.entry(id).or_insert(AnaGroupState { state: AnaState::Optimized, change_count: 0 });
        group.change_count += 1;
        group
    }
}

/// The current snapshot, shared by all cores.
#[derive(Debug)]
pub(crate) struct NamespaceDirectory {
    generation: AtomicU64,
    current: Mutex<Arc<NamespaceSnapshot>>,
}

impl NamespaceDirectory {
    /// The directory of a new subsystem.
    ///
    /// # Errors
    /// If two of the namespaces have the same identifier.
    pub fn new(all: Vec<NamespaceInfo>) -> Result<NamespaceDirectory, NamespaceExists> {
        let directory = NamespaceDirectory {
            generation: AtomicU64::new(0),
            current: Mutex::new(Arc::new(NamespaceSnapshot::default())),
        };
        let mut first = NamespaceSnapshot::default();
        for info in all {
            first.generation += 1;
            first.add(info)?;
        }
        // The initial namespaces do not count as changes.
        first.ana_change_count = 0;
        first.groups.values_mut().for_each(|group| group.change_count = 1);
        directory.generation.store(first.generation, Ordering::Release);
        *directory.current.lock() = Arc::new(first);
        Ok(directory)
    }

    /// The current snapshot. Takes a lock.
    pub fn snapshot(&self) -> Arc<NamespaceSnapshot> {
        Arc::clone(&self.current.lock())
    }

    /// Replaces `known` with the current snapshot. Costs one atomic load if it is current.
    #[inline]
    pub fn refresh(&self, known: &mut Arc<NamespaceSnapshot>) {
        if known.generation != self.generation.load(Ordering::Acquire) {
            *known = self.snapshot();
        }
    }

    /// Adds a namespace in a new snapshot.
    ///
    /// # Errors
    /// If the identifier is in use.
    pub fn add(&self, info: NamespaceInfo) -> Result<(), NamespaceExists> {
        self.update(|directory| directory.add(info))
    }

    /// Returns whether there is the namespace.
    pub fn resize(&self, id: NamespaceId, size_bytes: u64, used_bytes: SharedSum) -> bool {
        self.update(|directory| directory.resize(id, size_bytes, used_bytes))
    }

    pub fn remove(&self, id: NamespaceId) -> Option<NamespaceInfo> {
        self.update(|directory| directory.remove(id))
    }

    /// Returns whether the state has changed.
    pub fn set_ana_state(&self, group: u32, state: AnaState) -> bool {
        self.update(|directory| directory.set_ana_state(group, state))
    }

    fn update<R>(&self, change: impl FnOnce(&mut NamespaceSnapshot) -> R) -> R {
        let current = &mut *self.current.lock();
        let mut next = NamespaceSnapshot::clone(current);
        next.generation += 1;
        let result = change(&mut next);
        let generation = next.generation;
        *current = Arc::new(next);
        self.generation.store(generation, Ordering::Release);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace_info::NamespaceKind;

    fn info(id: u32, ana_group: u32) -> NamespaceInfo {
        NamespaceInfo {
            id: NamespaceId(id),
            nguid: [id as u8; 16],
            size_bytes: 1 << 20,
            used_bytes: SharedSum::default(),
            kind: NamespaceKind::Block { block_bytes: 512 },
            ana_group,
            tokens: None,
        }
    }

    fn ids(directory: &NamespaceDirectory) -> Vec<u32> {
        directory.snapshot().iter().map(|info| info.id.0).collect()
    }

    #[test]
    fn namespaces_stay_in_order_and_unique() {
        let directory = NamespaceDirectory::new(vec![info(5, 1), info(2, 1)]).unwrap();
        directory.add(info(3, 1)).unwrap();
        assert_eq!(ids(&directory), [2, 3, 5]);
        assert_eq!(directory.add(info(3, 2)), Err(NamespaceExists { id: NamespaceId(3) }));
        let twin = NamespaceInfo { id: NamespaceId(9), ..info(5, 1) };
        assert_eq!(directory.add(twin), Err(NamespaceExists { id: NamespaceId(5) }));
        assert_eq!(directory.remove(NamespaceId(5)).unwrap().id, NamespaceId(5));
        assert!(directory.remove(NamespaceId(5)).is_none());
        assert_eq!(ids(&directory), [2, 3]);
        let current = directory.snapshot();
        assert!(current.get(NamespaceId(3)).is_some() && current.get(NamespaceId(0)).is_none());
    }

    #[test]
    fn a_known_table_is_replaced_only_by_a_change() {
        let directory = NamespaceDirectory::new(vec![info(1, 1)]).unwrap();
        let mut known = directory.snapshot();
        let serial = known.entry(NamespaceId(1)).unwrap().serial;
        let same = Arc::clone(&known);
        directory.refresh(&mut known);
        assert!(Arc::ptr_eq(&known, &same));
        directory.remove(NamespaceId(1)).unwrap();
        directory.add(info(1, 1)).unwrap();
        directory.refresh(&mut known);
        assert_ne!(
            known.entry(NamespaceId(1)).unwrap().serial,
            serial,
            "a reused identifier has another serial number"
        );
        assert!(same.get(NamespaceId(1)).is_some(), "an old snapshot stays readable");
    }

    #[test]
    fn a_group_state_applies_to_its_namespaces_and_changes_are_counted() {
        let directory = NamespaceDirectory::new(vec![info(1, 1), info(2, 2)]).unwrap();
        let group = |id| directory.snapshot().groups().find(|group| group.0 == id).unwrap().1;
        assert_eq!(
            (directory.snapshot().ana_change_count(), group(1).change_count, group(2).change_count),
            (1, 1, 1)
        );
        let ana_error = |id| directory.snapshot().entry(NamespaceId(id)).unwrap().ana_error;
        let states = [
            (AnaState::NonOptimized, None),
            (AnaState::Inaccessible, Some(Status::ANA_INACCESSIBLE)),
            (AnaState::PersistentLoss, Some(Status::ANA_PERSISTENT_LOSS)),
            (AnaState::Change, Some(Status::ANA_TRANSITION)),
            (AnaState::Optimized, None),
        ];
        for (state, want) in states {
            assert!(directory.set_ana_state(2, state));
            assert!(!directory.set_ana_state(2, state), "the same state again is no change");
            assert_eq!((ana_error(1), ana_error(2)), (None, want));
        }
        assert_eq!(
            (directory.snapshot().ana_change_count(), group(1).change_count, group(2).change_count),
            (6, 1, 6)
        );
        directory.set_ana_state(2, AnaState::Inaccessible);
        directory.add(info(3, 2)).unwrap();
        assert_eq!(ana_error(3), Some(Status::ANA_INACCESSIBLE), "a new member has its group's state");
        assert_eq!(group(2).change_count, 8);
    }
}
