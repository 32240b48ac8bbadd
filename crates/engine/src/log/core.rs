//! One core's part of an open volume: its device, its buffers, and the operations whose callers dropped them.

use super::recent_images::RecentImages;
use super::split_signal::SplitSignal;
use super::volume::LogVolume;
use crate::common::abandoned::AbandonedOperations;
use crate::{EngineError, VolumePlace};
use octokv_base::{Buffer, BufferPool};
use octokv_device::{Device, DeviceError};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// One core's part of an open volume.
pub(super) struct LogCore {
    pub(super) volume: Arc<LogVolume>,
    pub(super) device: Rc<dyn Device>,
    pub(super) pool: BufferPool,
    /// Operations whose callers dropped them.
    pub(super) abandoned: AbandonedOperations,
    pub(super) splits: SplitSignal,
    pub(super) recent: RefCell<RecentImages>,
}

impl LogCore {
    /// A core's part. REQUIRES: `device` is that core's view of the volume's device.
    pub(super) fn new(volume: Arc<LogVolume>, device: Rc<dyn Device>, pool: BufferPool) -> LogCore {
        let abandoned = AbandonedOperations::new(volume.abandoned.clone());
        let recent = RefCell::new(RecentImages::new(volume.settings.recent_image_bytes));
        LogCore { volume, device, pool, abandoned, splits: SplitSignal::default(), recent }
    }

    /// Reads whole units of the device.
    ///
    /// # Errors
    /// The device's, and [`EngineError::NoMemory`].
    pub(super) async fn read_units(&self, unit: u64, units: u32, store: u32) -> Result<Buffer, EngineError> {
        let bytes = units as usize * self.volume.layout().unit_bytes as usize;
        let buffer = self.pool.take(bytes).ok_or(EngineError::NoMemory)?;
        let read = self.device.read(self.volume.lba(unit), buffer).await.into_read();
        read.map_err(|error| device_error(error, store))
    }

    /// The error of a damaged image or record of a store, at a unit.
    #[cold]
    pub(super) fn corrupt(&self, unit: u64, store: u32) -> EngineError {
        EngineError::Corrupt { lba: self.volume.lba(unit).0, place: VolumePlace::new(0, store) }
    }
}

/// The failure of the device in an operation of a store.
#[cold]
pub(super) fn device_error(error: DeviceError, store: u32) -> EngineError {
    EngineError::Device { error, place: VolumePlace::new(0, store) }
}
