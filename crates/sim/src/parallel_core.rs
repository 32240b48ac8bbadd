//! A core that runs in parallel with those of a node: it executes operations in the middle of theirs.
//!
//! A simulated core runs an iteration as a whole, so that no other core acts between the steps of an operation that ends at
//! once. On a real node one does. In: calls from the device, which such an operation accesses between two of its steps. Out:
//! operations that end at once too, on the same volume, in the history of the node.

use crate::draw::draw_value_bytes;
use crate::kv_workload::KvWorkload;
use octokv_base::{BufferPool, Prng};
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::conformance::value_of;
use octokv_engine::linearizability::{Call, CallResult, Observed};
use octokv_engine::{AnyEngine, AnyVolume, DeleteOutcome, Engine, PutMode, PutOutcome, Volume};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// Buffers that its operations would need if they had to wait, which they do not.
const POOL_BYTES: usize = 1 << 20;

/// See the module header.
pub struct ParallelCore {
    engine: AnyEngine,
    node: usize,
    workload: Rc<RefCell<KvWorkload>>,
    random: RefCell<Prng>,
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
    ) -> ParallelCore {
        let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(Arc::clone(memory)));
        let engine = volume.engine(core, &[device], BufferPool::new(POOL_BYTES));
        ParallelCore { engine, node, workload: Rc::clone(workload), random: RefCell::new(random) }
    }

    /// Executes one operation on a random key, if it need not wait.
    pub fn execute_one(&self) {
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
                let found = self.engine.get_now(key.as_bytes(), &lookup, &mut |bytes| {
                    value = Some(bytes.to_vec());
                    true
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
