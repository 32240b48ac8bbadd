//! Sockets of the rig: byte streams in memory, between hosts and the cores of one node.
//!
//! The first core accepts the connections in the order in which hosts made them, and hands them over to other cores as the
//! kernel's sockets are. A connection has one lock, which its node's core and its host take for each send and receive: once
//! both run on one thread, its cache line stays with that thread's core.

use super::TestCosts;
use octokv_runtime::{
    DetachedSocket, ListenerId, ReactorHandle, ReceiveStatus, SendStatus, SocketId, Sockets, Stage,
};
use parking_lot::Mutex;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;

/// Bytes in transit in one direction.
#[derive(Default)]
pub struct ByteStream {
    bytes: Vec<u8>,
    taken: usize,
}

impl ByteStream {
    /// Appends bytes.
    pub fn put(&mut self, bytes: &[u8]) {
        if self.taken == self.bytes.len() {
            self.bytes.clear();
            self.taken = 0;
        }
        self.bytes.extend_from_slice(bytes);
    }

    fn take(&mut self, into: &mut [u8]) -> usize {
        let count = into.len().min(self.bytes.len() - self.taken);
        into[..count].copy_from_slice(&self.bytes[self.taken..self.taken + count]);
        self.taken += count;
        count
    }

    /// The bytes that were not taken.
    pub fn pending(&self) -> &[u8] {
        &self.bytes[self.taken..]
    }

    /// Sends the bytes of the last batch again, each command with another head. REQUIRES: all of them were taken, and the last
    /// batch was one call of [`ByteStream::put`] or of this function.
    ///
    /// # Panics
    /// The batch does not consist of as many commands as there are heads.
    pub fn put_heads(&mut self, heads: &[u8], head_bytes: usize) {
        let commands = heads.len() / head_bytes;
        assert!(self.pending().is_empty() && self.bytes.len().is_multiple_of(commands));
        let command_bytes = self.bytes.len() / commands;
        for (command, head) in self.bytes.chunks_exact_mut(command_bytes).zip(heads.chunks_exact(head_bytes))
        {
            command[..head_bytes].copy_from_slice(head);
        }
        self.taken = 0;
    }
}

/// One connection.
#[derive(Default)]
pub struct TestConnection {
    /// Bytes from the host.
    pub to_node: ByteStream,
    to_host: ByteStream,
    /// If set, responses are discarded and their bytes counted here.
    pub discarded_bytes: Option<u64>,
}

/// A connection, as both ends have it.
pub type SharedConnection = Arc<Mutex<TestConnection>>;

/// The connections of a node, in the order in which hosts made them.
#[derive(Default)]
pub struct TestNetwork {
    connections: Mutex<Vec<SharedConnection>>,
}

impl TestNetwork {
    /// The connection of this index.
    pub fn connection(&self, index: usize) -> SharedConnection {
        Arc::clone(&self.connections.lock()[index])
    }

    /// Connections made so far.
    pub fn len(&self) -> usize {
        self.connections.lock().len()
    }
}

/// The sockets of one core, or of one host.
pub struct TestSockets {
    network: Arc<TestNetwork>,
    /// By socket: its connection, while this core has it.
    sockets: Vec<Option<SharedConnection>>,
    accepted: usize,
    /// On the node's side: the core's clock, and the costs.
    accounting: Option<(ReactorHandle, TestCosts)>,
}

impl TestSockets {
    /// The sockets of a host.
    pub fn of_host(network: &Arc<TestNetwork>) -> TestSockets {
        TestSockets { network: Arc::clone(network), sockets: Vec::new(), accepted: 0, accounting: None }
    }

    /// The sockets of a core.
    pub fn of_core(network: &Arc<TestNetwork>, handle: &ReactorHandle, costs: TestCosts) -> TestSockets {
        TestSockets { accounting: Some((handle.clone(), costs)), ..TestSockets::of_host(network) }
    }

    /// Whether this core has the connection.
    pub fn has(&self, connection: &SharedConnection) -> bool {
        self.sockets.iter().flatten().any(|own| Arc::ptr_eq(own, connection))
    }

    fn is_node(&self) -> bool {
        self.accounting.is_some()
    }

    fn insert(&mut self, connection: SharedConnection) -> SocketId {
        self.sockets.push(Some(connection));
        SocketId(self.sockets.len() as u32 - 1)
    }

    fn charge_call(&self) {
        if let Some((handle, costs)) = &self.accounting {
            handle.cpu_time().advance_simulated(Stage::Target, costs.call);
        }
    }
}

impl Sockets for TestSockets {
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        Ok((ListenerId(0), at))
    }
    fn accept(&mut self, _: ListenerId) -> Option<(SocketId, SocketAddr)> {
        let connection = Arc::clone(self.network.connections.lock().get(self.accepted)?);
        self.accepted += 1;
        Some((self.insert(connection), "127.0.0.1:50000".parse().expect("an address")))
    }
    fn connect(&mut self, _: SocketAddr) -> io::Result<SocketId> {
        let connection = SharedConnection::default();
        self.network.connections.lock().push(Arc::clone(&connection));
        Ok(self.insert(connection))
    }
    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket> {
        self.sockets[socket.0 as usize].take().map(DetachedSocket::from_driver)
    }
    fn attach(&mut self, socket: DetachedSocket) -> SocketId {
        let connection = socket.into_stream().expect("a connection of this network");
        self.insert(connection)
    }
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus {
        let Some(connection) = &self.sockets[socket.0 as usize] else { return ReceiveStatus::Closed };
        let mut connection = connection.lock();
        let stream = if self.is_node() { &mut connection.to_node } else { &mut connection.to_host };
        match stream.take(into) {
            0 => ReceiveStatus::WouldBlock,
            count => {
                self.charge_call();
                ReceiveStatus::Bytes(count)
            }
        }
    }
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus {
        let Some(connection) = &self.sockets[socket.0 as usize] else { return SendStatus::Closed };
        let mut connection = connection.lock();
        let bytes = slices.iter().map(|slice| slice.len()).sum();
        self.charge_call();
        match &mut connection.discarded_bytes {
            Some(unread) if self.is_node() => *unread += bytes as u64,
            _ => {
                let stream = if self.is_node() { &mut connection.to_host } else { &mut connection.to_node };
                slices.iter().for_each(|slice| stream.put(slice));
            }
        }
        SendStatus::Bytes(bytes)
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        let open = (0..).zip(&self.sockets).filter(|(_, connection)| connection.is_some());
        out.extend(open.map(|(index, _)| SocketId(index)));
    }
    fn close(&mut self, socket: SocketId) {
        self.sockets[socket.0 as usize] = None;
    }
}
