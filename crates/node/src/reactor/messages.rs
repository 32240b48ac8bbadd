//! What cores of a node send each other.

use crate::core_metrics::RequestTiming;
use crate::request_queue::{PendingRequest, TicketId};
use octokv_nvmf::RequestOutcome;
use octokv_runtime::DetachedSocket;
use octokv_sched::{CoreId, TenantId};
use std::net::SocketAddr;

/// A message between cores.
pub enum CoreMessage {
    /// Hands over an accepted connection.
    NewConnection {
        /// The socket.
        socket: DetachedSocket,
        /// The local address.
        local: SocketAddr,
        /// The host's address.
        peer: SocketAddr,
    },
    /// Executes a request of the sender's connection.
    Execute(PendingRequest),
    /// Completes a request of the receiver's connection.
    Completed(RequestCompletion),
}

/// A completed request on its way to its connection.
#[derive(Debug)]
pub struct RequestCompletion {
    pub(super) home_core: CoreId,
    pub(super) connection: u32,
    pub(super) slot: u16,
    pub(super) outcome: RequestOutcome,
    pub(super) tenant: TenantId,
    pub(super) timing: RequestTiming,
    pub(super) ticket_id: TicketId,
}
