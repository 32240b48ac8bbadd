//! What a hostile node sends to a client with commands in flight: a completion or a loss, never a panic; and
//! what it says of itself and its namespaces.
//!
//! The first byte chooses the digests, and whether the commands are of keys or of blocks; then pieces, each a
//! length byte and so many bytes, are given to the queue behind a proper ICResp. Or all that follows is the page
//! of a step of the setup.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::{Buffer, Key, Lba, NamespaceId, Nanos, Pool};
use octokv_client::queue_pair::{Event, Queue};
use octokv_client::command::{Command, Prepared, Value, answer};
use octokv_client::controller_init::{Step, next};
use octokv_client::{Blocks, Facts, Settings, StoreMode};
use octokv_wire::nvm::Range;
use octokv_wire::pdu::IcResponse;
use octokv_wire::{Cqe, Status};

fuzz_target!(|input: &[u8]| {
    let Some((&settings, mut rest)) = input.split_first() else { return };
    let (header_digest, data_digest) = (settings & 1 != 0, settings & 2 != 0);
    if settings & 8 != 0 {
        return page(settings >> 4, rest);
    }
    let (pool, mut facts) = (Pool::new(1 << 22), Facts::for_tests());
    let of_blocks = settings & 4 != 0;
    facts.blocks = of_blocks.then_some(Blocks { block_bytes: 512, count: 100, nguid: [0; 16] });
    let mut queue = Queue::new(4, 8192, header_digest, data_digest);
    let granted =
        IcResponse { controller_alignment: 4, header_digest, data_digest, host_data_bytes_max: 4096 };
    queue.receive(&granted.encode(), &pool, &mut |_| {}).expect("a proper ICResp");
    let key = Key::new(b"key").expect("a short key");
    let buffer = |blocks: usize| Buffer::zeroed(512 * blocks);
    let read = |blocks, into| Command::Read { range: Range { lba: Lba(3), blocks }, into };
    let data = Value::Buffer { buffer: buffer(20), from: 0, to: 512 * 20 };
    let commands_on_blocks = [
        read(2, Some(buffer(2))),
        read(1, None),
        Command::Write { lba: Lba(0), data, force_unit_access: false },
        Command::Compare { lba: Lba(0), data: Value::Slice(&[7; 512]) },
    ];
    let commands_on_keys = [
        Command::Retrieve { key: key.clone(), limit_bytes: 300 },
        Command::Store { key, value: Value::Slice(&[7; 9000]), mode: StoreMode::Upsert },
    ];
    let (on_blocks, on_keys) = (commands_on_blocks.into_iter(), commands_on_keys.into_iter());
    let commands = on_blocks.filter(|_| of_blocks).chain(on_keys.filter(|_| !of_blocks));
    for (token, command) in commands.enumerate() {
        let prepared = Prepared::new(command, NamespaceId(1), &facts).expect("a sound command");
        queue.submit(prepared, token as u64, Nanos::NEVER, &pool);
    }
    let mut held = Vec::new();
    while let Some((&count, after)) = rest.split_first() {
        let (piece, after) = after.split_at(usize::from(count).min(after.len()));
        rest = after;
        held.extend_from_slice(piece);
        let mut sink = |event| {
            if let Event::Done(done) = event {
                let _ = answer(done);
            }
        };
        match queue.receive(&held, &pool, &mut sink) {
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

/// The page of a step: facts or a loss.
fn page(step: u8, page: &[u8]) {
    let steps = [Step::Controller, Step::Namespaces, Step::Descriptors, Step::Namespace, Step::Blocks];
    let mut facts = Facts::for_tests();
    let success = Cqe::new(0, 0, Status::SUCCESS, 0, 0);
    let step = steps[usize::from(step) % steps.len()];
    let _ = next(step, &success, page, &Settings::default(), &mut facts);
    if let Some(blocks) = facts.blocks {
        assert!(blocks.command_bytes_max(facts.data_bytes_max).is_multiple_of(blocks.block_bytes));
    }
}
