//! Planted bugs of scheduling are found: a request that is lost on its way between cores, and one that is forgotten while it
//! is held back. And worlds do move requests and hold them back, or nothing would be found.

use octokv_node::bug_injection::{Bug, plant, planted};
use octokv_sim::{Scenario, Settings, run};
use std::sync::Once;

fn quiet_while_planted() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if planted().is_none() {
                usual(panic);
            }
        }));
    });
}

fn is_found(bug: Bug, scenario: Scenario, seeds: u64) {
    quiet_while_planted();
    plant(Some(bug));
    let settings = Settings { scenario: Some(scenario), ..Settings::new(0..seeds) };
    let outcome = run(&settings, |_| true);
    plant(None);
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug:?} is not found in {seeds} seeds"));
    println!("{bug:?}, after {} seeds: {}", outcome.seeds, failure.what.lines().next().unwrap_or_default());
}

#[test]
fn an_answer_that_is_lost_between_cores_is_found() {
    is_found(Bug::LoseMovedAnswer, Scenario::Calm, 400);
}

#[test]
fn a_request_that_is_forgotten_when_the_policy_changes_is_found() {
    is_found(Bug::DropHeld, Scenario::Calm, 300);
}

#[test]
fn worlds_move_requests_and_hold_them_back() {
    let (mut moved, mut held) = (0, 0);
    let settings = Settings { scenario: Some(Scenario::Everything), ..Settings::new(0..60) };
    let outcome = run(&settings, |report| {
        moved += report.figures.moved;
        held += report.figures.held;
        true
    });
    assert!(outcome.failure.is_none(), "{:?}", outcome.failure);
    assert!(moved > 100 && held > 100, "{moved} requests moved, {held} waited for their turn");
}
