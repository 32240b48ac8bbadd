//! Background work of a volume at random times, beside what it needs.
//!
//! In: the number of completed commands. Out: one piece of work at a time, on a core of the node. Invariant: none outlives the
//! node that it began on.

use crate::draw::pick;
use crate::engine_plan::EnginePlan;
use crate::engine_work::{EngineWork, LogWork};
use crate::node_under_test::{KvNodeUnderTest, TaskResult};
use octokv_base::Prng;
use octokv_engine::log::log_place::LogKind;

/// The steps of the simulation between the beginning of a compaction and a crash are fewer.
const STEPS_BEFORE_CRASH: u64 = 400;

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

    /// Begins a compaction of the value logs of all stores in front of a crash, in two thirds of the cases, if the engine has such logs. Gives the steps of the
    /// simulation until the crash: so many that it may be anywhere in the compaction, also between the head that a log has passed and its flush.
    pub fn begin_before_crash(&mut self, node: &KvNodeUnderTest) -> u64 {
        if !matches!(self.engine, EnginePlan::Log(_)) || self.random.one_in(3) {
            return 0;
        }
        if !self.is_running() {
            let rounds = pick(&mut self.random, &[1, 4]);
            self.running = Some(node.start_work(EngineWork::Log(LogWork::Compact(LogKind::Values, rounds))));
        }
        self.random.below(STEPS_BEFORE_CRASH)
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
