//! Runs of experiments: each once, however many figures it is in, on as many processors as there are.
//!
//! In: jobs. Out: what each came to, in their order; the same for the same jobs on every machine.

use anyhow::{Result, anyhow};
use octokv_base::Nanos;
use octokv_sim::experiments::parameters::WINDOW;
use std::fmt::Debug;
use std::panic::RefUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

/// How long runs are.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    /// Before what is measured: two windows and a half, so that a choice is in force.
    pub warm_up: Nanos,
    /// What is measured.
    pub steady: Nanos,
    /// Requests, where so many are run.
    pub requests: u64,
}

impl Spans {
    /// Of a quick run, or of one that says something.
    pub fn of(quick: bool) -> Spans {
        let (windows, requests) = if quick { (1, 10_000) } else { (4, 100_000) };
        Spans { warm_up: Nanos(WINDOW.0 * 5 / 2), steady: WINDOW.times(windows), requests }
    }
}

/// One run, by what it is.
pub trait Job: Clone + PartialEq + Debug + Sync + RefUnwindSafe {
    /// What it comes to.
    type Outcome: Clone + Send + Sync;
    /// What the paper's real runs share, which are not jobs.
    type Real: Default;

    /// Runs it.
    ///
    /// # Errors
    /// What went wrong.
    fn run(&self, spans: &Spans) -> Result<Self::Outcome, String>;
}

/// All runs so far.
pub struct Runs<J: Job> {
    /// How long they are.
    pub spans: Spans,
    /// Those that are real.
    pub real: J::Real,
    known: Vec<(J, J::Outcome)>,
}

impl<J: Job> Runs<J> {
    /// None yet.
    pub fn new(spans: Spans) -> Runs<J> {
        Runs { spans, real: J::Real::default(), known: Vec::new() }
    }

    /// How many there were.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// What each job comes to.
    pub fn all(&mut self, jobs: &[J]) -> Result<Vec<J::Outcome>> {
        let mut fresh: Vec<&J> = Vec::new();
        for job in jobs {
            if self.find(job).is_none() && !fresh.contains(&job) {
                fresh.push(job);
            }
        }
        let results: Vec<OnceLock<Result<J::Outcome, String>>> =
            fresh.iter().map(|_| OnceLock::new()).collect();
        let (next, spans) = (AtomicUsize::new(0), self.spans);
        let broken = Mutex::new(false);
        let work = || {
            while let Some((at, job)) = take(&next, &fresh) {
                let caught = std::panic::catch_unwind(|| job.run(&spans));
                let result = caught.unwrap_or_else(|_| Err("a bug of ours, told above".to_owned()));
                *broken.lock().expect("nobody panics with it") |= result.is_err();
                let _ = results[at].set(result);
                if *broken.lock().expect("nobody panics with it") {
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
                Some(Ok(figures)) => self.known.push((job.clone(), figures)),
                Some(Err(why)) => return Err(anyhow!("{job:?}: {why}")),
                None => {}
            }
        }
        let found = |job| self.find(job).cloned().ok_or_else(|| anyhow!("{job:?} did not run"));
        jobs.iter().map(found).collect()
    }

    fn find(&self, job: &J) -> Option<&J::Outcome> {
        self.known.iter().find(|(known, _)| known == job).map(|(_, figures)| figures)
    }
}

fn take<'a, J>(next: &AtomicUsize, jobs: &[&'a J]) -> Option<(usize, &'a J)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    jobs.get(at).map(|job| (at, *job))
}
