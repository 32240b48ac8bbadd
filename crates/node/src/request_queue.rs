//! Requests on their way to an engine.
//!
//! ```text
//!   front ─▶ job │ job │ job │ job │ job │ job │ …     begun one by one, while there are workers
//!             begun        record      entry     index       what each is said to look at soon
//! ```
//! In: requests, each with its link. Out: jobs that workers have begun. What a request looks at in the index and on a device of
//! memory is seldom in the processor's caches; asked for while the requests before it are carried out, it is there
//! in time. A request that is alone costs nothing by this.

use crate::core_metrics::RequestTiming;
use octokv_base::NamespaceId;
use octokv_engine::PrefetchStage;
use octokv_nvmf::RequestOperation;
use octokv_runtime::WorkerPool;
use octokv_sched::{CoreId, TenantId};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;

/// How many requests before its own a hint is given: the time of about so many hides one trip to memory.
const PREFETCH_DISTANCES: [(usize, PrefetchStage); 3] =
    [(12, PrefetchStage::Partition), (8, PrefetchStage::Entry), (4, PrefetchStage::Record)];

/// Which of a core's charges is that of a request, if any is: small, since every request carries one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TicketId(pub(crate) u32);

impl TicketId {
    /// None is.
    pub const NONE: TicketId = TicketId(u32::MAX);
}

impl Default for TicketId {
    fn default() -> TicketId {
        TicketId::NONE
    }
}

/// A request and where its answer goes.
#[derive(Debug)]
pub struct PendingRequest {
    /// The core that has its connection.
    pub home_core: CoreId,
    /// The connection.
    pub connection: u32,
    /// The command.
    pub slot: u32,
    /// On which namespace.
    pub namespace: NamespaceId,
    /// What to do there.
    pub operation: RequestOperation,
    /// Whose it is.
    pub tenant: TenantId,
    /// When it came.
    pub timing: RequestTiming,
    /// What the core that it runs on has noted of it.
    pub ticket_id: TicketId,
}

/// Passes a hint on to whoever will carry the job out.
type PrefetchFn = dyn Fn(&PendingRequest, PrefetchStage);

/// Jobs that have not begun.
pub struct RequestQueue {
    waiting: VecDeque<PendingRequest>,
    prefetch: Box<PrefetchFn>,
}

impl RequestQueue {
    /// None yet. `expect` passes hints on.
    pub fn new(prefetch: impl Fn(&PendingRequest, PrefetchStage) + 'static) -> RequestQueue {
        RequestQueue { waiting: VecDeque::new(), prefetch: Box::new(prefetch) }
    }

    /// Adds one.
    #[inline]
    pub fn push(&mut self, request: PendingRequest) {
        self.waiting.push_back(request);
    }

    /// Forgets all but the first so many: a bug that can be planted.
    pub fn truncate(&mut self, count: usize) {
        self.waiting.truncate(count);
    }

    /// Takes the first.
    pub fn pop(&mut self) -> Option<PendingRequest> {
        self.waiting.pop_front()
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether all have begun.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Keeps those that `stays` says of.
    pub fn retain(&mut self, keep: impl FnMut(&mut PendingRequest) -> bool) {
        self.waiting.retain_mut(keep);
    }

    /// Begins jobs while there are workers. One that need not wait is over at once. Gives whether there was one.
    pub fn start<F: Future<Output = Infallible>>(
        &mut self,
        workers: &mut WorkerPool<PendingRequest, F>,
    ) -> bool {
        let mut worked = false;
        while !workers.is_full()
            && let Some(request) = self.pop()
        {
            worked = true;
            for (ahead, stage) in PREFETCH_DISTANCES {
                if let Some(later) = self.waiting.get(ahead - 1) {
                    (self.prefetch)(later, stage);
                }
            }
            assert!(workers.start(request).is_ok(), "one was vacant");
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

    /// What was said and done with so many requests, in order: a slot with a hint, or without one when it began.
    fn trace(count: u32) -> Vec<(u32, Option<PrefetchStage>)> {
        let trace: Rc<RefCell<Vec<_>>> = Rc::default();
        let (prefetches, begins) = (Rc::clone(&trace), Rc::clone(&trace));
        let mut queue = RequestQueue::new(move |request, stage| {
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
            for (ahead, stage) in PREFETCH_DISTANCES {
                let prefetched_at = at(slot, Some(stage));
                // Those of the first requests that would be due before any began are left out.
                assert_eq!(prefetched_at.is_some(), slot as usize >= ahead, "{slot} {stage:?}");
                let Some(said) = prefetched_at else { continue };
                let started_between =
                    trace[said..started_at].iter().filter(|(_, hint)| hint.is_none()).count();
                assert_eq!(started_between, ahead, "{slot} {stage:?}");
            }
        }
        assert_eq!(trace.iter().filter(|(_, hint)| hint.is_none()).count(), 40, "each begins once");
    }

    #[test]
    fn a_single_request_causes_no_prefetch() {
        assert_eq!(trace(1), [(0, None)]);
        assert_eq!(trace(0), []);
    }
}
