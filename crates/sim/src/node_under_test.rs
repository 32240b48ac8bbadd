//! The node under test: the production reactors, target and engine on a virtual host with one disk.
//!
//! ```text
//!   Off ──boot──▶ Recovering ──opened, audited──▶ Up
//!    ▲                │ stop                       │ stop
//!    └────────────────┴────────────────────────────┘
//! ```
//! In: a plan of the node, when to start and to stop it. Out: audits (what every key holds, read past all
//! clients), a check of the disk, and what is in use. It composes what [`octokv_node::start`] composes,
//! with the virtual driver in place of the kernel's.

use crate::faulty_disk::{DiskFaults, FaultyDisk};
use crate::scenario::NodePlan;
use octokv_base::{Key, NamespaceId, Pool};
use octokv_device::{Device, FileDevice, Geometry};
use octokv_engine::hash::superblock::{self, SUPERBLOCK_BYTES, SUPERBLOCK_STRIDE_BYTES, Superblock};
use octokv_engine::hash::{self, FormatSettings, HashEngine, OpenError, OpenSettings, Report, Volume};
use octokv_engine::{Engine, Fault};
use octokv_node::fair_yield::Pace;
use octokv_node::kv_backend::Performer;
use octokv_node::monitor::Scheduling;
use octokv_node::namespace_table::{Store, Stores};
use octokv_node::{Parts, Turns, namespace_of, reactor};
use octokv_nvmf::{Target, TargetSettings};
use octokv_runtime::simulated::{DiskId, HostId, Stop, VirtualSockets, VirtualWorld};
use octokv_runtime::{Busy, Channel, Doorbell, Handle, Mailbox, Sockets, mesh};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

const PORT: u16 = 4420;
const MAILBOX_MESSAGES: usize = 4;
const NQN: &str = "nqn.2026-11.io.octokv:node";

/// What an audit read of a key: the front and length of its value, or where its record is damaged.
pub enum Audited {
    /// No such key.
    Missing,
    /// Its value.
    Value(Vec<u8>),
    /// Damage in the record that begins at this block.
    Damaged(u64),
    /// Something else went wrong.
    Failed(Fault),
}

/// A result that a task will leave.
pub type Later<T> = Rc<RefCell<Option<T>>>;

/// What opening gave.
pub type Opened = Result<(Arc<Volume>, Vec<Audited>), OpenError>;

/// One core, for those who look at it from outside.
struct Core {
    handle: Handle,
    channel: Channel,
    performer: Rc<Performer<HashEngine>>,
    connections: Rc<Cell<usize>>,
    is_idle: Rc<Cell<bool>>,
}

struct Up {
    volume: Arc<Volume>,
    cores: Vec<Core>,
}

/// The node's host.
pub struct Machine {
    world: VirtualWorld,
    /// Its host.
    pub host: HostId,
    disk: DiskId,
    plan: NodePlan,
    faults: DiskFaults,
    /// Whether cores look after each turn whether they are idle; costs time.
    watched: Rc<Cell<bool>>,
    /// The monitors of all its starts.
    monitors: Vec<Arc<Scheduling>>,
    up: Option<Up>,
}

impl Machine {
    /// A machine with an empty disk, off.
    pub fn new(world: &VirtualWorld, plan: NodePlan, faults: DiskFaults) -> Machine {
        let host = world.add_host();
        let disk = world.add_disk(host, plan.disk);
        let watched = Rc::new(Cell::new(false));
        Machine { world: world.clone(), host, disk, plan, faults, watched, monitors: Vec::new(), up: None }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.world.address(self.host), PORT)
    }

    /// How its disk is formatted.
    fn format(&self) -> FormatSettings {
        FormatSettings {
            unit_bytes: self.plan.unit_bytes,
            hash: self.plan.hash,
            partitions_log2: self.plan.partitions_log2,
            value_bytes_max: self.plan.value_bytes_max,
            namespace: 1,
            seed: 7,
        }
    }

    fn channel(&self) -> Channel {
        Channel::new(Box::new(self.world.queue(self.host)), self.plan.device_depth)
    }

    fn device(&self, handle: &Handle) -> Rc<dyn Device> {
        let media = self.world.media(self.disk);
        let blocks = media.size_bytes / u64::from(media.block_bytes);
        let geometry = Geometry { block_bytes: media.block_bytes, blocks, volatile: false };
        let channel = handle.channel();
        let file = channel.open(&media).expect("a virtual disk opens on a virtual queue");
        let device = FileDevice::new(channel, file, geometry, media.name.to_string());
        Rc::new(FaultyDisk::new(Rc::new(device), self.faults.clone(), handle.clone()))
    }

    /// A reactor that runs one task, whose result is left for the caller.
    fn run<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Rc<dyn Device>) -> F,
    ) -> Later<T> {
        let handle = Handle::new(Doorbell::silent(), self.channel(), Busy::virtual_time());
        let later: Later<T> = Rc::default();
        let (future, result) = (task(self.device(&handle)), Rc::clone(&later));
        handle.spawn(async move {
            let value = future.await;
            *result.borrow_mut() = Some(value);
        });
        let (own, channel) = (handle.clone(), handle.channel());
        self.world.add_reactor(self.host, handle, move |now| {
            let fired = own.begin_turn(now);
            let before = own.run_background();
            let answers = channel.poll();
            fired + before + answers + own.run_background() > 0
        });
        later
    }

    /// Begins to open the disk, formatting it first where asked to, and to read every key.
    pub fn boot(&self, keys: Vec<Key>, first: bool) -> Later<Opened> {
        self.world.start_host(self.host);
        let (format, plan) = (self.format(), self.plan);
        self.run(move |device| async move {
            if first {
                hash::format(&*device, &format).await?;
            }
            let pool = Pool::new(plan.pool_bytes);
            let settings = OpenSettings { durability: plan.durability, cores: plan.cores };
            let volume = hash::open(&device, &pool, settings, &format).await?;
            let engine = HashEngine::new(Arc::clone(&volume), 0, device, pool);
            let audited = audit(&engine, &keys).await;
            Ok((volume, audited))
        })
    }

    /// Starts the reactors on an open volume: from now on it serves.
    pub fn serve(&mut self, volume: Arc<Volume>) {
        // What recovered has nothing more to do.
        self.remove_reactors();
        let plan = &self.plan;
        let settings = TargetSettings {
            queue_depth: plan.queue_depth,
            in_capsule_bytes: plan.in_capsule_bytes,
            max_h2c_data: plan.max_h2c_data,
            value_bytes_max: plan.value_bytes_max,
            receive_bytes_max: plan.receive_bytes_max,
            outbox_bytes_max: plan.outbox_bytes_max,
            ..TargetSettings::new(NQN)
        };
        let namespace = namespace_of(&volume, settings.key_bytes_max);
        let target = Target::new(settings, vec![namespace]);
        target.set_listeners(vec![self.address()]);
        let scheduling = plan.scheduling.start(self.monitors.len(), plan.cores);
        self.monitors.push(Arc::clone(&scheduling));
        let doorbells: Vec<_> = (0..plan.cores).map(|_| Doorbell::silent()).collect();
        let mailboxes = mesh(&doorbells, MAILBOX_MESSAGES);
        let cores = mailboxes.into_iter().zip(&doorbells).enumerate();
        let cores = cores.map(|(index, (mailbox, doorbell))| {
            self.start_core(index, mailbox, Arc::clone(doorbell), &volume, &target, &scheduling)
        });
        let cores = cores.collect();
        self.up = Some(Up { volume, cores });
    }

    fn start_core(
        &self,
        index: usize,
        mailbox: Mailbox<octokv_node::Message>,
        doorbell: Arc<Doorbell>,
        volume: &Arc<Volume>,
        target: &Arc<Target>,
        scheduling: &Arc<Scheduling>,
    ) -> Core {
        let channel = self.channel();
        let handle = Handle::new(doorbell, channel.clone(), Busy::virtual_time());
        let device = self.device(&handle);
        let pool = Pool::new(self.plan.pool_bytes);
        let engine = HashEngine::new(Arc::clone(volume), index, device, pool.clone());
        let (own, device) = (pool.clone(), Rc::from("virtual disk"));
        let listings = Pace::default();
        let performer = Rc::new(Performer { engine, pool: own, handle: handle.clone(), device, listings });
        let stores = Rc::new(Stores::default());
        stores.insert(NamespaceId(1), Store::Keys(Rc::clone(&performer)));
        let mut sockets = self.world.sockets(self.host);
        let mut listeners = Vec::new();
        if index == 0 {
            listeners.push(sockets.listen(self.address()).expect("nobody else is on this host"));
            let (performer, own) = (Rc::clone(&performer), handle.clone());
            handle.spawn(async move { performer.engine.maintain(&own, |_| ()).await });
        }
        let mut turns = reactor(Parts {
            sockets,
            local_address: |_: &VirtualSockets, _| None,
            listeners,
            mailbox,
            core: index,
            handle: handle.clone(),
            target: Arc::clone(target),
            stores,
            pool,
            requests_max: self.plan.requests_max,
            scheduling: Arc::clone(scheduling),
            costs: self.plan.scheduling.costs,
        });
        let (connections, is_idle) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(true)));
        let (count, idle, watched) = (Rc::clone(&connections), Rc::clone(&is_idle), Rc::clone(&self.watched));
        let (scheduling_plan, monitor) = (self.plan.scheduling, Arc::clone(scheduling));
        let (start, mut chosen) = (self.monitors.len() - 1, 0);
        self.world.add_reactor(self.host, handle.clone(), move |now| {
            if index == 0 {
                scheduling_plan.operate(&monitor, start, &mut chosen);
            }
            let busy = turns.turn(now);
            if watched.get() {
                count.set(turns.connections());
                idle.set(turns.is_drained());
            }
            busy
        });
        Core { handle, channel, performer, connections, is_idle }
    }

    /// Ends it. What tasks left undone is left undone.
    pub fn stop(&mut self, stop: Stop) {
        self.up = None;
        self.faults.clear();
        self.world.stop_host(self.host, stop);
    }

    fn remove_reactors(&self) {
        // A host that is stopped and started at once: its disk has nothing in flight.
        self.world.stop_host(self.host, Stop::Killed);
        self.world.start_host(self.host);
    }

    /// Requests that ran on another core than that of their connection, and those that waited for their turn among
    /// tenants, in all its lives.
    pub fn moved_and_held(&self) -> (u64, u64) {
        self.monitors
            .iter()
            .map(|monitor| monitor.moved_and_held())
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Whether cores tell what they do; they know it only after their next turn.
    pub fn watch(&self, on: bool) {
        self.watched.set(on);
        if let Some(up) = &self.up {
            for core in &up.cores {
                core.is_idle.set(false);
                core.handle.doorbell().ring();
            }
        }
    }

    /// Whether no connection, request or device operation is left.
    pub fn is_at_rest(&self) -> bool {
        let rests =
            |core: &Core| core.is_idle.get() && core.connections.get() == 0 && core.channel.in_flight() == 0;
        self.up.as_ref().is_none_or(|up| up.cores.iter().all(rests))
    }

    /// What is in use although nothing should be, or `None`.
    pub fn leak(&self) -> Option<String> {
        let up = self.up.as_ref()?;
        for (index, core) in up.cores.iter().enumerate() {
            let (links, bytes) = (core.connections.get(), core.performer.pool.out_bytes());
            let flying = core.channel.in_flight();
            if links + bytes + flying > 0 {
                return Some(format!(
                    "core {index} keeps {links} connections, {bytes} B of buffers, {flying} device operations"
                ));
            }
        }
        None
    }

    /// The volume, while it is up.
    pub fn volume(&self) -> Option<&Arc<Volume>> {
        self.up.as_ref().map(|up| &up.volume)
    }

    /// Reads every key on the first core.
    pub fn audit(&self, keys: Vec<Key>) -> Later<Vec<Audited>> {
        self.on_first_core(|performer| async move { audit(&performer.engine, &keys).await })
    }

    /// Closes the volume in order; it takes no more writes.
    pub fn close(&self) -> Later<Result<(), Fault>> {
        self.on_first_core(|performer| async move { performer.engine.checkpoint(true).await })
    }

    fn on_first_core<T: 'static, F: Future<Output = T> + 'static>(
        &self,
        task: impl FnOnce(Rc<Performer<HashEngine>>) -> F,
    ) -> Later<T> {
        let later: Later<T> = Rc::default();
        if let Some(up) = &self.up {
            let core = &up.cores[0];
            let (future, result) = (task(Rc::clone(&core.performer)), Rc::clone(&later));
            core.handle.spawn(async move {
                let value = future.await;
                *result.borrow_mut() = Some(value);
            });
        }
        later
    }

    /// Reads and verifies the whole disk of the stopped node.
    pub fn check(&self) -> Later<Result<Report, OpenError>> {
        self.world.start_host(self.host);
        let pool = Pool::new(self.plan.pool_bytes);
        self.run(move |device| async move { hash::check(&*device, &pool, |_, _| ()).await })
    }

    /// The superblock that the disk holds now.
    pub fn superblock(&self) -> Option<Superblock> {
        let mut newest: Option<Superblock> = None;
        for place in 0..superblock::SUPERBLOCKS {
            let mut bytes = [0; SUPERBLOCK_BYTES];
            self.world.read_disk(self.disk, place * SUPERBLOCK_STRIDE_BYTES, &mut bytes);
            let Ok(found) = superblock::Unchecked(&bytes).check() else { continue };
            if newest.is_none_or(|newest| found.generation > newest.generation) {
                newest = Some(found);
            }
        }
        newest
    }

    /// Flips a bit of the disk. Gives false where there were only zeros, and flips nothing.
    pub fn rot(&self, at_byte: u64, bit: u8) -> bool {
        let sector = at_byte / 512 * 512;
        let mut bytes = [0; 512];
        self.world.read_disk(self.disk, sector, &mut bytes);
        if bytes.iter().all(|&byte| byte == 0) {
            return false;
        }
        bytes[(at_byte % 512) as usize] ^= 1 << (bit % 8);
        self.world.write_disk(self.disk, sector, &bytes);
        true
    }

    /// Whether the record that begins at a block holds a byte of the disk, by its own length or at least
    /// by its first unit.
    pub fn record_holds(&self, lba: u64, at_byte: u64) -> bool {
        let start = lba * u64::from(self.plan.disk.block_bytes);
        let longest = u64::from(self.plan.value_bytes_max) + 8192;
        (start..start + longest).contains(&at_byte)
    }
}

/// Reads every key, one after another.
pub(crate) async fn audit(engine: &HashEngine, keys: &[Key]) -> Vec<Audited> {
    let mut found = Vec::with_capacity(keys.len());
    for key in keys {
        found.push(match engine.get(key).await {
            Ok(None) => Audited::Missing,
            Ok(Some(value)) => Audited::Value(value.as_bytes().to_vec()),
            Err(Fault::Corrupt { lba }) => Audited::Damaged(lba),
            Err(fault) => Audited::Failed(fault),
        });
    }
    found
}

/// A handle for a reactor without devices.
pub fn handle_without_devices(world: &VirtualWorld, host: HostId) -> Handle {
    let channel = Channel::new(Box::new(world.queue(host)), 1);
    Handle::new(Doorbell::silent(), channel, Busy::virtual_time())
}
