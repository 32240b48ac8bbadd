//! Linearizability checker: each key is a register, and the calls on it must have a legal sequential order.
//!
//! In: the initial state of a key and its calls, with the event numbers of their beginnings and ends. Out: a
//! [`CheckResult`]. The search is Wing and Gong's (1993) with Lowe's cache of visited states (2017). Three rules
//! prune it: values are unique, so a value with a pending read must not be overwritten; a read is taken as soon as it
//! matches the state; a write of unknown outcome is taken only if a candidate call does not match the state otherwise.
//! Of writes that no call can tell apart only one is tried: of those with a result the one that ended first, of the others
//! the one that began first. In a legal order with another one of them the two can change places.
//!
//! Invariants: a write of unknown outcome may take effect at any time after its beginning, or never; a read of unknown
//! outcome constrains nothing. The search visits at most [`STATES_MAX`] states and then returns
//! [`CheckResult::Undecided`], which callers must not treat as success.
//! Tested by tables below.

use crate::PutMode;
use octokv_base::map::{FxHashMap, FxHashSet};
use octokv_base::{Key, Version};
use std::collections::BTreeMap;
use std::fmt;

/// State of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KeyState {
    /// No value.
    Missing,
    /// The value of a put.
    Holds {
        /// Number of the put operation.
        operation: u64,
        /// Length of the value.
        bytes: u32,
    },
    /// A record with an injected bit flip.
    Corrupt,
}

/// A call on one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Stores a value.
    Put {
        /// Number of the operation, unique in a history; the value contains it.
        operation: u64,
        /// Length of the value.
        bytes: u32,
        /// Condition of the store.
        mode: PutMode,
    },
    /// Deletes the key, which must exist: an engine's delete.
    Delete,
    /// Removes the value, if any: a Delete by a host, for which a missing key is no error unless the host enables it (feature
    /// 20h); Write Zeroes of a block.
    Clear,
    /// Deallocates a block: it is zeroed or unchanged afterwards.
    Deallocate,
    /// Reads the value.
    Get,
    /// Reads whether the key exists; a list is one such call per key.
    Exist,
}

/// Result of a read.
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
    /// Anything but the value of this operation.
    NotValue(u64),
    /// An unreadable value.
    Corrupt,
}

/// Result of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallResult {
    /// The write was acknowledged.
    Acknowledged,
    /// The write failed because its condition does not hold: that of a put's mode, or that a deleted key exists.
    ConditionFailed,
    /// Result of a read.
    Observed(Observed),
}

/// One call with its interval.
#[derive(Clone, Copy, Debug)]
pub struct CallRecord {
    /// The call.
    pub call: Call,
    /// Its result; `None` while unknown.
    pub outcome: Option<CallResult>,
    /// Event number of its beginning.
    pub began: u64,
    /// Event number of its end; `u64::MAX` while unknown.
    pub ended: u64,
    /// Whether its acknowledgement guarantees durability without a flush.
    pub durable: bool,
}

impl CallRecord {
    /// A call that began at this event and has no result yet.
    pub fn begin(call: Call, began: u64) -> CallRecord {
        CallRecord { call, outcome: None, began, ended: u64::MAX, durable: false }
    }
}

/// Verdict of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckResult {
    /// A legal order exists.
    Linearizable,
    /// No legal order exists.
    NotLinearizable,
    /// The search exceeded [`STATES_MAX`]: nothing is known.
    Undecided,
}

/// Maximum number of states that a search visits; bounds its memory and time.
pub const STATES_MAX: usize = 100_000;

/// The operation of a value that no call names.
const NO_OPERATION: u64 = u64::MAX;

/// Searches a legal order of the calls of one key.
pub fn check_linearizable(start: KeyState, calls: &[CallRecord]) -> CheckResult {
    check_bounded(start, calls, STATES_MAX)
}

fn check_bounded(start: KeyState, calls: &[CallRecord], states_max: usize) -> CheckResult {
    let mut search = Search::default();
    for record in calls {
        match (record.outcome, record.call) {
            (Some(_), _) => search.known.push(*record),
            (None, Call::Put { .. } | Call::Delete | Call::Clear | Call::Deallocate) => {
                search.unknown.push(*record);
            }
            (None, Call::Get | Call::Exist) => {}
        }
    }
    search.known.sort_by_key(|record| record.began);
    search.unknown.sort_by_key(|record| record.began);
    for (index, record) in search.known.iter().enumerate() {
        if let Some(CallResult::Observed(Observed::Value(operation))) = record.outcome {
            search.readers.entry(operation).or_default().push(index);
        }
        if let Some(CallResult::Observed(Observed::NotValue(operation))) = record.outcome {
            search.told_apart.insert(operation);
        }
    }
    search.has_versions =
        calls.iter().any(|record| matches!(record.call, Call::Put { mode: PutMode::IfVersion(_), .. }));
    search.run(start, states_max)
}

/// What a write does that no call names.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AnonymousEffect {
    /// It removes the value, which exists if the outcome is known.
    Removes,
    /// It removes the value, if any.
    Clears,
    /// It removes the value, or does nothing.
    Deallocates,
    /// It stores a value of this length, which is never read.
    Stores {
        /// In bytes.
        bytes: u32,
    },
}

/// The set of calls already ordered, and the state after them.
#[derive(Clone, PartialEq, Eq, Hash)]
struct SearchState {
    /// All known calls with an index below this one are ordered.
    prefix_len: usize,
    /// Indices of the other ordered known calls, ascending, all greater than `prefix_len`.
    taken_beyond_prefix: Vec<usize>,
    /// Indices of the ordered calls of unknown outcome, ascending.
    taken_unknown: Vec<usize>,
    state: KeyState,
}

#[derive(Default)]
struct Search {
    /// Calls with a result, by their beginning.
    known: Vec<CallRecord>,
    /// Writes of unknown outcome, by their beginning.
    unknown: Vec<CallRecord>,
    /// Operations that a known read says the value is not of.
    told_apart: FxHashSet<u64>,
    /// Whether a call names the version of a value, and so its operation.
    has_versions: bool,
    /// Indices of the known reads of the value of an operation.
    readers: FxHashMap<u64, Vec<usize>>,
}

impl Search {
    fn run(&self, start: KeyState, states_max: usize) -> CheckResult {
        let mut visited: FxHashSet<SearchState> = FxHashSet::default();
        let mut stack = vec![SearchState {
            prefix_len: 0,
            taken_beyond_prefix: Vec::new(),
            taken_unknown: Vec::new(),
            state: start,
        }];
        while let Some(mut taken) = stack.pop() {
            let horizon = self.take_matching_reads(&mut taken);
            if taken.prefix_len == self.known.len() {
                return CheckResult::Linearizable;
            }
            if !visited.insert(taken.clone()) {
                continue;
            }
            if visited.len() > states_max {
                return CheckResult::Undecided;
            }
            self.branch_deallocations(&taken, &mut stack);
            if !self.has_pending_reader(&taken) {
                self.branch_writes(&taken, horizon, &mut stack);
            }
        }
        CheckResult::NotLinearizable
    }

    /// The known calls that may come next: those that began before the returned event, the first end among the calls
    /// not taken yet.
    fn candidates(&self, taken: &SearchState) -> (Vec<usize>, u64) {
        let (mut horizon, mut next) = (u64::MAX, Vec::new());
        for index in taken.prefix_len..self.known.len() {
            if taken.taken_beyond_prefix.contains(&index) {
                continue;
            }
            if self.known[index].began > horizon {
                break;
            }
            horizon = horizon.min(self.known[index].ended);
            next.push(index);
        }
        next.retain(|&index| self.known[index].began <= horizon);
        (next, horizon)
    }

    /// Takes every candidate without effect that matches the state. Returns the horizon of the remaining candidates.
    fn take_matching_reads(&self, taken: &mut SearchState) -> u64 {
        loop {
            let (next, horizon) = self.candidates(taken);
            let matches = |&index: &usize| {
                let record = &self.known[index];
                has_no_effect(record) && apply_call(record, taken.state) == Some(taken.state)
            };
            let Some(index) = next.into_iter().find(matches) else { return horizon };
            taken.take(index);
        }
    }

    /// Whether a read of the present value is not taken yet: then no write may come first.
    fn has_pending_reader(&self, taken: &SearchState) -> bool {
        let KeyState::Holds { operation, .. } = taken.state else { return false };
        let is_pending =
            |&index: &usize| index >= taken.prefix_len && !taken.taken_beyond_prefix.contains(&index);
        self.readers.get(&operation).is_some_and(|readers| readers.iter().any(is_pending))
    }

    /// Branches on a deallocation that leaves the block unchanged.
    fn branch_deallocations(&self, taken: &SearchState, stack: &mut Vec<SearchState>) {
        let candidates = self.candidates(taken).0.into_iter();
        let deallocations = candidates.filter(|&index| self.known[index].call == Call::Deallocate);
        if let Some(index) = deallocations.min_by_key(|&index| self.known[index].ended) {
            let mut successor = taken.clone();
            successor.take(index);
            stack.push(successor);
        }
    }

    /// The state after a call; the operation of a value that no call names is left out.
    fn apply(&self, record: &CallRecord, state: KeyState) -> Option<KeyState> {
        let next = apply_call(record, state)?;
        match (next, self.anonymous_effect(record)) {
            (KeyState::Holds { bytes, .. }, Some(AnonymousEffect::Stores { .. })) => {
                Some(KeyState::Holds { operation: NO_OPERATION, bytes })
            }
            _ => Some(next),
        }
    }

    /// Keeps one of the writes among the candidates that no call can tell apart: the one that ended first.
    fn keep_first_of_equals(&self, candidates: &mut Vec<usize>) {
        candidates.sort_by_key(|&index| self.known[index].ended);
        let mut seen_effects = Vec::new();
        candidates.retain(|&index| match self.anonymous_effect(&self.known[index]) {
            Some(effect) if seen_effects.contains(&effect) => false,
            Some(effect) => {
                seen_effects.push(effect);
                true
            }
            None => true,
        });
    }

    /// The effect of a write, if no call can tell it from another write with the same effect.
    fn anonymous_effect(&self, record: &CallRecord) -> Option<AnonymousEffect> {
        if has_no_effect(record) {
            return None;
        }
        match record.call {
            Call::Delete => Some(AnonymousEffect::Removes),
            Call::Clear => Some(AnonymousEffect::Clears),
            Call::Deallocate => Some(AnonymousEffect::Deallocates),
            Call::Put { operation, bytes, mode: PutMode::Upsert }
                if !self.has_versions
                    && !self.readers.contains_key(&operation)
                    && !self.told_apart.contains(&operation) =>
            {
                Some(AnonymousEffect::Stores { bytes })
            }
            _ => None,
        }
    }

    /// Branches on every candidate that matches the state, and on writes of unknown outcome if one does not.
    fn branch_writes(&self, taken: &SearchState, horizon: u64, stack: &mut Vec<SearchState>) {
        let (mut next, _) = self.candidates(taken);
        let blocked = next.iter().any(|&index| apply_call(&self.known[index], taken.state).is_none());
        self.keep_first_of_equals(&mut next);
        next.reverse();
        let mut with_reader = Vec::new();
        let mut seen_effects = Vec::new();
        for (index, record) in self.unknown.iter().enumerate() {
            if !blocked || record.began > horizon || taken.taken_unknown.contains(&index) {
                continue;
            }
            if let Some(effect) = self.anonymous_effect(record) {
                if seen_effects.contains(&effect) {
                    continue;
                }
                seen_effects.push(effect);
            }
            let Some(state) = self.apply(record, taken.state).filter(|state| *state != taken.state) else {
                continue;
            };
            let mut successor = SearchState { state, ..taken.clone() };
            successor.taken_unknown.push(index);
            successor.taken_unknown.sort_unstable();
            let is_read =
                matches!(record.call, Call::Put { operation, .. } if self.readers.contains_key(&operation));
            if is_read { with_reader.push(successor) } else { stack.push(successor) }
        }
        for index in next {
            if let Some(state) = self.apply(&self.known[index], taken.state) {
                let mut successor = SearchState { state, ..taken.clone() };
                successor.take(index);
                stack.push(successor);
            }
        }
        // On top of the stack: a write that a read has observed did take effect.
        stack.append(&mut with_reader);
    }
}

impl SearchState {
    /// Adds a known call, and moves calls into the prefix that are now contiguous with it.
    fn take(&mut self, index: usize) {
        let position = self.taken_beyond_prefix.partition_point(|&other| other < index);
        self.taken_beyond_prefix.insert(position, index);
        let run = self
            .taken_beyond_prefix
            .iter()
            .zip(self.prefix_len..)
            .take_while(|&(&index, low)| index == low)
            .count();
        self.taken_beyond_prefix.drain(..run);
        self.prefix_len += run;
    }
}

fn has_no_effect(record: &CallRecord) -> bool {
    matches!(record.outcome, Some(CallResult::Observed(_) | CallResult::ConditionFailed))
}

/// The state after a call, or `None` if its result does not match the state before it.
fn apply_call(record: &CallRecord, state: KeyState) -> Option<KeyState> {
    let missing = state == KeyState::Missing;
    match (record.call, record.outcome) {
        (Call::Put { mode, .. }, Some(CallResult::ConditionFailed)) => match mode {
            PutMode::Upsert => None,
            PutMode::AddOnly => (!missing).then_some(state),
            PutMode::UpdateOnly => missing.then_some(state),
            PutMode::IfVersion(expected) => (version_of(state) != Some(expected)).then_some(state),
        },
        (Call::Put { operation, bytes, mode }, _) => {
            let condition_holds = match mode {
                PutMode::Upsert => true,
                PutMode::AddOnly => missing,
                PutMode::UpdateOnly => !missing,
                PutMode::IfVersion(expected) => version_of(state).is_none_or(|version| version == expected),
            };
            condition_holds.then_some(KeyState::Holds { operation, bytes })
        }
        (Call::Delete, Some(CallResult::ConditionFailed)) => missing.then_some(state),
        (Call::Delete, Some(_)) => (!missing).then_some(KeyState::Missing),
        (Call::Delete, None) | (Call::Clear | Call::Deallocate, _) => Some(KeyState::Missing),
        (Call::Get, Some(CallResult::Observed(seen))) => observation_matches(seen, state).then_some(state),
        // A corrupt record may have an intact length, and a list skips a record without a key.
        (Call::Exist, Some(CallResult::Observed(seen))) => {
            (state == KeyState::Corrupt || observation_matches(seen, state)).then_some(state)
        }
        (Call::Get | Call::Exist, _) => None,
    }
}

/// The version of a key in a history whose writes have the numbers of their operations as versions; `None` if unknown.
fn version_of(state: KeyState) -> Option<Version> {
    match state {
        KeyState::Missing => Some(Version::NONE),
        KeyState::Holds { operation, .. } => Some(Version::from_bits(operation)),
        _ => None,
    }
}

fn observation_matches(seen: Observed, state: KeyState) -> bool {
    match (seen, state) {
        (Observed::Absent, KeyState::Missing) | (Observed::Corrupt, KeyState::Corrupt) => true,
        (Observed::Present, KeyState::Holds { .. } | KeyState::Corrupt) => true,
        (Observed::Value(read), KeyState::Holds { operation, .. }) => read == operation,
        (Observed::Length(read), KeyState::Holds { bytes, .. }) => read == bytes,
        (Observed::NotValue(read), KeyState::Holds { operation, .. }) => read != operation,
        (Observed::NotValue(_), KeyState::Missing | KeyState::Corrupt) => true,
        _ => false,
    }
}

/// Calls on many keys, all initially missing, in the order of their beginnings.
#[derive(Default)]
pub struct CallHistory {
    clock: u64,
    keys: BTreeMap<Key, Vec<CallRecord>>,
}

/// Identifies a call that has begun.
pub struct CallId {
    key: Key,
    index: usize,
}

impl CallHistory {
    /// Records the beginning of a call.
    pub fn begin(&mut self, key: Key, call: Call) -> CallId {
        self.clock += 1;
        let calls = self.keys.entry(key.clone()).or_default();
        calls.push(CallRecord::begin(call, self.clock));
        CallId { key, index: calls.len() - 1 }
    }

    /// Records the result of a call. A call that never ends has an unknown outcome.
    ///
    /// # Panics
    /// If `id` is of another history.
    pub fn end(&mut self, id: CallId, result: CallResult) {
        self.clock += 1;
        let record = &mut self.keys.get_mut(&id.key).expect("the call began in this history")[id.index];
        (record.outcome, record.ended) = (Some(result), self.clock);
    }

    /// Checks every key.
    ///
    /// # Errors
    /// The first key whose calls are not linearizable, or whose search is undecided.
    pub fn check(&self) -> Result<(), LinearizabilityViolation> {
        for (key, calls) in &self.keys {
            let start = KeyState::Missing;
            let listing = || KeyCalls { key: key.clone(), start, calls: calls.clone() };
            match check_linearizable(start, calls) {
                CheckResult::Linearizable => {}
                CheckResult::NotLinearizable => {
                    return Err(LinearizabilityViolation::NotLinearizable(listing()));
                }
                CheckResult::Undecided => return Err(LinearizabilityViolation::Undecided(listing())),
            }
        }
        Ok(())
    }
}

/// The calls of one key, for error texts.
#[derive(Clone, Debug)]
pub struct KeyCalls {
    /// The key.
    pub key: Key,
    /// Its initial state.
    pub start: KeyState,
    /// Its calls, in any order; the text lists the last 60 by their beginnings.
    pub calls: Vec<CallRecord>,
}

/// Calls that the text of [`KeyCalls`] lists.
const LISTED_CALLS_MAX: usize = 60;

impl fmt::Display for KeyCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeyCalls { key, start, calls } = self;
        writeln!(f, "the calls of {key}, which initially held {start:?}:")?;
        let mut calls = calls.clone();
        calls.sort_by_key(|record| record.began);
        for record in &calls[calls.len().saturating_sub(LISTED_CALLS_MAX)..] {
            let CallRecord { call, outcome, began, ended, .. } = record;
            let ended = if *ended == u64::MAX { "never".to_owned() } else { ended.to_string() };
            writeln!(f, "  {began:>7} to {ended:>7}  {call:?} -> {outcome:?}")?;
        }
        Ok(())
    }
}

/// Why the check of a history failed.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LinearizabilityViolation {
    /// The calls of this key have no legal order.
    #[error("not linearizable: {0}")]
    NotLinearizable(KeyCalls),
    /// The search over the calls of this key exceeded [`STATES_MAX`].
    #[error("undecided after {STATES_MAX} states: {0}")]
    Undecided(KeyCalls),
}

#[cfg(test)]
#[path = "linearizability_tests.rs"]
mod tests;
