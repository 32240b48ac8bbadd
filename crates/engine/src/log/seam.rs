//! The log engine behind [`Volume`], on one device.

use super::format::format;
use super::handle::LogEngine;
use super::open::open;
use super::recovery::recover_volume;
use super::verify::verify;
use super::volume::LogVolume;
use crate::common::volume_format::only_device;
use crate::{
    DeviceLayout, EngineStatistics, FormatConfig, FormatVersions, OpenConfig, OpenError, PrefetchPlan,
    VerifyFailure, VerifyObserver, VerifyReport, Volume, VolumeInfo,
};
use octokv_base::{BufferPool, SharedSum};
use octokv_device::Device;
use std::rc::Rc;
use std::sync::Arc;

impl Volume for Arc<LogVolume> {
    type Engine = LogEngine;

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
    ) -> Result<Arc<LogVolume>, OpenError> {
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
        recover_volume(&**only_device(devices)?).await?;
        Ok(FormatVersions { before: 1, after: 1 })
    }

    fn device_layout(format_region: &[u8]) -> Option<DeviceLayout> {
        super::format::device_layout(format_region)
    }

    fn engine(&self, _core: usize, devices: &[Rc<dyn Device>], pool: BufferPool) -> LogEngine {
        let [device] = devices else { panic!("{} devices of a volume of one", devices.len()) };
        LogEngine::new(Arc::clone(self), Rc::clone(device), pool)
    }

    fn info(&self) -> VolumeInfo {
        LogVolume::info(self)
    }

    fn used_bytes(&self) -> SharedSum {
        LogVolume::used_bytes(self).into()
    }

    fn set_scrub_rate(&self, bytes_per_second: u64) {
        self.scrub.set_rate(bytes_per_second);
    }

    fn is_idle(&self) -> bool {
        LogVolume::is_idle(self)
    }

    fn is_read_only(&self) -> bool {
        LogVolume::is_read_only(self)
    }

    fn statistics(&self) -> EngineStatistics {
        LogVolume::statistics(self)
    }
}
