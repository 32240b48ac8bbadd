//! Each bug injected into the engine is found within a bounded number of seeds: this tests the checkers of the
//! simulator.

use octokv_engine::bug_injection::{InjectedBug, inject, injected};
use octokv_sim::{Scenario, SweepConfig, SweepResult, run_seed, run_sweep};
use std::ops::Range;
use std::sync::Once;

/// Silences panics while a bug is injected: a failed assertion is an expected finding.
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

/// Runs seeds of a scenario with an injected bug.
fn run_with_bug(bug: InjectedBug, scenario: Scenario, seeds: Range<u64>) -> SweepResult {
    silence_expected_panics();
    inject(Some(bug));
    let config = SweepConfig { scenario: Some(scenario), ..SweepConfig::new(seeds) };
    let outcome = run_sweep(&config, |_| true);
    inject(None);
    outcome
}

pub(crate) fn assert_found(bug: InjectedBug, scenario: Scenario, seeds: u64) {
    assert_found_among(bug, scenario, 0..seeds);
}

pub(crate) fn assert_found_among(bug: InjectedBug, scenario: Scenario, seeds: Range<u64>) {
    let outcome = run_with_bug(bug, scenario, seeds.clone());
    let failure = outcome.failure.unwrap_or_else(|| panic!("{bug:?} is not found in seeds {seeds:?}"));
    println!(
        "{bug:?}, after {} seeds: {}",
        outcome.seeds,
        failure.message.lines().next().unwrap_or_default()
    );
    assert!(failure.replay_command().starts_with("octokv sim --seeds "));
}

#[test]
fn a_skipped_flush_is_found() {
    assert_found(InjectedBug::SkipFlush, Scenario::Crashes, 60);
}

#[test]
fn a_batch_that_is_flushed_before_its_records_are_written_is_found() {
    assert_found(InjectedBug::SkipRecordWait, Scenario::Crashes, 600);
}

#[test]
fn a_record_of_a_batch_that_is_written_in_place_of_another_is_found() {
    assert_found(InjectedBug::MisplaceRecords, Scenario::Calm, 60);
}

#[test]
fn a_batch_that_marks_one_in_flight_as_durable_is_found() {
    assert_found(InjectedBug::MarkDurableEarly, Scenario::Crashes, 100);
}

#[test]
fn recovery_that_replaces_another_keys_record_is_found() {
    assert_found(InjectedBug::SkipPredecessorCheck, Scenario::Crashes, 300);
}

#[test]
fn space_that_is_reused_before_its_replacement_is_durable_is_found() {
    assert_found(InjectedBug::ReuseSpaceEarly, Scenario::Crashes, 60);
}

#[test]
fn space_that_is_reused_before_any_flush_is_found() {
    assert_found(InjectedBug::ReuseSpaceUnflushed, Scenario::Crashes, 100);
}

#[test]
fn space_that_is_reused_under_a_reader_is_found() {
    assert_found(InjectedBug::IgnoreEpochs, Scenario::Calm, 600);
}

#[test]
fn a_change_that_is_seen_before_it_is_durable_is_found() {
    assert_found(InjectedBug::PublishBeforeDurable, Scenario::Crashes, 300);
}

#[test]
fn a_key_that_is_not_compared_is_found() {
    assert_found(InjectedBug::SkipKeyCompare, Scenario::Calm, 60);
}

#[test]
fn a_value_whose_checksum_is_not_compared_is_found() {
    assert_found(InjectedBug::SkipValueChecksum, Scenario::Disk, 60);
}

#[test]
fn recovery_that_trusts_torn_records_is_found() {
    assert_found(InjectedBug::SkipRecordVerification, Scenario::Crashes, 60);
}

#[test]
fn a_checkpoint_that_claims_too_much_is_found() {
    assert_found(InjectedBug::CheckpointClaimsTooMuch, Scenario::Crashes, 150);
}

#[test]
fn writers_that_do_not_wait_for_each_other_are_found() {
    assert_found(InjectedBug::SkipKeyLock, Scenario::Calm, 60);
}

#[test]
fn a_cache_that_is_filled_with_a_value_of_before_a_change_is_found() {
    assert_found(InjectedBug::FillWithoutLease, Scenario::Calm, 100);
    assert_found(InjectedBug::FillWithoutLease, Scenario::Remote, 300);
}

#[test]
fn colliding_fingerprints_alone_are_no_bug() {
    for scenario in [Scenario::Calm, Scenario::Crashes] {
        let outcome = run_with_bug(InjectedBug::NarrowTags, scenario, 0..150);
        assert_eq!(outcome.failure.map(|failure| failure.to_string()), None);
    }
}

#[test]
fn values_in_pieces_alone_are_no_bug() {
    for scenario in [Scenario::Calm, Scenario::Crashes, Scenario::Disk] {
        let outcome = run_with_bug(InjectedBug::ScatterValues, scenario, 0..60);
        assert_eq!(outcome.failure.map(|failure| failure.to_string()), None);
    }
    // Compaction joins them in the seeds that have it.
    inject(Some(InjectedBug::ScatterValues));
    let compacted = (0..30).map(|seed| run_seed(seed, Scenario::Crashes, false).expect("no bug").compacted);
    let compacted: u64 = compacted.sum();
    inject(None);
    assert!(compacted > 100, "{compacted} values were joined");
}

#[test]
fn a_piece_that_is_not_written_is_found() {
    assert_found(InjectedBug::ForgetPiece, Scenario::Calm, 30);
}

#[test]
fn a_recovery_that_does_not_verify_pieces_is_found() {
    assert_found(InjectedBug::SkipPieceVerification, Scenario::Crashes, 300);
}

#[test]
fn pieces_whose_space_is_given_up_too_early_are_found() {
    assert_found(InjectedBug::FreePiecesEarly, Scenario::Calm, 300);
    assert_found(InjectedBug::FreePiecesEarly, Scenario::Crashes, 300);
}

#[test]
fn pieces_whose_space_compaction_gives_up_too_early_are_found() {
    assert_found(InjectedBug::CompactionFreesEarly, Scenario::Calm, 300);
    assert_found(InjectedBug::CompactionFreesEarly, Scenario::Crashes, 300);
}

#[test]
fn preparation_of_space_that_is_in_use_is_found() {
    assert_found(InjectedBug::PrepareAllocated, Scenario::Calm, 60);
}

#[test]
fn prepared_space_that_is_released_too_early_is_found() {
    assert_found(InjectedBug::ReleaseBeforePrepared, Scenario::Calm, 100);
}

#[test]
fn preparation_of_the_journal_in_use_is_found() {
    assert_found(InjectedBug::PrepareJournalInUse, Scenario::Crashes, 300);
}

#[test]
fn preparation_of_the_last_checkpoint_is_found() {
    assert_found(InjectedBug::PrepareImagesInUse, Scenario::Crashes, 300);
}
