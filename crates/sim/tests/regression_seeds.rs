//! Seeds that once failed, and what they found.

use octokv_sim::{Scenario, run_seed};

fn assert_seeds_hold(scenario: Scenario, seeds: &[u64]) {
    for &seed in seeds {
        if let Err(what) = run_seed(seed, scenario, false) {
            panic!("seed {seed}: {what}");
        }
    }
}

/// With `durability = "device"` a power cut can leave a later journal batch without the one before. When
/// that one's number was given out again and a checkpoint followed, recovery took the old batch for a new
/// one and brought deleted values back.
#[test]
fn a_batch_from_before_a_restart_never_follows_a_checkpoint() {
    assert_seeds_hold(Scenario::Everything, &[501, 630]);
    assert_seeds_hold(Scenario::Crashes, &[1278, 1393, 2090]);
}

/// With `durability = "device"` the journal said of batches that no flush had covered that they were
/// durable, so that recovery trusted torn records; and freed space was used again before a flush.
#[test]
fn nothing_is_called_durable_before_a_flush() {
    assert_seeds_hold(Scenario::Crashes, &[3, 5, 7, 11, 16, 25]);
    assert_seeds_hold(Scenario::Everything, &[8, 33, 37]);
}

/// A block of the device that was given back while a part of another block in it was being written came back with
/// what it had held.
#[test]
fn a_deallocated_block_does_not_return_with_a_neighbouring_write() {
    assert_seeds_hold(Scenario::Blocks, &[483]);
}

/// A namespace that was removed between two steps of a session's setup was taken for one of a format that nobody
/// knows, for good.
#[test]
fn a_namespace_removed_during_session_setup_is_reported_missing() {
    assert_seeds_hold(Scenario::Namespaces, &[73]);
}
