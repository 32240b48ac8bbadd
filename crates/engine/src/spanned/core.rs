//! One core's part of a volume on several devices: the handles on their volumes, by key and by device.
//!
//! In: keys and ranges of them. Out: the handles on the devices that have them, and errors that name a device. Invariants: a device that has failed while
//! it was open is as one that was not opened; an operation keeps the handle that it began with, whatever replaces it.
//! Tested in `tests/spanned_devices.rs` and `tests/spanned_replacement.rs`.

use super::device_queue::QueueAdmission;
use super::iterator::{PageBudget, SpannedIterator};
use super::places::{PlacedMember, SpannedMember, absent};
use super::ring_merge::ListOrder;
use super::shared_map::{MapState, SharedMap};
use super::snapshot_gate::SnapshotGate;
use super::swapped_keys::SwappedKeys;
use super::traffic::TrafficCounters;
use crate::common::abandoned::AbandonedCount;
use crate::common::drive_cores::core_of_drive;
use crate::common::shared_lock::{SharedLock, SharedLockGuard};
use crate::{Engine, EngineError};
use futures_util::future::{LocalBoxFuture, join_all};
use octokv_base::{Key, Nanos, RingPosition, RingRange};
use octokv_sched::{CostKind, EndedCommand};
use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::ops::Deref;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// See the module header.
pub(super) struct SpannedCore<E> {
    /// By the indices of the devices. Operations in progress keep the handle of a device that is replaced.
    members: RefCell<Vec<Rc<SpannedMember<E>>>>,
    /// Woken when a device is replaced or added.
    background: RefCell<Vec<Waker>>,
    map: RefCell<Rc<CoreMap>>,
    hash_seed: u64,
    pub(super) order: ListOrder,
    pub(super) core: usize,
    pub(super) shared: SpanShared,
}

/// One core's reference of a map, which its operations share.
pub(super) struct CoreMap {
    state: Arc<MapState>,
    change: u64,
}

impl CoreMap {
    fn current(shared: &SharedMap) -> Rc<CoreMap> {
        let (state, change) = shared.get();
        Rc::new(CoreMap { state, change })
    }

    /// The number of the change with which it was current.
    pub fn change(&self) -> u64 {
        self.change
    }
}

impl Deref for CoreMap {
    type Target = MapState;

    fn deref(&self) -> &MapState {
        &self.state
    }
}

/// The device of a key, by the map of one operation.
pub(super) struct KeyPlace {
    pub map: Rc<CoreMap>,
    pub position: RingPosition,
    pub device: usize,
}

/// What the handles of all cores share.
#[derive(Clone)]
pub(super) struct SpanShared {
    /// The cores that have handles.
    pub cores: usize,
    pub map: Arc<SharedMap>,
    /// Of those that write superblocks to change the volume.
    pub structure: Arc<SharedLock>,
    /// What moves of partitions may copy, in bytes a second; 0 for no moves.
    pub move_bytes_per_second: u64,
    pub gate: Arc<SnapshotGate>,
    pub page_budget: Arc<PageBudget>,
    /// `None` without swap regions.
    pub swaps: Option<Arc<SwappedKeys>>,
    /// Operations on keys that may be swapped whose callers dropped them.
    pub abandoned: AbandonedCount,
}

impl SpanShared {
    /// Keeps notes of swapped keys from being written to superblocks, which another is about to write; nothing to lock without swap regions.
    pub async fn exclude_notes(&self) -> Option<SharedLockGuard<'_>> {
        Some(self.swaps.as_ref()?.superblocks.exclude().await)
    }
}

impl<E: Engine> SpannedCore<E> {
    /// A handle on members, at least one of which serves.
    pub(super) fn new(
        members: Vec<SpannedMember<E>>,
        (hash_seed, order): (u64, ListOrder),
        (core, shared): (usize, SpanShared),
    ) -> SpannedCore<E> {
        let map = RefCell::new(CoreMap::current(&shared.map));
        shared.map.set_core_devices(core, members.len());
        let members = RefCell::new(members.into_iter().map(Rc::new).collect());
        SpannedCore { members, background: RefCell::default(), map, hash_seed, order, core, shared }
    }

    /// Sets the handle on the device of an index, which was replaced, or was added behind the others.
    pub(super) fn set_member(&self, index: usize, member: SpannedMember<E>) {
        let devices = {
            let mut members = self.members.borrow_mut();
            match members.get_mut(index) {
                Some(replaced) => *replaced = Rc::new(member),
                None => {
                    assert_eq!(index, members.len(), "devices are added one after another");
                    members.push(Rc::new(member));
                }
            }
            members.len()
        };
        self.shared.map.set_core_devices(self.core, devices);
        self.background.take().iter().for_each(Waker::wake_by_ref);
    }

    /// The swapping of a volume with swap regions.
    pub(super) fn swaps(&self) -> Option<&SwappedKeys> {
        self.shared.swaps.as_deref()
    }

    /// The map for an operation that begins now, which has it until its end.
    #[inline]
    pub(super) fn map(&self) -> Rc<CoreMap> {
        let mut map = self.map.borrow_mut();
        if map.change != self.shared.map.changes() {
            *map = CoreMap::current(&self.shared.map);
        }
        Rc::clone(&map)
    }

    /// The place of a key for an operation that begins now.
    #[inline]
    pub(super) fn place_of(&self, key: &Key) -> KeyPlace {
        let (map, position) = (self.map(), RingPosition::of_bytes(key.as_bytes(), self.hash_seed));
        let device = map.map.device_of(position);
        KeyPlace { map, position, device }
    }

    /// Takes each new map, so that none before it is kept by a core without operations; until it is dropped.
    pub(super) async fn follow_maps(&self) {
        loop {
            let change = self.map().change();
            self.shared.map.changed(change).await;
        }
    }

    pub(super) fn hash_seed(&self) -> u64 {
        self.hash_seed
    }

    /// The number of devices.
    pub(super) fn devices(&self) -> usize {
        self.members.borrow().len()
    }

    /// The core whose part of the ring has a position.
    pub(super) fn owner_of(&self, position: RingPosition) -> usize {
        core_of_drive((0, 1), position, self.shared.cores)
    }

    pub(super) fn device_of(&self, key: &[u8]) -> usize {
        self.map().map.device_of(RingPosition::of_bytes(key, self.hash_seed))
    }

    pub(super) fn any_member(&self, device: usize) -> Rc<SpannedMember<E>> {
        Rc::clone(&self.members.borrow()[device])
    }

    /// The handle on a device that serves.
    pub(super) fn member(&self, device: usize) -> Result<PlacedMember<E>, EngineError> {
        PlacedMember::new(self.any_member(device)).filter(PlacedMember::serves).ok_or(absent(device))
    }

    /// The handles that were opened, whether their devices have failed meanwhile or not.
    pub(super) fn opened_members(&self) -> impl Iterator<Item = PlacedMember<E>> {
        (0..self.devices()).filter_map(|device| PlacedMember::new(self.any_member(device)))
    }

    /// The handles that serve.
    pub(super) fn open_members(&self) -> impl Iterator<Item = PlacedMember<E>> {
        self.opened_members().filter(|placed| !placed.is_lost())
    }

    /// The handles of all devices that have keys of a range.
    ///
    /// # Errors
    /// That of the first which is absent.
    pub(super) fn members_of(
        &self,
        map: &MapState,
        range: RingRange,
    ) -> Result<Vec<PlacedMember<E>>, EngineError> {
        let devices = (0..self.devices()).filter(|&device| map.map.has_keys_of(device, range));
        devices.map(|device| self.member(device)).collect()
    }

    /// The handles of the devices of an iterator.
    ///
    /// # Errors
    /// That of the first which is absent, or was replaced since the iterator was created: its snapshot is lost.
    pub(super) fn members_of_iterator(
        &self,
        iterator: &SpannedIterator<E::Iterator>,
    ) -> Result<Vec<PlacedMember<E>>, EngineError> {
        let of_device = |(device, replacements)| {
            let member = self.member(device)?;
            if member.replacements() == replacements { Ok(member) } else { Err(absent(device)) }
        };
        iterator.devices().map(of_device).collect()
    }

    /// Runs an operation on a key's device, and waits with its outcome while a snapshot is taken.
    pub(super) async fn on_key<T>(
        &self,
        (place, kind): (KeyPlace, CostKind),
        operation: impl AsyncFnOnce(&E) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.on_key_counted((place, kind, 0), operation, |_, _| 0).await
    }

    /// [`SpannedCore::on_key`], whose outcome `count` counts as traffic of the device; it returns the bytes of the value. `bytes` are those
    /// that are known before. Runs once the queue of the device admits it, if it has one.
    pub(super) async fn on_key_counted<T>(
        &self,
        (place, kind, bytes): (KeyPlace, CostKind, usize),
        operation: impl AsyncFnOnce(&E) -> Result<T, EngineError>,
        count: impl FnOnce(&TrafficCounters, &T) -> usize,
    ) -> Result<T, EngineError> {
        let device = place.device;
        let placed = self.member(device)?;
        let running = operation(placed.engine());
        let count = |done: &T| count(placed.traffic(), done);
        let outcome = admitted((&placed, device), (kind, bytes), running, count).await;
        let outcome = outcome.map_err(|error| placed.engine_error(error));
        self.shared.gate.pass().await;
        outcome
    }

    /// Counts traffic of a key's device.
    pub(super) fn traffic_of(&self, key: &Key, count: impl FnOnce(&TrafficCounters)) {
        count(&self.any_member(self.device_of(key.as_bytes())).traffic);
    }

    /// Runs an operation on all devices at once, on those that serve even if others do not.
    ///
    /// # Errors
    /// That of the first device that is absent or failed.
    pub(super) async fn on_all<T>(
        &self,
        operation: impl AsyncFn(&E) -> Result<T, EngineError>,
    ) -> Result<Vec<T>, EngineError> {
        let of_device = async |device| {
            let placed = self.member(device)?;
            operation(placed.engine()).await.map_err(|error| placed.engine_error(error))
        };
        join_all((0..self.devices()).map(of_device)).await.into_iter().collect()
    }

    /// Runs a task on each volume, and on those that take the place of others or are added, until it is dropped. The task of one that is replaced is dropped.
    pub(super) async fn on_each(&self, task: impl AsyncFn(PlacedMember<E>)) {
        let task = &task;
        let begin = |member: Rc<SpannedMember<E>>| -> Option<LocalBoxFuture<'_, ()>> {
            Some(Box::pin(task(PlacedMember::new(member)?)))
        };
        let members = (0..self.devices()).map(|device| self.any_member(device));
        let mut tasks: Vec<_> = members.map(|member| (Rc::clone(&member), begin(member))).collect();
        let poll = |context: &mut Context<'_>| {
            let mut wakers = self.background.borrow_mut();
            if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                wakers.push(context.waker().clone());
            }
            drop(wakers);
            while tasks.len() < self.devices() {
                let member = self.any_member(tasks.len());
                tasks.push((Rc::clone(&member), begin(member)));
            }
            for (device, (of_member, running)) in tasks.iter_mut().enumerate() {
                let member = self.any_member(device);
                if !Rc::ptr_eq(of_member, &member) {
                    (*of_member, *running) = (Rc::clone(&member), begin(member));
                }
                if running.as_mut().is_some_and(|task| task.as_mut().poll(context).is_ready()) {
                    *running = None;
                }
            }
            // A device may be replaced when all have ended.
            Poll::Pending
        };
        poll_fn(poll).await
    }
}

/// Runs an operation on a device once its queue admits it, if it has one. `bytes` are those of the value that are known before, `bytes_of` those of the
/// outcome.
///
/// # Errors
/// Of the operation, as the engine on the device has it; the device fails, or is replaced, while the operation waits.
pub(super) async fn admitted<E, T>(
    (placed, device): (&PlacedMember<E>, usize),
    (kind, bytes): (CostKind, usize),
    operation: impl Future<Output = Result<T, EngineError>>,
    bytes_of: impl FnOnce(&T) -> usize,
) -> Result<T, EngineError> {
    let admission = match placed.queue() {
        Some(queue) => Some(queue.admit(kind, bytes).await.map_err(|_| absent(device))?),
        None => None,
    };
    let began_at = admission.as_ref().and_then(|_| placed.now());
    let mut has_waited = false;
    let outcome = {
        let mut running = pin!(operation);
        poll_fn(|context| {
            let polled = running.as_mut().poll(context);
            has_waited |= polled.is_pending();
            polled
        })
        .await
    };
    let bytes = outcome.as_ref().map(bytes_of);
    if let Some(admission) = admission {
        // An operation that never waited needed no device.
        let served = bytes.ok().filter(|_| has_waited).zip(began_at).map(|(bytes, at)| (kind, bytes, at));
        end_admission(admission, placed, served);
    }
    outcome
}

/// Ends an operation in the queue of its device: its kind, bytes and begin if the device served it. If the device has failed, what waits for
/// it fails too.
fn end_admission<E>(
    admission: QueueAdmission<'_>,
    placed: &PlacedMember<E>,
    served: Option<(CostKind, usize, Nanos)>,
) {
    if !placed.serves() {
        placed.queue().iter().for_each(|queue| queue.close());
    }
    match served.zip(placed.now()) {
        Some(((kind, bytes, began_at), ended_at)) => {
            admission.end(EndedCommand { kind, bytes, began_at, ended_at });
        }
        None => drop(admission),
    }
}
