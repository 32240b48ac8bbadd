//! One core of a node on the kernel's sockets and devices: prepares its reactor, turns it, and does what the node
//! orders: namespaces in, namespaces out, reports.
//!
//! ```text
//!   Attach ─▶ a store of its own ─▶ answered
//!   Detach ─▶ no store any more ─▶ its last request ended ─▶ (first core: the volume is idle) ─▶ answered
//! ```
//! Invariants: an order is answered exactly once, unless the node stops before; whatever hosts do, a batch or
//! checkpoint that was begun is written to its end.

use crate::abortable::{Stop, until};
use crate::config::NodeSettings;
use crate::device_driver::core_queue;
use crate::kv_backend::Performer;
use crate::monitor::Scheduling;
use crate::namespace_open::{Contents, CoreParts, Held};
use crate::namespace_table::{Store, Stores};
use crate::node::StartError;
use crate::reactor::{Costs, Message, Parts, Turns, reactor};
use octokv_base::{NamespaceId, Nanos, Pool};
use octokv_engine::Fault;
use octokv_engine::hash::HashEngine;
use octokv_nvmf::Target;
use octokv_runtime::{Busy, Channel, Doorbell, Handle, Idle, Mailbox, RealSockets, Sockets, Stage};
use octokv_sys::clock;
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

/// How soon a core that waits for the end of something looks again.
const LOOK_AGAIN: Nanos = Nanos::from_millis(1);

/// What cores of a node share.
pub(crate) struct Shared {
    pub stopping: AtomicBool,
    pub doorbells: Vec<Arc<Doorbell>>,
    pub mailboxes: Vec<Mutex<Option<Mailbox<Message>>>>,
    pub orders: Vec<Orders>,
    pub scheduling: Arc<Scheduling>,
    /// By core: whether it has nothing left to finish. All go on until all have, since cores work for each other.
    pub drained: Vec<AtomicBool>,
}

/// What one core is asked to do.
#[derive(Default)]
pub(crate) struct Orders {
    waiting: Mutex<VecDeque<Order>>,
    /// Whether there are any: what a core looks at each turn.
    some: AtomicBool,
}

impl Orders {
    fn push(&self, order: Order) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push_back(order);
        self.some.store(true, Ordering::Release);
    }

    fn take(&self) -> VecDeque<Order> {
        if !self.some.load(Ordering::Acquire) {
            return VecDeque::new();
        }
        self.some.store(false, Ordering::Relaxed);
        std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Shared {
    /// Says whether a core has nothing left to finish. Who waits for that only sleeps.
    fn is_drained(&self, core: usize, drained: bool) {
        let before = self.drained[core].swap(drained, Ordering::AcqRel);
        if drained && !before {
            self.doorbells.iter().for_each(|doorbell| doorbell.ring());
        }
    }

    /// Gives a core an order and wakes it.
    pub fn order(&self, core: usize, order: Order) {
        self.orders[core].push(order);
        self.doorbells[core].ring();
    }
}

/// Something that a core does between two turns.
pub(crate) enum Order {
    /// Serve a namespace.
    Attach(Box<Held>, Sender<io::Result<()>>),
    /// Serve it no more; answered when nothing of it is left.
    Detach(NamespaceId, Sender<io::Result<()>>),
    /// Say how things are.
    Report(Sender<CoreReport>),
}

/// How a core is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CoreReport {
    /// Connections that it serves.
    pub connections: usize,
    /// Requests that it has begun and not ended.
    pub requests: usize,
    /// Bytes of buffers that are out.
    pub buffer_bytes: usize,
    /// Bytes of memory that the buffers take, those that are kept for later included.
    pub buffer_memory_bytes: usize,
    /// Device operations in flight.
    pub device_operations: usize,
    /// Background tasks: one for each namespace of keys, on the first core.
    pub background_tasks: usize,
    /// Namespaces that are on their way out.
    pub leaving: usize,
    /// How long it has worked since its start: no empty polls, no sleep.
    pub busy: Nanos,
}

/// What a core's thread is given.
#[derive(Clone)]
pub(crate) struct Core {
    pub settings: Arc<NodeSettings>,
    /// The namespaces that each core begins with. Taken by it: what is kept here would be open for ever.
    pub held: Arc<[Mutex<Vec<Held>>]>,
    pub target: Arc<Target>,
    pub shared: Arc<Shared>,
    pub report: Sender<Result<Vec<SocketAddr>, StartError>>,
}

/// A core that is there until this is dropped.
struct Gone<'a>(&'a Shared, usize);

impl Drop for Gone<'_> {
    fn drop(&mut self) {
        self.0.is_drained(self.1, true);
    }
}

/// A core that is ready to serve.
struct Prepared {
    parts: Parts<RealSockets, HashEngine>,
    idle: Idle,
    namespaces: Namespaces,
    /// Where it listens.
    addresses: Vec<SocketAddr>,
}

/// The namespaces of a core, those that leave included.
struct Namespaces {
    core: usize,
    stores: Rc<Stores<HashEngine>>,
    pool: Pool,
    handle: Handle,
    served: Vec<Served>,
    leaving: Vec<Leaving>,
}

struct Served {
    held: Held,
    /// Ends what keeps the volume in order: on the first core.
    keeper: Option<Rc<Stop>>,
}

struct Leaving {
    served: Served,
    store: Option<Rc<Store<HashEngine>>>,
    answer: Sender<io::Result<()>>,
}

impl Core {
    pub fn run(&self, index: usize) {
        // However this core ends, no other waits for it.
        let _gone = Gone(&self.shared, index);
        match self.prepare(index) {
            Ok(Prepared { parts, idle, namespaces, addresses }) => {
                // The starter waits for every core's word before anybody is served.
                let _ = self.report.send(Ok(addresses));
                self.serve(index, parts, idle, namespaces);
            }
            Err(error) => drop(self.report.send(Err(error))),
        }
    }

    fn prepare(&self, index: usize) -> Result<Prepared, StartError> {
        let settings = &self.settings;
        let doorbell = Arc::clone(&self.shared.doorbells[index]);
        let queue = core_queue(settings.driver, settings.device_depth, &doorbell, index)?;
        let channel = Channel::new(queue, settings.device_depth);
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
        let mut namespaces = Namespaces {
            core: index,
            stores: Rc::default(),
            pool: pool.clone(),
            handle: handle.clone(),
            served: Vec::new(),
            leaving: Vec::new(),
        };
        let held = std::mem::take(&mut *self.held[index].lock().unwrap_or_else(PoisonError::into_inner));
        for held in held {
            namespaces.attach(held).map_err(StartError::System)?;
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
            stores: Rc::clone(&namespaces.stores),
            pool,
            requests_max: settings.requests_max,
            scheduling: Arc::clone(&self.shared.scheduling),
            costs: Costs::default(),
        };
        Ok(Prepared { parts, idle, namespaces, addresses })
    }

    fn serve(
        &self,
        index: usize,
        parts: Parts<RealSockets, HashEngine>,
        mut idle: Idle,
        mut namespaces: Namespaces,
    ) {
        let handle = parts.handle.clone();
        let mut reactor = reactor(parts);
        let mut stop_at = Nanos::NEVER;
        loop {
            let now = clock::now();
            let mut busy = reactor.turn(now);
            for order in self.shared.orders[index].take() {
                namespaces.obey(order, &mut reactor, now);
                // It may have left something to do.
                busy = true;
            }
            namespaces.let_go();
            if self.shared.stopping.load(Ordering::Acquire) && stop_at == Nanos::NEVER {
                reactor.drain();
                stop_at = now + self.settings.stop_limit;
            }
            let over = now >= stop_at || (stop_at != Nanos::NEVER && self.are_drained(index, &mut reactor));
            if over && namespaces.are_idle() {
                break;
            }
            let soon = over || !namespaces.leaving.is_empty();
            let deadline = if soon { now + LOOK_AGAIN } else { handle.next_deadline().min(stop_at) };
            let device_works = handle.device_operations() > 0;
            idle.rest(busy, clock::now(), device_works, deadline, reactor.sockets());
        }
        tracing::debug!(core = index, "reactor stopped");
        handle.shutdown();
    }

    /// Whether no core has anything left to finish. Once that is so it stays so: a core that is drained has no request at
    /// another, and takes none in.
    fn are_drained(&self, index: usize, reactor: &mut impl Turns<RealSockets>) -> bool {
        self.shared.is_drained(index, reactor.is_drained());
        self.shared.drained.iter().all(|drained| drained.load(Ordering::Acquire))
    }
}

impl Namespaces {
    fn attach(&mut self, held: Held) -> io::Result<()> {
        let Namespaces { core, pool, handle, .. } = self;
        let store = held.store(&CoreParts { core: *core, pool, handle })?;
        let mut keeper = None;
        if self.core == 0
            && let Store::Keys(performer) = &store
        {
            let stop = Rc::new(Stop::default());
            self.handle.spawn(until(Rc::clone(&stop), keep_in_order(Rc::clone(performer))));
            keeper = Some(stop);
        }
        self.stores.insert(held.settings.id, store);
        self.served.push(Served { held, keeper });
        Ok(())
    }

    fn obey(&mut self, order: Order, reactor: &mut impl Turns<RealSockets>, now: Nanos) {
        match order {
            Order::Attach(held, answer) => {
                reactor.refuse_absent(now);
                drop(answer.send(self.attach(*held)));
            }
            Order::Detach(id, answer) => {
                let Some(at) = self.served.iter().position(|served| served.held.settings.id == id) else {
                    // It did not come to be served here.
                    return drop(answer.send(Ok(())));
                };
                let (served, store) = (self.served.remove(at), self.stores.remove(id));
                self.leaving.push(Leaving { served, store, answer });
            }
            Order::Report(answer) => drop(answer.send(CoreReport {
                connections: reactor.connections(),
                requests: reactor.requests(),
                buffer_bytes: self.pool.out_bytes(),
                buffer_memory_bytes: self.pool.held_bytes(),
                device_operations: self.handle.device_operations(),
                background_tasks: self.handle.background_running(),
                leaving: self.leaving.len(),
                busy: self.worked(),
            })),
        }
    }

    /// Lets go of the namespaces whose last request has ended.
    fn let_go(&mut self) {
        self.leaving.retain_mut(|Leaving { served, store, answer }| {
            if store.as_ref().is_some_and(|store| Rc::strong_count(store) > 1) || !served.is_idle() {
                return true;
            }
            if let Some(keeper) = served.keeper.take() {
                // It holds a performer of its own until it has had its turn.
                keeper.ask();
                return true;
            }
            if let Some(Store::Keys(performer)) = store.as_deref()
                && Rc::strong_count(performer) > 1
            {
                return true;
            }
            *store = None;
            let _ = answer.send(Ok(()));
            false
        });
    }

    fn worked(&self) -> Nanos {
        let spent = self.handle.busy().reader().spent();
        [Stage::Target, Stage::Kv, Stage::Device]
            .iter()
            .fold(Nanos::ZERO, |sum, &stage| sum + spent[stage as usize])
    }

    fn are_idle(&self) -> bool {
        let leaving = self.leaving.iter().map(|leaving| &leaving.served);
        self.served.iter().chain(leaving).all(Served::is_idle)
    }
}

impl Served {
    /// Whether nothing is on its way to the device that must not be cut short.
    fn is_idle(&self) -> bool {
        match &self.held.contents {
            Contents::Keys(volume) => volume.is_idle(),
            Contents::Blocks(_) => true,
        }
    }
}

async fn keep_in_order(performer: Rc<Performer<HashEngine>>) {
    let device = Rc::clone(&performer.device);
    let report =
        |fault: Fault| tracing::error!(device = &*device, %fault, "keeping the volume in order failed");
    performer.engine.maintain(&performer.handle, report).await;
}
