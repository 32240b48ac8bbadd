//! One life of an engine on a client host, over a namespace of blocks: from its connection to its end.
//!
//! ```text
//!   Connecting ──live──▶ Opening ──opened, every key read──▶ Working ──▶ Closing ──▶ Over
//!        │                  │                                   │ a fault of writing, or fenced      ▲
//!        └──────────────────┴───────────────────────────────────┴───────────────────────────────────┘
//! ```
//! In: an address, random numbers, what to ask. Out: calls and outcomes in the history; what opening found.
//! Invariants: a life begins no call after the first write that failed; one that is over has no task left.

use super::scenario::RemotePlan;
use crate::client_host::{draw, draw_length, settings_of};
use crate::history::{Call, CallId, History, Outcome, Seen};
use crate::node_under_test::{Audited, audit};
use octokv_base::{Nanos, Pool, Random};
use octokv_client::{Remote, Session, Settings, StoreMode};
use octokv_device::Device;
use octokv_engine::conformance::{record_of, value_of};
use octokv_engine::hash::{self, HashEngine, OpenError, OpenSettings};
use octokv_engine::{Delete, Durability, Engine, Fault, Put, PutMode};
use octokv_runtime::simulated::{HostId, VirtualSockets, VirtualWorld};
use octokv_runtime::{Channel, Handle};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// What the lives of an engine and the play share.
pub struct Shared {
    /// What was asked and heard.
    pub history: History,
    /// Commands begun, and the most there may be.
    pub asked: u64,
    /// See above.
    pub limit: u64,
    /// Commands answered or lost.
    pub answered: u64,
    /// Commands that were answered well.
    pub served: u64,
    /// The first thing that cannot be.
    pub failure: Option<String>,
    /// Whether the engine is to be closed.
    pub resting: bool,
    /// Whether the volume was ever formatted to the end.
    pub formatted: bool,
    /// What the present life found when it had opened the volume, until it is taken.
    pub opened: Option<Result<Vec<Audited>, OpenError>>,
    /// Whether what it found was taken in, so that it may work.
    pub may_work: bool,
    /// Whether the present life is over.
    pub over: bool,
    /// Whether it ended in order.
    pub closed: bool,
    /// Lives that were fenced: they might have lost what they had written.
    pub fenced: u64,
}

impl Shared {
    /// Notes the first thing that cannot be.
    pub fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }
}

struct Up {
    remote: Remote<VirtualSockets>,
    channel: Channel,
    engine: Rc<RefCell<Option<Rc<HashEngine>>>>,
}

/// One life.
pub struct Life {
    plan: RemotePlan,
    random: Random,
    handle: Handle,
    shared: Rc<RefCell<Shared>>,
    session: Option<Session<VirtualSockets>>,
    up: Option<Up>,
    running: Rc<Cell<usize>>,
    broken: Rc<Cell<bool>>,
    closing: bool,
}

impl Life {
    /// A new one, which begins to connect.
    pub fn new(
        world: &VirtualWorld,
        host: HostId,
        node: SocketAddr,
        plan: &RemotePlan,
        random: Random,
        handle: Handle,
        shared: &Rc<RefCell<Shared>>,
    ) -> Life {
        let settings = Settings { ..settings_of(host, &plan.host) };
        let session = Session::new(world.sockets(host), node, settings, world.now());
        Life {
            plan: plan.clone(),
            random,
            handle,
            shared: Rc::clone(shared),
            session: Some(session),
            up: None,
            running: Rc::default(),
            broken: Rc::default(),
            closing: false,
        }
    }

    /// Does what there is to do now. False when there was nothing.
    pub fn turn(&mut self, now: Nanos) -> bool {
        if self.shared.borrow().over {
            return false;
        }
        let mut busy = self.handle.begin_turn(now) > 0;
        busy |= self.connect(now);
        let Some(up) = &self.up else {
            let wake = self.session.as_ref().map_or(Nanos::NEVER, Session::next_deadline);
            self.handle.want_turn_at(wake);
            return busy;
        };
        let (remote, channel) = (up.remote.clone(), up.channel.clone());
        busy |= remote.turn(now);
        busy |= self.handle.run_background() > 0;
        busy |= channel.poll() > 0;
        busy |= self.handle.run_background() > 0;
        if remote.is_fenced() || remote.with_session(|session| session.ended().is_some()) {
            self.broken.set(true);
        }
        while self.may_ask() {
            self.ask();
            busy = true;
        }
        busy |= self.handle.run_background() > 0;
        busy |= self.end_if_due();
        self.handle.want_turn_at(remote.next_deadline());
        busy
    }

    fn connect(&mut self, now: Nanos) -> bool {
        let Some(session) = &mut self.session else { return false };
        let busy = session.poll(now, |_, _| ());
        if session.ended().is_some() || self.shared.borrow().resting {
            self.session = None;
            self.end();
            return true;
        }
        if session.is_live()
            && let Some(session) = self.session.take()
        {
            match Remote::new(session, now) {
                Ok(remote) => self.open(remote),
                Err(error) => self.shared.borrow_mut().fail(format!("no device of a live session: {error}")),
            }
            return true;
        }
        busy
    }

    /// Opens the volume in the background, and reads every key.
    fn open(&mut self, remote: Remote<VirtualSockets>) {
        let channel = remote.channel();
        let device: Rc<dyn Device> = Rc::new(remote.device(&channel));
        let engine: Rc<RefCell<Option<Rc<HashEngine>>>> = Rc::default();
        let (shared, opened) = (Rc::clone(&self.shared), Rc::clone(&engine));
        let (format, handle) = (self.plan.format(), self.handle.clone());
        let pool = Pool::new(self.plan.node.pool_bytes);
        self.up = Some(Up { remote, channel, engine });
        self.handle.spawn(async move {
            let open = async {
                if !shared.borrow().formatted {
                    hash::format(&*device, &format).await?;
                    shared.borrow_mut().formatted = true;
                }
                let settings = OpenSettings { durability: Durability::Flush, cores: 1 };
                let volume = hash::open(&device, &pool, settings, &format).await?;
                Ok(Rc::new(HashEngine::new(Arc::clone(&volume), 0, device, pool)))
            };
            match open.await {
                Ok(engine) => {
                    let keys = shared.borrow().history.keys().to_vec();
                    let found = audit(&engine, &keys).await;
                    shared.borrow_mut().opened = Some(Ok(found));
                    *opened.borrow_mut() = Some(Rc::clone(&engine));
                    engine.maintain(&handle, |_| ()).await;
                }
                Err(error) => shared.borrow_mut().opened = Some(Err(error)),
            }
        });
    }

    fn may_ask(&self) -> bool {
        let shared = self.shared.borrow();
        shared.may_work
            && !self.broken.get()
            && !shared.resting
            && shared.failure.is_none()
            && shared.asked < shared.limit
            && self.running.get() < self.plan.host.concurrency
    }

    fn ask(&mut self) {
        let Some(engine) = self.up.as_ref().and_then(|up| up.engine.borrow().clone()) else { return };
        let (random, load) = (&mut self.random, self.plan.load);
        let kind = draw(random, &load.mix);
        let index = random.below(load.keys) as usize;
        let bytes = draw_length(random, load.value_bytes);
        let (shared, running, broken) =
            (Rc::clone(&self.shared), Rc::clone(&self.running), Rc::clone(&self.broken));
        shared.borrow_mut().asked += 1;
        running.set(running.get() + 1);
        self.handle.spawn(async move {
            one_call(&engine, &shared, &broken, kind, index, bytes).await;
            shared.borrow_mut().answered += 1;
            running.set(running.get() - 1);
        });
    }

    /// Closes the engine when it is to rest, and ends the life when it is closed, or of no more use.
    fn end_if_due(&mut self) -> bool {
        let (resting, may_work) = (self.shared.borrow().resting, self.shared.borrow().may_work);
        if self.running.get() > 0 {
            return false;
        }
        if self.broken.get() {
            self.end();
            return true;
        }
        let engine = self.up.as_ref().and_then(|up| up.engine.borrow().clone());
        if resting
            && may_work
            && !std::mem::replace(&mut self.closing, true)
            && let Some(engine) = engine
        {
            let (shared, running, broken) =
                (Rc::clone(&self.shared), Rc::clone(&self.running), Rc::clone(&self.broken));
            running.set(1);
            self.handle.spawn(async move {
                let closed = engine.checkpoint(true).await;
                shared.borrow_mut().closed = closed.is_ok();
                running.set(0);
                broken.set(true);
            });
            return true;
        }
        false
    }

    fn end(&mut self) {
        let fenced = self.up.as_ref().is_some_and(|up| up.remote.is_fenced());
        let mut shared = self.shared.borrow_mut();
        shared.fenced += u64::from(fenced);
        shared.may_work = false;
        shared.over = true;
    }
}

impl Drop for Life {
    /// What waits is never answered; tasks that hold the handle go with it.
    fn drop(&mut self) {
        let mut shared = self.shared.borrow_mut();
        shared.answered += self.running.get() as u64;
        (shared.may_work, shared.over) = (false, true);
        drop(shared);
        self.up = None;
        self.handle.shutdown();
    }
}

/// One operation of the engine and what came of it.
async fn one_call(
    engine: &HashEngine,
    shared: &RefCell<Shared>,
    broken: &Cell<bool>,
    kind: usize,
    index: usize,
    bytes: usize,
) {
    let key = shared.borrow().history.keys()[index].clone();
    let begin = |call| shared.borrow_mut().history.begin(index, call);
    let (id, outcome) = match kind {
        0..3 => {
            let modes = [
                (StoreMode::Upsert, PutMode::Upsert),
                (StoreMode::AddOnly, PutMode::AddOnly),
                (StoreMode::UpdateOnly, PutMode::UpdateOnly),
            ];
            let (mode, put_mode) = modes[kind];
            let operation = shared.borrow_mut().history.next_operation(bytes as u32);
            let value = value_of(&key, operation, bytes);
            let id = begin(Call::Put { operation, bytes: bytes as u32, mode });
            let outcome = match engine.put(&key, put_mode, record_of(&key, &value), bytes).await {
                Ok(Put::Stored) => Ok(Some(Outcome::Done)),
                Ok(Put::Exists | Put::NotFound) => Ok(Some(Outcome::Refused)),
                Ok(Put::Full) => Ok(None),
                Ok(Put::TooLong) => Err(None),
                Err(fault) => Err(Some(fault)),
            };
            (id, outcome)
        }
        5 => {
            let id = begin(Call::Delete);
            let outcome = match engine.delete(&key).await {
                Ok(Delete::Deleted) => Ok(Some(Outcome::Done)),
                Ok(Delete::NotFound) => Ok(Some(Outcome::Refused)),
                Err(fault) => Err(Some(fault)),
            };
            (id, outcome)
        }
        6 => {
            let id = begin(Call::Exist);
            let found = engine.exist(&key).await.map_err(Some);
            let seen = |found: Option<usize>| {
                Some(Outcome::Saw(found.map_or(Seen::Nothing, |bytes| Seen::Length(bytes as u32))))
            };
            (id, found.map(seen))
        }
        8 => {
            // Nothing was acknowledged that was not durable: it changes nothing.
            broken.set(broken.get() | engine.flush().await.is_err());
            return;
        }
        _ => {
            let id = begin(Call::Get);
            let outcome = match engine.get(&key).await {
                Ok(None) => Ok(Some(Outcome::Saw(Seen::Nothing))),
                Ok(Some(value)) => {
                    let bytes = value.as_bytes();
                    match shared.borrow().history.identify(index, bytes, bytes.len() as u32) {
                        Ok(seen) => Ok(Some(Outcome::Saw(seen))),
                        Err(what) => return shared.borrow_mut().fail(what),
                    }
                }
                Err(fault) => Err(Some(fault)),
            };
            (id, outcome)
        }
    };
    let writes = matches!(kind, 0..3 | 5);
    note(&mut shared.borrow_mut(), broken, id, writes, outcome);
}

fn note(
    shared: &mut Shared,
    broken: &Cell<bool>,
    id: CallId,
    writes: bool,
    outcome: Result<Option<Outcome>, Option<Fault>>,
) {
    let noted = match outcome {
        Ok(Some(outcome)) => {
            shared.served += 1;
            shared.history.end(id, outcome)
        }
        Ok(None) => {
            shared.history.void(id);
            Ok(())
        }
        Err(Some(Fault::NoMemory)) => {
            shared.history.void(id);
            Ok(())
        }
        // It may have happened; what may have failed to be written, the next life finds out.
        Err(Some(Fault::Device(_) | Fault::ReadOnly)) if writes => {
            broken.set(true);
            Ok(())
        }
        Err(Some(Fault::Device(_) | Fault::ReadOnly)) => {
            shared.history.void(id);
            Ok(())
        }
        Err(fault) => Err(format!("an operation failed as none may: {fault:?}")),
    };
    if let Err(what) = noted {
        shared.fail(what);
    }
}
