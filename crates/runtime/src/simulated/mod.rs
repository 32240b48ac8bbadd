//! A deterministic discrete-event simulation in one thread: clock, hosts with reactors, network, disks, from one seed.
//!
//! ```text
//!        ┌ every reactor that is not busy runs iterations, in an order drawn from the seed,
//!        │ until none of them has work
//!   step ┤ the clock advances to the next arrival, completion, timer or end of busy time
//!        └ the events due at that time are applied
//! ```
//! In: hosts, links, disks, reactors as closures, faults by calls between steps. Out: the same bytes at the same times
//! for the same seed, on every machine. Production code runs in it unchanged, with [`SimSockets`] and a
//! [`SimDeviceQueue`] in place of the kernel's.
//!
//! Invariants: no real clock is read and no other randomness is drawn; an iteration that did work takes time (its
//! simulated cost, at least `iteration_cost_min`), so time always advances; operations and bytes of a stopped host never
//! complete as if it had survived. Tested in `tests/simulated.rs`.
//!
//! # Layout
//! - `ids`, `failure`, `event`: identifiers, host failures and events, as plain data.
//! - `event_queue`: the scheduled events by time.
//! - `net`, `sockets`: links, listeners, streams; and their [`crate::Sockets`].
//! - `disk`, `device_queue`: contents, a volatile write cache, power loss; and their [`crate::DeviceQueue`].
//! - `state`: all of these together, without the reactors.

mod device_queue;
mod disk;
mod event;
mod event_queue;
mod failure;
mod ids;
mod net;
mod sockets;
mod state;

pub use device_queue::SimDeviceQueue;
pub use disk::{SECTOR_BYTES, SimDiskConfig};
pub use failure::{CrashModel, HostFailure};
pub use ids::{SimDiskId, SimHostId, SimReactorId};
pub use net::SimLinkConfig;
pub use sockets::SimSockets;

use crate::device_queue::{DeviceSource, DeviceSourceKind};
use crate::reactor_handle::ReactorHandle;
use disk::SimDisks;
use event::SimEvent;
use event_queue::EventQueue;
use net::SimNetwork;
use octokv_base::{Nanos, Prng};
use state::{SharedSimState, SimState};
use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;

/// The configuration of a simulation.
#[derive(Clone, Copy, Debug)]
pub struct SimEnvConfig {
    /// The seed of all randomness.
    pub seed: u64,
    /// The minimum simulated time of an iteration that did work.
    pub iteration_cost_min: Nanos,
    /// The link between two hosts unless [`SimEnv::set_link`] replaces it.
    pub link: SimLinkConfig,
}

impl SimEnvConfig {
    /// The default configuration with a seed.
    pub fn new(seed: u64) -> SimEnvConfig {
        SimEnvConfig { seed, iteration_cost_min: Nanos(500), link: SimLinkConfig::default() }
    }
}

struct SimReactor {
    host: SimHostId,
    handle: ReactorHandle,
    run_iteration: Box<dyn FnMut(Nanos) -> bool>,
    /// The end of its last iteration: its core is busy until then.
    busy_until: Nanos,
}

struct SimEnvInner {
    config: SimEnvConfig,
    state: SharedSimState,
    /// `None` while the reactor runs an iteration, and once it is removed.
    reactors: RefCell<Vec<Option<SimReactor>>>,
    /// The generator of the reactors' order, and its buffer.
    order: RefCell<(Prng, Vec<usize>)>,
}

/// A simulation. Clones share it.
#[derive(Clone)]
pub struct SimEnv(Rc<SimEnvInner>);

impl SimEnv {
    /// A simulation at time zero, without hosts.
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
            state: SharedSimState::new(state),
            reactors: RefCell::new(Vec::new()),
            order: RefCell::new((random, Vec::new())),
        }))
    }

    /// The simulated time since the start.
    pub fn now(&self) -> Nanos {
        self.with(|state| state.now)
    }

    /// A hash over every event and iteration so far: equal for two runs if (and, but for collisions, only if) they were
    /// identical.
    pub fn trace_hash(&self) -> u64 {
        self.with(|state| state.trace_hash)
    }

    /// Adds a host, powered on, with its own address.
    pub fn add_host(&self) -> SimHostId {
        self.with(|state| state.network.add_host())
    }

    /// The IP address of a host.
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

    /// The source by which a [`SimDeviceQueue`] opens a disk.
    pub fn device_source(&self, disk: SimDiskId) -> DeviceSource {
        let config = self.with(|state| state.disks.config(disk));
        DeviceSource {
            name: format!("simulated disk {}", disk.0).into(),
            size_bytes: config.size_bytes,
            block_bytes: config.block_bytes,
            kind: DeviceSourceKind::Simulated(disk.0),
        }
    }

    /// The device queue of one core of a host.
    pub fn device_queue(&self, host: SimHostId) -> SimDeviceQueue {
        SimDeviceQueue::new(self.0.state.clone(), host)
    }

    /// Adds a reactor. `run_iteration` is called with the time and returns whether it did work. `handle` is the
    /// reactor's own: the simulation reads its deadlines and its simulated costs.
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

    /// Removes and drops a reactor. The host's streams and disks are not affected.
    pub fn remove_reactor(&self, reactor: SimReactorId) {
        let removed = self.0.reactors.borrow_mut()[reactor.0 as usize].take();
        if let Some(removed) = removed {
            removed.handle.shutdown();
        }
    }

    /// Fails a host: drops its reactors, ends its streams, and applies the failure to its disks. The host is down until
    /// [`SimEnv::start_host`].
    ///
    /// REQUIRES: not called from a reactor of that host.
    pub fn stop_host(&self, host: SimHostId, failure: HostFailure) {
        // First the streams, so that the drop of the reactors closes none of them orderly.
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

    /// Starts a stopped host, without reactors. Peers' streams that its power loss left open are reset.
    pub fn start_host(&self, host: SimHostId) {
        self.with(|state| {
            let SimState { now, events, network, .. } = state;
            network.start_host(host, *now, events);
        });
    }

    /// Sets the link between two hosts, in both directions. Bytes in flight keep their arrival times.
    pub fn set_link(&self, a: SimHostId, b: SimHostId, link: SimLinkConfig) {
        self.with(|state| state.network.set_link(a, b, link));
    }

    /// Partitions two hosts, or ends the partition. Meanwhile bytes are delayed, as by TCP's retransmissions.
    pub fn set_partitioned(&self, a: SimHostId, b: SimHostId, partitioned: bool) {
        self.with(|state| {
            let SimState { now, events, network, .. } = state;
            network.set_partitioned(a, b, partitioned, *now, events);
        });
    }

    /// Resets every stream between two hosts, at both ends immediately. Returns how many.
    pub fn reset_streams(&self, a: SimHostId, b: SimHostId) -> usize {
        self.with(|state| state.network.reset_streams(a, b))
    }

    /// Reads a disk's visible contents directly, as a reader after a clean shutdown sees them.
    pub fn read_disk(&self, disk: SimDiskId, offset: u64, into: &mut [u8]) {
        self.with(|state| state.disks.read_image(disk, offset, into));
    }

    /// Changes a disk's durable contents directly: corruption, or a prepared image.
    pub fn write_disk(&self, disk: SimDiskId, offset: u64, bytes: &[u8]) {
        self.with(|state| state.disks.write_image(disk, offset, bytes));
    }

    /// The number of writes of a disk that completed and are not flushed.
    pub fn unflushed_write_count(&self, disk: SimDiskId) -> usize {
        self.with(|state| state.disks.unflushed_write_count(disk))
    }

    /// Schedules `action` at `time`, or now if that has passed. It runs between reactor iterations.
    pub fn schedule_at(&self, time: Nanos, action: impl FnOnce() + 'static) {
        self.with(|state| state.events.schedule(time.max(state.now), SimEvent::Call(Box::new(action))));
    }

    fn with<T>(&self, action: impl FnOnce(&mut SimState) -> T) -> T {
        self.0.state.with(action)
    }

    /// Runs the reactors until none has work, advances the clock to the next event, at most to `limit`, and applies the
    /// events due then. False if there is no event up to `limit`; the clock is then at `limit` (unchanged for
    /// [`Nanos::NEVER`]).
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
            // The callback may use the simulation, so nothing is borrowed here.
            if let Some(call) = call {
                call();
            }
        }
        true
    }

    /// Runs the simulation up to `deadline`.
    pub fn run_until(&self, deadline: Nanos) {
        while self.step(deadline) {}
        self.run_ready_reactors();
    }

    /// Runs until `condition` is true, at most up to `deadline`. Returns the last value of `condition`.
    pub fn run_until_true(&self, deadline: Nanos, mut condition: impl FnMut() -> bool) -> bool {
        while !condition() {
            if !self.step(deadline) {
                self.run_ready_reactors();
                return condition();
            }
        }
        true
    }

    /// Runs rounds until no idle reactor has work.
    fn run_ready_reactors(&self) {
        let now = self.now();
        let mut rounds = 0u32;
        while self.run_round(now) {
            rounds += 1;
            assert!(rounds < ROUNDS_MAX, "at {now:?} reactors make progress without time advancing");
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
        assert!(reactors[index].is_none(), "reactor slot {index} is occupied");
        reactors[index] = Some(reactor);
        did_work
    }

    fn next_event_time(&self) -> Nanos {
        let (now, mut next) = self.with(|state| (state.now, state.events.next_due()));
        for reactor in self.0.reactors.borrow().iter().flatten() {
            if reactor.busy_until > now {
                next = next.min(reactor.busy_until);
            } else {
                // A deadline that passed without work is retried a little later.
                next = next.min(reactor.handle.next_deadline().max(now + OVERDUE_RETRY_DELAY));
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

/// The delay before a reactor with an overdue deadline runs again.
const OVERDUE_RETRY_DELAY: Nanos = Nanos(1_000);
/// More rounds than this at one time are a livelock.
const ROUNDS_MAX: u32 = 1_000_000;
