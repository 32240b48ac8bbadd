//! The queue of one device of several, shared by all cores: active commands, by tokens, and those that wait for tokens.
//!
//! ```text
//!            tokens and no waiter                  end of another one, in order
//!   admit ─────────────────────────▶ active   waiting ──granted──▶ active ──poll──▶ the engine's operation
//!     └─── otherwise ──▶ waiting         └──drop──▶ tokens back, the next ones are granted
//!   close, of a device that failed or was replaced: all that wait fail
//! ```
//! In: commands of any core with their starting costs, and their ends with times. Out: an admission, in the order of arrival
//! (LEED, SIGCOMM 2023, §3.4: both queues are first come, first served); occupancy and free tokens for other cores, without the lock.
//!
//! Invariants: while one waits, another is active, whose end grants the next; a waiter that is dropped leaves the queue, or
//! passes on what it was granted; no command is admitted once the queue is closed. The active queue is bounded by the tokens. The waiting
//! one holds at most the commands that hosts have in flight, which their queues bound. Tested below and in `tests/spanned_queue.rs`.

use crate::bug_injection::{self, InjectedBug};
use crate::{QueueReport, WallClock};
use octokv_base::Nanos;
use octokv_device::Device;
use octokv_runtime::{WaiterQueue, WaiterTicket};
use octokv_sched::{CostKind, DeviceTokens, EndedCommand, StartingCosts};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Waker};

/// The wakers of commands that one end grants: mostly one, more if the capacity grows or a Put makes room for Gets.
type GrantedWakers = SmallVec<[Waker; 4]>;

/// See the module header.
pub struct DeviceQueue {
    state: Mutex<QueueState>,
    clock: WallClock,
    costs: StartingCosts,
    /// Copies of the state, written under its lock.
    free: AtomicU32,
    /// The bits of the quotient.
    occupancy: AtomicU32,
    capacity: AtomicU32,
    host_capacity: AtomicU32,
    host_free: AtomicU32,
}

/// The cost of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct QueuedCost {
    /// As measured, when it arrived.
    tokens: u32,
    /// Before measurement, by which hosts count.
    starting: u32,
}

struct QueueState {
    tokens: DeviceTokens,
    /// With their costs.
    waiting: WaiterQueue<QueuedCost>,
    waiting_cost: u64,
    /// Starting cost of the active commands, and the starting tokens of a measured one when there last were some.
    active_starting: u64,
    starting_ratio: f64,
    is_closed: bool,
}

/// The device of a queue has failed, or another takes its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueClosed;

/// A command that is active until this is dropped.
pub struct QueueAdmission<'a> {
    queue: &'a DeviceQueue,
    cost: QueuedCost,
    ended: Option<EndedCommand>,
}

/// A command that waits for tokens. Dropping it leaves the queue.
struct QueueWaiter<'a> {
    queue: &'a DeviceQueue,
    cost: QueuedCost,
    /// `None` once it has become an admission, or failed.
    ticket: Option<WaiterTicket>,
}

impl DeviceQueue {
    /// The queue of an idle device. Without a monotonic clock of device or `clock` its capacity does not change.
    pub fn new(costs: StartingCosts, clock: WallClock) -> DeviceQueue {
        let state = QueueState {
            tokens: DeviceTokens::new(costs),
            waiting: WaiterQueue::default(),
            waiting_cost: 0,
            active_starting: 0,
            starting_ratio: 1.0,
            is_closed: false,
        };
        let [free, occupancy, capacity, host_capacity, host_free] = [0; 5].map(AtomicU32::new);
        let state = Mutex::new(state);
        let queue = DeviceQueue { state, clock, costs, free, occupancy, capacity, host_capacity, host_free };
        queue.publish(&queue.state.lock());
        queue
    }

    /// The time of the device, or of the volume's monotonic clock.
    pub fn now(&self, device: &dyn Device) -> Option<Nanos> {
        device.now().or_else(|| self.clock.elapsed())
    }

    /// (Active + waiting cost) ÷ capacity: 0 for an idle device; above 1 only if commands wait.
    pub fn occupancy(&self) -> f32 {
        f32::from_bits(self.occupancy.load(Ordering::Relaxed))
    }

    /// The tokens that neither active nor waiting commands take.
    pub fn free_tokens(&self) -> u32 {
        self.free.load(Ordering::Relaxed)
    }

    /// N: the tokens that may be active, except in a trial of half of them.
    pub fn capacity(&self) -> u32 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// The tokens that may be active now (the capacity, or half of it in a trial), in starting tokens, by the mix that is active or was last. Hosts count in these: measured costs change, and
    /// a host that has those of another moment would take a window for more or less commands than it is.
    pub fn host_capacity(&self) -> u32 {
        self.host_capacity.load(Ordering::Relaxed)
    }

    /// The free tokens in starting tokens, as [`DeviceQueue::host_capacity`].
    pub fn host_free_tokens(&self) -> u32 {
        self.host_free.load(Ordering::Relaxed)
    }

    /// The cost of a command in starting tokens, which is constant.
    pub fn host_cost(&self, kind: CostKind, bytes: usize) -> u32 {
        self.costs.of(kind, bytes)
    }

    /// The state of the queue.
    pub fn report(&self) -> QueueReport {
        let state = self.state.lock();
        let costs = state.tokens.costs();
        let cost = |kind| costs.of(kind, 0);
        QueueReport {
            capacity: state.tokens.capacity(),
            active: state.tokens.active(),
            waiting: state.waiting_cost,
            get_cost: cost(CostKind::Get),
            put_cost: cost(CostKind::Put),
            delete_cost: cost(CostKind::Delete),
        }
    }

    /// Waits until the device has tokens for a command with a value of `bytes`, after all earlier callers. A Get does not know its bytes:
    /// those of [`QueueAdmission::end`] count for the measured costs.
    ///
    /// # Errors
    /// [`QueueClosed`], before or while it waits.
    pub async fn admit(&self, kind: CostKind, bytes: usize) -> Result<QueueAdmission<'_>, QueueClosed> {
        let waiter = {
            let mut state = self.state.lock();
            if state.is_closed {
                return Err(QueueClosed);
            }
            let tokens = state.tokens.costs().of(kind, bytes);
            let cost = QueuedCost { tokens, starting: self.costs.of(kind, bytes) };
            let begins = state.waiting.is_empty() && state.try_begin(cost);
            let ticket = (!begins).then(|| {
                state.waiting_cost += u64::from(tokens);
                state.waiting.push(cost)
            });
            self.publish(&state);
            let Some(ticket) = ticket else { return Ok(QueueAdmission { queue: self, cost, ended: None }) };
            QueueWaiter { queue: self, cost, ticket: Some(ticket) }
        };
        waiter.await
    }

    /// Fails all commands that wait, and those to come. Active ones end as the device ends them.
    pub fn close(&self) {
        let mut wakers = GrantedWakers::new();
        let mut state = self.state.lock();
        state.is_closed = true;
        while let Some((_, waker)) = state.waiting.pop_front() {
            wakers.extend(waker);
        }
        state.waiting_cost = 0;
        self.publish(&state);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Ends a command and grants those for which there are tokens then.
    fn end(&self, cost: QueuedCost, ended: Option<EndedCommand>) {
        let mut state = self.state.lock();
        state.tokens.end(cost.tokens, ended);
        state.active_starting -= u64::from(cost.starting);
        let wakers = state.grant();
        self.publish(&state);
        drop(state);
        if !bug_injection::is_injected(InjectedBug::TokensForgetWaker) {
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    fn publish(&self, state: &QueueState) {
        let ratio = state.starting_ratio;
        let (active, capacity) = (u64::from(state.tokens.active()), state.tokens.capacity());
        let taken = active + state.waiting_cost;
        let free_of = |tokens: u32| {
            if state.is_closed { 0 } else { u64::from(tokens).saturating_sub(taken) as u32 }
        };
        self.free.store(free_of(capacity), Ordering::Relaxed);
        self.occupancy.store((taken as f32 / capacity as f32).to_bits(), Ordering::Relaxed);
        self.capacity.store(capacity, Ordering::Relaxed);
        // A trial halves the windows, too: otherwise hosts send as much as before, and the commands that wait here keep groups as large.
        let limit = state.tokens.limit();
        self.host_capacity.store((f64::from(limit) * ratio) as u32, Ordering::Relaxed);
        self.host_free.store((f64::from(free_of(limit)) * ratio) as u32, Ordering::Relaxed);
    }
}

impl QueueState {
    fn try_begin(&mut self, cost: QueuedCost) -> bool {
        let begins = self.tokens.try_begin(cost.tokens);
        if begins {
            self.active_starting += u64::from(cost.starting);
            self.starting_ratio = self.active_starting as f64 / f64::from(self.tokens.active());
        }
        begins
    }

    fn grant(&mut self) -> GrantedWakers {
        let mut wakers = GrantedWakers::new();
        while let Some(&cost) = self.waiting.first()
            && self.try_begin(cost)
        {
            self.waiting_cost -= u64::from(cost.tokens);
            wakers.extend(self.waiting.pop_front().and_then(|(_, waker)| waker));
        }
        wakers
    }
}

impl QueueAdmission<'_> {
    /// The end of a command whose service the device showed.
    pub fn end(mut self, ended: EndedCommand) {
        self.ended = Some(ended);
    }
}

impl Drop for QueueAdmission<'_> {
    fn drop(&mut self) {
        if self.ended.is_some() || !bug_injection::is_injected(InjectedBug::TokensKeepUnserved) {
            self.queue.end(self.cost, self.ended);
        }
    }
}

impl<'a> Future for QueueWaiter<'a> {
    type Output = Result<QueueAdmission<'a>, QueueClosed>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let ticket = self.ticket.expect("not polled after it ended");
        let mut state = self.queue.state.lock();
        if state.waiting.set_waker(ticket, context.waker()) {
            return Poll::Pending;
        }
        let is_closed = state.is_closed;
        drop(state);
        self.ticket = None;
        // What it may have been granted before stays with a queue that grants no more.
        if is_closed {
            return Poll::Ready(Err(QueueClosed));
        }
        Poll::Ready(Ok(QueueAdmission { queue: self.queue, cost: self.cost, ended: None }))
    }
}

impl Drop for QueueWaiter<'_> {
    fn drop(&mut self) {
        let Some(ticket) = self.ticket else { return };
        let mut state = self.queue.state.lock();
        if state.is_closed {
            return;
        }
        if state.waiting.remove(ticket).is_none() {
            drop(state);
            return self.queue.end(self.cost, None);
        }
        state.waiting_cost -= u64::from(self.cost.tokens);
        // It may have been the first, and the next one may fit.
        let wakers = state.grant();
        self.queue.publish(&state);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;
    use futures_util::future::LocalBoxFuture;
    use octokv_sched::command_costs::GET_TOKENS;
    use octokv_sched::device_tokens::COMMANDS_MIN;
    use std::collections::VecDeque;
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;
    use std::task::Wake;

    /// The first capacity in Gets.
    const GETS: usize = 32;

    fn queue() -> DeviceQueue {
        DeviceQueue::new(StartingCosts::default(), WallClock::default())
    }

    type Waiting<'a> = LocalBoxFuture<'a, Result<QueueAdmission<'a>, QueueClosed>>;

    /// A command that waits, or its admission.
    fn begin<'a>(queue: &'a DeviceQueue, kind: CostKind) -> Result<QueueAdmission<'a>, Waiting<'a>> {
        let mut admitted = queue.admit(kind, 100).boxed_local();
        match (&mut admitted).now_or_never() {
            Some(admission) => Ok(admission.expect("it is open")),
            None => Err(admitted),
        }
    }

    fn fill(queue: &DeviceQueue) -> Vec<QueueAdmission<'_>> {
        (0..GETS).map(|_| begin(queue, CostKind::Get).ok().expect("tokens are free")).collect()
    }

    fn is_admitted(waiting: &mut Waiting<'_>) -> bool {
        waiting.now_or_never().is_some_and(|admission| {
            // It stays active.
            std::mem::forget(admission.expect("it is open"));
            true
        })
    }

    #[test]
    fn commands_wait_for_tokens_in_the_order_of_their_arrival() {
        let queue = queue();
        assert_eq!((queue.occupancy(), queue.free_tokens()), (0.0, 512));
        let mut active = fill(&queue);
        assert_eq!((queue.occupancy(), queue.free_tokens()), (1.0, 0));
        let mut put = begin(&queue, CostKind::Put).err().expect("waits");
        let mut get = begin(&queue, CostKind::Get).err().expect("waits");
        assert_eq!((queue.occupancy(), queue.free_tokens()), (1.0 + 80.0 / 512.0, 0));
        // A Put needs the tokens of four Gets, and the Get behind it does not pass it.
        active.truncate(GETS - 3);
        assert!(!is_admitted(&mut put) && !is_admitted(&mut get));
        active.pop();
        assert!(!is_admitted(&mut get) && is_admitted(&mut put));
        active.pop();
        assert!(is_admitted(&mut get));
        assert_eq!(queue.occupancy(), 1.0);
    }

    #[test]
    fn a_waiter_that_is_dropped_leaves_the_queue_or_passes_its_tokens_on() {
        let queue = queue();
        let mut active = fill(&queue);
        let put = begin(&queue, CostKind::Put).err().expect("waits");
        let first = begin(&queue, CostKind::Get).err().expect("waits");
        let mut second = begin(&queue, CostKind::Get).err().expect("waits");
        active.pop();
        // The first that waits was in the way of the others.
        drop(put);
        assert!(!is_admitted(&mut second), "the one before it was granted the tokens");
        drop(first);
        assert!(is_admitted(&mut second));
        drop(active);
        assert_eq!(queue.free_tokens(), 512 - GET_TOKENS);
    }

    #[test]
    fn a_closed_queue_fails_what_waits_and_what_comes() {
        let queue = queue();
        let mut active = fill(&queue);
        let granted = begin(&queue, CostKind::Get).err().expect("waits");
        let waits = begin(&queue, CostKind::Get).err().expect("waits");
        let dropped = begin(&queue, CostKind::Get).err().expect("waits");
        active.pop();
        queue.close();
        for waiting in [granted, waits] {
            assert_eq!(waiting.now_or_never().expect("at once").err(), Some(QueueClosed));
        }
        drop((dropped, active));
        assert_eq!(queue.admit(CostKind::Get, 1).now_or_never().expect("at once").err(), Some(QueueClosed));
        assert_eq!(queue.free_tokens(), 0);
    }

    /// Counts how often it is woken.
    #[derive(Default)]
    struct WakeCount(AtomicUsize);

    impl Wake for WakeCount {
        fn wake(self: Arc<WakeCount>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn an_end_wakes_those_that_it_grants_alone_and_a_close_all() {
        let queue = queue();
        let mut active = fill(&queue);
        let count = Arc::new(WakeCount::default());
        let waker = Waker::from(Arc::clone(&count));
        let mut waiting: Vec<_> = (0..8).map(|_| queue.admit(CostKind::Get, 0).boxed_local()).collect();
        for one in &mut waiting {
            assert!(one.poll_unpin(&mut Context::from_waker(&waker)).is_pending());
        }
        active.pop();
        assert_eq!(count.0.load(Ordering::SeqCst), 1);
        queue.close();
        assert_eq!(count.0.load(Ordering::SeqCst), 8);
    }

    /// Keeps as many gets active as are admitted, while one after another ends, each so long after the one before. `between` runs after each.
    fn serve_gets(queue: &DeviceQueue, commands: usize, period: Nanos, mut between: impl FnMut()) {
        let (mut now, mut active) = (Nanos::from_secs(1), VecDeque::new());
        for _ in 0..commands {
            while let Some(Ok(admission)) = queue.admit(CostKind::Get, 0).now_or_never() {
                active.push_back((admission, now));
            }
            let (admission, began_at): (QueueAdmission<'_>, Nanos) = active.pop_front().expect("one runs");
            now = now + period;
            admission.end(EndedCommand { kind: CostKind::Get, bytes: 0, began_at, ended_at: now });
            between();
        }
    }

    #[test]
    fn a_trial_of_half_of_the_capacity_halves_the_windows_of_hosts() {
        let (queue, mut halved) = (queue(), 0);
        serve_gets(&queue, 2_000, Nanos::from_micros(5), || {
            assert!([queue.capacity(), queue.capacity() / 2].contains(&queue.host_capacity()));
            halved += u32::from(queue.host_capacity() < queue.capacity());
        });
        assert!((1..2_000).contains(&halved), "{halved}");
    }

    #[test]
    fn commands_that_end_no_sooner_side_by_side_lower_the_capacity() {
        let queue = queue();
        serve_gets(&queue, 20_000, Nanos::from_micros(100), || ());
        assert_eq!(queue.capacity(), COMMANDS_MIN * GET_TOKENS);
        assert_eq!(queue.free_tokens(), queue.capacity());
    }
}
