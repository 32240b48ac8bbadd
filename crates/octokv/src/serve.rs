//! `octokv serve`: runs a node until a signal; prints one line on standard output when it is ready.

use crate::admin::default_admin_socket;
use crate::config::{self, AdminConfig, PathSetting};
use crate::exit_status::{CliError, CliResult};
use crate::serve_args::ServeArgs;
use anyhow::{Context, anyhow};
use octokv_admin::service::{AdminPlatform, host_acl, namespace_configs, parse_ana_state};
use octokv_admin::state_file::StateFileLock;
use octokv_admin::{AdminServer, AdminService, DeviceNames, PersistedState, StateFile};
use octokv_client::Url;
use octokv_node::{DeviceConfig, NodeConfig, RunningNode, StartError};
use octokv_sys::file::DeviceOpenError;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Runs `octokv serve`.
///
/// # Errors
/// An invalid configuration, or a node that cannot start or stop cleanly.
pub fn run(flags: &ServeArgs) -> CliResult {
    let (mut config, admin_config) = config::node_config(flags).map_err(CliError::Usage)?;
    // Before anything is opened, so that an early signal is not lost.
    let stop = octokv_sys::signal::install_handlers().context("signal handlers")?;
    let device = DeviceNames::of_configs(&config.devices).to_string();
    let (mut file, _claim, before) = load_state(&config, &admin_config)?;
    apply_state(&mut config, &before, &admin_config)?;
    let node = start_node(config)?;
    let state = PersistedState {
        starts: before.starts + 1,
        unclean_shutdowns: before.unclean_shutdowns + u64::from(before.running),
        running: true,
        ..before
    };
    if let Some(kept) = &file
        && let Err(error) = kept.save(&state)
    {
        if admin_config.state_file != PathSetting::Auto {
            return Err(CliError::Failed(anyhow!("{error}")));
        }
        tracing::warn!(%error, "namespaces and hosts cannot be changed while this node runs");
        file = None;
    }
    for address in node.addresses() {
        tracing::info!(%address, device, nqn = node.nqn(), keys = node.statistics().keys, "listening");
    }
    let (url, port) = (node_url(&node)?, node.addresses().first().map_or(0, |address| address.port()));
    let platform = AdminPlatform { now: octokv_sys::clock::now, random: octokv_sys::process::random_u64 };
    let service = Arc::new(AdminService::new(node, file, state, admin_config.hosts, platform));
    let server = start_admin_server(&admin_config.socket, port, &service)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready {url}")?;
    out.flush()?;
    drop(out);
    stop.wait();
    tracing::info!("stop requested");
    drop(server);
    let service = Arc::into_inner(service).context("the admin socket did not close")?;
    service.stop().map_err(|error| anyhow!("device {device}: {error}"))?;
    tracing::info!(device, "stopped cleanly");
    Ok(())
}

/// Opens, locks and reads the state file, if one is configured.
fn load_state(
    config: &NodeConfig,
    admin_config: &AdminConfig,
) -> Result<(Option<StateFile>, Option<StateFileLock>, PersistedState), CliError> {
    let path = match (&admin_config.state_file, &config.devices[..]) {
        (PathSetting::Path(path), _) => Some(path.clone()),
        // Beside one of several it would be lost with it, and with another order of them.
        (PathSetting::Auto, [DeviceConfig::File { path, .. }]) if !is_not_regular_file(path) => {
            let mut state_path = path.clone().into_os_string();
            state_path.push(".state");
            Some(PathBuf::from(state_path))
        }
        (PathSetting::Auto | PathSetting::None, _) => None,
    };
    let file = path.as_deref().map(StateFile::new);
    let Some(file) = file else { return Ok((None, None, PersistedState::default())) };
    let state = file.load().map_err(|error| anyhow!("{error}"))?;
    match file.lock() {
        Ok(lock) => Ok((Some(file), Some(lock), state)),
        // Beside an unusable device, or in a read-only directory.
        Err(error) if admin_config.state_file == PathSetting::Auto => {
            tracing::warn!(%error, "namespaces and hosts cannot be changed while this node runs");
            Ok((None, None, state))
        }
        Err(error) => Err(CliError::Failed(anyhow!("{error}"))),
    }
}

/// Whether a path exists and is not a regular file: a disk has no directory for a state file.
fn is_not_regular_file(path: &std::path::Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| !found.is_file())
}

/// Applies the changes of earlier runs to the configuration.
fn apply_state(
    config: &mut NodeConfig,
    state: &PersistedState,
    admin_config: &AdminConfig,
) -> Result<(), CliError> {
    config.namespaces.extend(namespace_configs(state, config.format).map_err(|why| anyhow!("{why}"))?);
    for namespace in &mut config.namespaces {
        // The contents of memory are lost: a new identity tells hosts that this is another namespace.
        if namespace.devices.iter().any(|device| matches!(device, DeviceConfig::Memory { .. })) {
            namespace.nguid_suffix = octokv_sys::process::random_u64().context("random numbers")?;
        }
    }
    config.host_acl = host_acl(state.hosts.as_ref().unwrap_or(&admin_config.hosts));
    for (group, name) in &state.ana {
        let known = group.parse().ok().zip(parse_ana_state(name));
        config.ana_states.push(known.with_context(|| format!("group {group} of the state file: {name}"))?);
    }
    let scheduling = state.scheduling.apply_to(&config.scheduling);
    config.scheduling = scheduling.map_err(|why| anyhow!("scheduling of the state file: {why}"))?;
    config.health.power_cycles = state.starts + 1;
    config.health.unsafe_shutdowns = state.unclean_shutdowns + u64::from(state.running);
    config.health.power_on_seconds = state.run_seconds;
    config.health.busy_seconds = state.busy_seconds;
    Ok(())
}

fn start_admin_server(
    location: &PathSetting,
    port: u16,
    service: &Arc<AdminService>,
) -> Result<AdminServer, CliError> {
    let path = match location {
        PathSetting::None => None,
        PathSetting::Path(path) => Some(path.clone()),
        PathSetting::Auto => default_admin_socket(port),
    };
    let without = || {
        let server = AdminServer::start(None, Arc::clone(service));
        server.map_err(|error| CliError::Failed(anyhow!("{error}")))
    };
    let Some(path) = path else { return without() };
    match AdminServer::start(Some(&path), Arc::clone(service)) {
        Ok(server) => Ok(server),
        Err(error) if *location == PathSetting::Auto => {
            tracing::warn!(socket = %path.display(), %error, "no admin socket");
            without()
        }
        Err(error) => Err(CliError::Failed(anyhow!("admin socket {}: {error}", path.display()))),
    }
}

/// Starts a node. Removes the device file that it created if the start fails.
///
/// # Errors
/// See [`StartError`].
pub fn start_node(config: NodeConfig) -> Result<RunningNode, CliError> {
    let missing = |device: &DeviceConfig| match device {
        DeviceConfig::File { path, .. } if !path.exists() => Some(path.clone()),
        DeviceConfig::File { .. } | DeviceConfig::Memory { .. } => None,
    };
    let missing: Vec<PathBuf> = config.devices.iter().filter_map(missing).collect();
    octokv_node::start(config).map_err(|error| {
        if matches!(&error, StartError::Volume { .. } | StartError::InvalidSetting { .. }) {
            for path in missing {
                // If the removal fails, the following error names the file anyway.
                let _ = std::fs::remove_file(path);
            }
        }
        to_cli_error(error)
    })
}

/// The URL of a running node: its first address.
///
/// # Errors
/// If the node listens on no address.
pub fn node_url(node: &RunningNode) -> Result<Url, CliError> {
    let address = node.addresses().first().ok_or_else(|| anyhow!("the node listens on no address"))?;
    Ok(Url {
        host: address.ip().to_string(),
        port: address.port(),
        subsystem: node.nqn().to_owned(),
        namespace: octokv_base::NamespaceId(1),
    })
}

/// Maps an invalid setting to a usage error.
fn to_cli_error(error: StartError) -> CliError {
    match error {
        StartError::InvalidSetting { .. } => CliError::Usage(error.to_string()),
        StartError::Device { error: DeviceOpenError::NotFound, .. } => {
            CliError::Failed(anyhow!("{error}, nor does its directory"))
        }
        StartError::Device { .. }
        | StartError::Volume { .. }
        | StartError::Listen { .. }
        | StartError::Core { .. }
        | StartError::Driver(_)
        | StartError::System(_) => CliError::Failed(anyhow!("{error}")),
    }
}
