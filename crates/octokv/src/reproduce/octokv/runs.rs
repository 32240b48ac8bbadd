//! Runs of experiments: each once, however many figures it is in, on as many processors as there are.
//!
//! In: jobs. Out: what each came to, in their order; the same for the same jobs on every machine.

use anyhow::{Result, anyhow};
use octokv_base::Nanos;
use octokv_sched::{Policy, Settings};
use octokv_sim::papers::bench::{Bench, Trial};
use octokv_sim::papers::figures::Figures;
use octokv_sim::papers::load::Placement;
use octokv_sim::papers::parameters::{CostSetting, Operation, TABLE_IV, THRESHOLD, WINDOW, costs};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

const SEED: u64 = 1;
/// Of Fig. 8, in windows; the paper's seconds.
pub const SERIES_WINDOWS: usize = 30;
/// When balancing is switched on there.
pub const SWITCHED_AT: usize = 15;

/// Which connection requests go over, of the two ways that are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// In order, up to the threshold (OctoFAS §3.3).
    InOrder,
    /// By the shares of Table IV.
    ByShares,
}

impl Filled {
    /// As figures call it.
    pub fn name(self) -> &'static str {
        match self {
            Filled::InOrder => "in order",
            Filled::ByShares => "by Table IV's shares",
        }
    }
}

/// How it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Course {
    /// For a while, after a while.
    Steady,
    /// So many requests, after a while: each stage counts each of them.
    Requests(u64),
    /// Window by window; the policy from [`SWITCHED_AT`] on.
    Switched,
}

/// One run.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// What a request costs.
    pub costs: CostSetting,
    /// Whether the engine's part is among it.
    pub engine: bool,
    /// Put or get.
    pub operation: Operation,
    /// Threads.
    pub threads: usize,
    /// Over which connections.
    pub filled: Filled,
    /// Who runs what where.
    pub policy: Policy,
    /// T_OL and T_LB.
    pub thresholds: (f64, f64),
    /// Whether the engine keeps its journal.
    pub journal: bool,
    /// How it runs.
    pub course: Course,
}

impl Job {
    /// The usual one: the paper's costs and thresholds, the engine, no balancing.
    pub fn new(operation: Operation, threads: usize, filled: Filled) -> Job {
        Job {
            costs: CostSetting::Paper,
            engine: true,
            operation,
            threads,
            filled,
            policy: Policy::None,
            thresholds: (0.4, 0.1),
            journal: true,
            course: Course::Steady,
        }
    }

    /// The same with a policy.
    pub fn with(self, policy: Policy) -> Job {
        Job { policy, ..self }
    }

    fn settings(&self, policy: Policy) -> Settings {
        let (overload, imbalance_difference) = self.thresholds;
        Settings { policy, window: WINDOW, overload, imbalance_difference, ..Settings::default() }
    }

    fn run(&self, spans: &Spans) -> Result<Vec<Figures>, String> {
        let placement = match self.filled {
            Filled::InOrder => Placement::InOrder(THRESHOLD),
            Filled::ByShares => Placement::Shares(TABLE_IV.to_vec()),
        };
        let first = if self.course == Course::Switched { Policy::None } else { self.policy };
        let bench = Bench::new(&Trial {
            seed: SEED,
            costs: costs(self.costs, self.operation, self.engine),
            operation: self.operation,
            threads: self.threads,
            placement,
            scheduling: self.settings(first),
            journal: self.journal,
        })?;
        bench.run_for(spans.warm_up)?;
        match self.course {
            Course::Steady => Ok(vec![bench.run_for(spans.steady)?]),
            Course::Requests(requests) => Ok(vec![bench.run_requests(requests)?]),
            Course::Switched => {
                let window = |number: usize| {
                    if number == SWITCHED_AT {
                        bench.set_policy(self.settings(self.policy))?;
                    }
                    bench.run_for(WINDOW)
                };
                (0..SERIES_WINDOWS).map(window).collect()
            }
        }
    }
}

/// How long runs are.
#[derive(Clone, Copy, Debug)]
pub struct Spans {
    /// Before what is measured: two windows and a half, so that a choice is in force.
    pub warm_up: Nanos,
    /// What is measured.
    pub steady: Nanos,
    /// Requests of Tables IV and V.
    pub requests: u64,
}

/// All runs so far.
pub struct Runs {
    /// How long they are.
    pub spans: Spans,
    known: Vec<(Job, Vec<Figures>)>,
}

impl Runs {
    /// None yet.
    pub fn new(spans: Spans) -> Runs {
        Runs { spans, known: Vec::new() }
    }

    /// How many there were.
    pub fn len(&self) -> usize {
        self.known.len()
    }

    /// What each job comes to.
    pub fn all(&mut self, jobs: &[Job]) -> Result<Vec<Vec<Figures>>> {
        let mut fresh: Vec<&Job> = Vec::new();
        for job in jobs {
            if self.find(job).is_none() && !fresh.contains(&job) {
                fresh.push(job);
            }
        }
        let results: Vec<OnceLock<Result<Vec<Figures>, String>>> =
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

    /// What one steady job comes to.
    pub fn steady(&mut self, jobs: &[Job]) -> Result<Vec<Figures>> {
        let all = self.all(jobs)?;
        Ok(all.into_iter().filter_map(|mut figures| figures.pop()).collect())
    }

    fn find(&self, job: &Job) -> Option<&Vec<Figures>> {
        self.known.iter().find(|(known, _)| known == job).map(|(_, figures)| figures)
    }
}

fn take<'a>(next: &AtomicUsize, jobs: &[&'a Job]) -> Option<(usize, &'a Job)> {
    let at = next.fetch_add(1, Ordering::Relaxed);
    jobs.get(at).map(|job| (at, *job))
}
