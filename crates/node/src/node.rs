//! A node on the kernel's sockets and devices: open the devices, recover, listen, run, change, stop.
//!
//! ```text
//!   start: devices ─▶ volumes (format or recover) ─▶ a thread per core ─▶ core 0 listens ─▶ ready
//!   add:   device ─▶ volume ─▶ each core ─▶ hosts hear of it
//!   remove: hosts hear of it ─▶ each core, the first one last ─▶ checkpoint ─▶ device
//!   stop:  flag ─▶ cores finish what was begun ─▶ threads end ─▶ checkpoint, marked clean
//! ```
//! Invariants: nothing is written to a device that is not ours; a start that fails leaves no thread behind.

use crate::config::{NamespaceConfig, NodeConfig};
use crate::core_thread::{ControlMessage, ControlQueue, CoreStatus, CoreThread, NodeShared};
use crate::device_driver::select_driver;
use crate::error::{NamespaceChangeError, StartError, StopError};
use crate::monitor::Monitor;
use crate::namespace_open::{NamespaceOpenOptions, NamespaceVolume, OpenNamespace};
use crate::validate::{reject_duplicate, validate_config, validate_namespace};
use octokv_base::NamespaceId;
use octokv_engine::EngineStatistics;
use octokv_nvmf::Target;
use octokv_runtime::kernel::spawn_reactors;
use octokv_runtime::{CoreWaker, mesh};
use octokv_sys::clock;
use octokv_sys::process::raise_descriptor_limit;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// Messages between two cores that may be on their way at a time.
const MAILBOX_CAPACITY: usize = 256;

/// How often one who waits for a core's answer looks whether the node still runs.
const RESPONSE_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// A namespace as an operator sees it.
#[derive(Clone, Debug)]
pub struct NamespaceStatus {
    /// What it was made by.
    pub config: NamespaceConfig,
    /// What its device is called.
    pub device: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// How many of them are in use.
    pub used_bytes: u64,
    /// How many keys it has; none where it is of blocks.
    pub keys: Option<u64>,
}

/// A node that runs until it is stopped.
pub struct RunningNode {
    config: Arc<NodeConfig>,
    namespaces: Mutex<BTreeMap<NamespaceId, OpenNamespace>>,
    offline: Mutex<Vec<(NamespaceConfig, StartError)>>,
    /// Held while the namespaces are changed.
    change_lock: Mutex<()>,
    target: Arc<Target>,
    addresses: Vec<SocketAddr>,
    shared: Arc<NodeShared>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NodeConfig {
    fn open_options(&self) -> NamespaceOpenOptions {
        NamespaceOpenOptions {
            driver: self.driver,
            device_depth: self.device_depth,
            durability: self.durability,
            cores: self.cores.len(),
            seed: self.seed,
        }
    }
}

/// Starts a node. When this returns, it serves.
pub fn start(mut config: NodeConfig) -> Result<RunningNode, StartError> {
    validate_config(&config)?;
    config.driver = select_driver(config.driver)?;
    raise_descriptor_limit();
    let (mut open_namespaces, mut offline) = (BTreeMap::new(), Vec::new());
    for namespace in config.all_namespaces() {
        validate_namespace(&namespace)?;
        if open_namespaces.contains_key(&namespace.id) {
            let why = match namespace.required {
                true => format!("{} is there twice", namespace.id),
                false => format!(
                    "{} is configured, and was also added while the node ran (state file)",
                    namespace.id
                ),
            };
            return Err(StartError::InvalidSetting { name: "nsid", why });
        }
        let opened = OpenNamespace::open(&namespace, config.open_options())
            .and_then(|open| reject_duplicate(&open_namespaces, open));
        match opened {
            Ok(open) => drop(open_namespaces.insert(namespace.id, open)),
            Err(error) if namespace.required => return Err(error),
            Err(error) => {
                tracing::error!(nsid = namespace.id.0, %error, "a namespace that was added is not served");
                offline.push((namespace, error));
            }
        }
    }
    let value_bytes_max =
        open_namespaces.values().filter_map(OpenNamespace::value_bytes_max).max().unwrap_or(0);
    if config.buffer_bytes < 4 * value_bytes_max {
        let why = format!(
            "the volume holds values of up to {value_bytes_max} bytes: room for four of them is needed"
        );
        return Err(StartError::InvalidSetting { name: "buffer_bytes", why });
    }
    let mut target = config.subsystem.clone();
    target.receive_bytes_max = target.receive_bytes_max.max(2 * value_bytes_max);
    target.nqn.clone_from(&config.nqn);
    target.connections_max = config.connections_max;
    target.value_bytes_max = target.value_bytes_max.max(value_bytes_max as u32);
    let infos = open_namespaces.values().map(|held| held.info(target.key_bytes_max)).collect();
    let target = Target::new(target, infos);
    target.set_host_acl(config.host_acl.clone());
    target.set_referrals(config.referrals.clone());
    target.set_health(config.health);
    config.ana_states.iter().for_each(|&(group, state)| target.set_ana_state(group, state));
    let monitor = Monitor::new(config.cores.len(), config.scheduling.clone(), clock::now);
    let monitor =
        monitor.map_err(|error| StartError::InvalidSetting { name: "sched", why: error.to_string() })?;
    let core_wakers: Result<Vec<_>, _> = config.cores.iter().map(|_| CoreWaker::new()).collect();
    let doorbells = core_wakers.map_err(StartError::System)?;
    let mailboxes = mesh(&doorbells, MAILBOX_CAPACITY).into_iter().map(|one| Mutex::new(Some(one)));
    let shared = Arc::new(NodeShared {
        stopping: AtomicBool::new(false),
        mailboxes: mailboxes.collect(),
        control_queues: doorbells.iter().map(|_| ControlQueue::default()).collect(),
        drained: doorbells.iter().map(|_| AtomicBool::new(false)).collect(),
        monitor: Arc::new(monitor),
        core_wakers: doorbells,
    });
    let config = Arc::new(config);
    let (startup_tx, startup_rx) = channel();
    let body = {
        let to_each = |_: &usize| Mutex::new(open_namespaces.values().cloned().collect());
        let core = CoreThread {
            config: Arc::clone(&config),
            initial_namespaces: config.cores.iter().map(to_each).collect(),
            target: Arc::clone(&target),
            shared: Arc::clone(&shared),
            startup_tx,
        };
        move |index| core.run(index)
    };
    let threads = spawn_reactors(&config.cores, body);
    let threads = threads.map_err(|error| StartError::Core { core: config.cores[0], error })?;
    let (namespaces, offline, change_lock) =
        (Mutex::new(open_namespaces), Mutex::new(offline), Mutex::default());
    let mut node = RunningNode {
        config,
        namespaces,
        offline,
        change_lock,
        target,
        addresses: Vec::new(),
        shared,
        threads,
    };
    for _ in 0..node.threads.len() {
        match startup_rx.recv() {
            Ok(Ok(addresses)) => node.addresses.extend(addresses),
            Ok(Err(error)) => {
                node.stop_threads();
                return Err(error);
            }
            Err(_) => return Err(StartError::System(io::Error::other("a reactor ended at its start"))),
        }
    }
    node.target.set_listeners(node.addresses.clone());
    Ok(node)
}

impl RunningNode {
    /// Where it listens, ports resolved.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// The subsystem's NQN.
    pub fn nqn(&self) -> &str {
        &self.config.nqn
    }

    /// The engines' figures, those of all namespaces of keys together.
    pub fn statistics(&self) -> EngineStatistics {
        let mut sum = EngineStatistics::default();
        for namespace in lock(&self.namespaces).values() {
            if let NamespaceVolume::Kv(volume) = &namespace.volume {
                let one = volume.statistics();
                sum.keys += one.keys;
                sum.capacity_bytes += one.capacity_bytes;
                sum.used_bytes += one.used_bytes;
                sum.index_bytes += one.index_bytes;
                sum.journal_batches += one.journal_batches;
                sum.checkpoints += one.checkpoints;
            }
        }
        sum
    }

    /// The protocol's figures.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    /// What it was started with.
    pub fn config(&self) -> &NodeConfig {
        &self.config
    }

    /// The namespaces, by rising identifier.
    pub fn namespaces(&self) -> Vec<NamespaceStatus> {
        lock(&self.namespaces).values().map(|held| self.status_of(held)).collect()
    }

    /// The namespaces that are not served although they were asked for, and why; not those that are served since.
    pub fn offline(&self) -> Vec<(NamespaceConfig, String)> {
        lock(&self.offline).iter().map(|(config, error)| (config.clone(), error.to_string())).collect()
    }

    fn status_of(&self, namespace: &OpenNamespace) -> NamespaceStatus {
        let info = namespace.info(self.target.config().key_bytes_max);
        let keys = match &namespace.volume {
            NamespaceVolume::Kv(volume) => Some(volume.statistics().keys),
            NamespaceVolume::Block(_) => None,
        };
        NamespaceStatus {
            config: namespace.config.clone(),
            device: namespace.name(),
            size_bytes: info.size_bytes,
            used_bytes: info.used_bytes(),
            keys,
        }
    }

    /// Opens a namespace and serves it; connected hosts hear of it.
    ///
    /// # Errors
    /// What is in the way; then nothing has changed, save that a device that was to be made or given up may have been.
    pub fn add_namespace(&self, config: &NamespaceConfig) -> Result<NamespaceStatus, NamespaceChangeError> {
        let _change_guard = lock(&self.change_lock);
        validate_namespace(config).map_err(NamespaceChangeError::Open)?;
        if lock(&self.namespaces).contains_key(&config.id) {
            return Err(NamespaceChangeError::Exists(config.id));
        }
        let opened = OpenNamespace::open(config, self.config.open_options());
        let opened = opened
            .and_then(|held| reject_duplicate(&lock(&self.namespaces), held))
            .map_err(NamespaceChangeError::Open)?;
        let volume_bytes_max = opened.value_bytes_max().unwrap_or(0);
        let node_bytes_max = self.target.config().value_bytes_max;
        if volume_bytes_max > node_bytes_max as usize {
            return Err(NamespaceChangeError::ValueTooLong { volume_bytes_max, node_bytes_max });
        }
        for core in 0..self.threads.len() {
            let attached = self.apply_on_core(core, |response_tx| {
                ControlMessage::AttachNamespace(Box::new(opened.clone()), response_tx)
            });
            if let Err(error) = attached {
                self.detach_from_cores(config.id)?;
                return Err(error);
            }
        }
        lock(&self.namespaces).insert(config.id, opened.clone());
        lock(&self.offline).retain(|(one, _)| one.id != config.id);
        let added = self.target.add_namespace(opened.info(self.target.config().key_bytes_max));
        assert!(added.is_ok(), "namespace {} is held and was not", config.id);
        Ok(self.status_of(&opened))
    }

    /// Serves a namespace no more: requests that were begun end, then its volume is closed in order and its device let
    /// go. Connected hosts hear of it.
    ///
    /// # Errors
    /// [`NamespaceChangeError::Missing`], [`NamespaceChangeError::Stopping`]; [`NamespaceChangeError::NotClosedCleanly`] when it is removed all the same.
    pub fn remove_namespace(&self, id: NamespaceId) -> Result<(), NamespaceChangeError> {
        let _change_guard = lock(&self.change_lock);
        let Some(namespace) = lock(&self.namespaces).remove(&id) else {
            let mut offline = lock(&self.offline);
            let before = offline.len();
            offline.retain(|(one, _)| one.id != id);
            return if offline.len() < before { Ok(()) } else { Err(NamespaceChangeError::Missing(id)) };
        };
        self.target.remove_namespace(id);
        self.detach_from_cores(id)?;
        namespace.close(self.config.open_options()).map_err(NamespaceChangeError::NotClosedCleanly)
    }

    /// Takes a namespace from every core: from the first one last, which keeps its volume in order.
    fn detach_from_cores(&self, id: NamespaceId) -> Result<(), NamespaceChangeError> {
        (0..self.threads.len()).rev().try_for_each(|core| {
            self.apply_on_core(core, |response_tx| ControlMessage::DetachNamespace(id, response_tx))
        })
    }

    fn apply_on_core(
        &self,
        core: usize,
        make_message: impl FnOnce(Sender<io::Result<()>>) -> ControlMessage,
    ) -> Result<(), NamespaceChangeError> {
        let result: io::Result<()> =
            self.send_and_wait(core, make_message).ok_or(NamespaceChangeError::Stopping)?;
        result.map_err(|error| NamespaceChangeError::Open(StartError::System(error)))
    }

    /// A core's answer to an order; `None` when the node stops before it comes.
    fn send_and_wait<T>(
        &self,
        core: usize,
        make_message: impl FnOnce(Sender<T>) -> ControlMessage,
    ) -> Option<T> {
        let (response_tx, response_rx) = channel();
        self.shared.send_control(core, make_message(response_tx));
        loop {
            match response_rx.recv_timeout(RESPONSE_POLL_INTERVAL) {
                Ok(response) => return Some(response),
                Err(RecvTimeoutError::Timeout)
                    if !self.shared.stopping.load(Ordering::Acquire) && !self.threads[core].is_finished() => {
                }
                Err(_) => return None,
            }
        }
    }

    /// Whether a volume of keys takes no more writes since its device failed.
    pub fn is_read_only(&self) -> bool {
        let has_read_only_volume = |namespace: &OpenNamespace| matches!(&namespace.volume, NamespaceVolume::Kv(volume) if volume.is_read_only());
        lock(&self.namespaces).values().any(has_read_only_volume)
    }

    /// What is measured of its cores and flows, and what is chosen by it; its settings can be changed.
    pub fn monitor(&self) -> &Arc<Monitor> {
        &self.shared.monitor
    }

    /// Has others served where and when, from the end of the window that runs.
    ///
    /// # Errors
    /// What may not be; then nothing has changed.
    pub fn set_scheduling(
        &self,
        config: octokv_sched::SchedConfig,
    ) -> Result<(), octokv_sched::SettingError> {
        self.shared.monitor.set_config(config)?;
        self.shared.core_wakers.iter().for_each(|doorbell| doorbell.notify());
        Ok(())
    }

    /// How each core is; fewer when the node is stopping.
    pub fn core_statuses(&self) -> Vec<CoreStatus> {
        (0..self.threads.len())
            .map_while(|core| self.send_and_wait(core, ControlMessage::ReportStatus))
            .collect()
    }

    fn stop_threads(&mut self) -> bool {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.core_wakers.iter().for_each(|doorbell| doorbell.notify());
        self.threads.drain(..).map(JoinHandle::join).fold(true, |all, one| all & one.is_ok())
    }

    /// Finishes what was begun, closes every connection, and closes the volumes in order.
    pub fn stop(mut self) -> Result<(), StopError> {
        if !self.stop_threads() {
            return Err(StopError::CoreEnded);
        }
        let options = self.config.open_options();
        let mut all = Ok(());
        for namespace in lock(&self.namespaces).values() {
            if let Err(fault) = namespace.close(options) {
                all = Err(StopError::Checkpoint(fault));
            }
        }
        all
    }
}

impl Drop for RunningNode {
    fn drop(&mut self) {
        self.stop_threads();
    }
}
