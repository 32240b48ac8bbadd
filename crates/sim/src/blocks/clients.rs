//! One host of clients of namespaces of blocks: sessions of the real initiator that read, write, zero, give up,
//! compare, verify and flush as the load says.
//!
//! In: the node's address, a stream of random numbers, and what the others on all hosts share. Out: calls and
//! their outcomes in the history of the disk, block by block, and the first thing that cannot be.
//!
//! Invariants: every command that was submitted is answered exactly once while its session lives; a
//! command whose session is dropped has an unknown outcome; while resting nothing new is asked, and each
//! session ends, in order or abruptly. A command of several blocks is one call on each: nothing is promised of
//! them together.

use super::scenario::{BlocksLoad, DiskPlan};
use crate::client_host::{Host, draw, settings_of};
use crate::faulty_disk::DiskFaults;
use crate::history::{Call, CallId, History, Outcome, Seen};
use crate::scenario::HostPlan;
use octokv_base::map::Map;
use octokv_base::{Lba, NamespaceId, Nanos, Random};
use octokv_client::{Answer, Command, Error, Lost, Rejected, Session, Settings, StoreMode, Value};
use octokv_engine::conformance::value_of;
use octokv_runtime::Handle;
use octokv_runtime::simulated::{HostId, VirtualSockets, VirtualWorld};
use octokv_wire::Status;
use octokv_wire::nvm::Range;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

/// What all hosts share.
pub struct Shared {
    /// What was asked and heard of each disk.
    pub histories: Vec<History>,
    /// The disks' plans.
    pub disks: Vec<DiskPlan>,
    /// As which namespace each disk is served now.
    pub served_as: Vec<Option<NamespaceId>>,
    /// What to ask.
    pub load: BlocksLoad,
    /// The most bytes of a command.
    pub bytes_max: u64,
    /// Commands submitted, and the most there may be.
    pub asked: u64,
    /// See above.
    pub limit: u64,
    /// Commands answered or lost.
    pub answered: u64,
    /// Commands that were answered in time, well, with what they asked for.
    pub served: u64,
    /// Commands refused because of what the operator did.
    pub turned_away: u64,
    /// The first thing that cannot be.
    pub failure: Option<String>,
    /// What is wrong with the disks.
    pub faults: DiskFaults,
    /// Whether clients are to leave.
    pub resting: bool,
    /// Whether an operator is at work.
    pub changes: bool,
    /// Whether every command must be answered before its host gives up.
    pub prompt: bool,
}

const RETRY: Nanos = Nanos::from_millis(3);
/// How long an orderly end may take before the session is dropped.
const CLOSE_LIMIT: Nanos = Nanos::from_secs(3);

/// What a session waits for: a call on each block.
struct Asked {
    disk: usize,
    what: What,
    ids: Vec<CallId>,
    reads_failed: u64,
}

enum What {
    Read {
        cell: usize,
    },
    /// Also write zeroes.
    Write {
        durable: bool,
    },
    GiveUp,
    Compare {
        operations: Vec<u64>,
    },
    Verify,
    Flush,
}

struct Seat {
    session: Option<Session<VirtualSockets>>,
    disk: usize,
    waiting: Map<u64, Asked>,
    /// When to connect, or to ask, again.
    again_at: Nanos,
    /// Whether and since when it is being closed in order.
    closing: Option<Nanos>,
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
        let seat = |_| Seat {
            session: None,
            disk: 0,
            waiting: Map::default(),
            again_at: Nanos::ZERO,
            closing: None,
        };
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
        if self.seats[index].session.is_none() {
            if resting || now < self.seats[index].again_at {
                return false;
            }
            return self.connect(index, now);
        }
        let mut busy = self.poll(index, now);
        let seat = &mut self.seats[index];
        let Some(session) = &seat.session else { return busy };
        let gone = self.shared.borrow().served_as[seat.disk] != Some(session.settings().namespace);
        if session.ended().is_some()
            || (resting && self.is_to_be_dropped(index, now))
            || (gone && self.random.one_in(20))
        {
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

    /// Connects to one of the namespaces that there are.
    fn connect(&mut self, index: usize, now: Nanos) -> bool {
        let served: Vec<(usize, NamespaceId)> = {
            let shared = self.shared.borrow();
            let served = shared.served_as.iter().enumerate();
            served.filter_map(|(disk, id)| id.map(|id| (disk, id))).collect()
        };
        let seat = &mut self.seats[index];
        if served.is_empty() {
            seat.again_at = now + RETRY;
            return false;
        }
        let (disk, namespace) = served[self.random.below(served.len() as u64) as usize];
        let settings = Settings { namespace, ..settings_of(self.host, &self.plan) };
        seat.disk = disk;
        seat.session = Some(Session::new(self.world.sockets(self.host), self.node, settings, now));
        true
    }

    fn poll(&mut self, index: usize, now: Nanos) -> bool {
        let seat = &mut self.seats[index];
        let Some(session) = &mut seat.session else { return false };
        let (shared, waiting) = (&self.shared, &mut seat.waiting);
        let busy = session.poll(now, |token, answer| {
            let mut shared = shared.borrow_mut();
            match waiting.remove(&token) {
                Some(asked) => shared.take(asked, answer),
                None => shared.fail(format!("token {token} was answered twice")),
            }
        });
        let mut shared = self.shared.borrow_mut();
        if shared.prompt && session.last_loss() == Some(Lost::TimedOut) {
            shared.fail("a command was never answered".to_owned());
        }
        busy
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
            && shared.is_broken_rule(&lost)
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
        let submit = |command: Command<'_>| session.submit(command, token);
        match shared.ask(&mut self.random, seat.disk, submit) {
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

/// Statuses of commands that the operator is the reason for, and that did nothing.
const TURNED_AWAY: [Status; 4] = [
    Status::INVALID_NAMESPACE,
    Status::ANA_INACCESSIBLE,
    Status::ANA_PERSISTENT_LOSS,
    Status::ANA_TRANSITION,
];

impl Shared {
    /// Notes the first thing that cannot be.
    pub fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    /// Whether a session ended as none does, whatever happens to hosts, links, disks and namespaces.
    fn is_broken_rule(&self, lost: &Lost) -> bool {
        match lost {
            Lost::Closed | Lost::TimedOut | Lost::Controller | Lost::Refused(_) | Lost::Setup(_) => false,
            Lost::NoNamespace => !self.changes,
            Lost::Fault(_) | Lost::Terminated { .. } | Lost::Authentication => true,
            Lost::CommandSet | Lost::BlockFormat | Lost::OtherNamespace => true,
        }
    }

    /// Draws a command and hands it to `submit`.
    fn ask(
        &mut self,
        random: &mut Random,
        disk: usize,
        submit: impl FnOnce(Command<'_>) -> Result<(), Rejected>,
    ) -> Result<Asked, String> {
        self.asked += 1;
        let DiskPlan { block_bytes, first, count, .. } = self.disks[disk];
        let BlocksLoad { blocks_max, mix, durable_one_in } = self.load;
        let most = blocks_max.min(count).min(self.bytes_max / u64::from(block_bytes)).max(1);
        let blocks = 1 + random.below(most);
        let cell = random.below(count - blocks + 1);
        let (lba, cells) = (Lba(first + cell), cell as usize..(cell + blocks) as usize);
        let range = Range { lba, blocks: blocks as u32 };
        let force_unit_access = random.one_in(durable_one_in);
        let history = &mut self.histories[disk];
        let mut begin = |call: Call| cells.clone().map(|cell| history.begin(cell, call)).collect();
        let (what, ids, submitted) = match draw(random, &mix) {
            0 => {
                let (what, ids) = (What::Read { cell: cells.start }, begin(Call::Get));
                (what, ids, submit(Command::Read { range, into: None }))
            }
            1 => {
                let (data, ids) = write(history, cells, block_bytes);
                let data = Value::Slice(&data);
                let what = What::Write { durable: force_unit_access };
                (what, ids, submit(Command::Write { lba, data, force_unit_access }))
            }
            2 => {
                let (what, ids) = (What::Write { durable: force_unit_access }, begin(Call::Delete));
                let deallocate = random.one_in(2);
                (what, ids, submit(Command::WriteZeroes { range, force_unit_access, deallocate }))
            }
            3 => (What::GiveUp, begin(Call::GiveUp), submit(Command::Deallocate { ranges: &[range] })),
            4 => {
                let ids = begin(Call::Get);
                let operations: Vec<u64> = cells.clone().map(|cell| history.last_write(cell)).collect();
                let data = contents(history, cells, &operations, block_bytes);
                let data = Value::Slice(&data);
                (What::Compare { operations }, ids, submit(Command::Compare { lba, data }))
            }
            5 => (What::Verify, Vec::new(), submit(Command::Verify { range })),
            _ => (What::Flush, vec![history.begin_other()], submit(Command::Flush)),
        };
        submitted.map_err(|why| format!("a command was not taken: {why:?}"))?;
        Ok(Asked { disk, what, ids, reads_failed: self.faults.reads_failed() })
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
        let history = &mut self.histories[asked.disk];
        let ids = asked.ids.iter();
        match (&asked.what, answer) {
            (What::Read { cell }, Answer::Blocks { data }) => {
                let block_bytes = self.disks[asked.disk].block_bytes as usize;
                if data.len() != asked.ids.len() * block_bytes {
                    return Err(format!("{} B came of {} blocks", data.len(), asked.ids.len()));
                }
                for (at, (&id, block)) in ids.zip(data.chunks(block_bytes)).enumerate() {
                    let seen = seen(history, cell + at, block)?;
                    history.end(id, Outcome::Saw(seen))?;
                }
                Ok(())
            }
            (What::Write { durable: true }, Answer::Written { .. }) => {
                ids.copied().try_for_each(|id| history.end_durable(id))
            }
            (What::Write { .. } | What::GiveUp, Answer::Written { .. }) => {
                ids.copied().try_for_each(|id| history.end(id, Outcome::Done))
            }
            (What::Compare { operations }, Answer::Verified) => {
                ids.zip(operations).try_for_each(|(&id, &operation)| {
                    let is_zero = operation == 0;
                    let seen = if is_zero { Seen::Nothing } else { Seen::Value(operation) };
                    history.end(id, Outcome::Saw(seen))
                })
            }
            (What::Compare { operations }, Answer::Different) if asked.ids.len() == 1 => {
                let is_zero = operations[0] == 0;
                let seen = if is_zero { Seen::Something } else { Seen::Other(operations[0]) };
                history.end(asked.ids[0], Outcome::Saw(seen))
            }
            // Which of the blocks it was is not told.
            (What::Compare { .. }, Answer::Different) => {
                ids.for_each(|&id| history.void(id));
                Ok(())
            }
            (What::Verify, Answer::Verified) => Ok(()),
            (What::Flush, Answer::Flushed) => {
                history.flushed(asked.ids[0]);
                Ok(())
            }
            (_, Answer::Again { .. }) => {
                self.void(asked);
                Ok(())
            }
            (_, answer) => Err(format!("an answer to something else: {answer:?}")),
        }
    }

    /// It did nothing, and told nothing.
    fn void(&mut self, asked: &Asked) {
        if !matches!(asked.what, What::Flush) {
            asked.ids.iter().for_each(|&id| self.histories[asked.disk].void(id));
        }
    }

    fn take_error(&mut self, asked: &Asked, error: &Error) -> Result<(), String> {
        let read_failed = self.faults.reads_failed() > asked.reads_failed;
        let reads = matches!(asked.what, What::Read { .. } | What::Compare { .. } | What::Verify);
        match error {
            Error::Disconnected(lost) if self.is_broken_rule(lost) => return Err(format!("{error}")),
            Error::Status(status) if TURNED_AWAY.iter().any(|one| status.is(*one)) && self.changes => {
                self.turned_away += 1;
                self.void(asked);
            }
            Error::Busy | Error::Disconnected(_) | Error::TimedOut | Error::Closed => self.void(asked),
            Error::OutcomeUnknown => {}
            Error::Unrecovered if reads && read_failed => self.void(asked),
            // A part of a block of the disk could not be read, and so not be patched.
            Error::Unrecovered if !reads && read_failed => {}
            Error::Status(status)
                if status.is(Status::MEDIA_WRITE_FAULT) && !reads && self.faults.failed() > 0 => {}
            other => return Err(format!("a command failed as none may: {other}")),
        }
        Ok(())
    }
}

/// Begins a write of new contents to each of these blocks.
fn write(history: &mut History, cells: std::ops::Range<usize>, block_bytes: u32) -> (Vec<u8>, Vec<CallId>) {
    let (mut data, mut ids) = (Vec::new(), Vec::new());
    for cell in cells {
        let operation = history.next_operation(block_bytes);
        data.extend(value_of(&history.keys()[cell], operation, block_bytes as usize));
        let call = Call::Put { operation, bytes: block_bytes, mode: StoreMode::Upsert };
        ids.push(history.begin(cell, call));
    }
    (data, ids)
}

/// What these operations wrote to these blocks; zeros for operation 0.
fn contents(
    history: &History,
    cells: std::ops::Range<usize>,
    operations: &[u64],
    block_bytes: u32,
) -> Vec<u8> {
    let block = |(cell, &operation): (usize, &u64)| match operation {
        0 => vec![0; block_bytes as usize],
        _ => value_of(&history.keys()[cell], operation, block_bytes as usize),
    };
    cells.zip(operations).flat_map(block).collect()
}

/// What a block holds.
pub fn seen(history: &History, cell: usize, block: &[u8]) -> Result<Seen, String> {
    if block.iter().all(|&byte| byte == 0) {
        return Ok(Seen::Nothing);
    }
    history.identify(cell, block, block.len() as u32)
}
