//! Seeds that once failed, with the bug that each found.

use octokv_sim::{Scenario, run_seed};

fn assert_seeds_hold(scenario: Scenario, seeds: &[u64]) {
    for &seed in seeds {
        match run_seed(seed, scenario, false) {
            Ok(stats) => assert_eq!(stats.undecided_keys, 0, "seed {seed}"),
            Err(violation) => panic!("seed {seed}: {violation}"),
        }
    }
}

/// With `durability = "device"` a power loss can keep a journal batch and lose its predecessor. When the lost batch's
/// number was reused and a checkpoint followed, recovery replayed the old batch as a new one and restored deleted
/// values.
#[test]
fn a_batch_from_before_a_restart_never_follows_a_checkpoint() {
    assert_seeds_hold(Scenario::Everything, &[501, 630]);
    assert_seeds_hold(Scenario::Crashes, &[1278, 1393, 2090]);
}

/// With `durability = "device"` the journal marked unflushed batches as durable, so recovery trusted torn records;
/// and freed space was reused before a flush.
#[test]
fn no_write_is_reported_durable_before_a_flush() {
    assert_seeds_hold(Scenario::Crashes, &[3, 5, 7, 11, 16, 25]);
    assert_seeds_hold(Scenario::Everything, &[8, 33, 37]);
}

/// After a failed journal write, a leader that had waited for a checkpoint wrote one more batch. It held a second change
/// of a key whose first one had failed but was on the disk: recovery gave the key two records, or could not open.
#[test]
fn no_batch_follows_a_failed_one() {
    assert_seeds_hold(Scenario::Disk, &[1467, 1723]);
}

/// A failed read of a torn record made recovery count it, and then it replaced the previous value for good.
#[test]
fn a_read_error_during_recovery_does_not_replace_a_value_by_a_torn_one() {
    assert_seeds_hold(Scenario::Remote, &[3215]);
}

/// A client that lost its connection reported commands that it had not sent yet as not executed, and sent them before it closed
/// the connection: the node executed them.
#[test]
fn a_write_that_was_reported_as_not_executed_is_not_sent() {
    assert_seeds_hold(Scenario::Nodes, &[183, 411, 573, 628, 810, 1820]);
}

/// A device block deallocated during a read-modify-write of another namespace block in it returned with its old
/// contents.
#[test]
fn a_deallocated_block_does_not_return_with_a_neighbouring_write() {
    assert_seeds_hold(Scenario::Blocks, &[483]);
}

/// A namespace removed between two steps of a session's setup was reported as one of an unsupported format, a
/// permanent error.
#[test]
fn a_namespace_removed_during_session_setup_is_reported_missing() {
    assert_seeds_hold(Scenario::Namespaces, &[73]);
}

/// A partial write held its range lock while it waited for a buffer, and commands behind it timed out.
#[test]
fn a_wait_for_a_buffer_does_not_block_a_range() {
    assert_seeds_hold(Scenario::Blocks, &[708]);
}

/// A value that an iterator had read ahead while the device failed made a later command fail, though the device read again.
#[test]
fn an_error_of_a_read_ahead_fails_no_later_command() {
    assert_seeds_hold(Scenario::Ordered, &[13]);
}

/// A bit that was flipped in the last unit of a value log, of a volume that stayed open, was intact again when the log engine wrote that
/// unit with more records: the value of a key that had been corrupt came back. The scenario restarts the node behind such flips.
#[test]
fn a_unit_that_is_written_again_is_not_taken_for_a_corrupt_one() {
    assert_seeds_hold(Scenario::Log, &[21071]);
}

/// The last segment of a store was split between the begin of its read ahead and its lookup: the listing ended in the middle of it.
#[test]
fn a_listing_does_not_end_where_the_last_segment_was_split() {
    assert_seeds_hold(Scenario::Log, &[5211]);
}
