//! Random operations: tenants are added, changed and removed, limits open and close, costs are corrected, and the
//! invariants hold.

use super::*;
use std::collections::VecDeque;

/// A simple model of the queue.
struct QueueModel {
    is_registered: Vec<bool>,
    waiting: Vec<VecDeque<u64>>,
    running: Vec<ServiceTicket>,
}

fn random_qos(random: &mut Prng) -> TenantQos {
    TenantQos {
        weight: random.below(1000) as u32 + 1,
        operations_per_s: random.one_in(2).then(|| random.below(2_000_000) + 1),
        bytes_per_s: random.one_in(3).then(|| random.below(1 << 32) + 1024),
        burst: Nanos::from_millis(random.below(20) + 1),
    }
}

fn random_cost(random: &mut Prng) -> Cost {
    Cost { ns: random.below(100_000), bytes: random.below(100_000) }
}

/// One random operation on the queue.
fn random_step(
    random: &mut Prng,
    queue: &mut FairQueue<u64>,
    model: &mut QueueModel,
    now: Nanos,
    in_flight_max: u32,
) {
    let tenant = random.below(u64::from(TENANTS)) as usize;
    let id = TenantId(tenant as u32);
    match (random.below(20), model.is_registered[tenant]) {
        (0, true) => {
            let mut gone = Vec::new();
            queue.remove_tenant(id, |request| gone.push(request));
            assert_eq!(gone, model.waiting[tenant].drain(..).collect::<Vec<u64>>());
            model.is_registered[tenant] = false;
        }
        (1, true) => queue.update_tenant(id, &random_qos(random), now),
        (2, true) => queue.set_weight(id, random.next_u64() as u32),
        (_, false) => {
            queue.add_tenant(id, &random_qos(random), now);
            model.is_registered[tenant] = true;
        }
        (3..=10, true) => {
            let request = random.next_u64();
            let refused = queue.enqueue(id, random_cost(random), request, now).is_err();
            assert!(!refused || !model.waiting[tenant].is_empty(), "an empty queue accepts a request");
            model.waiting[tenant].extend((!refused).then_some(request));
        }
        (11..=12, true) => {
            let capacity = model.running.len() < in_flight_max as usize;
            if let Some(ticket) = queue.try_begin(id, random_cost(random), now) {
                assert!(capacity && model.waiting[tenant].is_empty());
                model.running.push(ticket);
            }
        }
        (13..=16, true) => match queue.dequeue(now) {
            Some((charge, request)) => {
                let begun = charge.tenant().0 as usize;
                assert_eq!(model.waiting[begun].pop_front(), Some(request), "FIFO");
                model.running.push(charge);
            }
            None => assert_nothing_could_begin(queue, model, now, in_flight_max),
        },
        (_, true) => {
            if !model.running.is_empty() {
                let ticket = model.running.swap_remove(random.below(model.running.len() as u64) as usize);
                queue.complete(ticket, random.one_in(2).then(|| random.below(1_000_000)));
            }
        }
    }
}

/// Asserts that no waiting request could begin.
fn assert_nothing_could_begin(queue: &FairQueue<u64>, model: &QueueModel, now: Nanos, in_flight_max: u32) {
    if model.running.len() >= in_flight_max as usize {
        return;
    }
    let waiting = (0..TENANTS as usize).filter(|&tenant| !model.waiting[tenant].is_empty());
    let opens: Vec<Nanos> = waiting.map(|tenant| queue.tenants[tenant].conforms_at()).collect();
    assert!(opens.iter().all(|opens| *opens > now), "a request could have begun");
    assert_eq!(queue.next_deadline(), opens.into_iter().min().unwrap_or(Nanos::NEVER));
}

#[test]
fn invariants_hold_under_random_operations() {
    let random = &mut Prng::new(31);
    for _ in 0..100 {
        let in_flight_max = random.below(8) as u32 + 1;
        let bounds = FairQueueLimits {
            tenants_max: TENANTS,
            requests_max: random.below(64) as u32 + TENANTS,
            in_flight_max,
        };
        let mut queue: FairQueue<u64> = FairQueue::new(bounds);
        let memory = (queue.ready.capacity(), queue.throttled.capacity());
        let count = TENANTS as usize;
        let mut model = QueueModel {
            is_registered: vec![false; count],
            waiting: vec![VecDeque::new(); count],
            running: Vec::new(),
        };
        let mut now = 0;
        for _ in 0..3000 {
            now += random.below(3) * random.below(10_000);
            random_step(random, &mut queue, &mut model, Nanos(now), in_flight_max);
            assert!(queue.in_flight() <= in_flight_max && queue.in_flight() as usize == model.running.len());
            assert_eq!(queue.waiting(), model.waiting.iter().map(VecDeque::len).sum::<usize>());
        }
        // At the end all waiting requests begin.
        while queue.waiting() > 0 {
            model.running.drain(..).for_each(|ticket| queue.complete(ticket, None));
            match queue.dequeue(Nanos(now)) {
                Some((charge, _)) => model.running.push(charge),
                None => now = queue.next_deadline().0,
            }
            assert!(now < u64::MAX, "it has a deadline");
        }
        assert_eq!(memory, (queue.ready.capacity(), queue.throttled.capacity()), "memory does not grow");
    }
}
