//! The interface to the etcd that holds a cluster's membership.
//!
//! ```text
//!   submit(token) ──▶ … ──▶ poll: Response{token}     exactly one, also if the outcome is unknown
//!   watch(token)  ──▶ … ──▶ poll: Created ─▶ Events, Progress … ─▶ its end
//! ```
//! In: requests and watches with tokens of the caller, time. Out: deliveries. Neither blocks, so a state machine can use
//! it: a response is one of its inputs.
//!
//! Invariants, of every implementation: each submitted request gets exactly one response. The updates of a watch arrive
//! in the order of revisions, each event once, and all events of one revision in one update. After
//! [`WatchUpdate::Compacted`], [`WatchUpdate::Canceled`] or [`WatchUpdate::Disconnected`] nothing arrives for that watch. Nothing is retried or
//! resumed: the caller knows whether a request may be applied twice, and from which revision to watch.

use crate::etcd::{EtcdError, EtcdRequest, EtcdResponse, Revision, WatchEvent, WatchRequest};
use octokv_base::Nanos;

/// A client's connection to an etcd cluster.
pub trait MembershipStore {
    /// Sends a request. Its response arrives with `token`, which no other request in flight has.
    ///
    /// # Errors
    /// If as many requests are in flight as the implementation allows; nothing was sent.
    fn submit(&mut self, now: Nanos, token: u64, request: EtcdRequest) -> Result<(), RequestLimitReached>;

    /// Begins a watch. Its updates arrive with `token`, which no other watch has.
    fn watch(&mut self, now: Nanos, token: u64, request: WatchRequest);

    /// Ends a watch. No update of it arrives afterwards.
    fn cancel_watch(&mut self, now: Nanos, token: u64);

    /// Requests a [`WatchUpdate::Progress`] for every watch that has received everything.
    fn request_progress(&mut self, now: Nanos);

    /// The next delivery that has arrived by `now`, or `None`.
    fn poll(&mut self, now: Nanos) -> Option<StoreDelivery>;

    /// The next time at which [`MembershipStore::poll`] may have a delivery without a further call;
    /// [`Nanos::NEVER`] for none.
    fn next_deadline(&self) -> Nanos;
}

/// As many requests are in flight as the connection allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too many etcd requests in flight")]
pub struct RequestLimitReached;

/// A response or an update of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreDelivery {
    /// The response to a request.
    Response {
        /// The token of the request.
        token: u64,
        /// The response. [`EtcdError::has_unknown_outcome`] tells whether a failed request may have been applied or may
        /// still be.
        result: Result<EtcdResponse, EtcdError>,
    },
    /// An update of a watch.
    Watch {
        /// The token of the watch.
        token: u64,
        /// The update.
        update: WatchUpdate,
    },
}

/// An update of a watch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WatchUpdate {
    /// The watch has begun; without a start revision it covers the revisions after this one.
    Created {
        /// The store's revision.
        revision: Revision,
    },
    /// Changes of one or several revisions, in order.
    Events {
        /// The store's revision when the update was sent.
        revision: Revision,
        /// The changes, at least one.
        events: Vec<WatchEvent>,
    },
    /// All changes up to this revision have arrived.
    Progress {
        /// The store's revision.
        revision: Revision,
    },
    /// Changes that the watch has not sent were compacted; the watch has ended. Its caller reads the keys anew.
    Compacted {
        /// The oldest revision that is readable.
        compact_revision: Revision,
    },
    /// The store has refused the watch.
    Canceled(EtcdError),
    /// The connection was lost, and the watch with it. A new watch from the revision after the last one seen misses
    /// nothing unless that revision was compacted.
    Disconnected,
}
