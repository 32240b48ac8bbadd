//! Runs of experiments: each once, however many figures it is in, on as many processors as there are.
//!
//! In: jobs. Out: what each came to, in their order; the same for the same jobs on every machine.

use crate::simulation::parameters::SAMPLING_INTERVAL;
use anyhow::{Result, anyhow};
use octokv_base::Nanos;
use std::fmt::Debug;
use std::panic::RefUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// How long runs are.
#[derive(Clone, Copy, Debug)]
pub struct Durations {
    /// Before what is measured: two windows and a half, so that a choice is in force.
    pub warm_up: Nanos,
    /// What is measured.
    pub measured: Nanos,
    /// Requests, where so many are run.
    pub requests: u64,
}

impl Durations {
    /// Of a quick run, or of one that says something.
    pub fn for_mode(quick: bool) -> Durations {
        let (windows, requests) = if quick { (1, 10_000) } else { (4, 100_000) };
        Durations {
            warm_up: Nanos(SAMPLING_INTERVAL.0 * 5 / 2),
            measured: SAMPLING_INTERVAL.times(windows),
            requests,
        }
    }
}

/// One run, by what it is.
pub trait ExperimentJob: Clone + PartialEq + Debug + Sync + RefUnwindSafe {
    /// What it comes to.
    type Output: Clone + Send + Sync;

    /// Runs it.
    ///
    /// # Errors
    /// What went wrong.
    fn run(&self, durations: &Durations) -> Result<Self::Output, String>;
}

/// All runs so far.
pub struct JobRunner<J: ExperimentJob> {
    /// How long they are.
    pub durations: Durations,
    completed: Vec<(J, J::Output)>,
}

impl<J: ExperimentJob> JobRunner<J> {
    /// None yet.
    pub fn new(durations: Durations) -> JobRunner<J> {
        JobRunner { durations, completed: Vec::new() }
    }

    /// How many there were.
    pub fn len(&self) -> usize {
        self.completed.len()
    }

    /// What each job comes to.
    pub fn run_all(&mut self, jobs: &[J]) -> Result<Vec<J::Output>> {
        let mut fresh: Vec<&J> = Vec::new();
        for job in jobs {
            if self.find_completed(job).is_none() && !fresh.contains(&job) {
                fresh.push(job);
            }
        }
        let results: Vec<OnceLock<Result<J::Output, String>>> =
            fresh.iter().map(|_| OnceLock::new()).collect();
        let (next, durations) = (AtomicUsize::new(0), self.durations);
        let failed = Mutex::new(false);
        let work = || {
            while let Some((at, job)) = take_next(&next, &fresh) {
                let caught = std::panic::catch_unwind(|| job.run(&durations));
                let result = caught.unwrap_or_else(|_| Err("a bug of ours, told above".to_owned()));
                *failed.lock().expect("nobody panics with it") |= result.is_err();
                let _ = results[at].set(result);
                if *failed.lock().expect("nobody panics with it") {
                    return;
                }
            }
        };
        let processors = std::thread::available_parallelism().map_or(1, |count| count.get());
        std::thread::scope(|scope| {
            (0..processors.min(fresh.len())).for_each(|_| drop(scope.spawn(work)));
        });
        for (job, result) in fresh.into_iter().zip(results) {
            match result.into_inner() {
                Some(Ok(figures)) => self.completed.push((job.clone(), figures)),
                Some(Err(why)) => return Err(anyhow!("{job:?}: {why}")),
                None => {}
            }
        }
        let found = |job| self.find_completed(job).cloned().ok_or_else(|| anyhow!("{job:?} did not run"));
        jobs.iter().map(found).collect()
    }

    fn find_completed(&self, job: &J) -> Option<&J::Output> {
        self.completed.iter().find(|(known, _)| known == job).map(|(_, output)| output)
    }
}

fn take_next<'a, J>(next: &AtomicUsize, jobs: &[&'a J]) -> Option<(usize, &'a J)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    jobs.get(at).map(|job| (at, *job))
}
