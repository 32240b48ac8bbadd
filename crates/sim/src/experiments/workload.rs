//! The papers' client, a flow of requests: threads that each have one operation at a time, over one connection for each core of the node.
//!
//! ```text
//!   thread: ask ─▶ which connection? ─▶ queue of the session ─▶ … ─▶ answer ─▶ ask
//!                   in order: the first with fewer than so many outstanding
//!                   by shares: by lot, in proportion
//! ```
//! In: answers of the node, time. Out: operations, and what they came to. Puts are of keys that nobody stored before, in an
//! order that is not theirs; gets draw from those that were stored. Values are zeros.
//!
//! Invariants: each operation is answered once, and well; no more are asked than allowed.

use super::metrics::Counted;
use super::parameters::{KEY_BYTES, Operation, VALUE_BYTES};
use octokv_base::{Key, Nanos, Random};
use octokv_client::{Answer, Command, Session, StoreMode, Value};
use octokv_runtime::Handle;
use octokv_runtime::simulated::VirtualSockets;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

/// So many flows have keys of their own.
const FLOWS_MAX: u32 = 16;

/// Which connection a request goes over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The first with fewer than so many outstanding, else the one with fewest (OctoFAS §3.3).
    InOrder(usize),
    /// By lot, in these proportions.
    Shares(Vec<u64>),
    /// This one.
    One(usize),
}

/// What the client does, as whoever experiments sees and sets it.
#[derive(Debug)]
pub struct Load {
    /// What is asked.
    pub operation: Operation,
    /// Over which connections.
    pub placement: Placement,
    /// How many threads ask.
    pub threads: usize,
    /// So many operations may be asked in all.
    pub allowed: u64,
    /// So many were, and so many were answered.
    pub asked: u64,
    /// See above.
    pub answered: u64,
    /// Since it was taken out.
    pub counted: Counted,
    /// Whether the session is up.
    pub live: bool,
    /// The first thing that went wrong.
    pub failure: Option<String>,
    /// Keys stored.
    pub stored: u32,
    /// By connection: which queue of the session it is.
    pub queues: Vec<usize>,
    /// Which flow it is: flows store different keys.
    flow: u32,
    /// By connection.
    outstanding: Vec<u64>,
    changed: Nanos,
}

impl Load {
    /// Of a flow: nothing is asked yet, over so many connections.
    ///
    /// # Panics
    /// Where there are more flows than keys are for.
    pub fn new(flow: u32, connections: usize) -> Rc<RefCell<Load>> {
        assert!(flow < FLOWS_MAX, "{flow}");
        Rc::new(RefCell::new(Load {
            operation: Operation::Put,
            placement: Placement::InOrder(1),
            threads: 0,
            allowed: 0,
            asked: 0,
            answered: 0,
            counted: Counted { outstanding_ns: vec![0; connections], ..Counted::default() },
            live: false,
            failure: None,
            stored: 0,
            queues: (0..connections).collect(),
            flow,
            outstanding: vec![0; connections],
            changed: Nanos::ZERO,
        }))
    }

    /// What was counted since the last call, up to now.
    pub fn take_counted(&mut self, now: Nanos) -> Counted {
        self.count_to(now);
        let connections = self.outstanding.len();
        let empty = Counted { outstanding_ns: vec![0; connections], ..Counted::default() };
        std::mem::replace(&mut self.counted, empty)
    }

    fn count_to(&mut self, now: Nanos) {
        let span = now.since(self.changed);
        for (sum, outstanding) in self.counted.outstanding_ns.iter_mut().zip(&self.outstanding) {
            *sum += u128::from(span.0) * u128::from(*outstanding);
        }
        self.changed = now;
    }

    /// The key of a number of this flow's.
    fn key(&self, number: u32) -> Key {
        assert!(number < u32::MAX / FLOWS_MAX, "no more keys");
        key_of(self.flow * (u32::MAX / FLOWS_MAX) + number)
    }

    fn choose(&self, random: &mut Random) -> usize {
        let fewest = || (0..self.outstanding.len()).min_by_key(|&at| self.outstanding[at]).unwrap_or(0);
        match &self.placement {
            Placement::InOrder(threshold) => {
                let has_room = |outstanding: &u64| *outstanding < *threshold as u64;
                self.outstanding.iter().position(has_room).unwrap_or_else(fewest)
            }
            Placement::Shares(shares) => crate::client_host::draw(random, shares),
            Placement::One(connection) => *connection,
        }
    }
}

#[derive(Clone, Copy)]
struct Asked {
    at: Nanos,
    connection: usize,
    operation: Operation,
}

/// The client's reactor.
pub struct Client {
    session: Session<VirtualSockets>,
    handle: Handle,
    load: Rc<RefCell<Load>>,
    random: Random,
    value: Arc<[u8]>,
    /// By thread: what it waits for.
    threads: Vec<Option<Asked>>,
    done: Vec<(u64, Result<Answer, octokv_client::Error>)>,
}

/// A key: its number, multiplied by an odd one, so that keys that follow each other are no neighbours.
pub fn key_of(number: u32) -> Key {
    let bytes: [u8; KEY_BYTES] = number.wrapping_mul(0x9e37_79b1).to_be_bytes();
    Key::new(&bytes).expect("short")
}

impl Client {
    /// A client that asks what `load` says.
    pub fn new(
        session: Session<VirtualSockets>,
        handle: Handle,
        load: Rc<RefCell<Load>>,
        random: Random,
    ) -> Client {
        let value = vec![0; VALUE_BYTES].into();
        Client { session, handle, load, random, value, threads: Vec::new(), done: Vec::new() }
    }

    /// Does what there is to do now. False when there was nothing.
    pub fn turn(&mut self, now: Nanos) -> bool {
        self.handle.begin_turn(now);
        let mut busy = false;
        loop {
            let done = &mut self.done;
            let polled = self.session.poll(now, |token, answer| done.push((token, answer)));
            let moved = self.take_answers(now) | self.ask(now);
            busy |= polled | moved;
            if !moved {
                break;
            }
        }
        self.handle.want_turn_at(self.session.next_deadline());
        busy
    }

    fn take_answers(&mut self, now: Nanos) -> bool {
        let mut load = self.load.borrow_mut();
        load.live = self.session.is_live();
        if let Some(error) = self.session.ended() {
            load.failure.get_or_insert(format!("the session has ended: {error}"));
        }
        if self.done.is_empty() {
            return false;
        }
        load.count_to(now);
        for (token, answer) in self.done.drain(..) {
            let Some(asked) = self.threads[token as usize].take() else {
                load.failure.get_or_insert(format!("thread {token} was answered twice"));
                continue;
            };
            load.outstanding[asked.connection] -= 1;
            load.answered += 1;
            load.counted.answered += 1;
            load.counted.response_ns.push(now.since(asked.at).0 as u32);
            let is_well = match (&answer, asked.operation) {
                (Ok(Answer::Stored), Operation::Put) => true,
                (Ok(Answer::Value { data, .. }), Operation::Get) => data.len() == VALUE_BYTES,
                _ => false,
            };
            if !is_well {
                load.failure.get_or_insert(format!("{:?} was answered {answer:?}", asked.operation));
            }
        }
        true
    }

    fn ask(&mut self, now: Nanos) -> bool {
        let mut load = self.load.borrow_mut();
        if !load.live {
            return false;
        }
        let mut asked = false;
        let threads = load.threads;
        self.threads.resize(self.threads.len().max(threads), None);
        for thread in 0..threads {
            if load.asked >= load.allowed || self.threads[thread].is_some() {
                continue;
            }
            let connection = load.choose(&mut self.random);
            let command = match load.operation {
                Operation::Put => {
                    let key = load.key(load.stored);
                    load.stored += 1;
                    Command::Store {
                        key,
                        value: Value::Shared(Arc::clone(&self.value)),
                        mode: StoreMode::Upsert,
                    }
                }
                Operation::Get => {
                    let key = load.key(self.random.below(u64::from(load.stored.max(1))) as u32);
                    Command::Retrieve { key, limit_bytes: VALUE_BYTES as u32 }
                }
            };
            if let Err(why) = self.session.submit_on(load.queues[connection], command, thread as u64) {
                load.failure.get_or_insert(format!("a command was not taken: {why:?}"));
                return asked;
            }
            load.count_to(now);
            load.outstanding[connection] += 1;
            load.asked += 1;
            self.threads[thread] = Some(Asked { at: now, connection, operation: load.operation });
            asked = true;
        }
        asked
    }
}
