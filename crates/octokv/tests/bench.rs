//! `octokv bench` and `octokv demo` through the binary: the report's shape, detection of wrong values, no files left.

use crate::common::{OCTOKV, Server, octokv, temp_directory, without_driver_warning};
use serde_json::Value;
use std::process::Command;

#[test]
fn a_bench_prints_a_table_and_writes_the_document() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let file = directory.path().join("missing/directory/bench.json");
    let arguments = [
        "bench",
        "--workload",
        "fillseq,overwrite,fillrandom,readrandom,deleterandom",
        "--value-size",
        "1000",
        "--threads",
        "3",
        "--depth",
        "4",
        "--num",
        "300",
        "--json",
        file.to_str().unwrap(),
    ];
    let output = server.run(&arguments);
    let names = ["workload", "fillseq", "overwrite", "fillrandom", "readrandom", "deleterandom"];
    let first: Vec<&str> =
        output.stdout_ok().lines().map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(first, names);
    let document: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(document["schema"], "octokv-bench/3");
    assert!(document["command"].as_str().unwrap().contains("--value-size 1000"));
    assert!(document["machine"]["cores"].as_u64().unwrap() > 0);
    assert_eq!(document["settings"]["threads"], 3);
    assert_eq!(document["settings"]["system"], "kv");
    let results = document["results"].as_array().unwrap();
    assert_eq!(results.len(), 5);
    for (result, name) in results.iter().zip(&names[1..]) {
        assert_eq!(result["workload"], *name);
        assert_eq!(result["system"], "kv");
        assert_eq!(result["operations"], 300);
        assert_eq!(result["not_found"], 0);
        let figure = |name: &str| result[name].as_f64().unwrap();
        assert!(figure("throughput_ops_s") > 0.0);
        assert!(figure("latency_us_p50") <= figure("latency_us_p99"));
        assert!(figure("latency_us_p99") <= figure("latency_us_p99_9"));
        assert!(figure("latency_us_p99_9") <= figure("latency_us_max"));
        assert!(figure("latency_us_mean") <= figure("latency_us_max"));
        let mut nested =
            result.as_object().unwrap().iter().filter(|(_, value)| value.is_object() || value.is_array());
        assert!(nested.all(|(name, _)| name == "series"));
    }
}

#[test]
fn a_timed_bench_stops_on_time_and_counts_missing_keys() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let arguments =
        ["bench", "--workload", "readrandom", "--seconds", "0.2", "--warm-up", "0.1", "--json", "-"];
    let output = server.run(&arguments);
    let document: Value = serde_json::from_str(output.stdout_ok()).unwrap();
    let result = &document["results"][0];
    let elapsed = result["elapsed_s"].as_f64().unwrap();
    assert!((0.19..5.0).contains(&elapsed), "{elapsed}");
    assert_eq!(result["operations"], result["not_found"]);
    assert_eq!(document["settings"]["warm_up_s"], 0.1);
}

#[test]
fn a_wrong_value_is_an_error() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let bench = |seed: &str, workload: &str| {
        let fixed = ["bench", "--value-size", "500", "--num", "10", "--ops", "50", "--threads", "2"];
        let flags = ["--seed", seed, "--workload", workload];
        server.run(&fixed.iter().chain(&flags).copied().collect::<Vec<_>>())
    };
    bench("1", "fillseq,readrandom").stdout_ok();
    let wrong = bench("2", "readrandom");
    assert_eq!(wrong.code, 1);
    assert!(wrong.stderr.contains("key 00000000") && wrong.stderr.contains("500 bytes"), "{}", wrong.stderr);
}

#[test]
fn more_queues_or_depth_than_granted_is_rejected_by_name() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let threads = server.run(&["bench", "--threads", "100", "--ops", "1"]);
    assert_eq!(threads.code, 1);
    assert!(threads.stderr.contains("100 threads"), "{}", threads.stderr);
    let depth = server.run(&["bench", "--threads", "1", "--depth", "5000", "--ops", "1"]);
    assert_eq!(depth.code, 1);
    assert!(depth.stderr.contains("depth of 5000"), "{}", depth.stderr);
    assert!(octokv(["bench", "--help"]).stdout_ok().contains("--workload"));
}

#[test]
fn the_demo_shows_every_step_and_leaves_no_files() {
    let directory = temp_directory();
    let output = Command::new(OCTOKV).arg("demo").env("TMPDIR", directory.path()).output().unwrap();
    let (out, err) = (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
    assert!(output.status.success(), "{out}{err}");
    for part in ["put ", "get ", "list ", "killed ", "restart ", "every acknowledged write is there", "p99"] {
        assert!(out.contains(part), "no \"{part}\" in {out}");
    }
    assert_eq!(without_driver_warning(&err), "");
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}
