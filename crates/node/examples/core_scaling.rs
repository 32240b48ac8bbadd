//! What cores can do when the network is not the limit: each thread is a core of a node that replays recorded commands from
//! memory, all on one volume in memory. Rounds alternate between one core and all of them.
//!
//! Usage: `core_scaling [CORES [SECONDS [ROUNDS]]]`, by default 2 cores, 1 second, 3 rounds. A line has the requests per second
//! of one core and of all, and their ratio, of each round. `own` keys are those of one core, `same` keys those of all.

#![allow(clippy::disallowed_methods, reason = "a benchmark of threads, by the clock")]

#[path = "../tests/support/rig.rs"]
mod rig;

use rig::{ReactorRig, RigConfig, SharedMemory, keys};
use std::sync::Barrier;
use std::time::{Duration, Instant};

const DEPTH: usize = 128;
/// Batches of each core, of different keys.
const BATCHES: usize = 64;

/// A case: what the cores do.
#[derive(Clone, Copy)]
struct Case {
    is_store: bool,
    value_bytes: usize,
    has_own_keys: bool,
}

/// Requests per second of so many cores together.
fn measure(case: Case, cores: usize, duration: Duration) -> f64 {
    let config = RigConfig { block_bytes: 512, ..RigConfig::new(256 << 20, DEPTH as u16) };
    let (memory, barrier) = (SharedMemory::new(config, cores), Barrier::new(cores));
    let run = |core: usize| {
        octokv_sys::thread::pin_to_core(core).expect("this machine has that core");
        let mut rig = ReactorRig::on_shared_memory(config, &memory, core);
        let first = if case.has_own_keys { core * BATCHES * DEPTH } else { 0 };
        let value = vec![7; case.value_bytes];
        let batches: Vec<Vec<u8>> = (0..BATCHES)
            .map(|batch| {
                let keys = keys((first + batch * DEPTH) as u64, DEPTH);
                let stores = rig.record_batch(&keys, Some(&value));
                if case.is_store { stores } else { rig.record_batch(&keys, None) }
            })
            .collect();
        barrier.wait();
        let (begin, mut replayed) = (Instant::now(), 0);
        while begin.elapsed() < duration {
            rig.replay(&batches[replayed % BATCHES], 1);
            replayed += 1;
        }
        (replayed * DEPTH) as f64 / begin.elapsed().as_secs_f64()
    };
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..cores).map(|core| scope.spawn(move || run(core))).collect();
        threads.into_iter().map(|thread| thread.join().expect("it measured")).sum()
    })
}

fn main() {
    let argument = |at: usize, default: usize| match std::env::args().nth(at) {
        Some(text) => text.parse().expect("usage: core_scaling [CORES [SECONDS [ROUNDS]]]"),
        None => default,
    };
    let (cores, rounds) = (argument(1, 2), argument(3, 3));
    let duration = Duration::from_secs(argument(2, 1) as u64);
    for value_bytes in [64, 4096] {
        for is_store in [false, true] {
            for has_own_keys in [true, false] {
                let case = Case { is_store, value_bytes, has_own_keys };
                let rates: Vec<String> = (0..rounds)
                    .map(|_| {
                        let (one, all) = (measure(case, 1, duration), measure(case, cores, duration));
                        format!("{:.2} M/s, {:.2} M/s ({:.2})", one / 1e6, all / 1e6, all / one)
                    })
                    .collect();
                let what = if is_store { "Store" } else { "Retrieve" };
                let whose = if has_own_keys { "own" } else { "same" };
                println!("{what:8} {value_bytes:4} B, {whose:4} keys: {}", rates.join("; "));
            }
        }
    }
}
