//! Writes the fixture of the current format version: `cargo run -p octokv-engine --example make_fixture FILE`.
//!
//! Run once per version; `tests/hash_fixtures.rs` opens the committed file from then on, and says what is in it.

#![allow(clippy::disallowed_methods, reason = "a tool that writes one file")]

use octokv_base::{BufferPool, Prng, UnixTime, Version};
use octokv_device::Device;
use octokv_device::power_loss::PowerLossDisk;
use octokv_engine::conformance::{key_of, record_of, value_of};
use octokv_engine::hash::{HashEngine, format, open};
use octokv_engine::{DeleteOutcome, Durability, Engine, PutOptions, PutOutcome, PutValue};
use octokv_engine::{FormatConfig, OpenConfig, WallClock};
use octokv_runtime::block_on;
use std::rc::Rc;

/// The wall clock while the fixture is written: September 2020. One second later the first of two expiry times has passed.
const MADE_AT: UnixTime = UnixTime(1_600_000_000_000);
const SOON: UnixTime = UnixTime(MADE_AT.0 + 1_000);
/// In the year 2500.
const FAR: UnixTime = UnixTime(16_725_225_600_000);
/// Too long for any run of free units that the fillers leave.
const PIECES_BYTES: usize = 6_000;
/// The first of the keys that fill the volume.
const FILLERS: u64 = 100;

struct Fixture {
    disk: PowerLossDisk,
    engine: HashEngine,
}

impl Fixture {
    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut random = Prng::new(2);
        block_on(future, || {
            self.disk.complete_one(&mut random);
        })
    }

    /// Stores the value of operation `index` under key `index`.
    fn put(&self, index: u64, bytes: usize, version: u64, expires_at: UnixTime) -> PutOutcome {
        let key = key_of(index);
        let record = record_of(self.engine.record_layout(), &key, &value_of(&key, index, bytes));
        let options =
            PutOptions { version: Version::from_bits(version), expires_at, ..PutOptions::default() };
        self.run(self.engine.put_with(&key, PutValue::new(record, bytes), options)).expect("no fault")
    }

    fn store(&self, index: u64, bytes: usize, version: u64, expires_at: UnixTime) {
        assert_eq!(self.put(index, bytes, version, expires_at), PutOutcome::Stored);
    }

    fn delete(&self, index: u64, version: u64) {
        let deleted = self.run(self.engine.delete_with(&key_of(index), Version::from_bits(version)));
        assert_eq!(deleted, Ok(DeleteOutcome::Deleted));
    }

    /// One key of each kind, from `first` on: plain, long, with a version, with expiry times, a tombstone.
    fn store_each_kind(&self, first: u64) {
        (first..first + 3).for_each(|index| self.store(index, 100 + index as usize, 0, UnixTime::NEVER));
        self.store(first + 3, 103, 30, UnixTime::NEVER);
        self.store(first + 4, 104, 0, FAR);
        self.store(first + 5, 105, 50, SOON);
        self.store(first + 6, 106, 60, UnixTime::NEVER);
        self.delete(first + 6, 61);
        self.store(first + 7, PIECES_BYTES, 0, UnixTime::NEVER);
    }
}

fn main() {
    let path = std::env::args().nth(1).expect("a file to write");
    let disk = PowerLossDisk::new(vec![0; 768 << 10], 512);
    let device: Rc<dyn Device> = Rc::new(disk.clone());
    let mut random = Prng::new(1);
    let mut complete_io = || {
        disk.complete_one(&mut random);
    };
    let format_config =
        FormatConfig { unit_bytes: Some(512), value_bytes_max: 64 << 10, seed: 1, ..FormatConfig::default() };
    block_on(format(&*device, &format_config), &mut complete_io).expect("formats");
    let pool = BufferPool::new(1 << 20);
    let open_config = OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::new(|| MADE_AT),
        tokens: None,
    };
    let volume =
        block_on(open(&device, &pool, open_config, &format_config), &mut complete_io).expect("opens");
    let fixture = Fixture { disk: disk.clone(), engine: HashEngine::new(volume, 0, device, pool) };

    let fill = |index: &u64| fixture.put(*index, 100, 0, UnixTime::NEVER) == PutOutcome::Full;
    let end = (FILLERS..).find(fill).expect("a full volume");
    (FILLERS + 1..end).step_by(2).for_each(|index| fixture.delete(index, 0));
    fixture.store_each_kind(0);
    fixture.run(fixture.engine.checkpoint(false)).expect("writes a checkpoint");
    fixture.store_each_kind(10);
    // Changes of what the checkpoint has.
    fixture.delete(1, 0);
    fixture.store(3, 203, 31, UnixTime::NEVER);
    fixture.run(fixture.engine.mark_durable()).expect("marks");
    // Of the last two, recovery has to verify the records.
    fixture.store(18, 118, 180, FAR);
    fixture.store(19, PIECES_BYTES, 190, UnixTime::NEVER);
    println!("fillers {FILLERS} to {}", end - 1);
    std::fs::write(&path, disk.contents()).expect("writes the file");
}
