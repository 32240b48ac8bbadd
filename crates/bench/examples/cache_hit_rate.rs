//! Hit rates of the cache of values on a Zipf trace, which is written to a file for other caches to replay
//! (`scripts/rocksdb-hit-rate`): `cargo run --release -p octokv-bench --example cache_hit_rate -- TRACE`.
//!
//! 100,000 keys of 16 B with values of 4 KiB, 1,000,000 reads to warm up and as many measured; theta 0.99.

#![allow(clippy::disallowed_methods, reason = "a program that writes a file")]

use octokv_base::{Key, Prng, Version};
use octokv_bench::key_distribution::{KeyDistribution, KeySampler};
use octokv_engine::cached::ValueCache;
use octokv_engine::cached::value_cache::CacheRead;

const KEYS: u64 = 100_000;
const READS: u64 = 1_000_000;
const VALUE_BYTES: usize = 4096;

fn key_of(index: u64) -> Key {
    Key::new(format!("{index:016}").as_bytes()).expect("16 bytes")
}

fn main() {
    let mut random = Prng::new(1);
    let mut sampler = KeySampler::new(KeyDistribution::Zipf, 0.99, KEYS, 1);
    let trace: Vec<u64> = (0..2 * READS).map(|_| sampler.sample(KEYS, &mut random)).collect();
    if let Some(path) = std::env::args().nth(1) {
        let bytes: Vec<u8> = trace.iter().flat_map(|&index| (index as u32).to_le_bytes()).collect();
        std::fs::write(path, bytes).expect("the trace is written");
    }
    for percent in [1, 5, 10, 20] {
        let bytes = KEYS * VALUE_BYTES as u64 * percent / 100;
        let (cache, value) = (ValueCache::new(bytes, 1), vec![0; VALUE_BYTES]);
        let mut hits_before = 0;
        for (number, &index) in trace.iter().enumerate() {
            if number as u64 == READS {
                hits_before = cache.statistics().hits;
            }
            let key = key_of(index);
            if let CacheRead::Miss(Some(lease)) = cache.read(cache.hash(key.as_bytes()), key.as_bytes()) {
                cache.fill(lease, &key, &value, Version::NONE);
            }
        }
        let statistics = cache.statistics();
        let hit_percent = (statistics.hits - hits_before) as f64 * 100.0 / READS as f64;
        println!("{bytes:>9} B ({percent:>2} %): {hit_percent:.2} % hits, {} entries", statistics.entries);
    }
}
