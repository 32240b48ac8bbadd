//! Tables of the service order, and properties: pairs of tenants, limits, many requests in flight.

use super::*;
use octokv_base::Prng;

const TENANTS: u32 = 16;

fn queue(in_flight_max: u32) -> FairQueue<u64> {
    FairQueue::new(FairQueueLimits { tenants_max: TENANTS, requests_max: 4096, in_flight_max })
}

fn qos_of_weight(weight: u32) -> TenantQos {
    TenantQos { weight, ..TenantQos::default() }
}

/// A queue with tenants 0, 1, … of these weights.
fn weighted(in_flight_max: u32, weights: &[u32]) -> FairQueue<u64> {
    let mut queue = queue(in_flight_max);
    for (tenant, &weight) in (0..).zip(weights) {
        queue.add_tenant(TenantId(tenant), &qos_of_weight(weight), Nanos::ZERO);
    }
    queue
}

fn cost(ns: u64) -> Cost {
    Cost { ns, bytes: 0 }
}

/// The tenant of the next request, which completes at once with its expected cost.
fn serve(queue: &mut FairQueue<u64>, now: u64) -> Option<u32> {
    let (ticket, _) = queue.dequeue(Nanos(now))?;
    let tenant = ticket.tenant().0;
    queue.complete(ticket, None);
    Some(tenant)
}

/// The order in which waiting requests begin: of each tenant a number of requests and their cost.
fn service_order(weights: &[u32], requests: &[(u64, u64)]) -> Vec<u32> {
    let mut queue = weighted(1, weights);
    for (tenant, &(count, ns)) in (0..).zip(requests) {
        (0..count)
            .for_each(|request| queue.enqueue(TenantId(tenant), cost(ns), request, Nanos::ZERO).unwrap());
    }
    std::iter::from_fn(|| serve(&mut queue, 0)).collect()
}

#[test]
fn tenants_are_served_by_weight_and_cost() {
    type ServiceOrderRow = (&'static [u32], &'static [u32], &'static [(u64, u64)]);
    // Expected order, weights, counts and costs.
    let table: &[ServiceOrderRow] = &[
        (&[], &[1], &[(0, 0)]),
        (&[0, 0, 0], &[1], &[(3, 10)]),
        (&[0, 1, 0, 1, 0, 1], &[1, 1], &[(3, 10), (3, 10)]),
        (&[0, 1, 1, 0, 1, 1], &[1, 2], &[(2, 10), (4, 10)]), // 1's first is at 0, its second at 5.
        (&[0, 1, 0, 0, 1, 0], &[1, 1], &[(4, 10), (2, 30)]), // A tie at 30: 1's is the older one.
        (&[0, 1, 2, 2, 1, 2, 2, 0, 1, 2], &[1, 2, 4], &[(2, 8), (3, 8), (5, 8)]),
        (&[0, 1, 0, 1], &[1, 1], &[(2, 0), (2, 0)]), // Nothing is for nothing.
    ];
    for (want, weights, requests) in table {
        assert_eq!(service_order(weights, requests), *want, "{weights:?} {requests:?}");
    }
}

#[test]
fn requests_in_flight_never_exceed_the_limit() {
    let mut queue = weighted(2, &[1]);
    (0..4).for_each(|request| queue.enqueue(TenantId(0), cost(1), request, Nanos::ZERO).unwrap());
    let (first, _) = queue.dequeue(Nanos::ZERO).unwrap();
    let (second, _) = queue.dequeue(Nanos::ZERO).unwrap();
    assert!(
        queue.dequeue(Nanos::ZERO).is_none() && queue.try_begin(TenantId(0), cost(1), Nanos::ZERO).is_none()
    );
    assert_eq!((queue.in_flight(), queue.waiting(), queue.waiting_of(TenantId(0))), (2, 2, 2));
    queue.complete(first, None);
    let (third, request) = queue.dequeue(Nanos::ZERO).unwrap();
    assert_eq!(request, 2, "FIFO");
    assert!(queue.dequeue(Nanos::ZERO).is_none());
    queue.set_in_flight_max(3);
    let (fourth, _) = queue.dequeue(Nanos::ZERO).unwrap();
    [second, third, fourth].into_iter().for_each(|ticket| queue.complete(ticket, None));
    assert_eq!((queue.in_flight(), queue.waiting()), (0, 0));
}

#[test]
fn a_lower_limit_applies_to_requests_not_begun() {
    let (mut queue, now) = (weighted(8, &[1]), Nanos::ZERO);
    (0..20).for_each(|request| queue.enqueue(TenantId(0), cost(1), request, now).unwrap());
    let mut tickets: Vec<ServiceTicket> =
        std::iter::from_fn(|| queue.dequeue(now)).map(|(charge, _)| charge).collect();
    assert_eq!(tickets.len(), 8);
    queue.set_in_flight_max(3);
    while queue.in_flight() >= 3 {
        assert!(queue.dequeue(now).is_none(), "{} in flight already", queue.in_flight());
        queue.complete(tickets.pop().unwrap(), None);
    }
    assert!(queue.dequeue(now).is_some() && queue.dequeue(now).is_none());
    let mut passing = weighted(4, &[1]);
    let tickets: Vec<ServiceTicket> =
        (0..4).map(|_| passing.try_begin(TenantId(0), cost(1), now).unwrap()).collect();
    passing.set_in_flight_max(2);
    assert!(passing.try_begin(TenantId(0), cost(1), now).is_none());
    tickets.into_iter().for_each(|ticket| passing.complete(ticket, None));
}

#[test]
fn a_single_tenant_begins_without_queueing() {
    let mut queue = weighted(4, &[1, 1]);
    let now = Nanos::ZERO;
    let tickets: Vec<ServiceTicket> =
        (0..4).map(|_| queue.try_begin(TenantId(0), cost(10), now).unwrap()).collect();
    assert!(queue.try_begin(TenantId(0), cost(10), now).is_none(), "no slot is free");
    queue.enqueue(TenantId(0), cost(10), 0, now).unwrap();
    tickets.into_iter().for_each(|ticket| queue.complete(ticket, None));
    assert!(queue.try_begin(TenantId(1), cost(10), now).is_none(), "another request waits");
    let (ticket, _) = queue.dequeue(now).unwrap();
    let passed = queue.try_begin(TenantId(1), cost(10), now).unwrap();
    queue.complete(ticket, None);
    queue.complete(passed, None);
}

#[test]
fn requests_that_skipped_the_queue_are_charged() {
    let mut queue = weighted(1, &[1, 1]);
    // Repeated after a pause.
    for _ in 0..2 {
        let ticket = queue.try_begin(TenantId(0), cost(100), Nanos::ZERO).unwrap();
        for request in 0..4 {
            queue.enqueue(TenantId(0), cost(10), request, Nanos::ZERO).unwrap();
            queue.enqueue(TenantId(1), cost(25), request, Nanos::ZERO).unwrap();
        }
        queue.complete(ticket, None);
        let order: Vec<u32> = std::iter::from_fn(|| serve(&mut queue, 0)).collect();
        assert_eq!(order, [1, 1, 1, 1, 0, 0, 0, 0]);
    }
}

#[test]
fn the_actual_cost_of_a_request_is_charged() {
    // Tenant 0's requests cost this much instead of the expected 10; its number among 60 requests beside tenant 1's.
    for (really, want) in [(10, 30), (30, 15), (50, 10), (5, 40), (0, 54)] {
        let mut queue = weighted(1, &[1, 1]);
        let mut own = 0;
        for tenant in 0..2 {
            (0..100)
                .for_each(|request| queue.enqueue(TenantId(tenant), cost(10), request, Nanos::ZERO).unwrap());
        }
        for _ in 0..60 {
            let (ticket, _) = queue.dequeue(Nanos::ZERO).unwrap();
            let is_own = ticket.tenant() == TenantId(0);
            own += i32::from(is_own);
            queue.complete(ticket, is_own.then_some(really));
        }
        assert!((own - want).abs() <= 2, "{really} ns: {own}, not {want}");
    }
    // The same for a tenant that was alone, with nothing waiting at the completion.
    let mut queue = weighted(2, &[1, 1]);
    let other = queue.try_begin(TenantId(1), cost(10), Nanos::ZERO).unwrap();
    let ticket = queue.try_begin(TenantId(0), cost(10), Nanos::ZERO).unwrap();
    queue.complete(ticket, Some(1000));
    queue.enqueue(TenantId(0), cost(10), 0, Nanos::ZERO).unwrap();
    (0..3).for_each(|request| queue.enqueue(TenantId(1), cost(10), request, Nanos::ZERO).unwrap());
    assert_eq!((0..3).map(|_| serve(&mut queue, 0)).collect::<Vec<_>>(), [Some(1); 3]);
    queue.complete(other, None);
}

#[test]
fn a_tenant_with_an_empty_queue_is_never_refused() {
    let mut queue: FairQueue<u64> =
        FairQueue::new(FairQueueLimits { tenants_max: 3, requests_max: 12, in_flight_max: 1 });
    (0..3).for_each(|tenant| queue.add_tenant(TenantId(tenant), &qos_of_weight(1), Nanos::ZERO));
    let fill = |queue: &mut FairQueue<u64>, tenant| {
        (0..)
            .find(|&request| queue.enqueue(TenantId(tenant), cost(1), request, Nanos::ZERO).is_err())
            .unwrap()
    };
    assert_eq!(fill(&mut queue, 0), 5, "a half of the slots not reserved for others");
    assert_eq!(fill(&mut queue, 1), 3, "a half of the rest");
    assert_eq!(fill(&mut queue, 2), 2);
    assert_eq!(queue.enqueue(TenantId(0), cost(1), 77, Nanos::ZERO), Err(77));
    assert_eq!(queue.waiting(), 10);
    let mut served = [0; 3];
    while let Some(tenant) = serve(&mut queue, 0) {
        served[tenant as usize] += 1;
    }
    assert_eq!((served, queue.waiting()), ([5, 3, 2], 0));
    // With as many slots as tenants, each tenant has one.
    let mut queue: FairQueue<u64> =
        FairQueue::new(FairQueueLimits { tenants_max: 3, requests_max: 3, in_flight_max: 1 });
    (0..3).for_each(|tenant| queue.add_tenant(TenantId(tenant), &qos_of_weight(1), Nanos::ZERO));
    assert_eq!([0, 1, 2].map(|tenant| fill(&mut queue, tenant)), [1; 3]);
}

#[test]
fn a_removed_tenant_leaves_only_its_debt() {
    let mut queue = weighted(2, &[1, 1]);
    (0..3).for_each(|request| queue.enqueue(TenantId(0), cost(100), request, Nanos::ZERO).unwrap());
    let (running, _) = queue.dequeue(Nanos::ZERO).unwrap();
    let mut gone = Vec::new();
    queue.remove_tenant(TenantId(0), |request| gone.push(request));
    assert_eq!((gone, queue.waiting(), queue.in_flight()), (vec![1, 2], 0, 1));
    queue.add_tenant(TenantId(0), &qos_of_weight(2), Nanos::ZERO);
    (8..10).for_each(|request| queue.enqueue(TenantId(0), cost(100), request, Nanos::ZERO).unwrap());
    (0..6).for_each(|request| queue.enqueue(TenantId(1), cost(30), request, Nanos::ZERO).unwrap());
    // Its debt of 100 ns is a tag of 50 at its new weight: two requests of the other are first.
    queue.complete(running, Some(1_000_000));
    let order: Vec<u32> = std::iter::from_fn(|| serve(&mut queue, 0)).collect();
    assert_eq!(order, [1, 1, 0, 1, 1, 0, 1, 1], "the correction of the former tenant does not apply");
    // After an idle time there is no debt.
    queue.remove_tenant(TenantId(0), |_| ());
    queue.add_tenant(TenantId(0), &qos_of_weight(1), Nanos::ZERO);
    queue.enqueue(TenantId(0), cost(1), 0, Nanos::ZERO).unwrap();
    queue.enqueue(TenantId(1), cost(1), 0, Nanos::ZERO).unwrap();
    assert_eq!(serve(&mut queue, 0), Some(0));
}

#[test]
fn a_tenant_that_reconnects_constantly_starves_no_other() {
    let mut queue = weighted(1, &[1, 1]);
    (0..9).for_each(|request| queue.enqueue(TenantId(0), cost(10), request, Nanos::ZERO).unwrap());
    let mut served = [0; 2];
    for request in 0..16 {
        queue.enqueue(TenantId(1), cost(10), request, Nanos::ZERO).unwrap();
        served[serve(&mut queue, 0).unwrap() as usize] += 1;
        queue.remove_tenant(TenantId(1), |_| ());
        queue.add_tenant(TenantId(1), &qos_of_weight(1), Nanos::ZERO);
    }
    assert!(served[0] >= 7, "{served:?}");
}

#[test]
fn a_weight_counts_from_the_next_request_on() {
    let mut queue = weighted(1, &[1, 1]);
    for tenant in 0..2 {
        (0..200).for_each(|request| queue.enqueue(TenantId(tenant), cost(10), request, Nanos::ZERO).unwrap());
    }
    let of_100 = |queue: &mut FairQueue<u64>| (0..100).filter(|_| serve(queue, 0) == Some(0)).count();
    assert_eq!(of_100(&mut queue), 50);
    queue.update_tenant(TenantId(0), &qos_of_weight(3), Nanos::ZERO);
    assert!((74..=76).contains(&of_100(&mut queue)));
    queue.set_weight(TenantId(0), WEIGHT_UNIT / 4);
    assert!((19..=21).contains(&of_100(&mut queue)));
}

#[test]
fn sizes_do_not_matter_to_weighted_shares() {
    let (weights, sizes) = ([1, 2, 4], [64_000, 900, 7_000]);
    let mut queue = weighted(8, &weights);
    let (mut served, mut running) = ([0_u64; 3], std::collections::VecDeque::new());
    for request in 0..100_000 {
        for tenant in 0..3 {
            while queue.waiting_of(TenantId(tenant)) < 20 {
                let ns = sizes[tenant as usize] / 2 + request % sizes[tenant as usize];
                queue.enqueue(TenantId(tenant), cost(ns), ns, Nanos::ZERO).unwrap();
            }
        }
        while let Some((ticket, ns)) = queue.dequeue(Nanos::ZERO) {
            served[ticket.tenant().0 as usize] += ns;
            running.push_back(ticket);
        }
        queue.complete(running.pop_front().unwrap(), None);
    }
    let parts: Vec<f64> =
        served.iter().zip(weights).map(|(ns, weight)| *ns as f64 / f64::from(weight)).collect();
    let (sum, squares) = (parts.iter().sum::<f64>(), parts.iter().map(|part| part * part).sum::<f64>());
    let jain = sum * sum / (3.0 * squares);
    assert!(jain >= 0.999, "{jain} {served:?}");
}

#[test]
fn a_sparse_tenant_waits_for_requests_in_flight_and_one_more() {
    for in_flight_max in [1, 4, 16] {
        let mut queue = weighted(in_flight_max, &[1, 1]);
        let mut running = std::collections::VecDeque::new();
        let mut waits = Vec::new();
        let mut since = None;
        for request in 0..2000 {
            while queue.waiting_of(TenantId(1)) < 64 {
                queue.enqueue(TenantId(1), cost(10), request, Nanos::ZERO).unwrap();
            }
            // One at a time: the next after the last completed, and after a pause.
            let is_out = !running.iter().any(|ticket: &ServiceTicket| ticket.tenant() == TenantId(0));
            if is_out && queue.waiting_of(TenantId(0)) == 0 && request % 3 == 0 {
                queue.enqueue(TenantId(0), cost(10), request, Nanos::ZERO).unwrap();
                since = Some((0, running.len()));
            }
            while let Some((ticket, _)) = queue.dequeue(Nanos::ZERO) {
                if ticket.tenant() == TenantId(0) {
                    waits.extend(since.take());
                } else if let Some((begun, _)) = &mut since {
                    *begun += 1;
                }
                running.push_back(ticket);
            }
            queue.complete(running.pop_front().unwrap(), None);
        }
        assert!(waits.len() > 100);
        for (begun, ahead) in waits {
            assert!(begun <= 1 && ahead <= in_flight_max as usize, "{begun} began before it, {ahead} ran");
        }
    }
}

/// A limited tenant alone, with requests always waiting: the begin time and size of each.
fn begin_times(config: &TenantQos, bytes: &[u64], until: u64, step: u64) -> Vec<(u64, u64)> {
    let mut queue = queue(4);
    queue.add_tenant(TenantId(0), config, Nanos(1000));
    let (mut begins, mut now, mut at) = (Vec::new(), 1000, 0);
    while now < until {
        loop {
            let bytes = bytes[at % bytes.len()];
            if queue.enqueue(TenantId(0), Cost { ns: 1, bytes }, bytes, Nanos(now)).is_ok() {
                at += 1;
            }
            let Some((ticket, bytes)) = queue.dequeue(Nanos(now)) else { break };
            begins.push((now, bytes));
            queue.complete(ticket, None);
        }
        let deadline = queue.next_deadline().0;
        assert!(deadline > now && deadline < u64::MAX, "throttled, with a deadline");
        now = deadline.max(now + step);
    }
    begins
}

#[test]
fn limits_hold_over_every_span_and_are_fully_used() {
    let ms = Nanos::from_millis(1).0;
    let burst = Nanos::from_millis(5);
    let limited = |operations_per_s, bytes_per_s| TenantQos {
        operations_per_s,
        bytes_per_s,
        burst,
        ..TenantQos::default()
    };
    for (config, bytes) in [
        (limited(Some(10_000), None), &[0][..]),
        (limited(Some(7), None), &[0]),
        (limited(None, Some(1 << 20)), &[4096, 100, 0, 1]),
        (limited(None, Some(3_000_000)), &[100_000]),
        (limited(Some(1000), Some(1 << 20)), &[100, 5000]),
    ] {
        // Polled as soon as possible, or late, so that a burst accumulates.
        for step in [0, 20 * ms] {
            let begins = begin_times(&config, bytes, 2000 * ms, step);
            let largest = *bytes.iter().max().unwrap();
            for (first, &(from, _)) in begins.iter().enumerate().step_by(7) {
                let (mut operations, mut bytes) = (0, 0);
                for &(to, size) in &begins[first..] {
                    operations += 1;
                    bytes += size;
                    let span = u128::from(to - from + burst.0);
                    let most =
                        |rate: u64, one: u64| u128::from(rate) * span + u128::from(one) * 1_000_000_000;
                    let within = |amount: u64, rate: Option<u64>, one| {
                        rate.is_none_or(|rate| u128::from(amount) * 1_000_000_000 <= most(rate, one))
                    };
                    assert!(within(operations, config.operations_per_s, 1), "{config:?} {from} to {to}");
                    assert!(within(bytes, config.bytes_per_s, largest), "{config:?} {from} to {to}");
                }
            }
            if step == 0 {
                // It receives all of its limit except one request.
                let (operations, bytes) =
                    (begins.len() as u64, begins.iter().map(|begun| begun.1).sum::<u64>());
                let least = |rate: u64| rate * 1999 / 1000;
                let all =
                    |rate: Option<u64>, got: u64, one| rate.is_some_and(|rate| got + one >= least(rate));
                let used =
                    all(config.operations_per_s, operations, 1) || all(config.bytes_per_s, bytes, largest);
                assert!(used, "{config:?}: {operations} operations, {bytes} bytes");
            }
        }
    }
}

#[test]
fn a_limit_loses_nothing_by_rounding() {
    for (rate, amount, times, seconds) in [(3, 1, 3000, 1000), (1 << 40, 1 << 20, 3 << 20, 3), (7, 0, 9, 0)] {
        let mut gcra = Gcra::new(rate, Nanos::from_millis(1), Nanos::ZERO);
        (0..times).for_each(|_| gcra.charge(amount, Nanos::ZERO));
        assert_eq!(gcra.conforms_at(), Nanos::from_secs(seconds), "{amount} at {rate}/s");
    }
}

#[test]
fn a_throttled_tenant_delays_no_other_and_saves_nothing_up() {
    let mut queue = weighted(1, &[1, 1]);
    let limited = TenantQos { operations_per_s: Some(100), burst: Nanos::from_millis(1), ..qos_of_weight(1) };
    let ms = Nanos::from_millis(1).0;
    queue.update_tenant(TenantId(0), &limited, Nanos::ZERO);
    for tenant in 0..2 {
        (0..100).for_each(|request| queue.enqueue(TenantId(tenant), cost(10), request, Nanos::ZERO).unwrap());
    }
    let order: Vec<Option<u32>> = (0..8).map(|_| serve(&mut queue, 0)).collect();
    assert_eq!(order[..4], [Some(0), Some(1), Some(1), Some(1)], "one, then the other tenant's requests");
    assert_eq!(queue.next_deadline(), Nanos(10 * ms), "100 per second without credit");
    let order: Vec<Option<u32>> = (0..4).map(|_| serve(&mut queue, 10 * ms)).collect();
    assert_eq!(order.iter().filter(|tenant| **tenant == Some(0)).count(), 1, "{order:?}");
    assert!(queue.try_begin(TenantId(1), cost(1), Nanos(10 * ms)).is_none(), "another request waits");
    let order: Vec<Option<u32>> = (0..8).map(|_| serve(&mut queue, 100 * ms)).collect();
    let own = order.iter().filter(|tenant| **tenant == Some(0)).count();
    assert_eq!(own, 1, "credit beyond the burst is lost: {order:?}");
    // With a longer burst, polled late, it may send several at once: alternating with the other.
    let limited = TenantQos { operations_per_s: Some(100), burst: Nanos::from_secs(1), ..qos_of_weight(1) };
    queue.update_tenant(TenantId(0), &limited, Nanos(100 * ms));
    (0..40).for_each(|_| _ = serve(&mut queue, 100 * ms));
    (0..100).for_each(|request| queue.enqueue(TenantId(1), cost(10), request, Nanos(100 * ms)).unwrap());
    let order: Vec<Option<u32>> = (0..8).map(|_| serve(&mut queue, 600 * ms)).collect();
    assert_eq!(
        order.iter().filter(|tenant| **tenant == Some(0)).count(),
        4,
        "it does not catch up: {order:?}"
    );
    // Nor without the limit.
    queue.update_tenant(TenantId(0), &qos_of_weight(1), Nanos(600 * ms));
    assert_eq!(queue.next_deadline(), Nanos::NEVER);
    let own = (0..20).filter(|_| serve(&mut queue, 600 * ms) == Some(0)).count();
    assert!((9..=11).contains(&own), "{own}");
}

#[test]
fn limits_hold_for_requests_that_skip_the_queue() {
    let mut queue = queue(4);
    let limited =
        TenantQos { operations_per_s: Some(1000), burst: Nanos::from_millis(1), ..qos_of_weight(1) };
    queue.add_tenant(TenantId(0), &limited, Nanos::ZERO);
    let ms = Nanos::from_millis(1);
    let pass = |queue: &mut FairQueue<u64>, now| {
        let ticket = queue.try_begin(TenantId(0), cost(1), now);
        ticket.map(|charge| queue.complete(charge, None)).is_some()
    };
    assert!(pass(&mut queue, Nanos::ZERO) && !pass(&mut queue, Nanos::ZERO), "no credit at first");
    assert!(pass(&mut queue, Nanos::from_millis(10)) && pass(&mut queue, Nanos::from_millis(10)));
    assert!(!pass(&mut queue, Nanos::from_millis(10)));
    queue.enqueue(TenantId(0), cost(1), 0, Nanos::from_millis(10)).unwrap();
    assert!(queue.dequeue(Nanos::from_millis(10)).is_none());
    // A tenant that is added again has no new burst.
    queue.remove_tenant(TenantId(0), |_| ());
    queue.add_tenant(TenantId(0), &limited, Nanos::from_millis(10) + ms);
    assert!(pass(&mut queue, Nanos::from_millis(11)) && !pass(&mut queue, Nanos::from_millis(11)));
}

#[test]
fn extreme_costs_and_weights_do_not_overflow() {
    let mut queue = weighted(3, &[1, 1000]);
    let most = Cost { ns: u64::MAX, bytes: u64::MAX };
    let limited = TenantQos { operations_per_s: Some(1), bytes_per_s: Some(1024), ..qos_of_weight(1000) };
    queue.add_tenant(TenantId(2), &limited, Nanos::NEVER);
    queue.set_weight(TenantId(0), 0);
    queue.set_weight(TenantId(1), u32::MAX);
    for now in [Nanos::ZERO, Nanos::NEVER] {
        for tenant in 0..3 {
            (0..20).for_each(|request| queue.enqueue(TenantId(tenant), most, request, now).unwrap());
        }
        while let Some((ticket, _)) = queue.dequeue(now) {
            queue.complete(ticket, Some(u64::MAX));
        }
    }
    assert_eq!(queue.waiting_of(TenantId(0)), 0);
}

#[path = "gps_tests.rs"]
mod gps_tests;
#[path = "random_tests.rs"]
mod random_tests;

#[test]
fn work_that_passed_by_the_queue_counts_for_the_order_of_what_follows() {
    // While one request of the other is in flight, virtual time stands still.
    let mut queue = weighted(2, &[1, 1]);
    let other = queue.try_begin(TenantId(1), cost(10), Nanos::ZERO).unwrap();
    assert!(queue.may_bypass(TenantId(0)));
    assert_eq!(queue.charge_bypassed(TenantId(0), cost(25), Nanos::ZERO), 25);
    for request in 0..4 {
        queue.enqueue(TenantId(0), cost(10), request, Nanos::ZERO).unwrap();
        queue.enqueue(TenantId(1), cost(10), request, Nanos::ZERO).unwrap();
    }
    assert!(!queue.may_bypass(TenantId(0)), "requests wait");
    let order: Vec<u32> = std::iter::from_fn(|| serve(&mut queue, 0)).collect();
    // The other's tags are 10, 20, 30, 40, and its own 25, 35, 45, 55.
    assert_eq!(order, [1, 1, 0, 1, 0, 1, 0, 0]);
    queue.complete(other, None);
    // A tenant whose requests wait by now pays with its first one.
    queue.enqueue(TenantId(0), cost(10), 0, Nanos::ZERO).unwrap();
    assert_eq!(queue.charge_bypassed(TenantId(0), cost(15), Nanos::ZERO), 15);
    queue.enqueue(TenantId(0), cost(10), 1, Nanos::ZERO).unwrap();
    for request in 0..3 {
        queue.enqueue(TenantId(1), cost(10), request, Nanos::ZERO).unwrap();
    }
    let order: Vec<u32> = std::iter::from_fn(|| serve(&mut queue, 0)).collect();
    assert_eq!(order, [0, 1, 1, 1, 0], "tags 0 and 25, beside 0, 10 and 20");
    assert_eq!(queue.charge_bypassed(TenantId(0), cost(0), Nanos::ZERO), 1, "nothing is for nothing");
}

#[test]
fn a_tenant_with_rate_limits_does_not_pass_by_the_queue() {
    let mut queue = queue(2);
    let limits = [
        TenantQos { operations_per_s: Some(100), ..TenantQos::default() },
        TenantQos { bytes_per_s: Some(1 << 20), ..TenantQos::default() },
    ];
    for (tenant, qos) in (0..).zip(limits) {
        queue.add_tenant(TenantId(tenant), &qos, Nanos::ZERO);
        assert!(!queue.may_bypass(TenantId(tenant)));
    }
}
