//! A node under attack, held to its promises: small settings, an honest host that goes on all the while, and the
//! node's memory and descriptors before and after.
//!
//! ```text
//!   begin: node, honest host, figures ─▶ attacks (the caller's) ─▶ end: figures again, a new host, node ends in order
//! ```
//! The bound on memory is computed from the settings ([`Limits::memory_bound_bytes`]); that function is the
//! arithmetic.

use crate::node_process::{Holdings, Node, eventually, is_deserted};
use crate::raw_connection::Victim;
use crate::reference_client::{Honest, Plan, Report};
use anyhow::{Result, anyhow, ensure};
use octokv_client::blocking::Client;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// How long the node may take to give back what attackers held once they are gone.
const RECOVERY: Duration = Duration::from_secs(10);

/// Settings of the node under attack, small so that its bounds are near.
#[derive(Clone, Debug)]
pub struct Limits {
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

impl Default for Limits {
    fn default() -> Limits {
        Limits {
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

impl Limits {
    /// The settings as a configuration file, on a device in memory and this core.
    pub fn config(&self, core: usize) -> String {
        let Limits { device_bytes, buffer_bytes, value_bytes_max, connections_max, controllers_max, .. } =
            self;
        let Limits { controllers_per_host_max, io_queues_max, queue_depth, outbox_bytes_max, .. } = self;
        let Limits { receive_bytes_max, in_capsule_bytes, h2c_data_bytes_max, handshake_limit_s, .. } = self;
        let Limits { event_requests_max, keep_alive_max_s, unit_bytes, .. } = self;
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
pub struct Siege {
    node: Node,
    honest: Honest,
    /// What the node was started with.
    pub limits: Limits,
    fresh: Holdings,
    served: u64,
    began: Instant,
    /// Configuration and log.
    _directory: tempfile::TempDir,
}

/// How a siege ended.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What the honest host saw.
    pub honest: Report,
    /// What the node held before the first attack.
    pub before: Holdings,
    /// And after the last.
    pub after: Holdings,
    /// What it may hold, in bytes.
    pub bound_bytes: u64,
}

impl Siege {
    /// A node of this binary with an honest host that has begun.
    ///
    /// # Errors
    /// When the node does not start, or does not serve.
    pub fn begin(binary: &Path, limits: Limits) -> Result<Siege> {
        // Tests run side by side: their nodes take the cores in turn.
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let cores = octokv_sys::thread::cores();
        let core = cores[NEXT.fetch_add(1, Ordering::Relaxed) % cores.len()];
        let directory = tempfile::tempdir()?;
        let node = Node::start(binary, &limits.config(core), directory.path())?;
        let honest = Honest::start(node.victim(), Plan::default())?;
        let warm = honest.served() + 50;
        ensure!(eventually(RECOVERY, || honest.served() >= warm), "the honest host is not served");
        let fresh = node.holdings()?;
        let served = honest.served();
        Ok(Siege { node, honest, limits, fresh, served, began: Instant::now(), _directory: directory })
    }

    /// Whom to attack.
    pub fn victim(&self) -> &Victim {
        self.node.victim()
    }

    /// What the node holds now.
    ///
    /// # Errors
    /// When it is gone.
    pub fn holdings(&self) -> Result<Holdings> {
        self.node.holdings()
    }

    /// Sockets of the node beyond those it had before the first attack.
    pub fn strangers(&self) -> usize {
        self.node.holdings().map_or(0, |now| now.sockets.saturating_sub(self.fresh.sockets))
    }

    /// Waits until no attacker's connection is left.
    ///
    /// # Errors
    /// When some stay.
    pub fn until_deserted(&self) -> Result<()> {
        let deserted = eventually(RECOVERY, || self.strangers() == 0);
        ensure!(deserted, "{} connections are left: {}", self.strangers(), self.node.said());
        Ok(())
    }

    /// The longest wait of the honest host counts from here on.
    pub fn forget_the_worst(&self) {
        self.honest.forget_the_worst();
    }

    /// The honest host is served right now: some of its operations end from here on.
    ///
    /// # Errors
    /// When it is not.
    pub fn honest_is_served(&self) -> Result<()> {
        let goal = self.honest.served() + 5;
        let served = eventually(RECOVERY, || self.honest.served() >= goal || self.honest.has_ended());
        ensure!(served && !self.honest.has_ended(), "the honest host is not served: {}", self.node.said());
        Ok(())
    }

    /// The attackers are gone: holds the node to everything it promised.
    ///
    /// # Errors
    /// The first promise that was broken.
    pub fn end(self) -> Result<Outcome> {
        self.honest_is_served()?;
        self.until_deserted()?;
        let (before, after) = (self.fresh, self.node.holdings()?);
        ensure!(
            after.descriptors == before.descriptors && after.threads == before.threads,
            "before {before:?}, after {after:?}"
        );
        let bound_bytes = self.limits.memory_bound_bytes(before.resident_bytes);
        ensure!(after.peak_bytes <= bound_bytes, "{} B of memory, bound {bound_bytes} B", after.peak_bytes);
        // A twentieth of what the host asked for: other tests, and builds, may want the same cores.
        let wanted = (self.began.elapsed().as_millis() as u64 * Plan::default().rate / 1000 / 20).max(5);
        let served = self.honest.served() - self.served;
        ensure!(served >= wanted, "the honest host was served {served} times, not {wanted}");
        newcomer(&self.node)?;
        let honest = self.honest.finish()?;
        let deserted = eventually(RECOVERY, || self.node.figures().is_ok_and(|now| is_deserted(&now)));
        ensure!(deserted, "nobody is there, and something is under way: {:?}", self.node.figures());
        self.node.stop()?;
        Ok(Outcome { honest, before, after, bound_bytes })
    }
}

/// A host that comes now is served as if nothing had been.
fn newcomer(node: &Node) -> Result<()> {
    let client = Client::connect(&node.url().to_string()).map_err(|error| anyhow!("a newcomer: {error}"))?;
    let value = vec![0x6e; 20_000];
    client.put(b"newcomer", &value).map_err(|error| anyhow!("a newcomer's put: {error}"))?;
    let found = client.get(b"newcomer").map_err(|error| anyhow!("a newcomer's get: {error}"))?;
    ensure!(found == Some(value), "a newcomer read something else than it put");
    Ok(())
}
