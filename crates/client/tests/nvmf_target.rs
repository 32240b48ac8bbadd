//! The client's machines against the real target's, in memory: every command, every size, losses, time.

mod support;

use octokv_base::{Key, NamespaceId, Nanos, Random};
use octokv_client::{Answer, Command, Error, Lost, Reconnect, Settings, StoreMode, Value};
use octokv_wire::Status;
use octokv_wire::kv::UncheckedList;
use support::{World, address, pattern, target};

fn key(bytes: &[u8]) -> Key {
    Key::new(bytes).unwrap()
}

fn keys(answer: Answer) -> Vec<Vec<u8>> {
    let Answer::Keys { list } = answer else { panic!("{answer:?} is no list") };
    UncheckedList(&list).check().unwrap().keys().map(<[u8]>::to_vec).collect()
}

#[test]
fn every_command_does_what_it_says() {
    for (header_digest, data_digest) in [(false, false), (true, false), (false, true), (true, true)] {
        let settings = Settings { header_digest, data_digest, ..Settings::default() };
        let mut world = World::live(settings, target(|_| {}));
        assert!(matches!(world.put(b"a", b"one", StoreMode::Upsert), Ok(Answer::Stored)));
        assert!(matches!(world.put(b"a", b"two", StoreMode::AddOnly), Ok(Answer::AlreadyExists)));
        assert!(matches!(world.put(b"b", b"two", StoreMode::UpdateOnly), Ok(Answer::NotFound)));
        assert!(matches!(world.put(b"b", b"two", StoreMode::AddOnly), Ok(Answer::Stored)));
        assert!(matches!(world.put(b"a", b"three", StoreMode::UpdateOnly), Ok(Answer::Stored)));
        assert_eq!(world.get(b"a").as_deref(), Some(b"three".as_slice()));
        assert_eq!(world.get(b"c"), None);
        let exist = world.ask(Command::Exist { key: key(b"a") });
        assert!(matches!(exist, Ok(Answer::Exists { value_bytes: Some(5) })), "{exist:?}");
        assert!(matches!(world.ask(Command::Exist { key: key(b"c") }), Ok(Answer::NotFound)));
        let all = world.ask(Command::List { start: key(b""), limit_bytes: 4096 }).unwrap();
        assert_eq!(keys(all), [b"a", b"b"]);
        assert!(matches!(world.ask(Command::Delete { key: key(b"a") }), Ok(Answer::Deleted)));
        assert_eq!(world.get(b"a"), None);
        assert!(matches!(world.ask(Command::Flush), Ok(Answer::Flushed)));
    }
}

#[test]
fn values_of_every_size_come_back() {
    for (data_digest, h2c, in_capsule) in [(false, 4096, 16384), (true, 8192, 4096), (true, 524_288, 8192)] {
        let node = target(|settings| {
            settings.max_h2c_data = h2c;
            settings.in_capsule_bytes = in_capsule;
        });
        let settings = Settings { header_digest: data_digest, data_digest, ..Settings::default() };
        let mut world = World::live(settings, node);
        world.memory.0.borrow_mut().chunk = 50_000;
        let sizes = [0, 1, 1023, 1024, 1025, 4095, 4096, 8192, 16384, 16385, 100_000, 1 << 20, 2 << 20];
        for bytes in sizes {
            for name in [b"short".to_vec(), vec![b'k'; 17], vec![b'l'; 1024]] {
                let value = pattern(bytes);
                let stored = world.put(&name, &value, StoreMode::Upsert);
                assert!(matches!(stored, Ok(Answer::Stored)), "{bytes}: {stored:?}");
                assert!(world.get(&name) == Some(value), "{bytes} bytes");
                let exist = world.ask(Command::Exist { key: key(&name) });
                let Ok(Answer::Exists { value_bytes }) = exist else { panic!("{exist:?}") };
                assert_eq!(value_bytes, Some(bytes as u32));
            }
        }
        let facts = world.session.facts().unwrap().clone();
        assert_eq!((facts.value_bytes_max(), facts.key_bytes_max()), (2 << 20, 1024));
        let large = world.put(b"k", &vec![0; (2 << 20) + 1], StoreMode::Upsert);
        assert_eq!(large.unwrap_err(), Error::ValueBytes { have: (2 << 20) + 1, max: 2 << 20 });
    }
}

#[test]
fn a_part_of_a_value_comes_with_its_full_length() {
    let mut world = World::live(Settings::default(), target(|_| {}));
    world.put(b"k", &pattern(5000), StoreMode::Upsert).unwrap();
    for limit_bytes in [1, 100, 4999, 5000, 9000] {
        let answer = world.ask(Command::Retrieve { key: key(b"k"), limit_bytes });
        let Ok(Answer::Value { data, full_bytes: 5000 }) = answer else { panic!("{answer:?}") };
        assert_eq!(*data, pattern(5000)[..limit_bytes.min(5000) as usize]);
    }
}

#[test]
fn long_keys_are_listed_and_deleted() {
    let mut world = World::live(Settings::default(), target(|_| {}));
    let long = vec![b'm'; 300];
    for name in [b"a".as_slice(), &long, b"z"] {
        world.put(name, b"v", StoreMode::Upsert).unwrap();
    }
    let from_m = world.ask(Command::List { start: key(&long), limit_bytes: 4096 }).unwrap();
    assert_eq!(keys(from_m), [long.as_slice(), b"z"]);
    assert!(matches!(world.ask(Command::Delete { key: key(&long) }), Ok(Answer::Deleted)));
    assert_eq!(world.get(&long), None);
}

#[test]
fn statuses_of_the_node_reach_the_caller() {
    let mut world = World::live(Settings::default(), target(|_| {}));
    world.memory.0.borrow_mut().store.room_bytes = Some(10);
    assert_eq!(world.put(b"k", &[0; 11], StoreMode::Upsert).unwrap_err(), Error::CapacityExceeded);
    world.memory.0.borrow_mut().store.busy = 1;
    assert_eq!(world.ask(Command::Exist { key: key(b"k") }).unwrap_err(), Error::Busy);
}

/// Random commands, many at a time, over several queues; every answer checked against a map. Keys are
/// used by one command at a time, since several queues keep no order.
#[test]
fn many_commands_at_a_time_over_several_queues_agree_with_a_map() {
    let settings = Settings { queues: 3, depth: 8, data_digest: true, ..Settings::default() };
    let mut world = World::live(settings, target(|settings| settings.in_capsule_bytes = 8192));
    assert_eq!(world.session.room(), 24);
    world.memory.0.borrow_mut().chunk = 3000;
    let mut random = Random::new(5);
    let mut model: Vec<Option<Vec<u8>>> = vec![None; 64];
    let mut flying: Vec<Option<(u64, Option<Vec<u8>>)>> = vec![None; 64];
    let (mut submitted, mut answered) = (0, 0);
    while answered < 5_000 {
        while world.session.room() > 0 && submitted < 5_000 {
            let index = random.below(64) as usize;
            if flying[index].is_some() {
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
            world.session.submit(command, index as u64).unwrap();
            flying[index] = Some((choice, (choice == 0).then_some(value)));
            submitted += 1;
        }
        world.turn(Nanos::from_micros(5));
        for (token, result) in std::mem::take(&mut world.done) {
            let index = token as usize;
            let (choice, value) = flying[index].take().expect("answered once");
            match (choice, result.unwrap()) {
                (0, Answer::Stored) => model[index] = value,
                (1, Answer::Value { data, .. }) => assert_eq!(Some(&*data), model[index].as_deref()),
                (1, Answer::NotFound) => assert_eq!(model[index], None),
                (2, Answer::Deleted | Answer::NotFound) => model[index] = None,
                (choice, answer) => panic!("{choice} got {answer:?}"),
            }
            answered += 1;
        }
    }
}

#[test]
fn a_full_queue_takes_no_more() {
    let mut world = World::live(Settings { depth: 2, ..Settings::default() }, target(|_| {}));
    world.memory.0.borrow_mut().hold = true;
    for token in 0..2 {
        world.session.submit(Command::Exist { key: key(b"k") }, token).unwrap();
    }
    let third = world.session.submit(Command::Exist { key: key(b"k") }, 2);
    assert_eq!(third, Err(octokv_client::Rejected::Full));
}

#[test]
fn a_lost_connection_tells_what_is_known_of_every_command_and_comes_back() {
    let mut world = World::live(Settings::default(), target(|_| {}));
    world.memory.0.borrow_mut().hold = true;
    let store =
        |name: &[u8]| Command::Store { key: key(name), value: Value::Slice(b"v"), mode: StoreMode::Upsert };
    world.session.submit(store(b"sent"), 1).unwrap();
    world.session.submit(Command::Delete { key: key(b"sent") }, 2).unwrap();
    world.session.submit(Command::Retrieve { key: key(b"sent"), limit_bytes: 9 }, 3).unwrap();
    world.turn(Nanos(1));
    world.memory.0.borrow_mut().jammed = true;
    world.session.submit(store(b"unsent"), 4).unwrap();
    world.turn(Nanos(1));
    world.memory.cut();
    world.run_until(|world| world.done.len() == 4);
    world.done.sort_by_key(|(token, _)| *token);
    let errors: Vec<Error> = world.done.drain(..).map(|(_, result)| result.unwrap_err()).collect();
    let lost = Error::Disconnected(Lost::Closed);
    assert_eq!(errors, [Error::OutcomeUnknown, Error::OutcomeUnknown, lost.clone(), lost]);
    let submitted = world.session.submit(store(b"k"), 9);
    assert_eq!(submitted, Err(octokv_client::Rejected::NotConnected));
    {
        let mut net = world.memory.0.borrow_mut();
        (net.hold, net.jammed) = (false, false);
    }
    world.run_until(|world| world.session.is_live());
    assert!(matches!(world.put(b"k", b"v", StoreMode::Upsert), Ok(Answer::Stored)));
}

#[test]
fn attempts_to_connect_again_are_paused_longer_and_longer() {
    let reconnect = Reconnect::BackOff {
        first: Nanos::from_millis(10),
        longest: Nanos::from_millis(80),
        give_up: Nanos::from_secs(1),
    };
    let mut world = World::live(Settings { reconnect, ..Settings::default() }, target(|_| {}));
    world.memory.0.borrow_mut().refuse = true;
    world.memory.cut();
    let before = world.memory.0.borrow().connects;
    for _ in 0..200 {
        world.turn(Nanos::from_millis(1));
    }
    let attempts = world.memory.0.borrow().connects - before;
    assert!((4..=6).contains(&attempts), "10 + 20 + 40 + 80 + 80 ms, but {attempts} attempts");
    for _ in 0..1200 {
        world.turn(Nanos::from_millis(1));
    }
    assert_eq!(world.session.ended(), Some(Error::Connect(address(), Lost::Closed)));
    let over = world.session.submit(Command::Flush, 1);
    assert_eq!(over, Err(octokv_client::Rejected::Over));
}

#[test]
fn a_command_without_an_answer_takes_its_connection_down() {
    let settings = Settings { command_timeout: Nanos::from_millis(500), ..Settings::default() };
    let mut world = World::live(settings, target(|_| {}));
    world.memory.0.borrow_mut().hold = true;
    let value = Value::Slice(b"v");
    world.session.submit(Command::Store { key: key(b"k"), value, mode: StoreMode::Upsert }, 1).unwrap();
    world.session.submit(Command::Exist { key: key(b"k") }, 2).unwrap();
    for _ in 0..600 {
        world.turn(Nanos::from_millis(1));
    }
    let errors: Vec<Error> = world.done.drain(..).map(|(_, result)| result.unwrap_err()).collect();
    assert_eq!(errors, [Error::OutcomeUnknown, Error::Disconnected(Lost::TimedOut)]);
    world.memory.0.borrow_mut().hold = false;
    world.run_until(|world| world.session.is_live());
}

#[test]
fn an_idle_connection_is_kept_alive() {
    let settings = Settings { keep_alive: Nanos::from_secs(2), ..Settings::default() };
    let mut world = World::live(settings, target(|_| {}));
    for _ in 0..6_000 {
        world.turn(Nanos::from_millis(10));
    }
    assert!(world.session.is_live() && world.memory.0.borrow().connects == 2);
}

#[test]
fn a_silent_node_is_noticed_while_connecting() {
    let mut world = World::new(Settings::default(), target(|_| {}));
    world.memory.0.borrow_mut().jammed = true;
    world.turn(Nanos::from_secs(9));
    assert_eq!(world.session.ended(), None);
    world.turn(Nanos::from_secs(1));
    assert_eq!(world.session.ended(), Some(Error::Connect(address(), Lost::TimedOut)));
}

#[test]
fn what_cannot_be_connected_to_says_why() {
    let ended = |settings| {
        let mut world = World::new(settings, target(|_| {}));
        world.run_until(|world| world.session.ended().is_some());
        world.session.ended()
    };
    let subsystem = "nqn.2026-11.io.octokv:other".to_string();
    match ended(Settings { subsystem, ..Settings::default() }) {
        Some(Error::Connect(_, Lost::Refused(status))) => {
            assert!(status.is(Status::CONNECT_INVALID_PARAMETERS), "{status:?}");
        }
        other => panic!("{other:?}"),
    }
    let missing = ended(Settings { namespace: NamespaceId(9), ..Settings::default() });
    assert_eq!(missing, Some(Error::Connect(address(), Lost::NoNamespace)));
    let mut world = World::new(Settings::default(), target(|_| {}));
    world.memory.0.borrow_mut().refuse = true;
    world.run_until(|world| world.session.ended().is_some());
    assert_eq!(world.session.ended(), Some(Error::Connect(address(), Lost::Closed)));
}

#[test]
fn a_closed_session_answers_what_is_in_flight_and_leaves_no_controller_behind() {
    let node = target(|_| {});
    let mut world = World::live(Settings { queues: 2, ..Settings::default() }, node.clone());
    assert_eq!(node.controllers().len(), 1);
    world.session.submit(Command::Exist { key: key(b"k") }, 5).unwrap();
    world.turn(Nanos(1));
    let now = world.memory.0.borrow().now;
    world.session.close(now, |_, _| {});
    world.run_until(|world| world.session.ended().is_some());
    assert_eq!(world.session.ended(), Some(Error::Closed));
    assert!(matches!(world.done[..], [(5, Ok(Answer::NotFound))]), "{:?}", world.done);
    world.turn(Nanos(1));
    assert_eq!(node.controllers().len(), 0);
}

#[test]
fn spoiled_bytes_never_panic_and_never_hang_a_command() {
    for seed in 0..300 {
        let digests = seed % 2 == 0;
        let reconnect = Reconnect::BackOff {
            first: Nanos::from_millis(1),
            longest: Nanos::from_millis(1),
            give_up: Nanos::NEVER,
        };
        let settings = Settings {
            header_digest: digests,
            data_digest: digests,
            command_timeout: Nanos::from_millis(50),
            connect_timeout: Nanos::from_millis(50),
            reconnect,
            ..Settings::default()
        };
        let mut world = World::live(settings, target(|_| {}));
        world.memory.0.borrow_mut().spoil = Some((Random::new(seed), 3_000));
        let (mut submitted, mut answered) = (0u64, 0);
        for _ in 0..400 {
            while world.session.room() > 120 {
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
                world.session.submit(command, submitted).unwrap();
                submitted += 1;
            }
            world.turn(Nanos::from_micros(500));
            answered += world.done.drain(..).count() as u64;
            if world.session.ended().is_some() {
                break;
            }
        }
        world.memory.0.borrow_mut().spoil = None;
        for _ in 0..400 {
            world.turn(Nanos::from_millis(1));
            answered += world.done.drain(..).count() as u64;
        }
        assert_eq!((answered, world.session.in_flight()), (submitted, 0), "seed {seed}");
    }
}
