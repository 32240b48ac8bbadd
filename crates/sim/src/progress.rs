//! Progress of the load of a simulation: counters and limits that all clients share with the runner.
//!
//! In: submissions and completions of clients, phases of the runner. Out: whether clients may submit, and the first
//! violation. Invariants: `completed` ≤ `submitted` ≤ `submit_limit`; a change of the runner that gives clients something
//! to do notifies their cores, which may be asleep.

use crate::scenario::{Phase, PhaseEnd};
use octokv_runtime::CoreWaker;
use std::sync::Arc;

/// Commands beyond a phase that ends with a crash: a crash must interrupt commands.
const CRASH_EXTRA_COMMANDS: u64 = 1_000;

/// Counters of the commands of all clients.
#[derive(Default)]
pub struct LoadProgress {
    /// Commands submitted so far.
    pub submitted: u64,
    /// Maximum of `submitted` in this phase.
    pub submit_limit: u64,
    /// Commands completed, or lost with their session.
    pub completed: u64,
    /// Commands completed without error.
    pub succeeded: u64,
    /// Sessions so far.
    sessions: u64,
    /// Whether clients submit nothing and disconnect.
    pub quiescing: bool,
    /// The first violated guarantee.
    pub violation: Option<String>,
    /// The wakers of the clients' cores, those of ended clients included.
    client_wakers: Vec<Arc<CoreWaker>>,
}

/// State of a load that counts its progress.
pub trait TrackProgress {
    /// Counters and limits of the load.
    fn progress(&self) -> &LoadProgress;

    /// Counters and limits of the load, for updates.
    fn progress_mut(&mut self) -> &mut LoadProgress;
}

impl LoadProgress {
    /// Records the first violation; ignores later ones.
    pub fn fail(&mut self, message: String) {
        self.violation.get_or_insert(message);
    }

    /// Whether a client may submit another command.
    pub fn may_submit(&self) -> bool {
        self.submitted < self.submit_limit && self.violation.is_none()
    }

    /// The number of a new session, never 0.
    pub fn next_session(&mut self) -> u64 {
        self.sessions += 1;
        self.sessions
    }

    /// Adds a core with clients.
    pub fn add_client(&mut self, core_waker: &Arc<CoreWaker>) {
        self.client_wakers.push(Arc::clone(core_waker));
    }

    /// Notifies the clients' cores of a change of what they may do.
    pub fn notify_clients(&self) {
        self.client_wakers.iter().for_each(|core_waker| core_waker.notify());
    }

    /// Makes clients submit nothing more and disconnect.
    pub fn begin_quiescing(&mut self) {
        self.quiescing = true;
        self.notify_clients();
    }

    /// Allows the commands of a phase. Returns the number of commands completed before it.
    pub fn begin_phase(&mut self, phase: &Phase) -> u64 {
        let extra = if matches!(phase.end, PhaseEnd::Crash { .. }) { CRASH_EXTRA_COMMANDS } else { 0 };
        self.submit_limit = self.submitted + phase.operations + extra;
        self.quiescing = false;
        self.notify_clients();
        self.completed
    }

    /// Takes the violation.
    ///
    /// # Errors
    /// The violation, if there is one.
    pub fn take_violation(&mut self) -> Result<(), String> {
        self.violation.take().map_or(Ok(()), Err)
    }
}
