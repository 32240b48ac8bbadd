//! Replaces a lost device of a namespace, or adds one behind the others, in the node and in the state file.
//!
//! In: the name of a device whose keys the operator gives up, and the device in its place; or another device. Out: the namespace as it is served then. Invariants: a file that was created for a change that failed is
//! removed; one that the namespace has is kept, and named in the state file. Tested by `crates/octokv/tests/several_devices.rs`.

use crate::api_types::{AddDevice, NamespaceSummary, ReplaceDevice};
use crate::device_names::{DeviceNames, MEMORY_DEVICE};
use crate::namespace_summary::namespace_summary;
use crate::service::{AdminError, AdminService};
use crate::state_file::PersistedState;
use octokv_base::NamespaceId;
use octokv_engine::OpenError;
use octokv_node::{
    DeviceConfig, DeviceOpenError, ExistingDataPolicy, NamespaceChangeError, NamespaceStatus, StartError,
};
use std::path::{Path, PathBuf};

fn is_file(device: &DeviceConfig, path: &Path) -> bool {
    matches!(device, DeviceConfig::File { path: of, .. } if of == path)
}

impl AdminService {
    /// Puts a device without keys in the place of one that is lost. A namespace of the configuration has the new one until the next start: it has to be changed there.
    /// It may be repeated: if the namespace has the new device already, the state file is written.
    ///
    /// # Errors
    /// See [`AdminError`]: with [`AdminError::Failed`] the device may be replaced and the state file not changed.
    pub fn replace_device(&self, nsid: u32, request: &ReplaceDevice) -> Result<NamespaceSummary, AdminError> {
        self.change_devices(nsid, &request.device, |path| match self.namespace_on(nsid, path) {
            // It was replaced before.
            Some(report) if report.devices.iter().all(|device| device.name != request.lost) => Ok(report),
            _ => {
                self.with_new_file((nsid, path), (request.size_bytes, request.discard), |config, existing| {
                    self.node.replace_device(NamespaceId(nsid), &request.lost, config, existing)
                })
            }
        })
    }

    /// Adds a device behind the several of a namespace. One of the configuration has it until the next start: it has to be named there.
    /// It may be repeated: if the namespace has the device already, the state file is written.
    ///
    /// # Errors
    /// See [`AdminError`]: with [`AdminError::Failed`] the namespace may have the device and the state file not be changed.
    pub fn add_device(&self, nsid: u32, request: &AddDevice) -> Result<NamespaceSummary, AdminError> {
        self.change_devices(nsid, &request.device, |path| match self.namespace_on(nsid, path) {
            // It was added before.
            Some(report) if report.config.devices.last().is_some_and(|last| is_file(last, path)) => {
                Ok(report)
            }
            _ => {
                self.with_new_file((nsid, path), (request.size_bytes, request.discard), |config, existing| {
                    self.node.extend_namespace(NamespaceId(nsid), config, existing)
                })
            }
        })
    }

    /// Makes a change that gives a namespace a device, and writes the state file.
    fn change_devices(
        &self,
        nsid: u32,
        device: &str,
        change: impl FnOnce(&Path) -> Result<NamespaceStatus, AdminError>,
    ) -> Result<NamespaceSummary, AdminError> {
        let mut state = self.lock_state();
        if device.is_empty() || device == MEMORY_DEVICE {
            return Err(AdminError::Invalid("device: a path".to_owned()));
        }
        let names = DeviceNames::new(vec![device.to_owned()]).absolute().map_err(AdminError::Invalid)?;
        let path: PathBuf = names.paths().next().expect("a path");
        let is_added = state.namespaces.iter().any(|one| one.nsid == nsid);
        if is_added && self.state_file.is_none() {
            // Fails before anything is changed.
            self.persist(&mut state, PersistedState::default())?;
        }
        let changed = change(&path);
        // An error may come behind the change: then the namespace has the device.
        if let Some(report) = self.namespace_on(nsid, &path).filter(|_| is_added) {
            let mut of_file = state.clone();
            let added = of_file.namespaces.iter_mut().filter(|one| one.nsid == nsid);
            added.for_each(|added| added.device = DeviceNames::of_configs(&report.config.devices));
            self.persist(&mut state, of_file)?;
        }
        changed.map(|report| namespace_summary(&report, is_added))
    }

    /// The namespace, if the device at a path is one of its.
    fn namespace_on(&self, nsid: u32, path: &Path) -> Option<NamespaceStatus> {
        let mut all = self.node.namespaces().into_iter();
        all.find(|one| {
            one.config.id.0 == nsid && one.config.devices.iter().any(|device| is_file(device, path))
        })
    }

    /// Changes the devices of a namespace with a file, which is removed if it was created for that and the change fails.
    fn with_new_file(
        &self,
        (nsid, path): (u32, &Path),
        (size_bytes, discard): (Option<u64>, bool),
        change: impl FnOnce(DeviceConfig, ExistingDataPolicy) -> Result<NamespaceStatus, NamespaceChangeError>,
    ) -> Result<NamespaceStatus, AdminError> {
        let is_missing = path.symlink_metadata().is_err();
        let config = DeviceConfig::File { path: path.to_owned(), create_bytes: size_bytes };
        let existing = match discard {
            true => ExistingDataPolicy::Discard,
            false => ExistingDataPolicy::Check,
        };
        let changed = change(config, existing);
        let remove_new = |error: &NamespaceChangeError| {
            let is_of_another = matches!(
                error,
                NamespaceChangeError::Open(StartError::Device { error: DeviceOpenError::InUse, .. })
            );
            // Devices of the volume may count it.
            let is_needed = matches!(
                error,
                NamespaceChangeError::Open(StartError::Volume {
                    error: OpenError::AdditionUnfinished { .. },
                    ..
                })
            );
            if is_missing && !is_of_another && !is_needed && self.namespace_on(nsid, path).is_none() {
                // If the removal fails, an unused file remains.
                let _ = std::fs::remove_file(path);
            }
        };
        Ok(changed.inspect_err(remove_new)?)
    }
}
