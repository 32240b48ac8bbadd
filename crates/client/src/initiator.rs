//! One controller and its queues, as a machine without I/O: set up, used, lost, set up again.
//!
//! In: time, bytes by queue, commands, news of connections. Out: bytes by queue, answers through a sink,
//! [`Effect`]s (open or close the connection of a queue). Queue 0 is the admin queue.
//!
//! ```text
//!            start            set up              all queues connected
//!  Waiting ────────▶ Setting ────────▶ Queues ──────────────────────────▶ Live ──close──▶ Draining
//!     ▲                 │                 │                                │                 │
//!     └── pause ────────┴─────── lost ────┴────────────────────────────────┘          shut down or late
//!                       └─ never live, final, or no more attempts ─▶ Over ◀──────────────────┘
//! ```
//! Invariants: one loss takes down the whole controller: all its connections are closed and every
//! command in flight is answered exactly once; commands are taken only while live; what is sent to a
//! controller of before is never read as an answer of now (its connections are gone); a namespace of blocks
//! that is another than before ends it. While live an event request is out; when it tells of a change, the
//! namespace is looked at again.

use crate::command::{Answer, Command, Kind, Prepared, answer};
use crate::config::{Settings, pause};
use crate::controller_init::{self, Blocks, Facts, Next, Step};
use crate::error::{Error, Lost};
use crate::queue_pair::{Done, Event, Queue};
use octokv_base::{Nanos, Pool};
use octokv_wire::fabrics::Configuration;
use octokv_wire::pdu::ADMIN_CAPSULE_DATA_BYTES;
use std::io::IoSlice;

/// What the driver of the machine has to do, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Connect this queue's connection.
    Open(u16),
    /// Send what it takes at once, then close this queue's connection.
    Close(u16),
}

/// Where a controller stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Until the next attempt.
    Waiting { until: Nanos },
    /// The admin queue connects and a step is under way; `again_at` when CSTS is to be read again.
    Setting { step: Step, deadline: Nanos, again_at: Option<Nanos> },
    /// So many I/O queues are still connecting.
    Queues { left: u16, deadline: Nanos },
    /// In use; the next sign of life is due at `alive_at`.
    Live { alive_at: Nanos },
    /// Waits for the last answers, then for the controller's shutdown.
    Draining { deadline: Nanos, shutting_down: bool },
    /// Ended, and why; none after a close.
    Over(Option<Lost>),
}

const READY_POLL: Nanos = Nanos::from_millis(1);
const DRAIN_LIMIT: Nanos = Nanos::from_secs(1);
/// What commands of our own, while live, are for: their tokens.
const KEEP_ALIVE: u64 = 0;
const EVENT: u64 = 1;
const CHANGED: u64 = 2;
const LOOK: u64 = 3;
const SHUTDOWN: u64 = 4;
/// Room that keep alives leave on the admin queue: for an event request, a look at the namespace, a shutdown.
const ADMIN_RESERVE: usize = 3;
const ADMIN_DEPTH: u16 = controller_init::ADMIN_ENTRIES as u16 - 1;

/// One controller. See the module's text.
#[derive(Debug)]
pub struct Initiator {
    settings: Settings,
    pool: Pool,
    state: State,
    facts: Facts,
    queues: Vec<Queue>,
    effects: Vec<Effect>,
    own: Vec<Event>,
    was_live: bool,
    /// How often it went live.
    lives: u64,
    /// An event request is out.
    listening: bool,
    /// A look at the namespace after a change is under way: its step, and what was learnt by then.
    look: Option<(Step, Facts)>,
    lost_at: Nanos,
    attempts: u32,
    last_loss: Option<Lost>,
    check_at: Nanos,
    turn: usize,
}

impl Initiator {
    /// A machine that begins to connect at once.
    pub fn new(settings: Settings, now: Nanos) -> Initiator {
        let pool = Pool::new(settings.pool_bytes);
        let mut initiator = Initiator {
            settings,
            pool,
            state: State::Waiting { until: now },
            facts: Facts::unknown(),
            queues: Vec::new(),
            effects: Vec::new(),
            own: Vec::new(),
            was_live: false,
            lives: 0,
            listening: false,
            look: None,
            lost_at: now,
            attempts: 0,
            last_loss: None,
            check_at: now,
            turn: 0,
        };
        initiator.start(now);
        initiator
    }

    /// Whether commands can be submitted.
    pub fn is_live(&self) -> bool {
        matches!(self.state, State::Live { .. })
    }

    /// Whether it has ended.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over(_))
    }

    /// Why the last connection was lost, or why it ended.
    pub fn last_loss(&self) -> Option<Lost> {
        self.last_loss
    }

    /// What is known of the controller and its namespace, once it was live.
    pub fn facts(&self) -> Option<&Facts> {
        self.was_live.then_some(&self.facts)
    }

    /// How often it went live: two commands of one life met the same controller.
    pub fn lives(&self) -> u64 {
        self.lives
    }

    /// The settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The pool that the data of answers comes from.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// How many commands can be submitted now.
    pub fn room(&self) -> usize {
        if !self.is_live() { 0 } else { self.queues.iter().skip(1).map(Queue::room).sum() }
    }

    /// How many of the caller's commands wait for an answer.
    pub fn in_flight(&self) -> usize {
        self.queues.iter().skip(1).map(Queue::in_flight).sum()
    }

    /// What is to be done with connections; empties the list.
    pub fn take_effects(&mut self, into: &mut Vec<Effect>) {
        into.append(&mut self.effects);
    }

    /// Appends what a queue has to send.
    pub fn slices<'a>(&'a self, queue: u16, into: &mut Vec<IoSlice<'a>>) {
        if let Some(queue) = self.queues.get(usize::from(queue)) {
            queue.slices(into);
        }
    }

    /// Whether a queue has nothing to send.
    pub fn is_flushed(&self, queue: u16) -> bool {
        self.queues.get(usize::from(queue)).is_none_or(Queue::is_flushed)
    }

    /// The socket of a queue took so many bytes.
    pub fn sent(&mut self, queue: u16, bytes: usize) {
        self.queues[usize::from(queue)].sent(bytes);
    }

    /// Puts a command on its way. The caller has seen [`Initiator::room`].
    ///
    /// # Errors
    /// What is wrong with the command; nothing was done.
    ///
    /// # Panics
    /// When there is no room.
    #[inline]
    pub fn submit(&mut self, now: Nanos, command: Command<'_>, token: u64) -> Result<(), Error> {
        let prepared = Prepared::new(command, self.settings.namespace, &self.facts)?;
        let count = self.queues.len() - 1;
        let index = (0..count).map(|i| 1 + (self.turn + i) % count).find(|&i| self.queues[i].room() > 0);
        let index = index.expect("the caller looked for room");
        self.turn = index;
        let deadline = now + self.settings.command_timeout;
        self.queues[index].submit(prepared, token, deadline, &self.pool);
        Ok(())
    }

    /// Puts a command on its way on this of the I/O queues, counted from 0.
    ///
    /// # Errors
    /// What is wrong with it.
    ///
    /// # Panics
    /// When that queue has no room.
    pub fn submit_on(
        &mut self,
        queue: usize,
        now: Nanos,
        command: Command<'_>,
        token: u64,
    ) -> Result<(), Error> {
        let prepared = Prepared::new(command, self.settings.namespace, &self.facts)?;
        let deadline = now + self.settings.command_timeout;
        self.queues[1 + queue].submit(prepared, token, deadline, &self.pool);
        Ok(())
    }

    /// How many commands one of the I/O queues takes now, counted from 0; none of one that there is not.
    pub fn queue_room(&self, queue: usize) -> usize {
        if !self.is_live() {
            0
        } else {
            queue.checked_add(1).and_then(|at| self.queues.get(at)).map_or(0, Queue::room)
        }
    }

    /// Takes bytes from the head of what came on a queue's connection; gives how many. The caller gives
    /// the rest again with more behind it.
    pub fn receive(
        &mut self,
        queue: u16,
        now: Nanos,
        bytes: &[u8],
        sink: &mut impl FnMut(u64, Result<Answer, Error>),
    ) -> usize {
        if matches!(self.state, State::Waiting { .. } | State::Over(_)) {
            // The connection is about to be closed: whatever still comes on it belongs to nobody.
            return bytes.len();
        }
        let Initiator { queues, pool, own, .. } = self;
        let Some(machine) = queues.get_mut(usize::from(queue)) else { return bytes.len() };
        let result = machine.receive(bytes, pool, &mut |event| match event {
            Event::Done(done) if !done.kind.is_own() => sink(done.token, answer(done)),
            own_event => own.push(own_event),
        });
        if !self.own.is_empty() {
            let mut events = std::mem::take(&mut self.own);
            for event in events.drain(..) {
                self.own_event(queue, now, event, sink);
            }
            self.own = events;
        }
        match result {
            Ok(taken) => taken,
            Err(lost) => {
                self.lose(now, lost, sink);
                bytes.len()
            }
        }
    }

    /// The connection of a queue is gone, or could not be made.
    pub fn connection_lost(&mut self, now: Nanos, sink: &mut impl FnMut(u64, Result<Answer, Error>)) {
        match self.state {
            State::Waiting { .. } | State::Over(_) => {}
            State::Draining { .. } => self.end(None, sink),
            State::Setting { .. } | State::Queues { .. } | State::Live { .. } => {
                self.lose(now, Lost::Closed, sink);
            }
        }
    }

    /// Ends the session: takes no more commands, waits for the answers of those in flight (a second at
    /// most), shuts the controller down.
    pub fn close(&mut self, now: Nanos, sink: &mut impl FnMut(u64, Result<Answer, Error>)) {
        match self.state {
            State::Live { .. } => {
                self.state = State::Draining { deadline: now + DRAIN_LIMIT, shutting_down: false };
                self.drain();
            }
            State::Waiting { .. } | State::Setting { .. } | State::Queues { .. } => self.end(None, sink),
            State::Draining { .. } | State::Over(_) => {}
        }
    }

    /// Lets time pass.
    pub fn tick(&mut self, now: Nanos, sink: &mut impl FnMut(u64, Result<Answer, Error>)) {
        match self.state {
            State::Waiting { until } if until <= now => self.start(now),
            State::Setting { deadline, .. } | State::Queues { deadline, .. } if deadline <= now => {
                self.lose(now, Lost::TimedOut, sink);
            }
            State::Setting { step, deadline, again_at: Some(at) } if at <= now => {
                self.state = State::Setting { step, deadline, again_at: None };
                self.ask(step, now);
            }
            State::Live { alive_at } => {
                if self.check_at <= now {
                    self.check_at = now + self.check_every();
                    if self.queues.iter().any(|queue| queue.is_overdue(now)) {
                        return self.lose(now, Lost::TimedOut, sink);
                    }
                }
                if alive_at <= now && self.queues[0].room() > ADMIN_RESERVE {
                    self.own_command(0, controller_init::keep_alive(), KEEP_ALIVE, now);
                    self.state = State::Live { alive_at: now + Nanos(self.settings.keep_alive.0 / 2) };
                }
            }
            State::Draining { deadline, .. } if deadline <= now => self.end(None, sink),
            State::Draining { .. } => self.drain(),
            State::Waiting { .. } | State::Setting { .. } | State::Queues { .. } | State::Over(_) => {}
        }
    }

    /// When [`Initiator::tick`] has something to do.
    pub fn next_deadline(&self) -> Nanos {
        match self.state {
            State::Waiting { until } => until,
            State::Setting { deadline, again_at, .. } => again_at.unwrap_or(deadline).min(deadline),
            State::Queues { deadline, .. } | State::Draining { deadline, .. } => deadline,
            State::Live { alive_at } if self.is_idle() => alive_at,
            State::Live { alive_at } => alive_at.min(self.check_at),
            State::Over(_) => Nanos::NEVER,
        }
    }

    /// Whether no command waits for an answer that is due: an event request may wait for ever.
    fn is_idle(&self) -> bool {
        let waiting = self.queues.iter().map(Queue::in_flight).sum::<usize>();
        waiting == usize::from(self.listening)
    }

    fn check_every(&self) -> Nanos {
        Nanos((self.settings.command_timeout.0 / 8).clamp(1_000_000, 100_000_000))
    }

    /// Begins to connect.
    fn start(&mut self, now: Nanos) {
        self.queues.clear();
        (self.listening, self.look) = (false, None);
        self.queues.push(self.new_queue(ADMIN_DEPTH));
        self.effects.push(Effect::Open(0));
        let deadline = now + self.settings.connect_timeout;
        self.state = State::Setting { step: Step::Connect, deadline, again_at: None };
    }

    fn new_queue(&self, depth: u16) -> Queue {
        let Settings { header_digest, data_digest, .. } = self.settings;
        Queue::new(depth, ADMIN_CAPSULE_DATA_BYTES, header_digest, data_digest)
    }

    fn ask(&mut self, step: Step, now: Nanos) {
        let command = controller_init::request(step, &self.settings);
        self.own_command(0, command, LOOK, now);
    }

    fn own_command(&mut self, queue: u16, command: Prepared<'_>, token: u64, now: Nanos) {
        let deadline = match command.kind {
            Kind::Event => Nanos::NEVER,
            _ => now + self.settings.command_timeout,
        };
        self.queues[usize::from(queue)].submit(command, token, deadline, &self.pool);
    }

    /// An initialised connection, or the answer to a command of our own.
    fn own_event(
        &mut self,
        queue: u16,
        now: Nanos,
        event: Event,
        sink: &mut impl FnMut(u64, Result<Answer, Error>),
    ) {
        match (self.state, event) {
            (State::Setting { step: Step::Connect, .. }, Event::Opened) => self.ask(Step::Connect, now),
            (State::Setting { step, deadline, .. }, Event::Done(done)) => {
                let before = if self.was_live { self.facts.blocks } else { None };
                let next =
                    controller_init::next(step, &done.cqe, &done.data, &self.settings, &mut self.facts);
                match next.and_then(|next| is_still(before, self.facts.blocks).map(|()| next)) {
                    Ok(Next::Step(step)) => {
                        self.state = State::Setting { step, deadline, again_at: None };
                        self.ask(step, now);
                    }
                    Ok(Next::Wait) => {
                        let again_at = Some(now + READY_POLL);
                        self.state = State::Setting { step, deadline, again_at };
                    }
                    Ok(Next::Done) => self.open_queues(deadline),
                    Err(lost) => self.lose(now, lost, sink),
                }
            }
            (State::Queues { .. }, Event::Opened) => {
                let entries = u32::from(self.facts.depth(self.settings.depth)) + 1;
                let connect =
                    controller_init::connect(queue, entries, self.facts.controller_id, &self.settings);
                self.own_command(queue, connect, LOOK, now);
            }
            (State::Queues { left, deadline }, Event::Done(done)) => {
                let status = done.cqe.status();
                if !status.is_success() {
                    return self.lose(now, Lost::Refused(status), sink);
                }
                self.queues[usize::from(queue)].set_capsule_data_bytes(self.facts.capsule_data_bytes);
                self.state = State::Queues { left: left - 1, deadline };
                if left == 1 {
                    self.go_live(now);
                }
            }
            (State::Live { .. }, Event::Done(done)) => {
                if let Err(lost) = self.live_answer(now, &done) {
                    self.lose(now, lost, sink);
                }
            }
            (State::Draining { shutting_down: true, .. }, Event::Done(done)) if done.token == SHUTDOWN => {
                self.end(None, sink);
            }
            // Nobody needs the answer any more; or the controller was lost within the same bytes.
            (
                State::Live { .. }
                | State::Draining { .. }
                | State::Waiting { .. }
                | State::Over(_)
                | State::Setting { .. },
                Event::Done(_) | Event::Opened,
            ) => {}
        }
    }

    /// The answer to a command of our own while live.
    fn live_answer(&mut self, now: Nanos, done: &Done) -> Result<(), Lost> {
        let status = done.cqe.status();
        match done.token {
            EVENT => {
                self.listening = false;
                if status.is_success() {
                    // Whatever it is about: reading the list lets the next change be told.
                    self.own_command(0, controller_init::changed_namespaces(), CHANGED, now);
                }
                Ok(())
            }
            // A controller that has no such list may still have told the truth.
            CHANGED => {
                self.look = Some((Step::Namespaces, self.facts.clone()));
                self.ask(Step::Namespaces, now);
                Ok(())
            }
            LOOK => self.look_on(now, done),
            _ if status.is_success() => Ok(()),
            _ => Err(Lost::Setup(status)),
        }
    }

    /// Goes on looking whether the namespace is there, and is what it was.
    fn look_on(&mut self, now: Nanos, done: &Done) -> Result<(), Lost> {
        let Some((step, mut facts)) = self.look.take() else { return Ok(()) };
        match controller_init::next(step, &done.cqe, &done.data, &self.settings, &mut facts)? {
            Next::Step(next @ (Step::Descriptors | Step::Namespace | Step::Blocks)) => {
                self.look = Some((next, facts));
                self.ask(next, now);
            }
            Next::Step(_) | Next::Wait | Next::Done => {
                is_still(self.facts.blocks, facts.blocks)?;
                self.facts = facts;
                self.listen(now);
            }
        }
        Ok(())
    }

    /// Lets the controller tell of the next change.
    fn listen(&mut self, now: Nanos) {
        if self.facts.tells_changes && !self.listening {
            self.listening = true;
            self.own_command(0, controller_init::event_request(), EVENT, now);
        }
    }

    fn open_queues(&mut self, deadline: Nanos) {
        let depth = self.facts.depth(self.settings.depth);
        for id in 1..=self.facts.queues {
            self.queues.push(self.new_queue(depth));
            self.effects.push(Effect::Open(id));
        }
        self.state = State::Queues { left: self.facts.queues, deadline };
    }

    fn go_live(&mut self, now: Nanos) {
        self.was_live = true;
        self.lives += 1;
        self.attempts = 0;
        self.last_loss = None;
        self.check_at = now + self.check_every();
        self.state = State::Live { alive_at: now + Nanos(self.settings.keep_alive.0 / 2) };
        self.listen(now);
    }

    /// Sends the shutdown when the last answer has come.
    fn drain(&mut self) {
        if let State::Draining { deadline, shutting_down: false } = self.state
            && self.in_flight() == 0
        {
            let sqe = controller_init::set_configuration(Configuration::ENABLED.with_shutdown());
            self.queues[0].submit(Prepared::own(sqe, 0), SHUTDOWN, deadline, &self.pool);
            self.state = State::Draining { deadline, shutting_down: true };
        }
    }

    fn lose(&mut self, now: Nanos, lost: Lost, sink: &mut impl FnMut(u64, Result<Answer, Error>)) {
        if self.attempts == 0 {
            self.lost_at = now;
        }
        let wait = pause(self.settings.reconnect, self.attempts, now.since(self.lost_at));
        self.attempts += 1;
        match wait {
            Some(wait) if self.was_live && !lost.is_final() => {
                self.last_loss = Some(lost);
                self.orphan(lost, sink);
                self.state = State::Waiting { until: now + wait };
            }
            _ => self.end(Some(lost), sink),
        }
    }

    fn end(&mut self, lost: Option<Lost>, sink: &mut impl FnMut(u64, Result<Answer, Error>)) {
        self.last_loss = lost.or(self.last_loss);
        self.orphan(lost.unwrap_or(Lost::Closed), sink);
        self.state = State::Over(lost);
    }

    /// Closes every connection and answers every command in flight.
    fn orphan(&mut self, lost: Lost, sink: &mut impl FnMut(u64, Result<Answer, Error>)) {
        self.effects.retain(|effect| matches!(effect, Effect::Close(_)));
        for (index, queue) in self.queues.iter_mut().enumerate() {
            self.effects.push(Effect::Close(index as u16));
            queue.abandon(|orphan| {
                if orphan.kind.is_own() {
                    return;
                }
                let unknown = orphan.sent && !orphan.kind.is_repeatable();
                let error = if unknown { Error::OutcomeUnknown } else { Error::Disconnected(lost) };
                sink(orphan.token, Err(error));
            });
        }
    }
}

/// Whether a namespace of blocks is what it was before.
fn is_still(before: Option<Blocks>, now: Option<Blocks>) -> Result<(), Lost> {
    match (before, now) {
        (Some(before), Some(now)) if now.is_still(&before) => Ok(()),
        (None, _) => Ok(()),
        (Some(_), _) => Err(Lost::OtherNamespace),
    }
}
