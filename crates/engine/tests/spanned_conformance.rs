//! Volumes on three devices, of each engine, against the model and the contract's clauses.

use crate::common::held_clauses::holds_on;
use crate::common::spanned_fixture::{SPAN_DISK_BYTES, SpannedFixture, spanned_volume};
use octokv_base::{Key, Prng};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{self, key_of, record_of};
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::{AnyEngine, Capability, Engine, EngineKind, PutMode, PutOutcome, Volume, WallClock};
use octokv_runtime::block_on;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

#[test]
fn random_operations_and_reopenings_agree_with_the_model() {
    for engine in EngineKind::ALL {
        for (seed, cache_bytes) in [(1, 0), (2, 3 << 20)] {
            let fixture = SpannedFixture { cache_bytes, ..SpannedFixture::new(engine) };
            let disk = PowerLossDisk::new(vec![0; SPAN_DISK_BYTES], 512);
            let device: Rc<dyn Device> = Rc::new(disk.clone());
            let mut random = Prng::new(seed);
            let idle = RefCell::new(|| {
                disk.complete_one(&mut random);
            });
            conformance::sequential(&fixture, &device, seed, 800, &idle);
        }
    }
}

#[test]
fn concurrent_operations_on_few_keys_are_linearizable() {
    for engine in EngineKind::ALL {
        for seed in 0..10 {
            let (disk, engines, _, mut random) = spanned_volume(&SpannedFixture::new(engine), seed);
            let mut advance_io = |random: &mut Prng| disk.complete_one(random);
            conformance::concurrent(&engines, seed, 400, &mut advance_io);
            while disk.complete_one(&mut random) {}
        }
    }
}

fn holds(engine: EngineKind, clause: impl Fn(&Clauses<'_, AnyEngine>, &TestClock)) {
    let (mut fixture, clock) = (SpannedFixture::new(engine), TestClock::default());
    let wall = clock.clone();
    fixture.clock = WallClock::new(move || wall.now());
    holds_on(&fixture, SPAN_DISK_BYTES, |clauses| clause(clauses, &clock));
}

#[test]
fn the_clauses_of_the_contract_hold() {
    for engine in EngineKind::ALL {
        holds(engine, |clauses, _| clauses.buffers_and_ranges());
        holds(engine, |clauses, _| clauses.scans());
        holds(engine, |clauses, _| clauses.scans_since());
        holds(engine, |clauses, _| clauses.conditions());
        holds(engine, |clauses, _| clauses.versions());
        holds(engine, |clauses, clock| clauses.expiry(clock));
        holds(engine, |clauses, _| clauses.lacks(Capability::Reclaim));
        for seed in 0..8 {
            holds(engine, |clauses, _| clauses.random_writes(seed, 300));
        }
    }
    holds(EngineKind::Log, |clauses, _| clauses.owner_cores(4));
}

#[test]
fn futures_may_be_dropped_after_any_poll() {
    for engine in EngineKind::ALL {
        let (disk, engines, volume, mut random) = spanned_volume(&SpannedFixture::new(engine), 7);
        let idle = RefCell::new(|| {
            disk.complete_one(&mut random);
        });
        let half_done = Cell::new(0);
        let clauses = Clauses { engine: &*engines[0], idle: &idle };
        half_done.set(half_done.get() + clauses.dropped_futures(Some(&|| volume.is_idle())));
        assert!(half_done.get() >= 10, "{engine}: {} futures were dropped half done", half_done.get());
        assert!(!volume.is_read_only());
        clauses.abandoned_writes(&|| volume.is_idle());
    }
}

#[test]
fn iterators_yield_what_there_was_at_their_creation() {
    for seed in 0..20 {
        let fixture = SpannedFixture { cores: 1, ..SpannedFixture::new(EngineKind::Lsm) };
        let (disk, engines, _, mut random) = spanned_volume(&fixture, seed);
        let idle = RefCell::new(|| {
            disk.complete_one(&mut random);
        });
        let clauses = Clauses { engine: &*engines[0], idle: &idle };
        clauses.iterators(seed, 200, |random| {
            let mut order = Prng::new(random.next_u64());
            let compact = engines[0].compact_all();
            let complete = || {
                disk.complete_one(&mut order);
            };
            block_on(compact, complete).expect("no fault");
        });
    }
}

#[test]
fn a_listing_of_many_keys_has_each_once_in_order() {
    for engine in EngineKind::ALL {
        let (disk, engines, _, mut random) = spanned_volume(&SpannedFixture::new(engine), 3);
        let idle = RefCell::new(|| {
            disk.complete_one(&mut random);
        });
        let clauses = Clauses { engine: &*engines[0], idle: &idle };
        for number in 0..1_000 {
            let key = key_of(number);
            let record = record_of(clauses.engine.record_layout(), &key, &[7; 20]);
            let put = clauses.engine.put(&key, PutMode::Upsert, record, 20);
            assert_eq!(block_on(put, || (idle.borrow_mut())()), Ok(PutOutcome::Stored));
        }
        let listed = |start: &Key, limit: usize| {
            let mut keys = Vec::new();
            let mut sink = |key: &[u8]| {
                let has_space = keys.len() < limit;
                if has_space {
                    keys.push(Key::new(key).expect("a key"));
                }
                has_space
            };
            block_on(clauses.engine.list(start, &mut sink), || (idle.borrow_mut())()).expect("no fault");
            keys
        };
        let all = listed(&Key::new(&[]).expect("the empty key"), usize::MAX);
        assert_eq!(all.len(), 1_000, "{engine}");
        let mut once: Vec<_> = all.clone();
        once.sort_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
        once.dedup();
        assert_eq!(once.len(), 1_000, "{engine}");
        assert!((0..1_000).all(|number| once.contains(&key_of(number))), "{engine}");
        // From any key on it goes on as the whole does, also from one page to the next.
        for at in [0, 1, 127, 128, 129, 500, 997] {
            assert_eq!(listed(&all[at], 3), all[at..all.len().min(at + 3)], "{engine}, from key {at} on");
        }
    }
}
