//! `octokv calibrate`: what it prints, writes and leaves behind, and that a node and its hosts use the costs.

use crate::common::{CommandOutput, Server, octokv, temp_directory};
use octokv_client::{ClientConfig, Session, Url};
use octokv_runtime::KernelSockets;
use octokv_sys::clock;
use octokv_wire::device_log::{DeviceLog, LoggedCost};
use serde_json::Value;
use std::net::ToSocketAddrs;
use std::path::Path;

const SHORT: [&str; 9] = ["calibrate", "--seconds", "0.1", "--rounds", "2", "--num", "1000", "--depth", "32"];

fn calibrate(path: &Path, more: &[&str]) -> CommandOutput {
    octokv([&SHORT[..], &["--size", "128MiB", "--path", path.to_str().unwrap()], more].concat())
}

#[test]
fn each_engine_is_calibrated_on_a_file_that_is_removed() {
    let directory = temp_directory();
    let (device, costs) = (directory.path().join("device"), directory.path().join("new/costs.json"));
    for engine in ["hash", "lsm", "log"] {
        let json = ["--engine", engine, "--json", costs.to_str().unwrap()];
        let output = calibrate(&device, &json);
        assert_eq!(output.code, 0, "{}", output.stderr);
        assert!(!device.exists());
        let written: Value = serde_json::from_slice(&std::fs::read(&costs).unwrap()).unwrap();
        assert_eq!(
            (&written["get"]["tokens"], &written["schema"]),
            (&16.into(), &"octokv-token-costs/1".into())
        );
        let measured = &written["calibration"];
        assert_eq!((&measured["engine"], &measured["keys"]), (&engine.into(), &1000.into()));
        for kind in ["put", "delete"] {
            let number = |field: &str| measured[kind][field].as_f64().unwrap();
            assert!(number("operations") >= 2.0 && number("seconds") > 0.0, "{measured}");
            assert!(number("ratio_min") <= number("ratio") && number("ratio") <= number("ratio_max"));
            let tokens = (number("ratio") * 16.0).round().clamp(1.0, 32767.0);
            assert_eq!(written[kind]["tokens"].as_f64(), Some(tokens), "{engine} {kind}");
            let line = output.text().lines().find(|line| line.starts_with(kind)).unwrap();
            let operations = measured[kind]["operations"].to_string();
            assert!(line.split_whitespace().any(|word| word == operations), "{line}");
        }
    }
    let to_stdout = calibrate(&device, &["--json", "-", "--durability", "device", "--value-size", "5000"]);
    let written: Value = serde_json::from_str(to_stdout.text()).unwrap();
    assert_eq!(written["calibration"]["durability"], "device");
    let of = |kind: &str| (written["calibration"][kind]["ratio"].as_f64().unwrap(), &written[kind]["tokens"]);
    let (ratio, tokens) = of("delete");
    // A get of 5000 bytes costs two of 4 KiB.
    assert_eq!(tokens.as_f64(), Some((ratio * 32.0).round().clamp(1.0, 32767.0)));
}

#[test]
fn a_device_that_exists_is_left_as_it_is_unless_it_may_be_formatted() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let server = Server::start(directory.path(), "128MiB");
    server.put("key", "value");
    calibrate(&device, &["--format"]).assert_failed(1, &["device", "in use"]);
    server.stop();
    calibrate(&device, &[]).assert_failed(1, &["exists and was left unchanged", "--format"]);
    let check = || octokv(["check", "--device", device.to_str().unwrap()]);
    assert!(check().stdout_ok().contains("keys      1"), "{}", check().text());
    let calibrated = calibrate(&device, &["--format"]);
    assert_eq!(calibrated.code, 0, "{}", calibrated.stderr);
    assert!(device.exists());
    // Records are left, and no superblock that would make a volume of them.
    let left = check();
    assert!(left.code == 1 && left.stderr.contains("it is not formatted"), "{}", left.stderr);
}

#[test]
fn flags_out_of_range_are_refused_and_no_file_is_left() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    for (flags, part) in [
        (["--value-size", "2GiB"], "--value-size: must be at most 1GiB"),
        (["--depth", "0"], "--depth: must be from 1 to 16384"),
        (["--rounds", "0"], "--rounds: must be from 1 to 1000"),
        (["--seconds", "0"], "--seconds: must be from 0.01 to 3600"),
        (["--seconds", "NaN"], "finite"),
        (["--num", "0"], "--num: must be at least 1"),
        (["--json", "/proc/none/costs"], "--json /proc/none/costs: cannot be written"),
    ] {
        let path = ["calibrate", "--path", device.to_str().unwrap()];
        octokv([&path[..], &flags].concat()).assert_failed(2, &[part]);
    }
    // More keys than the device has space for.
    let full = calibrate(&device, &["--value-size", "1MiB"]);
    full.assert_failed(1, &["filluniquerandom"]);
    assert!(!device.exists());
}

/// The log page of devices and tokens, as a host reads it.
fn device_log(url: &str) -> DeviceLog {
    let url: Url = url.parse().unwrap();
    let address = (url.host.as_str(), url.port).to_socket_addrs().unwrap().next().unwrap();
    let config = ClientConfig {
        subsystem_nqn: url.subsystem.clone(),
        namespace: url.namespace,
        flow_control: true,
        ..ClientConfig::default()
    };
    let mut session = Session::new(KernelSockets::new().unwrap(), address, config, clock::now());
    while !session.is_live() {
        session.poll(clock::now(), |_, _| ());
        assert!(session.ended().is_none(), "{:?}", session.ended());
    }
    DeviceLog::clone(session.controller_info().unwrap().device_log.as_ref().unwrap())
}

#[test]
fn the_costs_of_a_file_are_those_of_every_namespace_and_of_hosts() {
    let directory = temp_directory();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let costs = path("costs.json");
    let text = |put: &str| {
        format!(
            r#"{{"schema": "octokv-token-costs/1", "get": {{"tokens": 16, "tokens_per_4k": 9}},
                "put": {put}, "delete": {{"tokens": 11, "tokens_per_4k": 1}}}}"#
        )
    };
    std::fs::write(&costs, text(r#"{"tokens": 90, "tokens_per_4k": 23}"#)).unwrap();
    let (a, b, c, d, admin, state) =
        (path("a"), path("b"), path("c"), path("d"), path("admin.sock"), path("state"));
    let admin = ["--admin", &admin];
    let fixed =
        ["--device", &a, "--device", &b, "--size", "32MiB", "--listen", "127.0.0.1:0", "--state", &state];
    let tokens = ["--device-tokens", "--token-costs", &costs];
    let start = || Server::start_with(directory.path(), &[&fixed[..], &admin, &tokens].concat());
    let server = start();
    let add = ["ns", "add", "--kind", "kv", "--size", "32MiB", "--device", &c, "--device", &d];
    octokv([&add[..], &admin].concat()).stdout_ok();
    let assert_costs = |server: &Server| {
        for url in [server.url.clone(), server.url.replace("nsid=1", "nsid=2")] {
            let log = device_log(&url);
            assert_eq!(log.devices.len(), 2);
            for device in log.devices {
                assert_eq!(device.get, LoggedCost { tokens: 16, tokens_per_4k: 9 });
                assert_eq!(device.put, LoggedCost { tokens: 90, tokens_per_4k: 23 });
                assert_eq!(device.delete, LoggedCost { tokens: 11, tokens_per_4k: 1 });
            }
        }
    };
    assert_costs(&server);
    let stats = octokv([&["stats", "--json"], &admin[..]].concat());
    let stats: Value = serde_json::from_str(stats.stdout_ok()).unwrap();
    let devices = stats["devices"].as_array().unwrap();
    assert_eq!(devices.len(), 4);
    for device in devices {
        assert_eq!(
            (&device["tokens"]["put_cost"], &device["tokens"]["delete_cost"]),
            (&90.into(), &11.into())
        );
    }
    server.stop();
    let server = start();
    assert_costs(&server);
    server.stop();

    let serve = |more: &[&str]| octokv([&["serve"], &fixed[..], &admin, more].concat());
    std::fs::write(&costs, text(r#"{"tokens": -1, "tokens_per_4k": 23}"#)).unwrap();
    serve(&tokens)
        .assert_failed(2, &["costs.json: put.tokens is -1; must be a whole number from 1 to 32767"]);
    std::fs::write(&costs, text(r#"{"tokens": 1, "bytes": 23}"#)).unwrap();
    serve(&tokens).assert_failed(2, &["costs.json: unknown field `bytes`"]);
    serve(&tokens[1..]).assert_failed(2, &["--token-costs is for --device-tokens, which is off"]);
}
