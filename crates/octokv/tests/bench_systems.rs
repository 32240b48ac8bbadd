//! `octokv bench --system` through the binary: a local engine on a node's blocks and on files.

use crate::common::{CommandOutput, Server, octokv, temp_directory};
use serde_json::Value;
use std::path::Path;

/// A node with the block namespace 2; returns the URLs of both namespaces.
fn node(directory: &Path) -> (Server, String) {
    let (device, socket) = (directory.join("device"), directory.join("admin.sock"));
    let blocks = directory.join("blocks");
    let fixed = ["--size", "64MiB", "--listen", "127.0.0.1:0", "--device", device.to_str().unwrap()];
    let admin = ["--admin", socket.to_str().unwrap()];
    let arguments: Vec<&str> = fixed.iter().chain(&admin).copied().collect();
    let server = Server::start_with(directory, &arguments);
    let add = ["ns", "add", "--kind", "block", "--size", "128MiB", "--device", blocks.to_str().unwrap()];
    octokv(add.iter().chain(&admin)).stdout_ok();
    let url = server.url.replace("nsid=1", "nsid=2");
    (server, url)
}

const SMALL: [&str; 9] = ["bench", "--threads", "3", "--depth", "2", "--num", "200", "--value-size", "6000"];

fn bench(more: &[&str]) -> CommandOutput {
    octokv(SMALL.iter().chain(more))
}

/// The results of a successful run with the report on standard output.
fn results(output: &CommandOutput) -> Vec<Value> {
    let document: Value = serde_json::from_str(output.stdout_ok()).unwrap();
    assert_eq!(document["schema"], "octokv-bench/3");
    let results = document["results"].as_array().unwrap().clone();
    assert!(results.iter().all(|result| result["system"] == document["settings"]["system"]));
    results
}

/// Runs every workload on a system: each is in the table, all keys are found and verified.
fn runs_every_workload(system: &str, place: &[&str]) {
    let all = "fillseq,overwrite,fillrandom,readrandom,deleterandom";
    let run = |workload, more: &[&str]| {
        let fixed = ["--system", system, "--workload", workload];
        bench(&[&fixed, place, more].concat())
    };
    let output = run(all, &[]);
    for line in output.stdout_ok().lines().skip(1) {
        assert_eq!(line.split_whitespace().nth(1), Some(system), "{line}");
    }
    assert_eq!(output.text().lines().count(), 6);
    // The data is there at the next run.
    let results_of = |workload, more: &[&str]| results(&run(workload, &[&["--json", "-"], more].concat()));
    for (result, name) in results_of("fillseq,readrandom", &[]).iter().zip(["fillseq", "readrandom"]) {
        assert_eq!((&result["workload"], &result["system"]), (&name.into(), &system.into()));
        assert_eq!((result["operations"].as_u64(), result["not_found"].as_u64()), (Some(200), Some(0)));
    }
    for result in results_of("ycsb-a,ycsb-b,ycsb-c,ycsb-d,ycsb-f,ycsb-w,readseq", &[]) {
        assert_eq!((result["operations"].as_u64(), result["not_found"].as_u64()), (Some(200), Some(0)));
    }
    assert_eq!(results_of("readmissing", &[])[0]["not_found"].as_u64(), Some(200));
    let again = results_of("readrandom", &[]);
    assert_eq!((again[0]["not_found"].as_u64(), again[0]["verified"].as_bool()), (Some(0), Some(true)));
    let wrong = run("readrandom", &["--seed", "2"]);
    assert!(wrong.code == 1 && wrong.stderr.contains("6000 bytes"), "{}", wrong.stderr);
    let formatted = results_of("readrandom", &["--format"]);
    assert_eq!(formatted[0]["not_found"].as_u64(), Some(200));
}

#[test]
fn the_client_side_engine_runs_every_workload_on_remote_blocks() {
    let directory = temp_directory();
    let (_server, url) = node(directory.path());
    runs_every_workload("remote-engine", &["--url", &url]);
    let device = ["--system", "remote-engine", "--durability", "device", "--json", "-", "--url", &url];
    assert_eq!(results(&bench(&device)).len(), 2);
}

#[test]
fn the_client_side_engine_runs_every_workload_on_files() {
    let directory = temp_directory();
    let place = directory.path().to_str().unwrap();
    runs_every_workload("host-kvs", &["--host-kvs-dir", place, "--host-kvs-files", "2"]);
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 2);
}

#[test]
fn the_local_engines_run_every_workload_on_a_file() {
    let directory = temp_directory();
    for engine in ["hash", "lsm", "log"] {
        let path = directory.path().join(engine);
        let place = ["--path", path.to_str().unwrap(), "--size", "128MiB", "--engine", engine];
        runs_every_workload("local-engine", &[&place[..], &["--cores", "0,0"]].concat());
        let more = ["--workload", "fillseq,readwhilewriting", "--write-rate", "100", "--json", "-"];
        let local = ["--system", "local-engine", "--durability", "device"];
        let beside = results(&bench(&[&local[..], &["--cache", "1MiB"], &place, &more].concat()));
        assert_eq!((&beside[1]["operations"], &beside[1]["not_found"]), (&200.into(), &0.into()));
    }
    let path = directory.path().join("lsm");
    let place = ["--system", "local-engine", "--path", path.to_str().unwrap(), "--json", "-"];
    let scans = ["--engine", "lsm", "--workload", "fillseq,scanrandom,ycsb-e", "--scan-length", "5"];
    for result in &results(&bench(&[&place[..], &scans].concat()))[1..] {
        assert!(result["pairs_read"].as_u64().unwrap() >= 800 && result["verified"] == true, "{result}");
    }
    let other = bench(&place);
    assert!(other.code == 1 && other.stderr.contains("lsm"), "{}", other.stderr);
}

#[test]
fn rocksdb_in_this_process_runs_workloads_and_keeps_other_files() {
    let directory = temp_directory();
    let path = directory.path().join("database");
    let place = ["--system", "rocksdb", "--path", path.to_str().unwrap(), "--memory", "4MiB"];
    let ycsb = ["--workload", "fillseq,ycsb-a,ycsb-d,ycsb-f,ycsb-w", "--json", "-"];
    for result in &results(&bench(&[&place[..], &ycsb].concat())) {
        assert_eq!((&result["system"], &result["not_found"]), (&"rocksdb".into(), &0.into()), "{result}");
        assert!(result["cpu_us_per_operation"].as_f64().unwrap() > 0.1, "{result}");
        assert!(result["resident_bytes_peak"].as_u64().unwrap() > 1 << 20, "{result}");
    }
    let read = ["--workload", "readrandom", "--json", "-"];
    let kept = bench(&[&place[..], &read].concat());
    assert_eq!(results(&kept)[0]["not_found"], 0);
    let document: Value = serde_json::from_str(kept.stdout_ok()).unwrap();
    let options = document["settings"]["rocksdb_options"].as_str().unwrap();
    assert!(
        options.contains("capacity=2097152") && document["settings"]["durability"] == "flush",
        "{options}"
    );
    let emptied = bench(&[&place[..], &read, &["--format", "--no-sync"]].concat());
    assert!(results(&emptied)[0]["not_found"].as_u64().unwrap() > 0);
    let more = bench(&[&place[..], &read, &["--rocksdb-options", "nothing=1"]].concat());
    assert!(more.code == 1 && more.stderr.contains("nothing"), "{}", more.stderr);

    std::fs::write(directory.path().join("notes"), "mine").unwrap();
    let parent = directory.path().to_str().unwrap();
    let foreign = bench(&["--system", "rocksdb", "--path", parent, "--format"]);
    assert!(foreign.code == 1 && foreign.stderr.contains("other files"), "{}", foreign.stderr);
    assert!(directory.path().join("notes").is_file() && path.join("CURRENT").is_file());
}

#[test]
fn an_engine_on_files_reports_its_time_in_system_calls() {
    let directory = temp_directory();
    let place = directory.path().to_str().unwrap();
    let host = ["--system", "host-kvs", "--host-kvs-dir", place, "--host-kvs-files", "1", "--json", "-"];
    let all = results(&bench(&host));
    let spent = |of: &Value, name: &str| of[format!("file_{name}_us_mean")].as_f64().unwrap();
    let names = ["wait", "read", "write", "sync"];
    for result in &all {
        let parts: f64 = names.iter().map(|name| spent(result, name)).sum();
        // Latencies have three significant digits.
        assert!(parts <= result["latency_us_mean"].as_f64().unwrap() * 1.002, "{result}");
    }
    let [put, get] = &all[..] else { panic!("two workloads") };
    assert!(spent(put, "write") > 0.0 && spent(put, "sync") > 0.0, "{put}");
    assert!(spent(put, "wait") > spent(put, "sync"), "six streams wait for one file: {put}");
    assert!(spent(get, "read") > 0.0, "{get}");
    assert_eq!([spent(get, "wait"), spent(get, "write"), spent(get, "sync")], [0.0; 3]);

    let (server, _) = node(directory.path());
    let keys = results(&bench(&["--json", "-", "--url", &server.url]));
    assert!(names.iter().all(|name| keys[0][format!("file_{name}_us_mean")].is_null()));
}

#[test]
fn a_system_rejects_a_namespace_of_the_other_kind() {
    let directory = temp_directory();
    let (server, url) = node(directory.path());
    let blocks = bench(&["--url", &url]);
    assert!(blocks.code == 1 && blocks.stderr.contains("holds blocks"), "{}", blocks.stderr);
    let keys = bench(&["--system", "remote-engine", "--url", &server.url]);
    assert!(keys.code == 1 && keys.stderr.contains("holds keys and values"), "{}", keys.stderr);
    octokv(["get", "k", "--url", &url]).assert_failed(1, &["holds blocks"]);
}

#[test]
fn foreign_data_is_kept_unless_format_is_given() {
    let directory = temp_directory();
    let (_server, url) = node(directory.path());
    let client = octokv_client::blocking::BlockingClient::connect(&url).unwrap();
    let theirs = vec![0x5a; 3 * 4096];
    client.write_blocks(0, &theirs).unwrap();
    let foreign = bench(&["--system", "remote-engine", "--url", &url]);
    let stderr = &foreign.stderr;
    assert!(
        foreign.code == 1 && stderr.contains("something else") && stderr.contains("--format"),
        "{stderr}"
    );
    assert_eq!(client.read_blocks(0, 3), Ok(theirs));
    bench(&["--system", "remote-engine", "--url", &url, "--format"]).stdout_ok();

    let file = directory.path().join("octokv-host-kvs-0.db");
    std::fs::write(&file, vec![0x5a; 256 << 20]).unwrap();
    let place = directory.path().to_str().unwrap();
    let host = ["--system", "host-kvs", "--host-kvs-dir", place, "--host-kvs-files", "1"];
    let foreign = bench(&host);
    let stderr = &foreign.stderr;
    assert!(foreign.code == 1 && stderr.contains("octokv-host-kvs-0.db"), "{stderr}");
    assert!(std::fs::read(&file).unwrap().iter().all(|&byte| byte == 0x5a));
}

#[test]
fn flags_of_another_system_are_usage_errors() {
    let usage = |more: &[&str], part: &str| bench(more).assert_failed(2, &[part]);
    usage(&["--format"], "--format is for");
    usage(&["--durability", "device"], "--durability is for");
    usage(&["--host-kvs-dir", "/tmp"], "--host-kvs-dir is for");
    usage(&["--system", "host-kvs"], "--host-kvs-dir DIR");
    let local_flags = [
        ["--size", "1GiB"],
        ["--engine", "lsm"],
        ["--cache", "1GiB"],
        ["--partitions", "4"],
        ["--unit", "512"],
    ];
    for flag in &local_flags {
        usage(flag, "is for --system local-engine");
    }
    for flag in [["--path", "/tmp/x"], ["--memory", "1GiB"]] {
        usage(&flag, "is for --system local-engine or rocksdb");
    }
    usage(&["--no-sync"], "--no-sync is for --system rocksdb");
    usage(&["--rocksdb-options", "x=1"], "--rocksdb-options is for --system rocksdb");
    usage(&["--system", "rocksdb"], "--system rocksdb needs --path DIR");
    usage(&["--system", "rocksdb", "--path", "/tmp/x", "--memory", "7"], "--memory: must be at least 1MiB");
    usage(&["--system", "rocksdb", "--path", "/tmp/x", "--workload", "ycsb-e"], "lists of keys are for");
    let beside = ["--system", "rocksdb", "--path", "/tmp/x", "--workload", "readwhilewriting"];
    usage(&beside, "--against rocksdb");
    let local = |more: &[&str], part| usage(&[&["--system", "local-engine"], more].concat(), part);
    local(&[], "needs --path FILE");
    let on_path = |more: &[&str], part| local(&[&["--path", "/tmp/x"], more].concat(), part);
    on_path(&["--workload", "scanrandom"], "scans are for --system kv");
    on_path(&["--workload", "ycsb-e"], "lists of keys are for");
    on_path(&["--workload", "seekrandom", "--engine", "lsm"], "lists of keys are for");
    on_path(&["--cache", "7"], "at least 1MiB");
    on_path(&["--engine", "log", "--workload", "scanrandom"], "scans are for --system kv");
    on_path(&["--engine", "log", "--chunk-bytes", "12KiB"], "--chunk-bytes: must be a power of two");
    on_path(&["--unit", "8192"], "--unit: must be 512, 1024, 2048 or 4096, or auto");
    on_path(&["--engine", "log", "--partitions", "0"], "--partitions: must be at least 1");
    on_path(&["--chunk-bytes", "1MiB"], "are for --engine log");
    on_path(&["--partitions", "4", "--engine", "lsm"], "are for --engine log");
    on_path(&["--against", "redis"], "--against redis is for --system kv");
    on_path(&["--against", "rocksdb", "--engine", "lsm"], "needs --cache");
    usage(&["--system", "host-kvs", "--workload", "readwhilewriting"], "one writer");
    usage(&["--system", "remote-engine", "--workload", "scanrandom"], "scans are for");
    usage(&["--system", "host-kvs", "--rate", "5"], "--rate is for --system kv");
    usage(&["--system", "remote-engine", "--rates", "5,6"], "--rates is for --system kv");
    usage(&["--system", "remote-engine", "--workload", "seekrandom"], "seekrandom");
    usage(&["--system", "host-kvs", "--workload", "fillseq,ycsb-e"], "ycsb-e: lists of keys are for");
    usage(&["--system", "host-kvs", "--host-kvs-dir", "/tmp", "--host-kvs-files", "0"], "from 1 to");
    usage(&["--system", "remote-engine", "--client-cores", "0,1"], "one core");
    let missing = ["--system", "host-kvs", "--host-kvs-dir", "/nowhere/at/all"];
    let output = bench(&missing);
    assert!(output.code == 1 && output.stderr.contains("/nowhere/at/all"), "{}", output.stderr);
}
