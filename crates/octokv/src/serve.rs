//! A node until it is told to end: one line on standard output when it is ready, then silence.

use crate::arguments::Serve;
use crate::config;
use crate::outcome::{Failure, Outcome};
use anyhow::{Context, anyhow};
use octokv_client::Url;
use octokv_node::{DeviceSettings, NodeSettings, RunningNode, StartError};
use octokv_sys::file::OpenError;
use std::io::Write;

/// Runs `octokv serve`.
pub fn run(flags: &Serve) -> Outcome {
    let settings = config::node_settings(flags).map_err(Failure::Usage)?;
    // Before anything is opened: a request to end that comes early is not lost.
    let stop = octokv_sys::signal::install().context("SIGTERM and SIGINT cannot be waited for")?;
    let device = match &settings.device {
        DeviceSettings::Memory { .. } => config::MEMORY.to_owned(),
        DeviceSettings::File { path, .. } => path.display().to_string(),
    };
    let node = start(settings)?;
    for address in node.addresses() {
        tracing::info!(%address, device, nqn = node.nqn(), keys = node.statistics().keys, "listening");
    }
    let mut out = std::io::stdout().lock();
    writeln!(out, "ready {}", url(&node)?)?;
    out.flush()?;
    drop(out);
    stop.wait();
    tracing::info!("asked to end");
    node.stop().map_err(|error| anyhow!("device {device}: {error}"))?;
    tracing::info!(device, "ended in order");
    Ok(())
}

/// A node on these settings. A file that is made for it and turns out to be of no use does not stay.
pub fn start(settings: NodeSettings) -> Result<RunningNode, Failure> {
    let missing = match &settings.device {
        DeviceSettings::File { path, .. } if !path.exists() => Some(path.clone()),
        DeviceSettings::File { .. } | DeviceSettings::Memory { .. } => None,
    };
    octokv_node::start(settings).map_err(|error| {
        if let (StartError::Volume { .. }, Some(path)) = (&error, missing) {
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
        | StartError::System(_) => Failure::Failed(anyhow!("{error}")),
    }
}
