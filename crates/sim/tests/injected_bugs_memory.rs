//! Bugs injected into commands that end at once are found within a bounded number of seeds: in the engine, in the node, and in the
//! latches of the memory.

use octokv_engine::bug_injection as engine;
use octokv_node::bug_injection as node;
use octokv_runtime::bug_injection as memory;
use octokv_sim::{Scenario, SweepConfig, run_sweep};
use std::ops::Range;
use std::sync::Once;

/// Silences panics while a bug is injected: a failed assertion is an expected finding.
fn silence_expected_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if engine::injected().is_none() && node::injected().is_none() && memory::injected().is_none() {
                default_hook(panic);
            }
        }));
    });
}

fn assert_found(bug: &str, seeds: Range<u64>) {
    let config = SweepConfig { scenario: Some(Scenario::Memory), ..SweepConfig::new(seeds.clone()) };
    let outcome = run_sweep(&config, |_| true);
    engine::inject(None);
    node::inject(None);
    memory::inject(None);
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug} is not found in seeds {seeds:?}"));
    let message = failure.message.lines().next().unwrap_or_default();
    println!("{bug}, after {} seeds: {message}", outcome.seeds);
    assert!(failure.replay_command().ends_with("--scenario memory"));
}

fn assert_found_in_engine(bug: engine::InjectedBug, seeds: Range<u64>) {
    silence_expected_panics();
    engine::inject(Some(bug));
    assert_found(&format!("{bug:?}"), seeds);
}

fn assert_found_in_node(bug: node::InjectedBug, seeds: Range<u64>) {
    silence_expected_panics();
    node::inject(Some(bug));
    assert_found(&format!("{bug:?}"), seeds);
}

#[test]
fn a_change_of_an_entry_that_was_not_compared_is_found() {
    assert_found_in_engine(engine::InjectedBug::ApplyUncompared, 0..400);
}

#[test]
fn a_change_of_a_key_that_a_writer_has_locked_is_found() {
    assert_found_in_engine(engine::InjectedBug::ApplyDespiteKeyLock, 0..400);
}

#[test]
fn a_record_in_place_that_is_not_identified_is_found() {
    assert_found_in_engine(engine::InjectedBug::SkipIdentityInPlace, 0..400);
}

#[test]
fn the_end_of_a_record_that_was_given_to_another_is_found() {
    // Three operations of another core must come between two steps of a Retrieve: one seed in thousands.
    assert_found_in_engine(engine::InjectedBug::TrustEndInPlace, 3_600..4_600);
}

#[test]
fn space_that_is_freed_under_readers_that_wait_is_found() {
    assert_found_in_engine(engine::InjectedBug::FreeUnderReaders, 0..400);
    assert_found_in_engine(engine::InjectedBug::IgnoreEpochs, 0..400);
}

#[test]
fn a_command_that_is_executed_both_ways_is_found() {
    assert_found_in_node(node::InjectedBug::ExecuteTwice, 0..400);
}

#[test]
fn a_write_of_memory_from_which_a_response_is_sent_is_found() {
    silence_expected_panics();
    memory::inject(Some(memory::InjectedBug::WriteUnderReaders));
    assert_found("WriteUnderReaders", 0..400);
}
