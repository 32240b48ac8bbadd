//! States that a power loss may leave, for keys whose acknowledged writes are not durable yet.
//!
//! In: the calls of a segment and the event numbers of acknowledged flushes. Out: the allowed states of a key, to
//! compare with the audit. Tested by a table below.

use octokv_engine::linearizability::{Call, CallRecord, CallResult, KeyState};

/// States that a key may have after a power loss that may lose acknowledged and unflushed writes, given its possible
/// states `starts` before the calls: every state written, except those replaced by a write that ended before an
/// acknowledged flush began, or by one acknowledged as durable.
pub fn crash_survivors(starts: &[KeyState], events: &[CallRecord], flushes: &[u64]) -> Vec<KeyState> {
    let last_flush = flushes.iter().copied().max().unwrap_or(0);
    let is_write = |event: &&CallRecord| {
        matches!(event.call, Call::Put { .. } | Call::Delete | Call::Clear | Call::Deallocate)
            && event.outcome != Some(CallResult::ConditionFailed)
    };
    let writes: Vec<&CallRecord> = events.iter().filter(is_write).collect();
    let replaced = |ended: u64| {
        let is_durable = |by: &CallRecord| by.outcome.is_some() && (by.ended < last_flush || by.durable);
        // A deallocated block may keep its contents.
        writes.iter().any(|by| by.call != Call::Deallocate && by.began > ended && is_durable(by))
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

/// Whether a state is one of several; all empty values are equal, because they do not identify their operation.
pub fn matches_any(state: KeyState, several: &[KeyState]) -> bool {
    let is_empty = |state: &KeyState| matches!(state, KeyState::Holds { bytes: 0, .. });
    several.contains(&state) || (is_empty(&state) && several.iter().any(is_empty))
}

#[cfg(test)]
mod tests {
    use super::*;
    use octokv_engine::PutMode;

    fn put(operation: u64) -> Call {
        Call::Put { operation, bytes: 10, mode: PutMode::Upsert }
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
        let deallocated =
            [event(1, 1, 2), CallRecord { call: Call::Deallocate, durable: true, ..event(2, 3, 4) }];
        assert_eq!(crash_survivors(&[KeyState::Missing], &deallocated, &[3]), [value(1), KeyState::Missing]);
    }
}
