//! Calls and responses of all clients, by key, in the order of simulated events.
//!
//! A history covers one *segment*: from one audit to the next. An *audit* reads the value of every key from the
//! engine, not through clients. In: beginnings and ends of calls. Out: the calls of each key, input of
//! [`octokv_engine::linearizability`].
//! A call without an end has an unknown outcome: it takes effect at some time before the segment's end, or never.
//!
//! Invariants: the clock counts events, so no two events have the same time; calls of an earlier segment, and
//! calls begun while the node is down, do not change the history.

use octokv_base::Key;
use octokv_base::map::FxHashMap;
use octokv_base::prng::mix64;
use octokv_engine::conformance::value_of;
use octokv_engine::linearizability::{
    Call, CallRecord, CallResult, CheckResult, KeyCalls, KeyState, Observed, check_linearizable,
};

/// Identifies a call that has begun.
#[derive(Clone, Copy, Debug)]
pub struct CallId {
    segment: u64,
    key: usize,
    index: usize,
    began: u64,
}

/// The calls of the current segment, and the key states at its beginning.
pub struct History {
    clock: u64,
    segment: u64,
    /// Whether the node is running: calls begun while it is not are not recorded.
    pub node_is_up: bool,
    keys: Vec<Key>,
    initial_states: Vec<KeyState>,
    calls: Vec<Vec<CallRecord>>,
    /// Event numbers of the beginnings of acknowledged flushes.
    flushes: Vec<u64>,
    value_bytes: FxHashMap<u64, u32>,
    /// Operation numbers count from here.
    operations_before: u64,
    digest: u64,
}

const NO_KEY: usize = usize::MAX;

impl History {
    /// An empty history of these keys, all missing.
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
            operations_before: 0,
            digest: 0,
        }
    }

    /// The history of one node of several: its operations have numbers that those of the others do not have.
    pub fn of_node(keys: Vec<Key>, node: usize) -> History {
        History { operations_before: (node as u64) << 32, ..History::new(keys) }
    }

    /// The key space.
    pub fn keys(&self) -> &[Key] {
        &self.keys
    }

    /// State of each key at the beginning of the segment.
    pub fn starts(&self) -> &[KeyState] {
        &self.initial_states
    }

    /// Calls of the key at this index, by their beginning except for lists.
    pub fn events(&self, key: usize) -> &[CallRecord] {
        &self.calls[key]
    }

    /// Event numbers of the beginnings of acknowledged flushes.
    pub fn flushes(&self) -> &[u64] {
        &self.flushes
    }

    /// Hash of all events, to compare two runs.
    pub fn digest(&self) -> u64 {
        self.digest
    }

    fn tick(&mut self, fact: u64) -> u64 {
        self.clock += 1;
        self.digest = mix64(self.digest ^ fact);
        self.clock
    }

    /// Allocates the operation number of the next put, with a value of this length.
    pub fn next_operation(&mut self, bytes: u32) -> u64 {
        let operation = self.operations_before + self.value_bytes.len() as u64 + 1;
        self.value_bytes.insert(operation, bytes);
        operation
    }

    /// The operation whose value the last put of this segment wrote to a key, or the initial one; 0 for none or a
    /// deleted key.
    pub fn last_write(&self, key: usize) -> u64 {
        let last = self.calls[key].iter().rev().find_map(|event| match event.call {
            Call::Put { operation, .. } => Some(operation),
            Call::Delete | Call::Clear => Some(0),
            _ => None,
        });
        last.unwrap_or(match self.initial_states[key] {
            KeyState::Holds { operation, .. } => operation,
            KeyState::Missing | KeyState::Corrupt => 0,
        })
    }

    /// Records the beginning of a call.
    pub fn begin(&mut self, key: usize, call: Call) -> CallId {
        let began = self.tick(key as u64);
        if !self.node_is_up {
            return CallId { segment: u64::MAX, key, index: 0, began };
        }
        self.calls[key].push(CallRecord::begin(call, began));
        CallId { segment: self.segment, key, index: self.calls[key].len() - 1, began }
    }

    /// Records the beginning of a call without a key: a flush or list.
    pub fn begin_keyless(&mut self) -> CallId {
        let began = self.tick(1);
        CallId {
            segment: if self.node_is_up { self.segment } else { u64::MAX },
            key: NO_KEY,
            index: 0,
            began,
        }
    }

    /// Records the result of a call.
    ///
    /// # Errors
    /// If the call began while the node was down: no response is possible.
    pub fn end(&mut self, id: CallId, outcome: CallResult) -> Result<(), String> {
        let ended = self.tick(2);
        if id.segment == u64::MAX {
            return Err(format!("{}: a response to a call made while the node was down", self.keys[id.key]));
        }
        if id.segment == self.segment {
            let event = &mut self.calls[id.key][id.index];
            (event.outcome, event.ended) = (Some(outcome), ended);
        }
        Ok(())
    }

    /// Records the acknowledgement of a write that is durable without a flush.
    ///
    /// # Errors
    /// Those of [`History::end`].
    pub fn end_durable(&mut self, id: CallId) -> Result<(), String> {
        if id.segment == self.segment {
            self.calls[id.key][id.index].durable = true;
        }
        self.end(id, CallResult::Acknowledged)
    }

    /// Records that a call had no effect and returned no data.
    pub fn mark_not_executed(&mut self, id: CallId) {
        self.tick(3);
        if id.segment == self.segment {
            // A call without effect and result: consistent with every order.
            let event = &mut self.calls[id.key][id.index];
            (event.call, event.outcome) = (Call::Exist, None);
        }
    }

    /// Records the acknowledgement of a flush.
    pub fn record_flush(&mut self, id: CallId) {
        self.tick(4);
        if id.segment == self.segment {
            self.flushes.push(id.began);
        }
    }

    /// Records the state of a key as reported by the list that began as `id`.
    pub fn record_listing(&mut self, id: CallId, key: usize, seen: Observed) {
        let ended = self.tick(5);
        if id.segment == self.segment {
            let outcome = Some(CallResult::Observed(seen));
            let (call, began) = (Call::Exist, id.began);
            self.calls[key].push(CallRecord { call, outcome, began, ended, durable: false });
        }
    }

    /// The event number of the response of the call without a key that began as `id`, and of its beginning; `None` if the segment
    /// has ended.
    pub fn end_keyless(&mut self, id: CallId) -> Option<(u64, u64)> {
        let ended = self.tick(8);
        (id.segment == self.segment).then_some((id.began, ended))
    }

    /// Records the state of a key at a moment between two events, if the segment of `id` has not ended.
    pub fn record_snapshot_read(
        &mut self,
        id: CallId,
        (began, ended): (u64, u64),
        key: usize,
        seen: Observed,
    ) {
        self.tick(9);
        if id.segment == self.segment {
            let outcome = Some(CallResult::Observed(seen));
            self.calls[key].push(CallRecord { call: Call::Get, outcome, began, ended, durable: false });
        }
    }

    /// Records the result of an audit as the last read of the segment.
    pub fn record_audit(&mut self, found: &[KeyState]) {
        for (key, &state) in found.iter().enumerate() {
            let began = self.tick(6);
            let ended = self.tick(7);
            let seen = match state {
                KeyState::Missing => Observed::Absent,
                KeyState::Holds { bytes: 0, .. } => Observed::Length(0),
                KeyState::Holds { operation, .. } => Observed::Value(operation),
                KeyState::Corrupt => Observed::Corrupt,
            };
            let outcome = Some(CallResult::Observed(seen));
            self.calls[key].push(CallRecord { call: Call::Get, outcome, began, ended, durable: false });
        }
    }

    /// Checks that these calls of a key are linearizable. False if the search is undecided.
    ///
    /// # Errors
    /// The calls, if they are not linearizable.
    pub fn check(&self, key: usize, calls: &[CallRecord]) -> Result<bool, String> {
        match check_linearizable(self.initial_states[key], calls) {
            CheckResult::Linearizable => Ok(true),
            CheckResult::Undecided => Ok(false),
            CheckResult::NotLinearizable => Err(format!("not linearizable: {}", self.listing(key, calls))),
        }
    }

    /// The state of a key that holds this value.
    ///
    /// # Errors
    /// The mismatch, if no operation wrote this value to this key.
    pub fn state_of_value(&self, key: usize, value: &[u8]) -> Result<KeyState, String> {
        Ok(match self.identify_value(key, value, value.len() as u32)? {
            Observed::Value(operation) => {
                KeyState::Holds { operation, bytes: self.value_bytes_of(operation) }
            }
            _ => KeyState::Holds { operation: 0, bytes: 0 },
        })
    }

    /// Begins the next segment with the result of an audit.
    pub fn next_segment(&mut self, found: Vec<KeyState>) {
        self.segment += 1;
        self.initial_states = found;
        self.calls.iter_mut().for_each(Vec::clear);
        self.flushes.clear();
    }

    /// Checks the calls of the segment without an audit and begins the next one with every key missing: the storage was
    /// lost. Gives the number of undecided keys.
    ///
    /// # Errors
    /// The calls of a key, if they are not linearizable.
    pub fn end_segment_unaudited(&mut self) -> Result<u64, String> {
        let mut undecided = 0;
        for key in 0..self.keys.len() {
            undecided += u64::from(!self.check(key, &self.calls[key])?);
        }
        self.next_segment(vec![KeyState::Missing; self.keys.len()]);
        Ok(undecided)
    }

    /// The operation that wrote a value, from the value's prefix `front` and its full length.
    ///
    /// # Errors
    /// The mismatch, if no operation wrote this value to this key.
    pub fn identify_value(&self, key: usize, front: &[u8], full_bytes: u32) -> Result<Observed, String> {
        let name = &self.keys[key];
        if full_bytes == 0 {
            return Ok(Observed::Length(0));
        }
        let number: Option<[u8; 8]> = front.get(..8).and_then(|bytes| bytes.try_into().ok());
        let Some(number) = number else {
            return Err(format!("{name}: a value of {full_bytes} bytes, which no client stored"));
        };
        let operation = u64::from_le_bytes(number);
        let Some(&stored) = self.value_bytes.get(&operation) else {
            return Err(format!("{name}: a value of operation {operation}, which does not exist"));
        };
        if stored != full_bytes {
            return Err(format!("{name}: operation {operation} stored {stored} bytes, read {full_bytes}"));
        }
        let stored = value_of(name, operation, full_bytes as usize);
        match front.iter().zip(&stored).position(|(one, other)| one != other) {
            None => Ok(Observed::Value(operation)),
            Some(at) => Err(format!("{name}: byte {at} differs from the value of operation {operation}")),
        }
    }

    /// Length of the value of an operation.
    pub fn value_bytes_of(&self, operation: u64) -> u32 {
        self.value_bytes.get(&operation).copied().unwrap_or(0)
    }

    /// Index of the key with these bytes.
    pub fn key_index(&self, bytes: &[u8]) -> Option<usize> {
        self.keys.iter().position(|key| key.as_bytes() == bytes)
    }

    /// The calls of a key, or a part of them, for an error text.
    pub fn listing(&self, key: usize, calls: &[CallRecord]) -> KeyCalls {
        KeyCalls { key: self.keys[key].clone(), start: self.initial_states[key], calls: calls.to_vec() }
    }
}
