//! Tables of who is next, and properties: against an exact fluid, between pairs, under limits, with many in flight.

use super::*;
use octokv_base::Random;

const FLOWS: u32 = 16;

fn queue(in_flight_max: u32) -> Fair<u64> {
    Fair::new(FairBounds { flows_max: FLOWS, requests_max: 4096, in_flight_max })
}

fn of_weight(weight: u32) -> FlowSettings {
    FlowSettings { weight, ..FlowSettings::default() }
}

/// A queue in which flows 0, 1, … have these weights.
fn weighted(in_flight_max: u32, weights: &[u32]) -> Fair<u64> {
    let mut queue = queue(in_flight_max);
    for (flow, &weight) in (0..).zip(weights) {
        queue.add(FlowId(flow), &of_weight(weight), Nanos::ZERO);
    }
    queue
}

fn cost(ns: u64) -> Cost {
    Cost { ns, bytes: 0 }
}

/// The flow of the next request, which is done at once, as expected.
fn serve(queue: &mut Fair<u64>, now: u64) -> Option<u32> {
    let (charge, _) = queue.next(Nanos(now))?;
    let flow = charge.flow().0;
    queue.done(charge, None);
    Some(flow)
}

/// In which order waiting requests begin: of each flow so many that cost so much.
fn order(weights: &[u32], requests: &[(u64, u64)]) -> Vec<u32> {
    let mut queue = weighted(1, weights);
    for (flow, &(count, ns)) in (0..).zip(requests) {
        (0..count).for_each(|request| queue.offer(FlowId(flow), cost(ns), request, Nanos::ZERO).unwrap());
    }
    std::iter::from_fn(|| serve(&mut queue, 0)).collect()
}

#[test]
fn flows_are_served_by_weight_and_cost() {
    type Row = (&'static [u32], &'static [u32], &'static [(u64, u64)]);
    // In which order, of weights, counts and costs.
    let table: &[Row] = &[
        (&[], &[1], &[(0, 0)]),
        (&[0, 0, 0], &[1], &[(3, 10)]),
        (&[0, 1, 0, 1, 0, 1], &[1, 1], &[(3, 10), (3, 10)]),
        (&[0, 1, 1, 0, 1, 1], &[1, 2], &[(2, 10), (4, 10)]), // 1's first is at 0, its second at 5.
        (&[0, 1, 0, 0, 1, 0], &[1, 1], &[(4, 10), (2, 30)]), // A tie at 30: 1's is the older one.
        (&[0, 1, 2, 2, 1, 2, 2, 0, 1, 2], &[1, 2, 4], &[(2, 8), (3, 8), (5, 8)]),
        (&[0, 1, 0, 1], &[1, 1], &[(2, 0), (2, 0)]), // Nothing is for nothing.
    ];
    for (want, weights, requests) in table {
        assert_eq!(order(weights, requests), *want, "{weights:?} {requests:?}");
    }
}

#[test]
fn no_more_are_in_flight_than_may_be() {
    let mut queue = weighted(2, &[1]);
    (0..4).for_each(|request| queue.offer(FlowId(0), cost(1), request, Nanos::ZERO).unwrap());
    let (first, _) = queue.next(Nanos::ZERO).unwrap();
    let (second, _) = queue.next(Nanos::ZERO).unwrap();
    assert!(queue.next(Nanos::ZERO).is_none() && queue.pass(FlowId(0), cost(1), Nanos::ZERO).is_none());
    assert_eq!((queue.in_flight(), queue.waiting(), queue.waiting_of(FlowId(0))), (2, 2, 2));
    queue.done(first, None);
    let (third, request) = queue.next(Nanos::ZERO).unwrap();
    assert_eq!(request, 2, "first come, first begun");
    assert!(queue.next(Nanos::ZERO).is_none());
    queue.set_in_flight_max(3);
    let (fourth, _) = queue.next(Nanos::ZERO).unwrap();
    [second, third, fourth].into_iter().for_each(|charge| queue.done(charge, None));
    assert_eq!((queue.in_flight(), queue.waiting()), (0, 0));
}

#[test]
fn a_lower_bound_holds_for_what_has_not_begun() {
    let (mut queue, now) = (weighted(8, &[1]), Nanos::ZERO);
    (0..20).for_each(|request| queue.offer(FlowId(0), cost(1), request, now).unwrap());
    let mut charges: Vec<Charge> = std::iter::from_fn(|| queue.next(now)).map(|(charge, _)| charge).collect();
    assert_eq!(charges.len(), 8);
    queue.set_in_flight_max(3);
    while queue.in_flight() >= 3 {
        assert!(queue.next(now).is_none(), "{} run already", queue.in_flight());
        queue.done(charges.pop().unwrap(), None);
    }
    assert!(queue.next(now).is_some() && queue.next(now).is_none());
    let mut passing = weighted(4, &[1]);
    let charges: Vec<Charge> = (0..4).map(|_| passing.pass(FlowId(0), cost(1), now).unwrap()).collect();
    passing.set_in_flight_max(2);
    assert!(passing.pass(FlowId(0), cost(1), now).is_none());
    charges.into_iter().for_each(|charge| passing.done(charge, None));
}

#[test]
fn a_flow_that_is_alone_passes() {
    let mut queue = weighted(4, &[1, 1]);
    let now = Nanos::ZERO;
    let charges: Vec<Charge> = (0..4).map(|_| queue.pass(FlowId(0), cost(10), now).unwrap()).collect();
    assert!(queue.pass(FlowId(0), cost(10), now).is_none(), "there is no room");
    queue.offer(FlowId(0), cost(10), 0, now).unwrap();
    charges.into_iter().for_each(|charge| queue.done(charge, None));
    assert!(queue.pass(FlowId(1), cost(10), now).is_none(), "somebody waits");
    let (charge, _) = queue.next(now).unwrap();
    let passed = queue.pass(FlowId(1), cost(10), now).unwrap();
    queue.done(charge, None);
    queue.done(passed, None);
}

#[test]
fn who_passed_has_had_that_when_others_come() {
    let mut queue = weighted(1, &[1, 1]);
    // And again, when a while has passed.
    for _ in 0..2 {
        let charge = queue.pass(FlowId(0), cost(100), Nanos::ZERO).unwrap();
        for request in 0..4 {
            queue.offer(FlowId(0), cost(10), request, Nanos::ZERO).unwrap();
            queue.offer(FlowId(1), cost(25), request, Nanos::ZERO).unwrap();
        }
        queue.done(charge, None);
        let course: Vec<u32> = std::iter::from_fn(|| serve(&mut queue, 0)).collect();
        assert_eq!(course, [1, 1, 1, 1, 0, 0, 0, 0]);
    }
}

#[test]
fn what_a_request_really_cost_counts() {
    // Flow 0's requests take so much where 10 was expected; how many of 60 are its own beside flow 1's.
    for (really, want) in [(10, 30), (30, 15), (50, 10), (5, 40), (0, 54)] {
        let mut queue = weighted(1, &[1, 1]);
        let mut own = 0;
        for flow in 0..2 {
            (0..100).for_each(|request| queue.offer(FlowId(flow), cost(10), request, Nanos::ZERO).unwrap());
        }
        for _ in 0..60 {
            let (charge, _) = queue.next(Nanos::ZERO).unwrap();
            let is_own = charge.flow() == FlowId(0);
            own += i32::from(is_own);
            queue.done(charge, is_own.then_some(really));
        }
        assert!((own - want).abs() <= 2, "{really} ns: {own}, not {want}");
    }
    // And where it was alone, with nothing waiting when it ended.
    let mut queue = weighted(2, &[1, 1]);
    let other = queue.pass(FlowId(1), cost(10), Nanos::ZERO).unwrap();
    let charge = queue.pass(FlowId(0), cost(10), Nanos::ZERO).unwrap();
    queue.done(charge, Some(1000));
    queue.offer(FlowId(0), cost(10), 0, Nanos::ZERO).unwrap();
    (0..3).for_each(|request| queue.offer(FlowId(1), cost(10), request, Nanos::ZERO).unwrap());
    assert_eq!((0..3).map(|_| serve(&mut queue, 0)).collect::<Vec<_>>(), [Some(1); 3]);
    queue.done(other, None);
}

#[test]
fn a_flow_with_nothing_waiting_is_never_refused() {
    let mut queue: Fair<u64> = Fair::new(FairBounds { flows_max: 3, requests_max: 12, in_flight_max: 1 });
    (0..3).for_each(|flow| queue.add(FlowId(flow), &of_weight(1), Nanos::ZERO));
    let fill = |queue: &mut Fair<u64>, flow| {
        (0..).find(|&request| queue.offer(FlowId(flow), cost(1), request, Nanos::ZERO).is_err()).unwrap()
    };
    assert_eq!(fill(&mut queue, 0), 5, "a half of what is not kept for others");
    assert_eq!(fill(&mut queue, 1), 3, "a half of the rest");
    assert_eq!(fill(&mut queue, 2), 2);
    assert_eq!(queue.offer(FlowId(0), cost(1), 77, Nanos::ZERO), Err(77));
    assert_eq!(queue.waiting(), 10);
    let mut served = [0; 3];
    while let Some(flow) = serve(&mut queue, 0) {
        served[flow as usize] += 1;
    }
    assert_eq!((served, queue.waiting()), ([5, 3, 2], 0));
    // With as many places as flows each has one.
    let mut queue: Fair<u64> = Fair::new(FairBounds { flows_max: 3, requests_max: 3, in_flight_max: 1 });
    (0..3).for_each(|flow| queue.add(FlowId(flow), &of_weight(1), Nanos::ZERO));
    assert_eq!([0, 1, 2].map(|flow| fill(&mut queue, flow)), [1; 3]);
}

#[test]
fn a_flow_that_goes_leaves_nothing_but_what_it_owes() {
    let mut queue = weighted(2, &[1, 1]);
    (0..3).for_each(|request| queue.offer(FlowId(0), cost(100), request, Nanos::ZERO).unwrap());
    let (running, _) = queue.next(Nanos::ZERO).unwrap();
    let mut gone = Vec::new();
    queue.remove(FlowId(0), |request| gone.push(request));
    assert_eq!((gone, queue.waiting(), queue.in_flight()), (vec![1, 2], 0, 1));
    queue.add(FlowId(0), &of_weight(2), Nanos::ZERO);
    (8..10).for_each(|request| queue.offer(FlowId(0), cost(100), request, Nanos::ZERO).unwrap());
    (0..6).for_each(|request| queue.offer(FlowId(1), cost(30), request, Nanos::ZERO).unwrap());
    // It owed 100 ns, which at its new weight is a tag of 50: two requests of the other go first.
    queue.done(running, Some(1_000_000));
    let course: Vec<u32> = std::iter::from_fn(|| serve(&mut queue, 0)).collect();
    assert_eq!(course, [1, 1, 0, 1, 1, 0, 1, 1], "what ran of the old one is not the new one's");
    // After a rest nothing is owed.
    queue.remove(FlowId(0), |_| ());
    queue.add(FlowId(0), &of_weight(1), Nanos::ZERO);
    queue.offer(FlowId(0), cost(1), 0, Nanos::ZERO).unwrap();
    queue.offer(FlowId(1), cost(1), 0, Nanos::ZERO).unwrap();
    assert_eq!(serve(&mut queue, 0), Some(0));
}

#[test]
fn a_flow_that_comes_and_goes_all_the_time_starves_nobody() {
    let mut queue = weighted(1, &[1, 1]);
    (0..9).for_each(|request| queue.offer(FlowId(0), cost(10), request, Nanos::ZERO).unwrap());
    let mut served = [0; 2];
    for request in 0..16 {
        queue.offer(FlowId(1), cost(10), request, Nanos::ZERO).unwrap();
        served[serve(&mut queue, 0).unwrap() as usize] += 1;
        queue.remove(FlowId(1), |_| ());
        queue.add(FlowId(1), &of_weight(1), Nanos::ZERO);
    }
    assert!(served[0] >= 7, "{served:?}");
}

#[test]
fn a_weight_counts_from_the_next_request_on() {
    let mut queue = weighted(1, &[1, 1]);
    for flow in 0..2 {
        (0..200).for_each(|request| queue.offer(FlowId(flow), cost(10), request, Nanos::ZERO).unwrap());
    }
    let of_100 = |queue: &mut Fair<u64>| (0..100).filter(|_| serve(queue, 0) == Some(0)).count();
    assert_eq!(of_100(&mut queue), 50);
    queue.change(FlowId(0), &of_weight(3), Nanos::ZERO);
    assert!((74..=76).contains(&of_100(&mut queue)));
    queue.set_weight(FlowId(0), WEIGHT_UNIT / 4);
    assert!((19..=21).contains(&of_100(&mut queue)));
}

#[test]
fn sizes_do_not_matter_to_weighted_shares() {
    let (weights, sizes) = ([1, 2, 4], [64_000, 900, 7_000]);
    let mut queue = weighted(8, &weights);
    let (mut served, mut running) = ([0_u64; 3], std::collections::VecDeque::new());
    for request in 0..100_000 {
        for flow in 0..3 {
            while queue.waiting_of(FlowId(flow)) < 20 {
                let ns = sizes[flow as usize] / 2 + request % sizes[flow as usize];
                queue.offer(FlowId(flow), cost(ns), ns, Nanos::ZERO).unwrap();
            }
        }
        while let Some((charge, ns)) = queue.next(Nanos::ZERO) {
            served[charge.flow().0 as usize] += ns;
            running.push_back(charge);
        }
        queue.done(running.pop_front().unwrap(), None);
    }
    let parts: Vec<f64> =
        served.iter().zip(weights).map(|(ns, weight)| *ns as f64 / f64::from(weight)).collect();
    let (sum, squares) = (parts.iter().sum::<f64>(), parts.iter().map(|part| part * part).sum::<f64>());
    let jain = sum * sum / (3.0 * squares);
    assert!(jain >= 0.999, "{jain} {served:?}");
}

#[test]
fn a_sparse_flow_waits_for_what_is_in_flight_and_one_more() {
    for in_flight_max in [1, 4, 16] {
        let mut queue = weighted(in_flight_max, &[1, 1]);
        let mut running = std::collections::VecDeque::new();
        let mut waits = Vec::new();
        let mut since = None;
        for request in 0..2000 {
            while queue.waiting_of(FlowId(1)) < 64 {
                queue.offer(FlowId(1), cost(10), request, Nanos::ZERO).unwrap();
            }
            // One at a time: the next when the last has been answered, and a while later.
            let is_out = !running.iter().any(|charge: &Charge| charge.flow() == FlowId(0));
            if is_out && queue.waiting_of(FlowId(0)) == 0 && request % 3 == 0 {
                queue.offer(FlowId(0), cost(10), request, Nanos::ZERO).unwrap();
                since = Some((0, running.len()));
            }
            while let Some((charge, _)) = queue.next(Nanos::ZERO) {
                if charge.flow() == FlowId(0) {
                    waits.extend(since.take());
                } else if let Some((begun, _)) = &mut since {
                    *begun += 1;
                }
                running.push_back(charge);
            }
            queue.done(running.pop_front().unwrap(), None);
        }
        assert!(waits.len() > 100);
        for (begun, ahead) in waits {
            assert!(begun <= 1 && ahead <= in_flight_max as usize, "{begun} began before it, {ahead} ran");
        }
    }
}

/// A limit's flow on its own, with requests always waiting: when each began.
fn begins(settings: &FlowSettings, bytes: &[u64], until: u64, step: u64) -> Vec<(u64, u64)> {
    let mut queue = queue(4);
    queue.add(FlowId(0), settings, Nanos(1000));
    let (mut begins, mut now, mut at) = (Vec::new(), 1000, 0);
    while now < until {
        loop {
            let bytes = bytes[at % bytes.len()];
            if queue.offer(FlowId(0), Cost { ns: 1, bytes }, bytes, Nanos(now)).is_ok() {
                at += 1;
            }
            let Some((charge, bytes)) = queue.next(Nanos(now)) else { break };
            begins.push((now, bytes));
            queue.done(charge, None);
        }
        let deadline = queue.next_deadline().0;
        assert!(deadline > now && deadline < u64::MAX, "it waits for its limit, and says until when");
        now = deadline.max(now + step);
    }
    begins
}

#[test]
fn limits_are_held_over_every_span_and_used_up() {
    let ms = Nanos::from_millis(1).0;
    let burst = Nanos::from_millis(5);
    let limited = |operations_per_s, bytes_per_s| FlowSettings {
        operations_per_s,
        bytes_per_s,
        burst,
        ..FlowSettings::default()
    };
    for (settings, bytes) in [
        (limited(Some(10_000), None), &[0][..]),
        (limited(Some(7), None), &[0]),
        (limited(None, Some(1 << 20)), &[4096, 100, 0, 1]),
        (limited(None, Some(3_000_000)), &[100_000]),
        (limited(Some(1000), Some(1 << 20)), &[100, 5000]),
    ] {
        // Looked at again as soon as may be, or late, so that something is saved up.
        for step in [0, 20 * ms] {
            let begins = begins(&settings, bytes, 2000 * ms, step);
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
                    assert!(within(operations, settings.operations_per_s, 1), "{settings:?} {from} to {to}");
                    assert!(within(bytes, settings.bytes_per_s, largest), "{settings:?} {from} to {to}");
                }
            }
            if step == 0 {
                // Of what it may have it has all but one request.
                let (operations, bytes) =
                    (begins.len() as u64, begins.iter().map(|begun| begun.1).sum::<u64>());
                let least = |rate: u64| rate * 1999 / 1000;
                let all =
                    |rate: Option<u64>, got: u64, one| rate.is_some_and(|rate| got + one >= least(rate));
                let used = all(settings.operations_per_s, operations, 1)
                    || all(settings.bytes_per_s, bytes, largest);
                assert!(used, "{settings:?}: {operations} operations, {bytes} bytes");
            }
        }
    }
}

#[test]
fn a_limit_loses_nothing_by_rounding() {
    for (rate, amount, times, seconds) in [(3, 1, 3000, 1000), (1 << 40, 1 << 20, 3 << 20, 3), (7, 0, 9, 0)] {
        let mut limit = Limit::new(rate, Nanos::from_millis(1), Nanos::ZERO);
        (0..times).for_each(|_| limit.took(amount, Nanos::ZERO));
        assert_eq!(limit.opens_at(), Nanos::from_secs(seconds), "{amount} at {rate}/s");
    }
}

#[test]
fn who_is_at_a_limit_holds_nobody_up_and_saves_nothing_up() {
    let mut queue = weighted(1, &[1, 1]);
    let limited = FlowSettings { operations_per_s: Some(100), burst: Nanos::from_millis(1), ..of_weight(1) };
    let ms = Nanos::from_millis(1).0;
    queue.change(FlowId(0), &limited, Nanos::ZERO);
    for flow in 0..2 {
        (0..100).for_each(|request| queue.offer(FlowId(flow), cost(10), request, Nanos::ZERO).unwrap());
    }
    let course: Vec<Option<u32>> = (0..8).map(|_| serve(&mut queue, 0)).collect();
    assert_eq!(
        course[..4],
        [Some(0), Some(1), Some(1), Some(1)],
        "one, then the other's as long as it lasts"
    );
    assert_eq!(queue.next_deadline(), Nanos(10 * ms), "100 a second, and nothing saved up");
    let course: Vec<Option<u32>> = (0..4).map(|_| serve(&mut queue, 10 * ms)).collect();
    assert_eq!(course.iter().filter(|flow| **flow == Some(0)).count(), 1, "{course:?}");
    assert!(queue.pass(FlowId(1), cost(1), Nanos(10 * ms)).is_none(), "somebody waits");
    let course: Vec<Option<u32>> = (0..8).map(|_| serve(&mut queue, 100 * ms)).collect();
    let own = course.iter().filter(|flow| **flow == Some(0)).count();
    assert_eq!(own, 1, "what was not used within the burst is gone: {course:?}");
    // With a longer burst, looked at late, it may send several at once: in turn with the other.
    let limited = FlowSettings { operations_per_s: Some(100), burst: Nanos::from_secs(1), ..of_weight(1) };
    queue.change(FlowId(0), &limited, Nanos(100 * ms));
    (0..40).for_each(|_| _ = serve(&mut queue, 100 * ms));
    (0..100).for_each(|request| queue.offer(FlowId(1), cost(10), request, Nanos(100 * ms)).unwrap());
    let course: Vec<Option<u32>> = (0..8).map(|_| serve(&mut queue, 600 * ms)).collect();
    assert_eq!(course.iter().filter(|flow| **flow == Some(0)).count(), 4, "it does not catch up: {course:?}");
    // Nor without the limit.
    queue.change(FlowId(0), &of_weight(1), Nanos(600 * ms));
    assert_eq!(queue.next_deadline(), Nanos::NEVER);
    let own = (0..20).filter(|_| serve(&mut queue, 600 * ms) == Some(0)).count();
    assert!((9..=11).contains(&own), "{own}");
}

#[test]
fn a_limit_is_for_those_who_pass_too() {
    let mut queue = queue(4);
    let limited = FlowSettings { operations_per_s: Some(1000), burst: Nanos::from_millis(1), ..of_weight(1) };
    queue.add(FlowId(0), &limited, Nanos::ZERO);
    let ms = Nanos::from_millis(1);
    let pass = |queue: &mut Fair<u64>, now| {
        let charge = queue.pass(FlowId(0), cost(1), now);
        charge.map(|charge| queue.done(charge, None)).is_some()
    };
    assert!(pass(&mut queue, Nanos::ZERO) && !pass(&mut queue, Nanos::ZERO), "nothing is saved up at first");
    assert!(pass(&mut queue, Nanos::from_millis(10)) && pass(&mut queue, Nanos::from_millis(10)));
    assert!(!pass(&mut queue, Nanos::from_millis(10)));
    queue.offer(FlowId(0), cost(1), 0, Nanos::from_millis(10)).unwrap();
    assert!(queue.next(Nanos::from_millis(10)).is_none());
    // One that comes again does not have a new burst.
    queue.remove(FlowId(0), |_| ());
    queue.add(FlowId(0), &limited, Nanos::from_millis(10) + ms);
    assert!(pass(&mut queue, Nanos::from_millis(11)) && !pass(&mut queue, Nanos::from_millis(11)));
}

#[test]
fn no_number_is_too_great() {
    let mut queue = weighted(3, &[1, 1000]);
    let most = Cost { ns: u64::MAX, bytes: u64::MAX };
    let limited = FlowSettings { operations_per_s: Some(1), bytes_per_s: Some(1024), ..of_weight(1000) };
    queue.add(FlowId(2), &limited, Nanos::NEVER);
    queue.set_weight(FlowId(0), 0);
    queue.set_weight(FlowId(1), u32::MAX);
    for now in [Nanos::ZERO, Nanos::NEVER] {
        for flow in 0..3 {
            (0..20).for_each(|request| queue.offer(FlowId(flow), most, request, now).unwrap());
        }
        while let Some((charge, _)) = queue.next(now) {
            queue.done(charge, Some(u64::MAX));
        }
    }
    assert_eq!(queue.waiting_of(FlowId(0)), 0);
}

#[path = "gps_tests.rs"]
mod gps_tests;
#[path = "random_tests.rs"]
mod random_tests;
