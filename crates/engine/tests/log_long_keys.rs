//! Keys up to 1,024 bytes on the log engine, through splits, compactions of both logs, recovery and verification; and segments that are full of them.

use crate::common::log_fixture::{LogFixture, make_small};
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::Key;
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, operation_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::log::log_place::LogKind;
use octokv_engine::log::open::open_with;
use octokv_engine::log::settings::LogSettings;
use octokv_engine::log::volume::LogVolume;
use octokv_engine::{DeleteOutcome, Engine, PutMode, PutOutcome, Volume};
use octokv_runtime::block_on;
use std::rc::Rc;
use std::sync::Arc;

const KEYS: u64 = 120;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// 256 to 1,024 bytes; every fifth has the most. Keys of neighbouring numbers differ in their last bytes alone.
fn long_key(number: u64) -> Key {
    let bytes = if number.is_multiple_of(5) { 1_024 } else { 256 + (number * 97 % 768) as usize };
    let mut key = vec![0xa5; bytes];
    key[bytes - 8..].copy_from_slice(&number.to_be_bytes());
    Key::new(&key).expect("within the limit")
}

struct LongKeys {
    fixture: LogFixture,
    device: Rc<dyn Device>,
    adjust: fn(&mut LogSettings),
}

impl LongKeys {
    fn format(unit_bytes: u32, adjust: fn(&mut LogSettings)) -> LongKeys {
        let mut fixture = LogFixture { cores: 1, ..LogFixture::default() };
        fixture.format.unit_bytes = Some(unit_bytes);
        fixture.format.chunk_bytes = Some(32 * unit_bytes);
        let device: Rc<dyn Device> = StableMemory::new(32 << 20, 512);
        run(fixture.format(Rc::clone(&device)));
        LongKeys { fixture, device, adjust }
    }

    fn open(&self) -> LogEngine {
        let config = self.fixture.open_config();
        let opened = run(open_with(&self.device, &pool(), config, &self.fixture.format, self.adjust));
        LogEngine::new(opened.expect("opens"), Rc::clone(&self.device), pool())
    }
}

fn put(engine: &LogEngine, number: u64, operation: u64) -> PutOutcome {
    let (key, bytes) = (long_key(number), 10 + (operation * 131 % 2_000) as usize);
    let record = record_of(engine.record_layout(), &key, &value_of(&key, operation, bytes));
    run(engine.put(&key, PutMode::Upsert, record, bytes)).expect("no fault")
}

fn found(engine: &LogEngine, number: u64) -> Option<u64> {
    let key = long_key(number);
    let value = run(engine.get(&key)).expect("no fault");
    value.map(|value| operation_of(&key, value.as_bytes()))
}

#[test]
fn keys_of_1024_bytes_are_stored_moved_split_and_recovered() {
    for unit_bytes in [512, 4096] {
        let volume = LongKeys::format(unit_bytes, make_small);
        let engine = volume.open();
        for round in 0..4 {
            for number in 0..KEYS {
                assert_eq!(put(&engine, number, round * KEYS + number), PutOutcome::Stored);
                while run(engine.split_once()).expect("no fault") {}
            }
        }
        let deleted = |number: &u64| number.is_multiple_of(7);
        for number in (0..KEYS).filter(deleted) {
            assert_eq!(run(engine.delete(&long_key(number))), Ok(DeleteOutcome::Deleted));
        }
        let check = |engine: &LogEngine| {
            for number in 0..KEYS {
                let newest = (!deleted(&number)).then_some(3 * KEYS + number);
                assert_eq!(found(engine, number), newest, "units of {unit_bytes} B, key {number}");
            }
            // One that differs in its last byte.
            assert_eq!(found(engine, KEYS + 1), None);
        };
        check(&engine);
        for _ in 0..40 {
            run(engine.compact_once(LogKind::Values)).expect("no fault");
            run(engine.compact_once(LogKind::Keys)).expect("no fault");
        }
        let log = engine.statistics().log.expect("it has logs");
        assert!(log.splits > 10 && log.moved_values > 20 && log.moved_images > 5, "{log:?}");
        check(&engine);
        // Behind a crash, and behind a clean shutdown.
        drop(engine);
        let engine = volume.open();
        check(&engine);
        run(engine.close()).expect("closes");
        drop(engine);
        let engine = volume.open();
        check(&engine);
        let mut listed = 0;
        let mut count = |_: &[u8]| {
            listed += 1;
            true
        };
        run(engine.list(&Key::new(&[]).expect("the empty key"), &mut count)).expect("lists");
        drop(engine);
        let devices = [Rc::clone(&volume.device)];
        let report = run(<Arc<LogVolume>>::verify(&devices, &pool(), &mut |_, _| ())).expect("verifies");
        let kept = KEYS - (0..KEYS).filter(deleted).count() as u64;
        assert_eq!((listed, report.keys, report.problems.len()), (kept, kept, 0));
    }
}

#[test]
fn a_segment_that_is_full_refuses_a_key_and_keeps_those_that_it_has() {
    // Segments are never split: those of the two stores take what fits their longest images.
    let volume = LongKeys::format(512, |settings| settings.segment_target_bytes = 1 << 30);
    let engine = volume.open();
    let (mut stored, mut refused) = (Vec::new(), Vec::new());
    for number in 0..KEYS {
        match put(&engine, number, number) {
            PutOutcome::Stored => stored.push(number),
            PutOutcome::Full => refused.push(number),
            other => panic!("{other:?}"),
        }
    }
    assert!(stored.len() > 20 && refused.len() > 20, "{} stored, {} refused", stored.len(), refused.len());
    let check = |engine: &LogEngine| {
        assert!(stored.iter().all(|&number| found(engine, number) == Some(number)));
        assert!(refused.iter().all(|&number| found(engine, number).is_none()));
    };
    check(&engine);
    // What is there may be replaced, and a delete makes room.
    assert_eq!(put(&engine, stored[0], stored[0]), PutOutcome::Stored);
    drop(engine);
    let engine = volume.open();
    check(&engine);
    for number in &stored {
        assert_eq!(run(engine.delete(&long_key(*number))), Ok(DeleteOutcome::Deleted));
    }
    assert_eq!(put(&engine, refused[0], 1), PutOutcome::Stored);
}
