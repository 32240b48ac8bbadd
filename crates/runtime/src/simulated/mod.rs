//! A world in one thread: a clock that jumps, hosts with reactors, links, disks, all from one seed.
//!
//! ```text
//!        ┌ every reactor that is not busy takes turns, in an order drawn from the seed,
//!        │ until none of them has anything to do
//!   step ┤ the clock jumps to the next arrival, device answer, timer or end of work
//!        └ what is due then, happens
//! ```
//! In: hosts, links, disks, reactors as closures, faults by calls between steps. Out: the same bytes
//! and the same times for the same seed, on every machine. Production code runs in it unchanged: it is
//! given [`VirtualSockets`] and a [`VirtualQueue`] in place of the kernel's.
//!
//! Invariants: nothing here reads a real clock or draws other randomness; a turn that did something
//! takes time (what it charged, at least `turn_cost`), so time always moves on; what a stopped host had
//! in flight never reaches anybody as if it had lived.
//!
//! # Layout
//! - `net`, `sockets`: links, listeners, streams; and the seam's face on them.
//! - `disk`, `queue`: contents, a volatile write cache, power cuts; and the seam's face on them.
//! - `agenda`: what will happen, in order.

mod device_queue;
mod disk;
mod event_queue;
mod net;
mod sockets;

pub use device_queue::VirtualQueue;
pub use disk::{CrashPlan, DiskId, DiskSettings, SECTOR_BYTES};
pub use net::LinkSettings;
pub use sockets::VirtualSockets;

use crate::device_queue::{Media, MediaKind};
use crate::reactor_handle::Handle;
use disk::Disks;
use event_queue::{Agenda, Event};
use net::Net;
use octokv_base::prng::mix;
use octokv_base::{Nanos, Random};
use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;

/// One machine of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(pub u32);

/// One reactor of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReactorId(pub u32);

/// What a world is made from.
#[derive(Clone, Copy, Debug)]
pub struct WorldSettings {
    /// Everything that is drawn is drawn from it.
    pub seed: u64,
    /// What a turn that did something costs at least.
    pub turn_cost: Nanos,
    /// The link between hosts unless another is set.
    pub link: LinkSettings,
}

impl WorldSettings {
    /// The usual world of a seed.
    pub fn new(seed: u64) -> WorldSettings {
        WorldSettings { seed, turn_cost: Nanos(500), link: LinkSettings::default() }
    }
}

/// How a host ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The process is killed: the kernel lives, finishes its disk operations and resets its streams.
    Killed,
    /// Power is cut: peers hear nothing until the host is back, and disks keep what the plan says.
    PowerCut(CrashPlan),
}

struct Reactor {
    host: HostId,
    handle: Handle,
    turn: Box<dyn FnMut(Nanos) -> bool>,
    /// Its core works until then.
    busy_until: Nanos,
}

pub(crate) struct State {
    pub(crate) now: Nanos,
    pub(crate) agenda: Agenda,
    pub(crate) net: Net,
    pub(crate) disks: Disks,
    trace: u64,
}

impl State {
    /// Mixes a fact into the trace.
    pub(crate) fn note(&mut self, fact: u64) {
        self.trace = mix(self.trace ^ fact);
    }
}

/// All of the world but its reactors, which hold this and are held by the world.
#[derive(Clone)]
pub(crate) struct Shared(Rc<RefCell<State>>);

impl Shared {
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        act(&mut self.0.borrow_mut())
    }
}

struct Inner {
    settings: WorldSettings,
    shared: Shared,
    /// A reactor is out of its place while it takes its turn.
    reactors: RefCell<Vec<Option<Reactor>>>,
    order: RefCell<(Random, Vec<usize>)>,
}

/// The world. Cloning gives another hold on the same one.
#[derive(Clone)]
pub struct VirtualWorld(Rc<Inner>);

impl VirtualWorld {
    /// An empty world at time zero.
    pub fn new(settings: WorldSettings) -> VirtualWorld {
        let mut random = Random::new(settings.seed);
        let state = State {
            now: Nanos::ZERO,
            agenda: Agenda::default(),
            net: Net::new(random.fork(), settings.link),
            disks: Disks::new(random.fork()),
            trace: settings.seed,
        };
        VirtualWorld(Rc::new(Inner {
            settings,
            shared: Shared(Rc::new(RefCell::new(state))),
            reactors: RefCell::new(Vec::new()),
            order: RefCell::new((random, Vec::new())),
        }))
    }

    /// The time.
    pub fn now(&self) -> Nanos {
        self.with(|state| state.now)
    }

    /// A number that two runs share exactly when everything that happened in them was the same.
    pub fn trace(&self) -> u64 {
        self.with(|state| state.trace)
    }

    /// A new machine, on, with an address of its own.
    pub fn add_host(&self) -> HostId {
        self.with(|state| state.net.add_host())
    }

    /// A host's address.
    pub fn address(&self, host: HostId) -> IpAddr {
        self.with(|state| state.net.address(host))
    }

    /// The sockets of one core of a host.
    pub fn sockets(&self, host: HostId) -> VirtualSockets {
        VirtualSockets::new(self.0.shared.clone(), host)
    }

    /// A new, empty disk on a host.
    pub fn add_disk(&self, host: HostId, settings: DiskSettings) -> DiskId {
        self.with(|state| state.disks.add(host, settings))
    }

    /// What to open on a [`VirtualQueue`] to use a disk.
    pub fn media(&self, disk: DiskId) -> Media {
        let settings = self.with(|state| state.disks.settings(disk));
        Media {
            name: format!("virtual disk {}", disk.0).into(),
            size_bytes: settings.size_bytes,
            block_bytes: settings.block_bytes,
            kind: MediaKind::Virtual(disk.0),
        }
    }

    /// The device queue of one core of a host.
    pub fn queue(&self, host: HostId) -> VirtualQueue {
        VirtualQueue::new(self.0.shared.clone(), host)
    }

    /// Adds a reactor: `turn` is called with the time and says whether it did anything. `handle` is the
    /// reactor's own: its deadlines and charged costs are the world's business, too.
    pub fn add_reactor(
        &self,
        host: HostId,
        handle: Handle,
        turn: impl FnMut(Nanos) -> bool + 'static,
    ) -> ReactorId {
        let mut reactors = self.0.reactors.borrow_mut();
        reactors.push(Some(Reactor { host, handle, turn: Box::new(turn), busy_until: Nanos::ZERO }));
        ReactorId((reactors.len() - 1) as u32)
    }

    /// Takes a reactor away, dropping what it holds; nothing is reset or lost by that alone.
    pub fn remove_reactor(&self, reactor: ReactorId) {
        let removed = self.0.reactors.borrow_mut()[reactor.0 as usize].take();
        if let Some(removed) = removed {
            removed.handle.shutdown();
        }
    }

    /// Ends a host: its reactors are dropped, its streams end, its disks settle. It is off until
    /// [`VirtualWorld::start_host`]. Not to be called from a reactor of that host.
    pub fn stop_host(&self, host: HostId, stop: Stop) {
        // First the streams, so that dropping the reactors closes nothing in good order.
        self.with(|state| {
            state.note(0x5709 ^ u64::from(host.0));
            let State { now, agenda, net, disks, .. } = state;
            net.stop_host(host, matches!(stop, Stop::Killed), *now, agenda);
            disks.stop_host(host, stop);
        });
        let count = self.0.reactors.borrow().len();
        for index in 0..count {
            let mut reactors = self.0.reactors.borrow_mut();
            let gone = reactors[index].take_if(|reactor| reactor.host == host);
            drop(reactors);
            if let Some(gone) = gone {
                gone.handle.shutdown();
            }
        }
    }

    /// Turns a stopped host on again, without reactors. Streams that its power cut left hanging end.
    pub fn start_host(&self, host: HostId) {
        self.with(|state| {
            let State { now, agenda, net, .. } = state;
            net.start_host(host, *now, agenda);
        });
    }

    /// Sets the link from one host to another, in both directions. Bytes under way keep their times.
    pub fn set_link(&self, a: HostId, b: HostId, link: LinkSettings) {
        self.with(|state| state.net.set_link(a, b, link));
    }

    /// Cuts or mends the link between two hosts. While cut, bytes wait as in TCP's retransmissions.
    pub fn set_partitioned(&self, a: HostId, b: HostId, partitioned: bool) {
        self.with(|state| {
            let State { now, agenda, net, .. } = state;
            net.set_partitioned(a, b, partitioned, *now, agenda);
        });
    }

    /// Resets every stream between two hosts, at once and for both. Gives how many.
    pub fn reset_streams(&self, a: HostId, b: HostId) -> usize {
        self.with(|state| state.net.reset_streams(a, b))
    }

    /// Reads a disk's contents past every queue, as a reader after a clean shutdown would see them.
    pub fn read_disk(&self, disk: DiskId, offset: u64, into: &mut [u8]) {
        self.with(|state| state.disks.read_image(disk, offset, into));
    }

    /// Changes a disk's contents past every queue and cache: rot, or a prepared image.
    pub fn write_disk(&self, disk: DiskId, offset: u64, bytes: &[u8]) {
        self.with(|state| state.disks.write_image(disk, offset, bytes));
    }

    /// How many writes a disk has completed and not yet been told to flush.
    pub fn unflushed_writes(&self, disk: DiskId) -> usize {
        self.with(|state| state.disks.unflushed(disk))
    }

    /// Does something at a time, now at the earliest, between the turns of reactors.
    pub fn at(&self, time: Nanos, act: impl FnOnce() + 'static) {
        self.with(|state| state.agenda.set(time.max(state.now), Event::Call(Box::new(act))));
    }

    fn with<T>(&self, act: impl FnOnce(&mut State) -> T) -> T {
        self.0.shared.with(act)
    }

    /// Lets reactors work until none has anything to do now, then lets time pass to whatever comes
    /// next, at most to `limit`, and lets that happen. False when nothing is to come before `limit`;
    /// the clock then stands at `limit` (where it stood, for [`Nanos::NEVER`]).
    pub fn step(&self, limit: Nanos) -> bool {
        self.settle();
        let next = self.next_time();
        if next > limit || next == Nanos::NEVER {
            if limit != Nanos::NEVER {
                self.with(|state| state.now = state.now.max(limit));
            }
            return false;
        }
        self.with(|state| state.now = next);
        while let Some(event) = self.with(|state| state.agenda.due(next)) {
            let call = self.with(|state| {
                state.note(next.0);
                state.happen(event)
            });
            // What it does may touch anything of the world.
            if let Some(call) = call {
                call();
            }
        }
        true
    }

    /// Runs to a point in time.
    pub fn run_until(&self, deadline: Nanos) {
        while self.step(deadline) {}
        self.settle();
    }

    /// Runs until `done` says so, at most to `deadline`. Gives what `done` said last.
    pub fn run_while_not(&self, deadline: Nanos, mut done: impl FnMut() -> bool) -> bool {
        while !done() {
            if !self.step(deadline) {
                self.settle();
                return done();
            }
        }
        true
    }

    /// Turns, until no reactor that has time has anything to do.
    fn settle(&self) {
        let now = self.now();
        let mut rounds = 0u32;
        while self.round(now) {
            rounds += 1;
            assert!(rounds < ROUNDS_MAX, "at {now:?} the reactors are busy without time passing");
        }
    }

    fn round(&self, now: Nanos) -> bool {
        let order = {
            let (random, order) = &mut *self.0.order.borrow_mut();
            order.clear();
            order.extend(0..self.0.reactors.borrow().len());
            for last in (1..order.len()).rev() {
                order.swap(last, random.below(last as u64 + 1) as usize);
            }
            std::mem::take(order)
        };
        let mut any = false;
        for &index in &order {
            any |= self.turn(index, now);
        }
        self.0.order.borrow_mut().1 = order;
        any
    }

    fn turn(&self, index: usize, now: Nanos) -> bool {
        let taken = self.0.reactors.borrow_mut()[index].take_if(|reactor| reactor.busy_until <= now);
        let Some(mut reactor) = taken else { return false };
        let busy = (reactor.turn)(now);
        let charged = reactor.handle.busy().take_charged();
        if busy {
            let cost = charged.max(self.0.settings.turn_cost);
            reactor.busy_until = now + cost;
            self.with(|state| state.note(index as u64 ^ cost.0.rotate_left(32)));
        }
        let mut reactors = self.0.reactors.borrow_mut();
        assert!(reactors[index].is_none(), "a reactor took another's place");
        reactors[index] = Some(reactor);
        busy
    }

    fn next_time(&self) -> Nanos {
        let state = self.0.shared.0.borrow();
        let mut next = state.agenda.next();
        for reactor in self.0.reactors.borrow().iter().flatten() {
            if reactor.busy_until > state.now {
                next = next.min(reactor.busy_until);
            } else {
                // A deadline that its reactor did not answer is asked for again a little later.
                next = next.min(reactor.handle.next_deadline().max(state.now + LATE));
            }
        }
        next
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        for reactor in self.reactors.get_mut().drain(..).flatten() {
            reactor.handle.shutdown();
        }
    }
}

const LATE: Nanos = Nanos(1_000);
const ROUNDS_MAX: u32 = 1_000_000;

impl State {
    /// Carries an event out; gives back what is not the world's own to do.
    fn happen(&mut self, event: Event) -> Option<Box<dyn FnOnce()>> {
        let State { now, agenda, net, disks, trace } = self;
        let fact = match event {
            Event::Net(event) => net.happen(event, *now, agenda),
            Event::Disk(event) => disks.happen(event),
            Event::Call(call) => return Some(call),
        };
        *trace = mix(*trace ^ fact);
        None
    }
}
