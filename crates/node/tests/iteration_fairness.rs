//! A core's turns where time has a price: who asks for little is answered in the next one, and nobody is held up.

#[path = "support/rig.rs"]
mod rig;

use octokv_base::Nanos;
use rig::{Prices, Rig, keys};

/// A value of 100 B costs 3 µs, and one of 64 KiB 35 µs.
const PRICES: Prices = Prices { call: Nanos::from_micros(1), block: Nanos::from_micros(2) };
const SHORT: [u8; 100] = [7; 100];
static LONG: [u8; 64 << 10] = [7; 64 << 10];
const FLOODERS: usize = 8;
/// Long enough for what is seen of hosts to be seen and forgotten many times.
const TURNS: usize = 20_000;

#[test]
fn who_asks_for_little_is_answered_at_once_and_those_who_flood_have_equal_parts() {
    let mut rig = Rig::with(16 << 20, 32, PRICES);
    rig.record(&keys(0, 1), Some(&SHORT));
    rig.record(&keys(1, 1), Some(&LONG));
    let one = rig.record(&keys(0, 1), None);
    let many = rig.record(&keys(1, 1), None).repeat(8);
    let flooders: Vec<usize> = (0..FLOODERS).map(|_| rig.another()).collect();
    let little = rig.another();

    let mut waits = Vec::new();
    let mut longest_turn = Nanos::ZERO;
    let mut asked = None;
    for turn in 0..TURNS {
        for &wire in &flooders {
            if rig.state(wire).0 < many.len() {
                rig.say(wire, &many);
            }
        }
        // Not in step with the flooders' turns, and after they are known for what they are.
        if asked.is_none() && turn % 37 == 0 {
            rig.say(little, &one);
            asked = Some((turn, rig.state(little).1));
        }
        let length = rig.core_turn();
        // By then each is known for what it asks.
        if turn > TURNS / 2 {
            longest_turn = longest_turn.max(length);
        }
        if let Some((begun, said)) = asked
            && rig.state(little).1 > said
        {
            waits.push(turn + 1 - begun);
            asked = None;
        }
    }
    // 40 µs, and what was begun within them on either way: a value, of 35.
    assert!(longest_turn <= Nanos::from_micros(40 + 2 * 35 + 10), "a turn of {longest_turn:?}");
    let longest = waits[10..].iter().max().unwrap();
    assert!(*longest <= 2, "{longest} turns for one request beside those who flood");
    assert!(waits.len() > TURNS / 37 - 10);

    let answers: Vec<u64> = flooders.iter().map(|&wire| rig.state(wire).1).collect();
    let (least, most) = (answers.iter().min().unwrap(), answers.iter().max().unwrap());
    assert!(*least > 0 && most - least <= most / 10, "parts of those who flood: {answers:?}");
}

#[test]
fn many_who_ask_for_little_do_not_hold_up_one_who_asks_for_much() {
    let mut rig = Rig::with(16 << 20, 32, PRICES);
    rig.record(&keys(0, 1), Some(&SHORT));
    rig.record(&keys(1, 1), Some(&LONG));
    let (one, long) = (rig.record(&keys(0, 1), None), rig.record(&keys(1, 1), None));
    // Each asks for little, and together they fill a turn.
    let crowd: Vec<usize> = (0..60).map(|_| rig.another()).collect();
    let flooder = rig.another();
    let mut known = Vec::new();
    for turn in 0..TURNS / 10 {
        if turn == TURNS / 20 {
            // By now each is known for what it asks.
            known = crowd.iter().chain([&flooder]).map(|&wire| rig.state(wire).1).collect();
        }
        for &wire in &crowd {
            if rig.state(wire).0 == 0 {
                rig.say(wire, &one);
            }
        }
        if rig.state(flooder).0 == 0 {
            rig.say(flooder, &long);
        }
        rig.core_turn();
    }
    let since = |at: usize, wire: usize| rig.state(wire).1 - known[at];
    let least = crowd.iter().enumerate().map(|(at, &wire)| since(at, wire)).min().unwrap();
    let much = since(crowd.len(), flooder);
    // One value every other turn, at the least.
    let fair = (TURNS / 40 * LONG.len()) as u64;
    assert!(least > 0 && much > fair, "{least} bytes for each of the crowd, {much} for the other");
}

#[test]
fn a_host_with_room_for_long_values_has_its_short_ones_in_one_turn() {
    let mut rig = Rig::new(16 << 20, 128);
    rig.record(&keys(0, 50), Some(&SHORT));
    // As long as the node's longest value, 50 times: more than a connection may be owed.
    rig.read_bytes_max = u32::MAX;
    let batch = rig.record(&keys(0, 50), None);
    let host = rig.another();
    let before = rig.state(host).1;
    rig.say(host, &batch);
    rig.core_turn();
    let (left, said) = rig.state(host);
    assert_eq!(left, 0, "all was taken");
    assert!(said - before >= 50 * SHORT.len() as u64, "{} bytes were said", said - before);
    rig.core_turn();
    assert_eq!(rig.state(host).1, said, "nothing was left for later");
}
