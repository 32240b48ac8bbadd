//! The ordered engine behind [`Volume`], on one device, and on [`GroupCommit`].

use super::core::LsmCore;
use super::format::format;
use super::handle::LsmEngine;
use super::journal::JournalChange;
use super::recovery::open;
use super::superblock::LsmSuperblock;
use super::verify::verify;
use super::volume::LsmVolume;
use crate::common::allocator::Extent;
use crate::common::commit_queue::CommitQueue;
use crate::common::group_commit::GroupCommit;
use crate::common::key_locks::KeyLocks;
use crate::common::superblock_io::{check_slots, newest};
use crate::common::volume_format::only_device;
use crate::{
    DeviceLayout, EngineError, EngineStatistics, FormatConfig, FormatVersions, OpenConfig, OpenError,
    PrefetchPlan, VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo,
};
use octokv_base::{BufferPool, Lba, SharedSum};
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;

impl Volume for Arc<LsmVolume> {
    type Engine = LsmEngine;

    const PREFETCH: PrefetchPlan = &[];

    async fn format(devices: &[Rc<dyn Device>], config: &FormatConfig) -> Result<(), OpenError> {
        let device = only_device(devices)?;
        match device.geometry().volatile {
            true => Ok(()),
            false => format(&**device, config).await,
        }
    }

    async fn open(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        config: OpenConfig,
        format: &FormatConfig,
    ) -> Result<Arc<LsmVolume>, OpenError> {
        open(only_device(devices)?, pool, config, format).await
    }

    async fn verify(
        devices: &[Rc<dyn Device>],
        pool: &BufferPool,
        observer: &mut impl VerifyObserver,
    ) -> Result<VerifyReport, VerifyFailure> {
        let device = only_device(devices).map_err(|reason| VerifyFailure { reason, remains: None })?;
        verify(device, pool, observer).await
    }

    async fn upgrade(devices: &[Rc<dyn Device>], _pool: &BufferPool) -> Result<FormatVersions, OpenError> {
        super::recovery::read_tree_superblock(&**only_device(devices)?).await?;
        Ok(FormatVersions { before: 1, after: 1 })
    }

    fn device_layout(format_region: &[u8]) -> Option<DeviceLayout> {
        let superblock: LsmSuperblock = newest(&check_slots(format_region).collect::<Vec<_>>())?;
        Some(superblock.layout.device_layout())
    }

    fn engine(&self, core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> LsmEngine {
        let [device] = devices else { panic!("{} devices of a volume of one", devices.len()) };
        LsmEngine::new(Arc::clone(self), core, Rc::clone(device), pool)
    }

    fn info(&self) -> VolumeInfo {
        LsmVolume::info(self)
    }

    fn used_bytes(&self) -> SharedSum {
        LsmVolume::used_bytes(self).into()
    }

    fn is_idle(&self) -> bool {
        LsmVolume::is_idle(self)
    }

    fn is_read_only(&self) -> bool {
        LsmVolume::is_read_only(self)
    }

    fn statistics(&self) -> EngineStatistics {
        LsmVolume::statistics(self)
    }
}

impl GroupCommit for LsmCore {
    type Entry = JournalChange;

    fn commits(&self) -> &CommitQueue<JournalChange> {
        &self.volume.commits
    }

    fn device(&self) -> &dyn Device {
        &*self.device
    }

    fn journal_lba(&self, copy: u64, unit: u32) -> Lba {
        self.volume.lba(self.volume.fixed().layout.journal_start_unit(copy) + u64::from(unit))
    }

    /// Space is not freed by changes, but by edits.
    fn apply(&self, change: &JournalChange, number: u64) -> Option<Extent> {
        self.volume.apply(change, number);
        None
    }

    fn retire(&self, freed: &[Extent]) {
        assert!(freed.is_empty(), "no change frees space");
    }

    fn maintenance_locks(&self) -> &KeyLocks {
        &self.volume.maintenance_locks
    }

    async fn write_checkpoint(&self) -> Result<(), EngineError> {
        self.write_image(false).await
    }
}
