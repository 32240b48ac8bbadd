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
//! The first core accepts and deals connections to all cores in turn, admin queues that are known for such left out.
//!
//! # Layout
//! - this file: what a core is made of, and its turn.
//! - `intake`: what comes in: connections, messages of other cores, bytes, requests.
//! - `replies`: what goes out: outcomes, bytes, the ends of links.

mod egress;
mod ingress;

use crate::bug_injection::{self, Bug};
use crate::connection_io::Link;
use crate::connection_queue::Line;
use crate::core_metrics::{Stamp, Tally};
use crate::log_limiter::Gate;
use crate::monitor::{Scheduling, Watch};
use crate::namespace_table::{Removed, Stores};
use crate::request_queue::{Job, Jobs};
use crate::request_scheduler::{Dispatch, Note};
use crate::time_budget::Turn;
use octokv_base::map::Map;
use octokv_base::{NamespaceId, Nanos, Pool};
use octokv_engine::Engine;
use octokv_nvmf::{Outcome, Request, Target};
use octokv_runtime::{
    Channel, Desk, DetachedSocket, Handle, ListenerId, Mailbox, SocketId, Sockets, Stage, Workers,
};
use octokv_sched::{CoreId, FlowId};
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

/// Requests of one flow that wait for their turn hold at most about this part of a core's buffers.
const HELD_PART: usize = 8;

/// Of so many connections the network's round trip is asked for at the end of a window.
const TRIPS_PER_WINDOW: usize = 32;

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
    /// How many connections were dealt to cores, by this one.
    dealt: usize,
    next_tick: Nanos,
    draining: bool,
    /// What is told of hosts that come and go.
    gate: Gate,
    scheduling: Arc<Scheduling>,
    /// The number of the last window that this core knows.
    window: u64,
    /// From which link on the network's round trips are asked for next.
    next_trip: usize,
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
                if bug_injection::is(Bug::RemoveDropsRequests) && stores.get(namespace).is_none() {
                    continue;
                }
                if bug_injection::is(Bug::RemoveRefusesRequests) && stores.get(namespace).is_none() {
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
        dispatch: Dispatch::new(core, cores, parts.requests_max, parts.pool.budget_bytes() / HELD_PART),
        outbound: VecDeque::new(),
        window: 0,
        next_trip: 0,
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
        dealt: 0,
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
        self.dispatch.turn(now);
        self.look_at_window(now);
        worked |= self.refuse_removed();
        let mut target = self.accept(now);
        target |= self.take_messages(now);
        if !self.jobs.is_empty() {
            // What other cores sent does not keep this one's own hosts from being heard.
            self.handle.busy().lap(Stage::Target, target);
            let begun = self.begin_requests(now);
            self.handle.busy().lap(Stage::Kv, begun);
        }
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
        self.dispatch.turned(worked);
        worked
    }

    fn sockets(&mut self) -> &mut S {
        &mut self.sockets
    }

    fn drain(&mut self) {
        self.draining = true;
        self.dispatch.drain(&mut self.jobs);
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
        if !self.draining {
            self.dispatch.choose(&window, &mut self.jobs, now);
        }
        // A system call each: some of them at a time, in turn.
        let (count, from) = (self.links.len(), self.next_trip);
        self.next_trip = (from + TRIPS_PER_WINDOW).checked_rem(count).unwrap_or(0);
        for link in self.links.iter().cycle().skip(from).take(count.min(TRIPS_PER_WINDOW)).flatten() {
            if let Some(flow) = link.flow
                && let Some(round_trip) = self.sockets.round_trip(link.socket)
            {
                self.tally.round_trip(flow, round_trip);
            }
        }
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
