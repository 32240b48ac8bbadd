//! Key Value namespaces on several devices: device lists in any order, operation without one device, and refused device lists.

use crate::common::{Server, octokv, temp_directory};
use std::path::{Path, PathBuf};

const KEYS: u32 = 60;

fn paths(directory: &Path, names: &[&str]) -> Vec<String> {
    names.iter().map(|name| directory.join(name).to_str().unwrap().to_owned()).collect()
}

/// `--device` for each.
fn flags(devices: &[String]) -> Vec<&str> {
    devices.iter().flat_map(|device| ["--device", device]).collect()
}

fn start(directory: &Path, devices: &[String], more: &[&str]) -> Server {
    let fixed = ["--size", "32MiB", "--listen", "127.0.0.1:0"];
    Server::start_with(directory, &[&flags(devices)[..], &fixed, more].concat())
}

fn refused(devices: &[String], more: &[&str], parts: &[&str]) {
    let fixed = ["serve", "--size", "32MiB", "--listen", "127.0.0.1:0", "--admin", "none"];
    octokv([&fixed[..], &flags(devices), more].concat()).assert_failed(1, parts);
}

fn check(devices: &[String]) -> crate::common::CommandOutput {
    octokv([&["check"], &flags(devices)[..]].concat())
}

fn fill(server: &Server) {
    (0..KEYS).for_each(|number| server.put(&format!("key{number:02}"), &format!("value {number}")));
}

fn assert_all(server: &Server) {
    (0..KEYS).for_each(|number| server.assert_value(&format!("key{number:02}"), &format!("value {number}")));
    assert_eq!(server.run(&["list"]).stdout_ok().lines().count(), KEYS as usize);
}

#[test]
fn keys_of_each_engine_lie_on_all_devices_whatever_their_order() {
    for engine in ["hash", "lsm", "log"] {
        let directory = temp_directory();
        let devices = paths(directory.path(), &["a", "b", "c"]);
        let server = start(directory.path(), &devices, &["--engine", engine]);
        fill(&server);
        assert_all(&server);
        if engine == "lsm" {
            let scanned = server.run(&["scan", "--from", "key10", "--to", "key13"]);
            assert_eq!(scanned.stdout_ok(), "key10\tvalue 10\nkey11\tvalue 11\nkey12\tvalue 12\n");
        }
        server.stop();
        let other_order: Vec<String> = [2, 0, 1].map(|at| devices[at].clone()).into();
        let report = check(&other_order);
        assert!(report.stdout_ok().contains(&format!("keys      {KEYS}")), "{}", report.text());
        let mut server = start(directory.path(), &other_order, &["--engine", engine]);
        assert_all(&server);
        server.kill();
        // Behind a kill, too.
        let server = start(directory.path(), &devices, &["--engine", engine]);
        assert_all(&server);
        server.stop();
    }
}

#[test]
fn without_one_of_its_devices_a_namespace_serves_the_keys_of_the_others() {
    let directory = temp_directory();
    let devices = paths(directory.path(), &["a", "b", "c"]);
    let server = start(directory.path(), &devices, &["--engine", "log"]);
    fill(&server);
    server.stop();
    let (device, moved) = (PathBuf::from(&devices[1]), directory.path().join("moved"));
    std::fs::rename(&device, &moved).unwrap();
    let socket = directory.path().join("admin.sock");
    let admin = ["--admin", socket.to_str().unwrap()];
    let server = start(directory.path(), &devices, &[&["--engine", "log"][..], &admin].concat());
    assert!(!device.exists(), "no empty file takes its place");
    let mut served = 0;
    for number in 0..KEYS {
        let got = server.run(&["get", &format!("key{number:02}")]);
        match got.code {
            0 => {
                assert_eq!(got.text(), format!("value {number}"));
                server.put(&format!("key{number:02}"), &format!("value {number}"));
                served += 1;
            }
            _ => {
                got.assert_failed(1, &["the key's device is not available"]);
                let put = server.run(&["put", &format!("key{number:02}"), "lost"]);
                put.assert_failed(1, &["the key's device is not available"]);
            }
        }
    }
    assert!((20..KEYS - 8).contains(&served), "{served} keys are served");
    server.run(&["list"]).assert_failed(1, &["the key's device is not available"]);
    let listed = octokv([&["ns", "list"][..], &admin].concat());
    let lines: Vec<&str> = listed.stdout_ok().lines().collect();
    assert!(lines.len() == 4 && lines[2].contains("NOT AVAILABLE") && !lines[1].contains("NOT"), "{lines:?}");
    let json = octokv([&["ns", "list", "--json"][..], &admin].concat());
    let json: serde_json::Value = serde_json::from_str(json.stdout_ok()).unwrap();
    assert_eq!(json[0]["devices"][1]["index"], 1);
    assert_eq!(json[0]["devices"][1]["failure"], "it does not exist");
    assert_eq!(json[0]["devices"][0]["failure"], serde_json::Value::Null);
    let stats = octokv([&["stats"][..], &admin].concat());
    assert_eq!(stats.stdout_ok().matches("logs of namespace 1, device ").count(), 2, "{}", stats.text());
    assert_eq!(stats.text().matches(" bytes written for each put").count(), 2, "{}", stats.text());
    server.stop();
    std::fs::rename(&moved, &device).unwrap();
    let server = start(directory.path(), &devices, &["--engine", "log"]);
    assert_all(&server);
    server.stop();
}

#[test]
fn devices_that_do_not_belong_together_are_refused_and_left_as_they_are() {
    let directory = temp_directory();
    let devices = paths(directory.path(), &["a", "b"]);
    let server = start(directory.path(), &devices, &[]);
    fill(&server);
    server.stop();
    let alone = paths(directory.path(), &["alone"]);
    start(directory.path(), &alone, &[]).stop();
    let of_one = [devices[0].clone(), alone[0].clone()];
    refused(&of_one, &[], &[&of_one[1], "device 1 of the list is none of a volume of several"]);
    refused(&devices[..1], &[], &["the volume has 2 devices, and 1 are given"]);
    let new = paths(directory.path(), &["new"]);
    let three = [&devices[..], &new].concat();
    refused(&three, &[], &["the volume has 2 devices, and 3 are given"]);
    assert!(!Path::new(&new[0]).exists(), "a file that was missing was created");
    let twice = [devices[0].clone(), devices[0].clone()];
    octokv([&["serve", "--admin", "none"][..], &flags(&twice)].concat())
        .assert_failed(2, &["device", "twice"]);
    refused(&devices, &["--engine", "log"], &["it is a volume of the hash engine, not of the log engine"]);
    check(&devices[..1]).assert_failed(1, &["the volume has 2 devices, and 1 are given"]);
    let server = start(directory.path(), &devices, &[]);
    assert_all(&server);
    server.stop();
}

#[test]
fn a_format_makes_a_missing_device_anew() {
    let directory = temp_directory();
    let devices = paths(directory.path(), &["a", "b"]);
    let server = start(directory.path(), &devices, &[]);
    fill(&server);
    server.stop();
    std::fs::remove_file(&devices[1]).unwrap();
    let server = start(directory.path(), &devices, &["--format"]);
    assert_eq!(server.run(&["list"]).stdout_ok(), "");
    fill(&server);
    assert_all(&server);
    server.stop();
}

#[test]
fn a_namespace_on_several_devices_is_added_and_kept_at_a_restart() {
    let directory = temp_directory();
    let (first, two) = (paths(directory.path(), &["first"]), paths(directory.path(), &["a", "b"]));
    let socket = directory.path().join("admin.sock");
    let admin = ["--admin", socket.to_str().unwrap()];
    let mut server = start(directory.path(), &first, &admin);
    let add = |more: &[&str]| octokv([&["ns", "add"], &flags(&two)[..], &admin, more].concat());
    add(&["--kind", "block", "--size", "32MiB"]).assert_failed(2, &["device: 2 devices: must be 1 to 1"]);
    add(&["--kind", "kv", "--size", "32MiB", "--engine", "lsm"]).stdout_ok();
    let url = server.url.replace("nsid=1", "nsid=2");
    octokv(["put", "key", "value", "--url", &url]).stdout_ok();
    server.kill();
    let server = start(directory.path(), &first, &admin);
    let url = server.url.replace("nsid=1", "nsid=2");
    assert_eq!(octokv(["get", "key", "--url", &url]).stdout_ok(), "value");
    let listed = octokv([&["ns", "list"][..], &admin].concat());
    assert_eq!(listed.stdout_ok().lines().filter(|line| line.contains("device ")).count(), 2);
    server.stop();
}

/// The numbers of the keys that a server finds; the others do not exist.
fn numbers_found(server: &Server) -> Vec<u32> {
    let is_found = |&number: &u32| {
        let got = server.run(&["get", &format!("key{number:02}")]);
        match got.code {
            0 => true,
            _ => {
                got.assert_failed(3, &[]);
                false
            }
        }
    };
    (0..KEYS).filter(is_found).collect()
}

#[test]
fn a_lost_device_is_replaced_while_the_others_are_served() {
    for engine in ["hash", "lsm", "log"] {
        let directory = temp_directory();
        let devices = paths(directory.path(), &["a", "b", "c"]);
        let socket = directory.path().join("admin.sock");
        let admin = ["--admin", socket.to_str().unwrap()];
        let options = [&["--engine", engine][..], &admin].concat();
        let server = start(directory.path(), &devices, &options);
        fill(&server);
        server.stop();
        let moved = directory.path().join("moved").to_str().unwrap().to_owned();
        std::fs::rename(&devices[1], &moved).unwrap();
        let mut server = start(directory.path(), &devices, &options);
        let new = paths(directory.path(), &["new"]).remove(0);
        let replace = |nsid: &str, lost: &str, device: &str, more: &[&str]| {
            let fixed = ["ns", "replace", nsid, "--lost", lost, "--device", device];
            octokv([&fixed[..], more, &admin].concat())
        };
        let size = ["--size", "32MiB"];
        replace("1", &devices[0], &new, &size).assert_failed(2, &[&devices[0], "what it holds is not lost"]);
        replace("1", "other", &new, &size).assert_failed(1, &["no device \"other\"", &devices[1]]);
        replace("2", &devices[1], &new, &size).assert_failed(1, &["there is no namespace 2"]);
        replace("1", &devices[1], &new, &[]).assert_failed(2, &["with a size (--size) it is created"]);
        replace("1", &devices[1], &moved, &[]).assert_failed(2, &["is not new: --format discards"]);
        replace("1", &devices[1], &devices[0], &["--format"]).assert_failed(2, &["is there twice"]);
        replace("1", &devices[1], &new, &["--size", "1KiB"]).assert_failed(2, &[&new]);
        assert!(!Path::new(&new).exists(), "the file of a replacement that failed is left");
        let replaced = replace("1", &devices[1], &new, &size);
        let note = format!("name {new} there in the place of {}", devices[1]);
        assert!(replaced.code == 0 && replaced.stderr.contains(&note), "{}", replaced.stderr);
        let lines: Vec<&str> = replaced.text().lines().collect();
        assert!(lines.len() == 4 && lines[2].contains(&new) && lines[2].contains("0 keys"), "{lines:?}");
        let found = numbers_found(&server);
        assert!((20..KEYS as usize - 8).contains(&found.len()), "{engine}: {} keys", found.len());
        assert_eq!(server.run(&["list"]).stdout_ok().lines().count(), found.len());
        fill(&server);
        assert_all(&server);
        server.kill();
        let with_new = [devices[0].clone(), new.clone(), devices[2].clone()];
        let server = start(directory.path(), &with_new, &options);
        assert_all(&server);
        server.stop();
        check(&with_new).stdout_ok();
        // The old one takes down its keys, wherever it lies in the list; and the new one, of which the list does not know, is not formatted again.
        let with_old = [devices[2].clone(), moved.clone(), devices[0].clone()];
        let server = start(directory.path(), &with_old, &options);
        let listed = octokv([&["ns", "list"][..], &admin].concat());
        let why = format!("{moved}  NOT AVAILABLE: device 1 of the list was replaced by another");
        assert!(listed.stdout_ok().contains(&why), "{}", listed.text());
        server.run(&["list"]).assert_failed(1, &["the key's device is not available"]);
        assert_eq!(replace("1", &moved, &new, &[]).code, 0);
        assert_all(&server);
        server.stop();
        // One that was replaced may serve as a new one.
        let degraded = [devices[0].clone(), devices[1].clone(), devices[2].clone()];
        let server = start(directory.path(), &degraded, &options);
        assert_eq!(replace("1", &devices[1], &moved, &["--format"]).code, 0);
        assert_eq!(numbers_found(&server), found);
        server.stop();
    }
}

/// The keys that `ns list` shows for each device of the namespace.
fn keys_by_device(admin: &[&str]) -> Vec<u32> {
    let listed = octokv([&["ns", "list"][..], admin].concat());
    let keys_of = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let at = words.iter().position(|word| word.starts_with("keys"))?;
        words[at - 1].parse().ok()
    };
    listed.stdout_ok().lines().skip(1).filter_map(keys_of).collect()
}

#[test]
fn a_device_is_added_and_gets_its_part_of_the_keys_while_they_are_served() {
    let (without, swapping) = (&[][..], &["--swap-bytes", "17MiB", "--swap-gap", "1"][..]);
    for (engine, regions) in
        [("hash", without), ("lsm", without), ("log", without), ("hash", swapping), ("log", swapping)]
    {
        let directory = temp_directory();
        let devices = paths(directory.path(), &["a", "b"]);
        let socket = directory.path().join("admin.sock");
        let admin = ["--admin", socket.to_str().unwrap()];
        // They take a part of each device.
        let size = ["--size", if regions.is_empty() { "32MiB" } else { "64MiB" }];
        let options = [&["--engine", engine, "--listen", "127.0.0.1:0"][..], &admin, regions, &size].concat();
        let start = |devices: &[String]| {
            Server::start_with(directory.path(), &[&flags(devices)[..], &options].concat())
        };
        let mut server = start(&devices);
        fill(&server);
        let new = paths(directory.path(), &["new"]).remove(0);
        let extend = |nsid: &str, device: &str, more: &[&str]| {
            let fixed = ["ns", "extend", nsid, "--device", device];
            octokv([&fixed[..], more, &admin].concat())
        };
        extend("2", &new, &size).assert_failed(1, &["there is no namespace 2"]);
        extend("1", &new, &[]).assert_failed(2, &["with a size (--size) it is created"]);
        extend("1", &devices[0], &["--format"]).assert_failed(2, &["is there twice"]);
        extend("1", &new, &["--size", "1KiB"]).assert_failed(2, &[&new]);
        if !regions.is_empty() {
            let refused = extend("1", &new, &["--size", "16MiB"]);
            refused.assert_failed(2, &[&new, "it has 16777216 bytes"]);
        }
        assert!(!Path::new(&new).exists(), "the file of an addition that failed is left");
        let extended = extend("1", &new, &size);
        let note = format!("add {new} to its devices there before the next start");
        assert!(extended.code == 0 && extended.stderr.contains(&note), "{}", extended.stderr);
        let begun = std::time::Instant::now();
        loop {
            assert_all(&server);
            let keys = keys_by_device(&admin);
            assert_eq!(keys.len(), 3, "{engine}");
            let is_left_over = engine != "lsm" && keys.iter().sum::<u32>() != KEYS;
            if keys[2] >= KEYS / 6 && !is_left_over {
                break;
            }
            assert!(begun.elapsed().as_secs() < 60, "{engine}: {keys:?}");
        }
        fill(&server);
        server.kill();
        let without_new = octokv([&["serve"], &flags(&devices)[..], &options].concat());
        without_new.assert_failed(1, &["the volume has 3 devices, and 2 are given"]);
        let with_new = [new.clone(), devices[1].clone(), devices[0].clone()];
        let server = start(&with_new);
        assert_all(&server);
        server.stop();
        check(&with_new).stdout_ok();
    }
}

#[test]
fn a_replaced_device_of_an_added_namespace_is_that_of_the_next_start() {
    let directory = temp_directory();
    let (first, two) = (paths(directory.path(), &["first"]), paths(directory.path(), &["a", "b"]));
    let socket = directory.path().join("admin.sock");
    let admin = ["--admin", socket.to_str().unwrap()];
    let server = start(directory.path(), &first, &admin);
    let added = ["ns", "add", "--kind", "kv", "--size", "32MiB"];
    octokv([&added[..], &flags(&two), &admin].concat()).stdout_ok();
    server.stop();
    std::fs::remove_file(&two[0]).unwrap();
    let server = start(directory.path(), &first, &admin);
    let new = paths(directory.path(), &["new"]).remove(0);
    let replace = ["ns", "replace", "2", "--lost", &two[0], "--device", &new, "--size", "40MiB"];
    let before = octokv([&["ns", "list", "--json"][..], &admin].concat());
    octokv([&replace[..], &admin].concat()).stdout_ok();
    // It may be repeated.
    octokv([&replace[..], &admin].concat()).stdout_ok();
    let listed = octokv([&["ns", "list", "--json"][..], &admin].concat());
    let size = |listed: &str| -> u64 {
        serde_json::from_str::<serde_json::Value>(listed).unwrap()[1]["size_bytes"].as_u64().unwrap()
    };
    assert!(size(listed.stdout_ok()) > size(before.stdout_ok()) + (32 << 20), "its size is that of both");
    server.stop();
    let server = start(directory.path(), &first, &admin);
    let listed = octokv([&["ns", "list"][..], &admin].concat());
    assert!(listed.stdout_ok().contains(&new) && !listed.text().contains("NOT"), "{}", listed.text());
    let url = server.url.replace("nsid=1", "nsid=2");
    for number in 0..8 {
        octokv(["put", &format!("key{number}"), "value", "--url", &url]).stdout_ok();
    }
    server.stop();
}

#[test]
fn a_load_by_the_tokens_of_the_devices_finds_its_values() {
    for engine in ["hash", "lsm", "log"] {
        let directory = temp_directory();
        let devices = paths(directory.path(), &["a", "b", "c"]);
        let server = start(directory.path(), &devices, &["--engine", engine, "--device-tokens"]);
        for flow_control in [&["--flow-control"][..], &[]] {
            let load = ["bench", "--workload", "fillseq,ycsb-f,readrandom,readmissing,deleteseq"];
            let sizes = ["--num", "600", "--value-size", "100..3000", "--threads", "2", "--depth", "32"];
            server.run(&[&load[..], &sizes, flow_control].concat()).stdout_ok();
        }
        server.stop();
    }
}

#[test]
fn a_load_counts_the_errors_of_a_missing_device_and_goes_on() {
    let directory = temp_directory();
    let devices = paths(directory.path(), &["a", "b", "c"]);
    start(directory.path(), &devices, &["--engine", "log"]).stop();
    std::fs::remove_file(&devices[1]).expect("it is there");
    let server = start(directory.path(), &devices, &["--engine", "log"]);
    let load =
        ["bench", "--workload", "fillseq,readrandom", "--num", "300", "--value-size", "500", "--json", "-"];
    let ended = server.run(&load);
    assert_ne!(ended.code, 0);
    assert!(ended.stderr.contains("the key's device is not available"), "{}", ended.stderr);
    let counted = server.run(&[&load[..], &["--tolerate-errors"]].concat());
    assert_eq!(counted.code, 0, "{}", counted.stderr);
    let report: serde_json::Value = serde_json::from_str(counted.text()).expect("a report");
    for result in report["results"].as_array().expect("of two workloads") {
        let count = |name: &str| result[name].as_u64().expect(name);
        // Its third of the keys, more or less.
        assert!((30..180).contains(&count("failed")), "{result}");
        assert_eq!((count("operations") + count("failed"), count("not_found")), (300, 0), "{result}");
    }
    server.stop();
}
