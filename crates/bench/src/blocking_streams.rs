//! One stream of a workload on an OS thread of its own, for stores whose operations block their thread.
//! In: the operations of a workload, and a function that executes one. Out: a recorder, or the first failure, which ends the streams of
//! all threads.

use crate::engine_op::EngineOpResult;
use crate::error::BenchError;
use crate::op_generator::Operation;
use crate::recorder::{OpResult, Recorder};
use crate::workload_state::WorkloadState;
use octokv_base::Nanos;
use std::sync::atomic::Ordering;

/// Runs stream `number` when those of all threads are ready. `execute` executes an operation; `after` gets the recorder and the time
/// after each.
///
/// # Errors
/// The first failure of `execute`.
pub(crate) fn run_blocking_stream(
    shared: &WorkloadState,
    number: usize,
    mut execute: impl FnMut(Operation) -> Result<EngineOpResult, BenchError>,
    mut after: impl FnMut(&mut Recorder, Nanos),
) -> Result<Recorder, BenchError> {
    shared.group.connected.fetch_add(1, Ordering::AcqRel);
    while shared.group.connected.load(Ordering::Acquire) < shared.group.workers {
        std::thread::yield_now();
    }
    let now = shared.platform.now;
    let begin = now();
    let (mut op_generator, until) = (shared.op_generator(number), shared.end_time(begin));
    let mut recorder = Recorder::new(begin + shared.config.warm_up);
    loop {
        let started = now();
        if started >= until || shared.group.failed.load(Ordering::Relaxed) {
            return Ok(recorder);
        }
        let Some(op) = shared.next_op(&mut op_generator) else { return Ok(recorder) };
        let EngineOpResult { found, value_bytes, pairs_read } = execute(op).inspect_err(|_| {
            shared.group.failed.store(true, Ordering::Release);
        })?;
        let finished = now();
        recorder.record_op(OpResult { started, finished, found, value_bytes, keys_listed: 0, pairs_read });
        after(&mut recorder, finished);
        shared.completed_ops.fetch_add(1, Ordering::Relaxed);
    }
}
