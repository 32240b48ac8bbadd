//! The log engine when device operations fail, or buffers run out: acknowledged writes are kept, and failed operations can be repeated.

use crate::common::log_fixture::{LogFixture, make_small};
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::{BufferPool, Prng};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultDevice, FaultPlan, FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::{self, EngineFixture, key_of, operation_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::log::open::open_with;
use octokv_engine::{Engine, EngineError, PutMode, PutOutcome, Volume};
use octokv_runtime::block_on;
use std::collections::BTreeMap;
use std::rc::Rc;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// What a key may hold: several values after an operation that failed.
type Allowed = BTreeMap<u64, Vec<Option<u64>>>;
const KEYS: u64 = 60;

struct FaultyLogs {
    fixture: LogFixture,
    device: Rc<dyn Device>,
    plan: FaultPlan,
    pool: BufferPool,
    engine: Option<Rc<LogEngine>>,
    allowed: Allowed,
    operations: u64,
    errors: Vec<EngineError>,
}

impl FaultyLogs {
    fn new(pool: BufferPool) -> FaultyLogs {
        let (mut fixture, plan) = (LogFixture { cores: 1, ..LogFixture::default() }, FaultPlan::default());
        fixture.format.value_bytes_max = 32 << 10;
        let memory: Rc<dyn Device> = StableMemory::new(4 << 20, 512);
        run(fixture.format(Rc::clone(&memory)));
        let device: Rc<dyn Device> = Rc::new(FaultDevice::new(memory, plan.clone()));
        let (allowed, errors) = (Allowed::new(), Vec::new());
        let mut logs =
            FaultyLogs { fixture, device, plan, pool, engine: None, allowed, operations: 0, errors };
        logs.reopen();
        logs
    }

    fn reopen(&mut self) {
        self.engine = None;
        let (config, format) = (self.fixture.open_config(), &self.fixture.format);
        let volume = run(open_with(&self.device, &pool(), config, format, make_small)).expect("opens");
        self.engine = Some(Rc::new(LogEngine::new(volume, Rc::clone(&self.device), self.pool.clone())));
    }

    fn engine(&self) -> Rc<LogEngine> {
        Rc::clone(self.engine.as_ref().expect("open"))
    }

    fn is_read_only(&self) -> bool {
        self.engine().volume().is_read_only()
    }

    fn write(&mut self, random: &mut Prng) {
        self.operations += 1;
        let (engine, index, operation) = (self.engine(), random.below(KEYS), self.operations);
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

    fn note<T>(&mut self, outcome: Result<T, EngineError>) {
        self.errors.extend(outcome.err());
    }

    /// Writes with splits, compactions of both logs, markers and checkpoints between them.
    fn work(&mut self, random: &mut Prng, writes: u64) {
        for write in 1..=writes {
            self.write(random);
            let engine = self.engine();
            if write % 5 == 0 {
                self.note(run(engine.split_once()));
            }
            if write % 9 == 0 {
                self.note(run(engine.compact_once(LogKind::Values)));
            }
            if write % 13 == 0 {
                self.note(run(engine.compact_once(LogKind::Keys)));
            }
            if write % 23 == 0 {
                self.note(run(engine.mark_durable()));
            }
            if write % 31 == 0 {
                self.note(run(engine.checkpoint()));
            }
        }
    }

    /// Every key has a value that it may have. With `may_be_lost`, or an error.
    fn check(&self, may_be_lost: bool, context: &str) {
        for (&index, allowed) in &self.allowed {
            let key = key_of(index);
            match run(self.engine().get(&key)) {
                Ok(found) => {
                    let found = found.map(|value| operation_of(&key, value.as_bytes()));
                    assert!(allowed.contains(&found), "{context}: {key} has {found:?} of {allowed:?}");
                }
                Err(EngineError::Corrupt { .. }) if may_be_lost => {}
                Err(error) => panic!("{context}: {key}: {error}"),
            }
        }
    }
}

/// How often operations failed, and volumes became read-only.
#[derive(Debug, Default)]
struct Failures {
    failed: u32,
    read_only: u32,
}

/// One operation of the device fails, whichever it is, or all from one on.
fn fail_each(filter: OpFilter, fault: InjectedFault, times: u32, step: usize, may_be_lost: bool) -> Failures {
    let mut failures = Failures::default();
    for skip in (0..).step_by(step) {
        let (mut logs, mut random) = (FaultyLogs::new(pool()), Prng::new(7));
        logs.work(&mut random, 100);
        assert_eq!(logs.errors, []);
        logs.plan.add(FaultRule { times, skip, ..FaultRule::always(filter, fault) });
        logs.work(&mut random, 100);
        let is_over = logs.errors.is_empty() && skip > 1_000;
        logs.plan.clear();
        let context = format!("{filter:?} {skip} fails {times} times with {fault:?}, {:?}", logs.errors);
        logs.check(may_be_lost, &context);
        failures.failed += u32::from(!logs.errors.is_empty());
        if logs.is_read_only() {
            failures.read_only += 1;
        } else {
            logs.errors.clear();
            logs.work(&mut random, 40);
            assert_eq!(logs.errors, [], "{context}: afterwards");
            run(logs.engine().compact_all()).expect("compacts");
            logs.check(may_be_lost, &format!("{context}, compacted"));
        }
        logs.reopen();
        logs.check(may_be_lost, &format!("{context}, reopened"));
        logs.errors.clear();
        logs.work(&mut random, 40);
        assert_eq!(logs.errors, [], "{context}: after it was opened again");
        if is_over {
            break;
        }
    }
    failures
}

#[test]
fn a_failed_write_or_flush_of_any_part_loses_nothing_that_was_acknowledged() {
    for times in [1, u32::MAX] {
        let writes = fail_each(OpFilter::Write, InjectedFault::Error(5), times, 11, false);
        assert!(writes.failed > 20 && writes.read_only > 5, "{writes:?}");
        // A value that cannot be written fails its put alone.
        assert!(times > 1 || writes.read_only < writes.failed, "{writes:?}");
        let full = fail_each(OpFilter::Write, InjectedFault::NoSpace, times, 17, false);
        assert!(full.failed > 5, "{full:?}");
        let flushes = fail_each(OpFilter::Flush, InjectedFault::Error(5), times, 7, false);
        assert!(flushes.failed > 5, "{flushes:?}");
    }
}

#[test]
fn a_failed_read_costs_keys_only_if_the_medium_has_lost_the_block() {
    // EIO and EAGAIN: nothing is given up for what may be read later.
    for code in [5, 11] {
        for times in [1, u32::MAX] {
            let reads = fail_each(OpFilter::Read, InjectedFault::Error(code), times, 23, false);
            assert!(reads.failed > 3 && reads.read_only == 0, "{code}: {reads:?}");
        }
    }
    let lost = fail_each(OpFilter::Read, InjectedFault::Error(61), 1, 23, true);
    assert_eq!(lost.read_only, 0, "{lost:?}");
}

#[test]
fn too_few_buffers_fail_operations_which_may_be_repeated() {
    let mut refused = 0;
    for free in [0, 1 << 10, 5 << 10, 20 << 10, 70 << 10] {
        let pool = BufferPool::new(4 << 20);
        let (mut logs, mut random) = (FaultyLogs::new(pool.clone()), Prng::new(9));
        logs.work(&mut random, 150);
        assert_eq!(logs.errors, []);
        for _ in 0..8 {
            logs.work(&mut random, 8);
            let held = pool.take(pool.free_bytes().saturating_sub(free));
            let engine = logs.engine();
            let outcomes = [
                run(engine.compact_once(LogKind::Values)).map(drop),
                run(engine.compact_once(LogKind::Keys)).map(drop),
                run(engine.split_once()).map(drop),
                run(engine.compact_all()),
                run(engine.checkpoint()),
            ];
            for error in outcomes.iter().filter_map(|outcome| outcome.err()) {
                assert_eq!(error, EngineError::NoMemory, "{free} B are free");
                refused += 1;
            }
            drop(held);
            run(engine.compact_all()).expect("compacts");
        }
        assert_eq!(logs.errors, []);
        logs.check(false, "buffers are back");
        logs.reopen();
        logs.check(false, "reopened");
    }
    assert!(refused > 20, "{refused} were refused");
}

#[test]
fn a_volume_that_became_read_only_is_read() {
    let (mut logs, mut random) = (FaultyLogs::new(pool()), Prng::new(3));
    logs.work(&mut random, 120);
    logs.plan.add(FaultRule::always(OpFilter::Write, InjectedFault::Error(5)));
    while !logs.is_read_only() {
        logs.write(&mut random);
    }
    let before = logs.errors.len();
    for _ in 0..40 {
        logs.write(&mut random);
    }
    assert!(logs.errors.len() >= before + 30, "nothing is written, but absent keys are deleted");
    logs.check(false, "read-only");
    logs.plan.clear();
    logs.reopen();
    logs.check(false, "reopened");
}
