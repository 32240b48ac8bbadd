//! `octokv scan` through the binary: what it prints, how it goes on after its node was killed, and what it says when a node cannot
//! do it.

use crate::common::{OCTOKV, Server, temp_directory};
use octokv_client::blocking::BlockingClient;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

/// A server with an ordered engine on the file `device` of a directory.
fn ordered(directory: &Path, listen: &str) -> Server {
    let device = directory.join("device");
    let device = device.to_str().unwrap();
    let arguments = ["--device", device, "--size", "128MiB", "--listen", listen, "--engine", "lsm"];
    Server::start_with(directory, &arguments)
}

#[test]
fn a_namespace_whose_engine_has_no_order_is_named() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.put("key", "value");
    server.run(&["scan"]).assert_failed(1, &["scan: the namespace has no iterators", "octokv list"]);
    server.stop();
}

#[test]
fn pairs_are_printed_in_the_order_of_keys_as_many_and_as_asked() {
    let directory = temp_directory();
    let server = ordered(directory.path(), "127.0.0.1:0");
    for key in ["pear", "fig", "cherry", "apple", "banana"] {
        server.put(key, &format!("a {key}"));
    }
    server.run(&["put", "--hex", "00ff", "0a0b"]).stdout_ok();
    let scan = |flags: &[&str]| {
        let run = server.run(&[&["scan"], flags].concat());
        run.stdout_ok().lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let all = [
        "0x00ff\t0x0a0b",
        "apple\ta apple",
        "banana\ta banana",
        "cherry\ta cherry",
        "fig\ta fig",
        "pear\ta pear",
    ];
    for batch in ["1", "2", "1000000"] {
        assert_eq!(scan(&["--batch", batch]), all);
        assert_eq!(scan(&["--batch", batch, "--limit", "3"]), all[..3]);
        assert_eq!(scan(&["--from", "banana", "--to", "fig", "--batch", batch]), all[2..4]);
    }
    let keys = |flags: &[&str]| scan(&[&["--keys-only"], flags].concat());
    assert_eq!(keys(&["--from", "b"]), ["banana", "cherry", "fig", "pear"]);
    assert_eq!(keys(&["--to", "c", "--reverse"]), ["banana", "apple", "0x00ff"]);
    assert_eq!(keys(&["--reverse", "--limit", "2"]), ["pear", "fig"]);
    assert_eq!(keys(&["--from", "fig", "--to", "fig"]), [""; 0]);
    assert_eq!(keys(&["--limit", "0"]), [""; 0]);
    assert_eq!(keys(&["--hex", "--from", "0x70"]), ["70656172"]);
    assert_eq!(scan(&["--hex", "--to", "01"]), ["00ff\t0a0b"]);
    server.run(&["scan", "--from", &"k".repeat(1025)]).assert_failed(1, &["scan", "1025", "1024"]);
    server.stop();
}

#[test]
fn a_scan_whose_node_is_killed_goes_on_behind_its_last_key_and_says_so() {
    const KEYS: u32 = 3_000;
    let directory = temp_directory();
    let mut server = ordered(directory.path(), "127.0.0.1:0");
    let authority = server.authority().to_owned();
    let client = BlockingClient::connect(&server.url).unwrap();
    let key_of = |index: u32| format!("key-{index:06}");
    for index in 0..KEYS {
        client.put(key_of(index).as_bytes(), &[b'v'; 1_000]).unwrap();
    }
    // It fills its pipe, and then waits for the reader.
    let mut scan = Command::new(OCTOKV)
        .args(["scan", "--batch", "16", "--url", &server.url])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::with_capacity(512, scan.stdout.take().unwrap()).lines();
    let mut printed = vec![lines.next().unwrap().unwrap()];
    server.kill();
    // Where the scan does not find it.
    let elsewhere = ordered(directory.path(), "127.0.0.1:0");
    elsewhere.put(&key_of(KEYS), "of a later moment");
    elsewhere.stop();
    let server = ordered(directory.path(), &authority);
    printed.extend(lines.map(Result::unwrap));
    let mut stderr = String::new();
    scan.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(scan.wait().unwrap().success(), "{stderr}");
    let keys: Vec<&str> = printed.iter().map(|line| line.split_once('\t').unwrap().0).collect();
    assert!(keys.iter().copied().eq((0..=KEYS).map(key_of)), "each key once, in order, and the later one");
    assert_eq!(stderr.matches("of a later moment").count(), 1, "{stderr}");
    server.stop();
}
