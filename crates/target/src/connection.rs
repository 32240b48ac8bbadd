//! One TCP connection.

use crate::{Outbox, Outcome, Request, Target};
use octokv_base::{Nanos, Pool};
use std::net::SocketAddr;
use std::sync::Arc;

/// What [`Connection::receive`] did with the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Consumed {
    /// How many bytes of the head were taken; the caller keeps the rest and gives it again.
    pub bytes: usize,
    /// Why complete commands (or announced values) wait although their bytes are here. While this is
    /// set, call `receive` again each turn, also without new bytes.
    pub stalled: Option<Stall>,
}

/// What a connection waits for before it takes more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// A slot: as many commands as the queue holds are being worked on.
    Slots,
    /// A buffer of the pool.
    Buffers,
    /// The host, which does not read its replies.
    Outbox,
}

/// One TCP connection.
#[derive(Debug)]
pub struct Connection {
    target: Arc<Target>,
    outbox: Outbox,
}

impl Connection {
    /// A connection that was just accepted on `local` from `peer`.
    pub fn new(target: Arc<Target>, _local: SocketAddr, _peer: SocketAddr, _now: Nanos) -> Connection {
        Connection { target, outbox: Outbox::default() }
    }

    /// Takes bytes from the head of what the host sent.
    pub fn receive(&mut self, _now: Nanos, bytes: &[u8], _pool: &Pool, _requests: &mut Vec<Request>) -> Consumed {
        let _ = self.target.settings();
        Consumed { bytes: bytes.len(), stalled: None }
    }

    /// Ends the request of `slot`.
    pub fn complete(&mut self, _now: Nanos, _slot: u32, _outcome: Outcome) {}

    /// Lets time pass.
    pub fn tick(&mut self, _now: Nanos) {}

    /// When `tick` must be called at the latest.
    pub fn next_deadline(&self) -> Nanos {
        Nanos::NEVER
    }

    /// What is to be sent.
    pub fn outbox(&mut self) -> &mut Outbox {
        &mut self.outbox
    }

    /// Whether the socket is to be closed once the outbox is empty.
    pub fn is_closed(&self) -> bool {
        false
    }

    /// How many requests are out.
    pub fn in_flight(&self) -> usize {
        0
    }

    /// The host, once it has connected.
    pub fn host_nqn(&self) -> Option<&str> {
        None
    }
}
