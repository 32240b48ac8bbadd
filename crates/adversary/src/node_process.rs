//! A node as a process: started with settings, looked at from outside, stopped, killed, started again.
//!
//! In: the binary and a configuration. Out: its address, and what the kernel says it holds: memory, descriptors,
//! threads. Invariant: no process outlives its [`NodeProcess`].

use crate::raw_connection::TargetAddr;
use anyhow::{Context, Result, anyhow, bail, ensure};
use octokv_admin::api_types::{NodeCoreStatus, NodeStatus};
use octokv_admin::http_client;
use octokv_client::Url;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A running `octokv serve`.
#[derive(Debug)]
pub struct NodeProcess {
    child: Child,
    url: Url,
    target_addr: TargetAddr,
    log: PathBuf,
    admin: PathBuf,
}

/// What a process holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResourceUsage {
    /// Memory in RAM, in bytes.
    pub resident_bytes: u64,
    /// The most memory in RAM that it ever had, in bytes.
    pub peak_bytes: u64,
    /// Open descriptors.
    pub descriptors: usize,
    /// Of those, sockets.
    pub sockets: usize,
    /// Threads, without those of the kernel's io_uring.
    pub threads: usize,
}

impl NodeProcess {
    /// Starts one with these settings and waits until it is ready. Its configuration, what it logs, and its
    /// administration socket go into `directory`.
    ///
    /// # Errors
    /// When it does not get ready.
    pub fn start(binary: &Path, settings: &str, directory: &Path) -> Result<NodeProcess> {
        let [config, log, admin] = ["octokv.toml", "log", "admin.sock"].map(|name| directory.join(name));
        std::fs::write(&config, format!("{settings}admin = \"{}\"\n", admin.display()))?;
        let log_file = File::options().create(true).append(true).open(&log).context("the node's log")?;
        let mut child = Command::new(binary)
            .args(["serve", "--config"])
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log_file)
            .spawn()
            .with_context(|| format!("{} cannot be started", binary.display()))?;
        let mut line = String::new();
        let out = child.stdout.take().context("standard output")?;
        let read = BufReader::new(out).read_line(&mut line);
        let url = line.trim_end().strip_prefix("ready ").and_then(|url| url.parse::<Url>().ok());
        let (Ok(_), Some(url)) = (read, url) else {
            let _ = child.kill();
            let status = child.wait()?;
            bail!(
                "the node did not get ready: {status}: {}",
                std::fs::read_to_string(log).unwrap_or_default()
            );
        };
        let mut addresses = (url.host.as_str(), url.port).to_socket_addrs()?;
        let address = addresses.next().context("the node's address")?;
        let target_addr = TargetAddr { address, nqn: url.subsystem.clone() };
        Ok(NodeProcess { child, url, target_addr, log, admin })
    }

    /// Where attackers find it.
    pub fn target_addr(&self) -> &TargetAddr {
        &self.target_addr
    }

    /// Where clients find it.
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it said on standard error.
    pub fn stderr_log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// What it holds now.
    ///
    /// # Errors
    /// When it is gone.
    pub fn resource_usage(&self) -> Result<ResourceUsage> {
        read_resource_usage(self.pid()).with_context(|| format!("the node is gone: {}", self.stderr_log()))
    }

    /// Its administration socket.
    pub fn admin(&self) -> &Path {
        &self.admin
    }

    /// What it says of itself.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn status(&self) -> Result<NodeStatus> {
        http_client::get(&self.admin, "/v1/statistics").map_err(|error| anyhow!("{error}"))
    }

    /// SIGKILL, and waits for its end.
    ///
    /// # Errors
    /// When there is nothing to kill.
    pub fn kill(mut self) -> Result<()> {
        ensure!(self.child.try_wait()?.is_none(), "the node ended by itself: {}", self.stderr_log());
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// SIGTERM, and waits for its end in order.
    ///
    /// # Errors
    /// When it does not end in order.
    pub fn stop(mut self) -> Result<()> {
        let kill = format!("kill -TERM {}", self.pid());
        ensure!(
            Command::new("sh").args(["-c", &kill]).status()?.success(),
            "the node is gone: {}",
            self.stderr_log()
        );
        let status = self.child.wait()?;
        ensure!(status.success(), "{status}: {}", self.stderr_log());
        Ok(())
    }
}

impl Drop for NodeProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a node of these figures has nobody and nothing under way. Background tasks are its own.
pub fn is_idle(status: &NodeStatus) -> bool {
    let idle = |core: &NodeCoreStatus| {
        let NodeCoreStatus { connections, requests, buffer_bytes, device_operations, leaving, .. } = *core;
        connections + requests + buffer_bytes + device_operations + leaving == 0
    };
    status.connections + status.controllers == 0 && status.cores.iter().all(idle)
}

fn read_resource_usage(pid: u32) -> Result<ResourceUsage> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let field = |name: &str| -> Result<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).context("a field of /proc")?;
        Ok(line.trim_start_matches(':').split_whitespace().next().context("a figure of /proc")?.parse()?)
    };
    let mut found = ResourceUsage {
        resident_bytes: field("VmRSS")? << 10,
        peak_bytes: field("VmHWM")? << 10,
        ..ResourceUsage::default()
    };
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // One that ended meanwhile is none; io_uring's workers are the kernel's, which ends them when they idle.
        let Ok(name) = std::fs::read_to_string(task?.path().join("comm")) else { continue };
        found.threads += usize::from(!name.starts_with("iou-"));
    }
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // One that was closed meanwhile is not there any more.
        let Ok(target) = std::fs::read_link(entry?.path()) else { continue };
        found.descriptors += 1;
        found.sockets += usize::from(target.to_string_lossy().starts_with("socket:"));
    }
    Ok(found)
}

/// Asks again and again until the answer is yes. False when it is not within `limit`.
pub fn eventually(limit: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    loop {
        if is_so() {
            return true;
        }
        if began.elapsed() > limit {
            return false;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
