//! `octokv sim` through the binary: seeds are played, counted, and the same every time.

mod common;

use common::octokv;

#[test]
fn a_few_seeds_of_every_scenario_pass_every_check() {
    let said = octokv(["sim", "--seeds", "0..8"]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(said.text().starts_with("8 seeds held every promise: "), "{}", said.text());
    let operations = |text: &str| text.split_once(" operations").unwrap().0.to_owned();
    let again = octokv(["sim", "--seeds", "0..8"]);
    assert_eq!(operations(said.text()), operations(again.text()));
}

#[test]
fn time_ends_a_run_and_a_scenario_is_chosen_by_name() {
    let said = octokv(["sim", "--minutes", "0", "--scenario", "calm"]);
    assert!(said.fine().starts_with("1 seed held every promise: "), "{}", said.text());
}

#[test]
fn unknown_seeds_and_scenarios_are_rejected() {
    octokv(["sim", "--seeds", "5..5"]).refused(2, &["A..B"]);
    octokv(["sim", "--seeds", "x"]).refused(2, &["A..B"]);
    octokv(["sim", "--scenario", "storm"]).refused(2, &["storm", "crashes"]);
    octokv(["sim", "--minutes", "-1"]).refused(2, &["-1"]);
}
