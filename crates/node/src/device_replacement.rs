//! The replacement of a lost device of a namespace on several, while the others are served.
//!
//! ```text
//!   name ─▶ place of a device that does not serve ─▶ new device: blank, or discarded ─▶ volume replaced ─▶ cores (`node.rs`)
//! ```
//! In: an open namespace, and the word of an operator that what a device holds is lost. Out: the namespace with another device. Invariant: the new device is written only if it was created now, or has no data, or may
//! be discarded. Tested by `crates/octokv/tests/several_devices.rs` and the scenario `devices` of the simulator.

use crate::config::{DeviceConfig, ExistingDataPolicy, NamespaceConfig};
use crate::core_namespaces::NamespaceVolume;
use crate::error::{NamespaceChangeError, StartError};
use crate::namespace_device::{NamespaceDevice, names_of, open_for_core};
use crate::namespace_open::{
    NamespaceOpenOptions, OpenNamespace, dedicated_handle, format_config, open_config, run_to_completion,
};
use crate::validate::validate_namespace;
use octokv_base::BufferPool;
use octokv_device::Device;
use octokv_engine::common::superblock_io::is_blank;
use octokv_engine::{AnyVolume, OpenError, Volume};
use std::rc::Rc;

impl OpenNamespace {
    /// The place of a device that is lost, by its name.
    ///
    /// # Errors
    /// No device has the name, or it serves, or is the only one.
    pub fn lost_device(&self, name: &str) -> Result<usize, NamespaceChangeError> {
        if let [only] = &self.devices[..] {
            let (name, error) = (only.name(), OpenError::NotSpanned);
            return Err(NamespaceChangeError::Open(StartError::Volume { name, error }));
        }
        let statuses = self.device_statuses();
        let Some(at) = statuses.iter().position(|device| device.name == name) else {
            let (id, of) = (self.config.id, names_of(&self.devices));
            return Err(NamespaceChangeError::NoSuchDevice { id, name: name.to_owned(), of });
        };
        match statuses[at].failure.is_none() && !statuses[at].report.is_read_only {
            true => Err(NamespaceChangeError::DeviceServes(name.to_owned())),
            false => Ok(at),
        }
    }

    /// The namespace with a new device in a place. Its cores do not have it yet.
    ///
    /// # Errors
    /// An invalid device, or one with data; one that fails. The volume goes on without it.
    pub fn replaced(
        &self,
        at: usize,
        device: DeviceConfig,
        existing: ExistingDataPolicy,
        options: NamespaceOpenOptions,
    ) -> Result<OpenNamespace, StartError> {
        let mut config = NamespaceConfig { existing_data: ExistingDataPolicy::Check, ..self.config.clone() };
        config.devices[at] = device;
        validate_namespace(&config)?;
        let NamespaceVolume::Kv(volume) = &self.volume else {
            unreachable!("a namespace of blocks is on one device")
        };
        let (new, is_new) = NamespaceDevice::open(&config.devices[at], config.drive_profile)?;
        let name = new.name();
        let failed = |error| StartError::Volume { name: name.clone(), error };
        let mut devices = self.devices.clone();
        devices[at] = new.supervised(options.device_timeout, devices.len());
        let handle = dedicated_handle(options.driver, options.device_depth).map_err(StartError::System)?;
        let opened = open_for_core(&devices, &handle).map_err(StartError::System)?;
        let is_kept = existing != ExistingDataPolicy::Discard;
        if is_kept && !run_to_completion(&handle, may_take(volume, &opened, at, is_new)).map_err(failed)? {
            let why = format!("{name} is not new: --format discards what it holds");
            return Err(StartError::InvalidSetting { name: "device", why });
        }
        let format = format_config(&config, options)?;
        let (open, pool) = (open_config(&config, &format, options), BufferPool::new(64 << 20));
        let scrub_rate = options.scrub_bytes_per_second / devices.len() as u64;
        let prepare = |volume: &AnyVolume| volume.set_scrub_rate(scrub_rate);
        run_to_completion(&handle, volume.replace((&opened, at, is_kept), &pool, (&open, &format), prepare))
            .map_err(failed)?;
        if let DeviceConfig::File { create_bytes, .. } = &mut config.devices[at] {
            // It exists from now on.
            *create_bytes = None;
        }
        Ok(OpenNamespace { config, volume: self.volume.clone(), devices })
    }
}

/// Whether a device may take a place without the loss of data: it was created now and is blank, or it is that of a replacement that had come to its end.
///
/// # Errors
/// The device's.
async fn may_take(
    volume: &AnyVolume,
    devices: &[Rc<dyn Device>],
    at: usize,
    is_new: bool,
) -> Result<bool, OpenError> {
    Ok(is_new && is_blank(&*devices[at]).await? || volume.is_replaced_by(devices, at).await)
}
