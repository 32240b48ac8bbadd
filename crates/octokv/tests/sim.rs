//! `octokv sim` through the binary: seeds are run, counted, and deterministic.

use crate::common::octokv;

#[test]
fn a_few_seeds_of_every_scenario_pass_every_check() {
    let output = octokv(["sim", "--seeds", "0..8"]);
    assert_eq!(output.code, 0, "{}", output.stderr);
    assert!(output.text().starts_with("8 seeds passed: "), "{}", output.text());
    let operations = |text: &str| text.split_once(" operations").unwrap().0.to_owned();
    let again = octokv(["sim", "--seeds", "0..8"]);
    assert_eq!(operations(output.text()), operations(again.text()));
}

#[test]
fn time_ends_a_run_and_a_scenario_is_chosen_by_name() {
    let output = octokv(["sim", "--minutes", "0", "--scenario", "calm"]);
    assert!(output.stdout_ok().starts_with("1 seed passed: "), "{}", output.text());
}

#[test]
fn unknown_seeds_and_scenarios_are_rejected() {
    octokv(["sim", "--seeds", "5..5"]).assert_failed(2, &["A..B"]);
    octokv(["sim", "--seeds", "x"]).assert_failed(2, &["A..B"]);
    octokv(["sim", "--scenario", "storm"]).assert_failed(2, &["storm", "crashes"]);
    octokv(["sim", "--minutes", "-1"]).assert_failed(2, &["-1"]);
}
