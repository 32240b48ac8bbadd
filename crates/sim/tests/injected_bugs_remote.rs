//! Each bug injected into the client's block device, or into what the engine does with dropped operations, is found within a bounded number of seeds, like those of the
//! engine (`injected_bugs.rs`).

use octokv_client::bug_injection::{InjectedBug, inject};
use octokv_engine::bug_injection as engine_bugs;
use octokv_sim::{Scenario, SweepConfig, run_sweep};
use std::fmt::Debug;

fn assert_found<B: Debug + Copy>(bug: B, inject: fn(Option<B>), seeds: u64) {
    inject(Some(bug));
    let config = SweepConfig { scenario: Some(Scenario::Remote), ..SweepConfig::new(0..seeds) };
    let outcome = run_sweep(&config, |_| true);
    inject(None);
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug:?} is not found in {seeds} seeds"));
    println!(
        "{bug:?}, after {} seeds: {}",
        outcome.seeds,
        failure.message.lines().next().unwrap_or_default()
    );
    assert!(failure.replay_command().starts_with("octokv sim --seeds "));
}

#[test]
fn a_remote_flush_that_is_completed_early_is_found() {
    assert_found(InjectedBug::CompleteFlushEarly, inject, 100);
}

#[test]
fn forgotten_writes_of_a_lost_connection_are_found() {
    assert_found(InjectedBug::ForgetLostWrites, inject, 300);
}

#[test]
fn a_dropped_operation_that_is_not_continued_is_found() {
    assert_found(engine_bugs::InjectedBug::LoseAbandoned, engine_bugs::inject, 20);
}
