//! The workers of a workload together: started, watched, added up.

use crate::data::Values;
use crate::plan::{End, Plan, Workload};
use crate::report::{Figures, Tally};
use crate::{Clock, worker};
use octokv_base::{Key, Nanos};
use octokv_client::{Reconnect, Settings};
use octokv_runtime::Polling;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// What runs on a thread.
pub type Body = Box<dyn FnOnce() + Send>;

/// What the machine under the generator gives it.
#[derive(Clone, Copy)]
pub struct Host {
    /// The time.
    pub now: Clock,
    /// Starts a thread, on one core where one is named.
    pub spawn: fn(core: Option<usize>, body: Body) -> std::io::Result<()>,
}

/// How far a workload is.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    /// Which one.
    pub workload: Workload,
    /// Operations done.
    pub operations: u64,
    /// Part of the whole, 0 to 1.
    pub part: f64,
}

/// Why a run did not end well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// No connection, or it was lost.
    Connect(octokv_client::Error),
    /// The node does not take so many connections.
    Threads {
        /// How many were asked for.
        wanted: usize,
        /// How many it takes.
        granted: usize,
    },
    /// The node does not take so many commands on a connection.
    Depth {
        /// How many were asked for.
        wanted: usize,
        /// How many it takes.
        granted: usize,
    },
    /// A thread could not be started, or not waited for; the error number.
    Thread(i32),
    /// An operation failed.
    Command {
        /// Of which workload.
        workload: Workload,
        /// On which key.
        key: Key,
        /// How.
        error: octokv_client::Error,
    },
    /// A value that was read is not what a workload with these sizes and this seed stores.
    Wrong {
        /// Whose.
        key: Key,
        /// How long it is, in bytes.
        have_bytes: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Connect(error) => error.fmt(f),
            Error::Threads { wanted, granted } => {
                write!(f, "{wanted} threads on one core: the node takes {granted} connections of one client")
            }
            Error::Depth { wanted, granted } => {
                write!(f, "a depth of {wanted}: the node takes {granted} commands at a time on a connection")
            }
            Error::Thread(errno) => {
                write!(f, "the load cannot be started: {}", std::io::Error::from_raw_os_error(*errno))
            }
            Error::Command { workload, key, error } => write!(f, "{}, key {key}: {error}", workload.name()),
            Error::Wrong { key, have_bytes } => write!(
                f,
                "key {key} has a value of {have_bytes} bytes that a workload with this value size and seed \
                 never stored"
            ),
        }
    }
}

impl std::error::Error for Error {}

/// What the workers of one workload share.
pub(crate) struct Shared {
    pub plan: Plan,
    pub workload: Workload,
    pub address: SocketAddr,
    pub client: Settings,
    pub host: Host,
    pub polling: Polling,
    pub values: Values,
    pub workers: usize,
    /// Operations given out.
    pub next: AtomicU64,
    /// Operations answered.
    pub done: AtomicU64,
    pub connected: AtomicUsize,
    pub failed: AtomicBool,
}

/// Runs every workload of a plan, each with connections of its own, one worker per entry of `cores`.
/// `progress` is told about five times a second.
///
/// # Errors
/// The first thing that failed; what was stored by then stays.
pub fn run(
    plan: &Plan,
    address: SocketAddr,
    client: &Settings,
    cores: &[Option<usize>],
    polling: Polling,
    host: Host,
    mut progress: impl FnMut(Progress),
) -> Result<Vec<Figures>, Error> {
    let client = Settings { reconnect: Reconnect::Never, ..client.clone() };
    let mut figures = Vec::new();
    for &workload in &plan.workloads {
        let cores = &cores[..cores.len().min(plan.threads)];
        let shared = Arc::new(Shared {
            plan: plan.clone(),
            workload,
            address,
            client: client.clone(),
            host,
            polling,
            values: Values::new(plan.seed, plan.value_bytes),
            workers: cores.len(),
            next: AtomicU64::new(0),
            done: AtomicU64::new(0),
            connected: AtomicUsize::new(0),
            failed: AtomicBool::new(false),
        });
        let tally = run_workers(&shared, cores, &mut progress)?;
        figures.push(Figures::new(workload, plan, &tally));
    }
    Ok(figures)
}

fn run_workers(
    shared: &Arc<Shared>,
    cores: &[Option<usize>],
    progress: &mut impl FnMut(Progress),
) -> Result<Tally, Error> {
    let (report, reports) = channel();
    let plan = &shared.plan;
    for (number, &core) in cores.iter().enumerate() {
        let threads = plan.threads / cores.len() + usize::from(number < plan.threads % cores.len());
        let (worker, report) = (Arc::clone(shared), report.clone());
        let body = Box::new(move || {
            // Lost only when the receiver gave up, and then nobody wants it.
            let _ = report.send(worker::drive(&worker, number, threads));
        });
        if let Err(error) = (shared.host.spawn)(core, body) {
            shared.failed.store(true, Ordering::Release);
            shared.connected.fetch_add(cores.len(), Ordering::AcqRel);
            return Err(Error::Thread(error.raw_os_error().unwrap_or_default()));
        }
    }
    drop(report);
    let begin = (shared.host.now)();
    let (mut total, mut failure): (Option<Tally>, Option<Error>) = (None, None);
    loop {
        match reports.recv_timeout(Duration::from_millis(200)) {
            Ok(Ok(tally)) => match &mut total {
                None => total = Some(tally),
                Some(total) => total.add(&tally),
            },
            Ok(Err(error)) => failure = failure.or(Some(error)),
            Err(RecvTimeoutError::Timeout) => {
                progress(shared.progress((shared.host.now)().since(begin)));
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    match (failure, total) {
        (Some(error), _) => Err(error),
        (None, Some(total)) => Ok(total),
        // Every worker reports before it ends, unless it panicked, which its thread has said.
        (None, None) => Err(Error::Thread(0)),
    }
}

impl Shared {
    fn progress(&self, elapsed: Nanos) -> Progress {
        let operations = self.done.load(Ordering::Relaxed);
        let part = match self.plan.end {
            End::Operations(count) => operations as f64 / count as f64,
            End::Time(span) => elapsed.as_secs_f64() / (span + self.plan.warm_up).as_secs_f64(),
        };
        Progress { workload: self.workload, operations, part: part.min(1.0) }
    }
}
