//! Flushes, compactions and checkpoints of a volume of the ordered engine at random times, beside those that it needs.
//!
//! In: the number of completed commands. Out: one piece of work at a time, on a core of the node. Invariant: none outlives the
//! node that it began on.

use crate::node_under_test::{KvNodeUnderTest, TaskResult, TreeWork};
use octokv_base::Prng;

/// Draws work and its times.
pub struct TreeWorker {
    random: Prng,
    mean_interval: u64,
    next_at_completed: u64,
    running: Option<TaskResult<()>>,
}

impl TreeWorker {
    /// A worker that begins something after `mean_interval` commands in the mean.
    pub fn new(random: Prng, mean_interval: u64) -> TreeWorker {
        TreeWorker { random, mean_interval, next_at_completed: 0, running: None }
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
        let work = match self.random.below(6) {
            0..2 => TreeWork::Flush,
            2..4 => TreeWork::Compact { wants_space: false },
            4 => TreeWork::Compact { wants_space: true },
            _ => TreeWork::Checkpoint,
        };
        if !self.is_running() {
            self.running = Some(node.start_tree_work(work));
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
