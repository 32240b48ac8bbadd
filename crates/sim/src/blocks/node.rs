//! The node under test: the production reactors, target and block store on a virtual host with several disks,
//! whose namespaces come and go while it runs.
//!
//! ```text
//!   Off ──boot──▶ Up ──attach, detach (as the real node orders its cores)──▶ Up ──stop──▶ Off
//! ```
//! In: when to start and stop it, which disk to serve as which namespace. Out: what is in use.

use super::scenario::{BlocksPlan, DiskPlan};
use crate::faulty_disk::{DiskFaults, FaultyDisk};
use octokv_base::{NamespaceId, Pool};
use octokv_device::{Device, FileDevice, Geometry};
use octokv_engine::hash::HashEngine;
use octokv_node::block_backend::{BlockVolume, Blocks};
use octokv_node::monitor::Scheduling;
use octokv_node::namespace_table::{Store, Stores};
use octokv_node::{Message, Parts, Turns, reactor};
use octokv_nvmf::{NamespaceInfo, NamespaceKind, Target, TargetSettings};
use octokv_runtime::simulated::{DiskId, HostId, Stop, VirtualSockets, VirtualWorld};
use octokv_runtime::{Busy, Channel, Doorbell, Handle, Mailbox, Sockets, mesh};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

const PORT: u16 = 4420;
const MAILBOX_MESSAGES: usize = 4;
const NQN: &str = "nqn.2026-11.io.octokv:node";

type Arriving = Rc<RefCell<Vec<(NamespaceId, Store<HashEngine>)>>>;

struct Core {
    handle: Handle,
    channel: Channel,
    pool: Pool,
    stores: Rc<Stores<HashEngine>>,
    /// Those that it takes in before its next turn.
    arriving: Arriving,
    connections: Rc<Cell<usize>>,
    requests: Rc<Cell<usize>>,
    is_idle: Rc<Cell<bool>>,
}

struct Up {
    target: Arc<Target>,
    cores: Vec<Core>,
}

/// The stores of a namespace that was removed, until nobody uses them.
pub struct Leaving(Vec<Rc<Store<HashEngine>>>);

impl Leaving {
    /// Whether the last request on it has ended.
    pub fn is_over(&self) -> bool {
        self.0.iter().all(|store| Rc::strong_count(store) == 1)
    }
}

/// The node's host.
pub struct Node {
    world: VirtualWorld,
    /// Its host.
    pub host: HostId,
    disks: Vec<DiskId>,
    plan: BlocksPlan,
    faults: DiskFaults,
    /// Whether cores look after each turn whether they are idle; costs time.
    watched: Rc<Cell<bool>>,
    /// The monitors of all its starts.
    monitors: Vec<Arc<Scheduling>>,
    up: Option<Up>,
}

impl Node {
    /// A node with empty disks, off.
    pub fn new(world: &VirtualWorld, plan: &BlocksPlan, faults: DiskFaults) -> Node {
        let host = world.add_host();
        let disks = plan.disks.iter().map(|disk| world.add_disk(host, disk.disk)).collect();
        let (world, plan) = (world.clone(), plan.clone());
        Node { world, host, disks, plan, faults, watched: Rc::default(), monitors: Vec::new(), up: None }
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.world.address(self.host), PORT)
    }

    /// All that a disk holds now.
    pub fn contents(&self, disk: usize) -> Vec<u8> {
        let mut bytes = vec![0; self.plan.disks[disk].disk.size_bytes as usize];
        self.world.read_disk(self.disks[disk], 0, &mut bytes);
        bytes
    }

    /// Starts it: it serves no namespace yet.
    pub fn boot(&mut self) {
        self.world.start_host(self.host);
        let plan = &self.plan.node;
        let settings = TargetSettings {
            queue_depth: plan.queue_depth,
            in_capsule_bytes: plan.in_capsule_bytes,
            max_h2c_data: plan.max_h2c_data,
            value_bytes_max: plan.value_bytes_max,
            receive_bytes_max: plan.receive_bytes_max,
            outbox_bytes_max: plan.outbox_bytes_max,
            ..TargetSettings::new(NQN)
        };
        let target = Target::new(settings, Vec::new());
        target.set_listeners(vec![self.address()]);
        let scheduling = plan.scheduling.start(self.monitors.len(), plan.cores);
        self.monitors.push(Arc::clone(&scheduling));
        let doorbells: Vec<_> = (0..plan.cores).map(|_| Doorbell::silent()).collect();
        let mailboxes = mesh(&doorbells, MAILBOX_MESSAGES);
        let cores = mailboxes.into_iter().zip(&doorbells).enumerate();
        let start = |(index, (mailbox, doorbell)): (usize, (Mailbox<Message>, &Arc<Doorbell>))| {
            self.start_core(index, mailbox, Arc::clone(doorbell), &target, &scheduling)
        };
        let cores = cores.map(start).collect();
        self.up = Some(Up { target, cores });
    }

    fn start_core(
        &self,
        index: usize,
        mailbox: Mailbox<Message>,
        doorbell: Arc<Doorbell>,
        target: &Arc<Target>,
        scheduling: &Arc<Scheduling>,
    ) -> Core {
        let channel = Channel::new(Box::new(self.world.queue(self.host)), self.plan.node.device_depth);
        let handle = Handle::new(doorbell, channel.clone(), Busy::virtual_time());
        let pool = Pool::new(self.plan.node.pool_bytes);
        let stores: Rc<Stores<HashEngine>> = Rc::default();
        let mut sockets = self.world.sockets(self.host);
        let mut listeners = Vec::new();
        if index == 0 {
            listeners.push(sockets.listen(self.address()).expect("nobody else is on this host"));
        }
        let mut turns = reactor(Parts {
            sockets,
            local_address: |_: &VirtualSockets, _| None,
            listeners,
            mailbox,
            core: index,
            handle: handle.clone(),
            target: Arc::clone(target),
            stores: Rc::clone(&stores),
            pool: pool.clone(),
            requests_max: self.plan.node.requests_max,
            scheduling: Arc::clone(scheduling),
            costs: self.plan.node.scheduling.costs,
        });
        let (connections, requests, is_idle) = (Rc::default(), Rc::default(), Rc::new(Cell::new(true)));
        let arriving = Arriving::default();
        let (newcomers, served) = (Rc::clone(&arriving), Rc::clone(&stores));
        let core =
            Core { handle: handle.clone(), channel, pool, stores, arriving, connections, requests, is_idle };
        let (count, begun, idle) =
            (Rc::clone(&core.connections), Rc::clone(&core.requests), Rc::clone(&core.is_idle));
        let watched = Rc::clone(&self.watched);
        let (scheduling_plan, monitor) = (self.plan.node.scheduling, Arc::clone(scheduling));
        let (start, mut chosen) = (self.monitors.len() - 1, 0);
        self.world.add_reactor(self.host, handle, move |now| {
            if !newcomers.borrow().is_empty() {
                turns.refuse_absent(now);
                newcomers.borrow_mut().drain(..).for_each(|(id, store)| served.insert(id, store));
            }
            if index == 0 {
                scheduling_plan.operate(&monitor, start, &mut chosen);
            }
            let busy = turns.turn(now);
            if watched.get() {
                count.set(turns.connections());
                begun.set(turns.requests());
                idle.set(turns.is_drained());
            }
            busy
        });
        core
    }

    /// How many cores it has.
    pub fn cores(&self) -> usize {
        self.plan.node.cores
    }

    /// The target, while it is up.
    pub fn target(&self) -> Option<&Arc<Target>> {
        self.up.as_ref().map(|up| &up.target)
    }

    /// What the cores of a disk's namespace share, for one time that it is served.
    pub fn volume(&self, disk: usize) -> Arc<BlockVolume> {
        let DiskPlan { disk, block_bytes, .. } = self.plan.disks[disk];
        BlockVolume::new(block_bytes, disk.size_bytes)
    }

    /// Gives one core its store of a namespace.
    pub fn attach(&self, core: usize, disk: usize, id: NamespaceId, volume: &Arc<BlockVolume>) {
        let Some(up) = &self.up else { return };
        let core = &up.cores[core];
        let (pool, handle) = (core.pool.clone(), core.handle.clone());
        let (volume, device, name) = (Arc::clone(volume), self.device(core, disk), Rc::from("virtual disk"));
        let store = Store::Blocks(Blocks { volume, device, pool, handle, name });
        core.arriving.borrow_mut().push((id, store));
        core.handle.doorbell().ring();
    }

    /// Shows a namespace to hosts.
    pub fn show(&self, disk: usize, id: NamespaceId, ana_group: u32) {
        let Some(up) = &self.up else { return };
        let DiskPlan { disk: settings, block_bytes, .. } = self.plan.disks[disk];
        let added = up.target.add_namespace(NamespaceInfo {
            id,
            nguid: [1 + disk as u8; 16],
            size_bytes: settings.size_bytes / u64::from(block_bytes) * u64::from(block_bytes),
            used_bytes: Arc::default(),
            kind: NamespaceKind::Block { block_bytes },
            ana_group,
        });
        assert!(added.is_ok(), "the operator adds a namespace once");
    }

    /// Takes a namespace from one core.
    pub fn detach(&self, core: usize, id: NamespaceId, leaving: &mut Leaving) {
        let Some(up) = &self.up else { return };
        up.cores[core].arriving.borrow_mut().retain(|(newcomer, _)| *newcomer != id);
        leaving.0.extend(up.cores[core].stores.remove(id));
    }

    /// Nothing that leaves yet.
    pub fn leaving() -> Leaving {
        Leaving(Vec::new())
    }

    fn device(&self, core: &Core, disk: usize) -> Rc<dyn Device> {
        let media = self.world.media(self.disks[disk]);
        let blocks = media.size_bytes / u64::from(media.block_bytes);
        let geometry = Geometry { block_bytes: media.block_bytes, blocks, volatile: false };
        let file = core.channel.open(&media).expect("a virtual disk opens on a virtual queue");
        let device = FileDevice::new(core.channel.clone(), file, geometry, media.name.to_string());
        Rc::new(FaultyDisk::new(Rc::new(device), self.faults.clone(), core.handle.clone()))
    }

    /// Ends it. What tasks left undone is left undone.
    pub fn stop(&mut self, stop: Stop) {
        self.up = None;
        self.faults.clear();
        self.world.stop_host(self.host, stop);
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
        for core in self.up.iter().flat_map(|up| &up.cores) {
            core.is_idle.set(false);
            core.handle.doorbell().ring();
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
            let (links, requests) = (core.connections.get(), core.requests.get());
            let (bytes, flying) = (core.pool.out_bytes(), core.channel.in_flight());
            if links + requests + bytes + flying > 0 {
                return Some(format!(
                    "core {index} keeps {links} connections, {requests} requests, {bytes} B of buffers, \
                     {flying} device operations"
                ));
            }
        }
        let (connections, controllers) = (up.target.connections(), up.target.controllers().len());
        (connections + controllers > 0)
            .then(|| format!("the target keeps {connections} connections, {controllers} controllers"))
    }
}
