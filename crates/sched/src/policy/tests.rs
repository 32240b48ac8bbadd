//! Tables of decisions, and sequences of intervals that apply them.

use super::*;
use crate::metrics::{CoreCounters, IntervalCounters, StageTimes, TenantCounters, compute_metrics};
use crate::{CoreId, Nanos, Router, RoutingDecision};

/// A core that executed all of its own requests, a millisecond each in the engine.
fn core(target_ms: u64, requests: u64) -> CoreCounters {
    let busy = StageTimes {
        target: Nanos::from_millis(target_ms),
        kv: Nanos::from_millis(requests),
        device: Nanos::ZERO,
    };
    CoreCounters { busy, executed_locally: requests, ..CoreCounters::default() }
}

/// A tenant with its requests by core, slowed down by so many percent.
fn tenant_counters(name: u32, requests_by_core: &[u64], slowed_percent: u64) -> TenantCounters {
    let requests: u64 = requests_by_core.iter().sum();
    TenantCounters {
        tenant: TenantId(name),
        requests_by_core: requests_by_core.to_vec(),
        bytes: 0,
        latency: Nanos(requests * (100 + slowed_percent)),
        waited: Nanos(requests * slowed_percent),
        round_trip: Nanos::ZERO,
        waiting: 0,
    }
}

fn metrics(cores: &[CoreCounters], tenants: &[TenantCounters]) -> IntervalMetrics {
    compute_metrics(&IntervalCounters {
        interval: Nanos::from_secs(1),
        cores: cores.to_vec(),
        tenants: tenants.to_vec(),
    })
}

fn config(policy: Policy) -> SchedConfig {
    SchedConfig { policy, ..SchedConfig::default() }
}

/// Two tenants on two cores: few requests of the first, and many of the second on a core that is nearly full.
fn imbalanced_cores() -> [CoreCounters; 2] {
    [core(500, 300), core(100, 0)]
}

fn balanced_cores() -> [CoreCounters; 2] {
    [core(500, 300), core(500, 300)]
}

fn two_tenants(slowed_percent: u64) -> [TenantCounters; 2] {
    [tenant_counters(7, &[60, 60], slowed_percent), tenant_counters(9, &[240, 240], 0)]
}

#[test]
fn each_policy_chooses_by_its_flags() {
    use PolicyAction::*;
    let (fair, unfair) = (two_tenants(0), two_tenants(50));
    let (in_turn, in_proportion) = (Balance(SpreadOrder::RoundRobin), Balance(SpreadOrder::Proportional));
    // The action with loads in balance and fair tenants; imbalanced; unfair; both.
    let table = [
        (Policy::None, [Nothing, Nothing, Nothing, Nothing]),
        (Policy::RoundRobin, [Nothing, in_turn, Nothing, in_turn]),
        (Policy::Proportional, [Nothing, in_proportion, Nothing, in_proportion]),
        (Policy::Inter, [Inter; 4]),
        (Policy::Intra, [Intra; 4]),
        (Policy::Hybrid, [Hybrid; 4]),
        (Policy::Auto, [Nothing, Inter, Intra, Hybrid]),
        (Policy::Fair, [Fair; 4]),
    ];
    let cases = [
        (balanced_cores(), &fair),
        (imbalanced_cores(), &fair),
        (balanced_cores(), &unfair),
        (imbalanced_cores(), &unfair),
    ];
    for (policy, want) in table {
        for (want, (cores, tenants)) in want.into_iter().zip(&cases) {
            let decision = choose(&metrics(cores, &tenants[..]), &config(policy));
            assert_eq!(decision.action, want, "{policy}");
            let moves = matches!(want, Balance(_) | Inter | Hybrid) && cores[0] != cores[1];
            assert_eq!(!decision.plan.is_empty(), moves, "{policy}: {decision:?}");
            assert_eq!(decision.imbalanced, cores[0] != cores[1], "{policy}");
            assert_eq!((decision.overloaded, decision.unfair), (true, *tenants == &unfair), "{policy}");
        }
    }
}

#[test]
fn tenants_migrate_or_are_requeued_by_density() {
    let rules = |policy, migrate_tenants| {
        let config = SchedConfig { policy, migrate_tenants, ..SchedConfig::default() };
        let decision = choose(&metrics(&imbalanced_cores(), &two_tenants(50)), &config);
        let rule = |name| decision.rule(TenantId(name));
        assert!(!rule(7).dense && rule(9).dense && !rule(1).dense);
        // The rules of the sparse tenant, the dense one and an unknown one; and the requests that leave the full core.
        let of = |name| (rule(name).migrates, rule(name).requeues);
        (of(7), of(9), of(1), decision.plan.cores[0].leaving())
    };
    let (stays, moves, back) = ((false, 0), (true, 0), (false, 8));
    let table = [
        (Policy::None, MigrateTenants::All, (stays, stays, stays, 0)),
        (Policy::Proportional, MigrateTenants::Sparse, (moves, moves, moves, 300)),
        (Policy::Inter, MigrateTenants::All, (moves, moves, moves, 300)),
        (Policy::Inter, MigrateTenants::Dense, (stays, moves, stays, 240)),
        (Policy::Inter, MigrateTenants::Sparse, (moves, stays, moves, 60)),
        (Policy::Intra, MigrateTenants::All, (stays, back, stays, 0)),
        (Policy::Hybrid, MigrateTenants::Sparse, (stays, (true, 8), stays, 240)),
        (Policy::Auto, MigrateTenants::All, (stays, (true, 8), stays, 240)),
        (Policy::Fair, MigrateTenants::All, (stays, stays, stays, 0)),
    ];
    for (policy, migrate_tenants, want) in table {
        assert_eq!(rules(policy, migrate_tenants), want, "{policy} {migrate_tenants}");
    }
}

#[test]
fn nothing_migrates_without_a_gain() {
    let cases: &[(&str, &[CoreCounters], &[TenantCounters])] = &[
        ("nothing at all", &[], &[]),
        ("one core", &[core(500, 400)], &[tenant_counters(1, &[10], 0), tenant_counters(2, &[10], 0)]),
        ("one tenant", &[core(500, 100), core(500, 100)], &[tenant_counters(1, &[100, 100], 0)]),
        ("an idle node", &[core(30, 1), core(0, 0)], &[tenant_counters(1, &[1, 0], 0)]),
        (
            "cores alike",
            &[core(300, 99), core(300, 99)],
            &[tenant_counters(1, &[9, 0], 0), tenant_counters(2, &[9, 0], 0)],
        ),
        (
            "idle tenants",
            &[core(300, 0), core(300, 0)],
            &[tenant_counters(1, &[], 0), tenant_counters(2, &[], 0)],
        ),
        ("nothing that could move", &[core(900, 0), core(100, 0)], &[]),
    ];
    for (name, cores, tenants) in cases {
        for policy in Policy::ALL {
            let decision = choose(&metrics(cores, tenants), &config(policy));
            assert!(decision.plan.is_empty(), "{name}, {policy}: {decision:?}");
            assert!(
                decision.tenants.iter().all(|rule| !rule.migrates && rule.requeues == 0),
                "{name}, {policy}"
            );
            assert_eq!(decision.plan.cores.len(), cores.len());
        }
    }
}

#[test]
fn tenants_come_and_go_between_intervals() {
    let auto =
        |tenants: &[TenantCounters]| choose(&metrics(&balanced_cores(), tenants), &config(Policy::Auto));
    let (sparse, dense) = (tenant_counters(1, &[50, 0], 100), tenant_counters(2, &[400, 400], 0));
    let both = auto(&[sparse.clone(), dense.clone()]);
    assert_eq!((both.action, both.rule(TenantId(2)).requeues), (PolicyAction::Intra, 15));
    let mut resting = sparse.clone();
    resting.requests_by_core.clear();
    for alone in [auto(std::slice::from_ref(&dense)), auto(&[resting.clone(), dense.clone()])] {
        assert_eq!(
            (alone.action, alone.rule(TenantId(2)).requeues),
            (PolicyAction::Nothing, 0),
            "no other tenant"
        );
    }
    resting.waiting = 3;
    let starving = auto(&[resting, dense.clone(), tenant_counters(3, &[90, 0], 0)]);
    assert_eq!(
        starving.action,
        PolicyAction::Intra,
        "a tenant without service in an interval is treated unfairly"
    );
    assert_eq!(starving.rule(TenantId(2)).requeues, 15);
    assert_eq!(auto(&[sparse, dense]), both, "the former action once it is served");
    assert_eq!(Decision::initial(3).rule(TenantId(2)).requeues, 0);
    assert_eq!(Decision::initial(3).core_migrations(CoreId(3)), None);
}

/// Runs intervals in which each core receives `arriving` requests and applies its part of the plan; the metrics of each
/// interval give the next decision.
fn run_intervals(policy: Policy, intervals: &[Vec<u64>]) -> Vec<Decision> {
    let cores = intervals[0].len();
    let mut routers: Vec<Router> = (0..cores).map(|_| Router::new(cores)).collect();
    let mut decisions = vec![Decision::initial(cores)];
    for arriving in intervals {
        let mut counters: Vec<CoreCounters> = vec![core(0, 0); cores];
        for (at, router) in routers.iter_mut().enumerate() {
            let plan = decisions.last().and_then(|decision| decision.core_migrations(CoreId::from_index(at)));
            router.install(plan.unwrap());
            counters[at].offloaded_to = vec![0; cores];
            for _ in 0..arriving[at] {
                counters[at].busy.target.0 += 700_000;
                let to = match router.route() {
                    RoutingDecision::Local => at,
                    RoutingDecision::Offload(to) => to.index(),
                };
                counters[to].busy.kv.0 += 300_000;
                counters[to].executed_for.resize(cores, 0);
                if to == at {
                    counters[at].executed_locally += 1;
                } else {
                    counters[at].offloaded_to[to] += 1;
                    counters[to].executed_for[at] += 1;
                }
            }
        }
        decisions.push(choose(&metrics(&counters, &[]), &config(policy)));
    }
    decisions
}

#[test]
fn a_plan_in_force_does_not_undo_itself() {
    for policy in [Policy::RoundRobin, Policy::Proportional, Policy::Inter, Policy::Auto] {
        let decisions = run_intervals(policy, &vec![vec![900, 850, 200, 300, 100]; 6]);
        assert!(!decisions[1].plan.is_empty());
        for decision in &decisions[2..] {
            assert_eq!(decision, &decisions[1], "{policy}");
        }
    }
}

#[test]
fn a_core_that_loses_its_load_loses_its_plan() {
    for policy in [Policy::RoundRobin, Policy::Proportional, Policy::Inter, Policy::Auto] {
        let (before, after) = (vec![900, 100, 100], vec![0, 100, 100]);
        let decisions = run_intervals(policy, &[before.clone(), after.clone(), after, before]);
        assert!(!decisions[1].plan.is_empty(), "{policy}");
        assert!(decisions[2].plan.cores[0].quotas.is_empty(), "{policy}: no movable load");
        assert!(decisions[3].plan.cores[0].quotas.is_empty(), "{policy}");
        assert_eq!(decisions[4].plan.cores[0], decisions[1].plan.cores[0], "{policy}: the former plan");
    }
}
