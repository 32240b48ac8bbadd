//! The commands of one queue that have no answer yet: one slot each, as many as the queue has entries.
//!
//! ```text
//!           needs no data
//!   Free ───────────────────────────────────────────▶ Running ──▶ Free   (Connection::complete)
//!    │  ▲                                                ▲
//!    │  └── Event (asynchronous event request) ◀─┐       │ last byte, digest right
//!    ├───────────────────────────────────────────┘       │
//!    └──▶ Waiting ──▶ Receiving ─────────────────────────┘──▶ Free (digest wrong, admin command done)
//!         no buffer    R2T is out
//! ```
//! Invariants: no two slots in use have one command identifier ([`Slots::has`] is exact); a slot's
//! storage is used again, so that nothing is allocated once a queue has been as deep as it will be;
//! `Waiting` slots get their buffers in the order in which they came.

use crate::io_commands::Intent;
use crate::nvm_commands::Work;
use octokv_base::{Buffer, NamespaceId, Nanos};
use octokv_wire::fabrics::Configuration;
use std::collections::VecDeque;

/// Where bytes of a command's data go in its buffer: the first `split` at the place of the key behind an
/// engine's record header, the others from `value_at` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Landing {
    /// How many bytes of key lead the data.
    pub split: u32,
    /// Where the bytes behind them begin in the buffer.
    pub value_at: u32,
}

impl Landing {
    /// For data that is taken as it is.
    pub const PLAIN: Landing = Landing { split: 0, value_at: 0 };

    /// Where byte `position` of the data goes, and how many that follow it lie beside it.
    pub fn place(&self, position: u32) -> (usize, usize) {
        if position < self.split {
            let at = octokv_base::key::RECORD_HEADER_BYTES + position as usize;
            (at, (self.split - position) as usize)
        } else {
            ((self.value_at + (position - self.split)) as usize, usize::MAX)
        }
    }

    /// The buffer that `bytes` of data need.
    pub fn buffer_bytes(&self, bytes: u32) -> usize {
        self.value_at as usize + (bytes - self.split) as usize
    }

    /// Copies `data` to where it goes, beginning with its byte `position`.
    pub fn copy(&self, buffer: &mut [u8], mut position: u32, mut data: &[u8]) {
        while !data.is_empty() {
            let (at, run) = self.place(position);
            let (now, later) = data.split_at(run.min(data.len()));
            buffer[at..at + now.len()].copy_from_slice(now);
            position += now.len() as u32;
            data = later;
        }
    }
}

/// Data that a host was or will be asked for.
#[derive(Debug)]
pub(crate) struct Transfer {
    /// The namespace that the command is for, and the serial number that it had then.
    pub namespace: NamespaceId,
    pub serial: u64,
    /// What to do when the data is here.
    pub intent: Intent,
    /// Where its bytes go.
    pub landing: Landing,
    /// How many bytes there will be.
    pub expected: u32,
    /// How many are here.
    pub received: u32,
    /// When they were asked for.
    pub asked: Nanos,
    /// Bytes of buffers whose data was to come then, its own among them.
    pub open: usize,
    /// A data digest was wrong: the command fails once all of its data has passed.
    pub damaged: bool,
}

/// What a request at the engine is answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Running {
    /// Store.
    Store,
    /// Retrieve, with the host's limit.
    Retrieve { limit_bytes: u32 },
    /// Delete; the namespace's configuration rules what a missing key means.
    Delete { namespace: NamespaceId },
    /// Exist; only the extension's command tells the value's length.
    Exist { tell_length: bool },
    /// List, with the host's limit.
    List { limit_bytes: u32 },
    /// Flush of a Key Value namespace.
    Flush,
    /// Anything on blocks.
    Blocks(Work),
    /// The write of CC that shuts the controller down: so many flushes are out, and then, if CC is still
    /// what it was, it becomes this.
    ShutDown { left: u32, before: Configuration, written: Configuration },
}

impl Running {
    /// The most bytes of data that the answer brings.
    fn answer_bytes_max(self) -> u64 {
        match self {
            Running::Retrieve { limit_bytes } | Running::List { limit_bytes } => u64::from(limit_bytes),
            Running::Blocks(Work::Read { bytes, .. }) => u64::from(bytes),
            Running::Store
            | Running::Delete { .. }
            | Running::Exist { .. }
            | Running::Flush
            | Running::Blocks(_)
            | Running::ShutDown { .. } => 0,
        }
    }
}

const NONE: NamespaceId = NamespaceId(0);

/// What a slot is doing.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Nothing.
    Free,
    /// A transfer that waits for a buffer.
    Waiting(Transfer),
    /// A transfer whose R2T is out.
    Receiving(Transfer, Buffer),
    /// A request at the engine.
    Running(Running),
    /// An asynchronous event request.
    Event,
}

#[derive(Debug)]
struct Slot {
    command_id: u16,
    /// The namespace of a request at the engine.
    namespace: NamespaceId,
    phase: Phase,
}

/// The slots of one queue.
#[derive(Debug)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u16>,
    limit: usize,
    waiting: VecDeque<u16>,
    running: usize,
    /// The most bytes that the answers of those may bring.
    answer_bytes: u64,
    receiving_bytes: usize,
    /// One bit for each command identifier: whether it is in use.
    used_ids: Box<[u64]>,
}

impl Slots {
    /// For a queue of `entries` entries; 0 for no queue yet.
    pub fn new(entries: u16) -> Slots {
        Slots {
            slots: Vec::new(),
            free: Vec::new(),
            limit: usize::from(entries),
            waiting: VecDeque::new(),
            running: 0,
            answer_bytes: 0,
            receiving_bytes: 0,
            used_ids: vec![0; if entries == 0 { 0 } else { 1 << 10 }].into_boxed_slice(),
        }
    }

    /// Whether every slot is in use.
    pub fn is_full(&self) -> bool {
        self.free.is_empty() && self.slots.len() == self.limit
    }

    /// Requests at the engine.
    pub fn running(&self) -> usize {
        self.running
    }

    /// The most bytes of data that the answers of the requests at the engine may bring.
    pub fn answer_bytes(&self) -> u64 {
        self.answer_bytes
    }

    /// Bytes of values that the host was asked for and that are not all here.
    pub fn receiving_bytes(&self) -> usize {
        self.receiving_bytes
    }

    /// Whether a command of this identifier has no answer yet.
    #[inline]
    pub fn has(&self, command_id: u16) -> bool {
        self.used_ids[usize::from(command_id >> 6)] & (1 << (command_id & 63)) != 0
    }

    /// Takes a slot.
    ///
    /// # Panics
    /// When all are in use, or the identifier is: the caller asked before.
    #[inline]
    pub fn take(&mut self, command_id: u16, phase: Phase) -> u16 {
        assert!(!self.has(command_id), "command {command_id} is in use");
        self.used_ids[usize::from(command_id >> 6)] |= 1 << (command_id & 63);
        let slot = self.free.pop().unwrap_or_else(|| {
            assert!(self.slots.len() < self.limit, "all {} slots are in use", self.limit);
            self.slots.push(Slot { command_id: 0, namespace: NONE, phase: Phase::Free });
            (self.slots.len() - 1) as u16
        });
        self.slots[usize::from(slot)] = Slot { command_id, namespace: NONE, phase: Phase::Free };
        self.set(slot, phase);
        slot
    }

    /// A slot's request is one on this namespace.
    #[inline]
    pub fn set_namespace(&mut self, slot: u16, namespace: NamespaceId) {
        self.slots[usize::from(slot)].namespace = namespace;
    }

    /// The namespace of a slot's request.
    pub fn namespace(&self, slot: u16) -> NamespaceId {
        self.slots[usize::from(slot)].namespace
    }

    /// One of the slot's requests ended; says whether it was the last. Only a shutdown has several.
    #[inline]
    pub fn count_down(&mut self, slot: u16) -> bool {
        match &mut self.slots[usize::from(slot)].phase {
            Phase::Running(Running::ShutDown { left, .. }) => {
                *left -= 1;
                *left == 0
            }
            _ => true,
        }
    }

    /// Whether a shutdown waits for its flushes.
    pub fn shuts_down(&self) -> bool {
        let is_shutdown = |slot: &Slot| matches!(slot.phase, Phase::Running(Running::ShutDown { .. }));
        self.slots.iter().any(is_shutdown)
    }

    /// Frees a slot; gives its command identifier and what it was doing.
    #[inline]
    pub fn release(&mut self, slot: u16) -> (u16, Phase) {
        let phase = self.set(slot, Phase::Free);
        let command_id = self.slots[usize::from(slot)].command_id;
        self.used_ids[usize::from(command_id >> 6)] &= !(1 << (command_id & 63));
        self.free.push(slot);
        (command_id, phase)
    }

    /// The one door through which a slot changes what it is doing; gives what it was doing.
    #[inline]
    pub fn set(&mut self, slot: u16, next: Phase) -> Phase {
        match &next {
            Phase::Waiting(_) => self.waiting.push_back(slot),
            Phase::Receiving(_, buffer) => self.receiving_bytes += buffer.capacity(),
            Phase::Running(running) => {
                self.running += 1;
                self.answer_bytes += running.answer_bytes_max();
            }
            Phase::Free | Phase::Event => {}
        }
        let previous = std::mem::replace(&mut self.slots[usize::from(slot)].phase, next);
        match &previous {
            Phase::Waiting(_) if self.waiting.front() == Some(&slot) => drop(self.waiting.pop_front()),
            Phase::Waiting(_) => self.waiting.retain(|&waiting| waiting != slot),
            Phase::Receiving(_, buffer) => self.receiving_bytes -= buffer.capacity(),
            Phase::Running(running) => {
                self.running -= 1;
                self.answer_bytes -= running.answer_bytes_max();
            }
            Phase::Free | Phase::Event => {}
        }
        previous
    }

    /// The transfer of a slot whose R2T is out, with its command's identifier.
    #[inline]
    pub fn receiving(&mut self, slot: u16) -> Option<(u16, &mut Transfer, &mut Buffer)> {
        let slot = self.slots.get_mut(usize::from(slot))?;
        match &mut slot.phase {
            Phase::Receiving(transfer, buffer) => Some((slot.command_id, transfer, buffer)),
            Phase::Free | Phase::Waiting(_) | Phase::Running(_) | Phase::Event => None,
        }
    }

    /// The first slot that waits for a buffer, and how many bytes of it.
    pub fn first_waiting(&self) -> Option<(u16, usize)> {
        let slot = *self.waiting.front()?;
        match &self.slots[usize::from(slot)].phase {
            Phase::Waiting(transfer) => Some((slot, transfer.landing.buffer_bytes(transfer.expected))),
            phase => unreachable!("slot {slot} is listed as waiting and is {phase:?}"),
        }
    }

    /// Gives a waiting slot its buffer; gives its command's identifier and the bytes to ask for.
    pub fn start_receiving(&mut self, slot: u16, buffer: Buffer, now: Nanos) -> (u16, u32) {
        match self.set(slot, Phase::Free) {
            Phase::Waiting(mut transfer) => {
                let expected = transfer.expected;
                transfer.asked = now;
                transfer.open = self.receiving_bytes + buffer.capacity();
                self.set(slot, Phase::Receiving(transfer, buffer));
                (self.slots[usize::from(slot)].command_id, expected)
            }
            phase => unreachable!("slot {slot} gets a buffer and is {phase:?}"),
        }
    }

    /// The transfers whose data is on its way.
    pub fn open_transfers(&self) -> impl Iterator<Item = &Transfer> {
        let slots = if self.receiving_bytes == 0 { &[][..] } else { &self.slots };
        slots.iter().filter_map(|slot| match &slot.phase {
            Phase::Receiving(transfer, _) => Some(transfer),
            Phase::Free | Phase::Waiting(_) | Phase::Running(_) | Phase::Event => None,
        })
    }

    /// A slot that holds an event request: that of `command_id`, or any.
    pub fn event(&self, command_id: Option<u16>) -> Option<u16> {
        let wanted = |slot: &Slot| {
            matches!(slot.phase, Phase::Event) && command_id.is_none_or(|id| id == slot.command_id)
        };
        self.slots.iter().position(wanted).map(|index| index as u16)
    }

    /// How many slots hold an event request.
    pub fn events(&self) -> usize {
        self.slots.iter().filter(|slot| matches!(slot.phase, Phase::Event)).count()
    }

    /// Frees every slot that is not at the engine: the connection ends, and their commands get no answer.
    pub fn drop_all_but_running(&mut self) {
        for slot in 0..self.slots.len() as u16 {
            if !matches!(self.slots[usize::from(slot)].phase, Phase::Free | Phase::Running(_)) {
                self.release(slot);
            }
        }
    }

    /// Frees the slots of event requests: a reset controller answers none.
    pub fn drop_events(&mut self) {
        while let Some(slot) = self.event(None) {
            self.release(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_has_as_many_slots_as_entries_and_uses_them_again() {
        let mut slots = Slots::new(3);
        for id in [7, 9, 0xffff] {
            assert!(!slots.is_full() && !slots.has(id));
            slots.take(id, Phase::Running(Running::Flush));
            assert!(slots.has(id));
        }
        assert!(slots.is_full());
        assert_eq!(slots.running(), 3);
        assert!(matches!(slots.release(1), (9, Phase::Running(Running::Flush))));
        assert!(!slots.is_full() && !slots.has(9));
        assert_eq!(slots.take(9, Phase::Event), 1);
        assert_eq!((slots.event(Some(9)), slots.event(Some(7)), slots.events()), (Some(1), None, 1));
        slots.drop_events();
        assert_eq!((slots.running(), slots.has(9), slots.has(7)), (2, false, true));
    }

    #[test]
    fn waiting_slots_get_their_buffers_in_turn() {
        let mut slots = Slots::new(4);
        let transfer = |expected| Transfer {
            namespace: NamespaceId(1),
            serial: 0,
            intent: Intent::Block(crate::nvm_commands::Intent::Compare { lba: octokv_base::Lba(0) }),
            landing: Landing { split: 0, value_at: 64 },
            expected,
            received: 0,
            asked: Nanos::ZERO,
            open: 0,
            damaged: false,
        };
        let first = slots.take(1, Phase::Waiting(transfer(100)));
        let second = slots.take(2, Phase::Waiting(transfer(200)));
        assert_eq!(slots.first_waiting(), Some((first, 164)));
        assert_eq!(slots.start_receiving(first, Buffer::zeroed(164), Nanos(7)), (1, 100));
        assert_eq!(slots.first_waiting(), Some((second, 264)));
        assert_eq!(slots.receiving_bytes(), 4096);
        let open: Vec<_> = slots.open_transfers().map(|transfer| (transfer.asked, transfer.open)).collect();
        assert_eq!(open, [(Nanos(7), 4096)]);
        assert!(slots.receiving(first).is_some() && slots.receiving(second).is_none());
        assert!(slots.receiving(77).is_none());
        slots.release(second);
        slots.release(first);
        assert_eq!((slots.first_waiting(), slots.receiving_bytes()), (None, 0));
    }

    #[test]
    fn the_key_in_front_of_a_value_lands_behind_the_header() {
        let landing = Landing { split: 20, value_at: 128 };
        let mut buffer = vec![0; landing.buffer_bytes(50)];
        assert_eq!(buffer.len(), 158);
        let data: Vec<u8> = (1..=50).collect();
        landing.copy(&mut buffer, 0, &data[..7]);
        landing.copy(&mut buffer, 7, &data[7..33]);
        landing.copy(&mut buffer, 33, &data[33..]);
        assert_eq!(buffer[48..68], data[..20]);
        assert_eq!(buffer[128..], data[20..]);
    }
}
