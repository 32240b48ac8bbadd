//! The iterator simulation: its host measures what the arithmetic says, and notices a pair that is wrong.

#![allow(clippy::disallowed_methods, reason = "a test reads a report back")]

use octokv_base::Nanos;
use octokv_engine::WallClock;
use octokv_engine::memory::{MemoryConfig, MemoryEngine};
use octokv_lab::simulation::iterators::experiment::{IteratorExperiment, ReadAhead, WriteOrder};
use octokv_lab::simulation::iterators::parameters::{
    CommandCosts, DEGREES, SCAN_LENGTHS, VALUE_BYTES, flash_read_us,
};
use octokv_lab::simulation::iterators::scan_client::{
    ScanConfig, ScanStats, StoredPairs, put_pairs, run_scans,
};
use octokv_lab::simulation::node::host_handle;
use octokv_lab::simulation::percentile::percentile_us;
use octokv_lab::{Paper, ReproduceArgs};
use octokv_runtime::CoreWaker;
use octokv_runtime::simulated::{SimEnv, SimEnvConfig};
use std::cell::RefCell;
use std::rc::Rc;

const PAIRS: StoredPairs = StoredPairs { count: 1_000, value_bytes: 128 };

/// Stores `numbers` in the contract's model, then scans.
fn scan_model(numbers: impl Iterator<Item = u32> + 'static, config: ScanConfig) -> Result<ScanStats, String> {
    let sim = SimEnv::new(SimEnvConfig { iteration_cost_min: Nanos(100), ..SimEnvConfig::new(1) });
    let host = sim.add_host();
    let handle = host_handle(&sim, host, CoreWaker::without_eventfd());
    let memory =
        MemoryConfig { ring_seed: 1, devices: 1, partition_bytes: 1 << 30, value_bytes_max: 1 << 20 };
    let engine = MemoryEngine::new(memory, WallClock::default());
    let result = Rc::new(RefCell::new(None));
    let (scanned, own) = (Rc::clone(&result), handle.clone());
    handle.spawn(async move {
        put_pairs(&engine, PAIRS, Rc::new(RefCell::new(numbers))).await.unwrap();
        *scanned.borrow_mut() =
            Some(run_scans(&engine, &own, CommandCosts::of_the_paper(), PAIRS, config).await);
    });
    sim.add_reactor(host, handle.clone(), move |now| {
        handle.begin_iteration(now) + handle.poll_background() > 0
    });
    assert!(sim.run_until_true(Nanos::from_secs(600), || result.borrow().is_some()), "the scans do not end");
    result.take().unwrap()
}

#[test]
fn an_engine_without_latency_leaves_the_costs_of_its_commands() {
    let config = ScanConfig { scans: 5, length: 200, batch: 1, seed: 3 };
    let stats = scan_model((0..PAIRS.count).rev(), config).unwrap();
    assert_eq!((stats.seek_ns.len(), stats.next_ns.len(), stats.pairs), (5, 5 * 199, 1_000));
    let next = CommandCosts::of_the_paper().total(132);
    // Each of its two waits ends with an iteration.
    assert!(stats.next_ns.iter().all(|&ns| u64::from(ns).abs_diff(next.0) < 1_000), "{next:?}: {stats:?}");
    let span = next.times(1_000) + CommandCosts::of_the_paper().total(0).times(5);
    assert!(stats.span.0.abs_diff(span.0) < span.0 / 20, "{span:?}: {:?}", stats.span);
    let batched = scan_model(0..PAIRS.count, ScanConfig { batch: 16, ..config }).unwrap();
    assert_eq!((batched.next_ns.len(), batched.pairs), (5 * 199_usize.div_ceil(16), 1_000));
}

#[test]
fn a_missing_pair_is_noticed() {
    let config = ScanConfig { scans: 1, length: PAIRS.count, batch: 1, seed: 3 };
    let skipped = scan_model((0..PAIRS.count).filter(|&number| number != 700), config);
    assert!(skipped.unwrap_err().contains("instead of pair 700"));
    let cut_short = scan_model(0..PAIRS.count - 1, config);
    assert!(cut_short.unwrap_err().contains("AtEnd instead of pair 999"));
}

const READ_AHEAD: ReadAhead = ReadAhead { degree: None, index: true };

fn store(value_bytes: u32) -> IteratorExperiment {
    IteratorExperiment::new(StoredPairs { count: 6_000, value_bytes }, WriteOrder::AtRandom, 1).unwrap()
}

#[test]
fn without_prefetch_a_next_waits_for_its_flash_read_and_for_blocks_of_keys() {
    let scans = [ScanConfig { scans: 1, length: 6_000, batch: 1, seed: 3 }];
    let [none, index] = [false, true].map(|index| {
        let experiment = store(4096);
        experiment.scan(ReadAhead { degree: Some(0), index }, &scans).unwrap().remove(0)
    });
    let (there, read) = (CommandCosts::of_the_paper().total(4100).0 as f64 / 1e3, flash_read_us());
    for stats in [&none, &index] {
        let median = percentile_us(&stats.next_ns, 500);
        assert!((median / (there + read) - 1.0).abs() < 0.03, "{median} us, not {there} + {read}");
    }
    // A block of keys and addresses that is not read ahead is a further read.
    let waited = |stats: &ScanStats| {
        stats.next_ns.iter().filter(|&&ns| f64::from(ns) / 1e3 > there + 1.8 * read).count()
    };
    // The first scan of all does not know yet that scans are long: it waits for the first blocks.
    assert!(waited(&none) > 10 && waited(&index) <= 3, "{} and {}", waited(&none), waited(&index));
}

#[test]
fn every_degree_gains_and_the_engines_own_is_near_the_best() {
    for value_bytes in VALUE_BYTES {
        let experiment = store(value_bytes);
        let scans = [128, 2048].map(|length| ScanConfig { scans: 4096 / length, length, batch: 1, seed: 3 });
        let throughput = |degree| {
            let stats = experiment.scan(ReadAhead { degree, ..READ_AHEAD }, &scans).unwrap();
            [0, 1].map(|scan| stats[scan].pairs_per_s())
        };
        let fixed = DEGREES.map(|degree| throughput(Some(degree)));
        let own = throughput(None);
        for scan in [0, 1] {
            let by_degree = fixed.map(|of| of[scan]);
            println!(
                "{value_bytes} B, scans of {}: {by_degree:.0?}, own {:.0}",
                scans[scan].length, own[scan]
            );
            assert!(by_degree[1] > 1.5 * by_degree[0] && by_degree[8] > 2.0 * by_degree[0], "{by_degree:?}");
            let best = by_degree.into_iter().fold(0.0, f64::max);
            assert!(own[scan] > 0.95 * best, "{value_bytes} B: {} of {best}", own[scan]);
        }
    }
}

#[test]
fn a_quick_reproduction_writes_numbers_and_plots() {
    let directory = tempfile::tempdir().unwrap();
    let json = directory.path().join("iterkvssd.json");
    let (figure, svg) = (Some("value-prefetch-b".to_owned()), Some(directory.path().to_owned()));
    let arguments = ReproduceArgs {
        paper: Paper::Iterkvssd,
        figure,
        quick: true,
        directory: None,
        json: Some(json.clone()),
        svg,
    };
    octokv_lab::run(&arguments, &mut |_| ()).unwrap();
    let document: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(json).unwrap()).unwrap();
    let results = document["results"].as_array().unwrap();
    assert_eq!(results.len(), 2 * SCAN_LENGTHS.len() * DEGREES.len());
    assert!(results.iter().all(|point| point["measured"].as_f64().is_some_and(|value| value > 1_000.0)));
    assert!(directory.path().join("iterkvssd-value-prefetch-b-1.svg").exists());
}
