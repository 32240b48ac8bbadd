//! Each bug planted in what serves blocks is found within a bounded number of seeds, as those of the engine are
//! (`canaries.rs`).

use octokv_node::bug_injection::{Bug, plant};
use octokv_sim::{Scenario, Settings, run};
use std::ops::Range;

fn is_found(bug: Bug, scenario: Scenario, seeds: Range<u64>) {
    plant(Some(bug));
    let settings = Settings { scenario: Some(scenario), ..Settings::new(seeds.clone()) };
    let outcome = run(&settings, |_| true);
    plant(None);
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug:?} is not found in seeds {seeds:?}"));
    println!("{bug:?}, after {} seeds: {}", outcome.seeds, failure.what.lines().next().unwrap_or_default());
    assert!(failure.replay().starts_with("octokv sim --seeds "));
}

#[test]
fn writes_of_parts_that_do_not_wait_for_each_other_are_found() {
    is_found(Bug::SkipRangeLock, Scenario::Blocks, 0..60);
}

#[test]
fn zeroing_that_does_not_wait_for_writes_is_found() {
    is_found(Bug::ZeroWithoutLock, Scenario::Blocks, 0..100);
}

#[test]
fn giving_back_what_a_write_is_patching_is_found() {
    // Three commands must meet within microseconds: rare, so the search begins near where it was found.
    is_found(Bug::TrimWithoutLock, Scenario::Blocks, 1370..1400);
}

#[test]
fn a_range_that_is_let_go_of_before_the_write_is_found() {
    is_found(Bug::UnlockEarly, Scenario::Blocks, 0..100);
}

#[test]
fn a_durable_write_that_is_answered_before_its_flush_is_found() {
    is_found(Bug::AnswerDurableEarly, Scenario::Blocks, 0..60);
}

#[test]
fn a_flush_that_does_nothing_is_found() {
    is_found(Bug::SkipFlush, Scenario::Blocks, 0..60);
}

#[test]
fn giving_back_more_than_was_given_up_is_found() {
    is_found(Bug::GiveBackTooMuch, Scenario::Blocks, 0..60);
}

#[test]
fn giving_up_that_is_answered_before_it_is_done_is_found() {
    is_found(Bug::AnswerTrimEarly, Scenario::Blocks, 90..300);
}

#[test]
fn a_removal_that_drops_requests_is_found() {
    is_found(Bug::RemoveDropsRequests, Scenario::Namespaces, 0..60);
}

#[test]
fn a_removal_that_refuses_what_it_has_carried_out_is_found() {
    is_found(Bug::RemoveRefusesRequests, Scenario::Namespaces, 0..60);
}
