//! One node and one client in a world of their own, run for a time or for a number of requests.
//!
//! ```text
//!   new: format, open ─▶ six cores ─▶ one session of six queues ─▶ which core has which? ─▶ (gets: keys are stored)
//!   run_for, run_requests: Figures                     set: another policy, from the next window on
//! ```
//! In: a [`Trial`]. Out: [`Figures`] of each run, or what went wrong. Cores are told in the order of the connections,
//! whatever core of the node each came to.
//!
//! Invariants: after [`Bench::run_requests`] nothing is outstanding, so every stage has had every request.

use super::device::{Flash, FlashDevice};
use super::figures::Figures;
use super::load::{Client, Load, Placement};
use super::parameters::{CORES, KEYS_READ, Operation, drive, wire};
use super::sockets::LateSockets;
use crate::machine::Later;
use octokv_base::{NamespaceId, Nanos, Pool, Random};
use octokv_client::{Session, Settings as ClientSettings};
use octokv_engine::Durability;
use octokv_engine::hash::{self, FormatSettings, HashEngine, OpenSettings, Volume};
use octokv_flash::nand::Model;
use octokv_node::board::Seen;
use octokv_node::pace::Pace;
use octokv_node::perform::Performer;
use octokv_node::scheduling::Scheduling;
use octokv_node::stores::{Store, Stores};
use octokv_node::{Costs, Message, Parts, Turns, namespace_of, reactor};
use octokv_runtime::virtual_world::{HostId, Stop, VirtualWorld, WorldSettings};
use octokv_runtime::{Busy, Carrier, Channel, Doorbell, Handle, Mailbox, Sockets, carried_mesh};
use octokv_sched::Settings;
use octokv_target::{Target, TargetSettings};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

const PORT: u16 = 4420;
const NQN: &str = "nqn.2026-11.io.octokv:node";
const DEVICE_BYTES: u64 = 16 << 30;
const POOL_BYTES: usize = 64 << 20;
const MAILBOX_MESSAGES: usize = 256;
/// A turn that charges nothing takes this.
const TURN: Nanos = Nanos(100);
/// Nothing here takes so long.
const LIMIT: Nanos = Nanos::from_secs(120);

/// What is tried.
#[derive(Clone, Debug)]
pub struct Trial {
    /// Everything that is drawn is drawn from it.
    pub seed: u64,
    /// What a request costs a core.
    pub costs: Costs,
    /// Put or get.
    pub operation: Operation,
    /// Threads of the client.
    pub threads: usize,
    /// Which connection a request goes over.
    pub placement: Placement,
    /// Who runs what where.
    pub scheduling: Settings,
    /// Whether the engine keeps its journal. The paper's says nothing of one; ours loses all without.
    pub journal: bool,
}

/// A world in which it is.
pub struct Bench {
    world: VirtualWorld,
    node: HostId,
    client: HostId,
    scheduling: Arc<Scheduling>,
    load: Rc<RefCell<Load>>,
    /// By connection: its core.
    core_of: Vec<usize>,
    journal: bool,
}

impl Bench {
    /// Everything up to the first operation that counts.
    ///
    /// # Errors
    /// What went wrong.
    pub fn new(trial: &Trial) -> Result<Bench, String> {
        let world = VirtualWorld::new(WorldSettings { turn_cost: TURN, ..WorldSettings::new(trial.seed) });
        let (node, client) = (world.add_host(), world.add_host());
        world.set_link(client, node, wire(false));
        let scheduling = Scheduling::new(CORES, trial.scheduling.clone(), || Nanos::ZERO);
        let scheduling = Arc::new(scheduling.map_err(|error| error.to_string())?);
        let load = Load::new(CORES);
        let (core_of, journal) = ((0..CORES).collect(), trial.journal);
        let mut bench = Bench { world, node, client, scheduling, load, core_of, journal };
        let flash = Flash::new(Model::new(drive(), 4096));
        let volume = bench.open(&flash)?;
        bench.serve(&flash, &volume, trial.costs);
        bench.connect(trial.seed)?;
        bench.find_cores()?;
        // Only now: connections that overtake each other would come to other cores.
        bench.world.set_link(client, node, wire(true));
        if trial.operation == Operation::Get {
            bench.set_load(Operation::Put, CORES, Placement::InOrder(1));
            let missing = KEYS_READ - bench.load.borrow().stored;
            bench.run_requests(u64::from(missing))?;
        }
        bench.set_load(trial.operation, trial.threads, trial.placement.clone());
        Ok(bench)
    }

    /// Another policy, from the end of the window that runs on.
    pub fn set_policy(&self, settings: Settings) -> Result<(), String> {
        self.scheduling.set(settings).map_err(|error| error.to_string())
    }

    /// Runs for so long; operations go on.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run_for(&self, span: Nanos) -> Result<Figures, String> {
        self.load.borrow_mut().allowed = u64::MAX;
        let (began, before) = self.begin();
        self.world.run_until(began + span);
        self.end(began, &before)
    }

    /// Runs so many operations, to the last answer.
    ///
    /// # Errors
    /// What went wrong.
    pub fn run_requests(&self, requests: u64) -> Result<Figures, String> {
        self.drain()?;
        let (began, before) = self.begin();
        {
            let mut load = self.load.borrow_mut();
            load.allowed = load.asked + requests;
        }
        self.drain_to(|load| load.asked >= load.allowed)?;
        self.end(began, &before)
    }

    /// Waits until nothing is outstanding.
    fn drain(&self) -> Result<(), String> {
        {
            let mut load = self.load.borrow_mut();
            load.allowed = load.asked;
        }
        self.drain_to(|_| true)
    }

    fn drain_to(&self, also: impl Fn(&Load) -> bool) -> Result<(), String> {
        let ended = || {
            let load = self.load.borrow();
            load.failure.is_some() || (also(&load) && load.answered == load.asked)
        };
        let is_over = self.world.run_while_not(self.world.now() + LIMIT, ended);
        self.failure()?;
        if is_over { Ok(()) } else { Err("operations were not answered".to_owned()) }
    }

    fn begin(&self) -> (Nanos, Vec<Seen>) {
        let now = self.world.now();
        self.load.borrow_mut().take_counted(now);
        (now, self.seen())
    }

    fn end(&self, began: Nanos, before: &[Seen]) -> Result<Figures, String> {
        self.failure()?;
        let now = self.world.now();
        let counted = self.load.borrow_mut().take_counted(now);
        Ok(Figures::new(now.since(began), before, &self.seen(), counted))
    }

    fn failure(&self) -> Result<(), String> {
        self.load.borrow().failure.clone().map_or(Ok(()), Err)
    }

    /// What cores have done, in the order of the connections.
    fn seen(&self) -> Vec<Seen> {
        self.core_of.iter().map(|&core| self.scheduling.boards()[core].seen()).collect()
    }

    fn set_load(&self, operation: Operation, threads: usize, placement: Placement) {
        let mut load = self.load.borrow_mut();
        (load.operation, load.threads, load.placement) = (operation, threads, placement);
    }

    /// Formats the drive and opens the volume, on a reactor of its own.
    fn open(&self, flash: &Rc<RefCell<Flash>>) -> Result<Arc<Volume>, String> {
        let handle = self.handle();
        let device = self.device(flash, &handle);
        let opened: Later<Result<Arc<Volume>, String>> = Rc::default();
        let result = Rc::clone(&opened);
        handle.spawn(async move {
            let format = FormatSettings { seed: 7, ..FormatSettings::default() };
            let pool = Pool::new(POOL_BYTES);
            let settings = OpenSettings { durability: Durability::Device, cores: CORES };
            let volume = async {
                hash::format(&*device, &format).await?;
                hash::open(&device, &pool, settings, &format).await
            };
            let volume = volume.await.map_err(|error| format!("the volume: {error}"));
            *result.borrow_mut() = Some(volume);
        });
        let own = handle.clone();
        let task = self.world.add_reactor(self.node, handle, move |now| {
            let fired = own.begin_turn(now);
            fired + own.run_background() > 0
        });
        self.world.run_while_not(LIMIT, || opened.borrow().is_some());
        self.world.remove_reactor(task);
        let opened = opened.borrow_mut().take();
        opened.unwrap_or_else(|| Err("the volume does not open".to_owned()))
    }

    fn handle(&self) -> Handle {
        let channel = Channel::new(Box::new(self.world.queue(self.node)), 1);
        Handle::new(Doorbell::silent(), channel, Busy::virtual_time())
    }

    fn device(&self, flash: &Rc<RefCell<Flash>>, handle: &Handle) -> Rc<dyn octokv_flash::Device> {
        Rc::new(FlashDevice::new(flash, (DEVICE_BYTES / 4096, !self.journal), handle, &self.world))
    }

    fn address(&self) -> SocketAddr {
        SocketAddr::new(self.world.address(self.node), PORT)
    }

    fn serve(&self, flash: &Rc<RefCell<Flash>>, volume: &Arc<Volume>, costs: Costs) {
        let settings = TargetSettings::new(NQN);
        let namespace = namespace_of(volume, settings.key_bytes_max);
        let target = Target::new(settings, vec![namespace]);
        target.set_listeners(vec![self.address()]);
        let doorbells: Vec<_> = (0..CORES).map(|_| Doorbell::silent()).collect();
        let (mailboxes, carrier) = carried_mesh(&doorbells, MAILBOX_MESSAGES);
        let carrier = Rc::new(RefCell::new(carrier));
        for (index, (mailbox, doorbell)) in mailboxes.into_iter().zip(doorbells).enumerate() {
            let channel = Channel::new(Box::new(self.world.queue(self.node)), 1);
            let handle = Handle::new(doorbell, channel, Busy::virtual_time());
            self.start_core(index, handle, mailbox, &carrier, flash, volume, &target, costs);
        }
    }

    #[allow(clippy::too_many_arguments)] // What one core of the node is made of.
    fn start_core(
        &self,
        index: usize,
        handle: Handle,
        mailbox: Mailbox<Message>,
        carrier: &Rc<RefCell<Carrier<Message>>>,
        flash: &Rc<RefCell<Flash>>,
        volume: &Arc<Volume>,
        target: &Arc<Target>,
        costs: Costs,
    ) {
        let pool = Pool::new(POOL_BYTES);
        let engine = HashEngine::new(Arc::clone(volume), index, self.device(flash, &handle), pool.clone());
        let performer = Rc::new(Performer {
            engine,
            pool: pool.clone(),
            handle: handle.clone(),
            device: Rc::from("modelled drive"),
            listings: Pace::default(),
        });
        let stores = Rc::new(Stores::default());
        stores.insert(NamespaceId(1), Store::Keys(Rc::clone(&performer)));
        let mut sockets = LateSockets::new(self.world.sockets(self.node), &handle, &self.world);
        let mut listeners = Vec::new();
        if index == 0 {
            listeners.push(sockets.listen(self.address()).expect("nobody else is on this host"));
            let own = handle.clone();
            handle.spawn(async move { performer.engine.maintain(&own, |_| ()).await });
        }
        let mut turns = reactor(Parts {
            sockets,
            local_address: |_: &LateSockets, _| None,
            listeners,
            mailbox,
            core: index,
            handle: handle.clone(),
            target: Arc::clone(target),
            stores,
            pool,
            requests_max: 1024,
            scheduling: Arc::clone(&self.scheduling),
            costs,
        });
        let (world, carrier, own) = (self.world.clone(), Rc::clone(carrier), handle.clone());
        self.world.add_reactor(self.node, handle, move |now| {
            let busy = turns.turn(now);
            // What this turn said to others reaches them when its work is done.
            let done = now + own.busy().within_turn();
            loop {
                let Some((to, message)) = carrier.borrow_mut().take(index) else { break };
                let carrier = Rc::clone(&carrier);
                world.at(done, move || {
                    let brought = carrier.borrow_mut().bring(index, to, message);
                    assert!(brought.is_ok(), "more messages than requests");
                });
            }
            busy
        });
    }

    fn connect(&self, seed: u64) -> Result<(), String> {
        let settings = ClientSettings {
            subsystem: NQN.to_owned(),
            queues: CORES as u16,
            depth: 64,
            receive_bytes: 64 << 10,
            pool_bytes: POOL_BYTES,
            ..ClientSettings::default()
        };
        let session =
            Session::new(self.world.sockets(self.client), self.address(), settings, self.world.now());
        let channel = Channel::new(Box::new(self.world.queue(self.client)), 1);
        let handle = Handle::new(Doorbell::silent(), channel, Busy::virtual_time());
        let random = Random::new(octokv_base::random::mix(seed));
        let mut client = Client::new(session, handle.clone(), Rc::clone(&self.load), random);
        self.world.add_reactor(self.client, handle, move |now| client.turn(now));
        self.drain_to(|load| load.live)
    }

    /// Has one operation go over each connection, to see on which core it is.
    fn find_cores(&mut self) -> Result<(), String> {
        let mut found = Vec::new();
        for connection in 0..CORES {
            self.set_load(Operation::Put, 1, Placement::One(connection));
            let figures = self.run_requests(1)?;
            found.push(figures.cores.iter().position(|core| core.target_events == 1).unwrap_or(CORES));
        }
        let mut sorted = found.clone();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..CORES) {
            return Err(format!("the connections are on cores {found:?}, not on one each"));
        }
        self.core_of = found;
        Ok(())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // What the world holds holds the world: reactors, and what is still to happen.
        self.world.stop_host(self.client, Stop::Killed);
        self.world.stop_host(self.node, Stop::Killed);
        while self.world.step(Nanos::NEVER) {}
    }
}
