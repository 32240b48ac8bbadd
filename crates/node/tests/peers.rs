//! Outgoing sessions of a reactor on real sockets: two nodes in this process, over loopback TCP. The cores sleep whenever
//! they are idle, so each step also shows that sockets and deadlines of peers wake them.

use octokv_base::{Key, Nanos};
use octokv_client::{
    BlockingClient, ClientConfig, Command, Error, PeerConfig, PeerSession, Reconnect, Response, StoreMode,
    Value,
};
use octokv_node::{DeviceConfig, NodeConfig, RunningNode, start};
use octokv_runtime::Polling;
use octokv_sys::thread;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, channel};

const HOST: &str = "nqn.2026-11.io.octokv:node-a";

fn node(listen: &str, core: usize) -> RunningNode {
    let config = NodeConfig {
        devices: vec![DeviceConfig::Memory { bytes: 64 << 20, block_bytes: 4096 }],
        listen: vec![listen.parse().unwrap()],
        cores: vec![core],
        polling: Polling::Sleep,
        ..NodeConfig::default()
    };
    start(config).expect("starts")
}

/// Two nodes, on two cores if there are two.
fn nodes() -> (RunningNode, RunningNode) {
    let cores = thread::allowed_cores();
    (node("127.0.0.1:0", cores[0]), node("127.0.0.1:0", *cores.last().unwrap()))
}

fn url(node: &RunningNode) -> String {
    format!("nvme+tcp://{}/{}?nsid=1", node.addresses()[0], node.nqn())
}

fn peer_config() -> PeerConfig {
    let reconnect = Reconnect::BackOff {
        first_delay: Nanos::from_millis(2),
        delay_max: Nanos::from_millis(50),
        give_up_after: Nanos::NEVER,
    };
    let client = ClientConfig {
        host_nqn: HOST.to_owned(),
        host_id: *b"octokv node a id",
        queue_depth: 16,
        reconnect,
        retry_first_connection: true,
        jitter_seed: Some(1),
        receive_buffer_bytes: 64 << 10,
        ..ClientConfig::default()
    };
    PeerConfig { client, buffer_bytes_max: 8 << 20 }
}

/// Runs `task` on the first core of `node`, with a session to `peer`; its result arrives at the receiver.
fn run_with_peer<T: Send + 'static, F: Future<Output = T>>(
    node: &RunningNode,
    peer: SocketAddr,
    task: impl FnOnce(PeerSession) -> F + Send + 'static,
) -> Receiver<T> {
    let (result_tx, result_rx) = channel();
    let has_run = node.run_on_core(0, move |handle, peers| {
        let peer = peers.connect(peer, peer_config(), handle.now()).expect("the first peer");
        handle.spawn(async move {
            let result = task(peer).await;
            result_tx.send(result).expect("the test waits");
        });
    });
    assert!(has_run, "the node runs");
    result_rx
}

fn key(number: u32) -> Key {
    Key::new(format!("peer {number}").as_bytes()).unwrap()
}

fn value(number: u32) -> Arc<[u8]> {
    (0..number as usize * 997 % 50_000).map(|at| (at as u32 ^ number) as u8).collect()
}

async fn store(peer: &PeerSession, number: u32) -> Result<(), Error> {
    let value = Value::Shared(value(number));
    peer.execute(Command::Store { key: key(number), value, mode: StoreMode::Upsert }).await.map(|_| ())
}

async fn retrieve(peer: &PeerSession, number: u32) -> Result<Option<Vec<u8>>, Error> {
    match peer.execute(Command::Retrieve { key: key(number), limit_bytes: 64 << 10 }).await? {
        Response::Value { data, .. } => Ok(Some(data.to_vec())),
        _ => Ok(None),
    }
}

#[test]
fn a_core_uses_another_node_while_it_serves_a_host() {
    let (first, second) = nodes();
    let result = run_with_peer(&first, second.addresses()[0], |peer| async move {
        peer.until_live().await?;
        for number in 0..300 {
            store(&peer, number).await?;
            assert_eq!(retrieve(&peer, number).await?.as_deref(), Some(&*value(number)), "{number}");
        }
        Ok::<(), Error>(())
    });
    let host = BlockingClient::connect(&url(&first)).expect("the first node serves hosts");
    let mut served = 0u32;
    loop {
        host.put(&served.to_le_bytes(), &value(served)).expect("stores");
        assert_eq!(host.get(&served.to_le_bytes()).expect("reads").as_deref(), Some(&*value(served)));
        served += 1;
        match result.try_recv() {
            Ok(result) => break result.expect("every command succeeds"),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => panic!("the task has ended without a result"),
        }
    }
    println!("{served} puts and gets of the host meanwhile");
    let witness = BlockingClient::connect(&url(&second)).expect("the second node serves hosts");
    for number in [0, 1, 150, 299] {
        assert_eq!(witness.get(key(number).as_bytes()).expect("reads").as_deref(), Some(&*value(number)));
    }
    assert_eq!(first.statistics().keys, u64::from(served));
    drop((host, witness));
    first.stop().expect("shuts down cleanly");
    second.stop().expect("shuts down cleanly");
}

#[test]
fn a_core_reconnects_to_a_peer_that_restarts() {
    let (first, second) = nodes();
    let address = second.addresses()[0];
    let (lost_tx, lost_rx) = channel();
    let result = run_with_peer(&first, address, move |peer| async move {
        peer.until_live().await?;
        let (mut number, mut stored) = (0, 0);
        while store(&peer, number).await.is_ok() {
            (number, stored) = (number + 1, stored + 1);
            if stored == 20 {
                lost_tx.send(()).expect("the test waits");
            }
        }
        let after_the_loss = store(&peer, number).await;
        assert!(matches!(after_the_loss, Err(Error::Disconnected(_))), "{after_the_loss:?}");
        // The core is idle and sleeps: the delay of the next attempt wakes it.
        peer.until_live().await?;
        assert_eq!(peer.connection_epoch(), 2);
        store(&peer, number).await?;
        assert_eq!(retrieve(&peer, number).await?.as_deref(), Some(&*value(number)));
        peer.close();
        assert_eq!(store(&peer, number).await, Err(Error::Closed));
        Ok::<u32, Error>(stored)
    });
    lost_rx.recv().expect("twenty values are stored");
    second.stop().expect("shuts down cleanly");
    let second = node(&address.to_string(), *thread::allowed_cores().last().unwrap());
    assert!(result.recv().expect("the task ends").expect("the peer returns") >= 20);
    while first.core_statuses()[0].peers > 0 {}
    first.stop().expect("shuts down cleanly");
    second.stop().expect("shuts down cleanly");
}

#[test]
fn a_node_stops_with_sessions_to_peers() {
    let (first, second) = nodes();
    let (live_tx, live_rx) = channel();
    let result = run_with_peer(&first, second.addresses()[0], move |peer| async move {
        peer.until_live().await?;
        live_tx.send(()).expect("the test waits");
        for number in 0.. {
            store(&peer, number).await?;
        }
        Ok::<(), Error>(())
    });
    // A peer that does not exist, on a port that was free a moment ago.
    let missing = node("127.0.0.1:0", thread::allowed_cores()[0]);
    let absent = missing.addresses()[0];
    missing.stop().expect("shuts down cleanly");
    let waiting = run_with_peer(&first, absent, |peer| async move { peer.until_live().await });
    live_rx.recv().expect("the session is live");
    assert_eq!(first.core_statuses()[0].peers, 2);
    first.stop().expect("shuts down cleanly");
    assert_eq!(result.recv().expect("the task ends before its core"), Err(Error::Closed));
    assert_eq!(waiting.recv().expect("the task ends before its core"), Err(Error::Closed));
    second.stop().expect("shuts down cleanly");
}
