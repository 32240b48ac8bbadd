//! The async and blocking clients over TCP, against the target in its own thread: use from many threads, a node that
//! restarts, a busy node, errors of connecting.

use crate::support::{MapStore, NQN, pattern, target};
use octokv_base::{BufferPool, Nanos};
use octokv_client::{BlockingClient, Client, ClientConfig, ConnectionError, Error, Reconnect, StoreMode};
use octokv_nvmf::{Connection, Target};
use octokv_runtime::kernel::{now, spawn_thread};
use octokv_runtime::{KernelSockets, ReceiveStatus, SendStatus, Sockets};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::thread::JoinHandle;

pub struct Server {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
    pub store: Arc<Mutex<MapStore>>,
}

impl Server {
    pub fn start(at: &str, target: Arc<Target>, store: Arc<Mutex<MapStore>>) -> Server {
        let (address_sender, address_receiver) = mpsc::channel();
        let stop = Arc::new(AtomicBool::new(false));
        let (at, thread_stop, shared) = (at.parse().unwrap(), Arc::clone(&stop), Arc::clone(&store));
        let thread =
            spawn_thread("node", move || serve(at, &target, &shared, &thread_stop, &address_sender)).unwrap();
        let address = address_receiver.recv().expect("the server listens");
        Server { address, stop, thread: Some(thread), store }
    }

    pub fn url(&self) -> String {
        format!("nvme+tcp://{}/{NQN}?nsid=1", self.address)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || !matches!(ended, Some(Err(_))), "the server panicked");
    }
}

fn serve(
    at: SocketAddr,
    target: &Arc<Target>,
    store: &Mutex<MapStore>,
    stop: &AtomicBool,
    address_sender: &mpsc::Sender<SocketAddr>,
) {
    let mut sockets = KernelSockets::new().unwrap();
    let (listener, address) = sockets.listen(at).unwrap();
    address_sender.send(address).unwrap();
    let pool = BufferPool::new(64 << 20);
    let mut connections = Vec::new();
    let (mut buffer, mut requests) = (vec![0; 1 << 20], Vec::new());
    while !stop.load(Ordering::Relaxed) {
        sockets.wait(Nanos::from_millis(1));
        sockets.ready(&mut Vec::new());
        while let Some((socket, peer)) = sockets.accept(listener) {
            let connection = Connection::new(Arc::clone(target), address, peer, now());
            connections.push((socket, connection, Vec::new()));
        }
        connections.retain_mut(|(socket, connection, held)| {
            match sockets.receive(*socket, &mut buffer) {
                ReceiveStatus::Bytes(bytes) => held.extend_from_slice(&buffer[..bytes]),
                ReceiveStatus::WouldBlock => {}
                ReceiveStatus::Closed => {
                    connection.peer_closed();
                    sockets.close(*socket);
                    return false;
                }
            }
            loop {
                let consumed = connection.receive(now(), held, &pool, &mut requests);
                held.drain(..consumed.consumed_bytes);
                if consumed.consumed_bytes == 0 && requests.is_empty() {
                    break;
                }
                for request in requests.drain(..) {
                    let outcome = store.lock().unwrap().execute(request.operation);
                    connection.complete(request.slot, outcome);
                }
            }
            connection.tick(now());
            while !connection.send_buffer().is_empty() {
                let mut slices = Vec::new();
                connection.send_buffer().slices(&mut slices, usize::MAX);
                match sockets.send(*socket, &slices) {
                    SendStatus::Bytes(bytes) => connection.send_buffer().advance(bytes),
                    SendStatus::WouldBlock => break,
                    SendStatus::Closed => return false,
                }
            }
            true
        });
    }
}

pub fn server() -> Server {
    Server::start("127.0.0.1:0", target(|_| {}), Arc::default())
}

#[test]
fn the_blocking_client_executes_every_operation() {
    let server = server();
    let client = BlockingClient::connect(&server.url()).unwrap();
    client.put(b"hello", b"world").unwrap();
    assert_eq!(client.get(b"hello").unwrap().as_deref(), Some(b"world".as_slice()));
    assert_eq!(client.get(b"missing").unwrap(), None);
    assert_eq!(client.exist(b"hello").unwrap(), Some(5));
    assert_eq!(client.exist(b"missing").unwrap(), None);
    assert!(!client.put_with(b"hello", b"x", StoreMode::AddOnly).unwrap());
    assert!(!client.put_with(b"missing", b"x", StoreMode::UpdateOnly).unwrap());
    assert!(client.put_with(b"hello", &pattern(300_000), StoreMode::UpdateOnly).unwrap());
    assert_eq!(client.get(b"hello").unwrap(), Some(pattern(300_000)));
    client.put(b"empty", b"").unwrap();
    assert_eq!(client.get(b"empty").unwrap(), Some(vec![]));
    client.put(&[b'x'; 1024], b"long").unwrap();
    assert_eq!(client.get(&[b'x'; 1024]).unwrap().as_deref(), Some(b"long".as_slice()));
    assert_eq!(client.get(b"").unwrap_err(), Error::KeyLength { have: 0, max: 1024 });
    assert_eq!(client.get(&[0; 1025]).unwrap_err(), Error::KeyLength { have: 1025, max: 1024 });
    client.flush().unwrap();
    assert!(client.delete(b"hello").unwrap());
    assert_eq!(client.get(b"hello").unwrap(), None);
}

#[test]
fn a_listing_continues_over_many_pages() {
    let server = server();
    let names: Vec<Vec<u8>> = (0..20_000u32).map(|i| format!("key-{i:08}").into_bytes()).collect();
    for name in &names {
        server.store.lock().unwrap().values.insert(name.clone(), vec![]);
    }
    let client = BlockingClient::connect(&server.url()).unwrap();
    assert_eq!(client.list(b"", usize::MAX).unwrap(), names);
    assert_eq!(client.list(&names[7], 10_000).unwrap(), names[7..10_007]);
    assert_eq!(client.list(b"z", 10).unwrap(), Vec::<Vec<u8>>::new());
    assert_eq!(client.list(b"", 0).unwrap(), Vec::<Vec<u8>>::new());
}

#[test]
fn many_threads_share_one_client() {
    let server = server();
    let config = ClientConfig { io_queues: 2, data_digest: true, ..ClientConfig::default() };
    let client = BlockingClient::connect_with(&server.url(), config).unwrap();
    let work = |number: u8| {
        let client = client.clone();
        let body = move || {
            for round in 0..200usize {
                let (key, value) = ([number, round as u8], pattern(usize::from(number) * 1000 + round));
                client.put(&key, &value).unwrap();
                assert_eq!(client.get(&key).unwrap(), Some(value));
            }
        };
        spawn_thread("caller", body).unwrap()
    };
    let threads: Vec<_> = (0..8).map(work).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(client.list(b"", usize::MAX).unwrap().len(), 1600);
}

#[test]
fn many_futures_are_in_flight_at_once_on_any_executor() {
    let server = server();
    let client = BlockingClient::connect(&server.url()).unwrap();
    let client: &Client = client.as_async();
    let mut futures: Vec<_> = (0..500u16)
        .map(|i| Box::pin(async move { client.put(&i.to_le_bytes(), &i.to_be_bytes()).await }))
        .collect();
    let mut context = Context::from_waker(Waker::noop());
    while !futures.is_empty() {
        futures.retain_mut(|future| match future.as_mut().poll(&mut context) {
            Poll::Ready(result) => {
                result.unwrap();
                false
            }
            Poll::Pending => true,
        });
        std::thread::yield_now();
    }
    assert_eq!(server.store.lock().unwrap().values.len(), 500);
}

#[test]
fn a_read_survives_a_restart_of_the_node() {
    let store = Arc::new(Mutex::new(MapStore::default()));
    let first = Server::start("127.0.0.1:0", target(|_| {}), Arc::clone(&store));
    let address = first.address.to_string();
    let client = BlockingClient::connect(&first.url()).unwrap();
    client.put(b"k", b"v").unwrap();
    drop(first);
    // The node is down: the read waits for it.
    let mut read = pin!(client.as_async().get(b"k"));
    let mut context = Context::from_waker(Waker::noop());
    assert!(read.as_mut().poll(&mut context).is_pending());
    let _second = Server::start(&address, target(|_| {}), store);
    let response = loop {
        if let Poll::Ready(response) = read.as_mut().poll(&mut context) {
            break response;
        }
        std::thread::yield_now();
    };
    assert_eq!(response.unwrap().as_deref(), Some(b"v".as_slice()));
    client.put(b"k", b"w").unwrap();
}

#[test]
fn a_command_on_a_busy_node_is_retried() {
    let server = server();
    let client = BlockingClient::connect(&server.url()).unwrap();
    server.store.lock().unwrap().busy_responses = 3;
    client.put(b"k", b"v").unwrap();
    assert_eq!(server.store.lock().unwrap().executed_count, 4);
}

#[test]
fn a_client_stops_reconnecting_to_a_node_that_never_returns() {
    let server = server();
    let reconnect = Reconnect::BackOff {
        first_delay: Nanos::from_millis(1),
        delay_max: Nanos::from_millis(1),
        give_up_after: Nanos::from_millis(20),
    };
    let config = ClientConfig { reconnect, ..ClientConfig::default() };
    let client = BlockingClient::connect_with(&server.url(), config).unwrap();
    let address = server.address;
    drop(server);
    let gone = Error::Connect(address, ConnectionError::Closed);
    assert_eq!(client.get(b"k").unwrap_err(), gone);
    assert_eq!(client.get(b"k").unwrap_err(), gone);
}

#[test]
fn connect_errors_name_the_cause() {
    let connect = |url: &str| BlockingClient::connect(url).unwrap_err().to_string();
    assert!(connect("http://x").contains("\"http://x\" is not a URL"));
    let free = std::net::SocketAddr::from(([127, 0, 0, 1], 1));
    let refused = connect(&format!("nvme+tcp://{free}/{NQN}"));
    assert!(refused.contains("cannot connect to 127.0.0.1:1"), "{refused}");
    let unknown = connect(&format!("nvme+tcp://no-such-host.invalid/{NQN}"));
    assert!(unknown.contains("\"no-such-host.invalid\" has no address"), "{unknown}");
    let server = server();
    let other = connect(&format!("nvme+tcp://{}/nqn.2026-11.io.octokv:other", server.address));
    assert!(other.contains("refused the connection"), "{other}");
    let missing = connect(&format!("nvme+tcp://{}/{NQN}?nsid=7", server.address));
    assert!(missing.contains("the namespace does not exist"), "{missing}");
}
