//! The namespaces of a target at one time, and how they can be reached.
//!
//! In: namespaces that come and go, and states of the groups of asymmetric access. Out: a directory that
//! never changes, since each change makes a new one of a higher generation. A connection keeps the directory
//! that it knows and compares generations with each command, so that no command takes a lock.
//!
//! Invariants: identifiers rise and are unique, and so are NGUIDs; a namespace that takes the identifier of one that
//! was removed has another serial number; every namespace's group is in the directory.

use crate::namespace_info::{ANA_GROUPS_MAX, NamespaceInfo};
use octokv_base::NamespaceId;
use octokv_wire::Status;
use octokv_wire::log_page::AnaState;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A namespace was not added: its identifier or its NGUID is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceExists {
    /// Whose it is.
    pub id: NamespaceId,
}

impl std::fmt::Display for NamespaceExists {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "namespace {} exists with this identifier or NGUID", self.id.0)
    }
}

impl std::error::Error for NamespaceExists {}

/// A namespace in the directory.
#[derive(Clone, Debug)]
pub(crate) struct NamespaceEntry {
    pub info: NamespaceInfo,
    /// Tells it from another one that had, or will have, its identifier.
    pub serial: u64,
    /// What its I/O commands are answered with, where its group is not accessible.
    pub ana_error: Option<Status>,
}

/// A group of namespaces that change their access together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AnaGroupState {
    pub state: AnaState,
    /// Changes of its state or its members; 1 when it was new.
    pub change_count: u64,
}

/// The namespaces of a target at one time, by rising identifier.
#[derive(Clone, Debug, Default)]
pub struct NamespaceSnapshot {
    generation: u64,
    entries: Vec<NamespaceEntry>,
    groups: BTreeMap<u32, AnaGroupState>,
    /// Changes of any group; 1 when the target was new.
    ana_change_count: u64,
}

/// What the I/O commands of a group in this state are answered with, where they are not served.
fn ana_error_status(state: AnaState) -> Option<Status> {
    match state {
        AnaState::Optimized | AnaState::NonOptimized => None,
        AnaState::Inaccessible => Some(Status::ANA_INACCESSIBLE),
        AnaState::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
        AnaState::Change => Some(Status::ANA_TRANSITION),
    }
}

impl NamespaceSnapshot {
    /// All of them.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &NamespaceInfo> {
        self.entries.iter().map(|entry| &entry.info)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The namespace of this identifier.
    pub fn get(&self, id: NamespaceId) -> Option<&NamespaceInfo> {
        self.entry(id).map(|entry| &entry.info)
    }

    #[inline]
    pub(crate) fn entry(&self, id: NamespaceId) -> Option<&NamespaceEntry> {
        // Mostly the identifiers are 1, 2, 3, …
        if let Some(entry) = self.entries.get((id.0 as usize).wrapping_sub(1))
            && entry.info.id == id
        {
            return Some(entry);
        }
        let index = self.entries.binary_search_by_key(&id, |entry| entry.info.id).ok()?;
        Some(&self.entries[index])
    }

    /// The groups that have or had a namespace or were given a state, by rising identifier.
    pub(crate) fn groups(&self) -> impl Iterator<Item = (u32, AnaGroupState)> {
        self.groups.iter().map(|(&id, &group)| (id, group))
    }

    /// Changes of the groups since the target was new, from 1.
    pub(crate) fn ana_change_count(&self) -> u64 {
        self.ana_change_count + 1
    }

    fn add(&mut self, info: NamespaceInfo) -> Result<(), NamespaceExists> {
        if let Some(taken) = self.iter().find(|one| one.id == info.id || one.nguid == info.nguid) {
            return Err(NamespaceExists { id: taken.id });
        }
        let state = self.record_group_change(info.ana_group).state;
        let at = self.entries.partition_point(|entry| entry.info.id < info.id);
        let entry = NamespaceEntry { info, serial: self.generation, ana_error: ana_error_status(state) };
        self.entries.insert(at, entry);
        Ok(())
    }

    fn remove(&mut self, id: NamespaceId) -> Option<NamespaceInfo> {
        let index = self.entries.binary_search_by_key(&id, |entry| entry.info.id).ok()?;
        let entry = self.entries.remove(index);
        self.record_group_change(entry.info.ana_group);
        Some(entry.info)
    }

    /// Says whether that is a change.
    fn set_ana_state(&mut self, id: u32, state: AnaState) -> bool {
        assert!((1..=ANA_GROUPS_MAX).contains(&id), "ANA group {id}");
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

/// The directory in force.
#[derive(Debug)]
pub(crate) struct NamespaceDirectory {
    generation: AtomicU64,
    current: Mutex<Arc<NamespaceSnapshot>>,
}

impl NamespaceDirectory {
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
        // What was so from the start is no change.
        first.ana_change_count = 0;
        first.groups.values_mut().for_each(|group| group.change_count = 1);
        directory.generation.store(first.generation, Ordering::Release);
        *directory.current.lock() = Arc::new(first);
        Ok(directory)
    }

    /// The directory now.
    pub fn snapshot(&self) -> Arc<NamespaceSnapshot> {
        Arc::clone(&self.current.lock())
    }

    /// Makes `known` the directory now: one load where it is already.
    #[inline]
    pub fn refresh(&self, known: &mut Arc<NamespaceSnapshot>) {
        if known.generation != self.generation.load(Ordering::Acquire) {
            *known = self.snapshot();
        }
    }

    pub fn add(&self, info: NamespaceInfo) -> Result<(), NamespaceExists> {
        self.update(|directory| directory.add(info))
    }

    pub fn remove(&self, id: NamespaceId) -> Option<NamespaceInfo> {
        self.update(|directory| directory.remove(id))
    }

    /// Says whether that is a change.
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
            used_bytes: Arc::default(),
            kind: NamespaceKind::Block { block_bytes: 512 },
            ana_group,
        }
    }

    fn ids(directory: &NamespaceDirectory) -> Vec<u32> {
        directory.snapshot().iter().map(|one| one.id.0).collect()
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
        let now = directory.snapshot();
        assert!(now.get(NamespaceId(3)).is_some() && now.get(NamespaceId(0)).is_none());
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
        assert_ne!(known.entry(NamespaceId(1)).unwrap().serial, serial, "another namespace");
        assert!(same.get(NamespaceId(1)).is_some(), "who keeps an old directory still reads it");
    }

    #[test]
    fn a_group_state_applies_to_its_namespaces_and_changes_are_counted() {
        let directory = NamespaceDirectory::new(vec![info(1, 1), info(2, 2)]).unwrap();
        let group = |id| directory.snapshot().groups().find(|group| group.0 == id).unwrap().1;
        assert_eq!(
            (directory.snapshot().ana_change_count(), group(1).change_count, group(2).change_count),
            (1, 1, 1)
        );
        let refusal = |id| directory.snapshot().entry(NamespaceId(id)).unwrap().ana_error;
        let states = [
            (AnaState::NonOptimized, None),
            (AnaState::Inaccessible, Some(Status::ANA_INACCESSIBLE)),
            (AnaState::PersistentLoss, Some(Status::ANA_PERSISTENT_LOSS)),
            (AnaState::Change, Some(Status::ANA_TRANSITION)),
            (AnaState::Optimized, None),
        ];
        for (state, want) in states {
            assert!(directory.set_ana_state(2, state));
            assert!(!directory.set_ana_state(2, state), "no change");
            assert_eq!((refusal(1), refusal(2)), (None, want));
        }
        assert_eq!(
            (directory.snapshot().ana_change_count(), group(1).change_count, group(2).change_count),
            (6, 1, 6)
        );
        directory.set_ana_state(2, AnaState::Inaccessible);
        directory.add(info(3, 2)).unwrap();
        assert_eq!(refusal(3), Some(Status::ANA_INACCESSIBLE), "a new member is as its group");
        assert_eq!(group(2).change_count, 8);
    }
}
