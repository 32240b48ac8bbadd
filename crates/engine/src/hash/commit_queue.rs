//! What group commit remembers: the changes that wait, the batches that are under way, where the ring goes on.
//!
//! In: changes, and word of their records. Out: batches, in order, and who is woken. Does no input or output
//! itself: that is [`super::commit`]'s, which says how all this is used.
//!
//! ```text
//!   waiting:  ▓▓▓▓▓▓▓▓▓ ▓▓▓▓▓ ▒▒▒▒▒▒▒   front: those of the batches under way, in their order; then those
//!             batch n    n+1    taken by none
//!   next:     where batch n+2 will begin
//! ```
//! Invariants: a change is in one batch; batches are numbered without gaps and leave in order; whoever waits is
//! woken when what it waits for has come, and everyone is when writing has failed.

use super::allocator::Extent;
use super::journal::{self, BATCH_BYTES_MAX, BATCH_ENTRIES_MAX, BatchHeader, Entry, batch_units_max};
use super::volume::Volume;
use crate::bug_injection::{self, Bug};
use crate::{Durability, Fault};
use octokv_base::Buffer;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// Batches under way at once. One more makes a put wait for less of the batch before it, and shares its
/// flush with fewer.
pub(super) const LEADERS_MAX: usize = 3;

/// A place in the journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JournalPosition {
    /// The unit of the ring where the next batch begins.
    pub unit: u32,
    /// The number of that batch.
    pub batch: u64,
    /// The number of its first entry.
    pub entry: u64,
    /// Units used since the volume was opened, those left at the ring's end included.
    pub used: u64,
}

/// The changes that wait and the state of the journal.
pub struct Commits {
    state: Mutex<State>,
    failed: AtomicBool,
    ring_units: u32,
    unit_bytes: u32,
}

struct State {
    /// Those of the batches under way, then those that no batch has taken.
    waiting: VecDeque<Waiting>,
    /// How many of them are in batches under way.
    taken: usize,
    /// How many changes were committed before the first that waits.
    committed: u64,
    /// Who writes a batch, or makes room for one.
    leading: usize,
    /// Where the next batch goes.
    next: JournalPosition,
    /// The batches that are being written, in order.
    under_way: VecDeque<UnderWay>,
    /// Where the last checkpoint lets replay begin.
    tail_used: u64,
    /// Batches up to this one are in the index.
    published: u64,
    /// Batches up to this one are durable.
    flushed_through: u64,
    /// Space freed by batches after that one: a power cut may yet bring back who had it.
    limbo: Vec<Extent>,
    /// The last batch with changes, and what the newest batch says of durability.
    last_changes: u64,
    last_said: u64,
    batches: u64,
    /// Who keeps the volume in order, asleep until there are changes to mark.
    maintainer: Option<Waker>,
    /// Used by each leader in turn.
    scratch: Vec<Scratch>,
}

struct Waiting {
    entry: Entry,
    record: Record,
    waker: Option<Waker>,
}

/// What is known of the record that a change names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Record {
    UnderWay,
    /// It is on the device.
    Landed(Landed),
    Failed,
}

impl Record {
    pub(super) fn of(landed: &Result<Landed, Fault>) -> Record {
        landed.map_or(Record::Failed, Record::Landed)
    }

    /// The change of `entry` as it has become.
    pub(super) fn amended(self, entry: Entry) -> Entry {
        match self {
            Record::UnderWay => entry,
            Record::Landed(landed) => landed.amended(entry),
            Record::Failed => entry.struck(),
        }
    }
}

/// How a record that was under way beside its batch came to lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Landed {
    /// In the place of the one that the change says it replaces, if any.
    AsSaid,
    /// Beside that one, which is another key's of the same tag.
    Beside,
}

impl Landed {
    /// The change of `entry` as it has become.
    pub(super) fn amended(self, entry: Entry) -> Entry {
        match self {
            Landed::AsSaid => entry,
            Landed::Beside => Entry { old: 0, ..entry },
        }
    }
}

/// A batch that is being written.
struct UnderWay {
    at: JournalPosition,
    entries: usize,
    /// Records that it names and that are not written yet.
    unwritten: usize,
    /// Its leader, which waits for those or for the batches before.
    leader: Option<Waker>,
}

pub(super) struct Scratch {
    pub(super) entries: Vec<Entry>,
    pub(super) freed: Vec<Extent>,
    wakers: Vec<Waker>,
    pub(super) copies: [Buffer; 2],
}

impl Scratch {
    fn new() -> Scratch {
        let copy = || Buffer::zeroed(BATCH_BYTES_MAX.next_multiple_of(4096));
        Scratch {
            entries: Vec::with_capacity(BATCH_ENTRIES_MAX),
            freed: Vec::with_capacity(BATCH_ENTRIES_MAX),
            wakers: Vec::with_capacity(BATCH_ENTRIES_MAX + 2),
            copies: [copy(), copy()],
        }
    }
}

/// What a waiter does next.
pub(super) enum Turn {
    Lead,
    Done(Result<(), Fault>),
}

/// What a leader finds.
// Made once a batch and taken apart at once.
#[expect(clippy::large_enum_variant)]
pub(super) enum Taken {
    /// The changes of a batch, and what its header says.
    Batch(Scratch, JournalPosition, BatchHeader),
    /// The ring has no room.
    NoRoom,
    /// Another took the leader's own change meanwhile.
    Gone,
}

impl Commits {
    pub(super) fn new(next: JournalPosition, ring_units: u32, unit_bytes: u32) -> Commits {
        let durable = next.batch.saturating_sub(1);
        let state = State {
            waiting: VecDeque::with_capacity(BATCH_ENTRIES_MAX),
            taken: 0,
            committed: 0,
            leading: 0,
            next,
            under_way: VecDeque::with_capacity(LEADERS_MAX),
            tail_used: 0,
            published: durable,
            flushed_through: durable,
            limbo: Vec::new(),
            last_changes: durable,
            last_said: 0,
            batches: 0,
            maintainer: None,
            scratch: std::iter::repeat_with(Scratch::new).take(LEADERS_MAX).collect(),
        };
        Commits { state: Mutex::new(state), failed: AtomicBool::new(false), ring_units, unit_bytes }
    }

    fn batch_units_max(&self) -> u32 {
        batch_units_max(self.unit_bytes)
    }

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    pub(super) fn batches(&self) -> u64 {
        self.state.lock().batches
    }

    /// Where replay must begin for an index written from now on.
    pub(super) fn replay_from(&self) -> JournalPosition {
        let state = self.state.lock();
        let mut position = state.under_way.front().map_or(state.next, |batch| batch.at);
        if position.unit + self.batch_units_max() > self.ring_units {
            position.unit = 0;
        }
        position
    }

    /// Lets the ring use again what lies before `position`.
    pub(super) fn release_before(&self, position: JournalPosition) {
        self.state.lock().tail_used = position.used;
    }

    /// Whether half of the ring is in use.
    pub(super) fn wants_checkpoint(&self) -> bool {
        let state = self.state.lock();
        state.next.used - state.tail_used > u64::from(self.ring_units) / 2
    }

    /// Stops all further writes: what the device holds is no longer known.
    pub(super) fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
        let mut state = self.state.lock();
        let mut wakers: Vec<Waker> =
            state.waiting.iter_mut().filter_map(|waiting| waiting.waker.take()).collect();
        wakers.extend(state.under_way.iter_mut().filter_map(|batch| batch.leader.take()));
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(super) fn join(&self, entry: Entry, record: Record) -> u64 {
        let mut state = self.state.lock();
        state.waiting.push_back(Waiting { entry, record, waker: None });
        state.committed + state.waiting.len() as u64 - 1
    }

    /// Notes that the record of a change was written, or could not be.
    pub(super) fn record_is(&self, ticket: u64, record: Record) {
        let mut state = self.state.lock();
        // Its batch waits for this, so it is not committed (but where a bug is planted).
        let Some(place) = ticket.checked_sub(state.committed).map(|place| place as usize) else { return };
        state.waiting[place].record = record;
        if place >= state.taken {
            return;
        }
        let mut end = 0;
        let of_change = |batch: &&mut UnderWay| {
            end += batch.entries;
            place < end
        };
        let batch = state.under_way.iter_mut().find(of_change).expect("a change that was taken");
        batch.unwritten -= 1;
        let leader = if batch.unwritten == 0 { batch.leader.take() } else { None };
        drop(state);
        if let Some(leader) = leader {
            leader.wake();
        }
    }

    /// Whether a batch of any size fits before the ring's end meets its tail.
    pub(super) fn has_room(&self) -> bool {
        self.has_room_after(&self.state.lock())
    }

    fn has_room_after(&self, state: &State) -> bool {
        // A batch, and at worst as much again left unused at the end of the ring.
        state.next.used + 2 * u64::from(self.batch_units_max()) - state.tail_used
            <= u64::from(self.ring_units)
    }

    /// Takes the changes of the next batch, among them `own` if nobody has taken it, and its place in the ring.
    pub(super) fn take_batch(&self, own: Option<u64>, volume: &Volume) -> Taken {
        let incarnation = volume.superblock.lock().incarnation;
        let mut state = self.state.lock();
        if own.is_some_and(|ticket| ticket < state.committed + state.taken as u64) {
            return Taken::Gone;
        }
        if !self.has_room_after(&state) {
            return Taken::NoRoom;
        }
        let mut scratch = state.scratch.pop().expect("one for each leader");
        scratch.entries.clear();
        scratch.freed.clear();
        let mut unwritten = 0;
        for waiting in state.waiting.range(state.taken..).take(BATCH_ENTRIES_MAX) {
            unwritten += usize::from(waiting.record == Record::UnderWay);
            scratch.entries.push(waiting.record.amended(waiting.entry));
        }
        let entries = scratch.entries.len();
        let units = journal::units_of(entries, self.unit_bytes);
        if state.next.unit + self.batch_units_max() > self.ring_units {
            state.next.used += u64::from(self.ring_units - state.next.unit);
            state.next.unit = 0;
        }
        let at = state.next;
        state.next = JournalPosition {
            unit: at.unit + units,
            batch: at.batch + 1,
            entry: at.entry + entries as u64,
            used: at.used + u64::from(units),
        };
        state.taken += entries;
        state.under_way.push_back(UnderWay { at, entries, unwritten, leader: None });
        let flushed_through = match bug_injection::is(Bug::VouchTooEarly) {
            true => at.batch - 1,
            false => state.flushed_through,
        };
        let header = BatchHeader {
            volume: volume.id(),
            batch: at.batch,
            first_entry: at.entry,
            incarnation,
            unflushed: volume.durability == Durability::Device || flushed_through + 1 < at.batch,
            flushed_through,
        };
        Taken::Batch(scratch, at, header)
    }

    /// Waits until every record of the batch was written, or could not be.
    pub(super) async fn records_of(&self, batch: u64) -> Result<(), Fault> {
        self.batch_is(batch, |_, batch| batch.unwritten == 0).await
    }

    /// Waits until the batches before it are in the index.
    pub(super) async fn turn_of(&self, batch: u64) -> Result<(), Fault> {
        self.batch_is(batch, |place, _| place == 0).await
    }

    /// Waits until `is_ready` says so of the batch: told its place among those under way and itself.
    async fn batch_is(&self, batch: u64, is_ready: impl Fn(usize, &UnderWay) -> bool) -> Result<(), Fault> {
        poll_fn(|context| {
            let mut state = self.state.lock();
            if self.has_failed() {
                return Poll::Ready(Err(Fault::ReadOnly));
            }
            let place = (batch - state.published - 1) as usize;
            if is_ready(place, &state.under_way[place]) {
                return Poll::Ready(Ok(()));
            }
            state.under_way[place].leader = Some(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Mends the changes of a batch whose records did not land as they say. True if there were any.
    pub(super) fn amend(&self, batch: u64, entries: &mut [Entry]) -> bool {
        let state = self.state.lock();
        let before = state.under_way.iter().take_while(|other| other.at.batch < batch);
        let first = before.map(|other| other.entries).sum::<usize>();
        let mut any = false;
        for (waiting, entry) in state.waiting.range(first..).zip(entries) {
            let amended = waiting.record.amended(*entry);
            any |= amended != *entry;
            *entry = amended;
        }
        any
    }

    /// The last batch in the index, and the space that waits for it to be durable; `None` when it is.
    pub(super) fn take_limbo(&self) -> Option<(u64, Vec<Extent>)> {
        let mut state = self.state.lock();
        let last = state.published;
        (state.flushed_through < last).then(|| (last, std::mem::take(&mut state.limbo)))
    }

    /// Keeps space until a flush has made the batch durable that freed it.
    pub(super) fn keep_in_limbo(&self, freed: &[Extent]) {
        self.state.lock().limbo.extend_from_slice(freed);
    }

    /// Notes that the batches up to `batch` are durable.
    pub(super) fn is_flushed_through(&self, batch: u64) {
        let mut state = self.state.lock();
        state.flushed_through = state.flushed_through.max(batch);
    }

    /// Notes that the first batch under way is written and its changes are in the index, and answers those who
    /// waited.
    pub(super) fn batch_is_done(&self, said: u64, durable: bool, mut scratch: Scratch) {
        let mut state = self.state.lock();
        let batch = state.under_way.pop_front().expect("the batch of the caller");
        let (count, number) = (batch.entries, batch.at.batch);
        state.published = number;
        if durable {
            state.flushed_through = number;
        }
        state.last_said = said;
        state.batches += 1;
        if count > 0 {
            state.last_changes = number;
        }
        state.committed += count as u64;
        state.taken -= count;
        scratch.wakers.extend(state.waiting.drain(..count).filter_map(|waiting| waiting.waker));
        scratch.wakers.extend(state.under_way.front_mut().and_then(|next| next.leader.take()));
        if state.last_said < state.last_changes {
            scratch.wakers.extend(state.maintainer.take());
        }
        drop(state);
        scratch.wakers.drain(..).for_each(Waker::wake);
        self.state.lock().scratch.push(scratch);
    }

    /// Gives the lead to the next who waits.
    pub(super) fn step_down(&self) {
        let mut state = self.state.lock();
        state.leading -= 1;
        let first = state.taken;
        let next = state.waiting.get_mut(first).and_then(|waiting| waiting.waker.take());
        drop(state);
        if let Some(waker) = next {
            waker.wake();
        }
    }

    /// Whether nothing is being written.
    pub(super) fn is_idle(&self) -> bool {
        let state = self.state.lock();
        self.has_failed() || (state.leading == 0 && state.waiting.is_empty())
    }

    /// What the waiter of `ticket` does next; where that is to wait, it is woken.
    pub(super) fn turn(&self, ticket: u64, context: &Context<'_>) -> Poll<Turn> {
        let mut state = self.state.lock();
        if state.committed > ticket {
            return Poll::Ready(Turn::Done(Ok(())));
        }
        if self.has_failed() {
            return Poll::Ready(Turn::Done(Err(Fault::ReadOnly)));
        }
        let place = (ticket - state.committed) as usize;
        if place >= state.taken && state.leading < LEADERS_MAX {
            state.leading += 1;
            return Poll::Ready(Turn::Lead);
        }
        state.waiting[place].waker = Some(context.waker().clone());
        Poll::Pending
    }

    /// Waits until there are changes that the journal does not yet say are durable.
    pub(super) async fn changes(&self) {
        poll_fn(|context| {
            let mut state = self.state.lock();
            if state.last_said < state.last_changes {
                return Poll::Ready(());
            }
            state.maintainer = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Whether the newest batch does not yet say that the last changes are durable, and nobody leads.
    pub(super) fn take_lead_to_mark(&self) -> bool {
        let mut state = self.state.lock();
        let wanted = state.last_said < state.last_changes && state.leading == 0 && state.waiting.is_empty();
        state.leading += usize::from(wanted);
        wanted
    }
}
