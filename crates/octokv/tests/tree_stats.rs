//! The tree of an ordered engine through the binary: what `octokv stats` shows of it, and the settings that it has.

use crate::common::{Server, octokv, serve_expecting_failure, temp_directory};
use octokv_client::ScanOptions;
use octokv_client::blocking::BlockingClient;
use serde_json::Value;
use std::path::Path;

/// Starts a node with an ordered engine on a file in a directory.
fn start(directory: &Path, flags: &[&str]) -> Server {
    let (device, socket) = (directory.join("device"), directory.join("admin.sock"));
    let device = ["--device", device.to_str().unwrap(), "--size", "128MiB", "--engine", "lsm"];
    let admin = ["--listen", "127.0.0.1:0", "--admin", socket.to_str().unwrap(), "--prepare-bytes", "0"];
    Server::start_with(directory, &[&device, &admin, flags].concat())
}

fn run(directory: &Path, command: &[&str]) -> String {
    let socket = directory.join("admin.sock");
    let arguments = [command, &["--admin", socket.to_str().unwrap()]].concat();
    octokv(arguments).stdout_ok().to_owned()
}

/// The tree of namespace 1, once `is_wanted` says so, which the reports of a few intervals at most may take.
fn tree(directory: &Path, is_wanted: impl Fn(&Value) -> bool) -> Value {
    for _ in 0..100_000 {
        let interval: Value = serde_json::from_str(&run(directory, &["stats", "--json"])).unwrap();
        let [tree] = &interval["trees"].as_array().unwrap()[..] else { panic!("one tree in {interval}") };
        assert_eq!((&tree["nsid"], interval["compacted"].as_array().unwrap().len()), (&1.into(), 0));
        if is_wanted(tree) {
            return tree.clone();
        }
    }
    panic!("it never was so")
}

fn put_all(client: &BlockingClient, byte: u8) {
    for index in 0..200 {
        client.put(format!("key{index:03}").as_bytes(), &[byte; 2_000]).unwrap();
    }
}

#[test]
fn stats_show_levels_segments_and_what_an_iterator_holds_until_it_is_idle_for_too_long() {
    let directory = temp_directory();
    let directory = directory.path();
    let server = start(directory, &["--cores", "0", "--iterator-idle-s", "4"]);
    let client = BlockingClient::connect(&server.url).unwrap();
    put_all(&client, 1);
    run(directory, &["compact"]);
    let compacted = tree(directory, |_| true);
    assert_eq!(compacted["flushes"], 1);
    assert!(compacted["last_sequence"].as_u64().unwrap() >= 200, "{compacted}");
    let levels = compacted["levels"].as_array().unwrap();
    let tables: Vec<u64> = levels.iter().map(|level| level["tables"].as_u64().unwrap()).collect();
    let bytes: u64 = levels.iter().map(|level| level["bytes"].as_u64().unwrap()).sum();
    assert_eq!((tables.len(), tables[0], tables.iter().sum::<u64>() > 0), (7, 0, true), "{compacted}");
    assert!(bytes > 200 * 2_000, "values of 2,000 bytes lie in tables: {compacted}");
    assert_eq!(compacted["segments"], 0);
    assert_eq!((&compacted["iterators"], &compacted["oldest_snapshot"]), (&0.into(), &Value::Null));

    let options = ScanOptions { pairs_per_command: 1, ..ScanOptions::default() };
    let mut scan = client.scan(options).unwrap();
    assert_eq!(scan.next().unwrap().unwrap().value, [1; 2_000]);
    put_all(&client, 2);
    run(directory, &["compact"]);
    let held = tree(directory, |_| true);
    assert_eq!(held["iterators"], 1);
    assert_eq!(held["oldest_snapshot"]["sequence"], compacted["last_sequence"]);
    assert!(held["pinned_bytes"].as_u64().unwrap() > 200 * 2_000, "{held}");
    let table = run(directory, &["stats"]);
    for part in
        ["tree of namespace 1: level", " compactions: ", "1 iterators, 0 expired; ", "oldest snapshot: "]
    {
        assert!(table.contains(part), "no \"{part}\" in {table}");
    }
    // What it held is given back behind its end.
    let ended = tree(directory, |tree| tree["iterators"] == 0 && tree["pinned_bytes"] == 0);
    assert_eq!(ended["oldest_snapshot"], Value::Null);
    // It goes on in another snapshot.
    assert_eq!((scan.by_ref().filter(|pair| pair.is_ok()).count(), scan.snapshots()), (199, 2));
    server.stop();
}

#[test]
fn values_from_the_configured_length_on_lie_in_segments() {
    let directory = temp_directory();
    let directory = directory.path();
    let server = start(directory, &["--inline-bytes-max", "2000"]);
    put_all(&BlockingClient::connect(&server.url).unwrap(), 3);
    run(directory, &["compact"]);
    let keys_and_values = 200 * (6 + 2_000);
    assert_eq!(tree(directory, |_| true)["segment_live_bytes"], keys_and_values);
    server.stop();
    // A volume keeps the length that it was formatted with.
    let server = start(directory, &["--inline-bytes-max", "16KiB"]);
    put_all(&BlockingClient::connect(&server.url).unwrap(), 4);
    run(directory, &["compact"]);
    assert_eq!(tree(directory, |_| true)["segment_live_bytes"], keys_and_values);
    server.stop();
}

#[test]
fn tables_are_compressed_from_the_start_on_that_says_so_and_read_afterwards() {
    let directory = temp_directory();
    let directory = directory.path();
    let level_bytes = |server_flags: &[&str], value: u8| {
        let server = start(directory, server_flags);
        let client = BlockingClient::connect(&server.url).unwrap();
        if value > 1 {
            // Its snapshot ends here.
            let mut scan = client.scan(ScanOptions::default()).unwrap();
            assert!(scan.all(|pair| pair.unwrap().value == [value - 1; 2_000]), "what the last start wrote");
        }
        put_all(&client, value);
        run(directory, &["compact"]);
        let tree = tree(directory, |_| true);
        server.stop();
        let levels = tree["levels"].as_array().unwrap();
        levels.iter().map(|level| level["bytes"].as_u64().unwrap()).sum::<u64>()
    };
    let plain = level_bytes(&[], 1);
    let compressed = level_bytes(&["--compress", "--value-prefetch", "3"], 2);
    let plain_again = level_bytes(&["--value-prefetch", "0"], 3);
    assert!(compressed * 4 < plain, "{compressed} instead of {plain} B");
    assert!(plain_again.abs_diff(plain) < plain / 10, "{plain_again} instead of {plain} B");
}

#[test]
fn lengths_and_times_out_of_range_are_refused_with_the_range() {
    let directory = temp_directory();
    let device = directory.path().join("device");
    let table: [(&[&str], &str); 6] = [
        (&["--value-prefetch", "65"], "value_prefetch must be auto, or 0 to 64"),
        (&["--value-prefetch", "many"], "\"many\" is not auto or a number of values"),
        (&["--inline-bytes-max", "16385"], "inline_bytes_max must be at most 16KiB"),
        (&["--iterator-idle-s", "0"], "iterator_idle_s must be 1 to 86400"),
        (&["--iterator-idle-s", "86401"], "iterator_idle_s must be 1 to 86400"),
        (&["--compact-bytes-per-second", "fast"], "\"fast\" is not auto or a size"),
    ];
    for (flags, why) in table {
        let failed = serve_expecting_failure(&device, flags);
        assert!(failed.code != 0 && failed.stderr.contains(why), "{}", failed.stderr);
    }
    assert!(!device.exists());
}
