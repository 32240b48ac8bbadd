//! The clauses of the contract on iterators, as functions over any engine that has them, like
//! [`contract_clauses`](crate::contract_clauses).
//!
//! In: an engine, empty. Out: a panic with what differs from a copy of the pairs at the iterator's creation.

use crate::conformance::{key_of, operation_of};
use crate::contract_clauses::{Clauses, TestClock};
use crate::{DeleteOutcome, Engine, IteratorOptions, IteratorProgress, PairSink, PutOptions, PutOutcome};
use octokv_base::{Key, Prng, UnixTime, Version};
use std::collections::BTreeMap;

/// The most iterators that a clause creates to find the bound.
const ITERATORS_MAX: usize = 1 << 20;

/// A sink of so many pairs of at most so many bytes each.
struct Pairs {
    room: usize,
    pair_bytes_max: usize,
    received: Vec<(Key, Vec<u8>)>,
}

impl PairSink for Pairs {
    fn has_space(&mut self, key_bytes: usize, value_bytes: usize) -> bool {
        self.received.len() < self.room && key_bytes + value_bytes <= self.pair_bytes_max
    }

    fn push(&mut self, key: &[u8], value: &[u8]) {
        assert!(self.has_space(key.len(), value.len()), "a pair for which there was no space");
        self.received.push((Key::new(key).expect("within the limit"), value.to_vec()));
    }
}

/// An iterator beside what it has to yield.
struct Expected<I> {
    iterator: I,
    options: IteratorOptions,
    /// Keys in its direction, with the operation that stored the value.
    pairs: Vec<(Key, u64)>,
    next: usize,
}

impl<E: Engine> Clauses<'_, E> {
    fn create(&self, options: &IteratorOptions) -> E::Iterator {
        let created = self.run(self.engine.create_iterator(options.clone())).expect("no fault");
        created.expect("not too many")
    }

    fn next(&self, iterator: &E::Iterator, room: usize) -> (Vec<(Key, Vec<u8>)>, IteratorProgress) {
        let mut sink = Pairs { room, pair_bytes_max: usize::MAX, received: Vec::new() };
        let progress = self.run(self.engine.next_pairs(iterator, &mut sink)).expect("no fault");
        (sink.received, progress)
    }

    /// The next pairs are those that were expected: `room` of them, or up to the end.
    fn expect_next(&self, expected: &mut Expected<E::Iterator>, room: usize, context: &str) {
        let (received, progress) = self.next(&expected.iterator, room);
        let end = (expected.next + room).min(expected.pairs.len());
        let want = &expected.pairs[expected.next..end];
        assert_eq!(received.len(), want.len(), "{context}: the number of pairs");
        for ((key, value), (want, operation)) in received.iter().zip(want) {
            assert_eq!(key, want, "{context}");
            match expected.options.keys_only {
                true => assert!(value.is_empty(), "{context}: {key} has no value here"),
                false => assert_eq!(operation_of(key, value), *operation, "{context}: {key}"),
            }
        }
        let is_known_end = end == expected.pairs.len() && want.len() < room;
        if is_known_end {
            assert_eq!(progress, IteratorProgress::AtEnd, "{context}");
        } else if end < expected.pairs.len() {
            assert_eq!(progress, IteratorProgress::HasNext, "{context}");
        }
        // With the last pair and no more room, an iterator may look for a further one or not.
        expected.next = end;
    }

    /// Under random writes, an iterator yields the pairs of the moment of its creation: forward and in reverse, within its bounds,
    /// and after seeks. `settle` is called between operations, so that the engine can flush or compact.
    pub fn iterators(&self, seed: u64, steps: u64, mut settle: impl FnMut(&mut Prng)) {
        let mut random = Prng::new(seed);
        let mut model: BTreeMap<Key, u64> = BTreeMap::new();
        let mut iterators: Vec<Expected<E::Iterator>> = Vec::new();
        for step in 1..=steps {
            let context = format!("seed {seed}, step {step}");
            let key = key_of(random.below(60));
            match random.below(12) {
                0..4 => {
                    assert_eq!(self.put(&key, step, PutOptions::default()), PutOutcome::Stored, "{context}");
                    model.insert(key, step);
                }
                4..6 => {
                    let was_there = model.remove(&key).is_some();
                    let want = if was_there { DeleteOutcome::Deleted } else { DeleteOutcome::NotFound };
                    assert_eq!(self.delete(&key, Version::NONE), want, "{context}");
                }
                6 if iterators.len() < 20 => {
                    let mut bound = |odds| Some(key_of(random.below(60))).filter(|_| random.one_in(odds));
                    let (lower, upper) = (bound(2), bound(2));
                    let (reverse, keys_only) = (random.one_in(2), random.one_in(4));
                    let options = IteratorOptions { lower, upper, reverse, keys_only };
                    let is_within = |key: &Key| {
                        options.lower.as_ref().is_none_or(|lower| key >= lower)
                            && options.upper.as_ref().is_none_or(|upper| key < upper)
                    };
                    let within = model.iter().filter(|(key, _)| is_within(key));
                    let mut pairs: Vec<_> =
                        within.map(|(key, &operation)| (key.clone(), operation)).collect();
                    if reverse {
                        pairs.reverse();
                    }
                    let iterator = self.create(&options);
                    iterators.push(Expected { iterator, options, pairs, next: 0 });
                }
                7 if !iterators.is_empty() && random.one_in(3) => {
                    drop(iterators.swap_remove(random.below(iterators.len() as u64) as usize));
                }
                8 if !iterators.is_empty() => {
                    let index = random.below(iterators.len() as u64) as usize;
                    let expected = &mut iterators[index];
                    self.run(self.engine.seek_iterator(&expected.iterator, &key)).expect("no fault");
                    let is_passed =
                        |other: &Key| if expected.options.reverse { *other > key } else { *other < key };
                    expected.next = expected.pairs.partition_point(|(other, _)| is_passed(other));
                }
                9 => settle(&mut random),
                _ if !iterators.is_empty() => {
                    let index = random.below(iterators.len() as u64) as usize;
                    self.expect_next(&mut iterators[index], random.below(6) as usize, &context);
                }
                _ => {}
            }
        }
        for mut expected in iterators {
            self.expect_next(&mut expected, usize::MAX >> 1, &format!("seed {seed}, at the end"));
            self.expect_next(&mut expected, 1, &format!("seed {seed}, behind the end"));
        }
    }

    /// A pair without space stays the next one; what expires later is yielded; the number of iterators has a bound, and an
    /// iterator that ends makes room for another.
    pub fn iterator_limits(&self, clock: &TestClock) {
        let (short, expiring) = (key_of(1), key_of(2));
        assert_eq!(self.put(&short, 1, PutOptions::default()), PutOutcome::Stored);
        let until = PutOptions { expires_at: UnixTime(clock.now().0 + 10), ..PutOptions::default() };
        assert_eq!(self.put(&expiring, 2, until), PutOutcome::Stored);
        let iterator = self.create(&IteratorOptions::default());
        let mut small = Pairs { room: 9, pair_bytes_max: 50, received: Vec::new() };
        for _ in 0..2 {
            let progress = self.run(self.engine.next_pairs(&iterator, &mut small));
            assert_eq!((progress, small.received.len()), (Ok(IteratorProgress::HasNext), 0));
        }
        clock.set(UnixTime(clock.now().0 + 10));
        let keys_are = |(received, _): (Vec<(Key, Vec<u8>)>, _), want: &[&Key], context: &str| {
            assert!(received.iter().map(|(key, _)| key).eq(want.iter().copied()), "{context}: {received:?}");
        };
        keys_are(self.next(&iterator, 9), &[&short, &expiring], "as it was");
        let later = self.create(&IteratorOptions::default());
        keys_are(self.next(&later, 9), &[&short], "one that is created now sees it expired");
        let none =
            IteratorOptions { lower: Some(expiring), upper: Some(short), ..IteratorOptions::default() };
        let empty = self.create(&none);
        assert_eq!(self.next(&empty, 9), (Vec::new(), IteratorProgress::AtEnd), "bounds reversed");
        let mut iterators = vec![iterator, later, empty];
        while let Some(iterator) =
            self.run(self.engine.create_iterator(IteratorOptions::default())).expect("no fault")
        {
            iterators.push(iterator);
            assert!(iterators.len() <= ITERATORS_MAX, "the number of iterators has a bound");
        }
        drop(iterators.pop());
        drop(self.create(&IteratorOptions::default()));
    }
}
