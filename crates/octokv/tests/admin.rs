//! Run-time changes of a node through the binary: namespaces, hosts, access states, persistence.

use crate::common::{CommandOutput, Server, octokv, temp_directory};
use serde_json::Value;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:1b4e28ba-2fa1-11d2-883f-0016d3cca427";

/// A node on a file in a directory, with its admin socket there.
struct Node {
    server: Server,
    socket: PathBuf,
}

impl Node {
    fn start(directory: &Path) -> Node {
        Node::start_with(directory, &[])
    }

    fn start_with(directory: &Path, more: &[&str]) -> Node {
        let (device, socket) = (directory.join("device"), directory.join("admin.sock"));
        let fixed = ["--size", "64MiB", "--listen", "127.0.0.1:0", "--device", device.to_str().unwrap()];
        let admin = ["--admin", socket.to_str().unwrap()];
        let arguments: Vec<&str> = fixed.iter().chain(&admin).chain(more).copied().collect();
        Node { server: Server::start_with(directory, &arguments), socket }
    }

    fn run(&self, arguments: &[&str]) -> CommandOutput {
        octokv(arguments.iter().copied().chain(["--admin", self.socket.to_str().unwrap()]))
    }

    fn list(&self) -> Vec<Value> {
        let output = self.run(&["ns", "list", "--json"]);
        serde_json::from_str::<Vec<Value>>(output.stdout_ok()).unwrap()
    }

    fn nsids(&self) -> Vec<u64> {
        self.list().iter().map(|one| one["nsid"].as_u64().unwrap()).collect()
    }

    fn url(&self, nsid: u32) -> String {
        self.server.url.replace("nsid=1", &format!("nsid={nsid}"))
    }

    fn raw_request(&self, request: &str) -> String {
        let mut stream = UnixStream::connect(&self.socket).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }
}

fn path(directory: &Path, name: &str) -> String {
    directory.join(name).to_str().unwrap().to_owned()
}

#[test]
fn namespaces_are_added_used_and_found_again_after_a_restart_and_after_a_kill() {
    let directory = temp_directory();
    let directory = directory.path();
    let node = Node::start(directory);
    let keys = path(directory, "keys");
    node.run(&["ns", "add", "--kind", "kv", "--device", &keys, "--size", "64MiB"]).stdout_ok();
    let blocks = path(directory, "blocks");
    node.run(&["ns", "add", "--kind", "block", "--device", &blocks, "--size", "16MiB", "--nsid", "7"])
        .stdout_ok();
    octokv(["put", "key", "second", "--url", &node.url(2)]).stdout_ok();
    node.server.put("key", "first");
    assert_eq!(node.nsids(), [1, 2, 7]);
    let before = node.list();
    let engines: Vec<&Value> = before.iter().map(|one| &one["engine"]).collect();
    assert_eq!(engines, [&Value::from("hash"), &Value::from("hash"), &Value::Null]);
    node.server.stop();
    for kill in [true, false] {
        let mut node = Node::start(directory);
        assert_eq!(node.list().len(), 3);
        for (one, was) in node.list().iter().zip(&before) {
            for field in ["nsid", "kind", "engine", "device", "size_bytes", "block_bytes", "added"] {
                assert_eq!(one[field], was[field], "{field}");
            }
        }
        assert_eq!(octokv(["get", "key", "--url", &node.url(2)]).stdout_ok(), "second");
        node.server.assert_value("key", "first");
        if kill {
            node.server.kill();
        } else {
            node.run(&["ns", "remove", "2"]).stdout_ok();
            assert_eq!(node.nsids(), [1, 7]);
            octokv(["get", "key", "--url", &node.url(2)]).assert_failed(1, &["namespace"]);
            node.server.stop();
        }
    }
    let node = Node::start(directory);
    assert_eq!(node.nsids(), [1, 7], "a removed namespace stays removed");
    // Its device keeps its data and was closed cleanly.
    let checked = octokv(["check", "--device", &keys]);
    assert!(checked.stdout_ok().contains("shutdown  cleanly"), "{}", checked.text());
    node.run(&["ns", "add", "--kind", "kv", "--device", &keys]).stdout_ok();
    assert_eq!(octokv(["get", "key", "--url", &node.url(2)]).stdout_ok(), "second");
}

#[test]
fn an_invalid_namespace_is_rejected_by_name_and_leaves_nothing() {
    let directory = temp_directory();
    let directory = directory.path();
    let node = Node::start(directory);
    let (device, new) = (path(directory, "device"), path(directory, "new"));
    let table: &[(&[&str], i32, &[&str])] = &[
        (&["--kind", "block", "--device", &new], 2, &["new", "does not exist", "--size"]),
        (&["--kind", "block", "--device", &device], 2, &["device", "in use"]),
        (&["--kind", "block", "--device", "memory"], 2, &["size"]),
        (&["--kind", "block", "--device", ""], 2, &["device"]),
        (
            &["--kind", "block", "--device", &new, "--size", "1MiB", "--block-size", "1024"],
            2,
            &["512 or 4096"],
        ),
        (&["--kind", "block", "--device", &new, "--size", "0"], 2, &["size"]),
        (
            &["--kind", "block", "--device", &new, "--size", "100"],
            2,
            &["smaller than one block of 4096 bytes"],
        ),
        (&["--kind", "kv", "--device", &new, "--size", "1MiB", "--block-size", "512"], 2, &["block_size"]),
        (&["--kind", "kv", "--device", &new, "--size", "64KiB"], 2, &["new"]),
        (&["--kind", "kv", "--device", &new, "--size", "64MiB", "--engine", "tree"], 2, &["tree", "hash"]),
        (&["--kind", "block", "--device", &new, "--size", "64MiB", "--engine", "hash"], 2, &["engine"]),
        (
            &["--kind", "block", "--device", &new, "--size", "64MiB", "--cache-bytes", "1MiB"],
            2,
            &["cache_bytes", "key-value"],
        ),
        (
            &["--kind", "kv", "--device", "memory", "--size", "64MiB", "--cache-bytes", "1MiB"],
            2,
            &["cache_bytes", "in memory"],
        ),
        (
            &["--kind", "kv", "--device", &new, "--size", "64MiB", "--cache-bytes", "1023KiB"],
            2,
            &["cache_bytes", "at least 1048576"],
        ),
        (
            &["--kind", "kv", "--device", &new, "--size", "64MiB", "--cache-bytes", "1PiB"],
            2,
            &["cache_bytes", "available"],
        ),
        (
            &["--kind", "block", "--device", &new, "--size", "64MiB", "--prepare-bytes", "1MiB"],
            2,
            &["prepare_bytes", "key-value"],
        ),
        (
            &["--kind", "kv", "--device", &new, "--size", "64MiB", "--prepare-bytes", "2GiB"],
            2,
            &["prepare_bytes", "at most 1073741824"],
        ),
        (&["--kind", "kv", "--device", &new, "--size", "64MiB", "--keep"], 2, &["keep"]),
        (&["--kind", "kv", "--device", &new, "--size", "64MiB", "--nsid", "1"], 1, &["namespace 1 already"]),
        (&["--kind", "kv", "--device", &new, "--size", "64MiB", "--nsid", "0"], 2, &["nsid"]),
        (&["--kind", "kv", "--device", &new, "--size", "64MiB", "--nsid", "5000"], 2, &["nsid"]),
        (&["--kind", "kv", "--device", &new, "--size", "64MiB", "--ana-group", "33"], 2, &["ana_group"]),
        (&["--kind", "block", "--device", &path(directory, ""), "--size", "1MiB"], 2, &["neither"]),
    ];
    for (arguments, code, parts) in table {
        let all: Vec<&str> = ["ns", "add"].iter().chain(*arguments).copied().collect();
        node.run(&all).assert_failed(*code, parts);
        assert!(!Path::new(&new).exists(), "{arguments:?} left a file");
        assert_eq!(node.nsids(), [1], "{arguments:?}");
    }
    node.run(&["ns", "remove", "1"]).assert_failed(2, &["configuration"]);
    node.run(&["ns", "remove", "3"]).assert_failed(1, &["namespace 3 does not exist"]);
    assert!(!std::fs::read_to_string(directory.join("device.state")).unwrap().contains("[[namespace]]"));
}

/// The counts of the caches, by namespace: entries, hits, misses.
fn caches(node: &Node) -> Vec<[u64; 4]> {
    let stats = node.run(&["stats", "--json"]);
    let interval: Value = serde_json::from_str(stats.stdout_ok()).unwrap();
    let count = |cache: &Value, name: &str| cache[name].as_u64().unwrap();
    let caches = interval["caches"].as_array().unwrap().iter();
    caches.map(|one| ["nsid", "entries", "hits", "misses"].map(|name| count(one, name))).collect()
}

#[test]
fn values_are_served_from_a_cache_that_is_set_by_namespace_and_visible_in_stats() {
    let directory = temp_directory();
    let directory = directory.path();
    let node = Node::start_with(directory, &["--cache-bytes", "4MiB"]);
    let keys = path(directory, "keys");
    let add = ["ns", "add", "--kind", "kv", "--device", &keys, "--size", "64MiB", "--cache-bytes", "2MiB"];
    node.run(&add).stdout_ok();
    node.run(&["ns", "add", "--kind", "kv", "--device", "memory", "--size", "16MiB"]).stdout_ok();
    for nsid in [1, 2, 3] {
        let url = node.url(nsid);
        for value in ["old", "new"] {
            octokv(["put", "key", value, "--url", &url]).stdout_ok();
            for _ in 0..3 {
                assert_eq!(octokv(["get", "key", "--url", &url]).stdout_ok(), value);
            }
        }
        octokv(["exist", "key", "--url", &url]).stdout_ok();
    }
    assert_eq!(caches(&node), [[1, 1, 5, 2], [2, 1, 5, 2]]);
    let table = node.run(&["stats"]);
    assert!(table.stdout_ok().contains("cache of namespace 2: 71.4 % of 7 reads"), "{}", table.text());
    octokv(["delete", "key", "--url", &node.url(2)]).stdout_ok();
    octokv(["get", "key", "--url", &node.url(2)]).assert_failed(3, &["key"]);
    // The client's delete tests first whether the key exists: a hit.
    assert_eq!(caches(&node)[1], [2, 0, 6, 3]);
    let sizes = |node: &Node| -> Vec<u64> {
        node.list().iter().map(|one| one["cache_bytes"].as_u64().unwrap()).collect()
    };
    assert_eq!(sizes(&node), [4 << 20, 2 << 20, 0]);
    node.server.stop();
    let node = Node::start(directory);
    assert_eq!(sizes(&node), [0, 2 << 20, 0]);
    assert_eq!(caches(&node), [[2, 0, 0, 0]], "a cache is empty after a start");
    node.run(&["ns", "remove", "2"]).stdout_ok();
    assert!(caches(&node).is_empty());
}

/// The bytes that were prepared, by namespace that has any, once `is_enough` of them were.
fn prepared(node: &Node, is_enough: impl Fn(&[[u64; 2]]) -> bool) -> Vec<[u64; 2]> {
    loop {
        let stats = node.run(&["stats", "--json"]);
        let interval: Value = serde_json::from_str(stats.stdout_ok()).unwrap();
        let all = interval["prepared"].as_array().unwrap().iter();
        let all: Vec<[u64; 2]> =
            all.map(|one| ["nsid", "prepared_bytes"].map(|name| one[name].as_u64().unwrap())).collect();
        if is_enough(&all) {
            return all;
        }
        std::thread::yield_now();
    }
}

#[test]
fn never_written_space_is_prepared_by_namespace_and_visible_in_stats() {
    let directory = temp_directory();
    let directory = directory.path();
    let kind = std::process::Command::new("stat").args(["-f", "-c", "%T"]).arg(directory).output().unwrap();
    let is_known = ["ext2/ext3\n", "xfs\n"].contains(&str::from_utf8(&kind.stdout).unwrap());
    let node = Node::start_with(directory, &["--prepare-bytes", "0"]);
    for (name, more) in
        [("on", &[][..]), ("off", &["--prepare-bytes", "0"]), ("few", &["--prepare-bytes", "4MiB"])]
    {
        let device = path(directory, name);
        let add = ["ns", "add", "--kind", "kv", "--device", &device, "--size", "64MiB"];
        node.run(&[&add, more].concat()).stdout_ok();
    }
    let sizes = |node: &Node| -> Vec<u64> {
        node.list().iter().map(|one| one["prepare_bytes"].as_u64().unwrap()).collect()
    };
    assert_eq!(sizes(&node), [0, 1 << 30, 0, 4 << 20]);
    if is_known {
        // Nearly all of one, a part of the other; both stop there.
        let all =
            prepared(&node, |all| matches!(all, [[2, on], [4, few]] if *on > 48 << 20 && *few > 3 << 20));
        assert!(all[1][1] < 8 << 20, "{all:?}");
        let table = node.run(&["stats"]);
        assert!(table.stdout_ok().contains("prepared of namespace 2: "), "{}", table.text());
    }
    let url = node.url(2);
    octokv(["put", "key", "value", "--url", &url]).stdout_ok();
    node.server.stop();
    let node = Node::start(directory);
    assert_eq!(sizes(&node), [1 << 30, 1 << 30, 0, 4 << 20]);
    assert_eq!(octokv(["get", "key", "--url", &node.url(2)]).stdout_ok(), "value");
}

#[test]
fn a_namespace_from_startup_releases_its_device_when_removed() {
    let directory = temp_directory();
    let directory = directory.path();
    let device = |kind| path(directory, kind);
    let node = Node::start(directory);
    for kind in ["kv", "block"] {
        node.run(&["ns", "add", "--kind", kind, "--device", &device(kind), "--size", "16MiB"]).stdout_ok();
    }
    node.server.stop();
    let node = Node::start(directory);
    for (nsid, kind) in [("2", "kv"), ("3", "block")] {
        node.run(&["ns", "remove", nsid]).stdout_ok();
        node.run(&["ns", "add", "--kind", kind, "--device", &device(kind), "--nsid", nsid]).stdout_ok();
    }
    assert_eq!(node.nsids(), [1, 2, 3]);
}

#[test]
fn a_link_to_nothing_is_refused_and_stays() {
    let directory = temp_directory();
    let node = Node::start(directory.path());
    let link = path(directory.path(), "link");
    std::os::unix::fs::symlink(directory.path().join("nowhere"), &link).unwrap();
    for size in [&["--size", "1MiB"][..], &[]] {
        let add = ["ns", "add", "--kind", "block", "--device", &link];
        node.run(&[&add, size].concat()).assert_failed(2, &["link"]);
        assert!(std::fs::symlink_metadata(&link).is_ok(), "it was not made by the node");
    }
}

#[test]
fn a_copy_of_a_volume_is_not_served_beside_it() {
    let directory = temp_directory();
    let directory = directory.path();
    let node = Node::start(directory);
    node.server.put("key", "value");
    node.server.stop();
    let copy = path(directory, "copy");
    std::fs::copy(directory.join("device"), &copy).unwrap();
    let node = Node::start(directory);
    node.run(&["ns", "add", "--kind", "kv", "--device", &copy])
        .assert_failed(2, &["copy of the volume of namespace 1"]);
    node.server.assert_value("key", "value");
    assert_eq!(node.nsids(), [1]);
    node.run(&["ns", "add", "--kind", "kv", "--device", &copy, "--format"]).stdout_ok();
    node.server.stop();
    std::fs::copy(directory.join("device"), &copy).unwrap();
    let node = Node::start(directory);
    node.server.assert_value("key", "value");
    assert_eq!(node.run(&["ns", "list"]).stdout_ok().matches("NOT SERVED").count(), 1);
}

#[test]
fn a_kv_volume_is_served_as_blocks_only_on_request() {
    let directory = temp_directory();
    let directory = directory.path();
    let node = Node::start(directory);
    let keys = path(directory, "keys");
    node.run(&["ns", "add", "--kind", "kv", "--device", &keys, "--size", "64MiB"]).stdout_ok();
    node.run(&["ns", "remove", "2"]).stdout_ok();
    let add = ["ns", "add", "--kind", "block", "--device", &keys];
    node.run(&add).assert_failed(2, &["holds an octokv volume", "--format", "--keep"]);
    node.run(&[&add[..], &["--keep"]].concat()).stdout_ok();
    node.run(&["ns", "remove", "2"]).stdout_ok();
    octokv(["check", "--device", &keys]).stdout_ok();
    node.run(&[&add[..], &["--format"]].concat()).stdout_ok();
    node.run(&["ns", "remove", "2"]).stdout_ok();
    octokv(["check", "--device", &keys]).assert_failed(1, &["keys"]);
    node.run(&add).stdout_ok();
}

#[test]
fn a_namespace_without_its_device_is_reported_and_the_others_are_served() {
    let directory = temp_directory();
    let directory = directory.path();
    let node = Node::start(directory);
    let blocks = path(directory, "blocks");
    node.run(&["ns", "add", "--kind", "block", "--device", &blocks, "--size", "1MiB"]).stdout_ok();
    node.server.put("key", "value");
    node.server.stop();
    std::fs::remove_file(&blocks).unwrap();
    let node = Node::start(directory);
    node.server.assert_value("key", "value");
    assert!(!Path::new(&blocks).exists(), "an empty one is not made in its place");
    let offline = &node.list()[1];
    assert!(offline["offline"].as_str().unwrap().contains("does not exist"), "{offline}");
    assert!(node.run(&["ns", "list"]).stdout_ok().contains("NOT SERVED"));
    node.run(&["ns", "remove", "2"]).stdout_ok();
    assert_eq!(node.nsids(), [1]);
}

#[test]
fn hosts_are_allowed_and_denied_while_the_node_runs_and_after_a_restart() {
    let directory = temp_directory();
    let directory = directory.path();
    let mut node = Node::start(directory);
    assert_eq!(node.run(&["host", "list"]).stdout_ok(), "any\n");
    node.run(&["host", "deny", HOST]).assert_failed(1, &["allows every host"]);
    node.run(&["host", "allow", "me"]).assert_failed(2, &["me", "nqn."]);
    node.run(&["host", "allow", HOST]).stdout_ok();
    node.server.put("key", "value");
    node.run(&["host", "deny", "any"]).stdout_ok();
    let refused = || octokv(["get", "key", "--url", &node.server.url]);
    refused().assert_failed(1, &["invalid host"]);
    assert_eq!(node.run(&["host", "list"]).stdout_ok(), format!("{HOST}\n"));
    node.server.kill();
    let node = Node::start(directory);
    octokv(["get", "key", "--url", &node.server.url]).assert_failed(1, &["invalid host"]);
    node.run(&["host", "allow", "any"]).stdout_ok();
    node.server.assert_value("key", "value");
}

#[test]
fn a_host_that_is_denied_is_disconnected() {
    let directory = temp_directory();
    let node = Node::start(directory.path());
    let client = octokv_client::blocking::BlockingClient::connect(&node.server.url).unwrap();
    client.put(b"key", b"value").unwrap();
    node.run(&["host", "deny", "any"]).stdout_ok();
    assert!(client.put(b"key", b"other").is_err());
    node.run(&["host", "allow", "any"]).stdout_ok();
    node.server.assert_value("key", "value");
}

#[test]
fn ana_states_are_reported_to_hosts_and_persisted() {
    let directory = temp_directory();
    let node = Node::start(directory.path());
    node.server.put("key", "value");
    node.run(&["ana", "set", "1", "nowhere"]).assert_failed(2, &["optimized", "inaccessible"]);
    node.run(&["ana", "set", "0", "optimized"]).assert_failed(2, &["1 to 32"]);
    node.run(&["ana", "set", "1", "inaccessible"]).stdout_ok();
    octokv(["get", "key", "--url", &node.server.url]).assert_failed(1, &["inaccessible"]);
    node.server.stop();
    let node = Node::start(directory.path());
    assert!(node.run(&["ana", "list"]).stdout_ok().starts_with("1   inaccessible"));
    octokv(["get", "key", "--url", &node.server.url]).assert_failed(1, &["inaccessible"]);
    node.run(&["ana", "set", "1", "non-optimized"]).stdout_ok();
    node.server.assert_value("key", "value");
}

#[test]
fn namespaces_of_the_configuration_file_are_served_and_checked() {
    let directory = temp_directory();
    let directory = directory.path();
    let config = path(directory, "octokv.toml");
    let write = |text: &str| std::fs::write(&config, text).unwrap();
    let blocks = path(directory, "blocks");
    write(&format!(
        "[[namespace]]\nnsid = 3\nkind = \"block\"\ndevice = \"{blocks}\"\nsize = \"1MiB\"\nblock_size = 512\n"
    ));
    let node = Node::start_with(directory, &["--config", &config]);
    let list = node.list();
    assert_eq!((&list[1]["nsid"], &list[1]["block_bytes"]), (&3.into(), &512.into()));
    assert_eq!(list[1]["added"], false);
    node.run(&["ns", "remove", "3"]).assert_failed(2, &["configuration"]);
    node.server.stop();
    for (text, part) in [
        ("[[namespace]]\nnsid = 1\nkind = \"kv\"\ndevice = \"x\"\n", "nsid"),
        ("[[namespace]]\nnsid = 2\nkind = \"kv\"\ndevice = \"x\"\nengine = \"tree\"\n", "\"tree\": \"hash\""),
        ("[[namespace]]\nnsid = 2\nkind = \"block\"\ndevice = \"x\"\nengine = \"hash\"\n", "without engine"),
        (
            "[[namespace]]\nnsid = 2\nkind = \"block\"\ndevice = \"x\"\ncache_bytes = \"1MiB\"\n",
            "cache_bytes",
        ),
        ("cache_bytes = 4096\n", "cache_bytes"),
        ("cache_bytes = \"many\"\n", "cache_bytes"),
        ("[[namespace]]\nnsid = 2\nkind = \"disk\"\ndevice = \"x\"\n", "kv"),
        ("[[namespace]]\nnsid = 2\nkind = \"block\"\ndevice = \"memory\"\n", "size"),
        ("[[namespace]]\nnsid = 2\nkind = \"block\"\ndevice = \"x\"\nblock_size = 1000\n", "block_size"),
        (
            "[[namespace]]\nnsid = 2\nkind = \"block\"\ndevice = \"/nowhere/x\"\nsize = \"1MiB\"\n",
            "/nowhere/x",
        ),
        ("hosts = [\"me\"]\n", "hosts"),
        ("referrals = [\"here\"]\n", "referrals"),
    ] {
        write(text);
        let device = path(directory, "device");
        let output = octokv(["serve", "--config", &config, "--device", &device, "--listen", "127.0.0.1:0"]);
        assert_ne!(output.code, 0, "{text}");
        assert!(output.stderr.contains(part), "{text}: {}", output.stderr);
    }
}

#[test]
fn a_node_without_a_state_file_rejects_changes_and_names_the_flag() {
    let directory = temp_directory();
    let directory = directory.path();
    let node = Node::start_with(directory, &["--state", "none"]);
    let new = path(directory, "new");
    let add = ["ns", "add", "--kind", "block", "--device", &new, "--size", "1MiB"];
    node.run(&add).assert_failed(1, &["--state FILE"]);
    node.run(&["host", "deny", "any"]).assert_failed(1, &["--state FILE"]);
    assert!(!Path::new(&new).exists());
    assert!(!directory.join("device.state").exists());
    node.server.put("key", "value");
}

#[test]
fn two_nodes_do_not_share_a_state_file() {
    let directory = temp_directory();
    let directory = directory.path();
    let state = path(directory, "state");
    let node = Node::start_with(directory, &["--state", &state]);
    let other = path(directory, "other");
    let serve =
        ["serve", "--device", &other, "--size", "64MiB", "--listen", "127.0.0.1:0", "--state", &state];
    octokv(serve).assert_failed(1, &["state", "another node"]);
    assert!(!Path::new(&other).exists(), "it made nothing");
    node.run(&["host", "deny", "any"]).stdout_ok();
    node.server.stop();
    assert!(std::fs::read_to_string(&state).unwrap().contains("hosts = []"));
}

#[test]
fn a_damaged_state_file_refuses_the_start_and_is_left_as_it_is() {
    let directory = temp_directory();
    let state = directory.path().join("device.state");
    Node::start(directory.path()).server.stop();
    std::fs::write(&state, "version = 1\nnamespaces = 7\n").unwrap();
    let device = path(directory.path(), "device");
    let output = octokv(["serve", "--device", &device, "--listen", "127.0.0.1:0"]);
    output.assert_failed(1, &["device.state", "namespaces"]);
    assert_eq!(std::fs::read_to_string(&state).unwrap(), "version = 1\nnamespaces = 7\n");
}

#[test]
fn the_socket_is_private_to_its_owner_and_replaced_only_after_a_dead_node() {
    let directory = temp_directory();
    let directory = directory.path();
    let mut node = Node::start(directory);
    let mode = std::fs::metadata(&node.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let (other, socket) = (path(directory, "other"), node.socket.to_str().unwrap().to_owned());
    let serve =
        ["serve", "--device", &other, "--size", "64MiB", "--listen", "127.0.0.1:0", "--admin", &socket];
    octokv(serve).assert_failed(1, &["admin.sock", "another node"]);
    node.server.kill();
    assert!(Path::new(&socket).exists(), "a killed node leaves its socket");
    let node = Node::start(directory);
    assert_eq!(node.nsids(), [1]);
    node.server.stop();
    assert!(!Path::new(&socket).exists(), "a node that stops cleanly removes it");
    std::fs::write(&socket, "precious").unwrap();
    octokv(serve).assert_failed(1, &["admin.sock", "not a socket"]);
    assert_eq!(std::fs::read_to_string(&socket).unwrap(), "precious");
}

#[test]
fn malformed_admin_requests_get_an_error_and_disturb_no_other_client() {
    let directory = temp_directory();
    let node = Node::start(directory.path());
    let table = [
        ("GET /v1/nothing HTTP/1.0\r\n\r\n", "404"),
        ("GET /v1/scheduling HTTP/1.0\r\n\r\n", "410"),
        ("GET /v1/scheduling/window HTTP/1.0\r\n\r\n", "410"),
        ("DELETE /v1/namespaces/x HTTP/1.0\r\n\r\n", "400"),
        ("PUT /v1/ana/1 HTTP/1.0\r\n\r\n", "400"),
        (
            "POST /v1/namespaces HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}",
            "400",
        ),
        ("\0\0\0\0\r\n\r\n", "400"),
    ];
    for (request, status) in table {
        let response = node.raw_request(request);
        assert!(response.starts_with("HTTP/1.") && response.contains(status), "{request:?}: {response}");
    }
    let body = r#"{"kind":"kv","device":"memory","size_bytes":67108864,"engine":"tree"}"#;
    let unknown_engine = format!(
        "POST /v1/namespaces HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let response = node.raw_request(&unknown_engine);
    assert!(response.contains("400") && response.contains("tree"), "{response}");
    let body = r#"{"window_ms":9}"#;
    let former = format!(
        "PUT /v2/scheduling HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let response = node.raw_request(&former);
    assert!(
        response.contains("400") && response.contains(r#"\"window_ms\" is now \"interval_ms\""#),
        "{response}"
    );
    // An idle connection does not delay the node's shutdown.
    let mut silent = UnixStream::connect(&node.socket).unwrap();
    silent.write_all(b"POST /v1/namespaces HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n").unwrap();
    node.server.stop();
}

#[test]
fn without_a_node_the_commands_name_the_socket() {
    let directory = temp_directory();
    let socket = path(directory.path(), "none.sock");
    octokv(["ns", "list", "--admin", &socket]).assert_failed(1, &["no node responds", "none.sock"]);
    // A server that is not a node.
    let listener = UnixListener::bind(&socket).unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let _ = stream.read(&mut [0; 1000]);
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nyes");
    });
    octokv(["ns", "list", "--admin", &socket]).assert_failed(1, &["no"]);
    thread.join().unwrap();
}
