//! The states of [`crate::initiator`] and the connection changes that it requests.

use crate::controller_init::InitStep;
use crate::error::ConnectionError;
use octokv_base::Nanos;

/// Connection change for the owner of the sockets, to be executed in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionAction {
    /// Open the connection of this queue.
    Open(u16),
    /// Send as many unsent bytes as the socket accepts, then close the connection of this queue.
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
