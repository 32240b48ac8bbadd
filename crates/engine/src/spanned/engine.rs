//! One core's handle on a volume of several devices.
//!
//! An operation on a key is one of the volume on the key's device; errors name that device. A device that has failed while it was open is as one that was not opened. What concerns all keys takes all devices: a listing, a scan or an iterator that
//! lacks one would silently omit keys, and fails instead.

use super::iterator::{PageBudget, SpannedIterator};
use super::partition_map::PartitionMap;
use super::places::{MemberPlace, PlacedMember};
use super::ring_merge::{ListOrder, list_merged, scan_merged};
use super::snapshot_gate::SnapshotGate;
use crate::bug_injection::{self, InjectedBug};
use crate::{
    DeleteOutcome, Engine, EngineError, EngineStatistics, IteratorOptions, IteratorProgress, KeySink,
    KeyStatus, PairSink, PrefetchStage, PutOptions, PutOutcome, PutValue, ScanSink, StoredValue, ValueRange,
    VolumePlace,
};
use futures_util::future::join_all;
use octokv_base::{Key, RecordLayout, RingPosition, RingRange, Version};
use octokv_device::{Device, DeviceError};
use octokv_runtime::ReactorHandle;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// One core's handle on the volume of one device.
pub(super) enum SpannedMember<E> {
    /// It serves, unless its device has failed meanwhile.
    Open(E, MemberPlace, Rc<dyn Device>),
    /// It was not opened.
    Absent,
}

/// See the module header.
pub struct SpannedEngine<E> {
    /// By the indices of the devices.
    members: Vec<SpannedMember<E>>,
    map: PartitionMap,
    hash_seed: u64,
    order: ListOrder,
    shared: SpanShared,
}

/// What the handles of all cores share.
#[derive(Clone, Default)]
pub(super) struct SpanShared {
    pub gate: Arc<SnapshotGate>,
    pub page_budget: Arc<PageBudget>,
}

/// The error of operations on keys of a device that was not opened, or has failed.
fn absent(device: usize) -> EngineError {
    EngineError::Device { error: DeviceError::Unavailable, place: VolumePlace::new(device as u16, 0) }
}

impl<E: Engine> SpannedEngine<E> {
    /// A handle on members, at least one of which serves.
    pub(super) fn new(
        members: Vec<SpannedMember<E>>,
        (map, hash_seed, order): (PartitionMap, u64, ListOrder),
        shared: SpanShared,
    ) -> SpannedEngine<E> {
        SpannedEngine { members, map, hash_seed, order, shared }
    }

    fn device_of(&self, key: &[u8]) -> usize {
        self.map.device_of(RingPosition::of_bytes(key, self.hash_seed))
    }

    fn member(&self, device: usize) -> Result<&E, EngineError> {
        self.placed_member(device).map(|(engine, _)| engine)
    }

    fn placed_member(&self, device: usize) -> Result<(&E, MemberPlace), EngineError> {
        match &self.members[device] {
            SpannedMember::Open(engine, place, of)
                if of.is_available() || bug_injection::is_injected(InjectedBug::SpanIgnoreFailure) =>
            {
                Ok((engine, *place))
            }
            SpannedMember::Open(..) | SpannedMember::Absent => Err(absent(device)),
        }
    }

    /// The handles that were opened, whether their devices have failed meanwhile or not.
    fn opened_members(&self) -> impl Iterator<Item = (&E, MemberPlace, &dyn Device)> {
        self.members.iter().filter_map(|member| match member {
            SpannedMember::Open(engine, place, device) => Some((engine, *place, &**device)),
            SpannedMember::Absent => None,
        })
    }

    /// The handles that serve.
    fn open_members(&self) -> impl Iterator<Item = (&E, MemberPlace)> {
        let serves = |(_, _, device): &(&E, MemberPlace, &dyn Device)| device.is_available();
        self.opened_members().filter(serves).map(|(engine, place, _)| (engine, place))
    }

    /// The error of an operation on a device: that it has failed, whatever it was that the engine noticed.
    fn error_of(&self, device: usize, error: EngineError) -> EngineError {
        match self.placed_member(device) {
            Ok((_, place)) => place.engine_error(error),
            Err(absent) => absent,
        }
    }

    /// The handles of all devices that have keys of a range.
    ///
    /// # Errors
    /// That of the first which is absent.
    fn members_of(&self, range: RingRange) -> Result<Vec<PlacedMember<'_, E>>, EngineError> {
        let devices = (0..self.members.len()).filter(|&device| self.map.has_keys_of(device, range));
        let placed =
            |device| self.placed_member(device).map(|(engine, place)| PlacedMember { engine, place });
        devices.map(placed).collect()
    }

    /// Runs an operation on a key's device, and waits with its outcome while a snapshot is taken.
    async fn on_key<'a, T>(
        &'a self,
        key: &Key,
        operation: impl AsyncFnOnce(&'a E) -> Result<T, EngineError>,
    ) -> Result<T, EngineError> {
        let device = self.device_of(key.as_bytes());
        let outcome = operation(self.member(device)?).await.map_err(|error| self.error_of(device, error));
        self.shared.gate.pass().await;
        outcome
    }

    /// Runs an operation on all devices at once, on those that serve even if others do not.
    ///
    /// # Errors
    /// That of the first device that is absent or failed.
    async fn on_all<'a, T>(
        &'a self,
        operation: impl AsyncFn(&'a E) -> Result<T, EngineError>,
    ) -> Result<Vec<T>, EngineError> {
        let of_device = async |device| {
            operation(self.member(device)?).await.map_err(|error| self.error_of(device, error))
        };
        join_all((0..self.members.len()).map(of_device)).await.into_iter().collect()
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
        self.on_key(key, async |engine| engine.put_with(key, value, options).await).await
    }

    async fn get(&self, key: &Key) -> Result<Option<StoredValue>, EngineError> {
        self.on_key(key, async |engine| engine.get(key).await).await
    }

    async fn get_range(&self, key: &Key, range: ValueRange) -> Result<Option<StoredValue>, EngineError> {
        self.on_key(key, async |engine| engine.get_range(key, range).await).await
    }

    async fn delete_with(&self, key: &Key, version: Version) -> Result<DeleteOutcome, EngineError> {
        self.on_key(key, async |engine| engine.delete_with(key, version).await).await
    }

    async fn status(&self, key: &Key) -> Result<Option<KeyStatus>, EngineError> {
        self.on_key(key, async |engine| engine.status(key).await).await
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
        let outcome = scan_merged(&self.members_of(range)?, self.order, (range, since), sink).await;
        self.shared.gate.pass().await;
        outcome
    }

    async fn create_iterator(&self, options: IteratorOptions) -> Result<Option<Self::Iterator>, EngineError> {
        let (members, reverse) = (self.members_of(RingRange::FULL)?, options.reverse);
        let mut iterators = Vec::with_capacity(members.len());
        let closed = self.shared.gate.close();
        for PlacedMember { engine, place } in members {
            match engine.create_iterator(options.clone()).await.map_err(|error| place.engine_error(error))? {
                Some(iterator) => iterators.push(iterator),
                None => return Ok(None),
            }
        }
        drop(closed);
        // What this one shows is not seen before another snapshot is taken.
        self.shared.gate.pass().await;
        Ok(Some(SpannedIterator::new(iterators, reverse, Arc::clone(&self.shared.page_budget))))
    }

    async fn next_pairs(
        &self,
        iterator: &Self::Iterator,
        sink: &mut impl PairSink,
    ) -> Result<IteratorProgress, EngineError> {
        iterator.next_pairs(&self.members_of(RingRange::FULL)?, sink).await
    }

    async fn seek_iterator(&self, iterator: &Self::Iterator, key: &Key) -> Result<(), EngineError> {
        iterator.seek(&self.members_of(RingRange::FULL)?, key).await
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
            return self.member(0)?.flush().await;
        }
        self.on_all(async |engine| engine.flush().await).await.map(drop)
    }

    async fn maintain(&self, handle: &ReactorHandle, report: impl FnMut(EngineError)) {
        let report = RefCell::new(report);
        let of_member = async |(engine, place, device): (&E, MemberPlace, &dyn Device)| {
            // The errors of a device that has failed say nothing new.
            let report: Box<dyn FnMut(EngineError) + '_> = Box::new(|error| {
                if device.is_available() {
                    report.borrow_mut()(place.engine_error(error));
                }
            });
            engine.maintain(handle, report).await;
        };
        join_all(self.opened_members().map(of_member)).await;
    }

    async fn run_abandoned(&self) {
        join_all(self.opened_members().map(|(engine, ..)| engine.run_abandoned())).await;
    }

    /// Closes the volumes on the devices that serve. One on a device that has failed since it was opened is not shut down
    /// cleanly, which is an error, and recovers when it is opened again.
    async fn close(&self) -> Result<(), EngineError> {
        let of_member = async |device| match &self.members[device] {
            SpannedMember::Absent => Ok(()),
            SpannedMember::Open(..) => {
                self.member(device)?.close().await.map_err(|error| self.error_of(device, error))
            }
        };
        join_all((0..self.members.len()).map(of_member)).await.into_iter().collect()
    }

    fn record_layout(&self) -> RecordLayout {
        self.opened_members().next().expect("one was opened").0.record_layout()
    }

    fn owner_core(&self, key: &Key) -> Option<usize> {
        // Any core can say that a device is absent.
        let member = self.member(self.device_of(key.as_bytes())).ok();
        member.or_else(|| Some(self.open_members().next()?.0))?.owner_core(key)
    }

    fn prefetch(&self, key: &Key, stage: PrefetchStage) {
        if let Ok(engine) = self.member(self.device_of(key.as_bytes())) {
            engine.prefetch(key, stage);
        }
    }

    fn statistics(&self) -> EngineStatistics {
        sum_of(self.opened_members().map(|(engine, ..)| engine.statistics()))
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
