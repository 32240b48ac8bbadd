//! A member of the cluster: a replica of the state, the watches that it serves, and the requests that wait for it.
//!
//! In: entries of the log in order. Out: responses to the requests that arrived at this member, updates of its watches.
//! Invariant: a response to a write, or to a linearizable read, leaves after the member has applied everything that was
//! committed when it was proposed or arrived, so a client that stays with a member reads its own writes.

use super::state::EtcdState;
use super::transport::Origin;
use octokv_base::Nanos;
use octokv_cluster::WatchUpdate;
use octokv_cluster::etcd::{
    EtcdError, EtcdRequest, EtcdResponse, RangeEnd, RangeRequest, Revision, WatchRequest,
};
use std::collections::VecDeque;

/// An entry of the log.
#[derive(Clone, Debug)]
pub(super) struct LogEntry {
    pub request: EtcdRequest,
    /// The member and the request that it came by; `None` for the end of a lease.
    pub origin: Option<(usize, Origin)>,
}

/// A watch.
#[derive(Debug)]
struct Watcher {
    origin: Origin,
    request: WatchRequest,
    /// The first revision that was not sent.
    next: Revision,
    /// Whether anything was sent since the last periodic progress.
    has_sent: bool,
}

/// What a member sends.
pub(super) enum MemberOutput {
    Response(Origin, Result<EtcdResponse, EtcdError>),
    Update(Origin, WatchUpdate),
}

/// A member.
pub(super) struct EtcdMember {
    pub state: EtcdState,
    /// The number of log entries applied.
    pub applied: u64,
    /// Added to the time until it applies an entry.
    pub lag: Nanos,
    /// Whether it is cut off from the other members.
    pub is_isolated: bool,
    watchers: Vec<Watcher>,
    /// Connections whose watches send nothing.
    pub stalled: Vec<usize>,
    /// Linearizable reads, each with the number of log entries that it waits for.
    reads: VecDeque<(u64, Origin, RangeRequest)>,
}

impl EtcdMember {
    pub fn new(state: EtcdState) -> EtcdMember {
        EtcdMember {
            state,
            applied: 0,
            lag: Nanos::ZERO,
            is_isolated: false,
            watchers: Vec::new(),
            stalled: Vec::new(),
            reads: VecDeque::new(),
        }
    }

    /// Applies the next entry of the log. `index` is the member's own.
    pub fn apply(&mut self, index: usize, entry: &LogEntry, out: &mut Vec<MemberOutput>) {
        let result = self.state.apply(&entry.request);
        self.applied += 1;
        if let Some((member, origin)) = entry.origin
            && member == index
        {
            out.push(MemberOutput::Response(origin, result));
        }
        self.send_changes(out);
        self.run_reads(out);
    }

    /// Reads once `committed` entries are applied.
    pub fn read_at(
        &mut self,
        committed: u64,
        origin: Origin,
        request: RangeRequest,
        out: &mut Vec<MemberOutput>,
    ) {
        self.reads.push_back((committed, origin, request));
        self.run_reads(out);
    }

    fn run_reads(&mut self, out: &mut Vec<MemberOutput>) {
        while self.reads.front().is_some_and(|(committed, ..)| *committed <= self.applied) {
            if let Some((_, origin, request)) = self.reads.pop_front() {
                out.push(MemberOutput::Response(origin, self.state.read(&request)));
            }
        }
    }

    /// Begins a watch.
    pub fn watch(&mut self, origin: Origin, request: WatchRequest, out: &mut Vec<MemberOutput>) {
        let is_empty = match &request.range.end {
            RangeEnd::Before(end) => *end <= request.range.start,
            RangeEnd::Single | RangeEnd::Unbounded => false,
        };
        if request.range.start.is_empty() || is_empty {
            let error = if is_empty { EtcdError::EmptyRange } else { EtcdError::EmptyKey };
            out.push(MemberOutput::Update(origin, WatchUpdate::Canceled(error)));
            return;
        }
        let revision = self.state.store().revision();
        out.push(MemberOutput::Update(origin, WatchUpdate::Created { revision }));
        let next = request.start_revision.unwrap_or(revision.next());
        self.watchers.push(Watcher { origin, request, next, has_sent: false });
        self.send_changes(out);
    }

    /// Ends a watch.
    pub fn cancel_watch(&mut self, origin: Origin) {
        self.watchers.retain(|watcher| watcher.origin.sequence != origin.sequence);
    }

    /// Ends the watches of a connection.
    pub fn drop_watches(&mut self, connection: usize) {
        self.watchers.retain(|watcher| watcher.origin.connection != connection);
    }

    /// Sends each watch the events that it has not received yet. Cancels a watch if compaction removed its next revision.
    pub fn send_changes(&mut self, out: &mut Vec<MemberOutput>) {
        let store = self.state.store();
        let (revision, stalled) = (store.revision(), &self.stalled);
        self.watchers.retain_mut(|watcher| {
            if stalled.contains(&watcher.origin.connection) {
                return true;
            }
            if watcher.next < store.compacted() {
                let update = WatchUpdate::Compacted { compact_revision: store.compacted() };
                out.push(MemberOutput::Update(watcher.origin, update));
                return false;
            }
            let with_previous = watcher.request.with_previous;
            for (_, changes) in store.changes(&watcher.request.range, watcher.next) {
                let events = changes.into_iter().map(|change| store.event(change, with_previous)).collect();
                watcher.has_sent = true;
                out.push(MemberOutput::Update(watcher.origin, WatchUpdate::Events { revision, events }));
            }
            watcher.next = watcher.next.max(revision.next());
            true
        });
    }

    /// Sends the revision to the watches of a connection, or, periodically, to those that requested it and had no change.
    /// Only those are meant that have sent everything.
    pub fn send_progress(&mut self, connection: Option<usize>, out: &mut Vec<MemberOutput>) {
        let revision = self.state.store().revision();
        for watcher in &mut self.watchers {
            let is_quiet = !std::mem::take(&mut watcher.has_sent) && watcher.request.progress_notify;
            let is_meant = connection.map_or(is_quiet, |connection| watcher.origin.connection == connection);
            if is_meant && watcher.next > revision && !self.stalled.contains(&watcher.origin.connection) {
                out.push(MemberOutput::Update(watcher.origin, WatchUpdate::Progress { revision }));
            }
        }
    }
}
