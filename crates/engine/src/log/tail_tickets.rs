//! The writers of the records of a value tail: whose turn it is, and how their writes ended.
//!
//! In: records by their pieces, ends of writes. Out: turns, wake-ups.
//! Invariants: tickets ascend with the places of their records; a ticket stays until its writer has seen its end or was dropped; if a write may
//! begin, a waiter of an unwritten record is awake, if there is one.
//! Tested in `value_tail_tests.rs`.

use crate::common::waker_batch::WakerBatch;
use octokv_device::DeviceError;
use std::collections::VecDeque;
use std::ops::Range;
use std::task::{Context, Waker};

/// Names an appended record until its write is complete. Its owner polls it to its end, or forgets it
/// ([`super::value_tail::ValueTail::forget`]).
#[must_use = "a record is written by the waiters of the tail"]
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ValueTicket(u64);

/// Why a record that was appended is not written.
#[derive(Clone, Copy, Debug)]
pub(super) enum TailFailure {
    /// A write failed.
    Device(DeviceError),
    /// A leader was dropped.
    Interrupted,
}

/// The turn of a ticket.
pub(super) enum TicketTurn {
    /// Its record is not written, and no write is in flight.
    Lead,
    Wait,
    Written,
    Failed(TailFailure),
}

#[derive(Debug)]
enum TicketState {
    /// Not written, with the waker of a writer that waits.
    Waiting(Option<Waker>),
    Failed(TailFailure),
    /// Nothing waits any more.
    Ended,
}

/// A record whose writer has not seen its end.
#[derive(Debug)]
struct TailTicket {
    state: TicketState,
    /// The byte of the device at which the record begins.
    start: u64,
    /// The pieces that have it.
    pieces: Range<u64>,
}

/// The first records of a piece, which were to be written into a unit that was given up.
#[derive(Clone, Copy, Debug)]
pub(super) struct GivenUpUnit {
    pub piece: u64,
    /// The byte behind the unit.
    pub end: u64,
}

/// The tickets of a tail.
#[derive(Debug, Default)]
pub(super) struct TailTickets {
    /// The number of the first ticket here.
    first: u64,
    tickets: VecDeque<TailTicket>,
}

impl TailTickets {
    /// A ticket for a record that begins at a byte of the device and lies in these pieces.
    pub fn add(&mut self, start: u64, pieces: Range<u64>) -> ValueTicket {
        self.tickets.push_back(TailTicket { state: TicketState::Waiting(None), start, pieces });
        ValueTicket(self.first + self.tickets.len() as u64 - 1)
    }

    /// The turn of a ticket, which ends with [`TicketTurn::Written`] and [`TicketTurn::Failed`]. The write of `unwritten` and of later
    /// pieces has not ended.
    ///
    /// # Panics
    /// If the ticket has ended.
    pub fn poll(
        &mut self,
        ticket: &ValueTicket,
        unwritten: u64,
        may_lead: bool,
        context: &Context<'_>,
    ) -> TicketTurn {
        let index = ticket.0.checked_sub(self.first).expect("the ticket has not ended") as usize;
        let slot = &mut self.tickets[index];
        let turn = match &mut slot.state {
            TicketState::Failed(failure) => TicketTurn::Failed(*failure),
            TicketState::Waiting(_) if slot.pieces.end <= unwritten => TicketTurn::Written,
            TicketState::Waiting(_) if may_lead => return TicketTurn::Lead,
            TicketState::Waiting(waker) => {
                match waker {
                    Some(waker) => waker.clone_from(context.waker()),
                    none => *none = Some(context.waker().clone()),
                }
                return TicketTurn::Wait;
            }
            TicketState::Ended => panic!("{ticket:?} has ended"),
        };
        self.end_at(index);
        turn
    }

    /// Ends a ticket, unless it has ended.
    pub fn end(&mut self, ticket: &ValueTicket) {
        if let Some(index) = ticket.0.checked_sub(self.first) {
            self.end_at(index as usize);
        }
    }

    fn end_at(&mut self, index: usize) {
        self.tickets[index].state = TicketState::Ended;
        while self.tickets.front().is_some_and(|ticket| matches!(ticket.state, TicketState::Ended)) {
            self.tickets.pop_front();
            self.first += 1;
        }
    }

    /// Fails the records of pieces, and those of a unit that was given up.
    pub fn fail(
        &mut self,
        pieces: &Range<u64>,
        given_up: Option<GivenUpUnit>,
        failure: TailFailure,
        wakers: &mut WakerBatch,
    ) {
        for ticket in &mut self.tickets {
            let is_in_pieces = ticket.pieces.start < pieces.end && ticket.pieces.end > pieces.start;
            let is_given_up =
                given_up.is_some_and(|unit| ticket.pieces.start == unit.piece && ticket.start < unit.end);
            if let TicketState::Waiting(waker) = &mut ticket.state
                && (is_in_pieces || is_given_up)
            {
                wakers.add(waker.take());
                ticket.state = TicketState::Failed(failure);
            }
        }
    }

    /// Whether a record whose write has not ended has a writer that waits.
    pub fn has_unwritten(&self, unwritten: u64) -> bool {
        let is_unwritten = |ticket: &TailTicket| {
            matches!(ticket.state, TicketState::Waiting(_)) && ticket.pieces.end > unwritten
        };
        self.tickets.iter().any(is_unwritten)
    }

    /// The wakers of the waiters whose records are written.
    pub fn wake_written(&mut self, unwritten: u64, wakers: &mut WakerBatch) {
        for ticket in &mut self.tickets {
            match &mut ticket.state {
                TicketState::Waiting(waker) if ticket.pieces.end <= unwritten => wakers.add(waker.take()),
                TicketState::Waiting(_) => break,
                TicketState::Failed(_) | TicketState::Ended => {}
            }
        }
    }

    /// The waker of the first waiter that could lead.
    pub fn wake_leader(&mut self, unwritten: u64, wakers: &mut WakerBatch) {
        // One without a waker was woken or has not polled yet. The next one is woken as well: the first may be busy with something else.
        let waker = self.tickets.iter_mut().find_map(|ticket| match &mut ticket.state {
            TicketState::Waiting(waker) if ticket.pieces.end > unwritten => waker.take(),
            _ => None,
        });
        wakers.add(waker);
    }
}
