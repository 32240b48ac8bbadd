//! Requests on their way to an engine.
//!
//! ```text
//!   front ─▶ job │ job │ job │ job │ job │ job │ …     begun one by one, while there is room for tasks
//!             begun        record      entry     index       what each is said to look at soon
//! ```
//! In: requests, each with its link. Out: tasks that have begun. What a request looks at in the index and on a device of
//! memory is seldom in the processor's caches; asked for while the requests before it are carried out, it is there
//! in time. A request that is alone costs nothing by this.

use octokv_base::NamespaceId;
use octokv_engine::Hint;
use octokv_runtime::Tasks;
use octokv_target::{Operation, Request};
use std::collections::VecDeque;
use std::future::Future;

/// How many requests before its own a hint is given: the time of about so many hides one trip to memory.
const AHEAD: [(usize, Hint); 3] = [(12, Hint::Index), (8, Hint::Entry), (4, Hint::Record)];

/// A request and where its answer goes.
pub struct Job {
    /// The connection.
    pub link: u32,
    /// The command.
    pub slot: u32,
    /// On which namespace.
    pub namespace: NamespaceId,
    /// What to do there.
    pub operation: Operation,
}

impl Job {
    /// The job of a link's request.
    pub fn new(link: u32, request: Request) -> Job {
        let Request { slot, namespace, operation } = request;
        Job { link, slot, namespace, operation }
    }
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

    /// Adds a link's requests, and leaves the vector empty.
    pub fn take(&mut self, link: u32, requests: &mut Vec<Request>) {
        self.waiting.extend(requests.drain(..).map(|request| Job::new(link, request)));
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
    pub fn retain(&mut self, stays: impl FnMut(&Job) -> bool) {
        self.waiting.retain(stays);
    }

    /// Makes tasks of jobs while there is room. A task that need not wait is over at once. Gives whether there was one.
    pub fn start<F: Future<Output = ()>>(&mut self, tasks: &mut Tasks<F>, make: &impl Fn(Job) -> F) -> bool {
        let mut worked = false;
        while !tasks.is_full()
            && let Some(job) = self.waiting.pop_front()
        {
            worked = true;
            for (ahead, hint) in AHEAD {
                if let Some(later) = self.waiting.get(ahead - 1) {
                    (self.expect)(later, hint);
                }
            }
            let spawned = tasks.spawn(make(job));
            assert!(spawned.is_ok(), "there was room for it");
        }
        worked
    }
}
