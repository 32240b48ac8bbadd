//! Simulated experiments: they are deterministic, every stage counts every request, and none is lost.

use octokv_base::Nanos;
use octokv_lab::simulation::config::ExperimentConfig;
use octokv_lab::simulation::experiment::SimulatedExperiment;
use octokv_lab::simulation::metrics::RunStats;
use octokv_lab::simulation::parameters::{
    CORES, CostModel, HEAVY_THREADS, Operation, SAMPLING_INTERVAL, TABLE_IV, request_costs,
};
use octokv_lab::simulation::workload::ConnectionPolicy;
use octokv_sched::{Policy, SchedConfig};

fn config(operation: Operation, policy: Policy) -> ExperimentConfig {
    ExperimentConfig {
        seed: 4,
        costs: request_costs(CostModel::Paper, operation, true),
        operation,
        threads: HEAVY_THREADS,
        connection_policy: ConnectionPolicy::Weighted(TABLE_IV.to_vec()),
        scheduling: SchedConfig { policy, interval: SAMPLING_INTERVAL, ..SchedConfig::default() },
        journal: true,
    }
}

/// Warms up for two sampling intervals, then measures `requests` requests to the last response.
fn run_config(trial: &ExperimentConfig, requests: u64) -> RunStats {
    let bench = SimulatedExperiment::new(trial).unwrap();
    bench.run_for(SAMPLING_INTERVAL.times(2)).unwrap();
    bench.run_requests(requests).unwrap()
}

#[test]
fn an_experiment_repeats_bit_for_bit_from_its_seed() {
    for operation in [Operation::Put, Operation::Get] {
        let trial = config(operation, Policy::Proportional);
        let first = run_config(&trial, 2_000);
        assert_eq!(first, run_config(&trial, 2_000));
        assert_ne!(
            first,
            run_config(&ExperimentConfig { seed: 5, ..trial }, 2_000),
            "another seed gives other results"
        );
    }
}

#[test]
fn every_stage_counts_every_request_on_whichever_core() {
    const REQUESTS: u64 = 6_000;
    for policy in [Policy::None, Policy::RoundRobin, Policy::Proportional] {
        for operation in [Operation::Put, Operation::Get] {
            let stats = run_config(&config(operation, policy), REQUESTS);
            let sum = |metric: fn(&_) -> u64| stats.cores.iter().map(metric).sum::<u64>();
            let target = sum(|core: &octokv_lab::simulation::metrics::CoreRunStats| core.requests_received);
            assert_eq!(
                (stats.completed, target, sum(|core| core.requests_executed)),
                (REQUESTS, REQUESTS, REQUESTS)
            );
            assert_eq!(stats.offloaded > 0, policy != Policy::None, "{policy}");
            // The distribution over connections follows Table IV's shares, at random.
            for (core, share) in stats.cores.iter().zip(TABLE_IV) {
                let part = core.requests_received as f64 / REQUESTS as f64;
                assert!((part - share as f64 / 1e5).abs() < 0.02, "{part} not {share}");
            }
        }
    }
}

#[test]
fn connections_are_filled_in_order_up_to_the_threshold() {
    let placement = ConnectionPolicy::FillInOrder(2);
    let bench = SimulatedExperiment::new(&ExperimentConfig {
        connection_policy: placement,
        threads: 7,
        ..config(Operation::Put, Policy::None)
    })
    .unwrap();
    bench.run_for(Nanos::from_millis(5)).unwrap();
    let stats = bench.run_for(Nanos::from_millis(20)).unwrap();
    let depths: Vec<f64> = stats.cores.iter().map(|core| core.queue_depth.round()).collect();
    assert_eq!(depths, [2.0, 2.0, 2.0, 1.0, 0.0, 0.0]);
    assert_eq!(stats.cores.len(), CORES);
}

/// A put completes in the order of the journal, so puts of idle cores wait for busy cores: a part of the gain of balancing
/// (docs/REPRODUCTION.md).
#[test]
fn without_a_journal_puts_of_idle_cores_do_not_wait_for_busy_ones() {
    let latency_us = |journal| {
        let stats = run_config(&ExperimentConfig { journal, ..config(Operation::Put, Policy::None) }, 10_000);
        stats.cores[5].latency_us
    };
    let (with, without) = (latency_us(true), latency_us(false));
    assert!(without < 95.0 && with > without + 20.0, "{with} with, {without} without");
}

#[test]
fn a_core_is_busy_for_its_request_costs_and_completes_afterwards() {
    let trial = ExperimentConfig {
        connection_policy: ConnectionPolicy::Single(3),
        threads: 1,
        ..config(Operation::Put, Policy::None)
    };
    let stats = run_config(&trial, 500);
    let cost = trial.costs.target + trial.costs.kv + trial.costs.device;
    let core = stats.cores[3];
    let busy_ns = core.utilisation * stats.span.0 as f64 / 500.0;
    assert!((busy_ns / cost.0 as f64 - 1.0).abs() < 1e-6, "{busy_ns} of {cost:?}");
    // The drive takes 27 µs for five pages; the link adds 50 µs of latency and 14 µs of transmission.
    let alone_us = cost.0 as f64 / 1e3 + 27.1;
    assert!(core.latency_us > alone_us && core.latency_us < alone_us + 6.0, "{}", core.latency_us);
    assert!(stats.response_us_mean > core.latency_us + 64.0, "{}", stats.response_us_mean);
}
