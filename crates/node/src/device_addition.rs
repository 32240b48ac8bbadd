//! The addition of a device to a namespace on several, while it is served.
//!
//! ```text
//!   new device: blank, or discarded ─▶ volume extended ─▶ cores (`node.rs`) ─▶ partitions move to it, paced (`octokv_engine`)
//! ```
//! In: an open namespace and a device. Out: the namespace with the device behind the others. Invariant: the new device is written only if it was created now and has no data, or may
//! be discarded. Tested by `crates/octokv/tests/several_devices.rs`.

use crate::config::{DeviceConfig, ExistingDataPolicy, NamespaceConfig};
use crate::core_namespaces::NamespaceVolume;
use crate::error::{NamespaceChangeError, StartError};
use crate::namespace_device::{NamespaceDevice, open_for_core};
use crate::namespace_open::{
    NamespaceOpenOptions, OpenNamespace, dedicated_handle, format_config, open_config, run_to_completion,
};
use crate::validate::validate_namespace;
use octokv_base::BufferPool;
use octokv_engine::common::superblock_io::is_blank;
use octokv_engine::{AnyVolume, OpenError, Volume};

impl OpenNamespace {
    /// The namespace with a new device behind its others. Its cores do not have it yet.
    ///
    /// # Errors
    /// A namespace on one device, or of blocks; an invalid device, or one with data; one that fails. The open volume is unchanged; with [`OpenError::AdditionUnfinished`] the next opening may need
    /// the new device: the addition has to be repeated.
    pub fn extended(
        &self,
        device: DeviceConfig,
        existing: ExistingDataPolicy,
        options: NamespaceOpenOptions,
    ) -> Result<OpenNamespace, NamespaceChangeError> {
        let (NamespaceVolume::Kv(volume), [_, _, ..]) = (&self.volume, &self.devices[..]) else {
            let (name, error) = (self.devices[0].name(), OpenError::NotExtendable);
            return Err(NamespaceChangeError::Open(StartError::Volume { name, error }));
        };
        self.extended_volume(volume, device, existing, options).map_err(NamespaceChangeError::Open)
    }

    fn extended_volume(
        &self,
        volume: &AnyVolume,
        device: DeviceConfig,
        existing: ExistingDataPolicy,
        options: NamespaceOpenOptions,
    ) -> Result<OpenNamespace, StartError> {
        let mut config = NamespaceConfig { existing_data: ExistingDataPolicy::Check, ..self.config.clone() };
        let index = config.devices.len();
        config.devices.push(device);
        validate_namespace(&config)?;
        let (new, is_new) = NamespaceDevice::open(&config.devices[index], config.drive_profile)?;
        let name = new.name();
        let failed = |error| StartError::Volume { name: name.clone(), error };
        let mut devices = self.devices.clone();
        devices.push(new.supervised(options.device_timeout, index + 1));
        let handle = dedicated_handle(options.driver, options.device_depth).map_err(StartError::System)?;
        let opened = open_for_core(&devices, &handle).map_err(StartError::System)?;
        let is_kept = existing != ExistingDataPolicy::Discard;
        let may_take = async || Ok::<_, OpenError>(is_new && is_blank(&*opened[index]).await?);
        if is_kept && !run_to_completion(&handle, may_take()).map_err(failed)? {
            let why = format!("{name} is not new: --format discards what it holds");
            return Err(StartError::InvalidSetting { name: "device", why });
        }
        let format = format_config(&config, options)?;
        let (open, pool) = (open_config(&config, &format, options), BufferPool::new(64 << 20));
        let scrub_rate = options.scrub_bytes_per_second / devices.len() as u64;
        let prepare = |volume: &AnyVolume| volume.set_scrub_rate(scrub_rate);
        run_to_completion(&handle, volume.add(&opened, &pool, (&open, &format), prepare)).map_err(failed)?;
        if let DeviceConfig::File { create_bytes, .. } = &mut config.devices[index] {
            // It exists from now on.
            *create_bytes = None;
        }
        Ok(OpenNamespace { config, volume: self.volume.clone(), devices })
    }
}
