//! FIFO of requests that wait for a worker, with prefetch of the data they will read.
//!
//! ```text
//!   front ─▶ req │ req │ req │ req │ req │ req │ …     started one by one while workers are free
//!            started      record      entry     partition      stage prefetched for each
//! ```
//! In: requests, each with its connection. Out: requests that workers have started. The index entry and, on a memory
//! device, the record of a request are seldom in the processor's caches. A prefetch while earlier requests execute
//! brings them there in time; a request that is alone pays nothing.

use crate::core_metrics::RequestTiming;
use octokv_base::NamespaceId;
use octokv_engine::{AnyVolume, PrefetchStage, Volume};
use octokv_nvmf::RequestOperation;
use octokv_runtime::WorkerPool;
use octokv_sched::{CoreId, TenantId};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;

/// Index of a request's [`ServiceTicket`](octokv_sched::ServiceTicket) on its core; four bytes, since every request
/// carries one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TicketId(pub(crate) u32);

impl TicketId {
    /// The request has no ticket.
    pub const NONE: TicketId = TicketId(u32::MAX);
}

impl Default for TicketId {
    fn default() -> TicketId {
        TicketId::NONE
    }
}

/// A request and the address of its response.
#[derive(Debug)]
pub struct PendingRequest {
    /// The core of its connection.
    pub home_core: CoreId,
    /// Index of the connection on that core.
    pub connection: u32,
    /// Command slot on that connection.
    pub slot: u16,
    /// The namespace it addresses.
    pub namespace: NamespaceId,
    /// The operation with its buffers.
    pub operation: RequestOperation,
    /// The tenant that sent it.
    pub tenant: TenantId,
    /// Its arrival time and wait accounting.
    pub timing: RequestTiming,
    /// Its ticket on the core that executes it.
    pub ticket_id: TicketId,
}

/// Passes a prefetch on to the namespace's backend.
type PrefetchFn = dyn Fn(&PendingRequest, PrefetchStage);

/// Requests that have not started, in arrival order.
pub struct RequestQueue {
    waiting: VecDeque<PendingRequest>,
    requests_max: usize,
    prefetch: Box<PrefetchFn>,
}

impl RequestQueue {
    /// An empty queue of at most `requests_max` requests; `prefetch` is called once per stage of a request that will
    /// start soon, as early as
    /// [`Volume::PREFETCH`] says. [`RequestQueue::start`] asserts the bound, once per batch and not per request.
    pub fn new(
        requests_max: usize,
        prefetch: impl Fn(&PendingRequest, PrefetchStage) + 'static,
    ) -> RequestQueue {
        RequestQueue { waiting: VecDeque::new(), requests_max, prefetch: Box::new(prefetch) }
    }

    /// Appends a request.
    #[inline]
    pub fn push(&mut self, request: PendingRequest) {
        self.waiting.push_back(request);
    }

    /// Drops all but the first `count` requests. For an injected bug only.
    pub fn truncate(&mut self, count: usize) {
        self.waiting.truncate(count);
    }

    /// Removes the first request.
    pub fn pop(&mut self) -> Option<PendingRequest> {
        self.waiting.pop_front()
    }

    /// The requests, first to last.
    pub fn iter(&self) -> impl Iterator<Item = &PendingRequest> {
        self.waiting.iter()
    }

    /// Requests in the queue.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether the queue is empty.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Keeps the requests for which `keep` returns true.
    pub fn retain(&mut self, keep: impl FnMut(&mut PendingRequest) -> bool) {
        self.waiting.retain_mut(keep);
    }

    /// Starts requests while workers are free; one that never waits ends within this call. Returns whether any
    /// started.
    ///
    /// # Panics
    /// More requests are queued than `requests_max`: a bug of this program.
    pub fn start<F: Future<Output = Infallible>>(
        &mut self,
        workers: &mut WorkerPool<PendingRequest, F>,
    ) -> bool {
        assert!(self.waiting.len() <= self.requests_max, "more requests queued than command slots");
        let mut worked = false;
        while !workers.is_full()
            && let Some(request) = self.pop()
        {
            worked = true;
            for &(ahead, stage) in AnyVolume::PREFETCH {
                if let Some(later) = self.waiting.get(ahead - 1) {
                    (self.prefetch)(later, stage);
                }
            }
            assert!(workers.start(request).is_ok(), "is_full was false");
        }
        worked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_runtime::{CoreWaker, JobSlot};
    use std::cell::RefCell;
    use std::rc::Rc;

    const REQUESTS_MAX: usize = 40;

    /// Prefetches and starts of `count` requests, in order: `(slot, Some(stage))` is a prefetch, `(slot, None)` a
    /// start.
    fn trace(count: u16) -> Vec<(u16, Option<PrefetchStage>)> {
        let trace: Rc<RefCell<Vec<_>>> = Rc::default();
        let (prefetches, begins) = (Rc::clone(&trace), Rc::clone(&trace));
        let mut queue = RequestQueue::new(REQUESTS_MAX, move |request, stage| {
            prefetches.borrow_mut().push((request.slot, Some(stage)))
        });
        let request = |slot| PendingRequest {
            home_core: CoreId(0),
            connection: 7,
            slot,
            namespace: NamespaceId(1),
            operation: RequestOperation::Flush,
            tenant: TenantId(0),
            timing: RequestTiming::default(),
            ticket_id: TicketId::NONE,
        };
        (0..count).for_each(|slot| queue.push(request(slot)));
        assert!(queue.len() == count as usize);
        let mut workers =
            WorkerPool::new(4, CoreWaker::without_eventfd(), move |job_slot: Rc<JobSlot<PendingRequest>>| {
                let begins = Rc::clone(&begins);
                async move {
                    loop {
                        let slot = job_slot.next_job().await.slot;
                        begins.borrow_mut().push((slot, None));
                    }
                }
            });
        assert_eq!(queue.start(&mut workers), count > 0);
        assert!(queue.is_empty());
        trace.take()
    }

    #[test]
    fn each_request_is_prefetched_stage_by_stage_before_it_starts() {
        let trace = trace(40);
        let at = |slot, stage| trace.iter().position(|step| *step == (slot, stage));
        for slot in 0..40 {
            let started_at = at(slot, None).unwrap();
            for &(ahead, stage) in AnyVolume::PREFETCH {
                let prefetched_at = at(slot, Some(stage));
                // The first requests start before a prefetch so far ahead is due.
                assert_eq!(prefetched_at.is_some(), slot as usize >= ahead, "{slot} {stage:?}");
                let Some(prefetched_at) = prefetched_at else { continue };
                let started_between =
                    trace[prefetched_at..started_at].iter().filter(|(_, stage)| stage.is_none()).count();
                assert_eq!(started_between, ahead, "{slot} {stage:?}");
            }
        }
        assert_eq!(trace.iter().filter(|(_, stage)| stage.is_none()).count(), 40, "each request starts once");
    }

    #[test]
    #[should_panic(expected = "more requests queued than command slots")]
    fn more_requests_than_the_bound_are_a_bug() {
        trace(REQUESTS_MAX as u16 + 1);
    }

    #[test]
    fn a_single_request_causes_no_prefetch() {
        assert_eq!(trace(1), [(0, None)]);
        assert_eq!(trace(0), []);
    }
}
