//! A node under attack, held to its promises: small settings, an honest host that goes on all the while, and the
//! node's memory and descriptors before and after.
//!
//! ```text
//!   begin: node, honest host, figures ─▶ attacks (the caller's) ─▶ end: figures again, a new host, node ends in order
//! ```
//! The bound on memory is computed from the settings ([`NodeLimits::memory_bound_bytes`]); that function is the
//! arithmetic.

use crate::node_process::{NodeProcess, ResourceUsage, eventually, is_idle};
use crate::raw_connection::TargetAddr;
use crate::reference_client::{ReferenceClient, ReferenceClientConfig, ReferenceClientReport};
use anyhow::{Result, anyhow, ensure};
use octokv_client::blocking::BlockingClient;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long the node may take to give back what attackers held once they are gone.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(10);

/// Settings of the node under attack, small so that its bounds are near.
#[derive(Clone, Debug)]
pub struct NodeLimits {
    /// The device's bytes, in memory.
    pub device_bytes: u64,
    /// `unit`.
    pub unit_bytes: u32,
    /// `buffer_bytes` of its one core.
    pub buffer_bytes: u64,
    /// `value_bytes_max`.
    pub value_bytes_max: u32,
    /// `connections_max`.
    pub connections_max: usize,
    /// `controllers_max`.
    pub controllers_max: usize,
    /// `controllers_per_host_max`.
    pub controllers_per_host_max: usize,
    /// `io_queues_max`.
    pub io_queues_max: u16,
    /// `queue_depth`.
    pub queue_depth: u16,
    /// `outbox_bytes_max`.
    pub outbox_bytes_max: u64,
    /// `receive_bytes_max`.
    pub receive_bytes_max: u64,
    /// `in_capsule_bytes`.
    pub in_capsule_bytes: u32,
    /// `h2c_data_bytes_max`.
    pub h2c_data_bytes_max: u32,
    /// `handshake_limit_s`.
    pub handshake_limit_s: u64,
    /// `event_requests_max`.
    pub event_requests_max: u8,
    /// `keep_alive_max_s`.
    pub keep_alive_max_s: u64,
}

impl Default for NodeLimits {
    fn default() -> NodeLimits {
        NodeLimits {
            device_bytes: 32 << 20,
            unit_bytes: 512,
            buffer_bytes: 8 << 20,
            value_bytes_max: 256 << 10,
            connections_max: 24,
            controllers_max: 10,
            controllers_per_host_max: 8,
            io_queues_max: 4,
            queue_depth: 64,
            outbox_bytes_max: 512 << 10,
            receive_bytes_max: 512 << 10,
            in_capsule_bytes: 16 << 10,
            h2c_data_bytes_max: 64 << 10,
            handshake_limit_s: 1,
            event_requests_max: 4,
            keep_alive_max_s: 60,
        }
    }
}

/// What a core receives at once, and so the most that one connection may have received and not taken, in bytes.
const RECEIVE_BYTES: u64 = 1 << 20;
/// Identifiers in use, slots and pages of one connection, with room to spare, in bytes.
const CONNECTION_BYTES: u64 = 64 << 10;

impl NodeLimits {
    /// The settings as a configuration file, on a device in memory and this core.
    pub fn config_text(&self, core: usize) -> String {
        let NodeLimits {
            device_bytes, buffer_bytes, value_bytes_max, connections_max, controllers_max, ..
        } = self;
        let NodeLimits { controllers_per_host_max, io_queues_max, queue_depth, outbox_bytes_max, .. } = self;
        let NodeLimits { receive_bytes_max, in_capsule_bytes, h2c_data_bytes_max, handshake_limit_s, .. } =
            self;
        let NodeLimits { event_requests_max, keep_alive_max_s, unit_bytes, .. } = self;
        format!(
            "device = \"memory\"\nsize = {device_bytes}\nunit = {unit_bytes}\nbuffer_bytes = {buffer_bytes}\n\
             value_bytes_max = {value_bytes_max}\nconnections_max = {connections_max}\n\
             controllers_max = {controllers_max}\ncontrollers_per_host_max = {controllers_per_host_max}\n\
             io_queues_max = {io_queues_max}\nqueue_depth = {queue_depth}\n\
             outbox_bytes_max = {outbox_bytes_max}\nreceive_bytes_max = {receive_bytes_max}\n\
             in_capsule_bytes = {in_capsule_bytes}\nh2c_data_bytes_max = {h2c_data_bytes_max}\n\
             handshake_limit_s = {handshake_limit_s}\nevent_requests_max = {event_requests_max}\n\
             keep_alive_max_s = {keep_alive_max_s}\nlisten = [\"127.0.0.1:0\"]\ncores = [{core}]\n"
        )
    }

    /// The most memory that the node may come to, which had `fresh_bytes` with one honest host at work:
    ///
    /// - the device, all of whose pages may be touched later than that: `device_bytes`;
    /// - values in flight: `buffer_bytes` for its core;
    /// - for each of `connections_max`: bytes received and not taken (1 MiB), unsent replies that are copied
    ///   (`outbox_bytes_max`), both in vectors that double when they grow, and 64 KiB for slots, identifiers
    ///   and pages. Replies that are not copied are in buffers, counted above.
    pub fn memory_bound_bytes(&self, fresh_bytes: u64) -> u64 {
        let connection = 2 * (RECEIVE_BYTES + self.outbox_bytes_max) + CONNECTION_BYTES;
        fresh_bytes + self.device_bytes + self.buffer_bytes + self.connections_max as u64 * connection
    }
}

/// A node under attack.
pub struct AttackHarness {
    node: NodeProcess,
    reference_client: ReferenceClient,
    /// What the node was started with.
    pub limits: NodeLimits,
    usage_before: ResourceUsage,
    completed_before: u64,
    started_at: Instant,
    /// Configuration and log.
    _directory: tempfile::TempDir,
}

/// How a siege ended.
#[derive(Clone, Debug)]
pub struct AttackReport {
    /// What the honest host saw.
    pub reference_client: ReferenceClientReport,
    /// What the node held before the first attack.
    pub usage_before: ResourceUsage,
    /// And after the last.
    pub usage_after: ResourceUsage,
    /// What it may hold, in bytes.
    pub memory_bound_bytes: u64,
}

impl AttackHarness {
    /// A node of this binary with an honest host that has begun.
    ///
    /// # Errors
    /// When the node does not start, or does not serve.
    pub fn start(binary: &Path, limits: NodeLimits) -> Result<AttackHarness> {
        // Tests run side by side: their nodes take the cores in turn.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let cores = octokv_sys::thread::allowed_cores();
        let core = cores[NEXT.fetch_add(1, Ordering::Relaxed) % cores.len()];
        let directory = tempfile::tempdir()?;
        let node = NodeProcess::start(binary, &limits.config_text(core), directory.path())?;
        let reference_client = ReferenceClient::start(node.target_addr(), ReferenceClientConfig::default())?;
        let warm = reference_client.completed() + 50;
        ensure!(
            eventually(RECOVERY_TIMEOUT, || reference_client.completed() >= warm),
            "the honest host is not served"
        );
        let fresh = node.resource_usage()?;
        let served = reference_client.completed();
        Ok(AttackHarness {
            node,
            reference_client,
            limits,
            usage_before: fresh,
            completed_before: served,
            started_at: Instant::now(),
            _directory: directory,
        })
    }

    /// Whom to attack.
    pub fn target_addr(&self) -> &TargetAddr {
        self.node.target_addr()
    }

    /// What the node holds now.
    ///
    /// # Errors
    /// When it is gone.
    pub fn resource_usage(&self) -> Result<ResourceUsage> {
        self.node.resource_usage()
    }

    /// Sockets of the node beyond those it had before the first attack.
    pub fn attacker_sockets(&self) -> usize {
        self.node.resource_usage().map_or(0, |now| now.sockets.saturating_sub(self.usage_before.sockets))
    }

    /// Waits until no attacker's connection is left.
    ///
    /// # Errors
    /// When some stay.
    pub fn wait_idle(&self) -> Result<()> {
        let deserted = eventually(RECOVERY_TIMEOUT, || self.attacker_sockets() == 0);
        ensure!(deserted, "{} connections are left: {}", self.attacker_sockets(), self.node.stderr_log());
        Ok(())
    }

    /// The longest wait of the honest host counts from here on.
    pub fn reset_max_latency(&self) {
        self.reference_client.reset_max_latency();
    }

    /// The honest host is served right now: some of its operations end from here on.
    ///
    /// # Errors
    /// When it is not.
    pub fn reference_client_progresses(&self) -> Result<()> {
        let goal = self.reference_client.completed() + 5;
        let served = eventually(RECOVERY_TIMEOUT, || {
            self.reference_client.completed() >= goal || self.reference_client.has_failed()
        });
        ensure!(
            served && !self.reference_client.has_failed(),
            "the honest host is not served: {}",
            self.node.stderr_log()
        );
        Ok(())
    }

    /// The attackers are gone: holds the node to everything it promised.
    ///
    /// # Errors
    /// The first promise that was broken.
    pub fn finish(self) -> Result<AttackReport> {
        self.reference_client_progresses()?;
        self.wait_idle()?;
        let (before, after) = (self.usage_before, self.node.resource_usage()?);
        ensure!(
            after.descriptors == before.descriptors && after.threads == before.threads,
            "before {before:?}, after {after:?}"
        );
        let bound_bytes = self.limits.memory_bound_bytes(before.resident_bytes);
        ensure!(after.peak_bytes <= bound_bytes, "{} B of memory, bound {bound_bytes} B", after.peak_bytes);
        // A twentieth of what the host asked for: other tests, and builds, may want the same cores.
        let wanted = (self.started_at.elapsed().as_millis() as u64
            * ReferenceClientConfig::default().ops_per_s
            / 1000
            / 20)
            .max(5);
        let served = self.reference_client.completed() - self.completed_before;
        ensure!(served >= wanted, "the honest host was served {served} times, not {wanted}");
        check_new_client(&self.node)?;
        let reference_client = self.reference_client.finish()?;
        let deserted = eventually(RECOVERY_TIMEOUT, || self.node.status().is_ok_and(|now| is_idle(&now)));
        ensure!(deserted, "nobody is there, and something is under way: {:?}", self.node.status());
        self.node.stop()?;
        Ok(AttackReport {
            reference_client,
            usage_before: before,
            usage_after: after,
            memory_bound_bytes: bound_bytes,
        })
    }
}

/// A host that comes now is served as if nothing had been.
fn check_new_client(node: &NodeProcess) -> Result<()> {
    let client =
        BlockingClient::connect(&node.url().to_string()).map_err(|error| anyhow!("a newcomer: {error}"))?;
    let value = vec![0x6e; 20_000];
    client.put(b"newcomer", &value).map_err(|error| anyhow!("a newcomer's put: {error}"))?;
    let found = client.get(b"newcomer").map_err(|error| anyhow!("a newcomer's get: {error}"))?;
    ensure!(found == Some(value), "a newcomer read something else than it put");
    Ok(())
}
