//! The states of [`crate::initiator`], its constants, and the connection changes that it requests.

use crate::config::ClientConfig;
use crate::controller_init::{ADMIN_QUEUE_ENTRIES, InitStep};
use crate::error::ConnectionError;
use crate::queue_pair::QueuePair;
use octokv_base::Nanos;
use octokv_wire::pdu::ADMIN_CAPSULE_DATA_BYTES;

/// Interval of the CSTS reads while the controller is not ready.
pub(crate) const READY_POLL_INTERVAL: Nanos = Nanos::from_millis(1);
/// Longest time that a close waits for commands in flight and for the shutdown.
pub(crate) const DRAIN_TIMEOUT: Nanos = Nanos::from_secs(1);
/// Token of a Keep Alive; the others are of the internal commands of their names.
pub(crate) const KEEP_ALIVE_TOKEN: u64 = 0;
pub(crate) const ASYNC_EVENT_TOKEN: u64 = 1;
pub(crate) const CHANGED_LIST_TOKEN: u64 = 2;
/// A step of initialization or rescan, or the Connect of an I/O queue; the state distinguishes them.
pub(crate) const INIT_STEP_TOKEN: u64 = 3;
pub(crate) const SHUTDOWN_TOKEN: u64 = 4;
/// Slots that Keep Alives leave free on the admin queue: an event request, a rescan, a shutdown.
pub(crate) const ADMIN_RESERVED_SLOTS: usize = 3;
pub(crate) const ADMIN_QUEUE_DEPTH: u16 = ADMIN_QUEUE_ENTRIES as u16 - 1;

/// A queue of so many entries on a new connection.
pub(crate) fn new_queue(config: &ClientConfig, depth: u16) -> QueuePair {
    QueuePair::new(depth, ADMIN_CAPSULE_DATA_BYTES, config.header_digest, config.data_digest)
}

/// Connection change for the owner of the sockets, to be executed in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionAction {
    /// Open the connection of this queue.
    Open(u16),
    /// Send as many unsent bytes as the socket accepts, of a termination request at most, then close the connection of this
    /// queue.
    Close(u16),
}

/// State of the controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InitiatorState {
    /// Disconnected until the next attempt.
    Backoff { until: Nanos },
    /// A step is in progress; `poll_ready_at` is the time of the next CSTS read.
    Initializing { step: InitStep, deadline: Nanos, poll_ready_at: Option<Nanos> },
    /// `remaining` I/O queues are connecting.
    ConnectingQueues { remaining: u16, deadline: Nanos },
    /// In use; the next Keep Alive is due at `keep_alive_at`.
    Live { keep_alive_at: Nanos },
    /// Awaits the last completions, then the controller's shutdown.
    Draining { deadline: Nanos, shutting_down: bool },
    /// Ended, with the cause; `None` after a close.
    Ended(Option<ConnectionError>),
}
