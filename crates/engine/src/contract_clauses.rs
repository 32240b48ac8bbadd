//! The clauses of the contract beyond values: versions, conditions, expiry, tombstones, ranges, lists of buffers, scans,
//! partitions. Each is a function over any engine; an engine's tests call those that its format can do, and
//! [`Clauses::lacks`] for the others.
//!
//! In: an engine, empty, and what a test has to move: a wall clock, and a hook that makes progress outside the engine.
//! Out: a panic with what differs. [`Clauses::random_writes`] compares random operations with a model of a few lines,
//! written apart from every engine.

use crate::conformance::{IdleHook, key_of, operation_of, record_of, value_of};
use crate::{
    Capability, DeleteOutcome, Engine, EngineError, IteratorOptions, PartitionError, Partitions, PutMode,
    PutOptions, PutOutcome, PutValue, ScanEntry, ValueRange, value_digest,
};
use octokv_base::{Buffer, Key, Prng, RingPosition, RingRange, UnixTime, Version};
use std::collections::BTreeMap;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Wake, Waker};

/// A wall clock that a test sets.
#[derive(Clone, Default)]
pub struct TestClock(Arc<AtomicU64>);

impl TestClock {
    /// The time that was set last, at first 0.
    pub fn now(&self) -> UnixTime {
        UnixTime(self.0.load(Ordering::Relaxed))
    }

    /// Sets the time.
    pub fn set(&self, now: UnixTime) {
        self.0.store(now.0, Ordering::Relaxed);
    }
}

/// An engine under test.
pub struct Clauses<'a, E> {
    /// The engine, without keys.
    pub engine: &'a E,
    /// Called while an operation waits.
    pub idle: IdleHook<'a>,
}

/// Counts the wake-ups of a task.
#[derive(Default)]
struct WakeCount(AtomicU64);

impl Wake for WakeCount {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// One entry of a scan, owned.
type Scanned = (RingPosition, Key, Version, bool, u64);

fn version(sequence: u64) -> Version {
    Version::new(1, sequence).expect("in range")
}

impl<E: Engine> Clauses<'_, E> {
    pub(crate) fn run<T>(&self, future: impl Future<Output = T>) -> T {
        octokv_runtime::block_on(future, || (self.idle.borrow_mut())())
    }

    fn try_put(&self, key: &Key, operation: u64, options: PutOptions) -> Result<PutOutcome, EngineError> {
        let value = value_of(key, operation, 100);
        let record = record_of(self.engine.record_layout(), key, &value);
        self.run(self.engine.put_with(key, PutValue::new(record, 100), options))
    }

    pub(crate) fn put(&self, key: &Key, operation: u64, options: PutOptions) -> PutOutcome {
        self.try_put(key, operation, options).expect("no fault")
    }

    fn put_at(&self, key: &Key, operation: u64, at: Version) -> PutOutcome {
        self.put(key, operation, PutOptions { version: at, ..PutOptions::default() })
    }

    pub(crate) fn delete(&self, key: &Key, at: Version) -> DeleteOutcome {
        self.run(self.engine.delete_with(key, at)).expect("no fault")
    }

    /// The operation that stored the key's value, and its version; get and status agree.
    fn found(&self, key: &Key) -> Option<(u64, Version)> {
        let value = self.run(self.engine.get_range(key, ValueRange::ALL)).expect("no fault");
        let status = self.run(self.engine.status(key)).expect("no fault");
        assert_eq!(
            value.as_ref().map(|value| (value.value_bytes as usize, value.version)),
            status.map(|status| (status.value_bytes, status.version)),
            "{key}: get and status"
        );
        value.map(|value| (operation_of(key, value.as_bytes()), value.version))
    }

    fn scan(&self, range: RingRange, since: Version, limit: usize) -> Vec<Scanned> {
        let mut scanned = Vec::new();
        let mut sink = |entry: &ScanEntry<'_>| {
            let has_space = scanned.len() < limit;
            if has_space {
                let key = Key::new(entry.key).expect("within the limit");
                scanned.push((entry.position, key, entry.version, entry.is_tombstone, entry.digest));
            }
            has_space
        };
        self.run(self.engine.scan(range, since, &mut sink)).expect("no fault");
        scanned
    }

    /// A future may be dropped after any poll: its write then happens or not, its key can be written again, and nothing is
    /// left over. `is_idle` tells when the engine has ended what it continues ([`Engine::run_abandoned`]); `None` of an engine
    /// that continues nothing, since its operations end in their first poll.
    ///
    /// Returns how many futures were dropped after a poll and before their end.
    pub fn dropped_futures(&self, is_idle: Option<&dyn Fn() -> bool>) -> u64 {
        let mut half_done = 0;
        let (key, other) = (key_of(1), key_of(2));
        let mut operation = 0;
        for kind in 0..6 {
            for polls in 0.. {
                let (before, after) = (operation + 1, operation + 2);
                operation = after;
                assert_eq!(self.put(&key, before, PutOptions::default()), PutOutcome::Stored);
                let value = value_of(&key, after, 100);
                let put = || {
                    let record = record_of(self.engine.record_layout(), &key, &value);
                    self.engine.put_with(&key, PutValue::new(record, 100), PutOptions::default())
                };
                let engine = self.engine;
                let (may_write, has_ended) = match kind {
                    0 => (Some(Some(after)), self.drop_after(polls, put())),
                    1 => (Some(None), self.drop_after(polls, engine.delete(&key))),
                    2 => (None, self.drop_after(polls, engine.get(&key))),
                    3 => (None, self.drop_after(polls, engine.flush())),
                    4 => {
                        let mut sink = |_: &[u8]| true;
                        let start = Key::new(&[]).expect("empty");
                        (None, self.drop_after(polls, engine.list(&start, &mut sink)))
                    }
                    // Two writers of one key: the second waits for its lock.
                    _ => {
                        let mut first = Box::pin(put());
                        let mut second = Box::pin(engine.delete(&key));
                        let ended =
                            self.poll_times(first.as_mut(), polls) & self.poll_times(second.as_mut(), polls);
                        (Some(None), ended)
                    }
                };
                half_done += u64::from(polls > 0 && !has_ended);
                match is_idle {
                    Some(is_idle) => self.run_abandoned(is_idle),
                    None => assert!(polls == 0 || has_ended, "operation {kind} takes a second poll"),
                }
                let found = self.found(&key).map(|(operation, _)| operation);
                assert!(polls > 0 || found == Some(before), "operation {kind} ran without a poll: {found:?}");
                let written =
                    may_write.is_some_and(|written| found == written || kind > 4 && found == Some(after));
                assert!(
                    found == Some(before) && !(has_ended && may_write.is_some()) || written,
                    "operation {kind} dropped after {polls} polls: found {found:?}, was {before}"
                );
                assert_eq!(self.put(&other, after, PutOptions::default()), PutOutcome::Stored);
                if has_ended {
                    break;
                }
            }
        }
        half_done
    }

    /// A write that is dropped half done keeps its key locked and the volume busy until [`Engine::run_abandoned`] has ended it.
    /// The task that runs that was there before the drop, which wakes it.
    pub fn abandoned_writes(&self, is_idle: &dyn Fn() -> bool) {
        let key = key_of(1);
        for is_put in [true, false] {
            assert_eq!(self.put(&key, 1, PutOptions::default()), PutOutcome::Stored);
            let wakes = Arc::new(WakeCount::default());
            let waker = Waker::from(Arc::clone(&wakes));
            let runner_context = &mut Context::from_waker(&waker);
            let mut runner = pin!(self.engine.run_abandoned());
            assert!(runner.as_mut().poll(runner_context).is_pending() && is_idle());
            let value = value_of(&key, 2, 100);
            let record = record_of(self.engine.record_layout(), &key, &value);
            let put = self.engine.put_with(&key, PutValue::new(record, 100), PutOptions::default());
            let has_ended = match is_put {
                true => self.drop_after(1, put),
                false => self.drop_after(1, self.engine.delete(&key)),
            };
            assert!(!has_ended && wakes.0.load(Ordering::Relaxed) > 0, "the drop wakes the runner");
            let mut next = pin!(self.engine.delete(&key));
            assert!(!self.poll_times(next.as_mut(), 100) && !is_idle(), "it holds its key");
            let mut polls = 0..10_000;
            let mut next_has_ended = false;
            while !next_has_ended || !is_idle() {
                assert!(polls.next().is_some(), "an abandoned write does not end");
                assert!(runner.as_mut().poll(runner_context).is_pending(), "it never ends");
                next_has_ended = next_has_ended || self.poll_times(next.as_mut(), 1);
                (self.idle.borrow_mut())();
            }
            assert_eq!(self.found(&key), None, "the delete that waited was the last");
        }
    }

    /// Whether a future ended within some polls; between them other things make progress.
    fn poll_times<T>(&self, mut future: Pin<&mut impl Future<Output = T>>, polls: usize) -> bool {
        (0..polls).any(|_| {
            let ended = future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready();
            (self.idle.borrow_mut())();
            ended
        })
    }

    fn drop_after<T>(&self, polls: usize, future: impl Future<Output = T>) -> bool {
        self.poll_times(pin!(future), polls)
    }

    /// Runs what callers dropped to its end.
    fn run_abandoned(&self, is_idle: impl Fn() -> bool) {
        let mut abandoned = pin!(self.engine.run_abandoned());
        for _ in 0..10_000 {
            assert!(abandoned.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            if is_idle() {
                return;
            }
            (self.idle.borrow_mut())();
        }
        panic!("abandoned operations do not end");
    }

    /// A write with a version applies only if it is newer; the version is returned; a delete leaves a tombstone.
    pub fn versions(&self) {
        let key = key_of(1);
        assert_eq!(self.put_at(&key, 1, version(5)), PutOutcome::Stored);
        for old in [Version::from_bits(1), version(4), version(5)] {
            assert_eq!(self.put_at(&key, 2, old), PutOutcome::NotNewer(version(5)));
            assert_eq!(self.delete(&key, old), DeleteOutcome::NotNewer(version(5)));
        }
        assert_eq!(self.found(&key), Some((1, version(5))));
        // A later epoch is newer whatever its sequence.
        let epoch = Version::new(2, 0).expect("in range");
        assert_eq!(self.put_at(&key, 3, epoch), PutOutcome::Stored);
        assert_eq!(self.found(&key), Some((3, epoch)));
        // Without a version a write always applies, and the version stays.
        assert_eq!(self.put(&key, 4, PutOptions::default()), PutOutcome::Stored);
        assert_eq!(self.found(&key), Some((4, epoch)));
        let after = Version::new(2, 9).expect("in range");
        assert_eq!(self.delete(&key, after), DeleteOutcome::Deleted);
        assert_eq!(self.found(&key), None);
        assert_eq!(self.put_at(&key, 5, after), PutOutcome::NotNewer(after), "a tombstone has a version");
        assert_eq!(self.delete(&key, epoch), DeleteOutcome::NotNewer(after));
        // A key that comes back without a version keeps that of its tombstone, also through a second delete.
        assert_eq!(self.put(&key, 6, PutOptions::default()), PutOutcome::Stored);
        assert_eq!(self.found(&key), Some((6, after)));
        assert_eq!(self.delete(&key, Version::NONE), DeleteOutcome::Deleted);
        assert_eq!(self.delete(&key, Version::NONE), DeleteOutcome::NotFound);
        assert_eq!(self.put_at(&key, 7, epoch), PutOutcome::NotNewer(after));
        // A tombstone of a key that never existed, and its end.
        let other = key_of(2);
        assert_eq!(self.delete(&other, epoch), DeleteOutcome::NotFound);
        assert_eq!(self.put_at(&other, 8, version(9)), PutOutcome::NotNewer(epoch));
        self.run(self.engine.forget_below(after)).expect("no fault");
        assert_eq!(
            self.put_at(&other, 9, version(9)),
            PutOutcome::Stored,
            "the tombstone below is forgotten"
        );
        assert_eq!(
            self.put_at(&key, 10, epoch),
            PutOutcome::NotNewer(after),
            "the one at the version is not"
        );
    }

    /// Conditions, on versions among them, decide by what exists; a write that is not newer says so first.
    pub fn conditions(&self) {
        let key = key_of(1);
        let put = |operation, mode| self.put(&key, operation, PutOptions::from(mode));
        assert_eq!(put(1, PutMode::IfVersion(version(1))), PutOutcome::OtherVersion(Version::NONE));
        assert_eq!(put(1, PutMode::UpdateOnly), PutOutcome::NotFound);
        assert_eq!(put(2, PutMode::IfVersion(Version::NONE)), PutOutcome::Stored);
        assert_eq!(put(3, PutMode::AddOnly), PutOutcome::Exists);
        let swap = |operation, expected, new| {
            let mode = PutMode::IfVersion(expected);
            self.put(&key, operation, PutOptions { mode, version: new, ..PutOptions::default() })
        };
        assert_eq!(swap(4, Version::NONE, version(1)), PutOutcome::Stored);
        assert_eq!(swap(5, Version::NONE, version(2)), PutOutcome::OtherVersion(version(1)));
        assert_eq!(swap(6, version(1), version(1)), PutOutcome::NotNewer(version(1)));
        assert_eq!(swap(7, version(1), version(3)), PutOutcome::Stored);
        assert_eq!(self.found(&key), Some((7, version(3))));
        // A tombstone does not exist, but has a version.
        assert_eq!(self.delete(&key, version(4)), DeleteOutcome::Deleted);
        assert_eq!(put(8, PutMode::UpdateOnly), PutOutcome::NotFound);
        assert_eq!(swap(9, version(4), version(5)), PutOutcome::Stored);
        assert_eq!(self.delete(&key, version(6)), DeleteOutcome::Deleted);
        assert_eq!(put(10, PutMode::AddOnly), PutOutcome::Stored);
        assert_eq!(self.found(&key), Some((10, version(6))));
    }

    /// A key exists until its time comes, and not after; a later put without a time removes it.
    pub fn expiry(&self, clock: &TestClock) {
        let (key, versioned) = (key_of(1), key_of(2));
        clock.set(UnixTime(1_000));
        let until = |at| PutOptions { expires_at: UnixTime(at), ..PutOptions::default() };
        assert_eq!(self.put(&key, 1, until(2_000)), PutOutcome::Stored);
        assert_eq!(
            self.put(&versioned, 1, PutOptions { version: version(1), ..until(2_000) }),
            PutOutcome::Stored
        );
        clock.set(UnixTime(1_999));
        assert_eq!(self.found(&key), Some((1, Version::NONE)));
        let status = self.run(self.engine.status(&key)).expect("no fault").expect("exists");
        assert_eq!(status.expires_at, UnixTime(2_000));
        assert_eq!(
            self.put(&key, 2, PutOptions { mode: PutMode::AddOnly, ..until(9_000) }),
            PutOutcome::Exists
        );
        clock.set(UnixTime(2_000));
        assert_eq!((self.found(&key), self.found(&versioned)), (None, None));
        let mut listed = 0;
        let mut count = |_: &[u8]| {
            listed += 1;
            true
        };
        self.run(self.engine.list(&Key::new(&[]).expect("short"), &mut count)).expect("no fault");
        assert_eq!(listed, 0, "no list has it");
        let scanned = self.scan(RingRange::FULL, Version::NONE, 10);
        let seen: Vec<_> =
            scanned.iter().map(|(_, key, at, gone, digest)| (key, *at, *gone, *digest)).collect();
        assert_eq!(seen, [(&versioned, version(1), true, 0)], "what has expired is scanned as a tombstone");
        assert_eq!(self.delete(&key, Version::NONE), DeleteOutcome::NotFound);
        assert_eq!(self.put_at(&versioned, 3, version(1)), PutOutcome::NotNewer(version(1)));
        assert_eq!(self.put(&key, 4, until(3_000)), PutOutcome::Stored);
        assert_eq!(self.put(&key, 5, PutOptions::default()), PutOutcome::Stored);
        clock.set(UnixTime(u64::MAX - 1));
        assert_eq!(self.found(&key), Some((5, Version::NONE)));
    }

    /// A value may come in several buffers, and a part of it be read.
    pub fn buffers_and_ranges(&self) {
        let key = key_of(6);
        let bytes = 3_000;
        let value = value_of(&key, 1, bytes);
        let layout = self.engine.record_layout();
        let value_at = layout.value_offset(key.len());
        for cuts in [vec![0, 1], vec![1, 2_999], vec![1_000, 2_000], vec![10, 10, 20], vec![3_000]] {
            let mut record = Buffer::zeroed(value_at + cuts[0]);
            record[value_at..].copy_from_slice(&value[..cuts[0]]);
            let mut more = Vec::new();
            for (at, &from) in cuts.iter().enumerate() {
                let part = &value[from..cuts.get(at + 1).copied().unwrap_or(bytes)];
                // The last buffer may be longer than what is left of the value.
                let mut buffer = Buffer::zeroed(part.len() + 7 * usize::from(at + 1 == cuts.len()));
                buffer[..part.len()].copy_from_slice(part);
                more.push(buffer);
            }
            let put = PutValue { record, more: Some(more.into()), bytes };
            let stored = self.run(self.engine.put_with(&key, put, PutOptions::default()));
            assert_eq!(stored, Ok(PutOutcome::Stored), "{cuts:?}");
            for (offset, bytes_max) in [(0, u32::MAX), (0, 1), (1, 2_998), (2_999, 5), (3_000, 1), (9_999, 9)]
            {
                let range = ValueRange { offset, bytes_max };
                let part = self.run(self.engine.get_range(&key, range)).expect("no fault").expect("exists");
                let want = range.within(bytes as u32);
                assert_eq!(part.as_bytes(), &value[want.start as usize..want.end as usize], "{range:?}");
                assert_eq!(part.value_bytes as usize, bytes);
            }
        }
        let short = PutValue {
            record: record_of(layout, &key, &value[..10]),
            more: Some([Buffer::zeroed(10)].into()),
            bytes: 21,
        };
        let refused = self.run(self.engine.put_with(&key, short, PutOptions::default()));
        assert_eq!(refused, Ok(PutOutcome::TooLong), "buffers that hold less than the value");
        assert_eq!(self.found(&key), Some((1, Version::NONE)));
    }

    /// A scan yields every key of its range in ring order, with the digest of its value, and goes on where one ended.
    pub fn scans(&self) {
        let keys: Vec<Key> = (0..200).map(key_of).collect();
        for (operation, key) in keys.iter().enumerate() {
            assert_eq!(self.put(key, operation as u64, PutOptions::default()), PutOutcome::Stored);
        }
        assert_eq!(self.delete(&keys[77], Version::NONE), DeleteOutcome::Deleted);
        let all = self.scan(RingRange::FULL, Version::NONE, usize::MAX);
        assert_eq!(all.len(), keys.len() - 1);
        assert!(all.is_sorted_by(|one, other| one.0 < other.0), "in ring order");
        for (_, key, at, is_tombstone, digest) in &all {
            let operation = keys.iter().position(|stored| stored == key).expect("one of ours");
            let want = value_digest(&value_of(key, operation as u64, 100), UnixTime::NEVER);
            assert_eq!((*at, *is_tombstone, *digest), (Version::NONE, false, want), "{key}");
        }
        let (low, high) = RingRange::FULL.split(all[50].0).expect("two parts");
        assert_eq!(self.scan(low, Version::NONE, usize::MAX), all[..50]);
        assert_eq!(self.scan(high, Version::NONE, usize::MAX), all[50..]);
        assert_eq!(self.scan(high, Version::NONE, 7), all[50..57]);
        let rest = RingRange::new(RingPosition(all[56].0.0 + 1), RingPosition::MAX).expect("not empty");
        assert_eq!(self.scan(rest, Version::NONE, usize::MAX), all[57..]);
        let one = RingRange::new(all[3].0, all[3].0).expect("one position");
        assert_eq!(self.scan(one, Version::NONE, usize::MAX), all[3..4]);
        assert_eq!(self.scan(RingRange::FULL, version(1), usize::MAX), [], "no key has a version");
    }

    /// A scan with `since` returns the entries whose version is `since` or newer, tombstones included.
    pub fn scans_since(&self) {
        let (old, new, gone) = (key_of(1), key_of(2), key_of(3));
        assert_eq!(self.put_at(&old, 1, version(1)), PutOutcome::Stored);
        assert_eq!(self.put_at(&new, 2, version(2)), PutOutcome::Stored);
        assert_eq!(self.delete(&gone, version(3)), DeleteOutcome::NotFound);
        let since = |at| {
            let mut seen: Vec<_> =
                self.scan(RingRange::FULL, at, 9).into_iter().map(|entry| (entry.1, entry.3)).collect();
            seen.sort();
            seen
        };
        let (old, new, gone) = ((old, false), (new, false), (gone, true));
        assert_eq!(since(Version::NONE), [old, new.clone(), gone.clone()]);
        assert_eq!(since(version(2)), [new, gone.clone()]);
        assert_eq!(since(version(3)), [gone]);
        assert_eq!(since(version(4)), []);
    }

    /// Space is given up, of keys without a version, until enough is free.
    pub fn gives_up_space(&self) {
        for index in 0..20 {
            assert_eq!(self.put(&key_of(index), index, PutOptions::default()), PutOutcome::Stored);
        }
        assert_eq!(self.put_at(&key_of(20), 20, version(1)), PutOutcome::Stored);
        let used = self.engine.statistics().used_bytes;
        let freed = self.run(self.engine.give_up_space(1)).expect("no fault");
        assert!(freed >= 1 && self.engine.statistics().used_bytes == used - freed);
        assert_eq!(self.engine.statistics().keys, 20, "no more than one key");
        assert!(self.run(self.engine.give_up_space(u64::MAX)).expect("no fault") > 0);
        assert_eq!(self.engine.statistics().keys, 1);
        assert_eq!(self.found(&key_of(20)), Some((20, version(1))));
        assert_eq!(self.run(self.engine.give_up_space(1)), Ok(0));
    }

    /// Random writes with and without versions on few keys, compared with a model.
    pub fn random_writes(&self, seed: u64, steps: u64) {
        let mut random = Prng::new(seed);
        // Of each key: the operation whose value it holds, and its version.
        let mut model: BTreeMap<Key, (Option<u64>, Version)> = BTreeMap::new();
        for operation in 1..=steps {
            let key = key_of(random.below(8));
            let at = if random.one_in(3) { Version::NONE } else { version(random.below(steps / 4 + 1)) };
            let (held, known) = model.get(&key).copied().unwrap_or((None, Version::NONE));
            let is_stale = at > Version::NONE && at <= known;
            let after = at.max(known);
            let context = format!("seed {seed}, operation {operation}: {key} at {at}");
            if random.one_in(3) {
                let want = match (is_stale, held) {
                    (true, _) => DeleteOutcome::NotNewer(known),
                    (false, Some(_)) => DeleteOutcome::Deleted,
                    (false, None) => DeleteOutcome::NotFound,
                };
                assert_eq!(self.delete(&key, at), want, "{context}");
                if !is_stale {
                    model.insert(key.clone(), (None, after));
                }
            } else {
                let modes =
                    [PutMode::Upsert, PutMode::AddOnly, PutMode::UpdateOnly, PutMode::IfVersion(known)];
                let mode = modes[random.below(4) as usize];
                let want = match (is_stale, mode, held) {
                    (true, ..) => PutOutcome::NotNewer(known),
                    (_, PutMode::AddOnly, Some(_)) => PutOutcome::Exists,
                    (_, PutMode::UpdateOnly, None) => PutOutcome::NotFound,
                    _ => PutOutcome::Stored,
                };
                let options = PutOptions { mode, version: at, expires_at: UnixTime::NEVER };
                assert_eq!(self.put(&key, operation, options), want, "{context}");
                if want == PutOutcome::Stored {
                    model.insert(key.clone(), (Some(operation), after));
                }
            }
            let (held, known) = model.get(&key).copied().unwrap_or((None, Version::NONE));
            assert_eq!(self.found(&key), held.map(|held| (held, known)), "{context}");
        }
        let kept = model.iter().filter(|(_, (held, at))| held.is_some() || *at > Version::NONE);
        let mut want: Vec<_> = kept.map(|(key, (held, at))| (key.clone(), *at, held.is_none())).collect();
        want.sort();
        let scanned = self.scan(RingRange::FULL, Version::NONE, usize::MAX).into_iter();
        let mut seen: Vec<_> = scanned.map(|(_, key, at, gone, _)| (key, at, gone)).collect();
        seen.sort();
        assert_eq!(seen, want, "seed {seed}: the scan");
    }

    /// Every key has an owner among `cores` cores, always the same, or no key has one.
    pub fn owner_cores(&self, cores: usize) {
        let owners = |_| (0..200).map(|index| self.engine.owner_core(&key_of(index))).collect::<Vec<_>>();
        let [before, again] = [0, 1].map(owners);
        assert_eq!(before, again);
        let has_owners = self.engine.has_owner_cores();
        assert!(before.iter().all(|owner| owner.is_some() == has_owners), "{before:?}");
        assert!(before.iter().flatten().all(|owner| *owner < cores), "{before:?}");
    }

    /// Every key has one of so many cores for drives, and each core has keys, with up to `most` cores.
    pub fn drive_cores(&self, most: usize) {
        for cores in 1..=most {
            let of = |index| self.engine.drive_core(&key_of(index), cores);
            let mut found: Vec<_> = (0..200).map(of).collect();
            assert_eq!(found, (0..200).map(of).collect::<Vec<_>>());
            found.sort_unstable();
            found.dedup();
            assert_eq!(found, (0..cores).collect::<Vec<_>>());
        }
    }

    /// The engine refuses by name what it cannot do, and changes nothing.
    pub fn lacks(&self, capability: Capability) {
        let key = key_of(1);
        assert_eq!(self.put(&key, 1, PutOptions::default()), PutOutcome::Stored);
        let lacking = EngineError::Unsupported(capability);
        match capability {
            Capability::Versions => {
                let versioned = PutOptions { version: version(1), ..PutOptions::default() };
                let conditional = PutOptions::from(PutMode::IfVersion(Version::NONE));
                assert_eq!(self.try_put(&key, 2, versioned), Err(lacking));
                assert_eq!(self.try_put(&key, 2, conditional), Err(lacking));
                assert_eq!(self.run(self.engine.delete_with(&key, version(1))), Err(lacking));
            }
            Capability::Expiry => {
                let expiring = PutOptions { expires_at: UnixTime(1), ..PutOptions::default() };
                assert_eq!(self.try_put(&key, 2, expiring), Err(lacking));
            }
            Capability::Reclaim => assert_eq!(self.run(self.engine.give_up_space(1)), Err(lacking)),
            Capability::RingOrder => {
                let mut sink = |_: &ScanEntry<'_>| true;
                let scan = self.engine.scan(RingRange::FULL, Version::NONE, &mut sink);
                assert_eq!(self.run(scan), Err(lacking));
            }
            Capability::Iterators => {
                let created = self.run(self.engine.create_iterator(IteratorOptions::default()));
                assert_eq!(created.map(|created| created.is_some()), Err(lacking));
            }
            Capability::Partitions => panic!("partitions are a trait of their own"),
        }
        assert_eq!(self.found(&key), Some((1, Version::NONE)));
    }
}

impl<E: Engine + Partitions> Clauses<'_, E> {
    /// Partitions are created, split, listed and freed; a key belongs to the one that has its position.
    pub fn partitions(&self) {
        let whole = self.engine.partitions();
        assert_eq!((whole.len(), whole[0].range, whole[0].device), (1, RingRange::FULL, 0));
        for index in 0..100 {
            assert_eq!(self.put(&key_of(index), index, PutOptions::default()), PutOutcome::Stored);
        }
        let used_bytes = self.engine.partitions()[0].used_bytes;
        let all = self.scan(RingRange::FULL, Version::NONE, usize::MAX);
        let (first, middle) = (whole[0].id, all[40].0);
        let second = self.run(self.engine.split_partition(first, middle)).expect("splits");
        let parts = self.engine.partitions();
        assert_eq!(parts.iter().map(|part| part.id).collect::<Vec<_>>(), [first, second]);
        assert_eq!(parts.iter().map(|part| part.used_bytes).sum::<u64>(), used_bytes);
        assert!(parts.iter().all(|part| part.used_bytes > 0) && parts[1].range.first() == middle);
        assert_eq!(self.scan(RingRange::FULL, Version::NONE, usize::MAX), all, "a split moves no key");
        let error = |result: Result<u32, PartitionError>| result.expect_err("refused");
        assert_eq!(error(self.run(self.engine.split_partition(99, middle))), PartitionError::Unknown(99));
        let outside = self.run(self.engine.split_partition(first, middle));
        assert_eq!(error(outside), PartitionError::NotWithin(middle));
        let overlap = self.run(self.engine.create_partition(RingRange::FULL, 0));
        assert_eq!(error(overlap), PartitionError::Overlap(first));
        self.run(self.engine.free_partition(second)).expect("frees");
        assert_eq!(self.run(self.engine.free_partition(second)), Err(PartitionError::Unknown(second)));
        assert_eq!(self.scan(RingRange::FULL, Version::NONE, usize::MAX), all[..40]);
        let key = &all[60].1;
        assert_eq!(self.try_put(key, 1, PutOptions::default()), Err(EngineError::NoPartition));
        assert_eq!(self.run(self.engine.delete_with(key, Version::NONE)), Err(EngineError::NoPartition));
        assert_eq!(self.found(key), None);
        let range = RingRange::new(middle, RingPosition::MAX).expect("not empty");
        let unknown = self.run(self.engine.create_partition(range, u16::MAX));
        assert_eq!(error(unknown), PartitionError::UnknownDevice(u16::MAX));
        let third = self.run(self.engine.create_partition(range, 1)).expect("creates");
        assert!(third != first && third != second, "an identifier is not used again");
        assert_eq!(self.engine.partitions()[1].device, 1);
        assert_eq!(self.put(key, 2, PutOptions::default()), PutOutcome::Stored);
        assert_eq!(self.scan(range, Version::NONE, usize::MAX).len(), 1);
    }
}
