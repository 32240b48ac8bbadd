//! Iterators over an I/O queue: what they return, whose they are, and how they end.

use crate::common::*;
use octokv_base::{Key, NamespaceId, Nanos, Prng};
use octokv_nvmf::{
    AnaState, IoRequest, IteratorHandle, RequestOperation, RequestOutcome, StallReason, SubsystemConfig,
};
use octokv_wire::fabrics::property;
use octokv_wire::iterator::{IteratorBounds, IteratorCommand, PairList};
use octokv_wire::vendor::{FEATURE_ITERATORS, FEATURE_LONG_KEYS, VendorCapabilities};
use octokv_wire::{Sgl, Status, identify};
use std::sync::Arc;

const OPEN: IteratorBounds<'static> = IteratorBounds { lower: &[], upper: &[] };

/// Both queues of a host whose namespaces 1 and 2 have the keys "a" to "e".
fn queue_with(config: SubsystemConfig) -> (TestHost, TestHost) {
    let admin = TestHost::admin(&target_with(config));
    let mut io = TestHost::io(&admin, 1);
    for namespace in 1..=2 {
        for (index, key) in (b'a'..=b'e').enumerate() {
            let value = vec![key; 10 * (index + 1)];
            io.engine.values.insert((namespace, Key::new(&[key]).unwrap()), value);
        }
    }
    (admin, io)
}

fn queue() -> (TestHost, TestHost) {
    queue_with(SubsystemConfig::new(NQN))
}

trait IteratorHost {
    fn iterator(&mut self, command: IteratorCommand, data: &[u8]) -> CommandResponse;
    fn create_on(&mut self, namespace: u32, bounds: IteratorBounds<'_>, reverse: bool) -> CommandResponse;
    fn create(&mut self) -> u32;
    fn next(&mut self, iterator: u32, pairs_max: u32) -> CommandResponse;
}

impl IteratorHost for TestHost {
    fn iterator(&mut self, command: IteratorCommand, data: &[u8]) -> CommandResponse {
        let id = self.id();
        let mut sqe = command.encode(id, NSID);
        sqe.sgl = match command {
            IteratorCommand::Next { limit_bytes, .. } => Sgl::transport(limit_bytes),
            _ => Sgl::in_capsule(data.len() as u32),
        };
        self.run(sqe, data)
    }

    fn create_on(&mut self, namespace: u32, bounds: IteratorBounds<'_>, reverse: bool) -> CommandResponse {
        let data = bounds.encode();
        let id = self.id();
        let create = IteratorCommand::Create { bounds_bytes: data.len() as u16, reverse, keys_only: false };
        let mut sqe = create.encode(id, NamespaceId(namespace));
        sqe.sgl = Sgl::in_capsule(data.len() as u32);
        self.run(sqe, &data)
    }

    fn create(&mut self) -> u32 {
        let created = self.create_on(1, OPEN, false);
        assert_eq!(created.status(), Status::SUCCESS);
        created.dw0()
    }

    fn next(&mut self, iterator: u32, pairs_max: u32) -> CommandResponse {
        self.iterator(IteratorCommand::Next { iterator, limit_bytes: 4096, pairs_max }, &[])
    }
}

/// The request of a Create that is in flight, and in place of the engine's iterator one whose owners can be counted.
fn begin_create(io: &mut TestHost) -> (IoRequest, IteratorHandle) {
    let data = OPEN.encode();
    let create =
        IteratorCommand::Create { bounds_bytes: data.len() as u16, reverse: false, keys_only: false };
    let mut sqe = create.encode(1, NSID);
    sqe.sgl = Sgl::in_capsule(data.len() as u32);
    io.send_command(&sqe, &data);
    (io.requests.pop().unwrap(), IteratorHandle(Arc::new(())))
}

/// The keys of a response, and whether it is the end, which DW1 says as well.
fn keys(response: &CommandResponse) -> (String, bool) {
    assert_eq!(response.status(), Status::SUCCESS);
    let list = PairList::check(&response.data).unwrap();
    assert_eq!((response.dw0(), response.cqe.dw1.get()), (list.count(), u32::from(list.is_end())));
    for (key, value) in list.pairs() {
        assert_eq!(value, vec![key[0]; 10 * usize::from(key[0] - b'a' + 1)]);
    }
    (list.pairs().map(|(key, _)| char::from(key[0])).collect(), list.is_end())
}

fn keys_are(response: &CommandResponse, want: &str, is_end: bool) {
    assert_eq!(keys(response), (want.to_owned(), is_end));
}

#[test]
fn pairs_come_in_order_some_at_a_time_up_to_the_end_and_in_both_directions() {
    let (_admin, mut io) = queue();
    let forward = io.create();
    keys_are(&io.next(forward, 2), "ab", false);
    // What is written meanwhile is not seen.
    assert!(io.store(b"c2", b"new", 0).status().is_success());
    keys_are(&io.next(forward, 2), "cd", false);
    keys_are(&io.next(forward, 9), "e", true);
    keys_are(&io.next(forward, 9), "", true);
    let bounds = IteratorBounds { lower: b"b", upper: b"d" };
    let reverse = io.create_on(2, bounds, true).dw0();
    assert_ne!(reverse, forward);
    assert!(io.next(reverse, 9).status().is(Status::UNKNOWN_ITERATOR), "of another namespace");
    let mut sqe = IteratorCommand::Next { iterator: reverse, limit_bytes: 4096, pairs_max: 9 }
        .encode(900, NamespaceId(2));
    sqe.sgl = Sgl::transport(4096);
    keys_are(&io.run(sqe, &[]), "cb", true);
    let seek = IteratorCommand::Seek { iterator: forward, key_bytes: 2 };
    assert_eq!(io.iterator(seek, b"bb").status(), Status::SUCCESS);
    keys_are(&io.next(forward, 1), "c", false);
}

#[test]
fn a_pair_longer_than_the_buffer_stays_and_its_length_is_told() {
    let (_admin, mut io) = queue();
    let iterator = io.create();
    let small = IteratorCommand::Next { iterator, limit_bytes: 26, pairs_max: 9 };
    let refused = io.iterator(small, &[]);
    assert!(refused.status().is(Status::PAIR_TOO_LARGE));
    assert_eq!((refused.dw0(), refused.data.len()), (27, 0));
    let fitting = IteratorCommand::Next { iterator, limit_bytes: 27, pairs_max: 9 };
    keys_are(&io.iterator(fitting, &[]), "a", false);
    // The host's buffer limits it, whatever CDW10 says.
    let mut sqe = IteratorCommand::Next { iterator, limit_bytes: 4096, pairs_max: 9 }.encode(900, NSID);
    sqe.sgl = Sgl::transport(37);
    keys_are(&io.run(sqe, &[]), "b", false);
    sqe.sgl = Sgl::transport(7);
    assert!(io.run(sqe, &[]).status().is(Status::INVALID_FIELD));
    keys_are(&io.next(iterator, 9), "cde", true);
}

#[test]
fn an_iterator_belongs_to_its_controller_and_any_of_its_queues() {
    let (admin, mut io) = queue();
    let iterator = io.create();
    let mut second_queue = TestHost::io(&admin, 2);
    keys_are(&second_queue.next(iterator, 1), "a", false);
    let other = TestHost::admin(&admin.target);
    let mut other_io = TestHost::io(&other, 1);
    for command in [
        IteratorCommand::Next { iterator, limit_bytes: 4096, pairs_max: 1 },
        IteratorCommand::Destroy { iterator },
        IteratorCommand::Next { iterator: 0, limit_bytes: 4096, pairs_max: 1 },
    ] {
        assert!(other_io.iterator(command, &[]).status().is(Status::UNKNOWN_ITERATOR), "{command:?}");
    }
    let seek = IteratorCommand::Seek { iterator, key_bytes: 1 };
    assert!(other_io.iterator(seek, b"a").status().is(Status::UNKNOWN_ITERATOR));
    keys_are(&io.next(iterator, 1), "b", false);
    let destroy = IteratorCommand::Destroy { iterator };
    assert_eq!(io.iterator(destroy, &[]).status(), Status::SUCCESS);
    assert!(io.iterator(destroy, &[]).status().is(Status::UNKNOWN_ITERATOR));
    assert!(second_queue.next(iterator, 1).status().is(Status::UNKNOWN_ITERATOR));
}

#[test]
fn iterators_end_with_their_controller_its_reset_their_namespace_and_when_they_are_forgotten() {
    let endings: [fn(&mut TestHost, &mut TestHost); 5] = [
        |admin, _| admin.connection.peer_closed(),
        |admin, _| admin.set_property(property::CC, 0),
        |admin, _| drop(admin.target.remove_namespace(NSID)),
        |admin, _| {
            for _ in 0..1000 {
                admin.advance_time(Nanos::from_millis(301));
            }
        },
        |_, io| {
            let destroy = IteratorCommand::Destroy { iterator: 1 };
            assert_eq!(io.iterator(destroy, &[]).status(), Status::SUCCESS);
        },
    ];
    for (index, end) in endings.iter().enumerate() {
        let (mut admin, mut io) = queue();
        let (request, handle) = begin_create(&mut io);
        io.connection.complete(request.slot, RequestOutcome::IteratorCreated(handle.clone()));
        io.drain();
        assert_eq!(io.next_response().dw0(), 1);
        assert_eq!(Arc::strong_count(&handle.0), 2, "the controller has it");
        end(&mut admin, &mut io);
        assert_eq!(Arc::strong_count(&handle.0), 1, "ending {index}");
    }
}

#[test]
fn an_iterator_that_is_used_does_not_expire() {
    let (mut admin, mut io) = queue();
    let iterator = io.create();
    for key in ["a", "b", "c", "d"] {
        for host in [&mut admin, &mut io] {
            host.advance_time(Nanos::from_secs(200));
        }
        keys_are(&io.next(iterator, 1), key, false);
    }
    for host in [&mut admin, &mut io] {
        host.advance_time(Nanos::from_secs(301));
    }
    assert!(io.next(iterator, 1).status().is(Status::UNKNOWN_ITERATOR));
}

#[test]
fn an_iterator_that_is_created_while_its_controller_or_namespace_ends_does_not_stay() {
    let endings: [fn(&mut TestHost); 2] =
        [|admin| admin.connection.peer_closed(), |admin| drop(admin.target.remove_namespace(NSID))];
    for end in endings {
        let (mut admin, mut io) = queue();
        let (request, handle) = begin_create(&mut io);
        end(&mut admin);
        // The identifier may have another namespace by then.
        let _ = admin.target.add_namespace(namespace(1));
        io.connection.complete(request.slot, RequestOutcome::IteratorCreated(handle.clone()));
        assert_eq!(Arc::strong_count(&handle.0), 1);
    }
}

#[test]
fn there_are_as_many_iterators_as_configured_whenever_they_are_created() {
    let (_admin, mut io) = queue_with(SubsystemConfig { iterators_max: 2, ..SubsystemConfig::new(NQN) });
    let first = io.create();
    // Two are being created at once, and one has no place.
    let data = OPEN.encode();
    let create =
        IteratorCommand::Create { bounds_bytes: data.len() as u16, reverse: false, keys_only: false };
    for id in [900, 901] {
        let mut sqe = create.encode(id, NSID);
        sqe.sgl = Sgl::in_capsule(data.len() as u32);
        io.send_command(&sqe, &data);
    }
    assert_eq!(io.requests.len(), 2);
    io.execute_requests();
    assert_eq!(io.next_response().status(), Status::SUCCESS);
    assert!(io.next_response().status().is(Status::TOO_MANY_ITERATORS));
    assert!(io.create_on(1, OPEN, false).status().is(Status::TOO_MANY_ITERATORS));
    assert_eq!(io.iterator(IteratorCommand::Destroy { iterator: first }, &[]).status(), Status::SUCCESS);
    assert_ne!(io.create(), first);
}

#[test]
fn bounds_and_keys_that_are_wrong_fail_and_reach_no_engine() {
    let (_admin, mut io) = queue();
    let reversed = IteratorBounds { lower: b"d", upper: b"b" };
    assert!(io.create_on(1, reversed, false).status().is(Status::INVALID_FIELD));
    let create = IteratorCommand::Create { bounds_bytes: 4, reverse: false, keys_only: false };
    assert!(io.iterator(create, &[1, 0, 0, 0]).status().is(Status::INVALID_FIELD), "longer than the data");
    assert!(io.iterator(create, &[1, 0]).status().is(Status::INVALID_SGL_LENGTH));
    let iterator = io.create();
    let seek = IteratorCommand::Seek { iterator, key_bytes: 4 };
    assert!(io.iterator(seek, b"ab").status().is(Status::INVALID_SGL_LENGTH));
    keys_are(&io.next(iterator, 9), "abcde", true);
}

#[test]
fn bounds_may_be_sent_on_request() {
    let (_admin, mut io) = queue();
    let data = IteratorBounds { lower: b"d", upper: &[] }.encode();
    let create =
        IteratorCommand::Create { bounds_bytes: data.len() as u16, reverse: false, keys_only: false };
    let mut sqe = create.encode(900, NSID);
    sqe.sgl = Sgl::transport(data.len() as u32);
    io.send_command(&sqe, &[]);
    io.send_requested_data(&data, 3);
    io.execute_requests();
    let iterator = io.next_response().dw0();
    keys_are(&io.next(iterator, 9), "de", true);
}

#[test]
fn a_failure_of_the_engine_has_the_status_of_a_read() {
    let (_admin, mut io) = queue();
    let iterator = io.create();
    for (outcome, status) in [
        (RequestOutcome::Unrecovered, Status::KV_UNRECOVERED_ERROR),
        (RequestOutcome::Busy, Status::COMMAND_INTERRUPTED),
        (RequestOutcome::NotReady, Status::NAMESPACE_NOT_READY),
        (RequestOutcome::IteratorExpired, Status::UNKNOWN_ITERATOR),
    ] {
        let mut sqe = IteratorCommand::Next { iterator, limit_bytes: 64, pairs_max: 1 }.encode(900, NSID);
        sqe.sgl = Sgl::transport(64);
        io.send_command(&sqe, &[]);
        let request = io.requests.pop().unwrap();
        assert!(matches!(request.operation, RequestOperation::NextPairs { pairs_max: 1, .. }));
        io.connection.complete(request.slot, outcome);
        io.drain();
        assert!(io.next_response().status().is(status));
    }
    keys_are(&io.next(iterator, 9), "abcde", true);
}

#[test]
fn a_controller_reports_iterators_if_a_namespace_has_them() {
    let features = |admin: &mut TestHost| {
        let page = admin.identify(identify::cns::CONTROLLER, 0, 0).data;
        VendorCapabilities::decode(page[3072..3088].try_into().unwrap()).unwrap().features
    };
    let (mut admin, _) = queue();
    assert_eq!(features(&mut admin), FEATURE_LONG_KEYS | FEATURE_ITERATORS);
    let mut info = namespace(1);
    if let octokv_nvmf::NamespaceKind::KeyValue { has_iterators, .. } = &mut info.kind {
        *has_iterators = false;
    }
    let without = octokv_nvmf::Target::new(SubsystemConfig::new(NQN), vec![info]);
    let mut admin = TestHost::admin(&without);
    let mut io = TestHost::io(&admin, 1);
    assert_eq!(features(&mut admin), FEATURE_LONG_KEYS);
    assert!(io.create_on(1, OPEN, false).status().is(Status::INVALID_OPCODE));
}

/// Sends a Next of one pair, whose identifier is returned. Nothing is executed.
fn send_next(io: &mut TestHost, iterator: u32) -> u16 {
    let id = io.id();
    let mut sqe = IteratorCommand::Next { iterator, limit_bytes: 4096, pairs_max: 1 }.encode(id, NSID);
    sqe.sgl = Sgl::transport(4096);
    io.send_command(&sqe, &[]);
    id
}

/// The command of the next response, and its keys.
fn next_of(io: &mut TestHost) -> (u16, String) {
    let response = io.next_response();
    (response.cqe.command_id.get(), keys(&response).0)
}

fn waits_for_its_turn(io: &mut TestHost) -> bool {
    io.pump();
    io.last.unwrap().stalled == Some(StallReason::IteratorTurn)
}

#[test]
fn commands_on_one_iterator_reach_the_engine_one_at_a_time() {
    let (_admin, mut io) = queue();
    let (iterator, other) = (io.create(), io.create());
    let ids = [iterator, other, iterator, iterator, other].map(|iterator| send_next(&mut io, iterator));
    // The second on the same iterator waits, and what is behind it on this queue. Another iterator's is executed.
    assert_eq!(io.requests.len(), 2);
    assert!(waits_for_its_turn(&mut io) && io.requests.len() == 2);
    let seek = IteratorCommand::Seek { iterator, key_bytes: 1 };
    let mut sqe = seek.encode(800, NSID);
    sqe.sgl = Sgl::in_capsule(1);
    io.send_command(&sqe, b"a");
    let last = send_next(&mut io, iterator);
    let mut executed = Vec::new();
    while let Some(request) = (!io.requests.is_empty()).then(|| io.requests.remove(0)) {
        assert!(io.requests.len() <= 1, "at most one of each iterator");
        let outcome = io.engine.execute(&io.target, request.namespace, request.operation);
        io.connection.complete(request.slot, outcome);
        io.pump();
        let response = io.next_response();
        let id = response.cqe.command_id.get();
        executed.push((id, if id == 800 { "sought".to_owned() } else { keys(&response).0 }));
    }
    let of_iterator: Vec<_> = executed.iter().filter(|(id, _)| ![ids[1], ids[4]].contains(id)).collect();
    let want = [(ids[0], "a"), (ids[2], "b"), (ids[3], "c"), (800, "sought"), (last, "a")];
    assert!(of_iterator.iter().map(|(id, keys)| (*id, &keys[..])).eq(want), "{executed:?}");
    assert!(executed.contains(&(ids[1], "a".to_owned())) && executed.contains(&(ids[4], "b".to_owned())));
}

#[test]
fn queues_take_turns_in_the_order_in_which_their_commands_arrived() {
    let (admin, mut first) = queue();
    let mut second = TestHost::io(&admin, 2);
    let iterator = first.create();
    send_next(&mut first, iterator);
    send_next(&mut second, iterator);
    send_next(&mut first, iterator);
    assert!(waits_for_its_turn(&mut first) && waits_for_its_turn(&mut second));
    // Whichever asks first, and however often.
    first.execute_requests();
    assert_eq!(next_of(&mut first).1, "a");
    assert!(waits_for_its_turn(&mut first), "the second queue's is next");
    assert!(!waits_for_its_turn(&mut second) && second.requests.len() == 1);
    assert!(waits_for_its_turn(&mut first));
    second.execute_requests();
    assert_eq!(next_of(&mut second).1, "b");
    first.pump();
    first.execute_requests();
    assert_eq!(next_of(&mut first).1, "c");
}

#[test]
fn a_command_that_ends_unexecuted_holds_up_no_other() {
    // While it waits its connection ends, or it fails; its request is dropped, as when its namespace has gone.
    let endings: [fn(&mut TestHost); 3] = [
        |io| io.connection.peer_closed(),
        |io| {
            io.target.set_ana_state(1, AnaState::Inaccessible);
            io.pump();
            assert!(io.next_response().status().is(Status::ANA_INACCESSIBLE));
            io.target.set_ana_state(1, AnaState::Optimized);
        },
        |_| {},
    ];
    for (index, end) in endings.iter().enumerate() {
        let (admin, mut first) = queue();
        let iterator = first.create();
        let [mut second, mut third] = [2, 3].map(|id| TestHost::io(&admin, id));
        send_next(&mut first, iterator);
        send_next(&mut second, iterator);
        send_next(&mut third, iterator);
        assert!(waits_for_its_turn(&mut second) && waits_for_its_turn(&mut third));
        end(&mut second);
        first.execute_requests();
        assert_eq!(next_of(&mut first).1, "a");
        if index == 2 {
            assert!(waits_for_its_turn(&mut third));
            second.pump();
            assert!(waits_for_its_turn(&mut third));
            drop(second.requests.pop().unwrap());
        }
        third.pump();
        third.execute_requests();
        assert_eq!(next_of(&mut third).1, "b", "ending {index}");
    }
}

#[test]
fn a_seek_whose_data_is_requested_is_interrupted_by_another_command_on_its_iterator() {
    let (_admin, mut io) = queue();
    let iterator = io.create();
    let send_seek = |io: &mut TestHost| {
        let id = io.id();
        let mut sqe = IteratorCommand::Seek { iterator, key_bytes: 1 }.encode(id, NSID);
        sqe.sgl = Sgl::transport(1);
        io.send_command(&sqe, &[]);
    };
    // A Next behind the seek does not wait for its data, which is behind that Next.
    send_seek(&mut io);
    send_next(&mut io, iterator);
    assert_eq!(io.requests.len(), 1);
    io.send_requested_data(b"d", 1);
    assert!(io.next_response().status().is(Status::COMMAND_INTERRUPTED));
    io.execute_requests();
    assert_eq!(next_of(&mut io).1, "a");
    send_seek(&mut io);
    io.send_requested_data(b"d", 1);
    io.execute_requests();
    assert_eq!(io.next_response().status(), Status::SUCCESS);
    keys_are(&io.next(iterator, 9), "de", true);
}

/// The iterator of a request.
fn iterator_of(request: &IoRequest) -> *const () {
    match &request.operation {
        RequestOperation::NextPairs { iterator, .. } | RequestOperation::SeekIterator { iterator, .. } => {
            Arc::as_ptr(&iterator.0).cast()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn whatever_hosts_send_and_engines_do_one_request_of_an_iterator_exists_and_each_command_ends() {
    for seed in 0..200 {
        let mut random = Prng::new(seed);
        let (admin, mut first) = queue();
        let iterators = [first.create(), first.create(), 77];
        let [second, third] = [2, 3].map(|id| TestHost::io(&admin, id));
        let mut queues = [first, second, third];
        let mut sent = [0; 3];
        for _ in 0..150 {
            let queue = random.below(3) as usize;
            let io = &mut queues[queue];
            let iterator = iterators[[0, 0, 0, 1, 1, 2][random.below(6) as usize]];
            match random.below(10) {
                // Twice as many slots as that, so that a queue never overruns.
                0..5 if !io.connection.is_closed()
                    && io.connection.in_flight() + io.unsent.len() / 72 < 16 =>
                {
                    sent[queue] += 1;
                    send_next(io, iterator);
                }
                5 if !io.connection.is_closed() && io.unsent.is_empty() => {
                    sent[queue] += 1;
                    let mut sqe = IteratorCommand::Seek { iterator, key_bytes: 1 }.encode(io.id(), NSID);
                    sqe.sgl = Sgl::in_capsule(1);
                    io.send_command(&sqe, b"b");
                }
                6..9 if !io.requests.is_empty() => {
                    let index = random.below(io.requests.len() as u64) as usize;
                    let IoRequest { slot, namespace, operation } = io.requests.remove(index);
                    let outcome = match random.one_in(8) {
                        true => RequestOutcome::NotReady,
                        false => io.engine.execute(&io.target, namespace, operation),
                    };
                    io.connection.complete(slot, outcome);
                }
                9 if queue > 0 && random.one_in(20) => io.connection.peer_closed(),
                _ => io.pump(),
            }
            let requests = queues.iter().flat_map(|io| &io.requests);
            let mut open: Vec<_> = requests.map(iterator_of).collect();
            let count = open.len();
            open.sort_unstable();
            open.dedup();
            assert_eq!(open.len(), count, "seed {seed}: two requests of one iterator");
        }
        for _ in 0..100 {
            queues.iter_mut().for_each(|io| {
                io.pump();
                io.execute_requests();
            });
        }
        for (io, sent) in queues.iter_mut().zip(sent) {
            assert_eq!(io.connection.in_flight(), 0, "seed {seed}");
            if !io.connection.is_closed() {
                let is_completion = |pdu: &&ReceivedPdu| matches!(pdu, ReceivedPdu::Completion(_));
                assert_eq!(io.received_pdus.iter().filter(is_completion).count(), sent, "seed {seed}");
            }
        }
    }
}
