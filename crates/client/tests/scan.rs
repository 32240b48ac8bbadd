//! Scans over TCP: order, bounds and directions, pairs of every size, and a node that restarts in the middle.

use crate::client::{Server, server};
use crate::support::{MapStore, pattern, target};
use octokv_base::NamespaceId;
use octokv_client::{BlockingClient, BlockingScan, Error, Pair, ScanOptions};
use octokv_nvmf::{NamespaceInfo, NamespaceKind, Target};
use std::sync::{Arc, Mutex};

/// A node's store with these keys: of each the value is the key, some times over.
fn store_of(keys: &[Vec<u8>]) -> Arc<Mutex<MapStore>> {
    let mut store = MapStore::default();
    store.values.extend(keys.iter().map(|key| (key.clone(), key.repeat(3))));
    Arc::new(Mutex::new(store))
}

fn keys_of_count(count: u32) -> Vec<Vec<u8>> {
    (0..count).map(|index| format!("key-{index:06}").into_bytes()).collect()
}

fn start(keys: &[Vec<u8>]) -> (Server, BlockingClient) {
    let server = Server::start("127.0.0.1:0", target(|_| {}), store_of(keys));
    let client = BlockingClient::connect(&server.url()).unwrap();
    (server, client)
}

fn some(pairs_per_command: u32) -> ScanOptions {
    ScanOptions { pairs_per_command, ..ScanOptions::default() }
}

fn take(scan: &mut BlockingScan, count: usize) -> Vec<Vec<u8>> {
    scan.take(count)
        .map(|pair| {
            let Pair { key, value } = pair.unwrap();
            assert_eq!(value, key.repeat(3));
            key
        })
        .collect()
}

#[test]
fn a_scan_yields_every_pair_once_whatever_a_command_carries() {
    let keys = keys_of_count(5_000);
    let (_server, client) = start(&keys);
    for pairs_per_command in [1, 7, 1024, 100_000] {
        let mut scan = client.scan(some(pairs_per_command)).unwrap();
        assert_eq!(take(&mut scan, usize::MAX), keys, "{pairs_per_command} pairs a command");
        assert!(scan.next().is_none(), "behind the end");
        assert_eq!(scan.snapshots(), 1);
    }
}

#[test]
fn bounds_direction_and_keys_only_are_the_nodes() {
    let keys = keys_of_count(100);
    let (_server, client) = start(&keys);
    let (lower, upper) = (keys[10].clone(), keys[20].clone());
    let options = ScanOptions { lower: lower.clone(), upper: upper.clone(), ..some(3) };
    assert_eq!(take(&mut client.scan(options.clone()).unwrap(), usize::MAX), keys[10..20]);
    let mut backward = keys[10..20].to_vec();
    backward.reverse();
    let reverse = ScanOptions { reverse: true, ..options.clone() };
    assert_eq!(take(&mut client.scan(reverse).unwrap(), usize::MAX), backward);
    let only = ScanOptions { keys_only: true, ..options };
    assert!(client.scan(only).unwrap().all(|pair| pair.unwrap().value.is_empty()));
    let reversed = ScanOptions { lower: upper, upper: lower, ..some(3) };
    assert!(matches!(client.scan(reversed).err(), Some(Error::Status(_))));
    let long = ScanOptions { lower: vec![1; 1025], ..some(3) };
    assert_eq!(client.scan(long).err(), Some(Error::KeyLength { have: 1025, max: 1024 }));
}

#[test]
fn a_namespace_without_iterators_says_so_whether_or_not_another_has_them() {
    let with = |has: [bool; 2]| {
        let whole = target(|_| {});
        let namespaces = [1, 2].map(|id| {
            let mut info = whole.namespaces().get(NamespaceId(1)).expect("namespace 1").clone();
            let NamespaceKind::KeyValue { has_iterators, .. } = &mut info.kind else { unreachable!() };
            *has_iterators = has[id as usize - 1];
            NamespaceInfo { id: NamespaceId(id), nguid: [id as u8; 16], ..info }
        });
        Target::new(whole.config().clone(), namespaces.to_vec())
    };
    for other_has in [false, true] {
        let server = Server::start("127.0.0.1:0", with([false, other_has]), store_of(&keys_of_count(1)));
        let client = BlockingClient::connect(&server.url()).unwrap();
        assert_eq!(client.scan(some(10)).err(), Some(Error::NoIterators), "{other_has}");
    }
}

#[test]
fn a_seek_moves_a_scan_in_its_direction() {
    let keys = keys_of_count(100);
    let (_server, client) = start(&keys);
    let mut scan = client.scan(some(10)).unwrap();
    assert_eq!(take(&mut scan, 3), keys[..3]);
    scan.seek(b"key-000049x").unwrap();
    assert_eq!(take(&mut scan, 2), keys[50..52]);
    scan.seek(b"a").unwrap();
    assert_eq!(take(&mut scan, usize::MAX), keys);
    scan.seek(&keys[99]).unwrap();
    assert_eq!(take(&mut scan, 2), keys[99..], "also behind the end");
    let mut reverse = client.scan(ScanOptions { reverse: true, ..some(10) }).unwrap();
    reverse.seek(b"key-000049x").unwrap();
    assert_eq!(take(&mut reverse, 1), keys[49..50]);
}

#[test]
fn pairs_of_every_length_arrive() {
    let server = server();
    let lengths = [0, 1, 262_110, 262_111, 262_112, 262_113, 1 << 20, 2 << 20, 5];
    for (index, &bytes) in lengths.iter().enumerate() {
        server.store.lock().unwrap().values.insert(vec![index as u8; 1 + index * 120], pattern(bytes));
    }
    let client = BlockingClient::connect(&server.url()).unwrap();
    let scan = client.scan(ScanOptions::default()).unwrap();
    let found: Vec<_> = scan.map(|pair| pair.unwrap()).map(|pair| (pair.key[0], pair.value)).collect();
    assert_eq!(found.len(), lengths.len());
    for ((index, value), bytes) in found.into_iter().zip(lengths) {
        assert!(value == pattern(bytes), "value {index}");
    }
}

#[test]
fn a_scan_goes_on_behind_its_last_key_after_a_restart_and_says_so() {
    let keys = keys_of_count(100);
    for reverse in [false, true] {
        let mut in_order = keys.clone();
        if reverse {
            in_order.reverse();
        }
        for before in [0, 1, 10, 15] {
            let store = store_of(&keys);
            let first = Server::start("127.0.0.1:0", target(|_| {}), Arc::clone(&store));
            let address = first.address.to_string();
            let client = BlockingClient::connect(&first.url()).unwrap();
            let mut scan = client.scan(ScanOptions { reverse, ..some(10) }).unwrap();
            assert_eq!(take(&mut scan, before), in_order[..before]);
            drop(first);
            let _second = Server::start(&address, target(|_| {}), Arc::clone(&store));
            // Another scan of the same client gets the identifier that the first had.
            let mut other = client.scan(some(10)).unwrap();
            assert_eq!(take(&mut other, 1), keys[..1]);
            // The new snapshot shows what was deleted meanwhile.
            store.lock().unwrap().values.remove(&in_order[60]);
            let mut rest = in_order[before..].to_vec();
            rest.remove(60 - before);
            assert_eq!(take(&mut scan, usize::MAX), rest, "after {before}, reverse {reverse}");
            assert_eq!(scan.snapshots(), 2);
            assert_eq!(take(&mut other, usize::MAX), keys[1..], "of its own moment");
        }
    }
}

#[test]
fn a_sought_place_survives_a_restart() {
    let keys = keys_of_count(100);
    let store = store_of(&keys);
    let first = Server::start("127.0.0.1:0", target(|_| {}), Arc::clone(&store));
    let address = first.address.to_string();
    let client = BlockingClient::connect(&first.url()).unwrap();
    let mut scan = client.scan(some(10)).unwrap();
    scan.seek(&keys[40]).unwrap();
    drop(first);
    let _second = Server::start(&address, target(|_| {}), store);
    assert_eq!(take(&mut scan, 2), keys[40..42]);
    assert_eq!(scan.snapshots(), 2);
}

#[test]
fn a_seek_that_fails_leaves_a_scan_where_it_was_and_a_new_snapshot_is_sought_again() {
    let keys = keys_of_count(100);
    let store = store_of(&keys);
    let first = Server::start("127.0.0.1:0", target(|_| {}), Arc::clone(&store));
    let address = first.address.to_string();
    let client = BlockingClient::connect(&first.url()).unwrap();
    let mut scan = client.scan(some(10)).unwrap();
    assert_eq!(take(&mut scan, 3), keys[..3]);
    store.lock().unwrap().failed_seeks = 1;
    assert_eq!(scan.seek(&keys[40]), Err(Error::UnrecoveredRead));
    assert_eq!(take(&mut scan, 9), keys[3..12]);
    scan.seek(&keys[40]).unwrap();
    drop(first);
    let _second = Server::start(&address, target(|_| {}), Arc::clone(&store));
    store.lock().unwrap().failed_seeks = 1;
    assert_eq!(scan.next(), Some(Err(Error::UnrecoveredRead)));
    assert_eq!(take(&mut scan, 2), keys[40..42]);
}

#[test]
fn a_dropped_scan_ends_its_iterator() {
    let keys = keys_of_count(10);
    let server = Server::start("127.0.0.1:0", target(|config| config.iterators_max = 2), store_of(&keys));
    let client = BlockingClient::connect(&server.url()).unwrap();
    for _ in 0..10 {
        let mut scan = client.scan(some(1)).unwrap();
        assert_eq!(take(&mut scan, 1), keys[..1]);
    }
    let _kept = [client.scan(some(1)).unwrap(), client.scan(some(1)).unwrap()];
    assert_eq!(client.scan(some(1)).err(), Some(Error::TooManyIterators));
}
