//! Batches of a store: the turns of waiters by hand, and any order of changes, batches, failures and drops against a model.

use super::batch_state::{BatchState, BatchTurn, BatchWait, BatchWaiterId, ChangeTicket};
use crate::EngineError;
use proptest::collection::vec;
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

struct WokenSince(AtomicBool);

impl Wake for WokenSince {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// A waiter that is polled only when it was woken.
struct Waiter {
    wait: BatchWait,
    id: Option<BatchWaiterId>,
    woken: Arc<WokenSince>,
}

impl Waiter {
    fn new(wait: BatchWait) -> Waiter {
        Waiter { wait, id: None, woken: Arc::new(WokenSince(AtomicBool::new(true))) }
    }

    fn poll(&mut self, batches: &mut BatchState) -> Poll<BatchTurn> {
        if !self.woken.0.swap(false, Ordering::Relaxed) {
            return Poll::Pending;
        }
        let waker = Waker::from(Arc::clone(&self.woken));
        batches.poll(self.wait, &mut self.id, &Context::from_waker(&waker))
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    /// A change, with or without a waiter.
    Open {
        is_awaited: bool,
    },
    /// A waiter for all changes so far.
    AwaitAll,
    /// The waiter with this number, counted round, is polled if it was woken; if it leads, the batch has at most so many changes.
    Poll(usize, usize),
    Drop(usize),
    Marker,
    Written,
    /// The flush of the first batch ends, or of the second one.
    Flushed {
        first: bool,
        is_durable: bool,
    },
    Fail,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => prop::bool::weighted(0.8).prop_map(|is_awaited| Step::Open { is_awaited }),
        1 => Just(Step::AwaitAll),
        8 => (any::<usize>(), 0..4usize).prop_map(|(waiter, most)| Step::Poll(waiter, most)),
        2 => any::<usize>().prop_map(Step::Drop),
        1 => Just(Step::Marker),
        5 => Just(Step::Written),
        5 => (any::<bool>(), any::<bool>()).prop_map(|(first, is_durable)| Step::Flushed { first, is_durable }),
    ];
    (vec(step, 0..200), prop::bool::weighted(0.2)).prop_map(|(mut steps, fails)| {
        if fails {
            steps.insert(steps.len() / 2, Step::Fail);
        }
        steps
    })
}

/// A batch of the model.
struct ModelBatch {
    number: u64,
    tickets: Vec<ChangeTicket>,
    is_written: bool,
    /// Its leader waits for the preceding batch.
    leader: Option<Arc<WokenSince>>,
    last_sequence: u64,
}

struct Model {
    batches: BatchState,
    waiters: Vec<Waiter>,
    unclaimed: Vec<ChangeTicket>,
    in_flight: Vec<ModelBatch>,
    published: Vec<ChangeTicket>,
    published_batches: u64,
    sequence: u64,
    has_failed: bool,
}

impl Model {
    fn new() -> Model {
        Model {
            batches: BatchState::new(10),
            waiters: Vec::new(),
            unclaimed: Vec::new(),
            in_flight: Vec::new(),
            published: Vec::new(),
            published_batches: 0,
            sequence: 10,
            has_failed: false,
        }
    }

    fn covers(wait: BatchWait, ticket: ChangeTicket) -> bool {
        match wait {
            BatchWait::Change(own) => own == ticket,
            BatchWait::AllBefore(end) => ticket < end,
        }
    }

    fn claim(&mut self, most: usize) {
        // A lead without anything to write ends.
        if most == 0 && self.unclaimed.len() > 1 {
            return self.batches.step_down().wake();
        }
        let tickets: Vec<ChangeTicket> =
            self.unclaimed.drain(..self.unclaimed.len().min(most.max(1))).collect();
        self.sequence += 1 + tickets.len() as u64;
        let number = self.batches.claim(tickets.iter().copied(), self.sequence);
        assert_eq!(number, self.published_batches + self.in_flight.len() as u64 + 1);
        assert_eq!(self.batches.claimed_sequence(), self.sequence);
        self.in_flight.push(ModelBatch {
            number,
            tickets,
            is_written: false,
            leader: None,
            last_sequence: self.sequence,
        });
    }

    fn may_lead(&self) -> bool {
        !self.has_failed && self.in_flight.len() <= 1 && self.in_flight.iter().all(|batch| batch.is_written)
    }

    fn poll(&mut self, index: usize, most: usize) {
        let wait = self.waiters[index].wait;
        let Poll::Ready(turn) = self.waiters[index].poll(&mut self.batches) else { return };
        let waits_for = |tickets: &[ChangeTicket]| tickets.iter().any(|&ticket| Model::covers(wait, ticket));
        match turn {
            BatchTurn::Lead => {
                assert!(self.may_lead() && waits_for(&self.unclaimed), "a lead without a turn");
                // It stays: its change may not be in the batch.
                self.waiters[index].woken.0.store(true, Ordering::Relaxed);
                return self.claim(most);
            }
            BatchTurn::Published => {
                assert!(
                    !waits_for(&self.unclaimed)
                        && !self.in_flight.iter().any(|batch| waits_for(&batch.tickets))
                );
            }
            BatchTurn::ReadOnly => assert!(self.has_failed),
        }
        self.waiters.swap_remove(index);
    }

    fn written(&mut self) {
        let writing = self.in_flight.iter_mut().find(|batch| !batch.is_written);
        if let (Some(batch), false) = (writing, self.has_failed) {
            batch.is_written = true;
            let number = batch.number;
            self.batches.written(number).wake();
        }
    }

    fn flushed(&mut self, first: bool, is_durable: bool) {
        let index = usize::from(!first);
        let Some(batch) = self.in_flight.get_mut(index).filter(|batch| batch.is_written) else { return };
        // A leader that waits is polled when it was woken.
        if batch.leader.as_ref().is_some_and(|woken| !woken.0.swap(false, Ordering::Relaxed)) {
            return;
        }
        let woken = batch.leader.get_or_insert_with(|| Arc::new(WokenSince(AtomicBool::new(false))));
        let waker = Waker::from(Arc::clone(woken));
        match self.batches.poll_predecessor(batch.number, &Context::from_waker(&waker)) {
            Poll::Ready(Ok(())) => {
                assert!(index == 0 && !self.has_failed);
                let batch = self.in_flight.remove(0);
                self.batches.published(batch.number, is_durable).wake();
                self.published_batches += 1;
                self.published.extend(batch.tickets);
                assert_eq!(self.batches.published_sequence(), batch.last_sequence);
                assert!(!is_durable || self.batches.durable_sequence() == batch.last_sequence);
            }
            Poll::Ready(Err(error)) => assert!(self.has_failed && error == EngineError::ReadOnly),
            Poll::Pending => assert!(index == 1 && !self.has_failed),
        }
    }

    /// Polls the tasks that were woken and ends batches, until no task can make progress.
    fn drain(&mut self) {
        for _ in 0..4 * (self.unclaimed.len() + self.waiters.len() + 3) {
            for index in (0..self.waiters.len()).rev() {
                self.poll(index, 1);
            }
            self.step(Step::Written);
            self.step(Step::Flushed { first: false, is_durable: true });
            self.step(Step::Flushed { first: true, is_durable: true });
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Open { is_awaited } => {
                let ticket = self.batches.open();
                self.unclaimed.push(ticket);
                if is_awaited {
                    self.waiters.push(Waiter::new(BatchWait::Change(ticket)));
                }
            }
            Step::AwaitAll => {
                self.waiters.push(Waiter::new(BatchWait::AllBefore(self.batches.next_ticket())));
            }
            Step::Poll(index, most) if !self.waiters.is_empty() => {
                self.poll(index % self.waiters.len(), most)
            }
            Step::Drop(index) if !self.waiters.is_empty() => {
                let waiter = self.waiters.swap_remove(index % self.waiters.len());
                if let Some(id) = waiter.id {
                    self.batches.forget(id).wake();
                }
            }
            Step::Poll(..) | Step::Drop(_) => {}
            Step::Marker => {
                assert_eq!(self.batches.try_lead(), self.may_lead());
                if self.may_lead() {
                    self.sequence += 1;
                    let number = self.batches.claim([], self.sequence);
                    let last_sequence = self.sequence;
                    self.in_flight.push(ModelBatch {
                        number,
                        tickets: Vec::new(),
                        is_written: false,
                        leader: None,
                        last_sequence,
                    });
                }
            }
            Step::Written => self.written(),
            Step::Flushed { first, is_durable } => self.flushed(first, is_durable),
            Step::Fail => {
                self.has_failed = true;
                self.batches.fail().wake();
            }
        }
        assert_eq!(self.batches.unclaimed(), self.unclaimed.len());
        assert_eq!(self.batches.is_idle(), self.in_flight.is_empty());
        assert!(self.batches.durable_sequence() <= self.batches.published_sequence());
    }
}

proptest! {
    #[test]
    fn every_waiter_has_its_turn_whatever_is_dropped(steps in steps()) {
        let mut model = Model::new();
        steps.into_iter().for_each(|step| model.step(step));
        model.drain();
        prop_assert!(model.waiters.is_empty(), "{} wait for ever", model.waiters.len());
        // Changes without a waiter are led by one that waits for all.
        model.step(Step::AwaitAll);
        model.drain();
        prop_assert!(model.waiters.is_empty());
        if !model.has_failed {
            prop_assert!(model.unclaimed.is_empty() && model.batches.is_idle());
            // Each change was published once.
            let mut published = model.published.clone();
            published.sort_unstable();
            published.dedup();
            prop_assert_eq!(published.len(), model.published.len());
        }
    }
}

/// The turn of a waiter that is dropped if it has to wait.
fn turn(batches: &mut BatchState, wait: BatchWait) -> Poll<BatchTurn> {
    let mut id = None;
    let turn = batches.poll(wait, &mut id, &Context::from_waker(Waker::noop()));
    assert_eq!(turn.is_pending(), id.is_some());
    if let Some(id) = id {
        assert!(batches.forget(id).is_empty());
    }
    turn
}

#[test]
fn a_batch_begins_beside_the_flush_of_one_other() {
    let mut batches = BatchState::new(0);
    let changes = [(); 4].map(|()| batches.open());
    let lead = |batches: &mut BatchState, change| turn(batches, BatchWait::Change(change));
    assert_eq!(lead(&mut batches, changes[0]), Poll::Ready(BatchTurn::Lead));
    assert_eq!(lead(&mut batches, changes[1]), Poll::Pending, "one leads");
    assert_eq!(batches.claim([changes[0]], 1), 1);
    assert_eq!(lead(&mut batches, changes[1]), Poll::Pending, "one is written");
    assert!(batches.written(1).is_empty());
    assert_eq!(lead(&mut batches, changes[1]), Poll::Ready(BatchTurn::Lead), "one is flushed");
    assert_eq!(batches.claim([changes[1]], 2), 2);
    let _ = batches.written(2);
    assert_eq!(lead(&mut batches, changes[2]), Poll::Pending, "two are flushed");
    assert!(!batches.can_publish(2) && batches.can_publish(1));
    let _ = batches.published(1, true);
    assert_eq!(lead(&mut batches, changes[0]), Poll::Ready(BatchTurn::Published));
    assert_eq!(
        (batches.published_sequence(), batches.durable_sequence(), batches.claimed_sequence()),
        (1, 1, 2)
    );
    assert_eq!(lead(&mut batches, changes[2]), Poll::Ready(BatchTurn::Lead));
}

#[test]
fn a_leader_whose_change_does_not_fit_leads_again() {
    let mut batches = BatchState::new(0);
    let (first, own) = (batches.open(), batches.open());
    assert_eq!(turn(&mut batches, BatchWait::Change(own)), Poll::Ready(BatchTurn::Lead));
    batches.claim([first], 1);
    let _ = batches.written(1);
    assert_eq!(turn(&mut batches, BatchWait::Change(own)), Poll::Ready(BatchTurn::Lead));
    batches.claim([own], 2);
}

#[test]
fn a_batch_that_is_published_is_durable_only_after_a_flush() {
    let mut batches = BatchState::new(5);
    let change = batches.open();
    assert!(batches.try_lead());
    batches.claim([change], 8);
    let _ = batches.written(1);
    let _ = batches.published(1, false);
    assert_eq!((batches.published_sequence(), batches.durable_sequence()), (8, 5));
    batches.note_durable(8);
    batches.note_durable(6);
    assert_eq!(batches.durable_sequence(), 8);
}

#[test]
fn after_a_failure_nothing_is_led_or_published_and_what_is_published_stays_so() {
    let mut batches = BatchState::new(0);
    let (published, lost) = (batches.open(), batches.open());
    assert!(batches.try_lead());
    batches.claim([published], 1);
    let _ = batches.written(1);
    let _ = batches.published(1, true);
    assert!(batches.try_lead());
    batches.claim([lost], 2);
    let _ = batches.written(2);
    let _ = batches.fail();
    assert_eq!(turn(&mut batches, BatchWait::Change(lost)), Poll::Ready(BatchTurn::ReadOnly));
    assert_eq!(turn(&mut batches, BatchWait::Change(published)), Poll::Ready(BatchTurn::Published));
    assert!(!batches.try_lead() && !batches.can_publish(2));
    let late = batches.open();
    assert_eq!(turn(&mut batches, BatchWait::AllBefore(late)), Poll::Ready(BatchTurn::ReadOnly));
}

#[test]
fn a_waiter_that_is_dropped_after_it_was_woken_to_lead_passes_the_lead_on() {
    let mut batches = BatchState::new(0);
    let [first, second] = [(); 2].map(|()| Waiter::new(BatchWait::Change(batches.open())));
    let mut waiters = [first, second];
    assert!(batches.try_lead());
    waiters.iter_mut().for_each(|waiter| assert!(waiter.poll(&mut batches).is_pending()));
    batches.step_down().wake();
    let [first, mut second] = waiters;
    let is_woken = |waiter: &Waiter| waiter.woken.0.load(Ordering::Relaxed);
    assert_eq!((is_woken(&first), is_woken(&second)), (true, false));
    batches.forget(first.id.unwrap()).wake();
    assert_eq!(second.poll(&mut batches), Poll::Ready(BatchTurn::Lead));
}

#[test]
#[should_panic(expected = "batch 2 is published out of order")]
fn publishing_out_of_order_is_a_bug() {
    let mut batches = BatchState::new(0);
    for batch in 1..=2 {
        assert!(batches.try_lead());
        batches.claim([], batch);
        let _ = batches.written(batch);
    }
    let _ = batches.published(2, true);
}
