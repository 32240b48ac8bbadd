//! Whether what clients saw of one key can be explained by some order of their calls.
//!
//! In: what the key held at first and the calls of a segment. Out: whether an order explains them. The
//! search is Wing and Gong's (1993) with Lowe's memory of states (2017), made quick by what is known here:
//! values are unique, so a value that somebody has yet to read must not be overwritten; a call that changes
//! nothing is taken as soon as it agrees; a write of unknown outcome is taken only when a call in line
//! does not agree otherwise.
//! Tested by a table below.

use crate::history::{Call, Event, Outcome, Seen, State};
use octokv_base::map::{Map, Set};
use octokv_wire::kv::StoreMode;

/// What the search found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// An order.
    Explained,
    /// That there is none.
    Unexplained,
    /// Nothing within its bounds.
    Undecided,
}

/// The most states that a search looks at.
const STATES_MAX: usize = 100_000;

/// Calls taken so far: the known ones before `low` and those of `rest`; of the unknown ones `used`.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Taken {
    low: usize,
    rest: Vec<usize>,
    used: Vec<usize>,
    state: State,
}

struct Search {
    known: Vec<Event>,
    unknown: Vec<Event>,
    /// Who reads the value of an operation.
    readers: Map<u64, Vec<usize>>,
}

/// Looks for an order of a key's calls.
pub fn explain(start: State, events: &[Event]) -> Verdict {
    let mut search = Search { known: Vec::new(), unknown: Vec::new(), readers: Map::default() };
    for event in events {
        match (event.outcome, event.call) {
            (Some(_), _) => search.known.push(*event),
            (None, Call::Put { .. } | Call::Delete | Call::GiveUp) => search.unknown.push(*event),
            (None, Call::Get | Call::Exist) => {}
        }
    }
    search.known.sort_by_key(|event| event.began);
    for (index, event) in search.known.iter().enumerate() {
        if let Some(Outcome::Saw(Seen::Value(operation))) = event.outcome {
            search.readers.entry(operation).or_default().push(index);
        }
    }
    search.run(start)
}

impl Search {
    fn run(&self, start: State) -> Verdict {
        let mut seen: Set<Taken> = Set::default();
        let mut stack = vec![Taken { low: 0, rest: Vec::new(), used: Vec::new(), state: start }];
        while let Some(mut taken) = stack.pop() {
            let horizon = self.absorb(&mut taken);
            if taken.low == self.known.len() {
                return Verdict::Explained;
            }
            if !seen.insert(taken.clone()) {
                continue;
            }
            if seen.len() > STATES_MAX {
                return Verdict::Undecided;
            }
            self.give_up(&taken, &mut stack);
            if !self.is_still_read(&taken) {
                self.branch(&taken, horizon, &mut stack);
            }
        }
        Verdict::Unexplained
    }

    /// The known calls that may come next, and the moment before which they all began.
    fn candidates(&self, taken: &Taken) -> (Vec<usize>, u64) {
        let (mut horizon, mut next) = (u64::MAX, Vec::new());
        for at in taken.low..self.known.len() {
            if taken.rest.contains(&at) {
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
    fn absorb(&self, taken: &mut Taken) -> u64 {
        loop {
            let (next, horizon) = self.candidates(taken);
            let agrees = |&at: &usize| {
                let event = &self.known[at];
                is_reader(event) && after(event, taken.state) == Some(taken.state)
            };
            let Some(at) = next.into_iter().find(agrees) else { return horizon };
            taken.take(at);
        }
    }

    /// Whether somebody reads the present value later: then nothing may overwrite it, and all who could
    /// read it now have.
    fn is_still_read(&self, taken: &Taken) -> bool {
        let State::Holds { operation, .. } = taken.state else { return false };
        let open = |&at: &usize| at >= taken.low && !taken.rest.contains(&at);
        self.readers.get(&operation).is_some_and(|readers| readers.iter().any(open))
    }

    /// A block that was given up may have stayed what it was.
    fn give_up(&self, taken: &Taken, stack: &mut Vec<Taken>) {
        for at in self.candidates(taken).0 {
            if self.known[at].call == Call::GiveUp {
                let mut then = taken.clone();
                then.take(at);
                stack.push(then);
            }
        }
    }

    fn branch(&self, taken: &Taken, horizon: u64, stack: &mut Vec<Taken>) {
        let (mut next, _) = self.candidates(taken);
        next.sort_by_key(|&at| std::cmp::Reverse(self.known[at].ended));
        let blocked = next.iter().any(|&at| after(&self.known[at], taken.state).is_none());
        let mut wanted = Vec::new();
        for (at, event) in self.unknown.iter().enumerate() {
            if !blocked || event.began > horizon || taken.used.contains(&at) {
                continue;
            }
            let Some(state) = after(event, taken.state).filter(|state| *state != taken.state) else {
                continue;
            };
            let mut then = Taken { state, ..taken.clone() };
            then.used.push(at);
            then.used.sort_unstable();
            let is_read =
                matches!(event.call, Call::Put { operation, .. } if self.readers.contains_key(&operation));
            if is_read { wanted.push(then) } else { stack.push(then) }
        }
        for at in next {
            if let Some(state) = after(&self.known[at], taken.state) {
                let mut then = Taken { state, ..taken.clone() };
                then.take(at);
                stack.push(then);
            }
        }
        // Looked at first.
        stack.append(&mut wanted);
    }
}

impl Taken {
    fn take(&mut self, at: usize) {
        let place = self.rest.partition_point(|&other| other < at);
        self.rest.insert(place, at);
        let run = self.rest.iter().zip(self.low..).take_while(|&(&at, low)| at == low).count();
        self.rest.drain(..run);
        self.low += run;
    }
}

fn is_reader(event: &Event) -> bool {
    matches!(event.outcome, Some(Outcome::Saw(_) | Outcome::Refused))
}

/// What the key holds after a call, or `None` when the call does not agree with what it holds.
fn after(event: &Event, state: State) -> Option<State> {
    let missing = state == State::Missing;
    match (event.call, event.outcome) {
        (Call::Put { mode, .. }, Some(Outcome::Refused)) => match mode {
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
            fits.then_some(State::Holds { operation, bytes })
        }
        (Call::Delete, Some(Outcome::Refused)) => missing.then_some(state),
        (Call::Delete | Call::GiveUp, _) => Some(State::Missing),
        (Call::Get, Some(Outcome::Saw(seen))) => agrees(seen, state).then_some(state),
        // The length may be whole where the value is not, and a listing passes over what has no key left.
        (Call::Exist, Some(Outcome::Saw(seen))) => {
            (state == State::Damaged || agrees(seen, state)).then_some(state)
        }
        (Call::Get | Call::Exist, _) => None,
    }
}

fn agrees(seen: Seen, state: State) -> bool {
    match (seen, state) {
        (Seen::Nothing, State::Missing) | (Seen::Damaged, State::Damaged) => true,
        (Seen::Something, State::Holds { .. } | State::Damaged) => true,
        (Seen::Value(saw), State::Holds { operation, .. }) => saw == operation,
        (Seen::Length(saw), State::Holds { bytes, .. }) => saw == bytes,
        (Seen::Other(saw), State::Holds { operation, .. }) => saw != operation,
        (Seen::Other(_), State::Missing | State::Damaged) => true,
        _ => false,
    }
}

/// What a key that held one of `starts` may hold after a power cut that may lose what was acknowledged and not flushed: whatever was
/// stored, less what was surely replaced before an acknowledged flush began, or by what was acknowledged as durable.
pub fn survivors(starts: &[State], events: &[Event], flushes: &[u64]) -> Vec<State> {
    let last_flush = flushes.iter().copied().max().unwrap_or(0);
    let is_write = |event: &&Event| {
        matches!(event.call, Call::Put { .. } | Call::Delete | Call::GiveUp)
            && event.outcome != Some(Outcome::Refused)
    };
    let writes: Vec<&Event> = events.iter().filter(is_write).collect();
    let replaced = |ended: u64| {
        let lasts = |by: &Event| by.outcome.is_some() && (by.ended < last_flush || by.durable);
        // What was given up may be there still.
        writes.iter().any(|by| by.call != Call::GiveUp && by.began > ended && lasts(by))
    };
    let mut survivors = Vec::new();
    if !replaced(0) {
        survivors.extend_from_slice(starts);
    }
    for write in &writes {
        if write.outcome.is_none() || !replaced(write.ended) {
            survivors.push(match write.call {
                Call::Put { operation, bytes, .. } => State::Holds { operation, bytes },
                _ => State::Missing,
            });
        }
    }
    survivors
}

/// Whether a state is one of several; all empty values are alike.
pub fn is_one_of(state: State, several: &[State]) -> bool {
    let is_empty = |state: &State| matches!(state, State::Holds { bytes: 0, .. });
    several.contains(&state) || (is_empty(&state) && several.iter().any(is_empty))
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

    fn verdict(calls: &[(u64, u64, Call, Option<Outcome>)]) -> bool {
        let event =
            |&(began, ended, call, outcome): &_| Event { call, outcome, began, ended, durable: false };
        let events: Vec<Event> = calls.iter().map(event).collect();
        match explain(State::Missing, &events) {
            Verdict::Explained => true,
            Verdict::Unexplained => false,
            Verdict::Undecided => panic!("{calls:?}"),
        }
    }

    #[test]
    fn orders_are_found_and_contradictions_too() {
        use Call::{Delete, Exist, Get};
        let done = Some(Outcome::Done);
        let refused = Some(Outcome::Refused);
        let saw = |seen| Some(Outcome::Saw(seen));
        let value = |operation| saw(Seen::Value(operation));
        let nothing = saw(Seen::Nothing);
        type Row<'a> = (bool, &'a [(u64, u64, Call, Option<Outcome>)]);
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
            (true, &[(1, 2, put(1), done), (3, 4, Exist, saw(Seen::Length(10)))]),
            (false, &[(1, 2, put(1), done), (3, 4, Exist, saw(Seen::Length(11)))]),
        ];
        for (row, (want, calls)) in rows.iter().enumerate() {
            assert_eq!(verdict(calls), *want, "row {row}");
        }
    }

    #[test]
    fn a_crowd_of_writes_is_explained_quickly() {
        let mut calls = Vec::new();
        for at in 0..40 {
            calls.push((1 + at, 1_000 + at, put(at + 1), Some(Outcome::Done)));
        }
        for at in 0..40 {
            calls.push((100 + 2 * at, 101 + 2 * at, Call::Get, Some(Outcome::Saw(Seen::Value(40 - at)))));
        }
        assert!(verdict(&calls));
        calls.push((200, 201, Call::Get, Some(Outcome::Saw(Seen::Value(7)))));
        assert!(!verdict(&calls));
    }

    #[test]
    fn only_a_flush_makes_what_was_acknowledged_survive() {
        let event = |operation, began, ended| Event {
            call: put(operation),
            outcome: Some(Outcome::Done),
            began,
            ended,
            durable: false,
        };
        let events = [event(1, 1, 2), event(2, 3, 4)];
        let value = |operation| State::Holds { operation, bytes: 10 };
        assert_eq!(survivors(&[State::Missing], &events, &[]), [State::Missing, value(1), value(2)]);
        assert_eq!(survivors(&[State::Missing], &events, &[3]), [value(1), value(2)]);
        assert_eq!(survivors(&[State::Missing], &events, &[5]), [value(2)]);
        let durable = [event(1, 1, 2), Event { durable: true, ..event(2, 3, 4) }, event(3, 5, 6)];
        assert_eq!(survivors(&[State::Missing], &durable, &[]), [value(2), value(3)]);
        let given_up = [event(1, 1, 2), Event { call: Call::GiveUp, durable: true, ..event(2, 3, 4) }];
        assert_eq!(survivors(&[State::Missing], &given_up, &[3]), [value(1), State::Missing]);
    }

    #[test]
    fn what_is_given_up_is_zeroed_by_that_or_stays() {
        use Call::{Get, GiveUp};
        let done = Some(Outcome::Done);
        let saw = |seen| Some(Outcome::Saw(seen));
        let (one, two, nothing) = (saw(Seen::Value(1)), saw(Seen::Value(2)), saw(Seen::Nothing));
        assert!(verdict(&[(1, 2, put(1), done), (3, 4, GiveUp, done), (5, 6, Get, one)]));
        assert!(verdict(&[(1, 2, put(1), done), (3, 4, GiveUp, done), (5, 6, Get, nothing)]));
        // Once it is zero it is no more what it was, and it is not zeroed later.
        assert!(!verdict(&[
            (1, 2, put(1), done),
            (3, 4, GiveUp, done),
            (5, 6, Get, nothing),
            (7, 8, Get, one)
        ]));
        assert!(!verdict(&[
            (1, 2, put(1), done),
            (3, 4, GiveUp, done),
            (5, 6, put(2), done),
            (7, 8, Get, nothing)
        ]));
        // Beside a write, after which it may come.
        assert!(verdict(&[
            (1, 2, put(1), done),
            (3, 9, GiveUp, done),
            (4, 5, Get, one),
            (6, 7, put(2), done),
            (10, 11, Get, nothing)
        ]));
        assert!(verdict(&[
            (1, 2, put(1), done),
            (3, 9, GiveUp, done),
            (4, 5, put(2), done),
            (10, 11, Get, two)
        ]));
        assert!(verdict(&[(1, 2, put(1), done), (3, 4, Get, saw(Seen::Other(2)))]));
        assert!(!verdict(&[(1, 2, put(1), done), (3, 4, Get, saw(Seen::Other(1)))]));
    }
}
