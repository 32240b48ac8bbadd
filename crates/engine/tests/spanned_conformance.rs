//! Volumes on three devices, of each engine, against the model and the contract's clauses.

use crate::common::spanned_contract::{
    agrees_with_the_model, clauses_hold, futures_may_be_dropped, holds, is_linearizable,
};
use crate::common::spanned_fixture::{SpannedFixture, spanned_volume};
use octokv_base::{Key, Prng};
use octokv_engine::conformance::{key_of, record_of};
use octokv_engine::contract_clauses::Clauses;
use octokv_engine::{AnyVolume, Engine, EngineKind, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::cell::RefCell;

#[test]
fn random_operations_and_reopenings_agree_with_the_model() {
    for engine in EngineKind::ALL {
        for (seed, cache_bytes) in [(1, 0), (2, 3 << 20)] {
            agrees_with_the_model(&SpannedFixture { cache_bytes, ..SpannedFixture::new(engine) }, seed);
        }
        agrees_with_the_model(&SpannedFixture::new(engine).with_tokens(), 3);
    }
}

#[test]
fn concurrent_operations_on_few_keys_are_linearizable() {
    for engine in EngineKind::ALL {
        for seed in 0..10 {
            let fixture = SpannedFixture::new(engine);
            is_linearizable(&if seed % 2 == 0 { fixture } else { fixture.with_tokens() }, seed);
        }
    }
}

#[test]
fn the_clauses_of_the_contract_hold() {
    EngineKind::ALL.into_iter().for_each(|engine| clauses_hold(|| SpannedFixture::new(engine)));
    holds(SpannedFixture::new(EngineKind::Log), |clauses, _| clauses.owner_cores(4));
}

#[test]
fn a_core_for_drives_has_the_keys_of_one_device_where_there_are_as_many() {
    for engine in EngineKind::ALL {
        holds(SpannedFixture::new(engine), |clauses, _| clauses.drive_cores(6));
        let (_, engines, volume, _) = spanned_volume(&SpannedFixture::new(engine), 1);
        let AnyVolume::Spanned(spanned) = &volume else { panic!("a volume on several devices") };
        for number in 0..200_u32 {
            let key = Key::new(&number.to_be_bytes()).unwrap();
            let device = spanned.device_of(key.as_bytes());
            assert_eq!(engines[0].drive_core(&key, 3), device);
            assert_eq!(engines[0].drive_core(&key, 2), device % 2);
            assert_eq!(engines[0].drive_core(&key, 6) % 3, device);
        }
    }
}

#[test]
fn futures_may_be_dropped_after_any_poll() {
    EngineKind::ALL.into_iter().for_each(|engine| futures_may_be_dropped(&SpannedFixture::new(engine)));
    EngineKind::ALL.into_iter().for_each(|engine| {
        futures_may_be_dropped(&SpannedFixture::new(engine).with_tokens());
    });
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
