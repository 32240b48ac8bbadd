//! One core's handle on a volume of several devices.
//!
//! An operation on a key is one of the volume on the key's device; errors name that device. A device that has failed while it was open is as one that was not opened. What concerns all keys takes all devices: a listing, a scan or an iterator that
//! lacks one would silently omit keys, and fails instead.

use super::iterator::{PageBudget, SpannedIterator};
use super::partition_map::PartitionMap;
use super::places::{PlacedMember, SpannedMember};
use super::ring_merge::{ListOrder, list_merged, scan_merged};
use super::snapshot_gate::SnapshotGate;
use super::swapped_keys::SwappedKeys;
use super::swapped_scan::scan_with_swaps;
use super::traffic::TrafficCounters;
use crate::bug_injection::{self, InjectedBug};
use crate::{
    DeleteOutcome, Engine, EngineError, EngineStatistics, IteratorOptions, IteratorProgress, KeySink,
    KeyStatus, PairSink, PrefetchStage, PutOptions, PutOutcome, PutValue, ScanSink, StoredValue, ValueRange,
    VolumePlace,
};
use futures_util::future::{LocalBoxFuture, join, join_all};
use octokv_base::{Key, RecordLayout, RingPosition, RingRange, Version};
use octokv_device::DeviceError;
use octokv_runtime::ReactorHandle;
use std::cell::RefCell;
use std::future::poll_fn;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// See the module header.
pub struct SpannedEngine<E> {
    /// By the indices of the devices. Operations in progress keep the handle of a device that is replaced.
    members: Vec<RefCell<Rc<SpannedMember<E>>>>,
    /// Woken when a device is replaced.
    background: RefCell<Vec<Waker>>,
    map: PartitionMap,
    hash_seed: u64,
    order: ListOrder,
    core: usize,
    shared: SpanShared,
}

/// What the handles of all cores share.
#[derive(Clone)]
pub(super) struct SpanShared {
    /// The cores that have handles.
    pub cores: usize,
    pub gate: Arc<SnapshotGate>,
    pub page_budget: Arc<PageBudget>,
    /// `None` without swap regions.
    pub swaps: Option<Arc<SwappedKeys>>,
}

/// The error of operations on keys of a device that was not opened, or has failed.
pub(super) fn absent(device: usize) -> EngineError {
    EngineError::Device { error: DeviceError::Unavailable, place: VolumePlace::new(device as u16, 0) }
}

/// Whether the device of a handle has not failed.
pub(super) fn serves<E>(placed: &PlacedMember<E>) -> bool {
    !placed.is_lost() || bug_injection::is_injected(InjectedBug::SpanIgnoreFailure)
}

impl<E: Engine> SpannedEngine<E> {
    /// A handle on members, at least one of which serves.
    pub(super) fn new(
        members: Vec<SpannedMember<E>>,
        (map, hash_seed, order): (PartitionMap, u64, ListOrder),
        (core, shared): (usize, SpanShared),
    ) -> SpannedEngine<E> {
        let members = members.into_iter().map(|member| RefCell::new(Rc::new(member))).collect();
        SpannedEngine { members, background: RefCell::default(), map, hash_seed, order, core, shared }
    }

    /// Sets the handle on the device of an index, which was replaced.
    pub(super) fn set_member(&self, index: usize, member: SpannedMember<E>) {
        self.members[index].replace(Rc::new(member));
        self.background.take().iter().for_each(Waker::wake_by_ref);
    }

    /// The swapping of a volume with swap regions.
    fn swaps(&self) -> Option<&SwappedKeys> {
        self.shared.swaps.as_deref()
    }

    pub(super) fn map(&self) -> &PartitionMap {
        &self.map
    }

    pub(super) fn hash_seed(&self) -> u64 {
        self.hash_seed
    }

    /// The number of devices.
    pub(super) fn devices(&self) -> usize {
        self.members.len()
    }

    /// Whether the core of the handle works on a position in the background.
    pub(super) fn is_own(&self, position: RingPosition) -> bool {
        self.owner_of(position) == self.core
    }

    /// The core whose part of the ring has a position.
    fn owner_of(&self, position: RingPosition) -> usize {
        (((position.0 >> 64) * self.shared.cores as u128) >> 64) as usize
    }

    fn device_of(&self, key: &[u8]) -> usize {
        self.map.device_of(RingPosition::of_bytes(key, self.hash_seed))
    }

    fn any_member(&self, device: usize) -> Rc<SpannedMember<E>> {
        Rc::clone(&self.members[device].borrow())
    }

    /// The handle on a device that serves.
    pub(super) fn member(&self, device: usize) -> Result<PlacedMember<E>, EngineError> {
        PlacedMember::new(self.any_member(device)).filter(serves).ok_or(absent(device))
    }

    /// The handles that were opened, whether their devices have failed meanwhile or not.
    fn opened_members(&self) -> impl Iterator<Item = PlacedMember<E>> {
        (0..self.members.len()).filter_map(|device| PlacedMember::new(self.any_member(device)))
    }

    /// The handles that serve.
    fn open_members(&self) -> impl Iterator<Item = PlacedMember<E>> {
        self.opened_members().filter(|placed| !placed.is_lost())
    }

    /// The error of an operation on a device: that it has failed, whatever it was that the engine noticed.
    pub(super) fn error_of(
        &self,
        placed: &PlacedMember<E>,
        device: usize,
        error: EngineError,
    ) -> EngineError {
        if serves(placed) { placed.engine_error(error) } else { absent(device) }
    }

    /// The handles of all devices that have keys of a range.
    ///
    /// # Errors
    /// That of the first which is absent.
    fn members_of(&self, range: RingRange) -> Result<Vec<PlacedMember<E>>, EngineError> {
        let devices = (0..self.members.len()).filter(|&device| self.map.has_keys_of(device, range));
        devices.map(|device| self.member(device)).collect()
    }

    /// The handles of the devices of an iterator, which are all.
    ///
    /// # Errors
    /// That of the first which is absent, or was replaced since the iterator was created: its snapshot is lost.
    fn members_of_iterator(
        &self,
        iterator: &SpannedIterator<E::Iterator>,
    ) -> Result<Vec<PlacedMember<E>>, EngineError> {
        let members = self.members_of(RingRange::FULL)?;
        let mut replaced = members.iter().zip(iterator.replacements());
        match replaced.position(|(member, then)| member.replacements() != then) {
            Some(device) => Err(absent(device)),
            None => Ok(members),
        }
    }

    /// Runs an operation on a key's device, and waits with its outcome while a snapshot is taken.
    async fn on_key<T>(
        &self,
        key: &Key,
        operation: impl AsyncFnOnce(&E) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        self.on_key_counted(key, operation, |_, _| ()).await
    }

    /// [`SpannedEngine::on_key`], whose outcome `count` counts as traffic of the device.
    async fn on_key_counted<T>(
        &self,
        key: &Key,
        operation: impl AsyncFnOnce(&E) -> Result<T, EngineError>,
        count: impl FnOnce(&TrafficCounters, &T),
    ) -> Result<T, EngineError> {
        let device = self.device_of(key.as_bytes());
        let placed = self.member(device)?;
        let outcome = operation(placed.engine()).await.map_err(|error| self.error_of(&placed, device, error));
        if let Ok(done) = &outcome {
            count(placed.traffic(), done);
        }
        self.shared.gate.pass().await;
        outcome
    }

    /// Counts traffic of a key's device.
    fn traffic_of(&self, key: &Key, count: impl FnOnce(&TrafficCounters)) {
        count(&self.any_member(self.device_of(key.as_bytes())).traffic);
    }

    /// Runs an operation on all devices at once, on those that serve even if others do not.
    ///
    /// # Errors
    /// That of the first device that is absent or failed.
    async fn on_all<T>(
        &self,
        operation: impl AsyncFn(&E) -> Result<T, EngineError>,
    ) -> Result<Vec<T>, EngineError> {
        let of_device = async |device| {
            let placed = self.member(device)?;
            operation(placed.engine()).await.map_err(|error| self.error_of(&placed, device, error))
        };
        join_all((0..self.members.len()).map(of_device)).await.into_iter().collect()
    }

    /// Runs a task on each volume, and on those that take the place of others, until it is dropped. The task of one that is replaced is dropped.
    async fn on_each(&self, task: impl AsyncFn(PlacedMember<E>)) {
        let task = &task;
        let begin = |member: Rc<SpannedMember<E>>| -> Option<LocalBoxFuture<'_, ()>> {
            Some(Box::pin(task(PlacedMember::new(member)?)))
        };
        let members = (0..self.members.len()).map(|device| self.any_member(device));
        let mut tasks: Vec<_> = members.map(|member| (Rc::clone(&member), begin(member))).collect();
        let poll = |context: &mut Context<'_>| {
            let mut wakers = self.background.borrow_mut();
            if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                wakers.push(context.waker().clone());
            }
            drop(wakers);
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

impl<E: Engine + 'static> Engine for SpannedEngine<E> {
    type Iterator = SpannedIterator<E::Iterator>;

    async fn put_with(
        &self,
        key: &Key,
        value: PutValue,
        options: PutOptions,
    ) -> Result<PutOutcome, EngineError> {
        let bytes = key.len() + value.bytes;
        if let Some(swaps) = self.swaps() {
            let outcome = self.put_swapping(swaps, key, value, options).await?;
            if outcome == PutOutcome::Stored {
                self.traffic_of(key, |traffic| traffic.note_put(bytes));
            }
            return Ok(outcome);
        }
        let count = |traffic: &TrafficCounters, outcome: &PutOutcome| {
            if *outcome == PutOutcome::Stored {
                traffic.note_put(bytes);
            }
        };
        self.on_key_counted(key, async |engine| engine.put_with(key, value, options).await, count).await
    }

    async fn get(&self, key: &Key) -> Result<Option<StoredValue>, EngineError> {
        if self.swaps().is_some() {
            return self.get_range(key, ValueRange::ALL).await;
        }
        self.on_key_counted(key, async |engine| engine.get(key).await, count_read).await
    }

    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        if let Some(swaps) = self.swaps() {
            let read = self.get_swapping(swaps, key, range).await?;
            self.traffic_of(key, |traffic| count_read(traffic, &read));
            return Ok(read);
        }
        self.on_key_counted(key, async |engine| engine.get_range(key, range).await, count_read).await
    }

    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        match self.swaps() {
            Some(swaps) => self.delete_swapping(swaps, key, version).await,
            None => self.on_key(key, async |engine| engine.delete_with(key, version).await).await,
        }
    }

    async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        match self.swaps() {
            Some(swaps) => self.status_swapping(swaps, key).await,
            None => self.on_key(key, async |engine| engine.status(key).await).await,
        }
    }

    async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        let range = match self.order {
            ListOrder::Ring(seed) if !start.is_empty() => {
                RingRange::new(RingPosition::of(start, seed), RingPosition::MAX)
            }
            _ => None,
        };
        let members = self.members_of(range.unwrap_or(RingRange::FULL))?;
        let outcome = list_merged(&members, self.order, start, sink).await;
        self.shared.gate.pass().await;
        outcome
    }

    async fn scan(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        let members = self.members_of(range)?;
        let outcome = match self.swaps() {
            Some(swaps) if swaps.count() > 0 || swaps.has_unknown() => {
                let swapped = async |key: &Key| self.swapped_value(swaps, key).await;
                scan_with_swaps(&members, self.order, (range, since), swapped, sink).await
            }
            _ => scan_merged(&members, self.order, (range, since), sink).await,
        };
        self.shared.gate.pass().await;
        outcome
    }

    async fn create_iterator(&self, options: IteratorOptions) -> Result<Option<Self::Iterator>, EngineError> {
        let (members, reverse) = (self.members_of(RingRange::FULL)?, options.reverse);
        let replacements = members.iter().map(PlacedMember::replacements).collect();
        let mut iterators = Vec::with_capacity(members.len());
        let closed = self.shared.gate.close();
        for placed in members {
            let created = placed.engine().create_iterator(options.clone()).await;
            match created.map_err(|error| placed.engine_error(error))? {
                Some(iterator) => iterators.push(iterator),
                None => return Ok(None),
            }
        }
        drop(closed);
        // What this one shows is not seen before another snapshot is taken.
        self.shared.gate.pass().await;
        let budget = Arc::clone(&self.shared.page_budget);
        Ok(Some(SpannedIterator::new(iterators, replacements, reverse, budget)))
    }

    async fn next_pairs(
        &self,
        iterator: &Self::Iterator,
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        iterator.next_pairs(&self.members_of_iterator(iterator)?, sink).await
    }

    async fn seek_iterator(&self, iterator: &Self::Iterator, key: &Key) -> Result<(), EngineError> {
        iterator.seek(&self.members_of_iterator(iterator)?, key).await
    }

    fn keep_iterator(&self, iterator: &Self::Iterator) {
        if let Ok(members) = self.members_of_iterator(iterator) {
            iterator.keep(&members);
        }
    }

    async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        self.on_all(async |engine| engine.forget_below(version).await).await.map(drop)
    }

    /// Each device gives up its part.
    async fn give_up_space(&self, bytes: u64) -> Result<u64, EngineError> {
        let part = bytes.div_ceil(self.open_members().count().max(1) as u64);
        Ok(self.on_all(async |engine| engine.give_up_space(part).await).await?.into_iter().sum())
    }

    async fn compact_all(&self) -> Result<(), EngineError> {
        self.on_all(async |engine| engine.compact_all().await).await.map(drop)
    }

    async fn flush(&self) -> Result<(), EngineError> {
        if bug_injection::is_injected(InjectedBug::SpanFlushOne) {
            return self.member(0)?.engine().flush().await;
        }
        self.on_all(async |engine| engine.flush().await).await?;
        self.flush_regions().await
    }

    async fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) {
        let report = RefCell::new(report);
        let (report, handle) = (&report, handle);
        let maintain = self.on_each(async |placed: PlacedMember<E>| {
            // The errors of a device that has failed say nothing new.
            let report: Box<dyn FnMut(EngineError) + '_> = Box::new(|error| {
                if !placed.is_lost() {
                    report.borrow_mut()(placed.engine_error(error));
                }
            });
            let region = placed.open().swap.as_ref();
            // Its errors are those of operations on its keys, which have them.
            let of_region = async {
                if let Some(region) = region {
                    region.engine.maintain(handle, |_| ()).await;
                }
            };
            join(placed.engine().maintain(handle, report), of_region).await;
        });
        let merge = async {
            if let Some(swaps) = self.swaps() {
                self.merge_when_idle(swaps, handle).await;
            }
        };
        join(maintain, merge).await;
    }

    async fn run_abandoned(&self) {
        self.on_each(async |placed: PlacedMember<E>| {
            let of_region = async {
                if let Some(region) = &placed.open().swap {
                    region.engine.run_abandoned().await;
                }
            };
            join(placed.engine().run_abandoned(), of_region).await;
        })
        .await;
    }

    /// Closes the volumes on the devices that serve. One on a device that has failed since it was opened is not shut down
    /// cleanly, which is an error, and recovers when it is opened again.
    async fn close(&self) -> Result<(), EngineError> {
        let of_device = async |device| match PlacedMember::new(self.any_member(device)) {
            None => Ok(()),
            Some(placed) if !placed.is_lost() => {
                let closed = placed.engine().close().await;
                closed.map_err(|error| self.error_of(&placed, device, error))?;
                match &placed.open().swap {
                    Some(region) => {
                        let closed = region.engine.close().await;
                        closed.map_err(|error| region.place.engine_error(error))
                    }
                    None => Ok(()),
                }
            }
            Some(_) => Err(absent(device)),
        };
        join_all((0..self.members.len()).map(of_device)).await.into_iter().collect()
    }

    fn record_layout(&self) -> RecordLayout {
        self.opened_members().next().expect("one was opened").engine().record_layout()
    }

    fn owner_core(&self, key: &Key) -> Option<usize> {
        // Of the position alone: another device in the place of one, or one that fails, changes no owner.
        let has_owners = self.opened_members().next()?.engine().has_owner_cores();
        has_owners.then(|| self.owner_of(RingPosition::of_bytes(key.as_bytes(), self.hash_seed)))
    }

    fn prefetch(&self, key: &Key, stage: PrefetchStage) {
        if let Ok(placed) = self.member(self.device_of(key.as_bytes())) {
            placed.engine().prefetch(key, stage);
        }
    }

    fn statistics(&self) -> EngineStatistics {
        sum_of(self.opened_members().map(|placed| placed.engine().statistics()))
    }
}

/// Counts the bytes of a value that was read.
fn count_read(traffic: &TrafficCounters, read: &Option<StoredValue>) {
    if let Some(value) = read {
        traffic.note_get(value.as_bytes().len());
    }
}

/// The statistics of devices together, but for their trees and logs.
pub(super) fn sum_of(of_devices: impl Iterator<Item = EngineStatistics>) -> EngineStatistics {
    of_devices.fold(EngineStatistics::default(), |mut sum, of_device| {
        sum.add(&of_device);
        sum.cache.add(&of_device.cache);
        sum
    })
}
