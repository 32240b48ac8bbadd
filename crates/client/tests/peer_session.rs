//! Outgoing sessions of a reactor against the target in memory: commands as futures, their bounds, lost connections,
//! reconnection, close.

use crate::support::{MemorySockets, address, pattern, target};
use octokv_base::{Key, Nanos};
use octokv_client::{
    ClientConfig, Command, ConnectPeerError, ConnectionError, Error, PEERS_MAX, PeerConfig, PeerSession,
    PollGroup, Reconnect, Response, StoreMode, Value,
};
use octokv_runtime::{CoreWaker, Sockets, TaskSlab};
use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Wake, Waker};

type Task = Pin<Box<dyn Future<Output = ()>>>;
type Results = Rc<RefCell<Vec<(u32, Result<Response, Error>)>>>;

/// A reactor with outgoing sessions, and a node in memory.
struct Reactor {
    sockets: MemorySockets,
    group: PollGroup,
    tasks: TaskSlab<Task>,
    core_waker: Arc<CoreWaker>,
    results: Results,
}

fn key(number: u32) -> Key {
    Key::new(&number.to_le_bytes()).unwrap()
}

fn config(client: ClientConfig) -> PeerConfig {
    let reconnect = Reconnect::BackOff {
        first_delay: Nanos::from_millis(1),
        delay_max: Nanos::from_millis(8),
        give_up_after: Nanos::NEVER,
    };
    let client = ClientConfig { reconnect, retry_first_connection: true, jitter_seed: Some(1), ..client };
    PeerConfig { client, buffer_bytes_max: 8 << 20 }
}

impl Reactor {
    fn new() -> Reactor {
        let core_waker = CoreWaker::without_eventfd();
        Reactor {
            sockets: MemorySockets::new(target(|_| {})),
            group: PollGroup::new(Arc::clone(&core_waker)),
            tasks: TaskSlab::new(256, Arc::clone(&core_waker)),
            core_waker,
            results: Results::default(),
        }
    }

    fn connect(&self, config: PeerConfig) -> PeerSession {
        self.group.connect(address(), config, self.now()).expect("within the bound")
    }

    /// A live session.
    fn live(&mut self, config: PeerConfig) -> PeerSession {
        let peer = self.connect(config);
        self.run_until(|_| peer.is_live());
        peer
    }

    fn now(&self) -> Nanos {
        self.sockets.0.borrow().now
    }

    /// One iteration after `span`. Returns whether it did anything.
    fn step(&mut self, span: Nanos) -> bool {
        let now = self.now() + span;
        self.sockets.0.borrow_mut().now = now;
        self.core_waker.begin_iteration();
        let mut ready = Vec::new();
        self.sockets.ready(&mut ready);
        let progress = self.group.poll(&mut self.sockets, &ready, now);
        let polled = self.tasks.poll_ready() > 0;
        self.sockets.pump();
        progress | polled
    }

    fn run_until(&mut self, mut until: impl FnMut(&Reactor) -> bool) {
        for _ in 0..200_000 {
            if until(self) {
                return;
            }
            self.step(Nanos::from_micros(10));
        }
        panic!("no progress: {:?}", self.results.borrow());
    }

    /// Runs until an iteration does nothing.
    fn run_until_idle(&mut self) {
        let idle = (0..1_000).any(|_| !self.step(Nanos(1)));
        assert!(idle, "the reactor always has work");
    }

    /// Spawns a task that stores a value of `bytes` bytes.
    fn store(&mut self, peer: &PeerSession, number: u32, bytes: usize) {
        let (peer, results) = (peer.clone(), Rc::clone(&self.results));
        self.spawn(async move {
            let value = Value::Shared(pattern(bytes).into());
            let command = Command::Store { key: key(number), value, mode: StoreMode::Upsert };
            let result = peer.execute(command).await;
            results.borrow_mut().push((number, result));
        });
    }

    /// Spawns a task that reads a value.
    fn retrieve(&mut self, peer: &PeerSession, number: u32, limit_bytes: u32) {
        let (peer, results) = (peer.clone(), Rc::clone(&self.results));
        self.spawn(async move {
            let result = peer.execute(Command::Retrieve { key: key(number), limit_bytes }).await;
            results.borrow_mut().push((number, result));
        });
    }

    fn spawn(&mut self, task: impl Future<Output = ()> + 'static) {
        let spawned = self.tasks.spawn(Box::pin(task) as Task);
        assert!(spawned.is_ok(), "the slab has room");
    }

    fn completed(&self) -> usize {
        self.results.borrow().len()
    }
}

#[test]
fn tasks_await_the_responses_of_their_commands() {
    let mut reactor = Reactor::new();
    let peer = reactor.live(config(ClientConfig { io_queues: 2, queue_depth: 4, ..ClientConfig::default() }));
    for number in 0..100 {
        reactor.store(&peer, number, 100 * number as usize);
    }
    assert_eq!(peer.in_flight(), 8, "the queues are full, the other commands wait");
    reactor.run_until(|reactor| reactor.completed() == 100);
    let order: Vec<u32> = reactor.results.borrow().iter().map(|(number, _)| *number).collect();
    assert_eq!(order, (0..100).collect::<Vec<u32>>(), "waiting commands are sent in their order");
    assert!(reactor.results.borrow().iter().all(|(_, result)| matches!(result, Ok(Response::Stored))));
    reactor.results.borrow_mut().clear();
    for number in 0..101 {
        reactor.retrieve(&peer, number, u32::MAX);
    }
    reactor.run_until(|reactor| reactor.completed() == 101);
    for (number, result) in reactor.results.borrow_mut().drain(..) {
        match result {
            Ok(Response::Value { data, .. }) => assert!(*data == pattern(100 * number as usize), "{number}"),
            other => assert!(number == 100 && matches!(other, Ok(Response::NotFound)), "{other:?}"),
        }
    }
    assert_eq!(peer.in_flight(), 0);
}

#[test]
fn an_idle_group_and_one_that_waits_for_responses_do_no_work() {
    let mut reactor = Reactor::new();
    let peer = reactor.live(config(ClientConfig { queue_depth: 1, ..ClientConfig::default() }));
    reactor.run_until_idle();
    reactor.sockets.0.borrow_mut().hold_requests = true;
    for number in 0..3 {
        reactor.store(&peer, number, 10);
    }
    reactor.run_until_idle();
    for _ in 0..20 {
        assert!(!reactor.step(Nanos(1)), "a waiting command is woken only when there is room for it");
    }
    assert!(reactor.group.next_deadline() < Nanos::NEVER);
}

#[test]
fn a_command_after_a_long_sleep_has_its_whole_timeout() {
    let mut reactor = Reactor::new();
    let client = ClientConfig { command_timeout: Nanos::from_millis(5), ..ClientConfig::default() };
    let peer = reactor.live(config(client));
    // The core sleeps for longer than a command may take; then a task submits one before the sessions are polled.
    let now = reactor.now() + Nanos::from_millis(100);
    reactor.sockets.0.borrow_mut().now = now;
    reactor.group.begin_iteration(now);
    reactor.store(&peer, 1, 10);
    reactor.run_until(|reactor| reactor.completed() == 1);
    assert!(matches!(reactor.results.borrow()[..], [(1, Ok(Response::Stored))]), "{:?}", reactor.results);
    assert_eq!(peer.connection_epoch(), 1, "the connection is the same");
}

#[test]
fn bytes_in_flight_are_bounded_and_a_larger_command_is_sent_alone() {
    let mut reactor = Reactor::new();
    let peer = reactor.live(PeerConfig { buffer_bytes_max: 10_000, ..config(ClientConfig::default()) });
    for (number, bytes) in [(0, 4_000), (1, 5_000), (2, 50_000), (3, 10)] {
        reactor.store(&peer, number, bytes);
    }
    assert_eq!(peer.in_flight(), 2, "the third exceeds the bound, the fourth waits behind it");
    reactor.run_until(|reactor| reactor.completed() == 2);
    reactor.step(Nanos(1));
    assert_eq!(peer.in_flight(), 1, "the third is alone");
    reactor.run_until(|reactor| reactor.completed() == 4);
}

#[test]
fn a_lost_connection_ends_every_command_and_is_reestablished() {
    let mut reactor = Reactor::new();
    let peer = reactor.live(config(ClientConfig { queue_depth: 2, ..ClientConfig::default() }));
    reactor.sockets.0.borrow_mut().hold_requests = true;
    reactor.store(&peer, 0, 10);
    reactor.retrieve(&peer, 1, 100);
    reactor.store(&peer, 2, 10);
    reactor.step(Nanos(1));
    reactor.sockets.cut();
    reactor.run_until(|reactor| reactor.completed() == 3);
    let lost = Error::Disconnected(ConnectionError::Closed);
    let mut errors: Vec<_> = reactor
        .results
        .borrow_mut()
        .drain(..)
        .map(|(number, result)| (number, result.unwrap_err()))
        .collect();
    errors.sort_by_key(|(number, _)| *number);
    assert_eq!(errors, [(0, Error::OutcomeUnknown), (1, lost.clone()), (2, lost.clone())]);
    // Without a connection a command fails at once.
    assert!(!peer.is_live() && peer.last_error() == Some(ConnectionError::Closed));
    reactor.store(&peer, 3, 10);
    assert_eq!(reactor.results.borrow_mut().pop().map(|(_, result)| result.unwrap_err()), Some(lost));
    reactor.sockets.0.borrow_mut().hold_requests = false;
    reactor.run_until(|_| peer.is_live());
    assert_eq!(peer.connection_epoch(), 2);
    reactor.store(&peer, 4, 10);
    reactor.run_until(|reactor| reactor.completed() == 1);
    assert!(matches!(reactor.results.borrow()[..], [(4, Ok(Response::Stored))]));
}

#[test]
fn a_peer_that_starts_later_is_connected_with_back_off() {
    let mut reactor = Reactor::new();
    reactor.sockets.0.borrow_mut().refuse = true;
    let peer = reactor.connect(config(ClientConfig::default()));
    reactor.store(&peer, 0, 10);
    assert_eq!(
        reactor.results.borrow_mut().pop().map(|(_, result)| result.unwrap_err()),
        Some(Error::NotConnected)
    );
    let is_live = Rc::new(RefCell::new(None));
    let (waiting, result) = (peer.clone(), Rc::clone(&is_live));
    reactor.spawn(async move { *result.borrow_mut() = Some(waiting.until_live().await) });
    for _ in 0..100 {
        reactor.step(Nanos::from_millis(1));
    }
    let attempts = reactor.sockets.0.borrow().connect_count;
    assert!(
        (16..=27).contains(&attempts),
        "1 + 2 + 4 + 8 + 8 … ms, each halved at most: more than 15, but {attempts} attempts"
    );
    assert_eq!((is_live.borrow().clone(), peer.last_error()), (None, Some(ConnectionError::Closed)));
    reactor.sockets.0.borrow_mut().refuse = false;
    reactor.run_until(|_| is_live.borrow().is_some());
    assert_eq!(*is_live.borrow(), Some(Ok(())));
}

#[test]
fn a_dropped_wait_for_a_session_leaves_nothing_behind() {
    struct CountedWaker;
    impl Wake for CountedWaker {
        fn wake(self: Arc<Self>) {}
    }
    let mut reactor = Reactor::new();
    reactor.sockets.0.borrow_mut().refuse = true;
    let peer = reactor.connect(config(ClientConfig::default()));
    let wakers: Vec<Arc<CountedWaker>> = (0..10).map(|_| Arc::new(CountedWaker)).collect();
    for counted in &wakers {
        let waker = Waker::from(Arc::clone(counted));
        let mut context = Context::from_waker(&waker);
        let mut wait = Box::pin(peer.until_live());
        for _ in 0..3 {
            assert!(wait.as_mut().poll(&mut context).is_pending());
            reactor.step(Nanos::from_millis(1));
        }
        assert_eq!(Arc::strong_count(counted), 3, "here, in the context and once in the session");
    }
    assert!(wakers.iter().all(|counted| Arc::strong_count(counted) == 1));
}

#[test]
fn a_peer_without_the_namespace_ends_the_session_with_the_cause() {
    let mut reactor = Reactor::new();
    let client = ClientConfig { namespace: octokv_base::NamespaceId(9), ..ClientConfig::default() };
    let peer = reactor.connect(config(client));
    let ended = Rc::new(RefCell::new(None));
    let (waiting, result) = (peer.clone(), Rc::clone(&ended));
    reactor.spawn(async move { *result.borrow_mut() = Some(waiting.until_live().await) });
    reactor.run_until(|_| ended.borrow().is_some());
    let cause = Error::Connect(address(), ConnectionError::NamespaceNotFound);
    assert_eq!(*ended.borrow(), Some(Err(cause.clone())));
    assert_eq!((peer.ended(), reactor.group.len()), (Some(cause.clone()), 0));
    drop(peer.clone());
    reactor.store(&peer, 0, 10);
    assert_eq!(reactor.results.borrow_mut().pop().map(|(_, result)| result.unwrap_err()), Some(cause));
}

#[test]
fn a_silent_peer_times_out_while_connecting() {
    let mut reactor = Reactor::new();
    reactor.sockets.0.borrow_mut().sends_blocked = true;
    let peer = reactor.connect(config(ClientConfig::default()));
    reactor.step(Nanos(1));
    assert_eq!(reactor.group.next_deadline(), Nanos::from_secs(10), "the connect timeout");
    reactor.step(Nanos::from_secs(10));
    assert_eq!((peer.last_error(), peer.ended()), (Some(ConnectionError::TimedOut), None));
    reactor.sockets.0.borrow_mut().sends_blocked = false;
    reactor.run_until(|_| peer.is_live());
}

#[test]
fn a_dropped_future_keeps_its_slot_until_the_response() {
    let mut reactor = Reactor::new();
    let peer = reactor.live(config(ClientConfig { queue_depth: 2, ..ClientConfig::default() }));
    reactor.sockets.0.borrow_mut().hold_requests = true;
    {
        let command = Command::Exist { key: key(0) };
        let mut future = Box::pin(peer.execute(command));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(future.as_mut().poll(&mut context).is_pending());
    }
    assert_eq!(peer.in_flight(), 1);
    reactor.store(&peer, 1, 10);
    reactor.store(&peer, 2, 10);
    assert_eq!(peer.in_flight(), 2);
    reactor.step(Nanos(1));
    reactor.sockets.cut();
    reactor.run_until(|reactor| reactor.completed() == 2);
    assert_eq!(peer.in_flight(), 0);
}

#[test]
fn the_last_handle_or_a_close_ends_a_session_after_its_commands() {
    for close_by_drop in [false, true] {
        let mut reactor = Reactor::new();
        let peer = reactor.live(config(ClientConfig { queue_depth: 1, ..ClientConfig::default() }));
        assert_eq!(reactor.sockets.0.borrow().target.controllers().len(), 1);
        reactor.store(&peer, 0, 10);
        if close_by_drop {
            drop(peer);
        } else {
            peer.close();
            reactor.store(&peer, 1, 10);
            assert!(matches!(reactor.results.borrow_mut().pop(), Some((1, Err(Error::Closed)))));
        }
        let begun = reactor.now();
        reactor.run_until(|reactor| reactor.group.is_empty());
        assert!(matches!(reactor.results.borrow()[..], [(0, Ok(Response::Stored))]));
        assert!(reactor.now() - begun < Nanos::from_millis(100), "nothing waits for a timeout");
        reactor.step(Nanos(1));
        assert_eq!(reactor.sockets.0.borrow().target.controllers().len(), 0);
    }
}

#[test]
fn peers_are_bounded_and_a_closing_group_accepts_none() {
    let mut reactor = Reactor::new();
    let peers: Vec<_> = (0..PEERS_MAX).map(|_| reactor.connect(config(ClientConfig::default()))).collect();
    let connect = |reactor: &Reactor| {
        reactor.group.connect(address(), config(ClientConfig::default()), reactor.now()).err()
    };
    assert_eq!(connect(&reactor), Some(ConnectPeerError::TooManyPeers));
    peers[0].close();
    reactor.run_until(|reactor| reactor.group.len() < PEERS_MAX);
    assert_eq!(connect(&reactor), None);
    reactor.group.close();
    reactor.run_until(|reactor| reactor.group.is_empty());
    assert_eq!(connect(&reactor), Some(ConnectPeerError::Closing));
}
