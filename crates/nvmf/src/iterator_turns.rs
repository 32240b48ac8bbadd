//! The order of the commands on one iterator: each takes a turn when it arrives, and is executed when those before have ended.
//!
//! ```text
//!   command arrives ─▶ turn ─ has come ─▶ request ─▶ engine ─▶ dropped: the next one's turn has come
//!                        └─ not yet ─▶ its connection stalls, and asks again
//! ```
//! A scheduler may delay requests, move them to other cores and change their order, and an iterator's queues may be on several
//! cores. So a request of an iterator exists only while no other does. Invariant: turns come in the order in which they were
//! taken; one that is dropped, executed or not, holds up no other.

use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::sync::Arc;

/// The turns of one iterator.
#[derive(Debug, Default)]
pub(crate) struct IteratorTurns(Mutex<OpenTurns>);

#[derive(Debug, Default)]
struct OpenTurns {
    next_ticket: u64,
    /// Tickets that were not given back: at most one for each command slot of the controller's queues.
    open: BTreeSet<u64>,
}

impl IteratorTurns {
    /// The turn behind all that were taken before.
    pub fn take(self: &Arc<IteratorTurns>) -> IteratorTurn {
        let open_turns = &mut *self.0.lock();
        let ticket = open_turns.next_ticket;
        open_turns.next_ticket += 1;
        open_turns.open.insert(ticket);
        IteratorTurn { turns: Arc::clone(self), ticket }
    }
}

/// The place of one command in the order of its iterator's commands, which it gives up when it is dropped.
#[derive(Debug)]
pub struct IteratorTurn {
    turns: Arc<IteratorTurns>,
    ticket: u64,
}

impl IteratorTurn {
    /// Whether all commands before have ended.
    pub(crate) fn has_come(&self) -> bool {
        self.turns.0.lock().open.first() == Some(&self.ticket)
    }

    /// Whether it is one of these turns.
    pub(crate) fn is_of(&self, turns: &Arc<IteratorTurns>) -> bool {
        Arc::ptr_eq(&self.turns, turns)
    }
}

impl Drop for IteratorTurn {
    fn drop(&mut self) {
        self.turns.0.lock().open.remove(&self.ticket);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_come_in_order_and_those_that_are_given_up_hold_up_none() {
        let turns = Arc::<IteratorTurns>::default();
        let [first, second, third, fourth] = [(); 4].map(|()| turns.take());
        let come = |turns: &[&IteratorTurn]| turns.iter().map(|turn| turn.has_come()).collect::<Vec<_>>();
        assert_eq!(come(&[&first, &second, &third, &fourth]), [true, false, false, false]);
        drop(second);
        assert_eq!(come(&[&first, &third, &fourth]), [true, false, false]);
        drop(first);
        assert_eq!(come(&[&third, &fourth]), [true, false]);
        drop((third, fourth));
        assert!(turns.take().has_come());
        assert!(turns.0.lock().open.is_empty());
    }

    #[test]
    fn iterators_do_not_wait_for_each_other() {
        let [one, other] = [(); 2].map(|()| Arc::<IteratorTurns>::default());
        let _first = one.take();
        let turn = other.take();
        assert!(turn.has_come() && turn.is_of(&other) && !turn.is_of(&one));
    }
}
