//! Scheduling of a running node through the binary: settings apply, persist and are visible; invalid ones are rejected.

use crate::common::{CommandOutput, OCTOKV, Server, octokv, serve_expecting_failure, temp_directory};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

const TENANT: &str = "nqn.2026-11.io.example:tenant";

/// A node on two cores, with its admin socket in a directory.
struct Node {
    server: Server,
    socket: PathBuf,
}

impl Node {
    fn start(directory: &Path, more: &[&str]) -> Node {
        let (device, socket) = (directory.join("device"), directory.join("admin.sock"));
        let fixed = ["--size", "64MiB", "--listen", "127.0.0.1:0", "--device", device.to_str().unwrap()];
        let admin = ["--cores", "0,1", "--admin", socket.to_str().unwrap()];
        let arguments: Vec<&str> = fixed.iter().chain(&admin).chain(more).copied().collect();
        Node { server: Server::start_with(directory, &arguments), socket }
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        octokv(arguments.iter().copied().chain(["--admin", self.socket.to_str().unwrap()]))
    }

    fn scheduling(&self) -> Value {
        serde_json::from_str(self.run(&["sched", "show", "--json"]).stdout_ok()).unwrap()
    }

    fn interval(&self) -> Value {
        serde_json::from_str(self.run(&["stats", "--json"]).stdout_ok()).unwrap()
    }
}

/// A number of each entry of a list.
fn numbers(interval: &Value, list: &str, field: &str) -> Vec<f64> {
    interval[list].as_array().unwrap().iter().map(|entry| entry[field].as_f64().unwrap()).collect()
}

#[test]
fn settings_apply_at_once_and_survive_a_kill() {
    let directory = temp_directory();
    let mut node = Node::start(directory.path(), &[]);
    assert_eq!(
        (&node.scheduling()["policy"], &node.scheduling()["interval_ms"]),
        (&"none".into(), &1000.into())
    );
    node.run(&["sched", "set", "--policy", "hybrid", "--window-ms", "20"]).stdout_ok();
    node.run(&["sched", "set", "--overload", "0.25"]).stdout_ok();
    node.run(&["sched", "host", TENANT, "--weight", "4"]).stdout_ok();
    node.run(&["sched", "host", TENANT, "--operations-per-s", "5000"]).stdout_ok();
    let set = node.scheduling();
    assert_eq!(
        (&set["hosts"][TENANT]["weight"], &set["hosts"][TENANT]["operations_per_s"]),
        (&4.into(), &5000.into())
    );
    assert!(
        node.run(&["sched", "show"])
            .stdout_ok()
            .contains(&format!("host {TENANT}: weight 4, operations_per_s 5000"))
    );
    let held = |set: &Value| (set["policy"].clone(), set["interval_ms"].clone(), set["overload"].clone());
    assert_eq!(held(&set), ("hybrid".into(), 20.into(), 0.25.into()));
    assert!(
        node.run(&["sched", "show"])
            .stdout_ok()
            .lines()
            .any(|line| line.split_whitespace().eq(["interval_ms", "20"]))
    );
    node.server.kill();
    let node = Node::start(directory.path(), &[]);
    assert_eq!(node.scheduling(), set);
}

#[test]
fn invalid_settings_are_rejected_with_the_valid_range_and_change_nothing() {
    let directory = temp_directory();
    let node = Node::start(directory.path(), &[]);
    let before = node.scheduling();
    for (arguments, parts) in [
        (&["--policy", "hybird"][..], &["\"hybird\"", "\"hybrid\"", "round-robin"][..]),
        (&["--window-ms", "9"], &["interval", "10 ms to 60 s"]),
        (&["--overload", "1.01"], &["overload", "0", "1"]),
        (&["--overload", "NaN"], &["overload"]),
        (&["--policy", "fair", "--in-flight", "0"], &["in_flight", "1 to 4096"]),
        (&["--move-flows", "some"], &["migrate_tenants", "dense"]),
        (&["--held-max-us", "18446744073709551615"], &["held_max"]),
        (&[], &["no setting given"]),
    ] {
        let arguments: Vec<&str> = ["sched", "set"].iter().chain(arguments).copied().collect();
        node.run(&arguments).assert_failed(2, parts);
    }
    node.run(&["sched", "host", TENANT, "--weight", "1001"]).assert_failed(2, &["weight", "1 to 1000"]);
    node.run(&["sched", "host", TENANT]).assert_failed(2, &["no setting given"]);
    node.run(&["sched", "host", "tenant", "--weight", "2"]).assert_failed(2, &["nqn"]);
    assert_eq!(node.scheduling(), before);
    let config = directory.path().join("config");
    std::fs::write(&config, "sched = { policy = \"automatic\" }\n").unwrap();
    let other = directory.path().join("other");
    serve_expecting_failure(&other, &["--config", config.to_str().unwrap()])
        .assert_failed(2, &["sched", "automatic", "auto"]);
    std::fs::write(&config, "sched = { polcy = \"auto\" }\n").unwrap();
    serve_expecting_failure(&other, &["--config", config.to_str().unwrap()]).assert_failed(2, &["polcy"]);
    assert!(!other.exists());
}

#[test]
fn requests_migrate_to_an_idle_core_and_every_one_completes() {
    let directory = temp_directory();
    let config = directory.path().join("config");
    let text = "sched = { policy = \"proportional\", interval_ms = 50, overload = 0.0, imbalance_difference = 0.0 }\n";
    std::fs::write(&config, text).unwrap();
    let node = Node::start(directory.path(), &["--config", config.to_str().unwrap()]);
    assert_eq!(node.scheduling()["policy"], "proportional");
    // One connection: all requests arrive on one core, and every value read is verified.
    let url = node.server.url.as_str();
    let load = [
        "bench",
        "--url",
        url,
        "--workload",
        "fillseq,overwrite,readrandom",
        "--num",
        "500",
        "--seconds",
        "2",
    ];
    let more = ["--value-size", "2000", "--threads", "1", "--depth", "32", "--host-nqn", TENANT];
    let mut bench = Command::new(OCTOKV).args(load).args(more).stdout(Stdio::null()).spawn().unwrap();
    let mut migrated: Vec<Value> = Vec::new();
    let ended = loop {
        let interval = node.interval();
        let moved: f64 = numbers(&interval, "cores", "offloaded").iter().sum();
        let tenant = &interval["tenants"][0];
        // The interval after the tenant disconnected reports it as gone.
        if moved > 0.0 && tenant["migrates"] == true && tenant["host"] == TENANT {
            migrated.push(interval);
        }
        if let Some(ended) = bench.try_wait().unwrap() {
            break ended;
        }
    };
    assert!(ended.success(), "{ended}");
    assert!(!migrated.is_empty(), "no requests migrated within six seconds");
    for interval in &migrated {
        assert_eq!(interval["policy"], "proportional");
        assert!(numbers(interval, "cores", "utilisation").iter().all(|&part| (0.0..=1.0).contains(&part)));
    }
    // A core that the machine gave no time executes what it was sent in a later interval.
    let is_executed = |interval: &Value| {
        let sender = numbers(interval, "cores", "offloaded").iter().position(|&moved| moved > 0.0).unwrap();
        numbers(interval, "cores", "executed_for_others")[1 - sender] > 0.0
            && interval["action"] == "balance"
            && interval["natural_load_balance"].as_f64().unwrap() < 0.5
    };
    assert!(migrated.iter().any(is_executed), "{migrated:?}");
    node.run(&["sched", "set", "--policy", "none"]).stdout_ok();
    assert_eq!(node.scheduling()["policy"], "none");
    node.server.stop();
}

/// The requests by core of a load, while it runs: the sums of the sampling intervals that were read, each once. Begins after
/// the interval `last` and ends with one that began after the load, whose number it returns too.
fn requests_of(node: &Node, load: &mut Child, mut last: u64) -> ([f64; 2], u64) {
    let (mut requests, mut first_without) = ([0.0; 2], None);
    loop {
        if first_without.is_none() && load.try_wait().unwrap().is_some() {
            // The last complete interval is followed by the current one, in which the load ended.
            first_without = Some(interval_number(&node.interval()) + 2);
        }
        let interval = node.interval();
        let number = interval_number(&interval);
        if first_without.is_some_and(|first| number >= first) {
            return (requests, number);
        }
        if number > last {
            let cores = numbers(&interval, "cores", "requests");
            requests.iter_mut().zip(cores).for_each(|(sum, requests)| *sum += requests);
            last = number;
        }
    }
}

fn interval_number(interval: &Value) -> u64 {
    interval["number"].as_u64().unwrap()
}

#[test]
fn single_queue_hosts_are_assigned_to_cores_in_turn() {
    let directory = temp_directory();
    let node = Node::start(directory.path(), &[]);
    node.run(&["sched", "set", "--window-ms", "100"]).stdout_ok();
    let (mut cores, mut last) = (Vec::new(), interval_number(&node.interval()));
    for _ in 0..4 {
        let load = ["bench", "--url", &node.server.url, "--workload", "fillseq", "--num", "50"];
        let more = ["--value-size", "100", "--threads", "1", "--seconds", "1"];
        let mut bench = Command::new(OCTOKV).args(load).args(more).stdout(Stdio::null()).spawn().unwrap();
        let (requests, number) = requests_of(&node, &mut bench, last);
        last = number;
        cores.push(
            requests.iter().position(|&sum| sum > 0.0).expect("no requests in the intervals of a second"),
        );
        assert!(requests.contains(&0.0), "on one core only: {requests:?}");
    }
    assert_eq!(cores, [0, 1, 0, 1]);
}

#[test]
fn stats_are_printed_once_without_a_terminal() {
    let directory = temp_directory();
    let node = Node::start(directory.path(), &[]);
    let output = node.run(&["stats"]);
    let table = output.stdout_ok();
    assert!(table.starts_with("interval ") && table.contains("policy none: nothing"), "{table}");
    assert_eq!(
        table.lines().filter(|line| line.starts_with(['0', '1'])).count(),
        2,
        "a line for each core: {table}"
    );
    octokv(["stats", "--once", "--admin", "/nowhere/at/all"]).assert_failed(1, &["/nowhere/at/all"]);
}
