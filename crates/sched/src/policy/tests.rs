//! Tables of what is chosen, and windows in a row in which choices are carried out.

use super::*;
use crate::metrics::{CoreCounters, Counters, FlowCounters, Stages, measure};
use crate::{CoreId, Nanos, Route, Router};

/// A core whose own requests, of a millisecond each in the engine, all ran on it.
fn core(target_ms: u64, requests: u64) -> CoreCounters {
    let busy = Stages {
        target: Nanos::from_millis(target_ms),
        kv: Nanos::from_millis(requests),
        device: Nanos::ZERO,
    };
    CoreCounters { busy, own_here: requests, ..CoreCounters::default() }
}

/// A flow with its requests by core, slowed down so many percent.
fn flow(name: u32, requests_by_core: &[u64], slowed_percent: u64) -> FlowCounters {
    let requests: u64 = requests_by_core.iter().sum();
    FlowCounters {
        flow: FlowId(name),
        requests_by_core: requests_by_core.to_vec(),
        bytes: 0,
        latency: Nanos(requests * (100 + slowed_percent)),
        waited: Nanos(requests * slowed_percent),
        round_trip: Nanos::ZERO,
        waiting: 0,
    }
}

fn figures(cores: &[CoreCounters], flows: &[FlowCounters]) -> Figures {
    measure(&Counters { window: Nanos::from_secs(1), cores: cores.to_vec(), flows: flows.to_vec() })
}

fn settings(policy: Policy) -> Settings {
    Settings { policy, ..Settings::default() }
}

/// Two flows on two cores: the first one's few requests and the second one's many, on a core that is nearly full.
fn cores() -> [CoreCounters; 2] {
    [core(500, 300), core(100, 0)]
}

fn level() -> [CoreCounters; 2] {
    [core(500, 300), core(500, 300)]
}

fn flows(slowed_percent: u64) -> [FlowCounters; 2] {
    [flow(7, &[60, 60], slowed_percent), flow(9, &[240, 240], 0)]
}

#[test]
fn each_policy_chooses_by_its_flags() {
    use Chosen::*;
    let (fair, unfair) = (flows(0), flows(50));
    let (in_turn, in_proportion) = (Balance(Order::RoundRobin), Balance(Order::Proportional));
    // Chosen with loads in balance and flows fair; out of balance; unfair; both.
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
    let cases = [(level(), &fair), (cores(), &fair), (level(), &unfair), (cores(), &unfair)];
    for (policy, want) in table {
        for (want, (cores, flows)) in want.into_iter().zip(&cases) {
            let decision = choose(&figures(cores, &flows[..]), &settings(policy));
            assert_eq!(decision.chosen, want, "{policy}");
            let moves = matches!(want, Balance(_) | Inter | Hybrid) && cores[0] != cores[1];
            assert_eq!(!decision.plan.is_nothing(), moves, "{policy}: {decision:?}");
            assert_eq!(decision.imbalanced, cores[0] != cores[1], "{policy}");
            assert_eq!((decision.overloaded, decision.unfair), (true, *flows == &unfair), "{policy}");
        }
    }
}

#[test]
fn flows_move_or_go_back_as_they_are_dense_or_sparse() {
    let rules = |policy, move_flows| {
        let settings = Settings { policy, move_flows, ..Settings::default() };
        let decision = choose(&figures(&cores(), &flows(50)), &settings);
        let rule = |name| decision.rule(FlowId(name));
        assert!(!rule(7).dense && rule(9).dense && !rule(1).dense);
        // Of the sparse flow, the dense one, and one that nobody knows; and how many requests leave the full core.
        let of = |name| (rule(name).moves, rule(name).backwardings);
        (of(7), of(9), of(1), decision.plan.cores[0].leaving())
    };
    let (stays, moves, back) = ((false, 0), (true, 0), (false, 8));
    let table = [
        (Policy::None, MoveFlows::All, (stays, stays, stays, 0)),
        (Policy::Proportional, MoveFlows::Sparse, (moves, moves, moves, 300)),
        (Policy::Inter, MoveFlows::All, (moves, moves, moves, 300)),
        (Policy::Inter, MoveFlows::Dense, (stays, moves, stays, 240)),
        (Policy::Inter, MoveFlows::Sparse, (moves, stays, moves, 60)),
        (Policy::Intra, MoveFlows::All, (stays, back, stays, 0)),
        (Policy::Hybrid, MoveFlows::Sparse, (stays, (true, 8), stays, 240)),
        (Policy::Auto, MoveFlows::All, (stays, (true, 8), stays, 240)),
        (Policy::Fair, MoveFlows::All, (stays, stays, stays, 0)),
    ];
    for (policy, move_flows, want) in table {
        assert_eq!(rules(policy, move_flows), want, "{policy} {move_flows}");
    }
}

#[test]
fn nothing_is_done_where_nothing_is_to_be_gained() {
    let cases: &[(&str, &[CoreCounters], &[FlowCounters])] = &[
        ("nothing at all", &[], &[]),
        ("one core", &[core(500, 400)], &[flow(1, &[10], 0), flow(2, &[10], 0)]),
        ("one flow", &[core(500, 100), core(500, 100)], &[flow(1, &[100, 100], 0)]),
        ("an idle node", &[core(30, 1), core(0, 0)], &[flow(1, &[1, 0], 0)]),
        ("cores alike", &[core(300, 99), core(300, 99)], &[flow(1, &[9, 0], 0), flow(2, &[9, 0], 0)]),
        ("flows that rest", &[core(300, 0), core(300, 0)], &[flow(1, &[], 0), flow(2, &[], 0)]),
        ("nothing that could move", &[core(900, 0), core(100, 0)], &[]),
    ];
    for (name, cores, flows) in cases {
        for policy in Policy::ALL {
            let decision = choose(&figures(cores, flows), &settings(policy));
            assert!(decision.plan.is_nothing(), "{name}, {policy}: {decision:?}");
            assert!(
                decision.flows.iter().all(|rule| !rule.moves && rule.backwardings == 0),
                "{name}, {policy}"
            );
            assert_eq!(decision.plan.cores.len(), cores.len());
        }
    }
}

#[test]
fn flows_come_and_go_between_windows() {
    let auto = |flows: &[FlowCounters]| choose(&figures(&level(), flows), &settings(Policy::Auto));
    let (sparse, dense) = (flow(1, &[50, 0], 100), flow(2, &[400, 400], 0));
    let both = auto(&[sparse.clone(), dense.clone()]);
    assert_eq!((both.chosen, both.rule(FlowId(2)).backwardings), (Chosen::Intra, 15));
    let mut resting = sparse.clone();
    resting.requests_by_core.clear();
    for alone in [auto(std::slice::from_ref(&dense)), auto(&[resting.clone(), dense.clone()])] {
        assert_eq!(
            (alone.chosen, alone.rule(FlowId(2)).backwardings),
            (Chosen::Nothing, 0),
            "nobody to wait for"
        );
    }
    resting.waiting = 3;
    let starving = auto(&[resting, dense.clone(), flow(3, &[90, 0], 0)]);
    assert_eq!(starving.chosen, Chosen::Intra, "who got nothing in a whole window is treated unfairly");
    assert_eq!(starving.rule(FlowId(2)).backwardings, 15);
    assert_eq!(auto(&[sparse, dense]), both, "and as it was, when it is back");
    assert_eq!(Decision::at_start(3).rule(FlowId(2)).backwardings, 0);
    assert_eq!(Decision::at_start(3).of_core(CoreId(3)), None);
}

/// Plays windows in which each core gets `arriving` requests and carries out its part of the plan; what each window
/// measures leads to the next choice.
fn play(policy: Policy, windows: &[Vec<u64>]) -> Vec<Decision> {
    let cores = windows[0].len();
    let mut routers: Vec<Router> = (0..cores).map(|_| Router::new(cores)).collect();
    let mut decisions = vec![Decision::at_start(cores)];
    for arriving in windows {
        let mut counters: Vec<CoreCounters> = vec![core(0, 0); cores];
        for (at, router) in routers.iter_mut().enumerate() {
            let plan = decisions.last().and_then(|decision| decision.of_core(CoreId::at(at)));
            router.install(plan.unwrap());
            counters[at].moved_to = vec![0; cores];
            for _ in 0..arriving[at] {
                counters[at].busy.target.0 += 700_000;
                let to = match router.route() {
                    Route::Here => at,
                    Route::Move(to) => to.index(),
                };
                counters[to].busy.kv.0 += 300_000;
                counters[to].ran_for.resize(cores, 0);
                if to == at {
                    counters[at].own_here += 1;
                } else {
                    counters[at].moved_to[to] += 1;
                    counters[to].ran_for[at] += 1;
                }
            }
        }
        decisions.push(choose(&figures(&counters, &[]), &settings(policy)));
    }
    decisions
}

#[test]
fn a_plan_in_force_does_not_undo_itself() {
    for policy in [Policy::RoundRobin, Policy::Proportional, Policy::Inter, Policy::Auto] {
        let decisions = play(policy, &vec![vec![900, 850, 200, 300, 100]; 6]);
        assert!(!decisions[1].plan.is_nothing());
        for decision in &decisions[2..] {
            assert_eq!(decision, &decisions[1], "{policy}");
        }
    }
}

#[test]
fn a_core_that_loses_its_load_loses_its_plan() {
    for policy in [Policy::RoundRobin, Policy::Proportional, Policy::Inter, Policy::Auto] {
        let (before, after) = (vec![900, 100, 100], vec![0, 100, 100]);
        let decisions = play(policy, &[before.clone(), after.clone(), after, before]);
        assert!(!decisions[1].plan.is_nothing(), "{policy}");
        assert!(decisions[2].plan.cores[0].shares.is_empty(), "{policy}: it has nothing to move");
        assert!(decisions[3].plan.cores[0].shares.is_empty(), "{policy}");
        assert_eq!(decisions[4].plan.cores[0], decisions[1].plan.cores[0], "{policy}: and as it was");
    }
}
