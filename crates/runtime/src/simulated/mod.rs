//! A deterministic discrete-event simulation in one thread: clock, hosts with reactors, network, disks, from one seed.
//!
//! ```text
//!        ┌ every reactor that is due runs an iteration, in an order drawn from the seed: those that were woken, whose
//!        │ deadline has come, or whose busy time has ended; until none is due
//!   step ┤ the clock advances to the next event or reactor
//!        └ the events due at that time are applied
//! ```
//! A reactor that did work runs again at the end of its busy time. One that found nothing goes to sleep as on the kernel,
//! by [`crate::CoreWaker::try_sleep`], until its deadline or until it is woken: by an edge of its sockets, a completion of
//! its device queue, or a `notify`. So a wake-up that the production code forgets is a hang here, not a late iteration,
//! and an idle node costs no more than its events. Code of an experiment that changes what a reactor sees notifies it.
//!
//! In: hosts, links, disks, reactors as closures, faults by calls between steps. Out: the same bytes at the same times
//! for the same seed, on every machine. Production code runs in it unchanged, with [`SimSockets`] and a
//! [`SimDeviceQueue`] in place of the kernel's.
//!
//! Invariants: no real clock is read and no other randomness is drawn; an iteration that did work takes time (its
//! simulated cost, at least `iteration_cost_min`), so time always advances; operations and bytes of a stopped host never
//! complete as if it had survived. Tested in `tests/simulated.rs` and `tests/run_queue.rs`.
//!
//! # Layout
//! - `ids`, `failure`, `event`: identifiers, host failures and events, as plain data.
//! - `event_queue`: the scheduled events by time. `run_queue`: the reactors by time, and their drivers.
//! - `link`, `net`, `sockets`: links, listeners, streams; and their [`crate::Sockets`].
//! - `clock`: a host's clock.
//! - `disk`, `device_queue`: contents, a volatile write cache, power loss; and their [`crate::DeviceQueue`].
//! - `state`: all of these together, without the reactors.

mod clock;
mod device_queue;
mod disk;
mod event;
mod event_queue;
mod failure;
mod ids;
mod link;
mod net;
mod run_queue;
mod sockets;
mod state;

pub use clock::{CLOCK_DRIFT_MAX_PPM, SimClock};
pub use device_queue::SimDeviceQueue;
pub use disk::{SECTOR_BYTES, SimDiskConfig};
pub use failure::{CrashModel, HostFailure};
pub use ids::{SimDiskId, SimHostId, SimReactorId};
pub use link::SimLinkConfig;
pub use sockets::SimSockets;

use crate::device_queue::{DeviceSource, DeviceSourceKind};
use crate::reactor_handle::ReactorHandle;
use crate::wake_list::WakeList;
use disk::SimDisks;
use event::SimEvent;
use event_queue::EventQueue;
use net::SimNetwork;
use octokv_base::{Nanos, Prng};
use run_queue::{DriverOwners, RunQueue};
use state::{SharedSimState, SimState};
use std::cell::RefCell;
use std::net::IpAddr;
use std::rc::Rc;
use std::sync::Arc;

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
    is_asleep: bool,
    /// Whether it was due while its host was paused.
    was_skipped: bool,
    iterations: IterationCounts,
}

/// What the simulation sets of a host besides its network and disks.
#[derive(Clone, Copy, Default)]
struct HostControl {
    clock: SimClock,
    is_paused: bool,
}

/// The iterations of a reactor so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IterationCounts {
    /// Those that did work.
    pub busy: u64,
    /// Those that found nothing to do.
    pub idle: u64,
}

struct SimEnvInner {
    config: SimEnvConfig,
    state: SharedSimState,
    /// `None` while the reactor runs an iteration, and once it is removed.
    reactors: RefCell<Vec<Option<SimReactor>>>,
    /// By host.
    host_controls: RefCell<Vec<HostControl>>,
    run_queue: RefCell<RunQueue>,
    wake_list: Arc<WakeList>,
    /// The generator of the order of reactors that are due at one time.
    order: RefCell<Prng>,
    /// A buffer of reactors.
    due: RefCell<Vec<u32>>,
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
            driver_owners: DriverOwners::default(),
            trace_hash: config.seed,
        };
        SimEnv(Rc::new(SimEnvInner {
            config,
            state: SharedSimState::new(state),
            reactors: RefCell::default(),
            host_controls: RefCell::default(),
            run_queue: RefCell::default(),
            wake_list: Arc::default(),
            order: RefCell::new(random),
            due: RefCell::default(),
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

    /// Adds a host, powered on, with its own address. Its clock shows the simulation's time.
    pub fn add_host(&self) -> SimHostId {
        self.0.host_controls.borrow_mut().push(HostControl::default());
        self.with(|state| state.network.add_host())
    }

    /// The clock of a host, whose time its reactors get.
    pub fn clock(&self, host: SimHostId) -> SimClock {
        self.0.host_controls.borrow()[host.0 as usize].clock
    }

    /// Replaces the clock of a host. REQUIRES: the new one shows no earlier time, unless the host has no reactors.
    pub fn set_clock(&self, host: SimHostId, clock: SimClock) {
        self.0.host_controls.borrow_mut()[host.0 as usize].clock = clock;
        // Sleeping reactors compute when their deadlines come.
        self.queue_reactors(host, |reactor| reactor.is_asleep);
    }

    /// Changes the drift of a host's clock from now on.
    ///
    /// # Panics
    /// If the drift exceeds [`CLOCK_DRIFT_MAX_PPM`].
    pub fn set_clock_drift(&self, host: SimHostId, drift_ppm: i64) {
        let mut clock = self.clock(host);
        clock.set_drift(self.now(), drift_ppm);
        self.set_clock(host, clock);
    }

    /// Pauses the processes of a host, as SIGSTOP does, or lets them run again. Meanwhile its reactors do not run, and its
    /// kernel goes on: bytes arrive and connections are accepted until their queues are full, disks complete operations.
    pub fn set_paused(&self, host: SimHostId, paused: bool) {
        self.with(|state| state.add_to_trace(0x9a05 ^ u64::from(host.0) << 1 ^ u64::from(paused)));
        self.0.host_controls.borrow_mut()[host.0 as usize].is_paused = paused;
        if !paused {
            self.queue_reactors(host, |reactor| std::mem::take(&mut reactor.was_skipped));
        }
    }

    /// Whether the processes of a host are paused.
    pub fn is_paused(&self, host: SimHostId) -> bool {
        self.0.host_controls.borrow()[host.0 as usize].is_paused
    }

    /// Has those reactors of a host run now.
    fn queue_reactors(&self, host: SimHostId, mut condition: impl FnMut(&mut SimReactor) -> bool) {
        let now = self.now();
        for (number, reactor) in self.0.reactors.borrow_mut().iter_mut().enumerate() {
            if let Some(reactor) = reactor.as_mut().filter(|reactor| reactor.host == host)
                && condition(reactor)
            {
                self.0.run_queue.borrow_mut().set(number as u32, now);
            }
        }
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
            preferred_write_bytes: config.block_bytes,
            kind: DeviceSourceKind::Simulated(disk.0),
        }
    }

    /// The device queue of one core of a host.
    pub fn device_queue(&self, host: SimHostId) -> SimDeviceQueue {
        SimDeviceQueue::new(self.0.state.clone(), host)
    }

    /// Adds a reactor, which runs at once. `run_iteration` is called with the time of its host's clock and returns whether it did work; it
    /// calls [`ReactorHandle::begin_iteration`], and it polls its sockets in the first call already: they wake the reactor
    /// that used them last. `handle` is the reactor's own: the simulation reads its deadlines and its
    /// simulated costs, and its [`crate::CoreWaker`] ends its sleep.
    ///
    /// # Panics
    /// If the `CoreWaker` is that of another reactor.
    pub fn add_reactor(
        &self,
        host: SimHostId,
        handle: ReactorHandle,
        run_iteration: impl FnMut(Nanos) -> bool + 'static,
    ) -> SimReactorId {
        let mut reactors = self.0.reactors.borrow_mut();
        let number = reactors.len() as u32;
        handle.core_waker().list_wakeups(WakeList::entry(&self.0.wake_list, number));
        self.0.run_queue.borrow_mut().set(number, self.now());
        reactors.push(Some(SimReactor {
            host,
            handle,
            run_iteration: Box::new(run_iteration),
            is_asleep: false,
            was_skipped: false,
            iterations: IterationCounts::default(),
        }));
        SimReactorId(number)
    }

    /// Removes and drops a reactor. The host's streams and disks are not affected.
    pub fn remove_reactor(&self, reactor: SimReactorId) {
        self.remove_if(reactor.0, |_| true);
    }

    fn remove_if(&self, reactor: u32, condition: impl FnOnce(&mut SimReactor) -> bool) {
        let removed = self.0.reactors.borrow_mut()[reactor as usize].take_if(condition);
        if let Some(removed) = removed {
            self.0.run_queue.borrow_mut().set(reactor, Nanos::NEVER);
            removed.handle.shutdown();
        }
    }

    /// The iterations of a reactor so far; none once it is removed.
    pub fn iteration_counts(&self, reactor: SimReactorId) -> IterationCounts {
        let reactors = self.0.reactors.borrow();
        reactors[reactor.0 as usize].as_ref().map_or(IterationCounts::default(), |reactor| reactor.iterations)
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
        self.0.host_controls.borrow_mut()[host.0 as usize].is_paused = false;
        let count = self.0.reactors.borrow().len();
        for number in 0..count as u32 {
            self.remove_if(number, |reactor| reactor.host == host);
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
        self.set_cut(a, b, partitioned);
        self.set_cut(b, a, partitioned);
    }

    /// Cuts the link from one host to another, or ends the cut; the other direction stays. Meanwhile bytes of this direction
    /// are delayed, and no connection is established in either.
    pub fn set_cut(&self, from: SimHostId, to: SimHostId, cut: bool) {
        self.with(|state| {
            let SimState { now, events, network, .. } = state;
            network.set_cut(from, to, cut, *now, events);
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

    /// Fails a disk for good: every operation fails with EIO, those in flight too.
    pub fn lose_disk(&self, disk: SimDiskId) {
        self.with(|state| state.disks.lose(disk));
    }

    /// Puts an empty disk of the same kind in the place of a disk, whether lost or not. REQUIRES: its host is stopped.
    pub fn replace_disk(&self, disk: SimDiskId) {
        self.with(|state| state.disks.replace(disk));
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

    /// Runs the reactors that are due, advances the clock to the next event or reactor, at most to `limit`, and applies the
    /// events due then. False if there is neither up to `limit`; the clock is then at `limit` (unchanged for
    /// [`Nanos::NEVER`]).
    pub fn step(&self, limit: Nanos) -> bool {
        self.run_ready_reactors();
        let next = self.next_due();
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

    /// Runs the reactors that are due, and those that they wake, until none is.
    fn run_ready_reactors(&self) {
        let now = self.now();
        let mut rounds = 0u32;
        while self.run_round(now) {
            rounds += 1;
            assert!(rounds < ROUNDS_MAX, "at {now:?} reactors run without time advancing");
        }
    }

    /// Runs the reactors that are due at `now`, each once. False if there is none.
    fn run_round(&self, now: Nanos) -> bool {
        let mut due = self.0.due.take();
        self.queue_woken_reactors(now, &mut due);
        self.0.run_queue.borrow_mut().take_due(now, &mut due);
        let mut random = self.0.order.borrow_mut();
        for last in (1..due.len()).rev() {
            due.swap(last, random.below(last as u64 + 1) as usize);
        }
        drop(random);
        due.iter().for_each(|&reactor| self.run_reactor(reactor, now));
        let any = !due.is_empty();
        due.clear();
        self.0.due.replace(due);
        any
    }

    /// Queues the sleeping reactors that were notified, or whose drivers became ready. `woken` is a buffer, empty before
    /// and after.
    fn queue_woken_reactors(&self, now: Nanos, woken: &mut Vec<u32>) {
        self.0.wake_list.take(woken);
        self.with(|state| state.take_ready_reactors(woken));
        let reactors = self.0.reactors.borrow();
        for number in woken.drain(..) {
            // One that is busy sees everything when it runs at the end of its busy time.
            if reactors[number as usize].as_ref().is_some_and(|reactor| reactor.is_asleep) {
                self.0.run_queue.borrow_mut().set(number, now);
            }
        }
    }

    fn run_reactor(&self, number: u32, now: Nanos) {
        let taken = self.0.reactors.borrow_mut()[number as usize].take_if(|reactor| {
            reactor.was_skipped = self.is_paused(reactor.host);
            !reactor.was_skipped
        });
        let Some(mut reactor) = taken else { return };
        if std::mem::take(&mut reactor.is_asleep) {
            reactor.handle.core_waker().on_wake();
        }
        self.with(|state| state.driver_owners.set_running(Some(number)));
        let did_work = (reactor.run_iteration)(self.clock(reactor.host).local(now));
        self.with(|state| state.driver_owners.set_running(None));
        let simulated = reactor.handle.cpu_time().take_simulated();
        let runs_at = if did_work {
            reactor.iterations.busy += 1;
            let cost = simulated.max(self.0.config.iteration_cost_min);
            self.with(|state| state.add_to_trace(u64::from(number) ^ cost.0.rotate_left(32)));
            now + cost
        } else {
            reactor.iterations.idle += 1;
            reactor.is_asleep = reactor.handle.core_waker().try_sleep();
            let deadline = self.clock(reactor.host).true_time(reactor.handle.next_deadline());
            match (reactor.is_asleep, deadline) {
                (false, _) => now,
                (true, Nanos::NEVER) => Nanos::NEVER,
                (true, deadline) => deadline.max(now + SLEEP_MIN),
            }
        };
        self.0.run_queue.borrow_mut().set(number, runs_at);
        let mut reactors = self.0.reactors.borrow_mut();
        assert!(reactors[number as usize].is_none(), "reactor slot {number} is occupied");
        reactors[number as usize] = Some(reactor);
    }

    /// The time of the next event or reactor; [`Nanos::NEVER`] if there is none.
    fn next_due(&self) -> Nanos {
        self.with(|state| state.events.next_due()).min(self.0.run_queue.borrow().next_due())
    }
}

impl Drop for SimEnvInner {
    fn drop(&mut self) {
        for reactor in self.reactors.get_mut().drain(..).flatten() {
            reactor.handle.shutdown();
        }
    }
}

/// The shortest sleep, of a reactor that did nothing although its deadline has passed.
const SLEEP_MIN: Nanos = Nanos::from_micros(1);
/// More rounds than this at one time are a livelock.
const ROUNDS_MAX: u32 = 1_000_000;
