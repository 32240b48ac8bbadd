//! A node under attack, with checks: small limits, a reference client that runs throughout, and the node's memory and
//! descriptors before and after.
//!
//! ```text
//!   start: node, reference client, usage ─▶ attacks (the caller's) ─▶ finish: usage again, a new client, clean shutdown
//! ```
//! The memory bound is computed from the limits by [`NodeLimits::memory_bound_bytes`], which documents the arithmetic.

use crate::node_process::{NodeProcess, ResourceUsage, eventually, is_idle};
use crate::raw_connection::TargetAddr;
use crate::reference_client::{ReferenceClient, ReferenceClientConfig, ReferenceClientReport};
use anyhow::{Result, anyhow, ensure};
use octokv_client::blocking::BlockingClient;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Time within which the node must release the resources of disconnected attackers.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(10);

/// Configuration of the node under attack, with small limits that attacks reach quickly. The fields are keys of the
/// configuration file.
#[derive(Clone, Debug)]
pub struct NodeLimits {
    /// Size of the memory device, in bytes.
    pub device_bytes: u64,
    /// Allocation unit (`unit`), in bytes.
    pub unit_bytes: u32,
    /// Buffer memory of its one core, in bytes.
    pub buffer_bytes: u64,
    /// Maximum value length, in bytes.
    pub value_bytes_max: u32,
    /// Maximum TCP connections.
    pub connections_max: usize,
    /// Maximum controllers of all hosts.
    pub controllers_max: usize,
    /// Maximum controllers per host NQN.
    pub controllers_per_host_max: usize,
    /// Maximum I/O queues per controller.
    pub io_queues_max: u16,
    /// Maximum entries of a queue.
    pub queue_depth: u16,
    /// Unsent bytes at which a connection accepts no further command.
    pub send_buffer_bytes_max: u64,
    /// Maximum value bytes of a connection's incomplete transfers.
    pub receive_bytes_max: u64,
    /// Maximum in-capsule data, in bytes.
    pub in_capsule_bytes: u32,
    /// Maximum data of an H2CData PDU, in bytes.
    pub h2c_data_bytes_max: u32,
    /// Maximum time from TCP accept to Connect, in seconds.
    pub handshake_limit_s: u64,
    /// Maximum outstanding asynchronous event requests per controller.
    pub event_requests_max: u8,
    /// Maximum keep-alive timeout, in seconds.
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
            send_buffer_bytes_max: 512 << 10,
            receive_bytes_max: 512 << 10,
            in_capsule_bytes: 16 << 10,
            h2c_data_bytes_max: 64 << 10,
            handshake_limit_s: 1,
            event_requests_max: 4,
            keep_alive_max_s: 60,
        }
    }
}

/// Receive buffer of a core, which bounds the received and unprocessed bytes of one connection.
const RECEIVE_BYTES: u64 = 1 << 20;
/// Upper bound on command identifiers, slots and pages of one connection, in bytes.
const CONNECTION_BYTES: u64 = 64 << 10;

impl NodeLimits {
    /// The configuration file text, with a memory device and this core.
    pub fn config_text(&self, core: usize) -> String {
        let NodeLimits {
            device_bytes, buffer_bytes, value_bytes_max, connections_max, controllers_max, ..
        } = self;
        let NodeLimits {
            controllers_per_host_max, io_queues_max, queue_depth, send_buffer_bytes_max, ..
        } = self;
        let NodeLimits { receive_bytes_max, in_capsule_bytes, h2c_data_bytes_max, handshake_limit_s, .. } =
            self;
        let NodeLimits { event_requests_max, keep_alive_max_s, unit_bytes, .. } = self;
        format!(
            "device = \"memory\"\nsize = {device_bytes}\nunit = {unit_bytes}\nbuffer_bytes = {buffer_bytes}\n\
             value_bytes_max = {value_bytes_max}\nconnections_max = {connections_max}\n\
             controllers_max = {controllers_max}\ncontrollers_per_host_max = {controllers_per_host_max}\n\
             io_queues_max = {io_queues_max}\nqueue_depth = {queue_depth}\n\
             send_buffer_bytes_max = {send_buffer_bytes_max}\nreceive_bytes_max = {receive_bytes_max}\n\
             in_capsule_bytes = {in_capsule_bytes}\nh2c_data_bytes_max = {h2c_data_bytes_max}\n\
             handshake_limit_s = {handshake_limit_s}\nevent_requests_max = {event_requests_max}\n\
             keep_alive_max_s = {keep_alive_max_s}\nlisten = [\"127.0.0.1:0\"]\ncores = [{core}]\n"
        )
    }

    /// Upper bound on the node's memory, given its memory `fresh_bytes` with only the reference client:
    ///
    /// - the device, whose pages may all become resident: `device_bytes`;
    /// - values in flight: `buffer_bytes` for its one core;
    /// - for each of `connections_max`: received and unprocessed bytes (1 MiB) and copied unsent responses
    ///   (`send_buffer_bytes_max`), both in vectors that double when they grow, and 64 KiB for slots, command identifiers
    ///   and pages. Responses that are not copied are in buffers, counted above.
    pub fn memory_bound_bytes(&self, fresh_bytes: u64) -> u64 {
        let connection = 2 * (RECEIVE_BYTES + self.send_buffer_bytes_max) + CONNECTION_BYTES;
        fresh_bytes + self.device_bytes + self.buffer_bytes + self.connections_max as u64 * connection
    }
}

/// A node under attack with a running reference client.
pub struct AttackHarness {
    node: NodeProcess,
    reference_client: ReferenceClient,
    /// Limits that the node was started with.
    pub limits: NodeLimits,
    usage_before: ResourceUsage,
    completed_before: u64,
    started_at: Instant,
    /// Holds configuration and log.
    _directory: tempfile::TempDir,
}

/// Result of attacks without violations.
#[derive(Clone, Debug)]
pub struct AttackReport {
    /// Results of the reference client.
    pub reference_client: ReferenceClientReport,
    /// Node resources before the first attack.
    pub usage_before: ResourceUsage,
    /// Node resources after the last attack.
    pub usage_after: ResourceUsage,
    /// The resident bytes that the node may not exceed: [`NodeLimits::memory_bound_bytes`].
    pub memory_bound_bytes: u64,
}

impl AttackHarness {
    /// Starts a node and a reference client, and waits until the client is served.
    ///
    /// # Errors
    /// If the node does not start, or does not serve the reference client.
    pub fn start(binary: &Path, limits: NodeLimits) -> Result<AttackHarness> {
        // Parallel tests distribute their nodes over the cores.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let cores = octokv_sys::thread::allowed_cores();
        let core = cores[NEXT.fetch_add(1, Ordering::Relaxed) % cores.len()];
        let directory = tempfile::tempdir()?;
        let node = NodeProcess::start(binary, &limits.config_text(core), directory.path())?;
        let reference_client = ReferenceClient::start(node.target_addr(), ReferenceClientConfig::default())?;
        let warm = reference_client.completed() + 50;
        ensure!(
            eventually(RECOVERY_TIMEOUT, || reference_client.completed() >= warm),
            "the reference client is not served"
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

    /// Address of the node.
    pub fn target_addr(&self) -> &TargetAddr {
        self.node.target_addr()
    }

    /// Current resources of the node.
    ///
    /// # Errors
    /// If the process has exited.
    pub fn resource_usage(&self) -> Result<ResourceUsage> {
        self.node.resource_usage()
    }

    /// Sockets in excess of those before the first attack.
    pub fn attacker_sockets(&self) -> usize {
        self.node.resource_usage().map_or(0, |now| now.sockets.saturating_sub(self.usage_before.sockets))
    }

    /// Waits until the node has closed every attacker's connection.
    ///
    /// # Errors
    /// If some remain open for 10 s.
    pub fn wait_idle(&self) -> Result<()> {
        let idle = eventually(RECOVERY_TIMEOUT, || self.attacker_sockets() == 0);
        ensure!(idle, "{} connections remain open: {}", self.attacker_sockets(), self.node.stderr_log());
        Ok(())
    }

    /// Resets the maximum latency of the reference client.
    pub fn reset_max_latency(&self) {
        self.reference_client.reset_max_latency();
    }

    /// Checks that the reference client is being served: operations complete after this call.
    ///
    /// # Errors
    /// If it fails, or completes fewer than 5 operations in 10 s.
    pub fn reference_client_progresses(&self) -> Result<()> {
        let goal = self.reference_client.completed() + 5;
        let served = eventually(RECOVERY_TIMEOUT, || {
            self.reference_client.completed() >= goal || self.reference_client.has_failed()
        });
        ensure!(
            served && !self.reference_client.has_failed(),
            "the reference client is not served: {}",
            self.node.stderr_log()
        );
        Ok(())
    }

    /// Checks every guarantee and shuts the node down. REQUIRES: all attackers have disconnected.
    ///
    /// # Errors
    /// The first violated guarantee.
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
        // A twentieth of the configured rate: other tests and builds may use the same cores.
        let wanted = (self.started_at.elapsed().as_millis() as u64
            * ReferenceClientConfig::default().ops_per_s
            / 1000
            / 20)
            .max(5);
        let served = self.reference_client.completed() - self.completed_before;
        ensure!(served >= wanted, "the reference client completed {served} operations, expected {wanted}");
        check_new_client(&self.node)?;
        let reference_client = self.reference_client.finish()?;
        let idle = eventually(RECOVERY_TIMEOUT, || self.node.status().is_ok_and(|now| is_idle(&now)));
        ensure!(idle, "the node is not idle without clients: {:?}", self.node.status());
        self.node.stop()?;
        Ok(AttackReport {
            reference_client,
            usage_before: before,
            usage_after: after,
            memory_bound_bytes: bound_bytes,
        })
    }
}

/// Checks that a new client is served normally.
fn check_new_client(node: &NodeProcess) -> Result<()> {
    let client =
        BlockingClient::connect(&node.url().to_string()).map_err(|error| anyhow!("a new client: {error}"))?;
    let value = vec![0x6e; 20_000];
    client.put(b"newcomer", &value).map_err(|error| anyhow!("a new client's put: {error}"))?;
    let found = client.get(b"newcomer").map_err(|error| anyhow!("a new client's get: {error}"))?;
    ensure!(found == Some(value), "a new client read a value that differs from its put");
    Ok(())
}
