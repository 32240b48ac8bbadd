//! The state of the simulation without its reactors: clock, events, network, disks, owners of drivers, trace.

use super::disk::SimDisks;
use super::event::SimEvent;
use super::event_queue::EventQueue;
use super::net::SimNetwork;
use super::run_queue::DriverOwners;
use octokv_base::Nanos;
use octokv_base::prng::mix64;
use std::cell::RefCell;
use std::rc::Rc;

/// The state that sockets, device queues and the environment share.
pub(crate) struct SimState {
    pub(crate) now: Nanos,
    pub(crate) events: EventQueue,
    pub(crate) network: SimNetwork,
    pub(crate) disks: SimDisks,
    pub(crate) driver_owners: DriverOwners,
    pub(crate) trace_hash: u64,
}

impl SimState {
    /// Mixes a value into the trace hash.
    pub(crate) fn add_to_trace(&mut self, value: u64) {
        self.trace_hash = mix64(self.trace_hash ^ value);
    }

    /// Applies a network or disk event. Returns a callback to the caller, which runs it with nothing borrowed.
    pub(crate) fn apply_event(&mut self, event: SimEvent) -> Option<Box<dyn FnOnce()>> {
        let SimState { now, events, network, disks, trace_hash, .. } = self;
        let fact = match event {
            SimEvent::Net(event) => network.apply_event(event, *now, events),
            SimEvent::Disk(event) => disks.apply_event(event),
            SimEvent::Call(call) => return Some(call),
        };
        *trace_hash = mix64(*trace_hash ^ fact);
        None
    }

    /// Moves the reactors whose drivers became ready since the last call to the end of `out`, with repetitions.
    pub(crate) fn take_ready_reactors(&mut self, out: &mut Vec<u32>) {
        let SimState { network, disks, driver_owners, .. } = self;
        let ready = network.ready_drivers.drain(..).chain(disks.ready_drivers.drain(..));
        out.extend(ready.filter_map(|driver| driver_owners.owner(driver)));
    }
}

/// A shared reference to the state. The reactors hold it through their drivers, and the environment holds the
/// reactors: that they are not part of the state avoids a reference cycle.
#[derive(Clone)]
pub(crate) struct SharedSimState(Rc<RefCell<SimState>>);

impl SharedSimState {
    pub(crate) fn new(state: SimState) -> SharedSimState {
        SharedSimState(Rc::new(RefCell::new(state)))
    }

    /// Runs `action` on the state.
    ///
    /// # Panics
    /// If called from within `action`.
    pub(crate) fn with<T>(&self, action: impl FnOnce(&mut SimState) -> T) -> T {
        action(&mut self.0.borrow_mut())
    }
}
