//! A node on the kernel's sockets and devices: opens devices, recovers volumes, listens, runs, changes, stops.
//!
//! ```text
//!   start: devices ─▶ volumes (format or recover) ─▶ a thread per core ─▶ core 0 listens ─▶ ready
//!   add:   device ─▶ volume ─▶ each core ─▶ hosts are notified
//!   remove: hosts are notified ─▶ each core, the first one last ─▶ checkpoint ─▶ device
//!   stop:  flag ─▶ cores finish requests in progress ─▶ threads end ─▶ checkpoint, marked clean
//! ```
//! Invariants: only devices that belong to the node are written; a start that fails joins every thread it started and
//! names the core, device or setting that failed.

use crate::config::{DeviceConfig, ExistingDataPolicy, NamespaceConfig, NodeConfig};
use crate::control::{
    ControlMessage, ControlQueue, CoreChangeError, CoreStatus, NamespaceChange, OnCompacted, attach_to_cores,
    detach_from_cores, extend_on_cores, replace_on_cores,
};
use crate::core_namespaces::NamespaceVolume;
use crate::core_roles::order_by_role;
use crate::core_thread::{CoreGuard, CoreMain, CoreThread, NodeShared, RunningCore, StartReport};
use crate::device_driver::select_driver;
use crate::error::{CloseError, CompactionStartError, NamespaceChangeError, StartError, StopError};
use crate::monitor::Monitor;
use crate::namespace_device::NamespaceDevice;
use crate::namespace_open::{NamespaceOpenOptions, OpenNamespace};
use crate::namespace_status::NamespaceStatus;
use crate::node_parts::{new_target, open_namespaces};
use crate::spanned_tokens::host_weights;
use crate::validate::{reject_duplicate, validate_config, validate_namespace};
use octokv_base::NamespaceId;
use octokv_client::PollGroup;
use octokv_engine::{EngineStatistics, Volume};
use octokv_nvmf::Target;
use octokv_runtime::kernel::spawn_reactor;
use octokv_runtime::{CoreWaker, ReactorHandle, mesh};
use octokv_sched::{SchedConfig, SettingError};
use octokv_sys::clock;
use octokv_sys::process::raise_descriptor_limit;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Messages from one core to another that fit their ring.
const MAILBOX_CAPACITY: usize = 256;

/// How often a caller that waits for a core's response checks whether the node still runs.
const RESPONSE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A running node. Dropping it stops its threads; [`RunningNode::stop`] also shuts the volumes down cleanly.
pub struct RunningNode {
    config: Arc<NodeConfig>,
    namespaces: Mutex<BTreeMap<NamespaceId, OpenNamespace>>,
    offline: Mutex<Vec<(NamespaceConfig, StartError)>>,
    /// Held while namespaces are added or removed.
    change_lock: Mutex<()>,
    /// Held while a core's status is requested or a function runs on a core.
    status_lock: Mutex<()>,
    target: Arc<Target>,
    addresses: Vec<SocketAddr>,
    shared: Arc<NodeShared>,
    threads: Vec<RunningCore>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts a node. It accepts connections when this returns.
///
/// # Errors
/// An invalid setting, or the first device, volume, address or core that failed; then no thread is left running.
pub fn start(config: NodeConfig) -> Result<RunningNode, StartError> {
    validate_config(&config)?;
    start_with(config, spawn_reactor)
}

/// Starts a node whose configuration is valid. `spawn` starts a thread on a processor; tests replace it.
fn start_with(
    mut config: NodeConfig,
    spawn: impl FnMut(usize, CoreMain) -> io::Result<JoinHandle<()>>,
) -> Result<RunningNode, StartError> {
    config.driver = select_driver(config.driver)?;
    config.cores = order_by_role(&config.cores, &config.drive_cores);
    raise_descriptor_limit();
    let (namespaces, offline) = open_namespaces(&config)?;
    let target = new_target(&config, &namespaces)?;
    let monitor = Monitor::new(config.cores.len(), config.scheduling.clone(), clock::now)
        .map_err(|error| StartError::InvalidSetting { name: "sched", why: error.to_string() })?;
    let core_wakers: Result<Vec<_>, _> = config.cores.iter().map(|_| CoreWaker::new()).collect();
    let core_wakers = core_wakers.map_err(StartError::System)?;
    let shared = Arc::new(NodeShared {
        stopping: AtomicBool::new(false),
        control_queues: core_wakers.iter().map(ControlQueue::new).collect(),
        drained: core_wakers.iter().map(|_| AtomicBool::new(false)).collect(),
        monitor: Arc::new(monitor),
        core_wakers,
    });
    // From here on, dropping `node` on an error stops and joins the threads that were started.
    let mut node = RunningNode {
        config: Arc::new(config),
        namespaces: Mutex::new(namespaces),
        offline: Mutex::new(offline),
        change_lock: Mutex::default(),
        status_lock: Mutex::default(),
        target,
        addresses: Vec::new(),
        shared,
        threads: Vec::new(),
    };
    let (startup_tx, startup_rx) = channel();
    node.spawn_cores(startup_tx, spawn)?;
    node.wait_for_cores(&startup_rx)?;
    node.target.set_listeners(node.addresses.clone());
    Ok(node)
}

impl RunningNode {
    /// Starts a thread per core. On an error, the guards of the cores that were not started mark them drained, so that
    /// the started ones do not wait for them when they stop.
    fn spawn_cores(
        &mut self,
        startup_tx: Sender<StartReport>,
        mut spawn: impl FnMut(usize, CoreMain) -> io::Result<JoinHandle<()>>,
    ) -> Result<(), StartError> {
        let mailboxes = mesh(&self.shared.core_wakers, MAILBOX_CAPACITY);
        let cores: Vec<CoreThread> = mailboxes
            .into_iter()
            .enumerate()
            .map(|(index, mailbox)| CoreThread {
                index,
                config: Arc::clone(&self.config),
                namespaces: lock(&self.namespaces).values().map(OpenNamespace::for_cores).collect(),
                mailbox,
                target: Arc::clone(&self.target),
                shared: Arc::clone(&self.shared),
                guard: CoreGuard::new(index, self.config.cores[index], &self.shared, startup_tx.clone()),
            })
            .collect();
        for core in cores {
            let processor = self.config.cores[core.index];
            let running = RunningCore::start(|main| spawn(processor, main), core);
            self.threads.push(running.map_err(|error| StartError::Core { core: processor, error })?);
        }
        Ok(())
    }

    /// Waits until every core has reported its start; the accepting core reports the addresses it listens on.
    fn wait_for_cores(&mut self, startup_rx: &Receiver<StartReport>) -> Result<(), StartError> {
        for _ in 0..self.threads.len() {
            let report = startup_rx.recv().expect("a core's guard reports exactly once");
            self.addresses.extend(report?);
        }
        Ok(())
    }

    /// The addresses it listens on, ports resolved.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The subsystem's NQN.
    pub fn nqn(&self) -> &str {
        &self.config.nqn
    }

    /// Engine statistics summed over all Key Value namespaces.
    pub fn statistics(&self) -> EngineStatistics {
        let mut sum = EngineStatistics::default();
        let namespaces = lock(&self.namespaces);
        namespaces.values().filter_map(OpenNamespace::statistics).for_each(|one| sum.add(&one));
        sum
    }

    /// The NVMe target: its controllers, connections and counters.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// The configuration it was started with.
    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// The namespaces, by ascending identifier.
    pub fn namespaces(&self) -> Vec<NamespaceStatus> {
        lock(&self.namespaces).values().map(|namespace| self.status_of(namespace)).collect()
    }

    /// The configured namespaces that failed to open, with the error; without those added since.
    pub fn offline(&self) -> Vec<(NamespaceConfig, String)> {
        lock(&self.offline).iter().map(|(config, error)| (config.clone(), error.to_string())).collect()
    }

    fn status_of(&self, namespace: &OpenNamespace) -> NamespaceStatus {
        let info = namespace.info(self.target.config().key_bytes_max);
        let statistics = namespace.statistics();
        NamespaceStatus {
            config: namespace.config.clone(),
            device: namespace.name(),
            devices: namespace.device_statuses(),
            size_bytes: info.size_bytes,
            used_bytes: info.used_bytes(),
            keys: statistics.map(|statistics| statistics.keys),
            prepared_bytes: statistics.map_or(0, |one| one.prepared_bytes),
            compaction: statistics.unwrap_or_default().compaction,
            cache: statistics.map(|one| one.cache).filter(|cache| cache.capacity_bytes > 0),
            tree: statistics.and_then(|one| one.tree),
            log: statistics.and_then(|one| one.log),
        }
    }

    /// Opens a namespace and serves it; connected hosts are notified.
    ///
    /// # Errors
    /// An identifier in use, an invalid configuration, a device or volume that does not open, values too long for this
    /// node, or a stopping node. Then no namespace has changed, but a device may have been created or formatted.
    pub fn add_namespace(&self, config: &NamespaceConfig) -> Result<NamespaceStatus, NamespaceChangeError> {
        let _change_guard = lock(&self.change_lock);
        validate_namespace(config).map_err(NamespaceChangeError::Open)?;
        if lock(&self.namespaces).contains_key(&config.id) {
            return Err(NamespaceChangeError::Exists(config.id));
        }
        let opened = OpenNamespace::open(config, NamespaceOpenOptions::of(&self.config));
        let opened = opened
            .and_then(|opened| reject_duplicate(&lock(&self.namespaces), opened))
            .map_err(NamespaceChangeError::Open)?;
        let volume_bytes_max = opened.value_bytes_max().unwrap_or(0);
        let node_bytes_max = self.target.config().value_bytes_max;
        if volume_bytes_max > node_bytes_max as usize {
            return Err(NamespaceChangeError::ValueTooLong { volume_bytes_max, node_bytes_max });
        }
        attach_to_cores(self.threads.len(), &opened.for_cores(), |core, change| {
            self.apply_on_core(core, change)
        })
        .map_err(|error| self.change_error(error))?;
        lock(&self.namespaces).insert(config.id, opened.clone());
        lock(&self.offline).retain(|(one, _)| one.id != config.id);
        let added = self.target.add_namespace(opened.info(self.target.config().key_bytes_max));
        assert!(added.is_ok(), "namespace {} is in the target but not in the node", config.id);
        Ok(self.status_of(&opened))
    }

    /// Removes a namespace: requests in progress complete, then its volume is shut down cleanly and its device is closed.
    /// Connected hosts are notified.
    ///
    /// # Errors
    /// [`NamespaceChangeError::Missing`] or [`NamespaceChangeError::Stopping`];
    /// [`NamespaceChangeError::NotClosedCleanly`] if it is removed but its last checkpoint failed.
    pub fn remove_namespace(&self, id: NamespaceId) -> Result<(), NamespaceChangeError> {
        let _change_guard = lock(&self.change_lock);
        let Some(namespace) = lock(&self.namespaces).remove(&id) else {
            let mut offline = lock(&self.offline);
            let before = offline.len();
            offline.retain(|(one, _)| one.id != id);
            return if offline.len() < before { Ok(()) } else { Err(NamespaceChangeError::Missing(id)) };
        };
        self.target.remove_namespace(id);
        detach_from_cores(self.threads.len(), id, |core, change| self.apply_on_core(core, change))
            .map_err(|error| self.change_error(error))?;
        namespace
            .close(NamespaceOpenOptions::of(&self.config))
            .map_err(NamespaceChangeError::NotClosedCleanly)
    }

    /// Puts an empty volume on `device` in the place of one of several of a namespace that is lost, whose name `ns list` shows: its keys are given up. The others are
    /// served meanwhile.
    ///
    /// # Errors
    /// No such namespace or device, one that serves; what [`RunningNode::add_namespace`] has for the new device, which has to be new unless `existing` discards what it holds. What is
    /// served has not changed then, but the lost device may be refused from now on; with [`StartError::Core`] some cores serve the new device and others do not until the
    /// namespace is opened again.
    pub fn replace_device(
        &self,
        id: NamespaceId,
        lost: &str,
        device: DeviceConfig,
        existing: ExistingDataPolicy,
    ) -> Result<NamespaceStatus, NamespaceChangeError> {
        let _change_guard = lock(&self.change_lock);
        let namespace = lock(&self.namespaces).get(&id).cloned();
        let namespace = namespace.ok_or(NamespaceChangeError::Missing(id))?;
        let at = namespace.lost_device(lost)?;
        let options = NamespaceOpenOptions::of(&self.config);
        let replaced =
            namespace.replaced(at, device, existing, options).map_err(NamespaceChangeError::Open)?;
        let changed = replace_on_cores(self.threads.len(), &replaced.for_cores(), at, |core, change| {
            self.apply_on_core(core, change)
        });
        self.set_devices(replaced, changed)
    }

    /// Keeps a namespace whose devices have changed, with its new size. Fails if `changed` says that a core does not have them.
    fn set_devices(
        &self,
        namespace: OpenNamespace,
        changed: Result<(), CoreChangeError>,
    ) -> Result<NamespaceStatus, NamespaceChangeError> {
        let id = namespace.config.id;
        lock(&self.namespaces).insert(id, namespace.clone());
        let info = namespace.info(self.target.config().key_bytes_max);
        self.target.resize_namespace(id, info.size_bytes, info.used_bytes);
        changed.map_err(|error| self.change_error(error))?;
        Ok(self.status_of(&namespace))
    }

    /// Adds a device to a namespace on several, while it is served. Partitions then move to it from the others, paced.
    ///
    /// # Errors
    /// - No such namespace; one on a single device.
    /// - Those of [`RunningNode::add_namespace`] for the new device, which has to be new unless `existing` discards its data.
    /// - [`StartError::Core`]: a core could not open the device. No partition moves to it until the namespace is opened again.
    ///
    /// On any other error the namespace is served as before. Repeat the call after an unfinished addition: the next opening may need the device.
    pub fn extend_namespace(
        &self,
        id: NamespaceId,
        device: DeviceConfig,
        existing: ExistingDataPolicy,
    ) -> Result<NamespaceStatus, NamespaceChangeError> {
        let _change_guard = lock(&self.change_lock);
        let namespace = lock(&self.namespaces).get(&id).cloned();
        let namespace = namespace.ok_or(NamespaceChangeError::Missing(id))?;
        let extended = namespace.extended(device, existing, NamespaceOpenOptions::of(&self.config))?;
        let changed = extend_on_cores(self.threads.len(), &extended.for_cores(), |core, change| {
            self.apply_on_core(core, change)
        });
        self.set_devices(extended, changed)
    }

    /// Compacts a namespace fully, beside its requests, on the first core. `on_compacted` receives the result there.
    ///
    /// # Errors
    /// [`CompactionStartError`]; `on_compacted` was dropped.
    pub fn compact(&self, id: NamespaceId, on_compacted: OnCompacted) -> Result<(), CompactionStartError> {
        let _status_guard = lock(&self.status_lock);
        let begun = self.send_and_wait(0, |begun_tx| ControlMessage::Compact(id, on_compacted, begun_tx));
        begun.unwrap_or(Err(CompactionStartError::Stopping))
    }

    fn apply_on_core(&self, core: usize, change: NamespaceChange<NamespaceDevice>) -> Option<io::Result<()>> {
        self.send_and_wait(core, |response_tx| ControlMessage::ChangeNamespaces(change, response_tx))
    }

    fn change_error(&self, error: CoreChangeError) -> NamespaceChangeError {
        match error {
            CoreChangeError::NoResponse => NamespaceChangeError::Stopping,
            CoreChangeError::Device { core, error } => {
                NamespaceChangeError::Open(StartError::Core { core: self.config.cores[core], error })
            }
        }
    }

    /// Sends a control message and waits for its response; `None` if the node stops or the core ends first.
    /// REQUIRES: the caller holds `change_lock` or `status_lock`, by the kind of message.
    fn send_and_wait<T>(
        &self,
        core: usize,
        make_message: impl FnOnce(Sender<T>) -> ControlMessage<NamespaceDevice>,
    ) -> Option<T> {
        let has_ended = || self.shared.stopping.load(Ordering::Acquire) || self.threads[core].is_finished();
        if has_ended() {
            return None;
        }
        let (response_tx, response_rx) = channel();
        self.shared.control_queues[core].send(make_message(response_tx));
        loop {
            match response_rx.recv_timeout(RESPONSE_POLL_INTERVAL) {
                Ok(response) => return Some(response),
                Err(RecvTimeoutError::Timeout) if !has_ended() => {}
                Err(_) => return None,
            }
        }
    }

    /// Whether a Key Value volume has become read-only because its device failed.
    pub fn is_read_only(&self) -> bool {
        lock(&self.namespaces).values().any(|namespace| match &namespace.volume {
            NamespaceVolume::Kv(volume) => volume.is_read_only(),
            NamespaceVolume::Block(_) => false,
        })
    }

    /// Logs the devices that failed since the last call. Whether there are any.
    pub fn log_device_failures(&self) -> bool {
        // All of them are asked.
        lock(&self.namespaces).values().filter(|namespace| namespace.log_failures()).count() > 0
    }

    /// Whether one of several devices of a namespace is not available, or only read.
    pub fn is_degraded(&self) -> bool {
        let namespaces = lock(&self.namespaces);
        let mut devices = namespaces.values().flat_map(OpenNamespace::device_statuses);
        devices.any(|device| device.failure.is_some() || device.report.is_read_only)
    }

    /// The monitor: measurements of cores and tenants, and the scheduling settings.
    pub fn monitor(&self) -> &Arc<Monitor> {
        &self.shared.monitor
    }

    /// Replaces the scheduling settings from the end of the current interval on.
    ///
    /// # Errors
    /// A setting is out of its range; then nothing has changed.
    pub fn set_scheduling(&self, config: SchedConfig) -> Result<(), SettingError> {
        let weights = host_weights(&config);
        self.shared.monitor.set_config(config)?;
        self.target.set_host_weights(weights);
        self.shared.wake_all();
        Ok(())
    }

    /// The processor of each core, in the order of the cores: those for drives first.
    pub fn processors(&self) -> &[usize] {
        &self.config.cores
    }

    /// The status of each core; fewer entries if the node is stopping.
    pub fn core_statuses(&self) -> Vec<CoreStatus> {
        let _status_guard = lock(&self.status_lock);
        (0..self.threads.len())
            .map_while(|core| self.send_and_wait(core, ControlMessage::ReportStatus))
            .collect()
    }

    /// Runs `function` on a core, counted from 0, between two iterations: it may connect peers and spawn tasks that use
    /// them. Returns true when it has run, false if the node is stopping.
    ///
    /// # Panics
    /// If the node has no such core.
    pub fn run_on_core(
        &self,
        core: usize,
        function: impl FnOnce(&ReactorHandle, &PollGroup) + Send + 'static,
    ) -> bool {
        let _status_guard = lock(&self.status_lock);
        self.send_and_wait(core, |response_tx| ControlMessage::Run(Box::new(function), response_tx)).is_some()
    }

    /// Stops every core and joins its thread, unless a device that hangs may keep the thread.
    ///
    /// # Errors
    /// The first core whose thread had panicked.
    fn stop_threads(&mut self) -> Result<(), StopError> {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.wake_all();
        let mut result = Ok(());
        for (index, core) in self.threads.drain(..).enumerate() {
            if !core.join() && result.is_ok() {
                result = Err(StopError::CoreEnded { core: self.config.cores[index] });
            }
        }
        result
    }

    /// Completes requests in progress, closes every connection, and shuts the volumes down cleanly.
    ///
    /// # Errors
    /// A reactor thread that had panicked, or the first volume that was not shut down cleanly. The other volumes are
    /// shut down nevertheless, and their errors are logged.
    pub fn stop(mut self) -> Result<(), StopError> {
        self.stop_threads()?;
        let options = NamespaceOpenOptions::of(&self.config);
        let mut first_error: Option<CloseError> = None;
        for namespace in lock(&self.namespaces).values() {
            match namespace.close(options) {
                Ok(()) => {}
                Err(error) if first_error.is_none() => first_error = Some(error),
                Err(error) => tracing::error!(%error, "a volume was not shut down cleanly"),
            }
        }
        first_error.map_or(Ok(()), |error| Err(StopError::NotClosedCleanly(error)))
    }
}

impl Drop for RunningNode {
    fn drop(&mut self) {
        // stop() reports a panicked thread; a dropped node has no caller to report it to.
        let _ = self.stop_threads();
    }
}

#[cfg(test)]
mod tests;
