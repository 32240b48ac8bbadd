//! Fairness of a core's iterations under simulated costs: light hosts are served at once, and no host is starved.

use crate::rig::{ReactorRig, TestCosts, keys};
use octokv_base::Nanos;

/// A value of 100 B costs 3 µs, and one of 64 KiB 35 µs.
const COSTS: TestCosts = TestCosts { call: Nanos::from_micros(1), block: Nanos::from_micros(2) };
const SHORT: [u8; 100] = [7; 100];
static LONG: [u8; 64 << 10] = [7; 64 << 10];
const FLOODERS: usize = 8;
/// The first byte of the namespace identifier in a capsule: the common header is 8 bytes.
const NAMESPACE_OFFSET: usize = 8 + 4;
/// Enough for many classification intervals.
const ITERATIONS: usize = 20_000;

#[test]
fn light_hosts_are_served_at_once_and_flooding_hosts_share_equally() {
    let mut rig = ReactorRig::with_costs(16 << 20, 32, COSTS);
    rig.record_batch(&keys(0, 1), Some(&SHORT));
    rig.record_batch(&keys(1, 1), Some(&LONG));
    let one = rig.record_batch(&keys(0, 1), None);
    let many = rig.record_batch(&keys(1, 1), None).repeat(8);
    let flooders: Vec<usize> = (0..FLOODERS).map(|_| rig.add_host()).collect();
    let light_host = rig.add_host();

    let mut waits = Vec::new();
    let mut longest_iteration = Nanos::ZERO;
    let mut outstanding = None;
    for iteration in 0..ITERATIONS {
        for &host in &flooders {
            if rig.pending_and_received_bytes(host).0 < many.len() {
                rig.send_bytes(host, &many);
            }
        }
        // Out of phase with the flooders' iterations, and after the hosts are classified.
        if outstanding.is_none() && iteration % 37 == 0 {
            rig.send_bytes(light_host, &one);
            outstanding = Some((iteration, rig.pending_and_received_bytes(light_host).1));
        }
        let length = rig.run_core_iteration();
        // By now the hosts are classified.
        if iteration > ITERATIONS / 2 {
            longest_iteration = longest_iteration.max(length);
        }
        if let Some((sent_in, bytes_before)) = outstanding
            && rig.pending_and_received_bytes(light_host).1 > bytes_before
        {
            waits.push(iteration + 1 - sent_in);
            outstanding = None;
        }
    }
    // The mixed limit of 40 µs, plus one value in progress on receive and one on send, 35 µs each.
    assert!(
        longest_iteration <= Nanos::from_micros(40 + 2 * 35 + 10),
        "an iteration of {longest_iteration:?}"
    );
    let longest = waits[10..].iter().max().unwrap();
    assert!(*longest <= 2, "{longest} iterations for one request beside flooding hosts");
    assert!(waits.len() > ITERATIONS / 37 - 10);

    let response_bytes: Vec<u64> =
        flooders.iter().map(|&host| rig.pending_and_received_bytes(host).1).collect();
    let (least, most) = (response_bytes.iter().min().unwrap(), response_bytes.iter().max().unwrap());
    assert!(*least > 0 && most - least <= most / 10, "bytes of each flooding host: {response_bytes:?}");
}

#[test]
fn many_light_hosts_do_not_starve_a_heavy_one() {
    let mut rig = ReactorRig::with_costs(16 << 20, 32, COSTS);
    rig.record_batch(&keys(0, 1), Some(&SHORT));
    rig.record_batch(&keys(1, 1), Some(&LONG));
    let (one, long) = (rig.record_batch(&keys(0, 1), None), rig.record_batch(&keys(1, 1), None));
    // Each is light; together they fill an iteration.
    let light_hosts: Vec<usize> = (0..60).map(|_| rig.add_host()).collect();
    let flooder = rig.add_host();
    let mut baseline = Vec::new();
    for iteration in 0..ITERATIONS / 10 {
        if iteration == ITERATIONS / 20 {
            // By now the hosts are classified.
            baseline = light_hosts
                .iter()
                .chain([&flooder])
                .map(|&host| rig.pending_and_received_bytes(host).1)
                .collect();
        }
        for &host in &light_hosts {
            if rig.pending_and_received_bytes(host).0 == 0 {
                rig.send_bytes(host, &one);
            }
        }
        if rig.pending_and_received_bytes(flooder).0 == 0 {
            rig.send_bytes(flooder, &long);
        }
        rig.run_core_iteration();
    }
    let since = |at: usize, host: usize| rig.pending_and_received_bytes(host).1 - baseline[at];
    let least = light_hosts.iter().enumerate().map(|(at, &host)| since(at, host)).min().unwrap();
    let heavy_bytes = since(light_hosts.len(), flooder);
    // At least one value every other iteration.
    let fair_bytes = (ITERATIONS / 40 * LONG.len()) as u64;
    assert!(
        least > 0 && heavy_bytes > fair_bytes,
        "at least {least} bytes for each light host, {heavy_bytes} for the heavy one"
    );
}

#[test]
fn a_host_with_large_read_buffers_gets_short_values_in_one_iteration() {
    let mut rig = ReactorRig::new(16 << 20, 128);
    rig.record_batch(&keys(0, 50), Some(&SHORT));
    // A limit as long as the node's longest value, 50 times: more response space than a connection may reserve.
    rig.read_bytes_max = u32::MAX;
    let batch = rig.record_batch(&keys(0, 50), None);
    let host = rig.add_host();
    let before = rig.pending_and_received_bytes(host).1;
    rig.send_bytes(host, &batch);
    rig.run_core_iteration();
    let (left, sent) = rig.pending_and_received_bytes(host);
    assert_eq!(left, 0, "every byte was consumed");
    assert!(sent - before >= 50 * SHORT.len() as u64, "{} bytes were sent", sent - before);
    rig.run_core_iteration();
    assert_eq!(rig.pending_and_received_bytes(host).1, sent, "nothing was left for a later iteration");
}

#[test]
fn the_rest_of_a_command_behind_a_stall_is_not_slept_over() {
    // One command uses an iteration up.
    let costs = TestCosts { call: Nanos::from_micros(1), block: Nanos::from_micros(120) };
    let mut rig = ReactorRig::with_costs(16 << 20, 32, costs);
    rig.record_batch(&keys(0, 1), Some(&SHORT));
    let command = rig.record_batch(&keys(0, 1), None);
    // A command to a namespace that does not exist ends at once, without a request.
    let mut rejected = command.clone();
    rejected[NAMESPACE_OFFSET] = 99;
    let (head, rest) = command.split_at(20);
    let host = rig.add_host();
    let before = rig.pending_and_received_bytes(host).1;
    rig.send_bytes(host, &[&command, &rejected, &rejected, head].concat());
    rig.run_core_iteration();
    assert_eq!(rig.pending_and_received_bytes(host).0, 0, "everything was received, and part of it executed");
    rig.send_bytes(host, rest);
    rig.run_until_idle();
    let (unread_bytes, response_bytes) = rig.pending_and_received_bytes(host);
    assert_eq!(unread_bytes, 0, "the core sleeps, and the socket causes no further event");
    assert!(response_bytes - before >= 2 * SHORT.len() as u64, "{response_bytes}");
}
