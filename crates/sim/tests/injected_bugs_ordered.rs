//! Each bug injected into the ordered engine is found within a bounded number of seeds, and without one the scenario holds what it
//! is for: flushes, compactions and checkpoints beside scans.

use crate::injected_bugs::assert_found;
use octokv_engine::bug_injection::InjectedBug;
use octokv_sim::{Scenario, run_seed};

/// Finds a bug in the scenario of the ordered engine.
fn assert_found_in_tree(bug: InjectedBug, seeds: u64) {
    assert_found(bug, Scenario::Ordered, seeds);
}

#[test]
fn scans_run_beside_flushes_compactions_and_checkpoints() {
    let (mut pairs, mut flushes, mut compactions, mut checkpoints) = (0, 0, 0, 0);
    let (mut moved, mut delayed) = (0, 0);
    for seed in 100..130 {
        let stats =
            run_seed(seed, Scenario::Ordered, false).unwrap_or_else(|message| panic!("{seed}: {message}"));
        pairs += stats.scanned_pairs;
        flushes += stats.flushes;
        compactions += stats.compactions;
        delayed += stats.delayed_writes;
        checkpoints += stats.checkpoints;
        moved += stats.compacted;
    }
    assert!(pairs > 1_000 && flushes > 1_000, "{pairs} pairs, {flushes} flushes");
    assert!(compactions > 300 && checkpoints > 30, "{compactions} compactions, {checkpoints} checkpoints");
    assert!(moved > 50 && delayed > 50, "{moved} values were moved, {delayed} puts delayed");
}

#[test]
fn a_flush_that_forgets_snapshots_is_found() {
    assert_found_in_tree(InjectedBug::FlushForgetsSnapshots, 60);
}

#[test]
fn a_tombstone_that_is_dropped_too_early_is_found() {
    assert_found_in_tree(InjectedBug::DropTombstonesEarly, 60);
}

#[test]
fn an_edit_that_is_written_before_its_tables_are_durable_is_found() {
    assert_found_in_tree(InjectedBug::EditBeforeFlush, 600);
}

#[test]
fn a_checkpoint_of_a_tree_that_claims_too_much_is_found() {
    assert_found_in_tree(InjectedBug::CheckpointClaimsTooMuch, 100);
}

#[test]
fn recovery_of_a_tree_that_trusts_torn_records_is_found() {
    assert_found_in_tree(InjectedBug::SkipRecordVerification, 300);
}

#[test]
fn space_that_is_freed_under_an_iterator_is_found() {
    assert_found_in_tree(InjectedBug::FreeUnderVersions, 30);
}

#[test]
fn an_iterator_that_reads_what_came_after_its_creation_is_found() {
    assert_found_in_tree(InjectedBug::LateSnapshot, 60);
}

#[test]
fn a_memtable_that_is_released_before_its_tables_are_there_is_found() {
    assert_found_in_tree(InjectedBug::ReleaseMemtableEarly, 30);
}

#[test]
fn a_lost_table_of_an_edit_is_found() {
    assert_found_in_tree(InjectedBug::LoseTableOfEdit, 30);
}

#[test]
fn a_segment_that_is_sealed_before_its_last_write_has_ended_is_found() {
    assert_found_in_tree(InjectedBug::SealBeforeLastWrite, 400);
}

#[test]
fn a_flush_that_reports_too_much_as_flushed_is_found() {
    assert_found_in_tree(InjectedBug::FlushClaimsTooMuch, 60);
}

#[test]
fn recovery_that_replays_what_tables_have_is_found() {
    assert_found_in_tree(InjectedBug::ReplayFlushed, 30);
}

#[test]
fn a_view_that_is_kept_over_a_seek_is_found() {
    assert_found_in_tree(InjectedBug::KeepViewOverSeek, 60);
}

#[test]
fn a_view_of_another_place_is_found() {
    assert_found_in_tree(InjectedBug::UseViewOfOtherPlace, 60);
}

#[test]
fn a_device_error_that_counts_as_damage_is_found() {
    assert_found_in_tree(InjectedBug::DeviceErrorIsDamage, 60);
}

#[test]
fn an_edit_that_no_flush_follows_is_found() {
    assert_found_in_tree(InjectedBug::SkipFlush, 60);
}

#[test]
fn a_delayed_put_that_is_not_woken_is_found() {
    assert_found_in_tree(InjectedBug::ForgetDelayedWrites, 600);
}
