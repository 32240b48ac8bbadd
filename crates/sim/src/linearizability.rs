//! Whether what clients saw of one key can be explained by some order of their calls.
//!
//! In: what the key held at first and the calls of a segment. Out: whether an order explains them. The
//! search is Wing and Gong's (1993) with Lowe's memory of states (2017), made quick by what is known here:
//! values are unique, so a value that somebody has yet to read must not be overwritten; a call that changes
//! nothing is taken as soon as it agrees; a write of unknown outcome is taken only when a call in line
//! does not agree otherwise.
//! Tested by a table below.

use crate::history::{Call, CallRecord, CallResult, History, KeyState, Observed};
use octokv_base::map::{FxHashMap, FxHashSet};
use octokv_wire::kv::StoreMode;

/// What the search found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CheckResult {
    /// An order.
    Linearizable,
    /// That there is none.
    NotLinearizable,
    /// Nothing within its bounds.
    Undecided,
}

/// The most states that a search looks at.
const STATES_MAX: usize = 100_000;

/// Calls taken so far: the known ones before `low` and those of `rest`; of the unknown ones `used`.
#[derive(Clone, PartialEq, Eq, Hash)]
struct SearchState {
    prefix_len: usize,
    taken_beyond_prefix: Vec<usize>,
    taken_unknown: Vec<usize>,
    state: KeyState,
}

struct LinearizabilitySearch {
    known: Vec<CallRecord>,
    unknown: Vec<CallRecord>,
    /// Who reads the value of an operation.
    readers: FxHashMap<u64, Vec<usize>>,
}

/// Looks for an order of a key's calls.
pub fn check_linearizable(start: KeyState, events: &[CallRecord]) -> CheckResult {
    let mut search =
        LinearizabilitySearch { known: Vec::new(), unknown: Vec::new(), readers: FxHashMap::default() };
    for event in events {
        match (event.outcome, event.call) {
            (Some(_), _) => search.known.push(*event),
            (None, Call::Put { .. } | Call::Delete | Call::Deallocate) => search.unknown.push(*event),
            (None, Call::Get | Call::Exist) => {}
        }
    }
    search.known.sort_by_key(|event| event.began);
    for (index, event) in search.known.iter().enumerate() {
        if let Some(CallResult::Observed(Observed::Value(operation))) = event.outcome {
            search.readers.entry(operation).or_default().push(index);
        }
    }
    search.run(start)
}

impl LinearizabilitySearch {
    fn run(&self, start: KeyState) -> CheckResult {
        let mut seen: FxHashSet<SearchState> = FxHashSet::default();
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
            if !seen.insert(taken.clone()) {
                continue;
            }
            if seen.len() > STATES_MAX {
                return CheckResult::Undecided;
            }
            self.branch_deallocations(&taken, &mut stack);
            if !self.has_pending_reader(&taken) {
                self.branch_writes(&taken, horizon, &mut stack);
            }
        }
        CheckResult::NotLinearizable
    }

    /// The known calls that may come next, and the moment before which they all began.
    fn candidates(&self, taken: &SearchState) -> (Vec<usize>, u64) {
        let (mut horizon, mut next) = (u64::MAX, Vec::new());
        for at in taken.prefix_len..self.known.len() {
            if taken.taken_beyond_prefix.contains(&at) {
                continue;
            }
            if self.known[at].began > horizon {
                break;
            }
            horizon = horizon.min(self.known[at].ended);
            next.push(at);
        }
        next.retain(|&at| self.known[at].began <= horizon);
        (next, horizon)
    }

    /// Takes every call that changes nothing and agrees.
    fn take_matching_reads(&self, taken: &mut SearchState) -> u64 {
        loop {
            let (next, horizon) = self.candidates(taken);
            let agrees = |&at: &usize| {
                let event = &self.known[at];
                is_reader(event) && apply_call(event, taken.state) == Some(taken.state)
            };
            let Some(at) = next.into_iter().find(agrees) else { return horizon };
            taken.take(at);
        }
    }

    /// Whether somebody reads the present value later: then nothing may overwrite it, and all who could
    /// read it now have.
    fn has_pending_reader(&self, taken: &SearchState) -> bool {
        let KeyState::Holds { operation, .. } = taken.state else { return false };
        let open = |&at: &usize| at >= taken.prefix_len && !taken.taken_beyond_prefix.contains(&at);
        self.readers.get(&operation).is_some_and(|readers| readers.iter().any(open))
    }

    /// A block that was given up may have stayed what it was.
    fn branch_deallocations(&self, taken: &SearchState, stack: &mut Vec<SearchState>) {
        for at in self.candidates(taken).0 {
            if self.known[at].call == Call::Deallocate {
                let mut then = taken.clone();
                then.take(at);
                stack.push(then);
            }
        }
    }

    fn branch_writes(&self, taken: &SearchState, horizon: u64, stack: &mut Vec<SearchState>) {
        let (mut next, _) = self.candidates(taken);
        next.sort_by_key(|&at| std::cmp::Reverse(self.known[at].ended));
        let blocked = next.iter().any(|&at| apply_call(&self.known[at], taken.state).is_none());
        let mut wanted = Vec::new();
        for (at, event) in self.unknown.iter().enumerate() {
            if !blocked || event.began > horizon || taken.taken_unknown.contains(&at) {
                continue;
            }
            let Some(state) = apply_call(event, taken.state).filter(|state| *state != taken.state) else {
                continue;
            };
            let mut then = SearchState { state, ..taken.clone() };
            then.taken_unknown.push(at);
            then.taken_unknown.sort_unstable();
            let is_read =
                matches!(event.call, Call::Put { operation, .. } if self.readers.contains_key(&operation));
            if is_read { wanted.push(then) } else { stack.push(then) }
        }
        for at in next {
            if let Some(state) = apply_call(&self.known[at], taken.state) {
                let mut then = SearchState { state, ..taken.clone() };
                then.take(at);
                stack.push(then);
            }
        }
        // Looked at first.
        stack.append(&mut wanted);
    }
}

impl SearchState {
    fn take(&mut self, at: usize) {
        let position = self.taken_beyond_prefix.partition_point(|&other| other < at);
        self.taken_beyond_prefix.insert(position, at);
        let run = self
            .taken_beyond_prefix
            .iter()
            .zip(self.prefix_len..)
            .take_while(|&(&at, low)| at == low)
            .count();
        self.taken_beyond_prefix.drain(..run);
        self.prefix_len += run;
    }
}

fn is_reader(event: &CallRecord) -> bool {
    matches!(event.outcome, Some(CallResult::Observed(_) | CallResult::ConditionFailed))
}

/// What the key holds after a call, or `None` when the call does not agree with what it holds.
fn apply_call(event: &CallRecord, state: KeyState) -> Option<KeyState> {
    let missing = state == KeyState::Missing;
    match (event.call, event.outcome) {
        (Call::Put { mode, .. }, Some(CallResult::ConditionFailed)) => match mode {
            StoreMode::Upsert => None,
            StoreMode::AddOnly => (!missing).then_some(state),
            StoreMode::UpdateOnly => missing.then_some(state),
        },
        (Call::Put { operation, bytes, mode }, _) => {
            let fits = match mode {
                StoreMode::Upsert => true,
                StoreMode::AddOnly => missing,
                StoreMode::UpdateOnly => !missing,
            };
            fits.then_some(KeyState::Holds { operation, bytes })
        }
        (Call::Delete, Some(CallResult::ConditionFailed)) => missing.then_some(state),
        (Call::Delete | Call::Deallocate, _) => Some(KeyState::Missing),
        (Call::Get, Some(CallResult::Observed(seen))) => observation_matches(seen, state).then_some(state),
        // The length may be whole where the value is not, and a listing passes over what has no key left.
        (Call::Exist, Some(CallResult::Observed(seen))) => {
            (state == KeyState::Damaged || observation_matches(seen, state)).then_some(state)
        }
        (Call::Get | Call::Exist, _) => None,
    }
}

fn observation_matches(seen: Observed, state: KeyState) -> bool {
    match (seen, state) {
        (Observed::Absent, KeyState::Missing) | (Observed::Damaged, KeyState::Damaged) => true,
        (Observed::Present, KeyState::Holds { .. } | KeyState::Damaged) => true,
        (Observed::Value(saw), KeyState::Holds { operation, .. }) => saw == operation,
        (Observed::Length(saw), KeyState::Holds { bytes, .. }) => saw == bytes,
        (Observed::NotValue(saw), KeyState::Holds { operation, .. }) => saw != operation,
        (Observed::NotValue(_), KeyState::Missing | KeyState::Damaged) => true,
        _ => false,
    }
}

/// What a key that held one of `starts` may hold after a power cut that may lose what was acknowledged and not flushed: whatever was
/// stored, less what was surely replaced before an acknowledged flush began, or by what was acknowledged as durable.
pub fn crash_survivors(starts: &[KeyState], events: &[CallRecord], flushes: &[u64]) -> Vec<KeyState> {
    let last_flush = flushes.iter().copied().max().unwrap_or(0);
    let is_write = |event: &&CallRecord| {
        matches!(event.call, Call::Put { .. } | Call::Delete | Call::Deallocate)
            && event.outcome != Some(CallResult::ConditionFailed)
    };
    let writes: Vec<&CallRecord> = events.iter().filter(is_write).collect();
    let replaced = |ended: u64| {
        let lasts = |by: &CallRecord| by.outcome.is_some() && (by.ended < last_flush || by.durable);
        // What was given up may be there still.
        writes.iter().any(|by| by.call != Call::Deallocate && by.began > ended && lasts(by))
    };
    let mut survivors = Vec::new();
    if !replaced(0) {
        survivors.extend_from_slice(starts);
    }
    for write in &writes {
        if write.outcome.is_none() || !replaced(write.ended) {
            survivors.push(match write.call {
                Call::Put { operation, bytes, .. } => KeyState::Holds { operation, bytes },
                _ => KeyState::Missing,
            });
        }
    }
    survivors
}

/// Whether a state is one of several; all empty values are alike.
pub fn matches_any(state: KeyState, several: &[KeyState]) -> bool {
    let is_empty = |state: &KeyState| matches!(state, KeyState::Holds { bytes: 0, .. });
    several.contains(&state) || (is_empty(&state) && several.iter().any(is_empty))
}

/// Error text for a history that is not linearizable: its last 60 calls.
pub(crate) fn describe_violation(history: &History, key: usize, events: &[CallRecord]) -> String {
    let mut text = format!("not linearizable: the calls of {}", history.keys()[key]);
    text.push_str(&format!(", which initially held {:?}:\n", history.starts()[key]));
    let mut sorted = events.to_vec();
    sorted.sort_by_key(|event| event.began);
    for event in &sorted[sorted.len().saturating_sub(60)..] {
        let ended = if event.ended == u64::MAX { "never".to_owned() } else { event.ended.to_string() };
        text.push_str(&format!(
            "  {:>7} to {ended:>7}  {:?} -> {:?}\n",
            event.began, event.call, event.outcome
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const NEVER: u64 = u64::MAX;

    fn put(operation: u64) -> Call {
        Call::Put { operation, bytes: 10, mode: StoreMode::Upsert }
    }

    fn add(operation: u64) -> Call {
        Call::Put { operation, bytes: 10, mode: StoreMode::AddOnly }
    }

    fn is_linearizable(calls: &[(u64, u64, Call, Option<CallResult>)]) -> bool {
        let event =
            |&(began, ended, call, outcome): &_| CallRecord { call, outcome, began, ended, durable: false };
        let events: Vec<CallRecord> = calls.iter().map(event).collect();
        match check_linearizable(KeyState::Missing, &events) {
            CheckResult::Linearizable => true,
            CheckResult::NotLinearizable => false,
            CheckResult::Undecided => panic!("{calls:?}"),
        }
    }

    #[test]
    fn linearizable_histories_are_accepted_and_others_rejected() {
        use Call::{Delete, Exist, Get};
        let done = Some(CallResult::Acknowledged);
        let refused = Some(CallResult::ConditionFailed);
        let saw = |seen| Some(CallResult::Observed(seen));
        let value = |operation| saw(Observed::Value(operation));
        let nothing = saw(Observed::Absent);
        type Row<'a> = (bool, &'a [(u64, u64, Call, Option<CallResult>)]);
        let rows: [Row; 14] = [
            (true, &[(1, 2, put(1), done), (3, 4, Get, value(1))]),
            (false, &[(1, 2, put(1), done), (3, 4, Get, nothing)]),
            // Overlapping: either value, but not back again.
            (true, &[(1, 9, put(1), done), (2, 3, Get, nothing), (4, 5, Get, value(1))]),
            (false, &[(1, 9, put(1), done), (2, 3, Get, value(1)), (4, 5, Get, nothing)]),
            // Unknown outcomes may have happened, late, or never.
            (true, &[(1, NEVER, put(1), None), (5, 6, Get, value(1))]),
            (true, &[(1, NEVER, put(1), None), (5, 6, Get, nothing)]),
            (false, &[(1, NEVER, put(1), None), (2, 3, Get, value(1)), (4, 5, Get, nothing)]),
            (
                true,
                &[
                    (1, NEVER, put(1), None),
                    (2, 3, Get, value(1)),
                    (4, NEVER, Delete, None),
                    (5, 6, Get, nothing),
                ],
            ),
            // Nobody reads the future.
            (false, &[(1, 2, Get, value(1)), (3, 4, put(1), done)]),
            // What modes ask for.
            (
                true,
                &[(1, 2, add(1), done), (3, 4, add(2), refused), (5, 6, Delete, done), (7, 8, add(3), done)],
            ),
            (false, &[(1, 2, add(1), done), (3, 4, add(2), done)]),
            (
                true,
                &[
                    (1, 2, put(1), done),
                    (3, NEVER, Delete, None),
                    (4, NEVER, add(2), None),
                    (5, 6, Get, value(2)),
                ],
            ),
            // Lengths and existence.
            (true, &[(1, 2, put(1), done), (3, 4, Exist, saw(Observed::Length(10)))]),
            (false, &[(1, 2, put(1), done), (3, 4, Exist, saw(Observed::Length(11)))]),
        ];
        for (row, (want, calls)) in rows.iter().enumerate() {
            assert_eq!(is_linearizable(calls), *want, "row {row}");
        }
    }

    #[test]
    fn many_concurrent_writes_are_checked_quickly() {
        let mut calls = Vec::new();
        for at in 0..40 {
            calls.push((1 + at, 1_000 + at, put(at + 1), Some(CallResult::Acknowledged)));
        }
        for at in 0..40 {
            calls.push((
                100 + 2 * at,
                101 + 2 * at,
                Call::Get,
                Some(CallResult::Observed(Observed::Value(40 - at))),
            ));
        }
        assert!(is_linearizable(&calls));
        calls.push((200, 201, Call::Get, Some(CallResult::Observed(Observed::Value(7)))));
        assert!(!is_linearizable(&calls));
    }

    #[test]
    fn only_flushed_or_durable_writes_survive_a_power_loss() {
        let event = |operation, began, ended| CallRecord {
            call: put(operation),
            outcome: Some(CallResult::Acknowledged),
            began,
            ended,
            durable: false,
        };
        let events = [event(1, 1, 2), event(2, 3, 4)];
        let value = |operation| KeyState::Holds { operation, bytes: 10 };
        assert_eq!(
            crash_survivors(&[KeyState::Missing], &events, &[]),
            [KeyState::Missing, value(1), value(2)]
        );
        assert_eq!(crash_survivors(&[KeyState::Missing], &events, &[3]), [value(1), value(2)]);
        assert_eq!(crash_survivors(&[KeyState::Missing], &events, &[5]), [value(2)]);
        let durable = [event(1, 1, 2), CallRecord { durable: true, ..event(2, 3, 4) }, event(3, 5, 6)];
        assert_eq!(crash_survivors(&[KeyState::Missing], &durable, &[]), [value(2), value(3)]);
        let given_up =
            [event(1, 1, 2), CallRecord { call: Call::Deallocate, durable: true, ..event(2, 3, 4) }];
        assert_eq!(crash_survivors(&[KeyState::Missing], &given_up, &[3]), [value(1), KeyState::Missing]);
    }

    #[test]
    fn a_deallocated_block_is_zeroed_or_unchanged() {
        use Call::{Deallocate, Get};
        let done = Some(CallResult::Acknowledged);
        let saw = |seen| Some(CallResult::Observed(seen));
        let (one, two, nothing) = (saw(Observed::Value(1)), saw(Observed::Value(2)), saw(Observed::Absent));
        assert!(is_linearizable(&[(1, 2, put(1), done), (3, 4, Deallocate, done), (5, 6, Get, one)]));
        assert!(is_linearizable(&[(1, 2, put(1), done), (3, 4, Deallocate, done), (5, 6, Get, nothing)]));
        // Once it is zero it is no more what it was, and it is not zeroed later.
        assert!(!is_linearizable(&[
            (1, 2, put(1), done),
            (3, 4, Deallocate, done),
            (5, 6, Get, nothing),
            (7, 8, Get, one)
        ]));
        assert!(!is_linearizable(&[
            (1, 2, put(1), done),
            (3, 4, Deallocate, done),
            (5, 6, put(2), done),
            (7, 8, Get, nothing)
        ]));
        // Beside a write, after which it may come.
        assert!(is_linearizable(&[
            (1, 2, put(1), done),
            (3, 9, Deallocate, done),
            (4, 5, Get, one),
            (6, 7, put(2), done),
            (10, 11, Get, nothing)
        ]));
        assert!(is_linearizable(&[
            (1, 2, put(1), done),
            (3, 9, Deallocate, done),
            (4, 5, put(2), done),
            (10, 11, Get, two)
        ]));
        assert!(is_linearizable(&[(1, 2, put(1), done), (3, 4, Get, saw(Observed::NotValue(2)))]));
        assert!(!is_linearizable(&[(1, 2, put(1), done), (3, 4, Get, saw(Observed::NotValue(1)))]));
    }
}
