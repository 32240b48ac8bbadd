//! One core's handle on each device of several, and where something lies on it: what the volume on it says, by the blocks of the whole device.

use super::device_queue::DeviceQueue;
use super::traffic::TrafficCounters;
use crate::bug_injection::{self, InjectedBug};
use crate::common::superblock::SUPERBLOCK_AREA_BYTES;
use crate::log::handle::LogEngine;
use crate::{EngineError, Finding, OpenError, VerifyObserver, VolumePlace};
use octokv_base::Nanos;
use octokv_device::{Device, DeviceError};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The error of operations on keys of a device that was not opened, or has failed.
pub(super) fn absent(device: usize) -> EngineError {
    EngineError::Device { error: DeviceError::Unavailable, place: VolumePlace::new(device as u16, 0) }
}

/// The place of a volume on a device of several.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemberPlace {
    /// The index of the device.
    device: u16,
    /// The blocks in front of the volume.
    blocks: u64,
}

impl MemberPlace {
    /// That of the volume on a device of this index.
    pub fn new(device: u16, of: &dyn Device) -> MemberPlace {
        MemberPlace::behind(device, of, SUPERBLOCK_AREA_BYTES)
    }

    /// That of a volume behind so many bytes of a device.
    pub fn behind(device: u16, of: &dyn Device, bytes: u64) -> MemberPlace {
        MemberPlace { device, blocks: bytes / u64::from(of.geometry().block_bytes) }
    }

    /// The block of the device.
    pub fn lba(self, lba: u64) -> u64 {
        lba + self.blocks
    }

    /// An error of an operation.
    pub fn engine_error(self, error: EngineError) -> EngineError {
        let placed = |place: VolumePlace| VolumePlace::new(self.device, place.partition());
        match error {
            EngineError::Corrupt { lba, place } => {
                EngineError::Corrupt { lba: self.lba(lba), place: placed(place) }
            }
            EngineError::Device { error, place } => EngineError::Device { error, place: placed(place) },
            other => other,
        }
    }

    /// An error of an opening.
    pub fn open_error(self, error: OpenError) -> OpenError {
        match error {
            OpenError::CopiesUnreadable { structure, lbas } => {
                OpenError::CopiesUnreadable { structure, lbas: lbas.map(|lba| self.lba(lba)) }
            }
            OpenError::Inconsistent { lba, mismatch } => {
                OpenError::Inconsistent { lba: self.lba(lba), mismatch }
            }
            OpenError::Engine(error) => OpenError::Engine(self.engine_error(error)),
            other => other,
        }
    }
}

/// One core's handle on the volume of one device.
pub(super) struct SpannedMember<E> {
    /// `None` if it was not opened.
    pub volume: Option<OpenMember<E>>,
    /// How often the device was replaced.
    pub replacements: u8,
    /// Whether the device is being replaced, or was, on all cores.
    pub is_retired: Arc<AtomicBool>,
    /// What its keys took and gave.
    pub traffic: Arc<TrafficCounters>,
    /// The queue of the device, if it has one.
    pub queue: Option<Arc<DeviceQueue>>,
}

/// A handle that serves, unless its device has failed meanwhile.
pub(super) struct OpenMember<E> {
    pub engine: E,
    pub place: MemberPlace,
    pub device: Rc<dyn Device>,
    /// The device with the superblocks of the span and the swap region.
    pub whole: Rc<dyn Device>,
    /// `None` without a swap region, or if it could not be opened.
    pub swap: Option<OpenRegion>,
}

/// A handle on the swap region of a device.
pub(super) struct OpenRegion {
    pub engine: LogEngine,
    pub place: MemberPlace,
}

/// One core's handle on the volume of a device that was opened.
pub(super) struct PlacedMember<E>(Rc<SpannedMember<E>>);

impl<E> PlacedMember<E> {
    /// The handle of a member, if it was opened.
    pub fn new(member: Rc<SpannedMember<E>>) -> Option<PlacedMember<E>> {
        member.volume.is_some().then_some(PlacedMember(member))
    }

    /// The handle, its place and its device.
    pub fn open(&self) -> &OpenMember<E> {
        self.0.volume.as_ref().expect("it was opened")
    }

    /// Whether the device has failed, or another takes its place.
    pub fn is_lost(&self) -> bool {
        !self.open().device.is_available() || self.0.is_retired.load(Ordering::Acquire)
    }

    /// Whether the device has not failed.
    pub fn serves(&self) -> bool {
        !self.is_lost() || bug_injection::is_injected(InjectedBug::SpanIgnoreFailure)
    }

    /// The index of the device.
    pub fn index(&self) -> usize {
        self.open().place.device.into()
    }

    /// What the keys of the device took and gave.
    pub fn traffic(&self) -> &TrafficCounters {
        &self.0.traffic
    }

    /// The queue of the device, if it has one.
    pub fn queue(&self) -> Option<&DeviceQueue> {
        self.0.queue.as_deref()
    }

    /// The time by which its queue measures.
    pub fn now(&self) -> Option<Nanos> {
        self.queue().and_then(|queue| queue.now(&*self.open().device))
    }

    /// The handle.
    pub fn engine(&self) -> &E {
        &self.open().engine
    }

    /// How often the device was replaced.
    pub fn replacements(&self) -> u8 {
        self.0.replacements
    }

    /// An error of an operation of the handle, with its place: that the device is not available if it has failed, whatever it was that the engine noticed.
    pub fn engine_error(&self, error: EngineError) -> EngineError {
        if self.serves() { self.open().place.engine_error(error) } else { absent(self.index()) }
    }
}

/// The observer of a verification of several devices, for that of one.
pub(super) struct MemberObserver<'a> {
    pub place: MemberPlace,
    /// Without its type, which would contain itself where volumes on several devices are volumes of any kind.
    pub observer: &'a mut dyn VerifyObserver,
}

impl VerifyObserver for MemberObserver<'_> {
    fn keys_verified(&mut self, done: u64, keys: u64) {
        self.observer.keys_verified(done, keys);
    }
    fn scan_started(&mut self, reason: &OpenError) {
        self.observer.scan_started(&self.place.open_error(*reason));
    }
    fn blocks_scanned(&mut self, done: u64, blocks: u64) {
        self.observer.blocks_scanned(done, blocks);
    }
    fn found(&mut self, finding: &Finding) {
        self.observer.found(&Finding { lba: self.place.lba(finding.lba), kind: finding.kind.clone() });
    }
}
