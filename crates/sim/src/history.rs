//! What clients asked and heard, key by key, in the order in which it happened.
//!
//! A history covers one *segment*: from a moment at which what every key holds was looked up past all
//! clients (an *audit*) to the next. In: beginnings and ends of calls. Out: for each key its calls,
//! for [`crate::register`] to explain. Calls without an end have an unknown outcome: they took effect
//! at some time before the segment's end, or never.
//!
//! Invariants: the clock counts events, so no two are at one time; a call of an earlier segment, or one
//! begun while the node was down, changes nothing here.

use octokv_base::Key;
use octokv_base::map::FxHashMap;
use octokv_base::prng::mix64;
use octokv_engine::conformance::value_of;
use octokv_wire::kv::StoreMode;

/// What a key holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyState {
    /// Nothing.
    Missing,
    /// The value that this operation stored.
    Holds {
        /// Which.
        operation: u64,
        /// Its length.
        bytes: u32,
    },
    /// A record that rot has hit.
    Damaged,
}

/// A call of a client on one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Stores a value.
    Put {
        /// The number of the operation, which its value tells.
        operation: u64,
        /// The value's length.
        bytes: u32,
        /// How.
        mode: StoreMode,
    },
    /// Deletes; of a block, zeroes it.
    Delete,
    /// Gives a block up: it may be zeroed by that, or stay what it is.
    Deallocate,
    /// Reads the value.
    Get,
    /// Asks whether there is one; lists do so, too.
    Exist,
}

/// What a reader saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Observed {
    /// No such key.
    Absent,
    /// The value of this operation.
    Value(u64),
    /// A value of this length.
    Length(u32),
    /// Some value.
    Present,
    /// Not the value of this operation.
    NotValue(u64),
    /// A value that cannot be read.
    Damaged,
}

/// What came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallResult {
    /// The write was acknowledged.
    Acknowledged,
    /// The write was refused, because of what its mode asks for.
    ConditionFailed,
    /// What was read.
    Observed(Observed),
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub struct CallRecord {
    /// What was called.
    pub call: Call,
    /// What came back; `None` while it is not known.
    pub outcome: Option<CallResult>,
    /// When.
    pub began: u64,
    /// When it came back; the end of time while it has not.
    pub ended: u64,
    /// Whether its end says that it survives a power cut, without a flush.
    pub durable: bool,
}

/// A call that has begun.
#[derive(Clone, Copy, Debug)]
pub struct CallId {
    segment: u64,
    key: usize,
    index: usize,
    began: u64,
}

/// A segment.
pub struct History {
    clock: u64,
    segment: u64,
    /// Whether the node is up: calls begun while it is not reach nobody.
    pub node_is_up: bool,
    keys: Vec<Key>,
    initial_states: Vec<KeyState>,
    calls: Vec<Vec<CallRecord>>,
    /// Flushes that were acknowledged: when they began.
    flushes: Vec<u64>,
    value_bytes: FxHashMap<u64, u32>,
    digest: u64,
}

const NO_KEY: usize = usize::MAX;

impl History {
    /// The history of these keys, none of which holds anything.
    pub fn new(keys: Vec<Key>) -> History {
        History {
            clock: 0,
            segment: 0,
            node_is_up: false,
            initial_states: vec![KeyState::Missing; keys.len()],
            calls: vec![Vec::new(); keys.len()],
            keys,
            flushes: Vec::new(),
            value_bytes: FxHashMap::default(),
            digest: 0,
        }
    }

    /// The keys.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// What the keys held when the segment began.
    pub fn starts(&self) -> &[KeyState] {
        &self.initial_states
    }

    /// The calls of a key.
    pub fn events(&self, key: usize) -> &[CallRecord] {
        &self.calls[key]
    }

    /// When acknowledged flushes began.
    pub fn flushes(&self) -> &[u64] {
        &self.flushes
    }

    /// A number that tells two histories apart.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    fn tick(&mut self, fact: u64) -> u64 {
        self.clock += 1;
        self.digest = mix64(self.digest ^ fact);
        self.clock
    }

    /// The number of the next put.
    pub fn next_operation(&mut self, bytes: u32) -> u64 {
        let operation = self.value_bytes.len() as u64 + 1;
        self.value_bytes.insert(operation, bytes);
        operation
    }

    /// The operation whose value was last asked to be put under a key in this segment, or was there when it began;
    /// 0 for none.
    pub fn last_write(&self, key: usize) -> u64 {
        let last = self.calls[key].iter().rev().find_map(|event| match event.call {
            Call::Put { operation, .. } => Some(operation),
            Call::Delete => Some(0),
            _ => None,
        });
        last.unwrap_or(match self.initial_states[key] {
            KeyState::Holds { operation, .. } => operation,
            KeyState::Missing | KeyState::Damaged => 0,
        })
    }

    /// Notes that a call begins.
    pub fn begin(&mut self, key: usize, call: Call) -> CallId {
        let began = self.tick(key as u64);
        if !self.node_is_up {
            return CallId { segment: u64::MAX, key, index: 0, began };
        }
        self.calls[key].push(CallRecord { call, outcome: None, began, ended: u64::MAX, durable: false });
        CallId { segment: self.segment, key, index: self.calls[key].len() - 1, began }
    }

    /// Notes that a call on no key in particular begins.
    pub fn begin_keyless(&mut self) -> CallId {
        let began = self.tick(1);
        CallId {
            segment: if self.node_is_up { self.segment } else { u64::MAX },
            key: NO_KEY,
            index: 0,
            began,
        }
    }

    /// Notes what came of a call. The error says what cannot be.
    pub fn end(&mut self, id: CallId, outcome: CallResult) -> Result<(), String> {
        let ended = self.tick(2);
        if id.segment == u64::MAX {
            return Err(format!("{}: an answer to a call made while the node was down", self.keys[id.key]));
        }
        if id.segment == self.segment {
            let event = &mut self.calls[id.key][id.index];
            (event.outcome, event.ended) = (Some(outcome), ended);
        }
        Ok(())
    }

    /// Notes that a write was acknowledged that survives a power cut by itself.
    pub fn end_durable(&mut self, id: CallId) -> Result<(), String> {
        if id.segment == self.segment {
            self.calls[id.key][id.index].durable = true;
        }
        self.end(id, CallResult::Acknowledged)
    }

    /// Notes that a call surely did nothing, and told nothing.
    pub fn mark_not_executed(&mut self, id: CallId) {
        self.tick(3);
        if id.segment == self.segment {
            // It began and ended at one moment, saying only what is always true.
            let event = &mut self.calls[id.key][id.index];
            (event.call, event.outcome) = (Call::Exist, None);
        }
    }

    /// Notes that a flush was acknowledged.
    pub fn record_flush(&mut self, id: CallId) {
        self.tick(4);
        if id.segment == self.segment {
            self.flushes.push(id.began);
        }
    }

    /// Notes what a listing that began as `id` said of a key.
    pub fn record_listing(&mut self, id: CallId, key: usize, seen: Observed) {
        let ended = self.tick(5);
        if id.segment == self.segment {
            let outcome = Some(CallResult::Observed(seen));
            let (call, began) = (Call::Exist, id.began);
            self.calls[key].push(CallRecord { call, outcome, began, ended, durable: false });
        }
    }

    /// Notes what an audit found: the last that is known of this segment.
    pub fn record_audit(&mut self, found: &[KeyState]) {
        for (key, &state) in found.iter().enumerate() {
            let began = self.tick(6);
            let ended = self.tick(7);
            let seen = match state {
                KeyState::Missing => Observed::Absent,
                KeyState::Holds { bytes: 0, .. } => Observed::Length(0),
                KeyState::Holds { operation, .. } => Observed::Value(operation),
                KeyState::Damaged => Observed::Damaged,
            };
            let outcome = Some(CallResult::Observed(seen));
            self.calls[key].push(CallRecord { call: Call::Get, outcome, began, ended, durable: false });
        }
    }

    /// Begins the next segment, from what an audit found.
    pub fn next_segment(&mut self, found: Vec<KeyState>) {
        self.segment += 1;
        self.initial_states = found;
        self.calls.iter_mut().for_each(Vec::clear);
        self.flushes.clear();
    }

    /// Which operation stored a value under a key, given the value's front and full length. The error says
    /// what is wrong with the bytes.
    pub fn identify_value(&self, key: usize, front: &[u8], full_bytes: u32) -> Result<Observed, String> {
        let name = &self.keys[key];
        if full_bytes == 0 {
            return Ok(Observed::Length(0));
        }
        let number: Option<[u8; 8]> = front.get(..8).and_then(|bytes| bytes.try_into().ok());
        let Some(number) = number else {
            return Err(format!("{name}: a value of {full_bytes} bytes, which nobody stored"));
        };
        let operation = u64::from_le_bytes(number);
        let Some(&stored) = self.value_bytes.get(&operation) else {
            return Err(format!("{name}: a value of operation {operation}, which never was"));
        };
        if stored != full_bytes {
            return Err(format!("{name}: operation {operation} stored {stored} bytes, {full_bytes} came"));
        }
        let stored = value_of(name, operation, full_bytes as usize);
        match front.iter().zip(&stored).position(|(one, other)| one != other) {
            None => Ok(Observed::Value(operation)),
            Some(at) => Err(format!("{name}: byte {at} is not what operation {operation} stored")),
        }
    }

    /// How long the value of an operation is.
    pub fn value_bytes_of(&self, operation: u64) -> u32 {
        self.value_bytes.get(&operation).copied().unwrap_or(0)
    }

    /// The key of these bytes.
    pub fn key_index(&self, bytes: &[u8]) -> Option<usize> {
        self.keys.iter().position(|key| key.as_bytes() == bytes)
    }
}
