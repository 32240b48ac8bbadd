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

use super::scenario::{BlockLoad, DiskPlan};
use crate::client_host::{ClientHost, client_config, draw_weighted};
use crate::faulty_disk::DiskFaults;
use crate::history::{Call, CallId, CallResult, History, Observed};
use crate::scenario::ClientHostPlan;
use octokv_base::map::FxHashMap;
use octokv_base::{Lba, NamespaceId, Nanos, Prng};
use octokv_client::{
    ClientConfig, Command, ConnectionError, Error, Response, Session, StoreMode, SubmitError, Value,
};
use octokv_engine::conformance::value_of;
use octokv_runtime::ReactorHandle;
use octokv_runtime::simulated::{SimEnv, SimHostId, SimSockets};
use octokv_wire::Status;
use octokv_wire::nvm::LbaRange;
use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;

/// What all hosts share.
pub struct BlockRunState {
    /// What was asked and heard of each disk.
    pub histories: Vec<History>,
    /// The disks' plans.
    pub disks: Vec<DiskPlan>,
    /// As which namespace each disk is served now.
    pub served_as: Vec<Option<NamespaceId>>,
    /// What to ask.
    pub load: BlockLoad,
    /// The most bytes of a command.
    pub bytes_max: u64,
    /// Commands submitted, and the most there may be.
    pub submitted: u64,
    /// See above.
    pub submit_limit: u64,
    /// Commands answered or lost.
    pub completed: u64,
    /// Commands that were answered in time, well, with what they asked for.
    pub succeeded: u64,
    /// Commands refused because of what the operator did.
    pub rejected_commands: u64,
    /// The first thing that cannot be.
    pub violation: Option<String>,
    /// What is wrong with the disks.
    pub faults: DiskFaults,
    /// Whether clients are to leave.
    pub quiescing: bool,
    /// Whether an operator is at work.
    pub has_operator: bool,
    /// Whether every command must be answered before its host gives up.
    pub must_not_time_out: bool,
}

const RETRY_DELAY: Nanos = Nanos::from_millis(3);
/// How long an orderly end may take before the session is dropped.
const CLOSE_TIMEOUT: Nanos = Nanos::from_secs(3);

/// What a session waits for: a call on each block.
struct OutstandingBlockCommand {
    disk: usize,
    kind: BlockCommandKind,
    ids: Vec<CallId>,
    reads_failed: u64,
}

enum BlockCommandKind {
    Read {
        cell: usize,
    },
    /// Also write zeroes.
    Write {
        durable: bool,
    },
    Deallocate,
    Compare {
        operations: Vec<u64>,
    },
    Verify,
    Flush,
}

struct BlockSessionSlot {
    session: Option<Session<SimSockets>>,
    disk: usize,
    pending: FxHashMap<u64, OutstandingBlockCommand>,
    /// When to connect, or to ask, again.
    not_before: Nanos,
    /// Whether and since when it is being closed in order.
    closing_since: Option<Nanos>,
}

/// The clients of one host, as a reactor runs them.
pub struct BlockClients {
    sim: SimEnv,
    host: SimHostId,
    node: SocketAddr,
    plan: ClientHostPlan,
    random: Prng,
    handle: ReactorHandle,
    shared: Rc<RefCell<BlockRunState>>,
    slots: Vec<BlockSessionSlot>,
    next_token: u64,
    session_count: Rc<Cell<usize>>,
}

impl BlockClients {
    /// The clients of `host`, of the node at `node`.
    pub fn new(
        sim: &SimEnv,
        host: &ClientHost,
        node: SocketAddr,
        random: Prng,
        handle: ReactorHandle,
        shared: &Rc<RefCell<BlockRunState>>,
    ) -> BlockClients {
        let ClientHost { id: host, plan, session_count: live } = host;
        let slot = |_| BlockSessionSlot {
            session: None,
            disk: 0,
            pending: FxHashMap::default(),
            not_before: Nanos::ZERO,
            closing_since: None,
        };
        live.set(0);
        BlockClients {
            sim: sim.clone(),
            host: *host,
            node,
            plan: *plan,
            random,
            handle,
            shared: Rc::clone(shared),
            slots: (0..plan.sessions).map(slot).collect(),
            next_token: 0,
            session_count: Rc::clone(live),
        }
    }

    /// Does what there is to do now. False when there was nothing.
    pub fn run_iteration(&mut self, now: Nanos) -> bool {
        self.handle.begin_iteration(now);
        let (mut busy, mut wake) = (false, Nanos::NEVER);
        for index in 0..self.slots.len() {
            busy |= self.run_slot(index, now);
            let quiescing = self.shared.borrow().quiescing;
            let slot = &self.slots[index];
            wake = wake.min(match &slot.session {
                Some(session) => {
                    let ask_at = if slot.not_before > now { slot.not_before } else { Nanos::NEVER };
                    let closed_at = slot.closing_since.map_or(Nanos::NEVER, |since| since + CLOSE_TIMEOUT);
                    session.next_deadline().min(ask_at).min(closed_at)
                }
                None if quiescing => Nanos::NEVER,
                None => slot.not_before.max(now + Nanos(1)),
            });
        }
        self.session_count.set(self.slots.iter().filter(|seat| seat.session.is_some()).count());
        self.handle.request_wakeup_at(wake);
        busy
    }

    fn run_slot(&mut self, index: usize, now: Nanos) -> bool {
        let quiescing = self.shared.borrow().quiescing;
        if self.slots[index].session.is_none() {
            if quiescing || now < self.slots[index].not_before {
                return false;
            }
            return self.connect(index, now);
        }
        let mut busy = self.poll(index, now);
        let slot = &mut self.slots[index];
        let Some(session) = &slot.session else { return busy };
        let gone = self.shared.borrow().served_as[slot.disk] != Some(session.config().namespace);
        if session.ended().is_some()
            || (quiescing && self.should_drop_session(index, now))
            || (gone && self.random.one_in(20))
        {
            self.drop_session(index, now);
            return true;
        }
        if quiescing {
            return busy;
        }
        while self.can_submit(index, now) {
            self.submit(index, now);
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
        let slot = &mut self.slots[index];
        if served.is_empty() {
            slot.not_before = now + RETRY_DELAY;
            return false;
        }
        let (disk, namespace) = served[self.random.below(served.len() as u64) as usize];
        let settings = ClientConfig { namespace, ..client_config(self.host, &self.plan) };
        slot.disk = disk;
        slot.session = Some(Session::new(self.sim.sockets(self.host), self.node, settings, now));
        true
    }

    fn poll(&mut self, index: usize, now: Nanos) -> bool {
        let slot = &mut self.slots[index];
        let Some(session) = &mut slot.session else { return false };
        let (shared, waiting) = (&self.shared, &mut slot.pending);
        let busy = session.poll(now, |token, answer| {
            let mut shared = shared.borrow_mut();
            match waiting.remove(&token) {
                Some(asked) => shared.complete(asked, answer),
                None => shared.fail(format!("token {token} was answered twice")),
            }
        });
        let mut shared = self.shared.borrow_mut();
        if shared.must_not_time_out && session.last_error() == Some(ConnectionError::TimedOut) {
            shared.fail("a command was never answered".to_owned());
        }
        busy
    }

    /// While resting: drops some sessions with what they wait for, closes others when that has come.
    fn should_drop_session(&mut self, index: usize, now: Nanos) -> bool {
        let slot = &mut self.slots[index];
        if let Some(since) = slot.closing_since {
            return now >= since + CLOSE_TIMEOUT;
        }
        let Some(session) = &mut slot.session else { return false };
        if !session.is_live() {
            return true;
        }
        if !slot.pending.is_empty() && !self.random.one_in(2_000) {
            return false;
        }
        if self.random.one_in(2) {
            return true;
        }
        let (shared, waiting) = (&self.shared, &mut slot.pending);
        session.close(now, |token, answer| {
            if let Some(asked) = waiting.remove(&token) {
                shared.borrow_mut().complete(asked, answer);
            }
        });
        slot.closing_since = Some(now);
        false
    }

    fn drop_session(&mut self, index: usize, now: Nanos) {
        let slot = &mut self.slots[index];
        let Some(session) = slot.session.take() else { return };
        let mut shared = self.shared.borrow_mut();
        if let Some(Error::Connect(_, lost)) = session.ended()
            && shared.is_protocol_violation(&lost)
        {
            shared.fail(format!("a session ended: {lost}"));
        }
        shared.completed += slot.pending.len() as u64;
        drop((shared, session));
        slot.pending.clear();
        (slot.not_before, slot.closing_since) = (now + RETRY_DELAY, None);
    }

    fn can_submit(&self, index: usize, now: Nanos) -> bool {
        let slot = &self.slots[index];
        let shared = self.shared.borrow();
        let room = slot.session.as_ref().is_some_and(|session| session.free_slots() > 0);
        room && now >= slot.not_before
            && slot.pending.len() < self.plan.commands_max
            && shared.submitted < shared.submit_limit
            && shared.violation.is_none()
    }

    fn submit(&mut self, index: usize, now: Nanos) {
        let slot = &mut self.slots[index];
        let Some(session) = &mut slot.session else { return };
        let mut shared = self.shared.borrow_mut();
        let token = self.next_token;
        self.next_token += 1;
        let submit = |command: Command<'_>| session.submit(command, token);
        match shared.submit_random(&mut self.random, slot.disk, submit) {
            Ok(asked) => drop(slot.pending.insert(token, asked)),
            Err(why) => shared.fail(why),
        }
        if self.plan.think_time_max > Nanos::ZERO {
            slot.not_before = now + Nanos(self.random.below(self.plan.think_time_max.0));
        }
    }
}

impl Drop for BlockClients {
    /// Its host died: what its sessions wait for is never answered.
    fn drop(&mut self) {
        let lost: usize = self.slots.iter().map(|seat| seat.pending.len()).sum();
        self.shared.borrow_mut().completed += lost as u64;
    }
}

/// Statuses of commands that the operator is the reason for, and that did nothing.
const REJECTED_STATUSES: [Status; 4] = [
    Status::INVALID_NAMESPACE,
    Status::ANA_INACCESSIBLE,
    Status::ANA_PERSISTENT_LOSS,
    Status::ANA_TRANSITION,
];

impl BlockRunState {
    /// Notes the first thing that cannot be.
    pub fn fail(&mut self, what: String) {
        self.violation.get_or_insert(what);
    }

    /// Whether a session ended as none does, whatever happens to hosts, links, disks and namespaces.
    fn is_protocol_violation(&self, lost: &ConnectionError) -> bool {
        match lost {
            ConnectionError::Closed
            | ConnectionError::TimedOut
            | ConnectionError::ControllerFatal
            | ConnectionError::ConnectRejected(_)
            | ConnectionError::InitFailed(_) => false,
            ConnectionError::NamespaceNotFound => !self.has_operator,
            ConnectionError::Protocol(_)
            | ConnectionError::Terminated { .. }
            | ConnectionError::AuthenticationRequired => true,
            ConnectionError::UnsupportedCommandSet
            | ConnectionError::UnsupportedBlockFormat
            | ConnectionError::NamespaceChanged => true,
        }
    }

    /// Draws a command and hands it to `submit`.
    fn submit_random(
        &mut self,
        random: &mut Prng,
        disk: usize,
        submit: impl FnOnce(Command<'_>) -> Result<(), SubmitError>,
    ) -> Result<OutstandingBlockCommand, String> {
        self.submitted += 1;
        let DiskPlan { block_bytes, first, count, .. } = self.disks[disk];
        let BlockLoad { blocks_max, mix, durable_one_in } = self.load;
        let most = blocks_max.min(count).min(self.bytes_max / u64::from(block_bytes)).max(1);
        let blocks = 1 + random.below(most);
        let cell = random.below(count - blocks + 1);
        let (lba, cells) = (Lba(first + cell), cell as usize..(cell + blocks) as usize);
        let range = LbaRange { lba, blocks: blocks as u32 };
        let force_unit_access = random.one_in(durable_one_in);
        let history = &mut self.histories[disk];
        let mut begin = |call: Call| cells.clone().map(|cell| history.begin(cell, call)).collect();
        let (what, ids, submitted) = match draw_weighted(random, &mix) {
            0 => {
                let (what, ids) = (BlockCommandKind::Read { cell: cells.start }, begin(Call::Get));
                (what, ids, submit(Command::Read { range, buffer: None }))
            }
            1 => {
                let (data, ids) = begin_write(history, cells, block_bytes);
                let data = Value::Slice(&data);
                let what = BlockCommandKind::Write { durable: force_unit_access };
                (what, ids, submit(Command::Write { lba, data, force_unit_access }))
            }
            2 => {
                let (what, ids) =
                    (BlockCommandKind::Write { durable: force_unit_access }, begin(Call::Delete));
                let deallocate = random.one_in(2);
                (what, ids, submit(Command::WriteZeroes { range, force_unit_access, deallocate }))
            }
            3 => (
                BlockCommandKind::Deallocate,
                begin(Call::Deallocate),
                submit(Command::Deallocate { ranges: &[range] }),
            ),
            4 => {
                let ids = begin(Call::Get);
                let operations: Vec<u64> = cells.clone().map(|cell| history.last_write(cell)).collect();
                let data = expected_contents(history, cells, &operations, block_bytes);
                let data = Value::Slice(&data);
                (BlockCommandKind::Compare { operations }, ids, submit(Command::Compare { lba, data }))
            }
            5 => (BlockCommandKind::Verify, Vec::new(), submit(Command::Verify { range })),
            _ => (BlockCommandKind::Flush, vec![history.begin_keyless()], submit(Command::Flush)),
        };
        submitted.map_err(|why| format!("a command was not taken: {why:?}"))?;
        Ok(OutstandingBlockCommand { disk, kind: what, ids, reads_failed: self.faults.reads_failed() })
    }

    /// Takes an answer in.
    fn complete(&mut self, pending: OutstandingBlockCommand, response: Result<Response, Error>) {
        self.completed += 1;
        self.succeeded += u64::from(response.is_ok());
        let checked = match response {
            Ok(answer) => self.check_response(&pending, answer),
            Err(error) => self.check_error(&pending, &error),
        };
        if let Err(what) = checked {
            self.fail(what);
        }
    }

    fn check_response(
        &mut self,
        pending: &OutstandingBlockCommand,
        response: Response,
    ) -> Result<(), String> {
        let history = &mut self.histories[pending.disk];
        let ids = pending.ids.iter();
        match (&pending.kind, response) {
            (BlockCommandKind::Read { cell }, Response::Blocks { data }) => {
                let block_bytes = self.disks[pending.disk].block_bytes as usize;
                if data.len() != pending.ids.len() * block_bytes {
                    return Err(format!("{} B came of {} blocks", data.len(), pending.ids.len()));
                }
                for (at, (&id, block)) in ids.zip(data.chunks(block_bytes)).enumerate() {
                    let seen = observe_block(history, cell + at, block)?;
                    history.end(id, CallResult::Observed(seen))?;
                }
                Ok(())
            }
            (BlockCommandKind::Write { durable: true }, Response::Written { .. }) => {
                ids.copied().try_for_each(|id| history.end_durable(id))
            }
            (BlockCommandKind::Write { .. } | BlockCommandKind::Deallocate, Response::Written { .. }) => {
                ids.copied().try_for_each(|id| history.end(id, CallResult::Acknowledged))
            }
            (BlockCommandKind::Compare { operations }, Response::Verified) => {
                ids.zip(operations).try_for_each(|(&id, &operation)| {
                    let is_zero = operation == 0;
                    let seen = if is_zero { Observed::Absent } else { Observed::Value(operation) };
                    history.end(id, CallResult::Observed(seen))
                })
            }
            (BlockCommandKind::Compare { operations }, Response::CompareFailed) if pending.ids.len() == 1 => {
                let is_zero = operations[0] == 0;
                let seen = if is_zero { Observed::Present } else { Observed::NotValue(operations[0]) };
                history.end(pending.ids[0], CallResult::Observed(seen))
            }
            // Which of the blocks it was is not told.
            (BlockCommandKind::Compare { .. }, Response::CompareFailed) => {
                ids.for_each(|&id| history.mark_not_executed(id));
                Ok(())
            }
            (BlockCommandKind::Verify, Response::Verified) => Ok(()),
            (BlockCommandKind::Flush, Response::Flushed) => {
                history.record_flush(pending.ids[0]);
                Ok(())
            }
            (_, Response::Retry { .. }) => {
                self.mark_not_executed(pending);
                Ok(())
            }
            (_, answer) => Err(format!("an answer to something else: {answer:?}")),
        }
    }

    /// It did nothing, and told nothing.
    fn mark_not_executed(&mut self, pending: &OutstandingBlockCommand) {
        if !matches!(pending.kind, BlockCommandKind::Flush) {
            pending.ids.iter().for_each(|&id| self.histories[pending.disk].mark_not_executed(id));
        }
    }

    fn check_error(&mut self, pending: &OutstandingBlockCommand, error: &Error) -> Result<(), String> {
        let read_failed = self.faults.reads_failed() > pending.reads_failed;
        let reads = matches!(
            pending.kind,
            BlockCommandKind::Read { .. } | BlockCommandKind::Compare { .. } | BlockCommandKind::Verify
        );
        match error {
            Error::Disconnected(lost) if self.is_protocol_violation(lost) => return Err(format!("{error}")),
            Error::Status(status)
                if REJECTED_STATUSES.iter().any(|one| status.is(*one)) && self.has_operator =>
            {
                self.rejected_commands += 1;
                self.mark_not_executed(pending);
            }
            Error::Busy | Error::Disconnected(_) | Error::TimedOut | Error::Closed => {
                self.mark_not_executed(pending)
            }
            Error::OutcomeUnknown => {}
            Error::UnrecoveredRead if reads && read_failed => self.mark_not_executed(pending),
            // A part of a block of the disk could not be read, and so not be patched.
            Error::UnrecoveredRead if !reads && read_failed => {}
            Error::Status(status)
                if status.is(Status::MEDIA_WRITE_FAULT) && !reads && self.faults.operations_failed() > 0 => {}
            other => return Err(format!("a command failed as none may: {other}")),
        }
        Ok(())
    }
}

/// Begins a write of new contents to each of these blocks.
fn begin_write(
    history: &mut History,
    cells: std::ops::Range<usize>,
    block_bytes: u32,
) -> (Vec<u8>, Vec<CallId>) {
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
fn expected_contents(
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
pub fn observe_block(history: &History, cell: usize, block: &[u8]) -> Result<Observed, String> {
    if block.iter().all(|&byte| byte == 0) {
        return Ok(Observed::Absent);
    }
    history.identify_value(cell, block, block.len() as u32)
}
