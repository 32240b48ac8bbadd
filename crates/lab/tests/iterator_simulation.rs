//! The iterator simulation: its host measures what the arithmetic says, and notices a pair that is wrong.

use octokv_base::Nanos;
use octokv_engine::WallClock;
use octokv_engine::memory::{MemoryConfig, MemoryEngine};
use octokv_lab::simulation::iterators::parameters::CommandCosts;
use octokv_lab::simulation::iterators::scan_client::{
    ScanConfig, ScanStats, StoredPairs, put_pairs, run_scans,
};
use octokv_lab::simulation::node::host_handle;
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
