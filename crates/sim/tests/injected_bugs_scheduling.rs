//! Injected scheduling bugs are found: a response lost between cores, a queued request dropped. A check that
//! simulations offload and queue requests shows that the search covers both.

use octokv_node::bug_injection::{InjectedBug, inject, injected};
use octokv_sim::{Scenario, SweepConfig, run_sweep};
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

fn assert_found(bug: InjectedBug, scenario: Scenario, seeds: u64) {
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
