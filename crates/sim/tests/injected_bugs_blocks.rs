//! Each bug injected into the block backend is found within a bounded number of seeds, like those of the engine
//! (`injected_bugs.rs`).

use octokv_node::bug_injection::{InjectedBug, inject};
use octokv_sim::{Scenario, SweepConfig, run_sweep};
use std::ops::Range;

fn assert_found(bug: InjectedBug, scenario: Scenario, seeds: Range<u64>) {
    inject(Some(bug));
    let config = SweepConfig { scenario: Some(scenario), ..SweepConfig::new(seeds.clone()) };
    let outcome = run_sweep(&config, |_| true);
    inject(None);
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug:?} is not found in seeds {seeds:?}"));
    println!(
        "{bug:?}, after {} seeds: {}",
        outcome.seeds,
        failure.message.lines().next().unwrap_or_default()
    );
    assert!(failure.replay_command().starts_with("octokv sim --seeds "));
}

#[test]
fn partial_block_writes_without_a_range_lock_are_found() {
    assert_found(InjectedBug::SkipRangeLock, Scenario::Blocks, 0..60);
}

#[test]
fn zeroing_that_does_not_wait_for_writes_is_found() {
    assert_found(InjectedBug::ZeroWithoutLock, Scenario::Blocks, 0..100);
}

#[test]
fn trimming_a_block_during_a_read_modify_write_is_found() {
    // Three commands must overlap within microseconds: rare except in the plans with few device blocks.
    assert_found(InjectedBug::TrimWithoutLock, Scenario::Blocks, 0..300);
}

#[test]
fn a_range_that_is_unlocked_before_the_write_is_found() {
    assert_found(InjectedBug::UnlockEarly, Scenario::Blocks, 0..100);
}

#[test]
fn a_durable_write_that_is_completed_before_its_flush_is_found() {
    assert_found(InjectedBug::CompleteDurableEarly, Scenario::Blocks, 0..60);
}

#[test]
fn a_flush_that_does_nothing_is_found() {
    assert_found(InjectedBug::SkipFlush, Scenario::Blocks, 0..60);
}

#[test]
fn trimming_more_than_was_deallocated_is_found() {
    assert_found(InjectedBug::TrimTooMuch, Scenario::Blocks, 0..60);
}

#[test]
fn a_deallocation_that_is_completed_early_is_found() {
    assert_found(InjectedBug::CompleteTrimEarly, Scenario::Blocks, 90..300);
}

#[test]
fn a_removal_that_drops_requests_is_found() {
    assert_found(InjectedBug::RemoveDropsRequests, Scenario::Namespaces, 0..60);
}

#[test]
fn a_removal_that_rejects_executed_requests_is_found() {
    assert_found(InjectedBug::RemoveFailsRequests, Scenario::Namespaces, 0..60);
}
