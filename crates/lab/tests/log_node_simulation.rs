//! The simulation of LEED's node: every drive takes part, results repeat, and the busiest drive of a skewed load is found.

use octokv_base::Nanos;
use octokv_bench::key_distribution::KeyDistribution;
use octokv_device::ssd_model::drive_profiles::DCT_983;
use octokv_lab::simulation::log_node::clients::{NodeArrivals, NodeLoad};
use octokv_lab::simulation::log_node::experiment::{LogNodeConfig, LogNodeExperiment, LogNodeSettings};
use octokv_lab::simulation::log_node::node_stats::NodeStats;
use octokv_lab::simulation::log_node::workload::NodeWorkload;
use octokv_lab::simulation::log_store::load_client::StoredObjects;

fn node() -> LogNodeExperiment {
    node_with(LogNodeSettings::default())
}

fn node_with(settings: LogNodeSettings) -> LogNodeExperiment {
    LogNodeExperiment::new(LogNodeConfig {
        drive: DCT_983.scaled_down(24, 64),
        unit_bytes: 512,
        chunk_bytes: 64 << 10,
        stores: 8,
        objects: StoredObjects { count: 12_000, value_bytes: 256 },
        settings,
        seed: 1,
    })
    .unwrap()
}

fn load(workload: NodeWorkload, arrivals: NodeArrivals) -> NodeLoad {
    NodeLoad { workload, arrivals, warm_up: 500, measured: 4_000, seed: 3 }
}

fn rates(stats: &NodeStats) -> Vec<u64> {
    stats.drives.iter().map(|drive| drive.per_second() as u64).collect()
}

#[test]
fn every_drive_takes_its_part_of_uniform_gets_and_results_repeat() {
    let gets = load(NodeWorkload::RANDOM_READS, NodeArrivals::InFlight(256));
    let (stats, again) = (node().run(gets).unwrap(), node().run(gets).unwrap());
    assert_eq!(rates(&stats), rates(&again));
    assert_eq!((stats.drives.len(), stats.requests()), (4, 4_000.0));
    assert!((1.0..1.1).contains(&stats.imbalance()), "{}", stats.imbalance());
    // At most two commands of 1.01 us a get: a segment in memory saves one.
    let core_us = stats.core_seconds_per_request() * 1e6;
    assert!((1.0..2.2).contains(&core_us), "{core_us}");
}

#[test]
fn every_workload_runs_and_the_open_loop_keeps_its_rate() {
    let node = node();
    for (name, workload) in NodeWorkload::YCSB {
        let closed = node.run(load(workload, NodeArrivals::InFlight(64))).unwrap();
        assert_eq!(closed.requests(), 4_000.0, "{name}");
        let one_in = Nanos((4e9 / closed.per_second()) as u64);
        let open = node.run(load(workload, NodeArrivals::OneIn(one_in))).unwrap();
        let part = open.per_second() / closed.per_second();
        assert!((0.22..0.28).contains(&part), "{name}: {part}");
    }
}

#[test]
fn a_skewed_load_has_a_busiest_drive() {
    let zipf =
        |skew| NodeWorkload { distribution: KeyDistribution::Zipf, skew, ..NodeWorkload::RANDOM_WRITES };
    let node = node();
    let imbalance = |skew| node.run(load(zipf(skew), NodeArrivals::InFlight(64))).unwrap().imbalance();
    let [little, much] = [0.1, 0.99].map(imbalance);
    assert!(little < 1.1 && much > little, "{little} {much}");
}

#[test]
fn with_flow_control_requests_wait_at_their_clients_and_not_in_the_node() {
    let one_way = Nanos::from_micros(5);
    let run = |flow_control| {
        let node = node_with(LogNodeSettings { one_way, flow_control, ..LogNodeSettings::default() });
        let warm =
            NodeLoad { warm_up: 8_000, ..load(NodeWorkload::YCSB[1].1, NodeArrivals::InFlight(1_024)) };
        node.run(NodeLoad { measured: 20_000, ..warm }).unwrap()
    };
    let (with, without) = (run(true), run(false));
    assert_eq!(rates(&with), rates(&run(true)));
    // Without it all of a request's time but the ways is in the node.
    assert!((without.mean_us() - without.node_mean_us() - 10.0).abs() < 1.0, "{}", without.node_mean_us());
    let part = with.node_mean_us() / without.node_mean_us();
    assert!(part < 0.9, "{part} of the time in the node");
    let throughput = with.per_second() / without.per_second();
    assert!((0.7..1.3).contains(&throughput), "{throughput}");
}
