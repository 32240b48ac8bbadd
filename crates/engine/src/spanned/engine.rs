//! One core's handle on a volume of several devices.
//!
//! An operation on a key is one of the volume on the key's device; errors name that device. What concerns all keys takes all devices: a listing, a scan or an iterator that
//! lacks one would silently omit keys, and fails instead. Writes of a volume with swap regions own their key and a reference to the core's part, so that
//! they continue without their caller ([`common::abandoned`](crate::common::abandoned)): a key is locked for as long as an engine may apply a write of it.

use super::core::{KeyPlace, SpannedCore};
use super::iterator::SpannedIterator;
use super::places::{PlacedMember, SpannedMember, absent};
use super::ring_merge::{KeysOfDevice, ListOrder, list_merged, scan_merged};
use super::swapped_scan::scan_with_swaps;
use super::traffic::TrafficCounters;
use crate::bug_injection::{self, InjectedBug};
use crate::common::abandoned::AbandonedOperations;
use crate::common::drive_cores::core_of_drive;
use crate::{
    DeleteOutcome, Engine, EngineError, EngineStatistics, IteratorOptions, IteratorProgress, KeySink,
    KeyStatus, PairSink, PrefetchStage, PutOptions, PutOutcome, PutValue, ScanSink, StoredValue, ValueRange,
};
use futures_util::future::{join, join_all, join3};
use octokv_base::{Key, RecordLayout, RingPosition, RingRange, Version};
use octokv_runtime::ReactorHandle;
use octokv_sched::CostKind;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// See the module header. Dropping it while abandoned operations run is a crash of this core to the volume.
pub struct SpannedEngine<E> {
    core: Rc<SpannedCore<E>>,
    /// Writes of keys that may be swapped, or move.
    abandoned: AbandonedOperations,
}

impl<E: Engine> SpannedEngine<E> {
    /// A handle of the core whose part this is.
    pub(super) fn new(core: SpannedCore<E>) -> SpannedEngine<E> {
        let abandoned = AbandonedOperations::new(core.shared.abandoned.clone());
        SpannedEngine { core: Rc::new(core), abandoned }
    }

    /// Sets the handle on the device of an index, which was replaced or added.
    pub(super) fn set_member(&self, index: usize, member: SpannedMember<E>) {
        self.core.set_member(index, member);
    }
}

impl<E> Drop for SpannedEngine<E> {
    fn drop(&mut self) {
        // They refer to the engines, whose drop is the crash of their core.
        self.abandoned.clear();
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
        let (bytes, value_bytes) = (key.len() + value.bytes, value.bytes);
        let place = self.core.place_of(key);
        if place.is_moving() {
            let (core, owned_key) = (Rc::clone(&self.core), key.clone());
            drop(place);
            let put = async move { core.put_moving(&owned_key, value, options).await };
            return self.abandoned.detachable(put).await;
        }
        if self.core.swaps().is_some() {
            let (core, owned_key) = (Rc::clone(&self.core), key.clone());
            let put = async move { core.put_swapping((place, &owned_key), value, options).await };
            return self.abandoned.detachable(put).await;
        }
        let count = |traffic: &TrafficCounters, outcome: &PutOutcome| {
            if *outcome == PutOutcome::Stored {
                traffic.note_put(bytes);
            }
            value_bytes
        };
        let command = (place, CostKind::Put, value_bytes);
        let put = async |engine: &E| engine.put_with(key, value, options).await;
        self.core.on_key_counted(command, put, count).await
    }

    async fn get(&self, key: &Key) -> Result<Option<StoredValue>, EngineError> {
        if self.core.swaps().is_some() {
            return self.get_range(key, ValueRange::ALL).await;
        }
        let command = (self.core.place_of(key), CostKind::Get, 0);
        self.core.on_key_counted(command, async |engine| engine.get(key).await, count_read).await
    }

    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        if let Some(swaps) = self.core.swaps() {
            let read = self.core.get_swapping(swaps, key, range).await?;
            self.core.traffic_of(key, |traffic| {
                count_read(traffic, &read);
            });
            return Ok(read);
        }
        let command = (self.core.place_of(key), CostKind::Get, 0);
        self.core.on_key_counted(command, async |engine| engine.get_range(key, range).await, count_read).await
    }

    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        let place = self.core.place_of(key);
        if place.is_moving() {
            let (core, owned_key) = (Rc::clone(&self.core), key.clone());
            drop(place);
            let delete = async move { core.delete_moving(&owned_key, version).await };
            return self.abandoned.detachable(delete).await;
        }
        if self.core.swaps().is_some() {
            let (core, owned_key) = (Rc::clone(&self.core), key.clone());
            let delete = async move { core.delete_swapping((place, &owned_key), version).await };
            return self.abandoned.detachable(delete).await;
        }
        let delete = async |engine: &E| engine.delete_with(key, version).await;
        self.core.on_key((place, CostKind::Delete), delete).await
    }

    async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        match self.core.swaps() {
            Some(swaps) => self.core.status_swapping(swaps, key).await,
            None => {
                let place = self.core.place_of(key);
                self.core.on_key((place, CostKind::Get), async |engine| engine.status(key).await).await
            }
        }
    }

    async fn list(&self, start: &Key, sink: &mut impl KeySink) -> Result<(), EngineError> {
        let range = match self.core.order {
            ListOrder::Ring(seed) if !start.is_empty() => {
                RingRange::new(RingPosition::of(start, seed), RingPosition::MAX)
            }
            _ => None,
        };
        let map = self.core.map();
        let members = self.core.members_of(&map, range.unwrap_or(RingRange::FULL))?;
        let kept = KeysOfDevice::new(&map, self.core.hash_seed());
        let outcome = list_merged((&members, kept), self.core.order, start, sink).await;
        self.core.shared.gate.pass().await;
        outcome
    }

    async fn scan(
        &self,
        range: RingRange,
        since: Version,
        sink: &mut impl ScanSink,
    ) -> Result<(), EngineError> {
        let map = self.core.map();
        let members = self.core.members_of(&map, range)?;
        let kept = KeysOfDevice::new(&map, self.core.hash_seed());
        let outcome = match self.core.swaps() {
            Some(swaps) if swaps.count() > 0 || swaps.has_unknown() => {
                scan_with_swaps((&self.core, swaps), (&members, kept), (range, since), sink).await
            }
            _ => scan_merged((&members, kept), self.core.order, (range, since), sink).await,
        };
        self.core.shared.gate.pass().await;
        outcome
    }

    async fn create_iterator(&self, options: IteratorOptions) -> Result<Option<Self::Iterator>, EngineError> {
        // Before the map: what was acknowledged by a later one is in the snapshots of that.
        let closed = self.core.shared.gate.close();
        let (map, reverse) = (self.core.map(), options.reverse);
        let members = self.core.members_of(&map, RingRange::FULL)?;
        let devices = members.iter().map(|member| (member.index(), member.replacements())).collect();
        // The iterator keeps no map: what is left over on a device can be deleted, since the snapshot has it.
        let kept = map.has_left_over().then(|| (map.map, self.core.hash_seed()));
        let mut iterators = Vec::with_capacity(members.len());
        for placed in members {
            let created = placed.engine().create_iterator(options.clone()).await;
            match created.map_err(|error| placed.engine_error(error))? {
                Some(iterator) => iterators.push(iterator),
                None => return Ok(None),
            }
        }
        drop(closed);
        // What this one shows is not seen before another snapshot is taken.
        self.core.shared.gate.pass().await;
        let budget = Arc::clone(&self.core.shared.page_budget);
        Ok(Some(SpannedIterator::new(iterators, (devices, kept), reverse, budget)))
    }

    async fn next_pairs(
        &self,
        iterator: &Self::Iterator,
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        iterator.next_pairs(&self.core.members_of_iterator(iterator)?, sink).await
    }

    async fn seek_iterator(&self, iterator: &Self::Iterator, key: &Key) -> Result<(), EngineError> {
        iterator.seek(&self.core.members_of_iterator(iterator)?, key).await
    }

    fn keep_iterator(&self, iterator: &Self::Iterator) {
        if let Ok(members) = self.core.members_of_iterator(iterator) {
            iterator.keep(&members);
        }
    }

    async fn forget_below(&self, version: Version) -> Result<(), EngineError> {
        self.core.on_all(async |engine| engine.forget_below(version).await).await.map(drop)
    }

    /// Each device gives up its part.
    async fn give_up_space(&self, bytes: u64) -> Result<u64, EngineError> {
        let part = bytes.div_ceil(self.core.open_members().count().max(1) as u64);
        Ok(self.core.on_all(async |engine| engine.give_up_space(part).await).await?.into_iter().sum())
    }

    async fn compact_all(&self) -> Result<(), EngineError> {
        self.core.on_all(async |engine| engine.compact_all().await).await.map(drop)
    }

    async fn flush(&self) -> Result<(), EngineError> {
        if bug_injection::is_injected(InjectedBug::SpanFlushOne) {
            let placed = self.core.member(0)?;
            return placed.engine().flush().await.map_err(|error| placed.engine_error(error));
        }
        self.core.on_all(async |engine| engine.flush().await).await?;
        self.core.flush_regions().await
    }

    async fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) {
        let report = RefCell::new(report);
        let (report, handle) = (&report, handle);
        let maintain = self.core.on_each(async |placed: PlacedMember<E>| {
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
            if let Some(swaps) = self.core.swaps() {
                self.core.merge_when_idle(swaps, handle).await;
            }
        };
        let moves = self.core.rebalance(handle, |error| report.borrow_mut()(error));
        join3(maintain, merge, moves).await;
    }

    async fn run_abandoned(&self) {
        let of_members = self.core.on_each(async |placed: PlacedMember<E>| {
            let of_region = async {
                if let Some(region) = &placed.open().swap {
                    region.engine.run_abandoned().await;
                }
            };
            join(placed.engine().run_abandoned(), of_region).await;
        });
        join3(self.abandoned.run(), of_members, self.core.follow_maps()).await;
    }

    /// Closes the volumes on the devices that serve. One on a device that has failed since it was opened is not shut down
    /// cleanly, which is an error, and recovers when it is opened again.
    async fn close(&self) -> Result<(), EngineError> {
        let of_device = async |device| match PlacedMember::new(self.core.any_member(device)) {
            None => Ok(()),
            Some(placed) if !placed.is_lost() => {
                let closed = placed.engine().close().await;
                closed.map_err(|error| placed.engine_error(error))?;
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
        join_all((0..self.core.devices()).map(of_device)).await.into_iter().collect()
    }

    fn record_layout(&self) -> RecordLayout {
        self.core.opened_members().next().expect("one was opened").engine().record_layout()
    }

    fn owner_core(&self, key: &Key) -> Option<usize> {
        // Of the position alone: another device in the place of one, or one that fails, changes no owner.
        let has_owners = self.core.opened_members().next()?.engine().has_owner_cores();
        has_owners.then(|| self.core.owner_of(RingPosition::of_bytes(key.as_bytes(), self.core.hash_seed())))
    }

    fn drive_core(&self, key: &Key, drive_cores: usize) -> usize {
        let KeyPlace { position, device, .. } = self.core.place_of(key);
        core_of_drive((device, self.core.devices()), position, drive_cores)
    }

    fn has_abandoned(&self) -> bool {
        self.abandoned.has_any() || self.core.opened_members().any(|placed| placed.engine().has_abandoned())
    }

    fn prefetch(&self, key: &Key, stage: PrefetchStage) {
        if let Ok(placed) = self.core.member(self.core.device_of(key.as_bytes())) {
            placed.engine().prefetch(key, stage);
        }
    }

    fn statistics(&self) -> EngineStatistics {
        sum_of(self.core.opened_members().map(|placed| placed.engine().statistics()))
    }
}

/// Counts the bytes of a value that was read, and returns them.
fn count_read(traffic: &TrafficCounters, read: &Option<StoredValue>) -> usize {
    let Some(value) = read else { return 0 };
    let bytes = value.as_bytes().len();
    traffic.note_get(bytes);
    bytes
}

/// The statistics of devices together, but for their trees and logs.
pub(super) fn sum_of(of_devices: impl Iterator<Item = EngineStatistics>) -> EngineStatistics {
    of_devices.fold(EngineStatistics::default(), |mut sum, of_device| {
        sum.add(&of_device);
        sum.cache.add(&of_device.cache);
        sum
    })
}
