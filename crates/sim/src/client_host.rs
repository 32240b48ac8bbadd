//! One host of clients: sessions of the real initiator that store, read and delete as the load says.
//!
//! In: the node's address, a stream of random numbers, and what the others on all hosts share. Out: calls
//! and their outcomes in the history, and the first thing that cannot be.
//!
//! Invariants: every command that was submitted is answered exactly once while its session lives; a
//! command whose session is dropped has an unknown outcome; while resting nothing new is asked, and each
//! session ends, in order or abruptly.

use crate::faulty_disk::DiskFaults;
use crate::history::{Call, CallId, History, Outcome, Seen};
use crate::scenario::{HostPlan, Load};
use octokv_base::map::Map;
use octokv_base::{Key, Nanos, Random};
use octokv_client::{Answer, Command, Error, Lost, Reconnect, Session, Settings, StoreMode, Value};
use octokv_engine::conformance::value_of;
use octokv_runtime::Handle;
use octokv_runtime::simulated::{HostId, VirtualSockets, VirtualWorld};
use octokv_wire::kv::UncheckedList;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

/// What all hosts share.
pub struct Shared {
    /// What was asked and heard.
    pub history: History,
    /// What to ask.
    pub load: Load,
    /// Commands submitted, and the most there may be.
    pub asked: u64,
    /// See above.
    pub limit: u64,
    /// Commands answered or lost.
    pub answered: u64,
    /// Commands that were answered in time, well, with what they asked for.
    pub served: u64,
    /// The first thing that cannot be.
    pub failure: Option<String>,
    /// What is wrong with the disk.
    pub faults: DiskFaults,
    /// Whether clients are to leave.
    pub resting: bool,
}

/// The longest list that is surely whole, in bytes, and a short one.
const LIST_BYTES: [u32; 2] = [64 << 10, 300];
const RETRY: Nanos = Nanos::from_millis(3);
/// How long an orderly end may take before the session is dropped.
const CLOSE_LIMIT: Nanos = Nanos::from_secs(3);

/// What a session waits for.
struct Asked {
    what: What,
    id: CallId,
    reads_failed: u64,
}

enum What {
    Put,
    Delete,
    Get { key: usize },
    Exist,
    List { whole: bool },
    Flush,
}

struct Seat {
    session: Option<Session<VirtualSockets>>,
    waiting: Map<u64, Asked>,
    /// When to connect, or to ask, again.
    again_at: Nanos,
    /// Whether and since when it is being closed in order.
    closing: Option<Nanos>,
}

/// One host of clients, as others see it.
pub struct Host {
    /// The machine.
    pub host: HostId,
    /// What its clients are like.
    pub plan: HostPlan,
    /// How many sessions there are, for whoever waits for rest.
    pub live: Rc<Cell<usize>>,
}

/// The clients of one host, as a reactor runs them.
pub struct Clients {
    world: VirtualWorld,
    host: HostId,
    node: SocketAddr,
    plan: HostPlan,
    random: Random,
    handle: Handle,
    shared: Rc<RefCell<Shared>>,
    seats: Vec<Seat>,
    next_token: u64,
    live: Rc<Cell<usize>>,
}

impl Clients {
    /// The clients of `host`, of the node at `node`.
    pub fn new(
        world: &VirtualWorld,
        host: &Host,
        node: SocketAddr,
        random: Random,
        handle: Handle,
        shared: &Rc<RefCell<Shared>>,
    ) -> Clients {
        let Host { host, plan, live } = host;
        let seat = |_| Seat { session: None, waiting: Map::default(), again_at: Nanos::ZERO, closing: None };
        live.set(0);
        Clients {
            world: world.clone(),
            host: *host,
            node,
            plan: *plan,
            random,
            handle,
            shared: Rc::clone(shared),
            seats: (0..plan.sessions).map(seat).collect(),
            next_token: 0,
            live: Rc::clone(live),
        }
    }

    /// Does what there is to do now. False when there was nothing.
    pub fn turn(&mut self, now: Nanos) -> bool {
        self.handle.begin_turn(now);
        let (mut busy, mut wake) = (false, Nanos::NEVER);
        for index in 0..self.seats.len() {
            busy |= self.seat_turn(index, now);
            let resting = self.shared.borrow().resting;
            let seat = &self.seats[index];
            wake = wake.min(match &seat.session {
                Some(session) => {
                    let ask_at = if seat.again_at > now { seat.again_at } else { Nanos::NEVER };
                    let closed_at = seat.closing.map_or(Nanos::NEVER, |since| since + CLOSE_LIMIT);
                    session.next_deadline().min(ask_at).min(closed_at)
                }
                None if resting => Nanos::NEVER,
                None => seat.again_at.max(now + Nanos(1)),
            });
        }
        self.live.set(self.seats.iter().filter(|seat| seat.session.is_some()).count());
        self.handle.want_turn_at(wake);
        busy
    }

    fn seat_turn(&mut self, index: usize, now: Nanos) -> bool {
        let resting = self.shared.borrow().resting;
        let seat = &mut self.seats[index];
        if seat.session.is_none() {
            if resting || now < seat.again_at {
                return false;
            }
            let settings = settings_of(self.host, &self.plan);
            let sockets = self.world.sockets(self.host);
            let seat = &mut self.seats[index];
            seat.session = Some(Session::new(sockets, self.node, settings, now));
            return true;
        }
        let mut busy = self.poll(index, now);
        let seat = &mut self.seats[index];
        let ended = seat.session.as_ref().is_none_or(|session| session.ended().is_some());
        if ended || (resting && self.is_to_be_dropped(index, now)) {
            self.drop_session(index, now);
            return true;
        }
        if resting {
            return busy;
        }
        while self.may_ask(index, now) {
            self.ask(index, now);
            busy = true;
        }
        busy
    }

    fn poll(&mut self, index: usize, now: Nanos) -> bool {
        let seat = &mut self.seats[index];
        let Some(session) = &mut seat.session else { return false };
        let (shared, waiting) = (&self.shared, &mut seat.waiting);
        session.poll(now, |token, answer| {
            let mut shared = shared.borrow_mut();
            match waiting.remove(&token) {
                Some(asked) => shared.take(asked, answer),
                None => shared.fail(format!("token {token} was answered twice")),
            }
        })
    }

    /// While resting: drops some sessions with what they wait for, closes others when that has come.
    fn is_to_be_dropped(&mut self, index: usize, now: Nanos) -> bool {
        let seat = &mut self.seats[index];
        if let Some(since) = seat.closing {
            return now >= since + CLOSE_LIMIT;
        }
        let Some(session) = &mut seat.session else { return false };
        if !session.is_live() {
            return true;
        }
        if !seat.waiting.is_empty() && !self.random.one_in(2_000) {
            return false;
        }
        if self.random.one_in(2) {
            return true;
        }
        let (shared, waiting) = (&self.shared, &mut seat.waiting);
        session.close(now, |token, answer| {
            if let Some(asked) = waiting.remove(&token) {
                shared.borrow_mut().take(asked, answer);
            }
        });
        seat.closing = Some(now);
        false
    }

    fn drop_session(&mut self, index: usize, now: Nanos) {
        let seat = &mut self.seats[index];
        let Some(session) = seat.session.take() else { return };
        let mut shared = self.shared.borrow_mut();
        if let Some(Error::Connect(_, lost)) = session.ended()
            && is_broken_rule(&lost)
        {
            shared.fail(format!("a session ended: {lost}"));
        }
        shared.answered += seat.waiting.len() as u64;
        drop((shared, session));
        seat.waiting.clear();
        (seat.again_at, seat.closing) = (now + RETRY, None);
    }

    fn may_ask(&self, index: usize, now: Nanos) -> bool {
        let seat = &self.seats[index];
        let shared = self.shared.borrow();
        let room = seat.session.as_ref().is_some_and(|session| session.room() > 0);
        room && now >= seat.again_at
            && seat.waiting.len() < self.plan.concurrency
            && shared.asked < shared.limit
            && shared.failure.is_none()
    }

    fn ask(&mut self, index: usize, now: Nanos) {
        let seat = &mut self.seats[index];
        let Some(session) = &mut seat.session else { return };
        let mut shared = self.shared.borrow_mut();
        let token = self.next_token;
        self.next_token += 1;
        let submitted = shared.ask(&mut self.random, |command| session.submit(command, token));
        match submitted {
            Ok(asked) => drop(seat.waiting.insert(token, asked)),
            Err(why) => shared.fail(why),
        }
        if self.plan.think > Nanos::ZERO {
            seat.again_at = now + Nanos(self.random.below(self.plan.think.0));
        }
    }
}

impl Drop for Clients {
    /// Its host died: what its sessions wait for is never answered.
    fn drop(&mut self) {
        let lost: usize = self.seats.iter().map(|seat| seat.waiting.len()).sum();
        self.shared.borrow_mut().answered += lost as u64;
    }
}

/// What the sessions of a host are told.
pub(crate) fn settings_of(host: HostId, plan: &HostPlan) -> Settings {
    Settings {
        host: format!("nqn.2026-11.io.octokv:client-{}", host.0),
        host_id: [host.0 as u8; 16],
        queues: plan.queues,
        depth: plan.depth,
        header_digest: plan.header_digest,
        data_digest: plan.data_digest,
        command_timeout: plan.command_timeout,
        connect_timeout: Nanos::from_secs(2),
        keep_alive: plan.keep_alive,
        reconnect: Reconnect::BackOff {
            first: Nanos::from_millis(1),
            longest: Nanos::from_millis(50),
            give_up: Nanos::from_secs(5),
        },
        receive_bytes: 64 << 10,
        pool_bytes: 64 << 20,
        ..Settings::default()
    }
}

/// Whether a session ended as none does, whatever happens to hosts, links and disks.
fn is_broken_rule(lost: &Lost) -> bool {
    match lost {
        Lost::Closed | Lost::TimedOut | Lost::Controller | Lost::Refused(_) | Lost::Setup(_) => false,
        Lost::Fault(_)
        | Lost::Terminated { .. }
        | Lost::Authentication
        | Lost::NoNamespace
        | Lost::CommandSet
        | Lost::BlockFormat
        | Lost::OtherNamespace => true,
    }
}

impl Shared {
    /// Notes the first thing that cannot be.
    pub fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    /// Draws a command and hands it to `submit`.
    fn ask(
        &mut self,
        random: &mut Random,
        submit: impl FnOnce(Command<'_>) -> Result<(), octokv_client::Rejected>,
    ) -> Result<Asked, String> {
        self.asked += 1;
        let kind = draw(random, &self.load.mix);
        let index = random.below(self.load.keys) as usize;
        let key = self.history.keys()[index].clone();
        let reads_failed = self.faults.reads_failed();
        let asked = |what, id| Asked { what, id, reads_failed };
        let (asked, submitted) = match kind {
            0..3 => {
                let mode = [StoreMode::Upsert, StoreMode::AddOnly, StoreMode::UpdateOnly][kind];
                let bytes = draw_length(random, self.load.value_bytes);
                let operation = self.history.next_operation(bytes as u32);
                let value = value_of(&key, operation, bytes);
                let id = self.history.begin(index, Call::Put { operation, bytes: bytes as u32, mode });
                let command = Command::Store { key, value: Value::Slice(&value), mode };
                (asked(What::Put, id), submit(command))
            }
            3 | 4 => {
                let limit_bytes = if kind == 3 { u32::MAX } else { 8 + random.below(3_000) as u32 };
                let id = self.history.begin(index, Call::Get);
                (asked(What::Get { key: index }, id), submit(Command::Retrieve { key, limit_bytes }))
            }
            5 => {
                let id = self.history.begin(index, Call::Delete);
                (asked(What::Delete, id), submit(Command::Delete { key }))
            }
            6 => {
                let id = self.history.begin(index, Call::Exist);
                (asked(What::Exist, id), submit(Command::Exist { key }))
            }
            7 => {
                let whole = random.one_in(2);
                let id = self.history.begin_other();
                let start = if whole { Key::new(&[]).ok_or("no empty key")? } else { key };
                let limit_bytes = LIST_BYTES[usize::from(!whole)];
                (asked(What::List { whole }, id), submit(Command::List { start, limit_bytes }))
            }
            _ => {
                let id = self.history.begin_other();
                (asked(What::Flush, id), submit(Command::Flush))
            }
        };
        submitted.map_err(|why| format!("a command was not taken: {why:?}"))?;
        Ok(asked)
    }

    /// Takes an answer in.
    fn take(&mut self, asked: Asked, answer: Result<Answer, Error>) {
        self.answered += 1;
        self.served += u64::from(answer.is_ok());
        let checked = match answer {
            Ok(answer) => self.take_answer(&asked, answer),
            Err(error) => self.take_error(&asked, &error),
        };
        if let Err(what) = checked {
            self.fail(what);
        }
    }

    fn take_answer(&mut self, asked: &Asked, answer: Answer) -> Result<(), String> {
        let outcome = match (&asked.what, answer) {
            (What::Put, Answer::Stored) | (What::Delete, Answer::Deleted) => Outcome::Done,
            (What::Put, Answer::NotFound | Answer::AlreadyExists) => Outcome::Refused,
            (What::Delete, Answer::NotFound) => Outcome::Refused,
            (What::Get { .. } | What::Exist, Answer::NotFound) => Outcome::Saw(Seen::Nothing),
            (What::Get { key }, Answer::Value { data, full_bytes }) => {
                Outcome::Saw(self.history.identify(*key, &data, full_bytes)?)
            }
            (What::Exist, Answer::Exists { value_bytes }) => {
                Outcome::Saw(value_bytes.map_or(Seen::Something, Seen::Length))
            }
            (What::List { whole }, Answer::Keys { list }) => return self.take_list(asked.id, *whole, &list),
            (What::Flush, Answer::Flushed) => {
                self.history.flushed(asked.id);
                return Ok(());
            }
            (_, answer) => return Err(format!("an answer to something else: {answer:?}")),
        };
        self.history.end(asked.id, outcome)
    }

    fn take_error(&mut self, asked: &Asked, error: &Error) -> Result<(), String> {
        let on_key = !matches!(asked.what, What::List { .. } | What::Flush);
        match error {
            Error::Disconnected(lost) if is_broken_rule(lost) => return Err(format!("{error}")),
            Error::Busy
            | Error::CapacityExceeded
            | Error::Disconnected(_)
            | Error::TimedOut
            | Error::Closed => {
                if on_key {
                    self.history.void(asked.id);
                }
            }
            Error::OutcomeUnknown => {}
            Error::Unrecovered => return self.take_unrecovered(asked),
            other => return Err(format!("a command failed as none may: {other}")),
        }
        Ok(())
    }

    /// A write may have happened all the same; a read must have met damage, or a failing device.
    fn take_unrecovered(&mut self, asked: &Asked) -> Result<(), String> {
        let read_failed = self.faults.reads_failed() > asked.reads_failed;
        match asked.what {
            What::Put | What::Delete | What::Flush if self.faults.failed() > 0 => Ok(()),
            What::Put | What::Delete | What::Flush => Err("a write failed on a healthy device".to_owned()),
            What::List { .. } if read_failed => Ok(()),
            What::List { .. } => Err("a listing failed on a healthy device".to_owned()),
            What::Get { .. } | What::Exist if read_failed => {
                self.history.void(asked.id);
                Ok(())
            }
            What::Get { .. } | What::Exist => self.history.end(asked.id, Outcome::Saw(Seen::Damaged)),
        }
    }

    fn take_list(&mut self, id: CallId, whole: bool, list: &[u8]) -> Result<(), String> {
        let list = UncheckedList(list).check().map_err(|short| format!("a list is short: {short:?}"))?;
        let mut listed = vec![false; self.history.keys().len()];
        for key in list.keys() {
            let Some(index) = self.history.index_of(key) else {
                return Err(format!("a list names {key:?}, which nobody stored"));
            };
            if std::mem::replace(&mut listed[index], true) {
                return Err(format!("a list names {key:?} twice"));
            }
        }
        for (index, &is_listed) in listed.iter().enumerate() {
            if is_listed || whole {
                let seen = if is_listed { Seen::Something } else { Seen::Nothing };
                self.history.listed(id, index, seen);
            }
        }
        Ok(())
    }
}

/// Which of these shares, by lot.
pub(crate) fn draw(random: &mut Random, shares: &[u64]) -> usize {
    let mut left = random.below(shares.iter().sum());
    for (index, &share) in shares.iter().enumerate() {
        if left < share {
            return index;
        }
        left -= share;
    }
    0
}

/// A length of at most so much, sometimes none.
pub(crate) fn draw_length(random: &mut Random, most: u64) -> usize {
    if random.one_in(25) {
        return 0;
    }
    octokv_engine::conformance::some_length(random, most)
}
