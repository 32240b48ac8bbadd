//! Commands per second of the connection state machine alone on one core, without sockets or an engine.
//!
//! Expected, by arithmetic: a Store of 4 KiB in its capsule copies 4 KiB (about 0.2 µs) and handles two
//! headers (about 0.1 µs): 3 M/s. Run with `cargo bench -p octokv-nvmf`.
#![allow(clippy::disallowed_methods)] // A bench reads the clock.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{NSID, TestHost, store_sqe, target, value};
use octokv_base::{Buffer, BufferPool, ShortKey};
use octokv_nvmf::{IoRequest, RequestOutcome};
use octokv_wire::{Sgl, kv};
use std::io::IoSlice;
use std::time::{Duration, Instant};

const DEPTH: u16 = 31;
const ROUND: Duration = Duration::from_millis(300);

struct Case {
    name: &'static str,
    value_bytes: usize,
    is_store: bool,
    digests: bool,
}

/// Commands per second of one round.
fn round(case: &Case) -> f64 {
    let admin = TestHost::admin_with(&target(), case.digests, case.digests);
    let mut host = TestHost::io_with(&admin, 1, case.digests, case.digests);
    let stored = value(case.value_bytes);
    let mut stream = Vec::new();
    for id in 0..DEPTH {
        if case.is_store {
            let sgl = Sgl::in_capsule(case.value_bytes as u32);
            stream.extend(host.capsule(&store_sqe(id, b"0123456789abcdef", stored.len(), sgl, 0), &stored));
        } else {
            let key = ShortKey::new(b"0123456789abcdef").unwrap();
            let limit_bytes = case.value_bytes as u32;
            let mut sqe = kv::KvCommand::Retrieve { key, limit_bytes }.encode(id, NSID);
            sqe.sgl = Sgl::transport(limit_bytes);
            stream.extend(host.capsule(&sqe, &[]));
        }
    }
    let values = BufferPool::new(64 << 20);
    let (mut requests, mut done): (Vec<IoRequest>, u64) = (Vec::new(), 0);
    let begin = Instant::now();
    while begin.elapsed() < ROUND {
        let consumed = host.connection.receive(host.now, &stream, &host.pool, &mut requests);
        assert_eq!(consumed.consumed_bytes, stream.len());
        for request in requests.drain(..) {
            let outcome =
                if case.is_store { RequestOutcome::Stored } else { value_of(&values, case.value_bytes) };
            host.connection.complete(request.slot, outcome);
            done += 1;
        }
        let send_buffer = host.connection.send_buffer();
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(128);
        send_buffer.slices(&mut slices, usize::MAX);
        let bytes = slices.iter().map(|slice| slice.len()).sum();
        send_buffer.advance(bytes);
    }
    done as f64 / begin.elapsed().as_secs_f64()
}

fn value_of(pool: &BufferPool, bytes: usize) -> RequestOutcome {
    let buffer: Buffer = pool.take(64 + bytes).expect("a buffer of the bench");
    RequestOutcome::Value { buffer: buffer.into(), offset: 64, bytes }
}

fn main() {
    let case = |name, value_bytes, is_store, digests| Case { name, value_bytes, is_store, digests };
    let cases = [
        case("store 64 B", 64, true, false),
        case("store 4 KiB", 4096, true, false),
        case("store 4 KiB, digests", 4096, true, true),
        case("store 16 KiB", 16384, true, false),
        case("retrieve 64 B", 64, false, false),
        case("retrieve 4 KiB", 4096, false, false),
        case("retrieve 4 KiB, digests", 4096, false, true),
        case("retrieve 64 KiB", 65536, false, false),
    ];
    println!("{:24} {:>12} {:>12} {:>12}", "thousand commands/s", "best", "median", "worst");
    for case in &cases {
        let mut rounds: Vec<f64> = (0..5).map(|_| round(case) / 1e3).collect();
        rounds.sort_by(f64::total_cmp);
        println!("{:24} {:12.0} {:12.0} {:12.0}", case.name, rounds[4], rounds[2], rounds[0]);
    }
}
