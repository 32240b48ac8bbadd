//! Replaces a lost device of a namespace, in the node and in the state file.
//!
//! In: the name of a device whose keys the operator gives up, and the device in its place. Out: the namespace as it is served then. Invariant: a file that was created for a replacement that failed is
//! removed. Tested by `crates/octokv/tests/several_devices.rs`.

use crate::api_types::{NamespaceSummary, ReplaceDevice};
use crate::device_names::{DeviceNames, MEMORY_DEVICE};
use crate::service::{AdminError, AdminService, namespace_summary};
use octokv_base::NamespaceId;
use octokv_node::{DeviceConfig, ExistingDataPolicy, NamespaceChangeError};
use std::path::PathBuf;

impl AdminService {
    /// Puts a device without keys in the place of one that is lost. A namespace of the configuration has the new one until the next start: it has to be changed there.
    ///
    /// # Errors
    /// See [`AdminError`]: with [`AdminError::Failed`] the device may be replaced and the state file not changed.
    pub fn replace_device(&self, nsid: u32, request: &ReplaceDevice) -> Result<NamespaceSummary, AdminError> {
        let mut state = self.lock_state();
        if request.device.is_empty() || request.device == MEMORY_DEVICE {
            return Err(AdminError::Invalid("device: a path".to_owned()));
        }
        let names = DeviceNames::new(vec![request.device.clone()]).absolute().map_err(AdminError::Invalid)?;
        let path: PathBuf = names.paths().next().expect("a path");
        let is_missing = path.symlink_metadata().is_err();
        let config = DeviceConfig::File { path: path.clone(), create_bytes: request.size_bytes };
        let existing = match request.discard {
            true => ExistingDataPolicy::Discard,
            false => ExistingDataPolicy::Check,
        };
        let replaced = self.node.replace_device(NamespaceId(nsid), &request.lost, config, existing);
        let remove_new = |_: &NamespaceChangeError| {
            if is_missing {
                // If the removal fails, an unused file remains.
                let _ = std::fs::remove_file(&path);
            }
        };
        let report = replaced.inspect_err(remove_new)?;
        let mut changed = state.clone();
        let added = changed.namespaces.iter_mut().find(|one| one.nsid == nsid);
        let is_added = added.is_some();
        if let Some(added) = added {
            added.device = DeviceNames::of_configs(&report.config.devices);
            self.persist(&mut state, changed)?;
        }
        Ok(namespace_summary(&report, is_added))
    }
}
