//! A model device under saturated, partial, mixed and group-committed loads.

use super::*;
use crate::command_costs::CostKind;
use octokv_base::{Nanos, Prng};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// A device that serves a number of commands at a time, first come first served.
struct ModelDevice {
    free_at: Vec<Nanos>,
    get: Nanos,
    put: Nanos,
    random: Prng,
}

impl ModelDevice {
    fn new(parallel: usize, get_us: u64, put_us: u64) -> ModelDevice {
        let [get, put] = [get_us, put_us].map(Nanos::from_micros);
        ModelDevice { free_at: vec![Nanos::ZERO; parallel], get, put, random: Prng::new(7) }
    }

    /// When a command that begins now ends: its service time varies by a fourth.
    fn end_of(&mut self, kind: CostKind, now: Nanos) -> Nanos {
        let mean = if kind == CostKind::Put { self.put } else { self.get };
        let service = Nanos(mean.0 * 3 / 4 + self.random.next_u64() % (mean.0 / 2));
        let server = self.free_at.iter_mut().min().expect("one at least");
        *server = (*server).max(now) + service;
        *server
    }
}

/// A device with commands that always wait, and the tokens by which they begin.
struct Saturated {
    tokens: DeviceTokens,
    device: ModelDevice,
    now: Nanos,
    /// By their ends: when they began, whether they are Puts, costs.
    running: BinaryHeap<Reverse<(Nanos, Nanos, bool, u32)>>,
    puts: Prng,
    put_percent: u64,
    /// The commands that may be in flight beside the tokens.
    most: usize,
}

impl Saturated {
    fn new(device: ModelDevice) -> Saturated {
        Saturated {
            tokens: DeviceTokens::new(StartingCosts::default()),
            device,
            now: Nanos::from_millis(1),
            running: BinaryHeap::new(),
            puts: Prng::new(3),
            put_percent: 0,
            most: usize::MAX,
        }
    }

    /// Ends one command after another. The capacity after each, in Gets.
    fn run(&mut self, commands: usize) -> Vec<u32> {
        let mut capacities = Vec::with_capacity(commands);
        for _ in 0..commands {
            while self.running.len() < self.most {
                let is_put = self.puts.next_u64() % 100 < self.put_percent;
                let kind = if is_put { CostKind::Put } else { CostKind::Get };
                let cost = self.tokens.costs().of(kind, 1000);
                if !self.tokens.try_begin(cost) {
                    break;
                }
                let end = self.device.end_of(kind, self.now);
                self.running.push(Reverse((end, self.now, is_put, cost)));
            }
            let Reverse((ended_at, began_at, is_put, cost)) = self.running.pop().expect("one runs");
            self.now = ended_at;
            let kind = if is_put { CostKind::Put } else { CostKind::Get };
            self.tokens.end(cost, Some(EndedCommand { kind, bytes: 1000, began_at, ended_at }));
            capacities.push(self.tokens.capacity() / GET_TOKENS);
        }
        capacities
    }

    /// How many commands until the capacity is within `range` and stays.
    fn until_within(&mut self, range: std::ops::RangeInclusive<u32>, most: usize) -> usize {
        let capacities = self.run(most);
        let outside = capacities.iter().rposition(|capacity| !range.contains(capacity));
        outside.map_or(0, |last| last + 1)
    }
}

#[test]
fn the_capacity_goes_between_what_a_device_serves_at_a_time_and_twice_that() {
    for parallel in [8, 32, 128, 512] {
        let mut run = Saturated::new(ModelDevice::new(parallel, 80, 80));
        run.run(40 * parallel + 4000);
        let later = run.run(200 * parallel);
        let most = later.iter().max().unwrap();
        let mut settled = later.clone();
        settled.sort_unstable();
        let least = &settled[settled.len() / 20];
        let mean = later.iter().map(|&capacity| capacity as usize).sum::<usize>() / later.len();
        assert!(*least as usize >= parallel / 2, "{parallel}: {least}");
        assert!(*most as usize <= 3 * parallel, "{parallel}: {most}");
        assert!((parallel..=parallel * 2).contains(&mean), "{parallel}: {mean}");
    }
}

#[test]
fn a_device_that_changes_its_speed_mid_run_is_followed() {
    let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
    run.run(20_000);
    for (get_us, what) in [(320, "four times slower"), (80, "as before"), (20, "four times faster")] {
        run.device.get = Nanos::from_micros(get_us);
        let commands = run.until_within(14..=96, 20_000);
        assert!(commands <= 1_500, "{what}: {commands} commands");
    }
}

#[test]
fn a_device_that_changes_how_much_it_serves_at_a_time_is_followed() {
    let mut run = Saturated::new(ModelDevice::new(64, 80, 80));
    run.run(20_000);
    let grown = run.tokens.capacity();
    run.device.free_at.truncate(16);
    let commands = run.until_within(7..=48, 20_000);
    assert!(commands <= 10_000, "fewer: {commands} commands");
    run.device.free_at.resize(128, run.now);
    let commands = run.until_within(60..=384, 20_000);
    assert!(commands <= 6_000, "more: {commands} commands");
    assert!(run.tokens.capacity() > grown);
}

#[test]
fn the_throughput_is_that_of_the_device() {
    let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
    run.run(20_000);
    let begun = run.now;
    run.run(100_000);
    // 32 at a time, each 80 us: 400,000 in a second.
    let part = 100_000.0 / run.now.since(begun).as_secs_f64() / 400_000.0;
    assert!(part > 0.97, "{part} of the device's throughput");
}

#[test]
fn a_put_that_costs_more_than_its_starting_value_is_measured() {
    for (put_us, tokens) in [(640, 128), (80, 16)] {
        let mut run = Saturated::new(ModelDevice::new(32, 80, put_us));
        for round in 0..200 {
            run.put_percent = [0, 50, 90, 20][round % 4];
            run.run(2_000);
        }
        let put = run.tokens.costs().of(CostKind::Put, 1000);
        assert!(put.abs_diff(tokens) * 8 <= tokens, "{put} tokens, and the device needs {tokens}");
    }
}

#[test]
fn a_load_that_leaves_tokens_changes_no_capacity() {
    let mut run = Saturated::new(ModelDevice::new(64, 80, 80));
    run.most = 8;
    let capacities = run.run(50_000);
    assert!(capacities.iter().all(|&capacity| capacity == 32), "no command waited");
    assert_eq!(run.tokens.costs().factor(CostKind::Put), 1.0, "nor was it saturated");
}

#[test]
fn a_load_with_peaks_that_leaves_most_tokens_does_not_lower_the_capacity() {
    let mut run = Saturated::new(ModelDevice::new(64, 80, 80));
    for step in 0..20_000 {
        run.most = if step % 8 == 0 { 17 } else { 4 };
        let capacities = run.run(4);
        assert!(capacities.iter().all(|&capacity| capacity >= 32), "{capacities:?} at step {step}");
    }
}

#[test]
fn a_trial_of_less_ends_when_commands_need_the_device_no_more() {
    let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
    while run.tokens.limit() == run.tokens.capacity() {
        run.run(1);
    }
    while let Some(Reverse((_, _, _, cost))) = run.running.pop() {
        run.tokens.end(cost, None);
    }
    for _ in 0..=1024 {
        assert!(run.tokens.try_begin(GET_TOKENS));
        run.tokens.end(GET_TOKENS, None);
    }
    assert_eq!(run.tokens.limit(), run.tokens.capacity());
}

#[test]
fn a_load_that_changes_all_the_time_has_few_rounds_with_half_of_the_capacity() {
    let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
    let mut halved = 0;
    for step in 0..20_000 {
        // A round has some 250 commands.
        run.put_percent = if step / 15 % 2 == 0 { 5 } else { 60 };
        run.run(10);
        halved += u32::from(run.tokens.limit() < run.tokens.capacity());
    }
    assert!((1..6_000).contains(&halved), "in {halved} of 20000 steps");
}

#[test]
fn larger_commands_raise_the_capacity_after_one_round() {
    let mut run = Saturated::new(ModelDevice::new(1, 80, 80));
    run.run(20_000);
    assert!(run.tokens.capacity() < 8 * GET_TOKENS, "{}", run.tokens.capacity());
    run.put_percent = 100;
    run.run(200);
    let put = run.tokens.costs().of(CostKind::Put, 1000);
    assert!(run.tokens.capacity() >= COMMANDS_MIN * put, "{} for Puts of {put}", run.tokens.capacity());
}

#[test]
fn ends_that_arrive_out_of_order_change_little() {
    let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
    run.run(20_000);
    for step in 0..20_000 {
        // A core was preempted for 5 ms between its clock and the queue.
        let ended_at = Nanos(run.now.0 - 5_000_000);
        let began_at = Nanos(ended_at.0 - 80_000);
        run.tokens.end(0, Some(EndedCommand { kind: CostKind::Get, bytes: 0, began_at, ended_at }));
        let capacities = run.run(1);
        assert!((24..=96).contains(&capacities[0]), "{capacities:?} at step {step}");
    }
}

/// The cost of a Put, in starting costs, after trials with these results and the rounds that follow them: of Gets and of Puts, which take four
/// times as long for a token.
fn put_factor_after(gain: f64, active_ratio: f64, capacity: u32) -> f64 {
    let mut tokens = DeviceTokens::new(StartingCosts::default());
    tokens.capacity = capacity;
    for _ in 0..20 {
        for (starting_tokens, length) in [([1000, 0, 0], 1000), ([0, 1000, 0], 4000)] {
            let half = RoundResult {
                starting_tokens,
                length: Nanos(length),
                throughput: 1.0,
                largest: 16,
                mean_active: f64::from(capacity),
                was_used_up: true,
                was_slack: false,
            };
            let whole =
                RoundResult { throughput: gain, mean_active: half.mean_active * active_ratio, ..half };
            tokens.end_trial(whole, half, whole);
            tokens.end_round(whole);
        }
    }
    tokens.costs.factor(CostKind::Put)
}

#[test]
fn costs_are_fitted_only_to_rounds_that_a_trial_showed_to_be_saturated() {
    let factor = put_factor_after(1.1, 2.0, 512);
    assert!((3.5..4.5).contains(&factor), "{factor}");
    assert_eq!(put_factor_after(1.1, 1.2, 512), 1.0, "the load did not use more than half");
    assert_eq!(put_factor_after(1.9, 2.0, CAPACITY_MAX), 1.0, "the device could do more");
}

#[test]
fn an_idle_device_takes_any_command_and_then_none() {
    let mut tokens = DeviceTokens::new(StartingCosts::default());
    assert!(tokens.try_begin(60_000));
    assert!(!tokens.try_begin(1));
    tokens.end(60_000, None);
    assert!(tokens.try_begin(500) && tokens.try_begin(12) && !tokens.try_begin(1));
    assert_eq!((tokens.active(), tokens.capacity()), (512, 512));
}

#[test]
fn a_device_that_commits_in_groups_gets_large_ones() {
    // A group takes 100 us and 1 us for each command, one group at a time: the greater it is the more in a second.
    let (mut tokens, mut now, mut rate) = (DeviceTokens::new(StartingCosts::default()), Nanos(1), 0);
    for _ in 0..2000 {
        let began_at = now;
        let group = (0..).take_while(|_| tokens.try_begin(64)).count();
        let length = Nanos::from_micros(100 + group as u64);
        now = now + length;
        rate = group as u64 * 1_000_000_000 / length.0;
        for _ in 0..group {
            tokens.end(64, Some(EndedCommand { kind: CostKind::Put, bytes: 0, began_at, ended_at: now }));
        }
    }
    assert!(rate > 500_000, "{rate} in a second of a million, with {} tokens", tokens.capacity());
}

/// A device whose Puts are committed in groups, one at a time, and whose Gets do not wait for them: the commands that hosts with 96 in
/// flight get in each of these parts of Puts, a second each, with tokens or without.
fn commands_beside_groups(put_percents: &[u64], uses_tokens: bool) -> Vec<u64> {
    let (mut tokens, mut random) = (DeviceTokens::new(StartingCosts::default()), Prng::new(5));
    let mut gets = ModelDevice::new(32, 80, 80);
    // Of those that run: end, begin, kind, cost. Of those that were sent: the kind.
    let mut running = BinaryHeap::new();
    let (mut sent, mut group, mut next_group) = (VecDeque::new(), 0, Vec::new());
    let (mut now, mut done) = (Nanos::from_millis(1), Vec::new());
    let draw = |random: &mut Prng, percent: u64| random.next_u64() % 100 < percent;
    (0..96).for_each(|_| sent.push_back(draw(&mut random, put_percents[0])));
    for &percent in put_percents {
        let until = now + Nanos::from_secs(1);
        done.push(0);
        while now < until {
            while let Some(&is_put) = sent.front() {
                let kind = if is_put { CostKind::Put } else { CostKind::Get };
                let cost = tokens.costs().of(kind, 1000);
                if uses_tokens && !tokens.try_begin(cost) {
                    break;
                }
                sent.pop_front();
                match is_put {
                    true => next_group.push((now, cost)),
                    false => running.push(Reverse((gets.end_of(kind, now), now, false, cost))),
                }
            }
            if group == 0 {
                group = next_group.len();
                let end = now + Nanos::from_micros(2_000 + 20 * group as u64);
                next_group
                    .drain(..)
                    .for_each(|(began, cost)| running.push(Reverse((end, began, true, cost))));
            }
            let Reverse((ended_at, began_at, is_put, cost)) = running.pop().expect("one runs");
            now = ended_at;
            group -= usize::from(is_put);
            let kind = if is_put { CostKind::Put } else { CostKind::Get };
            if uses_tokens {
                tokens.end(cost, Some(EndedCommand { kind, bytes: 1000, began_at, ended_at }));
            }
            *done.last_mut().expect("one") += 1;
            sent.push_back(draw(&mut random, percent));
        }
    }
    done
}

#[test]
fn a_mix_that_changes_beside_group_commit_keeps_the_throughput() {
    let mixes = [100, 5, 50, 100, 0, 50];
    let (with, without) = (commands_beside_groups(&mixes, true), commands_beside_groups(&mixes, false));
    for ((percent, with), without) in mixes.iter().zip(with).zip(without) {
        assert!(with * 100 >= without * 85, "{percent} % Puts: {with} of {without}");
    }
}

#[test]
fn a_stall_of_a_single_command_changes_little() {
    let mut run = Saturated::new(ModelDevice::new(32, 80, 80));
    run.run(20_000);
    for _ in 0..10 {
        // One of the servers collects garbage for a millisecond.
        let until = run.now + Nanos::from_millis(1);
        run.device.free_at[0] = run.device.free_at[0].max(until);
        let capacities = run.run(2_000);
        assert!(capacities.iter().all(|&capacity| capacity >= 14), "{:?}", capacities.iter().min());
    }
}
