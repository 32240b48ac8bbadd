//! Keys and values through the binary: stored and read byte for byte; a missing key has its own exit code.

use crate::common::{self, Server, octokv, octokv_with_stdin, temp_directory};
use octokv_client::blocking::BlockingClient;

#[test]
fn a_value_exists_from_put_to_delete() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.put("hello", "world");
    server.assert_value("hello", "world");
    assert_eq!(server.run(&["exist", "hello"]).stdout_ok(), "5\n");
    server.put("hello", "there, world");
    server.assert_value("hello", "there, world");
    assert_eq!(server.run(&["list"]).stdout_ok(), "hello\n");
    assert_eq!(server.run(&["delete", "hello"]).stdout_ok(), "");
    assert_eq!(server.run(&["list"]).stdout_ok(), "");
    for command in ["get", "exist", "delete"] {
        server.run(&[command, "hello"]).assert_failed(3, &["key hello does not exist"]);
    }
    server.stop();
}

#[test]
fn values_are_bytes_of_any_kind_and_length() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let file = directory.path().join("value");
    let bytes: Vec<u8> = (0..2u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    for length in [0, 1, 511, 4096, 16_384, 16_385, 100_000, 2 << 20] {
        std::fs::write(&file, &bytes[..length]).unwrap();
        server.run(&["put", "value", "--file", file.to_str().unwrap()]).stdout_ok();
        let got = server.run(&["get", "value"]);
        assert_eq!(got.code, 0);
        assert!(got.stdout == bytes[..length], "a value of {length} bytes came back changed");
        assert_eq!(server.run(&["exist", "value"]).stdout_ok(), format!("{length}\n"));
    }
    std::fs::write(&file, vec![0; (2 << 20) + 1]).unwrap();
    let long = server.run(&["put", "long", "--file", file.to_str().unwrap()]);
    long.assert_failed(1, &["long", "2097153", "2097152"]);
    octokv_with_stdin(["put", "fed", "--file", "-", "--url", &server.url], b"\0from\nstdin\xff").stdout_ok();
    assert_eq!(server.run(&["get", "fed"]).stdout, b"\0from\nstdin\xff");
}

#[test]
fn keys_and_values_in_hexadecimal() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.run(&["put", "--hex", "00ff0a", "DEADbeef00"]).stdout_ok();
    assert_eq!(server.run(&["get", "--hex", "0x00FF0A"]).stdout, [0xde, 0xad, 0xbe, 0xef, 0]);
    assert_eq!(server.run(&["exist", "--hex", "00ff0a"]).stdout_ok(), "5\n");
    server.put("text", "x");
    let mut hex: Vec<String> =
        server.run(&["list", "--hex"]).stdout_ok().lines().map(str::to_owned).collect();
    hex.sort();
    assert_eq!(hex, ["00ff0a", "74657874"]);
    let mut plain: Vec<String> = server.run(&["list"]).stdout_ok().lines().map(str::to_owned).collect();
    plain.sort();
    assert_eq!(plain, ["0x00ff0a", "text"]);
    // A text that reads like the hexadecimal form of another key is printed as hexadecimal.
    server.run(&["put", "--hex", "07070707", "31"]).stdout_ok();
    server.run(&["put", "0x07070707", "text"]).stdout_ok();
    let mut listed: Vec<String> = server.run(&["list"]).stdout_ok().lines().map(str::to_owned).collect();
    listed.sort();
    assert_eq!(listed, ["0x00ff0a", "0x07070707", "0x30783037303730373037", "text"]);
    assert_eq!(server.run(&["get", "--hex", "0x07070707"]).stdout_ok(), "1");
    assert_eq!(server.run(&["get", "--hex", "0x30783037303730373037"]).stdout_ok(), "text");
    server.run(&["delete", "--hex", "00ff0a"]).stdout_ok();
    server.run(&["get", "--hex", "00ff0a"]).assert_failed(3, &["0x00ff0a"]);
    server.run(&["put", "--hex", "123", "00"]).assert_failed(2, &["123", "not hexadecimal"]);
}

#[test]
fn keys_have_1_to_1024_bytes() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    for length in [1, 16, 17, 255, 1024] {
        let key = "k".repeat(length);
        let value = format!("of {length}");
        server.put(&key, &value);
        server.assert_value(&key, &value);
        assert_eq!(server.run(&["exist", &key]).stdout_ok(), format!("{}\n", value.len()));
    }
    assert_eq!(server.run(&["list"]).stdout_ok().lines().count(), 5);
    server.run(&["delete", &"k".repeat(1024)]).stdout_ok();
    assert_eq!(server.run(&["list"]).stdout_ok().lines().count(), 4);
    server.run(&["put", &"k".repeat(1025), "v"]).assert_failed(1, &["1025", "1024"]);
    server.run(&["put", "", "v"]).assert_failed(1, &["a key of 0 B"]);
}

#[test]
fn add_only_and_update_only() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.run(&["put", "--update-only", "key", "none"]).assert_failed(3, &["key does not exist"]);
    server.run(&["put", "--add-only", "key", "first"]).stdout_ok();
    server.run(&["put", "--add-only", "key", "second"]).assert_failed(1, &["key", "exists already"]);
    server.assert_value("key", "first");
    server.run(&["put", "--update-only", "key", "third"]).stdout_ok();
    server.assert_value("key", "third");
    server
        .run(&["put", "--update-only", "--add-only", "key", "x"])
        .assert_failed(2, &["cannot be used with"]);
}

#[test]
fn a_list_names_every_key_once_whatever_its_length() {
    let directory = temp_directory();
    let arguments = ["--device", "memory", "--size", "128MiB", "--listen", "127.0.0.1:0"];
    let server = Server::start_with(directory.path(), &arguments);
    let client = BlockingClient::connect(&server.url).unwrap();
    let mut keys: Vec<String> = (0..5_000).map(|i| format!("key-{i}")).collect();
    for key in &keys {
        client.put(key.as_bytes(), b"v").unwrap();
    }
    let all = server.run(&["list"]);
    let in_order: Vec<&str> = all.stdout_ok().lines().collect();
    let mut sorted = in_order.clone();
    sorted.sort_unstable();
    keys.sort_unstable();
    assert_eq!(sorted, keys);
    assert_eq!(server.run(&["list", "--limit", "7"]).stdout_ok().lines().collect::<Vec<_>>(), in_order[..7]);
    assert_eq!(server.run(&["list", "--limit", "0"]).stdout_ok(), "");
    let from = server.run(&["list", "--start", in_order[4_321]]);
    assert_eq!(from.stdout_ok().lines().collect::<Vec<_>>(), in_order[4_321..]);
}

#[test]
fn the_environment_names_the_node_where_no_flag_does() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    server.put("key", "value");
    let got = std::process::Command::new(common::OCTOKV)
        .args(["get", "key"])
        .env("OCTOKV_URL", &server.url)
        .output()
        .unwrap();
    assert_eq!(got.stdout, b"value");
}

#[test]
fn wrong_usage_has_exit_code_2_and_says_what_is_wrong() {
    let table: &[(&[&str], &str)] = &[
        (&[], "Usage"),
        (&["stor"], "stor"),
        (&["get"], "KEY"),
        (&["put", "key"], "VALUE"),
        (&["put", "key", "value", "--file", "f"], "--file"),
        (&["get", "key", "--url", "tcp://h/x"], "nvme+tcp://"),
        (&["get", "key", "--url", "nvme+tcp://h:99999/nqn.2026-11.io.octokv:node"], "99999"),
        (&["get", "key", "--url", "nvme+tcp://h/node"], "nqn.YYYY-MM"),
        (&["list", "--limit", "many"], "many"),
        (&["scan", "--batch", "0"], "0"),
        (&["scan", "--from", "b", "--to", "a"], "--to a is below --from b"),
        (&["scan", "--hex", "--from", "zz"], "not hexadecimal"),
        (&["serve", "--size", "big"], "big"),
        (&["serve", "--durability", "maybe"], "maybe"),
        (&["serve", "--listen", "localhost"], "localhost"),
        (&["serve", "--engine", "btree"], "btree"),
        (&["serve", "--unit", "1000"], "unit must be 512, 1024, 2048 or 4096"),
        (&["serve", "--nqn", "node"], "nqn must be"),
        (&["bench", "--workload", "fillsec"], "fillsec"),
        (&["bench", "--threads", "0"], "threads"),
        (&["bench", "--key-size", "3"], "keys of 3 bytes"),
        (&["bench", "--seconds", "-1"], "-1"),
        (&["--log", "loud", "demo"], "loud"),
    ];
    for (arguments, part) in table {
        octokv(*arguments).assert_failed(2, &[part]);
    }
}

#[test]
fn an_unreachable_node_is_named() {
    let url = "nvme+tcp://127.0.0.1:1/nqn.2026-11.io.octokv:node?nsid=1";
    for command in
        [&["get", "key"][..], &["put", "key", "value"], &["list"], &["scan"], &["bench", "--ops", "1"]]
    {
        let output = octokv(command.iter().copied().chain(["--url", url]));
        assert_eq!(output.code, 1);
        assert!(output.stderr.contains("127.0.0.1:1"), "{}", output.stderr);
    }
    let other = "nvme+tcp://host.invalid:1/nqn.2026-11.io.octokv:node";
    octokv(["get", "key", "--url", other]).assert_failed(1, &["host.invalid"]);
}

#[test]
fn another_subsystem_or_namespace_is_refused_by_the_node() {
    let directory = temp_directory();
    let server = Server::start(directory.path(), "64MiB");
    let at = |nqn: &str, nsid: u32| format!("nvme+tcp://{}/{nqn}?nsid={nsid}", server.authority());
    let other = at("nqn.2026-11.io.octokv:other", 1);
    octokv(["get", "key", "--url", &other]).assert_failed(1, &[server.authority(), "refused"]);
    let second = at("nqn.2026-11.io.octokv:node", 2);
    octokv(["get", "key", "--url", &second]).assert_failed(1, &["namespace does not exist"]);
}

#[test]
fn the_version_is_the_packages() {
    assert_eq!(octokv(["--version"]).stdout_ok(), concat!("octokv ", env!("CARGO_PKG_VERSION"), "\n"));
}
