//! Gets and puts per second of the hash engine on one core and memory: no sockets, no protocol, no tasks.
//!
//! Expected, by arithmetic: a get of 64 B reads one cache line of the partition header, one of the entry, and eight of the
//! record: 0.1 µs each for the first two and 0.2 µs for the rest without cache hits, and about as much computation: 2 M/s,
//! and near 4 M/s if prefetches bring all of it in time. A put reads the old record's front and writes the new one: half
//! of that.
//! The strategies alternate within one process every 10 ms. Run with `cargo bench -p octokv-engine`.
#![allow(clippy::disallowed_methods)] // A bench reads the clock.

use octokv_base::{BufferPool, Key, Prng};
use octokv_device::{Device, MemoryDevice, RamDisk};
use octokv_engine::hash::{HashEngine, open};
use octokv_engine::{Durability, Engine, PrefetchStage, PutMode, PutOutcome};
use octokv_engine::{FormatConfig, OpenConfig, WallClock};
use octokv_runtime::block_on;
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

const VALUE_BYTES: usize = 64;
const UNIT_BYTES: usize = 512;
const SLICE_DURATION: Duration = Duration::from_millis(10);
const SLICES: usize = 60;
/// Operations between two readings of the clock.
const BATCH: usize = 128;

/// A prefetch strategy: the stages, and how many operations ahead each is issued.
struct Strategy {
    name: &'static str,
    prefetches: &'static [(usize, PrefetchStage)],
}

const STRATEGIES: [Strategy; 5] = [
    Strategy { name: "no prefetch", prefetches: &[] },
    Strategy { name: "entry 4", prefetches: &[(4, PrefetchStage::Entry)] },
    Strategy {
        name: "partition 5, entry 4, record 2",
        prefetches: &[(5, PrefetchStage::Partition), (4, PrefetchStage::Entry), (2, PrefetchStage::Record)],
    },
    Strategy {
        name: "partition 12, entry 8, record 4",
        prefetches: &[(12, PrefetchStage::Partition), (8, PrefetchStage::Entry), (4, PrefetchStage::Record)],
    },
    Strategy {
        name: "partition 24, entry 16, record 8",
        prefetches: &[(24, PrefetchStage::Partition), (16, PrefetchStage::Entry), (8, PrefetchStage::Record)],
    },
];

/// The outcome of an operation that completes at once.
fn poll_ready<T>(future: impl Future<Output = T>) -> T {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => panic!("memory completes at once"),
    }
}

fn engine(keys: usize) -> (HashEngine, BufferPool) {
    let pool = BufferPool::new(64 << 20);
    let bytes = keys as u64 * UNIT_BYTES as u64 * 2 + (64 << 20);
    let device: Rc<dyn Device> = Rc::new(MemoryDevice::new(RamDisk::new(bytes, 512).expect("memory")));
    let config = OpenConfig {
        durability: Durability::PowerSafe,
        cores: 1,
        cache_bytes: 0,
        prepare_bytes: 0,
        compact_bytes_per_second: 0,
        tree: OpenConfig::TREE,
        swap_gap: OpenConfig::SWAP_GAP,
        clock: WallClock::default(),
        tokens: None,
    };
    let format_config = FormatConfig { unit_bytes: Some(UNIT_BYTES as u32), ..FormatConfig::default() };
    let volume = block_on(open(&device, &pool, config, &format_config), || ()).expect("opens");
    (HashEngine::new(volume, 0, device, pool.clone()), pool)
}

fn put(engine: &HashEngine, pool: &BufferPool, key: &Key) {
    let offset = octokv_engine::common::record::LAYOUT.value_offset(key.len());
    let mut record = pool.take(offset + VALUE_BYTES).expect("a buffer of the bench");
    record[offset..].fill(7);
    let stored = poll_ready(engine.put(key, PutMode::Upsert, record, VALUE_BYTES));
    assert_eq!(stored, Ok(PutOutcome::Stored));
}

fn get(engine: &HashEngine, key: &Key) {
    let value = poll_ready(engine.get(key)).expect("no fault").expect("it was stored");
    assert_eq!(value.bytes as usize, VALUE_BYTES);
}

/// Operations per second of one slice with random keys.
fn measure_slice(
    keys: &[Key],
    random: &mut Prng,
    engine: &HashEngine,
    prefetches: &[(usize, PrefetchStage)],
    mut one: impl FnMut(&Key),
) -> f64 {
    let (begin, mut done) = (Instant::now(), 0);
    while begin.elapsed() < SLICE_DURATION {
        let drawn: [&Key; BATCH] = std::array::from_fn(|_| &keys[random.below(keys.len() as u64) as usize]);
        for (at, key) in drawn.iter().enumerate() {
            for &(distance, stage) in prefetches {
                if let Some(later) = drawn.get(at + distance) {
                    engine.prefetch(later, stage);
                }
            }
            one(key);
        }
        done += BATCH;
    }
    done as f64 / begin.elapsed().as_secs_f64()
}

fn main() {
    println!("{:10} {:5} {:32} {:>12} {:>12}", "keys", "", "thousand/s", "median", "best");
    for count in [20_000, 1_000_000] {
        let (engine, pool) = engine(count);
        let keys: Vec<Key> =
            (0..count).map(|i| Key::new(format!("{i:016}").as_bytes()).expect("short")).collect();
        keys.iter().for_each(|key| put(&engine, &pool, key));
        let mut random = Prng::new(7);
        for stores in [false, true] {
            let mut rates = [const { Vec::new() }; STRATEGIES.len()];
            for _ in 0..SLICES {
                for (strategy, rates) in STRATEGIES.iter().zip(&mut rates) {
                    rates.push(match stores {
                        true => measure_slice(&keys, &mut random, &engine, strategy.prefetches, |key| {
                            put(&engine, &pool, key)
                        }),
                        false => measure_slice(&keys, &mut random, &engine, strategy.prefetches, |key| {
                            get(&engine, key)
                        }),
                    });
                }
            }
            for (strategy, mut rates) in STRATEGIES.iter().zip(rates) {
                rates.sort_by(f64::total_cmp);
                let (median, best) = (rates[SLICES / 2] / 1e3, rates[SLICES - 1] / 1e3);
                let what = if stores { "put" } else { "get" };
                println!("{count:10} {what:5} {:32} {median:12.0} {best:12.0}", strategy.name);
            }
        }
    }
}
