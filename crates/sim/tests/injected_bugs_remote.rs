//! Each bug injected into the client's block device is found within a bounded number of seeds, like those of the
//! engine (`injected_bugs.rs`).

use octokv_client::bug_injection::{InjectedBug, inject};
use octokv_sim::{Scenario, SweepConfig, run_sweep};

fn assert_found(bug: InjectedBug, seeds: u64) {
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
    assert_found(InjectedBug::CompleteFlushEarly, 100);
}

#[test]
fn forgotten_writes_of_a_lost_connection_are_found() {
    assert_found(InjectedBug::ForgetLostWrites, 300);
}
