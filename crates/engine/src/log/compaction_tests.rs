//! Tests of compaction: after any moves of images and records each key has its last value, and the compacted chunks are free.

use super::compaction_policy::{CompactionCandidate, key_worth_max};
use super::compaction_rounds::{RoundEnd, RoundPace};
use super::compaction_window::CompactionWindow;
use super::log_place::{ChunkIndex, LogKind};
use super::segment_entry::{EntryContents, ValuePlace};
use super::segment_reads::ReadRepeats;
use super::test_log_volume::{CHUNKS, OpenTestVolume};
use super::window_space::WindowSpace;
use crate::conformance::{key_of, value_of};
use crate::{DeleteOutcome, Durability, EngineError, PutOptions, PutOutcome};
use futures_util::stream::{FuturesUnordered, StreamExt};
use octokv_base::{Key, Prng, UnixTime, Version};
use octokv_device::DeviceError;
use octokv_device::fault_injection::{FaultRule, InjectedFault, OpFilter};
use octokv_runtime::{block_on, yield_now};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;

/// Free chunks that a test keeps, so that its writes never wait.
const FREE_MIN: u32 = 40;

/// The operation and the length of the value of each key, by its number.
pub(super) type Model = BTreeMap<u64, (u64, usize)>;

fn length(random: &mut Prng) -> usize {
    match random.below(40) {
        0 => 0,
        // In two extents or three.
        1 => 1 + random.below(40_000) as usize,
        2..10 => 1 + random.below(3_000) as usize,
        _ => 1 + random.below(300) as usize,
    }
}

pub(super) fn stored(volume: &OpenTestVolume, key: &Key, operation: u64, bytes: usize) {
    let put = volume.put(key, operation, bytes, PutOptions::default());
    assert_eq!(block_on(put, || ()), Ok(PutOutcome::Stored), "{key:?}");
}

pub(super) fn check_values(volume: &OpenTestVolume, keys: u64, model: &Model) {
    for number in 0..keys {
        let key = key_of(number);
        let got = block_on(volume.get(&key), || ());
        let expected = model.get(&number).map(|&(operation, bytes)| value_of(&key, operation, bytes));
        assert_eq!(got, Ok(expected), "key {number}");
    }
}

/// Fills a volume with values of 200 B and less, of which many are garbage.
pub(super) fn filled(volume: &OpenTestVolume, keys: u64, rounds: u64) -> Model {
    let mut model = Model::new();
    for operation in 0..keys * rounds {
        let number = operation * 7 % keys;
        let bytes = 100 + (operation % 100) as usize;
        stored(volume, &key_of(number), operation, bytes);
        model.insert(number, (operation, bytes));
    }
    model
}

/// Compacts a log of each store until its head is behind all chunks that it has now.
pub(super) fn compact_whole(volume: &OpenTestVolume, log: LogKind) {
    for store in volume.stores() {
        let head_and_tail = || {
            let state = store.state.lock();
            let log = if log == LogKind::Keys { &state.keys } else { &state.values };
            (log.head(), log.tail().index)
        };
        let (_, end) = head_and_tail();
        let end = match log {
            LogKind::Values => end,
            // The images of the tail, too.
            LogKind::Keys => ChunkIndex(end.0 + 1),
        };
        while head_and_tail().1 < end {
            assert_eq!(block_on(volume.core.append_marker(store), || ()), Ok(()));
        }
        while head_and_tail().0 < end {
            assert_eq!(block_on(volume.core.compact_once(store, log), || ()), Ok(RoundEnd::Advanced));
        }
    }
}

fn overwrite_and_compact(volume: &OpenTestVolume, seed: u64) {
    let (keys, mut random, mut model) = (300, Prng::new(seed), Model::new());
    for operation in 0..4_000 {
        let number = random.below(keys);
        let key = key_of(number);
        if random.below(8) == 0 {
            let existed = model.remove(&number).is_some();
            let expected = if existed { DeleteOutcome::Deleted } else { DeleteOutcome::NotFound };
            assert_eq!(block_on(volume.core.delete(&key, Version::NONE), || ()), Ok(expected));
        } else {
            let bytes = length(&mut random);
            stored(volume, &key, operation, bytes);
            model.insert(number, (operation, bytes));
        }
        if volume.pool().free() < FREE_MIN {
            while volume.pool().free() < FREE_MIN + 4 {
                assert_eq!(
                    block_on(volume.core.compact_round(FREE_MIN + 4, RoundPace::Any), || ()),
                    Ok(true),
                    "{operation}"
                );
            }
            volume.check_counts();
        }
    }
    check_values(volume, keys, &model);
    compact_whole(volume, LogKind::Values);
    compact_whole(volume, LogKind::Keys);
    volume.check_counts();
    check_values(volume, keys, &model);
    let counters = &volume.core.volume.counters;
    for (counter, least) in [
        (&counters.compaction_rounds, u64::from(CHUNKS)),
        (&counters.moved_images, 30),
        (&counters.visits, 100),
        (&counters.checkpoints, 2),
        (&counters.moved_values, 150),
        (&counters.values_read_together, 50),
    ] {
        assert!(counter.load(Ordering::Relaxed) >= least, "{counters:?}");
    }
    assert_eq!(counters.lost_values.load(Ordering::Relaxed), 0);
}

/// Opens a window of a store that takes as many chunks as there are.
fn open_greedy_window(volume: &OpenTestVolume, store: usize) {
    let state = &mut *volume.stores()[store].state.lock();
    let (head, segments) = (state.values.head(), state.table.segments());
    let space = WindowSpace::new(CHUNKS, CHUNKS.into(), 100 * segments, segments);
    state.window = Some(CompactionWindow::new(head..ChunkIndex(head.0 + CHUNKS), space, segments));
}

pub(super) fn value_head(volume: &OpenTestVolume, store: usize) -> ChunkIndex {
    volume.stores()[store].state.lock().values.head()
}

#[test]
fn windows_of_stores_are_opened_one_after_another() {
    let volume = OpenTestVolume::new(9, Durability::PowerSafe, |settings| settings.window_divisor = 1);
    let mut model = filled(&volume, 3_000, 1);
    for number in (0..3_000).step_by(2) {
        stored(&volume, &key_of(number), number, 50);
        model.insert(number, (number, 50));
    }
    let round = |pace| block_on(volume.core.compact_round(u32::MAX, pace), || ());
    open_greedy_window(&volume, 1);
    let turn = volume.core.volume.compactions.begin(1, LogKind::Values).expect("none runs");
    let head = value_head(&volume, 0);
    // Key logs are compacted, and then the value log of store 0 has garbage left.
    while round(RoundPace::InTurn) == Ok(true) {}
    assert_eq!((round(RoundPace::InTurn), value_head(&volume, 0)), (Ok(false), head));
    // The rest of their garbage would cost too much.
    let candidates = volume.core.candidates().0;
    let waiting = candidates.iter().find(|other| (other.store, other.log) == (0, LogKind::Values));
    let worth_max = key_worth_max(&[*waiting.expect("it has garbage")], false);
    let dear = |other: &&CompactionCandidate| {
        other.log == LogKind::Keys && other.garbage_bytes > 0 && other.space_worth > worth_max
    };
    assert!(candidates.iter().any(|other| dear(&other)), "{candidates:?}");
    assert_eq!(round(RoundPace::Any), Ok(true));
    assert!(value_head(&volume, 0) > head);
    // An open window goes on.
    drop(turn);
    let head = value_head(&volume, 1);
    while value_head(&volume, 1) == head {
        assert_eq!(round(RoundPace::InTurn), Ok(true));
    }
    check_values(&volume, 3_000, &model);
}

#[test]
fn a_head_that_is_fuller_than_the_other_chunks_costs_as_much_as_they_do() {
    let volume = OpenTestVolume::new(15, Durability::PowerSafe, |_| ());
    // Cold keys, and behind them chunks of one key.
    let mut model = filled(&volume, 600, 1);
    for value in 1_000..4_000 {
        stored(&volume, &key_of(7), value, 50);
        model.insert(7, (value, 50));
    }
    let head = volume.stores()[0].state.lock().values.sealed().next().expect("it has chunks").1;
    let live = volume.pool().live_of(head).expect("it is counted");
    assert!(live.amount > volume.core.volume.layout().chunk_granules() * 9 / 10, "{live:?}");
    let candidates = volume.core.candidates().0;
    let values = candidates.iter().find(|other| (other.store, other.log) == (0, LogKind::Values));
    // 441 if the head alone counts.
    let worth = values.expect("it has a sealed chunk").space_worth;
    assert!(worth < 1.0, "{worth}");
    check_values(&volume, 600, &model);
}

#[test]
fn a_chunk_without_live_records_is_freed_out_of_turn() {
    let volume = OpenTestVolume::new(12, Durability::PowerSafe, |settings| settings.window_divisor = 1);
    let model = filled(&volume, 1_500, 1);
    open_greedy_window(&volume, 1);
    let _turn = volume.core.volume.compactions.begin(1, LogKind::Values).expect("none runs");
    // What was stored first.
    for operation in 0..400 {
        let number = operation * 7 % 1_500;
        stored(&volume, &key_of(number), operation, model[&number].1);
    }
    let head = value_head(&volume, 0);
    let round = || block_on(volume.core.compact_round(u32::MAX, RoundPace::InTurn), || ());
    while round() == Ok(true) {}
    assert!(value_head(&volume, 0) > head);
    check_values(&volume, 1_500, &model);
}

#[test]
fn a_window_that_does_not_go_on_keeps_no_other_one_closed() {
    let volume = OpenTestVolume::new(10, Durability::PowerSafe, |settings| settings.window_divisor = 1);
    // Store 1 has nothing to compact.
    let of_store = (0..9_000).map(key_of).filter(|key| {
        let position = volume.core.volume.position_of(key.as_bytes());
        volume.stores()[0].range.contains(position)
    });
    let keys: Vec<Key> = of_store.take(2_000).collect();
    for (number, key) in (0..).zip(keys.iter().chain(keys.iter().step_by(8))) {
        stored(&volume, key, number, 150);
    }
    open_greedy_window(&volume, 1);
    let head = value_head(&volume, 0);
    let round = || block_on(volume.core.compact_round(u32::MAX, RoundPace::InTurn), || ());
    while value_head(&volume, 0) == head {
        assert_eq!(round(), Ok(true));
    }
}

#[test]
fn a_window_gives_back_the_chunks_that_it_took_though_space_is_enough() {
    let volume = OpenTestVolume::new(11, Durability::PowerSafe, |settings| settings.window_divisor = 1);
    let model = filled(&volume, 1_500, 1);
    let finish = || block_on(volume.core.finish_window(), || ());
    assert_eq!(finish(), Ok(false));
    let store = &volume.stores()[0];
    assert_eq!(block_on(volume.core.compact_once(store, LogKind::Values), || ()), Ok(RoundEnd::Advanced));
    let (begun, free) = (value_head(&volume, 0), volume.pool().free());
    let mut rounds = 0;
    while finish() == Ok(true) {
        rounds += 1;
    }
    assert_eq!(value_head(&volume, 0).0, begun.0 + rounds);
    let state = store.state.lock();
    let window = state.window.as_ref().expect("it was opened");
    assert!(rounds > 5 && !window.has_debt(state.values.head()), "{rounds} rounds");
    drop(state);
    assert!(volume.pool().free() > free, "{} free, {free} before", volume.pool().free());
    check_values(&volume, 1_500, &model);
}

#[test]
fn values_are_found_wherever_they_moved_and_no_chunk_is_lost() {
    for (seed, durability, divisor, rewrites_tail) in [
        (1, Durability::PowerSafe, 8, true),
        (2, Durability::Completed, 2, true),
        (3, Durability::PowerSafe, 0, false),
    ] {
        let volume = OpenTestVolume::new(seed, durability, |settings| {
            settings.window_divisor = divisor;
            settings.rewrites_tail = rewrites_tail;
        });
        overwrite_and_compact(&volume, seed);
    }
}

/// What runs beside the rounds: the numbers of keys that are being written.
struct Traffic<'a> {
    volume: &'a OpenTestVolume,
    keys: u64,
    model: RefCell<Model>,
    written: RefCell<BTreeSet<u64>>,
    left: Cell<u64>,
    next_operation: Cell<u64>,
}

impl Traffic<'_> {
    /// Takes the next operation's number.
    fn next(&self) -> Option<u64> {
        self.left.set(self.left.get().checked_sub(1)?);
        self.next_operation.set(self.next_operation.get() + 1);
        Some(self.next_operation.get())
    }

    async fn write(&self, seed: u64) {
        let mut random = Prng::new(seed);
        while let Some(operation) = self.next() {
            while self.volume.pool().free() < FREE_MIN {
                yield_now().await;
            }
            let number = random.below(self.keys);
            if !self.written.borrow_mut().insert(number) {
                continue;
            }
            let key = key_of(number);
            if random.below(6) == 0 {
                self.volume.core.delete(&key, Version::NONE).await.expect("a delete");
                self.model.borrow_mut().remove(&number);
            } else {
                let bytes = length(&mut random);
                let put = self.volume.put(&key, operation, bytes, PutOptions::default()).await;
                assert_eq!(put, Ok(PutOutcome::Stored));
                self.model.borrow_mut().insert(number, (operation, bytes));
            }
            self.written.borrow_mut().remove(&number);
        }
    }

    async fn read(&self, seed: u64) {
        let mut random = Prng::new(seed);
        while self.left.get() > 0 {
            let number = random.below(self.keys);
            let (key, before) = (key_of(number), self.model.borrow().get(&number).copied());
            let is_stable = !self.written.borrow().contains(&number);
            let got = self.volume.get(&key).await.expect("a value or none");
            let is_unchanged = before == self.model.borrow().get(&number).copied();
            // A write of the key that began meanwhile may be seen.
            if is_stable && is_unchanged && !self.written.borrow().contains(&number) {
                let expected = before.map(|(operation, bytes)| value_of(&key, operation, bytes));
                assert_eq!(got, expected, "key {number}");
            } else if let Some(front) = got.as_ref().and_then(|got| got.first_chunk()) {
                // Whatever it is, it is a value of the key as a whole.
                let operation = u64::from_le_bytes(*front);
                assert_eq!(got.as_deref(), Some(&value_of(&key, operation, got.as_ref().unwrap().len())[..]));
            }
            // A key without an image is read at once.
            yield_now().await;
        }
    }

    async fn compact(&self, number: usize) {
        let mut random = Prng::new(number as u64);
        while self.left.get() > 0 || self.volume.pool().free() < FREE_MIN {
            if self.volume.pool().free() < FREE_MIN + 10 {
                self.volume.core.compact_round(FREE_MIN + 10, RoundPace::Any).await.expect("a round");
            } else {
                let store = &self.volume.stores()[random.below(2) as usize];
                let log = if random.below(2) == 0 { LogKind::Keys } else { LogKind::Values };
                self.volume.core.compact_once(store, log).await.expect("a round");
            }
            yield_now().await;
        }
    }

    async fn split(&self) {
        while self.left.get() > 0 {
            self.volume.core.split_due_stores().await.expect("splits");
            yield_now().await;
        }
    }
}

fn compact_beside_traffic(seed: u64, durability: Durability) {
    let volume = OpenTestVolume::new(seed, durability, |settings| settings.window_divisor = 3);
    let traffic = Traffic {
        volume: &volume,
        keys: 250,
        model: RefCell::default(),
        written: RefCell::default(),
        left: Cell::new(4_000),
        next_operation: Cell::new(0),
    };
    let run = async {
        let writers = (0..6).map(|writer| traffic.write(seed * 100 + writer));
        let readers = (0..3).map(|reader| traffic.read(seed * 100 + 50 + reader));
        let mut tasks = FuturesUnordered::new();
        writers
            .for_each(|task| tasks.push(Box::pin(task) as std::pin::Pin<Box<dyn Future<Output = ()> + '_>>));
        readers.for_each(|task| tasks.push(Box::pin(task)));
        (0..3).for_each(|task| tasks.push(Box::pin(traffic.compact(task))));
        tasks.push(Box::pin(traffic.split()));
        while tasks.next().await.is_some() {}
    };
    block_on(run, || ());
    volume.check_counts();
    check_values(&volume, traffic.keys, &traffic.model.borrow());
    let counters = &volume.core.volume.counters;
    assert!(counters.moved_values.load(Ordering::Relaxed) > 500, "{counters:?}");
    assert!(counters.splits.load(Ordering::Relaxed) > 20, "{counters:?}");
}

#[test]
fn operations_beside_compaction_see_the_last_value() {
    for seed in 1..4 {
        compact_beside_traffic(seed, Durability::PowerSafe);
        compact_beside_traffic(seed, Durability::Completed);
    }
}

/// The unit in which the record of a key begins, and its first byte there.
fn record_place(volume: &OpenTestVolume, key: &Key) -> (u64, usize) {
    let (store, prefix) = volume.core.volume.place_of_key(key);
    let mut repeats = ReadRepeats::default();
    let lookup = block_on(volume.core.read_image(store, prefix, &mut repeats), || ()).unwrap();
    let image = lookup.image.expect("the key has an image");
    match image.entries.find(key.as_bytes()).expect("an entry").contents {
        EntryContents::Value { at: ValuePlace::Record(granule), .. } => {
            (granule / 64, (granule % 64) as usize * 8)
        }
        other => panic!("{other:?}"),
    }
}

/// The unit in which the image of a key begins.
fn image_unit(volume: &OpenTestVolume, key: &Key) -> u64 {
    let (store, prefix) = volume.core.volume.place_of_key(key);
    let state = store.state.lock();
    state.table.get(state.table.level().segment_of(prefix).0).unit()
}

#[test]
fn a_damaged_record_costs_its_key_alone() {
    let volume = OpenTestVolume::new(1, Durability::PowerSafe, |_| ());
    let model = filled(&volume, 200, 3);
    let lost = key_of(17);
    let (unit, at) = record_place(&volume, &lost);
    // The first byte of its value or key, behind the fixed part, if that is in the same unit.
    volume.damage(unit + ((at + 20) / 512) as u64, (at + 20) % 512);
    compact_whole(&volume, LogKind::Values);
    volume.check_counts();
    let counters = &volume.core.volume.counters;
    assert_eq!(counters.lost_values.load(Ordering::Relaxed), 1, "{counters:?}");
    for (&number, &(operation, bytes)) in &model {
        let key = key_of(number);
        match block_on(volume.get(&key), || ()) {
            Err(EngineError::Corrupt { .. }) => assert_eq!(key, lost),
            got => assert_eq!(got, Ok(Some(value_of(&key, operation, bytes))), "key {number}"),
        }
    }
    stored(&volume, &lost, 1_000_000, 50);
    assert_eq!(block_on(volume.get(&lost), || ()), Ok(Some(value_of(&lost, 1_000_000, 50))));
}

#[test]
fn a_damaged_image_costs_its_segment_and_its_chunk_is_freed() {
    let volume = OpenTestVolume::new(1, Durability::PowerSafe, |_| ());
    let mut model = filled(&volume, 200, 3);
    let unit = image_unit(&volume, &key_of(17));
    let of_segment: Vec<u64> =
        (0..200).filter(|&number| image_unit(&volume, &key_of(number)) == unit).collect();
    volume.damage(unit, 100);
    compact_whole(&volume, LogKind::Keys);
    for &number in &of_segment {
        let got = block_on(volume.get(&key_of(number)), || ());
        let is_lost = matches!(got, Err(EngineError::Corrupt { .. }));
        assert!(is_lost || got.is_ok_and(|got| got.is_some()), "key {number}");
        model.remove(&number);
    }
    for (&number, &(operation, bytes)) in &model {
        let key = key_of(number);
        assert_eq!(block_on(volume.get(&key), || ()), Ok(Some(value_of(&key, operation, bytes))));
    }
    // Its values are counted for ever: their chunks are freed nevertheless.
    compact_whole(&volume, LogKind::Values);
    compact_whole(&volume, LogKind::Keys);
    for (&number, &(operation, bytes)) in &model {
        let key = key_of(number);
        assert_eq!(block_on(volume.get(&key), || ()), Ok(Some(value_of(&key, operation, bytes))));
    }
    for number in of_segment {
        stored(&volume, &key_of(number), 1_000_000, 60);
    }
}

#[test]
fn a_chunk_without_a_directory_is_walked_and_with_damage_all_segments_are_visited() {
    for damages_record in [false, true] {
        let volume = OpenTestVolume::new(1, Durability::PowerSafe, |_| ());
        let model = filled(&volume, 200, 3);
        let (chunk, lost) = {
            let state = volume.stores()[0].state.lock();
            let chunk = state.values.sealed().next().expect("a sealed chunk").1;
            (chunk, chunk)
        };
        // The trailer of the directory, then the header of the first record, which is garbage or not.
        let layout = *volume.core.volume.layout();
        volume.damage(layout.unit_of(chunk, layout.chunk_units - 1), 511);
        if damages_record {
            volume.damage(layout.unit_of(lost, 0), 5);
        }
        compact_whole(&volume, LogKind::Values);
        volume.check_counts();
        let lost_max = u64::from(damages_record);
        assert!(volume.core.volume.counters.lost_values.load(Ordering::Relaxed) <= lost_max);
        let mut lost = 0;
        for (&number, &(operation, bytes)) in &model {
            let key = key_of(number);
            match block_on(volume.get(&key), || ()) {
                Err(EngineError::Corrupt { .. }) => lost += 1,
                got => assert_eq!(got, Ok(Some(value_of(&key, operation, bytes))), "key {number}"),
            }
        }
        assert!(lost <= lost_max, "{lost} are lost");
    }
}

#[test]
fn a_read_that_fails_leaves_the_head_and_a_further_round_goes_on() {
    for log in [LogKind::Values, LogKind::Keys] {
        let volume = OpenTestVolume::new(1, Durability::PowerSafe, |_| ());
        let model = filled(&volume, 200, 3);
        let store = &volume.stores()[0];
        let head = || {
            let state = store.state.lock();
            if log == LogKind::Keys { state.keys.head() } else { state.values.head() }
        };
        for skip in 0..6 {
            let before = head();
            volume.faults.add(FaultRule::always(OpFilter::Read, InjectedFault::Error(5)).once(skip));
            let end = block_on(volume.core.compact_once(store, log), || ());
            volume.faults.clear();
            match end {
                Ok(RoundEnd::Advanced) => assert!(head() > before),
                Err(EngineError::Device { error: DeviceError::Io(5), .. }) => assert_eq!(head(), before),
                end => panic!("{end:?}"),
            }
        }
        compact_whole(&volume, log);
        volume.check_counts();
        check_values(&volume, 200, &model);
    }
}

#[test]
fn expired_values_and_forgotten_tombstones_are_not_moved() {
    let volume = OpenTestVolume::new(1, Durability::PowerSafe, |_| ());
    let version = Version::from_bits;
    let put = |number: u64, options: PutOptions| {
        let outcome = block_on(volume.put(&key_of(number), 1, 100, options), || ());
        assert_eq!(outcome, Ok(PutOutcome::Stored));
    };
    for number in 0..40 {
        put(number, PutOptions { expires_at: UnixTime(2_000), ..PutOptions::default() });
        let options =
            PutOptions { expires_at: UnixTime(2_000), version: version(9), ..PutOptions::default() };
        put(100 + number, options);
        put(200 + number, PutOptions { version: version(5), ..PutOptions::default() });
        assert_eq!(
            block_on(volume.core.delete(&key_of(200 + number), version(6)), || ()),
            Ok(DeleteOutcome::Deleted)
        );
    }
    let kept = filled(&volume, 100, 1);
    let _ = kept;
    let entries = || -> usize {
        let of_store = |store: &super::store::Store| {
            let mut count = 0;
            let mut next = Some(super::hash_prefix::HashPrefix::MIN);
            while let Some(prefix) = next {
                let mut repeats = ReadRepeats::default();
                let lookup = block_on(volume.core.read_image(store, prefix, &mut repeats), || ()).unwrap();
                next = lookup.level.next_prefix(prefix);
                count += lookup.image.map_or(0, |image| image.entries.entries());
            }
            count
        };
        volume.stores().iter().map(of_store).sum()
    };
    assert_eq!(entries(), 180, "100 values, of which 40 had an expiry, 40 that will expire, 40 tombstones");
    volume.clock.store(3_000, Ordering::Relaxed);
    compact_whole(&volume, LogKind::Keys);
    assert_eq!(entries(), 180, "each value that expired has a tombstone");
    volume.core.volume.set_forgotten_below(version(7));
    compact_whole(&volume, LogKind::Keys);
    assert_eq!(entries(), 140, "without the tombstones of version 6");
    volume.core.volume.set_forgotten_below(version(10));
    compact_whole(&volume, LogKind::Keys);
    assert_eq!(entries(), 100);
    volume.check_counts();
}
