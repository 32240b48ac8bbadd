//! The partition map of a volume, shared by all cores in immutable versions (read-copy-update): each operation has one of them from its begin to its end.
//!
//! ```text
//!   publish ─▶ the map of operations that begin from here on, on any core          wait until the map before has no operation any more
//!      each core keeps a reference of its own, so that operations count on a counter of their core; it is renewed when the number of changes differs
//! ```
//! In: maps, one after the other. Out: the current one. Invariants: an operation that begins after `publish` has returned has that map or a later one; once
//! [`SharedMap::have_former_ended`], no operation has an earlier one.
//! Tested below, and in `tests/spanned_growth.rs`.

use super::partition_map::{PartitionMap, PlannedMove};
use super::partition_set::PartitionSet;
use crate::bug_injection::{self, InjectedBug};
use crate::common::shared_lock::{SharedLock, SharedLockGuard};
use octokv_base::RingPosition;
use parking_lot::Mutex;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Weak};
use std::task::{Poll, Waker};

/// The locks of keys that move: several keys share one.
const LOCKS: usize = 256;

/// One version of the partition map, with the move in progress.
#[derive(Clone)]
pub(super) struct MapState {
    /// The device of each partition.
    pub map: PartitionMap,
    /// Its number: the map with the highest number counts.
    pub number: u32,
    /// For each device the partitions of others of which it may have keys.
    pub left_over: Vec<PartitionSet>,
    /// The partitions that are copied to another device.
    pub moving: Option<Arc<PartitionMove>>,
    /// What writes of these do.
    pub writes: MovingWrites,
    /// The partitions that move or are about to, on a volume with swap regions: none of their keys is swapped from here on.
    pub settling: PartitionSet,
}

/// How writes of keys whose partitions move are handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MovingWrites {
    /// They go to both devices.
    Both,
    /// They wait for the next map.
    Wait,
    /// They fail until the volume is opened again: which device counts depends on a superblock that may have been written.
    Fail,
}

/// How far the rebalancing of a volume is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MoveStage {
    /// No partition moves, and no device has keys of others.
    AtRest,
    /// Keys are copied to another device.
    Copy,
    /// Keys are copied, and the map is being changed: writes of their partitions wait.
    Cutover,
    /// A superblock with the next map may have been written or not: writes of the partitions fail until the volume is opened again.
    Undecided,
    /// Keys are deleted where they were.
    CleanUp,
}

/// Partitions that move: until the map changes, their keys are written on both devices and read from the source.
pub(super) struct PartitionMove {
    pub planned: PlannedMove,
    locks: Box<[SharedLock]>,
    has_failed: AtomicBool,
}

/// The current map, and those before that operations may have.
struct Maps {
    current: Arc<MapState>,
    former: Vec<Weak<MapState>>,
}

/// See the module header.
pub(super) struct SharedMap {
    maps: Mutex<Maps>,
    changes: AtomicU64,
    wakers: Mutex<Vec<Waker>>,
    /// For each core with a handle the number of devices of which it has one.
    core_devices: Mutex<Vec<Option<usize>>>,
    /// The least of these.
    common_devices: AtomicUsize,
}

impl PartitionMove {
    pub fn new(planned: PlannedMove) -> PartitionMove {
        let locks = (0..LOCKS).map(|_| SharedLock::default()).collect();
        PartitionMove { planned, locks, has_failed: AtomicBool::new(false) }
    }

    /// The lock of a key: it is written on both devices, or copied, by one operation at a time.
    pub async fn exclude(&self, position: RingPosition) -> SharedLockGuard<'_> {
        self.locks[(position.0 >> 64) as usize % LOCKS].exclude().await
    }

    /// The destination lacks a write: it does not get the partitions.
    pub fn fail(&self) {
        self.has_failed.store(true, Ordering::Release);
    }

    /// Whether the destination lacks a write.
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }
}

impl MapState {
    /// The move of the keys at a position, if they move.
    #[inline]
    pub fn move_of(&self, position: RingPosition) -> Option<&Arc<PartitionMove>> {
        let of_partition =
            |of: &&Arc<PartitionMove>| of.planned.partitions.has(self.map.partition_of(position));
        self.moving.as_ref().filter(of_partition)
    }

    /// How far moves are.
    pub fn stage(&self) -> MoveStage {
        match (&self.moving, self.writes) {
            (Some(_), MovingWrites::Both) => MoveStage::Copy,
            (Some(_), MovingWrites::Wait) => MoveStage::Cutover,
            (Some(_), MovingWrites::Fail) => MoveStage::Undecided,
            (None, _) if self.left_over.iter().all(PartitionSet::is_empty) => MoveStage::AtRest,
            (None, _) => MoveStage::CleanUp,
        }
    }

    /// Whether a device may have keys of partitions of others, which listings leave out: from the first move on.
    pub fn has_left_over(&self) -> bool {
        self.number > 0 || self.moving.is_some() || self.left_over.iter().any(|set| !set.is_empty())
    }
}

impl SharedMap {
    pub fn new(state: MapState) -> SharedMap {
        SharedMap {
            maps: Mutex::new(Maps { current: Arc::new(state), former: Vec::new() }),
            changes: AtomicU64::new(0),
            wakers: Mutex::default(),
            core_devices: Mutex::default(),
            common_devices: AtomicUsize::new(0),
        }
    }

    /// The current map, and the number of the change that made it current.
    pub fn get(&self) -> (Arc<MapState>, u64) {
        let maps = self.maps.lock();
        (Arc::clone(&maps.current), self.changes.load(Ordering::Acquire))
    }

    /// The number of changes.
    #[inline]
    pub fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Changes the map for operations that begin from here on. Changes of several threads follow each other.
    pub fn publish(&self, change: impl FnOnce(&mut MapState)) {
        {
            let mut maps = self.maps.lock();
            let mut state = (*maps.current).clone();
            change(&mut state);
            let former = std::mem::replace(&mut maps.current, Arc::new(state));
            maps.former.push(Arc::downgrade(&former));
            self.changes.fetch_add(1, Ordering::Release);
        }
        self.wake();
    }

    fn wake(&self) {
        let wakers = std::mem::take(&mut *self.wakers.lock());
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Whether no core, and no operation, has a map that was current before, however many changes ago.
    pub fn have_former_ended(&self) -> bool {
        let mut maps = self.maps.lock();
        if bug_injection::is_injected(InjectedBug::MoveForgetFormer) {
            let earlier = maps.former.len().saturating_sub(1);
            maps.former.drain(..earlier);
        }
        maps.former.retain(|former| former.strong_count() > 0);
        let have_ended = maps.former.is_empty();
        // What the operations did with them comes before what follows here.
        fence(Ordering::Acquire);
        have_ended
    }

    /// Waits until the number of changes differs from this one.
    pub async fn changed(&self, changes: u64) {
        poll_fn(|context| {
            let mut wakers = self.wakers.lock();
            if self.changes() != changes {
                return Poll::Ready(());
            }
            if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }

    /// Notes of how many devices a core has handles, which is a change for those that wait for one.
    pub fn set_core_devices(&self, core: usize, devices: usize) {
        {
            let mut of_cores = self.core_devices.lock();
            if of_cores.len() <= core {
                of_cores.resize(core + 1, None);
            }
            of_cores[core] = Some(devices);
            let least = of_cores.iter().flatten().min().copied().unwrap_or(0);
            self.common_devices.store(least, Ordering::Release);
            self.changes.fetch_add(1, Ordering::Release);
        }
        self.wake();
    }

    /// Whether all cores that have handles have them of so many devices.
    pub fn all_cores_have(&self, devices: usize) -> bool {
        self.core_devices.lock().iter().flatten().all(|&of_core| of_core >= devices)
    }

    /// The number of devices of which all cores that have handles have one.
    #[inline]
    pub fn common_devices(&self) -> usize {
        self.common_devices.load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> MapState {
        MapState {
            map: PartitionMap::spread(&[1, 1]),
            number: 0,
            left_over: vec![PartitionSet::default(); 2],
            moving: None,
            writes: MovingWrites::Both,
            settling: PartitionSet::default(),
        }
    }

    #[test]
    fn a_map_has_ended_once_no_operation_has_it() {
        let shared = SharedMap::new(state());
        let (of_operation, change) = shared.get();
        assert_eq!((change, of_operation.has_left_over()), (0, false));
        assert!(shared.have_former_ended());
        shared.publish(|state| state.number = 1);
        // One of two changes ago counts, too.
        shared.publish(|_| ());
        assert!(!shared.have_former_ended());
        drop(of_operation);
        assert!(shared.have_former_ended());
        let (after, change) = shared.get();
        assert_eq!((after.number, change, after.has_left_over()), (1, 2, true));
    }

    #[test]
    fn keys_move_with_their_partition_alone() {
        let partitions = [3].into_iter().collect();
        let moving = PartitionMove::new(PlannedMove { from: 1, to: 0, partitions });
        let state = MapState { moving: Some(Arc::new(moving)), ..state() };
        assert!(state.move_of(RingPosition(3)).is_some() && state.move_of(RingPosition(0x103)).is_some());
        assert!(state.move_of(RingPosition(4)).is_none() && state.has_left_over());
    }
}
