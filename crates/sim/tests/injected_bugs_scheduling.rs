//! Injected scheduling bugs are found: a response lost between cores, a queued request dropped, a request executed beside
//! the owner of its key. A check that simulations offload and queue requests shows that the search covers them.

use octokv_node::bug_injection::{InjectedBug, inject, injected};
use octokv_sim::engine_plan::EnginePlan;
use octokv_sim::log_scenario::draw_log_plan;
use octokv_sim::{KvScenarioPlan, Scenario, SweepConfig, run_sweep};
use std::ops::Range;
use std::sync::Once;

fn silence_expected_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if injected().is_none() {
                default_hook(panic);
            }
        }));
    });
}

fn assert_found(bug: InjectedBug, scenario: Scenario, seeds: u64) -> String {
    silence_expected_panics();
    inject(Some(bug));
    let config = SweepConfig { scenario: Some(scenario), ..SweepConfig::new(0..seeds) };
    let outcome = run_sweep(&config, |_| true);
    inject(None);
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug:?} is not found in {seeds} seeds"));
    println!(
        "{bug:?}, after {} seeds: {}",
        outcome.seeds,
        failure.message.lines().next().unwrap_or_default()
    );
    failure.message
}

#[test]
fn a_response_that_is_lost_between_cores_is_found() {
    assert_found(InjectedBug::LoseOffloadedCompletion, Scenario::Calm, 400);
}

#[test]
fn a_request_that_is_forgotten_when_the_policy_changes_is_found() {
    assert_found(InjectedBug::DropQueued, Scenario::Calm, 300);
}

#[test]
fn a_request_that_is_executed_beside_the_owner_of_its_key_is_found() {
    let message = assert_found(InjectedBug::ExecuteBesideOwner, Scenario::Everything, 100);
    assert!(message.contains("starts on a core that does not own it"), "{message}");
}

/// The log engine has owners of its stores, whatever the plan says.
#[test]
fn a_request_that_is_executed_beside_the_owner_of_its_store_is_found() {
    let message = assert_found(InjectedBug::ExecuteBesideOwner, Scenario::Log, 200);
    assert!(message.contains("starts on a core that does not own it"), "{message}");
}

#[test]
fn a_request_that_is_executed_beside_the_cores_for_drives_is_found() {
    let message = assert_found(InjectedBug::ExecuteBesideOwner, Scenario::Devices, 20);
    assert!(message.contains("which has no drives"), "{message}");
}

/// Every request in these seeds is checked when it starts: the core is the owner of its key.
fn assert_sent_to_owners(scenario: Scenario, seeds: Range<u64>, has_owners: impl Fn(&u64) -> bool) {
    let (mut simulations, mut offloaded, mut operations) = (0, 0, 0);
    for seed in seeds.filter(has_owners) {
        let config = SweepConfig { scenario: Some(scenario), ..SweepConfig::new(seed..seed + 1) };
        let outcome = run_sweep(&config, |report| {
            simulations += 1;
            offloaded += report.stats.offloaded;
            operations += report.stats.operations;
            true
        });
        assert!(outcome.failure.is_none(), "{:?}", outcome.failure);
    }
    // Between a half and three quarters of the keys belong to another core than the connection's.
    assert!(simulations >= 10 && offloaded * 3 > operations, "{simulations}: {offloaded} of {operations}");
}

#[test]
fn requests_go_to_the_owners_of_their_keys_under_every_fault() {
    assert_sent_to_owners(Scenario::Everything, 0..60, |&seed| {
        let node = KvScenarioPlan::draw(seed, Scenario::Everything).nodes[0];
        node.has_owner_cores && node.cores > 1
    });
}

#[test]
fn requests_go_to_the_owners_of_their_stores_under_every_fault() {
    assert_sent_to_owners(Scenario::Log, 0..40, |&seed| {
        let node = draw_log_plan(seed).nodes[0];
        let EnginePlan::Log(log) = node.engine else { panic!("seed {seed} has another engine") };
        log.partitions > 1 && node.cores > 1
    });
}

#[test]
fn scenarios_offload_and_queue_requests() {
    let (mut offloaded, mut queued) = (0, 0);
    let config = SweepConfig { scenario: Some(Scenario::Everything), ..SweepConfig::new(0..60) };
    let outcome = run_sweep(&config, |report| {
        offloaded += report.stats.offloaded;
        queued += report.stats.queued;
        true
    });
    assert!(outcome.failure.is_none(), "{:?}", outcome.failure);
    assert!(offloaded > 100 && queued > 100, "{offloaded} requests offloaded, {queued} queued");
}
