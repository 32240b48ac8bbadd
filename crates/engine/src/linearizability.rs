//! Whether what concurrent callers saw of a key can be explained by some order of their calls.
//!
//! In: calls with the order of their beginnings and ends. Out: nothing, or the key without an explanation.
//! A key is a register; the search is Wing and Gong's (1993) with Lowe's memory of states (2017): take any
//! call that began before every open call ended, if the register agrees, and go on.
//! A write whose outcome is not known may have happened at any time after its beginning, or never.

use octokv_base::Key;
use octokv_base::map::FxHashSet;
use std::collections::BTreeMap;
use std::fmt;

/// What was called. Writes are told apart by a number; `None` deletes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Writes a value or deletes the key.
    Write(Option<u64>),
    /// Reads the key.
    Read,
}

/// What came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallOutcome {
    /// The write was acknowledged.
    Written,
    /// The read saw the value of this write, or no value.
    Read(Option<u64>),
}

#[derive(Clone, Copy, Debug)]
struct CallEvent {
    call: Call,
    outcome: Option<CallOutcome>,
    began: u64,
    ended: u64,
}

/// The calls of all keys.
#[derive(Default)]
pub struct CallHistory {
    clock: u64,
    keys: BTreeMap<Key, Vec<CallEvent>>,
}

/// A call that has begun.
pub struct CallId {
    key: Key,
    index: usize,
}

/// A key whose calls no order explains.
#[derive(Debug)]
pub struct LinearizabilityViolation {
    key: Key,
    events: Vec<CallEvent>,
}

impl fmt::Display for LinearizabilityViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "no order explains the calls of {}:", self.key)?;
        for event in &self.events {
            let CallEvent { began, ended, call, outcome } = event;
            writeln!(f, "  {began:>6} to {ended:>20}  {call:?} -> {outcome:?}")?;
        }
        Ok(())
    }
}

impl CallHistory {
    /// Notes that a call begins.
    pub fn begin(&mut self, key: Key, call: Call) -> CallId {
        self.clock += 1;
        let events = self.keys.entry(key.clone()).or_default();
        events.push(CallEvent { call, outcome: None, began: self.clock, ended: u64::MAX });
        CallId { key, index: events.len() - 1 }
    }

    /// Notes what came of it. A call that is never ended has an unknown outcome.
    pub fn end(&mut self, id: CallId, outcome: CallOutcome) {
        self.clock += 1;
        let event = &mut self.keys.get_mut(&id.key).expect("begun")[id.index];
        (event.outcome, event.ended) = (Some(outcome), self.clock);
    }

    /// Finds an order for each key, or the key that has none. Every key starts without a value.
    pub fn check(&self) -> Result<(), LinearizabilityViolation> {
        for (key, events) in &self.keys {
            let known = |event: &&CallEvent| event.outcome.is_some() || event.call != Call::Read;
            let events: Vec<CallEvent> = events.iter().filter(known).copied().collect();
            if !is_linearizable(&events) {
                return Err(LinearizabilityViolation { key: key.clone(), events });
            }
        }
        Ok(())
    }
}

/// Calls taken so far: all before `low`, and those of `rest`, which follow it.
#[derive(Clone, PartialEq, Eq, Hash)]
struct SearchState {
    low: usize,
    others: Vec<usize>,
    value: Option<u64>,
}

fn is_linearizable(events: &[CallEvent]) -> bool {
    let mut visited: FxHashSet<SearchState> = FxHashSet::default();
    let mut stack = vec![SearchState { low: 0, others: Vec::new(), value: None }];
    while let Some(state) = stack.pop() {
        let open = |at: &usize| !state.others.contains(at);
        // Calls are in the order of their beginnings: those that may come next began before any open
        // call ended.
        let mut horizon = u64::MAX;
        let mut done = true;
        let mut next = Vec::new();
        for at in (state.low..events.len()).filter(open) {
            if events[at].began > horizon {
                done = false;
                break;
            }
            done &= events[at].outcome.is_none();
            horizon = horizon.min(events[at].ended);
            next.push(at);
        }
        if done {
            return true;
        }
        for at in next {
            let Some(value) = apply_call(&events[at], state.value, horizon) else { continue };
            let mut successor = SearchState { value, ..state.clone() };
            successor.others.push(at);
            successor.others.sort_unstable();
            while successor.others.first() == Some(&successor.low) {
                successor.others.remove(0);
                successor.low += 1;
            }
            if visited.insert(successor.clone()) {
                stack.push(successor);
            }
        }
    }
    false
}

/// The register after the call, or `None` when it cannot come now.
fn apply_call(event: &CallEvent, value: Option<u64>, horizon: u64) -> Option<Option<u64>> {
    match (event.call, event.outcome) {
        _ if event.began > horizon => None,
        (Call::Write(written), _) => Some(written),
        (Call::Read, Some(CallOutcome::Read(read))) => (read == value).then_some(value),
        (Call::Read, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call's begin, end, kind and outcome.
    type Row = (u64, u64, Call, Option<CallOutcome>);

    fn is_history_linearizable(calls: &[Row]) -> bool {
        let mut events: Vec<CallEvent> = calls
            .iter()
            .map(|&(began, ended, call, outcome)| CallEvent { call, outcome, began, ended })
            .collect();
        events.sort_by_key(|event| event.began);
        is_linearizable(&events)
    }

    #[test]
    fn orders_are_found_and_contradictions_too() {
        let write = |n| Call::Write(Some(n));
        let done = Some(CallOutcome::Written);
        let saw = |n| Some(CallOutcome::Read(n));
        let rows: [(bool, &[Row]); 8] = [
            (true, &[(1, 2, write(1), done), (3, 4, Call::Read, saw(Some(1)))]),
            (false, &[(1, 2, write(1), done), (3, 4, Call::Read, saw(None))]),
            // Overlapping: either value, but not back again.
            (
                true,
                &[(1, 9, write(1), done), (2, 3, Call::Read, saw(None)), (4, 5, Call::Read, saw(Some(1)))],
            ),
            (
                false,
                &[(1, 9, write(1), done), (2, 3, Call::Read, saw(Some(1))), (4, 5, Call::Read, saw(None))],
            ),
            // Unknown outcomes may have happened, late, or never.
            (true, &[(1, u64::MAX, write(1), None), (5, 6, Call::Read, saw(Some(1)))]),
            (true, &[(1, u64::MAX, write(1), None), (5, 6, Call::Read, saw(None))]),
            (
                false,
                &[
                    (1, u64::MAX, write(1), None),
                    (2, 3, Call::Read, saw(Some(1))),
                    (4, 5, Call::Read, saw(None)),
                ],
            ),
            (
                false,
                &[(1, 2, write(1), done), (3, 4, Call::Write(None), done), (5, 6, Call::Read, saw(Some(1)))],
            ),
        ];
        for (row, (want, calls)) in rows.iter().enumerate() {
            assert_eq!(is_history_linearizable(calls), *want, "row {row}");
        }
    }
}
