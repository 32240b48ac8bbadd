//! The devices of a namespace, opened once per process, and each core's views of them.
//!
//! In: the settings of devices. Out: [`NamespaceDevice`]s. Invariants: an open file stays locked until its last handle is dropped. Of several devices each is supervised, and one that
//! does not open is replaced by an [`UnavailableDevice`], so that the others are served.

use crate::config::{DeviceConfig, ExistingDataPolicy, NamespaceConfig};
use crate::core_namespaces::OpenDevice;
use crate::error::StartError;
use octokv_base::Nanos;
use octokv_device::health::DeviceHealth;
use octokv_device::ssd_model::{DriveProfile, SharedSsdModel, SsdModel, shared_model};
use octokv_device::supervised::DeviceSupervision;
use octokv_device::unavailable::UnavailableDevice;
use octokv_device::{Device, FileDevice, Geometry, MemoryDevice, RamDisk, SimulatedSsd};
use octokv_engine::volume::FORMAT_REGION_BYTES;
use octokv_runtime::{DeviceHandle, DeviceSource, ReactorHandle};
use octokv_sys::file::{DeviceOpenError, open_device};
use octokv_sys::process::available_memory_bytes;
use std::io;
use std::rc::Rc;
use std::sync::Arc;

/// A device, opened once per process.
#[derive(Clone)]
pub(crate) struct NamespaceDevice {
    storage: Storage,
    /// The SSD model whose latencies the device emulates, if one is configured.
    drive_model: Option<SharedSsdModel>,
    /// How one of several devices is supervised.
    supervision: Option<DeviceSupervision>,
}

#[derive(Clone)]
enum Storage {
    Memory(Arc<RamDisk>),
    File(DeviceSource),
    /// One of several that did not open: its name, and why.
    Unavailable(String, String),
}

impl NamespaceDevice {
    fn new(storage: Storage, drive_model: Option<SharedSsdModel>) -> NamespaceDevice {
        NamespaceDevice { storage, drive_model, supervision: None }
    }

    /// Opens the device. The flag says whether it may be formatted: see [`Storage::open`]; memory that emulates a
    /// drive always may.
    ///
    /// # Errors
    /// The device does not open, or is larger than the drive that it emulates.
    pub fn open(
        config: &DeviceConfig,
        drive: Option<&DriveProfile>,
    ) -> Result<(NamespaceDevice, bool), StartError> {
        let (storage, is_new) = Storage::open(config)?;
        let Some(drive) = drive else { return Ok((NamespaceDevice::new(storage, None), is_new)) };
        let (bytes, block_bytes) = storage.size();
        if bytes > drive.capacity_bytes {
            let why = format!(
                "{bytes} bytes are more than a {} has: {} bytes",
                drive.product, drive.capacity_bytes
            );
            return Err(StartError::InvalidSetting { name: "size", why });
        }
        let is_new = is_new || matches!(storage, Storage::Memory(_));
        let model = SsdModel::new(*drive, block_bytes);
        let model = if is_new { model } else { model.prefilled() };
        tracing::info!(device = storage.name(), drive = drive.product, "emulating a drive's latency");
        Ok((NamespaceDevice::new(storage, Some(shared_model(model))), is_new))
    }

    /// Its name in messages.
    pub fn name(&self) -> String {
        self.storage.name()
    }

    /// Why it did not open; `None` if it did.
    pub fn open_failure(&self) -> Option<&str> {
        match &self.storage {
            Storage::Unavailable(_, why) => Some(why),
            Storage::Memory(_) | Storage::File(_) => None,
        }
    }

    /// Its health, if it is supervised.
    pub fn health(&self) -> Option<&DeviceHealth> {
        self.supervision.as_ref().map(DeviceSupervision::health)
    }

    /// Opens the devices of a namespace. The flag says whether they may be formatted: all are new. Several are supervised, and one of them that has failed
    /// does not keep the others from being opened.
    ///
    /// # Errors
    /// A device does not open; one of several has not failed, but is in use or none.
    pub fn open_all(
        config: &NamespaceConfig,
        timeout: Nanos,
    ) -> Result<(Vec<NamespaceDevice>, bool), StartError> {
        let exists =
            |device: &DeviceConfig| matches!(device, DeviceConfig::File { path, .. } if path.exists());
        let is_checked = config.existing_data == ExistingDataPolicy::Check;
        let is_kept = config.devices.len() > 1 && is_checked && config.devices.iter().any(exists);
        let (mut devices, mut are_new) = (Vec::with_capacity(config.devices.len()), true);
        for device in &config.devices {
            // A file that is missing beside others is lost: an empty one would be none of their volume.
            let device = match device {
                DeviceConfig::File { path, .. } if is_kept => {
                    &DeviceConfig::File { path: path.clone(), create_bytes: None }
                }
                device => device,
            };
            match NamespaceDevice::open(device, config.drive_profile) {
                Ok((opened, is_new)) => {
                    devices.push(opened);
                    are_new &= is_new;
                }
                Err(StartError::Device { name, error }) if is_kept && is_failure(&error) => {
                    let storage = Storage::Unavailable(name, error.to_string());
                    devices.push(NamespaceDevice::new(storage, None));
                    are_new = false;
                }
                Err(error) => return Err(error),
            }
        }
        if devices.len() > 1 {
            let count = devices.len();
            devices = devices.into_iter().map(|device| device.supervised(timeout, count)).collect();
        }
        Ok((devices, are_new))
    }

    /// The device, supervised as one of so many.
    pub fn supervised(self, timeout: Nanos, count: usize) -> NamespaceDevice {
        NamespaceDevice { supervision: Some(DeviceSupervision::new(timeout, count)), ..self }
    }
}

/// Whether a device is lost, as opposed to one that is another kind of file, or in use.
fn is_failure(error: &DeviceOpenError) -> bool {
    matches!(error, DeviceOpenError::NotFound | DeviceOpenError::System(_))
}

/// The names of devices, in one line.
pub(crate) fn names_of(devices: &[NamespaceDevice]) -> String {
    devices.iter().map(NamespaceDevice::name).collect::<Vec<_>>().join(", ")
}

/// One core's views of devices.
///
/// # Errors
/// The core's queue cannot open a device.
pub(crate) fn open_for_core(
    devices: &[NamespaceDevice],
    handle: &ReactorHandle,
) -> io::Result<Vec<Rc<dyn Device>>> {
    devices.iter().map(|device| device.open_for_core(handle)).collect()
}

impl OpenDevice for NamespaceDevice {
    fn open_for_core(&self, handle: &ReactorHandle) -> io::Result<Rc<dyn Device>> {
        let depth = self.supervision.as_ref().map(|supervision| supervision.depth(handle));
        let device = self.storage.open_for_core(&handle.devices(), depth)?;
        let device: Rc<dyn Device> = match &self.drive_model {
            None => device,
            Some(model) => Rc::new(SimulatedSsd::new(device, Arc::clone(model), handle.clone())),
        };
        Ok(match &self.supervision {
            None => device,
            Some(supervision) => Rc::new(supervision.supervise(device, handle)),
        })
    }
}

impl Storage {
    /// Opens the storage. The flag is true for a file that this process may format: one created now, or created by a
    /// start that was killed before its format ended.
    fn open(config: &DeviceConfig) -> Result<(Storage, bool), StartError> {
        match config {
            DeviceConfig::Memory { bytes, block_bytes } => {
                // Memory is committed as it fills: more than is available would get this process, or another, killed.
                if let Some(available) = available_memory_bytes().filter(|available| bytes > available) {
                    let why =
                        format!("{bytes} bytes of memory are more than the {available} that are available");
                    return Err(StartError::InvalidSetting { name: "size", why });
                }
                let memory = RamDisk::new(*bytes, *block_bytes).map_err(StartError::System)?;
                Ok((Storage::Memory(memory), false))
            }
            DeviceConfig::File { path, create_bytes } => {
                let name = path.display().to_string();
                let file = open_device(path, *create_bytes, true)
                    .map_err(|error| StartError::Device { name, error })?;
                let is_new = file.was_created()
                    || (create_bytes.is_some()
                        && !file.is_block_device()
                        && !file.has_data_from(FORMAT_REGION_BYTES));
                Ok((Storage::File(DeviceSource::from_file(file)), is_new))
            }
        }
    }

    fn name(&self) -> String {
        match self {
            Storage::Memory(_) => "memory".to_owned(),
            Storage::File(media) => media.name.to_string(),
            Storage::Unavailable(name, _) => name.clone(),
        }
    }

    /// Device size and block size, both in bytes.
    fn size(&self) -> (u64, u32) {
        match self {
            Storage::Memory(memory) => (memory.geometry().bytes(), memory.geometry().block_bytes),
            Storage::File(media) => (media.size_bytes, media.block_bytes),
            Storage::Unavailable(..) => (0, 4096),
        }
    }

    /// One core's view of the storage, with at most `depth` operations in flight, if that is bounded.
    fn open_for_core(&self, channel: &DeviceHandle, depth: Option<usize>) -> io::Result<Rc<dyn Device>> {
        Ok(match self {
            Storage::Memory(memory) => Rc::new(MemoryDevice::new(Arc::clone(memory))),
            Storage::Unavailable(name, _) => Rc::new(UnavailableDevice::new(name.clone())),
            Storage::File(media) => {
                let blocks = media.size_bytes / u64::from(media.block_bytes);
                let geometry = Geometry { block_bytes: media.block_bytes, blocks, volatile: false };
                let device = FileDevice::new(channel.clone(), channel.open(media)?, geometry, self.name());
                let device = device.with_preferred_write(media.preferred_write_bytes);
                let device = device.with_unwritten_of(media.clone());
                Rc::new(match depth {
                    None => device,
                    Some(depth) => device.with_depth(depth),
                })
            }
        })
    }
}
