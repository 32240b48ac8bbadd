//! What a hostile node sends to a client with commands in flight: a completion or a loss, never a panic.
//!
//! The first byte chooses the digests; then pieces, each a length byte and so many bytes, are given to the
//! queue behind a proper ICResp.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::{Key, NamespaceId, Nanos, Pool};
use octokv_client::queue::Queue;
use octokv_client::request::{Command, Prepared, Value};
use octokv_client::{Facts, StoreMode};
use octokv_wire::pdu::IcResponse;

fuzz_target!(|input: &[u8]| {
    let Some((&settings, mut rest)) = input.split_first() else { return };
    let (header_digest, data_digest) = (settings & 1 != 0, settings & 2 != 0);
    let (pool, facts) = (Pool::new(1 << 22), Facts::for_tests());
    let mut queue = Queue::new(4, 8192, header_digest, data_digest);
    let granted =
        IcResponse { controller_alignment: 4, header_digest, data_digest, host_data_bytes_max: 4096 };
    queue.receive(&granted.encode(), &pool, &mut |_| {}).expect("a proper ICResp");
    let key = Key::new(b"key").expect("a short key");
    let commands = [
        Command::Retrieve { key: key.clone(), limit_bytes: 300 },
        Command::Store { key, value: Value::Slice(&[7; 9000]), mode: StoreMode::Upsert },
    ];
    for (token, command) in commands.into_iter().enumerate() {
        let prepared = Prepared::new(command, NamespaceId(1), &facts).expect("a sound command");
        queue.submit(prepared, token as u64, Nanos::NEVER, &pool);
    }
    let mut held = Vec::new();
    while let Some((&count, after)) = rest.split_first() {
        let (piece, after) = after.split_at(usize::from(count).min(after.len()));
        rest = after;
        held.extend_from_slice(piece);
        match queue.receive(&held, &pool, &mut |_| {}) {
            Ok(taken) => drop(held.drain(..taken)),
            Err(_) => break,
        }
        let mut slices = Vec::new();
        queue.slices(&mut slices);
        let bytes = slices.iter().map(|slice| slice.len()).sum();
        queue.sent(bytes);
    }
    queue.abandon(|_| {});
});
