//! A node on the kernel's sockets and devices: open the device, recover, listen, run, stop.
//!
//! ```text
//!   start: device ─▶ volume (format or recover) ─▶ a thread per core ─▶ core 0 listens ─▶ ready
//!   stop:  flag ─▶ cores finish what was begun ─▶ threads end ─▶ checkpoint, marked clean
//! ```
//! Invariants: nothing is written to a device that is not ours; a start that fails leaves no thread behind.

use crate::perform::Performer;
use crate::reactor::{Message, Parts, Turns, reactor};
use crate::settings::{DeviceSettings, NodeSettings};
use octokv_base::{Buffer, Lba, NamespaceId, Nanos, Pool};
use octokv_engine::hash::superblock::{NotOurs, SUPERBLOCK_STRIDE_BYTES, SUPERBLOCKS};
use octokv_engine::hash::{self, HashEngine, OpenError, OpenSettings, Report, Volume};
use octokv_engine::{Fault, Statistics};
use octokv_flash::{Device, DeviceError, FileDevice, Geometry, Memory, MemoryDevice};
use octokv_runtime::real::spawn_reactors;
use octokv_runtime::{
    Busy, Channel, DeviceDriver, Doorbell, Handle, Idle, Mailbox, Media, RealSockets, Sockets, block_on,
    device_queue, mesh,
};
use octokv_sys::file::{OpenError as FileError, open_device};
use octokv_sys::process::{raise_descriptor_limit, random_u64};
use octokv_sys::{clock, thread};
use octokv_target::{NamespaceInfo, Target};
use std::net::SocketAddr;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::{fmt, io};

/// Messages between two cores that may be on their way at a time.
const MAILBOX_MESSAGES: usize = 256;

/// How soon a core that could end looks again whether the others have finished their writing.
const LOOK_AGAIN: Nanos = Nanos::from_millis(1);

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

/// What is under the volume, opened once for the process.
#[derive(Clone)]
enum Store {
    Memory(Arc<Memory>),
    File(Media),
}

impl Store {
    /// Opens it, and says whether it is a file that was made for us and may be formatted: just now, or by a
    /// start that was killed before it had formatted it.
    fn open(settings: &DeviceSettings) -> Result<(Store, bool), StartError> {
        match settings {
            DeviceSettings::Memory { bytes, block_bytes } => {
                let memory = Memory::new(*bytes, *block_bytes).map_err(StartError::System)?;
                Ok((Store::Memory(memory), false))
            }
            DeviceSettings::File { path, create_bytes } => {
                let name = path.display().to_string();
                let file = open_device(path, *create_bytes, true)
                    .map_err(|error| StartError::Device { name, error })?;
                let new = file.created()
                    || (create_bytes.is_some()
                        && !file.is_block_device()
                        && !file.holds_data_from(FORMATTED_BYTES));
                Ok((Store::File(Media::file(file)), new))
            }
        }
    }

    fn name(&self) -> String {
        match self {
            Store::Memory(_) => "memory".to_owned(),
            Store::File(media) => media.name.to_string(),
        }
    }

    /// One core's view of the device.
    fn view(&self, channel: &Channel) -> io::Result<Rc<dyn Device>> {
        Ok(match self {
            Store::Memory(memory) => Rc::new(MemoryDevice::new(Arc::clone(memory))),
            Store::File(media) => {
                let blocks = media.size_bytes / u64::from(media.block_bytes);
                let geometry = Geometry { block_bytes: media.block_bytes, blocks, volatile: false };
                Rc::new(FileDevice::new(channel.clone(), channel.open(media)?, geometry, self.name()))
            }
        })
    }
}

/// A node that runs until it is stopped.
pub struct RunningNode {
    settings: NodeSettings,
    store: Store,
    volume: Arc<Volume>,
    target: Arc<Target>,
    addresses: Vec<SocketAddr>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// What the cores of a node share besides the volume and the target.
struct Shared {
    stopping: AtomicBool,
    doorbells: Vec<Arc<Doorbell>>,
    mailboxes: Vec<Mutex<Option<Mailbox<Message>>>>,
}

/// A channel for the calling thread alone.
fn own_channel(
    driver: DeviceDriver,
    depth: usize,
) -> Result<(Channel, Arc<Doorbell>, DeviceDriver), StartError> {
    let doorbell = Doorbell::new().map_err(StartError::System)?;
    let (queue, driver) = device_queue(driver, depth, &doorbell).map_err(StartError::System)?;
    Ok((Channel::new(queue, depth), doorbell, driver))
}

/// Runs a future of the calling thread's channel to its end.
fn finish<T>(channel: &Channel, future: impl Future<Output = T>) -> T {
    block_on(future, || {
        channel.poll();
    })
}

/// Opens the volume, after formatting the device where that is asked for or the file is `new`.
fn open_volume(settings: &NodeSettings, store: &Store, new: bool) -> Result<Arc<Volume>, StartError> {
    let (channel, ..) = own_channel(settings.driver, settings.device_depth)?;
    let device = store.view(&channel).map_err(StartError::System)?;
    let failed = |error| StartError::Volume { name: store.name(), error };
    let mut format = settings.format;
    format.seed = match settings.seed {
        Some(seed) => seed,
        None => random_u64().map_err(StartError::System)?,
    };
    let pool = Pool::new(64 << 20);
    let unwritten = new && finish(&channel, is_blank(&*device)).map_err(|error| failed(error.into()))?;
    if settings.reformat || unwritten {
        finish(&channel, hash::format(&*device, &format)).map_err(failed)?;
    }
    let open = OpenSettings { durability: settings.durability, cores: settings.cores.len() };
    finish(&channel, hash::open(&device, &pool, open, &format)).map_err(failed)
}

/// The part of a file that a format writes, in bytes.
const FORMATTED_BYTES: u64 = SUPERBLOCKS * SUPERBLOCK_STRIDE_BYTES;

/// Whether the part that a format writes is all zeros.
async fn is_blank(device: &dyn Device) -> Result<bool, DeviceError> {
    let bytes = FORMATTED_BYTES.min(device.geometry().bytes()) as usize;
    let buffer = device.read(Lba(0), Buffer::zeroed(bytes)).await.into_read()?;
    Ok(buffer.iter().all(|&byte| byte == 0))
}

/// The namespace that hosts see of a volume.
pub fn namespace_of(volume: &Volume, key_bytes_max: u16) -> NamespaceInfo {
    let mut nguid = [0; 16];
    nguid[..8].copy_from_slice(b"octokv\0\x01");
    nguid[8..].copy_from_slice(&volume.id().to_be_bytes());
    NamespaceInfo {
        id: NamespaceId(1),
        nguid,
        size_bytes: volume.capacity_bytes(),
        used_bytes: volume.used_bytes(),
        value_bytes_max: volume.value_bytes_max() as u32,
        key_bytes_max,
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

/// Starts a node. When this returns, it serves.
pub fn start(settings: NodeSettings) -> Result<RunningNode, StartError> {
    refuse_bad_settings(&settings)?;
    raise_descriptor_limit();
    let (store, new) = Store::open(&settings.device)?;
    let volume = open_volume(&settings, &store, new)?;
    let longest = volume.value_bytes_max();
    if settings.buffer_bytes < 4 * longest {
        let why =
            format!("the volume holds values of up to {longest} bytes: room for four of them is needed");
        return Err(StartError::Setting { name: "buffer_bytes", why });
    }
    let mut target = settings.target.clone();
    target.receive_bytes_max = target.receive_bytes_max.max(2 * longest);
    target.nqn.clone_from(&settings.nqn);
    target.connections_max = settings.connections_max;
    target.value_bytes_max = target.value_bytes_max.max(volume.value_bytes_max() as u32);
    let namespace = namespace_of(&volume, target.key_bytes_max);
    let target = Target::new(target, vec![namespace]);
    let doorbells: Result<Vec<_>, _> = settings.cores.iter().map(|_| Doorbell::new()).collect();
    let doorbells = doorbells.map_err(StartError::System)?;
    let mailboxes = mesh(&doorbells, MAILBOX_MESSAGES).into_iter().map(|one| Mutex::new(Some(one)));
    let shared =
        Arc::new(Shared { stopping: AtomicBool::new(false), mailboxes: mailboxes.collect(), doorbells });
    let (report, reports) = channel();
    let body = {
        let core = Core {
            settings: settings.clone(),
            store: store.clone(),
            volume: Arc::clone(&volume),
            target: Arc::clone(&target),
            shared: Arc::clone(&shared),
            report,
        };
        move |index| core.run(index)
    };
    let threads = spawn_reactors(&settings.cores, body);
    let threads = threads.map_err(|error| StartError::Core { core: settings.cores[0], error })?;
    let mut node = RunningNode { settings, store, volume, target, addresses: Vec::new(), shared, threads };
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

/// What a core's thread is given.
#[derive(Clone)]
struct Core {
    settings: NodeSettings,
    store: Store,
    volume: Arc<Volume>,
    target: Arc<Target>,
    shared: Arc<Shared>,
    report: Sender<Result<Vec<SocketAddr>, StartError>>,
}

/// A core that is ready to serve.
struct Prepared {
    parts: Parts<RealSockets, HashEngine>,
    idle: Idle,
    /// Where it listens.
    addresses: Vec<SocketAddr>,
}

impl Core {
    fn run(&self, index: usize) {
        match self.prepare(index) {
            Ok(Prepared { parts, idle, addresses }) => {
                // The starter waits for every core's word before anybody is served.
                let _ = self.report.send(Ok(addresses));
                self.serve(index, parts, idle);
            }
            Err(error) => drop(self.report.send(Err(error))),
        }
    }

    fn prepare(&self, index: usize) -> Result<Prepared, StartError> {
        let settings = &self.settings;
        let doorbell = Arc::clone(&self.shared.doorbells[index]);
        let (queue, driver) =
            device_queue(settings.driver, settings.device_depth, &doorbell).map_err(StartError::System)?;
        if index == 0 && settings.driver == DeviceDriver::Auto && driver == DeviceDriver::Threads {
            tracing::warn!("io_uring is not available here: devices run on worker threads");
        }
        let channel = Channel::new(queue, settings.device_depth);
        let device = self.store.view(&channel).map_err(StartError::System)?;
        let mut sockets = RealSockets::new().map_err(StartError::System)?;
        let mut listeners = Vec::new();
        if index == 0 {
            for &address in &settings.listen {
                let listening = sockets.listen(address);
                listeners.push(listening.map_err(|error| StartError::Listen { address, error })?);
            }
        }
        let idle =
            Idle::new(settings.polling, Arc::clone(&doorbell), &mut sockets, channel.wait_descriptor())
                .map_err(StartError::System)?;
        let handle = Handle::new(doorbell, channel, Busy::real());
        let pool = Pool::new(settings.buffer_bytes);
        let name = Rc::from(self.store.name());
        let engine = HashEngine::new(Arc::clone(&self.volume), index, Rc::clone(&device), pool.clone());
        let performer = Rc::new(Performer { engine, pool, handle: handle.clone(), device: name });
        if index == 0 {
            handle.spawn(keep_in_order(Rc::clone(&performer)));
        }
        let mailbox = self.shared.mailboxes[index].lock().unwrap_or_else(PoisonError::into_inner).take();
        let addresses = listeners.iter().map(|(_, address)| *address).collect();
        let parts = Parts {
            sockets,
            local_address: RealSockets::local_address,
            listeners,
            mailbox: mailbox.expect("each core starts once"),
            core: index,
            handle,
            target: Arc::clone(&self.target),
            performer,
            requests_max: settings.requests_max,
        };
        Ok(Prepared { parts, idle, addresses })
    }

    fn serve(&self, index: usize, parts: Parts<RealSockets, HashEngine>, mut idle: Idle) {
        let handle = parts.handle.clone();
        let mut reactor = reactor(parts);
        let mut stop_at = Nanos::NEVER;
        loop {
            let now = clock::now();
            let busy = reactor.turn(now);
            if self.shared.stopping.load(Ordering::Acquire) && stop_at == Nanos::NEVER {
                reactor.drain();
                stop_at = now + self.settings.stop_limit;
            }
            // Whatever hosts do, a batch or checkpoint that was begun is written to its end.
            let over = now >= stop_at || (stop_at != Nanos::NEVER && reactor.is_drained());
            if over && self.volume.is_idle() {
                break;
            }
            let deadline = if over { now + LOOK_AGAIN } else { handle.next_deadline().min(stop_at) };
            idle.rest(busy, clock::now(), deadline, reactor.sockets());
        }
        tracing::debug!(core = index, "reactor stopped");
        handle.shutdown();
    }
}

async fn keep_in_order(performer: Rc<Performer<HashEngine>>) {
    let device = Rc::clone(&performer.device);
    let report =
        |fault: Fault| tracing::error!(device = &*device, %fault, "keeping the volume in order failed");
    performer.engine.maintain(&performer.handle, report).await;
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

    /// The engine's figures.
    pub fn statistics(&self) -> Statistics {
        self.volume.statistics()
    }

    /// The protocol's figures.
    pub fn target(&self) -> &Arc<Target> {
        &self.target
    }

    fn end_threads(&mut self) -> bool {
        self.shared.stopping.store(true, Ordering::Release);
        self.shared.doorbells.iter().for_each(|doorbell| doorbell.ring());
        self.threads.drain(..).map(JoinHandle::join).fold(true, |all, one| all & one.is_ok())
    }

    /// Finishes what was begun, closes every connection, and closes the volume in order.
    pub fn stop(mut self) -> Result<(), StopError> {
        if !self.end_threads() {
            return Err(StopError::CoreEnded);
        }
        let close = || -> Result<(), Fault> {
            let no_queue = |_| Fault::ReadOnly;
            let (channel, ..) =
                own_channel(self.settings.driver, self.settings.device_depth).map_err(no_queue)?;
            let device = self.store.view(&channel).map_err(|_| Fault::ReadOnly)?;
            let engine = HashEngine::new(Arc::clone(&self.volume), 0, device, Pool::new(1 << 20));
            finish(&channel, engine.checkpoint(true))
        };
        close().map_err(StopError::Checkpoint)
    }
}

impl Drop for RunningNode {
    fn drop(&mut self) {
        self.end_threads();
    }
}

/// Reads and verifies everything on a device; changes nothing. `progress` is told how many of how many
/// keys are done.
pub fn check_device(path: &Path, progress: impl FnMut(u64, u64)) -> Result<Report, StartError> {
    let settings = DeviceSettings::File { path: path.to_owned(), create_bytes: None };
    let (store, _) = Store::open(&settings)?;
    let (channel, ..) = own_channel(DeviceDriver::Auto, 64)?;
    let device = store.view(&channel).map_err(StartError::System)?;
    let pool = Pool::new(64 << 20);
    let failed = |error| StartError::Volume { name: store.name(), error };
    finish(&channel, hash::check(&*device, &pool, progress)).map_err(failed)
}
