//! A node until it is told to end: one line on standard output when it is ready, then silence.

use crate::admin::default_socket;
use crate::cli::Serve;
use crate::config::{self, Administration, Place};
use crate::exit_status::{Failure, Outcome};
use anyhow::{Context, anyhow};
use octokv_admin::service::{Machine, ana_state, hosts_of, namespaces_of};
use octokv_admin::state_file::Claim;
use octokv_admin::{Operator, Server, State, StateFile};
use octokv_client::Url;
use octokv_node::{DeviceSettings, NodeSettings, RunningNode, StartError};
use octokv_sys::file::OpenError;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Runs `octokv serve`.
pub fn run(flags: &Serve) -> Outcome {
    let (mut settings, administration) = config::node_settings(flags).map_err(Failure::Usage)?;
    // Before anything is opened: a request to end that comes early is not lost.
    let stop = octokv_sys::signal::install().context("signals cannot be waited for")?;
    let device = device_name(&settings);
    let (mut file, _claim, before) = load(&settings, &administration)?;
    add(&mut settings, &before, &administration)?;
    let node = start(settings)?;
    let state = State {
        starts: before.starts + 1,
        unclean_stops: before.unclean_stops + u64::from(before.running),
        running: true,
        ..before
    };
    if let Some(kept) = &file
        && let Err(error) = kept.save(&state)
    {
        if administration.state != Place::Auto {
            return Err(Failure::Failed(anyhow!("{error}")));
        }
        tracing::warn!(%error, "namespaces and hosts cannot be changed while this node runs");
        file = None;
    }
    for address in node.addresses() {
        tracing::info!(%address, device, nqn = node.nqn(), keys = node.statistics().keys, "listening");
    }
    let (url, port) = (url(&node)?, node.addresses().first().map_or(0, |address| address.port()));
    let machine = Machine { now: octokv_sys::clock::now, random: octokv_sys::process::random_u64 };
    let operator = Arc::new(Operator::new(node, file, state, administration.hosts, machine));
    let server = open_door(&administration.socket, port, &operator)?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready {url}")?;
    out.flush()?;
    drop(out);
    stop.wait();
    tracing::info!("asked to end");
    drop(server);
    let operator = Arc::into_inner(operator).context("the administration socket did not close")?;
    operator.stop().map_err(|error| anyhow!("device {device}: {error}"))?;
    tracing::info!(device, "ended in order");
    Ok(())
}

fn device_name(settings: &NodeSettings) -> String {
    match &settings.device {
        DeviceSettings::Memory { .. } => config::MEMORY.to_owned(),
        DeviceSettings::File { path, .. } => path.display().to_string(),
    }
}

/// Where the state is kept, if anywhere, and what is there.
fn load(
    settings: &NodeSettings,
    administration: &Administration,
) -> Result<(Option<StateFile>, Option<Claim>, State), Failure> {
    let path = match (&administration.state, &settings.device) {
        (Place::At(path), _) => Some(path.clone()),
        (Place::Auto, DeviceSettings::File { path, .. }) if !is_special(path) => {
            let mut beside = path.clone().into_os_string();
            beside.push(".state");
            Some(PathBuf::from(beside))
        }
        (Place::Auto | Place::None, _) => None,
    };
    let file = path.as_deref().map(StateFile::at);
    let Some(file) = file else { return Ok((None, None, State::default())) };
    let state = file.load().map_err(|error| anyhow!("{error}"))?;
    match file.claim() {
        Ok(claim) => Ok((Some(file), Some(claim), state)),
        // Beside a device that cannot be used, or in a directory that cannot be written.
        Err(error) if administration.state == Place::Auto => {
            tracing::warn!(%error, "namespaces and hosts cannot be changed while this node runs");
            Ok((None, None, state))
        }
        Err(error) => Err(Failure::Failed(anyhow!("{error}"))),
    }
}

/// Whether a path names something that is no regular file: a disk has nothing beside it.
fn is_special(path: &std::path::Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| !found.is_file())
}

/// What was changed in earlier runs, over what is configured.
fn add(settings: &mut NodeSettings, state: &State, administration: &Administration) -> Result<(), Failure> {
    settings.namespaces.extend(namespaces_of(state, settings.format).map_err(|why| anyhow!("{why}"))?);
    for namespace in &mut settings.namespaces {
        // What was in memory is gone: hosts must not take what is there now for what they knew.
        if matches!(namespace.device, DeviceSettings::Memory { .. }) {
            namespace.identity = octokv_sys::process::random_u64().context("no random number")?;
        }
    }
    settings.hosts = hosts_of(state.hosts.as_ref().unwrap_or(&administration.hosts));
    for (group, name) in &state.ana {
        let known = group.parse().ok().zip(ana_state(name));
        settings.ana.push(known.with_context(|| format!("group {group} of the state file: {name}"))?);
    }
    let scheduling = state.scheduling.applied(&settings.scheduling);
    settings.scheduling = scheduling.map_err(|why| anyhow!("scheduling of the state file: {why}"))?;
    settings.health.power_cycles = state.starts + 1;
    settings.health.unsafe_shutdowns = state.unclean_stops + u64::from(state.running);
    settings.health.power_on_seconds = state.run_seconds;
    settings.health.busy_seconds = state.busy_seconds;
    Ok(())
}

fn open_door(place: &Place, port: u16, operator: &Arc<Operator>) -> Result<Server, Failure> {
    let path = match place {
        Place::None => None,
        Place::At(path) => Some(path.clone()),
        Place::Auto => default_socket(port),
    };
    let without = || {
        let begun = Server::start(None, Arc::clone(operator));
        begun.map_err(|error| Failure::Failed(anyhow!("{error}")))
    };
    let Some(path) = path else { return without() };
    match Server::start(Some(&path), Arc::clone(operator)) {
        Ok(server) => Ok(server),
        Err(error) if *place == Place::Auto => {
            tracing::warn!(socket = %path.display(), %error, "there is no administration socket");
            without()
        }
        Err(error) => Err(Failure::Failed(anyhow!("administration socket {}: {error}", path.display()))),
    }
}

/// A node on these settings. A file that is made for it and turns out to be of no use does not stay.
pub fn start(settings: NodeSettings) -> Result<RunningNode, Failure> {
    let missing = match &settings.device {
        DeviceSettings::File { path, .. } if !path.exists() => Some(path.clone()),
        DeviceSettings::File { .. } | DeviceSettings::Memory { .. } => None,
    };
    octokv_node::start(settings).map_err(|error| {
        if let (StartError::Volume { .. } | StartError::Setting { .. }, Some(path)) = (&error, missing) {
            // Where it cannot be removed, the error that follows names it all the same.
            let _ = std::fs::remove_file(path);
        }
        refused(error)
    })
}

/// Where a running node is found: its first address.
pub fn url(node: &RunningNode) -> Result<Url, Failure> {
    let address = node.addresses().first().ok_or_else(|| anyhow!("the node listens nowhere"))?;
    Ok(Url {
        host: address.ip().to_string(),
        port: address.port(),
        subsystem: node.nqn().to_owned(),
        namespace: octokv_base::NamespaceId(1),
    })
}

/// A setting that the node refuses is a usage error like any other.
fn refused(error: StartError) -> Failure {
    match error {
        StartError::Setting { .. } => Failure::Usage(error.to_string()),
        StartError::Device { error: OpenError::Missing, .. } => {
            Failure::Failed(anyhow!("{error}, nor does the directory it should be made in"))
        }
        StartError::Device { .. }
        | StartError::Volume { .. }
        | StartError::Listen { .. }
        | StartError::Core { .. }
        | StartError::Driver(_)
        | StartError::System(_) => Failure::Failed(anyhow!("{error}")),
    }
}
