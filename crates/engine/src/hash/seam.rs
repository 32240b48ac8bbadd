//! The hash engine behind [`Volume`], one device with an index in memory, and on [`GroupCommit`].

use super::engine::HashCore;
use super::format::format;
use super::handle::HashEngine;
use super::journal::IndexChange;
use super::recovery::open;
use super::superblock::HashSuperblock;
use super::upgrade::upgrade;
use super::verify::verify;
use super::volume::HashVolume;
use crate::common::allocator::Extent;
use crate::common::commit_queue::CommitQueue;
use crate::common::group_commit::GroupCommit;
use crate::common::key_locks::KeyLocks;
use crate::common::superblock_io::{check_slots, newest};
use crate::{
    DeviceLayout, EngineError, EngineStatistics, FormatConfig, FormatVersions, OpenConfig, OpenError,
    PrefetchPlan, PrefetchStage, VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo,
};
use octokv_base::{BufferPool, Lba, SharedSum};
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;

/// The only device of a volume of this format.
fn only(devices: &[Rc<dyn Device>]) -> Result<&Rc<dyn Device>, OpenError> {
    match devices {
        [device] => Ok(device),
        _ => Err(OpenError::DeviceCount { have: devices.len(), most: 1 }),
    }
}

impl Volume for Arc<HashVolume> {
    type Engine = HashEngine;

    const PREFETCH: PrefetchPlan =
        &[(12, PrefetchStage::Partition), (8, PrefetchStage::Entry), (4, PrefetchStage::Record)];

    async fn format(devices: &[Rc<dyn Device>], config: &FormatConfig) -> Result<(), OpenError> {
        format(&**only(devices)?, config).await
    }

    async fn open(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> Result<Arc<HashVolume>, OpenError> {
        open(only(devices)?, pool, config, format).await
    }

    async fn verify(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        observer: &mut impl VerifyObserver,
    ) -> Result<VerifyReport, VerifyFailure> {
        let device = only(devices).map_err(|reason| VerifyFailure { reason, remains: None })?;
        verify(&**device, pool, observer).await
    }

    async fn upgrade(devices: &[Rc<dyn Device>], pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        upgrade(only(devices)?, pool).await
    }

    fn device_layout(format_region: &[u8]) -> Option<DeviceLayout> {
        let superblock: HashSuperblock = newest(&check_slots(format_region).collect::<Vec<_>>())?;
        Some(superblock.layout.device_layout())
    }

    fn engine(&self, core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> HashEngine {
        let [device] = devices else { panic!("{} devices of a volume of one", devices.len()) };
        HashEngine::new(Arc::clone(self), core, Rc::clone(device), pool)
    }

    fn info(&self) -> VolumeInfo {
        HashVolume::info(self)
    }

    fn used_bytes(&self) -> SharedSum {
        HashVolume::used_bytes(self).into()
    }

    fn is_idle(&self) -> bool {
        HashVolume::is_idle(self)
    }

    fn is_read_only(&self) -> bool {
        HashVolume::is_read_only(self)
    }

    fn statistics(&self) -> EngineStatistics {
        HashVolume::statistics(self)
    }
}

impl GroupCommit for HashCore {
    type Entry = IndexChange;

    fn commits(&self) -> &CommitQueue<IndexChange> {
        &self.volume.commits
    }

    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn journal_lba(&self, copy: u64, unit: u32) -> Lba {
        self.volume.lba(self.volume.layout().journal_start_unit(copy) + u64::from(unit))
    }

    fn apply(&self, change: &IndexChange, number: u64) -> Option<Extent> {
        self.volume.apply(change, number)
    }

    fn retire(&self, freed: &[Extent]) {
        HashCore::retire(self, freed);
    }

    fn maintenance_locks(&self) -> &KeyLocks {
        &self.volume.maintenance_locks
    }

    async fn write_checkpoint(&self) -> Result<(), EngineError> {
        self.write_images(false).await
    }
}
