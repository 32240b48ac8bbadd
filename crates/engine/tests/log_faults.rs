//! The log engine when device operations fail, or buffers run out: acknowledged writes are kept, and failed operations can be repeated.

use crate::common::faulty_volume::{FaultyEngine, FaultyVolume, fail_each, run};
use crate::common::log_fixture::{LogFixture, make_small};
use crate::common::pool;
use octokv_base::{BufferPool, Prng};
use octokv_device::Device;
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_engine::conformance::EngineFixture;
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::log::open::open_with;
use octokv_engine::{Engine, EngineError, Volume};
use std::rc::Rc;

fn fixture() -> LogFixture {
    let mut fixture = LogFixture { cores: 1, ..LogFixture::default() };
    fixture.format.value_bytes_max = 32 << 10;
    fixture
}

impl FaultyEngine for LogEngine {
    const DISK_BYTES: u64 = 4 << 20;
    const KEYS: u64 = 60;
    const WRITES_BEFORE: u64 = 100;

    fn format(device: Rc<dyn Device>) {
        run(fixture().format(device));
    }

    fn open(device: &Rc<dyn Device>, buffers: BufferPool) -> LogEngine {
        let (config, format) = (fixture().open_config(), fixture().format);
        let volume = run(open_with(device, &pool(), config, &format, make_small)).expect("opens");
        LogEngine::new(volume, Rc::clone(device), buffers)
    }

    fn is_read_only(&self) -> bool {
        self.volume().is_read_only()
    }

    /// Splits, compactions of both logs, markers and checkpoints.
    fn work_behind(&self, write: u64, note: &mut dyn FnMut(Result<(), EngineError>)) {
        if write.is_multiple_of(5) {
            note(run(self.split_once()).map(drop));
        }
        if write.is_multiple_of(9) {
            note(run(self.compact_once(LogKind::Values)).map(drop));
        }
        if write.is_multiple_of(13) {
            note(run(self.compact_once(LogKind::Keys)).map(drop));
        }
        if write.is_multiple_of(23) {
            note(run(self.mark_durable()));
        }
        if write.is_multiple_of(31) {
            note(run(self.checkpoint()));
        }
    }

    fn compact_everything(&self) -> Result<(), EngineError> {
        run(self.compact_all())
    }
}

#[test]
fn a_failed_write_or_flush_of_any_part_loses_nothing_that_was_acknowledged() {
    for times in [1, u32::MAX] {
        let writes =
            fail_each::<LogEngine>((OpFilter::Write, InjectedFault::Error(5)), times, (11, 1_000), false);
        assert!(writes.failed > 20 && writes.read_only > 5, "{writes:?}");
        // A value that cannot be written fails its put alone.
        assert!(times > 1 || writes.read_only < writes.failed, "{writes:?}");
        let full =
            fail_each::<LogEngine>((OpFilter::Write, InjectedFault::NoSpace), times, (17, 1_000), false);
        assert!(full.failed > 5, "{full:?}");
        let flushes =
            fail_each::<LogEngine>((OpFilter::Flush, InjectedFault::Error(5)), times, (7, 1_000), false);
        assert!(flushes.failed > 5, "{flushes:?}");
    }
}

#[test]
fn a_failed_read_costs_keys_only_if_the_medium_has_lost_the_block() {
    // EIO and EAGAIN: nothing is given up for what may be read later.
    for code in [5, 11] {
        // Of single failures those of records that compaction reads together fail nothing: it reads them again.
        for (times, step) in [(1, 5), (u32::MAX, 23)] {
            let reads = fail_each::<LogEngine>(
                (OpFilter::Read, InjectedFault::Error(code)),
                times,
                (step, 1_000),
                false,
            );
            assert!(reads.failed > 3 && reads.read_only == 0, "{code}: {reads:?}");
        }
    }
    let lost = fail_each::<LogEngine>((OpFilter::Read, InjectedFault::Error(61)), 1, (23, 1_000), true);
    assert_eq!(lost.read_only, 0, "{lost:?}");
}

#[test]
fn too_few_buffers_fail_operations_which_may_be_repeated() {
    let mut refused = 0;
    for free in [0, 1 << 10, 5 << 10, 20 << 10, 70 << 10] {
        let pool = BufferPool::new(4 << 20);
        let (mut logs, mut random) = (FaultyVolume::<LogEngine>::new(pool.clone()), Prng::new(9));
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
    let (mut logs, mut random) = (FaultyVolume::<LogEngine>::new(pool()), Prng::new(3));
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
