//! Nodes with cores for drives and cores for connections, through the binary.

use crate::common::{OCTOKV, Server, octokv, temp_directory};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Stdio};

const LOAD: [&str; 9] =
    ["bench", "--value-size", "100..3000", "--num", "600", "--threads", "3", "--depth", "8"];

/// A node with its admin socket in a directory. Core 0 is the first for drives: processor 1.
fn start(directory: &Path, devices: &[&str], more: &[&str]) -> (Server, String) {
    let paths: Vec<String> =
        devices.iter().map(|name| directory.join(name).to_str().unwrap().to_owned()).collect();
    let socket = directory.join("admin.sock").to_str().unwrap().to_owned();
    let fixed = ["--size", "32MiB", "--listen", "127.0.0.1:0", "--admin", &socket];
    let cores = ["--cores", "0,1", "--drive-cores", "1"];
    let flags = paths.iter().flat_map(|path| ["--device", path]);
    let arguments: Vec<&str> =
        fixed.into_iter().chain(cores).chain(flags).chain(more.iter().copied()).collect();
    (Server::start_with(directory, &arguments), socket)
}

#[test]
fn every_engine_serves_through_cores_for_drives() {
    for engine in ["hash", "lsm", "log"] {
        for devices in [&["a"][..], &["a", "b", "c"]] {
            let directory = temp_directory();
            let (server, _) = start(directory.path(), devices, &["--engine", engine]);
            let workloads = ["--workload", "fillseq,ycsb-a,ycsb-f,readrandom,readmissing,deleteseq"];
            server.run(&[&LOAD[..], &workloads].concat()).stdout_ok();
            server.put("key", "value");
            server.assert_value("key", "value");
            assert_eq!(server.run(&["list"]).stdout_ok(), "key\n");
            if engine == "lsm" {
                assert_eq!(server.run(&["scan"]).stdout_ok(), "key\tvalue\n");
            }
            server.stop();
        }
    }
}

#[test]
fn requests_of_all_connections_are_executed_on_the_cores_for_drives() {
    for engine in ["hash", "lsm", "log"] {
        let directory = temp_directory();
        let (server, socket) = start(directory.path(), &["a", "b"], &["--engine", engine]);
        let load =
            [&LOAD[..], &["--workload", "fillseq,ycsb-a", "--seconds", "2", "--url", &server.url]].concat();
        let mut bench = Command::new(OCTOKV).args(load).stdout(Stdio::null()).spawn().unwrap();
        let mut received = 0;
        let ended = loop {
            let stats = octokv(["stats", "--json", "--admin", &socket]);
            let interval: Value = serde_json::from_str(stats.stdout_ok()).unwrap();
            let of = |core: usize, field: &str| interval["cores"][core][field].as_u64().unwrap();
            // Core 0 has the drives, core 1 the connections.
            assert_eq!((of(0, "requests"), of(0, "offloaded"), of(1, "executed_for_others")), (0, 0, 0));
            // Requests count when they end, and at most 24 are in progress.
            assert!(of(1, "requests") <= of(1, "offloaded") + 24, "{interval}");
            received += of(0, "executed_for_others");
            if let Some(ended) = bench.try_wait().unwrap() {
                break ended;
            }
        };
        assert!(ended.success(), "{ended}");
        assert!(received > 600, "{received} requests on the core for drives");
        server.stop();
    }
}

#[test]
fn impossible_roles_are_refused() {
    let refused = |cores: &str, drive_cores: &str, parts: &[&str]| {
        let fixed =
            ["serve", "--device", "memory", "--size", "32MiB", "--listen", "127.0.0.1:0", "--admin", "none"];
        let roles = ["--cores", cores, "--drive-cores", drive_cores];
        octokv(fixed.into_iter().chain(roles)).assert_failed(2, &[&["drive_cores"][..], parts].concat());
    };
    refused("0", "1", &["core 1 is not one of cores"]);
    refused("0,1", "1,1", &["core 1 is listed twice"]);
    refused("0,1", "1,0", &["at least one of cores has to be left for connections"]);
}
