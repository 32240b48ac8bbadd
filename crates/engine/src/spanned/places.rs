//! Where something lies on a device of several: what the volume on it says, by the blocks of the whole device.

use crate::common::superblock::SUPERBLOCK_AREA_BYTES;
use crate::{EngineError, Finding, OpenError, VerifyObserver, VolumePlace};
use octokv_device::Device;

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
        MemberPlace { device, blocks: SUPERBLOCK_AREA_BYTES / u64::from(of.geometry().block_bytes) }
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

/// One core's handle on the volume of a device, and its place.
pub(super) struct PlacedMember<'a, E> {
    pub engine: &'a E,
    pub place: MemberPlace,
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
