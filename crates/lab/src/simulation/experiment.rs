//! A simulated experiment: one node and its clients, run for a time or for a number of requests.
//!
//! ```text
//!   new: format, open ─▶ six cores ─▶ one session of six queues per tenant ─▶ core of each connection ─▶ (gets: store keys)
//!   run_for, run_requests: metrics of a run    run_tenants_*: also of each tenant    set_policy: from the next interval on
//! ```
//! In: an [`ExperimentConfig`] of one tenant or a [`MultiTenantConfig`] of several. Out: [`RunStats`] or
//! [`MultiTenantRunStats`] of each run, or a message. Results list the cores in the order of the first tenant's
//! connections; the connections of the other tenants are sorted into that order, so that connection `i` of every tenant
//! is on the same core.
//!
//! Invariants: after [`SimulatedExperiment::run_requests`] no operation is outstanding, so every stage has counted every
//! request; an experiment of one tenant and the [`MultiTenantConfig`] of the same are identical runs, bit for bit.

use super::config::{ExperimentConfig, MultiTenantConfig, tenant_host_nqn};
use super::metrics::{ClientStats, RunStats};
use super::node::{COMPLETION_TIMEOUT, ExperimentNode, NQN, POOL_BYTES, host_handle};
use super::parameters::{CORES, KEYS_STORED, Operation, drive_profile, wire_link};
use super::ssd_device::SharedSsd;
use super::tenant_metrics::MultiTenantRunStats;
use super::workload::{ConnectionPolicy, TenantWorkload, WorkloadClient};
use octokv_base::{Nanos, Prng};
use octokv_client::{ClientConfig, Session};
use octokv_device::ssd_model::SsdModel;
use octokv_node::SimulatedCosts;
use octokv_node::core_metrics::CoreMetricsSnapshot;
use octokv_node::monitor::{IntervalReport, Monitor};
use octokv_runtime::CoreWaker;
use octokv_runtime::simulated::{HostFailure, SimEnv, SimEnvConfig, SimHostId};
use octokv_sched::{SchedConfig, TenantId};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Time of a reactor iteration without simulated work.
const MIN_ITERATION_COST: Nanos = Nanos(100);

/// One tenant: a host with its client threads.
struct ExperimentTenant {
    host: SimHostId,
    workload: Rc<RefCell<TenantWorkload>>,
}

/// A running simulation of node and clients.
pub struct SimulatedExperiment {
    sim: SimEnv,
    node: SimHostId,
    tenants: Vec<ExperimentTenant>,
    scheduling: Arc<Monitor>,
    /// By connection: its core.
    core_of: Vec<usize>,
}

impl SimulatedExperiment {
    /// Prepares an experiment: formats, opens, connects, and for gets stores the keys.
    ///
    /// # Errors
    /// A message if the node or a client failed.
    pub fn new(config: &ExperimentConfig) -> Result<SimulatedExperiment, String> {
        SimulatedExperiment::multi_tenant(&MultiTenantConfig::single_tenant(config))
    }

    /// The same for several tenants.
    ///
    /// # Errors
    /// A message if the node or a client failed.
    pub fn multi_tenant(config: &MultiTenantConfig) -> Result<SimulatedExperiment, String> {
        let sim = SimEnv::new(SimEnvConfig {
            iteration_cost_min: MIN_ITERATION_COST,
            ..SimEnvConfig::new(config.seed)
        });
        let node = sim.add_host();
        let mut tenants: Vec<ExperimentTenant> = Vec::new();
        for number in 0..config.tenants.len() {
            let shared_host = tenants.first().filter(|_| config.shared_client_host).map(|first| first.host);
            let host = shared_host.unwrap_or_else(|| sim.add_host());
            sim.set_link(host, node, wire_link(false));
            tenants.push(ExperimentTenant { host, workload: TenantWorkload::new(number as u32, CORES) });
        }
        let scheduling = Monitor::new(CORES, config.scheduling.clone(), || Nanos::ZERO);
        let scheduling = Arc::new(scheduling.map_err(|error| error.to_string())?);
        let mut experiment =
            SimulatedExperiment { sim, node, tenants, scheduling, core_of: (0..CORES).collect() };
        let ssd = SharedSsd::new(SsdModel::new(drive_profile(), 4096), 4096);
        experiment.serve(&ssd, config)?;
        for tenant in 0..config.tenants.len() {
            experiment.connect(tenant, config.seed)?;
            experiment.find_cores(tenant)?;
        }
        // Only now, because jitter during connection setup would change the core of each connection.
        for tenant in &experiment.tenants {
            experiment.sim.set_link(tenant.host, node, wire_link(true));
        }
        if config.operation == Operation::Get {
            for tenant in 0..config.tenants.len() {
                experiment.set_workload(tenant, Operation::Put, CORES, ConnectionPolicy::FillInOrder(1));
                let missing = KEYS_STORED - experiment.tenants[tenant].workload.borrow().keys_stored;
                experiment.run_requests(u64::from(missing))?;
                experiment.set_workload(tenant, Operation::Put, 0, ConnectionPolicy::FillInOrder(1));
            }
        }
        for (tenant, load) in config.tenants.iter().enumerate() {
            experiment.set_workload(tenant, config.operation, load.threads, load.connection_policy.clone());
        }
        Ok(experiment)
    }

    /// Changes the scheduling configuration from the end of the current interval on.
    ///
    /// # Errors
    /// A message if the configuration is invalid.
    pub fn set_policy(&self, settings: SchedConfig) -> Result<(), String> {
        self.scheduling.set_config(settings).map_err(|error| error.to_string())
    }

    /// Runs for a time; operations continue afterwards.
    ///
    /// # Errors
    /// A message if an operation failed.
    pub fn run_for(&self, span: Nanos) -> Result<RunStats, String> {
        self.run_tenants_for(span).map(|together| together.total)
    }

    /// The same, with metrics of each tenant and of the node's monitor.
    ///
    /// # Errors
    /// A message if an operation failed.
    pub fn run_tenants_for(&self, span: Nanos) -> Result<MultiTenantRunStats, String> {
        for mut load in self.workloads() {
            load.submit_limit = u64::MAX;
            load.notify_client();
        }
        let (began, before) = self.begin_measurement();
        let mut intervals: Vec<Arc<IntervalReport>> = Vec::new();
        let mut known = self.scheduling.interval_count();
        // One run for the whole time: each stop would add an iteration of idle reactors.
        self.sim.run_until_true(began + span, || {
            if self.scheduling.interval_count() > known
                && let Some(interval) = self.scheduling.last_interval()
            {
                known = interval.number;
                intervals.push(interval);
            }
            false
        });
        self.end_measurement(began, &before, &intervals)
    }

    /// Runs a number of operations of each tenant with threads, to the last response.
    ///
    /// # Errors
    /// A message if an operation failed or did not complete.
    pub fn run_requests(&self, requests: u64) -> Result<RunStats, String> {
        self.run_tenants_requests(requests).map(|together| together.total)
    }

    /// The same, with metrics of each tenant.
    ///
    /// # Errors
    /// A message if an operation failed or did not complete.
    pub fn run_tenants_requests(&self, requests: u64) -> Result<MultiTenantRunStats, String> {
        self.drain()?;
        let (began, before) = self.begin_measurement();
        for mut load in self.workloads().filter(|load| load.threads > 0) {
            load.submit_limit = load.submitted + requests;
            load.notify_client();
        }
        self.drain_until(|load| load.submitted >= load.submit_limit)?;
        self.end_measurement(began, &before, &[])
    }

    fn workloads(&self) -> impl Iterator<Item = std::cell::RefMut<'_, TenantWorkload>> {
        self.tenants.iter().map(|tenant| tenant.workload.borrow_mut())
    }

    /// Waits until no operation is outstanding.
    fn drain(&self) -> Result<(), String> {
        self.workloads().for_each(|mut load| load.submit_limit = load.submitted);
        self.drain_until(|_| true)
    }

    fn drain_until(&self, also: impl Fn(&TenantWorkload) -> bool) -> Result<(), String> {
        let is_done = |load: &TenantWorkload| also(load) && load.completed == load.submitted;
        let ended = || {
            self.tenants.iter().any(|tenant| tenant.workload.borrow().failure.is_some())
                || self.tenants.iter().all(|tenant| is_done(&tenant.workload.borrow()))
        };
        let is_over = self.sim.run_until_true(self.sim.now() + COMPLETION_TIMEOUT, ended);
        self.failure()?;
        if is_over { Ok(()) } else { Err("operations did not complete".to_owned()) }
    }

    fn begin_measurement(&self) -> (Nanos, Vec<CoreMetricsSnapshot>) {
        let now = self.sim.now();
        self.workloads().for_each(|mut load| drop(load.take_stats(now)));
        (now, self.core_snapshots())
    }

    fn end_measurement(
        &self,
        began: Nanos,
        before: &[CoreMetricsSnapshot],
        intervals: &[Arc<IntervalReport>],
    ) -> Result<MultiTenantRunStats, String> {
        self.failure()?;
        let now = self.sim.now();
        let counted: Vec<ClientStats> = self.workloads().map(|mut load| load.take_stats(now)).collect();
        let (span, after) = (now.since(began), self.core_snapshots());
        let tenant_ids: Vec<Option<TenantId>> =
            (0..self.tenants.len()).map(|tenant| self.tenant_id_of(tenant)).collect();
        Ok(MultiTenantRunStats::new(span, before, &after, counted, &tenant_ids, intervals))
    }

    /// The tenant id of a tenant on the node.
    fn tenant_id_of(&self, tenant: usize) -> Option<TenantId> {
        let name = tenant_host_nqn(tenant);
        self.scheduling
            .tenants()
            .names()
            .into_iter()
            .find(|(_, host)| *host == name)
            .map(|(tenant, _)| tenant)
    }

    fn failure(&self) -> Result<(), String> {
        self.workloads().find_map(|load| load.failure.clone()).map_or(Ok(()), Err)
    }

    /// Metric snapshots of the cores, in the order of the connections.
    fn core_snapshots(&self) -> Vec<CoreMetricsSnapshot> {
        self.core_of.iter().map(|&core| self.scheduling.core_metrics()[core].snapshot()).collect()
    }

    fn set_workload(&self, tenant: usize, operation: Operation, threads: usize, placement: ConnectionPolicy) {
        let mut load = self.tenants[tenant].workload.borrow_mut();
        (load.operation, load.threads, load.connection_policy) = (operation, threads, placement);
        load.notify_client();
    }

    fn serve(&self, ssd: &Rc<RefCell<SharedSsd>>, config: &MultiTenantConfig) -> Result<(), String> {
        let node = self.node_of(config.costs, config.journal);
        let volume = node.open(ssd)?;
        node.serve(ssd, &volume)
    }

    fn node_of(&self, costs: SimulatedCosts, journal: bool) -> ExperimentNode<'_> {
        ExperimentNode { sim: &self.sim, host: self.node, scheduling: &self.scheduling, costs, journal }
    }

    fn connect(&self, tenant: usize, seed: u64) -> Result<(), String> {
        let defaults = ClientConfig::default();
        let mut host_id = defaults.host_id;
        // The node requires one host identifier per host NQN.
        host_id[15] = host_id[15].wrapping_add(tenant as u8);
        let settings = ClientConfig {
            subsystem_nqn: NQN.to_owned(),
            host_nqn: tenant_host_nqn(tenant),
            host_id,
            io_queues: CORES as u16,
            queue_depth: 64,
            receive_buffer_bytes: 64 << 10,
            pool_bytes: POOL_BYTES,
            ..defaults
        };
        let (host, workload) = (self.tenants[tenant].host, &self.tenants[tenant].workload);
        let address = self.node_of(SimulatedCosts::default(), false).address();
        let session = Session::new(self.sim.sockets(host), address, settings, self.sim.now());
        let handle = host_handle(&self.sim, host, CoreWaker::without_eventfd());
        let random = Prng::new(octokv_base::prng::mix64(seed.wrapping_add((tenant as u64) << 32)));
        let mut client = WorkloadClient::new(session, handle.clone(), Rc::clone(workload), random);
        self.sim.add_reactor(host, handle, move |now| client.run_iteration(now));
        let is_live = || workload.borrow().is_connected || workload.borrow().failure.is_some();
        let is_over = self.sim.run_until_true(self.sim.now() + COMPLETION_TIMEOUT, is_live);
        self.failure()?;
        if is_over { Ok(()) } else { Err("a session did not connect".to_owned()) }
    }

    /// Finds the core of each connection of a tenant by one operation over each. The first tenant defines the order of the
    /// cores; the connections of the others are sorted into that order.
    fn find_cores(&mut self, tenant: usize) -> Result<(), String> {
        let mut found = Vec::new();
        for connection in 0..CORES {
            self.set_workload(tenant, Operation::Put, 1, ConnectionPolicy::Single(connection));
            let stats = self.run_requests(1)?;
            found.push(stats.cores.iter().position(|core| core.requests_received == 1).unwrap_or(CORES));
        }
        self.set_workload(tenant, Operation::Put, 0, ConnectionPolicy::FillInOrder(1));
        let mut sorted = found.clone();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..CORES) {
            return Err(format!("the connections are on cores {found:?}; each must be on a core of its own"));
        }
        if tenant == 0 {
            self.core_of = found;
        } else {
            let position = |core| found.iter().position(|&at| at == core).unwrap_or(core);
            self.tenants[tenant].workload.borrow_mut().queue_of = (0..CORES).map(position).collect();
        }
        Ok(())
    }
}

impl Drop for SimulatedExperiment {
    fn drop(&mut self) {
        // Reactors and pending events hold references to the simulation, which would keep it alive.
        for tenant in &self.tenants {
            self.sim.stop_host(tenant.host, HostFailure::ProcessKilled);
        }
        self.sim.stop_host(self.node, HostFailure::ProcessKilled);
        while self.sim.step(Nanos::NEVER) {}
    }
}
