//! One core of a node: takes turns, each of which moves everything on that can move.
//!
//! ```text
//!   turn:  timers ─▶ accept ─▶ mailbox ─▶ sockets (P1) ─▶ requests are given to workers ─▶ workers that were woken
//!          ─▶ device completions (P2) ─▶ workers that these woke ─▶ outcomes to connections ─▶ one send each
//! ```
//! In: a driver (kernel or virtual), the stores of the namespaces, a target. Out: whether the turn did anything. Holds: the
//! connections of this core and what works on their requests. The three stages target, kv and device are
//! timed apart.
//!
//! Invariants: a request's answer leaves by the connection it came on; a link is forgotten only when none of
//! its requests is out; what does not fit (workers, buffers, unsent replies) stops the reading of sockets.
//! The first core accepts and deals connections to all cores in turn.

use crate::board::{Stamp, Tally};
use crate::dispatch::{Dispatch, Note};
use crate::flows::OTHERS;
use crate::gate::Gate;
use crate::jobs::{Job, Jobs};
use crate::line::Line;
use crate::link::{Link, Room};
use crate::planted::{self, Bug};
use crate::scheduling::{Scheduling, Watch};
use crate::share::Turn;
use crate::stores::{Removed, Stores};
use octokv_base::map::Map;
use octokv_base::{NamespaceId, Nanos, Pool};
use octokv_engine::Engine;
use octokv_runtime::{
    Channel, Desk, DetachedSocket, Handle, ListenerId, Mailbox, SocketId, Sockets, Stage, Workers,
};
use octokv_sched::{CoreId, FlowId, Route};
use octokv_target::{Closing, Connection, Outcome, Request, Target};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// Bytes received at once: one linear buffer per core. Measured: less costs system calls.
pub const RECEIVE_BYTES: usize = 1 << 20;
/// How often a core with connections looks at their deadlines, at the least.
const TICK: Nanos = Nanos::from_millis(50);

/// Connections that are accepted in one turn, of each listener: a flood of them leaves time for those that are there.
const ACCEPTS_PER_TURN: usize = 2;

/// How long the requests of a fair queue are begun one after the other before sockets are looked at again: who asks for
/// little may have come meanwhile.
const FAIR_STRETCH: Nanos = Nanos::from_micros(20);

/// Connections that are closed at once: replies go before them, and a flood of them leaves time.
const CLOSES_AT_ONCE: usize = 2;

/// What cores tell each other.
pub enum Message {
    /// Take over a connection that was just accepted.
    Adopt {
        /// The socket.
        socket: DetachedSocket,
        /// Our address.
        local: SocketAddr,
        /// The host's address.
        peer: SocketAddr,
    },
    /// Carry out a request of a connection of mine.
    Work(Job),
    /// What came of a request of a connection of yours.
    Done(Finished),
}

/// What requests cost a core of a virtual world, where nothing takes time by itself. On a real core time passes by itself,
/// and these are not looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Costs {
    /// To receive, take apart and answer one, on the core of its connection.
    pub target: Nanos,
    /// To carry one out, on the core that does.
    pub kv: Nanos,
    /// To hand its operations to the device and take its answers, there too.
    pub device: Nanos,
}

/// What a reactor is made of.
pub struct Parts<S, E> {
    /// This core's sockets.
    pub sockets: S,
    /// Our own address on a socket, where the driver knows it.
    pub local_address: fn(&S, SocketId) -> Option<SocketAddr>,
    /// The listeners of this core, with their addresses; only the first core has any.
    pub listeners: Vec<(ListenerId, SocketAddr)>,
    /// This core's end of the mesh.
    pub mailbox: Mailbox<Message>,
    /// This core's number among the node's.
    pub core: usize,
    /// Time, timers, tasks.
    pub handle: Handle,
    /// The subsystem.
    pub target: Arc<Target>,
    /// What does the requests of each namespace on this core.
    pub stores: Rc<Stores<E>>,
    /// The buffers of this core.
    pub pool: Pool,
    /// The most requests at a time.
    pub requests_max: usize,
    /// The monitor, and what is chosen.
    pub scheduling: Arc<Scheduling>,
    /// What requests cost in virtual time.
    pub costs: Costs,
}

/// A request that has ended, on its way to its connection.
#[derive(Debug)]
pub struct Finished {
    home: CoreId,
    link: u32,
    slot: u32,
    outcome: Outcome,
    flow: FlowId,
    stamp: Stamp,
    note: Note,
}

/// One core. `F` is the future of what carries out its requests.
struct Reactor<S, F> {
    sockets: S,
    local_address: fn(&S, SocketId) -> Option<SocketAddr>,
    listeners: Vec<(ListenerId, SocketAddr)>,
    mailbox: Mailbox<Message>,
    core: usize,
    handle: Handle,
    channel: Channel,
    target: Arc<Target>,
    pool: Pool,
    buffer: Box<[u8]>,
    links: Vec<Option<Link>>,
    free_links: Vec<u32>,
    by_socket: Map<SocketId, u32>,
    ready: Vec<SocketId>,
    /// Links that received in this turn.
    news: Vec<u32>,
    /// How many did in the last turn.
    talkers: usize,
    /// In what order links receive, send, and are offered their bytes again.
    receiving: Line,
    sending: Line,
    resuming: Line,
    /// What this turn has spent, and may.
    this_turn: Turn,
    requests: Vec<Request>,
    jobs: Jobs,
    /// Namespaces whose stores were taken out since the last turn.
    removed: Removed,
    workers: Workers<Job, F>,
    finished: Rc<RefCell<Vec<Finished>>>,
    delivering: Vec<Finished>,
    /// Links with bytes to send.
    unsent: Vec<u32>,
    slices: Vec<IoSlice<'static>>,
    undealt: VecDeque<(SocketId, SocketAddr, SocketAddr)>,
    next_core: usize,
    next_tick: Nanos,
    draining: bool,
    /// What is told of hosts that come and go.
    gate: Gate,
    scheduling: Arc<Scheduling>,
    /// The number of the last window that this core knows.
    window: u64,
    /// When it must end the one that runs, if it must.
    window_ends: Nanos,
    tally: Tally,
    dispatch: Dispatch,
    /// Outcomes for other cores that their rings had no room for.
    outbound: VecDeque<Finished>,
    costs: Costs,
    is_served: Box<dyn Fn(NamespaceId) -> bool>,
}

/// A core as whoever drives it sees it.
pub trait Turns<S> {
    /// Does everything there is to do now. False when there was nothing.
    fn turn(&mut self, now: Nanos) -> bool;
    /// The sockets, for a driver that sleeps on them.
    fn sockets(&mut self) -> &mut S;
    /// Takes no more connections and no more commands; those begun are finished.
    fn drain(&mut self);
    /// Whether, while draining, nothing is left to finish.
    fn is_drained(&mut self) -> bool;
    /// How many connections this core has.
    fn connections(&self) -> usize;
    /// How many requests this core has begun and not ended.
    fn requests(&self) -> usize;
    /// Ends whatever has come for namespaces that are not served here: before one of the same identifier is.
    fn refuse_absent(&mut self, now: Nanos);
}

/// What takes in the requests of this core's connections.
struct Admission<'a> {
    core: CoreId,
    dispatch: &'a mut Dispatch,
    jobs: &'a mut Jobs,
    mailbox: &'a mut Mailbox<Message>,
    tally: &'a Tally,
    now: Nanos,
}

impl Admission<'_> {
    /// Has a link's requests begin here or elsewhere, now or later, and leaves the vector empty.
    fn admit(self, link: u32, flow: FlowId, requests: &mut Vec<Request>) {
        let Admission { core, dispatch, jobs, mailbox, tally, now } = self;
        let count = requests.len() as u64;
        let stamp = tally.begun(flow, count);
        let jobs_of = requests.drain(..).map(|Request { slot, namespace, operation }| Job {
            home: core,
            link,
            slot,
            namespace,
            operation,
            flow,
            stamp,
            note: Note::NONE,
        });
        if dispatch.is_plain() {
            jobs_of.for_each(|job| jobs.push(job));
            return tally.own_here(count);
        }
        let mut stayed = 0;
        for job in jobs_of {
            let sent = match dispatch.route(&job) {
                Route::Here => Err(Message::Work(job)),
                Route::Move(to) => mailbox.send(to.index(), Message::Work(job)).map(|()| tally.moved(to)),
            };
            // A ring that is full keeps its core busy enough.
            if let Err(Message::Work(job)) = sent {
                stayed += 1;
                dispatch.keep(job, jobs, tally, now);
            }
        }
        tally.own_here(stayed);
    }
}

/// Makes a core's reactor.
pub fn reactor<S: Sockets, E: Engine + 'static>(parts: Parts<S, E>) -> impl Turns<S> {
    let finished: Rc<RefCell<Vec<Finished>>> = Rc::default();
    let (stores, done) = (Rc::clone(&parts.stores), Rc::clone(&finished));
    let (account, costs) = (parts.handle.clone(), parts.costs);
    let hire = move |desk: Rc<Desk<Job>>| {
        let (done, stores, account) = (Rc::clone(&done), Rc::clone(&stores), account.clone());
        async move {
            loop {
                let Job { home, link, slot, namespace, operation, flow, stamp, note } = desk.next().await;
                account.busy().charge(Stage::Kv, costs.kv);
                let mut outcome = match stores.get(namespace) {
                    Some(store) => store.perform(operation).await,
                    // It was removed while the command was on its way here.
                    None => Outcome::NotReady,
                };
                if planted::is(Bug::RemoveDropsRequests) && stores.get(namespace).is_none() {
                    continue;
                }
                if planted::is(Bug::RemoveRefusesRequests) && stores.get(namespace).is_none() {
                    outcome = Outcome::NotReady;
                }
                account.busy().charge(Stage::Device, costs.device);
                done.borrow_mut().push(Finished { home, link, slot, outcome, flow, stamp, note });
            }
        }
    };
    let doorbell = Arc::clone(parts.handle.doorbell());
    let workers = Workers::new(parts.requests_max, doorbell, hire);
    let stores = Rc::clone(&parts.stores);
    let jobs = Jobs::new(move |job, hint| {
        if let Some(store) = stores.get(job.namespace) {
            store.expect(&job.operation, hint);
        }
    });
    assemble(parts, finished, jobs, workers)
}

fn assemble<S: Sockets, E: Engine + 'static, F: Future<Output = Infallible>>(
    parts: Parts<S, E>,
    finished: Rc<RefCell<Vec<Finished>>>,
    jobs: Jobs,
    workers: Workers<Job, F>,
) -> Reactor<S, F> {
    let (cores, core) = (parts.mailbox.cores(), CoreId::at(parts.core));
    let boards = Arc::clone(parts.scheduling.boards());
    let stores = Rc::clone(&parts.stores);
    Reactor {
        sockets: parts.sockets,
        local_address: parts.local_address,
        listeners: parts.listeners,
        mailbox: parts.mailbox,
        core: parts.core,
        channel: parts.handle.channel(),
        tally: Tally::new(boards, core, parts.handle.busy()),
        dispatch: Dispatch::new(core, cores, parts.requests_max),
        outbound: VecDeque::new(),
        window: 0,
        window_ends: Nanos::NEVER,
        scheduling: parts.scheduling,
        costs: parts.costs,
        is_served: Box::new(move |namespace| stores.get(namespace).is_some()),
        handle: parts.handle,
        target: parts.target,
        pool: parts.pool,
        buffer: vec![0; RECEIVE_BYTES].into(),
        links: Vec::new(),
        free_links: Vec::new(),
        by_socket: Map::default(),
        ready: Vec::new(),
        news: Vec::new(),
        talkers: 0,
        receiving: Line::default(),
        sending: Line::default(),
        resuming: Line::default(),
        this_turn: Turn::new(),
        requests: Vec::new(),
        jobs,
        removed: parts.stores.removed(),
        workers,
        finished,
        delivering: Vec::new(),
        unsent: Vec::new(),
        slices: Vec::new(),
        undealt: VecDeque::new(),
        next_core: 0,
        next_tick: Nanos::ZERO,
        draining: false,
        gate: Gate::default(),
    }
}

impl<S: Sockets, F: Future<Output = Infallible>> Turns<S> for Reactor<S, F> {
    fn turn(&mut self, now: Nanos) -> bool {
        // What passed since the last turn, asleep perhaps, is nobody's.
        self.handle.busy().lap(Stage::Idle, false);
        self.handle.busy().begin_turn();
        let mut worked = self.handle.begin_turn(now) > 0;
        self.this_turn.begin(now);
        self.tally.turn(now);
        self.look_at_window(now);
        worked |= self.refuse_removed();
        let mut target = self.accept(now);
        target |= self.take_messages(now);
        target |= self.receive(now);
        self.handle.busy().lap(Stage::Target, target);
        let kv =
            self.begin_requests(now) | (self.handle.run_background() > 0) | (self.workers.poll_ready() > 0);
        let mut spent = self.handle.busy().lap(Stage::Kv, kv);
        let device = self.channel.poll() > 0;
        spent = spent + self.handle.busy().lap(Stage::Device, device);
        let kv_again = (self.handle.run_background() > 0) | (self.workers.poll_ready() > 0);
        spent = spent + self.handle.busy().lap(Stage::Kv, kv_again);
        let mut replied = self.deliver(now, spent);
        replied |= self.send();
        replied |= self.tick(now);
        self.handle.busy().lap(Stage::Target, replied);
        worked |= target | kv | device | kv_again | replied;
        worked
    }

    fn sockets(&mut self) -> &mut S {
        &mut self.sockets
    }

    fn drain(&mut self) {
        self.draining = true;
    }

    fn is_drained(&mut self) -> bool {
        let done = |link: &mut Link| {
            link.connection.in_flight() == 0 && (link.socket_closed || link.connection.outbox().is_empty())
        };
        let here = self.jobs.len() + self.dispatch.len() + self.workers.running() + self.outbound.len();
        here == 0 && self.links.iter_mut().flatten().all(done)
    }

    fn connections(&self) -> usize {
        self.links.iter().flatten().count()
    }

    fn requests(&self) -> usize {
        self.jobs.len() + self.dispatch.len() + self.workers.running()
    }

    fn refuse_absent(&mut self, now: Nanos) {
        self.take_messages(now);
        self.dispatch.release(&mut self.jobs);
        let Reactor { jobs, finished, is_served, .. } = self;
        jobs.retain(|job| {
            let stays = is_served(job.namespace);
            if !stays {
                finished.borrow_mut().push(refused(job));
            }
            stays
        });
    }
}

/// What becomes of a request whose namespace is gone. What was noted of it is given back with it.
fn refused(job: &mut Job) -> Finished {
    let Job { home, link, slot, flow, stamp, .. } = *job;
    Finished {
        home,
        link,
        slot,
        outcome: Outcome::NotReady,
        flow,
        stamp,
        note: std::mem::take(&mut job.note),
    }
}

impl<S: Sockets, F: Future<Output = Infallible>> Reactor<S, F> {
    fn accept(&mut self, now: Nanos) -> bool {
        if self.draining {
            return false;
        }
        let mut worked = false;
        for index in 0..self.listeners.len() {
            let (listener, address) = self.listeners[index];
            // The other cores may have no room for them: then the kernel's line holds newcomers.
            for _ in self.undealt.len()..ACCEPTS_PER_TURN {
                let Some((socket, peer)) = self.sockets.accept(listener) else { break };
                let local = (self.local_address)(&self.sockets, socket).unwrap_or(address);
                self.undealt.push_back((socket, local, peer));
                worked = true;
            }
        }
        while let Some((socket, local, peer)) = self.undealt.pop_front() {
            let to = self.next_core;
            if to == self.core {
                self.adopt(socket, local, peer, now);
            } else if self.mailbox.room(to) == 0 {
                self.undealt.push_front((socket, local, peer));
                break;
            } else if let Some(socket) = self.sockets.detach(socket) {
                let sent = self.mailbox.send(to, Message::Adopt { socket, local, peer });
                assert!(sent.is_ok(), "the ring had room");
            }
            self.next_core = (to + 1) % self.mailbox.cores();
        }
        worked
    }

    fn take_messages(&mut self, now: Nanos) -> bool {
        let mut worked = false;
        while let Some(message) = self.mailbox.receive() {
            worked = true;
            match message {
                Message::Adopt { socket, local, peer } => {
                    let socket = self.sockets.attach(socket);
                    self.adopt(socket, local, peer, now);
                }
                Message::Work(mut job) => {
                    job.stamp = self.tally.came(job.flow, job.stamp);
                    self.dispatch.keep(job, &mut self.jobs, &self.tally, now);
                }
                Message::Done(done) => self.answer(now, done),
            }
        }
        worked
    }

    /// Looks whether a window has ended, or is to be ended by this core.
    fn look_at_window(&mut self, now: Nanos) {
        self.window_ends = match self.scheduling.watch(self.core, now) {
            Watch::Not => Nanos::NEVER,
            Watch::Until(ends) => ends,
            Watch::Handed(next) => {
                self.mailbox.wake(next);
                Nanos::NEVER
            }
        };
        if self.scheduling.windows() != self.window {
            self.take_choice(now);
        }
    }

    /// Takes this core's part of what was chosen, and tells what the monitor needs for the next choice.
    #[cold]
    fn take_choice(&mut self, now: Nanos) {
        let Some(window) = self.scheduling.window() else { return };
        self.window = window.number;
        self.dispatch.choose(&window, &mut self.jobs, now);
        for link in self.links.iter().flatten() {
            if let Some(flow) = link.flow
                && let Some(round_trip) = self.sockets.round_trip(link.socket)
            {
                self.tally.round_trip(flow, round_trip);
            }
        }
    }

    fn adopt(&mut self, socket: SocketId, local: SocketAddr, peer: SocketAddr, now: Nanos) {
        // Asked here and not at accept, where those that were not adopted yet do not count.
        if !self.target.has_room() {
            if let Some(untold) = self.gate.open(now) {
                tracing::warn!(%peer, untold, "refused: connections_max are open");
            }
            self.sockets.close(socket);
            return;
        }
        if let Some(untold) = self.gate.open(now) {
            tracing::info!(%peer, core = self.core, untold, "connected");
        }
        let link = Link::new(socket, Connection::new(Arc::clone(&self.target), local, peer, now));
        let index = self.free_links.pop().unwrap_or_else(|| {
            self.links.push(None);
            (self.links.len() - 1) as u32
        });
        self.links[index as usize] = Some(link);
        self.by_socket.insert(socket, index);
        self.next_tick = now;
    }

    fn receive(&mut self, now: Nanos) -> bool {
        if self.draining || !self.jobs.is_empty() || self.dispatch.is_full() {
            return false;
        }
        let mut worked = false;
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        self.sockets.ready(&mut ready);
        let share = self.this_turn.share(self.talkers);
        let Reactor { sockets, buffer, pool, requests, jobs, workers, links, handle, finished, .. } = self;
        let Reactor { dispatch, mailbox, tally, scheduling, costs, .. } = self;
        let core = CoreId::at(self.core);
        self.receiving.form(ready.iter().filter_map(|socket| {
            let index = *self.by_socket.get(socket)?;
            let link = links[index as usize].as_ref().filter(|link| link.may_receive())?;
            Some((index, self.this_turn.asks_much(link.talk)))
        }));
        // What led up to this is not the first link's doing.
        let mut before = handle.busy().since_lap();
        let mut news = std::mem::take(&mut self.news);
        while let Some(index) = self.receiving.next(self.this_turn.is_over()) {
            let Some(link) = &mut links[index as usize] else { continue };
            let mut of_link = Nanos::ZERO;
            let flow = *link.flow.get_or_insert_with(|| {
                link.connection.host_nqn().map_or(OTHERS, |host| scheduling.flows().join(host))
            });
            let run = |connection: &mut Connection, requests: &mut Vec<Request>| {
                handle.busy().charge(Stage::Target, costs.target.times(requests.len()));
                let lap = handle.busy().lap(Stage::Target, true);
                tally.worked(flow, lap);
                Admission { core, dispatch, jobs, mailbox, tally, now }.admit(index, flow, requests);
                let started = jobs.start(workers);
                let second = handle.busy().lap(Stage::Kv, started);
                tally.worked(flow, second);
                of_link = of_link + lap + second;
                // What is answered already is owed by its own length, and no more by what it might have come to.
                let own = |done: &mut Finished| done.home == core && done.link == index;
                for done in finished.borrow_mut().extract_if(.., own) {
                    dispatch.done(done.note, &done.outcome);
                    tally.answered(done.flow, done.stamp, now + handle.busy().within_turn());
                    connection.complete(now, done.slot, done.outcome);
                }
                match jobs.is_empty() && of_link < share {
                    true if of_link.0 < share.0 / 4 => Room::More,
                    true => Room::Scarce,
                    false => Room::Enough,
                }
            };
            let received = link.receive(now, sockets, buffer, pool, run, requests);
            of_link = of_link.since(std::mem::take(&mut before));
            if let Some(bytes) = received {
                tally.bytes(flow, bytes);
                self.receiving.had_part();
                link.quantum.learn(bytes, of_link, share);
                self.this_turn.receiving = self.this_turn.receiving + of_link;
                self.this_turn.took(&mut link.talk, of_link);
                worked = true;
                news.push(index);
            }
        }
        self.receiving.end();
        self.talkers = news.len();
        for index in news.drain(..) {
            self.has_news(index);
        }
        self.news = news;
        self.ready = ready;
        worked
    }

    /// Ends the requests that wait for a task and whose namespace was removed: another may have its identifier when
    /// their turn comes.
    fn refuse_removed(&mut self) -> bool {
        if self.removed.borrow().is_empty() {
            return false;
        }
        let removed = self.removed.take();
        self.dispatch.release(&mut self.jobs);
        let finished = &mut *self.finished.borrow_mut();
        self.jobs.retain(|job| {
            let stays = !removed.contains(&job.namespace);
            if !stays {
                finished.push(refused(job));
            }
            stays
        });
        true
    }

    /// Puts a link on the list of those that may have something to send or may be over.
    fn has_news(&mut self, index: u32) {
        if let Some(link) = &mut self.links[index as usize]
            && !link.listed
        {
            link.listed = true;
            self.unsent.push(index);
        }
    }

    /// Begins what may begin: what waited for its turn among tenants, and what waits for a worker.
    fn begin_requests(&mut self, now: Nanos) -> bool {
        let mut worked = false;
        loop {
            let polled = self.dispatch.poll(&mut self.jobs, &self.tally, now);
            let started = self.jobs.start(&mut self.workers);
            worked |= polled | started;
            // Those that have ended at once make room for the next ones, until others are to be heard.
            let Reactor { dispatch, finished, handle, .. } = self;
            if !started || !dispatch.is_charging() || handle.busy().since_lap() > FAIR_STRETCH {
                return worked;
            }
            for done in finished.borrow_mut().iter_mut() {
                dispatch.done(std::mem::take(&mut done.note), &done.outcome);
            }
        }
    }

    /// Hands outcomes to their connections, those of other cores' by their mailboxes. The time `spent` on requests that
    /// waited for their devices is shared by those that ended.
    fn deliver(&mut self, now: Nanos, spent: Nanos) -> bool {
        std::mem::swap(&mut self.delivering, &mut *self.finished.borrow_mut());
        if self.delivering.is_empty() && self.outbound.is_empty() {
            return false;
        }
        let mut delivering = std::mem::take(&mut self.delivering);
        let each = Nanos(spent.0 / delivering.len().max(1) as u64);
        for mut done in delivering.drain(..) {
            self.tally.worked(done.flow, each);
            self.dispatch.done(std::mem::take(&mut done.note), &done.outcome);
            if done.home.index() == self.core {
                self.answer(now, done);
            } else {
                done.stamp = self.tally.ran_for(done.home, done.flow, done.stamp);
                self.outbound.push_back(done);
            }
        }
        self.delivering = delivering;
        while let Some(done) = self.outbound.pop_front() {
            if let Err(Message::Done(done)) = self.mailbox.send(done.home.index(), Message::Done(done)) {
                if planted::is(Bug::LoseMovedAnswer) {
                    continue;
                }
                self.outbound.push_front(done);
                break;
            }
        }
        true
    }

    /// Hands one outcome to its connection on this core.
    fn answer(&mut self, now: Nanos, done: Finished) {
        let link = self.links[done.link as usize].as_mut().expect("kept while its requests are out");
        self.tally.answered(done.flow, done.stamp, now + self.handle.busy().within_turn());
        link.connection.complete(now, done.slot, done.outcome);
        self.has_news(done.link);
    }

    /// Sends what links have to say, and closes those that are over. What there is no time for is left to the next turn.
    fn send(&mut self) -> bool {
        let (mut worked, mut closes) = (false, 0);
        let share = self.this_turn.share(self.unsent.len());
        let mut line = std::mem::take(&mut self.sending);
        line.form(self.unsent.drain(..).filter_map(|index| {
            let link = self.links[index as usize].as_ref()?;
            Some((index, self.this_turn.asks_much(link.talk)))
        }));
        let mut before = self.handle.busy().since_lap();
        while let Some(index) = line.next(self.this_turn.is_over_for_sending()) {
            let Some(link) = &mut self.links[index as usize] else { continue };
            if link.connection.is_closed() && closes >= CLOSES_AT_ONCE {
                self.unsent.push(index);
                worked = true;
                continue;
            }
            let sent = link.send(&mut self.sockets, &mut self.slices);
            let closed = self.close_if_over(index);
            closes += usize::from(closed);
            if sent.is_some() | closed {
                worked = true;
                line.had_part();
            }
            let of_link = self.handle.busy().lap(Stage::Target, worked).since(std::mem::take(&mut before));
            self.this_turn.sending = self.this_turn.sending + of_link;
            let Some(link) = &mut self.links[index as usize] else { continue };
            if let Some(bytes) = sent {
                let flow = link.flow.unwrap_or(OTHERS);
                self.tally.worked(flow, of_link);
                self.tally.bytes(flow, bytes);
                self.this_turn.took(&mut link.talk, of_link);
                link.send_quantum.learn(bytes, of_link, share);
            }
            link.listed = !link.socket_closed && !link.connection.outbox().is_empty();
            if link.listed {
                self.unsent.push(index);
            }
        }
        line.end();
        let reached = self.unsent.len();
        self.unsent.extend(line.rest());
        worked |= self.unsent.len() > reached;
        self.sending = line;
        worked
    }

    /// Closes a link's socket once its machine is over and its last bytes are out, and forgets the link
    /// once its last request has ended.
    fn close_if_over(&mut self, index: u32) -> bool {
        let Some(link) = &mut self.links[index as usize] else { return false };
        if !link.connection.is_closed() || !link.connection.outbox().is_empty() {
            return false;
        }
        let mut worked = false;
        if !link.socket_closed {
            link.socket_closed = true;
            self.sockets.close(link.socket);
            self.by_socket.remove(&link.socket);
            if let Some(untold) = self.gate.open(self.handle.now()) {
                log_end(&link.connection, untold);
            }
            worked = true;
        }
        if link.connection.in_flight() == 0 {
            if let Some(flow) = link.flow {
                self.scheduling.flows().leave(flow);
            }
            self.links[index as usize] = None;
            self.free_links.push(index);
            worked = true;
        }
        worked
    }

    /// Offers stalled machines their bytes again, in turn, while this turn has time.
    fn resume(&mut self, now: Nanos) -> bool {
        if self.draining || !self.jobs.is_empty() {
            return false;
        }
        let mut worked = false;
        let mut line = std::mem::take(&mut self.resuming);
        let stalled = self.links.iter().enumerate().filter_map(|(index, link)| {
            link.as_ref().is_some_and(Link::is_stalled).then_some((index as u32, true))
        });
        line.form(stalled);
        let share = self.this_turn.share(line.len());
        let mut before = self.handle.busy().since_lap();
        while self.jobs.is_empty()
            && let Some(index) = line.next(self.this_turn.is_over())
        {
            let Some(link) = &mut self.links[index as usize] else { continue };
            let bytes = link.resume(now, &self.pool, &mut self.requests);
            let flow = link.flow.unwrap_or(OTHERS);
            self.handle.busy().charge(Stage::Target, self.costs.target.times(self.requests.len()));
            let lap = self.handle.busy().lap(Stage::Target, bytes > 0);
            let mut of_link = lap.since(std::mem::take(&mut before));
            let Reactor { dispatch, jobs, mailbox, tally, requests, .. } = self;
            Admission { core: CoreId::at(self.core), dispatch, jobs, mailbox, tally, now }
                .admit(index, flow, requests);
            let started = self.begin_requests(now);
            of_link = of_link + self.handle.busy().lap(Stage::Kv, started);
            self.tally.worked(flow, of_link);
            if let Some(link) = &mut self.links[index as usize]
                && bytes > 0
            {
                link.quantum.learn(bytes, of_link, share);
                self.this_turn.took(&mut link.talk, of_link);
                line.had_part();
                worked = true;
            }
            self.this_turn.receiving = self.this_turn.receiving + of_link;
            self.has_news(index);
        }
        line.end();
        self.resuming = line;
        worked
    }

    /// Lets time pass for the connections.
    fn tick(&mut self, now: Nanos) -> bool {
        let mut worked = self.resume(now);
        let due = now >= self.next_tick;
        let mut next = Nanos::NEVER;
        for index in (0..self.links.len() as u32).filter(|_| due) {
            let Some(link) = &mut self.links[index as usize] else { continue };
            link.connection.tick(now);
            next = next.min(link.connection.next_deadline());
            if link.connection.is_closed() {
                worked |= link.give_up_when_late(now);
                next = next.min(now + TICK);
            }
            self.has_news(index);
        }
        if due {
            self.next_tick =
                if next == Nanos::NEVER { next } else { next.min(now + TICK).max(now + Nanos(1)) };
        }
        let stalled = self.links.iter().flatten().any(Link::is_stalled);
        let waiting = if stalled { now + Nanos::from_millis(1) } else { Nanos::NEVER };
        let scheduled = self.window_ends.min(self.dispatch.next_deadline(now));
        self.handle.want_turn_at(self.next_tick.min(waiting).min(scheduled));
        // What a tick or a resumed machine had to say goes out at once.
        worked | (!self.jobs.is_empty() && self.begin_requests(now)) | self.send()
    }
}

/// `untold` such lines were left out before this one.
fn log_end(connection: &Connection, untold: u64) {
    let (peer, host) = (connection.peer(), connection.host_nqn().unwrap_or("unknown"));
    if let Some(status) = connection.refused() {
        tracing::warn!(%peer, host, %status, untold, "a connect was refused");
        return;
    }
    match connection.closing_reason() {
        None | Some(Closing::Disconnected | Closing::PeerClosed | Closing::ControllerEnded) => {
            tracing::info!(%peer, host, untold, "disconnected");
        }
        Some(reason) => tracing::warn!(%peer, host, ?reason, untold, "connection refused or ended"),
    }
}
