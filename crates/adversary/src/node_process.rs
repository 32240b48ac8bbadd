//! A node as a child process: start, inspect, stop, kill, restart.
//!
//! In: the binary and a configuration. Out: its address, and the resources that the kernel reports for it: memory,
//! descriptors, threads. Invariant: dropping a [`NodeProcess`] kills the process.

use crate::raw_connection::TargetAddr;
use anyhow::{Context, Result, anyhow, ensure};
use octokv_admin::api_types::{NodeCoreStatus, NodeStatus};
use octokv_admin::http_client;
use octokv_bench::server_process::{ServerProcess, resolve_address};
use octokv_client::Url;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

/// A running `octokv serve` process.
#[derive(Debug)]
pub struct NodeProcess {
    server: ServerProcess,
    target_addr: TargetAddr,
    log: PathBuf,
    admin: PathBuf,
}

/// Resources of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceUsage {
    /// Resident memory (VmRSS), in bytes.
    pub resident_bytes: u64,
    /// Peak resident memory (VmHWM), in bytes.
    pub peak_bytes: u64,
    /// Open file descriptors.
    pub descriptors: usize,
    /// Those of them that are sockets.
    pub sockets: usize,
    /// Threads, without io_uring worker threads of the kernel.
    pub threads: usize,
}

impl NodeProcess {
    /// Starts a node and waits until it is ready. Configuration, log and admin socket are created in `directory`.
    ///
    /// # Errors
    /// If the process does not start or exits before it is ready.
    pub fn start(binary: &Path, settings: &str, directory: &Path) -> Result<NodeProcess> {
        let [config, log, admin] = ["octokv.toml", "log", "admin.sock"].map(|name| directory.join(name));
        std::fs::write(&config, format!("{settings}admin = \"{}\"\n", admin.display()))?;
        let log_file = File::options().create(true).append(true).open(&log).context("the node's log")?;
        let mut command = Command::new(binary);
        command.args(["serve", "--config"]).arg(config).stderr(log_file);
        let server = ServerProcess::start_command(&mut command)
            .with_context(|| std::fs::read_to_string(&log).unwrap_or_default())
            .with_context(|| format!("{} serve", binary.display()))?;
        let address = resolve_address(&server.url)?;
        let target_addr = TargetAddr { address, nqn: server.url.subsystem.clone() };
        Ok(NodeProcess { server, target_addr, log, admin })
    }

    /// Address of its listener.
    pub fn target_addr(&self) -> &TargetAddr {
        &self.target_addr
    }

    /// URL for clients.
    pub fn url(&self) -> &Url {
        &self.server.url
    }

    /// Process identifier.
    pub fn pid(&self) -> u32 {
        self.server.id()
    }

    /// Everything that the process wrote to standard error.
    pub fn stderr_log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Current resources.
    ///
    /// # Errors
    /// If the process has exited.
    pub fn resource_usage(&self) -> Result<ResourceUsage> {
        read_resource_usage(self.pid()).with_context(|| format!("the node exited: {}", self.stderr_log()))
    }

    /// Path of its admin socket.
    pub fn admin(&self) -> &Path {
        &self.admin
    }

    /// Status from the admin API (`/v1/statistics`).
    ///
    /// # Errors
    /// If the request fails.
    pub fn status(&self) -> Result<NodeStatus> {
        http_client::get(&self.admin, "/v1/statistics").map_err(|error| anyhow!("{error}"))
    }

    /// Sends SIGKILL and waits for the exit.
    ///
    /// # Errors
    /// If the process had already exited.
    pub fn kill(mut self) -> Result<()> {
        ensure!(
            self.server.process().try_wait()?.is_none(),
            "the node exited unexpectedly: {}",
            self.stderr_log()
        );
        Ok(self.server.kill()?)
    }

    /// Sends SIGTERM and waits for a clean shutdown.
    ///
    /// # Errors
    /// If the process had already exited, or its exit status is not success.
    pub fn stop(mut self) -> Result<()> {
        let kill = format!("kill -TERM {}", self.pid());
        ensure!(
            Command::new("sh").args(["-c", &kill]).status()?.success(),
            "the node exited: {}",
            self.stderr_log()
        );
        let status = self.server.process().wait()?;
        ensure!(status.success(), "{status}: {}", self.stderr_log());
        Ok(())
    }
}

/// Whether a node has no connection and no work of clients; its own background tasks do not count.
pub fn is_idle(status: &NodeStatus) -> bool {
    let idle = |core: &NodeCoreStatus| {
        let NodeCoreStatus {
            connections,
            requests,
            buffer_bytes,
            device_operations,
            draining_namespaces,
            ..
        } = *core;
        connections + requests + buffer_bytes + device_operations + draining_namespaces == 0
    };
    status.connections + status.controllers == 0 && status.cores.iter().all(idle)
}

fn read_resource_usage(pid: u32) -> Result<ResourceUsage> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| -> Result<u64> {
        let line =
            status.lines().find_map(|line| line.strip_prefix(name)).context("missing field in /proc")?;
        Ok(line.trim_start_matches(':').split_whitespace().next().context("empty field in /proc")?.parse()?)
    };
    let mut found = ResourceUsage {
        resident_bytes: field("VmRSS")? << 10,
        peak_bytes: field("VmHWM")? << 10,
        ..ResourceUsage::default()
    };
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // Skips threads that ended meanwhile and io_uring workers, which the kernel ends when they idle.
        let Ok(name) = std::fs::read_to_string(task?.path().join("comm")) else { continue };
        found.threads += usize::from(!name.starts_with("iou-"));
    }
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // Skips descriptors closed meanwhile.
        let Ok(target) = std::fs::read_link(entry?.path()) else { continue };
        found.descriptors += 1;
        found.sockets += usize::from(target.to_string_lossy().starts_with("socket:"));
    }
    Ok(found)
}

/// Polls `condition` every 5 ms. Returns false if it stays false for `limit`.
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    loop {
        if condition() {
            return true;
        }
        if began.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
