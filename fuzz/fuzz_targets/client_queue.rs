//! A malicious node against a client with commands in flight, and its Identify pages: a completion or an error, never a
//! panic.
//!
//! The first byte selects the digests, and Key Value or block commands. The rest is chunks, each a length byte and that many
//! bytes, which the queue receives after a valid ICResp; or the page of one initialization step.
#![no_main]

use libfuzzer_sys::fuzz_target;
use octokv_base::{Buffer, BufferPool, Key, Lba, NamespaceId, Nanos};
use octokv_client::command::{Command, EncodedCommand, Value};
use octokv_client::completion::decode_response;
use octokv_client::controller_init::{InitStep, next_step};
use octokv_client::queue_pair::{QueueEvent, QueuePair};
use octokv_client::{BlockInfo, ClientConfig, ControllerInfo, StoreMode};
use octokv_wire::nvm::LbaRange;
use octokv_wire::pdu::IcResponse;
use octokv_wire::{Cqe, Status};

fuzz_target!(|input: &[u8]| {
    let Some((&selector, mut rest)) = input.split_first() else { return };
    let (header_digest, data_digest) = (selector & 1 != 0, selector & 2 != 0);
    if selector & 8 != 0 {
        return run_init_step(selector >> 4, rest);
    }
    let (pool, mut info) = (BufferPool::new(1 << 22), ControllerInfo::for_tests());
    let is_block_namespace = selector & 4 != 0;
    info.blocks =
        is_block_namespace.then_some(BlockInfo { block_bytes: 512, block_count: 100, nguid: [0; 16] });
    let mut queue = QueuePair::new(4, 8192, header_digest, data_digest);
    let granted =
        IcResponse { controller_alignment: 4, header_digest, data_digest, h2c_data_bytes_max: 4096 };
    queue.receive(&granted.encode(), &pool, &mut |_| {}).expect("a valid ICResp");
    let key = Key::new(b"key").expect("a short key");
    let buffer = |blocks: usize| Buffer::zeroed(512 * blocks);
    let read = |blocks, buffer| Command::Read { range: LbaRange { lba: Lba(3), blocks }, buffer };
    let data = Value::Buffer { buffer: buffer(20), from: 0, to: 512 * 20 };
    let block_commands = [
        read(2, Some(buffer(2))),
        read(1, None),
        Command::Write { lba: Lba(0), data, force_unit_access: false },
        Command::Compare { lba: Lba(0), data: Value::Slice(&[7; 512]) },
    ];
    let kv_commands = [
        Command::Retrieve { key: key.clone(), limit_bytes: 300 },
        Command::Store { key, value: Value::Slice(&[7; 9000]), mode: StoreMode::Upsert },
    ];
    let (block_commands, kv_commands) = (block_commands.into_iter(), kv_commands.into_iter());
    let commands =
        block_commands.filter(|_| is_block_namespace).chain(kv_commands.filter(|_| !is_block_namespace));
    for (token, command) in commands.enumerate() {
        let encoded = EncodedCommand::new(command, NamespaceId(1), &info).expect("a valid command");
        queue.submit(encoded, token as u64, Nanos::NEVER, &pool);
    }
    let mut received = Vec::new();
    while let Some((&count, after)) = rest.split_first() {
        let (chunk, after) = after.split_at(usize::from(count).min(after.len()));
        rest = after;
        received.extend_from_slice(chunk);
        let mut sink = |event| {
            if let QueueEvent::Completed(completion) = event {
                let _ = decode_response(completion, 1);
            }
        };
        match queue.receive(&received, &pool, &mut sink) {
            Ok(consumed) => drop(received.drain(..consumed)),
            Err(_) => break,
        }
        let mut slices = Vec::new();
        queue.slices(&mut slices);
        let bytes = slices.iter().map(|slice| slice.len()).sum();
        queue.advance_sent(bytes);
    }
    queue.abort_all(|_| {});
});

/// Decodes the page of a step: the limits are consistent, or the step fails.
fn run_init_step(init_step: u8, page: &[u8]) {
    let steps = [
        InitStep::Controller,
        InitStep::NamespaceList,
        InitStep::Descriptors,
        InitStep::KvNamespace,
        InitStep::BlockNamespace,
    ];
    let mut info = ControllerInfo::for_tests();
    let success = Cqe::new(0, 0, Status::SUCCESS, 0, 0);
    let init_step = steps[usize::from(init_step) % steps.len()];
    let _ = next_step(init_step, &success, page, &ClientConfig::default(), &mut info);
    if let Some(blocks) = info.blocks {
        assert!(blocks.command_bytes_max(info.data_bytes_max).is_multiple_of(blocks.block_bytes));
    }
}
