//! The outgoing sessions of one reactor, on the reactor's sockets: no thread, no blocking, no second poller.
//!
//! In: time ([`PollGroup::begin_iteration`]), the reactor's sockets and those of them that are ready ([`PollGroup::poll`],
//! once per iteration). Out: the
//! latest time of the next iteration ([`PollGroup::next_deadline`]), wake-ups of the reactor's tasks. Holds: the sessions
//! that have not ended, at most [`PEERS_MAX`]. A session is used through its [`PeerSession`].
//!
//! Invariants: a call that gives a session work outside of a poll notifies the reactor's core, which then does not sleep;
//! a session without handles is closed. Poll groups are SPDK's term (`spdk_nvme_poll_group`).

use crate::peer_session::{PeerConfig, PeerSession, PeerShared};
use octokv_base::Nanos;
use octokv_runtime::{CoreWaker, SocketId, Sockets};
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;

/// Most outgoing sessions of one reactor.
pub const PEERS_MAX: usize = 64;

/// Reason why a session was not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectPeerError {
    /// The reactor has [`PEERS_MAX`] sessions.
    #[error("the core has {PEERS_MAX} outgoing sessions already")]
    TooManyPeers,
    /// The reactor is stopping.
    #[error("the core is stopping")]
    Closing,
}

/// The outgoing sessions of one reactor. Clones share them.
#[derive(Clone)]
pub struct PollGroup(Rc<GroupShared>);

struct GroupShared {
    core_waker: Arc<CoreWaker>,
    peers: RefCell<Vec<Rc<PeerShared>>>,
    /// Length of `peers`.
    count: Cell<usize>,
    next_deadline: Cell<Nanos>,
    closing: Cell<bool>,
}

impl PollGroup {
    /// No sessions, for the reactor that `core_waker` wakes.
    pub fn new(core_waker: Arc<CoreWaker>) -> PollGroup {
        PollGroup(Rc::new(GroupShared {
            core_waker,
            peers: RefCell::new(Vec::new()),
            count: Cell::new(0),
            next_deadline: Cell::new(Nanos::NEVER),
            closing: Cell::new(false),
        }))
    }

    /// Adds a session, which begins to connect in the next poll. REQUIRES: not called from a waker.
    ///
    /// # Errors
    /// [`ConnectPeerError`].
    pub fn connect(
        &self,
        address: SocketAddr,
        config: PeerConfig,
        now: Nanos,
    ) -> Result<PeerSession, ConnectPeerError> {
        let mut peers = self.0.peers.borrow_mut();
        if self.0.closing.get() {
            return Err(ConnectPeerError::Closing);
        }
        if peers.len() >= PEERS_MAX {
            return Err(ConnectPeerError::TooManyPeers);
        }
        let peer = PeerShared::new(address, config, now, Arc::clone(&self.0.core_waker));
        peers.push(Rc::clone(&peer));
        self.0.count.set(peers.len());
        self.0.core_waker.notify();
        Ok(PeerSession::new(peer))
    }

    /// Begins an iteration. Tasks may submit commands before its poll: their timeouts count from `now`, not from the last
    /// iteration before a sleep.
    pub fn begin_iteration(&self, now: Nanos) {
        self.0.peers.borrow().iter().for_each(|peer| peer.begin_iteration(now));
    }

    /// Handles deadlines up to `now`, sends, receives from the sessions' sockets among `ready`, and completes commands.
    /// Returns whether there was any work.
    pub fn poll<S: Sockets>(&self, sockets: &mut S, ready: &[SocketId], now: Nanos) -> bool {
        let mut peers = self.0.peers.borrow_mut();
        let mut progress = false;
        for peer in peers.iter() {
            progress |= peer.poll(sockets, ready, now);
        }
        peers.retain(|peer| !peer.release_if_ended(sockets));
        progress |= peers.len() < self.0.count.get();
        self.0.count.set(peers.len());
        let next_deadline = peers.iter().map(|peer| peer.next_deadline()).min();
        self.0.next_deadline.set(next_deadline.unwrap_or(Nanos::NEVER));
        progress
    }

    /// Latest time of the next poll, as of the last one.
    pub fn next_deadline(&self) -> Nanos {
        self.0.next_deadline.get()
    }

    /// Number of sessions that have not ended.
    pub fn len(&self) -> usize {
        self.0.count.get()
    }

    /// Whether there are no sessions: then the reactor need not poll.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Closes every session gracefully and accepts no more. The group is empty once they have ended, within seconds.
    pub fn close(&self) {
        self.0.closing.set(true);
        self.0.peers.borrow().iter().for_each(|peer| peer.request_close());
    }
}
