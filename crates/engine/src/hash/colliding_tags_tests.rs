//! Changes of keys that share a partition and a tag, beside a damaged record with that tag: each of them takes the damaged
//! record for its own, and only one may replace it.

use super::volume::HashVolume;
use super::{HashEngine, format, open, verify};
use crate::bug_injection::{InjectedBug, inject};
use crate::conformance::{key_of, operation_of, record_of, value_of};
use crate::{DeleteOutcome, Durability, Engine, EngineError, FormatConfig, OpenConfig, PutMode, PutOutcome};
use octokv_base::{Buffer, BufferPool, Key, Lba, Prng};
use octokv_device::Device;
use octokv_device::power_loss::{PowerLossDisk, PowerLossMode};
use octokv_runtime::block_on;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

const BLOCK_BYTES: u32 = 512;
/// The operation that stored the record that is damaged.
const OF_DAMAGED: u64 = 1;

/// Makes tags collide, for the calling thread, until it is dropped.
struct NarrowTags;

impl NarrowTags {
    fn new() -> NarrowTags {
        inject(Some(InjectedBug::NarrowTags));
        NarrowTags
    }
}

impl Drop for NarrowTags {
    fn drop(&mut self) {
        inject(None);
    }
}

/// A volume with a damaged record, and three keys of its tag.
struct Collision {
    disk: PowerLossDisk,
    engine: HashEngine,
    random: Prng,
    /// Whose record is damaged, and two that have none.
    keys: [Key; 3],
    _narrow: NarrowTags,
}

fn open_on(disk: &PowerLossDisk, random: &mut Prng) -> HashEngine {
    let (pool, device) = (BufferPool::new(16 << 20), Rc::new(disk.clone()) as Rc<dyn Device>);
    let config = OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: crate::WallClock::default(),
        tokens: None,
    };
    let mut complete = || {
        disk.complete_one(random);
    };
    let volume = block_on(open(&device, &pool, config, &FormatConfig::default()), &mut complete);
    HashEngine::new(volume.unwrap_or_else(|error| panic!("{error}")), 0, device, pool)
}

/// Keys that share partition and tag.
fn colliding_keys(volume: &HashVolume) -> [Key; 3] {
    let place = |key: &Key| volume.partition_and_tag(volume.hash(key));
    let first = key_of(0);
    let mut others = (1..).map(key_of).filter(|key| place(key) == place(&first));
    [first.clone(), others.next().unwrap(), others.next().unwrap()]
}

impl Collision {
    fn new(seed: u64, value_bytes: usize) -> Collision {
        let narrow = NarrowTags::new();
        let (disk, mut random) = (PowerLossDisk::new(vec![0; 4 << 20], BLOCK_BYTES), Prng::new(seed));
        let mut format_random = random.fork();
        let mut complete = || {
            disk.complete_one(&mut format_random);
        };
        let config = FormatConfig { unit_bytes: Some(BLOCK_BYTES), ..FormatConfig::default() };
        block_on(format(&disk, &config), &mut complete).unwrap();
        let engine = open_on(&disk, &mut random);
        let keys = colliding_keys(engine.volume());
        let collision = Collision { disk: disk.clone(), engine, random, keys, _narrow: narrow };
        let stored = block_on(collision.put(0, OF_DAMAGED, value_bytes), &mut complete);
        assert_eq!(stored, Ok(Change::Put));
        collision.damage();
        collision
    }

    /// Overwrites the only record of the tag with zeros.
    fn damage(&self) {
        let volume = self.engine.volume();
        let [record_ref] = volume.candidates(volume.hash(&self.keys[0]))[..] else { panic!("one record") };
        let written = self.disk.write(volume.lba(record_ref.location), Buffer::zeroed(BLOCK_BYTES as usize));
        let mut random = Prng::new(1);
        block_on(written, || {
            self.disk.complete_one(&mut random);
        })
        .result
        .unwrap();
        assert_eq!(volume.lba(1), Lba(1), "a unit is a block");
    }

    async fn put(&self, key: usize, operation: u64, value_bytes: usize) -> Result<Change, EngineError> {
        let key = &self.keys[key];
        let record = record_of(self.engine.record_layout(), key, &value_of(key, operation, value_bytes));
        let outcome = self.engine.put(key, PutMode::Upsert, record, value_bytes).await?;
        assert_eq!(outcome, PutOutcome::Stored);
        Ok(Change::Put)
    }

    fn begin<'a>(&'a self, key: usize, change: Change, value_bytes: usize) -> ChangeFuture<'a> {
        let operation = 10 + key as u64;
        Box::pin(async move {
            match change {
                Change::Put => self.put(key, operation, value_bytes).await,
                Change::Update => {
                    let key = &self.keys[key];
                    let value = value_of(key, operation, value_bytes);
                    let record = record_of(self.engine.record_layout(), key, &value);
                    let outcome = self.engine.put(key, PutMode::UpdateOnly, record, value_bytes).await?;
                    assert!(matches!(outcome, PutOutcome::Stored | PutOutcome::NotFound), "{outcome:?}");
                    Ok(if outcome == PutOutcome::Stored { Change::Put } else { Change::Delete })
                }
                Change::Delete => {
                    let outcome = self.engine.delete(&self.keys[key]).await?;
                    assert!(matches!(outcome, DeleteOutcome::Deleted | DeleteOutcome::NotFound));
                    Ok(Change::Delete)
                }
            }
        })
    }

    /// Completes I/O and polls futures in random order until both changes and what was abandoned have ended. Gives what
    /// each key's change has left; `None` if it was dropped half done.
    fn run(&mut self, changes: [Change; 2], value_bytes: usize, drops: [bool; 2]) -> [Option<Change>; 2] {
        let mut random = self.random.fork();
        let this = &*self;
        let mut context = Context::from_waker(Waker::noop());
        let mut futures = [1, 2].map(|key| Some(this.begin(key, changes[key - 1], value_bytes)));
        let mut polls_left = drops.map(|is_dropped| if is_dropped { 1 + random.below(4) } else { u64::MAX });
        let mut results = [None; 2];
        let mut abandoned = pin!(this.engine.run_abandoned());
        while futures.iter().any(Option::is_some) || !this.engine.volume().is_idle() {
            match random.below(4) {
                at @ (0 | 1) => {
                    let at = at as usize;
                    let Some(future) = &mut futures[at] else { continue };
                    polls_left[at] -= 1;
                    if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                        (futures[at], results[at]) = (None, Some(result.unwrap()));
                    } else if polls_left[at] == 0 {
                        futures[at] = None;
                    }
                }
                2 => assert!(abandoned.as_mut().poll(&mut context).is_pending()),
                _ => {
                    this.disk.complete_one(&mut random);
                }
            }
        }
        results
    }

    fn get(&self, engine: &HashEngine, key: usize) -> Result<Option<u64>, EngineError> {
        let mut random = Prng::new(2);
        let mut complete = || {
            self.disk.complete_one(&mut random);
        };
        let found = block_on(engine.get(&self.keys[key]), &mut complete)?;
        Ok(found.map(|value| operation_of(&self.keys[key], value.as_bytes())))
    }
}

/// A change of a key; as a result, whether the key has a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Put,
    /// A put that needs a record.
    Update,
    Delete,
}

type ChangeFuture<'a> = Pin<Box<dyn Future<Output = Result<Change, EngineError>> + 'a>>;

/// Units of the records that the index names, by reading it; what the statistics count is checked against it.
fn units_in_index(volume: &HashVolume) -> u64 {
    let partitions = volume.partitions.iter();
    partitions
        .map(|partition| {
            let state = partition.state.lock();
            state.table.iter_from(0).map(|entry| entry.record_ref().units).sum::<u64>()
        })
        .sum()
}

/// The state of a volume is what its index names, and the device has the same.
fn assert_state(collision: &mut Collision, expected: [Option<u64>; 2], context: &str) {
    let volume = Arc::clone(collision.engine.volume());
    let before = collision.engine.statistics();
    assert_eq!(before.used_bytes, units_in_index(&volume) * u64::from(BLOCK_BYTES), "{context}");
    let in_use_units = volume.space.units() - volume.space.free_units();
    let mut retired_units = 0;
    volume.epochs.reclaim_all(|extent| {
        retired_units += extent.units;
        volume.space.release(extent);
    });
    assert_eq!(in_use_units - retired_units, units_in_index(&volume), "{context}: space is freed once");
    let reopened = open_on(&PowerLossDisk::new(collision.disk.image(), BLOCK_BYTES), &mut collision.random);
    let after = reopened.statistics();
    assert_eq!((after.keys, after.used_bytes), (before.keys, before.used_bytes), "{context}: replayed");
    drop(reopened);
    let reopened = open_on(&collision.disk, &mut collision.random);
    for (key, expected) in [1, 2].into_iter().zip(expected) {
        for (engine, when) in [(&collision.engine, "in memory"), (&reopened, "reopened")] {
            assert_eq!(collision.get(engine, key), Ok(expected), "{context}: key {key}, {when}");
        }
    }
}

#[test]
fn two_changes_beside_a_damaged_record_of_their_tag_are_both_applied_and_replace_it_once() {
    use Change::{Delete, Put, Update};
    for seed in 0..400 {
        let pairs =
            [[Put, Put], [Put, Delete], [Delete, Put], [Delete, Delete], [Put, Update], [Update, Put]];
        let changes = pairs[seed as usize % pairs.len()];
        // Beside its batch, and before it.
        let value_bytes = if seed % 5 == 0 { 140_000 } else { 700 };
        let drops = [[false, false], [true, false], [false, true], [true, true]][seed as usize / 6 % 4];
        let mut collision = Collision::new(seed, 3_000);
        let results = collision.run(changes, value_bytes, drops);
        let context = format!("seed {seed}, {changes:?}, dropped {drops:?}");
        let volume = Arc::clone(collision.engine.volume());
        let candidates = volume.candidates(volume.hash(&collision.keys[0])).len();
        let expected = [0, 1].map(|at| match results[at].unwrap_or(changes[at]) {
            Put => Some(11 + at as u64),
            Delete => None,
            // It was dropped, and may have found a record.
            Update => collision.get(&collision.engine, 1 + at).unwrap(),
        });
        assert_eq!(
            candidates,
            expected.iter().flatten().count(),
            "{context}: the damaged record is replaced"
        );
        assert_state(&mut collision, expected, &context);
    }
}

#[test]
fn a_power_loss_during_two_puts_beside_a_damaged_record_leaves_a_volume_that_opens() {
    for seed in 0..60 {
        let mut collision = Collision::new(seed, 700);
        let first = collision.disk.events();
        collision.run([Change::Put; 2], 700, [false; 2]);
        for events in first..=collision.disk.events() {
            let mode = PowerLossMode::ALL[collision.random.below(4) as usize];
            let image = collision.disk.image_after_power_loss(events, mode, &mut collision.random);
            let disk = PowerLossDisk::new(image, BLOCK_BYTES);
            let reopened = open_on(&disk, &mut collision.random);
            let mut random = Prng::new(3);
            let mut complete = || {
                disk.complete_one(&mut random);
            };
            for key in 1..3 {
                // The damaged record may be either's until it is replaced.
                match block_on(reopened.get(&collision.keys[key]), &mut complete) {
                    Ok(Some(value)) => {
                        assert_eq!(operation_of(&collision.keys[key], value.as_bytes()), 10 + key as u64);
                    }
                    Ok(None) | Err(EngineError::Corrupt { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            assert_eq!(reopened.statistics().used_bytes, units_in_index(reopened.volume()) * 512);
            let report = block_on(verify(&disk, &BufferPool::new(1 << 20), &mut |_, _| ()), &mut complete);
            assert!(report.unwrap().problems.len() <= 1);
        }
    }
}
