//! Tables of what is made of counters, the cases without anything to divide by among them.

use super::*;
use octokv_base::Random;

const WINDOW: Nanos = Nanos::from_secs(1);

fn busy(target_ms: u64, kv_ms: u64, device_ms: u64) -> Stages {
    let [target, kv, device] = [target_ms, kv_ms, device_ms].map(Nanos::from_millis);
    Stages { target, kv, device }
}

fn core(busy: Stages, own_here: u64, moved_to: &[u64], ran_for: &[u64]) -> CoreCounters {
    CoreCounters { busy, queue_depth: 0.0, own_here, moved_to: moved_to.to_vec(), ran_for: ran_for.to_vec() }
}

fn of_cores(cores: Vec<CoreCounters>) -> Counters {
    Counters { window: WINDOW, cores, flows: Vec::new() }
}

/// Requests, and sums of latency and of waits, round trip (in µs), requests that wait.
fn flow(requests: u64, latency: u64, waited: u64, round_trip: u64, waiting: u64) -> FlowCounters {
    let [latency, waited, round_trip] = [latency, waited, round_trip].map(Nanos::from_micros);
    let requests_by_core = vec![requests];
    FlowCounters { flow: FlowId(0), requests_by_core, bytes: 0, latency, waited, round_trip, waiting }
}

fn near(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() < 1e-9
}

#[test]
fn a_core_is_as_busy_as_its_stages_were() {
    let figures = measure(&of_cores(vec![
        core(busy(400, 75, 25), 100, &[], &[]),
        core(busy(0, 0, 0), 0, &[], &[]),
        core(busy(900, 100, 500), 7, &[], &[]),
    ]));
    let utilisations: Vec<f64> = figures.cores.iter().map(|core| core.utilisation).collect();
    assert_eq!(utilisations, [0.5, 0.0, 1.0], "and no more than always");
    assert_eq!(figures.cores[0].shares, Shares { target: 0.8, kv: 0.15, device: 0.05 });
    assert_eq!(figures.cores[1].shares.target, 1300.0 / 2000.0, "nothing ran here: the shares of all");
    assert_eq!(figures.least_busy(), CoreId(1));
    let nothing = measure(&of_cores(vec![core(busy(0, 0, 0), 0, &[], &[])]));
    assert_eq!(nothing.cores[0].shares, Shares { target: 1.0, kv: 0.0, device: 0.0 });
}

#[test]
fn loads_are_in_balance_or_not() {
    // LB, difference, the most: of cores that are busy for so many milliseconds of 1000.
    let table: &[(f64, f64, f64, &[u64])] = &[
        (1.0, 0.0, 0.0, &[]),
        (1.0, 0.0, 0.9, &[900]),
        (0.5, 0.4, 0.8, &[400, 800]),
        (0.0, 0.8, 0.8, &[800, 0, 400]),
        (1.0, 0.0, 0.0, &[0, 0]),
        (1.0, 0.0, 0.05, &[0, 50]),
        (0.0, 0.051, 0.051, &[0, 51]),
        (1.0, 0.0, 0.6, &[600, 600, 600]),
    ];
    for (balance, difference, busiest, cores) in table {
        let cores = cores.iter().map(|&ms| core(busy(ms, 0, 0), 0, &[], &[])).collect();
        let figures = measure(&of_cores(cores));
        let got = (figures.balance, figures.difference, figures.busiest);
        assert!(
            near(got.0, *balance) && near(got.1, *difference) && near(got.2, *busiest),
            "{figures:?}, not {balance} {difference}"
        );
        assert_eq!(figures.balance, figures.measured_balance, "nothing was moved");
    }
}

#[test]
fn a_flow_is_slowed_down_by_what_it_waited_for_others() {
    // Slowdown: requests, latency, waited, round trip, waiting.
    let table = [
        (Some(2.0), flow(10, 1000, 500, 0, 0)),
        (Some(1.25), flow(10, 900, 200, 10, 0)), // RT 100 µs, 20 of them behind others.
        (Some(1.0), flow(10, 1000, 0, 10, 3)),
        (Some(1.0), flow(10, 0, 0, 0, 0)),
        (Some(1.0), flow(10, 0, 100, 0, 0)), // A wait that was part of no latency.
        (Some(100_000.0), flow(10, 1000, 1000, 0, 0)), // 100 µs, of which it needed a nanosecond.
        (Some(11.0), flow(10, 1000, 9000, 10, 0)),
        (None, flow(0, 0, 0, 10, 0)), // It rests, or has just come, or has gone.
        (Some(f64::INFINITY), flow(0, 0, 0, 10, 1)),
    ];
    for (want, flow) in table {
        let counters = Counters { flows: vec![flow], ..of_cores(vec![core(busy(0, 0, 0), 0, &[], &[])]) };
        let got = measure(&counters).flows[0].slowdown;
        assert!(got == want || near(got.unwrap(), want.unwrap()), "{got:?}, not {want:?}: {counters:?}");
    }
}

#[test]
fn fairness_is_of_those_that_have_a_slowdown() {
    let slow = |slowdown: u64| flow(10, 100 * slowdown, 100 * (slowdown - 1), 0, 0);
    let (resting, starved) = (flow(0, 0, 0, 0, 0), flow(0, 0, 0, 0, 9));
    let table = [
        (1.0, vec![]),
        (1.0, vec![slow(5)]),
        (0.5, vec![slow(2), slow(4)]),
        (0.25, vec![slow(4), slow(1), slow(2)]),
        (1.0, vec![slow(3), slow(3)]),
        (1.0, vec![slow(3), resting.clone()]),
        (1.0, vec![resting.clone(), resting]),
        (0.0, vec![slow(1), starved.clone()]),
        (1.0, vec![starved.clone(), starved]),
    ];
    for (want, flows) in table {
        let counters = Counters { flows, ..of_cores(vec![core(busy(0, 0, 0), 0, &[], &[])]) };
        assert_eq!(measure(&counters).fairness, want, "{:?}", counters.flows);
    }
}

#[test]
fn a_flow_has_its_rates_and_its_mean_response() {
    let mut flow = flow(0, 3000, 0, 50, 0);
    flow.requests_by_core = vec![10, 20, 99];
    flow.bytes = 4000;
    let cores = vec![CoreCounters::default(); 2];
    let counters = Counters { window: Nanos::from_millis(500), cores, flows: vec![flow] };
    let figures = &measure(&counters).flows[0];
    assert_eq!(figures.requests_by_core, [10, 20], "there is no third core");
    assert_eq!((figures.requests, figures.intensity, figures.bytes_per_s), (30, 60.0, 8000.0));
    assert_eq!(figures.response, Some(Nanos::from_micros(150)));
}

#[test]
fn natural_loads_are_those_without_moves() {
    // Natural loads as (fixed, movable), of cores as they were measured.
    type Row = (Vec<(f64, f64)>, Vec<CoreCounters>);
    let table: [Row; 7] = [
        // Nothing was moved.
        (
            vec![(0.4, 0.1), (0.1, 0.0)],
            vec![core(busy(400, 60, 40), 10, &[], &[]), core(busy(100, 0, 0), 0, &[], &[])],
        ),
        // All of core 0's, 10 ms each there: as core 0 would have had them.
        (
            vec![(0.4, 0.1), (0.1, 0.0)],
            vec![core(busy(400, 0, 0), 0, &[0, 10], &[]), core(busy(100, 60, 40), 0, &[], &[10])],
        ),
        // A half, beside own ones of the other core.
        (
            vec![(0.4, 0.1), (0.1, 0.05)],
            vec![core(busy(400, 50, 0), 5, &[0, 5], &[]), core(busy(100, 100, 0), 5, &[], &[5, 0])],
        ),
        // Those under way at the window's end ran nowhere yet.
        (
            vec![(0.4, 0.05), (0.1, 0.0)],
            vec![core(busy(400, 0, 0), 0, &[0, 9], &[]), core(busy(100, 50, 0), 0, &[], &[5])],
        ),
        // In both directions.
        (
            vec![(0.1, 0.02), (0.1, 0.01)],
            vec![core(busy(100, 10, 0), 0, &[0, 1], &[0, 1]), core(busy(100, 20, 0), 0, &[1, 0], &[1, 0])],
        ),
        // Engine's time without requests is that core's own; a core that moved to itself did not move.
        (
            vec![(0.3, 0.0), (0.1, 0.1)],
            vec![core(busy(100, 200, 0), 0, &[7], &[7]), core(busy(100, 100, 0), 3, &[0, 2], &[0, 2, 4])],
        ),
        (vec![], vec![]),
    ];
    for (want, cores) in table {
        let got = natural_loads(&of_cores(cores.clone()));
        assert_eq!(got.len(), want.len());
        for (got, (fixed, movable)) in got.iter().zip(want) {
            assert!(near(got.fixed, fixed) && near(got.movable, movable), "{got:?}: {cores:?}");
        }
    }
}

/// Cores that did anything, each of which ran what was sent to it.
fn anything(random: &mut Random) -> Counters {
    let count = random.below(6) as usize + 1;
    let mut cores = vec![CoreCounters::default(); count];
    for core in &mut cores {
        core.busy = busy(random.below(900), random.below(300), random.below(300));
        core.own_here = random.below(3) * random.below(1000);
        core.moved_to = vec![0; count];
        core.ran_for = vec![0; count];
    }
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            let moved = random.below(2) * random.below(1000);
            cores[from].moved_to[to] = moved;
            cores[to].ran_for[from] = moved;
        }
    }
    of_cores(cores)
}

#[test]
fn natural_loads_have_the_measured_sum() {
    let random = &mut Random::new(1);
    for _ in 0..2000 {
        let counters = anything(random);
        let measured: f64 = counters.cores.iter().map(|core| core.busy.total_ns() / 1e9).sum();
        let natural: f64 = natural_loads(&counters).iter().map(|load| load.total()).sum();
        assert!((measured - natural).abs() < 1e-6, "{measured} {natural} {counters:?}");
    }
}

#[test]
fn no_counter_is_too_great() {
    let most = Stages { target: Nanos::NEVER, kv: Nanos::NEVER, device: Nanos::NEVER };
    let all = core(most, u64::MAX, &[u64::MAX; 3], &[u64::MAX; 3]);
    let mut flow = flow(0, 0, 0, 0, u64::MAX);
    flow.requests_by_core = vec![u64::MAX; 2];
    (flow.latency, flow.round_trip, flow.bytes) = (Nanos::NEVER, Nanos::NEVER, u64::MAX);
    for window in [Nanos::ZERO, WINDOW, Nanos::NEVER] {
        let counters = Counters { window, cores: vec![all.clone(); 2], flows: vec![flow.clone(); 2] };
        let figures = measure(&counters);
        assert_eq!((figures.balance, figures.fairness), (1.0, 1.0));
        assert!(figures.cores.iter().all(|core| core.natural.total().is_finite()));
    }
}
