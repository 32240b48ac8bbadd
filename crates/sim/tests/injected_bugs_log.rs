//! Each bug injected into the log engine is found within a bounded number of seeds, and without one the scenario holds what it is for:
//! splits, compactions of both logs, checkpoints, reuse of chunks under readers, and recoveries with something to replay.

use crate::injected_bugs::{assert_found, assert_found_among};
use octokv_engine::bug_injection::InjectedBug;
use octokv_sim::{Scenario, run_seed};

/// Finds a bug in the scenario of the log engine.
fn assert_found_in_log(bug: InjectedBug, seeds: u64) {
    assert_found(bug, Scenario::Log, seeds);
}

#[test]
fn segments_are_split_and_logs_compacted_beside_crashes() {
    let (mut log, mut checkpoints, mut crashes, mut errors, mut bits) =
        (octokv_sim::stats::LogWorkStats::default(), 0, 0, 0, 0);
    for seed in 100..140 {
        let stats =
            run_seed(seed, Scenario::Log, false).unwrap_or_else(|message| panic!("{seed}: {message}"));
        log.splits += stats.log.splits;
        log.rounds += stats.log.rounds;
        log.moved_images += stats.log.moved_images;
        log.moved_values += stats.log.moved_values;
        log.markers += stats.log.markers;
        log.repeated_reads += stats.log.repeated_reads;
        log.image_cache_hits += stats.log.image_cache_hits;
        log.waited_writes += stats.log.waited_writes;
        log.replays += stats.log.replays;
        checkpoints += stats.checkpoints;
        crashes += stats.crashes;
        errors += stats.device_errors;
        bits += stats.corrupted_bits;
    }
    assert!(log.splits > 100 && log.rounds > 500 && log.markers > 500, "{log:?}");
    assert!(log.moved_images > 500 && log.moved_values > 1_000, "{log:?}");
    assert!(log.image_cache_hits > 1_000, "{log:?}");
    assert!(log.repeated_reads > 0 && log.waited_writes > 50 && log.replays > 10, "{log:?}");
    assert!(checkpoints > 200 && crashes > 20, "{checkpoints} checkpoints, {crashes} crashes");
    assert!(errors > 20 && bits > 10, "{errors} device errors, {bits} flipped bits");
}

#[test]
fn a_lost_lock_bit_is_found() {
    assert_found_in_log(InjectedBug::LogForgetLockBit, 30);
}

#[test]
fn a_segment_that_is_released_while_its_batch_is_in_flight_is_found() {
    assert_found_in_log(InjectedBug::LogDropBusy, 30);
}

#[test]
fn a_segment_image_in_memory_that_is_not_the_newest_is_found() {
    assert_found_in_log(InjectedBug::LogServeOldImage, 30);
}

#[test]
fn a_value_checksum_that_is_not_compared_is_found() {
    assert_found_in_log(InjectedBug::LogSkipValueChecksum, 60);
}

#[test]
fn a_split_that_forgets_a_chain_is_found() {
    assert_found_in_log(InjectedBug::LogSplitForgetsChain, 60);
}

#[test]
fn a_reader_that_does_not_notice_reuse_of_a_chunk_is_found() {
    // One seed in some hundreds.
    assert_found_among(InjectedBug::LogSkipReuseCheck, Scenario::Log, 40..340);
}

#[test]
fn a_moved_record_that_replaces_a_newer_one_is_found() {
    assert_found_in_log(InjectedBug::LogStaleMove, 60);
}

#[test]
fn a_head_that_passes_what_prefetched_visits_left_is_found() {
    assert_found_in_log(InjectedBug::LogTrustPrefetch, 60);
}

#[test]
fn recovery_that_trusts_torn_values_is_found() {
    assert_found_in_log(InjectedBug::LogTrustTail, 100);
}

#[test]
fn recovery_that_takes_images_of_an_earlier_opening_is_found() {
    assert_found_in_log(InjectedBug::LogOldIncarnation, 200);
}

#[test]
fn a_tail_that_forgets_its_earlier_records_is_found() {
    assert_found_in_log(InjectedBug::LogTailForgetsPrefix, 30);
}

#[test]
fn chunks_that_are_free_before_the_flush_of_a_head_behind_them_are_found() {
    // Two stores have to claim one chunk: one seed in some hundreds; the first is 143.
    assert_found_in_log(InjectedBug::LogFreeBeforeFlush, 600);
}

#[test]
fn a_skipped_flush_of_images_is_found() {
    assert_found_in_log(InjectedBug::SkipFlush, 60);
}

#[test]
fn an_image_that_is_seen_before_it_is_durable_is_found() {
    assert_found_in_log(InjectedBug::PublishBeforeDurable, 60);
}

#[test]
fn a_checkpoint_of_stores_that_claims_too_much_is_found() {
    assert_found_in_log(InjectedBug::CheckpointClaimsTooMuch, 60);
}

#[test]
fn an_entry_whose_key_is_not_compared_is_found() {
    assert_found_in_log(InjectedBug::SkipKeyCompare, 30);
}
