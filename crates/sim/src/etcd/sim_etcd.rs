//! The cluster within a simulation: its events are the simulation's, and what arrives wakes a reactor.
//!
//! ```text
//!   reactor ──submit, watch──▶ cluster ──next event──▶ SimEnv::schedule_at ──due──▶ cluster runs ──arrived──▶ notify
//! ```
//! In: connections with the waker of their reactor's core. Out: deliveries. The cluster runs by the simulation's time,
//! whatever the clocks of its clients' hosts show. Invariant: whenever the cluster has an event, one is scheduled at its
//! time or before.

use super::cluster::{EtcdCluster, EtcdConfig};
use super::faults::EtcdFault;
use octokv_base::Nanos;
use octokv_cluster::etcd::{EtcdRequest, WatchRequest};
use octokv_cluster::{MembershipStore, RequestLimitReached, StoreDelivery};
use octokv_runtime::CoreWaker;
use octokv_runtime::simulated::SimEnv;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

struct SimEtcdInner {
    sim: SimEnv,
    cluster: RefCell<EtcdCluster>,
    /// By connection.
    core_wakers: RefCell<Vec<Arc<CoreWaker>>>,
    /// When the next run is scheduled.
    scheduled_at: Cell<Nanos>,
}

/// A cluster in a simulation. Clones share it.
#[derive(Clone)]
pub struct SimEtcd(Rc<SimEtcdInner>);

impl SimEtcd {
    /// A cluster with an empty store.
    pub fn new(sim: &SimEnv, config: EtcdConfig) -> SimEtcd {
        SimEtcd(Rc::new(SimEtcdInner {
            sim: sim.clone(),
            cluster: RefCell::new(EtcdCluster::new(config)),
            core_wakers: RefCell::default(),
            scheduled_at: Cell::new(Nanos::NEVER),
        }))
    }

    /// Connects to a member. Deliveries notify `core_waker`.
    pub fn connect(&self, member: usize, core_waker: &Arc<CoreWaker>) -> SimEtcdConnection {
        let connection = self.0.cluster.borrow_mut().connect(member);
        self.0.core_wakers.borrow_mut().push(Arc::clone(core_waker));
        SimEtcdConnection { etcd: self.clone(), connection }
    }

    /// Injects a fault now.
    pub fn inject(&self, fault: EtcdFault) {
        self.with(|cluster, now| cluster.inject(now, fault));
    }

    /// Runs `action` on the cluster at the simulation's time, and schedules its next event.
    pub fn with<T>(&self, action: impl FnOnce(&mut EtcdCluster, Nanos) -> T) -> T {
        let now = self.0.sim.now();
        let value = action(&mut self.0.cluster.borrow_mut(), now);
        self.run();
        value
    }

    /// Runs the events that are due, wakes the clients that have responses or watch events, and schedules the next event.
    fn run(&self) {
        let mut cluster = self.0.cluster.borrow_mut();
        cluster.advance(self.0.sim.now());
        for (connection, core_waker) in self.0.core_wakers.borrow().iter().enumerate() {
            if cluster.has_arrived(connection) {
                core_waker.notify();
            }
        }
        let next = cluster.next_event_at();
        if next < self.0.scheduled_at.get() {
            self.0.scheduled_at.set(next);
            let inner = Rc::downgrade(&self.0);
            self.0.sim.schedule_at(next, move || {
                if let Some(inner) = inner.upgrade() {
                    inner.scheduled_at.set(Nanos::NEVER);
                    SimEtcd(inner).run();
                }
            });
        }
    }
}

/// A connection of a simulated host. It ignores the time of the host's clock.
pub struct SimEtcdConnection {
    etcd: SimEtcd,
    connection: usize,
}

impl SimEtcdConnection {
    /// The number by which faults name the connection.
    pub fn number(&self) -> usize {
        self.connection
    }
}

impl MembershipStore for SimEtcdConnection {
    fn submit(&mut self, _now: Nanos, token: u64, request: EtcdRequest) -> Result<(), RequestLimitReached> {
        self.etcd.with(|cluster, now| cluster.submit(now, self.connection, token, request))
    }

    fn watch(&mut self, _now: Nanos, token: u64, request: WatchRequest) {
        self.etcd.with(|cluster, now| cluster.watch(now, self.connection, token, request));
    }

    fn cancel_watch(&mut self, _now: Nanos, token: u64) {
        self.etcd.with(|cluster, now| cluster.cancel_watch(now, self.connection, token));
    }

    fn request_progress(&mut self, _now: Nanos) {
        self.etcd.with(|cluster, now| cluster.request_progress(now, self.connection));
    }

    fn poll(&mut self, _now: Nanos) -> Option<StoreDelivery> {
        self.etcd.with(|cluster, now| cluster.poll(now, self.connection))
    }

    /// Deliveries notify the core.
    fn next_deadline(&self) -> Nanos {
        Nanos::NEVER
    }
}
