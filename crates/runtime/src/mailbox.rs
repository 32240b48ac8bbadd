//! Messages between cores: one bounded single-producer single-consumer ring per ordered pair.
//!
//! ```text
//!   core 0 ──▶ ring ──▶ core 1        send rings the receiver's doorbell
//!   core 1 ──▶ ring ──▶ core 0        full: the message comes back, the sender keeps it
//! ```
//! A core's messages to one other core arrive in order. A core may send to itself.
//!
//! In a virtual world, where what a turn costs passes after it, messages would arrive before the work that led to them
//! is done. There [`carried_mesh`] puts a [`Carrier`] between the cores, who brings them when it is.

use crate::core_waker::Doorbell;
use rtrb::{Consumer, Producer, PushError, RingBuffer};
use std::sync::Arc;

/// One core's end of the mesh.
pub struct Mailbox<T> {
    to: Vec<(Producer<T>, Arc<Doorbell>)>,
    from: Vec<Consumer<T>>,
    /// Where `receive` looks first, so that no sender starves another.
    next: usize,
}

/// The mailboxes of as many cores as there are doorbells; each ring holds `capacity` messages.
pub fn mesh<T>(doorbells: &[Arc<Doorbell>], capacity: usize) -> Vec<Mailbox<T>> {
    let cores = doorbells.len();
    let mut boxes: Vec<Mailbox<T>> =
        (0..cores).map(|_| Mailbox { to: Vec::new(), from: Vec::new(), next: 0 }).collect();
    for sender in 0..cores {
        for (receiver, doorbell) in doorbells.iter().enumerate() {
            let (producer, consumer) = RingBuffer::new(capacity);
            boxes[sender].to.push((producer, Arc::clone(doorbell)));
            boxes[receiver].from.push(consumer);
        }
    }
    boxes
}

/// Who takes messages from one core and brings them to another.
pub struct Carrier<T> {
    /// By sender, then by receiver: what was sent, and where it is brought.
    ways: Vec<Vec<(Consumer<T>, Producer<T>)>>,
}

/// The mailboxes of a [`mesh`] whose messages lie still until the carrier brings them. Each core may have `capacity`
/// messages to another lying there, and as many brought and not received.
pub fn carried_mesh<T>(doorbells: &[Arc<Doorbell>], capacity: usize) -> (Vec<Mailbox<T>>, Carrier<T>) {
    let mut boxes = mesh(doorbells, capacity);
    let mut ways = Vec::new();
    for sender in 0..doorbells.len() {
        let mut row = Vec::new();
        for mailbox in &mut boxes {
            let (producer, consumer) = RingBuffer::new(capacity);
            let sent = std::mem::replace(&mut mailbox.from[sender], consumer);
            row.push((sent, producer));
        }
        ways.push(row);
    }
    (boxes, Carrier { ways })
}

impl<T> Carrier<T> {
    /// The next message that a core has sent, and to whom.
    pub fn take(&mut self, from: usize) -> Option<(usize, T)> {
        self.ways[from].iter_mut().enumerate().find_map(|(to, (sent, _))| Some((to, sent.pop().ok()?)))
    }

    /// Brings a message. Gives it back where as many lie there as the ring holds.
    pub fn bring(&mut self, from: usize, to: usize, message: T) -> Result<(), T> {
        self.ways[from][to].1.push(message).map_err(|PushError::Full(message)| message)
    }
}

impl<T> Mailbox<T> {
    /// Sends to a core. Gives the message back when that core's ring is full.
    pub fn send(&mut self, to: usize, message: T) -> Result<(), T> {
        let (ring, doorbell) = &mut self.to[to];
        match ring.push(message) {
            Ok(()) => {
                doorbell.ring();
                Ok(())
            }
            Err(PushError::Full(message)) => Err(message),
        }
    }

    /// The next message from any core, senders in turn.
    pub fn receive(&mut self) -> Option<T> {
        for _ in 0..self.from.len() {
            let at = self.next;
            self.next = if at + 1 == self.from.len() { 0 } else { at + 1 };
            if let Ok(message) = self.from[at].pop() {
                return Some(message);
            }
        }
        None
    }

    /// Wakes a core without a message.
    pub fn wake(&self, core: usize) {
        self.to[core].1.ring();
    }

    /// How many more messages the ring to a core takes now.
    pub fn room(&self, to: usize) -> usize {
        self.to[to].0.slots()
    }

    /// How many cores the mesh has.
    pub fn cores(&self) -> usize {
        self.to.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_arrive_in_order_full_rings_give_them_back_and_no_sender_starves() {
        let doorbells: Vec<_> = (0..3).map(|_| Doorbell::silent()).collect();
        let mut boxes = mesh::<u32>(&doorbells, 2);
        assert_eq!(boxes[0].send(2, 1), Ok(()));
        assert_eq!(boxes[0].send(2, 2), Ok(()));
        assert_eq!(boxes[0].room(2), 0);
        assert_eq!(boxes[0].send(2, 3), Err(3));
        assert_eq!(boxes[1].send(2, 11), Ok(()));
        assert_eq!(boxes[2].send(2, 21), Ok(()));
        assert!(doorbells[2].begin_turn() && !doorbells[1].begin_turn());
        let got: Vec<u32> = std::iter::from_fn(|| boxes[2].receive()).collect();
        assert_eq!(got, [1, 11, 21, 2]);
    }

    #[test]
    fn carried_messages_arrive_when_they_are_brought() {
        let doorbells: Vec<_> = (0..2).map(|_| Doorbell::silent()).collect();
        let (mut boxes, mut carrier) = carried_mesh::<u32>(&doorbells, 1);
        assert_eq!(boxes[0].send(1, 7), Ok(()));
        assert_eq!((boxes[0].send(1, 8), boxes[1].receive()), (Err(8), None));
        assert_eq!((carrier.take(1), carrier.take(0), carrier.take(0)), (None, Some((1, 7)), None));
        assert_eq!(carrier.bring(0, 1, 7), Ok(()));
        assert_eq!(carrier.bring(0, 1, 9), Err(9), "nobody has received the first");
        assert_eq!((boxes[0].receive(), boxes[1].receive(), boxes[1].receive()), (None, Some(7), None));
    }
}
