//! Iterators over several devices, as time passes.

use crate::common::faulty_volume::run;
use crate::common::opened_span::blank;
use crate::common::pool;
use crate::common::spanned_fixture::SpannedFixture;
use octokv_base::{Key, Nanos, Prng};
use octokv_engine::conformance::{TaskSet, key_of, record_of, value_of};
use octokv_engine::{
    AnyVolume, DeleteOutcome, Engine, EngineError, EngineKind, IteratorOptions, IteratorProgress, KeySink,
    OpenConfig, PairSink, PutMode, PutOutcome, TreeOptions, Volume,
};
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use octokv_runtime::{CoreWaker, CpuTime, DeviceHandle, ReactorHandle};
use std::rc::Rc;

const IDLE: Nanos = Nanos::from_secs(10);
/// A page of a device has some twenty of them.
const VALUE_BYTES: usize = 3_000;
const KEYS: u64 = 120;

/// Takes one pair.
struct OnePair(Option<Vec<u8>>);

impl PairSink for OnePair {
    fn has_space(&mut self, _: usize, _: usize) -> bool {
        self.0.is_none()
    }
    fn push(&mut self, key: &[u8], _: &[u8]) {
        self.0 = Some(key.to_vec());
    }
}

#[test]
fn an_iterator_in_use_expires_on_no_device_however_far_apart_its_pairs_of_one_are() {
    let fixture = SpannedFixture::new(EngineKind::Lsm);
    let devices = blank(3);
    run(AnyVolume::format(&devices, &fixture.format)).expect("formats");
    let tree = TreeOptions { iterator_idle: IDLE, ..OpenConfig::TREE };
    let config = OpenConfig { tree, ..fixture.open_config() };
    let volume = run(AnyVolume::open(&devices, &pool(), config, &fixture.format)).expect("opens");
    let engine = Rc::new(volume.engine(0, &devices, pool()));
    let sim = SimEnv::new(SimEnvConfig::new(1));
    let queue = DeviceHandle::new(Box::new(sim.device_queue(sim.add_host())), 1);
    let handle = ReactorHandle::new(CoreWaker::without_eventfd(), queue, CpuTime::simulated());
    let (mut now, mut random, mut tasks) = (Nanos::from_secs(1), Prng::new(3), TaskSet::default());
    handle.begin_iteration(now);
    let (own, of_task) = (Rc::clone(&engine), handle.clone());
    tasks.add(async move { own.maintain(&of_task, |error| panic!("maintenance: {error}")).await });
    let mut pass = |time: Nanos| {
        let until = now + time;
        while now < until {
            now = now + Nanos::from_millis(100);
            handle.begin_iteration(now);
            while tasks.step(&mut random) {}
        }
    };
    pass(Nanos::from_secs(1));
    for number in 0..KEYS {
        let key = key_of(number);
        let record = record_of(engine.record_layout(), &key, &value_of(&key, number, VALUE_BYTES));
        assert_eq!(run(engine.put(&key, PutMode::Upsert, record, VALUE_BYTES)), Ok(PutOutcome::Stored));
    }
    let create =
        || run(engine.create_iterator(IteratorOptions::default())).expect("creates").expect("it has some");
    let (used, unused) = (create(), create());
    let mut keys = Vec::new();
    loop {
        let mut sink = OnePair(None);
        let progress = run(engine.next_pairs(&used, &mut sink)).expect("it is in use");
        keys.extend(sink.0);
        if progress == IteratorProgress::AtEnd {
            break;
        }
        // A page of a device lasts for half a minute.
        pass(Nanos::from_millis(500));
    }
    assert!(keys.len() as u64 == KEYS && keys.is_sorted(), "{} keys", keys.len());
    let outcome = run(engine.next_pairs(&unused, &mut OnePair(None)));
    assert_eq!(outcome, Err(EngineError::IteratorExpired));
}

/// Counts its yield points, and has space for any pair.
#[derive(Default)]
struct CountedYields {
    pairs: usize,
    keys: usize,
    yields: usize,
}

impl PairSink for CountedYields {
    fn has_space(&mut self, _: usize, _: usize) -> bool {
        true
    }
    fn push(&mut self, _: &[u8], _: &[u8]) {
        self.pairs += 1;
    }
    async fn yield_point(&mut self) {
        self.yields += 1;
    }
}

impl KeySink for CountedYields {
    fn offer(&mut self, _: &[u8]) -> bool {
        self.keys += 1;
        true
    }
    async fn yield_point(&mut self) {
        self.yields += 1;
    }
}

#[test]
fn tombstones_on_a_device_hold_up_nothing_else() {
    const DELETED: u64 = 4_000;
    let fixture = SpannedFixture::new(EngineKind::Lsm);
    let devices = blank(3);
    run(AnyVolume::format(&devices, &fixture.format)).expect("formats");
    let volume =
        run(AnyVolume::open(&devices, &pool(), fixture.open_config(), &fixture.format)).expect("opens");
    let engine = volume.engine(0, &devices, pool());
    for number in 0..DELETED {
        let key = key_of(number);
        let record = record_of(engine.record_layout(), &key, &value_of(&key, number, 20));
        assert_eq!(run(engine.put(&key, PutMode::Upsert, record, 20)), Ok(PutOutcome::Stored));
    }
    // Of an iterator before, which keeps the keys.
    let kept =
        run(engine.create_iterator(IteratorOptions::default())).expect("creates").expect("it has some");
    for number in 0..DELETED {
        assert_eq!(run(engine.delete(&key_of(number))), Ok(DeleteOutcome::Deleted));
    }
    let iterator =
        run(engine.create_iterator(IteratorOptions::default())).expect("creates").expect("it has some");
    let (mut pairs, mut listed) = (CountedYields::default(), CountedYields::default());
    assert_eq!(run(engine.next_pairs(&iterator, &mut pairs)), Ok(IteratorProgress::AtEnd));
    let start = Key::new(&[]).expect("the empty key");
    assert_eq!(run(engine.list(&start, &mut listed)), Ok(()));
    drop(kept);
    // One in 256 entries, of which there are two for each key, and one for each page.
    for sink in [&pairs, &listed] {
        assert_eq!((sink.pairs, sink.keys), (0, 0));
        assert!(sink.yields as u64 > DELETED / 256, "{} yield points", sink.yields);
    }
}
