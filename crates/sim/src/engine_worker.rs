//! Background work of a volume at random times, beside what it needs.
//!
//! In: the number of completed commands. Out: one piece of work at a time, on a core of the node. Invariant: none outlives the
//! node that it began on.

use crate::engine_plan::EnginePlan;
use crate::engine_work::EngineWork;
use crate::node_under_test::{KvNodeUnderTest, TaskResult};
use octokv_base::Prng;

/// Draws work and its times.
pub struct EngineWorker {
    random: Prng,
    engine: EnginePlan,
    mean_interval: u64,
    next_at_completed: u64,
    running: Option<TaskResult<()>>,
}

impl EngineWorker {
    /// A worker of an engine, if that has work.
    pub fn new(random: Prng, engine: EnginePlan) -> Option<EngineWorker> {
        let mean_interval = engine.work_interval()?;
        Some(EngineWorker { random, engine, mean_interval, next_at_completed: 0, running: None })
    }

    /// Number of completed commands at which the next piece of work is due.
    pub fn next_at_completed(&self) -> u64 {
        self.next_at_completed
    }

    /// Begins a piece of work if it is due and the last one has ended.
    pub fn run(&mut self, node: &KvNodeUnderTest, completed: u64) {
        if completed < self.next_at_completed {
            return;
        }
        self.next_at_completed = completed + 1 + self.random.below(2 * self.mean_interval);
        let work = EngineWork::draw(&mut self.random, &self.engine);
        if let Some(work) = work.filter(|_| !self.is_running()) {
            self.running = Some(node.start_work(work));
        }
    }

    /// Whether a piece of work has not ended.
    pub fn is_running(&self) -> bool {
        self.running.as_ref().is_some_and(|running| running.borrow().is_none())
    }

    /// The node was stopped, and the work with it.
    pub fn stop(&mut self) {
        self.running = None;
    }
}
