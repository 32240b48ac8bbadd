//! Each planted bug is found within a bounded number of seeds: a green simulator proves nothing until it
//! has been seen red.

use octokv_engine::bug_injection::{Bug, plant, planted};
use octokv_sim::{Outcome, Scenario, Settings, run};
use std::sync::Once;

/// A bug that ends in an assertion is found, too; its message would only be noise.
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

/// Plays seeds of a scenario with a bug planted.
fn played_with(bug: Bug, scenario: Scenario, seeds: u64) -> Outcome {
    quiet_while_planted();
    plant(Some(bug));
    let settings = Settings { scenario: Some(scenario), ..Settings::new(0..seeds) };
    let outcome = run(&settings, |_| true);
    plant(None);
    outcome
}

fn is_found(bug: Bug, scenario: Scenario, seeds: u64) {
    let outcome = played_with(bug, scenario, seeds);
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug:?} is not found in {seeds} seeds"));
    println!("{bug:?}, after {} seeds: {}", outcome.seeds, failure.what.lines().next().unwrap_or_default());
    assert!(failure.replay().starts_with("octokv sim --seeds "));
}

#[test]
fn a_skipped_flush_is_found() {
    is_found(Bug::SkipFlush, Scenario::Crashes, 60);
}

#[test]
fn a_batch_that_is_flushed_before_its_records_are_written_is_found() {
    is_found(Bug::ForgetRecords, Scenario::Crashes, 600);
}

#[test]
fn a_batch_that_vouches_for_one_under_way_is_found() {
    is_found(Bug::VouchTooEarly, Scenario::Crashes, 100);
}

#[test]
fn recovery_that_replaces_another_keys_record_is_found() {
    is_found(Bug::ReplaceUnread, Scenario::Crashes, 300);
}

#[test]
fn space_that_is_reused_before_its_replacement_is_durable_is_found() {
    is_found(Bug::ReuseSpaceEarly, Scenario::Crashes, 60);
}

#[test]
fn space_that_is_reused_before_any_flush_is_found() {
    is_found(Bug::FreeUnflushed, Scenario::Crashes, 100);
}

#[test]
fn space_that_is_reused_under_a_reader_is_found() {
    is_found(Bug::IgnoreReaders, Scenario::Calm, 600);
}

#[test]
fn a_change_that_is_seen_before_it_is_durable_is_found() {
    is_found(Bug::PublishBeforeDurable, Scenario::Crashes, 300);
}

#[test]
fn a_key_that_is_not_compared_is_found() {
    is_found(Bug::SkipKeyCompare, Scenario::Calm, 60);
}

#[test]
fn a_value_whose_checksum_is_not_compared_is_found() {
    is_found(Bug::SkipValueChecksum, Scenario::Disk, 60);
}

#[test]
fn recovery_that_trusts_torn_records_is_found() {
    is_found(Bug::TrustTornRecords, Scenario::Crashes, 60);
}

#[test]
fn a_checkpoint_that_claims_too_much_is_found() {
    is_found(Bug::CheckpointTooNew, Scenario::Crashes, 150);
}

#[test]
fn writers_that_do_not_wait_for_each_other_are_found() {
    is_found(Bug::SkipKeyLock, Scenario::Calm, 60);
}

#[test]
fn colliding_tags_alone_are_no_bug() {
    for scenario in [Scenario::Calm, Scenario::Crashes] {
        let outcome = played_with(Bug::NarrowTags, scenario, 150);
        assert_eq!(outcome.failure.map(|failure| failure.to_string()), None);
    }
}
