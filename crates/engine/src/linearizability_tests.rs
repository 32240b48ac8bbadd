//! Tables of histories for the linearizability checker.

use super::*;

const NEVER: u64 = u64::MAX;

fn put(operation: u64) -> Call {
    Call::Put { operation, bytes: 10, mode: PutMode::Upsert }
}

/// A put whose value has a length of its own.
fn put_of_own_length(operation: u64) -> Call {
    Call::Put { operation, bytes: operation as u32, mode: PutMode::Upsert }
}

fn add(operation: u64) -> Call {
    Call::Put { operation, bytes: 10, mode: PutMode::AddOnly }
}

/// A call's begin, end, kind and result.
type Row = (u64, u64, Call, Option<CallResult>);

fn records(calls: &[Row]) -> Vec<CallRecord> {
    let record =
        |&(began, ended, call, outcome): &Row| CallRecord { call, outcome, began, ended, durable: false };
    calls.iter().map(record).collect()
}

fn is_linearizable(calls: &[Row]) -> bool {
    match check_linearizable(KeyState::Missing, &records(calls)) {
        CheckResult::Linearizable => true,
        CheckResult::NotLinearizable => false,
        CheckResult::Undecided => panic!("{calls:?}"),
    }
}

#[test]
fn linearizable_histories_are_accepted_and_others_rejected() {
    use Call::{Clear, Delete, Exist, Get};
    let done = Some(CallResult::Acknowledged);
    let failed = Some(CallResult::ConditionFailed);
    let saw = |seen| Some(CallResult::Observed(seen));
    let value = |operation| saw(Observed::Value(operation));
    let nothing = saw(Observed::Absent);
    let rows: [(bool, &[Row]); 23] = [
        (true, &[(1, 2, put(1), done), (3, 4, Get, value(1))]),
        (false, &[(1, 2, put(1), done), (3, 4, Get, nothing)]),
        // Overlapping calls: a read returns either value, but never an older one after a newer one.
        (true, &[(1, 9, put(1), done), (2, 3, Get, nothing), (4, 5, Get, value(1))]),
        (false, &[(1, 9, put(1), done), (2, 3, Get, value(1)), (4, 5, Get, nothing)]),
        // Writes of unknown outcome take effect late, or never.
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
        (false, &[(1, 2, put(1), done), (3, 4, Delete, done), (5, 6, Get, value(1))]),
        // A read never returns a value that is written later.
        (false, &[(1, 2, Get, value(1)), (3, 4, put(1), done)]),
        // Conditions of put modes and of deletes.
        (true, &[(1, 2, add(1), done), (3, 4, add(2), failed), (5, 6, Delete, done), (7, 8, add(3), done)]),
        (false, &[(1, 2, add(1), done), (3, 4, add(2), done)]),
        (false, &[(1, 2, put(1), done), (3, 4, Delete, failed)]),
        (
            true,
            &[
                (1, 2, put(1), done),
                (3, NEVER, Delete, None),
                (4, NEVER, add(2), None),
                (5, 6, Get, value(2)),
            ],
        ),
        // A delete is acknowledged only if the key may exist; a clear always.
        (false, &[(1, 2, Delete, done)]),
        (false, &[(1, 2, put(1), done), (3, 4, Delete, done), (5, 6, Delete, done)]),
        (false, &[(1, 2, put(1), done), (3, 5, Delete, done), (4, 6, Delete, done)]),
        (false, &[(1, 2, Delete, done), (3, NEVER, put(1), None)]),
        (true, &[(1, NEVER, put(1), None), (2, 3, Delete, done), (4, 5, Get, nothing)]),
        (true, &[(1, NEVER, Delete, None), (2, 3, put(1), done), (4, 5, Delete, done)]),
        (true, &[(1, 2, Clear, done), (3, 5, Clear, done), (4, 6, Get, nothing)]),
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
fn many_overlapping_writes_and_deallocations_are_checked_quickly() {
    let done = Some(CallResult::Acknowledged);
    let value = |operation| Some(CallResult::Observed(Observed::Value(operation)));
    let mut calls: Vec<Row> = (1..=60).map(|at| (at, 1_000 + at, put(at), done)).collect();
    calls.extend((61..=90).map(|at| (at, 1_000 + at, Call::Deallocate, done)));
    calls.extend([(200, 201, Call::Get, value(20)), (202, 203, Call::Get, value(7))]);
    calls.push((204, 205, Call::Get, Some(CallResult::Observed(Observed::Absent))));
    assert!(is_linearizable(&calls));
    calls.push((206, 207, Call::Get, value(20)));
    assert!(!is_linearizable(&calls), "a value that was replaced does not return");
}

/// Whether some order of the calls is legal: tries all of them.
fn has_legal_order(state: KeyState, calls: &[CallRecord], taken: u32) -> bool {
    let untaken = || (0..calls.len()).filter(|index| taken & 1 << index == 0);
    let known = || untaken().filter(|&index| calls[index].outcome.is_some());
    if known().next().is_none() {
        return true;
    }
    let horizon = known().map(|index| calls[index].ended).min().expect("there is one");
    untaken().filter(|&index| calls[index].began <= horizon).any(|index| {
        let taken = taken | 1 << index;
        let is_unchanged = calls[index].call == Call::Deallocate && has_legal_order(state, calls, taken);
        is_unchanged
            || apply_call(&calls[index], state).is_some_and(|next| has_legal_order(next, calls, taken))
    })
}

#[test]
fn the_search_agrees_with_all_orders_of_few_calls() {
    let mut random = octokv_base::Prng::new(1);
    let mut counts = [0; 2];
    for _ in 0..60_000 {
        let mut calls = Vec::new();
        for operation in 1..=2 + random.below(6) {
            let bytes = 10 + random.below(2) as u32;
            let mode =
                [PutMode::Upsert, PutMode::Upsert, PutMode::Upsert, PutMode::AddOnly, PutMode::UpdateOnly]
                    [random.below(5) as usize];
            let seen = match random.below(8) {
                0 => Observed::Absent,
                1 => Observed::Present,
                2 => Observed::Length(10 + random.below(2) as u32),
                3 => Observed::NotValue(1 + random.below(6)),
                _ => Observed::Value(1 + random.below(6)),
            };
            let (call, result) = match random.below(10) {
                0 => (Call::Delete, CallResult::Acknowledged),
                1 => (Call::Delete, CallResult::ConditionFailed),
                2 => (Call::Deallocate, CallResult::Acknowledged),
                3..6 => (Call::Put { operation, bytes, mode }, CallResult::Acknowledged),
                6 => (Call::Put { operation, bytes, mode: PutMode::AddOnly }, CallResult::ConditionFailed),
                7 => (Call::Clear, CallResult::Acknowledged),
                _ => (Call::Get, CallResult::Observed(seen)),
            };
            let began = random.below(40);
            let is_known = !random.one_in(4) || call == Call::Get;
            let (outcome, ended) =
                if is_known { (Some(result), began + 1 + random.below(25)) } else { (None, NEVER) };
            calls.push(CallRecord { call, outcome, began, ended, durable: false });
        }
        let want = has_legal_order(KeyState::Missing, &calls, 0);
        counts[usize::from(want)] += 1;
        let found = check_linearizable(KeyState::Missing, &calls) == CheckResult::Linearizable;
        assert_eq!(found, want, "{calls:?}");
    }
    assert!(counts[0] > 10_000 && counts[1] > 10_000, "{counts:?}");
}

#[test]
fn a_deallocated_block_is_zeroed_or_unchanged() {
    use Call::{Deallocate, Get};
    let done = Some(CallResult::Acknowledged);
    let saw = |seen| Some(CallResult::Observed(seen));
    let (one, two, nothing) = (saw(Observed::Value(1)), saw(Observed::Value(2)), saw(Observed::Absent));
    assert!(is_linearizable(&[(1, 2, put(1), done), (3, 4, Deallocate, done), (5, 6, Get, one)]));
    assert!(is_linearizable(&[(1, 2, put(1), done), (3, 4, Deallocate, done), (5, 6, Get, nothing)]));
    // A deallocated block never changes back, and is never zeroed after a later write.
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
    // A deallocation that overlaps a write may take effect after it.
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

#[test]
fn a_search_that_exceeds_its_bound_is_undecided() {
    let done = Some(CallResult::Acknowledged);
    let read = |operation| Some(CallResult::Observed(Observed::Value(operation)));
    // Seven overlapping writes, and a read of one of the values, or of another one.
    let calls = |operation| {
        let mut calls: Vec<Row> = (1..=7).map(|at| (at, 100 + at, put_of_own_length(at), done)).collect();
        calls.push((200, 201, Call::Get, read(operation)));
        records(&calls)
    };
    use CheckResult::{Linearizable, NotLinearizable, Undecided};
    let rows = [
        (Linearizable, 7, STATES_MAX),
        (Linearizable, 7, 10),
        (NotLinearizable, 99, STATES_MAX),
        (Undecided, 99, 10),
        (Undecided, 99, 0),
    ];
    for (want, operation, states_max) in rows {
        let found = check_bounded(KeyState::Missing, &calls(operation), states_max);
        assert_eq!(found, want, "read of {operation}, bound {states_max}");
    }
}

#[test]
fn a_history_fails_if_a_key_is_not_linearizable_or_undecided() {
    let [linearizable, contradictory, undecided] = [1, 2, 3].map(|index| Key::new(&[index]).unwrap());
    let mut history = CallHistory::default();
    let mut write_and_read = |key: &Key, writes: u64, read: u64| {
        let ids: Vec<CallId> =
            (1..=writes).map(|at| history.begin(key.clone(), put_of_own_length(at))).collect();
        ids.into_iter().for_each(|id| history.end(id, CallResult::Acknowledged));
        let id = history.begin(key.clone(), Call::Get);
        history.end(id, CallResult::Observed(Observed::Value(read)));
        history.check().err().map(|violation| violation.to_string())
    };
    assert_eq!(write_and_read(&linearizable, 3, 2), None);
    let text = write_and_read(&undecided, 24, 99).expect("24 overlapping writes exceed the bound");
    assert!(text.starts_with(&format!("undecided after 100000 states: the calls of {undecided}")), "{text}");
    let text = write_and_read(&contradictory, 3, 99).expect("the value was never written");
    assert!(text.starts_with(&format!("not linearizable: the calls of {contradictory}")), "{text}");
    assert_eq!(text.lines().count(), 5, "a title, three writes and a read: {text}");
}
