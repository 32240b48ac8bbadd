//! The streams of one core on an engine in this process: tasks that run one operation after another, and the writer beside
//! a workload.
//! In: the operations of a workload. Out: a recorder, or the first failure, which ends the streams of all cores.

use crate::arrival_schedule::ArrivalSchedule;
use crate::engine_op::{EngineOpResult, put, run_engine_op};
use crate::error::BenchError;
use crate::op_generator::OpGenerator;
use crate::recorder::{OpResult, Recorder};
use crate::workload_state::WorkloadState;
use octokv_base::{BufferPool, Nanos};
use octokv_engine::AnyEngine;
use octokv_runtime::{CoreWaker, ReactorHandle, TaskSlab};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

/// Longest sleep of the writer, which ends when the streams have.
const WRITER_SLEEP_MAX: Nanos = Nanos::from_millis(5);

/// State that the streams of a core share.
pub(crate) struct StreamContext<'a> {
    shared: &'a WorkloadState,
    engine: Rc<AnyEngine>,
    pool: BufferPool,
    op_generator: RefCell<OpGenerator>,
    recorder: RefCell<Recorder>,
    failure: RefCell<Option<BenchError>>,
    end_at: Nanos,
    /// Streams that have not ended.
    running: Cell<usize>,
}

/// The running streams.
pub(crate) type Streams<'a> = TaskSlab<Pin<Box<dyn Future<Output = ()> + 'a>>>;

impl<'a> StreamContext<'a> {
    /// The context of worker `number`, whose workload begins now.
    pub fn new(
        shared: &'a WorkloadState,
        number: usize,
        engine: &Rc<AnyEngine>,
        has_iterators: bool,
        pool: BufferPool,
    ) -> StreamContext<'a> {
        let begin = (shared.platform.now)();
        let mut op_generator = shared.op_generator(number);
        op_generator.set_scans(has_iterators);
        StreamContext {
            shared,
            engine: Rc::clone(engine),
            pool,
            op_generator: RefCell::new(op_generator),
            recorder: RefCell::new(Recorder::new(begin + shared.config.warm_up)),
            failure: RefCell::new(None),
            end_at: shared.end_time(begin),
            running: Cell::new(0),
        }
    }

    /// Starts `count` streams, and the writer beside the workload if `has_writer`.
    pub fn start(
        &'a self,
        count: usize,
        has_writer: bool,
        handle: &'a ReactorHandle,
        core_waker: Arc<CoreWaker>,
    ) -> Streams<'a> {
        let mut streams: Streams<'a> = TaskSlab::new(count + usize::from(has_writer), core_waker);
        self.running.set(count);
        let mut spawn = |stream: Pin<Box<dyn Future<Output = ()> + 'a>>| {
            assert!(streams.spawn(stream).is_ok(), "there is room for every stream");
        };
        for _ in 0..count {
            spawn(Box::pin(self.run_stream()));
        }
        if has_writer {
            spawn(Box::pin(self.run_writer(handle)));
        }
        streams
    }

    /// The recorder of streams that have all ended.
    ///
    /// # Errors
    /// The first failure.
    pub fn finish(self) -> Result<Recorder, BenchError> {
        match self.failure.into_inner() {
            Some(error) => Err(error),
            None => Ok(self.recorder.into_inner()),
        }
    }

    /// Runs one operation after another until the workload ends or an operation fails.
    async fn run_stream(&self) {
        if let Err(error) = self.run_operations().await {
            self.fail(error);
        }
        self.running.set(self.running.get() - 1);
        if self.running.get() == 0 {
            self.shared.group.finished.fetch_add(1, Ordering::AcqRel);
        }
    }

    fn fail(&self, error: BenchError) {
        self.shared.group.failed.store(true, Ordering::Release);
        self.failure.borrow_mut().get_or_insert(error);
    }

    async fn run_operations(&self) -> Result<(), BenchError> {
        let now = self.shared.platform.now;
        loop {
            let started = now();
            if started >= self.end_at || self.shared.group.failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            let operation = self.shared.next_op(&mut self.op_generator.borrow_mut());
            let Some(operation) = operation else { return Ok(()) };
            let result = run_engine_op(self.shared, &*self.engine, &self.pool, operation).await?;
            let EngineOpResult { found, value_bytes, pairs_read } = result;
            let finished = now();
            let op_result = OpResult { started, finished, found, value_bytes, keys_listed: 0, pairs_read };
            self.recorder.borrow_mut().record_op(op_result);
            self.shared.completed_ops.fetch_add(1, Ordering::Relaxed);
            yield_once().await;
        }
    }

    /// Stores one key after another, at a rate if there is one, until the streams of all workers have ended.
    async fn run_writer(&self, handle: &ReactorHandle) {
        let now = self.shared.platform.now;
        let mut arrivals = self.shared.config.write_rate.map(|rate| ArrivalSchedule::new(rate, 0, 1, now()));
        while !self.shared.is_finished() {
            if let Some(arrivals) = &mut arrivals {
                let (due, time) = (arrivals.next_arrival(), now());
                if due > time {
                    handle.sleep_until(due.min(time + WRITER_SLEEP_MAX)).await;
                    continue;
                }
                arrivals.start_next(time);
            }
            let index = self.op_generator.borrow_mut().next_write(&self.shared.keys);
            match put(self.shared, &*self.engine, &self.pool, index).await {
                Ok(_) => self.recorder.borrow_mut().record_write_beside(now()),
                Err(error) => return self.fail(error),
            }
            yield_once().await;
        }
    }
}

/// Lets the other tasks of the core run: operations that do not wait would otherwise keep it to their stream.
async fn yield_once() {
    let mut has_yielded = false;
    poll_fn(|context| {
        if has_yielded {
            return Poll::Ready(());
        }
        has_yielded = true;
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
