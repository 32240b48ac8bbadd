//! The ordered engine on a full volume: puts are refused, reads and deletes are served, and space that is free again is found.

use crate::common::lsm_fixture::LsmFixture;
use crate::common::pool;
use crate::common::stable_memory::StableMemory;
use octokv_base::{Key, Prng};
use octokv_device::Device;
use octokv_engine::conformance::{EngineFixture, record_of, value_of};
use octokv_engine::lsm::settings::TreeSettings;
use octokv_engine::lsm::version_edit::LEVELS;
use octokv_engine::lsm::{LsmEngine, open_with};
use octokv_engine::{DeleteOutcome, Engine, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

fn run<T>(future: impl Future<Output = T>) -> T {
    block_on(future, || ())
}

/// A volume that is filled, and what it should hold: the operation that stored each key's value, and its length.
struct Filled {
    fixture: LsmFixture,
    device: Rc<dyn Device>,
    adjust: fn(&mut TreeSettings),
    engine: Option<LsmEngine>,
    model: BTreeMap<u64, (u64, usize)>,
    live_bytes: u64,
    operations: u64,
}

/// Below 8 B a value has no operation.
fn value_with(key: &Key, operation: u64, bytes: usize) -> Vec<u8> {
    value_of(key, operation, bytes)
}

fn numbered(index: u64) -> Key {
    Key::new(format!("key{index:08}").as_bytes()).expect("within the limit")
}

impl Filled {
    fn new(fixture: LsmFixture, device_bytes: u64, adjust: fn(&mut TreeSettings)) -> Filled {
        let device: Rc<dyn Device> = StableMemory::new(device_bytes, 512);
        run(fixture.format(Rc::clone(&device)));
        let (model, engine) = (BTreeMap::new(), None);
        let mut filled = Filled { fixture, device, adjust, engine, model, live_bytes: 0, operations: 0 };
        filled.reopen();
        filled
    }

    fn reopen(&mut self) {
        self.engine = None;
        let (config, format) = (self.fixture.open_config(), &self.fixture.format);
        let volume = run(open_with(&self.device, &pool(), config, format, self.adjust)).expect("opens");
        self.engine = Some(LsmEngine::new(volume, 0, Rc::clone(&self.device), pool()));
    }

    fn engine(&self) -> &LsmEngine {
        self.engine.as_ref().expect("open")
    }

    /// The bytes that a key and its value take: a record in whole units, or an entry.
    fn stored_bytes(&self, bytes: usize) -> u64 {
        let unit = u64::from(self.fixture.format.unit_bytes.expect("set"));
        match bytes < self.fixture.format.inline_bytes_max as usize {
            true => bytes as u64 + 40,
            false => (bytes as u64 + 100).next_multiple_of(unit) + 40,
        }
    }

    /// Whether it was stored: if not, the volume is full.
    fn put(&mut self, index: u64, bytes: usize) -> bool {
        self.operations += 1;
        let (key, operation) = (numbered(index), self.operations);
        let value = value_with(&key, operation, bytes);
        let record = record_of(self.engine().record_layout(), &key, &value);
        match run(self.engine().put(&key, PutMode::Upsert, record, bytes)) {
            Ok(PutOutcome::Stored) => {
                let before = self.model.insert(index, (operation, bytes));
                self.live_bytes += self.stored_bytes(bytes);
                self.live_bytes -= before.map_or(0, |(_, bytes)| self.stored_bytes(bytes));
                true
            }
            Ok(PutOutcome::Full) => false,
            other => {
                let (used, version) = (self.used_bytes(), self.engine().volume().version());
                let live = self.live_bytes;
                panic!("put {index} of {bytes} B, {live} B live, {used} B used: {other:?} {version:?}")
            }
        }
    }

    fn delete(&mut self, index: u64) {
        let outcome = run(self.engine().delete(&numbered(index)));
        let known = self.model.remove(&index);
        self.live_bytes -= known.map_or(0, |(_, bytes)| self.stored_bytes(bytes));
        let want = if known.is_some() { DeleteOutcome::Deleted } else { DeleteOutcome::NotFound };
        assert_eq!(outcome, Ok(want), "key {index}");
    }

    fn check(&self) {
        for (&index, &(operation, bytes)) in &self.model {
            let key = numbered(index);
            let value = run(self.engine().get(&key)).unwrap_or_else(|error| panic!("{key}: {error}"));
            let value = value.unwrap_or_else(|| panic!("{key} is missing"));
            assert!(value.as_bytes() == value_with(&key, operation, bytes), "{key} has another value");
        }
        let listed = Cell::new(0);
        let mut sink = |_: &[u8]| {
            listed.set(listed.get() + 1);
            true
        };
        run(self.engine().list(&Key::new(&[]).unwrap(), &mut sink)).expect("lists");
        assert_eq!(listed.get(), self.model.len());
        // The view of the listing ends, and with it the version that it holds.
        let mut abandoned = std::pin::pin!(self.engine().run_abandoned());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = abandoned.as_mut().poll(&mut context);
    }

    /// What the volume consists of, for messages.
    fn shape(&self) -> String {
        let (volume, statistics) = (self.engine().volume(), self.engine().statistics());
        let version = volume.version();
        let levels: Vec<(usize, u64)> =
            (0..LEVELS).map(|it| (version.level_tables(it), version.level_bytes(it))).collect();
        let segment_bytes: u64 = version.segments().iter().map(|it| it.meta.extent().units).sum();
        format!(
            "{} B live, {} of {} B used, reserve {}, tables {levels:?}, {} segments of {segment_bytes} units, {} units pinned",
            self.live_bytes,
            statistics.used_bytes,
            statistics.capacity_bytes,
            volume.settings().reserve_bytes,
            version.segments().len(),
            volume.pinned_units(),
        )
    }

    fn used_bytes(&self) -> u64 {
        self.engine().statistics().used_bytes
    }
    fn capacity_bytes(&self) -> u64 {
        self.engine().statistics().capacity_bytes
    }
}

/// Changes the sizes with which a tree works.
type Adjust = fn(&mut TreeSettings);
/// Lengths of values.
type Lengths = fn(&mut Prng) -> usize;

const INLINE: Lengths = |random| 8 + random.below(290) as usize;
const IN_SEGMENTS: Lengths = |random| 300 + random.below(9_000) as usize;
const MIXED: Lengths = |random| {
    let bound = [60, 600, 6_000, 60_000][random.below(4) as usize];
    8 + random.below(bound) as usize
};
const KINDS: [(&str, Lengths); 3] = [("inline", INLINE), ("in segments", IN_SEGMENTS), ("mixed", MIXED)];
/// The settings that a volume has by its size, and small ones.
const SETTINGS: [(u64, Adjust); 2] = [(24 << 20, |_| {}), (14 << 20, make_smaller)];

/// More levels, and smaller parts, than the volume would have by its size.
fn make_smaller(settings: &mut TreeSettings) {
    settings.memtable_bytes = 96 << 10;
    settings.table_bytes = 32 << 10;
    settings.segment_bytes = 128 << 10;
    settings.compaction.level1_bytes = 128 << 10;
    settings.compaction.multiplier = 4;
    settings.compaction.input_bytes_max = 256 << 10;
}

/// Puts new keys until the volume is full. Gives the next new key.
fn fill(filled: &mut Filled, lengths: Lengths, random: &mut Prng, from: u64) -> u64 {
    let mut next = from;
    while filled.put(next, lengths(random)) {
        next += 1;
        assert!(next < 2_000_000, "{} B live of {}", filled.live_bytes, filled.capacity_bytes());
    }
    next
}

/// What a volume holds at least before it is full, in thousandths of its capacity without the reserve.
const LEAST_PERMILLE: u64 = 700;

#[test]
fn a_full_volume_is_read_and_emptied_and_its_space_comes_back() {
    for (device_bytes, adjust) in SETTINGS {
        for (kind, lengths) in KINDS {
            let mut filled = Filled::new(LsmFixture::default(), device_bytes, adjust);
            let mut random = Prng::new(device_bytes ^ 3);
            let next = fill(&mut filled, lengths, &mut random, 0);
            let (live, capacity) = (filled.live_bytes, filled.capacity_bytes());
            let room = capacity - reserve_bytes(&filled);
            assert!(live * 1000 >= room * LEAST_PERMILLE, "{kind}: full with {}", filled.shape());
            let stalls = filled.engine().statistics().tree.expect("a tree").stalls;
            assert!(stalls.waited_writes > 0, "{kind}: the last puts waited for space");
            filled.check();
            filled.reopen();
            filled.check();
            assert!(fill(&mut filled, lengths, &mut random, next) < next + next / 5, "{kind}: it stays full");
            // Deletes are journal entries and tables, too.
            for index in (0..next).step_by(3) {
                filled.delete(index);
            }
            filled.check();
            // What they freed is found by the next put.
            let refilled = fill(&mut filled, lengths, &mut random, next * 2);
            let (more, version) = (refilled - next * 2, filled.engine().volume().version());
            assert!(
                more > next / 8,
                "{kind}: {more} after deletes, {} used {version:?}",
                filled.used_bytes()
            );
            filled.reopen();
            filled.check();
            let keys: Vec<u64> = filled.model.keys().copied().collect();
            for index in keys {
                filled.delete(index);
            }
            run(filled.engine().compact_all()).expect("compacts");
            let used = filled.used_bytes();
            assert!(used * 50 <= capacity, "{kind}: {used} B of {capacity} B used by nothing");
            filled.reopen();
            filled.check();
            let used = filled.used_bytes();
            assert!(used * 50 <= capacity, "{kind}: {used} B of {capacity} B used by nothing");
            let again = fill(&mut filled, lengths, &mut random, 0);
            assert!(again * 5 > next * 4, "{kind}: {again} keys, {next} before");
        }
    }
}

fn reserve_bytes(filled: &Filled) -> u64 {
    filled.engine().volume().settings().reserve_bytes
}

#[test]
fn a_volume_is_overwritten_three_times_without_being_full() {
    for (device_bytes, adjust) in SETTINGS {
        for (kind, lengths) in KINDS {
            for percent in [50, 90] {
                let mut filled = Filled::new(LsmFixture::default(), device_bytes, adjust);
                let mut random = Prng::new(device_bytes ^ percent);
                let room = filled.capacity_bytes() - reserve_bytes(&filled);
                let mut keys = 0;
                while filled.live_bytes * 100 < room * percent {
                    let stored = filled.put(keys, lengths(&mut random));
                    assert!(stored, "{kind}: full with {} of {room} B live", filled.live_bytes);
                    keys += 1;
                }
                let mut written = 0;
                while written < 3 * device_bytes {
                    // As long as what is replaced: as much stays live.
                    let index = random.below(keys);
                    let bytes = filled.model[&index].1;
                    let stored = filled.put(index, bytes);
                    assert!(stored, "{kind}: full at {percent} % after {written} B: {}", filled.shape());
                    written += filled.stored_bytes(bytes);
                }
                filled.check();
                filled.reopen();
                filled.check();
            }
        }
    }
}

#[test]
fn values_of_16_kib_are_overwritten_for_several_volumes_however_full_it_is() {
    const VALUE_BYTES: usize = 16 << 10;
    for (device_bytes, percent, rounds, moved_most) in
        [(24 << 20, 91, 3, 60), (64 << 20, 91, 2, 60), (128 << 20, 91, 2, 45), (128 << 20, 97, 1, 60)]
    {
        let mut filled = Filled::new(LsmFixture::default(), device_bytes, |_| {});
        let mut random = Prng::new(percent);
        let room = filled.capacity_bytes() - reserve_bytes(&filled);
        let mut keys = 0;
        while filled.live_bytes * 100 < room * percent {
            assert!(filled.put(keys, VALUE_BYTES), "full with {}", filled.shape());
            keys += 1;
        }
        let moved_bytes = |filled: &Filled| filled.engine().statistics().tree.expect("a tree").moved_bytes;
        let (before, mut longest_bytes) = (moved_bytes(&filled), 0);
        for overwritten in 0..rounds * keys {
            let begun = moved_bytes(&filled);
            let stored = filled.put(random.below(keys), VALUE_BYTES);
            assert!(stored, "{percent} %: full after {overwritten} of {keys}: {}", filled.shape());
            longest_bytes = longest_bytes.max(moved_bytes(&filled) - begun);
        }
        // Were the reserve kept free of garbage, 5.5 bytes would move for each on the third of these volumes.
        let written_bytes = rounds * keys * VALUE_BYTES as u64;
        let moved = moved_bytes(&filled) - before;
        assert!(
            moved * 10 < moved_most * written_bytes,
            "{percent} %: {moved} B moved for {written_bytes} B"
        );
        assert!(longest_bytes < device_bytes / 8, "{percent} %: one put waited for {longest_bytes} B");
        filled.check();
        filled.reopen();
        filled.check();
    }
}
