//! Each bug planted in the device that a client makes of a namespace of blocks is found within a bounded number of
//! seeds, as those of the engine are (`canaries.rs`).

use octokv_client::bug_injection::{Bug, plant};
use octokv_sim::{Scenario, Settings, run};

fn is_found(bug: Bug, seeds: u64) {
    plant(Some(bug));
    let settings = Settings { scenario: Some(Scenario::Remote), ..Settings::new(0..seeds) };
    let outcome = run(&settings, |_| true);
    plant(None);
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug:?} is not found in {seeds} seeds"));
    println!("{bug:?}, after {} seeds: {}", outcome.seeds, failure.what.lines().next().unwrap_or_default());
    assert!(failure.replay().starts_with("octokv sim --seeds "));
}

#[test]
fn a_remote_flush_that_is_answered_early_is_found() {
    is_found(Bug::AnswerFlushEarly, 100);
}

#[test]
fn writes_that_a_lost_connection_took_along_and_nobody_remembers_are_found() {
    is_found(Bug::ForgetLostWrites, 300);
}
