//! Values in pieces of a node: what `octokv stats` says of them, and that compaction makes records of them.
//! `octokv compact`.

use crate::common::{Server, octokv, temp_directory};
use octokv_client::blocking::BlockingClient;
use serde_json::Value;
use std::path::Path;

/// Starts a node on a file of 32 MiB in a directory.
fn start(directory: &Path, compact_bytes_per_second: &str) -> Server {
    let (device, socket) = (directory.join("device"), directory.join("admin.sock"));
    let device = ["--device", device.to_str().unwrap(), "--size", "32MiB", "--unit", "4096"];
    let admin = ["--listen", "127.0.0.1:0", "--admin", socket.to_str().unwrap()];
    let rate = ["--compact-bytes-per-second", compact_bytes_per_second, "--prepare-bytes", "0"];
    let arguments: Vec<&str> = device.into_iter().chain(admin).chain(rate).collect();
    Server::start_with(directory, &arguments)
}

/// Values in pieces, and values joined, of namespace 1, once `is_enough` says so.
fn compacted(directory: &Path, is_enough: impl Fn(u64, u64) -> bool) -> String {
    let socket = directory.join("admin.sock");
    loop {
        let stats = octokv(["stats", "--json", "--admin", socket.to_str().unwrap()]);
        let interval: Value = serde_json::from_str(stats.stdout_ok()).unwrap();
        if let [one] = &interval["compacted"].as_array().unwrap()[..] {
            assert_eq!(one["nsid"], 1);
            let [in_pieces, joined] =
                ["values_in_pieces", "joined_values"].map(|name| one[name].as_u64().unwrap());
            if is_enough(in_pieces, joined) {
                return octokv(["stats", "--admin", socket.to_str().unwrap()]).stdout_ok().to_owned();
            }
        }
        std::thread::yield_now();
    }
}

/// Fills a node whose compaction is off so that 4 values are in pieces, and gives the number of short values that were stored, of
/// which every second one is left.
fn fill_in_pieces(directory: &Path, client: &BlockingClient) -> u32 {
    let count = (0..).find(|&index| client.put(&short(index), &[7; 30_000]).is_err()).unwrap();
    (0..count).step_by(2).for_each(|index| assert!(client.delete(&short(index)).unwrap()));
    (1..5).for_each(|index| client.put(&[index], &long(index)).unwrap());
    let table = compacted(directory, |in_pieces, joined| (in_pieces, joined) == (4, 0));
    assert!(table.contains("compaction of namespace 1: 4 values in pieces, 0 joined"), "{table}");
    count
}

fn short(index: u32) -> Vec<u8> {
    format!("short{index}").into_bytes()
}

fn long(index: u8) -> Vec<u8> {
    vec![index; 1_000_000]
}

fn assert_values(client: &BlockingClient, count: u32) {
    (1..5).for_each(|index| assert_eq!(client.get(&[index]).unwrap(), Some(long(index))));
    for index in (1..count).step_by(2) {
        assert_eq!(client.get(&short(index)).unwrap(), Some(vec![7; 30_000]));
    }
}

#[test]
fn values_in_pieces_become_records_and_stats_say_so() {
    let directory = temp_directory();
    let directory = directory.path();
    let server = start(directory, "0");
    let count = fill_in_pieces(directory, &BlockingClient::connect(&server.url).unwrap());
    server.stop();
    let server = start(directory, "1GiB");
    let client = BlockingClient::connect(&server.url).unwrap();
    let table = compacted(directory, |in_pieces, joined| (in_pieces, joined) == (0, 4));
    assert!(table.contains("compaction of namespace 1: 0 values in pieces, 4 joined"), "{table}");
    assert_values(&client, count);
    server.stop();
}

#[test]
fn a_namespace_is_compacted_on_request_although_its_node_compacts_nothing() {
    let directory = temp_directory();
    let directory = directory.path();
    let server = start(directory, "0");
    let client = BlockingClient::connect(&server.url).unwrap();
    let count = fill_in_pieces(directory, &client);
    let socket = directory.join("admin.sock");
    let run =
        |arguments: &[&str]| octokv(arguments.iter().copied().chain(["--admin", socket.to_str().unwrap()]));
    let printed = run(&["compact", "--json"]);
    let printed: Value = serde_json::from_str(printed.stdout_ok()).unwrap();
    assert_eq!((&printed["nsid"], &printed["keys"]), (&1.into(), &(count / 2 + 4).into()));
    compacted(directory, |in_pieces, joined| (in_pieces, joined) == (0, 4));
    assert_values(&client, count);
    run(&["compact", "9"]).assert_failed(1, &["there is no namespace 9"]);
    let blocks = directory.join("blocks");
    let add = ["ns", "add", "--kind", "block", "--size", "16MiB", "--nsid", "2", "--device"];
    run(&[&add[..], &[blocks.to_str().unwrap()]].concat()).stdout_ok();
    run(&["compact", "2"]).assert_failed(2, &["namespace 2 has blocks"]);
    server.stop();
}
