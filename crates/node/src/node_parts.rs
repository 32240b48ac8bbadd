//! What a node has before its cores start: its namespaces, opened and recovered, and its target.
//!
//! In: the configuration of a node. Out: its [`OpenNamespace`]s, and a [`Target`] with them. Tested by `node.rs`.

use crate::config::{NamespaceConfig, NodeConfig};
use crate::error::StartError;
use crate::namespace_open::{NamespaceOpenOptions, OpenNamespace};
use crate::spanned_tokens::host_weights;
use crate::validate::{reject_duplicate, validate_namespace};
use octokv_base::NamespaceId;
use octokv_nvmf::Target;
use std::collections::BTreeMap;
use std::sync::Arc;

/// The open namespaces, and the optional ones that failed to open.
type OpenedNamespaces = (BTreeMap<NamespaceId, OpenNamespace>, Vec<(NamespaceConfig, StartError)>);

/// Opens the configured namespaces. An optional one that fails is logged and returned with its error.
pub(crate) fn open_namespaces(config: &NodeConfig) -> Result<OpenedNamespaces, StartError> {
    let (mut open_namespaces, mut offline) = (BTreeMap::new(), Vec::new());
    for namespace in config.all_namespaces() {
        validate_namespace(&namespace)?;
        if open_namespaces.contains_key(&namespace.id) {
            let why = match namespace.required {
                true => format!("{} is configured twice", namespace.id),
                false => format!(
                    "{} is configured, and was also added while the node ran (state file)",
                    namespace.id
                ),
            };
            return Err(StartError::InvalidSetting { name: "nsid", why });
        }
        let opened = OpenNamespace::open(&namespace, NamespaceOpenOptions::of(config))
            .and_then(|open| reject_duplicate(&open_namespaces, open));
        match opened {
            Ok(open) => drop(open_namespaces.insert(namespace.id, open)),
            Err(error) if namespace.required => return Err(error),
            Err(error) => {
                tracing::error!(nsid = namespace.id.0, %error, "added namespace failed to open and is offline");
                offline.push((namespace, error));
            }
        }
    }
    Ok((open_namespaces, offline))
}

/// Makes the target of a node with these namespaces.
pub(crate) fn new_target(
    config: &NodeConfig,
    namespaces: &BTreeMap<NamespaceId, OpenNamespace>,
) -> Result<Arc<Target>, StartError> {
    let value_bytes_max = namespaces.values().filter_map(OpenNamespace::value_bytes_max).max().unwrap_or(0);
    if config.buffer_bytes < 4 * value_bytes_max {
        let why = format!(
            "the volume holds values of up to {value_bytes_max} bytes: space for four of them is needed"
        );
        return Err(StartError::InvalidSetting { name: "buffer_bytes", why });
    }
    let mut subsystem = config.subsystem.clone();
    subsystem.receive_bytes_max = subsystem.receive_bytes_max.max(2 * value_bytes_max);
    subsystem.nqn.clone_from(&config.nqn);
    subsystem.connections_max = config.connections_max;
    subsystem.iterator_idle_limit = config.tree.iterator_idle;
    subsystem.value_bytes_max = subsystem.value_bytes_max.max(value_bytes_max as u32);
    let infos = namespaces.values().map(|namespace| namespace.info(subsystem.key_bytes_max)).collect();
    let target = Target::new(subsystem, infos);
    target.set_host_acl(config.host_acl.clone());
    target.set_referrals(config.referrals.clone());
    target.set_health(config.health);
    target.set_host_weights(host_weights(&config.scheduling));
    config.ana_states.iter().for_each(|&(group, state)| target.set_ana_state(group, state));
    Ok(target)
}
