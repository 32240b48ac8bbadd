//! A core that runs in parallel with those of a node: it executes operations in the middle of theirs.
//!
//! A simulated core runs an iteration as a whole, so that no other core acts between the steps of an operation that ends at
//! once. On a real node one does. In: calls from the device, which such an operation accesses between two of its steps. Out:
//! operations on the same volume, in the history of the node: such that end at once too, and a put that has allocated its
//! space and writes it later.

use crate::draw::draw_value_bytes;
use crate::history::CallId;
use crate::kv_workload::KvWorkload;
use octokv_base::{BufferPool, Nanos, Prng, Received};
use octokv_device::late_memory::LateMemory;
use octokv_device::{Device, RamDisk};
use octokv_engine::conformance::{record_of, value_of};
use octokv_engine::linearizability::{Call, CallResult, Observed};
use octokv_engine::{AnyEngine, AnyVolume, DeleteOutcome, Engine, EngineError, PutMode, PutOutcome, Volume};
use octokv_runtime::ReactorHandle;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

/// Buffers that its operations would need if they had to wait, which they do not.
const POOL_BYTES: usize = 1 << 20;
/// A put waits for its own write and for one other writer of its key.
const FINISH_POLLS_MAX: usize = 100;
/// The longest time between two polls of a late put.
const LATE_PUT_INTERVAL: Nanos = Nanos::from_micros(20);

type LatePut = Pin<Box<dyn Future<Output = Result<PutOutcome, EngineError>>>>;

/// See the module header.
pub struct ParallelCore {
    engine: Rc<AnyEngine>,
    node: usize,
    workload: Rc<RefCell<KvWorkload>>,
    random: RefCell<Prng>,
    /// A put that has begun.
    late_put: RefCell<Option<(CallId, LatePut)>>,
    /// When it is polled.
    late_put_due: Cell<Nanos>,
    handle: ReactorHandle,
}

impl ParallelCore {
    /// The core with this index of a node, whose volume is in `memory`. REQUIRES: the volume was opened for so many cores.
    pub fn new(
        volume: &AnyVolume,
        core: usize,
        memory: &Arc<RamDisk>,
        node: usize,
        workload: &Rc<RefCell<KvWorkload>>,
        random: Prng,
        handle: ReactorHandle,
    ) -> ParallelCore {
        let device: Rc<dyn Device> = Rc::new(LateMemory::new(Arc::clone(memory)));
        let engine = Rc::new(volume.engine(core, &[device], BufferPool::new(POOL_BYTES)));
        let (workload, random) = (Rc::clone(workload), RefCell::new(random));
        let late_put_due = Cell::new(Nanos::NEVER);
        ParallelCore { engine, node, workload, random, late_put: RefCell::default(), late_put_due, handle }
    }

    /// Runs an iteration of its reactor, which polls a late put when that is due.
    pub fn run_iteration(&self, now: Nanos) -> bool {
        self.handle.begin_iteration(now);
        if self.late_put.borrow().is_none() {
            self.late_put_due.set(Nanos::NEVER);
        } else if self.late_put_due.get() == Nanos::NEVER {
            self.late_put_due.set(now + LATE_PUT_INTERVAL);
        } else if now >= self.late_put_due.get() {
            self.poll_late_put();
            self.late_put_due.set(now + LATE_PUT_INTERVAL);
        }
        self.handle.request_wakeup_at(self.late_put_due.get());
        false
    }

    /// Does some steps.
    pub fn act(&self) {
        loop {
            let step = self.random.borrow_mut().below(8);
            match step {
                0 => self.begin_late_put(),
                1 => self.poll_late_put(),
                _ => self.execute_one(),
            }
            if self.random.borrow_mut().one_in(5) {
                return;
            }
        }
    }

    /// Ends what has begun. REQUIRES: the node is quiescent.
    pub fn finish(&self) {
        for _ in 0..FINISH_POLLS_MAX {
            if self.late_put.borrow().is_none() {
                return;
            }
            self.poll_late_put();
        }
        self.workload.borrow_mut().progress.fail("a put does not end beside an idle node".to_owned());
    }

    fn begin_late_put(&self) {
        let mut late_put = self.late_put.borrow_mut();
        if late_put.is_some() {
            return;
        }
        let random = &mut *self.random.borrow_mut();
        let workload = &mut *self.workload.borrow_mut();
        let (load, history) = (workload.load, &mut workload.histories[self.node]);
        let index = random.below(load.keys) as usize;
        let key = history.keys()[index].clone();
        let bytes = draw_value_bytes(random, load.value_bytes_max);
        let (operation, mode) = (history.next_operation(bytes as u32), PutMode::Upsert);
        let id = history.begin(index, Call::Put { operation, bytes: bytes as u32, mode });
        let record = record_of(self.engine.record_layout(), &key, &value_of(&key, operation, bytes));
        let engine = Rc::clone(&self.engine);
        let mut put: LatePut = Box::pin(async move { engine.put(&key, mode, record, bytes).await });
        // Up to its write, or to the end of another writer of the key.
        if put.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            return history.mark_not_executed(id);
        }
        *late_put = Some((id, put));
        self.handle.core_waker().notify();
    }

    fn poll_late_put(&self) {
        let mut late_put = self.late_put.borrow_mut();
        let Some((id, put)) = &mut *late_put else { return };
        let Poll::Ready(outcome) = put.as_mut().poll(&mut Context::from_waker(Waker::noop())) else { return };
        let workload = &mut *self.workload.borrow_mut();
        let history = &mut workload.histories[self.node];
        let ended = match outcome {
            Ok(PutOutcome::Stored) => history.end(*id, CallResult::Acknowledged),
            Ok(PutOutcome::Full) | Err(EngineError::NoMemory) => {
                history.mark_not_executed(*id);
                Ok(())
            }
            other => Err(format!("a put ended with {other:?}")),
        };
        if let Err(message) = ended {
            workload.progress.fail(message);
        }
        *late_put = None;
    }

    /// Executes one operation on a random key, if it need not wait.
    fn execute_one(&self) {
        let random = &mut *self.random.borrow_mut();
        let workload = &mut *self.workload.borrow_mut();
        let (load, history) = (workload.load, &mut workload.histories[self.node]);
        let index = random.below(load.keys) as usize;
        let key = history.keys()[index].clone();
        let Some(lookup) = self.engine.begin_lookup(key.as_bytes()) else { return };
        let (id, result) = match random.below(6) {
            0..3 => {
                let modes = [PutMode::Upsert, PutMode::Upsert, PutMode::AddOnly, PutMode::UpdateOnly];
                let mode = modes[random.below(4) as usize];
                let bytes = draw_value_bytes(random, load.value_bytes_max);
                let operation = history.next_operation(bytes as u32);
                let id = history.begin(index, Call::Put { operation, bytes: bytes as u32, mode });
                let value = value_of(&key, operation, bytes);
                let outcome = self.engine.put_now(key.as_bytes(), &lookup, mode, &value);
                (
                    id,
                    outcome.map(|outcome| match outcome {
                        PutOutcome::Stored => CallResult::Acknowledged,
                        _ => CallResult::ConditionFailed,
                    }),
                )
            }
            3 => {
                let id = history.begin(index, Call::Clear);
                let outcome = self.engine.delete_now(key.as_bytes(), &lookup);
                (
                    id,
                    outcome.map(|outcome| match outcome {
                        DeleteOutcome::Deleted => CallResult::Acknowledged,
                        _ => CallResult::ConditionFailed,
                    }),
                )
            }
            _ => {
                let id = history.begin(index, Call::Get);
                let mut value = None;
                let found = self.engine.get_now(key.as_bytes(), &lookup, |bytes| {
                    value = Some(bytes.as_bytes().to_vec());
                    Received::Taken
                });
                let observed = match (found, &value) {
                    (None, _) => None,
                    (Some(_), None) => Some(Observed::Absent),
                    (Some(_), Some(value)) => {
                        match history.identify_value(index, value, value.len() as u32) {
                            Ok(observed) => Some(observed),
                            Err(message) => return workload.progress.fail(message),
                        }
                    }
                };
                (id, observed.map(CallResult::Observed))
            }
        };
        let ended = match result {
            Some(result) => history.end(id, result),
            None => {
                history.mark_not_executed(id);
                Ok(())
            }
        };
        if let Err(message) = ended {
            workload.progress.fail(message);
        }
    }
}
