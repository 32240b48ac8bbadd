//! Seeds that once failed, and what they found.

use octokv_sim::{Scenario, play_seed};

fn holds(scenario: Scenario, seeds: &[u64]) {
    for &seed in seeds {
        if let Err(what) = play_seed(seed, scenario, false) {
            panic!("seed {seed}: {what}");
        }
    }
}

/// With `durability = "device"` a power cut can leave a later journal batch without the one before. When
/// that one's number was given out again and a checkpoint followed, recovery took the old batch for a new
/// one and brought deleted values back.
#[test]
fn a_batch_of_an_earlier_opening_never_follows_a_checkpoint() {
    holds(Scenario::Everything, &[501, 630]);
    holds(Scenario::Crashes, &[1278, 1393, 2090]);
}

/// With `durability = "device"` the journal said of batches that no flush had covered that they were
/// durable, so that recovery trusted torn records; and freed space was used again before a flush.
#[test]
fn nothing_is_called_durable_before_a_flush() {
    holds(Scenario::Crashes, &[3, 5, 7, 11, 16, 25]);
    holds(Scenario::Everything, &[8, 33, 37]);
}

/// A block of the device that was given back while a part of another block in it was being written came back with
/// what it had held.
#[test]
fn what_was_given_up_does_not_come_back_with_a_write_beside_it() {
    holds(Scenario::Blocks, &[483]);
}

/// A namespace that was removed between two steps of a session's setup was taken for one of a format that nobody
/// knows, for good.
#[test]
fn a_namespace_that_goes_while_a_session_is_set_up_is_missing_and_no_more() {
    holds(Scenario::Namespaces, &[73]);
}
