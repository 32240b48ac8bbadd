//! The node of a bench: its volume on the modelled drive, and a reactor for each of its cores.
//!
//! In: a world, a host of it, what requests cost. Out: reactors that serve. What a turn says to other cores reaches them
//! when the work that led to it is done.

use super::delayed_sockets::LateSockets;
use super::parameters::CORES;
use super::ssd_device::{Flash, FlashDevice};
use crate::node_under_test::Later;
use octokv_base::{NamespaceId, Nanos, Pool};
use octokv_engine::Durability;
use octokv_engine::hash::{self, FormatSettings, HashEngine, OpenSettings, Volume};
use octokv_node::fair_yield::Pace;
use octokv_node::kv_backend::Performer;
use octokv_node::monitor::Scheduling;
use octokv_node::namespace_table::{Store, Stores};
use octokv_node::{Costs, Message, Parts, Turns, namespace_of, reactor};
use octokv_nvmf::{Target, TargetSettings};
use octokv_runtime::simulated::{HostId, VirtualWorld};
use octokv_runtime::{Busy, Carrier, Channel, Doorbell, Handle, Mailbox, Sockets, carried_mesh};
use std::cell::RefCell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// The subsystem's name.
pub const NQN: &str = "nqn.2026-11.io.octokv:node";
/// Bytes of buffers of a core, and of a client.
pub const POOL_BYTES: usize = 64 << 20;
const PORT: u16 = 4420;
const DEVICE_BYTES: u64 = 16 << 30;
const MAILBOX_MESSAGES: usize = 256;
/// Nothing here takes so long.
pub const LIMIT: Nanos = Nanos::from_secs(120);

/// What a node is made from.
pub struct Node<'a> {
    /// Where it is.
    pub world: &'a VirtualWorld,
    /// Which host.
    pub host: HostId,
    /// Its monitor.
    pub scheduling: &'a Arc<Scheduling>,
    /// What requests cost its cores.
    pub costs: Costs,
    /// Whether its engine keeps a journal.
    pub journal: bool,
}

/// A thread of control without a doorbell that anybody hears.
pub fn handle_on(world: &VirtualWorld, host: HostId, doorbell: Arc<Doorbell>) -> Handle {
    let channel = Channel::new(Box::new(world.queue(host)), 1);
    Handle::new(doorbell, channel, Busy::virtual_time())
}

impl Node<'_> {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        SocketAddr::new(self.world.address(self.host), PORT)
    }

    /// Formats the drive and opens the volume, on a reactor of its own.
    ///
    /// # Errors
    /// Why it does not open.
    pub fn open(&self, flash: &Rc<RefCell<Flash>>) -> Result<Arc<Volume>, String> {
        let handle = handle_on(self.world, self.host, Doorbell::silent());
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
        let task = self.world.add_reactor(self.host, handle, move |now| {
            let fired = own.begin_turn(now);
            fired + own.run_background() > 0
        });
        self.world.run_while_not(LIMIT, || opened.borrow().is_some());
        self.world.remove_reactor(task);
        let opened = opened.borrow_mut().take();
        opened.unwrap_or_else(|| Err("the volume does not open".to_owned()))
    }

    fn device(&self, flash: &Rc<RefCell<Flash>>, handle: &Handle) -> Rc<dyn octokv_device::Device> {
        Rc::new(FlashDevice::new(flash, (DEVICE_BYTES / 4096, !self.journal), handle, self.world))
    }

    /// Starts its cores.
    pub fn serve(&self, flash: &Rc<RefCell<Flash>>, volume: &Arc<Volume>) {
        let settings = TargetSettings::new(NQN);
        let namespace = namespace_of(volume, settings.key_bytes_max);
        let target = Target::new(settings, vec![namespace]);
        target.set_listeners(vec![self.address()]);
        let doorbells: Vec<_> = (0..CORES).map(|_| Doorbell::silent()).collect();
        let (mailboxes, carrier) = carried_mesh(&doorbells, MAILBOX_MESSAGES);
        let carrier = Rc::new(RefCell::new(carrier));
        for (index, (mailbox, doorbell)) in mailboxes.into_iter().zip(doorbells).enumerate() {
            let handle = handle_on(self.world, self.host, doorbell);
            self.start_core(index, handle, mailbox, &carrier, flash, volume, &target);
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
        let mut sockets = LateSockets::new(self.world.sockets(self.host), &handle, self.world);
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
            scheduling: Arc::clone(self.scheduling),
            costs: self.costs,
        });
        let (world, carrier, own) = (self.world.clone(), Rc::clone(carrier), handle.clone());
        self.world.add_reactor(self.host, handle, move |now| {
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
}
