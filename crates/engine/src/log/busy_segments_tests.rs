//! Busy segments: turns by hand, and operations that read, change, split and are dropped at any moment, against what a device would have.

use super::batch_state::BatchState;
use super::busy_segments::{Acquired, BusySegments, ChangeSource, SegmentTicket, SegmentTurn};
use super::hash_prefix::{HashLevel, SegmentNumber};
use super::segment_table::LogSegmentTable;
use crate::EngineError;
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

const SEGMENTS: u32 = 4;

struct WokenSince(AtomicBool);

impl Wake for WokenSince {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// An operation of the model.
enum Phase {
    /// Not begun, or to begin again.
    Begin,
    Waiting(SegmentTicket, Arc<WokenSince>),
    /// It reads: what the device had when it began.
    Reading(u64),
    Holding,
    Splitting,
    Ended,
}

struct Operation {
    segment: SegmentNumber,
    phase: Phase,
    /// The order in which it began to wait.
    waits_since: u64,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Begin(u32),
    /// The operation with this number, counted round, goes on: a read fails or not, a holder changes its image or not.
    GoOn(usize, bool),
    Drop(usize),
    /// A holder begins to split.
    Split(usize),
    /// A batch claims at most so many segments.
    Claim(usize),
    Publish,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        5 => (0..SEGMENTS).prop_map(Step::Begin),
        10 => (any::<usize>(), prop::bool::weighted(0.2)).prop_map(|(index, other)| Step::GoOn(index, other)),
        2 => any::<usize>().prop_map(Step::Drop),
        2 => any::<usize>().prop_map(Step::Split),
        3 => (1..4usize).prop_map(Step::Claim),
        3 => Just(Step::Publish),
    ];
    vec(step, 0..250)
}

/// A batch in flight: each segment with its image, the number of its changes.
type ModelBatch = Vec<(SegmentNumber, u64)>;

struct Model {
    busy: BusySegments<u64, u64>,
    batches: BatchState,
    table: LogSegmentTable,
    operations: Vec<Operation>,
    /// The image of each segment that the table names.
    device: [u64; SEGMENTS as usize],
    /// The changes made, and those that batches took, of each segment.
    made: [u64; SEGMENTS as usize],
    claimed: [u64; SEGMENTS as usize],
    in_flight: VecDeque<ModelBatch>,
    moment: u64,
}

impl Model {
    fn new() -> Model {
        let level = HashLevel { level: 2, split: 0 };
        Model {
            busy: BusySegments::default(),
            batches: BatchState::new(0),
            table: LogSegmentTable::new(level),
            operations: Vec::new(),
            device: [0; SEGMENTS as usize],
            made: [0; SEGMENTS as usize],
            claimed: [0; SEGMENTS as usize],
            in_flight: VecDeque::new(),
            moment: 0,
        }
    }

    fn on_device(&self, segment: SegmentNumber) -> u64 {
        self.device[segment.0 as usize]
    }

    fn begin(&mut self, index: usize) {
        let segment = self.operations[index].segment;
        self.moment += 1;
        self.operations[index].phase = match self.busy.acquire(segment, &mut self.table) {
            Acquired::Loaded => Phase::Holding,
            Acquired::Load => Phase::Reading(self.on_device(segment)),
            Acquired::Wait(ticket) => {
                self.operations[index].waits_since = self.moment;
                Phase::Waiting(ticket, Arc::new(WokenSince(AtomicBool::new(true))))
            }
        };
        if let Phase::Waiting(..) = self.operations[index].phase {
            self.poll(index);
        }
    }

    /// A waiter that was woken has its turn, or none.
    fn poll(&mut self, index: usize) {
        let segment = self.operations[index].segment;
        let Phase::Waiting(ticket, woken) = &self.operations[index].phase else { unreachable!("it waits") };
        if !woken.0.swap(false, Ordering::Relaxed) {
            return;
        }
        let waker = Waker::from(Arc::clone(woken));
        let Poll::Ready(turn) = self.busy.poll(ticket, &Context::from_waker(&waker)) else { return };
        self.operations[index].phase = match turn {
            SegmentTurn::Loaded => Phase::Holding,
            SegmentTurn::Load => {
                let since = self.operations[index].waits_since;
                // One that was woken has its turn, and has not been polled.
                let is_asleep = |phase: &Phase| matches!(phase, Phase::Waiting(_, woken) if !woken.0.load(Ordering::Relaxed));
                let is_earlier = |other: &Operation| {
                    other.segment == segment && is_asleep(&other.phase) && other.waits_since < since
                };
                assert!(!self.operations.iter().any(is_earlier), "an earlier waiter was passed over");
                Phase::Reading(self.on_device(segment))
            }
            SegmentTurn::Retry => Phase::Begin,
            SegmentTurn::Failed(error) => {
                assert_eq!(error, EngineError::NoMemory);
                Phase::Ended
            }
        };
    }

    fn go_on(&mut self, index: usize, other: bool) {
        let segment = self.operations[index].segment;
        let number = segment.0 as usize;
        match self.operations[index].phase {
            Phase::Begin => self.begin(index),
            Phase::Waiting(..) => self.poll(index),
            Phase::Reading(image) => {
                assert_eq!(image, self.on_device(segment), "the image was replaced while it was read");
                let image = if other { Err(EngineError::NoMemory) } else { Ok(image) };
                self.operations[index].phase = if other { Phase::Ended } else { Phase::Holding };
                self.busy.loaded(segment, image, &mut self.table).wake();
            }
            Phase::Holding if other => {
                self.operations[index].phase = Phase::Ended;
                self.busy.leave(segment, &mut self.table);
            }
            Phase::Holding => {
                assert_eq!(*self.busy.image(segment), self.made[number], "not the newest image");
                *self.busy.image(segment) += 1;
                self.made[number] += 1;
                let source =
                    if index.is_multiple_of(3) { ChangeSource::Compaction } else { ChangeSource::User };
                let ticket =
                    self.busy.mark_dirty(segment, Some(self.made[number]), source, &mut self.batches);
                assert_eq!(self.busy.last_change(segment), Some(ticket));
            }
            Phase::Splitting => {
                self.operations[index].phase = Phase::Ended;
                if other {
                    self.busy.cancel_split(segment).wake();
                    self.busy.leave(segment, &mut self.table);
                } else {
                    self.busy.end_split(segment, &mut self.table).wake();
                }
            }
            Phase::Ended => {}
        }
    }

    fn drop(&mut self, index: usize) {
        let Operation { segment, phase, .. } = self.operations.swap_remove(index);
        match phase {
            Phase::Begin | Phase::Ended => {}
            Phase::Waiting(ticket, _) => self.busy.cancel(ticket, &mut self.table).wake(),
            Phase::Reading(_) => self.busy.abandon_load(segment, &mut self.table).wake(),
            Phase::Holding => self.busy.leave(segment, &mut self.table),
            Phase::Splitting => {
                self.busy.cancel_split(segment).wake();
                self.busy.leave(segment, &mut self.table);
            }
        }
    }

    fn claim(&mut self, most: usize) {
        if !self.batches.try_lead() {
            return;
        }
        let (mut batch, mut tickets) = (ModelBatch::new(), Vec::new());
        while let Some(segment) = self.busy.next_dirty().filter(|_| batch.len() < most) {
            let image = *self.busy.image(segment);
            let claimed = self.busy.claim(segment);
            let number = segment.0 as usize;
            // Every change once, in order.
            assert_eq!(claimed.changes, (self.claimed[number] + 1..=image).collect::<Vec<_>>());
            self.claimed[number] = image;
            batch.push((segment, image));
            tickets.push(claimed.ticket);
        }
        let sequence = self.batches.claimed_sequence() + 1;
        let number = self.batches.claim(tickets, sequence);
        let _ = self.batches.written(number);
        self.in_flight.push_back(batch);
    }

    fn publish(&mut self) {
        let Some(batch) = self.in_flight.pop_front() else { return };
        for (segment, image) in batch {
            self.device[segment.0 as usize] = image;
            self.busy.published(segment, &mut self.table);
        }
        let number = self.batches.claimed_sequence() - self.in_flight.len() as u64;
        let _ = self.batches.published(number, true);
    }

    fn step(&mut self, step: Step) {
        let count = self.operations.len();
        match step {
            Step::Begin(segment) => {
                let segment = SegmentNumber(segment);
                self.operations.push(Operation { segment, phase: Phase::Begin, waits_since: 0 });
                self.begin(count);
            }
            Step::GoOn(index, other) if count > 0 => self.go_on(index % count, other),
            Step::Drop(index) if count > 0 => self.drop(index % count),
            Step::Split(index) if count > 0 => {
                let operation = &mut self.operations[index % count];
                if matches!(operation.phase, Phase::Holding) && self.busy.begin_split(operation.segment) {
                    operation.phase = Phase::Splitting;
                }
            }
            Step::GoOn(..) | Step::Drop(_) | Step::Split(_) => {}
            Step::Claim(most) => self.claim(most),
            Step::Publish => self.publish(),
        }
        self.check();
    }

    fn check(&self) {
        for segment in (0..SEGMENTS).map(SegmentNumber) {
            let number = segment.0 as usize;
            let is_here = |operation: &&Operation| {
                operation.segment == segment && !matches!(operation.phase, Phase::Begin | Phase::Ended)
            };
            let here: Vec<&Operation> = self.operations.iter().filter(is_here).collect();
            let readers =
                here.iter().filter(|operation| matches!(operation.phase, Phase::Reading(_))).count();
            assert!(readers <= 1, "{readers} operations read {segment:?}");
            let is_in_batch = self.in_flight.iter().flatten().any(|(other, _)| *other == segment);
            let is_needed = is_in_batch
                || self.made[number] > self.claimed[number]
                || here.iter().any(|operation| !matches!(operation.phase, Phase::Waiting(..)));
            assert!(!is_needed || self.busy.is_busy(segment), "{segment:?} left too early");
            assert!(!here.is_empty() || is_needed || !self.busy.is_busy(segment), "{segment:?} stays");
            assert_eq!(self.busy.is_busy(segment), self.table.get(segment).is_locked(), "{segment:?}");
        }
    }
}

proptest! {
    #[test]
    fn no_change_is_lost_and_every_operation_ends_whatever_is_dropped(steps in steps()) {
        let mut model = Model::new();
        steps.into_iter().for_each(|step| model.step(step));
        // Holders leave, waiters have their turns, and all is written.
        for _ in 0..3 * (model.operations.len() + 2) {
            for index in 0..model.operations.len() {
                let other = matches!(model.operations[index].phase, Phase::Holding);
                model.step(Step::GoOn(index, other));
            }
            model.step(Step::Claim(usize::MAX));
            model.step(Step::Publish);
        }
        while !model.in_flight.is_empty() {
            model.step(Step::Publish);
        }
        let waiting = model.operations.iter().filter(|operation| !matches!(operation.phase, Phase::Ended)).count();
        prop_assert_eq!((waiting, model.busy.count()), (0, 0));
        prop_assert_eq!(model.device, model.made);
    }
}

/// A store with four segments.
struct Fixture {
    busy: BusySegments<&'static str, u32>,
    batches: BatchState,
    table: LogSegmentTable,
}

impl Fixture {
    fn new() -> Fixture {
        let table = LogSegmentTable::new(HashLevel { level: 2, split: 0 });
        Fixture { busy: BusySegments::default(), batches: BatchState::new(0), table }
    }

    fn hold(&mut self, segment: u32) -> SegmentNumber {
        self.busy.hold_loaded(SegmentNumber(segment), "image", &mut self.table);
        SegmentNumber(segment)
    }

    fn wait(&mut self, segment: SegmentNumber) -> SegmentTicket {
        match self.busy.acquire(segment, &mut self.table) {
            Acquired::Wait(ticket) => ticket,
            other => panic!("{other:?}"),
        }
    }

    fn turn(&mut self, ticket: &SegmentTicket) -> Poll<SegmentTurn> {
        self.busy.poll(ticket, &Context::from_waker(Waker::noop()))
    }
}

#[test]
fn segments_of_users_are_claimed_before_those_of_compaction_in_the_order_of_their_changes() {
    let mut store = Fixture::new();
    let [a, b, c, d] = [0, 1, 2, 3].map(|segment| store.hold(segment));
    let mut mark = |segment, source| store.busy.mark_dirty(segment, Some(1), source, &mut store.batches);
    let moved = mark(a, ChangeSource::Compaction);
    mark(b, ChangeSource::Compaction);
    mark(c, ChangeSource::User);
    assert_eq!(mark(a, ChangeSource::User), moved, "one image, one ticket");
    mark(d, ChangeSource::User);
    mark(c, ChangeSource::Compaction);
    let mut order = Vec::new();
    while let Some(segment) = store.busy.next_dirty() {
        order.push((segment, store.busy.claim(segment).changes.len()));
    }
    assert_eq!(order, [(c, 2), (a, 2), (d, 1), (b, 1)]);
}

#[test]
fn an_image_that_is_moved_is_claimed_without_changes() {
    let mut store = Fixture::new();
    let segment = store.hold(2);
    store.busy.mark_dirty(segment, None, ChangeSource::Compaction, &mut store.batches);
    store.busy.leave(segment, &mut store.table);
    assert!(store.busy.is_busy(segment), "it is dirty");
    assert!(store.busy.claim(segment).changes.is_empty());
    assert!(store.busy.is_busy(segment), "it is in a batch");
    assert!(store.busy.last_change(segment).is_some());
    store.busy.published(segment, &mut store.table);
    assert!(!store.busy.is_busy(segment) && !store.table.get(segment).is_locked());
}

#[test]
fn waiters_of_a_segment_that_is_split_begin_again() {
    let mut store = Fixture::new();
    let segment = store.hold(1);
    assert!(store.busy.begin_split(segment));
    let waiter = store.wait(segment);
    assert!(store.turn(&waiter).is_pending());
    store.busy.end_split(segment, &mut store.table).wake();
    assert_eq!(store.turn(&waiter), Poll::Ready(SegmentTurn::Retry));
    assert_eq!(store.busy.count(), 0);
}

#[test]
fn a_segment_is_split_only_by_its_only_holder_and_when_nothing_of_it_is_unpublished() {
    let mut store = Fixture::new();
    let segment = store.hold(1);
    assert_eq!(store.busy.acquire(segment, &mut store.table), Acquired::Loaded);
    assert!(!store.busy.begin_split(segment), "two hold it");
    store.busy.leave(segment, &mut store.table);
    store.busy.mark_dirty(segment, Some(1), ChangeSource::User, &mut store.batches);
    assert!(!store.busy.begin_split(segment), "it is dirty");
    store.busy.claim(segment);
    assert!(!store.busy.begin_split(segment), "it is in a batch");
    store.busy.published(segment, &mut store.table);
    assert!(store.busy.begin_split(segment));
}

#[test]
fn a_waiter_that_is_dropped_after_its_turn_came_passes_it_on() {
    let mut store = Fixture::new();
    let segment = SegmentNumber(3);
    assert_eq!(store.busy.acquire(segment, &mut store.table), Acquired::Load);
    let [first, second, third] = [(); 3].map(|()| store.wait(segment));
    store.busy.abandon_load(segment, &mut store.table).wake();
    // The first has to read, and does not learn it.
    store.busy.cancel(first, &mut store.table).wake();
    assert_eq!(store.turn(&second), Poll::Ready(SegmentTurn::Load));
    store.busy.loaded(segment, Ok("image"), &mut store.table).wake();
    store.busy.leave(segment, &mut store.table);
    assert!(store.busy.is_busy(segment), "the third was granted it");
    store.busy.cancel(third, &mut store.table).wake();
    assert!(!store.busy.is_busy(segment));
}

#[test]
#[should_panic(expected = "SegmentNumber(0) is busy")]
fn an_image_beside_a_busy_one_is_a_bug() {
    let mut store = Fixture::new();
    store.hold(0);
    store.hold(0);
}
