//! Commands that are completed at once have the responses, counters and errors of those that take the long way.

use crate::common::direct::{give, request_operation};
use crate::common::{
    CommandResponse, DirectMemory, MemoryEngine, NSID, ReceivedPdu, TestHost, mixed_target, store_sqe,
};
use octokv_base::{ByteBudget, DataRef, Key, Lba, NamespaceId, Prng, Received, SharedBuffer, ShortKey};
use octokv_nvmf::{
    CloseReason, CounterSet, DirectBackend, DirectOperation, DirectStage, LbaRange, RequestOperation,
    RequestOutcome, StallReason, Target,
};
use octokv_wire::fabrics::FabricsCommand;
use octokv_wire::kv::StoreOptions;
use octokv_wire::nvm::NvmCommand;
use octokv_wire::pdu::DataHeader;
use octokv_wire::vendor::VendorCommand;
use octokv_wire::{Sgl, Sqe, Status, kv, log_page};
use std::collections::BTreeMap;

const BLOCKS: NamespaceId = NamespaceId(2);
/// Of the queue of a [`TestHost`].
const QUEUE_ENTRIES: u16 = 32;

/// Which way the commands on a key take: the first letter of the key decides, so that the order of commands on one key is
/// the same in both runs.
fn way_of(key: &[u8]) -> u8 {
    key[0] % 4
}

/// Executes at once on the engine in memory: all but keys that begin elsewhere, or whose execution has to wait.
struct DirectEngine<'a> {
    engine: &'a mut MemoryEngine,
    target: &'a Target,
    loans: &'a mut Vec<Vec<u8>>,
    at_once: &'a mut u64,
    groups: &'a mut u64,
    /// The second read of blocks in a row has to wait.
    reads: u64,
    /// Of the group.
    namespace: NamespaceId,
}

impl DirectBackend for DirectEngine<'_> {
    type Lookup = u64;

    fn is_open(&self) -> bool {
        true
    }
    fn select(&mut self, namespace: NamespaceId) -> bool {
        self.namespace = namespace;
        [NSID, BLOCKS].contains(&namespace)
    }
    fn begin_lookup(&mut self, key: &[u8]) -> Option<u64> {
        assert_eq!(self.namespace, NSID);
        (way_of(key) != 3).then_some(u64::from(key[0]))
    }
    fn advance_lookups(&mut self, lookups: &mut [u64], stage: DirectStage) {
        for lookup in lookups {
            assert!(*lookup < 256, "each stage once");
            *lookup += if stage == DirectStage::Records { 256 } else { 0 };
        }
    }
    fn prefetch_blocks(&mut self, _: LbaRange) -> bool {
        self.namespace == BLOCKS
    }
    fn begin_execution(&mut self) {
        *self.groups += 1;
    }
    fn retrieve(
        &mut self,
        key: &[u8],
        lookup: &u64,
        receive: impl FnMut(DataRef<'_>) -> Received,
    ) -> Option<bool> {
        assert_eq!(*lookup as u8, key[0], "the lookup of this key");
        if way_of(key) == 1 {
            return None;
        }
        match self.engine.values.get(&(self.namespace.0, Key::new(key).unwrap())) {
            Some(value) if way_of(key) == 2 => give(DataRef::Borrowed(value), self.loans, receive),
            Some(value) => {
                let shared = SharedBuffer::copy_of(value, &ByteBudget::new(1 << 20)).expect("a short value");
                give(DataRef::Shared(&shared), self.loans, receive);
            }
            None => return Some(false),
        }
        Some(true)
    }
    fn execute(
        &mut self,
        key: &[u8],
        lookup: &u64,
        operation: DirectOperation<'_>,
    ) -> Option<RequestOutcome> {
        assert_eq!(*lookup as u8, key[0], "the lookup of this key");
        if way_of(key) == 1 {
            return None;
        }
        Some(self.engine.execute(self.target, self.namespace, request_operation(key, operation)))
    }
    fn read_blocks(&mut self, range: LbaRange, receive: impl FnMut(DataRef<'_>) -> Received) -> Option<()> {
        self.reads += 1;
        if self.reads.is_multiple_of(2) {
            return None;
        }
        match self.engine.execute(self.target, self.namespace, RequestOperation::Read { range }) {
            RequestOutcome::Blocks { buffer } => give(DataRef::Borrowed(&buffer), self.loans, receive),
            other => panic!("{other:?}"),
        }
        Some(())
    }
    fn end_execution(&mut self, commands: usize, _: u64) {
        *self.at_once += commands as u64;
    }
}

/// By command identifier: status, DW0, DW1 and data.
type Responses = BTreeMap<u16, Vec<(Status, u32, u32, Vec<u8>)>>;

/// A host whose connection completes what it can at once, or nothing.
struct Run {
    host: TestHost,
    /// The controller ends with its admin queue.
    admin: TestHost,
    is_direct: bool,
    /// Of the last completion.
    sq_head: u16,
    at_once: u64,
    groups: u64,
}

impl Run {
    fn new(is_direct: bool, digests: bool) -> Run {
        let target = mixed_target();
        let admin = TestHost::admin(&target);
        let host = TestHost::io_with(&admin, 1, digests, digests);
        // The completion of Connect was the first.
        Run { host, admin, is_direct, sq_head: 1, at_once: 0, groups: 0 }
    }

    /// Sends bytes, executes all requests, and gives what came back, by command.
    fn send(&mut self, bytes: &[u8]) -> (Responses, Vec<DataHeader>) {
        let host = &mut self.host;
        host.unsent.extend_from_slice(bytes);
        loop {
            let consumed = match self.is_direct {
                false => host.connection.receive(host.now, &host.unsent, &host.pool, &mut host.requests),
                true => {
                    let mut direct = DirectEngine {
                        engine: &mut host.engine,
                        target: &host.target,
                        loans: &mut host.loans,
                        at_once: &mut self.at_once,
                        groups: &mut self.groups,
                        reads: 0,
                        namespace: NamespaceId(0),
                    };
                    let unsent = &host.unsent;
                    host.connection.receive_direct(
                        host.now,
                        unsent,
                        &host.pool,
                        &mut host.requests,
                        &mut direct,
                    )
                }
            };
            host.unsent.drain(..consumed.consumed_bytes);
            host.execute_requests();
            // What is left is the front of a capsule.
            if consumed.consumed_bytes == 0 && consumed.stalled.is_none() {
                break;
            }
        }
        host.drain();
        let (mut responses, mut requested, mut data) = (BTreeMap::new(), Vec::new(), BTreeMap::new());
        for pdu in host.received_pdus.drain(..) {
            match pdu {
                ReceivedPdu::Data(range, bytes) => {
                    assert!(data.insert(range.command_id, bytes).is_none());
                }
                ReceivedPdu::Completion(cqe) => {
                    let id = cqe.command_id.get();
                    self.sq_head = (self.sq_head + 1) % QUEUE_ENTRIES;
                    assert_eq!(cqe.sq_head.get(), self.sq_head, "each completion advances the queue's head");
                    let response = CommandResponse { cqe, data: data.remove(&id).unwrap_or_default() };
                    let (dw0, dw1) = (response.dw0(), response.cqe.dw1.get());
                    let found = (response.status(), dw0, dw1, response.data);
                    responses.entry(id).or_insert_with(Vec::new).push(found);
                }
                ReceivedPdu::ReadyToTransfer(range) => requested.push(range),
                other => panic!("{other:?}"),
            }
        }
        assert!(data.is_empty());
        (responses, requested)
    }

    fn counters(&mut self) -> CounterSet {
        self.host.connection.tick(self.host.now);
        self.host.target.counters()
    }

    /// The page of the error log, with the newest entries.
    fn error_log(&mut self) -> Vec<u8> {
        self.admin.log(log_page::id::ERROR, 0, 0, 64 * 16).data
    }
}

fn random_key(random: &mut Prng) -> Vec<u8> {
    let bytes = 1 + random.below(16) as usize;
    let mut key = vec![b'k'; bytes];
    key[0] = b'a' + random.below(8) as u8;
    key
}

/// A capsule with a random command, mostly valid.
fn random_capsule(host: &TestHost, id: u16, random: &mut Prng) -> Vec<u8> {
    let value: Vec<u8> = (0..random.below(3_000)).map(|_| random.next_u64() as u8).collect();
    let key = random_key(random);
    let limit = [0, 10, 1_500, 4_096][random.below(4) as usize];
    let long_key: Vec<u8> = key.iter().copied().chain(vec![b'l'; 1 + random.below(90) as usize]).collect();
    let vendor_data = [&long_key[..], &value].concat();
    let (mut sqe, data): (Sqe, &[u8]) = match random.below(14) {
        10..12 => {
            let (key_bytes, value_bytes) = (long_key.len() as u16, value.len() as u32);
            let options = StoreOptions { do_not_compress: random.below(2) == 0, ..StoreOptions::default() };
            let mut sqe = VendorCommand::Store { options, key_bytes, value_bytes }.encode(id, NSID);
            sqe.sgl = Sgl::in_capsule(vendor_data.len() as u32);
            (sqe, &vendor_data)
        }
        12..14 => {
            let key_bytes = long_key.len() as u16;
            let command = match random.below(3) {
                0 => VendorCommand::Retrieve { key_bytes, limit_bytes: limit },
                1 => VendorCommand::Delete { key_bytes },
                _ => VendorCommand::Exist { key_bytes },
            };
            let mut sqe = command.encode(id, NSID);
            sqe.sgl = Sgl::in_capsule(u32::from(key_bytes));
            (sqe, &long_key)
        }
        0..3 => {
            let options = random.below(6) as u8;
            (store_sqe(id, &key, value.len(), Sgl::in_capsule(value.len() as u32), options), &value)
        }
        3..6 => {
            let key = ShortKey::new(&key).unwrap();
            let mut sqe = kv::KvCommand::Retrieve { key, limit_bytes: limit }.encode(id, NSID);
            sqe.sgl = Sgl::transport(limit);
            (sqe, &[])
        }
        6 => (kv::KvCommand::Delete { key: ShortKey::new(&key).unwrap() }.encode(id, NSID), &[]),
        7 => (kv::KvCommand::Exist { key: ShortKey::new(&key).unwrap() }.encode(id, NSID), &[]),
        _ => {
            let range = LbaRange { lba: Lba(random.below(20)), blocks: 1 + random.below(9) as u32 };
            let mut sqe = NvmCommand::Read { range }.encode(id, BLOCKS);
            sqe.sgl = Sgl::transport(range.blocks * 512);
            (sqe, &[])
        }
    };
    // One in eight is damaged.
    match random.below(64) {
        0 => sqe.opcode = random.next_u64() as u8 & if sqe.opcode & 0x80 == 0 { 0x7f } else { 0xff },
        1 => sqe.nsid = (random.below(5) as u32).into(),
        2 => sqe.cdw11 = (random.next_u64() as u32).into(),
        3 => sqe.cdw10 = (random.below(1 << 32) as u32).into(),
        4 => sqe.sgl = Sgl::in_capsule(random.below(4_000) as u32),
        5 => sqe.flags |= 1,
        6 => sqe.sgl = Sgl::transport(0),
        7 => sqe.cdw10 = (value.len() as u32 + 1).into(),
        _ => {}
    }
    // List, Flush and writes of blocks see the order of other commands.
    if [kv::opcode::LIST, 0x08, 0x09].contains(&sqe.opcode) || (sqe.opcode == 1 && sqe.nsid.get() != 1) {
        sqe.opcode = 0x7e;
    }
    host.capsule(&sqe, data)
}

fn both_ways_agree(seed: u64, digests: bool) -> (u64, u64) {
    let mut random = Prng::new(seed);
    let mut runs = [Run::new(false, digests), Run::new(true, digests)];
    let mut id = 0_u16;
    for round in 0..60 {
        let mut bytes = Vec::new();
        for _ in 0..1 + random.below(28) {
            id = id.wrapping_add(1);
            bytes.extend(random_capsule(&runs[0].host, id, &mut random));
        }
        // In pieces, so that capsules are incomplete.
        let pieces = 1 + random.below(3) as usize;
        let mut seen = [(); 2].map(|()| Vec::new());
        let cut = bytes.len().div_ceil(pieces).max(1);
        for piece in bytes.chunks(cut) {
            for (run, seen) in runs.iter_mut().zip(&mut seen) {
                seen.push(run.send(piece));
            }
        }
        for (long, direct) in seen[0].iter().zip(&seen[1]) {
            for (id, response) in &long.0 {
                assert_eq!(direct.0.get(id), Some(response), "seed {seed}, round {round}, command {id}");
                assert_eq!(response.len(), 1, "one completion per command");
            }
            // The tag is a slot, which commands that were completed at once did not take.
            let without_tag = |range: &DataHeader| DataHeader { tag: 0, ..*range };
            let requested =
                [long, direct].map(|(_, requested)| requested.iter().map(without_tag).collect::<Vec<_>>());
            assert_eq!(requested[0], requested[1], "seed {seed}, round {round}");
            assert_eq!(long.0.len(), direct.0.len(), "seed {seed}, round {round}");
        }
        // The data of Stores that the host has to be asked for.
        let requested =
            seen.map(|seen| seen.into_iter().flat_map(|(_, requested)| requested).collect::<Vec<_>>());
        for (of_long, of_direct) in requested[0].iter().zip(&requested[1]) {
            let data = vec![7; of_long.bytes as usize];
            let [long, direct] = &mut runs;
            let responses = [(long, of_long), (direct, of_direct)].map(|(run, range)| {
                let pdu = run.host.data_pdu(*range, &data, octokv_wire::pdu::flags::LAST);
                run.send(&pdu)
            });
            assert_eq!(responses[0], responses[1], "seed {seed}, round {round}: requested data");
        }
        assert_eq!(runs[0].host.engine.values, runs[1].host.engine.values);
    }
    let [long, direct] = &mut runs;
    assert_eq!(long.counters(), direct.counters(), "seed {seed}");
    assert_eq!(long.error_log(), direct.error_log(), "seed {seed}");
    (direct.at_once, direct.groups)
}

#[test]
fn every_command_has_the_same_response_both_ways() {
    let mut at_once = 0;
    for seed in 0..60 {
        let (completed, groups) = both_ways_agree(seed, false);
        assert!(groups > 60);
        at_once += completed;
    }
    assert!(at_once > 10_000, "{at_once} commands were completed at once");
}

/// Valid commands on keys that take part in a group, with identifiers that repeat.
fn group_with_repeated_ids(host: &TestHost, random: &mut Prng) -> (Vec<u8>, Vec<u16>) {
    // Of one remainder by 64, of a few, and of many.
    let (step, count) = [(64, 5), (1, 4), (1, 40), (64, 40)][random.below(4) as usize];
    let ids: Vec<u16> = (0..2 + random.below(15)).map(|_| step * random.below(count) as u16).collect();
    let capsule = |&id: &u16| loop {
        let (key, value) = (random_key(random), [id as u8; 100]);
        if way_of(&key) == 3 {
            continue;
        }
        let short = ShortKey::new(&key).unwrap();
        break match random.below(4) {
            0 => host.capsule(&store_sqe(id, &key, 100, Sgl::in_capsule(100), 0), &value),
            1 => {
                let mut sqe = kv::KvCommand::Retrieve { key: short, limit_bytes: 4_096 }.encode(id, NSID);
                sqe.sgl = Sgl::transport(4_096);
                host.capsule(&sqe, &[])
            }
            2 => host.capsule(&kv::KvCommand::Delete { key: short }.encode(id, NSID), &[]),
            _ => host.capsule(&kv::KvCommand::Exist { key: short }.encode(id, NSID), &[]),
        };
    };
    (ids.iter().flat_map(capsule).collect(), ids)
}

#[test]
fn an_identifier_that_is_twice_in_a_group_is_refused_both_ways() {
    let (mut refused, mut executed, mut at_once) = (0, 0, 0);
    for seed in 0..40 {
        let mut random = Prng::new(seed);
        let mut runs = [Run::new(false, false), Run::new(true, false)];
        for round in 0..40 {
            let (bytes, ids) = group_with_repeated_ids(&runs[0].host, &mut random);
            let groups = runs[1].groups;
            let [long, direct] = runs.each_mut().map(|run| {
                let (mut responses, requested) = run.send(&bytes);
                assert!(requested.is_empty());
                // The refusal of the second may overtake the first.
                let is_refusal = |(status, ..): &(Status, _, _, _)| status.is(Status::COMMAND_ID_CONFLICT);
                responses.values_mut().for_each(|of_id| of_id.sort_by_key(is_refusal));
                responses
            });
            assert_eq!(long, direct, "seed {seed}, round {round}, identifiers {ids:?}");
            assert_eq!(runs[1].groups, groups + 1, "one group");
            let conflicts = |of_id: &Vec<(Status, u32, u32, Vec<u8>)>| {
                of_id.iter().filter(|(status, ..)| status.is(Status::COMMAND_ID_CONFLICT)).count()
            };
            for (id, of_id) in &long {
                assert_eq!(of_id.len(), ids.iter().filter(|other| *other == id).count());
                assert_eq!(conflicts(of_id), of_id.len() - 1, "the first is executed, and no other");
                (refused, executed) = (refused + conflicts(of_id), executed + 1);
            }
            assert_eq!(runs[0].host.engine.values, runs[1].host.engine.values);
        }
        at_once += runs[1].at_once;
        let [long, direct] = &mut runs;
        assert_eq!(long.counters(), direct.counters(), "seed {seed}");
        assert_eq!(long.error_log(), direct.error_log(), "seed {seed}");
    }
    assert!(refused > 3_000 && executed > 5_000 && at_once > 1_000, "{refused}, {executed}, {at_once}");
}

#[test]
fn an_identifier_is_free_on_the_short_way_when_its_group_has_ended() {
    let key = ShortKey::new(b"d").unwrap();
    for (is_direct, distance, is_refused) in
        [(true, 15, true), (true, 16, false), (false, 15, true), (false, 16, true)]
    {
        let mut run = Run::new(is_direct, false);
        let ids = (0..distance).chain([0]);
        let exist = |id| run.host.capsule(&kv::KvCommand::Exist { key }.encode(id, NSID), &[]);
        let bytes: Vec<u8> = ids.flat_map(exist).collect();
        let (responses, _) = run.send(&bytes);
        let has_conflict = responses[&0].iter().any(|(status, ..)| status.is(Status::COMMAND_ID_CONFLICT));
        assert_eq!(
            (responses[&0].len(), has_conflict),
            (2, is_refused),
            "{is_direct}, {distance} commands on"
        );
    }
}

#[test]
fn connections_with_digests_take_the_long_way() {
    assert_eq!(both_ways_agree(1, true), (0, 0));
}

#[test]
fn a_group_stays_within_the_dynamic_threshold() {
    // A group of them is nearly the whole pool.
    const VALUE_BYTES: u32 = 60_000;
    let admin = TestHost::admin(&mixed_target());
    let mut io = TestHost::io(&admin, 1);
    io.engine.values.insert((NSID.0, Key::new(b"k").unwrap()), vec![7; VALUE_BYTES as usize]);
    let pool = octokv_base::BufferPool::new(1 << 20);
    let key = ShortKey::new(b"k").unwrap();
    let capsules = (0..100).flat_map(|id| {
        let mut sqe = kv::KvCommand::Retrieve { key, limit_bytes: VALUE_BYTES }.encode(id, NSID);
        sqe.sgl = Sgl::transport(VALUE_BYTES);
        io.capsule(&sqe, &[])
    });
    let bytes: Vec<u8> = capsules.collect();
    let TestHost { connection, target, engine, now, requests, loans, .. } = &mut io;
    let (mut operations, mut at_once) = (0, 0);
    let mut direct = DirectMemory {
        engine,
        target,
        is_open: true,
        operations: &mut operations,
        namespace: NSID,
        loans,
        at_once: &mut at_once,
    };
    let received = connection.receive_direct(*now, &bytes, &pool, requests, &mut direct);
    assert_eq!(received.stalled, Some(StallReason::SendBuffer));
    assert!(at_once > 6, "{at_once} commands were completed at once");
    // The host reads nothing: there are buffers for all that is lent, if it has to be copied.
    let unsent_bytes = connection.send_buffer().unsent_bytes();
    assert!(unsent_bytes < pool.free_bytes() + 61_440, "{unsent_bytes} B after {at_once} commands");
}

#[test]
fn more_commands_than_the_queue_has_with_repeated_identifiers_are_answered_up_to_a_disconnect() {
    const COMMANDS: u16 = 3 * QUEUE_ENTRIES;
    let admin = TestHost::admin(&mixed_target());
    let mut io = TestHost::io(&admin, 1);
    let key = ShortKey::new(b"k").unwrap();
    let exist = |id: u16| io.capsule(&kv::KvCommand::Exist { key }.encode(id % 17, NSID), &[]);
    let mut bytes: Vec<u8> = (0..COMMANDS).flat_map(exist).collect();
    bytes.extend(io.capsule(&FabricsCommand::Disconnect.encode(20), &[]));
    bytes.extend((0..20).flat_map(exist));
    let (mut operations, mut at_once) = (0, 0);
    while !bytes.is_empty() {
        let TestHost { connection, target, engine, now, requests, pool, loans, .. } = &mut io;
        let mut direct = DirectMemory {
            engine,
            target,
            is_open: true,
            operations: &mut operations,
            namespace: NSID,
            loans,
            at_once: &mut at_once,
        };
        let received = connection.receive_direct(*now, &bytes, pool, requests, &mut direct);
        assert!(received.consumed_bytes > 0 && requests.len() <= usize::from(QUEUE_ENTRIES));
        bytes.drain(..received.consumed_bytes);
        for request in std::mem::take(requests) {
            let outcome = engine.execute(target, request.namespace, request.operation);
            connection.complete(request.slot, outcome);
        }
    }
    io.drain();
    let mut ids = Vec::new();
    for pdu in io.received_pdus.drain(..) {
        let ReceivedPdu::Completion(cqe) = pdu else { panic!("{pdu:?}") };
        ids.push(cqe.command_id.get());
        let status = cqe.status();
        assert!(
            status.is_success()
                || status.is(Status::KV_KEY_DOES_NOT_EXIST)
                || status.is(Status::COMMAND_ID_CONFLICT),
            "{status:?}"
        );
    }
    assert!(at_once > 10, "{at_once} commands were completed at once");
    // A command that waits may be completed after the Disconnect, or not at all.
    let answered = ids.iter().filter(|id| **id < 17).count();
    assert!(ids.contains(&20) && answered <= usize::from(COMMANDS), "{answered} commands were answered");
    assert_eq!(io.connection.close_reason(), Some(CloseReason::Disconnected));
    assert_eq!(io.pool.in_use_bytes(), 0);
}
