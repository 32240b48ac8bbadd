//! A small volume of any engine on a device with injected faults. Acknowledged writes survive, and failed operations can be repeated.

#![allow(dead_code)]

use super::pool;
use super::stable_memory::StableMemory;
use octokv_base::{BufferPool, Key, Prng};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{self, key_of, operation_of, record_of, value_of};
use octokv_engine::{Engine, EngineError, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What a key may hold: several values after an operation that failed.
type Allowed = BTreeMap<u64, Vec<Option<u64>>>;

pub fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// An engine whose device operations fail, and its background work by hand.
pub trait FaultyEngine: Engine + Sized + 'static {
    const DISK_BYTES: u64;
    const KEYS: u64;
    /// Writes of a new volume before the first failure.
    const WRITES_BEFORE: u64;

    fn format(device: Rc<dyn Device>);
    fn open(device: &Rc<dyn Device>, pool: BufferPool) -> Self;
    fn is_read_only(&self) -> bool;
    /// The background work that is due behind write number `write`; `note` gets each outcome.
    fn work_behind(&self, write: u64, note: &mut dyn FnMut(Result<(), EngineError>));
    fn compact_everything(&self) -> Result<(), EngineError>;
    /// Checks reads other than gets, such as iterators. `intact` maps each key that a get found to the operation that stored its value.
    fn check_more(&self, _intact: &BTreeMap<Key, u64>, _may_be_lost: bool, _context: &str) {}
}

pub struct FaultyVolume<E> {
    device: Rc<dyn Device>,
    pub plan: FaultPlan,
    pool: BufferPool,
    engine: Option<Rc<E>>,
    allowed: Allowed,
    operations: u64,
    pub errors: Vec<EngineError>,
}

impl<E: FaultyEngine> FaultyVolume<E> {
    /// A new volume whose engine has this pool.
    pub fn new(pool: BufferPool) -> FaultyVolume<E> {
        let plan = FaultPlan::default();
        let memory: Rc<dyn Device> = StableMemory::new(E::DISK_BYTES, 512);
        E::format(Rc::clone(&memory));
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(memory, plan.clone()));
        let (allowed, errors) = (Allowed::new(), Vec::new());
        let mut volume = FaultyVolume { device, plan, pool, engine: None, allowed, operations: 0, errors };
        volume.reopen();
        volume
    }

    pub fn reopen(&mut self) {
        self.engine = None;
        self.engine = Some(Rc::new(E::open(&self.device, self.pool.clone())));
    }

    pub fn engine(&self) -> Rc<E> {
        Rc::clone(self.engine.as_ref().expect("open"))
    }

    pub fn is_read_only(&self) -> bool {
        self.engine().is_read_only()
    }

    pub fn write(&mut self, random: &mut Prng) {
        self.operations += 1;
        let (engine, index, operation) = (self.engine(), random.below(E::KEYS), self.operations);
        let key = key_of(index);
        let written = if random.one_in(5) {
            run(engine.delete(&key)).map(|_| None)
        } else {
            let bytes = conformance::random_length(random, 4_000);
            let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
            match run(engine.put(&key, PutMode::Upsert, record, bytes)) {
                // A device without space, as an injected fault says.
                Ok(PutOutcome::Full) => return,
                outcome => outcome.map(|outcome| {
                    assert_eq!(outcome, PutOutcome::Stored);
                    Some(operation)
                }),
            }
        };
        let allowed = self.allowed.entry(index).or_insert_with(|| vec![None]);
        match written {
            Ok(value) => *allowed = vec![value],
            Err(error) => {
                // Before the next opening decides, it may be there or not.
                allowed.extend([Some(operation), None]);
                self.errors.push(error);
            }
        }
    }

    /// Writes, with background work between them.
    pub fn work(&mut self, random: &mut Prng, writes: u64) {
        for write in 1..=writes {
            self.write(random);
            self.engine().work_behind(write, &mut |outcome| self.errors.extend(outcome.err()));
        }
    }

    /// Every key has a value that it may have. With `may_be_lost`, or an error.
    pub fn check(&self, may_be_lost: bool, context: &str) {
        let (engine, mut intact) = (self.engine(), BTreeMap::new());
        for (&index, allowed) in &self.allowed {
            let key = key_of(index);
            match run(engine.get(&key)) {
                Ok(found) => {
                    let found = found.map(|value| operation_of(&key, value.as_bytes()));
                    assert!(allowed.contains(&found), "{context}: {key} has {found:?} of {allowed:?}");
                    intact.extend(found.map(|operation| (key.clone(), operation)));
                }
                Err(EngineError::Corrupt { .. }) if may_be_lost => {}
                Err(error) => panic!("{context}: {key}: {error}"),
            }
        }
        engine.check_more(&intact, may_be_lost, context);
    }
}

/// How often operations failed, and volumes became read-only.
#[derive(Debug, Default)]
pub struct Failures {
    pub failed: u32,
    pub read_only: u32,
}

/// Operation number 0, `step`, 2 · `step` … of the device fails, alone or with all behind it, until the writes of a round need no
/// more of them and `skip_min` was passed. Afterwards the volume is worked on, opened again, and worked on.
pub fn fail_each<E: FaultyEngine>(
    (filter, fault): (OpFilter, InjectedFault),
    times: u32,
    (step, skip_min): (usize, u32),
    may_be_lost: bool,
) -> Failures {
    let mut failures = Failures::default();
    for skip in (0..).step_by(step) {
        let (mut volume, mut random) = (FaultyVolume::<E>::new(pool()), Prng::new(7));
        volume.work(&mut random, E::WRITES_BEFORE);
        assert_eq!(volume.errors, []);
        volume.plan.add(FaultRule { times, skip, ..FaultRule::always(filter, fault) });
        volume.work(&mut random, 100);
        let is_over = volume.errors.is_empty() && skip > skip_min;
        volume.plan.clear();
        let context = format!("{filter:?} {skip} fails {times} times with {fault:?}, {:?}", volume.errors);
        volume.check(may_be_lost, &context);
        failures.failed += u32::from(!volume.errors.is_empty());
        if volume.is_read_only() {
            failures.read_only += 1;
        } else {
            volume.errors.clear();
            volume.work(&mut random, 40);
            assert_eq!(volume.errors, [], "{context}: afterwards");
            volume.engine().compact_everything().expect("compacts");
            volume.check(may_be_lost, &format!("{context}, compacted"));
        }
        volume.reopen();
        volume.check(may_be_lost, &format!("{context}, reopened"));
        volume.errors.clear();
        volume.work(&mut random, 40);
        assert_eq!(volume.errors, [], "{context}: after it was opened again");
        if is_over {
            break;
        }
    }
    failures
}
