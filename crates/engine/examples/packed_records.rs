//! What packing records would cost the hash engine: space and bytes written per byte of values, by the size of values
//! (decision 0026): `cargo run --release -p octokv-engine --example packed_records`.
//!
//! Records of 16-byte keys, in whole units of 4 KiB or 512 B as now, or packed at 64 B. Packed records share blocks. A block can
//! be reused only when every record in it is dead, so live records have to be moved out of mostly dead blocks (cleaning).
//!
//! The model favours packing: each batch fills its own run of blocks, cleaning takes the run with the fewest live records (greedy)
//! and finds it at no cost, the journal and index writes of a move are not counted, and metadata takes as much as with units of
//! 4 KiB. Keys are overwritten at random, eight times each on average; the second half of the overwrites is counted.

use octokv_base::Prng;
use octokv_engine::common::record::record_bytes;
use std::collections::BTreeSet;

const BLOCK_BYTES: usize = 4096;
const GRANULE_BYTES: usize = 64;
const KEY_BYTES: usize = 16;
const KEYS: usize = 100_000;
/// Units, and the part of the device that is left for records (docs/FORMATS.md, "Space by unit").
const UNITS: [(usize, f64); 2] = [(512, 0.859), (BLOCK_BYTES, 0.969)];

/// A store of packed records in runs, each written once and emptied by moving what lives.
struct PackedStore {
    records_per_run: usize,
    /// The run of each key's record.
    run_of: Vec<usize>,
    /// The keys that were written to each run; a key is live there if `run_of` says so.
    keys: Vec<Vec<usize>>,
    /// The runs that are full, by live records.
    full: BTreeSet<(usize, usize)>,
    live: Vec<usize>,
    free: Vec<usize>,
    open: usize,
    records_written: u64,
}

impl PackedStore {
    fn new(records_per_run: usize, runs: usize) -> PackedStore {
        let mut store = PackedStore {
            records_per_run,
            run_of: vec![usize::MAX; KEYS],
            keys: vec![Vec::new(); runs],
            full: BTreeSet::new(),
            live: vec![0; runs],
            free: (1..runs).collect(),
            open: 0,
            records_written: 0,
        };
        (0..KEYS).for_each(|key| store.put(key));
        store
    }

    fn append(&mut self, key: usize) {
        let old = std::mem::replace(&mut self.run_of[key], self.open);
        if let Some(live) = self.live.get_mut(old) {
            let was_full = self.full.remove(&(*live, old));
            *live -= 1;
            if was_full {
                self.full.insert((*live, old));
            }
        }
        self.keys[self.open].push(key);
        self.live[self.open] += 1;
        self.records_written += 1;
        if self.keys[self.open].len() == self.records_per_run {
            self.full.insert((self.live[self.open], self.open));
            self.open = self.free.pop().expect("a run is kept free");
        }
    }

    fn put(&mut self, key: usize) {
        self.append(key);
        // One free run takes what lives of any other.
        while self.free.is_empty() {
            let (_, run) = self.full.pop_first().expect("full runs");
            let keys = std::mem::take(&mut self.keys[run]);
            self.free.push(run);
            for key in keys {
                if self.run_of[key] == run {
                    self.append(key);
                }
            }
        }
    }
}

/// Bytes written per byte of values, with `fill` of the space of runs taken by live records.
fn write_amplification(value_bytes: usize, records_per_run: usize, fill: f64) -> Option<f64> {
    let runs = (KEYS as f64 / records_per_run as f64 / fill) as usize;
    // Some room beyond the open run and the free one, without which cleaning never ends.
    (runs * records_per_run > KEYS + 3 * records_per_run).then(|| {
        let mut store = PackedStore::new(records_per_run, runs);
        let mut random = Prng::new(1);
        let mut overwrite = |store: &mut PackedStore, count: usize| {
            (0..count).for_each(|_| store.put(random.below(KEYS as u64) as usize));
        };
        overwrite(&mut store, 4 * KEYS);
        let before = store.records_written;
        overwrite(&mut store, 4 * KEYS);
        let records = (store.records_written - before) as f64 / (4 * KEYS) as f64;
        records * run_bytes(value_bytes, records_per_run) / (records_per_run * value_bytes) as f64
    })
}

/// Bytes of a run of packed records, in whole blocks.
fn run_bytes(value_bytes: usize, records: usize) -> f64 {
    let record = record_bytes(KEY_BYTES, value_bytes).next_multiple_of(GRANULE_BYTES);
    (records * record).next_multiple_of(BLOCK_BYTES) as f64
}

fn main() {
    println!(
        "| value | a run of | in units of 512 B | of 4 KiB | packed | packed, as many values as units of 512 B hold | of 4 KiB |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for value_bytes in [256, 1024, 4096, 16384] {
        for records in [12, 64] {
            let in_units = UNITS.map(|(unit, share)| {
                let record = record_bytes(KEY_BYTES, value_bytes).next_multiple_of(unit);
                record as f64 / value_bytes as f64 / share
            });
            let [_, (_, share)] = UNITS;
            let packed = run_bytes(value_bytes, records) / (records * value_bytes) as f64 / share;
            let written = in_units.map(|space| {
                let fill = packed / space;
                match write_amplification(value_bytes, records, fill) {
                    Some(written) => format!("fill {fill:.2}, written {written:.2}"),
                    None => format!("fill {fill:.2}: no room to clean"),
                }
            });
            let [of_512, of_block] = in_units;
            let [at_512, at_block] = written;
            println!(
                "| {value_bytes} B | {records} | {of_512:.3} | {of_block:.3} | {packed:.3} | {at_512} | {at_block} |"
            );
        }
    }
}
