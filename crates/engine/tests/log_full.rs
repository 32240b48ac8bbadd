//! Full and nearly full volumes of the log engine: they refuse puts beyond their capacity, and serve reads, deletes, overwrites, and the puts
//! that deletes made room for.

use crate::common::log_background::{IDLE_MAX, LogBackground};
use crate::common::log_fixture::{LogFixture, log_volume};
use futures_util::future::{Either, join_all, select};
use octokv_base::Prng;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{key_of, operation_of, record_of, value_of};
use octokv_engine::log::handle::LogEngine;
use octokv_engine::{DeleteOutcome, Engine, FormatConfig, PutMode, PutOutcome};
use octokv_runtime::block_on;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::pin::pin;

/// The lengths of the values of a volume.
#[derive(Clone, Copy)]
enum Lengths {
    /// Hundreds of bytes.
    Short,
    /// Two chunks.
    Long,
    Mixed,
}

impl Lengths {
    fn bytes_of(self, key: u64, operation: u64) -> usize {
        match (self, (key + operation) % 7) {
            (Lengths::Short, _) => 8 + (key % 300) as usize,
            (Lengths::Long, _) => 30_000,
            (Lengths::Mixed, 0) => 20_000,
            (Lengths::Mixed, 1..=3) => 700,
            (Lengths::Mixed, _) => 90,
        }
    }
}

async fn put(engine: &LogEngine, lengths: Lengths, key: u64, operation: u64) -> PutOutcome {
    put_in(PutMode::Upsert, engine, lengths, key, operation).await
}

async fn put_in(mode: PutMode, engine: &LogEngine, lengths: Lengths, key: u64, operation: u64) -> PutOutcome {
    let bytes = lengths.bytes_of(key, operation);
    let name = key_of(key);
    let record = record_of(engine.record_layout(), &name, &value_of(&name, operation, bytes));
    engine.put(&name, mode, record, bytes).await.expect("no fault")
}

/// The operations of the disk in which a round of writes ends.
const OPERATIONS_MAX: u64 = 3_000_000;

fn run<T>(disk: &PowerLossDisk, random: &mut Prng, future: impl Future<Output = T>) -> T {
    let mut idle = 0;
    block_on(future, || {
        idle = if disk.complete_one(random) { 0 } else { idle + 1 };
        assert!(idle < IDLE_MAX, "nothing is in progress, and the operation waits");
    })
}

fn check(disk: &PowerLossDisk, engine: &LogEngine, random: &mut Prng, keys: u64, operation: u64) {
    for key in 0..keys {
        let name = key_of(key);
        let value = run(disk, random, engine.get(&name)).expect("reads").expect("exists");
        assert_eq!(operation_of(&name, value.as_bytes()), operation, "key {key}");
    }
}

#[test]
fn a_full_volume_refuses_puts_and_serves_reads_deletes_and_overwrites() {
    let (disk, engines, mut random) = log_volume(&LogFixture { cores: 1, ..LogFixture::default() }, 7);
    let (engine, random) = (&engines[0], &mut random);
    let mut stored = BTreeMap::new();
    for key in 0.. {
        match run(&disk, random, put(engine, Lengths::Mixed, key, 1)) {
            PutOutcome::Stored => drop(stored.insert(key, 1)),
            outcome => {
                assert_eq!(outcome, PutOutcome::Full);
                break;
            }
        }
    }
    let keys = stored.len() as u64;
    let statistics = engine.statistics();
    assert!(statistics.used_bytes * 100 > statistics.capacity_bytes * 98, "{statistics:?}");
    check(&disk, engine, random, keys, 1);
    for key in (0..keys).step_by(2) {
        assert_eq!(run(&disk, random, engine.delete(&key_of(key))), Ok(DeleteOutcome::Deleted));
    }
    for key in (0..keys).step_by(4) {
        assert_eq!(run(&disk, random, put(engine, Lengths::Mixed, key, 2)), PutOutcome::Stored, "key {key}");
    }
    for key in 0..keys {
        let name = key_of(key);
        let value = run(&disk, random, engine.get(&name)).expect("reads");
        let want = [Some(2), Some(1), None, Some(1)][key as usize % 4];
        assert_eq!(value.map(|value| operation_of(&name, value.as_bytes())), want, "key {key}");
    }
}

/// Writers that are more than segments hold each of these all the time, and it has to be split all the same.
#[test]
fn many_writers_of_a_new_volume_are_not_refused() {
    let (disk, engines, mut random) = log_volume(&LogFixture { cores: 1, ..LogFixture::default() }, 7);
    let (engine, keys, next) = (&engines[0], 4_000, Cell::new(0));
    let writer = || async {
        while next.get() < keys {
            let key = next.replace(next.get() + 1);
            assert_eq!(put(engine, Lengths::Short, key, 1).await, PutOutcome::Stored, "key {key}");
        }
    };
    let writers = pin!(join_all((0..200).map(|_| writer())));
    let background = pin!(engine.run_abandoned());
    let has_ended = matches!(run(&disk, &mut random, select(background, writers)), Either::Right(_));
    assert!(has_ended, "the background work has ended");
    let statistics = engine.statistics();
    let entries = statistics.log.map(|log| (log.entry_bytes / log.segments, log.segments));
    // The target of this volume is 200 B, and splits lag by a quarter at most, and what the writers have in progress.
    assert!(entries.is_some_and(|(bytes, _)| bytes < 400), "{entries:?} of {} keys", statistics.keys);
    check(&disk, engine, &mut random, keys, 1);
}

/// A nearly full volume and its writers.
struct NearlyFull {
    lengths: Lengths,
    /// What is filled of the capacity.
    per_mille: u64,
    overwrites: u64,
    writers: usize,
    stores: u16,
    disk_bytes: usize,
    mode: PutMode,
    /// Compactions at once of its maintenance; without one, writes compact while they wait.
    compactions: Option<usize>,
}

impl NearlyFull {
    /// Fills a volume, overwrites every key so many times, checks all values, and empties it.
    fn overwrite(&self) {
        let format =
            FormatConfig { value_bytes_max: 40_000, partitions: self.stores, ..LogFixture::default().format };
        let fixture = LogFixture {
            cores: 1,
            disk_bytes: self.disk_bytes,
            format,
            compactions: self.compactions,
            ..LogFixture::default()
        };
        let (disk, engines, mut random) = log_volume(&fixture, 11);
        let (engine, random) = (&*engines[0], &mut random);
        let mut keys = 0;
        while engine.statistics().used_bytes * 1_000 < engine.statistics().capacity_bytes * self.per_mille {
            assert_eq!(run(&disk, random, put(engine, self.lengths, keys, 0)), PutOutcome::Stored);
            keys += 1;
        }
        let mut background = self.compactions.map(|_| LogBackground::begin(&engines[0], OPERATIONS_MAX));
        // Each overwrite gives a key the length that its neighbour had: their sum stays as it is.
        for operation in 1..=self.overwrites {
            let next = Cell::new(0);
            let writer = || async {
                while next.get() < keys {
                    let key = next.replace(next.get() + 1);
                    let outcome = put_in(self.mode, engine, self.lengths, key, operation).await;
                    assert_eq!(outcome, PutOutcome::Stored, "key {key}, overwrite {operation}");
                }
            };
            let writers = async { drop(join_all((0..self.writers).map(|_| writer())).await) };
            match &mut background {
                Some(background) => background.run(|random| disk.complete_one(random), random, writers),
                None => run(&disk, random, writers),
            };
        }
        check(&disk, engine, random, keys, self.overwrites);
        let delete_all = async {
            for key in 0..keys {
                assert_eq!(engine.delete(&key_of(key)).await, Ok(DeleteOutcome::Deleted));
            }
        };
        match &mut background {
            Some(background) => background.run(|random| disk.complete_one(random), random, delete_all),
            None => run(&disk, random, delete_all),
        }
        assert_eq!(engine.statistics().keys, 0);
    }
}

const SMALL: NearlyFull = NearlyFull {
    lengths: Lengths::Short,
    per_mille: 850,
    overwrites: 3,
    writers: 6,
    stores: 2,
    disk_bytes: 8 << 20,
    mode: PutMode::Upsert,
    compactions: None,
};

#[test]
fn short_values_at_85_percent_are_overwritten_three_times() {
    SMALL.overwrite();
}

#[test]
fn short_values_at_90_percent_are_overwritten_by_one_writer() {
    NearlyFull { per_mille: 900, overwrites: 2, writers: 1, ..SMALL }.overwrite();
}

#[test]
fn records_of_whole_windows_are_not_moved_while_few_chunks_are_free() {
    let volume =
        NearlyFull { per_mille: 900, overwrites: 1, writers: 1, stores: 4, disk_bytes: 24 << 20, ..SMALL };
    volume.overwrite();
}

#[test]
fn long_values_at_93_percent_are_overwritten_six_times() {
    NearlyFull { lengths: Lengths::Long, per_mille: 930, overwrites: 6, ..SMALL }.overwrite();
}

#[test]
fn mixed_values_at_90_percent_are_overwritten_twenty_times() {
    NearlyFull { lengths: Lengths::Mixed, per_mille: 900, overwrites: 20, ..SMALL }.overwrite();
}

/// With one compaction at a time, two and four.
fn overwrite_beside_compactions(volume: &NearlyFull) {
    for compactions in [1, 4, 8] {
        println!("{compactions} at once");
        NearlyFull { compactions: Some(compactions), ..*volume }.overwrite();
    }
}

#[test]
fn short_values_at_90_percent_are_overwritten_beside_several_compactions() {
    overwrite_beside_compactions(&NearlyFull { per_mille: 900, stores: 4, overwrites: 1, ..SMALL });
}

#[test]
fn short_values_at_93_percent_are_updated_by_256_writers_beside_several_compactions() {
    let volume = NearlyFull { per_mille: 930, stores: 4, writers: 256, overwrites: 1, ..SMALL };
    overwrite_beside_compactions(&NearlyFull { mode: PutMode::UpdateOnly, ..volume });
}

/// A conditional put takes its chunk later than its pass, and compaction may have taken many meanwhile.
#[test]
fn conditional_puts_at_93_percent_are_not_refused_beside_several_compactions() {
    let volume = NearlyFull { per_mille: 930, stores: 4, writers: 2, overwrites: 2, ..SMALL };
    let volume = NearlyFull { mode: PutMode::UpdateOnly, lengths: Lengths::Mixed, ..volume };
    overwrite_beside_compactions(&volume);
}

#[test]
fn long_values_at_95_percent_are_overwritten_beside_several_compactions() {
    overwrite_beside_compactions(&NearlyFull {
        lengths: Lengths::Long,
        per_mille: 950,
        stores: 4,
        overwrites: 6,
        ..SMALL
    });
}

#[test]
fn mixed_values_at_95_percent_are_overwritten_beside_several_compactions() {
    overwrite_beside_compactions(&NearlyFull {
        lengths: Lengths::Mixed,
        per_mille: 950,
        stores: 8,
        overwrites: 8,
        ..SMALL
    });
}
