//! The kernel's TCP sockets: IPv4 and IPv6, order, back-pressure, closing, and sockets that move between cores.

use octokv_base::{Nanos, Prng};
use octokv_runtime::{KernelSockets, ListenerId, ReceiveStatus, SendStatus, SocketId, Sockets};
use octokv_sys::clock::now;
use std::io::IoSlice;
use std::net::SocketAddr;

const TIMEOUT: Nanos = Nanos::from_secs(20);

/// Retries until `attempt` returns a value; waits for an event in between.
fn until<T>(sockets: &mut KernelSockets, mut attempt: impl FnMut(&mut KernelSockets) -> Option<T>) -> T {
    let start = now();
    loop {
        if let Some(got) = attempt(sockets) {
            return got;
        }
        assert!(now().since(start) < TIMEOUT, "timed out");
        sockets.wait(Nanos::from_millis(20));
    }
}

fn accept(sockets: &mut KernelSockets, listener: ListenerId) -> (SocketId, SocketAddr) {
    until(sockets, |sockets| sockets.accept(listener))
}

fn receive(sockets: &mut KernelSockets, socket: SocketId, bytes: usize) -> Vec<u8> {
    let mut got = Vec::new();
    until(sockets, |sockets| {
        let mut chunk = [0; 4096];
        let capacity = chunk.len().min(bytes - got.len());
        match sockets.receive(socket, &mut chunk[..capacity]) {
            ReceiveStatus::Bytes(count) => got.extend_from_slice(&chunk[..count]),
            ReceiveStatus::WouldBlock => {}
            ReceiveStatus::Closed => panic!("closed after {} of {bytes} bytes", got.len()),
        }
        (got.len() == bytes).then_some(())
    });
    got
}

fn send(sockets: &mut KernelSockets, socket: SocketId, bytes: &[u8]) {
    let mut done = 0;
    until(sockets, |sockets| {
        match sockets.send(socket, &[IoSlice::new(&bytes[done..])]) {
            SendStatus::Bytes(count) => done += count,
            SendStatus::WouldBlock => {}
            SendStatus::Closed => panic!("broken after {done} bytes"),
        }
        (done == bytes.len()).then_some(())
    });
}

fn closed(sockets: &mut KernelSockets, socket: SocketId) {
    until(sockets, |sockets| (sockets.receive(socket, &mut [0; 64]) == ReceiveStatus::Closed).then_some(()));
}

/// Both ends of a stream over a listener at a free port of an address.
fn pair(at: &str) -> (KernelSockets, SocketId, SocketId) {
    let mut sockets = KernelSockets::new().unwrap();
    let (listener, address) = sockets.listen(at.parse().unwrap()).unwrap();
    assert_ne!(address.port(), 0);
    let client = sockets.connect(address).unwrap();
    let (server, peer) = accept(&mut sockets, listener);
    assert_eq!(sockets.local_address(client), Some(peer));
    assert_eq!(sockets.local_address(server), Some(address));
    (sockets, client, server)
}

#[test]
fn bytes_are_transferred_in_both_directions_over_ipv4_and_ipv6() {
    for at in ["127.0.0.1:0", "[::1]:0"] {
        let (mut sockets, client, server) = pair(at);
        let slices =
            [IoSlice::new(b"one "), IoSlice::new(b""), IoSlice::new(b"two "), IoSlice::new(b"three")];
        assert_eq!(sockets.send(client, &slices), SendStatus::Bytes(13));
        assert_eq!(receive(&mut sockets, server, 13), b"one two three");
        send(&mut sockets, server, b"answer");
        assert_eq!(receive(&mut sockets, client, 6), b"answer");
        assert_eq!(sockets.receive(client, &mut [0; 8]), ReceiveStatus::WouldBlock);
    }
}

#[test]
fn a_full_stream_accepts_more_once_the_peer_reads_and_loses_nothing() {
    let (mut sockets, client, server) = pair("127.0.0.1:0");
    let mut sent = vec![0; 24 << 20];
    Prng::new(5).fill(&mut sent);
    let mut done = 0;
    until(&mut sockets, |sockets| match sockets.send(client, &[IoSlice::new(&sent[done..])]) {
        SendStatus::Bytes(count) => {
            done += count;
            None
        }
        SendStatus::WouldBlock => Some(()),
        SendStatus::Closed => panic!("broken"),
    });
    assert!(done < sent.len(), "the socket buffers hold less than 24 MiB");
    let mut got = Vec::with_capacity(sent.len());
    let mut chunk = vec![0; 1 << 20];
    until(&mut sockets, |sockets| {
        sockets.ready(&mut Vec::new());
        if let ReceiveStatus::Bytes(count) = sockets.receive(server, &mut chunk) {
            got.extend_from_slice(&chunk[..count]);
        }
        if done < sent.len()
            && let SendStatus::Bytes(count) = sockets.send(client, &[IoSlice::new(&sent[done..])])
        {
            done += count;
        }
        (got.len() == sent.len()).then_some(())
    });
    assert!(got == sent);
}

#[test]
fn a_peer_that_closes_is_closed_after_its_last_bytes() {
    let (mut sockets, client, server) = pair("127.0.0.1:0");
    send(&mut sockets, client, b"last words");
    sockets.close(client);
    assert_eq!(receive(&mut sockets, server, 10), b"last words");
    closed(&mut sockets, server);
    sockets.close(server);
    assert_eq!(sockets.receive(server, &mut [0; 8]), ReceiveStatus::Closed);
    assert_eq!(sockets.send(server, &[IoSlice::new(b"x")]), SendStatus::Closed);
    assert!(sockets.is_empty());
}

#[test]
fn connecting_to_a_closed_port_closes_the_socket() {
    let mut sockets = KernelSockets::new().unwrap();
    let (_, address) = sockets.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    assert!(sockets.listen(address).is_err(), "the address is in use");
    drop(sockets);
    let mut sockets = KernelSockets::new().unwrap();
    // The kernel may fail the attempt immediately or later.
    if let Ok(socket) = sockets.connect(address) {
        closed(&mut sockets, socket);
        assert_eq!(sockets.send(socket, &[IoSlice::new(b"x")]), SendStatus::Closed);
    }
}

#[test]
fn a_socket_moves_to_another_core_with_its_unread_bytes() {
    let (mut first, client, server) = pair("127.0.0.1:0");
    send(&mut first, client, b"before");
    let moving = first.detach(server).unwrap();
    assert!(first.detach(server).is_none());
    let echo = octokv_sys::thread::spawn("second-core", move || {
        let mut second = KernelSockets::new().unwrap();
        let server = second.attach(moving);
        let got = receive(&mut second, server, 12);
        send(&mut second, server, &got);
        // Waits for the client's close, so that no reset discards bytes.
        closed(&mut second, server);
    })
    .unwrap();
    send(&mut first, client, b" after");
    assert_eq!(receive(&mut first, client, 12), b"before after");
    first.close(client);
    echo.join().unwrap();
}

#[test]
fn with_many_sockets_only_those_with_events_are_ready_until_they_would_block() {
    let mut sockets = KernelSockets::new().unwrap();
    let (listener, address) = sockets.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    let pairs: Vec<(SocketId, SocketId)> = (0..20)
        .map(|_| {
            let client = sockets.connect(address).unwrap();
            (client, accept(&mut sockets, listener).0)
        })
        .collect();
    let ready = |sockets: &mut KernelSockets| {
        let mut ready = Vec::new();
        sockets.ready(&mut ready);
        ready
    };
    // A new socket is readable once; after that none is.
    for socket in ready(&mut sockets) {
        assert_eq!(sockets.receive(socket, &mut [0; 8]), ReceiveStatus::WouldBlock);
    }
    assert_eq!(ready(&mut sockets), []);
    let (client, server) = pairs[7];
    send(&mut sockets, client, b"12345678");
    let events = until(&mut sockets, |sockets| Some(ready(sockets)).filter(|events| !events.is_empty()));
    assert_eq!(events, [server]);
    // After half of the bytes: still ready. After all: ready once more, then it would block.
    assert_eq!(sockets.receive(server, &mut [0; 4]), ReceiveStatus::Bytes(4));
    assert_eq!(ready(&mut sockets), [server]);
    assert_eq!(sockets.receive(server, &mut [0; 4]), ReceiveStatus::Bytes(4));
    assert_eq!(sockets.receive(server, &mut [0; 4]), ReceiveStatus::WouldBlock);
    assert_eq!(ready(&mut sockets), []);
    sockets.close(pairs[3].0);
    let events = until(&mut sockets, |sockets| Some(ready(sockets)).filter(|events| !events.is_empty()));
    assert_eq!(events, [pairs[3].1]);
    assert_eq!(sockets.receive(pairs[3].1, &mut [0; 4]), ReceiveStatus::Closed);
}

#[test]
fn a_connection_seen_by_a_nonblocking_poll_wakes_the_next_wait() {
    let mut sockets = KernelSockets::new().unwrap();
    let (listener, address) = sockets.listen("127.0.0.1:0".parse().unwrap()).unwrap();
    assert!(sockets.accept(listener).is_none(), "from here on only the poller reports connections");
    let mut peer = KernelSockets::new().unwrap();
    peer.connect(address).unwrap();
    // An idle core polls its sockets several more times after it polled its listeners, and then sleeps.
    let mut ready = Vec::new();
    for _ in 0..100 {
        sockets.ready(&mut ready);
    }
    let began = now();
    sockets.wait(Nanos::from_secs(60));
    assert!(now().since(began) < Nanos::from_secs(30), "it slept despite the connection");
    assert!(sockets.accept(listener).is_some());
}
