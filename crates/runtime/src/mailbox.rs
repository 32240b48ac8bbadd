//! Messages between cores: one bounded single-producer single-consumer ring per ordered pair.
//!
//! ```text
//!   core 0 ──▶ ring ──▶ core 1        send notifies the receiver's CoreWaker
//!   core 1 ──▶ ring ──▶ core 0        full: send returns the message, the sender keeps it
//! ```
//! Messages from one core to another arrive in order. A core may send to itself.
//!
//! In the simulation the cost of an iteration passes after it, so a message would arrive before the work that
//! produced it is done. There [`delayed_mesh`] inserts a [`DelayedMesh`] that delivers each message at its time.

use crate::core_waker::CoreWaker;
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::sync::Arc;

/// One core's end of the mesh.
pub struct Mailbox<T> {
    senders: Vec<(Producer<T>, Arc<CoreWaker>)>,
    receivers: Vec<Consumer<T>>,
    /// The ring that `receive` polls first. It rotates, so no sender starves another.
    next_receiver: usize,
}

/// One mailbox per core of `core_wakers`, fully connected; each ring holds `capacity` messages.
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

/// Messages in transit between the cores of a [`delayed_mesh`]; the simulation moves them on.
pub struct DelayedMesh<T> {
    /// By sender, then by receiver: the ring of sent messages and the ring of delivered ones.
    links: Vec<Vec<(Consumer<T>, Producer<T>)>>,
    /// By receiver.
    core_wakers: Vec<Arc<CoreWaker>>,
}

/// The mailboxes of a [`mesh`] whose messages stay in transit until [`DelayedMesh::deliver`]. Per ordered pair of
/// cores, at most `capacity` messages are in transit and at most `capacity` delivered and not received.
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
    (mailboxes, DelayedMesh { links, core_wakers: core_wakers.to_vec() })
}

impl<T> DelayedMesh<T> {
    /// Takes the next message that core `from` sent, with its receiver.
    pub fn take_sent(&mut self, from: usize) -> Option<(usize, T)> {
        self.links[from].iter_mut().enumerate().find_map(|(to, (sent, _))| Some((to, sent.pop().ok()?)))
    }

    /// Delivers a message and notifies the receiver.
    ///
    /// # Errors
    /// Returns the message if the receiver's ring is full.
    pub fn deliver(&mut self, from: usize, to: usize, message: T) -> Result<(), T> {
        self.links[from][to].1.push(message).map_err(|PushError::Full(message)| message)?;
        self.core_wakers[to].notify();
        Ok(())
    }
}

impl<T> Mailbox<T> {
    /// Sends a message to core `to` and notifies it.
    ///
    /// # Errors
    /// Returns the message if the ring is full.
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

    /// Takes the next message, round-robin over the senders.
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

    /// Takes every message that was sent before the call. Messages that arrive meanwhile may be taken too; they never
    /// take the place of an earlier one of another sender.
    pub fn drain_queued(&mut self, mut each: impl FnMut(T)) {
        for receiver in &mut self.receivers {
            for _ in 0..receiver.slots() {
                let Ok(message) = receiver.pop() else { break };
                each(message);
            }
        }
    }

    /// Notifies a core without a message.
    pub fn wake(&self, core: usize) {
        self.senders[core].1.notify();
    }

    /// The free slots in the ring to core `to`.
    pub fn free_slots(&self, to: usize) -> usize {
        self.senders[to].0.slots()
    }

    /// The number of cores of the mesh.
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
    fn a_drain_takes_every_earlier_message_while_others_send() {
        let core_wakers: Vec<_> = (0..3).map(|_| CoreWaker::without_eventfd()).collect();
        let [mut busy, mut slow, mut receiver] =
            <[_; 3]>::try_from(mesh::<u32>(&core_wakers, 4)).ok().unwrap();
        (0..4).for_each(|message| assert_eq!(slow.send(2, message), Ok(())));
        assert_eq!(busy.send(2, 10), Ok(()));
        let mut got = Vec::new();
        receiver.drain_queued(|message| {
            got.push(message);
            // Its ring fills up after a while.
            let _ = busy.send(2, 11);
        });
        got.retain(|message| *message < 10);
        assert_eq!(got, [0, 1, 2, 3]);
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
        core_wakers[1].begin_iteration();
        assert_eq!(delayed.deliver(0, 1, 7), Ok(()));
        assert!(core_wakers[1].begin_iteration(), "a delivered message notifies its receiver");
        assert_eq!(delayed.deliver(0, 1, 9), Err(9), "the first was not received");
        assert_eq!(
            (mailboxes[0].receive(), mailboxes[1].receive(), mailboxes[1].receive()),
            (None, Some(7), None)
        );
    }
}
