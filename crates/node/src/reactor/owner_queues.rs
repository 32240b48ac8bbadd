//! Requests that wait for space in the ring to the core that owns their key.
//!
//! ```text
//!   admit ──ring has space, none waits for that core──▶ ring of the owner
//!     └───▶ queue of that core, first in first out ──each iteration, after completions──▶ ring of the owner
//! ```
//! In: requests of this core's connections on keys of other cores. Out: messages, in order of arrival per core.
//! Invariants: a full ring delays only the requests for its core; no more requests wait than the connections have command
//! slots.

use super::core_links::CoreLinks;
use crate::core_metrics::MetricsWriter;
use crate::request_queue::PendingRequest;
use octokv_sched::CoreId;
use std::collections::VecDeque;

/// See the module header.
pub(super) struct OwnerQueues {
    by_core: Box<[VecDeque<PendingRequest>]>,
    count: usize,
    count_max: usize,
}

impl OwnerQueues {
    /// No requests; at most `count_max` of them for `cores` cores.
    pub fn new(cores: usize, count_max: usize) -> OwnerQueues {
        OwnerQueues { by_core: (0..cores).map(|_| VecDeque::new()).collect(), count: 0, count_max }
    }

    /// Requests that wait.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether no request waits.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Whether a request for core `to` would be sent at once: the ring has space and none waits for it.
    fn can_send(&self, to: CoreId, links: &CoreLinks) -> bool {
        self.by_core[to.index()].is_empty() && links.has_room(to.index())
    }

    /// Sends a request to the owner of its key, or queues it for that core.
    ///
    /// # Panics
    /// More requests would wait than the connections have command slots: a bug of this program.
    pub fn send(
        &mut self,
        to: CoreId,
        request: PendingRequest,
        links: &mut CoreLinks,
        metrics: &MetricsWriter,
    ) {
        if self.can_send(to, links) {
            return offload(to, request, links, metrics);
        }
        assert!(self.count < self.count_max, "more requests wait for owner cores than command slots");
        self.count += 1;
        self.by_core[to.index()].push_back(request);
    }

    /// Sends the requests for which the rings have space. Returns whether any was sent.
    pub fn send_waiting(&mut self, links: &mut CoreLinks, metrics: &MetricsWriter) -> bool {
        let before = self.count;
        for (core, queue) in self.by_core.iter_mut().enumerate() {
            while links.has_room(core)
                && let Some(request) = queue.pop_front()
            {
                self.count -= 1;
                offload(CoreId::from_index(core), request, links, metrics);
            }
        }
        self.count < before
    }

    /// Keeps the requests for which `keep` returns true.
    pub fn retain(&mut self, mut keep: impl FnMut(&mut PendingRequest) -> bool) {
        self.by_core.iter_mut().for_each(|queue| queue.retain_mut(&mut keep));
        self.count = self.by_core.iter().map(VecDeque::len).sum();
    }
}

/// Sends a request to a core. REQUIRES: its ring has space.
fn offload(to: CoreId, mut request: PendingRequest, links: &mut CoreLinks, metrics: &MetricsWriter) {
    request.timing = metrics.transfer_timing(to, request.tenant, request.timing);
    assert!(links.offload(to, request).is_ok(), "there was room");
    metrics.record_offloaded_to(to);
}
