//! A node on the kernel's sockets and devices: open the devices, recover, listen, run, change, stop.
//!
//! ```text
//!   start: devices ─▶ volumes (format or recover) ─▶ a thread per core ─▶ core 0 listens ─▶ ready
//!   add:   device ─▶ volume ─▶ each core ─▶ hosts hear of it
//!   remove: hosts hear of it ─▶ each core, the first one last ─▶ checkpoint ─▶ device
//!   stop:  flag ─▶ cores finish what was begun ─▶ threads end ─▶ checkpoint, marked clean
//! ```
//! Invariants: nothing is written to a device that is not ours; a start that fails leaves no thread behind.

use crate::config::{Content, DeviceSettings, Existing, NamespaceSettings, NodeSettings};
use crate::core_thread::{Core, CoreReport, Order, Orders, Shared};
use crate::device_driver::{Unavailable, decide};
use crate::monitor::Scheduling;
use crate::namespace_open::{Contents, Held, Opening};
use octokv_base::NamespaceId;
use octokv_engine::hash::OpenError;
use octokv_engine::hash::superblock::NotOurs;
use octokv_engine::{Fault, Statistics};
use octokv_nvmf::Target;
use octokv_runtime::kernel::spawn_reactors;
use octokv_runtime::{Doorbell, mesh};
use octokv_sys::clock;
use octokv_sys::file::OpenError as FileError;
use octokv_sys::process::raise_descriptor_limit;
use octokv_sys::thread;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{fmt, io};

/// The highest identifier of a namespace.
pub const NAMESPACE_ID_MAX: u32 = 1024;
/// The highest group of asymmetric access.
pub const ANA_GROUPS_MAX: u32 = 32;

/// Messages between two cores that may be on their way at a time.
const MAILBOX_MESSAGES: usize = 256;

/// How often one who waits for a core's answer looks whether the node still runs.
const PATIENCE: Duration = Duration::from_millis(100);

/// Why a node did not start.
#[derive(Debug)]
pub enum StartError {
    /// The device could not be opened.
    Device {
        /// Which.
        name: String,
        /// Why.
        error: FileError,
    },
    /// The device holds no volume that can be used.
    Volume {
        /// Which.
        name: String,
        /// Why.
        error: OpenError,
    },
    /// An address could not be listened on.
    Listen {
        /// Which.
        address: SocketAddr,
        /// Why.
        error: io::Error,
    },
    /// A processor is not there, or a thread could not be started on it.
    Core {
        /// Which.
        core: usize,
        /// Why.
        error: io::Error,
    },
    /// io_uring was asked for and cannot be had.
    Driver(Unavailable),
    /// A setting cannot be.
    Setting {
        /// Which.
        name: &'static str,
        /// What it must be.
        why: String,
    },
    /// The system refused something every node needs.
    System(io::Error),
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StartError::Device { name, error } => write!(f, "device {name}: {error}"),
            StartError::Volume { name, error } => {
                write!(f, "device {name}: {error}")?;
                match error {
                    OpenError::NotOurs(NotOurs::Damaged) | OpenError::Damaged { .. } => {
                        f.write_str("; `octokv check` reads what is left")
                    }
                    OpenError::NotOurs(_) => {
                        f.write_str("; it was left as it is (--format gives up what it holds)")
                    }
                    _ => Ok(()),
                }
            }
            StartError::Listen { address, error } => write!(f, "cannot listen on {address}: {error}"),
            StartError::Core { core, error } => write!(f, "cannot run on core {core}: {error}"),
            StartError::Driver(unavailable) => unavailable.fmt(f),
            StartError::Setting { name, why } => write!(f, "{name}: {why}"),
            StartError::System(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StartError {}

/// Why a node did not stop in order. What was acknowledged is safe nevertheless.
#[derive(Debug)]
pub enum StopError {
    /// The last checkpoint failed.
    Checkpoint(Fault),
    /// A core had ended by itself: a bug of ours.
    CoreEnded,
}

impl fmt::Display for StopError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StopError::Checkpoint(fault) => write!(f, "the last checkpoint failed: {fault}"),
            StopError::CoreEnded => f.write_str("a reactor had ended by itself"),
        }
    }
}

impl std::error::Error for StopError {}

/// Why the namespaces of a running node were not changed.
#[derive(Debug)]
pub enum ChangeError {
    /// There is a namespace of this identifier.
    Exists(NamespaceId),
    /// There is none.
    Missing(NamespaceId),
    /// Its device cannot be used.
    Open(StartError),
    /// A value of its volume may be longer than this node was started for.
    ValueTooLong {
        /// What the volume takes, in bytes.
        volume: usize,
        /// What the node takes, in bytes.
        node: u32,
    },
    /// The node is stopping.
    Stopping,
    /// It is removed, but was not closed in order: the next opening replays its journal.
    NotClosed(Fault),
}

impl fmt::Display for ChangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChangeError::Exists(id) => write!(f, "there is a namespace {id} already"),
            ChangeError::Missing(id) => write!(f, "there is no namespace {id}"),
            ChangeError::Open(error) => error.fmt(f),
            ChangeError::ValueTooLong { volume, node } => write!(
                f,
                "the volume holds values of up to {volume} bytes, and this node was started with \
                 value_bytes_max = {node}"
            ),
            ChangeError::Stopping => f.write_str("the node is stopping"),
            ChangeError::NotClosed(fault) => {
                write!(f, "it is removed; its volume was not closed in order: {fault}")
            }
        }
    }
}

impl std::error::Error for ChangeError {}

/// A namespace as an operator sees it.
#[derive(Clone, Debug)]
pub struct NamespaceReport {
    /// What it was made by.
    pub settings: NamespaceSettings,
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
    settings: Arc<NodeSettings>,
    held: Mutex<BTreeMap<NamespaceId, Held>>,
    offline: Mutex<Vec<(NamespaceSettings, StartError)>>,
    /// Held while the namespaces are changed.
    changing: Mutex<()>,
    target: Arc<Target>,
    addresses: Vec<SocketAddr>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl NodeSettings {
    fn opening(&self) -> Opening {
        Opening {
            driver: self.driver,
            device_depth: self.device_depth,
            durability: self.durability,
            cores: self.cores.len(),
            seed: self.seed,
        }
    }

    /// Namespace 1, and the others.
    fn all_namespaces(&self) -> impl Iterator<Item = NamespaceSettings> + '_ {
        let first = NamespaceSettings {
            id: NamespaceId(1),
            device: self.device.clone(),
            nand: self.nand,
            content: Content::KeyValue { format: self.format },
            existing: if self.reformat { Existing::GiveUp } else { Existing::Check },
            ana_group: 1,
            required: true,
            identity: 0,
        };
        std::iter::once(first).chain(self.namespaces.iter().cloned())
    }
}

fn refuse_bad_settings(settings: &NodeSettings) -> Result<(), StartError> {
    let refuse = |name, why: &str| Err(StartError::Setting { name, why: why.to_owned() });
    if settings.cores.is_empty() {
        return refuse("cores", "at least one is needed");
    }
    if settings.listen.is_empty() {
        return refuse("listen", "at least one address is needed");
    }
    let present = thread::cores();
    if let Some(&core) = settings.cores.iter().find(|core| !present.contains(core)) {
        let error = io::Error::new(io::ErrorKind::NotFound, format!("this machine has cores {present:?}"));
        return Err(StartError::Core { core, error });
    }
    let mut sorted = settings.cores.clone();
    sorted.sort_unstable();
    if sorted.windows(2).any(|pair| pair[0] == pair[1]) {
        return refuse("cores", "each can be named once");
    }
    if settings.buffer_bytes < 4 * settings.format.value_bytes_max as usize {
        return refuse("buffer_bytes", "room for at least four of the longest values is needed");
    }
    if settings.device_depth == 0 || settings.requests_max == 0 || settings.connections_max == 0 {
        return refuse("device_depth, requests_max, connections_max", "must be at least 1");
    }
    if settings.nqn.is_empty() || settings.nqn.len() > 223 {
        return refuse("nqn", "must have 1 to 223 bytes");
    }
    if settings.nqn == octokv_wire::nqn::DISCOVERY {
        return refuse("nqn", "this name belongs to discovery");
    }
    if matches!(settings.device, DeviceSettings::File { create_bytes: Some(0), .. }) {
        return refuse("size", "a device of no bytes holds nothing");
    }
    Ok(())
}

/// What a namespace must be, whatever the node.
fn refuse_bad_namespace(settings: &NamespaceSettings) -> Result<(), StartError> {
    let refuse = |name, why: &str| Err(StartError::Setting { name, why: why.to_owned() });
    if settings.id.0 == 0 || settings.id.0 > NAMESPACE_ID_MAX {
        return refuse("nsid", &format!("must be 1 to {NAMESPACE_ID_MAX}"));
    }
    if !(1..=ANA_GROUPS_MAX).contains(&settings.ana_group) {
        return refuse("ana_group", &format!("must be 1 to {ANA_GROUPS_MAX}"));
    }
    if let Content::Blocks { block_bytes } = settings.content
        && !matches!(block_bytes, 512 | 4096)
    {
        return refuse("block_size", "must be 512 or 4096");
    }
    if matches!(settings.device, DeviceSettings::File { create_bytes: Some(0), .. }) {
        return refuse("size", "a device of no bytes holds nothing");
    }
    Ok(())
}

/// Refuses a volume that is a copy of another: hosts could not tell them apart.
fn no_copy(held: &BTreeMap<NamespaceId, Held>, new: Held) -> Result<Held, StartError> {
    let nguid = new.info(0).nguid;
    match held.iter().find(|(_, one)| one.info(0).nguid == nguid) {
        None => Ok(new),
        Some((twin, _)) => {
            let why = format!("{} is a copy of the volume of namespace {twin}", new.name());
            Err(StartError::Setting { name: "device", why })
        }
    }
}

/// Starts a node. When this returns, it serves.
pub fn start(mut settings: NodeSettings) -> Result<RunningNode, StartError> {
    refuse_bad_settings(&settings)?;
    settings.driver = decide(settings.driver)?;
    raise_descriptor_limit();
    let (mut held, mut offline) = (BTreeMap::new(), Vec::new());
    for namespace in settings.all_namespaces() {
        refuse_bad_namespace(&namespace)?;
        if held.contains_key(&namespace.id) {
            let why = match namespace.required {
                true => format!("{} is there twice", namespace.id),
                false => format!(
                    "{} is configured, and was also added while the node ran (state file)",
                    namespace.id
                ),
            };
            return Err(StartError::Setting { name: "nsid", why });
        }
        let open = Held::open(&namespace, settings.opening()).and_then(|open| no_copy(&held, open));
        match open {
            Ok(open) => drop(held.insert(namespace.id, open)),
            Err(error) if namespace.required => return Err(error),
            Err(error) => {
                tracing::error!(nsid = namespace.id.0, %error, "a namespace that was added is not served");
                offline.push((namespace, error));
            }
        }
    }
    let longest = held.values().filter_map(Held::value_bytes_max).max().unwrap_or(0);
    if settings.buffer_bytes < 4 * longest {
        let why =
            format!("the volume holds values of up to {longest} bytes: room for four of them is needed");
        return Err(StartError::Setting { name: "buffer_bytes", why });
    }
    let mut target = settings.target.clone();
    target.receive_bytes_max = target.receive_bytes_max.max(2 * longest);
    target.nqn.clone_from(&settings.nqn);
    target.connections_max = settings.connections_max;
    target.value_bytes_max = target.value_bytes_max.max(longest as u32);
    let infos = held.values().map(|held| held.info(target.key_bytes_max)).collect();
    let target = Target::new(target, infos);
    target.set_hosts(settings.hosts.clone());
    target.set_referrals(settings.referrals.clone());
    target.set_health(settings.health);
    settings.ana.iter().for_each(|&(group, state)| target.set_ana_state(group, state));
    let scheduling = Scheduling::new(settings.cores.len(), settings.scheduling.clone(), clock::now);
    let scheduling =
        scheduling.map_err(|error| StartError::Setting { name: "sched", why: error.to_string() })?;
    let doorbells: Result<Vec<_>, _> = settings.cores.iter().map(|_| Doorbell::new()).collect();
    let doorbells = doorbells.map_err(StartError::System)?;
    let mailboxes = mesh(&doorbells, MAILBOX_MESSAGES).into_iter().map(|one| Mutex::new(Some(one)));
    let shared = Arc::new(Shared {
        stopping: AtomicBool::new(false),
        mailboxes: mailboxes.collect(),
        orders: doorbells.iter().map(|_| Orders::default()).collect(),
        drained: doorbells.iter().map(|_| AtomicBool::new(false)).collect(),
        scheduling: Arc::new(scheduling),
        doorbells,
    });
    let settings = Arc::new(settings);
    let (report, reports) = channel();
    let body = {
        let to_each = |_: &usize| Mutex::new(held.values().cloned().collect());
        let core = Core {
            settings: Arc::clone(&settings),
            held: settings.cores.iter().map(to_each).collect(),
            target: Arc::clone(&target),
            shared: Arc::clone(&shared),
            report,
        };
        move |index| core.run(index)
    };
    let threads = spawn_reactors(&settings.cores, body);
    let threads = threads.map_err(|error| StartError::Core { core: settings.cores[0], error })?;
    let (held, offline, changing) = (Mutex::new(held), Mutex::new(offline), Mutex::default());
    let mut node =
        RunningNode { settings, held, offline, changing, target, addresses: Vec::new(), shared, threads };
    for _ in 0..node.threads.len() {
        match reports.recv() {
            Ok(Ok(addresses)) => node.addresses.extend(addresses),
            Ok(Err(error)) => {
                node.end_threads();
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
        &self.settings.nqn
    }

    /// The engines' figures, those of all namespaces of keys together.
    pub fn statistics(&self) -> Statistics {
        let mut sum = Statistics::default();
        for held in lock(&self.held).values() {
            if let Contents::Keys(volume) = &held.contents {
                let one = volume.statistics();
                sum.keys += one.keys;
                sum.capacity_bytes += one.capacity_bytes;
                sum.used_bytes += one.used_bytes;
                sum.index_bytes += one.index_bytes;
                sum.batches += one.batches;
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
    pub fn settings(&self) -> &NodeSettings {
        &self.settings
    }

    /// The namespaces, by rising identifier.
    pub fn namespaces(&self) -> Vec<NamespaceReport> {
        lock(&self.held).values().map(|held| self.report_of(held)).collect()
    }

    /// The namespaces that are not served although they were asked for, and why; not those that are served since.
    pub fn offline(&self) -> Vec<(NamespaceSettings, String)> {
        lock(&self.offline).iter().map(|(settings, error)| (settings.clone(), error.to_string())).collect()
    }

    fn report_of(&self, held: &Held) -> NamespaceReport {
        let info = held.info(self.target.settings().key_bytes_max);
        let keys = match &held.contents {
            Contents::Keys(volume) => Some(volume.statistics().keys),
            Contents::Blocks(_) => None,
        };
        NamespaceReport {
            settings: held.settings.clone(),
            device: held.name(),
            size_bytes: info.size_bytes,
            used_bytes: info.used(),
            keys,
        }
    }

    /// Opens a namespace and serves it; connected hosts hear of it.
    ///
    /// # Errors
    /// What is in the way; then nothing has changed, save that a device that was to be made or given up may have been.
    pub fn add_namespace(&self, settings: &NamespaceSettings) -> Result<NamespaceReport, ChangeError> {
        let _changing = lock(&self.changing);
        refuse_bad_namespace(settings).map_err(ChangeError::Open)?;
        if lock(&self.held).contains_key(&settings.id) {
            return Err(ChangeError::Exists(settings.id));
        }
        let held = Held::open(settings, self.settings.opening());
        let held = held.and_then(|held| no_copy(&lock(&self.held), held)).map_err(ChangeError::Open)?;
        let longest = held.value_bytes_max().unwrap_or(0);
        let most = self.target.settings().value_bytes_max;
        if longest > most as usize {
            return Err(ChangeError::ValueTooLong { volume: longest, node: most });
        }
        for core in 0..self.threads.len() {
            let attached = self.tell(core, |answer| Order::Attach(Box::new(held.clone()), answer));
            if let Err(error) = attached {
                self.detach(settings.id)?;
                return Err(error);
            }
        }
        lock(&self.held).insert(settings.id, held.clone());
        lock(&self.offline).retain(|(one, _)| one.id != settings.id);
        let added = self.target.add_namespace(held.info(self.target.settings().key_bytes_max));
        assert!(added.is_ok(), "namespace {} is held and was not", settings.id);
        Ok(self.report_of(&held))
    }

    /// Serves a namespace no more: requests that were begun end, then its volume is closed in order and its device let
    /// go. Connected hosts hear of it.
    ///
    /// # Errors
    /// [`ChangeError::Missing`], [`ChangeError::Stopping`]; [`ChangeError::NotClosed`] when it is removed all the same.
    pub fn remove_namespace(&self, id: NamespaceId) -> Result<(), ChangeError> {
        let _changing = lock(&self.changing);
        let Some(held) = lock(&self.held).remove(&id) else {
            let mut offline = lock(&self.offline);
            let before = offline.len();
            offline.retain(|(one, _)| one.id != id);
            return if offline.len() < before { Ok(()) } else { Err(ChangeError::Missing(id)) };
        };
        self.target.remove_namespace(id);
        self.detach(id)?;
        held.close(self.settings.opening()).map_err(ChangeError::NotClosed)
    }

    /// Takes a namespace from every core: from the first one last, which keeps its volume in order.
    fn detach(&self, id: NamespaceId) -> Result<(), ChangeError> {
        (0..self.threads.len()).rev().try_for_each(|core| self.tell(core, |answer| Order::Detach(id, answer)))
    }

    fn tell(
        &self,
        core: usize,
        order: impl FnOnce(Sender<io::Result<()>>) -> Order,
    ) -> Result<(), ChangeError> {
        let answer: io::Result<()> = self.ask(core, order).ok_or(ChangeError::Stopping)?;
        answer.map_err(|error| ChangeError::Open(StartError::System(error)))
    }

    /// A core's answer to an order; `None` when the node stops before it comes.
    fn ask<T>(&self, core: usize, order: impl FnOnce(Sender<T>) -> Order) -> Option<T> {
        let (answer, answers) = channel();
        self.shared.order(core, order(answer));
        loop {
            match answers.recv_timeout(PATIENCE) {
                Ok(answer) => return Some(answer),
                Err(RecvTimeoutError::Timeout)
                    if !self.shared.stopping.load(Ordering::Acquire) && !self.threads[core].is_finished() => {
                }
                Err(_) => return None,
            }
        }
    }

    /// Whether a volume of keys takes no more writes since its device failed.
    pub fn is_read_only(&self) -> bool {
        let failed = |held: &Held| matches!(&held.contents, Contents::Keys(volume) if volume.is_read_only());
        lock(&self.held).values().any(failed)
    }

    /// What is measured of its cores and flows, and what is chosen by it; its settings can be changed.
    pub fn scheduling(&self) -> &Arc<Scheduling> {
        &self.shared.scheduling
    }

    /// Has others served where and when, from the end of the window that runs.
    ///
    /// # Errors
    /// What may not be; then nothing has changed.
    pub fn set_scheduling(&self, settings: octokv_sched::Settings) -> Result<(), octokv_sched::SettingError> {
        self.shared.scheduling.set(settings)?;
        self.shared.doorbells.iter().for_each(|doorbell| doorbell.ring());
        Ok(())
    }

    /// How each core is; fewer when the node is stopping.
    pub fn cores(&self) -> Vec<CoreReport> {
        (0..self.threads.len()).map_while(|core| self.ask(core, Order::Report)).collect()
    }

    fn end_threads(&mut self) -> bool {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.doorbells.iter().for_each(|doorbell| doorbell.ring());
        self.threads.drain(..).map(JoinHandle::join).fold(true, |all, one| all & one.is_ok())
    }

    /// Finishes what was begun, closes every connection, and closes the volumes in order.
    pub fn stop(mut self) -> Result<(), StopError> {
        if !self.end_threads() {
            return Err(StopError::CoreEnded);
        }
        let opening = self.settings.opening();
        let mut all = Ok(());
        for held in lock(&self.held).values() {
            if let Err(fault) = held.close(opening) {
                all = Err(StopError::Checkpoint(fault));
            }
        }
        all
    }
}

impl Drop for RunningNode {
    fn drop(&mut self) {
        self.end_threads();
    }
}
