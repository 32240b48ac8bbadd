//! Each bug injected into volumes on several devices is found within a bounded number of seeds.

use crate::injected_bugs::assert_found;
use octokv_engine::bug_injection::InjectedBug;
use octokv_sim::{Scenario, run_seed};

#[test]
fn devices_that_are_not_told_apart_are_found() {
    assert_found(InjectedBug::SpanIgnoreIndex, Scenario::Devices, 20);
}

#[test]
fn a_flush_of_one_device_alone_is_found() {
    assert_found(InjectedBug::SpanFlushOne, Scenario::Devices, 200);
}

#[test]
fn a_listing_that_ends_with_its_first_device_is_found() {
    assert_found(InjectedBug::SpanListEndsEarly, Scenario::Devices, 20);
}

#[test]
fn a_skipped_flush_of_an_engine_is_found() {
    assert_found(InjectedBug::SkipFlush, Scenario::Devices, 60);
}

#[test]
fn a_device_that_has_failed_and_is_used_is_found() {
    assert_found(InjectedBug::SpanIgnoreFailure, Scenario::Devices, 60);
}

#[test]
fn a_replacement_that_the_others_do_not_count_is_found() {
    assert_found(InjectedBug::SpanForgetReplacement, Scenario::Devices, 60);
}

#[test]
fn a_device_that_was_replaced_and_is_served_again_is_found() {
    assert_found(InjectedBug::SpanTakeReplaced, Scenario::Devices, 60);
}

#[test]
fn a_swapped_key_that_is_read_at_home_is_found() {
    assert_found(InjectedBug::SwapReadHome, Scenario::Devices, 20);
}

#[test]
fn a_swapped_key_that_is_removed_before_its_value_is_at_home_is_found() {
    assert_found(InjectedBug::SwapRemoveFirst, Scenario::Devices, 60);
}

#[test]
fn a_merged_key_that_stays_in_its_region_is_found() {
    assert_found(InjectedBug::SwapLeaveRecord, Scenario::Devices, 60);
}

#[test]
fn tokens_of_operations_that_the_device_did_not_serve_are_given_back() {
    assert_found(InjectedBug::TokensKeepUnserved, Scenario::Devices, 60);
}

#[test]
fn an_operation_that_has_its_tokens_and_is_not_woken_is_found() {
    assert_found(InjectedBug::TokensForgetWaker, Scenario::Devices, 60);
}

#[test]
fn an_opening_that_forgets_swapped_keys_is_found() {
    assert_found(InjectedBug::SwapForgetRegion, Scenario::Devices, 60);
}

#[test]
fn disks_hang_beside_crashes_and_others_serve() {
    let (mut hung, mut unavailable, mut crashes, mut served, mut replaced) = (0, 0, 0, 0, 0);
    for seed in 500..540 {
        let stats =
            run_seed(seed, Scenario::Devices, false).unwrap_or_else(|message| panic!("{seed}: {message}"));
        hung += u64::from(stats.hung_operations > 0);
        unavailable += stats.unavailable_commands;
        served += stats.succeeded;
        crashes += stats.crashes;
        replaced += stats.disks_replaced;
    }
    assert!(
        hung >= 10 && unavailable > 100 && crashes > 20 && replaced >= 5,
        "{hung} runs, {unavailable} commands, {crashes} crashes, {replaced} disks replaced"
    );
    assert!(
        served > 5 * unavailable,
        "{served} commands, {unavailable} of them on keys of a disk that hangs"
    );
}
