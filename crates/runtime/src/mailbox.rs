//! Messages between cores: one bounded single-producer single-consumer ring per ordered pair.
//!
//! ```text
//!   core 0 ──▶ ring ──▶ core 1        send rings the receiver's doorbell
//!   core 1 ──▶ ring ──▶ core 0        full: the message comes back, the sender keeps it
//! ```
//! A core's messages to one other core arrive in order. A core may send to itself.
//!
//! In a virtual world, where what a turn costs passes after it, messages would arrive before the work that led to them
//! is done. There [`carried_mesh`] puts a [`DelayedMesh`] between the cores, who brings them when it is.

use crate::core_waker::CoreWaker;
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::sync::Arc;

/// One core's end of the mesh.
pub struct Mailbox<T> {
    senders: Vec<(Producer<T>, Arc<CoreWaker>)>,
    receivers: Vec<Consumer<T>>,
    /// Where `receive` looks first, so that no sender starves another.
    next_receiver: usize,
}

/// The mailboxes of as many cores as there are doorbells; each ring holds `capacity` messages.
pub fn mesh<T>(core_wakers: &[Arc<CoreWaker>], capacity: usize) -> Vec<Mailbox<T>> {
    let cores = core_wakers.len();
    let mut mailboxes: Vec<Mailbox<T>> = (0..cores)
        .map(|_| Mailbox { senders: Vec::new(), receivers: Vec::new(), next_receiver: 0 })
        .collect();
    for sender in 0..cores {
        for (receiver, core_waker) in core_wakers.iter().enumerate() {
            let (producer, consumer) = RingBuffer::new(capacity);
            mailboxes[sender].senders.push((producer, Arc::clone(core_waker)));
            mailboxes[receiver].receivers.push(consumer);
        }
    }
    mailboxes
}

/// Who takes messages from one core and brings them to another.
pub struct DelayedMesh<T> {
    /// By sender, then by receiver: what was sent, and where it is brought.
    links: Vec<Vec<(Consumer<T>, Producer<T>)>>,
}

/// The mailboxes of a [`mesh`] whose messages lie still until the carrier brings them. Each core may have `capacity`
/// messages to another lying there, and as many brought and not received.
pub fn delayed_mesh<T>(core_wakers: &[Arc<CoreWaker>], capacity: usize) -> (Vec<Mailbox<T>>, DelayedMesh<T>) {
    let mut mailboxes = mesh(core_wakers, capacity);
    let mut links = Vec::new();
    for sender in 0..core_wakers.len() {
        let mut row = Vec::new();
        for mailbox in &mut mailboxes {
            let (producer, consumer) = RingBuffer::new(capacity);
            let sent = std::mem::replace(&mut mailbox.receivers[sender], consumer);
            row.push((sent, producer));
        }
        links.push(row);
    }
    (mailboxes, DelayedMesh { links })
}

impl<T> DelayedMesh<T> {
    /// The next message that a core has sent, and to whom.
    pub fn take_sent(&mut self, from: usize) -> Option<(usize, T)> {
        self.links[from].iter_mut().enumerate().find_map(|(to, (sent, _))| Some((to, sent.pop().ok()?)))
    }

    /// Brings a message. Gives it back where as many lie there as the ring holds.
    pub fn deliver(&mut self, from: usize, to: usize, message: T) -> Result<(), T> {
        self.links[from][to].1.push(message).map_err(|PushError::Full(message)| message)
    }
}

impl<T> Mailbox<T> {
    /// Sends to a core. Gives the message back when that core's ring is full.
    pub fn send(&mut self, to: usize, message: T) -> Result<(), T> {
        let (sender, core_waker) = &mut self.senders[to];
        match sender.push(message) {
            Ok(()) => {
                core_waker.notify();
                Ok(())
            }
            Err(PushError::Full(message)) => Err(message),
        }
    }

    /// The next message from any core, senders in turn.
    pub fn receive(&mut self) -> Option<T> {
        for _ in 0..self.receivers.len() {
            let at = self.next_receiver;
            self.next_receiver = if at + 1 == self.receivers.len() { 0 } else { at + 1 };
            if let Ok(message) = self.receivers[at].pop() {
                return Some(message);
            }
        }
        None
    }

    /// Wakes a core without a message.
    pub fn wake(&self, core: usize) {
        self.senders[core].1.notify();
    }

    /// How many more messages the ring to a core takes now.
    pub fn free_slots(&self, to: usize) -> usize {
        self.senders[to].0.slots()
    }

    /// How many cores the mesh has.
    pub fn core_count(&self) -> usize {
        self.senders.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_in_order_full_rings_return_them_and_no_sender_starves() {
        let core_wakers: Vec<_> = (0..3).map(|_| CoreWaker::without_eventfd()).collect();
        let mut mailboxes = mesh::<u32>(&core_wakers, 2);
        assert_eq!(mailboxes[0].send(2, 1), Ok(()));
        assert_eq!(mailboxes[0].send(2, 2), Ok(()));
        assert_eq!(mailboxes[0].free_slots(2), 0);
        assert_eq!(mailboxes[0].send(2, 3), Err(3));
        assert_eq!(mailboxes[1].send(2, 11), Ok(()));
        assert_eq!(mailboxes[2].send(2, 21), Ok(()));
        assert!(core_wakers[2].begin_iteration() && !core_wakers[1].begin_iteration());
        let got: Vec<u32> = std::iter::from_fn(|| mailboxes[2].receive()).collect();
        assert_eq!(got, [1, 11, 21, 2]);
    }

    #[test]
    fn delayed_messages_arrive_when_they_are_delivered() {
        let core_wakers: Vec<_> = (0..2).map(|_| CoreWaker::without_eventfd()).collect();
        let (mut mailboxes, mut delayed) = delayed_mesh::<u32>(&core_wakers, 1);
        assert_eq!(mailboxes[0].send(1, 7), Ok(()));
        assert_eq!((mailboxes[0].send(1, 8), mailboxes[1].receive()), (Err(8), None));
        assert_eq!(
            (delayed.take_sent(1), delayed.take_sent(0), delayed.take_sent(0)),
            (None, Some((1, 7)), None)
        );
        assert_eq!(delayed.deliver(0, 1, 7), Ok(()));
        assert_eq!(delayed.deliver(0, 1, 9), Err(9), "nobody has received the first");
        assert_eq!(
            (mailboxes[0].receive(), mailboxes[1].receive(), mailboxes[1].receive()),
            (None, Some(7), None)
        );
    }
}
