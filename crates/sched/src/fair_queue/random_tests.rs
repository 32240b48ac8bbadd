//! The queue in any use: flows come, change and go, limits open and close, costs are put right, and what it promises holds.

use super::*;
use std::collections::VecDeque;

/// What the queue should know, kept the simple way.
struct Model {
    is_there: Vec<bool>,
    waiting: Vec<VecDeque<u64>>,
    running: Vec<Charge>,
}

fn any_settings(random: &mut Random) -> FlowSettings {
    FlowSettings {
        weight: random.below(1000) as u32 + 1,
        operations_per_s: random.one_in(2).then(|| random.below(2_000_000) + 1),
        bytes_per_s: random.one_in(3).then(|| random.below(1 << 32) + 1024),
        burst: Nanos::from_millis(random.below(20) + 1),
    }
}

fn any_cost(random: &mut Random) -> Cost {
    Cost { ns: random.below(100_000), bytes: random.below(100_000) }
}

/// One thing that somebody does with it.
fn step(random: &mut Random, queue: &mut Fair<u64>, model: &mut Model, now: Nanos, in_flight_max: u32) {
    let flow = random.below(u64::from(FLOWS)) as usize;
    let id = FlowId(flow as u32);
    match (random.below(20), model.is_there[flow]) {
        (0, true) => {
            let mut gone = Vec::new();
            queue.remove(id, |request| gone.push(request));
            assert_eq!(gone, model.waiting[flow].drain(..).collect::<Vec<u64>>());
            model.is_there[flow] = false;
        }
        (1, true) => queue.change(id, &any_settings(random), now),
        (2, true) => queue.set_weight(id, random.next_u64() as u32),
        (_, false) => {
            queue.add(id, &any_settings(random), now);
            model.is_there[flow] = true;
        }
        (3..=10, true) => {
            let request = random.next_u64();
            let refused = queue.offer(id, any_cost(random), request, now).is_err();
            assert!(!refused || !model.waiting[flow].is_empty(), "with nothing waiting it is never refused");
            model.waiting[flow].extend((!refused).then_some(request));
        }
        (11..=12, true) => {
            let room = model.running.len() < in_flight_max as usize;
            if let Some(charge) = queue.pass(id, any_cost(random), now) {
                assert!(room && model.waiting[flow].is_empty());
                model.running.push(charge);
            }
        }
        (13..=16, true) => match queue.next(now) {
            Some((charge, request)) => {
                let begun = charge.flow().0 as usize;
                assert_eq!(model.waiting[begun].pop_front(), Some(request), "first come, first begun");
                model.running.push(charge);
            }
            None => assert_nothing_could(queue, model, now, in_flight_max),
        },
        (_, true) => {
            if !model.running.is_empty() {
                let charge = model.running.swap_remove(random.below(model.running.len() as u64) as usize);
                queue.done(charge, random.one_in(2).then(|| random.below(1_000_000)));
            }
        }
    }
}

/// Nothing waits that could begin.
fn assert_nothing_could(queue: &Fair<u64>, model: &Model, now: Nanos, in_flight_max: u32) {
    if model.running.len() >= in_flight_max as usize {
        return;
    }
    let waiting = (0..FLOWS as usize).filter(|&flow| !model.waiting[flow].is_empty());
    let opens: Vec<Nanos> = waiting.map(|flow| queue.flows[flow].opens_at()).collect();
    assert!(opens.iter().all(|opens| *opens > now), "somebody could have begun");
    assert_eq!(queue.next_deadline(), opens.into_iter().min().unwrap_or(Nanos::NEVER));
}

#[test]
fn whatever_is_done_with_it_it_keeps_its_promises() {
    let random = &mut Random::new(31);
    for _ in 0..100 {
        let in_flight_max = random.below(8) as u32 + 1;
        let bounds =
            FairBounds { flows_max: FLOWS, requests_max: random.below(64) as u32 + FLOWS, in_flight_max };
        let mut queue: Fair<u64> = Fair::new(bounds);
        let memory = (queue.ready.capacity(), queue.parked.capacity());
        let count = FLOWS as usize;
        let mut model = Model {
            is_there: vec![false; count],
            waiting: vec![VecDeque::new(); count],
            running: Vec::new(),
        };
        let mut now = 0;
        for _ in 0..3000 {
            now += random.below(3) * random.below(10_000);
            step(random, &mut queue, &mut model, Nanos(now), in_flight_max);
            assert!(queue.in_flight() <= in_flight_max && queue.in_flight() as usize == model.running.len());
            assert_eq!(queue.waiting(), model.waiting.iter().map(VecDeque::len).sum::<usize>());
        }
        // In the end everything that waits begins.
        while queue.waiting() > 0 {
            model.running.drain(..).for_each(|charge| queue.done(charge, None));
            match queue.next(Nanos(now)) {
                Some((charge, _)) => model.running.push(charge),
                None => now = queue.next_deadline().0,
            }
            assert!(now < u64::MAX, "it waits for something");
        }
        assert_eq!(memory, (queue.ready.capacity(), queue.parked.capacity()), "memory does not grow");
    }
}
