//! Injects the faults of a phase: connections, links, hosts, clocks and disks.
//!
//! ```text
//!   scheduled ──begin──▶ active ──end: when due, or all at the end of a phase──▶ ended
//!                 └─ a connection reset, or a crash of a crashed host ─▶ ended at once
//! ```
//! In: faults and their end times. Out: changes of the simulated network, hosts and disk. Invariant: a client host is
//! stopped if and only if a crash of it is active; the runner restarts its clients when the fault ends.

use crate::faulty_disk::DiskFaults;
use crate::scenario::{FaultKind, FaultedHost, ScheduledFault};
use octokv_base::Nanos;
use octokv_runtime::simulated::{SimEnv, SimHostId, SimLinkConfig};

/// Active faults of a simulation.
pub struct FaultInjector {
    sim: SimEnv,
    /// Nodes, by the index that faults name.
    nodes: Vec<SimHostId>,
    /// Client hosts, by the index that faults name.
    clients: Vec<SimHostId>,
    /// Link properties without a fault.
    link: SimLinkConfig,
    /// Faults of the disks of each node.
    disks: Vec<DiskFaults>,
    /// Active faults and their end times.
    active: Vec<(Nanos, FaultKind)>,
}

impl FaultInjector {
    /// No active faults, between `nodes` and `clients` with links of `link`.
    pub fn new(
        sim: &SimEnv,
        nodes: Vec<SimHostId>,
        clients: Vec<SimHostId>,
        link: SimLinkConfig,
        disks: Vec<DiskFaults>,
    ) -> FaultInjector {
        FaultInjector { sim: sim.clone(), nodes, clients, link, disks, active: Vec::new() }
    }

    /// Faults of each node's disks.
    pub fn disks(&self) -> &[DiskFaults] {
        &self.disks
    }

    fn host(&self, host: FaultedHost) -> SimHostId {
        match host {
            FaultedHost::Node(node) => self.nodes[node],
            FaultedHost::Client(client) => self.clients[client],
        }
    }

    /// Whether any fault is active.
    pub fn has_active(&self) -> bool {
        !self.active.is_empty()
    }

    /// Whether a crash of this client host is active.
    pub fn is_crashed(&self, client: usize) -> bool {
        let crashes =
            |kind: &FaultKind| matches!(kind, FaultKind::ClientHostCrash { host, .. } if *host == client);
        self.active.iter().any(|(_, kind)| crashes(kind))
    }

    /// End time of the active fault that ends first; [`Nanos::NEVER`] without one.
    pub fn next_end(&self) -> Nanos {
        self.active.iter().map(|(until, _)| *until).min().unwrap_or(Nanos::NEVER)
    }

    /// Begins a fault. Returns the client host that it stops, if any.
    pub fn begin(&mut self, fault: &ScheduledFault) -> Option<usize> {
        let mut stopped = None;
        match fault.kind {
            FaultKind::ConnectionReset { host, node } => {
                self.sim.reset_streams(self.clients[host], self.nodes[node]);
                return None;
            }
            FaultKind::Partition { host, node } => {
                self.sim.set_partitioned(self.clients[host], self.nodes[node], true);
            }
            FaultKind::LinkCut { host, node, to_node } => self.set_cut(host, node, to_node, true),
            FaultKind::SlowLink { host, node, link } => {
                self.sim.set_link(self.clients[host], self.nodes[node], link);
            }
            FaultKind::Pause { host } => self.sim.set_paused(self.host(host), true),
            FaultKind::ClockDrift { host, drift_ppm } => {
                self.sim.set_clock_drift(self.host(host), drift_ppm);
            }
            FaultKind::ClientHostCrash { host, .. } if self.is_crashed(host) => return None,
            FaultKind::ClientHostCrash { host, stop } => {
                self.sim.stop_host(self.clients[host], stop);
                stopped = Some(host);
            }
            FaultKind::SlowDisk { node, .. }
            | FaultKind::DiskErrors { node, .. }
            | FaultKind::HangDisk { node, .. }
            | FaultKind::PullDisk { node, .. } => {
                self.disks[node].activate(fault.kind);
            }
        }
        self.active.push((self.sim.now() + fault.duration, fault.kind));
        stopped
    }

    /// Removes a fault that is due at `now` from the active ones. The caller passes it to [`FaultInjector::end`].
    pub fn take_due(&mut self, now: Nanos) -> Option<FaultKind> {
        let index = self.active.iter().position(|(until, _)| *until <= now)?;
        Some(self.active.swap_remove(index).1)
    }

    /// Removes all active faults, and ends those of the disk. The caller passes each to [`FaultInjector::end`].
    pub fn take_all(&mut self) -> Vec<FaultKind> {
        self.disks.iter().for_each(DiskFaults::clear);
        self.active.drain(..).map(|(_, kind)| kind).collect()
    }

    /// Undoes a fault. Returns the client host that it restarts, if any: its clients must be started.
    pub fn end(&mut self, kind: FaultKind) -> Option<usize> {
        match kind {
            FaultKind::ConnectionReset { .. } => {}
            FaultKind::Partition { host, node } => {
                self.sim.set_partitioned(self.clients[host], self.nodes[node], false);
            }
            FaultKind::LinkCut { host, node, to_node } => self.set_cut(host, node, to_node, false),
            FaultKind::SlowLink { host, node, .. } => {
                self.sim.set_link(self.clients[host], self.nodes[node], self.link);
            }
            FaultKind::Pause { host } => self.sim.set_paused(self.host(host), false),
            FaultKind::ClockDrift { host, .. } => self.sim.set_clock_drift(self.host(host), 0),
            FaultKind::ClientHostCrash { host, .. } => {
                self.sim.start_host(self.clients[host]);
                return Some(host);
            }
            FaultKind::SlowDisk { node, .. }
            | FaultKind::DiskErrors { node, .. }
            | FaultKind::HangDisk { node, .. }
            | FaultKind::PullDisk { node, .. } => self.disks[node].clear(),
        }
        None
    }

    fn set_cut(&self, client: usize, node: usize, to_node: bool, cut: bool) {
        let (client, node) = (self.clients[client], self.nodes[node]);
        let (from, to) = if to_node { (client, node) } else { (node, client) };
        self.sim.set_cut(from, to, cut);
    }
}
