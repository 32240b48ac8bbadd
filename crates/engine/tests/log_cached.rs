//! A cache of values in front of the log engine: the contract, and linearizability beside compactions and splits.

use crate::common::held_clauses::holds_on;
use crate::common::log_fixture::{LOG_DISK_BYTES, LogFixture, SmallLogVolume};
use crate::common::pool;
use octokv_base::Prng;
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::cached::CachedVolume;
use octokv_engine::conformance::{EngineFixture, Operation, TaskSet, concurrent, run_operations};
use octokv_engine::contract_clauses::{Clauses, TestClock};
use octokv_engine::log::log_place::LogKind;
use octokv_engine::{AnyEngine, AnyVolume, OpenConfig, Volume, WallClock};
use octokv_runtime::block_on;
use std::cell::RefCell;
use std::rc::Rc;

const CACHE_BYTES: u64 = 16 << 10;

/// As a node opens it.
#[derive(Default)]
struct CachedLogFixture {
    logs: LogFixture,
    volumes: RefCell<Vec<AnyVolume>>,
}

impl EngineFixture for CachedLogFixture {
    type Engine = AnyEngine;

    async fn format(&self, device: Rc<dyn Device>) {
        self.logs.format(device).await;
    }

    async fn open(&self, device: Rc<dyn Device>) -> Result<AnyEngine, String> {
        let devices = [device];
        let config = OpenConfig { cache_bytes: CACHE_BYTES, ..self.logs.open_config() };
        let opened = AnyVolume::open(&devices, &pool(), config, &self.logs.format).await;
        let volume = opened.map_err(|error| error.to_string())?;
        assert!(matches!(volume, AnyVolume::CachedLog(_)));
        self.volumes.borrow_mut().push(volume.clone());
        Ok(volume.engine(0, &devices, pool()))
    }
}

#[test]
fn the_conformance_suite_holds_with_a_cache_that_evicts() {
    let fixture = CachedLogFixture::default();
    for seed in 0..6 {
        let (disk, mut random) = (PowerLossDisk::new(vec![0; LOG_DISK_BYTES], 512), Prng::new(seed));
        let idle = RefCell::new(|| {
            disk.complete_one(&mut random);
        });
        let device: Rc<dyn Device> = Rc::new(disk.clone());
        let mut random = Prng::new(seed);
        // Many reads, of values that fit, and few reopenings, which empty the cache.
        let operations = (0..300).flat_map(|_| {
            let operation = match Operation::random(&mut random) {
                Operation::Put { key, mode, bytes } => Operation::Put { key, mode, bytes: bytes.min(1_500) },
                Operation::Reopen { .. } if random.below(10) > 0 => Operation::Exist(random.below(60)),
                operation => operation,
            };
            [operation, Operation::Get(random.below(60)), Operation::Get(random.below(60))]
        });
        let operations: Vec<Operation> = operations.collect();
        run_operations(&fixture, &device, &operations, &idle);
    }
    let volumes = fixture.volumes.borrow();
    let sum = |of: fn(&AnyVolume) -> u64| volumes.iter().map(of).sum::<u64>();
    let (hits, evictions) =
        (sum(|volume| volume.statistics().cache.hits), sum(|volume| volume.statistics().cache.evictions));
    assert!(hits > 300 && evictions > 100, "{hits} hits, {evictions} evictions");
}

#[test]
fn operations_of_several_cores_beside_compactions_and_splits_are_linearizable() {
    let mut fixture = LogFixture { cores: 3, ..LogFixture::default() };
    fixture.format.chunk_bytes = Some(8 << 10);
    let (mut hits, mut rounds) = (0, 0);
    for seed in 0..30 {
        let (disk, mut random) = (PowerLossDisk::new(vec![0; LOG_DISK_BYTES], 512), Prng::new(seed ^ 0x5eed));
        let devices: [Rc<dyn Device>; 1] = [Rc::new(disk.clone())];
        let mut complete = || {
            disk.complete_one(&mut random);
        };
        block_on(fixture.format(Rc::clone(&devices[0])), &mut complete);
        let config = OpenConfig { cache_bytes: CACHE_BYTES, ..fixture.open_config() };
        let buffers = pool();
        let opened = CachedVolume::<SmallLogVolume>::open(&devices, &buffers, config, &fixture.format);
        let volume = block_on(opened, &mut complete).expect("opens");
        let engines: Vec<_> = (0..3).map(|core| Rc::new(volume.engine(core, &devices, pool()))).collect();
        let (mut tasks, mut order) = (TaskSet::default(), Prng::new(seed));
        let background = Rc::clone(&engines[2]);
        tasks.add(async move {
            for round in 0..1_000 {
                let log = if round % 2 == 0 { LogKind::Values } else { LogKind::Keys };
                background.engine().compact_once(log).await.expect("no fault");
                background.engine().split_once().await.expect("no fault");
                octokv_runtime::yield_now().await;
            }
        });
        concurrent(&engines[..2], seed, 1_000, |random| {
            let has_stepped = tasks.step(&mut order);
            disk.complete_one(random) || has_stepped
        });
        while disk.complete_one(&mut random) {}
        let statistics = volume.statistics();
        hits += statistics.cache.hits;
        rounds += statistics.log.expect("it has logs").compaction_rounds;
    }
    assert!(hits > 300 && rounds > 30, "{hits} hits and {rounds} rounds of compaction are what was tested");
}

fn holds(clause: impl Fn(&Clauses<'_, AnyEngine>, &TestClock)) {
    let (mut fixture, clock) = (CachedLogFixture::default(), TestClock::default());
    let wall = clock.clone();
    fixture.logs.clock = WallClock::new(move || wall.now());
    holds_on(&fixture, LOG_DISK_BYTES, |clauses| clause(clauses, &clock));
}

#[test]
fn buffers_scans_versions_conditions_and_expiry_hold() {
    holds(|clauses, _| clauses.buffers_and_ranges());
    holds(|clauses, _| clauses.scans());
    holds(|clauses, _| clauses.scans_since());
    holds(|clauses, _| clauses.conditions());
    holds(|clauses, _| clauses.versions());
    holds(|clauses, clock| clauses.expiry(clock));
    holds(|clauses, _| clauses.owner_cores(4));
    for seed in 0..5 {
        holds(|clauses, _| clauses.random_writes(seed, 300));
    }
}
