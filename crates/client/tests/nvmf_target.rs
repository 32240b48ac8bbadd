//! The initiator against the target, in memory: every command, every size, connection loss, timeouts.

use crate::support::{SessionFixture, address, pattern, target};
use octokv_base::{Key, NamespaceId, Nanos, Prng};
use octokv_client::{ClientConfig, Command, ConnectionError, Error, Reconnect, Response, StoreMode, Value};
use octokv_wire::kv::UncheckedKeyList;
use octokv_wire::pdu::{self, NegotiatedParams};
use octokv_wire::{Cqe, Status};

fn key(bytes: &[u8]) -> Key {
    Key::new(bytes).unwrap()
}

fn keys(response: Response) -> Vec<Vec<u8>> {
    let Response::Keys { list } = response else { panic!("{response:?} is not a list") };
    UncheckedKeyList(&list).check().unwrap().keys().map(<[u8]>::to_vec).collect()
}

#[test]
fn every_command_has_its_effect() {
    for (header_digest, data_digest) in [(false, false), (true, false), (false, true), (true, true)] {
        let config = ClientConfig { header_digest, data_digest, ..ClientConfig::default() };
        let mut fixture = SessionFixture::live(config, target(|_| {}));
        assert!(matches!(fixture.put(b"a", b"one", StoreMode::Upsert), Ok(Response::Stored)));
        assert!(matches!(fixture.put(b"a", b"two", StoreMode::AddOnly), Ok(Response::AlreadyExists)));
        assert!(matches!(fixture.put(b"b", b"two", StoreMode::UpdateOnly), Ok(Response::NotFound)));
        assert!(matches!(fixture.put(b"b", b"two", StoreMode::AddOnly), Ok(Response::Stored)));
        assert!(matches!(fixture.put(b"a", b"three", StoreMode::UpdateOnly), Ok(Response::Stored)));
        assert_eq!(fixture.get(b"a").as_deref(), Some(b"three".as_slice()));
        assert_eq!(fixture.get(b"c"), None);
        let exist = fixture.execute(Command::Exist { key: key(b"a") });
        assert!(matches!(exist, Ok(Response::Exists { value_bytes: Some(5) })), "{exist:?}");
        assert!(matches!(fixture.execute(Command::Exist { key: key(b"c") }), Ok(Response::NotFound)));
        let all = fixture.execute(Command::List { start: key(b""), limit_bytes: 4096 }).unwrap();
        assert_eq!(keys(all), [b"a", b"b"]);
        assert!(matches!(fixture.execute(Command::Delete { key: key(b"a") }), Ok(Response::Deleted)));
        assert_eq!(fixture.get(b"a"), None);
        assert!(matches!(fixture.execute(Command::Flush), Ok(Response::Flushed)));
    }
}

#[test]
fn values_of_every_size_round_trip() {
    for (data_digest, h2c, in_capsule) in [(false, 4096, 16384), (true, 8192, 4096), (true, 524_288, 8192)] {
        let node = target(|config| {
            config.h2c_data_bytes_max = h2c;
            config.in_capsule_bytes = in_capsule;
        });
        let config = ClientConfig { header_digest: data_digest, data_digest, ..ClientConfig::default() };
        let mut fixture = SessionFixture::live(config, node);
        fixture.sockets.0.borrow_mut().transfer_bytes_max = 50_000;
        let sizes = [0, 1, 1023, 1024, 1025, 4095, 4096, 8192, 16384, 16385, 100_000, 1 << 20, 2 << 20];
        for bytes in sizes {
            for name in [b"short".to_vec(), vec![b'k'; 17], vec![b'l'; 1024]] {
                let value = pattern(bytes);
                let stored = fixture.put(&name, &value, StoreMode::Upsert);
                assert!(matches!(stored, Ok(Response::Stored)), "{bytes}: {stored:?}");
                assert!(fixture.get(&name) == Some(value), "{bytes} bytes");
                let exist = fixture.execute(Command::Exist { key: key(&name) });
                let Ok(Response::Exists { value_bytes }) = exist else { panic!("{exist:?}") };
                assert_eq!(value_bytes, Some(bytes as u32));
            }
        }
        let info = fixture.session.controller_info().unwrap().clone();
        assert_eq!((info.value_bytes_max(), info.key_bytes_max()), (2 << 20, 1024));
        let large = fixture.put(b"k", &vec![0; (2 << 20) + 1], StoreMode::Upsert);
        assert_eq!(large.unwrap_err(), Error::ValueLength { have: (2 << 20) + 1, max: 2 << 20 });
    }
}

#[test]
fn a_partial_value_has_its_full_length() {
    let mut fixture = SessionFixture::live(ClientConfig::default(), target(|_| {}));
    fixture.put(b"k", &pattern(5000), StoreMode::Upsert).unwrap();
    for limit_bytes in [1, 100, 4999, 5000, 9000] {
        let response = fixture.execute(Command::Retrieve { key: key(b"k"), limit_bytes });
        let Ok(Response::Value { data, full_bytes: 5000 }) = response else { panic!("{response:?}") };
        assert_eq!(*data, pattern(5000)[..limit_bytes.min(5000) as usize]);
    }
}

#[test]
fn long_keys_are_listed_and_deleted() {
    let mut fixture = SessionFixture::live(ClientConfig::default(), target(|_| {}));
    let long = vec![b'm'; 300];
    for name in [b"a".as_slice(), &long, b"z"] {
        fixture.put(name, b"v", StoreMode::Upsert).unwrap();
    }
    let from_m = fixture.execute(Command::List { start: key(&long), limit_bytes: 4096 }).unwrap();
    assert_eq!(keys(from_m), [long.as_slice(), b"z"]);
    assert!(matches!(fixture.execute(Command::Delete { key: key(&long) }), Ok(Response::Deleted)));
    assert_eq!(fixture.get(&long), None);
}

#[test]
fn a_session_shuts_down_at_once_after_a_command_that_failed_before_it_was_sent() {
    let mut fixture = SessionFixture::live(ClientConfig::default(), target(|_| {}));
    let value = pattern(100_000);
    let store = Command::Store { key: key(b"k"), value: Value::Slice(&value), mode: StoreMode::Upsert };
    fixture.session.submit(store, 1).expect("a slot is free");
    let now = fixture.sockets.0.borrow().now;
    fixture.session.poll(now, |_, _| panic!("nothing was executed"));
    // The command is sent. Its data is requested, and waits for the socket.
    fixture.sockets.0.borrow_mut().sends_blocked = true;
    fixture.sockets.pump();
    fixture.step(Nanos(1));
    let mut response = Vec::new();
    let failed = Cqe::new(0, 0, Status::INTERNAL_ERROR, 0, 0);
    pdu::encode_response(&failed, &NegotiatedParams::initial(), &mut response);
    fixture.sockets.inject(1, &response);
    fixture.run_until(|fixture| !fixture.completed.is_empty());
    assert!(fixture.completed.remove(0).1.is_err());
    assert_eq!(fixture.session.in_flight(), 1, "the data is not sent yet");
    let closed_at = fixture.sockets.0.borrow().now;
    fixture.session.close(closed_at, |_, _| panic!("no command is left"));
    // The target does not respond a second time, and executes the requests of the shutdown.
    fixture.sockets.0.borrow_mut().hold_requests = true;
    fixture.sockets.0.borrow_mut().sends_blocked = false;
    fixture.run_until(|fixture| {
        fixture.sockets.release(0);
        fixture.session.ended().is_some()
    });
    let took = fixture.sockets.0.borrow().now.since(closed_at);
    assert!(took < Nanos::from_millis(10), "{took:?}");
    assert_eq!(fixture.session.ended(), Some(Error::Closed));
}

#[test]
fn statuses_of_the_node_reach_the_caller() {
    let mut fixture = SessionFixture::live(ClientConfig::default(), target(|_| {}));
    fixture.sockets.0.borrow_mut().store.capacity_bytes = Some(10);
    assert_eq!(fixture.put(b"k", &[0; 11], StoreMode::Upsert).unwrap_err(), Error::CapacityExceeded);
    fixture.sockets.0.borrow_mut().store.busy_responses = 1;
    assert_eq!(fixture.execute(Command::Exist { key: key(b"k") }).unwrap_err(), Error::Busy);
}

/// Random commands, many in flight, on several queues; every response is checked against a map. At most one
/// command per key is in flight, since queues are unordered among one another.
#[test]
fn many_commands_at_a_time_over_several_queues_agree_with_a_map() {
    let config = ClientConfig { io_queues: 3, queue_depth: 8, data_digest: true, ..ClientConfig::default() };
    let mut fixture = SessionFixture::live(config, target(|config| config.in_capsule_bytes = 8192));
    assert_eq!(fixture.session.free_slots(), 24);
    fixture.sockets.0.borrow_mut().transfer_bytes_max = 3000;
    let mut random = Prng::new(5);
    let mut model: Vec<Option<Vec<u8>>> = vec![None; 64];
    let mut in_flight: Vec<Option<(u64, Option<Vec<u8>>)>> = vec![None; 64];
    let (mut submitted, mut completed_count) = (0, 0);
    while completed_count < 5_000 {
        while fixture.session.free_slots() > 0 && submitted < 5_000 {
            let index = random.below(64) as usize;
            if in_flight[index].is_some() {
                break;
            }
            let name = key(&vec![b'a' + index as u8; 1 + index]);
            let choice = random.below(3);
            let mut value = pattern(random.below(20_000) as usize);
            value.extend_from_slice(&random.next_u64().to_le_bytes());
            let command = match choice {
                0 => Command::Store { key: name, value: Value::Slice(&value), mode: StoreMode::Upsert },
                1 => Command::Retrieve { key: name, limit_bytes: u32::MAX },
                _ => Command::Delete { key: name },
            };
            fixture.session.submit(command, index as u64).unwrap();
            in_flight[index] = Some((choice, (choice == 0).then_some(value)));
            submitted += 1;
        }
        fixture.step(Nanos::from_micros(5));
        for (token, result) in std::mem::take(&mut fixture.completed) {
            let index = token as usize;
            let (choice, value) = in_flight[index].take().expect("a command completes once");
            match (choice, result.unwrap()) {
                (0, Response::Stored) => model[index] = value,
                (1, Response::Value { data, .. }) => assert_eq!(Some(&*data), model[index].as_deref()),
                (1, Response::NotFound) => assert_eq!(model[index], None),
                (2, Response::Deleted | Response::NotFound) => model[index] = None,
                (choice, response) => panic!("{choice} completed with {response:?}"),
            }
            completed_count += 1;
        }
    }
}

#[test]
fn a_full_queue_rejects_commands() {
    let mut fixture =
        SessionFixture::live(ClientConfig { queue_depth: 2, ..ClientConfig::default() }, target(|_| {}));
    fixture.sockets.0.borrow_mut().hold_requests = true;
    for token in 0..2 {
        fixture.session.submit(Command::Exist { key: key(b"k") }, token).unwrap();
    }
    let third = fixture.session.submit(Command::Exist { key: key(b"k") }, 2);
    assert_eq!(third, Err(octokv_client::SubmitError::QueueFull));
}

#[test]
fn a_lost_connection_reports_the_known_outcome_of_every_command_and_reconnects() {
    let mut fixture = SessionFixture::live(ClientConfig::default(), target(|_| {}));
    fixture.sockets.0.borrow_mut().hold_requests = true;
    let store =
        |name: &[u8]| Command::Store { key: key(name), value: Value::Slice(b"v"), mode: StoreMode::Upsert };
    fixture.session.submit(store(b"sent"), 1).unwrap();
    fixture.session.submit(Command::Delete { key: key(b"sent") }, 2).unwrap();
    fixture.session.submit(Command::Retrieve { key: key(b"sent"), limit_bytes: 9 }, 3).unwrap();
    fixture.step(Nanos(1));
    fixture.sockets.0.borrow_mut().sends_blocked = true;
    fixture.session.submit(store(b"unsent"), 4).unwrap();
    fixture.step(Nanos(1));
    fixture.sockets.cut();
    fixture.run_until(|fixture| fixture.completed.len() == 4);
    fixture.completed.sort_by_key(|(token, _)| *token);
    let errors: Vec<Error> = fixture.completed.drain(..).map(|(_, result)| result.unwrap_err()).collect();
    let cause = Error::Disconnected(ConnectionError::Closed);
    assert_eq!(errors, [Error::OutcomeUnknown, Error::OutcomeUnknown, cause.clone(), cause]);
    let submitted = fixture.session.submit(store(b"k"), 9);
    assert_eq!(submitted, Err(octokv_client::SubmitError::NotConnected));
    {
        let mut network = fixture.sockets.0.borrow_mut();
        (network.hold_requests, network.sends_blocked) = (false, false);
    }
    fixture.run_until(|fixture| fixture.session.is_live());
    assert!(matches!(fixture.put(b"k", b"v", StoreMode::Upsert), Ok(Response::Stored)));
}

#[test]
fn reconnect_attempts_back_off_exponentially() {
    let reconnect = Reconnect::BackOff {
        first_delay: Nanos::from_millis(10),
        delay_max: Nanos::from_millis(80),
        give_up_after: Nanos::from_secs(1),
    };
    let mut fixture =
        SessionFixture::live(ClientConfig { reconnect, ..ClientConfig::default() }, target(|_| {}));
    fixture.sockets.0.borrow_mut().refuse = true;
    fixture.sockets.cut();
    let before = fixture.sockets.0.borrow().connect_count;
    for _ in 0..200 {
        fixture.step(Nanos::from_millis(1));
    }
    let attempts = fixture.sockets.0.borrow().connect_count - before;
    assert!((4..=6).contains(&attempts), "10 + 20 + 40 + 80 + 80 ms, but {attempts} attempts");
    for _ in 0..1200 {
        fixture.step(Nanos::from_millis(1));
    }
    assert_eq!(fixture.session.ended(), Some(Error::Connect(address(), ConnectionError::Closed)));
    let submitted = fixture.session.submit(Command::Flush, 1);
    assert_eq!(submitted, Err(octokv_client::SubmitError::Ended));
}

#[test]
fn a_command_that_times_out_ends_its_connection() {
    let config = ClientConfig { command_timeout: Nanos::from_millis(500), ..ClientConfig::default() };
    let mut fixture = SessionFixture::live(config, target(|_| {}));
    fixture.sockets.0.borrow_mut().hold_requests = true;
    let value = Value::Slice(b"v");
    fixture.session.submit(Command::Store { key: key(b"k"), value, mode: StoreMode::Upsert }, 1).unwrap();
    fixture.session.submit(Command::Exist { key: key(b"k") }, 2).unwrap();
    for _ in 0..600 {
        fixture.step(Nanos::from_millis(1));
    }
    let errors: Vec<Error> = fixture.completed.drain(..).map(|(_, result)| result.unwrap_err()).collect();
    assert_eq!(errors, [Error::OutcomeUnknown, Error::Disconnected(ConnectionError::TimedOut)]);
    fixture.sockets.0.borrow_mut().hold_requests = false;
    fixture.run_until(|fixture| fixture.session.is_live());
}

#[test]
fn a_command_that_waits_for_its_socket_when_it_times_out_is_not_executed() {
    let config = ClientConfig { command_timeout: Nanos::from_millis(500), ..ClientConfig::default() };
    let mut fixture = SessionFixture::live(config, target(|_| {}));
    let large = pattern(9_000);
    for (token, value) in [b"v".as_slice(), &large].into_iter().enumerate() {
        let key = key(&[b'a' + token as u8]);
        let store = Command::Store { key, value: Value::Slice(value), mode: StoreMode::Upsert };
        fixture.session.submit(store, token as u64).unwrap();
    }
    // The process is paused before it sends.
    let sent_bytes = fixture.sockets.0.borrow().sent_bytes;
    fixture.step(Nanos::from_millis(600));
    assert_eq!(fixture.sockets.0.borrow().sent_bytes, sent_bytes);
    let errors: Vec<Error> = fixture.completed.drain(..).map(|(_, result)| result.unwrap_err()).collect();
    let cause = Error::Disconnected(ConnectionError::TimedOut);
    assert_eq!(errors, [cause.clone(), cause]);
    fixture.run_until(|fixture| fixture.session.is_live());
    assert_eq!(fixture.sockets.0.borrow().store.executed_count, 0);
}

#[test]
fn a_command_that_waits_for_its_socket_when_another_queue_is_lost_is_not_executed() {
    let mut fixture =
        SessionFixture::live(ClientConfig { io_queues: 2, ..ClientConfig::default() }, target(|_| {}));
    fixture.sockets.0.borrow_mut().sends_blocked = true;
    for queue in 0..2 {
        let (key, value) = (key(&[b'a' + queue as u8]), Value::Slice(b"v"));
        let store = Command::Store { key, value, mode: StoreMode::Upsert };
        fixture.session.submit_on(queue, store, queue as u64).unwrap();
    }
    fixture.step(Nanos(1));
    fixture.sockets.0.borrow_mut().sends_blocked = false;
    // Connection 0 is the admin queue's.
    fixture.sockets.cut_one(1);
    fixture.step(Nanos(1));
    let errors: Vec<Error> = fixture.completed.drain(..).map(|(_, result)| result.unwrap_err()).collect();
    let cause = Error::Disconnected(ConnectionError::Closed);
    assert_eq!(errors, [cause.clone(), cause]);
    fixture.run_until(|fixture| fixture.session.is_live());
    assert_eq!(fixture.sockets.0.borrow().store.executed_count, 0);
}

#[test]
fn a_loss_that_is_found_while_sending_closes_all_connections_at_once() {
    let mut fixture = SessionFixture::live(ClientConfig::default(), target(|_| {}));
    let value = pattern(100_000);
    let store = Command::Store { key: key(b"k"), value: Value::Slice(&value), mode: StoreMode::Upsert };
    fixture.session.submit(store, 1).unwrap();
    fixture.step(Nanos(1));
    // The client receives the request for the data, and cannot send it.
    fixture.sockets.cut_one(1);
    fixture.step(Nanos(1));
    assert!(matches!(fixture.completed[..], [(1, Err(Error::OutcomeUnknown))]), "{:?}", fixture.completed);
    assert!(!fixture.sockets.is_open(0), "the next attempt has another admin queue");
}

#[test]
fn an_idle_connection_is_kept_alive() {
    let config = ClientConfig { keep_alive: Nanos::from_secs(2), ..ClientConfig::default() };
    let mut fixture = SessionFixture::live(config, target(|_| {}));
    for _ in 0..6_000 {
        fixture.step(Nanos::from_millis(10));
    }
    assert!(fixture.session.is_live() && fixture.sockets.0.borrow().connect_count == 2);
}

#[test]
fn a_silent_node_times_out_while_connecting() {
    let mut fixture = SessionFixture::new(ClientConfig::default(), target(|_| {}));
    fixture.sockets.0.borrow_mut().sends_blocked = true;
    fixture.step(Nanos::from_secs(9));
    assert_eq!(fixture.session.ended(), None);
    fixture.step(Nanos::from_secs(1));
    assert_eq!(fixture.session.ended(), Some(Error::Connect(address(), ConnectionError::TimedOut)));
}

#[test]
fn a_failed_connect_reports_its_cause() {
    let ended = |config| {
        let mut fixture = SessionFixture::new(config, target(|_| {}));
        fixture.run_until(|fixture| fixture.session.ended().is_some());
        fixture.session.ended()
    };
    let subsystem = "nqn.2026-11.io.octokv:other".to_string();
    match ended(ClientConfig { subsystem_nqn: subsystem, ..ClientConfig::default() }) {
        Some(Error::Connect(_, ConnectionError::ConnectRejected(status))) => {
            assert!(status.is(Status::CONNECT_INVALID_PARAMETERS), "{status:?}");
        }
        other => panic!("{other:?}"),
    }
    let missing = ended(ClientConfig { namespace: NamespaceId(9), ..ClientConfig::default() });
    assert_eq!(missing, Some(Error::Connect(address(), ConnectionError::NamespaceNotFound)));
    let mut fixture = SessionFixture::new(ClientConfig::default(), target(|_| {}));
    fixture.sockets.0.borrow_mut().refuse = true;
    fixture.run_until(|fixture| fixture.session.ended().is_some());
    assert_eq!(fixture.session.ended(), Some(Error::Connect(address(), ConnectionError::Closed)));
}

#[test]
fn a_closed_session_completes_commands_in_flight_and_leaves_no_controller() {
    let node = target(|_| {});
    let mut fixture =
        SessionFixture::live(ClientConfig { io_queues: 2, ..ClientConfig::default() }, node.clone());
    assert_eq!(node.controllers().len(), 1);
    fixture.session.submit(Command::Exist { key: key(b"k") }, 5).unwrap();
    fixture.step(Nanos(1));
    let now = fixture.sockets.0.borrow().now;
    fixture.session.close(now, |_, _| {});
    fixture.run_until(|fixture| fixture.session.ended().is_some());
    assert_eq!(fixture.session.ended(), Some(Error::Closed));
    let closed_at = fixture.sockets.0.borrow().now;
    assert!(
        closed_at - now < Nanos::from_millis(100),
        "the shutdown follows the last completion, not a timeout"
    );
    assert!(matches!(fixture.completed[..], [(5, Ok(Response::NotFound))]), "{:?}", fixture.completed);
    fixture.step(Nanos(1));
    assert_eq!(node.controllers().len(), 0);
}

#[test]
fn a_protocol_error_while_closing_ends_the_session() {
    let mut fixture = SessionFixture::live(ClientConfig::default(), target(|_| {}));
    fixture.session.submit(Command::Exist { key: key(b"k") }, 5).unwrap();
    let now = fixture.sockets.0.borrow().now;
    fixture.session.close(now, |_, _| {});
    fixture.sockets.0.borrow_mut().corrupt = Some((Prng::new(1), 1));
    fixture.run_until(|fixture| fixture.session.ended().is_some());
    assert_eq!(fixture.session.connection_epoch(), 1, "a closing session does not reconnect");
}

#[test]
fn corrupted_bytes_never_panic_and_never_hang_a_command() {
    for seed in 0..300 {
        let digests = seed % 2 == 0;
        let reconnect = Reconnect::BackOff {
            first_delay: Nanos::from_millis(1),
            delay_max: Nanos::from_millis(1),
            give_up_after: Nanos::NEVER,
        };
        let config = ClientConfig {
            header_digest: digests,
            data_digest: digests,
            command_timeout: Nanos::from_millis(50),
            connect_timeout: Nanos::from_millis(50),
            reconnect,
            ..ClientConfig::default()
        };
        let mut fixture = SessionFixture::live(config, target(|_| {}));
        fixture.sockets.0.borrow_mut().corrupt = Some((Prng::new(seed), 3_000));
        let (mut submitted, mut completed_count) = (0u64, 0);
        for _ in 0..400 {
            while fixture.session.free_slots() > 120 {
                let name = key(&[b'k', submitted as u8 % 8]);
                let command = match submitted % 4 {
                    0 => Command::Store {
                        key: name,
                        value: Value::Slice(&pattern(submitted as usize * 100 % 40_000)),
                        mode: StoreMode::Upsert,
                    },
                    1 => Command::List { start: name, limit_bytes: 512 },
                    _ => Command::Retrieve { key: name, limit_bytes: u32::MAX },
                };
                fixture.session.submit(command, submitted).unwrap();
                submitted += 1;
            }
            fixture.step(Nanos::from_micros(500));
            completed_count += fixture.completed.drain(..).count() as u64;
            if fixture.session.ended().is_some() {
                break;
            }
        }
        fixture.sockets.0.borrow_mut().corrupt = None;
        for _ in 0..400 {
            fixture.step(Nanos::from_millis(1));
            completed_count += fixture.completed.drain(..).count() as u64;
        }
        assert_eq!((completed_count, fixture.session.in_flight()), (submitted, 0), "seed {seed}");
    }
}
