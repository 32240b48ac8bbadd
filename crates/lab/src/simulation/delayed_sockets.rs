//! Sockets of a core that send bytes when the work that produced them is done.
//!
//! In: sends of a reactor iteration. Out: the same on the simulated sockets, delayed by the time that the core has
//! charged so far in that iteration. The round trip time of TCP is that of an idle link. All other calls pass through.
//! Invariants: the bytes of a socket leave in order, because the charges of an iteration end before the next; a send is
//! never partial, because the window of a stream exceeds the outstanding bytes.

use super::parameters::wire_round_trip;
use octokv_base::Nanos;
use octokv_runtime::simulated::{SimEnv, SimSockets};
use octokv_runtime::{
    DetachedSocket, ListenerId, ReactorHandle, ReceiveStatus, SendStatus, SocketId, Sockets,
};
use std::cell::RefCell;
use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::rc::Rc;

/// Simulated sockets with delayed sends and closes.
pub struct DelayedSockets {
    inner: Rc<RefCell<SimSockets>>,
    handle: ReactorHandle,
    sim: SimEnv,
}

impl DelayedSockets {
    /// Creates the sockets of the core of `handle`.
    pub fn new(inner: SimSockets, handle: &ReactorHandle, sim: &SimEnv) -> DelayedSockets {
        DelayedSockets { inner: Rc::new(RefCell::new(inner)), handle: handle.clone(), sim: sim.clone() }
    }

    fn after_work(&self, act: impl FnOnce(&mut SimSockets) + 'static) {
        let inner = Rc::clone(&self.inner);
        let at = self.handle.now() + self.handle.cpu_time().iteration_elapsed();
        self.sim.schedule_at(at, move || act(&mut inner.borrow_mut()));
    }
}

impl Sockets for DelayedSockets {
    fn listen(&mut self, at: SocketAddr) -> io::Result<(ListenerId, SocketAddr)> {
        self.inner.borrow_mut().listen(at)
    }
    fn accept(&mut self, listener: ListenerId) -> Option<(SocketId, SocketAddr)> {
        self.inner.borrow_mut().accept(listener)
    }
    fn connect(&mut self, to: SocketAddr) -> io::Result<SocketId> {
        self.inner.borrow_mut().connect(to)
    }
    fn detach(&mut self, socket: SocketId) -> Option<DetachedSocket> {
        self.inner.borrow_mut().detach(socket)
    }
    fn attach(&mut self, socket: DetachedSocket) -> SocketId {
        self.inner.borrow_mut().attach(socket)
    }
    fn receive(&mut self, socket: SocketId, into: &mut [u8]) -> ReceiveStatus {
        self.inner.borrow_mut().receive(socket, into)
    }
    fn send(&mut self, socket: SocketId, slices: &[IoSlice<'_>]) -> SendStatus {
        if self.handle.cpu_time().iteration_elapsed() == Nanos::ZERO {
            return self.inner.borrow_mut().send(socket, slices);
        }
        let bytes: Vec<u8> = slices.iter().flat_map(|slice| slice.iter().copied()).collect();
        let count = bytes.len();
        self.after_work(move |sockets| match sockets.send(socket, &[IoSlice::new(&bytes)]) {
            SendStatus::Bytes(sent) => assert_eq!(sent, count, "the stream window has room for all bytes"),
            SendStatus::WouldBlock => panic!("the stream window has room for all bytes"),
            SendStatus::Closed => {}
        });
        SendStatus::Bytes(count)
    }
    fn ready(&mut self, out: &mut Vec<SocketId>) {
        self.inner.borrow_mut().ready(out);
    }
    fn round_trip_time(&self, _socket: SocketId) -> Option<Nanos> {
        Some(wire_round_trip())
    }
    fn close(&mut self, socket: SocketId) {
        self.after_work(move |sockets| sockets.close(socket));
    }
}
