//! The job runner: runs each simulation once, even if several figures need it, in parallel on all processors.
//!
//! In: jobs. Out: their results, in the same order; identical for identical jobs on every machine.

use crate::simulation::parameters::SAMPLING_INTERVAL;
use anyhow::{Result, anyhow};
use octokv_base::Nanos;
use std::fmt::Debug;
use std::panic::RefUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// Durations of simulated runs.
#[derive(Clone, Copy, Debug)]
pub struct Durations {
    /// Warm-up: two and a half sampling intervals, so that a policy decision is in force.
    pub warm_up: Nanos,
    /// Measured time.
    pub measured: Nanos,
    /// Requests of a run that ends by their number.
    pub requests: u64,
    /// Pairs that a store is filled with before it is scanned, unless the run has fewer.
    pub stored_pairs: u32,
    /// Whether this is a quick run, whose results are not significant.
    pub is_quick: bool,
}

impl Durations {
    /// Durations of a quick run, or of a full one.
    pub fn for_mode(quick: bool) -> Durations {
        let (intervals, requests, stored_pairs) =
            if quick { (1, 10_000, 50_000) } else { (4, 100_000, 3_000_000) };
        Durations {
            warm_up: Nanos(SAMPLING_INTERVAL.0 * 5 / 2),
            measured: SAMPLING_INTERVAL.times(intervals),
            requests,
            stored_pairs,
            is_quick: quick,
        }
    }
}

/// A simulated run, identified by its configuration.
pub trait ExperimentJob: Clone + PartialEq + Debug + Sync + RefUnwindSafe {
    /// Result of the run.
    type Output: Clone + Send + Sync;

    /// Runs the simulation.
    ///
    /// # Errors
    /// A message if the simulated node or client failed.
    fn run(&self, durations: &Durations) -> Result<Self::Output, String>;
}

/// Runs jobs and keeps their results.
pub struct JobRunner<J: ExperimentJob> {
    /// Durations of all runs.
    pub durations: Durations,
    completed: Vec<(J, J::Output)>,
}

impl<J: ExperimentJob> JobRunner<J> {
    /// Creates a runner without results.
    pub fn new(durations: Durations) -> JobRunner<J> {
        JobRunner { durations, completed: Vec::new() }
    }

    /// Number of completed runs.
    pub fn len(&self) -> usize {
        self.completed.len()
    }

    /// Returns the results of jobs, in order; runs those without a result.
    ///
    /// # Errors
    /// The first job that failed or panicked.
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
                let result = caught.unwrap_or_else(|_| Err("the run panicked".to_owned()));
                *failed.lock().expect("no panic while locked") |= result.is_err();
                let _ = results[at].set(result);
                if *failed.lock().expect("no panic while locked") {
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
                Some(Ok(output)) => self.completed.push((job.clone(), output)),
                Some(Err(message)) => return Err(anyhow!("{job:?}: {message}")),
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
