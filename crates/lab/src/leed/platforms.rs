//! Table 1 and Figure 1 of LEED: three kinds of nodes, by arithmetic on the numbers that the paper's text has of them.
//!
//! In: nothing. Out: data points. Where the text has two numbers for one quantity, both results are points.

use super::run_configs::LeedRunner;
use crate::data_points::{DataPoint, DataPoints};
use anyhow::Result;

/// A node, with the paper's numbers (§2.1, §2.3, §4.1, §4.3).
struct Platform {
    name: &'static str,
    cores: f64,
    network_gbps: f64,
    /// Flash and memory in GB.
    flash_gb: f64,
    memory_gb: f64,
    /// Reads of 4 KiB per second that the node has to drive: what Table 1 counts.
    reads_per_s: f64,
    /// Nodes of the cluster with which Table 1 calculates the maximum load.
    nodes: f64,
    /// Active power in watts, and the capacity of one node with four drives (or its card), in GB.
    watts: f64,
    node_gb: f64,
    /// Random reads of 4 KiB per second, and MB/s of sequential writes, of that node.
    random_reads_per_s: f64,
    write_mb_per_s: f64,
    /// Table 1: flash to memory, GbE a core, IOPS a core, and m/n and the term below the root.
    table_1: [f64; 5],
}

/// Reads of 4 KiB per second of one drive: §4.8.
const DRIVE_READS: f64 = 400_000.0;
/// Sequential writes of one drive: its data sheet.
const DRIVE_WRITE_MB: f64 = 1_050.0;

const PLATFORMS: [Platform; 3] = [
    Platform {
        name: "embedded node",
        cores: 4.0,
        network_gbps: 1.0,
        flash_gb: 16.0, // §2.3: "1GB DRAM to index up to 16GB"; the testbed has 32.
        memory_gb: 1.0,
        reads_per_s: 20_000.0, // §2.3.
        nodes: 100.0,
        watts: (3.9 + 4.2) / 2.0, // §2.1.
        node_gb: 32.0,
        random_reads_per_s: 20_000.0,        // §2.3.
        write_mb_per_s: (60.0 + 80.0) / 2.0, // §2.1.
        table_1: [16.0, 0.25, 5_000.0, 0.01, 0.02],
    },
    Platform {
        name: "server",
        cores: 32.0, // Two of 16.
        network_gbps: 100.0,
        flash_gb: 8.0 * 960.0, // §4.1: four to eight.
        memory_gb: 96.0,
        reads_per_s: 4e6, // Table 1: 125 K a core.
        nodes: 3.0,
        watts: 756.0 / 3.0, // §4.3: three of them.
        node_gb: 4.0 * 960.0,
        random_reads_per_s: 4.0 * DRIVE_READS,
        write_mb_per_s: 4.0 * DRIVE_WRITE_MB,
        table_1: [64.0, 3.2, 125_000.0, 0.33, 0.16],
    },
    Platform {
        name: "SmartNIC",
        cores: 8.0,
        network_gbps: 100.0,
        flash_gb: 8192.0, // §2.3: "8TB flash space with at most 8GB DRAM".
        memory_gb: 8.0,
        reads_per_s: 4e6, // §2.3: "up to 4M NVMe IOPS".
        nodes: 3.0,
        watts: 52.5, // §2.1.
        node_gb: 4.0 * 960.0,
        random_reads_per_s: 4.0 * DRIVE_READS,
        write_mb_per_s: 4.0 * DRIVE_WRITE_MB,
        table_1: [1024.0, 12.5, 500_000.0, 0.33, 0.16],
    },
];

/// The maximum load of one of n nodes, which m requests per second reach at random, with high probability: m/n + Θ(√(m · log n / n)).
/// The factor of m, and the one below the root; the paper's logarithm is decimal.
fn maximum_load(nodes: f64) -> [f64; 2] {
    [1.0 / nodes, nodes.log10() / nodes]
}

/// Table 1.
///
/// # Errors
/// Never: nothing is run.
pub fn table_1(_: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Table 1");
    let drives_reads = 4.0 * DRIVE_READS;
    for platform in &PLATFORMS {
        let Platform { name, cores, table_1, .. } = platform;
        let [load, below_root] = maximum_load(platform.nodes);
        let ours = [
            ("flash to memory", platform.flash_gb / platform.memory_gb, "times"),
            ("network a core", platform.network_gbps / cores, "Gb/s"),
            ("reads a core", platform.reads_per_s / cores, "reads/s"),
            ("maximum load, m/n", load, "m"),
            ("maximum load, below the root", below_root, "m"),
        ];
        for ((x, ours, unit), paper) in ours.into_iter().zip(table_1) {
            points.add_with_paper(name, x, Some(*paper), ours, unit);
        }
    }
    let [embedded, _, smart_nic] = &PLATFORMS;
    // §2.3's other numbers. "5 µs" for a read follows from the four drives, not from Table 1's 500 K reads a core.
    let packet_us = |platform: &Platform| 1500.0 * 8.0 / (platform.network_gbps / platform.cores) / 1e3;
    points.add_with_paper(
        "time for a packet of 1,500 B",
        smart_nic.name,
        Some(0.96),
        packet_us(smart_nic),
        "us",
    );
    points.add_with_paper(
        "time for a packet of 1,500 B",
        embedded.name,
        Some(48.0),
        packet_us(embedded),
        "us",
    );
    let read_us = |reads_per_s: f64, cores: f64| cores / reads_per_s * 1e6;
    let series = "time for a read of 4 KiB";
    points.add_with_paper(series, "SmartNIC, four drives", Some(5.0), read_us(drives_reads, 8.0), "us");
    points.add(series, "SmartNIC, Table 1's reads", read_us(smart_nic.reads_per_s, 8.0), "us");
    points.add_with_paper(series, embedded.name, Some(400.0), read_us(embedded.reads_per_s, 4.0), "us");
    // FAWN's 6 B an object of 256 B, on 8 TB; and what the testbeds have of flash and memory.
    let index_gb = smart_nic.flash_gb / 256.0 * 6.0;
    points.add_with_paper("FAWN's index of 8 TB of 256 B", "memory", Some(192.0), index_gb, "GB");
    points.add("flash to memory, of the testbeds", embedded.name, 32.0, "times");
    points.add("flash to memory, of the testbeds", smart_nic.name, 4.0 * 960.0 / 8.0, "times");
    Ok(points.points)
}

/// Work per joule of so many nodes that together have 16 TB: that of one node, since drives and nodes are added in proportion.
fn per_joule(work_per_s: f64, platform: &Platform) -> f64 {
    let nodes = (16_000.0 / platform.node_gb).ceil();
    nodes * work_per_s / (nodes * platform.watts)
}

/// Figure 1: work per joule, and the SmartNIC's against the others'.
///
/// # Errors
/// Never: nothing is run.
pub fn figure_1(_: &mut LeedRunner) -> Result<Vec<DataPoint>> {
    let mut points = DataPoints::for_figure("Figure 1");
    let [embedded, server, smart_nic] = &PLATFORMS;
    for platform in &PLATFORMS {
        let reads = per_joule(platform.random_reads_per_s, platform) / 1e3;
        points.add("random reads of 4 KiB", platform.name, reads, "K reads/J");
        let writes = per_joule(platform.write_mb_per_s, platform);
        points.add("sequential writes", platform.name, writes, "MB/J");
    }
    // §2.1.
    for (other, reads, writes) in [(server, 4.8, 4.7), (embedded, 56.5, 26.4)] {
        let series = format!("SmartNIC against {}", other.name);
        let ratio = |work: fn(&Platform) -> f64| {
            per_joule(work(smart_nic), smart_nic) / per_joule(work(other), other)
        };
        let of_reads = ratio(|platform| platform.random_reads_per_s);
        points.add_with_paper(&series, "random reads", Some(reads), of_reads, "times");
        points.add_with_paper(
            &series,
            "sequential writes",
            Some(writes),
            ratio(|of| of.write_mb_per_s),
            "times",
        );
    }
    // What the paper's ratios say of its embedded node.
    let implied = |work: f64, ratio: f64| per_joule(work, smart_nic) / ratio * embedded.watts;
    let series = "embedded node, as the paper's ratios imply";
    points.add(series, "random reads", implied(smart_nic.random_reads_per_s, 56.5), "reads/s");
    points.add(series, "sequential writes", implied(smart_nic.write_mb_per_s, 26.4), "MB/s");
    Ok(points.points)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job_runner::Durations;

    fn runner() -> LeedRunner {
        LeedRunner::new(Durations::for_mode(true))
    }

    #[test]
    fn table_1_follows_from_the_papers_text_but_for_the_servers_memory() {
        let points = table_1(&mut runner()).unwrap();
        let differs =
            |point: &&DataPoint| point.paper.is_some_and(|paper| (point.measured / paper - 1.0).abs() > 0.05);
        let found: Vec<(&str, &str)> =
            points.iter().filter(differs).map(|point| (point.series.as_str(), point.x.as_str())).collect();
        let (server, read) = ("server", "time for a read of 4 KiB");
        assert_eq!(found, [(server, "flash to memory"), (read, "embedded node")]);
        assert_eq!(points.iter().filter(|point| point.paper.is_some()).count(), 15 + 5);
    }

    #[test]
    fn figure_1_follows_for_the_server_and_not_for_the_embedded_node() {
        let points = figure_1(&mut runner()).unwrap();
        let found: Vec<(f64, f64)> = (points.iter())
            .filter_map(|point| Some((point.paper?, (point.measured * 10.0).round() / 10.0)))
            .collect();
        assert_eq!(found, [(4.8, 4.8), (4.7, 4.8), (56.5, 6.2), (26.4, 4.6)]);
        let implied: Vec<f64> = points.iter().rev().take(2).map(|point| point.measured.round()).collect();
        assert_eq!(implied, [12.0, 2_185.0]);
    }
}
