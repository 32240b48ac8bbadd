//! Blocks of entries against lists of them: every step and every search, changed bytes, blocks that contradict themselves.

use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// A body that is its sequence number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Number(u64);

impl BlockBody for Number {
    fn decode(bytes: &[u8], at: usize) -> Option<(Number, usize)> {
        let mut rest = bytes.get(at..)?;
        let number = take_varint(&mut rest)?;
        Some((Number(number), bytes.len() - rest.len()))
    }
    fn sequence(&self) -> u64 {
        self.0
    }
}

type Entries = Vec<(Vec<u8>, u64)>;
/// In order: the newest first.
fn entries() -> impl Strategy<Value = Entries> {
    let key = proptest::collection::vec(prop_oneof![4 => Just(b'a'), 1 => any::<u8>()], 0..20);
    proptest::collection::btree_set((key, 1..6u64), 1..100).prop_map(|entries: BTreeSet<_>| {
        let mut entries: Entries = entries.into_iter().collect();
        entries.sort_by(|(key, sequence), (other, than)| key.cmp(other).then(than.cmp(sequence)));
        entries
    })
}

fn encode(entries: &Entries) -> Vec<u8> {
    let (mut builder, mut bytes) = (KeyBlockBuilder::default(), Vec::new());
    for (key, sequence) in entries {
        builder.push(key, |bytes| push_varint(bytes, *sequence));
    }
    let expected_bytes = builder.bytes();
    builder.finish(&mut bytes);
    assert_eq!((bytes.len(), builder.bytes()), (expected_bytes, 0));
    bytes
}

fn decode(bytes: &[u8]) -> Option<KeyBlock<Number>> {
    KeyBlock::decode(bytes.into(), |_| true)
}

fn entry(place: &KeyBlockPosition<Number>) -> Option<(Vec<u8>, u64)> {
    place.body().map(|body| (place.key().to_vec(), body.0))
}

proptest! {
    #[test]
    fn every_step_and_every_search_is_the_models(
        entries in entries(),
        targets in proptest::collection::vec(
            (proptest::collection::vec(prop_oneof![Just(b'a'), any::<u8>()], 0..20), 0..7u64), 0..30),
    ) {
        let block = decode(&encode(&entries)).expect("a block");
        let mut place = KeyBlockPosition::default();
        prop_assert!(block.first(&mut place));
        for want in &entries {
            prop_assert_eq!(entry(&place), Some(want.clone()));
            block.next(&mut place);
        }
        prop_assert_eq!(entry(&place), None);
        prop_assert!(block.last(&mut place));
        for want in entries.iter().rev() {
            prop_assert_eq!(entry(&place), Some(want.clone()));
            block.prev(&mut place);
        }
        prop_assert_eq!(entry(&place), None);
        for (key, sequence) in targets.iter().chain(&entries) {
            let target = Position { key, sequence: *sequence };
            let at = entries.partition_point(|(key, sequence)| Position { key, sequence: *sequence } < target);
            prop_assert_eq!(block.seek(&mut place, target), at < entries.len());
            prop_assert_eq!(entry(&place), entries.get(at).cloned());
            let found = entries.get(at).map(|entry| Number(entry.1));
            prop_assert_eq!(block.seek_body(target), found);
            prop_assert_eq!(block.find(target), found.filter(|_| entries[at].0 == *key));
            if at < entries.len() {
                prop_assert_eq!(block.prev(&mut place), at > 0);
                prop_assert_eq!(entry(&place), at.checked_sub(1).map(|at| entries[at].clone()));
            }
        }
    }

    #[test]
    fn steps_in_any_order_are_the_models_whatever_the_restart_points(
        entries in entries(),
        interval in 1..60u32,
        steps in proptest::collection::vec(prop_oneof![any::<bool>(), Just(false)], 1..200),
    ) {
        let mut builder = KeyBlockBuilder::default();
        for (index, (key, sequence)) in entries.iter().enumerate() {
            // A writer with another interval.
            builder.since_restart = if (index as u32).is_multiple_of(interval) { RESTART_INTERVAL } else { 0 };
            builder.push(key, |bytes| push_varint(bytes, *sequence));
        }
        let mut bytes = Vec::new();
        builder.finish(&mut bytes);
        let block = decode(&bytes).expect("a block");
        let (mut place, mut at) = (KeyBlockPosition::default(), entries.len() / 2);
        let (key, sequence) = &entries[at];
        block.seek(&mut place, Position { key, sequence: *sequence });
        for is_forward in steps {
            prop_assert_eq!(entry(&place), Some(entries[at].clone()));
            let next = if is_forward { at + 1 } else { at.wrapping_sub(1) };
            if next >= entries.len() {
                continue;
            }
            let is_moved = if is_forward { block.next(&mut place) } else { block.prev(&mut place) };
            prop_assert!(is_moved);
            at = next;
        }
    }

    #[test]
    fn any_bytes_are_no_block_or_one_that_is_read_in_order(
        entries in entries(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut bytes = encode(&entries);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(block) = decode(&bytes) {
            let (mut place, mut forward) = (KeyBlockPosition::default(), Vec::new());
            block.first(&mut place);
            while let Some(entry) = entry(&place) {
                forward.push(entry);
                block.next(&mut place);
            }
            let is_behind = |(key, sequence): &(Vec<u8>, u64), (than, number): &(Vec<u8>, u64)| {
                key < than || (key == than && sequence > number)
            };
            prop_assert!(forward.is_sorted_by(is_behind));
            block.last(&mut place);
            for want in forward.iter().rev() {
                prop_assert_eq!(entry(&place), Some(want.clone()));
                block.prev(&mut place);
            }
            prop_assert_eq!(entry(&place), None);
        }
    }
}

#[test]
fn blocks_that_contradict_themselves_are_refused() {
    let restarts = |entries: &[u8], restarts: &[u32]| {
        let mut bytes = entries.to_vec();
        restarts.iter().for_each(|restart| bytes.extend_from_slice(&restart.to_le_bytes()));
        bytes.extend_from_slice(&(restarts.len() as u32).to_le_bytes());
        decode(&bytes).is_some()
    };
    // "a" of sequence 5, then "ab" of 3.
    let two = [0, 1, b'a', 5, 1, 1, b'b', 3];
    assert!(restarts(&two, &[0]));
    assert!(!restarts(&two, &[]), "no restart point");
    assert!(!restarts(&two, &[1]), "the first entry is no restart point");
    assert!(!restarts(&two, &[0, 4]), "a restart point that shares bytes");
    assert!(!restarts(&two, &[0, 5]), "a restart point within an entry");
    assert!(!restarts(&two, &[0, 0]), "a restart point twice");
    assert!(!restarts(&two[..7], &[0]), "an entry that is cut");
    assert!(!restarts(&[], &[0]), "no entry");
    assert!(!restarts(&[0, 1, b'b', 5, 0, 1, b'a', 3], &[0]), "keys out of order");
    assert!(!restarts(&[0, 1, b'a', 3, 1, 0, 5], &[0]), "sequence numbers that rise");
    assert!(!restarts(&[0, 1, b'a', 3, 1, 0, 3], &[0]), "an entry twice");
    assert!(!restarts(&[1, 1, b'a', 3], &[0]), "shared bytes without a key before");
    assert!(restarts(&[0, 1, b'a', 5, 1, 0, 3], &[0]), "two versions of a key");
    let long_key = |bytes: usize| {
        let mut entry = vec![0];
        push_varint(&mut entry, bytes as u64);
        entry.resize(entry.len() + bytes, b'k');
        entry.push(1);
        restarts(&entry, &[0])
    };
    assert!(long_key(KEY_BYTES_MAX) && !long_key(KEY_BYTES_MAX + 1), "the longest key");
    assert!(decode(&u32::MAX.to_le_bytes()).is_none(), "too many restart points");
}
