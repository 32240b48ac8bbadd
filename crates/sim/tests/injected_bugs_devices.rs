//! Each bug injected into volumes on several devices is found within a bounded number of seeds.

use crate::injected_bugs::assert_found;
use octokv_engine::bug_injection::InjectedBug;
use octokv_sim::Scenario;

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
