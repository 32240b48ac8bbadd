//! The outstanding commands of one queue: one slot each, as many slots as the queue has entries.
//!
//! ```text
//!            needs no data
//!    Free ───────────────────────────────────────────▶ InFlight ──▶ Free   (Connection::complete)
//!     │  ▲                                                ▲
//!     │  └── EventRequest ◀─────────────────────┐         │ last byte, digest right
//!     ├────────────────────────────────────────┘         │
//!     └──▶ AwaitingBuffer ──▶ Receiving ─────────────────┘──▶ Free (digest wrong)
//!          no buffer          R2T sent
//! ```
//! Invariants: no two slots in use have the same command identifier ([`CommandSlots::is_id_in_use`] is
//! exact); slots are reused, so nothing is allocated once a queue has reached its greatest depth; slots get
//! their buffers in the order in which they began to wait. All collections are bounded by the queue's
//! entries.

use crate::command_plan::{InFlight, PayloadLayout, PendingCommand};
use crate::token_share::TokenHold;
use octokv_base::{Buffer, NamespaceId, Nanos};
use std::collections::VecDeque;

/// A transfer of host data for one command.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// The namespace of the command, and its serial number when the command was accepted.
    pub namespace: NamespaceId,
    pub namespace_serial: u64,
    /// The command to submit when the data is complete.
    pub pending: PendingCommand,
    pub layout: PayloadLayout,
    /// Length of the data in bytes.
    pub expected_bytes: u32,
    /// Bytes of the data received so far.
    pub received_bytes: u32,
    /// When the R2T was sent.
    pub requested_at: Nanos,
    /// Bytes of all buffers that awaited data when the R2T was sent, this one included.
    pub open_bytes: usize,
    /// A data digest was wrong: the command fails after its last byte.
    pub has_bad_digest: bool,
}

impl Transfer {
    /// A transfer of `expected_bytes` bytes that has received none.
    #[inline]
    pub fn new(
        namespace: NamespaceId,
        namespace_serial: u64,
        pending: PendingCommand,
        layout: PayloadLayout,
        expected_bytes: u32,
        requested_at: Nanos,
    ) -> Transfer {
        Transfer {
            namespace,
            namespace_serial,
            pending,
            layout,
            expected_bytes,
            received_bytes: 0,
            requested_at,
            open_bytes: 0,
            has_bad_digest: false,
        }
    }
}

const NO_NAMESPACE: NamespaceId = NamespaceId(0);

/// The state of a slot; see the diagram at the top.
#[derive(Debug)]
pub(crate) enum SlotState {
    /// Unused.
    Free,
    /// A transfer that waits for a buffer.
    AwaitingBuffer(Transfer),
    /// A transfer whose R2T was sent.
    Receiving(Transfer, Buffer),
    /// A command whose requests are at the engine.
    InFlight(InFlight),
    /// An Asynchronous Event Request.
    EventRequest,
}

#[derive(Debug)]
struct CommandSlot {
    command_id: u16,
    /// The namespace of the request in flight.
    namespace: NamespaceId,
    /// Its cost on the device of its key, if its host gets the tokens of devices.
    hold: Option<TokenHold>,
    state: SlotState,
}

/// The command slots of one queue.
#[derive(Debug)]
pub(crate) struct CommandSlots {
    slots: Vec<CommandSlot>,
    free: Vec<u16>,
    limit: usize,
    waiting: VecDeque<u16>,
    in_flight: usize,
    /// The most bytes of data that the responses of commands in flight can have.
    response_bytes: u64,
    receiving_bytes: usize,
    /// One bit for each of the 65536 command identifiers.
    used_ids: Box<[u64]>,
}

impl CommandSlots {
    /// Creates the slots of a queue with `entries` entries; 0 before Connect.
    pub fn new(entries: u16) -> CommandSlots {
        CommandSlots {
            slots: Vec::new(),
            free: Vec::new(),
            limit: usize::from(entries),
            waiting: VecDeque::new(),
            in_flight: 0,
            response_bytes: 0,
            receiving_bytes: 0,
            used_ids: vec![0; if entries == 0 { 0 } else { 1 << 10 }].into_boxed_slice(),
        }
    }

    #[inline]
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.slots.len() == self.limit
    }

    /// The number of commands in flight at the engine.
    pub fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// The most bytes of data that the responses of commands in flight can have.
    pub fn response_bytes(&self) -> u64 {
        self.response_bytes
    }

    /// Capacity in bytes of the buffers whose data has not arrived completely.
    pub fn receiving_bytes(&self) -> usize {
        self.receiving_bytes
    }

    /// Whether an outstanding command has this identifier.
    #[inline]
    pub fn is_id_in_use(&self, command_id: u16) -> bool {
        self.used_ids[usize::from(command_id >> 6)] & (1 << (command_id & 63)) != 0
    }

    /// Whether a command with this identifier may take a slot.
    #[inline]
    pub fn may_take(&self, command_id: u16) -> bool {
        !self.is_full() && !self.is_id_in_use(command_id)
    }

    /// Takes a free slot.
    ///
    /// REQUIRES: the queue is not full ([`CommandSlots::is_full`]) and the identifier is not in use
    /// ([`CommandSlots::is_id_in_use`]).
    ///
    /// # Panics
    /// If either does not hold.
    #[inline]
    pub fn take(&mut self, command_id: u16, state: SlotState) -> u16 {
        let slot = self.take_free(command_id, NO_NAMESPACE);
        self.set_state(slot, state);
        slot
    }

    /// [`CommandSlots::take`] for a command whose request, of `namespace`, is at the engine from now on.
    ///
    /// # Panics
    /// As there.
    #[inline(always)]
    pub fn take_in_flight(&mut self, command_id: u16, namespace: NamespaceId, in_flight: InFlight) -> u16 {
        let slot = self.take_free(command_id, namespace);
        self.slots[usize::from(slot)].state = SlotState::InFlight(in_flight);
        self.count_in_flight(in_flight);
        slot
    }

    #[inline(always)]
    fn take_free(&mut self, command_id: u16, namespace: NamespaceId) -> u16 {
        let (word, bit) = (usize::from(command_id >> 6), 1 << (command_id & 63));
        let used = &mut self.used_ids[word];
        assert!(*used & bit == 0, "command {command_id} is in use");
        *used |= bit;
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None => self.add_slot(),
        };
        let entry = &mut self.slots[usize::from(slot)];
        assert!(matches!(entry.state, SlotState::Free), "slot {slot} is free and in use");
        (entry.command_id, entry.namespace) = (command_id, namespace);
        entry.hold = None;
        slot
    }

    #[cold]
    fn add_slot(&mut self) -> u16 {
        assert!(self.slots.len() < self.limit, "all {} slots are in use", self.limit);
        self.slots.push(CommandSlot {
            command_id: 0,
            namespace: NO_NAMESPACE,
            hold: None,
            state: SlotState::Free,
        });
        (self.slots.len() - 1) as u16
    }

    #[inline]
    fn count_in_flight(&mut self, in_flight: InFlight) {
        self.in_flight += 1;
        self.response_bytes += in_flight.response_bytes_max();
    }

    #[inline]
    fn uncount_in_flight(&mut self, in_flight: InFlight) {
        self.in_flight -= 1;
        self.response_bytes -= in_flight.response_bytes_max();
    }

    /// Sets the namespace of a slot's request.
    #[inline]
    pub fn set_namespace(&mut self, slot: u16, namespace: NamespaceId) {
        self.slots[usize::from(slot)].namespace = namespace;
    }

    /// Sets the tokens of a slot's request.
    #[cold]
    pub fn set_hold(&mut self, slot: u16, hold: Option<TokenHold>) {
        self.slots[usize::from(slot)].hold = hold;
    }

    /// Takes the tokens of a slot's request, if they were set.
    #[inline]
    pub fn take_hold(&mut self, slot: u16) -> Option<TokenHold> {
        self.slots[usize::from(slot)].hold.take()
    }

    /// Finishes one request of a slot. After the last one, frees the slot and gives its command identifier, its namespace
    /// and its command. Only a shutdown has several.
    ///
    /// # Panics
    /// If the slot has no request in flight.
    #[inline]
    pub fn finish_one(&mut self, slot: u16) -> Option<(u16, NamespaceId, InFlight)> {
        let entry = &mut self.slots[usize::from(slot)];
        let SlotState::InFlight(in_flight) = &mut entry.state else {
            unreachable!("slot {slot} has no request in flight: {:?}", entry.state);
        };
        if let InFlight::ShutDown { flushes_left: left, .. } = in_flight {
            *left -= 1;
            if *left > 0 {
                return None;
            }
        }
        let in_flight = *in_flight;
        entry.state = SlotState::Free;
        let (command_id, namespace) = (entry.command_id, entry.namespace);
        self.uncount_in_flight(in_flight);
        self.free_slot(slot, command_id);
        Some((command_id, namespace, in_flight))
    }

    #[inline]
    fn free_slot(&mut self, slot: u16, command_id: u16) {
        self.used_ids[usize::from(command_id >> 6)] &= !(1 << (command_id & 63));
        self.free.push(slot);
    }

    /// Whether a shutdown waits for its flushes.
    pub fn has_pending_shutdown(&self) -> bool {
        let is_shutdown =
            |slot: &CommandSlot| matches!(slot.state, SlotState::InFlight(InFlight::ShutDown { .. }));
        self.slots.iter().any(is_shutdown)
    }

    /// Frees a slot; returns its command identifier and previous state.
    #[inline]
    pub fn release(&mut self, slot: u16) -> (u16, SlotState) {
        let state = self.set_state(slot, SlotState::Free);
        let command_id = self.slots[usize::from(slot)].command_id;
        self.free_slot(slot, command_id);
        (command_id, state)
    }

    /// Changes a slot's state, and the totals that depend on it; returns the previous state. All changes go through here,
    /// except those of commands without a transfer, which move less ([`CommandSlots::take_in_flight`],
    /// [`CommandSlots::finish_one`]).
    #[inline]
    pub fn set_state(&mut self, slot: u16, next: SlotState) -> SlotState {
        match &next {
            SlotState::AwaitingBuffer(_) => self.waiting.push_back(slot),
            SlotState::Receiving(_, buffer) => self.receiving_bytes += buffer.capacity(),
            SlotState::InFlight(in_flight) => self.count_in_flight(*in_flight),
            SlotState::Free | SlotState::EventRequest => {}
        }
        let previous = std::mem::replace(&mut self.slots[usize::from(slot)].state, next);
        match &previous {
            SlotState::AwaitingBuffer(_) if self.waiting.front() == Some(&slot) => {
                self.waiting.pop_front();
            }
            SlotState::AwaitingBuffer(_) => self.waiting.retain(|&waiting| waiting != slot),
            SlotState::Receiving(_, buffer) => self.receiving_bytes -= buffer.capacity(),
            SlotState::InFlight(in_flight) => self.uncount_in_flight(*in_flight),
            SlotState::Free | SlotState::EventRequest => {}
        }
        previous
    }

    /// The command identifier, transfer and buffer of a slot that receives data.
    #[inline]
    pub fn receiving(&mut self, slot: u16) -> Option<(u16, &mut Transfer, &mut Buffer)> {
        let slot = self.slots.get_mut(usize::from(slot))?;
        match &mut slot.state {
            SlotState::Receiving(transfer, buffer) => Some((slot.command_id, transfer, buffer)),
            SlotState::Free
            | SlotState::AwaitingBuffer(_)
            | SlotState::InFlight(_)
            | SlotState::EventRequest => None,
        }
    }

    /// The slot that has waited longest for a buffer, and the buffer's length in bytes.
    pub fn first_waiting(&self) -> Option<(u16, usize)> {
        let slot = *self.waiting.front()?;
        match &self.slots[usize::from(slot)].state {
            SlotState::AwaitingBuffer(transfer) => {
                Some((slot, transfer.layout.buffer_bytes(transfer.expected_bytes)))
            }
            state => unreachable!("slot {slot} is in the wait queue but {state:?}"),
        }
    }

    /// Assigns a buffer to a waiting slot; returns the command identifier and the bytes to request.
    pub fn start_receiving(&mut self, slot: u16, buffer: Buffer, now: Nanos) -> (u16, u32) {
        match self.set_state(slot, SlotState::Free) {
            SlotState::AwaitingBuffer(mut transfer) => {
                let expected = transfer.expected_bytes;
                transfer.requested_at = now;
                transfer.open_bytes = self.receiving_bytes + buffer.capacity();
                self.set_state(slot, SlotState::Receiving(transfer, buffer));
                (self.slots[usize::from(slot)].command_id, expected)
            }
            state => unreachable!("slot {slot} gets a buffer but is {state:?}"),
        }
    }

    /// The transfers whose R2T was sent.
    pub fn open_transfers(&self) -> impl Iterator<Item = &Transfer> {
        let slots = if self.receiving_bytes == 0 { &[][..] } else { &self.slots };
        slots.iter().filter_map(|slot| match &slot.state {
            SlotState::Receiving(transfer, _) => Some(transfer),
            SlotState::Free
            | SlotState::AwaitingBuffer(_)
            | SlotState::InFlight(_)
            | SlotState::EventRequest => None,
        })
    }

    /// A slot with an event request: the one of `command_id`, or any.
    pub fn find_event_request(&self, command_id: Option<u16>) -> Option<u16> {
        let is_match = |slot: &CommandSlot| {
            matches!(slot.state, SlotState::EventRequest) && command_id.is_none_or(|id| id == slot.command_id)
        };
        self.slots.iter().position(is_match).map(|index| index as u16)
    }

    pub fn event_request_count(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot.state, SlotState::EventRequest)).count()
    }

    /// Frees every slot that is not at the engine, without completions: the connection has ended.
    pub fn release_all_but_in_flight(&mut self) {
        for slot in 0..self.slots.len() as u16 {
            if !matches!(self.slots[usize::from(slot)].state, SlotState::Free | SlotState::InFlight(_)) {
                self.release(slot);
            }
        }
    }

    /// Frees the slots of event requests: a reset aborts them without completions.
    pub fn release_event_requests(&mut self) {
        while let Some(slot) = self.find_event_request(None) {
            self.release(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_as_many_slots_as_entries_and_reuses_them() {
        let mut slots = CommandSlots::new(3);
        for id in [7, 9, 0xffff] {
            assert!(!slots.is_full() && !slots.is_id_in_use(id));
            slots.take(id, SlotState::InFlight(InFlight::Flush));
            assert!(slots.is_id_in_use(id));
        }
        assert!(slots.is_full());
        assert_eq!(slots.in_flight(), 3);
        assert_eq!(slots.finish_one(1), Some((9, NO_NAMESPACE, InFlight::Flush)));
        assert!(!slots.is_full() && !slots.is_id_in_use(9));
        assert_eq!(slots.take(9, SlotState::EventRequest), 1);
        assert_eq!(
            (
                slots.find_event_request(Some(9)),
                slots.find_event_request(Some(7)),
                slots.event_request_count()
            ),
            (Some(1), None, 1)
        );
        slots.release_event_requests();
        assert_eq!((slots.in_flight(), slots.is_id_in_use(9), slots.is_id_in_use(7)), (2, false, true));
    }

    #[test]
    fn waiting_slots_get_buffers_in_arrival_order() {
        let mut slots = CommandSlots::new(4);
        let transfer = |expected| Transfer {
            namespace: NamespaceId(1),
            namespace_serial: 0,
            pending: PendingCommand::Block(crate::command_plan::PendingNvmCommand::Compare {
                lba: octokv_base::Lba(0),
            }),
            layout: PayloadLayout { value_offset: 64, ..PayloadLayout::PLAIN },
            expected_bytes: expected,
            received_bytes: 0,
            requested_at: Nanos::ZERO,
            open_bytes: 0,
            has_bad_digest: false,
        };
        let first = slots.take(1, SlotState::AwaitingBuffer(transfer(100)));
        let second = slots.take(2, SlotState::AwaitingBuffer(transfer(200)));
        assert_eq!(slots.first_waiting(), Some((first, 164)));
        assert_eq!(slots.start_receiving(first, Buffer::zeroed(164), Nanos(7)), (1, 100));
        assert_eq!(slots.first_waiting(), Some((second, 264)));
        assert_eq!(slots.receiving_bytes(), 4096);
        let open: Vec<_> =
            slots.open_transfers().map(|transfer| (transfer.requested_at, transfer.open_bytes)).collect();
        assert_eq!(open, [(Nanos(7), 4096)]);
        assert!(slots.receiving(first).is_some() && slots.receiving(second).is_none());
        assert!(slots.receiving(77).is_none());
        slots.release(second);
        slots.release(first);
        assert_eq!((slots.first_waiting(), slots.receiving_bytes()), (None, 0));
    }
}
