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
//! given [`SimSockets`] and a [`SimDeviceQueue`] in place of the kernel's.
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

pub use device_queue::SimDeviceQueue;
pub use disk::{CrashModel, SECTOR_BYTES, SimDiskConfig, SimDiskId};
pub use net::SimLinkConfig;
pub use sockets::SimSockets;

use crate::device_queue::{DeviceSource, DeviceSourceKind};
use crate::reactor_handle::ReactorHandle;
use disk::SimDisks;
use event_queue::{EventQueue, SimEvent};
use net::SimNetwork;
use octokv_base::prng::mix64;
use octokv_base::{Nanos, Prng};
use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;

/// One machine of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimHostId(pub u32);

/// One reactor of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SimReactorId(pub u32);

/// What a world is made from.
#[derive(Clone, Copy, Debug)]
pub struct SimEnvConfig {
    /// Everything that is drawn is drawn from it.
    pub seed: u64,
    /// What a turn that did something costs at least.
    pub iteration_cost_min: Nanos,
    /// The link between hosts unless another is set.
    pub link: SimLinkConfig,
}

impl SimEnvConfig {
    /// The usual world of a seed.
    pub fn new(seed: u64) -> SimEnvConfig {
        SimEnvConfig { seed, iteration_cost_min: Nanos(500), link: SimLinkConfig::default() }
    }
}

/// How a host ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostFailure {
    /// The process is killed: the kernel lives, finishes its disk operations and resets its streams.
    ProcessKilled,
    /// Power is cut: peers hear nothing until the host is back, and disks keep what the plan says.
    PowerLoss(CrashModel),
}

struct SimReactor {
    host: SimHostId,
    handle: ReactorHandle,
    run_iteration: Box<dyn FnMut(Nanos) -> bool>,
    /// Its core works until then.
    busy_until: Nanos,
}

pub(crate) struct SimState {
    pub(crate) now: Nanos,
    pub(crate) events: EventQueue,
    pub(crate) network: SimNetwork,
    pub(crate) disks: SimDisks,
    trace_hash: u64,
}

impl SimState {
    /// Mixes a fact into the trace.
    pub(crate) fn add_to_trace(&mut self, fact: u64) {
        self.trace_hash = mix64(self.trace_hash ^ fact);
    }
}

/// All of the world but its reactors, which hold this and are held by the world.
#[derive(Clone)]
pub(crate) struct SharedSimState(Rc<RefCell<SimState>>);

impl SharedSimState {
    pub(crate) fn with<T>(&self, action: impl FnOnce(&mut SimState) -> T) -> T {
        action(&mut self.0.borrow_mut())
    }
}

struct SimEnvInner {
    config: SimEnvConfig,
    state: SharedSimState,
    /// A reactor is out of its place while it takes its turn.
    reactors: RefCell<Vec<Option<SimReactor>>>,
    order: RefCell<(Prng, Vec<usize>)>,
}

/// The world. Cloning gives another hold on the same one.
#[derive(Clone)]
pub struct SimEnv(Rc<SimEnvInner>);

impl SimEnv {
    /// An empty world at time zero.
    pub fn new(config: SimEnvConfig) -> SimEnv {
        let mut random = Prng::new(config.seed);
        let state = SimState {
            now: Nanos::ZERO,
            events: EventQueue::default(),
            network: SimNetwork::new(random.fork(), config.link),
            disks: SimDisks::new(random.fork()),
            trace_hash: config.seed,
        };
        SimEnv(Rc::new(SimEnvInner {
            config,
            state: SharedSimState(Rc::new(RefCell::new(state))),
            reactors: RefCell::new(Vec::new()),
            order: RefCell::new((random, Vec::new())),
        }))
    }

    /// The time.
    pub fn now(&self) -> Nanos {
        self.with(|state| state.now)
    }

    /// A number that two runs share exactly when everything that happened in them was the same.
    pub fn trace_hash(&self) -> u64 {
        self.with(|state| state.trace_hash)
    }

    /// A new machine, on, with an address of its own.
    pub fn add_host(&self) -> SimHostId {
        self.with(|state| state.network.add_host())
    }

    /// A host's address.
    pub fn address(&self, host: SimHostId) -> IpAddr {
        self.with(|state| state.network.address(host))
    }

    /// The sockets of one core of a host.
    pub fn sockets(&self, host: SimHostId) -> SimSockets {
        SimSockets::new(self.0.state.clone(), host)
    }

    /// A new, empty disk on a host.
    pub fn add_disk(&self, host: SimHostId, config: SimDiskConfig) -> SimDiskId {
        self.with(|state| state.disks.add(host, config))
    }

    /// What to open on a [`SimDeviceQueue`] to use a disk.
    pub fn device_source(&self, disk: SimDiskId) -> DeviceSource {
        let config = self.with(|state| state.disks.config(disk));
        DeviceSource {
            name: format!("virtual disk {}", disk.0).into(),
            size_bytes: config.size_bytes,
            block_bytes: config.block_bytes,
            kind: DeviceSourceKind::Simulated(disk.0),
        }
    }

    /// The device queue of one core of a host.
    pub fn device_queue(&self, host: SimHostId) -> SimDeviceQueue {
        SimDeviceQueue::new(self.0.state.clone(), host)
    }

    /// Adds a reactor: `turn` is called with the time and says whether it did anything. `handle` is the
    /// reactor's own: its deadlines and charged costs are the world's business, too.
    pub fn add_reactor(
        &self,
        host: SimHostId,
        handle: ReactorHandle,
        run_iteration: impl FnMut(Nanos) -> bool + 'static,
    ) -> SimReactorId {
        let mut reactors = self.0.reactors.borrow_mut();
        reactors.push(Some(SimReactor {
            host,
            handle,
            run_iteration: Box::new(run_iteration),
            busy_until: Nanos::ZERO,
        }));
        SimReactorId((reactors.len() - 1) as u32)
    }

    /// Takes a reactor away, dropping what it holds; nothing is reset or lost by that alone.
    pub fn remove_reactor(&self, reactor: SimReactorId) {
        let removed = self.0.reactors.borrow_mut()[reactor.0 as usize].take();
        if let Some(removed) = removed {
            removed.handle.shutdown();
        }
    }

    /// Ends a host: its reactors are dropped, its streams end, its disks settle. It is off until
    /// [`SimEnv::start_host`]. Not to be called from a reactor of that host.
    pub fn stop_host(&self, host: SimHostId, failure: HostFailure) {
        // First the streams, so that dropping the reactors closes nothing in good order.
        self.with(|state| {
            state.add_to_trace(0x5709 ^ u64::from(host.0));
            let SimState { now, events, network, disks, .. } = state;
            network.stop_host(host, matches!(failure, HostFailure::ProcessKilled), *now, events);
            disks.stop_host(host, failure);
        });
        let count = self.0.reactors.borrow().len();
        for index in 0..count {
            let mut reactors = self.0.reactors.borrow_mut();
            let removed = reactors[index].take_if(|reactor| reactor.host == host);
            drop(reactors);
            if let Some(removed) = removed {
                removed.handle.shutdown();
            }
        }
    }

    /// Turns a stopped host on again, without reactors. Streams that its power cut left hanging end.
    pub fn start_host(&self, host: SimHostId) {
        self.with(|state| {
            let SimState { now, events, network, .. } = state;
            network.start_host(host, *now, events);
        });
    }

    /// Sets the link from one host to another, in both directions. Bytes under way keep their times.
    pub fn set_link(&self, a: SimHostId, b: SimHostId, link: SimLinkConfig) {
        self.with(|state| state.network.set_link(a, b, link));
    }

    /// Cuts or mends the link between two hosts. While cut, bytes wait as in TCP's retransmissions.
    pub fn set_partitioned(&self, a: SimHostId, b: SimHostId, partitioned: bool) {
        self.with(|state| {
            let SimState { now, events, network, .. } = state;
            network.set_partitioned(a, b, partitioned, *now, events);
        });
    }

    /// Resets every stream between two hosts, at once and for both. Gives how many.
    pub fn reset_streams(&self, a: SimHostId, b: SimHostId) -> usize {
        self.with(|state| state.network.reset_streams(a, b))
    }

    /// Reads a disk's contents past every queue, as a reader after a clean shutdown would see them.
    pub fn read_disk(&self, disk: SimDiskId, offset: u64, into: &mut [u8]) {
        self.with(|state| state.disks.read_image(disk, offset, into));
    }

    /// Changes a disk's contents past every queue and cache: rot, or a prepared image.
    pub fn write_disk(&self, disk: SimDiskId, offset: u64, bytes: &[u8]) {
        self.with(|state| state.disks.write_image(disk, offset, bytes));
    }

    /// How many writes a disk has completed and not yet been told to flush.
    pub fn unflushed_write_count(&self, disk: SimDiskId) -> usize {
        self.with(|state| state.disks.unflushed_write_count(disk))
    }

    /// Does something at a time, now at the earliest, between the turns of reactors.
    pub fn schedule_at(&self, time: Nanos, action: impl FnOnce() + 'static) {
        self.with(|state| state.events.schedule(time.max(state.now), SimEvent::Call(Box::new(action))));
    }

    fn with<T>(&self, action: impl FnOnce(&mut SimState) -> T) -> T {
        self.0.state.with(action)
    }

    /// Lets reactors work until none has anything to do now, then lets time pass to whatever comes
    /// next, at most to `limit`, and lets that happen. False when nothing is to come before `limit`;
    /// the clock then stands at `limit` (where it stood, for [`Nanos::NEVER`]).
    pub fn step(&self, limit: Nanos) -> bool {
        self.run_ready_reactors();
        let next = self.next_event_time();
        if next > limit || next == Nanos::NEVER {
            if limit != Nanos::NEVER {
                self.with(|state| state.now = state.now.max(limit));
            }
            return false;
        }
        self.with(|state| state.now = next);
        while let Some(event) = self.with(|state| state.events.pop_due(next)) {
            let call = self.with(|state| {
                state.add_to_trace(next.0);
                state.apply_event(event)
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
        self.run_ready_reactors();
    }

    /// Runs until `done` says so, at most to `deadline`. Gives what `done` said last.
    pub fn run_until_true(&self, deadline: Nanos, mut condition: impl FnMut() -> bool) -> bool {
        while !condition() {
            if !self.step(deadline) {
                self.run_ready_reactors();
                return condition();
            }
        }
        true
    }

    /// Turns, until no reactor that has time has anything to do.
    fn run_ready_reactors(&self) {
        let now = self.now();
        let mut rounds = 0u32;
        while self.run_round(now) {
            rounds += 1;
            assert!(rounds < ROUNDS_MAX, "at {now:?} the reactors are busy without time passing");
        }
    }

    fn run_round(&self, now: Nanos) -> bool {
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
            any |= self.run_reactor(index, now);
        }
        self.0.order.borrow_mut().1 = order;
        any
    }

    fn run_reactor(&self, index: usize, now: Nanos) -> bool {
        let taken = self.0.reactors.borrow_mut()[index].take_if(|reactor| reactor.busy_until <= now);
        let Some(mut reactor) = taken else { return false };
        let did_work = (reactor.run_iteration)(now);
        let simulated = reactor.handle.cpu_time().take_simulated();
        if did_work {
            let cost = simulated.max(self.0.config.iteration_cost_min);
            reactor.busy_until = now + cost;
            self.with(|state| state.add_to_trace(index as u64 ^ cost.0.rotate_left(32)));
        }
        let mut reactors = self.0.reactors.borrow_mut();
        assert!(reactors[index].is_none(), "a reactor took another's place");
        reactors[index] = Some(reactor);
        did_work
    }

    fn next_event_time(&self) -> Nanos {
        let state = self.0.state.0.borrow();
        let mut next = state.events.next_due();
        for reactor in self.0.reactors.borrow().iter().flatten() {
            if reactor.busy_until > state.now {
                next = next.min(reactor.busy_until);
            } else {
                // A deadline that its reactor did not answer is asked for again a little later.
                next = next.min(reactor.handle.next_deadline().max(state.now + OVERDUE_RETRY_DELAY));
            }
        }
        next
    }
}

impl Drop for SimEnvInner {
    fn drop(&mut self) {
        for reactor in self.reactors.get_mut().drain(..).flatten() {
            reactor.handle.shutdown();
        }
    }
}

const OVERDUE_RETRY_DELAY: Nanos = Nanos(1_000);
const ROUNDS_MAX: u32 = 1_000_000;

impl SimState {
    /// Carries an event out; gives back what is not the world's own to do.
    fn apply_event(&mut self, event: SimEvent) -> Option<Box<dyn FnOnce()>> {
        let SimState { now, events, network, disks, trace_hash } = self;
        let fact = match event {
            SimEvent::Net(event) => network.apply_event(event, *now, events),
            SimEvent::Disk(event) => disks.apply_event(event),
            SimEvent::Call(call) => return Some(call),
        };
        *trace_hash = mix64(*trace_hash ^ fact);
        None
    }
}
