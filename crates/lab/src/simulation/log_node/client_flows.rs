//! Clients of the simulated node that send by its tokens: the production flow control on both sides.
//!
//! ```text
//!   FlowControl of each client ──▶ TokenShares::begin ─▶ queue of the drive ─▶ engine
//!          ▲                                                                    │
//!          └───────────── window in the response ◀── TokenHold::end ◀───────────┘
//! ```
//! In: requests of clients, and responses. Out: the requests to send, and windows. Clients have equal weights.
//!
//! Invariant: a request that is sent has one hold, until its end.

use super::workload::{NodeOperation, NodeRequest};
use crate::simulation::log_store::load_client::object_key;
use octokv_base::Nanos;
use octokv_client::{FlowControl, FlowRequest};
use octokv_nvmf::{ShareOwner, TokenCommand, TokenHold, TokenShares};
use octokv_sched::{CostKind, StartingCosts};
use std::cell::RefCell;
use std::sync::Arc;

/// See the module header.
pub struct ClientFlows {
    shares: Arc<TokenShares>,
    clients: Vec<RefCell<FlowControl<NodeRequest>>>,
    value_bytes: usize,
}

fn owner(client: usize) -> ShareOwner {
    ShareOwner { controller: client as u16, weight: 1 }
}

impl ClientFlows {
    /// So many clients, each with its windows of these drives.
    pub fn new(shares: Arc<TokenShares>, clients: usize, drives: usize, value_bytes: u32) -> ClientFlows {
        let flow = |client| {
            let windows: Vec<u32> =
                (0..drives).map(|drive| shares.window_of(owner(client), drive as u8)).collect();
            RefCell::new(FlowControl::new(1, &windows))
        };
        let clients = (0..clients).map(flow).collect();
        ClientFlows { clients, value_bytes: value_bytes as usize, shares }
    }

    fn command(&self, operation: NodeOperation) -> TokenCommand {
        match operation {
            NodeOperation::Read => TokenCommand::Get,
            // One request here, whose put is the costlier part.
            NodeOperation::Write | NodeOperation::ReadModifyWrite => TokenCommand::Put(self.value_bytes),
        }
    }

    /// The tokens of an operation. Hosts read them from the log page; without a calibration they are the default ones.
    fn cost(&self, operation: NodeOperation) -> u32 {
        let costs = StartingCosts::default();
        match self.command(operation) {
            TokenCommand::Put(bytes) => costs.of(CostKind::Put, bytes),
            _ => costs.of(CostKind::Get, 0),
        }
    }

    /// Adds a request of a client, for a drive.
    pub fn enqueue(&self, client: usize, drive: usize, request: NodeRequest) {
        let tokens = self.cost(request.operation);
        self.clients[client].borrow_mut().enqueue(0, FlowRequest { device: drive, tokens, request });
    }

    /// The requests that a client may send now.
    pub fn sendable(&self, client: usize) -> Vec<NodeRequest> {
        let mut sent = Vec::new();
        let mut flow = self.clients[client].borrow_mut();
        flow.run(Nanos::NEVER, || Nanos::ZERO, |request| sent.push(request.request));
        sent
    }

    /// A request arrived at the node.
    pub fn begin(&self, client: usize, request: NodeRequest) -> Option<TokenHold> {
        let key = object_key(request.number);
        self.shares.begin(owner(client), key.as_bytes(), self.command(request.operation))
    }

    /// The response of a request, with the window of its drive, arrived at its client.
    pub fn complete(&self, client: usize, drive: usize, operation: NodeOperation, window: Option<u32>) {
        let tokens = self.cost(operation);
        self.clients[client].borrow_mut().complete(drive, tokens, window);
    }
}
