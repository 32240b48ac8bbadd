//! Requests on their way to an engine.
//!
//! ```text
//!   front ─▶ job │ job │ job │ job │ job │ job │ …     begun one by one, while there are workers
//!             begun        record      entry     index       what each is said to look at soon
//! ```
//! In: requests, each with its link. Out: jobs that workers have begun. What a request looks at in the index and on a device of
//! memory is seldom in the processor's caches; asked for while the requests before it are carried out, it is there
//! in time. A request that is alone costs nothing by this.

use crate::core_metrics::Stamp;
use crate::request_scheduler::Note;
use octokv_base::NamespaceId;
use octokv_engine::Hint;
use octokv_nvmf::Operation;
use octokv_runtime::Workers;
use octokv_sched::{CoreId, FlowId};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;

/// How many requests before its own a hint is given: the time of about so many hides one trip to memory.
const AHEAD: [(usize, Hint); 3] = [(12, Hint::Index), (8, Hint::Entry), (4, Hint::Record)];

/// A request and where its answer goes.
#[derive(Debug)]
pub struct Job {
    /// The core that has its connection.
    pub home: CoreId,
    /// The connection.
    pub link: u32,
    /// The command.
    pub slot: u32,
    /// On which namespace.
    pub namespace: NamespaceId,
    /// What to do there.
    pub operation: Operation,
    /// Whose it is.
    pub flow: FlowId,
    /// When it came.
    pub stamp: Stamp,
    /// What the core that it runs on has noted of it.
    pub note: Note,
}

/// Passes a hint on to whoever will carry the job out.
type Expect = dyn Fn(&Job, Hint);

/// Jobs that have not begun.
pub struct Jobs {
    waiting: VecDeque<Job>,
    expect: Box<Expect>,
}

impl Jobs {
    /// None yet. `expect` passes hints on.
    pub fn new(expect: impl Fn(&Job, Hint) + 'static) -> Jobs {
        Jobs { waiting: VecDeque::new(), expect: Box::new(expect) }
    }

    /// Adds one.
    #[inline]
    pub fn push(&mut self, job: Job) {
        self.waiting.push_back(job);
    }

    /// Forgets all but the first so many: a bug that can be planted.
    pub fn truncate(&mut self, count: usize) {
        self.waiting.truncate(count);
    }

    /// Takes the first.
    pub fn pop(&mut self) -> Option<Job> {
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
    pub fn retain(&mut self, stays: impl FnMut(&mut Job) -> bool) {
        self.waiting.retain_mut(stays);
    }

    /// Begins jobs while there are workers. One that need not wait is over at once. Gives whether there was one.
    pub fn start<F: Future<Output = Infallible>>(&mut self, workers: &mut Workers<Job, F>) -> bool {
        let mut worked = false;
        while !workers.is_full()
            && let Some(job) = self.pop()
        {
            worked = true;
            for (ahead, hint) in AHEAD {
                if let Some(later) = self.waiting.get(ahead - 1) {
                    (self.expect)(later, hint);
                }
            }
            assert!(workers.start(job).is_ok(), "one was vacant");
        }
        worked
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_runtime::{Desk, Doorbell};
    use std::cell::RefCell;
    use std::rc::Rc;

    /// What was said and done with so many requests, in order: a slot with a hint, or without one when it began.
    fn course(count: u32) -> Vec<(u32, Option<Hint>)> {
        let course: Rc<RefCell<Vec<_>>> = Rc::default();
        let (hints, begins) = (Rc::clone(&course), Rc::clone(&course));
        let mut jobs = Jobs::new(move |job, hint| hints.borrow_mut().push((job.slot, Some(hint))));
        let job = |slot| Job {
            home: CoreId(0),
            link: 7,
            slot,
            namespace: NamespaceId(1),
            operation: Operation::Flush,
            flow: FlowId(0),
            stamp: Stamp::default(),
            note: Note::NONE,
        };
        (0..count).for_each(|slot| jobs.push(job(slot)));
        assert!(jobs.len() == count as usize);
        let mut workers = Workers::new(4, Doorbell::silent(), move |desk: Rc<Desk<Job>>| {
            let begins = Rc::clone(&begins);
            async move {
                loop {
                    let slot = desk.next().await.slot;
                    begins.borrow_mut().push((slot, None));
                }
            }
        });
        assert_eq!(jobs.start(&mut workers), count > 0);
        assert!(jobs.is_empty());
        course.take()
    }

    #[test]
    fn each_request_is_announced_step_by_step_before_it_begins() {
        let course = course(40);
        let at = |slot, hint| course.iter().position(|step| *step == (slot, hint));
        for slot in 0..40 {
            let begun = at(slot, None).unwrap();
            for (ahead, hint) in AHEAD {
                let said = at(slot, Some(hint));
                // Those of the first requests that would be due before any began are left out.
                assert_eq!(said.is_some(), slot as usize >= ahead, "{slot} {hint:?}");
                let Some(said) = said else { continue };
                let since = course[said..begun].iter().filter(|(_, hint)| hint.is_none()).count();
                assert_eq!(since, ahead, "{slot} {hint:?}");
            }
        }
        assert_eq!(course.iter().filter(|(_, hint)| hint.is_none()).count(), 40, "each begins once");
    }

    #[test]
    fn a_request_that_is_alone_costs_no_hints() {
        assert_eq!(course(1), [(0, None)]);
        assert_eq!(course(0), []);
    }
}
