//! The connections of a core: their slots, the order in which they are served, and those with something to send.
//!
//! Invariants: a slot is used again only after its connection has left it; a connection is at most once in each list, so
//! that no list is longer than the slots.

use crate::connection_io::ConnectionIo;
use crate::connection_queue::ConnectionQueue;
use crate::time_budget::IterationBudget;
use octokv_base::Nanos;
use octokv_base::map::FxHashMap;
use octokv_runtime::SocketId;

/// See the module header.
#[derive(Default)]
pub(super) struct Connections {
    pub slots: Vec<Option<ConnectionIo>>,
    free: Vec<u32>,
    by_socket: FxHashMap<SocketId, u32>,
    /// Connections that may have bytes to send.
    pub send_pending: Vec<u32>,
    /// Connections that received in this iteration.
    pub received_from: Vec<u32>,
    /// Their number in the last iteration.
    pub active_count: usize,
    /// Service order for receiving, sending, and resuming stalled connections.
    pub receive_queue: ConnectionQueue,
    pub send_queue: ConnectionQueue,
    pub resume_queue: ConnectionQueue,
    /// When their timers are due.
    pub next_tick: Nanos,
}

impl Connections {
    /// Adds a connection, whose timers are due at once.
    pub fn add(&mut self, io: ConnectionIo, now: Nanos) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        self.by_socket.insert(io.socket, index);
        self.slots[index as usize] = Some(io);
        self.next_tick = now;
    }

    /// A connection, unless it has left.
    #[inline]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut ConnectionIo> {
        self.slots[index as usize].as_mut()
    }

    /// Forgets the socket of a connection, which is closed.
    pub fn forget_socket(&mut self, socket: SocketId) {
        self.by_socket.remove(&socket);
    }

    /// Removes a connection.
    pub fn remove(&mut self, index: u32) {
        self.slots[index as usize] = None;
        self.free.push(index);
    }

    /// The connections, without empty slots.
    pub fn iter(&self) -> impl Iterator<Item = &ConnectionIo> {
        self.slots.iter().flatten()
    }

    /// Adds a connection to the list of those that may have bytes to send or may be finished.
    #[inline]
    pub fn mark_send_pending(&mut self, index: u32) {
        if let Some(io) = self.get_mut(index)
            && !io.in_send_list
        {
            io.in_send_list = true;
            self.send_pending.push(index);
        }
    }

    /// Queues the connections with readable sockets, except stalled and closed ones and those that `is_held` excludes.
    pub fn queue_ready(
        &mut self,
        ready: &[SocketId],
        budget: &IterationBudget,
        is_held: impl Fn(&ConnectionIo) -> bool,
    ) {
        let Connections { slots, by_socket, receive_queue, .. } = self;
        receive_queue.rebuild(ready.iter().filter_map(|socket| {
            let index = *by_socket.get(socket)?;
            let io = slots[index as usize].as_ref().filter(|io| io.may_receive())?;
            (!is_held(io)).then(|| (index, budget.is_heavy(io.usage)))
        }));
    }

    /// Queues the stalled connections, except those that `is_held` excludes.
    pub fn queue_stalled(&mut self, is_held: impl Fn(&ConnectionIo) -> bool) {
        let stalled = self.slots.iter().enumerate().filter_map(|(index, io)| {
            let io = io.as_ref().filter(|io| io.is_stalled())?;
            (!is_held(io)).then_some((index as u32, true))
        });
        self.resume_queue.rebuild(stalled);
    }

    /// Queues the connections that may have bytes to send. Gives the number of them.
    ///
    /// # Panics
    /// A connection is twice in the list: a bug of this program.
    pub fn queue_senders(&mut self, budget: &IterationBudget) {
        let Connections { slots, send_pending, send_queue, .. } = self;
        assert!(send_pending.len() <= slots.len(), "more connections to send than there are");
        send_queue.rebuild(send_pending.drain(..).filter_map(|index| {
            let io = slots[index as usize].as_ref()?;
            Some((index, budget.is_heavy(io.usage)))
        }));
    }
}
