//! A client's end of the double: the [`MembershipStore`] of one connection.

use super::cluster::EtcdCluster;
use octokv_base::Nanos;
use octokv_cluster::etcd::{EtcdRequest, WatchRequest};
use octokv_cluster::{MembershipStore, RequestLimitReached, StoreDelivery};
use std::cell::RefCell;
use std::rc::Rc;

/// A connection to a cluster.
pub struct EtcdConnection {
    cluster: Rc<RefCell<EtcdCluster>>,
    connection: usize,
}

impl EtcdConnection {
    /// Connects to a member.
    pub fn new(cluster: &Rc<RefCell<EtcdCluster>>, member: usize) -> EtcdConnection {
        let connection = cluster.borrow_mut().connect(member);
        EtcdConnection { cluster: Rc::clone(cluster), connection }
    }

    /// The number by which faults name the connection.
    pub fn number(&self) -> usize {
        self.connection
    }
}

impl MembershipStore for EtcdConnection {
    fn submit(&mut self, now: Nanos, token: u64, request: EtcdRequest) -> Result<(), RequestLimitReached> {
        self.cluster.borrow_mut().submit(now, self.connection, token, request)
    }

    fn watch(&mut self, now: Nanos, token: u64, request: WatchRequest) {
        self.cluster.borrow_mut().watch(now, self.connection, token, request);
    }

    fn cancel_watch(&mut self, now: Nanos, token: u64) {
        self.cluster.borrow_mut().cancel_watch(now, self.connection, token);
    }

    fn request_progress(&mut self, now: Nanos) {
        self.cluster.borrow_mut().request_progress(now, self.connection);
    }

    fn poll(&mut self, now: Nanos) -> Option<StoreDelivery> {
        self.cluster.borrow_mut().poll(now, self.connection)
    }

    fn next_deadline(&self) -> Nanos {
        let cluster = self.cluster.borrow();
        if cluster.has_arrived(self.connection) { Nanos::ZERO } else { cluster.next_event_at() }
    }
}
