//! Tables of metrics by counters, with the cases of a zero divisor.

use super::*;
use octokv_base::Prng;

const INTERVAL: Nanos = Nanos::from_secs(1);

fn busy(target_ms: u64, kv_ms: u64, device_ms: u64) -> StageTimes {
    let [target, kv, device] = [target_ms, kv_ms, device_ms].map(Nanos::from_millis);
    StageTimes { target, kv, device }
}

fn core(busy: StageTimes, own_here: u64, moved_to: &[u64], ran_for: &[u64]) -> CoreCounters {
    CoreCounters {
        busy,
        queue_depth: 0.0,
        executed_locally: own_here,
        offloaded_to: moved_to.to_vec(),
        executed_for: ran_for.to_vec(),
    }
}

fn counters_of(cores: Vec<CoreCounters>) -> IntervalCounters {
    IntervalCounters { interval: INTERVAL, cores, tenants: Vec::new() }
}

/// Requests, sums of latency and of waits, round trip (in µs), waiting requests.
fn tenant(requests: u64, latency: u64, waited: u64, round_trip: u64, waiting: u64) -> TenantCounters {
    let [latency, waited, round_trip] = [latency, waited, round_trip].map(Nanos::from_micros);
    let requests_by_core = vec![requests];
    TenantCounters { tenant: TenantId(0), requests_by_core, bytes: 0, latency, waited, round_trip, waiting }
}

fn is_near(a: f64, b: f64) -> bool {
    a == b || (a - b).abs() < 1e-9
}

#[test]
fn a_core_is_as_busy_as_its_stages_were() {
    let metrics = compute_metrics(&counters_of(vec![
        core(busy(400, 75, 25), 100, &[], &[]),
        core(busy(0, 0, 0), 0, &[], &[]),
        core(busy(900, 100, 500), 7, &[], &[]),
    ]));
    let utilisations: Vec<f64> = metrics.cores.iter().map(|core| core.utilisation).collect();
    assert_eq!(utilisations, [0.5, 0.0, 1.0], "at most 1");
    assert_eq!(metrics.cores[0].shares, StageShares { target: 0.8, kv: 0.15, device: 0.05 });
    assert_eq!(metrics.cores[1].shares.target, 1300.0 / 2000.0, "nothing ran here: shares of all cores");
    assert_eq!(metrics.least_busy_core(), CoreId(1));
    let nothing = compute_metrics(&counters_of(vec![core(busy(0, 0, 0), 0, &[], &[])]));
    assert_eq!(nothing.cores[0].shares, StageShares { target: 1.0, kv: 0.0, device: 0.0 });
}

#[test]
fn loads_are_in_balance_or_not() {
    // LB, difference, maximum, of cores that are busy for so many milliseconds of 1000.
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
        let metrics = compute_metrics(&counters_of(cores));
        let got = (metrics.natural_balance, metrics.natural_difference, metrics.natural_load_max);
        assert!(
            is_near(got.0, *balance) && is_near(got.1, *difference) && is_near(got.2, *busiest),
            "{metrics:?}, not {balance} {difference}"
        );
        assert_eq!(metrics.natural_balance, metrics.utilisation_balance, "nothing migrated");
    }
}

#[test]
fn slowdown_is_the_wait_behind_other_tenants() {
    // Slowdown: requests, latency, waited, round trip, waiting.
    let table = [
        (Some(2.0), tenant(10, 1000, 500, 0, 0)),
        (Some(1.25), tenant(10, 900, 200, 10, 0)), // RT 100 µs, 20 of them behind others.
        (Some(1.0), tenant(10, 1000, 0, 10, 3)),
        (Some(1.0), tenant(10, 0, 0, 0, 0)),
        (Some(1.0), tenant(10, 0, 100, 0, 0)), // A wait that was part of no latency.
        (Some(100_000.0), tenant(10, 1000, 1000, 0, 0)), // 100 µs, of which it needed a nanosecond.
        (Some(11.0), tenant(10, 1000, 9000, 10, 0)),
        (None, tenant(0, 0, 0, 10, 0)), // It rests, or has just come, or has gone.
        (Some(f64::INFINITY), tenant(0, 0, 0, 10, 1)),
    ];
    for (want, tenant) in table {
        let counters =
            IntervalCounters { tenants: vec![tenant], ..counters_of(vec![core(busy(0, 0, 0), 0, &[], &[])]) };
        let got = compute_metrics(&counters).tenants[0].slowdown;
        assert!(got == want || is_near(got.unwrap(), want.unwrap()), "{got:?}, not {want:?}: {counters:?}");
    }
}

#[test]
fn fairness_counts_only_tenants_with_a_slowdown() {
    let slow = |slowdown: u64| tenant(10, 100 * slowdown, 100 * (slowdown - 1), 0, 0);
    let (resting, starved) = (tenant(0, 0, 0, 0, 0), tenant(0, 0, 0, 0, 9));
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
    for (want, tenants) in table {
        let counters = IntervalCounters { tenants, ..counters_of(vec![core(busy(0, 0, 0), 0, &[], &[])]) };
        assert_eq!(compute_metrics(&counters).fairness, want, "{:?}", counters.tenants);
    }
}

#[test]
fn a_tenant_has_rates_and_a_mean_response_time() {
    let mut tenant = tenant(0, 3000, 0, 50, 0);
    tenant.requests_by_core = vec![10, 20, 99];
    tenant.bytes = 4000;
    let cores = vec![CoreCounters::default(); 2];
    let counters = IntervalCounters { interval: Nanos::from_millis(500), cores, tenants: vec![tenant] };
    let metrics = &compute_metrics(&counters).tenants[0];
    assert_eq!(metrics.requests_by_core, [10, 20], "there is no third core");
    assert_eq!((metrics.requests, metrics.intensity, metrics.bytes_per_s), (30, 60.0, 8000.0));
    assert_eq!(metrics.response_time, Some(Nanos::from_micros(150)));
}

#[test]
fn natural_loads_are_those_without_migration() {
    // Natural loads as (fixed, movable), of the measured cores.
    type NaturalLoadRow = (Vec<(f64, f64)>, Vec<CoreCounters>);
    let table: [NaturalLoadRow; 7] = [
        // Nothing migrated.
        (
            vec![(0.4, 0.1), (0.1, 0.0)],
            vec![core(busy(400, 60, 40), 10, &[], &[]), core(busy(100, 0, 0), 0, &[], &[])],
        ),
        // All of core 0's requests, 10 ms each there: core 0 would have had them.
        (
            vec![(0.4, 0.1), (0.1, 0.0)],
            vec![core(busy(400, 0, 0), 0, &[0, 10], &[]), core(busy(100, 60, 40), 0, &[], &[10])],
        ),
        // Half of them, beside the other core's own requests.
        (
            vec![(0.4, 0.1), (0.1, 0.05)],
            vec![core(busy(400, 50, 0), 5, &[0, 5], &[]), core(busy(100, 100, 0), 5, &[], &[5, 0])],
        ),
        // Requests in flight at the end of the interval have not executed yet.
        (
            vec![(0.4, 0.05), (0.1, 0.0)],
            vec![core(busy(400, 0, 0), 0, &[0, 9], &[]), core(busy(100, 50, 0), 0, &[], &[5])],
        ),
        // In both directions.
        (
            vec![(0.1, 0.02), (0.1, 0.01)],
            vec![core(busy(100, 10, 0), 0, &[0, 1], &[0, 1]), core(busy(100, 20, 0), 0, &[1, 0], &[1, 0])],
        ),
        // Engine time without requests is that core's own; requests sent to the same core did not migrate.
        (
            vec![(0.3, 0.0), (0.1, 0.1)],
            vec![core(busy(100, 200, 0), 0, &[7], &[7]), core(busy(100, 100, 0), 3, &[0, 2], &[0, 2, 4])],
        ),
        (vec![], vec![]),
    ];
    for (want, cores) in table {
        let got = natural_loads(&counters_of(cores.clone()));
        assert_eq!(got.len(), want.len());
        for (got, (fixed, movable)) in got.iter().zip(want) {
            assert!(is_near(got.fixed, fixed) && is_near(got.movable, movable), "{got:?}: {cores:?}");
        }
    }
}

/// Random cores, each of which executed all requests sent to it.
fn random_counters(random: &mut Prng) -> IntervalCounters {
    let count = random.below(6) as usize + 1;
    let mut cores = vec![CoreCounters::default(); count];
    for core in &mut cores {
        core.busy = busy(random.below(900), random.below(300), random.below(300));
        core.executed_locally = random.below(3) * random.below(1000);
        core.offloaded_to = vec![0; count];
        core.executed_for = vec![0; count];
    }
    for from in 0..count {
        for to in (0..count).filter(|to| *to != from) {
            let offloaded = random.below(2) * random.below(1000);
            cores[from].offloaded_to[to] = offloaded;
            cores[to].executed_for[from] = offloaded;
        }
    }
    counters_of(cores)
}

#[test]
fn natural_loads_have_the_measured_sum() {
    let random = &mut Prng::new(1);
    for _ in 0..2000 {
        let counters = random_counters(random);
        let measured: f64 = counters.cores.iter().map(|core| core.busy.total_ns() / 1e9).sum();
        let natural: f64 = natural_loads(&counters).iter().map(|load| load.total()).sum();
        assert!((measured - natural).abs() < 1e-6, "{measured} {natural} {counters:?}");
    }
}

#[test]
fn saturated_counters_give_finite_metrics() {
    let most = StageTimes { target: Nanos::NEVER, kv: Nanos::NEVER, device: Nanos::NEVER };
    let all = core(most, u64::MAX, &[u64::MAX; 3], &[u64::MAX; 3]);
    let mut tenant = tenant(0, 0, 0, 0, u64::MAX);
    tenant.requests_by_core = vec![u64::MAX; 2];
    (tenant.latency, tenant.round_trip, tenant.bytes) = (Nanos::NEVER, Nanos::NEVER, u64::MAX);
    for interval in [Nanos::ZERO, INTERVAL, Nanos::NEVER] {
        let counters =
            IntervalCounters { interval, cores: vec![all.clone(); 2], tenants: vec![tenant.clone(); 2] };
        let metrics = compute_metrics(&counters);
        assert_eq!((metrics.natural_balance, metrics.fairness), (1.0, 1.0));
        assert!(metrics.cores.iter().all(|core| core.natural.total().is_finite()));
    }
}
