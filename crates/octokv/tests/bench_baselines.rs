//! `octokv bench --against` through the binary: ratios and the report, no files or processes left, usage errors. Needs
//! `db_bench` and `redis-server` (scripts/install-test-packages).

use crate::common::{OCTOKV, Server, octokv, temp_directory};
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// A directory for the baselines' files, and a small benchmark that uses it.
fn baseline_directory(directory: &Path) -> PathBuf {
    let place = directory.join("peers");
    std::fs::create_dir(&place).unwrap();
    // As in the processes' own view.
    place.canonicalize().unwrap()
}

const SMALL: [&str; 9] = ["bench", "--threads", "3", "--depth", "2", "--num", "300", "--value-size", "1000"];

/// Asserts that the directory is empty and no process works in it.
#[track_caller]
fn assert_clean(place: &Path) {
    assert_eq!(std::fs::read_dir(place).unwrap().count(), 0);
    for process in std::fs::read_dir("/proc").unwrap() {
        let process = process.unwrap().path();
        // A server removes its options from its command line, and its working directory is this one.
        let options = std::fs::read(process.join("cmdline")).unwrap_or_default();
        let works_in = std::fs::read_link(process.join("cwd")).unwrap_or_default();
        let is_of_db = String::from_utf8_lossy(&options).contains(&format!("--db={}", place.display()));
        assert!(!is_of_db && !works_in.starts_with(place), "{}", process.display());
    }
}

#[test]
fn baselines_alternate_with_the_node_and_leave_nothing() {
    let directory = temp_directory();
    let (server, place) = (Server::start(directory.path(), "64MiB"), baseline_directory(directory.path()));
    let file = directory.path().join("document.json");
    let more = ["--workload", "fillseq,readrandom", "--rounds", "2", "--against", "redis,rocksdb"];
    let places = ["--peer-dir", place.to_str().unwrap(), "--json", file.to_str().unwrap()];
    let output = server.run(&[&SMALL, &more[..], &places].concat());
    let text = output.stdout_ok();
    for part in [
        "baseline",
        "medians of 2 rounds",
        "executed as:",
        "--sync=1",
        "--appendfsync always",
        "do not cross a network",
        "(round 2)",
        "not measured",
    ] {
        assert!(text.contains(part), "no \"{part}\" in {text}");
    }
    assert_clean(&place);

    let document: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(document["schema"], "octokv-bench/3");
    let results = document["results"].as_array().unwrap();
    let turns: Vec<_> =
        results.iter().map(|turn| (turn["round"].as_u64().unwrap(), &turn["system"])).collect();
    let systems = ["kv", "redis", "rocksdb"];
    for (at, turn) in turns.iter().enumerate() {
        assert_eq!((turn.0, turn.1.as_str().unwrap()), (1 + at as u64 / 6, systems[at % 3]));
    }
    assert_eq!(turns.len(), 12);
    for result in results {
        assert_eq!((&result["operations"], &result["not_found"]), (&300.into(), &0.into()), "{result}");
        assert!(result["latency_us_p99"].as_f64().unwrap() > 0.0, "{result}");
        let verified = result["workload"] == "readrandom" && result["system"] != "rocksdb";
        assert_eq!(result["verified"], verified, "{result}");
    }
    let comparisons = document["comparisons"].as_array().unwrap();
    assert_eq!(comparisons.len(), 4);
    for comparison in comparisons {
        for figure in ["throughput_ops_s", "latency_us_mean", "latency_us_p99"] {
            let figure = &comparison[figure];
            assert!(
                ["ours", "baseline", "ratio"].iter().all(|side| figure[side].as_f64().unwrap() > 0.0),
                "{figure}"
            );
            assert_eq!(figure["ratios"].as_array().unwrap().len(), 2);
        }
        assert_eq!(
            (&comparison["found"]["ours"], &comparison["found"]["baseline"]),
            (&1.0.into(), &1.0.into())
        );
    }
    let accounts = document["baselines"].as_array().unwrap();
    let embedded: Vec<_> = accounts.iter().map(|one| one["embedded"].as_bool().unwrap()).collect();
    assert_eq!((accounts[0]["baseline"].as_str(), embedded), (Some("redis"), vec![false, true]));
    assert!(accounts.iter().all(|one| one["version"].as_str().unwrap().contains('.')), "{accounts:?}");
    assert_eq!(accounts[1]["as_run"].as_array().unwrap().len(), 3);
}

#[test]
fn rocksdb_alternates_with_a_local_engine_on_equal_terms() {
    let directory = temp_directory();
    let place = baseline_directory(directory.path());
    let device = directory.path().join("device");
    let ours =
        ["--system", "local-engine", "--engine", "lsm", "--size", "128MiB", "--cache", "2MiB", "--path"];
    let all = "fillrandom,fillseq,overwrite,readrandom,readwhilewriting,scanrandom";
    let more = ["--workload", all, "--rounds", "1", "--against", "rocksdb", "--write-rate", "100"];
    let places = [device.to_str().unwrap(), "--json", "-", "--peer-dir", place.to_str().unwrap()];
    let output = octokv(SMALL.iter().chain(&more).chain(&ours).chain(&places));
    let document: Value = serde_json::from_str(output.stdout_ok()).unwrap();
    let results = document["results"].as_array().unwrap();
    assert_eq!(results.len(), 12);
    for pair in results.chunks(2) {
        assert_eq!((&pair[0]["system"], &pair[1]["system"]), (&"local-engine".into(), &"rocksdb".into()));
        assert_eq!((&pair[0]["operations"], &pair[1]["operations"]), (&300.into(), &300.into()));
        let reads =
            pair[0]["workload"].as_str().unwrap().contains("random") && pair[0]["workload"] != "fillrandom";
        assert!(!reads || pair[0]["not_found"] == 0, "{}", pair[0]);
    }
    for scan in &results[10..] {
        let pairs = scan["pairs_read"].as_f64().unwrap();
        assert!((2_500.0..=3_300.0).contains(&pairs), "{scan}");
    }
    let commands = document["baselines"][0]["as_run"].as_array().unwrap();
    for command in commands {
        let command = command.as_str().unwrap();
        let same =
            ["--cache_size=2097152", "--use_direct_reads=1", "--use_direct_io_for_flush_and_compaction=1"];
        assert!(same.iter().all(|option| command.contains(option)), "{command}");
        assert!(command.contains("--write_buffer_size="), "{command}");
    }
    assert_clean(&place);
}

#[test]
fn a_baseline_server_runs_every_workload_without_lists_and_every_value_verifies() {
    let directory = temp_directory();
    let (server, place) = (Server::start(directory.path(), "64MiB"), baseline_directory(directory.path()));
    let all =
        "readrandom,overwrite,readseq,readmissing,ycsb-a,ycsb-d,ycsb-f,deleterandom,readrandom,fillrandom";
    let fixed = ["bench", "--threads", "3", "--depth", "2", "--num", "300", "--value-size", "10..3000"];
    let more = ["--workload", all, "--rounds", "1", "--against", "redis", "--json", "-"];
    server.run(&[&fixed[..], &["--workload", "fillseq"]].concat()).stdout_ok();
    let output = server.run(&[&fixed[..], &more, &["--peer-dir", place.to_str().unwrap()]].concat());
    let document: Value = serde_json::from_str(output.stdout_ok()).unwrap();
    let results = document["results"].as_array().unwrap();
    assert_eq!(results.len(), 20);
    // Both get the same keys, so both find the same ones.
    for pair in results.chunks(2) {
        assert_eq!((&pair[0]["system"], &pair[1]["system"]), (&"kv".into(), &"redis".into()));
        assert_eq!(pair[1]["operations"], 300);
        let exact = ["readrandom", "overwrite", "readseq", "readmissing"].map(Value::from);
        if exact.contains(&pair[0]["workload"]) {
            assert_eq!(pair[0]["not_found"], pair[1]["not_found"], "{pair:?}");
        }
    }
    assert_clean(&place);
}

#[test]
fn a_signal_terminates_the_baselines_and_removes_their_files() {
    let directory = temp_directory();
    let (server, place) = (Server::start(directory.path(), "64MiB"), baseline_directory(directory.path()));
    for against in ["redis", "rocksdb,redis"] {
        let mut child = Command::new(OCTOKV)
            .args(SMALL)
            .args(["--workload", "overwrite", "--rounds", "1000", "--against", against, "--url", &server.url])
            .args(["--peer-dir", place.to_str().unwrap()])
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // The server runs from its first result on.
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().contains(" redis ")));
        assert_eq!(std::fs::read_dir(&place).unwrap().count(), 1);
        let pid = child.id().to_string();
        Command::new("sh").args(["-c", &format!("kill -INT {pid}")]).status().unwrap();
        // Drains its output until the signal ends it.
        lines.for_each(drop);
        assert_eq!(child.wait().unwrap().code(), Some(130));
        assert_clean(&place);
    }
}

#[test]
fn a_failing_baseline_is_reported_with_its_last_output_line() {
    let directory = temp_directory();
    let (server, place) = (Server::start(directory.path(), "64MiB"), baseline_directory(directory.path()));
    let programs = directory.path().join("programs");
    std::fs::create_dir(&programs).unwrap();
    let run = |against: &str| -> Output {
        Command::new(OCTOKV)
            .args(SMALL)
            .args(["--against", against, "--url", &server.url, "--peer-dir", place.to_str().unwrap()])
            .env("PATH", &programs)
            .output()
            .unwrap()
    };
    let failed = |against: &str, parts: &[&str]| {
        let output = run(against);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{stderr}");
        parts.iter().for_each(|part| assert!(stderr.contains(part), "no \"{part}\" in {stderr}"));
        assert_clean(&place);
        String::from_utf8(output.stdout).unwrap()
    };
    // Before anything runs.
    for (peer, program, package) in [
        ("rocksdb", "db_bench", "rocksdb-tools"),
        ("redis", "redis-server", "apt-get install redis-server"),
        ("valkey", "valkey-server", "apt-get install valkey-server"),
    ] {
        assert_eq!(failed(peer, &[&format!("{program} is not installed"), package]), "");
    }
    for program in ["db_bench", "redis-server", "valkey-server"] {
        let path = programs.join(program);
        std::fs::write(&path, "#!/bin/sh\necho out of everything\nexit 7\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
    }
    failed("rocksdb", &["db_bench failed", "out of everything"]);
    failed("redis", &["redis-server failed", "out of everything"]);
    failed("valkey", &["valkey-server failed"]);
    std::fs::write(programs.join("db_bench"), "#!/bin/sh\necho fillrandom : done\n").unwrap();
    failed("rocksdb", &["db_bench printed no result", "fillrandom : done"]);
}

#[test]
fn flags_that_conflict_with_baselines_are_usage_errors() {
    let usage = |flags: &[&str], part: &str| {
        let nowhere = ["bench", "--url", "nvme+tcp://127.0.0.1:1/nqn.2026-11.io.octokv:none?nsid=1"];
        octokv(nowhere.iter().chain(flags)).assert_failed(2, &[part]);
    };
    usage(&["--against", "lmdb"], "rocksdb, redis, valkey");
    usage(&["--against", "redis,redis"], "redis is given twice");
    usage(&["--rounds", "3"], "--rounds is for --against");
    usage(&["--peer-dir", "/tmp"], "--peer-dir is for --against");
    usage(&["--peer-polling", "busy"], "--peer-polling is for --against");
    usage(&["--against", "redis", "--rounds", "0"], "from 1 to");
    usage(&["--against", "redis", "--rates", "5,6"], "not --rates");
    usage(&["--against", "redis", "--svg", "/tmp"], "--svg cannot be combined with --against");
    usage(&["--against", "redis", "--workload", "seekrandom"], "--against redis: --workload seekrandom");
    usage(&["--against", "rocksdb", "--workload", "ycsb-a"], "--against rocksdb: --workload ycsb-a");
    usage(&["--against", "rocksdb", "--rate", "5"], "--against rocksdb: --rate");
    usage(&["--against", "redis", "--peer-dir", "/nowhere/at/all"], "--peer-dir /nowhere/at/all");
    let files = ["--against", "redis", "--system", "host-kvs", "--host-kvs-dir", "/tmp"];
    usage(&files, "--against is for --system kv");
}
