//! Worlds of several tenants: they repeat, their figures are parts of the whole, and nobody is forgotten.

use octokv_base::Nanos;
use octokv_sched::{FlowSettings, MoveFlows, Policy, Settings};
use octokv_sim::experiments::experiment::{Bench, Trial};
use octokv_sim::experiments::parameters::{CORES, CostSetting, FLOWS, Operation, WINDOW, costs};
use octokv_sim::experiments::tenant_metrics::{
    FlowTrial, FlowsTrial, Together, fairness, jain, name_of, slowdowns,
};
use octokv_sim::experiments::workload::Placement;

fn settings(policy: Policy) -> Settings {
    Settings { policy, window: WINDOW, move_flows: MoveFlows::Dense, ..Settings::default() }
}

fn trial(threads: &[usize], placement: &Placement, policy: Policy) -> FlowsTrial {
    let flow = |&threads: &usize| FlowTrial { threads, placement: placement.clone() };
    FlowsTrial {
        seed: 3,
        costs: costs(CostSetting::Paper, Operation::Put, true),
        operation: Operation::Put,
        flows: threads.iter().map(flow).collect(),
        one_machine: true,
        scheduling: settings(policy),
        journal: true,
    }
}

/// Two windows and a half, then two.
fn run(trial: &FlowsTrial) -> Together {
    let bench = Bench::with_flows(trial).unwrap();
    bench.run_for(Nanos(WINDOW.0 * 5 / 2)).unwrap();
    bench.run_flows_for(WINDOW.times(2)).unwrap()
}

const POLICIES: [Policy; 6] =
    [Policy::None, Policy::Inter, Policy::Intra, Policy::Hybrid, Policy::Auto, Policy::Fair];

#[test]
fn tenants_repeat_bit_for_bit_from_their_seed() {
    let trial = trial(&FLOWS, &Placement::InOrder(1), Policy::Hybrid);
    let first = run(&trial);
    assert_eq!(first, run(&trial));
    assert_ne!(first, run(&FlowsTrial { seed: 4, ..trial }), "another seed draws otherwise");
}

#[test]
fn a_trial_of_one_flow_is_the_trial_of_the_other_papers() {
    let flows = trial(&[7], &Placement::InOrder(2), Policy::Proportional);
    let same = Trial {
        seed: flows.seed,
        costs: flows.costs,
        operation: flows.operation,
        threads: 7,
        placement: Placement::InOrder(2),
        scheduling: flows.scheduling.clone(),
        journal: flows.journal,
    };
    let bench = Bench::new(&same).unwrap();
    bench.run_for(Nanos(WINDOW.0 * 5 / 2)).unwrap();
    assert_eq!(bench.run_for(WINDOW.times(2)).unwrap(), run(&flows).whole);
}

#[test]
fn every_request_of_every_flow_is_answered_once_and_their_sums_are_the_whole() {
    const REQUESTS: u64 = 1_500;
    for policy in POLICIES {
        for operation in [Operation::Put, Operation::Get] {
            if operation == Operation::Get && !matches!(policy, Policy::Hybrid | Policy::Fair) {
                continue;
            }
            let trial = FlowsTrial { operation, ..trial(&FLOWS, &Placement::InOrder(1), policy) };
            let bench = Bench::with_flows(&trial).unwrap();
            bench.run_for(Nanos(WINDOW.0 * 5 / 2)).unwrap();
            let together = bench.run_flows_requests(REQUESTS).unwrap();
            for flow in &together.flows {
                let by_core: u64 = flow.cores.iter().map(|core| core.answered).sum();
                assert_eq!((flow.answered, by_core), (REQUESTS, REQUESTS), "{policy} {operation:?}");
            }
            let ran: u64 = together.whole.cores.iter().map(|core| core.events).sum();
            assert_eq!(
                (together.whole.answered, ran),
                (2 * REQUESTS, 2 * REQUESTS),
                "{policy} {operation:?}"
            );
            let sum: f64 = together.flows.iter().map(|flow| flow.throughput_ops_s).sum();
            assert!((sum / together.whole.throughput_ops_s - 1.0).abs() < 1e-9);
        }
    }
}

#[test]
fn connections_of_all_flows_are_in_one_order_of_cores() {
    let together = run(&trial(&[2, 1], &Placement::InOrder(1), Policy::None));
    let used = |flow: usize| -> Vec<bool> {
        together.flows[flow].cores.iter().map(|core| core.answered > 0).collect()
    };
    assert_eq!(used(0), [true, true, false, false, false, false]);
    assert_eq!(used(1), [true, false, false, false, false, false]);
    assert_eq!(together.whole.cores.len(), CORES);
}

/// OctoFAS §3.2: more threads of the second flow slow the first one down more than the second.
#[test]
fn who_asks_for_little_is_slowed_down_more_and_the_node_sees_it() {
    let alone = |flow: usize| {
        let mut threads = [0, 0];
        threads[flow] = FLOWS[flow];
        run(&trial(&threads, &Placement::InOrder(1), Policy::None)).flows[flow].response_us_mean
    };
    let alone = [alone(0), alone(1)];
    let of = |policy| run(&trial(&FLOWS, &Placement::InOrder(1), policy));
    let none = of(Policy::None);
    let slowed = slowdowns(&none, &alone);
    assert!(slowed[0] > 1.3 && slowed[1] < 1.25, "{slowed:?}");
    // What the node says without having seen anybody alone.
    for (flow, slowed) in none.flows.iter().zip(&slowed) {
        let online = flow.slowdown_online.unwrap();
        assert!((online / slowed - 1.0).abs() < 0.1, "{online} online, {slowed}");
    }
    assert!((none.fairness_online.unwrap() - fairness(&slowed)).abs() < 0.05);
    for policy in [Policy::Intra, Policy::Hybrid, Policy::Auto] {
        let slowed_so = slowdowns(&of(policy), &alone);
        assert!(fairness(&slowed_so) > fairness(&slowed) + 0.1, "{policy}: {slowed_so:?}");
    }
}

/// Three tenants that always want more of one core.
fn backlogged(policy: Policy, weights: [u32; 3], setting: CostSetting) -> Together {
    let mut scheduling = settings(policy);
    for (flow, weight) in weights.into_iter().enumerate() {
        scheduling.tenants.insert(name_of(flow), FlowSettings { weight, ..FlowSettings::default() });
    }
    let costs = costs(setting, Operation::Put, true);
    run(&FlowsTrial { one_machine: false, scheduling, costs, ..trial(&[32; 3], &Placement::One(0), policy) })
}

#[test]
fn weights_hold_on_a_core_that_is_slower_than_its_device() {
    for setting in [CostSetting::Paper, CostSetting::Measured] {
        let none = backlogged(Policy::None, [1; 3], setting).whole.throughput_ops_s;
        for weights in [[1, 1, 1], [1, 2, 4]] {
            let together = backlogged(Policy::Fair, weights, setting);
            let parts: Vec<f64> = together
                .flows
                .iter()
                .zip(weights)
                .map(|(flow, weight)| flow.throughput_ops_s / f64::from(weight))
                .collect();
            assert!(jain(&parts) >= 0.999, "{setting:?} {weights:?}: {parts:?}");
            let part = together.whole.throughput_ops_s / none;
            // 0.977 to 0.995 over seeds.
            assert!(part >= 0.97, "{setting:?} {weights:?}: {part} of the throughput of none");
        }
    }
}

#[test]
fn who_is_served_on_another_core_as_well_has_less_where_it_meets_others() {
    let costs = costs(CostSetting::Paper, Operation::Put, true);
    let mut of = trial(&[64, 32], &Placement::One(0), Policy::Fair);
    of.flows[0].placement = Placement::Shares(vec![1, 1, 0, 0, 0, 0]);
    let bench = Bench::with_flows(&FlowsTrial { one_machine: false, costs, ..of }).unwrap();
    let parts = |windows| {
        let together = bench.run_flows_for(WINDOW.times(windows)).unwrap();
        let [both, one] = [0, 1].map(|flow: usize| together.flows[flow].throughput_ops_s);
        both / one
    };
    let (first, _, later) = (parts(2), parts(12), parts(2));
    // Of two cores one, and half of the other; then nearly as much for its weight as who has one core.
    assert!(first > 1.9 && later < 1.4, "{first} times as much at first, {later} later");
}

#[test]
fn nobody_is_starved_beside_somebody_who_asks_for_sixty_four_times_as_much() {
    for policy in POLICIES {
        for setting in [CostSetting::Paper, CostSetting::Measured] {
            let costs = costs(setting, Operation::Put, true);
            let trial = trial(&[1, 64], &Placement::One(0), policy);
            let together = run(&FlowsTrial { one_machine: false, costs, ..trial });
            // A turn or two of the core before it and after it.
            let p99 = together.flows[0].response_us_p99;
            assert!(p99 < 1_000.0, "{policy} {setting:?}: {p99} us");
            assert!(
                together.flows[1].throughput_ops_s > 4.0 * together.flows[0].throughput_ops_s,
                "{policy}"
            );
        }
    }
}
