//! Table 3 of the whole node of LEED, and Figures 6, 8, 10 and 14 as far as one node goes.
//!
//! In: results of runs of four drives. Out: data points with the paper's numbers where its text has any. Its Figures 6 and 14 are of three nodes with
//! three replicas each and of other systems; its text has no number of one node in them.

use super::figures::size_name;
use super::limits::{ObjectLengths, requests_by_dies};
use super::node_runs::{NodeRun, NodeRunConfig, flow_workloads, skewed_writes};
use super::run_configs::{LeedRunConfig, LeedRunner};
use crate::data_points::{DataPoint, DataPoints};
use crate::simulation::log_node::clients::NodeArrivals;
use crate::simulation::log_node::experiment::LogNodeSettings;
use crate::simulation::log_node::node_stats::NodeStats;
use crate::simulation::log_node::parameters::{
    FLOW_DEPTH, FLOW_DEPTHS, FLOW_ONE_WAY, NODE_DEPTH_MAX, PAPER_FLOW_GAIN_PERCENT,
    PAPER_FLOW_LATENCY_PERCENT, PAPER_NODE_WATTS, PAPER_SWAP_GAIN_PERCENT, PAPER_SWAP_LATENCY_PERCENT,
    PAPER_YCSB_C_PER_JOULE, RATE_PERCENTS, SWAP_DEPTH, SWAP_DEPTHS, SWAP_GAPS, zipf_skews,
};
use crate::simulation::log_node::workload::NodeWorkload;
use crate::simulation::log_store::load_stats::LoadStats;
use crate::simulation::log_store::parameters::{
    KEY_BYTES, PAPER_DRIVES, PAPER_LEED, PublishedRow, UNITS, VALUE_BYTES, modelled_drive,
};
use anyhow::Result;
use octokv_engine::common::record::RecordMeta;
use octokv_engine::log::value_record::value_record_bytes;

const SIZES: [usize; 2] = [0, 1];

/// The results of runs of nodes, in order.
fn run_nodes(runs: &mut LeedRunner, configs: &[NodeRunConfig]) -> Result<Vec<NodeRun>> {
    let jobs: Vec<_> = configs.iter().map(|&config| LeedRunConfig::Node(config)).collect();
    Ok(runs.run_all(&jobs)?.into_iter().map(|run| run.node).collect())
}

/// What format and dies allow a drive of gets with objects of this size.
fn gets_by_format(size: usize, gets: &LoadStats) -> f64 {
    let record = value_record_bytes(KEY_BYTES, VALUE_BYTES[size], &RecordMeta::PLAIN);
    let lengths = ObjectLengths {
        unit: UNITS[0].into(),
        granule: 8.0,
        image: gets.image_bytes(),
        record: f64::from(record),
    };
    requests_by_dies(&modelled_drive(), lengths.get_die_reads(), 0.0)
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

/// Adds what requests cost the storage cores, and the requests for a joule of the paper's node.
fn add_costs(points: &mut DataPoints, series: &str, paper_per_joule: Option<f64>, stats: &NodeStats) {
    let series = format!("{series}, costs");
    points.add(&series, "storage cores", stats.core_seconds_per_request() * 1e6, "us a request");
    let per_joule = stats.per_second() / 1e3 / PAPER_NODE_WATTS;
    points.add_with_paper(&series, "at the paper's power", paper_per_joule, per_joule, "K requests/J");
}

/// Table 3, of the node.
///
/// # Errors
/// The first run that failed.
pub fn table_3(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Table 3, node");
    let all = run_nodes(runs, &SIZES.map(NodeRunConfig::Uniform))?;
    for (size, run) in SIZES.into_iter().zip(all) {
        let PublishedRow { read_us, write_us, read_kqps, write_kqps, .. } = PAPER_LEED[size];
        let name = size_name(VALUE_BYTES[size]);
        let of = |workload, depth| run.of(workload, NodeArrivals::InFlight(depth));
        let (reads, writes) = (NodeWorkload::RANDOM_READS, NodeWorkload::RANDOM_WRITES);
        points.add_with_paper(&name, "get", Some(read_us), of(reads, 1).mean_us(), "us");
        points.add_with_paper(&name, "put", Some(write_us), of(writes, 1).mean_us(), "us");
        let (gets, puts) = (of(reads, NODE_DEPTH_MAX), of(writes, NODE_DEPTH_MAX));
        for (what, paper, stats) in [("gets", read_kqps, gets), ("puts", write_kqps, puts)] {
            points.add_with_paper(&name, what, Some(paper), stats.per_second() / 1e3, "K/s");
        }
        let allowed: f64 = gets.drives.iter().map(|drive| gets_by_format(size, drive)).sum();
        points.add(&name, "gets that format and dies allow", allowed / 1e3, "K/s");
        let series = format!("gets in parts of, {name}");
        points.add(&series, "the limit by the format", gets.per_second() / allowed * 100.0, "%");
        for (what, paper, stats) in [("gets", read_kqps, gets), ("puts", write_kqps, puts)] {
            let series = format!("{what}, {name}");
            let shares = stats.die_shares();
            let mean = shares.iter().sum::<f64>() / PAPER_DRIVES;
            points.add(&series, "the dies' time, mean of the drives", mean * 100.0, "%");
            points.add(&series, "the dies' time, least busy drive", least(&shares) * 100.0, "%");
            points.add(&series, "requests of the busiest drive, of the mean", stats.imbalance(), "times");
            points.add(&series, "commands", stats.for_a_request(LoadStats::commands), "a request");
            points.add(&series, "die reads", stats.for_a_request(LoadStats::die_reads), "a request");
            points.add(&series, "written", stats.for_a_request(LoadStats::written_bytes), "B");
            add_costs(&mut points, &series, Some(paper / PAPER_NODE_WATTS), stats);
        }
    }
    Ok(points.points)
}

/// A number of the results of a load.
type StatsNumber = fn(&NodeStats) -> f64;

/// The change of a number by a setting, in percent.
fn change_percent(with: &NodeStats, without: &NodeStats, number: impl Fn(&NodeStats) -> f64) -> f64 {
    (number(with) / number(without) - 1.0) * 100.0
}

/// Why swapping gains what it gains, with one skew.
fn add_swap_causes(points: &mut DataPoints, name: &str, x: &str, with: &NodeStats, without: &NodeStats) {
    let of_both = [("with", with), ("without", without)];
    let mut add = |series: String, value: f64, unit| points.add(&series, x, value, unit);
    // If drives are the bottleneck, work that is spread evenly ends when the mean drive does now.
    add(format!("gain if all dies were equally busy, {name}"), (without.die_imbalance() - 1.0) * 100.0, "%");
    for (which, stats) in of_both {
        let shares = stats.die_shares();
        let most = shares.iter().copied().fold(0.0, f64::max);
        add(format!("requests of the busiest drive, {which}, {name}"), stats.imbalance(), "of the mean");
        add(format!("the dies' time, busiest drive, {which}, {name}"), most * 100.0, "%");
        add(format!("the dies' time, least busy drive, {which}, {name}"), least(&shares) * 100.0, "%");
        let commands = stats.for_a_request(LoadStats::commands);
        add(format!("commands, {which}, {name}"), commands, "a put");
        add(format!("die reads, {which}, {name}"), stats.for_a_request(LoadStats::die_reads), "a put");
        let written = stats.for_a_request(LoadStats::written_bytes);
        add(format!("written, {which}, {name}"), written, "B a put");
        let core_us = stats.core_seconds_per_request() * 1e6;
        add(format!("storage cores, {which}, {name}"), core_us, "us a put");
    }
    let swapped = with.swapped_puts() as f64 / with.requests();
    add(format!("puts that are swapped, {name}"), swapped * 100.0, "%");
    add(format!("keys swapped at the end, {name}"), with.swapped_keys() as f64, "keys");
}

/// Figure 10: data swapping.
///
/// # Errors
/// The first run that failed.
pub fn figure_10(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 10");
    let (is_quick, skews) = (runs.durations.is_quick, zipf_skews(runs.durations.is_quick));
    let most = skews[skews.len() - 1];
    let swapping = LogNodeSettings::default();
    let without_swaps = LogNodeSettings { swap_gap: None, ..swapping };
    let with_gap = |gap| LogNodeSettings { swap_gap: Some(gap), ..swapping };
    let gaps: Vec<u32> = SWAP_GAPS.into_iter().filter(|_| !is_quick).collect();
    let settings: Vec<_> =
        [swapping, without_swaps].into_iter().chain(gaps.iter().copied().map(with_gap)).collect();
    let configs: Vec<_> = SIZES
        .iter()
        .flat_map(|&size| settings.iter().map(move |&settings| NodeRunConfig::Skewed(size, settings)))
        .collect();
    let all = run_nodes(runs, &configs)?;
    let mut latency_changes = Vec::new();
    for (size, of_settings) in SIZES.into_iter().zip(all.chunks(settings.len())) {
        let name = size_name(VALUE_BYTES[size]);
        let of = |run: &'static str, skew| {
            let at = usize::from(run == "without");
            of_settings[at].of(skewed_writes(skew), NodeArrivals::InFlight(SWAP_DEPTH))
        };
        for &skew in skews {
            let (x, with, without) = (skew.to_string(), of("with", skew), of("without", skew));
            for (which, stats) in [("with", with), ("without", without)] {
                points.add(&format!("puts, {which}, {name}"), &x, stats.per_second() / 1e3, "K/s");
                points.add(&format!("mean, {which}, {name}"), &x, stats.mean_us(), "us");
                points.add(&format!("p99.9, {which}, {name}"), &x, stats.percentile_us(999), "us");
            }
            let paper = (skew == most).then_some(PAPER_SWAP_GAIN_PERCENT[size]);
            let gain = change_percent(with, without, NodeStats::per_second);
            points.add_with_paper(&format!("gain by swapping, {name}"), &x, paper, gain, "%");
            latency_changes.push([
                change_percent(with, without, NodeStats::mean_us),
                change_percent(with, without, |stats| stats.percentile_us(999)),
            ]);
            add_swap_causes(&mut points, &name, &x, with, without);
        }
        let [with, without, of_gaps @ ..] = of_settings else { unreachable!("both were run") };
        for depth in SWAP_DEPTHS.into_iter().filter(|&depth| depth == SWAP_DEPTH || !is_quick) {
            let of_depth = |run: &NodeRun| run.of(skewed_writes(most), NodeArrivals::InFlight(depth)).clone();
            let gain = change_percent(&of_depth(with), &of_depth(without), NodeStats::per_second);
            points.add(&format!("gain by requests in flight, {name}"), &depth.to_string(), gain, "%");
        }
        for (gap, run) in gaps.iter().zip(of_gaps) {
            for &skew in skews {
                let (x, without) = (skew.to_string(), of("without", skew));
                let of_gap = run.of(skewed_writes(skew), NodeArrivals::InFlight(SWAP_DEPTH));
                let gain = change_percent(of_gap, without, NodeStats::per_second);
                points.add(&format!("gain with a gap of {gap}, {name}"), &x, gain, "%");
                let tail_us = of_gap.percentile_us(999);
                points.add(&format!("p99.9 with a gap of {gap}, {name}"), &x, tail_us, "us");
            }
        }
    }
    for (at, x) in ["mean", "p99.9"].into_iter().enumerate() {
        let mean = latency_changes.iter().map(|of| of[at]).sum::<f64>() / latency_changes.len() as f64;
        let paper = Some(PAPER_SWAP_LATENCY_PERCENT[at]);
        points.add_with_paper("change of latencies, all skews and sizes", x, paper, mean, "%");
    }
    Ok(points.points)
}

/// Adds a load with and without flow control, and the changes.
fn add_flow_control(points: &mut DataPoints, name: &str, x: &str, with: &NodeStats, without: &NodeStats) {
    for (which, stats) in [("with", with), ("without", without)] {
        let mut add = |what: &str, value: f64, unit| {
            points.add(&format!("{name}, {what}, {which}"), x, value, unit);
        };
        add("requests", stats.per_second() / 1e3, "K/s");
        add("mean", stats.mean_us(), "us");
        add("p99.9", stats.percentile_us(999), "us");
        add("mean in the node", stats.node_mean_us(), "us");
        add("p99.9 in the node", stats.node_percentile_us(999), "us");
        let shares = stats.die_shares();
        add("the dies' time, busiest drive", shares.iter().copied().fold(0.0, f64::max) * 100.0, "%");
        add("the dies' time, least busy drive", least(&shares) * 100.0, "%");
        add("requests of the busiest drive", stats.imbalance(), "of the mean");
        add("commands", stats.for_a_request(LoadStats::commands), "a request");
        add("die reads", stats.for_a_request(LoadStats::die_reads), "a request");
        add("written", stats.for_a_request(LoadStats::written_bytes), "B a request");
    }
}

/// Figure 8: tokens in the node and flow control in its clients, both or neither.
///
/// # Errors
/// The first run that failed.
pub fn figure_8(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 8");
    let (is_quick, skews) = (runs.durations.is_quick, zipf_skews(runs.durations.is_quick));
    let most = skews[skews.len() - 1];
    let without = LogNodeSettings { one_way: FLOW_ONE_WAY, ..LogNodeSettings::default() };
    let settings = [LogNodeSettings { flow_control: true, ..without }, without];
    // 1 KiB.
    let all = run_nodes(runs, &settings.map(|settings| NodeRunConfig::FlowControlled(1, settings)))?;
    let of = |workload, depth| {
        let load = NodeArrivals::InFlight(depth);
        (all[0].of(workload, load), all[1].of(workload, load))
    };
    for &skew in skews {
        for (name, workload) in flow_workloads(skew) {
            let (x, (with, without)) = (skew.to_string(), of(workload, FLOW_DEPTH));
            add_flow_control(&mut points, name, &x, with, without);
            // The paper's number has no skew; 0.99 is YCSB's.
            let has_number = name == "YCSB-B" && skew == most;
            let paper = |percent| has_number.then_some(percent);
            let [mean, tail] = PAPER_FLOW_LATENCY_PERCENT.map(paper);
            let gain = change_percent(with, without, NodeStats::per_second);
            let series = |what| format!("{name}, {what}");
            points.add_with_paper(&series("gain"), &x, paper(PAPER_FLOW_GAIN_PERCENT), gain, "%");
            let changes: [(&str, Option<f64>, StatsNumber); 4] = [
                ("change of the mean", mean, NodeStats::mean_us),
                ("change of p99.9", tail, |stats| stats.percentile_us(999)),
                ("change of the mean in the node", None, NodeStats::node_mean_us),
                ("change of p99.9 in the node", None, |stats| stats.node_percentile_us(999)),
            ];
            for (what, paper, number) in changes {
                points.add_with_paper(&series(what), &x, paper, change_percent(with, without, number), "%");
            }
        }
    }
    for depth in FLOW_DEPTHS.into_iter().filter(|&depth| depth == FLOW_DEPTH || !is_quick) {
        for (name, workload) in flow_workloads(most) {
            let (with, without) = of(workload, depth);
            let gain = change_percent(with, without, NodeStats::per_second);
            points.add(&format!("{name}, gain by requests in flight"), &depth.to_string(), gain, "%");
        }
    }
    Ok(points.points)
}

/// Latencies by rate of the six workloads.
fn by_rate(runs: &mut LeedRunner, figure: &'static str, size: usize) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure(figure);
    let all = run_nodes(runs, &[NodeRunConfig::Ycsb(size)])?;
    for (name, workload) in NodeWorkload::YCSB {
        let most = all[0].of(workload, NodeArrivals::InFlight(NODE_DEPTH_MAX));
        let series = format!("{name}, most");
        points.add(&series, "throughput", most.per_second() / 1e3, "K/s");
        points.add(&series, "requests of the busiest drive", most.imbalance(), "of the mean");
        let shares = most.die_shares();
        let busiest = shares.iter().copied().fold(0.0, f64::max);
        points.add(&series, "the dies' time, busiest drive", busiest * 100.0, "%");
        points.add(&series, "the dies' time, least busy drive", least(&shares) * 100.0, "%");
        let is_published = name == "YCSB-C" && VALUE_BYTES[size] == 1024;
        add_costs(&mut points, name, is_published.then_some(PAPER_YCSB_C_PER_JOULE), most);
        for (percent, stats) in RATE_PERCENTS.into_iter().zip(all[0].at_rates(workload)) {
            let x = percent.to_string();
            points.add(&format!("{name}, rate"), &x, stats.per_second() / 1e3, "K/s");
            points.add(&format!("{name}, mean"), &x, stats.mean_us(), "us");
            points.add(&format!("{name}, p99.9"), &x, stats.percentile_us(999), "us");
        }
    }
    Ok(points.points)
}

/// Figure 6: objects of 1 KB.
///
/// # Errors
/// The first run that failed.
pub fn figure_6(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    by_rate(runs, "Figure 6", 1)
}

/// Figure 14: objects of 256 B.
///
/// # Errors
/// The first run that failed.
pub fn figure_14(runs: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    by_rate(runs, "Figure 14", 0)
}
