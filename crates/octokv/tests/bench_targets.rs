//! `octokv bench` with several `--url` through the binary: every key on one node, results per node, usage errors.

use crate::common::{CommandOutput, Server, octokv, temp_directory};
use serde_json::Value;
use std::net::ToSocketAddrs;
use std::path::Path;

const NAMES: [&str; 3] = ["first", "second", "third"];

/// This many nodes, each in memory.
fn nodes(directory: &Path, count: usize) -> Vec<Server> {
    let start = |name: &&str| {
        let own = directory.join(name);
        std::fs::create_dir(&own).unwrap();
        let fixed = ["--device", "memory", "--size", "64MiB", "--listen", "127.0.0.1:0"];
        Server::start_with(&own, &fixed)
    };
    NAMES[..count].iter().map(start).collect()
}

/// A small benchmark of all nodes.
fn bench(nodes: &[Server], more: &[&str]) -> CommandOutput {
    let small = ["bench", "--threads", "5", "--depth", "2", "--num", "301", "--value-size", "1500"];
    let urls = nodes.iter().flat_map(|node| ["--url", node.url.as_str()]);
    octokv(small.into_iter().chain(urls).chain(more.iter().copied()))
}

fn results(nodes: &[Server], more: &[&str]) -> Vec<Value> {
    let output = bench(nodes, &[more, &["--json", "-"]].concat());
    let document: Value = serde_json::from_str(output.stdout_ok()).unwrap();
    assert_eq!(document["schema"], "octokv-bench/3");
    assert_eq!(document["settings"]["url"], nodes[0].url.as_str());
    assert_eq!(document["settings"]["urls"].as_array().unwrap().len(), nodes.len());
    document["results"].as_array().unwrap().clone()
}

#[test]
fn several_nodes_hold_every_key_once_and_every_value_verifies() {
    let directory = temp_directory();
    let nodes = nodes(directory.path(), 2);
    let found = results(&nodes, &["--workload", "fillseq,readseq,readrandom,ycsb-a,ycsb-d,ycsb-e,ycsb-f"]);
    for result in &found {
        assert_eq!((&result["operations"], &result["not_found"]), (&301.into(), &0.into()), "{result}");
        let shares = result["targets"].as_array().unwrap();
        assert_eq!(shares.len(), 2);
        let field =
            |name: &str| -> Vec<u64> { shares.iter().map(|one| one[name].as_u64().unwrap()).collect() };
        // Key i is on node i modulo 2; operations and connections are divided likewise.
        assert_eq!((field("operations"), field("threads")), (vec![151, 150], vec![3, 2]));
        for (share, node) in shares.iter().zip(&nodes) {
            assert_eq!(share["url"], node.url.as_str());
            let figure = |name: &str| share[name].as_f64().unwrap();
            assert!(figure("throughput_ops_s") > 0.0 && figure("throughput_mib_s") >= 0.0);
            assert!(figure("latency_us_mean") > 0.0 && figure("latency_us_p99") > 0.0);
        }
    }
    // The even keys are on the first node only, with the values of a run over both.
    for (index, node) in [(300, &nodes[0]), (299, &nodes[1])] {
        let key = format!("{index:016}");
        assert_eq!(node.run(&["exist", &key]).stdout_ok(), "1500\n");
        let other = nodes.iter().find(|other| other.url != node.url).unwrap();
        assert_eq!(other.run(&["exist", &key]).code, 3);
    }
    // One node alone has half of the keys of a run over it, and no wrong one.
    let alone = results(&nodes[..1], &["--workload", "readseq"]);
    assert_eq!((&alone[0]["not_found"], alone[0].get("targets")), (&150.into(), None));
    let wrong = bench(&nodes, &["--workload", "readrandom", "--seed", "2"]);
    assert!(wrong.code == 1 && wrong.stderr.contains("never stored"), "{}", wrong.stderr);
    assert!(wrong.stderr.contains("--url nvme+tcp://"), "{}", wrong.stderr);
}

#[test]
fn the_table_has_a_row_for_each_node_and_a_rate_is_divided() {
    let directory = temp_directory();
    let nodes = nodes(directory.path(), 3);
    let output = bench(&nodes, &["--workload", "fillseq"]);
    let lines: Vec<&str> = output.stdout_ok().lines().collect();
    assert_eq!(lines.len(), 5, "{lines:?}");
    for (line, node) in lines[2..].iter().zip(&nodes) {
        assert!(line.starts_with("  ") && line.ends_with(&node.url), "{line}");
    }
    let held = &results(&nodes, &["--workload", "readrandom", "--rate", "300", "--ops", "90"])[0];
    assert_eq!((&held["rate_ops_s"], &held["operations"]), (&300.0.into(), &90.into()));
    // The last of them starts 87 / 300 s after the first.
    assert!(held["elapsed_s"].as_f64().unwrap() > 0.28, "{held}");
}

#[test]
fn configs_that_cannot_be_split_over_nodes_are_usage_errors() {
    let url = |name: &str, port: u16| format!("nvme+tcp://{name}:{port}/nqn.2026-11.io.octokv:none?nsid=1");
    let (one, two, same) = (url("127.0.0.1", 1), url("127.0.0.1", 2), url("localhost", 1));
    let usage = |urls: &[&str], more: &[&str], part: &str| {
        let urls = urls.iter().flat_map(|url| ["--url", url]);
        octokv(["bench"].into_iter().chain(urls).chain(more.iter().copied())).assert_failed(2, &[part]);
    };
    usage(&[&one, &two, &one], &[], "is given twice");
    usage(&[&one, &two], &["--threads", "1"], "as many threads; there are 1");
    usage(&[&one, &two], &["--num", "1"], "as many keys; there are 1");
    usage(&[&one, &two], &["--ops", "1"], "as many operations; there are 1");
    usage(&[&one, &two], &["--system", "remote-engine"], "several --url are for --system kv");
    usage(&[&one, &two], &["--system", "host-kvs", "--host-kvs-dir", "/tmp"], "are for --system kv");
    // If the name resolves to the address of the other.
    let first = ("localhost", 1).to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    if first == "127.0.0.1:1".parse().ok() {
        usage(&[&one, &same], &[], "same namespace");
    }
}
